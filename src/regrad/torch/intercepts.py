"""Code that torch runs later, elsewhere, or without modes: scopes carry over to it, or it raises.

`torch.utils.checkpoint` runs a function again in the backward pass. Compiled TorchScript and CUDA
graphs call no mode at all. While a scope is open, regrad replaces these few entry points of torch;
when the last scope closes, it restores them. (New threads start without modes; `core/jobs` replaces
the entry points of threads.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.overrides

from regrad.core import jobs
from regrad.core.blocks import block
from regrad.core.callers import find_caller
from regrad.core.hosts import Feature, Missing, takes
from regrad.core.places import Counts
from regrad.core.replacements import Entrance, Replacements
from regrad.errors import PassedOverError
from regrad.torch import compiled_code, functions, places
from regrad.torch.below import Below, join_types, script_types
from regrad.torch.composites import dispatched_when_compiled
from regrad.torch.enclosing import listing
from regrad.torch.host import (
    CHECKPOINTS,
    COMPILED_CALL,
    COMPILING,
    HOST,
    MODULE_CALL,
    OVERRIDES,
    RUN_TIME,
    check_promises,
    dynamo,
    mode_stack,
    pop_mode,
    push_mode,
    replacing,
    running,
    top_mode,
)
from regrad.torch.host.bodies import is_python, with_fast_path
from regrad.torch.host.running import is_called_by_inductor, wants_gradient
from regrad.torch.modes import Mode, call_mode
from regrad.torch.nodes import LIBRARIES, tensors
from regrad.torch.open_scopes import SCOPES, inside
from regrad.torch.parameters import (
    ParameterMode,
    note_given,
    refuse_read,
    with_copies,
)
from regrad.torch.places import COUNTS, open_here, path_here
from regrad.torch.whole_calls import call_whole

_LOCK = threading.Lock()
_open = 0
_no_compiling: list[Any] = []  # holds a block during which torch.compile raises


def take_off(mode: torch.overrides.TorchFunctionMode) -> None:
    """Take a mode off torch's stack, also from under modes that other tasks have pushed.

    The mode is not on the stack if a signal arrived while torch had popped it.
    """
    if mode is top_mode():
        pop_mode()
        return
    if mode not in mode_stack():
        return
    above: list[Any] = []
    while (top := pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        push_mode(other)


def drop_closed() -> None:
    """Take modes of closed scopes off torch's stack.

    torch pops a mode while the mode runs. If a signal arrives then, torch pushes the mode back only
    when the exception is freed, and by then the scope may have closed.
    """
    while (
        (top := top_mode()) is not None
        and getattr(top, "is_closed", False)
        and top.scope not in SCOPES.get()  # (a checkpoint runs again under closed scopes)
    ):
        pop_mode()


def install(follow: bool = False, copies: bool = False) -> None:
    """Replace the entry points when a scope opens.

    Args:
        follow: Whether to include the call of modules.
        copies: Whether to include entry points to which programs pass parameters.
    """
    global _open
    with _LOCK:
        if _open == 0:
            _REPLACED.make()  # (first, because Dynamo looks up the call of modules at its import)
            if COMPILING.losses:
                _no_compiling.append(dynamo.refuse_to_compile())
        if follow:
            _FOLLOWING.make()
        if copies:
            _READING.make()
        _open += 1


def remove() -> None:
    """Restore the entry points when the last scope closes."""
    global _open
    with _LOCK:
        _open -= 1
        if _open == 0:
            while _no_compiling:
                _no_compiling.pop().__exit__(None, None, None)
            for each in (_TRACING, _READING, _FOLLOWING, _REPLACED):
                if each.are_made:
                    each.undo()


_MODES: ContextVar[Sequence[Any]] = ContextVar("regrad_torch_modes", default=())  # reopened modes


@block
def reopen(them: tuple[Any, ...] | None) -> Generator[None]:
    """Run a block under scopes that were open elsewhere, or that have closed since."""
    scopes, modes, live, counts = them or ((), (), None, {})
    running = mode_stack()
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(functions.install_for_block(mode.ruleset.plan.functions))
            if mode not in running:
                stack.enter_context(mode)
        if any(scope._modules is not None for scope in scopes):
            install(follow=True)
            stack.callback(remove)
        before = SCOPES.get(), COUNTS.get(), _MODES.get()
        try:
            SCOPES.set(scopes)
            _MODES.set(modes)
            if live is not before[1] or counts != live:  # (otherwise the forward pass continues)
                COUNTS.set({root: Counts(held) for root, held in counts.items()})
            yield
        finally:
            SCOPES.set(before[0])
            COUNTS.set(before[1])
            _MODES.set(before[2])


def _hold_scopes() -> Any:
    """Return the open scopes, their modes, and the counts of their keys so far."""
    scopes, counts = open_here(), COUNTS.get()
    modes = [scope._here or _running(scope) for scope in scopes]
    return scopes and (scopes, modes, counts, {r: Counts(held) for r, held in counts.items()})


def _running(scope: Any) -> Any:
    """Return the mode of a closed scope that runs again here."""
    return next(mode for mode in _MODES.get() if mode.scope is scope)


jobs.CARRIERS.append((_hold_scopes, reopen))


def bind_scopes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that will run under the scopes that are open now."""
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
        def run(*args: Any, **options: Any) -> Any:
            with inside(reentrant=True):
                return run_function(*args, **options)

        return old.__func__(ctx, bind_scopes(run), preserve, *args)

    return staticmethod(forward)


