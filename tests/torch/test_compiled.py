"""Overrides in code that torch captures, scripts, traces, or runs elsewhere: delivered or refused.

Expected gradients are torch's own, times the factor of the rule: the models are linear where they
are asked, so that each overridden op multiplies the gradient once.
"""

import contextvars

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._higher_order_ops import map as torch_map
from torch._higher_order_ops import scan
from torch.nn.attention import flex_attention as attention
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import PassedOverError, RuleError, UnusedOverrideWarning
from regrad.rules import optional
from regrad.torch import compiled_code, open_scopes
from tests.torch.common import backward, bare_function, leaf, override, under
from tests.torch.placed import refused

SEVEN = {"Relu": lambda dy: 7 * dy}
BACKENDS = ["eager", "aot_eager"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # by torch itself
may_be_unused = pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")
on_backends = pytest.mark.parametrize("backend", BACKENDS)
everywhere = pytest.mark.parametrize("backend", [None, *BACKENDS])


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert open_scopes.SCOPES.get() == ()
    assert torch._dynamo.utils.run_node.__module__ == "torch._dynamo.utils"


@pytest.fixture
def x():
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)


def compiled(f, backend, fullgraph=True):
    return torch.compile(f, backend=backend, fullgraph=fullgraph) if backend else f


# -- bodies of higher-order operators -------------------------------------------------------------


def body(x):
    return torch.relu(x) * 2


BODIES = {
    "checkpoint": lambda x: checkpoint(body, x, use_reentrant=False),
    "checkpoint, reentrant": lambda x: checkpoint(body, x, use_reentrant=True),
    "checkpoint of a torch function": lambda x: checkpoint(torch.relu, 2 * x, use_reentrant=False),
    "checkpoint in a checkpoint": lambda x: checkpoint(inner, x, use_reentrant=False),
    "cond": lambda x: torch.cond(x.sum() > 0, body, lambda x: x * 3, (x,)),
    "map": lambda x: torch_map(body, x),
    "scan": lambda x: scan(lambda c, x: (c + body(x), x * 1), torch.zeros(2), x)[0],
    "region": torch.compiler.nested_compile_region(lambda x: torch.relu(x) * 2),
}
inner = BODIES["checkpoint"]


@pytest.mark.slow(but=4)
@pytest.mark.versions
@everywhere
@pytest.mark.parametrize("name", BODIES)
def test_rules_reach_the_bodies_of_operators(name, backend, x):
    f = compiled(BODIES[name], backend)
    positive = x.detach().abs().requires_grad_()
    reached = backward(BODIES[name](positive), positive) != 0
    assert reached.any()  # (before 2.13 not all, in torch's scan)
    try:
        f(positive)
    except BackendCompilerFailed:  # as 2.11 and 2.12 compile no gradient of a scan
        assert name == "scan" and torch.__version__[:4] in ("2.11", "2.12")
        return
    with override(SEVEN) as used:
        y = f(x)
    assert torch.equal(backward(y, x), 14.0 * reached)
    used.assert_fired("Relu")


def test_functions_that_are_allowed_in_the_graph_are_refused(x):
    @torch.compiler.allow_in_graph
    def opaque(x):
        return torch.relu(x) * 2

    f, said = compiled(lambda x: opaque(x) + 1, "aot_eager"), r"compiled.py:\d+: .*'Relu' inside"
    with pytest.raises(PassedOverError, match=said), override(SEVEN):
        f(x)


Hiding = bare_function("Hiding", lambda ctx, x: torch.relu(x), lambda ctx, dy: dy)


class Holder:
    def method(self, x):
        return Hiding.apply(x)


def hiding(x):
    return Hiding.apply(x)


@pytest.mark.versions
@on_backends
@pytest.mark.parametrize("hidden", [hiding, Holder().method], ids=["function", "method"])
def test_a_function_in_code_that_is_allowed_in_the_graph_is_refused(x, hidden, backend):
    """Its nodes do not tell of the op, which runs out of sight where the program does."""
    torch.compiler.allow_in_graph(hidden)
    f = compiled(lambda x: hidden(x) + 1, backend)
    with pytest.raises(PassedOverError, match=r"Relu ran in .*allow_in_graph"), override(SEVEN):
        f(x)
    torch._dynamo.reset()
    y = under({"Relu": optional(SEVEN["Relu"])}, f, x, keep=[hidden, Hiding])
    assert torch.equal(backward(y, x), torch.ones_like(x))


