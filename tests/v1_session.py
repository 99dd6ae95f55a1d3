"""What tests of graph mode do with a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import regrad.v1 as tf


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
