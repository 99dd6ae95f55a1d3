"""Torch functions with a bias: the names that rules may use for them, in particular the bias."""

from __future__ import annotations

import ast
from typing import Any

import torch.nn.functional as F

from regrad.core.call import OwnBias
from regrad.core.foreign import asks_for
from regrad.core.registry import Input, Op
from regrad.core.rule import EXTRAS
from regrad.torch.optypes import Family

_CONVOLUTION = "input weight bias stride=1 padding=0 dilation=1 groups=1"
_TRANSPOSED = "input weight bias stride=1 padding=0 output_padding=0 groups=1 dilation=1"
_STATISTICS = "input running_mean running_var weight bias"

# The parameters of torch's functions in torch's order; the ones in TENSORS are inputs.
PARAMETERS = {
    "linear": "input weight bias",
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _CONVOLUTION),
    **{f"conv_transpose{n}d": _TRANSPOSED for n in (1, 2, 3)},
    "batch_norm": f"{_STATISTICS} training=False momentum=0.1 eps=1e-05",
    "instance_norm": f"{_STATISTICS} use_input_stats=True momentum=0.1 eps=1e-05",
    "layer_norm": "input normalized_shape weight bias eps=1e-05",
    "group_norm": "input num_groups weight bias eps=1e-05",
}
# Products with a sum, which rules may treat as linear maps with a bias.
PRODUCTS = {"addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}
PARAMETERS |= {n: f"input {a} {b} beta=1 alpha=1" for n, (a, b) in PRODUCTS.items()}
TENSORS = (*sum(PRODUCTS.values(), ()), "input", "running_mean", "running_var", "weight", "bias")
SHORT = {"input": "x", "weight": "w"}  # short names that a rule may use too
# Names that the rule of any callable may use, regardless of the callable's parameters.
GENERAL = {
    "y",
    *(f"{n}{part}" for n in ("a", "b", "xs") for part in ("", "_shape", "_dtype")),
}


def family_for(value: Any, family: Family) -> Family:
    """Return a family of callables in the form for a rule, by the names that the rule uses."""
    asked, name = set(asks_for(value)), family.names[0]
    if name not in PARAMETERS:
        return family
    words = {n: default for n, _, default in (w.partition("=") for w in PARAMETERS[name].split())}
    short, known = {n: own for n, own in family.parameters if own}, {*words, *SHORT.values()}
    plain = {*family.op.names(), *EXTRAS} if short else {*EXTRAS, *GENERAL}
    if name in PRODUCTS:
        short = dict(zip((*PRODUCTS[name], "input"), ("x", "w", "bias"), strict=True))
        known = {*short.values()}
    if asked <= plain or not asked & known:
        return family
    short = {n: own for n, own in (short or SHORT).items() if family.parameters or own in asked}
    ours = {n: n if n in asked else short.get(n, n) for n in words}
    kinds = {n: "one" if n == "input" else "optional" for n in TENSORS if n in words}
    inputs = [Input(ours[n], kind) for n, kind in kinds.items()]
    attrs = {ours[n]: n for n in words if n not in kinds}
    defaults = {own: ast.literal_eval(words[n]) for own, n in attrs.items() if words[n]}
    op = Op(family.type, family.type, lambda xp, *xs: xs, inputs, [*attrs])
    op.rule = OwnBias()
    return Family(op, family.names, tuple(ours.items()), defaults)


def in_order_of(function: Any, family: Family) -> Family:
    """Return a family with its parameters in the order of one of its callables."""
    name = family.names[0]
    if name not in ("batch_norm", "instance_norm") or function is getattr(F, name):
        return family
    ours = dict(family.parameters)
    weights = [n for n in ("input", "weight", "bias") if n in ours]
    order = [*weights, *[n for n in ours if n not in weights]]
    return family._replace(parameters=tuple((n, ours[n]) for n in order))
