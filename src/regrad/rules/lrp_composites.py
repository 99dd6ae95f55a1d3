"""Composites: maps of relevance rules for whole networks, for PyTorch and JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from regrad.core.extras import needed
from regrad.core.places import at
from regrad.core.rule import no_gradient
from regrad.core.scopes import optional
from regrad.errors import ArgumentError, brief
from regrad.rules.lrp_lines import mean_gradient
from regrad.rules.lrp_maps import API, Rule, alpha_beta, epsilon, flat, gamma, z_box, z_plus
from regrad.rules.lrp_others import (
    frozen_norm,
    pass_,
    rescale,
    rescale_greater,
    rescale_max,
    rescale_rrelu,
    uniform,
)
from regrad.rules.saliency import guided_relu

EPSILON, GAMMA = epsilon, gamma  # (parameters have the names of the rules)

# (PReLU has two inputs, and propagates relevance by its own gradient.)
ACTIVATIONS = (
    "Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Gelu", "Silu", "Softplus", "Softsign", "Tanh",
)  # fmt: skip

# The names by which `relevance` calls linear maps of one value and products of two in JAX.
MAPS = ("lrp_dense", "lrp_convolution", "lrp_matmul", "lrp_mul")


# Further elementwise ops with one input, which DeepLift rescales, and ops that it averages.
CURVES = (
    "Sigmoid", "LogSigmoid", "Exp", "Expm1", "Log", "Log1p", "Rsqrt", "Erf", "Sin", "Cos", "Abs",
    "ClipByValue",
)  # fmt: skip
MIXING = ("Softmax", "LogSoftmax", "RealDiv", "Pow", "Prod", "Sqrt")


class _Keys(NamedTuple):
    """The keys of a library for which composites have rules."""

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
    """Return whether the name of the running module's class contains one of these words.

    (If the class of a Flax module is unknown because `model=` is missing, use its path.)
    """
    known = getattr(site.module_class, "__name__", None) or site.path.rpartition(".")[2]
    return any(word in known.lower() for word in words)


def _in_norm(site: Any) -> bool:
    return _is_called(site, "norm")


def _in_shifted_norm(site: Any) -> bool:
    return _is_called(site, "batchnorm", "groupnorm", "instancenorm")


def _in_activation(site: Any) -> bool:
    return _is_called(site, "gelu", "silu", "swish", "mish", "activation")


# The gates of an activation that is composed as `x * gate(x)`. If the gate is a constant and the
# product has its own gradient, the relevance is unchanged: x · dx = x · dy · gate(x) = y · dy.
_GATES = at(_in_activation, ("Tanh", "Sigmoid", "Erf"))


def _own(dy: Any, builtin: Any) -> Any:
    return builtin(dy)


def _all_optional(rules: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: optional(rule) for key, rule in rules.items()}


def _others(keys: _Keys) -> dict[Any, Any]:
    """Return the rules of everything except linear layers: activations, norms, products."""
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
    """Return the map of rules of all ops, and of the first linear map that runs."""
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
        epsilon: The epsilon of `lrp.epsilon`.
        stabilizer: The stabilizer of `lrp.z_plus`.
        library: `"torch"`, or `"jax"` for `relevance` of a JAX function.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: A number is not above 0, or the library is unknown.
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
        epsilon: The epsilon of `lrp.epsilon`.
        stabilizer: The stabilizer of the other rules.
        library: `"torch"`, or `"jax"` for `relevance` of a JAX function.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: A number is not above 0, or the library is unknown.
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
        low: The lower bound of the input, as for `lrp.z_box`.
        high: The upper bound of the input.
        epsilon: The epsilon of `lrp.epsilon`.
        gamma: The gamma of `lrp.gamma`.
        stabilizer: The stabilizer of the other rules.
        library: `"torch"`, or `"jax"` for `relevance` of a JAX function.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: `low` is above `high`, a number is not above 0, or the library is unknown.
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
        epsilon: The epsilon of `lrp.epsilon`.
        stabilizer: The stabilizer of `lrp.alpha_beta`.
        library: `"torch"`, or `"jax"` for `relevance` of a JAX function.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: A number is not above 0, or the library is unknown.
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
        epsilon: The epsilon of `lrp.epsilon`.
        stabilizer: The stabilizer of the other rules.
        library: `"torch"`, or `"jax"` for `relevance` of a JAX function.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: A number is not above 0, or the library is unknown.
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
        stabilizer: The stabilizer of `lrp.z_plus`.
        library: `"torch"`, or `"jax"` for `relevance` of a JAX function.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: The stabilizer is not above 0, or the library is unknown.
        MissingPackageError: The library is not installed.

    Source: Zhang, Lin, Brandt, Shen and Sclaroff, "Top-Down Neural Attention by Excitation
    Backprop" (2016); zennit's `ExcitationBackprop`.

    >>> from regrad.rules import lrp
    >>> lrp.excitation()["Conv2D"].rule.__name__
    'z_plus'
    """
    return _composite(library, z_plus(stabilizer), z_plus(stabilizer))


