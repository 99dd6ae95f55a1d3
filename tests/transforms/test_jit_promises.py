"""A rule in force is delivered or refused in every mode, and never skipped without a word.

A grid over op types and contexts. Each op type gets a rule whose answer nobody could mistake:
3x + 7, whatever arrives. What a context gives is compared with plain eager mode under the same
rule: the same numbers are *delivered*, an error of regrad's is *refused*, anything else *silent*.
"""

import contextlib
import functools
import gc
from typing import Any, NamedTuple

import numpy as np
import pytest

import regrad as rg
from regrad.core.state import LIVE, current, masked
from regrad.errors import RegradError
from tests.helpers import sample_runs as runs


def sentinel(op, *dys):
    """A rule for any op type: 3x + 7 for each float input, whatever arrives."""
    return [3 * x + 7 if x.dtype.kind in "fc" else None for x in op.inputs]


def in_force(*op_types):
    return rg.gradient_override_map(dict.fromkeys(op_types, sentinel))


class Case(NamedTuple):
    """A function of float Tensors to a scalar that creates an op of this type."""

    op_type: str
    f: Any
    xs: list[rg.Tensor]

    def __repr__(self) -> str:
        return self.op_type


def as_float(y):
    """Bools and integers as floats, so that a rule for what made them is on a path."""
    return y if y.dtype.kind in "fc" else rg.astype(y, np.float64)


def case_of(op_type, row):
    arrays = runs.inputs_of(row, "numpy")
    places = [i for i, a in enumerate(arrays) if runs.is_float(a)]
    rest = {i: rg.asarray(a) for i, a in enumerate(arrays) if i not in places}

    def f(*floats):
        given = rest | dict(zip(places, floats, strict=True))
        ys = runs.outputs(row.f(*[given[i] for i in range(len(arrays))]))
        return runs.weighted_sum([as_float(y) for y in ys])

    return Case(op_type, f, [rg.asarray(arrays[i]) for i in places])


def gradients(f):
    """The gradients by all arguments, zeros where nothing is connected."""
    return lambda *xs: rg.grads(f, unconnected="zero")(list(xs))


def eagerly(case):
    return runs.numbers(gradients(case.f)(*case.xs))


