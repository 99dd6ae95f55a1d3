"""regrad: a differentiable tensor library in which you control every gradient.

Array operations have the names and signatures of the Array API standard.
"""

# Each module is listed once, with its names.
# isort: skip_file
import typing as _typing

from regrad.autodiff.custom import custom_grad
from regrad.autodiff.gradients import grad, grads, value_and_grad, value_and_grads, variable_grads
from regrad.autodiff.modules import Module
from regrad.autodiff.variables import Variable
from regrad.core.containers import tree_map
from regrad.core.extras import needed as _needed
from regrad.core.hints import of_name as _of_name, unknown as _unknown
from regrad.core.name_scopes import name_scope
from regrad.core.op import Indices, op
from regrad.core.overrides import gradient_override_map
from regrad.core.places import Site, at
from regrad.core.promotion import default_dtype, get_default_dtype, set_default_dtype
from regrad.core.registry import RegisterGradient, find_op, gradient, not_differentiable, op_types
from regrad.core.surrogates import replace
from regrad.core.tensor import Tensor
from regrad.errors import (
    MissingPackageError as _MissingPackageError, MissingPartError as _MissingPartError,
)  # fmt: skip
from regrad.ops.array import (
    broadcast_arrays, broadcast_shapes, broadcast_to, expand_dims, flip, matrix_transpose, meshgrid,
    moveaxis, permute_dims, reshape, roll, squeeze, sum_to, swapaxes, tile, tril, triu,
)  # fmt: skip
from regrad.ops.binary import (
    add, add_n, atan2, bitwise_and, bitwise_left_shift, bitwise_or, bitwise_right_shift,
    bitwise_xor, clip, copysign, divide, equal, floor_divide, greater, greater_equal, hypot,
    isclose, less, less_equal, logaddexp, logical_and, logical_or, logical_xor, maximum, minimum,
    multiply, nextafter, not_equal, pow, remainder, squared_difference, subtract, where,
)  # fmt: skip
from regrad.ops.creation import (
    arange, asarray, empty, eye, from_dlpack, full, linspace, ones, scalar, tensor, tensor1d,
    tensor2d, tensor3d, tensor4d, zeros,
)  # fmt: skip
from regrad.ops.creation_like import empty_like, full_like, ones_like, zeros_like
from regrad.ops.dtypes import (
    bool, can_cast, complex64, complex128, e, finfo, float16, float32, float64, iinfo, inf, int8,
    int16, int32, int64, isdtype, nan, newaxis, pi, result_type, uint8, uint16, uint32, uint64,
)  # fmt: skip
from regrad.ops.casting import astype, conj, identity, imag, positive, real, stop_gradient
from regrad.ops.elementwise import (
    abs, acos, acosh, asin, asinh, atan, atanh, bitwise_invert, ceil, cos, cosh, digamma, erf, erfc,
    erfinv, exp, expm1, floor, isfinite, isinf, isnan, lgamma, log, log1p, log2, log10, logical_not,
    negative, polygamma, reciprocal, round, rsqrt, sign, signbit, sin, sinh, sqrt, square, step,
    tan, tanh, trunc,
)  # fmt: skip
from regrad.ops.getitem import at_add, at_set
from regrad.ops.indexing import gather_nd, repeat, scatter_nd, segment_sum, take, take_along_axis
from regrad.ops.joining import concat, split, stack, unstack
from regrad.ops.matmul import einsum, matmul, tensordot, vecdot
from regrad.ops.namespace_info import __array_namespace_info__ as __array_namespace_info__
from regrad.ops.printing import set_printoptions
from regrad.ops.reduction import (
    all, allclose, any, argmax, argmin, count_nonzero, logsumexp, max, mean, min, prod, std, sum,
    var,
)  # fmt: skip
from regrad.ops.scan import (
    cumulative_max, cumulative_min, cumulative_prod, cumulative_sum, diff, linear_recurrence,
)  # fmt: skip
from regrad.ops.slicing import pad, slice
from regrad.ops.sorting import argsort, median, quantile, searchsorted, sort, top_k

if _typing.TYPE_CHECKING:
    from regrad import extend as extend, fft, jax as jax, linalg, losses, nn, plot as plot
    from regrad import random, rules, testing as testing, torch as torch, train as train, v1 as v1
    from regrad.inspection.tools import compare_gradients as compare_gradients, draw as draw
    from regrad.inspection.tools import find_nan as find_nan, gradient_path as gradient_path
    from regrad.inspection.tools import saved_bytes as saved_bytes
    from regrad.inspection.tools import trace_gradients as trace_gradients
    from regrad.jax.exporting import Exported as Exported, eval_shape as eval_shape
    from regrad.jax.exporting import export as export
    from regrad.ops.indices import (
        nonzero, one_hot, unique_all, unique_counts, unique_inverse, unique_values,
    )  # fmt: skip
    from regrad.ops.special import multigammaln, nan_to_num, sinc, xdivy, xlogy
    from regrad.transforms.checkpoint import checkpoint
    from regrad.transforms.control_flow import cond, fori_loop, map, scan, while_loop
    from regrad.transforms.derivatives import hessian, jacobian, jacrev, jvp, vjp
    from regrad.transforms.devices import block_until_ready, device_put
    from regrad.transforms.directions import hvp, jacfwd, linearize
    from regrad.transforms.fixed_points import fixed_point
    from regrad.transforms.host_calls import host_call
    from regrad.transforms.jit import jit
    from regrad.transforms.vmap import vmap

