"""Ops that no rule covers: what is known of them, and what is looked at at each call."""

import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import regrad as rg
import regrad.torch as rt
from regrad.core import callers
from regrad.errors import PassedOverError
from regrad.torch import below, enclosing
from regrad.torch.host.running import Told
from tests.campaigns import torch_samples

RULES = {"Sigmoid": lambda dy: dy * 7}


@pytest.fixture
def watched(monkeypatch):
    """Return the blocks in which each op is watched where torch dispatches it."""
    found = []

    class Counted(below.Below):
        def __init__(self):
            found.append(self)
            super().__init__()

    monkeypatch.setattr(enclosing, "Below", Counted)
    return found


def function_of(f):
    """Return an `autograd.Function` with this forward pass, and the gradient of the identity."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return f(x)

        @staticmethod
        def backward(ctx, dy):
            return dy

    return Own


def runs(f, rules=RULES, x=None):
    """Run a Function with this forward pass in a scope."""
    x = torch.linspace(-1, 1, 4).requires_grad_() if x is None else x
    with rt.gradient_override_map({k: rg.rules.optional(r) for k, r in rules.items()}):
        return function_of(f).apply(x)


KNOWN = {
    "a quantizer": lambda x: torch.clamp(torch.round(x / 0.5), -8, 7) * 0.5,
    "a spike": lambda x: (x > 0).to(x.dtype),
    "a spike as a float": lambda x: x.gt(0.5).float().detach().clone(),
    "a scale": lambda x: x.abs().mean() / x.numel() * torch.ones_like(x),
    "in place": lambda x: x.clone().mul_(2).relu_().clamp_(max=1),
    "a number": lambda x: x * x.max().item(),
    "made of others": lambda x: torch.where(x > 0, x.square(), x).reshape(2, 2).flatten(),
    "of torch.nn.functional": lambda x: torch._C._nn.gelu(x),
}


@pytest.mark.parametrize("name", KNOWN)
def test_single_ops_in_a_function_are_known_by_their_names(name, watched):
    for _ in range(2):
        runs(KNOWN[name])
    assert not watched


WATCHED = {
    "made of others": torch.diff,
    "written in Python": F.silu,
    "of several": lambda x: torch.chunk(x, 2),
    "in a list": lambda x: torch.cat([x, x]),
    "a name that another op has": lambda x: torch.ops.aten.mul(x, x),
}


@pytest.mark.parametrize("name", WATCHED)
def test_all_else_is_watched_each_time(name, watched):
    for count in (1, 2):
        runs(lambda x: (WATCHED[name](x), x * 1)[1], {"Tanh": lambda dy: dy})
        assert len(watched) == count


def test_what_torch_may_put_before_an_op_is_watched(watched):
    """A copy of what was conjugated lazily, say."""
    for count in (1, 2):
        runs(torch.exp, {"Identity": lambda dy: dy})
        assert len(watched) == count


HIDING = {
    "the op": torch.sigmoid,
    "in place": lambda x: x.clone().sigmoid_(),
    "by its overload": torch.ops.aten.sigmoid.default,
    "inside of another": torch._C._nn.silu,
    "in place, inside": lambda x: torch._C._nn.silu_(x.clone()),
    "inside, in Python": F.silu,
    "the gate of a layer": lambda x: F.glu(x, 0).repeat(2),
}


@pytest.mark.parametrize("name", HIDING)
def test_an_op_that_only_the_second_call_runs_is_refused(name):
    """One forward pass does not tell which ops the next one runs."""
    steps = iter([lambda x: x * 2, lambda x: x * 2, HIDING[name]])
    own = function_of(lambda x: next(steps)(x))
    x = torch.linspace(-1, 1, 4).requires_grad_()
    with rt.gradient_override_map({"Sigmoid": rg.rules.optional(lambda dy: dy)}):
        own.apply(x)
        own.apply(x)
        with pytest.raises(PassedOverError, match="'Sigmoid' would never run"):
            own.apply(x)


class Ours(torch.Tensor):
    """A subclass, whose class might decide on what ops are."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_subclasses_are_watched(watched):
    for count in (1, 2):
        runs(lambda x: (x.clone().as_subclass(Ours) * 2).as_subclass(torch.Tensor))
        assert len(watched) >= count


def test_transformations_part_ops_as_they_like(watched):
    for count in (1, 2):
        runs(lambda x: torch.vmap(lambda each: each * 2)(x))
        assert len(watched) >= count