def differ(a, b):
    """Whether two lists of gradients are told apart by the test."""
    return any(
        x.shape != y.shape or not np.allclose(x, y, rtol=1e-7, atol=1e-7, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


@functools.cache
def cases():
    """One case for each op type through which a rule can be told from the op's own."""
    found = {}
    for row in sorted(runs.ROWS, key=lambda r: -r.order):
        for op_type in {rg.find_op(t).type for t in row.covers} - found.keys():
            case = case_of(op_type, row)
            if not case.xs or not all(x.size for x in case.xs):
                continue
            with in_force(op_type):
                due = eagerly(case)
            if differ(due, eagerly(case)):
                found[op_type] = case
    return sorted(found.values(), key=lambda case: case.op_type)


# -- contexts --------------------------------------------------------------------------------------
#
# Each turns a function of Tensors to a scalar into one of the same value and gradients, by way of
# a region. What it does for itself is masked, so that only ops of f are under the rule. A rule that
# ignores what arrives fires as often as the op ran, so f runs once, or elsewhere on constants.


def masking(f):
    """f, whose ops no override binds."""

    @functools.wraps(f)
    def run(*args):
        with masked():
            return f(*args)

    return run


ZERO = np.float64(0.0)
first, plus = masking(lambda y: y[0]), masking(lambda a, b: a + b)
nothing = masking(lambda *xs: rg.asarray(ZERO))
# Two examples: what is differentiated, and the same numbers as constants.
examples = masking(lambda xs: [rg.stack([x, rg.stop_gradient(x)]) for x in xs])


@masking
def flag_of(x, value):
    """True or False, but traced if x is."""
    seen = rg.isnan(rg.stop_gradient(x)).sum()
    return rg.equal(seen, seen) if value else rg.not_equal(seen, seen)


def vmapped(f):
    return lambda *xs: first(rg.vmap(f)(*examples(xs)))


def vmapped_at_last(f):
    """Along the last axis, with a constant that is the same for all."""

    def run(*xs):
        batch = masking(lambda: [rg.moveaxis(x, 0, -1) for x in examples(xs)])()
        g = rg.vmap(lambda one, xs: f(*xs), in_axes=(None, -1))
        return first(g(rg.asarray(np.float64(1.0)), batch))

    return run


def scanned(f, **options):
    """In the first of two steps; the second gets the constants."""

    def run(*xs):
        step = lambda total, row: (plus(total, f(*row)), None)  # noqa: E731
        total, _ = rg.scan(step, ZERO, examples(xs), **options)
        other = masking(lambda: rg.stop_gradient(f(*map(rg.stop_gradient, xs))))()
        return masking(lambda: total - other)()

    return run


def scanned_ys(f):
    """By the stacked results."""
    return lambda *xs: first(rg.scan(lambda c, row: (c, f(*row)), None, examples(xs))[1])


def scanned_closure(f):
    """Over what the step closes over."""
    return lambda *xs: rg.scan(lambda total, _: (plus(total, f(*xs)), None), ZERO, length=1)[0]


def branched(f):
    return lambda *xs: rg.cond(flag_of(xs[0], True), f, nothing, *xs)


def repeated(f):
    def run(*xs):
        less = masking(lambda pair: pair[0] < 1.0)
        body = lambda pair: (plus(pair[0], 1.0), plus(pair[1], f(*xs)))  # noqa: E731
        return rg.while_loop(less, body, (ZERO, ZERO), max_steps=2)[1]

    return run


CONTEXTS = {
    "alone": lambda f: f, "checkpoint": rg.checkpoint, "vmap": vmapped, "scan": scanned,
    "cond": branched, "while_loop": repeated,
}  # fmt: skip
MORE = CONTEXTS | {
    "jit": rg.jit, "vmap, last axis": vmapped_at_last,
    "scan, reverse": functools.partial(scanned, reverse=True),
    "scan, checkpoint": functools.partial(scanned, checkpoint=True), "scan, ys": scanned_ys,
    "scan, closure": scanned_closure,
    "map": lambda f: lambda *xs: first(rg.map(lambda row: f(*row), examples(xs))),
    "cond, second branch": lambda f: (  # over what it closes over
        lambda *xs: rg.cond(flag_of(xs[0], False), nothing, lambda *_: f(*xs), *xs)
    ),
    "fori_loop": lambda f: (
        lambda *xs: rg.fori_loop(0, 1, lambda i, total: plus(total, f(*xs)), ZERO)
    ),
    "jit of jit": lambda f: rg.jit(rg.jit(f)),
    "jit of vmap of scan": lambda f: rg.jit(vmapped(scanned(f))),
    "vmap of jit": lambda f: vmapped(rg.jit(f)),
    "scan of jit of cond": lambda f: scanned_ys(rg.jit(branched(f))),
    "checkpoint of jit": lambda f: rg.checkpoint(rg.jit(f)),
    "checkpoint of checkpoint": lambda f: rg.checkpoint(rg.checkpoint(f)),
    "vmap of vmap": lambda f: vmapped(vmapped(f)),
    "scan of scan": lambda f: scanned_ys(scanned_closure(f)),
    "vmap of while_loop of cond": lambda f: vmapped(repeated(branched(f))),
    "cond of checkpoint of scan": lambda f: branched(rg.checkpoint(scanned_ys(f))),
    "while_loop of scan": lambda f: repeated(scanned_ys(f)),
}  # fmt: skip


def second_order(f):
    """The gradient of a weighed sum of the gradients."""
    return gradients(lambda *xs: masking(runs.weighted_sum)(gradients(f)(*xs)))


# -- the grid --------------------------------------------------------------------------------------


def attempt(f, *xs):
    try:
        return f(*xs)
    except RegradError as error:
        return error


def inside(case, contexts):
    """The gradients in each context, taken inside one compiled function."""
    refused = {}

    def program(*xs):
        found = {name: attempt(gradients(c(case.f)), *xs) for name, c in contexts.items()}
        found["second order"] = attempt(second_order(case.f), *xs)
        refused.update((n, got) for n, got in found.items() if isinstance(got, RegradError))
        return {name: got for name, got in found.items() if name not in refused}

    found = attempt(rg.jit(program), *case.xs)
    if isinstance(found, RegradError):
        return dict.fromkeys([*contexts, "second order"], found)
    return found | refused


def outside(case, contexts):
    """The gradients of each context compiled, taken from outside; if one is refused, one by one."""
    n = len(case.xs)

    @rg.jit
    def program(*xs):
        groups = [xs[i : i + n] for i in range(0, len(xs), n)]
        return [c(case.f)(*group) for c, group in zip(contexts.values(), groups, strict=True)]

    total = lambda *xs: masking(runs.weighted_sum)(program(*xs))  # noqa: E731
    found = attempt(gradients(total), *case.xs * len(contexts))
    if not isinstance(found, RegradError):
        return {name: found[i * n : i * n + n] for i, name in enumerate(contexts)}
    if len(contexts) == 1:
        return dict.fromkeys(contexts, found)
    return {k: v for name in contexts for k, v in outside(case, {name: contexts[name]}).items()}


def faults(case, contexts, *, eager_too=False, may_refuse=False):
    """Where the gradients are not those of eager mode, in three ways: silent, or refused."""
    due = {name: eagerly(case) for name in contexts}
    due["second order"] = runs.numbers(second_order(case.f)(*case.xs))
    ways = {"grad inside jit": inside(case, contexts), "jit inside grad": outside(case, contexts)}
    if eager_too:
        ways["eager"] = {n: attempt(gradients(c(case.f)), *case.xs) for n, c in contexts.items()}
    found = {}
    for way, answers in ways.items():
        for name, got in answers.items():
            if isinstance(got, RegradError):
                found |= {} if may_refuse else {f"{way}: {name}": f"refused: {got}"}
            elif differ(runs.numbers(got), due[name]):
                found[f"{way}: {name}"] = f"silent: {runs.numbers(got)} instead of {due[name]}"
    return found


# Where a rule is refused: under jit its result has no shape, since the values decide it.
REFUSED = ["Where"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("case", cases(), ids=repr)
def test_every_op_type(case):
    with in_force(case.op_type):
        assert faults(case, CONTEXTS, may_refuse=case.op_type in REFUSED) == {}


DOZEN = [
    "AddV2", "Conv2D", "GatherV2", "MatMul", "Mul", "Pack", "Round", "Select", "Sign", "Softmax",
    "StridedSlice", "Sum", "Transpose",
]  # fmt: skip
SOME = [c for c in cases() if c.op_type in DOZEN]


@pytest.mark.slow
@pytest.mark.parametrize("case", SOME, ids=repr)
def test_every_context(case):
    with in_force(case.op_type):
        assert faults(case, MORE, eager_too=True) == {}


def test_the_grid_can_fail():
    case = next(c for c in SOME if c.op_type == "Sign")
    with in_force("Sign"):
        found = faults(case, {"alone": CONTEXTS["alone"], "dropped": masking}, eager_too=True)
    ways = ("grad inside jit", "jit inside grad", "eager")
    assert {*found} == {f"{way}: dropped" for way in ways}


@pytest.mark.slow
@pytest.mark.parametrize("op_type", ["Sign", "MatMul", "Mul"])
def test_custom_gradients_in_every_context(op_type):
    case = next(c for c in cases() if c.op_type == op_type)

    def f(*xs, save):
        save(list(xs))
        return case.f(*xs), lambda dy, saved: [3 * x + 7 for x in saved]

    custom = Case(f"custom {op_type}", rg.custom_grad(f), case.xs)
    assert differ(eagerly(custom), eagerly(case))
    assert faults(custom, MORE, eager_too=True) == {}


# -- scopes that come and go -----------------------------------------------------------------------


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("case", SOME, ids=repr)
@pytest.mark.parametrize("inside_first", [False, True])
def test_what_is_cached_does_not_carry_a_rule_in_or_out(case, inside_first):
    own, f = eagerly(case), rg.jit(case.f)
    ways = {
        "jit inside grad": gradients(f), "grad inside jit": rg.jit(gradients(case.f)),
        "jit of jit": gradients(rg.jit(f)), "checkpoint of jit": gradients(rg.checkpoint(f)),
        "scan of jit": gradients(scanned_ys(f)), "vmap of jit": gradients(vmapped(f)),
    }  # fmt: skip
    with in_force(case.op_type):
        due = eagerly(case)
    for in_scope in (inside_first, not inside_first) * 2:
        with in_force(case.op_type) if in_scope else contextlib.nullcontext() as used:
            found = {name: runs.numbers(f(*case.xs)) for name, f in ways.items()}
        if used:
            used.assert_fired()
        assert [n for n, got in found.items() if differ(got, due if in_scope else own)] == []


def test_inner_scopes_win_in_what_is_compiled():
    @rg.jit
    def f(x):
        y = rg.sign(x)
        with rg.gradient_override_map({"Sign": lambda dy: dy * 100.0}):
            return y + rg.sign(x)

    assert rg.grad(f)(rg.scalar(0.5)).item() == 100.0
    with rg.gradient_override_map({"Sign": lambda dy: dy * 10.0}):
        assert rg.grad(f)(rg.scalar(0.5)).item() == 110.0
    assert rg.grad(f)(rg.scalar(0.5)).item() == 100.0


def test_what_a_loop_closes_over_may_be_given_to_a_custom_function():
    tenfold = rg.custom_grad(lambda x: (x["x"] * x["k"], lambda dy: {"x": dy * 10.0}))
    step = lambda x: lambda total, _: (total + tenfold({"x": x, "k": 2.0}), None)  # noqa: E731
    f = lambda x: rg.scan(step(x), 0.0, length=3)[0]  # noqa: E731
    for g in (rg.grad(f), rg.jit(rg.grad(f)), rg.grad(rg.jit(f)), rg.grad(rg.checkpoint(f))):
        assert g(rg.scalar(1.0)).item() == 30.0


def test_nothing_is_left_open():
    assert current() is None
    gc.collect()
    assert not LIVE
