"""Relevance rules for nonlinear ops: elementwise ops, products, norms, pools, DeepLift."""

from __future__ import annotations

from functools import partial, reduce
from itertools import zip_longest
from operator import add, itemgetter, mul
from typing import Any

from regrad.core.backends import is_traced
from regrad.core.dims import differ
from regrad.core.foreign import nonzero
from regrad.core.gradients import Gradients
from regrad.errors import ArgumentError, RuleError, brief
from regrad.rules.lrp_maps import (
    _SIGNS_AGREE,
    _SIGNS_DIFFER,
    ABSENT,
    Rule,
    _changed,
    _check,
    _check_linear,
    _check_selecting,
    _maker,
    _named,
    _ones,
    _positive,
)


def _is_like(x: Any, y: Any) -> bool:
    """Return whether an output may be an elementwise function of an input."""
    shapes: list[Any] = [getattr(v, "shape", None) for v in (x, y)]
    if not all(isinstance(shape, tuple) for shape in shapes):
        return None not in shapes  # (unknown shape of a graph's tensor)
    sizes = zip_longest(*map(reversed, shapes), fillvalue=1)
    return len(shapes[0]) <= len(shapes[1]) and not any(
        differ(n, 1) and differ(n, m) for n, m in sizes
    )


def pass_(dy: Any, y: Any, needs: Any, x: Any = None, a: Any = None) -> Any:
    """Return the gradient by which an input gets the relevance of its output.

    For elementwise ops (activations), and norms with a scale and shift. It conserves all relevance.
    In an op with several inputs, the first input gets all of it.

    Args:
        dy: The incoming gradient.
        y: The output of the op.
        needs: Which gradients the caller needs: one entry per input.
        x: The input.
        a: The first input, in an op with two inputs.

    Returns:
        The gradient by the input, and None for other inputs.

    Raises:
        RuleError: (when the op runs) The output does not have the shape of the first input, x or a.

    Source: zennit's `Pass`; the identity rule of Achtibat et al., "AttnLRP: Attention-Aware
    Layer-Wise Relevance Propagation for Transformers" (2024), lxt's `identity_rule_implicit`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Tanh": rg.rules.lrp.pass_}):
    ...     dx = rg.grad(rg.tanh)(rg.tensor([2.0]))
    >>> bool(abs(2 * dx - rg.tanh(2.0)) < 1e-6)
    True
    """
    x = a if x is None else x
    _check(_is_like(x, y), "pass_", "an op whose output has the shape of its first input, x or a")
    dx = nonzero(y) * dy / nonzero(x)
    return dx if len(needs) == 1 else [dx] + [None] * (len(needs) - 1)


def uniform(dy: Any, builtin: Any) -> Any:
    """Return an op's own gradients, divided by the number of inputs with a gradient.

    For products of two values (`MatMul` and `Mul` of attention and of gates). It conserves all
    relevance. In PyTorch, a factor that does not require grad gets none, and the other factor gets
    all of it; `relevance` sets `requires_grad` of parameters to False.

    Args:
        dy: The incoming gradient.
        builtin: The op's own gradient.

    Returns:
        The gradients by the inputs.

    Raises:
        Nothing. The rule fits every op.

    Source: Achtibat et al. (2024), as for `pass_`; lxt's `divide_gradient`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Mul": rg.rules.lrp.uniform}):
    ...     print([dx.item() for dx in rg.grads(lambda a, b: a * b)([2.0, 5.0])])
    [2.5, 1.0]
    """
    dxs = builtin(dy)
    found = [dx for dx in dxs if dx is not None] if isinstance(dxs, Gradients) else []
    if not found:  # (one input, or no input with a gradient)
        return dxs
    count: Any = sum(1 * (abs(dx).sum() > 0) for dx in found)  # (a sparse one has no max)
    return dxs / count.clip(1, len(dxs))


