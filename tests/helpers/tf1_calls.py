"""Calls of `tf` functions, and what they make in a graph: values, gradients, names, overrides.

A cell is an expression, the specs of its placeholders and their static shapes. It runs in `tf`,
which is regrad.v1 or TensorFlow, so this module imports neither.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

COUNT = itertools.count()
KINDS: dict[str, tuple[str, Callable[[np.ndarray], Any]]] = {
    "F": ("float32", lambda i: 2 * np.sin(1.7 * i + 0.3)),
    "G": ("float32", lambda i: 1.5 * np.cos(2.3 * i + 1.1)),
    "P": ("float32", lambda i: 1.1 + 0.9 * np.sin(1.7 * i + 0.3)),
    "U": ("float32", lambda i: 0.9 * np.sin(1.7 * i + 0.3)),
    "K": ("float32", lambda i: (7 * i + 3) % 5 - 2),
    "Z": ("float32", np.zeros_like),
    "D": ("float64", lambda i: 2 * np.sin(1.7 * i + 0.3)),
    "C": ("complex64", lambda i: 2 * np.sin(1.7 * i + 0.3) + 1j * np.cos(2.3 * i + 1.1)),
    "I": ("int32", lambda i: (7 * i + 3) % 5 - 2),
    "J": ("int32", lambda i: (7 * i + 3) % 5 + 1),
    "N": ("int32", lambda i: (7 * i + 4) % 3),
    "Q": ("int64", lambda i: (7 * i + 4) % 3),
    "Y": ("uint8", lambda i: (7 * i + 3) % 5),
    "B": ("bool", lambda i: (7 * i + 3) % 5 < 2),
}


def array(spec: str) -> np.ndarray:
    """The array of a spec: a letter of KINDS, and one digit per axis.

    The letter S stands for matrices that are positive definite.
    """
    shape = tuple(map(int, spec[1:]))
    indices = np.arange(math.prod(shape))
    if spec[0] == "S":
        rows = 0.3 * np.sin(1.7 * indices + 0.3).reshape(shape)
        return (rows @ np.swapaxes(rows, -1, -2) + np.diag(1.0 + np.arange(shape[-1]))).astype("f4")
    dtype, function = KINDS[spec[0]]
    return np.asarray(function(indices)).reshape(shape).astype(dtype)


class Cell:
    """One build of a cell in a new graph."""

    def __init__(self, tf: Any, expression: str, specs: str, shapes: str) -> None:
        tf.reset_default_graph()
        self.tf, self.expression, self.feed = tf, expression, {}
        self.scope: dict[str, Any] = {"tf": tf, "np": np}
        for name, spec in (pair.split(":") for pair in specs.split()):
            value = array(spec)
            static = {"static": value.shape, "unknown": None}.get(shapes, (None, *value.shape[1:]))
            x = tf.placeholder(value.dtype, static if value.ndim or static is None else (), name)
            self.scope[name], self.feed[x] = x, value
        self.xs = [x for x in self.feed if x.dtype.is_floating or x.dtype.is_complex]

    def build(self) -> list[Any]:
        code = CODE.setdefault(self.expression, compile(self.expression, "cell", "eval"))
        y = eval(code, self.scope)
        return [t for t in _flat(y) if t is not None]

    def gradients(self, ys: list[Any], values: list[Any] | None = None) -> list[Any]:
        """The gradients of the floats among ys, of weights for their values or of ones."""
        picked = [
            i for i, y in enumerate(ys)
            if y.dtype.is_floating or (y.dtype.is_complex and values is not None)
        ]  # fmt: skip
        if not picked or not self.xs:
            return []
        weights = None if values is None else [_weights(np.asarray(values[i])) for i in picked]
        return self.tf.gradients([ys[i] for i in picked], self.xs, grad_ys=weights)


CODE: dict[str, Any] = {}  # TensorFlow's traces read code objects, which must not be freed


def _flat(y: Any) -> list[Any]:
    return [t for part in y for t in _flat(part)] if isinstance(y, list | tuple) else [y]


def _weights(value: np.ndarray) -> np.ndarray:
    weights = np.cos(1.3 * np.arange(value.size) + 0.4).reshape(value.shape)
    return weights.astype(value.dtype)


def _plain(value: Any) -> Any:
    if value is None:
        return None
    value = np.asarray(value)
    value = np.stack([value.real, value.imag]) if value.dtype.kind == "c" else value
    rounded = np.vectorize(lambda v: float(f"{v:.6g}"), otypes=[float])
    return (rounded(value) if value.dtype.kind == "f" and value.size else value).tolist()


def run(tf: Any, *cell: str) -> dict[str, Any] | Exception:
    """The record of what a cell makes, or its error."""
    try:
        return _made(tf, *cell)
    except Exception as error:
        return error


def _made(tf: Any, *cell: str) -> dict[str, Any]:
    made = Cell(tf, *cell)
    ys = made.build()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer(), made.feed)
        values = session.run(ys, made.feed)
        dxs = made.gradients(ys, values)
        found = iter(session.run([dx for dx in dxs if dx is not None], made.feed))
    return {
        "values": [_plain(v) for v in values],
        "dtypes": [y.dtype.name for y in ys],
        "shapes": [None if y.shape.ndims is None else y.shape.as_list() for y in ys],
        "names": [y.name for y in ys],
        "gradients": [None if dx is None else _plain(next(found)) for dx in dxs],
    }


def fires(tf: Any, op_type: str, *cell: str) -> int:
    """How often an override of an op type runs in the gradient of a cell."""
    name, calls = f"Tf1Calls{next(COUNT)}", []
    tf.RegisterGradient(name)(lambda op, *dys: calls.append(op) or [None] * len(op.inputs))
    made = Cell(tf, *cell)
    with tf.get_default_graph().gradient_override_map({op_type: name}):
        ys = made.build()
    made.gradients(ys)
    return len(calls)
