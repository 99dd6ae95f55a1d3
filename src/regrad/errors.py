"""Every error of regrad, and the helpers that build error messages.

A message names the failed call, its location, the expected and the actual arguments, and the call
to write instead.
Each class also derives from the built-in class that Python code expects in this case.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from itertools import chain, islice

from numpy.linalg import LinAlgError

__all__ = [
    "ArgumentError", "AxisError", "CheckpointError", "DTypeError", "DetachedTensorWarning",
    "DeviceError", "ExportError", "FinalizedError", "GradientError", "GraphError", "HostError",
    "IndexRangeError", "InvalidValueError", "KernelError", "MatrixError", "MissingPackageError",
    "MissingPartError", "MissingRuleError", "NoTransposeError", "NotFiredError",
    "NumberRangeError", "OpenScopeWarning", "PassedOverError", "RegistrationError", "RegradError",
    "ResultSizeError", "RetraceWarning", "RuleError", "ShapeError", "SignatureError",
    "StaleError", "StateError", "TraceError", "UnknownOpError", "UnknownShapeError",
    "UntestedHostWarning", "UnusedOverrideWarning",
]  # fmt: skip


class RegradError(Exception):
    """The base of every error that regrad raises on purpose."""


class ArgumentError(RegradError, TypeError):
    """An argument of the wrong kind: a number instead of a function, for example."""


class ShapeError(RegradError, ValueError):
    """Shapes that do not match each other, or do not match the request."""


class NoTransposeError(ShapeError, AttributeError):
    """`x.T` or `x.mT` of a Tensor that is not a matrix: the attribute is missing there."""


class AxisError(ShapeError, IndexError):
    """An axis that a tensor does not have."""


class UnknownShapeError(ShapeError):
    """A size or rank that is known only when a graph runs."""


class IndexRangeError(RegradError, IndexError):
    """An index that is out of range, or more indices than axes."""


class NumberRangeError(RegradError, OverflowError):
    """A Python number that its dtype cannot hold."""


class InvalidValueError(RegradError, ValueError):
    """A value that a function cannot take, or cannot compute with."""


class MatrixError(InvalidValueError, LinAlgError):
    """A matrix without a required property: it is singular, or not positive definite."""


class ResultSizeError(RegradError, MemoryError):
    """A result that does not fit in memory."""


class KernelError(RegradError, RuntimeError):
    """An array library could not compute an op."""


class DTypeError(RegradError, TypeError):
    """A dtype that the call cannot take, or that a backend cannot hold."""


class GradientError(RegradError, ValueError):
    """A gradient that does not exist: no path, an integer input, a lost history."""


class RuleError(RegradError, ValueError):
    """A rule that does not fit its op, or whose answer does not fit the input."""


class SignatureError(RuleError, TypeError):
    """A rule whose parameters do not fit the arguments of its call."""


class MissingRuleError(RuleError, LookupError):
    """An op on the path has no rule."""


class UnknownOpError(RegradError, LookupError):
    """An op type, or a rule name, that does not exist."""


class RegistrationError(RegradError, KeyError):
    """A name that is taken already (TensorFlow raises KeyError here)."""

    def __str__(self) -> str:  # KeyError shows the repr of its message
        return str(self.args[0])


class GraphError(RegradError, ValueError):
    """A graph was misused: tensors of two graphs, a bad name, a value before the run."""


class FinalizedError(GraphError, RuntimeError):
    """An op for a graph that has been finalized, or for a session that is closed."""


class TraceError(RegradError, TypeError):
    """A compiled function used a value that exists only while it runs, or leaked one."""


class StaleError(RegradError, RuntimeError):
    """A compiled function whose behavior differs from the program that was compiled from it."""


class DeviceError(RegradError, ValueError):
    """Data that is, or would be placed, where the call cannot use it."""


class NotFiredError(RegradError, AssertionError):
    """`assert_fired()` found a rule that never ran."""


class PassedOverError(RegradError, RuntimeError):
    """An op of another library would keep its own gradient although it is overridden."""


class HostError(PassedOverError):
    """The installed version of PyTorch or JAX lacks a part that a feature of regrad needs."""


class StateError(RegradError, RuntimeError):
    """An object was used before it was ready: an optimizer without its state, for example."""


class CheckpointError(RegradError, ValueError):
    """A file of values that is damaged, or does not fit the variables."""


class ExportError(RegradError, ValueError):
    """A function that cannot be exported, or a file that is not an exported program."""


class MissingPackageError(RegradError, ImportError):
    """An optional package is needed for this, and is not installed."""


class MissingPartError(RegradError, AttributeError):
    """A part of the package whose optional package is not installed."""


class DetachedTensorWarning(UserWarning):
    """A torch tensor that requires grad became a Tensor, which ends torch's gradient."""


class UnusedOverrideWarning(UserWarning):
    """A `gradient_override_map` without effect: no op of its types ran, or it was not entered."""


class OpenScopeWarning(UserWarning):
    """A scope that was entered, and collected before its exit."""


class UntestedHostWarning(UserWarning):
    """PyTorch or JAX is newer than every version that regrad was tested with."""


class RetraceWarning(UserWarning):
    """A compiled function that is traced again and again."""


