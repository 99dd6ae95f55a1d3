"""`rg.checkpoint`: the values and gradients of f, with less kept."""

from __future__ import annotations

import tracemalloc

import jax
import numpy as np
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import ArgumentError, GradientError
from tests.helpers.quick import MODES, nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)


@MODES
def test_containers_and_constants(mode):
    def f(p, k, *, mode):
        return {"y": p["a"] * p["b"][0] * k, "k": k, "mode": (mode, None)}

    g = rg.checkpoint(f)

    def loss(p):
        out = g(p, 3, mode="text")
        assert (out["k"], out["mode"]) == (3, ("text", None))
        return out["y"].sum()

    dp = mode(rg.grad(loss))({"a": rg.tensor([1.0, 2.0]), "b": [rg.tensor([3.0, 4.0])]})
    assert (dp["a"].tolist(), dp["b"][0].tolist()) == ([9.0, 12.0], [3.0, 6.0])


@MODES
def test_orders_to_three(mode):
    x = np.array([0.3, -1.2])
    f = lambda x: (rg.sin(x) * x * x).sum()  # noqa: E731
    climbed = lambda g: lambda x: (rg.grad(g)(x) ** 2).sum()  # noqa: E731
    g = rg.checkpoint(f)
    for _ in range(3):
        due = rg.grad(f)(x).numpy()
        np.testing.assert_allclose(mode(rg.grad(g))(x).numpy(), due, rtol=1e-11)
        np.testing.assert_allclose(rg.grad(mode(g))(x).numpy(), due, rtol=1e-11)
        f, g = climbed(f), climbed(g)


def test_it_runs_once_forward_and_once_backward():
    runs = []
    f = rg.checkpoint(lambda x: runs.append(1) or rg.sin(x))
    f(rg.scalar(1.0))
    assert len(runs) == 1
    rg.grad(f)(rg.scalar(1.0))
    assert len(runs) == 3
    _value, back = rg.vjp(f, rg.scalar(1.0))
    assert len(runs) == 4
    assert back(1.0)[0].item() == back(1.0)[0].item()
    assert len(runs) == 6


@MODES
def test_what_it_closes_over(mode):
    v = rg.Variable(3.0)

    def loss(w):
        f = rg.checkpoint(lambda x: x * w * v * w)
        return f(rg.scalar(2.0))

    assert mode(rg.grad(loss))(rg.scalar(5.0)).item() == 60.0
    g = mode(loss)
    assert rg.variable_grads(lambda: g(rg.scalar(5.0))).grads[v.name].item() == 50.0
    second = rg.grad(rg.grad(loss))
    assert mode(second)(rg.scalar(5.0)).item() == 12.0


@MODES
def test_it_runs_again_on_the_values_that_were(mode):
    v = rg.Variable(2.0)
    f = rg.checkpoint(lambda x: x * v * v)

    def loss(x):
        y = f(x)
        v.assign(100.0)
        return y + f(x)

    g = mode(rg.grad(loss))
    assert g(rg.scalar(1.0)).item() == 4.0 + 10_000.0
    assert v.item() == 100.0


def test_names_bound_anew_before_the_backward_pass_are_refused():
    a, w = np.array([1.0, 2.0]), rg.scalar(3.0)
    f = rg.checkpoint(lambda x: rg.sin(x * a) * w)
    y, back = rg.vjp(f, np.array([1.0, 1.0]))
    due = rg.grad(lambda x: rg.sin(x * np.array([1.0, 2.0])) * 3.0)(np.array([1.0, 1.0]))
    np.testing.assert_allclose(back(rg.ones_like(y))[0].numpy(), due.numpy())
    a = np.array([5.0, 5.0])
    with pytest.raises(GradientError, match=r"first difference is the op 'Mul' .*number 1 of 5"):
        back(rg.ones_like(y))


