"""Rules for parameters: keys `at(parameter=…)` for JAX programs.

JAX programs have no parameters, only arguments. So `model=` is an argument of the function (a
module, or a pytree such as Flax's params), or like one. At the entry of the function, each array
that a key names passes an identity, whose gradient is the rule. All uses of the array lie behind
it, so the rule receives the sum of their gradients.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend import core
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_structure

from regrad.core.callers import PACKAGE, find_caller
from regrad.core.containers import replaced
from regrad.core.parameters import PARAMETER, select, tell_idle
from regrad.core.places import ChainStep, at
from regrad.errors import ArgumentError, GradientError, kind
from regrad.jax.equations import find_line
from regrad.jax.gradients import Equation, RuleGradient
from regrad.jax.host import programs
from regrad.jax.keys import Key
from regrad.jax.learned import handing_on, reading
from regrad.jax.modules import module_types, parts, walk
from regrad.jax.primitives import is_float, op_p, run_op
from regrad.jax.ruled import KeyBinding
from regrad.jax.surgery import Occurrence

# Flax and Equinox, which call the overridden function for the user, are in the folder of JAX.
LIBRARIES: tuple[str, ...] = (PACKAGE, os.path.dirname(os.path.dirname(jax.__file__)))


class ParameterKey(Key):
    """The key of a parameter, which no equation matches."""

    label: Any = PARAMETER.type


class Parameters:
    """The parameters that the keys of a map name.

    Args:
        rules: The rules for parameters, by key.
        model: A module of Equinox or Flax's nnx, or a pytree of arrays.
        marked: The keys that may name nothing.
        once: Whether the rules define only the first derivative.
    """

    def __init__(self, rules: Mapping[at, Any], model: Any, marked: Any, once: bool) -> None:
        self.is_nnx: bool = isinstance(model, module_types("flax.nnx"))
        leaves = self._leaves(model)
        arrays = any(hasattr(x, "shape") for _, x in leaves)
        if isinstance(model, (jax.Array, *module_types("flax.linen"))) or not arrays:
            raise ArgumentError(
                f"override: {next(iter(rules))!r} names a parameter, so model= has to hold arrays: "
                "a module of Equinox or nnx, or a pytree of parameters, which is an argument of "
                f"the function (params of Linen or Haiku), got {kind(model)}"
            )
        self.model = model
        self.like: Any = self._form(model)
        names: dict[int, list[str]] = {}  # the other paths of a shared Variable of nnx
        for path, module in walk(model) if self.is_nnx else ():
            for name, x in parts(module):
                names.setdefault(id(x), []).append(f"{path}.{name}" if path else str(name))
        steps = [ChainStep((path, *names.get(id(x), ())), x) for path, x in leaves]
        pairs = zip(steps, select(rules, steps, marked), strict=True)
        self.keys: dict[str, at] = {step.path: key for step, key in pairs if key is not None}
        self.bindings: dict[at, KeyBinding] = {}
        for key, rule in rules.items():
            binding = self.bindings[key] = KeyBinding(ParameterKey(), rule, key)
            binding.marked, binding.sisters, binding.once = key in marked, [binding], once
            binding.bind(PARAMETER)  # raise now for a rule that does not fit
        self.seen: list[Occurrence] = []  # in the last call
        self.ruled: list[tuple[int, KeyBinding, Any]] = []  # its arrays with rules, and their hits
        self.covered: set[str] = set()  # paths of parameters with a rule in an inner override

    def _leaves(self, tree: Any) -> list[tuple[str, Any]]:
        """Return the arrays of a model by their paths (the Variables, for nnx)."""
        if self.is_nnx:
            nnx: Any = sys.modules["flax.nnx"]
            graph = nnx.iter_graph(tree)
            return [(".".join(map(str, p)), v) for p, v in graph if isinstance(v, nnx.Variable)]
        return [(_path(path), x) for path, x in tree_flatten_with_path(tree)[0]]

    def _form(self, tree: Any) -> Any:
        """Return a value that a model shares with its copies."""
        if self.is_nnx:
            return type(tree), [(path, x.shape) for path, x in self._leaves(tree)]
        return tree_structure(tree), [getattr(x, "shape", None) for x in tree_leaves(tree)]

    def _is_like(self, part: Any) -> bool:
        return type(part) is type(self.model) and self._form(part) == self.like

    def plan(self, call: Any, program: Any) -> Any:
        """Return the program of a call for arrays with the rules on the parameters.

        The program of another override inside has the rules of that override. So it reads the
        parameters themselves, which the new program takes as additional first inputs.
        """
        self.seen, self.ruled, learned = [], [], len(program.in_avals) - len(call.arrays)
        places = [(n, path) for n, path in self._places(call) if path in self.keys]
        named = [(n, path) for n, path in places if is_float(jax.typeof(call.arrays[n]))]
        invars = [program.jaxpr.invars[learned + n] for n, _ in named]
        own = {v: core.Var(v.aval) for v in invars}
        inner = InnerRules([*own.values()])
        made = inner.program(program, own)
        self.more: list[int] = [learned + n for n, _ in named] if made is not program else []
        for (n, path), v in zip(named, own.values(), strict=True):
            if v in inner.ruled and v not in inner.used:
                self.covered.add(path)
                continue
            binding, x = self.bindings[self.keys[path]], call.arrays[n]
            hit = binding.hit_in(path, PARAMETER.type, find_caller(LIBRARIES))
            self.seen.append(Occurrence(binding, hit, tuple(x.shape), False))
            self.ruled.append((learned + n, binding, hit))
        return made

    def enter(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays for the planned program, with the rules on the parameters."""
        made = list(arrays)
        for n, binding, hit in self.ruled:
            made[n] = _ruled(arrays[n], binding, hit)
        return [*[arrays[n] for n in self.more], *made]

    def _places(self, call: Any) -> list[tuple[int, str]]:
        """Return the parameters' positions among the arrays of a call, with their paths."""
        found: list[tuple[Any, list[tuple[int, str]]]] = []
        if self.is_nnx:
            first, (every, _) = len(call.places), tree_flatten_with_path(call.modules.split())
            names = [_path(path).removesuffix(".value") for path, _ in every]
            for i, part in enumerate(call.modules.found):
                if self._is_like(part):
                    own = [(first + n, name) for n, name in enumerate(names)]
                    own = [(n, p.partition(".")[2]) for n, p in own if p.startswith(f"{i}.")]
                    found.append((part, own))
        else:
            at_leaf, order = 0, {leaf: n for n, leaf in enumerate(call.places)}
            stop = lambda part: call.modules.holds(part) or self._is_like(part)  # noqa: E731
            for part in tree_leaves(call.given, is_leaf=stop):
                paths = [p for p, _ in self._leaves(part)] if self._is_like(part) else []
                own = [(order.get(at_leaf + n), path) for n, path in enumerate(paths)]
                found += [(part, [(n, p) for n, p in own if n is not None])] if paths else []
                at_leaf += len(paths) or 1
        same = [each for each in found if _same(each[0], self.model)] or found
        if len(same) != 1:
            what = "several arguments are" if found else "no argument is"
            raise GradientError(
                f"override: {what} like model=, whose parameters have rules by "
                f"{next(iter(self.bindings))!r}. Pass the model to the function as one argument, "
                "and close over other models of the same form."
            )
        return same[0][1]

    def idle(self) -> list[str]:
        """Return messages for keys of which some parameters got a gradient, and others did not."""
        return [
            text
            for k, b in self.bindings.items()
            for text in tell_idle(k, b, self.keys, self.covered)
        ]


