"""The one door to JAX's private parts: what no public call does, by name.

No other module names a private part of JAX, an attribute that its documentation lacks, or a
parameter of an equation. `programs` reads what JAX writes down, `functions` what it knows of a
function, and `extending` adds primitives of ours.

Each part belongs to a feature (see `core.hosts`), which is refused by name where the part is lost:
at once if the import finds it gone, else by what reads it (`reads`).
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
    """Refuse what this JAX lacks; one that is newer than all that were tested is tried first."""
    if not HOST.is_tested:
        HOST.check(*features)
    for feature in features:
        feature.require()


def refuse(feature: Feature, lost: str) -> NoReturn:
    """Raise what refuses a feature, for something that only a program shows."""
    raise HostError(
        f"JAX {HOST.version} does not support {feature.name}: {lost}. "
        f"Versions {HOST.range()}. {feature.instead}"
    )


def reads(feature: Feature, path: str, why: str, example: Any = None) -> Any:
    """Make a function that reads a private part; what it does not find there is refused.

    Args:
        feature: what does not hold without it.
        path: what is read.
        why: the reason why no public call will do.
        example: what the function is tried on, when it is made. (It has to find something.)
    """

    def decorate(read: Callable[..., Any]) -> Callable[..., Any]:
        feature.parts.append((path, why))

        @functools.wraps(read)
        def reading(*args: Any) -> Any:
            try:
                return read(*args)
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
                refuse(feature, f"{path} is not what it was ({type(error).__name__}: {error})")

        if example is not None:
            try:
                said = reading(example())
                if isinstance(said, list | set | str) and not said:
                    raise ValueError("it says nothing")
            except Exception as error:
                feature.losses.append(f"{path} is not what it was ({error.__cause__ or error})")
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
