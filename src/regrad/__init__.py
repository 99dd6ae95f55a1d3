"""regrad: a differentiable tensor library in which every gradient is yours."""

import numpy as _np

from regrad.custom import custom_grad as custom_grad
from regrad.gradients import grad as grad
from regrad.gradients import grads as grads
from regrad.gradients import value_and_grad as value_and_grad
from regrad.gradients import value_and_grads as value_and_grads
from regrad.gradients import variable_grads as variable_grads
from regrad.ops import install as _install
from regrad.ops.array import *
from regrad.ops.creation import *
from regrad.ops.elementwise import *
from regrad.ops.reduction import *
from regrad.opsheet import op as op
from regrad.overrides import gradient_override_map as gradient_override_map
from regrad.registry import RegisterGradient as RegisterGradient
from regrad.registry import find_op as find_op
from regrad.registry import gradient as gradient
from regrad.registry import op_types as op_types
from regrad.tensor import Tensor as Tensor
from regrad.variable import Variable as Variable

float32 = _np.dtype("float32")
float64 = _np.dtype("float64")
int64 = _np.dtype("int64")
