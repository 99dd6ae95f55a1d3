"""Operations of a JAX program whose value is replaced: the program that stands for one.

`regrad_op` computes what the program inside it computes (see `primitives`). Where a rule replaces
values, that is the program of its function, and the equation that JAX had is what the function may
ask for as `y` and `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from regrad.core.backends import is_traced
from regrad.core.call import HostArrays
from regrad.core.replacing import Forward
from regrad.errors import GradientError
from regrad.jax.bridge import bridge
from regrad.jax.gradients import Equation, RuleGradient, closes_over
from regrad.jax.host.programs import sees_axes, struct_of
from regrad.transforms.closures import names_in


def replaced_program(gradient: RuleGradient, program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return the program that replaces the value of an operation, of the same operands.

    The gradient, whose rule says so, is from then on that of the new program.
    """
    forward, own = gradient.rule.forward, gradient.equation
    assert forward is not None and own is not None
    if not sees_axes(program.in_avals):
        raise GradientError(
            f"override: {gradient.name} would replace a value inside shard_map, which cannot be "
            "seen as a whole there. Put the override inside."
        )
    scale = own.scale

    def run(*xs: Any) -> Any:
        ys = _value(gradient, forward, xs)
        return ys if scale is None else [y * jax.numpy.asarray(scale, y.dtype) for y in ys]

    given = [*map(struct_of, program.in_avals)]
    made = jax.make_jaxpr(run)(*given)
    if any(map(is_traced, made.consts)):
        raise closes_over(gradient.name)
    gradient.equation = Equation(made, gradient.places, [None] * len(gradient.places), scale)
    return made


def _value(gradient: RuleGradient, forward: Forward, xs: Sequence[Any]) -> list[Any]:
    """Return the values that the function computes of some operands, of the op's result types."""
    call, given, _, _ = gradient._call(xs, None, [None] * len(gradient.outs))
    outputs = gradient.equation.outputs  # pyright: ignore[reportOptionalMemberAccess]
    own = outputs(call.own.operands) if forward.keeps_y else []  # pyright: ignore
    return forward.run_on(ARRAYS, call, given, own, gradient.outs, gradient.name)


ARRAYS = HostArrays(lambda x: isinstance(x, jax.Array), jax.numpy.asarray, bridge, names_in)
