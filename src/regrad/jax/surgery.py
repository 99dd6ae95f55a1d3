"""Rules put into JAX programs, equation by equation.

The idea: JAX writes down what a function computes as a program (a jaxpr), before it differentiates,
batches or compiles it. So an override is a change of the program. With `{"Sign": rule}`

    let b = sign a                         let b = regrad_op[gradient=rule
        c = mul b a           becomes                        jaxpr={ sign }] a
        d = reduce_sum c                       c = mul b a
    in d                                       d = reduce_sum c
                                           in d

`regrad_op` is a primitive of our own (see `primitives`). It computes what the equation inside it
computes, and its derivative is the rule. From then on all is JAX's: `jax.grad` meets the primitive,
and `jax.vmap`, `jax.jit` and `jax.checkpoint` know it as any other.

A program holds programs (of `jit`, `scan`, `cond`, `custom_vjp`, …). They are gone through in the
same way, and there are four kinds of them: those that JAX differentiates as they are written
(`OPENED`), where a rule counts; functions with a derivative of their own (`CUSTOM`), which would
hide the rule; those that describe a scalar function (`SCALAR`), which are not differentiated; and
all others, about which we know nothing.

Invariants:

* A rule in force fires or raises. An op of a key that is found where its rule could not run (in the
  derivative of another function, in a body of an unknown kind, batched beyond recognition) is an
  error that names its line, unless the user has said `open` or `keep`.
* The values are those of the program that was given: only derivatives change.
* What no rule concerns stays the very object that it was. JAX finds what it has compiled by the
  identity of programs, so that a model is not compiled again for a rule in another part of it.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import jax
from jax.extend import core

from regrad.core.callers import PACKAGE
from regrad.core.foreign import ForeignRule, check_builtin, lender
from regrad.core.placed import asks_site
from regrad.core.places import Site, at
from regrad.core.registry import Op
from regrad.core.reports import Binding, Hit
from regrad.errors import GradientError, RuleError
from regrad.jax.boundaries import restore_calls
from regrad.jax.closed import (
    Closed,
    ClosedFunctionPolicy,
    batched_error,
    derived_error,
    hidden_error,
    name_and_place,
    name_of,
    of_jax,
)
from regrad.jax.gradients import CountedGradient, Equation, RuleGradient, ScaledGradient
from regrad.jax.host import OVERRIDES, programs, refuse
from regrad.jax.keys import FunctionKey, Key, NamedKey, WholeKey, key_for, make_op, same_thing
from regrad.jax.optypes import MatrixForm
from regrad.jax.primitives import EquationGradient, is_float, op_p, run_op
from regrad.jax.where import Around, Whereabouts

# Primitives whose bodies JAX differentiates as they are written: a rule inside counts.
OPENED = frozenset({
    "jit", "pjit", "closed_call", "eval_jaxpr", "core_call", "scan", "while", "cond",
    "remat", "remat2", "checkpoint", "shard_map", "custom_linear_solve", "regrad_vmap",
})  # fmt: skip
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
# Their bodies only say what is done with two scalars, and are not differentiated.
SCALAR = frozenset({
    "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-min",
    "scatter_min", "scatter-max", "scatter_max", "scatter-sub", "scatter_sub",
})  # fmt: skip


class Context(NamedTuple):
    """The place of an equation in a program: in a vmap, in a derivative, in a custom function.

    In a vmap that was kept (see `vmaps`), equations stand as they were written. The body of a
    function with a derivative of its own is there undifferentiated (`whole`). In one that is left
    closed, ops are only looked for; it may have its gradient of us (`ours`). In the transpose of a
    map (`turned`), which JAX has made, derived ops are none of the user's.

    The first of these that holds decides on an op of a key (see `under_rule`):

        turned and derived    nothing: the equation stays
        derived               an error; with JAX's own derivative as the rule, the equation stays
        closed                a hit, and the equation stays; whoever looks in here decides the rest
        JAX's own derivative  a hit, and behind the equation a note that counts its gradients
        batched               an error
        none of them          a hit, and a `regrad_op` in the equation's place
    """

    where: Around | None = None  # scopes and functions around, if a key asks for a place
    batched: bool = False  # the name stack here, or around, has "vmap" in it
    derived: bool = False  # … or "jvp" or "transpose": JAX has differentiated this already
    whole: bool = False
    closed: bool = False  # (and so is all inside, wherever it stands)
    ours: bool = False  # so a function out of sight may stay: a rule covers it
    turned: bool = False

    def inside(self, eqn: core.JaxprEqn, where: Around | None = None) -> Context:
        """Return the place of what an equation holds; its transforms are in its name stack."""
        if self.closed:
            return self._replace(where=where)
        names = programs.transforms(eqn)
        return self._replace(
            where=where,
            batched=self.batched or "vmap" in names,
            derived=self.derived or not names.isdisjoint({"jvp", "transpose"}),
        )


class KeyBinding(Binding):
    """A rule bound to a key of JAX programs."""

    def __init__(self, key: Key, value: Any, place: at | None = None) -> None:
        name = value if isinstance(value, str) else getattr(value, "__name__", "rule")
        super().__init__(key.label, name, place)
        self.key = key
        check_builtin(value, key.label, lambda other: key_for(other).meets(key))
        self.asks: bool = asks_site(value, None)
        self.place: at | None = at(what=key.label) if self.asks and place is None else place
        self.value: Any = partial(value, site=None) if self.asks else value  # pyright: ignore
        lent = lender(value)
        self.native: bool = lent is not None and same_thing(key, lent)  # JAX's own derivative
        self.rules: dict[int, tuple[Op, ForeignRule]] = {}

    @property
    def name(self) -> str:
        """The name of the binding among the others of its map."""
        return self.op_type if self.kind else self.shown

    def located(self, site: Site) -> KeyBinding:
        """Return the binding for an equation at a site, which its rule asks for."""
        made = copy.copy(self)  # (which counts in the same hits)
        made.value, made.rules = partial(self.value, site=site), {}
        return made

    def bind(self, op: Op) -> ForeignRule:
        """Return the rule, bound to an op type as the key sees it."""
        if id(op) not in self.rules:
            try:
                rule = ForeignRule(self.value, op)
            except RuleError:  # a rule that calls the inputs of any function x, or a and b
                rule = self._by_usual_names(op)
                if rule is None:
                    raise
            self.rules[id(op)] = op, rule
        return self.rules[id(op)][1]

    def _by_usual_names(self, op: Op) -> ForeignRule | None:
        usual = {1: ["x"], 2: ["a", "b"]}.get(len(op.inputs))
        if usual is None or usual == [i.name for i in op.inputs]:
            return None
        with suppress(RuleError):
            return ForeignRule(self.value, make_op(op.type, usual, op.attrs, op.several))
        return None


class Occurrence(NamedTuple):
    """An op of a key: its hit, the shape of its first input, and whether JAX's code made it."""

    binding: KeyBinding
    hit: Hit
    shape: tuple[int, ...]
    of_jax: bool


