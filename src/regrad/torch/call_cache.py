"""A cache for calls under a rule, by the kinds of their arguments.

In a call such as `F.relu(h, inplace=False)`, everything but the tensors is the same each time: the
op's parameter for each argument, the names that the rule uses, the checks of the answer. `rulesets`
and `calls` determine these for any call. This module caches them by the kinds of the arguments
(`kinds_of`), once a call of that kind has run forward and backward. The next calls do only the work
that depends on the tensors. A call in place runs torch's own in-place function, and marks the
Function's input as dirty for autograd.

The cache also has calls of an `autograd.Function` that is a key. The forward pass remains the
Function's own, so regrad checks the result each time (see `functions`).

Invariants:

* A cached call depends only on the rule, the function and the kinds. regrad checks everything else
  at each call, and every unusual call uses the general path: other classes of tensors, torch.func,
  forward mode, programs being traced, rules that count calls or need more.
* A rule runs once. The cache accepts an answer in the expected form; the general path checks any
  other answer.
* The cache has only rules that write into no argument. Rules in regrad's functions run as described
  in `recorded`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import is_grad_enabled

from regrad.core.callers import find_caller
from regrad.core.containers import replaced
from regrad.core.rule_forms import PerInput, asked
from regrad.core.state import current
from regrad.core.walk import noted
from regrad.torch.arguments import fill
from regrad.torch.biases import in_order_of
from regrad.torch.bridge import alias
from regrad.torch.calls import (
    RuleCall,
    pull_back,
    wrote_into,
)
from regrad.torch.choices import hit_at
from regrad.torch.composites import is_other_op
from regrad.torch.host import (
    CHECKPOINTS,
    DisableTorchFunction,
    can_be_marked_dirty,
    is_autocast_open,
    is_plain,
    is_transformed,
    raw_apply,
    unwrap_dead,
    version_of,
)
from regrad.torch.host.dynamo import is_traced
from regrad.torch.host.running import Silent
from regrad.torch.nodes import LIBRARIES
from regrad.torch.open_scopes import AROUND, NOTHING
from regrad.torch.optypes import in_place_of

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_USUAL = ({}, {"inplace": False}, {"inplace": True})  # keywords
_spec = attrgetter("shape", "dtype")
_EXACT = {bool, int, str, type(None), torch.dtype}  # types with == only for identical values
KEPT = 64  # the number of cached kinds of calls of a function


def kinds_of(args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return the cache key of a call; None for a call with other kinds of arguments.

    The key is complete: each function under each set of rules has a separate cache. The key has the
    class and exact value of each argument that is not a tensor. `_understood` depends on dtypes,
    and rules may depend on ranks. A call passes shapes and values to the rule each time.
    """
    if args and not args[1:] and type(args[0]) in _PLAIN and options in _USUAL:  # most calls
        return args[0].dtype, args[0].ndim, bool(options) and options["inplace"]
    kinds: list[Any] = []
    for x in args:
        kind = type(x)
        if kind in _PLAIN:
            kinds.append((x.dtype, x.ndim))
        elif kind in _EXACT:
            kinds.append((kind, x))
        elif kind is float:
            kinds.append(x.hex())  # (distinguishes -0.0 from 0.0)
        else:
            return None
    for name, x in options.items():
        kind = type(x)
        if kind in _PLAIN:
            kinds.append((name, x.dtype, x.ndim))
        elif kind in _EXACT or kind is float:
            kinds.append((name, kind, x.hex() if kind is float else x))
        else:
            return None
    return tuple(kinds)


