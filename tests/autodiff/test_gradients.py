"""grad, grads, value_and_grad(s): forms of arguments, nesting, errors that leave nothing open."""

import numpy as np
import pytest

import regrad as rg
from regrad.core.state import LIVE, current
from regrad.errors import ArgumentError, DTypeError, GradientError, ShapeError


def cube(x):
    return x * x * x


def test_value_is_not_changed_by_asking_for_a_gradient():
    x = rg.tensor([1.0, 2.0])
    value, dx = rg.value_and_grad(cube)(x)
    assert value.tolist() == cube(x).tolist() == [1.0, 8.0]
    assert dx.tolist() == [3.0, 12.0]


@pytest.mark.parametrize(
    "x", [[2.0, 3.0], np.array([2.0, 3.0], "f4"), rg.tensor([2.0, 3.0]), rg.Variable([2.0, 3.0])]
)
def test_inputs_of_every_kind(x):
    assert rg.grad(lambda x: (x * x).sum())(x).tolist() == [4.0, 6.0]


def test_a_number_and_float64():
    assert rg.grad(cube)(2.0).item() == 12.0
    dx = rg.grad(cube)(np.array([2.0]))
    assert dx.dtype == np.float64


def test_containers_in_and_out():
    def f(p):
        return (p["w"] * p["layers"][0]).sum() + p["b"] * 2

    dx = rg.grad(f)({"w": [1.0, 2.0], "layers": (rg.tensor([3.0, 4.0]),), "b": 1.0})
    assert dx["w"].tolist() == [3.0, 4.0]
    assert isinstance(dx["layers"], tuple)
    assert dx["layers"][0].tolist() == [1.0, 2.0]
    assert dx["b"].item() == 2.0


def test_grads_of_one_tensor_twice_are_partial():
    x = rg.tensor([2.0, 3.0])
    da, db = rg.grads(lambda a, b: a * b * b)([x, x])
    assert da.tolist() == [4.0, 9.0]
    assert db.tolist() == [8.0, 18.0]


def test_grads_with_containers_among_the_arguments():
    da, db = rg.grads(lambda a, b: a["x"] * b)([{"x": rg.scalar(2.0)}, 3.0])
    assert (da["x"].item(), db.item()) == (3.0, 2.0)


def test_dy_weighs():
    dx = rg.grad(lambda x: x * x)(rg.tensor([1.0, 2.0]), [10.0, 100.0])
    assert dx.tolist() == [20.0, 400.0]


def test_third_order():
    g = cube
    for due in (12.0, 12.0, 6.0):
        g = rg.grad(g)
        assert g(2.0).item() == due


def test_inner_derivatives_treat_outer_tensors_as_constants():
    # d/dx (x * d/dy (x + y)) = 1: perturbation confusion would give 2
    f = rg.grad(lambda x: x * rg.grad(lambda y: x + y)(rg.scalar(1.0)))
    assert f(3.0).item() == 1.0
    # the inner gradient is by its own alias, not by what hangs on the same tensor
    inner = []

    def g(x):
        h = x * x
        inner.append(rg.grad(lambda z: h * z)(x).item())
        return h

    rg.grad(g)(3.0)
    assert inner == [9.0]


def test_the_gradient_of_the_identity_is_one():
    assert rg.grad(lambda x: x)(2.0).item() == 1.0


def test_unconnected():
    f = lambda a, b: a * 1.0  # noqa: E731
    with pytest.raises(GradientError, match=r"by args\[1\]: no path"):
        rg.grads(f)([1.0, 2.0])
    assert rg.grads(f, unconnected="zero")([1.0, 2.0])[1].item() == 0.0
    assert rg.grads(f, unconnected="none")([1.0, 2.0])[1] is None


def test_no_path_names_the_leaf():
    with pytest.raises(GradientError, match=r"x\['b'\]"):
        rg.grad(lambda p: p["a"] * 1.0)({"a": 1.0, "b": 2.0})


def test_a_rule_that_answers_none_is_zero():
    assert rg.grad(lambda x: rg.round(x * x) + 0.0)(1.5).item() == 0.0
    assert rg.grad(lambda x: rg.round(x) + x)(1.5).item() == 1.0


@pytest.mark.parametrize("x", [rg.asarray([1, 2]), np.array([True]), rg.tensor([1], dtype="int32")])
def test_integers_have_no_gradient(x):
    with pytest.raises(GradientError, match="only floats"):
        rg.grad(lambda x: x * 1.0)(x)


