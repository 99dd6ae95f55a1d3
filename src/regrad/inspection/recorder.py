"""One recorder under all tools of inspection.

A *recorder* runs a function of its library, and then the backward pass, and tells a *tool* of each
op; a tool knows no library. This one prints what the rules of a function make of the gradients:

    class Norms(Tool):
        def left(self, op, dxs, dys):
            for name, dx in dxs:
                print(op.op_type, op.rule, name, recorder.figures(dx))

    recorder = TapeRecorder(f, "norms")          # that of regrad's functions
    recording = recorder.run(args, {}, Norms())  # its leaves have the gradients

What a recorder calls, in this order, for each op on the way:

    ran(op, xs, ys)         forward, only for tools that set `keeps`: xs are pairs (name, array)
    arrived(op, dys)        backward: the gradients of the outputs, None for none
    left(op, dxs, dys)      backward: dxs are pairs (name of an input, its gradient)

| tool | its record, its file here | asks the recorder for |
|---|---|---|
| `trace_gradients` | `GradientTrace`, traces | `figures` |
| `gradient_path` | `GradientPath`, paths | `figures`, and what `op.takes` and `op.makes` |
| `find_nan` | `NonFinite`, nonfinite | `keeps`, `bad`, `type_of` |
| `compare_gradients` | `GradientComparison`, comparisons | `op.true(dys)`, and another recording |
| `check_gradients` | `GradientReport`, checks | a `Library`; of ops `xs` and `again(xs)` |
| `saved_bytes` | `SavedBytes`, saved | `kept`: what the backward pass keeps |
| `draw` | `Drawing`, drawings | a `Sketch` with what each op takes and makes, by keys |

Each is there for regrad (`tools`, recorder in `tapes`), for PyTorch (`torch/seeing/tools`, over the
`Looker` in `watching`) and for JAX (`jax/tools`, over `running`). A new tool is one file here, and
a function of a line in each of the three. Only pictures and checks have files of their own there:
a program of JAX is drawn without being run, and of a torch function the calls are drawn, not the
nodes; what else a check needs of a library is how it differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from regrad.autodiff.gradients import callable_or_raise
from regrad.inspection.numbers import numbers_of

RuleKind = Literal["built-in", "override", "custom"]
Named = Sequence[tuple[str, Any]]
Bad = tuple[str, tuple[int, ...], int]
Kept = tuple[str, str, str, int]  # op type, line, path, bytes


def located(op_type: str, line: str, path: str) -> str:
    """An op with its module and its line, for a message."""
    return op_type + (f" in {path}" if path else "") + (f" at {line}" if line else "")


@dataclass(slots=True, eq=False)
class SeenOp:
    """One op that ran: its type, whose rule it has, the line of the user's code, and the module.

    `takes` are the keys of its differentiated inputs, as `left` has them, and `makes` those of its
    outputs. The ops of a recorder may also have `true(dys)`, their true gradients by these inputs.
    """

    op_type: str
    kind: RuleKind = "built-in"
    rule: str = ""
    line: str = ""
    path: str = ""
    takes: Sequence[Any] = ()
    makes: Sequence[Any] = ()

    @property
    def place(self) -> str:
        """The op with its module and its line, for a message."""
        return located(self.op_type, self.line, self.path)

    @property
    def where(self) -> dict[str, str]:
        """The place where the op ran, as a finding has it, where its title does not say it."""
        return {}

    @property
    def first(self) -> Any:
        """The op that keeps what this one was given: itself, if it was not made of several."""
        return self


class Tool:
    """Looks on while a recorder runs a function; tools say what they want to see."""

    # whether `ran` is called, and ops keep what they are given: those with a rule, or all
    keeps: Literal["", "rules", "all"] = ""
    again = False  # whether ops can be run again
    done = False  # whether it has seen enough of the forward pass

    def ran(self, op: Any, xs: Named, ys: Sequence[Any], writes: bool = False) -> None:
        """An op ran forward; it `writes` if it makes infinities that somebody asked for."""

    def arrived(self, op: Any, dys: Sequence[Any]) -> None:
        """Gradients arrived at an op, and its rule is about to run."""

    def left(self, op: Any, dxs: Named, dys: Sequence[Any]) -> None:
        """Gradients left an op."""


class Leaf(NamedTuple):
    """An array that is differentiated by.

    `key` is the one by which ops take it, `same` the one that it has in another recording as well.
    """

    name: str
    kind: Literal["argument", "parameter"]
    x: Any
    gradient: Any
    key: Any
    same: Any


class Recording(NamedTuple):
    """A run that is over.

    Attributes:
        value: What the function returned.
        ys: The results whose gradients were taken.
        leaves: What was differentiated by.
        cuts: Ops that passed no gradient on, with the name of an input, if that is known.
        ops: All ops that may have passed one on, in the order in which they ran forward.
        made: The keys of the results.
    """

    value: Any
    ys: Sequence[Any]
    leaves: Sequence[Leaf]
    cuts: Sequence[tuple[SeenOp, str]]
    ops: Sequence[SeenOp]
    made: Sequence[Any]


class RunRecorder:
    """Runs functions of a library under a tool, and reads the library's arrays.

    Args:
        f: The function.
        api: What messages call the tool.
    """

    by_op = False  # whether two functions are compared op by op, too

    def __init__(self, f: Callable[..., Any], api: str) -> None:
        callable_or_raise(f, api)
        self.f = f
        self.api = api

    def run(self, args: Sequence[Any], options: dict[str, Any], tool: Tool) -> Recording:
        """Run the function, and its backward pass."""
        raise NotImplementedError

    def array(self, x: Any) -> Any:
        """An array of the library as one of NumPy's; None for None."""
        return x

    def held(self, x: Any) -> Any:
        """A gradient that the rest of the run leaves as it is; None for None."""
        return x

    def figures(self, x: Any) -> Any:
        """Figures of a gradient: `Numbers`, or a function of nothing that returns them later."""
        return None if x is None else numbers_of(self.array(x))

    def bad(self, x: Any) -> Bad | None:
        """Return the values of an array that are not finite, if any: kind, first index, count."""
        return None if x is None else first_bad(self.array(x))

    def given(self, run: Recording) -> Named:
        """The arrays that were there before a run."""
        return [(leaf.name, leaf.x) for leaf in run.leaves]

    def key(self, x: Any) -> int:
        """Return the key that tells an array from others that are alive."""
        return id(x)

    def type_of(self, op: Any) -> str:
        """Return regrad's op type for an op, as the table of remedies has it; "" if none."""
        raise NotImplementedError

    def kept(self, args: Sequence[Any], options: dict[str, Any]) -> Iterable[Kept]:
        """Return the arrays that the backward pass keeps, one entry for each."""
        raise NotImplementedError

    def true(self, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Leaf]:
        """The leaves, after a run, with their true gradients."""
        raise NotImplementedError

    def differences(self, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Leaf]:
        """The leaves, after a run, with their gradients by differences."""
        raise NotImplementedError

    def names(self, other: Any) -> tuple[str, str]:
        """Return the names of its gradients and of the others that they are compared with."""
        return ("first", "second") if callable(other) else ("given", other or "true")

    def meant(self, surrogates: Iterable[str], ops: Iterable[Any]) -> Iterable[str]:
        """Return the names that were declared to differ, as the rows of these ops spell them."""
        return surrogates


def settled(figures: Any) -> Any:
    """Figures as numbers, now."""
    return figures() if callable(figures) else figures


def first_bad(array: Any) -> Bad | None:
    """Return the kind, first index and count of elements of an array that are not finite."""
    a = np.asarray(array)
    if a.dtype.kind not in "fc" and a.dtype.kind != "V":
        return None
    values = a if a.dtype.kind in "fc" else a.astype(np.float32)
    bad = ~np.isfinite(values)
    count = int(np.count_nonzero(bad))
    if not count:
        return None
    place = int(np.argmax(bad.reshape(-1)))
    index = tuple(map(int, np.unravel_index(place, a.shape)))
    return ("NaN" if np.isnan(values[index]) else "inf"), index, count
