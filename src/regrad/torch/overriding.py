"""`gradient_override_map` for PyTorch: rules put in force around code that nobody edits."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Self

import torch
import torch.overrides
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from regrad.errors import (
    ArgumentError,
    RuleError,
    UnknownOpError,
    UnusedOverrideWarning,
    near,
)
from regrad.foreign import ForeignRule
from regrad.interrupts import Deferred
from regrad.registry import Input, Op, find_op
from regrad.reports import Hit, Table, Untouched
from regrad.scopes import Scope
from regrad.torch import compiled_code, functions, intercepts
from regrad.torch.apart import apart, put
from regrad.torch.arguments import fill, refuse_layout, refuse_unknown
from regrad.torch.below import as_called
from regrad.torch.bridge import allow_in_graph
from regrad.torch.calls import Call
from regrad.torch.composites import Fused, ask_when_compiled, fused, is_other_op
from regrad.torch.enclosing import deciding, is_built_in, refuse_to_be_written, within
from regrad.torch.nodes import Watch, caller, gradients, sequence_nr, tensors
from regrad.torch.opened import CHECKS, ONE_CALL, bodies
from regrad.torch.optypes import (
    PLACES,
    Family,
    Spelling,
    alone,
    custom_op,
    families,
    find_family,
    spellings,
    spellings_of,
)
from regrad.torch.subclasses import as_given, has_own_protocol

SCOPES: ContextVar[tuple[gradient_override_map, ...]] = ContextVar("regrad_torch", default=())
KEPT = 16  # so many different sets of rules are remembered, so that compiled code serves again


class Binding:
    """One entry of a map, in one scope: its rule, and its hits by source line."""

    def __init__(self, rule: ForeignRule) -> None:
        self.rule = rule
        self.by_line: dict[str, Hit] = {}

    @property
    def hits(self) -> list[Hit]:
        return [hit for hit in self.by_line.values() if hit.count or hit.ran]

    def hit(self, op_type: str, shape: Any) -> Hit:
        """One more op is bound, where its caller stands."""
        place = compiled_code.PLACE.get()
        where = caller() if place is None else place.where
        hit = self.by_line.get(where)
        if hit is None:
            hit = self.by_line.setdefault(where, Hit(op_type, self.rule.name, where))
        if place is None:
            hit.seen(shape)
        else:  # which counts it, when it is known that the program will be run
            place.meets(hit, shape)
        return hit


class gradient_override_map(Scope):
    """Within the scope, torch functions are differentiated by the given rules.

    Args:
        rules: `{key: rule}`. A key is an op type (`"Relu"`, `"Softmax"`; it covers every
            spelling that torch has: functions, methods, operators, in-place variants; the docs
            have the table) or a torch callable; one that belongs to an op type stands for all of
            it. A rule is a function, a name given to `regrad.RegisterGradient`, or an op type
            whose own rule is to be used. Functions may be written with regrad's functions or with
            torch's, in the native form `(dy, x, …)` or in TensorFlow's `(op, grad, …)`.
        keep: torch callables, and subclasses of `torch.autograd.Function`, that are to keep their
            own gradient although they compute an overridden op inside.

    It works around any code that runs PyTorch: nobody's model is edited. An op is bound when it
    runs forward; its rule holds wherever and whenever it is differentiated. Callables that compute
    an overridden op among others (`scaled_dot_product_attention`, `cross_entropy`, `LSTM`) are
    taken apart, with torch's own values, or refused. Threads started in the scope, and
    `torch.utils.checkpoint`, run under it as well. See `docs/foreign.md` for what is refused.

    The object bound by `as` tells what happened: `hits`, `table()`, `untouched()` and
    `assert_fired()`. Under `torch.compile` the hits are those of the tracing. As a decorator it
    opens a scope of its own for each call of the function, and tells the hits of all calls.

    Raises:
        UnknownOpError: a key or a rule name does not exist, or torch has no such op.
        RuleError: a rule asks for a name that the op does not have.
        PassedOverError: an op would keep its own gradient all the same (in the scope).

    Source: `tf.Graph.gradient_override_map` of TensorFlow 1; the hook is `TorchFunctionMode`.

    >>> import torch
    >>> import regrad as rg
    >>> import regrad.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(inplace=True))
    >>> x = torch.ones(1, 2, requires_grad=True)
    >>> with regrad.torch.gradient_override_map({"Relu": rg.rules.guided_relu}) as used:
    ...     model(x).sum().backward()
    >>> used.assert_fired()
    """

    def __init__(
        self,
        rules: Mapping[Any, str | Callable[..., Any]],
        *,
        keep: Iterable[Any] = (),
    ) -> None:
        if not isinstance(rules, Mapping):
            raise ArgumentError(
                "gradient_override_map takes a dict of op types (or torch callables) to rules, as "
                f"in gradient_override_map({{'Relu': rule}}), got {rules!r:.60}"
            )
        self._rules = dict(rules)
        self._keep = tuple(map(as_called, keep))
        self._bindings: dict[str, Binding] = {}
        self._untouched = Untouched()
        self._mode: Mode | None = None
        self._ruleset: RuleSet | None = None
        self._compiled: set[str] = set()  # the op types whose rules ran programs have built in
        self._token: Token[tuple[gradient_override_map, ...]] | None = None
        self._left = False

    def _steps(self) -> Generator[Self]:
        outer = SCOPES.get()
        ruleset = rule_set(self._rules, self._keep, outer[-1]._ruleset if outer else None)
        try:
            self._open(ruleset)
            yield self
        finally:
            try:
                if self._mode is not None:
                    self._leave()
            finally:  # a signal came before that began
                if self._mode is not None and not self._left:
                    self._leave()
        if self._rules and not self._failed and not self.hits and not self._compiled:
            keys = ", ".join(map(repr, self._bindings))
            warnings.warn(
                f"gradient_override_map matched nothing: no op of type {keys} ran in the scope. "
                "An override binds ops when they run forward, so call the model inside the scope; "
                "and look at what did run: used.untouched() (Relu6 is not Relu).",
                UnusedOverrideWarning,
                stacklevel=self._level,
            )

    def _open(self, ruleset: RuleSet) -> None:
        with Deferred():  # torch's stack of modes, ours, and what is replaced in torch go together
            self._ruleset = ruleset
            self._bindings = {key: Binding(rule) for key, rule in ruleset.rules.items()}
            self._untouched = Untouched()
            self._compiled = set()
            mode = ruleset.mode(self)
            intercepts.drop_closed()
            mode.__enter__()
            functions.install(ruleset.functions, called_here)
            self._mode = mode
            self._token = SCOPES.set((*SCOPES.get(), self))
            intercepts.install()

    def _leave(self) -> None:
        with Deferred():
            if SCOPES.get()[-1:] != (self,):
                self._left = True  # closed with the scope that is open inside it
                raise ArgumentError(
                    "a gradient_override_map scope was left out of turn: scopes must nest, in one "
                    "thread and task. Do not hold one open across a yield; open it where it is "
                    "used."
                )
            self._close()
            while (around := SCOPES.get()) and around[-1]._left:
                around[-1]._close()

    def _fresh(self, rules: Any) -> gradient_override_map:
        return gradient_override_map(rules, keep=self._keep)

    def _collect(self, scope: Any) -> None:
        super()._collect(scope)
        self._ruleset = scope._ruleset
        scope._untouched = self._untouched
        scope._compiled = self._compiled

    def _close(self) -> None:
        mode, token = self._mode, self._token
        self._mode = self._token = None
        self._left = False
        assert mode is not None and token is not None
        SCOPES.reset(token)
        intercepts.take_off(mode)
        intercepts.remove()
        functions.remove(mode.ruleset.functions)

    def untouched(self) -> Table:
        """The differentiable ops that ran in the scope and kept their own gradient.

        A table of op (or torch callable), calls and source line.
        """
        return self._untouched.table()

    def _key_of(self, op_type: Any) -> str:
        return family_of(op_type).type

    def _why_not(self, binding: Any) -> str:
        if not binding.hits and binding.rule.op.type in self._compiled:
            return (
                "no op of that type ran in Python. The rule is built into a program of "
                "torch.compile, whose runs are not seen: ask in the scope in which it was "
                "compiled, or run the model once without compiling it"
            )
        return super()._why_not(binding)


# -- sets of rules --------------------------------------------------------------------------------


class RuleSet:
    """Rules by key, and the class of mode that carries them.

    torch.compile guards on the *class* of an open mode, so every set of rules has a class of its
    own, and equal sets share one. The mode of an inner scope is asked first, so it takes apart and
    opens for the scopes around it as well, and leaves to them the callables that they have rules
    for.
    """

    def __init__(
        self, rules: Mapping[Any, Any], keep: tuple[Any, ...], outer: RuleSet | None = None
    ) -> None:
        self.functions = {key: family_of(key).type for key in rules if functions.is_function(key)}
        self.keep = (*keep, *self.functions)  # whose own forward passes are left alone
        self.outer = outer
        ask_when_compiled()
        self.rules: dict[str, ForeignRule] = {}
        spelled: dict[Any, Spelling] = {}
        for key, value in rules.items():
            family = family_of(key)
            if family.type in self.rules:
                raise ArgumentError(f"two keys of the map mean {family.type!r}; give one")
            refuse_layout(value, family.type)
            named = bool(family.parameters)
            self.rules[family.type] = (ForeignRule if named else RuleByCount)(value, family.op)
            spelled.update(spellings_of(family))
            if op := custom_op(key):
                spelled.update(dict.fromkeys((op, op._overloadpacket), Spelling(family, op)))
        self.watch = Watch(self.rules)
        self.left = {*keep, *gradients()}  # whose nodes are not looked at
        self.alone = {f for f, s in spelled.items() if not s.family.parameters}
        self.calls = {f: _overridden(self, f, s) for f, s in spelled.items() if f not in keep}
        found = [(f, rows) for f, all in fused().items() if (rows := self._concerned(f, all))]
        self.parts = {f: [(row.when, apart(self, f, row)) for row in rows] for f, rows in found}
        self.bodies = {f: b for f, b in bodies().items() if not self._is_left(f)}
        self.traced = {f: b for f, b in self.bodies.items() if compiled_code.is_traceable(f)}
        divides = any("RealDiv" in each.rules for each in self.around())
        self.mode = type("Mode", (Mode,), {
            "ruleset": self, "ways": Ways(self), "calls": self.calls, "parts": self.parts,
            "traced": self.traced, "divides": divides,
        })  # fmt: skip

    def around(self) -> Iterator[RuleSet]:
        """These rules, and those of the scopes around."""
        ruleset: RuleSet | None = self
        while ruleset is not None:
            yield ruleset
            ruleset = ruleset.outer

    def _concerned(self, function: Any, rows: Sequence[Fused]) -> list[Fused]:
        """The rows by which a callable is to be taken apart: not if it has a rule of its own."""
        sets = [each for each in self.around() if function not in each.keep]
        types = {op_type for each in sets for op_type in each.rules}
        own = {_type_of(function)} & types
        if any(function in each.alone for each in sets):
            return []
        found = [row for row in rows if row.contains & (own or types)]
        return [row for row in found if not row.lent or self._lends(*row.contains)]

    def _lends(self, op_type: str) -> bool:
        """Whether the innermost rule for an op type is one of regrad's own."""
        rules = (each.rules[op_type] for each in self.around() if op_type in each.rules)
        return next(rules).takes_all

    def op(self, function: Any) -> Callable[..., Any]:
        """The callable under the innermost rule for it, or as it is."""
        call = next((s.calls[function] for s in self.around() if function in s.calls), function)
        rows = self.parts.get(function, ())
        if not rows:
            return call
        return lambda *args, **options: next(
            (run for when, run in rows if when is None or when(*args, **options)), call
        )(*args, **options)

    def met(self, types: frozenset[str], xs: Sequence[torch.Tensor]) -> None:
        """Ops of these types ran inside a callable that needs no gradient."""
        for op_type in types:
            each = next((s for s in self.around() if op_type in s.rules), None)
            scope = None if each is None else _scope_of(each)
            if each is not None and not is_built_in(op_type, each.keep) and scope is not None:
                shape = () if xs[0].is_nested else tuple(xs[0].shape)
                scope._bindings[op_type].hit(op_type, shape)

    def _is_left(self, function: Any) -> bool:
        """Whether a callable is not to be opened: somebody has a rule for it, or keeps it."""
        return any(function in each.calls or function in each.keep for each in self.around())


