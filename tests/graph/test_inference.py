"""Inferred shapes and dtypes against those of every op call that the samples make."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

import regrad as rg
from regrad.core import dims, dispatch
from regrad.core.dims import Dim, UnknownRank
from regrad.core.registry import OPS
from regrad.errors import (
    ArgumentError,
    DTypeError,
    RegistrationError,
    ShapeError,
    UnknownOpError,
    UnknownShapeError,
)
from regrad.shapes.infer import Spec, infer, probe, shape_of
from regrad.shapes.table import FORMS, form_of
from tests.helpers.sample_runs import gradients, inputs_of, outputs
from tests.samples import all_samples

ROWS = all_samples()
FAMILIES = sorted({row.family for row in ROWS})
F32, F64, I64 = (np.dtype(name) for name in ("float32", "float64", "int64"))
DATA_DECIDES = {"Where", "UniqueValues", "Unique"}


# -- what the samples run --------------------------------------------------------------------------


class Call(NamedTuple):
    """An op call as its kernel saw it."""

    op: Any
    arguments: list[Any]
    attrs: dict[str, Any]
    results: list[Spec]

    def __repr__(self) -> str:
        return f"{self.op.type}({self.arguments}, {self.attrs}) -> {self.results}"


def spec(array: Any) -> Any:
    if isinstance(array, list):
        return [spec(a) for a in array]
    return None if array is None else Spec(tuple(array.shape), array.dtype)


@contextmanager
def watched_kernels() -> Iterator[list[Call]]:
    """All calls of kernels on NumPy data within the block."""
    calls: list[Call] = []

    def watched(op: Any, kernel: Any) -> Any:
        def run(*arrays: Any, **attrs: Any) -> Any:
            y = kernel(*arrays, **attrs)
            results = list(y) if isinstance(y, tuple | list) else [y]
            calls.append(Call(op, [spec(a) for a in arrays], attrs, [spec(r) for r in results]))
            return y

        return run

    with pytest.MonkeyPatch.context() as patch:
        for op in [*OPS.values(), dispatch.ALIAS, dispatch.PROMOTE]:
            patch.setitem(op.kernels, np.ndarray, watched(op, op.kernels[np.ndarray]))
        yield calls


@cache
def calls_of(family: str) -> list[Call]:
    """The calls of a family's samples, and of their gradients, each once."""
    with watched_kernels() as calls:
        for row in ROWS:
            if row.family == family:
                outputs(row.f(*[rg.asarray(a) for a in row.inputs]))
                if row.order:
                    gradients(row, inputs_of(row, "numpy", single=True), 1)
    return list({repr(call): call for call in calls}.values())


def all_calls() -> list[Call]:
    return [call for family in FAMILIES for call in calls_of(family)]


every_family = pytest.mark.parametrize("family", FAMILIES)


# -- comparing -------------------------------------------------------------------------------------


class source(dims.SizeSource):
    """A symbol whose array has this shape."""

    count = 0

    def __init__(self, shape: Sequence[int]) -> None:
        source.count += 1
        super().__init__(source.count)
        self.shape = tuple(shape)


def each(arguments: Any, change: Any) -> Any:
    if isinstance(arguments, Spec):
        return change(arguments)
    return arguments and [each(a, change) for a in arguments]


def unsized(call: Call) -> Any:
    """The arguments with a Dim for every size (but that which says how many results there are)."""

    def change(x: Spec) -> Spec:
        symbol = source(x.shape)
        sizes: list[Any] = [dims.size_of(symbol, i) for i in range(len(x.shape))]
        if call.op.type == "Unpack":
            sizes[call.attrs["axis"]] = x.shape[call.attrs["axis"]]
        return Spec(tuple(sizes), x.dtype)

    return each(call.arguments, change)


def unranked(call: Call) -> Any:
    return each(call.arguments, lambda x: Spec(None, x.dtype))


def check(found: list[Spec], call: Call) -> None:
    """What was found is right, as far as it goes."""
    assert [x.dtype for x in found] == [x.dtype for x in call.results], call
    for x, due in zip(found, call.results, strict=True):
        if x.shape is not None:
            assert len(x.shape) == len(due.shape), (call, x)
            sizes = [in_the_run(n) for n in x.shape]
            known = [(n, m) for n, m in zip(sizes, due.shape, strict=True) if n is not None]
            assert all(n == m for n, m in known), (call, x)


