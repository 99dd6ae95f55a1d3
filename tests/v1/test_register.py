"""RegisterGradient, NotDifferentiable and gradient_override_map, as in TensorFlow 1 and beyond.

tests/v1/test_tf1_golden.py replays what was recorded; here is what the recorded cases leave open,
and what regrad adds: unknown keys are refused, functions are values, scopes tell what they did.
"""

import functools
import itertools
import threading

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core.registry import ALIASES
from regrad.errors import GradientError, NotFiredError, UnknownOpError, UnusedOverrideWarning
from regrad.v1.graph import tf_op_types
from tests.helpers.rows import refused
from tests.helpers.v1_session import overridden, run, slope, unused_is_fine

pytestmark = pytest.mark.usefixtures("graph")

COUNT = itertools.count()


def new_name():
    return f"TestsV1Register{next(COUNT)}"


def registered(function):
    name = new_name()
    tf.RegisterGradient(name)(function)
    return name


def times(k):
    return registered(lambda op, grad: grad * k)


# -- RegisterGradient, NotDifferentiable -----------------------------------------------------------


def test_a_rule_comes_back_and_serves_all_graphs():
    rule, name = (lambda op, grad: grad * 4.0), new_name()
    assert tf.RegisterGradient(name)(rule) is rule
    native = registered(lambda dy, x: dy * x * 2.0)
    for graph in (tf.get_default_graph(), tf.Graph()):
        with graph.as_default():
            x = tf.constant(3.0)
            assert slope(overridden({"Sign": name}, tf.sign, x), x) == 4.0
            assert slope(overridden({"Sign": native}, tf.sign, x), x) == 6.0


@pytest.mark.parametrize("declare", [tf.RegisterGradient, tf.NotDifferentiable])
@pytest.mark.parametrize("name", [3, None, b"bytes", len])
def test_a_name_that_is_no_string_is_refused_at_the_call(name, declare):
    refused(lambda: declare(name), TypeError)


def test_a_name_is_taken_once_and_the_error_says_by_what():
    def the_first_rule(op, grad):
        return grad

    name, none = registered(the_first_rule), new_name()
    tf.NotDifferentiable(none)
    for taken in (name, none, "Identity", "Relu", "MatMul", "AddV2"):
        words = (name, "the_first_rule", "test_register.py") if taken == name else ()
        again = tf.RegisterGradient(taken)
        refused(lambda again=again: again(lambda op, grad: grad), KeyError, *words)
        refused(lambda taken=taken: tf.NotDifferentiable(taken), KeyError)


@pytest.mark.parametrize("declare", ["NotDifferentiable", "NoGradient", "no_gradient"])
def test_an_op_without_gradient_acts_as_a_constant(declare):
    name, x = new_name(), tf.constant(3.0)
    getattr(tf, declare)(name)
    y = overridden({"Square": name}, tf.square, x)
    assert tf.gradients(y, x) == [None]
    assert slope(y * x, x) == 9.0


# -- binding -------------------------------------------------------------------------------------


def test_a_rule_may_be_registered_after_the_op_is_built():
    name, x = new_name(), tf.constant(2.0)
    y = overridden({"Square": name}, lambda: tf.square(x, name="my_square"))
    refused(lambda: tf.gradients(y, x), LookupError, name, "my_square", "Square")
    tf.RegisterGradient(name)(lambda op, grad: grad * 5.0)
    assert slope(y, x) == 5.0
    assert y.op.get_attr("_gradient_op_type") == name.encode()
    refused(lambda: tf.square(x).op.get_attr("_gradient_op_type"), ValueError)


def test_ops_without_inputs_have_no_rule_to_override(graph):
    with unused_is_fine():
        x = overridden({"Const": times(7.0), "Placeholder": times(7.0)}, tf.constant, 2.0)
    assert slope(x * x, x) == 4.0


def test_name_scopes_and_control_dependencies_do_not_interfere(graph):
    x, first = tf.constant(2.0), tf.no_op()
    override = graph.gradient_override_map({"Square": times(7.0)})
    with override, tf.name_scope("s"), tf.control_dependencies([first]):
        y = tf.square(x)
    assert (y.op.control_inputs, y.op.name) == ([first], "s/Square")
    assert slope(y, x) == 7.0


