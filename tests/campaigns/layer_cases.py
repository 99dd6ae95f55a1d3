"""The programs that explain layers, by paths and by maps: regrad's, Captum's and grad-cam's.

The programs are as in `relevance_cases`. They leave their answer in `R`.
"""

import contextlib
from collections.abc import Generator, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.campaigns.relevance_cases import Case

PACKAGES = ("torch", "torchvision", "captum", "grad-cam")
LAYERS = {"VGG": "features.3", "ResNet-18": "layer3.0"}
WRITTEN = {"VGG": "features.2"}  # (a convolution whose output a ReLU writes over)
MAPS = {
    "grad": "GradCAM", "++": "GradCAMPlusPlus", "layer": "LayerCAM", "hires": "HiResCAM",
    "x": "XGradCAM", "element": "GradCAMElementWise",
}  # fmt: skip


def names() -> dict[str, Any]:
    """The names that programs use."""
    import captum.attr
    import pytorch_grad_cam

    from regrad.rules import attribution, lrp

    return {"torch": torch, "nn": nn, "F": F, "A": attribution, "lrp": lrp, "fixed": fixed,
            "captum": captum.attr, "cams": pytorch_grad_cam}  # fmt: skip


@contextlib.contextmanager
def fixed() -> Generator[None]:
    """A block in which Captum draws the numbers that regrad draws with the seed 0."""
    noise, random = np.random.default_rng(0), np.random.default_rng(0)

    def normal(mean: Any, std: torch.Tensor) -> torch.Tensor:
        return mean + std * torch.as_tensor(noise.normal(size=std.shape)).to(std)

    def uniform(low: float, high: float, size: int) -> np.ndarray:
        found = []
        for _ in range(size):
            found.append(random.uniform(low, high))
            random.integers(1, size=1)  # (a reference for each sample)
        return np.array(found)

    with patch.object(torch, "normal", normal), patch.object(np.random, "uniform", uniform):
        yield


def of_layer(model: str, layers: dict[str, str] = LAYERS) -> str:
    return f'layer = "{layers[model]}"\n'


def captum(model: str, call: str, net: str = "model", layers: dict[str, str] = LAYERS) -> str:
    return f"layer = {net}.get_submodule({layers[model]!r})\nR = captum.{call}"


def of_cams(kind: str, model: str, net: str = "model", layers: dict[str, str] = LAYERS) -> str:
    score = "lambda y: 1e4 * y[3]"  # (grad-cam adds 1e-6 to squares of gradients)
    return (
        f"maps = cams.{MAPS[kind]}({net}, [{net}.get_submodule({layers[model]!r})])\n"
        f"R = torch.tensor(maps(x, [{score}] * len(x)))"
    )


def our_cams(kind: str, model: str, layers: dict[str, str] = LAYERS) -> str:
    return (
        of_layer(model, layers)
        + f'R = A.cam(model, x, lambda y: 1e4 * y[:, 3], layer, "{kind}", size=x.shape[2:])\n'
        "R = (R - R.amin((1, 2), True)) / (R.amax((1, 2), True) - R.amin((1, 2), True))"
    )


GUIDED = (
    "heat = A.cam(model, x, 3, layer)[:, None]\n"
    "R = F.interpolate(heat, x.shape[2:]) * A.attribute(model, x, 3, lrp.guided()).gradients"
)
ALONG = "reference=x.flip(0), along=A.integrated(8)"
STEPS = 'target=3, n_steps=8, method="gausslegendre"'
TRAPEZOIDS = 'target=3, n_steps=8, method="riemann_trapezoid"'
NOISE = 'nt_samples=4, stdevs=0.1 * (x.max() - x.min()).item(), target=3, nt_type="{}"'


