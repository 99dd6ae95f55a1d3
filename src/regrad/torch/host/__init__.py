"""The one door to PyTorch's private parts: what no public call does, by name.

No other module names a private part of PyTorch, or a code object of its. `dynamo` is about what
torch.compile traces, `running` about whose code runs just now, `bodies` about functions that torch
writes in Python. What belongs to neither of them is here.

Each part belongs to a feature (see `core.hosts`), which is refused by name where the part is lost.
Some have a stand-in that is right without it: `missing=`.
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
    "rules in torch.compile that read what may change",
    "Write the rule without numbers and tensors from outside, or do not compile.",
)
ORDERS = HOST.feature("overrides with order=1", "Let the rules hold at every order (order=None).")
SCRIPTS = HOST.feature(
    "overrides where TorchScript programs run", "Use the Python modules that were scripted."
)
CUSTOM_OPS = HOST.feature(
    "overrides where custom ops run", "Pass keep=[the op] to leave it as it is."
)


def _is_number(found: Any) -> bool:
    return isinstance(found(), int)


def check_promises(*features: Feature) -> None:
    """See whether promises hold, once, on a version that is newer than those tested.

    By default those of all that comes without torch.compile, and of that if it has been imported.
    Nothing is checked while a program is being written: it waits for the next scope.
    """
    if HOST.is_tested or _is_written():
        return
    later = () if has_compiled() else (COMPILING, RUN_TIME)
    HOST.check(*features or [each for each in HOST.features if each not in later])


def replacing(new: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a maker: of a function of torch's, it makes one that calls `new(old, …)`."""

    def make(old: Any) -> Any:
        @wraps(old)
        def replaced(*args: Any, **options: Any) -> Any:
            return new(old, *args, **options)

        return replaced

    return make


def has_compiled() -> bool:
    """Return whether torch.compile may have been used: what it is made of takes long to import."""
    return "torch._dynamo" in sys.modules


def _is_written() -> bool:
    """Return whether what runs now becomes part of a program, or of a CUDA graph."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# -- the call of modules ---------------------------------------------------------------------------

# What `Module.__call__` calls, and what in its place where `module.compile()` has made a program.
MODULE_CALL, COMPILED_CALL = "_call_impl", "_compiled_call_impl"
_EACH_CALL = "nothing public is part of each call of a module"
OVERRIDES.part(f"torch.nn.Module.{MODULE_CALL}", _EACH_CALL, callable)
OVERRIDES.part(f"torch.nn.Module.{COMPILED_CALL}", _EACH_CALL, lambda found: found is None)


def call_of(module: Any) -> Any:
    """Return the function that a module, or its class, runs as its call."""
    return module._call_impl


# -- which functions torch asks modes about --------------------------------------------------------

DisableTorchFunction: Any = OVERRIDES.part(
    "torch._C.DisableTorchFunction", "nothing public switches modes off for a block",
    lambda found: isinstance(found, type),
)  # fmt: skip
is_torch_function_enabled: Any = OVERRIDES.part(
    "torch._C._is_torch_function_enabled", "nothing public tells whether subclasses are asked",
    lambda found: found() is True,
)  # fmt: skip
mode_stack: Any = OVERRIDES.part(
    "torch.overrides._get_current_function_mode_stack", "nothing public tells the open modes",
    lambda found: isinstance(found(), list),
)  # fmt: skip
push_mode: Any = OVERRIDES.part(
    "torch._C._push_on_torch_function_stack",
    "`with mode` closes in order, and tasks of one thread do not", callable,
)  # fmt: skip
pop_mode: Any = OVERRIDES.part("torch._C._pop_torch_function_stack", "as for pushing", callable)


_count_modes: Any = OVERRIDES.part(
    "torch._C._len_torch_function_stack", "as for pushing", _is_number
)
_mode_at: Any = OVERRIDES.part("torch._C._get_function_stack_at", "as for pushing", callable)


def top_mode() -> Any:
    """Return the mode that torch asks first; None if there is none."""
    depth = _count_modes()
    return _mode_at(depth - 1) if depth else None


# -- autograd's record -----------------------------------------------------------------------------

sequence_nr: Any = OVERRIDES.part(
    "torch._C._autograd._get_sequence_nr", "nothing public tells which nodes are new", _is_number
)


number_of = methodcaller("_sequence_nr")  # of an autograd node, in the order of its thread
LEAVES = 2**64 - 1  # the number of all nodes that stand for leaves, which are never new


def _are_numbered(node: Any) -> bool:
    ((leaf, _),) = node.next_functions
    return number_of(node) < LEAVES == number_of(leaf)


OVERRIDES.part(
    "torch.autograd.graph.Node", "nodes tell their numbers by `_sequence_nr` alone",
    lambda _: _are_numbered(torch.ones(1, requires_grad=True).exp().grad_fn),
)  # fmt: skip


_run_backward: Any = OVERRIDES.part(
    "torch.autograd.graph._engine_run_backward", "torch.autograd.grad takes twice as long",
    takes("t_outputs", "args", "kwargs"), missing=torch.autograd.grad, needed=False,
)  # fmt: skip


def pull_between(
    ends: Sequence[Any], dys: Sequence[torch.Tensor], edges: Sequence[Any], recording: bool
) -> Sequence[Any]:
    """Return the gradients at edges of autograd's record, of what arrives at others."""
    if _run_backward is torch.autograd.grad:
        return torch.autograd.grad(ends, edges, dys, True, recording, allow_unused=True)
    ends, dys, edges = tuple(ends), tuple(dys), tuple(edges)
    return _run_backward(ends, dys, True, recording, edges, True, accumulate_grad=False)


