"""The only place that uses PyTorch's private parts, for work that no public API does.

No other module names a private part or a code object of PyTorch. `dynamo` is about the code that
torch.compile traces, `running` about the code that currently runs, and `bodies` about functions
that torch implements in Python. All other parts are here.

Each part belongs to a feature (see `core.hosts`). If PyTorch no longer has the part, using the
feature raises an error that names it. Some parts have a correct fallback: `missing=`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import cache, wraps
from operator import attrgetter, methodcaller
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import torch.overrides
from torch.autograd import forward_ad

from regrad.core.blocks import block
from regrad.core.hosts import Feature, Host, takes

HOST = Host("PyTorch", "regrad.torch", torch.__version__, oldest="2.10", newest="2.15")

OVERRIDES = HOST.feature(
    "overrides", "Install one of these, or use regrad.torch.custom_grad in the model."
)
FUNCTIONS = HOST.feature(
    "overrides where an autograd.Function is applied", "Call torch's own functions instead."
)
CHECKPOINTS = HOST.feature(
    "overrides in torch.utils.checkpoint", "Call the function without a checkpoint."
)
COMPILING = HOST.feature("overrides in torch.compile", "Call the model without torch.compile.")
RUN_TIME = HOST.feature(
    "rules in torch.compile that read mutable state",
    "Write the rule without numbers and tensors from outside, or do not compile.",
)
ORDERS = HOST.feature("overrides with order=1", "Let the rules apply at every order (order=None).")
SCRIPTS = HOST.feature(
    "overrides where TorchScript programs run", "Use the Python modules that were scripted."
)
CUSTOM_OPS = HOST.feature(
    "overrides where custom ops run", "Pass keep=[the op] to leave it as it is."
)


def _is_number(found: Any) -> bool:
    return isinstance(found(), int)


def check_promises(*features: Feature) -> None:
    """Run the promises of features once, on a version newer than all tested versions.

    By default run the promises of all features. The features of torch.compile are included only
    after its import. Nothing runs while a program is being traced; the next scope tests it then.
    """
    if HOST.is_tested or _is_written():
        return
    later = () if has_compiled() else (COMPILING, RUN_TIME)
    HOST.check(*features or [each for each in HOST.features if each not in later])


def replacing(new: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a maker: for a function of torch it returns a function that calls `new(old, …)`."""

    def make(old: Any) -> Any:
        @wraps(old)
        def replaced(*args: Any, **options: Any) -> Any:
            return new(old, *args, **options)

        return replaced

    return make


def has_compiled() -> bool:
    """Return whether torch.compile may have run; importing its modules here would take long."""
    return "torch._dynamo" in sys.modules


