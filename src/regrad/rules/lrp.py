"""Layer-wise relevance propagation: rules, composites, and `relevance`, which runs them.

The relevance of a value is the value times the gradient that comes to it, `x · dx`; so at the
output of an op it is `y · dy`, and a rule of relevance is a rule like any other. (lxt does so;
zennit has gradients be relevances, so that sums and pools need rules of their own.) An op of degree
1 in its inputs together (a sum, a concatenation, a pooling, a ReLU) keeps the relevance by its own
gradient, and needs no rule. Where a value is 0, rules take it for 1e-19, so that it may have
relevance; `relevance` does the same.

Rules of linear maps name the output. Where a model changes that in place (`nn.ReLU(inplace=True)`),
torch refuses the backward pass, but not in `relevance`. Rules are differentiated by what arrives;
by the input, the derivative of a relevance is that of the rules, too.

A composite is a map of such rules, for `regrad.torch.gradient_override_map` or `relevance`. It is a
dict: `{**lrp.epsilon_plus(), rg.at("head", F.linear): lrp.gamma()}`. What a model lacks of it is
not missed. With `library="jax"` it is for `relevance` of a function of JAX. There a norm or an
activation that is written out is known by the class of the module, or by the `jax.named_scope`,
that is called so; one that is written out elsewhere has no rule, and `check="ops"` says what it
loses.

>>> import torch
>>> from regrad.rules import lrp
>>> net = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.ReLU())
>>> found = lrp.relevance(net, torch.ones(1, 3), 0, lrp.epsilon_plus())
>>> bool(abs(found.missing).max() < 1e-5)
True
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial, reduce
from inspect import isfunction
from itertools import islice, pairwise, zip_longest
from math import inf
from operator import add, itemgetter, mul
from typing import Any, NamedTuple, ParamSpec

from regrad.core.backends import is_traced
from regrad.core.containers import flatten
from regrad.core.dims import differ
from regrad.core.extras import needed
from regrad.core.foreign import nonzero
from regrad.core.gradients import Gradients
from regrad.core.made import remade
from regrad.core.places import at, spread
from regrad.core.registry import OPS
from regrad.core.rule import no_gradient
from regrad.core.scopes import Optional, optional, unmarked
from regrad.core.signatures import helpful
from regrad.errors import ArgumentError, RuleError, brief, kind
from regrad.rules.saliency import guided_relu

P = ParamSpec("P")
Rule = Callable[..., Any]
Part = Callable[[Any], Any]
ABSENT: Any = object()
API = "regrad.rules.lrp"


def _maker(make: Callable[P, Rule]) -> Callable[P, Rule]:
    """A function that makes rules which can be pickled."""
    return remade(helpful(make.__name__)(make))


def _named(rule: Any, name: str) -> Any:
    rule.__name__ = rule.__qualname__ = name
    return rule


# -- numbers of any library ------------------------------------------------------------------------


def _stable(z: Any, by: float) -> Any:
    """An array moved away from 0 by so much."""
    if (number := getattr(z, "new_tensor", None)) is not None:  # (torch's, in two passes)
        return z + number(by).copysign(z)
    return z - by + (z >= 0) * (z.clip(0, 0) + 2 * by)


def _same(v: Any) -> Any:
    return v


def _positive(v: Any) -> Any:
    return v.clip(0, inf)


def _negative(v: Any) -> Any:
    return v.clip(-inf, 0)


def _ones(v: Any) -> Any:
    return v.clip(0, 0) + 1


def _squares(v: Any) -> Any:
    return v * v


# -- linear maps -----------------------------------------------------------------------------------


# The ops of libraries that are linear in their first input, with the second as its weight.
LINEAR = frozenset({
    "MatMul", "Mul", "Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative",
    "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput",
    "torch.nn.functional.linear", "torch.nn.functional.conv1d", "torch.addmm", "torch.baddbmm",
    *[f"torch.nn.functional.conv_transpose{n}d" for n in (1, 2, 3)],
    "torch.functional.einsum", "torch.functional.tensordot", "torch.outer", "torch.kron",
    "dot_general", "conv_general_dilated", "mul", "dot", "matmul", "einsum", "tensordot", "outer",
})  # fmt: skip
# Those that select from their input.
SELECTING = frozenset({
    "MaxPool", "MaxPool3D", "Max", "reduce_window_max", "reduce_max",
    *[f"torch.nn.functional.{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)],
})  # fmt: skip


def _refuses(fits: bool, name: str, what: str, op: Any) -> None:
    """Refuse an op, where a rule is put in force."""
    if not fits:
        raise RuleError(
            f"lrp.{name} is for {what}, and the op type {op.type!r} is none. For other ops there "
            "are lrp.epsilon(), lrp.pass_ for those element by element, and rules.vjp_of(function)."
        )


def _check_linear(name: str, op: Any) -> None:
    inputs = {entry.name for entry in op.inputs}
    of_jax = [sys.modules.get(f"jax.{part}") for part in ("lax", "numpy", "nn")]
    known = any(hasattr(module, n) for module in of_jax for n in (op.type, f"{op.type}_p"))
    known = known or op.type in OPS or op.type.startswith("torch.")  # (others are of the user)
    fits = (op.type in LINEAR or not known) and (inputs >= {"x", "w"} or inputs >= {"a", "b"})
    what = (
        "a linear map of a value and its weight (F.linear, a convolution, 'MatMul', torch.addmm; "
        "'lrp_dense', 'lrp_convolution' in relevance of a function of JAX; of one module "
        "rg.at(module, F.linear); a function of x and w)"
    )
    _refuses(fits, name, what, op)


def _check_selecting(op: Any) -> None:
    _refuses(op.type in SELECTING, "rescale_max", "a max pool ('MaxPool', F.max_pool2d)", op)


class _Share(NamedTuple):
    """A linear map of a changed input, weight and bias, among those that relevance goes along."""

    x: Part
    w: Part
    bias: Part | None = None  # None for no bias


class _Group(NamedTuple):
    """Maps that share relevance in proportion to what each adds to the sum of them."""

    shares: tuple[_Share, ...]
    factor: Part | None = None  # of the relevance that they share, by the output; None for 1


def _along(name: str, groups: tuple[_Group, ...], stabilizer: float) -> Rule:
    """The rule that sends the relevance of a linear map back along others.

    This is zennit's `BasicHook`. The weight has no gradient.
    """
    if not stabilizer > 0:
        raise ArgumentError(f"{name}: expected a stabilizer above 0, got {brief(stabilizer)}")
    shares = [share for group in groups for share in group.shares]

    def rule(
        dy: Any, y: Any, forward: Any, vjp_: Any, x: Any = None, w: Any = None, a: Any = None,
        b: Any = None, bias: Any = ABSENT,
    ) -> Any:  # fmt: skip
        x, w = (a, b) if x is None else (x, w)
        xs, maps = zip(*[_changed(s, x, w, bias, forward) for s in shares], strict=True)

        def seeds(zs: Any) -> list[Any]:
            found, rest, arrived = [], iter(zs), nonzero(y) * dy
            for mine, factor in groups:
                seed = arrived / _stable(reduce(add, islice(rest, len(mine))), stabilizer)
                found += [seed if factor is None else seed * factor(y)] * len(mine)
            return found

        dxs = vjp_(lambda given: [f(x) for f, x in zip(maps, given, strict=True)], xs, seeds)
        found = reduce(add, map(mul, xs, dxs))
        return (found / nonzero(x), None, *([] if bias is ABSENT else [None]))

    rule.along = rule  # pyright: ignore  (by which `merge_norms` knows it)
    rule.refuses = partial(_check_linear, name)  # pyright: ignore
    return _named(rule, name)


def _changed(share: _Share, x: Any, w: Any, bias: Any, forward: Any) -> tuple[Any, Any]:
    """Return the input of a map, and the map."""
    rest = [share.w(w)]
    if bias is not ABSENT:
        rest.append(None if bias is None else bias * 0 if share.bias is None else share.bias(bias))
    return share.x(x), lambda x: forward(x, *rest)


_SIGNS_AGREE = (_Share(_positive, _positive, _positive), _Share(_negative, _negative))
_SIGNS_DIFFER = (_Share(_positive, _negative, _negative), _Share(_negative, _positive))


@_maker
def epsilon(epsilon: float = 1e-6) -> Rule:
    """Return the ε-rule: an op's own gradient, of `y · dy / (y ± epsilon)`.

    For linear maps (`F.linear`, `Conv2D`, …), and for any op of degree 1, as sums are. It keeps all
    relevance but the share of the bias and of `epsilon`.

    Args:
        epsilon: What the output is moved away from 0 by, above 0. Large, it drops what is small.

    Returns:
        A rule `(dy, y, builtin)` for a map of overrides.

    Raises:
        ArgumentError: epsilon is not above 0.

    Source: Bach, Binder, Montavon, Klauschen, Müller and Samek, "On Pixel-Wise Explanations for
    Non-Linear Classifier Decisions by Layer-Wise Relevance Propagation" (2015); zennit's `Epsilon`
    and `Norm`, Captum's `EpsilonRule`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"MatMul": rg.rules.lrp.epsilon(1.0)}):
    ...     dx = rg.grad(lambda x: rg.sum(x @ rg.tensor([[1.0], [2.0]])))(rg.ones((1, 2)))
    >>> dx.tolist()
    [[0.75, 1.5]]
    """
    if not epsilon > 0:
        raise ArgumentError(f"epsilon: expected a number above 0, got {brief(epsilon)}")

    def rule(dy: Any, y: Any, builtin: Any, bias: Any = None) -> Any:
        _check(not isinstance(y, list | tuple), "epsilon", "an op of one result")
        return builtin(nonzero(y) * dy / _stable(y, epsilon))

    rule.along = _along("epsilon", (_Group((_Share(_same, _same, _same),)),), epsilon)  # pyright: ignore
    return _named(rule, "epsilon")


@_maker
def gamma(gamma: float = 0.25, stabilizer: float = 1e-6) -> Rule:
    """Return the γ-rule: contributions of the output's sign count `1 + gamma` times.

    For linear maps; of a product `a @ b`, b is the weight. It keeps all relevance but that of the
    bias.

    Args:
        gamma: By how much.
        stabilizer: What divisors are moved away from 0 by.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: stabilizer is not above 0, or gamma is below 0.

    Source: Montavon, Binder, Lapuschkin, Samek and Müller, "Layer-Wise Relevance Propagation: An
    Overview" (2019); Andéol et al., "Learning Domain Invariant Representations by Joint Wasserstein
    Distance Minimization" (2021), for inputs of both signs; zennit's `Gamma`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"MatMul": rg.rules.lrp.gamma(1.0)}):
    ...     dx = rg.grad(lambda x: rg.sum(x @ rg.tensor([[2.0], [-1.0]])))(rg.ones((1, 2)))
    >>> dx.round().tolist(), dx.sum().round().item()
    ([[1.0, -0.0]], 1.0)
    """
    if gamma < 0:
        raise ArgumentError(f"gamma: expected a number of 0 or more, got {brief(gamma)}")

    def more(of: Part) -> Part:
        return lambda v: v + gamma * of(v)

    p, n = more(_positive), more(_negative)
    agree = _Group((_Share(_positive, p, p), _Share(_negative, n)), lambda y: y > 0)
    differ = _Group((_Share(_positive, n, n), _Share(_negative, p)), lambda y: y < 0)
    return _along("gamma", (agree, differ), stabilizer)


@_maker
def z_plus(stabilizer: float = 1e-6) -> Rule:
    """Return the z⁺-rule: relevance follows what adds to the output.

    For linear maps; of a product `a @ b`, b is the weight. It keeps all relevance but that of the
    bias, and none is left where nothing adds.

    Args:
        stabilizer: What divisors are moved away from 0 by.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: stabilizer is not above 0.

    Source: Montavon, Lapuschkin, Binder, Samek and Müller, "Explaining NonLinear Classification
    Decisions with Deep Taylor Decomposition" (2017); zennit's `ZPlus`, Captum's
    `Alpha1_Beta0_Rule`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"MatMul": rg.rules.lrp.z_plus()}):
    ...     dx = rg.grad(lambda x: rg.sum(x @ rg.tensor([[3.0], [-1.0]])))(rg.ones((1, 2)))
    >>> dx.round().tolist()
    [[2.0, 0.0]]
    """
    return _along("z_plus", (_Group(_SIGNS_AGREE),), stabilizer)


@_maker
def alpha_beta(alpha: float = 2.0, beta: float = 1.0, stabilizer: float = 1e-6) -> Rule:
    """Return the αβ-rule: `alpha` times what adds to the output, less `beta` times what takes.

    For linear maps; of a product `a @ b`, b is the weight. It keeps all relevance but that of the
    bias, where something adds and something takes.

    Args:
        alpha: The factor of what adds.
        beta: The factor of what takes, `alpha - 1`.
        stabilizer: What divisors are moved away from 0 by.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: `alpha - beta` is not 1, one is below 0, or stabilizer is not above 0.

    Source: Bach et al. (2015), as for `epsilon`; zennit's `AlphaBeta`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"MatMul": rg.rules.lrp.alpha_beta(2.0, 1.0)}):
    ...     dx = rg.grad(lambda x: rg.sum(x @ rg.tensor([[3.0], [-1.0]])))(rg.ones((1, 2)))
    >>> dx.round().tolist()
    [[4.0, -2.0]]
    """
    if alpha < 0 or beta < 0 or alpha - beta != 1:
        raise ArgumentError(
            f"alpha_beta: expected alpha - beta = 1, both of 0 or more, got {alpha} and {beta}"
        )
    groups = _Group(_SIGNS_AGREE, lambda y: alpha), _Group(_SIGNS_DIFFER, lambda y: -beta)
    return _along("alpha_beta", groups if beta else groups[:1], stabilizer)


@_maker
def z_box(low: Any, high: Any, stabilizer: float = 1e-6) -> Rule:
    """Return the z^B-rule: relevance by the distance from the bounds of the input.

    For the linear map that gets the input, such as pixels. It keeps all relevance but that of the
    bias.

    Args:
        low: The least value of the input: a number, or an array that broadcasts to it, as of one
            for each channel.
        high: The greatest.
        stabilizer: What divisors are moved away from 0 by.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: a bound is not what broadcasts, low is above high, or stabilizer not above 0.

    Source: Montavon et al. (2017), as for `z_plus`; zennit's `ZBox`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"MatMul": rg.rules.lrp.z_box(0.0, 2.0)}):
    ...     dx = rg.grad(lambda x: rg.sum(x @ rg.tensor([[1.0], [-1.0]])))(rg.tensor([[1.5, 1.0]]))
    >>> dx.shape
    (1, 2)
    """
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        raise ArgumentError(f"z_box: expected low <= high, got {low} and {high}")
    lowest = _Share(lambda x: x.clip(0, 0) - low, _positive, lambda bias: -_positive(bias))
    highest = _Share(lambda x: x.clip(0, 0) - high, _negative, lambda bias: -_negative(bias))
    return _along("z_box", (_Group((_Share(_same, _same, _same), lowest, highest)),), stabilizer)


@_maker
def w_square(stabilizer: float = 1e-6) -> Rule:
    """Return the w²-rule: relevance by the squares of the weights, whatever the input.

    For the linear map that gets an input without bounds. It keeps all relevance but that of the
    bias.

    Args:
        stabilizer: What divisors are moved away from 0 by.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: stabilizer is not above 0.

    Source: Montavon et al. (2017), as for `z_plus`; zennit's `WSquare`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"MatMul": rg.rules.lrp.w_square()}):
    ...     dx = rg.grad(lambda x: rg.sum(x @ rg.tensor([[3.0], [1.0]])))(rg.ones((1, 2)))
    >>> (dx * 10).round().tolist()
    [[36.0, 4.0]]
    """
    return _along("w_square", (_Group((_Share(_ones, _squares, _squares),)),), stabilizer)


@_maker
def flat(stabilizer: float = 1e-6) -> Rule:
    """Return the flat rule: equal relevance for all inputs of an output.

    For the linear map that gets the input. It keeps all relevance, of the bias too.

    Args:
        stabilizer: What divisors are moved away from 0 by.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: stabilizer is not above 0.

    Source: Lapuschkin et al., "Unmasking Clever Hans Predictors and Assessing What Machines Really
    Learn" (2019); zennit's `Flat`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"MatMul": rg.rules.lrp.flat()}):
    ...     dx = rg.grad(lambda x: rg.sum(x @ rg.tensor([[3.0], [1.0]])))(rg.ones((1, 2)))
    >>> dx.round().tolist()
    [[2.0, 2.0]]
    """
    return _along("flat", (_Group((_Share(_ones, _ones),)),), stabilizer)


# -- other ops -------------------------------------------------------------------------------------


def _check(fits: bool, name: str, what: str) -> None:
    """Refuse an op that a rule does not fit, where it runs; the note of the error names the op."""
    if not fits:
        raise RuleError(
            f"lrp.{name} is for {what}. Put it on such an op, or rules.vjp_of(function) on this one"
        )


def _is_like(x: Any, y: Any) -> bool:
    """Return whether an output may be element by element that of an input, which broadcasts."""
    shapes: list[Any] = [getattr(v, "shape", None) for v in (x, y)]
    if not all(isinstance(shape, tuple) for shape in shapes):
        return None not in shapes  # (a shape of a graph, of which nothing is known)
    sizes = zip_longest(*map(reversed, shapes), fillvalue=1)
    return len(shapes[0]) <= len(shapes[1]) and not any(
        differ(n, 1) and differ(n, m) for n, m in sizes
    )


def pass_(dy: Any, y: Any, needs: Any, x: Any = None, a: Any = None) -> Any:
    """Return the gradient by which an input has the relevance of its output.

    For ops element by element (activations), and norms with a scale and shift of their own. It
    keeps all relevance. Of an op of several inputs the first has all.

    Args:
        dy: The gradient that arrives.
        y: The output of the op.
        needs: Which gradients are wanted, of which there is one for each input.
        x: The input.
        a: The input, of an op of two.

    Returns:
        The gradient by the input, and None for others.

    Raises:
        RuleError: (where it runs) the output has not the shape of the first input, x or a.

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
    """Return an op's own gradients, divided by the number of inputs that have one.

    For products of two values (`MatMul` and `Mul` of attention and of gates). It keeps all
    relevance. In PyTorch a factor that does not require grad has none, and the other one all;
    `relevance` has parameters require none.

    Args:
        dy: The gradient that arrives.
        builtin: The op's own gradient.

    Returns:
        The gradients by the inputs.

    Raises:
        Nothing. It fits every op.

    Source: Achtibat et al. (2024), as for `pass_`; lxt's `divide_gradient`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Mul": rg.rules.lrp.uniform}):
    ...     print([dx.item() for dx in rg.grads(lambda a, b: a * b)([2.0, 5.0])])
    [2.5, 1.0]
    """
    dxs = builtin(dy)
    found = [dx for dx in dxs if dx is not None] if isinstance(dxs, Gradients) else []
    if not found:  # (of one input, or of none that has a gradient)
        return dxs
    count: Any = sum(1 * (abs(dx).max() > 0) for dx in found)
    return dxs / count.clip(1, len(dxs))


