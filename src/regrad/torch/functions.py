"""An `autograd.Function` as a key: the forward pass is unchanged; the rule replaces the gradient.

torch calls no mode for a Function, and a program may hold a reference to its `apply` from an
import. So while a scope with such a key is open, regrad replaces `forward` of the class (or
`setup_context`, if the class has one). The replacement runs the original and binds the rule to the
node that autograd is creating. Afterwards the rule belongs to the node, wherever and whenever
autograd differentiates it.

That node has no edge to the parameters that a rule learns. If a rule for the class learns
parameters, regrad also replaces `apply`. The replacement runs the original inside an
`autograd.Function` of regrad that takes the parameters as inputs. A call through a reference to the
original `apply` raises.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import is_grad_enabled

from regrad.core.blocks import block
from regrad.core.callers import find_caller
from regrad.core.containers import replaced
from regrad.core.foreign import ForeignRule
from regrad.core.replacements import ABSENT, put_back
from regrad.core.reports import Hit
from regrad.errors import ArgumentError, GradientError, PassedOverError
from regrad.torch.call_cache import KnownCall, KnownOverride, is_special, kinds_of, learn
from regrad.torch.calls import Overridden, RuleCall, pull_back
from regrad.torch.choices import at_its_site, bind_call, hit_at
from regrad.torch.enclosing import refuse_to_be_written
from regrad.torch.host import (
    DisableTorchFunction,
    in_forward_mode,
    is_plain,
    is_transformed,
    version_of,
)  # fmt: skip
from regrad.torch.host.running import Silent, find_forward, function_of, ops_named, redirect
from regrad.torch.nodes import LIBRARIES
from regrad.torch.open_scopes import AROUND, NOTHING, SCOPES, inside
from regrad.torch.run_time import holds_parameters, learned_here

_LOCK = threading.Lock()
# The replaced attributes of Functions that are keys, as (function, name): the number of scopes that
# need the replacement, and the original value.
_open: dict[tuple[Any, str], int] = {}
_before: dict[tuple[Any, str], Any] = {}


def is_function(key: Any) -> bool:
    """Return whether a key is an `autograd.Function`."""
    return isinstance(key, type) and issubclass(key, torch.autograd.Function)


def find_named(name: str) -> Any:
    """Return the `autograd.Function` or custom op with a name; None if there is none.

    Raises:
        ArgumentError: Several have this name.
    """
    found, new = [], [torch.autograd.Function]
    while new:
        new = [each for kind in new for each in kind.__subclasses__()]
        found += [each for each in new if each.__name__ == name and each not in found]
    found += ops_named(name)
    if len(found) > 1:
        raise ArgumentError(
            f"several keys are called {name!r}: {', '.join(map(str, found))}. Give one"
        )
    return found[0] if found else None


def _replaced_in(functions: Mapping[Any, bool]) -> Iterator[tuple[Any, str]]:
    """Yield the attributes of Functions that a scope replaces: `apply` only if a rule learns."""
    for function, learns in functions.items():
        own = function.setup_context is not torch.autograd.Function.setup_context
        yield function, "setup_context" if own else "forward"
        if learns:
            yield function, "apply"


def install(functions: Mapping[Any, bool]) -> None:
    """Replace `forward` and the like of these Functions when a scope with their keys opens."""
    with _LOCK:
        for each in _replaced_in(functions):
            _open[each] = _open.get(each, 0) + 1
            if _open[each] == 1:
                function, name = each
                _before[each] = function.__dict__.get(name, ABSENT)
                make = _make_apply if name == "apply" else partial(_make, name)
                setattr(function, name, make(function))


def remove(functions: Mapping[Any, bool]) -> None:
    """Restore these Functions when a scope with their keys closes."""
    with _LOCK:
        for each in _replaced_in(functions):
            _open[each] -= 1
            if not _open[each]:
                del _open[each]
                put_back(*each, _before.pop(each))


@block
def install_for_block(functions: Mapping[Any, bool]) -> Generator[None]:
    """Keep the replacements for a block that runs under a scope which may have closed."""
    install(functions)
    try:
        yield
    finally:
        remove(functions)


def _make(name: str, function: Any) -> staticmethod[..., Any]:
    """Return the function that replaces a Function's `forward` or `setup_context`."""
    old = find_forward(function) if name == "forward" else function.setup_context

    @wraps(old)
    def bound(ctx: Any, *args: Any, **options: Any) -> Any:
        y = old(ctx, *args, **options)
        given = ((*args, *options.values()), y) if name == "forward" else args
        return _bind(ctx, function, *given)

    return staticmethod(bound)


