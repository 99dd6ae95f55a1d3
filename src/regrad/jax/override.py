"""`override`: a JAX function with your rules inside, and a report of where they applied.

A call of `override(f, rules)` goes through four stages:

1. `TracedCall` flattens the arguments (and f itself, which may be a module with arrays) into arrays
   and other values, and rebuilds the results.
2. `jax.make_jaxpr` traces the computation of f for arrays of these shapes.
3. `Surgery` puts the rules into that program, and lists its findings.
4. The program runs, op by op or in the open trace. So `jax.jit(override(f, rules))` goes through
   the first three stages once, and `jax.grad` differentiates the program with the rules.

Invariants:

* Errors come first: before any hit is recorded, and before anything runs. A call that raises leaves
  the reports unchanged.
* Changes that f makes to Flax objects by reference (`nnx`) are made to copies in the trace, and
  applied to the objects outside once the program has run: a call that fails has changed nothing.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

import jax
import numpy as np
from jax.extend import core
from jax.tree_util import tree_flatten, tree_unflatten

from regrad.autodiff.gradients import callable_or_raise
from regrad.core.callers import PACKAGE, warn_caller
from regrad.core.containers import replaced
from regrad.core.parameters import split
from regrad.core.places import at, entries, refuse_none, spread
from regrad.core.replacing import Replace, check_values
from regrad.core.reports import Report, Table, Untouched
from regrad.core.scopes import check_order, unmarked
from regrad.core.signatures import helpful
from regrad.errors import ArgumentError, PassedOverError, UnusedOverrideWarning, kind
from regrad.jax.closed import Closed, ClosedFunctionPolicy, advice
from regrad.jax.equations import has_batches
from regrad.jax.host import GRADIENTS, OVERRIDES, need
from regrad.jax.host.extending import open_traces
from regrad.jax.keys import Key, WholeKey, key_for
from regrad.jax.modules import Naming, module_types
from regrad.jax.parameters import Parameters
from regrad.jax.primitives import tied
from regrad.jax.ruled import KeyBinding
from regrad.jax.surgery import Occurrences, Surgery

_USE = (
    "It returns a function with the rules in it: ours = rg.jax.override(f, {'Relu': rule}), and "
    "then jax.grad(ours)."
)


_READS = (
    "the function reads the value of a traced array. In a map with values=True or rules.learns, "
    "NumPy arrays of floats are traced, too. Pass jnp.asarray(x) and compute with jax.numpy, or "
    "close over the array instead of passing it: then no rule applies to the computations of "
    "NumPy. ({})"
)


class override(Report[KeyBinding]):
    """Replace gradients inside a JAX function, and report where the rules applied.

    Args:
        f: Any function that `jax.jit` can compile: a model, a loss, a bound `apply`. It is not
            edited, and its values are unchanged.
        rules: `{key: rule}`. A key is an op type (`"Relu"`; the table is in the documentation), the
            name of a JAX primitive (`"tanh"`), or a function under `jax.jit`, `jax.custom_jvp` or
            `jax.custom_vjp` (`jax.nn.relu`), or the name of such a function. It may also be one of
            these at one place: `rg.at("layers.*", "Relu")`; `rg.at("head")` is the whole call of a
            module of `model`. A rule is the same as in `gradient_override_map`, written with
            regrad's functions or with JAX's. An op type's own name, `{"Exp": "Exp"}`, means JAX's
            derivative: the override only counts it.
        open: Functions with a custom derivative (`jax.custom_jvp`, `jax.custom_vjp`), or their
            names, to differentiate op by op if they contain an overridden op.
        keep: Functions with a custom derivative that keep it, instead of raising an error.
        model: A module of Flax (linen or nnx) or Equinox, whose parts have the names of its
            attributes: `rg.at("layers.0", "Tanh")`. Without it, places are the classes of modules,
            names of `jax.named_scope`, and the module names of Linen and Haiku. f must take the
            model, or copies of it (as `jax.grad` makes them), as an argument, or close over it.
        values: Whether rules may replace values, as `rg.replace(forward)` does.
        order: By default, the rules apply at every order. With `order=1`, they define the first
            derivative alone: a derivative of it (`jax.grad` of `jax.grad`) differentiates the
            rules' formulas, and everything else by JAX's own derivatives.

    A call traces f, puts each rule where its op occurs (also in nested `jit`, `scan`, `while`,
    `cond`, `checkpoint`, `vmap` and `shard_map`), and runs the program. An active rule fires or
    raises. So differentiate, batch and compile the result, not f:
    `jax.grad(override(loss, rules))`. JAX arrays among the arguments are traced; everything else
    (Python numbers, NumPy arrays) is a constant. If the map may replace values (`values=True`) or a
    rule `learns`, NumPy arrays of floats with one or more dimensions are traced as well, as in
    `jax.jit`. Otherwise NumPy would compute results to which the rules must apply.

    A function with a custom derivative that computes an overridden op would hide the op from its
    rule. So the call raises PassedOverError, unless `open` or `keep` names the function. JAX's own
    functions (`logaddexp` in a softplus) keep their derivative; a warning names them if a key
    occurs nowhere else.

    `hits`, `table()`, `untouched()` and `assert_fired()` report which rules applied. Ops are
    counted when a program is traced, and rules when they are traced; later runs of a compiled
    program are not counted. A call in which nothing matched warns with UnusedOverrideWarning. The
    first call in which a key that has never matched matches nothing warns as well, unless
    `rules.optional` marks its rule.

    Raises:
        ArgumentError: The map is not a dict of keys to rules; a key is a function that leaves no
            boundary in JAX's programs; two keys have the same meaning; a place is nowhere in the
            program; a rule replaces values without `values=True`; `order` is neither None nor 1;
            the function reads the value of a traced NumPy array.
        UnknownOpError: A key is neither an op type that occurs in JAX programs nor a primitive.
        RuleError: A rule takes a name that its op does not have, or returns a wrong result.
        PassedOverError: A function with a custom derivative hides an overridden op.
        GradientError: A rule cannot be put where its op occurs (see the documentation), regrad
            cannot identify the called module of `model`, or forward mode reaches a rule that is
            not linear in the incoming gradient.

    Source: `tf.Graph.gradient_override_map`.

    >>> import jax, jax.numpy as jnp, regrad as rg
    >>> def model(x):
    ...     return jnp.sum(jnp.round(x) * x)
    >>> ours = rg.jax.override(model, {"Round": lambda dy: dy})
    >>> print(jax.grad(model)(jnp.array([1.2, 2.6])), jax.grad(ours)(jnp.array([1.2, 2.6])))
    [1. 3.] [2.2 5.6]
    >>> ours.assert_fired()

    In one place only:

    >>> def scoped(x):
    ...     with jax.named_scope("head"):
    ...         y = jnp.sin(x)
    ...     return y + jnp.sin(x)
    >>> ours = rg.jax.override(scoped, {rg.at("head", "Sin"): lambda dy, x: dy * 10})
    >>> print(jax.grad(ours)(0.0))
    11.0

    The derivative of the gradient that a rule defines:

    >>> for order in (None, 1):
    ...     rules = {"Tanh": lambda dy, y: dy * y}
    ...     ours = rg.jax.override(lambda x: jnp.tanh(x) ** 2, rules, order=order)
    ...     print(f"{jax.grad(jax.grad(ours))(0.5):.4f}")  # jax.grad(ours) is 2 tanh(x)²
    0.8542
    1.4537
    """

    closes_over: tuple[str, ...] = ("_original", "_rules")
    _name = "override"

    @helpful("override")
    def __init__(
        self,
        f: Callable[..., Any],
        rules: Mapping[Any, Any] | None = None,
        *,
        open: Iterable[Any] = (),
        keep: Iterable[Any] = (),
        model: Any = None,
        values: bool = False,
        order: int | None = None,
    ) -> None:
        if isinstance(f, Mapping):
            raise ArgumentError(f"override takes the function as its first argument. {_USE}")
        callable_or_raise(f, "override")
        if not isinstance(rules, Mapping):
            raise ArgumentError(
                "override takes a dict of op types, primitives or functions to rules, as in "
                f"override(f, {{'Relu': rule}}), got {kind(rules)}"
            )
        self._order = check_order("override", order)
        need(OVERRIDES, GRADIENTS)  # (Here the user calls; later calls may come from JAX.)
        # (wrappers copy attributes, so plain names would collide with the wrapped function's)
        self._original = f
        self._bindings: dict[str, KeyBinding] = {}
        rules, marked = unmarked(spread(refuse_none(rules)))
        self._rules: Mapping[Any, Any] = rules
        rules, held = split(rules)
        check_values(rules, values, order, "override(f, rules, values=True)")
        kept = _kept(rules, keep, model)
        self._keys: dict[Any, Key] = {}
        for key, rule in rules.items():
            sisters: list[KeyBinding] = []
            for place in key.entries() if isinstance(key, at) else (None,):
                sisters.append(self._bind(key if place is None else place.what, rule, place))
                sisters[-1].marked, sisters[-1].sisters = key in marked, sisters
        policy = ClosedFunctionPolicy(open, [k for k in keep if k not in kept] if kept else keep)
        places = any(isinstance(key, at) for key in rules) or not held  # (keys for modules)
        self._surgery = Surgery([*self._bindings.values()], policy, model if places else None, kept)
        self._parameters: Parameters | None = None  # the parameters that keys name
        if held:
            self._parameters = Parameters(held, model, marked, self._order == 1)
            self._bindings |= {b.name: b for b in self._parameters.bindings.values()}
        self._traces_numpy = values or bool(self._surgery.learned)
        self._untouched = Untouched()
        # keys for which a warning has reported that they match nothing
        self._told: set[str] = set()
        self._notes: Counter[tuple[str, str, str]] = Counter()
        self._closed: dict[Closed, None] = {}
        self._has_vmaps = False
        self._look_like(f)

    def _look_like(self, f: Callable[..., Any]) -> None:
        """Copy name and signature, but no `__wrapped__`: no code may call f itself."""
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            if hasattr(f, name):
                setattr(self, name, getattr(f, name))
        with suppress(TypeError, ValueError):
            self.__signature__: inspect.Signature = inspect.signature(f)

    def _bind(self, key: Any, rule: Any, place: at | None) -> KeyBinding:
        meant = WholeKey(rule) if key is None else self._keys.get(key) or key_for(key)
        # Of two rules for one op (`"Relu"` and `jax.nn.relu`), one would be silently ignored.
        for label, other in self._bindings.items():
            if meant.meets(other.key) and place == other.place:
                raise ArgumentError(
                    f"override: two keys ({label!r} and {meant.label!r}) have the same meaning; "
                    "pass one of them"
                )
        # Two functions with one name, from two modules, are two keys: `scale`, `scale (2)`.
        alike = [k for k in self._keys.values() if k.label.split(" (")[0] == meant.label]
        meant.label += f" ({len(alike) + 1})" if alike and meant not in alike else ""
        self._keys[key] = meant
        binding = KeyBinding(meant, rule, place)
        binding.once = self._order == 1
        known = getattr(meant, "known", None)
        if known is not None:
            binding.bind(known)  # raise now for a rule that does not fit
        elif not (callable(rule) or isinstance(rule, str | Replace)):
            raise ArgumentError(
                f"override: expected a rule for {meant.label!r} (a function, or a name registered "
                f"with RegisterGradient), got {kind(rule)}"
            )
        self._bindings[binding.name] = binding
        return binding

    def __enter__(self) -> NoReturn:
        """Raise, because an override is not a scope."""
        raise ArgumentError(f"override is not a scope. {_USE}")

    def __exit__(self, *error: Any) -> None:
        """Do nothing, because `__enter__` raises."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results of f, with the rules active."""
        where = self._surgery.where
        given = self._original, args, kwargs
        call = TracedCall(given, where and where.naming, self._traces_numpy)
        try:
            traced = self._trace(call)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            if call.numpy_places:
                raise ArgumentError(f"override: {_READS.format(error)}") from error
            raise
        program, found = self._surgery.operate(traced)
        arrays = call.arrays
        if len(program.in_avals) > len(arrays):  # some rule reads its parameters
            arrays = [*self._surgery.parameters, *arrays]
        if self._parameters is not None:  # (`found` may be from an earlier call)
            program = self._parameters.plan(call, program)
            given, found = found, Occurrences()
            found.add(given)
            found.hits += self._parameters.seen
        self._refuse(found)
        for (name, where), count in found.untouched.items():
            self._untouched.note(name, where, count)
        self._warn(found)
        self._note(found)
        if self._order == 1:
            count, every = len(arrays), tied([*arrays, *program.consts])
            arrays, program = every[:count], program.replace(consts=every[count:])
        if self._parameters is not None:
            arrays = self._parameters.enter(arrays)
        return call.result(core.jaxpr_as_fun(program)(*arrays))

    def _trace(self, call: TracedCall) -> Any:
        """Return the program of a call; if it has batched ops, with the vmaps as equations."""
        if not self._has_vmaps:  # remembered, so that the next call is traced once
            closed = jax.make_jaxpr(call.traced)(*call.arrays)
            self._has_vmaps = bool(self._bindings) and has_batches(closed.jaxpr)
            if not self._has_vmaps:
                return closed
        from regrad.jax.vmaps import trace  # depends on JAX internals, which few programs need

        return trace(call.traced, call.arrays)

    def _refuse(self, found: Occurrences) -> None:
        """Raise for a program in which third-party functions would hide ops from their rules."""
        hiding = [c for c in found.closed if not c.own and not c.kept]
        if hiding:
            raise PassedOverError(f"override: {advice(hiding)}")

    def _warn(self, found: Occurrences) -> None:
        """Warn of a call without a match, and once of JAX functions that hide all ops of a key."""
        hit = {seen.binding.shown for seen in found.hits}
        known = {(c.name, c.place, c.keys) for c in self._closed}
        new = [c for c in found.closed if (c.name, c.place, c.keys) not in known and not c.kept]
        tell = [c for c in new if not c.keys <= {seen.binding.name for seen in found.hits}]
        rest = [b for b in self._bindings.values() if not b.marked]
        idle = [b for b in rest if hit.isdisjoint(each.shown for each in b.sisters)]
        if idle and not found.hits:
            why = advice(found.closed) if found.closed else (
                f"the function contains no {', '.join(b.shown for b in idle)} through which a "
                "gradient could pass. untouched() lists the operations that occur."
            )  # fmt: skip
            if found.spikes and any(b.op_type == "Step" for b in idle):
                why += (
                    f" A comparison that is cast, at {', '.join([*found.spikes][:3])}, is the key "
                    "'Threshold'."
                )
            self._warn_of_idle(idle, why, 3)
            return
        if tell:
            self._tell(f"override: {advice(tell)}", 3)
        if news := [text for text in self._idle_modules() if text not in self._told]:
            self._told.update(news)
            self._tell(f"override: {'; '.join(news)}", 3)
        closed = {label for c in found.closed for label in c.keys} | self._told
        if idle := [b for b in idle if not b.hits and b.name not in closed]:
            self._told.update(b.name for b in idle)
            self._warn_of_idle(idle, "", 3)

    def _idle_modules(self, *keys: Any) -> list[str]:
        found = () if keys or self._surgery.where is None else self._surgery.where.unvisited()
        why = "which was never called (only calls of the module itself count)"
        others = [] if keys or self._parameters is None else self._parameters.idle()
        return [*[f"{b.shown} names {step.path!r}, {why}" for b, step in found], *others]

    def _tell(self, message: str, level: int) -> None:
        """Warn at the user's line, because JAX's own frames are often in between."""
        warn_caller(message, UnusedOverrideWarning, (PACKAGE, os.path.dirname(jax.__file__)))

    def _note(self, found: Occurrences) -> None:
        for seen in found.hits:
            seen.hit.add(seen.shape)
        self._notes += found.notes
        self._closed |= dict.fromkeys(found.closed)

    # -- the report ----------------------------------------------------------------------------

    def untouched(self, only: Any = None) -> Table:
        """Return the differentiable operations that kept their gradient: name, calls, line.

        Args:
            only: An op type, a primitive, a function, or a tuple of these: the operations to list,
                by the names of their primitives. By default, all operations.

        Raises:
            ArgumentError: `only` is a function (or an op type that is a function in JAX, `"Gelu"`)
                without a custom derivative. The report lists the operations that it consists of,
                not the function.
        """
        if only is None:
            return self._untouched.table()
        keys = [key_for(each) for each in entries(only)]
        for key in keys:
            function = getattr(key, "function", None)
            if function and not isinstance(function, jax.custom_jvp | jax.custom_vjp):
                raise ArgumentError(
                    f"untouched: {key.label!r} is a function in JAX without a custom derivative, "
                    "so the report lists the operations that it consists of. Pass these; "
                    "untouched() lists all."
                )
        names = {target.name for key in keys for target in key.targets}
        labels = [getattr(key, "name", key.label) for key in keys]
        return self._untouched.table({*names, *labels})

    def table(self) -> Table:
        """Return the hits, then the functions that were opened, left closed, or kept their rule."""
        table = super().table()
        path = [""] * (len(table.headings) - 6)
        rows = [(*path, n, what, str(c), "", at, "") for (n, what, at), c in self._notes.items()]
        return Table(table.headings, [*table.rows, *rows])

    def __repr__(self) -> str:
        lines = [f"\n  {n}: {what}, {c} calls ({at})" for (n, what, at), c in self._notes.items()]
        return super().__repr__() + "".join(lines)

    def _key_of(self, op_type: Any) -> str:
        if isinstance(op_type, at):
            return repr(op_type)
        meant = key_for(op_type)
        known = (label for label, b in self._bindings.items() if b.key.meets(meant))
        return next(known, meant.label if meant.label not in self._bindings else repr(op_type))

    def _why_not(self, binding: KeyBinding) -> str:
        closed = [c for c in self._closed if binding.name in c.keys]
        if closed and not binding.hits:
            return f"it occurs only where it cannot. {advice(closed)}"
        if not binding.hits:
            instead = self._instead(binding)
            why = "no call of the function that override returned ran it"
            return why + f" ({instead})" * bool(instead)
        return super()._why_not(binding)


