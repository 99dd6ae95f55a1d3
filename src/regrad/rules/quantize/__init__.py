"""Quantizers, and plans that quantize the layers of an unedited model.

A quantizer is data: `Q.lsq(4, per="channel")`. It can be called with arrays of regrad, PyTorch and
JAX, `Q.lsq(4)(v, step)`, and it can be part of a plan, `Q.layers(weights=Q.lsq(4))`. A plan makes a
map of rules for an unedited model, and the trainable arrays of its quantizers.

Conventions of different libraries lead to gradients that differ by half and more. Each quantizer
documents its own convention, and offers other common conventions as options: whether to clip before
or after rounding (`clip=`), whether the scale has a gradient (`scale_gradient=`), which code the
largest magnitude gets (`largest=`), and the factor of the gradient of a step (`gradient_scale=`).

`rounding` has the arithmetic, `formats` the tables of numbers, `quantizers` the formulas, `plans`
the selection of layers, `layers_of_hosts` the common code for layers of all libraries, and `ours`
the layers of regrad (`regrad.torch.quantizing` and `regrad.jax.quantizing` have the layers of
PyTorch and JAX).

>>> import regrad as rg
>>> from regrad.rules import quantize as Q
>>> Q.affine(4)(rg.tensor([-1.0, 0.26, 0.7])).print()
Tensor
    [-1, 0.2857143, 0.7142857]
"""

from __future__ import annotations

from regrad.rules.quantize.plans import Plan as Plan
from regrad.rules.quantize.plans import dequantize as dequantize
from regrad.rules.quantize.plans import layers as layers
from regrad.rules.quantize.quantizers import Quantizer as Quantizer
from regrad.rules.quantize.quantizers import absmax as absmax
from regrad.rules.quantize.quantizers import absmean as absmean
from regrad.rules.quantize.quantizers import adaround as adaround
from regrad.rules.quantize.quantizers import affine as affine
from regrad.rules.quantize.quantizers import dorefa as dorefa
from regrad.rules.quantize.quantizers import ewgs as ewgs
from regrad.rules.quantize.quantizers import fp8 as fp8
from regrad.rules.quantize.quantizers import levels as levels
from regrad.rules.quantize.quantizers import lsq as lsq
from regrad.rules.quantize.quantizers import lsq_plus as lsq_plus
from regrad.rules.quantize.quantizers import mx as mx
from regrad.rules.quantize.quantizers import nf4 as nf4
from regrad.rules.quantize.quantizers import nvfp4 as nvfp4
from regrad.rules.quantize.quantizers import pact as pact
from regrad.rules.quantize.quantizers import power_of_two as power_of_two
from regrad.rules.quantize.quantizers import sign as sign
from regrad.rules.quantize.quantizers import stochastic as stochastic
from regrad.rules.quantize.quantizers import ternary as ternary
