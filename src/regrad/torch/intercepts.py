"""Where torch runs code later, elsewhere, or out of sight: the scopes go along, or refuse.

`torch.utils.checkpoint` runs a function again in the backward pass, threads start with no mode,
and compiled TorchScript and CUDA graphs ask no mode at all. While a scope is open, these few
entrances are replaced; when the last one is left they are as before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, wraps
from multiprocessing.pool import Pool, ThreadPool
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.overrides
import torch.utils.checkpoint as checkpointing
from torch.overrides import _get_current_function_mode_stack

from regrad.core.blocks import block
from regrad.core.callers import find_caller
from regrad.errors import PassedOverError
from regrad.torch import compiled_code, functions
from regrad.torch.below import Below, join_types, script_types, wants_gradient
from regrad.torch.composites import ask_when_compiled
from regrad.torch.modes import Mode
from regrad.torch.nodes import LIBRARIES, tensors
from regrad.torch.open_scopes import SCOPES, open_here
from regrad.torch.opened import with_fast_path
from regrad.torch.rulesets import find_call

_LOCK = threading.Lock()
_open = 0
# What is replaced: where it is, its name, what it was, and what it is instead. (It stays here, and
# is made again where others have replaced it meanwhile.)
_replaced: list[tuple[Any, str, Any, Any]] = []


def take_off(mode: torch.overrides.TorchFunctionMode) -> None:
    """Take a mode off torch's stack, on which other tasks of this thread may have put theirs.

    It is not there if a signal struck while torch itself had taken it off.
    """
    if mode is top_mode():
        torch.overrides._pop_mode()
        return
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
        (top := top_mode()) is not None
        and getattr(top, "is_closed", False)
        and top.scope not in SCOPES.get()  # (a checkpoint runs again under closed ones)
    ):
        torch.overrides._pop_mode()


def top_mode() -> Any:
    """Return the mode that torch asks first; None if there is none."""
    count = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(count - 1) if count else None


def install() -> None:
    """A scope opens."""
    global _open
    with _LOCK:
        _open += 1
        if _open == 1:
            if not _replaced or any(vars(o)[name] is not old for o, name, old, _ in _replaced):
                _replaced[:] = [(o, n, vars(o)[n], make(vars(o)[n])) for o, n, make in _entrances()]
            for owner, name, _, new in _replaced:
                setattr(owner, name, new)


def remove() -> None:
    """A scope is left."""
    global _open
    with _LOCK:
        _open -= 1
        if _open == 0:
            for owner, name, old, _ in _replaced:
                setattr(owner, name, old)


@block
def reopen(them: tuple[Any, ...]) -> Generator[None]:
    """Run a block under scopes that were open elsewhere, or are closed by now."""
    running = _get_current_function_mode_stack()
    with ExitStack() as stack:
        for _, mode in them:
            stack.enter_context(
                functions.install_for_block(mode.ruleset.coverage.functions, find_call)
            )
            if mode not in running:
                stack.enter_context(mode)
        before = SCOPES.get()
        try:
            SCOPES.set(tuple(scope for scope, _ in them))
            yield
        finally:
            SCOPES.set(before)


def _hold_scopes() -> tuple[Any, ...]:
    return tuple((scope, scope._mode) for scope in open_here())


def bind_scopes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that will run under the scopes that are open now."""
    held = _hold_scopes()
    if not held:
        return function

    @wraps(function)
    def under_scopes(*args: Any, **options: Any) -> Any:
        with reopen(held):
            return function(*args, **options)

    return under_scopes


def _intercept_reentrant(old: Any) -> Any:
    def forward(ctx: Any, run_function: Any, preserve: Any, *args: Any) -> Any:
        return old.__func__(ctx, bind_scopes(run_function), preserve, *args)

    return staticmethod(forward)


