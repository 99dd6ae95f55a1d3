"""regrad as an Array API namespace: the record of the standard's tests, and its consumers."""

import json
import subprocess
import sys

import numpy as np
import pytest

import regrad as rg
from regrad.errors import AxisError, DeviceError
from tests.campaigns import array_api


def test_nothing_fails_that_does_not_fail_for_numpy():
    record = json.loads(array_api.RECORD.read_text(encoding="utf-8"))
    assert array_api.excess(record) == [] and len(record["regrad"]["passed"]) > 1300
    assert array_api.page(record) == array_api.PAGE.read_text(encoding="utf-8")


def test_the_record_can_fail():
    record = {"regrad": {"failed": ["a", "b"]}, "numpy": {"failed": ["b", "c"]}}
    assert array_api.excess(record) == ["a"]


def test_reports_are_read():
    tests = [{"nodeid": "array_api_tests/t.py::a", "outcome": o} for o in ("passed", "error")]
    lost = [{"nodeid": "t.py", "outcome": "failed"}, {"nodeid": "u.py", "outcome": "passed"}]
    found = array_api.by_outcome({"tests": tests, "collectors": lost})
    assert found == {"passed": ["t.py::a"], "failed": ["t.py", "t.py::a"], "skipped": []}


CONSUMERS = """
import numpy as np, regrad as rg, scipy.fft, scipy.special, scipy.stats
from sklearn import config_context
from sklearn.decomposition import PCA
from sklearn.metrics import accuracy_score, mean_squared_error
x = np.random.default_rng(0).normal(size=(8, 3))
def explained(x):
    return PCA(2, svd_solver="full").fit(x).explained_variance_
def error(x):
    return mean_squared_error(x[:, 0], x[:, 1])
def hits(x):
    xp = rg if isinstance(x, rg.Tensor) else np
    return accuracy_score(xp.asarray([1, 0, 1]), xp.asarray([1, 1, 1]))
def spectrum(x):
    return scipy.fft.fft(x + 0j, axis=0)
for f in (explained, error, hits, spectrum, scipy.special.expit, scipy.stats.skew):
    with config_context(array_api_dispatch=True):
        y = f(rg.tensor(x))
    assert isinstance(y, (rg.Tensor, float)), f
    np.testing.assert_allclose(np.asarray(y), f(x), rtol=1e-6, err_msg=f.__name__)
print("right")
"""


@pytest.mark.slow
def test_consumers_take_tensors():
    import os

    import sklearn  # noqa: F401 (which the other process needs)

    done = subprocess.run(
        [sys.executable, "-c", CONSUMERS], capture_output=True, text=True, timeout=240,
        env={**os.environ, "SCIPY_ARRAY_API": "1"},
    )  # fmt: skip
    assert done.stdout == "right\n", done.stderr


EXTRA = {
    "atleast_nd": lambda xpx, x, xp: xpx.atleast_nd(x, ndim=3, xp=xp),
    "cov": lambda xpx, x, xp: xpx.cov(x, xp=xp),
    "kron": lambda xpx, x, xp: xpx.kron(x, x, xp=xp),
    "nunique": lambda xpx, x, xp: xpx.nunique(xp.asarray([1, 2, 2]), xp=xp),
    "one_hot": lambda xpx, x, xp: xpx.one_hot(xp.asarray([0, 2]), 3, xp=xp),
    "partition": lambda xpx, x, xp: xpx.partition(x, 1, xp=xp),
    "setdiff1d": lambda xpx, x, xp: xpx.setdiff1d(xp.asarray([1, 2]), xp.asarray([2]), xp=xp),
    "sinc": lambda xpx, x, xp: xpx.sinc(x, xp=xp),
}


@pytest.mark.parametrize("function", EXTRA.values(), ids=EXTRA)
def test_array_api_extra_takes_tensors(function):
    """Those functions of array-api-extra that do not assign to elements (scikit-learn ships it)."""
    import sklearn.externals.array_api_extra as xpx

    x = np.random.default_rng(0).normal(size=(3, 4))
    y = function(xpx, rg.tensor(x), rg)
    assert isinstance(y, rg.Tensor)
    np.testing.assert_allclose(y.numpy(), function(xpx, x, np))


def test_what_torch_writes_does_not_reach_a_tensor():
    import torch

    for t in (rg.tensor([1.0, 2.0]), rg.tensor(torch.tensor([1.0, 2.0]))):
        torch.from_dlpack(t).mul_(5)
        assert t.tolist() == [1.0, 2.0]


def test_memory_is_exported_on_request_and_read_only():
    t = rg.tensor([1.0, 2.0])
    shared = np.from_dlpack(t, copy=False)
    assert np.shares_memory(shared, t.data) and not shared.flags.writeable
    with pytest.raises(BufferError):
        t.__dlpack__(copy=False)  # a version that has no flag for it


def test_jax_takes_numpy_data():
    import jax.numpy as jnp

    assert jnp.from_dlpack(rg.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("function", [rg.sum, rg.prod, rg.cumulative_sum, rg.cumulative_prod])
def test_results_have_the_dtype_that_was_asked_for(function):
    x = rg.tensor([200, 100], dtype="uint8")
    got, due = function(x, dtype=rg.uint8), getattr(np, function.__name__)(x.data, dtype=np.uint8)
    assert got.dtype == due.dtype and got.tolist() == due.tolist()


def test_reflected_operators_of_bits():
    x, y = rg.asarray([1, 2, 3]), np.array([1, 2, 3])
    found = [6 & x, 6 | x, 6 ^ x, 6 << x, 6 >> x]
    assert [t.tolist() for t in found] == [
        t.tolist() for t in (6 & y, 6 | y, 6 ^ y, 6 << y, 6 >> y)
    ]


def test_devices():
    import torch

    x, there = rg.tensor([1.0, 2.0]), torch.device("cpu")
    assert x.to_device("cpu") is x and rg.zeros_like(x, device="cpu").device == "cpu"
    dx = rg.grad(lambda x: rg.sum(rg.square(x.to_device(there))))(x)
    assert dx.tolist() == [2.0, 4.0] and dx.device == "cpu"
    assert rg.zeros((2,), device=there).device == there
    t = rg.tensor(torch.tensor([1.0]))
    assert t.to_device("cpu") is t and rg.ones_like(t, device="cpu").device == there
    with pytest.raises(DeviceError, match=r"expected a device, .* got 'nowhere'"):
        t.to_device("nowhere")
    with pytest.raises(DeviceError, match=r"zeros: .*expected a device, .* got 'cuda'"):
        rg.zeros((2,), device="cuda")


def test_an_axis_that_is_not_there_is_an_index_error():
    with pytest.raises(AxisError) as raised:
        rg.expand_dims(rg.ones((2,)), axis=3)
    assert isinstance(raised.value, IndexError) and isinstance(raised.value, ValueError)


def test_an_empty_mask_selects_nothing():
    assert rg.ones((3, 2))[rg.zeros((0,), dtype="bool")].shape == (0, 2)
