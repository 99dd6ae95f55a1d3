"""Functions that JAX inlines, and primitives that are op types in one of their forms.

What is due comes from JAX: its own derivative, times a factor per operand.
"""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import regrad as rg
from regrad.errors import GradientError, UnusedOverrideWarning

X = jax.random.normal(jax.random.key(0), (2, 3, 4))


def weighted(f):
    return lambda x: (f(x) * jnp.arange(1.0, 1 + f(x).size).reshape(f(x).shape)).sum()


def tripled(function, seen):
    """A rule that gives three times JAX's derivative, with the attributes that it is told."""

    def rule(dy, x, **known):
        seen.append(known)
        return 3 * jax.vjp(lambda x: function(x, **known), x)[1](dy)[0]

    def softmaxed(dy, x, axis):
        return rule(dy, x, axis=axis)

    def mean(dy, x, axis, keepdims):
        return rule(dy, x, axis=axis, keepdims=keepdims)

    def gelu(dy, x, approximate):
        return rule(dy, x, approximate=approximate)

    found = {jax.nn.gelu: gelu, jnp.mean: mean, jax.nn.logsumexp: mean}
    return found.get(function, softmaxed)


CALLS = {
    "Softmax": (jax.nn.softmax, [{}, {"axis": 0}, {"axis": 1}, {"axis": -2}, {"axis": (0, 2)}]),
    "LogSoftmax": (jax.nn.log_softmax, [{}, {"axis": 0}, {"axis": 1}]),
    "Gelu": (jax.nn.gelu, [{}, {"approximate": False}, {"approximate": True}]),
    "Mean": (jnp.mean, [{}, {"axis": 0}, {"axis": (1, 2)}, {"axis": -1, "keepdims": True},
                        {"keepdims": True}]),
    "LogSumExp": (jax.nn.logsumexp, [{}, {"axis": 1}, {"axis": (0, -1), "keepdims": True}]),
}  # fmt: skip
CASES = [(name, options) for name, (_, each) in CALLS.items() for options in each]
PLACES = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1],
    "cond": lambda f: lambda x: lax.cond(x.sum() < 1e9, f, lambda x: 0 * f(x), x),
    "checkpoint": jax.checkpoint,
    "twice": lambda f: lambda x: f(x) + f(jnp.sin(x)),
    "loop": lambda f: lambda x: sum(f(x * (i + 1)) for i in range(3)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("op_type", "options"), CASES, ids=str)
def test_functions_that_jax_inlines_are_found(op_type, options, place):
    function = CALLS[op_type][0]
    f = PLACES[place](lambda x: function(x, **options))
    seen = []
    ours = rg.jax.override(f, {op_type: tripled(function, seen)})
    np.testing.assert_array_equal(ours(X), rg.jax.override(f, {})(X))
    np.testing.assert_allclose(ours(X), f(X), rtol=1e-12)
    np.testing.assert_allclose(
        jax.grad(weighted(ours))(X), 3 * jax.grad(weighted(f))(X), rtol=1e-5, atol=1e-6
    )
    assert all(known.keys() <= {"axis", "keepdims", "approximate"} for known in seen)
    ours.assert_fired(op_type)


@pytest.mark.parametrize("op_type", CALLS)
def test_the_function_is_a_key_as_well(op_type):
    function = CALLS[op_type][0]
    ours = rg.jax.override(function, {function: tripled(function, [])})
    due = 3 * jax.grad(weighted(function))(X)
    np.testing.assert_allclose(jax.grad(weighted(ours))(X), due, rtol=1e-5, atol=1e-6)
    ours.assert_fired(op_type)


@pytest.mark.parametrize("run", [jax.hessian, jax.jacfwd, jax.jit])
@pytest.mark.parametrize("op_type", CALLS)
def test_their_own_rule_changes_nothing(op_type, run):
    f = weighted(CALLS[op_type][0])
    ours = rg.jax.override(f, {op_type: op_type})
    np.testing.assert_allclose(run(ours)(X), run(f)(X), rtol=1e-12, atol=1e-14)
    jax.grad(ours)(X)
    ours.assert_fired()


def test_a_users_function_of_that_name_is_another_function():
    def softmax(x):
        return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)

    def mean(x):
        return x.sum() / x.size

    def _where(c, x, y):
        return jnp.tanh(x) + y

    plain = {softmax: "Softmax", mean: "Mean"}
    compiled = {jax.jit(f): key for f, key in plain.items()}
    compiled[lambda x: jax.jit(_where)(1, x, x)] = "SelectV2"
    for f, key in (plain | compiled).items():
        with pytest.warns(UnusedOverrideWarning):
            rg.jax.override(f, {key: lambda dy: 7 * dy})(X)