# Lazily imported: modules, and names by module.
_PARTS = (
    "extend", "fft", "jax", "linalg", "losses", "nn", "plot", "random", "rules", "testing", "torch",
    "train", "v1",
)  # fmt: skip
_LATER = {
    "inspection.tools": "compare_gradients draw find_nan gradient_path saved_bytes trace_gradients",
    "jax.exporting": "Exported eval_shape export",
    "ops.indices": "nonzero one_hot unique_all unique_counts unique_inverse unique_values",
    "ops.special": "multigammaln nan_to_num sinc xdivy xlogy",
    "transforms.checkpoint": "checkpoint",
    "transforms.control_flow": "cond fori_loop map scan while_loop",
    "transforms.derivatives": "hessian jacobian jacrev jvp vjp",
    "transforms.devices": "block_until_ready device_put",
    "transforms.directions": "hvp jacfwd linearize",
    "transforms.fixed_points": "fixed_point",
    "transforms.host_calls": "host_call",
    "transforms.jit": "jit",
    "transforms.vmap": "vmap",
}
_TOOLS = {name: module for module, names in _LATER.items() for name in names.split()}
variable = Variable
__version__ = "0.1.0"
__array_api_version__ = "2024.12"
# (Without parts and tools that need other packages, or that are for tests and new ops.)
__all__ = [
    "Indices", "Module", "RegisterGradient", "Site", "Tensor", "Variable", "abs", "acos", "acosh",
    "add", "add_n", "all", "allclose", "any", "arange", "argmax", "argmin", "argsort", "asarray",
    "asin", "asinh", "astype", "at", "at_add", "at_set", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
    "block_until_ready", "bool", "broadcast_arrays", "broadcast_shapes", "broadcast_to", "can_cast",
    "ceil", "checkpoint", "clip", "complex64", "complex128", "concat", "cond", "conj", "copysign",
    "cos", "cosh", "count_nonzero", "cumulative_max", "cumulative_min", "cumulative_prod",
    "cumulative_sum", "custom_grad", "default_dtype", "device_put", "diff", "digamma", "divide",
    "e", "einsum", "empty", "empty_like", "equal", "erf", "erfc", "erfinv", "exp", "expand_dims",
    "expm1", "eye", "fft", "find_op", "finfo", "fixed_point", "flip", "float16", "float32",
    "float64", "floor", "floor_divide", "fori_loop", "from_dlpack", "full", "full_like",
    "gather_nd", "get_default_dtype", "grad", "gradient", "gradient_override_map", "grads",
    "greater", "greater_equal", "hessian", "host_call", "hvp", "hypot", "identity", "iinfo", "imag",
    "inf", "int8", "int16", "int32", "int64", "isclose", "isdtype", "isfinite", "isinf", "isnan",
    "jacfwd", "jacobian", "jacrev", "jit", "jvp", "less", "less_equal", "lgamma", "linalg",
    "linear_recurrence", "linearize", "linspace", "log", "log1p", "log2", "log10", "logaddexp",
    "logical_and", "logical_not", "logical_or", "logical_xor", "logsumexp", "losses", "map",
    "matmul", "matrix_transpose", "max", "maximum", "mean", "median", "meshgrid", "min", "minimum",
    "moveaxis", "multigammaln", "multiply", "name_scope", "nan", "nan_to_num", "negative",
    "newaxis", "nextafter", "nn", "nonzero", "not_differentiable", "not_equal", "one_hot", "ones",
    "ones_like", "op", "op_types", "pad", "permute_dims", "pi", "polygamma", "positive", "pow",
    "prod", "quantile", "random", "real", "reciprocal", "remainder", "repeat", "replace", "reshape",
    "result_type", "roll", "round", "rsqrt", "rules", "scalar", "scan", "scatter_nd",
    "searchsorted", "segment_sum", "set_default_dtype", "set_printoptions", "sign", "signbit",
    "sin", "sinc", "sinh", "slice", "sort", "split", "sqrt", "square", "squared_difference",
    "squeeze", "stack", "std", "step", "stop_gradient", "subtract", "sum", "sum_to", "swapaxes",
    "take", "take_along_axis", "tan", "tanh", "tensor", "tensor1d", "tensor2d", "tensor3d",
    "tensor4d", "tensordot", "tile", "top_k", "tree_map", "tril", "triu", "trunc", "uint8",
    "uint16", "uint32", "uint64", "unique_all", "unique_counts", "unique_inverse", "unique_values",
    "unstack", "value_and_grad", "value_and_grads", "var", "variable", "variable_grads", "vecdot",
    "vjp", "vmap", "where", "while_loop", "xdivy", "xlogy", "zeros", "zeros_like",
]  # fmt: skip


if not _typing.TYPE_CHECKING:  # so that type checkers report names that are not listed above

    def __getattr__(name: str) -> object:
        """Import parts when they are first used; raise with a hint for other names."""
        from importlib import import_module

        try:
            if name in _PARTS:
                return import_module(f"regrad.{name}")
            if _TOOLS.get(name) == "jax.exporting":
                _needed("jax", "export", f"rg.{name}")
            if name in _TOOLS:
                value = getattr(import_module(f"regrad.{_TOOLS[name]}"), name)
                return globals().setdefault(name, value)  # later accesses do not call this function
        except _MissingPackageError as error:  # so that hasattr(regrad, "jax") is False
            raise _MissingPartError(str(error), obj=__name__) from error
        if name.startswith("__"):  # (Python and inspection tools read such names)
            raise AttributeError(f"module 'regrad' has no attribute {name!r}")
        hint = _of_name(name, [*__all__, *_PARTS, *_TOOLS])
        raise _unknown(f"module 'regrad' has no attribute {name!r}.{hint}", __name__)

    def __dir__() -> list[str]:
        """Return all names, including names that are imported at their first use."""
        return sorted({*globals(), *_PARTS, *_TOOLS})