def _kept(rules: Mapping[Any, Any], keep: Any, model: Any) -> list[at]:
    """Return the keys for whole calls in keep, or raise if the map has no such key."""
    whole = [key for key in rules if isinstance(key, at) and key.what is None]
    if whole and not isinstance(model, module_types("equinox", "flax.nnx")):
        raise ArgumentError(
            f"override: {whole[0]!r} selects whole calls as one op, and only modules of a model of "
            "Equinox or Flax's nnx leave a boundary for them: pass model=. In Flax's Linen, give a "
            "rule to the first product in the module, for example def reverse(dy, builtin): da, db "
            "= builtin(dy); return -0.7 * da, db with the key "
            f"rg.at({whole[0].where!r}, 'MatMul', nth=0). It changes da, the gradient that leaves "
            "the module, and keeps db, the gradient of the kernel. Otherwise define a gradient for "
            "the call with rg.jax.custom_grad."
        )
    # (`ClosedFunctionPolicy` raises if keep is not a sequence)
    kept = [key for key in keep if isinstance(key, at)] if isinstance(keep, Iterable) else []
    if wrong := [key for key in kept if key not in whole]:
        raise ArgumentError(
            f"override: {wrong[0]!r} in keep= is not a key of the map for whole calls"
        )
    return kept


