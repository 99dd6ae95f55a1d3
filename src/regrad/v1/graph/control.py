"""Control dependencies, branches, loops, and ops that call Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import regrad as rg
from regrad.core import containers, dims
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, DTypeError, GraphError, ShapeError
from regrad.graph.graph import NO_RULE, Node, graph_op
from regrad.shapes.infer import Spec
from regrad.v1 import dtypes, errors
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.forms import one_op
from regrad.v1.graph.graphs import add_op, control_dependencies, current_graph
from regrad.v1.graph.regions import GraphRegion, cond_node, inside, new_graph, spec_of, while_node
from regrad.v1.graph.static_shapes import TensorShape
from regrad.v1.graph.tensors import Operation, Tensor, face, operation

__all__ = [
    "Assert", "Print", "case", "cond", "group", "no_op", "numpy_function", "py_func", "while_loop",
]  # fmt: skip


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


# The dtype of one result, or the dtypes of several results.
DTypes = dtypes.DTypeLike | list[dtypes.DTypeLike] | tuple[dtypes.DTypeLike, ...]


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
        raise ArgumentError("pred must not be a Python bool: use a Python if statement")
    pred = convert_to_tensor(pred)
    if pred.dtype != dtypes.bool:
        raise ArgumentError(f"cond: pred must be a bool tensor, got {pred}")
    if pred.shape.ndims not in (0, None):
        raise ShapeError(f"cond: pred must have rank 0, got {pred}")
    built = [_branch(f, name or "cond", strict) for f in functions]  # pyright: ignore
    (first, one), (second, other) = built
    _check_branches(first, second, one, other)
    found = list(face(cond_node(pred._read(), (first, second), [])))
    return one(found)


def _branch(function: Callable[[], Any], name: str, strict: bool) -> tuple[GraphRegion, Any]:
    with inside(new_graph(name)) as graph:
        answer = function()
        if isinstance(answer, list | tuple) and len(answer) == 1 and not strict:
            answer = answer[0]
        leaves, close = containers.flatten(answer)
        if not leaves:
            raise GraphError(f"{name}: a branch must return a tensor, got {answer!r:.40}")
        targets: list[Node] = []
        tensors = [_result(leaf, targets, name) for leaf in leaves]
        outputs = [graph.entering(t._read()) for t in tensors]
    region = GraphRegion(graph, [], outputs, targets)
    return region, close


def _result(leaf: TensorLike, targets: list[Node], name: str) -> Tensor:
    """Return a result of a branch as a tensor. An op runs too, and its result is True."""
    if isinstance(leaf, Operation):
        targets.append(leaf._node)
        return convert_to_tensor(True)
    if leaf is None:
        raise GraphError(f"{name}: a branch returned None; return a tensor")
    return convert_to_tensor(leaf)


def _check_branches(
    first: GraphRegion, second: GraphRegion, one: Callable[[list[Any]], Any],
    other: Callable[[list[Any]], Any],
) -> None:  # fmt: skip
    counts = len(first.outputs), len(second.outputs)
    shown = [close([*"x" * n]) for close, n in zip((one, other), counts, strict=True)]
    if shown[0] != shown[1]:
        raise GraphError(
            f"cond: the branches must return one structure, got {shown[0]} and {shown[1]}"
        )
    for x, y in zip(first.outputs, second.outputs, strict=True):
        if x._data.dtype != y._data.dtype:
            raise GraphError(
                "cond: the branches must return tensors of the same dtypes, got "
                f"{x._data.dtype} ({x._data.name}) and {y._data.dtype} ({y._data.name})"
            )


def case(
    pred_fn_pairs: Any, default: Callable[[], Any] | None = None, exclusive: bool = False,
    strict: bool = False, name: str = "case",
) -> Any:  # fmt: skip
    """Return the result of the function paired with the first true predicate, or `default()`.

    Args:
        pred_fn_pairs: Pairs of a bool tensor of rank 0 and a function, or a dict of them.
        default: The function to use if no predicate is true. By default the last pair's function.
        exclusive: Without effect: several true predicates are not an error.
        strict: Return a list of one tensor as a list.
        name: The name of the ops in the graph.

    Returns:
        A structure of tensors, the same that the functions return.

    Raises:
        GraphError: there are no pairs, or the functions differ in structure or dtypes.
        ArgumentError: a predicate is not a bool tensor, or a function is not callable.

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
    if default is None:
        *pairs, (_, default) = pairs
    if not pairs:
        assert default is not None
        return default()
    (pred, function), *rest = pairs
    if not rest:
        return cond(pred, function, default, strict, name)
    return cond(pred, function, lambda: case(rest, default, exclusive, strict, name), strict, name)


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
    leaves, close = containers.flatten(_unlisted(loop_vars))
    if not leaves:
        raise GraphError("No loop variables provided")
    start = [convert_to_tensor(v) for v in leaves]
    specs = _invariants(start, shape_invariants)
    label = name or "while"
    tested = _loop_region(label, specs, lambda args: [cond(*_spread(close(args)))])
    _check_condition(tested.outputs[0])
    structure: list[Any] = []
    repeated = _loop_region(
        label, specs, lambda args: _results(body, close(args), len(leaves), structure)
    )
    triples = zip(repeated.arguments, repeated.outputs, specs, strict=True)
    specs = [_after(*triple) for triple in triples]
    limit = None if maximum_iterations is None else int(maximum_iterations)
    found = while_node(tested, repeated, [v._read() for v in start], specs, limit)
    if not back_prop:
        found[0]._data.node.rule = NO_RULE
    answer = structure[0](list(face(found)))
    single = isinstance(answer, list | tuple) and len(answer) == 1 and not return_same_structure
    return answer[0] if single else answer