def in_the_run(n: Any) -> Any:
    return dims.resolved(n, lambda symbol: symbol)


# -- forms -----------------------------------------------------------------------------------------


@every_family
def test_known_shapes(family: str) -> None:
    for call in calls_of(family):
        found = infer(call.op, call.arguments, call.attrs)
        check(found, call)
        if call.op.type not in DATA_DECIDES:
            assert found == call.results, call


@every_family
def test_unknown_sizes(family: str) -> None:
    for call in calls_of(family):
        check(infer(call.op, unsized(call), call.attrs), call)


@every_family
def test_unknown_ranks(family: str) -> None:
    for call in calls_of(family):
        if call.op.type == "Unpack":
            with pytest.raises(UnknownShapeError, match="Unpack"):
                infer(call.op, unranked(call), call.attrs)
        else:
            check(infer(call.op, unranked(call), call.attrs), call)


@pytest.mark.slow(but=4)
@every_family
def test_trials_agree(family: str) -> None:
    for call in calls_of(family):
        for arguments in (call.arguments, unsized(call)):
            found = tried(call, arguments)
            if found and call.op.type not in DATA_DECIDES:
                check(found, call)


def tried(call: Call, arguments: Any) -> Any:
    """What a trial tells; None if it tells no shape."""
    try:
        found = probe(call.op, arguments, call.attrs)
    except UnknownShapeError:
        assert call.op.several
        return None
    return None if found[0].shape is None else found


@pytest.mark.slow
def test_trials_tell_most_shapes() -> None:
    calls = all_calls()
    found = [tried(call, call.arguments) for call in calls]
    assert found.count(None) == 0
    found = [tried(call, unsized(call)) for call in calls]
    assert found.count(None) < 0.2 * len(found)


def test_the_samples_reach_every_op_type() -> None:
    reached = {call.op.type for call in all_calls()}
    own = {t for t in rg.op_types() if rg.find_op(t).function.__module__.startswith("regrad.ops")}
    assert own - reached == set()
    assert len([t for t in own if form_of(rg.find_op(t))]) >= 0.95 * len(own)


OTHERS = [np.dtype(t) for t in ("bool", "int8", "uint16", "int64", "float16", "complex64")]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_other_dtypes(dtype: np.dtype) -> None:
    """Each op type, with its floats under another dtype, where its kernel takes that."""
    seen = {call.op.type: call for call in all_calls()}
    checked = 0
    for call in seen.values():
        op = call.op
        due = None if refused(op, dtype) else run_again(call, dtype)
        if due is not None:
            arguments = each(call.arguments, lambda x: Spec(x.shape, other(x.dtype, dtype)))
            found = infer(op, arguments, call.attrs)
            assert [x.dtype for x in found] == due, (op, arguments, call.attrs)
            checked += 1
    assert checked > 50


def refused(op: Any, dtype: np.dtype) -> bool:
    """Whether the dtype never gets to the op's kernel (or is none that it preserves)."""
    if op.type.startswith("Matrix") and dtype.kind != "c":
        return True
    return (op.to_float and dtype.kind in "biu") or (op.real and dtype.kind == "c")


def other(old: np.dtype, dtype: np.dtype) -> np.dtype:
    return dtype if old.kind in "fc" else old


def run_again(call: Call, dtype: np.dtype) -> Any:
    """The dtypes of the results; None if the kernel does not take the dtype."""

    def array(x: Spec) -> np.ndarray:
        kind = other(x.dtype, dtype)
        return (np.zeros if x.dtype.kind in "iu" else np.ones)(x.shape, kind)  # pyright: ignore

    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = call.op.kernels[np.ndarray](*each(call.arguments, array), **call.attrs)
    except (TypeError, ValueError):
        return None
    return [r.dtype for r in (y if isinstance(y, tuple | list) else [y])]


# -- sizes -----------------------------------------------------------------------------------------


