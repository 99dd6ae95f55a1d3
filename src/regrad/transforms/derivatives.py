"""`vjp`, `jvp`, `jacobian`, `hessian`: the linear maps behind a gradient.

They return zeros where nothing is connected: a linear function has a Hessian of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.autodiff.choosing import Argnums, ArgumentSelection, ChosenCall
from regrad.autodiff.gradients import callable_or_raise, watchable
from regrad.core import containers, dims, dispatch
from regrad.core.backends import BACKENDS, is_inexact
from regrad.core.blocks import inside
from regrad.core.made import remade
from regrad.core.pullback import or_zeros, run_taped
from regrad.core.registry import OPS
from regrad.core.signatures import check_passed, helpful
from regrad.core.state import masked
from regrad.core.tape import Tape
from regrad.core.tensor import Tensor
from regrad.core.walk import seed, walk_from
from regrad.errors import ArgumentError, ShapeError, kind
from regrad.ops.array import reshape
from regrad.ops.creation_like import zeros_like
from regrad.transforms.forward import ForwardTape, Tangents, push_through
from regrad.transforms.vmap import at_once

if TYPE_CHECKING:
    from regrad.core.tensor import TensorLike


class Linearized:
    """A function that ran once under a tape: its outputs, and its reusable backward pass."""

    def __init__(
        self, f: Callable[..., Any], xs: Sequence[Any], api: str, tape: type[Tape] = Tape
    ) -> None:
        callable_or_raise(f, api)
        if not xs:
            raise ArgumentError(
                f"{api}: there are no inputs to differentiate by; pass the inputs of f"
            )
        opened = [containers.flatten(x) for x in xs]
        self.rebuilds: list[containers.Rebuild] = [rebuild for _, rebuild in opened]
        self.inputs: list[list[Tensor]] = [
            [watchable(leaf, api) for leaf in leaves] for leaves, _ in opened
        ]
        self.tape: Tape = tape([a._id for group in self.inputs for a in group])
        aliases = [r(group) for r, group in zip(self.rebuilds, self.inputs, strict=True)]
        try:
            y = run_taped(self.tape, f, aliases)
        except TypeError:
            check_passed(f, aliases, api)
            raise
        finally:
            self.watched: set[int] = self.tape.close()
        self.ys: list[Tensor]
        self.rebuild: containers.Rebuild
        self.ys, self.rebuild = _outputs(y, api)

    @property
    def value(self) -> Any:
        """Return the result of f."""
        return self.rebuild(self.ys)

    def handed_out(self) -> Any:
        """Return the result of f in new Tensors, which may become outputs of a custom function."""
        return self.rebuild([dispatch.alias(y) for y in self.ys])

    def pull(self, dys: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the gradients by all inputs of `sum(y * dy)` over all outputs."""
        floats = [i for i, y in enumerate(self.ys) if is_inexact(y.dtype)]
        ids, dys = [self.ys[i]._id for i in floats], [dys[i] for i in floats]
        found = walk_from(reversed(self.tape.records), ids, dys, self.watched)
        return [[or_zeros(found.get(x._id), x) for x in group] for group in self.inputs]

    def close_inputs(self, groups: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        """Return one entry per input, in the input's own structure."""
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


def like(values: Any, structure: Any, what: str) -> list[Tensor]:
    """Return the leaves of `values` as Tensors, with the shapes and dtypes in `structure`."""
    tensors = containers.flatten(structure)[0]
    try:
        leaves = containers.matched(values, structure)
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"{what}: the structure differs from the expected one. {error}"
        ) from None
    given = []
    for leaf, t in zip(leaves, tensors, strict=True):
        v = dispatch.lift_as(leaf, t.dtype)
        if dims.differ(v.shape, t.shape):
            raise ShapeError(f"{what}: expected the shape {t.shape}, got {v.shape}")
        given.append(v)
    return given