current_pass: Any = ORDERS.part(
    "torch._C._current_graph_task_id", "nothing public tells one backward pass from others",
    lambda found: found() == -1,
)  # fmt: skip
will_run: Any = ORDERS.part(
    "torch._C._will_engine_execute_node", "nothing public tells what a backward pass goes through",
    callable,
)  # fmt: skip


def is_leaf(node: Any) -> bool:
    """Return whether a node stands for a leaf, where gradients are accumulated."""
    return node.name() == "torch::autograd::AccumulateGrad"


def saved_by(node: Any, name: str, otherwise: Any = None) -> Any:
    """Return the value that a node of torch's keeps under a name."""
    return getattr(node, f"_saved_{name}", otherwise)


version_of = attrgetter("_version")  # how often a tensor was written to


unwrap_dead: Any = OVERRIDES.part(
    "torch._C._functorch.unwrap_if_dead", "`apply` is called without the Python around it", callable
)


def raw_apply(function: Any) -> Any:
    """Return `function.apply` outside of torch.func, without the Python that torch has around it.

    That unwraps tensors which outlived a transformation (`unwrap_dead`), and nothing else.
    """
    inner: Any = super(torch.autograd.Function, function)
    return inner.apply


is_autocast_open: Any = OVERRIDES.part(
    "torch._C._is_any_autocast_enabled", "nothing public tells it for all devices at once",
    lambda found: found() is False, missing=lambda: True, needed=False,
)  # fmt: skip


def is_view(x: torch.Tensor) -> bool:
    """Return whether autograd knows a tensor as a view of another."""
    return x._is_view()


_as_no_view: Any = OVERRIDES.part(
    "torch._unsafe_view", "nothing public shares memory outside of views",
    lambda found: not found(torch.ones(2, 2).mT, [2, 2])._is_view(),
    missing=lambda y, _: y.clone(), needed=False,
)  # fmt: skip


def can_be_marked_dirty(x: torch.Tensor) -> bool:
    """Return whether a Function may write into a tensor: no leaf (it keeps its values), no view."""
    return x._base is None and not (x.requires_grad and x.is_leaf)


def is_view_of(y: Any, xs: Sequence[Any]) -> bool:
    """Return whether a result is a view of one of some tensors, or of what those are views of."""
    return y._is_view() and any(y._base is x or y._base is x._base for x in xs)


def base_of(x: Any) -> Any:
    """Return the tensor whose memory a tensor shows, or the tensor itself."""
    return x if x._base is None else x._base


def without_base(y: Any, xs: Sequence[Any]) -> Any:
    """Return a result as no view, unless it is one of an input.

    torch refuses to change a view in place that a Function returns. That is right where an input
    would change with it; the result of a product may be a view of what nobody else has.
    """
    is_own = isinstance(y, torch.Tensor) and y._is_view() and not is_view_of(y, xs)
    return _as_no_view(y, y.shape) if is_own else y


# (torch._C._VariableFunctions: `torch.einsum` is written in Python, and calls another there)
NATIVE: tuple[Any, ...] = tuple(
    OVERRIDES.part(f"torch._C.{name}", "torch's Python code calls functions that only this has")
    for name in ("_nn", "_VariableFunctions")
)


enable_saved_hooks: Any = ORDERS.part(
    "torch._C._autograd._saved_tensors_hooks_enable", "nothing public puts back what a program of "
    "torch.func has switched off", callable, missing=lambda: None, needed=False,
)  # fmt: skip
is_scripted: Any = OVERRIDES.part(
    "torch._C._is_tracing", "torch.jit.is_tracing takes longer", lambda found: found() is False,
    missing=torch.jit.is_tracing, needed=False,  # pyright: ignore[reportPrivateImportUsage]
)  # fmt: skip


# -- torch.func and forward mode -------------------------------------------------------------------

