"""Quantizers: each is a formula, with its paper and the names of its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import signature
from itertools import pairwise
from math import sqrt
from typing import Any, NamedTuple, ParamSpec

from regrad.core.backends import is_array
from regrad.core.dispatch import lift
from regrad.errors import ArgumentError, brief, near
from regrad.rules.quantize.formats import FORMATS, NF4, additive_powers_of_two, powers_of_two
from regrad.rules.quantize.rounding import TINY, Arithmetic, Codes, ste, stop

P = ParamSpec("P")
EPSILON = 2.0**-23  # the smallest scale that is computed from data, as in torch.ao


class State(NamedTuple):
    """An array that a quantizer takes besides its values, for example a step size.

    Args:
        first: Computes its first value from `Arithmetic` and a sample of the values.
        learned: Whether it is trained. Otherwise, `next` computes it from the old state and a
            sample.
        next: Like `first`, with the old state as an additional argument.
        whole: Whether it has one number per value, and so the shape of the values.
    """

    first: Callable[[Arithmetic, Any], Any]
    learned: bool = True
    next: Callable[[Arithmetic, Any, Any], Any] | None = None
    whole: bool = False


@dataclass(frozen=True, repr=False)
class Quantizer:
    """A quantizer: a function of an array, and of the arrays of its state.

    Call it with an array of regrad, PyTorch or JAX (`Q.affine(8)(v)`), and its state in order
    (`Q.lsq(4)(v, step)`). It returns an array of the same kind. The values of that array are on a
    grid, and its gradients by the values and by the state are the documented ones. Arrays of less
    than 32 bits are quantized in float32.

    Attributes:
        name: The name of the function that made it.
        options: The arguments of that function, by name, including defaults.
        bits: The number of bits per code.
        per: The part of an array that has its own scale (`"tensor"`, `"channel"`, `"token"`, or the
            size of groups).
        states: The arrays that it takes besides values, by name.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> quantizer = Q.affine(2)
    >>> quantizer(rg.tensor([-1.0, 0.1, 1.0])).tolist(), quantizer.bits
    ([-1.0, 0.0, 1.0], 2)
    """

    formula: Callable[..., Codes] = field(compare=False)
    bits: float
    per: str | int = "tensor"
    states: Mapping[str, State] = field(default_factory=dict, compare=False)
    name: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    channel: int = 0  # the axis of channels
    inputs: int = -1  # the axis that is split into groups
    shown: str = field(default="", compare=False)  # the options that the caller passed
    closes_over: Any = field(default=(), init=False, compare=False)

    def along(self, channel: int, inputs: int) -> Quantizer:
        """Return the same quantizer for arrays with other axes.

        Args:
            channel: The axis of channels, for `per="channel"`.
            inputs: The axis that is split into groups.
        """
        return replace(self, channel=channel, inputs=inputs)

    def __call__(self, v: Any, *state: Any, **named: Any) -> Any:
        given = self._given(state, named)
        if 0 in getattr(v, "shape", ()):  # an empty array has no largest value
            return v
        codes, restore = self._coded(v, given)
        return restore(self.value(codes))

    def value(self, codes: Codes) -> Any:
        """Return the values of the codes, with their gradient."""
        value = (codes.codes if codes.zero is None else codes.codes - codes.zero) * codes.scale
        value = value if codes.offset is None else value + codes.offset
        return value if codes.straight is None else ste(value, codes.straight)

    def coded(self, v: Any, *state: Any, **named: Any) -> Codes:
        """Return the codes of an array with their scale and offset, in groups if it has any."""
        return self._coded(v, self._given(state, named))[0]

    def exported(self, v: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the codes of an array in its shape, and scale, zero point, offset per block."""
        _, m, restore = self._parts(v)
        codes, *rest, _ = self._coded(v, state)[0]
        n = len(v.shape)

        def blocks(x: Any) -> Any:
            if isinstance(self.per, int) and len(x.shape) > n:
                return m.xp.moveaxis(m.xp.reshape(x, tuple(x.shape[:-1])), -1, self.inputs)
            return m.xp.reshape(x, (1,) * (n - len(x.shape)) + tuple(x.shape))

        names = zip(("scale", "zero_point", "offset"), rest, strict=True)
        return {"": restore(codes)} | {name: blocks(x) for name, x in names if x is not None}

    def first(self, v: Any) -> dict[str, Any]:
        """Return the initial state for an array, by name."""
        v, m, restore = self._parts(v)
        found = {name: (state, stop(state.first(m, v))) for name, state in self.states.items()}
        return {name: restore(x) if state.whole else x for name, (state, x) in found.items()}

    def observed(self, v: Any, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state after observing an array: states that are not trained may change."""
        v, m, _ = self._parts(v)
        rows = {name: row.next for name, row in self.states.items()}
        return {n: stop(f(m, v, state[n])) if (f := rows[n]) else state[n] for n in rows}

    def _given(self, state: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        given = {**dict(zip(self.states, state, strict=False)), **named}
        if len(state) + len(named) != len(self.states) or given.keys() != self.states.keys():
            names = ", ".join(["v", *self.states])
            unknown = [n for n in named if n not in self.states]
            raise ArgumentError(
                f"{self!r} takes {names}, and got {len(state)} arrays after v and the names "
                f"{sorted(named)}.{near(unknown[0], self.states) if unknown else ''} "
                f"{self!r}.first(v) returns initial values."
            )
        return given

    def _coded(self, v: Any, state: Mapping[str, Any]) -> tuple[Codes, Callable[[Any], Any]]:
        v, m, restore = self._parts(v)
        rows = {n: self._parts(x)[0] if self.states[n].whole else m.given(x)
                for n, x in state.items()}  # fmt: skip
        return self.formula(m, v, **rows), restore

    def _parts(self, v: Any) -> tuple[Any, Arithmetic, Callable[[Any], Any]]:
        """Return an array in at least float32, split into groups, and the inverse function."""
        v = v if is_array(v) and type(v).__module__.partition(".")[0] != "numpy" else lift(v)
        m = Arithmetic(v)
        if not _is_float(v):
            raise ArgumentError(f"{self!r} expected floats, got {brief(v)}")
        given, x = v, v if v.dtype.itemsize >= 4 else m.xp.astype(v, m.xp.float32)
        axis = {"channel": self.channel}.get(str(self.per), self.inputs)
        n = len(v.shape)
        has_axis = -n <= axis < n or (n == 0 and isinstance(self.per, str))
        if self.per != "tensor" and not has_axis:
            raise ArgumentError(
                f"{self!r} expected an array with an axis {axis}, got {brief(v)}; set the axes "
                "with along(channel, inputs)"
            )
        if isinstance(self.per, str):
            return x, Arithmetic(x, self.per, axis), lambda y: m.xp.astype(y, given.dtype)
        moved = _moved(m, x, axis, -1)
        size = int(moved.shape[-1])
        if size % self.per:
            raise ArgumentError(
                f"{self!r}: groups of {self.per} do not fit an axis of {size} "
                f"(the shape {tuple(v.shape)}, axis {self.inputs})"
            )
        parts = m.xp.reshape(moved, (*moved.shape[:-1], size // self.per, self.per))

        def restore(y: Any) -> Any:
            whole = _moved(m, m.xp.reshape(y, tuple(moved.shape)), -1, axis)
            return m.xp.astype(whole, given.dtype)

        return parts, Arithmetic(parts, "token"), restore

    def __repr__(self) -> str:
        return f"{self.name}({self.shown})"


def _moved(m: Arithmetic, v: Any, source: int, to: int) -> Any:
    """Return `moveaxis`, which PyTorch's vmap lacks."""
    n = len(v.shape)
    order = [axis for axis in range(n) if axis != source % n]
    order.insert(to % n, source % n)
    return m.xp.permute_dims(v, tuple(order))


def _is_float(v: Any) -> bool:
    return "float" in str(v.dtype)


def quantizer(make: Callable[P, Quantizer]) -> Callable[P, Quantizer]:
    """Return a function that makes quantizers, which store its name and arguments."""
    known = signature(make)

    @wraps(make)
    def named(*args: P.args, **options: P.kwargs) -> Quantizer:
        bound = known.bind(*args, **options)
        given = tuple(bound.arguments.items())
        bound.apply_defaults()
        per = bound.arguments.get("per", "tensor")
        if per not in ("tensor", "channel", "token") and not (type(per) is int and per > 0):
            raise ArgumentError(
                f"{make.__name__}: expected per to be 'tensor', 'channel', 'token' or the size of "
                f"groups, got {per!r}"
            )
        _check_choices(make.__name__, bound.arguments)
        rows = tuple((name, _plain(value)) for name, value in bound.arguments.items())
        shown = ", ".join(f"{name}={_plain(value)!r}" for name, value in given)
        made = make(*args, **options)
        return replace(made, name=make.__name__, options=rows, shown=shown)

    return named


def _plain(value: Any) -> Any:
    """Return an option in hashable form: a table as a tuple of numbers."""
    if value is None or isinstance(value, str | int | float):
        return value
    return tuple(float(number) for number in value)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "clip": ("before", "after", "straight"), "largest": ("level", "tie"),
    "range": ("dynamic", "minmax", "ema"), "of": ("weights", "inputs"), "format": tuple(FORMATS),
}  # fmt: skip