def test_results_that_have_no_gradient():
    with pytest.raises(ArgumentError, match=r"must return a Tensor.*return statement"):
        rg.grad(lambda x: None)(1.0)
    with pytest.raises(ArgumentError, match=r"must return a Tensor, got list"):
        rg.grad(lambda x: [x])(1.0)
    with pytest.raises(GradientError, match="f returned bool"):
        rg.grad(lambda x: x > 0)(1.0)


def test_dy_is_checked():
    g = rg.grad(lambda x: x * x)
    with pytest.raises(ShapeError, match=r"dy must have the shape of f\(x\), \(2,\), got \(3,\)"):
        g([1.0, 2.0], [1.0, 2.0, 3.0])
    with pytest.raises(ShapeError, match="broadcast_to"):
        g([1.0, 2.0], 1.0)
    with pytest.raises(DTypeError, match="dy must be of floats"):
        g([1.0, 2.0], rg.asarray([1, 2]))


@pytest.mark.parametrize("api", ["grad", "grads", "value_and_grad", "value_and_grads"])
def test_f_must_be_callable(api):
    with pytest.raises(ArgumentError, match=rf"passed in {api}\(f\) must be a function, got int"):
        getattr(rg, api)(3)


def test_args_must_be_a_list():
    with pytest.raises(ArgumentError, match="args must be a list"):
        rg.grads(lambda x: x)(rg.tensor([1.0]))
    with pytest.raises(ArgumentError, match="args is empty"):
        rg.grads(lambda: 1)([])


def test_what_is_no_tensor_is_refused():
    with pytest.raises(ArgumentError, match="differentiates by Tensors"):
        rg.grad(lambda x: x)({"a": "text"})


def test_exceptions_leave_no_tape_open():
    def bad(x):
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        rg.grad(bad)(1.0)
    assert current() is None
    assert rg.grad(cube)(2.0).item() == 12.0
    del bad


def test_exceptions_in_a_rule_leave_no_tape_open():
    def rule(dy):
        raise RuntimeError("in the rule")

    with rg.gradient_override_map({"Sign": rule}), pytest.raises(RuntimeError, match="in the rule"):
        rg.grad(rg.sign)(1.0)
    assert current() is None


def test_nothing_stays_live():
    import gc

    gc.collect()
    before = len(LIVE)
    for _ in range(10):
        rg.grad(rg.grad(cube))(2.0)
    assert len(LIVE) == before


def test_numpy_is_refused_while_differentiated():
    for leave in (lambda x: x.numpy(), np.asarray, lambda x: x.data):
        with pytest.raises(GradientError, match="stop_gradient"):
            rg.grad(lambda x, leave=leave: x * leave(x))(2.0)
    seen = []
    rg.grad(lambda x: (seen.append((float(x), x.item(), bool(x))), x * x)[1])(2.0)
    assert seen == [(2.0, 2.0, True)]
    assert rg.grad(lambda x: x * rg.stop_gradient(x).numpy())(2.0).item() == 2.0


def test_python_control_flow():
    f = lambda x: x * x if x > 1 else -x  # noqa: E731
    assert rg.grad(f)(2.0).item() == 4.0
    assert rg.grad(f)(0.5).item() == -1.0


def test_deep_chains_do_not_recurse():
    def f(x):
        for _ in range(20_000):
            x = x + 1.0
        return x

    assert rg.grad(f)(1.0).item() == 1.0


def test_mixed_dtypes_give_each_input_its_own():
    a, b = rg.tensor([1.0, 2.0]), rg.asarray(np.array([3.0, 4.0]))
    y = a * b
    assert y.dtype == np.float64
    da, db = rg.grads(lambda a, b: a * b)([a, b])
    assert (da.dtype, db.dtype) == (np.float32, np.float64)
    assert da.tolist() == [3.0, 4.0]
    dda = rg.grad(lambda a: rg.grad(lambda b: (a * b * b).sum())(b).sum())(a)
    assert dda.dtype == np.float32
    assert dda.tolist() == [6.0, 8.0]


def test_stop_gradient_surrogate():
    # y = g(x) + stop_gradient(f(x) - g(x)) has the value of f and the gradient of g
    def surrogate(x):
        g = rg.tanh(x)
        return g + rg.stop_gradient(rg.sign(x) - g)

    x = rg.tensor([0.5, -2.0])
    value, dx = rg.value_and_grad(surrogate)(x)
    np.testing.assert_allclose(value.numpy(), [1.0, -1.0], rtol=1e-6)
    np.testing.assert_allclose(dx.numpy(), 1 - np.tanh([0.5, -2.0]) ** 2, rtol=1e-6)


def test_a_list_of_tensors_names_stack():
    with pytest.raises(ArgumentError, match=r"join them with stack"):
        rg.grad(lambda x: rg.tensor([x, x * 2]))(1.0)
