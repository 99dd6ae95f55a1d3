"""The values of small integer tensors, as far as they are known when a graph is built.

Programs compute sizes by ops (`shape(x)[0] * 2`). A tensor that is reshaped to such a size should
have a static shape where its parts are known. So kernels run on arrays of numbers and Dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regrad.core import dims
from regrad.core.dims import Dim, UnknownRank
from regrad.core.protocols import NodeLike, SymbolLike
from regrad.core.tape import placed
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError

FOLDED = {
    "AddV2", "Cast", "ConcatV2", "ExpandDims", "FloorDiv", "FloorMod", "GatherV2", "Identity",
    "Maximum", "Minimum", "Mul", "Neg", "Pack", "Prod", "Reshape", "Slice", "Split", "Squeeze",
    "StridedSlice", "Sub", "Sum", "Unpack",
}  # fmt: skip
SMALL = 64


def fold(node: NodeLike) -> None:
    """Record the values of a small integer output, if they follow from known inputs."""
    if node.op.type == "Const":
        value = node.attrs["value"]
        if value.size <= SMALL:
            node.symbols[0].content = value.astype(object)
    elif node.op.type in FOLDED and not node.sized:
        contents = [symbol.content for symbol in node.sources()]
        if not any(content is None for content in contents):
            _fold_from(node, contents)


def _fold_from(node: NodeLike, contents: Sequence[object]) -> None:
    """Run the kernel on the known integers and Dims, as an array of objects."""
    try:
        if node.op.type == "Cast":
            results: Any = contents[0]
        else:
            kernel = node.op.kernels[np.ndarray]
            results = kernel(*[placed(contents, p) for p in node.layout], **node.attrs)
    except Exception:  # the kernel does not accept objects, so the values stay unknown
        return
    results = results if node.op.several else (results,)
    for symbol, content in zip(node.symbols, results, strict=True):
        symbol.content = _in_range(_objects(content), symbol.dtype)


def _in_range(content: np.ndarray | None, dtype: np.dtype) -> np.ndarray | None:
    """Return known values if they fit the dtype; otherwise None, and the run decides."""
    if content is None:
        return None
    limits = np.iinfo(dtype)
    fits = all(isinstance(n, Dim) or limits.min <= n <= limits.max for n in content.flat)
    return content if fits else None


def _objects(content: Any) -> np.ndarray | None:
    """Return known values as an array of objects. A single Dim has rank 0."""
    if not isinstance(content, np.ndarray):
        content, value = np.empty((), object), content
        content[()] = value
    return content if content.size <= SMALL else None


def as_attribute(x: Tensor) -> Any:
    """Return a symbolic integer Tensor as an attribute: known numbers, or values of the run."""
    symbol = x._data
    if symbol.dtype.kind not in "iu":
        raise ArgumentError(f"sizes must be integers, got {symbol.dtype} ({symbol.name!r})")
    if symbol.content is not None:
        rely(symbol)
        return _tupled(symbol.content)
    if isinstance(symbol.shape, UnknownRank) or not dims.is_known(symbol.shape):
        raise ArgumentError(
            f"the number of sizes in {symbol.name!r} must be known when the graph is built; its "
            f"shape is {symbol.shape}"
        )
    if not symbol.shape:
        return dims.entry_of(symbol, None)
    if len(symbol.shape) > 1:
        raise ArgumentError(f"sizes must be a vector, {symbol.name!r} has shape {symbol.shape}")
    return tuple(dims.entry_of(symbol, i) for i in range(symbol.shape[0]))


def rely(symbol: SymbolLike) -> None:
    """Record that the graph used a value that is known at build time, so it cannot be fed."""
    stack = [symbol]
    while stack:
        here = stack.pop()
        if not here.relied and here.content is not None:
            here.relied = True
            if here.node.op.type != "Shape":
                stack += here.node.sources()


def _tupled(content: Any) -> Any:
    if content.ndim == 0:
        n = content.item()
        return n if isinstance(n, Dim) else int(n)
    return tuple(_tupled(np.asarray(c, object)) for c in content)
