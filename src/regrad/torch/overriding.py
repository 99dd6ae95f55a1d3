"""`gradient_override_map` for PyTorch: rules that apply to unmodified code."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextvars import Token
from threading import get_ident
from types import FunctionType
from typing import Any, NamedTuple

import torch

from regrad.core import jobs
from regrad.core.blocks import Refusal
from regrad.core.callers import warn_of_open_scope
from regrad.core.interrupts import Deferred
from regrad.core.parameters import split
from regrad.core.placed import asks_site
from regrad.core.places import Counts, at, entries, refuse_none, spread
from regrad.core.replacing import check_values
from regrad.core.reports import Binding, Table, Untouched
from regrad.core.scopes import Optional, Scope, check_order, left_out_of_turn, unmarked
from regrad.core.signatures import helpful
from regrad.errors import ArgumentError, NotFiredError, kind
from regrad.torch import functions, intercepts
from regrad.torch.below import as_called
from regrad.torch.host import HOST, OVERRIDES, check_promises, push_mode
from regrad.torch.host.running import WATCHING
from regrad.torch.modes import STEPS, Mode
from regrad.torch.open_scopes import SCOPES
from regrad.torch.parameters import Parameters
from regrad.torch.places import COUNTS, Modules, Spot, View, check_model, open_here, stand
from regrad.torch.rulesets import KEPT, RuleSet, family_of, identity_of_map, rule_set
from regrad.torch.thresholds import KEY, NOT_CAST


class gradient_override_map(Scope[Binding]):
    """Override the gradients of torch functions inside a `with` block.

    Args:
        rules: `{key: rule}`. A key is an op type (`"Relu"`, `"Softmax"`) or a torch callable. An op
            type covers every spelling in torch: functions, methods, operators and in-place variants
            (the docs have the table). A callable that belongs to an op type stands for the whole op
            type. A rule is a function, a name registered with `regrad.RegisterGradient`, or an op
            type whose own rule regrad uses. A rule function may use regrad's functions or torch's.
            Its signature is `(dy, x, …)`, or TensorFlow's `(op, grad, …)`. A key may also be
            `rg.at(where, what)`, which restricts the rule to some modules. Without `what` the rule
            applies to the whole call of each module.
        keep: Torch callables and subclasses of `torch.autograd.Function` that keep their own
            gradient although they compute an overridden op inside. Also keys for whole calls;
            inside these calls no other rule fires.
        model: The module whose `named_modules()` define the paths and numbers in keys. The model
            may run directly, in a wrapper (DDP, `torch.compile`), or in parts.
        values: Whether rules may replace values, as `rg.replace(forward)` does.
        order: By default the rules apply at every order. With `order=1` the rules define only the
            first derivative. If the program differentiates a gradient that the rules computed
            (`create_graph=True`), regrad differentiates the formulas of the rules, and torch's own
            gradients apply to everything else. A backward pass through such a gradient and beyond
            it (`loss + gradient.norm()`) uses torch's own gradients throughout.
        materialize: Whether an unused output receives a gradient of zeros. With
            `materialize=False`, `dy` of an op or module with several outputs is None for an unused
            output, and parameters that only unused outputs depend on get no gradient (`builtin`
            returns None).
        watch: Whether `untouched()` shows source lines and modules for the ops that keep their own
            gradient, and lists each `autograd.Function` without a rule. Watching costs some
            microseconds for each op.

    The scope works with any code that runs PyTorch; you do not edit the model. regrad binds an op
    to its rule when the op runs forward. The rule then applies wherever and whenever the op is
    differentiated. Some callables compute an overridden op among others
    (`scaled_dot_product_attention`, `cross_entropy`, `LSTM`). regrad decomposes these callables and
    keeps torch's own values, or raises an error. The scope also applies to jobs that are submitted
    and threads that are started inside it, and to `torch.utils.checkpoint`. `docs/torch/` lists the
    cases that raise an error.

    The object bound by `as` reports what happened: `hits`, `table()`, `untouched()` and
    `assert_fired()`. Under `torch.compile`, `hits` counts the calls during tracing. As a decorator,
    the map opens a new scope for each call of the function, and reports the hits of all calls.

    Raises:
        ArgumentError: A key names no module of the model; two keys name the same call of a module;
            a rule replaces values without `values=True`; `order` is neither None nor 1; a flag is
            not a bool.
        GradientError: `order=1` in forward mode, or under torch.func in torch.compile.
        UnknownOpError: A key or a rule name does not exist, or torch does not have the op.
        RuleError: A rule has a parameter that the op does not have.
        PassedOverError: In the scope, an op would keep its own gradient although it has a rule; or
            keys name modules, and a module runs that was not in the model.

    Source: `tf.Graph.gradient_override_map` of TensorFlow 1; the hook is `TorchFunctionMode`.

    >>> import torch
    >>> import regrad as rg
    >>> import regrad.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(inplace=True))
    >>> x = torch.ones(1, 2, requires_grad=True)
    >>> with regrad.torch.gradient_override_map({"Relu": rg.rules.guided_relu}) as used:
    ...     model(x).sum().backward()
    >>> used.assert_fired()
    >>> x = torch.tensor(0.5, requires_grad=True)
    >>> with regrad.torch.gradient_override_map({"Tanh": lambda dy, y: dy * y}, order=1):
    ...     (relevance,) = torch.autograd.grad(x.tanh() ** 2, x, create_graph=True)  # 2 tanh(x)²
    >>> relevance.backward()
    >>> x.grad
    tensor(1.4537)
    """

    @helpful("gradient_override_map")
    def __init__(
        self,
        rules: Mapping[Any, Any],
        *,
        keep: Iterable[Any] = (),
        model: Any = None,
        values: bool = False,
        order: int | None = None,
        materialize: bool = True,
        watch: bool = False,
    ) -> None:
        if type(rules) is not dict and not isinstance(rules, Mapping):  # (`isinstance` is slow)
            raise ArgumentError(
                "gradient_override_map expected a dict from op types (or torch callables) to "
                f"rules, as in gradient_override_map({{'Relu': rule}}), got {rules!r:.60}"
            )
        if not type(values) is type(materialize) is type(watch) is bool:
            raise _wrong_flag(values=values, materialize=materialize, watch=watch)
        self._order = check_order("gradient_override_map", order)
        self._map = _checked(rules, values, self._order)
        self._rules, self._marked = self._map.rules, self._map.marked
        if self._map.parameters:
            self._rules = {**self._map.rules, **self._map.parameters}
        self._values = values
        self._materialize = materialize
        self._watch = watch
        self._model = model
        if model is not None or self._map.has_places:
            check_model(model, self._rules)
        self._modules: Modules | None = None
        self._parameters: Parameters | None = None  # the parameters that keys name
        self._views: dict[RuleSet, View] = {}
        self._keep = () if keep == () else tuple(map(as_called, check_keep(keep, self._rules)))
        self._bindings: dict[str, Binding] = {}
        self._untouched = Untouched()  # (`_open` sets a new one for each run of the scope)
        self._mode: Mode | None = None
        self._here: Mode | None = None  # the same mode; still set after the exit, for `places`
        self._ruleset: RuleSet | None = None
        self._jumps: dict[str, str] = {}  # comparisons and casts by line, recorded for step rules
        self._compiled: set[str] = set()  # op types with rules in compiled programs that ran
        self._token: Token[tuple[gradient_override_map, ...]] | None = None
        self._thread = 0  # the thread of the block
        self._left = False
        self._warn_unless_entered()

    def _steps(self) -> Generator[Any]:
        self._note_entry()
        outer = open_here()
        around = outer[-1]._ruleset if outer else None
        modules = Modules(self._model) if self._map.has_places else None
        same = self._map.identity, self._keep
        held, once = self._map.parameters, self._order == 1
        parameters = Parameters(held, self._model, self._marked, once) if held else None
        rules = self._map.rules
        ruleset = rule_set(rules, *same, around, modules, self._order, parameters is not None)
        if modules is not None:
            ruleset.plan.check_whole(modules)
        try:
            self._open(ruleset, outer, modules, parameters)
            yield self
            while not self._leave():
                yield Refusal()
        except GeneratorExit:
            warn_of_open_scope(self._name, self._opener)
            raise
        finally:  # a signal arrived before the `yield`, or the block was never exited
            if self._mode is not None and not self._left and not self._leave():
                self._cut_off()
        self._warn_unless_hit()
        if self._modules is not None or self._parameters is not None:
            self._warn_unless_all_ran()

    def _unmatched(self) -> list[Binding]:
        return [b for b in super()._unmatched() if b.op_type not in self._compiled]

    def _warn_unless_all_ran(self) -> None:
        """Warn about modules that keys name and that never ran, unless the block raises."""
        if (idle := self._idle_modules()) and not self._failed:
            self._tell(f"{self._name}: {'; '.join(idle)}", self._level)

    def _idle_modules(self, *keys: Any) -> list[str]:
        found: list[str] = []
        for key, binding in self._bindings.items():
            if not isinstance(key, at) or not (key in keys if keys else not binding.optional):
                continue
            if self._parameters is not None and key in self._parameters.rules:
                found += self._parameters.idle(key)
            elif self._modules is not None and (idle := self._modules.idle(key)):
                more = f" and {len(idle) - 5} more" if len(idle) > 5 else ""
                found.append(
                    f"{key!r} names {', '.join(map(repr, idle[:5]))}{more}, which never ran "
                    "although the module around it did (does the program call its `forward` "
                    "directly, or use its parameters without it?)"
                )
        return found

    def _hint(self) -> str:
        if any(self._others()):
            return "the ops that did run: used.untouched()."
        return (
            "the library of the model: no torch function with a gradient ran. For regrad's "
            "functions use rg.gradient_override_map, for JAX programs rg.jax.override."
        )

    def _instead(self, binding: Binding) -> str:
        counts = self._untouched.counts
        if self._parameters is not None and (text := self._parameters.unread(binding.op_type)):
            return text
        if binding.op_type == KEY and (found := [k for k in counts if k[0].endswith(NOT_CAST)]):
            ran = ", ".join(f"{k[0].removesuffix(NOT_CAST)} at {k[1]}" for k in found[:3])
            return (
                f"{binding.shown} never ran; {ran} did, without a cast of the booleans. Cast the "
                "booleans before anything else reads them, as in (v > a).float(), or select one of "
                "two numbers, as in torch.where(v > a, 1.0, 0.0)"
            )
        if not self._jumps or not any(step in binding.op_type for step in STEPS):
            return super()._instead(binding)
        ran = ", ".join(f"{name} at {where}" for where, name in [*self._jumps.items()][:3])
        return (
            f"{binding.shown} never ran; {ran} did, on a tensor that requires a gradient, and the "
            "gradient ends there. Call torch.heaviside (key 'Step'), torch.sign or torch.round, or "
            f"give the rule for {KEY!r}, which covers a comparison that is cast"
        )

    def _open(
        self, ruleset: RuleSet, outer: tuple[Any, ...], modules: Modules | None, parameters: Any
    ) -> None:
        if not HOST.is_tested:
            check_promises()
        if OVERRIDES.losses:
            OVERRIDES.require()
        # torch's stack of modes, regrad's stack and the replaced functions change together
        with Deferred():
            self._ruleset = ruleset
            self._bindings = {key: _bind(key, name) for key, name in ruleset.plan.names.items()}
            if parameters is not None:
                every = parameters.rules.items()
                self._bindings |= {key: _bind(key, rule.name) for key, rule in every}
                parameters.bindings = self._bindings
            self._parameters = parameters
            for key, replaces in ruleset.plan.replaces.items():
                self._bindings[key].replaces = replaces
            for key in self._marked:  # (a callable may stand for an op type)
                name = key if key in self._bindings else self._key_of(key)
                self._bindings[name].marked = True
            self._untouched = Untouched()
            self._compiled, self._jumps = set(), {}
            mode = ruleset.mode(self)
            if outer != SCOPES.get():
                SCOPES.set(outer)
            intercepts.drop_closed()
            intercepts.install(modules is not None, parameters is not None)
            jobs.SCOPES[id(mode)] = None
            jobs.settle()
            push_mode(mode)
            if ruleset.plan.functions:
                functions.install(ruleset.plan.functions)
            if modules is not None:
                modules.plan = ruleset.plan
            self._modules, self._views = modules, {}
            self._mode = self._here = mode
            self._thread = get_ident()
            if self._watch or parameters is not None:
                WATCHING.append(self)
            here = (*outer, self)
            if modules is not None or type(outer) is Spot:
                here = stand(here, outer)
            self._token = SCOPES.set(here)
            if modules is not None:
                COUNTS.set({**COUNTS.get(), self: Counts()})

    def _leave(self) -> bool:
        """Close the scope; return False and change nothing in another thread or context."""
        if get_ident() != self._thread:
            return False
        with Deferred():
            found = SCOPES.get()
            try:
                SCOPES.reset(self._token)  # pyright: ignore[reportArgumentType] (it is open)
            except ValueError:
                return False
            if not found or found[-1]._root is not self:
                self._token = SCOPES.set(found)
                self._left = True  # closes when the scope that is open inside it closes
                raise left_out_of_turn()
            self._close(found)
            while (around := SCOPES.get()) and around[-1]._left:
                SCOPES.reset(around[-1]._token)
                around[-1]._close(around)
        return True

    def _fresh(self, rules: Any) -> gradient_override_map:
        options = {"keep": self._keep, "model": self._model}
        options |= {"values": self._values, "materialize": self._materialize, "watch": self._watch}
        return gradient_override_map(rules, **options, order=self._order)

    def _collect(self, scope: Any) -> None:
        super()._collect(scope)
        self._ruleset = scope._ruleset
        scope._untouched = self._untouched
        scope._mode.counts = self._untouched.counts
        if scope._modules is not None:
            self._modules = self._modules or scope._modules
            scope._modules.ran = self._modules.ran  # pyright: ignore[reportOptionalMemberAccess]
        scope._compiled, scope._jumps = self._compiled, self._jumps

    def _close(self, scopes: tuple[Any, ...]) -> None:
        """Close the innermost of the scopes."""
        mode = self._mode
        self._mode = self._token = None
        self._left = False
        assert mode is not None
        intercepts.take_off(scopes[-1]._here)
        if type(scopes) is Spot:  # (a checkpoint may later move from this Spot again)
            COUNTS.set({root: held for root, held in COUNTS.get().items() if root is not self})
        else:
            self._here = None
        self._remove(mode)

    def _cut_off(self) -> None:
        """Close a scope that its thread can no longer exit; that thread's stacks stay as is."""
        mode = self._mode
        assert mode is not None
        self._mode = self._token = mode.scope = self._ruleset = None
        self._remove(mode)

    def _remove(self, mode: Mode) -> None:
        if self._parameters is not None:
            self._parameters.close()
        if self in WATCHING:
            WATCHING.remove(self)
        del jobs.SCOPES[id(mode)]
        jobs.settle()
        intercepts.remove()
        if mode.ruleset.plan.functions:
            functions.remove(mode.ruleset.plan.functions)

    def untouched(self, only: Any = None) -> Table:
        """Return the differentiable ops that ran in the scope and kept their own gradient.

        Args:
            only: An op type, a torch callable, or a tuple of them: list only these ops, and the
                callables that compute one of them among others. By default list all.

        Returns:
            A table of ops (or torch callables) and numbers of calls, with source lines and modules
            if the scope was opened with `watch=True`. The table has no rows if the rules cover
            every op: `assert not used.untouched(only="MatMul").rows`.
        """
        if only is None:
            return self._untouched.table()
        return self._untouched.table(family_of(each).type for each in entries(only))

    def assert_fired(self, *op_types: Any, group: Any = None) -> None:
        """Raise NotFiredError unless the rule of each of these op types (by default all) ran.

        Args:
            op_types: Op types, or torch callables that are keys.
            group: A group of processes of `torch.distributed`, all of which have to call this
                method. Each rule has to have run in each process. Otherwise all processes raise the
                same error, which names the ranks where a rule did not run. By default the method
                checks only this process.
        """
        if group is None:
            return super().assert_fired(*op_types)
        why = None
        try:
            super().assert_fired(*op_types)
        except NotFiredError as error:
            why = str(error)
        answers = gather_from(group, why)
        lines = [f"rank {n}: {text}" for n, text in answers.items() if text]
        if lines:
            raise NotFiredError("\n".join(lines))
        return None

    def gather(self, group: Any = None) -> Table:
        """Return the table of hits of all processes of a group, with the rank of each row.

        All processes of the group (by default, all processes) have to call this method.
        """
        own = self.table()
        rows = gather_from(group, own.rows).items()
        return Table(("rank", *own.headings), [(str(n), *row) for n, part in rows for row in part])

    @property
    def _root(self) -> gradient_override_map:
        """The scope itself; modules use views of it (see `places`)."""
        return self

    def _key_of(self, op_type: Any) -> Any:
        return op_type if isinstance(op_type, at) else family_of(op_type).type

    def _why_not(self, binding: Binding) -> str:
        if not binding.hits and binding.op_type in self._compiled:
            return (
                "no op of that type ran in Python. A program of torch.compile contains the rule, "
                "and regrad does not count its runs: call assert_fired() in the scope in which the "
                "program was compiled, or run the model once without compiling it"
            )
        return super()._why_not(binding)


