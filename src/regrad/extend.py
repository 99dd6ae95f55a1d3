"""Define ops. A user's op has all the options of regrad's own ops.

An op is a kernel and a rule. This example defines one from scratch. It works on NumPy, JAX and
PyTorch data, in graph mode and under jit, at every order, and overrides find it by its type:
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

* `op`, `elementwise`: make an op from a kernel, or from a row of a table.
* `gradient`, `piecewise_constant`, `not_differentiable`: register its rule; register a rule that
  is zero wherever there is a gradient; or declare that the op has no gradient.
* `shape_of`: define the shapes of its results, for graphs, from the `Spec`s of its inputs. This is
  not needed for an elementwise op. Without it, regrad runs the kernel on small arrays. `differ`
  compares two sizes, which may be unknown until the graph runs.
* `deferrable`, `public`: mark functions that are composed of ops. A `deferrable` function may read
  sizes that are known only in the run. A `public` function raises errors that name its arguments.
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
