"""JAX's public API under `regrad.jax.override`: a function, a key that occurs in it, a mode.

The answer that is due comes from an interpreter of JAX's programs that knows nothing of the
library: it runs a program equation by equation, and triples the derivative of what the key names.
The rule gives three times JAX's derivative of the primitive. A case is *delivered* where both
agree, *refused* where an error of regrad's says why not, and *silent* where nothing does. JAX's own
functions with a derivative of their own (`jax.nn.relu`) keep it, as the documentation says.

    python -m tests.campaigns.jax_api
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax, nn
from jax.extend import core
from jax.flatten_util import ravel_pytree

import regrad as rg
import regrad.jax
from regrad.errors import RegradError
from tests.campaigns.verdicts import BROKEN, DELIVERED, REFUSED, SILENT, Verdict, brief, shown

FACTOR = 3.0
M = jnp.array([[0.31, 0.72, 0.15, 0.58], [0.44, 0.27, 0.83, 0.66], [0.92, 0.38, 0.51, 0.23],
               [0.17, 0.61, 0.75, 0.49]])  # fmt: skip
V = M[0] + 0.05
B = jnp.cos(jnp.arange(8.0)).reshape(4, 2)
W = jnp.sin(jnp.arange(1.0, 10.0)).reshape(3, 3, 1, 1)

# -- the functions: each takes M -------------------------------------------------------------------

UNARY = """abs absolute arccos arccosh(1+x) arcsin arcsinh arctan arctanh cbrt ceil cos cosh deg2rad
    degrees exp exp2 expm1 fabs fix floor i0 log log10 log1p log2 negative positive rad2deg
    reciprocal rint round sign sin sinc sinh sqrt square tan tanh trunc nan_to_num real angle conj
    cumprod cumsum diff ediff1d gradient ptp max min mean median nanmax nanmean nanmin nanprod
    nanstd nansum nanvar prod std sum var average sort trace diag diagonal flip fliplr flipud rot90
    ravel tril triu squeeze unwrap cov nanmedian nancumsum nancumprod amax amin trapezoid
    cumulative_sum(x,axis=0) cumulative_prod(x,axis=1)"""
BINARY = """add arctan2 copysign divide dot float_power fmax fmin fmod hypot inner kron logaddexp
    logaddexp2 matmul maximum minimum mod multiply outer power remainder subtract vdot
    true_divide heaviside divmod convolve tensordot vecdot"""
ACTIVATIONS = """celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu
    log_sigmoid log_softmax logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax softplus
    sparse_plus sparse_sigmoid squareplus standardize swish tanh"""
LINALG = "cond det eigh inv norm pinv qr slogdet svd matrix_norm vector_norm svdvals"
SPECIAL = """bessel_jn digamma entr erf erfc erfinv expi expit exp1 gammaln i0 i0e i1 i1e log_ndtr
    log_softmax logit logsumexp ndtr ndtri softmax spence gamma"""
STATS = """norm.pdf norm.logpdf norm.cdf norm.logcdf expon.logpdf laplace.logpdf cauchy.logpdf
    logistic.logpdf gamma.logpdf(x,2.0) beta.logpdf(x,2.0,3.0) t.logpdf(x,4.0) uniform.logpdf
    gennorm.logpdf(x,1.5) pareto.logpdf(1+x,2.0) chi2.logpdf(x,3.0) poisson.logpmf(2,x)
    bernoulli.logpmf(1,x) geom.logpmf(2,x) truncnorm.logpdf(x,-1.0,2.0) vonmises.logpdf(x,2.0)"""

# (each has a primitive in a region in which no other function has it, or with other parameters)
OTHERS: dict[str, Callable[[Any], Any]] = {
    "diag": lambda x: jnp.diag(x[0] * 2),
    "linalg.eigh": lambda x: jnp.linalg.eigh(spd(x)),
    "convolve": lambda x: jnp.convolve(x[0], x[1]),
    "special.bessel_jn": lambda x: jsp.special.bessel_jn(x[0], v=2),
    "nn.glu": lambda x: nn.glu(x),
    "interp": lambda x: jnp.interp(x[0], jnp.array([0.0, 0.4, 1.0]), x[1, :3]),
    "corrcoef": lambda x: jnp.corrcoef(x)[0, 1:],
    "piecewise": lambda x: jnp.piecewise(x, [x < 0.3, x > 0.6], [jnp.sin, jnp.cos, jnp.exp]),
    "at set": lambda x: x.at[1].set(x[0] * x[2]),
    "at multiply": lambda x: x.at[1].multiply(x[0]),
    "at min": lambda x: x.at[1].min(x[0] * 2),
    "pad": lambda x: jnp.pad(x * x, 1, mode="reflect"),
    "tile": lambda x: jnp.tile(x * x, (2, 1)),
    "stack": lambda x: jnp.stack([x * x, jnp.sin(x)]),
    "split": lambda x: sum(jnp.split(x * x, 2)),
    "histogram weights": lambda x: jnp.histogram(V, 3, weights=x[0] * 2)[0],
    "digitize": lambda x: x * jnp.digitize(x, V[jnp.argsort(V)]),
    "einsum": lambda x: jnp.einsum("ij,jk,ki->i", x, x, x),
    "einsum bij": lambda x: jnp.einsum("ij,ik->jk", x, x) * x,
    "mean dtype": lambda x: jnp.mean(x * x, axis=1, dtype=jnp.float32),
    "multi_dot": lambda x: jnp.linalg.multi_dot([x, B, B.T]),
    "solve": lambda x: jnp.linalg.solve(x + 3 * jnp.eye(4), x[0] * x[1]),
    "solve many": lambda x: jnp.linalg.solve(x + 3 * jnp.eye(4), B),
    "solve batch": lambda x: jnp.linalg.solve(jnp.stack([x, x * x]) + 3 * jnp.eye(4), B),
    "lstsq": lambda x: jnp.linalg.lstsq(x, B)[0],
    "tensorsolve": lambda x: jnp.linalg.tensorsolve(x + 3 * jnp.eye(4), x[0]),
    "expm": lambda x: jsp.linalg.expm(x),
    "cho_solve": lambda x: jsp.linalg.cho_solve(jsp.linalg.cho_factor(spd(x)), x[0] * 2),
    "lu_solve": lambda x: jsp.linalg.lu_solve(jsp.linalg.lu_factor(spd(x)), x[0] * 2),
    "solve_triangular": lambda x: jsp.linalg.solve_triangular(spd(x), x[0] * x[1], lower=True),
    "solve_pos": lambda x: jsp.linalg.solve(spd(x), x[0], assume_a="pos"),
    "toeplitz": lambda x: jsp.linalg.toeplitz(x[0] * x[1]),
    "cg": lambda x: jsp.sparse.linalg.cg(spd(x), x[0], tol=1e-12)[0],
    "cg matvec": lambda x: jsp.sparse.linalg.cg(lambda v: spd(x) @ v + jnp.tanh(x[0]) * v, V,
        tol=1e-12)[0],
    "gmres": lambda x: jsp.sparse.linalg.gmres(x + 3 * jnp.eye(4), x[0], tol=1e-12)[0],
    "bicgstab": lambda x: jsp.sparse.linalg.bicgstab(x + 3 * jnp.eye(4), x[0], tol=1e-12)[0],
    "convolve2d": lambda x: jsp.signal.convolve2d(x, x[:2, :2], mode="same"),
    "fftconvolve": lambda x: jsp.signal.fftconvolve(x[0], x[1]),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "fft2": lambda x: jnp.fft.fft2(x).imag,
    "map_coordinates": lambda x: jsp.ndimage.map_coordinates(x, [3 * x[0], 3 * x[1]], order=1),
    "dot_product_attention": lambda x: nn.dot_product_attention(*[x.reshape(1, 4, 2, 2)] * 3),
    "softmax axis": lambda x: nn.softmax(x * x, axis=(0, 1)),
    "multivariate_normal": lambda x: jsp.stats.multivariate_normal.logpdf(x[0], x[1], spd(x)),
    "gaussian_kde": lambda x: jsp.stats.gaussian_kde(x[0])(x[1]),
    "zeta": lambda x: jsp.special.zeta(2 + x, 1 + x),
    "polygamma": lambda x: jsp.special.polygamma(1, 1 + x),
    "bfgs-free": lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * x, x),
    "scan": lambda x: lax.scan(lambda c, r: (c * r + jnp.tanh(c), c), x[0], x)[1],
    "map": lambda x: lax.map(lambda r: jnp.sin(r) * r, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x) * x, lambda x: x, x),
    "switch": lambda x: lax.switch(1, [jnp.sin, lambda x: jnp.cos(x) * x], x),
    "checkpoint": lambda x: jax.checkpoint(lambda x: jnp.sin(x) * x)(x),
    "associative_scan": lambda x: lax.associative_scan(lambda a, b: a * b + jnp.sin(b), x),
    "jit": lambda x: jax.jit(lambda x: jnp.sin(x) * x)(x),
    "vmap": lambda x: jax.vmap(lambda r: jnp.sin(r) * r.sum())(x),
    "vmap of solve": lambda x: jax.vmap(lambda r: jnp.linalg.solve(spd(x), r))(x),
    "top_k": lambda x: lax.top_k(x * x, 2)[0],
    "sort_key_val": lambda x: lax.sort_key_val(x[0], x[1] * x[0])[1],
    "reduce_window": lambda x: windows(x * x, 0.0, lax.add, "VALID"),
    "reduce_window max": lambda x: windows(x * x, -jnp.inf, lax.max, "VALID"),
    "reduce_window mul": lambda x: windows(x * x, 1.0, lax.mul, "SAME"),
    "reduce": lambda x: lax.reduce(x * x, 0.0, lambda a, b: a + jnp.sin(b), (0,)) * x[0],
    "reduce_precision": lambda x: lax.reduce_precision(x * x, 11, 52),
    "cummax": lambda x: lax.cummax(x * x),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x * x),
    "conv": lambda x: convolved(lax.conv_general_dilated, x, (1, 1)),
    "conv_transpose": lambda x: convolved(lax.conv_transpose, x, (2, 2)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2, :2] * 2, (1, 1)),
    "clamp": lambda x: lax.clamp(0.2, x * x, 0.7),
    "integer_pow": lambda x: lax.integer_pow(x, 3) + x**4,
    "rsqrt": lambda x: lax.rsqrt(x) + lax.rsqrt(1 + x * x),
    "complex": lambda x: jnp.abs(lax.complex(x, x * x)) * jnp.real(jnp.exp(1j * x)),
    "stop_gradient": lambda x: x * lax.stop_gradient(x * x),
    "batch_matmul": lambda x: lax.batch_matmul(jnp.stack([x, x * x]), jnp.stack([x, x])),
    "ragged_dot": lambda x: lax.ragged_dot(x, jnp.stack([B, 2 * B]), jnp.array([1, 3])),
    "custom_linear_solve": lambda x: lax.custom_linear_solve(lambda v: (2 + jnp.sin(x[0])) * v,
        x[1] * x[2], lambda f, b: b / (2 + jnp.sin(x[0])), transpose_solve=lambda f,
        b: b / (2 + jnp.sin(x[0]))),
}  # fmt: skip
# (not `scan`: there JAX forgets a custom_jvp, as the interpreter has it, at the second order)
SECOND = ("sin", "solve", "linalg.inv", "expm", "cg matvec", "custom_linear_solve", "einsum",
          "vmap of solve", "gmres", "softmax axis")  # fmt: skip


def spd(x: Any) -> Any:
    return x @ x.T + 2 * jnp.eye(4)


def windows(x: Any, start: float, op: Callable[..., Any], pad: str) -> Any:
    return lax.reduce_window(x, start, op, (2, 2), (1, 1), pad)


def convolved(f: Callable[..., Any], x: Any, strides: tuple[int, int]) -> Any:
    layout = ("NHWC", "HWIO", "NHWC")
    return f(x.reshape(1, 4, 4, 1), W, strides, "SAME", dimension_numbers=layout)


def functions() -> dict[str, Callable[[Any], Any]]:
    """Return the functions of the API by name, each of one matrix."""

    def of(modules: Sequence[Any], names: str, second: bool = False) -> Iterator[tuple[str, Any]]:
        for spec in names.split():
            name, _, given = spec.partition("(")
            f = modules[0]
            for part in name.split("."):
                f = getattr(f, part, None)
            if f is None:  # another version of JAX has it
                continue
            if given:
                code = compile(f"f({given}", name, "eval")
                yield name, lambda x, f=f, code=code: eval(code, {"f": f, "x": x})
            else:
                yield name, (lambda x, f=f: f(x, 1.3 * x + 0.1)) if second else f

    made = dict(of([jnp], UNARY)) | dict(of([jnp], BINARY, second=True))
    modules = {
        "nn": (nn, ACTIVATIONS), "linalg": (jnp.linalg, LINALG), "special": (jsp.special, SPECIAL),
        "stats": (jsp.stats, STATS),
    }  # fmt: skip
    for label, (module, names) in modules.items():
        made |= {f"{label}.{name}": f for name, f in of([module], names)}
    return made | OTHERS


# -- the interpreter -------------------------------------------------------------------------------


@jax.custom_jvp
def times(y: Any) -> Any:
    """`y`, whose tangents are FACTOR times as large."""
    return y


times.defjvps(lambda t, _, y: FACTOR * t)

CLOSED = ("custom_jvp_call", "custom_vjp_call")
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")


def is_float(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, np.inexact)


def run(program: Any, xs: Sequence[Any], meant: Callable[[Any], bool]) -> list[Any]:
    """Run a program, with the derivative of what is meant tripled."""
    jaxpr = getattr(program, "jaxpr", program)
    env = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    env |= dict(zip(jaxpr.invars, xs, strict=True))
    read = lambda v: v.val if isinstance(v, core.Literal) else env[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        ys = step(eqn, [read(v) for v in eqn.invars], meant)
        env |= zip(eqn.outvars, ys, strict=True)
    return [read(v) for v in jaxpr.outvars]


def step(eqn: Any, xs: Sequence[Any], meant: Callable[[Any], bool]) -> Sequence[Any]:
    name, p = eqn.primitive.name, eqn.params
    if meant(eqn):
        return [times(y) if is_float(jax.typeof(y)) else y for y in bind(eqn, xs)]
    if name in CALLS:
        return run(p["jaxpr"] if "jaxpr" in p else p["call_jaxpr"], xs, meant)
    if name == "cond":
        branches = [lambda *xs, b=b: run(b, xs, meant) for b in p["branches"]]
        return lax.switch(xs[0], branches, *xs[1:])
    if name == "scan":
        return scanned(p, xs, meant)
    if name == "while":
        n, m = p["cond_nconsts"], p["body_nconsts"]
        go = lambda c: run(p["cond_jaxpr"], [*xs[:n], *c], meant)[0]  # noqa: E731
        body = lambda c: run(p["body_jaxpr"], [*xs[n : n + m], *c], meant)  # noqa: E731
        return lax.while_loop(go, body, list(xs[n + m :]))
    if name == "custom_linear_solve":
        return solved(eqn, xs, meant)
    return bind(eqn, xs)


def bind(eqn: Any, xs: Sequence[Any]) -> Sequence[Any]:
    ys = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(eqn.params))
    return ys if eqn.primitive.multiple_results else [ys]


def scanned(p: Any, xs: Sequence[Any], meant: Callable[[Any], bool]) -> Sequence[Any]:
    if "ft_in" in p:  # JAX 0.11 and later
        n, m, _ = (len(list(part)) for part in p["ft_in"].unpack())
    else:
        n, m = p["num_consts"], p["num_carry"]

    def body(carry: Any, each: Any) -> Any:
        ys = run(p["jaxpr"], [*xs[:n], *carry, *each], meant)
        return ys[:m], ys[m:]

    carry, ys = lax.scan(body, list(xs[n : n + m]), list(xs[n + m :]), p["length"], p["reverse"])
    return [*carry, *ys]


def solved(eqn: Any, xs: Sequence[Any], meant: Callable[[Any], bool]) -> Sequence[Any]:
    """A linear solve as JAX says that it is differentiated: A dx = db - dA x, here with a matrix.

    dA is that of the map with changed derivatives. The matrix that is inverted has them too where
    they are no part of the linear map itself, which is only applied and transposed there (if the
    map is symmetric, JAX takes the map for its transpose, and they count as well).
    """
    lengths, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    count = lengths.matvec
    inner, b = list(xs[:count]), list(xs[sum(lengths) :])
    linear = depending(programs.matvec, range(count, count + len(b)))
    symmetric = programs.vecmat is programs.matvec
    outer = lambda eqn: meant(eqn) and (symmetric or id(eqn) not in linear)  # noqa: E731
    back = ravel_pytree(b)[1]

    def apply(a: Any, v: Any, which: Callable[[Any], bool]) -> Any:
        return ravel_pytree(run(programs.matvec, [*a, *back(v)], which))[0]

    def inverse(a: Any, v: Any) -> Any:
        columns = [apply(a, e, outer) for e in jnp.eye(v.size, dtype=v.dtype)]
        return jnp.linalg.inv(jnp.stack(columns, 1)) @ v

    @jax.custom_jvp
    def solution(a: Any, v: Any) -> Any:
        return inverse(a, v)

    @solution.defjvp
    def _(given: Any, moved: Any) -> Any:
        x = solution(*given)
        dax = jax.jvp(lambda a: apply(a, x, meant), given[:1], moved[:1])[1]
        return x, inverse(given[0], moved[1] - dax)

    found = bind(eqn, [*map(lax.stop_gradient, xs)])
    return [*back(solution(inner, ravel_pytree(b)[0])), *found[len(b) :]]


def depending(program: Any, places: Iterable[int]) -> set[int]:
    """Return the equations of a program that read some of its inputs, or what is made of them."""
    jaxpr, found = getattr(program, "jaxpr", program), set()
    reached = {jaxpr.invars[i] for i in places}
    for eqn in jaxpr.eqns:
        reads = [not isinstance(v, core.Literal) and v in reached for v in eqn.invars]
        if any(reads):
            reached |= set(eqn.outvars)
            found.add(id(eqn))
            if eqn.primitive.name in CALLS:
                at = [i for i, read in enumerate(reads) if read]
                found |= depending(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], at)
    return found


# -- keys and rules --------------------------------------------------------------------------------


def equations(program: Any) -> Iterator[Any]:
    """Yield the equations of a program that the interpreter meets."""
    for eqn in getattr(program, "jaxpr", program).eqns:
        yield eqn
        if eqn.primitive.name not in CLOSED:
            held = eqn.params.values()
            if eqn.primitive.name == "custom_linear_solve":
                held = [eqn.params["jaxprs"].matvec]
            for each in held:
                for body in each if isinstance(each, tuple | list) else [each]:
                    if isinstance(body, core.Jaxpr | core.ClosedJaxpr):
                        yield from equations(body)


# (JAX has no gradient by all their operands; a vmap makes reshapes of its own)
NO_KEYS = {
    *CALLS, *CLOSED, "scan", "while", "cond", "custom_linear_solve", "reduce", "stop_gradient",
    "reduce_window", "call_hi_primitive", "transpose", "broadcast_in_dim", "reshape", "clamp",
    "polygamma",
}  # fmt: skip


def keys(program: Any) -> dict[str, list[Any]]:
    """Return primitives that a gradient may pass, with their equations, often ones last."""
    found: dict[str, list[Any]] = {}
    every = [*equations(program)]
    for eqn in every:
        avals = [v.aval for v in eqn.invars if not isinstance(v, core.Literal)]
        passes = any(map(is_float, avals)) and any(is_float(v.aval) for v in eqn.outvars)
        if passes and eqn.primitive.name not in NO_KEYS:
            found.setdefault(eqn.primitive.name, []).append(eqn)
    found = {k: eqns for k, eqns in found.items() if k != "integer_pow" or len(powers(eqns)) == 1}
    if any(eqn.primitive.name == "select_n" and eqn.invars[0].aval.dtype != bool for eqn in every):
        found.pop("select_n", None)  # that is what a vmap makes of a `switch`
    return dict(sorted(found.items(), key=lambda item: len(item[1])))


def powers(eqns: Iterable[Any]) -> set[int]:
    return {eqn.params["y"] for eqn in eqns}


def tripled(eqns: Sequence[Any]) -> Callable[..., Any]:
    """The rule: FACTOR times JAX's own derivative of a primitive."""
    first = eqns[0]
    names = [k for k in first.params if k.isidentifier() and k != "y"]
    fixed = {"y": first.params["y"]} if "y" in first.params else {}

    def rule(op: Any, *dys: Any) -> Any:
        params = {k: op.get_attr(k) for k in names} | fixed
        xs = list(op.inputs)
        at = [i for i, x in enumerate(xs) if is_float(x)]

        def apply(*moved: Any) -> Any:
            for i, x in zip(at, moved, strict=True):
                xs[i] = x
            ys = bind(first.replace(params=params), xs)
            return [y for y in ys if is_float(y)]

        back = jax.vjp(apply, *[xs[i] for i in at])[1]
        dys = [jnp.conj(dy) for dy in dys if is_float(dy)]
        dxs = iter(back(dys))
        return [FACTOR * jnp.conj(next(dxs)) if i in at else None for i in range(len(xs))]

    return rule


