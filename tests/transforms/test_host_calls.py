"""`rg.host_call`: outside code with a gradient, in every mode, and the errors of wrong calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import torch
from numpy.testing import assert_allclose
from scipy.integrate import solve_ivp

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    RuleError,
    ShapeError,
    TraceError,
)
from regrad.extend import Spec
from regrad.testing import check_gradients
from tests.helpers.quick import MODES, nothing_is_left_open
from tests.helpers.rows import refused

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)
X = rg.tensor([0.3, 1.4], dtype="float64")
AT = X.numpy()


def bessel(n, x, **options):
    """The Bessel function J_n by SciPy, whose derivative is again host code."""

    def gradient(dy, x):
        return dy * (bessel(n - 1, x, **options) - bessel(n + 1, x, **options)) / 2

    f = lambda x: scipy.special.jv(n, x)  # noqa: E731
    return rg.host_call(f, x, out=x, gradient=gradient, **options)


def decay(x, rate):
    """The solution at t = 1 of y' = -rate y, y(0) = x, by SciPy; its gradient reads the result."""

    def f(x, rate):
        return solve_ivp(lambda t, y: -rate * y, (0, 1), x, rtol=1e-11, atol=1e-13).y[:, -1]

    def gradient(dy, x, rate, *, y):
        return [dy * rg.exp(-rate), -rg.sum(dy * y)]

    return rg.host_call(f, x, rate, out=x, gradient=gradient)


# -- values and gradients --------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_every_order_of_a_gradient_by_host_calls(mode, order):
    f = lambda x: bessel(1, x)  # noqa: E731
    for _ in range(order):
        f = rg.grad(lambda x, f=f: f(x).sum())
    assert_allclose(mode(f)(X).numpy(), scipy.special.jvp(1, AT, order), rtol=1e-12)


@MODES
def test_hessians_agree_with_differences(mode):
    f = lambda x: bessel(0, x).sum() ** 2  # noqa: E731
    step, total = 1e-5, scipy.special.j0(AT).sum()
    gradient = lambda x: -2 * scipy.special.j0(x).sum() * scipy.special.j1(x)  # noqa: E731
    rows = [(gradient(AT + d) - gradient(AT - d)) / (2 * step) for d in step * np.eye(2)]
    assert_allclose(mode(rg.hessian(f))(X).numpy(), rows, rtol=1e-8)
    assert_allclose(mode(f)(X).item(), total**2)


def test_a_simulator_whose_gradient_reads_the_result():
    rate = rg.tensor(0.7, dtype="float64")
    for f in (decay, rg.jit(decay)):
        assert_allclose(f(X, rate).numpy(), AT * np.exp(-0.7), rtol=1e-9)
    check_gradients(decay, [X, rate], order=2, rtol=1e-4)
    dx, drate = rg.jit(rg.grads(lambda x, rate: decay(x, rate).sum()))([X, rate])
    assert_allclose(dx.numpy(), np.exp(-0.7) * np.ones(2))
    assert_allclose(drate.item(), -np.exp(-0.7) * AT.sum())


def test_check_gradients_finds_a_wrong_gradient():
    f = lambda x: rg.host_call(np.sin, x, out=x, gradient=lambda dy, x: dy * x)  # noqa: E731
    with pytest.raises(AssertionError, match=r"by args\[0\]"):
        check_gradients(f, [X])


@MODES
def test_containers_numbers_and_strings(mode):
    def f(p, k, name):
        assert (k, name) == (3, "text")
        return {"a": p["x"] * k, "b": (p["y"].sum(),)}

    def gradient(dy, p, k, name):
        return {"x": dy["a"] * k, "y": dy["b"][0] + rg.zeros_like(p["y"])}

    def called(p):
        out = {"a": p["x"], "b": (Spec((), np.dtype("float64")),)}
        return rg.host_call(f, p, 3, "text", out=out, gradient=gradient)

    p = {"x": X, "y": 2 * X}
    y = mode(called)(p)
    assert_allclose(y["a"].numpy(), 3 * AT)
    assert_allclose(y["b"][0].item(), 2 * AT.sum())
    dp = mode(rg.grad(lambda p: called(p)["a"].sum() + called(p)["b"][0] ** 2))(p)
    assert_allclose(dp["x"].numpy(), [3.0, 3.0])
    assert_allclose(dp["y"].numpy(), np.full(2, 4 * AT.sum()))


@MODES
@pytest.mark.parametrize(
    "out",
    [
        Spec((), np.dtype("float64")), jax.ShapeDtypeStruct((), "float64"), np.zeros(()),
        rg.zeros((), dtype="float64"), lambda x: Spec(x.shape[1:], x.dtype),
    ],
    ids=["Spec", "ShapeDtypeStruct", "array", "Tensor", "function"],
)  # fmt: skip
def test_forms_of_out(mode, out):
    f = lambda x: rg.host_call(np.sum, x, out=out, gradient=lambda dy, x: dy + 0 * x)  # noqa: E731
    assert_allclose(mode(f)(X).item(), AT.sum())
    assert_allclose(mode(rg.grad(f))(X).tolist(), [1.0, 1.0])


