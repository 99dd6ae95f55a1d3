"""Overrides in PyTorch under everything that torch does with functions: delivered or refused.

The model is one that somebody else wrote. Each way of running it is asked for the gradient under a
rule, which is compared with that of the same model with hand-written `autograd.Function`s.
"""

import asyncio
import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.torch
from regrad.errors import ArgumentError, GradientError, PassedOverError
from regrad.torch import modes, open_scopes

FACTOR = 1000.0
override = regrad.torch.gradient_override_map


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


class Hand(torch.autograd.Function):
    """What the rules below say, written for torch by hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * FACTOR**0.5 * (x > -0.3)


class ByHand(Model):
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
    return torch.randn(3, 4, dtype=torch.float64, requires_grad=True)


def backward(model, x):
    return torch.autograd.grad(model(x).sum(), x)[0]


def from_backward(y, x):
    x.grad = None
    y.sum().backward()
    return x.grad


def created(model, x):
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]


def second_order(model, x):
    return torch.autograd.grad(created(model, x).square().sum(), x)[0]


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
    return torch.autograd.grad(y.sum(), x)[0]


def compiled(backend):
    def run(model, x):
        torch._dynamo.reset()
        return backward(torch.compile(model, backend=backend, fullgraph=True), x)

    return run


def compiled_gradient(backend):
    def run(model, x):
        torch._dynamo.reset()
        gradient = torch.func.grad(lambda x: model(x).sum())
        return torch.compile(gradient, backend=backend, fullgraph=True)(x.detach())

    return run


def scripted(model):
    """A TorchScript program that somebody gave away: it was made under no override."""
    with torch._C.DisableTorchFunction():
        return torch.jit.script(nn.Sequential(model.first, model.act, model.second))


def traced(model, x):
    with torch._C.DisableTorchFunction():
        return torch.jit.trace(model, x, check_trace=False)


def total(model):
    return lambda x: model(x).sum()


def parallel(model, x):
    return backward(lambda x: torch.cat([nn.DataParallel(model)(r) for r in x.split(1)]), x)


func = torch.func
WAYS = {
    "autograd.grad": backward,
    "backward": lambda m, x: from_backward(m(x), x),
    "create_graph": created,
    "second order": second_order,
    "func.grad": lambda m, x: func.grad(total(m))(x.detach()),
    "func.grad of grad": lambda m, x: func.grad(lambda a: func.grad(total(m))(a).square().sum())(
        x.detach()
    ),
    "func.vjp": lambda m, x: func.vjp(m, x.detach())[1](torch.ones_like(x))[0],
    "vmap of grad": lambda m, x: torch.vmap(func.grad(total(m)))(x.detach()),
    "grad of vmap": lambda m, x: func.grad(lambda a: torch.vmap(m)(a).sum())(x.detach()),
    "jacrev": lambda m, x: func.jacrev(total(m))(x.detach()),
    "jacrev of jacrev": lambda m, x: func.jacrev(func.jacrev(total(m)))(x.detach()),
    "jacfwd": lambda m, x: func.jacfwd(total(m))(x.detach()),
    "jvp": lambda m, x: func.jvp(total(m), (x.detach(),), (torch.ones_like(x),))[1],
    "hessian": lambda m, x: func.hessian(total(m))(x.detach()),
    "checkpoint": lambda m, x: backward(lambda x: checkpoint(m, x, use_reentrant=False), x),
    "checkpoint, reentrant": lambda m, x: from_backward(checkpoint(m, x, use_reentrant=True), x),
    "thread": in_thread,
    "DataParallel": parallel,
    "saved tensor hooks": hooked,
    "compile eager": compiled("eager"),
    "compile aot_eager": compiled("aot_eager"),
    "compile inductor": compiled("inductor"),
    "compile func.grad": compiled_gradient("aot_eager"),
    "ScriptModule": lambda m, x: backward(scripted(m), x),
    "traced ScriptModule": lambda m, x: backward(traced(m, x), x),
}
FORWARD = {"jacfwd", "jvp", "hessian"}
SCRIPT = {"ScriptModule", "traced ScriptModule"}
LATE = ["autograd.grad", "create_graph", "second order", "func.vjp", "compile aot_eager"]


def wished(way, model, x):
    """The gradient of the model with hand-written Functions, the long way if torch needs that."""
    hand = ByHand().double()
    hand.load_state_dict(model.state_dict())
    if way in {"second order", "func.grad of grad"}:
        return second_order(hand, x)
    first = backward(hand, x)
    if way == "jvp":
        return first.sum()
    if way in {"hessian", "jacrev of jacrev"}:
        g = torch.autograd.grad(hand(x).sum(), x, create_graph=True)[0]
        rows = [torch.autograd.grad(e, x, retain_graph=True)[0] for e in g.flatten()]
        return torch.stack(rows).reshape(*x.shape, *x.shape)
    return first


def outcome(way, rule, model, x):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript's own, and a scope that raised
            with override({"Relu": rule}) as used:
                found = WAYS[way](model, x)
    except (PassedOverError, GradientError):
        return "refused"
    right = wished(way, model, x)
    np.testing.assert_allclose(found.detach(), right.detach(), rtol=1e-9, atol=1e-9)
    plain = WAYS[way](model, x)
    assert not torch.allclose(plain, right)
    used.assert_fired("Relu")
    return "delivered"


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("form", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_delivered_or_refused(way, form, model, x):
    if "inductor" in way and form != "regrad":
        return  # compiling takes seconds, and the other forms go the same road (aot_eager)
    due = "delivered"
    if way in SCRIPT or (way in FORWARD and form == "torch"):
        due = "refused"
    assert outcome(way, RULES[form], model, x) == due


def test_the_grid_can_fail(model, x, monkeypatch):
    def passed_over(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

    monkeypatch.setattr(modes.Mode, "__torch_function__", passed_over)
    with pytest.raises(AssertionError, match="Not equal"):
        outcome("autograd.grad", with_regrad, model, x)


def test_the_backward_pass_may_run_after_the_scope(model, x):
    with override({"Relu": with_regrad}) as used:
        y = model(x)
    later = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    torch.testing.assert_close(later, wished("", model, x))
    used.assert_fired()


@pytest.mark.versions
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_after_the_scope_runs_under_it(model, x, reentrant):
    with override({"Relu": with_torch}):
        y = checkpoint(model, x, use_reentrant=reentrant)
    torch.testing.assert_close(from_backward(y, x), wished("", model, x))


def test_values_do_not_change(model, x):
    plain = model(x)
    with override({"Relu": with_torch}):
        assert torch.equal(model(x), plain)


def test_compiled_code_knows_its_rules(model, x):
    torch._dynamo.reset()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = backward(fast, x)
    for _ in range(2):
        with override({"Relu": with_regrad}):
            torch.testing.assert_close(backward(fast, x), wished("", model, x))
        with override({"Relu": lambda dy: dy * 0}):
            assert not backward(fast, x).any()
        torch.testing.assert_close(backward(fast, x), plain)


def test_compiled_code_serves_again_in_the_next_scope(model, x):
    torch._dynamo.reset()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    with override({"Relu": with_regrad}):
        first = backward(fast, x)
    with torch.compiler.set_stance("fail_on_recompile"), override({"Relu": with_regrad}):
        torch.testing.assert_close(backward(fast, x), first)


@pytest.mark.versions
# (which Dynamo says of any class whose `__new__` is written in C)
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_scope_may_stand_inside_compiled_code(model, x):
    def run(x):
        with override({"Relu": with_regrad}):
            return model(x)

    torch._dynamo.reset()
    found = backward(torch.compile(run, backend="aot_eager"), x)
    torch.testing.assert_close(found, wished("", model, x))


@pytest.mark.parametrize("form", RULES)
def test_autocast(model, form):
    model = model.float()
    x = torch.randn(3, 4, requires_grad=True)
    with override({"Relu": RULES[form]}) as used:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        dx = torch.autograd.grad(y.float().sum(), x)[0]
    hand = ByHand()
    hand.load_state_dict(model.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = hand(x)
    torch.testing.assert_close(dx, torch.autograd.grad(y.float().sum(), x)[0], rtol=5e-2, atol=1.0)
    used.assert_fired()


def test_a_matrix_product_under_autocast():
    a, b = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    rule = {"MatMul": lambda dy, a, b: (7 * (dy @ b.mT), 7 * (a.mT @ dy))}
    with override(rule), torch.autocast("cpu", dtype=torch.bfloat16):
        y = a @ b
    assert y.dtype == torch.bfloat16
    da, db = torch.autograd.grad(y.float().sum(), (a, b))
    assert da.dtype == db.dtype == torch.float32
    torch.testing.assert_close(da, 7 * torch.ones(3, 3) @ b.mT, rtol=2e-2, atol=0.1)


@pytest.mark.versions
def test_inside_a_function_of_somebody_elses():
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(ctx, dy):
            return dy * 3

    x = torch.ones(2, requires_grad=True)
    with (
        pytest.raises(PassedOverError, match=r"Sigmoid ran in the forward pass of .*Swish"),
        override({"Sigmoid": "Identity"}),
    ):
        Swish.apply(x)
    with override({"Sigmoid": "Identity"}, keep=[Swish]):
        torch.sigmoid(x)
        Swish.apply(x).sum().backward()
    assert x.grad.tolist() == [3, 3]


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_function_is_refused_by_name():
    @torch.jit.script
    def third_party(x):
        return torch.relu(x) + 1

    with (
        pytest.raises(PassedOverError, match=r"'third_party' runs 'Relu'"),
        override({"Relu": with_torch}),
    ):
        third_party(torch.ones(2))
    with pytest.warns(rg.errors.UnusedOverrideWarning), override({"Tanh": lambda dy: dy}):
        third_party(torch.ones(2))


def test_overrides_do_not_reach_other_threads_or_tasks(model, x):
    plain = backward(model, x)
    before = threading.Event()
    found = []

    def wait():
        before.wait()
        found.append(backward(model, x))

    thread = threading.Thread(target=wait)
    thread.start()
    with override({"Relu": with_torch}):
        model(x)
        before.set()
        thread.join()
    torch.testing.assert_close(found[0], plain)

    async def under(event):
        with override({"Relu": with_torch}):
            model(x)
            event.set()
            await asyncio.sleep(0)
            return backward(model, x)

    async def beside(event):
        await event.wait()
        return backward(model, x)

    async def both():
        event = asyncio.Event()
        return await asyncio.gather(under(event), beside(event))

    inner, outer = asyncio.run(both())
    torch.testing.assert_close(inner, wished("", model, x))
    torch.testing.assert_close(outer, plain)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_scopes_of_tasks_close_in_any_order(order):
    """Each task keeps its rule until it leaves its own scope, whichever scope was opened last."""
    x = torch.ones((), requires_grad=True)
    found = []

    async def under(factor, turns, events):
        with override({"Relu": lambda dy: dy * factor}):
            for turn in turns:
                await events[turn].wait()
                found.append(torch.autograd.grad(torch.relu(x), x)[0].item())
                events[turn + 1].set()

    async def together():
        events = [asyncio.Event() for _ in range(7)]
        events[0].set()
        turns = [(k, 3 + order.index(k)) for k in range(3)]
        await asyncio.gather(*[under(float(k), turns[k], events) for k in range(3)])

    asyncio.run(together())
    assert found == [0.0, 1.0, 2.0, *map(float, order)]


def test_scopes_left_out_of_turn_are_an_error_and_leave_nothing_open(model, x):
    outer, inner = override({"Relu": with_torch}), override({"Tanh": lambda dy: dy})
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(rg.errors.ArgumentError, match="left out of turn"):
        outer.__exit__(None, None, None)
    model(x)
    inner.__exit__(None, None, None)  # closes both: see nothing_is_left_open
    with pytest.raises(rg.errors.ArgumentError, match="open already"), outer:
        outer.__enter__()


def test_an_error_in_the_scope_leaves_nothing_open(model, x):
    with pytest.raises(ZeroDivisionError), override({"Relu": with_torch}):
        model(x)
        raise ZeroDivisionError


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
    ones = torch.ones(3)
    expected = ones * 3 + (ones if not nested else 3 * ones) * (3 if nested else 3 * (leaf > 0))
    assert torch.equal(torch.autograd.grad(y.sum(), leaf)[0], expected)


def test_a_subclass_that_computes_by_others():
    leaf = torch.randn(3, requires_grad=True)
    with override({"Tanh": thrice}) as used:
        y = torch.sinh(leaf.as_subclass(Rewriting))
    assert torch.autograd.grad(y.sum(), leaf)[0].tolist() == [6, 6, 6]
    used.assert_fired()


def test_what_only_wraps_a_tensor():
    leaf = torch.randn(3, requires_grad=True)
    with override({"Tanh": thrice}):
        y = torch.tanh(Wrapper(leaf))
    assert torch.autograd.grad(y.held.sum(), leaf)[0].tolist() == [3, 3, 3]


def test_scopes_nest_in_compiled_code_too(model, x):
    both = nn.Sequential(model, nn.Tanh())
    for outer, inner in [("Relu", "Tanh"), ("Tanh", "Relu")]:
        torch._dynamo.reset()
        fast = torch.compile(both, backend="aot_eager")
        rules = {"Relu": with_regrad, "Tanh": lambda dy: dy * 3}
        found = []
        for f in (fast, both):
            with override({outer: rules[outer]}), override({inner: rules[inner]}):
                found.append(backward(f, x))
        torch.testing.assert_close(*found)


def test_export_is_refused():
    scope = override({"Relu": with_torch})
    with pytest.raises(PassedOverError, match="writes forward programs"), scope:
        torch.export.export(nn.ReLU(), (torch.randn(3),))


def test_modules_traced_by_fx_in_the_scope_are_plain_and_run_under_it(model, x):
    part = nn.Sequential(model.first, nn.ReLU())
    with override({"Relu": with_torch}):
        found = backward(torch.fx.symbolic_trace(part), x)
    by_hand = backward(lambda x: Hand.apply(model.first(x)), x)
    torch.testing.assert_close(found, by_hand)


def test_untouched_shows_functions_of_others():
    x = torch.ones(2, requires_grad=True)
    with override({"Tanh": lambda dy: dy}) as used:
        (Hand.apply(torch.tanh(x)) * 2).sum().backward()
    named = [row[0] for row in used.untouched().rows]
    assert any(n.endswith("Hand (autograd.Function)") and n.startswith(__name__) for n in named)


def test_a_scope_that_another_thread_leaves_stays_open_where_it_is():
    x = torch.ones(2, requires_grad=True)
    pool = ThreadPoolExecutor(1)
    scope = override({"Sign": lambda dy: dy * 5})
    scope.__enter__()
    torch.sign(x)
    leaves = [
        partial(scope.__exit__, None, None, None),
        partial(Context().run, scope.__exit__, None, None, None),
        partial(copy_context().run, scope.__exit__, None, None, None),
    ]
    for leave in leaves:
        assert "another thread or context" in str(pool.submit(leave).exception())
    for leave in leaves[1:]:
        with pytest.raises(ArgumentError, match="another thread or context"):
            leave()
    assert torch.autograd.grad(torch.sign(x).sum(), x)[0].tolist() == [5, 5]
    scope.__exit__(None, None, None)
    assert torch.autograd.grad(torch.sign(x).sum(), x)[0].tolist() == [0, 0]
    with pytest.raises(ArgumentError, match="not open"):
        scope.__exit__(None, None, None)
    assert pool.submit(lambda: torch.sign(x).sum().item()).result() == 2
    with override({"Sign": lambda dy: dy * 3}):
        assert torch.autograd.grad(torch.sign(x).sum(), x)[0].tolist() == [3, 3]
    assert torch.autograd.grad(torch.sign(x).sum(), x)[0].tolist() == [0, 0]
    pool.shutdown()
