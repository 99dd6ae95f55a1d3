"""The kind of backward pass that runs: a program's own, or one through a gradient from rules.

A rule with `order=1` defines only the first derivative. The node of an op in autograd's record does
not have the order of the derivative, because the engine calls the node in the same way at every
order. But differentiating a gradient (made with `create_graph=True`) passes through the ops that
computed the gradient. So each gradient that leaves an op under such a rule passes a node of
`Gradient`. With g = rule(x, dy), the record of g is

    g ← Gradient ← the ops of the rule ← the ops that computed x and dy
          ↑ x

A backward pass that will run one of these nodes differentiates a gradient. In this pass, ops under
such rules have their own gradients throughout, also on paths that reach them without the rule.

Invariants:

* regrad queries the engine for the nodes that it will run. (The order in which nodes run is not
  sufficient: nodes may be on several devices, and each device has a thread.)
* A `Gradient` node also has edges to the inputs of the op, without a gradient for them. So the node
  exists, and is on the path, even if the rule returns a constant.
* Gradients that leave such a node, or an op's own gradient, pass another node for the next order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from regrad.torch.bridge import alias, apply
from regrad.torch.host import ORDERS, current_pass, will_run
from regrad.torch.host.running import Silent

_LOCK = threading.Lock()
_made: weakref.WeakSet[Any] = weakref.WeakSet()  # the existing nodes of `Gradient`
_known: tuple[int, bool] = -1, False  # the last pass that regrad queried, and the result


class Gradient(torch.autograd.Function, metaclass=Silent):
    """The identity, for a gradient that left an op with these inputs."""

    @staticmethod
    def forward(dx: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
        return alias(dx)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])
        with _LOCK:
            _made.add(ctx)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        global _known
        _known = current_pass(), True  # (the engine does not report the root, which runs first)
        xs = ctx.saved_tensors
        return *in_gradient(dys, xs), *[None] * len(xs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: torch.Tensor) -> Any:
        return apply(Gradient, *args), in_dims[0]


def in_gradient(dxs: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """Mark gradients that leave an op of xs, so that later backward passes can identify them."""
    if not torch.is_grad_enabled():
        return list(dxs)
    moving = [x for x in xs if x is not None and x.requires_grad]
    return [None if dx is None else apply(Gradient, dx, *moving) for dx in dxs]


def is_of_gradient() -> bool:
    """Return whether the running backward pass differentiates a gradient."""
    global _known
    now = current_pass()
    if now != _known[0]:
        ORDERS.require()
        with _LOCK:
            nodes = list(_made)
        _known = now, now >= 0 and any(map(will_run, nodes))
    return _known[1]
