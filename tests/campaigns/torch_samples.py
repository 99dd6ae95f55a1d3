"""torch's own sample database (OpInfo), and an oracle of which op types a call has.

The oracle is a `TorchDispatchMode` that sees which ATen ops autograd records. What counts as an op
of a type is said here (`ATEN`) by ATen's names, and not taken from the tables of the library, which
are under test.
"""

import importlib.util
import math
import os
import sys
import unittest
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from regrad.torch.optypes import families

# Where the samples lie: `proof --device cuda` (its workers are processes of their own).
DEVICE = os.environ.get("REGRAD_PROOF_DEVICE", "cpu")

# op type: ATen's names, where they are more or others than the names in torch.
ATEN = {
    "Softmax": "_softmax _safe_softmax", "LogSoftmax": "_log_softmax", "Relu6": "hardtanh",
    "Selu": "elu", "Square": "square", "Conv2D": "convolution", "Conv3D": "convolution",
    "LogSigmoid": "log_sigmoid_forward", "MaxPool": "max_pool2d_with_indices max_pool2d",
    "MaxPool3D": "max_pool3d_with_indices", "ClipByValue": "clamp clamp_min clamp_max",
    "MatMul": "mm bmm mv dot vdot addmm baddbmm addbmm addmv linear", "Prelu": "_prelu_kernel",
    "MatrixInverse": "linalg_inv_ex", "Cholesky": "cholesky linalg_cholesky_ex",
    "Maximum": "maximum fmax", "Minimum": "minimum fmin", "Sub": "sub rsub",
    "Max": "amax max", "Min": "amin min", "Reshape": "view _unsafe_view _reshape_alias",
    "Conj": "_conj _conj_physical conj_physical",
}  # fmt: skip

# Which calls of an ATen op are an op of the type, where its name alone does not tell.
WHEN: dict[str, Callable[..., bool]] = {
    "Elu": lambda x, alpha=1, scale=1, input_scale=1: scale == 1,
    "Relu6": lambda x, low=-1, high=1: (low, high) == (0, 6),
    "Selu": lambda x, alpha=1, scale=1, input_scale=1: scale != 1,
    "Conv2D": lambda x, w, bias, stride, padding, dilation, transposed,
        *rest: (w.dim() == 4 and not transposed),
    "Conv3D": lambda x, w, bias, stride, padding, dilation, transposed,
        *rest: (w.dim() == 5 and not transposed),
    "RealDiv": lambda *args, rounding_mode=None: rounding_mode is None,
}  # fmt: skip
# Callables of which the docs say which op types count inside; all else there is torch's own.
LISTED = {
    "column_stack": "ConcatV2", "einsum": "MatMul Mul", "inner": "MatMul Mul",
    "tensordot": "MatMul", "outer": "Mul", "linalg_multi_dot": "MatMul",
    "nn_functional_bilinear": "MatMul", "nn_functional_cross_entropy": "LogSoftmax",
    "nn_functional_linear": "MatMul", "hstack": "ConcatV2", "vstack": "ConcatV2",
    "dstack": "ConcatV2", "nn_functional_scaled_dot_product_attention": "MatMul Softmax",
    "nn_functional_multi_head_attention_forward": "MatMul Softmax Mean",
    "flatten": "Reshape", "ravel": "Reshape", "unflatten": "Reshape", "view_as": "Reshape",
    "float_power": "Pow", "square": "Pow", "aminmax": "Max Min",
    "nn_functional_linear_cross_entropy": "MatMul LogSoftmax",
    "nn_functional_linear_cross_entropy_chunked_none": "MatMul LogSoftmax",
    "nn_functional_linear_cross_entropy_chunked": "MatMul LogSoftmax",
}  # fmt: skip
# Ops that other calls run for torch's own ends, and that nobody wrote: the layout of an operand,
# the factor of a dropout mask, the mean in a pool. They count only in calls of these names, or (the
# second table) in all but these.
ONLY_IN = {"Identity": "clone alias", "Reshape": "reshape view reshape_as"}
NOT_IN = {
    "Mul": "nn_functional_rrelu",
    "Mean": "nn_functional_adaptive_avg_pool1d nn_functional_adaptive_avg_pool2d "
            "nn_functional_adaptive_avg_pool3d",
}  # fmt: skip

