"""What is kept of calls and of rules in torch: each part of the key is needed.

`test_calls_in_place.py` drops parts by their type; here a part goes by its place or its meaning.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import regrad as rg
from regrad.core import registry
from regrad.torch import call_cache, functions, recorded, rulesets
from tests.torch.common import D, function, override


def slope(f, dy=None):
    """The gradient of a function, as a function."""
    return lambda x: torch.autograd.grad(y := f(x), x, torch.ones_like(y) if dy is None else dy)[0]


def outcome(rules, first, second):
    """The gradient by the second call, after the first has come three times, and the hits."""
    rulesets._SETS.clear()
    x = torch.linspace(-1, 1, 12, dtype=D).reshape(3, 4).requires_grad_()
    try:
        with override(rules) as used:
            for call in (first, first, first, second):
                dx = call(x)
        return dx.dtype, dx.tolist(), [(hit.count, hit.ran) for hit in used.hits]
    except Exception as error:
        return type(error)
    finally:
        rulesets._SETS.clear()


# -- calls -----------------------------------------------------------------------------------------


def everywhere(change):
    """Apply a change to all parts of a key, all the way down."""

    def changed(part):
        if type(part) is tuple:
            part = tuple(map(changed, part))
        return change(part)

    return changed


def is_number(part):
    return isinstance(part, str) and part.lstrip("-").startswith("0x")


CALLS = {  # a part, the key without it, rules, and two calls that this part alone tells apart
    "the sign of zero": (
        everywhere(lambda p: p.lstrip("-") if is_number(p) else p),
        {"LeakyRelu": lambda dy, alpha: dy * math.copysign(3.0, alpha)},
        slope(lambda x: F.leaky_relu(x, 0.0)), slope(lambda x: F.leaky_relu(x, -0.0)),
    ),
    "the class of a value": (
        everywhere(lambda p: None if p in (int, bool) else int(p) if type(p) is bool else p),
        {"Softmax": lambda dy, axis: dy * len(type(axis).__name__)},
        slope(lambda x: F.softmax(x, 1)), slope(lambda x: F.softmax(x, True)),
    ),
    "the name of a keyword": (
        everywhere(lambda p: "" if p in ("beta", "threshold") else p),
        {"Softplus": lambda dy, x: dy * torch.sign(x)},
        slope(lambda x: F.softplus(x, beta=2.0) ** 2),
        slope(lambda x: F.softplus(x, threshold=2.0) ** 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("part", CALLS)
def test_each_part_of_the_key_of_a_call_is_needed(part, monkeypatch):
    without, *given = CALLS[part]
    due, kinds_of = outcome(*given), call_cache.kinds_of
    with monkeypatch.context() as patch:  # (the general road)
        patch.setattr(call_cache, "is_grad_enabled", lambda: False)
        assert outcome(*given) == due
    monkeypatch.setattr(call_cache, "kinds_of", lambda *args: without(kinds_of(*args)))
    assert outcome(*given) != due


class Writes(torch.autograd.Function):
    """Writes into its input, if that is large."""

    @staticmethod
    def forward(ctx, x):
        if x.numel() < 12:
            return x * 2
        ctx.mark_dirty(x)
        return x.mul_(2)


Times = function(lambda a, b: a * b, lambda dy, a, b: (dy * b, dy * a), "Times")
FUNCTIONS = {  # the same of calls of a Function
    "what is differentiated": (
        1, {Times: lambda dy, x: dy * x},
        slope(lambda x: Times.apply(x, 3 * x.detach())),
        slope(lambda x: Times.apply(3 * x.detach(), x)),
    ),
    "what is written to": (
        2, {Writes: lambda dy, x: dy * x},
        slope(lambda x: Writes.apply(x[:2] * 1)), slope(lambda x: Writes.apply(x * 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("part", FUNCTIONS)
def test_each_part_of_the_key_of_a_function_is_needed(part, monkeypatch):
    place, *given = FUNCTIONS[part]
    due, kinds = outcome(*given), functions._kinds
    with monkeypatch.context() as patch:  # (the general road)
        patch.setattr(functions, "_kinds", lambda *args: None)
        assert outcome(*given) == due
    without = lambda key: key and tuple(p for i, p in enumerate(key) if i != place)  # noqa: E731
    monkeypatch.setattr(functions, "_kinds", lambda *args: without(kinds(*args)))
    assert outcome(*given) != due


# -- recordings of rules in regrad's functions -----------------------------------------------------

Positive = function(lambda x: x[x > 0], lambda dy, x: torch.zeros_like(x), "Positive")


def leaf_on(device):
    return torch.ones(3, 4, dtype=D, device=device, requires_grad=True)


def under_another_default(x):
    with rg.default_dtype("float64"):
        return slope(torch.tanh)(x)


def registered(x):
    """A call after an op has another rule."""
    op = registry.OPS["Sin"]
    rule = op.rule
    op.rule, registry.version = registry.OPS["Cos"].rule, registry.version + 1
    try:
        return slope(torch.tanh)(x)
    finally:
        op.rule, registry.version = rule, registry.version + 1


FIXED, KINDS, DEVICE, DEFAULT, VERSION = range(5)  # places in the key
RECORDINGS = {
    "an attribute": (FIXED, {"LeakyRelu": lambda dy, alpha: rg.multiply(dy, alpha)},
                     slope(lambda x: F.leaky_relu(x, 0.1)), slope(lambda x: F.leaky_relu(x, 0.5))),
    "a shape": (KINDS, {Positive: lambda dy, x: rg.multiply(x, float(dy.shape[0]))},
                slope(Positive.apply), slope(lambda x: Positive.apply(x + 0.9))),
    "the device": (DEVICE, {"Relu": lambda dy, x: rg.where(x > 0, dy, 0.0)},
                   lambda x: slope(torch.relu)(leaf_on("meta")),
                   lambda x: slope(torch.relu)(leaf_on("cpu"))),
    "the default dtype": (DEFAULT, {"Tanh": lambda dy, x: rg.multiply(dy, rg.mean(x > -0.4))},
                          slope(torch.tanh), under_another_default),
    "the registry": (VERSION, {"Tanh": lambda dy, x: rg.multiply(dy, rg.grad(rg.sin)(x))},
                     slope(torch.tanh), registered),
}  # fmt: skip


def without_part(place):
    key_of = recorded._key
    return lambda *args: tuple([p if i != place else 0 for i, p in enumerate(key_of(*args))])


@pytest.mark.parametrize("part", RECORDINGS)
def test_each_part_of_the_key_of_a_recording_is_needed(part, monkeypatch):
    place, *given = RECORDINGS[part]
    due = outcome(*given)
    with monkeypatch.context() as patch:  # (no recording)
        patch.setattr(recorded.Recordings, "are_possible", lambda self: False)
        assert outcome(*given) == due
    monkeypatch.setattr(recorded, "_key", without_part(place))
    assert outcome(*given) != due
