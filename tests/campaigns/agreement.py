"""F5: random programs mean the same in every mode, to first and second order.

Values and gradients in each mode are compared with eager NumPy's, those with the program's twin
(see `programs`; a nested program's is JAX's), and those of programs without surrogates with
differences. Nested programs also run in PyTorch and in JAX, under the overrides of `regrad.torch`
and `regrad.jax`. Of a nested program a refusal counts as a fault, except where the page of the
proof has it. Hypothesis makes a program that disagrees smaller, which is shown as a script that
runs. `make fuzz` searches by the same code for as long as it is told, and
tests/project/test_random_programs.py is a part of the suite.

A disagreement is *explained* only by a test: the one-sided differences disagree (a kink), the
differences do not settle, or the reference itself changes as much when its inputs change by
rounding (a jump that rounding decides) or when its zeros change their signs (libraries differ in
`maximum(0.0, -0.0)`, and the standard leaves it open).
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from inspect import unwrap
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
from hypothesis import Phase
from hypothesis.database import InMemoryExampleDatabase, choices_to_bytes

import regrad as rg
import regrad.v1 as tf
from regrad.core.state import current
from regrad.errors import RegradError
from tests.campaigns import graphs, in_jax, in_torch, overridden_jax
from tests.campaigns.outcomes import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT, WRONG
from tests.campaigns.programs import Maker, Program
from tests.campaigns.sources import Source
from tests.campaigns.verdicts import Verdict, arrays, shown
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
    def both(*places: Any) -> Any:
        y = tf.convert_to_tensor(f(*map(rg.asarray, places)))
        return [y, *tf.gradients(y, places, unconnected_gradients="zero")]

    return graphs.in_graph(both, xs)


def compiled(f: Function, xs: Arrays) -> Any:
    return rg.jit(with_gradients(f))(*map(rg.asarray, xs))


def again(make: Function) -> Function:
    """A mode whose function has run before, for other numbers and other values of a variable."""

    def run(f: Function, xs: Arrays) -> Any:
        g, variable = make(f), unwrap(f).__globals__["W"]
        for value in (-0.4, 0.2, 0.7):  # (calls after the first take a shorter way)
            variable.assign(np.float64(value))
            numbers = xs if value == 0.7 else [value * x + 0.1 for x in xs]
            ys = g(*[rg.asarray(runs.arrays_of("jax", x)) for x in numbers])
        return ys

    return run


def with_gradients(f: Function) -> Function:
    return lambda *xs: value_and_gradients(f, xs)


def second_order(f: Function) -> Function:
    """A weighed sum of the gradients, to be differentiated again."""

    @wraps(f)
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


MODES: dict[str, Function] = {
    "twin": on("numpy"), "differences": on("numpy"), "torch": on("torch"),
    "checkpoint": on("numpy", rg.checkpoint), "vmap": on("numpy", batched),
    "vmap of grad": per_example, "jvp": forward(), "graph": in_graph, "jax": on("jax"),
    "jit of grad": again(lambda f: rg.jit(with_gradients(f))),
    "grad of jit": again(lambda f: with_gradients(rg.jit(f))), "jvp of jit": forward(rg.jit),
    "jit of checkpoint": lambda f, xs: compiled(rg.checkpoint(f), xs),
    "jit of vmap": lambda f, xs: compiled(batched(f), xs),
}  # fmt: skip
HOSTS: dict[str, Any] = {"regrad.torch": in_torch, "regrad.jax": overridden_jax}
NAMES = (*MODES, *HOSTS)
GRAPHS_LACK = ("cond", "while_loop", "fori_loop", "jit", "variable", "vmap", "map")


def fits(program: Program, mode: str) -> bool:
    """Whether a mode has all that the program uses, and has something to compare."""
    if mode == "twin":
        return program.is_nested or program.has_surrogate or "custom_grad" in program.kinds
    if mode == "differences":
        return not program.has_surrogate
    if mode in HOSTS:  # (there a gradient function differentiates without the rules)
        return not any("custom_grad" in k and "override" in k for k in program.kinds)
    return mode != "graph" or not any(word in k for word in GRAPHS_LACK for k in program.kinds)


def refusal(program: Program, mode: str) -> str:
    """A refusal, or a fault: what JAX runs of a nested program has to run here, too."""
    known = (
        mode == "graph"
        or (mode == "torch" and any("jit" in kind for kind in program.kinds))
        or ("vmap" in mode and "variable" in program.kinds)
    )
    return REFUSED if known or not program.is_nested else BROKEN


# -- what came -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A program and how it is differentiated."""

    program: Program
    order: int

    @cached_property
    def reference(self) -> Any:
        """The outcome in eager NumPy, with which every other is compared."""
        return self.outcome("")

    def function(self, twin: bool = False) -> Function:
        f = self.program.function(twin=twin)
        return second_order(f) if self.order == 2 else f

    def outcome(self, mode: str) -> Any:
        """Value and gradients as arrays, or the error."""
        twin, xs = mode == "twin", self.program.xs
        host = in_jax if twin and self.program.is_nested else HOSTS.get(mode)
        try:
            with np.errstate(all="ignore"):
                if host is not None:
                    return host.values_and_gradients(self.program.function(host), xs, self.order)
                return arrays(MODES[mode or "twin"](self.function(twin), xs))
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
    if mode == "regrad.jax" and "differentiates it itself" in str(got):
        return REFUSED, shown(got)
    if isinstance(got, RegradError):
        same = isinstance(task.reference, RegradError)
        return (REFUSED if same else refusal(task.program, mode)), shown(got)
    if mode == "regrad.torch" and "saved tensor hooks" in str(got):
        return EXPLAINED, "torch.func differentiates nothing in a checkpoint"
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
        moves.append(replace(task, program=replace(program, inputs=xs)))
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