# Callables that compute these op types among others, whether or not ATen shows them.
INSIDE = {
    "addmm": "MatMul", "addmv": "MatMul", "baddbmm": "MatMul", "addbmm": "MatMul",
    "einsum": "MatMul Mul", "tensordot": "MatMul", "inner": "MatMul", "vdot": "MatMul",
    "linalg_multi_dot": "MatMul", "nn_functional_bilinear": "MatMul", "matmul": "MatMul",
    "mv": "MatMul", "nn_functional_linear": "MatMul", "outer": "Mul", "hstack": "ConcatV2",
    "vstack": "ConcatV2", "dstack": "ConcatV2", "column_stack": "ConcatV2", "float_power": "Pow",
    "square": "Pow", "flatten": "Reshape", "ravel": "Reshape", "unflatten": "Reshape",
    "view_as": "Reshape", "reshape_as": "Reshape",
    "nn_functional_scaled_dot_product_attention": "MatMul Softmax",
    "nn_functional_multi_head_attention_forward": "MatMul Softmax",
    "nn_functional_cross_entropy": "LogSoftmax",
    "nn_functional_binary_cross_entropy_with_logits": "Sigmoid",
    "nn_functional_multilabel_soft_margin_loss": "Sigmoid", "nn_functional_logsigmoid": "Sigmoid",
    "nn_functional_silu": "Sigmoid", "nn_functional_glu": "Sigmoid",
    "nn_functional_mish": "Tanh Softplus", "nn_functional_hardswish": "Relu6",
    "nn_functional_hardsigmoid": "Relu6", "nn_functional_softmin": "Softmax",
    "nn_functional_prelu": "Prelu", "cumprod": "Cumprod", "clamp_min": "ClipByValue",
    "clamp_max": "ClipByValue", "max_binary": "Maximum", "min_binary": "Minimum", "add": "AddV2",
    "sub": "Sub", "rsub": "Sub",
}  # fmt: skip


def aten_types() -> dict[str, list[str]]:
    """The op types that an ATen op may be of, by its name without overload."""
    found: dict[str, list[str]] = {}
    for family in families().values():
        names = ATEN.get(family.type) or " ".join(family.names)
        for name in names.split():
            for each in (name, f"{name}_"):
                found.setdefault(each, []).append(family.type)
    return found


TYPES = aten_types()


def types_of(func: Any, args: Sequence[Any], options: dict[str, Any]) -> Iterator[str]:
    """The op types that a call of an ATen op is of."""
    for op_type in TYPES.get(func.overloadpacket.__name__, ()):
        if op_type not in WHEN or WHEN[op_type](*args, **options):
            yield op_type


def written(types: set[str], name: str) -> set[str]:
    """The op types that a call of this name has for its caller."""
    name = name.partition(":")[0]
    if name in LISTED:
        return types & {*LISTED[name].split()}
    plumbing = {t for t, names in NOT_IN.items() if name in names.split()}
    plumbing |= {t for t, names in ONLY_IN.items() if name not in names.split()}
    if "dropout" in name:
        plumbing |= {"Mul", "RealDiv"}
    return types - plumbing


