"""Trails: check that Python that runs again does the same.

In eager mode, `checkpoint` must free the intermediate values of its body, so the user's Python runs
a second time for the gradient. A trail, of bounded size, checks that the second run does the same
as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from regrad.core import containers
from regrad.core.backends import is_traced
from regrad.core.callers import find_caller
from regrad.core.files import checksum
from regrad.core.registry import Op
from regrad.core.rule import Rule
from regrad.core.state import State, current
from regrad.core.tape import Place
from regrad.core.tensor import Readable, Tensor
from regrad.errors import GradientError

if TYPE_CHECKING:
    from regrad.autodiff.custom_calls import CustomCall
    from regrad.autodiff.variables import Variable
    from regrad.core.backends import Array
    from regrad.core.registry import Attrs
    from regrad.core.tape import Result

PLAIN = (bool, int, float, complex, str, bytes, type(None), np.dtype, slice, type(...))
LIMIT = 4096  # maximum number of digests in a trail

# A value that a body reaches through its closure.
Reached: TypeAlias = "Tensor | Variable | Array"


class Trail:
    """The ops that a body ran, in order, as a fingerprint of bounded size.

    The fingerprint covers op types, attributes, wiring and the values of constants. A second run
    with the trail of the first (`expected`) raises at the first difference. `sources` are the
    values that the body reached outside, each with the id of its stand-in.
    """

    patchy = False

    def __init__(self, kind: str, xs: Sequence[Tensor], expected: Trail | None = None) -> None:
        self.kind = kind
        self.expected = expected
        # The origin of each Tensor.
        self.places: dict[float, Any] = {x._id: ("input", i) for i, x in enumerate(xs)}
        self.outputs: int = 0
        self.sources: list[tuple[Any, float]] = []
        self.inner: dict[float, Tensor] = {}  # the stand-ins of the sources
        self.assigned: dict[Any, Tensor] = {}  # by Variable
        for source, _ in () if expected is None else expected.sources:
            self.source(source, resolved(source))
        self.places_chosen: list[Any] = []  # of ops whose rule depends on their place
        self.digest = 0
        self.count: int = 0
        self.stride: int = 1  # number of ops per digest
        self.digests: list[int] = []

    def did(
        self, op: Op, rule: Rule, xs: Sequence[Tensor], attrs: Attrs, y: Result,
        layout: tuple[Place, ...] | None = None,
    ) -> None:  # fmt: skip
        """Record an op that ran."""
        self.went(op.type, xs, y if isinstance(y, tuple) else (y,), attrs)

    def custom(self, call: CustomCall, run: Callable[[], Any], state: State) -> Any:
        """Run a custom function, whose ops are steps as well."""
        value = run()
        inputs = call.inputs  # (with the Variables that f has read)
        outputs = call.recorded(value, state)
        self.went(call.name, inputs, containers.flatten(outputs)[0])
        return outputs

    def region(
        self,
        kind: str,
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        again: Any,
        rule: Any,
    ) -> None:
        """Record a region that ran."""
        self.went(kind, xs, ys)

    def foreign(
        self,
        function: Callable[[Sequence[Array]], Sequence[Array]],
        read: Callable[[Tensor], Array],
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
    ) -> None:
        """Record a computation of another library."""
        self.went("a function of another library", xs, ys)

    def body(self, captured: Any, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        """Record an inner body that ran for the first time and was captured."""
        self.went("a body", xs, ys)

    def assign(self, variable: Variable, value: Tensor) -> None:
        """Record an assignment to a Variable."""
        self.assigned[variable] = value

    def read(self, variable: Variable, value: Tensor) -> None:
        """Record a read of a Variable: a source, unless the body has assigned to it."""
        if variable not in self.assigned:
            self.source(variable, value)

    def source(self, source: Reached, inner: Tensor) -> None:
        """Record a value from outside, whose stand-in is `inner`."""
        self.inner[inner._id] = inner
        self.reach(source, inner._id)

    def reach(self, source: Reached, number: float) -> None:
        """Record the id of the stand-in of a value from outside."""
        if number > 0 and number not in self.places:
            self.places[number] = "outside", len(self.sources)
            self.sources.append((source, number))

    def let_go(self) -> dict[float, Tensor]:
        """Drop all Tensors of the run, and return the stand-ins of the sources."""
        inner, self.inner = self.inner, {}
        return inner

    def went(
        self, label: str, xs: Sequence[Tensor], ys: Sequence[Tensor],
        attrs: Attrs | None = None,
    ) -> None:  # fmt: skip
        """Record one step from xs to ys."""
        shown = [(k, _shown(v)) for k, v in (attrs or {}).items()]
        here = label, str(shown), tuple([self._origin(x) for x in xs])
        self.digest: int = hash((self.digest, here))
        self.count += 1
        self.made(ys)
        if self.expected is not None:
            self.expected.compare(self, label)
        if self.count % self.stride == 0:
            self.digests.append(self.digest)
            if len(self.digests) > LIMIT:
                self.digests, self.stride = self.digests[1::2], 2 * self.stride

    def made(self, ys: Sequence[Tensor]) -> None:
        """Record the Tensors that a step made."""
        for y in ys:
            self.places[y._id] = "output", self.outputs
            self.outputs += 1

    def _origin(self, x: Tensor) -> Any:
        """Return the origin of a Tensor: a step, an input, or a constant with its values."""
        known = self.places.get(x._id)
        if known is not None:
            return known
        spec = str(x.dtype), x.shape
        if is_traced(x._data):
            return spec
        values = x._values()
        return *spec, repr(values.tolist()) if values.dtype.hasobject else checksum(values)

    def compare(self, now: Trail, label: str) -> None:
        """Raise if another run has deviated from this trail."""
        i, rest = divmod(now.count, self.stride)
        if now.count > self.count or (rest == 0 and self.digests[i - 1] != now.digest):
            raise self.left(f"the op {label!r} (at {find_caller()})", now.count)

    def finished(self, now: Trail) -> None:
        """Raise unless another run, which has ended, followed the whole trail and nothing more."""
        if now.count != self.count or now.digest != self.digest:
            raise self.left("the end", now.count + 1)

    def left(self, label: str, count: int) -> GradientError:
        """Return the error for a body that behaves differently when it runs again."""
        about = "" if self.stride == 1 else f", or one of the {self.stride - 1} before it"
        return GradientError(
            f"the gradient of {self.kind} runs its function again, and the second run did not do "
            "the same as the first; the gradient would be another function's. The first "
            f"difference is {label}, number {count} of {self.count} ops{about}. The function must "
            "do the same in every call: pass changing values (a number, the variable of a loop, "
            "random numbers) as an argument, or bind them: lambda x, k=k: …"
        )


def _shown(value: object) -> str:
    """Return an attribute in comparable form; for an object that is not plain, only its type."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return repr(value) if isinstance(value, PLAIN) else type(value).__name__


def capturing() -> Any:
    """Return the active capture or trail, or None."""
    state = current()
    return None if state is None or state.region is None else state.region.capture


def resolved(source: Reached) -> Tensor:
    """Return the stand-in, in the open region, for a value that a body reached outside."""
    state = current()
    assert state is not None
    if isinstance(source, Readable):
        return state.region.read(source)
    return state.region.enter(source) if isinstance(source, Tensor) else state.region.array(source)
