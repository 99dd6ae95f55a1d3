"""Code with its own backward pass: an `autograd.Function`, a custom op, a compiled program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from regrad.errors import PassedOverError
from regrad.torch.below import Below, join_types
from regrad.torch.host import CHECKPOINTS, FUNCTIONS, is_scripted, running
from regrad.torch.nodes import name_of, tensors

CheckpointFunction: Any = CHECKPOINTS.part(
    "torch.utils.checkpoint.CheckpointFunction", "only the Function shows that it runs code again",
    lambda found: isinstance(found, type),
)  # fmt: skip


def is_built_in(op_type: str, keep: Sequence[Any]) -> bool:
    """Return whether an op runs in the forward pass of a Function that covers its gradient.

    The Function is a program of torch.compile, which has the rule built in, or is in `keep`. Any
    other `autograd.Function` has its own backward pass, so the rule would never run.
    """
    FUNCTIONS.require()
    found = running.applied()
    if found is None or is_checkpoint(found.function):
        return False
    if found.function is None or found.function in keep:
        return True
    if running.is_program(found.function):
        if found.wants_gradient() and running.in_aot_function():
            raise PassedOverError(
                f"{op_type} ran in a program of functorch.compile.aot_function, which is compiled "
                f"once for all scopes, so it would not contain the rule for {op_type!r}. "
                "Use torch.compile, or the function itself."
            )
        return True
    if found.wants_gradient():
        raise hidden_error(found.function, {op_type})
    return False


def is_left(keep: Sequence[Any]) -> bool:
    """Return whether the code runs in the forward pass of a Function to leave unchanged.

    (A program of torch.compile is left unchanged, because regrad checked its ops during tracing.)
    """
    FUNCTIONS.require()
    found = running.applied()
    if found is None or is_checkpoint(found.function):
        return False
    function = found.function
    return function is None or function in keep or running.is_program(function)


def is_checkpoint(function: Any) -> bool:
    """Return whether a Function runs code again in its backward pass, under regrad's scopes."""
    if function is not CheckpointFunction:
        return False
    CHECKPOINTS.require()
    return True


def listing(function: Any, scopes: Sequence[Any]) -> dict[Any, str]:
    """Return the scopes that list an `autograd.Function`, each with its name in the report.

    The Function keeps its own gradient, and no scope has a rule for it.
    """
    ours = function.__module__.startswith("regrad.")
    if ours or running.is_program(function) or is_checkpoint(function):
        return {}
    if any(function in scope._ruleset.coverage.functions for scope in scopes):
        return {}
    name = f"{function.__module__}.{function.__qualname__} (autograd.Function)"
    return {scope: name for scope in scopes if scope._watch}


def find_gradient_owner(func: Callable[..., Any], keep: Sequence[Any]) -> Any:
    """Return the callable that determines the gradient of a call instead of autograd, or None.

    It is a custom op itself, or the Function in whose forward pass the call runs. A program of
    torch.compile has the rules of all its functions built in, except for custom ops.
    """
    if torch.is_grad_enabled():
        return None if running.body_of(func) is None else func
    FUNCTIONS.require()
    found = running.applied()
    if found is None or found.function in keep or is_checkpoint(found.function):
        return None
    if not found.wants_gradient():
        return None
    if running.is_program(found.function) and running.body_of(func) is None:
        return None
    return found.function


def call_within(
    function: Callable[..., Any],
    rules: Mapping[str, Any],
    func: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:
    """Call a torch function; raise if the callable with its gradient hides an overridden op.

    Args:
        function: The callable that determines the gradient.
        rules: The active rules, by op type.
        func: The function of torch.
        args: Its positional arguments.
        options: Its keyword arguments.
    """
    with Below() as below:
        result = func(*args, **options)
    types = below.types & rules.keys()
    if types and (function is not func or running.wants_gradient([*tensors((result,))])):
        raise hidden_error(function if running.body_of(func) is None else func, types)
    return result


def refuse_to_be_written(op_type: str) -> None:
    """Raise where an op would enter a program that outlives the scope or has no gradient."""
    if CHECKPOINTS.losses and running.in_checkpoint():  # (a checkpoint would run the op again)
        raise CHECKPOINTS.error()
    if torch.compiler.is_exporting():
        raise PassedOverError(
            "torch.export writes forward programs, which have no gradient, so the rule for "
            f"{op_type} would be lost. Export outside the scope; torch.compile works in it."
        )
    if is_scripted():
        raise PassedOverError(
            "torch.jit.trace writes programs that also run outside the scope, so the rule for "
            f"{op_type} would stay in them. Trace outside the scope; torch.compile works in it."
        )


def hidden_error(function: Callable[..., Any], types: set[str]) -> PassedOverError:
    """Return the error for an overridden op that ran where its rule can never run."""
    if isinstance(function, type):
        name = function.__name__
        what = f"{function.__module__}.{function.__qualname__}, a torch.autograd.Function"
    else:
        name = f"torch.ops.{name_of(function)}"
        what = f"{name}, a custom op"
    ran = " and ".join(sorted(types))
    return PassedOverError(
        f"{ran} ran in the forward pass of {what}, whose own backward pass defines the gradient, "
        f"so the rule for {join_types(types)} would never run. Pass keep=[{name}] to leave it as "
        "it is."
    )