class CallCache:
    """The way to run a torch function that has a rule, see `modes`."""

    def __init__(self, ruleset: Any, function: Any, spelling: Any, call: Any) -> None:
        self.function = function
        self.spelling = spelling
        self.call = call  # the general path
        self.known: dict[Any, KnownCall | None] = {}  # None: a kind that cannot be cached
        rule = ruleset.rules[spelling.family.type]
        self.rule: Any = None if is_special(rule) else rule

    def __call__(self, mode: Any, func: Any, args: Sequence[Any], options: Any) -> Any:
        if (
            self.rule is None
            or not is_grad_enabled()
            or AROUND.get() is not NOTHING
            or not is_plain()
        ):
            return self.call(*args, **options)
        with DisableTorchFunction():  # (otherwise torch calls modes for each attribute)
            kinds = kinds_of(args, options)
            known = self.known.get(kinds)
            if known is not None and (known.rewrite is None or can_be_marked_dirty(args[0])):
                xs = (
                    args
                    if known.is_flat
                    else [args[i] if type(i) is int else options[i] for i in known.places]
                )
                if known.copies:  # (autograd records the copy, which the rule may need)
                    xs = xs[0].clone(), *xs[1:], xs[0]
                scope, where = mode.root, find_caller(LIBRARIES, 2)
                by_line = scope._bindings[known.key].by_line
                if scope._modules is None and where in by_line:
                    hit = by_line[where]
                else:
                    hit = hit_at(scope, known.key, known.op_type, where)
                hit.count += 1
                hit.sizes[xs[0].shape] = None
                if xs is args and not xs[1:]:
                    return _apply(known, hit, unwrap_dead(xs[0]))
                return _apply(known, hit, *map(unwrap_dead, xs))
        return self._learn(kinds, args, options)

    def run(self, mode: Any, /, *args: Any, **options: Any) -> Any:
        """Run the callable as a mode does, for use as a part of another callable."""
        return self(mode, self.function, args, options)

    def _learn(self, kinds: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return the result of a call, and cache its kind."""
        y = self.call(*args, **options)
        if kinds is not None and kinds not in self.known and self.rule.writes is False:
            learn(self.known, kinds, self._understood(args, options, y))
        return y

    def _understood(
        self, given: Sequence[Any], named: Mapping[str, Any], y: Any
    ) -> KnownCall | None:
        family = self.spelling.family
        if type(y) is not torch.Tensor or not y.is_floating_point():
            return None
        changes, args, options = self.spelling.out_of_place(given, named)
        every = chain(enumerate(args), options.items())
        tensors = {i: x for i, x in every if type(x) in _PLAIN}
        places = [*tensors]
        if is_other_op(family.type, args, options) or (changes and places[:1] != [0]):
            return None
        filled = fill(in_order_of(self.function, family), self.function, args, options)
        rule = self.rule.for_call(filled)
        leaves = [v for v in filled.values if isinstance(v, torch.Tensor)]
        # (all tensors are inputs, in the op's order)
        as_written = [*map(id, leaves)] == [*map(id, tensors.values())]
        if rule.plain is None or not (rule.op.flat and as_written):
            return None
        if not all(x.is_floating_point() for x in leaves):
            return None
        forward = _filled(self.spelling.function, args, options, places)
        call = RuleCall(rule, filled.values, None, filled.attrs, forward, None)
        copies = changes and 0 in call.kept
        call.at, call.total = range(2, len(places) + 2), len(places) + 2 + copies
        known = KnownCall(call, self.rule.key, family.type, places, len(given))
        if changes:
            written = in_place_of(self.function) if len(given) == 1 else None
            known.rewrite = written or _filled(self.function, given, named, places)
            known.copies = copies
        return known


def _filled(
    function: Any, args: Sequence[Any], options: Mapping[str, Any], places: Sequence[Any]
) -> Any:
    """Return a function of the tensors at these places, with all other arguments fixed."""
    if not options and len(places) == len(args):
        return function
    if len(args) == 1 and [*places] == [0]:
        return partial(function, **options)
    held: dict[Any, Any] = {**dict(enumerate(args)), **options, **dict.fromkeys(places)}
    count = len(args)

    def call(*xs: torch.Tensor) -> Any:
        given = held | dict(zip(places, xs, strict=True))
        by_place = [given.pop(i) for i in range(count)]
        return function(*by_place, **given)

    return call


def learn(known: dict[Any, KnownCall | None], kinds: Any, call: KnownCall | None) -> None:
    """Cache how to make calls of a kind."""
    if len(known) >= KEPT:
        known.clear()
    known[kinds] = call


def is_special(rule: Any) -> bool:
    """Return whether a rule needs more for each call than the cache holds."""
    if CHECKPOINTS.losses or rule.chooses or rule.at_site is not None:
        return True
    if rule.replaces or rule.once or rule.learned or rule.runs_op or rule.has_bias:
        return True
    return rule.takes_all or rule.is_borrowed


class KnownCall:
    """The data that calls of one kind have in common.

    Args:
        call: One of the calls, in the form of the general path.
        key: The key of the rule in the map.
        op_type: The op type of its hits.
        places: The positions, or names, of the tensors among the arguments.
        count: The number of arguments.

    `order` has the index of each argument of the rule, after `dy`, among the saved values and the
    attributes. It is None if the rule has several inputs or other arguments.
    """

    def __init__(
        self, call: RuleCall, key: Any, op_type: str, places: Sequence[Any], count: int
    ) -> None:
        self.call = call
        self.key = key
        self.op_type = op_type
        self.places = places
        self.is_flat: bool = [*places] == [*range(count)]
        self.forward: Any = call.forward
        self.kept: Any = call.kept
        self.keeps_all: bool = len(call.kept) == len(places)
        self.keeps_y: bool = call.keeps_y
        self.rule: Any = call.rule
        self.function: Any = call.rule.rule.function
        self.order: list[int] | None = _order(call) if len(places) == 1 else None
        self.attrs: Sequence[Any] = tuple(call.attrs.values())
        kept = len(self.kept) + self.keeps_y
        self.takes_kept: bool = not self.attrs and self.order == [*range(kept)]
        at: Any = call.at
        total: Any = call.total
        self.around: Any = (None,) * at[0], (None,) * (total - at[0] - 1)  # for a single gradient
        self.fixed: Any = call.fixed
        # For a call in place: torch's own in-place function of the tensors, and whether the rule
        # names the tensor that it changes. If so, the Function's first input is a copy, and the
        # tensor itself is the last input.
        self.rewrite: Any = None
        self.copies: bool = False

    def keep(self, ctx: Any, hit: Any, xs: Sequence[torch.Tensor], y: torch.Tensor) -> None:
        """Save the values that the rule names for the backward pass."""
        saved = xs if self.keeps_all else [xs[n] for n in self.kept]
        if self.keeps_y:
            ctx.save_for_backward(*saved, y)
        else:
            ctx.save_for_backward(*saved)
        x = xs[0]
        specs = tuple(map(_spec, xs)) if xs[1:] else ((x.shape, x.dtype),)
        ctx.known = self, hit, specs

    def with_hit(self, hit: Any) -> RuleCall:
        """Return the call in the form of the general path."""
        call = RuleCall.__new__(RuleCall)  # (`copy.copy` takes five times as long)
        call.__dict__.update(self.call.__dict__, hit=hit)
        return call


def _order(call: RuleCall) -> list[int] | None:
    rule = call.rule.rule.bare
    if not (
        call.rule.plain and call.is_simple and type(rule) is PerInput and rule.function is not None
    ):
        return None
    names, by_place = asked(rule.function, rule.op)
    known = [rule.op.inputs[0].name] * len(call.kept) + ["y"] * call.keeps_y + [*call.attrs]
    if not by_place or not set(names) <= set(known):
        return None
    return [known.index(name) for name in names]


class KnownOverride(torch.autograd.Function, metaclass=Silent):
    """Carries one call: `apply(known, hit, *xs)`.

    The node of a Function that is a key calls this backward pass too (see `functions`).
    """

    @staticmethod
    def forward(ctx: Any, known: KnownCall, hit: Any, *xs: torch.Tensor) -> Any:
        if known.rewrite is not None:
            xs, target = (xs[:-1], xs[-1]) if known.copies else (xs, xs[0])
            y = known.rewrite(target, *xs[1:])
            ctx.mark_dirty(y)
            known.keep(ctx, hit, xs, y)
            return y
        y = known.forward(*xs)
        for x in xs:
            if y is x:  # (for example, a dropout with probability 0)
                y = alias(y)
        known.keep(ctx, hit, xs, y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        known, hit, specs = ctx.known
        saved = ctx.saved_tensors
        with DisableTorchFunction():  # (first, since a mode would be called for `dy.dtype` too)
            if (
                type(dy) is torch.Tensor
                and known.rule.writes is False
                and not is_traced()
                and not is_transformed()
                and not is_autocast_open()
                and current() is None
            ):
                if known.order is not None and dy.dtype is specs[0][1]:
                    before, after = known.around
                    return *before, _pull(known, hit, specs[0], saved, dy), *after
                if known.rule.recordings is not None and not is_grad_enabled():
                    at: Any = known.call.at
                    wanted = (0,)
                    if specs[1:]:
                        wanted = tuple([n for n, i in enumerate(at) if ctx.needs_input_grad[i]])
                    fixed = known.fixed, wanted, specs, None
                    found = known.rule.recordings.replay(fixed, [*saved, dy])
                    if found is not None:
                        hit.ran += 1
                        if not specs[1:]:
                            before, after = known.around
                            return *before, *found, *after
                        nothing: Any = [None] * known.call.total
                        return tuple(replaced(nothing, [at[n] for n in wanted], found))
        whole = known.with_hit(hit), [(tuple(s), d) for s, d in specs], None, known.kept
        return pull_back(_Context(whole, ctx.needs_input_grad), saved, (dy,))


class _Context(NamedTuple):
    """The context of a cached call, in the form of a general call's context."""

    known: Any
    needs_input_grad: Sequence[bool]


def _pull(known: KnownCall, hit: Any, spec: Any, saved: Sequence[Any], dy: torch.Tensor) -> Any:
    """Return the gradient of the only input."""
    hit.ran += 1
    before = version_of(dy)  # (version counters never decrease)
    for x in saved:
        before += version_of(x)
    try:
        if known.takes_kept:
            dx = known.function(dy, *saved)
        else:
            given = (*saved, *known.attrs)
            dx = known.function(dy, *map(given.__getitem__, known.order))  # pyright: ignore
    except Exception as error:
        raise noted(error, known.with_hit(hit).describe()) from error.__cause__
    if type(dx) is not torch.Tensor or dx.shape != spec[0] or dx.dtype is not spec[1]:
        dx = known.with_hit(hit).checked(spec, dx, dy)
    after = version_of(dy)
    for x in saved:
        after += version_of(x)
    if after != before:
        raise wrote_into(known.with_hit(hit).describe())
    return dx


_apply: Any = raw_apply(KnownOverride)
