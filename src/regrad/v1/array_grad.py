"""TensorFlow's `array_grad`: gradient functions such as `_ReshapeGrad(op, grad)`, by name."""

from regrad.v1.nn_grad import __dir__ as __dir__
from regrad.v1.nn_grad import __getattr__ as __getattr__
