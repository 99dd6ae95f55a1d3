"""Layers of `tf.layers` as classes, whose calls share their variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regrad.core.tensor import TensorLike
from regrad.v1.training import layers
from regrad.v1.training.variable_scopes import VariableScope, variable_scope

__all__ = ["Conv2D", "Dense", "Layer"]


class WithScope:
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


class Layer(WithScope):
    """The base class of layers: a function of `tf.layers` with its arguments except the inputs.

    Args:
        args, options: The arguments of the function, without `inputs` and `reuse`.
        name: The name of the variable scope, as for the function.

    Source: `tf.layers.Layer`.

    >>> import regrad.v1 as tf
    >>> issubclass(tf.layers.Dense, tf.layers.Layer)
    True
    """

    function: Callable[..., Any]

    def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
        self._args, self._options, self._name = args, options, name

    def __call__(self, inputs: TensorLike, *unused: Any, **without_effect: Any) -> Any:
        """Return the layer's result. The first call makes the variables."""
        reuse = None if self._scope is None else True
        if self._scope is None:
            default = self.function.__name__
            with variable_scope(self._name, default, auxiliary_name_scope=False) as scope:
                self._scope = scope
        options: dict[str, Any] = {**self._options, "name": self._scope, "reuse": reuse}
        return self.function(inputs, *self._args, **options)

    apply = __call__

    def __getattr__(self, name: str) -> Any:
        for variable in self.variables if name in ("kernel", "bias") else ():
            if variable.op.name.endswith(f"/{name}"):
                return variable
        raise AttributeError(f"the layer has no {name!r}. Its first call makes the variables.")


class Dense(Layer):
    """A layer that calls `tf.layers.dense`. Its calls share the variables `kernel` and `bias`.

    The attributes `kernel` and `bias` exist after the first call.

    Args:
        args, options: The arguments of the function, without `inputs` and `reuse`.
        name: The name of the variable scope, as for the function.

    Source: `tf.layers.Dense`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     layer = tf.layers.Dense(2, activation=tf.nn.relu)
    ...     y, z = layer(tf.zeros([4, 3])), layer(tf.ones([5, 3]))
    ...     print([v.op.name for v in tf.global_variables()], layer.kernel.shape)
    ['dense/kernel', 'dense/bias'] (3, 2)
    """

    function: Callable[..., Any] = staticmethod(layers.dense)


class Conv2D(Layer):
    """A layer that calls `tf.layers.conv2d`; see `tf.layers.Dense`.

    Args:
        args, options: The arguments of the function, without `inputs` and `reuse`.
        name: The name of the variable scope, as for the function.

    Source: `tf.layers.Conv2D`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     layer = tf.layers.Conv2D(8, 3, padding="same", name="first")
    ...     print(layer(tf.zeros([2, 6, 6, 3])).shape, layer.kernel.op.name)
    (2, 6, 6, 8) first/kernel
    """

    function: Callable[..., Any] = staticmethod(layers.conv2d)
