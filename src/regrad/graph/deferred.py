"""Functions that wait for the run, because they ask for a size that only the run can tell.

Such a rule, or such a function of the library, becomes one node: in the run it is given values
and does its work at once, as in eager mode. The gradient of that node is another such node.
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
# A function of Tensors, and of the sizes that the run has resolved, to a list of Tensors.
Later = Callable[[Sequence[Tensor], Any], Sequence[Tensor]]


def _kernel(
    xp: Namespace, xs: Sequence[Array], call: Later, sizes: Any, overrides: Bindings
) -> Any:
    with in_state(State((), overrides) if overrides else None):
        ys = call([wrap(np.asarray(x) if isinstance(x, np.generic) else x) for x in xs], sizes)
    for y in filter(is_symbolic, ys):
        raise GraphError(
            "a rule or function that waits for the run, because it asks for sizes, returned a "
            "tensor of the graph. Let it use its arguments only, and not tensors from outside or "
            f"{y._data.words.constant}; or give the placeholders shapes, so that it need not wait."
        )
    return tuple(y._data for y in ys)


def later(
    call: Later, xs: Sequence[Tensor], sizes: Any, overrides: Bindings, specs: Sequence[Spec] | None
) -> tuple[Tensor, ...]:
    """A node that makes the call when the graph runs."""
    if not any(is_symbolic(x) for x in xs):  # the run has come
        state = current() or State()
        with in_state(state.overriding(overrides or None)):
            return tuple(call(list(xs), sizes))
    attrs = {"call": call, "sizes": sizes, "overrides": overrides}
    return defer(LATER, tuple(xs), attrs, (tuple(range(len(xs))),), specs)


class LaterRule(Rule):
    """The gradient of a deferred call: a deferred call that differentiates it."""

    name = "deferred"
    by_leaf = sparse = True

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return frozenset({0}), False

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return False  # nobody can know before the run

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
    """Pull gradients, in the run, through a call on the inputs of a record, those at `places`."""
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
    """The gradients by the inputs at `places`, given those at the outputs at `reached`.

    Where nothing is connected they are zeros.
    """

    def gradients(tensors: Sequence[Tensor], sizes: Any) -> Sequence[Tensor]:
        xs, dys = tensors[:count], tensors[count:]
        _, dxs = pulled(lambda xs: call(xs, sizes), xs, places, dys, reached)
        pairs = zip(places, dxs, strict=True)
        return [or_zeros(dx, xs[i], dtype_due(xs[i].dtype, dys)) for i, dx in pairs]

    return gradients


def dtype_due(dtype: np.dtype, dys: Sequence[Tensor | None]) -> np.dtype:
    """The dtype of a gradient: that of the input, or for integers that of what arrives."""
    arriving = [dy.dtype for dy in dys if dy is not None]
    return dtype if is_inexact(dtype) else next(filter(is_inexact, arriving), arriving[0])


def _spec_due(record: Record, leaf: int, dys: Sequence[Tensor | None]) -> Spec:
    """Return the known shape and dtype of the gradient by an input."""
    shape, dtype = record.specs[leaf]
    return spec_of_record(shape, dtype_due(dtype, dys))


def spec_of_record(shape: Shape, dtype: np.dtype) -> Spec:
    """A shape and dtype as records hold them, as a Spec."""
    return Spec(None if isinstance(shape, UnknownRank) else tuple(shape), dtype)


# -- rules ---------------------------------------------------------------------------------------


def pull_later(record: Record, dy: Cotangent, watched: set[int]) -> dict[int, Any]:
    """The gradients by leaf of a record whose rule must wait for the run."""
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
    """A record's rule, called on values: what arrives, the inputs kept, the outputs kept.

    It holds nothing of the record that is symbolic.
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
    """Return a function that may ask for sizes: where only the run can tell, the run calls it.

    Args:
        f: A function of Tensors that asks for sizes, to compare or to loop over them.

    Raises:
        GraphError: (when called in a graph) f uses tensors of the graph that are not arguments.

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
        raise  # the error that led here: there is no graph to wait for
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
            raise DTypeError(f"{f.__name__}: the dtypes {foreseen} were foreseen, got {got}")
        return results

    sizes = [None if x is not None else leaf for leaf, x in zip(leaves, read, strict=True)]
    overrides = _in_force(xs)
    specs = _foresee(f, xs, {"call": call, "sizes": sizes, "overrides": overrides})
    foreseen += [spec.dtype for spec in specs]
    found = later(call, xs, sizes, overrides, specs)
    return shape_of_result[0](list(found)) if shape_of_result else found[0]


def _in_force(xs: Sequence[Tensor]) -> dict[str, Any]:
    """The overrides for ops made here, those of the tensors' graph among them, by op type."""
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
    """Return the specs of the results of a call, found by calling it with small inputs."""
    places = [i for i, x in enumerate(xs) if is_symbolic(x)]

    def call(tensors: Sequence[Tensor], sizes: Any) -> Sequence[Tensor]:
        given = dict(zip(places, tensors, strict=True))
        return attrs["call"]([given.get(i, x) for i, x in enumerate(xs)], sizes)

    try:
        found = probe(LATER, [[xs[i]._data.spec for i in places]], attrs | {"call": call})
    except Exception:  # no inputs that were tried would do
        if str(f.__annotations__.get("return")) == "Tensor":
            floats = [x.dtype for x in xs if is_inexact(x.dtype)]
            return [Spec(None, (floats or [xs[0].dtype])[0])]
        raise UnknownShapeError(
            f"{f.__name__} asks for sizes that only the run of the graph can tell, and its "
            "results cannot be foreseen. Give the placeholders shapes, or call set_shape."
        ) from None
    # The sizes may follow from what else was equal in all trials; the rank does not.
    return [Spec(x.shape and (None,) * len(x.shape), x.dtype) for x in found]


def _as_tensor(leaf: object) -> Tensor | None:
    """A leaf that is a tensor: those go in as inputs, all else as it is."""
    return lift(leaf) if is_tensor(leaf) or is_array(leaf) else None
