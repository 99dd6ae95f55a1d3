"""Python numbers on their way to a dtype, numbers of rare dtypes, and sizes of a run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core import dims
from regrad.errors import ArgumentError, DTypeError, NumberRangeError, UnknownShapeError
from tests.helpers.optional import optional
from tests.helpers.rows import refusals, refused
from tests.helpers.sample_runs import arrays_of
from tests.helpers.v1_session import run
from tests.samples import Sample, all_samples

torch = optional("torch")
INTEGERS = [np.dtype(f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)]
FLOATS = [np.dtype(f"float{n}") for n in (16, 32, 64)]
OTHERS = [np.dtype(d) for d in ("bool", "complex64", "complex128")]

EDGES = [0, 1, -1, 127, 128, -128, -129, 255, 256, 32767, 32768, 65535, 65536, 2**24 + 1,
         123456789, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32, 2**53 + 1,
         2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**70)]  # fmt: skip
MIXED = [True, False, 1.7, -1.7, 0.1, 3e9, -0.5, 255.9, math.inf, math.nan]


def in_graph(build: Any) -> Any:
    def made(value: Any, dtype: Any) -> np.ndarray:
        with tf.Graph().as_default():
            return run(build(value, dtype))

    return made


def assigned(value: Any, dtype: Any) -> rg.Tensor:
    v = rg.Variable(np.zeros(1, dtype))
    v.assign([value])
    return v.value


# Each makes one element of the dtype of the number.
CONSTRUCTORS = {
    "scalar": lambda v, d: rg.scalar(v, d),
    "tensor of a list": lambda v, d: rg.tensor([v], dtype=d),
    "tensor of nested lists": lambda v, d: rg.tensor([[v], [v]], dtype=d)[0],
    "tensor1d": lambda v, d: rg.tensor1d([v], d), "asarray": lambda v, d: rg.asarray(v, dtype=d),
    "asarray of a list": lambda v, d: rg.asarray([v], dtype=d),
    "Variable": lambda v, d: rg.Variable(v, dtype=d).value, "assign": assigned,
    "full": lambda v, d: rg.full((1,), v, dtype=d),
    "full_like": lambda v, d: rg.full_like(np.zeros(1, d), v),
    "full_like, dtype": lambda v, d: rg.full_like(np.zeros(1), v, dtype=d),
    "one_hot, on": lambda v, d: rg.one_hot([0], 1, on_value=v, dtype=d),
    "one_hot, off": lambda v, d: rg.one_hot([1], 1, off_value=v, dtype=d),
    "astype": lambda v, d: rg.astype(v, d), "astype of a list": lambda v, d: rg.astype([v], d),
}  # fmt: skip
WHOLE_ONLY = {
    "arange": lambda v, d: rg.arange(v, v + 1, dtype=d),
    "at_set": lambda v, d: rg.at_set(np.zeros(1, d), 0, v),
    "at_set of a list": lambda v, d: rg.at_set(np.zeros(1, d), [0], [v]),
    "pad": lambda v, d: rg.pad(np.zeros(1, d), 1, constant_value=v)[:1],
    "add": lambda v, d: np.zeros(1, d) + rg.asarray(0, dtype=d) + v,
    "maximum": lambda v, d: rg.maximum(np.zeros(1, d), v) + rg.minimum(np.zeros(1, d), v),
    "where": lambda v, d: rg.where([True], v, np.zeros(1, d)),
    "tf.constant": in_graph(lambda v, d: tf.constant(v, d)),
    "tf.constant of a list": in_graph(lambda v, d: tf.constant([v], d)),
    "tf.Variable": in_graph(lambda v, d: tf.Variable(v, dtype=d)),
    "tf.convert_to_tensor": in_graph(lambda v, d: tf.convert_to_tensor(v, d)),
    "tf.fill": in_graph(lambda v, d: tf.fill([1], tf.constant(v, d))),
    "tf.range": in_graph(lambda v, d: tf.range(v, v + 1, dtype=d)),
    "tf.one_hot": in_graph(lambda v, d: tf.one_hot([0], 1, v, dtype=d)),
    "tf.add": in_graph(lambda v, d: tf.add(tf.constant([0], d), v)),
}


def due(value: Any, dtype: np.dtype) -> np.ndarray | None:
    """NumPy's element, exactly converted; None for what an integer dtype cannot hold."""
    if dtype.kind not in "iu":
        return np.array([value]).astype(object).astype(dtype)
    if not math.isfinite(value):
        return None
    limits = np.iinfo(dtype)
    whole = math.trunc(value)
    return np.array([whole], dtype) if limits.min <= whole <= limits.max else None


