"""Ways in which a rule could be skipped, or a gradient be wrong, without a word. None may."""

import os
import subprocess
import sys

import numpy as np
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import ArgumentError, GradientError, RuleError
from tests.helpers.paths import ROOT


def test_a_broadcasting_op_does_not_sum_what_it_never_spread():
    with (
        rg.gradient_override_map({"Mul": lambda dy: [rg.ones((7, 2))] * 2}),
        pytest.raises(RuleError, match=r"shape \(7, 2\), expected \(2,\)"),
    ):
        rg.grad(lambda b: (b * b).sum())(rg.ones((2,)))
    with (
        rg.gradient_override_map({"AddV2": lambda dy: [rg.ones((3, 4))] * 2}),
        pytest.raises(RuleError, match=r"shape \(3, 4\), expected \(\)"),
    ):
        rg.grad(lambda x: x + 1.0)(2.0)


def nested_custom(w):
    inner = rg.custom_grad(lambda b: (b * w, lambda dy: dy))
    outer = rg.custom_grad(lambda a: (inner(a), lambda dy: dy))
    return outer(w * 1.0)


def test_closures_are_found_in_nested_custom_functions():
    with pytest.raises(GradientError, match="closes over"):
        rg.grad(nested_custom)(3.0)
    with pytest.raises(GradientError, match="closes over"):
        rg.grad(lambda z: z * rg.grad(nested_custom)(rg.scalar(3.0)))(1.0)


def test_a_closed_over_tensor_that_is_returned_is_found():
    f = lambda w: rg.custom_grad(lambda a: (w, lambda dy: dy))(rg.scalar(1.0)) + w * 0  # noqa: E731
    with pytest.raises(GradientError, match="closes over 'w'"):
        rg.grad(f)(2.0)


def test_one_tensor_returned_twice_is_two_outputs():
    def f(x):
        y = x * 2
        return (y, y), lambda dy: dy[0] * 10 + dy[1]

    op = rg.custom_grad(f)
    assert rg.grad(lambda x: (lambda t: 3 * t[0] + 5 * t[1])(op(x)))(1.0).item() == 35.0


def test_attributes_do_not_change_after_the_op():
    axis = [0]

    def f(x):
        y = rg.sum(x, axis=axis)
        axis[0] = 1
        return (y * rg.tensor([1.0, 2.0])).sum()

    dx = rg.grad(f)([[1.0, 2.0], [3.0, 4.0]])
    assert dx.tolist() == [[1.0, 2.0], [1.0, 2.0]]


def test_arrays_may_be_overwritten_after_they_were_used():
    a, kept = np.array([1.0, 2.0]), []

    def f(x):
        y = x * a
        a[:] = 100.0
        return y

    assert rg.grad(f)(np.array([5.0, 5.0])).tolist() == [1.0, 2.0]

    @rg.custom_grad
    def g(x, save):
        buffer, saved = np.array([3.0]), [x]
        kept.append(buffer)
        save([buffer, *saved])
        buffer[0] = 7.0
        return x * 1.0, lambda dy, saved: dy * saved[0]

    assert rg.grad(g)(np.array([1.0])).tolist() == [3.0]
    t = rg.asarray(np.array([1.0]))
    for view in (t.data, t.numpy(), np.asarray(t)):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 2.0


def test_a_default_of_grad_func_is_not_what_was_saved():
    f = rg.custom_grad(lambda a: (a * 1, lambda dy, flip=True: -dy if flip else dy))
    assert rg.grad(f)(3.0).item() == -1.0


def test_structured_answers_of_grad_func():
    f = rg.custom_grad(lambda p: (p["w"] * 2, lambda dy: {"w": dy * 5}))
    assert rg.grad(f)({"w": 1.0})["w"].item() == 5.0
    g = rg.custom_grad(lambda a, b: (a[0] * b[0], lambda dy: [[dy * 2], [dy * 3]]))
    da, db = rg.grads(g)([(rg.scalar(1.0),), (rg.scalar(1.0),)])
    assert (da[0].item(), db[0].item()) == (2.0, 3.0)


def test_containers_without_tensors_are_handed_on_as_they_are():
    log = ["a"]
    rg.custom_grad(lambda x, log: (log.append(1) or x * 1, lambda dy: dy))(rg.scalar(1.0), log)
    assert log == ["a", 1]


def test_rules_in_force_on_integer_outputs():
    def f(x):
        a, b = rg.unstack(rg.astype(x, rg.int32))
        return a * 2.0 + b * 3.0

    with rg.gradient_override_map({"Cast": lambda dy: dy}) as used:
        assert rg.grad(f)([1.0, 2.0]).tolist() == [2.0, 3.0]
    used.assert_fired()


