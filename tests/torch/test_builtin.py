"""`builtin` and `forward` in rules for PyTorch: three times torch's own gradient, in every way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import GradientError, RuleError
from regrad.torch.optypes import families, spellings
from tests.torch.common import D, close, function, grad, numbers, override
from tests.torch.test_ops import plain, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

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
three_ways = pytest.mark.parametrize("rule", RULES)


def gradients(f, xs, order=1):
    """Those of a weighted sum of what `f(*xs)` returns."""
    xs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in xs]
    leaves = [x for x in xs if x.requires_grad]
    y = f(*xs)
    weights = torch.linspace(1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    for _ in range(order):
        total, options = (y * weights).sum(), {"create_graph": True, "materialize_grads": True}
        found = torch.autograd.grad(total, leaves, **options)
        y, weights = torch.cat([dx.flatten() for dx in found]), 0.7
    return [dx.detach() for dx in found]


def in_scope(key, rule, f, way="eager", scopes=None):
    """Return a function that runs another one under a rule."""

    def run(*xs):
        with override({key: rule}) as used:
            y = WAYS[way](f)(*xs)
        if scopes is not None:
            scopes.append(used)
        return y

    return run


@pytest.mark.versions
@three_ways
@pytest.mark.parametrize("op_type", families())
def test_every_spelling(op_type, rule):
    for f, spelling in spellings().items():
        if spelling.family.type != op_type:
            continue
        for args, y in plain(f, op_type, spelling.in_place):
            theirs, given = run(f, args, spelling.in_place)
            try:
                theirs.backward(y.detach().cos())
            except (NotImplementedError, RuntimeError):
                continue  # torch has no derivative
            with override({op_type: rule}) as used:
                ours, xs = run(f, args, spelling.in_place)
            assert torch.equal(ours, y)
            ours.backward(y.detach().cos())
            used.assert_fired()
            pairs = [(x.grad, other.grad) for x, other in zip(xs, given, strict=True)]
            close(*zip(*[(dx, 3 * due) for dx, due in pairs if due is not None], strict=True))


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
    "layer norm": (F.layer_norm, lambda x, w, b: F.layer_norm(x, (3,), w, b),
                   [numbers(2, 3), numbers(3, seed=1), numbers(3, seed=2)]),
}  # fmt: skip
WAYS = {
    "eager": lambda f: f,
    "checkpoint": lambda f: lambda *xs: checkpoint(f, *xs, use_reentrant=False),
    "compiled": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
}


@pytest.mark.versions
@pytest.mark.parametrize("way", WAYS)
@three_ways
@pytest.mark.parametrize("name", CASES)
def test_three_times_torchs_gradient(name, rule, way):
    key, f, xs = CASES[name]
    if rule is scaled_dy and name == "several outputs":
        rule = lambda dy, builtin: builtin((3 * dy[0], None))  # noqa: E731
    torch._dynamo.reset()
    expected = [3 * dx for dx in gradients(f, xs)]
    close(gradients(in_scope(key, rule, f, way), xs), expected)


@three_ways
@pytest.mark.parametrize("name", ["Tanh", "MatMul", "layer norm", "linear"])
def test_higher_orders_are_those_of_torch(name, rule):
    key, f, xs = CASES[name]
    for order in (2, 3) if name in ("Tanh", "layer norm") else (2,):  # (of products, 0 from there)
        expected = [3 * dx for dx in gradients(f, xs, order)]
        close(gradients(in_scope(key, rule, f), xs, order), expected)


TRANSFORMS = {
    "grad": lambda f: torch.func.grad(lambda x: (f(x) ** 2).sum()),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(lambda x: (f(x) ** 2).sum())),
    "grad of vmap": lambda f: torch.func.grad(lambda x: (torch.func.vmap(f)(x) ** 2).sum()),
    "jacrev": torch.func.jacrev,
}


@pytest.mark.versions
@three_ways
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
        rule = lambda dy, builtin: strength["now"] * builtin(dy)  # noqa: E731
        expected = [strength["now"] * gradients(torch.tanh, [x])[0]]
        close(gradients(in_scope("Tanh", rule, f), [x]), expected)


# -- what the forward pass changes, or draws -------------------------------------------------------


@three_ways
@pytest.mark.parametrize("way", WAYS)
def test_buffers_change_once(way, rule):
    torch._dynamo.reset()
    found = []
    for ruled in (False, True):
        norm, leaf = nn.BatchNorm1d(3).double(), numbers(5, 3).requires_grad_()
        f = in_scope(F.batch_norm, rule, norm, way) if ruled else WAYS[way](norm)
        (f(leaf) ** 3).sum().backward()
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


# A product, with a number and with another gradient than its own.
of_scaled = lambda dy, a, k, b: (dy * b.sin() * k, None, dy * a.cos() * k)  # noqa: E731
Scaled = function(lambda a, k, b: a * b * k, of_scaled)
InNewForm = function(lambda a, k, b: a * b * k, of_scaled, newer=True)


@pytest.mark.versions
@pytest.mark.parametrize("way", ["eager", "checkpoint"])
@three_ways
@pytest.mark.parametrize("function", [Scaled, InNewForm])
def test_a_function_has_its_own_backward(function, rule, way):
    xs, scopes = [numbers(3), numbers(3, seed=1)], []
    f = lambda a, b: function.apply(a, 2, b)  # noqa: E731
    ruled = in_scope(function, rule, f, way, scopes)
    close(gradients(ruled, xs), [3 * dx for dx in gradients(f, xs)])
    scopes[0].assert_fired()
    a, b = xs
    weights = torch.linspace(1, 2, 3, dtype=D)
    close(gradients(ruled, xs), [6 * b.sin() * weights, 6 * a.cos() * weights])
    close(gradients(ruled, xs, 2), [-4.2 * a.sin() * weights, 4.2 * b.cos() * weights])


# -- rules.builtin, forward ------------------------------------------------------------------------


def test_the_builtin_of_a_callable_is_a_value():
    xs, scopes = CASES["linear"][2], []
    ruled = in_scope(F.linear, rg.rules.builtin(F.linear), F.linear, scopes=scopes)
    close(gradients(ruled, xs), gradients(F.linear, xs))
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
    torch._dynamo.reset()
    x = numbers(3).requires_grad_()
    rule = lambda dy, x, forward: dy * forward(x + 1)  # noqa: E731
    y = in_scope("Tanh", rule, torch.tanh, way)(x)
    close([grad(y, x)], [(x + 1).tanh()])


def test_forward_of_several_inputs_and_numbers():
    x, twice = numbers(3).requires_grad_(), lambda x: x * 2.0
    y = in_scope("Mul", lambda dy, a, b, forward: (dy * forward(a + 1, b), None), twice)(x)
    close([grad(y, x)], [2 * (x + 1)])
    y = in_scope("Mul", lambda dy, a, b, forward: (dy * forward(a, 3.0), None), twice)(x)
    with pytest.raises(RuleError, match=r"an input is the number 2\.0, and cannot be another"):
        y.sum().backward()