# -- what only autograd's record tells ------------------------------------------------------------

PASSED_OVER = {
    "contiguous": ("Identity", lambda x: x.mT.contiguous()),
    "multi_dot": ("MatMul", lambda x: torch.linalg.multi_dot([x, x])),
    "addcmul": ("Mul", lambda x: torch.addcmul(x, x, x)),
    "in place": ("Mul", lambda x: torch.clone(x).addcmul_(x, x)),
    "adaptive_avg_pool2d": ("Mean", lambda x: F.adaptive_avg_pool2d(x[None, None], 1)),
    "max_pool1d": ("MaxPool", lambda x: F.max_pool1d(x, 2)),
    **{
        f"max_pool{n}d with indices{' by place' * len(given)}": (
            "MaxPool3D" if n == 3 else "MaxPool",
            lambda x, n=n, given=given: getattr(F, f"max_pool{n}d")(
                x[(None,) * n], (1,) * n, 1, 0, 1, False, *given, **({} if given else OPTION)),
        )
        for n in (1, 2, 3) for given in ((), (True,))
    },
}  # fmt: skip
OPTION = {"return_indices": True}
PAIR = {"MatMul", "Mul"}


@pytest.mark.versions
@everywhere
@pytest.mark.parametrize("name", PASSED_OVER)
def test_what_is_passed_over_in_eager_is_refused_compiled(name, backend, x):
    op_type, f = PASSED_OVER[name]
    rules = {op_type: (lambda dy, a, b: (dy, dy)) if op_type in PAIR else lambda dy: dy}

    def outcome(f):
        try:
            with override(rules):
                torch.add(x, 1)
                f(x)
        except PassedOverError:
            return "refused"
        except UnusedOverrideWarning:
            return "passed over"
        return "delivered"

    assert outcome(compiled(f, backend)) == outcome(f)


func = torch.func
TRANSFORMS = {
    "vmap": lambda f, x: func.vmap(f)(x),
    "vmap of vmap": lambda f, x: func.vmap(func.vmap(f))(x[None]),
    "vmap of grad": lambda f, x: func.vmap(func.grad(lambda v: f(v).sum()))(x.detach()),
    "grad of vmap": lambda f, x: func.grad(lambda v: func.vmap(f)(v).sum())(x.detach()),
    "vjp": lambda f, x: func.vjp(f, x.detach())[0],
    "jacrev": lambda f, x: func.jacrev(f)(x.detach()),
    "jacrev of a leaf": lambda f, x: func.jacrev(f)(x),
}
COMPOSED = {"kron": lambda x: torch.kron(x, x), "vecdot": lambda x: torch.linalg.vecdot(x, x)}


@may_be_unused
@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_is_passed_over_in_transforms_is_refused(transform, name, x):
    f, run = COMPOSED[name], TRANSFORMS[transform]
    rules = dict.fromkeys(("Mul", "MatMul", "Sum"), lambda op, dy: dy)
    with pytest.raises(PassedOverError, match="inside"), override(rules):
        run(f, x)
    y = under({"Tanh": lambda dy: dy}, run, f, x)
    assert torch.equal(y, run(f, x))


# -- rules that read what may change --------------------------------------------------------------


class Schedule:
    k = 1.0

    def __call__(self, dy, x):
        return dy * self.k

    def rule(self, dy):
        return dy * self.k


schedule, weight, table = Schedule(), torch.tensor(1.0), {"k": 1.0}


def set_all(k):
    schedule.k = table["k"] = k
    weight.fill_(k)


READING = {
    "a dict": lambda dy: dy if table["k"] == 1 else dy * table["k"],
    "a callable object": schedule,
    "a method": schedule.rule,
    "a tensor": lambda dy: dy * weight,
    "beside a builtin": lambda dy, builtin: builtin(dy) * table["k"],
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", READING)
@on_backends
def test_the_changed_value_counts(backend, name, x):
    f, found = compiled(lambda x: torch.relu(x) * 2, backend), []
    for k in (1.0, 5.0, 9.0):  # a scope around each call
        set_all(k)
        y = under({"Relu": READING[name]}, f, x)
        found += backward(y, x).unique().tolist()
    torch._dynamo.reset()
    with override({"Relu": READING[name]}) as used:  # and one around all
        for k in (1.0, 5.0, 9.0):
            set_all(k)
            found += backward(f(x), x).unique().tolist()
    assert [hit.ran for hit in used.hits] == [3]
    assert found == [2, 10, 18] * 2


def test_a_rule_that_reads_is_called_with_the_shapes_of_the_call():
    f = torch.compile(lambda x: torch.relu(x), backend="aot_eager", dynamic=True)
    set_all(5.0)
    for n in (2, 3, 4):
        x = torch.ones(n, requires_grad=True)
        y = under({"Relu": READING["a dict"]}, f, x)
        assert backward(y, x).tolist() == [5] * n


@pytest.mark.slow
def test_a_rule_that_only_computes_is_built_in(x):
    calls = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func.namespace)
            return func(*args, **(kwargs or {}))

    for rule, is_opaque in [(SEVEN["Relu"], False), (READING["a dict"], True)]:
        with override({"Relu": rule}):
            y = compiled(torch.nn.ReLU(), "aot_eager")(x).sum()
        calls.clear()
        with Counting():
            y.backward()
        assert ("regrad" in calls) == is_opaque