OP_TYPES = {  # of the same equations
    "dot_general": "MatMul", "mul": "Mul", "add": "AddV2", "reduce_sum": "Sum", "exp": "Exp",
    "sub": "Sub", "div": "RealDiv", "log": "Log", "tanh": "Tanh", "sin": "Sin", "max": "Maximum",
    "sqrt": "Sqrt", "reduce_max": "Max", "cumsum": "Cumsum", "cos": "Cos", "neg": "Neg",
}  # fmt: skip
OF_TYPES = {
    "MatMul": jnp.matmul, "Mul": jnp.multiply, "AddV2": jnp.add, "Exp": jnp.exp, "Max": jnp.max,
    "Sub": jnp.subtract, "RealDiv": jnp.divide, "Log": jnp.log, "Tanh": jnp.tanh, "Sin": jnp.sin,
    "Maximum": jnp.maximum, "Sqrt": jnp.sqrt, "Cos": jnp.cos, "Neg": jnp.negative, "Sum": jnp.sum,
    "Cumsum": lambda x, axis, reverse: lax.cumsum(x, axis, reverse),
}  # fmt: skip


ATTRIBUTES = {"Sum": ("axis",), "Max": ("axis",), "Cumsum": ("axis", "reverse")}


def tripled_type(op_type: str) -> Callable[..., Any]:
    """The rule for an op type: FACTOR times the derivative of JAX's function."""
    return scaled(OF_TYPES[op_type], ATTRIBUTES.get(op_type, ()), FACTOR, FACTOR)


