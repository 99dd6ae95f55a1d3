"""F1: a rule in force fires or raises, op type by op type, wherever the op is created.

Each op type gets a rule whose answer is known without the library: `(3x + 7) * sum(dy)` for every
float input x. The op is called as the samples call it, and its results are weighed by fixed
numbers, so that NumPy knows the gradient, the second derivative, the Jacobian and the tangent.
What a context gives is then *delivered* (these numbers), *refused* (an error of regrad's),
*silent* (other numbers) or *broken* (another error).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import regrad as rg
import regrad.v1 as tf
from regrad.errors import RegradError
from regrad.state import current, masked
from tests import test_ops as eager
from tests.campaigns.verdicts import Verdict, judged

TITLE = "rules in every context"

Function = Callable[..., Any]
Arrays = list[np.ndarray]


def sentinel(op: Any, *dys: Any) -> Any:
    """`(3x + 7) * sum(dy)` for each float input: linear in dy, and nobody's own rule."""
    total = functools.reduce(rg.add, [rg.sum(dy) for dy in dys if dy is not None])
    xs = [rg.asarray(x) for x in op.inputs]  # (a graph shows TensorFlow's view of them)
    found = [(3 * x + 7) * cast(total, x.dtype) if is_float(x) else None for x in xs]
    return found[0] if len(found) == 1 else found


def cast(total: Any, dtype: Any) -> Any:
    real = total.dtype.kind == "c" and np.dtype(dtype).kind == "f"
    return rg.astype(rg.real(total) if real else total, dtype)


def is_float(x: Any) -> bool:
    return x.dtype.kind in "fc"


def in_force(op_type: str, **others: Any) -> Any:
    return rg.gradient_override_map({**others, op_type: sentinel})


def lost(op: Any, *dys: Any) -> None:
    """A rule for what a region does for itself, in which no override may have a say."""


# -- the calls -------------------------------------------------------------------------------------


@dataclass
class Call:
    """One op, called once, directly on what is differentiated."""

    op_type: str
    arrays: Arrays
    attrs: dict[str, Any]
    ys: Arrays = field(default_factory=list)

    @property
    def places(self) -> list[int]:
        return [i for i, a in enumerate(self.arrays) if is_float(a)]

    @property
    def xs(self) -> Arrays:
        return [self.arrays[i] for i in self.places]

    @property
    def is_real(self) -> bool:
        return all(a.dtype.kind != "c" for a in [*self.xs, *self.ys])

    def apply(self, *floats: Any) -> list[Any]:
        """The results of the op, its float inputs given."""
        given = dict(zip(self.places, floats, strict=True))
        leaves = [given.get(i, rg.asarray(a)) for i, a in enumerate(self.arrays)]
        return eager.outputs(rg.find_op(self.op_type).function(*self.grouped(leaves), **self.attrs))

    def grouped(self, leaves: list[Any]) -> list[Any]:
        """Leaves by parameter: a sequence takes what the others leave, an optional one may lack."""
        inputs = rg.find_op(self.op_type).inputs
        spare = len(leaves) - sum(i.kind == "one" for i in inputs)
        rest, found = iter(leaves), []
        for each in inputs:
            if each.kind == "many":
                found.append([next(rest) for _ in range(spare)])
            elif each.kind == "optional" and spare <= 0:
                found.append(None)
            else:
                spare -= each.kind == "optional"
                found.append(next(rest))
        return found

    def f(self, *floats: Any) -> Any:
        """A scalar: the results, weighed. Only the op itself is under the rule."""
        ys = self.apply(*floats)
        with masked():
            return weighed(ys)

    @property
    def arrives(self) -> complex:
        """The sum of the gradients that reach the op."""
        return sum(complex((weights(y) * slope(y)).sum()) for y in self.ys)

    def slopes(self, xs: Arrays) -> Arrays:
        """The rule's answer."""
        return [((3 * x + 7) * fit(self.arrives, x)).astype(x.dtype) for x in xs]

    def second(self) -> Arrays:
        """The gradients of a weighed sum of the rule's answers."""
        s = self.arrives
        return [
            (weights(x) * slope(x) * 3 * np.conj(fit(s, x)) * np.ones_like(x)).astype(x.dtype)
            for x in self.xs
        ]