def _make_apply(function: Any) -> classmethod[Any, ..., Any]:
    """Return the `apply` of a Function for which a rule learns parameters."""
    old = inspect.getattr_static(function, "apply")

    def apply(cls: Any, *args: Any, **options: Any) -> Any:
        run = old.__get__(None, cls)
        if cls is not function or AROUND.get().own:
            return run(*args, **options)
        found = _find_rule(function, args, is_grad_enabled())
        if found is None:
            with inside(decided=function):
                return run(*args, **options)
        if options:  # (torch accepts keywords if there is a setup_context)
            args = inspect.signature(find_forward(function)).bind(*args, **options).args
        return _apply_rule(function, *found, args)

    return classmethod(apply)


def as_node(ruleset: Any, function: Any) -> Callable[..., Any]:
    """Return a Function under its rule, as torch.compile puts it into programs."""

    def overridden(*args: Any) -> Any:
        if found := _find_rule(function, args, is_grad_enabled()):
            return _apply_rule(function, *found, args)
        with inside(decided=function):
            return function.apply(*args)

    types = {each.coverage.functions.get(function) for each in ruleset.chain()} - {None}
    overridden.ruleset, overridden.op_types = ruleset, frozenset(types)  # pyright: ignore
    return overridden


def _apply_rule(function: Any, rule: Any, hit: Hit, args: Sequence[Any]) -> Any:
    """Return the result of a Function under a rule, by a Function that takes its parameters."""
    moves = [isinstance(x, torch.Tensor) and x.requires_grad for x in args]
    call, xs = _call_of(function, rule, hit, args, moves)
    versions = [*map(version_of, xs)]
    y = call(*xs, *learned_here(call.rule, xs[0]))
    _refuse_changed(function, call, [xs[n] for n in call.kept if n < len(xs)], [
        x for x, version in zip(xs, versions, strict=True) if version_of(x) != version
    ])  # fmt: skip
    return y


def _call_of(
    function: Any, rule: Any, hit: Hit, args: Sequence[Any], moves: Sequence[bool]
) -> tuple[RuleCall, list[torch.Tensor]]:
    """Return one call of a Function under a rule, and the tensors among its arguments."""
    places = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    xs = [args[i] for i in places]
    one, attrs = _rule_for(rule, args, places, moves)
    layout = (tuple(range(len(xs))),) if one.op.inputs[0].kind == "many" else None
    call = RuleCall(one, xs, layout, attrs, _applied(function, args, places), hit)
    call.once = rule.once
    return call, xs


def _rules_for(function: Any, moves: bool) -> Iterator[Any]:
    """Yield the scopes with a rule for a Function, each with key and rule; the innermost first.

    If no gradient is needed (`moves` is False), yield only rules that replace the value.
    """
    place = AROUND.get().place  # (a program is run again after its module was left)
    for scope in reversed(SCOPES.get() if place is None else place.spot):
        ruleset: Any = scope._ruleset
        key = ruleset and ruleset.coverage.functions.get(function)
        if key and (moves or ruleset.rules[key].replaces):
            yield scope, key, ruleset.rules[key]


def _find_rule(function: Any, args: Sequence[Any], moves: bool) -> tuple[Any, Hit] | None:
    """Return the active rule for a call, and count the call."""
    around = AROUND.get()
    if around.own or (around.within is not None and around.within.kept):
        return None
    for scope, key, held in _rules_for(function, moves):
        refuse_to_be_written(repr(key))
        xs = [x for x in args if isinstance(x, torch.Tensor)]
        rule = held.pick(scope, xs) if held.chooses else held
        if rule is None:
            continue
        if rule.at_site is not None:
            rule = at_its_site(rule, scope, key, xs)
        if not (moves or rule.replaces):
            return None
        with DisableTorchFunction():  # (otherwise torch calls a mode for `shape`)
            return rule, bind_call(scope, rule.key, key, tuple(xs[0].shape))
    return None


