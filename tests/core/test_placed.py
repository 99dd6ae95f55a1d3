"""Rules in one place only: every kind of `where`, in every way to run a function."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, GradientError, NotFiredError, UnusedOverrideWarning
from tests.helpers.rows import refused, under

X = np.array([-0.7, 0.3, 1.1])
at, override, optional = rg.at, rg.gradient_override_map, rg.rules.optional


def times(factor):
    """A rule: the true gradient of Tanh, times a number."""
    return lambda dy, y: dy * (1 - y * y) * factor


SEVEN = times(7)


def one(x):
    return rg.tanh(x)


def two(x):
    return rg.tanh(2 * x) * 3


class Tanh(rg.Module):
    def __call__(self, x):
        return rg.tanh(x)


class Sum(rg.Module):
    """Two Modules of one class, in named scopes, and two functions."""

    def __init__(self):
        self.left, self.right = Tanh(), Tanh()

    def __call__(self, x):
        with rg.name_scope("block1"):
            y = one(x)
        with rg.name_scope("block2"), rg.name_scope("inner"):
            y = y + two(x)
        return y + self.left(x * 0.5) + self.right(x * 0.25)


NET = Sum()
# what the four calls of Tanh add to the gradient of the sum, by differences
PARTS = [np.tanh, lambda x: 3 * np.tanh(2 * x), lambda x: np.tanh(x / 2), lambda x: np.tanh(x / 4)]
SLOPES = [(f(X + 1e-6) - f(X - 1e-6)) / 2e-6 for f in PARTS]


def close(found, *numbers, i=...):
    """The gradient, or a part of it, is that of the four calls times these numbers."""
    expected = sum(k * slope for k, slope in zip(numbers, SLOPES, strict=False))
    np.testing.assert_allclose(np.asarray(found), expected[i], rtol=1e-4)


WHERES = {
    "path": (at("block1", "Tanh"), [7, 1, 1, 1]), "pattern": (at("block2.*", "Tanh"), [1, 7, 1, 1]),
    "any depth": (at("**.inner", "Tanh"), [1, 7, 1, 1]),
    "everything below": (at("block?", "Tanh"), [7, 7, 1, 1]),
    "function": (at(two, "Tanh"), [1, 7, 1, 1]), "Module": (at(NET.right, "Tanh"), [1, 1, 1, 7]),
    "method": (at(NET.__call__, "Tanh"), [7, 7, 7, 7]), "class": (at(Tanh, "Tanh"), [1, 1, 7, 7]),
    "predicate": (at(lambda site: site.path == "block1", "Tanh"), [7, 1, 1, 1]),
    "tuple": (at(("block1", NET.left), ("Tanh", "Sin")), [7, 1, 7, 1]),
    "nth": (at(what="Tanh", nth=2), [1, 1, 7, 1]),
    "nth of a class": (at(Tanh, "Tanh", nth=1), [1, 1, 1, 7]),
    "both": (at("block1", at("block1", "Tanh").what), [7, 1, 1, 1]),
}  # fmt: skip
MODES = {
    "eager": lambda f: f, "jit": rg.jit, "checkpoint": rg.checkpoint,
    "checkpoint in jit": lambda f: rg.jit(rg.checkpoint(f)), "vmap": rg.vmap,
    "vmap in jit": lambda f: rg.jit(rg.vmap(f)), "jit in vmap": lambda f: rg.vmap(rg.jit(f)),
    "cond": lambda f: lambda x: rg.cond(x.sum() > -9, f, lambda x: x, x),
    "scan": lambda f: lambda x: rg.scan(lambda c, x: (c, f(x)), 0.0, x)[1],
    "while": lambda f: lambda x: rg.while_loop(
        lambda c: c[0] < 1, lambda c: (c[0] + 1, f(x)), (0, x), max_steps=2)[1],
}  # fmt: skip
LOOPS = ("cond", "scan", "while")
COMPILED = {f"{name} in jit": lambda f, m=MODES[name]: rg.jit(m(f)) for name in LOOPS}


def gradient(f, rules, x=X):
    """The gradient of the sum of f, under rules or one key's rule, each of which has to run."""
    with override(rules if isinstance(rules, dict) else {rules: SEVEN}) as used:
        dx = rg.grad(lambda x: f(x).sum())(rg.tensor(x, dtype="float32"))
    used.assert_fired()
    return dx.numpy()


