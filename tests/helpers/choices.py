"""How much of the tests runs: `make test`, `make test-all` (`--all`) or `make proof` (`--proof`).

A test with several options (libraries, dtypes, shapes, roads, forms of a rule) takes a few of them,
which a hash of its name chooses: other tests take the others. `make test` takes one option and
leaves out what is marked `slow`, `make test-all` takes two, and `make proof` takes all.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, TypeVar

T = TypeVar("T")
OPTIONS = {"test": 1, "test-all": 2, "proof": 1_000_000}  # by the targets of the Makefile
level = "test"  # tests/conftest.py sets it


def choose(name: object, options: Iterable[T]) -> list[T]:
    """Return one option, two, or all of them; a choice of two begins with the choice of one."""
    given = list(options)
    first = number(name) % max(len(given), 1)
    return [*given[first:], *given[:first]][: OPTIONS[level]]


def left_out(items: Iterable[Any]) -> set[Any]:
    """Return the slow tests that `make test` leaves out: but some of each `slow(but=some)`."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found: set[Any] = set()
    for cases in tests.values():
        kept = cases[0].get_closest_marker("slow").kwargs.get("but", 0)
        found.update(sorted(cases, key=lambda item: number(item.nodeid))[kept:])
    return found


def number(name: object) -> int:
    """Return a number that is the same in every process."""
    return int.from_bytes(blake2b(str(name).encode(), digest_size=8).digest())
