"""`grad` and related functions: gradients of functions (TensorFlow.js's API)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, Signature
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, overload

from regrad.autodiff.choosing import Argnums, ArgumentSelection, weight
from regrad.autodiff.variables import Variable, VariableTape
from regrad.core import containers, dispatch
from regrad.core.backends import FLOAT, is_inexact
from regrad.core.hints import of_result
from regrad.core.made import remade
from regrad.core.pullback import or_zeros, pull_back, run_taped
from regrad.core.registry import OPS
from regrad.core.signatures import answering, check_passed, helpful
from regrad.core.state import OPEN, refuse_elsewhere
from regrad.core.tape import Tape
from regrad.core.tensor import Readable, Tensor, TensorLike, id_of
from regrad.core.walk import UNUSED
from regrad.errors import ArgumentError, DTypeError, GradientError, ShapeError, kind

Unconnected: TypeAlias = Literal["raise", "zero", "none"]


class ValueAndGrad(NamedTuple):
    """The result of `value_and_grad(f)(x)`."""

    value: Tensor
    grad: Any


class ValueAndGrads(NamedTuple):
    """The result of `value_and_grads(f)(args)`."""

    value: Tensor
    grads: list[Any]


class VariableGrads(NamedTuple):
    """The result of `variable_grads(f)`."""

    value: Tensor
    grads: dict[str, Tensor | None]


class GradientFunction(Protocol):
    """The gradient function of a function of one argument: `g(x, dy=None)`."""

    @overload
    def __call__(
        self, x: Tensor | Variable | complex, /, *more: Any, dy: TensorLike = None, **options: Any
    ) -> Tensor: ...

    @overload
    def __call__(self, x: Any, /, *more: Any, dy: TensorLike = None, **options: Any) -> Any: ...


# -- grad, grads, value_and_grad, value_and_grads --------------------------------------------


@overload
def grad(
    f: Callable[..., Any],
    *,
    argnums: None = None,
    has_aux: Literal[False] = False,
    unconnected: Literal["raise", "zero"] = "raise",
) -> GradientFunction: ...


@overload
def grad(
    f: Callable[..., Any],
    *,
    argnums: Argnums | None = None,
    has_aux: bool = False,
    unconnected: Unconnected = "raise",
) -> Callable[..., Any]: ...


@remade
@helpful("grad")
def grad(
    f: Callable[..., Any],
    *,
    argnums: Argnums | None = None,
    has_aux: bool = False,
    unconnected: Unconnected = "raise",
) -> Callable[..., Any]:
    """Return the gradient function of `f`: `g(x, dy=None)` returns d sum(f(x) * dy) / dx.

    Args:
        f: A function that returns a Tensor of any shape.
        argnums: The position of the argument to differentiate by, or a sequence of positions,
            which returns a tuple of gradients. g then passes all positional arguments to f.
        has_aux: f returns `(y, aux)`, and g returns `(gradient, aux)`.
        unconnected: What to do if no path leads from x to f(x): `"raise"`, or return zeros
            (`"zero"`) or None (`"none"`).

    `x` may be a Tensor, an array, a number, a list of numbers, or any nesting of containers
    of these. The gradient has the same structure, and each leaf the shape and dtype of its
    input. `dy` weights the elements of a result that is not a scalar (default: ones). f gets all
    other keywords. They, and the arguments that argnums leaves out, are constants.

    Without argnums the second positional argument is `dy`, as in TensorFlow.js. If f itself
    could take a second argument, the call is ambiguous and raises: write `dy=` or `argnums=`.

    `g` can be differentiated again, to any order. `x` is differentiated as a fresh alias of
    itself, so tensors of outer derivatives are constants inside.

    Raises:
        GradientError: no path from x to f(x); x is integer or bool.
        ArgumentError: f is not callable, or does not return a Tensor; argnums does not fit the
            call; the second positional argument is ambiguous.
        ShapeError, DTypeError: dy does not match f(x).

    Source: `tf.grad` of TensorFlow.js; `jax.grad` for argnums and has_aux.

    >>> import regrad as rg
    >>> f = lambda x: x.square()
    >>> rg.grad(f)(rg.tensor([2.0, 3.0])).print()
    Tensor
        [4, 6]
    >>> rg.grad(lambda x, p: x**p, argnums=0)(3.0, 2.0).item()
    6.0
    """
    _check(f, "grad", unconnected)
    if argnums is not None or has_aux:
        return _by(ArgumentSelection(f, "grad", argnums, has_aux), unconnected)

    def g(x: Any, /, *more: Any, dy: TensorLike | None = None, **options: Any) -> Any:
        if more:
            dy = weight(f, more, dy, "grad")
        if options:
            return _by(ArgumentSelection(f, "grad", 0), unconnected)(x, dy=dy, **options)
        return _gradients(f, (x,), dy, "grad", unconnected)[1][0]

    return _like(f, g, "grad(f)", OF_X_AND_DY)


def _by(choice: ArgumentSelection, unconnected: Unconnected) -> Callable[..., Any]:
    """Return the gradient function for a selection, of the gradient or of value and gradient."""

    def g(args: tuple[Any, ...], dy: Any, options: dict[str, Any]) -> Any:
        call = choice.call(args, options)
        y, found = _gradients(call, call.inputs, dy, choice.api, unconnected, call.places)
        dx = call.parts(found)
        if choice.api == "value_and_grad":
            return ValueAndGrad(call.with_aux(y), dx)
        return call.with_aux(dx)

    return _chosen(choice, g)


@remade
@helpful("grads")
def grads(f: Callable[..., Any], *, unconnected: Unconnected = "raise") -> Callable[..., list[Any]]:
    """Return the function `g([x, …], dy=None) -> [dx, …]` of gradients by all arguments of `f`.

    Arguments, errors and `unconnected` are as in `grad`. If the same tensor is passed twice, each
    position has its own partial derivative.

    Args:
        f: A function of Tensors that returns a Tensor.
        unconnected: As in `grad`.

    Raises:
        GradientError, ShapeError, ArgumentError: as `grad`.

    Source: `tf.grads` of TensorFlow.js (which returns the total derivative twice).

    >>> import regrad as rg
    >>> da, db = rg.grads(lambda a, b: a * b)([rg.scalar(2.0), rg.scalar(5.0)])
    >>> da.print(), db.print()
    Tensor
        5
    Tensor
        2
    (None, None)
    """
    _check(f, "grads", unconnected)

    def g(args: Sequence[Any], dy: TensorLike | None = None) -> list[Any]:
        args = _arguments(args, "grads")
        return _gradients(f, args, dy, "grads", unconnected)[1]

    return _like(f, g, "grads(f)")


@remade
@helpful("value_and_grad")
def value_and_grad(
    f: Callable[..., Any],
    *,
    argnums: Argnums | None = None,
    has_aux: bool = False,
    unconnected: Unconnected = "raise",
) -> Callable[..., ValueAndGrad]:
    """Return a function `g(x, dy=None)` of the value and the gradient: `(value, grad)`.

    With `has_aux=True` the value is the pair `(y, aux)`.

    Args:
        f, argnums, has_aux, unconnected: As in `grad`.

    Raises:
        GradientError, ShapeError, ArgumentError: as `grad`.

    Source: `tf.valueAndGrad` of TensorFlow.js; `jax.value_and_grad` for argnums and has_aux.

    >>> import regrad as rg
    >>> value, dx = rg.value_and_grad(lambda x: x.square())(rg.scalar(3.0))
    >>> value.item(), dx.item()
    (9.0, 6.0)
    """
    _check(f, "value_and_grad", unconnected)
    if argnums is not None or has_aux:
        return _by(ArgumentSelection(f, "value_and_grad", argnums, has_aux), unconnected)
    new = tuple.__new__  # (the class's own `__new__` is a Python function)

    def g(x: Any, /, *more: Any, dy: TensorLike | None = None, **options: Any) -> ValueAndGrad:
        if more:
            dy = weight(f, more, dy, "value_and_grad")
        if options:
            return _by(ArgumentSelection(f, "value_and_grad", 0), unconnected)(x, dy=dy, **options)
        value, (dx,) = _gradients(f, (x,), dy, "value_and_grad", unconnected)
        return new(ValueAndGrad, (value, dx))

    return _like(f, g, "value_and_grad(f)", OF_X_AND_DY)


@remade
@helpful("value_and_grads")
def value_and_grads(
    f: Callable[..., Any], *, unconnected: Unconnected = "raise"
) -> Callable[..., ValueAndGrads]:
    """Return a function `g([x, …], dy=None)` of the value and the gradients: `(value, grads)`.

    Args:
        f, unconnected: As in `grads`.

    Raises:
        GradientError, ShapeError, ArgumentError: as `grad`.

    Source: `tf.valueAndGrads` of TensorFlow.js.

    >>> import regrad as rg
    >>> value, (da, db) = rg.value_and_grads(lambda a, b: a * b)([2.0, 5.0])
    >>> value.item(), da.item(), db.item()
    (10.0, 5.0, 2.0)
    """
    _check(f, "value_and_grads", unconnected)

    def g(args: Sequence[Any], dy: TensorLike | None = None) -> ValueAndGrads:
        args = _arguments(args, "value_and_grads")
        return ValueAndGrads(*_gradients(f, args, dy, "value_and_grads", unconnected))

    return _like(f, g, "value_and_grads(f)")


def _like(
    f: Callable[..., Any], g: Callable[..., Any], api: str, signature: Signature | None = None
) -> Callable[..., Any]:
    """Return the gradient function g, with a name that contains the name of its function."""
    call: Any = answering(g, api)
    call.__wrapped__ = g
    if signature is not None:
        call.__signature__ = signature
    name = getattr(f, "__name__", None) or type(f).__name__
    call.__name__ = call.__qualname__ = f"grad_of_{name.strip('<>')}"
    return call


# The signature of gradient functions of x and dy: dy is a keyword, see `choosing.takes_second`.
OF_X_AND_DY = Signature(
    [
        Parameter("x", Parameter.POSITIONAL_ONLY),
        Parameter("dy", Parameter.KEYWORD_ONLY, default=None),
        Parameter("options", Parameter.VAR_KEYWORD),
    ]
)


def _chosen(choice: ArgumentSelection, g: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that users call, from `g(args, dy, options)` and a selection."""
    f, api = choice.f, choice.api

    def by(*args: Any, dy: TensorLike | None = None, **options: Any) -> Any:
        return g(args, dy, options)

    def of_x(x: Any, /, *more: Any, dy: TensorLike | None = None, **options: Any) -> Any:
        if more:
            dy = weight(f, more, dy, api)
        return g((x,), dy, options)

    if choice.given:
        return _like(f, by, f"{api}(f)")
    return _like(f, of_x, f"{api}(f)", OF_X_AND_DY)


