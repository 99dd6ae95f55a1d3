"""regrad: a differentiable tensor library in which every gradient is yours.

Array operations carry the names and signatures of the Array API standard.
"""

import typing as _typing

from regrad import fft as fft
from regrad import linalg as linalg
from regrad import losses as losses
from regrad import nn as nn
from regrad import random as random
from regrad import rules as rules
from regrad.autodiff.custom import custom_grad as custom_grad
from regrad.autodiff.gradients import grad as grad
from regrad.autodiff.gradients import grads as grads
from regrad.autodiff.gradients import value_and_grad as value_and_grad
from regrad.autodiff.gradients import value_and_grads as value_and_grads
from regrad.autodiff.gradients import variable_grads as variable_grads
from regrad.autodiff.modules import Module as Module
from regrad.autodiff.variables import Variable as Variable
from regrad.core.containers import tree_map as tree_map
from regrad.core.extras import needed as _needed
from regrad.core.hints import hint_in as _hint_in
from regrad.core.hints import of_name as _of_name
from regrad.core.hints import unknown as _unknown
from regrad.core.op import Indices as Indices
from regrad.core.op import op as op
from regrad.core.overrides import gradient_override_map as gradient_override_map
from regrad.core.promotion import default_dtype as default_dtype
from regrad.core.promotion import get_default_dtype as get_default_dtype
from regrad.core.promotion import set_default_dtype as set_default_dtype
from regrad.core.registry import RegisterGradient as RegisterGradient
from regrad.core.registry import find_op as find_op
from regrad.core.registry import gradient as gradient
from regrad.core.registry import not_differentiable as not_differentiable
from regrad.core.registry import op_types as op_types
from regrad.core.tensor import Tensor as Tensor
from regrad.errors import MissingPackageError as _MissingPackageError
from regrad.errors import MissingPartError as _MissingPartError
from regrad.ops.array import broadcast_arrays as broadcast_arrays
from regrad.ops.array import broadcast_shapes as broadcast_shapes
from regrad.ops.array import broadcast_to as broadcast_to
from regrad.ops.array import expand_dims as expand_dims
from regrad.ops.array import flip as flip
from regrad.ops.array import matrix_transpose as matrix_transpose
from regrad.ops.array import meshgrid as meshgrid
from regrad.ops.array import moveaxis as moveaxis
from regrad.ops.array import permute_dims as permute_dims
from regrad.ops.array import reshape as reshape
from regrad.ops.array import roll as roll
from regrad.ops.array import squeeze as squeeze
from regrad.ops.array import sum_to as sum_to
from regrad.ops.array import swapaxes as swapaxes
from regrad.ops.array import tile as tile
from regrad.ops.array import tril as tril
from regrad.ops.array import triu as triu
from regrad.ops.binary import add as add
from regrad.ops.binary import add_n as add_n
from regrad.ops.binary import atan2 as atan2
from regrad.ops.binary import bitwise_and as bitwise_and
from regrad.ops.binary import bitwise_left_shift as bitwise_left_shift
from regrad.ops.binary import bitwise_or as bitwise_or
from regrad.ops.binary import bitwise_right_shift as bitwise_right_shift
from regrad.ops.binary import bitwise_xor as bitwise_xor
from regrad.ops.binary import clip as clip
from regrad.ops.binary import copysign as copysign
from regrad.ops.binary import divide as divide
from regrad.ops.binary import equal as equal
from regrad.ops.binary import floor_divide as floor_divide
from regrad.ops.binary import greater as greater
from regrad.ops.binary import greater_equal as greater_equal
from regrad.ops.binary import hypot as hypot
from regrad.ops.binary import isclose as isclose
from regrad.ops.binary import less as less
from regrad.ops.binary import less_equal as less_equal
from regrad.ops.binary import logaddexp as logaddexp
from regrad.ops.binary import logical_and as logical_and
from regrad.ops.binary import logical_or as logical_or
from regrad.ops.binary import logical_xor as logical_xor
from regrad.ops.binary import maximum as maximum
from regrad.ops.binary import minimum as minimum
from regrad.ops.binary import multiply as multiply
from regrad.ops.binary import nextafter as nextafter
from regrad.ops.binary import not_equal as not_equal
from regrad.ops.binary import pow as pow
from regrad.ops.binary import remainder as remainder
from regrad.ops.binary import squared_difference as squared_difference
from regrad.ops.binary import subtract as subtract
from regrad.ops.binary import where as where
from regrad.ops.creation import arange as arange
from regrad.ops.creation import asarray as asarray
from regrad.ops.creation import empty as empty
from regrad.ops.creation import eye as eye
from regrad.ops.creation import from_dlpack as from_dlpack
from regrad.ops.creation import full as full
from regrad.ops.creation import linspace as linspace
from regrad.ops.creation import ones as ones
from regrad.ops.creation import scalar as scalar
from regrad.ops.creation import tensor as tensor
from regrad.ops.creation import tensor1d as tensor1d
from regrad.ops.creation import tensor2d as tensor2d
from regrad.ops.creation import tensor3d as tensor3d
from regrad.ops.creation import tensor4d as tensor4d
from regrad.ops.creation import zeros as zeros
from regrad.ops.creation_like import empty_like as empty_like
from regrad.ops.creation_like import full_like as full_like
from regrad.ops.creation_like import ones_like as ones_like
from regrad.ops.creation_like import zeros_like as zeros_like
from regrad.ops.dtypes import bool as bool
from regrad.ops.dtypes import can_cast as can_cast
from regrad.ops.dtypes import complex64 as complex64
from regrad.ops.dtypes import complex128 as complex128
from regrad.ops.dtypes import e as e
from regrad.ops.dtypes import finfo as finfo
from regrad.ops.dtypes import float16 as float16
from regrad.ops.dtypes import float32 as float32
from regrad.ops.dtypes import float64 as float64
from regrad.ops.dtypes import iinfo as iinfo
from regrad.ops.dtypes import inf as inf
from regrad.ops.dtypes import int8 as int8
from regrad.ops.dtypes import int16 as int16
from regrad.ops.dtypes import int32 as int32
from regrad.ops.dtypes import int64 as int64
from regrad.ops.dtypes import isdtype as isdtype
from regrad.ops.dtypes import nan as nan
from regrad.ops.dtypes import newaxis as newaxis
from regrad.ops.dtypes import pi as pi
from regrad.ops.dtypes import result_type as result_type
from regrad.ops.dtypes import uint8 as uint8
from regrad.ops.dtypes import uint16 as uint16
from regrad.ops.dtypes import uint32 as uint32
from regrad.ops.dtypes import uint64 as uint64
from regrad.ops.elementwise import abs as abs
from regrad.ops.elementwise import acos as acos
from regrad.ops.elementwise import acosh as acosh
from regrad.ops.elementwise import asin as asin
from regrad.ops.elementwise import asinh as asinh
from regrad.ops.elementwise import astype as astype
from regrad.ops.elementwise import atan as atan
from regrad.ops.elementwise import atanh as atanh
from regrad.ops.elementwise import bitwise_invert as bitwise_invert
from regrad.ops.elementwise import ceil as ceil
from regrad.ops.elementwise import conj as conj
from regrad.ops.elementwise import cos as cos
from regrad.ops.elementwise import cosh as cosh
from regrad.ops.elementwise import digamma as digamma
from regrad.ops.elementwise import erf as erf
from regrad.ops.elementwise import erfc as erfc
from regrad.ops.elementwise import erfinv as erfinv
from regrad.ops.elementwise import exp as exp
from regrad.ops.elementwise import expm1 as expm1
from regrad.ops.elementwise import floor as floor
from regrad.ops.elementwise import identity as identity
from regrad.ops.elementwise import imag as imag
from regrad.ops.elementwise import isfinite as isfinite
from regrad.ops.elementwise import isinf as isinf
from regrad.ops.elementwise import isnan as isnan
from regrad.ops.elementwise import lgamma as lgamma
from regrad.ops.elementwise import log as log
from regrad.ops.elementwise import log1p as log1p
from regrad.ops.elementwise import log2 as log2
from regrad.ops.elementwise import log10 as log10
from regrad.ops.elementwise import logical_not as logical_not
from regrad.ops.elementwise import negative as negative
from regrad.ops.elementwise import polygamma as polygamma
from regrad.ops.elementwise import positive as positive
from regrad.ops.elementwise import real as real
from regrad.ops.elementwise import reciprocal as reciprocal
from regrad.ops.elementwise import round as round
from regrad.ops.elementwise import rsqrt as rsqrt
from regrad.ops.elementwise import sign as sign
from regrad.ops.elementwise import signbit as signbit
from regrad.ops.elementwise import sin as sin
from regrad.ops.elementwise import sinh as sinh
from regrad.ops.elementwise import sqrt as sqrt
from regrad.ops.elementwise import square as square
from regrad.ops.elementwise import step as step
from regrad.ops.elementwise import stop_gradient as stop_gradient
from regrad.ops.elementwise import tan as tan
from regrad.ops.elementwise import tanh as tanh
from regrad.ops.elementwise import trunc as trunc
from regrad.ops.getitem import at_add as at_add
from regrad.ops.getitem import at_set as at_set
from regrad.ops.indexing import gather_nd as gather_nd
from regrad.ops.indexing import repeat as repeat
from regrad.ops.indexing import scatter_nd as scatter_nd
from regrad.ops.indexing import segment_sum as segment_sum
from regrad.ops.indexing import take as take
from regrad.ops.indexing import take_along_axis as take_along_axis
from regrad.ops.indices import nonzero as nonzero
from regrad.ops.indices import one_hot as one_hot
from regrad.ops.indices import unique_all as unique_all
from regrad.ops.indices import unique_counts as unique_counts
from regrad.ops.indices import unique_inverse as unique_inverse
from regrad.ops.indices import unique_values as unique_values
from regrad.ops.joining import concat as concat
from regrad.ops.joining import split as split
from regrad.ops.joining import stack as stack
from regrad.ops.joining import unstack as unstack
from regrad.ops.matmul import einsum as einsum
from regrad.ops.matmul import matmul as matmul
from regrad.ops.matmul import tensordot as tensordot
from regrad.ops.matmul import vecdot as vecdot
from regrad.ops.namespace_info import __array_namespace_info__ as __array_namespace_info__
from regrad.ops.printing import set_printoptions as set_printoptions
from regrad.ops.reduction import all as all
from regrad.ops.reduction import allclose as allclose
from regrad.ops.reduction import any as any
from regrad.ops.reduction import argmax as argmax
from regrad.ops.reduction import argmin as argmin
from regrad.ops.reduction import count_nonzero as count_nonzero
from regrad.ops.reduction import logsumexp as logsumexp
from regrad.ops.reduction import max as max
from regrad.ops.reduction import mean as mean
from regrad.ops.reduction import min as min
from regrad.ops.reduction import prod as prod
from regrad.ops.reduction import std as std
from regrad.ops.reduction import sum as sum
from regrad.ops.reduction import var as var
from regrad.ops.scan import cumulative_max as cumulative_max
from regrad.ops.scan import cumulative_min as cumulative_min
from regrad.ops.scan import cumulative_prod as cumulative_prod
from regrad.ops.scan import cumulative_sum as cumulative_sum
from regrad.ops.scan import diff as diff
from regrad.ops.scan import linear_recurrence as linear_recurrence
from regrad.ops.slicing import pad as pad
from regrad.ops.slicing import slice as slice
from regrad.ops.sorting import argsort as argsort
from regrad.ops.sorting import median as median
from regrad.ops.sorting import quantile as quantile
from regrad.ops.sorting import searchsorted as searchsorted
from regrad.ops.sorting import sort as sort
from regrad.ops.sorting import top_k as top_k
from regrad.ops.special import multigammaln as multigammaln
from regrad.ops.special import nan_to_num as nan_to_num
from regrad.ops.special import sinc as sinc
from regrad.ops.special import xdivy as xdivy
from regrad.ops.special import xlogy as xlogy
from regrad.transforms.checkpoint import checkpoint as checkpoint
from regrad.transforms.control_flow import cond as cond
from regrad.transforms.control_flow import fori_loop as fori_loop
from regrad.transforms.control_flow import map as map
from regrad.transforms.control_flow import scan as scan
from regrad.transforms.control_flow import while_loop as while_loop
from regrad.transforms.derivatives import hessian as hessian
from regrad.transforms.derivatives import jacobian as jacobian
from regrad.transforms.derivatives import jacrev as jacrev
from regrad.transforms.derivatives import jvp as jvp
from regrad.transforms.derivatives import vjp as vjp
from regrad.transforms.devices import block_until_ready as block_until_ready
from regrad.transforms.devices import device_put as device_put
from regrad.transforms.directions import hvp as hvp
from regrad.transforms.directions import jacfwd as jacfwd
from regrad.transforms.directions import linearize as linearize
from regrad.transforms.jit import jit as jit
from regrad.transforms.vmap import vmap as vmap