class _Map(NamedTuple):
    """A validated map of rules: without marks, and without nested maps.

    Args:
        rules: The rules, by key.
        marked: The keys that may match nothing.
        has_places: Whether keys name places, or rules have a parameter `site`.
        identity: A value that all maps with the same meaning share.
        parameters: The rules for parameters, by key.
    """

    rules: dict[Any, Any]
    marked: list[Any]
    has_places: bool
    identity: Any
    parameters: dict[at, Any]


_PLAIN = {FunctionType, str}
# Whether a map of plain functions and names has places. A loop opens such a map repeatedly. The key
# is the map's identity, so its objects must not be freed; the value holds references to them.
_HAVE_PLACES: dict[Any, tuple[bool, Any]] = {}


def _checked(rules: Mapping[Any, Any], values: bool, order: int | None) -> _Map:
    """Return the validated form of a map; raise for an invalid map."""
    key = None
    bare = {k: rule.rule if type(rule) is Optional else rule for k, rule in rules.items()}
    if _PLAIN.issuperset(map(type, bare.values())):
        identity = identity_of_map(bare)
        key = identity, order  # (`values` does not affect plain rules)
        if (found := _HAVE_PLACES.get(key)) is not None:
            marked = [k for k, rule in rules.items() if type(rule) is Optional]
            return _Map(bare, marked, found[0], identity, {})
    bare, marked = unmarked(_spread(rules))
    parameters: dict[at, Any] = {}
    if any(isinstance(key, at) for key in bare):
        bare, parameters = split(bare)
    check_values(bare, values, order, "gradient_override_map(rules, values=True)")
    asked = any(asks_site(rule, None) for rule in bare.values())
    places = asked or any(isinstance(key, at) for key in bare)
    if key is not None and bare.keys() == rules.keys():  # (no key is for parameters)
        if len(_HAVE_PLACES) >= KEPT:
            _HAVE_PLACES.clear()
        held = [(rule, getattr(rule, "__code__", None)) for rule in bare.values()]
        _HAVE_PLACES[key] = places, held
    return _Map(bare, marked, places, identity_of_map(bare), parameters)


