"""# How regrad works.

This script rebuilds the core of regrad with NumPy and the standard library alone. Read it from
top to bottom, or run it (`python docs/how_it_works.py`). Each section ends by running the code
that it defines, and asserts that the results are right.

The script uses the library's terms. An **op** computes an output `y` from inputs, `x` or `a` and
`b`. Its **rule** computes the gradient: `dy`, the gradient by the output, arrives, and `dx`, the
gradient by the input, leaves. A **record** describes one executed op, a **tape** collects records,
and the **walk** visits the records from the newest to the oldest.
"""

import inspect
import itertools
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

# ## 1. A Tensor is a value with an id (in regrad: `core/tensor.py`)
#
# A Tensor never changes. Its id comes from a counter. A record refers to a Tensor by this id
# without holding it, so Python can free the array. Python's own `id()` does not work, because a new
# object may reuse the number of a deleted one.

next_id = itertools.count(1).__next__


class Tensor:
    """An array of floats, and a number that no other Tensor has."""

    def __init__(self, value):
        self.value = np.array(value, dtype=float)  # a copy that no other code can change
        self.shape = self.value.shape
        self.id = next_id()


assert Tensor(2.0).id != Tensor(2.0).id

# ## 2. An op is a kernel and a rule (`core/op.py`, `core/registry.py`)
#
# The goal is to write an op like this; a page of these entries is an *op sheet*:
#
#     @op("Exp")
#     def exp(xp, x: Tensor):
#         return xp.exp(x)
#
#     @gradient("Exp")
#     def _(dy, y):
#         return dy * y
#
# The first function is the **kernel**. It computes with raw arrays, in the array namespace `xp`
# that it receives: here NumPy, in regrad also JAX and PyTorch. The annotation `Tensor` marks its
# inputs. The other parameters are *attributes*, which are plain Python values such as an axis.
#
# The second function is the **rule**. Its parameters after `dy` are *names*: an input (`x`), the
# output (`y`), an attribute, or only the shape of an input (`x_shape`). The rule uses ops, not
# NumPy. Both choices matter later: the names decide which values stay in memory (section 3), and
# rules made of ops have derivatives of every order (section 6).

OPS = {}  # op type -> Op


@dataclass
class Op:
    """An op type: its kernel, the names of its inputs and attributes, and its rule."""

    type: str
    kernel: Callable
    inputs: list
    attrs: list
    broadcasts: bool = False
    rule: Callable | None = None  # None: not defined yet


def op(type):
    """Make an op from a kernel."""

    def decorate(kernel):
        names = names_after_first(kernel)  # the first is xp
        inputs = [n for n in names if kernel.__annotations__.get(n) is Tensor]
        attrs = [n for n in names if n not in inputs]
        return public(Op(type, kernel, inputs, attrs))

    return decorate


def gradient(type):
    """Register the rule of an op type."""

    def register(rule):
        OPS[type].rule = rule
        return rule

    return register


def elementwise(type, kernel, rule=None):
    """Make an op whose inputs are all tensors, and broadcast against each other."""
    return public(Op(type, kernel, names_after_first(kernel), [], broadcasts=True, rule=rule))


def names_after_first(function):
    """Return the names of a function's parameters, except the first."""
    return list(inspect.signature(function).parameters)[1:]


def public(op):
    """Add an op to the table, and return the function that users call."""
    OPS[op.type] = op
    return lambda *arguments: call(op, arguments)


# ## 3. Every call takes one path: compute, then record (`core/dispatch.py`, `core/tape.py`)
#
# Two things are active at any moment: the overrides of section 8 and the open tapes, outermost
# first. They live in context variables, so threads and asyncio tasks do not share them. `using`
# sets a context variable for a block, and resets it however the block ends.

TAPES = ContextVar("tapes", default=())
OVERRIDES = ContextVar("overrides", default=MappingProxyType({}))