def _path(path: Any) -> str:
    return keystr(path, simple=True, separator=".")


def _same(part: Any, model: Any) -> bool:
    pairs = zip(tree_leaves(part), tree_leaves(model), strict=True)
    return all(a is b for a, b in pairs)


def _ruled(x: Any, binding: KeyBinding, hit: Any) -> Any:
    """Return an array, whose gradient is the rule."""
    rule, aval = binding.bind(PARAMETER), jax.typeof(x)
    program = jax.make_jaxpr(lambda x: x)(x)
    gradient = RuleGradient(rule, hit, [aval], [aval], [0], {}, {})
    if rule.runs_op:
        gradient.equation = Equation(program, [0], [None])
    return run_op([x], program, gradient)[0]


class InnerRules:
    """Lets the rules of other overrides in a program read parameters without the rules around.

    Args:
        more: Variables for the parameters themselves, which a changed program takes as first
            inputs.
    """

    def __init__(self, more: Sequence[core.Var]) -> None:
        self.more = more
        self.ruled: set[core.Var] = set()  # the variables that rules read
        self.used: set[core.Var] = set()  # those whose parameter has other uses

    def program(self, program: Any, own: Mapping[Any, core.Var]) -> Any:
        """Return a program in which rules read these variables instead of inputs, or itself."""
        jaxpr, eqns = getattr(program, "jaxpr", program), []
        for eqn in jaxpr.eqns:
            held = {i: own[v] for i, v in enumerate(eqn.invars) if type(v) is core.Var and v in own}
            eqns.append(self._equation(eqn, held) if held else eqn)
        self.used.update(own[v] for v in jaxpr.outvars if type(v) is core.Var and v in own)
        made = programs.with_equations(jaxpr, eqns)
        if made is jaxpr:
            return program
        made = reading(made, self.more)
        return made if jaxpr is program else program.replace(jaxpr=made)

    def _equation(self, eqn: Any, held: Mapping[int, core.Var]) -> Any:
        if _is_of_parameter(eqn):
            self.ruled.update(held.values())
            return eqn.replace(invars=replaced(eqn.invars, [*held], held.values()))
        rest, params = dict(held), eqn.params

        def changed(name: str, inner: Any) -> Any:
            invars, own = getattr(inner, "jaxpr", inner).invars, {}
            for i, v in held.items():
                if (place := programs.place_inside(eqn, name, i)) is not None:
                    own[invars[place]] = v
                    rest.pop(i, None)
            return self.program(inner, own)

        if eqn.primitive is not op_p and eqn.primitive.name not in programs.CUSTOM:  # (hidden)
            params = {n: programs.mapped(x, partial(changed, n)) for n, x in params.items()}
        is_remat = programs.name_of(eqn) == programs.REMAT  # (JAX shows its program elsewhere)
        body = programs.remat_body(eqn) if is_remat else None
        same = body is None or changed("", body) is body
        self.used.update(rest.values())
        if same and programs.with_params(eqn, params) is eqn:
            return eqn
        what = "a parameter with rules of two overrides"
        return handing_on(eqn, params, self.more, find_line(eqn, "unknown"), what)


def _is_of_parameter(eqn: Any) -> bool:
    """Return whether an equation computes a parameter under a rule, or the tangent of that."""
    found = eqn.params.get("gradient") or eqn.params.get("tangent")
    while (inner := getattr(found, "one", getattr(found, "base", None))) is not None:
        found = inner
    found = getattr(found, "gradient", found)
    return isinstance(found, RuleGradient) and found.rule.op.type == PARAMETER.type
