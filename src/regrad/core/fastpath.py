"""Public functions of ops of one or two tensors, with a fast path to their kernels.

The fast path is `dispatch.call` without the branches that few calls need. It serves Tensors of one
library and dtype, without attributes, with at most one open tape and nothing else active. `call`
handles all other cases. Each function is one frame, because most of its time is the Python call.

The conditions of the two functions are the key of the fast path. The key is complete: before the
kernel, `call` depends only on

* classes: a number, a list, a Variable or a traced number has to be lifted (`lift`);
* dtypes, and for two tensors libraries: `call` promotes tensors that differ, and dtypes outside the
  op's `kinds`;
* the region: it replaces tensors from outside its body by inputs.

After the kernel, `record` depends on the tapes of other threads, on the rules that are active for
this op type, on whether several tapes are open or a tape does not admit every op (no `recorder`),
and on complex numbers, which have conjugated rules. If one of these is possible, the fast path
calls `record`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from regrad.core.backends import Array
from regrad.core.dispatch import WEAK, array_of, call, constant, wrap_results
from regrad.core.gradients import Gradients, each
from regrad.core.kernel_errors import explain
from regrad.core.registry import Op
from regrad.core.state import BESIDE, LIVE, current, next_id, refuse_elsewhere
from regrad.core.tape import NO_ATTRS, REAL, record
from regrad.core.tensor import Tensor
from regrad.core.tracebacks import fold
from regrad.errors import NumberRangeError, prefixed

ndarray = np.ndarray
DOUBLE = REAL[1]  # tested first, because comparing unequal dtypes is slow


def unary(op: Op) -> Callable[..., Any]:
    """Return the public function of an op of one tensor and no attributes."""
    kernels = op.kernels
    kinds = op.kinds

    def function(x, /):
        if type(x) is Tensor:
            p = x._data
            state = current() if LIVE else None
            if (kinds is None or (type(p) is ndarray and p.dtype.kind in kinds)) and (
                state is None or state.region is None
            ):
                try:
                    result = kernels[type(p)](p)
                except Exception as error:
                    fold(error)
                    raise explain(error, op, (x,)) from error.__cause__
                if type(result) is not ndarray:
                    if isinstance(result, tuple):
                        return _record(op, x, result)
                    result = array_of(result)
                y = Tensor()
                y._data = result
                if not LIVE:
                    y._id = 0
                    return y
                y._id = next_id()
                if state is None:
                    refuse_elsewhere(op.type, (x,))
                else:
                    to = state.recorder
                    if (rules := state.overrides) is not None and op.type in rules:
                        to = None
                    if to is None or BESIDE or (p.dtype is not DOUBLE and p.dtype not in REAL):
                        return record(op, (x,), NO_ATTRS, y)
                    if x._id in to.watched:
                        to.write_unary(op, x, y)
                return y
        return call(op, (x,), NO_ATTRS)

    return function


def binary(op: Op) -> Callable[..., Any]:
    """Return the public function of an op of two tensors that promote, and no attributes."""
    kernels = op.kernels
    kinds = op.kinds

    def function(a: Any, b: Any, /):
        if type(a) is Tensor is type(b):
            p = a._data
            q = b._data
            state = current() if LIVE else None
            if (
                type(p) is type(q)
                and p.dtype is q.dtype
                and (kinds is None or (type(p) is ndarray and p.dtype.kind in kinds))
                and (state is None or state.region is None)
            ):
                try:
                    result = kernels[type(p)](p, q)
                except Exception as error:
                    fold(error)
                    raise explain(error, op, (a, b)) from error.__cause__
                y = Tensor()
                y._data = result if type(result) is ndarray else array_of(result)
                if not LIVE:
                    y._id = 0
                    return y
                y._id = next_id()
                if state is None:
                    refuse_elsewhere(op.type, (a, b))
                else:
                    to = state.recorder
                    if (rules := state.overrides) is not None and op.type in rules:
                        to = None
                    if to is None or BESIDE or (p.dtype is not DOUBLE and p.dtype not in REAL):
                        return record(op, (a, b), NO_ATTRS, y)
                    if a._id in to.watched or b._id in to.watched:
                        to.write_binary(op, a, b, y)
                return y
        elif (
            type(a) is Tensor and type(b) in WEAK and ((d := a._data.dtype) is DOUBLE or d in REAL)
        ):
            try:
                b = constant(b, d)  # pyright: ignore[reportArgumentType] (a number)
            except NumberRangeError as error:
                raise prefixed(error, op.name) from None
            return function(a, b)
        elif (
            type(b) is Tensor and type(a) in WEAK and ((d := b._data.dtype) is DOUBLE or d in REAL)
        ):
            try:
                a = constant(a, d)  # pyright: ignore[reportArgumentType] (a number)
            except NumberRangeError as error:
                raise prefixed(error, op.name) from None
            return function(a, b)
        elif type(b) is Gradients or type(a) is Gradients:
            return each(function, a, b)
        return call(op, (a, b), NO_ATTRS)

    return function


def _record(op: Op, x: Tensor, data: Array) -> Any:
    """Wrap the results of a kernel that returns several, and record them."""
    y = wrap_results(data)
    return record(op, (x,), NO_ATTRS, y) if LIVE else y
