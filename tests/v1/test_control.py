"""cond, case, while_loop, Print, group and tuple: values, gradients, second order, overrides."""

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.errors import GradientError, GraphError
from tests.helpers.v1_session import run, values

pytestmark = pytest.mark.usefixtures("graph")


# -- cond ----------------------------------------------------------------------------------------


def cubed_or_squared(x):
    return tf.cond(x > 0.0, lambda: x * x * x, lambda: x * x)


@pytest.mark.parametrize(
    ("value", "due"), [(2.0, [8.0, 12.0, 12.0, 6.0]), (-2.0, [4.0, -4.0, 2.0, 0.0])]
)
def test_cond_takes_a_branch_at_every_order(value, due):
    x = tf.placeholder(tf.float32, [])
    y, orders = cubed_or_squared(x), []
    for _ in range(4):
        orders.append(0.0 if y is None else run(y, {x: value}))
        (y,) = tf.gradients(y, x) if y is not None else [None]
    assert orders == due


def test_cond_gives_gradients_to_what_its_branches_use():
    a, b, which = tf.constant(2.0), tf.constant(3.0), tf.placeholder(tf.bool, [])
    y = tf.cond(which, lambda: a * 5.0, lambda: a * b)
    grads = tf.gradients(y, [a, b])
    assert run(grads, {which: True}) == [5.0, 0.0]
    assert run(grads, {which: False}) == [3.0, 2.0]


def test_cond_runs_only_the_branch_that_it_takes():
    calls, v = [], tf.Variable(1.0)
    which = tf.placeholder(tf.bool, [])

    def traced(name, value):
        return tf.py_func(lambda: calls.append(name) or value, [], tf.float32)

    y = tf.cond(
        which,
        lambda: traced("yes", np.float32(1.0)),
        lambda: v.assign_add(10.0) + traced("no", np.float32(2.0)),
    )
    with tf.Session() as session:
        session.run(v.initializer)
        assert session.run(y, {which: True}) == 1.0
        assert (calls, session.run(v)) == (["yes"], 1.0)
        assert session.run(y, {which: False}) == 13.0
        assert (calls, session.run(v)) == (["yes", "no"], 11.0)


def test_cond_returns_structures():
    x, which = tf.constant(2.0), tf.placeholder(tf.bool, [])
    a, b = tf.cond(which, lambda: (x, x * 2.0), lambda: (x * 3.0, x * 4.0))
    assert run([a, b], {which: False}) == [6.0, 8.0]
    assert values(tf.gradients([a, b], x), {which: False}) == [7.0]


def test_cond_nests():
    x = tf.placeholder(tf.float32, [])
    inner = lambda: tf.cond(x > 10.0, lambda: x * 2.0, lambda: x * 3.0)  # noqa: E731
    y = tf.cond(x > 0.0, inner, lambda: x * 4.0)
    (dx,) = tf.gradients(y, x)
    assert [run(dx, {x: value}) for value in (20.0, 5.0, -1.0)] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        (lambda x: x, lambda x: tf.constant(1)),
        (lambda x: (x, x), lambda x: (x,)),
    ],
    ids=["dtypes", "structures"],
)
def test_branches_of_cond_must_agree(yes, no):
    x = tf.constant(2.0)
    with pytest.raises((TypeError, ValueError)):
        tf.cond(tf.constant(True), lambda: yes(x), lambda: no(x))


def test_overrides_bind_inside_branches(graph):
    x, which = tf.constant(3.0), tf.placeholder(tf.bool, [])

    def inside():
        with graph.gradient_override_map({"Sign": lambda op, grad: grad * 5.0}):
            return tf.sign(x)

    with graph.gradient_override_map({"Sign": lambda op, grad: grad * op.inputs[0]}) as used:
        y = tf.cond(which, inside, lambda: tf.sign(x))
    (dx,) = tf.gradients(y, x)
    assert [run(dx, {which: True}), run(dx, {which: False})] == [5.0, 3.0]
    (ddx,) = tf.gradients(dx, x)
    assert run(ddx, {which: False}) == 1.0
    used.assert_fired()