def frozen_norm(
    dy: Any, x: Any, y: Any, builtin: Any, weight: Any = None, bias: Any = ABSENT,
    normalized_shape: Any = None, eps: Any = None,
) -> Any:  # fmt: skip
    """Return the gradient of a layer norm or RMS norm whose scale is taken for a constant.

    For `F.layer_norm`, `F.rms_norm`, and `rg.at(norm)` in PyTorch: the whole call of a module that
    computes `weight * (x - mean) * scale + bias`, with the mean of x or without, over the axes of
    its `weight` (without one, over the last). It keeps all relevance but that of the bias. (Of an
    RMS norm it is `pass_`.)

    Args:
        dy: The gradient that arrives.
        x: The input.
        y: The output.
        builtin: The norm's own gradient, which the parameters of a module get.
        weight: The weight, or None.
        bias: The bias, or None.
        normalized_shape: The shape of the axes that it goes over, which are the last.
        eps: What is added to the variance.

    Returns:
        The gradient by the input, and None for the weight and the bias of a function.

    Raises:
        RuleError: (where it runs) the output is not that of such a norm.

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
    axes = tuple(range(-len(normalized_shape or getattr(weight, "shape", "1")), 0))
    same = _is_like(x, y) and _is_like(y, x) and len(x.shape) >= len(axes)
    _check(same, "frozen_norm", "a norm, whose output has the shape of its input")
    w, b = 1 if weight is None else weight, 0 if bias is None or bias is ABSENT else bias
    means = x.mean(axes, keepdims=True), 0
    if eps is not None and normalized_shape is not None:
        mean = means[bias is ABSENT]
        scale = (((x - mean) ** 2).mean(axes, keepdims=True) + eps) ** -0.5
    else:  # what fits the output best
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


def _check_batch(name: str, x: Any) -> int:
    """Return the half of a batch, of which the other half are references."""
    shape = getattr(x, "shape", ())
    fits = len(shape) > 0 and len(x) % 2 == 0
    _check(fits, name, "a batch of inputs and their references, as relevance(…, reference=) makes")
    return len(x) // 2


def rescale(dy: Any, x: Any, y: Any, builtin: Any) -> Any:
    """Return the slope between an input and its reference, times the gradient that arrives.

    For activations, in a batch whose second half are the references (`relevance(…, reference=)`
    makes it). The differences from the reference are kept.

    Args:
        dy: The gradient that arrives.
        x: The input of the op.
        y: The output.
        builtin: The op's own gradient, taken where input and reference are the same.

    Returns:
        The gradient by x.

    Raises:
        RuleError: (where it runs) the op is of another kind, or the batch of odd size.

    Source: Shrikumar, Greenside and Kundaje, "Learning Important Features Through Propagating
    Activation Differences" (2017); Captum's `DeepLift`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Relu": rg.rules.lrp.rescale}):
    ...     print(rg.grad(rg.nn.relu)(rg.tensor([3.0, -1.0])).tolist())
    [0.75, 0.75]
    """
    one = "an op element by element, of one input"
    _check(_is_like(x, y) and _is_like(y, x), "rescale", one)
    _check_batch("rescale", x)
    pairs = (2, len(x) // 2, *x.shape[1:])
    x, y = x.reshape(pairs), y.reshape(pairs)
    run, rise = x[0] - x[1], y[0] - y[1]
    still = abs(run) < 1e-10
    slope = rise / (run + still * _ones(run))
    own = builtin(dy)
    _check(not isinstance(own, Gradients), "rescale", one)
    dx = dy.reshape(pairs) * slope * (abs(run) >= 1e-10) + own.reshape(pairs) * still
    return dx.reshape(dy.shape)


def rescale_max(dy: Any, x: Any, y: Any, builtin: Any) -> Any:
    """Return the gradient of a max pool that shares the difference of two outputs.

    What an output rises above that of the reference goes to the input that is the greatest, and
    what it falls below to the one that is the greatest of the reference, both over the difference
    of that input. In a batch as for `rescale`; the differences from the reference are kept.

    Args:
        dy: The gradient that arrives.
        x: The input of the pool.
        y: The output.
        builtin: The op's own gradient.

    Returns:
        The gradient by x.

    Raises:
        RuleError: (where it runs) the op is of another kind, or the batch of odd size.

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
    selects = getattr(y, "shape", ())[:1] == x.shape[:1] and y.ndim == x.ndim
    _check(selects, "rescale_max", "an op that selects in each example, of one input")
    (xs, ys, dys) = (v.reshape((2, half, *v.shape[1:])) for v in (x, y, dy))
    run, rise = xs[0] - xs[1], ys[0] - ys[1]
    still = abs(rise) < 1e-10
    greatest = 2 * ys - ys[0] - ys[1] > 0  # of the input, or of the reference
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
    """Return the gradient of DeepLift's reveal-cancel rule, of a linear map and the ReLU behind it.

    What adds to the difference from the reference has a slope of its own, and so has what takes. It
    is for a linear map that a ReLU follows, which gets `rules.straight_through` then, by place:
    `{**deep_lift(), rg.at("head.0", F.linear): reveal_cancel, rg.at("head.1", "Relu"):
    straight_through}`. The differences from the reference are kept.

    Args:
        dy: The gradient that arrives.
        x: The input, of which the second half of the batch are the references.
        w: The weight.
        y: The output.
        forward: The op itself.
        vjp_: What differentiates a function.
        bias: The bias, or None.

    Returns:
        The gradient by x, and None for others.

    Raises:
        RuleError: (where it is put in force) for an op without these inputs.

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
        A rule `(dy, x)` for a map of overrides. It does not keep relevance.

    Raises:
        ArgumentError: beta is not above 0.

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
        _check(_is_like(x, dy), "beta_smooth", "an op element by element, of one input")
        e = 2.718281828459045 ** (-abs(beta * x))
        return dy * ((x >= 0) * _ones(x) + (x < 0) * e) / (1 + e)

    return _named(rule, "beta_smooth")


# -- composites ------------------------------------------------------------------------------------

# (PReLU has two inputs, and passes relevance on by its own gradient.)
ACTIVATIONS = (
    "Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Gelu", "Silu", "Softplus", "Softsign", "Tanh",
)  # fmt: skip

# What `relevance` calls the linear maps of one value and the products of two in a JAX program.
MAPS = ("lrp_dense", "lrp_convolution", "lrp_matmul", "lrp_mul")


class _Keys(NamedTuple):
    """The keys of a library for what composites have rules for."""

    dense: tuple[Any, ...]
    convolution: tuple[Any, ...]
    activations: tuple[Any, ...]
    matmul: Any
    mul: Any
    norms: dict[Any, Any]
    pools: tuple[Any, ...] = ()  # max pools


def _keys(library: str) -> _Keys:
    if library == "jax":
        nn = needed("jax.nn", "jax", API)
        others = [getattr(nn, n) for n in ("hard_tanh", "hard_swish", "celu", "mish")]
        shifted = {at(_in_shifted_norm, op_type): pass_ for op_type in ("Sub", "AddV2")}
        pools = ("reduce_window_max",)
        return _Keys(MAPS[:1], MAPS[1:2], (*ACTIVATIONS, *others), *MAPS[2:], shifted, pools)
    if library != "torch":
        raise ArgumentError(f'expected library="torch" or "jax", got {brief(library)}')
    F = needed("torch.nn.functional", "torch", API)
    others = [
        getattr(F, n) for n in (
            "hardtanh", "hardswish", "hardshrink", "softshrink", "tanhshrink", "celu", "mish",
            "threshold",
        )
    ]  # fmt: skip
    transposed = [getattr(F, f"conv_transpose{n}d") for n in (1, 2, 3)]
    pools = [getattr(F, f"{kind}max_pool{n}d") for kind in ("", "adaptive_") for n in (1, 2, 3)]
    norms = dict.fromkeys((F.batch_norm, F.instance_norm, F.group_norm, F.rms_norm), pass_)
    return _Keys(
        (F.linear,), (F.conv1d, "Conv2D", "Conv3D", *transposed), (*ACTIVATIONS, *others),
        "MatMul", "Mul", {**norms, F.layer_norm: frozen_norm}, tuple(pools),
    )  # fmt: skip


def _is_called(site: Any, *words: str) -> bool:
    """Return whether the module that runs has one of these in the name of its class.

    (Where the class is not known, of a module of Flax's without `model=`, its path has it.)
    """
    known = getattr(site.module_class, "__name__", None) or site.path.rpartition(".")[2]
    return any(word in known.lower() for word in words)


def _in_norm(site: Any) -> bool:
    return _is_called(site, "norm")


def _in_shifted_norm(site: Any) -> bool:
    return _is_called(site, "batchnorm", "groupnorm", "instancenorm")


def _in_activation(site: Any) -> bool:
    return _is_called(site, "gelu", "silu", "swish", "mish", "activation")


# What gates an activation that is written out as `x * gate(x)`. If the gate is a constant, and the
# product has its own gradient, then relevance passes: x · dx = x · dy · gate(x) = y · dy.
_GATES = at(_in_activation, ("Tanh", "Sigmoid", "Erf"))


def _own(dy: Any, builtin: Any) -> Any:
    return builtin(dy)


def _all_optional(rules: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: optional(rule) for key, rule in rules.items()}


def _others(keys: _Keys) -> dict[Any, Any]:
    """Rules of all but linear layers: activations, norms, products."""
    return _all_optional({
        **dict.fromkeys(keys.activations, pass_), **keys.norms,
        keys.matmul: uniform, keys.mul: uniform,
        at(_in_norm, "Rsqrt"): no_gradient, at(_in_norm, "Sqrt"): no_gradient,
        at(_in_norm, keys.mul): _own, at(_in_norm, "RealDiv"): _own,
        at(_in_activation, keys.mul): _own, _GATES: no_gradient,
    })  # fmt: skip


def _composite(
    library: str, dense: Rule, convolution: Rule, first: Any = None, flat: bool = True
) -> dict[Any, Any]:
    """The map of rules of all ops, and of one for the first linear map that runs."""
    keys = _keys(library)
    rules: dict[Any, Any] = dict.fromkeys(keys.convolution, convolution)
    rules |= dict.fromkeys(keys.dense, dense)
    if first is not None:
        rules[at(None, (*keys.dense, *keys.convolution) if flat else keys.convolution, nth=0)] = (
            first
        )
    return {**_others(keys), **_all_optional(rules)}


def epsilon_plus(
    epsilon: float = 1e-6, stabilizer: float = 1e-6, library: str = "torch"
) -> dict[Any, Any]:
    """Return the composite of z⁺ for convolutions and ε for dense layers.

    Args:
        epsilon: That of `lrp.epsilon`.
        stabilizer: That of `lrp.z_plus`.
        library: `"torch"`, or `"jax"` for `relevance` of a function of JAX.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: a number is not above 0, or the library is another one.
        MissingPackageError: The library is not installed.

    Source: zennit's `EpsilonPlus`.

    >>> from regrad.rules import lrp
    >>> lrp.epsilon_plus()["Conv2D"].rule.__name__
    'z_plus'
    """
    return _composite(library, EPSILON(epsilon), z_plus(stabilizer))


def epsilon_plus_flat(
    epsilon: float = 1e-6, stabilizer: float = 1e-6, library: str = "torch"
) -> dict[Any, Any]:
    """Return `epsilon_plus` with the flat rule in the first linear layer that runs.

    Args:
        epsilon: That of `lrp.epsilon`.
        stabilizer: That of the others.
        library: `"torch"`, or `"jax"` for `relevance` of a function of JAX.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: a number is not above 0, or the library is another one.
        MissingPackageError: The library is not installed.

    Source: zennit's `EpsilonPlusFlat`, whose first layer is the first of `named_modules()`.

    >>> from regrad.rules import lrp
    >>> len(lrp.epsilon_plus_flat()) - len(lrp.epsilon_plus())
    1
    """
    return _composite(library, EPSILON(epsilon), z_plus(stabilizer), flat(stabilizer))


def epsilon_gamma_box(
    low: Any,
    high: Any,
    epsilon: float = 1e-6,
    gamma: float = 0.25,
    stabilizer: float = 1e-6,
    library: str = "torch",
) -> dict[Any, Any]:
    """Return the composite of z^B in the first convolution, γ in others, ε for dense layers.

    Args:
        low: The least value of the input, as for `lrp.z_box`.
        high: The greatest.
        epsilon: That of `lrp.epsilon`.
        gamma: That of `lrp.gamma`.
        stabilizer: That of the others.
        library: `"torch"`, or `"jax"` for `relevance` of a function of JAX.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: low is above high, or a number is not above 0, or the library is another one.
        MissingPackageError: The library is not installed.

    Source: zennit's `EpsilonGammaBox`.

    >>> from regrad.rules import lrp
    >>> lrp.epsilon_gamma_box(-3.0, 3.0)["Conv2D"].rule.__name__
    'gamma'
    """
    rules = EPSILON(epsilon), GAMMA(gamma, stabilizer)
    return _composite(library, *rules, z_box(low, high, stabilizer), flat=False)


def epsilon_alpha2_beta1(
    epsilon: float = 1e-6, stabilizer: float = 1e-6, library: str = "torch"
) -> dict[Any, Any]:
    """Return the composite of αβ (2 and 1) for convolutions and ε for dense layers.

    Args:
        epsilon: That of `lrp.epsilon`.
        stabilizer: That of `lrp.alpha_beta`.
        library: `"torch"`, or `"jax"` for `relevance` of a function of JAX.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: a number is not above 0, or the library is another one.
        MissingPackageError: The library is not installed.

    Source: zennit's `EpsilonAlpha2Beta1`.

    >>> from regrad.rules import lrp
    >>> lrp.epsilon_alpha2_beta1()["Conv2D"].rule.__name__
    'alpha_beta'
    """
    return _composite(library, EPSILON(epsilon), alpha_beta(2.0, 1.0, stabilizer))


def epsilon_alpha2_beta1_flat(
    epsilon: float = 1e-6, stabilizer: float = 1e-6, library: str = "torch"
) -> dict[Any, Any]:
    """Return `epsilon_alpha2_beta1` with the flat rule in the first linear layer that runs.

    Args:
        epsilon: That of `lrp.epsilon`.
        stabilizer: That of the others.
        library: `"torch"`, or `"jax"` for `relevance` of a function of JAX.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: a number is not above 0, or the library is another one.
        MissingPackageError: The library is not installed.

    Source: zennit's `EpsilonAlpha2Beta1Flat`.

    >>> from regrad.rules import lrp
    >>> len(lrp.epsilon_alpha2_beta1_flat()) - len(lrp.epsilon_alpha2_beta1())
    1
    """
    rules = EPSILON(epsilon), alpha_beta(2.0, 1.0, stabilizer)
    return _composite(library, *rules, flat(stabilizer))


def excitation(stabilizer: float = 1e-6, library: str = "torch") -> dict[Any, Any]:
    """Return the composite of z⁺ for all linear layers.

    Args:
        stabilizer: That of `lrp.z_plus`.
        library: `"torch"`, or `"jax"` for `relevance` of a function of JAX.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: stabilizer is not above 0, or the library is another one.
        MissingPackageError: The library is not installed.

    Source: Zhang, Lin, Brandt, Shen and Sclaroff, "Top-Down Neural Attention by Excitation
    Backprop" (2016); zennit's `ExcitationBackprop`.

    >>> from regrad.rules import lrp
    >>> lrp.excitation()["Conv2D"].rule.__name__
    'z_plus'
    """
    return _composite(library, z_plus(stabilizer), z_plus(stabilizer))


def guided() -> dict[Any, Any]:
    """Return the composite of guided backprop. It does not keep relevance.

    Returns:
        A map of overrides for the library.

    Raises:
        Nothing.

    Source: Springenberg et al., as for `rules.guided_relu`; zennit's and Captum's `GuidedBackprop`.

    >>> from regrad.rules import lrp
    >>> [*lrp.guided()]
    ['Relu']
    """
    return {"Relu": guided_relu}


def attn_lrp(library: str = "torch") -> dict[Any, Any]:
    """Return the composite for transformers: the own gradient of linear layers and of softmax.

    Products of two values are shared in halves, activations pass relevance on, and the scale of a
    norm is a constant, in modules that are called norms if it is written out. The gradient of a
    softmax is the rule that the paper derives for it, by Taylor: it does not keep relevance, as
    a softmax is not of degree 1 (`cp_lrp` does). An activation that is written out as `x * gate(x)`
    passes relevance on if its module is called one (`NewGELUActivation`), and is a product
    elsewhere.

    Args:
        library: `"torch"`, or `"jax"` for `relevance` of a function of JAX.

    Returns:
        A map of overrides for the library, for `relevance`, which has parameters require no grad.

    Raises:
        ArgumentError: the library is another one.
        MissingPackageError: The library is not installed.

    Source: Achtibat et al. (2024), as for `pass_`; lxt's `attnLRP`.

    >>> from regrad.rules import lrp
    >>> lrp.attn_lrp()["MatMul"].rule.__name__
    'uniform'
    """
    keys = _keys(library)
    return {
        **_others(keys),
        **dict.fromkeys(keys.dense, optional(_own)),
    }  # ("MatMul" reaches torch's)


def cp_lrp(library: str = "torch") -> dict[Any, Any]:
    """Return the composite for transformers in which attention is a constant.

    As `attn_lrp`, but all relevance of an attended value goes to the value, and none to the
    softmax. It keeps all relevance but that of biases.

    Args:
        library: `"torch"`, or `"jax"` for `relevance` of a function of JAX.

    Returns:
        A map of overrides for the library, for `relevance`, which has parameters require no grad.

    Raises:
        ArgumentError: the library is another one.
        MissingPackageError: The library is not installed.

    Source: Ali et al. (2022), as for `frozen_norm`; lxt's `cp_LRP`.

    >>> from regrad.rules import lrp
    >>> lrp.cp_lrp()["Softmax"].rule.__name__
    'no_gradient'
    """
    rules = {"Softmax": no_gradient, _keys(library).matmul: _own}
    return {**attn_lrp(library), **_all_optional(rules)}


def deep_lift(library: str = "torch") -> dict[Any, Any]:
    """Return the composite of DeepLift's rescale rule, for `relevance(…, reference=)`.

    Activations are rescaled, and max pools share what they rise and fall; linear layers, sums and
    average pools need no rule. Of other ops (PReLU, products, softmax) it is the gradient, which
    does not keep relevance.

    Args:
        library: `"torch"`, or `"jax"` for `relevance` of a function of JAX.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: the library is another one.
        MissingPackageError: The library is not installed.

    Source: Shrikumar et al. (2017), as for `rescale`; Captum's `DeepLift`.

    >>> from regrad.rules import lrp
    >>> lrp.deep_lift()["Relu"].rule.__name__
    'rescale'
    """
    keys = _keys(library)
    rules = dict.fromkeys((*keys.activations, "Sigmoid"), rescale)
    return _all_optional({**rules, **dict.fromkeys(keys.pools, rescale_max)})


def merge_norms(model: Any, rules: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a map in which linear maps count as merged with the batch norm behind them.

    The model is not changed: the rules of a linear map see the weight and bias that it would have.
    Batch norms are those that follow a linear map in `model.modules()`, and are to have `pass_`, as
    in the composites.

    Args:
        model: A `torch.nn.Module`, whose batch norms are in the mode of evaluation.
        rules: A composite, or any map with rules of linear maps.

    Returns:
        The map, for `relevance` of this model.

    Raises:
        ArgumentError: a batch norm is not in the mode of evaluation, or follows a transposed
            convolution with groups.
        MissingPackageError: PyTorch is not installed.

    Source: zennit's `SequentialMergeBatchNorm`; Guillemot et al., "Breaking Batch Normalization for
    Better Explainability of Deep Neural Networks through Layer-wise Relevance Propagation" (2020).

    >>> import torch
    >>> from regrad.rules import lrp
    >>> net = torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.BatchNorm1d(2)).eval()
    >>> found = lrp.relevance(
    ...     net, torch.ones(1, 1, 3), lambda y: y[:, 0, 0], lrp.merge_norms(net, lrp.epsilon_plus())
    ... )
    >>> sorted({hit.rule for hit in found.used.hits})
    ['pass_', 'z_plus']
    """
    nn = needed("torch.nn", "torch", API)
    convolutions = [getattr(nn, f"Conv{t}{n}d") for t in ("", "Transpose") for n in (1, 2, 3)]
    linear, batch_norms = (
        (nn.Linear, *convolutions),
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    )
    leaves = [m for m in model.modules() if not [*m.children()]]
    norms = {id(a): b for a, b in pairwise(leaves) if isinstance(a, linear)}
    norms = {key: b for key, b in norms.items() if isinstance(b, batch_norms)}
    if any(b.training or b.running_mean is None for b in norms.values()):
        raise ArgumentError(
            "merge_norms: a batch norm uses the statistics of the batch; put the "
            "model in eval() first"
        )
    if any(getattr(m, "transposed", 0) and m.groups > 1 and id(m) in norms for m in leaves):
        raise ArgumentError("merge_norms: a transposed convolution with groups cannot be merged")

    def merged(rule: Any) -> Any:
        inner = rule.rule if isinstance(rule, Optional) else rule
        along = getattr(inner, "along", None)
        made = rule if along is None else _named(_merged(inner, along, norms), inner.__name__)
        return optional(made) if isinstance(rule, Optional) and made is not rule else made

    return {key: merged(rule) for key, rule in rules.items()}


def _merged(plain: Rule, along: Rule, norms: Mapping[int, Any]) -> Rule:
    """The rule of a linear map, of weights that are merged with the norm behind it, if one is."""

    def rule(dy: Any, y: Any, forward: Any, vjp_: Any, site: Any, x: Any, w: Any, bias: Any) -> Any:
        norm = norms.get(id(site.module))
        if norm is None:
            return along(dy, y, forward, vjp_, x, w, bias=bias)
        scale = (norm.running_var + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight
        shift = -norm.running_mean * scale + (0 if norm.bias is None else norm.bias)
        ones = [1] * (y.ndim - 2)  # (the channels of y are its axis 1, those of w its first or 1)
        merged = y * scale.reshape(-1, *ones) + shift.reshape(-1, *ones)
        w = w * scale.reshape(-1, *[1] * (w.ndim - 1 - getattr(site.module, "transposed", 0)))
        none = None if bias is None else bias * 0  # (a call without a bias has no place for one)
        bias = shift if bias is None else shift + bias * scale

        def shifted(x: Any, w: Any, bias: Any) -> Any:
            return forward(x, w, none) + bias.reshape(-1, *ones)

        return along(nonzero(y) * dy / nonzero(merged), merged, shifted, vjp_, x, w, bias=bias)

    return rule


EPSILON, GAMMA = epsilon, gamma  # (parameters have these names)


def relevance(
    model: Any,
    inputs: Any,
    target: Any,
    rules: Any = None,
    layers: Any = (),
    *,
    reference: Any = None,
    check: str | None = None,
) -> Any:
    """Return the relevance of the inputs of a model for one of its outputs.

    A PyTorch model is run once, under the rules, and is left as it was found: `.grad`, what
    requires grad, buffers, the random state and the mode of training. Call its `eval()` first: if
    a batch norm or a dropout runs in training mode, `relevance` raises ArgumentError. Products of
    float32 are computed in float32, without TF32.

    Of JAX it is any function of arrays: a module of NNX or Equinox, a bound one of Linen,
    `lambda x: net.apply(params, x)`. In its program the linear maps of one value, with their bias,
    are calls of `"lrp_dense"` and `"lrp_convolution"`, products of two values of `"lrp_matmul"` and
    `"lrp_mul"`: these are keys of the map, as in `attn_lrp(library="jax")`. The state that a
    `jax.lax.scan` begins with counts as a value, which takes its share, even if it is a constant.

    Args:
        model: A `torch.nn.Module`, or a function of JAX.
        inputs: Its argument; a tuple of them, or a dict of keyword arguments. Relevance comes to
            tensors of floats, and by the `nn.Embedding` that reads them to those of integers.
        target: Which output is explained: a class, a tensor of one for each example, or a function
            of what the model returns, for anything else. Its sum is differentiated.
        rules: A map of overrides, such as `epsilon_plus()`.
        layers: Paths of modules, or patterns of such as for `rg.at`, whose relevance is wanted as
            well; of one that returns a tuple, that of the first. In JAX they are paths in a model
            of Flax or Equinox: give that, and not a function that calls it.
        reference: For `deep_lift()`: what `inputs` are compared with, of the same shapes, or of one
            example. Inputs are then batches, and so is what the target reads: the batch is the
            first axis. The model runs for both in one batch, and for each apart to compare.
        check: `"ops"` to have the record say where relevance is lost. (A norm that is written out
            where no module is called so has no rule, and is seen here.)

    Returns:
        A `Relevance`: of the inputs, of the layers, the total that there was to share, and what is
        missing of it in the inputs.

    Raises:
        ArgumentError: an argument is of the wrong kind, no input is differentiated, a layer does
            not run once or returns no tensor, the target is not one of the outputs, a reference is
            missing, an op runs in training mode, or examples of one batch depend on each other.
        PassedOverError: an op would keep its own gradient, where a rule is for it.
        MissingPackageError: The library is not installed.

    >>> import torch
    >>> from regrad.rules import lrp
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.ReLU())
    >>> net[0].weight.data = torch.tensor([[1.0, 3.0], [0.0, -1.0]])
    >>> found = lrp.relevance(net, torch.ones(1, 2), 0, lrp.epsilon_plus(), ["0"])
    >>> found.inputs.round(), found.layers["0"].round(), found.total
    (tensor([[1., 3.]]), tensor([[4., 0.]]), tensor([4.]))
    """
    if check not in (None, "ops"):
        raise ArgumentError(f'relevance: check expected None or "ops", got {check!r:.40}')
    if check and reference is not None:
        raise ArgumentError('relevance: check="ops" is for runs without a reference')
    if not isinstance(rules, Mapping):
        call = f"{rules.__name__}()" if isfunction(rules) else "epsilon_plus() or {F.linear: rule}"
        raise ArgumentError(
            f"relevance takes a dict of op types to rules, such as {call}; got "
            f"{getattr(rules, '__name__', kind(rules))}"
        )
    pairs = (rescale, rescale_max, reveal_cancel)
    if reference is None and any(rule in pairs for rule in unmarked(spread(rules))[0].values()):
        raise ArgumentError(
            "relevance: the rules compare the inputs with a reference, as deep_lift() does. Give "
            "one: reference=zeros_like(inputs)"
        )
    torch = sys.modules.get("torch")
    given = (model, *flatten(inputs)[0])
    of_torch = torch and any(isinstance(x, torch.nn.Module | torch.Tensor) for x in given)
    if "jax" in sys.modules and callable(model) and not of_torch:
        from regrad.jax.relevance import explain as explain_function

        if any(getattr(key, "__module__", "").startswith("torch.") for key in rules):
            raise ArgumentError(
                "relevance: the model is a function of JAX, and the map has keys of PyTorch. "
                'Composites for JAX are made with library="jax"'
            )
        with sys.modules["jax"].default_matmul_precision("highest"):
            return explain_function(model, inputs, target, rules, layers, reference, check)
    needed("torch", "torch", API)
    from regrad.torch.relevance import explain

    return explain(model, inputs, target, rules, layers, reference, check)
