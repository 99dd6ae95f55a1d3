"""Forms of products of matrices and of their decompositions."""

from __future__ import annotations

from typing import Any

from regrad.errors import ShapeError
from regrad.shapes.sizes import Shape, Size, broadcast, differ, pairs, shorten, smaller
from regrad.shapes.table import INDEX, Arguments, Attrs, Spec, form, real_dtype, real_of

# -- products --------------------------------------------------------------------------------------


@form("MatMul")
def _product(arguments: Arguments, attrs: Attrs) -> Any:
    a, b = arguments[0].shape, arguments[1].shape
    if len(a) < 2 or len(b) < 2:
        return NotImplemented
    m, inner = (a[-1], a[-2]) if attrs["transpose_a"] else a[-2:]
    rows, n = (b[-1], b[-2]) if attrs["transpose_b"] else b[-2:]
    if differ(inner, rows):
        raise ShapeError(f"matmul: the inner sizes differ, {inner} and {rows}: got {a} and {b}")
    return (*_batch(a, b), m, n)


def _batch(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...]:
    """The common axes before those of matrices."""
    return broadcast(a[:-2], b[:-2]) or ()


@form("Einsum")
def _einsum(arguments: Arguments, attrs: Attrs) -> Shape:
    inputs, output = attrs["equation"].split("->")
    sizes: dict[str, Size] = {}
    shapes = [x.shape for x in arguments if x is not None]
    for term, shape in pairs(inputs.split(","), shapes):
        for axis, n in pairs(term, shape):
            if differ(sizes.get(axis), n):
                raise ShapeError(
                    f"einsum: the axis {axis!r} of {attrs['equation']!r} has the sizes "
                    f"{sizes[axis]} and {n}"
                )
            if type(sizes.get(axis)) is not int:
                sizes[axis] = n
    return tuple([sizes[axis] for axis in output])


# -- square matrices -------------------------------------------------------------------------------


def _squares(shape: Any) -> Any:
    if len(shape) < 2 or differ(shape[-1], shape[-2]):
        raise ShapeError(f"expected square matrices (over the last two axes), got {shape}")
    return shape


@form("Cholesky", "MatrixInverse")
def _square(arguments: Arguments, attrs: Attrs) -> Shape:
    shape = arguments[0].shape
    return None if shape is None else _squares(shape)


form("SelfAdjointEigvalsGrad", "SingularValuesGrad")(lambda arguments, attrs: arguments[-1])
form("MatrixDeterminant")(lambda arguments, attrs: _squares(arguments[0].shape)[:-2])


@form("LogMatrixDeterminant")
def _log_determinant(arguments: Arguments, attrs: Attrs) -> list[Spec]:
    shape, dtype = arguments[0]
    batch = _squares(shape)[:-2]
    return [Spec(batch, dtype), Spec(batch, real_of(dtype))]


@form("MatrixSolve", "MatrixTriangularSolve")
def _solve(arguments: Arguments, attrs: Attrs) -> Shape:
    a, b = _squares(arguments[0].shape), arguments[1].shape
    if not b or differ(a[-1], b[-1 if len(b) == 1 else -2]):
        raise ShapeError(f"expected as many rows on the right as on the left, got {a} and {b}")
    if len(b) == 1:
        return a[:-1]
    return (*_batch(a, b), *b[-2:])


@form("SelfAdjointEigV2")
def _eigen(arguments: Arguments, attrs: Attrs) -> list[Spec]:
    shape, dtype = arguments[0]
    return [Spec(_squares(shape)[:-1], real_of(dtype)), Spec(shape, dtype)]


form("SelfAdjointEigvals", dtype=real_dtype)(
    lambda arguments, attrs: _squares(arguments[0].shape)[:-1]
)


# -- matrices --------------------------------------------------------------------------------------


def _matrices(name: str, shape: Any) -> Any:
    if len(shape) < 2:
        raise ShapeError(f"{name} takes matrices (rank 2 or more), got {shape}")
    return shape


@form("Qr")
def _qr(arguments: Arguments, attrs: Attrs) -> Any:
    shape, dtype = arguments[0]
    *batch, m, n = _matrices("qr", shape)
    k = {"reduced": smaller(m, n), "complete": m}[attrs["mode"]]
    return [Spec((*batch, m, k), dtype), Spec((*batch, k, n), dtype)]


@form("Svd")
def _svd(arguments: Arguments, attrs: Attrs) -> list[Spec]:
    shape, dtype = arguments[0]
    *batch, m, n = _matrices("svd", shape)
    k = smaller(m, n)
    columns, rows = (m, n) if attrs["full_matrices"] else (k, k)
    u, s, vh = (*batch, m, columns), (*batch, k), (*batch, rows, n)
    return [Spec(u, dtype), Spec(s, real_of(dtype)), Spec(vh, dtype)]


@form("SingularValues", dtype=real_dtype)
def _singular_values(arguments: Arguments, attrs: Attrs) -> Shape:
    *batch, m, n = _matrices("svdvals", arguments[0].shape)
    return (*batch, smaller(m, n))


@form("MatrixPseudoInverse")
def _pseudo_inverse(arguments: Arguments, attrs: Attrs) -> Shape:
    *batch, m, n = _matrices("pinv", arguments[0].shape)
    return (*batch, n, m)


form("MatrixRank", dtype=INDEX)(
    lambda arguments, attrs: _matrices("matrix_rank", arguments[0].shape)[:-2]
)


@form("Tril", "Triu")
def _triangle(arguments: Arguments, attrs: Attrs) -> Shape:
    shape = arguments[0].shape
    return None if shape is None else _matrices("a triangle", shape)


@form("MatrixDiagPart")
def _diagonal(arguments: Arguments, attrs: Attrs) -> Shape:
    *batch, m, n = _matrices("diagonal", arguments[0].shape)
    return (*batch, _diagonal_size(m, n, attrs["offset"]))


def _diagonal_size(m: Size, n: Size, offset: int) -> Any:
    if not offset:
        return smaller(m, n)
    if type(m) is int and type(n) is int:
        return max(min(m - max(-offset, 0), n - max(offset, 0)), 0)
    return None


@form("MatrixDiag")
def _diag(arguments: Arguments, attrs: Attrs) -> Shape:
    shape, offset, sizes = arguments[0].shape, attrs["offset"], attrs["shape"]
    if not shape:
        raise ShapeError("diag takes vectors (rank 1 or more), got a Tensor of rank 0")
    m, n = (shape[-1] + abs(offset),) * 2 if sizes is None else sizes
    if differ(shape[-1], _diagonal_size(m, n, offset)):
        raise ShapeError(
            f"diag: the diagonal {offset} of a matrix of shape {(m, n)} does not have {shape[-1]} "
            "elements"
        )
    return shorten((*shape[:-1], m, n))