def _check_choices(name: str, arguments: Mapping[str, Any]) -> None:
    bits = arguments.get("bits", 8)
    if type(bits) is not int or not 1 <= bits <= 16:
        raise ArgumentError(f"{name}: expected bits to be an int from 1 to 16, got {bits!r}")
    for key, choices in _CHOICES.items():
        value = arguments.get(key, choices[0])
        if value not in choices:
            raise ArgumentError(
                f"{name}: expected {key} to be one of {', '.join(map(repr, choices))}, got "
                f"{value!r}.{near(str(value), choices)}"
            )


def bounds(bits: int, signed: bool, narrow: bool = False) -> tuple[int, int]:
    """Return the smallest and the largest integer of a grid."""
    if not signed:
        return 0, 2**bits - 1
    if bits == 1:
        raise ArgumentError(
            "signed codes of 1 bit have no positive code: expected bits to be 2 or more, or "
            "signed=False; sign() quantizes to -1 and 1"
        )
    return -(2 ** (bits - 1)) + narrow, 2 ** (bits - 1) - 1


# -- uniform grids -----------------------------------------------------------------------------


@quantizer
def affine(
    bits: int = 8, *, signed: bool = True, symmetric: bool = True, per: str | int = "tensor",
    clip: str = "after", scale_gradient: bool = False, largest: str = "level",
    narrow: bool = False, range: str = "dynamic", decay: float = 0.99,
) -> Quantizer:  # fmt: skip
    """Return a uniform quantizer whose scale is computed from the values.

    `s (clip(round(v / s) + z) - z)`. The gradient by v passes where the code is in bounds.

    Args:
        bits: The number of bits per code, 2 to 8 in practice.
        signed: Whether codes are signed.
        symmetric: Whether 0 has the code 0 (`z = 0`) and the largest magnitude sets the scale.
            Otherwise, the range of the values, extended to include 0, sets the scale, and z is an
            integer.
        per: The part that has its own scale: `"tensor"`, `"channel"` (of weights), `"token"` (the
            last axis), or an int, the size of groups along the input features.
        clip: Where the gradient is 0. `"after"` (torch.ao, torchao): where the rounded value is out
            of bounds. `"before"`: where the value is out of bounds. `"straight"` (brevitas):
            nowhere.
        scale_gradient: Whether the gradient propagates through the scale to the values that set it
            (brevitas), or not (torch.ao, torchao).
        largest: The code of the largest magnitude if symmetric: `"level"`: the largest code (127 of
            8 bits; brevitas, AQT), or `"tie"`: half a code beyond (127.5; torch.ao, torchao, qwix),
            so that the value lies on a tie between two codes.
        narrow: Whether the smallest code is left unused, so that codes are symmetric (brevitas).
        range: The source of the range. `"dynamic"`: the values themselves. `"minmax"` or `"ema"`:
            the observed values, as the widest range or as an exponential average, kept in the
            states `low` and `high`.
        decay: The weight of the old range in an average.

    Returns:
        The quantizer; with `range="minmax"` or `"ema"` it takes `low` and `high`.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference" (2018); Krishnamoorthi (2018). Peers: `torch.ao`'s
    `FakeQuantize`, torchao's `IntxFakeQuantizer`, brevitas' `Int8WeightPerTensorFloat`, AQT, qwix.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.affine(2, largest="tie")(rg.tensor([-1.0, 0.2, 0.6, 1.5])).print()
    Tensor
        [-1, 0, 1, 1]
    """
    lo, hi = bounds(bits, signed, narrow)
    side = hi if largest == "level" else (hi - lo) / (2 if signed else 1)

    def formula(m: Arithmetic, v: Any, **state: Any) -> Codes:
        low, high = (state["low"], state["high"]) if state else (m.min(v), m.max(v))
        low, high = m.xp.where(low > 0, 0 * low, low), m.xp.where(high < 0, 0 * high, high)
        if not scale_gradient:
            low, high = stop(low), stop(high)
        if symmetric:
            scale = m.at_least(m.xp.where(-low > high, -low, high) / side, EPSILON)
            return Codes(m.grid(v / scale, lo, hi, clip), scale)
        scale = m.at_least((high - low) / (hi - lo), EPSILON)
        zero = stop(m.clip(lo - m.xp.round(low / scale), lo, hi))
        # (v / s + z would lose bits of v / s before the rounding.)
        return Codes(m.grid(v / scale, lo - zero, hi - zero, clip) + zero, scale, zero)

    def state(name: str) -> State:
        extreme = lambda m, v: getattr(m, name)(v)  # noqa: E731
        widest = lambda m, v, old: getattr(m.xp, f"{name}imum")(old, extreme(m, v))  # noqa: E731
        mean = lambda m, v, old: decay * old + (1 - decay) * extreme(m, v)  # noqa: E731
        return State(extreme, learned=False, next=widest if range == "minmax" else mean)

    states = {} if range == "dynamic" else {"low": state("min"), "high": state("max")}
    return Quantizer(formula, bits, per, states)


