"""What TensorFlow.js documents, what its own tests check, and errors and surprises of it.

The examples of its API pages; `gradients_test`, `tape_test` and `variable_test` retold; and what
was recorded of its errors and quirks, by the number of the recorded case. Where regrad answers
otherwise, the test says so (docs/tfjs_differences.md has the list).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    MissingRuleError,
    RuleError,
    ShapeError,
)
from tests.helpers.tfjs_cases import near


def square(x: Any) -> Any:
    return x.square()


def cube(x: Any) -> Any:
    return x.mul(x).mul(x)


def custom(*answer: Any) -> Any:
    return rg.custom_grad(lambda x: (x.square(), *answer))


def by_abs(x: Any, save: Any) -> Any:
    save([x])
    return {"value": x.square(), "grad_func": lambda dy, saved: [dy.mul(saved[0].abs())]}


def by_saved(x: Any, save: Any) -> Any:
    save([x])
    return {"value": x.pow(2), "grad_func": lambda dy, saved: dy.mul(saved[0])}


def scaled_power(x: Any, n: Any, save: Any) -> Any:
    return x.pow(n), lambda dy: dy * x.square() * 10


def saved_twice(x: Any, save: Any) -> Any:
    save([x])
    save([x * 2, x * 3])
    return x.square(), lambda dy, saved: dy * saved[0] * saved[1]


def saved_intermediate(x: Any, save: Any) -> Any:
    h = x.square()
    save([h])
    return h * x, lambda dy, saved: dy * saved[0] * 3


def layer(a: Any, b: Any) -> Any:
    return rg.nn.relu(rg.matmul(a, b)).sum()


def beside(x: Any) -> Any:
    rg.logical_and(x > 0, x > 1)
    return x.sum()


def masked(x: Any) -> Any:
    return rg.where(x > 0, x, rg.zeros_like(x))


def rooted(x: Any) -> Any:
    return rg.where(x >= 0, rg.sqrt(x), rg.zeros_like(x))


def with_variables() -> Any:
    a, b = rg.Variable(rg.tensor1d([3, 4]), name="a"), rg.Variable(rg.tensor1d([5, 6]), name="b")
    x = rg.tensor1d([1, 2])
    value, grads = rg.variable_grads(lambda: a.mul(x.square()).add(b.mul(x)).sum())
    assert list(grads) == ["a", "b"]
    return value, *grads.values()


def twice_in_the_list() -> Any:
    v = rg.Variable([3.0, 4.0], name="a")
    value, grads = rg.variable_grads(lambda: v.square().sum(), [v, v])
    return value, grads["a"]


def assigned() -> Any:
    v = rg.Variable(rg.tensor1d([1, 2, 3]))
    before = v.value
    v.assign(rg.tensor1d([4, 5, 6]))
    return v.value, before


def copied() -> Any:
    a = rg.Variable(rg.scalar(1.0))
    b = rg.Variable(a)
    a.assign(2.0)
    return a.value, b.value


def stepped() -> Any:
    x = rg.Variable(1.0, name="x")
    value, grads = rg.variable_grads(lambda: x.square().square())
    x.assign_sub(grads["x"] * 0.1)
    return value, grads["x"], x.value


def read() -> Any:
    v = rg.Variable(rg.tensor1d([1, 2, 3]))
    return rg.sum(v), v.sum(), rg.scalar(2) * v


def losses(x: Any) -> Any:
    return rg.losses.sigmoid_cross_entropy([0.0, 1.0, 0.0], x, reduction="sum")


grad, grads, value_and_grads = rg.grad, rg.grads, rg.value_and_grads
V1, V2, V3, FROM_1 = rg.tensor1d([1]), rg.tensor1d([2, 3]), rg.tensor1d([-1, -2, 3]), [1, 2, 3]
NEGATIVE, SMALL, INT2 = rg.tensor1d([-2, -3]), rg.tensor1d([0.1, 0.2]), rg.tensor1d([1, 2], "int32")
SQUARES, MATRIX = rg.tensor([[1, 2], [3, 4]]), rg.tensor([[1, 2, 3], [4, 5, 6]])
A, B = [[-1.0, 2.0, -3.0], [10.0, -20.0, 30.0]], [[2.0, -3.0], [4.0, -1.0], [2.0, -3.0]]
DA, DB = [[-3.0, -1.0, -3.0], [0.0, 0.0, 0.0]], [[0.0, -1.0], [0.0, 2.0], [0.0, -3.0]]
TANH2 = -2 * np.tanh([1, 2]) / np.cosh([1, 2]) ** 2
ANSWERS = {  # a call, and the values of its result or of the parts of its tuple
    "documented: grad": (lambda: grad(square)(V2), [4, 6]),
    "documented: second order": (
        lambda: grad(grad(lambda x: x.pow(rg.scalar(3, "int32"))))(V2), [12, 18]),
    "documented: grads": (lambda: grads(lambda a, b: a.mul(b))([V2, NEGATIVE]), ([-2, -3], [2, 3])),
    "documented: value_and_grad": (lambda: rg.value_and_grad(square)(V2), ([4, 9], [4, 6])),
    "documented: value_and_grads": (
        lambda: value_and_grads(lambda a, b: a.mul(b))([V2, NEGATIVE]),
        ([-4, -9], ([-2, -3], [2, 3]))),
    "documented: variable_grads": (with_variables, (36, [1, 4], [1, 2])),
    "a layer": (lambda: value_and_grads(layer)([rg.tensor(A), rg.tensor(B)]), (10, (DA, DB))),
    "reshape inside": (
        lambda: grad(lambda x: x.reshape((4,)).square().sum())(SQUARES), [[2, 4], [6, 8]]),
    "no gradient beside the path": (lambda: grad(beside)(V2), [1, 1]),
    "converted first": (lambda: grad(square)(rg.astype(INT2, rg.float32)), [2, 4]),
    "saved values survive": (stepped, (1, 4, 0.6)),
    "second order": (lambda: grad(grad(cube))(SMALL), [0.6, 1.2]),
    "second order of a square": (lambda: grad(grad(square))(rg.scalar(3)), 2),
    "grads in grads": (lambda: grads(lambda x: grads(cube)([x])[0])([SMALL]), ([0.6, 1.2],)),
    "a gradient of one's own": (
        lambda: rg.value_and_grad(custom(lambda dy: dy.mul(0.1)))(rg.scalar(3), rg.scalar(4)),
        (9, 0.4)),
    "its second order": (
        lambda: grad(grad(rg.custom_grad(by_saved)))(rg.scalar(3), rg.scalar(5)), 5),
    "assign": (assigned, ([4, 5, 6], [1, 2, 3])),
    "ops accept variables": (read, (6, 6, [2, 4, 6])),
    "a variable of a variable": (copied, (2, 1)),
    "014 value_and_grad takes lists": (lambda: rg.value_and_grad(square)([1.0])[1], [2]),
    "016 value_and_grads takes lists": (lambda: value_and_grads(square)([[1.0]])[1][0], [2]),
    "009 grad takes containers": (lambda: grad(lambda x: x["a"].square())({"a": V2})["a"], [4, 6]),
    "046 strided slices": (lambda: grad(lambda x: x[::2].square().sum())(FROM_1), [2, 0, 6]),
    "049 top_k": (lambda: grad(lambda x: rg.top_k(x, 1)[0].sum())(V2), [0, 1]),
    "050 scatter_nd": (
        lambda: grad(lambda x: rg.scatter_nd([[0], [1]], x.square(), (3,)).sum())(V2), [4, 6]),
    "057 maximum broadcasts": (lambda: grads(rg.maximum)([V2, rg.scalar(2.5)])[1], 1),
    "059 squared_difference broadcasts": (
        lambda: grads(rg.squared_difference)([V2, rg.scalar(1.5)])[1], -4),
    "061 cumulative_sum along any axis": (
        lambda: grad(lambda x: rg.cumulative_sum(x, axis=0))(MATRIX), [[2, 2, 2], [1, 1, 1]]),
    "062 prod along a negative axis": (
        lambda: grad(lambda x: rg.prod(x, axis=-1))(FROM_1), [6, 3, 2]),
    "069 second order of tanh": (lambda: grad(grad(rg.tanh))(rg.tensor1d([1, 2])), TANH2),
    "070 second order of softmax": (
        lambda: grad(grad(lambda x: rg.nn.softmax(x)[0]))(rg.tensor1d([0, 0])), [0, 0]),
    "second order of x exp(x)": (
        lambda: grad(grad(lambda x: x * rg.exp(x)))(rg.scalar(1.0)), 3 * np.e),
    "077 a saved intermediate": (
        lambda: grad(grad(rg.custom_grad(saved_intermediate)))(V3), [-6, -12, 18]),
    "079 custom_grad passes on what is no tensor": (
        lambda: grad(lambda x: rg.custom_grad(scaled_power)(x, 3))(V2), [40, 90]),
    "087 None is no gradient": (lambda: grad(custom(lambda dy: None))(V2), [0, 0]),
    "093 grad inside": (
        lambda: rg.value_and_grad(rg.custom_grad(lambda x: (grad(square)(x), lambda dy: dy)))(V2),
        ([4, 6], [1, 1])),
    "125 softmax along any axis": (lambda: rg.nn.softmax(rg.ones((2, 2)), axis=0), [[0.5] * 2] * 2),
    "129 sqrt of integers": (lambda: rg.sqrt(rg.tensor([4], dtype="int32")), [2]),
    "130 sigmoid of integers": (lambda: rg.nn.sigmoid(rg.tensor([0], dtype="int32")), [0.5]),
    "quirk 002 partial derivatives": (lambda: grads(lambda a, b: a * b)([V2, V2])[0], [2, 3]),
    "quirk 004 custom_grad returns its input": (
        lambda: grad(rg.custom_grad(lambda x: (x, lambda dy: dy * 7)))(V2), [7, 7]),
    "quirk 005 saving twice": (
        lambda: grad(rg.custom_grad(saved_twice))(rg.tensor1d([1, 2])), [6, 24]),
    "quirk 009 an input that the value does not use": (
        lambda: grads(rg.custom_grad(lambda a, b: (a + 0, lambda dy: [dy, dy * 9])))([V2, V2])[1],
        [9, 9]),
    "quirk 012 sigmoid_cross_entropy": (
        lambda: grad(grad(losses))(rg.tensor1d([0, 0, 0])), [0.25] * 3),
    "quirk 013 cumulative_sum of a square": (
        lambda: grad(lambda x: rg.cumulative_sum(x, axis=0) * rg.tensor([[1, 10], [100, 1000]]))(
            rg.ones((2, 2))), [[101, 1010], [100, 1000]]),
    "quirk 014 reflecting pad": (
        lambda: grad(lambda x: rg.pad(x, [(1, 1)], mode="reflect"))(FROM_1), [1, 3, 1]),
    "quirk 015 average pooling": (
        lambda: grad(lambda x: rg.nn.avg_pool(x, 2, 1, "same"))(rg.ones((1, 2, 2, 1))),
        np.reshape([0.25, 0.75, 0.75, 2.25], (1, 2, 2, 1))),
    "quirk 018 a list for dy": (lambda: grad(square)(V2, [10, 100]), [40, 600]),
    "quirk 022 a variable twice": (twice_in_the_list, (25, [6, 8])),
    "quirk 023 unused ops": (
        lambda: grads(lambda a, b: (a.square(), a * b)[1])([V1, V1 * 3])[0], [3]),
    "quirk 026 a branch that is not selected": (
        lambda: grad(rooted)(rg.tensor1d([4, -1, 0])), [0.25, np.nan, np.inf]),
    "where masks and does not multiply": (
        lambda: grad(masked)(rg.tensor1d([4, -1]), rg.tensor([1.0, np.nan])), [1, 0]),
    "quirk 031 integers and a float": (lambda: INT2 + 1.0, [2, 3]),
    "quirk 033 integers divide as numbers": (lambda: INT2 / INT2 * 1.5, [1.5, 1.5]),
}  # fmt: skip


def all_near(got: Any, due: Any) -> None:
    if isinstance(due, tuple):
        for part, expected in zip(got, due, strict=True):
            all_near(part, expected)
    else:
        near(got, due)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name):
    call, due = ANSWERS[name]
    with np.errstate(all="ignore"):  # (some are about infinities)
        all_near(call(), due)


def test_custom_grad_documented(capsys):
    op = rg.custom_grad(by_abs)
    op(V3).print()
    grad(op)(V3).print()
    assert capsys.readouterr().out == "Tensor\n    [1, 4, 9]\nTensor\n    [1, 2, 3]\n"


def test_one_gradient_function_serves_many_calls():
    of_one, of_many = grad(rg.custom_grad(by_abs)), grads(square)
    for x, due, doubled in [*[(V3, [1, 2, 3], [-2, -4, 6])] * 2, (V2, [2, 3], [4, 6])]:
        near(of_one(x), due)
        near(of_many([x])[0], doubled)


# -- tape_test: which rules run, and what they see -----------------------------------------------


class Nodes:
    """Ops that add 1 to the gradient, and a list of those whose rule ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(self, name: str, *xs: Any) -> Any:
        def rule(dy: Any) -> Any:
            self.ran.append(name)
            return [dy + 1 for _ in xs]

        return rg.custom_grad(lambda *xs, save: (rg.add_n(list(xs)), rule))(*xs)


