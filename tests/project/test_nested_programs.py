"""F5's nested programs: JAX runs them as well, every construct occurs, and faults are found."""

import random

import numpy as np
import pytest

import regrad as rg
from regrad.autodiff import custom_calls
from regrad.transforms import steps
from tests.campaigns import agreement, in_jax, nested, programs
from tests.campaigns.agreement import Task
from tests.campaigns.nested import Expr
from tests.campaigns.programs import Program
from tests.campaigns.verdicts import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT

pytestmark = pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")

CONSTRUCTS = {**nested.VECTORS, **nested.NUMBERS}
X, Y = np.array([0.5, -1.25, 0.75]), np.array([1.1, 0.3, -0.6])


def task(*exprs, order=1):
    stmts = tuple(programs.nested_stmt(f"t{i}", e) for i, e in enumerate(exprs))
    return Task(Program((("x0", X), ("x1", Y)), stmts, (f"t{len(exprs) - 1}",)), order)


def text(*parts, kind="op"):
    """An expression, in whose place x0 may stand."""
    return Expr(parts, "x0", kind)


def alone(name):
    """A construct with as little as possible in it, and once more around itself."""
    writer = nested.Writer(random.Random(3))
    kind = "v" if name in nested.VECTORS else "s"
    inner = writer.filled(name, CONSTRUCTS[name], kind, {"x0": "v", "x1": "v"}, 0)
    return writer.filled(name, CONSTRUCTS[name], kind, {"x0": "v", "x1": "v"}, 0), inner


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_each_construct_alone(name):
    outer, inner = alone(name)
    both = task(inner, text("(", outer, ") * t0"))
    second = Task(both.program, 2)  # (its value is made of the gradients)
    assert agreement.compared(second, "numpy's twin") == (DELIVERED, ""), both.program.text()
    assert agreement.compared(both, "jvp") == (DELIVERED, ""), both.program.text()


def test_each_construct_occurs_within_others():
    found, within = set(), set()
    for seed in range(400):
        expr = nested.Writer(random.Random(seed)).expr("v", {"x0": "v", "x1": "s"}, 3)
        found |= expr.kinds
        within |= set().union(*[e.kinds for e in expr.inner])
    assert found == within == {"op", *CONSTRUCTS}


def test_every_third_program_is_nested():
    assert [programs.made(seed).is_nested for seed in range(6)] == [False, False, True] * 2
    assert programs.made(5).text() == programs.made(5).text()


@pytest.mark.parametrize("seed", [905, 908, 911, 914])
def test_a_slice_of_the_nested_programs(seed):
    t = Task(programs.made(seed), 2)
    found = [check(t)[0] for _, check in agreement.checks(t, ["checkpoint", "jvp"])]
    assert set(found) <= {DELIVERED, EXPLAINED}


def test_a_false_refusal_is_found(monkeypatch):
    def enter(self, x):
        """The replay around is not told which Tensor stands for x now."""
        now = self.env.get(x._id)
        if now is None:
            return self.region.enter(x)
        capture = self.region.swap(self.outside)
        inner = self.region.enter(now)
        self.region.swap(capture)
        if capture is not self.outside:
            capture.source(x, inner)
        return inner

    t = task(
        text("saving(lambda p, q: rg.sin(p) * q, 0.7)(x1, x1)", kind="custom_grad"),
        text("rg.scan(lambda c, r: (c * r, c), rg.sum(t0), x0)[1] + rg.sum(t0)", kind="scan"),
    )
    assert agreement.compared(t, "jvp of jit") == (DELIVERED, "")
    monkeypatch.setattr(steps.ReplayRegion, "enter", enter)
    outcome, detail = agreement.compared(t, "jvp of jit")
    assert outcome == BROKEN and "TraceError" in detail


GRADIENT_IN_A_GRADIENT = (
    text("rg.checkpoint(lambda p: rg.cos(p))(x0)", kind="checkpoint"),
    text(
        "rg.fori_loop(0, 2, lambda i, c: ",
        text(
            "under('Sin', lambda: ",
            text("closing(lambda p: rg.sin(p) * p, 0.5)(c + t0)", kind="custom_grad, closing"),
            ")",
            kind="override",
        ),
        ", x1)",
        kind="fori_loop",
    ),
)


def test_a_rule_that_a_gradient_function_loses_is_found(monkeypatch):
    t = task(*GRADIENT_IN_A_GRADIENT)
    twin = dict(agreement.checks(t, []))["twin"]
    assert twin(t) == (DELIVERED, "")
    monkeypatch.setattr(custom_calls, "run_held", lambda scopes, f, *args: f(*args))
    t = task(*GRADIENT_IN_A_GRADIENT)
    outcome, detail = twin(t)
    assert outcome == SILENT
    small = agreement.small(t, twin, detail)
    assert "under('Sin'" in small and "closing(lambda" in small
    assert "checkpoint" not in small.partition("def f(")[2]
    exec(small.partition("\n")[2], space := {})
    assert space["f"](*map(rg.asarray, space["xs"])).shape == ()


def test_a_custom_function_that_is_looked_through_is_found(monkeypatch):
    t = task(*GRADIENT_IN_A_GRADIENT)
    monkeypatch.setattr(rg, "custom_grad", lambda f: lambda *xs: f(*xs)[0])
    assert agreement.compared(t, "numpy's twin")[0] == SILENT


def test_refusals_that_are_known():
    compiled = task(text("rg.jit(lambda p: p * 2.0)(x0)", kind="jit"))
    assert agreement.compared(compiled, "torch")[0] == REFUSED
    assert agreement.refusal(compiled.program, "numpy") == BROKEN
    assert agreement.refusal(task(text("rg.sin(x0)")).program, "torch") == BROKEN


def test_the_twin_knows_nothing_of_regrad():
    assert "regrad" not in {
        (getattr(value, "__module__", "") or "").partition(".")[0]
        for value in vars(in_jax).values()
    }


def test_the_twin_by_hand():
    def f(x):
        with in_jax.gradient_override_map({"Sin": lambda dy, x: dy * 3.0 * x}):
            y = in_jax.sin(x)
        half = in_jax.custom_grad(lambda x: (in_jax.cos(x), lambda dy: [0.5 * dy * x]))
        return in_jax.sum(y + half(x) + in_jax.sin(x))

    _, dx = in_jax.values_and_gradients(f, [X], 1)
    np.testing.assert_allclose(dx, 3.5 * X + np.cos(X))
    _, dx = in_jax.values_and_gradients(f, [X], 2)  # weighed by cos(0), cos(1), cos(2)
    np.testing.assert_allclose(dx, (3.5 - np.sin(X)) * np.cos(np.arange(3)))