@quantizer
def lsq(
    bits: int = 4, *, signed: bool = True, per: str | int = "tensor", clip: str = "before",
    gradient_scale: float | None = None,
) -> Quantizer:  # fmt: skip
    """Return a uniform quantizer with a trainable step size.

    `s round(clip(v / s))`. By v, the gradient passes within the bounds. By s, it is
    `round(v / s) - v / s` within the bounds and the bound outside of them, times `gradient_scale`.

    Args:
        bits: The number of bits per code.
        signed: Whether codes are signed (weights) or not (inputs after a ReLU).
        per: The part that has its own step, as in `affine`.
        clip: `"before"` as in the paper; `"after"` as in `torch._fake_quantize_learnable_*`, whose
            gradients differ where v lies between the last code and half a code beyond.
        gradient_scale: The factor of the step's gradient. None means `1 / sqrt(n Q)` for n values
            with one step and the largest code Q.

    Returns:
        The quantizer, which takes `step`. Its initial value is `2 mean(|v|) / sqrt(Q)`.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Esser et al., "Learned Step Size Quantization" (2020). Peers: brevitas'
    `ParameterFromStatsScaling`, `torch._fake_quantize_learnable_per_tensor_affine`.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.lsq(4)(rg.tensor([-0.3, 0.26, 9.0]), rg.tensor(0.25)).print()
    Tensor
        [-0.25, 0.25, 1.75]
    """
    lo, hi = bounds(bits, signed)

    def formula(m: Arithmetic, v: Any, step: Any) -> Codes:
        factor = 1 / sqrt(m.count * hi) if gradient_scale is None else gradient_scale
        step = m.scaled(step, factor)
        return Codes(m.grid(v / step, lo, hi, clip), step)

    return Quantizer(formula, bits, per, {"step": _step(hi)})


