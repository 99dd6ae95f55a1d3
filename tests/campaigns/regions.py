"""Regions and runners: each turns a function of Tensors to a scalar into one of the same value."""

import asyncio
import contextvars
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import regrad as rg
from regrad.core.state import masked
from tests.campaigns import op_calls
from tests.helpers import sample_runs as runs

# -- regions ---------------------------------------------------------------------------------------
#
# Each turns a function of Tensors to a scalar into one of the same value and gradients. What it
# does for itself is masked, so that only the op is under the rule.


def masking(f: op_calls.Function) -> op_calls.Function:
    def run(*args: Any) -> Any:
        with masked():
            return f(*args)

    return run


@masking
def pairs(xs: Sequence[Any]) -> list[Any]:
    """Two examples: what is differentiated, and the same numbers as constants."""
    return [rg.stack([x, rg.stop_gradient(x)]) for x in xs]


first = masking(lambda y: y[0])
plus = masking(lambda a, b: a + b)
nothing = masking(lambda *xs: rg.asarray(np.float64(0.0)))
ZERO = np.float64(0.0)


@masking
def flag(x: Any, value: bool) -> Any:
    """True or False, but traced if x is."""
    seen = rg.sum(rg.isnan(rg.stop_gradient(x)))
    return rg.equal(seen, seen) if value else rg.not_equal(seen, seen)


def whiled(f: op_calls.Function) -> op_calls.Function:
    less = masking(lambda pair: pair[0] < 1.0)

    def run(*xs: Any) -> Any:
        turn = lambda pair: (plus(pair[0], 1.0), plus(pair[1], f(*xs)))  # noqa: E731
        return rg.while_loop(less, turn, (ZERO, ZERO), max_steps=2)[1]

    return run


def scan_over(f: op_calls.Function, **options: Any) -> op_calls.Function:
    step = lambda c, row: (c, f(*row))  # noqa: E731
    return lambda *xs: first(rg.scan(step, None, pairs(xs), **options)[1])


def scan_closure(f: op_calls.Function) -> op_calls.Function:
    step = lambda xs: lambda c, _: (plus(c, f(*xs)), None)  # noqa: E731
    return lambda *xs: rg.scan(step(xs), ZERO, length=1)[0]


def rerun(f: op_calls.Function) -> op_calls.Function:
    """A custom function whose gradient differentiates f again (it recomputes, say)."""

    def custom(*xs: Any, save: Any) -> Any:
        save(list(xs))
        return f(*xs), lambda dy, saved: rg.grads(f)(list(saved), dy)

    return rg.custom_grad(custom)


def wrapped(f: op_calls.Function) -> op_calls.Function:
    """A custom function that takes the vjp of f within."""

    def custom(*xs: Any, save: Any) -> Any:
        y, back = rg.vjp(f, *xs)
        return y, lambda dy: runs.outputs(back(dy))

    return rg.custom_grad(custom)


def nested(f: op_calls.Function, op_type: str) -> op_calls.Function:
    """In a scope with another rule, within which one with the sentinel stands."""

    def run(*xs: Any) -> Any:
        with rg.gradient_override_map({op_type: lambda op, *dys: [None] * len(op.inputs)}):
            with op_calls.in_force(op_type):
                y = f(*xs)
            masking(f)(*xs)
            return y

    return run


REGIONS: dict[str, op_calls.Function] = {
    "alone": lambda f: f, "checkpoint": rg.checkpoint,
    "vmap": lambda f: lambda *xs: first(rg.vmap(f)(*pairs(xs))), "scan": scan_over,
    "scan, closure": scan_closure,
    "scan, reverse, checkpoint": functools.partial(scan_over, reverse=True, checkpoint=True),
    "cond": lambda f: lambda *xs: rg.cond(flag(xs[0], True), f, nothing, *xs),
    "cond, closure": lambda f: (lambda *xs: rg.cond(flag(xs[0], False), nothing, lambda *_: f(*xs),
        *xs)),
    "while_loop": whiled,
    "fori_loop": lambda f: lambda *xs: rg.fori_loop(0, 1, lambda i, t: plus(t, f(*xs)), ZERO),
    "map": lambda f: lambda *xs: first(rg.map(lambda row: f(*row), pairs(xs))),
    "checkpoint of scan of cond": lambda f: rg.checkpoint(
        scan_closure(lambda *xs: rg.cond(flag(xs[0], True), f, nothing, *xs))),
    "custom_grad, differentiated again": rerun, "custom_grad, vjp within": wrapped,
}  # fmt: skip
SHORT = ("alone", "checkpoint", "scan", "cond")


