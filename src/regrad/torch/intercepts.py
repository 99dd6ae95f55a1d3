"""Where torch runs code later, elsewhere, or out of sight: the scopes go along, or refuse.

`torch.utils.checkpoint` runs a function again in the backward pass, and compiled TorchScript and
CUDA graphs ask no mode at all. While a scope is open, these few entrances are replaced; when the
last one is left they are as before. (Threads start with no mode: `core/jobs` replaces theirs.)
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
from regrad.torch.composites import asked_when_compiled
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
from regrad.torch.modes import Mode, ask_mode
from regrad.torch.nodes import LIBRARIES, tensors
from regrad.torch.open_scopes import SCOPES
from regrad.torch.places import COUNTS, open_here, path_here
from regrad.torch.whole_calls import call_whole

_LOCK = threading.Lock()
_open = 0
_no_compiling: list[Any] = []  # a block, while nothing is compiled


def take_off(mode: torch.overrides.TorchFunctionMode) -> None:
    """Take a mode off torch's stack, on which other tasks of this thread may have put theirs.

    It is not there if a signal struck while torch itself had taken it off.
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

    While a mode is at work torch has taken it off. If a signal strikes in the block in which it
    does, it comes back only when the error is forgotten, to a scope that was left meanwhile.
    """
    while (
        (top := top_mode()) is not None
        and getattr(top, "is_closed", False)
        and top.scope not in SCOPES.get()  # (a checkpoint runs again under closed ones)
    ):
        pop_mode()


def install(follow: bool = False) -> None:
    """A scope opens, which may have to follow the modules that run (see `places`)."""
    global _open
    with _LOCK:
        if _open == 0:
            _REPLACED.make()  # (first: Dynamo, once it is imported, knows the call of modules)
            if COMPILING.losses:
                _no_compiling.append(dynamo.refuse_to_compile())
        if follow:
            _FOLLOWING.make()
        _open += 1


def remove() -> None:
    """A scope is left."""
    global _open
    with _LOCK:
        _open -= 1
        if _open == 0:
            while _no_compiling:
                _no_compiling.pop().__exit__(None, None, None)
            for each in (_TRACING, _FOLLOWING, _REPLACED):
                if each.are_made:
                    each.undo()


_MODES: ContextVar[Sequence[Any]] = ContextVar("regrad_torch_modes", default=())  # reopened ones


@block
def reopen(them: tuple[Any, ...] | None) -> Generator[None]:
    """Run a block under scopes that were open elsewhere, or are closed by now."""
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
            if live is not before[1] or counts != live:  # (else the forward pass goes on)
                COUNTS.set({root: Counts(held) for root, held in counts.items()})
            yield
        finally:
            SCOPES.set(before[0])
            COUNTS.set(before[1])
            _MODES.set(before[2])


def _hold_scopes() -> Any:
    """Return the scopes that are open, their modes, and what their keys have counted so far."""
    scopes, counts = open_here(), COUNTS.get()
    modes = [scope._here or _running(scope) for scope in scopes]
    return scopes and (scopes, modes, counts, {r: Counts(held) for r, held in counts.items()})


def _running(scope: Any) -> Any:
    """Return the mode of a scope that was left, and runs here again."""
    return next(mode for mode in _MODES.get() if mode.scope is scope)


jobs.CARRIERS.append((_hold_scopes, reopen))


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


@replacing
def _intercept_recomputation(
    old: Any, self: Any, recompute_fn: Any, *args: Any, **opts: Any
) -> None:
    """A checkpoint that is not reentrant keeps, in a frame, what it will run again."""
    old(self, bind_scopes(recompute_fn), *args, **opts)


@replacing
def _intercept_backward(old: Any, *args: Any, **options: Any) -> Any:
    """A backward pass: hooks, and the Functions of others, run ops in it.

    Torch has taken the modes off, since it has asked them about `Tensor.backward`. The engine may
    run in threads of its own, which get the modes (by torch), but not the scopes.
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
        running, pushed = mode_stack(), []  # (all else is as it was when the scopes were opened)
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
    """See first whether compiled code keeps its promises, on versions that were not tested."""
    check_promises(COMPILING, RUN_TIME)
    return old(*args, **options)


def _note_function(function: Any, args: Sequence[Any]) -> None:
    """Note an `autograd.Function` that keeps its own gradient, where no scope has a rule for it."""
    for scope, name in listing(function, open_here()).items():
        scope._untouched.note(name, find_caller(LIBRARIES), path=path_here(scope))


