"""Neural network functions: activations, normalisation, attention, dropout, embeddings."""

from __future__ import annotations

from regrad.ops.activation import elu as elu
from regrad.ops.activation import gelu as gelu
from regrad.ops.activation import hard_sigmoid as hard_sigmoid
from regrad.ops.activation import hard_tanh as hard_tanh
from regrad.ops.activation import leaky_relu as leaky_relu
from regrad.ops.activation import log_sigmoid as log_sigmoid
from regrad.ops.activation import log_softmax as log_softmax
from regrad.ops.activation import mish as mish
from regrad.ops.activation import prelu as prelu
from regrad.ops.activation import relu as relu
from regrad.ops.activation import relu6 as relu6
from regrad.ops.activation import selu as selu
from regrad.ops.activation import sigmoid as sigmoid
from regrad.ops.activation import silu as silu
from regrad.ops.activation import softmax as softmax
from regrad.ops.activation import softplus as softplus
from regrad.ops.activation import softsign as softsign
from regrad.ops.normalization import batch_norm as batch_norm
from regrad.ops.normalization import l2_normalize as l2_normalize
