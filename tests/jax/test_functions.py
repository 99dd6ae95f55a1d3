"""Functions that JAX inlines, and primitives that are op types in one of their forms.

The expected gradients are JAX's own, times a factor for each operand.
"""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

import regrad as rg
from regrad.errors import GradientError, UnusedOverrideWarning
from tests.helpers.jax_model import slopes, times
from tests.helpers.jax_places import AROUND

override = rg.jax.override
X = jax.random.normal(jax.random.key(0), (2, 3, 4))
LAYOUT = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def weighted(f):
    return lambda x: (f(x) * jnp.arange(1.0, 1 + f(x).size).reshape(f(x).shape)).sum()


def near(found, expected):
    assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def again(f, dy, x, *args, **options):
    """Three times JAX's own gradient of f."""
    return 3 * jax.vjp(lambda x: f(x, *args, **options), x)[1](dy)[0]


softmax, log_softmax, gelu, lse = jax.nn.softmax, jax.nn.log_softmax, jax.nn.gelu, jax.nn.logsumexp
mean = jnp.mean
CALLS = {
    "Softmax": (softmax, lambda dy, x, axis: again(softmax, dy, x, axis),
                [{}, {"axis": 0}, {"axis": 1}, {"axis": -2}, {"axis": (0, 2)}]),
    "LogSoftmax": (log_softmax, lambda dy, x, axis: again(log_softmax, dy, x, axis),
                   [{}, {"axis": 0}, {"axis": 1}]),
    "Gelu": (gelu, lambda dy, x, approximate: again(gelu, dy, x, approximate),
             [{}, {"approximate": False}, {"approximate": True}]),
    "Mean": (mean, lambda dy, x, axis, keepdims: again(mean, dy, x, axis, keepdims=keepdims),
         [{}, {"axis": 0}, {"axis": (1, 2)}, {"axis": -1, "keepdims": True}, {"keepdims": True}]),
    "LogSumExp": (lse, lambda dy, x, axis, keepdims: again(lse, dy, x, axis, keepdims=keepdims),
                  [{}, {"axis": 1}, {"axis": (0, -1), "keepdims": True}]),
}  # fmt: skip
CASES = [(name, options) for name, (*_, each) in CALLS.items() for options in each]
PLACES = AROUND | {"loop": lambda f: lambda x: sum(f(jnp.sin(x * (i + 1))) for i in range(3))}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("op_type", "options"), CASES, ids=str)
def test_functions_that_jax_inlines_are_found(op_type, options, place):
    function, rule, _ = CALLS[op_type]
    f = PLACES[place](lambda x: function(x, **options))
    ours = override(f, {op_type: rule})
    assert_array_equal(ours(X), override(f, {})(X))
    assert_allclose(ours(X), f(X), rtol=1e-12)
    found = jax.grad(weighted(ours))(X)
    assert_allclose(found, 3 * jax.grad(weighted(f))(X), rtol=1e-5, atol=1e-6)
    ours.assert_fired(op_type)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("run", [jax.hessian, jax.jacfwd, jax.jit])
@pytest.mark.parametrize("op_type", CALLS)
def test_the_function_is_a_key_and_their_own_rule_changes_nothing(op_type, run):
    function, rule, _ = CALLS[op_type]
    found = jax.grad(weighted(override(function, {function: rule})))(X)
    assert_allclose(found, 3 * jax.grad(weighted(function))(X), rtol=1e-5, atol=1e-6)
    f = weighted(function)
    ours = override(f, {op_type: op_type})
    assert_allclose(run(ours)(X), run(f)(X), rtol=1e-12, atol=1e-14)
    jax.grad(ours)(X)
    ours.assert_fired()


