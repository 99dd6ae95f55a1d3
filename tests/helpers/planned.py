"""Training of a network under a plan of quantizers, in one process or several."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import regrad.torch
from regrad.rules import quantize as Q
from tests.helpers import networks as nets

override = regrad.torch.gradient_override_map
PLAN = Q.layers(Q.lsq(8), Q.affine(8, per="token"), where="blocks.*")


def trained_by_a_plan(model: Any, batch: nets.Batch, wrap: Any = None, mean: bool = False) -> Any:
    """Return the state of a model and the steps of its plan after three steps of training."""
    steps = model.steps = PLAN.steps(model, nets.texts()[0])
    if mean:  # (the steps stay outside of what is sharded, and their gradients are averaged)
        del model.steps
    run = model if wrap is None else wrap(model)
    optimizer = torch.optim.SGD([*{*run.parameters(), *steps.parameters()}], lr=0.1)
    with override(PLAN.rules(steps), values=True, model=model) as used:
        for _ in range(3):
            optimizer.zero_grad()
            nets.loss_of(run(batch[0]), batch[1]).backward()
            for p in steps.parameters() if mean else ():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= 2
            optimizer.step()
    used.assert_fired()
    held = nets.state(model)
    return {k: x for k, x in held.items() if "steps" not in k} | nets.state(steps)