def unknown(*names: str) -> list[Dim]:
    """Some sizes, each of a symbol of its own."""
    return [dims.size_of(source((3,)), 0) for _ in names]


N, M, K = unknown("N", "M", "K")


def one(op_type: str, *shapes: Any, dtype: Any = F32, **attrs: Any) -> Any:
    """The inferred shape of an op of tensors of these shapes (a list for a sequence)."""
    specs = [
        [Spec(s, dtype) for s in shape] if isinstance(shape, list) else Spec(shape, dtype)
        for shape in shapes
    ]
    found = infer(rg.find_op(op_type), specs, attrs)
    return found[0].shape if len(found) == 1 else [x.shape for x in found]


@pytest.mark.parametrize(("a", "b", "due"), [
    ((N, 3), (N, 3), (N, 3)), ((N, 1), (M,), (N, M)), ((1, N), (N, 1), (N, N)), ((N,), (4,), (4,)),
    ((N,), (0,), (0,)), ((N,), (M,), (None,)), ((N, 3), (), (N, 3)),
    ((2, N + 1), (1, N + 1), (2, N + 1)), ((N, 3), None, None),
])  # fmt: skip
def test_broadcasting(a: Any, b: Any, due: Any) -> None:
    for first, second in ((a, b), (b, a)):
        found = one("AddV2", first, second)
        assert (found is None) == (due is None)
        assert found is None or keys(found) == keys(due)


def keys(shape: Any) -> list[Any]:
    return [n.key if isinstance(n, Dim) else n for n in shape]


UNRANKED = UnknownRank(source((2, 3)))
WINDOW = {"filter_size": (2, 2), "strides": (1, 2), "pad": "same"}