SAMPLES = """
abs add addmm amax baddbmm clamp cumsum div_no_rounding_mode fill gather index_select lerp mm mul
masked_fill mean nn_functional_gelu nn_functional_hardtanh nn_functional_relu nn_functional_silu
nn_functional_softplus pow prod reshape round rsub sigmoid sign sort square sum tanh to topk where
flatten max_binary max_reduction_no_dim max_reduction_with_dim min_binary min_reduction_with_dim
view_as
"""


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", SAMPLES.split())
def test_a_function_runs_what_its_name_says(name):
    class Looks(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            options = kwargs or {}
            known = below.types_run_by(func)
            if known is None or not below.are_plain(args, options):
                return func(*args, **options)
            with below.Below() as seen:
                result = func(*args, **options)
            assert seen.types <= known, func
            return result

    for case in torch_samples.cases(torch_samples.load()[name], 4):
        x, args, options = case.given
        with torch.no_grad(), Looks():
            if not case.in_place:  # (which some shapes do not allow)
                case.function(x, *args, **options)


# -- with a gradient ---------------------------------------------------------------------------


def test_one_node_of_a_kind_is_looked_at_once_and_counted_each_time():
    x = torch.ones(3, requires_grad=True)
    with rt.gradient_override_map({"Sin": rg.rules.optional(lambda dy: dy)}) as used:
        for _ in range(3):
            torch.relu(x)
        F.linear(x, torch.ones(2, 3, requires_grad=True))
    line = test_one_node_of_a_kind_is_looked_at_once_and_counted_each_time.__code__.co_firstlineno
    assert [(r[0], r[1]) for r in used.untouched().rows] == [
        ("Relu", "3"), ("torch.nn.functional.linear (MatMul)", "1"),
    ]  # fmt: skip
    assert [int(r[2].rpartition(":")[2]) - line for r in used.untouched().rows] == [4, 5]


@pytest.mark.parametrize("ran", [False, True])
def test_functions_behind_an_op_are_met(ran, monkeypatch):
    """Nobody looks for them before the first has run in a scope, whichever it is."""
    monkeypatch.setattr(Told, "ran", ran)
    own, other = function_of(lambda x: x * 1), function_of(lambda x: x * 1)
    x = torch.ones(3, requires_grad=True)
    with rt.gradient_override_map({"Sin": rg.rules.optional(lambda dy: dy)}) as used:
        assert Told.ran is ran
        torch.relu(x)
        torch.relu(own.apply(x))
        F.linear(other.apply(x), torch.ones(2, 3))
    assert Told.ran
    name = f"{__name__}.{own.__qualname__} (autograd.Function)"
    assert [r[1] for r in used.untouched().rows if r[0] == name] == ["1", "1"]  # on two lines


def test_nodes_of_other_threads_are_not_those_of_a_call():
    """Each thread counts its own nodes, and may be far ahead."""
    found = []

    def work():
        y = torch.ones(1, 3, requires_grad=True)
        for _ in range(200):
            y = torch.sin(y)
        found.append(y)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    w = torch.ones(2, 3, requires_grad=True)
    rules = {"Sin": rg.rules.optional(lambda dy: dy)}
    with rt.gradient_override_map(rules) as used:
        F.linear(found[0], w, torch.ones(2, requires_grad=True))
    assert [r[0] for r in used.untouched().rows] == ["torch.nn.functional.linear (MatMul)"]


def test_lines_of_code_that_is_made_anew_are_its_own():
    for n in range(1, 2 * callers.KEPT // 100):
        scope = {"find": callers.find_caller}
        exec(compile("\n" * n + "def f():\n    return find()", f"made_{n}.py", "exec"), scope)
        assert scope["f"]() == f"made_{n}.py:{n + 2}" == scope["f"]()
    assert len(callers._LINES) <= callers.KEPT


def test_two_calls_on_a_line_are_of_that_line():
    a, b = (callers.find_caller(), callers.find_caller())
    assert a == b
    assert a.endswith(f":{sys._getframe().f_lineno - 2}")


def test_code_is_not_kept_alive_by_its_lines():
    scope = {"find": callers.find_caller}
    exec("def f():\n    return find()", scope)
    assert scope["f"]() == "<string>:2"
    code = weakref.ref(scope.pop("f").__code__)
    gc.collect()
    assert code() is None