def test_half_precision_and_integers():
    for x in (X.astype(jnp.float16), X.astype(jnp.bfloat16)):
        for op_type, (f, _) in CALLS.items():
            ours = rg.jax.override(f, {op_type: lambda dy, x: x * 0 + 7})
            np.testing.assert_array_equal(ours(x), f(x))
            assert (jax.grad(lambda x, o=ours: o(x).sum().astype(x.dtype))(x) == 7).all()
    with pytest.warns(UnusedOverrideWarning):
        rg.jax.override(lambda x: jnp.mean(x) * 1.0, {"Mean": lambda dy: dy})(jnp.arange(3))


def test_calls_that_are_not_recognised_are_refused_by_name():
    for f in (
        lambda x: jax.nn.softmax(x, where=x > 0, axis=-1),
        lambda x: jax.vmap(lambda x: jax.nn.softmax(x, where=x > 0))(x),
    ):
        with pytest.raises(GradientError, match=r"'Softmax' is called in a form .*where="):
            rg.jax.override(f, {"Softmax": lambda dy: dy})(X)
        with pytest.warns(UnusedOverrideWarning):  # JAX's own derivative stays, uncounted
            rg.jax.override(f, {"Softmax": "Softmax"})(X)
    with pytest.raises(GradientError, match=r"'Mean' is called in a form"):
        rg.jax.override(lambda x: jnp.mean(x, where=x > 0), {"Mean": lambda dy, x: x})(X)
    with pytest.raises(GradientError, match="Put the override inside"):
        inner = lambda x: jax.grad(lambda x: jax.nn.softmax(x)[0, 0, 0])(x)  # noqa: E731
        rg.jax.override(inner, {"Softmax": lambda dy: dy})(X)
    fine = rg.jax.override(lambda x: jax.vmap(jax.nn.softmax)(x), {"Softmax": lambda dy: 7 * dy})
    np.testing.assert_allclose(jax.grad(weighted(fine))(X), 7 * np.arange(1.0, 25).reshape(2, 3, 4))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jax.nn.logsumexp(x, b=x * x),
        lambda x: jax.nn.logsumexp(x, where=x > 0),
        lambda x: jax.nn.logsumexp(x, return_sign=True)[1] * jax.nn.logsumexp(x),
    ],
)
def test_sums_of_exponentials_with_more_arguments_are_refused(f):
    with pytest.raises(GradientError, match=r"'LogSumExp' is called in a form .*rare argument"):
        rg.jax.override(f, {"LogSumExp": lambda dy, x: x})(X)


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


@pytest.mark.parametrize("equation", PRODUCTS)
def test_every_product_is_one_of_matrices(equation):
    a, b = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate(PRODUCTS[equation]))
    f = lambda a, b: jnp.einsum(equation, a, b)  # noqa: E731
    plain = equation in ("ijk,k->ij", "bij,bjk->bik")
    rule = matmul_rule if not plain or b.ndim > 1 else "MatMul"
    factor = 1 if rule == "MatMul" else 2
    ours = rg.jax.override(f, {"MatMul": rule})
    np.testing.assert_array_equal(ours(a, b), f(a, b))
    loss = lambda f: lambda a, b: jnp.sum(jnp.sin(f(a, b)))  # noqa: E731
    for run in (lambda f: f, jax.jit):
        got = run(jax.grad(loss(ours), (0, 1)))(a, b)
        for x, y in zip(got, jax.grad(loss(f), (0, 1))(a, b), strict=True):
            np.testing.assert_allclose(x, factor * y, rtol=1e-4, atol=1e-5)
    got = jax.jvp(ours, (a, b), (a, b))[1]
    np.testing.assert_allclose(got, factor * 2 * f(a, b), rtol=1e-4, atol=1e-5)
    ours.assert_fired()


def test_attention_of_flax():
    model = nn.MultiHeadDotProductAttention(2)
    p = model.init(jax.random.key(0), X)
    loss = lambda f: lambda x: jnp.sum(f(p, x) ** 2)  # noqa: E731
    products = rg.jax.override(model.apply, {"MatMul": matmul_rule})
    halved = rg.jax.override(model.apply, {"Softmax": lambda dy: 0 * dy})
    jax.grad(loss(products))(X)
    assert sum(hit.ran for hit in products.hits) == 6
    detached = lambda *a, **k: lax.stop_gradient(jax.nn.softmax(*a, **k))  # noqa: E731
    by_hand = nn.MultiHeadDotProductAttention(
        2, attention_fn=lambda q, k, v, **_: jnp.einsum(
            "bhqk,bkhd->bqhd",
            detached(jnp.einsum("bqhd,bkhd->bhqk", q / jnp.sqrt(q.shape[-1]), k)), v,
        ),
    )  # fmt: skip
    due = jax.grad(loss(by_hand.apply))(X)
    np.testing.assert_allclose(jax.grad(loss(halved))(X), due, rtol=1e-4, atol=1e-5)


# -- choices, convolutions, pools ------------------------------------------------------------------


