"""Products of matrices and tensors: `matmul`, `einsum`, and products composed of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from regrad.core import dispatch
from regrad.core.op import TensorLike, op
from regrad.core.registry import gradient
from regrad.core.shapes import normalized_axis
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError, kind
from regrad.graph.deferred import deferrable
from regrad.ops.array import broadcast_to, diag, expand_dims, moveaxis, permute_dims, reshape
from regrad.ops.binary import multiply
from regrad.ops.casting import astype, conj
from regrad.ops.reduction import sum as sum_
from regrad.shapes.matrices import check_inner

# -- matmul ------------------------------------------------------------------------------------


@op("MatMul", broadcasts=True)
def _matmul(
    xp, a: TensorLike, b: TensorLike, /, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    """Return the product of matrices (rank 2 or more); see the public `matmul`."""
    a = xp.matrix_transpose(a) if transpose_a else a
    b = xp.matrix_transpose(b) if transpose_b else b
    return xp.matmul(a, b)


@gradient("MatMul", "a")
def _(dy, a_shape, b, transpose_a, transpose_b):
    if len(a_shape) == 2 < dy.ndim and not transpose_b:
        dy, b = _side_by_side(dy), _side_by_side(b)
    if transpose_a:
        return _matmul(b, dy, transpose_b, True)
    return _matmul(dy, b, False, not transpose_b)


@gradient("MatMul", "b")
def _(dy, a, b_shape, transpose_a, transpose_b):
    if len(b_shape) == 2 < dy.ndim and not transpose_a:
        dy, a = _as_stack(dy), _as_stack(a)
    if transpose_b:
        return _matmul(dy, a, True, transpose_a)
    return _matmul(a, dy, not transpose_a, False)


# Where one matrix multiplied a whole batch, its gradient is one large product. (A product for each
# batch entry, summed afterwards, would need a copy of the matrix for each entry.)


def _as_stack(x: Tensor) -> Tensor:
    """Stack a batch of matrices vertically into one matrix."""
    return reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _side_by_side(x: Tensor) -> Tensor:
    """Join a batch of matrices horizontally into one matrix."""
    *batch, rows, columns = x.shape
    moved = permute_dims(x, (x.ndim - 2, *range(x.ndim - 2), x.ndim - 1))
    return reshape(moved, (rows, math.prod(batch) * columns))


@deferrable
def matmul(
    a: TensorLike, b: TensorLike, /, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    """Return the matrix product over the last two axes. Earlier axes broadcast.

    A vector on the left is a row and a vector on the right is a column. The result lacks the axis
    of the vector.

    Args:
        transpose_a: Whether to swap the last two axes of a first, without a copy.
        transpose_b: Whether to swap the last two axes of b first, without a copy.

    Returns:
        A Tensor of shape `(..., n, k)` for matrices `(..., n, m)` and `(..., m, k)`, with the dtype
        to which they promote.

    Raises:
        ShapeError: the inner sizes differ, or an argument is a number (use multiply).

    Op type: `MatMul`. Source: the Array API standard; `tf.matMul` for the transposes.

    >>> rg.matmul(rg.tensor([[1, 2], [3, 4]]), rg.tensor([1, 10])).print()
    Tensor
        [21, 43]
    """
    a, b = dispatch.lift(a), dispatch.lift(b)
    m, n = a.ndim, b.ndim
    if m > 1 < n:
        check_inner(a.shape, b.shape, transpose_a, transpose_b)
        return _matmul(a, b, transpose_a, transpose_b)
    if not m or not n or (transpose_a and m == 1) or (transpose_b and n == 1):
        raise ShapeError(
            f"matmul expects vectors and matrices, and transposes only matrices; got {a.shape} and "
            f"{b.shape} with transpose_a={transpose_a}, transpose_b={transpose_b}. For a number "
            "use multiply."
        )
    y = matmul(
        expand_dims(a, 0) if m == 1 else a,
        expand_dims(b, 1) if n == 1 else b,
        transpose_a,
        transpose_b,
    )
    *batch, rows, columns = y.shape
    return reshape(y, (*batch, *((rows,) if m > 1 else ()), *((columns,) if n > 1 else ())))


# -- composed products ---------------------------------------------------------------------------


@deferrable
def tensordot(
    a: TensorLike, b: TensorLike, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2
) -> Tensor:
    """Return the sum of products over some axes of a and of b.

    Args:
        axes: An int n, for the last n axes of a and the first n axes of b; or two lists of axes.

    Returns:
        A Tensor with the remaining axes of a followed by the remaining axes of b, of the dtype to
        which a and b promote.

    Raises:
        ShapeError: two axes that are contracted have different sizes.

    A composition of `Transpose`, `Reshape` and `MatMul`. Source: the Array API standard.

    >>> rg.tensordot(rg.ones((2, 3, 4)), rg.ones((4, 3, 5)), axes=([1, 2], [1, 0])).shape
    (2, 5)
    """
    a, b = dispatch.lift(a), dispatch.lift(b)
    summed_a, summed_b = _summed_axes(a, b, axes)
    free_a = [i for i in range(a.ndim) if i not in summed_a]
    free_b = [i for i in range(b.ndim) if i not in summed_b]
    y = matmul(_as_matrix(a, free_a, summed_a), _as_matrix(b, summed_b, free_b))
    return reshape(y, (*(a.shape[i] for i in free_a), *(b.shape[i] for i in free_b)))


def _summed_axes(a: Tensor, b: Tensor, axes: Any) -> tuple[list[int], list[int]]:
    if isinstance(axes, int):
        if not 0 <= axes <= min(a.ndim, b.ndim):
            raise ShapeError(
                f"tensordot: axes={axes} is out of range for the shapes {a.shape} and {b.shape}"
            )
        axes = range(a.ndim - axes, a.ndim), range(axes)
    first = [normalized_axis(i, a.ndim, "axes[0]") for i in axes[0]]
    second = [normalized_axis(i, b.ndim, "axes[1]") for i in axes[1]]
    if [a.shape[i] for i in first] != [b.shape[i] for i in second]:
        raise ShapeError(
            f"tensordot: the axes {first} of {a.shape} and {second} of {b.shape} are contracted "
            "and must have equal sizes"
        )
    if len({*first}) < len(first) or len({*second}) < len(second):
        raise ArgumentError(f"tensordot: axes={axes} names an axis twice")
    return first, second


def _as_matrix(x: Tensor, rows: list[int], columns: list[int]) -> Tensor:
    order = (*rows, *columns)
    moved = x if order == tuple(range(x.ndim)) else permute_dims(x, order)
    sizes = [math.prod(x.shape[i] for i in axes) for axes in (rows, columns)]
    return reshape(moved, tuple(sizes))


@deferrable
def vecdot(a: TensorLike, b: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Return the sum of `conj(a) * b` over an axis. The other axes broadcast.

    Args:
        axis: The axis. If the ranks differ, it must count from the end.

    Returns:
        A Tensor without the axis, with the dtype to which a and b promote.

    Raises:
        ShapeError: the sizes along the axis differ, or the other axes do not broadcast.

    A composition. Source: the Array API standard.

    >>> rg.vecdot([1.0, 2.0], [3.0, 4.0])
    Tensor(11., dtype=float32)
    """
    a, b = dispatch.lift(a), dispatch.lift(b)
    axis = _common_axis("vecdot", a, b, axis)
    products = multiply(conj(a), b)
    return astype(sum_(products, axis=axis), products.dtype)  # integers keep their dtype


