"""Put the methods on Tensor (which is defined before any op exists)."""

from regrad.ops.methods import Methods
from regrad.tensor import Tensor

for _name, _method in vars(Methods).items():
    if _name not in ("__module__", "__doc__", "__slots__", "__dict__", "__weakref__"):
        setattr(Tensor, _name, _method)
