"""F9: memory stays flat, however often something is done.

Each kind of call is made up to a hundred thousand times (1,200 times, where each compiles), and
what the process holds is read, after collecting garbage: the memory of the whole process, which has
XLA's programs in it, and in a tenth as many calls more, that of Python's objects, which is
reported. Where the second half of the calls takes more than the first, beyond a bound, the kind is
*broken*.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

import regrad as rg
import regrad.v1 as tf
from regrad.errors import RegradError
from regrad.transforms import jit
from regrad.v1.run import compiled_plans
from tests.campaigns.verdicts import BROKEN, DELIVERED, Verdict

TITLE = "memory"

CALLS, COMPILING = 100_000, 1_200
QUICK = 200  # of a quick run there is one call in so many, but for those that compile
OBJECT = 8.0  # bytes that a call may leave behind: no object of Python is as small
SLACK = 2_000_000  # bytes by which a process may grow without a leak, as its heap is cut up
PROGRAM = 100_000  # bytes per compiled program, which takes fifteen times as many

SAMPLES = 20  # readings in each half, where programs are dropped: their number goes up and down

X = rg.tensor(np.float32([0.5, -1.5, 2.0]))
Call = Callable[[int], Any]


class Kind(NamedTuple):
    """Something to be done again and again; `make` sets it up, on a stack that is left later."""

    make: Callable[[ExitStack], Call]
    calls: int


KINDS: dict[str, Kind] = {}


def kind(name: str, calls: int = CALLS) -> Any:
    def enter(make: Callable[[ExitStack], Call]) -> Any:
        KINDS[name] = Kind(make, calls)
        return make

    return enter


def failing(dy: Any) -> Any:
    """A rule that raises."""
    raise ValueError(dy)


def body(x: Any) -> Any:
    return rg.sum(rg.sin(x) * x)


# -- eager -----------------------------------------------------------------------------------------


@kind("gradient")
def _(stack: ExitStack) -> Call:
    return lambda i: rg.grad(body)(X)


@kind("gradient of a gradient", CALLS // 4)
def _(stack: ExitStack) -> Call:
    return lambda i: rg.grad(lambda x: rg.sum(rg.grad(body)(x)))(X)


@kind("gradient of JAX data", CALLS // 10)
def _(stack: ExitStack) -> Call:
    import jax.numpy as jnp

    x = rg.tensor(jnp.ones(3))
    return lambda i: rg.grad(body)(x)


@kind("new custom function")
def _(stack: ExitStack) -> Call:
    return lambda i: rg.grad(rg.custom_grad(lambda x: (x * i, lambda dy: dy * i)))(2.0)


@kind("custom function that closes over x")
def _(stack: ExitStack) -> Call:
    def closing(x: Any) -> Any:
        return rg.custom_grad(lambda w: (w * x, lambda dy: dy))(2.0 * x)

    return lambda i: refused(rg.grad(closing), 2.0)


@kind("override")
def _(stack: ExitStack) -> Call:
    def call(i: int) -> None:
        with rg.gradient_override_map({"Sin": lambda dy: dy * i}):
            rg.grad(body)(X)

    return call


@kind("gradient that fails")
def _(stack: ExitStack) -> Call:
    def f(x: Any) -> Any:
        with rg.gradient_override_map({"Sin": failing}):
            return rg.sum(rg.sin(x))

    return lambda i: refused(rg.grad(f), X)


@kind("function that fails")
def _(stack: ExitStack) -> Call:
    return lambda i: refused(rg.grad(lambda x: rg.matmul(x, rg.ones((7, i % 5)))), X)


@kind("variable_grads")
def _(stack: ExitStack) -> Call:
    w = rg.Variable([1.0, 2.0, 3.0])
    return lambda i: rg.variable_grads(lambda: body(w * X))


@kind("new Variable, assigned")
def _(stack: ExitStack) -> Call:
    return lambda i: rg.Variable(np.ones(3)).assign_add([1.0, 2.0, float(i)])


@kind("checkpoint", CALLS // 4)
def _(stack: ExitStack) -> Call:
    return lambda i: rg.grad(rg.checkpoint(lambda x: body(x) * i))(X)


@kind("scan", CALLS // 10)
def _(stack: ExitStack) -> Call:
    return lambda i: rg.grad(lambda x: rg.scan(lambda c, e: (c * e + i, e), x[0], x)[0])(X)


@kind("vmap", CALLS // 4)
def _(stack: ExitStack) -> Call:
    return lambda i: rg.vmap(lambda x: rg.sin(x) * i)(X)


@kind("thread", CALLS // 10)
def _(stack: ExitStack) -> Call:
    def call(i: int) -> None:
        thread = threading.Thread(target=rg.grad(body), args=(X,))
        thread.start()
        thread.join()

    return call


@kind("copied context")
def _(stack: ExitStack) -> Call:
    def inside(x: Any) -> Any:
        return contextvars.copy_context().run(body, x)

    return lambda i: rg.grad(inside)(X)


@kind("task", CALLS // 10)
def _(stack: ExitStack) -> Call:
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)

    async def gradient() -> Any:
        with rg.gradient_override_map({"Sin": lambda dy: dy}):
            await asyncio.sleep(0)
            return rg.grad(body)(X)

    return lambda i: loop.run_until_complete(gradient())


@kind("save and restore", CALLS // 50)
def _(stack: ExitStack) -> Call:
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "w.safetensors"
    w = rg.Variable(X, name="w")

    def call(i: int) -> None:
        rg.train.save(path, [w], {"step": str(i)})
        rg.train.restore(path, [w])

    return call


# -- compiled --------------------------------------------------------------------------------------


@kind("compiled call")
def _(stack: ExitStack) -> Call:
    f = rg.jit(body)
    return lambda i: f(X)


@kind("gradient of a compiled call", CALLS // 10)
def _(stack: ExitStack) -> Call:
    f = rg.grad(rg.jit(body))
    return lambda i: f(X)


@kind("compiled step", CALLS // 4)
def _(stack: ExitStack) -> Call:
    w = rg.Variable(X)
    step = rg.jit(lambda: w.assign_sub(rg.variable_grads(lambda: body(w)).grads[w.name] * 1e-6))
    return lambda i: step()


@kind("new compiled function", COMPILING)
def _(stack: ExitStack) -> Call:
    return lambda i: rg.jit(lambda x: body(x))(X)


@kind("gradient of a new compiled function", COMPILING)
def _(stack: ExitStack) -> Call:
    return lambda i: rg.grad(rg.jit(lambda x: body(x)))(X)


@kind("new compiled gradient", COMPILING)
def _(stack: ExitStack) -> Call:
    return lambda i: rg.jit(rg.grad(lambda x: body(x)))(X)


@kind("new compiled function that assigns", COMPILING)
def _(stack: ExitStack) -> Call:
    def call(i: int) -> None:
        w = rg.Variable(np.ones(100_000, np.float32))
        rg.jit(lambda x: w.assign_add(rg.sum(x) * rg.ones(100_000)))(X)

    return call


@kind("new static value", COMPILING)
def _(stack: ExitStack) -> Call:
    f = rg.jit(lambda x, n: rg.sum(x) * n, static_argnames="n")
    return lambda i: f(X, i)


@kind("new shape", COMPILING)
def _(stack: ExitStack) -> Call:
    f = rg.jit(lambda x: rg.sum(x * x))
    return lambda i: f(np.ones(i + 1, np.float32))


@kind("new value in the closure", COMPILING)
def _(stack: ExitStack) -> Call:
    factor = [0]
    f = rg.jit(lambda x: rg.sum(x) * factor[0])

    def call(i: int) -> None:
        factor[0] = i
        f(X)

    return call


@kind("trace that fails", COMPILING)
def _(stack: ExitStack) -> Call:
    f = rg.jit(lambda x, n: x if x > n else -x, static_argnames="n")
    return lambda i: refused(f, 1.0, i)


# -- graphs ----------------------------------------------------------------------------------------


def graph(stack: ExitStack, jit: bool = False) -> tuple[Any, Any, Any]:
    """A session for a graph: a placeholder of any length, and a loss of it and a Variable."""
    stack.enter_context(tf.Graph().as_default())
    session = stack.enter_context(tf.Session(jit=jit))
    w, x = tf.Variable(np.float32(1.5)), tf.placeholder(tf.float32, [None])
    session.run(tf.global_variables_initializer())
    return session, x, tf.reduce_sum(tf.sin(x) * x * w)


@kind("run")
def _(stack: ExitStack) -> Call:
    session, x, y = graph(stack)
    step = tf.train.GradientDescentOptimizer(1e-6).minimize(y)
    return lambda i: session.run([y, step], {x: [0.5, 1.5]})


@kind("run of a new choice of fetches", CALLS // 10)
def _(stack: ExitStack) -> Call:
    session, x, y = graph(stack)
    ys = [y * float(k) for k in range(40)]

    def call(i: int) -> None:
        session.run([ys[i % 40], ys[i // 40 % 40], ys[i // 1600 % 40]], {x: [0.5]})

    return call


@kind("run that fails", CALLS // 10)
def _(stack: ExitStack) -> Call:
    session, x, _ = graph(stack)
    sums = x + tf.constant([1.0, 2.0, 3.0])
    return lambda i: refused(session.run, sums, {x: [0.5, 1.5]})


@kind("new graph", CALLS // 20)
def _(stack: ExitStack) -> Call:
    def call(i: int) -> None:
        with ExitStack() as inner:
            session, x, y = graph(inner)
            session.run(tf.gradients(y, x), {x: [0.5, float(i)]})

    return call


@kind("compiled run", CALLS // 10)
def _(stack: ExitStack) -> Call:
    session, x, y = graph(stack, jit=True)
    step = tf.train.GradientDescentOptimizer(1e-6).minimize(y)
    return lambda i: session.run([y, step], {x: [0.5, 1.5]})


@kind("compiled run of a new shape", COMPILING)
def _(stack: ExitStack) -> Call:
    session, x, y = graph(stack, jit=True)
    return lambda i: session.run(y, {x: np.ones(i + 1)})


@kind("new graph, compiled", COMPILING)
def _(stack: ExitStack) -> Call:
    def call(i: int) -> None:
        with ExitStack() as inner:
            session, x, y = graph(inner, jit=True)
            session.run(y, {x: [0.5, float(i)]})

    return call


# -- torch -----------------------------------------------------------------------------------------


@kind("torch override", CALLS // 10)
def _(stack: ExitStack) -> Call:
    import torch

    from regrad.torch import gradient_override_map

    x = torch.ones(3, requires_grad=True)

    def call(i: int) -> None:
        with gradient_override_map({"Sin": lambda dy: dy * i}):
            torch.autograd.grad(torch.sin(x).sum(), x)

    return call


@kind("torch override that fails", CALLS // 20)
def _(stack: ExitStack) -> Call:
    import torch

    from regrad.torch import gradient_override_map

    x = torch.ones(3, requires_grad=True)

    def call(i: int) -> None:
        with suppress(ValueError, RegradError), gradient_override_map({"Sin": failing}):
            torch.autograd.grad(torch.sin(x).sum(), x)

    return call


# -- what comes of it ------------------------------------------------------------------------------


def refused(f: Callable[..., Any], *args: Any) -> None:
    with suppress(RegradError, TypeError, ValueError):
        f(*args)
        raise AssertionError("this was to fail")


def resident() -> int:
    """The bytes of memory that the process has."""
    gc.collect()
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def allocated() -> int:
    """The bytes that Python's objects take, of those made since the tracing began."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def grown(
    call: Call, numbers: Iterator[int], count: int, reading: Callable[[], int], samples: int = 1
) -> int:
    """By how many bytes more a second half of calls takes, at its peak, than the first."""
    peaks = []
    for _ in range(2):
        readings = []
        for part in range(samples):
            for _ in range(count * (part + 1) // samples // 2 - count * part // samples // 2):
                call(next(numbers))
            readings.append(reading())
        peaks.append(max(readings))
    return peaks[1] - peaks[0]


def examined(name: str, count: int) -> Verdict:
    """What a kind of call leaves behind."""
    compiles = KINDS[name].calls == COMPILING
    numbers = iter(range(10**9))
    with ExitStack() as stack:
        call = KINDS[name].make(stack)
        held = grown(call, numbers, count, resident, SAMPLES if count == COMPILING else 1)
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        few = max(10, count // 10)
        objects = grown(call, numbers, few, allocated)
    half = count // 2
    detail = (
        f"{held / half:.1f} bytes of the process per call, in the second half of {count:,}; "
        f"{2 * objects / few:.1f} bytes of objects"
    )
    leaks = held > SLACK + half * (PROGRAM if compiles else OBJECT)
    return Verdict(name, BROKEN if leaks else DELIVERED, detail)


def jobs(quick: bool = False) -> list[str]:
    """All kinds, or a fourth of them."""
    return list(KINDS)[:: 4 if quick else 1]


def run(job: str, quick: bool = False) -> list[Verdict]:
    """What comes of one kind of call."""
    count = KINDS[job].calls
    if not quick:
        return [examined(job, count)]
    with patch.object(jit, "KEPT", 4), patch.object(compiled_plans, "KEPT", 4):
        return [examined(job, max(20, count // QUICK))]


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them: each is its own."""
    return case, ""