def _kinds(ctx: Any, args: Sequence[Any], y: Any) -> Any:
    """Return the key under which a rule caches calls; None for calls that it does not cache.

    The key is complete, because a rule is for one Function. The names of inputs in the rule depend
    on the differentiated inputs. A rule that names an input into which the Function writes raises.
    """
    if type(y) is not torch.Tensor or not y.is_floating_point():
        return None
    kinds = kinds_of(args, {})
    if kinds is None:
        return None
    return kinds, ctx.needs_input_grad, ctx.dirty_tensors is None


def _bind(ctx: Any, function: Any, args: Sequence[Any], y: Any) -> Any:
    """Bind a rule to the gradient of one call of a Function; return the value."""
    moves, kinds = True in ctx.needs_input_grad, None
    if function_of(ctx) is function and is_plain() and AROUND.get() is NOTHING:
        with DisableTorchFunction():  # (otherwise torch calls a mode for each attribute)
            kinds = _kinds(ctx, args, y)
            nothing: Any = None, "", None
            scope, key, held = next(_rules_for(function, moves), nothing)
            known = None if held is None or held.chooses else held.known.get(kinds)
            if known is not None:
                xs = args if known.is_flat else [args[i] for i in known.places]
                hit = hit_at(scope._root, known.key, key, find_caller(LIBRARIES))
                hit.add(xs[0].shape)
                redirect(ctx, KnownOverride)
                ctx.set_materialize_grads(True)
                known.keep(ctx, hit, xs, y)
                return y
    elif is_transformed():
        _refuse_transforms(function, args)
        return y
    if function_of(ctx) is not function:
        return y  # (a subclass is a different Function)
    found = None if AROUND.get().decided is function else _find_rule(function, args, moves)
    if found is None:
        return y
    rule, hit = found
    _refuse_held_apply(function, rule)
    call, xs = _call_of(function, rule, hit, args, ctx.needs_input_grad)
    places: Any = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
    one = call.rule
    call.at, call.total = places, len(args)
    _refuse_changed(function, call, [xs[n] for n in call.kept], ctx.dirty_tensors or ())
    if kinds is not None and kinds not in rule.known and one.writes is False:
        usual = call.layout is None and not is_special(rule)
        known = KnownCall(call, rule.key, hit.op_type, places, len(args)) if usual else None
        learn(rule.known, kinds, known)
    if call.rule.replaces:
        y = call.forward.answer(xs, y)  # pyright: ignore
        if not moves:
            return y
    if in_forward_mode():
        raise GradientError(
            f"forward mode: {function.__name__} has a rule for its gradient, but torch would use "
            "its own jvp instead. Use reverse mode (backward, autograd.grad)."
        )
    redirect(ctx, Ruled)  # now the node calls the backward pass of `Ruled`
    ctx.set_materialize_grads(True)
    saved: Sequence[Any] = ()
    if call.rule.asks_builtin or call.once:
        own = None if call.rule.replaces else OwnGradient  # (see `Ruled`)
        saved = () if own is None else ctx.to_save or ()
        call.prepare(xs, own)
    if call.once:
        call.kept = list(range(len(xs)))  # (for `orders`)
    Overridden.setup_context(ctx, (call, *xs), y)
    if saved:
        ctx.save_for_backward(*ctx.to_save, *saved)
    call.theirs = function, len(saved)
    return y


def _rule_for(rule: Any, args: Sequence[Any], places: Sequence[int], moves: Sequence[bool]) -> Any:
    """Return the rule for a call of a Function, and the arguments that are not tensors by name."""
    (form,) = rule.forms
    names = [*form, *(f"args{i}" for i in range(len(args)))][: len(args)]
    every = {**form, **dict(zip(names, args, strict=True))}
    attrs = {name: x for name, x in every.items() if not isinstance(x, torch.Tensor)}
    return rule.with_names([names[i] for i in places], [moves[i] for i in places], attrs), attrs


def _applied(function: Any, args: Sequence[Any], places: Sequence[int]) -> Callable[..., Any]:
    """Return an `autograd.Function` as a function of the tensors among these arguments."""
    held = replaced([*args], places, [None] * len(places))

    def apply(*xs: torch.Tensor) -> Any:
        with inside(own=True):  # with its own gradient
            return function.apply(*replaced(held, places, xs))

    return apply


def refuse_unreplaceable(function: Any) -> None:
    """Raise for a rule that replaces the value of a Function which has a `setup_context`."""
    if function.setup_context is not torch.autograd.Function.setup_context:
        raise PassedOverError(
            f"{function.__name__} has a setup_context, which receives its own value, so no rule "
            "can replace that value (rg.replace). Replace the function that applies it, or the ops "
            "inside it."
        )


def refuse_parameters(function: Any, rule: ForeignRule) -> None:
    """Raise for a rule that closes over parameters, since a Function's node has no edge to them."""
    if holds_parameters(rule):
        raise ArgumentError(
            f"the rule {rule.name!r} closes over parameters that require grad, and the node of "
            f"{function.__name__}, an autograd.Function, has no edges to them. Pass the parameter "
            "to the Function as an argument, or detach it."
        )


def _refuse_held_apply(function: Any, rule: Any) -> None:
    """Raise for a rule that learns, if the program called another `apply` than the scope's."""
    if rule.learned:
        raise PassedOverError(
            f"{function.__name__} was called through an `apply` that the program read before the "
            f"scope opened. Through it the rule {rule.name!r} cannot learn its parameters. Call "
            f"{function.__name__}.apply in the scope."
        )


def _refuse_changed(
    function: Any, call: RuleCall, kept: Sequence[Any], changed: Sequence[Any]
) -> None:
    """Raise for a rule that needs a tensor which a Function has changed in place."""
    which = f"{function.__name__} changes its input in place, and"
    if changed and call.rule.replaces:
        raise PassedOverError(
            f"{which} is overridden by a rule that replaces its value (rg.replace), but other code "
            "may read the changed input."
        )
    if any(x is y for x in kept for y in changed):
        raise PassedOverError(
            f"{which} {call.describe()} needs that input, but only the changed value is left. "
            "Write the rule with y, or make the Function work out of place."
        )


def _refuse_transforms(function: Callable[..., Any], args: Sequence[Any]) -> None:
    if _find_rule(function, args, True) is not None:
        raise PassedOverError(
            f"{function.__name__} is overridden and ran under torch.func, which differentiates it "
            "internally, without the rule. Use torch.autograd.grad, or define the gradient with "
            "regrad.torch.custom_grad."
        )


class Ruled(torch.autograd.Function, metaclass=Silent):
    """The backward pass of a Function under a rule."""

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
        call, saved = ctx.known[0], ctx.saved_tensors
        function, theirs = call.theirs
        ours = len(saved) - theirs
        if (call.rule.asks_builtin or call.once) and not call.rule.replaces:
            call.record = OwnGradient(function, ctx, saved[ours:])
        try:
            return pull_back(ctx, saved[:ours], dys)
        finally:
            call.record = None  # (breaks the cycle between `record`, `ctx` and `call`)


class OwnGradient:
    """A Function's own backward pass, for rules that call `builtin`.

    It has access to the tensors that the forward pass saved, and to everything in its context.
    """

    def __init__(self, function: Any, ctx: Any, saved: Sequence[Any]) -> None:
        self.function = function
        self.ctx = ctx
        self.saved_tensors = saved
        self.xs: Sequence[Any] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def pull(self, dys: Sequence[torch.Tensor], recording: bool, only: Any = None) -> list[Any]:
        """Return the gradients of the Function's tensors."""
        dxs = self.function.backward(self, *dys)
        dxs = dxs if isinstance(dxs, tuple) else (dxs,)
        return [dxs[i] for i in self.ctx.known[0].at]