@pytest.mark.slow
def test_a_users_function_of_that_name_is_another_function():
    def softmax(x):
        return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)

    def mean(x):
        return x.sum() / x.size

    def _where(c, x, y):
        return jnp.tanh(x) + y

    selected = lambda x: jax.jit(_where)(1, x, x)  # noqa: E731
    for f, key in ((softmax, "Softmax"), (mean, "Mean"), (jax.jit(softmax), "Softmax"),
                   (jax.jit(mean), "Mean"), (selected, "SelectV2")):  # fmt: skip
        with pytest.warns(UnusedOverrideWarning):
            override(f, {key: times(7)})(X)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("op_type", CALLS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(dtype, op_type):
    x, f = X.astype(dtype), CALLS[op_type][0]
    ours = override(f, {op_type: lambda dy, x: x * 0 + 7})
    assert_array_equal(ours(x), f(x))
    assert (jax.grad(lambda x: ours(x).sum().astype(x.dtype))(x) == 7).all()


def test_integers_are_under_no_rule():
    with pytest.warns(UnusedOverrideWarning):
        override(lambda x: jnp.mean(x) * 1.0, {"Mean": lambda dy: dy})(jnp.arange(3))


ONES = (1, 1, 2, 2)
FORM = "is called in a form"
UNKNOWN = [
    ("Softmax", lambda x: softmax(x, where=x > 0, axis=-1), rf"'Softmax' {FORM} .*where="),
    ("Softmax", lambda x: jax.vmap(lambda x: softmax(x, where=x > 0))(x), rf"{FORM} .*where="),
    ("Mean", lambda x: jnp.mean(x, where=x > 0), rf"'Mean' {FORM}"),
    ("LogSumExp", lambda x: lse(x, b=x * x), rf"'LogSumExp' {FORM} .*rare argument"),
    ("LogSumExp", lambda x: lse(x, where=x > 0), rf"{FORM} .*rare argument"),
    ("LogSumExp", lambda x: lse(x, return_sign=True)[1] * lse(x), rf"{FORM} .*rare argument"),
    ("Softmax", lambda x: jax.grad(lambda x: softmax(x)[0, 0, 0])(x), "Put the override inside"),
    ("Conv2D", lambda x: lax.conv(x[None], jnp.ones((4, 2, 2, 2)), (1, 1), "SAME"),
     "channels do not come last.*'conv_general_dilated'"),
    ("Conv2D", lambda x: lax.conv_general_dilated(
        x[None], jnp.ones((2, 2, 1, 4)), (1, 1), "SAME", feature_group_count=4, **LAYOUT),
     "has groups.*'conv_general_dilated'"),
    ("MaxPool", lambda x: lax.reduce_window(x[None], -jnp.inf, lax.max, ONES, ONES, "SAME"),
     "channels come last.*'reduce_window_max'"),
    ("AvgPool", lambda x: lax.reduce_window(x[None], 0.0, lax.add, ONES, ONES, "SAME"),
     "channels come last.*'reduce_window_sum'"),
]  # fmt: skip


@pytest.mark.slow(but=2)
@pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")
@pytest.mark.parametrize(("key", "f", "words"), UNKNOWN, ids=range(len(UNKNOWN)))
def test_forms_that_are_not_recognized_are_refused_by_name(key, f, words):
    with pytest.raises(GradientError, match=f"(?s){words}"):
        override(f, {key: lambda dy, x: x})(X)
    if "inside" not in words:  # with its own rule, JAX's derivative stays
        native = override(f, {key: key})
        assert_array_equal(jax.grad(weighted(native))(X), jax.grad(weighted(f))(X))


# -- products --------------------------------------------------------------------------------------

PRODUCTS = {
    "bqhd,bkhd->bhqk": ((2, 3, 4, 5), (2, 6, 4, 5)),
    "bhqk,bkhd->bqhd": ((2, 4, 3, 6), (2, 6, 4, 5)),
    "bqd,dhe->bqhe": ((2, 3, 4), (4, 2, 5)),
    "bqhe,hed->bqd": ((2, 3, 2, 5), (2, 5, 4)),
    "ij,kj->ik": ((2, 3), (4, 3)),
    "ij,ij->": ((2, 3), (2, 3)),
    "ij,kl->ijkl": ((2, 3), (4, 5)),
    "ijk,k->ij": ((2, 3, 4), (4,)),
    "bij,bjk->bik": ((2, 3, 4), (2, 4, 5)),
}


def matmul_rule(dy, a, b):
    assert a.ndim >= 2, a.shape
    return [2 * dy @ jnp.swapaxes(b, -1, -2), 2 * jnp.swapaxes(a, -1, -2) @ dy]


@pytest.mark.slow
@pytest.mark.parametrize("equation", PRODUCTS)
def test_every_product_is_one_of_matrices(equation):
    a, b = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(PRODUCTS[equation]))
    f = lambda a, b: jnp.einsum(equation, a, b)  # noqa: E731
    rule, factor = ("MatMul", 1) if equation == "ijk,k->ij" else (matmul_rule, 2)
    ours = override(f, {"MatMul": rule})
    assert_array_equal(ours(a, b), f(a, b))
    expected = slopes(lambda a, b: jnp.sin(f(a, b)), a, b)
    for run in (lambda f: f, jax.jit):
        found = run(lambda a, b: slopes(lambda a, b: jnp.sin(ours(a, b)), a, b))(a, b)
        jax.tree.map(lambda x, y: assert_allclose(x, factor * y, 1e-4, 1e-5), found, expected)
    near(jax.jvp(ours, (a, b), (a, b))[1], factor * 2 * f(a, b))
    ours.assert_fired()


