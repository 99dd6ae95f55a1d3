"""The inspection tools for functions of regrad."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal

from regrad.core.backends import numpy_dtype
from regrad.core.callers import PACKAGE
from regrad.core.reports import shape_text
from regrad.core.signatures import helpful
from regrad.core.tape import Record
from regrad.core.walk import name_of
from regrad.graph.graph import OpGraph
from regrad.inspection import comparisons, nonfinite, paths, saved, traces
from regrad.inspection.comparisons import RTOL, GradientComparison
from regrad.inspection.drawings import BoxKind, Drawing, Sketch, spec_of
from regrad.inspection.nonfinite import NonFinite
from regrad.inspection.paths import GradientPath
from regrad.inspection.saved import SavedBytes
from regrad.inspection.tapes import Lines, SeenTape, TapeRecorder
from regrad.inspection.traces import GradientTrace


@helpful("trace_gradients")
def trace_gradients(f: Callable[..., Any]) -> Callable[..., GradientTrace]:
    """Return a function that runs `f` and its backward pass, and reports the ops that ran there.

    Args:
        f: A function of Tensors, arrays, numbers and containers of them that returns a Tensor. For
            a result that is not a scalar, the incoming gradient is 1 for each element.

    Returns:
        A function of f's arguments that returns a `GradientTrace`. It differentiates by all
        arguments and by the trainable Variables that f reads. For each op, the trace has its rule
        (built-in, override or custom, with its source location), the line of your code that ran it,
        and statistics of the gradients that arrived and left. `trace.worst()` returns the most
        likely problem. Bodies of jit and checkpoint run op by op here, under the active rules.

    Raises:
        ArgumentError: f is not callable, or does not return a Tensor.
        GradientError: An argument or the result cannot have a gradient.

    >>> import regrad as rg
    >>> trace = rg.trace_gradients(lambda x: rg.sin(x * x))(rg.tensor([1.0, 2.0]))
    >>> [step.op_type for step in trace.steps]
    ['Sin', 'Mul']
    """
    return traces.traced(TapeRecorder(f, "trace_gradients"))


@helpful("find_nan")
def find_nan(f: Callable[..., Any]) -> Callable[..., NonFinite | None]:
    """Return a function that runs `f` forward and backward, and finds the first NaN or infinity.

    Args:
        f: A function as in `trace_gradients`.

    Returns:
        A function of f's arguments that returns a `NonFinite`, or None if all values are finite. It
        has the op, the line of your code that ran it, the element, the op's inputs at that element,
        and the usual remedy. If an argument or a Variable is not finite at the start, it is
        reported as the origin. An infinity that affects neither the result nor a gradient (a mask
        of -inf) is not reported.

    Raises:
        ArgumentError, GradientError: As in `trace_gradients`.

    >>> import regrad as rg
    >>> found = rg.find_nan(lambda x: rg.log(x).sum())(rg.tensor([1.0, 0.0]))
    >>> found.op_type, found.phase, found.what, found.index
    ('Log', 'forward', 'inf', (1,))
    """
    return nonfinite.searched(TapeRecorder(f, "find_nan"))


@helpful("gradient_path")
def gradient_path(f: Callable[..., Any], name: str) -> Callable[..., GradientPath]:
    """Return a function that runs `f`, and follows the gradient to one of its inputs.

    Args:
        f: A function as in `trace_gradients`.
        name: The argument or Variable to follow, by its name: `"args[0]"`, `"w"`, as in the inputs
            of a trace.

    Returns:
        A function of f's arguments that returns a `GradientPath`: the ops between the result and
        the input, each with its rule and its line, and with the norms of the gradients that arrived
        and that left towards the input. It also has the place where the gradient dies: where only
        zeros or non-finite values leave, or where it is cut off. Print it for a table.

    Raises:
        ArgumentError: f has no differentiable input of that name.
        GradientError: As in `trace_gradients`.

    >>> import regrad as rg
    >>> path = rg.gradient_path(lambda x, w: rg.nn.relu(x * w - 9.0).sum(), "args[1]")(2.0, 3.0)
    >>> [step.op_type for step in path.steps], path.dies.op_type
    (['Sum', 'Relu', 'Sub', 'Mul'], 'Relu')
    """
    return paths.followed(TapeRecorder(f, "gradient_path"), name)


@helpful("compare_gradients")
def compare_gradients(
    f: Callable[..., Any],
    other: Callable[..., Any] | Literal["true", "differences"] | None = None,
    *,
    surrogates: Sequence[str] = (),
    rtol: float = RTOL,
) -> Callable[..., GradientComparison]:
    """Return a function that compares the gradient of `f` with another gradient.

    Args:
        f: A function as in `trace_gradients`.
        other: None or `"true"`: the true gradient of f. All ops use their built-in rules, in any
            scope, and custom functions are differentiated op by op. `"differences"`: central
            differences, in float64, of the arguments. Or another function of the same arguments.
        surrogates: Op types, names of rules, or names of arguments and Variables, whose gradients
            are intended to differ. `assert_same()` of the result ignores them.
        rtol: The tolerance, relative to the larger of both norms.

    Returns:
        A function of f's arguments that returns a `GradientComparison`: a row for each argument and
        Variable. In a comparison with the true gradient, it also has a row for each input of each
        op under an override and of each custom function, in place: the rule and the true derivative
        get the same incoming gradient. (An override that passes no gradient, `"StopGradient"`, has
        no row of its own.)

    Raises:
        ArgumentError: f is not callable, or `other` is none of these.
        GradientError: An argument or the result cannot have a gradient, or the shapes of the two
            gradients differ.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Sin": lambda dy: 2 * dy}):
    ...     found = rg.compare_gradients(lambda x: rg.sin(x))(rg.tensor([0.0, 0.0]))
    >>> [(row.kind, row.ratio) for row in found.rows]
    [('argument', 2.0), ('op', 2.0)]
    """
    api = "compare_gradients"
    of_other = lambda other: TapeRecorder(other, api)  # noqa: E731
    return comparisons.compared(TapeRecorder(f, api), other, surrogates, rtol, of_other)


@helpful("saved_bytes")
def saved_bytes(f: Callable[..., Any]) -> Callable[..., SavedBytes]:
    """Return a function that runs `f` and reports the memory that its backward pass keeps.

    Args:
        f: A function as in `trace_gradients`, which may return anything.

    Returns:
        A function of f's arguments that returns `SavedBytes`: bytes by op type and line of your
        code. An array that several ops keep is counted once, for the first op. A view counts with
        its visible elements.

    Raises:
        ArgumentError: f is not callable.

    >>> import regrad as rg
    >>> saved = rg.saved_bytes(lambda x: rg.sin(x + 1.0).sum())(rg.zeros((256,)))
    >>> saved.total, saved.rows[0].op_type
    (1024, 'Sin')
    """
    return saved.measured(TapeRecorder(f, "saved_bytes"))


@helpful("draw")
def draw(f: Any, *args: Any, gradients: bool = False) -> Drawing:
    """Return a picture of the ops that `f(*args)` runs.

    Args:
        f: A function of Tensors, arrays, numbers and containers of them that returns a Tensor, or
            a graph of `regrad.v1`.
        args: The arguments of f; none for a graph.
        gradients: Whether to draw the ops of the backward pass as well.

    Returns:
        A `Drawing`: the ops that depend on the arguments and on the Variables that f reads. Bodies
        of jit and checkpoint are drawn op by op. Ops are placed in the functions of yours that ran
        them. Overridden ops and custom gradients are highlighted and name their rules. `svg` draws
        it with Graphviz, `html` writes a page with zoom, search and collapsible scopes, and a
        notebook displays it directly.

    Raises:
        ArgumentError: f is not callable, or does not return a Tensor.

    >>> import regrad as rg
    >>> drawing = rg.draw(lambda x: rg.sin(x) * 2.0, rg.scalar(1.0))
    >>> [box.lines[0] for box in drawing.boxes]
    ['args[0]', 'Sin', 'Mul']
    """
    if isinstance(f, OpGraph):
        return f.draw()  # pyright: ignore[reportAttributeAccessIssue]
    recorder = TapeRecorder(f, "draw")
    recorder.record(args, {}, ScopedTape(), gradients)
    return _drawing(recorder, getattr(f, "__name__", type(f).__name__))


class _Scoped(Lines):
    """Records, with the user's functions that were running when each record was made."""

    def __init__(self) -> None:
        super().__init__()
        self.scopes: dict[int, tuple[str, ...]] = {}
        self.calls: dict[FrameType, str] = {}  # (frames are kept alive, so that no id is reused)
        self.names: dict[tuple[tuple[str, ...], str], int] = {}
        self.outermost: FrameType | None = None

    def append(self, record: Record) -> None:
        frames = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.outermost:
            if not frame.f_code.co_filename.startswith(PACKAGE):
                frames.append(frame)
            frame = frame.f_back
        self.scopes[id(record)] = self._scope(frames[::-1])
        super().append(record)

    def _scope(self, frames: Sequence[FrameType]) -> tuple[str, ...]:
        """Return the names of these calls, without the drawn function, and without lambdas."""
        scope: tuple[str, ...] = ()
        for frame in frames[1:]:
            name = frame.f_code.co_name
            if name.startswith("<"):
                continue
            if frame not in self.calls:
                count = self.names.get((scope, name), 0)
                self.names[scope, name] = count + 1
                self.calls[frame] = f"{name}_{count}" if count else name
            scope = (*scope, self.calls[frame])
        return scope


