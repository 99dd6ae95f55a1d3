"""Functions of regrad with a part of their source replaced."""

from __future__ import annotations

import inspect
import textwrap
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
