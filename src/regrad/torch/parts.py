"""The parts of callables that compute several ops in one kernel, as torch documents them.

The first parameter of each function is `op`. `op(torch.matmul)` is the callable under the user's
rule, or torch's own callable without a rule. Everything else in a function is torch's. Values come
from torch's own kernel (see `apart.py`), so only the gradients of these functions matter. They must
equal the gradients of the kernel where every op has its own gradient.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regrad.errors import PassedOverError
from regrad.torch.host import prelu_kernel, safe_softmax, softmax_axis

Lookup = Callable[[Any], Callable[..., Any]]
REDUCTIONS = ("none", "mean", "sum")
HALF = (torch.float16, torch.bfloat16)


# -- attention ------------------------------------------------------------------------------------


def attention(
    op: Lookup, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """`scaled_dot_product_attention` by torch's math path; masks become a bias of -inf."""
    dtype = query.dtype
    query, key, value = as_precise(query), as_precise(key), as_precise(value)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    root = math.sqrt(abs(scale))  # scales each operand, so that the product does not overflow
    query = query * math.copysign(root, scale)
    scores = op(torch.matmul)(query, key.transpose(-2, -1) * root)
    bias = _bias(attn_mask, is_causal, scores)
    weights = op(safe_softmax)(scores if bias is None else scores + bias, -1)
    weights = torch.dropout(weights, dropout_p, dropout_p > 0)
    return op(torch.matmul)(weights, value).to(dtype)


def as_precise(x: Tensor) -> Any:
    """Return a tensor in the precision in which torch computes inside a kernel."""
    return x.float() if x.dtype in HALF else x


def _bias(mask: Tensor | None, is_causal: bool, scores: Tensor) -> Any:
    if is_causal:
        if type(scores).__name__ == "DTensor":  # (context_parallel reorders the positions)
            raise PassedOverError(
                "causal attention of DTensors cannot be decomposed: a shard has no information "
                "about its positions. Pass local tensors (`use_local_output=True` in the plan), or "
                "keep=[torch.nn.functional.scaled_dot_product_attention]."
            )
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
    return mask


# -- losses ---------------------------------------------------------------------------------------


