"""Rules for parameters: keys `at(parameter=…)` for PyTorch models.

In a scope with such keys, torch's functions read a copy of a parameter, with the same memory. One
autograd node makes the copy, so the gradients of all uses meet there. The node's gradient is the
rule, and the parameter (its hooks, and DDP's) receives the result.

    with gradient_override_map({at(parameter="layer.weight"): clip}, model=net):
        net(x)        # F.linear(x, weight, bias) runs as F.linear(x, copy, bias)

Invariants:

* There is one copy of a parameter for each scope, so the rule runs once in a backward pass. The
  copy follows in-place updates. It holds no tensor for the backward pass but the parameter itself,
  so any number of backward passes may share it.
* The innermost scope with a key for a parameter provides the copy. The innermost mode puts it in
  place of the parameter, before any rule for an op applies.
* Other code that passes a parameter to autograd does the same: the calls of whole modules, of an
  `autograd.Function`, of TorchScript and of programs of torch.compile (`with_copies`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from regrad.core.callers import find_caller
from regrad.core.foreign import ForeignRule
from regrad.core.parameters import PARAMETER, select, tell_idle
from regrad.core.places import ChainStep, at
from regrad.errors import ArgumentError, PassedOverError
from regrad.torch.bridge import apply, is_differentiable
from regrad.torch.calls import Overridden, RuleCall, pull_back
from regrad.torch.enclosing import refuse_to_be_written
from regrad.torch.host import (
    DisableTorchFunction,
    has_tangent,
    is_scripted,
    is_transformed,
    is_wrapped,
    outside_transforms,
    run_as_leaf,
    unwrap,
)
from regrad.torch.host.running import Silent
from regrad.torch.modes import Getter, Mode
from regrad.torch.nodes import LIBRARIES
from regrad.torch.open_scopes import AROUND, SCOPES
from regrad.torch.places import Modules

_LOCK = threading.RLock()


class Copied(torch.autograd.Function, metaclass=Silent):
    """The copy of a parameter, whose gradient is a rule: `Copied.apply(call, x)`."""

    @staticmethod
    def forward(call: RuleCall, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, x = inputs
        # (saved tensors would be freed by the first backward pass)
        ctx.known, ctx.x = (call, [(tuple(x.shape), x.dtype)], None, call.kept), x
        ctx.of_parameter = call

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        call = ctx.known[0]
        return pull_back(ctx, [ctx.x] * (len(call.kept) + call.keeps_y), dys)


class CopiedInTransform(Overridden):
    """The copy of a tensor of torch.func. Each open transformation makes a node of its own."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        Overridden.setup_context(ctx, inputs, output)
        ctx.of_parameter, x = inputs
        ctx.has_rule = not _is_behind(x, ctx.of_parameter.place)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> Any:
        return Overridden.backward(ctx, *dys) if ctx.has_rule else (None, *dys)


class ParameterCall(RuleCall):
    """The use of a parameter by a scope. Its own gradient is the incoming gradient."""

    ran: bool = False  # whether a backward pass has reached it
    place: Any = None

    def count_run(self) -> None:
        self.ran = True
        super().count_run()

    def pull(self, xs: Sequence[Any], dys: Sequence[Any], only: int | None = None) -> Any:
        return {0: dys[0]}


class Place(NamedTuple):
    """A parameter that a key names: its first path, and its modules (by `id`) with its names."""

    key: at
    path: str
    spots: frozenset[tuple[int, str]]


def _is_behind(x: Tensor, place: Place) -> bool:
    """Return whether a tensor was computed from a copy of the same parameter, in an open scope."""
    rules = [rule for table in _tables() for rule in table.rules.values()]
    found: list[Any] = [unwrap(x).grad_fn]
    seen = {None, *found}
    for node in found if found[0] is not None else ():  # (`found` grows during the loop)
        call = getattr(node, "of_parameter", None)
        if call and call.rule in rules and not call.place.spots.isdisjoint(place.spots):
            return True
        new = {behind for behind, _ in node.next_functions} - seen
        seen |= new
        found += new
    return False


