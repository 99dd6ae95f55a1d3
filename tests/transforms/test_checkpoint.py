"""`rg.checkpoint`: the values and gradients of f, with less kept."""

import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import GradientError
from tests.helpers.quick import MODES, nothing_is_left_open
from tests.helpers.rows import refused
from tests.transforms.regions import REGIONS

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
def test_it_runs_again_on_the_values_that_were(mode):
    v = rg.Variable(2.0)
    f = rg.checkpoint(lambda x: x * v * v)

    def loss(x):
        y = f(x)
        v.assign(100.0)
        return y + f(x)

    assert mode(rg.grad(loss))(rg.scalar(1.0)).item() == 4.0 + 10_000.0
    assert v.item() == 100.0
    by_v = lambda: rg.variable_grads(lambda: f(rg.scalar(2.0))).grads[v.name]  # noqa: E731
    assert mode(by_v)().item() == 400.0


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
    f = rg.checkpoint(lambda x: (v.assign(v * x), v * x)[1])
    assert mode(rg.grad(f))(rg.scalar(3.0)).item() == 6.0
    assert v.item() == 3.0
    v.assign(1.0)
    assert rg.grad(mode(lambda x: f(x) + v))(rg.scalar(3.0)).item() == 7.0
    assert v.item() == 3.0


DRAWS = [lambda rng: rg.random.normal(rng, (5,), dtype="float64"), lambda rng: rng.normal(size=5)]


@pytest.mark.parametrize("draw", DRAWS, ids=["regrad", "NumPy"])
def test_generators_draw_the_same_numbers_again(draw):
    rng = np.random.default_rng(0)
    f = rg.checkpoint(lambda x: (x * draw(rng)).sum())
    y, back = rg.vjp(f, np.ones(5))
    after = rng.bit_generator.state
    noise = back(1.0)[0].numpy()
    np.testing.assert_allclose(noise.sum(), y.item())
    assert rng.bit_generator.state == after
    np.testing.assert_array_equal(noise, np.random.default_rng(0).normal(size=5))


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


def test_exceptions_in_the_second_run():
    runs = []

    def f(x):
        runs.append(x)
        if len(runs) == 2:
            raise KeyError("again")
        return rg.sin(x)

    refused(lambda: rg.grad(rg.checkpoint(f))(rg.scalar(1.0)), KeyError)
    assert current() is None


def peak(f, x):
    """The memory that the gradient of the sum of f takes, as a multiple of that of x."""
    gradient = rg.grad(lambda x: f(x).sum())
    gradient(x)
    tracemalloc.start()
    try:
        gradient(x)
        return tracemalloc.get_traced_memory()[1] / x.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_falls_in_eager_mode():
    x, n = np.ones((200, 100)), 40
    block = lambda x: functools.reduce(lambda x, _: rg.sin(x), range(10), x)  # noqa: E731
    chain = lambda f: lambda x: functools.reduce(lambda x, _: f(x), range(8), x)  # noqa: E731
    assert peak(chain(block), x) > 75
    assert peak(chain(rg.checkpoint(block)), x) < 30
    body = lambda c, _: (rg.sin(rg.sin(rg.sin(rg.sin(c)))), None)  # noqa: E731
    assert peak(lambda x: rg.scan(body, x, length=n)[0], x) > 4 * n
    assert peak(lambda x: rg.scan(body, x, length=n, checkpoint=True)[0], x) < 1.5 * n + 12


def test_residuals_of_compiled_scans():
    n, size = 16, 64

    def kept(checkpoint):
        body = lambda c, _: (rg.sin(rg.sin(rg.sin(c))), None)  # noqa: E731
        f = lambda x: rg.scan(body, x, length=n, checkpoint=checkpoint)[0].sum()  # noqa: E731
        jaxpr = jax.make_jaxpr(lambda a: rg.grad(f)(rg.asarray(a)).data)(np.ones(size))
        forward = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
        # (what a scan stacks has its length in front; JAX 0.11 no longer says how many carries)
        stacked = [v for v in forward.outvars if v.aval.shape[:1] == (n,) and v.aval.ndim > 1]
        return sum(v.aval.size for v in stacked if str(v) != "_") / (n * size)

    assert kept(True) <= 1 < kept(False) <= 3


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
    """By x sin x squared; the sum of the rows of its hessian, which is diagonal."""

    def f(x):
        choose = lambda y: x * rg.sin(x) if rg.sum(y) > 1 else x  # noqa: E731
        return rg.sum(rg.checkpoint(choose)(x) ** 2)

    x, v = np.array([0.6, 1.0, -0.3]), np.array([1.0, -2.0, 0.5])
    y, dy, ddy = x * np.sin(x), np.sin(x) + x * np.cos(x), 2 * np.cos(x) - x * np.sin(x)
    np.testing.assert_allclose(rg.grad(f)(x).numpy(), 2 * y * dy)
    np.testing.assert_allclose(rg.hessian(f)(x).numpy().sum(0), 2 * dy**2 + 2 * y * ddy)
    np.testing.assert_allclose(rg.jvp(f, [x], [v])[1].numpy(), 2 * y * dy @ v)


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