NOT_LINEAR = [
    lambda dy: dy if dy.sum().item() < 1 else dy * 0.1,
    lambda dy: rg.tensor(dy.tolist()),
    lambda dy: rg.remainder(dy, 2.0),
    lambda dy: rg.astype(rg.astype(dy, rg.int32), rg.float32),
]


@pytest.mark.parametrize("rule", NOT_LINEAR)
def test_forward_mode_refuses(rule):
    f = rg.custom_grad(lambda x: (x * 1, rule))
    with pytest.raises(GradientError, match="forward mode"):
        rg.jvp(f, [[1.0, 2.0]], [[3.0, 4.0]])


# -- scopes ------------------------------------------------------------------------------------


def held(rules):
    with rg.gradient_override_map(rules):
        yield


def test_scopes_left_out_of_turn_are_an_error():
    a, b = held({"Sign": "Identity"}), held({"Relu": "Identity"})
    next(a), next(b)
    with pytest.raises(ArgumentError, match="left out of turn"):
        next(a)
    with pytest.warns(UserWarning, match="matched nothing"):
        next(b, None)
    assert current() is None
    assert rg.grad(rg.sign)(1.0).item() == 0.0


def test_hits_name_the_line_of_ops_with_attributes():
    with rg.gradient_override_map({"Sum": "Identity"}) as used:
        rg.sum(rg.ones((2,)))
        rg.ones((2,)).sum()
    lines = [int(hit.where.rsplit(":", 1)[1]) for hit in used.hits]
    assert all("test_promises.py" in hit.where for hit in used.hits)
    assert lines[1] == lines[0] + 1


def test_the_librarys_own_plumbing_is_masked():
    f = lambda x: x * x * x  # noqa: E731
    wrong = {
        "Reshape": rg.rules.optional(lambda dy, x_shape: rg.reshape(dy, x_shape) * 10),
        "Pack": rg.rules.optional(lambda op, dy: None),
    }
    with rg.gradient_override_map({**wrong, "Mul": "Mul"}) as used:
        assert rg.jacobian(rg.jacobian(f))(2.0).item() == 12.0
    assert {hit.op_type for hit in used.hits} == {"Mul"}


def test_two_keys_for_one_op_type():
    with pytest.raises(ArgumentError, match="name one op type"):  # noqa: SIM117
        with rg.gradient_override_map({"Add": "AddV2", "AddV2": "Sub"}):
            pass
    assert current() is None
    with rg.gradient_override_map({"Add": "Sub", "AddV2": "Sub"}) as used:  # for any TensorFlow
        rg.add(1.0, 2.0)
    assert [hit.op_type for hit in used.hits] == ["AddV2"]


@pytest.mark.parametrize(
    ("rule", "due"),
    [
        (lambda dy, k=3.0: dy * k, 3.0),
        (lambda dy, *, x: dy * x, 0.5),
        (lambda dy, k=3.0, *, y: dy * k * y, 3.0),
    ],
)
def test_rules_with_defaults_and_keywords(rule, due):
    with rg.gradient_override_map({"Sign": rule}):
        assert rg.grad(rg.sign)(0.5).item() == due


def test_a_rule_with_its_parameters_swapped_is_refused():
    with pytest.raises(RuleError, match="first parameter is dy"):  # noqa: SIM117
        with rg.gradient_override_map({"Sign": lambda x, dy: dy}):
            pass


# -- variables, names ------------------------------------------------------------------------------


def test_a_variable_compares_by_value_with_what_is_no_variable():
    v = rg.Variable([0.0, 1.0])
    assert (v == 0).tolist() == [True, False]
    assert (v != rg.tensor([0.0, 1.0])).tolist() == [False, False]
    assert v in [rg.Variable(1.0), v]


def test_foreign_names_get_a_hint():
    with pytest.raises(AttributeError, match=r"Use regrad\.value_and_grad"):
        rg.valueAndGrad  # noqa: B018
    with pytest.raises(ArgumentError, match="dtype='int32'"):
        rg.tensor([1, 2], "int32")


def test_a_kernel_that_returns_a_number():
    @rg.op("TestsNumber")
    def number(xp, x: rg.Tensor, /) -> rg.Tensor:
        return 1.0

    with pytest.raises(ArgumentError, match="must return arrays"):
        number(rg.scalar(2.0))


@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_no_promise_is_kept_by_an_assertion(flag):
    """Python leaves assertions out with -O, and docstrings with -OO."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, flag, "-m", "tests.helpers.optimized_program"], capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["all hold"], done.stderr
