"""`vjp`, `jvp`, `jacobian`, `hessian`: the linear maps behind a gradient.

Where nothing is connected they give zeros: a linear function has a Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.autodiff.gradients import callable_or_raise, watchable
from regrad.core import containers, dispatch
from regrad.core.backends import BACKENDS, has_values, is_inexact
from regrad.core.blocks import inside
from regrad.core.pullback import or_zeros, run_taped
from regrad.core.registry import OPS, Op
from regrad.core.rule import Rule, describe, label
from regrad.core.signatures import check_passed, helpful
from regrad.core.state import masked
from regrad.core.tape import Record, Tape
from regrad.core.tensor import Tensor
from regrad.core.walk import name_of, seed, walk_from
from regrad.errors import ArgumentError, GradientError, ShapeError, kind
from regrad.ops.array import reshape, stack
from regrad.ops.creation import zeros_like
from regrad.ops.elementwise import logical_and, where
from regrad.ops.reduction import any as any_of
from regrad.transforms.vmap import at_once

if TYPE_CHECKING:
    from regrad.core.rule import Cotangent
    from regrad.core.tensor import TensorLike
    from regrad.core.walk import Inspector

VjpFunction = Callable[..., tuple[Any, ...]]


class Linearized:
    """A function run once under a tape: its outputs, and the way back, any number of times."""

    def __init__(self, f: Callable[..., Any], xs: Sequence[Any], api: str) -> None:
        callable_or_raise(f, api)
        if not xs:
            raise ArgumentError(
                f"{api}: there is nothing to differentiate by; give the inputs of f"
            )
        opened = [containers.flatten(x) for x in xs]
        self.rebuilds = [rebuild for _, rebuild in opened]
        self.inputs = [[watchable(leaf, api) for leaf in leaves] for leaves, _ in opened]
        self.tape = Tape([a._id for group in self.inputs for a in group])
        aliases = [r(group) for r, group in zip(self.rebuilds, self.inputs, strict=True)]
        try:
            y = run_taped(self.tape, f, aliases)
        except TypeError:
            check_passed(f, aliases, api)
            raise
        finally:
            self.watched = self.tape.close()
        self.ys, self.rebuild = _outputs(y, api)

    @property
    def value(self) -> Any:
        """What f returned."""
        return self.rebuild(self.ys)

    def handed_out(self) -> Any:
        """What f returned, by Tensors that a custom function may make its own outputs."""
        return self.rebuild([dispatch.alias(y) for y in self.ys])

    def pull(self, dys: Sequence[Tensor], inspect: Inspector | None = None) -> list[list[Tensor]]:
        """The gradients by all inputs of `sum(y * dy)` over all outputs."""
        floats = [i for i, y in enumerate(self.ys) if is_inexact(y.dtype)]
        ids, dys = [self.ys[i]._id for i in floats], [dys[i] for i in floats]
        found = walk_from(reversed(self.tape.records), ids, dys, self.watched, inspect)
        return [[or_zeros(found.get(x._id), x) for x in group] for group in self.inputs]

    def close_inputs(self, groups: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """One entry per input, in the input's own structure."""
        return tuple(r(group) for r, group in zip(self.rebuilds, groups, strict=True))


def _outputs(y: Any, api: str) -> tuple[list[Tensor], containers.Rebuild]:
    leaves, rebuild = containers.flatten(y)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ArgumentError(
                f"the f passed in {api} must return a Tensor or a container of Tensors, got "
                f"{kind(leaf)}"
            )
    if not leaves:
        raise ArgumentError(f"the f passed in {api} returned nothing: {y!r:.60}")
    return leaves, rebuild


def _like(values: Any, structure: Any, what: str) -> list[Tensor]:
    """The leaves of `values` as Tensors of the shapes and dtypes of those of `structure`."""
    tensors = containers.flatten(structure)[0]
    try:
        leaves = containers.matched(values, structure)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"{what}: another structure is due. {error}") from None
    given = []
    for leaf, t in zip(leaves, tensors, strict=True):
        v = dispatch.lift_as(leaf, t.dtype)
        if v.shape != t.shape:
            raise ShapeError(f"{what}: the shape {t.shape} is due, got {v.shape}")
        given.append(v)
    return given


