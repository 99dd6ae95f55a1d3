"""Traces: the findings of one run of a body under JAX, and marks that link results to them."""

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

Body = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Any]]  # results, and their structure


class Trace:
    """The findings of one trace of a body; they belong to the compiled program.

    `flat` is the body, which does not run again: `derivatives` are made from its steps. `passage`
    has the inputs that tapes watch and the outputs to which they lead. `kept` lists where the
    backward program finds the values that the rules keep.
    """

    note: Any = None  # the structure of the body's results
    count = 0  # the number of results; new values of Variables follow them
    assigned: Sequence[Variable] = ()
    bindings: Overrides = None  # with the hits of the trace
    ran: Mapping[tuple[Any, ...], int] = {}  # how often rules ran in the forward program
    passage: Any = None
    kept: Sequence[tuple[str, Any]] = ()
    backward: Any = None
    dtypes: Sequence[Any] = ()  # of the incoming gradients in the backward program
    jaxpr: Any = None  # the backward program as a JAX jaxpr

    def __init__(
        self, body: Body, name: str, bindings: Overrides, expected: Trail | None = None
    ) -> None:
        self.body = body
        self.bindings = bindings
        self.flat: Captured = Captured(self._values, name, expected)
        self.derivatives: dict[Any, Any] = {}  # each a Program

    @property
    def is_plain(self) -> bool:
        """Return True if a call has only results and assignments."""
        return not (self.bindings or self.passage)

    def returns_like(self, other: Trace) -> bool:
        """Return whether both traces assemble and assign their results in the same way."""
        alike = self.note is other.note or self.note.closes_like(other.note)
        return alike and list(self.assigned) == list(other.assigned)

    def _values(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        ys, self.note = self.body(xs)
        return ys

    def hits(self) -> Iterator[tuple[Any, Hit]]:
        """Yield the hits of the trace, by op type."""
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
        """Forget that rules ran in the backward program, which will be traced again."""
        for key, hit in self.hits():
            hit.ran = self.ran.get((key, hit.where, hit.path), 0)


class SourceFound(Exception):
    """Raised when a trace captures a value that was not an input yet."""


class Mark:
    """Precedes the results of a program, and identifies the trace to which they belong.

    For JAX, a mark is an empty container, which is a part of every call. So JAX must not create it,
    but look it up in one step of C: its structure is a dict with the mark under `()`, the empty
    contents. JAX keeps the structure forever, so a reference must not keep the user's function
    alive.
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
    """Return the jax module, or raise an error with installation instructions."""
    jax = needed("jax", "jax", api)
    if not _KNOWN:
        jax.tree_util.register_pytree_node(Mark, Mark.open, operator.getitem)
        _KNOWN.append(True)
    return jax


_KNOWN: list[bool] = []
