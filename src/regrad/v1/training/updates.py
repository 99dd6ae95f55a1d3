"""Ops that optimizers use to change variables. One op updates a variable and its slots."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from regrad.core import dims
from regrad.core.registry import Op
from regrad.graph.graph import NO_RULE, Node
from regrad.graph.plan import PlanRun
from regrad.v1.errors import InvalidArgumentError
from regrad.v1.graph.graphs import add_op
from regrad.v1.graph.tensors import Tensor, face
from regrad.v1.graph.tf_names import declare
from regrad.v1.graph.variables import Variable, read_state, state_op

# -- ops made of formulas --------------------------------------------------------------------------


def update_op(type: str, states: int, attrs: str = "") -> Callable[[Callable[..., Any]], Op]:
    """Make an op from a formula. The first `states` inputs of the op are variables.

    A formula takes the namespace of the arrays, the old values of a variable and of its slots,
    numbers, and the gradient, and returns the new values. Its parameters have the names and order
    of the inputs of TensorFlow's op. Keyword-only parameters are attributes of the op, and `attrs`
    declares other attributes of TensorFlow's op.
    """

    def make(formula: Callable[..., Any]) -> Op:
        spec = inspect.getfullargspec(formula)
        names, own = spec.args[1:], spec.kwonlyargs
        grad = names.index("grad")

        def kernel(run: PlanRun, *xs: Any, keys: Sequence[str], **options: Any) -> Any:
            *args, indices = xs
            old = args[:states] = [read_state(run, None, key) for key in keys]
            if np.shape(args[grad]) != old[0].shape:
                raise InvalidArgumentError(
                    f"the gradient for {keys[0]!r} has the shape {np.shape(args[grad])}, expected "
                    f"the variable's shape, {old[0].shape}"
                )
            xp = run.xp
            rows = xp.concatenate([xp.ravel(i) for i in indices]) if indices else None
            if rows is not None and xp is np:  # compute only these rows
                rows = np.unique(rows)
                args[:states], args[grad] = [value[rows] for value in old], args[grad][rows]
            new = formula(xp, *args, **options)
            if rows is not None:
                new = [_with_rows(xp, v, rows, part) for v, part in zip(old, new, strict=True)]
            first, *_ = [run.write(key, value) for key, value in zip(keys, new, strict=True)]
            return first

        declare(f"{type}: * | T use_locking {' '.join(own)} {attrs}")
        return state_op(type, kernel, " ".join([*names, "indices*"]), " ".join(["keys", *own]))

    return make


def _with_rows(xp: Any, old: Any, rows: Any, new: Any) -> Any:
    """Return `old` with other rows. NumPy gets only these rows in `new`, JAX gets all rows."""
    if xp is np:
        value = old.copy()
        value[rows] = new
        return value
    touched = xp.zeros(old.shape[0], bool).at[rows].set(True)
    return xp.where(xp.expand_dims(touched, tuple(range(1, old.ndim))), new, old)


# -- sparse updates ------------------------------------------------------------------------------


def find_rows(gradient: Tensor) -> list[Tensor]:
    """Return the indices of the rows that may be nonzero, if the gradient comes only from gathers.

    TensorFlow's gradient of a gather is a list of rows, and some optimizers do not change the state
    of the other rows.
    """
    found: list[Tensor] = []
    stack = [gradient._symbol.node]
    while stack:
        node: Node = stack.pop()
        if not dims.same(node.symbols[0].shape, gradient._symbol.shape):
            return []
        adds_rows = node.op.type == "UnsortedSegmentSum" or (
            node.op.type == "ScatterAdd" and node.attrs["axis"] == 0 == node.attrs["batch_dims"]
        )
        if adds_rows:  # to zeros, at indices that are the second input
            found.append(face(node.xs[1]))
        elif node.op.type in ("AddN", "AddV2"):
            stack += [x._data.node for x in node.xs]
        else:
            return []
    return found


# -- adding an op --------------------------------------------------------------------------------


def add_update(
    op: Op, states: Sequence[Variable], values: Sequence[Tensor], options: Mapping[str, Any]
) -> Tensor:
    """Add an op that changes variables. Its value is the new value of the first variable."""
    xs = [*[v._ref()._tensor for v in states], *[x._read() for x in values]]
    ref = states[0]._ref()._symbol
    attrs = {"keys": tuple([v._key for v in states]), **options}
    return face(add_op(op, None, xs, attrs, [ref.spec], NO_RULE))
