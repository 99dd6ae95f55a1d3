"""`custom_grad` for functions of JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend import core

from regrad.autodiff.custom_functions import CustomFunction, SavedValues, unpack
from regrad.autodiff.gradients import callable_or_raise
from regrad.autodiff.guards import name_of
from regrad.core import containers
from regrad.core.backends import is_array
from regrad.core.containers import replaced
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, GradientError, kind
from regrad.jax.bridge import conjugate
from regrad.jax.host import GRADIENTS, need
from regrad.jax.host.extending import dce, zeros_like_aval
from regrad.jax.host.programs import with_constants_as_inputs
from regrad.jax.primitives import Arrays, EquationGradient, fit, is_float, run_op

if TYPE_CHECKING:
    from regrad.core.containers import Arguments


ARRAYS: Any = (jax.Array, np.ndarray, np.generic)


def custom_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of JAX arrays with a custom gradient.

    Args:
        f: `f(*inputs, save)` returns `{"value": y, "grad_func": g}` or a pair `(y, g)`, as for
            `regrad.custom_grad`. `y` is an array or a container of arrays; f may omit the parameter
            `save`.

    Arrays among the positional arguments, also inside containers, are the inputs; all other
    arguments are passed through. `g(dy, saved)`, or `g(dy)`, returns the gradients as a list with
    one entry per argument that holds arrays, in order. An entry has its argument's structure, with
    arrays of the inputs' shapes and dtypes: for `{"w": w, "b": b}` a dict with these keys (a list
    and a tuple are equivalent). None, for an argument or any part of it, means no gradient. If
    there is only one such argument, g may return its entry alone.

    f and g are traced, as in `jax.jit`. Values that g uses keep their own history, so the code of g
    defines the derivatives of every order; the output itself is differentiated by g. Reverse mode
    works at any order, forward mode if g is linear in `dy`. Complex gradients follow regrad's
    convention (TensorFlow's), which is the conjugate of JAX's.

    Raises:
        ArgumentError: f does not return a value and a gradient function; `save` is misused; f
            returns a Tensor of regrad (`from_regrad` makes a JAX function of a regrad function).
        GradientError: f closes over an array that is being differentiated, or gets one by keyword,
            instead of taking it as an input; forward mode reaches a g that is not linear.
        RuleError: g returns gradients of the wrong structure, kind, shape or dtype.

    Source: `tf.customGrad` of TensorFlow.js.

    >>> import jax, jax.numpy as jnp, regrad as rg
    >>> @rg.jax.custom_grad
    ... def square(a, save):
    ...     save([a])
    ...     return {"value": a * a, "grad_func": lambda dy, saved: dy * abs(saved[0])}
    >>> print(jax.grad(lambda a: square(a).sum())(jnp.array([0.0, -1.0, 2.0])))
    [0. 1. 2.]
    """
    callable_or_raise(f, "custom_grad")
    function = CustomFunction(f)

    def op(*args: Any, **options: Any) -> Any:
        return CustomJaxCall(function, args, options).run()

    return update_wrapper(op, f) if hasattr(f, "__name__") else op


