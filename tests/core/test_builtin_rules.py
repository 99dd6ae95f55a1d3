"""The library's own rules, called and put in force: they give what no override gives."""

import operator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.core.registry import OPS
from regrad.core.rule import NoGradient, NoRule
from regrad.errors import MissingRuleError, RuleError, UnknownOpError
from regrad.rules import builtin, optional
from regrad.v1.functions.rule_functions import IRREGULAR
from tests.helpers import graph_sample_runs as graphs
from tests.helpers import sample_runs as runs
from tests.helpers.choices import choose

LOOPS = {"If", "While", "WhileGrad"}  # whose rules make graphs of their own


def has_rule(op_type):
    return not isinstance(OPS[op_type].rule, NoGradient | NoRule)


OURS = [t for t, op in OPS.items() if op.function.__module__.startswith("regrad.")]
TYPES = sorted(t for t in OURS if has_rule(t) and t not in LOOPS and t[0].isupper())
ROWS = [row for row in runs.ROWS if row.order and any(map(has_rule, row.covers))]
FIRST = {t: row for row in reversed(ROWS) for t in row.covers if has_rule(t)}


def called(op_type):
    return lambda dy, **names: builtin(op_type)(dy, **names)


def of(op_type):
    return lambda op, *grads: builtin(op_type).of(op, *grads)


def by_name(op_type):
    return getattr(tf.nn_grad, f"_{op_type}Grad")


def by_parameter(op_type):
    return lambda dy, builtin: builtin(dy)


FORMS = {
    "value": builtin, "called": called, "TensorFlow's": of, "TensorFlow's name": by_name,
    "parameter": by_parameter,
}  # fmt: skip


def overridden(row, form):
    """A sample whose ops are differentiated by their own rules, in one of the forms."""
    rules = {t: FORMS[form](t) for t in row.covers if has_rule(t) and t not in LOOPS}

    def f(*xs):
        with rg.gradient_override_map(rules):
            return row.f(*xs)

    return replace(row, f=f)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_op_type_by_its_own_rule(row):
    xs = runs.inputs_of(row, "numpy")
    for form in choose(row, ["called", "parameter", "value", "TensorFlow's name"]):
        for order in range(1, min(row.order, 2) + 1):
            due = runs.gradients(row, xs, order)
            got = runs.gradients(overridden(row, form), xs, order)
            for a, b in zip(got, due, strict=True):
                np.testing.assert_array_equal(a, b, f"{form}, order {order}")


@pytest.mark.parametrize("op_type", FIRST)
def test_every_op_type_by_its_own_rule_in_a_graph(op_type):
    row = FIRST[op_type]
    forms = choose(op_type, ["called", "TensorFlow's name", "parameter"])
    found = []
    for each in (row, *[overridden(row, form) for form in forms]):
        with tf.Graph().as_default():
            built, values = graphs.SampleGraph(each, "static"), graphs.eager_values(row)
            orders = range(1, min(row.order, 2) + 1)
            found.append([a for n in orders for a in built.gradients(values, n)])
    for form, gradients in zip(forms, found[1:], strict=True):
        for due, got in zip(found[0], gradients, strict=True):
            np.testing.assert_array_equal(got, due, form)


def test_every_op_type_has_a_row():
    without = {"Cast", "EnsureShape", "NextAfter", "Print", "RandomShuffle"}
    assert set(TYPES) - set(FIRST) == without


# -- three times the gradient ----------------------------------------------------------------------


def tripled(dy, builtin):
    return 3 * builtin(dy)


def tripled_by_dy(dy, builtin):
    return builtin(tuple(3 * d for d in dy) if isinstance(dy, tuple) else 3 * dy)


BESIDE = {"MatrixPseudoInverse"}  # whose sample has another way for the gradient