# -- scopes --------------------------------------------------------------------------------------


def test_a_scope_left_by_an_exception_is_left(graph):
    x = tf.constant(3.0)
    with pytest.raises(ZeroDivisionError), graph.gradient_override_map({"Square": times(10.0)}):
        tf.square(x)
        raise ZeroDivisionError
    assert slope(tf.square(x), x) == 6.0


def test_the_map_is_copied(graph):
    x, rules = tf.constant(3.0), {"Square": times(10.0)}
    with graph.gradient_override_map(rules):
        rules["Sign"] = rules["Square"] = "Identity"
        y, z = tf.square(x), tf.sign(x)
    assert (slope(y, x), slope(z, x)) == (10.0, 0.0)


@pytest.mark.parametrize(("rules", "error", "words"), [
    ([("Sign", "Identity")], TypeError, "."), (None, TypeError, "."), ("Sign", TypeError, "."),
    ({None: "Identity"}, TypeError, "."), ({"Sign": 3}, TypeError, "."),
    ({"Sign": None}, TypeError, "."), ({"Square": "Identity", "Sign": 3}, TypeError, "."),
    ({"Square": "Identity", "Matmul": "Identity"}, UnknownOpError, "Did you mean 'MatMul'"),
    ({"sign": "Identity"}, UnknownOpError, "Did you mean 'Sign'"),
    ({"Relu7": "Identity"}, UnknownOpError, "Did you mean .*'Relu6'"),
    ({"nonsense": "Identity"}, UnknownOpError, "'nonsense'"),
], ids=str)  # fmt: skip
def test_a_bad_map_is_refused_on_entering_and_installs_nothing(graph, rules, error, words):
    scope, x = graph.gradient_override_map(rules), tf.constant(3.0)
    with pytest.raises(error, match=words) as caught, scope:
        raise AssertionError("the scope was entered")
    assert isinstance(caught.value, TypeError | LookupError)
    assert slope(tf.square(x), x) == 6.0


def test_an_op_type_that_is_never_made_warns(graph):
    x, rules = tf.constant(3.0), {"QuantizedMatMul": "Identity", "Square": "Identity"}
    words = "never makes the op type 'QuantizedMatMul'"
    with pytest.warns(UnusedOverrideWarning, match=words) as caught:
        y = overridden(rules, tf.square, x)
    assert len(caught) == 1
    assert slope(y, x) == 1.0
    with graph.gradient_override_map({"QuantizedMatMul": rg.rules.optional("Identity")}):
        assert slope(tf.square(x), x) == 6.0


def test_names_of_other_op_types_are_no_types_of_regrad():
    assert not tf_op_types.NEVER_MADE & {*rg.op_types(), *ALIASES}
    assert tf_op_types.is_never_made("L2Loss")
    assert not tf_op_types.is_never_made("l2loss")


def test_a_rule_without_a_name_is_named():
    def my_rule(op, grad):
        return grad

    for declare in (tf.RegisterGradient, tf.NotDifferentiable):
        refused(lambda declare=declare: declare(my_rule), TypeError, "my_rule, .*test_register.py")


