"""custom_grad: forms, save, orders, closures, errors."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core.state import current
from regrad.errors import ArgumentError, GradientError, RuleError


@rg.custom_grad
def program_one(a, save):
    save([a])
    return {"value": a.square(), "grad_func": lambda dy, saved: [dy.mul(saved[0].abs())]}


def test_program_one(capsys):
    a = rg.tensor1d([0, -1, 1, 2])
    print("f(a):")
    program_one(a).print()
    print("f'(a):")
    rg.grad(program_one)(a).print()
    assert capsys.readouterr().out == (
        "f(a):\nTensor\n    [0, 1, 1, 4]\nf'(a):\nTensor\n    [0, 1, 1, 2]\n"
    )


def test_program_two(capsys):
    @rg.custom_grad
    def custom_op(a, save):
        save([a])
        value = a.pow(rg.scalar(3, "int32"))
        return {"value": value, "grad_func": lambda dy, saved: [dy.mul(saved[0].abs())]}

    a = rg.tensor1d([0, -1, 2, -2, 0.3])
    custom_op(a).print()
    rg.grad(custom_op)(a).print()
    assert capsys.readouterr().out == (
        "Tensor\n    [0, -1, 8, -8, 0.027]\nTensor\n    [0, 1, 2, 2, 0.3]\n"
    )


FORMS = {
    "dict": lambda x: {"value": x * x, "grad_func": lambda dy: dy * 7},
    "pair": lambda x: (x * x, lambda dy: dy * 7),
    "list": lambda x: (x * x, lambda dy: [dy * 7]),
    "saved": lambda x, save: (save([x]), (x * x, lambda dy, saved: dy * 7))[1],
    "by name": lambda x, save: (save(x=x), (x * x, lambda dy, saved: dy * 7 + 0 * saved.x))[1],
    "save last": lambda x, keep: (keep([x]), (x * x, lambda dy, s: dy * 7 + 0 * s[0]))[1],
    "star": lambda *a: (a[-1]([a[0]]), (a[0] * a[0], lambda dy, s: dy * 7))[1],
    "default": lambda x, power=2: (x**power, lambda dy: dy * 7),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    f = rg.custom_grad(FORMS[form])
    assert f(rg.scalar(3.0)).item() == 9.0
    assert rg.grad(f)(3.0).item() == 7.0


def test_several_inputs_and_none():
    f = rg.custom_grad(lambda a, b: (a * b, lambda dy: [dy * 2, None]))
    da, db = rg.grads(f)([1.0, 5.0])
    assert (da.item(), db.item()) == (2.0, 0.0)


def test_several_outputs():
    f = rg.custom_grad(lambda x: ((x * 2, x * 3), lambda dy: dy[0] * 10 + dy[1] * 100))
    y, z = f(rg.scalar(1.0))
    assert (y.item(), z.item()) == (2.0, 3.0)
    assert rg.grad(lambda x: f(x)[0])(1.0).item() == 10.0
    assert rg.grad(lambda x: f(x)[0] + f(x)[1])(1.0).item() == 110.0


def test_outputs_in_a_dict():
    f = rg.custom_grad(lambda x: ({"a": x * 2, "b": x * 3}, lambda dy: dy["a"] + 5 * dy["b"]))
    assert rg.grad(lambda x: f(x)["b"])(1.0).item() == 5.0


def test_containers_and_constants_among_the_inputs():
    def f(p, n, w, label="x"):
        return p["a"] * n + w * p["b"], lambda dy: [{"a": dy * 1, "b": dy * 2}, dy * 3]

    custom = rg.custom_grad(f)
    got = rg.grads(lambda p, w: custom(p, 4, w, label="y"))([{"a": 1.0, "b": 2.0}, 5.0])
    assert (got[0]["a"].item(), got[0]["b"].item(), got[1].item()) == (1.0, 2.0, 3.0)


def test_the_forward_ops_do_not_count():
    f = rg.custom_grad(lambda x: (rg.exp(rg.sin(x)), lambda dy: dy * 2))
    assert rg.grad(f)(1.0).item() == 2.0
    nested = rg.custom_grad(lambda x: (f(x) * 3, lambda dy: dy * 5))
    assert rg.grad(nested)(1.0).item() == 5.0


def orders(f, x, n=3):
    out = []
    for _ in range(n):
        f = rg.grad(f)
        out.append(f(rg.asarray(x, dtype=rg.float64)).item())
    return out


def log1pexp(x, save):
    e = rg.exp(x)
    save([e])
    return rg.log(1 + e), lambda dy, saved: dy * (1 - 1 / (1 + saved[0]))


def log1pexp_closed_over(x):
    e = rg.exp(x)
    return rg.log(1 + e), lambda dy: dy * (1 - 1 / (1 + e))


@pytest.mark.parametrize("f", [log1pexp, log1pexp_closed_over])
def test_saved_intermediates_keep_their_history(f):
    s = 1 / (1 + np.exp(-0.7))
    due = [s, s * (1 - s), s * (1 - s) * (1 - 2 * s)]
    np.testing.assert_allclose(orders(rg.custom_grad(f), 0.7), due, rtol=1e-12)


@pytest.mark.parametrize("saves", [True, False])
def test_a_saved_output_is_differentiated_by_the_custom_rule(saves):
    @rg.custom_grad
    def exp(x, save):
        y = rg.asarray(np.exp(rg.stop_gradient(x).numpy()))  # no history of its own
        save([y])
        return y, (lambda dy, saved: dy * saved[0]) if saves else (lambda dy: dy * y)

    np.testing.assert_allclose(orders(exp, 0.5), [np.exp(0.5)] * 3, rtol=1e-12)


def test_an_input_returned_as_the_value():
    f = rg.custom_grad(lambda x: (x, lambda dy: dy * 3))
    assert rg.grad(f)(2.0).item() == 3.0  # TensorFlow.js says 4
    assert rg.grad(lambda x: f(x) * x)(2.0).item() == 8.0


def test_a_constant_returned_as_the_value():
    c = rg.scalar(5.0)
    f = rg.custom_grad(lambda x: (c, lambda dy: dy * 3))
    assert rg.grad(f)(2.0).item() == 3.0
    with pytest.raises(GradientError, match="no path"):
        rg.grad(lambda x: c)(2.0)


def test_second_order_of_surrogates_is_what_grad_func_says():
    f = rg.custom_grad(lambda x: (rg.sign(x), lambda dy: dy * x))
    np.testing.assert_allclose(orders(f, 2.0, 2), [2.0, 1.0])


def test_closing_over_a_differentiated_tensor_is_refused():
    def loss(w):
        f = rg.custom_grad(lambda x: (x * w, lambda dy: dy))
        return f(rg.scalar(1.0) * w)

    with pytest.raises(GradientError, match=r"closes over 'w', which is being differentiated"):
        rg.grad(loss)(2.0)
    assert current() is None


@pytest.mark.parametrize(
    "use",
    [
        rg.sin,
        rg.sign,
        lambda w: w * 2.0,
        lambda w: 2.0 + w,
        rg.sum,
        lambda w: rg.stack([w, w])[0],
        lambda w: w,
    ],
)
def test_every_use_of_what_is_closed_over_is_refused(use):
    def f(w):
        custom = rg.custom_grad(lambda x: (use(w), lambda dy: dy))
        return custom(w + 1.0)

    with pytest.raises(GradientError, match="closes over 'w'"):
        rg.grad(f)(rg.tensor([1.0, 2.0]))


def test_closing_over_it_is_refused_although_no_input_is_differentiated():
    def loss(w):
        return rg.custom_grad(lambda x: (x * w, lambda dy: dy))(rg.scalar(1.0))

    with pytest.raises(GradientError, match="closes over 'w'"):
        rg.grad(loss)(2.0)


def test_closing_over_a_tensor_of_an_outer_derivative_is_refused():
    def outer(w):
        f = rg.custom_grad(lambda x: (x * w, lambda dy: dy * 2))
        return rg.grad(f)(1.0)

    with pytest.raises(GradientError, match="closes over 'w'"):
        rg.grad(outer)(2.0)


def test_closing_over_a_variable_is_refused():
    v = rg.Variable(2.0, name="weight")
    f = rg.custom_grad(lambda x: (x * v, lambda dy: dy))
    with pytest.raises(GradientError, match="the Variable 'weight'"):
        rg.variable_grads(lambda: f(v * 1.0))
    g = rg.custom_grad(lambda x, w: (x * w, lambda dy: [dy * 10, dy * 100]))
    grads = rg.variable_grads(lambda: g(rg.scalar(3.0), v)).grads
    assert grads["weight"].item() == 100.0


def test_grad_func_may_close_over_what_it_likes():
    # dx depends on w, y does not: first order is right, and the mixed derivative is 1
    def outer(w):
        f = rg.custom_grad(lambda x: (x * 1.0, lambda dy: dy * w))
        return rg.grad(f)(1.0)

    assert rg.grad(outer)(2.0).item() == 1.0


def test_numpy_inside_f():
    f = rg.custom_grad(lambda x: (rg.asarray(x.numpy() ** 2), lambda dy: dy * 2 * x))
    assert rg.grad(f)(3.0).item() == 6.0
    with pytest.raises(GradientError, match="stop_gradient"):
        rg.grad(rg.grad(f))(3.0)


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
    (lambda x: (x * x, lambda dy, saved: saved[0]), ArgumentError, "What f saved is nothing"),
    (lambda x, save: (save(a=x), (x, lambda dy, s: s.b))[1], ArgumentError, r"by name \(a\)"),
]


@pytest.mark.parametrize(("f", "error", "words"), MISUSE)
def test_misuse(f, error, words):
    with pytest.raises(error, match=words):
        rg.grad(rg.custom_grad(f))([1.0, 2.0])
    assert current() is None


def test_save_after_the_fact():
    kept = []
    f = rg.custom_grad(lambda x, save: (kept.append(save), (x, lambda dy: dy))[1])
    rg.grad(f)(1.0)
    with pytest.raises(ArgumentError, match="save was called after"):
        kept[0]([1])


def test_exceptions_inside_leave_nothing_open():
    def f(x):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        rg.grad(rg.custom_grad(f))(1.0)
    assert current() is None


def test_a_keyword_that_is_differentiated_is_refused():
    f = rg.custom_grad(lambda x, w=None: (x * 1.0, lambda dy: dy))
    with pytest.raises(GradientError, match="keyword argument 'w'"):
        rg.grad(lambda w: f(rg.scalar(1.0), w=w))(2.0)


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_method_object_is_refused_where_it_is_decorated(kind):
    with pytest.raises(ArgumentError, match=f"put @{kind.__name__} above @custom_grad"):
        rg.custom_grad(kind(lambda x: (x, lambda dy: dy)))


def test_what_a_gradient_function_differentiates_is_under_the_overrides_of_the_call():
    """Of the three sines, the one under `grad` has the rule; those of grad_func itself do not."""

    def differentiating(x):
        inner = lambda: rg.grad(lambda p: rg.sum(rg.sin(p)))(x)  # noqa: E731
        return rg.sin(x), lambda dy: dy * (rg.sin(x) + inner())

    def f(x):
        with rg.gradient_override_map({"Sin": lambda dy: dy * 100.0}):
            return rg.sum(rg.custom_grad(differentiating)(x))

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
    with rg.gradient_override_map({"Sin": lambda dy: dy * 100.0, "Tanh": rule}):
        dx = rg.grad(lambda x: rg.tanh(x) + rg.sin(x))(0.7)
    assert dx.item() == pytest.approx(np.cos(0.7) + 100)
