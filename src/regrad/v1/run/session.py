"""Sessions, which run graphs: fetches, feeds, cached plans and the state of variables."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Self

import numpy as np

import regrad as rg
from regrad.core import dims, numbers
from regrad.core.blocks import Block, block, stay
from regrad.core.interrupts import Deferred
from regrad.core.tensor import Readable, TensorLike, read_only
from regrad.core.tracebacks import fold
from regrad.errors import ArgumentError, GraphError, ShapeError, kind, refusal
from regrad.graph.graph import Node, Symbol, made_inside
from regrad.graph.plan import GraphPlan, PlanRun
from regrad.transforms.traces import find_jax
from regrad.v1 import dtypes, errors
from regrad.v1.graph.conversion import as_array
from regrad.v1.graph.graphs import Graph, get_default_graph
from regrad.v1.graph.static_shapes import TensorShape
from regrad.v1.graph.tensors import SESSIONS, Operation, Tensor, face

__all__ = [
    "ConfigProto", "GPUOptions", "InteractiveSession", "RunMetadata", "RunOptions", "Session",
    "get_default_session",
]  # fmt: skip


class ConfigProto:
    """Settings of a session. All settings are accepted and have no effect.

    Args:
        **options: Settings by name. They become attributes.

    Source: `tf.ConfigProto`.

    >>> import regrad.v1 as tf
    >>> config = tf.ConfigProto(allow_soft_placement=True)
    >>> with tf.Graph().as_default(), tf.Session(config=config) as sess:
    ...     print(sess.run(tf.constant(1.0)))
    1.0
    """

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)
        self.gpu_options: Any | GPUOptions = options.get("gpu_options") or GPUOptions()


class GPUOptions:
    """Settings of GPUs, which have no effect.

    Args:
        **options: Settings by name. They become attributes.

    Source: `tf.GPUOptions`.

    >>> import regrad.v1 as tf
    >>> tf.ConfigProto(gpu_options=tf.GPUOptions(allow_growth=True)).gpu_options.allow_growth
    True
    """

    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)


class RunOptions(GPUOptions):
    """Settings of one run, which have no effect.

    Args:
        **options: Settings by name. They become attributes. The class has the trace levels
            NO_TRACE, SOFTWARE_TRACE, HARDWARE_TRACE and FULL_TRACE.

    Source: `tf.RunOptions`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.constant(1.0), options=tf.RunOptions(trace_level=3)))
    1.0
    """

    NO_TRACE, SOFTWARE_TRACE, HARDWARE_TRACE, FULL_TRACE = range(4)


class RunMetadata:
    """The record of a run. It stays empty; use `regrad.v1.trace_gradients` instead.

    Source: `tf.RunMetadata`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.constant(1.0), run_metadata=tf.RunMetadata()))
    1.0
    """


# -- fetched values ------------------------------------------------------------------------------


NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "c8", "c16")


def _plain_scalar(base: type) -> type:
    """Make a NumPy scalar type that prints as in older NumPy: `1.5`, not `np.float32(1.5)`."""
    reduced = lambda self: (base, (self.item(),))  # noqa: E731
    own = {"__slots__": (), "__repr__": base.__str__, "__reduce__": reduced}
    return type(base.__name__, (base,), own)


SCALARS = {np.dtype(code): _plain_scalar(np.dtype(code).type) for code in NUMBERS}


def _handed_out(value: np.ndarray, owned: bool) -> Any:
    """Return a fetched value as a NumPy scalar, or as an array that the caller may change."""
    if value.ndim:
        return value if owned else value.copy()
    scalar = SCALARS.get(value.dtype)
    return value[()] if scalar is None else scalar(value[()])


# -- the session ---------------------------------------------------------------------------------


def _filled(made: Any, found: Iterable[Any]) -> Any:
    made.update(found)
    return made


# The classes of ops, tensors and Variables, and of lists. (A union is slower to test for.)
ELEMENTS, LISTS = (Operation, Readable), (list, tuple)


def _element(graph: Graph, x: Any) -> Any:
    """Return an op, a tensor or a Variable of the graph, also by name; None for other objects."""
    if isinstance(x, str):
        return graph.as_graph_element(x)
    if isinstance(x, rg.Tensor):
        x = face(x)
    if not isinstance(x, ELEMENTS):
        return None
    if getattr(x, "graph", graph) is not graph:
        raise GraphError(f"{x} is not an element of this graph.")
    return x


class _Fetches:
    """A structure of fetches, with its symbols and ops, and a function that fills in values."""

    def __init__(self, graph: Graph, structure: Any) -> None:
        self.symbols: list[Symbol] = []
        self.nodes: list[Node] = []
        self.graph = graph
        self.build = self._parse(structure)

    def _parse(self, fetch: Any) -> Callable[[list[Any]], Any]:
        if isinstance(fetch, LISTS):
            parts, make = fetch, getattr(fetch, "_make", type(fetch))
        elif isinstance(fetch, dict):
            keys, parts, kind = list(fetch), fetch.values(), type(fetch)
            make = lambda found: _filled(kind(), zip(keys, found, strict=True))  # noqa: E731
        else:
            return self._leaf(fetch)
        parsed = [self._parse(part) for part in parts]
        return lambda values: make([part(values) for part in parsed])

    def _leaf(self, fetch: Any) -> Callable[[list[Any]], Any]:
        try:
            element = _element(self.graph, fetch)
        except GraphError as error:
            raise GraphError(f"Fetch argument {fetch!r} cannot be interpreted: {error}") from None
        if element is None:
            advice, hint = "must be a string or Tensor", ""
            if fetch is None:
                advice = "Cannot be None"
                hint = ": tf.gradients returns None where no path leads from y to x, or a rule did"
            raise ArgumentError(
                f"Fetch argument {fetch!r:.80} has invalid type {type(fetch).__name__!r}. "
                f"{advice}. (Can not convert a {type(fetch).__name__} into a Tensor or "
                f"Operation{hint}.)"
            )
        if isinstance(element, Operation):
            self.nodes.append(element._node)
            return lambda values: None
        index, symbol = len(self.symbols), element._read()._data
        if symbol.node.graph is not self.graph:
            raise made_inside(symbol)
        self.symbols.append(symbol)
        return lambda values: values[index]


class Session(Block):
    """Runs ops of a graph, and holds the values of its variables.

    Args:
        target: Must be empty. It exists only for compatibility.
        graph: The graph, by default the default graph.
        config: A ConfigProto, which has no effect.
        jit: Whether XLA compiles the runs, through JAX. The first run with new fetches or new feed
            shapes includes the compile time. A run of an op that cannot be compiled raises
            `tf.errors.UnimplementedError`, which names the op.

    A session is a context manager. In its block the session is the default session, and its graph
    the default graph.

    One `run` is a snapshot. It runs only the ops that the fetches need, each once, in the order of
    creation. The variables change all at once, or not at all if an op fails. Fetched scalars are
    NumPy scalars of the tensor's dtype that print without the type (`[1.5]`).

    Source: `tf.Session`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.placeholder(tf.float32, [2])
    ...     print(sess.run(tf.gradients(x * x, x), {x: [1.0, 2.0]}))
    [array([2., 4.], dtype=float32)]
    """

    def __init__(
        self, target: str = "", graph: Graph | None = None, config: ConfigProto | None = None,
        jit: bool = False,
    ) -> None:  # fmt: skip
        if target:
            raise ArgumentError(f"there are no remote sessions: target must be '', got {target!r}")
        if not isinstance(graph, Graph | None):
            raise ArgumentError(f"Session: graph must be a tf.Graph, got {kind(graph)}")
        self._plan = lru_cache(PLANS)(_compiled_plans() if jit else GraphPlan)
        self.graph: Graph = get_default_graph() if graph is None else graph
        self._variables: dict[Any, Any] = {}
        self._others: dict[Any, Any] = {}
        self._lock = threading.RLock()
        self._closed = False

    def run(
        self, fetches: Any, feed_dict: Mapping[Any, Any] | None = None,
        options: RunOptions | None = None, run_metadata: Any = None,
    ) -> Any:  # fmt: skip
        """Return the values of the fetches, in the same structure.

        Args:
            fetches: A tensor, an op (its value is None), a Variable, a name (`"x:0"`), or any
                nest of lists, tuples and dicts of these.
            feed_dict: `{tensor or name: value}`. Any tensor can be fed.

        Raises:
            TypeError, ValueError: a fetch or a feed is not valid.
            tf.errors.InvalidArgumentError: a placeholder has no value, or shapes are incompatible
                in the run.
            tf.errors.FailedPreconditionError: a variable has no value.
            RuntimeError: the session is closed, or the graph is empty.
        """
        if not self.graph.nodes:
            raise errors.ClosedError(
                "The Session graph is empty. Add operations to the graph before calling run()."
            )
        if feed_dict and not isinstance(feed_dict, dict):
            raise ArgumentError(f"feed_dict is a dict of tensors to values, got {feed_dict!r:.60}")
        try:
            wanted, feeds = _Fetches(self.graph, fetches), {}
            for key, value in (feed_dict or {}).items():
                several = isinstance(key, LISTS)
                for k, v in zip(key, value, strict=True) if several else [(key, value)]:
                    feeds[self._fed(k)] = v
            return self._run(wanted, feeds)
        except Exception as error:
            fold(error)
            raise

    def _run(self, wanted: _Fetches, feeds: dict[Symbol, Any]) -> Any:
        self._check_open()
        variables, values = self._variables, {}
        for symbol, value in feeds.items():
            array = _fed_value(symbol, value)
            if symbol.node.op.type == "VariableV2":
                variables = {**variables, symbol.node.name: array}
            else:
                values[symbol] = array
        plan = self._plan(tuple(wanted.symbols), tuple(wanted.nodes), tuple(values))
        if plan.unfed is not None:
            raise errors.unfed(plan.unfed)
        run = PlanRun(variables, self._others)
        one_by_one = self._lock if plan.stateful else nullcontext()
        with one_by_one, Deferred() if plan.donates else nullcontext():
            try:
                found = plan([*values.values()], run)
            except Exception as error:
                raise errors.of_run(error) from error.__cause__
            self._variables.update(run.written)
        once = len({*wanted.symbols}) == len(found)
        pairs = zip(found, plan.owned, strict=True)
        return wanted.build([_handed_out(v, own and once) for v, own in pairs])

    def _fed(self, key: Any) -> Symbol:
        if type(key) is Tensor and key._symbol.node.graph is self.graph:
            return key._symbol
        try:
            found = _element(self.graph, key)
            found = getattr(found, "_ref", lambda: found)()  # a Variable's op output
            if not isinstance(found, Tensor):
                raise GraphError(f"{key!r:.60} is not a tensor")
        except GraphError as error:
            raise ArgumentError(f"Cannot interpret feed_dict key as Tensor: {error}") from None
        return found._symbol

    def make_callable(
        self, fetches: Any, feed_list: Sequence[Any] | None = None, accept_options: Any = None
    ) -> Any:
        """Return a function that takes the values to feed, in order, and runs these fetches."""
        wanted = _Fetches(self.graph, fetches)
        symbols = [self._fed(key) for key in feed_list or ()]
        return lambda *values: self._run(wanted, dict(zip(symbols, values, strict=True)))

    def _check_open(self) -> None:
        if self._closed:
            raise errors.ClosedError("Attempted to use a closed Session.")

    def _snapshot(self, names: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Return copies of the values of variables by new names. Raises if one has no value."""
        with self._lock:
            if unset := [name for name in names.values() if name not in self._variables]:
                raise errors.FailedPreconditionError(
                    f"Attempting to use uninitialized value {', '.join(unset)}. Run "
                    "tf.global_variables_initializer() in this session first."
                )
            return {new: np.array(self._variables[name]) for new, name in names.items()}

    def close(self) -> None:
        """Free the values of the variables. The session cannot be used again."""
        self._closed = True
        self._variables, self._others = {}, {}
        self._plan.cache_clear()

    @block
    def as_default(self) -> Generator[Session]:
        """Make this the default session in a block, without closing it at the end."""
        yield from stay(self, SESSIONS, (*SESSIONS.get(), self))

    _twice = "session.as_default() makes a session the default one several times"

    def _steps(self) -> Generator[Self]:
        try:
            with self.graph.as_default(), self.as_default():
                yield from stay(self)
        finally:
            self.close()


