"""`compare_gradients` for functions of regrad."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError
from tests.helpers.marks import marked_lines

LINES = marked_lines(__file__)
X = rg.tensor([0.5, -1.0, 2.0])


@rg.custom_grad
def cube(x, save):
    save([x])
    return x * x * x, lambda dy, saved: 2 * dy * saved[0] * saved[0]


@rg.custom_grad
def pair(xs, save):
    a, b = xs["a"], xs["b"]
    return {"sum": a + b, "product": a * b}, lambda dy: [{"a": dy["sum"], "b": None}]


def rows_by_op(comparison):
    return {row.op_type: row for row in comparison.rows if row.kind == "op"}


def test_rules_are_compared_in_place():
    def f(x):
        return rg.sum(cube(rg.sign(x)) * x)  # here: both

    with rg.gradient_override_map({"Sign": lambda dy: dy}) as used:
        found = rg.compare_gradients(f)(X)
    used.assert_fired()
    rows = rows_by_op(found)
    assert rows["cube"].ratio == pytest.approx(2 / 3) and rows["cube"].cosine == pytest.approx(1)
    assert rows["Sign"].other_zeros == 1 and rows["Sign"].zeros == 0
    assert {row.line for row in rows.values()} == {LINES["both"]}
    assert rows["cube"].rule.startswith("cube, ") and found.names == ("given", "true")
    assert not found.ok and len(found.undeclared) == 3


def test_declared_surrogates_are_passed_over():
    with rg.gradient_override_map({"Sign": lambda dy: dy}):
        found = rg.compare_gradients(lambda x: rg.sum(rg.sign(x) * x), surrogates=["Sign"])(X)
        found.assert_same()
        with pytest.raises(GradientError, match="Sign"):
            rg.compare_gradients(lambda x: rg.sum(rg.sign(x) * x))(X).assert_same()


def test_all_is_the_same_without_rules():
    found = rg.compare_gradients(lambda x: rg.sum(rg.sin(x) * rg.nn.relu(x)), rtol=1e-6)(X)
    assert found.ok and [row.name for row in found.rows] == ["args[0]"]


def test_scopes_inside_and_custom_functions_inside_of_others_are_off_too():
    @rg.custom_grad
    def outer(x, save):
        with rg.gradient_override_map({"Exp": lambda dy: 5 * dy}):
            return cube(x) + rg.exp(x), lambda dy: 7 * dy

    found = rg.compare_gradients(lambda x: rg.sum(outer(x)))(X)
    x = X.numpy().astype(float)
    true = 3 * x**2 + np.exp(x)
    assert found.rows[0].ratio == pytest.approx(
        np.linalg.norm(np.full(3, 7.0)) / np.linalg.norm(true), rel=1e-5
    )


def test_containers_and_gradients_that_are_missing():
    def f(xs):
        y = pair(xs)
        return rg.sum(y["sum"] * y["product"])

    found = rg.compare_gradients(f)({"a": X, "b": 2 * X})
    names = {row.name: row.missing for row in found.rows}
    assert names["args[0]['b']"] == "first" and names["args[0]['a']"] == ""


@pytest.mark.parametrize("wrap", [rg.jit, rg.checkpoint], ids=["jit", "checkpoint"])
def test_what_runs_as_one_is_opened(wrap):
    found = rg.compare_gradients(wrap(lambda x: rg.sum(cube(x))))(X)
    assert rows_by_op(found)["cube"].ratio == pytest.approx(2 / 3)


def test_variables_have_rows():
    w = rg.Variable([1.0, 2.0, 3.0], name="weight")
    with rg.gradient_override_map({"Tanh": lambda dy: dy}):
        found = rg.compare_gradients(lambda x: rg.sum(rg.tanh(w * x)))(X)
    kinds = {row.name: row.kind for row in found.rows}
    assert kinds["weight"] == "parameter" and kinds["args[0]"] == "argument"
    assert all(row.differs() for row in found.rows)


def test_another_function():
    w = rg.Variable([1.0, 2.0, 3.0], name="weight")
    found = rg.compare_gradients(lambda x: rg.sum(w * x * x), lambda x: -rg.sum(w * x * x))(X)
    assert [row.name for row in found.rows] == ["args[0]", "weight"]
    assert [row.cosine for row in found.rows] == pytest.approx([-1, -1])
    without = rg.compare_gradients(lambda x: rg.sum(w * x), lambda x: rg.sum(x))(X)
    assert without.rows[1].missing == "second"


def test_differences():
    f = lambda x, z: rg.sum(rg.sin(x) * rg.cos(x)) + rg.real(rg.sum(z * z))  # noqa: E731
    found = rg.compare_gradients(f, "differences", rtol=1e-5)(X, rg.tensor([1 + 2j]))
    assert found.ok and len(found) == 2 and found.names == ("given", "differences")
    wrong = rg.compare_gradients(lambda x: rg.sum(cube(x)), "differences")(X)
    assert wrong.rows[0].ratio == pytest.approx(2 / 3, rel=1e-5)


def test_complex_rules():
    with rg.gradient_override_map({"Exp": lambda dy, y: dy * y}):  # without the conjugate
        found = rg.compare_gradients(lambda z: rg.real(rg.sum(rg.exp(z))))(rg.tensor([1 + 2j]))
    assert rows_by_op(found)["Exp"].ratio == pytest.approx(1)
    assert rows_by_op(found)["Exp"].cosine == pytest.approx(np.cos(4), rel=1e-5)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ArgumentError, match="other is a function"):
        rg.compare_gradients(rg.sin, "numerical")
    with pytest.raises(GradientError, match="int32"):
        rg.compare_gradients(lambda x: x)(rg.tensor([1, 2], dtype="int32"))