def right_cases() -> Iterator[Case]:
    for model in LAYERS:
        at = of_layer(model)
        for name, ours, theirs in (
            ("layer gradient × activation", "A.attribute(model, x, 3, {}, layer).layers[layer]",
             "LayerGradientXActivation(model, layer).attribute(x, target=3)"),
            ("internal influence",
             f"A.attribute(model, x, 3, {{}}, layer, {ALONG}).layer_gradients[layer]",
             f"InternalInfluence(model, layer).attribute(x, x.flip(0), {STEPS})"),
            ("layer integrated gradients",
             f"A.attribute(model, x, 3, {{}}, at=layer, {ALONG}).layers[layer]",
             f"LayerIntegratedGradients(model, layer).attribute(x, x.flip(0), {STEPS})"),
            ("neuron conductance",
             f"A.attribute(model, x, 3, {{}}, through=(layer, (2, 0, 0)), {ALONG}).inputs",
             f"NeuronConductance(model, layer).attribute(x, (2, 0, 0), x.flip(0), {STEPS})"),
            ("layer conductance",
             "A.attribute(model, x, 3, {}, layer, reference=x.flip(0), "
             "along=A.conductance(8)).layers[layer]",
             f"LayerConductance(model, layer).attribute(x, x.flip(0), {TRAPEZOIDS})\n"
             "back = captum.LayerConductance(model, layer)\n"
             f"R = (R - back.attribute(x.flip(0), x, {TRAPEZOIDS})) / 2"),
            ("Grad-CAM", "A.cam(model, x, 3, layer)[:, None]",
             "LayerGradCam(model, layer).attribute(x, target=3, relu_attributions=True)"),
        ):  # fmt: skip
            yield Case(model, name, "captum", f"{at}R = {ours}", captum(model, theirs))
        yield Case(model, "guided Grad-CAM", "captum", at + GUIDED,
                   captum(model, "GuidedGradCam(model, layer).attribute(x, target=3)"))  # fmt: skip
        for kind in MAPS:
            yield Case(model, MAPS[kind], "grad-cam", our_cams(kind, model), of_cams(kind, model))
    yield Case("VGG", "GradientShap", "captum",
               "x = x[:1]\nR = A.attribute(model, x, 3, {}, along=A.expected(x * 0, 5)).inputs",
               "x = x[:1]\nwith fixed():\n"
               "    R = captum.GradientShap(model).attribute(x, x * 0, 5, target=3)")  # fmt: skip
    for kind, statistic in (("smoothgrad", "mean"), ("smoothgrad_sq", "squares"),
                            ("vargrad", "variance")):  # fmt: skip
        yield Case("VGG", f"NoiseTunnel, {kind}", "captum",
                   "x = x[:1]\n"
                   f'along = A.smoothed(4, 0.1, 0, "{statistic}")\n'
                   "R = A.attribute(model, x, 3, {}, along=along).gradients",
                   "x = x[:1]\nwith fixed():\n    tunnel = captum.NoiseTunnel("
                   "captum.Saliency(model))\n"
                   f"    R = tunnel.attribute(x, abs=False, {NOISE.format(kind)})")  # fmt: skip
    yield Case("a residual network of modules", "DeepLiftShap", "captum",
               "R = lrp.relevance(model, x, 3, lrp.deep_lift(), reference=[*x[:3, None]]).inputs",
               "R = captum.DeepLiftShap(model).attribute(x, x[:3], target=3)")  # fmt: skip


def wrong_cases() -> Iterator[Case]:
    at, note = of_layer("VGG", WRITTEN), "that `nn.ReLU(inplace=True)` writes over the output"
    call = "LayerIntegratedGradients({}, layer).attribute(x, x.flip(0), " + STEPS + ")"
    theirs, due = (captum("VGG", call.format(net), net, WRITTEN) for net in ("model", "twin"))
    ours = f"{at}R = A.attribute(model, x, 3, {{}}, at=layer, {ALONG}).layers[layer]"
    yield Case("VGG", "layer integrated gradients", "captum", ours, theirs, due, note)
    call = "LayerGradCam({}, layer).attribute(x, target=3, relu_attributions=True)"
    theirs, due = (captum("VGG", call.format(net), net, WRITTEN) for net in ("model", "twin"))
    ours = f"{at}R = A.cam(model, x, 3, layer)[:, None]"
    yield Case("VGG", "Grad-CAM", "captum", ours, theirs, due, note)
    for kind in MAPS:
        theirs, due = (of_cams(kind, "VGG", net, WRITTEN) for net in ("model", "twin"))
        ours = our_cams(kind, "VGG", WRITTEN)
        yield Case("VGG", MAPS[kind], "grad-cam", ours, theirs, due, note)
    model, layer = "a residual network of functions", {"a residual network of functions": "stem"}
    call = "GuidedGradCam({}, layer).attribute(x, target=3)"
    theirs, due = (captum(model, call.format(net), net, layer) for net in ("model", "twin"))
    yield Case(model, "guided Grad-CAM", "captum", of_layer(model, layer) + GUIDED, theirs, due,
               "`F.relu`")  # fmt: skip


def cases() -> list[Case]:
    return [*right_cases(), *wrong_cases()]
