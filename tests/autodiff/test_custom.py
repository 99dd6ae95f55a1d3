"""custom_grad: forms, save, orders, closures, errors."""

import functools

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core.state import current
from regrad.errors import ArgumentError, GradientError, RuleError
from tests.helpers.rows import plain, refused, results, under

custom = rg.custom_grad


def test_the_program_of_tensorflow_js(capsys):
    @custom
    def custom_op(a, save):
        save([a])
        value = a.pow(rg.scalar(3, "int32"))
        return {"value": value, "grad_func": lambda dy, saved: [dy.mul(saved[0].abs())]}

    a = rg.tensor1d([0, -1, 2, -2, 0.3])
    custom_op(a).print()
    rg.grad(custom_op)(a).print()
    expected = "Tensor\n    [0, -1, 8, -8, 0.027]\nTensor\n    [0, 1, 2, 2, 0.3]\n"
    assert capsys.readouterr().out == expected


FORMS = {
    "dict": lambda x: {"value": x * x, "grad_func": lambda dy: dy * 7},
    "pair": lambda x: (x * x, lambda dy: dy * 7), "list": lambda x: (x * x, lambda dy: [dy * 7]),
    "saved": lambda x, save: (save([x]), (x * x, lambda dy, saved: dy * 7))[1],
    "by name": lambda x, save: (save(x=x), (x * x, lambda dy, saved: dy * 7 + 0 * saved.x))[1],
    "save last": lambda x, keep: (keep([x]), (x * x, lambda dy, s: dy * 7 + 0 * s[0]))[1],
    "star": lambda *a: (a[-1]([a[0]]), (a[0] * a[0], lambda dy, s: dy * 7))[1],
    "default": lambda x, power=2: (x**power, lambda dy: dy * 7),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    f = custom(FORMS[form])
    assert f(rg.scalar(3.0)).item() == 9.0
    assert rg.grad(f)(3.0).item() == 7.0


class Method:
    def grad_func(self, dy):
        return dy * 3


def by(grad_func):
    """A function that saves its input, with this gradient function."""
    return lambda x, save: (save([x]), (x * x, grad_func))[1]


FITTING = [
    lambda dy: dy * 3, lambda dy, saved: dy * 3, lambda dy, saved, k=3: dy * k,
    lambda dy, k=3: dy * k, lambda *args: args[0] * 3, lambda dy, *args: dy * 3,
    lambda dy, **options: dy * 3, lambda dy, *, k=3: dy * k,
    functools.partial(lambda k, dy: dy * k, 3), functools.partial(lambda k, dy, saved: dy * k, 3),
    Method().grad_func,
]  # fmt: skip


@pytest.mark.parametrize("grad_func", FITTING)
def test_gradient_functions_that_fit(grad_func):
    assert rg.grad(custom(by(grad_func)))([1.0, 2.0]).tolist() == [3.0, 3.0]


two = custom(lambda x: ((x * 2, x * 3), lambda dy: dy[0] * 10 + dy[1] * 100))
named = custom(lambda x: ({"a": x * 2, "b": x * 3}, lambda dy: dy["a"] + 5 * dy["b"]))
mixed = custom(lambda p, n, w, label="x": (
    p["a"] * n + w * p["b"], lambda dy: [{"a": dy * 1, "b": dy * 2}, dy * 3]))  # fmt: skip
composed = custom(lambda x: (rg.exp(rg.sin(x)), lambda dy: dy * 2))
same = custom(lambda x: (x, lambda dy: dy * 3))
constant = custom(lambda x: (FIVE, lambda dy: dy * 3))
by_numpy = custom(lambda x: (rg.asarray(x.numpy() ** 2), lambda dy: dy * 2 * x))
dict_of_one = custom(lambda p: (p["w"] * 2, lambda dy: {"w": dy * 5}))
tuples = custom(lambda a, b: (a[0] * b[0], lambda dy: [[dy * 2], [dy * 3]]))
FIVE = rg.scalar(5.0)


@custom
def doubled(x):
    y = x * 2
    return (y, y), lambda dy: dy[0] * 10 + dy[1]


VALUES = {
    "None": (lambda: rg.grads(custom(lambda a, b: (a * b, lambda dy: [dy * 2, None])))([1.0, 5.0]),
             [2.0, 0.0]),
    "two outputs": (lambda: two(rg.scalar(1.0)), (2.0, 3.0)),
    "by one output": (lambda: rg.grad(lambda x: two(x)[0])(1.0), 10.0),
    "by both outputs": (lambda: rg.grad(lambda x: two(x)[0] + two(x)[1])(1.0), 110.0),
    "one Tensor as two outputs": (
        lambda: rg.grad(lambda x: (lambda t: 3 * t[0] + 5 * t[1])(doubled(x)))(1.0), 35.0),
    "an output of a dict": (lambda: rg.grad(lambda x: named(x)["b"])(1.0), 5.0),
    "a dict as input": (lambda: rg.grad(dict_of_one)({"w": 1.0}), {"w": 5.0}),
    "tuples as inputs": (lambda: rg.grads(tuples)([(FIVE,), (FIVE,)]), [(2.0,), (3.0,)]),
    "containers, constants": (lambda: rg.grads(lambda p, w: mixed(p, 4, w, label="y"))(
        [{"a": 1.0, "b": 2.0}, 5.0]), [{"a": 1.0, "b": 2.0}, 3.0]),
    "ops inside": (lambda: rg.grad(composed)(1.0), 2.0),
    "nested": (lambda: rg.grad(custom(lambda x: (composed(x) * 3, lambda dy: dy * 5)))(1.0), 5.0),
    "its input": (lambda: rg.grad(same)(2.0), 3.0),  # TensorFlow.js: 4
    "its input, used": (lambda: rg.grad(lambda x: same(x) * x)(2.0), 8.0),
    "a constant": (lambda: rg.grad(constant)(2.0), 3.0),
    # dx depends on w, y does not: the first order is right, and the mixed derivative is 1
    "its gradient function closes over w": (lambda: rg.grad(
        lambda w: rg.grad(custom(lambda x: (x * 1.0, lambda dy: dy * w)))(1.0))(2.0), 1.0),
    "NumPy inside": (lambda: rg.grad(by_numpy)(3.0), 6.0),
    "a default is not what was saved": (lambda: rg.grad(
        custom(lambda a: (a * 1, lambda dy, flip=True: -dy if flip else dy)))(3.0), -1.0),
}  # fmt: skip
test_values_and_gradients = results(VALUES)


def test_containers_without_tensors_are_handed_on_as_they_are():
    log = ["a"]
    custom(lambda x, log: (log.append(1) or x * 1, lambda dy: dy))(rg.scalar(1.0), log)
    assert log == ["a", 1]


# -- orders ----------------------------------------------------------------------------------------


def log1pexp(x, save):
    e = rg.exp(x)
    save([e])
    return rg.log(1 + e), lambda dy, saved: dy * (1 - 1 / (1 + saved[0]))


def log1pexp_closed_over(x):
    e = rg.exp(x)
    return rg.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))


