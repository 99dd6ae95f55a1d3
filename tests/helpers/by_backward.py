"""`torch.autograd.grad` by `.backward()`, which makes the engine run otherwise.

`torch.autograd.grad` tells the engine which gradients to compute. `.backward()` computes all of
them, so nodes of autograd that are called in a backward pass behave in another way. PyTorch's users
call `.backward()`; tests are shorter with `torch.autograd.grad`.
"""

from __future__ import annotations

import os
import sys
import warnings
from types import ModuleType
from typing import Any

import torch
from torch.autograd.graph import Node

from regrad.torch.nodes import gradients

ROAD = os.environ.get("REGRAD_GRADIENT_ROAD", "")  # "backward": each test goes by it


class _Autograd(ModuleType):
    """`torch.autograd` as the tests see it. (PyTorch itself reads the globals of the module.)"""

    def __getattr__(self, name: str) -> Any:
        return getattr(_plain, name)

    def grad(self, outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("tests.")
        if not ours or options.get("is_grads_batched"):
            return _plain.grad(outputs, inputs, *args, **options)
        return grad_by_backward(outputs, inputs, *args, **options)


_plain = torch.autograd


def install(monkeypatch: Any) -> None:
    """Send the calls of `torch.autograd.grad` in our tests, and no other calls, by `.backward()`."""
    gradients()  # (which is cached, and has PyTorch's own function)
    monkeypatch.setattr(torch, "autograd", _Autograd("torch.autograd"))


def grad_by_backward(
    outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None,
    create_graph: bool = False, allow_unused: Any = None, materialize_grads: bool = False,
) -> Any:  # fmt: skip
    """Return what `torch.autograd.grad` returns; the `grad` of leaves stays as it was."""
    one = isinstance(inputs, torch.Tensor)
    inputs = [inputs] if one else [*inputs]
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [*outputs]
    found: list[Any] = [None] * len(inputs)
    for x in inputs:
        if not x.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")

    def keep(i: int) -> Any:
        def hook(dx: torch.Tensor) -> None:
            found[i] = dx

        return hook

    leaves = _leaves([*outputs, *[x for x in inputs if x.is_leaf]])
    before = [x.grad for x in leaves]
    hooks = [x.register_hook(keep(i)) for i, x in enumerate(inputs)]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
            torch.autograd.backward(outputs, grad_outputs, retain_graph, create_graph)
    finally:
        for hook in hooks:
            hook.remove()
        for x, dx in zip(leaves, before, strict=True):
            x.grad = dx
    if materialize_grads:
        found = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(inputs, found)]
    elif not allow_unused and any(dx is None for dx in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    return tuple(found)


def _leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the leaves behind tensors, in whose `grad` `.backward()` accumulates."""
    leaves = {id(x): x for x in tensors if x.is_leaf}
    nodes: list[Node | None] = [x.grad_fn for x in tensors]
    seen: set[Any] = set()
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
