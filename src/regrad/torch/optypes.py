"""The torch callables that an op type covers, in every spelling.

A family is an op type, torch's names for it, and torch's names for its parameters. regrad looks up
each name wherever torch keeps functions (`torch`, `Tensor`, `torch.nn.functional`, …), also with
the underscore of the in-place variant and as the method of an operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType, MethodWrapperType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
import torch.overrides

from regrad.core.registry import OPS, Input, NoGradient, Op, canonical
from regrad.errors import UnknownOpError
from regrad.torch.host import NATIVE, saved_by
from regrad.torch.host.running import Packet

Cached = TypeVar("Cached", bound=Callable[..., Any])

# op type: more names that torch has for an elementwise op, besides the op's name and its op type.
# (`families` finds these two; this table and the next are for names that it cannot find.)
SYNONYMS_OF = {
    "Abs": "absolute", "Acos": "arccos", "Acosh": "arccosh", "Asin": "arcsin", "Asinh": "arcsinh",
    "Atan": "arctan", "Atan2": "arctan2", "Atanh": "arctanh", "Conj": "conj_physical",
    "Digamma": "psi", "Identity": "clone alias", "Lgamma": "gammaln", "LogSigmoid": "log_sigmoid",
    "Maximum": "fmax", "Minimum": "fmin", "RealDiv": "div true_divide", "Sigmoid": "expit",
    "Sign": "sgn", "Trunc": "fix",
}  # fmt: skip

# Elementwise ops whose functions torch does not differentiate, or implements as views.
APART = {"FloorDiv", "Imag", "NextAfter", "Real"}

# Torch's names for the parameters of elementwise ops, by their number.
INPUTS = {1: "input=x", 2: "input=a other=b"}

# op type: names in torch, and their parameters in order, as `torch's name=the op's name`.
OTHERS = {
    "Cholesky": ("cholesky", "input=x"),
    "MatrixInverse": ("inverse inv", "input=x"),
    "MatrixExponential": ("matrix_exp", "input=x"),
    "NanToNum": ("nan_to_num", "input=x nan=nan posinf=posinf neginf=neginf"),
    "MatMul": ("matmul mm bmm mv dot", "input=a other=b"),
    "Softmax": ("softmax _softmax _safe_softmax", "input=x dim=axis"),
    "LogSoftmax": ("log_softmax _log_softmax", "input=x dim=axis"),
    "Elu": ("elu", "input=x alpha"),
    "Gelu": ("gelu", "input=x approximate=approximate"),
    "Round": ("round", "input=x decimals"),
    "Softplus": ("softplus", "input=x beta threshold"),
    "LeakyRelu": ("leaky_relu", "input=x negative_slope=alpha"),
    "ClipByValue": ("clamp clip", "input=x min=min max=max"),
    "Prelu": ("prelu _prelu_kernel", "input=x weight=alpha"),
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

# Operators whose method has another name than the function (`x + y` dispatches as Tensor.add).
DUNDERS = {"add": "add", "sub": "sub", "mul": "mul", "div": "div truediv", "matmul": "matmul",
           "pow": "pow", "neg": "neg", "abs": "abs", "remainder": "mod"}  # fmt: skip

# The same functions with swapped tensors, which `2 - x` and `2 / x` call.
REVERSED = {"Sub": "rsub", "RealDiv": "__rtruediv__"}

# Methods with another order of parameters than the function: `x.where(condition, y)`.
METHODS = {"SelectV2": "input=a condition=condition other=b"}

# Ops whose images have another layout than torch's, so that their own rules do not fit.
CHANNELS_LAST = ("Conv2D", "Conv3D", "MaxPool", "MaxPool3D", "AvgPool", "AvgPool3D")

# The values of attributes that a call omits, if they differ from the op's own defaults.
DEFAULTS: dict[str, dict[str, Any]] = {
    "LeakyRelu": {"alpha": 0.01}, "ConcatV2": {"axis": 0}, "Pack": {"axis": 0},
    "Cumsum": {"exclusive": False, "reverse": False},
    "Cumprod": {"exclusive": False, "reverse": False},
    "Conv2D": {"strides": 1, "pad": 0, "dilations": 1},
    "Conv3D": {"strides": 1, "pad": 0, "dilations": 1},
    **{t: {"strides": None, "pad": 0} for t in CHANNELS_LAST[2:]},
}  # fmt: skip

# Parameters of torch that the op does not have, with their defaults.
LACKS: dict[str, dict[str, Any]] = {
    "Elu": {"alpha": 1}, "Round": {"decimals": 0}, "Softplus": {"beta": 1, "threshold": 20},
}  # fmt: skip

# Conversions from torch's parameter to the op's attribute, if the two differ.
MEANS: dict[str, Callable[[Any], Any]] = {"approximate": lambda value: value == "tanh"}

# Other names in torch for the same parameter.
SYNONYMS = {"self": "input", "axis": "dim", "exponent": "other", "mat2": "other", "vec": "other",
            "vec2": "other", "tensor": "other", "divisor": "other", "a_min": "min", "a_max": "max",
            "A": "input", "keepdims": "keepdim", "x": "input", "x1": "input", "x2": "other",
            "a": "input"}  # fmt: skip

FUNCTIONS: tuple[Any, ...] = (torch, F, torch.special)  # modules with functions of tensors
PLACES: tuple[Any, ...] = (
    torch, torch.Tensor, F, NATIVE[0],
    torch.special, torch.linalg, torch.fft, torch.ops.aten,
)  # fmt: skip


class Family(NamedTuple):
    """An op type with torch's names for it."""

    op: Op
    names: tuple[str, ...]
    parameters: tuple[tuple[str, str | None], ...]  # (torch's name, the op's name), in order
    defaults: Mapping[str, Any] = MappingProxyType({})  # of attributes

    @property
    def type(self) -> str:
        """The op type."""
        return self.op.type

    def attributes(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the op's attributes, from the arguments of a call."""
        if not self.op.attrs:
            return {}
        said = {name: MEANS[name](v) if name in MEANS else v for name, v in given.items()}
        return {**_defaults(self.type), **self.defaults, **said}


class Spelling(NamedTuple):
    """One torch callable of a family, and its out-of-place variant."""

    family: Family
    function: Callable[..., Any]  # never in place
    in_place: bool = False
    switch: int | None = None  # the position of the parameter `inplace`, if there is one

    def out_of_place(
        self, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> tuple[bool, tuple[Any, ...], dict[str, Any]]:
        """Return whether a call is in place, and its arguments without the `inplace` flag."""
        named = {k: v for k, v in options.items() if k != "inplace"} if options else {}
        if self.switch is None or len(args) <= self.switch:
            return self.in_place or bool(options.get("inplace")), args, named
        return bool(args[self.switch]), args[: self.switch], named


@cache
def _defaults(op_type: str) -> dict[str, Any]:
    op = OPS.get(op_type)
    if op is None or not op.attrs:
        return {}
    known = inspect.signature(op.function).parameters
    own = {n: known[n].default for n in op.attrs if known[n].default is not inspect.Parameter.empty}
    return {**own, **DEFAULTS.get(op_type, {})}


_FOLLOWING: list[Any] = []


def following(function: Cached) -> Cached:
    """Cache a function of the registered op types, until a new op type appears."""
    cached: Any = cache(function)
    _FOLLOWING.append(cached)
    return cached


def clear() -> None:
    """Clear all caches that depend on the registered op types."""
    for cached in _FOLLOWING:
        cached.cache_clear()


def step(input: torch.Tensor, at_zero: float = 0.0) -> torch.Tensor:
    """Return 1 where the input is above 0, `at_zero` where it is 0, and 0 elsewhere.

    It is the one callable of the op type "Threshold" (see `thresholds`).
    """
    above = input > 0 if at_zero == 0 else input >= 0
    return above.to(input.dtype)


def _threshold() -> Family:
    op = Op("Threshold", "threshold", step, OPS["Step"].inputs)
    op.rule = OPS["Step"].rule
    return Family(op, ("step",), (("input", "x"), ("at_zero", None)))


THRESHOLD = _threshold()
# The functions that compare: the sign of `input - other` where the result is true, and the value of
# the step where the two inputs are equal.
COMPARISONS: dict[str, tuple[Callable[..., Any], int, float]] = {
    "gt greater __gt__": (torch.gt, 1, 0.0), "ge greater_equal __ge__": (torch.ge, 1, 1.0),
    "lt less __lt__": (torch.lt, -1, 0.0), "le less_equal __le__": (torch.le, -1, 1.0),
}  # fmt: skip


@following
def families() -> Mapping[str, Family]:
    """Return the op types that torch has, by type."""
    others = {t: (names.split(), parameters) for t, (names, parameters) in OTHERS.items()}
    taken = {name for names, _ in others.values() for name in names}
    found: dict[str, tuple[list[str], str]] = {}
    for op in OPS.values():  # the library's own ops first, since a name has one op type
        if op.type not in others and (names := [n for n in _names(op) if n not in taken]):
            found[op.type] = names, INPUTS[len(op.inputs)]
            taken.update(names)
    rows = {**found, **others}
    return {t: Family(OPS[t], tuple(names), _parameters(p)) for t, (names, p) in rows.items()}


def _names(op: Op) -> list[str]:
    """Return torch's names for an elementwise op; empty if torch lacks the op or its gradient."""
    if not op.elementwise or op.attrs or len(op.inputs) not in INPUTS:
        return []
    if op.type in APART or isinstance(op.rule, NoGradient):
        return []
    names = dict.fromkeys((op.name, op.type.lower()))
    found = [n for n in names if any(callable(getattr(place, n, None)) for place in FUNCTIONS)]
    return [*found, *SYNONYMS_OF.get(op.type, "").split()]


def _parameters(text: str) -> tuple[tuple[str, str | None], ...]:
    pairs = [word.partition("=") for word in text.split()]
    return tuple((ours, theirs or None) for ours, _, theirs in pairs)


@following
def spellings() -> Mapping[Any, Spelling]:
    """Return every torch callable that a family covers."""
    found: dict[Any, Spelling] = {}
    for family in families().values():
        for function, spelling in spellings_of(family):
            found.setdefault(function, spelling)
    return found


def spellings_of(family: Family) -> Iterator[tuple[Any, Spelling]]:
    """Yield every torch callable of a family."""
    if family is THRESHOLD:
        yield step, Spelling(family, step)
        return
    for name in family.names:
        yield from _spellings_named(family, name)
    if family.type in REVERSED:
        other_way = family._replace(parameters=(("input", "b"), ("other", "a")))
        yield from _spellings_named(other_way, REVERSED[family.type])
    yield from _operators(family)


def _spellings_named(family: Family, name: str) -> Iterator[tuple[Any, Spelling]]:
    every = [getattr(place, name, None) for place in PLACES]
    first = next((f for f in every if callable(f)), None)
    for place, function in zip(PLACES, every, strict=True):
        order = METHODS.get(family.type) if place is torch.Tensor else None
        there = family if order is None else family._replace(parameters=_parameters(order))
        for each in _with_overloads(function):
            yield each, Spelling(there, each, switch=switch(each))
        plain: Any = function if callable(function) else first
        for each in _with_overloads(getattr(place, f"{name}_", None)):
            yield each, Spelling(there, plain, in_place=True)


@cache
def switch(function: Callable[..., Any]) -> int | None:
    """Return the position of `inplace` in a function that torch implements in Python."""
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    return names.index("inplace") if "inplace" in names else None


def in_place_of(function: Callable[..., Any]) -> Any:
    """Return the function that `function(x, inplace=True)` calls; None if regrad does not know."""
    if switch(function) != 1:
        return None
    return getattr(torch, f"{function.__name__}_", None)


def functions_named(names: str) -> list[Any]:
    """Return the functions that torch has under these names, in all places."""
    # (`torch.einsum` is implemented in Python, and calls another function of this name)
    places = (*PLACES, *NATIVE)
    found = [getattr(place, name, None) for name in names.split() for place in places]
    return [each for f in found for each in _with_overloads(f)]


def _with_overloads(function: Any) -> list[Any]:
    """Return a function of torch, with its overloads if it is in `torch.ops.aten`."""
    if not isinstance(function, Packet):  # (a module's `__gt__` is not a function of torch)
        of_torch = callable(function) and not isinstance(function, MethodWrapperType)
        return [function] if of_torch else []
    return [function, *[getattr(function, name) for name in function.overloads()]]


def _operators(family: Family) -> Iterator[tuple[Any, Spelling]]:
    for name in family.names:
        for word in DUNDERS.get(name, "").split():
            plain = getattr(torch.Tensor, name)
            for dunder, in_place in ((f"__{word}__", False), (f"__i{word}__", True)):
                if function := getattr(torch.Tensor, dunder, None):
                    yield function, Spelling(family, plain, in_place)


def make_family(function: Callable[..., Any]) -> Family:
    """Return the family of a torch callable without an op type: all callables of its name.

    An in-place callable has the same family as the out-of-place variant, and its gradient.
    """
    full = torch.overrides.resolve_name(function) or getattr(function, "__qualname__", None)
    full = full or str(function)
    name = full.rpartition(".")[2]
    if changes_only(name):
        raise UnknownOpError(
            f"{full} changes a tensor in place, and torch has no out-of-place variant that returns "
            "the same result, so there is no function for a rule to be the gradient of. Call the "
            "function that computes the new values (torch.where, index_put, scatter), and use it "
            "as the key."
        )
    if name.endswith("_") and not name.endswith("__"):
        full, name = full[:-1], name[:-1]
    return Family(Op(full, name, lambda xp, *xs: xs, [Input("xs", "many")]), (name,), ())


def changes_only(name: str) -> bool:
    """Return whether a function works in place and has no out-of-place variant."""
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (
            name.startswith("__i") and getattr(torch.Tensor, "__" + name[3:], None) is None
        )
    return name.endswith("_") and not any(callable(getattr(p, name[:-1], None)) for p in PLACES)


def find_family(op_type: str) -> Family | None:
    """Return the family of an op type, if torch has it."""
    op_type = canonical(op_type)
    if op_type == THRESHOLD.type:
        return THRESHOLD
    if op_type not in families() and op_type in OPS and _names(OPS[op_type]):  # (a new op type)
        clear()
    return families().get(op_type)


_ATTENTION = (
    "ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention "
    "ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention "
    "ScaledDotProductFusedAttentionOverrideable "
    "FlashAttention EfficientAttention CudnnAttention"
)
_RECURRENT = "MkldnnRnnLayer ThnnFusedLstmCell ThnnFusedGruCell CudnnRnn MiopenRnn LstmMps"
_CONVOLUTION = (
    "Convolution ConvolutionOverrideable CudnnConvolution MiopenConvolution MkldnnConvolution "
    "MpsConvolution MiopenDepthwiseConvolution"
)

# Backward nodes of torch's autograd that belong to an op type, besides the nodes of its functions.
# The table includes nodes of callables that compute the op among others.
NODES = {
    "Sub": "Rsub", "ClipByValue": "ClampMin ClampMax", "Relu6": "Hardtanh Hardswish Hardsigmoid",
    "Max": "Max Aminmax", "Min": "Min Aminmax",
    "Conv2D": f"{_CONVOLUTION} NnpackSpatialConvolution ConvDepthwise2D SlowConv2D "
              "SlowConvDilated2D",
    "Conv3D": f"{_CONVOLUTION} ConvDepthwise3D SlowConv3D SlowConvDilated3D",
    "MaxPool": "MaxPool2DWithIndices MkldnnMaxPool2D",
    "MaxPool3D": "MaxPool3DWithIndices MkldnnMaxPool3D",
    "MatMul": "Vdot Addmm Baddbmm Addbmm Addmv Linear MkldnnLinear GroupedMm SparseAddmm "
              "SparseMmReduceImpl SparseSampledAddmm SparseSparseMatmul "
              f"{_ATTENTION} {_RECURRENT}",
    "Reshape": "UnsafeView ReshapeAlias ReshapeCopy MkldnnReshape",
    "Softmax": f"{_ATTENTION} SparseSoftmax MaskedSoftmax", "LogSoftmax": "SparseLogSoftmax",
    "Sigmoid": f"Silu Glu LogSigmoid BinaryCrossEntropyWithLogits {_RECURRENT}",
    "Tanh": f"Mish {_RECURRENT}", "Softplus": "Mish", "Selu": "Elu", "Sum": "SparseSum",
    "MatrixInverse": "LinalgInvEx", "Cholesky": "LinalgCholeskyEx",
    "MatrixExponential": "LinalgMatrixExp",
}  # fmt: skip


def _convolves(node: Any, axes: int) -> bool:
    return not saved_by(node, "transposed") and len(saved_by(node, "stride", " " * axes)) == axes


# For op types that share a backward node: whether a node belongs to the type, by its contents.
HOLDS: dict[str, Callable[[Any], bool]] = {
    "Relu6": lambda node: (saved_by(node, "min_val", 0), saved_by(node, "max_val", 6)) == (0, 6),
    "Elu": lambda node: saved_by(node, "scale", 1) == 1,
    "Selu": lambda node: saved_by(node, "scale") != 1,
    "Conv2D": lambda node: _convolves(node, 2),
    "Conv3D": lambda node: _convolves(node, 3),
}


def holds(op_type: str, node: Any) -> bool:
    """Return whether a backward node, which may belong to several op types, belongs to this one."""
    return op_type not in HOLDS or HOLDS[op_type](node)


def nodes_of(op_type: str) -> list[str]:
    """Return the names of an op type's backward nodes, without their numbers."""
    own = [name.title().replace("_", "") for name in families()[op_type].names]
    special = [f"Special{name}" for name in own]
    return [f"{name}Backward" for name in (*own, *special, *NODES.get(op_type, "").split())]
