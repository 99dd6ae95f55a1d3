"""The path of every op call: lift, promote, kernel, record.

Tensors without values (symbols of a graph) leave this path before the kernel. The `Deferral` in
`DEFERRALS` under the type of their data handles the call instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from regrad.core import backends, dims, numbers
from regrad.core.backends import BACKENDS, JAX, Array, Namespace, backend_of, is_array, is_inexact
from regrad.core.dims import Dim, Shape
from regrad.core.hints import of_value
from regrad.core.kernel_errors import explain
from regrad.core.numbers import is_tensor
from regrad.core.promotion import complex_dtype, get_default_dtype, number_dtype, promote, weak
from regrad.core.registry import Attrs, Input, Kernel, Op
from regrad.core.rule import Rule, RuleFunction
from regrad.core.rule_forms import PerInput
from regrad.core.signatures import is_of_caller
from regrad.core.state import LIVE, current, next_id
from regrad.core.tape import (
    CUT,
    NO_ATTRS,
    REAL,
    Layout,
    Place,
    Record,
    Tape,
    placed,
    put,
    put_on,
    record,
)
from regrad.core.tensor import OURS, Readable, Tensor, TensorLike, wrap
from regrad.core.tracebacks import fold
from regrad.errors import ArgumentError, DTypeError, GradientError, kind, refusal

ndarray = np.ndarray
TWO = (True, True)
WEAK = (float, int)  # numbers that take the dtype of a float operand
NUMBERS = (bool, int, float, complex)  # exact types: np.float64 is an array scalar
PLAIN = frozenset({*NUMBERS, str, tuple, type(None)})  # types of attributes that need no conversion


class Deferral(NamedTuple):
    """The functions for tensors that have no values yet, because a graph will compute them."""

    call: Call  # adds an op on these tensors to the graph
    enter: Callable[[Tensor], Tensor]  # returns the symbol in the open branch
    measure: Callable[[Dim], Tensor]  # returns a size that is known only in the run
    fit: Callable[[Tensor, Shape, str], Tensor]  # returns a tensor whose shape the run checks
    pull: Callable[[Record, Any, set[int]], dict[int, Any]]  # a rule's gradients in the run


Call = Callable[[Op, tuple[Tensor, ...], Attrs, Layout], Any]
DEFERRALS: dict[type, Deferral] = {}  # by the type of a tensor's data


class WeakScalar(Tensor):
    """A traced Python number, an argument of a compiled function. It is weak like any number."""

    __slots__ = ("example",)  # a number of the same Python type

    example: complex

    @classmethod
    def of(cls, x: Tensor, example: complex) -> WeakScalar:
        """Return a traced scalar as a number."""
        y = cls()
        y._data, y._id, y.example = x._data, x._id, example
        return y

    def alone(self) -> Tensor:
        """Return the number as a Tensor, where no other Tensor decides the dtype."""
        x = Tensor()
        x._data, x._id = self._data, self._id
        whole = type(self.example) is int  # (an index, say)
        return x if whole else as_dtype(x, number_dtype(self.example))


# -- lift ----------------------------------------------------------------------------------


@lru_cache(maxsize=1024, typed=True)
def _constant(value: complex, dtype: np.dtype, key: str = "") -> Tensor:
    try:
        array = np.asarray(value, dtype=dtype)
    except OverflowError:
        raise numbers.out_of_range(value, dtype) from None
    array.flags.writeable = False
    shared = wrap(array)
    shared._id = OURS
    return shared


def _is_complex(x: object) -> bool:
    return isinstance(x, Tensor) and x.dtype.kind == "c"


def constant(value: complex, dtype: np.dtype) -> Tensor:
    """Return a Python number as a Tensor of rank 0. Calls share it, as Tensors are immutable."""
    return _constant(value, dtype) if value else _constant(value, dtype, repr(value))  # -0.0 == 0.0


def lift(value: TensorLike, integers: bool = False) -> Tensor:
    """Return a Tensor for any value that an op accepts as a tensor. Arrays are copied."""
    if isinstance(value, Tensor):
        return value.alone() if type(value) is WeakScalar else value
    if type(value) in NUMBERS:
        return constant(value, number_dtype(value, integers))
    if isinstance(value, Readable):
        return value._read()
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, Dim):
        return DEFERRALS[type(next(dims.leaves(value)))].measure(value)
    if isinstance(value, dims.OPEN):  # a symbolic size of JAX
        return wrap(value.__jax_array__())
    if is_array(value):
        state = current() if LIVE else None
        if state is not None and state.region is not None:
            return state.region.array(value)
        return wrap(BACKENDS[type(value)].own(value))
    if isinstance(value, list | tuple):
        return wrap(_from_list(value, integers))
    if hasattr(value, "__array__"):
        return wrap(backends.NUMPY.own(np.asarray(value)))
    shown = "" if value is None else ": " + " ".join(f"{value!r:.80}".split())
    raise ArgumentError(
        f"expected a Tensor, an array or a number, got {kind(value)}{shown}.{of_value(value)}"
    )


def differentiable(value: TensorLike) -> Tensor:
    """Like `lift`, but a traced Python integer becomes a float, as Python integers do."""
    if type(value) is WeakScalar:
        return as_dtype(value.alone(), number_dtype(value.example))
    return lift(value)


def is_plain(value: object) -> bool:
    """Return whether a value is a Python number or a list of numbers, which have no dtype."""
    return type(value) in NUMBERS or isinstance(value, list | tuple)


def _from_list(values: Sequence[Any], integers: bool) -> np.ndarray:
    found = numbers.listed(values, exact=integers)
    if found.dtype.kind == "b" or (integers and found.dtype.kind in "iu"):
        return found
    if found.dtype.kind == "c":
        return found.astype(complex_dtype())
    whole = integers and (found.dtype.kind == "O" or not found.size)
    dtype = np.dtype(np.int64) if whole else get_default_dtype()
    return numbers.under(values, dtype) if found.dtype.kind == "O" else found.astype(dtype)


def lift_as(value: TensorLike, dtype: np.dtype) -> Tensor:
    """Like `lift`, with a dtype. Python numbers get it directly, without rounding to float32."""
    return wrap(numbers.under(value, dtype)) if is_plain(value) else as_dtype(lift(value), dtype)


def prepare(op: Op, leaves: Sequence[TensorLike], parameters: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the leaves of a call as Tensors. Inputs that the op promotes get a common dtype."""
    promoted = [op.promotes[p] for p in parameters]
    xs: list[Any] = []
    try:
        for x, p, weak in zip(leaves, parameters, promoted, strict=True):
            taken = type(x) is Tensor or (weak and type(x) in WEAKEST)
            xs.append(x if taken else lift(x, op.inputs[p].integers))
        _check_dtypes(op, xs, parameters)
        if not any(promoted):
            return tuple(xs)
        dtype = common_dtype([x for x, weak in zip(xs, promoted, strict=True) if weak])
        if op.to_float and not is_inexact(dtype):
            dtype = get_default_dtype()
        pairs = zip(xs, promoted, strict=True)
        return tuple([as_dtype(x, dtype) if weak else x for x, weak in pairs])
    except Exception as error:
        names = [op.inputs[p].name for p in parameters]
        raise _blame(error, op, names[len(xs) :]) from None


