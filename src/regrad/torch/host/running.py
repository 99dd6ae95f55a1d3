"""The code that currently runs: an `autograd.Function`, a compiled program, or a custom op.

torch calls no mode when a program applies a Function, and code may hold a reference to `apply` from
an import. But `apply` looks up `forward` in the class at each call, with forward mode disabled. So
while scopes are open, the class of all Functions handles that lookup (`ForwardRecorder`). The
function that `apply` finds records which Function runs and its arguments. All other lookups return
the original.

Disabled forward mode alone also shows *that* a Function runs, without a record. If the Function
began before the scope opened, regrad searches for its frame. If it finds none, the op raises.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from regrad.errors import PassedOverError
from regrad.torch.host import CHECKPOINTS, COMPILING, CUSTOM_OPS, FUNCTIONS, SCRIPTS, unwrap

Function = torch.autograd.Function
Kind: Any = type(Function)  # the class of all Functions

_has_forward_mode: Any = FUNCTIONS.part(
    "torch._C._is_fwd_grad_enabled", "no public API shows that a Function's forward pass runs",
    lambda found: found() is True,
)  # fmt: skip

# The module in which torch.func passes a Function from one transformation to the next.
LEVELS = "torch._functorch.autograd_function"
# The modules where torch keeps the Functions of compiled programs, and of regions in them.
_PROGRAMS = ("torch._functorch._aot_autograd", "torch._higher_order_ops")


class Applied(NamedTuple):
    """A Function whose forward pass runs; `function` is None for torch, after a Function's end."""

    function: Any
    args: Sequence[Any]
    ctx: Any = None

    def wants_gradient(self) -> bool:
        """Return whether one of the arguments requires a gradient."""
        if self.ctx is not None:
            return any(self.ctx.needs_input_grad)
        return wants_gradient(self.args)


# The Function in `apply`, and its positional and keyword arguments.
_APPLIED: ContextVar[tuple[Any, Any, Any] | None] = ContextVar("regrad_torch_applied", default=None)
# The results of the Function whose forward pass ended last, by identity.
_RETURNED: ContextVar[Sequence[int]] = ContextVar("regrad_torch_returned", default=())


def wants_gradient(values: Sequence[Any]) -> bool:
    """Return whether one of these values is a tensor that requires a gradient."""
    return any(isinstance(x, torch.Tensor) and unwrap(x).requires_grad for x in values)


def applied() -> Applied | None:
    """Return the Function whose forward pass is running; None outside of Functions."""
    if torch.is_grad_enabled():
        return None
    if (told := _APPLIED.get()) is not None:
        function, args, options = told
        return Applied(function, (*args, *options.values()))
    if _has_forward_mode() or torch.is_inference_mode_enabled():
        return None
    for frame in _frames():
        held = frame.f_locals
        ctx = held.get(*frame.f_code.co_varnames[:1]) if frame.f_code.co_argcount else 0
        if isinstance(ctx, BackwardCFunction):
            return Applied(function_of(ctx), (), ctx)
        is_view = isinstance(ctx, TorchFunctionMode) and held.get("func") is torch.Tensor.view_as
        if is_view and id(held["args"][0]) in _RETURNED.get():  # a Function returned its input
            return Applied(None, ())
    raise PassedOverError(
        "an overridden op ran in the forward pass of an autograd.Function that began before the "
        "scope opened. The Function's own backward pass defines the gradient, so the rule would "
        "never run. Open the scope around the Function, or do without the Function."
    )


def _frames() -> Iterator[FrameType]:
    """Yield the frames of the running code, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


WATCHING: list[Any] = []  # the open scopes whose reports list Functions without a rule


class ForwardRecorder:
    """A descriptor for `forward` of every Function, which records the Functions that `apply` runs.

    It is an attribute of the class of Functions while a scope is open. Python looks it up before it
    searches a Function's own class.
    """

    def __init__(self, note: Callable[[Any, Sequence[Any]], None]) -> None:
        self.note = note  # receives a Function that autograd records, and its arguments

    def __get__(self, function: Any, kind: Any = None) -> Any:
        if function is None:
            return self
        forward = find_forward(function)
        if _has_forward_mode():
            return forward

        def run(*args: Any, **options: Any) -> Any:
            if WATCHING and _APPLIED.get() is None:  # (not inside another Function)
                # (`forward` with a context shows whether autograd records)
                ctx = args[0] if args else None
                recorded = ctx.next_functions if isinstance(ctx, BackwardCFunction) else args
                if recorded and wants_gradient(args):
                    self.note(_written(function), args)
            token = _APPLIED.set((function, args, options))
            try:
                y = forward(*args, **options)
            finally:
                _APPLIED.reset(token)
            _RETURNED.set([*map(id, y)] if isinstance(y, tuple) else [id(y)])
            return y

        return run

    def __set__(self, function: Any, value: Any) -> None:
        self._without_descriptor(setattr, function, "forward", value)

    def __delete__(self, function: Any) -> None:
        self._without_descriptor(delattr, function, "forward")

    def _without_descriptor(self, change: Callable[..., None], *args: Any) -> None:
        """Remove the descriptor during a change of a Function; Python would call it otherwise."""
        del Kind.forward
        try:
            change(*args)
        finally:
            Kind.forward = self


def entrances(note: Callable[..., None]) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return the functions to replace in open scopes, so that regrad knows the running Function."""
    return [] if Kind is type else [(Kind, "forward", lambda old: ForwardRecorder(note))]


