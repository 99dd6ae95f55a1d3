"""Rules that read mutable state, in compiled code: they run in Python, at run time.

torch.compile traces a rule once, and the values that the rule read become constants. That is
correct for a rule that only computes. A rule may also read a number, a Tensor or an attribute that
can change between calls. The compiled program calls such a rule in Python through one opaque op, as
it would run without compiling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from regrad.core.containers import replaced
from regrad.core.foreign import ForeignRule
from regrad.core.replacing import Forward
from regrad.errors import PassedOverError
from regrad.torch.bridge import apply, is_differentiable, pulled
from regrad.torch.host import enable_recording
from regrad.torch.host.running import Silent
from regrad.torch.open_scopes import AROUND
from regrad.transforms.closures import PLAIN, Closure, reached, reads_state

_NUMBERS = itertools.count()
_PULLS: dict[int, Any] = {}


class Pulls(NamedTuple):
    """The call of a rule at one point of a compiled program."""

    pull: Callable[..., Any]  # a function of saved tensors, incoming gradients and shapes
    dtypes: Sequence[torch.dtype]  # the dtypes of the wanted gradients
    wanted: Sequence[int]  # the indices of their inputs
    ranks: Sequence[int]  # the number of axes of each input and output
    kept: int  # the number of saved tensors

    def shapes(self, sizes: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the shapes, from the flat sequence of all sizes."""
        every = iter(sizes)
        return [tuple(itertools.islice(every, rank)) for rank in self.ranks]

    def zeros(self, given: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        """Return zeros that replace wanted gradients of None."""
        shapes = self.shapes(sizes)
        return [
            torch.zeros(shapes[n], dtype=dtype, device=given[-1].device)
            for n, dtype in zip(self.wanted, self.dtypes, strict=True)
        ]

    def __call__(self, given: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        found = self.pull(given[: self.kept], given[self.kept :], self.shapes(sizes))
        taken = {x.untyped_storage().data_ptr() for x in given}
        return [
            zeros if dx is None else _in_own_memory(dx, taken)
            for dx, zeros in zip(found, self.zeros(given, sizes), strict=True)
        ]


def _in_own_memory(dx: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """Return a gradient in separate memory, which a custom op has to return."""
    if dx.untyped_storage().data_ptr() in taken:
        dx = dx.clone()
    taken.add(dx.untyped_storage().data_ptr())
    return dx.contiguous()


class PullsBackward(NamedTuple):
    """The gradient of a call at one point of a compiled program, called there as well."""

    first: Any
    given: int  # the number of arguments of `first`

    def zeros(self, given: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        return [torch.zeros_like(x) for x in given[: self.given]]

    def __call__(self, given: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        with enable_recording():
            xs = [x.detach().requires_grad_(is_differentiable(x)) for x in given[: self.given]]
            wanted = [n for n, x in enumerate(xs) if x.requires_grad]
            dxs = pulled(self.first(xs, sizes), [xs[n] for n in wanted], given[self.given :])
        found = self.zeros(given, sizes)
        pairs = zip(wanted, dxs, strict=True)
        made = [found[n] if dx is None else dx.detach().clone() for n, dx in pairs]
        return replaced(found, wanted, made)


def pull_at_run_time(
    pulls: Any, given: Sequence[torch.Tensor], sizes: Sequence[Any]
) -> Sequence[Any]:
    """Return the results of `pulls`, by an op that a compiled program leaves opaque."""
    number = next(_NUMBERS)
    _PULLS[number] = pulls
    return apply(AtRunTime, number, sizes, *given)


class AtRunTime(torch.autograd.Function, metaclass=Silent):
    """Carries one call from a compiled program."""

    @staticmethod
    def forward(number: int, sizes: Sequence[Any], *given: torch.Tensor) -> Any:
        return tuple(_op()(given, sizes, number))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.number, ctx.sizes, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> Any:
        given = ctx.saved_tensors
        again = PullsBackward(_PULLS[ctx.number], len(given))
        return None, None, *pull_at_run_time(again, [*given, *dys], ctx.sizes)


@cache
def _op() -> Any:
    def pull(given: Any, sizes: Any, number: int) -> Any:
        return _PULLS[number](given, sizes)

    schema = "(Tensor[] given, SymInt[] sizes, int number) -> Tensor[]"
    op = torch.library.custom_op("regrad::pull", pull, mutates_args=(), schema=schema)
    op.register_fake(lambda given, sizes, number: _PULLS[number].zeros(given, sizes))
    return op


def may_hold(rule: ForeignRule) -> bool:
    """Return whether the functions of a rule reach objects, which may hold parameters."""
    if rule.may_hold is None:
        rule.may_hold = bool(reached(Closure(*_functions(rule)), PLAIN))
    return rule.may_hold


def holds_parameters(rule: ForeignRule) -> bool:
    """Return whether functions that a rule differentiates reach tensors that require grad."""
    used = rule.forward is not None or rule.is_surrogate
    values = reached(Closure(*_functions(rule)), PLAIN) if used else ()
    held = [x for v in values for x in (v.parameters() if isinstance(v, torch.nn.Module) else [v])]
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in held)


def _functions(rule: ForeignRule | Forward) -> list[Any]:
    return [*rule.functions, *(() if rule.forward is None else rule.forward.functions)]


def may_change(rule: ForeignRule | Forward) -> bool:
    """Return whether a rule reads state that can change before its next call."""
    return reads_state(*_functions(rule))


def learned_here(rule: ForeignRule, like: torch.Tensor) -> list[Any]:
    """Return the parameters that a rule learns; in a program of torch.compile, the node's inputs.

    In such a program, a rule that closes over parameters raises.
    """
    around = AROUND.get()
    if around.place is None:
        return [*rule.learned]
    if holds_parameters(rule) or any(id(x) not in around.learned for x in rule.learned):
        around.place.error = PassedOverError(
            f"the rule {rule.name!r} uses parameters that the program of torch.compile does not "
            "have as inputs, and would treat as constants. Let the rule learn them, "
            "rg.rules.learns(rule, scale=scale), or call the model without torch.compile."
        )
        return [like.new_zeros(x.shape, dtype=x.dtype) for x in rule.learned]
    return [around.learned[id(x)] for x in rule.learned]
