"""The scopes of overrides that are open here: in this thread, and in this task."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple

from regrad.core.blocks import block
from regrad.errors import PassedOverError

# `regrad.torch.gradient_override_map` objects, the innermost last. If one of them names places, the
# tuple is a `places.Spot`, with what the scopes are where the program is.
SCOPES: ContextVar[tuple[Any, ...]] = ContextVar("regrad_torch", default=())


class RunningContext(NamedTuple):
    """The surroundings of the code that runs here, besides scopes.

    Args:
        own: whether every op has torch's own gradient, whatever scopes and custom gradients there
            are, for the tools that compare the two.
        looked_at: whether a tool looks at the calls, and at the nodes of each.
        within: the call of a module, an `InsideWholeCall`, that has a rule as a whole.
        place: the `Place` of a node in a graph that torch.compile captures.
        decided: the `autograd.Function` that is called, if it is known that no rule holds for it.
        learned: what that node was given for the parameters of rules, by the identity of each.
    """

    own: bool = False
    looked_at: bool = False
    within: Any = None
    place: Any = None
    decided: Any = None
    learned: Mapping[int, Any] = MappingProxyType({})


NOTHING = RunningContext()
AROUND: ContextVar[RunningContext] = ContextVar("regrad_torch_around", default=NOTHING)


@block
def inside(**changes: Any) -> Generator[None]:
    """A block in which other things are around the code."""
    token = AROUND.set(AROUND.get()._replace(**changes))
    try:
        yield
    finally:
        AROUND.reset(token)


class InsideWholeCall:
    """The call of a module that has a rule as a whole, from the inside.

    Args:
        module: the one that is called.
        key: that of the rule.
        name: of the module's class.
        kept: whether `keep` has the key, so that other rules are to be passed over inside.
    """

    def __init__(self, module: Any, key: Any, name: str, kept: bool) -> None:
        self.module: Any = module
        self.key: Any = key
        self.name: str = name
        self.kept: bool = kept

    def begun(self) -> InsideWholeCall:
        """Return the same call, of which nothing has run."""
        return InsideWholeCall(self.module, self.key, self.name, self.kept)

    def starts(self, module: Any) -> bool:
        """Return whether this is the call of the module itself, which is asked about once."""
        found, self.module = self.module is module, None
        return found

    def hides(self, what: str) -> PassedOverError:
        """Return the error for an op, or module, whose own rule would never run."""
        return PassedOverError(
            f"{what} ran inside of a call of {self.name}, which has a rule as a whole by "
            f"{self.key!r}: that decides, and the rule for {what} would never run. Name other "
            f"modules, or pass keep=[{self.key!r}] to have all inside keep its own gradient."
        )


def scope_of(ruleset: Any) -> Any:
    """Return the innermost open scope with a set of rules, wherever it is; None if none has it."""
    for scope in reversed(SCOPES.get()):
        if scope._ruleset is not None and scope._ruleset.home is ruleset.home:
            return scope
    return None
