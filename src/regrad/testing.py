"""Numerical checks of gradients, to any order, that say which op and which input is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from regrad.autodiff.custom_calls import CustomCall
from regrad.autodiff.gradients import callable_or_raise
from regrad.checking import check
from regrad.checking.check import Function, Method, Settings
from regrad.checking.findings import Finding, GradientReport
from regrad.core import containers, dispatch, rule
from regrad.core.backends import is_inexact
from regrad.core.bindings import OpBinding
from regrad.core.hints import hint_in
from regrad.core.pullback import or_zeros, run_taped
from regrad.core.registry import OPS
from regrad.core.rule import label, place
from regrad.core.signatures import check_passed, helpful
from regrad.core.state import State, current, in_state, masked
from regrad.core.tape import GroupedRecord, Record
from regrad.core.tensor import Tensor, TensorLike
from regrad.core.walk import name_of, walk_from
from regrad.errors import ArgumentError, GradientError, RegradError, kind
from regrad.inspection.checks import by_order, explained, settings_of, weights
from regrad.inspection.tapes import KeepingTape, bare_rule, like, with_tensors
from regrad.ops.creation_like import ones_like
from regrad.transforms.derivatives import Linearized

OfTensors = Callable[[Sequence[Tensor]], list[Tensor]]


class GradientCheckError(GradientError, AssertionError):
    """A gradient that differs from its numerical counterpart; `report` says all that was found."""

    def __init__(self, report: GradientReport) -> None:
        hint = (
            " No single op is wrong by itself; look at what is compiled, batched or run again as "
            "a whole."
        )
        super().__init__(report.error + ("" if report.causes else hint))
        self.report = report


def raise_if_wrong(report: GradientReport) -> None:
    """Raise for a report with findings, and for one without a single comparison."""
    if not report.ok:
        raise GradientCheckError(report)
    if not report.comparisons:
        why = report.inconclusive[0].kind
        raise ArgumentError(f"check_gradients: nothing was checked: {why}; give other arguments")


@helpful("check_gradients")
def check_gradients(
    f: Callable[..., Any],
    args: Sequence[Any],
    order: int = 1,
    *,
    method: Method = "central",
    step: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> None:
    """Check the gradients of `f` at `args` against differences, to the given order.

    Args:
        f, args, order, method, step, rtol, atol, seed: As in `gradient_report`.

    Raises GradientCheckError if `gradient_report`, which takes the same arguments, finds
    something. The message names order, input, element and numbers, and the rules or custom
    gradients that disagree with differences of their op alone. What differences cannot judge
    (a kink, rounding) is not an error; the report has it. Raises ArgumentError if there was
    nothing to compare: no elements, or no finite value.

    Source: `check_grads` of HIPS autograd and JAX.

    >>> import regrad as rg
    >>> from regrad.testing import check_gradients
    >>> check_gradients(lambda x: rg.sin(x) * x, [[0.5, 1.0]], order=3)
    """
    report = gradient_report(
        f, args, order, method=method, step=step, rtol=rtol, atol=atol, seed=seed
    )
    raise_if_wrong(report)


@helpful("gradient_report")
def gradient_report(
    f: Callable[..., Any],
    args: Sequence[Any],
    order: int = 1,
    *,
    method: Method = "central",
    step: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> GradientReport:
    """Compare the gradients of `f` at `args` with differences, to the given order.

    Args:
        f: A function of Tensors that returns a Tensor, or a tuple or list of them.
        args: Its arguments. Floats are taken as float64 and differentiated; integers and
            bools are passed on.
        order: 1 checks the gradient, 2 also the gradient of the gradient, by the arguments and by
            the gradient that arrives (`dy` in findings; `dy2` is what arrives at order 2), and so
            on. The first order that is wrong is the last that is checked.
        method: `"central"`: central differences. `"complex"`: a complex step (exact to
            rounding, first order only, for functions of real arguments that are analytic and
            whose ops take complex numbers).
        step: The largest step, the same for all; by default relative to each element.
        rtol: Tolerance relative to the numbers compared, by default 1e-6.
        atol: Absolute tolerance, by default 0. The rounding of f is allowed for anyway.
        seed: Of the random directions and of the weights of the outputs.

    Small functions (up to 8 numbers in and out) are checked entry by entry of the Jacobian,
    others input by input in a random direction, with weights under which all outputs count
    alike. Where a quick difference disagrees, differences of many steps, extrapolated, say how
    large their own error is, element by element; so a tiny gradient next to a large one is judged
    by its own size, and a difference that does not converge (a kink) by the slopes to both
    sides. Where that tells nothing, the report lists it as inconclusive and points nearby are
    checked.

    What is wrong is looked for op by op, in the bodies of jit, checkpoint, loops and branches
    as well, to the same order.

    Returns:
        A `GradientReport`: its findings, and what could not be decided.

    Raises:
        ArgumentError: f is not callable, args is not a list, or a setting is unknown.

    Source: Ridders (1982) for the extrapolation, Moré and Wild (2011) for the noise, Squire and
    Trapp (1998) for the complex step.

    >>> import regrad as rg
    >>> from regrad.testing import gradient_report
    >>> with rg.gradient_override_map({"Sin": lambda dy, x: -dy * rg.cos(x)}):
    ...     report = gradient_report(rg.sin, [[0.5]])
    >>> report.findings[0].kind, report.causes[0].op_type
    ('wrong sign', 'Sin')
    """
    callable_or_raise(f, "check_gradients")
    _check_options(order, method)
    settings = settings_of(args, order, step, rtol, atol, seed, method)
    check_passed(f, args, "check_gradients(f, args)")
    xs = [_as_float64(a) for a in args]
    places = [i for i, x in enumerate(xs) if is_inexact(x.dtype)]
    if not places:
        raise ArgumentError("check_gradients: no argument is a float, so there is no gradient")
    floats = [xs[i] for i in places]
    if method == "complex" and any(x.dtype.kind == "c" for x in floats):
        raise ArgumentError("check_gradients: a complex step needs real arguments; leave it out")

    def of_floats(floats: Sequence[Tensor]) -> list[Tensor]:
        full = list(xs)
        for i, x in zip(places, floats, strict=True):
            full[i] = x
        return _outputs(f(*full))

    with np.errstate(all="ignore"):
        given = of_floats(floats)
    if not given:
        raise ArgumentError(
            "check_gradients: f returns no floats, so there is no gradient to check"
        )
    names = [f"args[{i}]" for i in places]
    report = _report(of_floats, floats, order, names, settings)
    return explained(
        report,
        lambda order: by_order(of_floats, floats, order, partial(_wrong, settings), _derived),
    )


def _check_options(order: int, method: str) -> None:
    if order < 1 or method not in ("central", "complex"):
        raise ArgumentError(
            "check_gradients: order is 1 or more and method 'central' or 'complex', got "
            f"order={order!r}, method={method!r}"
        )
    if method == "complex" and order > 1:
        raise ArgumentError(
            "check_gradients: a complex step needs an analytic function, and a gradient of complex "
            "numbers is conjugated, so it checks order 1 only; use method='central' beyond"
        )


def _as_float64(value: TensorLike) -> Tensor:
    x = dispatch.lift(value)
    if not is_inexact(x.dtype):
        return x
    return dispatch.as_dtype(x, np.dtype("complex128" if x.dtype.kind == "c" else "float64"))


def _outputs(y: Any) -> list[Tensor]:
    """Return the results of f that have gradients, as a list of Tensors."""
    ys = list(y) if isinstance(y, tuple | list) else [y]
    for t in ys:
        if not isinstance(t, Tensor):
            raise ArgumentError(f"check_gradients: f must return Tensors, got {kind(t)}")
    return [t for t in ys if is_inexact(t.dtype)]


# -- functions of Tensors as functions of arrays -----------------------------------------------


def _report(
    f: OfTensors, xs: Sequence[Tensor], order: int, names: Sequence[str], settings: Settings
) -> GradientReport:
    arrays = [x._values() for x in xs]
    return check.report(_of_arrays(f, xs), arrays, order, names=names, settings=settings)


def _of_arrays(f: OfTensors, xs: Sequence[Tensor]) -> Function:
    """A function of Tensors as one of arrays, in the libraries of xs."""

    def values(arrays: check.Arrays) -> list[np.ndarray]:
        return [y._values() for y in f(like(arrays, xs))]

    def vjp(arrays: check.Arrays) -> check.Pull:
        run = _Run(f, like(arrays, xs))
        pull = lambda dys: run.pull(like(dys, run.ys))  # noqa: E731
        return lambda dys: [None if g is None else g._values() for g in pull(dys)]

    def gradient(dys: check.Arrays) -> Function:
        ys = f(xs)
        return _of_arrays(_derive(f, like(dys, ys)), [*xs, *map(ones_like, ys)])

    return Function(values, vjp, gradient)


class _Run(Linearized):
    """A function of a list of Tensors, run once under a tape."""

    def __init__(self, f: OfTensors, xs: Sequence[Tensor]) -> None:
        super().__init__(lambda *xs: f(xs), xs, "check_gradients")

    def pull(self, dys: Sequence[Tensor]) -> list[Tensor | None]:  # pyright: ignore
        """The gradients by all inputs, None where nothing came."""
        ids = [y._id for y in self.ys]
        found = walk_from(reversed(self.tape.records), ids, dys, self.watched)
        return [found.get(x._id) for (x,) in self.inputs]


# -- which op it is ----------------------------------------------------------------------------


def _wrong(settings: Settings, f: OfTensors, xs: Sequence[Tensor], orders: int) -> list[Finding]:
    """The findings about all ops that lead from xs to f(xs)."""
    return [
        found
        for record, watched in _records(f, xs)
        for found in _wrong_inputs(record, watched, orders, settings)
    ]


def _derived(f: OfTensors, xs: Sequence[Tensor]) -> tuple[OfTensors, list[Tensor]]:
    """The gradient of a function, as a function, and where it is taken."""
    ys = f(xs)
    dys = like([weights(y.shape, y.dtype) for y in ys], ys)
    return _derive(f, dys), [*xs, *map(ones_like, ys)]


def _derive(f: OfTensors, dys: Sequence[Tensor]) -> OfTensors:
    """The function (*xs, *scales) -> the gradients by xs, where scales * dys arrive."""

    def g(tensors: Sequence[Tensor]) -> list[Tensor]:
        count = len(tensors) - len(dys)
        xs, scales = tensors[:count], tensors[count:]
        with masked():
            given = [scale * dy for scale, dy in zip(scales, dys, strict=True)]
        found = _Run(f, xs).pull(given)
        return [or_zeros(dx, x) for x, dx in zip(xs, found, strict=True)]

    return g


def _records(f: OfTensors, xs: Sequence[Tensor]) -> list[tuple[Record, set[int]]]:
    """All ops that lead from xs to f(xs); what jit and its kin would run as one runs op by op."""
    aliases = [dispatch.alias(x) for x in xs]
    tape = KeepingTape()
    tape.watched.update(a._id for a in aliases)
    run_taped(tape, f, (aliases,))
    return [(record, tape.watched) for record in tape.records]


def _wrong_inputs(
    record: Record, watched: set[int], order: int, settings: Settings
) -> list[Finding]:
    """The inputs of one record whose gradient is wrong."""
    alone = _isolate(record)
    if alone is None:
        return []
    leaves = [
        i for i, (key, x) in enumerate(zip(record.inputs, record.xs, strict=True))
        if key in watched and is_inexact(x.dtype)
    ]  # fmt: skip

    def of_leaves(floats: Sequence[Tensor]) -> list[Tensor]:
        xs = list(record.xs)
        for i, x in zip(leaves, floats, strict=True):
            xs[i] = x
        return _outputs(alone(tuple(xs)))

    try:
        xs = [record.xs[i] for i in leaves]
        report = _report(of_leaves, xs, order, _names(record, leaves), settings)
    except RegradError:
        return []  # the op cannot run by itself
    what = _rule_of(record)
    return [replace(f, rule=what, op_type=record.op.type) for f in report.findings]


def _names(record: Record, leaves: Sequence[int]) -> list[str]:
    """Return the names of the inputs, a custom function's after its parameters."""
    call = bare_rule(record.rule)
    if not isinstance(call, CustomCall):
        return [name_of(record, i) for i in leaves]
    args = call.again[1]
    parameters, names = rule.parameters(call.f), []
    for i, arg in enumerate(args):
        called = parameters[i] if i < len(parameters) else f"args[{i}]"
        paths = containers.paths(arg, called)
        opened = containers.flatten(arg)[0]
        names += [p for p, leaf in zip(paths, opened, strict=True) if isinstance(leaf, Tensor)]
    return [names[i] for i in leaves]