@helpful("vjp")
def vjp(f: Callable[..., Any], *xs: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """Return `f(*xs)`, and a function that maps a gradient of the result to gradients of xs.

    Args:
        f: A function of Tensors and containers of them that returns Tensors or containers of them.
        *xs: The arguments of f.
        has_aux: Whether f returns `(y, aux)`; `vjp` then returns a triple with aux.

    Raises:
        ArgumentError: f is not callable, or there is no input to differentiate by.
        ShapeError, ArgumentError: (raised by the returned function) dy does not match y.

    Returns `(y, vjp_function)`. `vjp_function(dy)` returns a tuple with one gradient per input,
    each in its input's structure, with zeros where nothing is connected. `vjp_function` can be
    called any number of times, and can be differentiated. `dy` has the structure and shapes of y.
    With `has_aux=True`, f returns `(y, aux)`, and vjp returns `(y, vjp_function, aux)`.

    Source: `jax.vjp`.

    >>> import regrad as rg
    >>> y, back = rg.vjp(lambda a, b: a * b, rg.scalar(2.0), rg.scalar(5.0))
    >>> [dx.item() for dx in back(1.0)]
    [5.0, 2.0]
    """
    callable_or_raise(f, "vjp")
    call = ArgumentSelection(f, "vjp", range(len(xs)) if xs else None, has_aux).call(
        xs or (None,), {}
    )
    run = Linearized(call if has_aux else f, xs, "vjp(f, *xs)")

    def vjp_function(dy: TensorLike) -> tuple[Any, ...]:
        with masked():
            return run.close_inputs(run.pull(like(dy, run.value, "the dy of a vjp function")))

    y = run.handed_out()
    return (y, vjp_function, call.aux) if has_aux else (y, vjp_function)


@helpful("jvp")
def jvp(f: Callable[..., Any], xs: Sequence[Any], dxs: Sequence[Any]) -> tuple[Any, Any]:
    """Return `f(*xs)` and its derivative in the direction dxs (forward mode).

    Args:
        f: A function of Tensors and containers of them that returns Tensors or containers of them.
        xs: The list of the arguments of f.
        dxs: The list of directions, with the structure, shapes and dtypes of xs.

    Raises:
        GradientError: A rule is not linear in the incoming gradient.
        ArgumentError: xs or dxs is not a list.
        ShapeError: A direction does not have the shape of its argument.

    Returns `(y, dy)`, both in the structure of f's result. regrad computes the derivative by
    transposing the backward pass, so custom gradients and active overrides apply here too. The
    transposition is correct if each rule is linear in the incoming gradient. For a nonlinear rule
    (a guided ReLU's `dy > 0`, a clipped gradient), jvp raises GradientError, which names the rule
    and the op. (A linear rule maps 0 to 0, and regrad checks that property on actual values. Under
    jit, a rule that ignores the gradient raises GradientError, and a rule that adds a constant to
    the gradient makes the result NaN.)

    Source: `jax.jvp`; the transposition is Townsend's "new trick" (2017).

    >>> import regrad as rg
    >>> y, dy = rg.jvp(lambda x: x.square(), [rg.scalar(3.0)], [rg.scalar(1.0)])
    >>> dy.item()
    6.0
    """
    check_lists(xs, dxs, "jvp")
    return _pushed(Linearized(f, xs, "jvp(f, xs, dxs)", ForwardTape), dxs)


@inside(masked)
def _pushed(run: Linearized, dxs: Sequence[Any]) -> tuple[Any, Any]:
    inputs = run.close_inputs(run.inputs)
    dys = push(run, like(tuple(dxs), inputs, "jvp(f, xs, dxs): dxs"))
    return run.handed_out(), run.rebuild(dys)


def push(run: Linearized, directions: Sequence[Tensor]) -> list[Tensor]:
    """Return the tangents of the outputs for tangents of all inputs."""
    xs = [x for group in run.inputs for x in group]
    tangents: Tangents = {x._id: dx for x, dx in zip(xs, directions, strict=True)}
    found = push_through(run.tape.records, run.watched, tangents, run.ys)
    return list(map(or_zeros, found, run.ys))


def derived(
    f: Callable[..., Any], api: str, argnums: Argnums | None, has_aux: bool,
    compute: Callable[[ChosenCall], Any],
) -> Callable[..., Any]:  # fmt: skip
    """Return a function of the arguments of f whose result is computed from a call of f."""
    callable_or_raise(f, api)
    choice = ArgumentSelection(f, api, argnums, has_aux)

    @helpful(f"{api}(f)")
    def derivative_of_f(*args: Any, **options: Any) -> Any:
        call = choice.call(args, options)
        return call.with_aux(compute(call))

    return derivative_of_f


def check_lists(xs: Any, dxs: Any, api: str) -> None:
    """Raise unless the arguments and their directions are lists."""
    if not isinstance(xs, list | tuple) or not isinstance(dxs, list | tuple):
        got = f"got {kind(xs)} and {kind(dxs)}. Write {api}(f, [x], [dx])."
        raise ArgumentError(
            f"{api}(f, xs, dxs): xs and dxs must be lists with one entry per argument, {got}"
        )


@remade
@helpful("jacobian")
def jacobian(
    f: Callable[..., Any], *, argnums: Argnums | None = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Return the Jacobian function of `f`: it returns all derivatives of f(x) by x.

    Args:
        f: A function that returns a Tensor or a container of Tensors.
        argnums: The position of the argument to differentiate by (default: the first), or a
            sequence of positions, which makes each derivative a tuple.
        has_aux: Whether f returns `(y, aux)`; the function then returns `(jacobian, aux)`.

    For Tensors y = f(x), the result has the shape `y.shape + x.shape`, with zeros where nothing is
    connected. For containers, the result has y's structure with x's structure at each leaf. Other
    arguments and keywords of f are constants. With JAX data (and under `jit`), all rows are
    computed at once, otherwise one after another.

    Raises:
        ArgumentError: f is not callable, or does not return Tensors.

    Source: `jax.jacrev`.

    >>> import regrad as rg
    >>> rg.jacobian(lambda x: x.square())(rg.tensor([1.0, 3.0])).print()
    Tensor
        [[2, 0],
         [0, 6]]
    """
    return derived(f, "jacobian", argnums, has_aux, lambda c: _jacobian(c, c, "jacobian"))


def _jacobian(call: ChosenCall, f: Callable[..., Any], api: str) -> Any:
    """Return the derivatives of f, a function of the chosen arguments, by these arguments."""
    run = Linearized(f, call.inputs, f"{api}(f)(x)")
    per_output = [_rows(run, i) for i in range(len(run.ys))]
    return run.rebuild([call.parts(run.close_inputs(rows)) for rows in per_output])


@inside(masked)
def _rows(run: Linearized, i: int) -> list[list[Tensor]]:
    """Return the derivatives of all elements of one output by each input, grouped by input."""
    y = run.ys[i]
    inputs = [x for group in run.inputs for x in group]

    def grouped(rows: Sequence[Tensor]) -> list[list[Tensor]]:
        found = iter(rows)
        return [[next(found) for _ in group] for group in run.inputs]

    def pull(dys: Sequence[Tensor]) -> list[Tensor]:
        return [dx for group in run.pull([*zeros[:i], *dys, *zeros[i + 1 :]]) for dx in group]

    zeros = [zeros_like(t) for t in run.ys]
    if y.size and BACKENDS[type(y._data)].name == "jax":
        units = np.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)

        rows = at_once(pull, [dispatch.lift(units)], [True], "jacobian")
        shaped = [reshape(r, (*y.shape, *x.shape)) for r, x in zip(rows, inputs, strict=True)]
        return grouped(shaped)
    rows = []
    for j in range(y.size):
        unit = np.zeros(y.size, y.dtype)
        unit[j] = 1
        rows.append(pull([OPS["AddV2"].function(zeros[i], unit.reshape(y.shape))]))
    return grouped([_stacked([row[k] for row in rows], y, x) for k, x in enumerate(inputs)])


def _stacked(rows: Sequence[Tensor], y: Tensor, x: Tensor) -> Tensor:
    shape = (*y.shape, *x.shape)
    if not rows:
        return dispatch.lift(np.zeros(shape, x.dtype))
    return reshape(OPS["Pack"].function(list(rows), axis=0), shape)


jacrev = jacobian  # JAX's name for it


@remade
@helpful("hessian")
def hessian(
    f: Callable[..., Any], *, argnums: Argnums | None = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Return the Hessian function of a scalar function: it returns all second derivatives.

    Args:
        f: A function that returns a scalar Tensor.
        argnums: As in `jacobian`; a sequence makes the result a tuple of tuples.
        has_aux: Whether f returns `(y, aux)`; the function then returns `(hessian, aux)`.

    For a Tensor x, the result has the shape `x.shape + x.shape`; for a linear function it is zeros.
    It is reverse mode over reverse mode, so every rule applies at both orders.

    Raises:
        ArgumentError: f is not callable, or does not return a Tensor.
        ShapeError: f does not return a scalar.

    Source: `jax.hessian`.

    >>> import regrad as rg
    >>> rg.hessian(lambda x: (x * x * x).sum())(rg.tensor([1.0, 2.0])).print()
    Tensor
        [[6, 0 ],
         [0, 12]]
    """

    def compute(call: ChosenCall) -> Any:
        return _jacobian(call, lambda *xs: gradient_of(call, xs, "hessian(f)(x)"), "hessian")

    return derived(f, "hessian", argnums, has_aux, compute)


def gradient_of(call: ChosenCall, inputs: Sequence[Any], api: str) -> Any:
    """Return the gradients of a call's scalar by its inputs, in the form of the inputs."""
    run = Linearized(call, inputs, api)
    if len(run.ys) != 1 or run.ys[0].ndim:
        raise ShapeError(
            f"the f passed in {api.split(')')[0]}) must return a scalar Tensor, got "
            f"{', '.join(str(y.shape) for y in run.ys)}; use jacobian(jacobian(f)) otherwise"
        )
    with masked():
        return call.parts(run.close_inputs(run.pull([seed(run.ys[0])])))
