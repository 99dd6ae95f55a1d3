"""`trace_gradients` of a graph: its backward pass, run once, with figures of every gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regrad.core.tensor import TensorLike
from regrad.core.walk import name_of
from regrad.errors import ArgumentError
from regrad.graph.graph import Node
from regrad.inspection.numbers import Numbers, numbers_of, together
from regrad.inspection.tapes import kind_of
from regrad.inspection.traces import GradientTrace, Step
from regrad.v1.graph.gradients import build_gradients
from regrad.v1.graph.open_sessions import SESSIONS, Runs
from regrad.v1.graph.tensors import face

__all__ = ["trace_gradients"]


def trace_gradients(
    ys: TensorLike, xs: TensorLike, feed_dict: Mapping[Any, Any] | None = None,
    session: Runs | None = None,
) -> GradientTrace:  # fmt: skip
    """Run the gradients of `ys` by `xs` in a session, and tell what ran backward.

    Args:
        ys, xs: As for `tf.gradients`.
        feed_dict: What the run is fed.
        session: The session to run in; by default the one whose block is open.

    Returns:
        A `GradientTrace`, as `regrad.trace_gradients` has it: for each op of the graph its rule,
        its name with the name scopes as `path`, and figures of the gradients that arrived and
        left. The gradients are new ops of the graph, in the name scope `trace_gradients`.

    Raises:
        ArgumentError: no session is given, and none is open.
        LookupError, ValueError: as `tf.gradients`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session():
    ...     x = tf.constant([1.0, 2.0])
    ...     trace = tf.trace_gradients(tf.sin(x * x), x)
    >>> [step.path for step in trace.steps]
    ['Sin', 'mul']
    """
    session = session or next(reversed(SESSIONS.get()), None)
    if session is None:
        raise ArgumentError("trace_gradients: give a session, or call it in the block of one")
    seen: list[tuple[Node, Any, int, Any]] = []
    with session.graph.as_default():
        made = build_gradients(ys, xs, None, "trace_gradients", None, "none", seen)
    found = [None if dx is None else dx._read() for dx in made]
    tensors = [t for _, dy, _, dx in seen for t in (*_parts(dy), dx) if t is not None]
    wanted = {t._data.id: t for t in [*tensors, *[dx for dx in found if dx is not None]]}
    values = session.run([face(t) for t in wanted.values()], feed_dict)
    figures = {key: numbers_of(value) for key, value in zip(wanted, values, strict=True)}
    names = [getattr(x, "name", "") for x in (xs if isinstance(xs, list | tuple) else [xs])]
    inputs = [(name, _of(figures, dx)) for name, dx in zip(names, found, strict=True)]
    return GradientTrace(tuple(_steps(seen, figures)), tuple(inputs))


def _parts(dy: Any) -> tuple[Any, ...]:
    """The gradients that arrived at an op, of all outputs."""
    return dy if isinstance(dy, tuple) else (dy,)


def _of(figures: Mapping[int, Numbers], t: Any) -> Numbers | None:
    return None if t is None else figures[t._data.id]


def _steps(seen: list[tuple[Node, Any, int, Any]], figures: Mapping[int, Numbers]) -> list[Step]:
    """One step for each op, in the order of the backward pass."""
    steps: dict[Node, tuple[Any, list[Any]]] = {}
    for node, dy, leaf, dx in seen:
        steps.setdefault(node, (dy, []))[1].append((name_of(node, leaf), _of(figures, dx)))
    made = []
    for node, (dy, left) in steps.items():
        kind, rule = kind_of(node.rule, node)
        arrived = together(_of(figures, part) for part in _parts(dy))
        made.append(Step(node.op.type, kind, rule, "", node.name, arrived, tuple(left)))
    return made
