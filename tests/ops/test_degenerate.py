"""Second derivatives where eigenvalues coincide, singular values vanish, lengths are 0.

Each entry of a Hessian is right, by differences of values, or NaN; never another number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regrad as rg
from regrad import linalg
from tests.helpers.sample_runs import arrays_of

RNG = np.random.default_rng(0)
TURN = np.linalg.qr(RNG.normal(size=(3, 3)))[0]
OTHER = np.linalg.qr(RNG.normal(size=(3, 3)))[0]


def turned(*w: float) -> np.ndarray:
    return TURN @ np.diag(w) @ TURN.T


SYMMETRIC = {
    "2 I": 2.0 * np.eye(2), "diag(2, 2, 5)": np.diag([2.0, 2.0, 5.0]),
    "diag(5, 2, 2)": np.diag([5.0, 2.0, 2.0]), "turned (2, 2, 5)": turned(2, 2, 5),
    "turned (3, 3, 3)": turned(3, 3, 3), "regular": turned(1, 2, 4),
    "two blocks": np.stack([np.eye(2), np.diag([1.0, 3.0])]),
}  # fmt: skip
MATRICES = {
    "I": np.eye(2), "diag(3, 1, 1)": np.diag([3.0, 1.0, 1.0]),
    "diag(3, 3, 1)": np.diag([3.0, 3.0, 1.0]),
    "turned (2, 2, 1)": TURN @ np.diag([2.0, 2.0, 1.0]) @ OTHER, "orthogonal": TURN,
    "tall": np.eye(3)[:, :2], "wide": np.eye(3)[:2], "singular": np.diag([2.0, 0.0]),
    "zeros": np.zeros((2, 2)), "zeros, tall": np.zeros((2, 1)),
    "rank 1, wide": np.outer([1.0, 0.0], [1.0, 0.0, 0.0]),
    "regular": TURN @ np.diag([4.0, 2.0, 1.0]) @ OTHER,
}  # fmt: skip

# Smooth functions of all x, or of those that the condition admits.
EIGEN = {
    "trace": lambda x: rg.sum(linalg.eigvalsh(x)),
    "trace squared": lambda x: rg.sum(linalg.eigvalsh(x)) ** 2,
    "log det": lambda x: rg.sum(rg.log(linalg.eigvalsh(x))),
    "sum of cubes": lambda x: rg.sum(linalg.eigvalsh(x) ** 3),
    "logsumexp": lambda x: rg.logsumexp(linalg.eigvalsh(x)),
    "product": lambda x: rg.prod(linalg.eigvalsh(x)),
    "variance": lambda x: rg.var(linalg.eigvalsh(x)),
    "entropy": lambda x: rg.sum(linalg.eigvalsh(x) * rg.log(linalg.eigvalsh(x))),
    "weighed by itself": lambda x: rg.sum(linalg.eigvalsh(x)) * rg.sum(x * x),
    "by eigh": lambda x: rg.sum(rg.log(linalg.eigh(x)[0])),
}
SINGULAR = {
    "sum of squares": (lambda x: rg.sum(linalg.svdvals(x) ** 2), lambda s: True),
    "sum of 4th powers": (lambda x: rg.sum(linalg.svdvals(x) ** 4), lambda s: True),
    "sum of squares, squared": (lambda x: rg.sum(linalg.svdvals(x) ** 2) ** 2, lambda s: True),
    "cosh": (lambda x: rg.sum(rg.cosh(linalg.svdvals(x))), lambda s: True),
    "log det": (lambda x: rg.sum(rg.log(linalg.svdvals(x))), lambda s: s.min() > 0),
    "nuclear norm": (lambda x: linalg.matrix_norm(x, ord="nuc"), lambda s: s.min() > 0),
    "nuclear norm squared": (lambda x: linalg.matrix_norm(x, ord="nuc") ** 2,
                             lambda s: s.min() > 0),
    "2-norm": (lambda x: linalg.matrix_norm(x, ord=2), lambda s: s[0] > s[1:].max(initial=0) + 0.1),
    "-2-norm": (lambda x: linalg.matrix_norm(x, ord=-2),
                lambda s: 0 < s[-1] < s[:-1].min(initial=9) - 0.1),
    "fro, squared": (lambda x: linalg.matrix_norm(x) ** 2, lambda s: True),
    "by svd": (lambda x: rg.sum(linalg.svd(x, full_matrices=False)[1] ** 2), lambda s: True),
}  # fmt: skip
NORMS = {
    "vector_norm squared": lambda x: linalg.vector_norm(x) ** 2,
    "vector_norm, 4th power": lambda x: linalg.vector_norm(x) ** 4,
    "cosh of vector_norm": lambda x: rg.cosh(linalg.vector_norm(x)),
    "4-norm, 8th power": lambda x: linalg.vector_norm(x, ord=4) ** 8,
    "rows": lambda x: rg.sum(linalg.vector_norm(rg.reshape(x, (2, 2)), axis=1) ** 2),
    "hypot squared": lambda x: rg.sum(rg.hypot(x[:2], x[2:]) ** 2),
    "std squared": lambda x: rg.std(x) ** 2,
    "std, correction": lambda x: rg.std(x, correction=1) ** 2,
    "std of rows": lambda x: rg.sum(rg.std(rg.reshape(x, (2, 2)), axis=1) ** 2),
}
POINTS = {
    "zeros": np.zeros(4), "ones": np.ones(4), "a row of zeros": np.array([0.0, 0.0, 3.0, 4.0]),
    "pairs of zeros": np.array([0.0, 1.0, 0.0, 2.0]), "two equal": np.array([1.0, 1.0, 3.0, 4.0]),
}  # fmt: skip


def cases() -> Any:
    for f_name, f in EIGEN.items():
        for x_name, x in SYMMETRIC.items():
            yield pytest.param(f, x, id=f"{f_name} at {x_name}")
    for f_name, (f, smooth) in SINGULAR.items():
        for x_name, x in MATRICES.items():
            if smooth(np.linalg.svdvals(x)):
                yield pytest.param(f, x, id=f"{f_name} at {x_name}")
    for f_name, f in NORMS.items():
        for x_name, x in POINTS.items():
            yield pytest.param(f, x, id=f"{f_name} at {x_name}")


def by_differences(f: Any, x: np.ndarray) -> np.ndarray:
    """The Hessian by differences of values: two steps, and what they agree on to the 4th power."""

    def second(h: float) -> np.ndarray:
        units = np.eye(x.size).reshape(x.size, *x.shape) * h
        value = lambda d: f(rg.asarray(x + d)).item()  # noqa: E731
        rows = [
            [value(a + b) - value(a - b) - value(b - a) + value(-a - b) for b in units]
            for a in units
        ]
        return np.array(rows) / (4 * h * h)

    return (4 * second(1e-3) - second(2e-3)) / 3


def hessian(f: Any, x: Any, size: int) -> np.ndarray:
    return rg.hessian(f)(x).numpy().reshape(size, size)


def check(found: np.ndarray, due: np.ndarray) -> None:
    known = ~np.isnan(found)
    assert np.isfinite(found[known]).all()
    atol = 2e-5 + 1e-8 * np.abs(due).max()
    np.testing.assert_allclose(found[known], due[known], rtol=1e-4, atol=atol)


@pytest.mark.slow(but=100)
@pytest.mark.parametrize(("f", "x"), [*cases()])
def test_second_derivatives_are_right_or_nan(f: Any, x: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        check(hessian(f, x, x.size), by_differences(f, x))


EXACT = {  # nothing is unknown here
    "trace at 2 I": (EIGEN["trace"], SYMMETRIC["2 I"]),
    "trace, turned": (EIGEN["trace"], SYMMETRIC["turned (2, 2, 5)"]),
    "nuclear norm at I": (SINGULAR["nuclear norm"][0], MATRICES["I"]),
    "nuclear norm, orthogonal": (SINGULAR["nuclear norm"][0], MATRICES["orthogonal"]),
    "nuclear norm, tall": (SINGULAR["nuclear norm"][0], MATRICES["tall"]),
    "nuclear norm, wide": (SINGULAR["nuclear norm"][0], MATRICES["wide"]),
    "2-norm over equal ones": (SINGULAR["2-norm"][0], MATRICES["diag(3, 1, 1)"]),
    "-2-norm below equal ones": (SINGULAR["-2-norm"][0], MATRICES["diag(3, 3, 1)"]),
    "log det, regular": (EIGEN["log det"], SYMMETRIC["regular"]),
    "4th powers, regular": (SINGULAR["sum of 4th powers"][0], MATRICES["regular"]),
    "norm squared, regular": (NORMS["vector_norm squared"], POINTS["a row of zeros"]),
}


@pytest.mark.parametrize("name", EXACT)
def test_second_derivatives_that_are_known_are_given(name: str) -> None:
    f, x = EXACT[name]
    found = hessian(f, x, x.size)
    assert not np.isnan(found).any()
    check(found, by_differences(f, x))


def test_directions_that_keep_the_eigenvectors_apart_are_known() -> None:
    found = hessian(EIGEN["log det"], 2.0 * np.eye(2), 4)
    np.testing.assert_allclose(found[[0, 3]], [[-0.25, 0, 0, 0], [0, 0, 0, -0.25]])
    assert np.isnan(found[1:3]).all()


LIBRARIES = {
    "log det at 2 I": (EIGEN["log det"], SYMMETRIC["2 I"]),
    "nuclear norm at I": (SINGULAR["nuclear norm"][0], MATRICES["I"]),
    "squares at a singular matrix": (SINGULAR["sum of squares"][0], MATRICES["singular"]),
    "squares at zeros, tall": (SINGULAR["sum of squares"][0], MATRICES["zeros, tall"]),
    "norm squared at 0": (NORMS["vector_norm squared"], POINTS["zeros"]),
    "rows": (NORMS["rows"], POINTS["a row of zeros"]),
    "hypot squared": (NORMS["hypot squared"], POINTS["pairs of zeros"]),
    "std squared": (NORMS["std squared"], POINTS["ones"]),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("how", ["torch", "jax", "jit"])
def test_second_derivatives_in_other_libraries_and_compiled(name: str, how: str) -> None:
    f, x = LIBRARIES[name]
    expected = hessian(f, x, x.size)
    given = rg.asarray(arrays_of("torch" if how == "torch" else "jax", x))
    function = rg.jit(rg.hessian(f)) if how == "jit" else rg.hessian(f)
    found = function(given).numpy().reshape(expected.shape)
    check(found, by_differences(f, x))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_hessian_of_a_compiled_function(name: str) -> None:
    f, x = LIBRARIES[name]
    found = hessian(rg.jit(f), rg.asarray(arrays_of("jax", x)), x.size)
    check(found, by_differences(f, x))


FORWARD = EXACT | {n: case for n, case in LIBRARIES.items() if case[0] in NORMS.values()}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_over_reverse_is_right_or_nan(name: str) -> None:
    f, x = FORWARD[name]
    columns = [rg.jvp(rg.grad(f), [x], [u])[1].numpy().ravel()
               for u in np.eye(x.size).reshape(x.size, *x.shape)]  # fmt: skip
    check(np.stack(columns, axis=1), by_differences(f, x))
    assert name not in EXACT or not np.isnan(columns).any()


def third_differences(f: Any, x: np.ndarray) -> np.ndarray:
    h = 4e-3
    units = np.eye(x.size).reshape(x.size, *x.shape) * h
    rows = [by_differences(f, x + u) - by_differences(f, x - u) for u in units]
    return np.moveaxis(np.array(rows) / (2 * h), 0, -1)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(("family", "f"), [
    *[("eigen", n) for n in EIGEN],
    *[("singular", n) for n in SINGULAR],
])  # fmt: skip
def test_third_derivatives_are_right_or_nan(family: str, f: str) -> None:
    if family == "eigen":
        function, points = EIGEN[f], [2.0 * np.eye(2), np.diag([1.0, 3.0])]
    else:
        (function, smooth), points = SINGULAR[f], [np.eye(2), np.diag([2.0, 0.0])]
        points = [x for x in points if smooth(np.linalg.svdvals(x))]
    for x in points:
        with np.errstate(all="ignore"):
            found = rg.jacobian(rg.hessian(function))(x).numpy().reshape([4] * 3)
            due = third_differences(function, x)
        known = ~np.isnan(found)
        np.testing.assert_allclose(found[known], due[known], rtol=1e-2, atol=1e-2)


def test_first_derivatives_and_forward_mode_are_as_the_conventions_say() -> None:
    zeros, ones = np.zeros(2), np.ones(2)
    for f in (linalg.vector_norm, lambda x: rg.hypot(x[0], x[1]), rg.std):
        assert rg.grad(f)(zeros).tolist() == [0, 0]
        assert rg.jvp(f, [zeros], [ones])[1].item() == 0
        assert rg.hessian(f)(zeros).tolist() == [[0, 0], [0, 0]]
        assert rg.grad(lambda x, f=f: f(x) ** 2)(zeros).tolist() == [0, 0]
    direction = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert rg.jvp(EIGEN["log det"], [2.0 * np.eye(2)], [direction])[1].item() == 0


def test_what_does_not_depend_on_the_choice_of_vectors_has_a_gradient_at_equal_singular_values():
    def polar(x: Any) -> Any:
        u, _, vh = linalg.svd(x, full_matrices=False)
        return rg.sum(linalg.matmul(u, vh) * np.array([[0.3, 1.0], [-2.0, 0.7]]))

    found = rg.grad(polar)(np.eye(2)).numpy()
    h = 1e-5
    due = [(polar(np.eye(2) + h * e) - polar(np.eye(2) - h * e)).item() / (2 * h)
           for e in np.eye(4).reshape(4, 2, 2)]  # fmt: skip
    np.testing.assert_allclose(found.ravel(), due, atol=1e-8)
