"""The stack of open sessions. The innermost is the default session."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from regrad.errors import GraphError


class Runs(Protocol):
    """The part of a Session that graphs use. (The module of Session imports graphs.)"""

    graph: Any

    def run(self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """Return the values of the fetches."""


SESSIONS: ContextVar[tuple[Runs, ...]] = ContextVar("regrad_default_session", default=())


def default_session(what: str) -> Runs:
    """Return the innermost open session. Raises ValueError if no session is open."""
    sessions = SESSIONS.get()
    if not sessions:
        raise GraphError(
            f"Cannot {what}: No default session is registered. Use `with sess.as_default()` or "
            f"pass an explicit session to `{what}(session=sess)`"
        )
    return sessions[-1]
