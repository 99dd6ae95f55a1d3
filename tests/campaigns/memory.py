"""F9: memory stays flat, however often something is done.

Each kind of call is made up to a hundred thousand times (1,200 times, where each compiles), and
what the process holds is read, after collecting garbage: the memory of the whole process, which has
XLA's programs in it, and in a tenth as many calls more, that of Python's objects, which is
reported. Where the second half of the calls takes more than the first, beyond a bound, the kind is
*broken*.
"""

import asyncio
import contextvars
import gc
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

import regrad as rg
import regrad.v1 as tf
from regrad.errors import RegradError
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


def always(call: Call, calls: int = CALLS) -> Kind:
    """A kind without anything to be set up."""
    return Kind(lambda stack: call, calls)


def failing(dy: Any) -> Any:
    """A rule that raises."""
    raise ValueError(dy)


def body(x: Any) -> Any:
    return rg.sum(rg.sin(x) * x)


# -- eager -----------------------------------------------------------------------------------------


def of_jax_data(stack: ExitStack) -> Call:
    import jax.numpy as jnp

    x = rg.tensor(jnp.ones(3))
    return lambda i: rg.grad(body)(x)


def closing(x: Any) -> Any:
    return rg.custom_grad(lambda w: (w * x, lambda dy: dy))(2.0 * x)


def overridden(rule: Callable[[int], Any]) -> Callable[[int], Any]:
    """The body under a rule for `Sin`, of the number of the call."""

    def f(x: Any, i: int) -> Any:
        with rg.gradient_override_map({"Sin": rule(i)}):
            return body(x)

    return lambda i: rg.grad(lambda x: f(x, i))(X)


def variable_grads(stack: ExitStack) -> Call:
    w = rg.Variable([1.0, 2.0, 3.0])
    return lambda i: rg.variable_grads(lambda: body(w * X))


def in_thread(i: int) -> None:
    thread = threading.Thread(target=rg.grad(body), args=(X,))
    thread.start()
    thread.join()


def in_copied_context(i: int) -> Any:
    return rg.grad(lambda x: contextvars.copy_context().run(body, x))(X)


def in_task(stack: ExitStack) -> Call:
    loop = asyncio.new_event_loop()
    stack.callback(loop.close)

    async def gradient() -> Any:
        with rg.gradient_override_map({"Sin": lambda dy: dy}):
            await asyncio.sleep(0)
            return rg.grad(body)(X)

    return lambda i: loop.run_until_complete(gradient())


def saved(stack: ExitStack) -> Call:
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "w.safetensors"
    w = rg.Variable(X, name="w")

    def call(i: int) -> None:
        rg.train.save(path, [w], {"step": str(i)})
        rg.train.restore(path, [w])

    return call


