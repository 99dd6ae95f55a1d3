"""Small networks in float64 whose weights are a formula, and zennit's relevances of their inputs.

`python -m tests.helpers.relevance_networks` writes tests/golden/zennit_lrp.json, with zennit and
torchvision installed.
"""

from __future__ import annotations

import itertools
import json

import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.paths import ROOT

GOLDEN = ROOT / "tests/golden/zennit_lrp.json"
LINEAR = (F.linear, F.conv1d, "Conv2D", "Conv3D", F.conv_transpose1d, F.conv_transpose2d)


def numbers(*shape, seed=0):
    """Numbers between -1 and 1, the first of them 0."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count, dtype=torch.float64) * (1.7 + seed) ** 2).reshape(shape)


def fill(model, bias=True):
    """Return a model with weights by the formula, of a variance that keeps values of order 1."""
    seeds = itertools.count(1)
    for name, p in model.double().eval().named_parameters():
        fan_in = p[0].numel() if p.dim() > 1 else 4
        p.data = numbers(*p.shape, seed=next(seeds) / 7) * (2 / fan_in) ** 0.5
        if name.endswith("bias") and not bias:
            p.data.zero_()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = numbers(*module.running_mean.shape, seed=0.3) / 3 * bias
            module.running_var = numbers(*module.running_var.shape, seed=0.4).abs() + 0.5
            module.weight.data = module.weight.data.abs() + 0.5
    return model


class Layer(nn.Sequential):
    """A layer, flattened."""

    def __init__(self, layer):
        super().__init__(layer, nn.Flatten())


class VGG(nn.Module):
    """Convolutions in a row, with ReLUs in place."""

    def __init__(self, norm=False):
        super().__init__()
        parts = []
        for i, o in ((2, 4), (4, 6)):
            parts += [nn.Conv2d(i, o, 3, padding=1), *([nn.BatchNorm2d(o)] if norm else [])]
            parts += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*parts)
        self.head = nn.Sequential(nn.Linear(24, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3))

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


LAYERS = {
    "linear": (lambda: nn.Linear(3, 4), (2, 3)),
    "conv2d": (lambda: Layer(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2)), (1, 2, 4, 4)),
    "conv1d": (lambda: Layer(nn.Conv1d(2, 3, 3, dilation=2)), (1, 2, 7)),
    "transposed": (lambda: Layer(nn.ConvTranspose2d(2, 2, 3, stride=2)), (1, 2, 2, 2)),
}
NETWORKS = {"vgg": (VGG, (1, 2, 8, 8)), "vgg_norm": (lambda: VGG(True), (1, 2, 8, 8))}
RULES = {
    "epsilon": ("Epsilon", (0.1,)), "gamma": ("Gamma", (0.3,)), "z_plus": ("ZPlus", ()),
    "alpha_beta": ("AlphaBeta", (2, 1)), "z_box": ("ZBox", (-1.0, 1.0)),
    "w_square": ("WSquare", ()), "flat": ("Flat", ()),
}  # fmt: skip
COMPOSITES = {
    "epsilon_plus": ("EpsilonPlus", ()), "epsilon_plus_flat": ("EpsilonPlusFlat", ()),
    "epsilon_gamma_box": ("EpsilonGammaBox", (-1.0, 1.0)),
    "epsilon_alpha2_beta1": ("EpsilonAlpha2Beta1", ()),
    "epsilon_alpha2_beta1_flat": ("EpsilonAlpha2Beta1Flat", ()),
    "excitation": ("ExcitationBackprop", ()), "guided": ("GuidedBackprop", ()),
}  # fmt: skip


def record():
    """Write what zennit computes."""
    from importlib.metadata import version

    import zennit.composites as composites
    import zennit.rules as rules
    import zennit.types as types

    found = {"zennit": version("zennit"), "torch": torch.__version__}
    for name, (make, shape) in LAYERS.items():
        for ours, (theirs, args) in RULES.items():
            hook = getattr(rules, theirs)(*args)
            composite = composites.LayerMapComposite([(types.Linear, hook)])
            found[f"{name}.{ours}"] = of_zennit(fill(make()), numbers(*shape), composite)
    for name, (make, shape) in NETWORKS.items():
        for ours, (theirs, args) in COMPOSITES.items():
            composite = getattr(composites, theirs)(*args)
            found[f"{name}.{ours}"] = of_zennit(fill(make()), numbers(*shape), composite)
    GOLDEN.write_text(json.dumps(found, indent=0).replace(",\n", ", ") + "\n")


def of_zennit(model, x, composite):
    """Return zennit's relevance for the first output; of guided backprop, gradient times input."""
    x = x.clone().requires_grad_()
    is_gradient = type(composite).__name__ == "GuidedBackprop"
    with composite.context(model):
        y = model(x)
        seed = torch.zeros_like(y)
        seed[:, 0] = 1.0 if is_gradient else y[:, 0].detach()
        (found,) = torch.autograd.grad(y, x, seed)
    return (found * x.detach() if is_gradient else found).flatten().tolist()


if __name__ == "__main__":
    record()


def results_of(form, h, stack):
    """Return an output and others beside it; the last three have no batch in front, or mix it."""
    return {
        "tuple": (10 * h, h), "list": [10 * h, h, 2 * h, 3 * h], "dict": {"y": (10 * h, None)},
        "scalar": (10 * h, h.sum(), 3), "states": (10 * h, stack([h] * 3)),
        "transposed": (10 * h).T, "mean": 10 * (h - h.mean(0)), "sum": h.sum(),
    }[form]  # fmt: skip


def first_of(y):
    y = y.get("y") if isinstance(y, dict) else y
    return (y[0] if isinstance(y, list | tuple) else y)[:, 0]
