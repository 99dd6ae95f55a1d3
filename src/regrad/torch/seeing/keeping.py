"""The tensors that torch keeps for a backward pass, and the functions that kept them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from regrad.inspection.recorder import Kept
from regrad.torch.host import DisableTorchFunction
from regrad.torch.nodes import tensors
from regrad.torch.seeing.modules import found_in
from regrad.torch.seeing.notes import OpNote
from regrad.torch.seeing.watching import Looker


def kept(f: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> list[Kept]:
    """Run a function; each storage that its backward pass keeps, and what kept it first."""
    held = found_in(f, args, options)
    keeper = _Keeper(held)
    with keeper.looking(), torch.autograd.graph.saved_tensors_hooks(keeper.pack, _as_it_is):
        value = f(*args, **options)
    alive = set(_storages((args, options, held, keeper.leaves)))
    for module in keeper.paths.seen:
        alive |= set(_storages(([*module.parameters(), *module.buffers()],)))
    rows = list(keeper.rows(alive))
    del value  # what it keeps was alive until now
    return rows


class _Keeper(Looker):
    """Sees what each function saves."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__(held)
        self.saved: dict[int, tuple[StorageWeakRef, OpNote, int]] = {}

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor is saved, by the call that began last."""
        with DisableTorchFunction():
            if self.closed or x.layout is not torch.strided:
                return x
            storage = x.untyped_storage()
            weak = StorageWeakRef(storage)
            known = self.saved.get(weak.cdata)
            if known is None or (not self.ran_backward and known[0].expired()):
                self.saved[weak.cdata] = weak, self.last or OpNote(""), storage.nbytes()
            return x.detach()  # (an op's own output would hold the op that holds it)

    def rows(self, alive: set[int]) -> Iterator[Kept]:
        """Return the rows of the storages that are still kept; of all, after the backward pass."""
        for key, (storage, note, size) in self.saved.items():
            if key not in alive and (self.ran_backward or not storage.expired()):
                yield note.op_type, note.line, note.path, size


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def _storages(values: Any) -> Iterable[int]:
    """The storages of tensors."""
    for x in tensors((values,)):
        if x.layout is torch.strided:
            yield StorageWeakRef(x.untyped_storage()).cdata
