"""Tests of ops that are rows of a table: a function, its inputs, its results in each library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regrad as rg
from tests.helpers.sample_runs import arrays_of

LIBRARIES = ["numpy", "jax", "torch"]
libraries = pytest.mark.parametrize("library", LIBRARIES)


def on(library: str, x: Any) -> rg.Tensor:
    """Return a Tensor whose data a library holds."""
    return rg.asarray(arrays_of(library, np.asarray(x)))


def slope(f: Callable[..., Any], by: int = 0) -> Callable[..., Any]:
    """Return the gradient of the sum of a function's elements by one of its inputs."""
    return lambda *xs: rg.grads(lambda *xs: rg.sum(f(*xs)), unconnected="zero")(list(xs))[by]


def alike(found: Any, due: Any, rtol: float = 1e-12, atol: float = 0) -> None:
    """Assert that results are these: numbers, dtypes, shapes, or lists of such."""
    if isinstance(found, tuple | list):
        for a, b in zip(found, due, strict=True):
            alike(a, b, rtol, atol)
    elif isinstance(due, str | None):
        assert found == due
    else:
        y = found._values() if isinstance(found, rg.Tensor) else found
        assert np.shape(y) == np.shape(due) or np.ndim(due) == 0, np.shape(y)
        np.testing.assert_allclose(np.asarray(y), due, rtol=rtol, atol=atol)


def outcomes(rows: dict[str, Any], rtol: float = 1e-12, atol: float = 0) -> Callable[..., None]:
    """Return a test of rows: a call, and its result."""

    @pytest.mark.parametrize("name", rows)
    def test(name: str) -> None:
        call, due = rows[name]
        alike(call(), due, rtol, atol)

    return test


def in_libraries(rows: dict[str, Any], rtol: float = 1e-12, atol: float = 0) -> Callable[..., None]:
    """Return a test of rows in each library: a function, its inputs, and its result."""

    @libraries
    @pytest.mark.parametrize("name", rows)
    def test(name: str, library: str) -> None:
        f, *xs, due = rows[name]
        alike(f(*[on(library, x) for x in xs]), due, rtol, atol)

    return test


def firing(rows: dict[str, Any]) -> Callable[..., None]:
    """Return a test of rows: an op type, a function in which it is, and the first input."""

    @pytest.mark.parametrize("name", rows)
    def test(name: str) -> None:
        op_type, f, x = rows[name]
        zeros = lambda op, *dys: [rg.zeros_like(x) for x in op.inputs]  # noqa: E731
        with rg.gradient_override_map({op_type: zeros}) as used:
            dx = slope(f)(rg.asarray(x)).numpy()
        used.assert_fired()
        assert not np.array_equal(dx, slope(f)(rg.asarray(x)).numpy())

    return test