@contextmanager
def using(variable, value):
    """Run a block with a context variable set to a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def call(op, arguments):
    """Run an op on Tensors or numbers, and record it with the rule that is active now."""
    xs = [lift(x) for x in arguments[: len(op.inputs)]]
    attrs = dict(zip(op.attrs, arguments[len(op.inputs) :], strict=True))
    y = Tensor(op.kernel(np, *[x.value for x in xs], **attrs))
    rule = OVERRIDES.get().get(op.type, op.rule)
    if rule is not NO_GRADIENT:
        named = {**dict(zip(op.inputs, xs, strict=True)), **attrs, "y": y}
        named |= {f"{n}_shape": x.shape for n, x in zip(op.inputs, xs, strict=True)}
        record(op, rule, xs, y, named)
    return y


def NO_GRADIENT(dy):
    """Mark an op whose output is a constant."""


def lift(value):
    """Return a Tensor unchanged, and a number or an array as a Tensor."""
    return value if isinstance(value, Tensor) else Tensor(value)


# A tape watches some tensors. When an op uses one of them, the op goes on the tape, and the tape
# also watches its output. A record takes only those values from `named` that its rule names.


class Tape:
    """The records of the ops that depend on a watched tensor, oldest first."""

    def __init__(self, x):
        self.watched = {x.id}
        self.records = []

    def watches(self, xs):
        """Return whether the tape watches one of these tensors."""
        return any(x.id in self.watched for x in xs)


class Record:
    """One executed op: ids, shapes, and the values that its rule names."""

    def __init__(self, op, rule, xs, y, named):
        self.op = op
        self.rule = rule
        self.inputs = [x.id for x in xs]
        self.shapes = [x.shape for x in xs]
        self.output = y.id
        self.saved = {name: named[name] for name in names_after_first(rule)} if rule else {}


def record(op, rule, xs, y, named):
    """Append a record to each tape that watches an input."""
    for tape in TAPES.get():
        if tape.watches(xs):
            tape.records.append(Record(op, rule, xs, y, named))
            tape.watched.add(y.id)


# Now we can fill an op sheet. The rules of the table come from school calculus. Ops that change a
# shape come in pairs, and each is the rule of the other: broadcasting makes copies, and the
# gradient of copies is their sum. (In regrad: `ops/`.)

add = elementwise("AddV2", lambda xp, a, b: xp.add(a, b), lambda dy: (dy, dy))
mul = elementwise("Mul", lambda xp, a, b: xp.multiply(a, b), lambda dy, a, b: (dy * b, dy * a))
exp = elementwise("Exp", lambda xp, x: xp.exp(x), lambda dy, y: dy * y)
sin = elementwise("Sin", lambda xp, x: xp.sin(x), lambda dy, x: dy * cos(x))
cos = elementwise("Cos", lambda xp, x: xp.cos(x), lambda dy, x: dy * sin(x) * -1)
sign = elementwise("Sign", lambda xp, x: xp.sign(x), lambda dy: dy * 0)

Tensor.__add__ = Tensor.__radd__ = add
Tensor.__mul__ = Tensor.__rmul__ = mul


@op("BroadcastTo")
def broadcast_to(xp, x: Tensor, shape):
    """Copy x along new axes, and along axes of size 1, so that it has the shape."""
    return xp.broadcast_to(x, shape)


@gradient("BroadcastTo")
def _(dy, x_shape):
    return sum_to(dy, x_shape)


@op("SumTo")
def sum_to(xp, x: Tensor, shape):
    """Sum x over the axes that broadcasting from the shape would stretch."""
    new = x.ndim - len(shape)  # axes that broadcasting prepends
    stretched = [new + i for i, size in enumerate(shape) if size == 1]
    return xp.sum(x, axis=(*range(new), *stretched), keepdims=True).reshape(shape)


@gradient("SumTo")
def _(dy, x_shape):
    return broadcast_to(dy, x_shape)


# The rule of `Sin` names `x`, and the rule of `AddV2` names no value. So a chain of additions keeps
# no array, however long it is.

x = Tensor([1.0, 2.0])
tape = Tape(x)
with using(TAPES, (tape,)):
    y = sin(x) + x + 10

assert [r.op.type for r in tape.records] == ["Sin", "AddV2", "AddV2"]
assert [list(r.saved) for r in tape.records] == [["x"], [], []]

# ## 4. The walk (`core/walk.py`)
#
# The walk keeps gradients in a dict, by id. At each record, newest first, it removes the gradient
# of the output and adds the gradients of the inputs. Where two paths meet, it sums them. The walk
# has no recursion and visits each record once, so a chain of 100,000 ops is fine.
#
# The walk also adapts shapes, so that rules stay formulas. It sums a gradient down to the shape of
# its input, but only for ops that broadcast. For other ops a wrong shape is a mistake in the rule,
# and the walk raises an error.


def walk(tape, grads):
    """Propagate gradients, by id, from outputs on the tape to the watched tensors."""
    with using(OVERRIDES, {}):  # see section 8
        for record in reversed(tape.records):
            dy = grads.pop(record.output, None)
            if dy is None:
                continue  # y does not depend on this op
            for key, dx in pulled(record, dy):
                if key in tape.watched:
                    grads[key] = grads[key] + dx if key in grads else dx
    return grads


def pulled(record, dy):
    """Call the rule of a record; return its gradients with the ids of the inputs."""
    if record.rule is None:
        raise ValueError(f"no gradient is defined for the op type {record.op.type}")
    dxs = record.rule(dy, **record.saved)
    dxs = dxs if isinstance(dxs, tuple) else (dxs,)
    fits = [fitted(record, *pair) for pair in zip(dxs, record.shapes, strict=True)]
    return zip(record.inputs, fits, strict=True)


def fitted(record, dx, shape):
    """Return a gradient in the shape of its input."""
    if dx.shape == shape:
        return dx
    if record.op.broadcasts:
        return sum_to(dx, shape)
    raise ValueError(f"the rule of {record.op.type} returned {dx.shape}, expected {shape}")


dx = walk(tape, {y.id: Tensor([1.0, 1.0])})[x.id]  # of y = sin(x) + x + 10, recorded above
assert np.allclose(dx.value, np.cos([1.0, 2.0]) + 1)

# ## 5. grad, and why it differentiates by an alias (`autodiff/gradients.py`)
#
# `vjp` runs a function under a tape. It returns the value and the pullback, a function of `dy`.
# `grad` calls the pullback with dy = 1.
#
# The tape does not watch the tensor that the caller passed, but a **fresh alias**: the same value
# under a new id. So `grad` differentiates only this argument, and any other use of the same tensor
# is a constant. The alias is itself an op. The outer tapes record it, so *they* still connect the
# alias to the tensor.

alias = elementwise("Alias", lambda xp, x: x, lambda dy: dy)


def vjp(f, x):
    """Return `f(x)`, and the function that maps a `dy` to a `dx`."""
    x = alias(x)
    tape = Tape(x)
    with using(TAPES, (*TAPES.get(), tape)):
        y = f(x)

    def pull(dy):
        grads = walk(tape, {y.id: dy})
        if x.id not in grads:
            raise ValueError("no path leads from x to f(x)")
        return grads[x.id]

    return y, pull


def grad(f):
    """Return the function that computes the gradient of `sum(f(x))` by x."""

    def g(x):
        y, pull = vjp(f, x)
        return pull(Tensor(np.ones(y.shape)))

    return g


x = Tensor(3.0)
assert grad(lambda x: x * x)(x).value == 6  # both factors are the argument
assert grad(lambda z: z * x)(x).value == 3  # one is the argument, the other a constant

row, column = Tensor([[1.0, 2.0, 3.0]]), Tensor([[1.0], [2.0]])
assert np.array_equal(grad(lambda z: z * row)(column).value, [[6.0], [6.0]])  # summed

# ## 6. Higher orders are free
#
# Higher orders need no further code. While the inner `grad` walks, the outer tapes are still open.
# Rules consist of ops, so the outer tapes record them like any other op. Aliases separate the
# levels: in the last line x is a constant for the inner `grad`, which is 1, so the outer `grad`
# differentiates x * 1.

x = Tensor(0.5)
assert np.allclose(grad(grad(grad(sin)))(x).value, -np.cos(0.5))
assert np.allclose(grad(grad(lambda x: exp(x * x)))(x).value, 3 * np.exp(0.25))
assert grad(lambda x: x * grad(lambda z: x + z)(1.0))(x).value == 1

# ## 7. custom_grad: a function with a custom gradient (`autodiff/custom.py`)
#
# `f(*xs, save)` returns its value and a `grad_func`. It stores with `save` the tensors that
# `grad_func` will read. One call becomes one record, whose rule is this `grad_func`.
#
# Which tapes record the ops inside `f`? Not the innermost tape that watches an input: on this tape
# `grad_func` defines the gradient. The tapes outside it do record the ops, because the saved
# tensors depend on the inputs too, and the next order must differentiate this dependence.

CUSTOM = Op("CustomGrad", None, [], [])


def custom_grad(f):
    """Differentiate `f(*xs, save) -> (y, grad_func)` by `grad_func(dy, saved)`."""

    def function(*xs):
        xs = [lift(x) for x in xs]
        saved = []
        with using(TAPES, outer_tapes(xs)):
            y, grad_func = f(*xs, saved.extend)
            y = alias(y) if y in xs else y  # an output is never its own input
        record(CUSTOM, lambda dy: grad_func(dy, saved), xs, y, {})
        return y

    return function


def outer_tapes(xs):
    """Return the open tapes outside the innermost tape that watches one of these tensors."""
    tapes = TAPES.get()
    watching = [i for i, tape in enumerate(tapes) if tape.watches(xs)]
    return tapes[: watching[-1]] if watching else tapes


@custom_grad
def square(x, save):
    """Return the square of x, with the gradient |x| instead of 2x."""
    size = x * sign(x)
    save([size])
    return x * x, lambda dy, saved: dy * saved[0]


x = Tensor([-3.0, 2.0])
assert np.array_equal(square(x).value, [9.0, 4.0])
assert np.array_equal(grad(square)(x).value, [3.0, 2.0])
assert np.array_equal(grad(grad(square))(x).value, [-1.0, 1.0])  # through the saved tensor

# ## 8. Overrides: another rule for an op type, within a scope (`core/overrides.py`)
#
# `call` already looks up rules in `OVERRIDES`, so little is missing. `call` looks up the rule when
# it creates the op. The record keeps this rule, so the place of the walk does not matter. For the
# same reason the walk masks all overrides: the ops that rules create do not belong to a scope that
# happens to be open during the walk.


def gradient_override_map(rules):
    """Differentiate the ops of these types by these rules, within a scope."""
    return using(OVERRIDES, {**OVERRIDES.get(), **rules})


def straight_through(x):
    """Return the sign of x, with the gradient of the identity."""
    with gradient_override_map({"Sign": lambda dy: dy}):
        return sign(x)


x = Tensor([-3.0, 2.0])
assert np.array_equal(grad(sign)(x).value, [0.0, 0.0])
assert np.array_equal(grad(straight_through)(x).value, [1.0, 1.0])  # the scope has ended

with gradient_override_map({"Cos": lambda dy: dy * 100}):
    assert np.allclose(grad(cos)(x).value, 100)  # a cos of the user
    assert np.allclose(grad(grad(sin))(x).value, -np.sin(x.value))  # the cos of a rule

# ## 9. stop_gradient, and surrogates
#
# An op without a rule is recorded too, and raises an error when a gradient reaches it, because a
# silent 0 would be a wrong answer. An op that is *declared* to have no gradient leaves no record.
# No tape watches its output, so the output is a constant. This allows a third way to choose a
# gradient. The value of the *surrogate* below is f(x), because the two g(x) cancel. Its gradient is
# the gradient of g, the only part that is not a constant.

stop_gradient = elementwise("StopGradient", lambda xp, x: x, NO_GRADIENT)


def surrogate(f, g):
    """Return a function with the value of f and the gradient of g."""
    return lambda x: g(x) + stop_gradient(f(x) + g(x) * -1)


by_surrogate = surrogate(sign, lambda x: x)
by_custom_grad = custom_grad(lambda x, save: (sign(x), lambda dy, saved: dy))
for f in straight_through, by_surrogate, by_custom_grad:  # three ways to define one gradient
    assert np.array_equal(f(x).value, [-1.0, 1.0])
    assert np.array_equal(grad(f)(x).value, [1.0, 1.0])

# ## 10. Forward mode, by transposing (`transforms/forward.py`)
#
# `jvp` computes the change of `y` when `x` moves along `dx`. This is J dx, where J is the Jacobian.
# The walk computes something else: pull(dy) is J transposed times dy. But pull is linear in dy, and
# the gradient *by dy* of the sum of pull(dy) * dx is J dx. So forward mode needs no second set of
# rules; it differentiates the walk. As pull is linear, any dy will do.
#
# A custom rule may not be linear in dy (it may clip it), and this method would then return a wrong
# result without a warning. In this case regrad raises an error that names the rule.


def jvp(f, x, dx):
    """Return the change of f(x) when x moves along dx."""
    y, pull = vjp(f, x)
    return grad(lambda dy: pull(dy) * dx)(Tensor(np.zeros(y.shape)))


x, dx = Tensor([0.5, 2.0]), Tensor([1.0, -3.0])
expected = (np.sin(x.value) + x.value * np.cos(x.value)) * dx.value
assert np.allclose(jvp(lambda x: x * sin(x), x, dx).value, expected)

# ## Additions in regrad
#
# This is the design; the library has the same parts under the same names. It is longer because of
#
# * **checks**: a gradient of the wrong number, kind, shape or dtype, a name that an op does not
#   have, and a tensor that `custom_grad` would lose each raise an error with the place and a fix,
#   and a scope reports which of its overrides fired;
# * **breadth**: many ops, dtypes and complex numbers, several outputs, sequences, containers,
#   Variables, rules in TensorFlow's own form, and rules for one input, which run (and keep tensors
#   in memory) only if that input's gradient is requested;
# * **speed**: regrad resolves a rule's names once and not at each call, common ops take a short
#   path, and the walk frees each record after its visit; `bench/` measures this;
# * **modes**: under `jit` and `vmap` the arrays inside Tensors are JAX tracers, and in a deferred
#   graph they are symbols. Rules consist of ops, so they work in every mode unchanged.
#   `how_jit_works.py` and `how_graphs_work.py` continue from here.
