"""One body object in each construct, while what decides about its gradient changes.

JAX keeps what it has traced by function object. So each construct is called with the same objects
in one process, under one map of overrides and another, under none, and under the first one again:
what a trace has bound for one of them must not serve another.
"""

from __future__ import annotations

import itertools
import types
from contextlib import nullcontext

import numpy as np
import pytest

import regrad as rg

pytest.importorskip("jax")

VALUES = np.array([0.5, -1.0], np.float32)
X = rg.tensor(VALUES)


def constructs(body):
    """Functions that run the body, and how often; the objects inside are the same in each call."""
    step = lambda c, _: (body(c), None)  # noqa: E731
    steps = lambda c: rg.scan(step, c, length=2)[0]  # noqa: E731
    other = lambda x: -body(-x)  # noqa: E731
    positive = lambda x: rg.sum(x) > -10  # noqa: E731
    goes_on = lambda c: c[1] < 2  # noqa: E731
    counted = lambda c: (body(c[0]), c[1] + 1)  # noqa: E731
    indexed = lambda i, c: body(c)  # noqa: E731
    in_scan = lambda c, _: (rg.cond(positive(c), body, other, c), None)  # noqa: E731
    inner, outer = rg.jit(body), rg.jit(steps)
    recomputed, batched = rg.checkpoint(body), rg.vmap(body)
    return {
        "scan": (steps, 2),
        "scan that computes again": (lambda x: rg.scan(step, x, length=2, checkpoint=True)[0], 2),
        "cond": (lambda x: rg.cond(positive(x), body, other, x), 1),
        "the other branch": (lambda x: rg.cond(rg.sum(x) > 10, other, body, x), 1),
        "while_loop": (lambda x: rg.while_loop(goes_on, counted, (x, 0), max_steps=3)[0], 2),
        "fori_loop": (lambda x: rg.fori_loop(0, 2, indexed, x), 2),
        "map": (lambda x: rg.map(body, x), 1),
        "vmap": (batched, 1),
        "checkpoint": (recomputed, 1),
        "jit": (inner, 1),
        "jit of scan": (outer, 2),
        "cond in scan": (lambda x: rg.scan(in_scan, x, length=2)[0], 2),
        "vmap of checkpoint": (rg.vmap(recomputed), 1),
        "checkpoint of jit of scan": (rg.checkpoint(outer), 2),
    }


def roads(f):
    """Ways to a gradient of f, of which each object is used for all calls."""
    total = lambda x: rg.sum(f(x))  # noqa: E731
    gradient = rg.grad(total)
    compiled, forward = rg.jit(gradient), rg.jit(total)
    return {
        "eager": gradient,
        "jit of grad": compiled,
        "grad of jit": rg.grad(forward),
        "jit anew": lambda x: rg.jit(rg.grad(total))(x),
        "jit of jit": rg.jit(lambda x: compiled(x)),
        "jit of grad of jit": rg.jit(rg.grad(forward)),
        "grad of grad": rg.jit(rg.grad(lambda x: rg.sum(gradient(x) * x))),
        "forward mode": lambda x: rg.jvp(f, (x,), (rg.ones_like(x),))[1],
    }


def expected(way, factor, times):
    """The gradient where the rule gives dy times a factor, by plain arithmetic."""
    return np.full(2, factor**times)


def derivative(way, times):
    """Derivatives of tanh of itself, by differences."""

    def first(x):
        up, down = x + 1e-4, x - 1e-4
        for _ in range(times):
            up, down = np.tanh(up), np.tanh(down)
        return (up - down) / 2e-4

    x = VALUES.astype(np.float64)
    if way != "grad of grad":
        return first(x)
    return ((x + 1e-3) * first(x + 1e-3) - (x - 1e-3) * first(x - 1e-3)) / 2e-3


CONSTRUCTS = constructs(rg.tanh)
WAYS = [(name, way) for name in CONSTRUCTS for way in roads(rg.tanh)]
A = {"Tanh": lambda dy: dy * 5.0}
B = {"Tanh": lambda dy: dy * 7.0}
FACTORS = {id(A): 5.0, id(B): 7.0}


