"""The guard of a custom function: it raises if the function uses Tensors that it did not take.

grad_func returns no gradient for a Tensor that f closes over, so that gradient would be lost. The
Variables that f reads become further inputs, for which grad_func returns gradients by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from regrad.autodiff.custom_functions import CustomFunction
from regrad.autodiff.variables import Variable
from regrad.core.registry import Op
from regrad.core.rule import place
from regrad.core.state import State, in_state, next_id
from regrad.core.tape import Tape
from regrad.core.tensor import Tensor
from regrad.errors import GradientError, kind

UNSEEN: Mapping[Tape, int] = MappingProxyType({})

# States for the calls of custom functions under one tape. A call takes one and returns it. A
# context that was copied while a function ran shares its state, so each call needs its own state.
SPARE: list[State] = []


class Guard:
    """Checks the inputs of the ops of a custom function while the function runs.

    If one tape is open and nothing else is active, the guard is also the recorder of the fast
    path. The fast path then reports to it only the ops whose inputs the tape watches. These guards,
    with their states, are reused by later calls (`SPARE`).
    """

    __slots__ = (
        "custom", "inputs", "mark", "outer", "seen", "state", "steps", "tapes", "variables",
        "watched",
    )  # fmt: skip

    custom: CustomFunction  # the function that runs
    mark: int  # the function made the tensors with a newer id
    watched: set[int]  # the ids that the only tape watches

    def __init__(self) -> None:
        self.outer: Guard | None = None  # the guard of the enclosing custom function
        self.end()

    def begin(
        self,
        custom: CustomFunction,
        inputs: tuple[Tensor, ...],
        tapes: tuple[Tape, ...],
        seen: Mapping[Tape, int],
    ) -> int:
        """Check a call from now on. Return the mark: the function makes tensors with newer ids."""
        self.custom, self.inputs, self.tapes, self.seen = custom, inputs, tapes, seen
        self.mark = mark = next_id()
        return mark

    def end(self) -> None:
        """Check nothing until the next call."""
        self.inputs: tuple[Tensor, ...] = ()  # the tensors that the function may use
        self.tapes: tuple[Tape, ...] = ()
        # the tapes that record its ops, with their numbers of records before the call
        self.seen: Mapping[Tape, int] = UNSEEN
        self.state: Any = None  # the state around the function
        self.steps: Any = None  # the steps around it, if a body is captured
        self.variables: tuple[Variable, ...] = ()  # the Variables among the inputs, the last ones

    def check(self, op: Op, xs: Iterable[Tensor]) -> None:
        """Raise if f closes over an input of an op while a tape watches the input."""
        for x in xs:
            i = x._id
            if i >= self.mark or i <= 0:
                continue
            for given in self.inputs:
                if x is given:
                    break
            else:
                if any(i in tape.watched for tape in self.tapes):
                    name = name_of(self.custom.f, x) or f"{kind(x)} (in the op {op.type!r})"
                    raise self._closes_over(name)
        if self.outer is not None:
            self.outer.check(op, xs)

    def write_unary(self, op: Op, x: Tensor, y: Tensor) -> None:
        """Check the input of an op (see `Recorder`)."""
        for given in self.inputs:
            if x is given:
                return
        self.check(op, (x,))

    def write_binary(self, op: Op, a: Tensor, b: Tensor, y: Tensor) -> None:
        """Check the inputs of an op (see `Recorder`)."""
        self.check(op, (a, b))

    def read(self, variable: Variable, uses: bool = True) -> Tensor:
        """Return the value of a Variable outside of f, which is a further input if f uses it."""
        region: Any = self.state.region
        now = variable._tensor if region is None else region.values.get(variable)
        if now is not None and now._id > self.mark:  # (f has assigned it)
            return now if region is None else region.read(variable)
        with in_state(self.state):
            x = (
                variable._read()
                if self.steps is None
                else self._outside(self.state.region.capture, variable)
            )
        if uses and all(x is not given for given in self.inputs):
            self.inputs, self.variables = (*self.inputs, x), (*self.variables, variable)
        return x

    def _outside(self, capture: Any, variable: Variable) -> Tensor:
        """Read a Variable before the steps of f, in a body that is captured."""
        inner, capture.steps = capture.steps, self.steps
        try:
            return variable._read()
        finally:
            capture.steps = inner

    def loses(self, value: Tensor) -> None:
        """Note that a value of f is assigned to a Variable: tapes that do not record f lose it."""
        if value._id > self.mark:
            for tape in self.tapes:
                if tape not in self.seen:
                    tape.lost = {*(tape.lost or ()), value._id}
        if self.outer is not None:
            self.outer.loses(value)

    def _closes_over(self, called: str) -> GradientError:
        f = self.custom.f
        return GradientError(
            f"custom_grad: {self.custom.name} ({place(f)}) closes over {called}, which is being "
            "differentiated; its gradient would be lost. Pass it as a separate input, for "
            "which grad_func also returns a gradient, or use stop_gradient on it."
        )


def name_of(f: Any, x: Tensor) -> str | None:
    """Return the name under which f closes over a tensor, or None."""
    code = getattr(f, "__code__", None)
    if code is None:
        return None
    cells = zip(code.co_freevars, f.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            if cell.cell_contents is x:
                return repr(name)
        except ValueError:  # an empty cell
            continue
    return next((repr(n) for n in code.co_names if f.__globals__.get(n) is x), None)
