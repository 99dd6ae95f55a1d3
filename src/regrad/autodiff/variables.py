"""Variables: named tensors that can change. A read returns the current Tensor."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from threading import RLock
from typing import Any

import numpy as np

from regrad.core import dispatch
from regrad.core.backends import DTypeLike
from regrad.core.callers import find_caller
from regrad.core.parameters import binding_of
from regrad.core.protocols import VariableLike
from regrad.core.sharding import kept_in_place, moved
from regrad.core.signatures import helpful
from regrad.core.state import current
from regrad.core.tape import Tape, innermost
from regrad.core.tensor import Readable, Tensor, TensorLike
from regrad.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    RegradError,
    ShapeError,
    kind,
    prefixed,
)
from regrad.ops.creation import tensor
from regrad.ops.methods import Methods

_serial = itertools.count(1).__next__

# Code that reads Variables and then writes to them holds this lock: updates, and compiled functions
# from their arguments to their assignments. There is one lock, as a program has many Variables.
UPDATES = RLock()

# The open Python loops of this context (`transforms.ties`), which are notified before assignments.
LOOPS: ContextVar[tuple[Any, ...]] = ContextVar("regrad_loops", default=())

# A fork waits for the lock: a thread that held it would not exist in the child to release it.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=UPDATES.acquire, after_in_parent=UPDATES.release, after_in_child=UPDATES.release
    )


def _of_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method for Variables from a function of the value."""
    return lambda self, *args: function(self._read(), *args)


