"""Deferred calls: functions that need a size that is unknown before the run.

Such a rule, or such a function of regrad, becomes one node. In the run it receives values and
computes like in eager mode. The gradient of the node is a node of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np

from regrad.core import containers
from regrad.core.backends import Array, Namespace, is_array, is_inexact
from regrad.core.bindings import OpBinding
from regrad.core.dims import Shape, UnknownRank
from regrad.core.dispatch import DEFERRALS, Deferral, as_dtype, is_tensor, lift
from regrad.core.docstrings import complete_public
from regrad.core.name_scopes import PATH, in_path
from regrad.core.protocols import NodeLike
from regrad.core.pullback import or_zeros, pulled
from regrad.core.registry import Attrs
from regrad.core.rule import Cotangent, Pulled, Rule
from regrad.core.signatures import answered
from regrad.core.state import State, current, in_state
from regrad.core.tape import Record, record_of
from regrad.core.tensor import Tensor, wrap
from regrad.core.walk import check_gradient, leaf_gradients
from regrad.errors import DTypeError, GraphError, UnknownShapeError
from regrad.graph.graph import Symbol, defer, graph_op, home, in_innermost, is_symbolic, refuse_once
from regrad.graph.size_ops import of_shape, size_tensor
from regrad.shapes.infer import Spec, probe

P = ParamSpec("P")
R = TypeVar("R")

Bindings: TypeAlias = dict[str, OpBinding] | None  # the overrides for a call, by op type
# A function of Tensors, and of the sizes that the run has resolved, that returns a list of Tensors.
Later = Callable[[Sequence[Tensor], Any], Sequence[Tensor]]


def _kernel(
    xp: Namespace, xs: Sequence[Array], call: Later, sizes: Any, overrides: Bindings
) -> Any:
    with in_state(State((), overrides) if overrides else None):
        ys = call([wrap(np.asarray(x) if isinstance(x, np.generic) else x) for x in xs], sizes)
    for y in filter(is_symbolic, ys):
        raise GraphError(
            "a rule or function that waits for the run, because it needs sizes, returned a "
            "tensor of the graph. It must use only its arguments, and no tensors from outside or "
            f"{y._data.words.constant}. Or define the placeholders' shapes, so it need not wait."
        )
    return tuple(y._data for y in ys)


def later(
    call: Later, xs: Sequence[Tensor], sizes: Any, overrides: Bindings, specs: Sequence[Spec] | None
) -> tuple[Tensor, ...]:
    """Return the results of a node that makes the call when the graph runs."""
    if not any(is_symbolic(x) for x in xs):  # already in the run
        state = current() or State()
        with in_state(state.overriding(overrides or None)):
            return tuple(call(list(xs), sizes))
    attrs = {"call": call, "sizes": sizes, "overrides": overrides}
    return defer(LATER, tuple(xs), attrs, (tuple(range(len(xs))),), specs)


class LaterRule(Rule):
    """The gradient of a deferred call: another deferred call that differentiates it."""

    name = "deferred"
    by_leaf = sparse = True

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return frozenset({0}), False

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return False  # unknown before the run

    def carries(self, node: NodeLike, index: int) -> bool:
        return bool(node.attrs["overrides"]) or super().carries(node, index)

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Pulled:
        attrs = record.attrs
        places = [i for i in wanted if record.xs[i]._data.carries]
        return pull_call(attrs["call"], record, dy, places, attrs["sizes"], attrs["overrides"])


def pull_call(
    call: Later, record: Any, dy: Any, places: Sequence[int],
    sizes: Any = None, overrides: Bindings = None,
) -> list[tuple[int, Any]]:  # fmt: skip
    """Pull gradients in the run through a call on a record's inputs, for those at `places`."""
    xs = list(record.xs)
    reached = [i for i, d in enumerate(dy) if d is not None]
    dys = [dy[i] for i in reached]
    specs = [_spec_due(record, i, dys) for i in places]
    pull = differentiated(call, len(xs), places, reached)
    found = later(pull, [*xs, *dys], sizes, overrides, specs)
    return [(0, containers.replaced([None] * len(xs), places, found))]


LATER = graph_op(
    "_Deferred", _kernel, "xs*", "call sizes overrides", name="deferred", rule=LaterRule(),
    several=True, holomorphic=False,
)  # fmt: skip