def _holds(x: Any) -> bool:
    """Return whether NumPy treats this as an array of floats."""
    return isinstance(x, np.ndarray) and x.ndim > 0 and jax.numpy.issubdtype(x.dtype, np.inexact)


class TracedCall:
    """The flattened arguments of one call (including the function), and the results."""

    def __init__(self, given: Any, naming: Naming | None = None, numpy: bool = False) -> None:
        self.given = given
        self.naming = naming
        self.outside: list[Any] = [] if naming is None else open_traces()
        self.modules: NnxObjects = NnxObjects(given)
        self.leaves: list[Any]
        self.structure: Any
        self.leaves, self.structure = tree_flatten(given, is_leaf=self.modules.holds)
        # Other NumPy arrays and numbers stay unchanged: f may use them as Python values.
        self.numpy_places: list[int] = [i for i, x in enumerate(self.leaves) if numpy and _holds(x)]
        for i in self.numpy_places:
            self.leaves[i] = jax.numpy.asarray(self.leaves[i])
        self.places: list[int] = [
            i for i, leaf in enumerate(self.leaves) if isinstance(leaf, jax.Array)
        ]
        self.arrays: list[Any] = [self.leaves[i] for i in self.places] + self.modules.arrays

    def traced(self, *xs: Any) -> list[Any]:
        """Call the function on these arrays; return its arrays, then changed state."""
        leaves = replaced(self.leaves, self.places, xs[: len(self.places)])
        self.modules.inside(leaves, xs[len(self.places) :])
        f, args, kwargs = copies = tree_unflatten(self.structure, leaves)
        naming = self.naming and self.naming.around(self.given, copies, self.outside)
        with naming or nullcontext():
            y = f(*args, **kwargs)
        self.outs: list[Any]
        self.out_structure: Any
        self.outs, self.out_structure = tree_flatten(y, is_leaf=self.modules.is_copy)
        self.out_places: list[int] = [
            i for i, y in enumerate(self.outs) if isinstance(y, jax.Array)
        ]
        return [*(self.outs[i] for i in self.out_places), *self.modules.changed_arrays()]

    def result(self, ys: list[Any]) -> Any:
        """Return the value that the function returned, with these arrays."""
        count = len(self.out_places)
        # (A function may return a module that it received.)
        outs = replaced(map(self.modules.original, self.outs), self.out_places, ys[:count])
        self.modules.update(ys[count:])
        return tree_unflatten(self.out_structure, outs)


