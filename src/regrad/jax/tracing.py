"""`trace_gradients` and `find_nan` for JAX functions that nobody edits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from regrad.autodiff.gradients import callable_or_raise
from regrad.core.signatures import helpful
from regrad.inspection.nonfinite import CURES, MASKED, NonFinite, Operand, operand
from regrad.inspection.numbers import Numbers, numbers_of, together
from regrad.inspection.recorder import first_bad
from regrad.inspection.traces import GradientTrace, Step
from regrad.jax.host.programs import Params
from regrad.jax.primitives import is_float
from regrad.jax.running import LONGEST, Given, Ran, Run
from regrad.jax.sites import is_number

# JAX's primitives by the op types that the cures are known for.
OP_TYPES = {
    "log": "Log", "log1p": "Log1p", "sqrt": "Sqrt", "rsqrt": "Rsqrt", "div": "RealDiv",
    "pow": "Pow", "exp": "Exp", "exp2": "Exp", "expm1": "Expm1", "select_n": "SelectV2",
    "mul": "Mul", "asin": "Asin", "acos": "Acos", "atanh": "Atanh", "acosh": "Acosh",
    "atan2": "Atan2", "cbrt": "Sqrt",
}  # fmt: skip
SEARCHED = 4096  # scans up to this length are opened if a NaN begins in one


@helpful("trace_gradients")
def trace_gradients(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    longest_scan: int = LONGEST,
) -> Callable[..., GradientTrace]:
    """Return a function that runs `f`, and then its backward pass, and tells what ran there.

    Args:
        f: A function of JAX's arrays and pytrees of them, which is not edited: a loss, a bound
            `apply`, what `override` returns. It returns a scalar, or arrays, which are taken with
            the gradient 1 for each element.
        argnums: The arguments whose gradients are asked for; by default all that hold floats, and
            f itself where it is a pytree (a module of Equinox).
        has_aux: Whether f returns a pair whose second part has no gradient.
        longest_scan: The longest `jax.lax.scan` that is opened, round by round; a longer one is
            one step.

    Returns:
        A function of f's arguments that returns a `GradientTrace`: one step for each primitive
        that the backward pass went through, in order, with its rule (JAX's own, one of an
        `override`, or that of a `jax.custom_vjp` or `jax.custom_jvp`, with its place), the line
        of your code that ran it, the name scopes around it (those of Flax and Haiku modules),
        and figures of the gradients that arrived and left. What `jit`, `checkpoint`, `cond` and
        short scans call is opened. JAX's own functions with a derivative of their own
        (`jax.nn.relu`) are one step each, and count as built-in. `cuts` are ops that turn what is
        differentiated into integers or bools, behind which there is no gradient.

    Raises:
        ArgumentError: f is not callable, or returns no pair with `has_aux=True`.
        GradientError: nothing that is asked for holds floats, or f returns none.

    >>> import jax.numpy as jnp, regrad as rg
    >>> trace = rg.jax.trace_gradients(lambda x: jnp.sum(jnp.sin(x * x)))(jnp.array([1.0, 2.0]))
    >>> [step.op_type for step in trace.steps]
    ['reduce_sum', 'sin', 'mul']
    """
    callable_or_raise(f, "trace_gradients")

    def traced(*args: Any, **kwargs: Any) -> GradientTrace:
        given = Given(f, args, kwargs, "trace_gradients", argnums, has_aux)
        run = given.run(longest=longest_scan)
        steps = [_step(ran, arrived, left) for ran, arrived, left in run.backward()]
        inputs = zip(given.asked, map(_figures, run.gradients), strict=True)
        cuts = [Step(c.op_type, c.kind, c.rule, c.line, c.path, None, ()) for c in run.cuts]
        return GradientTrace(tuple(steps), tuple(inputs), given.value(run.values), tuple(cuts))

    return traced


def _step(ran: Ran, arrived: Sequence[Any], left: Sequence[Any]) -> Step:
    """Figures of one step; the gradients themselves are let go."""
    site = ran.site
    figures = zip(ran.names, map(_figures, left), strict=True)
    came = together(map(_figures, arrived))
    return Step(site.op_type, site.kind, site.rule, site.line, site.path, came, tuple(figures))


def _figures(x: Any) -> Numbers | None:
    return None if x is None else numbers_of(x)


# -- where a NaN begins --------------------------------------------------------------------------


@helpful("find_nan")
def find_nan(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    longest_scan: int = LONGEST,
) -> Callable[..., NonFinite | None]:
    """Return a function that runs `f` forward and backward, and finds the first NaN or infinity.

    Args:
        f: A function as `trace_gradients` takes it, with the same options.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.
        longest_scan: See `trace_gradients`.

    Returns:
        A function of f's arguments that returns a `NonFinite`, or None if value and gradients are
        finite: the primitive, the line of your code that ran it, the scope, the element, what the
        op was given there, and the usual cure. An argument that is not finite to begin with is
        reported as such. An infinity on the way that spoils nothing (a mask of `-inf` before a
        softmax) is not a finding; one behind a mask is found by what it makes of the gradient.

    Raises:
        ArgumentError, GradientError: as `trace_gradients`.

    >>> import jax.numpy as jnp, regrad as rg
    >>> found = rg.jax.find_nan(lambda x: jnp.log(x).sum())(jnp.array([1.0, 0.0]))
    >>> found.op_type, found.phase, found.what, found.index
    ('log', 'forward', 'inf', (1,))
    """
    callable_or_raise(f, "find_nan")

    def checked(*args: Any, **kwargs: Any) -> NonFinite | None:
        given = Given(f, args, kwargs, "find_nan", argnums, has_aux)
        for name, x in zip(given.names, given.arrays, strict=True):
            if is_float(jax.typeof(x)) and (bad := first_bad(x)):
                what, index, count = bad
                return NonFinite("argument", what, "", "", "", index, count, output=name)
        with jax.debug_nans(False), jax.debug_infs(False):  # they would raise, and say less
            found = _found(given, longest_scan)
            if found is not None and found.op_type == "scan":  # in which round?
                found = _found(given, max(longest_scan, SEARCHED)) or found
        return found

    return checked


def _found(given: Given, longest_scan: int) -> NonFinite | None:
    run = given.run(keeps=True, longest=longest_scan)
    if any(first_bad(y.x) for y in run.ys):
        return _forward(run)
    return _backward(run)


def _forward(run: Run) -> NonFinite | None:
    """The first op on the way to the result that made, or brought in, what is not finite."""
    spoiled = {y.key for y in run.ys if first_bad(y.x)}
    made = {key for ran in run.ran for key in ran.ys}
    found = None
    for ran in reversed(run.ran):
        if spoiled.isdisjoint(ran.ys):
            continue
        bad = {key for key, x in _operands_of(ran) if first_bad(x)}
        spoiled |= bad
        if ran.site.op_type and made.isdisjoint(bad) and (output := _bad_output(ran)):
            found = ran, output
    return None if found is None else _made_forward(*found)


def _operands_of(ran: Ran) -> list[tuple[int, Any]]:
    pairs = zip(ran.ins, ran.xs, strict=True)
    return [(key, x) for key, x in pairs if is_float(jax.typeof(x))]


def _bad_output(ran: Ran) -> Any:
    """An output that is not finite: which it is, what it is, where."""
    for y in ran.outs:
        if is_float(jax.typeof(y)) and (bad := first_bad(y)):
            return y, bad
    return None


def _made_forward(ran: Ran, found: Any) -> NonFinite:
    y, (what, index, count) = found
    site = ran.site
    operands = _operands(ran, y.shape, index)
    cure = _cure(ran)
    return NonFinite(
        "forward", what, site.op_type, site.line, site.path, index, count, operands,
        site.rule, cure,
    )  # fmt: skip


def _backward(run: Run) -> NonFinite | None:
    """The first rule that made what is not finite of finite gradients."""
    masked, found = False, None
    for ran, arrived, left in run.backward():
        masked |= ran.site.op_type in ("select_n", "max", "min", "clamp", "relu")
        for i, dx in zip(ran.wanted, left, strict=True):
            if found is None and (bad := first_bad(dx)):
                found = _made_backward(ran, i, arrived, dx.shape, bad, masked)
    bad = found is not None and any(dx is not None and first_bad(dx) for dx in run.gradients)
    return found if bad else None


def _made_backward(
    ran: Ran, i: int, dys: Sequence[Any], shape: tuple[int, ...], bad: Any, masked: bool
) -> NonFinite:
    what, index, count = bad
    given = [operand("dy", dy, shape, index) for dy in dys]
    operands = (*given, *_operands(ran, shape, index))
    cure = _cure(ran)
    if masked and what == "NaN" and any(o.name == "dy" and o.value == 0 for o in operands):
        cure = MASKED
    site = ran.site
    return NonFinite(
        "backward", what, site.op_type, site.line, site.path, index, count, operands,
        site.rule, cure, ran.name(i),
    )  # fmt: skip


def _operands(ran: Ran, shape: tuple[int, ...], index: tuple[int, ...]) -> tuple[Operand, ...]:
    """The operands that are numbers, at an element of a result."""
    return tuple(
        operand(ran.name(i), x, shape, index)
        for i, x in enumerate(ran.xs)
        if np.size(x) and is_number(jax.typeof(x))
    )


def _cure(ran: Ran) -> str:
    """The usual remedy for an op."""
    name = ran.site.op_type
    if name == "integer_pow":
        return CURES["Reciprocal" if Params(ran.eqn)["y"] == -1 else "Pow"]
    return CURES.get(OP_TYPES.get(name, ""), "")
