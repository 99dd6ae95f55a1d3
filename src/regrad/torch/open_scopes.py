"""The scopes of overrides that are open here: in this thread, and in this task."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

# `regrad.torch.gradient_override_map` objects, the innermost last.
SCOPES: ContextVar[tuple[Any, ...]] = ContextVar("regrad_torch", default=())

# Whether every op has torch's own gradient, whatever scopes and custom gradients there are: asked
# for by the tools that compare the two.
OWN: ContextVar[bool] = ContextVar("regrad_torch_own", default=False)


def scope_of(ruleset: Any) -> Any:
    """Return the innermost open scope with a set of rules; None if there is none."""
    for scope in reversed(SCOPES.get()):
        if scope._ruleset is ruleset:
            return scope
    return None


def open_here() -> tuple[Any, ...]:
    """Return the scopes that are open here, without those that another thread has closed."""
    return tuple([scope for scope in SCOPES.get() if scope._ruleset is not None])
