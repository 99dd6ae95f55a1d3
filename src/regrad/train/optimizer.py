"""optax's optimizers for Variables. Their state is held in Variables, too.

An optax optimizer is two pure functions, `init` and `update`, of trees of JAX arrays. Here the
tree of parameters is a dict from names to values, and each array of the state is held by one
Variable. So everything that handles Variables (a checkpoint, a compiled step) handles the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from regrad.autodiff.gradients import variable_pairs
from regrad.autodiff.variables import UPDATES, Variable
from regrad.core import dispatch
from regrad.core.backends import BACKENDS, Array, is_inexact, is_traced
from regrad.core.extras import needed
from regrad.core.hints import hint_at
from regrad.core.names import OPTIMIZER
from regrad.core.signatures import helpful
from regrad.core.tensor import Tensor, TensorLike, wrap
from regrad.core.walk import UNUSED
from regrad.errors import ArgumentError, DTypeError, GradientError, ShapeError, StateError, kind
from regrad.train.arrays import as_held, is_jax, to_jax
from regrad.transforms.replay import foreign

Pairs = Sequence[tuple[Any, Variable]]


class Name(str):
    """The name of a variable as a key, distinct from the keys of optax's own dicts."""

    __slots__ = ()


class Slot(NamedTuple):
    """One array of the state: its Variable, and the name of the trained variable, if any."""

    variable: Variable
    owner: str | None
    key_type: Any  # the type of a JAX random key, which is stored as integers