@replacing
def _intercept_recomputation(
    old: Any, self: Any, recompute_fn: Any, *args: Any, **opts: Any
) -> None:
    """Bind the scopes to the function that a non-reentrant checkpoint will run again."""
    old(self, bind_scopes(recompute_fn), *args, **opts)


@replacing
def _intercept_backward(old: Any, *args: Any, **options: Any) -> Any:
    """Run a backward pass under the scopes: hooks and third-party Functions run ops in it.

    torch has popped the modes, because it has called them for `Tensor.backward`. The engine may use
    its own threads. torch carries the modes to these threads, but not the scopes.
    """
    held = _hold_scopes()
    if not held:
        return old(*args, **options)
    with _LOCK:
        for mode in held[1]:
            mode.passes += 1
            mode.around_backward = partial(reopen, held)
    try:
        if held[0] is not SCOPES.get() or any(scope._root._mode is None for scope in held[0]):
            with reopen(held):
                return old(*args, **options)
        running, pushed = mode_stack(), []  # (the rest is as it was when the scopes opened)
        try:
            for mode in held[1]:
                if mode not in running:
                    push_mode(mode)
                    pushed.append(mode)
            return old(*args, **options)
        finally:
            while pushed:
                take_off(pushed.pop())
    finally:
        with _LOCK:
            for mode in held[1]:
                mode.passes -= 1


@replacing
def _intercept_compile(old: Any, *args: Any, **options: Any) -> Any:
    """Test compiled code first, on versions of torch that regrad was not tested with."""
    check_promises(COMPILING, RUN_TIME)
    return old(*args, **options)


@replacing
def _intercept_functional_call(old: Any, module: Any, given: Any, *args: Any, **opts: Any) -> Any:
    note_given(module, given)
    return old(module, given, *args, **opts)


def _intercept_apply(old: Any) -> Any:
    def apply(cls: Any, *args: Any, **options: Any) -> Any:
        given = args if type(cls) is running.Silent else with_copies(args)  # (it has copies)
        return old.__get__(None, cls)(*given, **options)

    return classmethod(apply)


@replacing
def _intercept_level(old: Any, function: Any, *args: Any, **options: Any) -> Any:
    """Read the copies of parameters in a Function that a transformation of torch.func passes on."""
    return old(function, *with_copies(args), **options)


def _note_function(function: Any, args: Sequence[Any]) -> None:
    """Note an `autograd.Function` that keeps its own gradient, since no scope has a rule for it."""
    if type(function) is not running.Silent:
        name = function.__name__
        refuse_read(
            args, f"{name} was applied to it through an `apply` from before the scope opened, so "
            f"the rule would miss a gradient. Call {name}.apply itself."
        )  # fmt: skip
    for scope, name in listing(function, open_here()).items():
        scope._untouched.note(name, find_caller(LIBRARIES), path=path_here(scope))


