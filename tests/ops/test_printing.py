"""Tensors as text: TensorFlow.js's format to the blank, and NumPy's style for repr."""

from __future__ import annotations

import json
from decimal import ROUND_HALF_UP, Context, Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import regrad as rg
from regrad.ops import printing
from tests.helpers.paths import GOLDEN

CASES = json.loads((GOLDEN / "tfjs_print.json").read_text())["cases"]


def recorded(case: dict) -> rg.Tensor:
    """The input of a case; complex numbers are interleaved."""
    spec = case["inputs"][0]
    values = np.array([float(v) for v in spec["values"]])
    if spec["dtype"] == "complex64":
        values = values[::2] + 1j * values[1::2]
    return rg.asarray(values.reshape(spec["shape"]).astype(spec["dtype"]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_as_tensorflow_js(case, capsys):
    t = recorded(case)
    assert t.to_string(case["verbose"]) == case["expected_string"]
    t.print(case["verbose"])
    assert capsys.readouterr().out == case["expected_stdout"]


def test_str_and_print():
    t = rg.tensor([0, 1, 1, 4])
    assert str(t) == f"{t}" == printing.to_string(t) == "Tensor\n    [0, 1, 1, 4]"


def test_verbose():
    text = rg.tensor([[1, 2], [3, 4]], dtype="int32").to_string(verbose=True)
    assert text == (
        "Tensor\n  dtype: int32\n  rank: 2\n  shape: [2,2]\n  values:\n    [[1, 2],\n     [3, 4]]"
    )


@pytest.mark.parametrize(("shape", "text"), [
    ((0,), "    []"), ((0, 3), "     []"), ((0, 2, 2), "     []"), ((2, 0), "    [[],\n     []]"),
    ((2, 1, 2), "    [ [[0, 1],],\n\n      [[2, 3],]]"),
    ((1, 2, 2), "    [[[0, 1],\n      [2, 3]]]"),
])  # fmt: skip
def test_empty_and_single_lines(shape, text):
    t = rg.asarray(np.arange(np.prod(shape)).reshape(shape))
    assert str(t) == f"Tensor\n{text}"


def test_columns_are_as_wide_as_their_hidden_rows():
    values = np.zeros((30, 2))
    values[15, 0] = 123.5
    assert str(rg.asarray(values)).splitlines()[1] == "    [[0    , 0],"


@pytest.mark.parametrize(("value", "text"), [
    (0.0, "0"), (-0.0, "0"), (1e20, "100000000000000000000"), (1e21, "1e+21"),
    (-1.5e300, "-1.5e+300"), (1e-6, "0.000001"), (1e-7, "1e-7"), (-1.25e-9, "-1.25e-9"),
    (5e-324, "5e-324"), (0.05, "0.05"), (1234.5, "1234.5"), (100.0, "100"), (float("nan"), "NaN"),
    (float("-inf"), "-Infinity"),
])  # fmt: skip
def test_numbers_are_written_as_in_javascript(value, text):
    assert printing.number(value) == text


def test_elements_are_rounded_and_scalars_are_not():
    assert str(rg.scalar(0.1)) == "Tensor\n    0.10000000149011612"
    text = rg.tensor([0.1, -1e-9, 1e-7]).to_string()
    assert text == "Tensor\n    [0.1, 0, 1e-7]"
    assert str(rg.asarray([2**53 + 1])) == "Tensor\n    [9007199254740993]"
    assert str(rg.asarray(1.5 - 0.25j)) == "Tensor\n    1.5 + -0.25j"


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e20, max_value=1e20))
def test_ties_round_away_from_zero_in_exact_arithmetic(value):
    exact = Decimal(value).quantize(Decimal("1e-7"), ROUND_HALF_UP, Context(prec=60))
    assert printing._rounded(value) == float(exact)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_the_width_is_that_of_the_widest(values):
    widest = max(len(printing._text(v)) for v in values)
    assert printing._width(np.array(values)) == widest


def test_a_watched_tensor_prints():
    lines = []
    rg.grad(lambda x: (lines.append(str(x)), x.square())[1])(rg.scalar(3.0))
    assert lines == ["Tensor\n    3"]


def test_a_variable_prints_as_its_value():
    assert str(rg.Variable([1.0, 2.0])) == "Tensor\n    [1, 2]"


def test_other_libraries():
    import jax.numpy as jnp
    import torch

    for array in (jnp.ones(2, jnp.float32), torch.ones(2)):
        assert str(rg.asarray(array)) == "Tensor\n    [1, 1]"
        assert repr(rg.asarray(array)) == "Tensor([1., 1.], dtype=float32)"
    half = rg.asarray(jnp.ones(2, jnp.bfloat16))
    assert repr(half) == "Tensor([1., 1.], dtype=bfloat16)"
    assert str(half) == "Tensor\n    [1, 1]"


def test_traced_tensors_have_no_values_yet():
    import jax

    seen = []

    def f(x):
        seen.append((repr(rg.asarray(x)), str(rg.asarray(x))))
        return x

    jax.jit(f)(np.ones(3, np.float32))
    assert seen == [
        (
            "Tensor(<traced by JAX>, shape=(3,), dtype=float32)",
            "Tensor\n    (traced by JAX: float32 (3,), values come when it runs)",
        )
    ]


# -- repr ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("array", "text"), [
    (np.array([0, 1], np.float32), "Tensor([0., 1.], dtype=float32)"),
    (np.array(3.0), "Tensor(3., dtype=float64)"),
    (np.array([True, False]), "Tensor([ True, False], dtype=bool)"),
    (np.arange(4).reshape(2, 2), "Tensor([[0, 1],\n        [2, 3]], dtype=int64)"),
    (np.zeros((2, 0), np.float32), "Tensor([], shape=(2, 0), dtype=float32)"),
    (np.zeros(0), "Tensor([], shape=(0,), dtype=float64)"),
])  # fmt: skip
def test_repr(array, text):
    assert repr(rg.asarray(array)) == text


def test_repr_of_long_tensors():
    t = rg.asarray(np.arange(2000.0))
    assert repr(t).endswith("shape=(2000,), dtype=float64)")
    assert max(map(len, repr(t).splitlines())) <= 75
    long = rg.asarray(np.arange(20) / 7)
    assert repr(long).splitlines()[-1] == "       dtype=float64)"
