"""Plans of `regrad.rules.quantize` for models of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from regrad.core.scopes import optional
from regrad.core.surrogates import replace
from regrad.errors import ArgumentError
from regrad.rules.quantize.layers_of_hosts import (
    Call,
    Layer,
    LayerForward,
    LayerKind,
    Recorder,
    forwards_of,
)
from regrad.rules.quantize.ours import PRODUCT, WITH_WEIGHTS
from regrad.torch.host import base_of
from regrad.torch.overriding import gradient_override_map
from regrad.torch.relevance import as_found

_DENSE = {"weights": "w", "inputs": "x"}
_OPERANDS = ("x", "w", "bias")
_CONVOLUTIONS = [
    LayerKind(getattr(F, f"conv{transposed}{n}d"), _OPERANDS, _DENSE, *axes)
    for transposed, axes in (("", (0, 1)), ("_transpose", (1, 0)))
    for n in (1, 2, 3)
]
KINDS = [
    LayerKind(F.linear, _OPERANDS, _DENSE),
    *_CONVOLUTIONS,
    LayerKind(F.embedding, ("input", "weight"), {"weights": "weight"}),
    PRODUCT,
    *[LayerKind(what, ("x",), {"activations": "y"}) for what in ("Relu", "Relu6")],
    LayerKind("ClipByValue", ("x", "min", "max"), {"activations": "y"}),
    LayerKind(F.hardtanh, ("x",), {"activations": "y"}),
]  # fmt: skip


class TorchForward(LayerForward):
    """The function of a layer, written with torch's functions."""


class TorchRecorder(Recorder):
    """A recorder for tensors."""

    def note(self, site: Any, values: Sequence[Any]) -> None:
        """Note a call, with its operands and its result."""
        held = dict(zip((*self.kind.operands, "y"), values, strict=True))
        self.seen.append(Call(site.path, self.kind, held, site.module_class))


class TorchHost:
    """Models of PyTorch."""

    forward: type[LayerForward] = TorchForward

    def calls(self, model: nn.Module, sample: Any, named: Any) -> list[Call]:
        """Run a model on a sample without changing the model; return the calls of its layers."""
        calls: list[Call] = []
        rules = {kind.what: optional(replace(TorchRecorder(kind, calls))) for kind in KINDS}
        with (
            as_found(model),
            torch.no_grad(),
            gradient_override_map(rules, values=True, model=model),
        ):
            model(*sample, **named)
        return [self._with_roles(model, call) for call in calls]

    def _with_roles(self, model: nn.Module, call: Call) -> Call:
        """Return a product with the role of weights for an operand that is a parameter."""
        if call.kind is not PRODUCT:
            return call
        a, b = (self.owner(model, call.operands[n]) is not None for n in "ab")
        return call._replace(kind=WITH_WEIGHTS.get((a, b), PRODUCT))

    def owner(self, model: nn.Module, weights: torch.Tensor) -> str | None:
        """Return the name of the parameter that the weights are, or are a view of."""
        base = base_of(weights)
        known = {p.data_ptr(): name for name, p in reversed([*model.named_parameters()])}
        return known.get(base.data_ptr()) if base.numel() else None

    def parameter(self, model: nn.Module, owner: str | None) -> Any:
        """Return a parameter by its name."""
        return None if owner is None else model.get_parameter(owner).detach()

    def steps(self, layers: Sequence[Layer], others: Any, arrays: Mapping[str, Any]) -> Steps:
        """Return the arrays of layers as a module."""
        return Steps(layers, others, arrays)


class _Part(nn.Module):
    """The arrays of a module and of its submodules."""


class Steps(nn.Module):
    """The arrays of a plan's quantizers, by the paths of the layers.

    Learned arrays are parameters, and observed arrays are buffers. `steps[path]` is a dict of the
    arrays of a layer.
    """

    def __init__(self, layers: Sequence[Layer], others: Any, arrays: Mapping[str, Any]) -> None:
        super().__init__()
        plain = {"layers": [*layers], "others": others}
        plain["forwards"] = forwards_of(layers, others, TorchForward)
        self.__dict__["_plan"] = plain
        for layer in layers:
            part = self._part(layer.name)
            for name, role, state in layer.states():
                if role == "weights" and layer.shares is not None:
                    continue
                x = arrays[layer.name][name]
                if layer.quantizers[role].states[state].learned:
                    part.register_parameter(name, nn.Parameter(x.clone()))
                else:
                    part.register_buffer(name, x.clone())

    def _part(self, path: str) -> nn.Module:
        part: nn.Module = self
        for name in path.split(".") if path else ():
            # (`add_module` rejects names of attributes, but models may have a module `layers`)
            part = part._modules.setdefault(name, _Part())  # pyright: ignore[reportAssignmentType]
        return part

    def __getitem__(self, path: str) -> dict[str, torch.Tensor]:
        part = self._part(path)
        return dict([*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)])

    @property
    def layers(self) -> list[Layer]:
        """The quantized layers."""
        return self.__dict__["_plan"]["layers"]

    @property
    def others(self) -> list[Any]:
        """One call of each layer without quantization."""
        return self.__dict__["_plan"]["others"]

    @property
    def forwards(self) -> tuple[LayerForward, ...]:
        """The functions that compute the layers, by path and kind."""
        return self.__dict__["_plan"]["forwards"]

    def with_arrays(self, arrays: Mapping[str, Mapping[str, Any]]) -> Steps:
        """Write arrays into the buffers; return self."""
        for path, held in arrays.items():
            for name, x in self[path].items():
                if not isinstance(x, nn.Parameter):
                    x.copy_(held[name])
        return self

    def forward(self, *args: Any) -> Any:
        raise ArgumentError(
            "steps are the arrays of a plan, not a model: open a scope with plan.rules(steps)"
        )