def _is_written() -> bool:
    """Return whether the running code becomes part of a program or a CUDA graph."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# -- the call of modules ---------------------------------------------------------------------------

# The function that `Module.__call__` calls, and its replacement after `module.compile()`.
MODULE_CALL, COMPILED_CALL = "_call_impl", "_compiled_call_impl"
_EACH_CALL = "no public function is part of each call of a module"
OVERRIDES.part(f"torch.nn.Module.{MODULE_CALL}", _EACH_CALL, callable)
OVERRIDES.part(f"torch.nn.Module.{COMPILED_CALL}", _EACH_CALL, lambda found: found is None)


def call_of(module: Any) -> Any:
    """Return the function that a module or its class runs as its call."""
    return module._call_impl


# -- the functions for which torch calls modes -----------------------------------------------------

DisableTorchFunction: Any = OVERRIDES.part(
    "torch._C.DisableTorchFunction", "no public API disables modes for a block",
    lambda found: isinstance(found, type),
)  # fmt: skip
is_torch_function_enabled: Any = OVERRIDES.part(
    "torch._C._is_torch_function_enabled", "no public API shows whether torch calls subclasses",
    lambda found: found() is True,
)  # fmt: skip
mode_stack: Any = OVERRIDES.part(
    "torch.overrides._get_current_function_mode_stack", "no public API lists the open modes",
    lambda found: isinstance(found(), list),
)  # fmt: skip
push_mode: Any = OVERRIDES.part(
    "torch._C._push_on_torch_function_stack",
    "`with mode` closes in order, but the tasks of a thread do not", callable,
)  # fmt: skip
pop_mode: Any = OVERRIDES.part("torch._C._pop_torch_function_stack", "as for pushing", callable)


_count_modes: Any = OVERRIDES.part(
    "torch._C._len_torch_function_stack", "as for pushing", _is_number
)
_mode_at: Any = OVERRIDES.part("torch._C._get_function_stack_at", "as for pushing", callable)


def top_mode() -> Any:
    """Return the mode that torch calls first; None without modes."""
    depth = _count_modes()
    return _mode_at(depth - 1) if depth else None


# -- autograd's record -----------------------------------------------------------------------------

sequence_nr: Any = OVERRIDES.part(
    "torch._C._autograd._get_sequence_nr", "no public API shows which nodes are new", _is_number
)


# the number of an autograd node, in its thread's order
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
LEAVES = 2**64 - 1  # the number of all nodes of leaves, which are never new


def run_as_leaf(node: Any) -> None:
    """Let the engine run a node as soon as its gradient is complete, as it does for leaves."""
    node._set_sequence_nr(LEAVES)


OVERRIDES.part(
    "torch.autograd.graph.Node", "no public API changes when the engine runs a node",
    lambda _: run_as_leaf(torch.ones(1, requires_grad=True).exp().grad_fn) is None,
)  # fmt: skip


def _are_numbered(node: Any) -> bool:
    ((leaf, _),) = node.next_functions
    return number_of(node) < LEAVES == number_of(leaf)


OVERRIDES.part(
    "torch.autograd.graph.Node", "only `_sequence_nr` returns the number of a node",
    lambda _: _are_numbered(torch.ones(1, requires_grad=True).exp().grad_fn),
)  # fmt: skip


_run_backward: Any = OVERRIDES.part(
    "torch.autograd.graph._engine_run_backward", "torch.autograd.grad takes twice as long",
    takes("t_outputs", "args", "kwargs"), missing=torch.autograd.grad, needed=False,
)  # fmt: skip


def pull_between(
    ends: Sequence[Any], dys: Sequence[torch.Tensor], edges: Sequence[Any], recording: bool
) -> Sequence[Any]:
    """Return the gradients at `edges` of autograd's record, for gradients that arrive at `ends`."""
    if _run_backward is torch.autograd.grad:
        return torch.autograd.grad(ends, edges, dys, True, recording, allow_unused=True)
    ends, dys, edges = tuple(ends), tuple(dys), tuple(edges)
    return _run_backward(ends, dys, True, recording, edges, True, accumulate_grad=False)


current_pass: Any = ORDERS.part(
    "torch._C._current_graph_task_id", "no public API distinguishes backward passes",
    lambda found: found() == -1,
)  # fmt: skip
will_run: Any = ORDERS.part(
    "torch._C._will_engine_execute_node", "no public API lists the nodes of a backward pass",
    callable,
)  # fmt: skip


def is_leaf(node: Any) -> bool:
    """Return whether a node belongs to a leaf, where the engine accumulates gradients."""
    return node.name() == "torch::autograd::AccumulateGrad"


def saved_by(node: Any, name: str, otherwise: Any = None) -> Any:
    """Return the value that a node of torch saves under a name."""
    return getattr(node, f"_saved_{name}", otherwise)


version_of: Callable[[Any], int] = attrgetter("_version")  # the number of writes to a tensor


unwrap_dead: Any = OVERRIDES.part(
    "torch._C._functorch.unwrap_if_dead",
    "`raw_apply` skips torch's Python code, which unwraps",
    callable,
)


def raw_apply(function: Any) -> Any:
    """Return `function.apply` for use outside of torch.func, without torch's Python code around it.

    That code only unwraps tensors which outlived a transformation (`unwrap_dead`).
    """
    inner: Any = super(torch.autograd.Function, function)
    return inner.apply


