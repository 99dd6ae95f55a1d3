"""The steps that the kernels of gathers and scatters share, for each library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regrad.core import backends
from regrad.core.backends import Array, Namespace
from regrad.core.shapes import shifted_shape
from regrad.errors import DTypeError, IndexRangeError

# -- steps shared by the kernels -----------------------------------------------------------------


def _is_jax(xp: Namespace) -> bool:
    return xp.__name__ == "jax.numpy"


def _as_index(xp: Namespace, ids: Array) -> Array:
    """Cast integers of any dtype to the library's index dtype."""
    if ids.dtype == xp.bool:
        raise DTypeError("indices must be integers, got bools. Select by a mask with x[mask].")
    if _is_jax(xp):
        return ids.astype(int)
    return backends.cast(xp, ids, np.intp)


def _in_range(xp: Namespace, ids: Array, n: int) -> Array:
    """Return indices into an axis of size n as non-negative indices."""
    ids = _as_index(xp, ids)
    if _is_jax(xp):
        return xp.clip(xp.where(ids < 0, ids + n, ids), 0, max(n - 1, 0))
    if math.prod(ids.shape) == 0:
        return ids
    low, high = int(ids.min()), int(ids.max())
    if low < -n or high >= n:
        raise IndexRangeError(
            f"the index {low if low < -n else high} is out of range for an axis of size {n}"
        )
    return ids if low >= 0 else xp.where(ids < 0, ids + n, ids)


def _zeros(xp: Namespace, shape: Sequence[int], like: Array) -> Array:
    """Return zeros with the dtype and the device of an array."""
    return xp.zeros(tuple(shape), dtype=like.dtype, **backends.placed_like(like))


def _count_up(xp: Namespace, n: int, like: Array) -> Array:
    """Return `[0, …, n - 1]` on the device of an array."""
    return xp.arange(n, **backends.placed_like(like))


def _at(xp: Namespace, x: Array, index: Array) -> Array:
    """Return `x[index]`. JAX clips indices that are out of range."""
    return x.at[index].get(mode="clip") if _is_jax(xp) else x[index]


def _pick(xp: Namespace, x: Array, ids: Array, axis: int) -> Array:
    """Return elements of x along an axis, by indices of x's rank."""
    if xp is np:
        return np.take_along_axis(x, _as_index(xp, ids), axis)
    ids = _in_range(xp, ids, x.shape[axis])
    if _is_jax(xp):
        return xp.take_along_axis(x, ids, axis, mode="clip")
    return x.gather(axis, ids)


def _sums(xp: Namespace, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    """Return the sums over axes. For NumPy arrays this avoids the overhead of `np.sum`."""
    if xp is not np:
        return xp.sum(x, axis=axes, keepdims=keepdims)
    # (halves are summed in single precision, as in JAX, because 256 + 1 is 256 in bfloat16)
    if x.dtype.itemsize == 2 and backends.is_half(x.dtype):
        return np.add.reduce(x, axes, np.float32, keepdims=keepdims).astype(x.dtype)
    return np.add.reduce(x, axes, keepdims=keepdims)


def _tops(xp: Namespace, x: Array, axes: tuple[int, ...]) -> Array:
    """Return the largest elements along axes, with keepdims, also without NumPy's overhead."""
    if xp is np:
        return np.maximum.reduce(x, axes, keepdims=True)
    return xp.max(x, axis=axes, keepdims=True)


def _put(xp: Namespace, x: Array, index: Array, values: Array) -> Array:
    """Return a copy of x with other values at an index."""
    if _is_jax(xp):
        return x.at[index].set(values)
    y = x.copy() if xp is np else x.clone()
    y[index] = values
    return y


def _add_rows(xp: Namespace, n: int, ids: Array, rows: Array) -> Array:
    """Return n rows of zeros with `rows[k]` added at `ids[k]`. All ids must be in range."""
    y = _zeros(xp, (n, rows.shape[1]), rows)
    if _is_jax(xp):
        return y.at[ids].add(rows)
    if xp is not np:
        return y.index_add_(0, ids, rows)
    width = rows.shape[1]
    if width >= 16 and rows.size >= 1 << 14 and rows.dtype in (np.float32, np.float64):
        return _add_rows_sparse(n, ids, rows)
    if width > 1 and rows.size > 256:  # add.at is fast only for flat arrays
        flat = (ids[:, None] * width + np.arange(width)).ravel()
        np.add.at(y.reshape(-1), flat, rows.ravel())
    else:
        np.add.at(y, ids, rows)
    return y


def _add_rows_sparse(n: int, ids: Array, rows: Array) -> Any:
    """Compute `_add_rows` by a sparse matrix product, several times faster for wide rows."""
    from scipy.sparse import csc_array

    k = len(ids)
    ones = np.ones(k, rows.dtype)
    return csc_array((ones, ids, np.arange(k + 1)), shape=(n, k)) @ rows


def _linear(xp: Namespace, indices: Array, sizes: Sequence[int]) -> Array:
    """Return index vectors into leading axes of these sizes as flat row numbers."""
    ids = _zeros(xp, (math.prod(indices.shape[:-1]),), _as_index(xp, indices))
    for axis, n in enumerate(sizes):
        ids = ids * n + xp.reshape(_in_range(xp, indices[..., axis], n), (-1,))
    return ids


def _permute(xp: Namespace, x: Array, block: int, count: int, to: int) -> Array:
    """Move the `count` axes that start at `block` to position `to`."""
    if block == to or count == 0:
        return x
    return xp.permute_dims(x, shifted_shape(range(x.ndim), block, count, to))