# -- cases -----------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Case:
    """A program, and the mode that is compared."""

    task: Task
    mode: str

    def judged(self) -> tuple[str, str]:
        """The outcome, and what there is to say of it."""
        base, program = self.task.reference, self.task.program
        if isinstance(base, RegradError):
            outcome, detail = refusal(program, ""), shown(base)
        elif isinstance(base, Exception):
            outcome, detail = BROKEN, shown(base)
        elif self.mode == "differences":
            outcome, detail = differences(self.task)
        else:
            outcome, detail = compared(self.task, self.mode)
        if current() is not None:
            return SILENT, "a scope or a tape is left open"
        return outcome, detail

    def __repr__(self) -> str:
        of = "a weighed sum of the gradients" if self.task.order == 2 else "f"
        kinds = "; ".join(self.task.program.kinds)
        return f"{self.mode}: the gradients of {of} [{kinds}]\n\n{self.task.program.runnable()}"


def made(source: Source, mode: str) -> Case | None:
    """A case for a mode; None if the program does not fit it."""
    maker = Maker(source)
    nested = mode in HOSTS or source.chance(40)
    program = maker.nested() if nested else maker.flat()
    order = 1 + source.chance(20)
    return Case(Task(program, order), mode) if fits(program, mode) else None


def seeded(mode: str, seed: int) -> tuple[Case, list[int]]:
    """The case of a seed, and its choices."""
    rng = random.Random(seed)
    while True:
        source = Source(rng.randint)
        if case := made(source, mode):
            return case, source.choices


def smallest(mode: str, choices: list[int], outcome: str, seconds: float = 30.0) -> Case:
    """The smallest case of an outcome that hypothesis finds from one, given by its choices."""

    @st.composite
    def cases(draw: Any) -> Case:
        case = made(Source(lambda low, high: draw(st.integers(low, high))), mode)
        hypothesis.assume(case is not None)
        assert case is not None
        return case

    wrong: dict[str, bool] = {}
    end = time.monotonic() + seconds

    def is_wrong(case: Case) -> bool:
        text = repr(case)
        if text not in wrong:
            wrong[text] = time.monotonic() < end and case.judged()[0] == outcome
        return wrong[text]

    database = InMemoryExampleDatabase()
    database.save(b"found.secondary", choices_to_bytes(choices))  # (from where it is made smaller)
    settings = hypothesis.settings(
        database=database, phases=(Phase.reuse, Phase.shrink), deadline=None
    )
    return hypothesis.find(cases(), is_wrong, settings=settings, database_key=b"found")


def search(mode: str, seed: int, count: int) -> Counter[str]:
    """Count outcomes; raise AssertionError, with a small program, if a case is wrong."""
    outcomes = Counter[str]()
    for each in range(seed, seed + count):
        case, choices = seeded(mode, each)
        outcome = case.judged()[0]
        if outcome in WRONG:
            raise AssertionError(report(mode, each, choices, outcome))
        outcomes[outcome] += 1
    return outcomes


def report(mode: str, seed: int, choices: list[int], outcome: str) -> str:
    """A wrong case as text: what came, the smallest program, and the command that repeats it."""
    case = smallest(mode, choices, outcome)
    _, detail = case.judged()
    again = f"make fuzz ARGS=\"--mode '{mode}' --seed {seed} --cases 1\""
    return f"{outcome}: {detail}\n{case!r}\n\nOnce more: {again}"


# -- jobs ------------------------------------------------------------------------------------------

CHUNK = 100


def jobs(quick: bool = False, count: int | None = None, first: int = 0) -> list[str]:
    """Cases by the chunk: `jvp/0+20` are those of the seeds 0 to 19."""
    count = count or (10 if quick else 5_000)
    chunks = [f"{first + i}+{min(CHUNK, count - i)}" for i in range(0, count, CHUNK)]
    return [f"{mode}/{chunk}" for mode in NAMES for chunk in chunks]


def run(job: str, quick: bool = False) -> list[Verdict]:
    mode, _, chunk = job.partition("/")
    first, count = map(int, chunk.split("+"))
    return [examined(mode, seed) for seed in range(first, first + count)]


def examined(mode: str, seed: int) -> Verdict:
    case, choices = seeded(mode, seed)
    outcome, detail = case.judged()
    if outcome in WRONG:
        detail = report(mode, seed, choices, outcome)
    return Verdict(f"{seed} {mode}{', 2nd' * (case.task.order == 2)}", outcome, detail)


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them."""
    seed, _, mode = case.partition(" ")
    what = "wrong" if outcome in WRONG else detail.partition(":")[0]
    return f"{mode} {what}", seed