@helpful("vjp")
def vjp(f: Callable[..., Any], *xs: Any) -> tuple[Any, VjpFunction]:
    """`f(*xs)`, and the function that carries a gradient of it back to xs.

    Returns `(y, vjp_function)`; `vjp_function(dy)` gives a tuple with one gradient per input,
    each in its input's structure, zeros where nothing is connected. It can be called any
    number of times, and differentiated. `dy` has the structure and shapes of y.

    Source: `jax.vjp`.

    >>> import regrad as rg
    >>> y, back = rg.vjp(lambda a, b: a * b, rg.scalar(2.0), rg.scalar(5.0))
    >>> [dx.item() for dx in back(1.0)]
    [5.0, 2.0]
    """
    run = Linearized(f, xs, "vjp(f, *xs)")

    def vjp_function(dy: TensorLike) -> tuple[Any, ...]:
        with masked():
            return run.close_inputs(run.pull(_like(dy, run.value, "the dy of a vjp function")))

    return run.handed_out(), vjp_function


@helpful("jvp")
def jvp(f: Callable[..., Any], xs: Sequence[Any], dxs: Sequence[Any]) -> tuple[Any, Any]:
    """`f(*xs)`, and its derivative in the direction dxs (forward mode).

    Returns `(y, dy)`, both in the structure of f's result. The derivative is had by
    transposing the backward pass, so custom gradients and overrides in force count here too.
    That is right where a rule is linear in the gradient that arrives; elsewhere (a guided
    ReLU's `dy > 0`, a clipped gradient) it raises GradientError, naming rule and op. (That a rule
    makes 0 of 0 can only be seen where there are values: under jit the result is NaN where one
    does not.)

    Source: `jax.jvp`; the transposition is Townsend's "new trick" (2017).

    >>> import regrad as rg
    >>> y, dy = rg.jvp(lambda x: x.square(), [rg.scalar(3.0)], [rg.scalar(1.0)])
    >>> dy.item()
    6.0
    """
    if not isinstance(xs, list | tuple) or not isinstance(dxs, list | tuple):
        raise ArgumentError("jvp(f, xs, dxs): xs and dxs are lists, one entry per argument of f")
    return _pushed(Linearized(f, xs, "jvp(f, xs, dxs)"), dxs)


@inside(masked)
def _pushed(run: Linearized, dxs: Sequence[Any]) -> tuple[Any, Any]:
    inputs = run.close_inputs(run.inputs)
    directions = _like(tuple(dxs), inputs, "jvp(f, xs, dxs): dxs")
    floats = [y for y in run.ys if is_inexact(y.dtype)]
    dys = iter(_transposed(run, floats, directions))
    return run.handed_out(), run.rebuild(
        [next(dys) if is_inexact(y.dtype) else zeros_like(y) for y in run.ys]
    )


def _transposed(
    run: Linearized, ys: Sequence[Tensor], directions: Sequence[Tensor]
) -> list[Tensor]:
    """The transpose of the map from the gradients of ys to those of the inputs.

    The map is run at 0, under a tape that admits only what is affine in what it watches; what
    is affine and 0 at 0 is linear, and then its own backward pass is the transpose.
    """
    zeros = [dispatch.alias_of(zeros_like(y)) for y in ys]
    tape = LinearTape([z._id for z in zeros])
    given = iter(zeros)
    seeds = [next(given) if is_inexact(y.dtype) else y for y in run.ys]
    pulled = run_taped(tape, run.pull, (seeds, tape))
    gradients = [dx for group in pulled for dx in group]
    watched = tape.close()
    ids = [dx._id for dx in gradients]
    found = walk_from(reversed(tape.records), ids, directions, watched)
    return _dispelled([or_zeros(found.get(z._id), z) for z in zeros], tape.doubts)


def _dispelled(dys: list[Tensor], doubts: Sequence[Tensor]) -> list[Tensor]:
    """NaN for all, if a rule gave a gradient where none arrived: a program cannot raise."""
    if not doubts:
        return dys
    broken = [any_of(logical_and(dx != 0, dx == dx)) for dx in doubts]
    return [where(any_of(stack(broken)), np.nan, dy) for dy in dys]


