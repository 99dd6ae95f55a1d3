"""JAX's data about functions: how a function is compiled, and its custom derivative."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import jax

from regrad.jax.host import FUNCTION_KEYS, GRADIENTS, reads


class JitInfo(NamedTuple):
    """The jit options of a function: with static arguments, and with a call or not."""

    has_static: bool
    inlined: bool


JITTED = jax.jit(lambda x: x)
WITH_RULE: Any = jax.custom_jvp(lambda x: x)
WITH_RULE.defjvps(lambda dx, y, x: dx)


def is_jitted(function: Any) -> bool:
    """Return whether `jax.jit` made a function."""
    return isinstance(function, type(JITTED))


@reads(
    FUNCTION_KEYS, "jax.jit(f)._jit_info", "no public API shows how f is compiled", lambda: JITTED
)  # fmt: skip
def jit_info(function: Any) -> JitInfo | None:
    """Return how `jax.jit` compiles a function; None for any other function."""
    if not is_jitted(function):
        return None
    info = function._jit_info
    # (An enum from JAX 0.12 on, in which all values but these leave a call in the program.)
    inlined = getattr(info.inline, "value", info.inline) in (True, "jax_early", "jax_late")
    return JitInfo(bool(info.static_argnums or info.static_argnames), inlined)


@reads(
    FUNCTION_KEYS, "jax.custom_jvp(f).fun", "no public API returns the rule of a function",
    lambda: WITH_RULE,
)  # fmt: skip
def rules(function: Any) -> list[Any]:
    """Return the functions that run and differentiate a function with a custom derivative.

    For any other function there are none.
    """
    if isinstance(function, jax.custom_jvp):
        return [function.fun, function.jvp]
    if isinstance(function, jax.custom_vjp):
        return [function.fun, function.fwd, function.bwd]
    return []


@reads(
    FUNCTION_KEYS, "jax.custom_jvp.__call__",
    "in a derivative, a call only leaves the fact that this was running", lambda: jax.custom_jvp,
)  # fmt: skip
def entrance(kind: Any) -> Any:
    """Return the code by which JAX calls functions with a custom derivative of a kind."""
    return inspect.unwrap(kind.__call__).__code__


def derivatives(eqn: Any) -> Iterator[Any]:
    """Yield the rules of a function with a custom derivative, as written, if JAX exposes them."""
    given = eqn.params
    yield getattr(given.get("bwd"), "f", None)
    for param, name in (("fwd_jaxpr_thunk", "fwd"), ("jvp_jaxpr_fun", "jvp")):
        with suppress(AttributeError, KeyError, TypeError):
            memoized = inspect.getclosurevars(given[param].f).nonlocals["fn"]
            yield inspect.getclosurevars(memoized).nonlocals[name].f


def closed_over(eqn: Any, otherwise: int) -> int:
    """Return the number of closed-over operands of a call, if JAX exposes it."""
    return eqn.params.get("num_consts", otherwise)


def rule_note(eqn: Any) -> str:
    """Return the name and place of a custom derivative's rule, as JAX records them."""
    function = eqn.params.get("bwd") or eqn.params.get("jvp_jaxpr_fun")
    return getattr(getattr(function, "debug_info", None), "func_src_info", None) or ""


@reads(  # (without an example: each context becomes a permanent part of all of JAX's keys)
    GRADIENTS, "jax.make_user_context()._obj.set_local", "the block of a context is Python code, "
                                                         "in which a signal handler may raise",
)  # fmt: skip
def setter_of(context: Any) -> Callable[[Any], None]:
    """Return the C function that sets the value of a user context in this thread."""
    return context._obj.set_local