class Copy:
    """The copy of one parameter, made at its first use."""

    def __init__(self, parameters: Parameters, x: Tensor, place: Place) -> None:
        self.parameters = parameters
        self.x = x  # (while it is alive, no other tensor has its identity)
        self.place = place
        self.made: Any = None
        self.call: Any = None

    def get(self) -> Tensor:
        """Return the copy."""
        key, path, _ = self.place
        if AROUND.get().reentrant:
            raise PassedOverError(
                f"{key!r} has a rule for the sum of the gradients of {path!r}, but a "
                "reentrant checkpoint differentiates its part of the model alone. Pass "
                "use_reentrant=False to torch.utils.checkpoint."
            )
        if is_scripted():
            refuse_to_be_written(repr(key))
        if is_transformed() and not is_wrapped(self.x):  # (each transformation reads one copy)
            with outside_transforms():
                return self.get()
        with _LOCK:
            x, y = self.x, self.made
            if y is None or (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
                self.made = x  # (while it is made, transformations pass its levels)
                try:
                    self.made = self._make()
                finally:
                    self.made = None if self.made is x else self.made
            elif type(x) in _PLAIN and not is_transformed() and not y.is_set_to(x):
                y.data = x.data  # (the program has assigned to `x.data`)
            return self.made

    def _make(self) -> Tensor:
        key, path, _ = self.place
        rule, binding = self.parameters.rules[key], self.parameters.bindings[key]
        hit = binding.hit_in(path, PARAMETER.type, find_caller(LIBRARIES))
        hit.add(tuple(self.x.shape))
        for table in _tables():
            table.covered |= set() if table is self.parameters else {path}
        self.call = call = ParameterCall(rule, [self.x], None, {}, lambda x: x, hit)
        call.once, call.place = rule.once, self.place
        if is_transformed() or has_tangent(self.x):
            y = apply(CopiedInTransform, call, self.x)
            return unwrap(y) if unwrap(self.x) is self.x else y
        y = apply(Copied, call, self.x)
        run_as_leaf(y.grad_fn)  # (FSDP2 takes the gradients when a module's backward pass ends)
        return y


_PLAIN = (Tensor, torch.nn.Parameter)


class Parameters:
    """The parameters that the keys of an open scope name."""

    def __init__(self, rules: Mapping[at, Any], model: Any, marked: Any, once: bool) -> None:
        if model is None:
            raise ArgumentError(
                f"{next(iter(rules))!r} names a parameter, and only the model has parameters. Pass "
                "the model: gradient_override_map(rules, model=model)"
            )
        self.rules: dict[at, ForeignRule] = {}
        for key, rule in rules.items():
            made = self.rules[key] = ForeignRule(rule, PARAMETER)
            made.key, made.once = key, once
        found: dict[int, tuple[Tensor, list[str], list[Any]]] = {}
        for known in Modules(model).known.values():
            for name, x in known.module._parameters.items():
                paths = [f"{path}.{name}" if path else name for path in known.paths]
                if x is not None:
                    _, every, owners = found.setdefault(id(x), (x, [], []))
                    every += paths
                    if isinstance(
                        known.module._parameters, dict
                    ):  # (TorchScript has another class)
                        owners.append((known.module, name))
        steps = [ChainStep(tuple(paths), x) for x, paths, _ in found.values()]
        self.bindings: Mapping[Any, Any] = {}
        # by the owners (of which one may have several parameters) and names of the parameters
        self.places: dict[tuple[int, str], tuple[Any, Place]] = {}
        self.copies: dict[int, Copy] = {}  # by the identity of the tensor
        self.covered: set[str] = set()  # paths of parameters with a rule in an inner scope
        self.later: dict[tuple[Place, int], Copy] = {}  # the last tensors put in a place
        self.others: dict[int, Any] = {}  # other leaves
        chosen = select(rules, steps, marked)
        for (x, paths, owners), key in zip(found.values(), chosen, strict=True):
            if key is not None:
                spots = {(id(module), name): module for module, name in owners}
                place = Place(key, paths[0], frozenset(spots))
                self.copies[id(x)] = Copy(self, x, place)
                self.places |= {spot: (module, place) for spot, module in spots.items()}
        known = [copy.place for copy in self.copies.values()]
        self.paths: dict[str, at] = {place.path: place.key for place in known}

    def close(self) -> None:
        """Release the copies of tensors that are no longer in the model."""
        now = {id(x) for _, _, x in self._now()}
        self.later, self.copies = {}, {n: copy for n, copy in self.copies.items() if n in now}

    def _now(self) -> list[tuple[Any, str, Any]]:
        """Return the modules and names of the parameters, and the tensors that are there now."""
        places = [(module, name) for (_, name), (module, _) in self.places.items()]
        return [(module, name, module._parameters.get(name)) for module, name in places]

    def unread(self, key: str) -> str:
        """Return a message for a key (as text) whose parameters no function has read."""
        paths = [repr(path) for path, each in self.paths.items() if str(each) == key]
        return f"no torch function read {', '.join(paths[:5])} with gradients on" if paths else ""

    def idle(self, key: at) -> list[str]:
        """Return a message if some parameters of a key got a gradient, and others did not."""
        return tell_idle(key, self.bindings[key], self.paths, self.covered)

    def of(self, x: Tensor) -> Tensor | None:
        """Return the copy of a tensor that is a parameter now; None for any other tensor."""
        found = self.copies.get(id(x))
        if found is None and x.is_leaf and x.requires_grad:
            seen = self.others.get(id(x))
            if seen is None or seen() is not x:
                self.others[id(x)] = ref(x)
                for module, name, y in self._now():  # (FSDP2 puts others there)
                    self.note(module, name, y)
                found = self.copies.get(id(x))
        if found is None or not (x.requires_grad or is_transformed()):
            return None
        return found.get()

    def note(self, module: Any, name: str, x: Any, depth: int = 0) -> None:
        """Record that a tensor is the parameter of a module, if a key names that parameter.

        (The tensor inside an argument of `torch.func.grad` is the parameter outside of `grad`.)
        """
        _, place = self.places.get((id(module), name), (None, None))
        if place is None or id(x) in self.copies or not isinstance(x, Tensor):
            return
        if _is_behind(x, place):  # (the parameter itself has the rule)
            return
        inner = torch.func.debug_unwrap(x, recurse=False)
        if inner is not x and x.requires_grad and inner.requires_grad:
            self.note(module, name, inner, depth + 1)
        before = self.later.get((place, depth))
        if before is not None and before.call is not None and before.call.ran:
            self.copies.pop(id(before.x), None)  # (a long scope must not keep all of them)
        if is_differentiable(x):
            self.later[place, depth] = self.copies[id(x)] = Copy(self, x, place)


def _open() -> list[Parameters]:
    """Return the parameters of keys in the open scopes, of the innermost scope first."""
    around = AROUND.get()
    if not is_grad_enabled() or around.own or around.within is not None:
        return []
    return _tables()


def _tables() -> list[Parameters]:
    found = [scope._root._parameters for scope in reversed(SCOPES.get())]
    return [each for each in found if each is not None]


def with_copies(values: Any) -> Any:
    """Return arguments in which copies replace the parameters that keys name."""
    if not (tables := _open()):
        return values
    with DisableTorchFunction():
        return _one(values, tables)


def _one(value: Any, tables: Sequence[Parameters]) -> Any:
    if isinstance(value, Tensor):
        return next((y for each in tables if (y := each.of(value)) is not None), value)
    if type(value) in (list, tuple):
        return type(value)([_one(each, tables) for each in value])
    return value


def note_given(module: Any, given: Any) -> None:
    """Record the tensors that `functional_call` puts in the places of parameters."""
    tables = _open() if isinstance(given, Mapping) else []
    for name, x in given.items() if tables else ():
        around, _, last = name.rpartition(".")
        try:
            owner = module.get_submodule(around)
        except AttributeError:  # (`functional_call` raises)
            continue
        for each in tables:
            each.note(owner, last, x)


def refuse_read(xs: Iterable[Any], why: str) -> None:
    """Raise for code that reads the parameters of keys themselves, not their copies."""
    around = AROUND.get()
    if around.own or around.within is not None or not (tables := _tables()):
        return
    for copy in [table.copies.get(id(x)) for x in xs for table in tables]:
        if copy is not None and copy.x.requires_grad:
            raise PassedOverError(
                f"the parameter {copy.place.path!r} has a rule by {copy.place.key!r}, but {why}"
            )


class ParameterMode(Mode):
    """The mode of a scope that has keys for parameters, or is inside such a scope."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if is_grad_enabled() and not is_dynamo_compiling():
            first = _first_read(func)
            if func in _SAME and args[0] is args[-1]:  # (torch looks up the nodes of leaves by it)
                is_torchs = sys._getframe(1).f_code.co_filename.startswith(LIBRARIES)
                first = None if is_torchs else first
            if first is not None and (tables := _open()):
                with DisableTorchFunction():
                    args = (*args[:first], *[_one(x, tables) for x in args[first:]])
                    named = (kwargs or {}).items()
                    kwargs = {n: x if n == "out" else _one(x, tables) for n, x in named}
        return Mode.__torch_function__(self, func, types, args, kwargs)


_SAME = frozenset((Tensor.view_as, Tensor.expand_as))


# Functions of a parameter itself, not of its value.
_NAMES = (
    "backward data_ptr detach dim grad is_set_to numel register_hook retain_grad size stride "
    "storage untyped_storage register_post_accumulate_grad_hook __deepcopy__ __format__ __hash__ "
    "__reduce_ex__ __repr__ __setstate__"
)
_ITSELF = frozenset(_NAMES.split())
_VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag"))


@cache
def _first_read(func: Any) -> int | None:
    """Return the first argument whose value a function reads (1 if it writes into another)."""
    name = getattr(func, "__name__", "")
    if type(func) is Getter:
        return 0 if name == "__get__" and func.__self__.__name__ in _VIEWS else None
    writes = name.endswith("_") and not name.endswith("__")
    writes |= name == "__setitem__" or (name.startswith("__i") and name not in _READING)
    return None if name in _ITSELF else int(writes)


_READING = ("__invert__", "__index__", "__int__")