def _common_axis(name: str, a: Tensor, b: Tensor, axis: int) -> int:
    """Return the axis counted from the end. Its size must be the same in both tensors."""
    from_end = axis - a.ndim if axis >= 0 and a.ndim == b.ndim else axis
    if not -min(a.ndim, b.ndim) <= from_end < 0 or a.shape[from_end] != b.shape[from_end]:
        raise ShapeError(
            f"{name}: the axis {axis} must have the same size in both tensors (and count from the "
            f"end, if their ranks differ), got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    return from_end


@deferrable
def outer(a: TensorLike, b: TensorLike, /) -> Tensor:
    """Return the matrix of products of the elements of two vectors.

    Returns:
        A Tensor of shape `(a.size, b.size)`, with the dtype to which a and b promote.

    Raises:
        ShapeError: an argument is not a vector.

    A composition. Source: the Array API standard.

    >>> rg.linalg.outer([1.0, 2.0], [3.0, 4.0]).tolist()
    [[3.0, 4.0], [6.0, 8.0]]
    """
    a, b = dispatch.lift(a), dispatch.lift(b)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"outer expects two vectors, got {a.shape} and {b.shape}")
    return multiply(expand_dims(a, 1), b)


@deferrable
def kron(a: TensorLike, b: TensorLike, /) -> Tensor:
    """Return the Kronecker product: blocks of b, each multiplied by an element of a.

    The Tensor of lower rank gets leading axes of size 1.

    Returns:
        A Tensor whose sizes are the products of a's and b's sizes, with the dtype to which they
        promote.

    A composition of `Reshape` and `Mul`. Source: `numpy.kron`.

    >>> rg.linalg.kron([1.0, 2.0], [1.0, 10.0])
    Tensor([ 1., 10.,  2., 20.], dtype=float32)
    """
    a, b = dispatch.lift(a), dispatch.lift(b)
    rank = max(a.ndim, b.ndim)
    rows = (1,) * (rank - a.ndim) + a.shape
    columns = (1,) * (rank - b.ndim) + b.shape
    left = reshape(a, tuple(size for n in rows for size in (n, 1)))
    right = reshape(b, tuple(size for n in columns for size in (1, n)))
    return reshape(multiply(left, right), tuple(m * n for m, n in zip(rows, columns, strict=True)))


