"""The scopes of overrides that are open in the current thread and task."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

from regrad.core.blocks import block
from regrad.errors import PassedOverError

# `regrad.torch.gradient_override_map` objects, the innermost last. If one of them names places, the
# tuple is a `places.Spot`, which has the state of the scopes at the current place.
SCOPES: ContextVar[tuple[Any, ...]] = ContextVar("regrad_torch", default=())


class RunningContext(NamedTuple):
    """The context of the code that runs here, besides scopes.

    Args:
        own: Whether every op has torch's own gradient regardless of scopes and custom gradients,
            for the tools that compare the two.
        looked_at: Whether a tool observes the calls and their nodes.
        within: The `InsideWholeCall` of a module call with a rule for the whole call.
        place: The `Place` of a node in a graph that torch.compile captures.
        decided: The `autograd.Function` in a call for which regrad has already found no rule.
        learned: The node's inputs for the parameters of rules, by the identity of each parameter.
        reentrant: Whether a reentrant checkpoint runs its function again.
    """

    own: bool = False
    looked_at: bool = False
    within: Any = None
    place: Any = None
    decided: Any = None
    learned: Mapping[int, Any] = MappingProxyType({})
    reentrant: bool = False


NOTHING = RunningContext()
AROUND: ContextVar[RunningContext] = ContextVar("regrad_torch_around", default=NOTHING)


@block
def inside(**changes: Any) -> Generator[None]:
    """Run a block in a changed context."""
    token = AROUND.set(AROUND.get()._replace(**changes))
    try:
        yield
    finally:
        AROUND.reset(token)


class InsideWholeCall:
    """The call of a module with a rule for the whole call, seen from inside.

    Args:
        module: The called module.
        key: The key of the rule.
        name: The name of the module's class.
        kept: Whether `keep` has the key, so that other rules do not apply inside.
        dry: Whether the module runs without values, to find the shapes of its results. Then the
            hooks of modules inside do not run.
    """

    def __init__(self, module: Any, key: Any, name: str, kept: bool, dry: bool = False) -> None:
        self.module: Any = module
        self.key: Any = key
        self.name: str = name
        self.kept: bool = kept
        self.dry: bool = dry

    def begun(self, dry: bool = False) -> InsideWholeCall:
        """Return the same call, before anything in it has run."""
        return InsideWholeCall(self.module, self.key, self.name, self.kept, dry or self.dry)

    def starts(self, module: Any) -> bool:
        """Return whether this is the call of the module itself; True at most once."""
        found, self.module = self.module is module, None
        return found

    def hides(self, what: str) -> PassedOverError:
        """Return the error for an op or module inside, whose own rule would never run."""
        return PassedOverError(
            f"{what} ran inside of a call of {self.name}, whose whole call has a rule by "
            f"{self.key!r}. That rule defines the gradient, so the rule for {what} would never "
            f"run. Name other modules, or pass keep=[{self.key!r}] to keep the own gradients of "
            "all ops inside."
        )


def scope_of(ruleset: Any) -> Any:
    """Return the innermost open scope with a set of rules, in any state; None without one."""
    for scope in reversed(SCOPES.get()):
        if scope._ruleset is not None and scope._ruleset.home is ruleset.home:
            return scope
    return None
