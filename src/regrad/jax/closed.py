"""Functions with a derivative of their own that hold an overridden op: opened, or left closed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from regrad.errors import ArgumentError, GradientError, PassedOverError, kind
from regrad.jax.host import programs
from regrad.jax.host.programs import JAX, codes, source
from regrad.jax.keys import find_definition

CARRIERS = (functools.__file__, contextlib.__file__, "<")  # call what others wrote


class Closed(NamedTuple):
    """A function that was left closed, and the keys whose ops are inside.

    `own` says that the function is JAX's, and so are these ops; `kept`, that the user said so.
    """

    name: str
    place: str
    where: str
    keys: frozenset[str]
    own: bool
    kept: bool


class ClosedFunctionPolicy:
    """The functions with a derivative of their own that are to be opened, or to be kept."""

    def __init__(self, open: Iterable[Any], keep: Iterable[Any]) -> None:
        self.open: list[str] = [_name_of("open", each) for each in _check_list("open", open)]
        self.keep: list[str] = [_name_of("keep", each) for each in _check_list("keep", keep)]
        both = [name for name in self.open if name in self.keep]
        if both:
            raise ArgumentError(f"override: {both[0]!r} is in open= and in keep=; name it in one")

    def opens(self, body: core.Jaxpr | core.ClosedJaxpr) -> bool:
        """Return whether a function is to be differentiated op by op."""
        return not _names(body).isdisjoint(self.open)

    def keeps(self, body: core.Jaxpr | core.ClosedJaxpr) -> bool:
        """Return whether a function is to keep its derivative."""
        return not _names(body).isdisjoint(self.keep)


def _check_list(what: str, given: Any) -> Iterable[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(
            f"override: {what}= expected a list of names or functions, got {kind(given)}; "
            f"write {what}=[{given!r:.40}]"
        )
    return given


def _name_of(what: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    if not callable(given):
        raise ArgumentError(
            f"override: {what}= expected names or functions, got {given!r:.60} ({kind(given)})"
        )
    with contextlib.suppress(ArgumentError):
        return " at ".join(find_definition(given))
    raise ArgumentError(
        f"override: {what}= cannot find {given!r:.60} in a program; pass its name as a string"
    )


def _names(body: core.Jaxpr | core.ClosedJaxpr) -> set[str]:
    name, place = name_and_place(body)
    return {name, f"{name} at {place}"}


def name_and_place(body: core.Jaxpr | core.ClosedJaxpr) -> tuple[str, str]:
    """The name of the function that a program was made of, and where it was written."""
    name, _, place = source(body).partition(" at ")
    return name or "a function", place


def of_jax(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, around: Sequence[Any]) -> bool:
    """Return whether an equation of a program comes from code of JAX's alone.

    A function of JAX's may call functions that it was given; then their code stands between. If
    the function itself is nowhere, JAX has inlined it: then whoever called it stands there, as in
    the equations `around`.
    """
    place = name_and_place(jaxpr)[1]
    if not place.startswith(JAX):
        return False
    caller = None
    for code, at in codes(eqn):
        if f"{code.co_filename}:{code.co_firstlineno}" == place:
            return caller is None
        if caller is None and not _is_jax(code):
            caller = code, at
    return caller is None or any(caller == _caller(each) for each in around)


def _is_jax(code: Any) -> bool:
    return code.co_filename.startswith((JAX, *CARRIERS))


def _caller(eqn: core.JaxprEqn) -> Any:
    return next(((code, at) for code, at in codes(eqn) if not _is_jax(code)), None)


def check_solve(bindings: Sequence[Any], where: str) -> None:
    """Refuse rules for the first derivative alone in the map of a linear solve."""
    once = [binding for binding in bindings if binding.once and not binding.native]
    if once:
        raise GradientError(
            f"override: {once[0].op_type!r} occurs in a linear solve ({where}), which JAX "
            "differentiates as a whole, by the rule at every order, and the rule has order=1. "
            "Solve outside of the function, or let the rules hold at every order (order=None)."
        )


def advice(closed: Sequence[Closed]) -> str:
    """Return where these functions are, and how to open or keep them."""
    each = dict.fromkeys(
        f"{c.name} ({c.place.removeprefix(JAX)}, called in {c.where}) computes "
        f"{', '.join(map(repr, sorted(c.keys)))}"
        for c in closed
    )
    said = f"{'; '.join(each)}, and has a derivative of its own"
    if all(c.kept for c in closed):
        return f"{said}, which keep= leaves as it is."
    names = ", ".join(repr(name) for name in dict.fromkeys(c.name for c in closed if not c.kept))
    return (
        f"{said}, so no rule would run inside. "
        f"Pass open=[{names}] to differentiate it op by op, or keep=[{names}] to leave it as it is."
    )


def name_of(eqn: core.JaxprEqn, body: Any) -> str:
    """Return the name of a function with a derivative of its own."""
    return programs.name_of(eqn) if body is None else name_and_place(body)[0]


# -- ops that rules cannot reach -------------------------------------------------------------------


def derived_error(binding: Any, where: str, how: str = "occurs") -> GradientError:
    """Return the error for an op that the function differentiates itself."""
    return GradientError(
        f"override: {binding.key.label!r} {how} where the function differentiates it itself "
        f"({where}), which JAX has done before the rule could count. Put the override inside: "
        "jax.grad(rg.jax.override(loss, …)), and leave the rest of the function outside."
    )


def batched_error(binding: Any, where: str) -> GradientError:
    """Return the error for an op that was batched before single examples could be seen."""
    return GradientError(
        f"override: {binding.key.label!r} occurs in a program that was batched before the override "
        f"could see single examples ({where}): by a vmap with spmd_axis_name, of a custom_vmap, or "
        "outside of the function that is called. Put the vmap outside, "
        "jax.vmap(rg.jax.override(f, …))."
    )


def hidden_error(inner: Any, whole: Any, where: str) -> PassedOverError:
    """Return the error for an op inside of a call that has a rule as a whole."""
    return PassedOverError(
        f"override: {inner.shown} occurs inside of a call that has a rule as a whole by "
        f"{whole.place!r} ({where}): that decides, and the other rule would never run. Name other "
        f"modules, or pass keep=[{whole.place!r}]."
    )
