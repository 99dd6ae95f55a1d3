"""A rule for ops whose gradient is infinite or NaN at some inputs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from regrad.core.dispatch import lift
from regrad.core.names import NORMS, SINGULAR
from regrad.core.registry import OPS, Op, bind
from regrad.core.rule import MapRule, Rule
from regrad.core.signatures import helpful
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, RuleError, brief
from regrad.ops.binary import equal, logical_and, where
from regrad.ops.casting import astype, stop_gradient
from regrad.ops.creation_like import full_like, ones_like, zeros_like
from regrad.ops.elementwise import isfinite

HARMLESS = {"acosh": 2.0}  # an input at which all derivatives of the op are finite; others: 0.5
BENT = {"pow", "xlogy", "atan2"}  # the second may be infinite where the first is finite
ALSO = {"div": "realdiv", "divide": "realdiv", "true_divide": "realdiv", "power": "pow"}
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


@helpful("safe")
def safe(value: float = 0.0) -> Safe:
    """Return a rule that replaces an infinite or NaN derivative by a number.

    The rule returns the true gradient at all other inputs. Second derivatives are finite as well:
    the op's own gradient is computed for inputs in which the critical elements are replaced by a
    harmless number. An op of several inputs has a mask for each input. Infinite and NaN gradients
    that arrive from other ops stay visible.

    The rule fits `Sqrt`, `Rsqrt`, `Log`, `Log1p`, `Log2`, `Log10`, `RealDiv`, `Reciprocal`, `Pow`,
    `Asin`, `Acos`, `Acosh`, `Atanh`, `Atan2`, `Erfinv`, `Lgamma`, `Digamma`, `Xlogy`, `Xdivy`,
    the functions of JAX and PyTorch for them, and elementwise ops of your own. In PyTorch it also
    fits `torch.norm`, `torch.linalg.norm` and `torch.linalg.vector_norm` of order 2, at vectors of
    zeros; in regrad and JAX a norm is a composition, in which `Sqrt` is the key.

    Args:
        value: The derivative at these inputs. The gradient there is `value * dy`.

    Returns:
        A rule for `gradient_override_map` and `rg.jax.override`. For several op types write
        `dict.fromkeys(["Sqrt", "Log"], rg.rules.safe())`.

    Raises:
        ArgumentError: value is not a finite number.
        RuleError: (when the scope opens) the op type has a finite gradient everywhere, or is not
            elementwise.

    Source: the "double where" of the JAX FAQ, "Gradients contain NaN where using where";
    TensorFlow's `div_no_nan` and TensorFlow Probability's `double_where`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Sqrt": rg.rules.safe()}):
    ...     print(rg.grad(rg.sqrt)(rg.tensor([0.0, 4.0])).tolist())
    [0.0, 0.25]
    """
    if not isinstance(value, int | float) or abs(value) == float("inf") or value != value:
        raise ArgumentError(f"safe: value is a finite number, got {brief(value)}")
    return Safe(value)


class Safe(MapRule):
    """A rule for ops whose gradient is infinite or NaN at some inputs; see `safe`."""

    __name__ = "safe"
    closes_over: tuple[str, ...] = ()
    asks: Sequence[str] = ("x", "a", "b")

    def __init__(self, value: float) -> None:
        self.value = value

    def bound_to(self, op: Op) -> Rule:
        """The rule for an op, of all its inputs."""
        name = _fitting(op)
        made = _NormCall if name in NORMS else _Call

        def rule(dy: Any, y: Any, needs: Any, forward: Any, vjp_: Any, *inputs: Any) -> Any:
            call = made(name, y, inputs, forward, vjp_)
            dxs = [call.safe(i, dy, self.value) if need else None for i, need in enumerate(needs)]
            return dxs if len(dxs) > 1 else dxs[0]

        asked = ("dy", "y", "needs", "forward", "vjp_", *[i.name for i in op.inputs])
        every = [inspect.Parameter(n, POSITIONAL) for n in asked]
        rule.__signature__ = inspect.Signature(every)  # pyright: ignore[reportFunctionMemberAccess]
        rule.__name__ = self.__name__
        return bind(rule, op, self.__name__)

    @property
    def identity(self) -> Any:
        return self.value

    def __repr__(self) -> str:
        return f"safe(value={self.value!r})"


class _Call:
    """One call of an elementwise op, and its derivatives at other inputs."""

    def __init__(self, name: str, y: Any, inputs: Any, forward: Any, vjp_: Any) -> None:
        self.name, self.y, self.inputs, self.forward, self.vjp_ = name, y, inputs, forward, vjp_
        self.one: Tensor = ones_like(y)
        self.half: float = HARMLESS.get(name, 0.5)
        self.xs: list[Tensor] = self.aligned()
        self.held: list[Tensor] = [stop_gradient(x) for x in self.xs]
        self.is_regular: Tensor = self.regular()

    def aligned(self) -> list[Tensor]:
        """Return the inputs in the shape of the output, so that no gradient is summed."""
        return [zeros_like(self.y) + x for x in self.inputs]

    def regular(self) -> Tensor:
        """Return where the output is the value of a function that has a derivative."""
        return equal(self.y, self.y)

    def spread(self, v: Tensor) -> Tensor:
        """Return numbers that belong to outputs, for the inputs that each output depends on."""
        return v

    def pull(self, xs: Sequence[Tensor], dy: Any, i: int) -> Tensor:
        """Return the op's own gradient by an input, at other inputs."""

        def of_one(given: Sequence[Tensor]) -> list[Any]:  # (gradients by others may be NaN there)
            return [self.forward(*xs[:i], *given, *xs[i + 1 :])]

        return self.vjp_(of_one, [xs[i]], [dy])[0]

    def bends(self, i: int) -> list[Tensor]:
        """Return the inputs, as constants where the derivative of a derivative is not finite."""
        if self.name not in BENT:
            return self.xs
        seconds = self.vjp_(lambda xs: [self.pull(xs, self.one, i)], self.held, [self.one])
        rows = zip(seconds, self.xs, self.held, strict=True)
        return [where(isfinite(second), x, held) for second, x, held in rows]

    def safe(self, i: int, dy: Any, value: float) -> Any:
        """Return the gradient by an input, with a number where the derivative is not finite."""
        dy = lift(dy)
        good = logical_and(isfinite(self.pull(self.held, self.one, i)), self.is_regular)
        xs = [where(good, x, self.half) for x in self.bends(i)]
        dx = where(good, self.pull(xs, dy, i), value * self.spread(dy))
        dtype = self.inputs[i].dtype
        return dx if dx.dtype == dtype else astype(dx, dtype)


class _NormCall(_Call):
    """One call of a norm, whose derivative is irregular at vectors of zeros."""

    def aligned(self) -> list[Tensor]:
        return [*self.inputs]

    def regular(self) -> Tensor:
        return equal(self.spread(where(equal(self.y, 0), 1.0, zeros_like(self.y))), 0)

    def spread(self, v: Tensor) -> Tensor:
        halves = [full_like(x, self.half) for x in self.held]
        return self.pull(halves, v, 0) / self.pull(halves, self.one, 0)


def _fitting(op: Op) -> str:
    """Return the name of an op in the tables; raise for an op that the rule does not fit."""
    name = op.type.rpartition(".")[2].lower()
    name = ALSO.get(name, name)
    known = OPS.get(op.type)
    is_custom = known is not None and known.elementwise and not known.shipped.is_ours
    if name not in SINGULAR and name not in NORMS and not is_custom:
        raise RuleError(
            "safe is for ops whose gradient is infinite or NaN at some inputs ('Sqrt', 'Log', "
            f"'RealDiv', 'Pow', torch.linalg.vector_norm, …), and {op.type!r} is not one. Find the "
            "op with find_nan, or use rules.vjp_of(function) for another gradient."
        )
    return name
