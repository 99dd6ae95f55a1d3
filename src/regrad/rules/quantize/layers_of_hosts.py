"""Quantized layers: their interface to hosts, and the functions that replace their calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from regrad.core.places import at
from regrad.core.surrogates import replace
from regrad.errors import RuleError
from regrad.rules.quantize.quantizers import Quantizer

POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


class LayerKind(NamedTuple):
    """A kind of layer: the function that computes it.

    Args:
        what: The key for its calls.
        operands: The names of its inputs in a rule, in the order of `forward`.
        roles: The operand of each role. For a product, only a sample shows which operand is the
            weights.
        channel: The axis of output channels of its weights.
        inputs: The axis of the input features of its weights.
    """

    what: Any
    operands: tuple[str, ...]
    roles: Mapping[str, str]
    channel: int = 0
    inputs: int = -1

    @property
    def name(self) -> str:
        """Return the name in reports."""
        return self.what if isinstance(self.what, str) else self.what.__name__


class Call(NamedTuple):
    """A call of a layer with a sample (without operands: a layer that is not quantized)."""

    path: str
    kind: LayerKind
    operands: dict[str, Any]
    module_class: type | None = None

    @property
    def place(self) -> tuple[str, str]:
        """Return the path and the function of the layer."""
        return self.path, self.kind.name

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of the weights, or None without weights."""
        return _shape_of(self.kind, self.operands)


def _shape_of(kind: LayerKind, operands: Mapping[str, Any]) -> tuple[int, ...] | None:
    name = kind.roles.get("weights")
    return None if name is None else tuple(map(int, operands[name].shape))


class Host(Protocol):
    """A library whose models can be quantized."""

    forward: type[LayerForward]

    def calls(self, model: Any, sample: Any, named: Any) -> list[Call]:
        """Run a model on a sample; return the calls of its layers, products with their roles."""
        ...

    def owner(self, model: Any, weights: Any) -> Any:
        """Return the identity of the parameter that holds the weights, or None."""
        ...

    def parameter(self, model: Any, owner: Any) -> Any:
        """Return the parameter with an identity, or None if the model does not expose it."""
        ...

    def steps(self, layers: Sequence[Layer], others: Any, arrays: Mapping[str, Any]) -> Any:
        """Return the arrays of layers, by path, as the library trains them."""
        ...


@dataclass(eq=False, repr=False)
class Layer:
    """A quantized layer.

    Args:
        path: The path of the layer.
        kind: The function that it calls.
        quantizers: The quantizers of its operands, by role and, for products, by operand.
        shape: The shape of its weights, if layers with other shapes have the same path.
        number: The number of this layer among these.
    """

    path: str
    kind: LayerKind
    quantizers: dict[str, Quantizer]
    number: int = 0
    shape: tuple[int, ...] | None = None
    owner: Any = None  # the parameter that holds its weights, if known
    shares: Layer | None = None  # the layer with the same weights, which has their arrays
    stats: dict[str, Any] = field(default_factory=dict)  # statistics of the sample

    @property
    def name(self) -> str:
        """Return the path, with a number if several layers have it."""
        return f"{self.path}[{self.number}]" if self.shape is not None else self.path

    @property
    def key(self) -> Any:
        """The key in a map of rules."""
        return at(self.path, self.kind.what) if self.path else self.kind.what

    def operand(self, role: str) -> str:
        """Return the operand that has a role."""
        return self.kind.roles.get(role, role.removeprefix("products_"))

    def has(self, call: Call) -> bool:
        """Return whether a call with the sample is a call of this layer."""
        same = call.place == (self.path, self.kind.name) and call.kind.roles == self.kind.roles
        return same and self.shape in (None, call.shape)

    def fits(self, operands: Mapping[str, Any]) -> bool:
        """Return whether the operands of a call fit the layer."""
        return self.shape in (None, _shape_of(self.kind, operands))

    def states(self) -> Iterator[tuple[str, str, str]]:
        """Yield the layer's own arrays: the name, the role, and the name in the quantizer."""
        for role, quantizer in self.quantizers.items():
            for state in quantizer.states:
                yield f"{role}_{state}", role, state

    def given(self, arrays: Mapping[str, Any], role: str) -> dict[str, Any]:
        """Return the state of the quantizer of a role, from all arrays by layer."""
        owner = self.shares if role == "weights" and self.shares else self
        mine = arrays[owner.name] if self.quantizers[role].states else {}
        return {state: mine[f"{role}_{state}"] for state in self.quantizers[role].states}