# -- regions that return a tensor that they close over --------------------------------------------
#
# The op is outside; its result passes through a region that returns it as it is.


RETURNS: dict[str, op_calls.Function] = {
    "checkpoint": lambda y: rg.checkpoint(lambda: y)(),
    "jit": lambda y: rg.jit(lambda: y)(),
    "cond": lambda y: rg.cond(flag(y, True), lambda: y, lambda: y),
    "scan": lambda y: first(rg.scan(lambda c, _: (c, y), None, length=2)[1]),
    "scan, carry": lambda y: rg.scan(lambda c, _: (y, None), zero_like(y), length=2)[0],
    "while_loop": lambda y: rg.while_loop(masking(lambda pair: pair[0] < 1.0),
        lambda pair: (plus(pair[0], 1.0), y), (ZERO, zero_like(y)), max_steps=2)[1],
    "fori_loop": lambda y: rg.fori_loop(0, 2, lambda i, c: y, zero_like(y)),
    "map": lambda y: first(rg.map(lambda _: y, np.zeros(2))),
    "vmap": lambda y: first(rg.vmap(lambda _: y)(np.zeros(2))),
    "cond in checkpoint": lambda y: rg.checkpoint(lambda: rg.cond(flag(y, True), lambda: y,
        lambda: y))(),
}  # fmt: skip
zero_like = masking(lambda y: rg.stop_gradient(rg.zeros_like(y)))


def returned(call: op_calls.Call, name: str) -> op_calls.Function:
    """f whose results go through a region that closes over them."""

    def run(*xs: Any) -> Any:
        ys = [RETURNS[name](y) for y in call.apply(*xs)]
        return masking(op_calls.weighed)(ys)

    return run


# -- who else may run f ----------------------------------------------------------------------------


def threaded(f: op_calls.Function) -> op_calls.Function:
    def run(*xs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(f, *xs).result()

    return run


def threaded_copy(f: op_calls.Function) -> op_calls.Function:
    def run(*xs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(contextvars.copy_context().run, f, *xs).result()

    return run


def tasked(f: op_calls.Function) -> op_calls.Function:
    async def task(xs: Any) -> Any:
        await asyncio.sleep(0)
        return f(*xs)

    async def both(xs: Any) -> Any:
        return (await asyncio.gather(task(xs)))[0]

    return lambda *xs: asyncio.run(both(xs))


def generated(f: op_calls.Function) -> op_calls.Function:
    def generator(xs: Any) -> Iterator[Any]:
        yield f(*xs)

    return lambda *xs: next(generator(xs))


RUNNERS: dict[str, op_calls.Function] = {
    "thread": threaded, "thread, copied context": threaded_copy, "asyncio task": tasked,
    "generator": generated,
}  # fmt: skip


def beside(f: op_calls.Function) -> op_calls.Function:
    """f and another path, over which a gradient comes even if that of f is lost."""

    def run(*xs: Any) -> Any:
        y = f(*xs)
        with masked():
            return y + op_calls.weighed(xs)

    return run


def plus_paths(call: op_calls.Call, found: op_calls.Arrays) -> op_calls.Arrays:
    """These gradients, and what comes over the other path."""
    other = [(op_calls.weights(x) * op_calls.slope(x)).astype(x.dtype) for x in call.xs]
    return [g + more for g, more in zip(found, other, strict=True)]
