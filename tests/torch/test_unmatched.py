"""Ops that no rule covers: what is known of them, and what is looked at at each call."""

import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.core import callers
from regrad.errors import PassedOverError
from regrad.torch import below, enclosing, modes, optypes
from regrad.torch.composites import fused
from regrad.torch.host import HOST
from regrad.torch.nodes import is_plumbing, types_of
from tests.campaigns import torch_samples
from tests.helpers.paths import ROOT
from tests.torch.common import function, override
from tests.torch.placed import refused

RULES = {"Sigmoid": lambda dy: dy * 7}
SINE = {"Sin": rg.rules.optional(lambda dy: dy)}


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
    return function(lambda x: f(x), lambda dy, x: dy, "Own")


def runs(f, rules=RULES):
    """Run a Function with this forward pass in a scope."""
    with override({k: rg.rules.optional(r) for k, r in rules.items()}):
        return function_of(f).apply(torch.linspace(-1, 1, 4).requires_grad_())


KNOWN = {
    "a quantizer": lambda x: torch.clamp(torch.round(x / 0.5), -8, 7) * 0.5,
    "a spike": lambda x: (x > 0).to(x.dtype),
    "a spike as a float": lambda x: x.gt(0.5).float().detach().clone(),
    "a scale": lambda x: x.abs().mean() / x.numel() * torch.ones_like(x),
    "in place": lambda x: x.clone().mul_(2).relu_().clamp_(max=1),
    "a number": lambda x: x * x.max().item(),
    "made of others": lambda x: torch.where(x > 0, x.square(), x).reshape(2, 2).flatten(),
    "of torch.nn.functional": lambda x: torch._C._nn.gelu(x),
    "written in Python": lambda x: F.leaky_relu(F.layer_norm(x, (4,))),
    "of several": lambda x: torch.chunk(x, 2)[0].repeat(2),
    "in a list": lambda x: torch.cat([x, x])[:4],
    "transformed": lambda x: torch.vmap(lambda each: each * 2)(x),
}


@pytest.mark.parametrize("name", KNOWN)
def test_single_ops_in_a_function_are_known_by_their_names(name, watched):
    for _ in range(2):
        runs(KNOWN[name])
    assert not watched


def beside(f):
    return lambda x: (f(x), x * 1)[1]


TANH, IDENTITY = {"Tanh": lambda dy: dy}, {"Identity": lambda dy: dy}
WATCHED = {
    "made of others": (beside(torch.diff), TANH),
    "written in Python": (beside(lambda x: F.normalize(x, dim=0)), TANH),
    "a name that another op has": (beside(lambda x: torch.ops.aten.mul(x, x)), TANH),
    "a copy of what was conjugated lazily, say": (torch.exp, IDENTITY),
}


@pytest.mark.parametrize("name", WATCHED)
def test_all_else_is_watched_each_time(name, watched):
    for count in (1, 2):
        runs(*WATCHED[name])
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
    with override({"Sigmoid": rg.rules.optional(lambda dy: dy)}):
        own.apply(x)
        own.apply(x)
        with pytest.raises(PassedOverError, match="'Sigmoid' would never run"):
            own.apply(x)


SAMPLES = """
abs add addmm amax baddbmm clamp cumsum div_no_rounding_mode fill gather index_select lerp mm mul
masked_fill mean nn_functional_gelu nn_functional_hardtanh nn_functional_relu nn_functional_silu
nn_functional_softplus pow prod reshape round rsub sigmoid sign sort square sum tanh to topk where
flatten max_binary max_reduction_no_dim max_reduction_with_dim min_binary min_reduction_with_dim
view_as
"""


