"""Functions with a custom derivative that contain an overridden op: opened, or left closed."""

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

# files of code that calls the user's functions
CARRIERS = (functools.__file__, contextlib.__file__, "<")


class Closed(NamedTuple):
    """A function that was left closed, and the keys whose ops it contains.

    `own` means that the function and these ops belong to JAX; `kept` means that the user named it
    in keep=.
    """

    name: str
    place: str
    where: str
    keys: frozenset[str]
    own: bool
    kept: bool


class ClosedFunctionPolicy:
    """The functions with a custom derivative that the user wants to open or to keep."""

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
            f"override: expected {what}= to be a list of names or functions, got {kind(given)}; "
            f"write {what}=[{given!r:.40}]"
        )
    return given


def _name_of(what: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    if not callable(given):
        raise ArgumentError(
            f"override: expected {what}= to contain names or functions, got {given!r:.60} "
            f"({kind(given)})"
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
    """Return the name and the source location of the function from which a program was made."""
    name, _, place = source(body).partition(" at ")
    return name or "a function", place


def of_jax(jaxpr: core.Jaxpr, eqn: core.JaxprEqn, around: Sequence[Any]) -> bool:
    """Return whether an equation of a program comes from JAX's own code alone.

    A JAX function may call functions that were passed to it; the user's code is then between the
    frames. If the function itself has no frame, JAX has inlined it, and the frame of its caller is
    there instead, as in the equations `around`.
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
    """Raise for rules with order=1 in the map of a linear solve."""
    once = [binding for binding in bindings if binding.once and not binding.native]
    if once:
        raise GradientError(
            f"override: {once[0].op_type!r} occurs in a linear solve ({where}), which JAX "
            "differentiates as a whole, with the rule at every order, and the rule has order=1. "
            "Move the solve out of the function, or apply the rules at every order (order=None)."
        )


def advice(closed: Sequence[Closed]) -> str:
    """Return where these functions are, and how to open or keep them."""
    each = dict.fromkeys(
        f"{c.name} ({c.place.removeprefix(JAX)}, called in {c.where}) computes "
        f"{', '.join(map(repr, sorted(c.keys)))}"
        for c in closed
    )
    said = f"{'; '.join(each)}, and has a custom derivative"
    if all(c.kept for c in closed):
        return f"{said}, which keep= leaves unchanged."
    names = ", ".join(repr(name) for name in dict.fromkeys(c.name for c in closed if not c.kept))
    return (
        f"{said}, so no rule would run inside. Pass open=[{names}] to differentiate it op by op, "
        f"or keep=[{names}] to leave it unchanged."
    )


def name_of(eqn: core.JaxprEqn, body: Any) -> str:
    """Return the name of a function with a custom derivative."""
    return programs.name_of(eqn) if body is None else name_and_place(body)[0]


# -- ops that rules cannot reach -------------------------------------------------------------------


def derived_error(binding: Any, where: str, how: str = "occurs") -> GradientError:
    """Return the error for an op that the function differentiates itself."""
    return GradientError(
        f"override: {binding.key.label!r} {how} where the function differentiates it itself "
        f"({where}), which happened before the rule could apply. Put the override inside: "
        "jax.grad(rg.jax.override(loss, …)), and leave the rest of the function outside."
    )


def batched_error(binding: Any, where: str) -> GradientError:
    """Return the error for an op that was batched before the override saw single examples."""
    return GradientError(
        f"override: {binding.key.label!r} occurs in a program that was batched before the "
        f"override could see single examples ({where}): by a vmap with spmd_axis_name, of a "
        "custom_vmap, or outside of the called function. Put the vmap outside, "
        "jax.vmap(rg.jax.override(f, …))."
    )


def hidden_error(inner: Any, whole: Any, where: str) -> PassedOverError:
    """Return the error for an op inside of a call that has a rule for the whole call."""
    return PassedOverError(
        f"override: {inner.shown} occurs inside of a call that has a rule for the whole call by "
        f"{whole.place!r} ({where}): the rule for the call has priority, and the other rule would "
        f"never run. Name other modules, or pass keep=[{whole.place!r}]."
    )
