"""check_gradients must find what is wrong, say which op and input it is, and leave the rest be."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

import regrad as rg
from regrad.checking.check import Function, report
from regrad.checking.differences import quick, refined
from regrad.errors import ArgumentError
from regrad.testing import GradientCheckError, check_gradients, gradient_report
from tests.helpers.broken_rules import ROWS, flipped
from tests.helpers.right_functions import FUNCTIONS

X = np.array([0.4, -1.3, 0.9])


# -- no false alarms, and nothing missed ---------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_right_functions_pass(name):
    f, args = FUNCTIONS[name]
    found = gradient_report(f, [np.asarray(a) for a in args], order=3)
    assert found.findings == ()


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", [*FUNCTIONS][:12])
def test_whatever_the_seed(name, seed):
    f, args = FUNCTIONS[name]
    assert gradient_report(f, [np.asarray(a) for a in args], order=3, seed=seed).ok


def caught(row, **options):
    with rg.gradient_override_map(row.rules) if row.rules else rg.gradient_override_map({}):
        return gradient_report(row.f, row.args, max(2, row.order), **options)


def is_named(row, found):
    """Whether the report names the rule and the inputs that are wrong, and no others."""
    named = {c.op_type for c in found.causes}, {c.input for c in found.causes}
    return named == ({row.culprit}, row.inputs) and found.findings[0].order == row.order


@pytest.mark.slow
def test_broken_rules_are_found_and_named():
    reports = [(row, caught(row)) for row in ROWS]
    assert [row.name for row, found in reports if found.ok] == []
    assert [row.name for row, found in reports if not is_named(row, found)] == []
    assert len(reports) == 105


def test_the_kind_of_error_is_named():
    kinds = {row.name: caught(row).causes[0].kind for row in ROWS[:12]}
    assert kinds["Sin: a flipped sign"] == "wrong sign"
    assert kinds["Sin: a factor of 2"] == "scaled by 2"
    assert kinds["Sin: zero"] == "zero"
    assert kinds["Sin: None"] == "missing"
    assert kinds["Sin: NaN"] == kinds["Sin: infinity"] == "not finite"
    assert kinds["Sin: a missing factor"] == "wrong value"


def test_rules_that_are_right_here_and_wrong_elsewhere_are_no_finding():
    rule = {"Sin": lambda dy, x: dy * rg.where(x > 5, 0.0, rg.cos(x))}
    with rg.gradient_override_map(rule):
        assert gradient_report(rg.sin, [X], order=2).ok


# -- what a report says --------------------------------------------------------------------------


def test_a_finding_has_place_and_numbers():
    def rule(dy, x):
        return dy * rg.cos(x) + dy * np.array([0.0, 0.1, 0.0])

    with rg.gradient_override_map({"Sin": rule}):
        found = gradient_report(lambda x: 2 * rg.sin(x), [X])
    (finding,) = found.findings
    assert finding.place == "args[0](1,)"
    assert (finding.order, finding.mode, finding.count) == (1, "reverse", 1)
    assert finding.numerical == pytest.approx(2 * np.cos(X[1]), rel=1e-8)
    assert finding.analytic == pytest.approx(2 * np.cos(X[1]) + 0.2)
    assert finding.relative == pytest.approx(0.2 / finding.analytic)
    assert 0 < finding.error < 1e-8
    (cause,) = found.causes
    assert (cause.op_type, cause.input, cause.element) == ("Sin", "x", (1,))
    assert "'rule'" in cause.rule


def test_a_report_is_a_value():
    with rg.gradient_override_map({"Sin": flipped}):
        found = gradient_report(rg.sin, [X])
        again = gradient_report(rg.sin, [X])
    assert found == again
    assert not found.ok
    with pytest.raises(FrozenInstanceError):
        found.order = 2
    right = gradient_report(rg.sin, [X], order=2)
    assert str(right) == f"gradients to order 2, {right.comparisons} comparisons: no error found"


def test_the_error_carries_the_report_and_names_the_rule():
    with (
        rg.gradient_override_map({"Sin": flipped}),
        pytest.raises(GradientCheckError, match=r"input 'x'.*wrong sign") as error,
    ):
        check_gradients(lambda x: rg.sin(x) * x, [X])
    assert error.value.report.causes[0].op_type == "Sin"
    assert isinstance(error.value, AssertionError)


def test_a_custom_gradient_is_named_with_its_place_and_parameter():
    @rg.custom_grad
    def cube(base):
        return base**3, lambda dy: dy * base**2

    with pytest.raises(
        GradientCheckError, match=r"'cube' \(cube, .*test_checking.py:\d+\).*'base'"
    ):
        check_gradients(lambda x: rg.sin(cube(x)), [X])
    check_gradients(rg.custom_grad(lambda x: (x * x, lambda dy: dy * 2 * x)), [X], order=3)


def test_a_kink_is_inconclusive_and_no_place_to_hide():
    found = gradient_report(rg.nn.relu, [[0.0, 2.0]])
    (doubt,) = found.inconclusive
    assert found.ok
    assert doubt.as_doubt == (
        "inconclusive: gradient of order 1 by args[0](0,): differences do not converge, a kink or "
        "too large a function value"
    )
    with rg.gradient_override_map({"Relu": lambda dy, x: rg.where(x >= 0, 2 * dy, 0.0)}):
        found = gradient_report(rg.nn.relu, [[0.0]])
    assert found.findings[0].kind == "wrong value"  # 2 is between no slopes
    with rg.gradient_override_map({"Relu": lambda dy, x: rg.where(x > 0, 2 * dy, 0.0)}):
        found = gradient_report(rg.nn.relu, [[0.0]])
    assert "nearby" in str(found.findings[0])  # 0 is


def test_noise_is_inconclusive():
    rng = np.random.default_rng(0)
    found = gradient_report(lambda x: x + rng.normal(size=3), [X])
    assert found.ok and found.inconclusive


def test_scalars():
    check_gradients(lambda x: rg.sin(x) * x, [0.5], order=3)
    with (
        rg.gradient_override_map({"Sin": flipped}),
        pytest.raises(GradientCheckError, match=r"by args\[0\]: the rules"),
    ):
        check_gradients(lambda x: rg.sin(x) * x, [0.5])


def test_what_was_not_checked_is_said():
    found = gradient_report(rg.sin, [np.zeros((0, 3))], order=2)
    assert [d.kind for d in found.inconclusive] == ["there are no elements"] * 2
    found = gradient_report(lambda x, y: (x * 2, y.sum()), [X, np.zeros((0, 3))])
    assert found.comparisons and found.ok
    found = gradient_report(rg.log, [[-1.0]])
    assert [d.kind for d in found.inconclusive] == ["the function has no finite value here"]


# -- the gradient that arrives is an input of the next order --------------------------------------


def test_a_rule_that_cuts_the_history_of_dy_is_wrong_from_the_second_order_on():
    @rg.custom_grad
    def stale(x, save):
        save(x=x)
        return rg.sin(x), lambda dy, saved: rg.stop_gradient(dy) * rg.cos(saved.x)

    check_gradients(stale, [X])
    for order in (2, 3):
        with pytest.raises(GradientCheckError, match=r"order 2 by dy\(0,\).*'stale'.*input 'dy'"):
            check_gradients(stale, [X], order=order)


def test_gradients_that_arrive_have_the_numbers_of_their_results():
    f = rg.custom_grad(
        lambda x: ((x * 2, x * 3), lambda dys: rg.stop_gradient(dys[0]) * 2 + dys[1] * 3)
    )
    found = gradient_report(f, [X], order=2)
    assert {finding.input for finding in found.findings} == {"dy[0]"}
    z = np.array([0.3 + 1j, -0.2 + 0.5j])
    check_gradients(lambda z: rg.exp(z) * rg.conj(z), [z], order=3)


def test_a_convention_at_a_kink_is_no_finding_and_a_nan_everywhere_is_one():
    found = gradient_report(rg.linalg.vector_norm, [[0.0, 0.0]], order=3)
    assert found.ok
    assert "by dy: the gradient is not finite here, as at a kink" in str(found)
    spoilt = rg.custom_grad(lambda dy: (dy * 2, lambda dz: dz * np.nan))
    with rg.gradient_override_map({"Sin": lambda dy: spoilt(dy) * 0.0}):
        found = gradient_report(lambda x: rg.sin(x) * 0.0, [X], order=2)
    assert [f.kind for f in found.findings] == ["not finite"]


def test_the_scaling_of_what_arrives_is_no_op_of_the_users():
    rule = rg.rules.optional(lambda dy, a, b: (dy * b * 7, dy * a * 7))
    with rg.gradient_override_map({"Mul": rule}):
        check_gradients(rg.sin, [X], order=3)


# -- arguments -----------------------------------------------------------------------------------


def test_methods_and_steps():
    f = lambda x: rg.sin(x) * rg.exp(x)  # noqa: E731
    check_gradients(f, [X], method="complex")
    check_gradients(f, [X], step=1e-2, rtol=1e-4)
    for options in ({"method": "complex"}, {"step": 1e-2}, {"rtol": 0.1}):
        with rg.gradient_override_map({"Sin": flipped}), pytest.raises(GradientCheckError):
            check_gradients(f, [X], **options)
    slightly = {"Sin": lambda dy, x: 1.001 * dy * rg.cos(x)}
    with rg.gradient_override_map(slightly):
        check_gradients(f, [X], rtol=0.01)
        check_gradients(f, [X], atol=0.01)
        assert not gradient_report(f, [X]).ok


def same(x):
    return x


@pytest.mark.parametrize(("f", "args", "options", "words"), [
    (same, [rg.asarray([1, 2])], {}, "no argument is a float"),
    (same, [X], {"order": 0}, "an order of 1 or more"),
    (same, [X], {"order": 2, "method": "complex"}, "checks order 1 only"),
    (same, [X + 1j], {"method": "complex"}, "needs real arguments"),
    (lambda x: 3, [X], {}, "must return Tensors"),
    (lambda x: x > 0, [X], {}, "returns no floats"),
    (same, X, {}, "args must be a list"),
    (lambda x: x[:0], [X], {}, "nothing was checked: there are no elements"),
    (rg.sin, [np.zeros((0, 3))], {"order": 2}, "there are no elements; pass oth"),
    (rg.log, [[-1.0]], {}, "nothing was checked: the function has no finite va"),
], ids=range(10))  # fmt: skip
def test_arguments(f, args, options, words):
    with pytest.raises(ArgumentError, match=words):
        check_gradients(f, args, **options)


def test_a_check_leaves_compiled_functions_as_they_were():
    f = rg.jit(lambda x: rg.sin(x) * x)
    with rg.gradient_override_map({"Sin": flipped}):
        rg.grad(f)(X)
        before = f.cache_info().programs
        assert gradient_report(f, [X]).causes[0].op_type == "Sin"
        rg.grad(f)(X)
    assert f.cache_info().programs == before


# -- the core, which knows no Tensors --------------------------------------------------------------


def of_numpy(sign=1.0, forward=1.0):
    """The function x -> sin(x) of arrays, to first order."""
    return Function(
        lambda xs: [np.sin(xs[0])],
        lambda xs: lambda dys: [sign * np.cos(xs[0]) * dys[0]],
        jvp=lambda xs, dxs: [forward * np.cos(xs[0]) * dxs[0]],
    )


def test_functions_of_arrays():
    assert report(of_numpy(), [X], names=["angle"]).ok
    (finding,) = report(of_numpy(sign=-1.0), [X], names=["angle"]).findings
    assert (finding.kind, finding.input, finding.mode) == ("wrong sign", "angle", "reverse")
    (finding,) = report(of_numpy(forward=2.0), [X]).findings
    assert (finding.kind, finding.mode, finding.input) == ("scaled by 2", "forward", "args[0]")
    assert "(forward mode)" in str(finding)


def test_functions_of_jax():
    import jax

    f = jax.custom_vjp(lambda x, y: jax.numpy.sin(x) * y)
    f.defvjp(
        lambda x, y: (f(x, y), (x, y)),
        lambda kept, dy: (dy * jax.numpy.cos(kept[0]), dy * jax.numpy.sin(kept[0])),
    )

    def vjp(xs):
        pull = jax.vjp(f, *xs)[1]
        return lambda dys: [np.asarray(dx) for dx in pull(jax.numpy.asarray(dys[0]))]

    found = report(Function(lambda xs: [np.asarray(f(*xs))], vjp), [X, X + 2], names=["x", "y"])
    assert [finding.input for finding in found.findings] == ["x"]  # its factor y is missing


def test_differences_know_their_error():
    def curve(t):
        x = 0.7 + t
        return np.array([np.exp(x), np.sin(200 * x), np.abs(t), (x + 1e9) - 1e9, np.sqrt(x)])

    due = np.array([np.exp(0.7), 200 * np.cos(140.0), 0.0, 1.0, 0.5 / np.sqrt(0.7)])
    slopes = refined(curve, 0.1)
    assert (np.abs(slopes.best - due) <= 5 * slopes.error).all()
    assert (slopes.error[[0, 1, 4]] <= 1e-9 * np.abs(due[[0, 1, 4]])).all()
    assert slopes.right[-1, 2] == -slopes.left[-1, 2] == 1.0
    np.testing.assert_allclose(quick(curve, 1e-3)[[0, 4]], due[[0, 4]], rtol=1e-9)


def test_a_settled_finding_can_be_changed_only_by_copying():
    (finding,) = report(of_numpy(sign=-1.0), [X]).findings
    assert replace(finding, kind="zero").kind == "zero"