KINKS = {  # a function, the inputs, the gradients: TensorFlow's, except for relu6, selu and norm
    "abs": (tf.abs, [[0.0]], [[0.0]]), "sign": (tf.sign, [[0.0]], [[0.0]]),
    "relu": (tf.nn.relu, [[0.0]], [[0.0]]), "relu6": (tf.nn.relu6, [[0.0, 6.0]], [[0.0, 1.0]]),
    "elu": (tf.nn.elu, [[0.0]], [[1.0]]), "selu": (tf.nn.selu, [[0.0]], [[1.7580993]]),
    "clip": (lambda x: tf.clip_by_value(x, 0.0, 1.0), [[0.0, 1.0]], [[1.0, 1.0]]),
    "maximum": (tf.maximum, [1.0, 1.0], [1.0, 0.0]),
    "minimum": (tf.minimum, [1.0, 1.0], [1.0, 0.0]),
    "reduce_max": (tf.reduce_max, [[1.0, 1.0]], [[0.5, 0.5]]),
    "max_pool": (lambda x: tf.nn.max_pool(tf.reshape(x, [1, 1, 2, 1]), [1, 1, 2, 1], 1, "VALID"),
                 [[1.0, 1.0]], [[1.0, 0.0]]),
    "norm": (tf.norm, [[0.0, 0.0]], [[0.0, 0.0]]), "pow": (tf.pow, [0.0, 0.0], [0.0, 0.0]),
    "reduce_std": (tf.math.reduce_std, [[1.0, 1.0]], [[0.0, 0.0]]),
    "where": (lambda x: tf.where(x > 0.0, tf.log(x), x), [[0.0, 1.0]], [[np.nan, 1.0]]),
}  # fmt: skip


@pytest.mark.parametrize("name", KINKS)
def test_kinks_are_as_the_page_says(name):
    f, inputs, due = KINKS[name]
    xs = [tf.constant(x) for x in inputs]
    for dx, expected in zip(run(tf.gradients(f(*xs), xs)), due, strict=True):
        np.testing.assert_allclose(dx, expected, rtol=1e-6)


def test_a_map_belongs_to_its_graph(graph):
    other, rule = tf.Graph(), times(10.0)
    with graph.gradient_override_map({"Square": rule}):
        tf.square(tf.constant(3.0))
        with other.as_default():
            x = tf.constant(3.0)
            y = tf.square(x)
    with other.as_default():
        assert slope(y, x) == 6.0


def test_a_map_is_for_threads_that_are_started_in_it(graph):
    x, built, opened = tf.constant(3.0), {}, threading.Event()

    def build(name):
        assert opened.wait(60)
        with graph.as_default():
            built[name] = tf.square(x)

    threads = [threading.Thread(target=build, args=(name,)) for name in ("before", "inside")]
    threads[0].start()
    with graph.gradient_override_map({"Square": times(10.0)}):
        tf.square(x)
        threads[1].start()
        opened.set()
        for thread in threads:
            thread.join()
    assert (slope(built["before"], x), slope(built["inside"], x)) == (6.0, 10.0)


def test_an_open_scope_does_not_reach_ops_that_gradients_builds(graph):
    # TensorFlow overrides them too; here it does not matter where gradients is called
    x = tf.constant(3.0)
    y = tf.exp(x) * x
    zero = registered(lambda op, grad: (grad * 0.0, grad * 0.0))
    with unused_is_fine(), graph.gradient_override_map({"Mul": zero}):
        (first,) = tf.gradients(y, x)
    (plain,) = tf.gradients(y, x)
    assert slope(first, x) == slope(plain, x) != 0.0


# -- what regrad adds ----------------------------------------------------------------------------


def test_the_scope_tells_what_it_bound_and_what_gradients_ran(graph):
    x, name = tf.constant(3.0), times(2.0)
    with graph.gradient_override_map({"Sign": name, "Relu": "Identity"}) as used:
        ys = [tf.sign(x) for _ in range(3)]
    (hit,) = used.hits
    assert (hit.op_type, hit.rule, hit.count, hit.ran) == ("Sign", name, 3, 0)
    assert "test_register.py:" in hit.where
    run(ys)
    refused(lambda: used.assert_fired("Sign"), NotFiredError, "'Sign'")
    tf.gradients(ys, x)
    assert hit.ran == 3
    used.assert_fired("Sign")
    refused(used.assert_fired, NotFiredError, "'Relu'")


def test_a_scope_that_matches_nothing_warns(graph):
    with pytest.warns(UnusedOverrideWarning, match="'Relu6'"):
        overridden({"Relu6": "Identity"}, tf.nn.relu, tf.constant(1.0))
    with pytest.warns(UnusedOverrideWarning), graph.gradient_override_map({"Sign": "Identity"}):  # noqa: SIM117
        with tf.Graph().as_default():  # whose ops do not count
            tf.sign(tf.constant(1.0))