def callable_or_raise(f: object, api: str) -> None:
    """Raise ArgumentError at once if the f passed to a gradient function is not callable."""
    if api == "custom_grad" and isinstance(f, staticmethod | classmethod):
        raise ArgumentError(
            f"custom_grad(f): f is a {kind(f)} object; put @{kind(f)} above @custom_grad, which "
            "takes the function itself"
        )
    if not callable(f) or (api == "custom_grad" and isinstance(f, type)):
        raise ArgumentError(
            f"the f passed in {api}(f) must be a function, got {kind(f)}.{of_result(f, api)}"
        )


def _arguments(args: object, api: str) -> Sequence[Any]:
    if not isinstance(args, list | tuple):
        raise ArgumentError(
            f"{api}(f)(args): args must be a list, one entry per argument of f, got {kind(args)}. "
            f"Write {api}(f)([x]), or grad(f)(x) for a function of one argument."
        )
    if not args:
        raise ArgumentError(f"{api}(f)(args): args is empty, there is nothing to differentiate by")
    return args


def _check(f: object, api: str, unconnected: Unconnected) -> None:
    callable_or_raise(f, api)
    if unconnected not in ("raise", "zero", "none"):
        raise ArgumentError(f"unconnected is 'raise', 'zero' or 'none', got {unconnected!r}")