class LinearTape(Tape):
    """A tape that watches gradients on their way back, and refuses what is not linear in them.

    It looks on while the walk runs: it knows which rule is at work, and that it maps 0 to 0.
    Of traced gradients that cannot be known; `doubts` are what rules of the user's made of 0.
    """

    __slots__ = ("doubts", "record")

    plain = False

    def __init__(self, watched: Iterable[int]) -> None:
        super().__init__(watched)
        self.doubts: list[Tensor] = []

    def before(self, record: Record) -> None:
        """A rule is about to run."""
        self.record = record

    def admit(self, op: Op, rule: Rule, wanted: frozenset[int]) -> bool:
        if rule.constant:
            return False  # a factor, like any number
        if not rule.linear_in(wanted):
            raise GradientError(
                "forward mode: the backward pass is not linear in the gradient that arrives, "
                f"because {self.at_work()} puts it through the op type {op.type!r}. Such a rule "
                "has no forward-mode derivative; use vjp, grad or jacobian."
            )
        return True

    def __call__(self, record: Record, dy: Cotangent, leaf: int, dx: Tensor | None) -> None:
        if not isinstance(dx, Tensor):
            return
        if not has_values(dx._data):
            if not record.rule.is_ours:
                self.doubts.append(dx)
            return
        values = dx._values()
        if np.any((values != 0) & ~np.isnan(values)):
            raise GradientError(
                f"forward mode: {self.at_work()} gives a gradient for the input "
                f"{name_of(record, leaf)!r} even where none arrives, so it is not linear in dy. "
                "Such a rule has no forward-mode derivative; use vjp, grad or jacobian."
            )

    def read_plainly(self) -> None:
        raise GradientError(
            f"forward mode: {self.at_work()} reads the gradient that arrives as a plain number, "
            "so its answer may depend on it in any way. Such a rule has no forward-mode "
            "derivative; use vjp, grad or jacobian."
        )

    def at_work(self) -> str:
        """The rule that runs, for a message."""
        rule = self.record.rule
        named = describe(rule.function, rule.name) if rule.function else label(rule)
        return f"{named} for the op type {self.record.op.type!r}"


@helpful("jacobian")
def jacobian(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The Jacobian of `f`: a function of x that gives all derivatives of f(x) by x.

    For Tensors y = f(x) the result has the shape `y.shape + x.shape`, zeros where nothing is
    connected. For containers it is y's structure with x's structure in each place. With JAX data
    (and under `jit`) all rows are computed at once, elsewhere one after another.

    Source: `jax.jacrev`.

    >>> import regrad as rg
    >>> rg.jacobian(lambda x: x.square())(rg.tensor([1.0, 3.0])).print()
    Tensor
        [[2, 0],
         [0, 6]]
    """
    return _jacobian(f, "jacobian")


def _jacobian(f: Callable[[Any], Any], api: str) -> Callable[[Any], Any]:
    callable_or_raise(f, api)

    @helpful(f"{api}(f)")
    def jacobian_of_f(x: Any) -> Any:
        run = Linearized(f, [x], f"{api}(f)(x)")
        return run.rebuild([run.close_inputs([_rows(run, i)])[0] for i in range(len(run.ys))])

    return jacobian_of_f


@inside(masked)
def _rows(run: Linearized, i: int) -> list[Tensor]:
    """The derivatives of all elements of one output by each input."""
    y = run.ys[i]
    zeros = [zeros_like(t) for t in run.ys]
    if y.size and BACKENDS[type(y._data)].name == "jax":
        units = np.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)

        def flat(dys: Sequence[Tensor]) -> Sequence[Tensor]:
            return run.pull([*zeros[:i], *dys, *zeros[i + 1 :]])[0]

        rows = at_once(flat, [dispatch.lift(units)], [True], "jacobian")
        return [reshape(r, (*y.shape, *x.shape)) for r, x in zip(rows, run.inputs[0], strict=True)]
    rows = []
    for j in range(y.size):
        unit = np.zeros(y.size, y.dtype)
        unit[j] = 1
        dy = OPS["AddV2"].function(zeros[i], unit.reshape(y.shape))
        (row,) = run.pull([*zeros[:i], dy, *zeros[i + 1 :]])
        rows.append(row)
    return [_stacked([row[k] for row in rows], y, x) for k, x in enumerate(run.inputs[0])]


def _stacked(rows: Sequence[Tensor], y: Tensor, x: Tensor) -> Tensor:
    shape = (*y.shape, *x.shape)
    if not rows:
        return dispatch.lift(np.zeros(shape, x.dtype))
    return reshape(OPS["Pack"].function(list(rows), axis=0), shape)


@helpful("hessian")
def hessian(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The Hessian of a scalar function: a function of x that gives all second derivatives.

    For a Tensor x the result has the shape `x.shape + x.shape`; a linear function's is zeros.
    Reverse mode over reverse mode, so every rule counts at both orders.

    Source: `jax.hessian`.

    >>> import regrad as rg
    >>> rg.hessian(lambda x: (x * x * x).sum())(rg.tensor([1.0, 2.0])).print()
    Tensor
        [[6, 0 ],
         [0, 12]]
    """
    callable_or_raise(f, "hessian")

    def gradient_of_f(x: Any) -> Any:
        run = Linearized(f, [x], "hessian(f)(x)")
        if len(run.ys) != 1 or run.ys[0].ndim:
            raise ShapeError(
                "the f passed in hessian(f) must return a scalar Tensor, got "
                f"{', '.join(str(y.shape) for y in run.ys)}; use jacobian(jacobian(f)) otherwise"
            )
        with masked():
            return run.close_inputs(run.pull([seed(run.ys[0])]))[0]

    return _jacobian(gradient_of_f, "hessian")
