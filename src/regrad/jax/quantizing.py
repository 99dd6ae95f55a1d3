"""Plans of `regrad.rules.quantize` for JAX functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regrad.core.scopes import optional
from regrad.core.surrogates import replace
from regrad.jax.override import override
from regrad.rules.quantize.layers_of_hosts import Call, Layer, LayerForward
from regrad.rules.quantize.ours import (
    KINDS,
    ArrayRecorder,
    FunctionSteps,
    Seen,
    other_data,
    told_apart,
)


class JaxForward(LayerForward):
    """The function of a layer, in JAX's functions."""


class JaxRecorder(ArrayRecorder):
    """A function that records the calls of a layer when the program runs."""

    def note(self, site: Any, values: Sequence[Any]) -> None:
        """Record a call in the program; the calls are recorded in the order of execution."""

        def record(*held: Any) -> None:
            self.seen.append((self.kind, site.path, [np.asarray(v) for v in held]))

        jax.debug.callback(record, *values, ordered=True)


@jax.tree_util.register_pytree_with_keys_class
class ArraySteps(FunctionSteps):
    """The arrays of a plan for JAX functions: a pytree."""

    forward: type[LayerForward] = JaxForward

    def tree_flatten_with_keys(self) -> Any:
        """Return the arrays, and everything else as static data."""
        static = self.layers, self.others, self.forwards
        return [(jax.tree_util.GetAttrKey("arrays"), self.arrays)], static

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> ArraySteps:
        """Return steps with other arrays."""
        return cls(*children, *static)

    def with_arrays(self, arrays: Mapping[str, Mapping[str, Any]]) -> ArraySteps:
        """Return steps with other arrays where they are not trained."""
        held = {path: dict(part) for path, part in self.arrays.items()}
        for layer in self.layers:
            for name, role, state in layer.states():
                if not layer.quantizers[role].states[state].learned:
                    held[layer.name][name] = jnp.asarray(arrays[layer.name][name])
        return ArraySteps(held, self.layers, self.others, self.forwards)


class JaxHost:
    """The host of JAX functions of parameters and data."""

    forward: type[LayerForward] = JaxForward

    def calls(self, model: Any, sample: Any, named: Any) -> list[Call]:
        """Run a function on a sample and on other data; return the calls of its layers."""
        runs: list[list[Seen]] = []
        parameters, *data = sample
        for changes in (False, True):
            seen: list[Seen] = []
            rules = {kind.what: optional(replace(JaxRecorder(kind, seen))) for kind in KINDS}
            args, options = jax.tree.map(_other, (data, named)) if changes else (data, named)
            override(lambda *a, **k: model(*a, **k), rules, values=True)(
                parameters, *args, **options
            )
            jax.effects_barrier()
            runs.append(seen)
        return [
            call._replace(operands={n: jnp.asarray(x) for n, x in call.operands.items()})
            for call in told_apart(*runs)
        ]

    def owner(self, model: Any, weights: Any) -> Any:
        """Return None: a function does not expose its parameters."""
        return None

    def parameter(self, model: Any, owner: Any) -> Any:
        """Return None: a function does not expose its parameters."""
        return None

    def steps(
        self, layers: Sequence[Layer], others: Any, arrays: Mapping[str, Any]
    ) -> ArraySteps:  # fmt: skip
        """Return the arrays of layers as a pytree."""
        return ArraySteps({path: dict(part) for path, part in arrays.items()}, layers, others)


def is_key(x: Any) -> bool:
    """Return whether an array is a random key."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _other(x: Any) -> Any:
    """Return other data; a random key is returned unchanged."""
    if (
        not hasattr(x, "dtype")
        or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        or x.dtype == "uint32"
    ):
        return x
    return jnp.asarray(other_data(np.asarray(x)), x.dtype)
