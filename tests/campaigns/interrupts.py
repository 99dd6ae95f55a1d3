"""F10: Ctrl-C at any moment undoes what it interrupts, and loses nothing.

*Eager* programs are struck by the handler of a real signal at random moments: afterwards no tape,
no override and no default graph or session may be in force. Training *loops*, in which compiled
programs write over the arrays of Variables, get a real SIGINT from another process, again and
again: all Variables must hold values that a whole number of steps has given, all of one step. The
same in a *notebook*, by way of its kernel, where ipykernel is installed.

A case is *delivered* where the KeyboardInterrupt came out and all was in order, *silent* where it
was swallowed, or something was left in force or lost, *explained* where another library's finalizer
or garbage callback swallowed it, and *broken* for another error.
"""

import importlib.util
import os
import queue
import random
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

import regrad as rg
import regrad.v1 as tf
from regrad.core.state import BESIDE, OPEN, STATE, current
from regrad.errors import UnusedOverrideWarning
from regrad.jax import scopes
from tests.campaigns.verdicts import BROKEN, DELIVERED, EXPLAINED, SILENT, Verdict, shown

TITLE = "interrupts"

X = np.linspace(0.1, 0.9, 4, dtype=np.float32)
STRIKES = 1000  # interrupts per job
CHUNKS = 4  # jobs per eager program


# -- eager programs --------------------------------------------------------------------------------


def scoped() -> None:
    """An override, around a custom gradient that differentiates a function of its own."""

    @rg.custom_grad
    def f(x: Any) -> Any:
        return rg.sin(x), lambda dy: rg.grad(lambda z: rg.sum(rg.sign(z) * dy))(dy)

    with rg.gradient_override_map({"Sin": lambda dy: dy * 2.0}):
        rg.grad(lambda x: rg.sum(f(rg.sin(x))))(X)


@rg.gradient_override_map({"Sin": lambda dy: dy * 2.0})
def decorated() -> None:
    rg.grad(lambda x: rg.sum(rg.sin(x)))(X)


def of_variables() -> None:
    v = rg.Variable(X)
    rg.variable_grads(lambda: rg.sum(rg.sin(v) * v))


def twice() -> None:
    rg.grad(lambda x: rg.sum(rg.grad(lambda z: rg.sum(rg.sin(z) * z))(x)))(X)


def checkpointed() -> None:
    rg.grad(lambda x: rg.sum(rg.checkpoint(lambda x: rg.sin(x) * x)(x)))(X)


def looped() -> None:
    rg.grad(lambda x: rg.scan(lambda c, e: (c * e, c), 1.0, x)[0])(X)


def batched() -> None:
    rg.vmap(rg.grad(lambda x: rg.sum(rg.sin(x) * x)))(np.stack([X, X]))


def in_graph() -> None:
    with tf.Graph().as_default() as graph, tf.Session() as session:
        with tf.variable_scope("a"), graph.gradient_override_map({"Sin": "Identity"}):
            x = tf.constant(X)
            y = tf.sin(x)
        session.run(tf.gradients(y, x))


def double(dy: Any) -> Any:
    return dy * 2.0


def in_torch() -> None:
    import torch

    import regrad.torch

    x = torch.ones(3, requires_grad=True)
    with regrad.torch.gradient_override_map({"Relu": double}):
        torch.relu(x).sum().backward()


def told() -> None:
    """Send overrides to JAX, without a trace. (JAX swallows errors while it compares keys.)"""
    with rg.gradient_override_map({"Sin": double}), rg.default_dtype("float64"):
        rg.grad(lambda x: rg.sum(rg.sin(x)))(X)


EAGER: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        scoped, decorated, of_variables, twice, checkpointed, looped, batched, in_graph, in_torch,
        told,
    )
}  # fmt: skip


def left() -> str:
    """What is still in force, in words; nothing if all is in order."""
    found = {
        "a state": current(), "tapes": OPEN, "tapes beside others": BESIDE,
        "a graph": INITIAL is not tf.get_default_graph(),
        "a session": tf.get_default_session(), "scopes of torch": _torch_scopes(),
        "what JAX was told": scopes.is_behind(),
    }  # fmt: skip
    return ", ".join(name for name, value in found.items() if value)


INITIAL = tf.get_default_graph()
scopes.follow()


def _torch_scopes() -> Any:
    torch = sys.modules.get("regrad.torch.open_scopes")
    return torch and torch.SCOPES.get()


