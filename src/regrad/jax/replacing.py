"""Operations of a JAX program whose value is replaced, and their new programs.

`regrad_op` computes the result of the program inside it (see `primitives`). If a rule replaces
values, that program is the program of the rule's function. This function can use the original
equation as `y` and `forward`.
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
    """Return the program that replaces the value of an operation, with the same operands.

    The gradient, which the rule selects, becomes the gradient of the new program.
    """
    forward, own = gradient.rule.forward, gradient.equation
    assert forward is not None and own is not None
    if not sees_axes(program.in_avals):
        raise GradientError(
            f"override: {gradient.name} would replace a value inside shard_map, where it is not "
            "visible as a whole. Put the override inside."
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
    """Return the function's values for some operands, with the op's result types."""
    call, given, _, _ = gradient._call(xs, None, [None] * len(gradient.outs))
    outputs = gradient.equation.outputs  # pyright: ignore[reportOptionalMemberAccess]
    own = outputs(call.own.operands) if forward.keeps_y else []  # pyright: ignore
    return forward.run_on(ARRAYS, call, given, own, gradient.outs, gradient.name)


ARRAYS = HostArrays(lambda x: isinstance(x, jax.Array), jax.numpy.asarray, bridge, names_in)
