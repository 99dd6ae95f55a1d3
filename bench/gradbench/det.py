"""A determinant by expansion by minors: n! products, for the sake of the work."""

from __future__ import annotations

import math
from typing import Any

import regrad as rg

from .protocol import function, tensor

LARGEST = 7  # the largest matrix whose minors are all computed at once


def minors(rows: rg.Tensor) -> rg.Tensor:
    """What remains of the rows without each of the columns, along a new third axis.

    The axes are row, column, and any that tell matrices apart.
    """
    columns = rows.shape[1]
    return rg.stack(
        [rg.concat([rows[:, :j], rows[:, j + 1 :]], axis=1) for j in range(columns)], axis=2
    )


def alternating(row: rg.Tensor, dets: rg.Tensor) -> rg.Tensor:
    """The sum along the first row, with signs + - + …"""
    products = row * dets
    return products[0::2].sum(axis=0) - products[1::2].sum(axis=0)


def determinant(a: rg.Tensor) -> rg.Tensor:
    """Of one matrix, or of many that further axes tell apart."""
    size = len(a)
    if size == 1:
        return a[0, 0]
    if size == 2:
        return a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]
    rest = minors(a[1:])
    if size <= LARGEST:
        return alternating(a[0], determinant(rest))
    # One minor after another, none of which leaves more behind than its elements.
    stacked = rg.moveaxis(rest, 2, 0)
    _, dets = rg.scan(lambda _, minor: (None, determinant(minor)), None, stacked, checkpoint=True)
    return alternating(a[0], dets)


def expansion(a: rg.Tensor) -> rg.Tensor:
    size = math.isqrt(len(a))
    return determinant(a.reshape((size, size)))


def read(given: dict[str, Any]) -> tuple[rg.Tensor]:
    return (tensor(given["A"]),)


primal = function(read, float)(rg.jit(expansion))
gradient = function(read)(rg.jit(rg.grad(expansion)))
