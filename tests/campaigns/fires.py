"""F1: a rule in force fires or raises, op type by op type, wherever the op is created.

Each op type is called under a rule whose answer is known without the library (`op_calls`), in
every region, in graphs and in compiled functions. The result in a context is then
*delivered* (these numbers), *refused* (an error of regrad's), *silent* (other numbers) or *broken*
(another error).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import regrad as rg
import regrad.v1 as tf
from regrad.core.state import current, masked
from tests.campaigns import graphs
from tests.campaigns.op_calls import (
    Arrays,
    Call,
    Function,
    call_of,
    in_force,
    lost,
    op_types,
    sentinel,
    weighed,
    weights,
)
from tests.campaigns.regions import (
    REGIONS,
    RETURNS,
    RUNNERS,
    SHORT,
    beside,
    masking,
    nested,
    pairs,
    plus,
    plus_paths,
    returned,
)
from tests.campaigns.verdicts import Verdict, judged
from tests.helpers import sample_runs as runs

TITLE = "rules in every context"

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
    return [rg.asarray(runs.arrays_of(library, x)) for x in call.xs]


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
    own = runs.numbers(gradients(call.f)(*xs))

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
    own = runs.numbers(gradients(call.f)(*xs))
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

    def built(*xs: Any) -> Any:
        with tf.get_default_graph().gradient_override_map({call.op_type: sentinel}):
            y = GRAPHS[name](call, xs)
        dxs = tf.gradients(y, xs, unconnected_gradients="zero")
        parts = [weighed_like(dx, x) for dx, x in zip(dxs, call.xs, strict=True)]
        ddxs = tf.gradients(functools.reduce(rg.add, parts), xs, unconnected_gradients="zero")
        return [list(dxs), list(ddxs)]

    return tuple(graphs.in_graph(built, call.xs, hidden, jit))  # pyright: ignore


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
    "alone": graph_f, "cond": graph_cond, "while_loop": graph_while,
    "returned by cond": graph_returned, "returned by while_loop": graph_carried,
    "tape of checkpoint": lambda call, xs: rg.checkpoint(lambda *xs: rg.asarray(graph_f(call,
        xs)))(*map(rg.asarray, xs)),
    "custom_gradient, differentiated again": graph_custom,
}  # fmt: skip


# -- jobs ------------------------------------------------------------------------------------------

MODES: dict[str, Function] = {
    "numpy": lambda call, quick: eager_cases(call, "numpy", quick),
    "torch": lambda call, quick: eager_cases(call, "torch", quick),
    "jax": lambda call, quick: eager_cases(call, "jax", quick), "graph": graph_cases,
    "jit": jit_cases,
}  # fmt: skip


QUICK = {"numpy": 1, "torch": 6, "graph": 12, "jax": 24, "jit": 24}


def jobs(quick: bool = False) -> list[str]:
    """`Sign/numpy`: an op type in a mode; quick: all of them in eager mode, and some in others."""
    steps = QUICK if quick else dict.fromkeys(MODES, 1)
    return [f"{t}/{mode}" for mode, step in steps.items() for t in op_types()[::step]]


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
