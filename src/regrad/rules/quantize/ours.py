"""Plans for functions of regrad, and the code that they share with JAX functions.

In a product, the operand that does not depend on the data is the weights. To find this operand, the
host runs a function twice, with different data, and compares the operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regrad.autodiff.variables import Variable
from regrad.core.backends import is_traced
from regrad.core.containers import flatten
from regrad.core.dispatch import lift
from regrad.core.overrides import gradient_override_map
from regrad.core.scopes import optional
from regrad.core.surrogates import replace
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError
from regrad.rules.quantize.layers_of_hosts import (
    Call,
    Layer,
    LayerForward,
    LayerKind,
    Recorder,
    forwards_of,
)

PRODUCT = LayerKind("MatMul", ("a", "b"), {"products": ""})
WITH_WEIGHTS = {
    (True, False): PRODUCT._replace(roles={"weights": "a", "inputs": "b"}, channel=-2, inputs=-1),
    (False, True): PRODUCT._replace(roles={"weights": "b", "inputs": "a"}, channel=-1, inputs=-2),
    (False, False): PRODUCT,
}
KINDS = [
    PRODUCT,
    LayerKind("Conv2D", ("x", "w"), {"weights": "w", "inputs": "x"}, -1, -2),
    LayerKind("Relu", ("x",), {"activations": "y"}),
]
Seen = tuple[LayerKind, str, list[np.ndarray]]


class ArrayRecorder(Recorder):
    """A recorder of arrays."""

    def note(self, site: Any, values: Sequence[Any]) -> None:
        """Record a call."""
        if any(is_traced(v._data) for v in values):
            raise ArgumentError(
                "quantize: the function is compiled, and values inside a compiled function are "
                "unknown while it is traced. Pass the function without rg.jit."
            )
        self.seen.append((self.kind, site.path, [v.numpy() for v in values]))


def told_apart(first: Sequence[Seen], second: Sequence[Seen]) -> list[Call]:
    """Return the calls of a run, products with their roles, compared with a run of other data."""
    if [(k, p) for k, p, _ in first] != [(k, p) for k, p, _ in second]:
        raise ArgumentError("quantize: the function calls different layers for different data")
    calls: list[Call] = []
    for (kind, path, values), (_, _, others) in zip(first, second, strict=True):
        held = dict(zip((*kind.operands, "y"), values, strict=True))
        if kind is PRODUCT:
            same = [np.array_equal(x, other) for x, other in zip(values, others, strict=True)]
            found = WITH_WEIGHTS.get((same[0], same[1]))
            if found is None:  # (a constant for any data)
                continue
            kind = found
        calls.append(Call(path, kind, held))
    return calls


def other_data(x: np.ndarray) -> np.ndarray:
    """Return different data of the same shape and dtype; integers are taken from the sample."""
    flipped = np.flip(x)
    return 0.5 * flipped + 0.1 * x.max() if x.dtype.kind == "f" else flipped


class FunctionSteps:
    """The arrays of a plan's quantizers, by the paths of the layers."""

    forward: type[LayerForward] = LayerForward

    def __init__(
        self, arrays: dict[str, dict[str, Any]], layers: Sequence[Layer], others: Sequence[Any],
        forwards: Sequence[LayerForward] = (),
    ) -> None:  # fmt: skip
        self.arrays = arrays
        self.layers: tuple[Layer, ...] = tuple(layers)
        self.others: tuple[Any, ...] = tuple(others)
        self.forwards: tuple[LayerForward, ...] = tuple(forwards) or forwards_of(
            self.layers, self.others, self.forward
        )

    def __getitem__(self, path: str) -> dict[str, Any]:
        return self.arrays[path]

    def __repr__(self) -> str:
        return f"steps({self.arrays!r})"


class VariableSteps(FunctionSteps):
    """The arrays of a plan for regrad's functions, as Variables."""

    @property
    def variables(self) -> list[Variable]:
        """Return the trainable Variables, for optimizers."""
        held = [v for part in self.arrays.values() for v in part.values()]
        return [v for v in held if v.trainable]

    def with_arrays(self, arrays: Mapping[str, Mapping[str, Any]]) -> VariableSteps:
        """Assign arrays that are not trained; return self."""
        for path, held in arrays.items():
            for name, v in self.arrays[path].items():
                if not v.trainable:
                    v.assign(lift(held[name]))
        return self


class OurHost:
    """The host of functions of regrad."""

    forward: type[LayerForward] = LayerForward

    def calls(self, model: Any, sample: Any, named: Any) -> list[Call]:
        """Run a function on a sample and on other data; return the calls of its layers."""
        runs: list[list[Seen]] = []
        leaves, rebuild = flatten((list(sample), named))
        data = {id(x) for x in (*sample, *named.values()) if isinstance(x, Tensor | np.ndarray)}
        changed = [
            lift(other_data(lift(x).numpy())) if id(x) in data else x for x in leaves
        ]  # (containers hold parameters)
        for each in (leaves, changed):
            seen: list[Seen] = []
            rules = {kind.what: optional(replace(ArrayRecorder(kind, seen))) for kind in KINDS}
            with gradient_override_map(rules, values=True):
                args, options = rebuild(each)
                model(*args, **options)
            runs.append(seen)
        return told_apart(*runs)

    def owner(self, model: Any, weights: Any) -> Any:
        """Return None: a function does not expose its parameters."""
        return None

    def parameter(self, model: Any, owner: Any) -> Any:
        """Return None: a function does not expose its parameters."""
        return None

    def steps(
        self, layers: Sequence[Layer], others: Any, arrays: Mapping[str, Any]
    ) -> VariableSteps:  # fmt: skip
        """Return the arrays of layers as Variables."""
        held: dict[str, dict[str, Any]] = {}
        for layer in layers:
            part = held.setdefault(layer.name, {})
            for name, role, state in layer.states():
                learned = layer.quantizers[role].states[state].learned
                full = f"{layer.name.replace('.', '/') or 'steps'}/{name}"
                part[name] = Variable(arrays[layer.name][name], trainable=learned, name=full)
        return VariableSteps(held, layers, others)