class NnxObjects:
    """Objects of Flax's nnx among the arguments (modules, optimizers, Rngs), which may change."""

    def __init__(self, given: Any) -> None:
        self.nnx: Any = sys.modules.get("flax.nnx")  # not imported here, because it is optional
        self.copies: list[Any] = []
        self.arrays: list[Any] = []
        leaves = jax.tree_util.tree_leaves(given, is_leaf=self.holds) if self.nnx else ()
        self.found: list[Any] = [leaf for leaf in leaves if self.holds(leaf)]
        if self.found:
            self.graph: Any
            self.graph, state = self.nnx.split(self.found)
            self.state: Any
            self.arrays, self.state = tree_flatten(state)

    def split(self) -> Any:
        """Return the state of the objects, with their arrays."""
        return tree_unflatten(self.state, self.arrays) if self.found else []

    def holds(self, leaf: Any) -> bool:
        """Return whether nnx tracks this object by reference and it is not a JAX Ref."""
        if self.nnx is None or isinstance(leaf, jax.Ref):
            return False
        return self.nnx.graph.is_graph_node(leaf) or isinstance(leaf, self.nnx.Variable)

    def inside(self, leaves: list[Any], xs: Sequence[Any]) -> None:
        """Put objects with these arrays in the places of the objects outside."""
        if self.found:
            self.given: list[Any] = list(xs)
            self.copies = self.nnx.merge(self.graph, tree_unflatten(self.state, xs))
            copies = iter(self.copies)
            leaves[:] = [next(copies) if self.holds(leaf) else leaf for leaf in leaves]

    def is_copy(self, leaf: Any) -> bool:
        """Return whether this is a copy that the function received."""
        return any(leaf is copy for copy in self.copies)

    def original(self, leaf: Any) -> Any:
        """Return the object outside for an object inside, and any other value unchanged."""
        pairs = zip(self.copies, self.found, strict=True)
        return next((found for copy, found in pairs if copy is leaf), leaf)

    def changed_arrays(self) -> list[Any]:
        """Return the arrays that the function put into the objects."""
        if not self.found:
            return []
        state = self.nnx.state(self.copies)
        self.after: Any
        now, self.after = tree_flatten(state)
        # Unchanged weights need not be results of the program. If the number of arrays differs, the
        # function has added or removed some, and all arrays are taken over.
        before = self.given if len(now) == len(self.given) else [None] * len(now)
        self.moved: list[int] = [
            i for i, (a, b) in enumerate(zip(now, before, strict=True)) if a is not b
        ]
        self.count: int = len(now)
        return [now[i] for i in self.moved]

    def update(self, ys: list[Any]) -> None:
        """Put changed state into the objects outside."""
        if self.found and self.moved:
            now = [None] * self.count if len(self.arrays) != self.count else self.arrays
            self.nnx.update(self.found, tree_unflatten(self.after, replaced(now, self.moved, ys)))
