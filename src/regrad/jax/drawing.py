"""`draw` for JAX functions: the equations of the traced program, in their scopes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from regrad.autodiff.gradients import callable_or_raise
from regrad.inspection.drawings import BoxKind, Drawing, Sketch, scopes_of, spec_of
from regrad.jax.host import SIGHT, need
from regrad.jax.host.programs import CALLS, CUSTOM, runs
from regrad.jax.primitives import op_p
from regrad.jax.sites import CallSite, EquationSite, is_no_op, site_of

# Equations that are drawn as a scope, with the equations of their bodies inside.
OPENED = CALLS | {"scan", "shard_map", "while", "cond"}


def draw(f: Callable[..., Any], *args: Any, gradients: bool = False) -> Drawing:
    """Return a picture of the computation of a JAX function.

    Args:
        f: A function of arrays and pytrees of them, with or without `jax.jit`.
        args: The arguments of f; only shapes and dtypes of arrays matter (`jax.ShapeDtypeStruct` is
            accepted).
        gradients: Whether to draw the program of `jax.value_and_grad(f)` by the first argument.

    Returns:
        A `Drawing`, as in `regrad.draw`: one box for each equation of the program, in the name
        scopes of Flax, Haiku and `jax.named_scope`, and in the jitted functions, loops and branches
        around it. Functions with a custom derivative and ops under a rule of `regrad.jax.override`
        are highlighted and name their rules.

    Raises:
        ArgumentError: f is not callable.

    >>> import jax.numpy as jnp, regrad as rg
    >>> drawing = rg.jax.draw(lambda x: jnp.sin(x) * 2.0, 1.0)
    >>> [box.lines[0] for box in drawing.boxes]
    ['args[0]', 'sin', 'mul']
    """
    callable_or_raise(f, "draw")
    need(SIGHT)
    run = jax.value_and_grad(f) if gradients else f
    closed = jax.make_jaxpr(run)(*args)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(args)[0]]
    names = ["args" + jax.tree_util.keystr(path) for path in paths]
    sketch = _ProgramSketch()
    for path, name, variable in zip(paths, names, closed.jaxpr.invars, strict=True):
        # A leaf of a container is a parameter, and is drawn where it is used.
        kind: BoxKind = "variable" if len(path) > 1 else "input"
        label = jax.tree_util.keystr(path[-1:], simple=True) if len(path) > 1 else name
        sketch.add_source(variable, name, _spec(variable.aval), kind, label)
    for i, variable in enumerate(closed.jaxpr.constvars):
        spec = _spec(variable.aval)
        sketch.add_source(variable, f"constant {i}", spec, "constant", "constant")
    sketch.body(closed.jaxpr, CallSite(), ())
    used = {source for source, _ in sketch.arrows}  # (a constant may be unused)
    title = getattr(f, "__name__", type(f).__name__)
    return sketch.drawing(title, lambda box: box.kind != "constant" or box.name in used)


class _ProgramSketch(Sketch):
    """A picture of a program; the keys of its values are the program's variables."""

    def body(self, jaxpr: core.Jaxpr, around: CallSite, scope: tuple[str, ...]) -> None:
        """Draw the equations of a program in a scope."""
        names: dict[str, int] = {}
        for eqn in jaxpr.eqns:
            bodies = list(_bodies(eqn))
            if bodies:
                self._open(eqn, bodies, around, scope, names)
            elif is_no_op(eqn):
                self._pass(eqn.invars, eqn.outvars)
            else:
                self._box(eqn, site_of(eqn, around), scope)

    def _pass(self, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Register the targets as other names of the sources."""
        for source, target in zip(sources, targets, strict=False):
            if not isinstance(source, core.Literal) and source in self.made:
                self.made[target] = self.made[source]

    def _open(
        self, eqn: core.JaxprEqn, bodies: Sequence[core.Jaxpr], around: CallSite,
        scope: tuple[str, ...], names: dict[str, int],
    ) -> None:  # fmt: skip
        """Draw the program that an equation runs as a separate scope."""
        site = site_of(eqn, around)
        name = str(eqn.params.get("name") or eqn.primitive.name).strip("<>")
        count = names[name] = names.get(name, -1) + 1
        inner = (*scope, *scopes_of(site.path, "/"), f"{name}_{count}" if count else name)
        for jaxpr in bodies:
            # (The last operands are the operands of the body: a branch's come after its index.)
            self._pass(eqn.invars[-len(jaxpr.invars) or len(eqn.invars) :], jaxpr.invars)
            self.body(jaxpr, around.inside(eqn, jaxpr), inner)
            self._pass(jaxpr.outvars, eqn.outvars)

    def _box(self, eqn: core.JaxprEqn, site: EquationSite, scope: tuple[str, ...]) -> None:
        details = {"line": site.line, "primitive": eqn.primitive.name}
        if eqn.primitive is not op_p and eqn.primitive.name not in CUSTOM:
            details.update((k, f"{v!r:.200}") for k, v in eqn.params.items() if v is not None)
        lines = [site.op_type, ", ".join(_spec(v.aval) for v in eqn.outvars)]
        scope = (*scope, *scopes_of(site.path, "/"))
        takes = [(v, _spec(v.aval)) for v in eqn.invars if not isinstance(v, core.Literal)]
        self.add_op(site, lines, scope, details, takes, eqn.outvars)


def _bodies(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yield the programs that an equation runs, if it is drawn as a scope."""
    for program in runs(eqn) if eqn.primitive.name in OPENED else ():
        yield getattr(program, "jaxpr", program)


def _spec(aval: Any) -> str:
    return spec_of(getattr(aval, "dtype", ""), getattr(aval, "shape", ()))
