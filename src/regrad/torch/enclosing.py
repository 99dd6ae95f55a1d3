"""Code whose own backward pass decides: an `autograd.Function`, a custom op, a compiled program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from regrad.errors import PassedOverError
from regrad.torch.below import Below, body_of, join_types, wants_gradient
from regrad.torch.nodes import name_of, tensors

_APPLY = torch.autograd.Function.apply.__func__.__code__  # pyright: ignore

# Where torch keeps the Functions of its compiled programs, and of regions in them.
PROGRAMS = ("torch._functorch._aot_autograd", "torch._higher_order_ops")


def is_program(function: Callable[..., Any]) -> bool:
    """Return whether a Function is a program of torch.compile, or a part of one."""
    return function.__module__.startswith(PROGRAMS) or function.__name__ == "ApplyTemplate"


def is_built_in(op_type: str, keep: Sequence[Any]) -> bool:
    """Return whether an op runs in the forward pass of a Function that answers for its gradient.

    That is a program of torch.compile, which has the rule built in, or one that is to be kept.
    Any other `autograd.Function` has a backward pass of its own, and the rule would never run.
    """
    function, args, frame = _enclosing_function()
    if function is None or function is CheckpointFunction:
        return False
    if function in keep:
        return True
    if is_program(function):
        _refuse_made_by_hand(op_type, args, frame)
        return True
    if wants_gradient(args):
        raise hidden_error(function, {op_type})
    return False


def find_decider(func: Callable[..., Any], keep: Sequence[Any]) -> Any:
    """Return what decides on the gradient of a call, if that is not autograd, and it counts.

    That is a custom op itself, or the Function in whose forward pass it runs. A program of
    torch.compile has the rules of all built in that it calls, but for custom ops.
    """
    is_custom = body_of(func) is not None
    if torch.is_grad_enabled():
        return func if is_custom else None
    function, args, _ = _enclosing_function()
    if (
        function is None
        or function is CheckpointFunction
        or function in keep
        or not wants_gradient(args)
    ):
        return None
    return None if is_program(function) and not is_custom else function


def call_within(
    function: Callable[..., Any],
    rules: Mapping[str, Any],
    func: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:
    """A call of a torch function; refused if what decides on its gradient hides an overridden op.

    Args:
        function: what decides; None for autograd.
    """
    if function is None:
        return func(*args, **options)
    with Below() as below:
        result = func(*args, **options)
    types = below.types & rules.keys()
    if types and (function is not func or wants_gradient([*tensors((result,))])):
        raise hidden_error(function if body_of(func) is None else func, types)
    return result


def refuse_to_be_written(op_type: str) -> None:
    """Refuse where an op becomes part of a program that outlives the scope, or has no gradient."""
    if torch.compiler.is_exporting():
        raise PassedOverError(
            "torch.export writes forward programs, which have no gradient: the rule for "
            f"{op_type!r} would be lost. Export outside the scope; torch.compile works in it."
        )
    if torch._C._is_tracing():
        raise PassedOverError(
            "torch.jit.trace writes programs that serve outside the scope as well: the rule for "
            f"{op_type!r} would stay in them. Trace outside the scope; torch.compile works in it."
        )


def hidden_error(function: Callable[..., Any], types: set[str]) -> PassedOverError:
    """An overridden op ran where its rule never will."""
    if isinstance(function, type):
        name = function.__name__
        what = f"{function.__module__}.{function.__qualname__}, a torch.autograd.Function"
    else:
        name = f"torch.ops.{name_of(function)}"
        what = f"{name}, a custom op"
    ran = " and ".join(sorted(types))
    return PassedOverError(
        f"{ran} ran in the forward pass of {what} whose own backward pass decides, so that the "
        f"rule for {join_types(types)} would never run. Pass keep=[{name}] to leave it as it is."
    )


def _refuse_made_by_hand(op_type: str, args: Sequence[Any], frame: FrameType | None) -> None:
    """Refuse a program that functorch made once and for all, whatever scopes are open."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "returned_function" and code.co_filename.endswith("aot_autograd.py"):
            if wants_gradient(args):
                raise PassedOverError(
                    f"{op_type} ran in a program of functorch.compile.aot_function, which is made "
                    f"for no scope in particular, so that the rule for {op_type!r} would not be "
                    "in it. Use torch.compile, or the function itself."
                )
            return
        frame = frame.f_back


def _enclosing_function() -> tuple[Any, Sequence[Any], FrameType | None]:
    """The `autograd.Function` whose forward pass is running, its arguments, and its frame."""
    frame = None if torch.is_grad_enabled() else sys._getframe(2)
    while frame is not None:
        if frame.f_code is _APPLY:
            return frame.f_locals["cls"], frame.f_locals["args"], frame
        frame = frame.f_back
    return None, (), None
