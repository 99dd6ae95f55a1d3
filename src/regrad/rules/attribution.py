"""Attribution: the shares of inputs, modules and heads in an output.

`attribute` computes gradients under any map of overrides. It multiplies them by the values, or by
the differences between the values and the values for a second input. The map is the method:

| method | map | by |
|---|---|---|
| attribution patching | `{}` | Nanda (2023); Kramár et al., AtP* (2024) |
| RelP, relevance patching | `lrp.cp_lrp()` | Jafari et al. (2025) |
| GIM | `gim()` | Edin et al. (2025) |
| AttnLRP | `lrp.attn_lrp()` | Achtibat et al. (2024) |

The gradient may be an average over a path: `integrated()`, `expected()`, `conductance()` and
`smoothed()`, under each of the maps. `attribute` has the formulas. `cam` draws class activation
maps. The composites are made of ordinary rules: `lrp.frozen_norm`, `rules.no_gradient` for a
softmax (attention patterns that are constants), `lrp.uniform` for products (half-gradients),
`tempered()`.

>>> import torch
>>> from regrad.rules import attribution
>>> net = torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), torch.nn.Tanh())
>>> x, other = torch.ones(1, 2), torch.zeros(1, 2)
>>> found = attribution.attribute(net, x, 0, {}, ["0"], reference=other)
>>> found.layers["0"].shape
torch.Size([1, 3])
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from regrad.core.backends import backend_of
from regrad.core.extras import needed
from regrad.core.scopes import optional
from regrad.errors import ArgumentError, brief
from regrad.errors import kind as kind_of
from regrad.rules.along import Path as Path
from regrad.rules.lrp_composites import _GATES, _own, attn_lrp
from regrad.rules.lrp_maps import _maker, _named, _positive
from regrad.rules.lrp_others import pass_
from regrad.rules.runs import for_each, library_of

API = "regrad.rules.attribution"


@_maker
def tempered(temperature: float = 2.0) -> Callable[..., Any]:
    """Return a rule for softmax: the gradient that it has at `x / temperature`.

    Args:
        temperature: A value above 1 passes more gradient where the softmax is saturated.

    Returns:
        A rule for a map of overrides. The factor of `1 / temperature` is left out, so that the
        gradient of a softmax of equal entries does not change.

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


