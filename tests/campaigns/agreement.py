"""F5: random programs mean the same in every mode, to first and second order.

Values and gradients in each mode are compared with eager NumPy's, those with the program's twin
(see `programs`; a nested program's is JAX's), and those of programs without surrogates with
differences. What disagrees is made smaller as long as it disagrees, and shown as a program that
runs. Of a nested program a refusal counts as a fault, except where the page of the proof has it.

A disagreement is *explained* only by a test: the one-sided differences disagree (a kink), the
differences do not settle, or the reference itself changes as much when its inputs change by
rounding (a jump that rounding decides) or when its zeros change their signs (libraries differ in
`maximum(0.0, -0.0)`, and the standard leaves it open).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

import regrad as rg
import regrad.v1 as tf
from regrad.core.state import current
from regrad.errors import RegradError
from tests.campaigns import in_jax
from tests.campaigns.programs import Program, made, smaller
from tests.campaigns.verdicts import (
    BROKEN,
    DELIVERED,
    EXPLAINED,
    REFUSED,
    SILENT,
    WRONG,
    Verdict,
    shown,
)
from tests.helpers import sample_runs as runs

TITLE = "random programs"

Function = Callable[..., Any]
Arrays = list[np.ndarray]
TOLERANCE = 1e-7


# -- modes -----------------------------------------------------------------------------------------


def value_and_gradients(f: Function, xs: Sequence[Any]) -> Any:
    value, grads = rg.value_and_grads(f, unconnected="zero")(list(xs))
    return [value, *grads]


def on(library: str, wrap: Function = lambda f: f) -> Function:
    def run(f: Function, xs: Arrays) -> Any:
        return value_and_gradients(wrap(f), [rg.asarray(runs.arrays_of(library, x)) for x in xs])

    return run


def batched(f: Function) -> Function:
    """f by way of a batch of one."""
    return lambda *xs: rg.vmap(f)(*[x[None] for x in xs])[0]


def per_example(f: Function, xs: Arrays) -> Any:
    g = lambda *xs: tuple(value_and_gradients(f, xs))  # noqa: E731
    return [y[0] for y in rg.vmap(g)(*[rg.asarray(x)[None] for x in xs])]


def in_graph(f: Function, xs: Arrays) -> Any:
    with tf.Graph().as_default():
        places = [tf.placeholder(x.dtype, list(x.shape)) for x in xs]
        y = tf.convert_to_tensor(f(*map(rg.asarray, places)))
        dxs = tf.gradients(y, places, unconnected_gradients="zero")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return session.run([y, *dxs], dict(zip(places, xs, strict=True)))


def compiled(f: Function, xs: Arrays) -> Any:
    return rg.jit(lambda *xs: value_and_gradients(f, xs))(*map(rg.asarray, xs))


def second_order(f: Function) -> Function:
    """A weighed sum of the gradients, to be differentiated again."""

    def g(*xs: Any) -> Any:
        parts = rg.grads(f, unconnected="zero")(list(xs))
        total = rg.asarray(np.float64(0.0))
        for i, dx in enumerate(parts):
            total = total + rg.sum(dx * np.cos(np.arange(dx.size) + i).reshape(dx.shape))
        return total

    return g


def forward(wrap: Function = lambda f: f) -> Function:
    """The gradients by forward mode, in the direction of one number at a time."""

    def run(f: Function, xs: Arrays) -> Any:
        g, parts = wrap(f), []
        y = g(*map(rg.asarray, xs))
        for i, x in enumerate(xs):
            found = []
            for unit in np.eye(x.size):
                dxs = [unit.reshape(x.shape) if j == i else 0.0 * z for j, z in enumerate(xs)]
                found.append(rg.jvp(g, xs, dxs)[1].numpy())
            parts.append(np.reshape(found, x.shape))
        return [y, *parts]

    return run


CHEAP: dict[str, Function] = {
    "torch": on("torch"),
    "checkpoint": on("numpy", rg.checkpoint),
    "vmap": on("numpy", batched),
    "vmap of grad": per_example,
    "jvp": forward(),
    "graph": in_graph,
}
SLOW: dict[str, Function] = {
    "jax": on("jax"),
    "grad of jit": on("numpy", rg.jit),
    "jit of grad": compiled,
    "jvp of jit": forward(rg.jit),
    "jit of checkpoint": lambda f, xs: compiled(rg.checkpoint(f), xs),
    "jit of vmap": lambda f, xs: compiled(batched(f), xs),
}
MODES = {"numpy": on("numpy"), **CHEAP, **SLOW}
OUT_OF_PLACE = {"graph": ("cond", "while_loop", "fori_loop", "jit", "variable", "vmap", "map")}


def fits(program: Program, mode: str) -> bool:
    """Whether a mode has all that the program uses (graphs have control flow of their own)."""
    return not any(word in kind for word in OUT_OF_PLACE.get(mode, ()) for kind in program.kinds)


def refusal(program: Program, mode: str) -> str:
    """A refusal, or a fault: what JAX runs of a nested program has to run here, too."""
    known = mode == "graph" or (mode == "torch" and any("jit" in kind for kind in program.kinds))
    return REFUSED if known or not program.is_nested else BROKEN


def chosen(program: Program, rng: random.Random) -> list[str]:
    """The modes for one program: all that are cheap, and one that compiles, by turns."""
    modes = [*rng.sample(list(CHEAP), 3), rng.choice(list(SLOW))]
    return [m for m in modes if fits(program, m)]


# -- what came -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A program and how it is differentiated."""

    program: Program
    order: int

    @cached_property
    def reference(self) -> Any:
        """The outcome in eager NumPy, with which every other is compared."""
        return self.outcome("numpy")

    def function(self, twin: bool = False) -> Function:
        f = self.program.function(twin)
        return second_order(f) if self.order == 2 else f

    def outcome(self, mode: str) -> Any:
        """Value and gradients as arrays, or the error."""
        try:
            with np.errstate(all="ignore"):
                if self.program.is_nested and mode.endswith("'s twin"):
                    f = self.program.function(twin=True)
                    return in_jax.values_and_gradients(f, self.program.xs, self.order)
                found = MODES[mode.removesuffix("'s twin")](
                    self.function(mode.endswith("'s twin")), self.program.xs
                )
            return [np.asarray(y._values() if hasattr(y, "_values") else y) for y in found]
        except Exception as error:
            return error