def _step(hi: float) -> State:
    return State(lambda m, v: m.at_least(2 * m.mean(abs(v)) / sqrt(hi), EPSILON))


@quantizer
def lsq_plus(
    bits: int = 4, *, signed: bool = False, per: str | int = "tensor", clip: str = "before"
) -> Quantizer:  # fmt: skip
    """Return a uniform quantizer with a trainable step size and a trainable offset.

    `s round(clip((v - b) / s)) + b`, with both gradients scaled as in `lsq`.

    Args:
        bits: The number of bits per code.
        signed: Whether codes are signed.
        per: The part that has its own step and offset, as in `affine`.
        clip: As in `lsq`.

    Returns:
        The quantizer, which takes `step` and `offset`. Their initial values cover the range of the
        values.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Bhalgat et al., "LSQ+: Improving Low-bit Quantization through Learnable Offsets and
    Better Initialization" (2020).

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.lsq_plus(2)(rg.tensor([-1.0, 0.4, 9.0]), rg.tensor(0.5), rg.tensor(-0.5)).print()
    Tensor
        [-0.5, 0.5, 1]
    """
    lo, hi = bounds(bits, signed)

    def formula(m: Arithmetic, v: Any, step: Any, offset: Any) -> Codes:
        factor = 1 / sqrt(m.count * hi)
        step, offset = m.scaled(step, factor), m.scaled(offset, factor)
        return Codes(m.grid((v - offset) / step, lo, hi, clip), step, offset=offset)

    def first_step(m: Arithmetic, v: Any) -> Any:
        return m.at_least((m.max(v) - m.min(v)) / (hi - lo), EPSILON)

    offset = State(lambda m, v: m.min(v) - lo * first_step(m, v))
    return Quantizer(formula, bits, per, {"step": State(first_step), "offset": offset})


@quantizer
def pact(bits: int = 4, *, per: str | int = "tensor") -> Quantizer:
    """Return a quantizer of inputs between 0 and a trainable bound.

    `clip(v, 0, α)`, rounded to `2**bits - 1` steps. By v, the gradient passes where 0 < v < α; by
    α, it passes where v ≥ α.

    Args:
        bits: The number of bits per code.
        per: The part that has its own bound, as in `affine`.

    Returns:
        The quantizer, which takes `alpha`. Its initial value is the largest value.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Choi et al., "PACT: Parameterized Clipping Activation for Quantized Neural Networks"
    (2018).

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.pact(2)(rg.tensor([-1.0, 0.9, 5.0]), rg.tensor(3.0)).print()
    Tensor
        [0, 1, 3]
    """
    count = 2**bits - 1

    def formula(m: Arithmetic, v: Any, alpha: Any) -> Codes:
        inside = m.xp.where(v >= alpha, alpha, m.xp.where(v > 0, v, 0.0))
        return Codes(m.xp.round(stop(inside * count / alpha)), alpha / count, straight=inside)

    first = State(lambda m, v: m.at_least(m.max(v), EPSILON))
    return Quantizer(formula, bits, per, {"alpha": first})


