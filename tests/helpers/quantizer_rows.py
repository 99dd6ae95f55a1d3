"""Quantizers, each with its value and gradients by hand, in NumPy, from its paper.

A reference is a function of values of the shape (parts, n), each part with a scale of its own, of
the gradient that arrives, and of the state in order, of the shape (parts, 1) or (parts, n). It
returns the value, and the gradients of the values and the state; None stands for zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from regrad.rules import quantize as Q
from regrad.rules.quantize.formats import NF4

PARTS = ("tensor", "channel", "token", 4)
MINIFLOATS = {
    "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn, "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}  # fmt: skip
ADDITIVE = {  # by bits, as the authors' code has them
    3: [0, 1 / 4, 1 / 2, 1], 4: [0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1],
    5: [n / 48 for n in (0, 1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 33, 36, 48)],
}  # fmt: skip


class Row(NamedTuple):
    """A quantizer by its part, its reference, and how its state is drawn."""

    make: Callable[[Any], Q.Quantizer]
    reference: Callable[..., Sequence[Any]]
    states: Sequence[Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = ()
    parts: Sequence[Any] = PARTS


def extreme(v: np.ndarray, which: str) -> tuple[np.ndarray, np.ndarray]:
    """The largest or smallest number of each part, and a 1 where it is."""
    at = getattr(v, f"arg{which}")(1)[:, None]
    return np.take_along_axis(v, at, 1), (np.arange(v.shape[1]) == at) * 1.0


def inside_of(u: np.ndarray, lo: float, hi: float, clip: str) -> np.ndarray:
    seen = {"before": u, "after": np.rint(u), "straight": 0 * u + lo}[clip]
    return (lo <= seen) & (seen <= hi)


def sums(x: np.ndarray) -> np.ndarray:
    return x.sum(1, keepdims=True)


# -- uniform grids -------------------------------------------------------------------------------


def affine(
    lo: int, hi: int, side: float = 0, clip: str = "after", through: bool = False
) -> Callable[..., Any]:  # fmt: skip
    """Jacob et al. (2018): with a side the scale is that of the largest magnitude."""

    def reference(v: Any, dy: Any, low: Any = None, high: Any = None) -> Any:
        given = low is not None
        (least, at_least), (most, at_most) = extreme(v, "min"), extreme(v, "max")
        low, high = (least, most) if low is None else (low, high)
        down, up = low < 0, high > 0  # 0 is always in the range
        low, high = low * down, high * up
        if side:
            is_down = 1.0 * (-low > high)
            s, by_low, by_high = np.maximum(-low, high) / side, -is_down, 1 - is_down
            z: Any = 0
        else:
            s, by_low, by_high = (high - low) / (hi - lo), -1, 1
            z = lo - np.rint(low / s)
        u = v / s + z
        inside = inside_of(u, lo, hi, clip)
        code = np.clip(np.rint(u), lo, hi)
        ds = sums(dy * (code - z - inside * v / s)) * through / (side or hi - lo)
        by_low, by_high = ds * by_low * down, ds * by_high * up
        if given:
            return s * (code - z), dy * inside, by_low, by_high
        return s * (code - z), dy * inside + by_low * at_least + by_high * at_most

    return reference


def lsq(lo: int, hi: int, clip: str = "before", factor: float | None = None) -> Any:
    """Esser et al. (2020), equations 1 to 3."""

    def reference(v: Any, dy: Any, s: Any) -> Any:
        u = v / s
        inside, code = inside_of(u, lo, hi, clip), np.clip(np.rint(u), lo, hi)
        ds = sums(dy * np.where(inside, np.rint(u) - u if clip != "straight" else code - u, code))
        return s * code, dy * inside, ds * ((v.shape[1] * hi) ** -0.5 if factor is None else factor)

    return reference


def lsq_plus(lo: int, hi: int, clip: str = "before") -> Any:
    """Bhalgat et al. (2020), equations 5 and 6."""

    def reference(v: Any, dy: Any, s: Any, b: Any) -> Any:
        value, dv, ds = lsq(lo, hi, clip)(v - b, dy, s)
        return value + b, dv, ds, sums(dy - dv) * (v.shape[1] * hi) ** -0.5

    return reference


def pact(n: int) -> Any:
    """Choi et al. (2018), equations 1 to 3."""

    def reference(v: Any, dy: Any, alpha: Any) -> Any:
        y = 0.5 * (abs(v) - abs(v - alpha) + alpha)
        dv, dalpha = dy * ((v > 0) & (v < alpha)), sums(dy * (v >= alpha))
        return np.rint(y * n / alpha) * alpha / n, dv, dalpha

    return reference


def dorefa_weights(n: int) -> Any:
    """Zhou et al. (2016), equations 5 and 9."""

    def reference(v: Any, dy: Any) -> Any:
        t = np.tanh(v)
        most, at = extreme(abs(t), "max")
        dt = dy / most - at * np.sign(t) * sums(dy * t) / most**2
        return 2 * np.rint(n * (t / (2 * most) + 0.5)) / n - 1, dt * (1 - t**2)

    return reference


def ewgs(lo: int, hi: int, delta: float) -> Any:
    """Lee et al. (2021), equation 5."""

    def reference(v: Any, dy: Any, s: Any) -> Any:
        u = np.clip(v / s, lo, hi)
        factor = 1 + delta * np.sign(dy) * (u - np.rint(u))
        inside = inside_of(v / s, lo, hi, "before")
        ds = sums(dy * (np.rint(u) - inside * u * factor)) * (v.shape[1] * hi) ** -0.5
        return s * np.rint(u), dy * factor * inside, ds

    return reference


def adaround(lo: int, hi: int) -> Any:
    """Nagel et al. (2020), equations 22 and 23."""

    def reference(v: Any, dy: Any, big_v: Any, s: Any) -> Any:
        sigmoid = 1 / (1 + np.exp(-big_v))
        h = 1.2 * sigmoid - 0.1
        code = np.floor(v / s) + np.clip(h, 0, 1)
        passes = (h >= 0) & (h <= 1) & (lo <= code) & (code <= hi)
        slope = 1.2 * sigmoid * (1 - sigmoid)
        return s * np.clip(code, lo, hi), None, dy * s * slope * passes, None

    return reference


def dorefa_inputs(n: int) -> Any:
    return lambda v, dy: (np.rint(n * np.clip(v, 0, 1)) / n, dy * ((v >= 0) & (v <= 1)))


def stochastic(lo: int, hi: int) -> Any:
    """Gupta et al. (2015), section 3."""

    def reference(v: Any, dy: Any, noise: Any) -> Any:
        s = abs(v).max(1, keepdims=True) / hi
        code = np.floor(v / s + noise)
        return s * np.clip(code, lo, hi), dy * ((lo <= code) & (code <= hi)), None

    return reference


# -- few levels ----------------------------------------------------------------------------------

SLOPES = {
    "identity": lambda u, k: 1 + 0 * u, "clip": lambda u, k: abs(u) <= 1,
    "approx": lambda u, k: np.clip(2 - 2 * abs(u), 0, None),
    # Darabi et al. (2019), equation 3
    "swish": lambda u, k: k * (2 - k * u * np.tanh(k * u / 2)) / (1 + np.cosh(k * u)),
    "tanh": lambda u, k: max(1 / k, 1) * k * (1 - np.tanh(k * u) ** 2),
}  # fmt: skip


def sign(estimator: str, k: float = 5.0, scaled: bool = False) -> Any:
    def reference(v: Any, dy: Any, shift: Any = None) -> Any:
        u = v if shift is None else v + shift
        s = abs(v).mean(1, keepdims=True) if scaled else 1
        dv = dy * s * SLOPES[estimator](u, k)
        return (s * np.where(u >= 0, 1, -1), dv, *([] if shift is None else [sums(dv)]))

    return reference


def ternary(threshold: float) -> Any:
    """Li and Liu (2016), equations 3 to 6."""

    def reference(v: Any, dy: Any) -> Any:
        large = abs(v) > threshold * abs(v).mean(1, keepdims=True)
        return np.sign(v) * large * sums(abs(v) * large) / sums(1 * large), dy

    return reference


def absmean(v: Any, dy: Any) -> Any:
    s = abs(v).mean(1, keepdims=True)
    return s * np.clip(np.rint(v / s), -1, 1), dy


def absmax(hi: int) -> Any:
    def reference(v: Any, dy: Any) -> Any:
        s = abs(v).max(1, keepdims=True) / hi
        return s * np.rint(v / s), dy

    return reference


def levels(table: Sequence[float]) -> Any:
    """The nearest level, by all distances."""
    known = np.array(table)

    def reference(v: Any, dy: Any) -> Any:
        s = abs(v).max(1, keepdims=True) / abs(known).max()
        return s * known[abs(v[..., None] / s[..., None] - known).argmin(-1)], dy

    return reference


# -- floating point ------------------------------------------------------------------------------


def cast(u: Any, kind: Any) -> Any:
    """Cast as ml_dtypes does, half to even; saturate."""
    most = float(ml_dtypes.finfo(kind).max)
    return np.clip(u, -most, most).astype(kind).astype(np.float64)


def fp8(format: str) -> Any:
    kind = MINIFLOATS[format]

    def reference(v: Any, dy: Any) -> Any:
        s = abs(v).max(1, keepdims=True) / float(ml_dtypes.finfo(kind).max)
        return s * cast(v / s, kind), dy

    return reference


def mx(format: str) -> Any:
    """OCP MX 1.0, section 6.3."""

    def reference(v: Any, dy: Any) -> Any:
        exponent = np.floor(np.log2(abs(v).max(1, keepdims=True)))
        if format == "int8":
            s = 2.0**exponent
            return s * np.clip(np.rint(v / s * 64), -127, 127) / 64, dy
        kind = MINIFLOATS[format]
        s = 2.0 ** (exponent - np.floor(np.log2(float(ml_dtypes.finfo(kind).max))))
        return s * cast(v / s, kind), dy

    return reference


def nvfp4(v: Any, dy: Any) -> Any:
    whole = abs(v).max() / (6 * 448)
    s = whole * cast(abs(v).max(1, keepdims=True) / (6 * whole), ml_dtypes.float8_e4m3fn)
    return s * cast(v / s, ml_dtypes.float4_e2m1fn), dy


# -- the rows ------------------------------------------------------------------------------------


def drawn(low: float, high: float, whole: bool = False) -> Any:
    return lambda rng, shape: rng.uniform(low, high, shape if whole else (shape[0], 1))


STEP = drawn(0.1, 0.4)
LOW, HIGH = drawn(-2.0, -0.5), drawn(0.5, 2.0)


def rows() -> dict[str, Row]:
    """Return a row for each quantizer and each of its options."""
    found = {
        "affine": Row(lambda p: Q.affine(per=p), affine(-128, 127, 127)),
        "affine tie": Row(lambda p: Q.affine(4, per=p, largest="tie"), affine(-8, 7, 7.5)),
        "affine before": Row(
            lambda p: Q.affine(4, per=p, largest="tie", clip="before"),
            affine(-8, 7, 7.5, "before"),
        ),
        "affine narrow": Row(
            lambda p: Q.affine(4, per=p, narrow=True, largest="tie"), affine(-7, 7, 7)
        ),
        "affine brevitas": Row(
            lambda p: Q.affine(3, per=p, clip="straight", scale_gradient=True, narrow=True),
            affine(-3, 3, 3, "straight", True),
        ),
        "affine unsigned": Row(
            lambda p: Q.affine(4, per=p, signed=False, scale_gradient=True),
            affine(0, 15, 15, through=True),
        ),
        "affine minmax": Row(
            lambda p: Q.affine(4, per=p, range="minmax"), affine(-8, 7, 7), (LOW, HIGH)
        ),
        "affine ema, gradient": Row(
            lambda p: Q.affine(4, per=p, range="ema", symmetric=False, scale_gradient=True),
            affine(-8, 7, through=True), (LOW, HIGH),
        ),
        "lsq straight": Row(
            lambda p: Q.lsq(4, per=p, clip="straight"), lsq(-8, 7, "straight"), (STEP,)
        ),
        "lsq after": Row(
            lambda p: Q.lsq(3, per=p, clip="after", gradient_scale=0.5),
            lsq(-4, 3, "after", 0.5), (STEP,),
        ),
        "lsq unsigned": Row(lambda p: Q.lsq(2, per=p, signed=False), lsq(0, 3), (STEP,)),
        "lsq": Row(lambda p: Q.lsq(4, per=p), lsq(-8, 7), (STEP,)),
        "lsq+": Row(lambda p: Q.lsq_plus(3, per=p), lsq_plus(0, 7), (STEP, drawn(-1, 0))),
        "lsq+ signed": Row(
            lambda p: Q.lsq_plus(3, per=p, signed=True), lsq_plus(-4, 3), (STEP, drawn(-1, 1))
        ),
        "lsq+ after": Row(
            lambda p: Q.lsq_plus(2, per=p, clip="after"), lsq_plus(0, 3, "after"),
            (STEP, drawn(-1, 0)),
        ),
        "pact": Row(lambda p: Q.pact(3, per=p), pact(7), (drawn(0.8, 1.5),)),
        "dorefa": Row(lambda p: Q.dorefa(3), dorefa_weights(7), parts=("tensor",)),
        "dorefa inputs": Row(
            lambda p: Q.dorefa(2, of="inputs"), dorefa_inputs(3), parts=("tensor",)
        ),
        "ewgs": Row(lambda p: Q.ewgs(3, delta=0.3, per=p), ewgs(-4, 3, 0.3), (STEP,)),
        "ewgs unsigned": Row(
            lambda p: Q.ewgs(3, delta=0.3, per=p, signed=False), ewgs(0, 7, 0.3), (STEP,)
        ),
        "adaround": Row(
            lambda p: Q.adaround(3, per=p), adaround(-4, 3), (drawn(-4, 4, whole=True), STEP)
        ),
        "stochastic": Row(
            lambda p: Q.stochastic(3, per=p), stochastic(-4, 3), (drawn(0, 1, whole=True),)
        ),
        "sign scaled": Row(
            lambda p: Q.sign(scale=True, per=p), sign("clip", scaled=True)
        ),
        "sign shift": Row(
            lambda p: Q.sign("approx", shift=True, per=p), sign("approx"), (drawn(-1, 1),)
        ),
        "sign slope": Row(lambda p: Q.sign("tanh", slope=0.5), sign("tanh", 0.5)),
        "ternary": Row(lambda p: Q.ternary(per=p), ternary(0.7)),
        "ternary 0.05": Row(lambda p: Q.ternary(0.05, per=p), ternary(0.05)),
        "absmean": Row(lambda p: Q.absmean(per=p), absmean),
        "absmax": Row(lambda p: Q.absmax(4, per=p), absmax(7)),
        "levels": Row(lambda p: Q.levels([-0.5, 0, 0.2, 1], per=p), levels([-0.5, 0, 0.2, 1])),
        "nf4": Row(lambda p: Q.nf4(per=p), levels(NF4)),
        "power_of_two": Row(
            lambda p: Q.power_of_two(3, per=p), levels([-1, -0.5, -0.25, 0, 0.25, 0.5, 1])
        ),
        "nvfp4": Row(lambda p: Q.nvfp4(per=p), nvfp4, parts=(4, 8)),
        "mx int8": Row(lambda p: Q.mx("int8", per=p), mx("int8"), parts=(4, 8)),
    }  # fmt: skip
    for signed, lo, hi in ((True, -8, 7), (False, 0, 15)):
        for name, through in (("", False), (", gradient", True)):
            found[f"affine asymmetric {lo}{name}"] = Row(
                lambda p, s=signed, t=through: Q.affine(
                    4, per=p, signed=s, symmetric=False, scale_gradient=t
                ),
                affine(lo, hi, through=through),
            )
    for name in SLOPES:
        found[f"sign {name}"] = Row(lambda p, e=name: Q.sign(e), sign(name))
    for name in MINIFLOATS:
        found[f"mx {name}"] = Row(lambda p, f=name: Q.mx(f, per=p), mx(name), parts=(4, 8))
        found[f"fp8 {name}"] = Row(lambda p, f=name: Q.fp8(f, per=p), fp8(name))
    for bits, table in ADDITIVE.items():
        both = sorted({*table, *(-x for x in table)})
        found[f"apot {bits}"] = Row(
            lambda p, b=bits: Q.power_of_two(b, additive=True, per=p), levels(both)
        )
    return found
