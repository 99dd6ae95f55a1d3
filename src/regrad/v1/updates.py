"""The ops by which optimizers change variables, one for each formula.

An op reads a variable and its slots (the variables that an optimizer keeps for it), and writes
their new values, all in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from regrad import dims
from regrad.graph import NO_RULE, Node
from regrad.inference import Spec
from regrad.registry import OPS, Input, Op
from regrad.v1.errors import InvalidArgumentError
from regrad.v1.graphs import current_graph
from regrad.v1.tensors import Tensor, face
from regrad.v1.variables import Variable, _read

# -- the formulas --------------------------------------------------------------------------------
# A formula takes the namespace of the arrays, the old values of a variable and of its slots, then
# numbers, and the gradient, and returns the new values. The names and their order are those of
# TensorFlow's ops.


def apply_op(type: str, states: int) -> Callable[[Callable[..., Any]], Op]:
    """Make a formula an op, whose first so many inputs are variables."""

    def make(formula: Callable[..., Any]) -> Op:
        code = formula.__code__
        names = code.co_varnames[1 : code.co_argcount]
        inputs = [Input(name, "one") for name in names] + [Input("indices", "many")]
        options = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
        kernel = _kernel(formula, states, names.index("grad"))
        op = Op(type, type, kernel, inputs, ["keys", *options], stateful=True)
        op.rule = NO_RULE
        return OPS.setdefault(type, op)

    return make


def _kernel(formula: Callable[..., Any], states: int, grad: int) -> Callable[..., Any]:
    """The formula on the variables of a run; with indices, on those rows alone."""

    def kernel(run: Any, *xs: Any, keys: Sequence[str], **options: Any) -> Any:
        *args, indices = xs
        old = args[:states] = [_read(run, None, key) for key in keys]
        if np.shape(args[grad]) != old[0].shape:
            raise InvalidArgumentError(
                f"the gradient for {keys[0]!r} has the shape {np.shape(args[grad])}, due is that "
                f"of the variable, {old[0].shape}"
            )
        if not indices:
            new = formula(run.xp, *args, **options)
        elif run.xp is np:
            new = _on_rows(formula, old, args, grad, indices, options)
        else:
            new = _masked(run.xp, formula(run.xp, *args, **options), old, indices)
        first, *_ = [run.write(key, value) for key, value in zip(keys, new, strict=True)]
        return first

    return kernel


def _on_rows(
    formula: Callable[..., Any], old: Any, args: Any, grad: int, indices: Any, options: Any
) -> list[Any]:
    rows = np.unique(np.concatenate([np.ravel(i) for i in indices]))
    args[: len(old)] = [value[rows] for value in old]
    args[grad] = args[grad][rows]
    new = [value.copy() for value in old]
    for value, part in zip(new, formula(np, *args, **options), strict=True):
        value[rows] = part
    return new


def _masked(xp: Any, new: Sequence[Any], old: Sequence[Any], indices: Sequence[Any]) -> list[Any]:
    """New values in the rows of the indices alone, where their number must not depend on values."""
    rows = xp.concatenate([xp.ravel(i) for i in indices])
    touched = xp.zeros(old[0].shape[0], bool).at[rows].set(True)
    masks = [xp.expand_dims(touched, tuple(range(1, value.ndim))) for value in old]
    return [xp.where(m, n, o) for m, n, o in zip(masks, new, old, strict=True)]


@apply_op("ApplyGradientDescent", 1)
def GRADIENT_DESCENT(xp, var, alpha, grad):
    """`var -= alpha * grad`."""
    return (var - alpha * grad,)


@apply_op("ApplyMomentum", 2)
def MOMENTUM(xp, var, accum, lr, grad, momentum, *, use_nesterov):
    """The gradients so far, each smaller by `momentum` per step, are the step."""
    accum = accum * momentum + grad
    return var - lr * (grad + momentum * accum if use_nesterov else accum), accum


@apply_op("ApplyAdagrad", 2)
def ADAGRAD(xp, var, accum, lr, grad):
    """The gradient over the root of the sum of its squares."""
    accum = accum + grad * grad
    return var - lr * grad / xp.sqrt(accum), accum


@apply_op("ApplyAdadelta", 3)
def ADADELTA(xp, var, accum, accum_update, lr, rho, epsilon, grad):
    """The gradient, scaled by the steps so far over the gradients so far."""
    accum = rho * accum + (1 - rho) * grad * grad
    step = xp.sqrt(accum_update + epsilon) / xp.sqrt(accum + epsilon) * grad
    return var - lr * step, accum, rho * accum_update + (1 - rho) * step * step


@apply_op("ApplyAdam", 3)
def ADAM(xp, var, m, v, beta1_power, beta2_power, lr, beta1, beta2, epsilon, grad):
    """The mean gradient over the root of the mean square, both freed of bias."""
    rate = lr * xp.sqrt(1 - beta2_power) / (1 - beta1_power)
    m = m + (grad - m) * (1 - beta1)
    v = v + (grad * grad - v) * (1 - beta2)
    return var - rate * m / (xp.sqrt(v) + epsilon), m, v


@apply_op("ApplyRMSProp", 3)
def RMSPROP(xp, var, ms, mom, lr, rho, momentum, epsilon, grad):
    """The gradient over the root of its mean square."""
    ms = ms + (grad * grad - ms) * (1 - rho)
    mom = momentum * mom + lr * grad / xp.sqrt(ms + epsilon)
    return var - mom, ms, mom


@apply_op("ApplyCenteredRMSProp", 4)
def CENTERED_RMSPROP(xp, var, mg, ms, mom, lr, rho, momentum, epsilon, grad):
    """The gradient over its standard deviation."""
    ms = ms + (grad * grad - ms) * (1 - rho)
    mg = mg + (grad - mg) * (1 - rho)
    mom = momentum * mom + lr * grad / xp.sqrt(ms - mg * mg + epsilon)
    return var - mom, mg, ms, mom


@apply_op("ApplyFtrlV2", 3)
def FTRL(xp, var, accum, linear, grad, lr, l1, l2, l2_shrinkage, lr_power):
    """The variable that is best for all gradients so far, regularized."""
    grown = accum + grad * grad
    old_rate, rate = accum**-lr_power / lr, grown**-lr_power / lr
    linear = linear + grad + 2 * l2_shrinkage * var - (rate - old_rate) * var
    shrunk = (xp.sign(linear) * l1 - linear) / (rate + 2 * l2)
    return xp.where(xp.abs(linear) > l1, shrunk, 0).astype(var.dtype), grown, linear


# -- the rows that a gradient touches ------------------------------------------------------------


def touched(gradient: Tensor) -> list[Tensor]:
    """The indices of the rows of a gradient that may be other than zero, if it is of gathers.

    TensorFlow's gradient of a gather is a list of rows, and some optimizers leave the state of
    all other rows alone.
    """
    found: list[Tensor] = []
    stack = [gradient._symbol.node]
    while stack:
        node: Node = stack.pop()
        if not dims.same(node.symbols[0].shape, gradient._symbol.shape):
            return []
        if _adds_rows(node):
            found.append(face(node.xs[1]))
        elif node.op.type in ("AddN", "AddV2"):
            stack += [x._data.node for x in node.xs]
        else:
            return []
    return found


def _adds_rows(node: Node) -> bool:
    """Whether an op puts rows into zeros, at its second input."""
    if node.op.type == "ScatterAdd":
        return node.attrs["axis"] == 0 == node.attrs["batch_dims"]
    return node.op.type == "UnsortedSegmentSum"


# -- putting an op down --------------------------------------------------------------------------


def apply(
    op: Op, states: Sequence[Variable], values: Sequence[Tensor], rows: int, options: dict[str, Any]
) -> Tensor:
    """Put down an op that changes variables; its value is the first one's."""
    graph = current_graph()
    xs = [graph.entering(v._ref()._tensor) for v in states]
    xs += [graph.entering(x._read()) for x in values]
    places = list(range(len(xs)))
    layout = (*places[: len(xs) - rows], tuple(places[len(xs) - rows :]))
    ref = states[0]._ref()._symbol
    attrs = {"keys": tuple([v._key for v in states]), **options}
    spec = Spec(ref.shape, ref.dtype)
    return face(graph.add(op, NO_RULE, tuple(xs), attrs, layout, specs=[spec]))