def test_choices_see_their_condition():
    def rule(dy, condition, a, b):
        return [None, jnp.where(condition, 3 * dy, 0), jnp.where(condition, 0, 5 * dy)]

    for f in (lambda x: jnp.where(x > 0, x, 2 * x), lambda x: lax.select(x > 0, x, 2 * x)):
        ours = rg.jax.override(f, {"SelectV2": rule})
        np.testing.assert_array_equal(
            jax.grad(lambda x, o=ours: o(x).sum())(X), np.where(X > 0, 3, 10)
        )


IMAGES = jax.random.normal(jax.random.key(1), (2, 6, 5, 3))


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 1))])
@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
def test_convolutions_and_pools_of_flax(strides, padding):
    conv = nn.Conv(4, (3, 2), strides=strides, padding=padding, kernel_dilation=(1, 2))
    p = conv.init(jax.random.key(0), IMAGES)
    told = []

    def rule(dy, x, w, strides, pad, dilations):
        told.append((strides, dilations))
        f = lambda x, w: lax.conv_general_dilated(  # noqa: E731
            x, w, strides, pad, rhs_dilation=dilations, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return [3 * dx for dx in jax.vjp(f, x, w)[1](dy)]

    loss = lambda f: lambda p, x: weighted(lambda x: f(p, x))(x)  # noqa: E731
    ours = rg.jax.override(conv.apply, {"Conv2D": rule})
    got, due = (
        jax.grad(loss(ours), (0, 1))(p, IMAGES),
        jax.grad(loss(conv.apply), (0, 1))(p, IMAGES),
    )
    np.testing.assert_allclose(got[1], 3 * due[1], rtol=1e-4, atol=1e-4)
    kernels = [g["params"]["kernel"] for g in (got[0], due[0])]
    np.testing.assert_allclose(kernels[0], 3 * kernels[1], rtol=1e-4, atol=1e-3)
    assert told[0] == (strides, (1, 2))
    pool = lambda x: nn.max_pool(x, (3, 2), strides, padding)  # noqa: E731
    pooled = rg.jax.override(
        pool, {"MaxPool": lambda dy, x, filter_size, strides, pad: 3 * jax.vjp(
            lambda x: nn.max_pool(x, filter_size, strides, pad), x)[1](dy)[0]}
    )  # fmt: skip
    np.testing.assert_array_equal(pooled(IMAGES), pool(IMAGES))
    got, due = jax.grad(weighted(pooled))(IMAGES), jax.grad(weighted(pool))(IMAGES)
    np.testing.assert_allclose(got, 3 * due)


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


@pytest.mark.parametrize("name", POOLS)
def test_means_of_windows_however_they_are_counted(name):
    f = POOLS[name]

    def rule(dy, x, y, filter_size, strides, pad):
        mean, back = jax.vjp(lambda x: mean_of_windows(x, filter_size, strides, pad), x)
        return 3 * back(dy)[0] + 100 * (y - mean).sum()

    loss = lambda f: lambda x: jnp.sum(jnp.sin(f(x)))  # noqa: E731
    ours = rg.jax.override(f, {"AvgPool": rule})
    np.testing.assert_array_equal(ours(IMAGES), rg.jax.override(f, {})(IMAGES))
    got, due = jax.grad(loss(ours))(IMAGES), jax.grad(loss(f))(IMAGES)
    np.testing.assert_allclose(got, 3 * due, rtol=1e-4, atol=1e-3)
    ours.assert_fired()


def test_images_whose_channels_come_first_are_refused():
    x, w = jnp.moveaxis(IMAGES, -1, 1), jnp.ones((4, 3, 2, 2))
    conv = lambda x: lax.conv(x, w, (1, 1), "SAME")  # noqa: E731
    grouped = lambda x: lax.conv_general_dilated(  # noqa: E731
        IMAGES * x.sum(), jnp.ones((2, 2, 1, 3)), (1, 1), "SAME", feature_group_count=3,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    ones = (1, 1, 2, 2)
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, ones, ones, "SAME")  # noqa: E731
    sums = lambda x: lax.reduce_window(x, 0.0, lax.add, ones, ones, "SAME")  # noqa: E731
    for f, key, words in (
        (conv, "Conv2D", "channels do not come last.*'conv_general_dilated'"),
        (grouped, "Conv2D", "has groups.*'conv_general_dilated'"),
        (pool, "MaxPool", "channels come last.*'reduce_window_max'"),
        (sums, "AvgPool", "channels come last.*'reduce_window_sum'"),
    ):
        with pytest.raises(GradientError, match=f"(?s){words}"):
            rg.jax.override(f, {key: lambda dy, x: x})(x)
        native = rg.jax.override(f, {key: key})
        np.testing.assert_array_equal(jax.grad(weighted(native))(x), jax.grad(weighted(f))(x))