@pytest.mark.parametrize(
    ("value", "due"), [(-1.0, [1.0, -2.0]), (0.5, [1.5, 3.0]), (2.0, [8.0, 4.0])]
)
def test_case_takes_the_first_that_is_true(value, due):
    x = tf.placeholder(tf.float32, [])
    pairs = [(x < 0.0, lambda: x * x), (x < 1.0, lambda: x * 3.0)]
    y = tf.case(pairs, default=lambda: x * 4.0)
    assert run([y, *tf.gradients(y, x)], {x: value}) == due


# -- while_loop ----------------------------------------------------------------------------------


def power(x, n):
    """`x ** n` by multiplication."""
    start = (tf.constant(0), tf.ones_like(x))
    return tf.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, y * x), start)[1]


@pytest.mark.parametrize(
    ("n", "due"),
    [
        (0, [1.0, 0.0, 0.0]),
        (1, [2.0, 1.0, 0.0]),
        (2, [4.0, 4.0, 2.0]),
        (5, [32.0, 80.0, 160.0]),
    ],
)
def test_a_loop_of_so_many_turns_as_the_run_says(n, due):
    x, turns = tf.constant(2.0), tf.placeholder(tf.int32, [])
    y = power(x, turns)
    (dx,) = tf.gradients(y, x)
    (ddx,) = tf.gradients(dx, x)
    assert run([y, dx, ddx], {turns: n}) == due


def test_a_loop_of_one_variable():
    x = tf.constant(1.0)
    y = tf.while_loop(lambda y: y < 100.0, lambda y: y * 2.0, [x])
    assert isinstance(y, tf.Tensor)
    assert run([y, *tf.gradients(y, x)]) == [128.0, 128.0]


def test_a_loop_carries_structures():
    x = tf.constant([1.0, 2.0])
    i, (total, pair) = tf.while_loop(
        lambda i, state: i < 3,
        lambda i, state: (i + 1, (state[0] + state[1] * x, state[1] * 2.0)),
        (tf.constant(0), (tf.zeros([2]), tf.constant(1.0))),
    )
    assert [a.tolist() for a in run([i, total, pair])] == [3, [7.0, 14.0], 8.0]
    assert values(tf.gradients(total, x)) == [[7.0, 7.0]]


def test_a_loop_gives_gradients_to_start_and_closure():
    start, factor, offset = tf.constant(1.0), tf.Variable(3.0), tf.constant(10.0)
    _, y = tf.while_loop(
        lambda i, y: i < 2, lambda i, y: (i + 1, y * factor + offset), (tf.constant(0), start)
    )
    assert run(y) == 49.0
    assert values(tf.gradients(y, [start, factor, offset])) == [9.0, 16.0, 4.0]


def test_a_loop_ends_at_its_maximum():
    y = tf.while_loop(
        lambda y: y < 100.0, lambda y: y * 2.0, [tf.constant(1.0)], maximum_iterations=3
    )
    assert run(y) == 8.0


def test_loops_and_branches_nest():
    x = tf.constant(2.0)

    def body(i, y):
        return i + 1, tf.cond(tf.equal(i % 2, 0), lambda: y * x, lambda: y + power(x, i + 1))

    _, y = tf.while_loop(lambda i, y: i < 4, body, (tf.constant(0), tf.constant(1.0)))
    # ((1·x + x²)·x + x⁴) = x² + x³ + x⁴
    (dx,) = tf.gradients(y, x)
    (ddx,) = tf.gradients(dx, x)
    assert run([y, dx, ddx]) == [28.0, 48.0, 62.0]