class ScopedTape(SeenTape):
    """A tape that stores in which calls of the user's functions its records were made."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.entries: Any = _Scoped()
        # Calls outside of the drawn function are not scopes of the picture.
        self.entries.outermost = sys._getframe(1)


def _drawing(run: TapeRecorder, title: str) -> Drawing:
    """Return the records of a run as boxes, and their inputs as arrows."""
    sketch = Sketch()
    for name, _, x in run.sources:
        kind: BoxKind = "input" if name.startswith("args") else "variable"
        sketch.add_source(x._id, name, spec_of(x.dtype, x.shape), kind)
    for i, op in enumerate(run.ops):
        record = op.record
        scope = run.tape.entries.scopes[id(record)]  # pyright: ignore[reportAttributeAccessIssue]
        inputs = [(name_of(record, leaf), *spec) for leaf, spec in enumerate(record.specs)]
        details = {"line": op.line}
        details.update((name, spec_of(numpy_dtype(d), shape)) for name, shape, d in inputs)
        details.update((k, repr(v)) for k, v in record.attrs.items())
        labels = [f"{name} {shape_text(shape)}".strip() for name, shape, _ in inputs]
        takes = zip(record.inputs, labels, strict=True)
        inside = ("gradients",) if i >= run.forward else scope
        sketch.add_op(op, [op.op_type], inside, details, takes, op.makes)
    return sketch.drawing(title, lambda box: True)
