"""The run of a plan while JAX traces it: kernels of JAX on tracers, NumPy's on what is known.

What follows from constants alone is computed while tracing, by NumPy, just as a plain session
computes it. So sizes and shapes stay numbers, and only what depends on feeds, variables or
random numbers becomes a part of the compiled program.
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
from regrad.graph.plan import at_node
from regrad.transforms.traces import find_jax
from regrad.v1.errors import UnimplementedError
from regrad.v1.graph.control import ASSERT, PRINT
from regrad.v1.graph.regions import GraphRegion, Interpreter

Values = Sequence[Any]


class TraceRun(Interpreter):
    """The state of a traced run: variables and random keys are tracers."""

    __slots__ = ("keys",)

    def __init__(self, variables: dict[str, Any], keys: dict[int, Any]) -> None:
        super().__init__(variables, {})
        self.keys: dict[int, Any] = keys

    @property
    def xp(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """JAX's namespace."""
        return JAX.xp

    def write(self, key: str, value: Any) -> Any:
        self.written[key] = value
        return value

    def key(self, stream: int) -> Any:
        """The random key of an op in the iterations that are open."""
        key = self.keys[stream]
        for number in self.path:
            key = find_jax().random.fold_in(key, number)
        return key

    def inside(self, written: dict[str, Any], *number: Any) -> TraceRun:
        """The state in a part that the program may skip or repeat."""
        made = TraceRun(self.variables, self.keys)
        made.written = {**self.written, **written}
        made.path = (*self.path, *number)
        return made

    def outputs(self, node: Node, values: list[Any], known: dict[int, Any]) -> Values:
        try:
            return self._outputs(node, values, known)
        except Exception as error:
            raise _explained(error, node, values) from error.__cause__

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
        if any(v is None for v in values):  # variables stand as None; so does what is made of them
            return [None] * len(node.symbols)
        backend, arrays = one_library(values)
        kernel = op.kernels[np.ndarray if backend is NUMPY else type(arrays[0])]
        y = kernel(*[placed(arrays, place) for place in node.layout], **attrs)
        return y if op.several else [y]


def one_library(values: Values) -> tuple[Any, list[Any]]:
    """The backend of these values, and all of them in it."""
    backend = backend_of(*values)
    if backend is NUMPY:
        return backend, list(values)
    return backend, [to_jax(np.asarray(v)) if is_known(v) else v for v in values]


def is_known(value: Any) -> bool:
    """Return whether a value is known while the plan is traced."""
    return isinstance(value, np.ndarray | np.generic)


def settle(value: Any, dtype: np.dtype) -> Any:
    """A value as an output of the program, or as what a loop carries: JAX's, of this dtype."""
    if value is None:
        return None
    if is_known(value):
        value = to_jax(np.asarray(value))
    return find_jax().lax.convert_element_type(value, dtype)


def settle_all(values: Values, symbols: Iterable[Symbol]) -> list[Any]:
    """Each value settled to the dtype of its symbol."""
    return [settle(v, s.dtype) for v, s in zip(values, symbols, strict=True)]


# -- errors of tracing ---------------------------------------------------------------------------


def refusal(node: Node, why: str) -> UnimplementedError:
    """An op of the graph cannot be compiled."""
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
            "it asks for values, for the sizes of its result or to choose what to do, and values "
            "exist only when the compiled program runs. Make these of constants and static shapes.",
        )
    return at_node(error, node, [v for v in values if v is not None])


# -- ops with a form of their own ----------------------------------------------------------------

# How ops without a kernel of arrays are traced: by op type, from inputs and attributes.
Form = Callable[[TraceRun, Node, list[Any], dict[str, Any]], Values]
TRACED: dict[str, Form] = {}


def traces(*types: str) -> Callable[[Form], Form]:
    """The decorated function traces ops of these types."""

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
    """Nothing: the plan looks at the inputs of its asserts when the program has run."""
    if node.graph.outer is not None:
        raise refusal(node, "an assertion in a branch or loop cannot stop it. Assert outside.")
    return []


def check(node: Node, values: Values) -> None:
    """Raise what an Assert raises, given its inputs after a run."""
    condition, *data = [np.asarray(v) for v in values]
    try:
        ASSERT.kernels[np.ndarray](condition, data, **node.attrs)
    except Exception as error:
        raise at_node(error, node, [condition, *data]) from None


@traces("_Indices", "_Divisor")
def _value_check(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    """Compiled programs do not look at values; what is known is checked while tracing."""
    if is_known(values[0]):
        node.op.kernels[np.ndarray](*values, **attrs)
    return values


@traces("_Deferred")
def _deferred(trace: TraceRun, node: Node, values: list[Any], attrs: dict[str, Any]) -> Values:
    """Eager mode on tracers; what is known stays known, so that sizes and loops can ask."""
    xp = backend_of(*values).xp
    return node.op.kernels.kernel(xp, values, **attrs)  # pyright: ignore[reportCallIssue]


# -- variables that a plan reads and writes ------------------------------------------------------


class Touched(NamedTuple):
    """The state that a plan, with all its regions, reads and changes besides its feeds."""

    read: set[str]  # the variables
    written: set[str]
    resized: set[str]  # written, and perhaps in another shape
    streams: dict[int, tuple[int, int]]  # of random numbers, with their seeds


def find_touched(nodes: Iterable[Node]) -> Touched:
    """The variables and random streams of nodes and of all that is inside them."""
    found = Touched(set(), set(), set(), {})
    for node in all_nodes(nodes):
        attrs = node.attrs
        if node.op.stateful and ("key" in attrs or "keys" in attrs):
            keys = attrs["keys"] if "keys" in attrs else [attrs["key"]]
            writes = node.op.type.startswith(("Assign", "Apply"))
            (found.written if writes else found.read).update(keys)
            if writes and attrs.get("shape", ()) is None:
                found.resized.update(keys)
        if "stream" in attrs:
            found.streams[attrs["stream"]] = attrs["seed"], attrs["seed2"]
    return found


def all_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """Nodes, and those of the branches and loops in them."""
    for node in nodes:
        yield node
        for region in regions(node):
            yield from all_nodes(region.nodes)


def regions(node: Node) -> list[GraphRegion]:
    """The regions of a branch or loop."""
    loop = node.attrs.get("loop")
    parts = [loop.cond, loop.body, loop.gradient] if loop is not None else []
    return [r for r in (*node.attrs.get("branches", ()), *parts) if r is not None]
