"""Where torch runs code later, elsewhere, or out of sight: the scopes go along, or refuse.

`torch.utils.checkpoint` runs a function again in the backward pass, threads start with no mode,
and compiled TorchScript asks no mode at all. While a scope is open, these few entrances are
replaced; when the last one is left they are as before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
import torch.overrides
import torch.utils.checkpoint as checkpointing
from torch.overrides import _get_current_function_mode_stack

from regrad.blocks import block
from regrad.errors import PassedOverError
from regrad.torch.opened import with_fast_path
from regrad.torch.optypes import families

_LOCK = threading.Lock()
_open = 0
_before: list[tuple[Any, str, Any]] = []


def take_off(mode: torch.overrides.TorchFunctionMode) -> None:
    """Take a mode off torch's stack, on which other tasks of this thread may have put theirs.

    It is not there if a signal struck while torch itself had taken it off.
    """
    if mode not in _get_current_function_mode_stack():
        return
    above = []
    while (top := torch.overrides._pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        torch.overrides._push_mode(other)


def drop_closed() -> None:
    """Take modes of closed scopes off torch's stack.

    While a mode is at work torch has taken it off. If a signal strikes in the block in which it
    does, it comes back only when the error is forgotten, to a scope that was left meanwhile.
    """
    while (
        (stack := _get_current_function_mode_stack())
        and getattr(stack[-1], "is_closed", False)
        and stack[-1].scope not in scopes()  # (a checkpoint runs again under closed ones)
    ):
        torch.overrides._pop_mode()


def install() -> None:
    """A scope opens."""
    global _open
    with _LOCK:
        _open += 1
        if _open == 1:
            for owner, name, make in _ENTRANCES:
                old = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
                _before.append((owner, name, old))
                setattr(owner, name, make(old))


def remove() -> None:
    """A scope is left."""
    global _open
    with _LOCK:
        _open -= 1
        if _open == 0:
            while _before:
                setattr(*_before.pop())


def scopes() -> tuple[Any, ...]:
    """The scopes that are open here."""
    from regrad.torch.overriding import SCOPES

    return SCOPES.get()


@block
def again(them: tuple[Any, ...]) -> Generator[None]:
    """Run a block under scopes that were open elsewhere, or are closed by now."""
    from regrad.torch.overriding import SCOPES

    running = _get_current_function_mode_stack()
    with ExitStack() as stack:
        for _, mode in them:
            if mode not in running:
                stack.enter_context(mode)
        before = SCOPES.get()
        try:
            SCOPES.set(tuple(scope for scope, _ in them))
            yield
        finally:
            SCOPES.set(before)


def _held() -> tuple[Any, ...]:
    return tuple((scope, scope._mode) for scope in scopes())


def later(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that will run under the scopes that are open now."""
    held = _held()
    if not held:
        return function

    @wraps(function)
    def under_scopes(*args: Any, **options: Any) -> Any:
        with again(held):
            return function(*args, **options)

    return under_scopes


def _reentrant(old: Any) -> Any:
    def forward(ctx: Any, run_function: Any, preserve: Any, *args: Any) -> Any:
        return old.__func__(ctx, later(run_function), preserve, *args)

    return staticmethod(forward)


def _not_reentrant(old: Any) -> Any:
    def generator(fn: Any, *args: Any, **options: Any) -> Any:
        return old(later(fn), *args, **options)

    return generator


def _thread(old: Any) -> Any:
    def start(self: threading.Thread) -> None:
        self.run = later(self.run)  # a thread started in a scope belongs to it
        old(self)

    return start


def _script(old: Any) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        refuse_script(self)
        return old(self, *args, **options)

    return call


def refuse_script(program: Any) -> None:
    """TorchScript runs its ops without asking; refuse a program that has an overridden one."""
    held = scopes()
    types = {key for scope in held for key in scope._bindings} & families().keys()
    kinds = {node.kind() for node in _nodes(program)} if types else set()
    for op_type in sorted(types):
        names = families()[op_type].names
        if kinds & {f"aten::{name}{end}" for name in names for end in ("", "_")}:
            raise PassedOverError(
                f"the TorchScript program {getattr(program, 'name', program)!r} runs {op_type!r}, "
                "which is overridden, out of sight of any override. Use the Python module that was "
                "scripted or traced, in which every op is seen."
            )


def _nodes(program: Any) -> Iterator[Any]:
    graph = program.graph.copy()
    torch._C._jit_pass_inline(graph)
    stack = list(graph.nodes())
    while stack:
        node = stack.pop()
        yield node
        for inner in node.blocks():
            stack += inner.nodes()


_ENTRANCES = (
    (checkpointing.CheckpointFunction, "forward", _reentrant),
    (checkpointing, "_checkpoint_without_reentrant_generator", _not_reentrant),
    (threading.Thread, "start", _thread),
    (torch._C.ScriptMethod, "__call__", _script),
    (torch._C.ScriptFunction, "__call__", _script),
    (torch.nn.MultiheadAttention, "forward", with_fast_path),
    (torch.nn.TransformerEncoder, "forward", with_fast_path),
    (torch.nn.TransformerEncoderLayer, "forward", with_fast_path),
)