@replacing
def _intercept_script(old: Any, self: Any, *args: Any, **options: Any) -> Any:
    if not SCOPES.get():
        return old(self, *args, **options)
    args = with_copies(args)
    name = f"the TorchScript program {getattr(self, 'name', self)!r}"
    _refuse(name, lambda rules: script_types(self, rules))
    if torch.is_grad_enabled():
        refuse_read(running.owned(self), f"{name} reads it, and {_IN_SCRIPTS}")
    with Below() as below:
        y = old(self, *args, **options)
    wanted = wants_gradient([*tensors((y,))])
    _refuse(name, lambda rules: {
        t for t in below.types & rules.keys() if wanted or rules[t].replaces
    })  # fmt: skip
    if wanted:
        types = f" ({', '.join(sorted(below.types))})" if below.types else ""
        scope = SCOPES.get()[-1]
        where = find_caller(LIBRARIES) if scope._watch else ""
        scope._untouched.note(name[4:] + types, where)
    return y


def _refuse(name: str, named: Callable[[Any], set[str]]) -> None:
    """Raise for a program that runs an overridden op where torch calls no mode."""
    for scope in SCOPES.get():
        if types := named(scope._ruleset.rules):
            raise PassedOverError(
                f"{name} runs {join_types(types)}, which is overridden, but {_IN_SCRIPTS}"
            )


_IN_SCRIPTS = (
    "torch calls no override inside such a program. Use the Python module that was scripted or "
    "traced, in which the rules apply."
)


# The keys that the modules of transformers call and that their fast path computes in one kernel.
_CALLED = (
    "AddV2 Gelu Identity MatMul Mean Mul RealDiv Relu Reshape Softmax baddbmm contiguous dropout "
    "full layer_norm linear masked_fill multi_head_attention_forward scaled_dot_product_attention "
    "triu zeros_like"
)
CALLED = frozenset(_CALLED.split())


def _intercept_fast_path(old: Any) -> Any:
    """Disable the fast path in scopes that replace the value of an op in it."""

    def get_fastpath_enabled() -> bool:
        return old() and all(CALLED.isdisjoint(s._ruleset.plan.replaced) for s in open_here())

    return dynamo.as_constant(get_fastpath_enabled)


# The rules under which scopes captured CUDA graphs; the captured kernels contain these rules.
_CAPTURED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _find_rules() -> Any:
    return [(scope._rules, scope._keep) for scope in open_here()]


@replacing
def _intercept_capture(old: Any, self: Any, *args: Any, **options: Any) -> None:
    old(self, *args, **options)
    _CAPTURED[self] = _find_rules()


@replacing
def _intercept_replay(old: Any, self: Any) -> None:
    """Raise if a graph was captured under other rules than the active ones.

    (`torch.compile` captures graphs from programs that it compiled for the scope.)
    """
    rules = _find_rules()
    if rules and not is_called_by_inductor() and _CAPTURED.get(self) != rules:
        raise PassedOverError(
            "a CUDA graph is replayed in a scope of overrides, but was not captured in a scope "
            "with the same rules. A graph runs its kernels without calling overrides. Capture it "
            "in such a scope, or replay it outside of this one."
        )
    old(self)


@replacing
def _intercept_trace(old: Any, self: Any, *args: Any, **options: Any) -> None:
    """Replace the other entry points of Dynamo as well, now that a trace begins."""
    with _LOCK:
        if _open:
            _TRACING.make()
    compiled_code.begin(old, self, *args, **options)


@cache
def _find_in_dynamo() -> Sequence[Entrance]:
    """Return the functions of Dynamo to replace; first the function that begins a trace."""
    return dynamo.entrances({"begin": _intercept_trace, **compiled_code.MAKERS})


