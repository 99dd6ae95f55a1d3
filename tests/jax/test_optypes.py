"""Every op type that JAX has: it is found, and a rule has the attributes and JAX's own gradient.

And `builtin` and `forward` in rules: three times JAX's own derivative, in every way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import regrad as rg
from regrad.errors import GradientError, RuleError, UnusedOverrideWarning
from regrad.jax.optypes import TABLE
from tests.helpers.hosts import scaled, scaled_by_regrad
from tests.helpers.jax_model import M, own_vjp, seven, slopes

OTHER = {
    "AddV2": lambda x: x + M, "Sub": lambda x: x - M, "Mul": lambda x: x * M,
    "RealDiv": lambda x: x / M, "Maximum": lambda x: jnp.maximum(x, M), "Pow": lambda x: x**M,
    "Minimum": lambda x: jnp.minimum(x, M), "Atan2": lambda x: jnp.arctan2(x, M),
    "Sum": lambda x: jnp.sum(x, axis=1), "Max": lambda x: jnp.max(x, axis=0), "Min": jnp.min,
    "Prod": jnp.prod, "Cumsum": lambda x: jnp.cumsum(x, 1), "Cumprod": lambda x: jnp.cumprod(x, 0),
    "MatMul": lambda x: x @ M.T, "StopGradient": lax.stop_gradient, "Neg": lambda x: -x,
    "Erf": lax.erf, "Erfc": lax.erfc, "Erfinv": lax.erf_inv, "Lgamma": lax.lgamma,
    "Digamma": lax.digamma, "Rsqrt": lax.rsqrt, "Sigmoid": jax.nn.sigmoid, "Trunc": jnp.trunc,
    "SelectV2": lambda x: jnp.where(x > 0.5, x, -x), "Step": lambda x: jnp.heaviside(x, 0.5),
    "Conv2D": lambda x: convolved(x, "NHWC", "HWIO"),
    "Conv3D": lambda x: convolved(x, "NDHWC", "DHWIO"),
    "MaxPool": lambda x: pooled(x, 2, -jnp.inf, lax.max),
    "MaxPool3D": lambda x: pooled(x, 3, -jnp.inf, lax.max),
    "AvgPool": lambda x: pooled(x, 2, 0.0, lax.add) / 2,
    "AvgPool3D": lambda x: pooled(x, 3, 0.0, lax.add) / 2,
    "Reciprocal": jnp.reciprocal, "LogSigmoid": jax.nn.log_sigmoid, "Softsign": jax.nn.soft_sign,
    "LeakyRelu": jax.nn.leaky_relu, "LogSoftmax": jax.nn.log_softmax, "Acosh": lambda x:
    jnp.arccosh(x), "ClipByValue": lambda x: jnp.clip(x, 0.2, 0.5), "Square": jnp.square,
    "Sinc": jnp.sinc, "NanToNum": lambda x: jnp.nan_to_num(x, nan=1.0),
    "MatrixExponential": lambda x: jax.scipy.linalg.expm(x[..., None, None]),
    "RFFT": lambda x: jnp.fft.rfft(x, norm="forward"),
    **{n: getattr(jnp, "arc" + n[1:].lower()) for n in ("Asin", "Acos", "Atan", "Asinh", "Atanh")},
}  # fmt: skip
DUE = {"SelectV2": 0}  # 7 - 7
COMPLEX = {"Real": jnp.real, "Imag": jnp.imag, "Conj": jnp.conj, "FFT": jnp.fft.fft2,
           "IFFT": jnp.fft.ifft, "IRFFT": jnp.fft.irfft}  # fmt: skip


def images(x, n):
    return x.reshape(1, *([1] * (n - 2)), *x.shape, 1)


def convolved(x, *layout):
    n = len(layout[0]) - 2
    w, layout = jnp.ones((1,) * (n + 2)) * 0.3, (*layout, layout[0])
    return lax.conv_general_dilated(images(x, n), w, (1,) * n, "SAME", dimension_numbers=layout)


def pooled(x, n, start, by):
    return lax.reduce_window(images(x, n), start, by, (1,) * n + (2, 1), (1,) * (n + 2), "SAME")


def scaled_dy(dy, builtin):
    return builtin(jnp.multiply(3.0, dy))


SCALED = [scaled, scaled_dy, scaled_by_regrad]


def weighted(f):
    def loss(*xs):
        y = f(*xs)
        return jnp.real((y * jnp.linspace(1, 2, y.size).reshape(y.shape)).sum())

    return loss


@pytest.mark.slow(but=2)
@pytest.mark.versions
@pytest.mark.parametrize("rule", [seven, *SCALED])
@pytest.mark.parametrize("op_type", TABLE)
def test_every_op_type(op_type, rule):
    f = OTHER.get(op_type) or COMPLEX.get(op_type)
    f = f or getattr(jax.nn, op_type.lower(), None) or getattr(jnp, op_type.lower())
    x = M * (1 + 1j) if op_type in COMPLEX else M
    ours = rg.jax.override(f, {op_type: rule})
    np.testing.assert_array_equal(ours(x), f(x))
    expected = 3 * slopes(weighted(f), x) if rule is not seven else x * 0 + DUE.get(op_type, 7)
    np.testing.assert_allclose(slopes(weighted(ours), x), expected, rtol=1e-12, atol=1e-12)
    ours.assert_fired(op_type)


@pytest.mark.slow
def test_transforms_have_the_attributes_of_the_op():
    seen = []

    def rule(dy, x, axes, norm):
        seen.append((axes, norm))
        return jnp.fft.ifft(dy, norm="forward")  # the adjoint

    x, f = M * (1 + 1j), lambda x: jnp.fft.fft(x, norm="ortho")
    size = lambda g: lambda x: jnp.abs(g(x)) ** 2  # noqa: E731
    found = slopes(size(rg.jax.override(f, {"FFT": rule})), x)
    np.testing.assert_allclose(found, slopes(size(f), x), rtol=1e-6)
    assert set(seen) == {((-1,), "backward")}
    seen.clear()

    def inverse(dy, x, n, axis, norm):
        seen.append((n, axis, norm))
        return jnp.zeros_like(x)

    assert not slopes(rg.jax.override(lambda x: jnp.fft.irfft(x, n=5), {"IRFFT": inverse}), x).any()
    assert set(seen) == {(5, -1, "backward")}


@pytest.mark.parametrize(
    ("f", "key"), [(jnp.fft.rfft2, "RFFT"), (lambda x: jnp.fft.irfft2(x + 0j), "IRFFT")]
)
def test_transforms_of_real_numbers_along_several_axes_are_refused(f, key):
    with pytest.raises(GradientError, match=r"several axes at once.* use the key 'fft'"):
        rg.jax.override(f, {key: seven})(M)


def test_squares_and_reciprocals_written_as_powers():
    for op_type, f in {"Square": lambda x: x**2, "Reciprocal": lambda x: x**-1}.items():
        found = slopes(rg.jax.override(f, {op_type: seven}), M)
        np.testing.assert_array_equal(found, np.full_like(M, 7))
    with pytest.warns(UnusedOverrideWarning):
        rg.jax.override(lambda x: x**3, {"Square": seven})(M)


# -- `builtin` and `forward`, in every way ---------------------------------------------------------


def gradients(f, xs, order=1):
    for _ in range(order):
        one = jax.grad(weighted(f), tuple(range(len(xs))))
        f = lambda *xs, one=one: jnp.concatenate([dx.ravel() for dx in one(*xs)])  # noqa: E731
    return one(*xs)


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


@own_vjp(lambda dy, v: (dy / (1 + abs(v)),))
def spike(v):
    return (v > 0).astype(v.dtype)


@jax.jit
def both(a, b):
    return a * jnp.sin(b)


def pool(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4


A, B, SQUARE = numbers(3), numbers(3, seed=1), numbers(2, 3)
CASES = {
    "a primitive": ("sin", jnp.sin, [A]),
    "a product": ("Mul", jnp.multiply, [A, B]),
    "a number": ("Mul", lambda x: x * 2.0, [A]),
    "another form": ("MatMul", lambda a, b: jnp.einsum("ij,kj->ik", a, b), [SQUARE, SQUARE]),
    "several outputs": ("sort", lambda a, b: lax.sort((a, b))[1], [A, B]),
    "several inputs": ("concatenate", lambda a, b: jnp.concatenate([a, b]), [A, B]),
    "attributes": ("dynamic_slice", lambda x: lax.dynamic_slice(x, (1,), (2,)), [A]),
    "a derivative of its own": (spike, spike, [A]),
    "a compiled function": (both, both, [A, B]),
    "the rule's own scale": ("AvgPool", pool, [numbers(1, 4, 4, 2)]),
}
SMOOTH = ("a primitive", "a product", "another form", "a compiled function")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rule", SCALED)
@pytest.mark.parametrize("name", CASES)
def test_three_times_jaxs_gradient(name, rule):
    key, f, xs = CASES[name]
    if rule is scaled_dy and name == "several outputs":
        rule = lambda dy, builtin: builtin([3 * d for d in dy])  # noqa: E731
    ours = rg.jax.override(f, {key: rule})
    expected = [3 * dx for dx in gradients(f, xs)]
    close(gradients(ours, xs), expected)
    close(jax.jit(lambda *xs: gradients(ours, xs))(*xs), expected)
    close(gradients(jax.checkpoint(ours), xs), expected)
    stacked = [jnp.stack([x, 2 * x]) for x in xs]
    close([dx[0] for dx in jax.vmap(lambda *xs: gradients(ours, xs))(*stacked)], expected)
    for order in (2, 3) if name in SMOOTH else ():
        tripled = lambda *xs: 3 * f(*xs) - lax.stop_gradient(2 * f(*xs))  # noqa: E731
        close(gradients(ours, xs, order), gradients(tripled, xs, order))


def test_forward_mode_transposes_it():
    ours = rg.jax.override(jnp.tanh, {"Tanh": scaled})
    got = jax.jvp(ours, (A,), (B,))[1]
    np.testing.assert_allclose(got, 3 * jax.jvp(jnp.tanh, (A,), (B,))[1], rtol=1e-12)


def test_forward_of_two_inputs_is_the_op():
    times = {"Mul": lambda dy, a, b, forward: (dy * forward(a, b + 1), None)}
    np.testing.assert_allclose(slopes(rg.jax.override(lambda x: x * 2.0, times), A), 3 * A, 1e-12)


def test_the_builtin_of_a_function_is_a_value():
    ours = rg.jax.override(spike, {spike: rg.rules.builtin(spike)})
    close(gradients(ours, [A]), gradients(spike, [A]))
    ours.assert_fired()
    with pytest.raises(RuleError, match=r"builtin\(spike\) is not the gradient of 'both'"):
        rg.jax.override(both, {both: rg.rules.builtin(spike)})
