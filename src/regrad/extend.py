"""Define ops: a user's op can say all that the library's own op sheets say.

An op is a kernel and a rule. This makes one out of nothing; it works on NumPy, JAX and PyTorch
data, in graph mode and under jit, at every order, and overrides find it by its type:

>>> import regrad as rg
>>> from regrad.extend import gradient, op
>>> @op("ExtendEntr", elementwise=True, to_float=True, real=True)
... def entr(xp, x: rg.Tensor, /) -> rg.Tensor:
...     return -x * xp.log(x)
>>> @gradient("ExtendEntr")
... def _(dy, x):
...     return dy * (-1 - rg.log(x))
>>> rg.grad(entr)(1.0)
Tensor(-1., dtype=float32)

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

from regrad.core.dims import differ
from regrad.core.op import Indices, elementwise, op, piecewise_constant
from regrad.core.registry import gradient, not_differentiable
from regrad.core.signatures import public
from regrad.graph.deferred import deferrable
from regrad.shapes.infer import Spec, shape_of

__all__ = [
    "Indices", "Spec", "deferrable", "differ", "elementwise", "gradient", "not_differentiable",
    "op", "piecewise_constant", "public", "shape_of",
]  # fmt: skip