if _typing.TYPE_CHECKING:
    from regrad import extend as extend
    from regrad import jax as jax
    from regrad import plot as plot
    from regrad import testing as testing
    from regrad import torch as torch
    from regrad import train as train
    from regrad import v1 as v1
    from regrad.inspection.tools import compare_gradients as compare_gradients
    from regrad.inspection.tools import draw as draw
    from regrad.inspection.tools import find_nan as find_nan
    from regrad.inspection.tools import gradient_path as gradient_path
    from regrad.inspection.tools import saved_bytes as saved_bytes
    from regrad.inspection.tools import trace_gradients as trace_gradients
    from regrad.jax.exporting import Exported as Exported
    from regrad.jax.exporting import eval_shape as eval_shape
    from regrad.jax.exporting import export as export

_PARTS = "extend", "jax", "plot", "testing", "torch", "train", "v1"  # modules imported likewise
_TOOLS = {  # by the module from which they are imported when they are first used
    "Exported": "jax.exporting", "compare_gradients": "inspection.tools",
    "draw": "inspection.tools", "eval_shape": "jax.exporting", "export": "jax.exporting",
    "find_nan": "inspection.tools", "gradient_path": "inspection.tools",
    "saved_bytes": "inspection.tools", "trace_gradients": "inspection.tools",
}  # fmt: skip
_hint_in(*[f"regrad.{part}" for part in ("fft", "linalg", "losses", "nn", "random", "rules")])
variable = Variable
__version__ = "0.1.0"
__array_api_version__ = "2024.12"
# (Without the parts and tools above, which are imported when they are first used.)
__all__ = [
    "Indices", "Module", "RegisterGradient", "Tensor", "Variable", "abs", "acos", "acosh", "add",
    "add_n", "all", "allclose", "any", "arange", "argmax", "argmin", "argsort", "asarray", "asin",
    "asinh", "astype", "at_add", "at_set", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
    "block_until_ready", "bool", "broadcast_arrays", "broadcast_shapes", "broadcast_to", "can_cast",
    "ceil", "checkpoint", "clip", "complex64", "complex128", "concat", "cond", "conj", "copysign",
    "cos", "cosh", "count_nonzero", "cumulative_max", "cumulative_min", "cumulative_prod",
    "cumulative_sum", "custom_grad", "default_dtype", "device_put", "diff", "digamma", "divide",
    "e", "einsum", "empty", "empty_like", "equal", "erf", "erfc", "erfinv", "exp", "expand_dims",
    "expm1", "eye", "fft", "find_op", "finfo", "flip", "float16", "float32", "float64", "floor",
    "floor_divide", "fori_loop", "from_dlpack", "full", "full_like", "gather_nd",
    "get_default_dtype", "grad", "gradient", "gradient_override_map", "grads", "greater",
    "greater_equal", "hessian", "hvp", "hypot", "identity", "iinfo", "imag", "inf", "int8", "int16",
    "int32", "int64", "isclose", "isdtype", "isfinite", "isinf", "isnan", "jacfwd", "jacobian",
    "jacrev", "jit", "jvp", "less", "less_equal", "lgamma", "linalg", "linear_recurrence",
    "linearize", "linspace", "log", "log1p", "log2", "log10", "logaddexp", "logical_and",
    "logical_not", "logical_or", "logical_xor", "logsumexp", "losses", "map", "matmul",
    "matrix_transpose", "max", "maximum", "mean", "median", "meshgrid", "min", "minimum",
    "moveaxis", "multigammaln", "multiply", "nan", "nan_to_num", "negative", "newaxis", "nextafter",
    "nn", "nonzero", "not_differentiable", "not_equal", "one_hot", "ones", "ones_like", "op",
    "op_types", "pad", "permute_dims", "pi", "polygamma", "positive", "pow", "prod", "quantile",
    "random", "real", "reciprocal", "remainder", "repeat", "reshape", "result_type", "roll",
    "round", "rsqrt", "rules", "scalar", "scan", "scatter_nd", "searchsorted", "segment_sum",
    "set_default_dtype", "set_printoptions", "sign", "signbit", "sin", "sinc", "sinh", "slice",
    "sort", "split", "sqrt", "square", "squared_difference", "squeeze", "stack", "std", "step",
    "stop_gradient", "subtract", "sum", "sum_to", "swapaxes", "take", "take_along_axis", "tan",
    "tanh", "tensor", "tensor1d", "tensor2d", "tensor3d", "tensor4d", "tensordot", "tile", "top_k",
    "tree_map", "tril", "triu", "trunc", "uint8", "uint16", "uint32", "uint64", "unique_all",
    "unique_counts", "unique_inverse", "unique_values", "unstack", "value_and_grad",
    "value_and_grads", "var", "variable", "variable_grads", "vecdot", "vjp", "vmap", "where",
    "while_loop", "xdivy", "xlogy", "zeros", "zeros_like",
]  # fmt: skip


if not _typing.TYPE_CHECKING:  # to a type checker a name that is not above is an error

    def __getattr__(name: str) -> object:
        """Import parts when they are first used; say what a misspelt or foreign name is called."""
        from importlib import import_module

        try:
            if name in _PARTS:
                return import_module(f"regrad.{name}")
            if _TOOLS.get(name) == "jax.exporting":
                _needed("jax", "export", f"rg.{name}")
            if name in _TOOLS:
                return getattr(import_module(f"regrad.{_TOOLS[name]}"), name)
        except _MissingPackageError as error:  # so that hasattr(regrad, "jax") says no
            raise _MissingPartError(str(error), obj=__name__) from error
        if name.startswith("__"):  # Python asks for such names, and so does code that looks around
            raise AttributeError(f"module 'regrad' has no attribute {name!r}")
        hint = _of_name(name, [*__all__, *_PARTS, *_TOOLS])
        raise _unknown(f"module 'regrad' has no attribute {name!r}.{hint}", __name__)
