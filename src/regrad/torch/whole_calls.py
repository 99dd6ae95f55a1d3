"""Calls of whole modules, each treated as a single op: keys `rg.at(where)` without an op.

regrad treats such a call as a function of the module's tensors and parameters. They pass through an
`autograd.Function` of regrad, as for any callable that is a key (`calls`). So the parameters get
the gradients that the rule returns for them by name, or the gradients of the `builtin` that the
rule calls.

If the rule replaces the value, the function of the rule runs instead of the module, as for any
callable (`replacing`). regrad runs the module without values, to find the shapes of its results.

Invariants:

* A rule returns a gradient for every parameter that requires one, or calls `builtin` once.
* The computation inside the call belongs to the one op. A rule that would fire inside raises,
  unless `keep` has the key. A tensor that requires a gradient and reaches the call by another path
  raises too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from regrad.core import containers
from regrad.core.call import Call, as_name
from regrad.core.containers import Leaves, flatten_objects
from regrad.core.foreign import ForeignRule, asks_for, names_for, takes_all, whole_layout, whole_op
from regrad.core.placed import asks_site, with_site
from regrad.core.places import at, pick
from regrad.core.replacing import Replace, gradient_of
from regrad.core.rule import called, free
from regrad.core.signatures import named
from regrad.errors import PassedOverError, RuleError, kind
from regrad.torch.below import Below, join_types
from regrad.torch.bridge import apply
from regrad.torch.calls import Overridden, RuleCall, check_learned
from regrad.torch.choices import bind_call, site_here
from regrad.torch.derivatives import TorchGradient, find_closed_over
from regrad.torch.enclosing import refuse_to_be_written
from regrad.torch.host import (
    DisableTorchFunction,
    is_torch_function_enabled,
    is_transformed,
    name_inside,
    sequence_nr,
    version_of,
)
from regrad.torch.host.bodies import has_hooks
from regrad.torch.host.running import keeps_elsewhere
from regrad.torch.nodes import tensors
from regrad.torch.open_scopes import AROUND, SCOPES, InsideWholeCall, inside
from regrad.torch.parameters import with_copies
from regrad.torch.places import counts_of
from regrad.torch.replacing import like_own, without_values
from regrad.torch.run_time import learned_here
from regrad.torch.subclasses import is_dispatched


class WholeRule:
    """The rule of a key `rg.at(where)`, for the modules that it selects."""

    def __init__(self, key: at, value: Any) -> None:
        self.key = key
        self.value = value
        check_learned(gradient_of(value))
        self.replaces: bool = isinstance(value, Replace)
        self.learned: list[Any] = [*getattr(gradient_of(value), "parameters", {}).values()]
        self.name: str = value if isinstance(value, str) else called(value)
        self.asks: list[str] = asks_for(value)
        self.asks_site: bool = asks_site(value, None)
        self.by_form: dict[Any, ForeignRule] = {}

    def check(self, module: Any, path: str) -> None:
        """Raise unless the rule returns a gradient for each parameter of a module."""
        rule = gradient_of(self.value)
        asked = {*asks_for(rule)}
        is_derivative = self.replaces and self.value.is_derivative
        if "builtin" in asked or is_derivative or takes_all(rule):
            return
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and as_name(name) not in asked:
                raise RuleError(
                    f"{self.key!r}: the rule {self.name!r} returns no gradient for the parameter "
                    f"{name!r} of {path or type(module).__name__!r}, which requires one. Call "
                    "builtin, as in lambda dy, builtin: builtin(2 * dy), or name the parameter, as "
                    f"{as_name(name)!r}, and return its gradient: (dx, {{{name!r}: dw}})."
                )

    def rule_for(self, call: ModuleArguments, site: Any) -> ForeignRule:
        """Return the rule for calls with these inputs."""
        value = with_site(self.value, site) if self.asks_site else self.value
        names = [as_name(name) for name in call.names]
        asks = [name for name in self.asks if name not in names]
        inputs = names_for(asks, call.inputs, [x.requires_grad for x in call.tensors])
        form = (*inputs, *names, *call.attrs, len(call.tensors))
        if self.asks_site or form not in self.by_form:
            rule = ForeignRule(value, whole_op(call.type, inputs, names, call.attrs))
            rule.key, rule.asks = self.key, {*self.asks}
            if self.asks_site:
                return rule
            self.by_form[form] = rule
        return self.by_form[form]


class ModuleArguments:
    """The arguments of a call of a module: the tensors, their containers, and the parameters.

    Args:
        module: The called module. `inner` is the same module, or the module inside a wrapper.
        put: Attributes that the module's hooks have set for this call (`weight_norm`: a weight).
    """

    def __init__(
        self, module: Any, args: Sequence[Any], options: Any, put: Mapping[str, Any]
    ) -> None:
        self.module: Any = module
        self.inner: Any = module
        prefix = ""
        while (name := name_inside(type(self.inner))) is not None:
            self.inner, prefix = getattr(self.inner, name), f"{prefix}{name}."
        self.type: str = type(self.inner).__name__
        held = dict(self.inner.named_parameters())
        full_names = [*[prefix + name for name in held], *[n for n in put if n not in held]]
        if other := [type(p) for p in held.values() if is_dispatched(type(p))]:
            raise PassedOverError(
                f"the call of {self.type} has a rule as a whole, and parameters of the class "
                f"{other[0].__name__}, which change inside the call (for example FSDP2). Name a "
                "module whose parameters are not sharded, or an op: rg.at(where, 'MatMul')."
            )
        held |= put
        self.names: list[str] = [*held]
        self.full_names: list[str] = full_names
        self.count: int = len(args)
        given = named(self.inner.forward, args, options)
        self.keywords: list[str] = [name for name, _ in given[len(args) :]]
        self.inputs: list[str] = [n for n, x in given if isinstance(x, torch.Tensor)]
        parts = [(n, x, Leaves(x, torch.Tensor, flatten_objects)) for n, x in given]
        self.attrs: dict[str, Any] = {free(n): x for n, x, found in parts if not found.places}
        # (only autograd may hold the tensor arguments, so that a checkpoint can free them)
        self.given: Leaves = Leaves(tuple([x for _, x in given]), torch.Tensor, flatten_objects)
        self.tensors: list[torch.Tensor] = self.given.arrays
        self.parameters: list[torch.Tensor] = [*held.values()]
        ids = [*map(id, (*self.tensors, *self.parameters))]
        self.first: list[int] = [*map(ids.index, ids)]  # (the module may test whether q is k)

    def value(
        self, within: InsideWholeCall, xs: Sequence[torch.Tensor], buffers: Mapping[str, Any] = {}
    ) -> Any:
        """Call the module with these tensors and parameters; leave its own parameters unchanged.

        `buffers` replace buffers of the module.
        """
        count, xs = len(self.given.places), [xs[i] for i in self.first]
        made = self.given.close(xs[:count])
        options = dict(zip(self.keywords, made[self.count :], strict=True))
        held = {**dict(zip(self.full_names, xs[count:], strict=True)), **buffers}
        modes = DisableTorchFunction() if within.kept else nullcontext()
        with inside(within=within.begun()), modes:
            y = functional_call(self.module, held, made[: self.count], options)
        return self._opened(y)

    def _opened(self, y: Any) -> Any:
        """Return the tensors of a result: a single tensor, or a tuple."""
        self.result: Leaves = Leaves(y, torch.Tensor, flatten_objects)
        found = self.result
        if hidden := [leaf for leaf in found.rest if containers.is_closed((leaf,), 1)]:
            raise PassedOverError(
                f"the call of {self.type} has a rule as a whole, and returned {kind(hidden[0])}, "
                "so the rule would miss tensors inside. Return the tensors in a list, tuple, dict, "
                "named tuple or dataclass, or register the class by optree.register_pytree_node."
            )
        if not (ys := found.arrays):
            raise PassedOverError(
                f"the call of {self.type} has a rule as a whole, and returned no tensor: {kind(y)}"
            )
        found.arrays = []
        return tuple(ys) if len(ys) > 1 else ys[0]

    def closed(self, y: Any) -> Any:
        """Return the result with these tensors in it."""
        return self.result.close(y if isinstance(y, tuple) else (y,))


class ModuleCall(RuleCall):
    """A call of a module under a rule for the whole call."""

    def __init__(self, rule: ForeignRule, call: ModuleArguments, within: InsideWholeCall, hit: Any):
        n, more, given = len(call.tensors), len(call.names), [*call.tensors, *call.parameters]
        self.call: ModuleArguments = call
        self.within: InsideWholeCall = within
        self.own: set[int] = {*range(n, n + more)}  # the leaves that the rule does not name
        self.own -= {n + j for j, name in enumerate(call.names) if as_name(name) in rule.asks}
        layout = whole_layout(rule.op, n, n + more)
        super().__init__(rule, given, layout, call.attrs, lambda *xs: call.value(within, xs), hit)
        self.is_simple: bool = False  # (the rule does not receive all parameters)

    def __call__(self, *xs: torch.Tensor) -> Any:
        if AROUND.get().place is not None:
            return super().__call__(*xs)  # (see `as_node`)
        elsewhere, start, again = keeps_elsewhere(), sequence_nr(), self.forward
        buffers = [*self.call.inner.buffers()]
        before, versions = [[version_of(x) for x in held] for held in (xs, buffers)]
        if is_transformed():
            record = None
            if self.rule.forward is None:
                self.forward = lambda *xs: self._watched(xs, self.within)
        else:  # (a checkpoint runs the call again; this record is only for inspection)
            with saved_tensors_hooks(_same, _same) if elsewhere else nullcontext():
                record = TorchGradient(self.forward, xs)
            _refuse_others(record, start, self.call.type)
        with DisableTorchFunction():
            if self.rule.asks_builtin:
                self.prepare(xs, None if elsewhere else record)
            self.record = record
            y = apply(Overridden, self, *xs)
            self.forward = again
            if elsewhere or not self.rule.asks_builtin:
                self.record = None
        runs_again = self.rule.asks_builtin and self.record is None
        if runs_again and [version_of(b) for b in buffers] != versions:
            raise PassedOverError(
                f"the call of {self.call.type} has a rule as a whole, and writes into its buffers. "
                "It would write again in the backward pass, because builtin runs the call again in "
                "a checkpoint and under torch.func. Use eval(), or do without them."
            )
        if [version_of(x) for x in xs] != before:
            raise PassedOverError(
                f"the call of {self.call.type} has a rule as a whole, and wrote into an argument "
                "or a parameter. No rule covers that. Make the module work out of place "
                "(inplace=False)."
            )
        return y

    def _watched(
        self, xs: Sequence[torch.Tensor], within: InsideWholeCall, buffers: Mapping[str, Any] = {}
    ) -> Any:
        """Return the module's own value, and check the ops inside where torch calls no mode."""
        xs = xs[: len(xs) - len(self.rule.learned)]
        if is_torch_function_enabled() and not is_transformed():
            return self.call.value(within, xs, buffers)
        with DisableTorchFunction(), Below() as below:
            y = self.call.value(within, xs, buffers)
        types = below.types & {t for scope in SCOPES.get() for t in scope._ruleset.rules}
        if types and not self.within.kept:
            raise self.within.hides(join_types(types))
        return y

    def like(self, xs: Sequence[torch.Tensor]) -> Any:
        buffers = dict(self.call.module.named_buffers())

        def own(*xs: torch.Tensor) -> Any:  # (a module may write into its buffers)
            dry = any(x.is_meta for x in xs)
            held = {k: without_values(b) if dry else b.clone() for k, b in buffers.items()}
            return self._watched(xs, self.within.begun(dry), held)

        return like_own(own, xs)

    def foreign_call(self, specs: Sequence[Any], outputs: Any) -> Call:
        own = self.own if self.specs else ()  # (the replacing function receives any dtype)
        every = [self.specs[n] if n in own else spec for n, spec in enumerate(specs)]
        return super().foreign_call(every, outputs)

    def values_at(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the results of the module's own function at other inputs."""
        n, given = len(self.call.given.places), self.given
        held = self.call.parameters if given is None else given[n : n + len(self.call.names)]
        return super().values_at([*leaves, *held])

    def _fitted(self, dx: Any, n: int, dy: Any) -> Any:
        return dx if n in self.own else super()._fitted(dx, n, dy)


def _same(x: Any) -> Any:
    return x


def _refuse_others(record: TorchGradient, start: int, name: str) -> None:
    """Raise for tensors that require a gradient and that are not arguments of the call."""
    if find_closed_over(record.xs, record.ys, start) is not None:
        raise PassedOverError(
            f"the call of {name} has a rule as a whole, and used a tensor that requires a "
            "gradient but is neither an argument nor a parameter of the module. Its gradient would "
            "be lost. Pass the tensor as an argument, name the parameter, let the rule learn it "
            "(rg.rules.learns), or detach it."
        )


def call_whole(
    whole: Sequence[tuple[Any, Mapping[Any, WholeRule]]],
    run: Callable[..., Any], module: Any, args: Sequence[Any], options: Mapping[str, Any],
    put: Mapping[str, Any] = MappingProxyType({}),
) -> Any:  # fmt: skip
    """Call a module that keys name as a whole; `whole` is by scope, the innermost first.

    `put` has the attributes that the module's hooks have set, if hooks ran before. In a program of
    torch.compile, it has the parameters.
    """
    if AROUND.get().own:
        return run(module, *args, **options)
    xs, name = [*tensors((args, options))], type(module).__name__
    for scope, held in whole:
        counts = counts_of(scope)
        fit, _ = pick([*held], counts, lambda n, scope=scope: site_here(scope, name, n, xs))
        if fit is None:
            continue
        rule = held[fit]
        refuse_to_be_written(f"the call of {name}")
        call = ModuleArguments(module, args, options, put)
        rule.check(call.inner, scope._modules.path_of(call.inner))
        site = None
        if rule.asks_site:
            n = counts.meet((rule.key, "called"))
            site = site_here(scope, call.type, n, call.tensors)
        shape = tuple(call.tensors[0].shape) if call.tensors else ()
        hit = bind_call(scope, rule.key, call.type, shape)
        within = InsideWholeCall(module, rule.key, call.type, rule.key in scope._keep)
        if (place := AROUND.get().place) is not None and not place.has_run:
            place.error = _find_error(call, within)
        bound = rule.rule_for(call, site)
        made = ModuleCall(bound, call, within, hit)
        given = [*call.tensors, *with_copies(call.parameters)]
        made.materializes = scope._materialize
        call.tensors = call.given.arrays = []
        moves = torch.is_grad_enabled() or is_transformed()
        learned = learned_here(bound, given[0]) if given else bound.learned
        return call.closed((made if moves else made.forward)(*given, *learned))
    return run(module, *args, **options)


def _find_error(call: ModuleArguments, within: InsideWholeCall) -> PassedOverError | None:
    """Return the error for an op inside with a rule, where torch.compile has closed the modes."""
    try:
        with ExitStack() as stack:
            for scope in SCOPES.get():
                stack.enter_context(scope._mode)
            call.value(within, [*call.tensors, *call.parameters])
    except PassedOverError as error:
        return error
    return None


# The modules whose calls torch.compile builds into programs. Their parameters are all that they
# read besides their arguments and settings.
BUILT_IN = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def as_node(spot: Any, ruleset: Any, module: Any) -> Callable[..., Any] | None:
    """Return the call of a module as a node of a program of torch.compile, under its rule.

    Args:
        spot: The place inside the module.
        ruleset: The rules of the innermost scope.
        module: The called module.

    Return None for a module that runs in Python, between two programs.
    """
    fits = {fit: rule for _, held in spot.whole for fit, rule in held.items()}
    is_read = any(fit.predicates or rule.asks_site for fit, rule in fits.items())
    plain = type(module) in BUILT_IN and {*module._parameters} == {"weight", "bias"}
    if is_read or not plain or has_hooks(module):
        return None
    inner, kind = ref(module), type(module)

    def overridden(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        put = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        return call_whole(spot.whole, kind, inner(), (x,), {}, put)

    names = {str(fit.key) for fit in [*fits][:1]}
    overridden.ruleset, overridden.op_types = ruleset, frozenset(names)  # pyright: ignore
    return overridden
