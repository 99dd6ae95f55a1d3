"""NumPy's functions on Tensors. They run the regrad op of the same meaning, or raise.

NumPy dispatches `np.sin(t)`, `array * t` and `np.concatenate([t, u])` to this module through its
own protocols (NEP 13 for ufuncs, NEP 18 for functions), so values never silently leave the tape.
Each function is declared with NumPy's signature. NumPy itself computes the other functions from
the values, as long as nothing is being differentiated or traced; otherwise regrad raises.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np

import regrad as rg
from regrad.core.dispatch import lift
from regrad.core.registry import OPS
from regrad.core.signatures import parameters_of
from regrad.core.state import OPEN, current
from regrad.core.tensor import Readable, Tensor, TensorLike
from regrad.errors import ArgumentError, InvalidValueError


@cache
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; an empty one where NumPy before 2.4 provides none."""
    try:
        return inspect.signature(function)
    except ValueError:  # the function is implemented in C
        return inspect.Signature()


# -- ufuncs --------------------------------------------------------------------------------------

# Ufuncs whose op has another name in regrad, and ufuncs of ops that are not elementwise.
UFUNCS: dict[np.ufunc, str | Callable[..., Any]] = {
    np.conjugate: "conj",
    np.fabs: "abs",
    np.matmul: "matmul",
    np.positive: "identity",
    np.rint: "round",
    np.vecdot: "vecdot",
    np.divmod: lambda a, b: (rg.floor_divide(a, b), rg.remainder(a, b)),
    np.exp2: lambda x: rg.pow(2.0, x),
}
SCIPY = {  # ufuncs of scipy.special, by name so that this module need not import it
    "expit": "nn.sigmoid",
    "gammaln": "lgamma",
    "log_expit": "nn.log_sigmoid",
}
METHODS: dict[Any, Any] = {  # methods of ufuncs. They take `axis`, which is 0 by default
    (np.add, "reduce"): "sum",
    (np.multiply, "reduce"): "prod",
    (np.maximum, "reduce"): "max",
    (np.minimum, "reduce"): "min",
    (np.logical_and, "reduce"): "all",
    (np.logical_or, "reduce"): "any",
    (np.logaddexp, "reduce"): "logsumexp",
    (np.add, "accumulate"): "cumulative_sum",
    (np.multiply, "accumulate"): "cumulative_prod",
    (np.maximum, "accumulate"): "cumulative_max",
}


def array_ufunc(self: Tensor, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
    """Implement `__array_ufunc__`: `np.sin(t)`, `array + t` and `np.add.reduce(t)`."""
    if any(_is_foreign(type(x), "__array_ufunc__") for x in inputs):
        return NotImplemented
    try:
        return _ufunc_of_tensors(ufunc, method, inputs, options)
    except ArgumentError:
        if method == "at" or not is_unobserved():  # (NumPy writes even to read-only arrays)
            raise
        return _by_numpy(ufunc.__name__, getattr(ufunc, method), inputs, options)


def _ufunc_of_tensors(
    ufunc: np.ufunc, method: str, inputs: Sequence[Any], options: dict[str, Any]
) -> Any:
    if "out" in options:
        raise ArgumentError(
            f"np.{ufunc.__name__}(..., out=y), or y += t, would write a Tensor's values into the "
            "array y, where they have no gradient. Make a new Tensor: y = y + t."
        )
    if method == "__call__":
        allowed = ("axis",) if ufunc is np.vecdot else ()
        return _of_ufunc(ufunc)(*inputs, **_check_options(options, allowed, ufunc.__name__))
    name = f"{ufunc.__name__}.{method}"
    ours = METHODS.get((ufunc, method))
    if ours is None:
        raise _refusal(name)
    options = {"axis": 0} | {k: v for k, v in options.items() if (k, v) != ("dtype", None)}
    allowed = ("axis", "keepdims") if method == "reduce" else ("axis",)
    return getattr(rg, ours)(*inputs, **_check_options(options, allowed, name))


def is_unobserved() -> bool:
    """Return whether no tape is open in any thread, and no trace or guard is active here.

    Only then may values leave regrad through a NumPy function, because no gradient can be lost.
    """
    state = current()
    return not OPEN and (state is None or not (state.tapes or state.guard or state.region))


def _by_numpy(name: str, run: Callable[..., Any], args: Any, options: Any) -> Any:
    """Return the result that NumPy computes from the values. Raise where it writes to a Tensor."""
    try:
        return run(*_values(args), **_values(options))
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise InvalidValueError(
            f"np.{name} would write into a Tensor, which never changes. Make a new one, as in "
            "at_set(x, index, y)."
        ) from None


def _values(value: Any) -> Any:
    """Replace the Tensors in arguments by NumPy arrays."""
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, Readable):
        return value._read().numpy()
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(_values, value))
    if type(value) is dict:
        return {k: _values(v) for k, v in value.items()}
    return value