@pytest.mark.parametrize("op_type", FIRST)
def test_three_times_the_gradient(op_type):
    """Both ways to say it agree, with each other and (if the op ran once) with the plain one."""
    row, counts = FIRST[op_type], {}
    xs = runs.inputs_of(row, "numpy")
    found = []
    for rule in (tripled, tripled_by_dy):

        def f(*xs, rule=rule):
            with rg.gradient_override_map({op_type: rule}) as used:
                y = row.f(*xs)
            counts[rule] = sum(hit.count for hit in used.hits)
            return y

        found.append(runs.gradients(replace(row, f=f), xs, 1))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    if counts[tripled_by_dy] == 1 and len(row.covers) == 1 and op_type not in BESIDE:
        for a, b in zip(found[0], runs.gradients(row, xs, 1), strict=True):
            np.testing.assert_allclose(a, 3 * np.asarray(b), rtol=1e-12, atol=1e-12)


# -- what it is for --------------------------------------------------------------------------------


def orders(f, x, n=3):
    found = []
    for _ in range(n):
        f = rg.grad(f)
        found.append(f(rg.asarray(x, dtype=rg.float64)).item())
    return found


@pytest.mark.parametrize("wrap", [lambda f: f, rg.jit], ids=["eager", "jit"])
def test_a_scaled_rule_to_third_order(wrap):
    with jax.enable_x64(True):

        def f(x):
            with rg.gradient_override_map({"Tanh": lambda dy, **k: 0.5 * builtin("Tanh")(dy, **k)}):
                return rg.tanh(x)

        t = np.tanh(0.3)  # the output, too, is differentiated by the rule: t' = (1 - t²) / 2
        first = (1 - t**2) / 2
        second = -t * first
        due = [first, second, -(first**2) - t * second]
        np.testing.assert_allclose(orders(wrap(f), 0.3), due, rtol=1e-12)


def test_clipped_and_logged():
    seen = []

    def clipped(dy, **names):
        dx = builtin("Square")(dy, **names)
        seen.append(dx.tolist())
        return rg.clip(dx, -1, 1)

    with rg.gradient_override_map({"Square": clipped}):
        assert rg.grad(rg.square)([0.25, 3.0]).tolist() == [0.5, 1.0]
    assert seen == [[0.5, 6.0]]


def test_several_inputs_give_a_list_that_the_walk_sums():
    x, row = rg.tensor([[1.0, 2.0], [3.0, 4.0]]), rg.tensor([5.0, 6.0])
    rule = lambda dy, **k: [2 * dx for dx in builtin("Mul")(dy, **k)]  # noqa: E731
    with rg.gradient_override_map({"Mul": rule}):
        dx, drow = rg.grads(lambda a, b: a * b)([x, row])
    assert dx.tolist() == [[10.0, 12.0], [10.0, 12.0]]
    assert drow.tolist() == [8.0, 12.0]


def test_names_given_by_hand():
    assert builtin("Relu").names == ["y"]
    assert builtin("Relu")(rg.tensor([2.0, 3.0]), y=rg.tensor([0.0, 1.0])).tolist() == [0.0, 3.0]
    with rg.gradient_override_map({"Relu": lambda dy, y: 10 * builtin("Relu")(dy, y=y)}):
        assert rg.grad(rg.nn.relu)([-1.0, 2.0]).tolist() == [0.0, 10.0]


@pytest.mark.parametrize("op_type", ["Floor", "Ceil", "Round", "Sign", "Step"])
def test_what_is_constant_by_pieces_gives_zeros(op_type):
    names = {"x": rg.tensor([0.3]), "y": rg.tensor([0.0])}
    assert (0.5 * builtin(op_type)(rg.tensor([2.0]), **names)).tolist() == [0.0]
    with rg.gradient_override_map({op_type: lambda dy, **k: dy + builtin(op_type)(dy, **k)}):
        assert rg.grad(OPS[op_type].function)([0.3]).tolist() == [1.0]


def test_another_op_types_rule():
    for rule in (builtin("Tanh"), lambda dy, **k: builtin("Tanh")(dy, y=k["y"])):
        with rg.gradient_override_map({"Sigmoid": rule}):
            y = 1 / (1 + np.exp(-0.5))
            assert rg.grad(rg.nn.sigmoid)(0.5).item() == pytest.approx(1 - y * y)


