"""The tools of inspection for functions of regrad."""

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
    """Return a function that runs `f`, and then its backward pass, and tells what ran there.

    Args:
        f: A function of Tensors, arrays, numbers and containers of them that returns a Tensor. A
            result that is not a scalar is taken with the gradient 1 for each element.

    Returns:
        A function of f's arguments that returns a `GradientTrace`. Gradients are taken by all
        arguments and by the trainable Variables that f reads. For each op the trace has its rule
        (built-in, override or custom, with the place where it was written), the line of your code
        that ran it, and figures of the gradients that arrived and left; `trace.worst()` says what
        is most likely wrong. What jit and checkpoint run as a whole runs op by op here, under
        the rules in force.

    Raises:
        ArgumentError: f is not callable, or does not return a Tensor.
        GradientError: an argument or the result cannot have a gradient.

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
        f: A function as `trace_gradients` takes it.

    Returns:
        A function of f's arguments that returns a `NonFinite`, or None if all is finite: the op,
        the line of your code that ran it, the element, what the op was given there, and the usual
        cure. An argument or a Variable that is not finite to begin with is reported as such. An
        infinity that spoils neither the result nor a gradient (a mask of -inf) is not a finding.

    Raises:
        ArgumentError, GradientError: as `trace_gradients`.

    >>> import regrad as rg
    >>> found = rg.find_nan(lambda x: rg.log(x).sum())(rg.tensor([1.0, 0.0]))
    >>> found.op_type, found.phase, found.what, found.index
    ('Log', 'forward', 'inf', (1,))
    """
    return nonfinite.searched(TapeRecorder(f, "find_nan"))


@helpful("gradient_path")
def gradient_path(f: Callable[..., Any], name: str) -> Callable[..., GradientPath]:
    """Return a function that runs `f`, and tells how the gradient comes to one of its inputs.

    Args:
        f: A function as `trace_gradients` takes it.
        name: What to follow: an argument or a Variable by its name, `"args[0]"`, `"w"`, as the
            inputs of a trace have it.

    Returns:
        A function of f's arguments that returns a `GradientPath`: the ops between the result and
        the input, each with its rule and its line, the norms of the gradients that arrived and
        that left towards it, and where it dies: where only zeros leave, or what is not finite, or
        where it is cut off. Print it for a table.

    Raises:
        ArgumentError: f is not differentiated by anything of that name.
        GradientError: as `trace_gradients`.

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
    """Return a function that compares the gradient of `f` with another one.

    Args:
        f: A function as `trace_gradients` takes it.
        other: None or `"true"`: the true gradient of f. All ops have their own rules, whatever
            scope is open, and custom functions are differentiated op by op. `"differences"`:
            central differences, in float64, of the arguments. Or another function of the same
            arguments.
        surrogates: Op types, names of rules, or names of arguments and Variables, whose gradients
            are meant to differ. `assert_same()` of the result passes them over.
        rtol: The tolerance, relative to the larger of both norms.

    Returns:
        A function of f's arguments that returns a `GradientComparison`: a row for each argument
        and Variable, and, next to the true gradient, a row for each input of each op under an
        override and of each custom function, in place: the gradient that arrived there goes
        through its rule and through its true derivative. (An override that lets no gradient
        pass, `"StopGradient"`, has no row of its own.)

    Raises:
        ArgumentError: f is not callable, or other is none of these.
        GradientError: an argument or the result cannot have a gradient, or the two gradients
            have other shapes.

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
    """Return a function that runs `f` and tells what its backward pass keeps in memory.

    Args:
        f: A function as `trace_gradients` takes it; it may return anything.

    Returns:
        A function of f's arguments that returns `SavedBytes`: bytes by op type and line of your
        code. An array that several ops keep is counted once, for the first. Views count as
        what they show.

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
    """Return a picture of what `f(*args)` runs.

    Args:
        f: A function of Tensors, arrays, numbers and containers of them that returns a Tensor, or
            a graph of `regrad.v1`.
        args: Its arguments, none for a graph.
        gradients: Whether to draw the ops of the backward pass, too.

    Returns:
        A `Drawing`: the ops that lead from the arguments, and from the Variables that f reads, on.
        What jit and checkpoint run as a whole is drawn op by op. Ops lie in the functions of yours
        that ran them; overridden ops and custom gradients stand out and name their rules. `svg`
        draws it with Graphviz, `html` writes a page to zoom, search and open scopes in, and a
        notebook shows it by itself.

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
    """Records, with the functions of the user's that were running when each was made."""

    def __init__(self) -> None:
        super().__init__()
        self.scopes: dict[int, tuple[str, ...]] = {}
        self.calls: dict[FrameType, str] = {}  # (frames are kept: no two have one id)
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
        """The names of these calls, without the function that is drawn, and without lambdas."""
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
    """A tape that knows in which calls of the user's functions its records were made."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__()
        self.entries: Any = _Scoped()
        # what runs outside of the function that is drawn is not a scope of the picture
        self.entries.outermost = sys._getframe(1)


def _drawing(run: TapeRecorder, title: str) -> Drawing:
    """The records of a run as boxes, what they take as arrows."""
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
