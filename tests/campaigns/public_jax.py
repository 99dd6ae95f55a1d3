"""Public JAX models under `regrad.jax.override`, against JAX's own derivatives changed by hand.

The answer that is due: before the plain model is differentiated, JAX's rule for the primitive is
replaced by one that first multiplies the tangents that come in; a function (`jax.nn.gelu`) is
replaced in every module that holds it by one with such an input. Nothing of the library is used.

A function with a derivative of its own that holds an overridden op is opened by `override`, as its
documentation says; so there are two right answers, with such functions opened and as they are. And
rules that are the native ones (factors of 1) must give the gradient of the plain model.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

import regrad as rg
import regrad.jax
from regrad.errors import RegradError
from tests.campaigns import jax_api
from tests.campaigns.public_oracle import K, L
from tests.campaigns.verdicts import BROKEN, DELIVERED, REFUSED, SILENT, Verdict

PACKAGES = ("flax", "optax", "diffrax", "equinox", "haiku")
PRIMITIVES = {
    "Sigmoid": "logistic", "Tanh": "tanh", "Exp": "exp", "MatMul": "dot_general", "AddV2": "add",
    "Mul": "mul", "Sum": "reduce_sum", "Conv2D": "conv_general_dilated",
    "MaxPool": "reduce_window_max",
}  # fmt: skip
FUNCTIONS = {
    "Relu": "jax.nn.relu", "Gelu": "jax.nn.gelu", "Silu": "jax.nn.silu",
    "Softmax": "jax.nn.softmax", "LogSoftmax": "jax.nn.log_softmax", "Mean": "jax.numpy.mean",
}  # fmt: skip
OP_TYPES = (*FUNCTIONS, *PRIMITIVES)
TOLERANCE = 2e-4  # the models compute in float32


class Row(NamedTuple):
    """A model: a function of float arrays, in containers, and these."""

    name: str
    build: Callable[[], tuple[Callable[..., Any], Any]]


KEY = jax.random.key(0)


def noise(*shape: int) -> Any:
    return jax.random.normal(jax.random.key(len(shape)), shape, jnp.float32)


def single(xs: Any) -> Any:
    """The same in float32, in which Flax and Haiku keep their weights."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), xs)


# -- the models ------------------------------------------------------------------------------------


def linen(make: Callable[[Any], Any], *shape: int, **options: Any) -> Any:
    """A module of flax.linen, made by a function of `flax.linen`, and its inputs."""
    from flax import linen as nn

    module, x = make(nn), noise(*shape)
    variables = module.init(KEY, x, **options)
    return lambda v, x: module.apply(v, x, **options), (variables, x)


def flax_mlp(nn: Any) -> Any:
    return nn.Sequential([nn.Dense(8), lambda x: jax.nn.relu(x), nn.Dense(8),
                          lambda x: jax.nn.gelu(x), nn.Dense(3)])  # fmt: skip


def flax_cnn(nn: Any) -> Any:
    return nn.Sequential([
        nn.Conv(4, (3, 3)), lambda x: jax.nn.relu(x), lambda x: nn.max_pool(x, (2, 2), (2, 2)),
        nn.Conv(4, (3, 3)), nn.GroupNorm(2), lambda x: jax.nn.silu(x),
        lambda x: x.mean((1, 2)), nn.Dense(3),
    ])  # fmt: skip


def flax_attention(nn: Any) -> Any:
    return nn.Sequential([nn.LayerNorm(), nn.MultiHeadDotProductAttention(2), nn.Dense(3)])


def flax_block(nn: Any) -> Any:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            y = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
            y = nn.Dense(8)(jax.nn.gelu(nn.Dense(16)(nn.LayerNorm()(x + y))))
            return x + y, None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            over = nn.scan(nn.remat(Block), variable_axes={"params": 0},
                           split_rngs={"params": True}, length=2)  # fmt: skip
            return over()(x, None)[0]

    return Stack()


def nnx(make: Callable[[Any, Any], Any], *shape: int) -> Any:
    from flax import nnx

    graph, state = nnx.split(make(nnx, nnx.Rngs(0)))
    return lambda s, x: nnx.merge(graph, s)(x), (state, noise(*shape))


def nnx_mlp(nnx: Any, rngs: Any) -> Any:
    return nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs),
                          lambda x: jax.nn.relu(x), nnx.Linear(8, 3, rngs=rngs))  # fmt: skip


def nnx_attention(nnx: Any, rngs: Any) -> Any:
    return nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)


