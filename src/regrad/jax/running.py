"""JAX functions run equation by equation, forward and backward, under observation.

A function is traced to a program. Calls in the program are opened, and each remaining equation runs
by itself, with its own pull by `jax.vjp`. So there is one step for each op, and it is
differentiated by the same rule as in the whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.tree_util import keystr, tree_flatten_with_path, tree_map, tree_unflatten

from regrad.autodiff.gradients import callable_or_raise
from regrad.core.containers import replaced
from regrad.errors import ArgumentError, GradientError, kind
from regrad.inspection.recorder import Leaf, SeenOp
from regrad.jax.equations import program_of
from regrad.jax.host import OVERRIDES, SIGHT, need
from regrad.jax.host.programs import (
    CALLS,
    as_call,
    as_closed,
    branches,
    called,
    mapped,
    scan,
    with_equations,
    with_params,
)
from regrad.jax.override import TracedCall
from regrad.jax.primitives import is_float
from regrad.jax.sites import OUTERMOST, CallSite, EquationSite, is_custom, is_no_op, site_of
from regrad.jax.surgery import OPENED

OUTERMOST.add(TracedCall.traced.__code__)
LONGEST = 64  # maximum length of scans that run iteration by iteration
CLOSES_OVER = (
    "a function with a custom derivative (jax.custom_vjp, jax.custom_jvp) closes over an array "
    "that is made in the function around it, which JAX cannot differentiate once the program is "
    "traced. Pass that array as an argument."
)


class Value(NamedTuple):
    """An array of a run; its key identifies it."""

    key: int
    x: Any


class ProgramOp(SeenOp):
    """One op that ran: its place, its inputs and outputs, and its pull.

    `pull` takes the gradients of the float outputs (`makes`, of the types `like`) and returns the
    gradients of the watched inputs (`wanted`, their places among the operands). `given` are the
    operands and `outs` the results, if the run keeps them.
    """

    __slots__ = ("by_jax", "eqn", "given", "like", "operands", "outs", "pull", "wanted")

    def __init__(self, site: EquationSite, eqn: Any = None) -> None:
        super().__init__(site.op_type, site.kind, site.rule, site.line, site.path)
        self.operands: Sequence[str] = site.names
        self.by_jax: bool = site.by_jax
        self.eqn: Any = eqn
        self.wanted: Sequence[int] = ()
        self.like: Sequence[Any] = ()
        self.pull: Callable[[list[Any]], Sequence[Any]] | None = None
        self.given: Sequence[Any] = ()
        self.outs: Sequence[Any] = ()

    @property
    def input_names(self) -> list[str]:
        """Return the names of the watched operands."""
        return [self.name(i) for i in self.wanted]

    def name(self, i: int) -> str:
        """Return the name of an operand."""
        return self.operands[i] if i < len(self.operands) else f"x{i}"

    @property
    def title(self) -> str:
        """Return the rule of the op for a message, with the line that ran the op."""
        rule = f"the {self.kind} rule of {self.op_type!r} ({self.rule})"
        where = f", run at {self.line}" if self.line else ""
        return (rule if self.rule else self.op_type) + where

    @property
    def xs(self) -> list[Any]:
        """Return the watched operands."""
        return [self.given[i] for i in self.wanted]

    def again(self, xs: Sequence[Any]) -> list[Any]:
        """Return the float results of the op for other watched operands, under its rule."""
        return self._run(as_function(self.eqn), xs)

    def _run(self, run: Callable[..., Sequence[Any]], xs: Sequence[Any]) -> list[Any]:
        ys = run(*replaced(self.given, self.wanted, xs))
        return [y for y, out in zip(ys, self.outs, strict=True) if is_float(jax.typeof(out))]

    def true(self, dys: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Return the true gradients by the watched operands, with their names."""
        run = core.jaxpr_as_fun(as_closed(without_rules(called(self.eqn))))
        pull = jax.vjp(partial(self._run, run), self.xs)[1]
        return zip(self.input_names, *pull(list(dys)), strict=True)


