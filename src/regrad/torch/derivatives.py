"""torch's own gradient of a function: from the record of a call, or from running it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from regrad.core.containers import replaced
from regrad.errors import GradientError
from regrad.torch.bridge import alias, is_differentiable, or_zeros
from regrad.torch.host import (
    DisableTorchFunction,
    DispatchMode,
    enable_recording,
    is_leaf,
    is_transformed,
    is_view_of,
    number_of,
    pull_between,
    sequence_nr,
)
from regrad.torch.host.running import keeps_elsewhere
from regrad.torch.nodes import new_nodes

Tensors = Sequence[torch.Tensor]


class TorchGradient:
    """autograd's record of one call, on aliases of the call's inputs."""

    def __init__(self, function: Callable[..., Any], xs: Tensors) -> None:
        with DisableTorchFunction():
            xs = [alias(x) if x.requires_grad else x for x in xs]  # used in this call only
        self.xs: Tensors = xs
        self.nodes: list[Any] = [x.grad_fn for x in xs]
        y = function(*xs)
        self.kind: Any = type(y) if isinstance(y, tuple) else None  # (`torch.return_types.sort`)
        self.ys: Sequence[torch.Tensor] = y if isinstance(y, tuple) else (y,)
        self.ends: list[Any] = [(y.grad_fn, y.output_nr) for y in self.ys]
        # (without a reference to an edge, a Function's node is freed with its output)
        own = [y for y in self.ys if isinstance(y.grad_fn, BackwardCFunction)]
        self.held: list[GradientEdge] = [*map(get_gradient_edge, own)]

    @classmethod
    def of(cls, function: Callable[..., Any], xs: Tensors) -> TorchGradient | None:
        """Record a call; return None where differentiating requires running the call again.

        torch.func can only use tensors of its own levels, and a checkpoint would run again for each
        record.
        """
        if is_transformed() or not torch.is_grad_enabled() or keeps_elsewhere():
            return None
        return cls(function, xs)

    def take(self) -> Any:
        """Return the value of the call, once; a view of an input stays a view."""
        ys, self.ys = [y.view_as(y) if is_view_of(y, self.xs) else y.detach() for y in self.ys], ()
        return self.kind(ys) if self.kind else ys[0]

    def pull(self, dys: Tensors, recording: bool, only: int | None = None) -> Sequence[Any]:
        """Return the gradients of inputs; None where a gradient is not required or connected.

        If `only` is an index, compute only the gradient of this input.
        """
        wanted = [i for i, node in enumerate(self.nodes) if node is not None and only in (None, i)]
        pairs = enumerate(zip(self.ends, dys, strict=True))
        reached = [i for i, ((node, _), dy) in pairs if node is not None and dy is not None]
        if not (reached and wanted):
            return [None] * len(self.nodes)
        ends = [GradientEdge(*self.ends[i]) for i in reached]
        edges = [GradientEdge(self.nodes[i], 0) for i in wanted]
        found = pull_between(ends, [dys[i] for i in reached], edges, recording)
        return replaced([None] * len(self.nodes), wanted, found)


def converted(dx: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient in the dtype of its input; for a real input, the real part."""
    return (dx.real if dx.is_complex() and not dtype.is_complex else dx).to(dtype)


def fitted(dx: torch.Tensor | None, shape: Any, dtype: Any, like: torch.Tensor) -> Any:
    """Return a gradient in the engine's form: summed to a shape, in a dtype.

    For None, return zeros of a float dtype, which take no memory.
    """
    if dx is None:
        if not (dtype.is_floating_point or dtype.is_complex):
            return None
        return torch.zeros((), dtype=dtype, device=like.device).expand(shape)
    dx = dx if dx.shape == shape else dx.sum_to_size(shape)
    if dx.dtype == dtype:
        return dx
    return converted(dx, dtype)


