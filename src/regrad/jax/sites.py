"""Sites: an equation of a JAX program as its user sees it, with op, line, rule and operands."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend import core

from regrad.core.callers import PACKAGE
from regrad.core.foreign import USUAL
from regrad.core.rule import place
from regrad.inspection.recorder import RuleKind, SeenOp
from regrad.jax.closed import name_and_place
from regrad.jax.custom import CustomGradient
from regrad.jax.gradients import CountedGradient, RuleGradient
from regrad.jax.host.functions import rule_note
from regrad.jax.host.programs import (
    COMPOSED,
    CUSTOM,
    JAX,
    JITS,
    arg_names,
    called,
    codes,
    lines,
    scopes,
)
from regrad.jax.modules import CLASS, MARK
from regrad.jax.primitives import EquationGradient, op_p, tie_p

# Libraries for models: the user's line that called one is more useful than a line inside it.
LIBRARIES = ("flax", "haiku", "equinox", "optax", "jaxtyping", "beartype", "numpyro", "chex")
OUTERMOST: set[Any] = set()  # code by which a tool calls the user's function
# files of code that calls the user's functions
CARRIERS = (functools.__file__, contextlib.__file__, "<frozen ")
OPERANDS = {
    "select_n": ("condition", "b", "a"),
    "clamp": ("low", "x", "high"),
    "scatter-add": ("x", "indices", "updates"),
}


@dataclass(slots=True, eq=False)
class EquationSite(SeenOp):
    """An op at its place, with the names of its operands; without a type if not the user's."""

    names: Sequence[str] = ()
    by_jax: bool = False  # made by a JAX function (a softmax), and not by the user


class CallSite(NamedTuple):
    """The surroundings of an equation: the line and scope of the call, and the called function."""

    line: str = ""
    path: str = ""
    called: str = ""

    @property
    def in_jax(self) -> bool:
        """True if the called function belongs to JAX."""
        return self.called.startswith(JAX)

    def inside(self, eqn: core.JaxprEqn, body: Any) -> CallSite:
        """Return the surroundings of the equations in a program that an equation here calls."""
        return CallSite(_line_of(eqn, self), _path_of(eqn, self), name_and_place(body)[1])


def site_of(eqn: core.JaxprEqn, around: CallSite) -> EquationSite:
    """Return the site of an equation: its op, and its place."""
    op_type, kind, rule = _rule_of(eqn)
    names = _operand_names(eqn)
    line, by_jax = _line_of(eqn, around), _is_by_jax(eqn, around)
    path = _path_of(eqn, around)
    return EquationSite(op_type, kind, rule, line, path, names=names, by_jax=by_jax)


def is_custom(eqn: core.JaxprEqn) -> bool:
    """Return whether the equation has a rule of the user's, or of a library other than JAX."""
    return _rule_of(eqn)[1] != "built-in"


def is_no_op(eqn: Any) -> bool:
    """Return whether the user did not write the equation: a count, a tie, a stronger type."""
    if eqn.primitive is tie_p:
        return True
    if eqn.primitive is op_p:
        return isinstance(_bare(eqn.params["gradient"]), CountedGradient)
    if eqn.primitive.name != "convert_element_type":
        return False
    return eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype


def is_number(aval: Any) -> bool:
    """Return whether NumPy can read an array of this type (it cannot read random keys)."""
    return not jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)


# -- whose rule ------------------------------------------------------------------------------------


def _rule_of(eqn: core.JaxprEqn) -> tuple[str, RuleKind, str]:
    """Return the op type, the kind of its rule, and the rule's name and place."""
    if eqn.primitive is op_p:
        return _ours(eqn)
    if eqn.primitive.name not in CUSTOM:
        return eqn.primitive.name, "built-in", ""
    name, where = name_and_place(called(eqn))
    if where.startswith(JAX):  # (jax.nn.relu has such a rule: for its users it is an op)
        return name, "built-in", ""
    return name, "custom", _source_of_rule(eqn) or f"{name}, {where}"


def _source_of_rule(eqn: core.JaxprEqn) -> str:
    """Return the name and place of the function that is the rule, as JAX records it."""
    name, _, where = rule_note(eqn).partition(" at ")
    return "" if where.startswith((JAX, PACKAGE)) or not where else f"{name}, {where}"