class Optimizer:
    """An optax optimizer that updates Variables.

    Args:
        transformation: An optax optimizer, e.g. `optax.adam(1e-3)` or `optax.chain(…)`. Learning
            rate schedules come from optax, e.g.
            `optax.adam(optax.cosine_decay_schedule(1e-3, 1000))`.
        name: The prefix of the names of the state's variables, as in `adam/mu/w`. Set it if a
            checkpoint contains two optimizers.

    The first step makes the state, or an earlier call of `init(var_list)`. A compiled function
    cannot make Variables, so call `init` before it. A step is one compiled function of JAX. A
    variable keeps its library: NumPy data stays NumPy data, and JAX arrays keep their sharding. A
    traced variable keeps a traced value. The state is held in JAX arrays.

    A learning rate that the program changes is also part of the state: with
    `optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)`, assign to the variable
    `optimizer/hyperparams/learning_rate`.

    cloudpickle can pickle optimizers. Python's pickle cannot, because optax's functions are
    closures. To continue in another process, save `variables`.

    Raises:
        MissingPackageError: optax is not installed.
        ArgumentError: `transformation` is not an optax transformation.

    Source: optax; `tf.train.Optimizer` of TensorFlow.js and TensorFlow 1 for the methods.

    >>> import optax
    >>> import regrad as rg
    >>> w = rg.Variable([4.0, -2.0], name="w")
    >>> sgd = rg.train.Optimizer(optax.sgd(0.25))
    >>> for _ in range(2):
    ...     print(sgd.minimize(lambda: w.square().sum()).item())
    20.0
    5.0
    >>> w.print()
    Tensor
        [1, -0.5]
    """

    closes_over: tuple[str, ...] = ("_optax",)

    @helpful("Optimizer")
    def __init__(self, transformation: Any, name: str = "optimizer") -> None:
        optax = needed("optax", "jax", "regrad.train.Optimizer")
        if not all(callable(getattr(transformation, f, None)) for f in ("init", "update")):
            raise _no_transformation(transformation)
        self.name = name
        self._optax = optax.with_extra_args_support(transformation)
        self._trained: dict[str, Variable] = {}
        self._slots: list[Slot] = []
        self._structure: Any = None

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        import jax

        return jax.jit(self._step)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy. The copy compiles its own step, which reads `self`."""
        return {k: v for k, v in vars(self).items() if k != "_compiled"}

    @property
    def variables(self) -> list[Variable]:
        """The variables of the state, which are not trainable, for checkpoints.

        Save them together with the model: `save(path, [*model, *optimizer.variables])`. Raises
        StateError before the state exists.
        """
        if self._structure is None:
            raise StateError(
                f"the optimizer {self.name!r} has no state yet; the first step makes it. "
                "Call .init(var_list) first, with the variables to train."
            )
        return [slot.variable for slot in self._slots]

    def init(self, var_list: Iterable[Variable]) -> None:
        """Make the state for these variables. A second call for the same variables has no effect.

        Raises:
            StateError: called inside a compiled function, or the state exists for other variables.
            ArgumentError: `var_list` is empty, has other values than Variables, or repeats a name.
            DTypeError: a variable has an integer or bool dtype, or is float64 while JAX's x64 mode
                is off.

        >>> import optax
        >>> import regrad as rg
        >>> adam = rg.train.Optimizer(optax.adam(1e-3), name="adam")
        >>> adam.init([rg.Variable([1.0], name="w")])
        >>> [v.name for v in adam.variables]
        ['adam/count', 'adam/mu/w', 'adam/nu/w']
        """
        given = _by_name(var_list)
        if self._structure is not None:
            for v in given.values():
                self._check_known(v)
            return
        for v in given.values():
            _check_dtype(v)
        import jax

        params = {Name(n): jax.numpy.asarray(to_jax(v.value)) for n, v in given.items()}
        found, structure = jax.tree_util.tree_flatten_with_path(self._optax.init(params))
        if any(is_traced(leaf) for _, leaf in found):
            raise StateError(
                f"the optimizer {self.name!r} would make its state in a compiled function, which "
                "cannot make Variables. Call .init(var_list) first, outside of it."
            )
        named = zip(_short_names([path for path, _ in found]), found, strict=True)
        self._slots = [_slot(f"{self.name}/{n}", path, leaf) for n, (path, leaf) in named]
        self._trained, self._structure = given, structure

    def minimize(
        self, loss_fn: Callable[[], Any], var_list: Iterable[Variable] | None = None
    ) -> Tensor:
        """Differentiate `loss_fn()`, update the variables, and return the loss.

        Args:
            loss_fn: A function without arguments that returns a scalar Tensor.
            var_list: The variables to train; by default all trainable ones that `loss_fn` reads.

        The loss is the value before the step. Active overrides apply, as in `variable_grads`.
        optax also receives the loss as `value` (float32, unless a variable has 64 bits), which some
        transformations use, such as `optax.contrib.reduce_on_plateau`.

        Raises the errors of `variable_grads`, `init` and `apply_gradients`.
        """
        loss, pairs = self.compute_gradients(loss_fn, var_list)
        self.apply_gradients(pairs, value=_as_value(loss, [v for _, v in pairs]))
        return loss

    def compute_gradients(
        self, loss_fn: Callable[[], Any], var_list: Iterable[Variable] | None = None
    ) -> tuple[Tensor, list[tuple[Tensor | None, Variable]]]:
        """Return the loss, and pairs (gradient, variable) for `apply_gradients`.

        The gradient of a variable that the loss does not depend on is None.
        """
        chosen = None if var_list is None else list(_by_name(var_list).values())
        loss, found = variable_pairs(loss_fn, chosen)
        gradients = {v: None if dx is UNUSED else dx for v, dx in found}
        return loss, [(gradients.get(v), v) for v in chosen or gradients]

    def apply_gradients(
        self,
        grads: Mapping[str, TensorLike | None] | Iterable[tuple[TensorLike | None, Variable]],
        var_list: Iterable[Variable] | None = None,
        **extra: Any,
    ) -> None:
        """Update the variables by their gradients.

        Args:
            grads: Pairs (gradient, variable), or a dict from names to gradients, as returned by
                `variable_grads`. Each gradient has the shape and dtype of its variable.
            var_list: The variables for the names of a dict; optional after `init`.
            extra: Further arguments of optax's `update`, such as `value`.

        A variable whose gradient is None or missing does not change, and its state does not change.

        Raises:
            ArgumentError: a gradient for an unknown variable, or two gradients for one variable.
            GradientError: all gradients are missing, or a gradient or variable is being
                differentiated (the step of an optimizer has no gradient).
            ShapeError, DTypeError: a gradient does not match its variable.
            StateError: the state exists for other variables, or would be made inside a compiled
                function.

        >>> import optax
        >>> import regrad as rg
        >>> w = rg.Variable([1.0, 2.0], name="w")
        >>> sgd = rg.train.Optimizer(optax.sgd(0.5))
        >>> sgd.apply_gradients({"w": rg.tensor([2.0, 0.0])}, [w])
        >>> w.print()
        Tensor
            [0, 2]
        """
        pairs = self._pairs(grads, var_list)
        given = {v.name: _check_gradient(dx, v) for dx, v in pairs if dx is not None}
        if not given:
            raise GradientError(
                f"the optimizer {self.name!r} got no gradient for any variable: "
                f"{[v.name for _, v in pairs]}. Check that the loss depends on them."
            )
        with UPDATES:
            if self._structure is None:
                self.init([v for dx, v in pairs if dx is not None or _can_train(v)])
            for dx, v in pairs:
                if dx is not None:
                    self._check_known(v)
            self._run(given, extra)

    def _run(self, given: dict[str, Tensor], extra: dict[str, object]) -> None:
        import jax

        params = {n: v.value for n, v in self._trained.items()}
        leaves = [slot.variable.value for slot in self._slots]
        tensors, structure = jax.tree.flatten((given, leaves, params, extra))
        numbers = {i: x for i, x in enumerate(tensors) if not isinstance(x, Tensor)}

        def update(arrays: Sequence[Array]) -> list[Any]:
            """Run optax's part of the step, which has no gradient."""
            rest = iter(arrays)
            whole = [numbers[i] if i in numbers else next(rest) for i in range(len(tensors))]
            grads, leaves, params, extra = jax.tree.unflatten(structure, whole)
            params = {Name(n): x for n, x in params.items()}
            # Missing gradients become zeros, which do not affect global norms. The state is kept.
            grads = {n: grads[n] if n in grads else jax.numpy.zeros_like(params[n]) for n in params}
            params, leaves = self._compiled(grads, leaves, params, extra)
            return [*[params[n] for n in names], *leaves]

        names = list(given)
        ys = foreign(update, [x for x in tensors if isinstance(x, Tensor)], to_jax)
        for n, y in zip(names, ys, strict=False):
            self._trained[n].assign(_back(y, self._trained[n].value))
        for slot, y in zip(self._slots, ys[len(names) :], strict=True):
            if slot.owner is None or slot.owner in given:
                slot.variable.assign(y)

    def _step(
        self,
        grads: dict[Name, Array],
        leaves: Sequence[Array],
        params: dict[Name, Array],
        extra: dict[str, Any],
    ) -> tuple[Any, list[Any]]:
        """Compute new parameters and a new state from the old ones. The function is pure."""
        import jax
        import optax

        leaves = [
            _wrap_key(leaf, slot.key_type) for slot, leaf in zip(self._slots, leaves, strict=True)
        ]
        state = jax.tree.unflatten(self._structure, leaves)
        updates, state = self._optax.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), [_plain(x) for x in jax.tree.leaves(state)]

    def _pairs(self, grads: Any, var_list: Iterable[Variable] | None) -> Pairs:
        if isinstance(grads, Mapping):
            return self._pairs_by_name(grads, var_list)
        if var_list is not None:
            raise ArgumentError(
                "apply_gradients: pairs (gradient, variable) name their variables; var_list goes "
                "with a dict of gradients. Write apply_gradients(zip(gradients, variables))"
            )
        pairs = [_pair(p) for p in grads]
        if len(_by_name(v for _, v in pairs)) < len(pairs):
            raise ArgumentError(
                "apply_gradients: two gradients for one variable in "
                f"{[v.name for _, v in pairs]}. Add them up first."
            )
        return pairs

    def _pairs_by_name(
        self, grads: Mapping[str, Any], var_list: Iterable[Variable] | None
    ) -> Pairs:
        if var_list is None and self._structure is None:
            raise ArgumentError(
                "apply_gradients: a dict of gradients goes by names. Pass the variables, "
                "apply_gradients(grads, var_list), or call .init(var_list) first."
            )
        known = self._trained if var_list is None else _by_name(var_list)
        if unknown := [n for n, dx in grads.items() if n not in known and dx is not None]:
            raise ArgumentError(
                f"apply_gradients: gradients for unknown variables {unknown}; known are "
                f"{list(known)}"
            )
        return [(grads.get(n), v) for n, v in known.items()]

    def _check_known(self, v: Variable) -> None:
        if self._trained.get(v.name) is not v:
            what = "another variable of the name" if v.name in self._trained else "the variable"
            raise StateError(
                f"the optimizer {self.name!r} has state for {list(self._trained)}, but got {what} "
                f"{v.name!r}. Call .init(var_list) with all variables before the first step, or "
                "make another Optimizer."
            )


