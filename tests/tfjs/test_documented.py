"""What TensorFlow.js documents, what its own tests check, and errors and surprises of it.

The examples of its API pages; `gradients_test`, `tape_test` and `variable_test` retold; and what
was recorded of its errors and quirks, by the number of the recorded case. Where regrad answers
otherwise, the test says so (docs/tfjs_differences.md has the list). What tests/autodiff and the
samples of ops cover, too, is not repeated here.
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


def masked(x: Any) -> Any:
    return rg.where(x > 0, x, rg.zeros_like(x))


def rooted(x: Any) -> Any:
    return rg.where(x >= 0, rg.sqrt(x), rg.zeros_like(x))


def twice_in_the_list() -> Any:
    v = rg.Variable([3.0, 4.0], name="a")
    value, grads = rg.variable_grads(lambda: v.square().sum(), [v, v])
    return value, grads["a"]


def copied() -> Any:
    a = rg.Variable(rg.scalar(1.0))
    b = rg.Variable(a)
    a.assign(2.0)
    return a.value, b.value


grad, grads, value_and_grads = rg.grad, rg.grads, rg.value_and_grads
V1, V2, V3 = rg.tensor1d([1]), rg.tensor1d([2, 3]), rg.tensor1d([-1, -2, 3])
NEGATIVE, SMALL, INT2 = rg.tensor1d([-2, -3]), rg.tensor1d([0.1, 0.2]), rg.tensor1d([1, 2], "int32")
SQUARES = rg.tensor([[1, 2], [3, 4]])
ANSWERS = {  # a call, and the values of its result or of the parts of its tuple
    "documented: second order": (
        lambda: grad(grad(lambda x: x.pow(rg.scalar(3, "int32"))))(V2), [12, 18]),
    "documented: value_and_grads": (
        lambda: value_and_grads(lambda a, b: a.mul(b))([V2, NEGATIVE]),
        ([-4, -9], ([-2, -3], [2, 3]))),
    "reshape inside": (
        lambda: grad(lambda x: x.reshape((4,)).square().sum())(SQUARES), [[2, 4], [6, 8]]),
    "grads in grads": (lambda: grads(lambda x: grads(cube)([x])[0])([SMALL]), ([0.6, 1.2],)),
    "its second order": (
        lambda: grad(grad(rg.custom_grad(by_saved)))(rg.scalar(3), rg.scalar(5)), 5),
    "a variable of a variable": (copied, (2, 1)),
    "077 a saved intermediate": (
        lambda: grad(grad(rg.custom_grad(saved_intermediate)))(V3), [-6, -12, 18]),
    "079 custom_grad passes on what is no tensor": (
        lambda: grad(lambda x: rg.custom_grad(scaled_power)(x, 3))(V2), [40, 90]),
    "093 grad inside": (
        lambda: rg.value_and_grad(rg.custom_grad(lambda x: (grad(square)(x), lambda dy: dy)))(V2),
        ([4, 6], [1, 1])),
    "129 sqrt of integers": (lambda: rg.sqrt(rg.tensor([4], dtype="int32")), [2]),
    "130 sigmoid of integers": (lambda: rg.nn.sigmoid(rg.tensor([0], dtype="int32")), [0.5]),
    "quirk 005 saving twice": (
        lambda: grad(rg.custom_grad(saved_twice))(rg.tensor1d([1, 2])), [6, 24]),
    "quirk 009 an input that the value does not use": (
        lambda: grads(rg.custom_grad(lambda a, b: (a + 0, lambda dy: [dy, dy * 9])))([V2, V2])[1],
        [9, 9]),
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
    dx = rg.grad(lambda x: three(x)[place])(rg.tensor1d([1, 2, 3]), rg.scalar(5))
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


INTEGERS, ONES = rg.tensor([[1, 2], [3, 4]], dtype="int32"), rg.ones((2, 3))
ERRORS = {  # by the case in oracle order: a call, our error, its words
    "113": (lambda: rg.tensor([1, 2, 3], [2, 2]), ShapeError, "4 values, got 3"),
    "114": (lambda: rg.tensor([[1, 2], [3, 4]], [4, 1]), ShapeError, r"\(2, 2\).*\(4, 1\)"),
    "116": (lambda: rg.scalar([1]), ArgumentError, "a single number or bool"),
    "122": (lambda: rg.matmul(ONES, ONES), Exception, "MatMul|matmul"),
    "123": (lambda: rg.reshape(V2, [3]), ShapeError, "2 elements"),
    "127": (lambda: rg.concat([ONES, rg.ones((3, 2))], axis=0), ShapeError, "concat"),
    "134": (
        lambda: rg.losses.mean_squared_error(V1, V2, None, "none"), ShapeError,
        "mean_squared_error"),
    "quirk 041": (lambda: rg.tensor([[1, 2], [3]]), ShapeError, "unequal rows"),
    "no gradient on the path": (lambda: grad(lambda x: rg.logical_and(x > 0, x > 1))(V1),
                                GradientError, "bool"),
    "a cast of integers inside": (lambda: grad(lambda x: rg.astype(x, rg.float32).sum())(INTEGERS),
                                  GradientError, "Convert it first"),
    "assign: bools": (
        lambda: rg.Variable([1.0]).assign(rg.tensor([True])), DTypeError, "assign to the variable"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_leave_the_tape_off(name):
    call, error, words = ERRORS[name]
    with pytest.raises(error, match=words):
        call()
    assert current() is None