class Recorded(TorchDispatchMode):
    """The ATen ops that autograd records, below which this mode stands, with their results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []
        self.hidden: set[str] = set()  # op types in custom ops, whose own backward pass decides

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func.namespace not in ("aten", "prims"):
            with Inside(self.hidden):
                return func(*args, **options)
        y = func(*args, **options)
        if torch.is_grad_enabled() and any(map(is_wanted, tree_leaves((args, kwargs)))):
            every = types_of(func, args, options) if any(map(is_float, flat(y))) else ()
            self.found += [(op_type, y) for op_type in every]
        return y

    def types(self, result: Any) -> set[str]:
        """The op types among them that gradients of the result pass."""
        nodes = behind(result)
        return {op_type for op_type, ys in self.found if reached(ys, nodes)}


class Inside(TorchDispatchMode):
    """Notes all op types that run."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.update(types_of(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def behind(result: Any) -> set[Any]:
    """All backward nodes behind a result."""
    stack = [y.grad_fn for y in flat(result) if y.grad_fn is not None]
    found = set(stack)
    while stack:
        new = {node for node, _ in stack.pop().next_functions if node is not None} - found
        found |= new
        stack += new
    return found


def reached(ys: Any, nodes: set[Any]) -> bool:
    """Whether a result has one of the nodes."""
    return any(y.grad_fn in nodes for y in flat(ys))


# -- the calls ------------------------------------------------------------------------------------

# What has no values before they are written.
NO_VALUES = ("empty", "new_empty")


@cache
def load() -> dict[str, Any]:
    """torch's samples of ops that have values, by name."""
    return {
        op.formatted_name: op
        for op in op_db()
        if {torch.float32, torch.float64} & op.dtypes and not op.name.startswith(NO_VALUES)
    }


def op_db() -> list[Any]:
    """PyTorch's own table of its ops. Its code imports expecttest, of which nothing is needed."""
    if "expecttest" not in sys.modules and not importlib.util.find_spec("expecttest"):
        sys.modules["expecttest"] = mock.Mock(TestCase=unittest.TestCase, __spec__=None)
    from torch.testing._internal import common_methods_invocations as samples

    return samples.op_db


class Case(NamedTuple):
    """One call of a sample, and whether it changes its first argument."""

    name: str  # softmax:method_variant 2
    function: Callable[..., Any]
    given: tuple[Any, Sequence[Any], dict[str, Any]]  # input, arguments, options
    in_place: bool = False