def test_overrides_bind_inside_loops(graph):
    x, turns = tf.constant(2.0), tf.placeholder(tf.int32, [])

    def body(i, y):
        with graph.gradient_override_map({"Identity": lambda op, grad: -grad * op.inputs[0]}):
            return i + 1, tf.identity(y) * 1.0

    _, y = tf.while_loop(lambda i, y: i < turns, body, (tf.constant(0), x))
    (dx,) = tf.gradients(y, x)
    (ddx,) = tf.gradients(dx, x)
    assert [run(dx, {turns: n}) for n in range(4)] == [1.0, -2.0, 4.0, -8.0]
    assert run(ddx, {turns: 1}) == -1.0


def test_an_outer_override_reaches_into_loops(graph):
    x = tf.constant(0.5)
    with graph.gradient_override_map({"Sign": "Identity"}) as used:
        _, y = tf.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, tf.sign(y) * 2.0), (tf.constant(0), x)
        )
    assert run([y, *tf.gradients(y, x)]) == [2.0, 8.0]
    used.assert_fired()


@pytest.mark.parametrize(
    "body",
    [lambda i, y: (i + 1,), lambda i, y: (i + 1, tf.cast(y, tf.int32)), lambda i, y: (i, [y, y])],
    ids=["fewer", "dtype", "structure"],
)
def test_a_body_must_return_what_it_was_given(body):
    with pytest.raises((TypeError, ValueError)):
        tf.while_loop(lambda i, y: i < 3, body, (tf.constant(0), tf.constant(1.0)))


def test_a_loop_of_many_turns():
    x = tf.constant(1.0)
    _, y = tf.while_loop(
        lambda i, y: i < 3000, lambda i, y: (i + 1, y + x), (tf.constant(0), tf.constant(0.0))
    )
    assert run([y, *tf.gradients(y, x)]) == [3000.0, 3000.0]


# -- Print, group, tuple, control_dependencies ---------------------------------------------------


def test_print_passes_value_and_gradient_and_prints_to_stderr(capfd):
    x = tf.constant([1.0, 2.0])
    y = tf.Print(x, [x, tf.constant(7)], message="seen: ")
    assert values([y * 3.0, *tf.gradients(y * 3.0, x)]) == [[3.0, 6.0], [3.0, 3.0]]
    out, err = capfd.readouterr()
    assert "seen: [1 2][7]" in err
    assert out == ""


def test_tuple_waits_for_everything():
    v = tf.Variable(1.0)
    a, b = tf.constant(2.0), v.assign_add(5.0)
    waited, _ = tf.tuple([a, b])
    with tf.Session() as session:
        session.run(v.initializer)
        assert session.run(waited) == 2.0
        assert session.run(v) == 6.0
    assert values(tf.gradients(waited * 3.0, a)) == [3.0]


def test_tuple_takes_none_and_more_to_wait_for():
    v = tf.Variable(1.0)
    a = tf.constant(2.0)
    waited, none = tf.tuple([a, None], control_inputs=[v.assign_add(5.0).op])
    assert none is None
    with tf.Session() as session:
        session.run(v.initializer)
        assert session.run(waited) == 2.0
        assert session.run(v) == 6.0


def test_nested_groups_run_in_the_order_of_their_dependencies():
    calls = []

    def note(name):
        return tf.py_func(lambda: calls.append(name) or 0, [], tf.int64)

    with tf.control_dependencies([note("first")]):
        second = tf.group(note("second"))
        with tf.control_dependencies([second]):
            third = note("third")
    everything = tf.group(tf.group(third), tf.no_op())
    assert run(everything) is None
    assert calls == ["first", "second", "third"]


def test_dependencies_reach_into_branches():
    v, x = tf.Variable(1.0), tf.constant(2.0)
    with tf.control_dependencies([v.assign_add(1.0)]):
        y = tf.cond(tf.constant(True), lambda: x * v.read_value(), lambda: x)
    assert run(y) == 4.0


