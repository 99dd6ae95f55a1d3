"""Which backward pass runs: that of a program, or one through a gradient that rules have made.

A rule with `order=1` is for the first derivative, and an op's node in autograd's record cannot know
which derivative it is asked for: the engine calls it in the same way. But what differentiates a
gradient (made with `create_graph=True`) goes through what has made it. So each gradient that leaves
an op under such a rule passes a node of `Gradient`. With g = rule(x, dy), the record behind g is

    g ← Gradient ← the ops of the rule ← what x and dy were made of
          ↑ x

A backward pass that will run one of these nodes is of a gradient. In it ops under such rules have
their own gradients, throughout: also on a way that leads to them past the rule.

Invariants:

* The engine is asked what it will run. (The order in which nodes run would not do: they may be on
  several devices, each with a thread of its own.)
* A node hangs on the inputs of the op as well, to which it has no gradient. So it is there, and on
  the way, where the rule returns a constant, and the ops before it go on with that.
* What leaves a node, or an op's own gradient, passes a node, too: it belongs to the next order.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from regrad.torch.bridge import apply
from regrad.torch.host import ORDERS, current_pass, will_run
from regrad.torch.host.running import Silent

_LOCK = threading.Lock()
_made: weakref.WeakSet[Any] = weakref.WeakSet()  # the nodes of `Gradient` that there are
_known: tuple[int, bool] = -1, False  # the pass that was asked for last, and the answer


class Gradient(torch.autograd.Function, metaclass=Silent):
    """A gradient as it is, that left an op of these inputs."""

    @staticmethod
    def forward(dx: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
        return dx.view_as(dx)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])
        with _LOCK:
            _made.add(ctx)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        global _known
        _known = current_pass(), True  # (of the root, which runs first, the engine does not tell)
        xs = ctx.saved_tensors
        return *in_gradient(dys, xs), *[None] * len(xs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: torch.Tensor) -> Any:
        return apply(Gradient, *args), in_dims[0]


def in_gradient(dxs: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
    """Return gradients that leave an op of xs; later backward passes will know them for such."""
    if not torch.is_grad_enabled():
        return list(dxs)
    moving = [x for x in xs if x is not None and x.requires_grad]
    return [None if dx is None else apply(Gradient, dx, *moving) for dx in dxs]


def is_of_gradient() -> bool:
    """Return whether the backward pass that runs is one through a gradient."""
    global _known
    now = current_pass()
    if now != _known[0]:
        ORDERS.require()
        with _LOCK:
            nodes = list(_made)
        _known = now, now >= 0 and any(map(will_run, nodes))
    return _known[1]