@pytest.mark.slow(but=27)
@pytest.mark.parametrize("mode", [*MODES, *COMPILED])
@pytest.mark.parametrize(("key", "numbers"), WHERES.values(), ids=WHERES)
def test_a_rule_holds_in_its_place_and_nowhere_else(mode, key, numbers):
    f = (MODES | COMPILED)[mode](NET)
    if key.nth is not None and mode in COMPILED:
        refused(lambda: gradient(f, key), GradientError, "cannot be counted in the body of a")
    elif key.nth is not None and mode == "scan":  # in Python: the first step has these calls
        close(gradient(f, key)[0], *numbers, i=0)
        close(gradient(f, key)[1:], 1, 1, 1, 1, i=slice(1, None))
    else:
        close(gradient(f, key), *numbers)


@pytest.mark.parametrize(("key", "numbers"), WHERES.values(), ids=WHERES)
def test_graphs(key, numbers):
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float64, [3])
        with override({key: SEVEN}) as used:
            y = NET(x)
        close(session.run(tf.gradients(y, x)[0], {x: X}), *numbers)
        used.assert_fired()


def test_scopes_of_tensorflow_count():
    with tf.Graph().as_default() as graph, tf.Session() as session:
        x = tf.placeholder(tf.float64, [3])
        with graph.gradient_override_map({at("a.b", "Tanh"): SEVEN}):
            with tf.name_scope("a"), rg.name_scope("b"):
                y = tf.tanh(x)
            with tf.name_scope("a"), tf.name_scope("b"):  # the graph calls it a_1
                y = y + tf.tanh(2 * x) * 3
        close(session.run(tf.gradients(y, x)[0], {x: X}), 7, 1)
        names = [op.name for op in graph.get_operations() if op.type == "Tanh"]
        assert names == ["a/b/Tanh", "a_1/b/Tanh"]


def test_a_loop_and_a_branch_of_a_graph():
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float64, [3])
        with override({at("block2.**", "Tanh"): SEVEN}) as used:
            y = tf.while_loop(lambda i, _: i < 1, lambda i, x: (i + 1, NET(x)), [0, x])[1]
            z = tf.cond(tf.reduce_sum(x) < 9, lambda: NET(x), lambda: x)
        for result in (y, z):
            close(session.run(tf.gradients(result, x)[0], {x: X}), 1, 7, 1, 1)
        used.assert_fired()


@rg.extend.deferrable
def waits(x) -> "Tensor":  # noqa: F821
    return rg.tanh(x) if x.shape[0] > 1 else x


def in_and_out(key):
    """The gradients of what waits for the run in the scope a, and outside of it."""
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float64, [None])
        with override({key: optional(SEVEN)}):
            with rg.name_scope("a"):
                y = waits(x)
            z = waits(x)
        return session.run([tf.gradients(r, x)[0] for r in (y, z)], {x: X})


@pytest.mark.parametrize("where", ["a", lambda site: site.path == "a"], ids=["path", "predicate"])
def test_what_waits_for_the_run_keeps_its_place(where):
    inside, outside = in_and_out(at(where, "Tanh"))
    close(inside, 7)
    close(outside, 1)
    nth = at(what="Tanh", nth=0)
    refused(lambda: in_and_out(nth), GradientError, "be counted in the function that waits")


# -- what was compiled -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["grad of jit", "jit of grad"])
def test_a_program_is_of_one_choice_of_places(way):
    f = lambda x: NET(x).sum()  # noqa: E731
    compiled = rg.grad(rg.jit(f)) if way == "grad of jit" else rg.jit(rg.grad(f))
    x = rg.tensor(X, dtype="float32")
    for _ in range(2):
        close(under({at("block1", "Tanh"): SEVEN}, compiled, x), 7, 1, 1, 1)
        close(under({at(NET.left, "Tanh"): SEVEN}, compiled, x), 1, 1, 7, 1)
        close(compiled(x), 1, 1, 1, 1)


def twice(x, f):
    with rg.name_scope("a"):
        y = f(x)
    with rg.name_scope("b"):
        return y + 3 * f(2 * x)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("where", "a", "b"), [("a", 7, 1), ("b", 1, 7), (twice, 7, 7)])