def cross_entropy(
    op: Lookup, input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """`cross_entropy` with class indices or probabilities, by log_softmax."""
    axis = 0 if input.dim() == 1 else 1
    logs, classes = op(torch.log_softmax)(input, axis), input.size(axis)
    scale = None
    if weight is not None:
        scale = weight.reshape([-1 if i == axis else 1 for i in range(input.dim())])
    if input.shape == target.shape:
        target = target * (1 - label_smoothing) + label_smoothing / classes
        loss = -(logs * (target if scale is None else target * scale)).sum(axis)
        return _reduce(loss, reduction, logs.numel() / classes)
    loss = F.nll_loss(
        logs, target, weight, ignore_index=ignore_index, reduction=REDUCTIONS[reduction]
    )
    if not label_smoothing:
        return loss
    ignored = target == ignore_index
    smooth = -(logs if scale is None else logs * scale).sum(axis).masked_fill(ignored, 0)
    share = torch.ones((), dtype=logs.dtype, device=logs.device).expand_as(target)
    if weight is not None:
        share = weight.gather(0, target.masked_fill(ignored, 0).flatten()).view_as(target)
    count = share.masked_fill(ignored, 0).sum()
    smooth = _reduce(smooth, reduction, count)
    return loss * (1 - label_smoothing) + smooth * (label_smoothing / classes)


def _reduce(loss: Tensor, reduction: int, count: Any) -> Any:
    return loss if reduction == 0 else loss.sum() / (count if reduction == 1 else 1)


def bce_with_logits(
    op: Lookup, input: Tensor, target: Tensor, weight: Tensor | None = None,
    pos_weight: Tensor | None = None, reduction: int = 1,
) -> Any:  # fmt: skip
    """`binary_cross_entropy_with_logits` by one sigmoid s, where s and 1 - s are not 0."""
    x = as_precise(input)
    end = -math.log(torch.finfo(x.dtype).eps)
    s = op(torch.sigmoid)(clip_value(x, -end, end))
    positive = target if pos_weight is None else target * pos_weight
    one, other = with_value(s.log(), F.logsigmoid(x)), with_value((-s).log1p(), F.logsigmoid(-x))
    loss = -(positive * one + (1 - target) * other)
    loss = loss if weight is None else loss * weight
    return (loss, loss.mean(), loss.sum())[reduction]


@cache
def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def named_loss(function: Callable[..., Any], op: Lookup, *args: Any, **options: Any) -> Any:
    """A loss of torch.nn.functional, whose `reduction` is a string."""
    given = {**dict(zip(_parameters(function), args, strict=False)), **options}
    average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    words = given.pop("reduction", "mean")
    if average is not None or reduce is not None:
        # (the deprecated arguments; each defaults to True)
        words = "none" if reduce is False else "sum" if average is False else "mean"
    parts = cross_entropy if function is F.cross_entropy else bce_with_logits
    return parts(op, **given, reduction=REDUCTIONS.index(words))


def logsigmoid(op: Lookup, input: Tensor) -> Any:
    """`logsigmoid` by sigmoid, where the sigmoid is not 0."""
    x = as_precise(input)
    end = math.log(torch.finfo(x.dtype).tiny) / 2
    return op(torch.sigmoid)(clip_value(x, end, math.inf)).log().to(input.dtype)


def bce_of_each(
    op: Lookup, input: Tensor, target: Tensor, weight: Tensor | None = None,
    pos_weight: Tensor | None = None, reduction: int = 0,
) -> Any:  # fmt: skip
    """`torch.binary_cross_entropy_with_logits`, which does not reduce by default."""
    return bce_with_logits(op, input, target, weight, pos_weight, reduction)


def with_value(y: Tensor, value: complex | Tensor) -> Any:
    """Return `value` with the gradient of y, for use as a factor."""
    return y + (value - y).detach()


def clip_value(x: Tensor, low: float, high: float) -> Any:
    """Clip x to an interval; outside of it the gradient is the gradient at the end.

    There the slope of the logarithm of a sigmoid no longer changes in the dtype. But the formula
    would compute the slope as a quotient of two numbers that are both 0.
    """
    with torch.no_grad():
        excess = torch.where(x.isnan(), 0, x - x.clamp(low, high))
    return x - excess


# -- activations ----------------------------------------------------------------------------------


def silu(op: Lookup, input: Tensor, inplace: bool = False) -> Any:
    """`x * sigmoid(x)`."""
    return input * op(torch.sigmoid)(input)


def glu(op: Lookup, input: Tensor, dim: int = -1) -> Any:
    """`a * sigmoid(b)` for the two halves of the input."""
    a, b = input.chunk(2, dim)
    return a * op(torch.sigmoid)(b)


def mish(op: Lookup, input: Tensor, inplace: bool = False) -> Any:
    """`x * tanh(softplus(x))`."""
    return input * op(torch.tanh)(op(F.softplus)(input))


def hardswish(op: Lookup, input: Tensor, inplace: bool = False) -> Any:
    """`x * relu6(x + 3) / 6`."""
    return input * op(F.relu6)(input + 3) / 6


def hardsigmoid(op: Lookup, input: Tensor, inplace: bool = False) -> Any:
    """`relu6(x + 3) / 6`."""
    return op(F.relu6)(input + 3) / 6


def relu6(op: Lookup, input: Tensor, *args: Any, **options: Any) -> Any:
    """`hardtanh(x, 0, 6)`."""
    return op(F.relu6)(input)


def clamp_side(side: str, op: Lookup, input: Tensor, *args: Any, **options: Any) -> Any:
    """`clamp_min` or `clamp_max`."""
    return op(torch.clamp)(input, **{side: (*args, *options.values())[0]})


# -- arithmetic, reductions, shapes ---------------------------------------------------------------


def square(op: Lookup, input: Tensor) -> Any:
    """The power of 2."""
    return op(torch.pow)(input, 2)


def float_power(op: Lookup, input: Tensor, exponent: Tensor | complex) -> Any:
    """A power in double precision."""
    return op(torch.pow)(_as_double(input), _as_double(exponent))


def _as_double(x: Tensor | complex) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def outer(op: Lookup, input: Tensor, vec2: Tensor) -> Any:
    """The product of a column and a row."""
    return op(torch.mul)(input[:, None], vec2)


def adjoint(op: Lookup, input: Tensor) -> Any:
    """The conjugate of the transpose."""
    return op(torch.conj)(input.mT)


def scaled_sum(
    reverse: bool, function: Callable[..., Any], op: Lookup, input: Tensor,
    other: Tensor | complex, alpha: Tensor | complex = 1,
) -> Any:  # fmt: skip
    """`a + alpha * b`, or `b - alpha * a`."""
    if isinstance(alpha, Tensor):
        other, alpha = alpha, other
    return op(function)(*((input * alpha, other) if reverse else (input, other * alpha)))


def other_name(function: Callable[..., Any], op: Lookup, *args: Any, **options: Any) -> Any:
    """Another spelling of a function: `max(a, b)` of `maximum`."""
    return op(function)(*args, **options)


def reduction(
    function: Callable[..., Any], op: Lookup, input: Tensor, dim: int | None = None,
    keepdim: bool = False, *, axis: int | None = None, keepdims: bool = False,
) -> Any:  # fmt: skip
    """`torch.max(x)`, or `torch.max(x, dim)`, whose indices have no gradient."""
    dim = axis if dim is None else dim
    if dim is None:
        return op(function)(input)
    return op(function)(input, dim, keepdim or keepdims), None


def aminmax(op: Lookup, input: Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """The minimum and the maximum."""
    where = () if dim is None else (dim,)
    return tuple([op(f)(input, where, keepdim) for f in (torch.amin, torch.amax)])


def stack(axis: int, ready: Callable[..., Any], op: Lookup, tensors: Sequence[Tensor]) -> Any:
    """`hstack` and similar functions: `cat` of prepared tensors."""
    xs = [ready(x) for x in tensors]
    return op(torch.cat)(xs, min(axis, xs[0].dim() - 1))


def as_column(x: Tensor) -> Any:
    """Return a vector as a column."""
    return x.reshape(-1, 1) if x.dim() < 2 else x


def flatten(op: Lookup, input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """A reshape of several axes into one."""
    with torch.no_grad():
        shape = torch.flatten(input, start_dim, end_dim).shape
    return op(torch.reshape)(input, shape)


def unflatten(op: Lookup, input: Tensor, dim: int, sizes: Sequence[int]) -> Any:
    """A reshape of one axis into several."""
    with torch.no_grad():
        shape = input.detach().unflatten(dim, sizes).shape
    return op(torch.reshape)(input, shape)


def reshape_as(op: Lookup, input: Tensor, other: Tensor) -> Any:
    """A reshape to the shape of another tensor."""
    return op(torch.reshape)(input, other.shape)


def convolution(
    function: Callable[..., Any], axes: int, op: Lookup, input: Tensor, weight: Tensor,
    bias: Tensor, *args: Any, **options: Any,
) -> Any:  # fmt: skip
    """A convolution, followed by the addition of its bias."""
    y = op(function)(input, weight, None, *args, **options)
    return y + bias.reshape(-1, *[1] * axes)


# -- in the form of regrad's ops ------------------------------------------------------------------


def of_matrices(function: Callable[..., Any], op: Lookup, *args: Any, **named: Any) -> Any:
    """A product with vectors, as a product of rows and columns."""
    a, b = (*args, *named.values())
    y = op(torch.matmul)(a[None] if a.dim() == 1 else a, b[:, None] if b.dim() == 1 else b)
    y = y.squeeze(-1) if b.dim() == 1 else y
    return y.squeeze(-1 if b.dim() == 1 else -2) if a.dim() == 1 else y


def by_channel(function: Callable[..., Any], op: Lookup, *args: Any, **named: Any) -> Any:
    """`prelu` with a slope for each channel, which broadcasts."""
    x, slope = (*args, *named.values())
    shape = (1, -1, *[1] * (x.dim() - 2)) if x.dim() else ()
    return op(prelu_kernel)(x, slope.reshape(shape))


def from_the_front(
    function: Any, op: Lookup, input: Tensor, dim: int, *args: Any, **options: Any
) -> Any:
    """Along an axis with a non-negative index; a number is treated as a vector."""
    if input.dim():
        return op(function)(input, dim % input.dim(), *args, **options)
    return op(function)(input[None], 0, *args, **options)[0]


def over_all(
    function: Any, op: Lookup, input: Tensor, dim: int | None = None, *args: Any, **options: Any
) -> Any:
    """Over all axes, listed explicitly."""
    options = {k: v for k, v in options.items() if k != "axis"}
    return op(function)(input, tuple(range(input.dim())) or None, *args, **options)


def along_some_axis(
    function: Callable[..., Any], op: Lookup, input: Tensor, dim: int | None = None,
    _stacklevel: int = 3, dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """`softmax` of torch.nn.functional, along the axis that it picks by default."""
    picked = softmax_axis(function.__name__, input.dim(), _stacklevel)
    return op(function)(input, picked, dtype=dtype)