def _unlisted(loop_vars: Any) -> Any:
    """Return the loop variables with each number or array converted to a tensor."""
    if isinstance(loop_vars, list | tuple) and not hasattr(loop_vars, "_fields"):
        plain = int | float | np.ndarray | np.generic
        made = [convert_to_tensor(v) if isinstance(v, plain) else v for v in loop_vars]
        return type(loop_vars)(made)
    return loop_vars


def _spread(args: Any) -> Any:
    return args if isinstance(args, list | tuple) else [args]


def _invariants(start: Sequence[Tensor], invariants: Any) -> list[Spec]:
    if invariants is None:
        return [spec_of(v._read()) for v in start]
    shapes = _shapes(invariants)
    if len(shapes) != len(start):
        raise GraphError(
            f"while_loop: {len(shapes)} shape_invariants for {len(start)} loop variables"
        )
    made = []
    for v, shape in zip(start, shapes, strict=True):
        if not shape.is_compatible_with(v.shape):
            raise ShapeError(f"while_loop: the shape invariant {shape} does not allow {v}")
        made.append(Spec(None if shape.ndims is None else tuple(shape.as_list()), v._symbol.dtype))
    return made


def _shapes(invariants: Any) -> list[TensorShape]:
    if isinstance(invariants, TensorShape):
        return [invariants]
    return [shape for item in invariants for shape in _shapes(item)]


def _loop_region(label: str, specs: Sequence[Spec], function: Callable[..., Any]) -> GraphRegion:
    with inside(new_graph(label)) as graph:
        arguments = [graph.placeholder(spec) for spec in specs]
        answer = function([face(a) for a in arguments])
        outputs = [graph.entering(convert_to_tensor(y)._read()) for y in answer]
    return GraphRegion(graph, arguments, outputs)


def _results(body: Callable[..., Any], args: Any, count: int, structure: list[Any]) -> list[Any]:
    answer = body(*_spread(args))
    if answer is None:
        raise GraphError("while_loop: body returned None; return the new loop variables")
    leaves, close = containers.flatten(_unlisted(answer))
    structure[:] = [close]
    if len(leaves) != count:
        raise GraphError(
            f"while_loop: body must return as many values as there are loop variables, {count}, "
            f"got {len(leaves)}"
        )
    return leaves


