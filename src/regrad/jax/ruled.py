"""Equations of a JAX program under a rule: the `regrad_op` that replaces an equation.

`surgery` goes through programs and selects the equations that get a rule. This module makes the new
equations: the primitive, with the rule as its derivative, around the equation's own program or a
replacement; or the original equation, with a note that counts its gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.extend import core

from regrad.core.foreign import USUAL, ForeignRule, check_builtin, first_bound, lender
from regrad.core.placed import asks_site, with_site
from regrad.core.places import Site, at
from regrad.core.registry import Op
from regrad.core.replacing import Replace, gradient_of
from regrad.core.reports import Binding, Hit
from regrad.errors import GradientError
from regrad.jax.equations import constant_of, may_carry_gradient, operands_of, program_of
from regrad.jax.gradients import CountedGradient, Equation, RuleGradient, ScaledGradient
from regrad.jax.host import programs
from regrad.jax.keys import Key, ThresholdKey, key_for, make_op, same_thing
from regrad.jax.learned import learned_arrays, taking_more
from regrad.jax.optypes import MatrixForm
from regrad.jax.primitives import EquationGradient, op_p, run_op
from regrad.jax.replacing import replaced_program
from regrad.jax.thresholds import put_threshold


class KeyBinding(Binding):
    """A rule bound to a key of JAX programs."""

    def __init__(self, key: Key, value: Any, place: at | None = None) -> None:
        name = value if isinstance(value, str) else getattr(value, "__name__", "rule")
        super().__init__(key.label, name, place)
        self.key = key
        self.replaces: bool = isinstance(value, Replace)
        check_builtin(gradient_of(value), key.label, lambda other: key_for(other).meets(key))
        self.asks: bool = asks_site(value, None)
        self.place: at | None = at(what=key.label) if self.asks and place is None else place
        self.value: Any = with_site(value, None) if self.asks else value
        lent = lender(value)
        self.parameters: Any = learned_arrays(gradient_of(value))
        self.learned: list[core.Var] = [core.Var(jax.typeof(x)) for x in self.parameters]
        self.native: bool = lent is not None and same_thing(key, lent)  # JAX's own derivative
        self.rules: dict[int, tuple[Op, ForeignRule]] = {}

    @property
    def name(self) -> str:
        """Return the name of the binding among the others of its map."""
        return self.op_type if self.kind else self.shown

    def located(self, site: Site) -> KeyBinding:
        """Return the binding for an equation at a site, which its rule takes as a parameter."""
        made = copy.copy(self)  # (which counts in the same hits)
        made.value, made.rules = with_site(self.value, site), {}
        return made

    def bind(self, op: Op) -> ForeignRule:
        """Return the rule, bound to an op type as the key sees it."""
        if id(op) not in self.rules:
            usual = USUAL.get(len(op.inputs), [])  # (the usual names of the inputs of a function)
            others = [make_op(op.type, usual, op.attrs, op.several)] if usual else []
            rule = first_bound(partial(ForeignRule, self.value), [op, *others])
            rule.once = self.once
            self.rules[id(op)] = op, rule
        return self.rules[id(op)][1]


def put_rule(eqn: Any, binding: KeyBinding, hit: Hit) -> Any:
    """Return an operation with a rule as its derivative, with its own or a replaced value."""
    operands = operands_of(eqn)
    if isinstance(binding.key, ThresholdKey):
        return put_threshold(eqn, binding, hit)
    form = binding.key.form(eqn)
    if form is not None:
        return in_form(eqn, form, binding, hit)
    scale = binding.key.scale(eqn)
    gradient: EquationGradient = _gradient(eqn, binding, hit, operands, scale)
    program = taking_more(program_of(eqn), binding.learned)
    if binding.replaces:
        program = replaced_program(gradient, program)
    if scale is not None:
        gradient = ScaledGradient(gradient, scale)
    params = {"jaxpr": program, "gradient": gradient}
    effects = program.effects if binding.replaces else eqn.effects
    operands = [*operands, *binding.learned]
    return eqn.replace(invars=operands, primitive=op_p, params=params, effects=effects)


def in_form(eqn: Any, form: MatrixForm, binding: KeyBinding, hit: Hit) -> Any:
    """Return an equation under a rule that sees it in another form.

    JAX has one `dot_general` for several op types. The rule of `MatMul` gets operands with
    reordered axes, and its gradients go back through the transposes like JAX's own.
    """
    avals = [v.aval for v in eqn.invars]
    if not programs.sees_axes(avals):
        raise GradientError(
            f"override: {hit.op_type!r} matches `{eqn}` inside shard_map, where its axes cannot "
            "be the axes of the op type. Put the override inside, or use the key "
            f"{eqn.primitive.name!r}."
        )
    run = partial(eqn.primitive.bind, **eqn.params)
    like = [*map(programs.struct_of, avals)]
    inside = jax.make_jaxpr(lambda *xs: form.result(run(*map(form.undo, xs, (0, 1)))))
    body = inside(*jax.eval_shape(lambda *xs: [*map(form.operand, xs, (0, 1))], *like))
    attrs = binding.key.attrs(eqn)
    rule = binding.bind(binding.key.op(eqn))
    equation, more = Equation(body, [0, 1], [None, None]), binding.learned
    body, places = taking_more(body, more), [*range(2 + len(more))]
    gradient = RuleGradient(rule, hit, body.in_avals, body.out_avals, places, {}, attrs)
    gradient.equation = equation
    if binding.replaces:
        body = replaced_program(gradient, body)

    def whole(*xs: Any) -> Any:
        (y,) = run_op([*map(form.operand, xs, (0, 1)), *xs[2:]], body, gradient)
        return y.reshape(eqn.outvars[0].aval.shape)

    made = jax.make_jaxpr(whole)(*like, *body.in_avals[2:])
    return programs.as_call(eqn, made, invars=[*eqn.invars, *more])


def count_passes(eqn: core.JaxprEqn, hit: Hit) -> list[Any]:
    """Return an equation unchanged, followed by a note of each gradient that passes.

    The note is a `regrad_op` that returns its inputs, and whose derivative counts.
    """
    is_call = eqn.primitive is programs.closed_call_p  # that regrad made of equations
    given = programs.called(eqn).jaxpr.eqns if is_call else [eqn]
    noted = {
        y: core.Var(y.aval)
        for y in eqn.outvars
        if may_carry_gradient(y.aval) and not isinstance(y, core.DropVar)
    }
    # The note takes over the names of the results, and the original equations get new ones.
    made = [each.replace(outvars=[noted.get(y, y) for y in each.outvars]) for each in given]
    xs = [core.Var(y.aval) for y in noted]
    info = programs.unnamed(jax.make_jaxpr(lambda: 0)())
    same = core.ClosedJaxpr(core.Jaxpr([], xs, xs, [], set(), info), ())
    params = {"jaxpr": same, "gradient": CountedGradient(hit, [x.aval for x in xs])}
    note = eqn.replace(
        invars=[*noted.values()], outvars=[*noted], primitive=op_p, params=params, effects=set()
    )
    return [*made, note]


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
        if not isinstance(v, core.Literal):  # a rule may take it by its place, or by its name
            places.append(place)
        elif isinstance(place, int):
            fixed[place] = constant_of(v)
        elif place is not None:
            attrs[place] = v.val
    places += range(len(names), len(names) + len(binding.learned))
    avals, outs = [v.aval for v in (*operands, *binding.learned)], [v.aval for v in eqn.outvars]
    gradient = RuleGradient(binding.bind(op), hit, avals, outs, places, fixed, attrs)
    if gradient.rule.runs_op or binding.replaces:
        held = [constant_of(v) if isinstance(v, core.Literal) else None for v in eqn.invars]
        gradient.equation = Equation(program_of(eqn, True), every, held, scale)
    return gradient
