"""Overrides in JAX programs: op types, rules, what is refused, and what the report says."""

from __future__ import annotations

import functools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import regrad as rg
from regrad.core.registry import RULES
from regrad.errors import (
    ArgumentError,
    GradientError,
    NotFiredError,
    RuleError,
    UnusedOverrideWarning,
)
from regrad.jax.optypes import TABLE
from tests.helpers import jax_model
from tests.helpers.jax_model import M, model, seven
from tests.helpers.jax_places import X
from tests.helpers.sharded_checks import Compilations

# -- the table -------------------------------------------------------------------------------------

OTHER = {
    "AddV2": lambda x: x + M, "Sub": lambda x: x - M, "Mul": lambda x: x * M,
    "RealDiv": lambda x: x / M, "Maximum": lambda x: jnp.maximum(x, M), "Pow": lambda x: x**M,
    "Minimum": lambda x: jnp.minimum(x, M), "Atan2": lambda x: jnp.arctan2(x, M),
    "Sum": lambda x: jnp.sum(x, axis=1), "Max": lambda x: jnp.max(x, axis=0), "Min": jnp.min,
    "Prod": jnp.prod, "Cumsum": lambda x: jnp.cumsum(x, 1), "Cumprod": lambda x: jnp.cumprod(x, 0),
    "MatMul": lambda x: x @ M.T, "StopGradient": lax.stop_gradient, "Neg": lambda x: -x,
    "Erf": lax.erf, "Erfc": lax.erfc, "Erfinv": lax.erf_inv, "Lgamma": lax.lgamma,
    "Digamma": lax.digamma, "Rsqrt": lax.rsqrt, "Sigmoid": jax.nn.sigmoid, "Trunc": jnp.trunc,
    "SelectV2": lambda x: jnp.where(x > 0.5, x, -x),
    "Conv2D": lambda x: convolved(x, 2), "Conv3D": lambda x: convolved(x, 3),
    "MaxPool": lambda x: pooled(x, 2), "MaxPool3D": lambda x: pooled(x, 3),
    "AvgPool": lambda x: averaged(x, 2), "AvgPool3D": lambda x: averaged(x, 3),
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


def convolved(x, n):
    layout = ("NHWC", "HWIO", "NHWC") if n == 2 else ("NDHWC", "DHWIO", "NDHWC")
    strides = (1,) * n
    w = jnp.ones((*strides, 1, 1)) * 0.3
    return lax.conv_general_dilated(images(x, n), w, strides, "SAME", dimension_numbers=layout)


def pooled(x, n):
    window = (1,) * n + (2, 1)
    return lax.reduce_window(images(x, n), -jnp.inf, lax.max, window, (1,) * (n + 2), "SAME")


def averaged(x, n):
    window = (1,) * n + (2, 1)
    return lax.reduce_window(images(x, n), 0.0, lax.add, window, (1,) * (n + 2), "SAME") / 2


@pytest.mark.versions
@pytest.mark.parametrize("op_type", TABLE)
def test_every_op_type_of_the_table_is_found(op_type):
    f = OTHER.get(op_type) or COMPLEX.get(op_type)
    f = f or getattr(jax.nn, op_type.lower(), None) or getattr(jnp, op_type.lower())
    x = M * (1 + 1j) if op_type in COMPLEX else M
    ours = rg.jax.override(f, {op_type: seven})
    np.testing.assert_array_equal(ours(x), f(x))
    g = jax.grad(lambda x: jnp.sum(ours(x).real))(x)
    np.testing.assert_array_equal(g, np.full_like(x, DUE.get(op_type, 7)))
    ours.assert_fired(op_type)


def test_transforms_have_the_attributes_of_the_op():
    seen = []

    def rule(dy, x, axes, norm):
        seen.append((axes, norm))
        return jnp.fft.ifft(dy, norm="forward")  # the adjoint

    x = M * (1 + 1j)
    ours = rg.jax.override(lambda x: jnp.fft.fft(x, norm="ortho"), {"FFT": rule})
    f = lambda g: lambda x: jnp.sum(jnp.abs(g(x)) ** 2)  # noqa: E731
    due = jax.grad(f(lambda x: jnp.fft.fft(x, norm="ortho")))(x)
    np.testing.assert_allclose(jax.grad(f(ours))(x), due, rtol=1e-6)
    assert set(seen) == {((-1,), "backward")}
    seen.clear()

    def inverse(dy, x, n, axis, norm):
        seen.append((n, axis, norm))
        return jnp.zeros_like(x)

    ours = rg.jax.override(lambda x: jnp.fft.irfft(x, n=5), {"IRFFT": inverse})
    assert (jax.grad(lambda x: ours(x).sum())(x) == 0).all()
    assert set(seen) == {(5, -1, "backward")}


def test_transforms_of_real_numbers_along_several_axes_are_refused():
    for f, op_type in ((jnp.fft.rfft2, "RFFT"), (lambda x: jnp.fft.irfft2(x + 0j), "IRFFT")):
        ours = rg.jax.override(f, {op_type: seven})
        with pytest.raises(GradientError, match=r"several axes at once.* use the key 'fft'"):
            ours(M)


def test_squares_and_reciprocals_written_as_powers():
    for op_type, f in {"Square": lambda x: x**2, "Reciprocal": lambda x: x**-1}.items():
        g = jax.grad(lambda x, f=f, t=op_type: rg.jax.override(f, {t: seven})(x).sum())(M)
        np.testing.assert_array_equal(g, np.full_like(M, 7))
    with pytest.warns(UnusedOverrideWarning):
        rg.jax.override(lambda x: x**3, {"Square": seven})(M)


def test_attributes_and_outputs_under_their_names():
    def rule(dy, x, y, axis, keepdims):
        assert (axis, keepdims) == ((1,), False)
        return jnp.broadcast_to(dy[:, None] * y[:, None], x.shape)

    f = rg.jax.override(lambda x: jnp.sum(x, axis=1), {"Sum": rule})
    g = jax.grad(lambda x: f(x).sum())(M)
    np.testing.assert_allclose(g, jnp.broadcast_to(M.sum(1)[:, None], M.shape))


# -- rules -----------------------------------------------------------------------------------------


def test_all_forms_of_rules():
    RULES.setdefault("JaxTestTriple", lambda op, grad: grad * 3)
    due = 3 * (1 - np.tanh(X) ** 2) ** 0
    for rule in (
        lambda dy: dy * 3,
        lambda dy, x: rg.identity(dy) * 3,
        lambda op, grad: grad * 3,
        "JaxTestTriple",
    ):
        f = rg.jax.override(lambda x: jnp.tanh(x).sum(), {"Tanh": rule})
        np.testing.assert_allclose(jax.grad(f)(X), due)
    f = rg.jax.override(lambda x: jnp.tanh(x).sum(), {"Tanh": "Identity"})
    np.testing.assert_array_equal(jax.grad(f)(X), np.ones(3))
    for rule in (rg.rules.no_gradient, lambda dy: [None], lambda op, grad: None):
        f = rg.jax.override(lambda x: jnp.tanh(x).sum(), {"tanh": rule})
        np.testing.assert_array_equal(jax.grad(f)(X), np.zeros(3))
        f.assert_fired()
    for rule in (lambda dy: None, lambda dy, x: print(end="")):
        f = rg.jax.override(lambda x: jnp.tanh(x).sum(), {"tanh": rule})
        with pytest.raises(RuleError, match=r"'<lambda>' .* returned None, expected a Tensor"):
            jax.grad(f)(X)


def test_a_rule_in_regrads_words_is_differentiated_by_regrad():
    odd = rg.custom_grad(lambda x: (rg.square(x), lambda dy: dy * 100))
    f = rg.jax.override(lambda x: jnp.tanh(x).sum(), {"Tanh": lambda dy, x: dy * odd(x)})
    np.testing.assert_allclose(jax.grad(f)(X), X * X)
    for second in (jax.hessian(f), jax.jacrev(jax.jacrev(f)), jax.jit(jax.jacfwd(jax.jacfwd(f)))):
        np.testing.assert_allclose(second(X), 100 * np.eye(3))


def test_complex_gradients_are_regrads():
    z = jnp.array([0.3 + 0.5j, -1.0 + 2j])
    seen = []
    f = rg.jax.override(lambda z: jnp.sin(z), {"Sin": lambda dy: seen.append(dy) or dy * 1j})
    (dz,) = jax.vjp(f, z)[1](jnp.array([1 + 2j, 3 + 0j]))
    np.testing.assert_allclose(seen[-1], [1 - 2j, 3])  # the conjugate of JAX's
    np.testing.assert_allclose(dz, np.conj(np.array([1 - 2j, 3]) * 1j))
    dy = np.array([1 - 2j, 3 + 0j])
    with rg.gradient_override_map({"Sin": lambda dy: dy * 1j}):
        due = rg.grad(rg.sin)(rg.tensor(np.asarray(z)), rg.tensor(dy))
    np.testing.assert_allclose(np.conj(dz), due.numpy())


# -- where no rule can be put ----------------------------------------------------------------------


@jax.custom_vjp
def bent(x):
    return jnp.sin(x)


bent.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy * x,))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("key", ["Relu", "Tanh", bent])
def test_a_function_that_differentiates_itself_is_refused(key, wrap):
    def loss(x):
        return jnp.sum(jnp.tanh(jax.nn.relu(x)) + bent(x))

    f = rg.jax.override(lambda x: jax.grad(wrap(loss))(x).sum(), {key: seven})
    with pytest.raises(GradientError, match="Put the override inside"):
        f(X)
    penalty = lambda x: jax.grad(lambda x: jnp.sum(x**3))(x).sum() + loss(x)  # noqa: E731
    f = rg.jax.override(penalty, {key: seven})
    jax.grad(f)(X)
    f.assert_fired()


def test_examples_of_a_vmap_inside_never_mix():
    def f(xs):
        return jnp.sum(jax.vmap(model)(xs))

    xs = jnp.stack([X, X + 1])
    for rule in (
        lambda dy: dy / jnp.linalg.norm(dy),
        lambda dy: dy[::-1],
        lambda dy: dy * jnp.arange(3.0),
        lambda dy, x: dy * rg.mean(x),
        lambda dy: jnp.cumsum(dy, axis=-1),
    ):
        outside = rg.jax.override(model, {"Relu": rule})
        due = jnp.stack([jax.grad(outside)(x) for x in xs])
        got = jax.grad(lambda xs, o=outside: jnp.sum(jax.vmap(o)(xs)))(xs)
        np.testing.assert_allclose(got, due)
        np.testing.assert_allclose(jax.grad(rg.jax.override(f, {"Relu": rule}))(xs), due)
    fine = rg.jax.override(f, {"Relu": rg.rules.guided_relu})
    np.testing.assert_allclose(jax.grad(fine)(xs), jax.vmap(jax.grad(model))(xs))


def test_bodies_that_jax_does_not_open():
    from jax import export
    from jax.experimental import pallas as pl

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.tanh(x_ref[...])

    def f(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)

    with pytest.raises(GradientError, match="pallas_call"):
        rg.jax.override(f, {"Tanh": seven})(X)
    with pytest.warns(UnusedOverrideWarning):
        rg.jax.override(f, {"Sin": seven})(X)
    again = export.export(jax.jit(jnp.tanh))(jax.ShapeDtypeStruct((3,), X.dtype))
    with pytest.raises(GradientError, match="exported"):
        rg.jax.override(lambda x: again.call(x), {"Tanh": seven})(X)
    root = lambda x: lax.custom_root(lambda y: jnp.tanh(y) - x, x, lambda f, y: y, lambda f, y: y)  # noqa: E731
    with pytest.raises(GradientError, match="custom_root"):
        rg.jax.override(lambda x: root(x) * jnp.tanh(x), {"Tanh": seven})(X)
    ours = rg.jax.override(
        lambda x: root(x) * jnp.tanh(x), {"Tanh": lambda dy: dy}, keep=["_custom_root"]
    )
    np.testing.assert_allclose(ours(X), root(X) * jnp.tanh(X))


def test_a_primitive_with_a_derivative_and_a_body_of_its_own_is_refused_by_name():
    """As JAX 0.11 and later make of `custom_root` and others: `call_hi_primitive`."""
    primitive = Primitive("call_hi_primitive")
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    theirs = type("CustomRoot", (), {"__module__": "jax.lax", "params": {"f": abs}})()

    def f(x):
        return jnp.tanh(primitive.bind(x, _prim=theirs))

    with pytest.raises(GradientError, match=r"calls jax.lax.custom_root .*keep=\['_custom_root'\]"):
        rg.jax.override(f, {"Tanh": seven})(X)
    kept = rg.jax.override(f, {"Tanh": seven}, keep=["_custom_root"])
    np.testing.assert_array_equal(kept(X), f(X))


def test_linear_transposition_past_a_rule_is_refused():
    f = rg.jax.override(lambda x: x * 3, {"Mul": seven})
    with pytest.raises(GradientError, match=r"Use jax\.vjp"):
        jax.linear_transpose(f, X)(X)


def test_what_a_function_closes_over():
    @jax.custom_jvp
    def scaled(x):
        return x * 2

    scaled.defjvps(lambda dx, y, x: dx)

    def f(w):
        return rg.jax.override(lambda x: scaled(x * w) + w, {scaled: lambda dy: dy * 10})(X).sum()

    np.testing.assert_allclose(jax.grad(f)(3.0), 10 * X.sum() + 3)

    def closing(w):
        def twice(x):
            return x * w

        keys = [jax.jit(twice), jax.custom_jvp(twice), jax.custom_vjp(twice)]
        keys[1].defjvps(lambda dx, y, x: dx)
        keys[2].defvjp(lambda x: (x * w, None), lambda _, dy: (dy,))
        return keys

    for i in range(3):

        def g(w, i=i):
            key = closing(w)[i]
            return rg.jax.override(lambda x: key(x), {key: lambda dy, x: dy * x})(X).sum()

        np.testing.assert_allclose(jax.jit(g)(3.0), 3 * X.sum())
        with pytest.raises(GradientError, match="closes over"):
            jax.grad(g)(3.0)
    inner = rg.jax.override(lambda x, w: jax.jit(lambda x: jnp.tanh(x) * w)(x), {"Tanh": seven})
    np.testing.assert_allclose(jax.grad(lambda w: inner(X, w).sum())(2.0), np.tanh(X).sum())


