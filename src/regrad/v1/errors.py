"""Errors that runs raise, under TensorFlow's names. Each is a RegradError too."""

from __future__ import annotations

from typing import Any

from regrad.core import dims
from regrad.core.callers import warn_caller
from regrad.errors import CheckpointError, InvalidValueError, RegradError, ShapeError
from regrad.graph.graph import Node


class OpError(RegradError):
    """An op failed in a run. `op` is the op and `message` describes the failure."""

    op: Any = None

    def __init__(self, node_def: Any, op: Any = None, message: str = "") -> None:
        # The order is TensorFlow's. A single argument is the message.
        self.message: str = message or str(node_def)
        self.node_def: Any = node_def if message else None
        self.op = op
        super().__init__(self.message)


class InvalidArgumentError(OpError, ValueError):
    """Incompatible shapes in a run, an index out of range, or a placeholder without a value."""


class FailedPreconditionError(OpError):
    """A variable was read before it was initialized."""


class UnknownError(OpError):
    """A Python function (`py_func`) raised."""


class NotFoundError(OpError):
    """A file, or an entry of a file, does not exist."""


class OutOfRangeError(OpError):
    """The end of a sequence was reached."""


class UnimplementedError(OpError):
    """The feature is not supported."""


class InternalError(OpError):
    """A bug in the library."""


class DataLossError(OpError, CheckpointError):
    """A file is damaged."""


class AlreadyExistsError(OpError):
    """The object already exists."""


class AbortedError(OpError):
    """The run was aborted."""


class CancelledError(OpError):
    """The run was canceled."""


class ClosedError(RegradError, RuntimeError):
    """The session is closed, or its graph is empty."""


class NoEffectWarning(UserWarning):
    """A part of a TensorFlow 1 program runs, and has no effect or another effect."""


SAID: set[str] = set()  # the warnings of this process


def warn_once(text: str) -> None:
    """Give a NoEffectWarning, once in a process."""
    if text not in SAID:
        SAID.add(text)
        warn_caller(text, NoEffectWarning)


class InstallError(RegradError, ImportError):
    """The names of TensorFlow cannot be installed, or a module of TensorFlow is not covered."""


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
    """Return the TensorFlow error for an op's failure. Other errors are returned unchanged."""
    node = getattr(error, "node", None)
    if node is None or not isinstance(error, ShapeError | InvalidValueError | IndexError):
        return error
    text = f"{error} (the op {node.name!r})"
    if isinstance(error, ShapeError):
        shapes = [str(list(v.shape)).replace(" ", "") for v in getattr(error, "values", ())]
        text = f"Incompatible shapes: {' vs. '.join(shapes)}: {text}"
    return InvalidArgumentError(None, node, text)