def _written(function: Any) -> Any:
    """Return the user's Function behind a Function that torch.func runs in its place."""
    while function.__module__ == "torch._functorch.autograd_function":
        found = inspect.getclosurevars(find_forward(function)).nonlocals.get("autograd_function")
        if found is None:  # (the report lists it under its current name)
            break
        function = found
    return function


class Silent(Kind):
    """The class of regrad's own Functions, which regrad does not record."""

    forward = None


def find_forward(function: Any) -> Any:
    """Return the forward pass of a Function, without the descriptor `ForwardRecorder`."""
    for kind in function.__mro__:
        if (found := kind.__dict__.get("forward")) is not None:
            return found.__get__(None, function)
    raise AttributeError(f"{function!r} has no forward pass")


# the Function that a node of autograd belongs to
function_of: Callable[[Any], Any] = attrgetter("_forward_cls")


def redirect(ctx: Any, function: Any) -> None:
    """Make the node that a Function creates call another Function's backward pass."""
    ctx._forward_cls = function


def backward_of(function: Any) -> Any:
    """Return the class of the nodes that a Function creates."""
    return function._backward_cls


FUNCTIONS.part(
    "torch.autograd.function.BackwardCFunction", "only `_forward_cls` has a node's Function",
    lambda _: function_of(backward_of(Function)) is Function,
)  # fmt: skip


# -- programs of torch.compile ---------------------------------------------------------------------


def is_program(function: Callable[..., Any]) -> bool:
    """Return whether a Function is a program of torch.compile, or a part of one."""
    return function.__module__.startswith(_PROGRAMS) or function.__name__ == "ApplyTemplate"


def in_program() -> bool:
    """Return whether a program of torch.compile runs inside the current backward pass."""
    if "torch._functorch.aot_autograd" not in sys.modules:  # (torch.compile imports it)
        return False
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_PROGRAMS):
            return True
        frame = frame.f_back
    return False


def in_checkpoint() -> bool:
    """Return whether code runs that torch.utils.checkpoint will run again.

    (Only called if regrad has lost its access to checkpoints.)
    """
    module = "torch.utils.checkpoint"
    hooks = _saved_tensors_hooks(True) or ()
    if any(getattr(hook, "__module__", "") == module for hook in hooks):
        return True
    return any(frame.f_globals.get("__name__") == module for frame in _frames())


def keeps_elsewhere() -> bool:
    """Return whether hooks (for example of a checkpoint) handle the tensors that autograd saves."""
    return bool(_saved_tensors_hooks(True))


_saved_tensors_hooks: Any = CHECKPOINTS.part(
    "torch._C._autograd._top_saved_tensors_default_hooks", "no public API shows which hooks are"
    " set", lambda found: found(True) is None, missing=lambda _: None, needed=False,
)  # fmt: skip


def in_aot_function() -> bool:
    """Return whether a program runs that functorch.compile compiled once for all scopes."""
    codes = (frame.f_code for frame in _frames())
    made = (code for code in codes if code.co_name == "returned_function")
    return any(code.co_filename.endswith("aot_autograd.py") for code in made)


def is_called_by_inductor() -> bool:
    """Return whether inductor calls the function that regrad has replaced (see `replacing`)."""
    return sys._getframe(3).f_globals.get("__name__", "").startswith("torch._inductor")


# -- ops -------------------------------------------------------------------------------------------

_MADE_OF_OTHERS = "CompositeImplicitAutograd"
_has_kernel: Any = CUSTOM_OPS.part(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "no public API shows which ops are composite,"
    " so regrad watches each", lambda found: found("aten::square", _MADE_OF_OTHERS) is True,
    missing=lambda *_: True, needed=False,
)  # fmt: skip


def is_single(packet: Any) -> bool:
    """Return whether every overload of an ATen op dispatches once, and not as several ops."""
    return not any(_is_made_of_others(getattr(packet, each)) for each in packet.overloads())