def _entrances() -> Sequence[Entrance]:
    """Return the functions to replace while a scope is open.

    regrad leaves none of them out. If torch lacks one, the code that it would have watched raises
    by other means (see `refuse_to_be_written`, `applied`, `refuse_to_compile`), or no scope opens.

    In the order of the rows:

        checkpoints        a function that will run again carries its scopes
        `running`          regrad knows the running Function and its arguments
        Python             functions that torch implements in Python call regrad's modes faster
        backward passes    the code that runs ops in a backward pass runs under the scopes
        TorchScript        a program with an overridden op raises; regrad notes other programs
        CUDA graphs        a graph that was captured under other rules raises
        transformers       the fast path is taken as without modes, unless values in it are replaced
        Dynamo             a trace begins and needs the other entries (see `compiled_code`)
        torch.compile      regrad tests an untested version of torch first
    """
    for mode in (Mode, ParameterMode):
        dynamo.skip_tracing(mode.__torch_function__)
    dynamo.skip_tracing(call_whole)
    dynamo.break_graph(
        note_given,
        "regrad applies the rule of a parameter to the tensor that functional_call receives: call "
        "functional_call outside of the compiled function, or compile without fullgraph",
    )
    dynamo.dispatch_when_traced(dispatched_when_compiled())
    return [
        *_find(CHECKPOINTS, _CHECKPOINT, "CheckpointFunction.forward", _intercept_reentrant,
               takes("ctx", "run_function", "preserve_rng_state")),
        *_find(CHECKPOINTS, _CHECKPOINT, "_CheckpointFrame.__init__", _intercept_recomputation,
               takes("self", "recompute_fn")),
        *running.entrances(_note_function),
        *_find(OVERRIDES, "torch.nn", "functional.handle_torch_function", call_mode,
               takes("public_api", "relevant_args", "args", "kwargs")),
        *_find(OVERRIDES, "torch.autograd", "_engine_run_backward", _intercept_backward),
        *_find(OVERRIDES, "torch", "ScriptMethod.__call__", _intercept_script),
        *_find(OVERRIDES, "torch", "jit.ScriptFunction.__call__", _intercept_script),
        *_find(OVERRIDES, "torch.cuda", "CUDAGraph.capture_begin", _intercept_capture),
        *_find(OVERRIDES, "torch.cuda", "CUDAGraph.replay", _intercept_replay),
        *[
            each
            for name in ("MultiheadAttention", "TransformerEncoder", "TransformerEncoderLayer")
            for each in _find(OVERRIDES, "torch.nn", f"{name}.forward", with_fast_path, is_python)
        ],
        *_find(OVERRIDES, "torch.backends.mha", "get_fastpath_enabled", _intercept_fast_path),
        *_find_in_dynamo()[:1],
        *([] if HOST.is_tested else [(torch, "compile", _intercept_compile)]),
    ]  # fmt: skip


_CHECKPOINT = "torch.utils.checkpoint"
_REPLACED = Replacements(_entrances)
_FOLLOWING = Replacements(lambda: [
    (torch.nn.Module, MODULE_CALL, places.follow),
    (torch.nn.Module, "_slow_forward", places.call_in_hooks),
    (torch.nn.Module, COMPILED_CALL, lambda _: places.Compiled()),
])  # fmt: skip
_READING = Replacements(lambda: [
    (torch.autograd.Function, "apply", _intercept_apply),
    *_find(OVERRIDES, "torch.nn.utils.stateless", "_functional_call", _intercept_functional_call,
           takes("module", "parameters_and_buffers")),
    *_find(OVERRIDES, running.LEVELS, "custom_function_call", _intercept_level, callable),
])  # fmt: skip
_TRACING = Replacements(lambda: _find_in_dynamo()[1:])


def _find(
    feature: Feature, module: str, name: str, make: Callable[[Any], Any], probe: Any = None
) -> list[Entrance]:
    """Return an entry point of torch; record the feature as lost if torch does not have it."""
    owner, _, attribute = f"{module}.{name}".rpartition(".")
    place = feature.part(owner, _WHY, lambda found: attribute in vars(found))
    feature.part(f"{owner}.{attribute}", _WHY, probe)
    return [] if isinstance(place, Missing) else [(place, attribute, make)]


_WHY = "runs code without calling modes; no public API reports when"
