"""Calls whose arguments and results hold tensors in objects, under rules for whole calls."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import regrad as rg
import regrad.torch
from tests.torch.common import D, close, numbers, override
from tests.torch.placed import refused

at = rg.at


@dataclass
class Output:
    y: Any
    more: Any = None
    count: int = 3


@dataclass(frozen=True)
class Frozen:
    y: Any
    more: Any = None


@dataclass(slots=True)
class Slots:
    y: Any
    more: Any = None


class Named(NamedTuple):
    y: Any
    more: Any = None


class ModelOutput(OrderedDict):
    """An ordered dict whose items are also attributes, written like the class of transformers."""

    def __post_init__(self):
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __reduce__(self):
        make, _, *rest = super().__reduce__()
        return make, tuple([getattr(self, f.name) for f in fields(self)]), *rest

    def to_tuple(self):
        return tuple([self[key] for key in self.keys()])


@dataclass
class Masked(ModelOutput):
    loss: Any = None
    logits: Any = None
    hidden: Any = None


MAKERS = {
    "dataclass": (lambda a, b: Output(a, [b, None]), lambda o: (o.y, o.more[0])),
    "frozen": (lambda a, b: Frozen(a, {"k": b}), lambda o: (o.y, o.more["k"])),
    "slots": (lambda a, b: Slots(a, b), lambda o: (o.y, o.more)),
    "nested": (lambda a, b: {"p": Output(Frozen(a), b)}, lambda o: (o["p"].y.y, o["p"].more)),
    "ModelOutput": (lambda a, b: Masked(logits=a, hidden=(b,)), lambda o: (o.logits, o[1][0])),
    "named tuple": (Named, lambda o: (o.y, o.more)),
    "ordered dict": (lambda a, b: OrderedDict(z=a, a=b), lambda o: (o["z"], o["a"])),
    "user dict": (lambda a, b: UserDict(z=a, n=3, a=b), lambda o: (o["z"], o["a"])),
    "None": (lambda a, b: [a, (None, b)], lambda o: (o[0], o[1][1])),
}  # fmt: skip


class Module(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.w, self.make = nn.Parameter(torch.tensor(2.0, dtype=D)), make

    def forward(self, x, option=None, *, more=None):
        a = self.w * x * (1 if more is None else more["k"])
        return self.make(a + (0 if option is None else option.y), x.sin())


X, K, Z = [numbers(3, seed=i).requires_grad_() for i in range(3)]


def run(module, full=True):
    return module(X, Output(Z), more={"k": K}) if full else module(X)


def grads(parts, module, full=True):
    a, b = parts
    leaves = [X, K, Z, module.w] if full else [X, module.w]
    return torch.autograd.grad(a.square().sum() + 3 * b.cos().sum(), leaves)


def of_two(dy, x, w):
    """The gradients by hand, with a factor of 5 for the input and of 7 for the parameter."""
    da, db = dy
    return 5 * (da * w + db * x.cos()), {"w": 7 * (da * x).sum()}


@pytest.mark.parametrize("name", MAKERS)
def test_rules(name):
    make, parts = MAKERS[name]
    module = Module(make)
    for full in (True, False):
        plain = run(module, full)
        dxs = grads(parts(plain), module, full)
        with override({at(Module): lambda dy, builtin: 2 * builtin(dy)}) as used:
            y = run(module, full)
        assert type(y) is type(plain)
        close(parts(y), parts(plain))
        found = grads(parts(y), module, full)
        close(found[:-1], [2 * dx for dx in dxs[:-1]])
        close(found[-1:], dxs[-1:])
        used.assert_fired()
    with override({at(Module): of_two}):
        y = module(X)
    dxs = grads(parts(module(X)), module, False)
    close(grads(parts(y), module, False), [5 * dxs[0], 7 * dxs[1]])


@pytest.mark.parametrize("name", MAKERS)
def test_replaced_values(name):
    make, parts = MAKERS[name]
    module, by_hand = Module(make), Module(lambda a, b: make(a * a, b.exp()))
    by_hand.w = module.w

    def forward(x, w):
        return make((w * x) ** 2, x.sin().exp())

    with override({at(Module): rg.replace(forward)}, values=True):
        y = module(X)
    due = by_hand(X)
    assert type(y) is type(due)
    close(parts(y), parts(due))
    close(grads(parts(y), module, False), grads(parts(due), by_hand, False))


def test_other_fields_are_kept():
    module = Module(lambda a, b: Masked(logits=a, hidden=[b]))
    with override({at(Module): lambda dy, builtin: builtin(dy)}):
        y = module(X)
    assert [*y] == ["logits", "hidden"]
    assert y["logits"] is y.logits
    assert y.loss is None
    module.make = lambda a, b: Output(a, b, count=8)
    with override({at(Module): lambda dy, builtin: builtin(dy)}):
        assert module(X).count == 8


class Closed:
    def __init__(self, x):
        self.x = x


def test_other_objects_are_refused():
    rules = {at(Module): rg.rules.optional(lambda dy, builtin: builtin(dy))}
    for make in (lambda a, b: Closed(a), lambda a, b: (b, Closed(a))):
        refused("returned Closed.*tuple or dataclass", rules, lambda m=make: Module(m)(X))


def test_a_gradient_of_your_own():
    @regrad.torch.custom_grad
    def f(x, save):
        save([x])
        y = Output(2 * x, {"k": x.sin()})
        return y, lambda dy, saved: 5 * dy.y + dy.more["k"] * saved[0].cos()

    y = f(X)
    assert type(y) is Output
    assert y.count == 3
    (dx,) = torch.autograd.grad(y.y.sum() + y.more["k"].square().sum(), X)
    close([dx], [5 + 2 * X.sin() * X.cos()])
