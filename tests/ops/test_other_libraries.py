"""Tensors in the hands of matplotlib, SciPy, scikit-learn and Python's own tools."""

import inspect

import numpy as np
import pytest

import regrad as rg
from tests.helpers.op_rows import alike, slope

T = rg.linspace(0.0, 1.0, 8)
M = rg.reshape(rg.arange(16) * 1.0, (4, 4))
S = rg.scalar(0.5)
CALLS = {
    "plot": (T, T), "scatter": (T, T), "imshow": (M,), "contourf": (M,), "pcolormesh": (M,),
    "fill_between": (T, T, 2 * T), "errorbar": (T, T, T), "quiver": (T, T, T, T), "step": (T, T),
    "stem": (T, T), "hexbin": (T, T), "pie": (T,), "semilogy": (T + 1, T + 1), "hist": (T,),
    "boxplot": (M,), "violinplot": (T,), "axvline": (S,), "axhline": (S,), "text": (S, S, "a"),
    "annotate": ("a", (S, S)), "bar": (T, T), "barh": (T, T), "hist2d": (T, T),
    "stackplot": (T, T, T), "xlim": (S, S + 1), "contour": (T, T, rg.ones((8, 8)) * T),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_matplotlib_draws_tensors(name):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure()
    try:
        getattr(plt, name)(*CALLS[name])
        figure.canvas.draw()
    finally:
        plt.close(figure)


def test_scipy_minimizes_by_value_and_grad():
    from scipy.optimize import minimize

    f = rg.value_and_grad(lambda x: ((rg.asarray(x) - 1) ** 2).sum())
    for method in ("BFGS", "L-BFGS-B", "CG", "TNC"):
        found = minimize(f, np.zeros(3), jac=True, method=method)
        np.testing.assert_allclose(found.x, 1, atol=1e-5)


def test_scikit_learn_takes_tensors_through_a_pipeline():
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = np.asarray(M), np.asarray(T[:4])
    due = make_pipeline(StandardScaler(), Ridge()).fit(x, y).predict(x)
    got = make_pipeline(StandardScaler(), Ridge()).fit(M, T[:4]).predict(M)
    np.testing.assert_allclose(np.asarray(got), due, rtol=1e-5)


def test_python_s_own_tools():
    for t in (T, M, S, rg.ones((2, 3, 4)), rg.Variable([1.0])):
        assert dict(inspect.getmembers(t))["ndim"] == t.ndim
        assert t not in (None, "a", object()) and t != None  # noqa: E711
        assert (t == "a") is False and (t == object()) is False
    assert (T == [0.0] * 8).tolist() == [True] + 7 * [False]
    assert (np.zeros(8) == T).sum().item() == 1
    with pytest.raises(TypeError, match="rank 0 cannot be iterated"):
        iter(S)
    assert not np.iterable(S) and np.iterable(T)
    assert not hasattr(T, "T") and M.T.shape == (4, 4)


METHODS = [  # of Tensors as of arrays
    lambda v: v.reshape(3, 2), lambda v: v.reshape(-1), lambda v: v.ravel(), lambda v: v.copy(),
    lambda v: v.transpose(1, 0), lambda v: v.transpose(), lambda v: v.swapaxes(0, 1),
    lambda v: v.argsort(0), lambda v: v.take([1, 5]), lambda v: v.take([1], axis=1),
    lambda v: v.repeat(2), lambda v: v.repeat([1, 2], axis=0), lambda v: v.clip(1.5, 4.0),
    lambda v: v.astype("int32"), lambda v: v.nbytes, lambda v: v.itemsize, lambda v: v.std(0),
]  # fmt: skip


def test_methods_that_people_type():
    x = rg.tensor([[3.0, 1.0, 2.0], [6.0, 5.0, 4.0]])
    a = np.array(x)
    for method in METHODS:
        alike(method(x), method(a), rtol=1e-6)
    alike([x.sort(), x.at[0].set(0.0), x.at[:, 1].add(1.0), x.at[0, 0].get()],
          [np.sort(a), [[0, 0, 0], a[1]], a + np.array([0, 1, 0]), a[0, 0]])  # fmt: skip
    alike(x.var(axis=1, correction=1), a.var(axis=1, ddof=1), rtol=1e-6)
    alike(slope(lambda x: x * x.detach())(x), a)
    alike(slope(lambda x: x.at[0].set(0.0))(x), [[0, 0, 0], [1, 1, 1]])


@pytest.mark.parametrize(("values", "text"), [
    ([1e-9, -2e-9], "[ 1.e-09, -2.e-09]"), ([[1e-5, 1.0]], "[[1.e-05, 1.e+00]]"),
    ([1e9, 1.0], "[1.e+09, 1.e+00]"), ([0.0, 1e-9], "[0.e+00, 1.e-09]"),
    ([0.25, 200.0], "[0.25, 200]"), ([0.0, 0.0], "[0, 0]"), ([float("nan"), 1.0], "[NaN, 1]"),
    ([1e-9 + 1j], "[1.e-09+1.j]"),
])  # fmt: skip
def test_small_numbers_are_not_shown_as_zeros(values, text):
    t = rg.tensor(values)
    body = str(t).removeprefix("Tensor\n    ")
    assert body == text
    assert str(rg.Variable(t)).endswith(text)
    if "e-" in text or "e+" in text:
        assert body == np.array2string(np.array(t), separator=", ")


def test_printoptions(capsys):
    t = rg.tensor([1e-9, 1 / 3])
    rg.set_printoptions(precision=2)
    try:
        assert repr(t) == "Tensor([1.00e-09, 3.33e-01], dtype=float32)"
        rg.set_printoptions(suppress=True)
        assert str(t) == "Tensor\n    [0, 0.3333333]"
        rg.set_printoptions(threshold=4, edgeitems=1)
        assert "...," in repr(rg.arange(9))
        with pytest.raises(TypeError, match="set_printoptions"):
            rg.set_printoptions(precision="a")  # pyright: ignore
        with pytest.raises(TypeError, match=r"set_printoptions.*digits"):
            rg.set_printoptions(digits=3)  # pyright: ignore
    finally:
        rg.set_printoptions()
    t.print()
    assert capsys.readouterr().out == "Tensor\n    [0, 0.3333333]\n"  # TensorFlow.js's
