"""Nested programs in JAX under `regrad.jax`: `rg` in their text is this module.

Ops, loops and derivatives are JAX's, as in the twin (`in_jax`); overrides, places and custom
gradients are regrad's.
"""

from collections.abc import Callable
from typing import Any

import jax

import regrad as rg
import regrad.jax
from tests.campaigns.in_jax import *  # noqa: F403

Function = Callable[..., Any]
custom_grad = rg.jax.custom_grad


def define(space: dict[str, Any]) -> None:
    """Replace the scopes of the prelude by functions that are transformed."""
    rules = space["NESTED_RULES"]

    def under(op_type: str, f: Function) -> Any:
        return rg.jax.override(f, {op_type: rules[op_type]})()

    def placed(name: str, op_type: str, f: Function, g: Function) -> Any:
        def both() -> Any:
            with jax.named_scope(name):
                y = 0.9 * f()
            return y + g()

        return rg.jax.override(both, {rg.at(name, op_type): rules[op_type]})()

    space.update(under=under, placed=placed)
