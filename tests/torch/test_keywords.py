"""Arguments given by keyword: gradients have the order of the signature, whatever the caller's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regrad as rg
import regrad.torch
from regrad.errors import PassedOverError

override = regrad.torch.gradient_override_map


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1


A, B, C, M = numbers(2, 3), numbers(2, 3, seed=1), numbers(2, 3, seed=2), numbers(3, 2, seed=3)


@torch.library.custom_op("keywords::mix", mutates_args=())
def mix(first: torch.Tensor, second: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return scale * first + 3 * second


@mix.register_fake
def _(first, second, scale=2.0):
    return torch.empty_like(first)


mix.register_autograd(
    lambda ctx, dy: (ctx.scale * dy, 3 * dy, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[2]),
)


class Two(nn.Module):
    def forward(self, first, second, scale=2.0):
        return scale * first + 3 * second


# The tensors in the order of the signature, and in that of the caller.
CALLS: dict[str, tuple[Any, dict[str, torch.Tensor], dict[str, Any]]] = {
    "lerp": (torch.lerp, {"input": A, "end": B, "weight": C}, {}),
    "lerp by a number": (torch.lerp, {"input": A, "end": B}, {"weight": 0.5}),
    "cosine_similarity": (F.cosine_similarity, {"x1": A, "x2": B}, {"dim": 1}),
    "pairwise_distance": (F.pairwise_distance, {"x1": A, "x2": B}, {}),
    "fmod": (torch.fmod, {"input": A, "other": B}, {}),
    "cross": (torch.cross, {"input": A, "other": B}, {"dim": 1}),
    "linalg.cross": (torch.linalg.cross, {"input": A, "other": B}, {}),
    "bilinear": (F.bilinear, {"input1": A, "input2": B, "weight": numbers(4, 3, 3)}, {}),
    "addcmul": (torch.addcmul, {"input": A, "tensor1": B, "tensor2": C}, {"value": 2}),
    "addmm": (torch.addmm, {"input": numbers(2, 2), "mat1": A, "mat2": M}, {}),
    "mse_loss": (F.mse_loss, {"input": A, "target": B}, {}),
    "a module": (Two(), {"first": A, "second": B}, {"scale": 5.0}),
    "a custom op": (mix, {"first": A, "second": B}, {"scale": 5.0}),
    "its overload": (torch.ops.keywords.mix.default, {"first": A, "second": B}, {}),
}


def called(function, given, options, xs):
    """Call a function with its keywords in the opposite order."""
    named = dict(zip(given, xs, strict=True), **options)
    return function(**dict(reversed(named.items()))).sum()


def scaled(dxs):
    return [(i + 2) * dx for i, dx in enumerate(dxs)]


# A rule, and the gradients that it gives by the plain ones and by the inputs.
RULES: dict[str, tuple[Any, Any]] = {
    "xs": (lambda dy, xs: scaled(x * x for x in xs), lambda dxs, xs: scaled(x * x for x in xs)),
    "builtin": (lambda dy, builtin: scaled(builtin(dy)), lambda dxs, xs: scaled(dxs)),
}


@pytest.mark.versions
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_have_the_order_of_the_signature(name, backward, rule):
    function, given, options = CALLS[name]
    xs = [x.clone().requires_grad_() for x in given.values()]
    value, due = RULES[rule]
    expected = due(torch.autograd.grad(called(function, given, options, xs), xs), given.values())
    is_module = isinstance(function, nn.Module)
    key, model = (rg.at(""), function) if is_module else (function, None)
    with override({key: value}, model=model) as used:
        y = called(function, given, options, xs)
    if backward:
        y.backward()
        found = [x.grad for x in xs]
    else:
        found = torch.autograd.grad(y, xs)
    used.assert_fired()
    for dx, right in zip(found, expected, strict=True):
        torch.testing.assert_close(dx, right)


def by_keyword(x):
    return torch.lerp(end=2 * x, input=x, weight=0.25).sum()


@pytest.mark.parametrize(
    "way", ["eager", "compiled", "checkpoint", "reentrant", "func", "autocast", "second"]
)
def test_the_order_holds_everywhere(way):
    """The gradient by `input` is 5 x, and by `end` 7: 5 x + 14."""
    x = torch.ones(3, requires_grad=True)
    rules = {torch.lerp: lambda dy, input, end, weight: (5 * dy * input, 28 * dy * weight)}
    with override(rules):
        if way == "func":
            dx = torch.func.grad(by_keyword)(x.detach())
        elif way in ("checkpoint", "reentrant"):
            y = torch.utils.checkpoint.checkpoint(by_keyword, x, use_reentrant=way == "reentrant")
            (dx,) = [y.backward(), x.grad][1:]
        elif way == "compiled":
            torch._dynamo.reset()
            (dx,) = torch.autograd.grad(torch.compile(by_keyword, backend="aot_eager")(x), x)
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                y = by_keyword(x)
            (dx,) = torch.autograd.grad(y, x, create_graph=way == "second")
    if way == "second":
        assert torch.autograd.grad(dx.sum(), x)[0].tolist() == [5.0] * 3
    assert dx.tolist() == [19.0] * 3


def test_keywords_of_unknown_order_are_refused(monkeypatch):
    monkeypatch.setattr("regrad.torch.arguments.forms_of", lambda function: [])
    x = torch.ones(3, requires_grad=True)
    with (
        pytest.raises(PassedOverError, match="Pass the tensors by position"),
        override({torch.lerp: lambda dy, xs: xs}),
    ):
        by_keyword(x)