def _of_ufunc(ufunc: np.ufunc) -> Callable[..., Any]:
    name = ufunc.__name__
    ours = UFUNCS.get(ufunc)
    if ours is None:
        scipy = sys.modules.get("scipy.special")
        ours = _op_named_as(ufunc, np, scipy)
        if ours is None and getattr(scipy, name, None) is ufunc:
            ours = SCIPY.get(name)
        if ours is None:
            raise _refusal(name)
        UFUNCS[ufunc] = ours
    return _resolve(ours)


def _op_named_as(ufunc: np.ufunc, *places: ModuleType | None) -> Callable[..., Any] | None:
    """Return the elementwise op that has the name of a ufunc in one of these modules."""
    # (regrad's imported ops come first, because most ufuncs are among them; custom ops come last)
    loaded = (op for op in OPS.loaded() if op.function.__module__.startswith("regrad."))
    ops = chain(loaded, OPS.values())
    fits = (op for op in ops if op.elementwise and len(op.inputs) == ufunc.nin)
    named = (op for op in fits for place in places if getattr(place, op.name, None) is ufunc)
    return next((op.function for op in named), None)


def _resolve(ours: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return a function; a name is looked up in regrad at call time."""
    return attrgetter(ours)(rg) if isinstance(ours, str) else ours


def _check_options(options: dict[str, Any], allowed: Sequence[str], name: str) -> dict[str, Any]:
    for option in options:
        if option not in allowed:
            raise ArgumentError(f"np.{name} of a Tensor does not take {option}")
    return options


def _is_foreign(kind: type, protocol: str) -> bool:
    """Return whether a type of another library implements NumPy's protocol."""
    if issubclass(kind, Tensor | Readable | np.ndarray | np.generic):
        return False
    return getattr(kind, protocol, None) is not None


INSTEAD = {  # the call to suggest, where it does not follow from the name
    "add.at": "at_add(x, index, y)",
    "average": "sum(weights * x) / sum(weights)",
    "cbrt": "sign(x) * pow(abs(x), 1 / 3)",
    "convolve": "nn.conv1d(x, w, stride, pad)",
    "fill_diagonal": "at_set(x, index, y)",
    "may_share_memory": "take(x, order), with the order from random.permutation(len(x))",
    "nansum": "sum(nan_to_num(x))",
}


def _refusal(name: str) -> ArgumentError:
    use = f"regrad's {INSTEAD[name]}" if name in INSTEAD else "regrad's own functions"
    return ArgumentError(
        f"np.{name} has no counterpart for Tensors, and NumPy's result would have no gradient. "
        f"Use {use}. If no gradient is needed, call np.{name}(stop_gradient(x).numpy(), ...)."
    )


# -- functions -----------------------------------------------------------------------------------

# NumPy's functions and regrad's functions for them. regrad binds the arguments by NumPy's
# signature. It passes them by position where regrad's function is positional, else by name.
SAME_NAMES = (
    "all any argmax argmin argsort astype broadcast_arrays broadcast_to clip count_nonzero diff "
    "einsum expand_dims flip full_like imag isclose matrix_transpose max mean median meshgrid min "
    "moveaxis nan_to_num nonzero ones_like prod quantile real repeat reshape roll searchsorted "
    "sinc sort squeeze std sum swapaxes take_along_axis tensordot tril triu unstack var zeros_like "
    "fft.fft fft.fftn fft.fftshift fft.hfft fft.ifft fft.ifftn fft.ifftshift fft.ihfft fft.irfft "
    "fft.irfftn fft.rfft fft.rfftn linalg.cholesky linalg.cross linalg.det linalg.diagonal "
    "linalg.eigh linalg.eigvalsh linalg.inv linalg.lstsq linalg.matmul linalg.matrix_norm "
    "linalg.matrix_power linalg.matrix_transpose linalg.outer linalg.pinv linalg.qr "
    "linalg.slogdet linalg.solve linalg.svd linalg.svdvals linalg.tensordot linalg.trace "
    "linalg.vecdot linalg.vector_norm"
)
FUNCTIONS: dict[Callable[..., Any], str | Callable[..., Any]] = {
    **{attrgetter(name)(np): name for name in SAME_NAMES.split()},
    np.amax: "max",
    np.amin: "min",
    np.copy: "identity",
    np.cross: "linalg.cross",
    np.kron: "linalg.kron",
    np.transpose: "permute_dims",
}
RENAMED = {"a_max": "max", "a_min": "min", "ddof": "correction"}  # options
MEANINGLESS = {"copy", "kind"}  # options without effect: Tensors are immutable, sort is stable

# SciPy calls this function on gradients and passes the result to compiled code, which accepts only
# NumPy arrays.
TO_ARRAYS = {np.atleast_1d}


def array_function(
    self: Tensor,
    func: Callable[..., Any],
    types: Sequence[type],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Implement `__array_function__`: `np.sum(t)` and `np.concatenate([t, u])`."""
    if any(_is_foreign(t, "__array_function__") for t in types):
        return NotImplemented
    if func in TO_ARRAYS and is_unobserved():
        return func(*_values(args), **_values(kwargs))
    try:
        return _function_of_tensors(func, args, kwargs)
    except ArgumentError:
        if not is_unobserved():
            raise
        return _by_numpy(func.__name__, func, args, kwargs)


def _function_of_tensors(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    name = f"{func.__module__}.{func.__name__}".removeprefix("numpy.")
    ours = FUNCTIONS.get(func)
    if ours is None:
        raise _refusal(name)
    ours = _resolve(ours)
    try:
        args, kwargs = _translated(func, ours, args, kwargs)
        signature(ours).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"np.{name} of a Tensor takes the arguments {parameters_of(ours)}: {error}"
        ) from None
    return ours(*args, **kwargs)


def _translated(
    func: Callable[..., Any], ours: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Translate the arguments of NumPy's function, without defaults (`out=None`, `order="C"`)."""
    known = signature(func).parameters
    if not known:
        return args, kwargs
    takes = signature(ours).parameters
    positions = sum(p.kind is p.POSITIONAL_ONLY for p in takes.values())
    values, options = [], {}
    for name, value in signature(func).bind(*args, **kwargs).arguments.items():
        parameter = known[name]
        if parameter.kind is parameter.VAR_POSITIONAL:
            values += value
        elif parameter.kind is parameter.VAR_KEYWORD:
            options |= value
        elif len(values) < positions:
            values.append(value)
        elif value is not parameter.default and (name in takes or name not in MEANINGLESS):
            options[RENAMED.get(name, name)] = value
    return values, options


def like(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the implementation of NumPy's functions for Tensors."""

    def decorate(ours: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(functions, ours))
        return ours

    return decorate


def _flat(x: TensorLike) -> Tensor:
    return rg.reshape(x, (-1,))


def _scan(name: str) -> Callable[..., Any]:
    """Return a scan along an axis, or along all elements in a row."""
    return lambda a, axis=None: getattr(rg, name)(
        _flat(a) if axis is None else a, axis=0 if axis is None else axis
    )


def _rounded(a: TensorLike, decimals: int = 0) -> Tensor:
    return round(lift(a), decimals)


# -- shapes, parts and order ---------------------------------------------------------------------

FUNCTIONS |= {
    np.atleast_1d: lambda *arys: _one_or_all([_at_least(x, 1) for x in arys]),
    np.atleast_2d: lambda *arys: _one_or_all([_at_least(x, 2) for x in arys]),
    np.concatenate: lambda arrays, /, axis=0: rg.concat(list(arrays), axis=axis),
    np.cumprod: _scan("cumulative_prod"),
    np.cumsum: _scan("cumulative_sum"),
    np.empty_like: lambda prototype, /, dtype=None: rg.empty_like(prototype, dtype=dtype),
    np.ravel: lambda a: _flat(a),
    np.round: _rounded,
    np.around: _rounded,
    np.stack: lambda arrays, axis=0: rg.stack(list(arrays), axis=axis),
    np.take: lambda a, indices, axis=None: lift(a).take(indices, axis),
    np.tile: lambda A, reps: rg.tile(A, (reps,) if np.ndim(reps) == 0 else tuple(reps)),
    np.vstack: lambda tup: rg.concat([_at_least(x, 2) for x in tup], axis=0),
    np.where: lambda condition, x=None, y=None, /: (
        rg.nonzero(condition) if x is None else rg.where(condition, x, y)
    ),
}


def _one_or_all(tensors: list[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _at_least(x: TensorLike, rank: int) -> Tensor:
    x = lift(x)
    return rg.reshape(x, (1,) * (rank - x.ndim) + x.shape)


@like(np.hstack)
def _(tup):
    tensors = [_at_least(x, 1) for x in tup]
    return rg.concat(tensors, axis=0 if tensors[0].ndim == 1 else 1)


@like(np.diagonal)
def _diagonal(a, offset=0, axis1=0, axis2=1):
    return rg.linalg.diagonal(rg.moveaxis(a, (axis1, axis2), (-2, -1)), offset=offset)


@like(np.trace)
def _(a, offset=0, axis1=0, axis2=1):
    return rg.sum(_diagonal(a, offset, axis1, axis2), axis=-1)


@like(np.diag)
def _(v, k=0):
    v = lift(v)
    return rg.linalg.diag(v, offset=k) if v.ndim == 1 else _diagonal(v, k)


@like(np.split)
def _split(ary, indices_or_sections, axis=0):
    """Split at positions, as NumPy defines them; regrad's split takes sizes."""
    x = lift(ary)
    if np.ndim(indices_or_sections) == 0:
        return list(rg.split(x, int(indices_or_sections), axis=axis))
    cuts = [0, *indices_or_sections, x.shape[axis]]
    return list(rg.split(x, [int(n) for n in np.diff(cuts)], axis=axis))


@like(np.pad)
def _(array, pad_width, mode="constant", *, constant_values=0):
    x = lift(array)
    paddings = np.broadcast_to(pad_width, (x.ndim, 2)).tolist()
    return rg.pad(x, paddings, mode=mode, constant_value=constant_values)


# -- Fourier transforms ----------------------------------------------------------------------------


def _over_two_axes(name: str) -> Callable[..., Any]:
    return lambda a, s=None, axes=(-2, -1), norm="backward": getattr(rg.fft, name)(
        a, s=s, axes=axes, norm=norm
    )


for _name in ("fft", "ifft", "rfft", "irfft"):
    FUNCTIONS[getattr(np.fft, f"{_name}2")] = _over_two_axes(f"{_name}n")


# -- linear algebra ------------------------------------------------------------------------------

FUNCTIONS |= {
    np.outer: lambda a, b: rg.linalg.outer(_flat(a), _flat(b)),
    np.vdot: lambda a, b, /: rg.vecdot(_flat(a), _flat(b)),
}


@like(np.dot)
def _(a, b):
    a, b = lift(a), lift(b)
    if not (a.ndim and b.ndim):
        return rg.multiply(a, b)
    if b.ndim <= 2:
        return rg.matmul(a, b)
    return rg.tensordot(a, b, axes=((a.ndim - 1,), (b.ndim - 2,)))


@like(np.inner)
def _(a, b):
    a, b = lift(a), lift(b)
    if not (a.ndim and b.ndim):
        return rg.multiply(a, b)
    return rg.tensordot(a, b, axes=((a.ndim - 1,), (b.ndim - 1,)))


@like(np.linalg.norm)
def _(x, ord=None, axis=None, keepdims=False):
    """Return the norm of vectors or matrices, by `axis` and `ord`; by default of all elements."""
    x = lift(x)
    axes = (axis,) if isinstance(axis, int) else axis
    if ord is None or len(axes or x.shape) == 1:
        return rg.linalg.vector_norm(x, axis=axes, keepdims=keepdims, ord=2 if ord is None else ord)
    if axes is None:
        return rg.linalg.matrix_norm(x, keepdims=keepdims, ord=ord)
    y = rg.linalg.matrix_norm(rg.moveaxis(x, axes, (-2, -1)), ord=ord)
    return rg.expand_dims(y, axis=tuple(i % x.ndim for i in axes)) if keepdims else y


# -- inspection functions, which have no gradient ------------------------------------------------

FUNCTIONS |= {
    np.iscomplexobj: lambda x: x.dtype.kind == "c",
    np.isrealobj: lambda x: x.dtype.kind != "c",
    np.ndim: lambda a: a.ndim,
    np.shape: lambda a: a.shape,
    np.size: lambda a, axis=None: a.size if axis is None else a.shape[axis],
}


def _of_values(theirs: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, /, **options: theirs(lift(a)._values(), lift(b)._values(), **options)


for _function in (np.allclose, np.array_equal, np.array_equiv):
    FUNCTIONS[_function] = _of_values(_function)