def disagree(a: Arrays, b: Arrays) -> bool:
    scale = 1 + max((np.abs(y[np.isfinite(y)]).max(initial=0) for y in b), default=0)
    return any(
        x.shape != y.shape
        or not np.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def compared(task: Task, mode: str) -> tuple[str, str]:
    """The outcome of one mode, and what it says."""
    got = task.outcome(mode)
    if isinstance(got, RegradError):
        same = isinstance(task.reference, RegradError)
        return (REFUSED if same else refusal(task.program, mode)), shown(got)
    if isinstance(got, Exception):
        return BROKEN, shown(got)
    due = task.reference
    if isinstance(due, Exception):
        return SILENT, f"a value, where eager NumPy raised {shown(due)}"
    if not disagree(got, due):
        return DELIVERED, ""
    if jumps(task, got, due):
        return EXPLAINED, "rounding decides"
    if other_zeros(task, due):
        return EXPLAINED, "the sign of a zero decides"
    return SILENT, f"{lists(got)} instead of {lists(due)}"


def lists(arrays: Arrays) -> str:
    return str([np.round(a, 6).tolist() for a in arrays])[:400]


def jumps(task: Task, got: Arrays, due: Arrays) -> bool:
    """Whether the reference moves as far when its inputs, or its values, are moved by rounding."""
    numbers, program = np.random.default_rng(0), task.program
    moves = [replace(task, program=program.nudged(by)) for by in (1e-14, -1e-14, 1e-13, -1e-13)]
    for size in (1e-14, 1e-13, 1e-12) * 3:
        xs = tuple(
            (n, x + size * numbers.standard_normal(x.shape) * (1 + np.abs(x)))
            for n, x in program.inputs
        )
        moves.append(Task(Program(xs, program.stmts, program.outputs), task.order))
    found = (moved.reference for moved in moves)
    return any(isinstance(ys, Exception) or disagree(ys, due) for ys in found)


def other_zeros(task: Task, due: Arrays) -> bool:
    """Whether the reference is another where zeros have the other sign."""
    ys = replace(task, program=task.program.flipped()).reference
    return isinstance(ys, Exception) or disagree(ys, due)


# -- differences -----------------------------------------------------------------------------------


def differences(task: Task) -> tuple[str, str]:
    """The gradient in eager NumPy against differences in a random direction."""
    due = task.reference
    if isinstance(due, Exception):
        return (REFUSED if isinstance(due, RegradError) else BROKEN), shown(due)
    f, xs = task.function(), task.program.xs
    numbers = np.random.default_rng(1)
    vs = [numbers.standard_normal(x.shape) for x in xs]
    slope = sum(float((dx * v).sum()) for dx, v in zip(due[1:], vs, strict=True))

    def at(h: float) -> float:
        moved = [rg.asarray(x + h * v) for x, v in zip(xs, vs, strict=True)]
        return float(np.asarray(f(*moved)._values()))

    return judged_slope(slope, at, float(due[0]))


STEPS = (1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6)


def judged_slope(slope: float, at: Callable[[float], float], y: float) -> tuple[str, str]:
    """Delivered if central differences settle on the slope; explained if they do not settle."""
    with np.errstate(all="ignore"):
        found = []
        for h in STEPS:
            right, left = (at(h) - y) / h, (y - at(-h)) / h
            middle, noise = (right + left) / 2, 1e-14 * (1 + abs(y)) / h
            if abs(middle - slope) <= 1e-6 * (1 + abs(slope)) + 20 * noise:
                return DELIVERED, ""
            found.append((middle, right, left, noise))
    if not np.isfinite([slope, *[m for m, *_ in found]]).all():
        return EXPLAINED, "not finite"
    (m1, right, left, noise), (m2, right2, left2, _) = found[-1], found[-3]
    if abs(right - left) > 0.5 * abs(right2 - left2) > 1e-5 * (1 + abs(m1)) + 20 * noise:
        return EXPLAINED, "the one-sided differences disagree: a kink"
    if abs(m1 - m2) > 0.02 * abs(m1 - slope) + 20 * noise:
        return EXPLAINED, "the differences do not settle"
    return SILENT, f"the slope is {slope:.9g}, and the differences settle on {m1:.9g}"


# -- a program -------------------------------------------------------------------------------------

Check = Callable[[Task], tuple[str, str]]


def checks(task: Task, modes: Sequence[str]) -> Iterator[tuple[str, Check]]:
    """What is asked of a program: each mode, its twin, differences."""
    program = task.program
    if program.has_surrogate or program.is_nested or "custom_grad" in program.kinds:
        yield "twin", lambda t: compared(t, "numpy's twin")
    if not program.has_surrogate:
        yield "differences", differences
    for mode in modes:
        yield mode, lambda t, mode=mode: compared(t, mode)


def examined(seed: int) -> list[Verdict]:
    """All verdicts on one program."""
    rng = random.Random(seed)
    task = Task(made(seed), 2 if rng.random() < 0.2 else 1)
    modes = chosen(task.program, rng)
    base = task.reference
    if isinstance(base, RegradError) and not task.program.is_nested:
        return [Verdict(f"{seed} numpy", REFUSED, shown(base))]
    if isinstance(base, Exception):
        return [Verdict(f"{seed} numpy", BROKEN, small(task, numpy_alone, shown(base)))]
    found = []
    for name, check in checks(task, modes):
        outcome, detail = check(task)
        if outcome in WRONG:
            detail = small(task, check, detail)
        found.append(Verdict(f"{seed} {name}{', 2nd' * (task.order == 2)}", outcome, detail))
    if current() is not None:
        found.append(Verdict(f"{seed} state", SILENT, "a scope or a tape is left open"))
    return found


def numpy_alone(task: Task) -> tuple[str, str]:
    base = task.reference
    if isinstance(base, RegradError):
        return refusal(task.program, "numpy"), shown(base)
    return (BROKEN, shown(base)) if isinstance(base, Exception) else (DELIVERED, "")


def small(task: Task, check: Check, detail: str, seconds: float = 10.0) -> str:
    """What came of the smallest program for which as much comes, and that program."""
    wrong, end = check(task)[0], time.monotonic() + seconds
    again = True
    while again and time.monotonic() < end:
        again = False
        for program in smaller(task.program):
            less = replace(task, program=program)
            if size(less) < size(task) and fails(check, less, wrong):
                task, again = less, True
                break
    order = "grads of a weighed sum of the gradients" if task.order == 2 else "grads"
    detail = check(task)[1] or detail
    kinds = ", ".join(task.program.kinds)
    return f"[{kinds}] {order}: {detail}\n{task.program.runnable()}"


def fails(check: Check, task: Task, wrong: str) -> bool:
    try:
        return check(task)[0] == wrong
    except Exception:
        return False


def size(task: Task) -> tuple[int, ...]:
    p = task.program
    text = sum(len(s.expr.text) for s in p.stmts if s.expr is not None)
    whole = sum(s.kind != "constant" for s in p.stmts)
    return len(p.stmts) + len(p.outputs) + len(p.inputs), whole, text


# -- jobs ------------------------------------------------------------------------------------------

CHUNK = 20


def jobs(count: int, first: int = 0) -> list[str]:
    """Programs by the chunk: `0+20` are those of the seeds 0 to 19."""
    return [f"{first + i}+{min(CHUNK, count - i)}" for i in range(0, count, CHUNK)]


def run(job: str, quick: bool = False) -> list[Verdict]:
    first, count = map(int, job.split("+"))
    return [v for seed in range(first, first + count) for v in examined(seed)]


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them."""
    seed, _, mode = case.partition(" ")
    what = detail.partition("]")[0] + "]" if outcome in WRONG else detail.partition(":")[0]
    return f"{mode} {what}", seed