def exp(x, save):
    y = rg.asarray(np.exp(rg.stop_gradient(x).numpy()))  # no history of its own
    save([y])
    return y, lambda dy, saved: dy * saved[0]


def exp_closed_over(x):
    y = rg.asarray(np.exp(rg.stop_gradient(x).numpy()))
    return y, lambda dy: dy * y


S = 1 / (1 + np.exp(-0.7))
ORDERS = {
    log1pexp: [S, S * (1 - S), S * (1 - S) * (1 - 2 * S)],
    log1pexp_closed_over: [S, S * (1 - S), S * (1 - S) * (1 - 2 * S)], exp: [np.exp(0.7)] * 3,
    exp_closed_over: [np.exp(0.7)] * 3,
    lambda x: (rg.sign(x), lambda dy: dy * x): [0.7, 1.0],  # by grad_func alone
}  # fmt: skip


@pytest.mark.parametrize("f", ORDERS)
def test_to_third_order(f):
    g = custom(f)
    for expected in ORDERS[f]:
        g = rg.grad(g)
        np.testing.assert_allclose(g(rg.asarray(0.7, dtype=rg.float64)).item(), expected, 1e-12)


HUNDREDFOLD = {"Sin": lambda dy: dy * 100.0}


def test_what_a_gradient_function_differentiates_is_under_the_overrides_of_the_call():
    """Of the three sines, the one under `grad` has the rule; those of grad_func itself do not."""

    def differentiating(x):
        inner = lambda: rg.grad(lambda p: rg.sum(rg.sin(p)))(x)  # noqa: E731
        return rg.sin(x), lambda dy: dy * (rg.sin(x) + inner())

    f = lambda x: under(HUNDREDFOLD, lambda: rg.sum(custom(differentiating)(x)))  # noqa: E731
    x = np.array([0.7, 0.2], np.float32)
    jitted = pytest.importorskip("jax") and [rg.jit(rg.grad(f)), rg.grad(rg.jit(f))]
    for df in [rg.grad(f), rg.grad(rg.checkpoint(f)), *jitted]:
        np.testing.assert_allclose(df(x).numpy(), np.sin(x) + 100, rtol=1e-6)
    with tf.Graph().as_default(), tf.Session() as session:
        place = tf.placeholder(np.float32, [2])
        dx = tf.gradients(f(rg.asarray(place)), place)
        np.testing.assert_allclose(session.run(dx, {place: x})[0], np.sin(x) + 100, rtol=1e-6)