def test_a_rule_inside_a_loop_may_use_what_the_loop_does_not():
    x, scale = tf.constant(2.0), tf.Variable(3.0)
    with tf.get_default_graph().gradient_override_map({"Square": lambda op, dy: dy * scale}):
        _, y = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.square(y)), [0, x])
    (dx,) = tf.gradients(y, x)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run([y, dx]) == [16.0, 9.0]


def test_a_rule_inside_a_branch_may_use_what_the_branch_does_not():
    x, scale = tf.constant(2.0), tf.Variable(3.0)
    p = tf.placeholder(tf.bool, [])
    with tf.get_default_graph().gradient_override_map({"Square": lambda op, dy: dy * scale}):
        y = tf.cond(p, lambda: tf.square(x), lambda: -x)
    (dx,) = tf.gradients(y, x)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run([y, dx], {p: True}) == [4.0, 3.0]
        assert session.run([y, dx], {p: False}) == [-2.0, -1.0]


# -- complex numbers -------------------------------------------------------------------------------

COMPLEX = {  # holomorphic and not; TensorFlow's convention is conj(df/dz) where there is one
    "a cube": lambda z: z * z * z * 1j,
    "the real part": lambda z: tf.complex(tf.real(z * z * 1j), tf.imag(z) ** 3.0),
    "the conjugate": lambda z: tf.conj(z) * z * z,
    "exp": tf.exp,
}
REGIONS = {
    "cond": lambda f, z: tf.cond(tf.constant(True), lambda: f(z), lambda: z),
    "a cond in a cond": lambda f, z: tf.cond(
        tf.constant(True), lambda: tf.cond(tf.constant(True), lambda: f(z), lambda: z), lambda: z
    ),
    "while_loop, a variable": lambda f, z: tf.while_loop(
        lambda i, a: i < 2, lambda i, a: (i + 1, tf.cond(i < 1, lambda: f(a), lambda: a)), [0, z]
    )[1],
    "while_loop, a capture": lambda f, z: tf.while_loop(
        lambda i, a: i < 1, lambda i, a: (i + 1, f(z)), [0, z * 0.0]
    )[1],
}


@pytest.mark.parametrize("f", COMPLEX)
@pytest.mark.parametrize("region", REGIONS)
def test_complex_gradients_through_regions_at_three_orders(region, f):
    z = tf.placeholder(tf.complex128, [])
    feed = {z: 0.6 - 0.7j}

    def orders(y):
        found = []
        for _ in range(3):
            (y,) = tf.gradients(tf.real(y) + 2.0 * tf.imag(y), z)
            found.append(y)
        return run(found, feed)

    np.testing.assert_allclose(orders(REGIONS[region](COMPLEX[f], z)), orders(COMPLEX[f](z)))


@pytest.mark.parametrize("f", COMPLEX)
@pytest.mark.parametrize("region", REGIONS)
def test_complex_second_derivatives_agree_with_differences(region, f):
    z = tf.placeholder(tf.complex128, [])
    (d,) = tf.gradients(tf.real(REGIONS[region](COMPLEX[f], z)), z)
    (dd,) = tf.gradients(tf.real(d), z)
    at, h = 0.6 - 0.7j, 1e-5
    with tf.Session() as session:

        def slope(step):
            over, under = (session.run(tf.real(d), {z: at + s}) for s in (step, -step))
            return over - under

        by_parts = slope(h) / (2 * h) + 1j * slope(h * 1j) / (2 * h)
        np.testing.assert_allclose(session.run(dd, {z: at}), by_parts, atol=1e-7)


@pytest.mark.parametrize("nothing", [[], ()])
def test_a_python_function_without_results_is_an_operation(nothing):
    seen = []
    ran = tf.py_func(seen.append, [tf.constant(2.0)], nothing)
    assert isinstance(ran, tf.Operation)
    assert run(ran) is None
    with tf.control_dependencies([ran]):
        y = tf.identity(tf.constant(1.0))
    assert run(y) == 1.0
    assert seen == [2.0, 2.0]