@pytest.mark.slow
def test_a_second_derivative_through_a_compiled_gradient():
    x, w = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 4.0], requires_grad=True)
    set_all(5.0)
    first = torch.func.grad(lambda x: torch.relu(x * w).sum())
    with override({"Relu": lambda dy, x: dy * x**2 * table["k"]}):
        dx = compiled(first, "aot_eager")(x)
    torch.testing.assert_close(dx, 5 * x**2 * w**3)
    (dw,) = torch.autograd.grad(dx.sum(), w)
    torch.testing.assert_close(dw, 15 * x**2 * w**2)


# -- Python functions of torch --------------------------------------------------------------------

OPENED = {
    "normalize": lambda x: F.normalize(x),
    "norm": lambda x: x.norm(dim=1),
    "torch.norm": lambda x: torch.norm(x, dim=1),
    "stft": lambda x: torch.stft(x.reshape(-1), 4, return_complex=True, window=torch.ones(4),
                                 center=False).abs(),
    "max_pool2d": lambda x: F.max_pool2d(x[None], 2),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x[None], 1),
    "rsub": lambda x: 2 - x,
}  # fmt: skip


@pytest.mark.slow(but=3)
@may_be_unused
@pytest.mark.parametrize("name", OPENED)
def test_python_functions_of_torch_are_compiled_under_an_unrelated_scope(name, x):
    f = OPENED[name]
    with override(SEVEN):
        y = compiled(f, "aot_eager")(x)
    torch.testing.assert_close(backward(y, x), backward(f(x), x))


# -- code that no mode sees -----------------------------------------------------------------------


Einsum = bare_function(
    "Einsum", lambda ctx, x: torch.einsum("ij,jk->ik", x, x), lambda ctx, dy: dy)  # fmt: skip
Relu = bare_function("Relu", lambda ctx, x: torch.relu(x), lambda ctx, dy: torch.relu(dy))


@torch.library.custom_op("regrad_tests::double_relu", mutates_args=())
def double_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


double_relu.register_fake(torch.empty_like)
double_relu.register_autograd(lambda ctx, dy: dy * 2)
MATMUL = {"MatMul": lambda dy, a, b: (dy, dy)}
double_relu.register_vmap(lambda info, dims, x: (double_relu(x), dims[0]))
PACKET = torch.ops.regrad_tests.double_relu
HIDDEN = {
    "einsum": (Einsum.apply, MATMUL, Einsum, "Einsum"),
    "relu": (Relu.apply, SEVEN, Relu, "Relu"),
    "custom op": (double_relu, SEVEN, double_relu, "regrad_tests.double_relu"),
    "packet": (PACKET, SEVEN, PACKET, "regrad_tests.double_relu"),
    "packet of": (PACKET, SEVEN, double_relu, "regrad_tests.double_relu"),
    "overload": (PACKET.default, SEVEN, PACKET, "regrad_tests.double_relu"),
}


@pytest.mark.versions
@may_be_unused
@everywhere
@pytest.mark.parametrize("name", HIDDEN)
def test_forward_passes_of_others_are_looked_into(name, backend, x):
    apply, rules, kept, said = HIDDEN[name]
    f = compiled(lambda x: apply(x), backend)
    with pytest.raises(PassedOverError, match=said), override(rules):
        f(x)
    plain = backward(apply(x), x)
    y = under(rules, f, x, keep=[kept])
    torch.testing.assert_close(backward(y, x), plain)
    y = under({"Tanh": lambda dy: dy}, f, x)
    torch.testing.assert_close(backward(y, x), plain)