def struck(f: Callable[[], None], strikes: int, seed: int) -> Iterator[tuple[str, str]]:
    """Outcomes of interrupts at random moments of a program that runs again and again."""
    f()
    start = time.perf_counter()
    f()
    span = max(2 * (time.perf_counter() - start), 50e-6)  # (less is over before the program runs)
    rng = random.Random(seed)
    limit = signal.alarm(0)  # of the job, which has the same timer
    with (
        handled(signal.SIGINT, signal.default_int_handler),
        handled(signal.SIGALRM, lambda *args: signal.raise_signal(signal.SIGINT)),
        unraisable() as swallowed,
        warnings.catch_warnings(),
    ):
        # (a scope that is struck before its `__enter__` says so when it is freed)
        warnings.simplefilter("ignore", UnusedOverrideWarning)
        for _ in range(strikes):
            swallowed.clear()
            try:
                _repeat(f, 1e-6 + rng.random() * span, swallowed)
                yield (EXPLAINED if any(swallowed) else SILENT), f"swallowed {swallowed}"
            except KeyboardInterrupt:  # (asked while its traceback lives)
                in_force = left()
                yield (SILENT, f"left in force: {in_force}") if in_force else (DELIVERED, "")
            except Exception as error:
                yield BROKEN, shown(error)
            clear()
    signal.alarm(limit)


def _repeat(f: Callable[[], None], delay: float, swallowed: Sequence[str]) -> None:
    """Run a program until the timer strikes; it is a call, so that the caller's `try` covers all.

    (From Python 3.13 on the jump at the end of a loop lies outside of the `try` around the loop.)
    """
    signal.setitimer(signal.ITIMER_REAL, delay)
    end = time.monotonic() + 10
    while time.monotonic() < end and not swallowed:
        f()


@contextmanager
def unraisable() -> Iterator[list[str]]:
    """Where interrupts were swallowed by Python, in words; nothing where it was in regrad."""
    found: list[str] = []

    def note(what: Any) -> None:
        files = [f.filename for f in traceback.extract_tb(what.exc_traceback)]
        ours = any(f.startswith(os.path.dirname(rg.__file__)) for f in files)
        found.append("" if ours else repr(what.object))

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield found
    finally:
        sys.unraisablehook = before


def clear() -> None:
    """Put everything back for the next case."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    STATE.set(None)
    OPEN.clear()
    BESIDE.clear()


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


# -- training loops --------------------------------------------------------------------------------


class Loop(NamedTuple):
    """One step, and the values of the Variables, of which a step makes each one more."""

    step: Callable[[], Any]
    values: Callable[[], list[np.ndarray]]


def by_jit(n: int = 160) -> Loop:
    """A step that writes over the Variables, of 400 kB."""
    vs = [rg.Variable(np.zeros((n, n), np.float32)) for _ in range(4)]

    @rg.jit
    def step() -> Any:
        for v in vs:
            v.assign_add(np.float32(1.0))
        return rg.sum(vs[0])

    return Loop(step, lambda: [v.value.numpy() for v in vs])


def by_jit_small() -> Loop:
    """A step that makes new arrays."""
    return by_jit(32)


def by_jit_read() -> Loop:
    loop = by_jit()
    return Loop(lambda: loop.step().item(), loop.values)


def by_fit() -> Loop:
    """Weights and moments of an optimizer, in the library's own loop over batches."""
    import optax

    v = rg.Variable(np.zeros((32, 32), np.float32), name="w")
    count = rg.Variable(np.zeros((32, 32), np.float32))
    optimizer = rg.train.Optimizer(optax.adam(1e-3))
    optimizer.init([v])

    @rg.jit
    def step(batch: Any) -> Any:
        loss, grads = rg.variable_grads(lambda: rg.mean((v - batch) ** 2), [v])
        optimizer.apply_gradients(grads)
        count.assign_add(np.float32(1.0))
        return loss

    batches = [np.float32(i) for i in range(50)]

    def values() -> list[np.ndarray]:
        assert np.isfinite(v.value.numpy()).all()
        return [count.value.numpy()]

    return Loop(lambda: rg.train.fit(step, batches, epochs=1, progress=False), values)


def by_session() -> Loop:
    with tf.Graph().as_default() as graph:
        vs = [tf.Variable(np.zeros((32, 32), np.float32)) for _ in range(4)]
        session = tf.Session(jit=True, graph=graph)
        session.run(tf.global_variables_initializer())
        step = tf.group(*[tf.assign_add(v, tf.ones([32, 32])) for v in vs])
    return Loop(lambda: session.run(step), lambda: session.run(vs))


LOOPS: dict[str, Callable[[], Loop]] = {
    f.__name__: f for f in (by_jit, by_jit_small, by_jit_read, by_fit, by_session)
}

SENDER = """
import os, random, signal, sys, time
rng, pid = random.Random(int(sys.argv[2])), int(sys.argv[1])
for span in sys.stdin:
    time.sleep(float(span) * rng.random())
    os.kill(pid, int(sys.argv[3]))
"""