# -- Python that is traced runs once ---------------------------------------------------------------

X = np.array([1.0, 2.0])


class Layer:
    """Multiplies by the number of its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * x * float(self.calls)


v = rg.Variable(np.array(1.0), name="v")
BODIES = REGIONS | {
    "a Variable": lambda f: lambda x: f(x) * v,
    "custom": lambda f: rg.custom_grad(lambda x: (f(x), lambda dy: 2 * x * dy)),
    "vjp in custom": lambda f: rg.custom_grad(lambda x: _with_its_vjp(f, x)),
}


def _with_its_vjp(f, x):
    y, back = rg.vjp(f, x)
    return y, lambda dy: back(dy)[0]


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", BODIES)
def test_traced_python_runs_once(name):
    """In one program to second order, and in the derivatives of a compiled function."""
    inside, outside = Layer(), Layer()
    total = lambda x: BODIES[name](inside)(x).sum()  # noqa: E731
    first = lambda f: lambda x: rg.grad(f)(x).sum()  # noqa: E731
    f = rg.jit(lambda x: BODIES[name](outside)(x).sum())
    np.testing.assert_allclose(rg.jit(rg.grad(first(total)))(X).numpy(), [2.0, 2.0])
    np.testing.assert_allclose(rg.grad(first(f))(X).numpy(), [2.0, 2.0])
    assert inside.calls == outside.calls == 1


def test_vmap_on_jax_data_runs_once():
    layer = Layer()
    dx = rg.grad(lambda x: rg.vmap(layer)(x).sum())(jnp.asarray(X))
    np.testing.assert_allclose(dx.numpy(), 2 * X)
    assert layer.calls == 1


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("split", [jax.random.split, rg.random.split])
@pytest.mark.parametrize("name", ["alone", "checkpoint", "cond", "scan"])
def test_keys_that_are_split_inside(split, name):
    def noisy(key):
        first, second = split(key)
        draw = lambda k: rg.random.normal(k, (2,), dtype="float64")  # noqa: E731
        return lambda x: x**3 * draw(first) * draw(second)

    loss = lambda key, x: BODIES[name](lambda x: noisy(key)(x))(x).sum()  # noqa: E731
    key = jax.random.key(3)
    weight = noisy(key)(rg.asarray(np.ones(2))).numpy()
    dx = rg.jit(lambda key, x: rg.grad(lambda x: loss(key, x))(x))(key, X)
    np.testing.assert_allclose(dx.numpy(), 3 * X**2 * weight)
    f = rg.jit(loss)
    second = rg.grad(lambda x: rg.grad(lambda x: f(key, x))(x).sum())(X)
    np.testing.assert_allclose(second.numpy(), 6 * X * weight)


def test_an_eager_checkpoint_that_does_something_else_is_refused():
    with pytest.raises(GradientError, match=r"first difference is the op 'Mul'"):
        rg.grad(lambda x: rg.checkpoint(Layer())(x).sum())(X)


# -- custom gradients ------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("how", ["grad", "vjp", "checkpoint"])
def test_a_gradient_function_differentiates_under_the_scopes_of_the_call(mode, how):
    model = lambda x: rg.sign(x) + x  # noqa: E731

    def back(x, dy):
        if how == "vjp":
            return rg.vjp(model, x)[1](dy)[0]
        return rg.grad(rg.checkpoint(model) if how == "checkpoint" else model)(x, dy)

    f = rg.custom_grad(lambda x: (model(x), lambda dy: back(x, rg.sign(dy) * dy)))
    with rg.gradient_override_map({"Sign": lambda dy: dy * 3.0}) as used:
        np.testing.assert_allclose(mode(rg.grad(lambda x: f(x).sum()))(X).numpy(), [4.0, 4.0])
    used.assert_fired()
    with rg.gradient_override_map({"Sign": lambda dy: dy * 3.0}):
        value, pull = rg.vjp(f, X)
    np.testing.assert_allclose(pull(rg.ones_like(value))[0].numpy(), [4.0, 4.0])
    np.testing.assert_allclose(rg.grad(lambda x: f(x).sum())(X).numpy(), [1.0, 1.0])


@MODES
def test_a_value_that_leaves_by_a_variable_is_refused(mode):
    w = rg.Variable(np.zeros(2))

    @rg.custom_grad
    def f(x):
        w.assign(x * 2)
        return x * x, lambda dy: dy

    with pytest.raises(GradientError, match="assigned to inside a custom_grad function"):
        mode(rg.grad(lambda x: (f(x) + w * x).sum()))(X)
    assert rg.grad(lambda x: f(x).sum())(X).tolist() == [1.0, 1.0]
    assert (f(rg.asarray(X)) + w).tolist() == [3.0, 8.0]
