"""Guided backprop on the same models: regrad, Captum and zennit, and how far each is off.

The answer that is due comes from hooks on every ReLU in autograd's record of the plain model: what
arrives is cut at zero before the node, which itself lets through what had a positive input. An
error of 0 is right, and 1 is about as far off as the plain gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import regrad as rg
import regrad.torch
from tests.campaigns import public_oracle, public_table


class Digits(nn.Module):
    """A network for digits as tutorials write it, with ReLUs that are function calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(400, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


MODELS = ("digits", "googlenet", "densenet121", "resnet18", "regnet_y_400mf")


def model(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if name == "digits":
        return Digits().double().eval(), torch.rand(2, 1, 14, 14).double()
    built = public_table.classifier(name, False)
    return built.module.double(), built.args[0].double()


def oracle(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    ys, record = public_oracle.recorded(lambda: [net(x)])
    relus = [op.node for op in record.ops("Relu")]
    handles = [n.register_prehook(lambda dys: tuple(d.clamp(min=0) for d in dys)) for n in relus]
    (dx,) = torch.autograd.grad(ys[0][:, 3].sum(), x)
    for handle in handles:
        handle.remove()
    return dx


def plain(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(net(x)[:, 3].sum(), x)[0]


def ours(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with regrad.torch.gradient_override_map({"Relu": rg.rules.guided_relu}):
        y = net(x)
    return torch.autograd.grad(y[:, 3].sum(), x)[0]


def captum(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from captum.attr import GuidedBackprop

    return GuidedBackprop(net).attribute(x, target=3)


def zennit(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    from zennit.attribution import Gradient
    from zennit.composites import GuidedBackprop

    with Gradient(model=net, composite=GuidedBackprop()) as attributor:
        return attributor(x, torch.eye(10, dtype=x.dtype)[[3] * len(x)])[1]


WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "regrad": ours, "Captum": captum, "zennit": zennit, "plain gradient": plain,
}  # fmt: skip


def errors() -> dict[str, dict[str, Any]]:
    """The relative error of each library for each model, or the error that it raised."""
    return {name: {way: error(name, f) for way, f in WAYS.items()} for name in MODELS}


def error(name: str, attribute: Callable[..., torch.Tensor]) -> Any:
    public_table.prepared("torchvision")
    net, x = model(name)
    due = oracle(net, x.clone().requires_grad_())
    try:
        found = attribute(net, x.clone().requires_grad_())
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"[:200]
    return float(f"{public_oracle.error([found.detach()], [due]):.2g}")
