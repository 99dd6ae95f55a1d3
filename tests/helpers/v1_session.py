"""What tests of graph mode share beside the fixtures of `conftest`."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.errors import UnusedOverrideWarning
from tests.helpers.rows import plain


def initialized(session: tf.Session) -> tf.Session:
    """The session, in which every Variable of the graph has its first value."""
    session.run(tf.global_variables_initializer())
    return session


def run(fetches: Any, feed: Any = None) -> Any:
    """The fetches in a session of their own, whose Variables have their first values."""
    with tf.Session() as session:
        return initialized(session).run(fetches, feed)


def values(tensors: Sequence[Any], feed: Any = None) -> list[Any]:
    """The value of each, in a session of its own; None stays None."""
    return [None if t is None else run(t, feed).tolist() for t in tensors]


def slope(y: Any, x: Any, feed: Any = None) -> Any:
    """The value of dy/dx."""
    return values(tf.gradients(y, x), feed)[0]


def overridden(rules: Any, build: Any, *args: Any) -> Any:
    """What `build` makes of the arguments, under these rules."""
    with tf.get_default_graph().gradient_override_map(rules):
        return build(*args)


@contextlib.contextmanager
def unused_is_fine() -> Iterator[None]:
    """No warning of a scope that matches nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedOverrideWarning)
        yield


@pytest.fixture
def jit_session(graph: tf.Graph) -> Iterator[tf.Session]:
    """A compiled session of the test's graph."""
    with tf.Session(jit=True) as session:
        yield session


@pytest.fixture
def all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sessions are compiled."""
    monkeypatch.setattr(tf, "Session", functools.partial(tf.Session, jit=True))


@pytest.fixture(params=[False, True], ids=["plain", "jit"])
def any_session(graph: tf.Graph, request: pytest.FixtureRequest) -> Iterator[tf.Session]:
    """A plain and a compiled session of the test's graph."""
    with tf.Session(jit=request.param) as session:
        yield session


def powers(x: Any, turns: Any, **options: Any) -> Any:
    """`x` to the power of `turns`, in a loop."""
    start = tf.constant(0), tf.ones_like(x)
    return tf.while_loop(lambda i, y: i < turns, lambda i, y: (i + 1, y * x), start, **options)[1]


def computed(rows: dict[str, Any]) -> Any:
    """Return a test of rows: a function of what is fed, its value, and each shape and array fed."""

    @pytest.mark.parametrize("name", rows)
    def test(name: str, session: tf.Session) -> None:
        build, due, *fed = rows[name]
        kinds = {"f": tf.float32, "i": tf.int32, "b": tf.bool}
        xs = [tf.placeholder(kinds[np.asarray(value).dtype.kind], shape) for shape, value in fed]
        feed = {x: value for x, (_, value) in zip(xs, fed, strict=True)}
        fetches = build(*xs)
        assert plain(initialized(session).run(fetches, feed)) == due

    return test