def _wrong_flag(**flags: Any) -> ArgumentError:
    name, flag = next(each for each in flags.items() if type(each[1]) is not bool)
    return ArgumentError(f"gradient_override_map: {name} is True or False, got {kind(flag)}")


def _bind(key: Any, name: str) -> Binding:
    return Binding(str(key), name, key if isinstance(key, at) else None)


def _spread(rules: Mapping[Any, Any]) -> dict[Any, Any]:
    return spread(refuse_none(rules), _is_module_class)


def _is_module_class(what: Any) -> bool:
    return isinstance(what, type) and issubclass(what, torch.nn.Module)


def gather_from(group: Any, value: Any) -> dict[int, Any]:
    """Return this value of every process in a group of torch.distributed, by rank."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    found: list[Any] = [None] * len(ranks)
    dist.all_gather_object(found, value, group=group)
    return dict(zip(ranks, found, strict=True))


def check_keep(keep: Any, rules: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return the callables and keys to keep; raise for anything else."""
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise ArgumentError(
            f"keep expected a list of torch callables, as in keep=[torch.kron], got {keep!r:.80}"
        )
    kept = tuple(keep)
    kept = tuple([k for e in kept for k in (_spread({e: e}) if isinstance(e, at) else [e])])
    for each in kept:
        if isinstance(each, at):
            if each.what is not None or each not in rules:
                raise ArgumentError(f"keep: {each!r} is not a key of the map for whole calls")
            continue
        is_module = isinstance(each, torch.nn.Module) or _is_module_class(each)
        if is_module or not callable(each):
            raise ArgumentError(
                f"keep expected torch callables or autograd.Functions, got {each!r:.80}"
                + (". Give the function that the module calls." if is_module else "")
            )
    return kept
