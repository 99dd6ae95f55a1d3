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
from regrad.rules.lrp_others import rescale_max as rescale_max
from regrad.rules.lrp_others import reveal_cancel as reveal_cancel
from regrad.rules.lrp_others import uniform as uniform
from regrad.rules.runs import for_each, library_of


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
            of the model's result, for anything else (`lambda y: y.logits[:, -1, 3]`). Its sum
            is differentiated. For a list of targets, every array of the answer has the targets as
            its first axis.
        rules: A map of overrides, such as `epsilon_plus()`.
        layers: Paths of modules, or patterns of such as for `rg.at`, whose relevance is wanted as
            well; of one that returns a tuple, that of the first. In JAX they are paths in a model
            of Flax or Equinox: give that, and not a function that calls it.
        reference: For `deep_lift()`: what `inputs` are compared with, of the same shapes, or of one
            example. Inputs are then batches, and so is what the target reads: the batch is the
            first axis. The model runs for both in one batch, and for each apart to compare. With
            a list of references, the answer is the mean over the references (DeepLiftSHAP).
        check: `"ops"` to have the record say where relevance is lost. (A norm that is written out
            where no module is called so has no rule, and is seen here.)
        batch_axis: The axis of the examples in the inputs, by which `total` and `missing` are
            reported for each example.
        create_graph: Whether the results have a history in PyTorch, so that a loss can contain
            them. Gradients of the loss by inputs and parameters are the derivatives of the
            relevance that the rules compute. In JAX, differentiate a function that calls
            `relevance`.

    Returns:
        A `Relevance`: of the inputs, of the layers, the total that there was to share, and what is
        missing of it in the inputs.

    Raises:
        ArgumentError: an argument is of the wrong kind, no input is differentiated, a layer does
            not run once or returns no tensor, the target is not one of the outputs, a reference is
            missing, an op runs in training mode, the output is random, or examples of one batch
            depend on each other.
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
    if check and isinstance(target, list):
        raise ArgumentError('relevance: check="ops" is for one target, got a list of targets')
    if library_of(model, inputs) == "jax":
        from regrad.jax.relevance import explain as explain_function

        if any(getattr(key, "__module__", "").startswith("torch.") for key in rules):
            raise ArgumentError(
                "relevance: the model is a function of JAX, and the map has keys of PyTorch. "
                'Composites for JAX are made with library="jax"'
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