def test_names_that_it_does_not_need_are_ignored():
    with rg.gradient_override_map({"LeakyRelu": lambda dy, **k: builtin("Relu")(dy, **k)}) as used:
        f = lambda x: rg.nn.leaky_relu(x, 0.5)  # noqa: E731
        assert rg.grad(f)([-1.0, 2.0]).tolist() == [0.0, 1.0]
    used.assert_fired()


def test_it_is_the_first_rule_even_if_the_user_gave_another():
    @rg.op("Cubed")
    def cubed(xp, x: rg.Tensor, /) -> rg.Tensor:
        return x * x * x

    @rg.gradient("Cubed")
    def _(dy, x):
        return dy * 3 * x * x

    @rg.gradient("Cubed", overwrite=True)
    def _(dy, x):
        return dy * 0

    @rg.gradient("Cubed", overwrite=True)
    def again(dy, **names):
        return 2 * builtin("Cubed")(dy, **names)

    try:
        assert rg.grad(cubed)(2.0).item() == 24.0
        with rg.gradient_override_map({"Cubed": builtin("Cubed")}):
            assert rg.grad(cubed)(2.0).item() == 12.0
    finally:
        del OPS["Cubed"]


def test_it_does_not_come_back_to_the_override():
    rule = lambda dy, **k: builtin("Exp")(dy, **k) * 2  # noqa: E731
    with rg.gradient_override_map({"Exp": rule, "Mul": optional(lambda dy: 1 / 0)}) as used:
        assert rg.grad(rg.exp)(0.0).item() == 2.0
        dx = builtin("Mul")(rg.tensor(1.0), a=rg.tensor(2.0), b=rg.tensor(3.0))[0]
        assert rg.grad(lambda a: builtin("Mul")(a, a=a, b=a)[0])(3.0).item() == 6.0
    assert dx.item() == 3.0
    assert [hit.op_type for hit in used.hits] == ["Exp"]