# -- paths through branches and loops ------------------------------------------------------------


def in_cond(f):
    yes = tf.placeholder_with_default(True, [])
    return lambda x: tf.cond(yes, lambda: f(x), lambda: tf.identity(x))


def in_loop(f):
    def looped(x):
        start = [0, x]
        body = lambda i, v: (i + 1, f(v))  # noqa: E731
        return tf.while_loop(lambda i, v: i < 2, body, start, maximum_iterations=3)[1]

    return looped


AROUND = {
    "cond": (in_cond, 1),
    "while": (in_loop, 2),
    "cond in while": (lambda f: in_loop(in_cond(f)), 2),
    "while in cond": (lambda f: in_cond(in_loop(f)), 2),
    "while in while": (lambda f: in_loop(in_loop(f)), 4),
}


def scaled(w):
    """The function `w * v`, whose gradient is ten times as large."""

    @tf.custom_gradient
    def f(v):
        return w * v, lambda dy: dy * w * 10.0

    return f


CLOSED = {
    "constant": lambda c: c,
    "placeholder": lambda c: tf.placeholder_with_default(2.0, []),
    "variable": lambda c: tf.Variable(2.0, trainable=False),
    "stopped": tf.stop_gradient,
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("region", AROUND)
@pytest.mark.parametrize("closed", CLOSED)
def test_a_custom_gradient_inside_closes_over_what_nobody_differentiates(closed, region, jit):
    around, times = AROUND[region]
    x, c = tf.constant(5.0), tf.constant(2.0)
    dx = tf.gradients(around(scaled(CLOSED[closed](c)))(x), x)
    with tf.Session(jit=jit) as session:
        session.run(tf.global_variables_initializer())
        assert session.run(dx) == [20.0**times]


@pytest.mark.parametrize("region", AROUND)
def test_a_custom_gradient_inside_is_refused_by_what_it_closes_over(region):
    around, times = AROUND[region]
    a, x = tf.constant(1.0), tf.constant(5.0)
    c = 2.0 * a
    y = around(scaled(c))(x)
    for xs in (c, a, [x, a]):
        with pytest.raises(GradientError, match=r"closes over .*captured"):
            tf.gradients(y, xs)
    (dx,) = tf.gradients(y, x)
    assert run(dx) == 20.0**times
    (again,) = tf.gradients(y, x)
    assert run(again) == 20.0**times


@pytest.mark.parametrize("region", AROUND)
def test_a_custom_gradient_may_stop_the_gradient_itself(region):
    around, times = AROUND[region]
    x, c = tf.constant(5.0), tf.constant(2.0)

    @tf.custom_gradient
    def f(v):
        return tf.stop_gradient(c) * v, lambda dy: dy * 20.0

    assert run(tf.gradients(around(f)(x) * c, [x, c])) == [2 * 20.0**times, 5 * 2.0**times]


@pytest.mark.parametrize("region", AROUND)
def test_what_a_custom_gradient_closes_over_is_refused_at_second_order(region):
    x, c = tf.constant(0.5), tf.constant(2.0)
    (dx,) = tf.gradients(AROUND[region][0](scaled(c))(x) ** 2.0, x)
    with pytest.raises(GradientError, match="closes over"):
        tf.gradients(dx, c)


def test_a_second_derivative_in_a_loop_says_that_a_gradient_function_reads_the_graph():
    x, c = tf.constant(0.5), tf.constant(2.0)
    (dx,) = tf.gradients(in_loop(lambda v: scaled(c)(v) ** 2.0)(x), x)
    (ddx,) = tf.gradients(dx, x)
    with pytest.raises(GraphError, match="gradient function of f uses tensors of the graph"):
        run(ddx)


def test_a_custom_gradient_in_a_branch_has_a_second_derivative():
    x, c = tf.constant(0.5), tf.constant(2.0)
    y = in_cond(scaled(c))(x) ** 2.0  # dy/dx = 2 (c x) 10 c, and again c -> 10 c
    (dx,) = tf.gradients(y, x)
    assert values([dx, *tf.gradients(dx, x)]) == [40.0, 800.0]


def logged(kind, f, x):
    """The last of two results, of which the first is only logged."""
    if kind == "cond":
        yes = tf.placeholder_with_default(True, [])
        return tf.cond(yes, lambda: (f(x), x * x + x), lambda: (x, x))[1]
    one = lambda v: (f(v), v * v + v)  # noqa: E731
    if kind == "cond in while":
        yes = tf.placeholder_with_default(True, [])
        one = lambda v: tf.cond(yes, lambda: (f(v), v * v + v), lambda: (v, v))  # noqa: E731
    body = lambda i, log, v: (i + 1, *one(v))  # noqa: E731
    return tf.while_loop(lambda i, log, v: i < 1, body, [0, x, x], maximum_iterations=2)[2]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", ["cond", "while", "cond in while"])
def test_a_result_that_nobody_uses_has_no_part_in_the_gradient(kind, jit):
    x = tf.constant(0.0)
    for f in (tf.log, tf.sqrt, scaled(x)):
        y = logged(kind, f, x)
        (dx,) = tf.gradients(y, x)
        with tf.Session(jit=jit) as session:
            assert session.run([dx, *([] if jit else tf.gradients(dx, x))]) == [1.0, 2.0][: 2 - jit]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("fed", "which", "due"),  # of jax.lax.scan, with exp as a custom_vjp of the same gradient
    [(False, 2, 0.125), (True, 2, 2.05), (False, 1, 1.75), (True, 1, 1.9)],
)
def test_a_variable_is_used_if_any_iteration_uses_it(graph, fed, which, due, jit):
    x = tf.constant(0.5)

    def body(i, a, v):
        return i + 1, tf.exp(v), v * 0.5 + (0.1 * a if fed else 0.0)

    with graph.gradient_override_map({"Exp": lambda dy: 0.0 * dy + 1.0}):
        ys = tf.while_loop(lambda i, a, v: i < 3, body, [0, x, x])
    with tf.Session(jit=jit) as session:
        np.testing.assert_allclose(session.run(tf.gradients(ys[which], x)), [due], rtol=1e-6)