class Looks(TorchFunctionMode):
    """Checks that functions run no other op types than the table says."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        known = below.types_run_by(func)
        if known is None:
            return func(*args, **kwargs or {})
        with below.Below() as seen:
            result = func(*args, **kwargs or {})
        # (of a composite only the ops that a caller sees count: `composites`)
        others = {t for t in seen.types - known if not is_plumbing(func, t)}
        assert not others or func in fused(), func
        return result


def look_at_samples(name):
    for case in torch_samples.cases(torch_samples.load()[name], 4):
        x, args, options = case.given
        with torch.no_grad(), Looks():
            if not case.in_place:  # (which some shapes do not allow)
                case.function(x, *args, **options)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", SAMPLES.split())
def test_a_function_runs_what_its_name_says(name):
    look_at_samples(name)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_each_function_of_the_sample_database_runs_what_the_table_says():
    for name in torch_samples.load():
        if not name.startswith("jiterator"):  # (for GPUs)
            look_at_samples(name)


def test_a_function_that_the_table_takes_for_harmless_is_looked_at(monkeypatch):
    monkeypatch.setattr(modes, "types_run_by", lambda func: frozenset())
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        rules = {"Sub": rg.rules.optional(lambda dy: dy)}
        with override(rules), pytest.raises(PassedOverError, match="diff"):
            torch.diff(x * 1)
    twice = iter([x * 1, torch.sigmoid(x)])  # (an input of an op that ran before)
    with override({"Sigmoid": rg.rules.optional(lambda dy: dy)}) as used:
        for y in twice:
            assert y.contiguous() is y
    assert not used.untouched().rows


def test_a_table_that_lacks_an_op_is_found(monkeypatch):
    monkeypatch.setitem(below._RUN, "layer_norm", ())
    optypes.clear()
    with pytest.raises(AssertionError, match="layer_norm"):
        monkeypatch.setattr(below, "_types", lambda name: frozenset({name}))
        look_at_samples("nn_functional_layer_norm")
    monkeypatch.undo()
    optypes.clear()


# -- with a gradient ---------------------------------------------------------------------------


def test_one_node_of_a_kind_is_looked_at_once_and_counted_each_time():
    x = torch.ones(3, requires_grad=True)
    for watch in (False, True):
        with override(SINE, watch=watch) as used:
            for _ in range(3):
                torch.relu(x)
            F.linear(x, torch.ones(2, 3, requires_grad=True))
        rows = used.untouched().rows
        assert [r[:2] for r in rows] == [
            ("Relu", "3"), ("torch.nn.functional.linear (MatMul)", "1"),
        ]  # fmt: skip
    line = test_one_node_of_a_kind_is_looked_at_once_and_counted_each_time.__code__.co_firstlineno
    assert [int(r[2].rpartition(":")[2]) - line for r in rows] == [5, 6]


PLACES = {
    "before an op": lambda f, x: torch.relu(f(x)),
    "before the op under a rule": lambda f, x: torch.sin(f(x)),
    "last": lambda f, x: f(torch.sin(x)),
    "alone": lambda f, x: f(x),
    "before a linear": lambda f, x: F.linear(f(x), torch.ones(2, 3)),
    "in a checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
}


InTwoParts = function(lambda x: x * 1, lambda dy, x: dy, "InTwoParts", newer=True)
InTwoParts.generate_vmap_rule = True


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("own", [function_of(lambda x: x * 1), InTwoParts], ids=["one", "two"])
def test_functions_of_others_are_listed_wherever_they_run(own, place):
    x = torch.ones(3, requires_grad=True)
    name = f"{__name__}.{own.__qualname__} (autograd.Function)"
    with override(SINE, watch=True) as used:
        PLACES[place](own.apply, x)
        own.apply(x.detach())
    assert [r[1] for r in used.untouched().rows if r[0] == name] == ["1"]
    with override({own: lambda dy, x: 7 * dy, **SINE}, watch=True) as used:
        PLACES[place](own.apply, x)
    assert name not in str(used.untouched())


def in_two(x):
    return torch.sin(InTwoParts.apply(InTwoParts.apply(torch.tanh(x)))).sum()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # (2.10)
@pytest.mark.parametrize("run", [
    lambda x: torch.func.grad(in_two)(x.detach()),
    lambda x: torch.func.vmap(torch.func.grad(in_two))(x.detach()[None]),
    lambda x: torch.compile(in_two, backend="aot_eager", fullgraph=True)(x).backward(),
], ids=["grad", "vmap", "compile"])  # fmt: skip
def test_functions_of_others_are_listed_by_name_under_transformations(run):
    name = f"{__name__}.InTwoParts (autograd.Function)"
    with override(SINE, watch=True) as used:
        run(torch.ones(3, requires_grad=True))
    listed = [r[:2] for r in used.untouched().rows if r[0].endswith("(autograd.Function)")]
    assert listed == [(name, "2")]


def test_a_function_without_a_gradient_is_not_listed():
    own = function_of(lambda x: x * 1)
    x = torch.ones(3, requires_grad=True)
    with override(SINE, watch=True) as used:
        with torch.no_grad():
            own.apply(x)
        function_of(lambda x: own.apply(x)).apply(x)
    assert len(used.untouched()) == 1


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
    with override(SINE) as used:
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


# -- the names of autograd's nodes -----------------------------------------------------------------

# Those of the newest torch that belong to no op type of regrad's. Some compute one among others
# (`Lerp` multiplies), as steps that a reader of the program does not see; `untouched()` lists them.
OF_NO_TYPE = (ROOT / "tests/golden/torch_nodes_of_no_type.txt").read_text()


@pytest.mark.skipif(not HOST.is_tested or HOST.newest not in torch.__version__, reason="its names")
def test_each_node_of_torch_is_of_an_op_type_or_known_to_be_of_none():
    nodes = {
        name.partition("Backward")[0] for name in dir(torch._C._functions) if "Backward" in name
    }
    none = {name for name in nodes if not types_of(f"{name}Backward1ScalarList")}
    assert none - {""} == {*OF_NO_TYPE.split()}


FOREACH = {
    "abs": ("Abs", ()), "exp": ("Exp", ()), "sqrt": ("Sqrt", ()), "sigmoid": ("Sigmoid", ()),
    "add": ("AddV2", ([2.0], "tensors", 2.0, "tensor")), "sub": ("Sub", ([2.0], "tensors", 2.0)),
    "mul": ("Mul", ([2.0], "tensors", 2.0, "tensor")),
    "div": ("RealDiv", ([2.0], "tensors", 2.0, "tensor")),
    "pow": ("Pow", ([2.0], "tensors", 2.0)), "clamp_max": ("ClipByValue", ([2.0], "tensors", 2.0)),
    "maximum": ("Maximum", ("tensors",)),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREACH)
def test_functions_of_lists_of_tensors_are_refused(name):
    """The kind of argument stands in the name of the node."""
    op_type, others = FOREACH[name]
    x = torch.rand(3, requires_grad=True)
    own = {"tensors": [torch.rand(3)], "tensor": torch.tensor(2.0)}
    for other in others or (None,):
        args = () if other is None else (own[other] if isinstance(other, str) else other,)
        for f in (getattr(torch, f"_foreach_{name}{end}") for end in ("", "_")):
            with override(SINE):
                f([x * 1], *args)
            rules = {op_type: rg.rules.optional(lambda dy, builtin: builtin(dy))}
            refused(op_type, rules, lambda f=f, args=args: f([torch.sin(x)], *args))
