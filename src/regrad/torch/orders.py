"""Which backward pass runs: that of a program, or one through a gradient that rules have made.

A rule with `order=1` gives the first derivative, and an op's node in autograd's record cannot know
which derivative it is asked for: the engine calls it in the same way. But what differentiates a
gradient goes through the ops that have made the gradient, and those are there only if it was made
with `create_graph=True`. So all that such a rule is given then, and all that it returns, passes a
node of `Gradient`. With one rule, and g = rule(x, dy), the record behind g is

    g ← Gradient ← the ops of the rule ← Gradient ← the op under the rule, which made x

A backward pass that will run one of these nodes is of a gradient. In it ops under such rules have
their own gradients, throughout: also on a way that leads to them past the rule.

Invariants:

* The engine is asked what it will run. (The order in which nodes run would not do: they may be on
  several devices, each with a thread of its own.)
* What an op's own gradient returns passes a node, too, for the derivatives of the next order.
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
    """A tensor as it is, in a gradient that rules have made."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        with _LOCK:
            _made.add(ctx)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        return dys[0]

    @staticmethod
    def vmap(info: Any, axes: Any, x: torch.Tensor) -> Any:
        return apply(Gradient, x), axes[0]


def in_gradient(xs: Sequence[Any]) -> list[Any]:
    """Return the same tensors, of which a later backward pass will know that they are in one."""
    return [x if x is None or not x.requires_grad else apply(Gradient, x) for x in xs]


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