def under(rules):
    return nullcontext() if rules is None else rg.gradient_override_map(rules)


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_one_body_under_one_map_and_another(name, way):
    f, times = CONSTRUCTS[name]
    road = roads(f)[way]
    for rules in (A, B, None, A, A, None, None, B, B, A):
        with under(rules) as used:
            dx = road(X).numpy()
        if rules is None:
            np.testing.assert_allclose(dx, derivative(way, times), rtol=1e-3)
        else:
            np.testing.assert_allclose(dx, expected(way, FACTORS[id(rules)], times))
            assert used is not None
            used.assert_fired("Tanh")


# -- what a rule reaches ---------------------------------------------------------------------------

GLOBAL = 5.0


class Scale(rg.Module):
    """A module whose Variable a rule reads."""

    def __init__(self):
        self.k = rg.Variable(np.float32(5.0))


def rules():
    """Rules that give dy times 5, each with a function after which it gives dy times a number."""
    k = 5.0

    def rebind(to):
        nonlocal k
        k = to

    def rebind_global(to):
        global GLOBAL
        GLOBAL = to

    listed_default = [5.0]
    listed, named, held = [5.0], {"k": 5.0}, types.SimpleNamespace(k=5.0)
    array, default = np.array(5.0, np.float32), lambda dy, k=listed_default: dy * k[0]
    variable, module, box = rg.Variable(np.float32(5.0)), Scale(), [rg.tensor(5.0)]
    return {
        "closure": (lambda dy: dy * k, rebind),
        "global": (lambda dy: dy * GLOBAL, rebind_global),
        "list in place": (lambda dy: dy * listed[0], lambda to: listed.__setitem__(0, to)),
        "dict in place": (lambda dy: dy * named["k"], lambda to: named.update(k=to)),
        "attribute": (lambda dy: dy * held.k, lambda to: setattr(held, "k", to)),
        "default in place": (default, lambda to: listed_default.__setitem__(0, to)),
        "array in place": (lambda dy: dy * array, lambda to: array.__setitem__((), to)),
        "Tensor in a list": (
            lambda dy: dy * box[0], lambda to: box.__setitem__(0, rg.tensor(float(to))),
        ),
        "Variable": (lambda dy: dy * variable.value, lambda to: variable.assign(np.float32(to))),
        "Variable of a module": (
            lambda dy: dy * module.k.value, lambda to: module.k.assign(np.float32(to)),
        ),
    }  # fmt: skip


CHANGES = [
    *itertools.product(CONSTRUCTS, ["closure", "Variable"]),
    *itertools.product(["scan"], rules()),
]


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
@pytest.mark.parametrize(("name", "change"), dict.fromkeys(CHANGES))
def test_a_rule_whose_closure_changes(name, change):
    """Within one scope, and in the next one with the same map."""
    f, times = CONSTRUCTS[name]
    for way in ("jit of grad", "grad of jit"):
        (rule, to), road = rules()[change], roads(f)[way]
        for factors in ((5.0, 3.0), (3.0, 5.0)):
            with rg.gradient_override_map({"Tanh": rule}):
                for factor in factors:
                    to(factor)
                    np.testing.assert_allclose(
                        road(X).numpy(), expected(way, factor, times), err_msg=way
                    )


# -- the default dtype -----------------------------------------------------------------------------


def of_default(x):
    return rg.ones((2,)) * rg.sum(rg.stop_gradient(x) > 0)


def dtypes():
    """Functions whose results have the default dtype."""
    positive = lambda x: rg.sum(x) > -10  # noqa: E731
    step = lambda c, _: (c, of_default(c))  # noqa: E731
    return {
        "scan": lambda x: rg.scan(step, x, length=2)[1],
        "cond": lambda x: rg.cond(positive(x), of_default, of_default, x),
        "map": lambda x: rg.map(of_default, rg.stack([x, x])),
        "vmap": lambda x: rg.vmap(of_default)(rg.stack([x, x])),
        "checkpoint": rg.checkpoint(of_default),
        "jit": rg.jit(of_default),
    }


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
@pytest.mark.parametrize("name", dtypes())
def test_the_default_dtype_is_switched(name):
    f = dtypes()[name]
    ways = {"once": rg.jit(f), "in a jit": rg.jit(lambda x: f(x)), "eager": f}
    changes = ["float32", "float64", "float64", "float32", "float64"]
    for (way, call), dtype in itertools.product(ways.items(), changes):
        with rg.default_dtype(dtype):
            assert call(X).dtype == dtype, way