def test_variables_that_pass_through_each_other_agree_with_differences():
    x, z = tf.placeholder(tf.float64, []), tf.placeholder(tf.float64, [])
    body = lambda i, a, b, c: (i + 1, b * z, c * 2.0, a * a)  # noqa: E731
    for turns in (0, 1, 2, 4):
        start = [0, x, x * 3.0, x * 5.0]
        y = tf.while_loop(lambda i, a, b, c, n=turns: i < n, body, start)[1]
        found = run(tf.gradients(y, [x, z], unconnected_gradients="zero"), {x: 0.5, z: 2.0})
        at = lambda p, q, y=y: run(y, {x: p, z: q})  # noqa: E731
        by_x, by_z = (
            at(0.5 + 1e-6, 2.0) - at(0.5 - 1e-6, 2.0),
            at(0.5, 2 + 1e-6) - at(0.5, 2 - 1e-6),
        )
        np.testing.assert_allclose(found, [by_x / 2e-6, by_z / 2e-6], rtol=1e-6)


def test_no_gradient_leads_from_a_result_to_what_it_does_not_use():
    x, z = tf.constant(2.0), tf.constant(3.0)
    yes = tf.placeholder_with_default(True, [])
    y = tf.cond(yes, lambda: (x * 2.0, z * 2.0), lambda: (x, z))[0]
    w = tf.while_loop(lambda i, a, b: i < 2, lambda i, a, b: (i + 1, a * 2.0, b * z), [0, x, z])[1]
    assert tf.gradients(y, z) == tf.gradients(w, z) == [None]
