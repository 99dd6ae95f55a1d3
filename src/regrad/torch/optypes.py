"""Which torch callables an op type covers, in every spelling.

A family is an op type, the names that torch has for it, and how torch calls the parameters. A
name is looked up wherever torch keeps functions (`torch`, `Tensor`, `torch.nn.functional`, …),
also with the underscore of the in-place variant and as the method behind an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.overrides

from regrad.registry import OPS, Input, Op, canonical

# op type: names in torch. One tensor, called `input`; other parameters have no name in the op.
UNARY = {
    "Abs": "abs absolute", "Acos": "acos arccos", "Acosh": "acosh arccosh",
    "Asin": "asin arcsin", "Asinh": "asinh arcsinh", "Atan": "atan arctan",
    "Atanh": "atanh arctanh", "Ceil": "ceil", "Cholesky": "cholesky", "Conj": "conj",
    "Cos": "cos", "Cosh": "cosh", "Digamma": "digamma psi", "Elu": "elu", "Erf": "erf",
    "Erfc": "erfc", "Erfinv": "erfinv", "Exp": "exp", "Expm1": "expm1", "Floor": "floor",
    "Lgamma": "lgamma gammaln", "Log": "log", "Log10": "log10", "Log1p": "log1p", "Log2": "log2",
    "LogSigmoid": "logsigmoid log_sigmoid", "MatrixInverse": "inverse inv", "Neg": "neg negative",
    "Reciprocal": "reciprocal", "Relu": "relu", "Relu6": "relu6", "Round": "round",
    "Rsqrt": "rsqrt", "Selu": "selu", "Sigmoid": "sigmoid expit", "Sign": "sign sgn",
    "Silu": "silu", "Sin": "sin", "Sinh": "sinh", "Softplus": "softplus", "Softsign": "softsign",
    "Sqrt": "sqrt", "Square": "square", "Tan": "tan", "Tanh": "tanh", "Trunc": "trunc fix",
    "Identity": "clone alias",
}  # fmt: skip

# op type: names in torch. Two tensors, `input` and `other`; either may be a number.
BINARY = {
    "AddV2": "add", "Atan2": "atan2 arctan2", "Hypot": "hypot", "LogAddExp": "logaddexp",
    "MatMul": "matmul mm bmm mv dot", "Maximum": "maximum fmax", "Minimum": "minimum fmin",
    "Mul": "mul multiply", "Pow": "pow", "RealDiv": "div divide true_divide",
    "Sub": "sub subtract", "FloorMod": "remainder",
}  # fmt: skip

# op type: names in torch, and their parameters in order, as `torch's name=the op's name`.
OTHERS = {
    "Softmax": ("softmax", "input=x dim=axis"),
    "LogSoftmax": ("log_softmax", "input=x dim=axis"),
    "Gelu": ("gelu", "input=x approximate=approximate"),
    "LeakyRelu": ("leaky_relu", "input=x negative_slope=alpha"),
    "ClipByValue": ("clamp clip", "input=x min=min max=max"),
    "Prelu": ("prelu", "input=x weight=alpha"),
    "Step": ("heaviside", "input=x values=alpha"),
    "Sum": ("sum", "input=x dim=axis keepdim=keepdims"),
    "Mean": ("mean", "input=x dim=axis keepdim=keepdims"),
    "Prod": ("prod", "input=x dim=axis keepdim=keepdims"),
    "Max": ("amax", "input=x dim=axis keepdim=keepdims"),
    "Min": ("amin", "input=x dim=axis keepdim=keepdims"),
    "Cumsum": ("cumsum", "input=x dim=axis"),
    "Cumprod": ("cumprod", "input=x dim=axis"),
    "SelectV2": ("where", "condition=condition input=a other=b"),
    "Conv2D": ("conv2d", "input=x weight=w bias stride=strides padding=pad dilation=dilations"),
    "Conv3D": ("conv3d", "input=x weight=w bias stride=strides padding=pad dilation=dilations"),
    "MaxPool": ("max_pool2d", "input=x kernel_size=filter_size stride=strides padding=pad"),
    "MaxPool3D": ("max_pool3d", "input=x kernel_size=filter_size stride=strides padding=pad"),
    "AvgPool": ("avg_pool2d", "input=x kernel_size=filter_size stride=strides padding=pad"),
    "AvgPool3D": ("avg_pool3d", "input=x kernel_size=filter_size stride=strides padding=pad"),
    "Reshape": ("reshape view", "input=x"),
    "ConcatV2": ("cat concat concatenate", "tensors=xs dim=axis"),
    "Pack": ("stack", "tensors=xs dim=axis"),
}  # fmt: skip

# Operators whose method is not called like the function (`x + y` arrives as Tensor.add).
DUNDERS = {"add": "add", "sub": "sub", "mul": "mul", "div": "div truediv", "matmul": "matmul",
           "pow": "pow", "neg": "neg", "abs": "abs", "remainder": "mod"}  # fmt: skip

# What else torch calls the same parameter.
SYNONYMS = {"self": "input", "axis": "dim", "exponent": "other", "mat2": "other", "vec": "other",
            "vec2": "other", "tensor": "other", "divisor": "other", "a_min": "min", "a_max": "max",
            "A": "input", "keepdims": "keepdim", "x": "input"}  # fmt: skip

PLACES: tuple[Any, ...] = (
    torch, torch.Tensor, F, torch._C._nn, torch.special, torch.linalg, torch.ops.aten,
)  # fmt: skip


class Family(NamedTuple):
    """An op type as torch spells it."""

    op: Op
    names: tuple[str, ...]
    parameters: tuple[tuple[str, str | None], ...]  # (torch's name, the op's name), in order

    @property
    def type(self) -> str:
        """The op type."""
        return self.op.type


class Spelling(NamedTuple):
    """One torch callable of a family, and what computes it out of place."""

    family: Family
    function: Callable[..., Any]  # never in place
    in_place: bool = False


@cache
def families() -> Mapping[str, Family]:
    """The op types that torch has, by type."""
    rows = [(t, names, "input=x") for t, names in UNARY.items()]
    rows += [(t, names, "input=a other=b") for t, names in BINARY.items()]
    rows += [(t, names, parameters) for t, (names, parameters) in OTHERS.items()]
    return {t: Family(OPS[t], tuple(n.split()), _parameters(p)) for t, n, p in rows}


def _parameters(text: str) -> tuple[tuple[str, str | None], ...]:
    pairs = [word.partition("=") for word in text.split()]
    return tuple((ours, theirs or None) for ours, _, theirs in pairs)


@cache
def spellings() -> Mapping[Any, Spelling]:
    """Every torch callable that a family covers."""
    found: dict[Any, Spelling] = {}
    for family in families().values():
        for function, spelling in spellings_of(family):
            found.setdefault(function, spelling)
    return found


def spellings_of(family: Family) -> Iterator[tuple[Any, Spelling]]:
    """Every torch callable of a family."""
    for name in family.names:
        for place in PLACES:
            function = getattr(place, name, None)
            if not callable(function):
                continue
            for each in (function, *_overloads(function)):
                yield each, Spelling(family, each)
            yield from _changing(family, name, place, function)
    if family.type in BINARY or family.type in UNARY:
        yield from _operators(family)


def _changing(
    family: Family, name: str, place: Any, function: Any
) -> Iterator[tuple[Any, Spelling]]:
    changing = getattr(place, f"{name}_", None)
    for each in (changing, *_overloads(changing)) if callable(changing) else ():
        yield each, Spelling(family, function, in_place=True)


def _overloads(packet: Any) -> list[Any]:
    """The overloads of a `torch.ops.aten` function."""
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, name) for name in packet.overloads()]


def _operators(family: Family) -> Iterator[tuple[Any, Spelling]]:
    for name in family.names:
        for word in DUNDERS.get(name, "").split():
            plain = getattr(torch.Tensor, name)
            for dunder, in_place in ((f"__{word}__", False), (f"__i{word}__", True)):
                if function := getattr(torch.Tensor, dunder, None):
                    yield function, Spelling(family, plain, in_place)


def alone(function: Any) -> Family:
    """A torch callable that belongs to no op type, as a family of its own: all of its name."""
    full = torch.overrides.resolve_name(function) or function.__name__
    name = full.rpartition(".")[2]
    return Family(Op(full, name, lambda xp, *xs: xs, [Input("xs", "many")]), (name,), ())


def find_family(op_type: str) -> Family | None:
    """The family of an op type, if torch has it."""
    return families().get(canonical(op_type))


# Which backward nodes of torch's autograd belong to an op type: the same name, but for these.
NODES = {
    "AddV2": "Add", "RealDiv": "Div", "LogSigmoid": "LogSigmoid", "Gelu": "Gelu",
    "LeakyRelu": "LeakyRelu", "ClipByValue": "Clamp ClampMin ClampMax", "Relu6": "Hardtanh",
    "Max": "Amax", "Min": "Amin", "SelectV2": "Where", "Conv2D": "Convolution",
    "Conv3D": "Convolution", "MaxPool": "MaxPool2DWithIndices MaxPool2D",
    "MaxPool3D": "MaxPool3DWithIndices", "AvgPool": "AvgPool2D", "AvgPool3D": "AvgPool3D",
    "MatMul": "Mm Bmm Mv Dot Addmm Baddbmm Addbmm Addmv Linear",
    "ConcatV2": "Cat", "Pack": "Stack", "Identity": "Clone Alias", "Reshape": "View ReshapeAlias",
    "Softmax": "Softmax ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention "
               "ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention "
               "ScaledDotProductFusedAttentionOverrideable",
    "Sigmoid": "Sigmoid MkldnnRnnLayer ThnnFusedLstmCell ThnnFusedGruCell CudnnRnn",
    "Tanh": "Tanh MkldnnRnnLayer ThnnFusedLstmCell ThnnFusedGruCell CudnnRnn",
    "Step": "Heaviside", "Selu": "Elu", "Sign": "Sign Sgn", "Lgamma": "Lgamma",
    "Square": "Pow", "MatrixInverse": "LinalgInvEx", "Cholesky": "Cholesky LinalgCholeskyEx",
    "Silu": "Silu", "Softsign": "Div", "FloorMod": "Remainder", "Hypot": "Hypot",
    "Log10": "Log10", "Maximum": "Maximum Fmax", "Minimum": "Minimum Fmin",
}  # fmt: skip


def nodes_of(op_type: str) -> list[str]:
    """The names of an op type's backward nodes, without their numbers."""
    return [f"{name}Backward" for name in NODES.get(op_type, op_type).split()]