def integrated(steps: int = 32) -> Path:
    """Return the path of integrated gradients, by Gauss and Legendre, for `attribute(…, along=)`.

    Under `{}`, the shares of the inputs sum to the difference of the two outputs, up to the error
    of the quadrature. Without a reference, the path begins at zeros.

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


def conductance(steps: int = 32) -> Path:
    """Return the path of layer conductance, for `attribute(…, along=)`.

    The share of a value is the sum of its gradients, each times the step that the value makes along
    the path of the inputs (by trapezoids). So the shares of a layer through which the whole output
    passes sum to the difference of the two outputs, and the shares of inputs are integrated
    gradients.

    Args:
        steps: The number of steps. Gradients are computed at `steps + 1` places.

    Returns:
        A `Path`.

    Raises:
        ArgumentError: steps is not an int above 0.

    Source: Dhamdhere, Sundararajan and Yan, "How Important Is a Neuron?" (2018); Captum's
    `LayerConductance`, which takes the gradient at the left end of each step.

    >>> from regrad.rules import attribution
    >>> attribution.conductance(2).places
    (0.0, 0.5, 1.0)
    """
    _count(steps, "conductance: expected steps, an int above 0")
    ends = (0.5 / steps, *(1 / steps,) * (steps - 1), 0.5 / steps)
    return Path(tuple(k / steps for k in range(steps + 1)), ends, conducts=True)


def expected(references: Any, samples: int = 16, seed: int = 0) -> Path:
    """Return the path of expected gradients: random places from random references.

    Each sample draws, for each example, one of the references and a place between that reference
    and the example. The share is the mean of the gradients, each times the difference from its
    reference. `total` is the output less the mean output for the references that were drawn.

    Args:
        references: Examples in the form of the inputs, any number of them along the batch axis.
        samples: The number of samples.
        seed: The seed. The random state of PyTorch is left as it was.

    Returns:
        A `Path`, for `attribute(…, along=)` without a `reference`.

    Raises:
        ArgumentError: samples is not an int above 0.

    Source: Erion, Janizek, Sturmfels, Lundberg and Lee, "Improving Performance of Deep Learning
    Models with Axiomatic Attribution Priors and Expected Gradients" (2021); Captum's
    `GradientShap`, with `stdevs=0`.

    >>> import torch
    >>> from regrad.rules import attribution
    >>> net, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
    >>> along = attribution.expected(torch.zeros(5, 2), 8)
    >>> found = attribution.attribute(net, x, 0, {}, along=along)
    >>> bool(torch.allclose(found.inputs, net.weight[0].expand(4, 2)))
    True
    """
    _count(samples, "expected: expected samples, an int above 0")
    return Path((), (1 / samples,) * samples, seed=seed, references=references)


def smoothed(samples: int = 16, noise: float = 0.1, seed: int = 0, statistic: str = "mean") -> Path:
    """Return the path of SmoothGrad: the input with noise, for `attribute(…, along=)`.

    Args:
        samples: How many gradients are averaged.
        noise: The standard deviation, as a share of the range of each input.
        seed: The seed. The random state of PyTorch is left as it was.
        statistic: `"mean"`; `"squares"` for the mean of the squares of the gradients, times the
            square of the value; or `"variance"` for the variance, times the same square. The shares
            then do not sum to the output.

    Returns:
        A `Path`.

    Raises:
        ArgumentError: samples is not an int above 0, noise is below 0, or statistic is not one of
            the three.

    Source: Smilkov, Thorat, Kim, Viégas and Wattenberg, "SmoothGrad: Removing Noise by Adding
    Noise" (2017), whose map is `gradients` of the answer; Hooker, Erhan, Kindermans and Kim, "A
    Benchmark for Interpretability Methods in Deep Neural Networks" (2019), for squares; Adebayo et
    al., "Sanity Checks for Saliency Maps" (2018), for the variance; Captum's `NoiseTunnel`.

    >>> from regrad.rules import attribution
    >>> attribution.smoothed(2, 0.1).places
    (1.0, 1.0)
    """
    _count(samples, "smoothed: expected samples to be an int above 0")
    if not noise >= 0:
        raise ArgumentError(f"smoothed: expected noise to be 0 or more, got {brief(noise)}")
    if statistic not in (known := ("mean", "squares", "variance")):
        raise ArgumentError(f"smoothed: statistic expected one of {known}, got {brief(statistic)}")
    return Path((1.0,) * samples, (1 / samples,) * samples, noise, seed, statistic)


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
    at: Any = (),
    through: Any = None,
    batch_axis: int = 0,
    create_graph: bool = False,
    batch: int = 1,
) -> Any:
    """Return the shares that inputs, modules and heads of a model have in an output.

    A share is the gradient under the rules, times the value, or times the difference between the
    value and its value for a second input. To patch in the second value changes the output by about
    the negative. The model is left as it was found, as by `lrp.relevance`.

    The output is `f`, the inputs are `x`, the reference is `z`, and `h` is the output of the module
    `"h"`. The places `p` lie between `z` and `x`, and `Δh` is the step of `h` at a place.

    ==========================  =====================  ======================================
    method                      options                formula
    ==========================  =====================  ======================================
    input × gradient                                   `inputs = (x - z) · df/dx`
    integrated gradients        `along=integrated()`   `inputs = (x - z) · mean df/dx(p)`
    internal influence          `along=integrated()`   `layer_gradients = mean df/dh(p)`
    layer conductance           `along=conductance()`  `layers = sum df/dh(p) · Δh(p)`
    neuron conductance          `along=integrated()`,  `inputs =`
                                `through=("h", i)`     `(x - z) · mean df/dhᵢ(p) · dhᵢ/dx(p)`
    layer integrated gradients  `along=integrated()`,  `layers = (h(x) - h(z)) · mean df/dh`,
                                `at="h"`               at places between `h(z)` and `h(x)`
    expected gradients          `along=expected(zs)`   `inputs = mean (x - z) · df/dx(p)`
    ==========================  =====================  ======================================

    Args:
        model: A `torch.nn.Module`, or a function of JAX, as for `lrp.relevance`.
        inputs: Its argument; a tuple of them, or a dict of keyword arguments. Token ids count by
            the `nn.Embedding` that reads them, and a sparse matrix by its entries.
        target: Which output: a class, a tensor of one for each example, or a function of the
            model's result (`lambda y: y.logits[:, -1, 3]`). Its sum is differentiated. For a list
            of targets, every array of the answer has the targets as its first axis.
        rules: A map of overrides: `gim()`, `lrp.cp_lrp()`, `{}` for the plain gradient.
        layers: Paths of modules, or patterns of paths as for `rg.at`, whose outputs count. Of a
            tuple, the first entry counts.
        heads: A dict from paths or patterns of modules that are called with the outputs of heads
            side by side (`"model.layers.*.self_attn.o_proj"`) to the number of heads. For PyTorch.
        reference: The second input, in the form and shape of `inputs`. With a list of references,
            the answer is the mean over the references.
        along: A path over which gradients are averaged: `integrated()`, `expected()`,
            `conductance()`, `smoothed()`. None is the gradient at `inputs`.
        at: Paths of modules at whose outputs the path runs, in place of the inputs, which keep
            their values. The answer has their shares in `layers`, and no `inputs`. With token ids,
            name the module that embeds them.
        through: The path of a module and an index into its output without the batch, as in
            `("conv1", (3, 0, 0))`. Gradients pass this unit only.
        batch_axis: The axis of the examples in the inputs.
        create_graph: Whether the results have a history in PyTorch, as for `lrp.relevance`.
        batch: How many places of the path run in one batch, which repeats the examples. The target
            then has one number for each example. With `expected()`, each sample runs alone.

    Returns:
        An `Attribution`: `inputs`, `layers` and `heads` (of shape `(…, heads)`), `total` (the
        output, or the difference of the two), `missing` (the total less the shares of the inputs,
        or with `at` of its modules), `gradients` by the inputs, `layer_gradients`, `layer_values`,
        and `used`, the scope of overrides with its `untouched()`.

    Raises:
        ArgumentError: an argument is of the wrong kind or shape, no input is differentiated, a
            module does not run once or has no tensor, the heads do not divide the width, the
            target is not one of the outputs, an op runs in training mode, the output is random, or
            examples in a batch depend on each other.
        GradientError: with `create_graph`, a sparse matrix depends on the inputs.
        PassedOverError: an op would keep its own gradient, where a rule is for it.
        MissingPackageError: PyTorch is not installed.

    Source: Nanda, "Attribution Patching" (2023); Jafari, Eberle, Khakzar and Nanda, "RelP: Faithful
    and Efficient Circuit Discovery in Language Models via Relevance Patching" (2025); Edin et al.
    (2025), as for `gim`. Leino et al., "Influence-Directed Explanations for Deep Convolutional
    Networks" (2018), for internal influence; Dhamdhere et al. (2018) for conductance; Captum's
    `InternalInfluence`, `LayerIntegratedGradients`, `LayerConductance`, `NeuronConductance` and
    `GradientShap`.

    >>> import torch
    >>> from regrad.rules import attribution
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    >>> given = net, torch.ones(1, 2), 0, {}
    >>> found = attribution.attribute(*given, heads={"2": 2}, along=attribution.integrated())
    >>> found.heads["2"].shape, bool(abs(found.missing).max() < 1e-5)
    (torch.Size([1, 2]), True)
    >>> found = attribution.attribute(*given, at="1", along=attribution.integrated())
    >>> found.layers["1"].shape, bool(abs(found.missing).max() < 1e-5)
    (torch.Size([1, 4]), True)
    """
    if along is not None and not isinstance(along, Path):
        raise ArgumentError(
            f"attribute: along expected a Path such as integrated(), got {kind_of(along)}"
        )
    _count(batch, "attribute: batch expected an int above 0")
    along = along and along._replace(
        batch=1 if along.references is not None else max(batch, along.batch)
    )
    if along and along.references is not None and reference is not None:
        raise ArgumentError(
            "attribute: expected() has the references; got another one by reference="
        )
    if at and through:
        raise ArgumentError("attribute: give at or through, got both")
    given = (
        model, inputs, rules, layers, heads, along, at, through, batch_axis, create_graph
    )  # fmt: skip
    if library_of(model, inputs) == "jax":
        from regrad.jax.attributing import attributed as attributed_function

        with sys.modules["jax"].default_matmul_precision("highest"):
            return for_each(partial(attributed_function, *given), target, reference)
    needed("torch", "torch", API)
    from regrad.torch.attributing import attributed

    return for_each(partial(attributed, *given), target, reference)


def cam(
    model: Any,
    inputs: Any,
    target: Any,
    layer: Any,
    kind: str = "grad",
    *,
    rules: Any = None,
    size: tuple[int, int] | None = None,
    reshape: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a class activation map: where in the image the output of a layer counts.

    With `a` the output of the layer and `g` the gradient that arrives there:

    ===========  ===============================================================  ===========
    kind         map                                                              method
    ===========  ===============================================================  ===========
    `"grad"`     `relu(sum_c a_c · mean_hw(g_c))`                                 Grad-CAM
    `"++"`       `relu(sum_c a_c · sum_hw(relu(g_c) / (2 + g_c · sum_hw(a_c))))`  Grad-CAM++
    `"layer"`    `relu(sum_c a_c · relu(g_c))`                                    LayerCAM
    `"hires"`    `relu(sum_c a_c · g_c)`                                          HiResCAM
    `"x"`        `relu(sum_c a_c · sum_hw(a_c · g_c) / sum_hw(a_c))`              XGrad-CAM
    `"element"`  `sum_c relu(a_c · g_c)`                                          elementwise
    ===========  ===============================================================  ===========

    Args:
        model: A model, as for `attribute`.
        inputs: Its argument, as for `attribute`. The batch is the first axis.
        target: Which output, as for `attribute`. For a list, the maps are stacked.
        layer: The path of a module whose output has the shape `(batch, channels, H, W)`, usually
            the last one before pooling.
        kind: One of the six kinds.
        rules: A map of overrides. None is the plain gradient.
        size: The height and width to which the maps are resized, linearly. None leaves the maps in
            the size of the layer.
        reshape: Returns the output of the layer, and its gradient, in that shape: for tokens of a
            vision transformer, or for JAX `lambda a: a.transpose(0, 3, 1, 2)`.

    Returns:
        The maps, of shape `(batch, H, W)`. They are not normalized, and not below 0.

    Raises:
        ArgumentError: kind is not one of the six, layer is not one module, or its output does not
            have four axes; and the errors of `attribute`.

    Source: Selvaraju et al., "Grad-CAM" (2017), which has guided Grad-CAM too: a map times the
    gradients under `lrp.guided()`; Chattopadhay, Sarkar, Howlader and Balasubramanian,
    "Grad-CAM++" (2018), equation 19; Jiang, Zhang, Hou, Cheng and Wei, "LayerCAM" (2021); Draelos
    and Carin, "HiResCAM" (2020); Fu et al., "Axiom-based Grad-CAM" (2020), for XGrad-CAM; Captum's
    `LayerGradCam` and the package `grad-cam`.

    >>> import torch
    >>> from regrad.rules import attribution, lrp
    >>> convolution, pool = torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1)
    >>> net = torch.nn.Sequential(convolution, torch.nn.ReLU(), pool, torch.nn.Flatten())
    >>> x = torch.ones(2, 3, 8, 8)
    >>> heat = attribution.cam(net, x, 1, "1", size=(8, 8))
    >>> guided = heat[:, None] * attribution.attribute(net, x, 1, lrp.guided()).gradients
    >>> heat.shape, guided.shape
    (torch.Size([2, 8, 8]), torch.Size([2, 3, 8, 8]))
    """
    if kind not in _CAMS:
        raise ArgumentError(f"cam: kind expected one of {[*_CAMS]}, got {brief(kind)}")
    if isinstance(target, list):
        options = {"rules": rules, "size": size, "reshape": reshape}
        maps = [cam(model, inputs, each, layer, kind, **options) for each in target]
        return backend_of(maps[0]).xp.stack(maps)
    found = attribute(model, inputs, target, rules or {}, [layer])
    if len(found.layers) != 1:
        raise ArgumentError(f"cam: layer expected one module, got {[*found.layers]}")
    (a,), (g,) = found.layer_values.values(), found.layer_gradients.values()
    a, g = (a, g) if reshape is None else (reshape(a), reshape(g))
    if a.ndim != 4:
        raise ArgumentError(
            f"cam: the output of {layer!r} has the shape {tuple(a.shape)}, expected (batch, "
            "channels, H, W). Name a convolutional layer, or give reshape="
        )
    maps = _positive((a * _CAMS[kind](a, g)).sum(1))
    return maps if size is None else _resized(maps, size)