class ProgramCall:
    """A function of pytrees and its arguments, as a program of its arrays.

    Args:
        f: The function.
        args: The arguments of f. Arrays are inputs, also NumPy arrays, and numbers that are
            arguments themselves.
        api: The name of the tool in messages.
        argnums: The arguments to differentiate by; by default all.
        has_aux: Whether f returns a pair whose second part has no gradient.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        api: str,
        argnums: int | Sequence[int] | None = None,
        has_aux: bool = False,
    ) -> None:
        callable_or_raise(f, api)
        need(OVERRIDES, SIGHT)
        self.api = api
        self.argnums: Any = (argnums,) if isinstance(argnums, int) else argnums
        self.has_aux = has_aux
        args = tuple(_as_input(arg) for arg in args)
        self.call: TracedCall = TracedCall((f, args, dict(kwargs)))
        self.arrays: list[Any] = list(self.call.arrays)
        self.names: list[str] = self._names((f, args, dict(kwargs)))
        floats = [i for i, x in enumerate(self.arrays) if is_float(jax.typeof(x))]
        self.watched: list[int] = [i for i in floats if self._is_asked(self.names[i])]
        if not self.watched:
            raise GradientError(f"{api}: no argument holds floats, so there is no gradient")

    def program(self) -> Any:
        """The function as a program; `results` are the outputs to differentiate."""
        closed = jax.make_jaxpr(self.call.traced)(*self.arrays)
        structure = self.call.out_structure
        count = structure.num_leaves
        if self.has_aux:
            if structure.num_nodes < 3 or len(structure.children()) != 2:
                raise ArgumentError(f"{self.api}: with has_aux=True f must return a pair (y, aux)")
            count = structure.children()[0].num_leaves
        self.results: list[int] = [
            k for k, i in enumerate(self.call.out_places)
            if i < count and is_float(closed.out_avals[k])
        ]  # fmt: skip
        if not self.results:
            raise GradientError(
                f"{self.api}: f must return floats that depend on its arguments, got "
                f"{', '.join(kind(y) for y in self.call.outs[:3]) or 'nothing'}. For functions of "
                "regrad, use the tools of regrad and regrad.testing."
            )
        return closed

    def of_watched(self, program: Any) -> Callable[..., list[Any]]:
        """Return a program of the function as a program of the arrays to differentiate by."""
        run = core.jaxpr_as_fun(program)

        def of_watched(*watched: Any) -> list[Any]:
            ys = run(*replaced(self.arrays, self.watched, watched))
            return [ys[i] for i in self.results]

        return of_watched

    @property
    def floats(self) -> list[Any]:
        """Return the arrays to differentiate by."""
        return [self.arrays[i] for i in self.watched]

    def leaves(self, gradients: Sequence[Any]) -> list[Leaf]:
        """Return leaves with gradients by the arrays to differentiate by."""
        every = zip(self.asked, self.floats, gradients, strict=True)
        return [Leaf(name, "argument", x, dx, None, name) for name, x, dx in every]

    @property
    def asked(self) -> list[str]:
        """The names of the arrays to differentiate by."""
        return [self.names[i] for i in self.watched]

    def value(self, ys: Sequence[Any]) -> Any:
        """Return the result of the function, with `ys` in it."""
        outs = list(self.call.outs)
        for i, y in zip(self.call.out_places, ys, strict=False):
            outs[i] = y
        return tree_unflatten(self.call.out_structure, outs)

    def _names(self, given: Any) -> list[str]:
        """Return a name for each array: `args[0]['w']`."""
        modules = self.call.modules
        leaves, _ = tree_flatten_with_path(given, is_leaf=modules.holds)
        paths = [_path_name(path) for path, _ in leaves]
        names = [paths[i] for i in self.call.places]
        if modules.found:
            holders = [p for p, (_, leaf) in zip(paths, leaves, strict=True) if modules.holds(leaf)]
            state = tree_unflatten(modules.state, modules.arrays)
            found = tree_flatten_with_path(state)[0]
            names += [_name_in_module(path, holders) for path, _ in found]
        return names

    def _is_asked(self, name: str) -> bool:
        if self.argnums is None:
            return True
        return any(name == f"args[{n}]" or name.startswith((f"args[{n}][", f"args[{n}]."))
                   for n in self.argnums)  # fmt: skip


def _as_input(arg: Any) -> Any:
    """Return an argument with JAX arrays for NumPy arrays, and an array for a number."""
    if isinstance(arg, float | complex) and not isinstance(arg, np.generic):
        return jax.numpy.asarray(arg)
    of_numpy = lambda leaf: isinstance(leaf, np.ndarray | np.generic)  # noqa: E731
    return tree_map(
        lambda leaf: jax.numpy.asarray(leaf) if of_numpy(leaf) and is_float(leaf) else leaf, arg
    )


def wide(x: Any) -> Any:
    """Return an array in double precision, if it is an array of floats."""
    if not is_float(jax.typeof(x)):
        return x
    return x.astype("complex128" if jax.numpy.iscomplexobj(x) else "float64")


def _path_name(path: Any) -> str:
    """Return the name of a leaf of (f, args, kwargs)."""
    which, rest = path[0].idx, keystr(path[1:])
    return ("f", "args", "")[which] + rest


def _name_in_module(path: Any, holders: Sequence[str]) -> str:
    """Return the name of an array of an nnx module: `args[0].layers.0.kernel`."""
    keys = [getattr(part, "key", None) for part in path]  # (the last part is an attribute, `value`)
    first = keys[0] if keys else None
    holder = holders[first] if isinstance(first, int) and first < len(holders) else "module"
    return holder + "".join(f".{key}" for key in keys[1:] if key is not None)


class ProgramRun:
    """One run of a program, equation by equation.

    Args:
        program: The result of `jax.make_jaxpr`.
        arrays: Its inputs.
        watched: The inputs to differentiate by, by place.
        results: The outputs whose incoming gradients are 1, by place.
        keeps: Whether to keep the inputs and outputs of each op.
        longest: The maximum length of scans that run iteration by iteration.
    """

    def __init__(
        self,
        program: Any,
        arrays: Sequence[Any],
        watched: Sequence[int],
        results: Sequence[int],
        keeps: bool = False,
        longest: int = LONGEST,
    ) -> None:
        self.keeps = keeps
        self.longest = longest
        self.ran: list[ProgramOp] = []
        self.cuts: list[EquationSite] = []  # sites with watched inputs and no float outputs
        self.count: int = 0
        inputs = [self._value(x) for x in arrays]
        self.sources: list[int] = [inputs[i].key for i in watched]
        self.watched: set[int] = set(self.sources)
        outs = self._run(program, inputs, CallSite())
        self.ys: list[Value] = [outs[i] for i in results]
        self.values: list[Any] = [out.x for out in outs]

    def _value(self, x: Any) -> Value:
        self.count += 1
        return Value(self.count, x)

    # -- forward -----------------------------------------------------------------------------------

    def _run(self, program: Any, ins: Sequence[Value], around: CallSite) -> list[Value]:
        """Run a program on these values."""
        jaxpr = getattr(program, "jaxpr", program)
        env: dict[Any, Value] = {}

        def read(v: Any) -> Value:
            return self._value(v.val) if isinstance(v, core.Literal) else env[v]

        consts = getattr(program, "consts", ()) if jaxpr.constvars else ()
        env.update(zip(jaxpr.constvars, map(self._value, consts), strict=True))
        env.update(zip(jaxpr.invars, ins, strict=True))
        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(v) for v in eqn.invars], around)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Value], around: CallSite) -> list[Value]:
        """Run one equation; calls are opened."""
        name = eqn.primitive.name
        if name in CALLS:
            program = called(eqn)
            return self._run(program, ins, around.inside(eqn, program))
        if name == "cond":
            branch = branches(eqn)[int(ins[0].x)]
            return self._run(branch, ins[1:], around.inside(eqn, branch))
        if name == "scan" and scan(eqn).length <= self.longest:
            return self._scan(eqn, ins, around)
        return self._op(eqn, ins, around)

    def _scan(self, eqn: Any, ins: list[Value], around: CallSite) -> list[Value]:
        """Run a scan, iteration by iteration; slicing the inputs and stacking are not steps."""
        run, length, backwards, fixed, carried = scan(eqn)
        consts, carry, xs = ins[:fixed], ins[fixed : fixed + carried], ins[fixed + carried :]
        inner = around.inside(eqn, run)
        if not length:
            return self._op(eqn, ins, around)
        # (Unstacking and stacking are not ops of the user's.)
        rounds = [self._apply(ProgramOp(EquationSite("")), jax.numpy.unstack, [x]) for x in xs]
        made: list[Any] = [None] * length
        for i in reversed(range(length)) if backwards else range(length):
            path = f"{inner.path}/scan[{i}]" if inner.path else f"scan[{i}]"
            given = [*consts, *carry, *(x[i] for x in rounds)]
            outs = self._run(run, given, inner._replace(path=path))
            carry, made[i] = outs[:carried], outs[carried:]
        stack = lambda *ys: [jax.numpy.stack(ys)]  # noqa: E731
        wholes = [
            self._apply(ProgramOp(EquationSite("")), stack, ys) for ys in zip(*made, strict=True)
        ]
        return [*carry, *[whole for (whole,) in wholes]]

    def _op(self, eqn: Any, ins: list[Value], around: CallSite) -> list[Value]:
        """Run an equation by itself."""
        site = EquationSite("") if is_no_op(eqn) else site_of(eqn, around)
        may_pass = any(is_float(v.aval) for v in eqn.outvars)
        if not may_pass and not around.in_jax and any(x.key in self.watched for x in ins):
            self.cuts.append(site)
        return self._apply(ProgramOp(site, eqn), as_function(eqn), ins, may_pass)

    def _apply(
        self, op: ProgramOp, run: Callable[..., Any], ins: Sequence[Value], may_pass: bool = True
    ) -> list[Value]:
        """Run an op, with its pull if a gradient may pass it."""
        xs = [x.x for x in ins]
        op.wanted = [i for i, x in enumerate(ins) if may_pass and x.key in self.watched]
        op.takes = [ins[i].key for i in op.wanted]

        def of_wanted(*moved: Any) -> tuple[list[Any], list[Any]]:
            ys = run(*replaced(xs, op.wanted, moved))
            floats = [is_float(jax.typeof(y)) for y in ys]
            others = [None if is_float else y for y, is_float in zip(ys, floats, strict=True)]
            return [y for y, is_float in zip(ys, floats, strict=True) if is_float], others

        with _telling(op):
            if op.wanted:
                moved = [xs[i] for i in op.wanted]
                floats, op.pull, others = jax.vjp(of_wanted, *moved, has_aux=True)
            else:
                floats, others = [], run(*xs)
        rest = iter(floats)
        outs = [self._value(next(rest) if y is None else y) for y in others]
        if op.wanted:
            passing = [y for y in outs if is_float(jax.typeof(y.x))]
            op.makes = [y.key for y in passing]
            op.like = [jax.typeof(y.x) for y in passing]
            self.watched.update(op.makes)
        if self.keeps:
            op.given, op.outs = xs, [y.x for y in outs]
        if op.wanted or self.keeps:
            self.ran.append(op)
        return outs

    # -- backward ----------------------------------------------------------------------------------

    def backward(self) -> Iterator[tuple[ProgramOp, list[Any], list[Any]]]:
        """Yield the backward pass, step by step: each op, its incoming and its outgoing gradients.

        When it is done, `gradients` has the gradients by the inputs, or None where there is none.
        """
        dys: dict[int, Any] = {}
        for y in self.ys:
            if y.key in self.watched:
                _add(dys, y.key, jax.numpy.ones_like(y.x))
        for ran in reversed(self.ran):
            if ran.pull is None or not any(key in dys for key in ran.makes):
                continue
            arrived = [_taken(dys, key, a) for key, a in zip(ran.makes, ran.like, strict=True)]
            with _telling(ran):
                left = list(ran.pull(arrived))
            if ran.op_type:
                yield ran, arrived, left
            for key, dx in zip(ran.takes, left, strict=True):
                _add(dys, key, dx)
        self.gradients: list[Any | None] = [dys.get(key) for key in self.sources]


@contextmanager
def _telling(site: Any) -> Iterator[None]:
    """Add the place of the op to errors."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise GradientError(f"{site.op_type} at {site.line}: {CLOSES_OVER}") from error
    except Exception as error:
        error.add_note(f"regrad: in {site.op_type} at {site.line}")
        raise


