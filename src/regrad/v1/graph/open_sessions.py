"""The sessions that are open; the innermost is the default one."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from regrad.errors import GraphError

if TYPE_CHECKING:
    from regrad.v1.run.session import Session

SESSIONS: ContextVar[tuple[Session, ...]] = ContextVar("regrad_default_session", default=())


def get_default_session() -> Session | None:
    """Return the innermost session whose block is open, or None.

    Returns:
        The Session, or None.

    Source: `tf.get_default_session`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(tf.get_default_session() is sess)
    True
    """
    sessions = SESSIONS.get()
    return sessions[-1] if sessions else None


def default_session(what: str) -> Session:
    """Return the default session; ValueError if there is none."""
    session = get_default_session()
    if session is None:
        raise GraphError(
            f"Cannot {what}: No default session is registered. Use `with sess.as_default()` or "
            f"pass an explicit session to `{what}(session=sess)`"
        )
    return session