@quantizer
def dorefa(bits: int = 4, *, of: str = "weights") -> Quantizer:
    """Return a quantizer of weights after a tanh, or of inputs between 0 and 1.

    Weights: `2 round(n t) / n - 1` with `t = tanh(v) / (2 max|tanh(v)|) + 1/2` and
    `n = 2**bits - 1`; inputs: `round(n clip(v, 0, 1)) / n`. Rounding is straight-through;
    everything else has its own gradient, including the maximum.

    Args:
        bits: The number of bits per code.
        of: `"weights"` or `"inputs"`.

    Returns:
        The quantizer, which takes no state.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Zhou et al., "DoReFa-Net: Training Low Bitwidth Convolutional Neural Networks with Low
    Bitwidth Gradients" (2016). Peer: larq's `DoReFaQuantizer`.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.dorefa(2, of="inputs")(rg.tensor([-1.0, 0.3, 2.0])).print()
    Tensor
        [0, 0.3333333, 1]
    """
    n = 2**bits - 1

    def weights(m: Arithmetic, v: Any) -> Codes:
        t = m.xp.tanh(v)
        codes = m.round((t / (2 * m.at_least(m.absmax(t), EPSILON)) + 0.5) * n)
        return Codes(codes, m.array(2.0 / n), offset=m.array(-1.0))

    def inputs(m: Arithmetic, v: Any) -> Codes:
        return Codes(m.round(m.clip(v, 0.0, 1.0) * n), m.array(1.0 / n))

    return Quantizer(weights if of == "weights" else inputs, bits)


@quantizer
def ewgs(
    bits: int = 4, *, delta: float = 1e-3, signed: bool = True, per: str | int = "tensor"
) -> Quantizer:
    """Return a uniform quantizer whose gradient grows or shrinks with the rounding error.

    The value is the same as in `lsq`. The gradient through the rounding of `u = v / s` to q is
    `dy (1 + δ sign(dy) (u - q))`.

    Args:
        bits: The number of bits per code.
        delta: The factor δ; 0 makes the gradient straight-through.
        signed: Whether codes are signed.
        per: The part that has its own step, as in `affine`.

    Returns:
        The quantizer, which takes `step`.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Lee, Kim and Ham, "Network Quantization with Element-wise Gradient Scaling" (2021).

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> rg.grad(lambda v: rg.sum(Q.ewgs(4, delta=0.5)(v, rg.tensor(1.0))))([0.4, 1.6]).print()
    Tensor
        [1.2, 0.8]
    """
    lo, hi = bounds(bits, signed)

    def formula(m: Arithmetic, v: Any, step: Any) -> Codes:
        step = m.scaled(step, 1 / sqrt(m.count * hi))
        inside = m.clip(v / step, lo, hi)

        def rule(dy: Any, u: Any, q: Any) -> Any:
            return dy * (1 + delta * m.sign(dy) * (u - q))

        return Codes(m.by_rule(m.xp.round, rule, inside), step)

    return Quantizer(formula, bits, per, {"step": _step(hi)})


@quantizer
def adaround(bits: int = 4, *, per: str | int = "tensor") -> Quantizer:
    """Return a quantizer of weights that trains whether to round each value up or down.

    `s clip(floor(v / s) + h(V))` with `h(V) = clip(1.2 sigmoid(V) - 0.1, 0, 1)`. Only V gets a
    gradient.

    Args:
        bits: The number of bits per code.
        per: The part that has its own step, as in `affine`.

    Returns:
        The quantizer, which takes `rounding` (V, of the shape of the weights), and `step`, which is
        not trained. The initial rounding reproduces the values themselves.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization" (2020).
    Peer: brevitas' `LearnedRoundSte`.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.adaround(4)(rg.tensor([0.3, 0.8]), rg.tensor([9.0, -9.0]), rg.tensor(0.5)).print()
    Tensor
        [0.5, 0.5]
    """
    lo, hi = bounds(bits, True)

    def step(m: Arithmetic, v: Any) -> Any:
        return m.at_least(m.absmax(v) / hi, EPSILON)

    def first(m: Arithmetic, v: Any) -> Any:
        u = v / step(m, v)
        rest = m.clip(u - m.xp.floor(u), 1e-4, 1 - 1e-4)
        return -m.xp.log(1.2 / (rest + 0.1) - 1)

    def formula(m: Arithmetic, v: Any, rounding: Any, step: Any) -> Codes:
        up = m.clip(1.2 * m.sigmoid(rounding) - 0.1, 0.0, 1.0)
        down = m.xp.floor(stop(v / step))
        return Codes(m.clip(down + up, lo, hi), stop(step))

    states = {"rounding": State(first, whole=True), "step": State(step, learned=False)}
    return Quantizer(formula, bits, per, states)


