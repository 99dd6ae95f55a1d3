"""NumPy's functions on Tensors: they run the regrad op of the same meaning, or raise.

`np.sin(t)`, `array * t` and `np.concatenate([t, u])` come here by NumPy's own protocols
(NEP 13 for ufuncs, NEP 18 for functions), so that they never quietly leave the tape. A
function is written down under NumPy's signature. What NumPy offers beyond it runs on the values,
by NumPy, as long as nobody differentiates or traces anything; otherwise it is refused.
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

from regrad.core.dispatch import lift
from regrad.core.registry import OPS
from regrad.core.state import OPEN, current
from regrad.core.tensor import Readable, Tensor, TensorLike
from regrad.errors import ArgumentError, InvalidValueError


class _Regrad:
    """The package, which imports this module and is complete when a function first runs."""

    def __getattr__(self, name: str) -> Any:
        import regrad

        return getattr(regrad, name)


rg: _Regrad = _Regrad()


@cache
def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; an empty one of those that NumPy before 2.4 hides."""
    try:
        return inspect.signature(function)
    except ValueError:  # it is written in C
        return inspect.Signature()


# -- ufuncs --------------------------------------------------------------------------------------

# Those that are called otherwise here, and those of ops that are not elementwise.
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
SCIPY = {  # ufuncs of scipy.special, which is not imported for this
    "expit": "nn.sigmoid",
    "gammaln": "lgamma",
    "log_expit": "nn.log_sigmoid",
}
METHODS: dict[Any, Any] = {  # of ufuncs; they take `axis`, which is 0 unless given
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
    """`__array_ufunc__`: what NumPy calls for `np.sin(t)`, `array + t` and `np.add.reduce(t)`."""
    if any(_is_foreign(type(x), "__array_ufunc__") for x in inputs):
        return NotImplemented
    try:
        return _ufunc_of_tensors(ufunc, method, inputs, options)
    except ArgumentError:
        if method == "at" or not is_unobserved():  # (NumPy writes to arrays that are read-only)
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
    """Return whether no tape is open in any thread, and nothing is traced or guarded here.

    Only then may values leave regrad by a function of NumPy's: nobody could miss their gradient.
    """
    state = current()
    return not OPEN and (state is None or not (state.tapes or state.guard or state.region))


def _by_numpy(name: str, run: Callable[..., Any], args: Any, options: Any) -> Any:
    """Return the result that NumPy computes from the values; refuse to write into a Tensor."""
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
    """Arguments with NumPy's arrays in the places of Tensors."""
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
    """Return the elementwise op whose name one of these modules has for a ufunc."""
    # (most are found among those that are loaded; users' ops come last, whatever is loaded)
    loaded = (op for op in OPS.loaded() if op.function.__module__.startswith("regrad."))
    ops = chain(loaded, OPS.values())
    fits = (op for op in ops if op.elementwise and len(op.inputs) == ufunc.nin)
    named = (op for op in fits for place in places if getattr(place, op.name, None) is ufunc)
    return next((op.function for op in named), None)


def _resolve(ours: str | Callable[..., Any]) -> Callable[..., Any]:
    """A function, found by its name in regrad only now that it is called."""
    return attrgetter(ours)(rg) if isinstance(ours, str) else ours


def _check_options(options: dict[str, Any], allowed: Sequence[str], name: str) -> dict[str, Any]:
    for option in options:
        if option not in allowed:
            raise ArgumentError(f"np.{name} of a Tensor does not take {option}")
    return options


def _is_foreign(kind: type, protocol: str) -> bool:
    """Return whether a type answers NumPy's protocol and is neither NumPy's nor ours."""
    if issubclass(kind, Tensor | Readable | np.ndarray | np.generic):
        return False
    return getattr(kind, protocol, None) is not None


INSTEAD = {  # what to call, where that is not plain from the name
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
        f"Use {use}, or say that no gradient is meant: np.{name}(stop_gradient(x).numpy(), ...)."
    )


# -- functions -----------------------------------------------------------------------------------

SAME_ARGUMENTS = (
    "astype broadcast_arrays broadcast_to einsum expand_dims imag matrix_transpose meshgrid "
    "moveaxis nonzero real searchsorted sinc unstack linalg.cholesky linalg.cross linalg.det "
    "linalg.diagonal linalg.eigh linalg.eigvalsh linalg.inv linalg.lstsq linalg.matrix_norm "
    "linalg.matrix_power linalg.outer linalg.pinv linalg.qr linalg.slogdet linalg.solve "
    "linalg.svd linalg.svdvals linalg.trace linalg.vector_norm"
)
FUNCTIONS: dict[Callable[..., Any], str | Callable[..., Any]] = {
    attrgetter(name)(np): name for name in SAME_ARGUMENTS.split()
}


# SciPy calls it on gradients, and hands them to compiled code that takes NumPy's arrays alone.
TO_ARRAYS = {np.atleast_1d}


def array_function(
    self: Tensor,
    func: Callable[..., Any],
    types: Sequence[type],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """`__array_function__`: what NumPy calls for `np.sum(t)` and `np.concatenate([t, u])`."""
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
    given = _without_defaults(func, kwargs)
    try:
        signature(ours).bind(*args, **given)
    except TypeError as error:
        raise ArgumentError(
            f"np.{name} of a Tensor takes the arguments {signature(ours)}: {error}"
        ) from None
    return ours(*args, **given)


def _without_defaults(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options that say something: `out=None` and `order="C"` do not."""
    known = signature(func).parameters
    return {k: v for k, v in kwargs.items() if k not in known or v is not known[k].default}


def like(*functions: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Say what NumPy's functions mean for Tensors."""

    def decorate(ours: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(functions, ours))
        return ours

    return decorate


def _tensors(*values: TensorLike) -> list[Tensor]:
    return [lift(v) for v in values]


def _flat(x: TensorLike) -> Tensor:
    return rg.reshape(x, (-1,))


# -- reductions and scans ------------------------------------------------------------------------


def _reduction(name: str) -> Callable[..., Any]:
    return lambda a, axis=None, *, keepdims=False: getattr(rg, name)(
        a, axis=axis, keepdims=keepdims
    )


def _total(name: str) -> Callable[..., Any]:
    return lambda a, axis=None, dtype=None, *, keepdims=False: getattr(rg, name)(
        a, axis=axis, dtype=dtype, keepdims=keepdims
    )


def _spread(name: str) -> Callable[..., Any]:
    return lambda a, axis=None, *, ddof=0, correction=0, keepdims=False: getattr(rg, name)(
        a, axis=axis, correction=ddof or correction, keepdims=keepdims
    )


def _scan(name: str) -> Callable[..., Any]:
    return lambda a, axis=None: getattr(rg, name)(
        _flat(a) if axis is None else a, axis=0 if axis is None else axis
    )


for _name in ("all", "any", "argmax", "argmin", "count_nonzero", "max", "mean", "min"):
    FUNCTIONS[getattr(np, _name)] = _reduction(_name)

FUNCTIONS |= {
    np.amax: _reduction("max"),
    np.amin: _reduction("min"),
    np.cumprod: _scan("cumulative_prod"),
    np.cumsum: _scan("cumulative_sum"),
    np.median: _reduction("median"),
    np.prod: _total("prod"),
    np.quantile: lambda a, q, axis=None, *, method="linear", keepdims=False: rg.quantile(
        a, q, axis=axis, keepdims=keepdims, method=method
    ),
    np.std: _spread("std"),
    np.sum: _total("sum"),
    np.var: _spread("var"),
}


# -- shapes, parts and order ---------------------------------------------------------------------

FUNCTIONS |= {
    np.argsort: lambda a, axis=-1, kind=None, *, stable=None: rg.argsort(a, axis=axis),
    np.atleast_1d: lambda *arys: _one_or_all([_at_least(x, 1) for x in arys]),
    np.atleast_2d: lambda *arys: _one_or_all([_at_least(x, 2) for x in arys]),
    np.concatenate: lambda arrays, /, axis=0: rg.concat(list(arrays), axis=axis),
    np.copy: lambda a: rg.identity(a),
    np.diff: lambda a, n=1, axis=-1: rg.diff(a, n=n, axis=axis),
    np.flip: lambda m, axis=None: rg.flip(m, axis=axis),
    np.ravel: lambda a: _flat(a),
    np.repeat: lambda a, repeats, axis=None: rg.repeat(a, repeats, axis=axis),
    np.reshape: lambda a, /, shape: rg.reshape(a, shape),
    np.roll: lambda a, shift, axis=None: rg.roll(a, shift, axis=axis),
    np.sort: lambda a, axis=-1, kind=None, *, stable=None: rg.sort(a, axis=axis),
    np.squeeze: lambda a, axis=None: rg.squeeze(a, axis=axis),
    np.stack: lambda arrays, axis=0: rg.stack(list(arrays), axis=axis),
    np.swapaxes: lambda a, axis1, axis2: rg.swapaxes(a, axis1, axis2),
    np.take: lambda a, indices, axis=None: rg.take(
        _flat(a) if axis is None else a, indices, axis=0 if axis is None else axis
    ),
    np.take_along_axis: lambda arr, indices, axis=-1: rg.take_along_axis(arr, indices, axis=axis),
    np.tile: lambda A, reps: rg.tile(A, (reps,) if np.ndim(reps) == 0 else tuple(reps)),
    np.transpose: lambda a, axes=None: rg.permute_dims(a, axes),
    np.tril: lambda m, k=0: rg.tril(m, k=k),
    np.triu: lambda m, k=0: rg.triu(m, k=k),
    np.where: lambda condition, *xy: rg.where(condition, *xy) if xy else rg.nonzero(condition),
    np.vstack: lambda tup: rg.concat([_at_least(x, 2) for x in tup], axis=0),
}


def _one_or_all(tensors: list[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _at_least(x: TensorLike, rank: int) -> Tensor:
    (x,) = _tensors(x)
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
    (v,) = _tensors(v)
    return rg.linalg.diag(v, offset=k) if v.ndim == 1 else _diagonal(v, k)


@like(np.split)
def _split(ary, indices_or_sections, axis=0):
    """Split at places, as NumPy counts them; regrad takes sizes."""
    (x,) = _tensors(ary)
    if np.ndim(indices_or_sections) == 0:
        return list(rg.split(x, int(indices_or_sections), axis=axis))
    cuts = [0, *indices_or_sections, x.shape[axis]]
    return list(rg.split(x, [int(n) for n in np.diff(cuts)], axis=axis))


@like(np.pad)
def _(array, pad_width, mode="constant", *, constant_values=0):
    (x,) = _tensors(array)
    paddings = np.broadcast_to(pad_width, (x.ndim, 2)).tolist()
    return rg.pad(x, paddings, mode=mode, constant_value=constant_values)


# -- constructors, and elementwise functions that are not ufuncs ---------------------------------


@like(np.clip)
def _(a, a_min=None, a_max=None, *, min=None, max=None):
    return rg.clip(a, a_min if min is None else min, a_max if max is None else max)


@like(np.round, np.around)
def _(a, decimals=0):
    if not decimals:
        return rg.round(a)
    scale = 10.0**decimals
    return rg.divide(rg.round(rg.multiply(a, scale)), scale)


FUNCTIONS |= {
    np.isclose: lambda a, b, rtol=1e-5, atol=1e-8, equal_nan=False: rg.isclose(
        a, b, rtol=rtol, atol=atol, equal_nan=equal_nan
    ),
    np.nan_to_num: lambda x, copy=True, nan=0.0, posinf=None, neginf=None: rg.nan_to_num(
        x, nan=nan, posinf=posinf, neginf=neginf
    ),
    np.empty_like: lambda prototype, /, dtype=None: rg.zeros_like(prototype, dtype=dtype),
    np.full_like: lambda a, fill_value, dtype=None: rg.full_like(a, fill_value, dtype=dtype),
    np.ones_like: lambda a, dtype=None: rg.ones_like(a, dtype=dtype),
    np.zeros_like: lambda a, dtype=None: rg.zeros_like(a, dtype=dtype),
}


# -- Fourier transforms --------------------------------------------------------------------------


def _transform(name: str) -> Callable[..., Any]:
    return lambda a, n=None, axis=-1, norm=None: getattr(rg.fft, name)(
        a, n=n, axis=axis, norm=norm or "backward"
    )


def _transforms(name: str, last: tuple[int, ...] | None) -> Callable[..., Any]:
    return lambda a, s=None, axes=last, norm=None: getattr(rg.fft, name)(
        a, s=s, axes=axes, norm=norm or "backward"
    )


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    FUNCTIONS[getattr(np.fft, _name)] = _transform(_name)
for _name in ("fft", "ifft", "rfft", "irfft"):
    FUNCTIONS[getattr(np.fft, f"{_name}n")] = _transforms(f"{_name}n", None)
    FUNCTIONS[getattr(np.fft, f"{_name}2")] = _transforms(f"{_name}n", (-2, -1))
for _name in ("fftshift", "ifftshift"):
    FUNCTIONS[getattr(np.fft, _name)] = lambda x, axes=None, _name=_name: getattr(rg.fft, _name)(
        x, axes=axes
    )


# -- linear algebra ------------------------------------------------------------------------------

FUNCTIONS |= {
    np.cross: lambda a, b, *, axis=-1: rg.linalg.cross(a, b, axis=axis),
    np.kron: "linalg.kron",
    np.linalg.matmul: "matmul",
    np.linalg.matrix_transpose: "matrix_transpose",
    np.linalg.tensordot: "tensordot",
    np.linalg.vecdot: "vecdot",
    np.outer: lambda a, b: rg.linalg.outer(_flat(a), _flat(b)),
    np.tensordot: lambda a, b, axes=2: rg.tensordot(a, b, axes=axes),
    np.vdot: lambda a, b, /: rg.vecdot(_flat(a), _flat(b)),
}


@like(np.dot)
def _(a, b):
    a, b = _tensors(a, b)
    if not (a.ndim and b.ndim):
        return rg.multiply(a, b)
    if b.ndim <= 2:
        return rg.matmul(a, b)
    return rg.tensordot(a, b, axes=((a.ndim - 1,), (b.ndim - 2,)))


@like(np.inner)
def _(a, b):
    a, b = _tensors(a, b)
    if not (a.ndim and b.ndim):
        return rg.multiply(a, b)
    return rg.tensordot(a, b, axes=((a.ndim - 1,), (b.ndim - 1,)))


@like(np.linalg.norm)
def _(x, ord=None, axis=None, keepdims=False):
    """Of vectors or of matrices, by the axes given; of everything if neither says more."""
    (x,) = _tensors(x)
    axes = (axis,) if isinstance(axis, int) else axis
    if ord is None or len(axes or x.shape) == 1:
        return rg.linalg.vector_norm(x, axis=axes, keepdims=keepdims, ord=2 if ord is None else ord)
    if axes is None:
        return rg.linalg.matrix_norm(x, keepdims=keepdims, ord=ord)
    y = rg.linalg.matrix_norm(rg.moveaxis(x, axes, (-2, -1)), ord=ord)
    return rg.expand_dims(y, axis=tuple(i % x.ndim for i in axes)) if keepdims else y


# -- plain readings, which have no gradient in mathematics ---------------------------------------

FUNCTIONS |= {
    np.iscomplexobj: lambda x: x.dtype.kind == "c",
    np.isrealobj: lambda x: x.dtype.kind != "c",
    np.ndim: lambda a: a.ndim,
    np.shape: lambda a: a.shape,
    np.size: lambda a, axis=None: a.size if axis is None else a.shape[axis],
}


def _of_values(theirs: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, *more, **options: theirs(
        *(x._values() for x in _tensors(a, b)), *more, **options
    )


for _function in (np.allclose, np.array_equal, np.array_equiv):
    FUNCTIONS[_function] = _of_values(_function)