is_autocast_open: Any = OVERRIDES.part(
    "torch._C._is_any_autocast_enabled", "no public API covers all devices at once",
    lambda found: found() is False, missing=lambda: True, needed=False,
)  # fmt: skip


def is_view(x: torch.Tensor) -> bool:
    """Return whether autograd records a tensor as a view of another tensor."""
    return x._is_view()


_as_no_view: Any = OVERRIDES.part(
    "torch._unsafe_view", "no public API shares memory without a view",
    lambda found: not found(torch.ones(2, 2).mT, [2, 2])._is_view(),
    missing=lambda y, _: y.clone(), needed=False,
)  # fmt: skip


def can_be_marked_dirty(x: torch.Tensor) -> bool:
    """Return whether a Function may write into a tensor: neither a leaf nor a view."""
    return x._base is None and not (x.requires_grad and x.is_leaf)


def is_view_of(y: Any, xs: Sequence[Any]) -> bool:
    """Return whether a result is a view of one of these tensors, or of their bases."""
    return y._is_view() and any(y._base is x or y._base is x._base for x in xs)


def base_of(x: Any) -> Any:
    """Return the tensor that a view shares memory with; for other tensors, the tensor itself."""
    return x if x._base is None else x._base


def without_base(y: Any, xs: Sequence[Any]) -> Any:
    """Return a result that is not a view, unless it is a view of an input.

    torch raises for an in-place change of a view that a Function returns. This is correct if an
    input would change as well. But the result of a product may be a view of a private tensor.
    """
    is_own = isinstance(y, torch.Tensor) and y._is_view() and not is_view_of(y, xs)
    return _as_no_view(y, y.shape) if is_own else y


# (`torch.einsum` is implemented in Python, and calls another `einsum` in _VariableFunctions)
NATIVE: tuple[Any, ...] = tuple(
    OVERRIDES.part(f"torch._C.{name}", "torch's Python code calls functions that only this has")
    for name in ("_nn", "_VariableFunctions")
)


enable_saved_hooks: Any = ORDERS.part(
    "torch._C._autograd._saved_tensors_hooks_enable", "no public API enables again the hooks that "
    "a program of torch.func has disabled", callable, missing=lambda: None, needed=False,
)  # fmt: skip
is_scripted: Any = OVERRIDES.part(
    "torch._C._is_tracing", "torch.jit.is_tracing takes longer", lambda found: found() is False,
    missing=torch.jit.is_tracing, needed=False,  # pyright: ignore[reportPrivateImportUsage]
)  # fmt: skip


# -- torch.func and forward mode -------------------------------------------------------------------

is_transformed: Any = OVERRIDES.part(
    "torch._C._are_functorch_transforms_active", "no public API shows whether torch.func is active",
    lambda found: found() is False,
)  # fmt: skip
_levels: Any = OVERRIDES.part(
    "torch._C._functorch.get_interpreter_stack", "no public API lists the active transformations"
    " of torch.func", lambda found: not found(), missing=lambda: None,
    needed=False,
)  # fmt: skip


OVERRIDES.part(
    "torch.autograd.forward_ad._current_level", "no public API shows whether forward mode is on",
    lambda found: isinstance(found, int),
)  # fmt: skip


def is_plain() -> bool:
    """Return whether no transformation, forward mode or TorchScript trace is active."""
    return not (forward_ad._current_level >= 0 or is_transformed() or is_scripted())


def in_forward_mode() -> bool:
    """Return whether an outer transformation computes forward-mode derivatives."""
    if forward_ad._current_level >= 0:
        return True
    if not is_transformed():
        return False
    levels = _levels()
    return levels is None or any(getattr(each.key(), "name", "Jvp") == "Jvp" for each in levels)


func_gradient: Any = COMPILING.part(
    "torch._functorch.eager_transforms._autograd_grad",
    "no public API distinguishes the gradients in a program of torch.func from its other nodes",
    callable, missing=torch.autograd.grad, needed=False,
)  # fmt: skip