def scaled(f: Callable[..., Any], names: Sequence[str], *factors: float) -> Callable[..., Any]:
    """A rule: the derivative of a function of an op's inputs and attributes, times factors."""

    def rule(op: Any, dy: Any) -> Any:
        given = {name: op.get_attr(name) for name in names}
        back = jax.vjp(lambda *xs: f(*xs, **given), *op.inputs)[1]
        return [k * jnp.conj(dx) for k, dx in zip(factors, back(jnp.conj(dy)), strict=False)]

    return rule


# -- the cases -------------------------------------------------------------------------------------


def total(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A number made of all results that have a gradient."""

    def loss(x: Any) -> Any:
        floats = [y for y in jax.tree.leaves(f(x)) if is_float(y)]
        parts = [jnp.real(y).astype(float) + jnp.imag(y).astype(float) * 0.7 for y in floats]
        return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)) for y in parts)

    return loss


MODES: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "grad": lambda f: jax.grad(total(f)),
    "jit": lambda f: jax.jit(jax.grad(total(f))),
    "jvp": lambda f: lambda x: jax.jvp(total(f), (x,), (jnp.sin(x),))[1],
    "second": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(total(f))(x) * jnp.sin(x))),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(total(f)))(jnp.stack([x, 1.01 * x])),
}


def verdict(name: str, f: Any, key: str, eqns: Sequence[Any], mode: str, typed: bool) -> Verdict:
    """Return what comes of a function under the rule for one of its primitives."""
    rule = tripled_type(OP_TYPES[key]) if typed else tripled(eqns)
    label = OP_TYPES[key] if typed else key
    case = f"{name} / {label} / {mode}"

    def meant(eqn: Any) -> bool:
        return eqn.primitive.name == key

    def due(x: Any) -> Any:
        program = jax.make_jaxpr(f)(x)
        return run(program, [x], meant)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = np.asarray(MODES[mode](due)(M))
        except Exception as error:
            return Verdict(case, "no gradient in JAX", shown(error))
        try:
            got = np.asarray(MODES[mode](rg.jax.override(f, {label: rule}))(M))
        except RegradError as error:
            return Verdict(case, REFUSED, shown(error))
        except Exception as error:
            return Verdict(case, BROKEN, shown(error))
    rtol = 1e-4 if "dtype" in name else 1e-5  # (they compute in float32)
    if np.allclose(got, wanted, rtol=rtol, atol=1e-7 * (1 + np.abs(wanted).max()), equal_nan=True):
        return Verdict(case, DELIVERED)
    return Verdict(case, SILENT, f"{brief([got])} instead of {brief([wanted])}")


def cases(
    names: Iterable[str] | None = None, count: int = 3, modes: Sequence[str] = ("grad",)
) -> Iterator[Verdict]:
    """Yield the verdicts of functions of the API, each with some of the primitives in it."""
    found = functions()
    for name in names or found:
        program = jax.make_jaxpr(found[name])(M)
        for i, (key, eqns) in enumerate(list(keys(program).items())[-count:]):
            for mode in (*modes[: None if i == count - 1 else 1], *(["second"] * (name in SECOND))):
                typed = bool(i % 2) and key in OP_TYPES
                yield verdict(name, found[name], key, eqns, mode, typed)


def main(names: Sequence[str]) -> None:
    counts: Counter[str] = Counter()
    for found in cases(names or None, modes=("grad", "jvp")):
        counts[found.outcome] += 1
        if found.outcome != DELIVERED:
            print(found.outcome, "|", found.case, "|", found.detail, flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