@MODES
def test_integers_and_python_numbers(mode):
    f = lambda x, i: rg.host_call(  # noqa: E731
        lambda x, i: float(x[i]), x, i, out=Spec((), x.dtype),
        gradient=lambda dy, x, i: [rg.at_add(rg.zeros_like(x), i, dy), None],
    )  # fmt: skip
    assert mode(f)(X, rg.asarray(1)).item() == AT[1]
    assert mode(rg.grad(f, argnums=0))(X, rg.asarray(1)).tolist() == [0.0, 1.0]


def test_arrays_are_read_only_and_results_are_copies():
    buffer = np.zeros(2)

    def f(x):
        assert isinstance(x, np.ndarray) and not x.flags.writeable
        buffer[:] = x
        return buffer

    y, z = rg.host_call(f, X, out=X), rg.host_call(f, 2 * X, out=X)
    assert_allclose([y.numpy(), z.numpy()], [AT, 2 * AT])


# -- modes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "seen"),
    [
        ("sequential", (2,)), ("sequential_unrolled", (2,)), ("expand_dims", (3, 2)),
        ("broadcast_all", (3, 2)), ("legacy_vectorized", (3, 2)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda f: f, rg.jit], ids=["eager", "jit"])
def test_vmap_by_loop_or_by_batch(wrap, method, seen):
    shapes = set()
    weights = rg.tensor([2.0, 3.0], dtype="float64")

    def times(a, b):
        shapes.add(np.broadcast_shapes(a.shape, b.shape))
        return a * b

    def f(a, b):
        call = lambda a, b: rg.host_call(times, a, b, out=b, vmap_method=method)  # noqa: E731
        gradient = lambda dy, a, b: [call(dy, b), call(dy, a)]  # noqa: E731
        return rg.host_call(times, a, b, out=a, gradient=gradient, vmap_method=method)

    batch = rg.tensor(jnp.arange(6.0, dtype="float64").reshape(3, 2))
    y = wrap(rg.vmap(f, in_axes=(0, None)))(batch, weights)
    assert_allclose(y.numpy(), batch.numpy() * weights.numpy())
    per_example = rg.vmap(rg.grad(lambda a, b: f(a, b).sum(), argnums=1), in_axes=(0, None))
    assert_allclose(wrap(per_example)(batch, weights).numpy(), batch.numpy())
    # (In eager mode, values that are the same for all examples are no batch.)
    assert seen in shapes and shapes <= {seen, (2,)}


def test_vmap_of_numpy_data_calls_f_for_each_example():
    rows = rg.tensor(np.stack([AT, 2 * AT]))
    y = rg.vmap(lambda x: bessel(0, x, vmap_method="expand_dims"))(rows)
    assert_allclose(y.numpy(), scipy.special.j0(rows.numpy()))


def test_in_a_scan_a_checkpoint_and_forward_mode():
    once = rg.checkpoint(lambda x: bessel(1, x))
    loop = lambda x: rg.scan(lambda c, _: (once(c), None), x, length=2)[0].sum()  # noqa: E731
    inner = scipy.special.j1(AT)
    slope = scipy.special.jvp(1, inner) * scipy.special.jvp(1, AT)
    for mode in (rg.jit, lambda f: f):
        assert_allclose(mode(rg.grad(loop))(X).numpy(), slope)
    assert_allclose(rg.jvp(loop, [X], [X])[1].item(), (slope * AT).sum())


def test_in_a_graph():
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder("float64", [None])
        (dx,) = tf.gradients(bessel(1, x), x)
        (second,) = tf.gradients(dx, x)
        found = session.run([bessel(1, x), dx, second], {x: AT})
    for order, y in enumerate(found):
        assert_allclose(y, scipy.special.jvp(1, AT, order), rtol=1e-12)


def test_torch_data_and_torch_functions():
    x = torch.tensor(AT, requires_grad=True)
    y = bessel(1, rg.tensor(x.detach()))
    assert isinstance(y.data, torch.Tensor)
    f = rg.torch.from_regrad(lambda x: bessel(1, x))
    assert torch.autograd.gradcheck(f, x) and torch.autograd.gradgradcheck(f, x)
    refused(lambda: torch.func.vmap(f)(x.detach()), TraceError, "host_call: .* needs values")


@MODES
def test_overrides_apply_in_the_gradient(mode):
    def f(x):
        gradient = lambda dy, x: rg.vjp(rg.sin, x)[1](dy)[0]  # noqa: E731
        return rg.host_call(np.sin, x, out=x, gradient=gradient).sum()

    with rg.gradient_override_map({"Sin": lambda dy: 7 * dy}) as used:
        assert mode(rg.grad(f))(X).tolist() == [7.0, 7.0]
    used.assert_fired()


# -- errors ----------------------------------------------------------------------------------------


def broken(x):
    raise KeyError("boom")