# -- integers and bools that carry a gradient ------------------------------------------------------


def whole(b):
    return rg.astype(b, rg.int32)


# what can stand between a bool under a rule and the floats that it becomes
BETWEEN = {
    "nothing": lambda b: b, "a product with floats": lambda b: b * rg.tensor(2.5),
    "identity": rg.identity, "reshape": lambda b: rg.reshape(b, (-1,)),
    "arithmetic": lambda b: whole(b) * 3 - whole(b), "sum": lambda b: rg.sum(whole(b), axis=0),
    "mean": lambda b: rg.mean(rg.astype(b, rg.float32), axis=0),
    "max": lambda b: rg.max(whole(b), axis=0), "prod": lambda b: rg.prod(whole(b) + 1),
    "concat": lambda b: rg.concat([whole(b), whole(b) * 2], axis=0),
    "stack": lambda b: rg.stack([whole(b), whole(b) * 2]), "a slice": lambda b: whole(b)[1:],
    "split, a part unused": lambda b: rg.split(whole(b), [1, 2], axis=0)[1],
    "where": lambda b: rg.where(rg.tensor([True, False]), whole(b), 0),
    "cumulative_sum": lambda b: rg.cumulative_sum(whole(b), axis=0),
    "matmul": lambda b: rg.matmul(whole(b), whole([[1, 2], [3, 4]])),
    "sort": lambda b: rg.sort(whole(b)), "pad": lambda b: rg.pad(whole(b), ((1, 1), (0, 0))),
    "einsum": lambda b: rg.einsum("ij->j", whole(b)), "diff": lambda b: rg.diff(whole(b)),
    "repeat": lambda b: rg.repeat(whole(b), 2, axis=0),
}  # fmt: skip
COMPARED = [[0.0, 3.0], [2.0, 0.5], [1.5, -1.0]]


@pytest.mark.parametrize("by", ["tf.gradients", "a tape"])
@pytest.mark.parametrize("shape", [[3, 2], [None, None], None], ids=["static", "sizes", "rank"])
@pytest.mark.parametrize("name", BETWEEN)
def test_a_gradient_goes_by_integers_that_a_rule_made(name, shape, by):
    def f(x):
        with rg.gradient_override_map({"Greater": lambda op, dy: [dy * 5.0, None]}):
            b = x > 1.0
        return rg.sum(rg.astype(BETWEEN[name](b), rg.float32) * 2.0) + rg.sum(x)

    due = rg.grad(f)(COMPARED).tolist()
    assert due != [[1.0, 1.0]] * 3
    x = tf.placeholder(tf.float32, shape)
    dx = tf.gradients(f(rg.asarray(x)), x)[0] if by == "tf.gradients" else rg.grad(f)(x)
    assert run(dx, {x: COMPARED}).tolist() == due


def test_without_a_rule_integers_and_bools_end_the_path():
    x, i = tf.placeholder(tf.float32, [3]), tf.placeholder(tf.int32, [3])
    for b in (x > 1.0, tf.argsort(x), tf.cast(x, tf.int32), tf.nn.top_k(x, 3)[1]):
        assert tf.gradients(tf.cast(b, tf.float32), x) == [None]
    assert tf.gradients(tf.cast(i * 2, tf.float32), i) == [None]
    assert run(tf.gradients(i * i, i), {i: [1, 2, 3]})[0].tolist() == [2, 4, 6]
    with unused_is_fine():
        b = overridden({"Less": lambda op, dy: [dy, None]}, lambda: x > 1.0)
    assert tf.gradients(tf.cast(b, tf.float32), x) == [None]
    name = new_name()
    tf.NotDifferentiable(name)
    b = overridden({"Greater": name}, lambda: x > 1.0)
    assert tf.gradients(tf.cast(b, tf.float32), x) == [None]


# Branches and loops: what is cast on the side where it is made has its gradient; the rest is
# refused where a gradient comes there, and only there.


def floats(b):
    return tf.cast(b, tf.float32)


def branch(yes, no):
    return tf.cond(tf.constant(True), yes, no)


def pair(x):
    return branch(lambda: (x > 1.0, x * 2.0), lambda: (x < 1.0, x))