def _type_of(function: Any) -> str | None:
    spelling = spellings().get(function)
    return None if spelling is None else spelling.family.type


class RuleByCount(ForeignRule):
    """A rule for a torch callable that is no op type of regrad's.

    Its tensors are called x, or a and b; or xs, a list, however many there are.
    """

    def __init__(self, value: Any, op: Op) -> None:
        self.value = value
        self.by_count: dict[int, ForeignRule] = {}
        errors: list[RuleError] = []
        for count in (1, 2, 3):
            try:
                super().__init__(value, _op_of(op.type, count))
                return
            except RuleError as error:
                errors.append(error)
        raise errors[0]

    def taking(self, count: int) -> ForeignRule:
        if count not in self.by_count:
            try:
                rule = ForeignRule(self.value, _op_of(self.op.type, count))
            except RuleError:  # it asks for xs
                rule = ForeignRule(self.value, _op_of(self.op.type, 3))
            self.by_count[count] = rule
        return self.by_count[count]


def _op_of(name: str, count: int) -> Op:
    """An op of so many tensors."""
    names = {1: ["x"], 2: ["a", "b"]}.get(count)
    inputs = [Input(n, "one") for n in names] if names else [Input("xs", "many")]
    return Op(name, name, lambda xp, *xs: xs, inputs)


