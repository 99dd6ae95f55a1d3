"""Traces: what one run of a body under JAX found out, and how a result says where it belongs."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from regrad.core.extras import needed
from regrad.core.reports import Hit
from regrad.core.tensor import Tensor
from regrad.transforms.replay import Captured

if TYPE_CHECKING:
    from regrad.autodiff.variables import Variable
    from regrad.transforms.region import Overrides
    from regrad.transforms.trail import Trail

Body = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Any]]  # results, and a note about them


class Trace:
    """The findings of one trace of a body; they travel with the compiled program.

    `flat` is the body, which is not run again: `derivatives` are made of what it did. `passage` are
    the inputs that tapes watch and the outputs to which they lead; `kept` says where the backward
    program finds what the rules keep.
    """

    note: Any = None  # that of the body, about its results
    count = 0  # how many results there are; after them come new values of Variables
    assigned: Sequence[Variable] = ()
    bindings: Overrides = None  # with the hits of the trace
    ran: Mapping[tuple[Any, ...], int] = {}  # how often rules ran in the forward program
    passage: Any = None
    kept: Sequence[tuple[str, Any]] = ()
    backward: Any = None
    dtypes: Sequence[Any] = ()  # of what arrives at the backward program
    jaxpr: Any = None  # the backward program, as JAX writes it

    def __init__(
        self, body: Body, name: str, bindings: Overrides, expected: Trail | None = None
    ) -> None:
        self.body = body
        self.bindings = bindings
        self.flat: Captured = Captured(self._values, name, expected)
        self.derivatives: dict[Any, Any] = {}  # each a Program

    @property
    def is_plain(self) -> bool:
        """True if there is nothing to know of a call but its results, and what it assigns."""
        return not (self.bindings or self.passage)

    def returns_like(self, other: Trace) -> bool:
        """Return whether the results of both are put together, and assigned, in the same way."""
        alike = self.note is other.note or self.note.closes_like(other.note)
        return alike and list(self.assigned) == list(other.assigned)

    def _values(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        ys, self.note = self.body(xs)
        return ys

    def hits(self) -> Iterator[tuple[Any, Hit]]:
        """The hits of the trace, by op type."""
        for key, binding in (self.bindings or {}).items():
            yield from ((key, hit) for hit in binding.hits)

    def report(self, overrides: Overrides, derived: bool, forward: bool = True) -> None:
        """Report the hits of the trace to the scopes in which its program runs now."""
        overrides = overrides or {}
        known = {key: b for key, b in (self.bindings or {}).items() if key in overrides}
        for key, binding in known.items() if forward and not derived else ():
            overrides[key].moved(binding)
        for key, hit in ((key, hit) for key, binding in known.items() for hit in binding.hits):
            before = self.ran.get((key, hit.where, hit.path), 0)
            count = 0 if derived or not forward else hit.count
            overrides[key].absorb(hit, count, before if forward else hit.ran - before)

    def rewind(self) -> None:
        """Forget that rules ran in the backward program, which is to be traced anew."""
        for key, hit in self.hits():
            hit.ran = self.ran.get((key, hit.where, hit.path), 0)


class SourceFound(Exception):
    """A trace came upon something from outside that was not an input yet."""


class Mark:
    """Stands before the results of a program, and says to which trace they belong.

    To JAX it is a container of nothing, which is a part of every call. So it is not made anew, but
    found, in one step of C: its structure is a dict that has it under `()`, the empty contents.
    JAX keeps the structure for good. A reference must not keep the user's function with it.
    """

    __slots__ = ("structure", "trace")

    def __init__(self, trace: Trace) -> None:
        self.trace: weakref.ref[Trace] = weakref.ref(trace)
        self.structure: _Structure = _Structure({(): self})

    def open(self) -> tuple[tuple[()], _Structure]:
        return (), self.structure


class _Structure(dict[tuple[()], Mark]):
    """The structure of one mark, and of no other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)


def find_jax(api: str = "a compiled function") -> Any:
    """Return JAX itself, or raise the error that says how to get it."""
    jax = needed("jax", "jax", api)
    if not _KNOWN:
        jax.tree_util.register_pytree_node(Mark, Mark.open, operator.getitem)
        _KNOWN.append(True)
    return jax


_KNOWN: list[bool] = []
