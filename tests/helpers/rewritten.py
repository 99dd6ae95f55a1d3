"""Functions of regrad that are changed: with other source, or struck by a handler."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def rewritten(owner: Any, name: str, old: str, new: str) -> Any:
    """Return a function of a module or a class, rewritten with `new` in place of `old`.

    A line of `old` may stay: it is `{}` in `new`.
    """
    function = inspect.unwrap(getattr(owner, name))
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{name} has no {old!r}"
    (line,) = [line for line in source.splitlines() if old in line][:1]
    indent = line[: len(line) - len(line.lstrip())]
    new = new.replace("{}", old).replace("\n", "\n" + indent)
    made: dict[str, Any] = {}
    exec(source.replace(old, new), function.__globals__, made)
    return made[name]


def strike(road: Any, handler: Callable[[], Any]) -> None:
    """Run a handler in the next call of a generated road, right after its compiled program."""
    scope = road.__globals__
    compiled = scope["compiled"]

    def struck(*arrays: Any) -> Any:
        found = compiled(*arrays)
        scope["compiled"] = compiled
        handler()
        return found

    scope["compiled"] = struck
