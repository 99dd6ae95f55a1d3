"""A library that regrad works in, as it may be one day: a private part is gone, or is another.

Each change is made in a process of its own, before regrad's module for that library is imported
there. So the library is imported first, in the process that is forked.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from regrad.core import hosts

Change = Callable[[str], None]


# -- changes ---------------------------------------------------------------------------------------


def nothing(path: str) -> None:
    """Nothing is changed."""


def hide(path: str) -> None:
    """What the library itself has is where it was, and regrad finds nothing: it was renamed."""
    resolve = hosts.resolve

    def found(each: str) -> Any:
        if each == path:
            raise AttributeError(f"there is no {path} any more")
        return resolve(each)

    hosts.resolve = found


def turn_into_c(path: str) -> None:
    """What was written in Python is a builtin: it has no code, no signature, and no attributes."""
    resolve = hosts.resolve
    hosts.resolve = lambda each: len if each == path else resolve(each)


def leave_behind(path: str) -> None:
    """It is there as it was, and the library uses another: only running programs can tell."""
    run_promises()
    resolve = hosts.resolve
    hosts.resolve = lambda each: _copy(resolve(each)) if each == path else resolve(each)


def run_promises() -> None:
    """Take any version for one that is newer than all that were tested."""
    hosts.Host.is_tested = property(lambda host: False)


def _copy(found: Any) -> Any:
    if isinstance(found, type):
        return type(found.__name__, (found,), dict(vars(found)))
    return found.copy() if isinstance(found, dict) else SimpleNamespace(**vars(found))


def delete(path: str) -> None:
    """It is gone for everybody."""
    owner, _, name = path.rpartition(".")
    delattr(hosts.resolve(owner), name)


CHANGES: dict[str, Change] = {
    "nothing": nothing, "hide": hide, "turn into C": turn_into_c, "delete": delete,
    "leave behind": leave_behind,
}  # fmt: skip


# -- one process a change --------------------------------------------------------------------------


def in_child(task: Callable[[], Any]) -> Any:
    """Return what a task returns in a process of its own."""
    end, start = os.pipe()
    if not (child := os.fork()):
        try:
            answer = task()
        except BaseException:
            answer = traceback.format_exc()
        os.write(start, json.dumps(answer).encode())
        os._exit(0)
    os.close(start)
    with open(end, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer or '"the process died"')


def parts_of(host: hosts.Host) -> list[tuple[str, str]]:
    """Return all private parts that were taken of a library, and the feature of each."""
    return [(feature.name, path) for feature in host.features for path, _ in feature.parts]


def main(cases: Iterable[tuple[str, str]], changed: Callable[[str, str], dict[str, str]]) -> None:
    """Print a line of JSON for each change, or for each n-th: what became of the programs."""
    part, of = map(int, sys.argv[1:3] or (0, 1))
    for kind, path in list(cases)[part::of]:
        print(json.dumps([kind, path, in_child(lambda k=kind, p=path: changed(k, p))]), flush=True)
