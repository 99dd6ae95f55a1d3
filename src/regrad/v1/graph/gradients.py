"""`tf.gradients`, the registry of rules, and functions with custom gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from copy import copy
from functools import partial, wraps
from typing import Any

import numpy as np

import regrad as rg
from regrad.autodiff.custom_nodes import PathRule, custom_node, reaching
from regrad.core import containers, dims
from regrad.core.backends import is_inexact
from regrad.core.registry import OPS, RULES, name_is_taken
from regrad.core.registry import RegisterGradient as register
from regrad.core.rule import NoGradient, place
from regrad.core.state import current, next_id, run_held
from regrad.core.tape import cuts, effective
from regrad.core.tensor import TensorLike
from regrad.core.walk import Grads, walk
from regrad.errors import ArgumentError, DTypeError, GradientError, GraphError, RuleError
from regrad.graph.deferred import LATER
from regrad.graph.graph import Node, OpGraph, Symbol, tensor_of
from regrad.v1 import dtypes
from regrad.v1.graph.conversion import build, convert_to_tensor
from regrad.v1.graph.graphs import current_graph
from regrad.v1.graph.tensors import Tensor, face, operation

__all__ = [
    "AggregationMethod", "NotDifferentiable", "RegisterGradient", "UnconnectedGradients",
    "custom_gradient", "grad_pass_through", "gradients", "hessians",
]  # fmt: skip


class UnconnectedGradients:
    """The options of `tf.gradients` for an x that y does not depend on.

    Source: `tf.UnconnectedGradients`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x, y = tf.constant(1.0), tf.constant(2.0)
    ...     zero = tf.UnconnectedGradients.ZERO
    ...     print(tf.gradients(y, x), sess.run(tf.gradients(y, x, unconnected_gradients=zero)))
    [None] [0.0]
    """

    NONE = "none"
    ZERO = "zero"


class AggregationMethod:
    """The methods of adding gradients. In regrad all of them mean the same.

    Source: `tf.AggregationMethod`.

    >>> import regrad.v1 as tf
    >>> tf.AggregationMethod.DEFAULT == tf.AggregationMethod.ADD_N
    True
    """

    ADD_N = 0
    DEFAULT = ADD_N
    EXPERIMENTAL_TREE = 1
    EXPERIMENTAL_ACCUMULATE_N = 2


# -- registering ---------------------------------------------------------------------------------


def RegisterGradient(op_type: str) -> Callable[[Any], Any]:
    """Register a rule `(op, grad, …)` under a name, for `gradient_override_map`.

    Args:
        op_type: The name. It must not be an op type, since every op type already has a rule.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ArgumentError: the name is not a string.
        KeyError: the name is already registered.

    Source: `tf.RegisterGradient`.

    >>> import regrad.v1 as tf
    >>> @tf.RegisterGradient("NegatedDoc")
    ... def negated(op, grad):
    ...     return -grad
    """
    return register(op_type)


def NotDifferentiable(op_type: str) -> None:
    """Register a name for ops without a gradient, for `gradient_override_map`.

    Args:
        op_type: The name. It must not be an op type, since every op type already has a rule.

    Raises:
        ArgumentError: the name is not a string.
        KeyError: the name is already registered.

    Source: `tf.NotDifferentiable`.

    >>> tf.NotDifferentiable("NoneDoc")
    >>> with tf.Graph().as_default() as g:
    ...     x = tf.constant(1.0)
    ...     with g.gradient_override_map({"Sin": "NoneDoc"}):
    ...         y = tf.sin(x)
    ...     print(tf.gradients(y, x))
    [None]
    """
    if not isinstance(op_type, str):
        raise ArgumentError(f"op_type must be a string, got {place(op_type)}")
    if op_type in RULES or op_type in OPS:
        raise name_is_taken(op_type)
    RULES[op_type] = NoGradient()


# -- gradients -----------------------------------------------------------------------------------


def gradients(
    ys: TensorLike, xs: TensorLike, grad_ys: TensorLike = None, name: str = "gradients",
    colocate_gradients_with_ops: bool = False, gate_gradients: int | bool = False,
    aggregation_method: int | None = None, stop_gradients: TensorLike = None,
    unconnected_gradients: str = UnconnectedGradients.NONE,
) -> list[Any]:  # fmt: skip
    """Return ops that compute the gradients of the sum of `ys` with respect to each of `xs`.

    The backward pass visits each op on a path once and applies the rule that was active when the
    op was made. The rule receives the sum of the gradients that arrive at the op. Integer tensors
    have gradients too, as in TensorFlow 1.8.

    Args:
        ys: A tensor or a list of them.
        xs: Tensors or Variables to differentiate with respect to, also intermediate tensors.
        grad_ys: Weights for ys, of the same shapes. None, or an entry None, means ones.
        name: The name scope of the new ops (`gradients/<op>_grad/…`).
        colocate_gradients_with_ops, gate_gradients, aggregation_method: Without effect.
        stop_gradients: Tensors that gradients do not pass.
        unconnected_gradients: `"none"` or `"zero"`, the result for an x that ys do not depend on.

    Returns:
        A list with a gradient for each of xs, of the same shape and dtype, or None if ys do not
        depend on it.

    Raises:
        LookupError: an op on the path has no rule, or its rule was never registered.
        RuleError: a rule returns the wrong number of gradients, or a wrong shape or dtype.
        DTypeError, GraphError: grad_ys do not fit ys, or an option is unknown.

    Source: `tf.gradients`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant(3.0)
    ...     print(sess.run(tf.gradients(x * x, [x])))
    [6.0]
    """
    if unconnected_gradients not in ("none", "zero"):
        raise GraphError(f"Unknown value for unconnected_gradients: {unconnected_gradients!r}")
    if aggregation_method not in (None, 0, 1, 2):
        raise GraphError(f"Invalid aggregation_method specified {aggregation_method!r}.")
    return build_gradients(ys, xs, grad_ys, name, stop_gradients, unconnected_gradients)


def build_gradients(
    ys: TensorLike, xs: TensorLike, grad_ys: TensorLike, name: str, stop_gradients: TensorLike,
    unconnected: str, seen: list[Any] | None = None,
) -> list[Any]:  # fmt: skip
    """Return the result of `gradients`. See `pull_in_graph` for `seen`."""
    targets = [_target(y) for y in _listed(ys)]
    sources = [_source(x) for x in _listed(xs)]
    graphs = {x.node.graph: x for x in (*sources, *[y._data for y in targets])}
    if len(graphs) > 1:
        shown = " and ".join(str(face(tensor_of(x))) for x in graphs.values())
        raise GraphError(f"ys and xs must be from the same graph: {shown}")
    weights = [None] * len(targets) if grad_ys is None else _listed(grad_ys)
    if len(weights) != len(targets):
        raise GraphError(
            f"Length mismatch. Passed {len(weights)} grad_ys for {len(targets)} ys. (For one "
            "vector y write grad_ys=[[10.0, 20.0]].)"
        )
    stops = [] if stop_gradients is None else _listed(stop_gradients)
    stopped = {_with_ref(x)._ref()._symbol.node for x in stops}
    with current_graph().name_scope(name or "gradients") as scope:
        dys = [_seed(y, dy, i) for i, (y, dy) in enumerate(zip(targets, weights, strict=True))]
        found = pull_in_graph(targets, sources, dys, scope, stopped, seen)
        pairs = zip(found, sources, strict=True)
        return [_answer(dx, x, unconnected) for dx, x in pairs]


def _listed(values: TensorLike) -> list[Any]:
    return list(values) if isinstance(values, list | tuple) else [values]


def _target(y: TensorLike) -> rg.Tensor:
    t = convert_to_tensor(y)._read()
    if t._data.dtype.kind == "O":
        raise DTypeError(f"tf.gradients: strings have no gradient, got {face(t)}")
    return t


def _with_ref(x: TensorLike) -> Any:
    """Return a Variable or Tensor unchanged, and any other value as a Tensor."""
    return x if hasattr(type(x), "_ref") else convert_to_tensor(x)


def _source(x: TensorLike) -> Symbol:
    """Return the symbol that represents an x in the branch or loop being built, if any.

    Outside of branches and loops, a Variable is the output of its own op, not of a read.
    """
    own, graph = _with_ref(x), current_graph()
    symbol = own._ref()._symbol
    if graph.outer is None or symbol.node.graph is graph:
        return symbol
    if getattr(own, "_ruled", None):
        raise GraphError(
            f"rg.at(parameter={own.op.name!r}): the rule of a Variable does not apply to "
            "tf.gradients inside of a branch or loop. Call tf.gradients outside of it."
        )
    return graph.entering(own._read())._data


def _seed(y: rg.Tensor, dy: TensorLike, index: int) -> rg.Tensor:
    """Return the initial gradient of a target: its entry in grad_ys, or ones."""
    if dy is None:
        if y._data.dtype.kind == "c":
            raise DTypeError(
                f"Gradients of complex tensors ({face(y)}) must set grad_ys (y.dtype = "
                f"{y._data.dtype})"
            )
        return OPS["OnesLike"].function(y)
    dy = convert_to_tensor(dy, None, f"grad_ys_{index}", preferred_dtype=dtypes.of(y._data.dtype))
    wanted, got = y._data.dtype, dy._symbol.dtype
    if got != wanted if is_inexact(wanted) else got.kind not in "iuf":
        raise DTypeError(
            f"grad_ys[{index}] has the dtype {dy.dtype.name}, expected the dtype of {face(y)}"
        )
    if dy.shape.ndims == 0 and dims.same((), y._data.shape) is not True:
        return OPS["BroadcastTo"].function(dy._read(), y._data.shape)
    if dims.same(dy._symbol.shape, y._data.shape) is False:
        raise GraphError(
            f"grad_ys[{index}] has the shape {dy.shape}, and {face(y)} has {face(y).shape}"
        )
    return dy._read()


def _answer(dx: rg.Tensor | None, x: Symbol, unconnected: str) -> Any:
    if dx is not None:
        whole = not is_inexact(x.dtype)  # as in TensorFlow 1.8, integers have integer gradients
        return face(rg.astype(dx, x.dtype) if whole else dx)
    if unconnected == "none":
        return None
    return face(OPS["ZerosLike"].function(face(tensor_of(x))._read()))


def pull_in_graph(
    ys: Sequence[rg.Tensor], xs: Sequence[Symbol], dys: Sequence[rg.Tensor], scope: str,
    stopped: Container[Node] = (), seen: list[Any] | None = None,
) -> list[rg.Tensor | None]:  # fmt: skip
    """Build ops, named under `scope`, for the gradients of xs, given the gradients dys of ys.

    For each gradient on the way, (node, dy, leaf, dx) is appended to `seen`.
    """
    ids = {x.id for x in xs}
    ends = [y._data for y in ys]
    nodes, watched = path(ends, ids, stopped)
    if any(node.derived for node in nodes):  # this call differentiates a gradient
        nodes, watched = path(ends, ids, stopped, _without_once)
    grads: Grads = {}
    for y, dy in zip(ys, dys, strict=True):
        key = y._data.id
        if key in watched:
            grads[key] = dy if key not in grads else grads[key] + dy  # pyright: ignore
    found: Grads = {}

    def records() -> Iterator[Node]:
        # The gradient of an x is complete when the walk reaches the op that made x.
        for node in reversed(nodes):
            found.update((s.id, grads[s.id]) for s in node.symbols if s.id in ids and s.id in grads)
            yield node

    graph = current_graph()
    before, start = graph.scope, len(graph.own_nodes)
    try:
        walk(records(), grads, watched, _OpNames(graph, scope, seen))
    finally:
        graph.scope = before
    for node in graph.own_nodes[start:]:
        node.derived = True
    return [found.get(x.id, grads.get(x.id)) for x in xs]


def path(
    ys: Sequence[Symbol], xs: set[int], stopped: Container[Node] = (),
    seen_as: Callable[[Node], Node] = lambda node: node,
) -> tuple[list[Node], set[int]]:  # fmt: skip
    """Return the nodes between ys and xs, and the ids of the symbols that gradients pass."""
    watched, nodes = set(xs), []
    order, used = reaching(ys, seen_as=seen_as)
    for each in order:
        node = seen_as(each)
        if each not in stopped and (reached := _reached(node, used, watched)):
            nodes.append(node)
            watched.update(reached)
    return nodes, watched


def _without_once(node: Node) -> Node:
    """Return the node as second derivatives use it, without rules for first derivatives only."""
    if node.derived:
        return node
    overrides = node.attrs.get("overrides") if node.op is LATER else None
    if not (node.rule.once or any(b.once for b in (overrides or {}).values())):
        return node
    own = copy(node)
    own.rule = effective(node.op, node.op.rule, node.specs, node.y)
    own.attrs = {**node.attrs, "overrides": None} if overrides else node.attrs
    return own


def _reached(node: Node, used: Container[int], watched: set[int]) -> Iterable[int]:
    """Return the ids of the outputs through which a gradient reaches a watched symbol.

    For an op with several outputs and a built-in rule, these are the outputs that carry a
    gradient.
    """
    if isinstance(node.rule, PathRule):
        return node.rule.reached(node, used, watched)
    if watched.isdisjoint(node.inputs) or cuts(node.rule, node.attrs, node.xs):
        return []
    own = node.op.owns(node.rule)
    casts = own and node.op.type == "Cast" and is_inexact(node.symbols[0].dtype)
    if casts and not node.xs[0]._data.carries:
        return []  # (TensorFlow's rule for Cast returns no gradient for integers)
    carrying = [s.id for s in node.symbols if s.carries]
    return carrying if carrying and own and node.op.several else [s.id for s in node.symbols]


class _OpNames:
    """Names the ops of a backward pass after the ops that they differentiate."""

    def __init__(self, graph: OpGraph, scope: str, seen: list[Any] | None) -> None:
        self.graph = graph
        self.scope = scope
        self.seen = seen

    def before(self, record: Any) -> None:
        self.graph.scope = f"{self.scope}{record.name}_grad/"

    def __call__(self, record: Any, dy: Any, leaf: int, dx: rg.Tensor | None) -> None:
        self.graph.scope = self.scope
        if self.seen is not None:
            self.seen.append((record, dy, leaf, dx))


def hessians(
    ys: TensorLike, xs: TensorLike, name: str = "hessians", **options: Any
) -> list[Tensor]:
    """Return the second derivatives of `ys` with respect to each of `xs`.

    Args:
        ys: A tensor or a list of them, which are summed.
        xs: Tensors or Variables. Their sizes must be known when the graph is built.
        name: The name scope of the new ops.
        **options: Options of `tf.gradients`.

    Returns:
        A list with a tensor for each of xs. For an x of shape `s` its shape is `s + s`.

    Raises:
        GradientError: ys do not depend on xs.
        GraphError: a size of xs is unknown.

    Source: `tf.hessians`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([1.0, 2.0])
    ...     print(sess.run(tf.hessians(x[0] ** 2.0 * x[1], x)[0]))
    [[4. 2.]
     [2. 0.]]
    """
    with current_graph().name_scope(name):
        return [_hessian(ys, _with_ref(x), options) for x in _listed(xs)]


def _hessian(ys: TensorLike, x: Any, options: dict[str, Any]) -> Tensor:
    (first,) = gradients(ys, x, **options)
    shape = x.shape.as_list()
    if first is None:
        raise GradientError("hessians: no path leads from ys to xs")
    if None in shape:
        raise GraphError(f"hessians: the shape of {x} must be known when the graph is built")
    flat = build("Reshape", "Reshape", rg.reshape, first, shape=(-1,))
    each = partial(gradients, xs=x, unconnected_gradients="zero", **options)
    rows = [each(flat[i])[0] for i in range(int(np.prod(shape)))]
    stacked = convert_to_tensor(rows, name="stack")
    return build("Reshape", "Reshape", rg.reshape, stacked, shape=(*shape, *shape))


# -- functions with a gradient of their own ------------------------------------------------------


def custom_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a custom gradient: `f(*xs)` returns `(ys, grad_fn)`.

    `grad_fn(*dys)` receives one gradient per output (zeros for unused outputs) and returns one
    gradient per argument. If f uses trainable variables, grad_fn must take `variables=None` and
    return `(gradients of the arguments, [gradient per variable])`. f runs once per call. grad_fn
    runs once per `tf.gradients`. The ops inside f do not contribute to the gradient.

    Args:
        f: A function of tensors that returns tensors (or containers of them) and grad_fn.

    Returns:
        A function of tensors that returns the ys.

    Raises:
        ArgumentError: (when called) f does not return a pair, or grad_fn does not take `variables`.
        GraphError: (when called) the caller passes keyword arguments.
        RuleError: (when differentiated) grad_fn returns the wrong number of gradients.

    Source: `tf.custom_gradient`.

    >>> import regrad.v1 as tf
    >>> @tf.custom_gradient
    ... def clipped(x):
    ...     return tf.identity(x), lambda dy: tf.clip_by_value(dy, -1.0, 1.0)
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([5.0, 0.2])
    ...     print(sess.run(tf.gradients(clipped(x) ** 2.0, x)))
    [array([1. , 0.4], dtype=float32)]
    """

    @wraps(f)
    def decorated(*args: TensorLike, **kwargs: Any) -> Any:
        if kwargs:
            raise GraphError(
                "the functions of tf.custom_gradient take positional arguments only (keyword "
                f"arguments would not be differentiated); got {', '.join(kwargs)}"
            )
        return _call_custom(f, [convert_to_tensor(a) for a in args])

    return decorated


