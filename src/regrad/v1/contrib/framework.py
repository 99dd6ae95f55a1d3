"""`tf.contrib.framework`: scopes that set default arguments of layers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

from regrad.core.blocks import block, stay
from regrad.core.signatures import public
from regrad.errors import GraphError
from regrad.v1.graph.graphs import get_collection

__all__ = ["add_arg_scope", "arg_scope", "get_variables"]

Defaults = dict[str, dict[str, Any]]  # by function, then by argument
_DEFAULTS: ContextVar[Defaults | None] = ContextVar("regrad_arg_scope", default=None)


def add_arg_scope(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose default arguments `arg_scope` can set.

    Args:
        func: A function. The caller can still pass every argument.

    Returns:
        The function, for use in the list of `arg_scope`.

    Source: `tf.contrib.framework.add_arg_scope`.

    >>> import regrad.v1 as tf
    >>> @tf.contrib.framework.add_arg_scope
    ... def scaled(x, factor=1.0):
    ...     return factor * x
    >>> with tf.contrib.framework.arg_scope([scaled], factor=3.0):
    ...     print(scaled(2.0), scaled(2.0, factor=5.0))
    6.0 10.0
    """
    key = f"{func.__module__}.{func.__qualname__}"

    @wraps(func)
    def call(*args: Any, **options: Any) -> Any:
        return func(*args, **{**(_DEFAULTS.get() or {}).get(key, {}), **options})

    call._arg_scope_key = key  # type: ignore[attr-defined]
    return call


@public
@block
def arg_scope(
    list_ops_or_scope: Sequence[Callable[..., Any]] | Defaults, **kwargs: Any
) -> Generator[Defaults]:
    """Open a scope in which functions have other default arguments.

    Args:
        list_ops_or_scope: Layers of `tf.contrib.layers` and functions of `add_arg_scope`, or the
            object that an earlier `arg_scope` bound by `as`.
        **kwargs: The arguments. Inner scopes add to the arguments of outer scopes.

    Returns:
        A context manager. `as` binds an object that opens the same scope again.

    Raises:
        GraphError: a function does not accept default arguments. The error is a ValueError.

    Source: `tf.contrib.framework.arg_scope`.

    >>> import regrad.v1 as tf
    >>> layers, arg_scope = tf.contrib.layers, tf.contrib.framework.arg_scope
    >>> with tf.Graph().as_default(), arg_scope([layers.fully_connected], activation_fn=None):
    ...     print(layers.fully_connected(tf.zeros([2, 3]), 4).op.type)
    BiasAdd
    """
    defaults = _DEFAULTS.get() or {}
    listed = list_ops_or_scope
    if isinstance(listed, dict):
        defaults, listed = listed, []
    for function in listed:
        key = getattr(function, "_arg_scope_key", None)
        if key is None:
            raise GraphError(
                f"arg_scope: {function!r:.80} does not accept default arguments; decorate it with "
                "tf.contrib.framework.add_arg_scope"
            )
        defaults = {**defaults, key: {**defaults.get(key, {}), **kwargs}}
    yield from stay(defaults, _DEFAULTS, defaults)


def get_variables(
    scope: Any = None, suffix: str | None = None, collection: str = "variables"
) -> list[Any]:
    """Return the variables of a scope.

    Args:
        scope: A VariableScope, or a regular expression for the beginning of the names.
        suffix: The last part of the names.
        collection: The collection.

    Returns:
        A list of Variables.

    Source: `tf.contrib.framework.get_variables`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.variable_scope("net"):
    ...     w = tf.get_variable("w", [2])
    ...     print(tf.contrib.framework.get_variables("net", "w") == [w])
    True
    """
    found = get_collection(collection, getattr(scope, "name", scope))
    return [v for v in found if suffix is None or v.op.name.rpartition("/")[2] == suffix]
