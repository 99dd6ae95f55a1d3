"""`saved_bytes` for JAX functions: the residuals of `jax.vjp`, and what made them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from regrad.autodiff.gradients import callable_or_raise
from regrad.core.signatures import helpful
from regrad.inspection.saved import SavedBytes
from regrad.jax.host.programs import branches, called
from regrad.jax.running import CALLS, Given
from regrad.jax.sites import Around, line_of, path_of, site_of


class Origin(NamedTuple):
    """The origin of an array: an op with its line and scope; an argument has neither."""

    op_type: str
    line: str = ""
    path: str = ""


@helpful("saved_bytes")
def saved_bytes(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
) -> Callable[..., SavedBytes]:
    """Return a function that tells what the backward pass of `f` keeps in memory.

    Args:
        f: A function as `trace_gradients` takes it.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.

    Returns:
        A function of f's arguments that returns `SavedBytes`: the arrays that `jax.vjp` keeps,
        by the primitive that made them and the line of your code that ran it; `"argument"` are
        arrays that are differentiated by, `"constant"` others that were there before. Nothing is
        computed: f is traced. `jax.checkpoint` keeps what its policy says. What XLA, compiling
        value and gradient together, finds to be needed no longer, or cheaper to compute again, is
        counted.

    Raises:
        ArgumentError, GradientError: as `trace_gradients`.

    >>> import jax.numpy as jnp, regrad as rg
    >>> saved = rg.jax.saved_bytes(lambda x: jnp.sum(jnp.sin(x + 1.0)))(jnp.zeros(256, "float32"))
    >>> saved.total, saved.rows[0].op_type
    (1024, 'cos')
    """
    callable_or_raise(f, "saved_bytes")

    def measured(*args: Any, **kwargs: Any) -> SavedBytes:
        given = Given(f, args, kwargs, "saved_bytes", argnums, has_aux)
        of_watched = given.of_watched(given.program())

        def kept(*watched: Any) -> Any:
            return jax.tree_util.tree_leaves(jax.vjp(of_watched, *watched)[1])

        closed = jax.make_jaxpr(kept)(*[given.arrays[i] for i in given.watched])
        return SavedBytes.of(_kept(closed.jaxpr))

    return measured


def _kept(jaxpr: Any) -> Iterator[tuple[str, str, str, int]]:
    """Each array among the results of a program, once: op type, line, path, bytes."""
    seen = set()
    for v in jaxpr.outvars:
        if isinstance(v, core.Literal) or v in seen or not hasattr(v.aval, "dtype"):
            continue
        seen.add(v)
        size = int(np.prod(v.aval.shape)) * v.aval.dtype.itemsize
        if size:
            op_type, line, path = _origin(jaxpr, v, Around())
            yield op_type, line, path, size


def _origin(jaxpr: Any, v: Any, around: Around) -> Origin:
    """Return what made a variable of a program; calls are opened."""
    made = {out: (eqn, i) for eqn in jaxpr.eqns for i, out in enumerate(eqn.outvars)}
    if v not in made:
        return Origin("constant" if v in jaxpr.constvars else "argument")
    eqn, i = made[v]
    site = site_of(eqn, around)
    found = Origin(site.op_type, site.line, site.path)
    for program in _bodies(eqn):
        inner = getattr(program, "jaxpr", program)
        y = inner.outvars[i]
        if isinstance(y, core.Literal):
            return found
        within = around.inside(program, line_of(eqn, around), path_of(eqn, around))
        origin = _origin(inner, y, within)
        if origin.op_type != "argument":
            return origin
        if y in inner.invars and eqn.primitive.name in CALLS:
            return _origin(jaxpr, eqn.invars[inner.invars.index(y)], around)
    return found


def _bodies(eqn: core.JaxprEqn) -> Sequence[Any]:
    """The programs whose results are those of an equation."""
    name = eqn.primitive.name
    if name in CALLS or name == "scan":
        return [called(eqn)]
    return branches(eqn) if name == "cond" else ()