class Occurrences:
    """The contents of a program: ops under rules, and functions opened, kept and closed.

    `notes` count those by name, what was done, and source line.
    """

    def __init__(self) -> None:
        self.hits: list[Occurrence] = []
        self.closed: list[Closed] = []
        self.notes: Counter[tuple[str, str, str]] = Counter()
        self.untouched: Counter[tuple[str, str]] = Counter()

    def add(self, other: Occurrences) -> None:
        """Count what a program inside holds."""
        self.hits += other.hits
        self.closed += other.closed
        self.notes += other.notes
        self.untouched += other.untouched


class Surgery:
    """Puts the rules of a map into programs, and remembers those that it has seen."""

    def __init__(
        self, bindings: Sequence[KeyBinding], choice: ClosedFunctionPolicy, model: Any = None,
        kept: Sequence[at] = (),
    ) -> None:  # fmt: skip
        self.bindings = bindings
        self.choice = choice
        self.kept = kept  # the keys for whole calls inside of which no other rule is to fire
        placed = model is not None or any(b.place is not None for b in bindings)
        self.where: Whereabouts | None = Whereabouts(bindings, model) if placed else None
        # Code that runs only while a key is being differentiated: an equation that it made, found
        # where no rule put it, is a remainder of a derivative that came before the override.
        self.codes: dict[Any, KeyBinding] = {code: b for b in bindings for code in b.key.codes}
        self.seen: weakref.WeakKeyDictionary[Any, dict[Context, Any]] = weakref.WeakKeyDictionary()
        keys = list(dict.fromkeys(b.key for b in bindings))
        self.inlined: list[FunctionKey] = [
            k for k in keys if isinstance(k, FunctionKey) and k.is_inlined
        ]
        self.ruled: list[Key] = [b.key for b in bindings if not b.native]
        self.lines: list[str] = ["unknown"]  # of the equations around
        self.programs: list[core.Jaxpr] = []  # around the equation, and the equations that run them
        self.eqns: list[Any] = []
        self.calls: set[Any] = set()

    def operate(self, closed: Any) -> tuple[Any, Occurrences]:
        """Return a whole program with the rules in it, or itself, and what was found."""
        for binding in self.bindings:
            if isinstance(binding.key, NamedKey):
                binding.key.find(closed)
                self.codes |= dict.fromkeys(binding.key.codes, binding)
        hiding = any(b.key.call is not None for b in self.bindings)
        self.calls = self._calls(closed) if hiding else set()
        if self.where is None:
            return self.program(closed)
        self.where.begin()
        made = self.program(closed, Context(Around()))
        self.where.check()
        return made

    def program(self, given: Any, around: Context = Context()) -> tuple[Any, Occurrences]:  # noqa: B008
        """Return a program (closed or open) with the rules in it, or itself, and what was found."""
        # A program that is called from many places is gone through once for each kind of place; the
        # result is one object, so that JAX compiles it once.
        known = self.seen.setdefault(given, {})
        if around not in known or (self.where is not None and self.where.counting):
            jaxpr, found = self._jaxpr(getattr(given, "jaxpr", given), around)
            changed = jaxpr is not getattr(given, "jaxpr", given)
            # weak, or a program that did not change would keep itself alive
            made = given.replace(jaxpr=jaxpr) if jaxpr is not given and _closed(given) else jaxpr
            known[around] = (made if changed else None), found
        made, found = known[around]
        return (given if made is None else made), found

    def _jaxpr(self, jaxpr: core.Jaxpr, around: Context) -> tuple[Any, Occurrences]:
        found = Occurrences()
        self.programs.append(jaxpr)
        try:
            given = self.with_boundaries(jaxpr, around)
            eqns = [new for eqn in given for new in self.equation(eqn, around, found)]
        finally:
            self.programs.pop()
        same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
        return (jaxpr if same else jaxpr.replace(eqns=eqns)), found

    def with_boundaries(self, jaxpr: core.Jaxpr, around: Context) -> Sequence[Any]:
        """Return the equations, with a boundary around those of keys that JAX inlines."""
        if not self.inlined or around.derived:
            return jaxpr.eqns
        found = []
        for eqn, key in restore_calls(jaxpr, self.inlined):
            here = around.inside(eqn, self.around(eqn, around))
            counts = key in self.ruled and not around.closed and not here.derived
            if key and counts and self.chosen(eqn, here._replace(closed=True), [key]):
                raise GradientError(
                    f"override: {key.label!r} is called in a form that is not recognised "
                    f"({find_line(eqn, self.lines[-1])}): {key.name} with where= or another rare "
                    "argument, or batched before the override could see single examples. Override "
                    f"what it is made of, or call jax.jit({key.name}) in the model and use that as "
                    "the key."
                )
            found.append(eqn)
        return found

    def _calls(self, jaxpr: core.Jaxpr) -> set[Any]:
        """Return the places of visible calls of functions with a derivative of their own."""
        every = programs.equations(jaxpr)
        calls = [e for e in every if e.primitive.name in CUSTOM or programs.is_high(e)]
        found = [programs.codes(eqn) for eqn in calls]
        return {call_site(b.key.call, running) for running in found for b in self.bindings}

    def equation(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> list[Any]:
        """Return an equation with the rules in it, or itself, and notes behind it."""
        self.lines.append(find_line(eqn, self.lines[-1]))
        self.eqns.append(eqn)
        try:
            made = self._equation(eqn, around.inside(eqn, self.around(eqn, around)), found)
            return made if isinstance(made, list) else [made]
        finally:
            self.lines.pop()
            self.eqns.pop()

    def _equation(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> Any:
        if around.turned and around.derived:
            return eqn
        # Keys come first: one may stand for a call as a whole (`jax.nn.relu` is a `jit` or a
        # `custom_jvp_call`), and then what is inside is not looked at.
        if is_differentiable(eqn):
            keys = dict.fromkeys(b.key for b in self.bindings)
            named = [key for key in keys if key.matches(eqn, around.batched)]
            binding = self.chosen(eqn, around, named)
            if binding is not None:
                return self.under_rule(eqn, binding, around, found)
        if around.derived:
            self.check_derived(eqn, around.whole)
        name = programs.name_of(eqn)
        if name == programs.SOLVE:
            return self.linear_solve(eqn, around, found)
        if name in OPENED:
            return self.inside(eqn, around, found) if is_differentiable(eqn) or eqn.effects else eqn
        if name in programs.COMPOSITES:
            return self.composite(eqn, around, found)
        if name == programs.REMAT:
            new, inner = self.program(programs.remat_body(eqn), around)
            found.add(inner)
            return eqn if new is programs.remat_body(eqn) else programs.with_remat_body(eqn, new)
        is_custom = name in CUSTOM or eqn.primitive is op_p
        if is_custom or (programs.is_high(eqn) and is_differentiable(eqn)):
            return self.custom(eqn, around, found)
        self.check_hidden(eqn, around, found)
        if is_differentiable(eqn) and name != "stop_gradient":
            found.untouched[name, self.lines[-1]] += 1
        return eqn

    def around(self, eqn: core.JaxprEqn, context: Context) -> Around | None:
        """Return what is around the equations that this one holds, if a key asks for a place."""
        if self.where is None or context.where is None:
            return None
        return self.where.inside(eqn, context.where, self.programs[-1])

    def chosen(self, eqn: Any, around: Context, keys: Sequence[Key]) -> KeyBinding | None:
        """Return the binding for an equation that these keys name: the first, or by the place."""
        found = [b for b in self.bindings if b.key in keys]
        if self.where is None or not found:
            return found[0] if found else None
        return self.where.choose(eqn, found, around, self.lines[-1])

    # -- an operation under a rule -------------------------------------------------------------

    def under_rule(self, eqn: Any, binding: KeyBinding, around: Context, found: Occurrences) -> Any:
        """Return the operation, computed by the same equation, with the rule as its derivative."""
        if around.derived and not binding.native:
            raise derived_error(binding, self.lines[-1])
        path = "" if self.where is None or around.where is None else self.where.path(around.where)
        hit = binding.hit_at(self.lines[-1], path)
        if not around.derived:  # (derivatives consist of ops as well, but not of the user's)
            shape = tuple(eqn.invars[0].aval.shape) if eqn.invars else ()
            by_jax = of_jax(self.programs[-1], eqn, self.eqns[:-1])
            found.hits.append(Occurrence(binding, hit, shape, by_jax))
        if around.closed or around.derived:  # whoever looks in here decides what follows
            return eqn
        if binding.native:
            return _count_passes(eqn, hit)
        if isinstance(binding.key, WholeKey):
            self.check_whole(eqn, binding, around)
        if around.batched:
            raise batched_error(binding, self.lines[-1])
        if why := binding.key.refusal(eqn):
            raise GradientError(f"override: the key {binding.key.label!r} meets `{eqn}`, but {why}")
        operands = _operands(eqn)
        form = binding.key.form(eqn)
        if form is not None:
            return in_form(eqn, form, binding, hit)
        scale = binding.key.scale(eqn)
        gradient: EquationGradient = _gradient(eqn, binding, hit, operands, scale)
        if scale is not None:
            gradient = ScaledGradient(gradient, scale)
        params = {"jaxpr": program_of(eqn), "gradient": gradient}
        return eqn.replace(invars=operands, primitive=op_p, params=params)

    def check_whole(self, eqn: core.JaxprEqn, binding: KeyBinding, around: Context) -> None:
        """Refuse ops of other keys inside of a call that has a rule as a whole."""
        _, inner = self.program(programs.called(eqn), Context(where=around.where, closed=True))
        hidden = [seen.binding for seen in inner.hits if not seen.binding.native]
        if hidden and binding.place not in self.kept:
            raise hidden_error(hidden[0], binding, self.lines[-1])

    def check_derived(self, eqn: core.JaxprEqn, whole: bool) -> None:
        """Refuse the remains of a key that was differentiated inside the function.

        (There are none in a body that stands there whole.)
        """
        if not self.codes:
            return
        running = programs.codes(eqn)
        for code, _ in running:
            if code in self.codes:
                raise derived_error(self.codes[code], self.lines[-1])
        for binding in () if whole else self.bindings:
            site = call_site(binding.key.call, running)
            if site is not None and site not in self.calls:
                raise derived_error(binding, self.lines[-1], "may occur")

    # -- programs inside -----------------------------------------------------------------------

    def inside(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> Any:
        """Return an equation that runs other programs, with the rules in these."""
        held = len([*programs.bodies(eqn.params.values())])
        if held < (2 if eqn.primitive.name == "while" else 1):
            refuse(OVERRIDES, f"the programs that {eqn.primitive.name!r} runs are out of sight")

        def changed(program: Any) -> Any:
            new, inner = self.program(program, around)
            found.add(inner)
            return new

        params = {key: programs.mapped(value, changed) for key, value in eqn.params.items()}
        same = all(params[key] is eqn.params[key] for key in params)
        return eqn if same else eqn.replace(params=params)

    def linear_solve(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> Any:
        """Return a linear solve with the rules in its map, which is what JAX differentiates.

        The transpose counts from the second order on; how the solution is found never does.
        """
        matvec, vecmat = programs.linear_maps(eqn)
        new, inner = self.program(matvec, around)
        found.add(inner)
        turned = vecmat and self.program(vecmat, around._replace(turned=True))[0]
        same = new is matvec and turned is vecmat
        return eqn if same else programs.with_linear_maps(eqn, new, turned)

    def composite(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> Any:
        """Return an equation that computes what others compute as these, if a rule is inside."""
        new, inner = self.program(programs.expanded(eqn), around)
        if not inner.hits:
            found.untouched[programs.name_of(eqn), self.lines[-1]] += is_differentiable(eqn)
            return eqn
        by_jax = of_jax(self.programs[-1], eqn, self.eqns[:-1])
        inner.hits = [seen._replace(of_jax=by_jax) for seen in inner.hits]
        found.add(inner)
        return programs.as_call(eqn, new)

    def custom(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> Any:
        """Return a function with a derivative of its own: opened if the user says so.

        There are four ends: it is out of sight, and refused or kept; it is opened, and becomes a
        call of its body; it has a gradient of us, which stays and covers the ops inside; or it
        stays closed, over ops of keys or over none.
        """
        ours = eqn.primitive is op_p  # another override has been here, or regrad.jax.custom_grad
        body = programs.called(eqn)
        name = eqn.params["gradient"].name if ours else name_of(eqn, body)
        if body is None or (name == programs.ROOT and not around.closed):
            self.check_unseen(name, body, around)
            found.untouched[name, self.lines[-1]] += 1
            return eqn
        if not ours and not around.closed and self.choice.opens(body):
            new, inner = self.program(body, around._replace(whole=True))
            # without an op of a key inside, its own derivative may stay: it is often the better one
            if any(not seen.binding.native for seen in inner.hits):
                found.add(inner)
                found.notes[name, "opened", self.lines[-1]] += 1
                return programs.as_call(eqn, new)
        inside = Context(where=around.where, closed=True, ours=ours or around.ours)
        _, inner = self.program(body, inside)
        hidden = [seen for seen in inner.hits if not seen.binding.native]
        if is_differentiable(eqn) and not (ours and hidden):
            found.untouched[name, self.lines[-1]] += 1
        if ours:  # the inner rule wins; what it covers is created, and its own rule never runs
            found.hits += hidden
            found.notes += Counter({(name, "kept its own rule", self.lines[-1]): bool(hidden)})
        elif hidden:
            self.leave(name, body, hidden, around, found)
        return eqn

    def leave(
        self, name: str, body: Any, hidden: list[Occurrence], around: Context, found: Occurrences
    ) -> None:
        """Note a function that was left closed over ops of some keys."""
        place = name_and_place(body)[1]
        theirs = [seen for seen in hidden if not (place.startswith(programs.JAX) and seen.of_jax)]
        if around.closed:  # by the function around, which answers for what others wrote
            found.hits += theirs
            return
        keys = frozenset(seen.binding.name for seen in hidden)
        where, kept = self.lines[-1], self.choice.keeps(body)
        found.closed.append(Closed(name, place, where, keys, not theirs, kept))
        found.notes[name, f"closed over {', '.join(sorted(keys))}", where] += 1

    def check_unseen(self, name: str, body: Any, around: Context) -> None:
        """Refuse what is differentiated by functions that the program does not show."""
        kept = name in self.choice.keep or (body is not None and self.choice.keeps(body))
        if self.bindings and not around.ours and not kept:
            what = "jax.lax.custom_root" if name == programs.ROOT else name
            raise GradientError(
                f"override: the program calls {what} ({self.lines[-1]}), which is differentiated "
                "by functions that are out of sight. Give the whole of it a gradient with "
                f"rg.jax.custom_grad, or pass keep=[{name!r}] to leave it as it is."
            )

    def check_hidden(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> None:
        """Refuse a body that rules cannot be put into."""
        name = eqn.primitive.name
        if name == "call_exported" and programs.Params(eqn)["exported"].has_vjp():
            raise GradientError(
                f"override: the program calls an exported function ({self.lines[-1]}), whose "
                "inside cannot be seen. Put the override on the function before it is exported."
            )
        unseen = name not in programs.SHOWN and programs.holds_code(eqn.params.values())
        if unseen and is_differentiable(eqn) and not around.closed:
            self.check_unseen(name, None, around)
        # Any other primitive with a program in it (`pallas_call`, one of a library)
        # may be differentiated by a rule that never looks at the program.
        for body in () if name in SCALAR else programs.bodies(eqn.params.values()):
            _, inner = self.program(body, around)
            hits = [seen.hit for seen in inner.hits if not seen.binding.native]
            if around.closed:
                found.hits += inner.hits
            elif hits:
                raise GradientError(
                    f"override: {hits[0].op_type!r} occurs inside {name} "
                    f"({self.lines[-1]}), which JAX does not differentiate op by op: the rule "
                    "would never run. Leave that part out of the function, or give the whole of "
                    "it a gradient with rg.jax.custom_grad."
                )


def _closed(program: Any) -> bool:
    return isinstance(program, core.ClosedJaxpr)


def has_batches(jaxpr: core.Jaxpr) -> bool:
    """Return whether a program holds differentiable equations that a vmap has batched."""
    every = programs.equations(jaxpr)
    return any("vmap" in programs.transforms(eqn) and is_differentiable(eqn) for eqn in every)


def is_differentiable(eqn: core.JaxprEqn) -> bool:
    """Return whether a gradient may pass: floats go in, and floats come out."""
    # (a literal is a constant of the program: no gradient passes to it)
    avals = [v.aval for v in eqn.invars if not isinstance(v, core.Literal)]
    return any(map(_float, avals)) and any(_float(v.aval) for v in eqn.outvars)


def _float(aval: Any) -> bool:
    return hasattr(aval, "dtype") and is_float(aval)


def program_of(eqn: core.JaxprEqn, whole: bool = False) -> Any:
    """Return an equation as a program of its own; constants in it stay where they are.

    (With `whole`, they are inputs.)
    """
    if eqn.primitive is programs.closed_call_p:
        return programs.called(eqn)
    inputs = [
        None if isinstance(v, core.Literal) and not whole else core.Var(v.aval) for v in eqn.invars
    ]
    given = [v if x is None else x for x, v in zip(inputs, eqn.invars, strict=True)]
    outs = [core.Var(v.aval) for v in eqn.outvars]
    body = eqn.replace(invars=given, outvars=outs)
    info = programs.unnamed(jax.make_jaxpr(lambda: 0)())
    return core.ClosedJaxpr(
        core.Jaxpr([], [x for x in inputs if x is not None], outs, [body], eqn.effects, info), ()
    )


def in_form(eqn: Any, form: MatrixForm, binding: KeyBinding, hit: Hit) -> Any:
    """Return an equation under a rule that sees it in another form.

    JAX has one `dot_general` for what op types tell apart. The rule of `MatMul` gets operands whose
    axes were put in order, and its gradients go back through the transposes as JAX's own.
    """
    avals = [v.aval for v in eqn.invars]
    if any(map(programs.varying_axes, avals)):
        raise GradientError(
            f"override: {hit.op_type!r} meets `{eqn}` inside shard_map, where its axes cannot be "
            f"those of the op type. Use the key {eqn.primitive.name!r}."
        )
    run = partial(eqn.primitive.bind, **eqn.params)
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    inside = jax.make_jaxpr(lambda *xs: form.result(run(*map(form.undo, xs, (0, 1)))))
    body = inside(*jax.eval_shape(lambda *xs: [*map(form.operand, xs, (0, 1))], *like))
    attrs = binding.key.attrs(eqn)
    rule = binding.bind(binding.key.op(eqn))
    gradient = RuleGradient(rule, hit, body.in_avals, body.out_avals, [0, 1], {}, attrs)
    gradient.equation = Equation(body, [0, 1], [None, None])

    def whole(*xs: Any) -> Any:
        (y,) = run_op([*map(form.operand, xs, (0, 1))], body, gradient)
        return y.reshape(eqn.outvars[0].aval.shape)

    return programs.as_call(eqn, jax.make_jaxpr(whole)(*like))


def _count_passes(eqn: core.JaxprEqn, hit: Hit) -> list[Any]:
    """Return an equation as it is, and behind it a note of each gradient that passes.

    The note is a `regrad_op` that returns its inputs, and whose derivative counts.
    """
    is_call = eqn.primitive is programs.closed_call_p  # that we made of equations
    given = programs.called(eqn).jaxpr.eqns if is_call else [eqn]
    noted = {
        y: core.Var(y.aval)
        for y in eqn.outvars
        if _float(y.aval) and not isinstance(y, core.DropVar)
    }
    # the note takes the names of the results, and what made them gets new ones
    made = [each.replace(outvars=[noted.get(y, y) for y in each.outvars]) for each in given]
    xs = [core.Var(y.aval) for y in noted]
    info = programs.unnamed(jax.make_jaxpr(lambda: 0)())
    same = core.ClosedJaxpr(core.Jaxpr([], xs, xs, [], set(), info), ())
    params = {"jaxpr": same, "gradient": CountedGradient(hit, [x.aval for x in xs])}
    note = eqn.replace(
        invars=[*noted.values()], outvars=[*noted], primitive=op_p, params=params, effects=set()
    )
    return [*made, note]


def _operands(eqn: core.JaxprEqn) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, core.Literal)]


def _gradient(
    eqn: core.JaxprEqn, binding: KeyBinding, hit: Hit, operands: Sequence[Any], scale: Any
) -> RuleGradient:
    """Return the rule as the gradient of an equation."""
    op, lies = binding.key.op(eqn), binding.key.operand_names(eqn)
    names = [i.name for i in op.inputs]
    every = [names.index(n) if n in names else n if n in op.attrs else None for n in lies]
    places: list[int | str | None] = []
    fixed, attrs = {}, binding.key.attrs(eqn)
    for place, v in zip(every, eqn.invars, strict=True):
        if not isinstance(v, core.Literal):  # a rule may ask for it by its place, or by its name
            places.append(place)
        elif isinstance(place, int):
            fixed[place] = _constant(v)
        elif place is not None:
            attrs[place] = v.val
    avals, outs = [v.aval for v in operands], [v.aval for v in eqn.outvars]
    gradient = RuleGradient(binding.bind(op), hit, avals, outs, places, fixed, attrs)
    if gradient.rule.asks_own:
        held = [_constant(v) if isinstance(v, core.Literal) else None for v in eqn.invars]
        gradient.equation = Equation(program_of(eqn, True), every, held, scale)
    return gradient


def _constant(v: core.Literal) -> Any:
    with jax.ensure_compile_time_eval():  # a value, and no part of a trace that is open
        return jax.numpy.asarray(v.val, jax.typeof(v.val).dtype)


def call_site(call: Any, running: Sequence[tuple[Any, int]]) -> Any:
    """Return where a function with a derivative of its own was called; None if it is known which.

    In a program that was compiled first and differentiated then, what is left of such a call
    says no more than that `call` (JAX's code) was running.
    """
    inner = [*takewhile(lambda each: each[0] is not call, running)]
    if not all(code.co_filename.startswith(programs.MACHINERY) for code, _ in inner):
        return None  # a derivative of someone else's: its code would have been ours
    return tuple(running[len(inner) :]) or None


def find_line(eqn: core.JaxprEqn, otherwise: str) -> str:
    """Return the line outside JAX and regrad that made an equation: `model.py:12`."""
    for file, number in programs.lines(eqn):
        if not file.startswith((PACKAGE, programs.JAX, "<frozen ")):
            return f"{file}:{number}"
    return otherwise
