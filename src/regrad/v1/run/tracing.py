"""The run of a plan while JAX traces it: JAX kernels on tracers, NumPy kernels on constants.

NumPy computes values that depend only on constants while tracing, as in a session without jit.
Sizes and shapes therefore stay numbers. Only values that depend on feeds, variables or random
numbers become part of the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from regrad.core import dims
from regrad.core.backends import JAX, NUMPY, backend_of
from regrad.core.sharding import to_jax
from regrad.core.tape import placed
from regrad.errors import TraceError
from regrad.graph.graph import CONST, Node, Symbol
from regrad.graph.plan import PlanRun, at_node
from regrad.transforms.traces import find_jax
from regrad.v1.errors import UnimplementedError
from regrad.v1.graph.python_ops import ASSERT, PRINT
from regrad.v1.graph.regions import Control, Step

Values = Sequence[Any]


class TraceRun(PlanRun):
    """The state of a traced run. Variables and random keys are tracers."""

    __slots__ = ("keys",)

    def __init__(self, variables: dict[str, Any], keys: dict[int, Any]) -> None:
        super().__init__(variables, {})
        self.keys: dict[int, Any] = keys

    @property
    def xp(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The namespace of JAX arrays."""
        return JAX.xp

    def write(self, key: str, value: Any) -> Any:
        self.written[key] = value
        return value

    def key(self, stream: int) -> Any:
        """Return the random key of an op in the current iterations."""
        key = self.keys[stream]
        for number in self.path:
            key = find_jax().random.fold_in(key, number)
        return key

    def inside(self, written: dict[str, Any], *number: Any) -> TraceRun:
        """Return the state for a part that the program may skip or repeat."""
        made = TraceRun(self.variables, self.keys)
        made.written = {**self.written, **written}
        made.path = (*self.path, *number)
        return made

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

    def _outputs(self, node: Node, values: list[Any], known: dict[int, Any]) -> Values:
        op, attrs = node.op, node.attrs
        if op is CONST:
            return [attrs["value"]]
        if node.sized:
            attrs = {k: dims.resolved(v, lambda s: known[s.id]) for k, v in attrs.items()}
        if op.type in TRACED:
            return TRACED[op.type](self, node, values, attrs)
        if op.stateful:
            return self.call_kernel(node, values, attrs)
        if any(v is None for v in values):  # refs of variables, and values made of them
            return [None] * len(node.symbols)
        backend, arrays = one_library(values)
        kernel = op.kernels[np.ndarray if backend is NUMPY else type(arrays[0])]
        y = kernel(*[placed(arrays, place) for place in node.layout], **attrs)
        return y if op.several else [y]

    def call_kernel(self, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
        """Return the outputs of an op whose kernel receives the run."""
        arguments = [placed(values, place) for place in node.layout]
        y = node.op.kernels.kernel(self, *arguments, **attrs)  # pyright: ignore
        return y if node.op.several else [y]


def one_library(values: Values) -> tuple[Any, list[Any]]:
    """Return the backend of the values, and the values converted to it."""
    backend = backend_of(*values)
    if backend is NUMPY:
        return backend, list(values)
    return backend, [to_jax(np.asarray(v)) if is_known(v) else v for v in values]


def is_known(value: Any) -> bool:
    """Return whether a value is known while the plan is traced."""
    return isinstance(value, np.ndarray | np.generic)


def settle(value: Any, dtype: np.dtype) -> Any:
    """Return a value as a JAX array of this dtype, for outputs and loop carries."""
    if value is None:
        return None
    if is_known(value):
        value = to_jax(np.asarray(value))
    return find_jax().lax.convert_element_type(value, dtype)


def settle_all(values: Values, symbols: Iterable[Symbol]) -> list[Any]:
    """Settle each value to the dtype of its symbol."""
    return [settle(v, s.dtype) for v, s in zip(values, symbols, strict=True)]


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

# Functions that trace ops without an array kernel, by op type.
Form = Callable[[TraceRun, Node, list[Any], dict[str, Any]], Values]
TRACED: dict[str, Form] = {}


def traces(*types: str) -> Callable[[Form], Form]:
    """Register the decorated function to trace ops of these types."""

    def register(function: Form) -> Form:
        for op_type in types:
            TRACED[op_type] = function
        return function

    return register


@traces("PyFunc", "PyFuncStateless")
def _python(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    raise refusal(node, "it calls a Python function. Write it with ops of the graph.")


@traces("Print")
def _print(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    kernel: Any = PRINT.kernels[np.ndarray]

    def show(*data: Any) -> None:
        kernel(None, [np.asarray(d) for d in data], **attrs)

    find_jax().debug.callback(show, *values[1:], ordered=True)
    return values[:1]


@traces("Assert")
def _assert(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    """Trace nothing. The plan checks the inputs of its asserts after the program has run."""
    if node.graph.outer is not None:
        raise refusal(node, "an Assert in a branch or loop cannot stop it. Assert outside.")
    return []


def check(node: Node, values: Values) -> None:
    """Run an Assert on its inputs after a run, and raise its error."""
    condition, *data = [np.asarray(v) for v in values]
    try:
        ASSERT.kernels[np.ndarray](condition, data, **node.attrs)
    except Exception as error:
        raise at_node(error, node, [condition, *data]) from None


@traces("_Indices", "_Divisor", "_Permutation", "_Exclusive")
def _value_check(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    """Check values that are known while tracing. Compiled programs do not check values."""
    if is_known(values[0]):
        node.op.kernels[np.ndarray](*values, **attrs)
    return values


@traces("_Deferred")
def _deferred(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    """Run in eager mode on tracers. Known values stay known, for sizes and loops."""
    xp = backend_of(*values).xp
    return node.op.kernels.kernel(xp, values, **attrs)  # pyright: ignore[reportCallIssue]


# -- variables that a plan reads and writes ------------------------------------------------------


class Touched(NamedTuple):
    """The state, other than feeds, that a plan with all its regions reads and changes."""

    read: set[str]  # variables
    written: set[str]
    resized: set[str]  # written, possibly with another shape
    streams: dict[int, tuple[int, int]]  # random streams, with their seeds


def find_touched(nodes: Iterable[Node]) -> Touched:
    """Return the variables and random streams of nodes and of the regions in them."""
    found = Touched(set(), set(), set(), {})
    for node in all_nodes(nodes):
        attrs = node.attrs
        if node.op.stateful and ("key" in attrs or "keys" in attrs):
            keys = attrs["keys"] if "keys" in attrs else [attrs["key"]]
            writes = node.op.type.startswith(("Assign", "Apply", "ScatterUpdate"))
            (found.written if writes else found.read).update(keys)
            if writes and attrs.get("shape", ()) is None:
                found.resized.update(keys)
        if "stream" in attrs:
            found.streams[attrs["stream"]] = attrs["seed"], attrs["seed2"]
    return found


def all_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes, and the nodes of the branches and loops in them."""
    for node in nodes:
        yield node
        control: Control | None = node.attrs.get("control")
        for step in control.parts if control is not None else ():
            yield from all_nodes(step.nodes)