TAPES = {  # a function of nodes and inputs, the gradients by them, and the rules that run
    "one": (lambda node, x: node("0", x), [2], "0"),
    "a chain": (lambda node, x: node("1", node("0", x)), [3], "1 0"),
    "both inputs": (lambda node, a, b: node("0", a, b), [2, 2], "0"),
    "three inputs": (lambda node, a, b, c: node("1", c, node("0", a, b)), [3, 3, 2], "1 0"),
    "an orphan": (lambda node, x: (node("orphan", x), node("1", x))[1], [2], "1"),
    "paths that meet": (lambda node, x: node("y", node("m1", x), node("m2", x)), [6], "y m2 m1"),
}


@pytest.mark.parametrize("name", TAPES)
def test_nodes_on_the_path_run(name):
    (f, due, ran), node = TAPES[name], Nodes()
    found = grads(lambda *xs: f(node, *xs))([1.0, 2.0, 3.0][: len(due)])
    assert [g.item() for g in found] == due
    assert node.ran == ran.split()


def test_only_what_is_wanted_runs():
    """TF.js filters its tape; regrad does not even run the rule of an unwanted input."""
    ran = []

    @rg.op("DocumentedProduct")
    def product(xp: Any, a: rg.Tensor, b: rg.Tensor, /) -> rg.Tensor:
        return a * b

    rg.gradient("DocumentedProduct", "a")(lambda dy, b: (ran.append("a"), dy * b)[1])
    rg.gradient("DocumentedProduct", "b")(lambda dy, a: (ran.append("b"), dy * a)[1])
    near(rg.grad(lambda a: product(a, rg.scalar(3.0)))(rg.scalar(2.0)), 3)
    assert ran == ["a"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_several_outputs_of_which_one_is_used(place):
    seen: list[Any] = []

    def rule(dys: Any) -> Any:
        seen.append([dy.item() for dy in dys])
        return rg.stack(list(dys))

    three = rg.custom_grad(lambda x: (tuple(rg.unstack(x)), rule))
    dx = rg.grad(lambda x: three(x)[place])(rg.tensor1d(FROM_1), rg.scalar(5))
    due = [5.0 if i == place else 0.0 for i in range(3)]
    assert seen == [due]
    near(dx, due)


def test_names():
    a, b = rg.Variable(1.0), rg.Variable(2.0)
    assert "" != a.name != b.name != ""
    assert rg.Variable(1.0, name="given").name == "given"
    assert rg.Variable(1.0, trainable=False).trainable is False
    assert not isinstance(a.value, rg.Variable)


# -- errors --------------------------------------------------------------------------------------


@rg.op("DocumentedWithoutRule")
def without_rule(xp: Any, x: rg.Tensor, /) -> rg.Tensor:
    return x + 1


def raises(x: Any) -> Any:
    raise ZeroDivisionError("boom")


def assigned_to(value: Any) -> Any:
    return lambda: rg.Variable(rg.tensor1d([1, 2, 3])).assign(value)


FROZEN, PAIR = rg.Variable(2.0, trainable=False), rg.Variable([1.0, 2.0])
INTEGERS, ONES = rg.tensor([[1, 2], [3, 4]], dtype="int32"), rg.ones((2, 3))
NUMBERS, CASTS = rg.tensor1d([1, 2, 3]), (lambda dy: rg.astype(dy, rg.int32))
ERRORS = {  # by the case in oracle order: a call, our error, its words
    "001": (lambda: grad(3), ArgumentError, r"f passed in grad\(f\) must be a function"),
    "002": (lambda: grads(None), ArgumentError, r"f passed in grads\(f\) must be a function"),
    "003": (lambda: rg.value_and_grad("a"), ArgumentError, "must be a function"),
    "004": (lambda: value_and_grads({}), ArgumentError, "must be a function"),
    "005": (lambda: rg.variable_grads(5), ArgumentError, "must be a function"),
    "006": (lambda: rg.custom_grad(3), ArgumentError, "must be a function"),
    "011": (lambda: grads(square)(V1), ArgumentError, "args must be a list"),
    "017": (lambda: value_and_grads(square)(V1), ArgumentError, "args must be a list"),
    "020": (lambda: grad(square)(V2, [1, 2, 3]), ShapeError, r"dy must.*\(2,\), got \(3,\)"),
    "024": (lambda: grad(square)(V2, INT2), DTypeError, "dy must be of floats"),
    "026": (lambda: rg.value_and_grad(square)(V2, INT2), DTypeError, "dy must be of floats"),
    "027": (lambda: grad(lambda x: 3)(V1), ArgumentError, "must return a Tensor, got int"),
    "028": (lambda: grad(lambda x: None)(V1), ArgumentError, "return statement"),
    "029": (lambda: grad(lambda x: [x.square()])(V1), ArgumentError, "got list"),
    "034": (lambda: value_and_grads(lambda a, b: a.square())([V1, V2]),
            GradientError, r"by args\[1\]: no path"),
    "035": (lambda: grads(lambda a, b: rg.scalar(3))([V1, V2]), GradientError, "no path"),
    "040": (lambda: grad(lambda x: x.greater(0))(V1), GradientError, "returned bool"),
    "041": (lambda: grad(lambda x: x < 0)(V1), GradientError, "returned bool"),
    "042": (lambda: grad(lambda x: x == 0)(V1), GradientError, "returned bool"),
    "043": (lambda: grad(lambda x: x != 0)(V1), GradientError, "returned bool"),
    "044": (lambda: grad(lambda x: x <= 0)(V1), GradientError, "returned bool"),
    "081": (lambda: custom(3)(V1), ArgumentError, "its grad_func is int"),
    "082": (lambda: custom()(V1), ArgumentError, "must return"),
    "089": (lambda: grad(custom(CASTS))(V1), RuleError, "dtype int32, expected float32"),
    "096": (lambda: rg.variable_grads(lambda: FROZEN.square(), [FROZEN]),
            GradientError, "none of the 1"),
    "101": (lambda: rg.variable_grads(lambda: PAIR.square()), ShapeError, "scalar.*rank 1"),
    "105": (lambda: rg.variable_grads(lambda: rg.scalar(1.0), [PAIR]), GradientError, "no path"),
    "107": (lambda: rg.variable_grads(lambda: PAIR.sum() > 1), GradientError, "returned bool"),
    "113": (lambda: rg.tensor([1, 2, 3], [2, 2]), ShapeError, "4 values, but 3"),
    "114": (lambda: rg.tensor([[1, 2], [3, 4]], [4, 1]), ShapeError, r"\(2, 2\).*\(4, 1\)"),
    "116": (lambda: rg.scalar([1]), ArgumentError, "a single number or bool"),
    "122": (lambda: rg.matmul(ONES, ONES), Exception, "MatMul|matmul"),
    "123": (lambda: rg.reshape(V2, [3]), ShapeError, "2 elements"),
    "127": (lambda: rg.concat([ONES, rg.ones((3, 2))], axis=0), ShapeError, "concat"),
    "134": (
        lambda: rg.losses.mean_squared_error(V1, V2, None, "none"), ShapeError,
        "mean_squared_error"),
    "quirk 041": (lambda: rg.tensor([[1, 2], [3]]), ShapeError, "unequal rows"),
    "raised in the forward pass": (lambda: grad(raises)(V1), ZeroDivisionError, "boom"),
    "raised in the backward pass": (lambda: grad(custom(raises))(V1), ZeroDivisionError, "boom"),
    "reshape outside": (lambda: grads(lambda a, b: b.sum())([SQUARES, SQUARES.reshape((4,))]),
                        GradientError, r"by args\[0\]"),
    "no gradient on the path": (lambda: grad(lambda x: rg.logical_and(x > 0, x > 1))(V1),
                                GradientError, "bool"),
    "a cast of integers inside": (lambda: grad(lambda x: rg.astype(x, rg.float32).sum())(INTEGERS),
                                  GradientError, "Convert it first"),
    "a cast outside": (lambda: grad(lambda x: rg.astype(V2, rg.float64).sum())(V2),
                       GradientError, "no path"),
    "a node of another tensor": (lambda: grad(lambda x: Nodes()("1", rg.scalar(2.0)))(V1),
                                 GradientError, "no path"),
    "no rule": (lambda: grad(without_rule)(V1), MissingRuleError, "DocumentedWithoutRule"),
    "assign: short": (assigned_to(V2), ShapeError, "assign to the variable"),
    "assign: a row": (
        assigned_to(rg.tensor([[1.0, 2.0, 3.0]])), ShapeError, "assign to the variable"),
    "assign: int32": (assigned_to(NUMBERS.astype("int32")), DTypeError, "assign to the variable"),
    "assign: bools": (
        assigned_to(rg.tensor([True, False, True])), DTypeError, "assign to the variable"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_leave_the_tape_off(name):
    call, error, words = ERRORS[name]
    with pytest.raises(error, match=words):
        call()
    assert current() is None