def optax_loss(name: str) -> Any:
    """A linear model under one of optax' losses."""
    import optax

    loss = getattr(optax, name)
    target = {"softmax_cross_entropy_with_integer_labels": jnp.array([0, 2, 1, 1])}.get(
        name, jax.nn.softmax(noise(4, 3))
    )
    return lambda w, x: loss(x @ w, target), (0.3 * noise(5, 3), noise(4, 5))


def optax_from_zero() -> Any:
    import optax

    labels = jnp.array([0.0, 1.0, 1.0, 0.0])
    return lambda w, x: optax.sigmoid_binary_cross_entropy(x @ w, labels), (
        jnp.zeros(5),
        noise(4, 5),
    )


def ode(adjoint: str) -> Any:
    import diffrax

    def field(t: Any, y: Any, w: Any) -> Any:
        return jnp.tanh(w @ y)

    def solved(w: Any, y: Any) -> Any:
        return diffrax.diffeqsolve(
            diffrax.ODETerm(field), diffrax.Tsit5(), 0.0, 1.0, 0.25, y, w,
            adjoint=getattr(diffrax, adjoint)(),
        ).ys  # fmt: skip

    return solved, (0.5 * noise(3, 3), noise(3))


def equinox(make: Callable[[Any], Any], *shape: int) -> Any:
    import equinox as eqx

    arrays, rest = eqx.partition(make(eqx), eqx.is_inexact_array)
    return lambda m, x: eqx.combine(m, rest)(x), (arrays, noise(*shape))


def eqx_mlp(eqx: Any) -> Any:
    return eqx.nn.MLP(4, 3, 8, 2, activation=lambda x: jax.nn.relu(x), key=KEY)


def eqx_cnn(eqx: Any) -> Any:
    one, two = jax.random.split(KEY)
    return eqx.nn.Sequential([
        eqx.nn.Conv2d(3, 4, 3, key=one), eqx.nn.Lambda(lambda x: jax.nn.relu(x)),
        eqx.nn.MaxPool2d(2, 2), eqx.nn.Lambda(jnp.ravel), eqx.nn.Linear(36, 3, key=two),
    ])  # fmt: skip


def eqx_recurrent(kind: str) -> Any:
    import equinox as eqx

    cell = getattr(eqx.nn, kind)(3, 4, key=KEY)
    arrays, rest = eqx.partition(cell, eqx.is_inexact_array)
    zero = jnp.zeros(4, jnp.float32)
    start = (zero, zero) if kind == "LSTMCell" else zero

    def run(arrays: Any, xs: Any) -> Any:
        whole = eqx.combine(arrays, rest)
        return jax.lax.scan(lambda h, x: (whole(x, h), None), start, xs)[0]

    return run, (arrays, noise(5, 3))


def eqx_attention() -> Any:
    import equinox as eqx

    arrays, rest = eqx.partition(eqx.nn.MultiheadAttention(2, 8, key=KEY), eqx.is_inexact_array)
    return lambda m, x: eqx.combine(m, rest)(x, x, x), (arrays, noise(5, 8))


def haiku(make: Callable[[Any, Any], Any], *shape: int) -> Any:
    import haiku as hk

    x = noise(*shape)
    net = hk.without_apply_rng(hk.transform(lambda x: make(hk, x)))
    return net.apply, (net.init(KEY, x), x)


def haiku_lstm(hk: Any, x: Any) -> Any:
    core = hk.LSTM(4)
    return hk.dynamic_unroll(core, x, core.initial_state(2))[0]


def haiku_attention(hk: Any, x: Any) -> Any:
    normal = hk.LayerNorm(-1, True, True)(x)
    init = hk.initializers.VarianceScaling(1.0)
    y = hk.MultiHeadAttention(2, 4, w_init=init)(normal, normal, normal)
    return x + hk.Linear(8)(jax.nn.gelu(hk.Linear(16)(y)))