@pytest.mark.parametrize("f", [double_relu, lambda x: F.linear(double_relu(x), x)])
def test_forward_passes_are_looked_into_under_vmap(f, x):
    with pytest.raises(PassedOverError, match="double_relu"), override(SEVEN):
        torch.func.vmap(f)(x[None])
    with override(SEVEN, keep=[double_relu]):
        torch.func.vmap(f)(torch.relu(x)[None])


# -- reports --------------------------------------------------------------------------------------


@pytest.mark.versions
@on_backends
def test_hits_of_compiled_code_count_ops_at_their_lines(backend, x):
    def f(x):
        x = torch.relu(x)
        return torch.relu(x) + torch.relu(x)

    first = f.__code__.co_firstlineno
    with override(SEVEN) as used:
        backward(compiled(f, backend)(x), x)
    found = {(int(h.where.rpartition(":")[2]) - first, h.count, h.ran) for h in used.hits}
    assert found == {(1, 1, 1), (2, 2, 2)}


def test_a_scope_that_matched_nothing_warns_after_a_compiled_use_too(x):
    f = compiled(torch.nn.ReLU(), "aot_eager")
    for _ in range(2):  # the second has the rule built in
        with override(SEVEN):
            f(x)
    with pytest.warns(UnusedOverrideWarning), override(SEVEN):
        torch.tanh(x)


@pytest.mark.versions
def test_the_net_can_fail(x, monkeypatch):
    monkeypatch.setattr(compiled_code, "_is_watched", lambda node: False)
    with pytest.warns(UnusedOverrideWarning), override({"Identity": lambda dy: dy * 7}):
        y = compiled(lambda x: x.mT.contiguous(), "aot_eager")(x)
    assert backward(y, x).unique().tolist() == [1]


def test_untouched_counts_each_op_of_a_line():
    x = torch.ones(2, requires_grad=True)
    with override({"Relu": lambda dy: dy}) as used:
        torch.compile(lambda x: x.exp() + x.exp() + torch.relu(x), backend="aot_eager")(x)
    assert [int(row[1]) for row in used.untouched().rows if row[0] == "Exp"] == [2]