hint_at(Optimizer, OPTIMIZER)


def _as_value(loss: Tensor, variables: Sequence[Variable]) -> Tensor:
    """Cast the loss for optax: float64 must not require JAX's x64 mode unless a variable does."""
    wide = np.float64, np.complex128
    dtype = np.float64 if any(v.dtype in wide for v in variables) else np.float32
    cast = lambda arrays: [BACKENDS[type(a)].astype(a, dtype) for a in arrays]  # noqa: E731
    return foreign(cast, [loss], lambda x: x.data)[0]


def _back(new: Tensor, old: Tensor) -> Tensor:
    """Return a new value in the library of the old one. Traced values stay traced."""
    if is_jax(old) or is_traced(new._data):
        return new
    return as_held(np.asarray(new._data), old)


# -- the state's variables -------------------------------------------------------------------------


def _slot(name: str, path: Sequence[Any], leaf: Array) -> Slot:
    owner = next((str(k.key) for k in path if isinstance(getattr(k, "key", None), Name)), None)
    variable = Variable(wrap(_plain(leaf)), trainable=False, name=name)
    return Slot(variable, owner, _key_type(leaf))


def _key_type(leaf: Array) -> Any:
    """Return the type of JAX's random generator for a key; None for numbers."""
    import jax

    typed = jax.numpy.issubdtype(jax.numpy.asarray(leaf).dtype, jax.dtypes.prng_key)
    return jax.random.key_impl(leaf) if typed else None


