"""`tf.layers`: layers as functions, and as classes."""

from regrad.v1.training.layers import *
