"""Modules: objects that hold the Variables of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from regrad.autodiff.variables import Variable
from regrad.core.hints import hint_at
from regrad.core.names import MODULE
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError


class Module:
    """A model, or a part of one: an object whose attributes hold Variables and other Modules.

    Make a subclass that creates its Variables in `__init__` and computes in `__call__`. You do
    not register anything, or call a base `__init__`: `variables` searches the attributes, and the
    lists, tuples, dicts and Modules in them.

    Functions use a Module like any other object, by a closure or as `self`. Compiled functions take
    its Variables as inputs and outputs, and are traced again if one of its plain attributes has
    changed.

    Source: `tf.Module`; `flax.nnx.Module`.

    >>> import numpy as np
    >>> import regrad as rg
    >>> class Linear(rg.Module):
    ...     def __init__(self, rng, m, n):
    ...         self.w = rg.Variable(rng.normal(0, m**-0.5, (m, n)), dtype="float32")
    ...         self.b = rg.Variable(rg.zeros(n))
    ...     def __call__(self, x):
    ...         return x @ self.w + self.b
    >>> class Net(rg.Module):
    ...     def __init__(self, rng):
    ...         self.layers = [Linear(rng, 4, 8), Linear(rng, 8, 2)]
    ...     def __call__(self, x):
    ...         hidden, out = self.layers
    ...         return out(rg.nn.relu(hidden(x)))
    >>> net = Net(np.random.default_rng(0))
    >>> net(rg.ones((3, 4))).shape
    (3, 2)
    >>> net
    Net, 58 numbers in 4 variables
      layers/0/w  float32 (4, 8)
      layers/0/b  float32 (8,)
      layers/1/w  float32 (8, 2)
      layers/1/b  float32 (2,)
    """

    @property
    def variables(self) -> list[Variable]:
        """The Variables of the Module, each once, in the order of its attributes.

        A Variable without a name gets one: its path in the first Module whose `variables` is
        read, as in `layers/0/w`. Checkpoints and optimizers use this name.

        Raises:
            ArgumentError: two Variables have the same name.

        >>> import regrad as rg
        >>> net = rg.Module()
        >>> net.w, net.steps = rg.Variable(1.0), rg.Variable(0, trainable=False, dtype="int32")
        >>> [v.name for v in net.variables]
        ['w', 'steps']
        """
        found, named = _places(self), dict[str, str]()
        for v, path in found.items():
            v.name = v.name if v.is_named else path
            if v.name in named:
                raise ArgumentError(
                    f"{type(self).__name__}.variables: the Variables at {named[v.name]} and {path} "
                    f"are both called {v.name!r}. Create them without names, so that they get "
                    "their paths as names, or use different names."
                )
            named[v.name] = path
        return list(found)

    @property
    def trainable_variables(self) -> list[Variable]:
        """The Variables by which `variable_grads` differentiates: `trainable` is True.

        >>> import regrad as rg
        >>> net = rg.Module()
        >>> net.w, net.steps = rg.Variable(1.0), rg.Variable(0, trainable=False, dtype="int32")
        >>> [v.name for v in net.trainable_variables]
        ['w']
        """
        return [v for v in self.variables if v.trainable]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Raises if a Tensor would replace a Variable and end its training."""
        if isinstance(value, Tensor) and isinstance(vars(self).get(name), Variable):
            raise ArgumentError(
                f"{type(self).__name__}.{name} = x would put a Tensor in the place of a Variable; "
                f"write {name}.assign(x). (For a Tensor that is not trained, del {name} first.)"
            )
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        found = _places(self)
        count = sum(v.value.size for v in found)
        width = max(map(len, found.values()), default=0)
        lines = [f"{type(self).__name__}, {count:,} numbers in {len(found)} variables"]
        lines += [f"  {path:{width}}  {v.dtype} {v.shape}" for v, path in found.items()]
        return "\n".join(lines)


hint_at(Module, MODULE)


def _places(module: Module) -> dict[Variable, str]:
    """Return the Variables of a Module, each with its first path."""
    found: dict[Variable, str] = {}
    for path, v in _variables_in(module, "", frozenset()):
        found.setdefault(v, path)
    return found


def _variables_in(value: Any, path: str, above: frozenset[int]) -> Iterator[tuple[str, Variable]]:
    """Yield the paths of Variables in a Module or container; `above` are its enclosing objects."""
    if isinstance(value, Variable):
        yield path, value
    elif (parts := _parts(value)) and id(value) not in above:
        for name, part in parts:
            inner = f"{path}/{name}" if path else str(name)
            yield from _variables_in(part, inner, above | {id(value)})


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Module):
        return list(vars(value).items())
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []
