"""Attributes of third-party classes and modules that are replaced temporarily."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from itertools import starmap
from typing import Any

ABSENT: Any = object()  # marks an attribute that an owner does not define itself
_UNSEEN: Any = object()

# One replacement: the owner, the name, and a function from the old value to the new one.
Entrance = tuple[Any, str, Callable[[Any], Any]]


class Replacements:
    """Attributes that have other values from `make` to `undo`.

    regrad computes the new values once, and again only for attributes that other code has replaced
    in the meantime. (Scopes open and close in each training step.)
    """

    def __init__(self, find: Callable[[], Iterable[Entrance]]) -> None:
        self._find = find  # called at the first `make`, because it may import large packages
        self._makers: list[Callable[[Any], Any]] = []
        self._owners: list[Any] = []
        self._names: list[str] = []
        self._reads: list[Callable[[], Any]] = []  # return the current value of each attribute
        self._old: list[Any] = []
        self._new: list[Any] = []
        self._had: list[Any] = []  # owner, name and old value, to restore
        self._lacked: list[Any] = []  # owner and name, to delete
        self.are_made: bool = False

    def make(self) -> None:
        """Replace all attributes, unless they are replaced already."""
        if self.are_made:
            return
        self.are_made = True  # (first, because a finalizer may open another scope meanwhile)
        if not self._makers:
            rows = [*self._find()]  # (complete before any is stored, because it may raise)
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
        """Restore everything."""
        if self.are_made:
            if self._lacked:  # (first, because a metaclass may decide what its classes define)
                any(starmap(delattr, self._lacked))
            any(starmap(setattr, self._had))
            self.are_made = False


def put_back(owner: Any, name: str, old: Any) -> None:
    """Restore an owner's attribute, or delete it if the owner did not have it."""
    if old is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, old)