def _check_condition(y: rg.Tensor) -> None:
    shown = face(y)
    if shown.dtype != dtypes.bool:
        raise ArgumentError(f"while_loop: cond must return a bool, got {shown}")
    if shown.shape.ndims not in (0, None):
        raise ShapeError(f"while_loop: cond must return a bool of rank 0, got {shown}")


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
    what = f"while_loop: a loop variable enters with shape {enters}"
    if enters.is_fully_defined() and leaves.is_fully_defined() and enters != leaves:
        raise ShapeError(
            f"{what} and has {leaves} after one iteration. To allow it pass "
            "shape_invariants=[tf.TensorShape([None, ...])]."
        )
    before, after = x._data.shape, y._data.shape
    known = isinstance(before, tuple) and isinstance(after, tuple) and spec.shape is not None
    if not known or len(before) != len(after):
        return Spec(None, spec.dtype)
    same = [dims.same((m,), (n,)) is True for m, n in zip(before, after, strict=True)]
    if any(isinstance(m, int) and not kept for m, kept in zip(before, same, strict=True)):
        raise ShapeError(
            f"{what}, and after one iteration only {leaves} is known. Pass "
            "shape_invariants=[tf.TensorShape([None, ...])], or call set_shape in the body."
        )
    shape = [n if kept else None for n, kept in zip(spec.shape or (), same, strict=True)]
    return Spec(tuple(shape), spec.dtype)


# -- Python in the graph -------------------------------------------------------------------------


def _call_python(xp: Any, xs: Sequence[Any], func: Callable[..., Any], Tout: Any) -> Any:
    try:
        answer = func(*[np.array(x) for x in xs])  # func may write to its arrays
    except Exception as error:
        raise errors.UnknownError(f"{type(error).__name__}: {error}") from error
    values = list(answer) if isinstance(answer, list | tuple) else [answer]
    if len(values) != len(Tout) and not (answer is None and not Tout):
        raise errors.InvalidArgumentError(
            f"py_func: expected {len(Tout)} values, {func!r:.60} returned {len(values)}"
        )
    return tuple(_returned(v, t, i) for i, (v, t) in enumerate(zip(values, Tout, strict=False)))


def _returned(value: Any, dtype: np.dtype, index: int) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind in "SU":
        array = array.astype("S").astype(object)
    plain = not isinstance(value, np.ndarray | np.generic)
    if array.dtype != dtype and not (plain and array.dtype.kind == dtype.kind):
        raise errors.InvalidArgumentError(
            f"py_func: the {index}-th value returned has the type {array.dtype}, expected {dtype}"
        )
    return array.astype(dtype)  # a copy, since func may keep its array


PY_FUNC, PY_FUNC_STATELESS = (
    graph_op(type, _call_python, "xs*", "func Tout", name="py_func", several=True)
    for type in ("PyFunc", "PyFuncStateless")
)


def py_func(
    func: Callable[..., Any], inp: Sequence[TensorLike], Tout: DTypes, stateful: bool = True,
    name: str | None = None,
) -> Any:  # fmt: skip
    """Return the result of a Python function of NumPy arrays, as an op.

    The static shapes of the results are unknown. The op has no gradient unless an override of the
    op type `PyFunc` sets one.

    Args:
        func: A function of NumPy arrays. It may write to the arrays.
        inp: The tensors whose values `func` receives.
        Tout: The dtype of the result, or a list of dtypes.
        stateful: If true the op type is `PyFunc`, otherwise `PyFuncStateless`.
        name: The name of the op in the graph.

    Returns:
        A tensor; a list of tensors if Tout is a list; the Operation if Tout is an empty list.

    Raises:
        DTypeError: an input cannot become a tensor.
        UnknownError: in the run, func raised.
        InvalidArgumentError: in the run, func returned another dtype or number of results.

    Op type: `PyFunc`. Source: `tf.py_func`.

    >>> import numpy as np
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default() as g, tf.Session() as sess:
    ...     x = tf.constant([1.0, 4.0])
    ...     with g.gradient_override_map({"PyFunc": lambda op, dy: dy * 0.5 / op.outputs[0]}):
    ...         y = tf.py_func(np.sqrt, [x], tf.float32)
    ...     print(sess.run(tf.gradients(y, x)[0]))
    [0.5  0.25]
    """
    given = Tout if isinstance(Tout, list | tuple) else [Tout]
    out = tuple(dtypes.to_numpy(t) for t in given)
    xs, op = [convert_to_tensor(x)._read() for x in inp], PY_FUNC if stateful else PY_FUNC_STATELESS
    found = add_op(op, name, xs, {"func": func, "Tout": out}, [Spec(None, t) for t in out])
    if not out:
        return operation(current_graph().own_nodes[-1])
    ys = list(face(found))
    return ys if isinstance(Tout, list | tuple) else ys[0]