def _blame(error: Exception, op: Op, left: list[str]) -> Exception:
    """Return the error for inputs that are not tensors. It names the first input in `left`."""
    name = f"{op.name}: {left[0]}" if left else op.name
    return error if is_of_caller(error) else refusal(error, name, {})


def _check_dtypes(op: Op, xs: Sequence[TensorLike], parameters: Sequence[int]) -> None:
    if op.real and any(type(x) is complex or _is_complex(x) for x in xs):
        raise DTypeError(
            f"{op.name}: complex numbers have no order; take the real part, real(x), or the size, "
            "abs(x), first"
        )
    for x, p in zip(xs, parameters, strict=True):
        if op.inputs[p].integers and is_inexact(x.dtype):
            raise DTypeError(
                f"{op.name}: {op.inputs[p].name} must be integers, got {x.dtype} {x.shape}. "
                "Convert them with astype(x, rg.int64), or make them with asarray."
            )


def common_dtype(xs: Sequence[Any]) -> np.dtype:
    """Return the dtype of an expression of Tensors and Python numbers."""
    plain = [x.example if type(x) is WeakScalar else x for x in xs if type(x) in WEAKEST]
    dtypes = [x.dtype for x in xs if type(x) not in WEAKEST]
    if not dtypes:  # an expression of traced integers alone has an integer result
        dtypes = [x.dtype for x in xs if type(x) is WeakScalar and type(x.example) is int]
    return common(dtypes, plain)


