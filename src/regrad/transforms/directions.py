"""`linearize`, `jacfwd` and `hvp`: forward mode of a function as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regrad.autodiff.choosing import Argnums, ArgumentSelection, ChosenCall
from regrad.autodiff.gradients import callable_or_raise
from regrad.core import dispatch
from regrad.core.backends import BACKENDS
from regrad.core.blocks import inside
from regrad.core.made import remade
from regrad.core.signatures import helpful
from regrad.core.state import masked
from regrad.core.tensor import Tensor
from regrad.ops.array import permute_dims, reshape
from regrad.ops.joining import stack
from regrad.transforms.derivatives import (
    Linearized,
    check_lists,
    derived,
    gradient_of,
    jvp,
    like,
    push,
)  # fmt: skip
from regrad.transforms.forward import ForwardTape
from regrad.transforms.vmap import at_once


@helpful("linearize")
def linearize(f: Callable[..., Any], *xs: Any) -> tuple[Any, Callable[..., Any]]:
    """Return `f(*xs)`, and a function that maps directions of xs to directions of the result.

    Args:
        f: A function that returns a Tensor or a container of Tensors.
        xs: The arguments of f: Tensors or containers of Tensors.

    Returns:
        `(y, f_jvp)`. `f_jvp(*dxs)` returns the derivative of y in the direction dxs, with the
        structure, shapes and dtypes of y. It can be called any number of times; f runs once.

    Raises:
        GradientError: If a rule has no forward mode, when f_jvp is called; see `jvp`.

    Source: `jax.linearize`.

    >>> import regrad as rg
    >>> y, f_jvp = rg.linearize(lambda x: x.square(), rg.scalar(3.0))
    >>> [f_jvp(dx).item() for dx in (1.0, 2.0)]
    [6.0, 12.0]
    """
    run = Linearized(f, xs, "linearize(f, *xs)", ForwardTape)
    inputs = run.close_inputs(run.inputs)

    @inside(masked)
    def f_jvp(*dxs: Any) -> Any:
        return run.rebuild(push(run, like(dxs, inputs, "the dxs of a linearized function")))

    return run.handed_out(), f_jvp


@remade
@helpful("jacfwd")
def jacfwd(
    f: Callable[..., Any], *, argnums: Argnums | None = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of `f` column by column, in forward mode.

    Args:
        f: A function that returns a Tensor or a container of Tensors.
        argnums: As in `jacobian`.
        has_aux: As in `jacobian`.

    Returns:
        A function with the results of `jacobian(f)`: shape `y.shape + x.shape`, dtype of y. It is
        faster than `jacobian` if f has fewer inputs than outputs.

    Raises:
        GradientError: If a rule has no forward mode, when the function is called; see `jvp`.

    Source: `jax.jacfwd`.

    >>> import regrad as rg
    >>> rg.jacfwd(lambda x: x.square())(rg.tensor([1.0, 3.0])).print()
    Tensor
        [[2, 0],
         [0, 6]]
    """

    def compute(call: ChosenCall) -> Any:
        run = Linearized(call, call.inputs, "jacfwd(f)(x)", ForwardTape)
        columns = [_columns(run, i) for i in range(sum(map(len, run.inputs)))]
        per_output = []
        for j in range(len(run.ys)):
            found = iter(columns)
            groups = [[next(found)[j] for _ in group] for group in run.inputs]
            per_output.append(call.parts(run.close_inputs(groups)))
        return run.rebuild(per_output)

    return derived(f, "jacfwd", argnums, has_aux, compute)


@inside(masked)
def _columns(run: Linearized, i: int) -> list[Tensor]:
    """Return the derivatives of each output by all elements of one input."""
    xs = [x for group in run.inputs for x in group]
    x = xs[i]
    zeros = [dispatch.lift(np.zeros(t.shape, t.dtype)) for t in xs]

    def push_one(dxs: Sequence[Tensor]) -> list[Tensor]:
        return push(run, [*zeros[:i], *dxs, *zeros[i + 1 :]])

    if not x.size:
        return [dispatch.lift(np.zeros((*y.shape, *x.shape), y.dtype)) for y in run.ys]
    units = np.eye(x.size, dtype=x.dtype).reshape(x.size, *x.shape)
    if BACKENDS[type(x._data)].name == "jax":
        moved = at_once(push_one, [dispatch.lift(units)], [True], "jacfwd")
    else:
        pushed = [push_one([dispatch.lift_as(unit, x.dtype)]) for unit in units]
        moved = [stack(list(dys)) for dys in zip(*pushed, strict=True)]
    return [
        reshape(permute_dims(dys, (*range(1, y.ndim + 1), 0)), (*y.shape, *x.shape))
        for dys, y in zip(moved, run.ys, strict=True)
    ]


@helpful("hvp")
def hvp(f: Callable[..., Any], xs: Sequence[Any], dxs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the product of the Hessian of a scalar function with a vector.

    Args:
        f: A function that returns a scalar Tensor.
        xs: The list of the arguments of f, as in `jvp`.
        dxs: The vector: one direction per argument.

    Returns:
        The derivative of the gradients by xs in the direction dxs: a tuple with one entry per
        argument, with its structure, shapes and dtypes. Computed by forward mode over reverse mode.

    Raises:
        GradientError: A rule is not linear in the incoming gradient. Reverse mode would return the
            product with the transpose, which differs if rules are not true derivatives. For that
            product, use `vjp` of the gradient.
        ShapeError: f does not return a scalar.

    Source: Pearlmutter, "Fast exact multiplication by the Hessian" (1994); JAX's autodiff
    cookbook.

    >>> import regrad as rg
    >>> (product,) = rg.hvp(lambda x: (x * x * x).sum(), [rg.tensor([1.0, 2.0])], [[1.0, 1.0]])
    >>> product.tolist()
    [6.0, 12.0]
    """
    callable_or_raise(f, "hvp")
    check_lists(xs, dxs, "hvp")
    call = ArgumentSelection(f, "hvp", range(len(xs)) if xs else None).call(xs or (None,), {})
    return jvp(lambda *inputs: gradient_of(call, inputs, "hvp(f, xs, dxs)"), xs, dxs)[1]
