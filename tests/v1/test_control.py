"""cond, case, while_loop, Print, group and tuple: values, gradients, second order, overrides."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import GradientError
from tests.helpers.rows import refused
from tests.helpers.v1_session import initialized, overridden, powers, run, values

pytestmark = pytest.mark.usefixtures("graph")


# -- values and derivatives, in plain and in compiled sessions -------------------------------------


def count_to(n, body, *start, **options):
    """`body`, n times, on the start values; the last of the results."""
    turn = lambda i, *a: (i + 1, *body(i, *a))  # noqa: E731
    return tf.while_loop(lambda i, *a: i < n, turn, [tf.constant(0), *start], **options)[-1]


def nested_cond(x):
    inner = lambda: tf.cond(x > 10.0, lambda: x * 2.0, lambda: x * 3.0)  # noqa: E731
    return tf.cond(x > 0.0, inner, lambda: x * 4.0)


def case(x):
    pairs = [(x < 0.0, lambda: x * x), (x < 1.0, lambda: x * 3.0)]
    return tf.case(pairs, default=lambda: x * 4.0)


def carried_structures(x):
    _, (total, pair) = tf.while_loop(
        lambda i, state: i < 3,
        lambda i, state: (i + 1, (state[0] + state[1] * x, state[1] * 2.0)),
        (tf.constant(0), (tf.zeros([2]), tf.constant(1.0))),
    )
    return total * pair


def nested_numbers(x):
    turn = lambda i, a: (i + 1, [a[0] * x, a[1] + a[0]])  # noqa: E731
    return tf.while_loop(lambda i, a: i < 3, turn, [0, [1.0, 2.0]])[1][1]


def doubled_to_100(x, **options):
    y = tf.while_loop(lambda y: y < 100.0, lambda y: y * 2.0, [x], **options)
    assert isinstance(y, tf.Tensor)
    return y


def branches_in_a_loop(x):
    """((1·x + x²)·x + x⁴) = x² + x³ + x⁴."""
    body = lambda i, y: [  # noqa: E731
        tf.cond(tf.equal(i % 2, 0), lambda: y * x, lambda: y + powers(x, i + 1, **BOUND))
    ]
    return count_to(4, body, tf.constant(1.0))


def growing(x):
    shapes = [tf.TensorShape([]), tf.TensorShape([None])]
    return count_to(3, lambda i, y: [tf.concat([y, x], 0)], x, shape_invariants=shapes)


def inner_rule_in_a_branch(x, which):
    inside = lambda: overridden({"Sign": lambda op, dy: dy * 5.0}, tf.sign, x)  # noqa: E731
    build = lambda: tf.cond(which, inside, lambda: tf.sign(x))  # noqa: E731
    return overridden({"Sign": lambda op, dy: dy * op.inputs[0]}, build)


def rule_in_a_loop(x, n):
    rule = {"Identity": lambda op, dy: -dy * op.inputs[0]}
    return count_to(n, lambda i, y: [overridden(rule, tf.identity, y) * 1.0], x, **BOUND)


def with_a_scale(build):
    """What `build` makes, where the rule of Square uses a variable of the value 3."""
    scale = tf.Variable(3.0)
    return overridden({"Square": lambda op, dy: dy * scale}, build)


def used_later(x, fed):
    body = lambda i, a, v: (i + 1, tf.exp(v), v * 0.5 + (0.1 * a if fed else 0.0))  # noqa: E731
    rules, condition = {"Exp": lambda dy: 0.0 * dy + 1.0}, lambda i, a, v: i < 3
    return overridden(rules, tf.while_loop, condition, body, [0, x, x])


def both_results(x, which):
    a, b = tf.cond(which, lambda: (x, x * 2.0), lambda: (x * 3.0, x * 4.0))
    return a + b


def start_and_closure(start, factor, offset):
    return count_to(2, lambda i, y: [y * factor + offset], start)


SECOND = 0.15 + 0.1 * np.exp(0.5)  # the value after two turns of `used_later`
LATER = 0.5 * SECOND + 0.1 * np.exp(0.3)
BOUND, SIGN = {"maximum_iterations": 9}, {"Sign": "Identity"}
FLOWS = {  # a function, inputs, and the value and the derivatives by the first that are due
    "cond": (lambda x: tf.cond(x > 0.0, lambda: x * x * x, lambda: x * x),
             [([2.0], [8.0, 12.0, 12.0, 6.0]), ([-2.0], [4.0, -4.0, 2.0, 0.0])]),
    "cond in cond": (nested_cond,
                     [([20.0], [40.0, 2.0]), ([5.0], [15.0, 3.0]), ([-1.0], [-4.0, 4.0])]),
    "cond, one side": (lambda b, a, p: tf.cond(p, lambda: a * 5.0, lambda: a * b),
                       [([3.0, 2.0, True], [10.0, 0.0]), ([3.0, 2.0, False], [6.0, 2.0])]),
    "cond, both sides": (lambda a, b, p: tf.cond(p, lambda: a * 5.0, lambda: a * b),
                         [([2.0, 3.0, True], [10.0, 5.0]), ([2.0, 3.0, False], [6.0, 3.0])]),
    "cond of tuples": (both_results, [([2.0, False], [14.0, 7.0]), ([2.0, True], [6.0, 3.0])]),
    "cond, a sine": (lambda x: tf.cond(x > 0.0, lambda: x * x * 4.0, lambda: -tf.sin(x)),
                     [([2.0], [16.0, 16.0, 8.0]),
                      ([-3.0], [np.sin(3.0), -np.cos(-3.0), np.sin(-3.0)])]),
    "case": (case, [([-1.0], [1.0, -2.0]), ([0.5], [1.5, 3.0]), ([2.0], [8.0, 4.0])]),
    "a loop": (lambda x, n: powers(x, n, **BOUND),
               [([2.0, 0], [1.0, 0.0]), ([2.0, 1], [2.0, 1.0]), ([2.0, 5], [32.0, 80.0]),
                ([2.0, 12], [512.0, 2304.0])]),
    "a loop, in a plain session": (
        powers, [([2.0, 0], [1.0, 0.0, 0.0]), ([2.0, 1], [2.0, 1.0, 0.0]),
                 ([2.0, 2], [4.0, 4.0, 2.0]), ([2.0, 5], [32.0, 80.0, 160.0])]),
    "a loop of 5": (lambda x: powers(x, 5),
                    [([2.0], [32.0, 80.0, 160.0]), ([-0.5], [-1 / 32, 0.3125, -2.5])]),
    "one variable": (lambda x: doubled_to_100(x, **BOUND), [([1.0], [128.0, 128.0])]),
    "a maximum": (lambda x: doubled_to_100(x, maximum_iterations=3), [([1.0], [8.0, 8.0])]),
    "structures": (carried_structures, [([[1.0, 2.0]], [[56.0, 112.0], [56.0, 56.0]])]),
    "structures of numbers": (nested_numbers, [([2.0], [9.0, 5.0, 2.0])]),  # 2 + 1 + x + x²
    "start": (start_and_closure, [([1.0, 3.0, 10.0], [49.0, 9.0])]),
    "closure": (lambda w, a, b: start_and_closure(a, w, b),
                [([3.0, 1.0, 10.0], [49.0, 16.0, 2.0])]),
    "offset": (lambda b, a, w: start_and_closure(a, w, b), [([10.0, 1.0, 3.0], [49.0, 4.0])]),
    "branches in a loop": (branches_in_a_loop, [([2.0], [28.0, 48.0, 62.0])]),
    "a growing variable": (growing, [([[1.0, 2.0]], [[1.0, 2.0] * 4, [4.0, 4.0]])]),
    "a rule in a branch": (inner_rule_in_a_branch,
                           [([3.0, True], [1.0, 5.0, 0.0]), ([3.0, False], [1.0, 3.0, 1.0])]),
    "a rule around a branch": (
        lambda x: overridden(
            SIGN, tf.cond, x > 0.0, lambda: tf.sign(x) * 2.0, lambda: tf.sign(x) * 3.0),
        [([-2.0], [-3.0, 3.0]), ([2.0], [2.0, 2.0])]),
    "a rule in a loop": (rule_in_a_loop, [([2.0, n], [2.0, (-2.0) ** n]) for n in range(4)]),
    "a rule in a loop of 1": (lambda x: rule_in_a_loop(x, 1), [([2.0], [2.0, -2.0, -1.0])]),
    "a rule around a loop": (
        lambda x: overridden(SIGN, count_to, 3, lambda i, y: [tf.sign(y) * 2.0], x),
        [([0.5], [2.0, 8.0])]),
    # of jax.lax.scan, with exp as a custom_vjp of the same gradient
    "a variable that no turn uses": (lambda x: used_later(x, False)[2], [([0.5], [0.0625, 0.125])]),
    "a variable that a turn uses": (lambda x: used_later(x, True)[2], [([0.5], [LATER, 2.05])]),
    "the other, unused": (lambda x: used_later(x, False)[1], [([0.5], [np.exp(0.125), 1.75])]),
    "the other, used": (lambda x: used_later(x, True)[1], [([0.5], [np.exp(SECOND), 1.9])]),
    "a loop's rule uses more": (
        lambda x: with_a_scale(lambda: count_to(2, lambda i, y: [tf.square(y)], x)),
        [([2.0], [16.0, 9.0])]),
    "a custom gradient in a branch": (  # dy/dx = 2 (c x) 10 c, and again c -> 10 c
        lambda x: in_cond(scaled(tf.constant(2.0)))(x) ** 2.0, [([0.5], [1.0, 40.0, 800.0])]),
    "a branch's rule uses more": (
        lambda x, p: with_a_scale(lambda: tf.cond(p, lambda: tf.square(x), lambda: -x)),
        [([2.0, True], [4.0, 3.0]), ([2.0, False], [-2.0, -1.0])]),
}  # fmt: skip
KINDS = {float: tf.float32, list: tf.float32, int: tf.int32, bool: tf.bool}


FLOWS_JIT = [(name, jit) for name in FLOWS for jit in (False, True)[: 2 - ("plain" in name)]]


@pytest.mark.parametrize(("name", "jit"), FLOWS_JIT)
def test_values_and_derivatives(name, jit):
    f, cases = FLOWS[name]
    xs = [tf.placeholder(KINDS[type(x)], np.shape(x)) for x in cases[0][0]]
    found = [f(*xs)]
    for _ in cases[0][1][1:]:
        found += tf.gradients(found[-1], xs[0])
    with tf.Session(jit=jit) as session:
        initialized(session)
        for inputs, due in cases:
            feed = dict(zip(xs, inputs, strict=True))
            for got, expected in zip(session.run(found, feed), due, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_loop_of_many_turns():
    x = tf.constant(1.0)
    y = count_to(3000, lambda i, y: [y + x], tf.constant(0.0))
    assert run([y, *tf.gradients(y, x)]) == [3000.0, 3000.0]


DISAGREE = {
    "dtypes of cond": lambda x: tf.cond(x > 0.0, lambda: x, lambda: tf.constant(1)),
    "structures of cond": lambda x: tf.cond(x > 0.0, lambda: (x, x), lambda: (x,)),
    "fewer in a loop": lambda x: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1,), (0, x)),
    "dtypes in a loop": lambda x: count_to(3, lambda i, y: [tf.cast(y, tf.int32)], x),
    "structures in a loop": lambda x: count_to(3, lambda i, y: [[y, y]], x),
}


@pytest.mark.parametrize("name", DISAGREE)
def test_branches_and_turns_must_agree(name):
    refused(lambda: DISAGREE[name](tf.constant(2.0)), (TypeError, ValueError))


YES = lambda: tf.constant(True)  # noqa: E731
NOT_BUILT = {  # a function of a float, the error, and words of its message
    "group of a number": (lambda x: tf.group(x, 3), TypeError, "group takes.*got 3"),
    "tuple of None": (lambda x: tf.tuple([None]), ValueError, "tuple: .*at least one tensor"),
    "cond: a tensor": (lambda x: tf.cond(x > 0.0, lambda: x, x), TypeError, "false_fn.*callable"),
    "cond: a bool": (lambda x: tf.cond(True, lambda: x, lambda: x), TypeError, "Python if"),
    "cond: a float": (lambda x: tf.cond(x, lambda: x, lambda: x), TypeError, "a bool tensor"),
    "cond: a vector": (
        lambda x: tf.cond(tf.constant([True]), lambda: x, lambda: x), ValueError, "rank 0"),
    "cond: nothing": (
        lambda x: tf.cond(YES(), lambda: x, lambda: None), ValueError, "return a tensor.*None"),
    "case: no pairs": (lambda x: tf.case([], lambda: x), ValueError, "case: .*at least one pair"),
    "while_loop: a bool": (lambda x: tf.while_loop(True, lambda a: a, [x]), TypeError, "callable"),
    "while_loop: no variables": (
        lambda x: tf.while_loop(YES, list, []), ValueError, "No loop variables"),
    "while_loop: nothing": (
        lambda x: tf.while_loop(lambda a: a < 3.0, lambda a: None, [x]), ValueError,
        "as many values.*1, got 0: None"),
    "while_loop: a float": (
        lambda x: tf.while_loop(lambda a: a, lambda a: a, [x]), TypeError, "while_loop: cond"),
    "while_loop: an invariant too many": (
        lambda x: count_to(3, lambda i, y: [y], x, shape_invariants=[tf.TensorShape([])] * 3),
        ValueError, "3 shape_invariants for 2"),
    "while_loop: another invariant": (
        lambda x: count_to(3, lambda i, y: [y], x, shape_invariants=[tf.TensorShape([2])] * 2),
        ValueError, r"invariant \(2,\) does not allow"),
    "while_loop: another rank": (
        lambda x: count_to(3, lambda i, y: [y[None]], x), ValueError, r"\(\).*\(1,\).*invariants"),
    "while_loop: another size": (
        lambda x: count_to(3, lambda i, y: [tf.concat([y, y], 0)], x[None]), ValueError,
        r"\(1,\).*\(2,\).*set_shape"),
    "while_loop: a size that may change": (
        lambda x: count_to(3, lambda i, y: [tf.tile(y, [i])], x[None]), ValueError,
        r"\(1,\).*\(\?,\).*set_shape"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "error", "words"), NOT_BUILT.values(), ids=NOT_BUILT)
def test_control_flow_that_cannot_be_built(build, error, words):
    refused(lambda: build(tf.constant(2.0)), error, words)


def test_the_static_shapes_that_iterations_preserve():
    x, y = tf.ones([2, 3]), tf.placeholder(tf.float32, [None, 3])
    loose = [tf.TensorShape([]), tf.TensorShape([None, 3])]
    grow = lambda i, a: [tf.concat([a, a], 0)]  # noqa: E731
    assert count_to(3, lambda i, a: [a * 2.0], x).shape.as_list() == [2, 3]
    assert count_to(3, grow, x, shape_invariants=loose).shape.as_list() == [None, 3]
    assert count_to(3, lambda i, a: [a * 2.0], y).shape.as_list() == [None, 3]
    free = [tf.TensorShape([]), tf.TensorShape(None)]
    assert count_to(3, lambda i, a: [a[None]], x, shape_invariants=free).shape.ndims is None
    for rows, due in ((x, [2, 2]), (y, [None, 2])):
        assert tf.map_fn(lambda row: row[:2], rows).shape.as_list() == due


def test_an_op_of_a_branch_runs_and_its_result_is_true():
    v, which = tf.Variable(1.0), tf.placeholder(tf.bool, [])
    done = tf.cond(which, lambda: v.assign_add(2.0).op, tf.no_op)
    with tf.Session() as session:
        initialized(session)
        found = [(session.run(done, {which: on}), session.run(v)) for on in (False, True)]
    assert found == [(True, 1.0), (True, 3.0)]


def test_the_last_function_of_case_is_the_default():
    x = tf.placeholder(tf.float32, [])
    y = tf.case({x < 0.0: lambda: -x, x < 9.0: lambda: x * 2.0})
    assert [run(y, {x: value}) for value in (-2.0, 3.0, 12.0)] == [2.0, 6.0, 24.0]


def test_a_loop_without_back_prop_has_no_gradient():
    x = tf.constant(2.0)
    y = powers(x, 3, back_prop=False)
    assert (run(y), tf.gradients(y, x)) == (8.0, [None])


@pytest.mark.parametrize("jit", [False, True])
def test_what_no_gradient_is_taken_of_may_be_closed_over(jit):
    x, c, p = tf.constant(2.0), tf.constant(3.0), tf.placeholder(tf.float32, [])
    y = tf.cond(p > 0.0, lambda: c * x * p, lambda: x)
    z = count_to(2, lambda i, a: [a * c + p], x, **BOUND)
    dy, dz = tf.gradients(y, x) + tf.gradients(z, x)
    found = [y, dy, z, dz, *tf.gradients(dy, x, unconnected_gradients="zero")]
    with tf.Session(jit=jit) as session:
        assert session.run(found, {p: 5.0}) == [30.0, 15.0, 38.0, 9.0, 0.0]


def test_cond_runs_only_the_branch_that_it_takes():
    calls, v, which = [], tf.Variable(1.0), tf.placeholder(tf.bool, [])

    def traced(name, value):
        return tf.py_func(lambda: calls.append(name) or np.float32(value), [], tf.float32)

    yes, no = lambda: traced("yes", 1.0), lambda: v.assign_add(10.0) + traced("no", 2.0)
    y = tf.cond(which, yes, no)
    with tf.Session() as session:
        initialized(session)
        assert session.run(y, {which: True}) == 1.0
        assert (calls, session.run(v)) == (["yes"], 1.0)
        assert session.run(y, {which: False}) == 13.0
        assert (calls, session.run(v)) == (["yes", "no"], 11.0)


# -- Print, group, tuple, control_dependencies ---------------------------------------------------


@pytest.mark.parametrize("jit", [False, True])
def test_print_passes_value_and_gradient_and_prints_to_stderr(capfd, jit):
    x = tf.placeholder(tf.float32, [2])
    y = tf.Print(x, [x, tf.constant(7)], message="seen: ")
    with tf.Session(jit=jit) as session:
        for value in (1.0, 2.0):
            found = session.run([y * 3.0, *tf.gradients(y * 3.0, x)], {x: [value, 4.0]})
            assert [a.tolist() for a in found] == [[3 * value, 12.0], [3.0, 3.0]]
    assert capfd.readouterr() == ("", "seen: [1 4][7]\nseen: [2 4][7]\n")


@pytest.mark.parametrize("by", ["a part", "control_inputs"])
def test_tuple_waits_for_everything(by):
    v, a = tf.Variable(1.0), tf.constant(2.0)
    up = v.assign_add(5.0)
    parts, also = ([a, up], None) if by == "a part" else ([a, None], [up.op])
    waited, other = tf.tuple(parts, control_inputs=also)
    assert (other is None) == (by == "control_inputs")
    with tf.Session() as session:
        assert initialized(session).run(waited) == 2.0
        assert session.run(v) == 6.0
    assert values(tf.gradients(waited * 3.0, a)) == [3.0]


def test_nested_groups_run_in_the_order_of_their_dependencies():
    calls = []

    note = lambda name: tf.py_func(lambda: calls.append(name) or 0, [], tf.int64)  # noqa: E731

    with tf.control_dependencies([note("first")]):
        second = tf.group(note("second"))
        with tf.control_dependencies([second]):
            third = note("third")
    assert run(tf.group(tf.group(third), tf.no_op())) is None
    assert calls == ["first", "second", "third"]


# -- complex numbers -------------------------------------------------------------------------------

COMPLEX = {  # holomorphic and not; TensorFlow's convention is conj(df/dz) where there is one
    "a cube": lambda z: z * z * z * 1j,
    "the real part": lambda z: tf.complex(tf.real(z * z * 1j), tf.imag(z) ** 3.0),
    "the conjugate": lambda z: tf.conj(z) * z * z,
    "exp": tf.exp,
}


def in_cond(f):
    yes = tf.placeholder_with_default(True, [])
    return lambda x: tf.cond(yes, lambda: f(x), lambda: tf.identity(x))


def in_loop(f):
    return lambda x: count_to(2, lambda i, v: [f(v)], x, maximum_iterations=3)


REGIONS = {
    "cond": lambda f, z: in_cond(f)(z), "a cond in a cond": lambda f, z: in_cond(in_cond(f))(z),
    "while_loop, a variable": lambda f, z: count_to(
        2, lambda i, a: [tf.cond(i < 1, lambda: f(a), lambda: a)], z
    ),
    "while_loop, a capture": lambda f, z: count_to(1, lambda i, a: [f(z)], z * 0.0),
}  # fmt: skip


@pytest.mark.parametrize("f", COMPLEX)
@pytest.mark.parametrize("region", REGIONS)
def test_complex_gradients_through_regions(region, f):
    z, y = tf.placeholder(tf.complex128, []), None
    within, alone = REGIONS[region](COMPLEX[f], z), COMPLEX[f](z)
    at, h, found = 0.6 - 0.7j, 1e-5, []
    for y in (within, alone):
        for _ in range(3):
            (y,) = tf.gradients(tf.real(y) + 2.0 * tf.imag(y), z)
            found.append(y)
    (d,) = tf.gradients(tf.real(within), z)
    (dd,) = tf.gradients(tf.real(d), z)
    with tf.Session() as session:
        values = session.run(found, {z: at})
        moved = [session.run(tf.real(d), {z: at + s}) for s in (h, -h, h * 1j, -h * 1j)]
        second = session.run(dd, {z: at})
    np.testing.assert_allclose(values[:3], values[3:])  # at three orders
    by_differences = (moved[0] - moved[1] + 1j * (moved[2] - moved[3])) / (2 * h)
    np.testing.assert_allclose(second, by_differences, atol=1e-7)


# -- paths through branches and loops ------------------------------------------------------------


AROUND = {
    "cond": (in_cond, 1), "while": (in_loop, 2),
    "cond in while": (lambda f: in_loop(in_cond(f)), 2),
    "while in cond": (lambda f: in_cond(in_loop(f)), 2),
    "while in while": (lambda f: in_loop(in_loop(f)), 4),
}  # fmt: skip


def scaled(w):
    """The function `w * v`, whose gradient is ten times as large."""
    return tf.custom_gradient(lambda v: (w * v, lambda dy: dy * w * 10.0))


CLOSED = {
    "constant": lambda c: c, "placeholder": lambda c: tf.placeholder_with_default(2.0, []),
    "variable": lambda c: tf.Variable(2.0, trainable=False), "stopped": tf.stop_gradient,
}  # fmt: skip


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
    assert values(tf.gradients(y, x) + tf.gradients(y, x)) == [20.0**times] * 2
    (dx,) = tf.gradients(y**2.0, x)
    refused(lambda: tf.gradients(dx, c), GradientError, "closes over")
    stopped = tf.custom_gradient(lambda v: (tf.stop_gradient(c) * v, lambda dy: dy * 20.0))
    assert run(tf.gradients(around(stopped)(x) * c, [x, c])) == [2 * 20.0**times, 5 * 2.0**times]


WRITTEN_OUT = {  # the same without a branch or a loop: a function of the function and its times
    "cond": lambda f: f, "while": lambda f: lambda x: f(f(x)),
    "cond in while": lambda f: lambda x: f(f(x)), "while in cond": lambda f: lambda x: f(f(x)),
    "while in while": lambda f: lambda x: f(f(f(f(x)))),
}  # fmt: skip
BODIES = {
    "a custom gradient": lambda c: lambda v: scaled(c)(v) ** 2.0,
    "an override": lambda c: lambda v: overridden(
        {"Tanh": lambda op, dy: dy * op.inputs[0] * c}, tf.tanh, v) * 1.5,
    "a sine": lambda c: lambda v: tf.sin(c * v) + v,
    "a read": lambda c: lambda v: VARIABLES[-1].read_value() * tf.sin(v),
}  # fmt: skip
VARIABLES = []


@pytest.mark.slow(but=16)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("closed", ["constant", "variable"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("region", AROUND)
def test_three_derivatives_agree_with_the_loop_written_out(region, body, closed, jit):
    x, c = tf.placeholder(tf.float64, []), tf.constant(0.7, tf.float64)
    if closed == "variable":
        c = tf.Variable(0.7, trainable=False, dtype=tf.float64)
    VARIABLES[:] = [tf.Variable(1.25, dtype=tf.float64)]
    f, found = BODIES[body](c), []
    for y in (AROUND[region][0](f)(x), WRITTEN_OUT[region](f)(x)):
        for _ in range(3):
            (y,) = tf.gradients(y, x, unconnected_gradients="zero")
            found.append(y)
    with tf.Session(jit=jit) as session:
        values = initialized(session).run(found, {x: 0.45})
    assert all(values[:2])
    np.testing.assert_allclose(values[:3], values[3:], rtol=1e-12)


def logged(kind, f, x):
    """The last of two results, of which the first is only logged."""
    one, yes = (lambda v: (f(v), v * v + v)), tf.placeholder_with_default(True, [])
    chosen = lambda v: tf.cond(yes, lambda: one(v), lambda: (v, v))  # noqa: E731
    if kind == "cond":
        return chosen(x)[1]
    turn = chosen if kind == "cond in while" else one
    return count_to(1, lambda i, log, v: turn(v), x, x, maximum_iterations=2)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", ["cond", "while", "cond in while"])
def test_a_result_that_nobody_uses_has_no_part_in_the_gradient(kind, jit):
    x = tf.constant(0.0)
    for f in (tf.log, tf.sqrt, scaled(x)):
        y = logged(kind, f, x)
        (dx,) = tf.gradients(y, x)
        with tf.Session(jit=jit) as session:
            assert session.run([dx, *([] if jit else tf.gradients(dx, x))]) == [1.0, 2.0][: 2 - jit]


def test_variables_that_pass_through_each_other_agree_with_differences():
    x, z = tf.placeholder(tf.float64, []), tf.placeholder(tf.float64, [])
    for turns in (0, 1, 2, 4):
        y = tf.while_loop(lambda i, a, b, c, n=turns: i < n,
                          lambda i, a, b, c: (i + 1, b * z, c * 2.0, a * a),
                          [0, x, x * 3.0, x * 5.0])[1]  # fmt: skip
        at = lambda p, q, y=y: run(y, {x: p, z: q})  # noqa: E731
        h = 1e-6
        due = [at(0.5 + h, 2.0) - at(0.5 - h, 2.0), at(0.5, 2 + h) - at(0.5, 2 - h)]
        found = run(tf.gradients(y, [x, z], unconnected_gradients="zero"), {x: 0.5, z: 2.0})
        np.testing.assert_allclose(found, np.divide(due, 2 * h), rtol=1e-6)


def test_no_gradient_leads_from_a_result_to_what_it_does_not_use():
    x, z = tf.constant(2.0), tf.constant(3.0)
    yes = tf.placeholder_with_default(True, [])
    y = tf.cond(yes, lambda: (x * 2.0, z * 2.0), lambda: (x, z))[0]
    w = tf.while_loop(lambda i, a, b: i < 2, lambda i, a, b: (i + 1, a * 2.0, b * z), [0, x, z])[1]
    assert [tf.gradients(f, xs)[-1] for f in (y, w) for xs in (z, [x, z])] == [None] * 4


# -- variables inside ------------------------------------------------------------------------------


def variable_read_inside(x, on):
    v = tf.Variable(3.0)
    n = tf.where(on, 3, 0)
    y = tf.cond(on, lambda: v.read_value() * x, lambda: x)
    z = tf.while_loop(lambda i, a: i < n, lambda i, a: (i + 1, a * v.read_value()), [0, x], **BOUND)
    return [*tf.gradients(y, [v, x]), *tf.gradients(z[1], [v, x])]


@pytest.mark.parametrize("jit", [False, True])
def test_a_variable_read_inside_has_a_gradient_where_nothing_reads_it(jit):
    on, x = tf.placeholder(tf.bool, []), tf.constant(2.0)
    found = variable_read_inside(x, on)
    with tf.Session(jit=jit) as session:
        initialized(session)
        assert session.run(found, {on: True}) == [2.0, 3.0, 54.0, 27.0]
        assert session.run(found, {on: False}) == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("jit", [False, True])
def test_a_gradient_repeats_no_write_to_a_variable(jit):
    v, x = tf.Variable(0.0), tf.constant(2.0)

    def beside(i, a, b):
        return i + 1, a * x, v.assign_add(1.0)

    def within(i, a, b):
        return i + 1, a * x + 0.0 * v.assign_add(1.0), b

    y, z = (tf.while_loop(lambda i, a, b: i < 3, body, [0, x, 0.0])[1] for body in (beside, within))
    refused(lambda: tf.gradients(z, x), GradientError, "AssignAdd.*writes to a variable")
    fetches = [y, *tf.gradients(y, x)]
    with tf.Session(jit=jit) as session:
        assert initialized(session).run(fetches) == [16.0, 32.0]
        assert session.run(v) == 3.0


def test_a_gradient_needs_only_what_it_reads():
    x, scale, on = tf.constant(2.0), tf.placeholder(tf.float32, []), tf.constant(True)
    rules = {"Square": lambda op, dy: dy * scale}
    a, b = overridden(rules, tf.cond, on, lambda: (tf.square(x), x * 3.0), lambda: (x, x))
    first, second = tf.gradients(a, x)[0], tf.gradients(b, x)[0]
    assert (run(second), run(first, {scale: 7.0})) == (3.0, 7.0)


@pytest.mark.parametrize("jit", [False, True])
def test_layers_inside_make_their_variables_outside(jit):
    x = tf.placeholder(tf.float32, [])
    y = tf.cond(x > 0.0, lambda: tf.layers.dense([[x]], 1, name="a"), lambda: tf.constant([[0.0]]))
    kernel, bias = tf.trainable_variables()
    assert [kernel.name, bias.name] == ["a/kernel:0", "a/bias:0"]
    slopes = tf.gradients(y, [kernel, bias])
    with tf.Session(jit=jit) as session:
        initialized(session)
        for value, due in ((3.0, [3.0, 1.0]), (-3.0, [0.0, 0.0])):
            assert [d.item() for d in session.run(slopes, {x: value})] == due
    refused(lambda: tf.cond(x > 0.0, lambda: tf.placeholder(tf.float32, []), lambda: x), ValueError,
            "cannot be fed inside")  # fmt: skip


def test_tapes_differentiate_loops():
    x = tf.constant([1.0, 2.0])
    f = lambda x: rg.sum(rg.asarray(tf.map_fn(lambda v: tf.sin(v) * v, x)))  # noqa: E731
    g = lambda x: rg.sum(rg.asarray(count_to(3, lambda i, a: [a * x], x)))  # noqa: E731
    found = [rg.grad(lambda x, f=f: rg.sum(rg.grad(f)(x)))(x) for f in (f, g)]
    a, b = run(found)
    np.testing.assert_allclose(a, 2 * np.cos([1.0, 2.0]) - np.sin([1.0, 2.0]) * [1.0, 2.0], 1e-6)
    np.testing.assert_allclose(b, [12.0, 48.0])  # (x^4)'' is 12 x^2


def test_a_gradient_of_a_loop_in_a_loop():
    x = tf.placeholder(tf.float64, [])
    step = lambda a: tf.gradients(count_to(2, lambda i, b: [b * b], a), a)[0]  # noqa: E731
    y = count_to(3, lambda i, a: [a - 0.1 * step(a)], x)
    z = x
    for _ in range(3):
        z = z - 0.1 * (4.0 * z**3.0)  # (z^4)' is 4 z^3
    found = run([y, z, *tf.gradients(y, x), *tf.gradients(z, x)], {x: 0.9})
    np.testing.assert_allclose(found[::2], found[1::2], rtol=1e-12)