CLASSES: dict[
    type[Exception], type[RegradError]
] = {  # classes of other libraries' errors, with regrad's class; the first match counts
    IndexError: IndexRangeError,
    OverflowError: NumberRangeError,
    MemoryError: ResultSizeError,
    RecursionError: ArgumentError,
    ValueError: InvalidValueError,
    ZeroDivisionError: InvalidValueError,
    RuntimeError: KernelError,
    TypeError: ArgumentError,
    AttributeError: ArgumentError,
    LookupError: ArgumentError,
    AssertionError: ArgumentError,
}


def is_of_a_matrix(error: Exception) -> bool:
    """Return whether NumPy or PyTorch (whose class is private) reports a singular matrix."""
    return type(error).__name__ in ("LinAlgError", "_LinAlgError")


NESTED = "a container holds itself, or is nested too deeply"


def refusal(error: Exception, name: str, given: Mapping[str, object]) -> Exception:
    """Convert an error to an error of regrad that names the function and its arguments.

    Errors without a cause in the call (a warning made an error, a missing file, a NaN check that
    the user has enabled) stay unchanged.
    """
    got = ", ".join(f"{key}={brief(value)}" for key, value in given.items())
    if isinstance(error, RecursionError) and not any(map(_is_deep, given.values())):
        return error
    if isinstance(error, RegradError):
        return prefixed(error, name, got if _is_unnamed(error, given) else "")
    ours = next((ours for other, ours in CLASSES.items() if isinstance(error, other)), None)
    ours = MatrixError if is_of_a_matrix(error) else ours
    if ours is None:
        error.add_note(f"in {name}")
        return error
    said = NESTED if isinstance(error, RecursionError) else str(error).strip().rstrip(".")
    return ours(f"{name}: {said or type(error).__name__}{got and f'; got {got}'}")


def prefixed(error: RegradError, name: str, got: str = "") -> RegradError:
    """Return the same error, with the called function and its arguments in the message."""
    text = str(error.args[0]) if error.args else ""
    if len(error.args) <= 1:
        start = "" if name.rpartition(".")[2] in text else f"{name}: "
        got = got and (f" Got {got}." if text.endswith((".", "?")) else f"; got {got}")
        error.args = (start + text + got,)
    return error


def _is_unnamed(error: RegradError, given: Mapping[str, object]) -> bool:
    """Return whether an error is about an argument, but does not name it."""
    if not isinstance(error, ArgumentError | ShapeError | DTypeError | NumberRangeError):
        return False
    return not any(re.search(rf"\b{name}\b", str(error)) for name in given)


def brief(value: object) -> str:
    """Return a value for a message: itself if it is short and plain, else its kind."""
    if isinstance(value, str | bytes | bool | int | float | complex | type | None):
        return f"{value!r:.40}" if not isinstance(value, int) else short_int(value)
    if isinstance(value, tuple | list) and len(value) < 7 and not _holds_containers(value):
        inner = ", ".join(map(brief, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return kind(value)


def _is_deep(value: object) -> bool:
    """Return whether containers are nested more deeply than is ever intended."""
    level = [value]
    for _ in range(200):
        held = [v.values() if isinstance(v, dict) else v for v in level
                if isinstance(v, tuple | list | dict)]  # fmt: skip
        level = list(islice(chain.from_iterable(held), 1000))
    return bool(level)


def _holds_containers(values: Iterable[object]) -> bool:
    return any(isinstance(v, tuple | list | dict) for v in values)


def short_int(value: int) -> str:
    """Return an integer for a message, unless it has hundreds of digits."""
    return str(value) if abs(value) < 10**30 else "an integer of more than 30 digits"


def lacks(package: str, error: ImportError) -> str:
    """Return why an optional package is unusable: it is missing, or its import fails."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == package:
        return "which is not installed"
    return f"which is installed but cannot be imported ({error})"


def near(name: str, names: Iterable[str]) -> str:
    """Return `" Did you mean 'MatMul'?"`, or an empty string when no name is close."""
    known = list(names)
    close = alike(name, known) or [n for n in known if _has_words(n, name)][:3]
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def _has_words(name: str, part: str) -> bool:
    """Return whether a name has all words of another one, at least in part: `reverse_gradient`."""
    words, wanted = snake_case(name).lower().split("_"), snake_case(part).lower().split("_")
    return all(len(w) > 2 and any(word.startswith(w) for word in words) for w in wanted)


def alike(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three names that are similar to a name, the closest first."""
    return list(_alike(name, tuple(names)))


@functools.lru_cache(maxsize=64)  # (a scope without hits calls this in each training step)
def _alike(name: str, names: tuple[str, ...]) -> list[str]:
    import difflib

    known = {n.lower(): n for n in names}
    return [known[n] for n in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)]


def printable(text: str) -> str:
    """Escape control characters, which XML may not contain: `bell\\x07` for `bell` and a bell."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def snake_case(name: str) -> str:
    """Return `valueAndGrad` as `value_and_grad`."""
    return "".join(f"_{c.lower()}" if c.isupper() and i else c for i, c in enumerate(name))


def camel_case(name: str) -> str:
    """Return `value_and_grad` as `valueAndGrad`."""
    first, *rest = name.strip("_").split("_")
    return first + "".join(word.capitalize() for word in rest)


def kind(value: object) -> str:
    """Return the kind of a value, for a message: `int`, `None`, `list`, `Tensor(float32, (3,))`."""
    if value is None:
        return "None"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return type(value).__name__
    sizes = tuple(shape) if isinstance(shape, tuple | list) else str(shape)
    return f"{type(value).__name__}({dtype}, {sizes})"
