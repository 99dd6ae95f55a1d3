"""`trace_gradients` of a graph: one run of its backward pass, with statistics of each gradient."""

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
from regrad.v1.graph.tensors import SESSIONS, Runs

__all__ = ["trace_gradients"]


def trace_gradients(
    ys: TensorLike, xs: TensorLike, feed_dict: Mapping[Any, Any] | None = None,
    session: Runs | None = None,
) -> GradientTrace:  # fmt: skip
    """Run the gradients of `ys` in a session, and report every op of the backward pass.

    Args:
        ys, xs: See `tf.gradients`.
        feed_dict: The feeds of the run.
        session: The session to run in, by default the default session.

    Returns:
        A `GradientTrace`, as from `regrad.trace_gradients`. For each op it has the rule, the name
        with name scopes as `path`, and statistics of the incoming and outgoing gradients. The
        gradients are new ops of the graph, in the name scope `trace_gradients`.

    Raises:
        ArgumentError: `session` is missing, and no session is open.
        LookupError, ValueError: see `tf.gradients`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session():
    ...     x = tf.constant([1.0, 2.0])
    ...     trace = tf.trace_gradients(tf.sin(x * x), x)
    >>> [step.path for step in trace.steps]
    ['Sin', 'mul']
    """
    session = session or next(reversed(SESSIONS.get()), None)
    if session is None:
        raise ArgumentError("trace_gradients: pass a session, or call it in the block of a session")
    seen: list[tuple[Node, Any, int, Any]] = []
    with session.graph.as_default():
        made = build_gradients(ys, xs, None, "trace_gradients", None, "none", seen)
    found = [None if dx is None else dx._read() for dx in made]
    tensors = [*found, *[t for _, dy, _, dx in seen for t in (*_parts(dy), dx)]]
    values = session.run({t._data.id: t for t in tensors if t is not None}, feed_dict)
    figures = {key: numbers_of(value) for key, value in values.items()}
    names = [getattr(x, "name", "") for x in (xs if isinstance(xs, list | tuple) else [xs])]
    inputs = [(name, _of(figures, dx)) for name, dx in zip(names, found, strict=True)]
    return GradientTrace(tuple(_steps(seen, figures)), tuple(inputs))


def _parts(dy: Any) -> tuple[Any, ...]:
    """Return the gradients of all outputs of an op."""
    return dy if isinstance(dy, tuple) else (dy,)


def _of(figures: Mapping[int, Numbers], t: Any) -> Numbers | None:
    return None if t is None else figures[t._data.id]


def _steps(seen: list[tuple[Node, Any, int, Any]], figures: Mapping[int, Numbers]) -> list[Step]:
    """Return one step for each op, in the order of the backward pass."""
    steps: dict[Node, tuple[Any, list[Any]]] = {}
    for node, dy, leaf, dx in seen:
        steps.setdefault(node, (dy, []))[1].append((name_of(node, leaf), _of(figures, dx)))
    made = []
    for node, (dy, left) in steps.items():
        kind, rule = kind_of(node.rule, node)
        arrived = together(_of(figures, part) for part in _parts(dy))
        made.append(Step(node.op.type, kind, rule, "", node.name, arrived, tuple(left)))
    return made