def fit(total: complex, x: np.ndarray) -> Any:
    return total if x.dtype.kind == "c" else total.real


def weights(y: np.ndarray) -> np.ndarray:
    return 2 + np.cos(np.arange(y.size, dtype=np.float64)).reshape(y.shape)


def slope(y: np.ndarray) -> complex:
    """What arrives at a complex result whose real part counts 0.7 and its imaginary part 0.3."""
    return 0.7 + 0.3j if y.dtype.kind == "c" else 1.0


def weighed(ys: Sequence[Any]) -> Any:
    """A scalar of float64 of all results, bools and integers included."""
    total = rg.asarray(np.float64(0.0))
    for y in ys:
        parts = [(rg.real(y), 0.7), (rg.imag(y), 0.3)] if y.dtype.kind == "c" else [(y, 1.0)]
        for part, factor in parts:
            w = rg.asarray(factor * weights(np.empty(y.shape)))
            total = total + rg.sum(rg.astype(part, np.float64) * w)
    return total


@functools.cache
def call_of(op_type: str) -> Call | None:
    """A call of an op type as the table of samples has it; None if no float input leads there."""
    rows = sorted(eager.ROWS, key=lambda r: -r.order)
    covering = (row for row in rows if op_type in {rg.find_op(t).type for t in row.covers})
    return next(filter(None, (caught(op_type, row) for row in covering)), None)


def covered() -> set[str]:
    """The op types that the samples have."""
    return {rg.find_op(t).type for row in eager.ROWS for t in row.covers}


def op_types() -> list[str]:
    """Those among them that the samples call with a float input."""
    return sorted(t for t in covered() if call_of(t))


class Caught(Exception):
    """The inputs and attributes of an op, brought by a rule that runs."""


def finite(array: np.ndarray) -> np.ndarray:
    """Without infinities, of which a gradient of zero along a second path would make NaN."""
    return np.nan_to_num(array, nan=2.0, posinf=3.0, neginf=-3.0) if is_float(array) else array


def caught(op_type: str, row: Any) -> Call | None:
    """How a sample calls an op type; None if no float input leads there."""
    arrays = eager.given(row, "numpy")
    places = [i for i, a in enumerate(arrays) if is_float(a)]

    def spy(op: Any, *dys: Any) -> Any:
        attrs = {n: op.get_attr(n) for n in rg.find_op(op_type).attrs}
        raise Caught([finite(np.asarray(x._values())) for x in op.inputs], attrs)

    def scalar(*floats: Any) -> Any:
        leaves = [rg.asarray(a) for a in arrays]
        for i, x in zip(places, floats, strict=True):
            leaves[i] = x
        with rg.gradient_override_map({op_type: spy}):
            ys = eager.outputs(row.f(*leaves))
        return weighed(ys)

    try:
        rg.grads(scalar)([arrays[i] for i in places])
    except Caught as what:
        call = Call(op_type, *what.args)
        call.ys = [np.asarray(y._values()) for y in call.apply(*map(rg.asarray, call.xs))]
        return call if call.xs and all(x.size for x in call.xs) and call.arrives else None
    except RegradError:
        pass
    return None


# -- regions ---------------------------------------------------------------------------------------
#
# Each turns a function of Tensors to a scalar into one of the same value and gradients. What it
# does for itself is masked, so that only the op is under the rule.


def masking(f: Function) -> Function:
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


def whiled(f: Function) -> Function:
    less = masking(lambda pair: pair[0] < 1.0)

    def run(*xs: Any) -> Any:
        turn = lambda pair: (plus(pair[0], 1.0), plus(pair[1], f(*xs)))  # noqa: E731
        return rg.while_loop(less, turn, (ZERO, ZERO), max_steps=2)[1]

    return run