class _Repeated(DispatchMode):
    """Raises for ops that draw random numbers, which would draw other numbers when run again."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise GradientError(
                f"builtin: {func} draws random numbers, and would draw others in the backward "
                "pass, where torch's own gradient runs the op again: under torch.func, in a "
                "checkpoint, and in rules that use regrad's functions. Write the rule with torch's "
                "functions, and do without the transform or checkpoint."
            )
        return func(*args, **(kwargs or {}))


def vjp_again(
    function: Callable[[Tensors], Tensors], xs: Tensors, dys: Tensors, call: Any = None,
    zeros: bool = True,
) -> list[Any]:  # fmt: skip
    """Return the gradients of a function that has already run, and that must do the same again."""

    def again(xs: Tensors) -> Tensors:
        with _Repeated():
            return function(xs)

    return vjp(again, xs, dys, call, zeros)


def vjp(
    function: Callable[[Tensors], Tensors], xs: Tensors, dys: Any, call: Any = None,
    zeros: bool = True,
) -> list[Any]:  # fmt: skip
    """Run a function; return its gradients for float inputs, and None for other inputs.

    `dys` may be a function of the results. `call` is for messages. For inputs without a path,
    return zeros or None, by `zeros`.
    """
    if not is_transformed():
        recording = torch.is_grad_enabled()
        with enable_recording():
            given = [x if x.requires_grad else _differentiated(x) for x in xs]
            start = sequence_nr()
            record = TorchGradient(lambda *xs: tuple(function(xs)), given)
            if call is not None:
                refuse_closed_over(call, record, start)
            if callable(dys):
                with torch.set_grad_enabled(recording):
                    dys = dys(record.ys)
            dxs = record.pull(dys, recording)
        pairs = zip(dxs, xs, strict=True)
        return [
            fitted(dx, x.shape, x.dtype, x) if zeros or dx is not None else dx for dx, x in pairs
        ]
    places = [i for i, x in enumerate(xs) if is_differentiable(x)]
    ys, pull, *_ = torch.func.vjp(
        lambda *moved: tuple(function(replaced(xs, places, moved))), *[xs[i] for i in places]
    )
    dys = dys(ys) if callable(dys) else dys
    filled = [or_zeros(dy, y) for dy, y in zip(dys, ys, strict=True)]
    return replaced([None] * len(xs), places, pull(tuple(filled)))


def find_closed_over(xs: Tensors, ys: Tensors, start: int) -> Any:
    """Return a tensor besides xs that ys depend on, from node `start` on; None without one.

    The result is a leaf, or the node of another tensor. The nodes that autograd recorded while a
    function ran lead to the function's arguments. Any other tensor that they lead to would lose its
    gradient.
    """
    known = {x.grad_fn for x in xs}
    leaves = set(map(id, xs))
    for y in ys:
        if y.grad_fn is None:
            if y.requires_grad and id(y) not in leaves:
                return y
            continue
        if y.grad_fn in known:
            continue
        for node in new_nodes(y.grad_fn, set(known)):
            if number_of(node) < start:
                return node
            for behind, _ in node.next_functions:
                if behind is not None and is_leaf(behind) and id(behind.variable) not in leaves:
                    return behind.variable
    return None


def describe_closed_over(found: Any, function: Any) -> str:
    """Return a function's name for a tensor, or for the tensor that a backward node created."""
    code = getattr(function, "__code__", None)
    names: dict[str, Any] = {}
    if code is not None:
        names = {n: function.__globals__.get(n) for n in code.co_names}
        for n, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            names[n] = cell.cell_contents
    for name, value in names.items():
        held = value.named_parameters(name) if isinstance(value, torch.nn.Module) else ()
        for inner, x in [(name, value), *held]:
            if isinstance(x, torch.Tensor) and (x is found or x.grad_fn is found):
                return repr(inner)
    if isinstance(found, torch.Tensor):
        return f"a tensor ({found.dtype}, shape {tuple(found.shape)})"
    return f"the result of {found.name()}"


def refuse_closed_over(call: Any, record: TorchGradient, start: int) -> None:
    """Raise if the function of a rule closes over a tensor whose gradient would be lost."""
    if (found := find_closed_over(record.xs, record.ys, start)) is not None:
        function = (call.rule.forward or call.rule).functions[0]
        raise GradientError(
            f"{call.describe()} closes over {describe_closed_over(found, function)}, which "
            "requires grad, and its gradient would be lost here. Let the rule learn it under a "
            "separate name: rg.rules.learns(rule, scale=scale); or detach it."
        )


def _differentiated(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_() if is_differentiable(x) else x