@replacing
def _intercept_script(old: Any, self: Any, *args: Any, **options: Any) -> Any:
    if not SCOPES.get():
        return old(self, *args, **options)
    name = f"the TorchScript program {getattr(self, 'name', self)!r}"
    _refuse(name, lambda rules: script_types(self, rules))
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
    """Refuse a program that has an overridden op, out of sight of any mode."""
    for scope in SCOPES.get():
        if types := named(scope._ruleset.rules):
            raise PassedOverError(
                f"{name} runs {join_types(types)}, which is overridden, out of sight of any "
                "override. Use the Python module that was scripted or traced, in which every op "
                "is seen."
            )


# The keys of what the modules of transformers call, and their fast path computes in one kernel.
_CALLED = (
    "AddV2 Gelu Identity MatMul Mean Mul RealDiv Relu Reshape Softmax baddbmm contiguous dropout "
    "full layer_norm linear masked_fill multi_head_attention_forward scaled_dot_product_attention "
    "triu zeros_like"
)
CALLED = frozenset(_CALLED.split())


def _intercept_fast_path(old: Any) -> Any:
    """Have the slow path taken in scopes that replace what it calls."""

    def get_fastpath_enabled() -> bool:
        return old() and all(CALLED.isdisjoint(s._ruleset.plan.replaced) for s in open_here())

    return dynamo.as_constant(get_fastpath_enabled)


# The rules under which CUDA graphs were captured in scopes. They are built into the kernels.
_CAPTURED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _find_rules() -> Any:
    return [(scope._rules, scope._keep) for scope in open_here()]


@replacing
def _intercept_capture(old: Any, self: Any, *args: Any, **options: Any) -> None:
    old(self, *args, **options)
    _CAPTURED[self] = _find_rules()


@replacing
def _intercept_replay(old: Any, self: Any) -> None:
    """A graph that was captured under other rules, or none, has none of these in it.

    (Those that `torch.compile` makes belong to programs that were compiled for the scope.)
    """
    rules = _find_rules()
    if rules and not is_called_by_inductor() and _CAPTURED.get(self) != rules:
        raise PassedOverError(
            "a CUDA graph is replayed in a scope of overrides, and was not captured in a scope "
            "with these very rules: it runs its kernels out of sight of any override. Capture "
            "it in such a scope, or replay it outside of this one."
        )
    old(self)


@replacing
def _intercept_trace(old: Any, self: Any, *args: Any, **options: Any) -> None:
    """A trace begins: from here on the rest of Dynamo's entrances are needed, too."""
    with _LOCK:
        if _open:
            _TRACING.make()
    compiled_code.begin(old, self, *args, **options)


@cache
def _find_in_dynamo() -> Sequence[Entrance]:
    """Return the functions of Dynamo's to replace: first that with which a trace begins."""
    return dynamo.entrances({"begin": _intercept_trace, **compiled_code.MAKERS})


def _entrances() -> Sequence[Entrance]:
    """Return the functions to replace while a scope is open.

    None is ever left out. Where one is lost, what it watched is refused: by other means (see
    `refuse_to_be_written`, `applied`, `refuse_to_compile`), or else the scope is not opened.

    In the order of the rows:

        of checkpoints     a function that will run again takes its scopes along
        `running`          it is known which Function runs, and with what arguments
        of Python          functions that torch writes in Python ask our modes in fewer steps
        backward passes    what runs ops in them, runs under the scopes
        of TorchScript     a program with an overridden op is refused, and others are noted
        of CUDA graphs     one that was captured under other rules, or none, is refused
        of transformers    the fast path is taken as without modes, unless values in it are replaced
        of Dynamo          a trace begins, and needs the rest of them (see `compiled_code`)
        torch.compile      an untested version of torch is tried out first
    """
    dynamo.leave_alone(Mode.__torch_function__)
    dynamo.leave_alone(call_whole)
    dynamo.ask_about(asked_when_compiled())
    return [
        *_find(CHECKPOINTS, _CHECKPOINT, "CheckpointFunction.forward", _intercept_reentrant,
               takes("ctx", "run_function", "preserve_rng_state")),
        *_find(CHECKPOINTS, _CHECKPOINT, "_CheckpointFrame.__init__", _intercept_recomputation,
               takes("self", "recompute_fn")),
        *running.entrances(_note_function),
        *_find(OVERRIDES, "torch.nn", "functional.handle_torch_function", ask_mode,
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
_TRACING = Replacements(lambda: _find_in_dynamo()[1:])


def _find(
    feature: Feature, module: str, name: str, make: Callable[[Any], Any], probe: Any = None
) -> list[Entrance]:
    """Return an entrance, if it is there; else the feature is lost."""
    owner, _, attribute = f"{module}.{name}".rpartition(".")
    place = feature.part(owner, _WHY, lambda found: attribute in vars(found))
    feature.part(f"{owner}.{attribute}", _WHY, probe)
    return [] if isinstance(place, Missing) else [(place, attribute, make)]


_WHY = "runs code out of sight of modes; nothing public tells when"