@quantizer
def stochastic(bits: int = 8, *, per: str | int = "tensor") -> Quantizer:
    """Return a quantizer with stochastic rounding: `s floor(v / s + u)`.

    It is unbiased. The gradient passes where the code is in bounds.

    Args:
        bits: The number of bits per code.
        per: The part that has its own scale, as in `affine`.

    Returns:
        The quantizer, which takes `noise`: an array like the values, of uniform numbers between 0
        and 1 (`torch.rand_like(v)`, `jax.random.uniform(key, v.shape)`). regrad draws no numbers
        itself, so a recomputed value (in a checkpoint) is the same.

    Raises:
        ArgumentError: An option has an invalid value, or a plan uses the quantizer for layers.

    Source: Gupta et al., "Deep Learning with Limited Numerical Precision" (2015). Peers: QKeras,
    AQT, qwix.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.stochastic(4)(rg.tensor([0.3, 7.0]), rg.tensor([0.6, 0.6])).print()
    Tensor
        [0, 7]
    """
    lo, hi = bounds(bits, True)

    def formula(m: Arithmetic, v: Any, noise: Any) -> Codes:
        scale = stop(m.at_least(m.absmax(v) / hi, EPSILON))
        u = v / scale
        return Codes(m.clip(ste(m.xp.floor(stop(u) + noise), u), lo, hi), scale)

    noise = State(lambda m, v: v * 0 + 0.5, learned=False, whole=True)
    return Quantizer(formula, bits, per, {"noise": noise})


# -- few levels --------------------------------------------------------------------------------


@quantizer
def sign(
    estimator: str = "clip", *, scale: bool = False, per: str = "channel", shift: bool = False,
    slope: float = 5.0,
) -> Quantizer:  # fmt: skip
    """Return a quantizer to -1 and 1, which is 1 at 0.

    Args:
        estimator: The function whose gradient is used: `"identity"`; `"clip"`: `clip(v, -1, 1)`;
            `"approx"`: the parabolas of Bi-Real nets, with the slope `2 - 2|v|`; `"swish"`: the
            sign-swish of BNN+ with `slope`; `"tanh"`: `max(1 / slope, 1) tanh(slope v)`, the error
            decay estimator of IR-Net.
        scale: Whether the result is scaled by the mean magnitude, which has no gradient (XNOR-Net).
        per: The part that has its own scale, as in `affine`.
        shift: Whether it takes a trainable `shift`, which is added to v (ReActNet).
        slope: The slope of `"swish"` and `"tanh"`; to anneal it, make another quantizer.

    Returns:
        The quantizer, which takes `shift` if `shift=True`. Its initial value is 0.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Hubara et al., "Binarized Neural Networks" (2016); Rastegari et al., "XNOR-Net" (2016);
    Liu et al., "Bi-Real Net" (2018) and "ReActNet" (2020); Darabi et al., "BNN+" (2019); Qin et
    al., "Forward and Backward Information Retention for Accurate Binary Neural Networks" (2020).
    Peers: larq's `ste_sign`, `approx_sign`, `swish_sign`.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> rg.grad(lambda v: rg.sum(Q.sign("approx")(v)))([-2.0, 0.25]).print()
    Tensor
        [0, 1.5]
    """
    if estimator not in ESTIMATORS:
        raise ArgumentError(
            f"sign: expected estimator to be one of {', '.join(map(repr, ESTIMATORS))}, got "
            f"{estimator!r}.{near(str(estimator), ESTIMATORS)}"
        )
    smooth = ESTIMATORS[estimator]

    def formula(m: Arithmetic, v: Any, shift: Any = None) -> Codes:
        u = v if shift is None else v + shift
        codes = ste(m.xp.where(stop(u) >= 0, m.array(1.0), m.array(-1.0)), smooth(m, u, slope))
        return Codes(codes, stop(m.mean(abs(v))) if scale else m.array(1.0))

    states = {"shift": State(lambda m, v: 0 * m.mean(v))} if shift else {}
    return Quantizer(formula, 1, per, states)


def _approx(m: Arithmetic, u: Any, slope: float) -> Any:
    c = m.clip(u, -1.0, 1.0)
    return 2 * c - c * abs(c)


def _swish(m: Arithmetic, u: Any, slope: float) -> Any:
    s = m.sigmoid(slope * u)
    return 2 * s * (1 + slope * u * (1 - s)) - 1


ESTIMATORS: dict[str, Callable[[Arithmetic, Any, float], Any]] = {
    "identity": lambda m, u, slope: u,
    "clip": lambda m, u, slope: m.clip(u, -1.0, 1.0),
    "approx": _approx,
    "swish": _swish,
    "tanh": lambda m, u, slope: max(1 / slope, 1) * m.xp.tanh(slope * u),
}