# -- what stays as it was --------------------------------------------------------------------------


def test_values_are_the_same_to_the_last_bit():
    def f(x):
        y = lax.scan(lambda c, _: (jnp.tanh(c) * 1.1, jax.nn.silu(c)), x, None, length=5)
        return jax.tree_util.tree_leaves((y, jax.nn.relu(x), jnp.round(x * 3), x @ M.T))

    rules = dict.fromkeys(["Tanh", "Silu", "Relu", "Round", "Mul", "MatMul"], seven)
    for run in (lambda f: f, jax.jit):
        for a, b in zip(run(rg.jax.override(f, rules))(X), run(f)(X), strict=True):
            np.testing.assert_array_equal(a, b)


def test_programs_inside_stay_and_nothing_is_compiled_again():
    @jax.jit
    def untouched(x):
        return jnp.cos(x) * 2

    @jax.jit
    def touched(x):
        return jnp.tanh(x) * 2

    f = rg.jax.override(lambda x: untouched(x) + touched(x), {"Tanh": seven})
    g = rg.jax.override(lambda x: untouched(x), {"Tanh": seven})
    closed = jax.make_jaxpr(lambda x: untouched(x))(X)
    assert g._surgery.program(closed)[0] is closed
    untouched(X), touched(X), f(X), jax.grad(lambda x: f(x).sum())(X)
    compiled = Compilations()
    jax.jit(lambda x: x * 5.5)(X)
    assert compiled  # it can hear
    compiled.clear()
    for _ in range(3):
        f(X), untouched(X), touched(X)
        jax.grad(lambda x: f(x).sum())(X)
    assert compiled == []


def test_arguments_are_what_they_were():
    def f(x, n, mode, *, table, scale=1.0):
        assert (type(n), mode, type(table), scale) == (int, "up", np.ndarray, 2.0)
        for _ in range(n):
            x = jnp.tanh(x) * table[0] * scale
        return {"x": x, "n": n, "none": None, "f": jnp.tanh}

    ours = rg.jax.override(f, {"Tanh": lambda dy: dy})
    y = ours(X, 2, "up", table=np.array([2.0]), scale=2.0)
    assert (y["n"], y["none"], y["f"]) == (2, None, jnp.tanh)
    g = jax.grad(lambda x: ours(x, 2, "up", table=np.array([2.0]), scale=2.0)["x"].sum())(X)
    np.testing.assert_allclose(g, np.full(3, 16.0))


def test_wrappers_cannot_reach_past_an_override():
    class Wrapper:
        def __init__(self, f):
            self.f = f
            functools.update_wrapper(self, f)

    ours = rg.jax.override(model, {"Relu": seven})
    assert Wrapper(ours).f is ours
    assert not hasattr(ours, "__wrapped__")
    assert ours.__name__ == "model"
    jax.jit(ours)(x=X)


def test_programs_are_not_kept_alive():
    ours = rg.jax.override(model, {"Relu": seven})
    closed = jax.make_jaxpr(lambda x: model(x))(X)
    ours._surgery.program(closed)
    gone = weakref.ref(closed)
    del closed
    assert gone() is None


# -- scopes inside scopes --------------------------------------------------------------------------


def test_the_inner_rule_wins():
    inner = rg.jax.override(lambda x: jnp.tanh(x) * jnp.sin(x), {"Tanh": lambda dy: dy * 2})
    outer = rg.jax.override(
        lambda x: jnp.sum(inner(x)), {"Tanh": lambda dy: dy * 5, "Sin": lambda dy: dy * 7}
    )
    np.testing.assert_allclose(jax.grad(outer)(X), 2 * np.sin(X) + 7 * np.tanh(X))
    outer.assert_fired("Sin")
    with pytest.raises(NotFiredError, match="no gradient passed"):
        outer.assert_fired("Tanh")
    assert "kept its own rule" in repr(outer)


