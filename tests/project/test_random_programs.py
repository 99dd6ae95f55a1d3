"""Random programs mean the same in every mode; and faults that are put in are found.

A minute of them on one core, by fixed seeds. `make fuzz` runs others, for as long as it is told.

Faults that were put into `src/regrad` by hand, and found within the minute by these seeds: the body
of a loop or branch that runs without the overrides around it (found in four modes; small, it is an
override of `Sign` around one `cond`), a rule whose gradients are doubled ("twin": `sign` under an
override), and a compiled function whose shortcut keeps the first value of a Variable ("jit of
grad": one statement that reads two Variables).
"""

import random
import re

import numpy as np
import pytest

import regrad as rg
from regrad.autodiff import custom_calls
from regrad.transforms import steps
from tests.campaigns import agreement, fuzz, in_jax, nested, programs
from tests.campaigns.agreement import Task, differences
from tests.campaigns.nested import Expr
from tests.campaigns.programs import Program, Stmt
from tests.campaigns.sources import Source
from tests.campaigns.verdicts import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT

pytestmark = pytest.mark.filterwarnings("ignore")

SEED = 0
# The number of programs in each mode: what the mode costs decides.
COUNTS = {
    "twin": 40, "differences": 40, "torch": 70, "checkpoint": 60, "vmap": 60,
    "vmap of grad": 60, "jvp": 40, "graph": 50, "jax": 13, "jit of grad": 35, "grad of jit": 22,
    "jvp of jit": 14, "jit of checkpoint": 16, "jit of vmap": 16, "regrad.torch": 80,
    "regrad.jax": 30,
}  # fmt: skip


@pytest.mark.parametrize("mode", agreement.NAMES)
def test_random_programs(mode):
    found = agreement.search(mode, 0, COUNTS[mode])
    assert found[DELIVERED] >= 0.6 * found.total(), found  # (vmap refuses assignments)


# -- faults that are put in ------------------------------------------------------------------------


def searched(mode, count=COUNTS["twin"]):
    """What a search in one mode shows of the first fault."""
    with pytest.raises(AssertionError) as caught:
        agreement.search(mode, SEED, count)
    return str(caught.value)


def test_a_wrong_rule_is_found_and_its_program_made_small(monkeypatch):
    tanh = rg.find_op("Tanh")
    monkeypatch.setattr(tanh, "rule", tanh.rule)  # so that it is put back
    rg.gradient("Tanh", overwrite=True)(lambda dy, y: dy * (1 - y * y) * 1.01)
    text = searched("differences")
    program = text[text.index("import numpy") : text.index("Once more")]
    function = program[program.index("def f(") :]
    assert function.count("rg.") <= 4 and "rg.tanh" in function
    exec(program, space := {})
    assert space["f"](*map(rg.asarray, space["xs"])).shape == ()
    seed = re.search(r"--mode 'differences' --seed (\d+) --cases 1", text)[1]
    assert fuzz.main(["--mode", "differences", "--seed", seed, "--cases", "1"]) == 1


def test_a_search_of_nothing_wrong_ends_after_its_cases(capsys):
    assert fuzz.main(["--mode", "checkpoint", "--seed", "0", "--cases", "2"]) == 0
    assert capsys.readouterr().out.startswith("The first seed: 0\n")


@pytest.mark.slow
def test_a_custom_function_that_is_looked_through_is_found(monkeypatch):
    monkeypatch.setattr(rg, "custom_grad", lambda f: lambda *xs: f(*xs)[0])
    assert searched("twin").startswith(("silent", "broken"))


# -- what explains another number ------------------------------------------------------------------


def program(*texts, x=(0.5, -1.25, 0.75)):
    """A program whose last statement is its result, each of the one before."""
    stmts = []
    for i, text in enumerate(texts):
        uses = (f"t{i - 1}",) if i else ("x0",)
        lines = (f"t{i} = " + text.format(a=uses[0]),)
        stmts.append(Stmt(f"t{i}", "op", lines, lines, uses))
    return Task(Program((("x0", np.array(x)),), tuple(stmts), (f"t{len(texts) - 1}",)), 1)


SIGNED = (-0.7, 0.5)
NUMBERS = {  # what another number is explained by, the statements of a program, and x
    "rounding decides": (("rg.nn.softmax(rg.sign({a}))", "rg.floor(rg.sum({a}))"), {}),
    "": (("rg.nn.softmax(rg.sign({a}))", "rg.floor(rg.sum({a}) + 0.5)"), {}),
    "the sign of a zero decides": (
        ("rg.nn.relu({a})", "rg.copysign(rg.ones(2), {a})"), {"x": SIGNED}),
    "no sign": (("rg.nn.relu({a})", "{a} * {a}"), {"x": SIGNED}),
    "another factor": (("rg.sin({a})",), {}),
}  # fmt: skip


