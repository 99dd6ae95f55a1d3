"""The inspection tools for unedited JAX functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.extend import core

from regrad.checking import differences
from regrad.core.signatures import helpful
from regrad.inspection import comparisons, nonfinite, paths, saved, traces
from regrad.inspection.comparisons import RTOL, GradientComparison
from regrad.inspection.nonfinite import CURES, NonFinite
from regrad.inspection.paths import GradientPath
from regrad.inspection.recorder import Kept, Leaf, Named, Recording, RunRecorder, Tool
from regrad.inspection.saved import SavedBytes
from regrad.inspection.traces import GradientTrace
from regrad.jax.bridge import conjugate
from regrad.jax.host.programs import CALLS, Params, runs
from regrad.jax.optypes import targets_of
from regrad.jax.primitives import is_float
from regrad.jax.running import LONGEST, ProgramCall, ProgramRun, wide, without_rules
from regrad.jax.sites import CallSite, is_number, site_of

# The op types that have known remedies, by JAX's primitives.
OP_TYPES = {target.name: op_type for op_type in CURES for target in targets_of(op_type)}
OP_TYPES |= {"exp2": "Exp", "cbrt": "Sqrt"}
SEARCHED = 4096  # maximum length of scans that are opened if a NaN begins in one


@helpful("trace_gradients")
def trace_gradients(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    longest_scan: int = LONGEST,
) -> Callable[..., GradientTrace]:
    """Return a function that runs `f` and its backward pass, and reports the ops that ran there.

    Args:
        f: A function of JAX arrays and pytrees of them, which is not edited: a loss, a bound
            `apply`, the result of `override`. It returns a scalar, or arrays, whose elements get
            the incoming gradient 1.
        argnums: The arguments to differentiate by; by default all that hold floats, and f itself if
            it is a pytree (a module of Equinox).
        has_aux: Whether f returns a pair whose second part has no gradient.
        longest_scan: The longest `jax.lax.scan` that is opened, iteration by iteration; a longer
            scan is one step.

    Returns:
        A function of f's arguments that returns a `GradientTrace`: one step for each primitive that
        the backward pass ran through, in order. A step has its rule (JAX's own, an `override`, or a
        `jax.custom_vjp` or `jax.custom_jvp`, with its place), the line of your code that ran it,
        the name scopes around it (for example of Flax and Haiku modules), and statistics of the
        gradients that arrived and left. Calls of `jit`, `checkpoint`, `cond` and short scans are
        opened. JAX's own functions with a custom derivative (`jax.nn.relu`) are one step each, and
        count as built-in. `cuts` are ops that turn differentiated values into integers or bools,
        which have no gradient.

    Raises:
        ArgumentError: f is not callable, or returns no pair with `has_aux=True`.
        GradientError: No selected argument holds floats, or f returns none.

    >>> import jax.numpy as jnp, regrad as rg
    >>> trace = rg.jax.trace_gradients(lambda x: jnp.sum(jnp.sin(x * x)))(jnp.array([1.0, 2.0]))
    >>> [step.op_type for step in trace.steps]
    ['reduce_sum', 'sin', 'mul']
    """
    return traces.traced(
        JaxRecorder(f, "trace_gradients", longest_scan, argnums=argnums, has_aux=has_aux)
    )


@helpful("find_nan")
def find_nan(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    longest_scan: int = LONGEST,
) -> Callable[..., NonFinite | None]:
    """Return a function that runs `f` forward and backward, and finds the first NaN or infinity.

    Args:
        f: A function as in `trace_gradients`, with the same options.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.
        longest_scan: See `trace_gradients`.

    Returns:
        A function of f's arguments that returns a `NonFinite`, or None if value and gradients are
        finite. It has the primitive, the line of your code that ran it, the scope, the element, the
        op's inputs at that element, and the usual remedy. If an argument is not finite at the
        start, it is reported as the origin. An infinity that affects nothing (a mask of `-inf`
        before a softmax) is not reported; an infinity behind a mask is found through its effect on
        the gradient.

    Raises:
        ArgumentError, GradientError: As in `trace_gradients`.

    >>> import jax.numpy as jnp, regrad as rg
    >>> found = rg.jax.find_nan(lambda x: jnp.log(x).sum())(jnp.array([1.0, 0.0]))
    >>> found.op_type, found.phase, found.what, found.index
    ('log', 'forward', 'inf', (1,))
    """
    recorder = partial(JaxRecorder, f, "find_nan", argnums=argnums, has_aux=has_aux)
    once = nonfinite.searched(recorder(longest=longest_scan))
    again = nonfinite.searched(recorder(longest=max(longest_scan, SEARCHED)))

    def checked(*args: Any, **kwargs: Any) -> NonFinite | None:
        # they would raise, with less information
        with jax.debug_nans(False), jax.debug_infs(False):
            found = once(*args, **kwargs)
            if found is not None and found.op_type == "scan":  # find the iteration
                found = again(*args, **kwargs) or found
        return found

    return checked


@helpful("gradient_path")
def gradient_path(
    f: Callable[..., Any],
    name: str,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    longest_scan: int = LONGEST,
) -> Callable[..., GradientPath]:
    """Return a function that runs `f`, and follows the gradient to one of its inputs.

    Args:
        f: A function as in `trace_gradients`, with the same options.
        name: The argument, or the leaf of an argument, to follow, by its name: `"args[0]"`,
            `"args[0]['w']"`, as in the inputs of a trace.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.
        longest_scan: See `trace_gradients`.

    Returns:
        A function of f's arguments that returns a `GradientPath`: the ops between the result and
        the array, each with its rule and its line, and with the norms of the gradients that arrived
        and that left towards the array. It also has the place where the gradient dies: where only
        zeros or non-finite values leave, or where it is cut off. Print it for a table.

    Raises:
        ArgumentError: f has no differentiable input of that name.
        GradientError: As in `trace_gradients`.

    >>> import jax.numpy as jnp, regrad as rg
    >>> path = rg.jax.gradient_path(lambda x, w: jnp.sum(jnp.sin(x) * w), "args[0]")
    >>> [step.op_type for step in path(jnp.ones(2), jnp.ones(2)).steps]
    ['reduce_sum', 'mul', 'sin']
    """
    recorder = JaxRecorder(f, "gradient_path", longest_scan, argnums=argnums, has_aux=has_aux)
    return paths.followed(recorder, name)


@helpful("compare_gradients")
def compare_gradients(
    f: Callable[..., Any],
    other: Callable[..., Any] | Literal["true", "differences"] | None = None,
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    surrogates: Sequence[str] = (),
    rtol: float = RTOL,
    longest_scan: int = LONGEST,
) -> Callable[..., GradientComparison]:
    """Return a function that compares the gradient of `f` with another gradient.

    Args:
        f: A function as in `trace_gradients`.
        other: None or `"true"`: the true gradient of f, without any rules except JAX's own. Ops
            under rules of `override`, `custom_grad`, `jax.custom_vjp` and `jax.custom_jvp` are
            differentiated op by op. `"differences"`: central differences, in float64. Or another
            function of the same arguments.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.
        surrogates: Ops, names of rules or names of arguments whose gradients are intended to
            differ. `assert_same()` of the result ignores them.
        rtol: The tolerance, relative to the larger of both norms.
        longest_scan: The longest scan whose ops get their own rows.

    Returns:
        A function of f's arguments that returns a `GradientComparison`: a row for each
        differentiated array. In a comparison with the true gradient, it also has a row for each
        input of each op with such a rule, in place: the op's rule and its true derivative get the
        same incoming gradient.

    Raises:
        ArgumentError: `other` is none of these.
        GradientError: As in `trace_gradients`, or the shapes of the two gradients differ.

    >>> import jax.numpy as jnp, regrad as rg
    >>> model = rg.jax.override(lambda x: jnp.sum(jnp.sin(x)), {"Sin": lambda dy: 2 * dy})
    >>> found = rg.jax.compare_gradients(model)(jnp.array([0.0, 0.0]))
    >>> [(row.kind, row.ratio) for row in found.rows]
    [('argument', 2.0), ('op', 2.0)]
    """
    recorder = partial(
        JaxRecorder, api="compare_gradients", argnums=argnums, has_aux=has_aux, longest=longest_scan
    )
    return comparisons.compared(recorder(f), other, surrogates, rtol, recorder)


@helpful("saved_bytes")
def saved_bytes(
    f: Callable[..., Any],
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
) -> Callable[..., SavedBytes]:
    """Return a function that reports the memory that the backward pass of `f` keeps.

    Args:
        f: A function as in `trace_gradients`.
        argnums: See `trace_gradients`.
        has_aux: See `trace_gradients`.

    Returns:
        A function of f's arguments that returns `SavedBytes`: the arrays that `jax.vjp` keeps, by
        the primitive that made them and the line of your code that ran it. `"argument"` are
        differentiated arrays, `"constant"` are other arrays that existed before. Nothing is
        computed, because f is only traced. For `jax.checkpoint`, the arrays that its policy keeps
        are counted. Arrays that XLA would drop or recompute when it compiles value and gradient
        together are counted as well.

    Raises:
        ArgumentError, GradientError: As in `trace_gradients`.

    >>> import jax.numpy as jnp, regrad as rg
    >>> saved = rg.jax.saved_bytes(lambda x: jnp.sum(jnp.sin(x + 1.0)))(jnp.zeros(256, "float32"))
    >>> saved.total, saved.rows[0].op_type
    (1024, 'cos')
    """
    return saved.measured(JaxRecorder(f, "saved_bytes", argnums=argnums, has_aux=has_aux))


# -- the recorder ----------------------------------------------------------------------------------


class JaxRecorder(RunRecorder):
    """The recorder of JAX functions: `running` runs them."""

    def __init__(
        self, f: Callable[..., Any], api: str, longest: int = LONGEST, **asked: Any
    ) -> None:
        super().__init__(f, api)
        self.longest = longest
        self.asked = asked  # `argnums` and `has_aux`

    def call(self, args: Sequence[Any], options: dict[str, Any]) -> ProgramCall:
        """Return the function with these arguments."""
        return ProgramCall(self.f, args, options, self.api, **self.asked)

    def run(self, args: Sequence[Any], options: dict[str, Any], tool: Tool) -> Recording:
        self.made: ProgramCall = self.call(args, options)
        call = self.made
        program, keeps, longest = call.program(), bool(tool.keeps), self.longest
        run = ProgramRun(program, call.arrays, call.watched, call.results, keeps, longest)
        for op in run.ran if tool.keeps else ():
            # (NumPy cannot read random keys)
            given = [(op.name(i), x) for i, x in enumerate(op.given) if is_number(jax.typeof(x))]
            xs = [(name, x) for name, x in given if np.size(x)]
            tool.ran(op, xs, [y for y in op.outs if is_float(jax.typeof(y))])
        for op, arrived, left in run.backward():
            tool.arrived(op, arrived)
            tool.left(op, list(zip(op.input_names, left, strict=True)), arrived)
        pairs = zip(call.leaves(run.gradients), run.sources, strict=True)
        leaves = [leaf._replace(key=key) for leaf, key in pairs]
        ys = [y.x for y in run.ys]
        cuts = [(site, "") for site in run.cuts]
        return Recording(call.value(run.values), ys, leaves, cuts, run.ran, [y.key for y in run.ys])

    def given(self, run: Recording) -> Named:
        pairs = zip(self.made.names, self.made.arrays, strict=True)
        return [(name, x) for name, x in pairs if is_float(jax.typeof(x))]

    def type_of(self, op: Any) -> str:
        if op.op_type == "integer_pow":
            return "Reciprocal" if Params(op.eqn)["y"] == -1 else "Pow"
        return OP_TYPES.get(op.op_type, "")

    def true(self, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Leaf]:
        call = self.call(args, options)
        f, xs = call.of_watched(without_rules(call.program())), call.floats
        ys, pull = jax.vjp(f, *xs)
        return call.leaves(pull([jax.numpy.ones_like(y) for y in ys]))

    def differences(self, args: Sequence[Any], options: dict[str, Any]) -> Sequence[Leaf]:
        with jax.enable_x64(True):
            call = self.call(args, options)
            call.arrays = [wide(x) for x in call.arrays]
            f = jax.jit(call.of_watched(call.program()))
            xs = [np.asarray(x) for x in call.floats]
            found = differences.gradients(lambda xs: [np.asarray(y) for y in f(*xs)], xs)
            return call.leaves([conjugate(jax.numpy.asarray(dx)) for dx in found])

    def kept(self, args: Sequence[Any], options: dict[str, Any]) -> Iterator[Kept]:
        call = self.call(args, options)
        of_watched = call.of_watched(call.program())

        def kept(*watched: Any) -> Any:
            return jax.tree_util.tree_leaves(jax.vjp(of_watched, *watched)[1])

        return _kept(jax.make_jaxpr(kept)(*call.floats).jaxpr)


# -- what is kept ----------------------------------------------------------------------------------


def _kept(jaxpr: Any) -> Iterator[Kept]:
    """Yield each array among the results of a program, once: op type, line, path, bytes."""
    seen = set()
    for v in jaxpr.outvars:
        if isinstance(v, core.Literal) or v in seen or not hasattr(v.aval, "dtype"):
            continue
        seen.add(v)
        size = int(np.prod(v.aval.shape)) * v.aval.dtype.itemsize
        if size:
            yield *_origin(jaxpr, v, CallSite()), size


def _origin(jaxpr: Any, v: Any, around: CallSite) -> tuple[str, str, str]:
    """Return the op that made a variable of a program: op type, line, path; calls are opened."""
    made = {out: (eqn, i) for eqn in jaxpr.eqns for i, out in enumerate(eqn.outvars)}
    if v not in made:
        return ("constant" if v in jaxpr.constvars else "argument"), "", ""
    eqn, i = made[v]
    site = site_of(eqn, around)
    found = site.op_type, site.line, site.path
    for program in runs(eqn) if eqn.primitive.name in CALLS | {"scan", "cond"} else ():
        inner = getattr(program, "jaxpr", program)
        y = inner.outvars[i]
        if isinstance(y, core.Literal):
            return found
        within = around.inside(eqn, program)
        origin = _origin(inner, y, within)
        if origin[0] != "argument":
            return origin
        if y in inner.invars and eqn.primitive.name in CALLS:
            return _origin(jaxpr, eqn.invars[inner.invars.index(y)], around)
    return found
