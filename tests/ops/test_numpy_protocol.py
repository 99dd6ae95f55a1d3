"""NumPy's functions on Tensors: the values of NumPy, the gradients of regrad, or an error."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.testing import overrides

import regrad as rg
from regrad.errors import ArgumentError, GradientError
from regrad.ops.numpy_protocol import FUNCTIONS, METHODS
from regrad.testing import check_gradients
from tests.helpers.rows import refused

X = np.array([[0.3, 0.7, 0.2], [0.9, 0.4, 0.6]])
V = np.array([0.5, 0.1, 0.8])
W = np.array([0.41, 0.17, 0.83])  # with X: no ties, no multiples
S = np.array([[2.0, 0.3, 0.1], [0.3, 1.5, 0.2], [0.1, 0.2, 1.0]])


def same(got: Any, due: Any) -> None:
    """Same numbers, in a Tensor (or a sequence of them)."""
    if isinstance(due, tuple | list):
        assert len(got) == len(due)
        for a, b in zip(got, due, strict=True):
            same(a, b)
    else:
        assert isinstance(got, rg.Tensor), type(got)
        assert got.shape == np.shape(due)
        np.testing.assert_allclose(got._values(), due, rtol=1e-12)


# -- ufuncs --------------------------------------------------------------------------------------

SMOOTH = (
    "absolute arccos arcsin arcsinh arctan arctanh conjugate cos cosh exp exp2 expm1 fabs log "
    "log10 log1p log2 negative positive reciprocal sin sinh sqrt square tan tanh"
)
FLAT = "ceil floor isfinite isinf isnan rint sign signbit trunc"
BINARY = (
    "add arctan2 copysign divide floor_divide hypot logaddexp maximum minimum multiply power "
    "remainder subtract"
)
COMPARISONS = "equal greater greater_equal less less_equal not_equal"
INTEGERS = "bitwise_and bitwise_or bitwise_xor left_shift right_shift"
LOGICAL = "logical_and logical_or logical_xor"
OTHERS = "arccosh invert logical_not nextafter divmod matmul vecdot"
READINGS = "shape ndim size isrealobj iscomplexobj allclose array_equal array_equiv"


def ufuncs(*names: str) -> Any:
    each = " ".join(names).split()
    return pytest.mark.parametrize("ufunc", [getattr(np, name) for name in each], ids=each)


@ufuncs(SMOOTH)
def test_unary_ufuncs(ufunc):
    same(ufunc(rg.asarray(X)), ufunc(X))
    check_gradients(ufunc, [V])


@ufuncs(FLAT)
def test_flat_ufuncs(ufunc):
    same(ufunc(rg.asarray(X)), ufunc(X))


@ufuncs(BINARY)
def test_binary_ufuncs(ufunc):
    same(ufunc(rg.asarray(X), rg.asarray(W)), ufunc(X, W))
    same(ufunc(X, rg.asarray(W)), ufunc(X, W))
    same(ufunc(rg.asarray(X), 2.0), ufunc(X, 2.0))
    check_gradients(ufunc, [X, W])


@ufuncs(COMPARISONS)
def test_comparisons(ufunc):
    same(ufunc(rg.asarray(X), X[:, ::-1]), ufunc(X, X[:, ::-1]))


@ufuncs(INTEGERS, LOGICAL)
def test_integers_and_bools(ufunc):
    a, b = np.array([6, 3, 0]), np.array([1, 2, 0])
    same(ufunc(rg.asarray(a), rg.asarray(b)), ufunc(a, b))


def test_the_other_ufuncs():
    same(np.arccosh(rg.asarray(1 + X)), np.arccosh(1 + X))
    same(np.invert(rg.asarray([1, 2])), np.array([-2, -3]))
    same(np.logical_not(rg.asarray([True, False])), np.array([False, True]))
    same(np.nextafter(rg.asarray(X), 1.0), np.nextafter(X, 1.0))
    same(np.divmod(rg.asarray(X), 0.25), np.divmod(X, 0.25))
    same(np.matmul(X, rg.asarray(S)), X @ S)
    same(X @ rg.asarray(S), X @ S)
    same(np.vecdot(rg.asarray(X), V), X @ V)
    same(np.vecdot(rg.asarray(X), X, axis=0), np.vecdot(X, X, axis=0))


@pytest.mark.parametrize(("ufunc", "method"), METHODS, ids=str)
def test_reduce_and_accumulate(ufunc, method):
    x = X > 0.5 if "logical" in ufunc.__name__ else X
    run = getattr(ufunc, method)
    same(run(rg.asarray(x)), run(x))
    same(run(rg.asarray(x), axis=1), run(x, axis=1))
    if method == "reduce":
        same(run(rg.asarray(x), axis=None, keepdims=True), run(x, axis=None, keepdims=True))


def test_scipy_special():
    import scipy.special as special

    for ufunc in (special.erf, special.erfc, special.erfinv, special.expit, special.gammaln):
        same(ufunc(rg.asarray(X)), ufunc(X))
    same(special.psi(rg.asarray(X)), special.psi(X))
    same(special.log_expit(rg.asarray(X)), special.log_expit(X))
    same(special.xlogy(rg.asarray(V), X), special.xlogy(V, X))
    check_gradients(special.expit, [V])


def test_an_array_on_the_left_gives_a_tensor():
    t = rg.asarray(V)
    same(X * t, X * V)
    same(X - t, X - V)
    same(X < t, X < V)  # noqa: SIM300
    same(np.float64(2.0) * t, 2 * V)
    check_gradients(lambda t: X / t, [V])


def test_variables():
    v = rg.Variable(V, name="v")
    same(np.sin(v), np.sin(V))
    same(np.concatenate([v, V]), np.concatenate([V, V]))
    _, grads = rg.variable_grads(lambda: np.sum(X * np.square(v)))
    same(grads["v"], 2 * V * X.sum(axis=0))


# -- functions -----------------------------------------------------------------------------------

I = np.array([[2, 0], [1, 1]])  # noqa: E741 (indices)


def in_module(module: Any) -> Any:
    """Return a function that makes a row: the name of a function, and its call on x."""
    return lambda name, *args, **options: (
        name, lambda x: getattr(module, name)(x, *args, **options))  # fmt: skip


of, linalg, fft = map(in_module, (np, np.linalg, np.fft))
SMOOTH_FUNCTIONS = [  # (a Tensor from atleast_1d while somebody watches, an array otherwise)
    of("amax", axis=0), of("amin", axis=1, keepdims=True), of("astype", np.float64),
    ("atleast_1d", lambda x: rg.asarray(np.atleast_1d(x[0, 0]))),
    ("atleast_2d", lambda x: np.atleast_2d(x[0], x)[0]),
    ("broadcast_arrays", lambda x: np.broadcast_arrays(x[0], x)[0]), of("broadcast_to", (2, 2, 3)),
    of("clip", 0.25, 0.65), of("clip", min=0.25),
    ("concatenate", lambda x: np.concatenate([x, X], axis=1)),
    ("concatenate, flat", lambda x: np.concatenate([x, X], axis=None)), of("copy"), of("cross", V),
    of("cumprod", axis=1), of("cumsum"), of("cumsum", 0), of("diag"),
    ("diag, of a vector", lambda x: np.diag(x[0], 1)), of("diagonal", 1),
    ("diagonal, axes", lambda x: np.diagonal(x[None], 0, 2, 1)), of("diff", axis=1), of("dot", S),
    of("dot", V), of("dot", 2.0), of("dot", np.stack([S, S])),
    ("einsum", lambda x: np.einsum("ij,kj->ik", x, S)), of("expand_dims", 1), of("flip", 0),
    ("full_like", lambda x: np.full_like(x, 3.0) * x), ("hstack", lambda x: np.hstack([x, X])),
    ("hstack, vectors", lambda x: np.hstack([x[0], V])), ("imag", lambda x: np.imag(x * (1 + 2j))),
    of("inner", S), of("inner", 2.0), of("kron", X), of("matrix_transpose"), of("max", 1),
    of("mean", 0, keepdims=True), of("median", 1, keepdims=True),
    ("meshgrid", lambda x: np.meshgrid(x[0], V)[0]), of("min"),
    ("moveaxis", lambda x: np.moveaxis(x[None], 0, -1)),
    ("nan_to_num", lambda x: np.nan_to_num(np.where(X > 0.5, x, np.nan), nan=2.0)),
    ("ones_like", lambda x: np.ones_like(x) * x), of("outer", V), of("pad", 1),
    of("pad", [(1, 0), (0, 2)], constant_values=3.0), of("pad", ((0, 0), (2, 1)), mode="reflect"),
    of("prod", axis=1), of("quantile", [0.15, 0.6], 0),
    of("quantile", 0.3, method="higher", keepdims=True), of("ravel"), of("real"),
    of("repeat", 2, axis=1), of("repeat", 2), of("reshape", (3, 2)), of("reshape", -1, order="C"),
    of("roll", 1, axis=1), of("sinc"), of("sort"),
    ("split", lambda x: np.split(x, [1, 2], axis=1)[1]),
    ("split, in equal parts", lambda x: np.split(x, 3, axis=1)[2]),
    ("squeeze", lambda x: np.squeeze(x[None])), ("stack", lambda x: np.stack([x, X], axis=-1)),
    of("std", axis=1, ddof=1), of("sum", axis=(0, 1)),
    of("sum", 1, keepdims=True, out=None, dtype=None), of("swapaxes", 0, -1),
    of("take", np.array([4, 0, 0])), of("take", np.array([2, 0]), axis=1),
    of("take_along_axis", I, axis=1), of("tensordot", S, 1),
    of("tensordot", X, axes=([0, 1], [0, 1])), of("tile", (2, 1)), of("tile", 2), of("trace"),
    of("transpose"), ("transpose, axes", lambda x: np.transpose(x[None], (1, 0, 2))), of("tril"),
    of("triu", 1), ("unstack", lambda x: np.unstack(x, axis=1)[2]), of("var", 0), of("vdot", X),
    ("vstack", lambda x: np.vstack([x, V])), ("where", lambda x: np.where(X > 0.5, x, 0.0)),
    ("zeros_like", lambda x: np.zeros_like(x) + x),
    ("round, to decimals", lambda x: np.round(x, 1) + x),
]  # fmt: skip

LINALG = [
    linalg("cholesky"), linalg("cross", X[0]), linalg("det"), linalg("diagonal"),
    ("eigh", lambda s: np.linalg.eigh(s)[0]), linalg("eigvalsh"), linalg("inv"),
    ("lstsq", lambda s: np.linalg.lstsq(s, V)[0]), ("matmul", lambda s: np.linalg.matmul(X, s)),
    linalg("matrix_norm"), linalg("matrix_power", 3), linalg("matrix_transpose"), linalg("norm"),
    linalg("norm", axis=1, keepdims=True), ("norm, order 1", lambda s: np.linalg.norm(s[0], 1)),
    linalg("norm", "fro", axis=(1, 0), keepdims=True), linalg("norm", "nuc"),
    ("outer", lambda s: np.linalg.outer(s[0], V)), linalg("pinv"),
    ("qr", lambda s: np.abs(np.linalg.qr(s)[1])), ("slogdet", lambda s: np.linalg.slogdet(s)[1]),
    linalg("solve", V), ("svd", lambda s: np.linalg.svd(s)[1]), linalg("svdvals"),
    ("tensordot", lambda s: np.linalg.tensordot(X, s, axes=1)), linalg("trace"),
    linalg("vecdot", V), linalg("vector_norm", axis=0),
]  # fmt: skip

FOURIER = [
    ("fft", lambda x: np.real(np.fft.fft(x))),
    ("fft, options", lambda x: np.imag(np.fft.fft(x, 4, 0, "ortho"))),
    ("fft2", lambda x: np.real(np.fft.fft2(x[None], (2, 4)))),
    ("fftn", lambda x: np.real(np.fft.fftn(x, norm="forward"))), fft("fftshift"),
    ("hfft", lambda x: np.fft.hfft(x * (1 + 1j))), ("ifft", lambda x: np.imag(np.fft.ifft(x))),
    ("ifft2", lambda x: np.imag(np.fft.ifft2(x))),
    ("ifftn", lambda x: np.real(np.fft.ifftn(x, axes=[0]))), fft("ifftshift", 1),
    ("ihfft", lambda x: np.real(np.fft.ihfft(x))),
    ("irfft", lambda x: np.fft.irfft(x * (1 + 1j), 5)),
    ("irfft2", lambda x: np.fft.irfft2(x * (1 + 1j))),
    ("irfftn", lambda x: np.fft.irfftn(x * (1 + 1j), (2, 3), (0, 1))),
    ("rfft", lambda x: np.imag(np.fft.rfft(x, axis=1))),
    ("rfft2", lambda x: np.real(np.fft.rfft2(x))), ("rfftn", lambda x: np.real(np.fft.rfftn(x))),
]  # fmt: skip

WITHOUT_GRADIENT = [
    ("all", lambda x: np.all(x > 0.25, axis=1)), ("any", lambda x: np.any(x > 0.65, axis=0)),
    of("argmax", 1), of("argmin", axis=0, keepdims=True), of("argsort", axis=1), of("around"),
    ("count_nonzero", lambda x: np.count_nonzero(x > 0.5, axis=1)),
    ("empty_like", lambda x: np.empty_like(x) * 0), of("isclose", 0.5, atol=0.2),
    ("nonzero", lambda x: np.nonzero(x > 0.5)), of("round"),
    ("searchsorted", lambda x: np.searchsorted(np.arange(3.0), x[0])),
    ("where, one argument", lambda x: np.where(x > 0.5)),
]  # fmt: skip


def named(table: list[Any]) -> Any:
    return pytest.mark.parametrize("f", [f for _, f in table], ids=[name for name, _ in table])


@named(SMOOTH_FUNCTIONS)
def test_functions(f):
    same(rg.vjp(f, rg.asarray(X))[0], f(X))  # (atleast_1d is NumPy's while nobody watches)
    check_gradients(f, [X])


@named(FOURIER)
def test_fourier_transforms(f):
    same(f(rg.asarray(X)), f(X))
    check_gradients(f, [X])


@named(LINALG)
def test_linalg(f):
    def of_symmetric(s):
        return f((s + s.T) / 2 if isinstance(s, np.ndarray) else (s + rg.matrix_transpose(s)) / 2)

    same(of_symmetric(rg.asarray(S)), of_symmetric(S))
    check_gradients(of_symmetric, [S])


@named(WITHOUT_GRADIENT)
def test_functions_without_gradient(f):
    same(f(rg.asarray(X)), f(X))


def test_readings():
    t = rg.asarray(X)
    assert np.shape(t) == (2, 3)
    assert np.ndim(t) == 2
    assert (np.size(t), np.size(t, 1)) == (6, 3)
    assert np.isrealobj(t)
    assert not np.iscomplexobj(t)
    assert np.allclose(t, X + 1e-12)
    assert not np.allclose(t, X + 1e-3, atol=1e-6)
    assert np.array_equal(X, t)
    assert np.array_equiv(t, t)


def test_every_function_of_the_table_is_tested():
    modules = {"": SMOOTH_FUNCTIONS + WITHOUT_GRADIENT, "linalg.": LINALG, "fft.": FOURIER}
    tested = {m + k.partition(",")[0] for m, table in modules.items() for k, _ in table}
    names = {f"{f.__module__}.{f.__name__}".removeprefix("numpy.") for f in FUNCTIONS}
    assert names == tested | set(READINGS.split())


# -- nothing leaves the tape ---------------------------------------------------------------------


TESTED = set(" ".join((SMOOTH, FLAT, BINARY, COMPARISONS, INTEGERS, LOGICAL, OTHERS)).split())


def differentiated(call):
    """Call a function on a Tensor while that is being differentiated."""
    return rg.grad(call)(rg.asarray(V))


def test_every_ufunc_that_is_not_tested_is_refused():
    for ufunc in overrides.get_overridable_numpy_ufuncs():
        if ufunc.__name__ in TESTED:
            continue
        with pytest.raises(ArgumentError, match="no counterpart"):
            differentiated(lambda t, u=ufunc: t.__array_ufunc__(u, "__call__", *[t] * u.nin))


def test_every_other_function_is_refused():
    for function in overrides.get_overridable_numpy_array_functions() - FUNCTIONS.keys():
        with pytest.raises(ArgumentError, match="no counterpart"):
            differentiated(lambda t, f=function: t.__array_function__(f, (rg.Tensor,), (t,), {}))


@pytest.mark.parametrize(("call", "message"), [
    (lambda t: np.cbrt(t), r"np.cbrt has no counterpart.*regrad's sign\(x\)"),
    (lambda t: np.nanmean(t), "np.nanmean has no counterpart"),
    (lambda t: np.subtract.reduce(t), "np.subtract.reduce has no counterpart"),
    (lambda t: np.multiply.outer(t, t), "np.multiply.outer has no counterpart"),
    (lambda t: np.add.at(np.ones(3), [0], t), "regrad's at_add"),
    (lambda t: np.percentile(t, 30), "np.percentile has no counterpart"),
    (lambda t: np.add(t, 1, where=[True]), "np.add of a Tensor does not take where"),
    (lambda t: np.add(t, 1, dtype="f4"), "np.add of a Tensor does not take dtype"),
    (lambda t: np.add.reduce(t, initial=1), "np.add.reduce of a Tensor does not take initial"),
    (lambda t: np.sum(t, where=[True]), r"np.sum .* takes .*keepdims=False\).*'where'"),
    (lambda t: np.reshape(t, 3, order="F"), "np.reshape .*'order'"),
    (lambda t: np.clip(t, 0, 1, dtype="f4"), "np.clip .*'dtype'"),
    (lambda t: np.sin(t, out=np.zeros(3)), "np.sin.*would write"),
])  # fmt: skip
def test_refusals_say_what_and_why(call, message):
    refused(lambda: differentiated(call), ArgumentError, message)


def test_assignment_into_an_array_is_refused():
    array = np.zeros(3)

    def assign(t):
        nonlocal array
        array += t

    refused(lambda: differentiated(assign), ArgumentError, r"y \+= t.*y = y \+ t")


WATCHED = {  # where values may not leave
    "a tape": lambda f: rg.grad(f),
    "a tape that watches something else": lambda f: lambda t: rg.grad(lambda s: f(t) * s)(1.0),
    "a trace": rg.jit,
    "a batch": lambda f: lambda t: rg.vmap(f)(rg.stack([t, t])),
    "a checkpoint": lambda f: rg.grad(rg.checkpoint(f)),
    "a custom function": lambda f: rg.grad(
        rg.custom_grad(lambda x, save: {"value": f(x), "grad_func": lambda dy: dy})
    ),
    "a loop": lambda f: rg.grad(lambda t: rg.scan(lambda c, x: (f(t) + c, x), t, t)[0]),
    "variables": lambda f: lambda t: rg.variable_grads(lambda: f(rg.Variable(t)).sum()),
}


@pytest.mark.parametrize("where", WATCHED)
def test_values_do_not_leave_while_somebody_watches(where):
    for f in (lambda t: np.percentile(t, 50), np.cbrt, lambda t: np.add(np.ones(3), t, where=True)):
        assert isinstance(f(rg.asarray(V)), np.ndarray | np.generic)
        with pytest.raises(ArgumentError, match=r"no counterpart|does not take"):
            WATCHED[where](f)(rg.asarray(V))


def test_another_thread_keeps_values_in():
    def elsewhere(x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(np.percentile, x, 50).result() * x

    refused(lambda: rg.grad(elsewhere)(rg.asarray(V)), ArgumentError, "no counterpart")


def test_functions_without_a_counterpart_run_on_values(tmp_path):
    t, v = rg.asarray(V), rg.Variable(V)
    assert np.percentile(t, 30) == np.percentile(V, 30)
    assert np.nanmedian(v) == np.nanmedian(V)
    assert [*map(len, np.histogram(t, bins=4))] == [4, 5]
    assert not np.may_share_memory(t, np.ones(3))
    assert np.nanmax(t) == np.nanmax(V)
    np.testing.assert_array_equal(np.hypot.outer(t, [t[0], 1.0]), np.hypot.outer(V, [V[0], 1.0]))
    np.save(tmp_path / "t.npy", t)
    np.testing.assert_array_equal(np.load(tmp_path / "t.npy"), V)
    array = np.zeros(3)
    array += t
    np.testing.assert_array_equal(array, V)
    with pytest.raises(ValueError, match="would write into a Tensor"):
        np.add(V, t, out=t)  # pyright: ignore


def test_reading_an_array_while_differentiating_is_refused():
    with pytest.raises(GradientError, match="stop_gradient"):
        rg.grad(lambda x: x * np.asarray(x).max())(rg.asarray(V))
    with pytest.raises(GradientError, match="stop_gradient"):
        rg.grad(lambda x: x * np.array([x, x]).max())(rg.scalar(2.0))


class Other:
    """A foreign array type, which answers for itself."""

    def __array_ufunc__(self, *args: Any, **options: Any) -> str:
        return "its own answer"

    def __array_function__(self, *args: Any) -> str:
        return "its own answer"


def test_foreign_types_answer_for_themselves():
    assert np.add(rg.asarray(V), Other()) == "its own answer"
    assert np.concatenate([rg.asarray(V), Other()]) == "its own answer"


def test_overrides_fire_inside_numpy_functions():
    with rg.gradient_override_map({"Abs": lambda dy: dy}) as used:
        dx = rg.grad(lambda x: np.sum(np.abs(x)))(rg.tensor([-1.0, 2.0]))
    assert dx.tolist() == [1.0, 1.0]
    used.assert_fired()
