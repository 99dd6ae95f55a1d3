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
from typing import Any

from regrad.v1 import bitwise as bitwise
from regrad.v1 import errors as errors
from regrad.v1 import image as image
from regrad.v1 import initializers as initializers
from regrad.v1 import layers as layers
from regrad.v1 import losses as losses
from regrad.v1 import nn as nn
from regrad.v1 import train as train
from regrad.v1 import uncovered
from regrad.v1.arrays import (
    batch_to_space as batch_to_space,
    batch_to_space_nd as batch_to_space_nd,
    broadcast_static_shape as broadcast_static_shape,
    broadcast_to as broadcast_to,
    concat as concat,
    convert_to_tensor_or_indexed_slices as convert_to_tensor_or_indexed_slices,
    expand_dims as expand_dims,
    guarantee_const as guarantee_const,
    identity as identity,
    identity_n as identity_n,
    meshgrid as meshgrid,
    pad as pad,
    rank as rank,
    reshape as reshape,
    reverse as reverse,
    reverse_v2 as reverse_v2,
    roll as roll,
    shape as shape,
    size as size,
    space_to_batch as space_to_batch,
    space_to_batch_nd as space_to_batch_nd,
    split as split,
    squeeze as squeeze,
    stack as stack,
    stop_gradient as stop_gradient,
    tile as tile,
    transpose as transpose,
    unstack as unstack,
)
from regrad.v1.clipping import (
    clip_by_average_norm as clip_by_average_norm,
    clip_by_global_norm as clip_by_global_norm,
    clip_by_norm as clip_by_norm,
    global_norm as global_norm,
)
from regrad.v1.control import (
    Assert as Assert,
    Print as Print,
    case as case,
    cond as cond,
    group as group,
    no_op as no_op,
    numpy_function as numpy_function,
    py_func as py_func,
    while_loop as while_loop,
)
from regrad.v1.creation import (
    eye as eye,
    fill as fill,
    lin_space as lin_space,
    linspace as linspace,
    one_hot as one_hot,
    ones as ones,
    ones_like as ones_like,
    range as range,
    sequence_mask as sequence_mask,
    zeros as zeros,
    zeros_like as zeros_like,
)
from regrad.v1.dtypes import (
    DType as DType,
    as_dtype as as_dtype,
    bool as bool,
    complex128 as complex128,
    complex64 as complex64,
    double as double,
    float16 as float16,
    float32 as float32,
    float64 as float64,
    half as half,
    int16 as int16,
    int32 as int32,
    int64 as int64,
    int8 as int8,
    string as string,
    uint16 as uint16,
    uint32 as uint32,
    uint64 as uint64,
    uint8 as uint8,
)
from regrad.v1.gradients import (
    AggregationMethod as AggregationMethod,
    NotDifferentiable as NotDifferentiable,
    RegisterGradient as RegisterGradient,
    UnconnectedGradients as UnconnectedGradients,
    custom_gradient as custom_gradient,
    grad_pass_through as grad_pass_through,
    gradients as gradients,
    hessians as hessians,
)
from regrad.v1.graphs import (
    Graph as Graph,
    GraphKeys as GraphKeys,
    add_to_collection as add_to_collection,
    control_dependencies as control_dependencies,
    device as device,
    get_collection as get_collection,
    get_collection_ref as get_collection_ref,
    get_default_graph as get_default_graph,
    name_scope as name_scope,
    reset_default_graph as reset_default_graph,
)
from regrad.v1.indexing import (
    batch_gather as batch_gather,
    boolean_mask as boolean_mask,
    confusion_matrix as confusion_matrix,
    gather as gather,
    gather_nd as gather_nd,
    scatter_nd as scatter_nd,
    slice as slice,
    strided_slice as strided_slice,
    tensor_scatter_update as tensor_scatter_update,
    unique as unique,
)
from regrad.v1.initializers import (
    constant_initializer as constant_initializer,
    glorot_normal_initializer as glorot_normal_initializer,
    glorot_uniform_initializer as glorot_uniform_initializer,
    ones_initializer as ones_initializer,
    orthogonal_initializer as orthogonal_initializer,
    random_normal_initializer as random_normal_initializer,
    random_uniform_initializer as random_uniform_initializer,
    truncated_normal_initializer as truncated_normal_initializer,
    uniform_unit_scaling_initializer as uniform_unit_scaling_initializer,
    variance_scaling_initializer as variance_scaling_initializer,
    zeros_initializer as zeros_initializer,
)
from regrad.v1.linalg import (
    cholesky as cholesky,
    cholesky_solve as cholesky_solve,
    cross as cross,
    einsum as einsum,
    matmul as matmul,
    matrix_band_part as matrix_band_part,
    matrix_determinant as matrix_determinant,
    matrix_diag as matrix_diag,
    matrix_diag_part as matrix_diag_part,
    matrix_inverse as matrix_inverse,
    matrix_set_diag as matrix_set_diag,
    matrix_solve as matrix_solve,
    matrix_transpose as matrix_transpose,
    matrix_triangular_solve as matrix_triangular_solve,
    norm as norm,
    qr as qr,
    self_adjoint_eig as self_adjoint_eig,
    self_adjoint_eigvals as self_adjoint_eigvals,
    svd as svd,
    tensordot as tensordot,
    trace as trace,
)
from regrad.v1.math import (
    abs as abs,
    accumulate_n as accumulate_n,
    acos as acos,
    acosh as acosh,
    add as add,
    add_n as add_n,
    angle as angle,
    asin as asin,
    asinh as asinh,
    atan as atan,
    atan2 as atan2,
    atanh as atanh,
    cast as cast,
    ceil as ceil,
    clip_by_value as clip_by_value,
    complex as complex,
    conj as conj,
    cos as cos,
    cosh as cosh,
    digamma as digamma,
    div as div,
    div_no_nan as div_no_nan,
    divide as divide,
    equal as equal,
    erf as erf,
    erfc as erfc,
    exp as exp,
    expm1 as expm1,
    floor as floor,
    floor_div as floor_div,
    floordiv as floordiv,
    floormod as floormod,
    greater as greater,
    greater_equal as greater_equal,
    imag as imag,
    is_finite as is_finite,
    is_inf as is_inf,
    is_nan as is_nan,
    less as less,
    less_equal as less_equal,
    lgamma as lgamma,
    log as log,
    log1p as log1p,
    log_sigmoid as log_sigmoid,
    logical_and as logical_and,
    logical_not as logical_not,
    logical_or as logical_or,
    logical_xor as logical_xor,
    maximum as maximum,
    minimum as minimum,
    mod as mod,
    multiply as multiply,
    negative as negative,
    not_equal as not_equal,
    pow as pow,
    real as real,
    realdiv as realdiv,
    reciprocal as reciprocal,
    rint as rint,
    round as round,
    rsqrt as rsqrt,
    saturate_cast as saturate_cast,
    scalar_mul as scalar_mul,
    sigmoid as sigmoid,
    sign as sign,
    sin as sin,
    sinh as sinh,
    sqrt as sqrt,
    square as square,
    squared_difference as squared_difference,
    subtract as subtract,
    tan as tan,
    tanh as tanh,
    to_complex128 as to_complex128,
    to_complex64 as to_complex64,
    to_double as to_double,
    to_float as to_float,
    to_int32 as to_int32,
    to_int64 as to_int64,
    truediv as truediv,
    truncatediv as truncatediv,
    truncatemod as truncatemod,
    where as where,
)
from regrad.v1.namespaces import (
    disable_eager_execution as disable_eager_execution,
    disable_v2_behavior as disable_v2_behavior,
    executing_eagerly as executing_eagerly,
    get_static_value as get_static_value,
    logging as logging,
    placeholder as placeholder,
    placeholder_with_default as placeholder_with_default,
    random as random,
)
from regrad.v1.random_ops import (
    multinomial as multinomial,
    random_crop as random_crop,
    random_normal as random_normal,
    random_shuffle as random_shuffle,
    random_uniform as random_uniform,
    set_random_seed as set_random_seed,
    truncated_normal as truncated_normal,
)
from regrad.v1.reductions import (
    argmax as argmax,
    argmin as argmin,
    argsort as argsort,
    count_nonzero as count_nonzero,
    cumprod as cumprod,
    cumsum as cumsum,
    invert_permutation as invert_permutation,
    reduce_all as reduce_all,
    reduce_any as reduce_any,
    reduce_logsumexp as reduce_logsumexp,
    reduce_max as reduce_max,
    reduce_mean as reduce_mean,
    reduce_min as reduce_min,
    reduce_prod as reduce_prod,
    reduce_sum as reduce_sum,
    segment_mean as segment_mean,
    segment_sum as segment_sum,
    sort as sort,
    unsorted_segment_sum as unsorted_segment_sum,
)
from regrad.v1.session import (
    ConfigProto as ConfigProto,
    GPUOptions as GPUOptions,
    InteractiveSession as InteractiveSession,
    RunMetadata as RunMetadata,
    RunOptions as RunOptions,
    Session as Session,
    get_default_session as get_default_session,
)
from regrad.v1.static_shapes import (
    Dimension as Dimension,
    TensorShape as TensorShape,
)
from regrad.v1.tensors import (
    IndexedSlices as IndexedSlices,
    Operation as Operation,
    Tensor as Tensor,
    constant as constant,
    convert_to_tensor as convert_to_tensor,
)
from regrad.v1.variable_scopes import (
    AUTO_REUSE as AUTO_REUSE,
    VariableScope as VariableScope,
    get_variable as get_variable,
    get_variable_scope as get_variable_scope,
    no_regularizer as no_regularizer,
    variable_op_scope as variable_op_scope,
    variable_scope as variable_scope,
)
from regrad.v1.variables import (
    Variable as Variable,
    all_variables as all_variables,
    assign as assign,
    assign_add as assign_add,
    assign_sub as assign_sub,
    global_variables as global_variables,
    global_variables_initializer as global_variables_initializer,
    initialize_all_variables as initialize_all_variables,
    is_variable_initialized as is_variable_initialized,
    local_variables as local_variables,
    local_variables_initializer as local_variables_initializer,
    model_variables as model_variables,
    trainable_variables as trainable_variables,
    variables_initializer as variables_initializer,
)
from regrad.v1.control import tuple_ as tuple
from regrad.v1.namespaces import linalg as linalg
from regrad.v1.namespaces import math as math

# older and newer names of the same
Dimension = Dimension
NoGradient = no_gradient = NotDifferentiable
mul, sub, neg, matrix_transpose = multiply, subtract, negative, matrix_transpose
arg_max, arg_min = argmax, argmin
diag, diag_part = matrix_diag, matrix_diag_part

compat = sys.modules[__name__]
v1 = sys.modules[__name__]  # tf.compat.v1
__version__ = "1.15"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    uncovered.refuse("tf", name, [n for n in globals() if not n.startswith("_")])
