"""Layer-wise relevance propagation: rules, composites, and `relevance`, which runs them.

The relevance of a value is the value times its gradient, `x · dx`. At the output of an op it is
`y · dy`, so a relevance rule is an ordinary gradient rule. (lxt works the same way. In zennit,
gradients are relevances, so sums and pools need their own rules.) An op of degree 1 in all of its
inputs together (a sum, a concatenation, a pooling, a ReLU) conserves relevance by its own gradient,
and needs no rule. Rules replace a value of 0 by 1e-19, so that it can have relevance; `relevance`
does the same.

Rules of linear maps take the output as an argument. If a model changes that output in place
(`nn.ReLU(inplace=True)`), PyTorch raises an error in the backward pass, except in `relevance`.
Rules can be differentiated by the incoming gradient. The derivative of a relevance by the input is
also computed from the rules.

A composite is a map of rules, for `regrad.torch.gradient_override_map` or `relevance`. It is a
dict: `{**lrp.epsilon_plus(), rg.at("head", F.linear): lrp.gamma()}`. Keys that match nothing in a
model cause no error. With `library="jax"` a composite is for `relevance` of a JAX function. There,
a composite recognizes a norm or an activation that is composed of smaller ops by the name of its
module class, or by the name of its `jax.named_scope`. Without such a name it has no rule, and
`check="ops"` reports its loss of relevance.

>>> import torch
>>> from regrad.rules import lrp
>>> net = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.ReLU())
>>> found = lrp.relevance(net, torch.ones(1, 3), 0, lrp.epsilon_plus())
>>> bool(abs(found.missing).max() < 1e-5)
True
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from inspect import isfunction
from itertools import pairwise
from typing import Any

from regrad.core.extras import needed
from regrad.core.foreign import nonzero
from regrad.core.places import spread
from regrad.core.scopes import Optional, optional, unmarked
from regrad.errors import ArgumentError, kind
from regrad.rules.lrp_composites import attn_lrp as attn_lrp
from regrad.rules.lrp_composites import cp_lrp as cp_lrp
from regrad.rules.lrp_composites import deep_lift as deep_lift
from regrad.rules.lrp_composites import epsilon_alpha2_beta1 as epsilon_alpha2_beta1
from regrad.rules.lrp_composites import epsilon_alpha2_beta1_flat as epsilon_alpha2_beta1_flat
from regrad.rules.lrp_composites import epsilon_gamma_box as epsilon_gamma_box
from regrad.rules.lrp_composites import epsilon_plus as epsilon_plus
from regrad.rules.lrp_composites import epsilon_plus_flat as epsilon_plus_flat
from regrad.rules.lrp_composites import excitation as excitation
from regrad.rules.lrp_composites import guided as guided
from regrad.rules.lrp_lines import mean_gradient as mean_gradient
from regrad.rules.lrp_maps import API, Rule, _named
from regrad.rules.lrp_maps import alpha_beta as alpha_beta
from regrad.rules.lrp_maps import epsilon as epsilon
from regrad.rules.lrp_maps import flat as flat
from regrad.rules.lrp_maps import gamma as gamma
from regrad.rules.lrp_maps import w_square as w_square
from regrad.rules.lrp_maps import z_box as z_box
from regrad.rules.lrp_maps import z_plus as z_plus
from regrad.rules.lrp_others import beta_smooth as beta_smooth
from regrad.rules.lrp_others import frozen_norm as frozen_norm
from regrad.rules.lrp_others import pass_ as pass_
from regrad.rules.lrp_others import rescale as rescale
from regrad.rules.lrp_others import rescale_greater as rescale_greater
from regrad.rules.lrp_others import rescale_max as rescale_max
from regrad.rules.lrp_others import rescale_rrelu as rescale_rrelu
from regrad.rules.lrp_others import reveal_cancel as reveal_cancel
from regrad.rules.lrp_others import uniform as uniform
from regrad.rules.runs import PAIRED, for_each, library_of


def merge_norms(model: Any, rules: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a map in which each linear map is merged with the batch norm behind it.

    The model is not changed: the rules of a linear map use the merged weight and bias. Batch norms
    count if they follow a linear map in `model.modules()`. They must have the rule `pass_`, as in
    the composites.

    Args:
        model: A `torch.nn.Module`, whose batch norms are in evaluation mode.
        rules: A composite, or any map with rules of linear maps.

    Returns:
        The map, for `relevance` of this model.

    Raises:
        ArgumentError: A batch norm is not in evaluation mode, or follows a transposed convolution
            with groups.
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
            "merge_norms: a batch norm uses the statistics of the batch; call model.eval() first"
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
    """The rule of a linear map, on weights merged with the batch norm behind it, if any."""

    def rule(dy: Any, y: Any, forward: Any, vjp_: Any, site: Any, x: Any, w: Any, bias: Any) -> Any:
        norm = norms.get(id(site.module))
        if norm is None:
            return along(dy, y, forward, vjp_, x, w, bias=bias)
        scale = (norm.running_var + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight
        shift = -norm.running_mean * scale + (0 if norm.bias is None else norm.bias)
        # (The channels of y are on axis 1, the channels of w on its first axis or on axis 1.)
        ones = [1] * (y.ndim - 2)
        merged = y * scale.reshape(-1, *ones) + shift.reshape(-1, *ones)
        w = w * scale.reshape(-1, *[1] * (w.ndim - 1 - getattr(site.module, "transposed", 0)))
        # (A call without a bias has no argument for one.)
        none = None if bias is None else bias * 0
        bias = shift if bias is None else shift + bias * scale

        def shifted(x: Any, w: Any, bias: Any) -> Any:
            return forward(x, w, none) + bias.reshape(-1, *ones)

        return along(nonzero(y) * dy / nonzero(merged), merged, shifted, vjp_, x, w, bias=bias)

    return rule


def relevance(
    model: Any,
    inputs: Any,
    target: Any,
    rules: Any = None,
    layers: Any = (),
    *,
    reference: Any = None,
    check: str | None = None,
    batch_axis: int = 0,
    create_graph: bool = False,
) -> Any:
    """Return the relevance of the inputs of a model for one of its outputs.

    A PyTorch model is run once under the rules and is left unchanged: `.grad`, `requires_grad`,
    buffers, the random state and the training mode stay the same. Call its `eval()` first: if a
    batch norm or a dropout runs in training mode, `relevance` raises ArgumentError. Products of
    float32 are computed in float32, without TF32.

    A JAX model is any function of arrays: a module of NNX or Equinox, a bound module of Linen,
    `lambda x: net.apply(params, x)`. In its program, linear maps of one value, with their bias, are
    calls of `"lrp_dense"` and `"lrp_convolution"`, and products of two values are calls of
    `"lrp_matmul"` and `"lrp_mul"`: these are keys of the map, as in `attn_lrp(library="jax")`. The
    initial carry of a `jax.lax.scan` counts as a value and takes its share, even if it is a
    constant.

    Args:
        model: A `torch.nn.Module`, or a function of JAX.
        inputs: The model's argument, a tuple of arguments, or a dict of keyword arguments. Float
            tensors get relevance; a sparse matrix gets it at its entries, as a sparse matrix.
            Integer tensors get relevance at the `nn.Embedding` that reads them.
        target: Selects the output to explain: a class, a tensor with one class per example, or, for
            any other output, a function of the model's result (`lambda y: y.logits[:, -1, 3]`).
            `relevance` differentiates the sum of the selected outputs. For a list of targets, every
            array of the result has the targets as its first axis.
        rules: A map of overrides, such as `epsilon_plus()`.
        layers: Paths of modules, or patterns as in `rg.at`, whose relevance is returned as well.
            For a module that returns a tuple, it is the relevance of the first entry. In JAX, these
            are paths in a model of Flax or Equinox: pass the model itself, and not a function that
            calls it.
        reference: For `deep_lift()`: the values to compare `inputs` with, of the same shapes, or of
            one example. The model runs on both in one batch, and on each one separately to compare.
            The batch must be the first axis of the outputs that the target reads, and of the ops
            that have rules of pairs. With a list of references, the result is the mean over the
            references (DeepLiftSHAP).
        check: `"ops"` to report which ops lose relevance. (This also shows a norm that has no rule
            because it is composed of smaller ops outside of a module with a norm's name.)
        batch_axis: The axis of the examples in the inputs, by which `total` and `missing` are
            reported for each example. (In JAX, it is 0 with a reference.)
        create_graph: Whether the results have a history in PyTorch, so that a loss can contain
            them. Gradients of the loss by inputs and parameters are the derivatives of the
            relevance that the rules compute. In JAX, differentiate a function that calls
            `relevance`.

    Returns:
        A `Relevance`: the relevance of the inputs and of the layers, the total relevance to share,
        and the part of it that the inputs did not get.

    Raises:
        ArgumentError: An argument has the wrong kind, no input can be differentiated, a layer does
            not run exactly once or returns no tensor, the target is not one of the outputs, a
            reference is missing, an op runs in training mode, the output is random, examples of
            one batch depend on each other, or the batch is not where a rule reads it.
        GradientError: With `create_graph`, a sparse matrix depends on the inputs.
        PassedOverError: An op would keep its own gradient although a rule matches it.
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
        raise ArgumentError(f'relevance: expected check to be None or "ops", got {check!r:.40}')
    if check and reference is not None:
        raise ArgumentError('relevance: check="ops" is for runs without a reference')
    if not isinstance(rules, Mapping):
        call = f"{rules.__name__}()" if isfunction(rules) else "epsilon_plus() or {F.linear: rule}"
        raise ArgumentError(
            f"relevance takes a dict of op types to rules, such as {call}; got "
            f"{getattr(rules, '__name__', kind(rules))}"
        )
    every = unmarked(spread(rules))[0].values()
    if reference is None and any(getattr(r, "__name__", "") in PAIRED for r in every):
        raise ArgumentError(
            "relevance: the rules compare the inputs with a reference, as deep_lift() does. Pass "
            "one: reference=zeros_like(inputs)"
        )
    if check and isinstance(target, list):
        raise ArgumentError('relevance: check="ops" is for one target, got a list of targets')
    if library_of(model, inputs) == "jax":
        from regrad.jax.relevance import explain as explain_function

        if any(getattr(key, "__module__", "").startswith("torch.") for key in rules):
            raise ArgumentError(
                "relevance: the model is a JAX function, and the map has keys of PyTorch. Make "
                'composites for JAX with library="jax"'
            )
        if create_graph:
            raise ArgumentError(
                "relevance: create_graph is for PyTorch. In JAX, differentiate a function that "
                "calls relevance: jax.grad(lambda x: relevance(f, x, …).inputs.sum())"
            )
        given = model, inputs, rules, layers, check, batch_axis
        with sys.modules["jax"].default_matmul_precision("highest"):
            return for_each(partial(explain_function, *given), target, reference)
    needed("torch", "torch", API)
    from regrad.torch.relevance import explain

    given = model, inputs, rules, layers, check, batch_axis, create_graph
    return for_each(partial(explain, *given), target, reference)