def as_function(eqn: Any) -> Callable[..., list[Any]]:
    """Return an equation as a function of its operands, including constant operands."""
    program = program_of(eqn)
    places = [i for i, v in enumerate(eqn.invars) if not isinstance(v, core.Literal)]
    run = core.jaxpr_as_fun(program)
    return lambda *xs: list(run(*[xs[i] for i in places]))


def _taken(dys: dict[int, Any], key: int, like: Any) -> Any:
    """Return the incoming gradient of an output, or zeros."""
    found = dys.pop(key, None)
    return jax.numpy.zeros(like.shape, like.dtype) if found is None else found


def _add(dys: dict[int, Any], key: int, dx: Any) -> None:
    dys[key] = dx if key not in dys else dys[key] + dx


# -- rules off -------------------------------------------------------------------------------------


def without_rules(program: Any) -> Any:
    """Return a program (closed or open) that uses JAX's own derivatives only."""
    jaxpr = getattr(program, "jaxpr", program)
    made = with_equations(jaxpr, [_without_rule(eqn) for eqn in jaxpr.eqns])
    return made if program is jaxpr else program.replace(jaxpr=made)


def _without_rule(eqn: Any) -> Any:
    if is_custom(eqn):
        return as_call(eqn, as_closed(without_rules(called(eqn))))
    if eqn.primitive.name not in OPENED:
        return eqn
    params = {key: mapped(value, without_rules) for key, value in eqn.params.items()}
    return with_params(eqn, params)