def _ours(eqn: core.JaxprEqn) -> tuple[str, RuleKind, str]:
    gradient = _bare(eqn.params["gradient"])
    if isinstance(gradient, CountedGradient):
        return "", "built-in", ""
    if isinstance(gradient, RuleGradient):
        rule = gradient.rule.rule
        inner = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"]).eqns
        op_type = inner[0].primitive.name if len(inner) == 1 else gradient.hit.op_type
        op_type = gradient.hit.op_type if op_type in JITS | CUSTOM else op_type
        return op_type, "override", place(rule.function) if rule.function else rule.name
    if isinstance(gradient, CustomGradient):
        return gradient.call.name, "custom", place(gradient.call.f)
    return gradient.name, "custom", gradient.name


def _bare(gradient: EquationGradient) -> EquationGradient:
    """Return a gradient without the wrappers that batch or scale it."""
    while (one := getattr(gradient, "one", None)) is not None:
        gradient = one
    return gradient


# -- where -----------------------------------------------------------------------------------------


def _line_of(eqn: core.JaxprEqn, around: CallSite) -> str:
    """Return the innermost line of the user's code that made an equation.

    JAX caches the programs of its own functions with the lines that called them first, so behind
    such a function, the line of the surrounding call is used.
    """
    otherwise = ""
    libraries = _library_folders()
    for code, file, number in frames(eqn):
        line = f"{file}:{number}"
        if not file.startswith((PACKAGE, JAX, *libraries, *CARRIERS)):
            return line
        if code in OUTERMOST or f"{file}:{code.co_firstlineno}" == around.called:
            break
        if file.startswith(libraries):
            otherwise = otherwise or line
    return around.line or otherwise


def _is_by_jax(eqn: core.JaxprEqn, around: CallSite) -> bool:
    """Return whether a composite JAX function ran the op."""
    for code, file, _ in frames(eqn):
        if not file.startswith((PACKAGE, JAX, *CARRIERS)):
            return False
        if file.startswith(COMPOSED):
            return True
        if f"{file}:{code.co_firstlineno}" == around.called:
            break
    return around.in_jax


def frames(eqn: core.JaxprEqn) -> Iterator[tuple[Any, str, int]]:
    """Yield the code that was running at an equation, with file and line, innermost first."""
    for (code, _), (file, number) in zip(codes(eqn), lines(eqn), strict=False):
        yield code, file, number


def _library_folders() -> tuple[str, ...]:
    """Return the folders of the loaded libraries."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in LIBRARIES]
    return tuple([os.path.dirname(file) + os.sep for file in files if file])


def _path_of(eqn: core.JaxprEqn, around: CallSite) -> str:
    """Return the module and the name scopes around an equation, without the scopes of einsum."""
    path = around.path
    for name in scopes(eqn):
        if name.startswith((CLASS, "eqx.")):
            kind = name.rpartition(".")[2]
            name = "" if kind in path.rpartition("/")[2] else kind
        elif name.startswith(MARK):
            path, name = name.removeprefix(MARK), ""
        path = "/".join(filter(None, (path, "" if "->" in name else name)))
    return path


# -- operands --------------------------------------------------------------------------------------


def _operand_names(eqn: core.JaxprEqn) -> Sequence[str]:
    """Return a name for each operand."""
    count = len(eqn.invars)
    given: Sequence[Any] = ()
    if eqn.primitive is op_p:
        given = _names_in_rule(_bare(eqn.params["gradient"]), count)
    elif eqn.primitive.name in CUSTOM:
        given = arg_names(called(eqn))
    if len(given) == count and all(given):
        return [str(name) for name in given]
    known = OPERANDS.get(eqn.primitive.name, ())
    if len(known) == count:
        return known
    return USUAL.get(count, [f"x{i}" for i in range(count)])


def _names_in_rule(gradient: EquationGradient, count: int) -> Sequence[Any]:
    """Return the names of the operands in a regrad rule, or nothing without such a rule."""
    if isinstance(gradient, CustomGradient):
        names = gradient.call.arguments.names
        return [*(f"outside[{i}]" for i in range(gradient.outside)), *names]
    if not isinstance(gradient, RuleGradient) or len(gradient.places) != count:
        return ()
    inputs = gradient.rule.op.inputs
    return [
        inputs[p].name if isinstance(p, int) and p < len(inputs) else p or f"x{i}"
        for i, p in enumerate(gradient.places)
    ]