@MODES
def test_assignments_are_made_once(mode):
    v = rg.Variable(1.0)

    @rg.checkpoint
    def f(x):
        v.assign(v * x)
        return v * x

    g = mode(rg.grad(f))
    assert g(rg.scalar(3.0)).item() == 6.0
    assert v.item() == 3.0

    h = mode(lambda x: f(x) + v)
    v.assign(1.0)
    assert rg.grad(h)(rg.scalar(3.0)).item() == 7.0
    assert v.item() == 3.0


def test_generators_draw_the_same_numbers_again():
    rng = np.random.default_rng(0)
    f = rg.checkpoint(lambda x: (x * rg.random.normal(rng, (5,), dtype="float64")).sum())
    y, back = rg.vjp(f, np.ones(5))
    after = rng.bit_generator.state
    noise = back(1.0)[0].numpy()
    np.testing.assert_allclose(noise.sum(), y.item())
    assert rng.bit_generator.state == after
    np.testing.assert_array_equal(noise, np.random.default_rng(0).normal(size=5))


def test_keys_under_jit():
    def f(key, x):
        return (x * rg.random.normal(key, (3,), dtype="float64")).sum()

    key = jax.random.key(1)
    due = rg.random.normal(key, (3,), dtype="float64").numpy()
    g = rg.jit(lambda key, x: rg.grad(lambda x: rg.checkpoint(f)(key, x))(x))
    np.testing.assert_allclose(g(key, np.ones(3)).numpy(), due, rtol=1e-12)


@MODES
def test_overrides_in_force_at_first_count_again(mode):
    f = rg.checkpoint(lambda x: rg.sign(rg.sign(x)))

    def loss(x):
        with rg.gradient_override_map({"Sign": lambda dy: dy * 3.0}):
            y = f(x)
        with rg.gradient_override_map({"Sign": lambda dy: dy * 100.0}):
            return y * 1.0 + rg.sign(y) * 0.0

    assert mode(rg.grad(loss))(rg.scalar(2.0)).item() == 9.0
    with rg.gradient_override_map({"Sign": lambda dy: dy * 3.0}) as used:
        _y, back = rg.vjp(f, rg.scalar(2.0))
    assert back(1.0)[0].item() == 9.0
    assert [(hit.count, hit.ran) for hit in used.hits] == [(2, 2)]
    used.assert_fired()


def test_forward_mode():
    f = rg.checkpoint(lambda x: rg.sin(x) * x)
    due = rg.jvp(lambda x: rg.sin(x) * x, [rg.scalar(0.5)], [rg.scalar(2.0)])
    for y, expected in zip(rg.jvp(f, [rg.scalar(0.5)], [rg.scalar(2.0)]), due, strict=True):
        np.testing.assert_allclose(y.numpy(), expected.numpy(), rtol=1e-6)
    g = rg.checkpoint(rg.sign)
    with (
        rg.gradient_override_map({"Sign": lambda dy: rg.where(dy > 0, dy, 0.0)}),
        pytest.raises(GradientError, match="forward mode"),
    ):
        rg.jvp(g, [rg.scalar(1.0)], [rg.scalar(1.0)])


@MODES
def test_no_path(mode):
    f = rg.checkpoint(lambda x, y: (rg.stop_gradient(x) * y, x > 0))
    g = mode(lambda x, y: f(x, y)[0])
    with pytest.raises(GradientError, match="no path"):
        rg.grad(lambda x: g(x, rg.scalar(1.0)))(rg.scalar(1.0))
    assert rg.grads(g, unconnected="zero")([rg.scalar(2.0), rg.scalar(1.0)])[1].item() == 2.0


@MODES
def test_a_custom_function_that_closes_over(mode):
    def f(w):
        inner = rg.checkpoint(lambda x: x * w)
        return rg.custom_grad(lambda x: (inner(x), lambda dy: dy))(w * 1.0)

    with pytest.raises(GradientError, match="closes over"):
        mode(rg.grad(f))(rg.scalar(2.0))


def test_exceptions_in_either_run():
    state = {"runs": 0}

    def f(x):
        state["runs"] += 1
        if state["runs"] == 2:
            raise KeyError("again")
        return rg.sin(x)

    with pytest.raises(KeyError):
        rg.grad(rg.checkpoint(f))(rg.scalar(1.0))
    assert current() is None


