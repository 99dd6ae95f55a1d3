"""Rules that replace values, that change an op's own gradient, or are that of another function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, GraphError, RuleError
from regrad.rules import vjp_of
from tests.helpers.optional import optional
from tests.helpers.rows import WAYS, close, plain, refusals, refused

torch, F = optional("torch"), optional("torch.nn.functional")
rng = np.random.default_rng(0)
A, B, X = rng.normal(size=(3, 4)), rng.normal(size=(4, 2)), np.array([1.5, -2.0, 3.0])
T = rg.tensor(X)
ways = pytest.mark.parametrize("way", WAYS)
OTHER = lambda rules: rg.torch.gradient_override_map(rules)  # noqa: E731


def scope(forward, gradient=None, op_type="Tanh"):
    return rg.gradient_override_map({op_type: rg.replace(forward, gradient)}, values=True)


# -- replaced values -------------------------------------------------------------------------------


def quantised(x, xp=rg):
    scale = abs(x).max() / 127
    return xp.clip(xp.round(x / scale), -128, 127) * scale


def straight_through(dy, a, b):
    return dy @ rg.matrix_transpose(b), rg.matrix_transpose(a) @ dy


def layer(a):
    return (a @ rg.tensor(B)).square().sum()


@ways
def test_a_quantised_layer(way):
    y = quantised(A, np) @ quantised(B, np)
    forward = lambda a, b, forward: forward(quantised(a), quantised(b))  # noqa: E731
    with scope(forward, straight_through, "MatMul") as used:
        f = WAYS[way](layer)
        close(f(rg.tensor(A)), np.sum(y**2))
        close([rg.grad(f)(rg.tensor(A)), rg.jit(rg.grad(f))(rg.tensor(A))], [2 * y @ B.T] * 2)
    used.assert_fired()
    assert {hit.rule for hit in used.hits} == {"replace(<lambda>, straight_through)"}
    close(layer(rg.tensor(A)), np.sum((A @ B) ** 2))


TANH = np.tanh(X)


def test_loops_branches_and_vmap():
    looped = lambda x: rg.scan(lambda c, _: (rg.tanh(c) + 1, c), x, rg.zeros(2))[0].sum()  # noqa: E731
    each = rg.vmap(rg.grad(lambda x: rg.tanh(x)))
    turn = lambda s: (s[0] + 1, rg.tanh(s[1]))  # noqa: E731
    with scope(lambda x: x * x, lambda dy, x, y: dy * y):
        close(looped(T), np.sum((X**2 + 1) ** 2 + 1))
        close(rg.grad(looped)(T), X**2 * (X**2 + 1) ** 2)
        close(rg.while_loop(lambda s: s[0] < 2, turn, (0, T))[1], X**4)
        close([rg.cond(T.sum() > 0, rg.tanh, lambda x: x, T), each(T), rg.jit(each)(T)], [X**2] * 3)


def test_sequences_and_broadcast_inputs():
    with scope(lambda xs, axis, forward: forward([2 * x for x in xs]), None, "ConcatV2"):
        assert rg.concat([T, T]).tolist() == [*(2 * X), *(2 * X)]
        assert rg.grad(lambda x: rg.concat([x, x]).sum())(T).tolist() == [4, 4, 4]
    with scope(lambda a, b: a + b, lambda dy, a, b: (10 * dy, 100 * dy), "Mul"):
        a = rg.tensor(np.ones((2, 3)))
        assert (a * T).tolist() == [(1 + X).tolist()] * 2
        assert rg.grad(lambda b: (a * b).sum())(T).tolist() == [200, 200, 200]  # summed over rows


def test_in_one_place_with_its_site():
    seen = []
    rules = {rg.at("head", "Tanh"): rg.replace(lambda x, site: (seen.append(site.path), -x)[1])}
    with rg.gradient_override_map(rules, values=True) as used:
        assert rg.tanh(T).tolist() == TANH.tolist()
        with rg.name_scope("head"):
            assert rg.tanh(T).tolist() == (-X).tolist()
    used.assert_fired()  # no gradient is needed for that: the value was replaced
    assert seen == [hit.path for hit in used.hits] == ["head"]


def test_the_inner_scope_wins():
    with scope(lambda x: 2 * x):
        with scope(lambda x: 3 * x):
            assert rg.tanh(T).tolist() == (3 * X).tolist()
        with rg.gradient_override_map({"Tanh": lambda dy: dy}):
            assert rg.tanh(T).tolist() == TANH.tolist()
        assert rg.tanh(T).tolist() == (2 * X).tolist()
    assert scope(lambda x: 4 * x)(lambda x: rg.tanh(x))(T).tolist() == (4 * X).tolist()


def test_one_compiled_function_under_several_scopes():
    f = rg.jit(lambda x: rg.tanh(x))
    for _ in range(2):
        for factor in (2, 3):
            with scope(lambda x, k=factor: k * x):
                close(f(T), factor * X)
        close(f(T), TANH)


def read_in_a_graph():
    with scope(lambda x: x, None, "Identity"), tf.Graph().as_default():
        tf.Variable(1.0).read_value()


def entered(rules, f=None, **options):
    with rg.gradient_override_map(rules, **options):
        return f and f(T)


DOUBLED = rg.replace(lambda x: 2 * x)
REFUSED = [
    (lambda: tf.Graph().gradient_override_map({"Tanh": DOUBLED}), ArgumentError, "values=True"),
    (lambda: scope(rg.sin, None, "Split").__enter__(), RuleError, "'Split' returns several result"),
    (read_in_a_graph, GraphError, "cannot be replaced as TensorFlow 1 makes it"),
    (lambda: rg.replace(3), ArgumentError, "forward expected a function .* got int"),
    (lambda: rg.replace(rg.sin, 1.0), ArgumentError, "gradient expected a rule .* got float"),
    (lambda: rg.replace(rg.sin, DOUBLED), ArgumentError, "gradient expected a rule"),
    (lambda: entered({rg.at("head"): DOUBLED}), ArgumentError, "needs values=True"),
    (lambda: entered({rg.at("head"): rg.rules.reverse()}, order=1), ArgumentError, "order=1 uses"),
    (lambda: vjp_of(3), ArgumentError, "vjp_of expected a function, got int"),
    (lambda: entered({"Sign": vjp_of(lambda q, z: q)}), RuleError,
     "takes 'q', which the op type 'Sign' does not have"),
    (lambda: vjp_of(rg.nn.sigmoid)(1.0), RuleError, "cannot be called"),
    (lambda: in_torch(lambda x: x.sum()), RuleError,
     r"returned the shape \(\), expected the shape of the op's result, \(3,\)"),
    (lambda: in_torch(lambda x: (x, x)), RuleError, "expected one result, like the op's, got tup"),
    (lambda: rg.rules.clip(2, 1), ArgumentError, r"min \(2\) must not be greater than max \(1\)"),
    (lambda: rg.rules.clip_norm(0), ArgumentError, "clip_norm: expected a max_norm above 0, got 0"),
]  # fmt: skip
test_what_is_refused = refusals(REFUSED)


# -- the gradient of another function --------------------------------------------------------------

S = 1 / (1 + np.exp(-X))
FIRST, SECOND = S * (1 - S), S * (1 - S) * (1 - 2 * S)  # of the sigmoid, by hand
WRITTEN = {
    "torch's function": torch.sigmoid,
    "with torch": lambda x: torch.sigmoid(x),
    "regrad's function": rg.nn.sigmoid,
    "with regrad": lambda x: rg.nn.sigmoid(x),
    "with operators": lambda x: 1 / (1 + np.e ** (-x)),
}


def in_torch(g, way=torch.sign, order=1):
    x = torch.tensor(X, requires_grad=True)
    with OTHER({"Sign": vjp_of(g)}) as used:
        y = way(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=order == 2)
    used.assert_fired()
    return dx if order == 1 else torch.autograd.grad(dx.sum(), x)[0]


@pytest.mark.versions
@pytest.mark.parametrize("name", WRITTEN)
def test_in_torch(name):
    torch._dynamo.reset()
    compiled = torch.compile(torch.sign, backend="aot_eager", fullgraph=True)
    close([in_torch(WRITTEN[name]), in_torch(WRITTEN[name], compiled)], [FIRST, FIRST])
    close(in_torch(WRITTEN[name], order=2), SECOND)
    with OTHER({"Sign": vjp_of(WRITTEN[name])}):
        close(torch.func.vmap(torch.func.grad(torch.sign))(torch.tensor(X)), FIRST)


def test_under_vmap():
    with rg.gradient_override_map({"Step": vjp_of(rg.nn.sigmoid)}):
        close(rg.vmap(rg.grad(rg.step))(T), FIRST)


def numbers(*shape):
    return torch.tensor(rng.normal(size=shape), requires_grad=True)


def positive(a, b):
    return a.clamp(min=0) @ b.clamp(min=0)


def filtered(x, w, bias, strides, pad, dilations):
    return F.conv2d(x, w.clamp(min=0), bias.abs(), strides, pad, dilations)


PRODUCT, IMAGES = [(2, 3), (3, 4)], [(1, 2, 5, 5), (3, 2, 2, 2), (3,)]
# An op type, a function for its gradient; the function that runs, and the one differentiated.
BY_NAMES = {
    "by name": ("MatMul", positive, torch.matmul, positive, PRODUCT),
    "by place": ("MatMul", lambda left, right: positive(left, right), torch.matmul, positive,
                 PRODUCT),
    "a convolution": ("Conv2D", filtered, lambda x, w, b: F.conv2d(x, w, b, 2, 1),
                      lambda x, w, b: filtered(x, w, b, 2, 1, 1), IMAGES),
    "a sequence": ("ConcatV2", lambda xs: torch.cat([x**2 for x in xs]),
         lambda *xs: torch.cat(xs), lambda *xs: torch.cat([x**2 for x in xs]), [(2,), (3,)]),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_NAMES)
def test_several_inputs(name):
    key, g, f, differentiated, shapes = BY_NAMES[name]
    xs = [numbers(*shape) for shape in shapes]
    with OTHER({key: vjp_of(g)}):
        y = f(*xs)
    weights = torch.cos(torch.arange(float(y.numel()))).reshape(y.shape)
    expected = torch.autograd.grad((differentiated(*xs) * weights).sum(), xs)
    close(torch.autograd.grad((y * weights).sum(), xs), expected)


@pytest.mark.versions
def test_a_product_of_float32_is_not_of_bfloat16():
    a, b = (numbers(*s).detach().float().requires_grad_() for s in [(4, 64), (64, 4)])
    with OTHER({"MatMul": vjp_of(lambda a, b: a @ b)}):
        found = torch.autograd.grad((a @ b).sum(), [a, b])
    ones = torch.ones(4, 4, dtype=torch.float64)
    close(found, [ones @ b.detach().double().T, a.detach().double().T @ ones], 1e-5)


def test_one_function_is_one_rule():
    assert vjp_of(rg.nn.sigmoid) == vjp_of(rg.nn.sigmoid) != vjp_of(rg.tanh)
    assert len({vjp_of(lambda x: x) for _ in range(3)}) == 1


# -- an op's own gradient, changed -----------------------------------------------------------------


def test_a_gradient_of_zero_has_a_norm_and_a_second_derivative():
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with OTHER({"Pow": rg.rules.clip_norm(1.0)}):
        y = (x**2).sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    assert plain([dx, ddx]) == [[0.0] * 3, [2.0] * 3]


# -- ops of several outputs: the gradients that arrive scale and add -------------------------------

SQUARE = np.cos(np.arange(16.0).reshape(4, 4)) + np.diag([3.0, 4.0, 5.0, 6.0])
OURS = {
    "Split": lambda x: rg.sum(rg.split(x, 2)[0] ** 2),
    "Svd": lambda x: rg.sum(rg.linalg.svd(x)[1] ** 2),
    "Unpack": lambda x: rg.sum(rg.unstack(x)[0] ** 2),
    "Qr": lambda x: rg.sum(rg.linalg.qr(x)[1] ** 3),
}
TWICE = {
    "builtin(2 dy)": lambda dy, builtin: builtin(2 * dy),
    "builtin(dy + dy)": lambda dy, builtin: builtin(dy + dy),
    "builtin(dy / 0.5)": lambda dy, builtin: builtin(dy / 0.5),
    "2 builtin(dy)": lambda dy, builtin: 2 * builtin(dy),
}
NONE = {"None": lambda dy, builtin: builtin([None if not np.any(d) else 2 * d for d in dy])}


@pytest.mark.parametrize("rule", TWICE | NONE)
@pytest.mark.parametrize("key", OURS)
def test_several_outputs(key, rule):
    df = rg.grad(OURS[key])
    expected = 2 * df(rg.tensor(SQUARE)).numpy()
    with rg.gradient_override_map({key: (TWICE | NONE)[rule]}):
        for way in (df,) if rule in NONE else (df, rg.jit(df)):  # (jit has no numbers to look at)
            close(way(rg.tensor(SQUARE)), expected, 1e-9)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("rule", TWICE)
def test_several_outputs_in_jax(rule, mode):
    f, x = (lambda x: jnp.sum(jnp.linalg.qr(x)[1] ** 3)), jnp.asarray(SQUARE)
    found = mode(jax.grad(rg.jax.override(f, {jnp.linalg.qr: TWICE[rule]})))(x)
    close(found, 2 * jax.grad(f)(x), 1e-9)


@pytest.mark.parametrize("wrong", [lambda dy: [*dy, *dy], lambda dy: dy[0], lambda dy: dy[:1]])
@pytest.mark.parametrize("key", OURS)
def test_a_wrong_number_of_gradients_is_refused(key, wrong):
    rules = {key: lambda dy, builtin: builtin(wrong(dy))}
    with rg.gradient_override_map(rules):
        words = r"passed (1 \w+t|\d \w+s), and the op has (1 \w+t|\d \w+s)\."
        refused(lambda: rg.grad(OURS[key])(rg.tensor(SQUARE)), RuleError, words)
