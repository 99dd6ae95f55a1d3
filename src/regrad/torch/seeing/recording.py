"""Ops as they ran in a model, with what they were given, to be run again by themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from regrad.autodiff.custom_functions import unpack
from regrad.core import containers
from regrad.torch.calls import RuleCall
from regrad.torch.custom import CustomTorchCall, custom_grad
from regrad.torch.host import DisableTorchFunction
from regrad.torch.nodes import tensors
from regrad.torch.seeing.notes import OpNote, function_name, named_tensors
from regrad.torch.seeing.watching import Looker


class Recorded:
    """One op: what it was given, and, once the backward pass ran, the gradients there."""

    def __init__(self, note: OpNote, func: Any, args: Sequence[Any], options: Any) -> None:
        self.note = note
        self.func = func  # a torch function, an autograd.Function, or a custom function's call
        given = (tuple(args), options or {})
        leaves, self.rebuild = containers.flatten(given)
        # which leaves of the arguments are differentiated
        self.places: list[int] = [
            i for i, x in enumerate(leaves) if is_float(x) and x.requires_grad
        ]
        self.leaves: list[Any] = containers.flatten(without_history(given, copied=True))[0]
        self.dys: tuple[Any, ...] | None = None
        self.dxs: dict[str, torch.Tensor] = {}  # by the name of the input

    def __getattr__(self, name: str) -> Any:
        return getattr(self.note, name)  # (an op is its note, and more)

    def true(self, dys: Sequence[Any]) -> list[torch.Tensor]:
        """torch's own gradients of the op, for what arrived at it."""
        xs = [x.detach().clone().requires_grad_() for x in self.xs]
        with torch.enable_grad():
            ys = self.own([x.view_as(x) for x in xs])
            found = pulled(ys, xs, [or_zeros(dy, y) for dy, y in zip(dys, ys, strict=False)])
        return [or_zeros(dx, x) for dx, x in zip(found, xs, strict=True)]

    @property
    def has_rule(self) -> bool:
        """True if somebody's rule is its gradient."""
        return self.note.kind != "built-in"

    @property
    def xs(self) -> list[torch.Tensor]:
        """The tensors that are differentiated."""
        return [self.leaves[i] for i in self.places]

    def names(self) -> list[str]:
        """Return the names of the tensors that are differentiated."""
        places = [i for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor)]
        named = [*self.note.names, *[f"input {i}" for i in range(len(places))]]
        if isinstance(self.func, CustomTorchCall):
            named = self.func.arguments.names
        elif not self.has_rule:
            given = named_tensors(self.func, *self.rebuild(self.leaves))
            by_id = {id(x): name for name, x in given}
            named = [by_id.get(id(self.leaves[i]), f"input {i}") for i in places]
        found = dict(zip(places, named, strict=False))
        return [found.get(i, f"input {i}") for i in self.places]

    def _with(self, xs: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        moved = dict(zip(self.places, xs, strict=True))
        return self.rebuild([moved.get(i, x) for i, x in enumerate(self.leaves)])

    def again(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the op by itself, under its rule."""
        args, options = self._with(xs)
        return _floats(self._function()(*args, **options))

    def own(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the op by itself, with torch's own gradient."""
        args, options = self._with(xs)
        if self.call is not None:
            with DisableTorchFunction():
                return _floats(self.call.forward(*args))
        if isinstance(self.func, CustomTorchCall):
            answer = self.func.custom.run(tuple(args), options, _save_nothing)
            return _floats(unpack(answer, self.func.name, torch.Tensor)[0])
        return _floats(own_forward(self.func, args))

    def _function(self) -> Callable[..., Any]:
        if self.call is not None:
            call = copy.copy(self.call)
            call.hit = call.at = call.total = None
            return partial(_unasked, call)
        if isinstance(self.func, CustomTorchCall):
            return custom_grad(self.func.f)
        return self.func.apply if _is_function(self.func) else self.func


def _unasked(call: RuleCall, *xs: torch.Tensor) -> Any:
    """Run a call under a rule; its scope may still be open, and is not asked again."""
    with DisableTorchFunction():
        return call(*xs)


def _floats(y: Any) -> list[torch.Tensor]:
    return [each for each in tensors((y,)) if is_float(each)]


def is_float(x: Any) -> bool:
    """Return whether a value is a tensor that may have a gradient."""
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _is_function(func: Any) -> bool:
    return isinstance(func, type) and issubclass(func, torch.autograd.Function)


def without_history(value: Any, copied: bool = False) -> Any:
    """The same with all tensors cut off from the graph behind them, or with copies of them."""
    if isinstance(value, torch.Tensor):
        with DisableTorchFunction():
            return value.detach().clone() if copied else value.detach()
    if type(value) in (list, tuple):
        return type(value)(without_history(each, copied) for each in value)
    if type(value) is dict:
        return {key: without_history(each, copied) for key, each in value.items()}
    return value


def own_forward(function: Any, args: Sequence[Any]) -> Any:
    """The forward pass of an `autograd.Function`, differentiated by torch itself."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward(*args)
    return function.forward(_Context(len(args)), *args)


class _Context:
    """A `ctx` that keeps nothing."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _save_nothing


def _save_nothing(*values: Any, **named: Any) -> None:
    pass


_PENDING = OpNote(0, "")


class OpRecorder(Looker):
    """Keeps what ops were given, and the gradients that arrived and left.

    Args:
        held: as of a Looker.
        all_ops: whether built-in ops are kept as well as those with a rule.
    """

    def __init__(self, held: dict[str, Any], all_ops: bool) -> None:
        super().__init__(held)
        self.keeps_inputs = all_ops
        self.ops: dict[OpNote, Recorded] = {}

    def before(self, func: Any, args: Sequence[Any], options: Any) -> Any:
        """Copy what a function is given before it may write over it."""
        return Recorded(_PENDING, func, args, options)

    def after(self, func: Any, args: Any, options: Any, y: Any, was: Any, note: OpNote) -> None:
        """Keep a torch function."""
        if note.op_type and func is not torch.Tensor.backward:
            was.note = note
            self.ops[note] = was

    def ran(self, function: Any, args: Any, y: Any, note: OpNote, ctx: Any) -> None:
        """Keep an `autograd.Function`, or a call of ours."""
        first = args[0] if args else None
        if isinstance(first, RuleCall):
            self.ops[note] = Recorded(note, first, args[1:], {})
        elif isinstance(first, CustomTorchCall):
            holes = list(first.arguments.make())
            if all(isinstance(hole, containers.Hole) for hole in holes):  # (else it is lost)
                given = [args[2 + hole.number] for hole in holes]
                self.ops[note] = Recorded(note, first, given, {})
        elif not function.__module__.startswith("regrad."):
            self.ops[note] = Recorded(note, function, args, {})

    def arrived(self, note: OpNote, dys: Sequence[Any]) -> None:
        """Keep what arrived."""
        if (op := self._op(note)) is not None:
            op.dys = tuple(None if dy is None else dy.detach().clone() for dy in dys)
            self.ops[note.first] = self.ops.pop(note.first)  # (in the order of the backward pass)

    def left(self, note: OpNote, dxs: Sequence[Any], dys: Sequence[Any]) -> None:
        """Keep what left."""
        if (op := self._op(note)) is not None:
            op.dxs = {
                note.name(i): dx.detach().clone() for i, dx in enumerate(dxs) if dx is not None
            }

    def _op(self, note: OpNote) -> Recorded | None:
        first = note.first
        op = self.ops.get(first)
        if op is None or (first is not note and note.op_type != function_name(note.func)):
            return None
        if first is not note:
            op.note = note
        return op


@contextmanager
def at_rest(seed: int) -> Generator[None]:
    """A block in which random numbers are the same each time, and torch's generator is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# -- arrays and gradients ------------------------------------------------------------------------


def as_array(x: torch.Tensor) -> np.ndarray:
    """A tensor as an array that NumPy can compute with."""
    with torch.no_grad(), DisableTorchFunction():
        x = x.detach().resolve_conj().resolve_neg().cpu()
        if x.dtype == torch.bfloat16 or (x.is_floating_point() and x.element_size() == 1):
            x = x.float()
        return x.numpy()


def pulled(
    ys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], dys: Sequence[torch.Tensor],
    create_graph: bool = False,
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    """The gradients by xs, None for no path."""
    pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
    if not pairs:
        return [None] * len(xs)
    return torch.autograd.grad(
        [y for y, _ in pairs], list(xs), [dy for _, dy in pairs],
        allow_unused=True, retain_graph=True, create_graph=create_graph,
    )  # fmt: skip


def or_zeros(dy: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    """A gradient, zeros for none."""
    return torch.zeros_like(y) if dy is None else dy
