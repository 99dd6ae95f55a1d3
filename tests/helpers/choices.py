"""How much of the tests runs: `make test`, `make test-all` (`--all`) or `make proof` (`--proof`).

A test with several options (libraries, dtypes, shapes, roads, forms of a rule) takes a few of them,
which a hash of its name chooses: other tests take the others. `make test` takes one option and
leaves out what is marked `slow`, `make test-all` takes two, and `make proof` takes all.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")
OPTIONS = {"test": 1, "test-all": 2, "proof": 1_000_000}  # by the targets of the Makefile
level = "test"  # tests/conftest.py sets it


def choose(name: object, options: Iterable[T]) -> list[T]:
    """Return one option, two, or all of them; a choice of two begins with the choice of one."""
    given = list(options)
    first = number(name) % len(given) if given else 0
    return [*given[first:], *given[:first]][: OPTIONS[level]]


def number(name: object) -> int:
    """Return a number that is the same in every process."""
    return int.from_bytes(blake2b(str(name).encode(), digest_size=8).digest())