def turns(body, *start):
    return tf.while_loop(lambda i, *_: i < 2, lambda i, *a: (i + 1, *body(*a)), [0, *start])[1:]


def with_flag(f):
    """f of x and of a bool that is made outside of it."""
    return lambda x: f(x, x > 1.0)


def indexed(x):
    i = tf.cast(x > 1.0, tf.int32)
    return branch(lambda: x + tf.gather([1.0, 2.0], i), lambda: x)


def until_false(x):
    turn = lambda on, a: (-a > -5.0, a * 2.0)  # noqa: E731
    return tf.while_loop(lambda on, a: tf.reduce_any(on), turn, [x > -9.0, x])[1]


PASSED = {  # functions of x, and the gradient under a rule that gives 5 dy for x > 1
    "made and cast in a branch": (lambda x: branch(lambda: floats(x > 1.0) + x, lambda: x), 6.0),
    "made and cast in a loop": (lambda x: turns(lambda a: [a + floats(x > 1.0)], x), 11.0),
    "a predicate": (lambda x: tf.cond(tf.reduce_all(x > -1.0), lambda: x * 2.0, lambda: x), 2.0),
    "unused beside floats": (lambda x: pair(x)[1], 2.0),
    "an index": (indexed, 1.0),
    "a counter": (lambda x: turns(lambda j, a: [j + 1, a * floats(j)], 1, x)[1], 2.0),
    "a flag that ends a loop": (until_false, 4.0),
}  # fmt: skip
ONES = functools.partial(tf.ones, [3], tf.int32)
REFUSED = {
    "out of a branch": lambda x: floats(branch(lambda: x > 1.0, lambda: x < 1.0)),
    "out of a branch, beside floats": lambda x: floats(pair(x)[0]) + pair(x)[1],
    "out of two": lambda x: floats(
        branch(lambda: branch(lambda: x > 1.0, lambda: x < 1.0), lambda: x < 2.0)),
    "into a branch": with_flag(lambda x, b: branch(lambda: floats(b) + x, lambda: x)),
    "into two": with_flag(
        lambda x, b: branch(lambda: branch(lambda: floats(b) + x, lambda: x), lambda: x)),
    "into a loop": with_flag(lambda x, b: turns(lambda a: [a + floats(b)], x)),
    "at the start of a loop": lambda x: turns(lambda b, a: [b, a + floats(b)], x > 1.0, x)[1],
    "out of a loop": lambda x: floats(turns(lambda b: [x > 1.0], x < 5.0)[0]),
    "from turn to turn": lambda x: turns(lambda b, a: [x > 1.0, a + floats(b)], x < 5.0, x)[1],
    "by two turns": lambda x: turns(
        lambda b, i, a: [x > 1.0, tf.cast(b, tf.int32), a + floats(i)], x < 5.0, ONES(), x)[2],
    "from turn to turn, into a branch": lambda x: turns(
        lambda b, a: [x > 1.0, branch(lambda: a + floats(b), lambda: a)], x < 5.0, x)[1],
}  # fmt: skip


@pytest.mark.parametrize("by", ["tf.gradients", "a tape"])
@pytest.mark.parametrize("name", [*PASSED, *REFUSED])
def test_rules_for_integers_inside_regions(name, by):
    f, due = PASSED[name] if name in PASSED else (REFUSED[name], None)
    x = tf.placeholder(tf.float32, [3])

    def under_a_rule(x):
        rules = {"Greater": lambda op, dy: [dy * 5.0, None]}
        y = overridden(rules, f, tf.convert_to_tensor(x))
        return y[0] if isinstance(y, list | tuple) else y

    def slope_by():
        y = under_a_rule if by == "a tape" else under_a_rule(x)
        dx = rg.grad(y)(x) if by == "a tape" else tf.gradients(y, x)[0]
        return run(dx, {x: [3.0, 4.0, 6.0]}).tolist()

    if due is None:
        refused(slope_by, GradientError, "into or out of a branch or loop")
    else:
        with unused_is_fine():
            assert slope_by() == [due] * 3