def test_a_program_is_of_one_path_and_one_caller(where, a, b):
    f = rg.jit(one)
    for _ in range(2):
        close(gradient(lambda x: f(x) + twice(x, f), at(where, "Tanh")), 1 + a, b)
    assert f.cache_info().traces == 3


@pytest.mark.parametrize("n", range(4))
def test_calls_are_counted_through_compiled_functions(n):
    f = rg.jit(lambda x: rg.tanh(x) + rg.tanh(2 * x) * 3)
    a, b, c, d = (7 if i == n else 1 for i in range(4))
    close(gradient(lambda x: f(x) + 10 * f(x), at(what="Tanh", nth=n)), a + 10 * c, b + 10 * d)


@pytest.mark.parametrize("mode", ["eager", "jit", "checkpoint"])
def test_a_key_of_several_op_types_counts_their_calls_together(mode):
    def f(x):
        return rg.tanh(x) + rg.sin(x) + 3 * rg.tanh(2 * x)

    for n, numbers in enumerate([(7, 1), (1, 1), (1, 7)]):
        key = at(what=("Tanh", "Sin"), nth=n)
        with override({key: lambda dy, builtin: 7 * builtin(dy)}) as used:
            dx = rg.grad(lambda x: MODES[mode](f)(x).sum())(rg.tensor(X, dtype="float32"))
        close(dx.numpy() - np.cos(X) * (7 if n == 1 else 1), *numbers)
        assert [hit.op_type for hit in used.hits] == [("Tanh", "Sin", "Tanh")[n]]


def test_a_predicate_that_is_written_anew_counts_through_a_program_that_is_kept():
    f = rg.jit(one)
    for _ in range(3):
        key = at(lambda site: site.path == "", "Tanh", nth=1)
        close(gradient(lambda x: f(x) + 10 * f(x), key), 71)
    assert f.cache_info().traces == 2


def test_a_predicate_that_is_written_anew_is_no_new_program():
    f = rg.jit(lambda x: NET(x).sum())
    for _ in range(3):
        gradient(f, at(lambda site: site.path == "block1", "Tanh"))
    assert f.cache_info().traces == 1


# -- what runs a second time, ranks ----------------------------------------------------------------


def caller(x):
    return rg.checkpoint(one)(x)


def scoped(x):
    with rg.name_scope("a"):
        return rg.checkpoint(lambda x: one(x) + 3 * one(2 * x))(x)


def made(k):
    return lambda x: rg.tanh(k * x)


nested = rg.checkpoint(lambda x: rg.vmap(rg.checkpoint(one))(x) * 1)
first, second = made(1.0), made(2.0)
RANKS = {
    "Tanh": times(2), at(lambda site: site.shapes == ((2,),), "Tanh"): times(3),
    at(Tanh, "Tanh"): times(5), at("block?", "Tanh"): times(7),
    at("block2.inner", "Tanh"): times(11), at(NET.right, "Tanh"): times(13),
}  # fmt: skip
CASES = {
    "a checkpoint's caller": (caller, at(caller, "Tanh"), [7]),
    "a count in a checkpoint": (scoped, at("a", "Tanh", nth=1), [1, 7]),
    "nested checkpoints": (lambda x: nested(x) + one(x), at(what="Tanh", nth=0), [8]),
    "functions of one factory": (lambda x: first(x) + 3 * second(x), at(second, "Tanh"), [1, 7]),
}


@pytest.mark.parametrize(("f", "rules", "numbers"), CASES.values(), ids=CASES)
def test_gradients(f, rules, numbers):
    close(gradient(f, rules), *numbers)


def test_the_more_specific_key_wins():
    with override(RANKS):
        close(rg.grad(lambda x: NET(x).sum())(X), 7, 11, 5, 13)
        close(rg.grad(lambda x: one(x).sum())(X), 2)
        short = rg.grad(lambda x: one(x).sum())(X[:2])
    np.testing.assert_allclose(short.numpy(), 3 * SLOPES[0][:2], rtol=1e-4)


def test_an_inner_scope_wins_and_elsewhere_the_outer_one_counts():
    inner = {at("block2.*", "Tanh"): times(11)}
    with override({"Tanh": times(2)}), override({at("block1", "Tanh"): SEVEN}), override(inner):
        close(rg.grad(lambda x: NET(x).sum())(X), 7, 11, 2, 2)