@pytest.mark.slow
def test_attention_of_flax():
    model = nn.MultiHeadDotProductAttention(2)
    p = model.init(jax.random.key(0), X)
    loss = lambda f: lambda x: jnp.sum(f(p, x) ** 2)  # noqa: E731
    products = override(model.apply, {"MatMul": matmul_rule})
    stopped = override(model.apply, {"Softmax": lambda dy: 0 * dy})
    jax.grad(loss(products))(X)
    assert sum(hit.ran for hit in products.hits) == 6

    def attend(q, k, v, **_):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q / jnp.sqrt(q.shape[-1]), k)
        return jnp.einsum("bhqk,bkhd->bqhd", lax.stop_gradient(softmax(scores)), v)

    by_hand = nn.MultiHeadDotProductAttention(2, attention_fn=attend)
    near(jax.grad(loss(stopped))(X), jax.grad(loss(by_hand.apply))(X))


# -- choices, convolutions, pools ------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("select", [jnp.where, lax.select])
def test_choices_see_their_condition(select):
    def rule(dy, condition, a, b):
        return [None, jnp.where(condition, 3 * dy, 0), jnp.where(condition, 0, 5 * dy)]

    ours = override(lambda x: select(x > 0, x, 2 * x), {"SelectV2": rule})
    assert_array_equal(slopes(ours, X), jnp.where(X > 0, 3, 10))


IMAGES = jax.random.normal(jax.random.key(1), (2, 6, 5, 3))


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 1))])
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
def test_convolutions_and_pools_of_flax(strides, padding):
    conv = nn.Conv(4, (3, 2), strides=strides, padding=padding, kernel_dilation=(1, 2))
    p, told = conv.init(jax.random.key(0), IMAGES), []

    def rule(dy, x, w, strides, pad, dilations):
        told.append((strides, dilations))
        f = lambda *xw: lax.conv_general_dilated(*xw, strides, pad, None, dilations, **LAYOUT)  # noqa: E731
        return [3 * dx for dx in jax.vjp(f, x, w)[1](dy)]

    def gradients(f):
        dp, dx = jax.grad(lambda p, x: weighted(lambda x: f(p, x))(x), (0, 1))(p, IMAGES)
        return dp["params"]["kernel"], dx

    found, expected = gradients(override(conv.apply, {"Conv2D": rule})), gradients(conv.apply)
    jax.tree.map(lambda a, b: near(a, 3 * b), found, expected)
    assert told[0] == (strides, (1, 2))
    pool = lambda x: nn.max_pool(x, (3, 2), strides, padding)  # noqa: E731
    pooled = override(pool, {"MaxPool": lambda dy, x, filter_size, strides, pad:
                             again(nn.max_pool, dy, x, filter_size, strides, pad)})  # fmt: skip
    assert_array_equal(pooled(IMAGES), pool(IMAGES))
    near(jax.grad(weighted(pooled))(IMAGES), 3 * jax.grad(weighted(pool))(IMAGES))


POOLS = {
    "flax": lambda x: nn.avg_pool(x, (3, 2), (2, 1)),
    "flax, padded": lambda x: nn.avg_pool(x, (3, 2), (2, 1), "SAME"),
    "flax, counted": lambda x: nn.avg_pool(x, (3, 2), (2, 1), "SAME", count_include_pad=False),
    "haiku": lambda x: hk.avg_pool(x, (1, 3, 2, 1), (1, 2, 1, 1), "SAME"),
    "equinox": jax.vmap(eqx.nn.AvgPool2d((3, 2), 2, padding=1)),
    "equinox, alone": lambda x: eqx.nn.AvgPool2d((3, 2), 2)(x[0]),
}


def mean_of_windows(x, filter_size, strides, pad):
    sums = lambda x: lax.reduce_window(  # noqa: E731
        x, 0.0, lax.add, (1, *filter_size, 1), (1, *strides, 1), ((0, 0), *pad, (0, 0))
    )
    return sums(x) / sums(jnp.ones_like(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", POOLS)
def test_means_of_windows_however_they_are_counted(name):
    def rule(dy, x, y, filter_size, strides, pad):
        mean, back = jax.vjp(lambda x: mean_of_windows(x, filter_size, strides, pad), x)
        return 3 * back(dy)[0] + 100 * (y - mean).sum()

    ours = override(POOLS[name], {"AvgPool": rule})
    assert_array_equal(ours(IMAGES), override(POOLS[name], {})(IMAGES))
    found, own = (slopes(lambda x, f=f: jnp.sin(f(x)), IMAGES) for f in (ours, POOLS[name]))
    near(found, 3 * own)
    ours.assert_fired()
