"""Overrides in PyTorch under everything that torch does with functions: delivered or refused.

The model is one that somebody else wrote. Each way of running it is asked for the gradient under a
rule, which is compared with that of the same model with hand-written `autograd.Function`s.
"""

import threading
import warnings
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import GradientError, PassedOverError
from regrad.torch import open_scopes
from tests.torch import ways
from tests.torch.common import D, fired, function, grad, override, under
from tests.torch.common import backward as from_backward
from tests.torch.placed import refused
from tests.torch.ways import compile_afresh

FACTOR = 1000.0


class Model(nn.Module):
    """A module that is used twice, in place; one made in forward; a function; a method."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.act(self.first(x))
        x = torch.tanh(self.second(x)) + 0.1
        x = self.act(x * 1.5)
        x = nn.ReLU()(x - 0.2)
        return F.relu(x + 0.05) ** 2 + (x - 0.1).relu() + (x * 2).relu_()


# (the rules below, written for torch by hand)
Hand = function(lambda x: x.clamp(min=0), lambda dy, x: dy * FACTOR**0.5 * (x > -0.3), "Hand")


class ByHand(Model):
    def __init__(self, model):
        super().__init__()
        self.to(model.first.weight.dtype).load_state_dict(model.state_dict())

    def forward(self, x):
        relu = Hand.apply
        x = relu(self.first(x))
        x = torch.tanh(self.second(x)) + 0.1
        x = relu(x * 1.5)
        x = relu(x - 0.2)
        return relu(x + 0.05) ** 2 + relu(x - 0.1) + relu(x * 2)


def with_torch(dy, x):
    return dy.mul(FACTOR**0.5) * (x > -0.3).to(dy.dtype).clone()


def with_regrad(dy, x):
    return rg.where(rg.greater(x, -0.3), dy * FACTOR**0.5, 0)


def in_tf_form(op, grad):
    return grad * FACTOR**0.5 * rg.where(op.inputs[0] > -0.3, 1.0, 0.0)


RULES = {"torch": with_torch, "regrad": with_regrad, "tf": in_tf_form}


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    yield
    assert open_scopes.SCOPES.get() == ()
    assert torch.overrides._get_current_function_mode_stack() == []
    assert threading.Thread.start.__module__ == "threading"


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().double()


@pytest.fixture
def x():
    return torch.randn(3, 4, dtype=D, requires_grad=True)


def backward(model, x):
    return grad(model(x), x)


def in_thread(model, x):
    found = []
    thread = threading.Thread(target=lambda: found.append(backward(model, x)))
    thread.start()
    thread.join()
    return found[0]


def hooked(model, x):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numpy(force=True)) or len(kept) - 1,
        lambda i: torch.from_numpy(kept[i]),
    ):
        y = model(x)
    assert kept
    return grad(y, x)


def scripted(model, x):
    """A TorchScript program that somebody else wrote: it was made under no override."""
    with torch._C.DisableTorchFunction():
        return torch.jit.script(nn.Sequential(model.first, model.act, model.second))


def traced(model, x):
    with torch._C.DisableTorchFunction():
        return torch.jit.trace(model, x, check_trace=False)


def parallel(model, x):
    return backward(lambda x: torch.cat([nn.DataParallel(model)(r) for r in x.split(1)]), x)


WAYS = {
    **ways.WAYS,
    **ways.MORE,
    "checkpoint, reentrant": lambda m, x: from_backward(checkpoint(m, x, use_reentrant=True), x),
    "thread": in_thread,
    "DataParallel": parallel,
    "saved tensor hooks": hooked,
    "compile inductor": lambda m, x: backward(compile_afresh(m, backend="inductor"), x),
    "ScriptModule": lambda m, x: backward(scripted(m, x), x),
    "traced ScriptModule": lambda m, x: backward(traced(m, x), x),
}  # fmt: skip
SCRIPT = {"ScriptModule", "traced ScriptModule"}


def wished(way, model, x):
    """The gradient of the model with hand-written Functions, the long way if torch needs that."""
    hand = ByHand(model)
    if way in {"second order", "func.grad of grad"}:
        return ways.second_order(hand, x)
    if way in {"hessian", "jacrev of jacrev"}:
        rows = [grad(e, x, retain_graph=True) for e in ways.created(hand, x).flatten()]
        return torch.stack(rows).reshape(*x.shape, *x.shape)
    first = backward(hand, x)
    return first.sum() if way == "jvp" else first


def outcome(way, rule, model, x):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript's own, and a scope that raised
            with override({"Relu": rule}) as used:
                found = WAYS[way](model, x)
    except (PassedOverError, GradientError):
        return "refused"
    right = wished(way, model, x)
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)
    plain = WAYS[way](model, x)
    assert not torch.allclose(plain, right)
    used.assert_fired("Relu")
    return "delivered"


@pytest.mark.slow(but=16)
@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("form", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_delivered_or_refused(way, form, model, x):
    if "inductor" in way and form != "regrad":
        return  # compiling takes seconds, and the other forms go the same road (aot_eager)
    due = "delivered"
    if way in SCRIPT or (way in ways.FORWARD and form == "torch"):
        due = "refused"
    assert outcome(way, RULES[form], model, x) == due


@pytest.mark.versions
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_after_the_scope_runs_under_it(model, x, reentrant):
    y = under({"Relu": with_torch}, lambda: checkpoint(model, x, use_reentrant=reentrant))
    torch.testing.assert_close(from_backward(y, x), wished("", model, x))


@pytest.mark.parametrize("form", RULES)
def test_autocast(model, form):
    model, x = model.float(), torch.randn(3, 4, requires_grad=True)
    found = []
    for f, rules in ((model, {"Relu": RULES[form]}), (ByHand(model), {})):
        with override(rules) as used:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = f(x)
            found.append(grad(y.float(), x))
        used.assert_fired()
    torch.testing.assert_close(*found, rtol=5e-2, atol=1.0)


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_function_is_refused_by_name():
    @torch.jit.script
    def third_party(x):
        return torch.relu(x) + 1

    rules = {"Relu": with_torch}
    refused(r"'third_party' runs 'Relu'", rules, lambda: third_party(torch.ones(2)))
    with pytest.warns(rg.errors.UnusedOverrideWarning), override({"Tanh": lambda dy: dy}):
        third_party(torch.ones(2))


class Named(torch.Tensor):
    """A subclass that does nothing of its own."""


class Logged(torch.Tensor):
    """A subclass that takes note of what runs, and marks what comes out."""

    log: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        y = super().__torch_function__(func, types, args, kwargs or {})
        cls.log.append(func.__name__)
        return y


class Rewriting(torch.Tensor):
    """A subclass that computes a function by others."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.sinh:
            return torch.tanh(args[0]) * 2
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper:
    """No Tensor, but has one."""

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [a.held if isinstance(a, Wrapper) else a for a in args]
        return Wrapper(func(*args, **(kwargs or {})))


