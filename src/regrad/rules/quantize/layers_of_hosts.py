"""Layers that are quantized: how a host shows them, and the functions that replace their calls."""

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
    """A function that is a layer.

    Args:
        what: The key for its calls.
        operands: What a rule calls its inputs, in the order of `forward`.
        roles: The operands of each role. Of a product the weights are known only from a sample.
        channel: The axis of output channels of its weights.
        inputs: The axis of their input features.
    """

    what: Any
    operands: tuple[str, ...]
    roles: Mapping[str, str]
    channel: int = 0
    inputs: int = -1

    @property
    def name(self) -> str:
        """The name in reports."""
        return self.what if isinstance(self.what, str) else self.what.__name__


class Call(NamedTuple):
    """A call of a layer with a sample (without operands, a layer that is not quantized)."""

    path: str
    kind: LayerKind
    operands: dict[str, Any]
    module_class: type | None = None

    @property
    def place(self) -> tuple[str, str]:
        """The path and the function of the layer."""
        return self.path, self.kind.name

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the weights; None without weights."""
        return _shape_of(self.kind, self.operands)


def _shape_of(kind: LayerKind, operands: Mapping[str, Any]) -> tuple[int, ...] | None:
    name = kind.roles.get("weights")
    return None if name is None else tuple(map(int, operands[name].shape))


class Host(Protocol):
    """A library whose models are quantized."""

    forward: type[LayerForward]

    def calls(self, model: Any, sample: Any, named: Any) -> list[Call]:
        """Run a model with a sample; return the calls of its layers, products with their roles."""
        ...

    def owner(self, model: Any, weights: Any) -> Any:
        """Return the identity of the parameter that weights are; None if they are none."""
        ...

    def parameter(self, model: Any, owner: Any) -> Any:
        """Return the parameter with an identity; None if the model does not tell."""
        ...

    def steps(self, layers: Sequence[Layer], others: Any, arrays: Mapping[str, Any]) -> Any:
        """Return the arrays of layers, by path, as the library trains them."""
        ...


@dataclass(eq=False, repr=False)
class Layer:
    """A layer that is quantized.

    Args:
        path: Where it is.
        kind: What it calls.
        quantizers: By role and, of products, by operand: what it quantizes its operands with.
        shape: The shape of its weights, if several layers with other shapes have its path.
        number: Which of these it is.
    """

    path: str
    kind: LayerKind
    quantizers: dict[str, Quantizer]
    number: int = 0
    shape: tuple[int, ...] | None = None
    owner: Any = None  # the parameter that its weights are, if it is known
    shares: Layer | None = None  # whose weights it has, and their arrays
    stats: dict[str, Any] = field(default_factory=dict)  # of the sample

    @property
    def name(self) -> str:
        """The path, with a number if there are several."""
        return f"{self.path}[{self.number}]" if self.shape is not None else self.path

    @property
    def key(self) -> Any:
        """The key in a map of rules."""
        return at(self.path, self.kind.what) if self.path else self.kind.what

    def operand(self, role: str) -> str:
        """Return the operand that has a role."""
        return self.kind.roles.get(role, role.removeprefix("products_"))

    def has(self, call: Call) -> bool:
        """Return whether a call with the sample is one of the layer."""
        same = call.place == (self.path, self.kind.name) and call.kind.roles == self.kind.roles
        return same and self.shape in (None, call.shape)

    def fits(self, operands: Mapping[str, Any]) -> bool:
        """Return whether the operands of a call are those of the layer."""
        return self.shape in (None, _shape_of(self.kind, operands))

    def states(self) -> Iterator[tuple[str, str, str]]:
        """Yield each array of its own: its name, the role, and the name in the quantizer."""
        for role, quantizer in self.quantizers.items():
            for state in quantizer.states:
                yield f"{role}_{state}", role, state

    def given(self, arrays: Mapping[str, Any], role: str) -> dict[str, Any]:
        """Return the state of the quantizer of a role, of all arrays by layer."""
        owner = self.shares if role == "weights" and self.shares else self
        mine = arrays[owner.name] if self.quantizers[role].states else {}
        return {state: mine[f"{role}_{state}"] for state in self.quantizers[role].states}


class LayerForward:
    """The function that replaces the calls of layers with one path and kind."""

    closes_over: tuple[str, ...] = ()

    def __init__(self, layers: Sequence[Layer], others: Sequence[Call] = ()) -> None:
        self.layers = layers
        self.others = others  # what ran with the sample and is not quantized
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
        """Return the layer that is called, and how many arrays the layers before it have."""
        before = 0
        for layer in self.layers:
            if layer.fits(operands):
                return layer, before
            before += len([*layer.states()])
        raise RuleError(
            f"quantize: {self.layers[0].path!r} calls {self.kind.name} with weights of a shape "
            f"that it did not have with the sample; known are {[x.shape for x in self.layers]}. "
            "Make the steps with a sample that runs all of the model."
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
    """A function that computes a layer as it is, and notes its calls."""

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
        """Note a call, with its operands and its result."""
        raise NotImplementedError