class Variable(Methods, Readable):
    """A tensor that can be assigned to, for parameters and state.

    Args:
        initial: The first value, by the rules of `tensor`.
        trainable: Whether `variable_grads` differentiates by it by default.
        name: A name; by default `Variable_1`, `Variable_2`, …
        dtype: The dtype, if it differs from the dtype of `initial`.

    A Variable is accepted wherever a Tensor is. There is no registry of variables:
    `variable_grads` finds the Variables that its function reads.

    Source: `tf.variable` of TensorFlow.js.

    >>> import regrad as rg
    >>> v = rg.Variable([1.0, 2.0], name="v")
    >>> v.assign_add([1.0, 1.0])
    >>> (v * 2).print()
    Tensor
        [4, 6]
    """

    __slots__ = ("__weakref__", "_away", "_lent", "_serial", "_tensor", "name", "trainable")
    closes_over: tuple[str, ...] = ("trainable", "name")

    @helpful("Variable")
    def __init__(
        self,
        initial: TensorLike,
        trainable: bool = True,
        name: str | None = None,
        dtype: DTypeLike | None = None,
    ) -> None:
        state = current()
        if state is not None and state.region is not None:
            state.region.refuse_variable(name)
        self._serial = _serial()
        if not isinstance(name, str | None):
            raise ArgumentError(f"Variable: name must be a string, got {kind(name)}")
        try:
            self._tensor: Tensor = tensor(initial, dtype=dtype)
        except RegradError as error:
            raise prefixed(error, "Variable") from error.__cause__
        self._lent = True  # other code may hold the Tensor, so a program must not overwrite it
        self._away = False  # whether a program may be overwriting it
        self.trainable: bool = trainable
        self.name: str = name or f"Variable_{self._serial}"

    # A Variable equals only itself, so that Variables can be keys of dicts and found in lists. A
    # comparison with anything else compares the values.
    def __eq__(self, other: TensorLike) -> Any:
        return self is other if isinstance(other, Variable) else Methods.__eq__(self, other)

    def __ne__(self, other: TensorLike) -> Any:
        return self is not other if isinstance(other, Variable) else Methods.__ne__(self, other)

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType] (a Tensor has none)

    @property
    def is_named(self) -> bool:
        """True if the user chose the name; False for names such as `Variable_1`."""
        return re.fullmatch(r"Variable_\d+", self.name) is None

    @property
    def value(self) -> Tensor:
        """The current value. Inside `variable_grads`, a read is differentiated."""
        return self._read()

    @value.setter
    def value(self, value: object) -> None:
        raise ArgumentError("v.value = x is not possible; write v.assign(x)")

    def _set(self, tensor: Tensor, lent: bool) -> None:
        """Hold a Tensor of the right shape and dtype. The caller has `UPDATES`."""
        state = current()
        if state is not None and state.guard is not None:
            state.guard.loses(tensor)
        for loop in LOOPS.get():
            loop.assign(self)
        if state is None or state.region is None:
            self._tensor, self._lent = tensor, lent
        else:
            state.region.assign(self, tensor)

    def _read(self, uses: bool = True) -> Tensor:
        """Return the value; `uses` is False if a custom function then depends on it in no way."""
        value = self._tensor
        self._lent = True
        if self._away or self._tensor is not value:
            value = self._awaited()
        state = current()
        if state is None:
            return value
        if state.guard is not None:
            value = state.guard.read(self, uses)
        elif state.region is not None:
            value = state.region.read(self)
        for tape in state.tapes:
            if tape.lost is not None and value._id in tape.lost:
                raise self._lost()
            if isinstance(tape, VariableTape) and tape.wants(self):
                value = tape.read(self, value)
        return value

    def __getstate__(self) -> Any:
        """Return the state of a copy (by `copy`, `deepcopy` or pickle), which owns its data.

        At first both hold the Tensor, marked as lent: a program copies it before it writes.
        """
        state = current()
        if state is not None and state.region is not None:
            state.region.refuse_variable(self.name)
        with UPDATES:
            self._lent = True
            own, slots = super().__getstate__()  # pyright: ignore[reportGeneralTypeIssues]
        return own, {**slots, "_away": False}

    def _awaited(self) -> Tensor:
        """Return the Tensor as soon as no program overwrites it."""
        with UPDATES:  # (a program that started earlier could not see that the Tensor is lent)
            self._lent = True
            return self._tensor

    def _lost(self) -> GradientError:
        return GradientError(
            f"the Variable {self.name!r} was assigned to inside a custom_grad function, whose ops "
            "are not differentiated one by one, and is read while its inputs are being "
            "differentiated; the gradient through the value would be lost. Return the value from "
            "the function, as a second output with its own gradient, and assign it outside."
        )

    def block_until_ready(self) -> Variable:
        """Wait until the current value is computed. See `regrad.block_until_ready`."""
        self._tensor.block_until_ready()
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return self._tensor.shape

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self._tensor.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._tensor.ndim

    rank = ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._tensor.size

    def assign(self, value: TensorLike) -> None:
        """Set the value. Its dtype and shape must be the variable's.

        Inside `variable_grads`, later reads return the assigned tensor with its history. A Variable
        that is sharded over a mesh of devices stays there, see `place`.
        """
        with UPDATES:
            self._assign(value)

    def _assign(self, value: TensorLike) -> None:
        before = self._read(uses=False)  # so that open tapes get the former value
        if type(value) is Tensor:
            new = value
        elif dispatch.is_plain(value):
            new = dispatch.lift_as(value, before.dtype)
        else:
            try:
                new = dispatch.lift(value)
            except ArgumentError as error:
                raise prefixed(error, f"assign to the variable {self.name!r}") from None
        if new.dtype != before.dtype:
            raise DTypeError(
                f"assign to the variable {self.name!r}: its dtype is {before.dtype}, got "
                f"{new.dtype}. Convert it: v.assign(astype(value, v.dtype))."
            )
        if new.shape != before.shape:
            raise ShapeError(
                f"assign to the variable {self.name!r}: its shape is {before.shape}, got "
                f"{new.shape}. A variable keeps its shape; make a new Variable."
            )
        state = current()
        if state is None or state.region is None:
            new = kept_in_place(new, self._tensor)
        self._set(new, lent=True)

    def place(self, sharding: Any) -> None:
        """Move the value to devices: a `jax.sharding.Sharding` or a `jax.Device`.

        Values that are assigned later get the same layout, both eagerly and by compiled functions.
        For Tensors use `device_put`.
        """
        state = current()
        if state is not None and state.region is not None:
            raise ArgumentError(
                f"the Variable {self.name!r} is placed inside a compiled or repeated function. "
                "Place Variables outside, once; values assigned inside get the same layout."
            )
        with UPDATES:
            new = moved(self._tensor, sharding, f"placing the Variable {self.name!r}")
            self._set(new, lent=True)

    def assign_add(self, value: TensorLike) -> None:
        """Set `v = v + value`, without losing another thread's update."""
        with UPDATES:
            self._assign(self.add(value))

    def assign_sub(self, value: TensorLike) -> None:
        """Set `v = v - value`, without losing another thread's update."""
        with UPDATES:
            self._assign(self.sub(value))

    def _refuse(self, other: object) -> Any:
        raise ArgumentError(
            f"v += x would bind the name to a Tensor and not change the Variable {self.name!r}; "
            "write v.assign_add(x), v.assign_sub(x) or v.assign(...)"
        )

    __iadd__: Callable[..., Any] = _refuse
    __isub__: Callable[..., Any] = _refuse
    __imul__: Callable[..., Any] = _refuse
    __itruediv__: Callable[..., Any] = _refuse
    __ipow__: Callable[..., Any] = _refuse
    __imatmul__: Callable[..., Any] = _refuse

    def numpy(self) -> Any:
        """Return the current value as a read-only NumPy view."""
        return self._read().numpy()

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> Any:
        return self._read().__array__(dtype, copy)

    def __getattr__(self, name: str) -> Any:
        # item, tolist, __float__ and others: attributes of a Tensor besides the ops' methods
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._read(), name)

    __float__: Callable[..., Any] = _of_value(float)
    __int__: Callable[..., Any] = _of_value(int)
    __bool__: Callable[..., Any] = _of_value(bool)
    __format__: Callable[..., Any] = _of_value(format)
    __len__: Callable[..., Any] = _of_value(len)

    def __setitem__(self, index: object, value: object) -> None:
        raise ArgumentError(
            "v[index] = value is not possible; write v.assign(at_set(v, index, value))"
        )

    def __repr__(self) -> str:
        frozen = "" if self.trainable else ", trainable=False"
        head = f"<Variable {self.name!r} shape={self.shape} dtype={self.dtype}{frozen}>"
        return f"{head}\n{self._tensor!r}"


