"""`tf.nn`: activations, losses, convolutions and recurrent networks."""

from regrad.v1.functions.convolution import *
from regrad.v1.functions.nn import *
from regrad.v1.training import rnn_cell as rnn_cell
from regrad.v1.training.rnn import *