@op("Cross", broadcasts=True)
def _cross(xp, a: TensorLike, b: TensorLike, /, *, axis: int) -> Tensor:
    return xp.linalg.cross(a, b, axis=axis)


gradient("Cross", "a")(lambda dy, b, axis: _cross(b, dy, axis=axis))
gradient("Cross", "b")(lambda dy, a, axis: _cross(dy, a, axis=axis))


@deferrable
def cross(a: TensorLike, b: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Return the cross product of vectors of three elements along an axis. Other axes broadcast.

    Returns:
        A Tensor of the shape to which a and b broadcast, with the dtype to which they promote.

    Raises:
        ShapeError: the axis does not have three elements, or the other axes do not broadcast.

    Op type: `Cross`. Source: the Array API standard.

    >>> rg.linalg.cross([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    Tensor([0., 0., 1.], dtype=float32)
    """
    a, b = dispatch.lift(a), dispatch.lift(b)
    axis = _common_axis("cross", a, b, axis)
    if a.shape[axis] != 3:
        raise ShapeError(f"cross expects vectors of 3 elements, got {a.shape} along axis {axis}")
    return _cross(a, b, axis=axis)


# -- einsum --------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
SMALL = 2**17  # up to this size NumPy's own loop is faster than the preparation for BLAS (measured)


@op("Einsum", promotes=True)
def _einsum(xp, a: TensorLike, b: TensorLike | None = None, /, *, equation: str) -> Tensor:
    """Run one step. `equation` names every axis of one or two tensors, and of the output."""
    if b is None:
        return xp.einsum(equation, a)
    if xp is np and a.size * b.size > SMALL:
        return np.einsum(equation, a, b, optimize=["einsum_path", (0, 1)])  # a BLAS product
    return xp.einsum(equation, a, b)


@gradient("Einsum", "a")
def _(dy, a_shape, b, equation):
    inputs, output = equation.split("->")
    target, *other = inputs.split(",")
    return _einsum_gradient([output, *other], [dy] if b is None else [dy, b], target, a_shape)


@gradient("Einsum", "b")
def _(dy, a, b_shape, equation):
    inputs, output = equation.split("->")
    other, target = inputs.split(",")
    return _einsum_gradient([output, other], [dy, a], target, b_shape)


def _einsum_gradient(
    terms: list[str], factors: list[Tensor], target: str, shape: tuple[int, ...]
) -> Tensor:
    """Run an einsum for the axes `target`, which may repeat an axis or contain a new one."""
    sizes = dict(zip(target, shape, strict=True))
    known = [c for c in sizes if c in "".join(terms)]
    dx = _einsum(*factors, equation=f"{','.join(terms)}->{''.join(known)}")
    if len(known) < len(sizes):
        dx = reshape(dx, tuple(n if c in known else 1 for c, n in sizes.items()))
        dx = broadcast_to(dx, tuple(sizes.values()))
    return _onto_diagonals(dx, target) if len(sizes) < len(target) else dx


def _onto_diagonals(x: Tensor, target: str) -> Tensor:
    """Place x on the diagonals of zeros whose axes are `target`, in which letters repeat."""
    repeats = [(c, target[:i].count(c)) for i, c in enumerate(target)]
    axes = [axis for axis in repeats if not axis[1]]
    for c, k in repeats:
        if k:
            i = axes.index((c, 0))
            x = diag(moveaxis(x, i, -1))
            axes = [*axes[:i], *axes[i + 1 :], (c, 0), (c, k)]
    return permute_dims(x, tuple(axes.index(axis) for axis in repeats))


def _steps(
    terms: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], output: str
) -> list[tuple[tuple[int, ...], str]]:
    """Return the order of the products: the tensors to pop off the list, and their equation.

    Each product is appended to the list. With two tensors per step, the gradients of all tensors
    share the intermediate products.
    """
    path: Any = [tuple(range(len(terms)))]
    if len(terms) > 2:
        import opt_einsum

        inputs = ",".join(terms)
        path = opt_einsum.contract_path(f"{inputs}->{output}", *shapes, shapes=True)[0]
    left, steps = list(terms), []
    for picked in path:
        order = tuple(sorted(picked, reverse=True))
        taken = [left.pop(i) for i in order][::-1]
        needed = {*output, *"".join(left)}
        found = dict.fromkeys(c for t in taken for c in t if c in needed)
        left.append("".join(found) if left else output)
        steps.append((order, f"{','.join(taken)}->{left[-1]}"))
    return steps


@deferrable
def einsum(subscripts: str, /, *operands: Any) -> Tensor:
    """Return the sum of products of Tensors in Einstein notation, with axes named by letters.

    `opt_einsum` chooses the order for products of several Tensors.

    Args:
        subscripts: The letters of each operand's axes, then `->` and the letters of the result.
            Without `->`, the result has the letters that occur once, sorted. A letter that repeats
            within an operand is a diagonal. An ellipsis represents axes that broadcast.
        *operands: Tensors or arrays.

    Returns:
        A Tensor with the axes after `->`, of the dtype to which the operands promote.

    Raises:
        ArgumentError: the subscripts are malformed.
        ShapeError: axes of the same letter have different sizes.

    Op type: `Einsum`. Source: `numpy.einsum`.

    >>> rg.einsum("ii->i", rg.tensor([[1, 2], [3, 4]])).print()
    Tensor
        [1, 4]
    """
    if not isinstance(subscripts, str):
        raise ArgumentError(
            f"einsum expects the subscripts first, as a string, got {kind(subscripts)}"
        )
    xs = [dispatch.lift(x) for x in operands]
    shapes, steps = _plan(subscripts, tuple(x.shape for x in xs))
    xs = [x if x.shape == shape else reshape(x, shape) for x, shape in zip(xs, shapes, strict=True)]
    for order, equation in steps:
        factors = [xs.pop(i) for i in order][::-1]
        xs.append(_einsum(*factors, equation=equation))
    return xs[0]


@lru_cache(maxsize=1024)
def _plan(subscripts: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[Any, Any]:
    """Return the operands' shapes without the axes that broadcasting stretches, and the steps."""
    terms, output, broadcast = _parse(subscripts, [len(s) for s in shapes])
    sizes = _sizes(subscripts, terms, broadcast, shapes)
    kept = [
        [(c, n) for c, n in zip(term, shape, strict=True) if n == sizes[c]]
        for term, shape in zip(terms, shapes, strict=True)
    ]
    full = tuple(tuple(n for _, n in axes) for axes in kept)
    return full, _steps(tuple("".join(c for c, _ in axes) for axes in kept), full, output)


def _parse(subscripts: str, ranks: Sequence[int]) -> tuple[tuple[str, ...], str, str]:
    """Return the letters of each operand, of the output, and of the axes of the ellipsis."""
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ranks):
        raise _unreadable(subscripts, f"they name {len(terms)} operands, got {len(ranks)}")
    named = [t.replace("...", "") for t in terms]
    extra = [rank - len(t) for rank, t in zip(ranks, named, strict=True)]
    for t, rank, n in zip(terms, ranks, extra, strict=True):
        if n < 0 or (n and "..." not in t):
            raise _unreadable(subscripts, f"{t!r} does not fit an operand of rank {rank}")
    letters = "".join((*named, output.replace("...", "")))
    if any(c not in LETTERS for c in letters) or any(t.count("...") > 1 for t in terms):
        raise _unreadable(subscripts, "axes are letters, and each operand may have one '...'")
    unused = "".join(c for c in LETTERS if c not in letters)
    broadcast = unused[: max(extra, default=0)]
    full = [
        t.replace("...", broadcast[len(broadcast) - n :]) for t, n in zip(terms, extra, strict=True)
    ]
    once = sorted(c for c in set(letters) if "".join(named).count(c) == 1)
    output = output.replace("...", broadcast) if arrow else broadcast + "".join(once)
    if len(set(output)) < len(output) or not set(output) <= set("".join(full)):
        raise _unreadable(
            subscripts, "each axis of the output must occur once there, and in an operand"
        )
    return tuple(full), output, broadcast


def _unreadable(subscripts: str, reason: str) -> ArgumentError:
    return ArgumentError(f"einsum: cannot read the subscripts {subscripts!r}: {reason}")


def _sizes(
    subscripts: str, terms: Iterable[str], broadcast: str, shapes: Sequence[tuple[int, ...]]
) -> dict[str, int]:
    """Return the size of each axis. Only axes of the ellipsis may be 1 in some operands."""
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for c, n in zip(term, shape, strict=True):
            old = sizes.setdefault(c, n)
            if old == n or (c in broadcast and n == 1):
                continue
            if c not in broadcast or old != 1:
                axis = "an axis of '...'" if c in broadcast else f"the axis {c!r}"
                raise ShapeError(
                    f"einsum {subscripts!r}: {axis} has the sizes {old} and {n}; got the shapes "
                    f"{' and '.join(map(str, shapes))}"
                )
            sizes[c] = n
    return sizes