def _isolate(record: Record) -> Callable[[tuple[Tensor, ...]], Any] | None:
    """The op of a record as a function of its tensors, under the record's rule."""
    rule = bare_rule(record.rule)
    if isinstance(rule, CustomCall):
        return partial(_called_again, rule)
    if record.op.type not in OPS:
        return None
    own = None if rule is record.op.rule else {record.op.type: OpBinding(record.op, rule, 1)}
    layout = record.layout if isinstance(record, GroupedRecord) else None

    def op(xs: tuple[Tensor, ...]) -> Any:
        with in_state((current() or State()).overriding(own)):
            return dispatch.run(record.op, xs, record.attrs, layout)

    return op


def _called_again(call: CustomCall, xs: tuple[Tensor, ...]) -> list[Any]:
    """Return the results of a custom function for other tensors."""
    function, args, options = call.again
    return containers.flatten(function(*with_tensors(args, xs), **options))[0]


def _rule_of(record: Record) -> str:
    """The rule of a record, for messages."""
    rule = bare_rule(record.rule)
    if isinstance(rule, CustomCall):
        return f"the gradient of the custom function {rule.name!r} ({place(rule.f)})"
    return f"{label(rule)} for the op type {record.op.type!r}"


__all__ = ["Finding", "GradientCheckError", "GradientReport", "check_gradients", "gradient_report"]


hint_in(__name__)
