"""Relevance rules for linear maps: how the relevance is shared among a value's elements."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, reduce
from itertools import islice
from math import inf
from operator import add, mul
from typing import Any, NamedTuple, ParamSpec

from regrad.core.foreign import nonzero
from regrad.core.made import remade
from regrad.core.registry import OPS
from regrad.core.signatures import helpful
from regrad.errors import ArgumentError, RuleError, brief

P = ParamSpec("P")
Rule = Callable[..., Any]
Part = Callable[[Any], Any]
ABSENT: Any = object()
API = "regrad.rules.lrp"


def _maker(make: Callable[P, Rule]) -> Callable[P, Rule]:
    """Return a function that makes rules which can be pickled."""
    return remade(helpful(make.__name__)(make))


def _named(rule: Any, name: str) -> Any:
    rule.__name__ = rule.__qualname__ = name
    return rule


# -- numbers of any library ------------------------------------------------------------------------


def _stable(z: Any, by: float) -> Any:
    """Return an array moved away from 0 by this amount."""
    if (number := getattr(z, "new_tensor", None)) is not None:  # (PyTorch's new_tensor; two passes)
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


# The ops of libraries that are linear in their first input, with the second as the weight.
LINEAR = frozenset({
    "MatMul", "Mul", "Einsum", "Conv2D", "Conv3D", "DepthwiseConv2dNative",
    "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput",
    "torch.nn.functional.linear", "torch.nn.functional.conv1d", "torch.addmm", "torch.baddbmm",
    *[f"torch.nn.functional.conv_transpose{n}d" for n in (1, 2, 3)],
    "torch.functional.einsum", "torch.functional.tensordot", "torch.outer", "torch.kron",
    "dot_general", "conv_general_dilated", "mul", "dot", "matmul", "einsum", "tensordot", "outer",
})  # fmt: skip
# The ops that select elements of their input.
SELECTING = frozenset({
    "MaxPool", "MaxPool3D", "Max", "reduce_window_max", "reduce_max",
    *[f"torch.nn.functional.{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)],
})  # fmt: skip


def _refuses(fits: bool, name: str, what: str, op: Any) -> None:
    """Raise for an op when a scope opens."""
    if not fits:
        raise RuleError(
            f"lrp.{name} is for {what}, and the op type {op.type!r} is not. For other ops, use "
            "lrp.epsilon(), lrp.pass_ for elementwise ops, or rules.vjp_of(function)."
        )


def _check(fits: bool, name: str, what: str) -> None:
    """Raise for an op that a rule does not fit, when it runs; the error's note names the op."""
    if not fits:
        raise RuleError(
            f"lrp.{name} is for {what}. Put it on an op of this kind, or use "
            "rules.vjp_of(function) for this one"
        )


def _check_dense(what: str, instead: str, *values: Any) -> None:
    """Raise for a sparse tensor of PyTorch."""
    for layout in [str(getattr(v, "layout", "")) for v in values]:
        if "sparse" in layout:
            raise RuleError(f"{what} is a sparse matrix ({layout}). Use {instead}")


def _check_linear(name: str, op: Any) -> None:
    inputs = {entry.name for entry in op.inputs}
    of_jax = [sys.modules.get(f"jax.{part}") for part in ("lax", "numpy", "nn")]
    known = any(hasattr(module, n) for module in of_jax for n in (op.type, f"{op.type}_p"))
    # (other op types are the user's)
    known = known or op.type in OPS or op.type.startswith("torch.")
    fits = (op.type in LINEAR or not known) and (inputs >= {"x", "w"} or inputs >= {"a", "b"})
    what = (
        "a linear map of a value and its weight (F.linear, a convolution, 'MatMul', torch.addmm; "
        "'lrp_dense', 'lrp_convolution' in relevance of a JAX function; for one module "
        "rg.at(module, F.linear); a function of x and w)"
    )
    _refuses(fits, name, what, op)


def _check_selecting(op: Any) -> None:
    _refuses(op.type in SELECTING, "rescale_max", "a max pool ('MaxPool', F.max_pool2d)", op)


class _Share(NamedTuple):
    """A linear map of a changed input, weight and bias, along which relevance is propagated."""

    x: Part
    w: Part
    bias: Part | None = None  # None without a bias


class _Group(NamedTuple):
    """Maps that share relevance in proportion to their contributions to their sum."""

    shares: tuple[_Share, ...]
    factor: Part | None = None  # factor of their relevance, by the output; None means 1


