"""The run of a plan while JAX traces it: JAX kernels on tracers, NumPy kernels on constants.

NumPy computes values that depend only on constants while tracing, as in a session without jit.
Sizes and shapes therefore stay numbers. Only values that depend on feeds, variables or random
numbers become part of the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from regrad.core import dims
from regrad.core.backends import JAX, backend_of
from regrad.core.sharding import to_jax
from regrad.core.tape import placed
from regrad.errors import TraceError
from regrad.graph.graph import CONST, Node
from regrad.graph.plan import PlanRun, at_node
from regrad.transforms.traces import find_jax
from regrad.v1.errors import UnimplementedError
from regrad.v1.graph.python_ops import PRINT
from regrad.v1.graph.regions import Step, all_nodes, writes
from regrad.v1.graph.variables import read_state

Values = Sequence[Any]


class TraceRun(PlanRun):
    """The state of a traced run. Variables and random keys (in `others`) are tracers."""

    __slots__ = ()
    xp = JAX.xp

    def write(self, key: str, value: Any) -> Any:
        self.written[key] = value
        return value

    def key(self, stream: int) -> Any:
        """Return the random key of an op in the current iterations."""
        key = self.others[stream]
        for number in self.path:
            key = find_jax().random.fold_in(key, number)
        return key

    def inside(self, written: dict[str, Any], *number: Any) -> TraceRun:
        """Return the state for a part that the program may skip or repeat."""
        made = TraceRun(self.variables, self.others)
        made.written = {**self.written, **written}
        made.path = (*self.path, *number)
        return made

    def state(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the current values of variables as JAX arrays."""
        values = {key: read_state(self, None, key) for key in keys}
        return {key: settle(value, value.dtype) for key, value in values.items()}

    def through(self, step: Step, known: dict[int, Any]) -> list[Any]:
        known = dict(known)
        self.compute(step.nodes, known)
        return [known[y._data.id] for y in step.outputs]

    def compute(self, nodes: Iterable[Node], known: dict[int, Any]) -> None:
        """Compute nodes in order, and add their values to `known`, the values by symbol id."""
        for node in nodes:
            made = node.symbols
            if not made or not all(s.id in known for s in made):
                values = [known[s.id] for s in node.sources()]
                try:
                    ys = self._outputs(node, values, known)
                except Exception as error:
                    raise _explained(error, node, values) from error.__cause__
                for symbol, y in zip(made, ys, strict=True):
                    known.setdefault(symbol.id, y)

    def _outputs(self, node: Node, values: Values, known: dict[int, Any]) -> Values:
        op, attrs = node.op, node.attrs
        if op is CONST:
            return [attrs["value"]]
        if node.sized:
            attrs = {k: dims.resolved(v, lambda s: known[s.id]) for k, v in attrs.items()}
        ys = TRACED[op.type](self, node, values, attrs) if op.type in TRACED else None
        if ys is not None:
            return ys
        if op.stateful:
            kernel = partial(op.kernels.kernel, self)  # pyright: ignore
        elif backend_of(*values) is JAX:
            values = [to_jax(np.asarray(v)) if is_known(v) else v for v in values]
            kernel = op.kernels[type(values[0])]
        else:
            kernel = op.kernels[np.ndarray]
        y = kernel(*[placed(values, place) for place in node.layout], **attrs)
        return y if op.several else [y]


def is_known(value: Any) -> bool:
    """Return whether a value is known while the plan is traced."""
    return isinstance(value, np.ndarray | np.generic)


def settle(value: Any, dtype: np.dtype) -> Any:
    """Return a value as a JAX array of this dtype, for outputs and loop carries."""
    if is_known(value):
        value = to_jax(np.asarray(value))
    return find_jax().lax.convert_element_type(value, dtype)


def settle_all(values: Values, like: Iterable[Any]) -> list[Any]:
    """Settle each value to the dtype of its tensor or symbol."""
    return [settle(v, s.dtype) for v, s in zip(values, like, strict=True)]


# -- errors of tracing ---------------------------------------------------------------------------


def refusal(node: Node, why: str) -> UnimplementedError:
    """Return the error for an op that cannot be compiled."""
    return UnimplementedError(
        None,
        node,
        f"the op {node.name!r} (type {node.op.type}) cannot be compiled: {why} "
        "Or run it in a tf.Session without jit.",
    )


def _explained(error: Exception, node: Node, values: Values) -> Exception:
    errors = find_jax().errors
    if isinstance(error, (errors.JAXTypeError, errors.JAXIndexError, TraceError)):
        error = refusal(
            node,
            "it reads values, for the sizes of its result or to choose a branch, and values exist "
            "only when the compiled program runs. Compute them from constants and static shapes.",
        )
    return at_node(error, node, [v for v in values if v is not None])


# -- ops that are traced in a special way --------------------------------------------------------


def _python(trace: TraceRun, node: Node, values: Values, attrs: dict[str, Any]) -> Any:
    raise refusal(node, "it calls a Python function. Write it with ops of the graph.")


def _print(trace: TraceRun, node: Node, values: Values, attrs: dict[str, Any]) -> Values:
    kernel: Any = PRINT.kernels[np.ndarray]

    def show(*data: Any) -> None:
        kernel(None, [np.asarray(d) for d in data], **attrs)

    find_jax().debug.callback(show, *values[1:], ordered=True)
    return values[:1]


def _assert(trace: TraceRun, node: Node, values: Values, attrs: dict[str, Any]) -> Values:
    """Trace nothing. The plan checks the inputs of its asserts after the program has run."""
    if node.graph.outer is not None:
        raise refusal(node, "an Assert in a branch or loop cannot stop it. Assert outside.")
    return []


def _value_check(trace: TraceRun, node: Node, values: Values, attrs: dict[str, Any]) -> Any:
    """Check values that are known while tracing. Compiled programs do not check values."""
    return None if is_known(values[0]) else values


def _reference(trace: TraceRun, node: Node, values: Values, attrs: dict[str, Any]) -> Values:
    """Return the input: the copy of a variable that has a rule is a reference, without a value."""
    return values


def _deferred(trace: TraceRun, node: Node, values: Values, attrs: dict[str, Any]) -> Values:
    """Run in eager mode on tracers. Known values stay known, for sizes and loops."""
    kernel: Any = node.op.kernels.kernel
    return kernel(backend_of(*values).xp, values, **attrs)


# Functions that trace ops without an array kernel, by op type. For None the kernel runs.
Form = Callable[[TraceRun, Node, Values, dict[str, Any]], Values | None]
TRACED: dict[str, Form] = {
    "PyFunc": _python, "PyFuncStateless": _python, "Print": _print, "Assert": _assert,
    "_Indices": _value_check, "_Divisor": _value_check, "_Permutation": _value_check,
    "_Exclusive": _value_check, "_Deferred": _deferred, "Parameter": _reference,
}  # fmt: skip


# -- variables that a plan reads and writes ------------------------------------------------------


def find_written(nodes: Iterable[Node]) -> dict[str, bool]:
    """Return the variables to which nodes write, and whether they certainly keep their shapes."""
    found: dict[str, bool] = {}
    for node in filter(writes, all_nodes(nodes)):
        keeps = node.attrs.get("shape", ()) is not None
        for key in node.attrs.get("keys") or [node.attrs["key"]]:
            found[key] = keeps and found.get(key, True)
    return found