@contextmanager
def sender(seed: int, number: int = signal.SIGINT) -> Iterator[Callable[[float], None]]:
    """A process that interrupts this one within so many seconds, each time it is told."""
    arguments = [sys.executable, "-c", SENDER, str(os.getpid()), str(seed), str(int(number))]
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdin is not None
    lines = child.stdin

    def send(span: float) -> None:
        lines.write(f"{span}\n")
        lines.flush()

    try:
        yield send
    finally:
        lines.close()
        child.wait()


def lost(loop: Loop) -> str:
    """What is wrong with the Variables, in words."""
    try:
        values = loop.values()
    except Exception as error:
        return shown(error)
    counts = np.unique(np.concatenate([np.ravel(v) for v in values]))
    return "" if len(counts) == 1 and counts[0] >= 1 else f"steps that differ: {counts[:4]}"


def interrupted(
    make: Callable[[], Loop], strikes: int, seed: int, number: int = signal.SIGINT
) -> Iterator[tuple[str, str]]:
    """Outcomes of signals during a training loop."""
    loop = make()
    loop.step()
    with handled(number, signal.default_int_handler), sender(seed, number) as send:
        for _ in range(strikes):
            try:
                send(0.003)
                end = time.monotonic() + 10
                while time.monotonic() < end:
                    loop.step()
                yield SILENT, "the interrupt was swallowed"
            except KeyboardInterrupt:
                trouble = lost(loop)
                yield (SILENT, trouble) if trouble else (DELIVERED, "")
                loop = make() if trouble else loop
            except Exception as error:
                yield BROKEN, shown(error)
                loop = make()


def in_notebook(kind: str, strikes: int, seed: int) -> Iterator[tuple[str, str]]:
    """Outcomes of interrupts of a cell that trains, by the kernel's manager."""
    from jupyter_client.manager import start_new_kernel

    rng = random.Random(seed)
    manager, client = start_new_kernel(env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        name = f"from tests.campaigns import interrupts as m; loop = m.{kind}(); loop.step()"
        assert "ready" in ran(client, f"{name}; print('ready')")
        for _ in range(strikes):
            cell = client.execute("print('running', flush=True)\nwhile True: loop.step()")
            outputs(client, cell, until="running")
            time.sleep(rng.random() * 0.02)
            manager.interrupt_kernel()
            try:
                said = outputs(client, cell)
            except TimeoutError as error:
                manager.interrupt_kernel()
                outputs(client, cell)
                said = str(error)
                theirs = "Exception ignored" in said and os.path.dirname(rg.__file__) not in said
                yield (EXPLAINED if theirs else SILENT), f"swallowed: {said}"
                continue
            if "KeyboardInterrupt" not in said:
                yield SILENT, "the interrupt was swallowed"
            elif trouble := ran(client, "print(m.lost(loop))").strip():
                yield SILENT, trouble
                ran(client, name)
            else:
                yield DELIVERED, ""
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def ran(client: Any, code: str) -> str:
    return outputs(client, client.execute(code))


def outputs(client: Any, cell: str, until: str | None = None) -> str:
    """What a cell prints and raises, to its end or to a word; TimeoutError says it too."""
    found = ""
    while True:
        try:
            message = client.get_iopub_msg(timeout=60)
        except queue.Empty:
            raise TimeoutError(found) from None
        content = message["content"]
        if message["parent_header"].get("msg_id") != cell:
            continue
        found += content.get("text", "") + content.get("ename", "")
        if content.get("execution_state") == "idle" or (until and until in found):
            return found


# -- jobs ------------------------------------------------------------------------------------------


def jobs(quick: bool = False) -> list[str]:
    """`eager/scoped/0`, `loop/by_jit`, `notebook/by_jit`."""
    eager = [f"eager/{name}/{i}" for name in EAGER for i in range(1 if quick else CHUNKS)]
    loops = [f"loop/{name}" for name in LOOPS]
    has_kernel = importlib.util.find_spec("ipykernel") is not None
    notebooks = [f"notebook/{name}" for name in LOOPS] if has_kernel and not quick else []
    return [*eager, *loops, *notebooks]


def run(job: str, quick: bool = False) -> list[Verdict]:
    """The verdicts of a job."""
    kind, name, *seed = job.split("/")
    if kind == "eager":
        found = struck(EAGER[name], STRIKES // 10 if quick else STRIKES, int(seed[0]))
    elif kind == "loop":
        found = interrupted(LOOPS[name], STRIKES // 20 if quick else STRIKES, 0)
    else:
        found = in_notebook(name, STRIKES // 4, 0)
    return [Verdict(f"{job} {i}", *outcome) for i, outcome in enumerate(found)]


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them."""
    job, _, number = case.rpartition(" ")
    return job, number