def common(dtypes: list[np.dtype], plain: Sequence[complex]) -> np.dtype:
    """Return the dtype to which these promote. Plain numbers are weak."""
    dtype = promote(dtypes or [number_dtype(n) for n in plain])
    for number in plain:
        dtype = weak(number, dtype)
    return dtype


def as_dtype(x: Tensor | complex, dtype: np.dtype) -> Tensor:
    """Return a number or Tensor in `dtype`. An actual conversion makes its own record."""
    if not isinstance(x, Tensor):
        return constant(x, dtype)
    return x if x.dtype == dtype else run(PROMOTE, (x,), {"dtype": dtype})


WEAKEST = (*NUMBERS, WeakScalar)


# -- call ----------------------------------------------------------------------------------


def call(op: Op, arguments: tuple[Any, ...], attrs: Attrs) -> Any:
    """Run an op on the caller's arguments."""
    try:
        for name, value in attrs.items():
            if type(value) not in PLAIN:
                attrs[name] = _attribute(op, name, value)
        if op.single and isinstance(x := arguments[0], Tensor) and type(x) is not WeakScalar:
            if op.kinds is None or x._data.dtype in REAL:
                return run(op, arguments, attrs)
        elif op.flat and op.promotes == TWO:
            pair = _pair(*arguments)
            if pair is not None:
                return run(op, pair, attrs)
        if op.flat:
            return run(op, prepare(op, arguments, range(len(arguments))), attrs)
        leaves, parameters, layout = _leaves(op, arguments)
        return run(op, prepare(op, leaves, parameters), attrs, layout)
    except Exception as error:
        fold(error)
        raise


def _pair(a: Any, b: Any) -> tuple[Tensor, Tensor] | None:
    """Return two operands that need no promotion, or None."""
    p: Any = getattr(a, "_data", None)
    q: Any = getattr(b, "_data", None)
    if type(a) is Tensor or type(b) is Tensor:
        alike = type(a) is type(b) and type(p) is type(q) and p.dtype is q.dtype
        return (a, b) if alike and p.dtype in REAL else None
    if type(p) in DEFERRALS and (dtype := p.dtype) in REAL:
        if type(q) in DEFERRALS and q.dtype is dtype:
            return a, b
        if type(b) in WEAK:
            return a, constant(b, dtype)
    elif type(a) in WEAK and type(q) in DEFERRALS and (dtype := q.dtype) in REAL:
        return constant(a, dtype), b
    return None