def scan_over(f: Function, **options: Any) -> Function:
    step = lambda c, row: (c, f(*row))  # noqa: E731
    return lambda *xs: first(rg.scan(step, None, pairs(xs), **options)[1])


def scan_closure(f: Function) -> Function:
    step = lambda xs: lambda c, _: (plus(c, f(*xs)), None)  # noqa: E731
    return lambda *xs: rg.scan(step(xs), ZERO, length=1)[0]


def rerun(f: Function) -> Function:
    """A custom function whose gradient differentiates f again (it recomputes, say)."""

    def custom(*xs: Any, save: Any) -> Any:
        save(list(xs))
        return f(*xs), lambda dy, saved: rg.grads(f)(list(saved), dy)

    return rg.custom_grad(custom)


def wrapped(f: Function) -> Function:
    """A custom function that takes the vjp of f within."""

    def custom(*xs: Any, save: Any) -> Any:
        y, back = rg.vjp(f, *xs)
        return y, lambda dy: eager.outputs(back(dy))

    return rg.custom_grad(custom)


def nested(f: Function, op_type: str) -> Function:
    """In a scope with another rule, within which one with the sentinel stands."""

    def run(*xs: Any) -> Any:
        with rg.gradient_override_map({op_type: lambda op, *dys: [None] * len(op.inputs)}):
            with in_force(op_type):
                y = f(*xs)
            masking(f)(*xs)
            return y

    return run


REGIONS: dict[str, Function] = {
    "alone": lambda f: f,
    "checkpoint": rg.checkpoint,
    "vmap": lambda f: lambda *xs: first(rg.vmap(f)(*pairs(xs))),
    "scan": scan_over,
    "scan, closure": scan_closure,
    "scan, reverse, checkpoint": functools.partial(scan_over, reverse=True, checkpoint=True),
    "cond": lambda f: lambda *xs: rg.cond(flag(xs[0], True), f, nothing, *xs),
    "cond, closure": lambda f: (
        lambda *xs: rg.cond(flag(xs[0], False), nothing, lambda *_: f(*xs), *xs)
    ),
    "while_loop": whiled,
    "fori_loop": lambda f: lambda *xs: rg.fori_loop(0, 1, lambda i, t: plus(t, f(*xs)), ZERO),
    "map": lambda f: lambda *xs: first(rg.map(lambda row: f(*row), pairs(xs))),
    "checkpoint of scan of cond": lambda f: rg.checkpoint(
        scan_closure(lambda *xs: rg.cond(flag(xs[0], True), f, nothing, *xs))
    ),
    "custom_grad, differentiated again": rerun,
    "custom_grad, vjp within": wrapped,
}
SHORT = ("alone", "checkpoint", "scan", "cond")


# -- regions that return a tensor that they close over --------------------------------------------
#
# The op is outside; its result passes through a region that returns it as it is.


RETURNS: dict[str, Function] = {
    "checkpoint": lambda y: rg.checkpoint(lambda: y)(),
    "jit": lambda y: rg.jit(lambda: y)(),
    "cond": lambda y: rg.cond(flag(y, True), lambda: y, lambda: y),
    "scan": lambda y: first(rg.scan(lambda c, _: (c, y), None, length=2)[1]),
    "scan, carry": lambda y: rg.scan(lambda c, _: (y, None), zero_like(y), length=2)[0],
    "while_loop": lambda y: rg.while_loop(
        masking(lambda pair: pair[0] < 1.0),
        lambda pair: (plus(pair[0], 1.0), y),
        (ZERO, zero_like(y)),
        max_steps=2,
    )[1],
    "fori_loop": lambda y: rg.fori_loop(0, 2, lambda i, c: y, zero_like(y)),
    "map": lambda y: first(rg.map(lambda _: y, np.zeros(2))),
    "vmap": lambda y: first(rg.vmap(lambda _: y)(np.zeros(2))),
    "cond in checkpoint": lambda y: rg.checkpoint(
        lambda: rg.cond(flag(y, True), lambda: y, lambda: y)
    )(),
}
zero_like = masking(lambda y: rg.stop_gradient(rg.zeros_like(y)))


