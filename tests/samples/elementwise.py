"""Samples of the elementwise ops."""

from __future__ import annotations

import numpy as np
import scipy.special

import regrad as rg
from regrad.ops import binary
from tests.samples import away, sample, spread

REAL = spread(2, 3)
POSITIVE = spread(2, 3, low=0.4, high=3.0)
WITHIN = spread(2, 3, low=-0.85, high=0.85)
ABOVE_ONE = spread(2, 3, low=1.2, high=3.0)
COMPLEX = spread(2, 2, seed=1) + 1j * spread(2, 2, seed=2)

ZERO = "its gradient is zero"
NONE = "no gradient: the result is of bools or integers"
SPECIAL = "the library's kernel has no third derivative to compare with"

UNARY = [
    # op type, function, reference, inputs
    ("Neg", rg.negative, np.negative, REAL), ("Abs", rg.abs, np.abs, away(2, 3)),
    ("Square", rg.square, np.square, REAL), ("Sqrt", rg.sqrt, np.sqrt, POSITIVE),
    ("Rsqrt", rg.rsqrt, lambda x: x**-0.5, POSITIVE),
    ("Reciprocal", rg.reciprocal, np.reciprocal, away(2, 3)), ("Exp", rg.exp, np.exp, REAL),
    ("Expm1", rg.expm1, np.expm1, REAL), ("Log", rg.log, np.log, POSITIVE),
    ("Log1p", rg.log1p, np.log1p, POSITIVE), ("Log2", rg.log2, np.log2, POSITIVE),
    ("Log10", rg.log10, np.log10, POSITIVE), ("Sin", rg.sin, np.sin, REAL),
    ("Cos", rg.cos, np.cos, REAL), ("Tan", rg.tan, np.tan, WITHIN),
    ("Asin", rg.asin, np.arcsin, WITHIN), ("Acos", rg.acos, np.arccos, WITHIN),
    ("Atan", rg.atan, np.arctan, REAL), ("Sinh", rg.sinh, np.sinh, REAL),
    ("Cosh", rg.cosh, np.cosh, REAL), ("Tanh", rg.tanh, np.tanh, REAL),
    ("Asinh", rg.asinh, np.arcsinh, REAL), ("Acosh", rg.acosh, np.arccosh, ABOVE_ONE),
    ("Atanh", rg.atanh, np.arctanh, WITHIN), ("Erf", rg.erf, scipy.special.erf, REAL),
    ("Erfc", rg.erfc, scipy.special.erfc, REAL),
    ("Erfinv", rg.erfinv, scipy.special.erfinv, WITHIN),
    ("Lgamma", rg.lgamma, scipy.special.gammaln, POSITIVE),
    ("Digamma", rg.digamma, scipy.special.psi, POSITIVE), ("Identity", rg.identity, np.array, REAL),
]  # fmt: skip

BINARY = [
    # op type, function, reference, a, b
    ("AddV2", rg.add, np.add, REAL, spread(2, 3, seed=3)),
    ("Sub", rg.subtract, np.subtract, REAL, spread(2, 3, seed=3)),
    ("Mul", rg.multiply, np.multiply, REAL, spread(2, 3, seed=3)),
    ("RealDiv", rg.divide, np.divide, REAL, away(2, 3, seed=3)),
    ("Pow", rg.pow, np.power, POSITIVE, spread(2, 3, seed=3)),
    ("Maximum", rg.maximum, np.maximum, REAL, spread(2, 3, seed=3) + 0.11),
    ("Minimum", rg.minimum, np.minimum, REAL, spread(2, 3, seed=3) + 0.11),
    ("SquaredDifference", rg.squared_difference, lambda a, b: (a - b) ** 2, REAL,
     spread(2, 3, seed=3)),
    ("Atan2", rg.atan2, np.arctan2, away(2, 3), away(2, 3, seed=3)),
    ("Hypot", rg.hypot, np.hypot, away(2, 3), away(2, 3, seed=3)),
    ("LogAddExp", rg.logaddexp, np.logaddexp, REAL, spread(2, 3, seed=3)),
    ("FloorMod", rg.remainder, np.mod, REAL * 3, away(2, 3, low=0.9, seed=3)),
    ("Copysign", rg.copysign, np.copysign, away(2, 3), away(2, 3, seed=3)),
]  # fmt: skip

STEPS = [
    ("Sign", rg.sign, np.sign), ("Ceil", rg.ceil, np.ceil), ("Floor", rg.floor, np.floor),
    ("Round", rg.round, np.round), ("Trunc", rg.trunc, np.trunc),
    ("Step", rg.step, lambda x: np.heaviside(x, 0.0)),
]  # fmt: skip

PREDICATES = [
    ("IsNan", rg.isnan, np.isnan), ("IsInf", rg.isinf, np.isinf),
    ("IsFinite", rg.isfinite, np.isfinite), ("SignBit", rg.signbit, np.signbit),
]  # fmt: skip

COMPARISONS = [
    ("Equal", rg.equal, np.equal), ("NotEqual", rg.not_equal, np.not_equal),
    ("Less", rg.less, np.less), ("LessEqual", rg.less_equal, np.less_equal),
    ("Greater", rg.greater, np.greater), ("GreaterEqual", rg.greater_equal, np.greater_equal),
]  # fmt: skip

BOOLS = np.array([True, False, True, False]), np.array([True, True, False, False])
INTEGERS = np.array([5, 3, 12, 9]), np.array([1, 2, 3, 1])

SAMPLES = [
    *[sample(t, f, x, covers=t, reference=r) for t, f, r, x in UNARY],
    *[sample(t, f, (a, b), covers=t, reference=r) for t, f, r, a, b in BINARY],
    *[
        sample(f"{t}, a column with a row", f, (a[:, :1], b[0]), covers=t, reference=r)
        for t, f, r, a, b in BINARY
    ],
    *[
        sample(f"{t}, a scalar with a matrix", f, (a[0, 0], b), covers=t, reference=r)
        for t, f, r, a, b in BINARY
    ],
    *[
        sample(f"{t} of one tensor twice", lambda x, f=f: f(x, x * 2.5), a, covers=t)
        for t, f, _, a, _ in BINARY
        if t not in ("FloorMod", "Copysign")
    ],
    *[
        sample(f"{t}, rank 0", f, x[0, 0], covers=t, reference=r) for t, f, r, x in UNARY
    ],
    *[
        sample(f"{t}, empty", f, x[:, :0], covers=t, reference=r) for t, f, r, x in UNARY[:4]
    ],
    *[
        sample(t, f, spread(2, 3, low=-3.3, high=3.1), covers=t, reference=r)
        for t, f, r in STEPS
    ],
    *[
        sample(t, f, np.array([1.0, -np.inf, np.nan, -0.5]), covers=t, reference=r, order=0,
               reason=NONE)
        for t, f, r in PREDICATES
    ],
    *[
        sample(t, f, (np.array([1.0, 2.0, 3.0]), np.array([[2.0], [3.0]])), covers=t,
               reference=r, order=0, reason=NONE)
        for t, f, r in COMPARISONS
    ],
    *[
        sample(t, f, BOOLS, covers=t, reference=r, order=0, reason=NONE)
        for t, f, r in [
            ("LogicalAnd", rg.logical_and, np.logical_and),
            ("LogicalOr", rg.logical_or, np.logical_or),
            ("LogicalXor", rg.logical_xor, np.logical_xor),
        ]
    ],
    *[
        sample(t, f, INTEGERS, covers=t, reference=r, order=0, reason=NONE)
        for t, f, r in [
            ("BitwiseAnd", rg.bitwise_and, np.bitwise_and),
            ("BitwiseOr", rg.bitwise_or, np.bitwise_or),
            ("BitwiseXor", rg.bitwise_xor, np.bitwise_xor),
            ("LeftShift", rg.bitwise_left_shift, np.left_shift),
            ("RightShift", rg.bitwise_right_shift, np.right_shift),
        ]
    ],
    sample("FloorDiv", rg.floor_divide, (REAL * 3, away(2, 3, seed=3)), covers="FloorDiv",
           reference=np.floor_divide),
    sample("LogicalNot", rg.logical_not, BOOLS[0], covers="LogicalNot",
           reference=np.logical_not, order=0, reason=NONE),
    sample("Invert", rg.bitwise_invert, INTEGERS[0], covers="Invert",
           reference=np.bitwise_invert, order=0, reason=NONE),
    sample("OrZero", binary.or_zero, (REAL, away(2, 3)), covers="OrZero",
           reference=lambda y, x: y),
    sample("OrZero: zeros", binary.or_zero, (REAL, away(2, 3) * [0, 1, 1]), covers="OrZero",
           reference=lambda y, x: np.where(x == 0, 0, y), order=0,
           reason="it jumps at 0 where y does not end there"),
    sample("OrZeroGrad", binary._grad_or_zero, (REAL, away(2, 3)), covers="OrZeroGrad",
           reference=lambda dy, x: dy),
    sample("NextAfter", rg.nextafter, (REAL, REAL[::-1]), covers="NextAfter",
           reference=np.nextafter, order=0, reason="differences cannot see a step of one ulp"),
    sample("StopGradient", rg.stop_gradient, REAL, covers="StopGradient", reference=np.array,
           order=0, reason="no gradient by its definition"),
    sample("Polygamma", lambda x: rg.polygamma(x, 1), POSITIVE, covers="Polygamma",
           reference=lambda x: scipy.special.polygamma(1, x)),
    sample("Step with another slope", lambda x: rg.step(x, 0.3), REAL, covers="Step",
           reference=lambda x: np.where(x > 0, 1, 0.3)),
    sample("astype to float32 and back", lambda x: rg.astype(rg.astype(x, rg.float32), x.dtype),
           REAL, covers="Cast", reference=lambda x: x.astype("f4").astype("f8"), order=0,
           reason="differences cannot see through the rounding"),
    sample("astype to integers", lambda x: rg.astype(x, "int64"), REAL, covers="Cast",
           reference=lambda x: x.astype("i8"), order=0, reason=NONE),
    *[
        sample(f"IsClose, equal_nan={equal_nan}",
               lambda a, b, equal_nan=equal_nan: rg.isclose(a, b, rtol=0.1, equal_nan=equal_nan),
               (np.array([1.0, 1.0, np.nan, np.inf, -np.inf, 3.0]),
                np.array([1.05, 1.2, np.nan, np.inf, np.inf, np.inf])), covers="IsClose",
               order=0, reason=NONE,
               reference=lambda a, b, equal_nan=equal_nan: np.isclose(
                   a, b, rtol=0.1, equal_nan=equal_nan))
        for equal_nan in (False, True)
    ],
    sample("allclose", lambda a, b: rg.allclose(a, b, atol=0.5), (REAL, REAL + 0.4),
           order=0, reason=NONE,
           reference=lambda a, b: np.allclose(a, b, atol=0.5)),
    # clip
    sample("clip", lambda x: rg.clip(x, -1.02, 1.01), REAL, covers="ClipByValue",
           reference=lambda x: np.clip(x, -1.02, 1.01)),
    sample("clip from below", lambda x: rg.clip(x, 0.1), REAL, covers="ClipByValue",
           reference=lambda x: np.maximum(x, 0.1)),
    sample("clip from above", lambda x: rg.clip(x, max=0.1), REAL, covers="ClipByValue",
           reference=lambda x: np.minimum(x, 0.1)),
    sample("clip by tensors", rg.clip,
           (REAL, np.array([[-0.9], [-0.3]]), np.array([0.4, 1.1, 0.8])),
           covers="ClipByValue", reference=np.clip),
    # where
    sample("where", lambda c, a, b: rg.where(c, a, b),
           (np.array([True, False, True]), spread(3), spread(3, seed=1)), covers="SelectV2",
           reference=np.where),
    sample("where, everything broadcast", lambda c, a, b: rg.where(c, a, b),
           (np.array([[True], [False]]), spread(3), np.array(0.5)), covers="SelectV2",
           reference=np.where),
    sample("where, a number", lambda x: rg.where(x > 0, x * x, 0), away(5), covers="SelectV2",
           reference=lambda x: np.where(x > 0, x * x, 0)),
    sample("where guarded twice", lambda x: rg.where(x > 0, rg.log(rg.where(x > 0, x, 1)), 0),
           away(5), covers="SelectV2",
           reference=lambda x: np.where(x > 0, np.log(np.where(x > 0, x, 1)), 0)),
    sample("add_n", lambda a, b, c: rg.add_n([a, b, c]),
           (REAL, spread(2, 3, seed=1), spread(2, 3, seed=2)), covers="AddN",
           reference=lambda a, b, c: a + b + c),
    sample("add_n of one tensor three times", lambda x: rg.add_n([x, x * x, x]), REAL,
           covers="AddN", reference=lambda x: 2 * x + x * x),
    sample("a power with a whole exponent", lambda x: x**3, away(4), covers="Pow",
           reference=lambda x: x**3),
    sample("powers at 0", lambda x: x**2 + x**1 + x**0, np.array([0.0, 1.5]), covers="Pow",
           reference=lambda x: x**2 + x + 1),
    # complex numbers
    *[
        sample(f"{t} of complex numbers", f, COMPLEX, covers=t, reference=r)
        for t, f, r in [
            ("Conj", rg.conj, np.conj), ("Real", rg.real, np.real), ("Imag", rg.imag, np.imag),
            ("Abs", rg.abs, np.abs), ("Sign", rg.sign, np.sign), ("Exp", rg.exp, np.exp),
            ("Square", rg.square, np.square), ("Sin", rg.sin, np.sin), ("Log", rg.log, np.log),
            ("Sqrt", rg.sqrt, np.sqrt), ("Tanh", rg.tanh, np.tanh),
            ("Reciprocal", rg.reciprocal, np.reciprocal),
        ]
    ],
    *[
        sample(f"{t} of complex numbers", f, (COMPLEX, COMPLEX[::-1] + 3), covers=t, reference=r)
        for t, f, r in [
            ("Mul", rg.multiply, np.multiply), ("RealDiv", rg.divide, np.divide),
            ("SquaredDifference", rg.squared_difference, lambda a, b: (a - b) ** 2),
            ("Pow", rg.pow, np.power),
        ]
    ],
    sample("a real tensor times a complex one", lambda a, b: a * b, (spread(2, 2), COMPLEX),
           covers="Mul", reference=np.multiply),
    # creation
    sample("ones_like", rg.ones_like, REAL, covers="OnesLike", reference=np.ones_like),
    sample("zeros_like", rg.zeros_like, REAL, covers="ZerosLike", reference=np.zeros_like),
    sample("full_like", lambda x: rg.full_like(x, 7), REAL, covers="FullLike",
           reference=lambda x: np.full_like(x, 7)),
]  # fmt: skip
