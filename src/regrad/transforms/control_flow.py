"""`cond`, `while_loop`, `scan`, `fori_loop`, `map`: Python's in eager mode, XLA's under jit.

The idea: each function has one meaning and two implementations. In eager mode

    rg.scan(lambda c, x: (c * x, c), init, xs)

is a loop in Python: its ops are recorded one by one, so gradients need no further code. Inside a
trace (`in_trace`) it is one XLA loop and one record: `scans` implements loops of known length,
`whiles` other loops, `branches` and `conditionals` the branches. This module flattens the user's
containers to lists of Tensors, checks the results of the user's functions, and rebuilds the
containers (`_Step`). The modules below handle flat functions only.

Invariants:

* Both modes raise the same errors, in the first step. regrad rejects a carry that changes its
  structure, shape or dtype in eager mode as well, where it could run, because it would not compile.
* Bookkeeping of the loop itself (a counter, taking an entry of `xs`) runs under `masked()`, which
  hides it from the user's overrides: a rule for "Add" applies to the user's additions alone.
* A Python number in a carry is a Tensor from the first step on (`numbers="Tensors"`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.autodiff.gradients import callable_or_raise
from regrad.core import containers, dispatch
from regrad.core.backends import is_array
from regrad.core.blocks import inside
from regrad.core.shapes import as_count
from regrad.core.signatures import helpful
from regrad.core.state import masked
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, ShapeError, kind
from regrad.ops.binary import logical_and, where
from regrad.ops.casting import astype
from regrad.ops.elementwise import logical_not
from regrad.ops.getitem import getitem
from regrad.ops.joining import stack
from regrad.transforms.arguments import OpenedArguments, returned_each
from regrad.transforms.branches import branched
from regrad.transforms.checkpoint import checkpoint as recomputing
from regrad.transforms.conditionals import conditional
from regrad.transforms.region import Flat, in_trace
from regrad.transforms.replay import Captured
from regrad.transforms.scans import as_jax, scanned
from regrad.transforms.ties import python_loop
from regrad.transforms.whiles import repeated

if TYPE_CHECKING:
    from regrad.core.tensor import TensorLike


@helpful("cond")
def cond(
    pred: TensorLike, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any
) -> Any:
    """Return `true_fn(*operands)` if `pred` is true, else `false_fn(*operands)`.

    Args:
        pred: A bool, or a Tensor of rank 0.
        true_fn, false_fn: Functions of Tensors and containers of them. Under `jit`, the program
            chooses at run time, so both functions are traced. They must return the same structure,
            shapes and dtypes; a Python number takes the dtype of the Tensor that the other function
            returns.
        *operands: Their arguments.

    In eager mode, only the chosen function is called. In both modes, the gradient flows through the
    function that ran, under the overrides that were active at the call. The gradient includes
    values that the functions close over, and their assignments to Variables take effect.

    Raises:
        ShapeError, DTypeError: The two results differ (under jit).
        ArgumentError: pred is not a scalar.

    Source: `jax.lax.cond`.

    >>> import regrad as rg
    >>> f = lambda x: rg.cond(x > 0, lambda x: x * x, lambda x: -x, x)
    >>> rg.grad(f)(rg.scalar(3.0)).item(), rg.jit(rg.grad(f))(rg.scalar(-3.0)).item()
    (6.0, -1.0)
    """
    callable_or_raise(true_fn, "cond")
    callable_or_raise(false_fn, "cond")
    # A Python bool is decided at trace time even inside a trace, as in an `if` statement.
    pred = dispatch.lift(pred) if not isinstance(pred, bool) else pred
    if isinstance(pred, bool) or not in_trace([pred]):
        return (true_fn if bool(pred) else false_fn)(*operands)
    if pred.ndim:
        raise ArgumentError(
            f"cond: expected pred to be a Tensor of rank 0, got the shape {pred.shape}"
        )
    return branched(pred, [true_fn, false_fn], operands)


@helpful("scan")
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    checkpoint: bool = False,
) -> tuple[Any, Any]:
    """Run `f` along the first axis of `xs`; each step maps `(carry, x)` to `(carry, y)`.

    Args:
        f: The step function. The carry must keep its structure, shapes and dtypes.
        init: The initial carry: Tensors, numbers, or containers of them.
        xs: A Tensor or a container of Tensors of equal length; each step gets one entry. None for a
            loop without inputs.
        length: The number of steps, if xs is None.
        reverse: Whether to go from the last entry to the first; ys are in the order of xs.
        checkpoint: Whether the tapes keep just the carries, and recompute each step in the backward
            pass. Otherwise, they keep the values that the rules need, for every step.

    Returns the last carry, and the ys of all steps stacked along a new first axis.

    In eager mode this is a Python loop. Under `jit` it is one XLA loop, compiled once for any
    length. Overrides that are active at the call of scan apply in every step, forward and backward.
    Variables that f assigns become part of the carry.

    Raises:
        ShapeError, DTypeError: The carry changes its shapes or dtypes, or xs differ in length.
        ArgumentError: f does not return a pair, or the call passes neither xs nor length.

    Source: `jax.lax.scan`.

    >>> import regrad as rg
    >>> last, partial_sums = rg.scan(lambda c, x: (c + x, c + x), 0.0, rg.tensor([1.0, 2.0, 3.0]))
    >>> last.item(), partial_sums.tolist()
    (6.0, [1.0, 3.0, 6.0])
    """
    callable_or_raise(f, "scan")
    containers.refuse_closed(init, "init", "scan")
    containers.refuse_closed(xs, "xs", "scan")
    carry = OpenedArguments((init,), {}, numbers="Tensors")
    along = OpenedArguments((xs,), {})
    n = _length(along.tensors, length)
    traced = in_trace([*carry.tensors, *along.tensors])
    if traced:  # an XLA loop carries JAX arrays; converting also checks that JAX keeps the dtypes
        carry.tensors = as_jax(carry.tensors)
    step = _Step(f, carry, along)
    if traced:
        last, ys = scanned(step, carry.tensors, along.tensors, n, reverse, checkpoint)
    else:
        last, ys = _in_turn(step, carry.tensors, along.tensors, n, reverse, checkpoint)
    return carry.close(last)[0][0], step.note(ys)


@helpful("while_loop")
def while_loop(
    cond_fn: Callable[[Any], Any],
    body_fn: Callable[[Any], Any],
    init: Any,
    *,
    max_steps: int | None = None,
) -> Any:
    """Return the carry after `body_fn` ran repeatedly, as long as `cond_fn(carry)` is true.

    Args:
        cond_fn: A function of the carry that returns a bool, or a Tensor of rank 0.
        body_fn: The step function. The carry must keep its structure, shapes and dtypes.
        init: The initial carry: Tensors, numbers, or containers of them.
        max_steps: The maximum number of steps. Under `jit`, reverse mode through the loop needs it,
            because XLA must know how much memory to reserve.

    In eager mode, any loop can be differentiated. Under `jit`, a loop without `max_steps` has a
    derivative in forward mode (`jvp`); reverse mode raises GradientError. (It does not raise if the
    results in use do not depend on the inputs that are differentiated.) If the condition is still
    true after `max_steps` steps, eager mode raises an error. A compiled program cannot raise, so
    under jit the floating-point results are NaN.

    Raises:
        ShapeError, DTypeError: The carry changes.
        ArgumentError: cond_fn does not return a scalar.
        GradientError: Under jit, for the reverse-mode gradient of a loop without `max_steps`.

    Source: `jax.lax.while_loop`.

    >>> import regrad as rg
    >>> halve = lambda x: rg.while_loop(lambda x: x > 1, lambda x: x / 2, x, max_steps=10)
    >>> rg.grad(halve)(rg.scalar(6.0)).item(), rg.jit(rg.grad(halve))(rg.scalar(6.0)).item()
    (0.125, 0.125)
    """
    callable_or_raise(cond_fn, "while_loop")
    if max_steps is not None:
        as_count(max_steps, "max_steps")
    callable_or_raise(body_fn, "while_loop")
    containers.refuse_closed(init, "init", "while_loop")
    carry = OpenedArguments((init,), {}, numbers="Tensors")
    traced = in_trace(carry.tensors)
    if traced:
        carry.tensors = as_jax(carry.tensors)
    # Use the step of a scan without entries, so that the checks of a carry are the same.
    step = _Step(lambda c, _: (body_fn(c), None), carry, OpenedArguments((None,), {}))

    def goes_on(xs: Sequence[Tensor]) -> Tensor:
        return dispatch.lift(cond_fn(carry.close(xs)[0][0]))

    if not traced:
        return carry.close(_while(goes_on, step, carry.tensors, max_steps))[0][0]
    if max_steps is None:
        return carry.close(repeated(lambda xs: [goes_on(xs)], step, carry.tensors))[0][0]
    return carry.close(_bounded(goes_on, step, carry.tensors, max_steps))[0][0]


@helpful("fori_loop")
def fori_loop(
    lower: TensorLike, upper: TensorLike, body_fn: Callable[[Any, Any], Any], init: Any
) -> Any:
    """Return the carry after `carry = body_fn(i, carry)` for i from `lower` to `upper - 1`.

    With Python integers as bounds, this is a `scan` and can be differentiated under jit. With
    Tensors it is a `while_loop`, and reverse mode under jit raises GradientError.

    Args:
        lower, upper: Integers, or Tensors of integers of rank 0.
        body_fn: A function of the index and the carry that returns the next carry, with the same
            structure, shapes and dtypes.
        init: The initial carry: Tensors, numbers, or containers of them.

    Raises:
        ShapeError, DTypeError: The carry changes.
        GradientError: Under jit, for the gradient of a loop of unknown length.

    Source: `jax.lax.fori_loop`.

    >>> import regrad as rg
    >>> rg.fori_loop(0, 3, lambda i, x: x * 2, rg.scalar(1.0)).item()
    8.0
    """
    callable_or_raise(body_fn, "fori_loop")
    _check_bound(lower, "lower")
    _check_bound(upper, "upper")
    if isinstance(lower, int) and isinstance(upper, int):
        # Use int32 as in JAX, so that the index has the same dtype in eager mode and under jit.
        numbers = dispatch.lift(np.arange(lower, max(upper, lower), dtype=np.int32))
        return scan(lambda carry, i: (body_fn(i, carry), None), init, numbers)[0]

    def step(pair: Any) -> Any:
        i, carry = pair
        with masked():
            after = i + 1
        return after, body_fn(i, carry)

    with masked():
        first = astype(dispatch.lift(lower, integers=True), np.int32)
    return while_loop(inside(masked)(lambda pair: pair[0] < upper), step, (first, init))[1]


@helpful("map")
def map(f: Callable[[Any], Any], xs: Any) -> Any:
    """Return `f` of each entry along the first axis of `xs`, one after another, stacked.

    `vmap` computes the same for all entries at once: it is faster, and needs memory for all
    entries.

    Args:
        f: A function of one entry that returns Tensors or containers of them.
        xs: A Tensor or a container of Tensors of equal length.

    Raises:
        ShapeError: The Tensors of xs differ in length.

    Source: `jax.lax.map`.

    >>> import regrad as rg
    >>> rg.map(lambda x: x * x, rg.tensor([1.0, 2.0])).tolist()
    [1.0, 4.0]
    """
    callable_or_raise(f, "map")
    return scan(lambda _, x: (None, f(x)), None, xs)[1]


# -- bodies ------------------------------------------------------------------------------------


class _Step:
    """One step of a loop as a flat function: carry and entry to carry and y.

    `note` is the structure of the ys, which is available after the step has run.
    """

    note: Any = None

    def __init__(
        self, f: Callable[[Any, Any], Any], carry: OpenedArguments, along: OpenedArguments
    ) -> None:
        self.function = f
        self.carry = carry
        self.along = along

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        n = len(self.carry.tensors)
        (carry,), (x,) = self.carry.close(tensors[:n])[0], self.along.close(tensors[n:])[0]
        result = self.function(carry, x)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise ArgumentError(
                "scan: f must return a pair (carry, y), where y may be None; it returned "
                f"{type(result).__name__}"
            )
        last = OpenedArguments((result[0],), {}, numbers="Tensors")
        if last.form != self.carry.form:
            raise ArgumentError(
                "the carry of a loop must keep its structure; it went in as "
                f"{self.carry.structure[0]} and came out as {last.structure[0]}"
            )
        self._check(last.tensors)
        ys, self.note = returned_each(result[1], self.note)
        return [*last.tensors, *ys]

    def _check(self, carry: Sequence[Tensor]) -> None:
        for before, after in zip(self.carry.tensors, carry, strict=True):
            if before.shape != after.shape or before.dtype != after.dtype:
                raise ShapeError(
                    f"the carry of a loop must keep its shapes and dtypes; {before.dtype} "
                    f"{before.shape} came out as {after.dtype} {after.shape}. Start with the "
                    "shape and dtype that the steps return (astype, broadcast_to)."
                )


def _check_bound(n: object, what: str) -> None:
    if not (dispatch.is_tensor(n) or is_array(n)) and not hasattr(n, "__index__"):
        raise ArgumentError(f"fori_loop: expected an integer for {what}, got {kind(n)}")


def _length(xs: Sequence[Tensor], length: int | None) -> int:
    given = () if length is None else (as_count(length, "length"),)
    lengths = {*[x.shape[0] if x.shape else len(x) for x in xs], *given}
    if len(lengths) > 1:
        found = sorted(lengths, key=str)
        raise ShapeError(f"scan: xs and length must agree, got the lengths {found}")
    if not lengths:
        raise ArgumentError("scan: pass xs, or the number of steps as length=…")
    return lengths.pop()


def _in_turn(
    step: _Step, carry: Sequence[Tensor], xs: Sequence[Tensor], n: int, reverse: bool,
    checkpoint: bool,
) -> tuple[Sequence[Tensor], list[Tensor]]:  # fmt: skip
    """Run the steps one after another, in Python."""

    def row(*tensors: Tensor) -> Any:  # `checkpoint` takes functions of Tensors, not of a list
        return step(tensors)

    run: Any = recomputing(row) if checkpoint else None
    rows: list[Any] = [None] * n
    count = len(carry)
    if not n:  # no results to stack
        return carry, _no_steps(step, carry, xs)
    with python_loop() as loop:
        for i in reversed(range(n)) if reverse else range(n):
            with masked():
                tensors = [*loop.begin(carry), *[getitem(x, i) for x in xs]]
            ys = step(tensors) if run is None else run(*tensors)
            carry, rows[i] = ys[:count], ys[count:]
        with masked():
            return loop.tied(carry, [stack(list(column)) for column in zip(*rows, strict=True)])


def _no_steps(step: _Step, carry: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    """Return the ys of a loop with zero steps: empty, in the shapes that a step would return."""
    # Run the step once on zeros, just for the shapes; XLA traces it for them as well.
    zeros = [dispatch.lift(np.zeros(x.shape[1:], x.dtype)) for x in xs]
    ys = step([*carry, *zeros])[len(carry) :]
    return [dispatch.lift(np.zeros((0, *y.shape), y.dtype)) for y in ys]


def _while(
    goes_on: Callable[..., Tensor], step: _Step, carry: Sequence[Tensor], max_steps: int | None
) -> Sequence[Tensor]:
    steps = 0
    with python_loop() as loop:
        while bool(goes_on(carry)):
            # checked after the condition: exactly max_steps steps are allowed
            if steps == max_steps:
                raise ArgumentError(
                    f"while_loop: the condition still holds after {max_steps} steps"
                )
            carry, steps = step(loop.begin(carry)), steps + 1
        return loop.tied(carry, [])[0] if steps else carry


LONG = 64  # from this many steps on, a bounded loop runs in rounds


def _bounded(
    goes_on: Callable[..., Tensor], step: _Step, carry: Sequence[Tensor], max_steps: int
) -> Sequence[Tensor]:
    """Run a fixed number of steps; the steps after the end of the loop are no-ops.

    A long loop runs in rounds. A round after the end is a single no-op, so the time is proportional
    to the actual number of steps, and the backward pass keeps one carry per round.
    """
    test = Captured(lambda xs: [goes_on(xs)], "while_loop")
    # With √n rounds of √n steps, both the number of skipped steps and the kept memory are O(√n).
    per_round = math.isqrt(max_steps) if max_steps > LONG else 1

    def goes(xs: Sequence[Tensor]) -> Tensor:
        (more,) = test(xs[:-1])
        with masked():  # the last round may run past the end; the counter stops it
            return logical_and(more, xs[-1] < max_steps)

    def once(xs: Sequence[Tensor]) -> Sequence[Tensor]:
        with masked():
            count = xs[-1] + 1
        return [*step(xs[:-1]), count]

    def unless_over(body: Flat) -> Flat:
        return lambda xs: conditional(goes(xs), [body, list], xs)

    def round_of_steps(xs: Sequence[Tensor]) -> Sequence[Tensor]:
        return scanned(unless_over(once), xs, [], per_round, False, False)[0]

    body, rounds = unless_over(once), max_steps
    if per_round > 1:
        body, rounds = unless_over(round_of_steps), -(-max_steps // per_round)
    zero = as_jax([dispatch.lift(np.int32(0))])
    last, _ = scanned(body, [*carry, *zero], [], rounds, False, False)
    last = last[:-1]
    (again,) = test(last)
    # A compiled program cannot raise. NaN cannot be mistaken for a result.
    with masked():
        over = logical_not(again)
        return [where(over, y, np.nan) if y.dtype.kind == "f" else y for y in last]
