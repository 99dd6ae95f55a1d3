"""The common recorder of all inspection tools.

A *recorder* runs a function of its library, and then the backward pass, and reports each op to a
*tool*; tools do not depend on a library. This tool prints the gradients that the rules of a
function return:

    class Norms(Tool):
        def left(self, op, dxs, dys):
            for name, dx in dxs:
                print(op.op_type, op.rule, name, recorder.figures(dx))

    recorder = TapeRecorder(f, "norms")          # the recorder of regrad's functions
    recording = recorder.run(args, {}, Norms())  # its leaves have the gradients

A recorder calls these methods, in this order, for each op on the path:

    ran(op, xs, ys)         forward, only for tools that set `keeps`: xs are pairs (name, array)
    arrived(op, dys)        backward: the gradients of the outputs, or None
    left(op, dxs, dys)      backward: dxs are pairs (name of an input, its gradient)

| tool | its record, its file here | calls of the recorder |
|---|---|---|
| `trace_gradients` | `GradientTrace`, traces | `figures` |
| `gradient_path` | `GradientPath`, paths | `figures`, and what `op.takes` and `op.makes` |
| `find_nan` | `NonFinite`, nonfinite | `keeps`, `bad`, `type_of` |
| `compare_gradients` | `GradientComparison`, comparisons | `op.true(dys)`, and another recording |
| `check_gradients` | `GradientReport`, checks | a `Library`; of ops `xs` and `again(xs)` |
| `saved_bytes` | `SavedBytes`, saved | `kept`: the arrays that the backward pass keeps |
| `draw` | `Drawing`, drawings | a `Sketch` with the inputs and outputs of each op, by keys |

Each tool exists for regrad (`tools`, with the recorder in `tapes`), for PyTorch
(`torch/seeing/tools`, over the `Looker` in `watching`) and for JAX (`jax/tools`, over `running`). A
new tool is one file here, and a short function in each of the three. Only pictures and checks have
their own files there. A JAX program is drawn without being run, and for a PyTorch function the
calls are drawn, not the nodes. A check also needs to know how a library differentiates.
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
    """Return an op with its module and its line, for a message."""
    return op_type + (f" in {path}" if path else "") + (f" at {line}" if line else "")


@dataclass(slots=True, eq=False)
class SeenOp:
    """One op that ran: its type, the kind of its rule, the line of the user's code, and the module.

    `takes` are the keys of its differentiated inputs, as in `left`, and `makes` the keys of its
    outputs. The ops of a recorder may also have `true(dys)`, which returns their true gradients by
    these inputs.
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
        """Return the op with its module and its line, for a message."""
        return located(self.op_type, self.line, self.path)

    @property
    def where(self) -> dict[str, str]:
        """Return the place where the op ran, for a finding whose title does not contain it."""
        return {}

    @property
    def first(self) -> Any:
        """Return the op that keeps the inputs of this op: itself, or the first op of its group."""
        return self


class Tool:
    """Observes a recorder that runs a function; its attributes select the events to observe."""

    # "" if `ran` is not called; otherwise, ops keep their inputs: ops with a rule, or all ops.
    keeps: Literal["", "rules", "all"] = ""
    again = False  # ops can run again
    done = False  # it needs no more of the forward pass

    def ran(self, op: Any, xs: Named, ys: Sequence[Any], writes: bool = False) -> None:
        """Handle an op that ran forward; `writes` is True if its infinities are intended."""

    def arrived(self, op: Any, dys: Sequence[Any]) -> None:
        """Handle gradients that arrived at an op whose rule is about to run."""

    def left(self, op: Any, dxs: Named, dys: Sequence[Any]) -> None:
        """Handle gradients that left an op."""


class Leaf(NamedTuple):
    """An array by which the function is differentiated.

    `key` is the key under which ops take it; `same` is a key that other recordings share.
    """

    name: str
    kind: Literal["argument", "parameter"]
    x: Any
    gradient: Any
    key: Any
    same: Any


class Recording(NamedTuple):
    """A completed run.

    Attributes:
        value: The return value of the function.
        ys: The results whose gradients were computed.
        leaves: The arrays by which the function was differentiated.
        cuts: Ops that passed no gradient on, with the name of an input if it is known.
        ops: All ops that may have passed a gradient on, in the order in which they ran forward.
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
        api: The name of the tool in messages.
    """

    by_op = False  # also compare the two functions op by op

    def __init__(self, f: Callable[..., Any], api: str) -> None:
        callable_or_raise(f, api)
        self.f = f
        self.api = api

    def run(self, args: Sequence[Any], options: dict[str, Any], tool: Tool) -> Recording:
        """Run the function, and its backward pass."""
        raise NotImplementedError

    def array(self, x: Any) -> Any:
        """Return an array of the library as a NumPy array; None for None."""
        return x

    def held(self, x: Any) -> Any:
        """Return a gradient that the rest of the run does not change; None for None."""
        return x

    def figures(self, x: Any) -> Any:
        """Return statistics of a gradient: `Numbers`, or a function that returns them later."""
        return None if x is None else numbers_of(self.array(x))

    def bad(self, x: Any) -> Bad | None:
        """Return the first non-finite values of an array, if any: kind, first index, count."""
        return None if x is None else first_bad(self.array(x))

    def given(self, run: Recording) -> Named:
        """Return the arrays that existed before a run."""
        return [(leaf.name, leaf.x) for leaf in run.leaves]

    def key(self, x: Any) -> int:
        """Return the key that distinguishes an array from other arrays that are alive."""
        return id(x)

    def type_of(self, op: Any) -> str:
        """Return regrad's op type for an op, as the table of remedies has it; "" if none."""
        raise NotImplementedError

    def kept(self, args: Sequence[Any], options: dict[str, Any]) -> Iterable[Kept]:
        """Return the arrays that the backward pass keeps, one entry for each."""
        raise NotImplementedError

    def true(self, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Leaf]:
        """Return the leaves after a run, with their true gradients."""
        raise NotImplementedError

    def differences(self, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Leaf]:
        """Return the leaves after a run, with their gradients by differences."""
        raise NotImplementedError

    def names(self, other: Any) -> tuple[str, str]:
        """Return the names of its gradients and of the gradients to compare them with."""
        return ("first", "second") if callable(other) else ("given", other or "true")

    def meant(self, surrogates: Iterable[str], ops: Iterable[Any]) -> Iterable[str]:
        """Return the names declared as surrogates, in the spelling of these ops' rows."""
        return surrogates


def settled(figures: Any) -> Any:
    """Return statistics as numbers, computed now."""
    return figures() if callable(figures) else figures


def first_bad(array: Any) -> Bad | None:
    """Return kind, first index and count of the non-finite elements of an array."""
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