def rows() -> list[Row]:
    """The frozen table."""
    table: dict[str, Callable[[], Any]] = {
        "flax/mlp": lambda: linen(flax_mlp, 4, 5), "flax/cnn": lambda: linen(flax_cnn, 2, 8, 8, 3),
        "flax/attention": lambda: linen(flax_attention, 2, 5, 8),
        "flax/scan_remat": lambda: linen(flax_block, 2, 5, 8),
        "flax/lstm": lambda: linen(lambda nn: nn.RNN(nn.LSTMCell(4)), 2, 5, 3),
        "flax/gru": lambda: linen(lambda nn: nn.RNN(nn.GRUCell(4)), 2, 5, 3),
        "flax/nnx_mlp": lambda: nnx(nnx_mlp, 2, 4),
        "flax/nnx_attention": lambda: nnx(nnx_attention, 2, 5, 8),
        "optax/softmax": lambda: optax_loss("softmax_cross_entropy"),
        "optax/labels": lambda: optax_loss("softmax_cross_entropy_with_integer_labels"),
        "optax/sigmoid": lambda: optax_loss("sigmoid_binary_cross_entropy"),
        "optax/sigmoid_from_zero": optax_from_zero, "optax/huber": lambda: optax_loss("huber_loss"),
        "optax/log_cosh": lambda: optax_loss("log_cosh"),
        "optax/cosine": lambda: optax_loss("cosine_distance"),
        "diffrax/default": lambda: ode("RecursiveCheckpointAdjoint"),
        "diffrax/direct": lambda: ode("DirectAdjoint"),
        "diffrax/backsolve": lambda: ode("BacksolveAdjoint"),
        "equinox/mlp": lambda: equinox(eqx_mlp, 4),
        "equinox/cnn": lambda: equinox(eqx_cnn, 3, 8, 8), "equinox/attention": eqx_attention,
        "equinox/gru": lambda: eqx_recurrent("GRUCell"),
        "equinox/lstm": lambda: eqx_recurrent("LSTMCell"),
        "haiku/mlp": lambda: haiku(lambda hk, x: hk.nets.MLP([8, 3],
            activation=lambda y: jax.nn.relu(y))(x), 4, 5),
        "haiku/lstm": lambda: haiku(haiku_lstm, 5, 2, 3),
        "haiku/attention": lambda: haiku(haiku_attention, 2, 5, 8),
    }  # fmt: skip
    return [Row(f"jax/{name}", build) for name, build in table.items()]


# -- the answer that is due ------------------------------------------------------------------------


@contextmanager
def scaled(op_type: str, k: float, l: float, opens: bool = False) -> Iterator[list[int]]:  # noqa: E741
    """JAX with another derivative for an op type; counts how often it was asked for."""
    count = [0]
    with ExitStack() as stack:
        jax.clear_caches()
        if op_type in PRIMITIVES:
            stack.enter_context(_primitive(PRIMITIVES[op_type], k, l, count, opens))
        else:
            stack.enter_context(_function(FUNCTIONS[op_type], k, count))
        yield count
    jax.clear_caches()


@contextmanager
def _primitive(name: str, k: float, l: float, count: list[int], opens: bool) -> Iterator[None]:  # noqa: E741
    primitive = next(p for p in ad.primitive_jvps if p.name == name)
    native = ad.primitive_jvps[primitive]

    def jvp(xs: Any, dxs: Any, **params: Any) -> Any:
        count[0] += 1
        factors = (k, l, *[1.0] * len(xs))
        return native(xs, [d if type(d) is ad.Zero else d * f for d, f in zip(dxs, factors)],  # noqa: B905
                      **params)  # fmt: skip

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(ad.primitive_jvps, {primitive: jvp}))
        for kind in (jax.custom_jvp, jax.custom_vjp) if opens else ():
            stack.enter_context(mock.patch.object(kind, "__call__", _opened(kind, name)))
        yield


def _opened(kind: Any, name: str) -> Callable[..., Any]:
    """A function with a derivative of its own that calls what it wraps, if that holds the op."""
    before = kind.__call__

    def call(self: Any, *args: Any, **options: Any) -> Any:
        whole = str(jax.make_jaxpr(lambda: self.fun(*args, **options))())
        return (self.fun if f" {name}" in whole else before.__get__(self))(*args, **options)

    return call


@contextmanager
def _function(name: str, k: float, count: list[int]) -> Iterator[None]:
    module, _, short = name.rpartition(".")
    native = getattr(importlib.import_module(module), short)

    @jax.custom_jvp
    def times(x: Any) -> Any:
        return x

    times.defjvps(lambda dx, y, x: k * dx)

    def changed(x: Any, *args: Any, **options: Any) -> Any:
        count[0] += 1
        return native(times(x), *args, **options)

    with ExitStack() as stack:
        for each in list(sys.modules.values()):
            if getattr(each, "__dict__", {}).get(short) is native:
                stack.enter_context(mock.patch.object(each, short, changed))
        yield


# -- the rules -------------------------------------------------------------------------------------


OTHERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {  # and the attributes they take
    "Sigmoid": (jax.nn.sigmoid, ()),
    "Mean": (lambda x, axis, keepdims: jnp.mean(x, axis, keepdims=keepdims), ("axis", "keepdims")),
    "MaxPool": (lambda *args, **given: _maxima(*args, **given), ("filter_size", "strides", "pad")),
    "Conv2D": (lambda x, w, strides, pad, dilations: jax.lax.conv_general_dilated(
        x, w, strides, pad, rhs_dilation=dilations, dimension_numbers=("NHWC", "HWIO", "NHWC")),
        ("strides", "pad", "dilations")),
}  # fmt: skip


