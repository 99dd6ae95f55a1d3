"""Decomposed calls: the value from torch's own kernel, and the gradient from the parts.

The parts run in addition to the kernel, only for their gradients. So no value depends on how regrad
decomposes a kernel, and the rules fire at run time, for every way to differentiate and every order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.overrides

from regrad.errors import PassedOverError
from regrad.torch.arguments import fill_by_place
from regrad.torch.bridge import apply, is_differentiable
from regrad.torch.composites import Fused
from regrad.torch.host import (
    DisableTorchFunction,
    in_forward_mode,
    is_transformed,
    without_base,
)  # fmt: skip
from regrad.torch.host.running import Silent
from regrad.torch.replacing import like_own, refuse_undelivered


class Rules(Protocol):
    """The part of a set of rules that decompositions use."""

    coverage: Any
    keep: tuple[Any, ...]
    rules: Any
    values: frozenset[str]
    learned: tuple[torch.Tensor, ...]
    plan: Any
    mode: Any
    watched: Any

    def calls_of(self, function: Callable[..., Any]) -> Any: ...
    def calls_of_functions(self) -> dict[Any, Callable[..., Any]]: ...
    def parts_of(self, function: Callable[..., Any]) -> Sequence[tuple[Any, Any]]: ...
    def op(self, function: Callable[..., Any]) -> Callable[..., Any]: ...
    def counts(self, types: frozenset[str]) -> bool: ...
    def replaces(self, types: frozenset[str]) -> bool: ...
    def count_ops(self, types: frozenset[str], xs: Sequence[torch.Tensor]) -> None: ...
    def chain(self) -> Iterable[Any]: ...


def decompose(rules: Rules, function: Callable[..., Any], row: Fused) -> Callable[..., Any]:
    """Return the function that replaces a callable which computes overridden ops among others."""

    def run(*args: Any, **options: Any) -> Any:
        with DisableTorchFunction():
            filled = fill_by_place(args, options)
            xs, replaces = filled.values, rules.replaces(row.contains)
            if replaces:
                refuse_undelivered(function, args, options)
            if options.get("out") is not None or not xs:  # (torch has no gradient for `out`)
                return function(*args, **options)
            if not (
                replaces or row.compares or is_differentiated(xs) or rules.counts(row.contains)
            ):
                rules.count_ops(row.contains, xs)
                return function(*args, **options)
            if row.parts is None:
                raise undecomposable_error(rules, function, row)
            target, changes = xs[0], row.changes(function, args, options)
            if changes:
                xs = [target.clone(), *xs[1:]]
                given, options = filled.rebuild(xs)
                args = tuple(given)
            y: Any = row.parts(rules.op, *args, **options)
            if row.compares and (y is None or not is_differentiable(y)):
                return function(*args, **options) if y is None else y
            if replaces:
                if isinstance(y, tuple) and any(each is None for each in y):
                    raise undecomposable_error(rules, function, row)
                y = TorchOwnCall(function, filled.rebuild, changes).with_value(y, xs)
            elif not row.exact and not (row.draws and row.draws(*args, **options)):
                y = TorchOwnCall(function, filled.rebuild, changes).link(y, xs)
            return put(target, y, function) if changes else y

    # (a comparison, and a cast of other booleans, run no op with a rule)
    types = frozenset[str]() if row.compares else row.contains
    run.ruleset, run.op_types, run.refused = rules, types, row.parts is None  # pyright: ignore
    return run


def is_differentiated(xs: Sequence[torch.Tensor]) -> bool:
    """Return whether the program may differentiate a call."""
    if is_transformed() or in_forward_mode():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


def undecomposable_error(rules: Rules, function: Callable[..., Any], row: Fused) -> PassedOverError:
    """Return the error for a callable that computes an overridden op and cannot decompose."""
    types = row.contains & {t for each in rules.chain() for t in each.rules}
    what = "value" if rules.replaces(row.contains) else "gradient"
    name = torch.overrides.resolve_name(function) or getattr(function, "__name__", function)
    return PassedOverError(
        f"{name}{row.what} computes {' and '.join(map(repr, sorted(types)))} inside, which is "
        f"overridden, and would keep its own {what}. Write it with separate torch functions, or "
        f"pass keep=[{name}] to leave it as it is."
    )


def put(target: torch.Tensor, y: torch.Tensor, function: Callable[..., Any]) -> torch.Tensor:
    """Write a result into the target, and return the target."""
    if y.shape != target.shape:
        raise PassedOverError(
            f"{function.__name__} is overridden and changes the shape of its tensor in place, from "
            f"{tuple(target.shape)} to {tuple(y.shape)}, and no rule can apply to such a change. "
            "Use the out-of-place variant."
        )
    return target.copy_(y)


class TorchOwnCall:
    """A call of torch's own function, as a function of the tensors among its arguments."""

    def __init__(
        self, function: Callable[..., Any], rebuild: Callable[..., Any], in_place: bool
    ) -> None:
        self.function = function
        self.rebuild = rebuild
        self.in_place = in_place
        self.kind: Any = None  # the type of the result, if the result has several parts
        self.places: list[int] = []  # the indices of the parts in the result

    def __call__(self, xs: Sequence[torch.Tensor]) -> Any:
        """Return the result, which shares no memory with the arguments."""
        if self.in_place:
            xs = [xs[0].clone(), *xs[1:]]
        given, named = self.rebuild(xs)
        with DisableTorchFunction():
            y = self.function(*given, **named)
        if isinstance(y, torch.Tensor):
            return y.clone() if any(y is x for x in xs) else without_base(y, xs)
        self.kind = type(y)
        return tuple([without_base(each, xs) for each in y])

    def count_run(self) -> None:
        """Count a run of the gradient; by default do nothing."""

    def with_value(self, parts: Any, xs: Sequence[torch.Tensor]) -> Any:
        """Return the values of the parts in the form and the dtypes of torch's own result."""
        like = like_own(lambda *xs: self(xs), xs)
        if not isinstance(like, tuple):
            return parts.to(like.dtype)
        ys = [y.to(own.dtype) for y, own in zip(parts, like, strict=True)]
        return tuple(ys) if self.kind is tuple else self.kind(ys)

    def link(self, parts: Any, xs: Sequence[torch.Tensor]) -> Any:
        """Return the result of torch's own call, with the gradients of the parts attached."""
        ys = parts if isinstance(parts, tuple) else (parts,)
        self.places = [i for i, y in enumerate(ys) if y is not None]
        y = apply(Linked, self, *[ys[i] for i in self.places], *xs)
        for i in self.places:
            found = y[i] if isinstance(y, tuple) else y
            if found.shape != ys[i].shape:  # torch would silently sum the gradient
                raise PassedOverError(
                    f"{self.function.__name__} has a result of shape {tuple(found.shape)}, but its "
                    f"decomposition, which has an overridden op, of {tuple(ys[i].shape)}. Write it "
                    f"with separate torch functions, or pass keep=[{self.function.__name__}]."
                )
        return y if self.kind in (None, tuple) else self.kind(y)


class Linked(torch.autograd.Function, metaclass=Silent):
    """Carries one call: `Linked.apply(own, *parts, *xs)`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(own: TorchOwnCall, *given: torch.Tensor) -> Any:
        return own(given[len(own.places) :])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        own, *given = inputs
        ys = output if isinstance(output, tuple) else (output,)
        ctx.places, ctx.rest, ctx.own = own.places, len(given) - len(own.places), own
        ctx.dtypes = [y.dtype for y in ys]
        ctx.mark_non_differentiable(*[y for y in ys if not is_differentiable(y)])

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
        ctx.own.count_run()
        return None, *[dys[i] for i in ctx.places], *[None] * ctx.rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        found = dict(zip(ctx.places, tangents[1:], strict=False))
        ys = [found[i].to(d) if i in found else None for i, d in enumerate(ctx.dtypes)]
        return tuple(ys) if len(ys) > 1 else ys[0]