def differentiated(call: Later, count: int, places: Sequence[int], reached: Sequence[int]) -> Later:
    """Return the gradients of the inputs at `places`, from gradients of the outputs at `reached`.

    Inputs without a connection get zeros.
    """

    def gradients(tensors: Sequence[Tensor], sizes: Any) -> Sequence[Tensor]:
        xs, dys = tensors[:count], tensors[count:]
        _, dxs = pulled(lambda xs: call(xs, sizes), xs, places, dys, reached)
        pairs = zip(places, dxs, strict=True)
        return [or_zeros(dx, xs[i], dtype_due(xs[i].dtype, dys)) for i, dx in pairs]

    return gradients


def dtype_due(dtype: np.dtype, dys: Sequence[Tensor | None]) -> np.dtype:
    """Return the dtype of a gradient: the input's, or for integers the incoming gradient's."""
    arriving = [dy.dtype for dy in dys if dy is not None]
    return dtype if is_inexact(dtype) else next(filter(is_inexact, arriving), arriving[0])


def _spec_due(record: Record, leaf: int, dys: Sequence[Tensor | None]) -> Spec:
    """Return the known shape and dtype of the gradient of an input."""
    shape, dtype = record.specs[leaf]
    return spec_of_record(shape, dtype_due(dtype, dys))


def spec_of_record(shape: Shape, dtype: np.dtype) -> Spec:
    """Return a shape and dtype of a record as a Spec."""
    return Spec(None if isinstance(shape, UnknownRank) else tuple(shape), dtype)


# -- rules ---------------------------------------------------------------------------------------


def pull_later(record: Record, dy: Cotangent, watched: set[int]) -> dict[int, Any]:
    """Return the gradients by leaf of a record whose rule must wait for the run."""
    leaves = [i for i, key in enumerate(record.inputs) if key in watched]
    dys = dy if isinstance(dy, tuple) else (dy,)
    ys = record.y if isinstance(record.y, tuple) else (record.y,)
    slots = [*dys, *record.xs, *ys]
    shapes = [shape for shape, _ in record.specs]
    attrs = [record.attrs[name] for name in record.attrs]
    call = _Pull(record, leaves, [x is not None for x in slots], len(dys))
    specs = [_spec_due(record, i, dys) for i in leaves]
    given = [x for x in slots if x is not None]
    found = later(call, given, (shapes, attrs), None, specs)
    return dict(zip(leaves, found, strict=True))


class _Pull:
    """A record's rule as a function of values: incoming gradients, kept inputs, kept outputs.

    It holds no symbolic part of the record.
    """

    def __init__(self, record: Record, leaves: list[int], present: list[bool], dys: int) -> None:
        self.op, self.rule, self.attrs = record.op, record.rule, list(record.attrs)
        self.inputs, self.outputs = record.inputs, record.outputs
        self.dtypes = [dtype for _, dtype in record.specs]
        self.layout = getattr(record, "layout", None)
        self.output_specs = getattr(record, "output_specs", None)
        self.leaves, self.present, self.dys = leaves, present, dys
        self.kept = len(record.xs)

    def __call__(self, tensors: Sequence[Tensor], sizes: Any) -> Sequence[Tensor]:
        values = iter(tensors)
        slots = [next(values) if there else None for there in self.present]
        dys, xs = slots[: self.dys], slots[self.dys : self.dys + self.kept]
        record = self._record(sizes, xs, slots[self.dys + self.kept :])
        dy = tuple(dys) if isinstance(self.outputs, tuple) else dys[0]
        found = leaf_gradients(record, dy, {self.inputs[i] for i in self.leaves})
        return [self._fitted(record, i, found.get(i), dy) for i in self.leaves]

    def _fitted(self, record: Record, leaf: int, dx: Any, dy: Any) -> Tensor:
        dx = check_gradient(record, leaf, dx, dy)
        dx = wrap(np.zeros(*record.specs[leaf])) if dx is None else dx
        return as_dtype(dx, dtype_due(self.dtypes[leaf], dy if isinstance(dy, tuple) else (dy,)))

    def _record(self, sizes: Any, xs: Sequence[Tensor | None], ys: Sequence[Any]) -> Record:
        shapes, values = sizes
        attrs = dict(zip(self.attrs, values, strict=True))
        specs = list(zip(shapes, self.dtypes, strict=True))
        y = tuple(ys) if isinstance(self.outputs, tuple) else ys[0]
        return record_of(
            self.op, self.rule, attrs, self.inputs, specs, xs, self.outputs, y,
            self.layout, self.output_specs,
        )  # fmt: skip


DEFERRALS[Symbol] = Deferral(defer, in_innermost, size_tensor, of_shape, pull_later)


# -- functions of the library --------------------------------------------------------------------


