"""Rules at one place of public models: which ops of the record are there.

As the plain model runs, hooks on its modules note the numbers of autograd's nodes that each call of
a module made. So the ops that a key `rg.at(where, op_type)` means are known without asking the
library, which is under test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import regrad as rg
from tests.campaigns.public_oracle import Op

KINDS = ("path", "class", "nth")


class Call(NamedTuple):
    """One call of a module: its path, and the numbers of the nodes that it made."""

    path: str
    start: int
    end: int

    def made(self, op: Op) -> bool:
        return self.start <= op.node._sequence_nr() < self.end


def calls_of(module: torch.nn.Module, run: Callable[[], Any]) -> tuple[Any, list[Call]]:
    """The result of a run, and the calls of modules in it, in the order in which they ended."""
    number: Any = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
    starts: defaultdict[str, list[int]] = defaultdict(list)
    calls: list[Call] = []
    handles = []
    for path, each in module.named_modules():

        def begin(*_: Any, path: str = path) -> None:
            starts[path].append(number())

        def end(*_: Any, path: str = path) -> None:
            calls.append(Call(path, starts[path].pop(), number()))

        handles += [each.register_forward_pre_hook(begin), each.register_forward_hook(end)]
    try:
        return run(), calls
    finally:
        for handle in handles:
            handle.remove()


def places(
    module: torch.nn.Module, calls: Sequence[Call], op_type: str, ops: Sequence[Op], kind: str
) -> tuple[Any, Callable[[Op], bool]] | None:
    """A key for one place where ops of a type run, and which ops it means.

    None if no module but the model itself runs any. The place is that of the op in the middle.
    """
    ordered = sorted(ops, key=lambda op: op.node._sequence_nr())
    middle = ordered[len(ordered) // 2]
    path = next((call.path for call in calls if call.path and call.made(middle)), None)
    if path is None:
        return None
    modules = dict(module.named_modules())
    where: Any = type(modules[path]) if kind == "class" else path
    named = {p for p, m in modules.items() if (type(m) is where if kind == "class" else p == path)}
    here = [call for call in calls if call.path in named]
    at_place = [op for op in ordered if any(call.made(op) for call in here)]
    if kind != "nth":
        return rg.at(where, op_type), lambda op: op in at_place
    return rg.at(where, op_type, nth=0), lambda op: op is at_place[0]
