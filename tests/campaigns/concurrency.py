"""F8: what threads and tasks do at once has the results that each has alone.

Random programs of scopes, gradients of first and second order, custom gradients, compiled
functions, Variables, sessions, graphs and torch scopes run in 16 threads, in 50 asyncio tasks, and
in both, switched at every chance. What comes is *delivered* where it equals, bit for bit, what the
same program returned when nothing else ran, *silent* where it differs, *broken* where it is an
error. Updates of what all share are counted: none may be lost.
"""

import asyncio
import random
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import regrad as rg
import regrad.v1 as tf
from regrad.torch import gradient_override_map as torch_scope
from tests.campaigns.verdicts import BROKEN, DELIVERED, SILENT, Verdict, shown

TITLE = "threads and tasks"

THREADS, TASKS = 16, 50
ROUNDS = 20  # programs of each thread, or task, in a job
LENGTH = 6  # parts of a program
JOBS = 5  # of each kind

# -- what all share --------------------------------------------------------------------------------


def body(x: Any) -> Any:
    return rg.sum(rg.sin(x) * x)


@cache
def shared() -> SimpleNamespace:
    """Functions compiled once, a graph with its sessions, and counters."""
    counter, graph = rg.Variable(0.0), tf.Graph()
    with graph.as_default():
        x, total = tf.placeholder(tf.float32, [None]), tf.Variable(0.0)
        y = tf.reduce_sum(tf.sin(x) * x)
        dy, step = tf.gradients(y, x)[0], tf.assign_add(total, 1.0)
        sessions = [tf.Session(graph=graph, jit=jit) for jit in (False, True)]
        for session in sessions:
            session.run(tf.global_variables_initializer())
    return SimpleNamespace(
        compiled=rg.jit(body), counter=counter, count=rg.jit(lambda: counter.assign_add(1.0)),
        x=x, y=y, dy=dy, step=step, total=total, sessions=sessions,
    )  # fmt: skip


UPDATES: list[None] = []  # one for each run of `counters`: appending is atomic

# -- the parts of programs -------------------------------------------------------------------------
#
# Each yields what it has computed, or None; there another task goes on.

Part = Callable[[random.Random], Generator[Any]]
PARTS: list[Part] = []


def part(f: Part) -> Part:
    PARTS.append(f)
    return f


def data(rng: random.Random) -> np.ndarray:
    return np.float32([rng.uniform(-2, 2) for _ in range(rng.randint(1, 4))])


@part
def gradients(rng: random.Random) -> Generator[Any]:
    x = data(rng)
    yield rg.grad(body)(x)
    yield rg.grad(lambda x: rg.sum(rg.grad(body)(x) * x))(x)


@part
def scopes(rng: random.Random) -> Generator[Any]:
    x, k = data(rng), rng.uniform(-2, 2)
    with rg.gradient_override_map({"Sin": lambda dy: dy * k}) as outer:
        yield
        yield rg.grad(body)(x)
        with rg.gradient_override_map({"Mul": lambda dy, a, b: (dy * b * k, dy * a)}):
            yield
            yield rg.grad(body)(x)
        yield rg.grad(lambda x: rg.sum(rg.grad(body)(x)))(x)
    outer.assert_fired()
    yield rg.grad(body)(x)


@part
def custom(rng: random.Random) -> Generator[Any]:
    x, k = rg.tensor(data(rng)), rng.uniform(-2, 2)

    @rg.custom_grad
    def f(x: Any, save: Any) -> Any:
        save([x])
        return rg.sin(x), lambda dy, saved: dy * saved[0] * k

    yield rg.grad(lambda x: rg.sum(f(x)))(x)
    yield rg.grad(lambda x: rg.sum(rg.grad(lambda x: rg.sum(f(x)))(x)))(x)


@part
def closing(rng: random.Random) -> Generator[Any]:
    """A custom function that takes what is differentiated from outside is refused."""
    f = rg.grad(lambda x: rg.custom_grad(lambda w: (w * x, lambda dy: dy))(2.0 * x))
    try:
        yield f(rng.random())
    except rg.errors.GradientError:
        yield np.zeros(1)


@part
def compiled(rng: random.Random) -> Generator[Any]:
    x, k, f = rg.tensor(data(rng)), rng.choice([2.0, -1.0]), shared().compiled
    yield f(x)
    yield rg.grad(f)(x)
    with rg.gradient_override_map({"Sin": lambda dy: dy * k}):
        yield
        yield rg.grad(f)(x)


@part
def variables(rng: random.Random) -> Generator[Any]:
    w, x = rg.Variable(rng.random()), data(rng)
    for _ in range(3):
        value, grads = rg.variable_grads(lambda: body(w * x))
        yield value
        w.assign_sub(grads[w.name] * 0.1)
        yield w.value


@part
def counters(rng: random.Random) -> Generator[Any]:
    """Three updates of the one counter of all, in one way or another, and one in a session each."""
    UPDATES.append(None)
    for _ in range(3):
        if rng.random() < 0.5:
            shared().count()
        else:
            shared().counter.assign_add(1.0)
        yield
    for session in shared().sessions:
        session.run(shared().step.op)
        yield


@part
def sessions(rng: random.Random) -> Generator[Any]:
    x = data(rng)
    for session in shared().sessions:
        yield from session.run([shared().y, shared().dy], {shared().x: x})
        yield


@part
def building(rng: random.Random) -> Generator[Any]:
    k = rng.uniform(-2, 2)
    with tf.Graph().as_default() as graph, tf.name_scope("part"):
        x = tf.placeholder(tf.float32, [None])
        yield
        with graph.gradient_override_map({"Sin": override(k)}):
            y = tf.reduce_sum(tf.sin(x) * x)
            yield
        dx = tf.gradients(y, x)[0]
        with tf.Session() as session:
            yield session.run(dx, {x: data(rng)})


