"""The core rebuilt in docs/how_it_works.py runs, is self-contained, and agrees with regrad."""

from __future__ import annotations

import ast
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import regrad as rg
from regrad.transforms.derivatives import jvp
from tests.helpers.paths import DOCS

SCRIPT = DOCS / "how_it_works.py"
POINTS = np.array([-1.5, -0.2, 0.7, 2.0])


@pytest.fixture(scope="module")
def core():
    """The script's names; its own assertions hold if this does not raise."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def agree(mine, theirs, core, x=POINTS):
    """The same function of x, built of the script's parts and of regrad's."""
    np.testing.assert_allclose(mine(core.Tensor(x)).value, theirs(rg.tensor(x)).numpy())


def test_imports_only_numpy_and_the_standard_library():
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {n.partition(".")[0] for n in names} - sys.stdlib_module_names == {"numpy"}


def test_stays_short():
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    assert sum(bool(line) for line in lines) <= 360


@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradient_of_any_order(core, order):
    def mine(x):
        return core.sin(x * x) * core.exp(x)

    def theirs(x):
        return rg.sin(x * x) * rg.exp(x)

    for _ in range(order):
        mine, theirs = core.grad(mine), rg.grad(theirs)
    agree(mine, theirs, core)


def test_gradient_is_summed_over_broadcasting(core):
    row = np.array([[1.0, 2.0, 3.0]])
    agree(
        core.grad(lambda x: core.exp(x * row)),
        rg.grad(lambda x: rg.exp(x * rg.tensor(row))),
        core,
        np.array([[0.3], [-0.4]]),
    )


def test_nested_derivatives_do_not_mix(core):
    agree(
        core.grad(lambda x: x * core.grad(lambda z: x * z * z)(x)),
        rg.grad(lambda x: x * rg.grad(lambda z: x * z * z)(x)),
        core,
    )


@pytest.mark.parametrize("order", [1, 2])
def test_program_7(core, order):
    """The documented program of TensorFlow.js: the value a², the gradient dy |a|."""

    @core.custom_grad
    def mine(a, save):
        save([a])
        return a * a, lambda dy, saved: dy * saved[0] * core.sign(saved[0])

    @rg.custom_grad
    def theirs(a, save):
        save([a])
        return {"value": a.square(), "grad_func": lambda dy, saved: dy.mul(saved[0].abs())}

    for _ in range(order):
        mine, theirs = core.grad(mine), rg.grad(theirs)
    agree(mine, theirs, core)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_custom_grad_through_what_it_saves(core, order):
    """An intermediate and the output are saved; both have a derivative at the next order."""

    def of(exp, sin, custom_grad):
        def f(x, save):
            inner = sin(x)
            y = exp(inner)
            save([inner, y])
            return y, lambda dy, saved: dy * saved[0] * saved[1]

        return custom_grad(f)

    mine, theirs = of(core.exp, core.sin, core.custom_grad), of(rg.exp, rg.sin, rg.custom_grad)
    for _ in range(order):
        mine, theirs = core.grad(mine), rg.grad(theirs)
    agree(mine, theirs, core)


def test_custom_grad_of_its_own_input(core):
    mine = core.custom_grad(lambda x, save: (x, lambda dy, saved: dy * 3))
    theirs = rg.custom_grad(lambda x, save: (x, lambda dy, saved: dy * 3))
    agree(core.grad(lambda x: mine(x) * x), rg.grad(lambda x: theirs(x) * x), core)


def test_override_binds_at_creation_and_not_in_rules(core):
    with core.gradient_override_map({"Cos": lambda dy, x: dy * x}):
        mine = core.grad(lambda x: core.cos(x) + core.grad(core.sin)(x))(core.Tensor(POINTS))
    with rg.gradient_override_map({"Cos": lambda dy, x: dy * x}):
        theirs = rg.grad(lambda x: rg.cos(x) + rg.grad(rg.sin)(x))(rg.tensor(POINTS))
    np.testing.assert_allclose(mine.value, theirs.numpy())


def test_surrogate(core):
    def surrogate(x):
        return rg.sin(x) + rg.stop_gradient(rg.sign(x) - rg.sin(x))

    mine = core.surrogate(core.sign, core.sin)
    agree(mine, surrogate, core)
    agree(core.grad(mine), rg.grad(surrogate), core)


def test_forward_mode(core):
    dx = np.array([1.0, -2.0, 0.5, 3.0])
    agree(
        lambda x: core.jvp(lambda x: core.sin(x) * core.exp(x), x, core.Tensor(dx)),
        lambda x: jvp(lambda x: rg.sin(x) * rg.exp(x), [x], [rg.tensor(dx)])[1],
        core,
    )


def test_deep_chain(core):
    def chain(x):
        for _ in range(20_000):
            x = x + 1
        return x

    assert core.grad(chain)(1.0).value == 1


def test_wrong_shape_is_an_error(core):
    with (
        core.gradient_override_map({"BroadcastTo": lambda dy: dy}),
        pytest.raises(
            ValueError, match=r"the rule of BroadcastTo returned \(2, 3\), expected \(3,\)"
        ),
    ):
        core.grad(lambda x: core.broadcast_to(x, (2, 3)))(core.Tensor([1.0, 2.0, 3.0]))


def test_an_op_without_a_rule_is_an_error(core):
    cube = core.elementwise("Cube", lambda xp, x: x**3)
    assert cube(core.Tensor([2.0])).value == [8.0]
    with pytest.raises(ValueError, match="no gradient is defined for the op type Cube"):
        core.grad(cube)(core.Tensor([2.0]))
    with core.gradient_override_map({"Cube": lambda dy, x: dy * x}):
        assert core.grad(cube)(core.Tensor([2.0])).value == [2.0]


def test_no_path_is_an_error(core):
    with pytest.raises(ValueError, match="no path"):
        core.grad(core.stop_gradient)(1.0)