def _sum_hw(v: Any) -> Any:
    return v.sum((2, 3), keepdims=True)


def _plus_plus(a: Any, g: Any) -> Any:
    return _sum_hw(_over(_positive(g), 2 + g * _sum_hw(a)))  # (g² cancels in equation 19)


def _over(a: Any, b: Any) -> Any:
    """Return a quotient, and 0 where the divisor is 0."""
    xp = backend_of(a).xp
    return xp.where(b == 0, 0 * a, a / xp.where(b == 0, 1, b))


_CAMS: dict[str, Callable[[Any, Any], Any]] = {
    "grad": lambda a, g: _sum_hw(g) / (g.shape[2] * g.shape[3]),
    "++": _plus_plus,
    "layer": lambda a, g: _positive(g),
    "hires": lambda a, g: g,
    "x": lambda a, g: _over(_sum_hw(a * g), _sum_hw(a)),
    "element": lambda a, g: g * (a * g > 0),
}


def _resized(maps: Any, size: tuple[int, int]) -> Any:
    """Return maps resized linearly, with pixels as areas."""
    if hasattr(maps, "new_tensor"):
        resize = needed("torch.nn.functional", "torch", API).interpolate
        return resize(maps[:, None], tuple(size), mode="bilinear")[:, 0]
    image = needed("jax.image", "jax", API)
    return image.resize(maps, (len(maps), *size), "linear", antialias=False)
