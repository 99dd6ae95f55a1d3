"""One rule in two processes, under DDP and then FSDP2, with the same weights as in one process.

The network has activations of -1 and 1. Its `sign` trains with a straight-through estimator, a rule
that a scope activates. The network and the code that distributes it need no change: each process
opens the scope around its own training. Each process counts its own hits; `gather` and
`assert_fired(group=…)` combine all processes.

Run:     torchrun --nproc-per-node 2 examples/at_scale_torch.py      (some seconds)
Prints:  whether the weights equal the weights of one process with the whole batch, and of one
         without the rule; the hits of both processes.
Needs:   pip install '.[torch]'
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regrad as rg
import regrad.torch

RULES = {"Sign": rg.rules.clipped_straight_through}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.double()

    def forward(self, x):
        return self.last(torch.sign(self.first(x)))


def train(model, x, y):
    """Return the weights after five steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    state = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in model.parameters()]
    return torch.cat([w.detach().flatten() for w in state])


def main():
    dist.init_process_group("gloo")
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).double()
    y = x[:, :1] * x[:, 1:2]
    mine = [part.chunk(dist.get_world_size())[dist.get_rank()] for part in (x, y)]

    without = train(Network(), x, y)
    with regrad.torch.gradient_override_map(RULES):
        alone = train(Network(), x, y)

    in_shards = partial(fully_shard, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for name, spread in (("DDP", DistributedDataParallel), ("FSDP2", in_shards)):
        with regrad.torch.gradient_override_map(RULES) as used:
            weights = train(spread(Network()), *mine)
        used.assert_fired(group=dist.group.WORLD)  # call it in every process
        table = used.gather()
        if dist.get_rank() == 0:
            print(f"{name}: equal to one process: {torch.allclose(weights, alone)}", end=", ")
            print(f"to one without the rule: {torch.allclose(weights, without)}")
            print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
