"""The errors of runs, under TensorFlow's names; they are RegradErrors too."""

from __future__ import annotations

from typing import Any

from regrad.core import dims
from regrad.errors import CheckpointError, InvalidValueError, RegradError, ShapeError
from regrad.graph.graph import Node
from regrad.v1.graph.node_defs import NodeDef


class OpError(RegradError):
    """An op failed in a run. `op` is the op, `message` what went wrong."""

    op: Any = None

    def __init__(self, node_def: NodeDef | str | None, op: Any = None, message: str = "") -> None:
        # TensorFlow's argument order; a message alone will do
        self.message: str = message or str(node_def)
        self.node_def: NodeDef | str | None = node_def if message else None
        self.op = op
        super().__init__(self.message)


class InvalidArgumentError(OpError, ValueError):
    """Shapes that clash in the run, an index out of range, a placeholder without a value."""


class FailedPreconditionError(OpError):
    """A variable was read before it was given a value."""


class UnknownError(OpError):
    """A Python function (`py_func`) raised."""


class NotFoundError(OpError):
    """A file, or something in it, that does not exist."""


class OutOfRangeError(OpError):
    """The end of a sequence was reached."""


class UnimplementedError(OpError):
    """Something that is not offered."""


class InternalError(OpError):
    """A mistake of the library."""


class DataLossError(OpError, CheckpointError):
    """A file that is damaged."""


class AlreadyExistsError(OpError):
    """Something that exists already."""


class AbortedError(OpError):
    """The run was broken off."""


class CancelledError(OpError):
    """The run was broken off."""


class ClosedError(RegradError, RuntimeError):
    """A session that is closed, or whose graph is empty."""


def unfed(node: Node) -> InvalidArgumentError:
    """Return the error for a placeholder without a value."""
    symbol = node.symbols[0]
    shape = symbol.shape
    known = dims.is_known(shape) and shape
    sizes = f" and shape [{','.join(map(str, shape))}]" if known else ""
    dtype = {"float32": "float", "float64": "double"}.get(symbol.dtype.name, symbol.dtype.name)
    text = f"You must feed a value for placeholder tensor {node.name!r} with dtype {dtype}{sizes}"
    return InvalidArgumentError(None, node, text)


def of_run(error: Exception) -> Exception:
    """Return a failure of an op as TensorFlow classes it; errors of rules and of users stay."""
    node = getattr(error, "node", None)
    if node is None or not isinstance(error, ShapeError | InvalidValueError | IndexError):
        return error
    text = f"{error} (the op {node.name!r})"
    if isinstance(error, ShapeError):
        shapes = [str(list(v.shape)).replace(" ", "") for v in getattr(error, "values", ())]
        text = f"Incompatible shapes: {' vs. '.join(shapes)}: {text}"
    return InvalidArgumentError(None, node, text)
