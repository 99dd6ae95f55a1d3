"""`cond`, loops, `map` and `vmap`: the same in eager mode and under jit."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optree
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import ArgumentError, GradientError, RuleError, TraceError
from tests.helpers.quick import MODES, nothing_is_left_open
from tests.helpers.rows import refused, under

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)


def converted(value, to):
    """The arrays in containers as what is made of them."""
    known = np.ndarray | rg.Tensor
    return optree.tree_map(lambda x: to(x) if isinstance(x, known) else x, value)


def numbers(tree):
    return converted(tree, lambda y: y.tolist())


# -- scan ------------------------------------------------------------------------------------------


@MODES
def test_integers_and_bools_go_along(mode):
    def body(carry, x):
        i, seen, total = carry
        return (i + 1, seen | (x > 1.5), total + x * i), (i, seen)

    start = rg.asarray(np.int32(0)), rg.asarray(np.False_), rg.scalar(0.0)
    f = lambda xs: rg.scan(body, start, xs)  # noqa: E731
    (i, seen, total), (counts, flags) = mode(f)(rg.tensor([1.0, 2.0, 3.0]))
    assert (i.item(), seen.item(), total.item()) == (3, True, 8.0)
    assert (counts.tolist(), flags.tolist()) == ([0, 1, 2], [False, False, True])
    g = rg.grad(lambda xs: mode(f)(xs)[0][2])
    assert g(rg.tensor([1.0, 2.0, 3.0])).tolist() == [0.0, 1.0, 2.0]


@MODES
def test_variables_assigned_in_steps(mode):
    v, n = rg.Variable(1.0), rg.Variable(0, dtype="int32", trainable=False)

    def body(carry, x):
        v.assign(v * x)
        n.assign_add(1)
        return carry + v, v.value

    f, xs = mode(lambda xs: rg.scan(body, rg.scalar(0.0), xs)), rg.tensor([2.0, 3.0, 4.0])
    last, ys = f(xs)
    assert (last.item(), ys.tolist(), v.item(), n.item()) == (32.0, [2.0, 6.0, 24.0], 24.0, 3)
    v.assign(1.0)
    value, grads = rg.variable_grads(lambda: f(xs)[0] + v)
    assert (value.item(), grads[v.name].item()) == (56.0, 56.0)
    assert (v.item(), n.item()) == (24.0, 6)


# -- cond ------------------------------------------------------------------------------------------


@MODES
def test_cond_with_containers(mode):
    def f(p, a, b):
        one = lambda s, t: {"x": s["a"] * t, "y": (t, 3, None)}  # noqa: E731
        other = lambda s, t: {"x": s["a"] + t, "y": (s["a"], 3, None)}  # noqa: E731
        return rg.cond(p, one, other, {"a": a}, b)

    p = rg.asarray(np.True_)
    assert numbers(mode(f)(p, 2.0, 5.0)) == {"x": 10.0, "y": (5.0, 3, None)}
    assert numbers(mode(f)(~p, 2.0, 5.0)) == {"x": 7.0, "y": (2.0, 3, None)}


@MODES
def test_gradients_by_what_bodies_close_over(mode):
    v = rg.Variable(5.0)
    by_v = lambda f: rg.variable_grads(lambda: f() + v * 0).grads[v.name].item()  # noqa: E731
    f = mode(lambda a, b, p: rg.cond(p, lambda: a * v, lambda: b * b))
    for p, due, due_v in ((True, (5.0, 0.0), 2.0), (False, (0.0, 6.0), 0.0)):
        p = rg.asarray(np.asarray(p))
        by_two = rg.grads(partial(f, p=p), unconnected="zero")
        assert tuple(x.item() for x in by_two([rg.scalar(2.0), rg.scalar(3.0)])) == due
        assert by_v(lambda: f(rg.scalar(2.0), rg.scalar(3.0), p)) == due_v  # noqa: B023
    g = mode(lambda xs: rg.scan(lambda c, x: (c * 4 + x * v, c), rg.scalar(1.0), xs)[0])
    assert by_v(lambda: g(rg.tensor([1.0, 2.0]))) == 4 + 2


@MODES
def test_variables_assigned_in_branches(mode):
    v, w = rg.Variable(1.0), rg.Variable(10.0)

    g = mode(lambda x: rg.cond(x > 0, lambda: v.assign(v + x), lambda: w.assign(w * x)))
    g(rg.scalar(2.0))
    assert (v.item(), w.item()) == (3.0, 10.0)
    g(rg.scalar(-2.0))
    assert (v.item(), w.item()) == (3.0, -20.0)


# -- while_loop, fori_loop, map --------------------------------------------------------------------


def test_a_loop_that_goes_on_gives_nan_under_jit():
    f = rg.jit(lambda x: rg.while_loop(lambda x: x > 1, lambda x: x / 2, x, max_steps=2))
    assert np.isnan(f(rg.scalar(64.0)).item()) and f(rg.scalar(4.0)).item() == 1.0


@MODES
def test_the_number_of_steps_may_be_an_argument(mode):
    f = mode(lambda n, x: rg.fori_loop(0, n, lambda i, x: x * (i + 1), x))
    assert f(rg.asarray(np.int32(4)), rg.scalar(1.0)).item() == 24.0


@MODES
@pytest.mark.parametrize("max_steps", [None, 5])
def test_variables_assigned_in_while_loops(mode, max_steps):
    v = rg.Variable(1.0)

    def body(x):
        v.assign(v * 2)
        return x + v

    f = mode(lambda x: rg.while_loop(lambda x: x < 10, body, x, max_steps=max_steps))
    assert (f(rg.scalar(0.0)).item(), v.item()) == (14.0, 8.0)
    assert (f(rg.scalar(0.0)).item(), v.item()) == (16.0, 16.0)


@MODES
def test_a_while_loop_reads_a_variable_in_its_condition(mode):
    v = rg.Variable(3.0)
    f = mode(lambda x: rg.while_loop(lambda x: x < v, lambda x: x + 1, x, max_steps=9))
    assert f(rg.scalar(0.0)).item() == 3.0
    v.assign(5.0)
    assert f(rg.scalar(0.0)).item() == 5.0


@pytest.mark.parametrize("max_steps", [1, 64, 65, 100, 1000])
def test_long_bounded_loops_go_in_rounds(max_steps):
    """The steps that there are count, wherever in a round they end."""

    def f(x, steps):
        body = lambda c: (c[0] + 1, rg.sin(c[1]) * 1.1)  # noqa: E731
        return rg.while_loop(lambda c: c[0] < steps, body, (0, x), max_steps=max_steps)[1]

    eager = rg.value_and_grad(f, argnums=0)
    compiled = rg.jit(lambda x, steps: rg.value_and_grad(lambda x: f(x, steps))(x))
    x = rg.scalar(0.3)
    for steps in {0, 1, max_steps // 2, max_steps - 1, max_steps}:
        for found, expected in zip(compiled(x, steps), eager(x, steps), strict=True):
            assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    assert np.isnan(compiled(x, max_steps + 1)[0].item())


@pytest.mark.slow
def test_rounds_carry_variables_along():
    v = rg.Variable(0.0, name="sum")

    def f(x):
        v.assign(0.0)
        rg.while_loop(lambda c: c < 70, lambda c: (v.assign(v + x), c + 1)[1], 0, max_steps=100)
        return v * x

    assert rg.jit(rg.grad(f))(rg.scalar(0.3)).item() == pytest.approx(2 * 70 * 0.3, rel=1e-4)
    assert v.numpy() == pytest.approx(21.0, rel=1e-4)


def test_a_descent_in_a_descent():
    """The inner one depends on no argument of the outer gradient."""

    def minimum(f, start):
        step = lambda x: x - 0.1 * rg.grad(f)(x)  # noqa: E731
        return rg.while_loop(lambda x: rg.abs(rg.grad(f)(x)) > 1e-4, step, start)

    def outer(x):
        return (x - 2.0) ** 2 + minimum(lambda y: (y - 1.0) ** 2 + x * x, rg.scalar(0.0))

    found = rg.jit(lambda start: minimum(outer, start))(rg.scalar(0.0))
    assert found.item() == pytest.approx(2.0, abs=1e-3)


# -- branches that return Python numbers -----------------------------------------------------------

RETURNS = {
    "bool": (lambda w: (2 * w, True), lambda w: (w, False)),
    "Tensor or number": (lambda w: w * w, lambda w: 0.0),
    "number or Tensor": (lambda w: 1, lambda w: w), "bool or Tensor": (lambda w: True, lambda w: w),
    "bool or comparison": (lambda w: False, lambda w: w < 0), "ints": (lambda w: 1, lambda w: 2),
    "int or float": (lambda w: 1, lambda w: 2.5),
    "int Tensor or int": (lambda w: rg.astype(w, rg.int32), lambda w: 7),
    "int Tensor or float": (lambda w: rg.astype(w, rg.int32), lambda w: 0.5),
    "signed zeros": (lambda w: 0.0, lambda w: -0.0),
    "dict": (lambda w: {"a": w, "n": 1, "s": "x"}, lambda w: {"a": 2.0, "n": 3, "s": "x"}),
    "lists of numbers": (lambda w: [1.0, 2.0], lambda w: [3.0, 4.0]),
    "list of numbers or Tensors": (lambda w: [1.0, w], lambda w: [w, 2.0]),
    "all the same": (lambda w: (w, 3, None, "a"), lambda w: (w, 3, None, "a")),
    "array": (lambda w: np.float32(2), lambda w: w),
}  # fmt: skip


@pytest.mark.parametrize("functions", RETURNS.values(), ids=RETURNS)
def test_values_are_those_of_eager_mode(functions):
    f = lambda w: rg.cond(w > 0, *functions, w)  # noqa: E731
    compiled = rg.jit(f)
    for w in (rg.scalar(2.0), rg.scalar(-2.0)):
        pairs = [optree.tree_leaves(g(w), none_is_leaf=True) for g in (compiled, f)]
        for y, z in zip(*pairs, strict=True):
            if isinstance(z, str | None):
                assert y == z
            else:
                np.testing.assert_array_equal(np.asarray(y, float), np.asarray(z, float))
                assert np.signbit(float(y)) == np.signbit(float(z))


@pytest.mark.parametrize("pair", [(2.0, 3.0), (2, 3), (True, False), (2, 2), (-1.5, -1.5)], ids=str)
def test_numbers_are_as_weak_as_in_eager_mode(pair):
    def f(w, *zs):
        number = rg.cond(w > 0, lambda: pair[0], lambda: pair[1])
        return [number * z for z in zs]

    compiled, zs = rg.jit(f), [rg.tensor(3, dtype=d) for d in ("float32", "float16", "int32")]
    for w in (rg.scalar(2.0), rg.scalar(-2.0)):
        for y, due in zip(compiled(w, *zs), f(w, *zs), strict=True):
            assert (y.dtype, y.item()) == (due.dtype, due.item())


@pytest.mark.slow
def test_numbers_in_batches_and_loops():
    f = lambda x: rg.cond(x > 0, lambda: rg.cond(x > 1, lambda: 2.0, lambda: x), lambda: 0)  # noqa: E731
    x = rg.tensor([-1.0, 0.5, 3.0])
    assert rg.jit(rg.vmap(f))(x).tolist() == rg.jit(lambda x: rg.map(f, x))(x).tolist()
    assert rg.jit(rg.vmap(f))(x).tolist() == [0.0, 0.5, 2.0]
    assert rg.jit(rg.grad(lambda x: rg.sum(rg.map(f, x))))(x).tolist() == [0.0, 1.0, 0.0]


def test_variables_that_a_branch_with_a_number_assigns_to():
    v = rg.Variable(1.0)
    f = rg.jit(lambda w: rg.cond(w > 0, lambda: (v.assign_add(1.0), 3.0)[1], lambda: w))
    assert (f(rg.scalar(1.0)).item(), v.numpy()) == (3.0, 2.0)
    assert (f(rg.scalar(-1.0)).item(), v.numpy()) == (-1.0, 2.0)


def test_each_branch_is_traced_once_if_no_number_is_due():
    calls = []
    branch = lambda w: (calls.append(1), w, 3)  # noqa: E731
    rg.jit(lambda w: rg.cond(w > 0, branch, branch, w))(rg.scalar(1.0))
    assert len(calls) == 2


def test_a_result_from_outside_is_read_at_each_call():
    f, found = rg.jit(lambda: y), []
    for y in (rg.tensor([1.0]), rg.tensor([2.0])):  # noqa: B007 (f reads it)
        found.append(f().tolist())
    assert found == [[1.0], [2.0]]


# -- nests, and rules in them ----------------------------------------------------------------------


@MODES
def test_hits_in_loops(mode):
    f = mode(rg.grad(lambda x: rg.scan(lambda c, _: (rg.sign(c), None), x, length=3)[0]))
    for _ in range(2):
        with rg.gradient_override_map({"Sign": "Identity"}) as used:
            assert f(rg.scalar(0.5)).item() == 1.0
        used.assert_fired()
        assert {hit.op_type for hit in used.hits} == {"Sign"}


def test_plumbing_is_no_hit():
    body = lambda c, x: (rg.sign(c) + x, c)  # noqa: E731
    rule = rg.rules.optional(rg.rules.no_gradient)
    own = dict.fromkeys(("StridedSlice", "Pack", "Transpose"), rule)
    for mode in (lambda f: f, rg.jit):
        with rg.gradient_override_map({"Sign": "Identity", **own}) as used:
            mode(lambda xs: rg.scan(body, rg.scalar(0.0), xs))(rg.ones((3,)))
            mode(lambda xs: rg.vmap(rg.sign, in_axes=1, out_axes=1)(xs))(rg.ones((3, 2)))
        assert {hit.op_type for hit in used.hits} == {"Sign"}


@pytest.mark.parametrize("g", [lambda f: f, rg.jit, rg.grad, lambda f: rg.jit(rg.grad(f))])
def test_an_exception_in_a_step(g):
    def body(c, x):
        raise KeyError("stop")

    for f in (
        lambda x: rg.scan(body, x, length=2)[0],
        lambda x: rg.cond(x > -1, lambda: body(x, x), lambda: x),
    ):
        with pytest.raises(KeyError):
            g(f)(rg.scalar(0.0))
        assert current() is None


# -- vmap: one example after another on NumPy data, all at once on JAX data -----------------------

DATA = pytest.mark.parametrize("data", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
X = np.arange(6.0).reshape(3, 2)
I = np.array([0, 1, 0])  # noqa: E741

# A function, options, arguments, and what is due; of containers the parts in the order of leaves.
AXES = {
    "containers": (lambda p, q: {"sum": (p["a"] + q[0], None, 3), "a": p["a"]}, {},
                   ({"a": X}, [X[:, 0]]), {"sum": (X + X[:, :1], None, np.full(3, 3)), "a": X}),
    "0": (rg.multiply, {"in_axes": 0}, (X, X), X * X),
    "1": (rg.multiply, {"in_axes": (1, 1)}, (X, X), (X * X).T),
    "-1": (rg.multiply, {"in_axes": (-1, 1)}, (X, X), (X * X).T),
    "None": (rg.multiply, {"in_axes": (0, None)}, (X, X), X[:, None] * X),
    "of a dict": (lambda p: p["a"] * p["b"][0], {"in_axes": ({"a": 0, "b": None},)},
                  ({"a": X, "b": (X[0],)},), X * X[0]),
    "two of a dict": (lambda p: p["a"] * p["b"], {"in_axes": ({"a": 0, "b": 1},)},
                      ({"a": X, "b": X.T},), X * X),
    "out": (lambda x: (x, {"y": x * 2}), {"out_axes": 1}, (X,), (X.T, {"y": 2 * X.T})),
    "out of a dict": (lambda x: (x, {"y": x * 2}), {"out_axes": (0, {"y": -1})}, (X,),
                      (X, {"y": 2 * X.T})),
    "a constant": (lambda x: rg.scalar(1.0), {}, (X,), np.ones(3)),
    "an index": (lambda x, i: x[i], {}, (X, I), np.array([0.0, 3.0, 4.0])),
    "an integer": (lambda x: x.argmax(), {}, (X,), np.ones(3)),
}  # fmt: skip


@DATA
@pytest.mark.parametrize("name", AXES)
def test_axes_and_containers(name, data):
    f, options, given, due = AXES[name]
    found = rg.vmap(f, **options)(*converted(given, data))
    assert numbers(found) == numbers(due)


@pytest.mark.slow(but=1)
@DATA
def test_gradients_through_and_per_example(data):
    w, xs = rg.asarray(data(np.array([0.5, -1.0]))), rg.asarray(data(X))
    f = lambda w, x: rg.tanh((w * x).sum())  # noqa: E731
    looped = lambda w: rg.stack([f(w, x) for x in rg.unstack(xs)]).sum()  # noqa: E731
    through = lambda w: rg.vmap(f, in_axes=(None, 0))(w, xs).sum()  # noqa: E731
    closed = lambda w: rg.vmap(lambda x: f(w, x))(xs).sum()  # noqa: E731
    squared = lambda g: lambda w: (rg.grad(g)(w) ** 2).sum()  # noqa: E731
    each = rg.vmap(lambda w, x: rg.grad(lambda w: f(w, x))(w), in_axes=(None, 0))(w, xs)
    np.testing.assert_allclose(each.sum(axis=0).numpy(), rg.grad(looped)(w).numpy(), rtol=1e-12)
    for _ in range(3):
        due = rg.grad(looped)(w).numpy()
        for g in (through, closed):
            for found in rg.grad(g)(w), rg.jit(rg.grad(g))(w):
                np.testing.assert_allclose(found.numpy(), due, rtol=1e-10, atol=1e-12)
        through, closed, looped = squared(through), squared(closed), squared(looped)


@DATA
def test_variables(data):
    v = rg.Variable(np.array([2.0, 3.0]), name="v")
    f = lambda x: (x * v).sum()  # noqa: E731
    value, grads = rg.variable_grads(lambda: rg.vmap(f)(data(X)).sum())
    assert (value.item(), grads["v"].tolist()) == (39.0, X.sum(0).tolist())
    each = rg.vmap(lambda x: rg.variable_grads(lambda: f(x)).grads["v"])(data(X))
    assert each.tolist() == X.tolist()
    with pytest.raises(TraceError, match="assigns to the Variable 'v'"):
        rg.vmap(lambda x: (v.assign(x), x)[1])(data(X))
    assert v.tolist() == [2.0, 3.0]


@DATA
def test_rules_see_single_examples(data):
    shapes, gradient = [], rg.grad(lambda x: rg.vmap(rg.sign)(x).sum())
    rule = lambda dy, x: shapes.append((dy.shape, x.shape)) or dy * 3.0  # noqa: E731
    with rg.gradient_override_map({"Sign": rule}) as used:
        assert gradient(data(X)).tolist() == np.full((3, 2), 3.0).tolist()
    assert set(shapes) == {((2,), (2,))}
    used.assert_fired()
    wrong = {"Sign": lambda dy: rg.ones((3, 2), dtype="float64")}
    words = r"shape \(3, 2\), expected \(2,\)"
    refused(lambda: under(wrong, gradient, data(X)), RuleError, words)


@DATA
def test_custom_gradients(data):
    clipped = rg.custom_grad(lambda x: (x * 1.0, lambda dy: rg.clip(dy, -1.0, 1.0)))
    f = lambda x: (rg.vmap(clipped)(x) * 10.0).sum()  # noqa: E731
    for g in (rg.grad(f), rg.jit(rg.grad(f)), rg.grad(rg.jit(f))):
        assert g(data(X)).tolist() == np.ones((3, 2)).tolist()
    closing = lambda w: rg.custom_grad(lambda x: (x * w, lambda dy: dy))  # noqa: E731
    with pytest.raises(GradientError, match=r"closes over|no path"):
        rg.grad(lambda w: rg.vmap(closing(w))(data(X)).sum())(rg.asarray(np.float64(2.0)))


@DATA
def test_nests(data):
    f = lambda a, b: rg.sin(a * b)  # noqa: E731
    table = rg.vmap(rg.vmap(f, in_axes=(None, 0)), in_axes=(0, None))
    a, b = X[:, 0], X[0]
    for g in (table, rg.jit(table), rg.vmap(rg.jit(rg.vmap(f, in_axes=(None, 0))), (0, None))):
        np.testing.assert_allclose(g(data(a), data(b)).numpy(), np.sin(a[:, None] * b), rtol=1e-12)
    dx = rg.grad(lambda a: table(a, data(b)).sum())(data(a))
    np.testing.assert_allclose(dx.numpy(), (b * np.cos(a[:, None] * b)).sum(1), rtol=1e-12)


@DATA
def test_jacobians_by_vmap(data):
    f, x = (lambda x: rg.sin(x) * x.sum()), np.array([0.5, -1.0, 2.0])
    rows = rg.vmap(lambda dy: rg.vjp(f, x)[1](dy)[0])(data(np.eye(3)))
    np.testing.assert_allclose(rows.numpy(), rg.jacobian(f)(x).numpy(), rtol=1e-12)


def test_what_numpy_data_allow_and_jax_data_do_not():
    assert rg.vmap(lambda x: x * 2 if x > 2 else x)(X[:, 1]).tolist() == [1.0, 6.0, 10.0]
    assert rg.vmap(rg.sin)(jnp.zeros((0, 2))).shape == (0, 2)


# -- results of several entries --------------------------------------------------------------------

ENTRIES = rg.tensor([1.0, -1.0])
STACKED = {
    "a number": (lambda x: 2, [2, 2]),
    "a number for one entry": (lambda x: rg.cond(x > 0, lambda: 1.0, lambda: x * 2), [1.0, -2.0]),
    "an integer for one entry": (lambda x: rg.cond(x > 0, lambda: 1, lambda: x * 2), [1.0, -2.0]),
    "in a dict": (lambda x: {"b": True, "a": x}["b"], [True, True]),
}
BY_ENTRY = {
    "map": lambda f: lambda x: rg.map(f, x),
    "vmap": rg.vmap,
    "scan": lambda f: lambda x: rg.scan(lambda c, v: (c, f(v)), 0.0, x)[1],
}


@pytest.mark.parametrize("by_entry", BY_ENTRY.values(), ids=BY_ENTRY)
@pytest.mark.parametrize("name", STACKED)
def test_numbers_that_a_function_returns_are_stacked(name, by_entry):
    f, expected = STACKED[name]
    for run in (by_entry(f), rg.jit(by_entry(f))):
        found = run(ENTRIES)
        assert isinstance(found, rg.Tensor) and found.tolist() == expected


@pytest.mark.parametrize("by_entry", BY_ENTRY.values(), ids=BY_ENTRY)
def test_results_of_entries_have_one_structure(by_entry):
    def keys_in_another_order(x):
        return {"a": x, "b": x} if x.item() > 0 else {"b": x, "a": x}

    assert by_entry(keys_in_another_order)(ENTRIES)["a"].tolist() == [1.0, -1.0]
    for f in (lambda x: x if x.item() > 0 else (x, x), lambda x: (x, str(x.item()))):
        with pytest.raises(ArgumentError, match=r"f returned .* for one entry, and .* for another"):
            by_entry(f)(ENTRIES)