def _gradients(
    f: Callable[..., Any],
    args: Sequence[Any],
    dy: TensorLike | None,
    api: str,
    unconnected: Unconnected,
    places: Sequence[int] | None = None,
) -> tuple[Tensor, Any]:
    """Return the value of f, and its gradients by these arguments (`places`: their positions)."""
    inputs, aliases, close = watched_inputs(args, api)
    tape = Tape(map(id_of, aliases))
    try:
        y = run_taped(tape, f, inputs)
    except TypeError:
        check_passed(f, inputs, api)
        raise
    finally:
        watched = tape.close()
    if type(y) is not Tensor or y._data.dtype is not FLOAT:
        y = result(y, api)
    if dy is not None:
        dy = checked_dy(dy, y, api)
    found = pull_back(tape, y, dy, watched)
    gradients = []
    for i, x in enumerate(aliases):
        dx = found.get(x._id, UNUSED)
        gradients.append(
            dx if isinstance(dx, Tensor) else without(dx, x, unconnected, api, args, i, places)
        )
    return y, gradients if close is None else list(close(gradients))


def watched_inputs(
    args: Sequence[Any], api: str
) -> tuple[Sequence[Any], list[Tensor], Callable[[Sequence[Any]], list[Any]] | None]:
    """Return f's arguments, the fresh aliases in them, and the function that rebuilds gradients."""
    leaves, rebuild = args, None
    if (len(args) != 1 or type(args[0]) is not Tensor) and {*map(type, args)} != {Tensor}:
        leaves, rebuild = containers.flatten(tuple(args))  # (a list of numbers would be one tensor)
    aliases = []
    for leaf in leaves:
        aliases.append(watchable(leaf, api))
    if not aliases and None in args:
        raise _no_tensor(args[0] if len(args) == 1 else args, api)
    return aliases if rebuild is None else rebuild(aliases), aliases, rebuild


