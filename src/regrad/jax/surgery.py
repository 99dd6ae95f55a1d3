"""Rules put into JAX programs, equation by equation.

The idea: JAX traces the computation of a function to a program (a jaxpr) before it differentiates,
batches or compiles it. So an override is a change of the program. With `{"Sign": rule}`

    let b = sign a                         let b = regrad_op[gradient=rule
        c = mul b a           becomes                        jaxpr={ sign }] a
        d = reduce_sum c                       c = mul b a
    in d                                       d = reduce_sum c
                                           in d

`regrad_op` is a primitive of regrad (see `primitives`). It computes the result of the equation
inside it, and its derivative is the rule. JAX does everything else: `jax.grad` differentiates the
primitive, and `jax.vmap`, `jax.jit` and `jax.checkpoint` handle it like any other.

A program contains programs (of `jit`, `scan`, `cond`, `custom_vjp`, …), which are processed in the
same way. There are four kinds of them: programs that JAX differentiates as written (`OPENED`),
where a rule applies; functions with a custom derivative (`CUSTOM`), which would hide the rule;
programs that describe a scalar function (`SCALAR`), which are not differentiated; and all others,
for which regrad cannot tell how JAX differentiates them.

Invariants:

* An active rule fires or raises. If an op of a key occurs where its rule could not run (in the
  derivative of another function, in a body of an unknown kind, batched beyond recognition), regrad
  raises an error that names its line, unless the user has passed `open` or `keep`.
* The values are unchanged, except for ops of a key that replaces values (`replacing`): these are
  replaced in all code, and regrad raises an error if one of them would keep its value.
* Programs without ops of any key stay the same objects. JAX finds its compiled code by the identity
  of programs, so a model is not compiled again for a rule in another part of it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from regrad.core.places import at
from regrad.core.reports import Hit
from regrad.errors import GradientError, PassedOverError
from regrad.jax.boundaries import restore_calls
from regrad.jax.closed import (
    Closed,
    ClosedFunctionPolicy,
    batched_error,
    check_solve,
    derived_error,
    hidden_error,
    name_and_place,
    name_of,
    of_jax,
)
from regrad.jax.equations import call_site, find_line, is_differentiable
from regrad.jax.host import OVERRIDES, programs, refuse
from regrad.jax.keys import FunctionKey, Key, NamedKey, ThresholdKey, WholeKey
from regrad.jax.learned import handing_on, reading, takes_more
from regrad.jax.primitives import op_p, tie_p
from regrad.jax.ruled import KeyBinding, count_passes, put_rule
from regrad.jax.thresholds import NOT_CAST, restore_spikes
from regrad.jax.where import EquationContext, Whereabouts
from regrad.transforms.closures import reads_state

# Primitives whose bodies JAX differentiates as written: a rule inside applies.
OPENED = programs.CALLS | {
    "scan", "while", "cond", "shard_map", "custom_linear_solve", "regrad_vmap",
}  # fmt: skip
# Their bodies only define a computation of two scalars, and are not differentiated.
SCALAR = frozenset({
    "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "scatter-min",
    "scatter_min", "scatter-max", "scatter_max", "scatter-sub", "scatter_sub",
})  # fmt: skip


class Context(NamedTuple):
    """The place of an equation in a program: in a vmap, in a derivative, in a custom function.

    In a vmap that was kept (see `vmaps`), equations are in their original form. The body of a
    function with a custom derivative is there undifferentiated (`whole`). In a function that is
    left closed, regrad only searches for ops; the function may have a gradient of regrad (`ours`).
    In the transpose of a map (`turned`), which JAX has made, derived ops are not the user's.

    The first of these conditions that holds decides on an op of a key (see `under_rule`):

        turned and derived    nothing: the equation stays
        derived               an error; with JAX's own derivative as the rule, the equation stays
        closed                a hit, and the equation stays; the caller decides the rest
        JAX's own derivative  a hit, and behind the equation a note that counts its gradients
        batched               an error
        otherwise             a hit, and a `regrad_op` replaces the equation
    """

    where: EquationContext | None = None  # scopes and functions around, if a key names a place
    batched: bool = False  # the name stack here, or around, contains "vmap"
    derived: bool = False  # … or "jvp" or "transpose": JAX has already differentiated this
    whole: bool = False
    closed: bool = False  # (and so is everything inside, wherever it is)
    ours: bool = False  # an invisible function may stay, because a rule covers it
    turned: bool = False

    def inside(self, eqn: core.JaxprEqn, where: EquationContext | None = None) -> Context:
        """Return the place of the contents of an equation; its transforms are in its name stack."""
        if self.closed:
            return self._replace(where=where)
        names = programs.transforms(eqn)
        return self._replace(
            where=where,
            batched=self.batched or "vmap" in names,
            derived=self.derived or not names.isdisjoint({"jvp", "transpose"}),
        )


class Occurrence(NamedTuple):
    """An op of a key: its hit, the shape of its first input, and whether JAX's code made it."""

    binding: KeyBinding
    hit: Hit
    shape: tuple[int, ...]
    of_jax: bool