def check(make: Any, value: Any, dtype: np.dtype) -> None:
    expected = due(value, dtype)
    if expected is None:
        call = lambda: make(value, dtype)  # noqa: E731
        error = refused(call, OverflowError, str(dtype), "holds integers from")
        assert isinstance(error, NumberRangeError)
        return
    found = make(value, dtype)
    found = found.numpy() if isinstance(found, rg.Tensor) else found
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.reshape(-1), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("name", CONSTRUCTORS | WHOLE_ONLY)
def test_numbers_take_the_dtype_at_once(name: str) -> None:
    every = name in CONSTRUCTORS
    for dtype in INTEGERS + (FLOATS + OTHERS) * every:
        for value in EDGES + MIXED * every:
            # (the limit of tf.range, one further than the largest integer, does not fit)
            if name != "tf.range" or value != np.iinfo(dtype).max:
                check((CONSTRUCTORS | WHOLE_ONLY)[name], value, dtype)


FILLS = {
    "full_like": lambda x, v: rg.full_like(x, v),
    "one_hot": lambda x, v: rg.one_hot(x, 2, on_value=v, dtype="uint8"), "add": lambda x, v: x + v,
    "pad": lambda x, v: rg.pad(x, 1, constant_value=v), "at_set": lambda x, v: rg.at_set(x, 0, v),
}  # fmt: skip


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("library", ["jax.numpy", "torch"])
def test_fills_refuse_what_does_not_fit_in_every_library(library: str, name: str) -> None:
    xp = pytest.importorskip(library)
    x = rg.asarray(xp.asarray(np.zeros(2, "uint8")))
    for value in (256, -1):
        words = f"{value} does not fit the dtype uint8"
        refused(lambda value=value: FILLS[name](x, value), NumberRangeError, words)
    assert rg.full_like(x, 255).tolist() == [255, 255]


def test_integers_beside_each_other_in_a_list_stay_exact() -> None:
    for values in ([2**63, 1], [2**63 + 1, 0], [2**64 - 1, 5]):  # floats, as NumPy reads them
        assert rg.tensor(values, dtype="uint64").tolist() == values
        assert rg.asarray(values).tolist() == values
    assert rg.tensor([np.int64(3), True, 2], dtype="int8").tolist() == [3, 1, 2]


def fed() -> Any:
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.int32, [1])
        return session.run(x, {x: [2**31]})


NO_NUMBERS = [
    (lambda: rg.asarray([2**63, -1]), NumberRangeError, "-1 does not fit the dtype uint64"),
    (lambda: rg.tensor([np.int64(300)], dtype="uint8"), NumberRangeError, "300 does not fit"),
    (lambda: rg.scalar(10**400), NumberRangeError, "too large"),
    (lambda: rg.take(rg.asarray([1, 2]), [2**53 + 1]), IndexError, str(2**53 + 1)),
    (lambda: rg.full((2,), rg.ones(3)), ValueError, "broadcast"),
    (fed, NumberRangeError, "2147483648 does not fit the dtype int32"),
    (lambda: half_det(), DTypeError, r"half precision.*Cast"),
    *[(lambda f=f, d=d: f(d), DTypeError, "numbers or bools")
      for d in (object, np.longdouble, "S3", "M8[s]", [("a", "f4")])
      for f in (lambda d: rg.zeros(2, dtype=d), lambda d: rg.tensor([1.0], dtype=d),
                lambda d: rg.astype(rg.ones(2), d))],
]  # fmt: skip
test_what_does_not_fit_is_refused = refusals(NO_NUMBERS)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_arrays_are_cast_as_numpy_casts_them() -> None:
    x = np.array([300, -1, 2**31])
    for dtype in ("uint8", "int32", "float16"):
        np.testing.assert_array_equal(rg.tensor(x, dtype=dtype).numpy(), x.astype(dtype))


def test_indices_and_given_gradients_are_exact() -> None:
    assert rg.one_hot([2**53 + 1], 1).tolist() == [[0.0]]
    assert rg.searchsorted(np.array([2**53, 2**53 + 2]), 2**53 + 1).item() == 1
    x, f = np.ones(1), lambda x: x * 1.0
    assert rg.grad(f)(x, [0.1]).tolist() == rg.vjp(f, x)[1]([0.1])[0].tolist() == [0.1]
    assert rg.jvp(f, [x], [[0.1]])[1].tolist() == [0.1]


