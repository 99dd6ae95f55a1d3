"""Rules for parameters under DDP and FSDP2: `tests/torch/test_parameters.py` runs two processes.

    python tests/helpers/parallel_parameters.py REPORT RANK PORT

Each process has one half of the batch. The reference computes both halves without regrad, clips
the weights' gradients of each half by hand, and takes the mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regrad as rg
import regrad.torch


def clip(dy: Tensor) -> Tensor:
    return dy / (1 + dy.norm())


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch() -> Tensor:
    return torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def reference() -> dict[str, Tensor]:
    """The mean of the clipped gradients of both processes."""
    found: list[dict[str, Tensor]] = []
    for x in batch():
        net = make()
        net(x).pow(2).sum().backward()
        found.append({name: p.grad for name, p in net.named_parameters()})  # pyright: ignore
    pairs = {name: (found[0][name], found[1][name]) for name in found[0]}
    local = {n: map(clip, ds) if n.endswith("weight") else ds for n, ds in pairs.items()}
    return {name: sum(ds) / 2 for name, ds in local.items()}  # pyright: ignore


def check(wrap: Callable[[Any], Any]) -> None:
    model, x = wrap(make()), batch()[dist.get_rank()]
    with regrad.torch.gradient_override_map({rg.at(parameter="*.weight"): clip}, model=model) as u:
        for _ in range(3):  # (in one scope, and without a step in between)
            model.zero_grad()
            model(x).pow(2).sum().backward()
            expected = reference()
            for name, p in model.named_parameters():
                dx = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                torch.testing.assert_close(dx, expected[name.removeprefix("module.")])
    u.assert_fired(group=dist.group.WORLD)
    assert [(hit.path, hit.ran) for hit in u.hits] == [("0.weight", 3), ("2.weight", 3)]


def in_shards(model: nn.Sequential) -> Any:
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def main(report: str, rank: str, port: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2
    )
    for wrap in (DistributedDataParallel, in_shards):
        print(wrap.__name__, flush=True)
        check(wrap)
        dist.barrier()
    Path(report).write_text(json.dumps({"ddp": None, "fsdp": None}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