@pytest.mark.parametrize(
    "rule", ["Exp", builtin("Exp"), called("Exp"), of("Exp")], ids=["type", "value", "called", "of"]
)
def test_complex_numbers_are_conjugated_once(rule):
    z = rg.tensor(np.array([1 + 2j]))
    f = lambda z: rg.real(rg.exp(z) * (1 + 1j)).sum()  # noqa: E731
    due = rg.grad(f)(z).numpy()
    np.testing.assert_allclose(due, np.conj(np.exp(1 + 2j) * (1 + 1j)), rtol=1e-12)
    with rg.gradient_override_map({"Exp": rule}):
        np.testing.assert_allclose(rg.grad(f)(z).numpy(), due, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_cast_to_integers_stays_without_a_gradient(form):
    f = lambda x: rg.astype(rg.astype(x, rg.int32), rg.float32) * 2 + x  # noqa: E731
    with rg.gradient_override_map({"Cast": FORMS[form]("Cast")}):
        assert rg.grad(f)([1.5, 2.5]).tolist() == [1.0, 1.0]


ERRORS = [
    (lambda: builtin("Rellu"), UnknownOpError, "no op type 'Rellu'. Did you mean 'Relu'"),
    (lambda: builtin("ArgMax"), MissingRuleError, r"builtin\('ArgMax'\): the op type has no gradi"),
    (lambda: builtin("StopGradient"), MissingRuleError, "has no gradient"),
    (
        lambda: builtin("Mul")(1.0, a=2.0),
        RuleError,
        r"needs b: call it as builtin\('Mul'\)\(dy, b=",
    ),
    (
        lambda: builtin("Relu")(1.0, yy=2.0),
        RuleError,
        r"needs y: call it as builtin\('Relu'\)\(dy, y=y\)",
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), ERRORS)
def test_errors(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_rules_with_all_names_get_what_they_could_name():
    got = {}

    def rule(dy, x, **names):
        got.update(names)
        return dy

    with rg.gradient_override_map({"Sum": rule}), pytest.raises(RuleError, match="shape"):
        rg.grad(lambda x: rg.sum(x, axis=1))(np.ones((2, 3)))
    assert sorted(got) == ["axis", "keepdims", "x_dtype", "x_shape", "y"]
    assert (got["axis"], tuple(got["x_shape"]), got["y"].tolist()) == (1, (2, 3), [3.0, 3.0])


# -- torch and JAX ---------------------------------------------------------------------------------

VALUES = np.array([-1.5, 0.5, 2.0], np.float32)
FOREIGN = {
    "value": builtin("Tanh"),
    "halved": lambda dy, **k: 0.5 * builtin("Tanh")(dy, **k),
    "by name": lambda dy, y: 0.5 * builtin("Tanh")(dy, y=y),
    "TensorFlow's": lambda op, grad: 0.5 * builtin("Tanh").of(op, grad),
}


@pytest.mark.parametrize("form", FOREIGN)
def test_torch(form):
    x = torch.tensor(VALUES, requires_grad=True)
    with regrad.torch.gradient_override_map({"Tanh": FOREIGN[form]}) as used:
        y = torch.tanh(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    t, share = np.tanh(VALUES), 1.0 if form == "value" else 0.5
    np.testing.assert_allclose(dx.detach().numpy(), share * (1 - t**2), rtol=1e-5)
    np.testing.assert_allclose(ddx.numpy(), share**2 * -2 * t * (1 - t**2), rtol=1e-5)
    used.assert_fired()


@pytest.mark.parametrize("form", FOREIGN)
def test_jax(form):
    def f(x):
        return rg.jax.override(jnp.tanh, {"Tanh": FOREIGN[form]})(x).sum()

    dx = jax.jit(jax.grad(f))(VALUES)
    ddx = jax.grad(lambda x: jax.grad(f)(x).sum())(jnp.asarray(VALUES))
    t, share = np.tanh(VALUES), 1.0 if form == "value" else 0.5
    np.testing.assert_allclose(dx, share * (1 - t**2), rtol=1e-5)
    np.testing.assert_allclose(ddx, share**2 * -2 * t * (1 - t**2), rtol=1e-5)


@pytest.mark.parametrize("rule", [builtin("Conv2D"), called("Conv2D")], ids=["value", "called"])
def test_torch_lays_images_out_in_another_way(rule):
    scope = regrad.torch.gradient_override_map({"Conv2D": rule})
    with pytest.raises(RuleError, match="'Conv2D' is for images whose channels come last"), scope:
        pass


@pytest.mark.parametrize("rule", [builtin("Elu"), called("Elu")], ids=["value", "called"])
def test_torch_says_more_than_the_op_knows(rule):
    x = torch.tensor(VALUES, requires_grad=True)
    with regrad.torch.gradient_override_map({"Elu": rule}):
        (dx,) = torch.autograd.grad(torch.nn.functional.elu(x).sum(), x)
        with pytest.raises(RuleError, match="which has no 'alpha'"):
            torch.nn.functional.elu(x, 2.0)
    np.testing.assert_allclose(dx, np.where(VALUES > 0, 1, np.exp(VALUES)), rtol=1e-5)


# -- TensorFlow's spelling -------------------------------------------------------------------------


@tf.RegisterGradient("HalvedRelu")
def _halved_relu(op, grad):
    return 0.5 * tf.nn_grad._ReluGrad(op, grad)


@tf.RegisterGradient("DoubledSum")
def _doubled_sum(op, grad):
    by_x, by_axes = tf.math_grad._SumGrad(op, grad)
    assert by_axes is None
    return [2.0 * by_x, by_axes]


def test_rules_of_tensorflow_carried_over():
    with tf.Graph().as_default() as g, tf.Session() as session:
        x = tf.constant([[-1.0, 2.0], [3.0, -4.0]])
        with g.gradient_override_map({"Relu": "HalvedRelu", "Sum": "DoubledSum"}):
            y = tf.reduce_sum(tf.nn.relu(x), axis=1)
        assert session.run(tf.gradients(y, x))[0].tolist() == [[0.0, 1.0], [1.0, 0.0]]
    with rg.gradient_override_map({"Relu": "HalvedRelu"}):
        assert rg.grad(rg.nn.relu)([-1.0, 2.0]).tolist() == [0.0, 0.5]


def test_gradients_of_an_op_outside_of_a_rule():
    with tf.Graph().as_default(), tf.Session() as session:
        a, b = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([10.0, 20.0])
        grads = tf.math_grad._MulGrad((a * b).op, tf.ones([2, 2]))
        da, db = session.run(grads)  # summed to the shapes of the inputs, as in TensorFlow
    assert (da.tolist(), db.tolist()) == ([[10.0, 20.0], [10.0, 20.0]], [4.0, 6.0])


NAMED = (
    "_ReluGrad _SigmoidGrad _TanhGrad _SquareGrad _MulGrad _AddGrad _SubGrad _RealDivGrad _DivGrad "
    "_ExpGrad _LogGrad _MatMulGrad _SumGrad _MeanGrad _ReshapeGrad _TransposeGrad _ConcatGradV2 "
    "_SoftmaxGrad _Conv2DGrad _MaxPoolGrad _IdentityGrad _IdGrad _IdNGrad _PadGrad _GatherV2Grad "
    "_BiasAddGrad _TopKGrad _SelectGrad _SelectGradV2 _BatchMatMulV2 _Conv3DBackpropInputGrad "
    "_SplitVGrad _PackGrad _UnpackGrad _StridedSliceGrad _SquaredDifferenceGrad _LeakyReluGrad"
)


@pytest.mark.parametrize("module", [tf.nn_grad, tf.math_grad, tf.array_grad])
def test_names(module):
    for name in [*NAMED.split(), *IRREGULAR]:
        assert getattr(module, name).__name__ == name
        assert name in dir(module)
    with pytest.raises(AttributeError, match=r"'_RelluGrad'. Did you mean '_ReluG"):
        _ = module._RelluGrad
    with pytest.raises(AttributeError, match="_ArgMaxGrad"):
        _ = module._ArgMaxGrad
    assert not hasattr(module, "__wrapped__")


def test_the_modules_are_imported_as_tensorflows_are():
    from regrad.v1 import nn_grad
    from regrad.v1.math_grad import _SquareGrad

    assert nn_grad is tf.nn_grad
    assert _SquareGrad.__name__ == "_SquareGrad"


SCALE = np.float32([3.0, 5.0])
RULES = {  # of dy, g = builtin(dy) and k, and what they make of one gradient
    "k g": (lambda dy, g, k: k * g, lambda dy, dx, k: k * dx),
    "g k": (lambda dy, g, k: g * k, lambda dy, dx, k: k * dx),
    "k + g": (lambda dy, g, k: k + g, lambda dy, dx, k: k + dx),
    "g + k": (lambda dy, g, k: g + k, lambda dy, dx, k: k + dx),
    "k - g": (lambda dy, g, k: k - g, lambda dy, dx, k: k - dx),
    "g - k": (lambda dy, g, k: g - k, lambda dy, dx, k: dx - k),
    "g / k": (lambda dy, g, k: g / k, lambda dy, dx, k: dx / k),
    "dy g": (lambda dy, g, k: dy * g, lambda dy, dx, k: dy * dx),
    "dy - g": (lambda dy, g, k: dy - g, lambda dy, dx, k: dy - dx),
    "(dy, dy) + g": (lambda dy, g, k: operator.add((dy, dy), g), lambda dy, dx, k: dy + dx),
    "sum": (lambda dy, g, k: sum([g, k * g, -g]), lambda dy, dx, k: k * dx),
}


@pytest.mark.parametrize(("ours", "each"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("k", [2, 2.0, np.float32(2), SCALE, rg.tensor(SCALE), rg.scalar(2.0)])
def test_gradients_of_several_inputs_take_operators_in_both_orders(ours, each, k):
    a, b, dy = np.float32([1.0, 2.0]), np.float32([7.0, 11.0]), np.float32([0.5, 0.25])
    with rg.gradient_override_map({"Mul": lambda dy, builtin: ours(dy, builtin(dy), k)}):
        pull = rg.vjp(rg.multiply, a, b)[1]
    by_a, by_b = pull(dy)
    k = k.numpy() if isinstance(k, rg.Tensor) else k
    np.testing.assert_allclose(by_a.numpy(), np.broadcast_to(each(dy, dy * b, k), 2))
    np.testing.assert_allclose(by_b.numpy(), np.broadcast_to(each(dy, dy * a, k), 2))