def override(k: float) -> Any:
    return lambda op, dy: dy * k


@part
def in_torch(rng: random.Random) -> Generator[Any]:
    x, k = torch.tensor(data(rng), requires_grad=True), rng.uniform(-2, 2)
    with torch_scope({"Sin": lambda dy: dy * k}):
        yield
        yield torch.autograd.grad((torch.sin(x) * x).sum(), x)[0]
    yield torch.autograd.grad((torch.sin(x) * x).sum(), x)[0]


@part
def regions(rng: random.Random) -> Generator[Any]:
    x, k = rg.tensor(data(rng)), rng.uniform(-2, 2)
    yield rg.grad(rg.checkpoint(body))(x)
    yield rg.grad(lambda x: rg.scan(lambda c, e: (rg.sin(c * e) + k, e), x[0], x)[0])(x)
    yield rg.vmap(rg.grad(lambda e: rg.sin(e) * e))(x)


# -- programs --------------------------------------------------------------------------------------


def steps(seed: int) -> Generator[Any]:
    """A program: what it computes, in pieces."""
    rng = random.Random(seed)
    for _ in range(LENGTH):
        yield from rng.choice(PARTS)(rng)


def value(piece: Any) -> bytes:
    return np.asarray(piece.numpy() if hasattr(piece, "numpy") else piece).tobytes()


def alone(seed: int) -> list[bytes]:
    return [value(piece) for piece in steps(seed) if piece is not None]


async def among_tasks(seed: int) -> list[bytes]:
    found = []
    for piece in steps(seed):
        if piece is not None:
            found.append(value(piece))
        await asyncio.sleep(0)
    return found


# -- at once ---------------------------------------------------------------------------------------

Outcome = tuple[int, Any]  # a seed, and what its program gave: values, or an error


@contextmanager
def restless() -> Iterator[None]:
    """A block in which threads are switched at every chance."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(rows: Sequence[Sequence[int]]) -> list[Outcome]:
    """What programs give, each row in a thread."""
    together = Barrier(len(rows))

    def work(seeds: Sequence[int]) -> list[Outcome]:
        together.wait(60)
        return [(seed, attempted(seed)) for seed in seeds]

    with restless(), ThreadPoolExecutor(len(rows)) as pool:
        return [outcome for found in pool.map(work, rows) for outcome in found]


def attempted(seed: int) -> Any:
    try:
        return alone(seed)
    except Exception as error:
        return error


def in_tasks(rows: Sequence[Sequence[int]]) -> list[Outcome]:
    """What programs give, each row in a task."""

    async def work(seeds: Sequence[int]) -> list[Outcome]:
        done = [await asyncio.gather(among_tasks(s), return_exceptions=True) for s in seeds]
        return [(seed, each[0]) for seed, each in zip(seeds, done, strict=True)]

    async def everything() -> list[list[Outcome]]:
        return await asyncio.gather(*[work(seeds) for seeds in rows])

    return [outcome for found in asyncio.run(everything()) for outcome in found]


def in_both(rows: Sequence[Sequence[int]]) -> list[Outcome]:
    """What programs give: threads, of which some run tasks."""
    with restless(), ThreadPoolExecutor(5) as pool:
        tasks = [pool.submit(in_tasks, rows[k : k + 5]) for k in range(0, 20, 5)]
        return [*in_threads(rows[20:]), *[outcome for done in tasks for outcome in done.result()]]


WAYS: dict[str, tuple[Callable[..., list[Outcome]], int]] = {
    "threads": (in_threads, THREADS), "tasks": (in_tasks, TASKS), "both": (in_both, 20 + THREADS),
}  # fmt: skip

# -- what comes of it ------------------------------------------------------------------------------


def verdict(way: str, seed: int, got: Any, expected: list[bytes]) -> Verdict:
    case = f"{way} {seed}"
    if isinstance(got, BaseException):
        return Verdict(case, BROKEN, shown(got))
    if got != expected:
        places = [i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b]
        return Verdict(case, SILENT, f"results {places} differ from those computed alone")
    return Verdict(case, DELIVERED)


def counted(way: str) -> Iterator[Verdict]:
    """Whether the counters of all count every update there was."""
    held = [shared().counter, *[s.run(shared().total) for s in shared().sessions]]
    names = "eager and compiled", "session", "compiled session"
    for name, got, each in zip(names, held, (3, 1, 1), strict=True):
        expected, got = each * len(UPDATES), float(got)
        detail = "" if got == expected else f"{got:.0f} of {expected}"
        yield Verdict(f"{way} updates: {name}", SILENT if detail else DELIVERED, detail)


def jobs(quick: bool = False) -> list[str]:
    """`threads/0`, `tasks/0`, `both/0`, …"""
    return [f"{way}/{n}" for way in WAYS for n in range(1 if quick else JOBS)]


def run(job: str, quick: bool = False) -> list[Verdict]:
    """What comes of some programs at once."""
    way, _, number = job.partition("/")
    together, width = WAYS[way]
    rounds = 1 if quick else ROUNDS
    first = (int(number) * len(WAYS) + list(WAYS).index(way)) * 10_000
    rows = [[first + k * rounds + i for i in range(rounds)] for k in range(width)]
    expected = {seed: alone(seed) for seeds in rows for seed in seeds}
    found = [verdict(way, seed, got, expected[seed]) for seed, got in together(rows)]
    return [*found, *counted(way)]


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them."""
    way, _, what = case.partition(" ")
    return (f"{way} {what}", "") if what.startswith("updates") else (f"{way}: {detail}", what)