_SETS: OrderedDict[Any, RuleSet] = OrderedDict()
_LOCK = threading.Lock()


def rule_set(
    rules: Mapping[Any, Any], keep: tuple[Any, ...], outer: RuleSet | None = None
) -> RuleSet:
    """The set of these rules, made once for all scopes with the same ones."""
    try:
        key = (frozenset(rules.items()), keep, outer)
    except TypeError:
        return RuleSet(rules, keep, outer)
    with _LOCK:
        if key not in _SETS:
            _SETS[key] = RuleSet(rules, keep, outer)
            if len(_SETS) > KEPT:
                _SETS.popitem(last=False)
        _SETS.move_to_end(key)
        return _SETS[key]


def family_of(key: Any) -> Family:
    """What a key of a map covers."""
    if isinstance(key, str):
        family = find_family(key)
        if family is None:
            op = find_op(key)  # raises for what regrad does not know either
            raise UnknownOpError(
                f"no torch callable is known for the op type {op.type!r}."
                f"{near(op.type, families())} Give the torch callable itself as the key."
            )
        return family
    if functions.is_function(key) or custom_op(key):
        return alone(custom_op(key) or key)
    if isinstance(key, type) or not callable(key):
        raise ArgumentError(
            f"a key is an op type such as 'Relu', a torch callable such as torch.relu, or a "
            f"torch.autograd.Function; got {key!r:.80}. For a module class, give the function that "
            "it calls."
        )
    if key in spellings():
        return spellings()[key].family
    if not is_seen(key):
        raise UnknownOpError(
            f"{key!r:.80} is no callable that torch lets anybody see when it runs, so a rule for "
            "it would be passed over. Give a function of torch, torch.Tensor or "
            "torch.nn.functional; change your own function with regrad.torch.custom_grad."
        )
    return alone(key)