def assign_all(variables: Iterable[Variable], tensors: Iterable[Tensor]) -> None:
    """Set Variables to their values at the end of a loop or a branch."""
    with UPDATES:
        for variable, tensor in zip(variables, tensors, strict=True):
            variable._set(tensor, lent=True)


class VariableTape(Tape):
    """A tape that watches Variables as they are read.

    `reads` maps each Variable to its first Tensor and the Tensor's alias. After an assignment, a
    read returns another Tensor, with its own history. `ruled` has the Tensors that scopes with a
    rule for a Variable read in place of the alias.
    """

    __slots__ = ("only", "reads", "ruled")

    def __init__(self, only: list[Variable] | None = None) -> None:
        super().__init__()
        self.only: set[int] | None = None if only is None else {id(v) for v in only}
        self.reads: dict[Variable, tuple[Tensor, Tensor]] = {}
        self.ruled: dict[tuple[Variable, Any], Tensor] = {}

    def wants(self, variable: VariableLike) -> bool:
        return variable.trainable if self.only is None else id(variable) in self.only

    def read(self, variable: Variable, value: Tensor) -> Tensor:
        """Return the alias of a variable's first value, or the value assigned since."""
        if variable not in self.reads:
            self.reads[variable] = (value, self._watch(value))
        first, watched = self.reads[variable]
        if value is not first:
            return value
        state = current()
        overrides = None if state is None else state.overrides
        return watched if not overrides else self._under_rule(variable, watched, state, overrides)

    def _under_rule(self, variable: Variable, x: Tensor, state: Any, overrides: Any) -> Tensor:
        """Return what a scope reads: the alias, or its copy with the scope's rule."""
        binding = binding_of(variable, overrides)
        if binding is None or (binding.once and self not in innermost(state, binding.op)):
            return x
        key = variable, binding.rule  # (scopes that follow each other have equal binding keys)
        if key not in self.ruled:
            counted = binding.counted_at(find_caller(), variable.name)
            counted.hit.add(x.shape)
            self.ruled[key] = dispatch.parameter(x, counted, self)
        return self.ruled[key]

    def _watch(self, value: Tensor) -> Tensor:
        watched = dispatch.alias(value)
        self.watched.add(watched._id)
        return watched