def numpy_function(
    func: Callable[..., Any], inp: Sequence[TensorLike], Tout: DTypes, name: str | None = None
) -> Any:
    """Return the result of a Python function of NumPy arrays. The newer name of `py_func`.

    Args:
        func, inp, Tout, name: As for `py_func`.

    Returns:
        A tensor; a list of tensors if Tout is a list.

    Raises:
        DTypeError: an input cannot become a tensor.

    Op type: `PyFunc`. Source: `tf.numpy_function`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.numpy_function(lambda x: x + 1, [tf.constant(2.0)], tf.float32)))
    3.0
    """
    return py_func(func, inp, Tout, name=name)


def _print(xp: Any, x: Any, data: Sequence[Any], message: str, first_n: int, summarize: int,
           printed: list[int]) -> Any:  # fmt: skip
    if first_n < 0 or printed[0] < first_n:
        printed[0] += 1
        parts = [_summary(np.asarray(d), summarize) for d in data]
        print(message + "".join(f"[{part}]" for part in parts), file=sys.stderr)
    return x


def _summary(array: np.ndarray, count: int) -> str:
    flat = array.reshape(-1)
    shown = " ".join(f"{v:.8g}" if flat.dtype.kind == "f" else str(v) for v in flat[:count])
    return shown + ("..." if flat.size > count else "")


PRINT = graph_op("Print", _print, "x data*", "message first_n summarize printed", rule=None)


def Print(
    input_: TensorLike, data: Sequence[TensorLike], message: str | None = None,
    first_n: int | None = None, summarize: int | None = None, name: str | None = None,
) -> Tensor:  # fmt: skip
    """Return the input unchanged. When a run computes it, the values of `data` go to stderr.

    Args:
        input_: A tensor.
        data: Tensors to print.
        message: Text before the values.
        first_n: The number of runs that print. By default every run prints.
        summarize: The number of elements to print of each tensor, by default 3.
        name: The name of the op in the graph.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        DTypeError: an input cannot become a tensor.

    Op type: `Print`. Source: `tf.Print`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant([1.0, 2.0])
    ...     print(sess.run(tf.Print(x, [x], "x is ")))  # prints x is [1 2] on stderr
    [1. 2.]
    """
    xs = [convert_to_tensor(v)._read() for v in (input_, *data)]
    attrs = {
        "message": message or "",
        "first_n": -1 if first_n is None else first_n,
        "summarize": 3 if summarize is None else summarize,
        "printed": [0],
    }
    return face(add_op(PRINT, name or "Print", xs, attrs, [spec_of(xs[0])]))


def _assert(xp: Any, condition: Any, data: Sequence[Any], summarize: int) -> Any:
    if not np.all(condition):
        shown = " ".join(f"[{_summary(np.asarray(d), summarize)}]" for d in data)
        raise errors.InvalidArgumentError(f"assertion failed: {shown}")
    return ()


ASSERT = graph_op("Assert", _assert, "condition data*", "summarize", several=True)


def Assert(
    condition: TensorLike, data: Sequence[TensorLike], summarize: int | None = None,
    name: str | None = None,
) -> Operation:  # fmt: skip
    """Return an op that raises in the run unless the condition holds. The error shows `data`.

    Make the ops that rely on the condition in `with tf.control_dependencies([tf.Assert(...)])`.

    Args:
        condition: A bool tensor. All of its elements must be true.
        data: Tensors that the error shows.
        summarize: The number of elements to show of each tensor, by default 3.
        name: The name of the op in the graph.

    Returns:
        The Operation.

    Raises:
        DTypeError: an input cannot become a tensor.
        InvalidArgumentError: in the run, the condition does not hold.

    Op type: `Assert`. Source: `tf.Assert`.

    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     x = tf.constant(-1.0)
    ...     with tf.control_dependencies([tf.Assert(x > 0.0, [x])]):
    ...         root = tf.sqrt(x)
    ...     try:
    ...         sess.run(root)
    ...     except tf.errors.InvalidArgumentError as error:
    ...         print(error.message)
    assertion failed: [-1]
    """
    xs = [convert_to_tensor(v)._read() for v in (condition, *data)]
    add_op(ASSERT, name or "Assert", xs, {"summarize": summarize or 3}, [], NO_RULE)
    return operation(current_graph().own_nodes[-1])