def guided() -> dict[Any, Any]:
    """Return the composite of guided backpropagation. It does not conserve relevance.

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
    """Return the composite for transformers that keeps the gradients of linear layers and softmax.

    Products of two values are shared in halves, activations pass relevance through, and the scale
    of a norm is a constant. The last rule also holds for a norm that is composed of smaller ops, if
    its module is named a norm. The gradient of a softmax is the rule that the paper derives for it
    by a Taylor expansion. This rule does not conserve relevance, because a softmax is not of degree
    1 (`cp_lrp` conserves it). An activation composed as `x * gate(x)` passes relevance through if
    its module is named an activation (`NewGELUActivation`); otherwise it counts as a product.

    Args:
        library: `"torch"`, or `"jax"` for `relevance` of a JAX function.

    Returns:
        A map of overrides for the library, for `relevance`, which sets `requires_grad` of
        parameters to False.

    Raises:
        ArgumentError: The library is unknown.
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
    }  # ("MatMul" matches PyTorch's ops)


def cp_lrp(library: str = "torch") -> dict[Any, Any]:
    """Return the composite for transformers in which attention is a constant.

    Like `attn_lrp`, except that all relevance of an attended value goes to the value, and none to
    the softmax. It conserves all relevance except for biases.

    Args:
        library: `"torch"`, or `"jax"` for `relevance` of a JAX function.

    Returns:
        A map of overrides for the library, for `relevance`, which sets `requires_grad` of
        parameters to False.

    Raises:
        ArgumentError: The library is unknown.
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

    Activations and other elementwise functions of one value are rescaled, also in maxima of two
    values; max pools share the differences of their outputs. Norms, softmax, products and quotients
    of two values, powers and gated activations have the average of their gradients from the
    reference to the input. Linear layers, sums and average pools need no rule. Attention
    (`F.scaled_dot_product_attention`) counts as its two products and its softmax, and `nn.LSTM` and
    `nn.GRU` as the products and activations of their formulas. In JAX, a norm is the ops that it is
    composed of. An op without a rule (`torch.where` with a condition that differs, `torch.amin`, a
    sort) has its own gradient, and `relevance` reports the difference as `missing`.

    Args:
        library: `"torch"`, or `"jax"` for `relevance` of a JAX function.

    Returns:
        A map of overrides for the library.

    Raises:
        ArgumentError: The library is unknown.
        MissingPackageError: The library is not installed.

    Source: Shrikumar et al. (2017), as for `rescale`; Captum's `DeepLift`.

    >>> from regrad.rules import lrp
    >>> lrp.deep_lift()["Relu"].rule.__name__
    'rescale'
    """
    keys = _keys(library)
    if library == "jax":
        nn = needed("jax.nn", "jax", API)
        curves = ("square", "integer_pow")
        others: dict[Any, Any] = {nn.logsumexp: mean_gradient(), "Mul": mean_gradient(2)}
    else:
        torch = needed("torch", "torch", API)
        F, norm = torch.nn.functional, torch.linalg.vector_norm
        curves = ("Square", "Reciprocal", "Prelu")
        mixing = (
            *keys.norms, F.glu, F.cosine_similarity, torch.logsumexp, norm, torch.norm, torch.var,
            torch.std, torch.addcmul, torch.addcdiv, torch.lerp,
        )  # fmt: skip
        others = dict.fromkeys(mixing, mean_gradient()) | {F.rrelu: rescale_rrelu}
        del others[F.batch_norm]  # (in evaluation mode it is linear)
    return _all_optional({
        **dict.fromkeys((*keys.activations, *CURVES, *curves), rescale),
        **dict.fromkeys((*keys.pools, "Max"), rescale_max),
        **dict.fromkeys(("Maximum", "Minimum"), rescale_greater),
        **dict.fromkeys(MIXING, mean_gradient()), **others,
        **dict.fromkeys((keys.matmul, keys.mul), mean_gradient(2)),
    })  # fmt: skip
