"""# How regrad works.

This script rebuilds the core of regrad from nothing but NumPy and the standard library. Read
it from top to bottom, or run it (`python docs/how_it_works.py`): each section ends by using
what it has built, and asserts that the answers are right.

The words are those of the library. An **op** makes an output `y` from inputs, `x` or `a` and
`b`. Its **rule** is the way back: `dy`, the gradient by the output, arrives, and `dx`, the
gradient by the input, leaves. A **record** notes one executed op, a **tape** collects records,
and the **walk** passes through them from the newest to the oldest.
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
# A Tensor never changes. Its id comes from a counter, and lets a record speak *about* a
# Tensor without holding it, so that its array can be freed. Python's own `id()` would not
# do: once an object is gone, the next one may get its number.

next_id = itertools.count(1).__next__


class Tensor:
    """An array of floats, and a number that no other Tensor has."""

    def __init__(self, value):
        self.value = np.array(value, dtype=float)  # a copy, which nobody else can change
        self.shape = self.value.shape
        self.id = next_id()


assert Tensor(2.0).id != Tensor(2.0).id

# ## 2. An op is a kernel and a rule (`core/op.py`, `core/registry.py`)
#
# This is how we want to write an op down; a page of such entries is an *op sheet*:
#
#     @op("Exp")
#     def exp(xp, x: Tensor):
#         return xp.exp(x)
#
#     @gradient("Exp")
#     def _(dy, y):
#         return dy * y
#
# The first function is the **kernel**. It computes with raw arrays, in the array namespace
# `xp` that it is given: here NumPy, in regrad also JAX and PyTorch. The annotation `Tensor`
# tells its inputs from its *attributes*, which are plain Python values such as an axis.
#
# The second function is the **rule**. Its parameters after `dy` are *names*: an input (`x`),
# the output (`y`), an attribute, or only the shape of an input (`x_shape`). And it is written
# with ops, not with NumPy. Both habits will pay: the names decide what is kept in memory
# (section 3), and rules made of ops give derivatives of every order (section 6).

OPS = {}  # op type -> Op


@dataclass
class Op:
    """An op type: its kernel, what it calls its inputs and attributes, and its rule."""

    type: str
    kernel: Callable
    inputs: list
    attrs: list
    broadcasts: bool = False
    rule: Callable | None = None  # None: nobody has given it one


def op(type):
    """Make an op out of a kernel."""

    def decorate(kernel):
        names = names_after_first(kernel)  # the first is xp
        inputs = [n for n in names if kernel.__annotations__.get(n) is Tensor]
        attrs = [n for n in names if n not in inputs]
        return public(Op(type, kernel, inputs, attrs))

    return decorate


def gradient(type):
    """Give an op type its rule."""

    def register(rule):
        OPS[type].rule = rule
        return rule

    return register


def elementwise(type, kernel, rule=None):
    """One row of a table of ops: all inputs are tensors, and broadcast against each other."""
    return public(Op(type, kernel, names_after_first(kernel), [], broadcasts=True, rule=rule))


def names_after_first(function):
    """What a function calls its parameters, without the first."""
    return list(inspect.signature(function).parameters)[1:]


def public(op):
    """Enter an op in the table, and make the function that users call."""
    OPS[op.type] = op
    return lambda *arguments: call(op, arguments)


# ## 3. Every call takes one road: compute, then record (`core/dispatch.py`, `core/tape.py`)
#
# Two things are in force at any moment: the tapes that are open, outermost first, and the
# overrides of section 8. They live in context variables, so that no thread and no asyncio
# task sees those of another. `using` changes one for a block, however the block ends.

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
    """Run an op on Tensors or numbers, and record it under the rule in force now."""
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
    """The rule of an op whose output is a constant."""


def lift(value):
    """A Tensor as it is; a number or an array as a Tensor."""
    return value if isinstance(value, Tensor) else Tensor(value)


# A tape watches some tensors. When an op uses one of them, the op goes on the tape, and its
# output is watched too. A record takes from `named` what its rule asks for, and no more.


class Tape:
    """The records that lead from what is watched, oldest first."""

    def __init__(self, x):
        self.watched = {x.id}
        self.records = []

    def watches(self, xs):
        """Whether one of these tensors is watched."""
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
    """Put a record on each tape that watches an input."""
    for tape in TAPES.get():
        if tape.watches(xs):
            tape.records.append(Record(op, rule, xs, y, named))
            tape.watched.add(y.id)


# Now we can fill an op sheet. The rows of the table are school calculus. Ops that change a
# shape come in pairs, each the other's rule: broadcasting makes copies, and the gradient of
# copies is their sum. (In regrad: `ops/`.)

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
    new = x.ndim - len(shape)  # axes that broadcasting puts in front
    stretched = [new + i for i, size in enumerate(shape) if size == 1]
    return xp.sum(x, axis=(*range(new), *stretched), keepdims=True).reshape(shape)


@gradient("SumTo")
def _(dy, x_shape):
    return broadcast_to(dy, x_shape)


# The rule of `Sin` names `x`, that of `AddV2` names nothing. So a chain of additions keeps no
# array, however long it is.

x = Tensor([1.0, 2.0])
tape = Tape(x)
with using(TAPES, (tape,)):
    y = sin(x) + x + 10

assert [r.op.type for r in tape.records] == ["Sin", "AddV2", "AddV2"]
assert [list(r.saved) for r in tape.records] == [["x"], [], []]

# ## 4. The walk (`core/walk.py`)
#
# Gradients travel in a dict, by id. At each record, newest first, the gradient of the output
# leaves the dict and the gradients of the inputs come in; where two paths meet, they add.
# There is no recursion, and each record is passed once: a chain of 100,000 ops is fine.
#
# The walk also does the dull work, so that rules stay formulas. It sums a gradient down to
# the shape of its input, but only for ops that broadcast. Elsewhere a wrong shape is a
# mistake in the rule, and an error.


def walk(tape, grads):
    """Carry gradients, given by id, from outputs on the tape back to what it watches."""
    with using(OVERRIDES, {}):  # section 8 says why
        for record in reversed(tape.records):
            dy = grads.pop(record.output, None)
            if dy is None:
                continue  # this op does not lead to y
            for key, dx in pulled(record, dy):
                if key in tape.watched:
                    grads[key] = grads[key] + dx if key in grads else dx
    return grads


def pulled(record, dy):
    """Return the gradients of a rule, each with the id of its input."""
    if record.rule is None:
        raise ValueError(f"no gradient is defined for the op type {record.op.type}")
    dxs = record.rule(dy, **record.saved)
    dxs = dxs if isinstance(dxs, tuple) else (dxs,)
    fits = [fitted(record, *pair) for pair in zip(dxs, record.shapes, strict=True)]
    return zip(record.inputs, fits, strict=True)


def fitted(record, dx, shape):
    """A gradient under the shape of its input."""
    if dx.shape == shape:
        return dx
    if record.op.broadcasts:
        return sum_to(dx, shape)
    raise ValueError(f"the rule of {record.op.type} returned {dx.shape}, expected {shape}")


dx = walk(tape, {y.id: Tensor([1.0, 1.0])})[x.id]  # of y = sin(x) + x + 10, recorded above
assert np.allclose(dx.value, np.cos([1.0, 2.0]) + 1)

# ## 5. grad, and why it differentiates by an alias (`autodiff/gradients.py`)
#
# `vjp` runs a function under a tape and returns its value together with the way back, as a
# function of `dy`. `grad` takes that way from dy = 1.
#
# The tape does not watch the tensor that the caller passed, but a **fresh alias** of it: the
# same value under a new id. So it is this one argument that is differentiated, and any other
# use of the same tensor is a constant. The alias is itself an op, which the tapes further out
# record, so *they* still see where it came from.

alias = elementwise("Alias", lambda xp, x: x, lambda dy: dy)


def vjp(f, x):
    """`f(x)`, and the function that carries a `dy` back to a `dx`."""
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
# Nothing needs to be added. While the inner `grad` takes its walk, the tapes outside are
# still open; and since rules are made of ops, what they do is recorded there like anything
# else. Aliases keep the levels apart: in the last line x is a constant for the inner `grad`,
# which is 1, so that the outer one differentiates x * 1.

x = Tensor(0.5)
assert np.allclose(grad(grad(grad(sin)))(x).value, -np.cos(0.5))
assert np.allclose(grad(grad(lambda x: exp(x * x)))(x).value, 3 * np.exp(0.25))
assert grad(lambda x: x * grad(lambda z: x + z)(1.0))(x).value == 1

# ## 7. custom_grad: a function with a gradient of your own (`autodiff/custom.py`)
#
# `f(*xs, save)` returns its value and a `grad_func`, and puts aside by `save` what `grad_func`
# will need. One call becomes one record, whose rule is that `grad_func`.
#
# Which tapes should see the ops inside `f`? Not the innermost one that watches an input: there
# `grad_func` speaks. Those outside it should, because what was saved depends on the inputs
# too, and at the next order that has to be differentiated.

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
    """The open tapes outside the innermost one that watches one of these tensors."""
    tapes = TAPES.get()
    watching = [i for i, tape in enumerate(tapes) if tape.watches(xs)]
    return tapes[: watching[-1]] if watching else tapes


@custom_grad
def square(x, save):
    """The square of x, with the gradient |x| instead of 2x."""
    size = x * sign(x)
    save([size])
    return x * x, lambda dy, saved: dy * saved[0]


x = Tensor([-3.0, 2.0])
assert np.array_equal(square(x).value, [9.0, 4.0])
assert np.array_equal(grad(square)(x).value, [3.0, 2.0])
assert np.array_equal(grad(grad(square))(x).value, [-1.0, 1.0])  # through what was saved

# ## 8. Overrides: another rule for an op type, within a scope (`core/overrides.py`)
#
# `call` has looked rules up in `OVERRIDES` all along, so there is little left to do. Note
# *when* it looks: as the op is created. The record carries that rule from then on, and it
# does not matter where the walk happens. For the same reason the walk masks all overrides:
# the ops that rules create are not for a scope that happens to be open just then.


def gradient_override_map(rules):
    """Within a scope, differentiate ops of the given types by the given rules."""
    return using(OVERRIDES, {**OVERRIDES.get(), **rules})


def straight_through(x):
    """The sign of x, with the gradient of the identity."""
    with gradient_override_map({"Sign": lambda dy: dy}):
        return sign(x)


x = Tensor([-3.0, 2.0])
assert np.array_equal(grad(sign)(x).value, [0.0, 0.0])
assert np.array_equal(grad(straight_through)(x).value, [1.0, 1.0])  # the scope has ended

with gradient_override_map({"Cos": lambda dy: dy * 100}):
    assert np.allclose(grad(cos)(x).value, 100)  # our own cos
    assert np.allclose(grad(grad(sin))(x).value, -np.sin(x.value))  # the cos of a rule

# ## 9. stop_gradient, and surrogates
#
# An op that nobody has given a rule is recorded all the same, and raises an error when a gradient
# reaches it: silence would be a wrong answer. An op that is *said* to have no gradient leaves no
# record. So nobody watches its output, and it is a constant.
# That allows a third way to choose a gradient. The value of the *surrogate* below is f(x), as
# the two g(x) cancel; its gradient is that of g, the only part that is not a constant.

stop_gradient = elementwise("StopGradient", lambda xp, x: x, NO_GRADIENT)


def surrogate(f, g):
    """The value of f, with the gradient of g."""
    return lambda x: g(x) + stop_gradient(f(x) + g(x) * -1)


by_surrogate = surrogate(sign, lambda x: x)
by_custom_grad = custom_grad(lambda x, save: (sign(x), lambda dy, saved: dy))
for f in straight_through, by_surrogate, by_custom_grad:  # three ways to say the same
    assert np.array_equal(f(x).value, [-1.0, 1.0])
    assert np.array_equal(grad(f)(x).value, [1.0, 1.0])

# ## 10. Forward mode, by transposing (`transforms/forward.py`)
#
# `jvp` asks how `y` moves when `x` moves along `dx`. That is J dx, where J is the Jacobian,
# and the walk computes something else: pull(dy) is J transposed times dy. But this is linear
# in dy, and the gradient *by dy* of the sum of pull(dy) * dx is just J dx. So we need no
# second set of rules; we differentiate the walk. As pull is linear, any dy will do.
#
# A rule of your own need not be linear in dy (it may clip it), and then this would be a wrong
# answer without a warning. There regrad refuses, and names the rule.


def jvp(f, x, dx):
    """How f(x) moves when x moves along dx."""
    y, pull = vjp(f, x)
    return grad(lambda dy: pull(dy) * dx)(Tensor(np.zeros(y.shape)))


x, dx = Tensor([0.5, 2.0]), Tensor([1.0, -3.0])
expected = (np.sin(x.value) + x.value * np.cos(x.value)) * dx.value
assert np.allclose(jvp(lambda x: x * sin(x), x, dx).value, expected)

# ## What regrad adds
#
# You have read the design; the library has the same parts under the same names. It is longer
# because of
#
# * **checks**: a gradient of the wrong number, kind, shape or dtype, a name that an op does
#   not have, a tensor that `custom_grad` would lose: each is an error that says where and what
#   to do instead, and a scope reports which of its overrides fired;
# * **breadth**: many ops, dtypes and complex numbers, several outputs, sequences, containers,
#   Variables, rules in TensorFlow's own form, and rules for one input, which run (and keep
#   things in memory) only if that input's gradient is wanted;
# * **speed**: a rule's names are resolved once and not at each call, common ops take a short
#   road, and the walk lets go of each record as it passes; `bench/` measures it;
# * **modes**: under `jit` and `vmap` the arrays inside Tensors are JAX tracers, and in a
#   deferred graph they are symbols. Rules are made of ops, so no rule has to know.
#   `how_jit_works.py` and `how_graphs_work.py` go on from here.
