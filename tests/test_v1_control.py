"""cond, case, while_loop, Print, group and tuple: values, gradients, second order, overrides."""

import numpy as np
import pytest

import regrad.v1 as tf
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
