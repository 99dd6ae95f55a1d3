"""`draw` for functions of regrad: what ran, in the functions of yours that ran it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from regrad.core.backends import numpy_dtype
from regrad.core.callers import PACKAGE
from regrad.core.signatures import helpful
from regrad.core.tape import Record
from regrad.core.tensor import Tensor
from regrad.core.walk import name_of
from regrad.graph.graph import Graph
from regrad.inspection.drawings import Arrow, Box, BoxKind, Drawing, moved_in, unique
from regrad.inspection.tapes import Run, SeenTape, kind_of, op_type_of


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
    if isinstance(f, Graph):
        return f.draw()  # pyright: ignore[reportAttributeAccessIssue]
    run = Run(f, args, ScopedTape(), "draw", gradients=gradients)
    return _drawing(run, getattr(f, "__name__", type(f).__name__))


class _Scoped(list[Record]):
    """Records, with the functions of the user's that were running when each was made."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, str] = {}
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
        if frames:
            self.lines[id(record)] = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}"
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
        self.records: Any = _Scoped()
        # what runs outside of the function that is drawn is not a scope of the picture
        self.records.outermost = sys._getframe(1)


def _drawing(run: Run, title: str) -> Drawing:
    """The records of a run as boxes, what they take as arrows."""
    tape, records = run.tape, run.tape.records
    names = list(unique([name for name, _ in run.sources] + [op_type_of(r) for r in records]))
    made: dict[Any, str] = {}
    boxes = []
    for name, (_, x) in zip(names, run.sources, strict=False):
        made[x._id] = name
        kind: BoxKind = "input" if name.startswith("args") else "variable"
        boxes.append(Box(name, (name, _spec(x)), (), kind))
    arrows = []
    for i, record in enumerate(records):
        name = names[len(run.sources) + i]
        scope = records.scopes[id(record)]  # pyright: ignore[reportAttributeAccessIssue]
        if i >= run.forward:
            scope = ("gradients",)
        boxes.append(_box(name, record, tape, scope))
        for leaf, key in enumerate(record.inputs):
            if key in made:
                shape, _ = record.specs[leaf]
                label = f"{name_of(record, leaf)} {_shape_text(shape)}".strip()
                arrows.append(Arrow(made[key], name, label))
        outputs = record.outputs if isinstance(record.outputs, tuple) else (record.outputs,)
        made.update(dict.fromkeys(outputs, name))
    return Drawing(moved_in(boxes, arrows), tuple(arrows), title.strip("<>"))


def _box(name: str, record: Record, tape: SeenTape, scope: tuple[str, ...]) -> Box:
    kind, rule = kind_of(record.rule, record)
    lines = [op_type_of(record)]
    details = {"line": tape.line(record)}
    if kind != "built-in":
        lines.append(f"rule: {rule.partition(',')[0]}")
        details["rule"] = f"{kind}: {rule}"
    for leaf, (shape, dtype) in enumerate(record.specs):
        details[name_of(record, leaf)] = f"{numpy_dtype(dtype)} {_shape_text(shape)}"
    details.update((k, repr(v)) for k, v in record.attrs.items())
    box_kind: BoxKind = "op" if kind == "built-in" else kind
    return Box(name, tuple(lines), scope, box_kind, details)


def _spec(x: Tensor) -> str:
    return f"{x.dtype} {_shape_text(x.shape)}"


def _shape_text(shape: Sequence[Any]) -> str:
    return "×".join(map(str, shape)) or "scalar"