def watchable(leaf: TensorLike, api: str) -> Tensor:
    """Return a fresh alias of an input that can be differentiated."""
    if type(leaf) is not Tensor:
        try:
            leaf = dispatch.differentiable(leaf)
        except ArgumentError:
            raise _no_tensor(leaf, api) from None
    if leaf._data.dtype is not FLOAT and not is_inexact(leaf.dtype):
        dispatch.check_differentiable(leaf, f"the input of {api.partition('(')[0]}(f)")
    if OPEN:
        refuse_elsewhere(f"{api.partition('(')[0]}(f)", (dispatch.in_region(leaf),))
    return dispatch.alias(leaf)


def _no_tensor(leaf: object, api: str) -> ArgumentError:
    name = api.partition("(")[0]
    if containers.is_closed(leaf):
        return ArgumentError(f"{name}: the input is {kind(leaf)}, {containers.CLOSED}")
    return ArgumentError(
        f"{name}(f) differentiates by Tensors, arrays and numbers, and containers of them; got "
        f"{kind(leaf)}: {leaf!r:.60}. Bind arguments that are not tensors in a closure: "
        f"{name}(lambda x: f(x, option))."
    )


def result(y: Any, api: str) -> Tensor:
    """Return the result of f, if it is a Tensor that can have a gradient."""
    y = _read(y)
    if not isinstance(y, Tensor):
        raise ArgumentError(
            f"the f passed in {api}(f) must return a Tensor, got {kind(y)}."
            + (
                " Did f forget its return statement?"
                if y is None
                else " To differentiate several results, use vjp or jacobian."
                if isinstance(y, list | tuple | dict)
                else " Compute it from the input with regrad's ops."
            )
        )
    if y._data.dtype is not FLOAT and not is_inexact(y.dtype):
        raise GradientError(
            f"cannot compute a gradient: f returned {y.dtype} {y.shape}, but only floats (and "
            "complex numbers) have a gradient. A comparison or a cast to integers ended the path."
        )
    return y


def checked_dy(dy: TensorLike | None, y: Tensor, api: str) -> Tensor | None:
    """Return `dy` as a Tensor of y's shape and a matching dtype."""
    if dy is None:
        return None
    plain = dispatch.is_plain(dy)
    dy = dispatch.lift_as(dy, y.dtype) if plain else dispatch.lift(dy)
    if not plain and not is_inexact(dy.dtype):
        raise DTypeError(
            f"{api}(f)(x, dy): dy must be of floats, as f(x) is ({y.dtype}), got {dy.dtype}. "
            "Convert it: astype(dy, y.dtype)."
        )
    if dy.shape != y.shape:
        raise ShapeError(
            f"{api}(f)(x, dy): dy must have the shape of f(x), {y.shape}, got {dy.shape}. "
            "Use broadcast_to(dy, y.shape) to use one value for all."
        )
    return dy


def without(
    dx: Tensor | None,
    x: Tensor,
    unconnected: Unconnected,
    api: str,
    args: Sequence[Any],
    i: int,
    places: Sequence[int] | None,
) -> Tensor | None:
    """Return zeros for an input without a gradient; without a path, apply `unconnected`."""
    if dx is UNUSED:
        if unconnected == "none":
            return None
        if unconnected == "raise":
            raise no_path(api, args, i, places)
    return OPS["ZerosLike"].function(x)


def no_path(
    api: str, args: Sequence[Any], i: int, places: Sequence[int] | None = None
) -> GradientError:
    """Return the error for an input (the i-th leaf) from which no path leads to y."""
    name = containers.paths(tuple(args), "args")[i]
    if places is not None:
        name = re.sub(r"\d+", lambda found: str(places[int(found[0])]), name, count=1)
    elif not api.endswith("grads"):
        name = name.replace("args[0]", "x", 1)
    return GradientError(
        f"cannot compute the gradient of y = f(x) by {name}: no path leads from it to y. "
        "Make sure that f uses its argument, with regrad's ops, all the way from x to y; "
        "float(x), x.item(), x.numpy(), comparisons, casts to integers and stop_gradient end a "
        "path. If this is intended, "
        f"{api}(f, unconnected='zero') returns zeros."
    )


# -- variables -------------------------------------------------------------------------------