def test_full_spreads_a_tensor_and_has_its_gradient() -> None:
    y, back = rg.vjp(lambda t: rg.full((2, 3), t), rg.scalar(4.0))
    assert y.tolist() == [[4.0] * 3] * 2
    assert back(rg.ones((2, 3)))[0].item() == 6.0
    assert rg.full(2, np.array([1, 2], "int8"), dtype="int32").tolist() == [1, 2]


# -- half precision ------------------------------------------------------------------------------

HALVES = ["numpy float16", "torch float16", "jax float16", "jax bfloat16"]
EVERY = [
    r for r in all_samples() if all(a.dtype.kind != "c" for a in r.inputs) and r.family != "losses"
]  # (which close over weights of their own)
FLAT = [r for r in EVERY if r.family in ("activation", "elementwise")]


def outputs(y: Any) -> list[rg.Tensor]:
    return list(y) if isinstance(y, tuple | list) else [y]


def half(kind: str, array: np.ndarray) -> rg.Tensor:
    library, dtype = kind.split()
    if array.dtype.kind == "f":
        array = array.astype(optional("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    return rg.asarray(arrays_of(library, array))


def check_halves(row: Sample, kind: str) -> None:
    """Floats come back in the dtype they came in, and so do gradients."""
    xs = [half(kind, a) for a in row.inputs]
    given = {x.dtype for x, a in zip(xs, row.inputs, strict=True) if a.dtype.kind == "f"}
    ys = outputs(row.f(*xs))
    exact = outputs(row.f(*[rg.asarray(a) for a in row.inputs]))
    for y, z in zip(ys, exact, strict=True):
        if z.dtype == np.float64 and given:
            assert {y.dtype} == given
    places = [i for i, a in enumerate(row.inputs) if a.dtype.kind == "f"]
    if not row.order or not places:
        return

    def loss(*floats: rg.Tensor) -> Any:
        full = dict(enumerate(xs)) | dict(zip(places, floats, strict=True))
        found = [y for y in outputs(row.f(*full.values())) if y.dtype.kind in "fV"]
        return sum((rg.sum(rg.astype(y, rg.float32)) for y in found), rg.scalar(0.0))

    dxs = rg.grads(loss, unconnected="zero")([xs[i] for i in places])
    assert {dx.dtype for dx in dxs} == given


@pytest.mark.filterwarnings("ignore")  # halves overflow
@pytest.mark.parametrize("row", [r for r in EVERY if "numpy" in r.backends], ids=str)
def test_half_precision_stays_half_precision(row: Sample) -> None:
    try:
        check_halves(row, "numpy float16")
    except DTypeError as error:
        assert "half precision" in str(error) and "rg.float32" in str(error)
        assert row.family == "linalg"


def half_det() -> Any:
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(np.float16, [2, 2])
        return session.run(rg.linalg.det(rg.asarray(x)), {x: np.eye(2)})


@pytest.mark.parametrize("kind", HALVES[2:])
def test_a_kernel_that_jax_lacks_in_half_precision_is_refused_when_it_is_compiled(kind) -> None:
    x = half(kind, np.eye(2))
    for f in (rg.linalg.cholesky, rg.jit(rg.linalg.cholesky)):
        refused(lambda f=f: f(x), DTypeError, r"cholesky.*[Cc]ast before and after")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", HALVES[1:])
def test_half_precision_in_the_other_libraries(kind: str) -> None:
    rows = {r.covers[0]: r for r in reversed(FLAT) if r.covers}
    for row in rows.values():
        if kind.split()[0] in row.backends:
            check_halves(row, kind)


# -- complex numbers -----------------------------------------------------------------------------

over_libraries = pytest.mark.parametrize("library", ["numpy", "jax", "torch"])

AWARE = {  # of a real x: value and gradient, by NumPy and by hand
    "real": (rg.real, np.real, lambda x: np.ones_like(x)),
    "imag": (rg.imag, np.imag, lambda x: np.zeros_like(x)),
    "imag + x": (lambda x: rg.imag(x) + x, lambda x: x, lambda x: np.ones_like(x)),
    "conj": (rg.conj, np.conj, lambda x: np.ones_like(x)),
    "abs": (rg.abs, np.abs, np.sign),
    "sign": (rg.sign, np.sign, lambda x: np.zeros_like(x)),
    "square of real": (lambda x: rg.real(x) * rg.conj(x), np.square, lambda x: 2 * x),
}


@over_libraries
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", AWARE)
def test_functions_of_complex_numbers_take_real_ones(name: str, dtype: str, library: str) -> None:
    f, value, gradient = AWARE[name]
    x = np.array([-1.5, 0.25, 2.0], dtype)
    given = rg.asarray(arrays_of(library, x))
    dx = rg.grad(f, unconnected="zero")(given)
    for found, expected in ((f(given), value(x)), (dx, gradient(x))):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.numpy(), expected)


COMPLEX = np.array([[0, 1j, -2j], [0, 0, 0], [1, 1 + 1j, 1e-300j], [0, complex(0, np.nan), 2]])
TRUTHS: dict[str, Any] = {  # by regrad and by NumPy
    "any": lambda xp, x: xp.any(x, axis=1), "all": lambda xp, x: xp.all(x, axis=1),
    "any, all axes": lambda xp, x: xp.any(x[:2, :2]), "nonzero": lambda xp, x: xp.nonzero(x)[1],
    "logical_not": lambda xp, x: xp.logical_not(x), "isnan": lambda xp, x: xp.isnan(x),
    "logical_and": lambda xp, x: xp.logical_and(x, x[0]), "astype": lambda xp, x: x.astype(bool),
    "logical_or": lambda xp, x: xp.logical_or(x, x[0]), "isfinite": lambda xp, x: xp.isfinite(x),
    "logical_xor": lambda xp, x: xp.logical_xor(x, x[0]), "equal": lambda xp, x: x == xp.real(x),
    "count_nonzero": lambda xp, x: xp.count_nonzero(x), "where": lambda xp, x: xp.where(x, 1.0, 2),
}  # fmt: skip


@over_libraries
@pytest.mark.parametrize("name", TRUTHS)
def test_the_truth_of_a_complex_number_is_that_of_both_parts(name: str, library: str) -> None:
    found = TRUTHS[name](rg, rg.asarray(arrays_of(library, COMPLEX))).numpy()
    np.testing.assert_array_equal(found, TRUTHS[name](np, COMPLEX))


def test_a_constant_of_complex_numbers_has_no_gradient_in_a_graph() -> None:
    with tf.Graph().as_default():
        z = tf.placeholder(tf.complex128, [2])
        y = tf.real(z * tf.stop_gradient(z * 2.0))
        dz = tf.gradients(y, z)[0]
        with tf.Session() as session:
            found = session.run(dz, {z: [1 + 2j, 3j]})
    np.testing.assert_allclose(found, np.conj([2 + 4j, 6j]))


# -- arrays that no Tensor can hold ----------------------------------------------------------------

REFUSED = {
    "masked": (lambda: np.ma.array([1.0, 2.0], mask=[0, 1]), r"has no mask.*x\.filled"),
    "masked integers": (lambda: np.ma.array([0, 1], mask=[0, 1]), r"has no mask.*x\.filled"),
    "object": (lambda: np.array([1, 2], object), r"dtype object.*np\.asarray\(x, dtype"),
    "fields": (lambda: np.zeros(2, [("a", "f4"), ("b", "i4")]), r"one of its fields, x\['a'\]"),
    "void": (lambda: np.zeros(2, "V4"), "numbers or bools"),
    "long double": (lambda: np.ones(2, np.longdouble), r"x\.astype\(np\.float64\)"),
    "long complex": (lambda: np.ones(2, np.clongdouble), r"x\.astype\(np\.complex128\)"),
    "a date": (lambda: np.array(["2020-01-01"], "M8[D]"), "dtype datetime64"),
    "text": (lambda: np.array(["a"]), "numbers or bools, got the dtype <U1"),
    "torch bfloat16": (lambda: torch.ones(2, dtype=torch.bfloat16),
                       r"torch\.bfloat16 has no NumPy counterpart.*x\.to\(torch\.float32\)"),
    "torch sparse": (lambda: torch.eye(2).to_sparse(), r"torch\.sparse_coo.*x\.to_dense\(\)"),
}  # fmt: skip
TAKERS = {
    "tensor": rg.tensor, "tensor, dtype": lambda x: rg.tensor(x, dtype="float32"),
    "asarray": rg.asarray, "asarray, shared": lambda x: rg.asarray(x, copy=False),
    "Variable": rg.Variable, "an op": rg.sin, "an operator": lambda x: rg.ones(2) + x,
    "one of several": lambda x: rg.concat([rg.ones(2), x]), "a composition": rg.var,
    "an index": lambda x: rg.ones(2)[x],
    "a compiled function": lambda x: rg.jit(lambda x: x * 2)(x),
}  # fmt: skip


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize("what", REFUSED)
def test_arrays_that_no_tensor_holds_are_refused(what: str, taker: str) -> None:
    make, words = REFUSED[what]
    x = make()
    refused(lambda: TAKERS[taker](x), (DTypeError, ArgumentError), words)


def test_other_byte_orders_and_names_of_dtypes_are_taken() -> None:
    for dtype in (">f4", ">i8", np.longlong, np.ulonglong, np.intc, "?"):
        x = np.ones(2, dtype)
        assert rg.tensor(x).dtype == x.dtype.newbyteorder("=")
        assert rg.tensor(x).tolist() == x.tolist()


BITS = [lambda x: ~x, lambda x: x & 1, lambda x: x | x, lambda x: x ^ x, lambda x: x << 1]


@over_libraries
@pytest.mark.parametrize("f", BITS)
def test_bits_of_floats_are_refused_in_words(f: Any, library: str) -> None:
    x = rg.asarray(arrays_of(library, np.ones(2)))
    refused(lambda: f(x), DTypeError, r"bits of integers and bools.*astype")
    assert (~(x > 0)).tolist() == [False, False]


# -- Python's functions ----------------------------------------------------------------------------


@over_libraries
@pytest.mark.parametrize("kind", [rg.asarray, rg.Variable])
def test_round_and_divmod(kind: Any, library: str) -> None:
    a = np.array([1.25, -2.5, 17.125])
    x: Any = kind(arrays_of(library, a))
    assert round(x).tolist() == np.round(a).tolist()
    for digits in (1, 2, -1):
        np.testing.assert_allclose(round(x, digits).numpy(), np.round(a, digits))
    for found, due in ((divmod(x, 2), divmod(a, 2)), (divmod(7.5, x), divmod(7.5, a))):
        for part, expected in zip(found, due, strict=True):
            np.testing.assert_allclose(part.numpy(), expected)


# -- sizes that only a run has ---------------------------------------------------------------------

X, Y = dims.SizeSource(-1), dims.SizeSource(-2)
N, M = dims.size_of(X, 0), dims.size_of(Y, 1)
RUN = {-1: np.zeros((5, 2)), -2: np.zeros((3, 4))}


def value(size):
    return dims.resolved(size, lambda source: RUN[source.id])


SIZES = [
    (N + 1, 6), (1 + N, 6), (N - 2, 3), (9 - N, 4), (N * M, 20), (2 * N, 10), (N // 2, 2),
    (11 // N, 2), (N % 3, 2), (-N, -5), ((N + 2) * (M - 1) // 7, 3), (dims.at_least(N, 9), 9),
]  # fmt: skip
EQUAL = [
    (N, dims.size_of(X, 0)), (N * 1, N), (N + 0, N), (N // 1, N), (N + 2 - 2, N),
    (N + 1 + 1, N + 2), (N - 1 - 1, N - 2), (N * M, N * M), (0 * N, 0),
]  # fmt: skip


@pytest.mark.parametrize(("size", "expected"), SIZES)
def test_the_run_computes(size, expected):
    assert value(size) == expected


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_sizes_are_recognised(one, other):
    assert one == other
    assert dims.same((one,), (other,))


def test_what_only_the_run_can_tell_is_asked_in_vain():
    for ask in (lambda: N == M, lambda: N == 3, lambda: N < 3, lambda: bool(N), lambda: range(N)):
        refused(ask, UnknownShapeError)
    assert dims.same((N, 3), (M, 3)) is None
    assert dims.same((N, 3), (N, 4)) is False
    assert dims.differ(3, 4) and not dims.differ(N, 4)


def test_deep_and_entangled_arithmetic_is_cheap():
    long, wide = N, N
    for _ in range(2000):
        long = long * 2 - long
    for _ in range(60):
        wide = wide + wide * 0 + wide // wide - 1 + 0
    assert value(long) == 5
    assert len(dims.sources([(long, wide)])) == 1
    assert len({long, wide}) == 2  # (where parts are computed twice this takes for ever)


def test_parts_of_an_axis_are_told_apart_inside_a_branch():
    with tf.Graph().as_default(), tf.Session() as session:
        x, p = tf.placeholder(tf.float32, [None]), tf.placeholder(tf.bool, [])
        n = tf.shape(x)[0]
        y = tf.cond(p, lambda: tf.reduce_sum(x[1:n] * x[: n - 1]), lambda: tf.reduce_sum(x[2:]))
        (dx,) = tf.gradients(y, x)
        feed = {x: [1.0, 2.0, 3.0, 4.0]}
        assert session.run(dx, {p: True, **feed}).tolist() == [2.0, 4.0, 6.0, 3.0]
        assert session.run(dx, {p: False, **feed}).tolist() == [0.0, 0.0, 1.0, 1.0]