EAGER = {
    "gradient": always(lambda i: rg.grad(body)(X)),
    "gradient of a gradient": always(lambda i: rg.grad(lambda x: rg.sum(rg.grad(body)(x)))(X),
        CALLS // 4),
    "gradient of JAX data": Kind(of_jax_data, CALLS // 10),
    "new custom function": always(lambda i: rg.grad(rg.custom_grad(lambda x: (x * i,
        lambda dy: dy * i)))(2.0)),
    "custom function that closes over x": always(lambda i: refused(rg.grad(closing), 2.0)),
    "override": always(lambda i: overridden(lambda i: lambda dy: dy * i)(i)),
    "gradient that fails": always(lambda i: refused(overridden(lambda i: failing), i)),
    "function that fails": always(lambda i: refused(rg.grad(lambda x: rg.matmul(x,
        rg.ones((7, i % 5)))), X)),
    "variable_grads": Kind(variable_grads, CALLS),
    "new Variable, assigned": always(lambda i: rg.Variable(np.ones(3)).assign_add([1.0, 2.0,
        float(i)])),
    "checkpoint": always(lambda i: rg.grad(rg.checkpoint(lambda x: body(x) * i))(X), CALLS // 4),
    "scan": always(lambda i: rg.grad(lambda x: rg.scan(lambda c, e: (c * e + i, e), x[0], x)[0])(X),
        CALLS // 10),
    "vmap": always(lambda i: rg.vmap(lambda x: rg.sin(x) * i)(X), CALLS // 4),
    "vmap of a gradient": always(lambda i: rg.vmap(rg.grad(body))(rg.stack([X, X])), CALLS // 10),
    "thread": always(in_thread, CALLS // 10), "copied context": always(in_copied_context),
    "task": Kind(in_task, CALLS // 10), "save and restore": Kind(saved, CALLS // 50),
}  # fmt: skip

# -- compiled --------------------------------------------------------------------------------------


def compiled(make: Callable[[], Any], call: Callable[[Any, int], Any]) -> Any:
    """Calls of a function that is made once."""

    def kind(stack: ExitStack) -> Call:
        f = make()
        return lambda i: call(f, i)

    return kind


def compiled_step(stack: ExitStack) -> Call:
    w = rg.Variable(X)
    step = rg.jit(lambda: w.assign_sub(rg.variable_grads(lambda: body(w)).grads[w.name] * 1e-6))
    return lambda i: step()


def assigns(i: int) -> None:
    w = rg.Variable(np.ones(100_000, np.float32))
    rg.jit(lambda x: w.assign_add(rg.sum(x) * rg.ones(100_000)))(X)


def new_closure(stack: ExitStack) -> Call:
    factor = [0]
    f = rg.jit(lambda x: rg.sum(x) * factor[0])

    def call(i: int) -> None:
        factor[0] = i
        f(X)

    return call


def with_static(f: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: rg.jit(f, static_argnames="n")


JITTED = {
    "compiled call": Kind(compiled(lambda: rg.jit(body), lambda f, i: f(X)), CALLS),
    "gradient of a compiled call": Kind(compiled(lambda: rg.grad(rg.jit(body)), lambda f, i: f(X)),
        CALLS // 10),
    "compiled step": Kind(compiled_step, CALLS // 4),
    "new compiled function": always(lambda i: rg.jit(lambda x: body(x))(X), COMPILING),
    "gradient of a new compiled function": always(lambda i: rg.grad(rg.jit(lambda x: body(x)))(X),
        COMPILING),
    "new compiled gradient": always(lambda i: rg.jit(rg.grad(lambda x: body(x)))(X), COMPILING),
    "new compiled function that assigns": always(assigns, COMPILING),
    "new static value": Kind(compiled(with_static(lambda x, n: rg.sum(x) * n), lambda f,
        i: f(X, i)), COMPILING),
    "new shape": Kind(compiled(lambda: rg.jit(lambda x: rg.sum(x * x)), lambda f,
        i: f(np.ones(i + 1, np.float32))), COMPILING),
    "new value in the closure": Kind(new_closure, COMPILING),
    "trace that fails": Kind(compiled(with_static(lambda x, n: x if x > n else -x), lambda f,
        i: refused(f, 1.0, i)), COMPILING),
}  # fmt: skip

# -- graphs ----------------------------------------------------------------------------------------


def graph(stack: ExitStack, jit: bool = False) -> tuple[Any, Any, Any]:
    """A session for a graph: a placeholder of any length, and a loss of it and a Variable."""
    stack.enter_context(tf.Graph().as_default())
    session = stack.enter_context(tf.Session(jit=jit))
    w, x = tf.Variable(np.float32(1.5)), tf.placeholder(tf.float32, [None])
    session.run(tf.global_variables_initializer())
    with tf.variable_scope("a"), x.graph.gradient_override_map({"Sin": "Identity"}):
        return session, x, tf.reduce_sum(tf.sin(x) * x * w)


def trained(stack: ExitStack, jit: bool = False) -> Call:
    session, x, y = graph(stack, jit)
    step = tf.train.GradientDescentOptimizer(1e-6).minimize(y)
    return lambda i: session.run([y, step], {x: [0.5, 1.5]})


def new_fetches(stack: ExitStack) -> Call:
    session, x, y = graph(stack)
    ys = [y * float(k) for k in range(40)]
    return lambda i: session.run([ys[i % 40], ys[i // 40 % 40], ys[i // 1600 % 40]], {x: [0.5]})


def run_that_fails(stack: ExitStack) -> Call:
    session, x, _ = graph(stack)
    sums = x + tf.constant([1.0, 2.0, 3.0])
    return lambda i: refused(session.run, sums, {x: [0.5, 1.5]})


def new_shape(stack: ExitStack) -> Call:
    session, x, y = graph(stack, jit=True)
    return lambda i: session.run(y, {x: np.ones(i + 1)})


def new_graph(i: int, jit: bool = False) -> None:
    with ExitStack() as inner:
        session, x, y = graph(inner, jit)
        session.run(y if jit else tf.gradients(y, x), {x: [0.5, float(i)]})


GRAPHS = {
    "run": Kind(trained, CALLS),
    "run of a new choice of fetches": Kind(new_fetches, CALLS // 10),
    "run that fails": Kind(run_that_fails, CALLS // 10),
    "new graph": always(new_graph, CALLS // 20),
    "compiled run": Kind(partial(trained, jit=True), CALLS // 10),
    "compiled run of a new shape": Kind(new_shape, COMPILING),
    "new graph, compiled": always(partial(new_graph, jit=True), COMPILING),
}

# -- torch -----------------------------------------------------------------------------------------


def in_torch(rule: Callable[[int], Any], *errors: type[Exception]) -> Callable[[ExitStack], Call]:
    """A gradient of torch's under a rule, with the errors that the rule may raise."""

    def kind(stack: ExitStack) -> Call:
        import torch

        from regrad.torch import gradient_override_map

        x = torch.ones(3, requires_grad=True)

        def call(i: int) -> None:
            with suppress(*errors), gradient_override_map({"Sin": rule(i)}):
                torch.autograd.grad(torch.sin(x).sum(), x)

        return call

    return kind


TORCH = {
    "torch override": Kind(in_torch(lambda i: lambda dy: dy * i), CALLS // 10),
    "torch override that fails": Kind(
        in_torch(lambda i: failing, ValueError, RegradError), CALLS // 20),
}  # fmt: skip
KINDS: dict[str, Kind] = {**EAGER, **JITTED, **GRAPHS, **TORCH}

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
    plans = "regrad.v1.run.compiled_plans.KEPT"
    with patch("regrad.transforms.jit.KEPT", 4), patch(plans, 4):
        return [examined(job, max(20, count // QUICK))]


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them: each is its own."""
    return case, ""
