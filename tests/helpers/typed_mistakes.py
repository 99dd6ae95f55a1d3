# ruff: noqa: B018
"""What type checkers must refuse (tests/project/test_types.py): each marked line is an error."""

import regrad as rg
import regrad.v1 as tf

x = rg.tensor([1.0, 2.0])


def f(x: rg.Tensor, n: int) -> rg.Tensor:
    return x * n


rg.nosuch(x)  # error: a name that the package lacks
rg.nn.nosuch(x)  # error: a name that a part lacks
x.nosuch()  # error: a method that Tensors lack
x.sum(axes=1)  # error: an option that a method lacks
rg.grad(3)  # error: no function
rg.ones("a")  # error: no shape
rg.sum(x, axes=1)  # error: an option that an op lacks
rg.sin()  # error: too few arguments
rg.sin(x, x)  # error: too many arguments
rg.sin(x).nosuch  # error: of what an op returns
(x * 2).nosuch  # error: of what an operator returns
(x == 2).nosuch  # error: of what a comparison returns
rg.jit(f)(x, "a")  # error: the arguments of a compiled function
rg.jit(f, static_argnames="n")(x, 2).nosuch  # error: its result
rg.vmap(f)(x, "a")  # error: the arguments of a mapped function
rg.checkpoint(f)(x, n="a")  # error: the arguments of a checkpointed function
rg.grad(f, unconnected="nothing")  # error: a choice that grad does not have
rg.grad(f)(x, n=2).nosuch  # error: of a gradient
rg.value_and_grad(f)(x, n=2).nosuch  # error: of the pair of value and gradient
x.shape.nosuch  # error: of a shape
tf.nn.nosuch(x)  # error: a name that a namespace lacks
tf.nn.dynamic_rnn(tf.nn.rnn_cell.GRUCell(3), x, time_majr=True)  # error: an option that it lacks
tf.layers.nosuch(x)  # error: a name that a namespace lacks
