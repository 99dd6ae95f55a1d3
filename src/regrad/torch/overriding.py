"""`gradient_override_map` for PyTorch: rules put in force around code that nobody edits."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from typing import Any, Self

import torch
import torch.overrides
from torch.utils.checkpoint import CheckpointFunction

from regrad.errors import (
    ArgumentError,
    PassedOverError,
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
from regrad.torch import intercepts
from regrad.torch.apart import apart, put
from regrad.torch.arguments import fill, refuse_layout, refuse_unknown
from regrad.torch.bridge import allow_in_graph
from regrad.torch.calls import Call
from regrad.torch.composites import Fused, ask_when_compiled, fused, is_other_op
from regrad.torch.nodes import Watch, tensors
from regrad.torch.opened import CHECKS, bodies
from regrad.torch.optypes import (
    PLACES,
    Family,
    Spelling,
    alone,
    families,
    find_family,
    spellings,
    spellings_of,
)

SCOPES: ContextVar[tuple[gradient_override_map, ...]] = ContextVar("regrad_torch", default=())
_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_GENERATED = "<eval_with_key>"  # what torch.compile writes
KEPT = 16  # so many different sets of rules are remembered, so that compiled code serves again


class Binding:
    """One entry of a map, in one scope: its rule, and its hits by source line."""

    def __init__(self, rule: ForeignRule) -> None:
        self.rule = rule
        self.by_line: dict[str, Hit] = {}

    @property
    def hits(self) -> list[Hit]:
        return list(self.by_line.values())

    def hit(self, op_type: str, shape: Any) -> Hit:
        """One more op is bound, where its caller stands."""
        where = caller()
        hit = self.by_line.get(where)
        if hit is None:
            hit = self.by_line.setdefault(where, Hit(op_type, self.rule.name, where))
        hit.seen(shape)
        return hit


def caller() -> str:
    """The line outside torch and regrad that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (_TORCH, _HERE, _GENERATED)
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


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
        self._keep = tuple(keep)
        self._bindings: dict[str, Binding] = {}
        self._untouched = Untouched()
        self._mode: Mode | None = None
        self._ruleset: RuleSet | None = None
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
        compiled = self._ruleset is not None and self._ruleset.compiled
        if self._rules and not self._failed and not self.hits and not compiled:
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
            mode = ruleset.mode(self)
            intercepts.drop_closed()
            mode.__enter__()
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

    def _close(self) -> None:
        mode, token = self._mode, self._token
        self._mode = self._token = None
        self._left = False
        assert mode is not None and token is not None
        SCOPES.reset(token)
        intercepts.take_off(mode)
        intercepts.remove()

    def untouched(self) -> Table:
        """The differentiable ops that ran in the scope and kept their own gradient.

        A table of op (or torch callable), calls and source line.
        """
        return self._untouched.table()

    def _key_of(self, op_type: Any) -> str:
        return family_of(op_type).type

    def _why_not(self, binding: Any) -> str:
        if not binding.hits and self._ruleset is not None and self._ruleset.compiled:
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
        self.keep = keep
        self.outer = outer
        ask_when_compiled()
        self.compiled = False  # whether torch.compile has built these rules into a program
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
        self.alone = {f for f, s in spelled.items() if not s.family.parameters}
        self.calls = {f: _overridden(self, f, s) for f, s in spelled.items() if f not in keep}
        found = [(f, rows) for f, all in fused().items() if (rows := self._concerned(f, all))]
        self.parts = {f: [(row.when, apart(self, f, row)) for row in rows] for f, rows in found}
        self.bodies = {f: b for f, b in bodies().items() if not self._is_left(f)}
        divides = any("RealDiv" in each.rules for each in self.around())
        self.mode = type("Mode", (Mode,), {
            "ruleset": self, "calls": self.calls, "parts": self.parts, "bodies": self.bodies,
            "divides": divides,
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
        pairs = sorted(((repr(k), k, v) for k, v in rules.items()), key=lambda t: t[0])
        key = (tuple(pairs), keep, outer)
        hash(key)
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
    if isinstance(key, type) or not callable(key):
        raise ArgumentError(
            f"a key is an op type such as 'Relu', or a torch callable such as torch.relu; got "
            f"{key!r:.80}. For a module class, give the function that it calls; a "
            "torch.autograd.Function has a backward pass of its own, which no override reaches."
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
    calls: Mapping[Any, Callable[..., Any]]
    parts: Mapping[Any, Sequence[tuple[Any, Callable[..., Any]]]]
    bodies: Mapping[Any, Callable[..., Any]]
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
        options = kwargs or {}
        if type(func) is _Getter and func not in self.parts:  # x.shape, x.grad, …
            return func(*args, **options)
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling and getattr(func, "__name__", "") in REFLECTED:
            with self:
                return REFLECTED[func.__name__](args[0], args[1], self.divides)
        if not compiling and self.scope not in SCOPES.get():  # another task of this thread runs
            return func(*args, **options)
        if func in self.parts:
            for when, parts in self.parts[func]:
                if when is None or when(*args, **options):
                    return parts(*args, **options)
        if func in self.calls:
            return self.calls[func](*args, **options)
        if func in self.bodies:
            with self:
                return self.bodies[func](*args, **options)
        if compiling:
            return func(*args, **options)
        return self._watched(func, args, options)

    def _watched(self, func: Any, args: Sequence[Any], options: Any) -> Any:
        if not torch.is_grad_enabled():
            return func(*args, **options)
        watch = Watch(self.ruleset.rules, args, options)
        result = func(*args, **options)
        if func not in self.ruleset.keep:
            watch.look(func, result, self.scope._untouched, caller)
        return result


def _overridden(ruleset: RuleSet, function: Any, spelling: Spelling) -> Callable[..., Any]:
    """What runs in place of one torch callable."""
    family, key = spelling.family, spelling.family.type

    def overridden(*args: Any, **options: Any) -> Any:
        scope = _scope_of(ruleset)
        if is_other_op(key, args, options) or not has_tensors(args, options):
            return function(*args, **options)
        with torch._C.DisableTorchFunction():
            if is_built_in(key, ruleset.keep):
                return function(*args, **options)
            changes, args, options = spelling.out_of_place(args, options)
            filled = fill(family, args, options)
            first = next((v for v in filled.values if isinstance(v, torch.Tensor)), None)
            shape = () if first is None else tuple(first.shape)
            hit = None if scope is None else scope._bindings[key].hit(key, shape)
            ruleset.compiled |= torch.compiler.is_compiling()

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

    return allow_in_graph(overridden)


def has_tensors(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether a call is of tensors (and not of what torch.fx traces with)."""
    return any(True for _ in tensors((args, options)))


PLAIN = (torch.Tensor, torch.nn.Parameter)


def as_given(y: Any, xs: Sequence[torch.Tensor]) -> Any:
    """A result in the subclass of Tensor that the arguments have, as torch has it."""
    kind = next((type(x) for x in xs if type(x) not in PLAIN), None)
    if kind is None or type(y) is not torch.Tensor:
        return y
    function = getattr(kind.__torch_function__, "__func__", None)
    if function is torch.Tensor.__torch_function__.__func__:
        return y.as_subclass(kind)
    if function is not None:
        raise PassedOverError(
            f"an overridden op was called with a {kind.__name__}, which decides in its own "
            "__torch_function__ what torch's functions do with it, so that the rule could not be "
            "put around that. Unwrap it, or leave it out of the scope."
        )
    return y


def _scope_of(ruleset: RuleSet) -> gradient_override_map | None:
    for scope in reversed(SCOPES.get()):
        if scope._ruleset is ruleset:
            return scope
    return None


_Getter = type(torch.Tensor.shape.__get__)  # pyright: ignore
_APPLY = torch.autograd.Function.apply.__func__.__code__  # pyright: ignore


def is_built_in(op_type: str, keep: Sequence[Any]) -> bool:
    """Whether an op runs in the forward pass of a Function that answers for its gradient.

    That is a program of torch.compile, which has the rule built in, or one that is to be kept.
    Any other `autograd.Function` has a backward pass of its own, and the rule would never run.
    """
    if torch.compiler.is_exporting():
        raise PassedOverError(
            "torch.export writes forward programs, which have no gradient: the rule for "
            f"{op_type!r} would be lost. Export outside the scope; torch.compile works in it."
        )
    function, args = _enclosing_function()
    if function is None or function is CheckpointFunction:
        return False
    if function in keep or function.__module__.startswith("torch._functorch._aot_autograd"):
        return True
    if any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        raise PassedOverError(
            f"{op_type} ran in the forward pass of {function.__module__}.{function.__qualname__}, "
            "a torch.autograd.Function whose own backward pass decides, so that the rule for "
            f"{op_type!r} would never run. Pass keep=[{function.__name__}] to leave it as it is."
        )
    return False


def _enclosing_function() -> tuple[Any, Sequence[Any]]:
    """The `autograd.Function` whose forward pass is running, and its arguments."""
    frame = None if torch.is_grad_enabled() else sys._getframe(3)
    while frame is not None:
        if frame.f_code is _APPLY:
            return frame.f_locals["cls"], frame.f_locals["args"]
        frame = frame.f_back
    return None, ()
