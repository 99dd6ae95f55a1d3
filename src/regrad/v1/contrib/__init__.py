"""`tf.contrib`: layers under the names of `tf.contrib.layers`, and `arg_scope`."""

from regrad.v1.contrib import framework as framework
from regrad.v1.contrib import layers as layers
from regrad.v1.contrib import seq2seq as seq2seq
