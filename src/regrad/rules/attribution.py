"""Attribution in transformers: the contributions of inputs, modules and heads to an output.

`attribute` computes gradients under any map of overrides, and multiplies them by values, or by the
differences between these values and the values of a second input. The map defines the method:

| method | map | by |
|---|---|---|
| attribution patching | `{}` | Nanda (2023); Kramár et al., AtP* (2024) |
| RelP, relevance patching | `lrp.cp_lrp()` | Jafari et al. (2025) |
| GIM | `gim()` | Edin et al. (2025) |
| AttnLRP | `lrp.attn_lrp()` | Achtibat et al. (2024) |

The gradient may be an average over a path: `integrated()` and `smoothed()` work with each of the
maps. The maps consist of ordinary rules: `lrp.frozen_norm`, `rules.no_gradient` for a softmax
(attention patterns as constants), `lrp.uniform` for products (half-gradients), `tempered()`.

>>> import torch
>>> from regrad.rules import attribution
>>> net = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.Tanh())
>>> x, other = torch.ones(1, 2), torch.zeros(1, 2)
>>> found = attribution.attribute(net, x, 0, {}, ["0"], reference=other)
>>> found.layers["0"].shape
torch.Size([1, 3])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from regrad.core.extras import needed
from regrad.core.scopes import optional
from regrad.errors import ArgumentError, brief
from regrad.rules.lrp_composites import _GATES, _own, attn_lrp
from regrad.rules.lrp_maps import _maker, _named
from regrad.rules.lrp_others import pass_

API = "regrad.rules.attribution"


@_maker
def tempered(temperature: float = 2.0) -> Callable[..., Any]:
    """Return a rule for softmax: the gradient that it has at `x / temperature`.

    Args:
        temperature: A value above 1 passes more gradient where the softmax is saturated.

    Returns:
        A rule for a map of overrides. The rule leaves out the factor `1 / temperature`, so the
        gradient of a softmax of equal entries is unchanged.

    Raises:
        ArgumentError: The temperature is not above 0.

    Source: Edin et al., "GIM: Improved Interpretability for Large Language Models" (2025),
    temperature-adjusted gradients.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Softmax": rg.rules.attribution.tempered(4.0)}):
    ...     dx = rg.grad(lambda x: rg.nn.softmax(x)[0])(rg.tensor([8.0, 0.0]))
    >>> print(f"{dx[0].item():.3f}")
    0.105
    """
    if not temperature > 0:
        raise ArgumentError(f"tempered: expected a temperature above 0, got {brief(temperature)}")

    def rule(dy: Any, x: Any, axis: Any, forward: Any) -> Any:
        p = forward(x / temperature)
        return p * (dy - (p * dy).sum(axis, keepdims=True))

    return _named(rule, "tempered")


def gim(temperature: float = 2.0) -> dict[Any, Any]:
    """Return the composite of GIM, gradient interaction modifications, for transformers.

    Softmax has its `tempered` gradient, products of two values are shared in halves (so queries and
    keys get a quarter), and the scale of a norm is a constant. All other ops keep their gradients,
    including activations.

    Args:
        temperature: The temperature of `tempered`.

    Returns:
        A map of overrides for PyTorch, for `attribute`, which sets `requires_grad` of parameters to
        False.

    Raises:
        ArgumentError: The temperature is not above 0.
        MissingPackageError: PyTorch is not installed.

    Source: Edin, Csordás, Ruotsalo, Wu, Maistro, Huang and Maaløe, "GIM: Improved Interpretability
    for Large Language Models" (2025), and its package `gim-explain`, which finds layer norms, RMS
    norms, `scaled_dot_product_attention`, softmax and the gates of some MLPs by name.

    >>> from regrad.rules import attribution
    >>> attribution.gim()["Softmax"].rule.__name__
    'tempered'
    """
    rms_norm = needed("torch.nn.functional", "torch", API).rms_norm
    kept = {k: r for k, r in attn_lrp().items() if r.rule is not pass_ or k is rms_norm}
    return {**kept, _GATES: optional(_own), "Softmax": optional(tempered(temperature))}


class Path(NamedTuple):
    """Weighted points between a reference (0) and the input (1) at which gradients are computed.

    Args:
        places: The points.
        weights: The weight of each gradient.
        noise: The standard deviation of Gaussian noise, as a fraction of the range of each input.
        seed: The seed of the noise.

    >>> from regrad.rules.attribution import Path
    >>> middle = Path(places=(0.5,), weights=(1.0,))
    >>> middle.noise
    0.0
    """

    places: tuple[float, ...]
    weights: tuple[float, ...]
    noise: float = 0.0
    seed: int = 0


def integrated(steps: int = 32) -> Path:
    """Return the path of integrated gradients, by Gauss and Legendre, for `attribute(…, along=)`.

    Under `{}`, the contributions of the inputs sum to the difference of the two outputs, up to the
    error of the numerical integration. Without a reference, the path starts at zeros.

    Args:
        steps: The number of points at which gradients are computed.

    Returns:
        A `Path`.

    Raises:
        ArgumentError: `steps` is not an int above 0.

    Source: Sundararajan, Taly and Yan, "Axiomatic Attribution for Deep Networks" (2017); for
    modules, with the path at the inputs, Hanna, Pezzelle and Belinkov, "Have Faith in Faithfulness"
    (2024); Captum's `IntegratedGradients`.

    >>> from regrad.rules import attribution
    >>> [round(t, 4) for t in attribution.integrated(2).places]
    [0.2113, 0.7887]
    """
    _count(steps, "integrated: expected steps to be an int above 0")
    places, weights = np.polynomial.legendre.leggauss(steps)
    return Path(tuple((places / 2 + 0.5).tolist()), tuple((weights / 2).tolist()))


def smoothed(samples: int = 16, noise: float = 0.1, seed: int = 0) -> Path:
    """Return the path of SmoothGrad: the input plus noise, for `attribute(…, along=)`.

    Args:
        samples: The number of gradients that are averaged.
        noise: The standard deviation, as a fraction of the range of each input.
        seed: The seed. PyTorch's random state is unchanged.

    Returns:
        A `Path`.

    Raises:
        ArgumentError: `samples` is not an int above 0, or `noise` is below 0.

    Source: Smilkov, Thorat, Kim, Viégas and Wattenberg, "SmoothGrad: Removing Noise by Adding
    Noise" (2017), whose sensitivity map is `gradients` of the result; Captum's `NoiseTunnel`.

    >>> from regrad.rules import attribution
    >>> attribution.smoothed(2, 0.1)
    Path(places=(1.0, 1.0), weights=(0.5, 0.5), noise=0.1, seed=0)
    """
    _count(samples, "smoothed: expected samples to be an int above 0")
    if not noise >= 0:
        raise ArgumentError(f"smoothed: expected noise to be 0 or more, got {brief(noise)}")
    return Path((1.0,) * samples, (1 / samples,) * samples, noise, seed)


def _count(n: Any, words: str) -> None:
    if type(n) is not int or n < 1:
        raise ArgumentError(f"{words}, got {brief(n)}")


def attribute(
    model: Any,
    inputs: Any,
    target: Any,
    rules: Any,
    layers: Any = (),
    *,
    heads: Any = None,
    reference: Any = None,
    along: Path | None = None,
) -> Any:
    """Return the contributions of inputs, modules and heads of a PyTorch model to an output.

    A contribution is the gradient under the rules, times the value, or times the difference between
    the value and its value for a second input. Patching in the second input's value changes the
    output by about the negative contribution. The model is left unchanged, as by `lrp.relevance`.

    Args:
        model: A `torch.nn.Module`.
        inputs: The model's argument, a tuple of arguments, or a dict of keyword arguments. The
            contribution of token ids is computed at the `nn.Embedding` that reads them.
        target: Selects an output: a class, a tensor with one class per example, or a function of
            the model's result. `attribute` differentiates the sum of the selected outputs.
        rules: A map of overrides: `gim()`, `lrp.cp_lrp()`, `{}` for the plain gradient.
        layers: Paths of modules, or patterns as in `rg.at`, whose outputs get contributions. If an
            output is a tuple, its first entry is used.
        heads: A dict from paths or patterns of modules to the number of heads. Each module takes
            the concatenated outputs of the heads (`"model.layers.*.self_attn.o_proj"`).
        reference: The second input, in the same form and shape as `inputs`.
        along: A path over which gradients are averaged: `integrated()`, `smoothed()`. With None,
            the gradient is computed at `inputs`.

    Returns:
        An `Attribution`: `inputs`, `layers` and `heads` (of shape `(…, heads)`), `total` (the
        output, or the difference of the two outputs), `missing` (the part of `total` that the
        inputs do not account for), the `gradients` by the inputs, and `used`, the scope of
        overrides with its `untouched()`.

    Raises:
        ArgumentError: An argument has the wrong kind or shape, no input can be differentiated, a
            module does not run exactly once or returns no tensor, the number of heads does not
            divide the width, or the target is not one of the outputs.
        PassedOverError: An op would keep its own gradient although a rule matches it.
        MissingPackageError: PyTorch is not installed.

    Source: Nanda, "Attribution Patching" (2023); Jafari, Eberle, Khakzar and Nanda, "RelP: Faithful
    and Efficient Circuit Discovery in Language Models via Relevance Patching" (2025); Edin et al.
    (2025), as for `gim`.

    >>> import torch
    >>> from regrad.rules import attribution
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    >>> given = net, torch.ones(1, 2), 0, {}
    >>> found = attribution.attribute(*given, heads={"2": 2}, along=attribution.integrated())
    >>> found.heads["2"].shape, bool(abs(found.missing).max() < 1e-5)
    (torch.Size([1, 2]), True)
    """
    needed("torch", "torch", API)
    from regrad.torch.attributing import attributed

    return attributed(model, inputs, target, rules, layers, heads, reference, along)