def peak(f, x):
    rg.grad(f)(x)
    tracemalloc.start()
    try:
        rg.grad(f)(x)
        return tracemalloc.get_traced_memory()[1] / x.nbytes
    finally:
        tracemalloc.stop()


def test_memory_falls():
    x = np.ones((100, 200))

    def block(x):
        for _ in range(10):
            x = rg.sin(x)
        return x

    def chain(block):
        def f(x):
            for _ in range(8):
                x = block(x)
            return x.sum()

        return f

    plain, less = peak(chain(block), x), peak(chain(rg.checkpoint(block)), x)
    assert plain > 75
    assert less < 30


def test_what_is_kept_under_jit():
    """The compiled gradient computes the sines of the forward pass again."""

    def f(x):
        for _ in range(5):
            x = rg.exp(rg.sin(x))
        return x.sum()

    def counted(f):
        jaxpr = jax.make_jaxpr(lambda a: rg.grad(f)(rg.asarray(a)).data)(np.ones(3))
        return sum(e.primitive.name == "sin" for e in jaxpr.eqns), str(jaxpr).count("barrier")

    assert counted(f)[0] == 5
    assert counted(rg.checkpoint(f))[0] >= 10
    assert counted(rg.checkpoint(f))[1] >= 1


def test_an_argument_without_a_gradient_that_is_closed_over_as_well():
    def f(x):
        choose = lambda y: x * rg.sin(x) if rg.sum(y) > 1 else x  # noqa: E731
        return rg.sum(rg.checkpoint(choose)(x) ** 2)

    def by_jax(x):
        return jax.numpy.sum((x * jax.numpy.sin(x)) ** 2)

    x = np.array([0.6, 1.0, -0.3])
    np.testing.assert_allclose(rg.grad(f)(x).numpy(), jax.grad(by_jax)(x))
    np.testing.assert_allclose(rg.hessian(f)(x).numpy(), jax.hessian(by_jax)(x), atol=1e-12)
    v = np.array([1.0, -2.0, 0.5])
    np.testing.assert_allclose(rg.jvp(f, [x], [v])[1].numpy(), jax.jvp(by_jax, (x,), (v,))[1])


@pytest.mark.parametrize("order", [1, -1])
def test_a_variable_that_holds_a_tensor_which_is_closed_over_as_well(order):
    """Neither has a gradient, so the second run gets one Tensor for both."""
    v = rg.Variable([1.0, 2.0])

    def f(x, w):
        v.assign(x)
        reads = [lambda: v.value * 2, lambda: x * 3][::order]
        return rg.checkpoint(lambda a: [*[read() for read in reads], w * a][-1])(w).sum()

    x, w = rg.tensor([3.0, 4.0]), rg.tensor([5.0, 6.0])
    dx, dw = rg.grad(f, argnums=(0, 1), unconnected="zero")(x, w)
    assert (dx.tolist(), dw.tolist()) == ([0.0, 0.0], [10.0, 12.0])


def test_what_a_compiled_function_made_is_used_in_a_batch():
    def f(x):
        t = rg.jit(lambda p: p * x)(x)
        return rg.sum(rg.vmap(lambda r: rg.vmap(lambda q: q * r * rg.sum(t))(x))(t))

    def by_jax(x):
        return jax.numpy.sum(x * x) ** 2 * jax.numpy.sum(x)

    x = np.array([0.6, 1.0, -0.3])
    np.testing.assert_allclose(rg.grad(rg.checkpoint(f))(x).numpy(), jax.grad(by_jax)(x))
    np.testing.assert_allclose(rg.hessian(rg.checkpoint(f))(x).numpy(), jax.hessian(by_jax)(x))


async def later(x):
    return x


def one_by_one(x):
    yield x


async def one_by_one_later(x):
    yield x


@pytest.mark.parametrize("f", [later, one_by_one, one_by_one_later])
def test_a_function_that_runs_after_the_call_is_refused(f):
    with pytest.raises(ArgumentError, match="an async or a generator function"):
        rg.checkpoint(f)
