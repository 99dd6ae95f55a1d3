"""Attributes of other people's classes and modules that are replaced for a while."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from itertools import starmap
from typing import Any

ABSENT: Any = object()  # stands for an attribute that an owner does not have of its own
_UNSEEN: Any = object()

# What is replaced: owner, name, and the maker of the new value from the old one.
Entrance = tuple[Any, str, Callable[[Any], Any]]


class Replacements:
    """Attributes that have other values from `make` to `undo`.

    The new values are made once, and anew only for what others have replaced meanwhile: scopes open
    and close in each step of a training.
    """

    def __init__(self, find: Callable[[], Iterable[Entrance]]) -> None:
        self._find = find  # called at the first `make`: it may import much
        self._makers: list[Callable[[Any], Any]] = []
        self._owners: list[Any] = []
        self._names: list[str] = []
        self._reads: list[Callable[[], Any]] = []  # what each owner holds by its name now
        self._old: list[Any] = []
        self._new: list[Any] = []
        self._had: list[Any] = []  # owner, name and old value, of what is put back
        self._lacked: list[Any] = []  # owner and name, of what is deleted again
        self.are_made: bool = False

    def make(self) -> None:
        """Replace all attributes, unless they are replaced already."""
        if self.are_made:
            return
        self.are_made = True  # (first: a finalizer may open a scope of its own meanwhile)
        if not self._makers:
            rows = [*self._find()]  # (all, before any is kept: it may raise)
            self._owners = [owner for owner, _, _ in rows]
            self._names = [name for _, name, _ in rows]
            self._reads = [partial(vars(owner).get, name, ABSENT) for owner, name, _ in rows]
            self._old, self._new = [_UNSEEN] * len(rows), [None] * len(rows)
            self._makers = [maker for _, _, maker in rows]
        now = [read() for read in self._reads]
        if not all(map(operator.is_, now, self._old)):
            for i, (old, make) in enumerate(zip(now, self._makers, strict=True)):
                if old is not self._old[i]:
                    self._new[i] = make(old)
            self._old = now
            rows = [*zip(now, self._owners, self._names, strict=True)]
            self._had = [(*row, old) for old, *row in rows if old is not ABSENT]
            self._lacked = [row for old, *row in rows if old is ABSENT]
        any(map(setattr, self._owners, self._names, self._new))  # (a loop in C)

    def undo(self) -> None:
        """Put everything back."""
        if self.are_made:
            if self._lacked:  # (first: a metaclass may decide on what its classes hold)
                any(starmap(delattr, self._lacked))
            any(starmap(setattr, self._had))
            self.are_made = False


def put_back(owner: Any, name: str, old: Any) -> None:
    """Have an owner hold again what it held by a name, if anything."""
    if old is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, old)
