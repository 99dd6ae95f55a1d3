"""The results of a Python loop, tied together as in a compiled loop.

A compiled loop has one backward step for all of its steps, so it uses a carry if *any* step uses
it; at the last step, the carry's rule may run with a gradient of 0 (`jax.lax.scan` does the same).
The tapes of a Python loop have a record for each step, and would drop the last value of this carry.
So the loop ends with one record from its results to the same results. Its rule makes zeros for the
carries that some step uses. No override, trace or hit sees this record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from regrad.autodiff.variables import LOOPS, Variable, assign_all
from regrad.core.blocks import block, stay
from regrad.core.containers import replaced
from regrad.core.dispatch import rename
from regrad.core.registry import Input, Op
from regrad.core.rule import Rule
from regrad.core.state import State, current
from regrad.core.tape import TIED, made, record
from regrad.core.walk import UNUSED
from regrad.transforms.region import is_watched, links_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from regrad.core.rule import Cotangent
    from regrad.core.tape import Record
    from regrad.core.tensor import Tensor

TIE = Op(TIED, "tie", lambda xp, xs: tuple(xs), [Input("xs", "many")], several=True,
         holomorphic=False)  # fmt: skip


class PythonLoop:
    """A loop that Python runs: the ids of the carries at the beginning of its steps."""

    def __init__(self) -> None:
        self.state: State = current() or State()
        self.starts: list[int] = [len(tape.entries) for tape in self.state.tapes]
        self.begun: dict[int | Variable, set[Any]] = defaultdict(set)
        self.taken: set[Any] = set()  # ids that carries have had
        self.assigned: set[Variable] = set()  # in the running step

    def begin(self, carry: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the carry at the beginning of a step: Tensors without any other use."""
        self.assigned.clear()
        if not self.state.tapes:
            return carry
        carry, again = self._inside(carry), []
        for place, x in enumerate(carry):
            if not self.begun or x._id in self.taken:
                again.append(place)
            self.taken.add(x._id)
        carry = replaced(carry, again, _tie([carry[i] for i in again], TieRule((), ())))
        for place, x in enumerate(carry):
            self.begun[place].add(x._id)
            self.taken.add(x._id)
        return carry

    def _inside(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the stand-ins of Tensors in the region of the loop, whose tapes watch them."""
        region = self.state.region
        return xs if region is None else [*map(region.enter, xs)]

    def assign(self, variable: Variable) -> None:
        """Record that a Variable is about to be assigned: from now on the loop carries it."""
        here = current() or State()
        if here.region is self.state.region and variable not in self.assigned:
            self.assigned.add(variable)
            self.begun[variable].add(variable._read()._id)

    def tied(self, carry: Sequence[Tensor], ys: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return the results, as outputs of one record."""
        n, variables = len(carry), [v for v in self.begun if isinstance(v, Variable)]
        carries = [*carry, *[v._read() for v in variables]]
        xs = self._inside((*carries, *ys))
        if not carries or len(xs) < 2 or not any(is_watched(x, self.state) for x in xs):
            return carry, ys
        tapes = zip(self.state.tapes, self.starts, strict=True)
        begun = [self.begun[key] for key in (*range(n), *variables)]
        rule = TieRule(begun, [tape.entries[start:] for tape, start in tapes])
        outputs = _tie(xs, rule)
        assign_all(variables, outputs[n : len(carries)])
        return outputs[:n], outputs[len(carries) :]


def _tie(xs: Sequence[Tensor], rule: Rule) -> tuple[Tensor, ...]:
    """Return the same values as outputs of one record."""
    ys = tuple(map(rename, xs))
    return record(TIE, tuple(xs), {}, ys, (tuple(range(len(ys))),), rule) if ys else ys


@block
def python_loop() -> Generator[PythonLoop]:
    """Run a Python loop in this block; the loop records assignments to Variables."""
    loop = PythonLoop()
    yield from stay(loop, LOOPS, (*LOOPS.get(), loop))


class TieRule(Rule):
    """Returns the incoming gradients, with zeros for carries that only a step uses.

    `begun` are the ids of each carry at the beginning of the steps. `entries` are the records of
    the steps, one list for each tape.
    """

    each = True
    sparse = True

    def __init__(self, begun: Sequence[set[Any]], entries: Sequence[Sequence[Any]]) -> None:
        self.begun = begun
        self.entries = entries

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return True

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Any:
        dys: list[Any] = [UNUSED if d is None else d for d in dy]
        given = {place for place, d in enumerate(dy) if d is not None}
        for place in self.used(record.inputs, given) - given:
            dys[place] = record.unused(place)  # pyright: ignore (it is grouped)
        return [(0, dys)]

    def used(self, inputs: Sequence[Any], used: Iterable[int]) -> set[int]:
        """Return the places of results that are used, and of carries that lead to them."""
        used = set(used)
        while not used.issuperset(range(len(self.begun))):
            keys = {inputs[place] for place in used}
            for entries in self.entries:
                _add_sources(keys, entries)
            more = {place for place, ids in enumerate(self.begun) if not keys.isdisjoint(ids)}
            if used.issuperset(more):
                break
            used |= more
        return used


def _add_sources(keys: set[Any], entries: Sequence[Any]) -> None:
    """Add the ids of everything that leads to these through records of a tape."""
    for entry in made(reversed(entries)):
        if isinstance(entry.rule, TieRule):
            given = [place for place, key in enumerate(entry.outputs) if key in keys]
            used = entry.rule.used(entry.inputs, given) if given else ()
            keys.update(entry.inputs[place] for place in used)
        else:
            for inputs, outputs in links_of(entry):
                if not keys.isdisjoint(outputs):
                    keys.update(inputs)