@pytest.mark.parametrize(("due", "op_type", "shapes", "attrs"), [
    ((N, 12), "Reshape", [(N, 3, 4)], {"shape": (-1, 12)}),
    ((N * M, 5), "Reshape", [(N, M, 5)], {"shape": (-1, 5)}),
    ((N, 20), "Reshape", [(N, 4, 5)], {"shape": (N, -1)}),
    ((N * 4, 5), "Reshape", [(N, 4, 5)], {"shape": (N * 4, -1)}),
    ((N, 6), "Reshape", [(N * 2, 3)], {"shape": (N, -1)}),
    ((M, None), "Reshape", [(N, 4)], {"shape": (M, -1)}),
    ((None, 4), "Reshape", [None], {"shape": (-1, 4)}),
    (None, "Reshape", [(2, 3)], {"shape": UNRANKED}),
    ((3, 4), "BroadcastTo", [(3, 1)], {"shape": (M, 4)}),
    ((M, N), "SumTo", [(2, M, N)], {"shape": (M, N)}),
    (None, "Squeeze", [(N, 1, 3)], {"axis": None}), ((N, 3), "Squeeze", [(N, 1, 3)], {"axis": 1}),
    ((N + M, 3), "ConcatV2", [[(N, K), (M, 3)]], {"axis": 0}),
    ((N, 2, 3), "Pack", [[(N, 3), (M, 3)]], {"axis": 1}),
    ((N + 2, 4), "PadV2", [(N, 3)], {"paddings": ((1, 1), (0, 1)), "constant_value": 0}),
    ((N * 2, 3), "Tile", [(N, 3)], {"repetitions": (2, 1)}),
    ((N,), "Sum", [(N, M)], {"axis": 1, "keepdims": False}),
    ((), "Sum", [None], {"axis": None, "keepdims": False}),
    (None, "Sum", [None], {"axis": 1, "keepdims": False}),
    ((N, 5), "MatMul", [(N, 3), (M, 5)], {"transpose_a": False, "transpose_b": False}),
    ((7, 3, 5), "MatMul", [(N, 2, 3), (7, 5, 2)], {"transpose_a": True, "transpose_b": True}),
    ((N, 8, 4, 1), "MaxPool", [(N, 8, 8, 1)], WINDOW),
    ((2, N, (M + 1) // 2, 1), "MaxPool", [(2, N, M, 1)], WINDOW),
    ((N, K), "MatrixDiag", [(N,)], {"offset": 0, "shape": (N, K)}),
    ((2, M), "Transpose", [(M, 2)], {"axes": (1, 0)}),
    ((None, None), "Transpose", [None], {"axes": (1, 0)}),
    ((M, 2), "StridedSlice", [(N, 4, 9)], {"index": ((0, M, 1), (0, 2, 2), 8)}),
])  # fmt: skip
def test_sizes(due: Any, op_type: str, shapes: Any, attrs: Any) -> None:
    found = one(op_type, *shapes, **attrs)
    assert (found is None) == (due is None)
    assert found is None or keys(found) == keys(due)


def test_shapes_that_the_data_decides() -> None:
    assert one("Where", (N, 3)) == (None, 2)
    assert one("Where", None) == (None, None)
    assert one("UniqueValues", (4, 3)) == (None,)


def test_sizes_do_not_grow_without_end() -> None:
    shape: Any = (N,)
    for _ in range(50):
        shape = one("ConcatV2", [shape, shape], axis=0)
        if shape == (None,):
            shape = tuple(unknown("a fresh one"))
    assert len(repr(shape[0].key)) < 1000


# -- mistakes --------------------------------------------------------------------------------------

SAME = {"strides": (1, 1), "pad": "same", "dilations": (1, 1)}
VALID = {**SAME, "pad": "valid"}
PLAIN = {"transpose_a": False, "transpose_b": False}
OVER = {"axis": None, "keepdims": False}


@pytest.mark.parametrize(("op_type", "shapes", "attrs", "error", "says"), [
    ("AddV2", [(2, 3), (4, 3)], {}, ShapeError, "AddV2: .* float32 \\(2, 3\\) and float32"),
    ("AddV2", [(N, 3), (4,)], {}, ShapeError, "AddV2: .* float32 \\(\\?, 3\\) and float32"),
    ("AddN", [[(2,), (N,), (3,)]], {}, ShapeError, "one shape"),
    ("MatMul", [(2, 3), (4, 5)], PLAIN, ShapeError, "inner sizes differ, 3 and 4"),
    ("MatMul", [(N, 3), (4, M)], PLAIN, ShapeError, "inner sizes differ, 3 and 4"),
    ("MatMul", [(2, 3, 4), (5, 4, 3)], PLAIN, ShapeError, "MatMul: operands could not be"),
    ("Einsum", [(2, 3), (4, 5)], {"equation": "ab,bc->ac"}, ShapeError, "'b'"),
    ("Reshape", [(2, 3)], {"shape": (4, 2)}, ShapeError, "cannot have the shape"),
    ("Reshape", [(2, 3)], {"shape": (4, -1)}, ShapeError, "cannot have the shape"),
    ("Reshape", [(N, 3)], {"shape": (N, 4)}, ShapeError, "cannot have the shape"),
    ("Transpose", [(N, 3)], {"axes": (0, 0)}, ShapeError, "each axis"),
    ("Squeeze", [(N, 3)], {"axis": 1}, ShapeError, "size 1"),
    ("BroadcastTo", [(2, N)], {"shape": (3, 4)}, ShapeError, "broadcast_to"),
    ("ConcatV2", [[(2, 3), (2, 4)]], {"axis": 0}, ShapeError, "except along axis 0"),
    ("ConcatV2", [[(2, N), (3, M)]], {"axis": 1}, ShapeError, "except along axis 1"),
    ("Split", [(N, 3)], {"axis": 1, "sizes": (1, 1)}, ShapeError, "do not add up"),
    ("Pack", [[(2,), (3,)]], {"axis": 0}, ShapeError, "one shape"),
    ("Sum", [(N, 3)], {"axis": 2, "keepdims": False}, ShapeError, "axis 2 is out of range"),
    ("Softmax", [(N, 3)], {"axis": 2}, ShapeError, "axis 2 is out of range"),
    ("Sum", [(N, 3)], {"axis": (0, 0), "keepdims": False}, ArgumentError, "twice"),
    ("Max", [(0, 3)], OVER, ShapeError, "max: undefined for no elements"),
    ("ArgMin", [(0, 3)], OVER, ShapeError, "argmin: undefined for no elements"),
    ("TopKV2", [(N, 3)], {"k": 4, "axis": 1}, ShapeError, "got 4"),
    ("Conv2D", [(N, 8, 8, 3), (3, 3, 4, 5)], SAME, ShapeError, "3 channels"),
    ("Conv2D", [(N, 8, 2, 3), (3, 3, 3, 5)], VALID, ShapeError, "does not fit"),
    ("MaxPool", [(N, 1, 8, 3)], {**WINDOW, "pad": "valid"}, ShapeError, "does not fit"),
    ("Cholesky", [(N, 2, 3)], {}, ShapeError, "square"),
    ("MatrixSolve", [(3, 3), (4, 1)], {"transpose": False}, ShapeError, "same number of rows"),
    ("SpaceToBatchND", [(N, 3, 4)], {"block_shape": (2,), "paddings": ((0, 0),)}, ShapeError,
     "does not divide"),
    ("BatchToSpaceND", [(3, 3, N)], {"block_shape": (2,), "crops": ((0, 0),)}, ShapeError,
     "multiple"),
])  # fmt: skip
def test_mistakes_are_found(op_type: str, shapes: Any, attrs: Any, error: Any, says: Any) -> None:
    with pytest.raises(error, match=says) as caught:
        one(op_type, *shapes, **attrs)
    told = [str(caught.value), *getattr(caught.value, "__notes__", [])]
    assert any(op_type in text and "float32 (" in text for text in told)


def test_a_dtype_that_the_op_does_not_take() -> None:
    mask = Spec((5, 1), np.dtype(bool))
    with pytest.raises(DTypeError, match="got bools"):
        infer(rg.find_op("GatherNd"), [Spec((2, 3), F32), mask], {})
    with pytest.raises(TypeError, match="subtract"):
        one("Sub", (2,), (2,), dtype=np.dtype(bool))


# -- op types of users -----------------------------------------------------------------------------


@pytest.fixture
def define() -> Iterator[Any]:
    """Makes op types that are gone after the test."""
    before = set(OPS)

    def new(kernel: Any, **options: Any) -> str:
        name = f"Tried{len(OPS)}"
        rg.op(name, **options)(kernel)
        return name

    yield new
    for name in set(OPS) - before:
        OPS.pop(name)
        FORMS.pop(name, None)


def pairs(xp, x: rg.Tensor, y: rg.Tensor, /, *, n: int) -> rg.Tensor:
    return xp.concat([x[..., None] * y] * n, axis=0)


def squeezed(xp, x: rg.Tensor, /) -> rg.Tensor:
    return xp.squeeze(x, axis=tuple(i for i, n in enumerate(x.shape) if n == 1))


def first_three(xp, x: rg.Tensor, /) -> rg.Tensor:
    return x[:3]


def halves(xp, x: rg.Tensor, y: rg.Tensor, /) -> rg.Tensor:
    return xp.stack([x, y])


def inverse(xp, x: rg.Tensor, /) -> rg.Tensor:
    return xp.linalg.inv(x)


def negative(xp, x: rg.Tensor, /) -> rg.Tensor:
    if xp.any(x > 0):
        raise ValueError("negative numbers are due")
    return x


def vectors(xp, x: rg.Tensor, /) -> rg.Tensor:
    if x.ndim != 1:
        raise ShapeError(f"a vector is due, got {x.shape}")
    return x


def risky(xp, x: rg.Tensor, /) -> rg.Tensor:
    warnings.warn("risky", stacklevel=1)
    return 1 / (x - 1)


def rows(xp, x: rg.Tensor, /) -> tuple[rg.Tensor, ...]:
    return tuple(x)


def identity(xp, x: rg.Tensor, /) -> rg.Tensor:
    return x


@pytest.mark.parametrize(("kernel", "shapes", "attrs", "due"), [
    (pairs, [(2, 1), (3,)], {"n": 2}, (4, 1, 3)), (pairs, [(4, N), (M,)], {"n": 1}, (4, N, M)),
    (pairs, [(4, N), (M,)], {"n": K}, (None, N, M)), (pairs, [None, (3,)], {"n": 1}, None),
    (pairs, [(1, N + 1), (3,)], {"n": 1}, (1, N + 1, 3)),
    (squeezed, [(N, 3)], {}, None),  # (an unknown size may be 1)
    (first_three, [(N, 3)], {}, (None, 3)), (inverse, [(N, 3, 3)], {}, (N, 3, 3)),
    (halves, [(N,), (M,)], {}, (None, None)),  # (sizes that must be equal leave the rank)
    (negative, [(3, 3)], {}, None), (vectors, [(3,)], {}, (3,)), (vectors, [None], {}, None),
    (vectors, [(2, N)], {}, None), (risky, [(2,)], {}, (2,)),
])  # fmt: skip
def test_a_kernel_is_tried(define: Any, kernel: Any, shapes: Any, attrs: Any, due: Any) -> None:
    found = one(define(kernel), *shapes, **attrs)
    assert (found is None) == (due is None)
    assert found is None or keys(found) == keys(due)


def test_several_results(define: Any) -> None:
    def both(xp, x: rg.Tensor, /) -> tuple[rg.Tensor, rg.Tensor]:
        return x, xp.argmax(x, axis=-1)

    op = rg.find_op(define(both))
    assert infer(op, [Spec((N, 3), F32)], {}) == [Spec((N, 3), F32), Spec((N,), I64)]
    assert infer(op, [Spec(None, F32)], {}) == [Spec(None, F32), Spec(None, I64)]


def test_large_arrays_are_tried_on_small_ones(define: Any) -> None:
    tried = []

    def product(xp, x: rg.Tensor, y: rg.Tensor, /) -> rg.Tensor:
        tried.append(x.size)
        return x[:, :, None] * y[:, None]

    assert one(define(product), (1000, 3, 2000), (3, 2000)) == (1000, 3, 1, 2000)
    assert max(tried) < 1000


def test_what_a_trial_cannot_show_is_refused(define: Any) -> None:
    def two(xp, x: rg.Tensor, /) -> tuple[rg.Tensor, rg.Tensor]:
        return negative(xp, x), x

    op, op_type = rg.find_op(define(two)), define(rows)
    assert one(op_type, (2, N)) == [(N,), (N,)]
    with pytest.raises(UnknownShapeError, match="shape_of"):
        infer(op, [Spec((3, 3), F32)], {})
    with pytest.raises(UnknownShapeError, match="number of results"):
        one(op_type, (N, 2))
    with pytest.raises(ShapeError, match="a vector is due"):
        one(define(vectors), (2, 3))


def test_shape_of(define: Any) -> None:
    def kernel(xp, x: rg.Tensor, /, *, n: int) -> rg.Tensor:
        raise AssertionError("it is not to be tried")

    op_type = define(kernel)

    @shape_of(op_type, dtype="int64")
    def repeated(arguments: Any, attrs: Any) -> Any:
        return tuple(attrs["n"] * size for size in arguments[0].shape)

    assert infer(rg.find_op(op_type), [Spec((2, 3), F32)], {"n": 2}) == [Spec((4, 6), I64)]
    assert infer(rg.find_op(op_type), [Spec(None, F32)], {"n": 2}) == [Spec(None, I64)]
    with pytest.raises(RegistrationError, match="overwrite=True"):
        shape_of(op_type)(repeated)
    shape_of(op_type, overwrite=True)(lambda arguments, attrs: arguments[0])
    assert one(op_type, (2, N), n=2) == (2, N)
    with pytest.raises(UnknownOpError):
        shape_of("NoSuchOp")


def test_a_function_that_asks_what_it_cannot_know_or_answers_wrongly(define: Any) -> None:
    op_type, wrong = define(identity), define(identity)
    shape_of(op_type)(lambda arguments, attrs: (max(arguments[0].shape[0], 3),))
    assert one(op_type, (N,)) == (N,)
    shape_of(wrong)(lambda arguments, attrs: [2, 3])
    with pytest.raises(ArgumentError, match="a tuple of sizes"):
        one(wrong, (2, 3))


def test_a_shape_function_of_other_parameters_is_refused():
    with pytest.raises(RegistrationError, match=r"expected a function of \(arguments, attrs\)"):
        shape_of("Sin")(lambda x: x)
