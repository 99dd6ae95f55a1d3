"""A determinant by expansion by minors, with n! products, as the eval prescribes."""

from __future__ import annotations

import math
from typing import Any

import regrad as rg

from .protocol import function, tensor

LARGEST = 7  # the largest matrix for which all minors are computed at once


def minors(rows: rg.Tensor) -> rg.Tensor:
    """Return the rows without each of the columns in turn, along a new third axis.

    The axes are row, column, and further axes that number the matrices.
    """
    columns = rows.shape[1]
    return rg.stack(
        [rg.concat([rows[:, :j], rows[:, j + 1 :]], axis=1) for j in range(columns)], axis=2
    )


def alternating(row: rg.Tensor, dets: rg.Tensor) -> rg.Tensor:
    """Return the sum along the first row, with signs + - + …"""
    products = row * dets
    return products[0::2].sum(axis=0) - products[1::2].sum(axis=0)


def determinant(a: rg.Tensor) -> rg.Tensor:
    """Return the determinant of one matrix, or of many along further axes."""
    size = len(a)
    if size == 1:
        return a[0, 0]
    if size == 2:
        return a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]
    rest = minors(a[1:])
    if size <= LARGEST:
        return alternating(a[0], determinant(rest))
    # The minors are computed one after another, and each keeps only its elements.
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