def _call_custom(f: Callable[..., Any], args: list[Tensor]) -> Any:
    """Return the result of one call of f, as a node with the gradient that f returns."""
    graph, state = current_graph(), current()
    name, count = getattr(f, "__name__", "f"), len(args)
    start, mark = len(graph.own_nodes), next_id()
    answer: Any = f(*args)
    if not isinstance(answer, tuple | list) or len(answer) != 2 or not callable(answer[1]):
        raise ArgumentError(
            f"custom_gradient: {name} must return a pair (result, grad_fn), got {answer!r:.80}"
        )
    result, grad_fn = answer
    outputs, close = containers.flatten(result)
    if not outputs:
        raise ArgumentError(f"custom_gradient: {name} returned no tensors")
    variables = _variables_in(graph.own_nodes[start:], args, name, grad_fn)
    ys = [convert_to_tensor(y)._read() for y in outputs]

    def grad_func(dys: Sequence[rg.Tensor | None], wanted: Sequence[Any]) -> list[Any]:
        faces = [face(dy) for dy in dys]
        answer = grad_fn(*faces, variables=variables) if variables else (grad_fn(*faces), [])
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise RuleError(
                f"custom_gradient: {name} uses variables, so its grad_fn must return (gradients "
                "of the arguments, [gradient per variable])"
            )
        checked = partial(_plain, name, grad_fn)
        return [*checked(answer[0], count), *checked(answer[1], len(variables), "variable")]

    def input_name(i: int) -> str:
        return containers.parameter(f, i) if i < count else variables[i - count].name

    xs = [t._read() for t in (*args, *[v.value() for v in variables])]
    pull = partial(run_held, None if state is None else state.scopes, grad_func)
    return face(close(list(custom_node(name, ys, xs, pull, mark, input_name, grad_fn, taped=True))))