# -- the mode ------------------------------------------------------------------------------------


def is_seen(function: Any) -> bool:
    """Whether torch asks a mode before it runs this function."""
    if function in torch.overrides.get_testing_overrides():
        return True
    code = getattr(function, "__code__", None)
    if code is not None:
        return not CHECKS.isdisjoint(code.co_names)
    name = getattr(function, "__name__", "")
    return any(getattr(place, name, None) is function for place in PLACES)


# `2 - x` and the like. torch.compile cannot look their functions up (it takes their wrappers for
# other functions than those that it guards on), so there they are known by name.
REFLECTED: dict[str, Callable[[Any, Any, bool], Any]] = {
    "__rsub__": lambda x, a, _: torch.rsub(x, a),
    "__rdiv__": lambda x, a, divides: (
        torch.div(torch.full_like(x, a), x) if divides else x.reciprocal() * a
    ),
    "__rpow__": lambda x, a, _: torch.pow(a, x),
    "__rmod__": lambda x, a, _: torch.remainder(a, x),
    "__rmatmul__": lambda x, a, _: torch.matmul(a, x),
}


class Mode(torch.overrides.TorchFunctionMode):
    """What torch asks before each of its functions, in one scope."""

    ruleset: RuleSet
    ways: Mapping[Any, Way]
    calls: Mapping[Any, Callable[..., Any]]
    parts: Mapping[Any, Sequence[tuple[Any, Any]]]  # when, and what runs then
    traced: Mapping[Any, Callable[..., Any]]  # the bodies that torch.compile can look into
    divides: bool  # whether there is a rule for RealDiv here or around

    def __init__(self, scope: gradient_override_map) -> None:
        super().__init__()
        self.scope = scope

    @property
    def is_closed(self) -> bool:
        """Whether the scope was left."""
        return self.scope._mode is None

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if is_dynamo_compiling():
            return self._traced(func, args, kwargs or {})
        options = kwargs or {}
        if self.scope not in SCOPES.get():  # another task of this thread runs
            return func(*args, **options)
        if types and types != _PLAIN and torch._C._is_torch_function_enabled():
            for kind in filter(has_own_protocol, types):  # which runs the function, and asks again
                with self:
                    return kind.__torch_function__(func, types, args, options)
        return self.ways[func](self, func, args, options)

    def _traced(self, func: Any, args: Sequence[Any], options: Any) -> Any:
        """Run a function while torch.compile traces, which looks at nodes itself."""
        if type(func) is _Getter and func not in self.parts:
            return func(*args, **options)
        if getattr(func, "__name__", "") in REFLECTED:
            with self:
                return REFLECTED[func.__name__](args[0], args[1], self.divides)
        for when, parts in self.parts.get(func, ()):
            if when is None or when(*args, **options):
                if parts.refused:  # which `compiled_code` then sees
                    return func(*args, **options)
                return parts(*args, **options)
        if func in self.calls:
            return self.calls[func](*args, **options)
        if func in self.traced:
            with self:
                return self.traced[func](*args, **options)
        return func(*args, **options)

    def refuse_fused(self, func: Any, args: Sequence[Any], options: Any) -> None:
        """Refuse a call that cannot be taken apart, and would have to be."""
        for when, parts in self.parts.get(func, ()):
            if when is None or when(*args, **options):
                if parts.refused:
                    parts(*args, **options)
                return