@quantizer
def ternary(threshold: float = 0.7, *, per: str | int = "tensor") -> Quantizer:
    """Return a quantizer to -1, 0 and 1, times the mean magnitude of the nonzero values.

    Values with a magnitude up to `threshold mean|v|` become 0. The gradient passes everywhere.

    Args:
        threshold: The factor of the mean magnitude.
        per: The part that has its own scale, as in `affine`.

    Returns:
        The quantizer, which takes no state.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Li and Liu, "Ternary Weight Networks" (2016). Peers: brevitas'
    `SignedTernaryWeightPerTensorConst` (a constant scale), QKeras' `ternary`.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.ternary()(rg.tensor([-1.0, 0.1, 2.0])).print()
    Tensor
        [-1.5, 0, 1.5]
    """

    def formula(m: Arithmetic, v: Any) -> Codes:
        magnitude = abs(stop(v))
        large = m.xp.astype(magnitude > threshold * m.mean(magnitude), v.dtype)
        scale = m.sum(magnitude * large) / m.at_least(m.sum(large), 1.0)
        return Codes(m.sign(stop(v)) * large, scale, straight=v)

    return Quantizer(formula, 2, per)


@quantizer
def absmean(*, per: str | int = "tensor") -> Quantizer:
    """Return a quantizer to -1, 0 and 1, times the mean magnitude: the weights of BitNet b1.58.

    `s clip(round(v / s), -1, 1)` with `s = mean|v|`. The gradient passes everywhere.

    Args:
        per: The part that has its own scale, as in `affine`.

    Returns:
        The quantizer, which takes no state.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Ma et al., "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits" (2024).
    Peer: transformers' `WeightQuant`.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.absmean()(rg.tensor([-1.0, 0.1, 1.9])).print()
    Tensor
        [-1, 0, 1]
    """

    def formula(m: Arithmetic, v: Any) -> Codes:
        scale = m.at_least(m.mean(abs(stop(v))), 1e-5)
        return Codes(m.clip(m.xp.round(stop(v) / scale), -1.0, 1.0), scale, straight=v)

    return Quantizer(formula, 2, per)


@quantizer
def absmax(bits: int = 8, *, per: str | int = "token") -> Quantizer:
    """Return a uniform quantizer of inputs, by the largest magnitude of each token (BitNet b1.58).

    `s clip(round(v / s))` with `s = max|v| / Q`. The gradient passes everywhere.

    Args:
        bits: The number of bits per code.
        per: The part that has its own scale, as in `affine`.

    Returns:
        The quantizer, which takes no state.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Ma et al. (2024), as for `absmean`. Peer: transformers' `ActQuant`.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.absmax(3)(rg.tensor([[3.0, 1.2], [0.3, 0.1]])).print()
    Tensor
        [[3  , 1  ],
         [0.3, 0.1]]
    """
    lo, hi = bounds(bits, True)

    def formula(m: Arithmetic, v: Any) -> Codes:
        scale = m.at_least(m.absmax(stop(v)), 1e-5) / hi
        return Codes(m.clip(m.xp.round(stop(v) / scale), lo, hi), scale, straight=v)

    return Quantizer(formula, bits, per)


@quantizer
def levels(table: Sequence[float], *, per: str | int = "tensor") -> Quantizer:
    """Return a quantizer to the nearest numbers of a table, scaled by the largest magnitude.

    The largest magnitude becomes the largest level of the table. The gradient passes everywhere. A
    tie goes to the smaller level.

    Args:
        table: The levels, in ascending order.
        per: The part that has its own scale, as in `affine`.

    Returns:
        The quantizer, which takes no state.

    Raises:
        ArgumentError: The levels are not ascending, or there are fewer than two.

    Source: Zhou et al., "Incremental Network Quantization" (2017), for powers of two.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.levels([-1.0, -0.25, 0.0, 0.25, 1.0])(rg.tensor([-4.0, 0.9, 0.1])).print()
    Tensor
        [-4, 1, 0]
    """
    known = [float(level) for level in table]
    if len(known) < 2 or any(a >= b for a, b in pairwise(known)):
        raise ArgumentError(f"levels expected two or more ascending numbers, got {brief(table)}")
    most = max(map(abs, known))

    def formula(m: Arithmetic, v: Any) -> Codes:
        scale = m.at_least(m.absmax(stop(v)), TINY) / most
        return Codes(m.nearest(stop(v) / scale, known), scale, straight=v)

    return Quantizer(formula, (len(known) - 1).bit_length(), per)


@quantizer
def nf4(*, per: str | int = 64) -> Quantizer:
    """Return `levels` of NormalFloat 4: quantiles of a normal distribution.

    Args:
        per: The part that has its own scale, as in `affine`.

    Returns:
        The quantizer, which takes no state.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023). Peers:
    torchao's `NF4Tensor`, bitsandbytes.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.nf4(per=2)(rg.tensor([2.0, 0.1])).print()
    Tensor
        [2, 0.1591606]
    """
    return levels(NF4, per=per)