def _variables_in(
    nodes: Sequence[Node], args: list[Tensor], name: str, grad_fn: Callable[..., Any]
) -> list[Any]:
    """Return the trainable variables that f read. grad_fn must return their gradients."""
    given = {t._symbol.id for t in args}
    found: dict[Any, None] = {}
    for node in nodes:
        for symbol in (*node.sources(), *node.symbols):
            variable = _read_from(symbol)
            if variable is not None and variable.trainable and symbol.id not in given:
                found[variable] = None
        if node.op.type == "VariableV2" and not operation(node).variable.use_resource:
            raise ArgumentError(
                f"custom_gradient: {name} makes the variable {node.name!r}; make it before and "
                "use it inside, or make it with use_resource=True"
            )
    parameters = inspect.signature(grad_fn).parameters.values() if found else ()
    if found and not any(p.name == "variables" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise ArgumentError(
            f"custom_gradient: {name} uses the variables {', '.join(v.name for v in found)}, so "
            "its grad_fn must accept keyword argument 'variables' and return (gradients, "
            "[gradient per variable])"
        )
    return list(found)


def _read_from(symbol: Symbol) -> Any:
    """Return the Variable whose value the symbol is, or None."""
    node = symbol.node
    if node.op.type != "Identity" or not node.op.stateful:
        return None
    return operation(node.xs[0]._data.node).variable


def _plain(
    name: str, grad_fn: Callable[..., Any], answer: Any, count: int, of: str = "input"
) -> list[Any]:
    """Return the results of a grad_fn as regrad Tensors, one per argument or variable."""
    given = _listed(answer)
    if len(given) != count:
        raise RuleError(
            f"custom_gradient: Num gradients {len(given)} generated by grad_fn of {name} do not "
            f"match num {of}s {count}: {place(grad_fn)}. grad_fn must return one gradient for "
            f"each {of} of {name}."
        )
    return [None if g is None else convert_to_tensor(g)._read() for g in given]


def grad_pass_through(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f with the gradient of the identity, which passes gradients through unchanged.

    Args:
        f: A function of tensors that returns the same number of tensors, of the same shapes.

    Returns:
        A function of tensors with the results of f.

    Raises:
        RuleError: (when differentiated) the numbers of arguments and results differ.

    Source: `tf.grad_pass_through`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([0.4, 2.6])
    ...     y = tf.grad_pass_through(tf.round)(x)
    ...     print(sess.run([y, tf.gradients(y, x)[0]]))
    [array([0., 3.], dtype=float32), array([1., 1.], dtype=float32)]
    """

    def passed(*args: TensorLike) -> Any:
        return custom_gradient(lambda *xs: (f(*xs), lambda *dys: dys))(*args)

    return passed
