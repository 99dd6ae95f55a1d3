"""TensorFlow's `array_grad`: gradient functions such as `_ReshapeGrad(op, grad)`, by name."""

from regrad.v1.rule_functions import list_names as __dir__
from regrad.v1.rule_functions import rule_function as __getattr__

__all__ = ["__dir__", "__getattr__"]