def _along(name: str, groups: tuple[_Group, ...], stabilizer: float) -> Rule:
    """Return the rule that propagates the relevance of a linear map along other linear maps.

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
        _check_dense(
            f"{name}: the rule changes the entries of both factors, and one",
            "lrp.epsilon() for this product, or a dense matrix", x, w,
        )  # fmt: skip
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

    For linear maps (`F.linear`, `Conv2D`, …), and for any op of degree 1, for example sums. It
    conserves all relevance except for the shares of the bias and of `epsilon`.

    Args:
        epsilon: Added to the magnitude of the output; above 0. A large value drops small shares.

    Returns:
        A rule `(dy, y, builtin)` for a map of overrides.

    Raises:
        ArgumentError: `epsilon` is not above 0.

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
        _check(not isinstance(y, list | tuple), "epsilon", "an op with one result")
        _check_dense("epsilon: the rule divides by the result, which", "a dense factor", y)
        return builtin(nonzero(y) * dy / _stable(y, epsilon))

    rule.along = _along("epsilon", (_Group((_Share(_same, _same, _same),)),), epsilon)  # pyright: ignore
    return _named(rule, "epsilon")


@_maker
def gamma(gamma: float = 0.25, stabilizer: float = 1e-6) -> Rule:
    """Return the γ-rule: contributions with the sign of the output count `1 + gamma` times.

    For linear maps; in a product `a @ b`, b is the weight. It conserves all relevance except for
    the bias.

    Args:
        gamma: The additional weight of these contributions.
        stabilizer: Added to denominators to avoid division by zero.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: `stabilizer` is not above 0, or `gamma` is below 0.

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
    """Return the z⁺-rule: relevance is shared among positive contributions.

    For linear maps; in a product `a @ b`, b is the weight. It conserves all relevance except for
    the bias. Outputs without positive contributions lose their relevance.

    Args:
        stabilizer: Added to denominators to avoid division by zero.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: `stabilizer` is not above 0.

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
    """Return the αβ-rule: `alpha` times positive, minus `beta` times negative contributions.

    For linear maps; in a product `a @ b`, b is the weight. It conserves all relevance except for
    the bias, if there are both positive and negative contributions.

    Args:
        alpha: The factor of positive contributions.
        beta: The factor of negative contributions, `alpha - 1`.
        stabilizer: Added to denominators to avoid division by zero.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: `alpha - beta` is not 1, one is below 0, or `stabilizer` is not above 0.

    Source: Bach et al. (2015), as for `epsilon`; zennit's `AlphaBeta`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"MatMul": rg.rules.lrp.alpha_beta(2.0, 1.0)}):
    ...     dx = rg.grad(lambda x: rg.sum(x @ rg.tensor([[3.0], [-1.0]])))(rg.ones((1, 2)))
    >>> dx.round().tolist()
    [[4.0, -2.0]]
    """
    if alpha < 0 or beta < 0 or alpha - beta != 1:
        raise ArgumentError(
            f"alpha_beta: expected alpha - beta = 1, both 0 or more, got {alpha} and {beta}"
        )
    groups = _Group(_SIGNS_AGREE, lambda y: alpha), _Group(_SIGNS_DIFFER, lambda y: -beta)
    return _along("alpha_beta", groups if beta else groups[:1], stabilizer)


@_maker
def z_box(low: Any, high: Any, stabilizer: float = 1e-6) -> Rule:
    """Return the z^B-rule: relevance by the distance from the bounds of the input.

    For the linear map that takes the input, for example pixels. It conserves all relevance except
    for the bias.

    Args:
        low: The lower bound of the input: a number, or an array that broadcasts to the input, for
            example with one entry per channel.
        high: The upper bound of the input.
        stabilizer: Added to denominators to avoid division by zero.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: A bound does not broadcast, `low` is above `high`, or `stabilizer` is not
            above 0.

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
    """Return the w²-rule: relevance by the squares of the weights, for any input.

    For the linear map that takes an input without bounds. It conserves all relevance except for the
    bias.

    Args:
        stabilizer: Added to denominators to avoid division by zero.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: `stabilizer` is not above 0.

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

    For the linear map that takes the input. It conserves all relevance, including the bias's.

    Args:
        stabilizer: Added to denominators to avoid division by zero.

    Returns:
        A rule for a map of overrides.

    Raises:
        ArgumentError: `stabilizer` is not above 0.

    Source: Lapuschkin et al., "Unmasking Clever Hans Predictors and Assessing What Machines Really
    Learn" (2019); zennit's `Flat`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"MatMul": rg.rules.lrp.flat()}):
    ...     dx = rg.grad(lambda x: rg.sum(x @ rg.tensor([[3.0], [1.0]])))(rg.ones((1, 2)))
    >>> dx.round().tolist()
    [[2.0, 2.0]]
    """
    return _along("flat", (_Group((_Share(_ones, _ones),)),), stabilizer)
