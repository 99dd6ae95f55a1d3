"""Forms of products of matrices and of their decompositions.

The kernels call the functions without a leading underscore to check their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    check_inner(a, b, attrs["transpose_a"], attrs["transpose_b"])
    m, n = a[-1 if attrs["transpose_a"] else -2], b[-2 if attrs["transpose_b"] else -1]
    return (*_batch(a, b), m, n)


def check_inner(a: Sequence[Any], b: Sequence[Any], transpose_a: bool, transpose_b: bool) -> None:
    """Raise unless the number of columns of a is the number of rows of b."""
    left, right = a[-2 if transpose_a else -1], b[-1 if transpose_b else -2]
    if differ(left, right):
        how = f" with transpose_a={transpose_a}, transpose_b={transpose_b}"
        raise ShapeError(
            f"matmul: the inner sizes differ, {left} and {right}: got {a} and {b}"
            + (how if transpose_a or transpose_b else "")
        )


def _batch(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...]:
    """Return the broadcast axes before the last two."""
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


def squares(shape: Any) -> Any:
    """Return a shape of square matrices; raise for any other shape."""
    if len(shape) < 2 or differ(shape[-1], shape[-2]):
        raise ShapeError(f"expected square matrices (over the last two axes), got {shape}")
    return shape


@form("Cholesky", "MatrixInverse")
def _square(arguments: Arguments, attrs: Attrs) -> Shape:
    shape = arguments[0].shape
    return None if shape is None else squares(shape)


form("SelfAdjointEigvalsGrad", "SingularValuesGrad")(lambda arguments, attrs: arguments[-1])
form("MatrixDeterminant")(lambda arguments, attrs: squares(arguments[0].shape)[:-2])


@form("LogMatrixDeterminant")
def _log_determinant(arguments: Arguments, attrs: Attrs) -> list[Spec]:
    shape, dtype = arguments[0]
    batch = squares(shape)[:-2]
    return [Spec(batch, dtype), Spec(batch, real_of(dtype))]


@form("MatrixSolve", "MatrixTriangularSolve")
def _solve(arguments: Arguments, attrs: Attrs) -> Shape:
    a, b = squares(arguments[0].shape), arguments[1].shape
    if not b or differ(a[-1], b[-1 if len(b) == 1 else -2]):
        raise ShapeError(f"expected the same number of rows in a and b, got {a} and {b}")
    if len(b) == 1:
        return a[:-1]
    return (*_batch(a, b), *b[-2:])


@form("SelfAdjointEigV2")
def _eigen(arguments: Arguments, attrs: Attrs) -> list[Spec]:
    shape, dtype = arguments[0]
    return [Spec(squares(shape)[:-1], real_of(dtype)), Spec(shape, dtype)]


form("SelfAdjointEigvals", dtype=real_dtype)(
    lambda arguments, attrs: squares(arguments[0].shape)[:-1]
)


# -- matrices --------------------------------------------------------------------------------------


def matrices(name: str, shape: Any) -> Any:
    """Return a shape of matrices; raise for any other shape."""
    if len(shape) < 2:
        raise ShapeError(f"{name} takes matrices (rank 2 or more), got {shape}")
    return shape


@form("Qr")
def _qr(arguments: Arguments, attrs: Attrs) -> Any:
    shape, dtype = arguments[0]
    *batch, m, n = matrices("qr", shape)
    k = {"reduced": smaller(m, n), "complete": m}[attrs["mode"]]
    return [Spec((*batch, m, k), dtype), Spec((*batch, k, n), dtype)]


@form("Svd")
def _svd(arguments: Arguments, attrs: Attrs) -> list[Spec]:
    shape, dtype = arguments[0]
    *batch, m, n = matrices("svd", shape)
    k = smaller(m, n)
    columns, rows = (m, n) if attrs["full_matrices"] else (k, k)
    u, s, vh = (*batch, m, columns), (*batch, k), (*batch, rows, n)
    return [Spec(u, dtype), Spec(s, real_of(dtype)), Spec(vh, dtype)]


@form("SingularValues", dtype=real_dtype)
def _singular_values(arguments: Arguments, attrs: Attrs) -> Shape:
    *batch, m, n = matrices("svdvals", arguments[0].shape)
    return (*batch, smaller(m, n))


@form("MatrixPseudoInverse")
def _pseudo_inverse(arguments: Arguments, attrs: Attrs) -> Shape:
    *batch, m, n = matrices("pinv", arguments[0].shape)
    return (*batch, n, m)


form("MatrixRank", dtype=INDEX)(
    lambda arguments, attrs: matrices("matrix_rank", arguments[0].shape)[:-2]
)


@form("Tril", "Triu")
def _triangle(arguments: Arguments, attrs: Attrs) -> Shape:
    shape = arguments[0].shape
    return None if shape is None else matrices("a triangle", shape)


@form("MatrixDiagPart")
def _diagonal(arguments: Arguments, attrs: Attrs) -> Shape:
    *batch, m, n = matrices("diagonal", arguments[0].shape)
    return (*batch, _diagonal_size(m, n, attrs["offset"]))


def _diagonal_size(m: Size, n: Size, offset: int) -> Any:
    if not offset:
        return smaller(m, n)
    if type(m) is int and type(n) is int:
        return max(min(m - max(-offset, 0), n - max(offset, 0)), 0)
    return None


@form("MatrixDiag")
def _diag(arguments: Arguments, attrs: Attrs) -> Shape:
    shape = arguments[0].shape
    return shorten((*shape[:-1], *sizes_around(shape, attrs["offset"], attrs["shape"])))


def sizes_around(diagonal: Any, offset: int, sizes: Any) -> tuple[Any, Any]:
    """Return the sizes of a matrix with such a diagonal. Sizes that are passed must fit."""
    if not diagonal:
        raise ShapeError("diag expects vectors (rank 1 or more), got a Tensor of rank 0")
    m, n = (diagonal[-1] + abs(offset),) * 2 if sizes is None else sizes
    length = _diagonal_size(m, n, offset)
    if differ(diagonal[-1], length):
        raise ShapeError(
            f"diag: the diagonal {offset} of a matrix of shape {(m, n)} has {length} elements, got "
            f"{diagonal[-1]}"
        )
    return m, n