class Occurrences:
    """The contents of a program: ops under rules, and functions opened, kept and closed.

    `notes` count functions by name, action, and source line.
    """

    def __init__(self) -> None:
        self.hits: list[Occurrence] = []
        self.closed: list[Closed] = []
        self.notes: Counter[tuple[str, str, str]] = Counter()
        self.untouched: Counter[tuple[str, str]] = Counter()
        self.spikes: dict[str, None] = {}  # the lines of comparisons that are cast, for "Step"

    def add(self, other: Occurrences) -> None:
        """Add the findings of an inner program."""
        self.hits += other.hits
        self.closed += other.closed
        self.notes += other.notes
        self.untouched += other.untouched
        self.spikes |= other.spikes


class Surgery:
    """Puts the rules of a map into programs, and caches the programs that it has processed."""

    def __init__(
        self, bindings: Sequence[KeyBinding], choice: ClosedFunctionPolicy, model: Any = None,
        kept: Sequence[at] = (),
    ) -> None:  # fmt: skip
        self.bindings = bindings
        self.choice = choice
        self.kept = kept  # the keys for whole calls inside of which no other rule may fire
        placed = model is not None or any(b.place is not None for b in bindings)
        self.where: Whereabouts | None = Whereabouts(bindings, model) if placed else None
        # Code that runs only while a key is being differentiated. If an equation that it made
        # occurs without a rule, the derivative was computed before the override.
        self.codes: dict[Any, KeyBinding] = {code: b for b in bindings for code in b.key.codes}
        self.seen: weakref.WeakKeyDictionary[Any, dict[Context, Any]] = weakref.WeakKeyDictionary()
        keys = list(dict.fromkeys(b.key for b in bindings))
        self.inlined: list[FunctionKey] = [
            k for k in keys if isinstance(k, FunctionKey) and k.is_inlined
        ]
        self.spikes: set[str] = {k.label for k in keys} & {"Step", ThresholdKey.label}
        self.ruled: list[Key] = [b.key for b in bindings if not b.native]
        # Values are replaced in all code, even where no gradient passes. If a function reads values
        # that may differ at the next call, it is put into the program again.
        self.learned: list[Any] = [v for b in bindings for v in b.learned]
        self.parameters: list[Any] = [x for b in bindings for x in b.parameters]
        self.values: list[Key] = [b.key for b in bindings if b.replaces]
        given = [b.value.forward for b in bindings if b.replaces]
        self.is_new: bool = bool(given) and reads_state(*given)
        self.lines: list[str] = ["unknown"]  # of the equations around
        self.programs: list[core.Jaxpr] = []  # around the equation, and the equations that run them
        self.eqns: list[Any] = []
        self.calls: set[Any] = set()

    def operate(self, closed: Any) -> tuple[Any, Occurrences]:
        """Return a whole program with the rules in it, or itself, and the findings."""
        for binding in self.bindings:
            if isinstance(binding.key, NamedKey):
                binding.key.find(closed, binding.marked)
                self.codes |= dict.fromkeys(binding.key.codes, binding)
        hiding = any(b.key.call is not None for b in self.bindings)
        self.calls = self._calls(closed) if hiding else set()
        if self.where is None:
            return self.program(closed)
        self.where.begin()
        made = self.program(closed, Context(EquationContext()))
        self.where.check()
        return made

    def program(self, given: Any, around: Context = Context()) -> tuple[Any, Occurrences]:  # noqa: B008
        """Return a program (closed or open) with the rules in it, or itself, and the findings."""
        # A program that is called from many places is processed once for each kind of place; the
        # result is one object, so that JAX compiles it once.
        known = self.seen.setdefault(given, {})
        if around not in known or self.is_new or (self.where is not None and self.where.counting):
            jaxpr, found = self._jaxpr(given, around)
            changed = jaxpr is not getattr(given, "jaxpr", given)
            # Weak, because otherwise an unchanged program would keep itself alive.
            is_closed = jaxpr is not given and isinstance(given, core.ClosedJaxpr)
            made = given.replace(jaxpr=jaxpr) if is_closed else jaxpr
            known[around] = (made if changed else None), found
        made, found = known[around]
        return (given if made is None else made), found

    def _jaxpr(self, given: Any, around: Context) -> tuple[Any, Occurrences]:
        found, jaxpr = Occurrences(), getattr(given, "jaxpr", given)
        self.programs.append(jaxpr)
        try:
            before = self.with_boundaries(given, around)
            if self.spikes:
                before = self.with_spikes(before, around, found)
            eqns = [new for eqn in before for new in self.equation(eqn, around, found)]
        finally:
            self.programs.pop()
        made = programs.with_equations(jaxpr, eqns)
        return (made if made is jaxpr else reading(made, self.learned)), found

    def with_boundaries(self, given: Any, around: Context) -> Sequence[Any]:
        """Return the equations, with a boundary around equations of keys that JAX inlines."""
        jaxpr = getattr(given, "jaxpr", given)
        # (The content of a boundary has it already: all equations there belong to the key.)
        inlined = [key for key in self.inlined if given not in key.given]
        if not inlined or around.derived:
            return jaxpr.eqns
        found = []
        for eqn, key in restore_calls(jaxpr, inlined, self.values):
            here = around.inside(eqn, self.around(eqn, around))
            counts = key in self.ruled and not around.closed and not here.derived
            if key and counts and self.chosen(eqn, here._replace(closed=True), [key]):
                raise GradientError(
                    f"override: {key.label!r} is called in a form that regrad does not recognize "
                    f"({self.line_of(eqn)}): {key.name} with where= or another rare "
                    "argument, or batched before the override could see single examples. "
                    f"Override the operations that it consists of, or call jax.jit({key.name}) in "
                    f"the model and use jax.jit({key.name}) as the key."
                )
            found.append(eqn)
        return found

    def with_spikes(self, eqns: Sequence[Any], around: Context, found: Occurrences) -> Any:
        """Return the equations, with a call for each comparison that is cast, if a key names it.

        The other comparisons are listed. A map with "Step" alone leaves all of them as they are.
        """
        made, rest = restore_spikes(eqns)
        if ThresholdKey.label not in self.spikes:
            casts = [old for old, new in zip(eqns, made, strict=True) if old is not new]
            found.spikes |= dict.fromkeys(map(self.line_of, casts))
            return eqns
        for eqn in rest if not around.closed else ():
            found.untouched[eqn.primitive.name + NOT_CAST, self.line_of(eqn)] += 1
        return made

    def _calls(self, jaxpr: core.Jaxpr) -> set[Any]:
        """Return the places of visible calls of functions with a custom derivative."""
        every = programs.equations(jaxpr)
        calls = [e for e in every if e.primitive.name in programs.CUSTOM or programs.is_high(e)]
        found = [programs.codes(eqn) for eqn in calls]
        return {call_site(b.key.call, running) for running in found for b in self.bindings}

    def line_of(self, eqn: core.JaxprEqn) -> str:
        """Return the line of the user's program that made an equation."""
        return find_line(eqn, self.lines[-1])

    def equation(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> list[Any]:
        """Return an equation with the rules in it, or itself, and notes behind it."""
        self.lines.append(self.line_of(eqn))
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
        # Keys come first: a key may mean a call as a whole (`jax.nn.relu` is a `jit` or a
        # `custom_jvp_call`), and then regrad does not look inside.
        passes = is_differentiable(eqn)
        if keys := [b.key for b in self.bindings] if passes else self.values:
            keys = dict.fromkeys(keys)
            named = [key for key in keys if key.matches(eqn, around.batched)]
            binding = self.chosen(eqn, around, named)
            if binding is not None and (passes or binding.replaces):
                return self.under_rule(eqn, binding, around, found)
        if around.derived:
            self.check_derived(eqn, around.whole)
        name = programs.name_of(eqn)
        if name == programs.SOLVE:
            return self.linear_solve(eqn, around, found)
        if name in OPENED:
            opened = passes or eqn.effects or self.values
            return self.inside(eqn, around, found) if opened else eqn
        if name in programs.COMPOSITES:
            return self.composite(eqn, around, found)
        if name == programs.REMAT:
            new, inner = self.program(programs.remat_body(eqn), around)
            found.add(inner)
            if takes_more(new, programs.remat_body(eqn)):
                return handing_on(eqn, eqn.params, self.learned, self.lines[-1])
            return eqn if new is programs.remat_body(eqn) else programs.with_remat_body(eqn, new)
        is_custom = name in programs.CUSTOM or eqn.primitive is op_p
        if is_custom or (programs.is_high(eqn) and is_differentiable(eqn)):
            return self.custom(eqn, around, found)
        self.check_hidden(eqn, around, found)
        if is_differentiable(eqn) and name not in ("stop_gradient", tie_p.name):
            found.untouched[name, self.lines[-1]] += 1
        return eqn

    def around(self, eqn: core.JaxprEqn, context: Context) -> EquationContext | None:
        """Return the context of the equations inside this one, if a key names a place."""
        if self.where is None or context.where is None:
            return None
        return self.where.inside(eqn, context.where, self.programs[-1])

    def chosen(self, eqn: Any, around: Context, keys: Sequence[Key]) -> KeyBinding | None:
        """Return the binding for an equation of these keys: the first, or the one for its place."""
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
        if not around.derived:  # (derivatives consist of ops as well, but these are not the user's)
            shape = tuple(eqn.invars[0].aval.shape) if eqn.invars else ()
            by_jax = of_jax(self.programs[-1], eqn, self.eqns[:-1])
            found.hits.append(Occurrence(binding, hit, shape, by_jax))
        if around.closed or around.derived:  # the caller that searches here decides the rest
            return eqn
        if binding.native:
            return count_passes(eqn, hit)
        if isinstance(binding.key, WholeKey):
            self.check_whole(eqn, binding, around)
        if around.batched:
            raise batched_error(binding, self.lines[-1])
        if why := binding.key.refusal(eqn):
            raise GradientError(
                f"override: the key {binding.key.label!r} matches `{eqn}`, but {why}"
            )
        return put_rule(eqn, binding, hit)

    def check_whole(self, eqn: core.JaxprEqn, binding: KeyBinding, around: Context) -> None:
        """Raise for ops of other keys inside of a call that has a rule for the whole call."""
        _, inner = self.program(programs.called(eqn), Context(where=around.where, closed=True))
        hidden = [seen.binding for seen in inner.hits if not seen.binding.native]
        if hidden and binding.place not in self.kept:
            raise hidden_error(hidden[0], binding, self.lines[-1])

    def check_derived(self, eqn: core.JaxprEqn, whole: bool) -> None:
        """Raise for remains of a key that was differentiated inside the function.

        (There are none in a body that is kept whole.)
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
            refuse(OVERRIDES, f"the programs that {eqn.primitive.name!r} runs are not visible")

        more = False

        def changed(program: Any) -> Any:
            nonlocal more
            new, inner = self.program(program, around)
            found.add(inner)
            more |= takes_more(new, program)
            return new

        params = {key: programs.mapped(value, changed) for key, value in eqn.params.items()}
        if more:
            return handing_on(eqn, params, self.learned, self.lines[-1])
        return programs.with_params(eqn, params)

    def called(self, eqn: core.JaxprEqn, new: Any, program: Any) -> Any:
        """Return a call of a program with rules in it, in place of an equation."""
        more = self.learned if takes_more(new, program) else ()
        return programs.as_call(eqn, new, invars=[*more, *eqn.invars])

    def linear_solve(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> Any:
        """Return a linear solve with the rules in its map, because JAX differentiates this map.

        The transpose counts from the second order on; the method that finds the solution never
        counts.
        """
        matvec, vecmat = programs.linear_maps(eqn)
        new, inner = self.program(matvec, around)
        check_solve([seen.binding for seen in inner.hits], self.lines[-1])
        found.add(inner)
        if takes_more(new, matvec):
            return handing_on(eqn, eqn.params, self.learned, self.lines[-1])
        replaced = [seen.hit for seen in inner.hits if seen.binding.replaces]
        if replaced and not around.closed:
            raise GradientError(
                f"override: the value of {replaced[0].op_type!r} is replaced in the linear map of "
                f"a solve ({self.lines[-1]}), whose solution would belong to another map. Move "
                "the solve out of the function."
            )
        turned = vecmat and self.program(vecmat, around._replace(turned=True))[0]
        same = new is matvec and turned is vecmat
        return eqn if same else programs.with_linear_maps(eqn, new, turned)

    def composite(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> Any:
        """Return a composite equation with the rules in it, or itself."""
        body = programs.expanded(eqn)
        new, inner = self.program(body, around)
        if not inner.hits:
            found.untouched[programs.name_of(eqn), self.lines[-1]] += is_differentiable(eqn)
            return eqn
        by_jax = of_jax(self.programs[-1], eqn, self.eqns[:-1])
        inner.hits = [seen._replace(of_jax=by_jax) for seen in inner.hits]
        found.add(inner)
        return self.called(eqn, new, body)

    def custom(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> Any:
        """Return a function with a custom derivative: opened if the user requests it.

        There are four cases. It is not visible, and raises or is kept. It is opened, and becomes a
        call of its body. It has a gradient of regrad, which stays and covers the ops inside. Or it
        stays closed, with or without ops of keys inside.
        """
        ours = eqn.primitive is op_p  # another override was applied here, or regrad.jax.custom_grad
        body = programs.called(eqn)
        name = eqn.params["gradient"].name if ours else name_of(eqn, body)
        if body is None or (name == programs.ROOT and not around.closed):
            self.check_unseen(name, body, around)
            found.untouched[name, self.lines[-1]] += 1
            return eqn
        if not ours and not around.closed and self.choice.opens(body):
            new, inner = self.program(body, around._replace(whole=True))
            # Without an op of a key inside, its custom derivative may stay, which is often better.
            if any(not seen.binding.native for seen in inner.hits):
                found.add(inner)
                found.notes[name, "opened", self.lines[-1]] += 1
                return self.called(eqn, new, body)
        inside = Context(where=around.where, closed=True, ours=ours or around.ours)
        _, inner = self.program(body, inside)
        hidden = [seen for seen in inner.hits if not seen.binding.native]
        if is_differentiable(eqn) and not (ours and hidden):
            found.untouched[name, self.lines[-1]] += 1
        if ours and not around.closed:
            self.check_values(eqn.params["gradient"], hidden)
        # the inner rule wins; the ops that it covers are created, and their own rules never run
        if ours:
            found.hits += hidden
            found.notes += Counter({(name, "kept its own rule", self.lines[-1]): bool(hidden)})
        elif hidden:
            self.leave(name, body, hidden, around, found)
        return eqn

    def leave(
        self, name: str, body: Any, hidden: list[Occurrence], around: Context, found: Occurrences
    ) -> None:
        """Record a function that was left closed over ops of some keys."""
        place = name_and_place(body)[1]
        by_jax = place.startswith(programs.JAX)
        theirs = [s for s in hidden if s.binding.replaces or not (by_jax and s.of_jax)]
        if around.closed:  # by the function around, which is responsible for code of other authors
            found.hits += theirs
            return
        keys = frozenset(seen.binding.name for seen in hidden)
        where, kept = self.lines[-1], self.choice.keeps(body)
        found.closed.append(Closed(name, place, where, keys, not theirs, kept))
        found.notes[name, f"closed over {', '.join(sorted(keys))}", where] += 1

    def check_values(self, gradient: Any, hidden: list[Occurrence]) -> None:
        """Raise for replaced values inside a gradient of regrad, except for its own op."""
        rule = getattr(getattr(gradient, "one", gradient), "rule", None)
        for seen in hidden:
            if seen.binding.replaces and (rule is None or rule.op.type != seen.hit.op_type):
                raise PassedOverError(
                    f"override: the value of {seen.hit.op_type!r} is replaced, and it occurs in "
                    f"{gradient.name} ({self.lines[-1]}), which stays unchanged. Put the override "
                    "inside of that, or replace its value as a whole."
                )

    def check_unseen(self, name: str, body: Any, around: Context) -> None:
        """Raise for an equation whose derivative is computed by invisible functions."""
        kept = name in self.choice.keep or (body is not None and self.choice.keeps(body))
        if self.bindings and not around.ours and not kept:
            what = "jax.lax.custom_root" if name == programs.ROOT else name
            raise GradientError(
                f"override: the program calls {what} ({self.lines[-1]}), which is differentiated "
                "by functions that are not visible. Define a gradient for the whole of it with "
                f"rg.jax.custom_grad, or pass keep=[{name!r}] to leave it unchanged."
            )

    def check_hidden(self, eqn: core.JaxprEqn, around: Context, found: Occurrences) -> None:
        """Raise for a body into which rules cannot be put."""
        name = eqn.primitive.name
        if name == "call_exported" and programs.Params(eqn)["exported"].has_vjp():
            raise GradientError(
                f"override: the program calls an exported function ({self.lines[-1]}), whose "
                "inside is not visible. Put the override on the function before it is exported."
            )
        unseen = name not in programs.SHOWN and programs.holds_code(eqn.params.values())
        if unseen and is_differentiable(eqn) and not around.closed:
            self.check_unseen(name, None, around)
        # Any other primitive with a program in it (`pallas_call`, or another library's) may be
        # differentiated by a rule that does not use the program.
        for body in () if name in SCALAR else programs.bodies(eqn.params.values()):
            _, inner = self.program(body, around)
            hits = [seen.hit for seen in inner.hits if not seen.binding.native]
            if around.closed:
                found.hits += inner.hits
            elif hits:
                raise GradientError(
                    f"override: {hits[0].op_type!r} occurs inside {name} ({self.lines[-1]}), "
                    "which JAX does not differentiate op by op: the rule would never run. Move "
                    "that part out of the function, or define a gradient for the whole of it "
                    "with rg.jax.custom_grad."
                )