def returned(call: Call, name: str) -> Function:
    """f whose results go through a region that closes over them."""

    def run(*xs: Any) -> Any:
        ys = [RETURNS[name](y) for y in call.apply(*xs)]
        return masking(weighed)(ys)

    return run


# -- who else may run f ----------------------------------------------------------------------------


def threaded(f: Function) -> Function:
    def run(*xs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(f, *xs).result()

    return run


def threaded_copy(f: Function) -> Function:
    def run(*xs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(contextvars.copy_context().run, f, *xs).result()

    return run


def tasked(f: Function) -> Function:
    async def task(xs: Any) -> Any:
        await asyncio.sleep(0)
        return f(*xs)

    async def both(xs: Any) -> Any:
        return (await asyncio.gather(task(xs)))[0]

    return lambda *xs: asyncio.run(both(xs))


def generated(f: Function) -> Function:
    def generator(xs: Any) -> Iterator[Any]:
        yield f(*xs)

    return lambda *xs: next(generator(xs))


RUNNERS: dict[str, Function] = {
    "thread": threaded,
    "thread, copied context": threaded_copy,
    "asyncio task": tasked,
    "generator": generated,
}


def beside(f: Function) -> Function:
    """f and another path, over which a gradient comes even if that of f is lost."""

    def run(*xs: Any) -> Any:
        y = f(*xs)
        with masked():
            return y + weighed(xs)

    return run


def plus_paths(call: Call, found: Arrays) -> Arrays:
    """These gradients, and what comes over the other path."""
    other = [(weights(x) * slope(x)).astype(x.dtype) for x in call.xs]
    return [g + more for g, more in zip(found, other, strict=True)]


# -- derivatives -----------------------------------------------------------------------------------


def gradients(f: Function) -> Function:
    return lambda *xs: rg.grads(f, unconnected="zero")(list(xs))


def second_order(f: Function) -> Function:
    return gradients(lambda *xs: masking(weighed)(gradients(f)(*xs)))


def tangent(f: Function) -> Function:
    return lambda *xs: [rg.jvp(f, list(xs), [rg.ones_like(x) for x in xs])[1]]


def per_example(f: Function) -> Function:
    """vmap of the gradient: two examples, of which the second is a little smaller."""

    def run(*xs: Any) -> Any:
        batch = masking(lambda: [rg.stack([x, x * 0.97]) for x in xs])()
        return rg.vmap(lambda *one: tuple(gradients(f)(*one)))(*batch)

    return run


def jacobians(call: Call) -> Function:
    """Of the op's first result by its first float input."""

    def run(*xs: Any) -> Any:
        def y(x: Any) -> Any:
            return masking(lambda y: rg.astype(y, np.float64))(call.apply(x, *xs[1:])[0])

        return [rg.jacobian(y)(xs[0])]

    return run


def derivatives(call: Call) -> Iterator[tuple[str, Function, Arrays]]:
    """By name: how a derivative of f is taken, and what is due."""
    slopes = call.slopes(call.xs)
    yield "first", gradients, slopes
    yield "second", second_order, call.second()
    both = zip(slopes, call.slopes([x * 0.97 for x in call.xs]), strict=True)
    yield "vmap of grad", per_example, [np.stack(pair) for pair in both]
    if call.is_real:
        yield "jvp", tangent, [np.asarray(sum(s.sum() for s in slopes))]
        x, size = call.xs[0], call.ys[0].shape
        yield "jacobian", lambda f: jacobians(call), [np.broadcast_to(3 * x + 7, size + x.shape)]


# -- the grid --------------------------------------------------------------------------------------


def data(call: Call, library: str) -> list[Any]:
    return [rg.asarray(eager.arrays_of(library, x)) for x in call.xs]


def attempt(f: Function, *xs: Any) -> Any:
    """The numbers, or the error that came instead."""
    try:
        return f(*xs)
    except Exception as error:
        return error


Grid = Iterator[tuple[str, Any, Arrays]]


def eager_cases(call: Call, library: str, quick: bool) -> Grid:
    """`(context, what came, what is due)` for one op type and one library."""
    xs, due = data(call, library), list(derivatives(call))
    regions = {n: REGIONS[n] for n in SHORT} if quick else REGIONS
    for region, wrap in regions.items():
        for name, take, numbers in due if library == "numpy" or region == "alone" else due[:1]:
            if name == "jacobian" and region != "alone":
                continue
            with in_force(call.op_type):
                yield f"{name}: {region}", attempt(take(wrap(call.f)), *xs), numbers
    for name in RETURNS:
        with in_force(call.op_type, Identity=lost, Pack=lost, StridedSlice=lost):
            got = attempt(gradients(returned(call, name)), *xs)
        yield f"returned by {name}", got, due[0][2]
    for name, runner in RUNNERS.items():
        with in_force(call.op_type):
            got = attempt(gradients(beside(runner(call.f))), *xs)
        yield f"first: {name}", got, plus_paths(call, due[0][2])
    yield "scope inside f", attempt(gradients(nested(call.f, call.op_type)), *xs), due[0][2]
    yield from comings_and_goings(call, xs, due[0][2])


def comings_and_goings(call: Call, xs: list[Any], due: Arrays) -> Grid:
    """Scopes that are left by an exception, or held open across a yield; nothing stays."""
    own = eager.numbers(gradients(call.f)(*xs))

    def held() -> Iterator[None]:
        with in_force(call.op_type):
            yield

    def fails(*args: Any) -> Any:
        call.f(*args)
        raise Failure

    class Failure(Exception):
        pass

    for wrap in (fails, rg.checkpoint(fails), lambda *xs: rg.vmap(fails)(*pairs(xs))):
        with in_force(call.op_type):
            attempt(gradients(wrap), *xs)
    yield "after an exception", attempt(gradients(call.f), *xs), own
    generator = held()
    next(generator)
    yield "a scope across a yield", attempt(gradients(call.f), *xs), due
    next(generator, None)
    yield "after a scope across a yield", attempt(gradients(call.f), *xs), own
    assert current() is None


def jit_cases(call: Call, quick: bool) -> Grid:
    """The same within and around compiled functions, many contexts to one program."""
    xs, found = data(call, "numpy"), list(derivatives(call))
    slopes, regions = found[0][2], {n: REGIONS[n] for n in SHORT} if quick else REGIONS
    takes = {f"first: {n}": (gradients(wrap(call.f)), slopes) for n, wrap in regions.items()}
    takes |= {f"{n}: alone": (take(call.f), due) for n, take, due in found}
    takes["scope inside f"] = gradients(nested(call.f, call.op_type)), slopes
    if not quick:
        takes |= {f"returned by {n}": (gradients(returned(call, n)), slopes) for n in RETURNS}
        both = plus_paths(call, slopes)
        takes |= {f"first: {n}": (gradients(beside(r(call.f))), both) for n, r in RUNNERS.items()}
    for name, got in together(call, {n: take for n, (take, _) in takes.items()}, xs).items():
        yield f"in jit, {name}", got, takes[name][1]
    yield from outside_cases(call, regions, xs, slopes)
    yield from cached_cases(call, xs, slopes)


def together(call: Call, takes: dict[str, Function], xs: list[Any]) -> dict[str, Any]:
    """What each gives inside one compiled program; one by one if that fails as a whole."""
    errors: dict[str, Any] = {}

    def program(*xs: Any) -> dict[str, Any]:
        found = {name: attempt(take, *xs) for name, take in takes.items()}
        errors.update((n, got) for n, got in found.items() if isinstance(got, Exception))
        return {name: got for name, got in found.items() if name not in errors}

    with in_force(call.op_type):
        found = attempt(rg.jit(program), *xs)
    if not isinstance(found, Exception):
        return found | errors
    if len(takes) == 1:
        return dict.fromkeys(takes, found)
    return {n: got for name in takes for n, got in together(call, {name: takes[name]}, xs).items()}


def outside_cases(call: Call, regions: dict[str, Function], xs: list[Any], due: Arrays) -> Grid:
    """The gradient from outside of a program with all regions; one by one if that fails."""
    n = len(xs)

    @rg.jit
    def program(*xs: Any) -> list[Any]:
        groups = [xs[i : i + n] for i in range(0, len(xs), n)]
        return [wrap(call.f)(*g) for wrap, g in zip(regions.values(), groups, strict=True)]

    total = lambda *xs: functools.reduce(plus, program(*xs))  # noqa: E731
    with in_force(call.op_type):
        found = attempt(gradients(total), *xs * len(regions))
    if not isinstance(found, Exception):
        for i, name in enumerate(regions):
            yield f"around jit, {name}", found[i * n : i * n + n], due
    elif len(regions) == 1:
        yield f"around jit, {next(iter(regions))}", found, due
    else:
        for name in regions:
            yield from outside_cases(call, {name: regions[name]}, xs, due)


def cached_cases(call: Call, xs: list[Any], due: Arrays) -> Grid:
    """A compiled function is called outside a scope and inside, twice each, and left again."""
    own = eager.numbers(gradients(call.f)(*xs))
    for way, f in {
        "cached, grad inside jit": rg.jit(gradients(call.f)),
        "cached, jit inside grad": gradients(rg.jit(call.f)),
    }.items():
        for turn in (False, True, True, False, True):
            if turn:
                with in_force(call.op_type):
                    yield f"{way}: in the scope", attempt(f, *xs), due
            else:
                yield f"{way}: out of it", attempt(f, *xs), own


# -- graph mode ------------------------------------------------------------------------------------


def graph_cases(call: Call, quick: bool) -> Grid:
    """Overrides of a graph and of eager mode, first and second order, in branches and loops."""
    for hidden in (False, True):
        for name in GRAPHS if not quick else ("alone", "cond"):
            for jit in (False,) if quick or hidden else (False, True):
                where = f"graph{', sizes hidden' * hidden}{', compiled' * jit}: {name}"
                found = attempt(in_graph, call, name, hidden, jit)
                if isinstance(found, Exception):
                    yield where, found, call.slopes(call.xs)
                else:
                    yield f"{where}, first", found[0], call.slopes(call.xs)
                    yield f"{where}, second", found[1], call.second()


def in_graph(call: Call, name: str, hidden: bool, jit: bool) -> tuple[Arrays, Arrays]:
    """First and second derivatives, built in one graph."""
    with tf.Graph().as_default() as graph:
        shapes = [[None] * x.ndim if hidden else list(x.shape) for x in call.xs]
        xs = [tf.placeholder(x.dtype, s) for x, s in zip(call.xs, shapes, strict=True)]
        with graph.gradient_override_map({call.op_type: sentinel}):
            y = GRAPHS[name](call, xs)
        dxs = tf.gradients(y, xs, unconnected_gradients="zero")
        parts = [weighed_like(dx, x) for dx, x in zip(dxs, call.xs, strict=True)]
        ddxs = tf.gradients(functools.reduce(rg.add, parts), xs, unconnected_gradients="zero")
        with tf.Session(**({"jit": True} if jit else {})) as session:
            feed = dict(zip(xs, call.xs, strict=True))
            return tuple(session.run([list(dxs), list(ddxs)], feed))  # pyright: ignore


def weighed_like(y: Any, value: np.ndarray) -> Any:
    """As `weighed`, of a symbolic tensor whose value has this shape."""
    y = rg.asarray(y)
    parts = [(rg.real(y), 0.7), (rg.imag(y), 0.3)] if value.dtype.kind == "c" else [(y, 1.0)]
    return functools.reduce(
        rg.add, [rg.sum(rg.astype(p, np.float64) * (weights(value) * k)) for p, k in parts]
    )


def graph_f(call: Call, xs: Sequence[Any]) -> Any:
    with masked():
        found = [rg.asarray(x) for x in xs]
    ys = call.apply(*found)
    with masked():
        parts = [weighed_like(y, value) for y, value in zip(ys, call.ys, strict=True)]
        return tf.convert_to_tensor(functools.reduce(rg.add, parts))


def graph_while(call: Call, xs: Sequence[Any]) -> Any:
    turn = lambda i, t: (i + 1, plus(t, graph_f(call, xs)))  # noqa: E731
    return tf.while_loop(lambda i, t: i < 1, turn, [0, tf.constant(0.0, tf.float64)])[1]


def graph_cond(call: Call, xs: Sequence[Any]) -> Any:
    yes = tf.placeholder_with_default(True, [])
    return tf.cond(yes, lambda: graph_f(call, xs), lambda: tf.constant(0.0, tf.float64))


def graph_returned(call: Call, xs: Sequence[Any]) -> Any:
    y, yes = graph_f(call, xs), tf.placeholder_with_default(True, [])
    return tf.cond(yes, lambda: y, lambda: y)


def graph_carried(call: Call, xs: Sequence[Any]) -> Any:
    y = graph_f(call, xs)
    return tf.while_loop(
        lambda i, t: i < 1, lambda i, t: (i + 1, y), [0, tf.constant(0.0, tf.float64)]
    )[1]


def graph_custom(call: Call, xs: Sequence[Any]) -> Any:
    """A custom gradient that differentiates the model again."""

    def custom(*xs: Any) -> Any:
        y = graph_f(call, xs)
        return y, lambda dy: rg.grads(lambda *zs: rg.asarray(graph_f(call, zs)))(list(xs), dy)

    return tf.custom_gradient(custom)(*xs)


GRAPHS: dict[str, Function] = {
    "alone": graph_f,
    "cond": graph_cond,
    "while_loop": graph_while,
    "returned by cond": graph_returned,
    "returned by while_loop": graph_carried,
    "tape of checkpoint": lambda call, xs: rg.checkpoint(lambda *xs: rg.asarray(graph_f(call, xs)))(
        *map(rg.asarray, xs)
    ),
    "custom_gradient, differentiated again": graph_custom,
}


# -- jobs ------------------------------------------------------------------------------------------

MODES: dict[str, Function] = {
    "numpy": lambda call, quick: eager_cases(call, "numpy", quick),
    "torch": lambda call, quick: eager_cases(call, "torch", quick),
    "jax": lambda call, quick: eager_cases(call, "jax", quick),
    "graph": graph_cases,
    "jit": jit_cases,
}


def jobs() -> list[str]:
    """`Sign/numpy`: an op type in a mode."""
    return [f"{op_type}/{mode}" for mode in MODES for op_type in op_types()]


def run(job: str, quick: bool = False) -> list[Verdict]:
    """What became of the rule for one op type, in all contexts of a mode."""
    op_type, mode = job.split("/")
    call = call_of(op_type)
    if call is None or not works(call, mode):
        return []
    return [judged(f"{job} {context}", got, due) for context, got, due in MODES[mode](call, quick)]


def works(call: Call, mode: str) -> bool:
    """Whether the op itself runs there (torch lacks some kernels)."""
    library = "jax" if mode in ("jit", "jax") else mode if mode == "torch" else "numpy"
    return not isinstance(attempt(call.apply, *data(call, library)), Exception)


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """What a case has in common with others, and what tells it from them."""
    job, _, context = case.partition(" ")
    op_type, _, mode = job.partition("/")
    return f"{mode} {context}", op_type