PLANS = 256  # the number of plans that a session caches, by fetches and feeds


def _fed_value(symbol: Symbol, value: TensorLike) -> np.ndarray:
    nested = isinstance(value, LISTS) and any(isinstance(v, ELEMENTS) for v in value)
    if nested or isinstance(value, ELEMENTS):
        raise ArgumentError(
            "The value of a feed cannot be a tf.Tensor object, or contain one. Feed Python "
            f"numbers, lists or NumPy arrays; {symbol.name!r} got {value!r:.60}"
        )
    if symbol.relied:
        raise ArgumentError(
            f"{symbol.name!r} cannot be fed: its value was known when the graph was built, "
            "and static shapes depend on it. Use a placeholder for a value that varies."
        )
    array = read_only(_as_fed(symbol, value))  # the array belongs to the caller
    if dims.differ(symbol.shape, array.shape):
        raise ShapeError(
            f"Cannot feed value of shape {array.shape} for Tensor {symbol.name}, which has "
            f"shape {TensorShape(symbol.shape)}"
        )
    return array


def _as_fed(symbol: Symbol, value: TensorLike) -> np.ndarray:
    if isinstance(value, rg.Tensor):
        value = value.numpy()
    if symbol.dtype.kind == "O" and value is not None:
        return as_array(value, dtypes.string)
    if isinstance(value, np.ndarray) and value.dtype == symbol.dtype:
        return value
    if value is None:  # NumPy would convert it to NaN
        raise ArgumentError(f"feed_dict: {symbol.name} is fed with None, expected a value")
    try:
        try:
            return np.asarray(value, dtype=symbol.dtype)
        except OverflowError:
            return numbers.under(value, symbol.dtype)  # its error names the number
    except (OverflowError, TypeError, ValueError) as error:
        raise refusal(error, f"{symbol.name} is fed as {symbol.dtype}", {}) from None


def _compiled_plans() -> type[GraphPlan]:
    find_jax("Session(jit=True)")
    from regrad.v1.run.compiled_plans import CompiledPlan

    return CompiledPlan


def get_default_session() -> Session | None:
    """Return the innermost open session, or None.

    Returns:
        The Session, or None.

    Source: `tf.get_default_session`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(tf.get_default_session() is sess)
    True
    """
    found: Any = SESSIONS.get()[-1:]
    return found[0] if found else None


class InteractiveSession(Session):
    """A session that is the default session until it is closed.

    Args:
        target, graph, config, jit: See `tf.Session`.

    Raises:
        ArgumentError: target is not empty, or graph is not a graph.

    Source: `tf.InteractiveSession`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.InteractiveSession():
    ...     print(tf.constant(3.0).eval())
    3.0
    """

    def __init__(
        self, target: str = "", graph: Graph | None = None, config: ConfigProto | None = None,
        jit: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(target, graph, config, jit)
        SESSIONS.set((*SESSIONS.get(), self))

    def close(self) -> None:
        super().close()
        SESSIONS.set(tuple(s for s in SESSIONS.get() if s is not self))