class LayerForward:
    """The function that replaces the calls of layers with one path and kind."""

    closes_over: tuple[str, ...] = ()

    def __init__(self, layers: Sequence[Layer], others: Sequence[Call] = ()) -> None:
        self.layers = layers
        self.others = others  # layers that ran with the sample and are not quantized
        self.kind: LayerKind = layers[0].kind
        self.__name__: str = f"quantized {self.kind.name}"
        self.names: list[str] = [
            f"{name}_{i}" if i else name
            for i, layer in enumerate(layers)
            for name, _, _ in layer.states()
        ]
        every = [*self.kind.operands, "forward", *self.names]
        self.__signature__: inspect.Signature = inspect.Signature(
            [inspect.Parameter(name, POSITIONAL) for name in every]
        )

    def __call__(self, *args: Any) -> Any:
        n = len(self.kind.operands)
        operands, states = dict(zip(self.kind.operands, args, strict=False)), [*args[n + 1 :]]
        layer, before = self._layer(operands)
        mine = iter(states[before:])
        after: Callable[[Any], Any] = lambda y: y  # noqa: E731
        for role, quantizer in layer.quantizers.items():
            state = [next(mine) for _ in quantizer.states]
            if role == "activations":
                after = lambda y, q=quantizer, s=state: q(y, *s)  # noqa: E731
            else:
                operand = layer.operand(role)
                operands[operand] = quantizer(operands[operand], *state)
        return after(args[n](*operands.values()))

    def _layer(self, operands: Mapping[str, Any]) -> tuple[Layer, int]:
        """Return the called layer, and the number of arrays of the layers before it."""
        before = 0
        for layer in self.layers:
            if layer.fits(operands):
                return layer, before
            before += len([*layer.states()])
        raise RuleError(
            f"quantize: {self.layers[0].path!r} calls {self.kind.name} with weights of a shape "
            "that did not occur with the sample; known shapes are "
            f"{[x.shape for x in self.layers]}. Make the steps with a sample that runs the whole "
            "model."
        )

    def rule(self, arrays: Mapping[str, Any]) -> Any:
        """Return the value in a map of rules, with the arrays of the layers."""
        given: dict[str, Any] = {}
        for i, layer in enumerate(self.layers):
            for name, role, state in layer.states():
                given[f"{name}_{i}" if i else name] = layer.given(arrays, role)[state]
        return replace(self, **given)


def forwards_of(
    layers: Sequence[Layer], others: Sequence[Call], forward: type[LayerForward]
) -> tuple[LayerForward, ...]:
    """Return the functions that compute layers: one for each path and function."""
    groups: dict[Any, list[Layer]] = {}
    for layer in layers:
        groups.setdefault((layer.path, layer.kind.name), []).append(layer)
    return tuple([forward(group, others) for group in groups.values()])


class Recorder:
    """A function that computes a layer unchanged, and records its calls."""

    closes_over: tuple[str, ...] = ()

    def __init__(self, kind: LayerKind, seen: list[Any]) -> None:
        self.kind = kind
        self.seen = seen
        self.__name__: str = "recorded"
        every = [*kind.operands, "forward", "site"]
        self.__signature__: inspect.Signature = inspect.Signature(
            [inspect.Parameter(name, POSITIONAL) for name in every]
        )

    def __call__(self, *args: Any, site: Any) -> Any:
        *operands, forward = args
        y = forward(*operands)
        self.note(site, [*operands, y])
        return y

    def note(self, site: Any, values: Sequence[Any]) -> None:
        """Record a call, with its operands and its result."""
        raise NotImplementedError
