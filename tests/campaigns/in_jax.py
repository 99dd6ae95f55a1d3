"""What nested programs use of regrad, written in JAX: their twins run by this.

A twin is the text of the program, in which `rg` is this module. Rules and custom gradients are
`jax.custom_vjp`, loops and branches those of `jax.lax`, and derivatives JAX's own. Nothing of
regrad is in it. An override is in force for the ops that run while its block is open; a gradient
function runs without, and what it differentiates runs under those of the call.
"""

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Function = Callable[..., Any]


class Scopes(NamedTuple):
    """The rules in force by op type, and those held back for what is differentiated."""

    own: Mapping[str, Function] = {}
    held: Mapping[str, Function] = {}

    @property
    def all(self) -> "Scopes":
        return Scopes({**self.held, **self.own})


SCOPES: ContextVar[Scopes] = ContextVar("scopes", default=Scopes())  # noqa: B039


@contextmanager
def under(scopes: Scopes) -> Generator[None]:
    token = SCOPES.set(scopes)
    try:
        yield
    finally:
        SCOPES.reset(token)


def gradient_override_map(rules: Mapping[str, Function]) -> Any:
    scopes = SCOPES.get()
    return under(scopes._replace(own={**scopes.own, **rules}))


def differentiated(f: Function) -> Function:
    """f as a function that is differentiated here: what was held back is in force."""

    def run(*args: Any) -> Any:
        with under(SCOPES.get().all):
            return f(*args)

    return run


def define(space: dict[str, Any]) -> None:
    """Replace the place of the prelude by a scope around what runs there."""

    def placed(name: str, op_type: str, f: Function, g: Function) -> Any:
        return space["under"](op_type, lambda: 0.9 * f()) + g()

    space["placed"] = placed


class Variable:
    def __init__(self, value: Any, name: str = "") -> None:
        self.value = value

    def assign(self, value: Any) -> None:
        self.value = value


def identity(variable: Variable) -> Any:
    return jnp.asarray(variable.value)


# -- ops -------------------------------------------------------------------------------------------


def op(op_type: str, f: Function) -> Function:
    def run(x: Any) -> Any:
        rule = SCOPES.get().own.get(op_type)
        if rule is None:
            return f(x)

        def back(x: Any, dy: Any) -> Any:
            with under(Scopes()):
                return (rule(dy, x),)

        g = jax.custom_vjp(f)
        g.defvjp(lambda x: (g(x), x), back)
        return g(x)

    return run


sin, cos, tanh = op("Sin", jnp.sin), op("Cos", jnp.cos), op("Tanh", jnp.tanh)
exp, atan, square = op("Exp", jnp.exp), op("Atan", jnp.arctan), op("Square", jnp.square)
sqrt, abs = op("Sqrt", jnp.sqrt), op("Abs", jnp.abs)
maximum, where, sum, stack, reshape = jnp.maximum, jnp.where, jnp.sum, jnp.stack, jnp.reshape
asarray, stop_gradient = jnp.asarray, lax.stop_gradient


# -- functions with a gradient of their own --------------------------------------------------------


def custom_grad(f: Function) -> Function:
    saves = "save" in inspect.signature(f).parameters

    def call(*args: Any) -> Any:
        scopes = SCOPES.get()

        def whole(*args: Any) -> tuple[Any, Function, Any]:
            kept: list[Any] = []

            def save(*tensors: Any, **named: Any) -> None:
                kept.append(SimpleNamespace(**named) if named else tuple(tensors[0]))

            value, back = f(*args, save=save) if saves else f(*args)
            return value, back, kept

        def pull(args: Any, dy: Any) -> Any:
            with under(scopes):  # what was saved has a derivative of its own
                _, back, kept = whole(*args)
            with under(Scopes({}, scopes.all.own)):
                answer = back(dy, *kept)
            return tuple(answer) if isinstance(answer, list | tuple) else (answer,)

        g = jax.custom_vjp(lambda *args: whole(*args)[0])
        g.defvjp(lambda *args: (g(*args), args), pull)  # (the value has the rule at each order)
        return g(*args)

    return call


# -- loops, branches, batches ----------------------------------------------------------------------


def scan(
    f: Function, init: Any, xs: Any = None, *, length: int | None = None, reverse: bool = False,
    checkpoint: bool = False,
) -> Any:  # fmt: skip
    step = jax.checkpoint(f) if checkpoint else f
    return lax.scan(lambda c, x: step(c, x), init, xs, length=length, reverse=reverse)


def while_loop(holds: Function, body: Function, state: Any, *, max_steps: int) -> Any:
    def step(s: Any, _: Any) -> Any:
        new = jax.tree_util.tree_map(lambda a, b: jnp.where(holds(s), a, b), body(s), s)
        return new, None

    return lax.scan(step, state, None, length=max_steps)[0]


def fori_loop(first: int, last: int, body: Function, state: Any) -> Any:
    return lax.fori_loop(first, last, lambda i, s: body(i, s), state)


def cond(holds: Any, yes: Function, no: Function, *args: Any) -> Any:
    return lax.cond(holds, lambda *a: yes(*a), lambda *a: no(*a), *args)


def map(f: Function, xs: Any) -> Any:
    return lax.map(lambda x: f(x), xs)


def vmap(f: Function, in_axes: Any = 0) -> Function:
    return jax.vmap(lambda *args: f(*args), in_axes=in_axes)


def checkpoint(f: Function) -> Function:
    return jax.checkpoint(lambda *args: f(*args))


def jit(f: Function) -> Function:
    return jax.jit(lambda *args: f(*args))


# -- derivatives -----------------------------------------------------------------------------------


def grad(f: Function) -> Function:
    return jax.grad(differentiated(f))


def vjp(f: Function, *xs: Any) -> Any:
    return jax.vjp(differentiated(f), *xs)


def jvp(f: Function, xs: Sequence[Any], dxs: Sequence[Any]) -> Any:
    """Forward mode by two passes backward, since `custom_vjp` has no other."""
    y, pull = jax.vjp(differentiated(f), *xs)
    zeros = jax.tree_util.tree_map(jnp.zeros_like, y)
    _, push = jax.vjp(pull, zeros)
    return y, push(tuple(dxs))[0]


def values_and_gradients(f: Function, xs: Sequence[np.ndarray], order: int) -> list[np.ndarray]:
    """What the campaign compares of f, or of a weighed sum of its gradients.

    JAX compiles nothing here: it would take longer than all other modes together.
    """

    def weighed(*xs: Any) -> Any:
        total = 0.0
        for i, dx in enumerate(jax.grad(f, tuple(range(len(xs))))(*xs)):
            total = total + jnp.sum(dx * np.cos(np.arange(dx.size) + i).reshape(dx.shape))
        return total

    g = weighed if order == 2 else f
    with jax.disable_jit():
        y, dxs = jax.value_and_grad(g, tuple(range(len(xs))))(*[jnp.asarray(x) for x in xs])
    return [np.asarray(a) for a in (y, *dxs)]