@pytest.mark.parametrize("why", NUMBERS)
def test_what_explains_another_number(monkeypatch, why):
    run = agreement.MODES["checkpoint"]
    other = (lambda y: y * 1.001) if why == "another factor" else lambda y: y + 1.0
    wrong = lambda f, xs: [other(y) for y in run(f, xs)]  # noqa: E731
    monkeypatch.setitem(agreement.MODES, "checkpoint", wrong)
    texts, given = NUMBERS[why]
    found = agreement.compared(program(*texts, **given), "checkpoint")
    assert found == (EXPLAINED, why) if "decides" in why else found[0] == SILENT


@pytest.mark.parametrize(("text", "x", "outcome"), [
    ("rg.abs({a} * 2.0) + {a} * abs({a})", (0.0, 1.0), DELIVERED),
    ("rg.floor({a})", (1.0, 0.5), EXPLAINED),
    ("rg.nn.relu({a})", (0.0, 0.5), EXPLAINED),
    ("rg.abs({a})", (1e-4, 1.0), DELIVERED),
    ("rg.stop_gradient({a}) * {a}", (1.0, 0.5), SILENT),
    ("rg.stop_gradient(rg.abs({a}))", (1.0, 0.5), SILENT),
])  # fmt: skip
def test_kinks_are_explained_and_nothing_else(text, x, outcome):
    assert differences(program(text, x=x))[0] == outcome


def test_what_rounding_decides_is_explained():
    task = program("rg.sign(rg.sin({a}) - np.sin(0.3)) + {a}", x=(0.3,))
    value = [np.array(2.5 * 1.3), np.array([2.5])]
    assert agreement.jumps(task, value, task.reference)
    assert not agreement.jumps(program("rg.sin({a})"), value, program("rg.sin({a})").reference)


# -- nested programs -------------------------------------------------------------------------------


CONSTRUCTS = {**nested.VECTORS, **nested.NUMBERS}
X, Y = np.array([0.5, -1.25, 0.75]), np.array([1.1, 0.3, -0.6])


def writer(seed):
    return nested.Writer(Source(random.Random(seed).randint))


def task(*exprs, order=1):
    stmts = tuple(programs.nested_stmt(f"t{i}", e) for i, e in enumerate(exprs))
    return Task(Program((("x0", X), ("x1", Y)), stmts, (f"t{len(exprs) - 1}",), True), order)


def text(*parts, kind="op"):
    return Expr(parts, kind)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_each_construct_alone_and_around_itself(name):
    write, names = writer(3), {"x0": "v", "x1": "v"}
    inner = write.filled(name, CONSTRUCTS[name], names, 0)
    outer = write.filled(name, CONSTRUCTS[name], names, 0)
    both = task(inner, text("(", outer, ") * t0"))
    second = Task(both.program, 2)  # (its value is made of the gradients)
    assert agreement.compared(second, "twin") == (DELIVERED, ""), both.program.text()
    assert agreement.compared(both, "jvp") == (DELIVERED, ""), both.program.text()


def test_each_construct_occurs_within_others():
    found, within = set(), set()
    for seed in range(400):
        expr = writer(seed).expr("v", {"x0": "v", "x1": "s"}, 3)
        found |= expr.kinds
        within |= set().union(*[e.kinds for e in expr.inner])
    assert found == within == {"op", *CONSTRUCTS}


def test_programs_are_those_of_their_seed():
    texts = [agreement.seeded("jvp", seed)[0].task.program.text() for seed in (5, 5, 6, 7)]
    assert len(set(texts)) == 3


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
    text("rg.fori_loop(0, 2, lambda i, c: ", text("under('Sin', lambda: ",
        text("closing(lambda p: rg.sin(p) * p, 0.5)(c + t0)", kind="custom_grad, closing"), ")",
        kind="override"), ", x1)", kind="fori_loop"),
)  # fmt: skip


@pytest.mark.slow
def test_a_rule_that_a_gradient_function_loses_is_found(monkeypatch):
    assert agreement.compared(task(*GRADIENT_IN_A_GRADIENT), "twin") == (DELIVERED, "")
    monkeypatch.setattr(custom_calls, "run_held", lambda scopes, f, *args: f(*args))
    assert agreement.compared(task(*GRADIENT_IN_A_GRADIENT), "twin")[0] == SILENT


def test_refusals_that_are_known():
    compiled = task(text("rg.jit(lambda p: p * 2.0)(x0)", kind="jit"))
    assert agreement.compared(compiled, "torch")[0] == REFUSED
    assert agreement.refusal(compiled.program, "") == BROKEN
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
