"""CONTRIBUTING, followed to the letter: an op in one block and one line of samples."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import torch

import regrad as rg
import regrad.ops.elementwise as family
import regrad.torch
from regrad.core.registry import OPS
from regrad.errors import UnknownOpError
from regrad.extend import Spec, elementwise, gradient, op
from regrad.jax.optypes import TABLE
from regrad.ops.numpy_protocol import UFUNCS
from regrad.shapes.infer import infer
from regrad.testing import check_gradients
from regrad.torch.nodes import types_of
from regrad.torch.optypes import clear
from tests import samples
from tests.helpers.paths import ROOT
from tests.samples import elementwise as rows

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
X = np.array([[0.3, 0.7, 0.2], [8.0, 0.4, 0.6]])


def seven(op, grad):
    return op.inputs[0] * 0 + 7


@pytest.fixture
def contributed():
    """The op of the page, under a name of its own, with its row of samples."""
    scope = {**vars(family)}
    exec(BLOCKS[0].replace("Entr", "ContributedEntr"), scope)
    rg.entr = scope["entr"]
    try:
        names = {**vars(rows), "rg": rg, "sample": samples.sample}
        (row,) = eval(f"[{BLOCKS[1].strip()}]", names)
        yield row
    finally:
        del rg.entr
        OPS.pop("ContributedEntr")
        UFUNCS.pop(scipy.special.entr, None)
        clear()


def test_the_block_makes_an_op_that_passes_its_sample(contributed):
    row = contributed
    np.testing.assert_allclose(row.f(row.inputs[0]).numpy(), row.reference(row.inputs[0]))
    check_gradients(row.f, [*row.inputs], order=3)
    places = np.array([-1.0, 0.0, 0.5])
    np.testing.assert_allclose(row.f(places).numpy(), row.reference(places))


def test_numpys_protocol_and_overrides_in_torch_find_it_by_its_name(contributed):
    np.testing.assert_allclose(scipy.special.entr(rg.asarray(X)).numpy(), scipy.special.entr(X))
    x = torch.tensor(X, requires_grad=True)
    with regrad.torch.gradient_override_map({"ContributedEntr": seven}) as used:
        torch.special.entr(x).sum().backward()
    used.assert_fired()
    assert x.grad is not None and (x.grad == 7).all()


# -- what follows from a declaration -----------------------------------------------------------


@pytest.fixture(scope="module")
def cube_root():
    """An elementwise op of a user, of which NumPy and JAX have a function by its name."""

    @op("ContributedCubeRoot", elementwise=True, to_float=True, real=True)
    def cbrt(xp, x: rg.Tensor, /) -> rg.Tensor:
        return xp.sign(x) * xp.abs(x) ** (1 / 3)

    @gradient("ContributedCubeRoot")
    def _(dy, y):
        return dy / (3 * rg.square(y))

    yield cbrt
    OPS.pop("ContributedCubeRoot")
    UFUNCS.pop(np.cbrt, None)
    TABLE.pop("ContributedCubeRoot", None)


@pytest.fixture(scope="module")
def degrees():
    """Another one, made of a row, after regrad.torch has found its functions by name."""
    with regrad.torch.gradient_override_map({"Sin": "Cos"}):
        torch.sin(torch.ones(1, requires_grad=True))
    yield elementwise(
        "ContributedDegrees", "rad2deg", lambda xp, x: x * (180 / math.pi), "In degrees.",
        lambda dy: dy * (180 / math.pi), to_float=True,
    )  # fmt: skip
    OPS.pop("ContributedDegrees")
    UFUNCS.pop(np.rad2deg, None)
    clear()


def test_graphs_know_the_shape_of_its_result(cube_root):
    spec = infer(OPS["ContributedCubeRoot"], [Spec((None, 3), rg.float32)], {})[0]
    assert spec == ((None, 3), rg.float32)


def test_numpys_function_of_its_name_takes_tensors(cube_root, degrees):
    np.testing.assert_allclose(np.cbrt(rg.asarray(X)).numpy(), np.cbrt(X))
    np.testing.assert_allclose(np.rad2deg(rg.asarray(X)).numpy(), np.rad2deg(X))
    check_gradients(lambda x: np.cbrt(x), [X], order=2)


def test_vmap_and_jit_take_it(cube_root):
    np.testing.assert_allclose(rg.vmap(rg.jit(cube_root))(rg.asarray(X)).numpy(), np.cbrt(X))


def test_overrides_find_torchs_function_of_its_name(degrees):
    x = torch.tensor(X, requires_grad=True)
    with regrad.torch.gradient_override_map({"ContributedDegrees": seven}) as used:
        torch.rad2deg(x).sum().backward()
    used.assert_fired()
    assert x.grad is not None and (x.grad == 7).all()
    assert types_of("Rad2DegBackward") == ("ContributedDegrees",)  # so it is seen inside others


@pytest.fixture
def another_sign():
    """An op of a user whose function has the name of one of the library's."""

    @op("ContributedSign", elementwise=True)
    def sign(xp, x: rg.Tensor, /) -> rg.Tensor:
        return 10 * xp.sign(x)

    gradient("ContributedSign")(lambda dy: dy)
    clear()
    yield sign
    del OPS["ContributedSign"]
    clear()


def test_a_name_stays_with_the_op_type_that_had_it_first(another_sign):
    assert np.sign(rg.tensor([-2.0])).item() == -1
    x = torch.tensor([-2.0], requires_grad=True)
    with rg.torch.gradient_override_map({"Sign": lambda dy: 7 * dy}):
        x.sign().sum().backward()
    assert x.grad is not None and x.grad.item() == 7
    ours = rg.jax.override(jnp.sign, {"Sign": lambda dy: 7 * dy})
    assert jax.grad(ours)(-2.0) == 7
    with pytest.raises(UnknownOpError), rg.torch.gradient_override_map({"ContributedSign": "Sign"}):
        pass
    with pytest.raises(UnknownOpError):
        rg.jax.override(jnp.sign, {"ContributedSign": "Sign"})(-2.0)


def test_overrides_find_jaxs_function_of_its_name(cube_root):
    f = rg.jax.override(jnp.cbrt, {"ContributedCubeRoot": seven})
    assert (jax.grad(lambda x: f(x).sum())(jnp.asarray(X)) == 7).all()
    f.assert_fired("ContributedCubeRoot")