outside_transforms: Any = OVERRIDES.part(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "no public API runs code outside of the active transformations of torch.func", callable,
)  # fmt: skip


def is_wrapped(x: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a transformation of torch.func."""
    return torch.func.debug_unwrap(x, recurse=False) is not x


def has_tangent(x: torch.Tensor) -> bool:
    """Return whether a tensor moves in forward mode."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def unwrap(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the form that autograd records, without the wrappers of `vmap`."""
    while not x.requires_grad:  # (one wrapper for each open level of `vmap` and `grad`)
        inner = torch.func.debug_unwrap(x, recurse=False)
        if inner is x:
            break
        x = inner
    return x


# -- modules that wrap modules ---------------------------------------------------------------------

_WRAPPERS = {  # classes of torch, by name, and the attribute of the module inside
    "OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}  # fmt: skip


@cache
def name_inside(kind: type) -> str | None:
    """Return the attribute for the module inside a wrapper's class; None for any other class."""
    torchs = [each for each in kind.__mro__ if each.__module__.startswith("torch.")]
    return next((_WRAPPERS[each.__name__] for each in torchs if each.__name__ in _WRAPPERS), None)


def settings_unlocked() -> Any:
    """Return a block in which `torch.backends` accepts settings even if they are locked."""
    return getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)()


def is_program(kind: type) -> bool:
    """Return whether a class is the class of modules that torch.compile returns."""
    return name_inside(kind) == "_orig_mod"


# -- below autograd --------------------------------------------------------------------------------

_below: Any = RUN_TIME.part(
    "torch._C._after_autograd_keyset", "no public API enables autograd inside an op"
)
_included: Any = RUN_TIME.part("torch._C._dispatch_tls_local_include_set", "as the key set")
_excluded: Any = RUN_TIME.part("torch._C._dispatch_tls_local_exclude_set", "as the key set")
_force: Any = RUN_TIME.part("torch._C._ForceDispatchKeyGuard", "as the key set")
_up_to: Any = RUN_TIME.part("torch._C._dispatch_keyset_full_after", "as the key set")
_keys: Any = RUN_TIME.part("torch._C.DispatchKey", "as the key set")


def _outside_autograd() -> Any:
    """Return the dispatch keys below autograd, and the keys of autocast.

    (torch excludes the autocast keys where autocast is off. Otherwise products would use bfloat16.)
    """
    first, last = _keys.AutocastCPU, _keys.AutocastPrivateUse1
    return _below | (_up_to(last).add(last) - _up_to(first))


@block
def enable_recording() -> Generator[None]:
    """Let autograd record in a block of an op, although autograd handles the op itself."""
    RUN_TIME.require()
    with _force(_included(), _excluded() & _outside_autograd()), torch.enable_grad():
        yield


class _Lost:
    """A replacement for a missing class of modes."""

    def __enter__(self) -> NoReturn:
        raise FUNCTIONS.error()

    def __exit__(self, *error: object) -> None: ...


DispatchMode: Any = FUNCTIONS.part(
    "torch.utils._python_dispatch.TorchDispatchMode", "it is documented, but in no public"
    " module", lambda found: isinstance(found, type), missing=_Lost,
)  # fmt: skip

# -- functions that torch.nn.functional calls ------------------------------------------------------

safe_softmax: Any = OVERRIDES.part(
    "torch._safe_softmax", "attention is zero where everything is masked", missing=torch.softmax
)
prelu_kernel: Any = OVERRIDES.part(
    "torch._prelu_kernel", "the public function accepts no broadcast slopes", missing=F.prelu
)


def softmax_axis(name: str, dims: int, level: int) -> int:
    """Return the axis that torch.nn.functional picks by default, with torch's warning."""
    pick = getattr(F, "_get_softmax_dim", None)
    return (0 if dims in (0, 1, 3) else 1) if pick is None else pick(name, dims, level + 1)
