"""Define ops: a user's op can say all that the library's own op sheets say.

An op is a kernel and a rule. This makes one out of nothing; it works on NumPy, JAX and PyTorch
data, in graph mode and under jit, at every order, and overrides find it by its type:

>>> import math
>>> import regrad as rg
>>> from regrad.extend import gradient, op
>>> @op("ExtendSinc", elementwise=True, to_float=True)
... def sinc(xp, x: rg.Tensor, /) -> rg.Tensor:
...     pix = math.pi * xp.where(x == 0, 1, x)
...     return xp.where(x == 0, 1, xp.sin(pix) / pix)
>>> @gradient("ExtendSinc")
... def _(dy, x, y):
...     safe = rg.where(x == 0, 1, x)
...     return dy * rg.where(x == 0, 0, (rg.cos(math.pi * x) - y) / safe)
>>> rg.grad(sinc)(0.5)
Tensor(-1.2732396, dtype=float32)

* `op`, `elementwise`: make an op of a kernel, or of a row of a table.
* `gradient`, `piecewise_constant`, `not_differentiable`: give it a rule, one that is zero wherever
  there is a gradient, or say that it has none.
* `shape_of`: say the shapes of its results, for graphs, from the `Spec`s of its inputs, if it is
  not elementwise; otherwise its kernel is tried on small arrays. `differ` compares two sizes, of
  which only the run of a graph may know one.
* `deferrable`, `public`: mark functions that are composed of ops, and ask for sizes, or refuse by
  name what they cannot take.
* `Indices`: the annotation of a tensor of integers in a kernel.
"""

from regrad.deferral import deferrable as deferrable
from regrad.dims import differ as differ
from regrad.inference import Spec as Spec
from regrad.inference import shape_of as shape_of
from regrad.opsheet import Indices as Indices
from regrad.opsheet import elementwise as elementwise
from regrad.opsheet import op as op
from regrad.opsheet import piecewise_constant as piecewise_constant
from regrad.registry import gradient as gradient
from regrad.registry import not_differentiable as not_differentiable
from regrad.signatures import public as public

__all__ = [
    "Indices", "Spec", "deferrable", "differ", "elementwise", "gradient", "not_differentiable",
    "op", "piecewise_constant", "public", "shape_of",
]  # fmt: skip
