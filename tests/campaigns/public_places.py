"""Rules at one place of public models: which ops of the record are there.

As the plain model runs, hooks on its modules note the numbers of autograd's nodes that each call of
a module made. So the ops that a key `rg.at(where, op_type)` means are known without asking the
library, which is under test.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import regrad as rg
from tests.campaigns.public_oracle import Op

KINDS = ("path", "class", "nth")


class Call(NamedTuple):
    """One call of a module: its path in the model, its class, and the nodes that it made."""

    path: str  # "" for the model itself, and for modules that are none of its
    kind: type
    start: int
    end: int

    def made(self, op: Op) -> bool:
        return self.start <= op.node._sequence_nr() < self.end


def calls_of(model: torch.nn.Module, run: Callable[[], Any]) -> tuple[Any, list[Call]]:
    """The result of a run, and the calls of modules in it, in the order in which they ended.

    Modules from outside of the model are seen as well: transformers keep a few for all models.
    """
    number: Any = torch.autograd._get_sequence_nr  # pyright: ignore[reportPrivateImportUsage]
    paths = {id(module): path for path, module in model.named_modules()}
    starts: list[int] = []
    calls: list[Call] = []

    def end(module: torch.nn.Module, *_: Any) -> None:
        calls.append(Call(paths.get(id(module), ""), type(module), starts.pop(), number()))

    handles = [
        register_module_forward_pre_hook(lambda *_: starts.append(number())),
        register_module_forward_hook(end),
    ]
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
    where: Any = type(module.get_submodule(path)) if kind == "class" else path
    here = [call for call in calls if where in (call.path, call.kind)]
    at_place = [op for op in ordered if any(call.made(op) for call in here)]
    if kind != "nth":
        return rg.at(where, op_type), lambda op: op in at_place
    return rg.at(where, op_type, nth=0), lambda op: op is at_place[0]
