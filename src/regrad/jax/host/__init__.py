"""The only interface to JAX internals: access to private parts, with a named error for each.

No other module uses a private part of JAX, an undocumented attribute, or a parameter of an
equation. `programs` reads JAX programs, `functions` reads JAX's data about functions, and
`extending` adds primitives of regrad.

Each part belongs to a feature (see `core.hosts`). If the part is missing, the feature raises an
error that names it: at once if the import finds the part missing, else when code reads it
(`reads`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from regrad.autodiff.variables import Variable
from regrad.core.hosts import Feature, Host
from regrad.core.tensor import Tensor
from regrad.errors import HostError
from regrad.ops.torch_and_jax import refuse_in_jax

HOST = Host("JAX", "regrad.jax", jax.__version__, oldest="0.10", newest="0.12")

OVERRIDES = HOST.feature("overrides", "Write the gradient into the model with jax.custom_vjp.")
FUNCTION_KEYS = HOST.feature("functions as keys of overrides", "Override primitives.")
VMAPS = HOST.feature(
    "overrides in functions that call jax.vmap",
    "Put the vmap outside: jax.vmap(rg.jax.override(f, …)).",
)
GRADIENTS = HOST.feature("gradients of regrad in JAX programs", "Use jax.custom_vjp.")
SIGHT = HOST.feature("traces, comparisons and drawings", "Use jax.make_jaxpr and jax.debug.")


def need(*features: Feature) -> None:
    """Raise if this JAX lacks the features; first test a JAX newer than all tested versions."""
    if not HOST.is_tested:
        HOST.check(*features)
    for feature in features:
        feature.require()


def refuse(feature: Feature, lost: str) -> NoReturn:
    """Raise the error of an unsupported feature, for a part that a program shows to be missing."""
    raise HostError(
        f"JAX {HOST.version} does not support {feature.name}: {lost}. "
        f"Versions {HOST.range()}. {feature.instead}"
    )


def reads(feature: Feature, path: str, why: str, example: Any = None) -> Any:
    """Make a function that reads a private part; it raises a named error if the part is missing.

    Args:
        feature: The feature that depends on it.
        path: The private part.
        why: The reason why no public API suffices.
        example: Returns an argument on which the new function is tested. (The function must find
            something.)
    """

    def decorate(read: Callable[..., Any]) -> Callable[..., Any]:
        feature.parts.append((path, why))

        @functools.wraps(read)
        def reading(*args: Any) -> Any:
            try:
                return read(*args)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                refuse(feature, f"{path} has changed ({type(error).__name__}: {error})")

        if example is not None:
            try:
                said = reading(example())
                if isinstance(said, list | set | str) and not said:
                    raise ValueError("it says nothing")
            except Exception as error:
                feature.losses.append(f"{path} has changed ({error.__cause__ or error})")
        return reading

    return decorate


def fields(*names: str) -> Callable[[Any], bool]:
    """Return a probe: a class has attributes of these names."""
    return lambda found: all(
        hasattr(found, name) or name in getattr(found, "__dataclass_fields__", ()) for name in names
    )


_handlers: Any = GRADIENTS.part(
    "jax._src.dtypes.canonicalize_value_handlers", "primitives drop what __jax_array__ raises",
    lambda found: hasattr(found, "__setitem__"), missing={}, needed=False,
)  # fmt: skip
_handlers[Tensor] = _handlers[Variable] = refuse_in_jax
