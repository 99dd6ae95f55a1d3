"""Elementwise ops of one, two and three tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regrad.core import backends, dispatch
from regrad.core.backends import Array, DTypeLike, Namespace, is_inexact, special
from regrad.core.op import TensorLike, elementwise, entwined, op, piecewise_constant
from regrad.core.registry import gradient, not_differentiable
from regrad.core.signatures import public
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError
from regrad.ops.creation import as_numpy_dtype, zeros_like

Kernel = Callable[..., Any] | str  # or its name in the standard


# -- complex numbers ---------------------------------------------------------------------------
# Gradients follow TensorFlow's convention: for y = f(x) the gradient is dy * conj(f'(x)).


@op("Conj", elementwise=True, holomorphic=False)
def _conj(xp, x: TensorLike, /) -> Tensor:
    return xp.conj(x)


@gradient("Conj")
def _(dy):
    return conj(dy)


@public
def conj(x: TensorLike, /) -> Tensor:
    """The complex conjugate; a real tensor comes back as it is.

    Op type: `Conj` (for complex input).
    """
    x = dispatch.lift(x)
    return _conj(x) if x.dtype.kind == "c" else x


@op("Real", elementwise=True, holomorphic=False)
def real(xp, x: TensorLike, /) -> Tensor:
    """The real part."""
    return xp.real(x) if backends.is_complex(x) else x


@gradient("Real")
def _(dy, x_dtype):
    return dispatch.as_dtype(dy, backends.numpy_dtype(x_dtype))


@op("Imag", elementwise=True, holomorphic=False)
def imag(xp, x: TensorLike, /) -> Tensor:
    """The imaginary part; zeros for a real tensor."""
    return xp.imag(x) if backends.is_complex(x) else xp.zeros_like(x)


@gradient("Imag")
def _(dy, x_dtype):
    return dy * 1j if backends.numpy_dtype(x_dtype).kind == "c" else None


# -- identity, casts ---------------------------------------------------------------------------

identity = elementwise(
    "Identity", "identity", lambda xp, x: x, "x itself, as an op that a rule can be put on.",
    lambda dy: dy,
)  # fmt: skip


@public
def positive(x: TensorLike, /) -> Tensor:
    """x itself, as `+x` is: the function of the Array API standard.

    Op type: `Identity`.
    """
    return identity(x)


stop_gradient = elementwise(
    "StopGradient",
    "stop_gradient",
    lambda xp, x: x,
    """x, as a constant: no gradient flows back through it.

    `g(x) + stop_gradient(f(x) - g(x))` has the value of f and the gradient of g.

    Source: `tf.stop_gradient`.

    >>> import regrad as rg
    >>> rg.grad(lambda x: x * rg.stop_gradient(x))(rg.scalar(3.0)).print()
    Tensor
        3""",
)
not_differentiable("StopGradient")


@op("Cast", holomorphic=False)
def _cast(xp, x: TensorLike, /, *, dtype: DTypeLike) -> Tensor:
    return backends.cast(xp, x, dtype)


@gradient("Cast", "x")
def _(dy, x_dtype):
    dtype = backends.numpy_dtype(x_dtype)
    return dispatch.as_dtype(dy, dtype) if is_inexact(dtype) else dy


def _to_integers(attrs: dict[str, Any], xs: Sequence[Tensor]) -> bool:
    return is_inexact(xs[0].dtype) and not is_inexact(attrs["dtype"])


from regrad.core.registry import OPS  # noqa: E402

OPS["Cast"].rule.unless = _to_integers  # pyright: ignore[reportAttributeAccessIssue]


@public
def astype(x: TensorLike, dtype: DTypeLike, /, *, copy: bool = True, device: Any = None) -> Tensor:
    """x under another dtype.

    Between floats (and complex numbers) the gradient passes, converted back. What is cast to
    integers or bools has no gradient, unless a rule is put in force for the op type.
    A cast of complex numbers to real ones takes the real part; bools say whether they are not 0.
    A Tensor that has the dtype already comes back as it is.

    Op type: `Cast`.
    """
    dtype = as_numpy_dtype(dtype)
    x = dispatch.lift_as(x, dtype) if dispatch.is_plain(x) else dispatch.lift(x)
    return x if x.dtype == dtype else _cast(x, dtype=dtype)


# -- one tensor --------------------------------------------------------------------------------


def _unary(type: str, name: str, kernel: Kernel, doc: str, *rules: Callable[..., Any]) -> Any:
    """A function of real and complex numbers; integers become float32."""
    return elementwise(type, name, kernel, doc, *rules, to_float=True)


abs = elementwise("Abs", "abs", "abs", "The absolute value. Gradient at 0: 0.",
                  lambda dy, x: dy * sign(x), holomorphic=False)  # fmt: skip
negative = elementwise("Neg", "negative", "negative", "`-x`.", lambda dy: -dy)
sign = elementwise("Sign", "sign", "sign", "-1, 0 or 1; `x / abs(x)` for complex x. Gradient: 0.",
                   holomorphic=False)  # fmt: skip
square = elementwise("Square", "square", "square", "`x * x`.", lambda dy, x: dy * (2 * x))
sqrt = _unary("Sqrt", "sqrt", "sqrt", "The square root. Gradient at 0: infinite.",
              lambda dy, y: dy / (2 * y))  # fmt: skip
rsqrt = _unary("Rsqrt", "rsqrt", lambda xp, x: 1 / xp.sqrt(x), "`1 / sqrt(x)`.",
               lambda dy, y: dy * (-0.5 * y * square(y)))  # fmt: skip
reciprocal = _unary("Reciprocal", "reciprocal", lambda xp, x: 1 / x, "`1 / x`.",
                    lambda dy, y: -dy * square(y))  # fmt: skip
exp = _unary("Exp", "exp", "exp", "e to the power x.", lambda dy, y: dy * y)


def _expm1(xp: Namespace, x: Array) -> Any:
    y = xp.expm1(x)
    if not backends.is_complex(x):
        return y
    # where x is not finite the libraries lose what the standard says is known
    y = xp.where(xp.isfinite(x), y, xp.exp(x) - 1)
    size, any_angle = xp.real(x), ~xp.isfinite(xp.imag(x))
    y = xp.where((size == -math.inf) & any_angle, xp.full_like(x, -1), y)
    return xp.where((size == math.inf) & any_angle, xp.full_like(x, complex("inf+nanj")), y)


expm1 = _unary("Expm1", "expm1", _expm1, "`exp(x) - 1`, accurate near 0.",
               lambda dy, y: dy * (y + 1))  # fmt: skip
log = _unary("Log", "log", "log", "The natural logarithm.", lambda dy, x: dy / x)
log1p = _unary("Log1p", "log1p", "log1p", "`log(1 + x)`, accurate near 0.",
               lambda dy, x: dy / (1 + x))  # fmt: skip
log2 = _unary("Log2", "log2", "log2", "The logarithm to base 2.",
              lambda dy, x: dy / (math.log(2) * x))  # fmt: skip
log10 = _unary("Log10", "log10", "log10", "The logarithm to base 10.",
               lambda dy, x: dy / (math.log(10) * x))  # fmt: skip
sin = _unary("Sin", "sin", "sin", "The sine.", lambda dy, x: dy * cos(x))
cos = _unary("Cos", "cos", "cos", "The cosine.", lambda dy, x: -dy * sin(x))
tan = _unary("Tan", "tan", "tan", "The tangent.", lambda dy, y: dy * (1 + square(y)))
asin = _unary("Asin", "asin", "asin", "The inverse sine.",
              lambda dy, x: dy / sqrt((1 - x) * (1 + x)))  # fmt: skip
acos = _unary("Acos", "acos", "acos", "The inverse cosine.",
              lambda dy, x: -dy / sqrt((1 - x) * (1 + x)))  # fmt: skip
atan = _unary("Atan", "atan", "atan", "The inverse tangent.",
              lambda dy, x: dy / (1 + square(x)))  # fmt: skip
sinh = _unary("Sinh", "sinh", "sinh", "The hyperbolic sine.", lambda dy, x: dy * cosh(x))
cosh = _unary("Cosh", "cosh", "cosh", "The hyperbolic cosine.", lambda dy, x: dy * sinh(x))
tanh = _unary("Tanh", "tanh", "tanh", "The hyperbolic tangent.",
              lambda dy, y: dy * (1 - square(y)))  # fmt: skip
asinh = _unary("Asinh", "asinh", "asinh", "The inverse hyperbolic sine.",
               lambda dy, x: dy / sqrt(1 + square(x)))  # fmt: skip
acosh = _unary("Acosh", "acosh", "acosh", "The inverse hyperbolic cosine.",
               lambda dy, x: dy / (sqrt(x - 1) * sqrt(x + 1)))  # fmt: skip
atanh = _unary("Atanh", "atanh", "atanh", "The inverse hyperbolic tangent.",
               lambda dy, x: dy / ((1 - x) * (1 + x)))  # fmt: skip
erf = _unary("Erf", "erf", lambda xp, x: special(xp).erf(x), "The error function.",
             lambda dy, x: dy * (2 / math.sqrt(math.pi) * exp(-square(x))))  # fmt: skip
erfc = _unary("Erfc", "erfc", lambda xp, x: special(xp).erfc(x), "`1 - erf(x)`.",
              lambda dy, x: dy * (-2 / math.sqrt(math.pi) * exp(-square(x))))  # fmt: skip
erfinv = _unary("Erfinv", "erfinv", lambda xp, x: special(xp).erfinv(x), "The inverse of `erf`.",
                lambda dy, y: dy * (math.sqrt(math.pi) / 2 * exp(square(y))))  # fmt: skip
lgamma = _unary("Lgamma", "lgamma", lambda xp, x: special(xp).gammaln(x),
                "The logarithm of the absolute value of the gamma function.",
                lambda dy, x: dy * digamma(x))  # fmt: skip
digamma = _unary("Digamma", "digamma", lambda xp, x: special(xp).psi(x)
                 if hasattr(special(xp), "psi") else special(xp).digamma(x),
                 "The derivative of `lgamma`.", lambda dy, x: dy * polygamma(x, 1))  # fmt: skip


@op("Polygamma", elementwise=True, to_float=True)
def polygamma(xp, x: TensorLike, /, n: int) -> Tensor:
    """The n-th derivative of `digamma`."""
    return special(xp).polygamma(n, x)


@gradient("Polygamma")
def _(dy, x, n):
    return dy * polygamma(x, n + 1)


@gradient("Sign")
def _(dy, x):
    if x.dtype.kind != "c":
        return zeros_like(dy)
    y = sign(x)
    return (dy - real(dy * conj(y)) * y) / abs(x)


OPS["Sign"].rule.flat = True

ceil = elementwise("Ceil", "ceil", "ceil", "The least integer not below x. Gradient: 0.", real=True)
floor = elementwise(
    "Floor", "floor", "floor", "The greatest integer not above x. Gradient: 0.", real=True
)
round = elementwise("Round", "round", "round", "The nearest integer, half to even. Gradient: 0.")
trunc = elementwise("Trunc", "trunc", "trunc", "x without its fraction. Gradient: 0.", real=True)
for _type in ("Ceil", "Floor", "Round", "Trunc"):
    piecewise_constant(_type, lambda dy: None)


@op("Step", elementwise=True, real=True)
def step(xp, x: TensorLike, /, alpha: float = 0.0) -> Tensor:
    """1 where x > 0, `alpha` elsewhere; NaN stays NaN. Gradient: 0."""
    y = xp.where(x > 0, xp.ones_like(x), xp.full_like(x, alpha))
    return xp.where(x != x, x, y)


piecewise_constant("Step", lambda dy: zeros_like(dy))

isnan = elementwise("IsNan", "isnan", "isnan", "Whether x is NaN.")
isinf = elementwise("IsInf", "isinf", "isinf", "Whether x is infinite.")
isfinite = elementwise("IsFinite", "isfinite", "isfinite", "Whether x is a finite number.")
signbit = elementwise(
    "SignBit", "signbit", "signbit", "Whether x is negative, -0 included.", real=True
)
logical_not = elementwise("LogicalNot", "logical_not", "logical_not", "`not x`.")
bitwise_invert = elementwise("Invert", "bitwise_invert", "bitwise_invert", "`~x`, bit by bit.")
not_differentiable("IsNan", "IsInf", "IsFinite", "SignBit", "LogicalNot", "Invert")


# -- two tensors -------------------------------------------------------------------------------


def _binary(
    type: str,
    name: str,
    kernel: Kernel,
    doc: str,
    *rules: Callable[..., Any],
    to_float: bool = False,
    real: bool = False,
    boolean: bool = False,
) -> Any:
    return elementwise(
        type, name, kernel, doc, *rules,
        to_float=to_float, real=real, inputs="a b", boolean=boolean,
    )  # fmt: skip


add = _binary("AddV2", "add", "add", "`a + b`.", lambda dy: dy, lambda dy: dy)
subtract = _binary("Sub", "subtract", "subtract", "`a - b`.", lambda dy: dy, lambda dy: -dy)
multiply = _binary("Mul", "multiply", "multiply", "`a * b`.",
                   lambda dy, b: dy * b, lambda dy, a: dy * a)  # fmt: skip
divide = _binary("RealDiv", "divide", "divide", "`a / b`; integers become float32.",
                 lambda dy, b: dy / b, lambda dy, b, y: -dy * (y / b),
                 to_float=True)  # fmt: skip
floor_divide = _binary(
    "FloorDiv", "floor_divide", "floor_divide", "`a // b`. Gradient: 0.", real=True
)
piecewise_constant("FloorDiv", lambda dy: None)
remainder = _binary("FloorMod", "remainder", "remainder", "`a % b`, with the sign of b.",
                    lambda dy: dy, lambda dy, a, b: -dy * floor_divide(a, b),
                    real=True)  # fmt: skip
maximum = _binary("Maximum", "maximum", "maximum", "The larger; a tie's gradient goes to a.",
                  lambda dy, a, b: where(a >= b, dy, 0),
                  lambda dy, a, b: where(a >= b, 0, dy), real=True)  # fmt: skip
minimum = _binary("Minimum", "minimum", "minimum", "The smaller; a tie's gradient goes to a.",
                  lambda dy, a, b: where(a <= b, dy, 0),
                  lambda dy, a, b: where(a <= b, 0, dy), real=True)  # fmt: skip
squared_difference = _binary(
    "SquaredDifference", "squared_difference", lambda xp, a, b: xp.square(a - b), "`(a - b)²`.",
    lambda dy, a, b: dy * (2 * (a - b)), lambda dy, a, b: dy * (-2 * (a - b)),
)  # fmt: skip
atan2 = _binary("Atan2", "atan2", "atan2", "The angle of the point (b, a).",
                lambda dy, a, b: dy * (b / (square(a) + square(b))),
                lambda dy, a, b: dy * (-a / (square(a) + square(b))),
                to_float=True, real=True)  # fmt: skip
hypot = _binary("Hypot", "hypot", "hypot", "`sqrt(a² + b²)` without overflow. Gradient at 0: 0.",
                lambda dy, a, y: _grad_or_zero(dy, y) * (a / where(y == 0, 1, y)),
                lambda dy, b, y: _grad_or_zero(dy, y) * (b / where(y == 0, 1, y)),
                to_float=True)  # fmt: skip
logaddexp = _binary("LogAddExp", "logaddexp", "logaddexp", "`log(exp(a) + exp(b))`, stable.",
                    lambda dy, a, b, y: dy * _part(a, b, y),
                    lambda dy, a, b, y: dy * _part(b, a, y), to_float=True)  # fmt: skip


def _part(a, b, y):
    """The share of exp(a) in exp(y): all of it where a is y, which may be infinite."""
    return exp(where(logical_and(a == y, a != b), 0, a - y))


copysign = _binary("Copysign", "copysign", "copysign", "The size of a with the sign of b.",
                   lambda dy, a, y: where((a < 0) == signbit(y), dy, -dy),
                   lambda dy: None, to_float=True, real=True)  # fmt: skip
nextafter = _binary("NextAfter", "nextafter", "nextafter", "The next number from a towards b.",
                    lambda dy: dy, lambda dy: None, to_float=True, real=True)  # fmt: skip


for _type in ("FloorMod", "NextAfter"):
    OPS[_type].rule.flat = True  # their rules ignore a, and yet they are not linear in it


# Lengths and deviations end at 0, where their gradient is 0 by convention. What the convention says
# of a second derivative would be wrong for smooth functions of them (the square of a length): it is
# NaN there, unless the gradient that arrives does not change with x.


@op("OrZero")
def or_zero(xp, value: TensorLike, x: TensorLike, /) -> Tensor:
    """`value`, a function of x; 0 where x is 0, and there so is its gradient."""
    return xp.where(x == 0, xp.zeros_like(value), value)


@gradient("OrZero", "value")
def _(dy, x):
    return _grad_or_zero(dy, x)


@gradient("OrZero", "x")
def _(dy, x):
    return where(x == 0, _grad_or_zero(dy, x), 0)  # (the value may mask a NaN there)


@op("OrZeroGrad")
def _grad_or_zero(xp, grad: TensorLike, x: TensorLike, /) -> Tensor:
    return xp.where((x == 0) & (grad == grad), xp.zeros_like(grad), grad)  # a NaN stays visible


entwined("OrZeroGrad", lambda dy, x: _grad_or_zero(dy, x), lambda dy: None,
         together=lambda dy, x: dy * astype(where(x == 0, math.nan, 1), dy.dtype))  # fmt: skip


def _pow_a(dy, a, b):
    # a ** 0 is a constant: its gradient is 0, also at 0⁰
    none = logical_and(a == 0, b == 0)
    return dy * where(none, 0, b * pow(where(none, 1, a), b - 1))


def _pow_b(dy, a, y):
    if a.dtype.kind == "c":
        return dy * (y * log(where(a == 0, 1, a)))
    return dy * (y * log(where(a > 0, a, 1)))


pow = _binary("Pow", "pow", "pow",
              "`a` to the power `b`. The gradient by b is 0 where a <= 0.",
              _pow_a, _pow_b)  # fmt: skip

equal = _binary("Equal", "equal", "equal", "`a == b`.")
not_equal = _binary("NotEqual", "not_equal", "not_equal", "`a != b`.")
less = _binary("Less", "less", "less", "`a < b`.", real=True)
less_equal = _binary("LessEqual", "less_equal", "less_equal", "`a <= b`.", real=True)
greater = _binary("Greater", "greater", "greater", "`a > b`.", real=True)
greater_equal = _binary("GreaterEqual", "greater_equal", "greater_equal", "`a >= b`.", real=True)
logical_and = _binary("LogicalAnd", "logical_and", "logical_and", "`a and b`.")
logical_or = _binary("LogicalOr", "logical_or", "logical_or", "`a or b`.")
logical_xor = _binary("LogicalXor", "logical_xor", "logical_xor", "Either, not both.")
bitwise_and = _binary("BitwiseAnd", "bitwise_and", "bitwise_and", "`a & b`, bit by bit.")
bitwise_or = _binary("BitwiseOr", "bitwise_or", "bitwise_or", "`a | b`, bit by bit.")
bitwise_xor = _binary("BitwiseXor", "bitwise_xor", "bitwise_xor", "`a ^ b`, bit by bit.")
bitwise_left_shift = _binary("LeftShift", "bitwise_left_shift", "bitwise_left_shift", "`a << b`.")
bitwise_right_shift = _binary(
    "RightShift", "bitwise_right_shift", "bitwise_right_shift", "`a >> b`."
)


@op("IsClose", elementwise=True)
def isclose(
    xp, a: TensorLike, b: TensorLike, /, *, rtol: float = 1e-5, atol: float = 1e-8,
    equal_nan: bool = False,
) -> Tensor:  # fmt: skip
    """Return where `abs(a - b) <= atol + rtol * abs(b)`; infinities are close to themselves.

    Args:
        a: The values.
        b: The values to which they are compared.
        rtol: The tolerance relative to b.
        atol: The absolute tolerance.
        equal_nan: Whether NaN is close to NaN.

    Returns a Tensor of bools. It has no gradient.

    Source: `numpy.isclose`.

    >>> import regrad as rg
    >>> rg.isclose(rg.tensor([1.0, 2.0]), rg.tensor([1.0, 2.1])).tolist()
    [True, False]
    """
    if a.dtype == xp.bool:
        a, b = (backends.cast(xp, x, np.uint8) for x in (a, b))
    finite = xp.isfinite(a) & xp.isfinite(b)
    x, y = (xp.where(finite, z, xp.zeros_like(z)) for z in (a, b))
    # (a difference of unsigned integers wraps around)
    size = xp.abs(x - y) if backends.is_complex(a) else xp.maximum(x, y) - xp.minimum(x, y)
    near = size <= atol + rtol * xp.abs(y)
    close = (finite & near) | (a == b)
    return close | ((a != a) & (b != b)) if equal_nan else close


not_differentiable(
    "IsClose", "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual",
    "LogicalAnd", "LogicalOr", "LogicalXor",
    "BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift",
)  # fmt: skip


# -- three tensors, many tensors -----------------------------------------------------------------


@op("SelectV2", elementwise=True, promotes=("a", "b"))
def where(xp, condition: TensorLike, a: TensorLike, b: TensorLike, /) -> Tensor:
    """`a` where `condition`, `b` elsewhere.

    The gradient is masked, never multiplied, so a NaN in the branch not taken does no harm
    here. It may still make one further back (`0 * inf`); then guard the input as well:
    `where(x > 0, log(where(x > 0, x, 1)), 0)`.
    """
    mask: Any = condition if condition.dtype == xp.bool else condition != 0
    if xp is np and mask.shape == a.shape == b.shape and a.dtype in BITS and a.size >= 8192:
        return _chosen_bits(mask, a, b)
    if hasattr(mask, "new_zeros") and mask.numel() >= 8192 and _chooses_slowly(mask, a, b):
        return _chosen_bits_in_torch(mask, a, b)
    return xp.where(mask, a, b)


BITS = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


def _chosen_bits(mask: Array, a: Array, b: Array) -> Array:
    """`where` for large arrays of one shape.

    NumPy's goes to and fro with the mask, and processors cannot guess which way: this takes the
    bits of one or the other without asking (a third of the time for a mask like relu's).
    """
    whole = BITS[a.dtype]
    left, right = a.view(whole), b.view(whole)
    bits = left ^ right
    bits &= np.negative(mask.view(np.int8), dtype=whole)  # all ones where the mask is set
    bits ^= right
    return bits.view(a.dtype)


def _chooses_slowly(mask: Array, a: Array, b: Array) -> bool:
    """Return whether torch's own `where` would choose element by element: plain CPU floats."""
    import torch

    return (
        mask.device.type == a.device.type == b.device.type == "cpu"
        and type(mask) is type(a) is type(b) is torch.Tensor
        and a.dtype == b.dtype
        and a.dtype in (torch.float32, torch.float64)
        and torch.broadcast_shapes(a.shape, b.shape) == mask.shape
        and not (a.is_neg() or b.is_neg())  # whose bits say something else
        and not torch._C._are_functorch_transforms_active()
        and not torch.compiler.is_compiling()
    )


def _chosen_bits_in_torch(mask: Array, a: Array, b: Array) -> Any:
    """As above, a tenth of the time; a or b may be a number."""
    import torch

    whole = torch.int32 if a.dtype == torch.float32 else torch.int64
    right = b.view(whole)
    bits = a.view(whole) ^ right
    bits &= mask.to(whole).neg_()
    bits ^= right
    return bits.view(a.dtype)


@gradient("SelectV2", "a")
def _(dy, condition):
    return where(condition, dy, 0)


@gradient("SelectV2", "b")
def _(dy, condition):
    return where(condition, 0, dy)


@op("ClipByValue", elementwise=True, real=True)
def _clip(xp, x: TensorLike, min: TensorLike | None, max: TensorLike | None) -> Tensor:
    if min is not None:
        x = xp.maximum(x, min)
    return x if max is None else xp.minimum(x, max)


@gradient("ClipByValue", "x")
def _(dy, x, min, max):
    if min is not None:
        dy = where(x >= min, dy, 0)
    return dy if max is None else where(x <= max, dy, 0)


@gradient("ClipByValue", "min")
def _(dy, x, min, max):
    dy = where(x < min, dy, 0)
    return dy if max is None else where(min <= max, dy, 0)


@gradient("ClipByValue", "max")
def _(dy, x, min, max):
    return where((x if min is None else maximum(x, min)) > max, dy, 0)


@public
def clip(x: TensorLike, /, min: TensorLike | None = None, max: TensorLike = None) -> Tensor:
    """x, brought into `[min, max]`; the gradient passes at both bounds.

    Op type: `ClipByValue`.
    """
    if type(min) in (int, float) and type(max) in (int, float) and min > max:
        raise ArgumentError(f"clip: min ({min}) must not be greater than max ({max})")
    return _clip(x, min, max)


@op("AddN", promotes=True)
def add_n(xp, xs: Sequence[TensorLike], /) -> Tensor:
    """The sum of a list of tensors of one shape."""
    shapes = {tuple(x.shape) for x in xs}
    if len(shapes) > 1:
        raise ShapeError(f"add_n: all tensors must have one shape, got {sorted(shapes)}")
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


@gradient("AddN", "xs")
def _(dy, xs_shape):
    return [dy for _ in xs_shape]
