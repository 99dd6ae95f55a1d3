"""`builtin` and `forward` in rules for PyTorch: three times torch's own gradient, in every way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.torch
from regrad.errors import GradientError, RuleError
from regrad.torch.optypes import families, spellings
from tests.torch.test_ops import plain, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
override = regrad.torch.gradient_override_map
D = torch.float64


def numbers(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


# -- three ways to write it ------------------------------------------------------------------------


def scaled(dy, builtin):
    return 3 * builtin(dy)


def scaled_dy(dy, builtin):  # written with torch's functions
    return builtin(torch.mul(dy, 3))


def scaled_by_regrad(dy, builtin):
    def times(dx):
        if isinstance(dx, tuple):
            return [times(part) for part in dx]
        return None if dx is None else rg.multiply(3.0, dx)

    return times(builtin(dy))


RULES = [scaled, scaled_dy, scaled_by_regrad]


def gradients(f, xs, order=1):
    """Those of a weighted sum of what `f(*xs)` returns."""
    xs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in xs]
    leaves = [x for x in xs if x.requires_grad]
    y = f(*xs)
    weights = torch.linspace(1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    for _ in range(order):
        found = torch.autograd.grad(
            (y * weights).sum(), leaves, create_graph=True, materialize_grads=True
        )
        y, weights = torch.cat([dx.flatten() for dx in found]), 0.7
    return [dx.detach() for dx in found]


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.versions
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("op_type", families())
def test_every_spelling(op_type, rule):
    for function, spelling in spellings().items():
        if spelling.family.type != op_type:
            continue
        for args, y in plain(function, op_type, spelling.in_place):
            theirs, given = run(function, args, spelling.in_place)
            try:
                theirs.backward(y.detach().cos())
            except (NotImplementedError, RuntimeError):
                continue  # torch has no derivative
            with override({op_type: rule}) as used:
                ours, xs = run(function, args, spelling.in_place)
            assert torch.equal(ours, y)
            ours.backward(y.detach().cos())
            used.assert_fired()
            for x, other in zip(xs, given, strict=True):
                if other.grad is not None:
                    torch.testing.assert_close(x.grad, 3 * other.grad, rtol=1e-12, atol=1e-12)


# -- every way -------------------------------------------------------------------------------------

CASES = {
    "Tanh": ("Tanh", torch.tanh, [numbers(3)]),
    "a product of itself": ("Mul", lambda x: x * x, [numbers(3)]),
    "broadcast": ("Mul", torch.mul, [numbers(3), numbers(2, 3)]),
    "a number": ("Mul", lambda x: x * 2.0, [numbers(3)]),
    "MatMul": ("MatMul", torch.matmul, [numbers(2, 3), numbers(3, 4)]),
    "in place": ("Relu", lambda x: F.relu(x * 1, inplace=True), [numbers(5)]),
    "a list": ("ConcatV2", lambda a, b: torch.cat([a, b]), [numbers(2), numbers(3)]),
    "several outputs": (torch.sort, lambda x: torch.sort(x)[0], [numbers(3, 2)]),
    "linear": (F.linear, F.linear, [numbers(3, 2), numbers(4, 2), numbers(4)]),
    "layer norm": (
        F.layer_norm,
        lambda x, w, b: F.layer_norm(x, (3,), w, b),
        [numbers(2, 3), numbers(3, seed=1), numbers(3, seed=2)],
    ),
}
WAYS = {
    "eager": lambda f: f,
    "checkpoint": lambda f: lambda *xs: checkpoint(f, *xs, use_reentrant=False),
    "compiled": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
}


@pytest.mark.versions
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_three_times_torchs_gradient(name, rule, way):
    key, f, xs = CASES[name]
    if rule is scaled_dy and name == "several outputs":
        rule = lambda dy, builtin: builtin((3 * dy[0], None))  # noqa: E731
    torch._dynamo.reset()
    expected = [3 * dx for dx in gradients(f, xs)]

    def in_scope(*xs):
        with override({key: rule}):
            return WAYS[way](f)(*xs)

    close(gradients(in_scope, xs), expected)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["Tanh", "MatMul", "layer norm", "linear"])
def test_higher_orders_are_those_of_torch(name, rule):
    key, f, xs = CASES[name]

    def in_scope(*xs):
        with override({key: rule}):
            return f(*xs)

    for order in (2, 3) if name in ("Tanh", "layer norm") else (2,):  # (of products, 0 from there)
        close(gradients(in_scope, xs, order), [3 * dx for dx in gradients(f, xs, order)])


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: (f(x) ** 2).sum()),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: (f(x) ** 2).sum())),
    "grad of vmap": lambda f: torch.func.grad(lambda x: (torch.func.vmap(f)(x) ** 2).sum()),
    "jacrev": torch.func.jacrev,
}


@pytest.mark.versions
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("compiled", [False, True])
def test_under_torch_func(transform, rule, compiled):
    f, x = lambda x: x.softmax(-1), numbers(4, 3)
    expected = 3 * TRANSFORMS[transform](f)(x)
    torch._dynamo.reset()
    with override({"Softmax": rule}) as used:
        run = TRANSFORMS[transform](f)
        got = (torch.compile(run, backend="aot_eager") if compiled else run)(x)
    used.assert_fired()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_compiled_code_asks_a_rule_that_reads_what_may_change():
    torch._dynamo.reset()
    strength = {"now": 2.0}
    f = torch.compile(torch.tanh, backend="aot_eager", fullgraph=True)
    x = numbers(3)
    for strength["now"] in (2.0, 5.0):

        def in_scope(x):
            with override({"Tanh": lambda dy, builtin: strength["now"] * builtin(dy)}):
                return f(x)

        close(gradients(in_scope, [x]), [strength["now"] * gradients(torch.tanh, [x])[0]])


# -- what the forward pass changes, or draws -------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_buffers_change_once(way, rule):
    x = numbers(5, 3)
    torch._dynamo.reset()
    found = []
    for rules in ({F.batch_norm: rg.rules.optional(lambda dy: None)}, {F.batch_norm: rule}):
        norm, leaf = nn.BatchNorm1d(3).double(), x.clone().requires_grad_()
        if rules[F.batch_norm] is rule:
            with override(rules):
                y = WAYS[way](norm)(leaf)
        else:
            y = WAYS[way](norm)(leaf)
        (y**3).sum().backward()
        found.append([norm.running_mean, leaf.grad, norm.weight.grad, norm.bias.grad])
    (mean, *dxs), (ours, *got) = found
    torch.testing.assert_close(ours, mean)
    close(got, [3 * dx for dx in dxs])


def test_random_numbers_are_those_of_the_forward_pass():
    x = torch.ones(100, requires_grad=True)
    with override({F.dropout: scaled}):
        y = F.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad, 3 * y.detach()) and set(x.grad.tolist()) == {0.0, 6.0}


@pytest.mark.parametrize(("rule", "way"), [(scaled, "checkpoint"), (scaled_by_regrad, "eager")])
def test_random_numbers_that_would_be_drawn_again_are_refused(rule, way):
    x = torch.ones(100, requires_grad=True)
    with override({F.dropout: rule}):
        y = WAYS[way](lambda x: F.dropout(x, 0.5))(x)
    with pytest.raises(GradientError, match="draws random numbers"):
        y.sum().backward()


# -- Functions -------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    """A product, with a number and with another gradient than its own."""

    @staticmethod
    def forward(ctx, a, k, b):
        ctx.save_for_backward(a, b)
        ctx.k = k
        return a * b * k

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return dy * b.sin() * ctx.k, None, dy * a.cos() * ctx.k


class InNewForm(Scaled):
    @staticmethod
    def forward(a, k, b):
        return a * b * k

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, ctx.k, b = inputs
        ctx.save_for_backward(a, b)


@pytest.mark.versions
@pytest.mark.parametrize("way", ["eager", "checkpoint"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("function", [Scaled, InNewForm])
def test_a_function_has_its_own_backward(function, rule, way):
    xs = [numbers(3), numbers(3, seed=1)]
    f = lambda a, b: function.apply(a, 2, b)  # noqa: E731

    def in_scope(*xs):
        with override({function: rule}) as used:
            y = WAYS[way](f)(*xs)
        scopes.append(used)
        return y

    scopes = []
    close(gradients(in_scope, xs), [3 * dx for dx in gradients(f, xs)])
    scopes[0].assert_fired()
    a, b = xs
    weights = torch.linspace(1, 2, 3, dtype=D)
    close(gradients(in_scope, xs), [6 * b.sin() * weights, 6 * a.cos() * weights])
    expected = [-4.2 * a.sin() * weights, 4.2 * b.cos() * weights]
    close(gradients(in_scope, xs, 2), expected)


# -- rules.builtin, forward ------------------------------------------------------------------------


def test_the_builtin_of_a_callable_is_a_value():
    xs = CASES["linear"][2]

    def in_scope(*xs):
        with override({F.linear: rg.rules.builtin(F.linear)}) as used:
            y = F.linear(*xs)
        scopes.append(used)
        return y

    scopes = []
    close(gradients(in_scope, xs), gradients(F.linear, xs))
    assert [(hit.rule, hit.ran) for hit in scopes[0].hits] == [("linear", 1)]


def test_builtins_that_do_not_fit_are_refused():
    with pytest.raises(RuleError, match=r"builtin\(relu\) is not the gradient of 'Tanh'"):
        override({"Tanh": rg.rules.builtin(F.relu)}).__enter__()
    with pytest.raises(RuleError, match="an op type of regrad's"):
        rg.gradient_override_map({"Relu": rg.rules.builtin(F.relu)}).__enter__()
    with pytest.raises(RuleError, match="Ask for builtin by name"):
        rg.rules.builtin(F.relu)(torch.ones(1))


@pytest.mark.parametrize("way", WAYS)
def test_forward_is_the_op(way):
    def rule(dy, x, forward):
        return dy * forward(x + 1)

    torch._dynamo.reset()
    x = numbers(3).requires_grad_()
    with override({"Tanh": rule}):
        y = WAYS[way](torch.tanh)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, (x + 1).tanh().detach())


def test_forward_of_several_inputs_and_numbers():
    x = numbers(3).requires_grad_()
    with override({"Mul": lambda dy, a, b, forward: (dy * forward(a + 1, b), None)}):
        y = x * 2.0
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 2 * (x + 1).detach())
    with override({"Mul": lambda dy, a, b, forward: (dy * forward(a, 3.0), None)}):
        y = x * 2.0
    with pytest.raises(RuleError, match=r"an input is the number 2\.0, and cannot be another"):
        y.sum().backward()
