"""`get_variable`, which makes or shares variables by name, and variable scopes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from inspect import signature
from typing import Any

from regrad.core.blocks import block, stay
from regrad.core.signatures import public
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, GraphError
from regrad.v1 import dtypes
from regrad.v1.graph.conversion import convert_to_tensor
from regrad.v1.graph.graphs import Graph, GraphKeys, get_default_graph
from regrad.v1.graph.regions import inside
from regrad.v1.graph.static_shapes import ShapeLike, TensorShape
from regrad.v1.graph.variables import Variable, global_variables, trainable_variables
from regrad.v1.training.initializers import Initial, glorot_uniform_initializer, zeros_initializer

__all__ = [
    "AUTO_REUSE", "VariableScope", "get_variable", "get_variable_scope", "no_regularizer",
    "variable_op_scope", "variable_scope",
]  # fmt: skip

Regularizer = Callable[[Any], Any] | None


class AutoReuse:
    """The value of `reuse` with which get_variable makes a variable or returns an existing one."""

    def __repr__(self) -> str:
        return "AUTO_REUSE"


AUTO_REUSE = AutoReuse()


class VariableScope:
    """A scope of variable names, with the default arguments of `get_variable` in it.

    `tf.variable_scope` makes the scope, and `as` binds it.

    Args:
        name: The full name of the scope, which includes the names of the scopes around.
        reuse: True to return existing variables, False or None to make new variables, AUTO_REUSE
            for both.
        defaults: Default arguments of `get_variable`, such as "initializer" and "regularizer".
        name_scope: The name scope of ops in the scope, with its slash.

    Source: `tf.VariableScope`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.variable_scope("net") as scope:
    ...     w = tf.get_variable("w", [2])
    ...     scope.reuse_variables()
    ...     print(tf.get_variable("w") is w, scope)
    True <VariableScope 'net' reuse=True>
    """

    def __init__(
        self, name: str, reuse: bool | AutoReuse | None, defaults: dict[str, Any], name_scope: str
    ) -> None:
        self.name = name
        self.reuse = reuse
        self.defaults = defaults
        self.original_name_scope = name_scope

    initializer: property = property(lambda self: self.defaults.get("initializer"))
    regularizer: property = property(lambda self: self.defaults.get("regularizer"))
    dtype: property = property(lambda self: self.defaults.get("dtype") or dtypes.float32)

    def reuse_variables(self) -> None:
        """Return only existing variables from now on."""
        self.reuse = True

    def set_initializer(self, initializer: Initial) -> None:
        """Set the default initializer of variables."""
        self.defaults["initializer"] = initializer

    def trainable_variables(self) -> list[Any]:
        """Return the trainable variables in the scope."""
        return trainable_variables(self.name + "/")

    def global_variables(self) -> list[Any]:
        """Return the variables in the scope."""
        return global_variables(self.name + "/")

    def __repr__(self) -> str:
        return f"<VariableScope {self.name!r} reuse={self.reuse}>"


class Scoped:
    """An object with a variable scope, which its first call opens."""

    _scope: VariableScope | None = None

    @property
    def variables(self) -> list[Any]:
        """The variables. The list is empty before the first call."""
        return self._scope.global_variables() if self._scope else []

    @property
    def trainable_variables(self) -> list[Any]:
        """The variables that optimizers change."""
        return [v for v in self.variables if v.trainable]

    weights = variables
    trainable_weights = trainable_variables


def get_variable_scope() -> VariableScope:
    """Return the innermost open variable scope. The name of the root scope is empty.

    Returns:
        The `VariableScope`.

    Source: `tf.get_variable_scope`.

    >>> with tf.Graph().as_default(), tf.variable_scope("a"), tf.variable_scope("b"):
    ...     print(tf.get_variable_scope().name)
    a/b
    """
    graph = get_default_graph()
    if not graph.variable_scopes:
        graph.variable_scopes.append(VariableScope("", False, {}, ""))
    return graph.variable_scopes[-1]


@public
@block
def variable_scope(
    name_or_scope: str | VariableScope | None, default_name: str | None = None,
    values: Sequence[TensorLike] | None = None, initializer: Initial = None,
    regularizer: Regularizer = None, caching_device: str | Callable[..., Any] | None = None,
    partitioner: Callable[..., Any] | None = None, custom_getter: Callable[..., Any] | None = None,
    reuse: bool | AutoReuse | None = None, dtype: dtypes.DTypeLike | None = None,
    use_resource: bool | None = None, constraint: Callable[..., Any] | None = None,
    auxiliary_name_scope: bool = True,
) -> Generator[VariableScope]:  # fmt: skip
    """Open a scope in which `get_variable` names variables under the scope and can share them.

    The scope is also a name scope of ops.

    Args:
        name_or_scope: A name, or a VariableScope to enter again.
        default_name: The name, if `name_or_scope` is None. A number is added if the name is used.
        values: Without effect.
        initializer, regularizer, constraint, dtype, custom_getter, use_resource: The defaults of
            `get_variable` in the scope.
        reuse: True returns existing variables. `tf.AUTO_REUSE` also makes missing variables.
        auxiliary_name_scope: Whether the scope is also a name scope of ops.
        caching_device, partitioner: Without effect.

    Returns:
        A context manager. `as` binds the VariableScope.

    Raises:
        ArgumentError: both the name and the default name are missing.

    Source: `tf.variable_scope`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     with tf.variable_scope("net"):
    ...         w = tf.get_variable("w", [2])
    ...     with tf.variable_scope("net", reuse=True):
    ...         print(tf.get_variable("w") is w, w.name)
    True net/w:0
    """
    graph = get_default_graph()
    outer = around = get_variable_scope()
    if isinstance(name_or_scope, VariableScope):
        around, name = name_or_scope, name_or_scope.name
        short = name.rpartition("/")[2]
    else:
        if name_or_scope is None and default_name is None:
            raise ArgumentError("variable_scope needs a name_or_scope or a default_name")
        short = name_or_scope
        if short is None:
            short = _unused_scope(graph, outer.name, str(default_name))
        name = f"{outer.name}/{short}" if outer.name and short else outer.name or short
    own = {
        "use_resource": use_resource, "initializer": initializer, "regularizer": regularizer,
        "dtype": dtype, "custom_getter": custom_getter, "constraint": constraint,
    }  # fmt: skip
    defaults = {**around.defaults, **{k: v for k, v in own.items() if v is not None}}
    reuse = around.reuse if reuse is None else reuse or outer.reuse
    opened = graph.name_scope(short) if auxiliary_name_scope and short else None
    with opened or contextlib.nullcontext(graph.scope) as name_scope:
        scope = VariableScope(name, reuse, defaults, str(name_scope))
        counts = graph.scope_counts
        before = {k: v for k, v in counts.items() if k.startswith(name + "/")}
        try:
            graph.variable_scopes.append(scope)
            counts[name] = counts.get(name, 0) + 1
            for key in before:
                del counts[key]
            yield from stay(scope)
        finally:
            if graph.variable_scopes[-1:] == [scope]:
                del graph.variable_scopes[-1]
            counts.update(before)


def _unused_scope(graph: Graph, outer: str, name: str) -> str:
    """Return the first of `conv`, `conv_1`, … that was not opened in this scope."""
    prefix = f"{outer}/" if outer else ""
    names = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
    return next(found for found in names if not graph.scope_counts.get(prefix + found))


def get_variable(
    name: str, shape: ShapeLike = None, dtype: dtypes.DTypeLike | None = None,
    initializer: Initial = None, regularizer: Regularizer = None, trainable: bool | None = None,
    collections: Sequence[str] | None = None,
    caching_device: str | Callable[..., Any] | None = None,
    partitioner: Callable[..., Any] | None = None, validate_shape: bool = True,
    use_resource: bool | None = None, custom_getter: Callable[..., Any] | None = None,
    constraint: Callable[..., Any] | None = None,
) -> Variable:  # fmt: skip
    """Return a variable by name: a new variable, or an existing one if the scope reuses variables.

    Args:
        name: The name in the current variable scope.
        shape: The shape, unless the initializer is a tensor or an array.
        dtype: The dtype, by default the scope's dtype, or float32.
        initializer: A function of (shape, dtype), a tensor or an array. By default Glorot's uniform
            initializer for floats, zeros for integers.
        regularizer: A function of the variable. Its result is added to REGULARIZATION_LOSSES.
        trainable, collections, validate_shape, constraint, use_resource: See `tf.Variable`.
        custom_getter: A function to call instead, with the original getter as the first argument.
        caching_device, partitioner: Without effect.

    Returns:
        The Variable.

    Raises:
        GraphError: the variable exists but the scope does not reuse variables, it does not exist
            but the scope only reuses variables, its shape or dtype differs from the argument, or
            the shape of a new variable is not known.

    Source: `tf.get_variable`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     w = tf.get_variable("w", [2, 3], initializer=tf.zeros_initializer())
    ...     print(w.name, w.shape)
    w:0 (2, 3)
    """
    scope = get_variable_scope()
    getter = custom_getter or scope.defaults.get("custom_getter")
    options = {
        "shape": shape, "dtype": dtype, "initializer": initializer, "regularizer": regularizer,
        "trainable": trainable, "collections": collections, "validate_shape": validate_shape,
    }  # fmt: skip
    for option, value in (("use_resource", use_resource), ("constraint", constraint)):
        options[option] = scope.defaults.get(option) if value is None else value
    full = f"{scope.name}/{name}" if scope.name else name
    if getter is None:
        return _get(full, **options)
    return getter(lambda name, **changed: _get(name, **{**options, **changed}), full, **options)


def _get(full: str, shape: ShapeLike, dtype: dtypes.DTypeLike | None, **options: Any) -> Variable:
    scope, graph = get_variable_scope(), get_default_graph()
    found = graph.variables_by_name.get(full)
    if found is None and scope.reuse is not True:
        return _make(graph, scope, full, shape, dtype, **options)
    if found is None or not scope.reuse:
        missing = "does not exist, or was not created with tf.get_variable()"
        wrong = missing if found is None else "already exists, disallowed"
        hint = "Did you mean to set reuse=tf.AUTO_REUSE in variable_scope?"
        raise GraphError(f"Variable {full} {wrong}. {hint}")
    sizes = found.shape if shape is None else TensorShape(shape)
    kind = found.dtype.base_dtype if dtype is None else dtypes.as_dtype(dtype)
    if not found.shape.is_compatible_with(sizes) or found.dtype.base_dtype != kind:
        raise GraphError(
            f"Trying to share variable {full}, but specified shape {sizes} and dtype {kind.name}, "
            f"and found shape {found.shape} and dtype {found.dtype.name}."
        )
    return found


def _make(
    graph: Graph, scope: VariableScope, full: str, shape: ShapeLike, dtype: dtypes.DTypeLike | None,
    *, initializer: Initial, regularizer: Regularizer, trainable: bool | None, **options: Any,
) -> Variable:  # fmt: skip
    initializer = initializer if initializer is not None else scope.initializer
    regularizer = regularizer or scope.regularizer
    value = _initial_value(full, shape, dtype, initializer, scope.dtype)
    # The name already contains the scope. In a branch or loop the variable is made outside.
    with inside(None), graph.name_scope(None):
        variable = Variable(value, trainable is not False, name=full, **options)
    graph.variables_by_name[full] = variable
    if regularizer is not None:
        with graph.name_scope(f"{full}/Regularizer/"):
            loss = regularizer(variable)
        if loss is not None:
            graph.add_to_collection(GraphKeys.REGULARIZATION_LOSSES, loss)
    return variable


def _initial_value(full: str, shape: ShapeLike, dtype: Any, initializer: Any, usual: Any) -> Any:
    """Return the initial value, or a function that returns it."""
    if initializer is not None and not callable(initializer):
        if shape is not None:
            raise GraphError(f"If initializer is a constant, do not specify shape ({full}).")
        return lambda: convert_to_tensor(initializer, dtype)
    if shape is None and callable(initializer) and not signature(initializer).parameters:
        return initializer
    sizes = TensorShape(shape)
    if not sizes.is_fully_defined():
        raise GraphError(f"Shape of a new variable ({full}) must be fully defined, not {sizes}.")
    dtype = dtypes.as_dtype(usual if dtype is None else dtype)
    if initializer is None:
        floats = dtype.is_floating or dtype.is_complex
        initializer = glorot_uniform_initializer if floats else zeros_initializer
    if isinstance(initializer, type):
        initializer = initializer(dtype=dtype)
    return lambda: initializer(sizes.as_list(), dtype=dtype)


@public
@block
def variable_op_scope(
    values: Sequence[TensorLike] | None, name_or_scope: str | VariableScope | None,
    default_name: str | None = None, **options: Any,
) -> Generator[VariableScope]:  # fmt: skip
    """Open a `variable_scope`, with the arguments in an older order.

    Args:
        values: Without effect.
        name_or_scope: A name, or a VariableScope to enter again.
        default_name: The name, if `name_or_scope` is None. A number is added if the name is used.
        **options: Other arguments of `variable_scope`.

    Returns:
        A context manager. `as` binds the VariableScope.

    Raises:
        ArgumentError: both the name and the default name are missing.

    Source: `tf.variable_op_scope`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.variable_op_scope([], "net") as scope:
    ...     print(scope.name)
    net
    """
    yield from variable_scope(name_or_scope, default_name, values, **options).steps


def no_regularizer(_: object) -> None:
    """Return None. This regularizer adds nothing, even in a scope with a default regularizer.

    Source: `tf.no_regularizer`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.variable_scope("net", regularizer=tf.nn.l2_loss):
    ...     w = tf.get_variable("w", [2], regularizer=tf.no_regularizer)
    ...     print(tf.get_collection(tf.GraphKeys.REGULARIZATION_LOSSES))
    []
    """
