"""Quantizers, and plans that quantize the layers of somebody's model."""

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
