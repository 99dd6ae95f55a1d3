"""Models under torch.compile: a rule against custom ops in an edited model, and compile times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
import torch.nn.functional as F
from torch import nn

import regrad.torch
from bench.contestants import Contestants
from bench.foreign_torch import BATCH, DEVICE, SIZE, alike, done, guided_in_torch, resnet18
from bench.measures import Speed
from bench.report import Measure

# -- custom ops, in the form of torch's documentation ----------------------------------------------


@torch.library.custom_op("regrad_bench::guided", mutates_args=())
def guided(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0)


@torch.library.custom_op("regrad_bench::gated", mutates_args=())
def gated(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x)


def gate_in_torch(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The half rule of layer-wise relevance: the gate of a SiLU is treated as a constant."""
    return dy * torch.sigmoid(x)


for _op, _rule in ((guided, guided_in_torch), (gated, gate_in_torch)):
    _op.register_fake(torch.empty_like)
    _op.register_autograd(
        lambda ctx, dy, rule=_rule: rule(dy, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )


class Call(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


# -- a Llama block ---------------------------------------------------------------------------------

WIDTH, HEADS, LENGTH = 128, 4, 64


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Llama(nn.Module):
    """Attention with rotary positions, and a gated layer, each behind an RMS norm."""

    def __init__(self, silu: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.silu = Norm(), Norm(), silu
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        size = WIDTH // HEADS // 2
        angles = torch.arange(LENGTH)[:, None] * 10_000 ** (-torch.arange(size) / size)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turned(self, x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)

    def forward(self, x: Any) -> Any:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(self.silu(self.gate(y)) * self.up(y))


# -- steps -----------------------------------------------------------------------------------------

Made = tuple[Callable[[nn.Module], nn.Module], tuple[int, ...], nn.Module, Any, str, Any]
RESNET: Made = resnet18, (BATCH, 3, SIZE, SIZE), nn.ReLU(), guided, "Relu", guided_in_torch
LLAMA: Made = Llama, (BATCH, LENGTH, WIDTH), nn.SiLU(), gated, "Silu", gate_in_torch


def step(made: Made, by_hand: bool = False, rules: Any = None) -> Callable[[], torch.Tensor]:
    """Return a compiled step of gradient descent, which returns a gradient."""
    net, shape, layer, op, *_ = made
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = net(Call(op) if by_hand else layer).to(DEVICE)
    model = torch.compile(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    x = torch.randn(shape).to(DEVICE)

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        with regrad.torch.gradient_override_map(rules) if rules else nullcontext():
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return done(next(plain.parameters()).grad)  # pyright: ignore

    return run


def steps(made: Made) -> Contestants:
    ours = step(made, rules={made[4]: made[5]})
    return alike({"regrad": ours, "custom_op": step(made, by_hand=True)})


def compilations(made: Made) -> Contestants:
    """The time to compile a model up to the first gradient, without caches on disk."""

    def anew(rules: Any) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            torch._dynamo.reset()
            with torch._inductor.config.patch(force_disable_caches=True), catch_warnings():
                simplefilter("ignore")  # (about the caches)
                return step(made, rules=rules)()

        return run

    rules = {made[4]: made[5]}
    return {"regrad": anew(rules), "no rule": anew(None)}


def _measures() -> dict[str, Measure]:
    found: dict[str, Measure] = {}
    for name, title, made in (
        ("resnet", "ResNet-18", RESNET),
        ("llama", "Llama block", LLAMA),
    ):
        found[f"compiled-{name}"] = Speed(
            f"compiled step of a {title}, a rule", partial(steps, made), {"custom_op": 1.1}
        )
        found[f"compiling-{name}"] = Speed(
            f"compiling a {title}, a rule", partial(compilations, made), {"no rule": 1.3}, rounds=3
        )
    return found


MEASURES = _measures()