def rule(op_type: str, k: float, l: float) -> Callable[..., Any]:  # noqa: E741
    """The native gradient times k, and times l for a second operand."""
    f, names = OTHERS.get(op_type, (jax_api.OF_TYPES.get(op_type), ()))
    if f is None:
        module, _, short = FUNCTIONS[op_type].rpartition(".")
        f = getattr(importlib.import_module(module), short)
    return jax_api.scaled(f, names or jax_api.ATTRIBUTES.get(op_type, ()), k, l)


def _maxima(x: Any, filter_size: Sequence[int], strides: Sequence[int], pad: Any) -> Any:
    """The largest values in windows of images whose channels come last."""
    size, steps = (1, *filter_size, 1), (1, *strides, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, size, steps, ((0, 0), *pad, (0, 0)))


# -- the cases -------------------------------------------------------------------------------------


def verdicts(name: str, types: Sequence[str]) -> Iterator[Verdict]:
    row = next(r for r in rows() if r.name == name)
    importlib.import_module(name.split("/")[1])
    f, xs = row.build()
    xs = single(xs)
    plain, native = run(jax.make_jaxpr(f)(*xs), xs), run(pulled(f, xs), xs)
    for op_type in [t for t in OP_TYPES if not types or t in types]:
        if programs := due(f, xs, op_type):
            answers = [run(p, xs) for p in {str(p): p for p in programs}.values()]
            subject = Subject(f, xs, plain, native, answers)
            yield verdict_of(f"{name}/{op_type}", subject, op_type)


def due(f: Callable[..., Any], xs: Any, op_type: str) -> list[Any]:
    """The programs of the right gradients; none if the model has no such op."""
    found = []
    for opens in (True, False):
        # (what is opened may have no derivative of its own: loops of unknown length)
        with scaled(op_type, K, L, opens) as count, suppress(ValueError if opens else ()):
            program = pulled(f, xs)
            found += [program] if count[0] or found else []
    return found


class Subject(NamedTuple):
    """A model, its plain outputs and gradients, and the gradients that are due."""

    f: Callable[..., Any]
    xs: Any
    plain: Sequence[Any]
    native: Sequence[Any]
    due: Sequence[Sequence[Any]]


def verdict_of(case: str, subject: Subject, op_type: str) -> Verdict:
    try:
        return Verdict(case, *compared(subject, op_type))
    except RegradError as error:
        return Verdict(case, REFUSED, f"{type(error).__name__}: {error}"[:400])
    except Exception as error:
        return Verdict(case, BROKEN, f"{type(error).__name__}: {error}"[:400])


def compared(subject: Subject, op_type: str) -> tuple[str, str]:
    """Outcome and detail of a case that raises nothing."""
    f, xs, plain, native, due = subject
    ours = rg.jax.override(f, {op_type: rule(op_type, K, L)})
    found = run(pulled(ours, xs), xs)
    ys = run(jax.make_jaxpr(ours)(*xs), xs)
    if not all(np.array_equal(a, b) for a, b in zip(ys, plain, strict=True)):
        return SILENT, f"values differ by {far(ys, plain):.1e}"
    if (off := min(far(found, each) for each in due)) > TOLERANCE:
        return SILENT, f"gradient off by {off:.1e}"
    ours = rg.jax.override(f, {op_type: rule(op_type, 1.0, 1.0)})
    if (off := far(run(pulled(ours, xs), xs), native)) > TOLERANCE:
        return SILENT, f"the native rule gives another gradient, off by {off:.1e}"
    return DELIVERED, ""


def pulled(f: Callable[..., Any], xs: Any) -> Any:
    """The program of the gradients of a weighted sum of all outputs."""

    def whole(*xs: Any) -> Any:
        ys, pull = jax.vjp(f, *xs)
        return pull(jax.tree.map(weights, ys))

    return jax.make_jaxpr(whole)(*xs)


def weights(y: Any) -> Any:
    """The gradient that arrives at an output."""
    return jnp.cos(jnp.arange(y.size) + 1).reshape(y.shape).astype(y.dtype)


def run(program: Any, xs: Any) -> Any:
    """The results of a program, compiled once as a whole."""
    compiled = jax.jit(jax.extend.core.jaxpr_as_fun(program))
    return [np.asarray(y) for y in compiled(*jax.tree.leaves(xs))]


def far(found: Sequence[Any], due: Sequence[Any]) -> float:
    """The largest relative error."""
    scale = max(float(np.linalg.norm(d)) for d in due)
    return max(
        float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 1e-3 * scale + 1e-30))
        for a, b in zip(found, due, strict=True)
    )
