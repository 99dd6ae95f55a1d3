"""Rules in one place only: every kind of `where`, in every way to run a function."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, GradientError, NotFiredError, UnusedOverrideWarning

X = np.array([-0.7, 0.3, 1.1])


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


def expected(*factors):
    return sum(k * slope for k, slope in zip(factors, SLOPES, strict=True))


WHERES = {
    "path": (rg.at("block1", "Tanh"), [7, 1, 1, 1]),
    "pattern": (rg.at("block2.*", "Tanh"), [1, 7, 1, 1]),
    "any depth": (rg.at("**.inner", "Tanh"), [1, 7, 1, 1]),
    "everything below": (rg.at("block?", "Tanh"), [7, 7, 1, 1]),
    "function": (rg.at(two, "Tanh"), [1, 7, 1, 1]),
    "Module": (rg.at(NET.right, "Tanh"), [1, 1, 1, 7]),
    "method": (rg.at(NET.__call__, "Tanh"), [7, 7, 7, 7]),
    "class": (rg.at(Tanh, "Tanh"), [1, 1, 7, 7]),
    "predicate": (rg.at(lambda site: site.path == "block1", "Tanh"), [7, 1, 1, 1]),
    "tuple": (rg.at(("block1", NET.left), ("Tanh", "Sin")), [7, 1, 7, 1]),
    "nth": (rg.at(what="Tanh", nth=2), [1, 1, 7, 1]),
    "nth of a class": (rg.at(Tanh, "Tanh", nth=1), [1, 1, 1, 7]),
    "both": (rg.at("block1", rg.at("block1", "Tanh").what), [7, 1, 1, 1]),
}
MODES = {
    "eager": lambda f: f,
    "jit": rg.jit,
    "checkpoint": rg.checkpoint,
    "checkpoint in jit": lambda f: rg.jit(rg.checkpoint(f)),
    "vmap": rg.vmap,
    "vmap in jit": lambda f: rg.jit(rg.vmap(f)),
    "jit in vmap": lambda f: rg.vmap(rg.jit(f)),
    "cond": lambda f: lambda x: rg.cond(x.sum() > -9, f, lambda x: x, x),
    "scan": lambda f: lambda x: rg.scan(lambda c, x: (c, f(x)), 0.0, x)[1],
    "while": lambda f: (
        lambda x: rg.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, f(x)), (0, x), max_steps=2
        )[1]
    ),
}
COMPILED = {f"{name} in jit": lambda f, m=MODES[name]: rg.jit(m(f))
            for name in ("cond", "scan", "while")}  # fmt: skip


def gradient(f, key, x=X):
    with rg.gradient_override_map({key: SEVEN}) as used:
        dx = rg.grad(lambda x: f(x).sum())(rg.tensor(x, dtype="float32"))
    used.assert_fired()
    return dx.numpy()


@pytest.mark.parametrize("mode", [*MODES, *COMPILED])
@pytest.mark.parametrize("where", WHERES)
def test_a_rule_holds_in_its_place_and_nowhere_else(mode, where):
    key, factors = WHERES[where]
    f = (MODES | COMPILED)[mode](NET)
    counts = key.nth is not None
    if counts and mode in COMPILED:
        with pytest.raises(GradientError, match="cannot be counted in the body of a"):
            gradient(f, key)
        return
    if counts and mode == "scan":  # a loop of Python: the first step has these calls
        dx = gradient(f, key)
        np.testing.assert_allclose(dx[0], expected(*factors)[0], rtol=1e-4)
        np.testing.assert_allclose(dx[1:], expected(1, 1, 1, 1)[1:], rtol=1e-4)
        return
    np.testing.assert_allclose(gradient(f, key), expected(*factors), rtol=1e-4)


@pytest.mark.parametrize("where", [w for w in WHERES if "all" not in w])
def test_graphs(where):
    key, factors = WHERES[where]
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float64, [3])
        with rg.gradient_override_map({key: times(7)}) as used:
            y = NET(x)
        (dx,) = tf.gradients(y, x)
        np.testing.assert_allclose(session.run(dx, {x: X}), expected(*factors), rtol=1e-6)
        used.assert_fired()


def test_scopes_of_tensorflow_count():
    with tf.Graph().as_default() as graph, tf.Session() as session:
        x = tf.placeholder(tf.float64, [3])
        with graph.gradient_override_map({rg.at("a.b", "Tanh"): times(7)}):
            with tf.name_scope("a"), rg.name_scope("b"):
                y = tf.tanh(x)
            with tf.name_scope("a"), tf.name_scope("b"):  # the graph calls it a_1
                y = y + tf.tanh(2 * x) * 3
        (dx,) = tf.gradients(y, x)
        assert [op.name for op in graph.get_operations() if op.type == "Tanh"] == [
            "a/b/Tanh", "a_1/b/Tanh",
        ]  # fmt: skip
        np.testing.assert_allclose(session.run(dx, {x: X}), 7 * SLOPES[0] + SLOPES[1], rtol=1e-6)


def test_a_loop_and_a_branch_of_a_graph():
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float64, [3])
        with rg.gradient_override_map({rg.at("block2.**", "Tanh"): times(7)}) as used:
            y = tf.while_loop(lambda i, _: i < 1, lambda i, x: (i + 1, NET(x)), [0, x])[1]
            z = tf.cond(tf.reduce_sum(x) < 9, lambda: NET(x), lambda: x)
        for result in (y, z):
            (dx,) = tf.gradients(result, x)
            np.testing.assert_allclose(session.run(dx, {x: X}), expected(1, 7, 1, 1), rtol=1e-6)
        used.assert_fired()


def test_what_waits_for_the_run_keeps_its_place():
    @rg.extend.deferrable
    def waits(x) -> "Tensor":  # noqa: F821
        return rg.tanh(x) if x.shape[0] > 1 else x

    def slopes(key):
        with tf.Graph().as_default(), tf.Session() as session:
            x = tf.placeholder(tf.float64, [None])
            with rg.gradient_override_map({key: rg.rules.optional(times(7))}):
                with rg.name_scope("a"):
                    y = waits(x)
                z = waits(x)
            grads = [tf.gradients(r, x)[0] for r in (y, z)]
            return session.run(grads, {x: X})

    for key in (rg.at("a", "Tanh"), rg.at(lambda site: site.path == "a", "Tanh")):
        inside, outside = slopes(key)
        np.testing.assert_allclose(inside, 7 * SLOPES[0], rtol=1e-6)
        np.testing.assert_allclose(outside, SLOPES[0], rtol=1e-6)
    with pytest.raises(GradientError, match="cannot be counted in the function that waits"):
        slopes(rg.at(what="Tanh", nth=0))


# -- what was compiled -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["grad of jit", "jit of grad"])
def test_a_program_is_of_one_choice_of_places(way):
    f = lambda x: NET(x).sum()  # noqa: E731
    compiled = rg.grad(rg.jit(f)) if way == "grad of jit" else rg.jit(rg.grad(f))
    x = rg.tensor(X, dtype="float32")

    def under(rules):
        if rules is None:
            return compiled(x).numpy()
        with rg.gradient_override_map(rules):
            return compiled(x).numpy()

    a, b = {rg.at("block1", "Tanh"): times(7)}, {rg.at(NET.left, "Tanh"): times(7)}
    for _ in range(2):
        np.testing.assert_allclose(under(a), expected(7, 1, 1, 1), rtol=1e-4)
        np.testing.assert_allclose(under(b), expected(1, 1, 7, 1), rtol=1e-4)
        np.testing.assert_allclose(under(None), expected(1, 1, 1, 1), rtol=1e-4)


def test_a_program_is_of_one_path_and_one_caller():
    f = rg.jit(one)

    def twice(x):
        with rg.name_scope("a"):
            y = f(x)
        with rg.name_scope("b"):
            return y + 3 * f(2 * x)

    def thrice(x):
        return f(x) + twice(x)

    for key, (a, b) in [(rg.at("a", "Tanh"), (7, 1)), (rg.at("b", "Tanh"), (1, 7)),
                        (rg.at(twice, "Tanh"), (7, 7))]:  # fmt: skip
        f = rg.jit(one)
        for _ in range(2):
            dx = gradient(thrice, key)
            np.testing.assert_allclose(dx, (1 + a) * SLOPES[0] + b * SLOPES[1], rtol=1e-4)
        assert f.cache_info().traces == 3


@pytest.mark.parametrize("n", range(4))
def test_calls_are_counted_through_compiled_functions(n):
    f = rg.jit(lambda x: rg.tanh(x) + rg.tanh(2 * x) * 3)
    dx = gradient(lambda x: f(x) + 10 * f(x), rg.at(what="Tanh", nth=n))
    factors = [7 if i == n else 1 for i in range(4)]
    parts = [SLOPES[0], SLOPES[1], 10 * SLOPES[0], 10 * SLOPES[1]]
    by_hand = sum(k * part for k, part in zip(factors, parts, strict=True))
    np.testing.assert_allclose(dx, by_hand, rtol=1e-4)


def test_a_predicate_that_is_written_anew_is_no_new_program():
    f = rg.jit(lambda x: NET(x).sum())
    for _ in range(3):
        gradient(f, rg.at(lambda site: site.path == "block1", "Tanh"))
    assert f.cache_info().traces == 1


# -- what runs a second time -----------------------------------------------------------------------


def test_the_backward_pass_of_a_checkpoint_knows_who_called_it():
    def caller(x):
        return rg.checkpoint(one)(x)

    def scoped(x):
        with rg.name_scope("a"):
            return rg.checkpoint(lambda x: one(x) + 3 * one(2 * x))(x)

    np.testing.assert_allclose(gradient(caller, rg.at(caller, "Tanh")), 7 * SLOPES[0], rtol=1e-4)
    dx = gradient(scoped, rg.at("a", "Tanh", nth=1))
    np.testing.assert_allclose(dx, SLOPES[0] + 7 * SLOPES[1], rtol=1e-4)
    nested = rg.checkpoint(lambda x: rg.vmap(rg.checkpoint(one))(x) * 1)
    dx = gradient(lambda x: nested(x) + one(x), rg.at(what="Tanh", nth=0))
    np.testing.assert_allclose(dx, 8 * SLOPES[0], rtol=1e-4)


def test_a_checkpoint_counts_no_call_twice():
    f = rg.checkpoint(lambda x: NET(x).sum())
    with rg.gradient_override_map({rg.at(what="Tanh", nth=5): times(7)}):
        x = rg.tensor(X)
        first = rg.grad(f)(x)  # calls 0 to 3, and again in the backward pass
        second = rg.grad(f)(x)  # calls 4 to 7
    np.testing.assert_allclose(first.numpy(), expected(1, 1, 1, 1), rtol=1e-6)
    np.testing.assert_allclose(second.numpy(), expected(1, 7, 1, 1), rtol=1e-6)


def test_second_order():
    with rg.gradient_override_map({rg.at("a", "Sin"): lambda dy, x: dy * rg.exp(x)}):

        def f(x):
            with rg.name_scope("a"):
                y = rg.sin(x)
            return y + rg.sin(x)

        ddx = rg.grad(rg.grad(f))(rg.scalar(0.5))
    np.testing.assert_allclose(ddx.item(), np.exp(0.5) - np.sin(0.5), rtol=1e-6)


# -- threads, tasks, exceptions --------------------------------------------------------------------


def test_jobs_take_their_place_along():
    def caller(x):
        with rg.name_scope("a"), ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: rg.grad(lambda x: one(x).sum())(x)).result()

    x = rg.tensor(X)
    for key in (rg.at("a", "Tanh"), rg.at(caller, "Tanh")):
        with rg.gradient_override_map({key: times(7)}):
            np.testing.assert_allclose(caller(x).numpy(), 7 * SLOPES[0], rtol=1e-6)


def test_a_scope_ends_with_an_exception():
    def fails(x):
        with rg.name_scope("a"):
            raise KeyError

    with rg.gradient_override_map({rg.at("a", "Tanh"): rg.rules.optional(times(7))}) as used:
        with pytest.raises(KeyError):
            fails(0)
        rg.tanh(rg.scalar(1.0))
    assert not used.hits


# -- ranks -----------------------------------------------------------------------------------------


def test_the_more_specific_key_wins():
    rules = {
        "Tanh": times(2),
        rg.at(lambda site: site.shapes == ((2,),), "Tanh"): times(3),
        rg.at(Tanh, "Tanh"): times(5),
        rg.at("block?", "Tanh"): times(7),
        rg.at("block2.inner", "Tanh"): times(11),
        rg.at(NET.right, "Tanh"): times(13),
    }
    with rg.gradient_override_map(rules):
        x = rg.tensor(X)
        dx = rg.grad(lambda x: NET(x).sum())(x)
        alone = rg.grad(lambda x: rg.tanh(x).sum())(x)
        short = rg.grad(lambda x: rg.tanh(x).sum())(x[:2])
    np.testing.assert_allclose(dx.numpy(), expected(7, 11, 5, 13), rtol=1e-6)
    np.testing.assert_allclose(alone.numpy(), 2 * SLOPES[0], rtol=1e-6)
    np.testing.assert_allclose(short.numpy(), 3 * SLOPES[0][:2], rtol=1e-6)


def test_an_inner_scope_wins_and_elsewhere_the_outer_one_counts():
    x = rg.tensor(X)
    with (
        rg.gradient_override_map({"Tanh": times(2)}),
        rg.gradient_override_map({rg.at("block1", "Tanh"): times(7)}),
        rg.gradient_override_map({rg.at("block2.*", "Tanh"): times(11)}),
    ):
        dx = rg.grad(lambda x: NET(x).sum())(x)
    np.testing.assert_allclose(dx.numpy(), expected(7, 11, 2, 2), rtol=1e-6)


def test_two_keys_for_one_scope_are_refused():
    rules = {rg.at("block?", "Tanh"): times(2), rg.at("*1", "Tanh"): times(3)}
    scope = rg.gradient_override_map(rules)
    with pytest.raises(ArgumentError, match="the same place 'block1'"), scope:
        NET(rg.tensor(X))


def test_a_map_for_a_place():
    rules = {rg.at("block2.*"): {"Tanh": times(7), "Sin": rg.rules.optional(times(3))}}
    with rg.gradient_override_map(rules):
        dx = rg.grad(lambda x: NET(x).sum())(rg.tensor(X))
    np.testing.assert_allclose(dx.numpy(), expected(1, 7, 1, 1), rtol=1e-6)


def test_functions_of_one_factory_are_told_apart():
    def make(k):
        return lambda x: rg.tanh(k * x)

    f, g = make(1.0), make(2.0)
    dx = gradient(lambda x: f(x) + 3 * g(x), rg.at(g, "Tanh"))
    np.testing.assert_allclose(dx, SLOPES[0] + 7 * SLOPES[1], rtol=1e-4)


# -- sites and reports -----------------------------------------------------------------------------


def test_a_rule_that_asks_for_the_site():
    seen = []

    def rule(dy, y, site):
        seen.append(site)
        return dy * (1 - y * y) * (7 if site.path == "block1" else 1)

    with rg.gradient_override_map({"Tanh": rule}) as used:
        dx = rg.grad(rg.checkpoint(lambda x: NET(x).sum()))(rg.tensor(X))
    np.testing.assert_allclose(dx.numpy(), expected(7, 1, 1, 1), rtol=1e-6)
    used.assert_fired("Tanh")
    assert [(s.path, s.nth) for s in seen[::-1]] == [
        ("block1", 0), ("block2.inner", 1), ("", 2), ("", 3),
    ]  # fmt: skip
    assert all(s.shapes == ((3,),) and s.op_type == "Tanh" for s in seen)
    assert seen[0].file == __file__ and seen[0].line > 0


def test_reports_show_the_path():
    with rg.gradient_override_map({rg.at("block?.**", "Tanh"): times(7)}) as used:
        rg.grad(lambda x: NET(x).sum())(rg.tensor(X))
    assert [(hit.path, hit.count, hit.ran) for hit in used.hits] == [
        ("block1", 1, 1), ("block2.inner", 1, 1),
    ]  # fmt: skip
    assert used.table().headings[0] == "module" and "block2.inner" in str(used.table())
    assert "Tanh in block1 <- " in repr(used)
    steps = rg.trace_gradients(lambda x: NET(x).sum())(rg.tensor(X)).steps
    assert [s.path for s in steps if s.op_type == "Tanh"][::-1] == [
        "block1",
        "block2.inner",
        "",
        "",
    ]


def test_a_key_that_held_for_nothing_is_named_at_the_end():
    key = rg.at("block3", "Tanh")
    used = rg.gradient_override_map({key: times(7), "Tanh": times(1)})
    words = r"rg.at\('block3', 'Tanh'\) held for no op; 'Tanh' ran in 'block1'"
    with pytest.warns(UnusedOverrideWarning, match=words), used:
        rg.grad(lambda x: NET(x).sum())(rg.tensor(X))
    with pytest.raises(NotFiredError, match="'Tanh' ran in 'block1'"):
        used.assert_fired(key)
    with pytest.raises(NotFiredError, match="block3"):
        used.assert_fired("Tanh")
    with pytest.raises(ArgumentError, match="does not override"):
        used.assert_fired(rg.at("block1", "Tanh"))


@pytest.mark.parametrize(
    "key, words",
    [
        (rg.at("a", nth=0), "whole calls as one op"),
        (rg.at(NET), "whole calls as one op"),
        (rg.at(len, "Tanh"), "C code"),
        (rg.at("a", "Tahn"), "or 'Tanh'"),
    ],
)
def test_keys_that_cannot_hold(key, words):
    with pytest.raises((ArgumentError, LookupError), match=words):
        rg.gradient_override_map({key: times(7)}).__enter__()