def frozen_norm(
    dy: Any, x: Any, y: Any, builtin: Any, weight: Any = None, bias: Any = ABSENT,
    normalized_shape: Any = None, eps: Any = None, num_groups: Any = None,
    use_input_stats: Any = None,
) -> Any:  # fmt: skip
    """Return the gradient of a norm whose scale is treated as a constant.

    For `F.layer_norm`, `F.rms_norm`, `F.group_norm`, `F.instance_norm`, and `rg.at(norm)` in
    PyTorch: the whole call of a module that computes `weight * (x - mean) * scale + bias`, with or
    without the mean of x, over the axes of its `weight` (without a weight, over the last axis). It
    conserves all relevance except for the bias. (For an RMS norm it is the same as `pass_`.)

    Args:
        dy: The incoming gradient.
        x: The input.
        y: The output.
        builtin: The norm's own gradient, which the parameters of a module receive.
        weight: The weight, or None.
        bias: The bias, or None.
        normalized_shape: The shape of the normalized axes, which are the last axes.
        eps: The number that is added to the variance.
        num_groups: The number of groups of channels, in a group norm.
        use_input_stats: Whether an instance norm uses the statistics of its input.

    Returns:
        The gradient by the input, and None for the weight and the bias of a function.

    Raises:
        RuleError: (when the op runs) The output does not match this kind of norm.

    Source: Ali et al., "XAI for Transformers: Better Explanations through Conservative
    Propagation" (2022); lxt's `layer_norm_forward`.

    >>> import torch, regrad.torch
    >>> from regrad.rules import lrp
    >>> x = torch.tensor([[1.0, 2.0, 6.0]], requires_grad=True)
    >>> with regrad.torch.gradient_override_map({torch.nn.functional.layer_norm: lrp.frozen_norm}):
    ...     y = torch.nn.functional.layer_norm(x, (3,))
    >>> (dx,) = torch.autograd.grad(y[0, 2], x)
    >>> torch.allclose((x * dx).sum(), y[0, 2])
    True
    """
    if use_input_stats or num_groups is not None:
        groups = x.shape[1] if use_input_stats else num_groups
        dx = _frozen_groups(dy, x, weight, eps, groups)
        return dx, *[None] * (4 if use_input_stats else 2)
    if use_input_stats is False:  # (the scale is a constant)
        return builtin(dy)
    axes = tuple(range(-len(normalized_shape or getattr(weight, "shape", "1")), 0))
    same = _is_like(x, y) and _is_like(y, x) and len(x.shape) >= len(axes)
    wide = tuple(x.shape)[len(x.shape) - len(axes) :]
    fits = weight is None or getattr(weight, "shape", None) == wide
    what = "a norm over the last axes, whose output has the shape of its input (for a group norm, "
    _check(same and fits, "frozen_norm", f"{what}use the key F.group_norm)")
    w, b = 1 if weight is None else weight, 0 if bias is None or bias is ABSENT else bias
    means = x.mean(axes, keepdims=True), 0
    if eps is not None and normalized_shape is not None:
        mean = means[bias is ABSENT]
        scale = (((x - mean) ** 2).mean(axes, keepdims=True) + eps) ** -0.5
    else:  # choose the formula that fits the output best
        _check(not is_traced(x), "frozen_norm", "F.layer_norm, F.rms_norm and modules of PyTorch")
        fits = []
        for mean in means:
            v = (x - mean) * w
            size = (v * v).sum(axes, keepdims=True)
            scale = ((y - b) * v).sum(axes, keepdims=True) / nonzero(size)
            fits += [(float((abs(y - b - scale * v) ** 2).sum()), mean, scale)]
        rest, mean, scale = min(fits, key=itemgetter(0))
        if not rest <= 1e-3 * float((abs(y - b) ** 2).sum()):
            raise RuleError(
                "frozen_norm expected the output of a layer norm or an RMS norm: weight * (x - "
                "mean) * scale + bias. Use rules.vjp_of for another norm."
            )
    dx = dy * w * scale
    dx = dx if mean is means[1] else dx - dx.mean(axes, keepdims=True)
    if normalized_shape is None:
        builtin(dy)  # (for the parameters)
        return dx
    return dx if weight is None and bias is ABSENT else (dx, None, None)[: 2 + (bias is not ABSENT)]


