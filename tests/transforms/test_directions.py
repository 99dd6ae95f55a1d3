"""jacfwd, jacrev, linearize, hvp against JAX; rules in force count, or raise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError, ShapeError

X = np.array([0.3, -0.7, 1.1], np.float32)
A = np.array([[1.0, 2.0, -1.0], [0.5, -2.0, 3.0]], np.float32)


def close(a, b):
    np.testing.assert_allclose(np.asarray(a.numpy()), b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("name", ["jacfwd", "jacrev"])
def test_jacobians_are_those_of_jax(name, jitted):
    found = getattr(rg, name)(lambda x, a: {"y": rg.sin(a @ x), "z": x[0] * a}, argnums=(0, 1))
    expected = getattr(jax, name)(
        lambda x, a: {"y": jnp.sin(a @ x), "z": x[0] * a}, argnums=(0, 1)
    )(X, A)
    answer = (rg.jit(found) if jitted else found)(rg.asarray(X), rg.asarray(A))
    for key, parts in expected.items():
        for got, due in zip(answer[key], parts, strict=True):
            assert got.shape == due.shape
            close(got, due)


def test_second_order_aux_and_what_is_not_connected():
    x = rg.asarray(X)
    expected = jax.jacfwd(jax.jacrev(lambda x: jnp.sin(x) * x[0]))(X)
    close(rg.jacfwd(rg.jacrev(lambda x: rg.sin(x) * x[0]))(x), expected)
    close(rg.jacrev(rg.jacfwd(lambda x: rg.sin(x) * x[0]))(x), expected)
    jacobian, aux = rg.jacfwd(lambda x: (x * x, "aux"), has_aux=True)(x)
    close(jacobian, np.diag(2 * X))
    assert aux == "aux"
    close(rg.jacfwd(lambda x: rg.ones(2))(x), np.zeros((2, 3)))
    assert rg.jacfwd(lambda x: x * 2)(rg.zeros([0])).shape == (0, 0)


@pytest.mark.parametrize("jitted", [False, True])
def test_linearize_is_that_of_jax(jitted):
    def ours(x, dx):
        y, f_jvp = rg.linearize(lambda x: (rg.sin(x) * x[0], x.sum()), x)
        return y, f_jvp(dx), f_jvp(2 * dx)

    y, f_jvp = jax.linearize(lambda x: (jnp.sin(x) * x[0], x.sum()), X)
    answer = (rg.jit(ours) if jitted else ours)(rg.asarray(X), rg.asarray(X + 1))
    for got, due in zip(answer, (y, f_jvp(X + 1), f_jvp(2 * (X + 1))), strict=True):
        close(got[0], due[0])
        close(got[1], due[1])


@pytest.mark.parametrize("jitted", [False, True])
def test_hvp_is_the_hessian_of_jax_times_the_vector(jitted):
    def product(x, dx):
        return rg.hvp(lambda x: (rg.sin(x) * x[0]).sum(), [x], [dx])[0]

    hessian = jax.hessian(lambda x: (jnp.sin(x) * x[0]).sum())(X)
    product = rg.jit(product) if jitted else product
    close(product(rg.asarray(X), rg.asarray(X + 1)), hessian @ (X + 1))


def test_rules_in_force_count_or_raise():
    x = rg.asarray(X)
    triple = rg.gradient_override_map({"Sin": lambda op, dy: 3 * dy * op.inputs[0]})
    with triple:
        close(rg.jacfwd(rg.sin)(x), np.diag(3 * X))
        close(rg.jacrev(rg.sin)(x), np.diag(3 * X))
        close(rg.linearize(rg.sin, x)[1](X), 3 * X * X)
        close(rg.hvp(lambda x: rg.sin(x).sum(), [x], [X])[0], 3 * X)
    with rg.gradient_override_map({"Sin": lambda op, dy: rg.abs(dy)}):
        for call in (
            lambda: rg.jacfwd(rg.sin)(x),
            lambda: rg.linearize(rg.sin, x)[1](X),
            lambda: rg.hvp(lambda x: rg.sin(x * x).sum() ** 2, [x], [X]),
        ):
            with pytest.raises(GradientError, match="Abs"):
                call()


def test_errors():
    with pytest.raises(ShapeError, match=r"hvp\(f.* must return a scalar"):
        rg.hvp(lambda x: x, [rg.asarray(X)], [X])
    with pytest.raises(ArgumentError, match="xs and dxs are lists"):
        rg.hvp(rg.sin, rg.asarray(X), X)
    with pytest.raises(ArgumentError, match="nothing to differentiate by"):
        rg.linearize(lambda: 1)
    with pytest.raises(ShapeError, match="dxs of a linearized function"):
        rg.linearize(rg.sin, rg.asarray(X))[1](A)