def _is_made_of_others(overload: Any) -> bool:
    try:
        return _has_kernel(overload.name(), _MADE_OF_OTHERS)
    except RuntimeError:  # the overload exists only in TorchScript
        return False


Overload: type = type(torch.ops.aten.add.Tensor)
Packet: type = type(torch.ops.aten.add)
Operator: Any = COMPILING.part(
    "torch._ops.HigherOrderOperator", "no public API distinguishes higher-order operators",
    lambda found: isinstance(torch.ops.higher_order.cond, found), missing=(),
)  # fmt: skip
_definition: Any = CUSTOM_OPS.part(
    "torch.library._maybe_get_opdef", "only the holder of an op has its definition",
    lambda found: found("aten::add") is None,
)  # fmt: skip


@cache
def returns_views(name: str) -> bool:
    """Return whether a function may return a view, by ATen's schemas and regrad's own list."""
    packet: Any = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, Packet):
        return name in ("__get__", "__getitem__")
    every = [getattr(packet, each)._schema.returns for each in packet.overloads()]
    aliases = [found.alias_info for returns in every for found in returns]
    return any(found is not None and not found.is_write for found in aliases)


def custom_op(key: Any) -> Any:
    """Return the overload of a custom op in any of its forms; None for anything else."""
    key = getattr(key, "_opoverload", key)
    if isinstance(key, Packet):
        key = getattr(key, "default", None)
    own = isinstance(key, Overload) and key.namespace not in ("aten", "prims", "prim")
    return key if own else None


_definitions: Any = CUSTOM_OPS.part(
    "torch._library.custom_ops.OPDEFS", "no public API lists custom ops, so names are not keys",
    lambda found: hasattr(found, "items"), missing={}, needed=False,
)  # fmt: skip


def ops_named(name: str) -> list[Any]:
    """Return the custom ops with a name, with or without their namespace."""
    every = [custom_op(d) for n, d in _definitions.items() if name in (n, n.partition("::")[2])]
    return [op for op in every if op is not None]


@cache
def forms_of(function: Any) -> list[dict[str, Any]]:
    """Return the parameters of a torch function with their defaults, for each of its forms."""
    if inspect.isfunction(function):
        found = inspect.signature(function).parameters.values()
        return [{_TORCHS.get(p.name, p.name): p.default for p in found}]
    own = custom_op(function)
    packet: Any = own or getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    ops = [getattr(packet, n) for n in packet.overloads()] if isinstance(packet, Packet) else [own]
    schemas: Any = [op._schema.arguments for op in ops if op is not None]
    return [{_TORCHS.get(a.name, str(a.name)): a.default_value for a in each} for each in schemas]


_TORCHS: dict[Any, str] = {"self": "input"}  # parameters of schemas, and torch's names for them


def body_of(func: Any) -> Callable[..., Any] | None:
    """Return the Python function of a custom op, from its overload or packet."""
    func = custom_op(func) if isinstance(func, Overload | Packet) else None
    if func is None or func.namespace == "regrad":
        return None
    found = _definition(func)
    return None if found is None else found._init_fn


_keeps_numbers: Any = SCRIPTS.part(
    "torch._C._should_allow_numbers_as_tensors", "no public API shows which ops accept numbers",
    lambda found: found("add") is True and found("relu") is False,
)  # fmt: skip


def with_tensors(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return arguments in an op's types; modes receive TorchScript's constants as numbers."""
    if _keeps_numbers(func.overloadpacket.__name__):
        return args
    pairs = zip(args, func._schema.arguments, strict=False)
    return [_as_tensor(a) if str(p.type) == "Tensor" else a for a, p in pairs]


def _as_tensor(x: torch.Tensor | complex | None) -> Any:
    if isinstance(x, torch.Tensor) or x is None:
        return x
    dtype = torch.float64 if isinstance(x, float) else None
    return torch.tensor(x, dtype=torch.complex128 if isinstance(x, complex) else dtype)


def inlined(program: Any) -> Any:
    """Return the graph of a TorchScript program, with the functions that it calls inlined."""
    graph = program.graph.copy()
    _inline(graph)
    return graph


def owned(program: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of the module to which a TorchScript program belongs."""
    owners = [program.owner] if isinstance(program, torch.ScriptMethod) else []
    for owner in owners:  # (`owners` grows during the loop)
        yield from [x for _, x in _parameters_of(owner).items()]
        owners += [inner for _, inner in _modules_of(owner).items()]


_parameters_of: Any = SCRIPTS.part(
    "torch._C.ParameterDict", "a program has no public list of its parameters", callable
)
_modules_of: Any = SCRIPTS.part("torch._C.ModuleDict", "as for the parameters", callable)
_inline: Any = SCRIPTS.part(
    "torch._C._jit_pass_inline", "methods of scripted modules have no inlined graph", callable
)  # fmt: skip