def _intercept_not_reentrant(old: Callable[..., Any]) -> Any:
    def generator(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return old(bind_scopes(fn), *args, **options)

    return generator


def _intercept_thread(old: Callable[..., Any]) -> Any:
    def start(self: threading.Thread) -> None:
        if not _is_worker(self):  # a thread started in a scope belongs to it
            self.run = bind_scopes(self.run)
        old(self)

    return start


def _intercept_job(old: Callable[..., Any]) -> Any:
    """A job of a pool of threads belongs to the scope in which it was handed in."""

    def submit(self: Any, func: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        return old(self, bind_scopes(func) if _has_threads(self) else func, *args, **options)

    return submit


def _has_threads(pool: Any) -> bool:
    return isinstance(pool, ThreadPoolExecutor | ThreadPool)


def _is_worker(thread: Any) -> bool:
    """Return whether a thread is one of a pool's, which runs jobs of anybody."""
    code = getattr(thread, "_target", None) or type(thread)
    return str(code.__module__).partition(".")[0] in ("concurrent", "multiprocessing")


def _intercept_script(old: Callable[..., Any]) -> Any:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not SCOPES.get():
            return old(self, *args, **options)
        name = f"the TorchScript program {getattr(self, 'name', self)!r}"
        _refuse(name, lambda rules: script_types(self, rules))
        with Below() as below:
            y = old(self, *args, **options)
        if wants_gradient([*tensors((y,))]):
            _refuse(name, lambda rules: below.types & rules.keys())
            types = ", ".join(sorted(below.types))
            SCOPES.get()[-1]._untouched.note(
                f"{name[4:]} ({types})" if types else name[4:], find_caller(LIBRARIES)
            )
        return y

    return call


def _refuse(name: str, named: Callable[[Any], set[str]]) -> None:
    """Refuse a program that has an overridden op, out of sight of any mode."""
    for scope in SCOPES.get():
        if types := named(scope._bindings):
            raise PassedOverError(
                f"{name} runs {join_types(types)}, which is overridden, out of sight of any "
                "override. Use the Python module that was scripted or traced, in which every op "
                "is seen."
            )


# The rules under which CUDA graphs were captured in scopes. They are built into the kernels.
_CAPTURED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _find_rules() -> Any:
    return [(scope._rules, scope._keep) for scope in open_here()]


def _intercept_capture(old: Callable[..., Any]) -> Any:
    def capture_begin(self: Any, *args: Any, **options: Any) -> None:
        old(self, *args, **options)
        _CAPTURED[self] = _find_rules()

    return capture_begin


def _intercept_replay(old: Callable[..., Any]) -> Any:
    """A graph that was captured under other rules, or none, has none of these in it.

    (Those that `torch.compile` makes belong to programs that were compiled for the scope.)
    """

    def replay(self: Any) -> None:
        rules = _find_rules()
        by_compiler = sys._getframe(1).f_globals.get("__name__", "").startswith("torch._inductor")
        if rules and not by_compiler and _CAPTURED.get(self) != rules:
            raise PassedOverError(
                "a CUDA graph is replayed in a scope of overrides, and was not captured in a scope "
                "with these very rules: it runs its kernels out of sight of any override. Capture "
                "it in such a scope, or replay it outside of this one."
            )
        old(self)

    return replay


@cache
def _entrances() -> Sequence[tuple[Any, str, Callable[[Any], Any]]]:
    """Return what is replaced while a scope is open: where it is, its name, what makes the new."""
    import torch._dynamo.output_graph
    import torch._dynamo.utils
    import torch._dynamo.variables.higher_order_ops
    import torch._dynamo.variables.misc
    import torch._dynamo.variables.torch_function

    dynamo = torch._dynamo
    compiled_code.leave_alone(Mode.__torch_function__)
    ask_when_compiled()
    functions = dynamo.variables.misc.AutogradFunctionVariable
    applied = dynamo.variables.higher_order_ops.AutogradFunctionApplyVariable
    every = (
        (checkpointing.CheckpointFunction, "forward", _intercept_reentrant),
        (checkpointing, "_checkpoint_without_reentrant_generator", _intercept_not_reentrant),
        (threading.Thread, "start", _intercept_thread),
        (ThreadPoolExecutor, "submit", _intercept_job),
        *[
            (Pool, name, _intercept_job)
            for name in ("apply_async", "_map_async", "imap", "imap_unordered")
        ],
        (torch._C.ScriptMethod, "__call__", _intercept_script),
        (torch._C.ScriptFunction, "__call__", _intercept_script),
        (torch.cuda.CUDAGraph, "capture_begin", _intercept_capture),
        (torch.cuda.CUDAGraph, "replay", _intercept_replay),
        (torch.nn.MultiheadAttention, "forward", with_fast_path),
        (torch.nn.TransformerEncoder, "forward", with_fast_path),
        (torch.nn.TransformerEncoderLayer, "forward", with_fast_path),
        (functions, "call_apply", compiled_code.call_apply),
        (applied, "trace_forward_graph", compiled_code.trace_forward),
        (dynamo.utils, "run_node", compiled_code.run_node),
        (dynamo.variables.torch_function, "dispatch_torch_function", compiled_code.dispatch),
        (dynamo.output_graph.OutputGraph, "__init__", compiled_code.begin),
        (dynamo.output_graph.OutputGraph, "call_user_compiler", compiled_code.call_user_compiler),
    )
    return [each for each in every if each[1] in vars(each[0])]  # (not all are in old versions)
