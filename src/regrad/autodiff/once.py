"""`once_differentiable`: rules whose gradients cannot be differentiated again."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

from regrad.core import containers
from regrad.core.rule import place
from regrad.core.signatures import helpful
from regrad.errors import ArgumentError, GradientError, kind


@helpful("once_differentiable")
def once_differentiable(rule: Callable[..., Any]) -> Once:
    """Return a rule, or a gradient function, whose second derivative raises an error.

    Args:
        rule: A function that leaves the graph: it computes gradients by NumPy, by a solver or
            with `detach`. Its first derivative is correct. A second derivative would ignore all
            computations outside of the library.

    Returns:
        The rule, for `gradient_override_map` (also in `regrad.torch`), `rg.jax.override`, and
        as the gradient function of a `custom_grad`.

    Raises:
        ArgumentError: rule is not a function.
        GradientError: (when its gradients are differentiated) names the rule and its line.

    Source: `torch.autograd.function.once_differentiable`.

    >>> import regrad as rg
    >>> @rg.rules.once_differentiable
    ... def solved(dy, x):
    ...     return dy * rg.stop_gradient(2 * x)
    >>> with rg.gradient_override_map({"Square": solved}):
    ...     print(rg.grad(rg.square)(rg.tensor(3.0)).item())
    6.0
    """
    if not callable(rule) or isinstance(rule, type) or hasattr(rule, "bound_to"):
        raise ArgumentError(f"once_differentiable expected a function, got {kind(rule)}")
    return Once(rule)


class Once:
    """A rule whose gradients cannot be differentiated. See `once_differentiable`."""

    closes_over: tuple[str, ...] = ("rule",)

    def __init__(self, rule: Callable[..., Any]) -> None:
        update_wrapper(self, rule)
        self.rule = rule

    def __call__(self, *args: Any, **options: Any) -> Any:
        ys, close = containers.flatten(self.rule(*args, **options))
        places = [i for i, y in enumerate(ys) if _library(y)]
        reached = inspect.getclosurevars(self.rule)[:2] if inspect.isfunction(self.rule) else ()
        named = [getattr(x, "inputs", vars(x)) if hasattr(x, "__dict__") else x for x in args]
        leaves = containers.flatten((args, named, options, reached))[0]
        if not places:
            return close(ys)
        made, library = [ys[i] for i in places], _library(ys[places[0]])
        given = [*made, *[x for x in leaves if _library(x) == library]]
        same = _custom(library, lambda *given: list(given[: len(made)]), self._refuse)
        return close(containers.replaced(ys, places, same(*given)))

    def _refuse(self, *args: Any) -> Any:
        raise GradientError(
            f"{place(self.rule)} is once_differentiable: its gradients cannot be differentiated "
            "again. Take first derivatives only, or write the rule with the library's functions."
        )


# The modules of array classes (`Array` of JAX, else `Tensor`), with the module of `custom_grad`.
_HOSTS = {"torch": "regrad.torch", "jax": "jax", "regrad.v1": "regrad.v1", "regrad": "regrad"}


def _library(x: Any) -> str:
    """Return the module of an array, one of those in `_HOSTS`; '' for other values."""
    loaded = [name for name in _HOSTS if name in sys.modules]
    kinds = [getattr(sys.modules[name], "Array" if name == "jax" else "Tensor") for name in loaded]
    return next((n for n, kind in zip(loaded, kinds, strict=True) if isinstance(x, kind)), "")


def _custom(library: str, f: Callable[..., Any], refuse: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays whose derivative is `refuse`, which raises."""
    host = sys.modules[_HOSTS[library]]
    if library == "jax":  # (JAX traces the gradient function of a `custom_grad` at once)
        made = host.custom_jvp(f)
        made.defjvp(refuse)
        return made
    custom = host.custom_gradient if library == "regrad.v1" else host.custom_grad
    return custom(lambda *given: (f(*given), refuse))