def thrice(dy):
    return dy * 3


@pytest.mark.parametrize("kind", [Named, Logged, Rewriting])
@pytest.mark.parametrize("nested", [False, True])
def test_subclasses_of_tensor(kind, nested):
    leaf = torch.randn(3, requires_grad=True)
    x, Logged.log = leaf.as_subclass(kind), []
    with override({"Tanh": thrice}) as used, override({"Relu": thrice} if nested else {}):
        y = torch.tanh(x) + F.relu(x.tanh())
    assert type(y) is kind
    assert used.hits[0].count + used.hits[-1].count >= 2
    assert Logged.log == (["tanh", "tanh", "relu", "add"] if kind is Logged else [])
    expected = torch.full((3,), 12.0) if nested else 3 + 3.0 * (leaf > 0)
    assert torch.equal(grad(y, leaf), expected)


@pytest.mark.parametrize(("wrap", "call", "factor"), [
    (lambda x: x.as_subclass(Rewriting), torch.sinh, 6),  # (which computes it by others)
    (Wrapper, lambda x: torch.tanh(x).held, 3),
])  # fmt: skip
def test_what_computes_by_others_or_wraps_a_tensor(wrap, call, factor):
    leaf = torch.randn(3, requires_grad=True)
    y = fired({"Tanh": thrice}, call, wrap(leaf))
    assert grad(y, leaf).tolist() == [factor] * 3


@pytest.mark.slow
def test_scopes_nest_in_compiled_code_too(model, x):
    both = nn.Sequential(model, nn.Tanh())
    rules = {"Relu": with_regrad, "Tanh": thrice}
    for outer, inner in [("Relu", "Tanh"), ("Tanh", "Relu")]:
        found = []
        for f in (compile_afresh(both, fullgraph=False), both):
            with override({outer: rules[outer]}), override({inner: rules[inner]}):
                found.append(backward(f, x))
        torch.testing.assert_close(*found)


def test_modules_traced_by_fx_in_the_scope_are_plain_and_run_under_it(model, x):
    part = nn.Sequential(model.first, nn.ReLU())
    found = under({"Relu": with_torch}, lambda: backward(torch.fx.symbolic_trace(part), x))
    by_hand = backward(lambda x: Hand.apply(model.first(x)), x)
    torch.testing.assert_close(found, by_hand)