def test_what_a_rule_differentiates_is_masked_like_the_rule():
    rule = lambda dy, x: dy * rg.grad(lambda p: rg.sum(rg.sin(p)))(x)  # noqa: E731
    dx = under(HUNDREDFOLD | {"Tanh": rule}, rg.grad(lambda x: rg.tanh(x) + rg.sin(x)), 0.7)
    assert dx.item() == pytest.approx(np.cos(0.7) + 100)


# -- refused ---------------------------------------------------------------------------------------


def closing(use):
    """A function of w, with a custom function inside that uses w past its inputs."""
    return lambda w: custom(lambda x: (use(w), lambda dy: dy))(w + 1.0)


def nested_closing(w):
    inner = custom(lambda b: (b * w, lambda dy: dy))
    return custom(lambda a: (inner(a), lambda dy: dy))(w * 1.0)


def of_an_outer_derivative(w):
    return rg.grad(custom(lambda x: (x * w, lambda dy: dy * 2)))(1.0)


CLOSING = {
    **{f.__name__: closing(f) for f in (rg.sin, rg.sign, rg.sum)},
    "w * 2": closing(lambda w: w * 2.0), "2 + w": closing(lambda w: 2.0 + w),
    "stack": closing(lambda w: rg.stack([w, w])[0]), "w": closing(lambda w: w),
    "no input is differentiated": lambda w: custom(lambda x: (x * w, lambda dy: dy))(FIVE),
    "returned alone": lambda w: custom(lambda a: (w, lambda dy: dy))(FIVE) + w * 0,
    "of an outer derivative": of_an_outer_derivative, "nested": nested_closing,
    "nested, in a gradient": lambda z: z * rg.grad(nested_closing)(rg.scalar(3.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSING)
def test_closing_over_what_is_differentiated_is_refused(name):
    refused(lambda: rg.grad(CLOSING[name])(2.0), GradientError, "closes over .* which is being dif")
    assert current() is None


def test_closing_over_a_variable_is_refused():
    v = rg.Variable(2.0, name="weight")
    f = custom(lambda x: (x * v, lambda dy: dy))
    refused(lambda: rg.variable_grads(lambda: f(v * 1.0)), GradientError, "the Variable 'weight'")
    g = custom(lambda x, w: (x * w, lambda dy: [dy * 10, dy * 100]))
    assert plain(rg.variable_grads(lambda: g(rg.scalar(3.0), v)).grads) == {"weight": 100.0}


def fails(x):
    raise RuntimeError("boom")


FORM = "custom_grad: the gradient function.*takes "
MISUSE = [
    (lambda x: x * x, ArgumentError, "must return"),
    (lambda x: (x, 3), ArgumentError, "its grad_func is int"),
    (lambda x: (3, lambda dy: dy), ArgumentError, "its value holds int"),
    (lambda x: {"value": x}, ArgumentError, r"keys \['value'\]"),
    (lambda x: None, ArgumentError, "got None"),
    (lambda x: ((), lambda dy: dy), ArgumentError, "its value is empty"),
    (lambda x, save: save(x), ArgumentError, "takes one list or keywords"),
    (lambda x: (x * x, lambda dy: [dy, dy]), RuleError, r"wrong structure.*by x"),
    (lambda x: (x * x, lambda dy: 3.0), RuleError, "expected a Tensor, got float"),
    (lambda x: (x * x, lambda dy: dy.numpy()), RuleError, "expected a Tensor, got ndarray"),
    (lambda x: (x * x, lambda dy: rg.ones((3,))), RuleError, r"shape \(3,\), expected \(2,\)"),
    (lambda x: (x * x, lambda dy: dy.sum()), RuleError, r"shape \(\), expected \(2,\)"),
    (lambda x: (x * x, lambda dy: rg.astype(dy, "float64")), RuleError, "dtype float64"),
    (lambda x: (x * x, lambda dy, saved: saved[0]), ArgumentError, "f saved nothing"),
    (lambda x, save: (save(a=x), (x, lambda dy, s: s.b))[1], ArgumentError, r"by name \(a\)"),
    (by(lambda dy, a, b: dy), ArgumentError,
     FORM + r"\(dy, a, b\), expected \(dy, saved\) or \(dy"),
    (by(lambda: 1), ArgumentError, FORM + r"\(\)"),
    (by(lambda dy, *, saved: dy), ArgumentError, FORM + r"\(dy, \*, saved\)"),
    (by(lambda dy, a, b, k=1: dy), ArgumentError, FORM + r"\(dy, a, b, k=1\)"),
    (by(functools.partial(lambda dy, a, b, c: dy, c=2)), ArgumentError, FORM + r".*b, \*, c=2\)"),
    (by(lambda dy, saved: len(3)), TypeError, "^object of type 'int' has no len"),
    (fails, RuntimeError, "boom"),
]  # fmt: skip
OTHERS = [
    (lambda x: custom(lambda x, w=None: (x * 1.0, lambda dy: dy))(FIVE, w=x), GradientError,
     "keyword argument 'w'"),
    (rg.grad(lambda x: by_numpy(x).sum()), GradientError, "stop_gradient"),
    (lambda x: FIVE, GradientError, "no path"),
]  # fmt: skip


DECORATED = [(custom(f), *expected) for f, *expected in MISUSE]


@pytest.mark.parametrize(("f", "error", "words"), DECORATED + OTHERS)
def test_misuse(f, error, words):
    refused(lambda: rg.grad(f)([1.0, 2.0]), error, words)
    assert current() is None


NOT_LINEAR = [
    lambda dy: dy if dy.sum().item() < 1 else dy * 0.1, lambda dy: rg.tensor(dy.tolist()),
    lambda dy: rg.remainder(dy, 2.0), lambda dy: rg.astype(rg.astype(dy, rg.int32), rg.float32),
]  # fmt: skip


@pytest.mark.parametrize("grad_func", NOT_LINEAR)
def test_forward_mode_refuses_what_is_not_linear(grad_func):
    f = custom(lambda x: (x * 1, grad_func))
    refused(lambda: rg.jvp(f, [[1.0, 2.0]], [[3.0, 4.0]]), GradientError, "forward mode")


def test_save_after_the_fact():
    kept = []
    rg.grad(custom(lambda x, save: (kept.append(save), (x, lambda dy: dy))[1]))(1.0)
    refused(lambda: kept[0]([1]), ArgumentError, "save was called after")


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_method_object_is_refused_where_it_is_decorated(kind):
    f = kind(lambda x: (x, lambda dy: dy))
    refused(lambda: custom(f), ArgumentError, f"put @{kind.__name__} above @custom_grad")
