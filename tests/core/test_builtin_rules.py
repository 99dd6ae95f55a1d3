"""The library's own rules, called and put in force: they give what no override gives."""

import importlib
import operator
from dataclasses import replace

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
from regrad.v1.nn_grad import IRREGULAR
from tests.helpers import graph_sample_runs as graphs
from tests.helpers import sample_runs as runs
from tests.helpers.choices import choose
from tests.helpers.rows import close, plain, refusals, refused, results, under

LOOPS = {"If", "While", "WhileGrad"}  # whose rules make graphs of their own


def has_rule(op_type):
    return not isinstance(OPS[op_type].rule, NoGradient | NoRule)


OURS = [t for t, op in OPS.items() if op.function.__module__.startswith("regrad.")]
TYPES = sorted(t for t in OURS if has_rule(t) and t not in LOOPS and t[0].isupper())
ROWS = [row for row in runs.ROWS if row.order and any(map(has_rule, row.covers))]
FIRST = {t: row for row in reversed(ROWS) for t in row.covers if has_rule(t)}


FORMS = {
    "value": builtin, "called": lambda op_type: lambda dy, **names: builtin(op_type)(dy, **names),
    "TensorFlow's": lambda op_type: lambda op, *grads: builtin(op_type).of(op, *grads),
    "TensorFlow's name": lambda op_type: getattr(tf.nn_grad, f"_{op_type}Grad"),
    "parameter": lambda op_type: lambda dy, builtin: builtin(dy),
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


def tripled_by_dy(dy, builtin):
    return builtin(tuple(3 * d for d in dy) if isinstance(dy, tuple) else 3 * dy)


BESIDE = {"MatrixPseudoInverse"}  # whose sample has another way for the gradient


@pytest.mark.parametrize("op_type", FIRST)
def test_three_times_the_gradient(op_type):
    """Both ways to say it agree, with each other and (if the op ran once) with the plain one."""
    row, counts = FIRST[op_type], {}
    xs = runs.inputs_of(row, "numpy")
    found = []
    for rule in (lambda dy, builtin: 3 * builtin(dy), tripled_by_dy):

        def f(*xs, rule=rule):
            with rg.gradient_override_map({op_type: rule}) as used:
                y = row.f(*xs)
            counts[rule] = sum(hit.count for hit in used.hits)
            return y

        found.append(runs.gradients(replace(row, f=f), xs, 1))
    close(found[0], found[1])
    if counts[tripled_by_dy] == 1 and len(row.covers) == 1 and op_type not in BESIDE:
        close(found[0], [3 * np.asarray(dx) for dx in runs.gradients(row, xs, 1)])


# -- what it is for --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, rg.jit], ids=["eager", "jit"])
def test_a_scaled_rule_to_third_order(wrap):
    rules = {"Tanh": lambda dy, **k: 0.5 * builtin("Tanh")(dy, **k)}
    t = np.tanh(0.3)  # the output, too, is differentiated by the rule: t' = (1 - t²) / 2
    first = (1 - t**2) / 2
    g = wrap(lambda x: under(rules, rg.tanh, x))
    for expected in (first, -t * first, -(first**2) + t**2 * first):
        g = rg.grad(g)
        close(g(rg.asarray(0.3, dtype=rg.float64)), expected)


@rg.op("CubedHere")
def cubed(xp, x: rg.Tensor, /) -> rg.Tensor:
    return x * x * x


rg.gradient("CubedHere")(lambda dy, x: dy * 3 * x * x)
rg.gradient("CubedHere", overwrite=True)(lambda dy, x: dy * 0)
rg.gradient("CubedHere", overwrite=True)(lambda dy, **names: 2 * builtin("CubedHere")(dy, **names))
MATRIX, ROW = rg.tensor([[1.0, 2.0], [3.0, 4.0]]), rg.tensor([5.0, 6.0])
HALF = 1 / (1 + np.exp(-0.5))


def twice(dy, **names):
    return [2 * dx for dx in builtin("Mul")(dy, **names)]


def clipped(dy, **names):
    return rg.clip(builtin("Square")(dy, **names), -1, 1)


leaky = lambda x: rg.nn.leaky_relu(x, 0.5)  # noqa: E731
to_integers = lambda x: rg.astype(rg.astype(x, rg.int32), rg.float32) * 2 + x  # noqa: E731
# Rules, a call under them, and its result.
VALUES = {
    "clipped": ({"Square": clipped}, lambda: rg.grad(rg.square)([0.25, 3.0]), [0.5, 1.0]),
    "several inputs, summed by the walk": (
        {"Mul": twice}, lambda: rg.grads(lambda a, b: a * b)([MATRIX, ROW]),
        [[[10.0, 12.0], [10.0, 12.0]], [8.0, 12.0]]),
    "names by hand": ({"Relu": lambda dy, y: 10 * builtin("Relu")(dy, y=y)},
                      lambda: rg.grad(rg.nn.relu)([-1.0, 2.0]), [0.0, 10.0]),
    "called": ({}, lambda: builtin("Relu")(rg.tensor([2.0, 3.0]), y=rg.tensor([0.0, 1.0])), [0, 3]),
    "another op type's": ({"Sigmoid": builtin("Tanh")}, lambda: rg.grad(rg.nn.sigmoid)(0.5),
                          pytest.approx(1 - HALF**2)),
    "another op type's, by name": ({"Sigmoid": lambda dy, **k: builtin("Tanh")(dy, y=k["y"])},
         lambda: rg.grad(rg.nn.sigmoid)(0.5), pytest.approx(1 - HALF**2)),
    "names that it does not need": ({"LeakyRelu": lambda dy, **k: builtin("Relu")(dy, **k)},
                                    lambda: rg.grad(leaky)([-1.0, 2.0]), [0.0, 1.0]),
    "the rule of a user": ({}, lambda: rg.grad(cubed)(2.0), 24.0),
    "the first rule": ({"CubedHere": builtin("CubedHere")}, lambda: rg.grad(cubed)(2.0), 12.0),
    "TensorFlow's": ({"Relu": "HalvedRelu"}, lambda: rg.grad(rg.nn.relu)([-1.0, 2.0]), [0.0, 0.5]),
    **{f"a cast to integers, {form}": ({"Cast": make("Cast")},
                                       lambda: rg.grad(to_integers)([1.5, 2.5]), [1.0, 1.0])
       for form, make in FORMS.items()},
    **{f"zeros of {t}": ({t: lambda dy, t=t, **k: dy + 0.5 * builtin(t)(dy, **k)},
                         lambda t=t: rg.grad(OPS[t].function)([0.3]), [1.0])
       for t in ("Floor", "Ceil", "Round", "Sign", "Step")},
}  # fmt: skip
test_values_under_rules = results(VALUES)


def test_names():
    assert builtin("Relu").names == ["y"]
    names = {}
    wrong = {"Sum": lambda dy, x, **k: (names.update(k), dy)[1]}
    row_sums = rg.grad(lambda x: rg.sum(x, axis=1))
    refused(lambda: under(wrong, row_sums, np.ones((2, 3))), RuleError, "shape")
    assert sorted(names) == ["axis", "keepdims", "x_dtype", "x_shape", "y"]
    assert (names["axis"], tuple(names["x_shape"]), plain(names["y"])) == (1, (2, 3), [3.0, 3.0])


def test_it_does_not_come_back_to_the_override():
    rule = lambda dy, **k: builtin("Exp")(dy, **k) * 2  # noqa: E731
    with rg.gradient_override_map({"Exp": rule, "Mul": optional(lambda dy: 1 / 0)}) as used:
        assert rg.grad(rg.exp)(0.0).item() == 2.0
        assert builtin("Mul")(rg.tensor(1.0), a=rg.tensor(2.0), b=rg.tensor(3.0))[0].item() == 3.0
        assert rg.grad(lambda a: builtin("Mul")(a, a=a, b=a)[0])(3.0).item() == 6.0
    assert [hit.op_type for hit in used.hits] == ["Exp"]


@pytest.mark.parametrize("form", ["type", "value", "called", "TensorFlow's"])
def test_complex_numbers_are_conjugated_once(form):
    z = rg.tensor(np.array([1 + 2j]))
    df = rg.grad(lambda z: rg.real(rg.exp(z) * (1 + 1j)).sum())
    rules = {"Exp": FORMS.get(form, str)("Exp")}
    close([df(z), under(rules, df, z)], [np.conj(np.exp([1 + 2j]) * (1 + 1j))] * 2)


ERRORS = [
    (lambda: builtin("Rellu"), UnknownOpError, "no op type 'Rellu'. Did you mean 'Relu'"),
    (lambda: builtin("ArgMax"), MissingRuleError, r"builtin\('ArgMax'\): the op type has no gradi"),
    (lambda: builtin("StopGradient"), MissingRuleError, "has no gradient"),
    (lambda: builtin("Mul")(1.0, a=2.0), RuleError, r"needs b: call it .*'Mul'\)\(dy, b="),
    (lambda: builtin("Relu")(1.0, yy=2.0), RuleError, r"needs y: call it .*'Relu'\)\(dy, y=y\)"),
    (lambda: tf.nn_grad._RelluGrad, AttributeError, r"'_RelluGrad'. Did you mean '_ReluG"),
    (lambda: tf.math_grad._ArgMaxGrad, AttributeError, "_ArgMaxGrad"),
    *[(lambda form=form: OTHER({"Conv2D": FORMS[form]("Conv2D")}).__enter__(), RuleError,
       "'Conv2D' is for images with the channels last") for form in ("value", "called")],
]  # fmt: skip
test_errors = refusals(ERRORS)


# -- torch and JAX ---------------------------------------------------------------------------------

NUMBERS = np.array([-1.5, 0.5, 2.0], np.float32)
OTHER = regrad.torch.gradient_override_map


@pytest.mark.parametrize("form", ["value", "called"])
def test_torch_says_more_than_the_op_knows(form):
    x, elu = torch.tensor(NUMBERS, requires_grad=True), torch.nn.functional.elu
    with OTHER({"Elu": FORMS[form]("Elu")}):
        (dx,) = torch.autograd.grad(elu(x).sum(), x)
        refused(lambda: elu(x, 2.0), RuleError, "which has no 'alpha'")
    close(dx, np.where(NUMBERS > 0, 1, np.exp(NUMBERS)), 1e-5)


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
        a, b = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([10.0, 20.0])
        grads = tf.math_grad._MulGrad((a * b).op, tf.ones([2, 2]))  # outside of a rule
        # summed to the shapes of the inputs, as in TensorFlow
        assert plain(session.run(grads)) == [[[10.0, 20.0], [10.0, 20.0]], [4.0, 6.0]]


NAMED = (
    "_ReluGrad _SigmoidGrad _TanhGrad _SquareGrad _MulGrad _AddGrad _SubGrad _RealDivGrad _DivGrad "
    "_ExpGrad _LogGrad _MatMulGrad _SumGrad _MeanGrad _ReshapeGrad _TransposeGrad _ConcatGradV2 "
    "_SoftmaxGrad _Conv2DGrad _MaxPoolGrad _IdentityGrad _IdGrad _IdNGrad _PadGrad _GatherV2Grad "
    "_BiasAddGrad _TopKGrad _SelectGrad _SelectGradV2 _BatchMatMulV2 _Conv3DBackpropInputGrad "
    "_SplitVGrad _PackGrad _UnpackGrad _StridedSliceGrad _SquaredDifferenceGrad _LeakyReluGrad"
)


@pytest.mark.parametrize("module", [tf.nn_grad, tf.math_grad, tf.array_grad])
def test_the_modules_are_those_of_tensorflow(module):
    for name in [*NAMED.split(), *IRREGULAR]:
        assert getattr(module, name).__name__ == name
        assert name in dir(module)
    assert not hasattr(module, "__wrapped__")
    assert importlib.import_module(module.__name__) is module


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
    rules = {"Mul": lambda dy, builtin: ours(dy, builtin(dy), k)}
    found = under(rules, rg.vjp, rg.multiply, a, b)[1](dy)
    k = k.numpy() if isinstance(k, rg.Tensor) else k
    close(found, [np.broadcast_to(each(dy, dy * other, k), 2) for other in (b, a)], 1e-7)
