"""The scopes of overrides that are open here: in this thread, and in this task."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

# `regrad.torch.gradient_override_map` objects, the innermost last. If one of them names places, the
# tuple is a `places.Spot`, with what the scopes are where the program is.
SCOPES: ContextVar[tuple[Any, ...]] = ContextVar("regrad_torch", default=())

# Whether every op has torch's own gradient, whatever scopes and custom gradients there are: asked
# for by the tools that compare the two.
OWN: ContextVar[bool] = ContextVar("regrad_torch_own", default=False)

# Whether a tool looks at the calls, and at the nodes that they leave: each is to tell its own.
LOOKED_AT: ContextVar[bool] = ContextVar("regrad_torch_looked_at", default=False)


def scope_of(ruleset: Any) -> Any:
    """Return the innermost open scope with a set of rules, wherever it is; None if none has it."""
    for scope in reversed(SCOPES.get()):
        if scope._ruleset is not None and scope._ruleset.home is ruleset.home:
            return scope
    return None
