"""`torch.autograd.grad` by `.backward()`, in which autograd's engine behaves in another way.

`torch.autograd.grad` tells the engine which gradients to compute; `.backward()` computes all of
them. PyTorch's users call `.backward()`, and tests are shorter with `torch.autograd.grad`.
"""

from __future__ import annotations

import os
import sys
import warnings
from itertools import count
from typing import Any

import torch

ROAD = os.environ.get("REGRAD_GRADIENT_ROAD", "")  # "backward": each test uses `.backward()`


def install(monkeypatch: Any) -> None:
    """Have `torch.autograd.grad` run `.backward()` where our tests call it, and nowhere else."""
    plain = torch.autograd._engine_run_backward

    def run(outputs: Any, *args: Any, accumulate_grad: bool, **options: Any) -> Any:
        dys, keeps, records, inputs, *_ = args
        ours = sys._getframe(2).f_globals.get("__name__", "").startswith("tests.")
        tensors = all(isinstance(x, torch.Tensor) for x in (*outputs, *inputs))
        if accumulate_grad or not (ours and tensors):
            return plain(outputs, *args, accumulate_grad=accumulate_grad, **options)

        def backward() -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
                plain(outputs, dys, keeps, records, (), True, accumulate_grad=True)

        return gradients(backward, outputs, inputs, allow_unused=args[4])

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run)


_calls = count()


def rotating(ys: Any, xs: Any, dys: Any, **options: Any) -> Any:
    """Return the gradients by inputs, None for unused ones; by `.backward()` every second time.

    Campaigns call it, whose cases come in a fixed order.
    """
    if next(_calls) % 2 == 0:
        return torch.autograd.grad(ys, xs, dys, allow_unused=True, **options)
    return gradients(lambda: torch.autograd.backward(ys, dys, **options), ys, xs, allow_unused=True)


def gradients(backward: Any, outputs: Any, inputs: Any, allow_unused: bool) -> Any:
    """Return the gradients that arrive at inputs; the `grad` of all leaves stays as it was."""
    found: list[Any] = [None] * len(inputs)

    def keep(i: int) -> Any:
        return lambda dx: found.__setitem__(i, dx)

    leaves = _leaves([*outputs, *inputs])
    before = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    hooks = [x.register_hook(keep(i)) for i, x in enumerate(inputs)]
    try:
        backward()
    finally:
        for hook in hooks:
            hook.remove()
        for x, dx in zip(leaves, before, strict=True):
            x.grad = dx
    if not allow_unused and any(dx is None for dx in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return tuple(found)


def _leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves behind tensors, in whose `grad` `.backward()` accumulates."""
    leaves = {id(x): x for x in tensors if x.is_leaf}
    nodes, seen = [x.grad_fn for x in tensors], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        x = getattr(node, "variable", None)
        if isinstance(x, torch.Tensor):
            leaves[id(x)] = x
        nodes += [behind for behind, _ in node.next_functions]
    return [*leaves.values()]
