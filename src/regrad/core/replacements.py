"""Attributes of other people's classes and modules that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
        self._rows: list[list[Any]] = []  # owner, name, maker, old value, new value
        self._are_made = False

    def make(self) -> None:
        """Replace all attributes, unless they are replaced already."""
        if self._are_made:
            return
        self._are_made = True  # (first: a finalizer may open a scope of its own meanwhile)
        if not self._rows:
            self._rows += [[*entrance, _UNSEEN, None] for entrance in self._find()]
        for row in self._rows:
            owner, name, maker, old, new = row
            now = vars(owner).get(name, ABSENT)
            if now is not old:
                row[3:] = now, (new := maker(now))
            setattr(owner, name, new)

    def undo(self) -> None:
        """Put everything back."""
        if self._are_made:
            for owner, name, _, old, _ in reversed(self._rows):
                if old is ABSENT:  # (as `put_back`: a call less for each)
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)
            self._are_made = False


def put_back(owner: Any, name: str, old: Any) -> None:
    """Have an owner hold again what it held by a name, if anything."""
    if old is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, old)