def cases(op: Any, count: int = 0) -> Iterator[Case]:
    """Calls of an op in all its variants, with a few of its samples (0: all of them)."""
    dtype = torch.float64 if torch.float64 in op.dtypes else torch.float32
    torch.manual_seed(zlib.crc32(op.formatted_name.encode()))
    every = list(op.sample_inputs(DEVICE, dtype, requires_grad=op.supports_autograd))
    few = every if not count else every[:: max(1, len(every) // count)][:count]
    for n, sample in enumerate(few):
        for kind, function in variants(op):
            if "operator" not in kind or (len(sample.args) == 1 and not sample.kwargs):
                name = f"{op.formatted_name}:{kind} {n}"
                given = sample.input, sample.args, sample.kwargs
                yield Case(name, function, given, "inplace" in kind)


def variants(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions, methods and operators of an op, under all its names."""
    for alias in (op, *op.aliases):
        prefix = "" if alias is op else f"{alias.name}."
        for kind in ("op", "method_variant", "inplace_variant"):
            if function := getattr(alias, kind, None):
                yield prefix + kind, function
    for kind in ("operator_variant", "inplace_operator_variant"):
        if function := getattr(op, kind, None):
            yield kind, function


class Call:
    """A case as a function of the tensors that want a gradient, with such tensors of its own."""

    def __init__(self, case: Case) -> None:
        flat, spec = tree_flatten(case.given)
        flat = [fresh(x) for x in flat]
        self.places = places = [i for i, x in enumerate(flat) if is_wanted(x)]
        self.xs = [flat[i] for i in places]
        function = case.function

        def call(*xs: Any) -> Any:
            every = list(flat)
            for i, x in zip(places, xs, strict=True):
                every[i] = x
            input, args, options = tree_unflatten(every, spec)
            return function(input, *args, **options)

        self.function = call
        self.in_place = case.in_place and places[:1] == [0]

    def __call__(self) -> Any:
        """Run it eagerly. What it changes is no leaf, and was made before."""
        return self.ready()()

    def ready(self) -> Callable[[], Any]:
        given = [self.xs[0].clone(), *self.xs[1:]] if self.in_place else self.xs
        torch.manual_seed(0)
        return lambda: self.function(*given)

    def pure(self, *xs: Any) -> Any:
        """The float results, of tensors that stay as they are."""
        if self.in_place:
            xs = (xs[0].clone(), *xs[1:])
        return tuple([y for y in flat(self.function(*xs)) if is_float(y)])


def fresh(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if is_tensor(x) else x


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def is_wanted(x: Any) -> bool:
    return is_tensor(x) and x.requires_grad


def is_float(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def flat(ys: Any) -> list[Any]:
    """The tensors of a result."""
    if is_tensor(ys):
        return [ys]
    return [y for each in ys for y in flat(each)] if isinstance(ys, list | tuple) else []


# -- values ---------------------------------------------------------------------------------------


def differentiated(ys: Any, xs: Sequence[Any]) -> list[Any]:
    """The gradients of results by leaves: zeros where there are none."""
    wanted = [y for y in flat(ys) if is_wanted(y)]
    for x in xs:
        x.grad = None
    if wanted:
        torch.autograd.backward(wanted, list(map(weights, wanted)))
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in xs]


def weights(y: torch.Tensor) -> torch.Tensor:
    """The gradient that arrives: of another size everywhere, and nowhere that of a rule."""
    found = torch.linspace(2.0, 3.0, y.numel(), dtype=torch.float64)
    return found.reshape(y.shape).to(y.device, y.dtype)


def compare(ys: Any, expected: Any) -> str:
    """Whether two results are the same to the bit, or up to rounding."""
    pairs = list(zip(tree_leaves(ys), tree_leaves(expected), strict=True))
    pairs = [(y.detach(), e.detach()) for y, e in pairs if is_tensor(e) and not e.is_sparse]
    if all(y.dtype == e.dtype and y.shape == e.shape for y, e in pairs):
        if all(bitwise(y, e) for y, e in pairs):
            return "same"
        if all(torch.allclose(y, e, rtol=1e-4, atol=1e-5, equal_nan=True) for y, e in pairs):
            return "rounded"
    return "DIFFERENT"


def bitwise(y: torch.Tensor, expected: torch.Tensor) -> bool:
    if y.is_quantized or y.layout is not torch.strided or y.is_nested:
        return True
    return torch.equal(as_bytes(y), as_bytes(expected))


def as_bytes(y: torch.Tensor) -> torch.Tensor:
    """The bits; those of NaN say nothing."""
    flat = torch.empty(y.numel(), dtype=y.dtype, device=y.device).copy_(y.reshape(-1))
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    flat = flat.masked_fill(flat.isnan(), math.nan) if flat.is_floating_point() else flat
    return flat.contiguous().view(torch.uint8)


def close(ys: Sequence[Any], expected: Sequence[Any], tolerance: float = 1e-6) -> bool:
    """Whether gradients are the same up to rounding."""
    return all(
        y.shape == e.shape
        and y.dtype == e.dtype
        and torch.allclose(y, e, rtol=tolerance, atol=tolerance * size(e), equal_nan=True)
        for y, e in zip(map(dense, ys), map(dense, expected), strict=True)
    )


def dense(x: torch.Tensor) -> torch.Tensor:
    return x.detach() if x.layout is torch.strided else x.detach().to_dense()


def size(x: torch.Tensor) -> float:
    """The largest finite number, and 1 at least."""
    finite = x.abs()
    return max(1.0, float(finite[finite.isfinite()].max())) if finite.isfinite().any() else 1.0