is_transformed: Any = OVERRIDES.part(
    "torch._C._are_functorch_transforms_active", "nothing public tells if torch.func is at work",
    lambda found: found() is False,
)  # fmt: skip
_levels: Any = OVERRIDES.part(
    "torch._C._functorch.get_interpreter_stack", "nothing public tells which transformations"
    " of torch.func are at work", lambda found: not found(), missing=lambda: None,
    needed=False,
)  # fmt: skip


OVERRIDES.part(
    "torch.autograd.forward_ad._current_level", "nothing public tells that forward mode is open",
    lambda found: isinstance(found, int),
)  # fmt: skip


def is_plain() -> bool:
    """Return whether no transformation, forward mode or trace of TorchScript is at work."""
    return not (forward_ad._current_level >= 0 or is_transformed() or is_scripted())


def in_forward_mode() -> bool:
    """Return whether some transformation around asks for forward-mode derivatives."""
    if forward_ad._current_level >= 0:
        return True
    if not is_transformed():
        return False
    levels = _levels()
    return levels is None or any(getattr(each.key(), "name", "Jvp") == "Jvp" for each in levels)


func_gradient: Any = COMPILING.part(
    "torch._functorch.eager_transforms._autograd_grad",
    "nothing public tells the gradients that a program of torch.func takes from its other nodes",
    callable, missing=torch.autograd.grad, needed=False,
)  # fmt: skip


def unwrap(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor as autograd records it, inside of what `vmap` has wrapped around it."""
    while not x.requires_grad:  # (one wrapper for each level of `vmap` and `grad` that is open)
        inner = torch.func.debug_unwrap(x, recurse=False)
        if inner is x:
            break
        x = inner
    return x


# -- modules around modules ------------------------------------------------------------------------

_WRAPPERS = {  # classes of torch's, by name, and what they call the module inside
    "OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}  # fmt: skip


@cache
def name_inside(kind: type) -> str | None:
    """Return how a module around another one calls that; None for any other class."""
    torchs = [each for each in kind.__mro__ if each.__module__.startswith("torch.")]
    return next((_WRAPPERS[each.__name__] for each in torchs if each.__name__ in _WRAPPERS), None)


def settings_unlocked() -> Any:
    """Return a block in which `torch.backends` takes settings, though they may be locked."""
    return getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)()


def is_program(kind: type) -> bool:
    """Return whether modules of a class are what torch.compile makes of a module."""
    return name_inside(kind) == "_orig_mod"


# -- below autograd --------------------------------------------------------------------------------

_below: Any = RUN_TIME.part(
    "torch._C._after_autograd_keyset", "nothing public turns autograd on inside of an op"
)
_included: Any = RUN_TIME.part("torch._C._dispatch_tls_local_include_set", "as the key set")
_excluded: Any = RUN_TIME.part("torch._C._dispatch_tls_local_exclude_set", "as the key set")
_force: Any = RUN_TIME.part("torch._C._ForceDispatchKeyGuard", "as the key set")
_up_to: Any = RUN_TIME.part("torch._C._dispatch_keyset_full_after", "as the key set")
_keys: Any = RUN_TIME.part("torch._C.DispatchKey", "as the key set")


def _outside_autograd() -> Any:
    """The keys that autograd is not among: those below it, and those of autocast.

    (torch excludes autocast's where it is off: without that, products are of bfloat16.)
    """
    first, last = _keys.AutocastCPU, _keys.AutocastPrivateUse1
    return _below | (_up_to(last).add(last) - _up_to(first))


@block
def enable_recording() -> Generator[None]:
    """A block of an op in which autograd records, although it is at work around the op."""
    RUN_TIME.require()
    with _force(_included(), _excluded() & _outside_autograd()), torch.enable_grad():
        yield


class _Lost:
    """A class of modes that is not there."""

    def __enter__(self) -> NoReturn:
        raise FUNCTIONS.error()

    def __exit__(self, *error: object) -> None: ...


DispatchMode: Any = FUNCTIONS.part(
    "torch.utils._python_dispatch.TorchDispatchMode", "it is documented, and lies in no public"
    " module", lambda found: isinstance(found, type), missing=_Lost,
)  # fmt: skip

# -- functions that torch.nn.functional calls ------------------------------------------------------

safe_softmax: Any = OVERRIDES.part(
    "torch._safe_softmax", "attention is zero where all is masked", missing=torch.softmax
)
prelu_kernel: Any = OVERRIDES.part(
    "torch._prelu_kernel", "the public one takes no slopes that broadcast", missing=F.prelu
)


def softmax_axis(name: str, dims: int, level: int) -> int:
    """Return the axis that torch.nn.functional picks where none is given, with its warning."""
    pick = getattr(F, "_get_softmax_dim", None)
    return (0 if dims in (0, 1, 3) else 1) if pick is None else pick(name, dims, level + 1)
