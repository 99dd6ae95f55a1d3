"""Op types in JAX programs: the primitives or functions that they correspond to.

`TABLE` has a row for each op type that an override of a JAX program can reach. Rows of elementwise
ops that have the same name in JAX are generated; the other rows are written by hand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from regrad.core.registry import OPS, NoGradient, Op
from regrad.jax.host import OVERRIDES, refuse
from regrad.jax.host.functions import is_jitted
from regrad.jax.host.programs import Params
from regrad.ops.windows import windows

Attrs = Mapping[str, Any]


class Target(NamedTuple):
    """The meaning of an op type: a primitive with certain attributes, or a function.

    `power` selects equations of `integer_pow` by exponent. `when` selects equations by a predicate,
    and `refusal` returns why an equation cannot be covered. `operand_names` are the op's names for
    the operands, if their order differs. `form` returns the form in which an equation belongs to
    the op type. A function's `options` return its possible arguments, from its equations. `scale`
    are factors: the op type's result, times these, is the equation's result.
    """

    name: str
    attrs: Callable[[Attrs], dict[str, Any]] = lambda params: {}
    power: int | None = None
    refusal: Callable[[Any], str] = lambda eqn: ""
    when: Callable[[Any], bool] = lambda eqn: True
    operand_names: Sequence[str] = ()
    form: Callable[[Any], MatrixForm | None] = lambda eqn: None
    options: Callable[[Sequence[Any]], list[dict[str, Any]]] | None = None
    inlined: bool = False
    scale: Callable[[Attrs, Any], Any] = lambda attrs, aval: None

    def fits(self, eqn: core.JaxprEqn, batched: bool = False) -> bool:
        """Return whether an equation is one of these; a batched equation may look different."""
        if eqn.primitive.name != self.name:
            return False
        if self.power is not None and self.power != Params(eqn)["y"]:
            return False
        return batched or self.when(eqn)

    def meets(self, other: Target) -> bool:
        """Return whether both cover the same equations."""
        powers = {self.power, other.power}
        return self.name == other.name and (None in powers or len(powers) == 1)

    @property
    def function(self) -> Any:
        """Return the JAX function, if the target is not a primitive."""
        module, _, name = self.name.rpartition(".")
        return getattr(functools.reduce(getattr, module.split(".")[1:], jax), name)

    def __repr__(self) -> str:
        return f"`{self.name}`"


class MatrixForm(NamedTuple):
    """A `dot_general` as a product of matrices: axes in another order, some of them merged.

    `orders` and `shapes` are the axis orders and shapes of the operands as matrices (batch axes
    first); `split` are the operands' own axes in that order.
    """

    orders: tuple[tuple[int, ...], tuple[int, ...]]
    split: tuple[tuple[int, ...], tuple[int, ...]]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]

    def operand(self, x: jax.Array, i: int) -> Any:
        """Return an operand as a matrix."""
        return x.transpose(self.orders[i]).reshape(self.shapes[i])

    def undo(self, x: jax.Array, i: int) -> Any:
        """Return a matrix in the original form of the operand."""
        back = [self.orders[i].index(axis) for axis in range(len(self.orders[i]))]
        return x.reshape(self.split[i]).transpose(back)

    def result(self, y: jax.Array) -> Any:
        """Return the result as a matrix."""
        (*batch, m, _), n = self.shapes[0], self.shapes[1][-1]
        return y.reshape((*batch, m, n))


def _as_matmul(eqn: Any) -> MatrixForm | None:
    """Return the form of a `dot_general` as `a @ b`, or None if it already has this form."""
    (left, right), (first, second) = Params(eqn)["dimension_numbers"]
    left, right, first, second = map(tuple, (left, right, first, second))
    a, b = (v.aval.shape for v in eqn.invars)
    if _is_matmul(len(a), len(b), left, right, first, second):
        return None
    rows = tuple(i for i in range(len(a)) if i not in (*first, *left))
    columns = tuple(i for i in range(len(b)) if i not in (*second, *right))
    orders = (*first, *rows, *left), (*second, *right, *columns)
    size = lambda shape, axes: math.prod(shape[i] for i in axes)  # noqa: E731
    batch = tuple(a[i] for i in first)
    inner = size(a, left)
    shapes = (*batch, size(a, rows), inner), (*batch, inner, size(b, columns))
    split = tuple(a[i] for i in orders[0]), tuple(b[i] for i in orders[1])
    return MatrixForm(orders, split, shapes)


def _is_matmul(m: int, n: int, left: Any, right: Any, first: Any, second: Any) -> bool:
    batch = tuple(range(len(first)))
    if first != second or first != batch or left != (m - 1,):
        return False
    if not batch:
        return n <= 2 and right == (max(n - 2, 0),)
    return m == n == len(batch) + 2 and right == (n - 2,)


def _no_pooling(eqn: core.JaxprEqn) -> str:
    """Return why a window reduction is not a pooling of channels-last images, or ""."""
    p = Params(eqn)
    spatial = {p["window_dimensions"][i] for i in (0, -1)} == {1} == {
        p["window_strides"][i] for i in (0, -1)
    }  # fmt: skip
    plain = {*p["base_dilation"], *p["window_dilation"]} == {1}
    if spatial and plain:
        return ""
    return (
        "its windows are not the windows of a pooling of images whose channels come last; "
        f"use the key {eqn.primitive.name!r}"
    )


def _pooling(params: Attrs) -> dict[str, Any]:
    return {
        "filter_size": tuple(params["window_dimensions"][1:-1]),
        "strides": tuple(params["window_strides"][1:-1]),
        "pad": tuple(map(tuple, params["padding"][1:-1])),
    }


def _window_counts(attrs: Attrs, aval: Any) -> Any:
    """Return the number of elements of the data in each window: a sum is the mean times these."""
    size, strides, pad = attrs["filter_size"], attrs["strides"], attrs["pad"]
    win = windows("AvgPool", tuple(aval.shape[1:-1]), size, strides, pad, (1,) * len(size))
    counts = functools.reduce(np.multiply.outer, map(win.counts, range(len(size))))
    return np.maximum(counts, 1)[..., None]


def _no_convolution(eqn: core.JaxprEqn) -> str:
    """Return why a `conv_general_dilated` is not a convolution of channels-last images, or ""."""
    p, n = Params(eqn), len(Params(eqn)["window_strides"])
    last = (0, n + 1, *range(1, n + 1)), (n + 1, n, *range(n)), (0, n + 1, *range(1, n + 1))
    if tuple(map(tuple, p["dimension_numbers"])) != last:
        why = "its channels do not come last (NHWC, HWIO)"
    elif {*p["lhs_dilation"], p["feature_group_count"], p["batch_group_count"]} != {1}:
        why = "it has groups, or is transposed"
    else:
        return ""
    return f"{why}; use the key 'conv_general_dilated', or move the axes in the model"


def _convolution(params: Attrs) -> dict[str, Any]:
    return {
        "strides": tuple(params["window_strides"]),
        "pad": tuple(map(tuple, params["padding"])),
        "dilations": tuple(params["rhs_dilation"]),
    }


def _is_choice(eqn: Any) -> bool:
    return len(eqn.invars) == 3 and eqn.invars[0].aval.dtype == bool


def _reduced(eqns: Sequence[Any], name: str) -> Iterator[Any]:
    for eqn in eqns[:3]:
        if eqn.primitive.name == name:
            yield tuple(Params(eqn)["axes"])
            return


def _softmax(eqns: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"axis": a[0] if len(a) == 1 else a} for a in _reduced(eqns, "reduce_max")]


def _logsumexp(eqns: Sequence[Any]) -> list[dict[str, Any]]:
    found = _reduced(eqns, "reduce_max")
    return [{"axis": a, "keepdims": keep} for a in found for keep in (False, True)]


def _mean(eqns: Sequence[Any]) -> list[dict[str, Any]]:
    axes = _reduced(eqns, "reduce_sum")
    found = [{"axis": a, "keepdims": keep} for a in axes for keep in (False, True)]
    # (With `dtype=`, numbers are converted first, and half precision is not widened.)
    x = eqns[0].invars[0]
    known = {"dtype": x.aval.dtype} if eqns[0].primitive.name == "reduce_sum" else {}
    return found + [each | known for each in found if known]


def _gelu(eqns: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"approximate": True}, {"approximate": False}]


def _axes(params: Attrs) -> dict[str, Any]:
    return {"axis": tuple(params["axes"]), "keepdims": False}


def _along(params: Attrs) -> dict[str, Any]:
    return {"axis": params["axis"], "reverse": params["reverse"], "exclusive": False}


def _is_transform(eqn: core.JaxprEqn, kind: jax.lax.FftType) -> bool:
    found = Params(eqn)["fft_type"]
    if not isinstance(found, jax.lax.FftType):
        refuse(OVERRIDES, f"the parameter 'fft_type' of 'fft' is {found!r}")
    return found == kind


def _transform(params: Attrs) -> dict[str, Any]:
    # (JAX applies the factor of `norm` afterwards.)
    return {"axes": tuple(range(-len(params["fft_lengths"]), 0)), "norm": "backward"}


def _fourier(name: str, attrs: Any) -> list[Target]:
    """Return the target of a transform, which JAX has as one primitive with several types."""
    is_one = functools.partial(_is_transform, kind=getattr(jax.lax.FftType, name))
    return [Target("fft", attrs, refusal=_several_axes, when=is_one)]


def _windowed(name: str, attrs: Any, refusal: Any, axes: int, **more: Any) -> list[Target]:
    """Return the target of an op type with this number of window axes, as a general primitive."""
    fits = lambda eqn: len(Params(eqn)["window_strides"]) == axes  # noqa: E731
    return [Target(name, attrs, refusal=refusal, when=fits, **more)]


def _as_they_are(params: Attrs) -> dict[str, Any]:
    return {"transpose_a": False, "transpose_b": False}


def _real_transform(params: Attrs) -> dict[str, Any]:
    return {"axis": -1, "norm": "backward"}


def _inverse_real_transform(params: Attrs) -> dict[str, Any]:
    return {"n": params["fft_lengths"][-1], **_real_transform(params)}


def _several_axes(eqn: core.JaxprEqn) -> str:
    """Return why a real transform along several axes is not one along a single axis, or ""."""
    if len(Params(eqn)["fft_lengths"]) == 1 or Params(eqn)["fft_type"].name in ("FFT", "IFFT"):
        return ""
    return "it transforms several axes at once, including complex ones; use the key 'fft'"


TABLE: dict[str, list[Target]] = {
    "RealDiv": [Target("div")],
    "Maximum": [Target("max")],
    "Minimum": [Target("min")],
    "Erfinv": [Target("erf_inv")],
    "Sigmoid": [Target("logistic")],
    "Square": [Target("square"), Target("integer_pow", power=2)],
    "Reciprocal": [Target("integer_pow", power=-1)],
    "Sum": [Target("reduce_sum", _axes)],
    "Max": [Target("reduce_max", _axes)],
    "Min": [Target("reduce_min", _axes)],
    "Prod": [Target("reduce_prod", _axes)],
    "Cumsum": [Target("cumsum", _along)],
    "Cumprod": [Target("cumprod", _along)],
    "MatMul": [Target("dot_general", _as_they_are, form=_as_matmul)],
    "StopGradient": [Target("stop_gradient")],
    "LeakyRelu": [Target("jax.nn.leaky_relu")],
    "Softsign": [Target("jax.nn.soft_sign")],
    "LogSoftmax": [Target("jax.nn.log_softmax", options=_softmax)],
    "Softmax": [Target("jax.nn.softmax", options=_softmax, inlined=True)],
    "Gelu": [Target("jax.nn.gelu", options=_gelu, inlined=True)],
    "LogSumExp": [Target("jax.nn.logsumexp", options=_logsumexp, inlined=True)],
    "Mean": [Target("jax.numpy.mean", options=_mean, inlined=True)],
    "SelectV2": [Target("select_n", when=_is_choice, operand_names=("condition", "b", "a"))],
    "Conv2D": _windowed("conv_general_dilated", _convolution, _no_convolution, 2),
    "Conv3D": _windowed("conv_general_dilated", _convolution, _no_convolution, 3),
    "MaxPool": _windowed("reduce_window_max", _pooling, _no_pooling, 4),
    "MaxPool3D": _windowed("reduce_window_max", _pooling, _no_pooling, 5),
    "AvgPool": _windowed("reduce_window_sum", _pooling, _no_pooling, 4, scale=_window_counts),
    "AvgPool3D": _windowed("reduce_window_sum", _pooling, _no_pooling, 5, scale=_window_counts),
    "FFT": _fourier("FFT", _transform),
    "IFFT": _fourier("IFFT", _transform),
    "RFFT": _fourier("RFFT", _real_transform),
    "IRFFT": _fourier("IRFFT", _inverse_real_transform),
    "ClipByValue": [Target("jax.numpy.clip")],
    "Step": [Target("jax.numpy.heaviside")],
    "MatrixExponential": [Target("jax.scipy.linalg.expm")],
    "NanToNum": [Target("jax.numpy.nan_to_num")],
    "Sinc": [Target("jax.numpy.sinc")],
    "Trunc": [Target("jax.numpy.trunc")],
}  # fmt: skip


# Elementwise ops that JAX does not differentiate, or that leave no call in most programs.
ABSENT = {"Identity", "NextAfter"}


def targets_of(op_type: str) -> list[Target]:
    """Return the targets of an op type; empty if JAX has neither primitive nor function."""
    if op_type not in TABLE and op_type in OPS and (found := _named_alike(OPS[op_type])):
        TABLE[op_type] = found  # the op type was defined after this module was loaded
    return TABLE.get(op_type, [])


def _named_alike(op: Op) -> list[Target]:
    """Return the primitive or the activation function that has the name of an elementwise op."""
    if not op.elementwise or op.attrs or isinstance(op.rule, NoGradient) or op.type in ABSENT:
        return []
    names = [op.name, op.type.lower()]
    found = [Target(p.name) for name in names if (p := getattr(jax.lax, f"{name}_p", None))]
    found += [Target(f"jax.nn.{name}") for name in names if _is_call(getattr(jax.nn, name, None))]
    taken = {target.name for targets in TABLE.values() for target in targets}
    # the target belongs to another op
    return [target for target in found[:1] if target.name not in taken]


def _is_call(function: Any) -> bool:
    """Return whether a function is one call in the programs that use it."""
    return isinstance(function, jax.custom_jvp) or is_jitted(function)


for _op_type in OPS:
    targets_of(_op_type)
