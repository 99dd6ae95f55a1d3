"""Rules of `lrp` on every key: a rule computes its formula, or raises with advice."""

from __future__ import annotations

import inspect
from functools import partial, wraps

import numpy as np
import pytest

import regrad as rg
from regrad.core.backends import is_traced
from regrad.errors import RegradError, RuleError
from regrad.rules import lrp, lrp_maps
from tests.helpers.sample_runs import case_named
from tests.samples import all_samples

LOW, HIGH, TINY = -3.0, 4.0, 1e-9
RULES = {
    "epsilon": lrp.epsilon(0.1), "gamma": lrp.gamma(0.25, TINY), "z_plus": lrp.z_plus(TINY),
    "alpha_beta": lrp.alpha_beta(2.0, 1.0, TINY), "z_box": lrp.z_box(LOW, HIGH, TINY),
    "w_square": lrp.w_square(TINY), "flat": lrp.flat(TINY), "pass_": lrp.pass_,
    "uniform": lrp.uniform, "frozen_norm": lrp.frozen_norm, "rescale": lrp.rescale,
    "rescale_max": lrp.rescale_max, "reveal_cancel": lrp.reveal_cancel,
    "beta_smooth": lrp.beta_smooth(3.0),
}  # fmt: skip
LINEAR = ("gamma", "z_plus", "alpha_beta", "z_box", "w_square", "flat")


def array(x):
    if isinstance(x, list | tuple):
        return [array(part) for part in x]
    x = x.detach() if hasattr(x, "detach") else x
    return x if x is None or isinstance(x, bool) else np.asarray(x)


def like(x, values):
    """The values as an array of the library of another one."""
    return x * 0 + (x.new_tensor(values) if hasattr(x, "new_tensor") else values)


def rows_of(forward, x, w, bias):
    """What a linear map gives for zeros, and for each element alone."""
    rest = [w] if bias is lrp_maps.ABSENT else [w, bias]
    units = [e.reshape(tuple(x.shape)) for e in np.eye(int(np.prod(x.shape)))]
    return [forward(x * 0, *rest), *[forward(like(x, e), *rest) for e in units]]


def noted(given, answer, seeds, calls):
    """Note the arrays of a run of a rule: its arguments, its answer, and runs of `builtin`."""
    given = {n: None if x is lrp_maps.ABSENT else x for n, x in given.items()}
    names = ("x", "a", "y", "dy", "bias", "eps", "normalized_shape")
    found = {n: given[n] for n in names if n in given}
    found |= {n: given[n] for n in ("rows", "ones") if n in given}
    found |= {"seeds": seeds, "answer": answer}
    if is_traced(found["y" if "y" in found else "dy"]):
        from jax import debug

        debug.callback(lambda found: calls.append(found), found)
    else:
        calls.append(found)


def caught(rule, calls):
    """A rule, whose runs are noted."""
    function = rule.func if isinstance(rule, partial) else rule

    @wraps(function)
    def run(*args, **names):
        bound = inspect.signature(function).bind(*args, **names)
        bound.apply_defaults()
        given, seeds = bound.arguments, []
        if "vjp_" in given:
            pair = [given[n] for n in ("xw" if given["x"] is not None else "ab")]
            others = given["forward"], pair[0]
            rest = pair[1] * 0 + 1, given["bias"]
            given = {**given, "x": pair[0], "rows": rows_of(*others, pair[1], given["bias"])}
            given["ones"] = rows_of(*others, *rest)
        if "builtin" in given:
            own = given["builtin"]

            def builtin(dy):
                seeds.append((dy, found := own(dy)))
                return found

            bound.arguments["builtin"] = builtin
        answer = function(*bound.args, **bound.kwargs)
        noted(given, answer, seeds, calls)
        return answer

    return run


# -- the formulas, in NumPy ------------------------------------------------------------------------


def positive(v):
    return np.maximum(v, 0)


def negative(v):
    return np.minimum(v, 0)


def stable(z, by):
    return z + np.where(z >= 0, by, -by)


def contributions(name, x, w, b, y, ones):
    """The path of relevance to each output, its whole, and its factor."""
    agree = positive(x) * positive(w) + negative(x) * negative(w)
    differ = positive(x) * negative(w) + negative(x) * positive(w)
    if name == "gamma":
        p, n = (lambda v, of=of: v + 0.25 * of(v) for of in (positive, negative))
        for_above = positive(x) * p(w) + negative(x) * n(w)
        for_below = positive(x) * n(w) + negative(x) * p(w)
        return [(for_above, for_above.sum(0) + p(b), y > 0),
                (for_below, for_below.sum(0) + n(b), y < 0)]  # fmt: skip
    if name in ("z_plus", "alpha_beta"):
        both = [(agree, agree.sum(0) + positive(b), 2.0 if name == "alpha_beta" else 1.0)]
        both += [(differ, differ.sum(0) + negative(b), -1.0)] * (name == "alpha_beta")
        return both
    parts = {
        "z_box": x * w - LOW * positive(w) - HIGH * negative(w), "w_square": w**2, "flat": ones,
    }[name]  # fmt: skip
    return [(parts, parts.sum(0) + (b**2 if name == "w_square" else 0), 1.0)]


