"""Networks of third-party libraries under a rule for one of their Functions, and in an empty mode.

The rules compute the same as the libraries' own backward passes. So both sides have the same
gradients, and the difference is the cost of the scope. The libraries are in the extra
`bench-applied`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from math import pi
from typing import Any

import torch
from torch import nn

import regrad.torch
from bench.contestants import Contestants
from bench.foreign_torch import Empty, alike
from bench.measures import Speed
from bench.report import Measure

STEPS, BATCH, WIDTH = 25, 16, 64
Layer = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]  # currents, state -> spikes, state


def atan(dy: torch.Tensor, input_: torch.Tensor, alpha: float) -> torch.Tensor:
    return alpha / 2 / (1 + (pi / 2 * alpha * input_).pow_(2)) * dy


def sigmoid(dy: torch.Tensor, x: torch.Tensor, alpha: float) -> torch.Tensor:
    s = (alpha * x).sigmoid_()
    return dy * (1 - s) * s * alpha


def superspike(dy: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
    return dy / (torch.abs(input_tensor) + 1.0).pow(2)


def as_it_is(dy: torch.Tensor) -> torch.Tensor:
    return dy


class Lsq(torch.autograd.Function):
    """Four bits with a learned step (Esser et al. 2020), in the usual form for torch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, step)
        return (x / step).clamp(-8, 7).round() * step

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return of_a_step(dy, *ctx.saved_tensors)


def of_a_step(
    dy: torch.Tensor, x: torch.Tensor, step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    v = x / step
    q = v.clamp(-8, 7)
    inside = v == q
    slope = q.round() - v * inside
    return dy * inside, (dy * slope).sum() / (7 * x.numel()) ** 0.5


def of_snntorch() -> Layer:
    cell = importlib.import_module("snntorch").Leaky(beta=0.9)
    return lambda x, held: cell(x, cell.init_leaky() if held is None else held)


def of_spikingjelly() -> Layer:
    library = importlib.import_module("spikingjelly.activation_based.neuron")

    def layer(x: torch.Tensor, held: Any) -> tuple[torch.Tensor, Any]:
        cell = library.LIFNode() if held is None else held
        return cell(x), cell

    return layer


def of_norse() -> Layer:
    return importlib.import_module("norse.torch").LIFCell()


def functions_of(y: torch.Tensor) -> dict[str, Any]:
    """Return the Functions that made a tensor, by name. Libraries do not export all of them."""
    found, seen, nodes = {}, set(), [y.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if (function := getattr(type(node), "_forward_cls", None)) is not None:
                found[function.__name__] = function
            nodes += [around for around, _ in node.next_functions]
    return found


def under_a_rule(run: Callable[[], torch.Tensor], name: str, rule: Any, x: Any) -> Contestants:
    """Forward and backward pass, under a rule for the Function of a name and in an empty mode."""
    torch.set_num_threads(1)
    rules = {functions_of(run())[name]: rule}

    def ours() -> torch.Tensor:
        with regrad.torch.gradient_override_map(rules):
            y = run()
        return torch.autograd.grad(y, x)[0]

    def bare() -> torch.Tensor:
        with Empty():
            y = run()
        return torch.autograd.grad(y, x)[0]

    return alike({"regrad": ours, "empty mode": bare})


def spiking(make: Callable[[], Layer], name: str, rule: Any) -> Contestants:
    """A layer of spiking neurons behind a dense layer."""
    torch.manual_seed(0)
    layer, dense = make(), nn.Linear(WIDTH, WIDTH)
    x = torch.rand(STEPS, BATCH, WIDTH) * 4

    def run() -> torch.Tensor:
        held, count = None, torch.zeros(())
        for each in x:
            spikes, held = layer(dense(each), held)
            count = count + spikes.mean()
        return count

    return under_a_rule(run, name, rule, dense.weight)


def quantised() -> Contestants:
    """Four layers of brevitas with weights of four bits."""
    torch.manual_seed(0)
    library = importlib.import_module("brevitas.nn")
    layers = [
        layer
        for _ in range(4)
        for layer in (
            library.QuantLinear(WIDTH, WIDTH, bias=True, weight_bit_width=4),
            library.QuantReLU(bit_width=4),
        )
    ]
    model, x = nn.Sequential(*layers).eval(), torch.rand(BATCH, WIDTH, requires_grad=True)
    return under_a_rule(lambda: model(x).sum(), "RoundSteFn", as_it_is, x)


def learned_steps() -> Contestants:
    """Eight dense layers whose weights have a learned step."""
    torch.manual_seed(0)
    x = torch.rand(BATCH, WIDTH, requires_grad=True)
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(8)]
    steps = [torch.tensor(0.1, requires_grad=True) for _ in weights]

    def run() -> torch.Tensor:
        y = x
        for w, step in zip(weights, steps, strict=True):
            y = torch.relu(y @ Lsq.apply(w, step)) / 8
        return y.sum()

    return under_a_rule(run, "Lsq", of_a_step, steps[0])


def _measures() -> Iterator[tuple[str, Measure]]:
    bound, title = {"empty mode": 1.3}, f"{STEPS} steps of spiking neurons, "
    rows = (("snntorch", of_snntorch, "ATan", atan),
            ("spikingjelly", of_spikingjelly, "_SurrogateSpike", sigmoid),
            ("norse", of_norse, "SuperSpike", superspike))  # fmt: skip
    for library, *case in rows:
        yield library, Speed(title + library, lambda case=case: spiking(*case), bound)
    yield "lsq", Speed("eight layers with learned steps (LSQ)", learned_steps, bound)
    yield "brevitas", Speed("a network of brevitas, four bits", quantised, bound)


MEASURES: dict[str, Measure] = dict(_measures())