def _frozen_groups(dy: Any, x: Any, weight: Any, eps: Any, groups: int) -> Any:
    """Return the gradient of a group norm, whose channels are the second axis."""
    shape = len(x), groups, -1
    dy = dy if weight is None else dy * weight.reshape((-1, *[1] * (len(x.shape) - 2)))
    centered, dx = (
        v.reshape(shape) - v.reshape(shape).mean(-1, keepdims=True) for v in (x, dy)
    )  # fmt: skip
    return (dx * ((centered**2).mean(-1, keepdims=True) + eps) ** -0.5).reshape(x.shape)


def _check_batch(name: str, x: Any) -> int:
    """Return half the size of a batch whose second half are references."""
    shape = getattr(x, "shape", ())
    fits = len(shape) > 0 and len(x) % 2 == 0
    _check(fits, name, "a batch of inputs and their references, as relevance(…, reference=) makes")
    return len(x) // 2


def rescale(dy: Any, x: Any, y: Any, builtin: Any) -> Any:
    """Return the slope between an input and its reference, times the incoming gradient.

    For activations, in a batch whose second half are the references (`relevance(…, reference=)`
    makes this batch). It conserves the differences from the reference. Other inputs, such as the
    slope of a PReLU, count as constants.

    Args:
        dy: The incoming gradient.
        x: The input of the op.
        y: The output.
        builtin: The op's own gradient, used where input and reference are equal.

    Returns:
        The gradient by x, and None for other inputs.

    Raises:
        RuleError: (when the op runs) The op is of another kind, or the batch size is odd.

    Source: Shrikumar, Greenside and Kundaje, "Learning Important Features Through Propagating
    Activation Differences" (2017); Captum's `DeepLift`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Relu": rg.rules.lrp.rescale}):
    ...     print(rg.grad(rg.nn.relu)(rg.tensor([3.0, -1.0])).tolist())
    [0.75, 0.75]
    """
    one = "an elementwise op with one input that depends on the batch"
    _check(_is_like(x, y) and _is_like(y, x), "rescale", one)
    _check_batch("rescale", x)
    pairs = (2, len(x) // 2, *x.shape[1:])
    x, y = x.reshape(pairs), y.reshape(pairs)
    run, rise = x[0] - x[1], y[0] - y[1]
    still = abs(run) < 1e-10
    slope = rise / (run + still * _ones(run))
    own, *others = dxs if isinstance(dxs := builtin(dy), Gradients) else (dxs,)
    _check(own is not None, "rescale", one)
    dx = dy.reshape(pairs) * slope * (abs(run) >= 1e-10) + own.reshape(pairs) * still
    return [dx.reshape(dy.shape), *[None] * len(others)] if others else dx.reshape(dy.shape)


def rescale_rrelu(dy: Any, x: Any, y: Any, lower: Any, upper: Any) -> Any:
    """Return the gradient of `rescale` for `F.rrelu` in evaluation mode, a leaky ReLU.

    Args:
        dy: The incoming gradient.
        x: The input of the op.
        y: The output.
        lower: The lower bound of the slope.
        upper: The upper bound of the slope.

    Returns:
        The gradient by x.

    Raises:
        RuleError: (when the op runs) The batch size is odd.

    Source: Shrikumar et al. (2017), as for `rescale`.

    >>> import torch, regrad.torch
    >>> from regrad.rules import lrp
    >>> x = torch.tensor([3.0, -1.0], requires_grad=True)
    >>> with regrad.torch.gradient_override_map({torch.nn.functional.rrelu: lrp.rescale_rrelu}):
    ...     y = torch.nn.functional.rrelu(x, 0.1, 0.3)
    >>> torch.autograd.grad(y.sum(), x)[0].tolist()
    [0.800000011920929, 0.800000011920929]
    """
    slope = (x > 0) * _ones(x) + (x <= 0) * ((lower + upper) / 2)
    return rescale(dy, x, y, lambda dy: dy * slope)


def rescale_greater(dy: Any, a: Any, b: Any, y: Any, builtin: Any) -> Any:
    """Return the gradient of the greater, or the lesser, of two values between two points.

    For `Maximum` and `Minimum`: `maximum(a, b)` is `b + relu(a - b)`, and the ReLU has the gradient
    of `rescale`. Batches are as in `rescale`, and the differences from the reference are conserved.

    Args:
        dy: The incoming gradient.
        a: The first input.
        b: The second input.
        y: The output.
        builtin: The op's own gradient, used where both differences from b are equal.

    Returns:
        The gradients by a and b.

    Raises:
        RuleError: (when the op runs) The batch size is odd.

    Source: Shrikumar et al. (2017), as for `rescale`; it is the average of the op's own gradient on
    the line from the reference to the input.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Maximum": rg.rules.lrp.rescale_greater}):
    ...     da, db = rg.grads(rg.maximum)([rg.tensor([3.0, 0.0]), rg.tensor([1.0, 2.0])])
    >>> da.tolist(), db.tolist()
    ([0.5, 0.5], [0.5, 0.5])
    """
    half = _check_batch("rescale_greater", y)
    pairs = (2, half, *y.shape[1:])
    gap, rest = (y * 0 + a - b).reshape(pairs), (y - b).reshape(pairs)
    run, rise = gap[0] - gap[1], rest[0] - rest[1]
    still = abs(run) < 1e-10
    slope = (_ones(gap) * (rise / (run + still * _ones(run)))).reshape(y.shape)
    fixed = (_ones(gap) * still).reshape(y.shape)
    shares = zip(builtin(dy), (slope, 1 - slope), strict=True)
    return [
        None if own is None else own * fixed + dy * share * (1 - fixed) for own, share in shares
    ]


def rescale_max(dy: Any, x: Any, y: Any, builtin: Any) -> Any:
    """Return the gradient of a max pool that shares the difference of two outputs.

    If an output is above the output of the reference, the difference goes to the largest input;
    otherwise it goes to the largest input of the reference. It is divided by the difference of that
    input. Batches are as in `rescale`, and the differences from the reference are conserved.

    Args:
        dy: The incoming gradient.
        x: The input of the pool.
        y: The output.
        builtin: The op's own gradient.

    Returns:
        The gradient by x.

    Raises:
        RuleError: (when the op runs) The op is of another kind, or the batch size is odd.

    Source: Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions" (2017), in the
    code of DeepSHAP; Captum's `DeepLift`.

    >>> import torch, regrad.torch
    >>> from regrad.rules import lrp
    >>> x = torch.tensor([[[[3.0, 1.0]]], [[[0.0, 2.0]]]], requires_grad=True)
    >>> with regrad.torch.gradient_override_map({"MaxPool": lrp.rescale_max}):
    ...     y = torch.nn.functional.max_pool2d(x, (1, 2))
    >>> (dx,) = torch.autograd.grad(y.sum(), x)
    >>> ((x[0] - x[1]) * dx[0]).sum().item(), (y[0] - y[1]).item()
    (1.0, 1.0)
    """
    half = _check_batch("rescale_max", x)
    selects = getattr(y, "shape", ())[:1] == x.shape[:1]
    _check(selects, "rescale_max", "an op with one input that selects in each example")
    (xs, ys, dys) = (v.reshape((2, half, *v.shape[1:])) for v in (x, y, dy))
    run, rise = xs[0] - xs[1], ys[0] - ys[1]
    still = abs(rise) < 1e-10
    greatest = 2 * ys - ys[0] - ys[1] > 0  # largest in the input, or in the reference
    routed = builtin((dys[0] * rise * greatest * (abs(rise) >= 1e-10)).reshape(dy.shape))
    routed = routed.reshape(xs.shape)
    near = abs(run) < 1e-10
    dx = (routed[0] + routed[1]) / (run + near * _ones(run))
    own = builtin((dys * still).reshape(dy.shape)).reshape(xs.shape)
    return (dx * _ones(xs) + own * near).reshape(x.shape)


rescale_max.refuses = _check_selecting  # pyright: ignore


def reveal_cancel(
    dy: Any, x: Any, w: Any, y: Any, forward: Any, vjp_: Any, bias: Any = ABSENT
) -> Any:
    """Return DeepLift's reveal-cancel gradient, for a linear map followed by a ReLU.

    Positive and negative parts of the difference from the reference have separate slopes. The rule
    is for a linear map followed by a ReLU. Give that ReLU the rule `rules.straight_through`, by
    place: `{**deep_lift(), rg.at("head.0", F.linear): reveal_cancel, rg.at("head.1", "Relu"):
    straight_through}`. The rule conserves the differences from the reference.

    Args:
        dy: The incoming gradient.
        x: The input; the second half of the batch are the references.
        w: The weight.
        y: The output.
        forward: The op itself.
        vjp_: The function that differentiates another function.
        bias: The bias, or None.

    Returns:
        The gradient by x, and None for other inputs.

    Raises:
        RuleError: (when the scope opens) The op does not have these inputs.

    Source: Shrikumar et al. (2017), as for `rescale`, section 3.5.3.

    >>> import torch, torch.nn.functional as F
    >>> from regrad import rules
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU()).double()
    >>> made = {F.linear: rules.lrp.reveal_cancel, "Relu": rules.straight_through}
    >>> x, base = torch.ones(1, 2).double(), torch.zeros(1, 2).double()
    >>> found = rules.lrp.relevance(net, x, 0, made, reference=base)
    >>> bool(abs(found.missing) < 1e-9)
    True
    """
    half = _check_batch("reveal_cancel", x)

    def twice(part: Any, v: Any) -> Any:  # (a compiled op takes whole batches)
        return ((v * 0).reshape((2, half, *v.shape[1:])) + part).reshape(v.shape)

    change, start = twice(x[:half] - x[half:], x), twice(y[half:], y)
    arrived = twice(dy[:half], dy)
    maps = [_changed(share, change, w, bias, forward) for share in _WITHOUT_BIAS]

    def seeds(zs: Any) -> list[Any]:
        plus, minus = zs[0] + zs[1], zs[2] + zs[3]
        ends = [_positive(start + z) for z in (0 * plus, plus, minus, plus + minus)]
        up, down = (ends[i] - ends[0] + ends[3] - ends[3 - i] for i in (1, 2))
        slopes = [rise / (2 * nonzero(run)) for rise, run in ((up, plus), (down, minus))]
        return [slope * arrived for slope in slopes for _ in range(2)]

    xs = tuple(part for part, _ in maps)
    dxs = vjp_(lambda given: [f(x) for (_, f), x in zip(maps, given, strict=True)], xs, seeds)
    dx = reduce(add, map(mul, xs, dxs)) / nonzero(change)
    return (dx, None, *([] if bias is ABSENT else [None]))


_WITHOUT_BIAS = [share._replace(bias=None) for share in _SIGNS_AGREE + _SIGNS_DIFFER]
reveal_cancel.refuses = partial(_check_linear, "reveal_cancel")  # pyright: ignore


@_maker
def beta_smooth(beta: float = 10.0) -> Rule:
    """Return the gradient of a softplus, `dy · sigmoid(beta · x)`, for ReLU.

    Args:
        beta: The steepness.

    Returns:
        A rule `(dy, x)` for a map of overrides. It does not conserve relevance.

    Raises:
        ArgumentError: `beta` is not above 0.

    Source: Dombrowski et al., "Explanations Can Be Manipulated and Geometry Is to Blame" (2019);
    zennit's `ReLUBetaSmooth`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Relu": rg.rules.lrp.beta_smooth(10.0)}):
    ...     print(rg.grad(rg.nn.relu)(rg.tensor([0.0])).tolist())
    [0.5]
    """
    if not beta > 0:
        raise ArgumentError(f"beta_smooth: expected a beta above 0, got {brief(beta)}")

    def rule(dy: Any, x: Any) -> Any:
        _check(_is_like(x, dy), "beta_smooth", "an elementwise op with one input")
        e = 2.718281828459045 ** (-abs(beta * x))
        return dy * ((x >= 0) * _ones(x) + (x < 0) * e) / (1 + e)

    return _named(rule, "beta_smooth")