def test_a_checkpoint_counts_no_call_twice():
    df = rg.grad(rg.checkpoint(lambda x: NET(x).sum()))
    with override({at(what="Tanh", nth=5): SEVEN}):
        close(df(X), 1, 1, 1, 1)  # calls 0 to 3, and again in the backward pass
        close(df(X), 1, 7, 1, 1)  # calls 4 to 7


def test_second_order():
    def f(x):
        with rg.name_scope("a"):
            y = rg.sin(x)
        return y + rg.sin(x)

    rules = {at("a", "Sin"): lambda dy, x: dy * rg.exp(x)}
    ddx = under(rules, rg.grad(rg.grad(f)), 0.5)
    np.testing.assert_allclose(ddx.item(), np.exp(0.5) - np.sin(0.5), rtol=1e-6)


def pooled(x):
    with rg.name_scope("a"), ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: rg.grad(lambda x: one(x).sum())(x)).result()


@pytest.mark.parametrize("where", ["a", pooled])
def test_jobs_take_their_place_along(where):
    close(under({at(where, "Tanh"): SEVEN}, pooled, rg.tensor(X)), 7)


def test_a_scope_ends_with_an_exception():
    with override({at("a", "Tanh"): optional(SEVEN)}) as used:
        with pytest.raises(KeyError), rg.name_scope("a"):
            raise KeyError
        rg.tanh(1.0)
    assert not used.hits


# -- sites and reports -----------------------------------------------------------------------------


def test_a_rule_that_asks_for_the_site():
    seen = []

    def rule(dy, y, site):
        seen.append(site)
        return dy * (1 - y * y) * (7 if site.path == "block1" else 1)

    close(gradient(rg.checkpoint(lambda x: NET(x).sum()), {"Tanh": rule}), 7, 1, 1, 1)
    expected = [("block1", 0), ("block2.inner", 1), ("", 2), ("", 3)]
    assert [(s.path, s.nth) for s in seen[::-1]] == expected
    assert all(s.shapes == ((3,),) and s.op_type == "Tanh" for s in seen)
    assert seen[0].file == __file__ and seen[0].line > 0


def test_reports_show_the_path():
    loss = lambda x: NET(x).sum()  # noqa: E731
    with override({at("block?.**", "Tanh"): SEVEN}) as used:
        rg.grad(loss)(X)
    hits = [(hit.path, hit.count, hit.ran) for hit in used.hits]
    assert hits == [("block1", 1, 1), ("block2.inner", 1, 1)]
    assert used.table().headings[0] == "module" and "block2.inner" in str(used.table())
    assert "Tanh in block1 <- " in repr(used)
    steps = rg.trace_gradients(loss)(X).steps
    paths = [s.path for s in steps if s.op_type == "Tanh"]
    assert paths == ["", "", "block2.inner", "block1"]


def test_a_key_that_held_for_nothing_is_named_at_the_end():
    key = at("block3", "Tanh")
    words = r"rg.at\('block3', 'Tanh'\) applied to no op; 'Tanh' ran in 'block1'"
    with pytest.warns(UnusedOverrideWarning, match=words):  # noqa: SIM117
        with override({key: SEVEN, "Tanh": times(1)}) as used:
            rg.grad(lambda x: NET(x).sum())(X)
    refused(lambda: used.assert_fired(key), NotFiredError, "'Tanh' ran in 'block1'")
    refused(lambda: used.assert_fired("Tanh"), NotFiredError, "block3")
    other = at("block1", "Tanh")
    refused(lambda: used.assert_fired(other), ArgumentError, "does not override")


BAD = [
    ({at("a", nth=0): SEVEN}, "whole calls as one op"), ({at(NET): SEVEN}, "whole calls as one op"),
    ({at(len, "Tanh"): SEVEN}, "C code"), ({at("a", "Tahn"): SEVEN}, "or 'Tanh'"),
    ({at("block?", "Tanh"): SEVEN, at("*1", "Tanh"): SEVEN}, "the same place 'block1'"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "words"), BAD)
def test_keys_that_cannot_hold(rules, words):
    refused(lambda: under(rules, NET, rg.tensor(X)), (ArgumentError, LookupError), words)
