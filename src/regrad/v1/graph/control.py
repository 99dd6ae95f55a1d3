"""Control dependencies, branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import regrad as rg
from regrad.core import containers, dims
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, DTypeError, GraphError, ShapeError
from regrad.graph.graph import NO_RULE, OpGraph, graph_op
from regrad.shapes.infer import Spec
from regrad.v1 import dtypes
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.forms import one_op
from regrad.v1.graph.graphs import add_op, control_dependencies, current_graph
from regrad.v1.graph.regions import Control, Step, control_node, inside, new_graph, spec_of
from regrad.v1.graph.static_shapes import TensorShape
from regrad.v1.graph.tensors import Operation, Tensor, face, operation
from regrad.v1.graph.values import at_most_one

__all__ = ["case", "cond", "group", "no_op", "while_loop"]


# -- order ---------------------------------------------------------------------------------------

NO_OP = graph_op("NoOp", lambda xp: (), name="no_op", several=True)


def no_op(name: str | None = None) -> Operation:
    """Return an op that does nothing. Its control dependencies run before it.

    Returns:
        The Operation. Its value in a run is None.

    Raises:
        GraphError: the graph is finalized.

    Op type: `NoOp`. Source: `tf.no_op`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.no_op()))
    None
    """
    add_op(NO_OP, name or "NoOp", [], {}, [], NO_RULE)
    return operation(current_graph().own_nodes[-1])


def group(*inputs: TensorLike, name: str | None = None, **options: Any) -> Operation:
    """Return an op that runs after all of these ops and tensors.

    Args:
        *inputs: Ops and tensors, or containers of them.
        **options: Without effect.

    Returns:
        The Operation, a `NoOp`. Its value in a run is None.

    Raises:
        ArgumentError: an input is neither a tensor nor an op.

    Source: `tf.group`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     v, w = tf.Variable(1.0), tf.Variable(2.0)
    ...     sess.run(tf.global_variables_initializer())
    ...     sess.run(tf.group(tf.assign(v, 10.0), tf.assign(w, 20.0)))
    ...     print(sess.run([v, w]))
    [10.0, 20.0]
    """
    leaves = containers.flatten(list(inputs))[0] if inputs else []
    for leaf in leaves:
        if not hasattr(leaf, "op") and not isinstance(leaf, Operation):
            raise ArgumentError(f"group takes tensors and ops, got {leaf!r:.60}")
    with control_dependencies(leaves):
        return no_op(name or "group_deps")


def tuple_(
    tensors: Sequence[TensorLike | None], name: str | None = None,
    control_inputs: Sequence[TensorLike] | None = None,
) -> list[Any]:  # fmt: skip
    """Return the tensors, each available only after all of them have been computed.

    Args:
        tensors: Tensors. An entry may be None.
        control_inputs: Additional ops and tensors to wait for.

    Returns:
        A list of copies of the tensors, with None where `tensors` has None.

    Raises:
        GraphError: `tensors` contains no tensor.
        DTypeError: an entry cannot become a tensor.

    Op type: `Identity`, one for each. Source: `tf.tuple`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     a, b = tf.tuple([tf.constant(1.0), tf.constant(2.0)])
    ...     print(sess.run(a))
    1.0
    """
    if not any(t is not None for t in tensors):
        raise GraphError("tuple: expected at least one tensor, got none")
    made = [None if t is None else convert_to_tensor(t) for t in tensors]
    waits = [t for t in made if t is not None] + list(control_inputs or ())
    with current_graph().name_scope(name or "tuple"), control_dependencies(waits):
        wait = partial(one_op, "Identity", "control_dependency", rg.identity)
        return [None if t is None else wait(t) for t in made]


# -- branches ------------------------------------------------------------------------------------


def cond(
    pred: TensorLike, true_fn: Callable[[], Any] | None = None,
    false_fn: Callable[[], Any] | None = None, strict: bool = False, name: str | None = None,
    fn1: Callable[[], Any] | None = None, fn2: Callable[[], Any] | None = None,
) -> Any:  # fmt: skip
    """Return the result of `true_fn()` or `false_fn()`. A run computes only the chosen branch.

    `cond` calls both functions once, to build their branches. They must return the same structure
    of tensors, with the same dtypes. Ops inside are bound to the overrides that are active at the
    call. A list of one tensor is returned as the tensor itself, unless `strict` is true.

    Args:
        pred: A bool tensor of rank 0.
        true_fn, false_fn: Functions without arguments that return tensors or containers of them.
        strict: Return a list of one tensor as a list.
        name: The name of the op in the graph.
        fn1, fn2: The old names of `true_fn` and `false_fn`.

    Returns:
        A structure of tensors, the same that the functions return.

    Raises:
        ArgumentError: pred is a Python bool (use `if`), its dtype is not bool, or a function is
            not callable.
        ShapeError: pred does not have rank 0.
        GraphError: the branches differ in structure or dtypes, or one returns None.

    Source: `tf.cond`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.placeholder(tf.float32, [])
    ...     y = tf.cond(x > 0.0, lambda: x * 2.0, lambda: -x)
    ...     print(sess.run([y, tf.gradients(y, x)[0]], {x: -3.0}))
    [3.0, -1.0]
    """
    functions = (fn1 if true_fn is None else true_fn, fn2 if false_fn is None else false_fn)
    for function, called in zip(functions, ("true_fn", "false_fn"), strict=True):
        if not callable(function):
            raise ArgumentError(f"cond: {called} must be callable, got {function!r:.60}")
    if isinstance(pred, bool):
        raise ArgumentError("cond: pred must not be a Python bool: use a Python if statement")
    pred = _as_condition("cond: pred must", convert_to_tensor(pred))
    with inside(new_graph(name or "cond")) as graph:
        chosen = graph.placeholder(pred._symbol.spec, "pred")
        built = [_branch(f, graph, name or "cond", strict) for f in functions]  # pyright: ignore
    steps, (close, _) = zip(*built, strict=True)
    inputs, control = [(pred._read(), chosen)], Control(graph, list(steps))
    return close(list(face(control_node(name or "cond", inputs, _merged(built), control))))


def _as_condition(what: str, y: Tensor) -> Tensor:
    if y.dtype != dtypes.bool:
        raise ArgumentError(f"{what} be a bool tensor, got {y}")
    if y.shape.ndims not in (0, None):
        raise ShapeError(f"{what} have rank 0, got {y}")
    return y


def _branch(
    function: Callable[[], Any], graph: OpGraph, name: str, strict: bool
) -> tuple[Step, containers.Rebuild]:
    answer = function()
    if isinstance(answer, list | tuple) and len(answer) == 1 and not strict:
        answer = answer[0]
    leaves, close = containers.flatten(answer)
    if not leaves:
        raise GraphError(f"{name}: a branch must return a tensor, got {answer!r:.40}")
    # An op runs too, and its result is True.
    targets = [leaf._node for leaf in leaves if isinstance(leaf, Operation)]
    tensors = [convert_to_tensor(True if isinstance(x, Operation) else x) for x in leaves]
    return Step([graph.entering(t._read()) for t in tensors], targets=targets), close


def _merged(built: Sequence[tuple[Step, containers.Rebuild]]) -> list[Spec]:
    """Return the static shapes and dtypes of the results of either of two branches."""
    shown = [close(["x"] * len(step.outputs)) for step, close in built]
    if shown[0] != shown[1]:
        raise GraphError(
            f"cond: the branches must return one structure, got {shown[0]} and {shown[1]}"
        )
    specs = []
    for x, y in zip(*[step.outputs for step, _ in built], strict=True):
        if x._data.dtype != y._data.dtype:
            raise GraphError(
                "cond: the branches must return tensors of the same dtypes, got "
                f"{x._data.dtype} ({x._data.name}) and {y._data.dtype} ({y._data.name})"
            )
        m, n = spec_of(x).shape, spec_of(y).shape
        shape = None
        if m is not None and n is not None and len(m) == len(n):
            pairs = zip(m, n, strict=True)
            shape = tuple([a if type(a) is type(b) is int and a == b else None for a, b in pairs])
        specs.append(Spec(shape, x._data.dtype))
    return specs


def case(
    pred_fn_pairs: Any, default: Callable[[], Any] | None = None, exclusive: bool = False,
    strict: bool = False, name: str = "case",
) -> Any:  # fmt: skip
    """Return the result of the function paired with the first true predicate, or `default()`.

    Args:
        pred_fn_pairs: Pairs of a bool tensor of rank 0 and a function, or a dict of them.
        default: The function to use if no predicate is true. By default the last pair's function.
        exclusive: Whether the run raises if several predicates are true.
        strict: Return a list of one tensor as a list.
        name: The name of the ops in the graph.

    Returns:
        A structure of tensors, the same that the functions return.

    Raises:
        GraphError: there are no pairs, or the functions differ in structure or dtypes.
        ArgumentError: a predicate is not a bool tensor, or a function is not callable.
        InvalidArgumentError: in the run, several predicates are true, and `exclusive` is true.

    A composition of `tf.cond`. Source: `tf.case`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.placeholder(tf.float32, [])
    ...     pairs = [(x < 0.0, lambda: -x), (x > 10.0, lambda: tf.constant(10.0))]
    ...     y = tf.case(pairs, default=lambda: x)
    ...     print([float(sess.run(y, {x: value})) for value in (-2.0, 3.0, 12.0)])
    [2.0, 3.0, 10.0]
    """
    pairs = list(pred_fn_pairs.items() if isinstance(pred_fn_pairs, dict) else pred_fn_pairs)
    if not pairs:
        raise GraphError("case: expected at least one pair of a predicate and a function, got none")
    if exclusive and len(pairs) > 1:
        preds, functions = zip(*pairs, strict=True)
        pairs = list(zip(one_op(None, name, _exclusive, *preds), functions, strict=True))
    chosen: Any = pairs.pop()[1] if default is None else default
    for pred, function in reversed(pairs):
        chosen = partial(cond, pred, function, chosen, strict, name)
    return chosen()


def _exclusive(*preds: rg.Tensor) -> tuple[rg.Tensor, ...]:
    """Return the predicates, checked in the run: at most one of them is true."""
    return rg.unstack(at_most_one("case", rg.stack(preds)))


# -- loops ---------------------------------------------------------------------------------------


def while_loop(
    cond: Callable[..., Any], body: Callable[..., Any], loop_vars: Any,
    shape_invariants: Any = None, parallel_iterations: int = 10, back_prop: bool = True,
    swap_memory: bool = False, name: str | None = None, maximum_iterations: TensorLike = None,
    return_same_structure: bool = False,
) -> Any:  # fmt: skip
    """Return the loop variables after `body(*loop_vars)`, repeated while `cond(*loop_vars)` holds.

    `while_loop` calls both functions once, to build the loop. The loop variables keep their
    dtypes. They also keep their static shapes unless `shape_invariants` has looser ones. Gradients
    of any order pass through the loop. The backward pass runs the loop again.

    Args:
        cond: A function of the loop variables that returns a bool tensor of rank 0.
        body: A function of the loop variables that returns their next values.
        loop_vars: The initial values: tensors, numbers or arrays, and containers of them.
        shape_invariants: A TensorShape for each loop variable, which every iteration must fit.
        parallel_iterations, swap_memory: Without effect.
        back_prop: Whether gradients pass through the loop.
        name: The name of the op in the graph.
        maximum_iterations: The maximum number of iterations, a Python number.
        return_same_structure: Return a list of one loop variable as a list.

    Returns:
        The loop variables after the loop, in the structure that `body` returns.

    Raises:
        ArgumentError: a function is not callable, or the condition is not a bool.
        GraphError: loop_vars is empty, or body returns a different number of values.
        DTypeError: a loop variable changes its dtype.
        ShapeError: a loop variable does not keep its static shape.

    Source: `tf.while_loop`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant(2.0)
    ...     i, y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * x), [0, 1.0])
    ...     print(sess.run([y, tf.gradients(y, x)[0]]))
    [8.0, 12.0]
    """
    if not callable(cond) or not callable(body):
        raise ArgumentError("while_loop: cond and body must be callable")
    leaves, close, _ = containers.opened(loop_vars, None)
    if not leaves:
        raise GraphError("No loop variables provided")
    start = [convert_to_tensor(v) for v in leaves]
    test = lambda args: _spread(cond, close(args))  # noqa: E731
    turn = lambda args, _: _results(_spread(body, close(args)), len(leaves))  # noqa: E731
    limit = None if maximum_iterations is None else int(maximum_iterations)
    specs = _invariants(start, shape_invariants)
    found, again = loop_node(name or "while", test, turn, start, specs, limit=limit)
    if not back_prop:
        found[0]._symbol.node.rule = NO_RULE
    answer = again(found)
    answer = answer if isinstance(answer, list | tuple) else [answer]
    return answer[0] if len(answer) == 1 and not return_same_structure else answer


def loop_node(
    name: str, test: Callable[[list[Tensor]], Any] | None,
    body: Callable[[list[Tensor], list[Tensor]], tuple[list[Any], Any]], start: Sequence[Tensor],
    specs: Sequence[Spec], entries: Sequence[Tensor] = (), limit: int | None = None,
) -> tuple[list[Tensor], Any]:  # fmt: skip
    """Make a loop, and return its results and the second value that `body` returned.

    Args:
        test: The condition, a function of the loop variables. None: one iteration for each entry.
        body: A function of the loop variables and of one entry of each of `entries`. It returns
            the next values, followed by values to stack, and any second value.
        start: The initial values of the loop variables.
        specs: The shapes and dtypes that each iteration may rely on.
        entries: Tensors, which have one entry for each iteration.
    """
    n, given = len(start), [spec_of(x._read()) for x in entries]
    rows = [Spec(x.shape and tuple(x.shape[1:]), x.dtype) for x in given]
    with inside(new_graph(name)) as graph:
        inner = [graph.placeholder(spec) for spec in (*specs, *rows)]
        faces, tested = [face(x) for x in inner], None
        if test is not None:
            shown = convert_to_tensor(test(faces))
            _as_condition("while_loop: cond must return a value that must", shown)
            tested = Step([graph.entering(shown._read())])
        made, more = body(faces[:n], faces[n:])
        ys = [graph.entering(convert_to_tensor(y)._read()) for y in made]
    count = given[0].shape[0] if given and given[0].shape else None
    ends = [_after(*each) for each in zip(inner, ys, specs, strict=False)]
    ends += [_stacked(count, spec_of(y)) for y in ys[n:]]
    inputs = [(x._read(), own) for x, own in zip((*start, *entries), inner, strict=True)]
    along = frozenset(x._id for x in inner[n:])
    control = Control(graph, [Step(ys, inner[:n])], True, tested, limit, along)
    return list(face(control_node(name, inputs, ends, control))), more


def _stacked(count: Any, y: Spec) -> Spec:
    """Return the spec of values of one spec, stacked along a new first axis."""
    if y.shape is None:
        return y
    return Spec((count, *[n if type(n) is int else None for n in y.shape]), y.dtype)


def _spread(function: Callable[..., Any], args: Any) -> Any:
    return function(*args) if isinstance(args, list | tuple) else function(args)


def _invariants(start: Sequence[Tensor], invariants: Any) -> list[Spec]:
    if invariants is None:
        return [spec_of(v._read()) for v in start]
    shapes = containers.opened(invariants, None)[0]
    if len(shapes) != len(start):
        raise GraphError(
            f"while_loop: {len(shapes)} shape_invariants for {len(start)} loop variables"
        )
    for v, shape in zip(start, shapes, strict=True):
        if not shape.is_compatible_with(v.shape):
            raise ShapeError(f"while_loop: the shape invariant {shape} does not allow {v}")
    sizes = [None if shape.ndims is None else tuple(shape.as_list()) for shape in shapes]
    return [Spec(known, v._symbol.dtype) for known, v in zip(sizes, start, strict=True)]


def _results(answer: Any, count: int) -> tuple[list[Any], containers.Rebuild]:
    leaves, close, _ = containers.opened(answer, None)
    if len(leaves) != count:
        raise GraphError(
            f"while_loop: body must return as many values as there are loop variables, {count}, "
            f"got {len(leaves)}: {answer!r:.60}"
        )
    return leaves, close


def _after(x: rg.Tensor, y: rg.Tensor, spec: Spec) -> Spec:
    """Return the spec of a loop variable after the loop, which every iteration must preserve.

    x is the loop variable at the beginning of an iteration, and y at the end.
    """
    if y._data.dtype != spec.dtype:
        raise DTypeError(
            f"while_loop: a loop variable of {spec.dtype} became {y._data.dtype} in the body "
            f"({face(y)}); use tf.cast"
        )
    enters, leaves = TensorShape(x._data.shape), TensorShape(y._data.shape)
    ranked = spec.shape is not None and enters.ndims == leaves.ndims
    sizes = list(zip(x._data.shape, y._data.shape, strict=True)) if ranked else []
    kept = [dims.same((m,), (n,)) is True for m, n in sizes]
    lost = any(isinstance(m, int) and not same for (m, _), same in zip(sizes, kept, strict=True))
    if lost or (enters.is_fully_defined() and leaves.is_fully_defined() and enters != leaves):
        raise ShapeError(
            f"while_loop: a loop variable enters with shape {enters}, and {leaves} is known of its "
            "shape after one iteration. To allow it pass "
            "shape_invariants=[tf.TensorShape([None, ...])], or call set_shape in the body."
        )
    shape = [n if same else None for n, same in zip(spec.shape or (), kept, strict=False)]
    return Spec(tuple(shape) if ranked else None, spec.dtype)