@quantizer
def power_of_two(bits: int = 4, *, additive: bool = False, per: str | int = "tensor") -> Quantizer:
    """Return `levels` of signed powers of two and 0, or of sums of them (APoT).

    Args:
        bits: The number of bits per code; 3 to 5 for sums.
        additive: Whether levels are sums of powers of two.
        per: The part that has its own scale, as in `affine`.

    Returns:
        The quantizer, which takes no state.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Zhou et al., "Incremental Network Quantization" (2017); Li, Dong and Wang, "Additive
    Powers-of-Two Quantization" (2020). Peer: QKeras' `quantized_po2`.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.power_of_two(3)(rg.tensor([1.0, 0.4, -0.1])).print()
    Tensor
        [1, 0.5, 0]
    """
    if additive and bits not in (3, 4, 5):
        raise ArgumentError(f"power_of_two: sums are available for 3, 4 and 5 bits, got {bits}")
    if not 2 <= bits <= 8:
        raise ArgumentError(f"power_of_two: expected bits to be an int from 2 to 8, got {bits}")
    return levels((additive_powers_of_two if additive else powers_of_two)(bits), per=per)


# -- floating point ----------------------------------------------------------------------------


@quantizer
def fp8(format: str = "fp8_e4m3", *, per: str | int = "tensor") -> Quantizer:
    """Return a quantizer to 8-bit floating point, scaled so that the largest value just fits.

    The gradient passes everywhere.

    Args:
        format: `"fp8_e4m3"` (up to 448) or `"fp8_e5m2"` (up to 57344), rounded half to even.
        per: The part that has its own scale, as in `affine`.

    Returns:
        The quantizer, which takes no state.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022). Peers: Transformer Engine,
    torchao, AQT, qwix.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.fp8()(rg.tensor([448.0, 17.0, 0.3])).print()
    Tensor
        [448, 16, 0.3125]
    """
    form = FORMATS[format]

    def formula(m: Arithmetic, v: Any) -> Codes:
        scale = m.at_least(m.absmax(stop(v)), TINY) / form.largest
        return Codes(m.as_float(v / scale, form), scale, straight=v)

    return Quantizer(formula, form.bits, per)


@quantizer
def mx(format: str = "fp4_e2m1", *, per: int = 32) -> Quantizer:
    """Return a quantizer to a microscaling format: blocks with a power of two as scale.

    The scale is `2**(floor(log2(max|v|)) - e)`, with e the largest exponent of the format. The
    gradient passes everywhere.

    Args:
        format: The format of a number in a block: `"fp4_e2m1"`, `"fp6_e2m3"`, `"fp6_e3m2"`,
            `"fp8_e4m3"`, `"fp8_e5m2"` or `"int8"`.
        per: The size of a block.

    Returns:
        The quantizer, which takes no state.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: OCP Microscaling Formats (MX) Specification 1.0 (2023). Peers: torchao, brevitas, qwix.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.mx(per=2)(rg.tensor([5.0, 0.3])).print()
    Tensor
        [4, 0.5]
    """
    form = FORMATS[format]

    def formula(m: Arithmetic, v: Any) -> Codes:
        below = m.power_below(m.at_least(m.absmax(stop(v)), 2.0**-126))
        scale = m.at_least(below * 2.0**-form.most, 2.0**-126)
        return Codes(m.as_float(v / scale, form), scale, straight=v)

    return Quantizer(formula, form.bits, per)


@quantizer
def nvfp4(*, per: int = 16) -> Quantizer:
    """Return a quantizer to NVFP4: 4-bit numbers with 8-bit scales per block and a global scale.

    The gradient passes everywhere.

    Args:
        per: The size of a block.

    Returns:
        The quantizer, which takes no state.

    Raises:
        ArgumentError: An option has an invalid value.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (2025). Peer: torchao.

    >>> import regrad as rg
    >>> from regrad.rules import quantize as Q
    >>> Q.nvfp4(per=2)(rg.tensor([6.0, 1.4, 0.6, 0.1])).print()
    Tensor
        [6, 1.5, 0.5892857, 0.0982143]
    """
    four, eight = FORMATS["fp4_e2m1"], FORMATS["fp8_e4m3"]

    def formula(m: Arithmetic, v: Any) -> Codes:
        whole = m.at_least(m.xp.max(abs(stop(v))), TINY) / (four.largest * eight.largest)
        scale = m.as_float(m.absmax(stop(v)) / four.largest / whole, eight) * whole
        scale = m.at_least(scale, TINY)
        return Codes(m.as_float(v / scale, four), scale, straight=v)

    return Quantizer(formula, four.bits, per)
