"""Nested programs in PyTorch under `regrad.torch`: `rg` in their text is this module.

Ops are torch's, loops are Python's, derivatives torch.func's; overrides, places and custom
gradients are those of `regrad.torch`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree
import torch
from torch.utils.checkpoint import checkpoint as checkpointed

import regrad as rg
import regrad.torch
from regrad.torch import custom_grad, gradient_override_map
from tests.campaigns.in_jax import Variable

Function = Callable[..., Any]

__all__ = ["Variable", "custom_grad", "gradient_override_map"]

sin, cos, tanh, exp, atan, square = (
    torch.sin, torch.cos, torch.tanh, torch.exp, torch.atan, torch.square,
)  # fmt: skip
sqrt, where, sum, stack = torch.sqrt, torch.where, torch.sum, torch.stack


def asarray(x: Any) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def identity(variable: Variable) -> torch.Tensor:
    return asarray(variable.value)


# -- places ----------------------------------------------------------------------------------------


class Here(torch.nn.Module):
    def forward(self, f: Function) -> Any:
        return 0.9 * f()


def define(space: dict[str, Any]) -> None:
    """Replace the place of the prelude by a module."""

    def placed(name: str, op_type: str, f: Function, g: Function) -> Any:
        here = Here()
        with gradient_override_map({rg.at(here, op_type): space["NESTED_RULES"][op_type]}):
            return here(f) + g()

    space["placed"] = placed


# -- loops, branches, batches ----------------------------------------------------------------------


def scan(
    f: Function, init: Any, xs: Any = None, *, length: int = 0, reverse: bool = False,
    checkpoint: bool = False,
) -> Any:  # fmt: skip
    step = globals()["checkpoint"](f) if checkpoint else f
    order = range(length or len(optree.tree_leaves(xs)[0]))
    state, ys = init, {}
    for i in reversed(order) if reverse else order:
        row = optree.tree_map(lambda x, i=i: x[i], xs)
        state, ys[i] = step(state, row)
    return state, optree.tree_map(lambda *rows: torch.stack(rows), *[ys[i] for i in order])


def chosen(holds: Any, yes: Any, no: Any) -> Any:
    return optree.tree_map(lambda a, b: torch.where(holds, asarray(a), asarray(b)), yes, no)


def while_loop(holds: Function, body: Function, state: Any, *, max_steps: int) -> Any:
    for _ in range(max_steps):
        state = chosen(holds(state), body(state), state)
    return state


def fori_loop(first: int, last: int, body: Function, state: Any) -> Any:
    return functools.reduce(lambda s, i: body(i, s), range(first, last), state)


def cond(holds: Any, yes: Function, no: Function, *args: Any) -> Any:
    return chosen(holds, yes(*args), no(*args))


def map(f: Function, xs: torch.Tensor) -> torch.Tensor:
    return torch.stack([f(x) for x in xs])


def vmap(f: Function, in_axes: Any = 0) -> Function:
    def run(*args: Any) -> Any:
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        dims = [a for a, x in zip(axes, args, strict=True) for _ in optree.tree_leaves(x)]
        flat, specs = flattened(f, args)
        ys = torch.func.vmap(flat, in_dims=tuple(dims))(*optree.tree_leaves(args))
        return optree.tree_unflatten(specs[0], ys)

    return run


def flattened(f: Function, args: Any) -> tuple[Function, list[Any]]:
    """f from leaves to leaves, and a list that will have the form of its result."""
    spec, found = optree.tree_structure(args), []

    def flat(*leaves: Any) -> Any:
        ys, of_result = optree.tree_flatten(f(*optree.tree_unflatten(spec, leaves)))
        found.append(of_result)
        return tuple(ys)

    return flat, found


def checkpoint(f: Function) -> Function:
    def run(*args: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return f(*args)  # (torch.func has no checkpoints)
        return checkpointed(f, *args, use_reentrant=False)

    return run


def jit(f: Function) -> Function:
    return f


# -- derivatives -----------------------------------------------------------------------------------


def vjp(f: Function, *xs: Any) -> Any:
    flat, specs = flattened(f, xs)
    ys, pull = torch.func.vjp(flat, *optree.tree_leaves(xs))
    spec = optree.tree_structure(xs)

    def back(dy: Any) -> Any:
        return optree.tree_unflatten(spec, pull(tuple(optree.tree_leaves(dy))))

    return optree.tree_unflatten(specs[0], ys), back


def grad(f: Function) -> Function:
    def run(*args: Any) -> Any:
        y, back = vjp(f, *args)
        return back(torch.ones_like(y))[0]

    return run


def jvp(f: Function, xs: Sequence[Any], dxs: Sequence[Any]) -> Any:
    """Forward mode by two passes backward: custom functions have no other."""
    y, pull = torch.func.vjp(f, *xs)
    _, push = torch.func.vjp(pull, torch.zeros_like(y))
    return y, push(tuple(dxs))[0]


def values_and_gradients(f: Function, xs: Sequence[np.ndarray], order: int) -> list[np.ndarray]:
    """What the campaign compares of f, or of a weighed sum of its gradients."""
    leaves = [torch.tensor(x, requires_grad=True) for x in xs]
    y = f(*leaves)
    for _ in range(order - 1):
        parts = gradients(y, leaves)
        y = torch.zeros((), dtype=torch.float64)
        for i, dx in enumerate(parts):
            weights = np.cos(np.arange(dx.numel()) + i).reshape(dx.shape)
            y = y + torch.sum(dx * torch.from_numpy(weights))
    return [a.detach().numpy() for a in (y, *gradients(y, leaves))]


def gradients(y: torch.Tensor, xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in xs]
    options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(y, xs, **options)