def matrix(rows):
    """The matrix of a linear map, and its constant."""
    constant, *each = array(rows)
    return np.stack([row - constant for row in each]).reshape(len(each), -1), constant.ravel()


def linear_due(name, given, x, y, dy):
    w, b = matrix(given["rows"])
    parts = contributions(name, x.reshape(-1, 1), w, b, y.ravel(), matrix(given["ones"])[0])
    relevance = (y * dy).ravel()
    shares = sum((c / stable(z, TINY) * (f * relevance)).sum(1) for c, z, f in parts)
    return shares.reshape(x.shape) / (x + 1e-19)


def halves(v):
    return v[: len(v) // 2], v[len(v) // 2 :]


def due(name, given, x, y, dy):
    """The gradient by the first input that a formula gives."""
    if name in LINEAR:
        return linear_due(name, given, x, y, dy)
    if name == "pass_":
        return (y + 1e-19) * dy / (x + 1e-19)
    if name == "beta_smooth":
        return dy / (1 + np.exp(-3.0 * x))
    (x0, x1), (y0, y1) = halves(x), halves(y)
    ((_, own),) = given["seeds"]
    own = own[0] if isinstance(own, tuple) else own  # (by x, of several inputs)
    still = np.concatenate([abs(x0 - x1) < 1e-10] * 2)
    slope = np.concatenate([(y0 - y1) / np.where(x0 == x1, 1, x0 - x1)] * 2)
    return np.where(still, array(own), dy * slope)


def kept(name, given, x, y, dy, dx):
    """The relevance to share, and the share of the input."""
    if name == "frozen_norm":
        bias = 0 if given["bias"] is None else array(given["bias"])
        return ((y - bias) * dy).sum(), (x * dx).sum()
    (x0, x1), (y0, y1), (dy, _) = halves(x), halves(y), halves(dy)
    if name == "reveal_cancel":  # (what a bias adds is not of x)
        change = np.concatenate([x0 - x1, 0 * x1]).ravel() @ matrix(given["rows"])[0]
        y0, y1 = positive(y1 + change.reshape(y.shape)[: len(y1)]), positive(y1)
    return (dy * (y0 - y1)).sum(), ((x0 - x1) * dx[: len(x0)]).sum()


def check(name, given):
    """Compare the answer of a rule with its formula."""
    x, y, dy = (array(given.get(n)) for n in ("x", "y", "dy"))
    x = array(given.get("a")) if x is None else x
    answer = given["answer"]
    if name in ("epsilon", "uniform"):  # of the op's own gradients
        ((seed, own),) = given["seeds"]
        answer, own = ([x] if not isinstance(x, list | tuple) else x for x in (answer, own))
        count = sum(dx is not None and bool(np.any(array(dx))) for dx in own)
        factor = 1 if name == "epsilon" else max(count, 1)
        own = [None if g is None else array(g) / factor for g in own]
        pairs = [*zip(answer, own, strict=False)]
        pairs += [(seed, y * dy / stable(y, 0.1))] if name == "epsilon" else []
    else:
        dx = array(answer[0] if isinstance(answer, list | tuple) else answer)
        whole = name in ("frozen_norm", "rescale_max", "reveal_cancel")
        pairs = [kept(name, given, x, y, dy, dx) if whole else (dx, due(name, given, x, y, dy))]
    fitted = name == "frozen_norm" and (given["eps"] is None or given["normalized_shape"] is None)
    for found, expected in pairs:
        if expected is not None:  # (frozen_norm may fit a norm whose eps it does not know)
            rtol = 0.03 if fitted else 1e-6
            np.testing.assert_allclose(array(found), expected, rtol=rtol, atol=1e-9)


def outcome(name, key, run):
    """Run a program under a rule; return whether the rule ran, each time by its formula."""
    calls = []
    with case_named(f"{name} on {getattr(key, '__name__', key)}"):
        try:
            run({key: caught(RULES[name], calls)})
        except RegradError as error:
            said = " ".join([str(error), *getattr(error, "__notes__", ())])
            assert name in said or not isinstance(error, RuleError), said
            assert len(said) > 60, said
            return "refused"
        with np.errstate(all="ignore"):
            for given in calls:
                check(name, given)
    return "ran" if calls else "idle"


# -- the keys --------------------------------------------------------------------------------------


def real(row):
    floats = [x for x in row.inputs if x.dtype.kind in "fc"]
    return floats and row.order and all(x.dtype.kind == "f" and x.size < 150 for x in floats)


SAMPLES = {op_type: row for row in reversed(all_samples()) if real(row) for op_type in row.covers}


def of_regrad(row, rules):
    xs = [rg.tensor(x) for x in row.inputs]
    floats = [i for i, x in enumerate(xs) if x.dtype.kind == "f"]

    def f(*given):
        every = dict(enumerate(xs)) | dict(zip(floats, given, strict=True))
        ys = row.f(*every.values())
        ys = ys if isinstance(ys, list | tuple) else [ys]
        ys = [rg.abs(y) if y.dtype.kind == "c" else y for y in ys]
        return sum((y * y).sum() for y in ys if y.dtype.kind == "f")

    with rg.gradient_override_map(rules):
        rg.grads(f, unconnected="zero")([xs[i] for i in floats])


def run_each(name, calls):
    """Run a rule on each key; the program of a key is a function of given values and the rules."""
    found = [outcome(name, key, partial(run, *given)) for key, run, given in calls]
    assert found.count("ran") + found.count("refused") > 0.9 * len(found)


SKIPS = pytest.mark.filterwarnings(
    "ignore::regrad.errors.UnusedOverrideWarning", "ignore::RuntimeWarning", "ignore::UserWarning"
)


@SKIPS
@pytest.mark.parametrize("name", RULES)
def test_keys_of_regrad(name):
    run_each(name, [(key, of_regrad, (row,)) for key, row in SAMPLES.items()])


def numbers(*shape):
    return np.sin(np.arange(1.0, 1 + np.prod(shape)) * 2.7).reshape(shape)


def torch_calls():
    """Calls of what torch has by keys: each op type in a form, and callables that are none."""
    import torch
    import torch.nn.functional as F

    from regrad.torch.optypes import families, spellings_of
    from tests.torch.test_ops import plain

    x, y, v = (torch.tensor(numbers(*s)) for s in ((4, 3), (3, 2), (3,)))
    image, kernel = torch.tensor(numbers(2, 2, 4, 4)), torch.tensor(numbers(2, 2, 3, 3))
    for op_type, family in families().items():
        if op_type == "Step":
            continue  # (torch has no gradient for it)
        each = ((f, each) for f, _ in spellings_of(family) for each, _ in plain(f, op_type, False))
        f, args = next(each, (None, ()))
        if f is not None:
            yield op_type, f, args
    calls = [
        (F.linear, x, y.mT, v[:2]), (F.linear, x, y.mT), (torch.addmm, v[:2], x, y),
        (torch.addmm, torch.tensor(numbers(4, 2)), x, y), (torch.addmv, x[:, 0], x, v),
        (torch.baddbmm, v[:2], x[None], y[None]), (torch.addbmm, v[:2], x[None], y[None]),
        (torch.addr, x, x[:, 0], v), (torch.einsum, "ij,jk->ik", x, y), (torch.outer, v, v),
        (torch.tensordot, x, y, 1), (torch.kron, x, y), (torch.inner, x, x), (torch.mv, x, v),
        (torch.linalg.cross, x, x), (F.bilinear, x, x, torch.tensor(numbers(2, 3, 3))),
        (F.conv1d, image[0], torch.tensor(numbers(2, 4, 3)), v[:2]),
        (F.conv_transpose1d, image[0], torch.tensor(numbers(4, 2, 3))),
        (F.conv_transpose2d, image, kernel), (F.conv2d, image, kernel, v[:2]),
        (F.layer_norm, x, (3,), v, v), (F.layer_norm, x, (3,)), (F.rms_norm, x, (3,), v),
        (F.rms_norm, x, (3,)), (F.group_norm, image, 2),
        (F.instance_norm, image), (F.max_pool1d, image[0], 2), (F.max_pool2d, image, 2),
        (F.adaptive_max_pool2d, image, 2), (F.avg_pool1d, image[0], 2), (F.hardtanh, x),
        (F.hardswish, x), (F.softshrink, x), (F.threshold, x, 0.1, 0.0), (F.glu, image),
        (F.scaled_dot_product_attention, image, image, image), (F.mse_loss, x, x + 1),
        (F.cosine_similarity, x, x + 1), (F.pairwise_distance, x, x + 1), (torch.cdist, x, x + 1),
        (torch.lerp, x, x + 1, 0.5), (torch.topk, x, 2), (torch.var, x), (torch.std, x),
        (F.cross_entropy, x, x.softmax(1)), (F.normalize, x), (torch.logsumexp, x, 1),
        (F.interpolate, image, 2), (F.pad, x, (1, 1)), (torch.where, x > 0, x, 2 * x),
    ]  # fmt: skip
    yield from [(f, f, args) for f, *args in calls]
    yield F.batch_norm, lambda x, w, b: F.batch_norm(x, v * 0, v**2, w, b), (x, v, v)


def of_torch(f, args, rules):
    import torch

    from tests.torch.test_ops import run

    with rg.torch.gradient_override_map(rules):
        ys, leaves = run(f, args, False)
        ys = ys if isinstance(ys, list | tuple) else [ys]
        total = sum((y * y).sum() for y in ys if y.requires_grad)
    leaves = [x for x in leaves if x.requires_grad]
    if isinstance(total, torch.Tensor):
        torch.autograd.grad(total, leaves, allow_unused=True)


@SKIPS
@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", RULES)
def test_keys_of_torch(name):
    pytest.importorskip("torch")
    run_each(name, [(key, of_torch, given) for key, *given in torch_calls()])


def jax_calls():
    """Functions of an array, by keys: op types, primitives, and functions of users."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    x, w, image = (jnp.asarray(numbers(*shape)) for shape in ((4, 3), (3, 2), (2, 4, 4, 2)))
    kernel, channels = jnp.asarray(numbers(3, 3, 2, 2)), jnp.moveaxis(image, 3, 1)

    @jax.jit
    def dense(x, w):
        return x @ w

    @jax.jit
    def layer(inputs, kernel):
        return inputs @ kernel

    @jax.jit
    def affine(x, w, bias):
        return x @ w + bias

    @jax.jit
    def scaled(x):
        return 2 * x

    of_one = "tanh exp sin log sqrt abs square sign floor cumsum sort cumprod sum max prod"
    for name in of_one.split():
        yield name, getattr(jnp, name), abs(x)
    for name in [
        "Tanh",
        "Exp",
        "Sin",
        "Sqrt",
        "Abs",
        "Sum",
        "Max",
        "Mean",
        "Square",
        "Rsqrt",
        "Softmax",
        "Cumsum",
        "Relu",
        "Gelu",
    ]:
        places = jnp, jax.nn, lax
        f = next(getattr(m, name.lower()) for m in places if hasattr(m, name.lower()))
        yield name, f, abs(x)
    for name in [
        "relu",
        "gelu",
        "silu",
        "softmax",
        "log_softmax",
        "elu",
        "celu",
        "mish",
        "hard_tanh",
        "hard_swish",
    ]:
        yield getattr(jax.nn, name), getattr(jax.nn, name), x
    for f in (jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.arctan2, jnp.power):
        for key in {"add": "add AddV2", "subtract": "sub Sub", "multiply": "mul Mul",
                    "divide": "div RealDiv", "maximum": "max Maximum", "arctan2": "atan2",
                    "power": "pow Pow"}[f.__name__].split():  # fmt: skip
            yield key, partial(lambda f, x: f(x, x[::-1] + 3), f), abs(x)
    yield from [
        ("MatMul", lambda x: x @ w, x), ("dot_general", lambda x: x @ w, x),
        ("mul", lambda x: x * w.sum(), x),
        ("conv_general_dilated", lambda x: lax.conv(x, kernel.T, (1, 1), "VALID"), channels),
        ("Conv2D", lambda x: lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")), image),
        ("reduce_window_max", lambda x: lax.reduce_window(
            x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), image),
        ("reduce_max", lambda x: x.max(1), x), ("reduce_sum", lambda x: x.sum(1), x),
        ("reshape", jnp.ravel, x), ("transpose", jnp.transpose, x), 
        ("concatenate", lambda x: jnp.concatenate([x, 2 * x]), x),
        (dense, lambda x: dense(x, w), x), (layer, lambda x: layer(x, w), x),
        (affine, lambda x: affine(x, w, w[0]), x), (scaled, scaled, x),
    ]  # fmt: skip


def of_jax(f, x, rules):
    import jax

    jax.grad(rg.jax.override(lambda x: (f(x) ** 2).sum(), rules))(x)
    jax.effects_barrier()


@SKIPS
@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", RULES)
def test_keys_of_jax(name):
    pytest.importorskip("jax")
    run_each(name, [(key, of_jax, given) for key, *given in jax_calls()])