def _wrap_key(leaf: Array, key_type: str | None) -> Any:
    import jax

    return leaf if key_type is None else jax.random.wrap_key_data(leaf, impl=key_type)


def _plain(leaf: Array) -> Any:
    """Return an array without JAX's weak type, which files cannot store; integers for a key."""
    import jax

    if _key_type(leaf) is not None:
        return jax.random.key_data(leaf)
    leaf = jax.numpy.asarray(leaf)
    return jax.numpy.asarray(leaf, dtype=leaf.dtype)


def _short_names(paths: Sequence[Sequence[Any]]) -> list[str]:
    """Return `mu/w` for each path. Tuple indices are omitted, unless names would be equal."""
    short = ["/".join(_part(k) for k in path if not hasattr(k, "idx")) for path in paths]
    full = ["/".join(map(_part, path)) for path in paths]
    times = Counter(short)
    return [s if s and times[s] == 1 else f for s, f in zip(short, full, strict=True)]


def _part(key: Any) -> str:
    """Return the label of one step of a path in a tree: a name, a key of a dict, or an index."""
    found = (getattr(key, a) for a in ("name", "key", "idx") if hasattr(key, a))
    return str(next(found, key))


# -- checks ----------------------------------------------------------------------------------------


def _no_transformation(got: object) -> ArgumentError:
    name = getattr(got, "__name__", None)
    hint = f" Call it: Optimizer(optax.{name}(…))." if callable(got) and name else ""
    return ArgumentError(
        "Optimizer takes an optax GradientTransformation, such as optax.adam(1e-3) or "
        f"optax.chain(…), got {kind(got)}.{hint}"
    )


def _pair(pair: Any) -> tuple[Any, Variable]:
    if isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], Variable):
        return pair[0], pair[1]
    swapped = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], Variable)
    raise ArgumentError(
        "apply_gradients takes pairs (gradient, variable), or a dict from names to gradients; got "
        + ("(variable, gradient): swap them" if swapped else f"an entry that is {kind(pair)}")
    )


def _by_name(var_list: Iterable[Variable]) -> dict[str, Variable]:
    """Return a dict of variables by name. Each variable may occur repeatedly."""
    if isinstance(var_list, Variable):
        var_list = [var_list]
    if not isinstance(var_list, Iterable):
        raise ArgumentError(
            f"var_list: expected a list of Variables, got {kind(var_list)}; for a Module pass "
            "module.trainable_variables"
        )
    variables = list(var_list)
    if not variables:
        raise ArgumentError("var_list is empty: an optimizer needs at least one variable to train")
    named: dict[str, Variable] = {}
    for v in variables:
        if not isinstance(v, Variable):
            raise ArgumentError(f"var_list must be a list of Variables, got {kind(v)}")
        if named.setdefault(v.name, v) is not v:
            raise ArgumentError(
                f"two different variables are called {v.name!r}; the state goes by names, so give "
                "them names of their own"
            )
    return named


def _can_train(v: Variable) -> bool:
    return v.trainable and is_inexact(v.dtype)


def _check_dtype(v: Variable) -> None:
    if not is_inexact(v.dtype):
        raise DTypeError(
            f"the variable {v.name!r} is of {v.dtype}; only floats and complex numbers are trained"
        )


def _check_gradient(dx: TensorLike, v: Variable) -> Tensor:
    """Return a gradient as a Tensor if it fits its variable."""
    dx = dispatch.lift(dx)
    if dx.shape != v.shape:
        raise ShapeError(
            f"apply_gradients: the gradient of {v.name!r} must have its shape, {v.shape}, got "
            f"{dx.shape}"
        )
    if dx.dtype != v.dtype:
        raise DTypeError(
            f"apply_gradients: the gradient of {v.name!r} must have its dtype, {v.dtype}, got "
            f"{dx.dtype}. Convert it: astype(dx, v.dtype)."
        )
    return dx