def test_custom_grad_keeps_its_rule():
    f = rg.jax.custom_grad(lambda x: (jnp.tanh(x), lambda dy: dy * 2))
    ours = rg.jax.override(lambda x: f(x).sum(), {"Tanh": lambda dy: dy * 5})
    np.testing.assert_allclose(jax.grad(ours)(X), np.full(3, 2.0))
    assert "custom_grad" in str(ours.table())


# -- the report ------------------------------------------------------------------------------------


def test_the_report():
    ours = rg.jax.override(model, {"Relu": lambda dy: dy, "Tanh": lambda dy: dy})
    with pytest.raises(NotFiredError, match="no call of the function"):
        ours.assert_fired("Relu")
    ours(X)
    with pytest.raises(NotFiredError, match="no gradient passed"):
        ours.assert_fired("Relu")
    jax.grad(ours)(X)
    ours.assert_fired("Relu", jax.nn.relu, "Tanh")
    hit = ours.hits[0]
    assert (hit.op_type, hit.count, hit.ran, list(hit.shapes)) == ("Relu", 2, 1, ["3"])
    assert hit.where == f"{jax_model.__file__}:{model.__code__.co_firstlineno + 1}"
    assert [row[0] for row in ours.untouched().rows] == ["add", "integer_pow", "max", "reduce_sum"]
    assert "Relu <- <lambda>: 2 created, rule ran 1 times" in repr(ours)
    assert [row[:4] for row in ours.table().rows] == [
        ("Relu", "<lambda>", "2", "1"),
        ("Tanh", "<lambda>", "2", "1"),
    ]
    with pytest.raises(ArgumentError, match="does not override"):
        ours.assert_fired("Sin")


def test_nothing_matched():
    with pytest.warns(UnusedOverrideWarning, match="'Sin'"):
        rg.jax.override(model, {"Sin": seven})(X)
    rg.jax.override(model, {})(X)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_other_functions_that_are_differentiated_inside_do_no_harm(wrap):
    inner = wrap(lambda x: jnp.sum(jax.nn.relu(x) ** 2))

    @jax.custom_jvp
    def cubed(x):
        return x**3

    cubed.defjvps(lambda dx, y, x: dx * 3 * x * x)
    for key in (bent, cubed):
        f = rg.jax.override(lambda x, k=key: jax.grad(inner)(x).sum() + k(x).sum(), {key: seven})
        np.testing.assert_allclose(jax.grad(f)(X), 7 + 2 * (X > 0))


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_constant_of_the_program_in_a_loop(around):
    """It is an operand of the rule's, and no value of the trace in which the rule was put there."""

    def f(w, x):
        step = jax.checkpoint(lambda h, v: (jnp.tanh(h * v * 2.0), None))
        return jax.lax.scan(step, x, w)[0].sum()

    def product(dy, a, b):
        return dy * b, dy * a

    w, x = jnp.linspace(0.1, 0.6, 6).reshape(2, 3), jnp.ones(3)
    found = around(jax.grad(rg.jax.override(f, {"Mul": product})))(w, x)
    np.testing.assert_allclose(found, jax.grad(f)(w, x), rtol=1e-6)


CONSTANT = jnp.array([2.0, 2.0, 2.0])


@pytest.mark.versions
@pytest.mark.parametrize(
    "written", [lambda dy: dy * 3, lambda dy: rg.multiply(dy, CONSTANT), jnp.sin, rg.sin]
)
def test_a_rule_runs_once_for_each_gradient_that_arrives(written):
    ran = []

    def rule(dy):
        ran.append(1)
        return written(dy)

    x = jnp.ones(3)
    ours = rg.jax.override(lambda x: jnp.sum(jnp.sign(x)), {"Sign": rule})
    for turn in (1, 2, 3):
        jax.grad(ours)(x)
        assert len(ran) == turn == sum(hit.ran for hit in ours.hits)


def test_a_rule_of_jax_shows_its_own_error():
    def rule(dy, x):
        return jnp.nothing_of_this_name(dy)

    ours = rg.jax.override(lambda x: jnp.sum(jnp.sign(x)), {"Sign": rule})
    for _ in range(2):
        with pytest.raises(AttributeError, match="has no attribute 'nothing_of"):
            jax.grad(ours)(jnp.ones(3))