# The ways to run a torch function in a scope, outside of torch.compile.
Way = Callable[[Mode, Any, Sequence[Any], Any], Any]


class Ways(dict[Any, Way]):
    """The way of each torch function under a set of rules, found when it is first called."""

    def __init__(self, ruleset: RuleSet) -> None:
        super().__init__()
        self.ruleset = ruleset

    def __missing__(self, func: Any) -> Way:
        way = self[func] = self._way(func)
        return way

    def _way(self, func: Any) -> Way:
        if func in self.ruleset.parts:
            return _parted(self.ruleset.parts[func], self._way_as_a_whole(func))
        return _as_it_is if type(func) is _Getter else self._way_as_a_whole(func)  # x.shape, x.grad

    def _way_as_a_whole(self, func: Any) -> Way:
        rules = self.ruleset
        if func in rules.calls:
            call = rules.calls[func]
            return lambda mode, func, args, options: call(*args, **options)
        if func in rules.bodies and func not in ONE_CALL:
            return _opened
        if func in rules.keep:
            return _as_it_is
        if isinstance(func, torch._ops.OpOverload) or func in rules.left:
            return _decided
        return _watched


def _as_it_is(mode: Mode, func: Any, args: Sequence[Any], options: Any) -> Any:
    return func(*args, **options)


def _parted(rows: Sequence[tuple[Any, Any]], otherwise: Way) -> Way:
    """Return the way of a function that is taken apart, at least with some arguments."""

    def way(mode: Mode, func: Any, args: Sequence[Any], options: Any) -> Any:
        for when, parts in rows:
            if when is None or when(*args, **options):
                return parts(*args, **options)
        return otherwise(mode, func, args, options)

    return way