def test_exceptions_keep_their_type_and_line():
    with pytest.raises(KeyError, match="boom") as caught:
        rg.host_call(broken, X, out=X)
    assert caught.traceback[-1].name == "broken"
    with pytest.raises(np.linalg.LinAlgError, match=r"^Singular matrix$") as caught:
        rg.host_call(np.linalg.inv, rg.zeros((2, 2)), out=rg.zeros((2, 2)))
    assert type(caught.value) is np.linalg.LinAlgError
    line = rf"test_host_calls\.py\", line {broken.__code__.co_firstlineno + 1}, in broken"
    with pytest.raises(Exception, match=line):
        rg.jit(lambda x: rg.host_call(broken, x, out=x))(X).numpy()


WRONG = {
    "shape": (lambda x: x[:1], X, ShapeError,
              r"test_host_calls\.py:\d+ returned float64 \(1,\), expected an array of float64"),
    "dtype": (lambda x: x.astype("f"), X, DTypeError, r"Return y.astype\('float64'\)"),
    "a list": (lambda x: list(x), X, ArgumentError, "returned list, expected an array"),
    "None": (lambda x: None, X, ArgumentError, "returned None, expected an array"),
    "two for one": (lambda x: (x, x), X, ArgumentError, "returned tuple, expected an array"),
    "one for two": (lambda x: x, (X, X), ArgumentError, "another structure than out"),
    "of two": (lambda x: (x, 1.0), (X, X), ShapeError, r"result 1 of .* returned float64 \(\)"),
}  # fmt: skip


@pytest.mark.parametrize(("f", "out", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_results(f, out, error, words):
    refused(lambda: rg.host_call(f, X, out=out), error, words)
    with pytest.raises(Exception, match=words):
        y = rg.jit(lambda x: rg.host_call(f, x, out=out))(X)
        rg.block_until_ready(y)


CALLS = {
    "out is a number": (lambda: rg.host_call(np.sin, X, out=3), "out must hold Tensors.*got int"),
    "no out": (lambda: rg.host_call(np.sin, X), "missing a required argument: 'out'"),
    "no Tensor": (lambda: rg.host_call(np.sin, 2.0, out=X), "hold no Tensor or array; call f"),
    "no function": (lambda: rg.host_call(3, X, out=X), "must be a function, got int"),
    "a gradient": (lambda: rg.host_call(np.sin, X, out=X, gradient=X), "must be a function"),
    "a method": (lambda: rg.host_call(np.sin, X, out=X, vmap_method="loop"), "got 'loop'"),
}


@pytest.mark.parametrize(("call", "words"), CALLS.values(), ids=CALLS)
def test_wrong_calls(call, words):
    refused(call, ArgumentError, words)


@MODES
def test_no_gradient_names_the_function(mode):
    f = lambda x: rg.host_call(broken_gradient, x, out=x).sum()  # noqa: E731
    words = r"broken_gradient, .*test_host_calls\.py:\d+ has no gradient\. Pass gradient="
    refused(lambda: mode(rg.grad(f))(X), GradientError, words)
    assert mode(rg.grad(lambda x: f(rg.stop_gradient(x)) * x[0]))(X).tolist() == [f(X).item(), 0.0]


def broken_gradient(x):
    return np.sin(x)


def by_numpy(dy, x):
    return dy * np.cos(x.numpy())


def test_a_gradient_of_host_code_has_no_second_derivative():
    f = lambda x: rg.host_call(np.sin, x, out=x, gradient=by_numpy).sum()  # noqa: E731
    named = r"by_numpy, .*test_host_calls\.py:\d+, raised: .* must do so by host_call"
    assert_allclose(rg.grad(f)(X).numpy(), np.cos(AT))
    refused(lambda: rg.hessian(f)(X), GradientError, named)
    refused(lambda: rg.jit(rg.grad(f))(X), TraceError, named)


@MODES
def test_a_host_call_in_the_gradient_refuses_a_second_derivative(mode):
    def f(x):
        gradient = lambda dy, x: dy * rg.host_call(np.cos, x, out=x)  # noqa: E731
        return rg.host_call(np.sin, x, out=x, gradient=gradient).sum()

    assert_allclose(mode(rg.grad(f))(X).numpy(), np.cos(AT))
    refused(lambda: mode(rg.hessian(f))(X), GradientError, "cos has no gradient")


def test_a_wrong_gradient_names_its_function():
    def too_small(dy, x):
        return dy.sum()

    f = lambda x: rg.host_call(np.sin, x, out=x, gradient=too_small).sum()  # noqa: E731
    refused(lambda: rg.grad(f)(X), RuleError, r"too_small, .* returned the shape \(\), expected")


def test_host_code_that_closes_over_a_watched_tensor():
    f = lambda w: rg.host_call(lambda x: x * w.numpy(), X, out=X).sum()  # noqa: E731
    refused(lambda: rg.grad(f)(X), GradientError, "numpy.. of a Tensor that is being diff")