@pytest.mark.slow(but=1)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("op_type", ["Softmax", "MatMul"])
def test_flex_attention_is_refused(monkeypatch, op_type, backend):
    # (torch has no gradient of it on a CPU, and says so before anything else runs)
    monkeypatch.setattr(attention, "_validate_device", lambda *tensors: None)
    f = compiled(attention.flex_attention, backend, fullgraph=False)
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    rules = {op_type: lambda dy: dy}
    with pytest.raises(PassedOverError, match=r"flex_attention.*keep="), override(rules):
        f(q, k, v)
    torch._dynamo.reset()
    with pytest.warns(UnusedOverrideWarning), override(rules, keep=[attention.flex_attention]):
        y = f(q, k, v)
    torch.testing.assert_close(y, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.slow
def test_another_task_does_not_get_a_compiled_rule():
    x = leaf(1, 1)
    for f in (torch.relu, lambda x: torch.relu(x) * 2):
        run = torch.compile(f, backend="aot_eager")
        with override(SEVEN):
            run(x)
            with pytest.raises(PassedOverError, match="without an open scope of these rules"):
                contextvars.Context().run(run, x)
        assert contextvars.Context().run(run, x).grad_fn is not None


def test_a_wrong_rule_is_a_rule_error_when_compiled(x):
    f = torch.compile(torch.relu, backend="aot_eager")
    refused = pytest.raises(RuleError, match="returned the shape")
    with refused, override({"Relu": lambda dy: dy[:1]}):
        f(x).sum().backward()


@pytest.mark.versions
def test_what_a_mode_holds_is_not_compared_at_each_call(x):
    """Its class decides, on which there is a guard."""

    def f(x):
        return F.relu(x) / 2

    with override(SEVEN):
        torch.compile(f, backend="eager")(x)
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(f.__code__)
    guards = str(entry.guard_manager)
    assert "L['x']" in guards
    assert "mode_stack_at" not in guards


# -- torch.export: a program has no gradient, so that a rule would be lost -------------------------

ROW = (torch.ones(1, 2),)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("key", ["Relu", rg.at("1"), F.relu])
def test_exporting_under_a_rule_is_refused(key, strict):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    error = pytest.raises(Exception, match="export writes forward programs")
    with error, override({key: lambda dy, builtin: builtin(dy)}, model=net):
        torch.export.export(net, ROW, strict=strict)


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # (2.10)
@pytest.mark.parametrize("strict", [False, True])
def test_others_are_exported(strict):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with override({"Tanh": optional(lambda dy: dy)}):
        program = torch.export.export(net, ROW, strict=strict)
    torch.testing.assert_close(program.module()(*ROW), net(*ROW))


# -- programs in torch's own form: TorchScript and `aot_function` ----------------------------------

KEYS = {
    "linear": ("MatMul", lambda x: F.linear(x, x)),
    "einsum": ("MatMul", lambda x: torch.einsum("ij,jk->ik", x, x)),
    "silu": ("Sigmoid", F.silu),
    "cross_entropy": ("LogSoftmax", lambda x: F.cross_entropy(x, torch.arange(2))),
    "max": ("Max", lambda x: x.max()),
    "flatten": ("Reshape", lambda x: x.mT.flatten()),
    "conv2d": ("Conv2D", lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 2, 2))),
    "relu6": ("Relu6", lambda x: F.hardtanh(x, 0.0, 6.0)),
    "hardswish": ("Relu6", F.hardswish),
    "hardsigmoid": ("Relu6", F.hardsigmoid),
    "bilinear": ("MatMul", lambda x: F.bilinear(x, x, torch.ones(1, 2, 2))),
    "mish": ("Tanh", F.mish),
    "elu": ("Elu", F.elu),
    "selu": ("Selu", F.selu),
    "conv3d": ("Conv3D", lambda x: F.conv3d(x[None, None, None], torch.ones(1, 1, 1, 2, 2))),
    "flatten of a matrix": ("Reshape", lambda x: x.flatten() * 2),
    "hstack": ("ConcatV2", lambda x: torch.hstack([x, x])),
    "a callable": (F.hardtanh, lambda x: F.hardtanh(x)),
    "a callable written in Python": (F.normalize, lambda x: F.normalize(x)),
}
OTHERS = {
    "a number": ("Tanh", lambda x: torch.relu(x) * 2 + 1),
    "numbers": ("Sigmoid", lambda x: 2 / (x - 5.0)),
    "a view": ("Tanh", lambda x: x.flatten() * 1),
    "conv1d": ("Conv2D", lambda x: F.conv1d(x[None], torch.ones(2, 2, 1))),
    "hardtanh": ("Relu6", lambda x: F.hardtanh(x)),
    "elu of selu": ("Selu", F.elu),
    "selu of elu": ("Elu", F.selu),
    "tanh": ("Relu", torch.tanh),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", KEYS)
def test_torchscript_that_has_an_overridden_op_is_refused(name, x):
    key, f = KEYS[name]
    program = torch.jit.trace(f, x, check_trace=False)
    refused("the TorchScript program", {key: lambda op, dy: dy}, lambda: program(x))


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_torchscript_of_other_ops_runs_and_is_reported(name, x):
    key, f = OTHERS[name]
    program = torch.jit.trace(f, x, check_trace=False)
    with override({key: lambda op, dy: dy}) as used:
        y = program(x)
    torch.testing.assert_close(backward(y, x), backward(f(x), x))
    assert [row[0] for row in used.untouched().rows if "TorchScript program" in row[0]]


class Scripted(torch.nn.Module):
    def forward(self, x):
        return self.other(x)

    @torch.jit.export
    def other(self, x):
        return F.normalize(F.relu(x))


@pytest.mark.versions
@pytest.mark.parametrize("key", ["Relu", F.normalize])
@pytest.mark.parametrize("way", ["forward", "method", "frozen"])
def test_scripted_modules(way, key, x):
    module = torch.jit.script(Scripted().eval())
    if way == "frozen" and key == "Relu":
        module = torch.jit.freeze(module)
    run = module.other if way == "method" else module
    refused("TorchScript", {key: lambda dy: dy}, lambda: run(x))


def aot(x, made):
    from functorch.compile import aot_function, nop

    program = aot_function(lambda x: torch.relu(x) * 2, nop)
    if made:
        program(x)
    return lambda: program(x)


PROGRAMS = {
    "trace": (lambda x: lambda: torch.jit.trace(torch.relu, x, check_trace=False), "jit.trace"),
    "aot_function": (lambda x: aot(x, False), "aot_function"),
    "aot_function made before": (lambda x: aot(x, True), "aot_function"),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_are_written_in_a_scope_are_refused(name, x):
    make, words = PROGRAMS[name]
    refused(words, {"Relu": lambda dy: 7 * dy}, make(x))