def _opened(mode: Mode, func: Any, args: Sequence[Any], options: Any) -> Any:
    with mode:
        return mode.ruleset.bodies[func](*args, **options)


def _watched(mode: Mode, func: Any, args: Sequence[Any], options: Any) -> Any:
    """Run a function that no rule covers, and look at what autograd wrote down."""
    if not is_grad_enabled():
        return _decided(mode, func, args, options)
    start = sequence_nr()
    result = func(*args, **options)
    if sequence_nr() != start:
        mode.ruleset.watch.look(func, start, result, mode.scope._untouched)
    return result


def _decided(mode: Mode, func: Any, args: Sequence[Any], options: Any) -> Any:
    """Run a function on whose gradient something else than autograd may decide."""
    ruleset, start = mode.ruleset, sequence_nr()
    result = within(deciding(func, ruleset.keep), ruleset.rules, func, args, options)
    if sequence_nr() != start and func not in ruleset.left:
        ruleset.watch.look(func, start, result, mode.scope._untouched)
    return result


def _overridden(ruleset: RuleSet, function: Any, spelling: Spelling) -> Callable[..., Any]:
    """What runs in place of one torch callable."""
    family, key = spelling.family, spelling.family.type

    def overridden(*args: Any, **options: Any) -> Any:
        scope = _scope_of(ruleset)
        if is_other_op(key, args, options) or not has_tensors(args, options):
            return function(*args, **options)
        refuse_to_be_written(key)
        with torch._C.DisableTorchFunction():
            if is_built_in(key, ruleset.keep):
                return function(*args, **options)
            changes, args, options = spelling.out_of_place(args, options)
            filled = fill(family, args, options)
            first = next((v for v in filled.values if isinstance(v, torch.Tensor)), None)
            shape = () if first is None else tuple(first.shape)
            if scope is not None:
                hit = scope._bindings[key].hit(key, shape)
            else:  # what torch.compile made in a scope runs its backward pass after it
                place = compiled_code.PLACE.get()
                hit = None if place is None else place.hits.get(key)

            def forward(*xs: torch.Tensor) -> torch.Tensor:
                given, named = filled.rebuilt(xs)
                return spelling.function(*given, **named)

            rule = ruleset.rules[key].taking(len(filled.values))
            if rule.takes_all:
                refuse_unknown(family, args, options)
            layout = None if rule.op.flat else filled.layout
            call = Call(rule, filled.values, layout, filled.attrs, forward, hit)
            xs = [v for v in filled.values if isinstance(v, torch.Tensor)]
            if not changes:
                return as_given(call(*xs), xs)
            target = xs[0]
            if call.kept[:1] == [0]:  # the rule wants x as it was
                xs[0] = target.clone()
            return put(target, call(*xs), function)

    overridden.ruleset, overridden.op_types = ruleset, frozenset({key})  # pyright: ignore
    return allow_in_graph(overridden)


def called_here(function: Any, args: Sequence[Any]) -> Call | None:
    """A call of an `autograd.Function` under the rule that is in force for it here."""
    for scope in reversed(SCOPES.get()):
        ruleset = scope._ruleset
        key = None if ruleset is None else ruleset.functions.get(function)
        if ruleset is None or key is None:
            continue
        xs = [x for x in args if isinstance(x, torch.Tensor)]
        rule = ruleset.rules[key].taking(len(xs))
        layout = None if rule.op.flat else (tuple(range(len(xs))),)
        hit = scope._bindings[key].hit(key, tuple(xs[0].shape))
        return Call(rule, xs, layout, {}, function.apply, hit)
    return None


def has_tensors(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether a call is of tensors (and not of what torch.fx traces with)."""
    if args and isinstance(args[0], torch.Tensor):
        return True
    return any(True for _ in tensors((args, options)))


def _scope_of(ruleset: RuleSet) -> gradient_override_map | None:
    for scope in reversed(SCOPES.get()):
        if scope._ruleset is ruleset:
            return scope
    return None


_Getter = type(torch.Tensor.shape.__get__)  # pyright: ignore
_PLAIN = (torch.Tensor,)