def _attribute(op: Op, name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()  # a NumPy scalar would not be weak, unlike a Python number
    if isinstance(value, list):
        try:
            return freeze(value)  # the record keeps it, and the caller may change the list
        except RecursionError as error:
            raise refusal(error, op.name, {name: value}) from None
    if is_tensor(value):
        raise ArgumentError(
            f"{op.name}: {name} is an attribute, not an input, and takes no Tensor. "
            f"Pass a plain Python value: int({name}), float({name}) or {name}.tolist(). If it is "
            "an argument of a compiled function, list it in static_argnames."
        )
    return value


def freeze(value: Any) -> Any:
    """Return a list as a tuple, at all levels."""
    return tuple(map(freeze, value)) if isinstance(value, list | tuple) else value


def _leaves(op: Op, arguments: Sequence[Any]) -> tuple[list[Any], list[int], tuple[Place, ...]]:
    """Return the leaves of a call, the parameter of each leaf, and the place of each parameter."""
    leaves: list[Any] = []
    parameters: list[int] = []
    layout: list[Place] = []
    for p, (entry, value) in enumerate(zip(op.inputs, arguments, strict=True)):
        if entry.kind == "many":
            items = _sequence(op, entry.name, value)
            layout.append(tuple(range(len(leaves), len(leaves) + len(items))))
            leaves += items
            parameters += [p] * len(items)
        elif value is None and entry.kind == "optional":
            layout.append(None)
        else:
            layout.append(len(leaves))
            leaves.append(value)
            parameters.append(p)
    return leaves, parameters, tuple(layout)


def _sequence(op: Op, name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ArgumentError(
            f"{op.name}: {name} is a list of Tensors, got {kind(value)}. "
            f"Write {op.name}([a, b, ...])."
        )
    if not value:
        raise ArgumentError(f"{op.name}: {name} is empty; expected at least one Tensor")
    return list(value)


def run(op: Op, xs: tuple[Tensor, ...], attrs: Attrs, layout: Layout = None) -> Any:
    """Compute an op on Tensors, and record it on the tapes that watch them."""
    if LIVE and (state := current()) is not None and state.region is not None:
        xs = tuple(map(state.region.enter, xs))
    for x in xs:
        if type(x._data) in DEFERRALS:
            return DEFERRALS[type(x._data)].call(op, xs, attrs, layout)
    y = computed(op, xs, attrs, layout)
    return record(op, xs, attrs, y, layout) if LIVE else y


def computed(op: Op, xs: tuple[Tensor, ...], attrs: Attrs, layout: Layout = None) -> Any:
    """Return the result of an op's kernel for Tensors, without a record."""
    arrays: Any = [x._data for x in xs]
    if len(arrays) == 1:  # the most frequent case
        kernel = op.kernels[type(arrays[0])]
    elif not arrays:
        kernel = partial(_make, JAX.xp)  # the kernel of MADE, the only op without inputs
    else:
        types = {*map(type, arrays)}
        if len(types) > 1:
            arrays = _one_library(arrays)
            types = {*map(type, arrays)} - {ndarray}
        kernel = op.kernels[types.pop()]
    try:
        if layout is not None:
            arrays = [placed(arrays, place) for place in layout]
        return wrap_results(kernel(*arrays, **attrs))
    except Exception as error:
        raise explain(error, op, xs, attrs) from error.__cause__


def rerun(
    op: Op, xs: tuple[Tensor, ...], attrs: Attrs, layout: Layout,
    rule: Rule,
) -> Any:  # fmt: skip
    """Run an op again, under the rule that was active in the first run."""
    y = computed(op, xs, attrs, layout)
    record(op, xs, attrs, y, layout, rule)
    return y


def stand_in(x: Tensor, data: Array) -> Tensor:
    """Return a Tensor (or number) like x around another array."""
    return WeakScalar.of(wrap(data), x.example) if isinstance(x, WeakScalar) else wrap(data)


def _one_library(arrays: Sequence[Array]) -> list[Any]:
    """Return the arrays with NumPy data converted to the library of the others."""
    backend = backend_of(*arrays)
    names = {BACKENDS[type(a)].name for a in arrays} - {"numpy"}
    if len(names) > 1:
        raise ArgumentError(
            f"one op cannot mix data of {' and '.join(sorted(names))}: got "
            f"{', '.join(map(kind, arrays))}. Convert one of them: tensor(np.asarray(x))."
        )
    like = next(a for a in arrays if BACKENDS[type(a)] is backend)
    return [a if BACKENDS[type(a)] is backend else backend.from_numpy(a, like) for a in arrays]


def wrap_results(data: Array) -> Any:
    """Wrap what a kernel returned: one array, or several."""
    if isinstance(data, tuple | list):
        return tuple(wrap(array_of(d)) for d in data)
    return wrap(array_of(data))


def array_of(data: Array) -> Any:
    """Return an array for a result of a kernel. (NumPy's results of rank 0 are scalars.)"""
    if type(data) in NUMBERS:
        raise ArgumentError(
            f"a kernel must return arrays of its namespace, but this kernel returned {data!r}"
        )
    return np.asarray(data) if isinstance(data, np.generic) else data


# -- private ops, which no override can name -------------------------------------------------


def _private(name: str, kernel: Kernel, rule: RuleFunction, *attrs: str) -> Op:
    op = Op(name, name, kernel, [Input("x", "one")], attrs)
    op.rule = PerInput(op, name)
    op.rule.add("x", rule)
    return op


def _promote_rule(dy, x_dtype):
    """Return the gradient in the input's own dtype; unchanged for an integer input."""
    dtype = backends.numpy_dtype(x_dtype)
    return as_dtype(dy, dtype) if is_inexact(dtype) else dy


LITERAL = 64  # the most elements of a constant that is embedded in a program


def _make(xp: Namespace, function: str, args: tuple[Any, ...], dtype: np.dtype) -> Any:
    return getattr(xp, function)(*args, dtype=dtype)


def made_in_trace(
    function: str, args: tuple[Any, ...], dtype: np.dtype, size: int
) -> Tensor | None:
    """Return a constant as an op of the program that is being traced. NumPy's name selects it.

    Return None if regrad traces no program, or if the constant is small: Python code may read a
    small constant. XLA folds all ops that depend on a literal, one element at a time. It computes
    the ops that depend on an op without inputs.
    """
    state = current() if LIVE else None
    if state is None or state.region is None or not state.region.traced:
        return None
    if not isinstance(size, dims.OPEN) and size <= LITERAL:
        return None
    held = JAX.held_dtype(dtype)
    if held is None:
        return None
    attrs = {"function": function, "args": args, "dtype": held}
    y = computed(MADE, (), attrs)
    state.region.did(MADE, CUT, (), attrs, y)
    return y


MADE = Op("_Made", "made", _make, [], ("function", "args", "dtype"))
ALIAS = _private("_Alias", lambda xp, x: x, lambda dy: dy)
PARAMETER = _private("Parameter", lambda xp, x: x, lambda dy: dy)
PROMOTE = _private("_Promote", backends.cast, _promote_rule, "dtype")


def in_region(x: Tensor) -> Tensor:
    """Return the Tensor that represents x in the open region, or x if no region is open."""
    state = current()
    return x if state is None or state.region is None else state.region.enter(x)


def alias_of(x: Tensor) -> Tensor:
    """Return the same value under a new id, with no history."""
    state = current()
    if state is None or state.region is None:
        return rename(x)
    x = state.region.enter(x)
    y = rename(x)
    state.region.did(ALIAS, CUT, (x,), NO_ATTRS, y)
    return y


def alias(x: Tensor) -> Tensor:
    """Return the same value under a new id, with respect to which a function is differentiated."""
    state = current()
    if state is None:
        if type(x) is not Tensor:
            return rename(x)
        y = Tensor()
        y._data = x._data
        y._id = next_id()
        return y
    if state.region is not None:
        x = state.region.enter(x)
    y = rename(x)
    if state.region is not None:
        state.region.did(ALIAS, ALIAS.rule, (x,), NO_ATTRS, y)
    if state.guard is not None:
        state.guard.check(ALIAS, (x,))
    if state.tapes:
        put(state, ALIAS, ALIAS.rule, (x,), NO_ATTRS, y)
    return y


def parameter(x: Tensor, rule: Rule, tape: Tape) -> Tensor:
    """Return the value of a Variable under a new id, with a rule as its gradient on one tape."""
    state = current()
    assert state is not None
    y = rename(x)
    if state.region is not None:
        state.region.did(PARAMETER, PARAMETER.rule, (x,), NO_ATTRS, y)
    put_on(state, tape, PARAMETER, rule, x, y)
    return y


def rename(x: Tensor) -> Tensor:
    """Return the same value under a new id, without any record."""
    if type(x) is not Tensor and type(x._data) in DEFERRALS:
        x = DEFERRALS[type(x._data)].enter(x)
    y = type(x)()
    y._data = x._data
    y._id = next_id()
    return y


def check_differentiable(x: Tensor, what: str) -> None:
    """Raise GradientError for integers and bools, which have no gradient, before running."""
    if not is_inexact(x.dtype):
        raise GradientError(
            f"{what} is {x.dtype}, and only floats (and complex numbers) have a gradient. "
            "Convert it first: x = astype(x, rg.float32), or write 1.0 instead of 1."
        )