class CustomJaxCall(SavedValues):
    """One call: traces of f and of its gradient function, and the values that connect them."""

    array = ARRAYS, "an array", "astype"

    def __init__(
        self, custom: CustomFunction, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        super().__init__(custom)
        self.options = options
        self.leaves: list[Any]
        self.close: containers.Rebuild
        self.leaves, self.close, structure = containers.opened(args)
        self.places: list[int] = [i for i, leaf in enumerate(self.leaves) if is_array(leaf)]
        make = containers.with_holes(self.leaves, self.places, structure)
        self.arguments: Arguments = custom.arguments(len(self.places), make)

    def run(self) -> Any:
        need(GRADIENTS)
        arrays = [jax.numpy.asarray(self._array(self.leaves[i])) for i in self.places]
        self.avals: Sequence[Any] = [jax.typeof(x) for x in arrays]
        closed = jax.make_jaxpr(self.traced)(*arrays)
        self.running = False
        jaxpr, outside = with_constants_as_inputs(closed.jaxpr), list(closed.consts)
        gradient = CustomGradient(self, jaxpr, outside)
        ys = run_op([*outside, *arrays], part(jaxpr, 0, self.count), gradient)
        return self.result(ys)

    def _array(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            raise self._ours("an argument")
        return leaf

    def _ours(self, what: str) -> ArgumentError:
        return ArgumentError(
            f"custom_grad of regrad.jax: in {self.name} {what} is a Tensor of regrad, expected a "
            "JAX array. rg.jax.from_regrad(f) makes a JAX function of a regrad function."
        )

    def traced(self, *xs: Any) -> list[Any]:
        """Return the values of f, then the arrays that its gradient function needs."""
        args = self.close(replaced(self.leaves, self.places, xs))
        value, grad_func = self.unpack(self.custom.run(args, self.options, self.save))
        self.result: containers.Rebuild
        ys, self.result = containers.flatten(value)
        ys = [jax.numpy.asarray(y) for y in ys]
        self.count: int = len(ys)
        self.floats: list[int] = [i for i, y in enumerate(ys) if is_float(jax.typeof(y))]
        self.trace_gradient(grad_func, ys)
        return [*ys, *self.back.consts]

    def trace_gradient(self, grad_func: Callable[..., Any], ys: Sequence[Any]) -> None:
        """Trace the gradient function to a program, whose constants come from f."""

        def back(*dys: Any) -> list[Any]:
            zeros = map(jax.numpy.zeros_like, ys)
            dy = self.result(replaced(zeros, self.floats, map(conjugate, dys)))
            # (Request all gradients here; JAX removes the unused ones from the program.)
            needs = lambda: self.arguments.needs([True] * len(self.places))  # noqa: E731
            answer = self.custom.pull(grad_func, dy, self.saved, needs)
            return [self.check(dx, i) for i, dx in enumerate(self.arguments.leaves(answer))]

        self.back: Any = jax.make_jaxpr(back)(*[jax.numpy.zeros_like(ys[i]) for i in self.floats])
        self.own: dict[int, int] = {
            k: i for k, c in enumerate(self.back.consts) for i, y in enumerate(ys) if c is y
        }

    def unpack(self, answer: Any) -> tuple[Any, Callable[..., Any]]:
        """Return `(value, grad_func)` from the result of f."""
        if any(isinstance(leaf, Tensor) for leaf in jax.tree_util.tree_leaves(answer)):
            raise self._ours("the value")
        try:
            return unpack(answer, self.name, ARRAYS)
        except ArgumentError as error:  # whose message is written for libraries with Tensors
            raise ArgumentError(str(error).replace("a Tensor (", "an array (")) from None

    # -- what the gradient function answers ----------------------------------------------------

    def check(self, dx: jax.Array | None, i: int) -> Any:
        """Return the gradient by an input in JAX's convention, if it is an array that fits."""
        aval = self.avals[i]
        if dx is None or not is_float(aval):
            return zeros_like_aval(aval)
        if isinstance(dx, Tensor):
            raise self._ours("a gradient")
        self.check_answer(i, dx, aval.shape, aval.dtype)
        return fit(conjugate(jax.numpy.asarray(dx)), aval)


def part(jaxpr: core.Jaxpr, start: int, stop: int) -> Any:
    """Return a program for some of the outputs, with all of its inputs."""
    used = [start <= i < stop for i in range(len(jaxpr.outvars))]
    return core.ClosedJaxpr(dce(jaxpr, used, True)[0], ())


class CustomGradient(EquationGradient):
    """The gradient of one call. Its inputs are the values that f closes over, then f's inputs."""

    def __init__(self, call: CustomJaxCall, jaxpr: core.Jaxpr, outside: Sequence[Any]) -> None:
        self.call = call
        self.name: str = f"custom_grad({call.name})"
        self.outside: int = len(outside)
        self.avals: Sequence[Any] = [v.aval for v in jaxpr.invars]
        self.called: list[str] = [_find_origin(call, c) for c in outside]
        self.needed: list[int] = [k for k in range(len(call.back.consts)) if k not in call.own]
        used = [i - call.count in self.needed for i in range(len(jaxpr.outvars))]
        body, reads = dce(jaxpr, used)
        self.residuals: Any = core.ClosedJaxpr(body, ())
        self.reads: list[int] = [i for i, read in enumerate(reads) if read]

    def keeps(self, wanted: Sequence[int]) -> tuple[Sequence[int], bool]:
        return self.reads, bool(self.call.own)

    def allow(self, wanted: Sequence[int]) -> None:
        if min(wanted) < self.outside:
            raise GradientError(
                f"custom_grad: {self.call.describe()} {self.called[min(wanted)]}, which is being "
                "differentiated; its gradient would be lost. Pass it as a separate input, for "
                "which grad_func returns a gradient too, or use jax.lax.stop_gradient on it."
            )

    def pull(self, xs: Arrays, ys: Any, dys: Arrays, wanted: Sequence[int]) -> Arrays:
        back, own = self.call.back, self.call.own
        found = iter(core.jaxpr_as_fun(self.residuals)(*[xs[i] for i in self.reads]))
        given = [ys[own[k]] if k in own else next(found) for k in range(len(back.consts))]
        places = [i - self.outside for i in wanted]
        used = [i in places for i in range(len(back.out_avals))]
        body = dce(with_constants_as_inputs(back.jaxpr), used, True)[0]
        run = core.jaxpr_as_fun(core.ClosedJaxpr(body, ()))
        dxs = dict(zip(sorted(places), run(*given, *dys), strict=True))
        return [fit(dxs[i], self.call.avals[i]) for i in places]


def _find_origin(call: CustomJaxCall, x: Any) -> str:
    """Return how f reaches an array that is not an input: `closes over 'w'`."""
    for key, value in call.options.items():
        if any(leaf is x for leaf in jax.tree_util.tree_leaves(value)):
            return f"got the keyword argument {key!r}"
    return f"closes over {name_of(call.f, x) or kind(x)}"