@helpful("variable_grads")
def variable_grads(
    f: Callable[[], Any], var_list: Iterable[Variable] | None = None
) -> VariableGrads:
    """Return `(value, grads)`: `f()`, and its gradients by the Variables that it reads.

    Args:
        f: A function without arguments that returns a scalar Tensor.
        var_list: The Variables to differentiate by; by default all trainable Variables
            that f reads.

    `grads` maps names to gradients, in the order in which the variables were made. If a trainable
    variable does not lead to the value, it is absent. A variable in `var_list` that is not
    trainable maps to None.

    Raises:
        GradientError: no variable leads to the value; no variable in var_list is trainable; two
            different variables have one name.
        ShapeError: f returns a Tensor that is not a scalar.
        ArgumentError: f is not callable or does not return a Tensor; var_list has an entry that is
            not a Variable.

    Source: `tf.variableGrads` of TensorFlow.js.

    >>> import regrad as rg
    >>> a = rg.Variable([3.0, 4.0], name="a")
    >>> x = rg.tensor([1.0, 2.0])
    >>> value, grads = rg.variable_grads(lambda: (a * x.square()).sum())
    >>> value.item(), grads["a"].tolist()
    (19.0, [1.0, 4.0])
    """
    y, found = variable_pairs(f, var_list)
    return VariableGrads(y, _by_name([(v, dx) for v, dx in found if dx is not UNUSED]))


def variable_pairs(
    f: Callable[[], Any], var_list: Iterable[Variable] | None = None
) -> tuple[Tensor, list[tuple[Variable, Any]]]:
    """Return the value of `f()`, and each variable with its gradient.

    The gradient is UNUSED if the variable was read and does not lead to the value, and None if the
    variable is not trainable.
    """
    callable_or_raise(f, "variable_grads")
    chosen = None if var_list is None else _variables(var_list)
    tape = VariableTape(None if chosen is None else [v for v in chosen if v.trainable])
    try:
        y = result(run_taped(tape, lambda: _read(f())), "variable_grads")
    except TypeError:
        check_passed(f, (), "variable_grads")
        raise
    finally:
        watched = tape.close()
    if y.ndim:
        raise ShapeError(
            "the f passed in variable_grads(f) must return a scalar, but it returned a Tensor "
            f"of rank {y.ndim}, shape {y.shape}. Reduce it with sum() or mean()."
        )
    found = pull_back(tape, y, None, watched)
    if not any(alias._id in found for _, alias in tape.reads.values()):
        raise GradientError(
            "variable_grads: no path leads from any "
            f"{'variable in var_list' if chosen else 'trainable variable'} to the value of f. "
            "Read the variables inside f, with regrad's ops."
        )
    reads = sorted(tape.reads.items(), key=lambda item: item[0]._serial)
    pairs = [(v, _if_used(found.get(x._id, UNUSED), x)) for v, (_, x) in reads]
    return y, [*pairs, *((v, None) for v in chosen or () if not v.trainable)]


def _read(y: Any) -> Any:
    """Return the result of f. Objects that represent a Tensor are read while the tape is on."""
    return y._read() if isinstance(y, Readable) else y


def _if_used(dx: Tensor | None, x: Tensor) -> Any:
    return dx if dx is UNUSED else or_zeros(dx, x)


def _variables(var_list: Iterable[Variable]) -> list[Variable]:
    alone = isinstance(var_list, Variable) or not isinstance(var_list, Iterable)
    chosen: list[Any] = [var_list] if alone else list(var_list)
    for v in chosen:
        if not isinstance(v, Variable):
            raise ArgumentError(
                f"variable_grads(f, var_list): var_list is a list of Variables, got {kind(v)}."
                " For a Module pass module.trainable_variables; for Tensors there is grads."
            )
    if not any(v.trainable for v in chosen):
        raise GradientError(
            "variable_grads(f, var_list) needs at least one trainable variable, but none of the "
            f"{len(chosen)} given is trainable"
        )
    return chosen


def _by_name(pairs: Sequence[tuple[Variable, Tensor | None]]) -> dict[str, Tensor | None]:
    owners: dict[str, Variable] = {}
    for variable, _ in pairs:
        if owners.setdefault(variable.name, variable) is not variable:
            raise GradientError(
                f"variable_grads: two different variables are called {variable.name!r}; give "
                "them different names, or leave the names out"
            )
    return {variable.name: dx for variable, dx in pairs}


__all__ = [
    "ValueAndGrad",
    "ValueAndGrads",
    "VariableGrads",
    "grad",
    "grads",
    "value_and_grad",
    "value_and_grads",
    "variable_grads",
]
