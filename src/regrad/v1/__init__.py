"""TensorFlow 1's graph mode on regrad's engine: `import regrad.v1 as tf`.

    import regrad.v1 as tf

    x = tf.placeholder(tf.float32, [None])
    with tf.get_default_graph().gradient_override_map({"Sign": "Identity"}):
        y = tf.sign(x)
    with tf.Session() as sess:
        print(sess.run(tf.gradients(y, x), {x: [-0.5, 2.0]}))

Ops, rules and the backward pass are regrad's own. An active rule fires or raises, in this mode
too. docs/tf1.md lists the covered names and the differences from TensorFlow. Accessing a name
that is not covered raises an AttributeError that names the function to call instead.
"""

from __future__ import annotations

import sys

from regrad.core.signatures import answer_in as _answer_in
from regrad.v1 import app as app
from regrad.v1 import array_grad as array_grad
from regrad.v1 import contrib as contrib
from regrad.v1 import errors as errors
from regrad.v1 import layers as layers
from regrad.v1 import math_grad as math_grad
from regrad.v1 import metrics as metrics
from regrad.v1 import nn as nn
from regrad.v1 import nn_grad as nn_grad
from regrad.v1 import summary as summary
from regrad.v1 import train as train
from regrad.v1 import uncovered
from regrad.v1.dtypes import *
from regrad.v1.functions import bitwise as bitwise
from regrad.v1.functions import image as image
from regrad.v1.functions import linalg as matrices
from regrad.v1.functions import losses as losses
from regrad.v1.functions import operators as _operators  # noqa: F401 (sets operators)
from regrad.v1.functions.arrays import *
from regrad.v1.functions.checks import *
from regrad.v1.functions.clipping import *
from regrad.v1.functions.creation import *
from regrad.v1.functions.indexing import *
from regrad.v1.functions.linalg import *
from regrad.v1.functions.loops import *
from regrad.v1.functions.math import *
from regrad.v1.functions.random_ops import *
from regrad.v1.functions.reductions import *
from regrad.v1.graph import control
from regrad.v1.graph.control import *
from regrad.v1.graph.conversion import *
from regrad.v1.graph.gradients import *
from regrad.v1.graph.graphs import *
from regrad.v1.graph.python_ops import *
from regrad.v1.graph.row_docs import WRITTEN_OUT as _WRITTEN_OUT
from regrad.v1.graph.static_shapes import *
from regrad.v1.graph.tensors import *
from regrad.v1.graph.tracing import *
from regrad.v1.graph.variables import *
from regrad.v1.namespaces import *
from regrad.v1.programs.install import *
from regrad.v1.run.session import *
from regrad.v1.training import initializers as initializers
from regrad.v1.training.initializers import *
from regrad.v1.training.variable_scopes import *

# Aliases, including deprecated names.
tuple = control.tuple_
newaxis = None
diag, diag_part = matrices.tensor_diag, matrices.tensor_diag_part
NoGradient = no_gradient = NotDifferentiable
mul, sub, neg = multiply, subtract, negative
pack, unpack = stack, unstack
flags = app.flags
arg_max, arg_min = argmax, argmin

compat = v1 = sys.modules[__name__]  # tf.compat.v1
__version__ = "1.15"


for _module in (
    app, bitwise, contrib, contrib.framework, contrib.layers, contrib.seq2seq, flags, image,
    initializers, layers, losses, linalg, math, metrics, nn, nn.rnn_cell, random, signal, spectral,
    summary, train, v1,
):  # fmt: skip
    _answer_in(_module, _WRITTEN_OUT)
    uncovered.refuse_in(_module)
