"""Ops of a graph for sizes that are unknown before the run: as tensors, and in checks."""

from __future__ import annotations

from typing import Any

import numpy as np

from regrad.core import dims
from regrad.core.backends import Array, Namespace
from regrad.core.dims import Dim, Shape
from regrad.core.registry import Op
from regrad.core.tensor import Tensor
from regrad.errors import RuleError, UnknownShapeError
from regrad.graph.graph import INNERMOST, NO_RULE, chain, defer, graph_op, home, is_symbolic
from regrad.shapes.infer import Spec

SHAPE = graph_op("Shape", lambda xp, x: np.asarray(x.shape, np.int32), "x", name="shape")


def shape_tensor(x: Tensor) -> Tensor:
    """Return the shape of a symbolic Tensor as a vector of int32. Known sizes stay known."""
    x = home([x]).entering(x)
    shape: Any = x._data.shape
    rank = len(shape) if isinstance(shape, tuple) else None
    y = defer(SHAPE, (x,), {}, specs=(Spec((rank,), np.dtype(np.int32)),))
    if isinstance(shape, tuple):
        y._data.content = np.array([*shape, None], object)[:-1]
    return y


def _checked_shape(xp: Namespace, x: Array, shape: tuple[int, ...], what: str) -> Any:
    if tuple(x.shape) != shape:
        raise RuleError(f"{what} got the shape {tuple(x.shape)}, expected {shape}")
    return x


ENSURE = graph_op("_Checked", _checked_shape, "x", "shape what", name="checked", rule=None)


def of_shape(x: Tensor, shape: Shape, what: str) -> Tensor:
    """Check the shape of x in the run, and return x. `what` begins the error message."""
    known = dims.merged(x._data.shape, shape)
    if not is_symbolic(x):
        x = dims.sources([shape])[0].node.graph.entering(x)
    return defer(ENSURE, (x,), {"shape": shape, "what": what}, specs=(Spec(known, x._data.dtype),))


SIZE = Op("Size", "size", lambda xp, value: np.asarray(value, np.int32), [], ["value"])
SIZE.rule = NO_RULE


def size_tensor(size: Dim) -> Tensor:
    """Return a size that is unknown before the run as a Tensor (int32, rank 0)."""
    graph = dims.sources([size])[0].node.graph
    region = INNERMOST.get()
    if region is not None and region is not graph and graph in chain(region):
        raise UnknownShapeError(
            "a size of an outer tensor is used inside a branch or loop; compute it before, with "
            f"{graph.root.words.size}"
        )
    y = graph.add(SIZE, NO_RULE, (), {"value": size}, specs=(Spec((), np.dtype(np.int32)),))
    y._data.content = np.full((), size, object)
    return y
