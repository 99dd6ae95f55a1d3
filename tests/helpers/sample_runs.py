"""A sample run in a library: its inputs there, its results as arrays, and its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

import regrad as rg
from tests.samples import Sample, all_samples

ROWS = all_samples()


# Samples in which a value decides a shape. Only eager mode has it; compiled, they are refused.
NEEDS_VALUES = {
    "indexing: nonzero": "the values decide how many there are",
    "indexing: unique_values": "the values decide how many there are",
    "indexing: unique_all": "the values decide how many there are",
}


@contextmanager
def case_named(name: object) -> Iterator[None]:
    """A test of many cases, which says in which of them it failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {str(name)!r}")
        raise


def inputs_of(row: Sample, backend: str, *, single: bool = False) -> list[Any]:
    """The inputs in a library, floats in double or single precision."""
    return [arrays_of(backend, a.astype(float_dtype(a, single))) for a in row.inputs]


def float_dtype(array: np.ndarray, single: bool) -> Any:
    names = {"f": ("float64", "float32"), "c": ("complex128", "complex64")}
    return names[array.dtype.kind][single] if is_float(array) else array.dtype


def arrays_of(backend: str, array: np.ndarray) -> Any:
    if backend == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    if backend == "torch":
        import torch

        return torch.asarray(array.copy())
    return array


def is_float(array: np.ndarray) -> bool:
    return array.dtype.kind in "fc"


def outputs(y: Any) -> list[Any]:
    return list(y) if isinstance(y, tuple | list) else [y]


def numbers(tensors: Any) -> list[np.ndarray]:
    return [np.asarray(t._values()) for t in outputs(tensors)]


def gradients(row: Sample, xs: list[Any], order: int) -> list[np.ndarray]:
    """The gradients of a weighted sum by every float input, differentiated `order` times."""
    return numbers(gradient_tensors(row, xs, order))


def gradient_tensors(row: Sample, xs: list[Any], order: int) -> list[Any]:
    """The same as Tensors, which compiled functions return."""
    return rg.grads(scalar(row, xs, order - 1), unconnected="zero")(floats_of(row, xs))


def tangent(row: Sample, xs: list[Any], order: int) -> Any:
    """The sum of what `gradients` gives, by forward mode."""
    floats = [rg.asarray(x) for x in floats_of(row, xs)]
    return rg.jvp(scalar(row, xs, order - 1), floats, [rg.ones_like(x) for x in floats])[1]


def floats_of(row: Sample, xs: list[Any]) -> list[Any]:
    """The inputs that are differentiated."""
    return [x for x, a in zip(xs, row.inputs, strict=True) if is_float(a)]


def scalar(row: Sample, xs: list[Any], order: int) -> Any:
    """A weighted sum of a sample's results as a function of its floats, differentiated so often."""
    places = [i for i, a in enumerate(row.inputs) if is_float(a)]

    def f(*floats: Any) -> Any:
        full = [rg.asarray(x) for x in xs]
        for i, x in zip(places, floats, strict=True):
            full[i] = x
        return weighted_sum(outputs(row.f(*full)))

    for _ in range(order):
        f = next_order(f)
    return f


def alone(row: Sample) -> Iterator[Sample]:
    """The row by each of its floats, if there are several, with the others as constants."""
    places = [i for i, a in enumerate(row.inputs) if is_float(a)]
    for i in places if len(places) > 1 else ():

        def f(x: Any, i: int = i) -> Any:
            return row.f(*row.inputs[:i], x, *row.inputs[i + 1 :])

        yield replace(row, name=f"{row.name}, by input {i}", f=f, inputs=(row.inputs[i],))


def squared(row: Sample) -> Any:
    """The row's function, and the squares of its results: what arrives at its ops depends on x."""

    def f(*xs: Any) -> Any:
        ys = [y for y in outputs(row.f(*xs)) if y.dtype.kind in "fc"]
        return [y * y for y in ys]

    return f


def next_order(f: Any) -> Any:
    return lambda *xs: weighted_sum(rg.grads(f, unconnected="zero")(list(xs)))


def weighted_sum(tensors: list[Any]) -> Any:
    total = rg.scalar(0.0)
    for t in tensors:
        if t.dtype.kind in "fV":  # (V: bfloat16)
            weights = np.cos(np.arange(t.size)).astype(t.dtype).reshape(t.shape)
            total = total + (t * weights).sum()
        elif t.dtype.kind == "c":
            total = total + (rg.real(t) * 0.7).sum() + (rg.imag(t) * 0.3).sum()
    return total
