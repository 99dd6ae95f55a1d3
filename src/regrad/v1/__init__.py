"""TensorFlow 1's graph mode on regrad's engine: `import regrad.v1 as tf`.

    import regrad.v1 as tf

    x = tf.placeholder(tf.float32, [None])
    with tf.get_default_graph().gradient_override_map({"Sign": "Identity"}):
        y = tf.sign(x)
    with tf.Session() as sess:
        print(sess.run(tf.gradients(y, x), {x: [-0.5, 2.0]}))

Ops, rules and the backward pass are regrad's own: a rule that is in force fires or raises, in
this mode too. docs/tf1.md lists what is covered, and where the meaning differs from
TensorFlow's; a name that is not covered says what to call instead.
"""

from __future__ import annotations

import sys

from regrad.signatures import answer_in
from regrad.v1 import array_grad as array_grad
from regrad.v1 import bitwise as bitwise
from regrad.v1 import control, uncovered
from regrad.v1 import errors as errors
from regrad.v1 import image as image
from regrad.v1 import initializers as initializers
from regrad.v1 import layers as layers
from regrad.v1 import linalg as matrices
from regrad.v1 import losses as losses
from regrad.v1 import math_grad as math_grad
from regrad.v1 import nn as nn
from regrad.v1 import nn_grad as nn_grad
from regrad.v1 import train as train
from regrad.v1.arrays import batch_to_space as batch_to_space
from regrad.v1.arrays import batch_to_space_nd as batch_to_space_nd
from regrad.v1.arrays import broadcast_static_shape as broadcast_static_shape
from regrad.v1.arrays import broadcast_to as broadcast_to
from regrad.v1.arrays import concat as concat
from regrad.v1.arrays import (
    convert_to_tensor_or_indexed_slices as convert_to_tensor_or_indexed_slices,
)
from regrad.v1.arrays import expand_dims as expand_dims
from regrad.v1.arrays import guarantee_const as guarantee_const
from regrad.v1.arrays import identity as identity
from regrad.v1.arrays import identity_n as identity_n
from regrad.v1.arrays import meshgrid as meshgrid
from regrad.v1.arrays import pad as pad
from regrad.v1.arrays import rank as rank
from regrad.v1.arrays import reshape as reshape
from regrad.v1.arrays import reverse as reverse
from regrad.v1.arrays import reverse_v2 as reverse_v2
from regrad.v1.arrays import roll as roll
from regrad.v1.arrays import shape as shape
from regrad.v1.arrays import size as size
from regrad.v1.arrays import space_to_batch as space_to_batch
from regrad.v1.arrays import space_to_batch_nd as space_to_batch_nd
from regrad.v1.arrays import split as split
from regrad.v1.arrays import squeeze as squeeze
from regrad.v1.arrays import stack as stack
from regrad.v1.arrays import stop_gradient as stop_gradient
from regrad.v1.arrays import tile as tile
from regrad.v1.arrays import transpose as transpose
from regrad.v1.arrays import unstack as unstack
from regrad.v1.clipping import clip_by_average_norm as clip_by_average_norm
from regrad.v1.clipping import clip_by_global_norm as clip_by_global_norm
from regrad.v1.clipping import clip_by_norm as clip_by_norm
from regrad.v1.clipping import global_norm as global_norm
from regrad.v1.control import Assert as Assert
from regrad.v1.control import Print as Print
from regrad.v1.control import case as case
from regrad.v1.control import cond as cond
from regrad.v1.control import group as group
from regrad.v1.control import no_op as no_op
from regrad.v1.control import numpy_function as numpy_function
from regrad.v1.control import py_func as py_func
from regrad.v1.control import while_loop as while_loop
from regrad.v1.creation import eye as eye
from regrad.v1.creation import fill as fill
from regrad.v1.creation import lin_space as lin_space
from regrad.v1.creation import linspace as linspace
from regrad.v1.creation import one_hot as one_hot
from regrad.v1.creation import ones as ones
from regrad.v1.creation import ones_like as ones_like
from regrad.v1.creation import range as range
from regrad.v1.creation import sequence_mask as sequence_mask
from regrad.v1.creation import zeros as zeros
from regrad.v1.creation import zeros_like as zeros_like
from regrad.v1.dtypes import DType as DType
from regrad.v1.dtypes import as_dtype as as_dtype
from regrad.v1.dtypes import bool as bool
from regrad.v1.dtypes import complex64 as complex64
from regrad.v1.dtypes import complex128 as complex128
from regrad.v1.dtypes import double as double
from regrad.v1.dtypes import float16 as float16
from regrad.v1.dtypes import float32 as float32
from regrad.v1.dtypes import float64 as float64
from regrad.v1.dtypes import half as half
from regrad.v1.dtypes import int8 as int8
from regrad.v1.dtypes import int16 as int16
from regrad.v1.dtypes import int32 as int32
from regrad.v1.dtypes import int64 as int64
from regrad.v1.dtypes import string as string
from regrad.v1.dtypes import uint8 as uint8
from regrad.v1.dtypes import uint16 as uint16
from regrad.v1.dtypes import uint32 as uint32
from regrad.v1.dtypes import uint64 as uint64
from regrad.v1.gradients import AggregationMethod as AggregationMethod
from regrad.v1.gradients import NotDifferentiable as NotDifferentiable
from regrad.v1.gradients import RegisterGradient as RegisterGradient
from regrad.v1.gradients import UnconnectedGradients as UnconnectedGradients
from regrad.v1.gradients import custom_gradient as custom_gradient
from regrad.v1.gradients import grad_pass_through as grad_pass_through
from regrad.v1.gradients import gradients as gradients
from regrad.v1.gradients import hessians as hessians
from regrad.v1.graphs import Graph as Graph
from regrad.v1.graphs import GraphKeys as GraphKeys
from regrad.v1.graphs import add_to_collection as add_to_collection
from regrad.v1.graphs import control_dependencies as control_dependencies
from regrad.v1.graphs import device as device
from regrad.v1.graphs import get_collection as get_collection
from regrad.v1.graphs import get_collection_ref as get_collection_ref
from regrad.v1.graphs import get_default_graph as get_default_graph
from regrad.v1.graphs import name_scope as name_scope
from regrad.v1.graphs import reset_default_graph as reset_default_graph
from regrad.v1.indexing import batch_gather as batch_gather
from regrad.v1.indexing import boolean_mask as boolean_mask
from regrad.v1.indexing import confusion_matrix as confusion_matrix
from regrad.v1.indexing import gather as gather
from regrad.v1.indexing import gather_nd as gather_nd
from regrad.v1.indexing import scatter_nd as scatter_nd
from regrad.v1.indexing import slice as slice
from regrad.v1.indexing import strided_slice as strided_slice
from regrad.v1.indexing import tensor_scatter_update as tensor_scatter_update
from regrad.v1.indexing import unique as unique
from regrad.v1.initializers import constant_initializer as constant_initializer
from regrad.v1.initializers import glorot_normal_initializer as glorot_normal_initializer
from regrad.v1.initializers import glorot_uniform_initializer as glorot_uniform_initializer
from regrad.v1.initializers import ones_initializer as ones_initializer
from regrad.v1.initializers import orthogonal_initializer as orthogonal_initializer
from regrad.v1.initializers import random_normal_initializer as random_normal_initializer
from regrad.v1.initializers import random_uniform_initializer as random_uniform_initializer
from regrad.v1.initializers import truncated_normal_initializer as truncated_normal_initializer
from regrad.v1.initializers import (
    uniform_unit_scaling_initializer as uniform_unit_scaling_initializer,
)
from regrad.v1.initializers import variance_scaling_initializer as variance_scaling_initializer
from regrad.v1.initializers import zeros_initializer as zeros_initializer
from regrad.v1.linalg import cholesky as cholesky
from regrad.v1.linalg import cholesky_solve as cholesky_solve
from regrad.v1.linalg import cross as cross
from regrad.v1.linalg import einsum as einsum
from regrad.v1.linalg import matmul as matmul
from regrad.v1.linalg import matrix_band_part as matrix_band_part
from regrad.v1.linalg import matrix_determinant as matrix_determinant
from regrad.v1.linalg import matrix_diag as matrix_diag
from regrad.v1.linalg import matrix_diag_part as matrix_diag_part
from regrad.v1.linalg import matrix_inverse as matrix_inverse
from regrad.v1.linalg import matrix_set_diag as matrix_set_diag
from regrad.v1.linalg import matrix_solve as matrix_solve
from regrad.v1.linalg import matrix_transpose as matrix_transpose
from regrad.v1.linalg import matrix_triangular_solve as matrix_triangular_solve
from regrad.v1.linalg import norm as norm
from regrad.v1.linalg import qr as qr
from regrad.v1.linalg import self_adjoint_eig as self_adjoint_eig
from regrad.v1.linalg import self_adjoint_eigvals as self_adjoint_eigvals
from regrad.v1.linalg import svd as svd
from regrad.v1.linalg import tensordot as tensordot
from regrad.v1.linalg import trace as trace
from regrad.v1.math import abs as abs
from regrad.v1.math import accumulate_n as accumulate_n
from regrad.v1.math import acos as acos
from regrad.v1.math import acosh as acosh
from regrad.v1.math import add as add
from regrad.v1.math import add_n as add_n
from regrad.v1.math import angle as angle
from regrad.v1.math import asin as asin
from regrad.v1.math import asinh as asinh
from regrad.v1.math import atan as atan
from regrad.v1.math import atan2 as atan2
from regrad.v1.math import atanh as atanh
from regrad.v1.math import cast as cast
from regrad.v1.math import ceil as ceil
from regrad.v1.math import clip_by_value as clip_by_value
from regrad.v1.math import complex as complex
from regrad.v1.math import conj as conj
from regrad.v1.math import cos as cos
from regrad.v1.math import cosh as cosh
from regrad.v1.math import digamma as digamma
from regrad.v1.math import div as div
from regrad.v1.math import div_no_nan as div_no_nan
from regrad.v1.math import divide as divide
from regrad.v1.math import equal as equal
from regrad.v1.math import erf as erf
from regrad.v1.math import erfc as erfc
from regrad.v1.math import exp as exp
from regrad.v1.math import expm1 as expm1
from regrad.v1.math import floor as floor
from regrad.v1.math import floor_div as floor_div
from regrad.v1.math import floordiv as floordiv
from regrad.v1.math import floormod as floormod
from regrad.v1.math import greater as greater
from regrad.v1.math import greater_equal as greater_equal
from regrad.v1.math import imag as imag
from regrad.v1.math import is_finite as is_finite
from regrad.v1.math import is_inf as is_inf
from regrad.v1.math import is_nan as is_nan
from regrad.v1.math import less as less
from regrad.v1.math import less_equal as less_equal
from regrad.v1.math import lgamma as lgamma
from regrad.v1.math import log as log
from regrad.v1.math import log1p as log1p
from regrad.v1.math import log_sigmoid as log_sigmoid
from regrad.v1.math import logical_and as logical_and
from regrad.v1.math import logical_not as logical_not
from regrad.v1.math import logical_or as logical_or
from regrad.v1.math import logical_xor as logical_xor
from regrad.v1.math import maximum as maximum
from regrad.v1.math import minimum as minimum
from regrad.v1.math import mod as mod
from regrad.v1.math import multiply as multiply
from regrad.v1.math import negative as negative
from regrad.v1.math import not_equal as not_equal
from regrad.v1.math import pow as pow
from regrad.v1.math import real as real
from regrad.v1.math import realdiv as realdiv
from regrad.v1.math import reciprocal as reciprocal
from regrad.v1.math import rint as rint
from regrad.v1.math import round as round
from regrad.v1.math import rsqrt as rsqrt
from regrad.v1.math import saturate_cast as saturate_cast
from regrad.v1.math import scalar_mul as scalar_mul
from regrad.v1.math import sigmoid as sigmoid
from regrad.v1.math import sign as sign
from regrad.v1.math import sin as sin
from regrad.v1.math import sinh as sinh
from regrad.v1.math import sqrt as sqrt
from regrad.v1.math import square as square
from regrad.v1.math import squared_difference as squared_difference
from regrad.v1.math import subtract as subtract
from regrad.v1.math import tan as tan
from regrad.v1.math import tanh as tanh
from regrad.v1.math import to_complex64 as to_complex64
from regrad.v1.math import to_complex128 as to_complex128
from regrad.v1.math import to_double as to_double
from regrad.v1.math import to_float as to_float
from regrad.v1.math import to_int32 as to_int32
from regrad.v1.math import to_int64 as to_int64
from regrad.v1.math import truediv as truediv
from regrad.v1.math import truncatediv as truncatediv
from regrad.v1.math import truncatemod as truncatemod
from regrad.v1.math import where as where
from regrad.v1.namespaces import disable_eager_execution as disable_eager_execution
from regrad.v1.namespaces import disable_v2_behavior as disable_v2_behavior
from regrad.v1.namespaces import executing_eagerly as executing_eagerly
from regrad.v1.namespaces import get_static_value as get_static_value
from regrad.v1.namespaces import linalg as linalg
from regrad.v1.namespaces import logging as logging
from regrad.v1.namespaces import math as math
from regrad.v1.namespaces import placeholder as placeholder
from regrad.v1.namespaces import placeholder_with_default as placeholder_with_default
from regrad.v1.namespaces import random as random
from regrad.v1.random_ops import multinomial as multinomial
from regrad.v1.random_ops import random_crop as random_crop
from regrad.v1.random_ops import random_normal as random_normal
from regrad.v1.random_ops import random_shuffle as random_shuffle
from regrad.v1.random_ops import random_uniform as random_uniform
from regrad.v1.random_ops import set_random_seed as set_random_seed
from regrad.v1.random_ops import truncated_normal as truncated_normal
from regrad.v1.reductions import argmax as argmax
from regrad.v1.reductions import argmin as argmin
from regrad.v1.reductions import argsort as argsort
from regrad.v1.reductions import count_nonzero as count_nonzero
from regrad.v1.reductions import cumprod as cumprod
from regrad.v1.reductions import cumsum as cumsum
from regrad.v1.reductions import invert_permutation as invert_permutation
from regrad.v1.reductions import reduce_all as reduce_all
from regrad.v1.reductions import reduce_any as reduce_any
from regrad.v1.reductions import reduce_logsumexp as reduce_logsumexp
from regrad.v1.reductions import reduce_max as reduce_max
from regrad.v1.reductions import reduce_mean as reduce_mean
from regrad.v1.reductions import reduce_min as reduce_min
from regrad.v1.reductions import reduce_prod as reduce_prod
from regrad.v1.reductions import reduce_sum as reduce_sum
from regrad.v1.reductions import segment_mean as segment_mean
from regrad.v1.reductions import segment_sum as segment_sum
from regrad.v1.reductions import sort as sort
from regrad.v1.reductions import unsorted_segment_sum as unsorted_segment_sum
from regrad.v1.session import ConfigProto as ConfigProto
from regrad.v1.session import GPUOptions as GPUOptions
from regrad.v1.session import InteractiveSession as InteractiveSession
from regrad.v1.session import RunMetadata as RunMetadata
from regrad.v1.session import RunOptions as RunOptions
from regrad.v1.session import Session as Session
from regrad.v1.session import get_default_session as get_default_session
from regrad.v1.static_shapes import Dimension as Dimension
from regrad.v1.static_shapes import TensorShape as TensorShape
from regrad.v1.tensors import IndexedSlices as IndexedSlices
from regrad.v1.tensors import Operation as Operation
from regrad.v1.tensors import Tensor as Tensor
from regrad.v1.tensors import constant as constant
from regrad.v1.tensors import convert_to_tensor as convert_to_tensor
from regrad.v1.variable_scopes import AUTO_REUSE as AUTO_REUSE
from regrad.v1.variable_scopes import VariableScope as VariableScope
from regrad.v1.variable_scopes import get_variable as get_variable
from regrad.v1.variable_scopes import get_variable_scope as get_variable_scope
from regrad.v1.variable_scopes import no_regularizer as no_regularizer
from regrad.v1.variable_scopes import variable_op_scope as variable_op_scope
from regrad.v1.variable_scopes import variable_scope as variable_scope
from regrad.v1.variables import Variable as Variable
from regrad.v1.variables import all_variables as all_variables
from regrad.v1.variables import assign as assign
from regrad.v1.variables import assign_add as assign_add
from regrad.v1.variables import assign_sub as assign_sub
from regrad.v1.variables import global_variables as global_variables
from regrad.v1.variables import global_variables_initializer as global_variables_initializer
from regrad.v1.variables import initialize_all_variables as initialize_all_variables
from regrad.v1.variables import is_variable_initialized as is_variable_initialized
from regrad.v1.variables import local_variables as local_variables
from regrad.v1.variables import local_variables_initializer as local_variables_initializer
from regrad.v1.variables import model_variables as model_variables
from regrad.v1.variables import trainable_variables as trainable_variables
from regrad.v1.variables import variables_initializer as variables_initializer

# names that stand for others, older ones among them
tuple = control.tuple_
newaxis = None
diag, diag_part = matrices.tensor_diag, matrices.tensor_diag_part
NoGradient = no_gradient = NotDifferentiable
mul, sub, neg = multiply, subtract, negative
arg_max, arg_min = argmax, argmin

compat = sys.modules[__name__]
v1 = sys.modules[__name__]  # tf.compat.v1
__version__ = "1.15"


for _module, _label in (
    (sys.modules[__name__], "tf"),
    (image, "tf.image"),
    (initializers, "tf.initializers"),
    (layers, "tf.layers"),
    (losses, "tf.losses"),
    (linalg, "tf.linalg"),
    (math, "tf.math"),
    (nn, "tf.nn"),
    (random, "tf.random"),
    (train, "tf.train"),
):
    answer_in(_module)
    uncovered.refuse_in(_module, _label)