def deferrable(f: Callable[P, R]) -> Callable[P, R]:
    """Return a function that may read sizes. If a size is unknown, the call waits for the run.

    Args:
        f: A function of Tensors that reads sizes, to compare them or to loop over them.

    Raises:
        GraphError: (from a call in a graph) f uses tensors of the graph that are not arguments.

    >>> import regrad.v1 as tf
    >>> from regrad.extend import deferrable
    >>> @deferrable
    ... def halves(x):
    ...     return x[: x.shape[0] // 2]
    >>> with tf.Graph().as_default(), tf.Session() as session:
    ...     x = tf.placeholder(tf.float32, [None])
    ...     session.run(halves(x), {x: [1.0, 2.0, 3.0, 4.0]})
    array([1., 2.], dtype=float32)
    """

    @wraps(complete_public(f))
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return f(*args, **kwargs)
            except UnknownShapeError:
                return _call_later(f, args, kwargs)
        except Exception as error:
            answer = answered(error, f, args, kwargs)
            if answer is error:
                raise
            raise answer from error

    return function


def _call_later(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, rebuild = containers.flatten((args, kwargs))
    read = [_as_tensor(leaf) for leaf in leaves]
    places = [i for i, x in enumerate(read) if x is not None]
    xs = [x for x in read if x is not None]
    if not any(is_symbolic(x) for x in xs):
        raise  # the UnknownShapeError, because no graph will run later
    shape_of_result: list[Any] = []
    path = PATH.get()
    foreseen: list[np.dtype] = []

    def call(tensors: Sequence[Tensor], sizes: Any) -> Sequence[Tensor]:
        a, k = rebuild(containers.replaced(sizes, places, tensors))
        with in_path(path):
            results, close = containers.flatten(f(*a, **k))
        shape_of_result[:] = [close]
        got = [y.dtype for y in results]
        if foreseen and got != foreseen:
            raise DTypeError(f"{f.__name__}: expected the dtypes {foreseen}, got {got}")
        return results

    sizes = [None if x is not None else leaf for leaf, x in zip(leaves, read, strict=True)]
    overrides = _in_force(xs)
    specs = _foresee(f, xs, {"call": call, "sizes": sizes, "overrides": overrides})
    foreseen += [spec.dtype for spec in specs]
    found = later(call, xs, sizes, overrides, specs)
    return shape_of_result[0](list(found)) if shape_of_result else found[0]


def _in_force(xs: Sequence[Tensor]) -> dict[str, Any]:
    """Return the overrides by op type for ops made here, including the graph's overrides."""
    state = current()
    if state is None or not state.overrides:
        return {}
    root = home(xs).root
    if any(b.once for b in state.overrides.values()):
        refuse_once(home(xs), "a function that waits for the run")
    types = [(getattr(k, "op_type", k), k, b) for k, b in state.overrides.items()]
    mine = [(t, k, b) for t, k, b in types if isinstance(t, str) or t[0] is root]
    mine.sort(key=lambda item: item[2].depth)
    return {k[1] if type(k) is tuple else k: b.settled(in_run=True) for _, k, b in mine}


def _foresee(f: Callable[..., Any], xs: Sequence[Tensor], attrs: Attrs) -> list[Spec]:
    """Return the specs of the results of a call, by a trial with small inputs."""
    places = [i for i, x in enumerate(xs) if is_symbolic(x)]

    def call(tensors: Sequence[Tensor], sizes: Any) -> Sequence[Tensor]:
        given = dict(zip(places, tensors, strict=True))
        return attrs["call"]([given.get(i, x) for i, x in enumerate(xs)], sizes)

    try:
        found = probe(LATER, [[xs[i]._data.spec for i in places]], attrs | {"call": call})
    except Exception:  # the function failed for all inputs of the trials
        if str(f.__annotations__.get("return")) == "Tensor":
            floats = [x.dtype for x in xs if is_inexact(x.dtype)]
            return [Spec(None, (floats or [xs[0].dtype])[0])]
        raise UnknownShapeError(
            f"{f.__name__} needs sizes that are unknown before the run of the graph, and the "
            "shapes of its results are unknown, too. Define the placeholders' shapes, or call "
            "set_shape."
        ) from None
    # The sizes may depend on other data that was equal in all trials. The rank does not.
    return [Spec(x.shape and (None,) * len(x.shape), x.dtype) for x in found]


def _as_tensor(leaf: object) -> Tensor | None:
    """Return a leaf as a tensor if it is an array. Tensors become inputs, other leaves do not."""
    return lift(leaf) if is_tensor(leaf) or is_array(leaf) else None
