# # How regrad works
#
# This script rebuilds the core of regrad from nothing but NumPy and the standard library.
# Read it from top to bottom, or run it (`python docs/how_it_works.py`): each section ends by
# using what it has built, and asserts that the answers are right.
#
# The words are those of the library. An **op** makes an output `y` from inputs, `x` or `a`
# and `b`. Its **rule** is the way back: `dy`, the gradient by the output, arrives, and `dx`,
# the gradient by the input, leaves. A **record** notes one executed op, a **tape** collects
# records, and the **walk** passes through them from the newest to the oldest.

import inspect
import itertools
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import numpy as np

# ## 1. A Tensor is a value with an id
#
# A Tensor never changes. Its id comes from a counter, and lets a record speak *about* a
# Tensor without holding it, so that its array can be freed. Python's own `id()` would not
# do: once an object is gone, the next one may get its number.
#
# In regrad: `tensor.py`.

next_id = itertools.count(1).__next__


class Tensor:
    """An array of floats, and a number that no other Tensor has."""

    def __init__(self, value):
        self.value = np.array(value, dtype=float)  # a copy, which nobody else can change
        self.id = next_id()

    @property
    def shape(self):
        """The sizes of the axes."""
        return self.value.shape


def lift(value):
    """A Tensor as it is; a number or an array as a Tensor."""
    return value if isinstance(value, Tensor) else Tensor(value)


assert Tensor(2.0).id != Tensor(2.0).id

# ## 2. An op is a kernel and a rule
#
# This is how we want to write an op down. A page of such entries is an *op sheet*:
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
#
# In regrad: `opsheet.py` and `registry.py`. There a rule may also be given input by input, so
# that only the gradients that are wanted are computed.

OPS = {}  # op type -> Op


class Op:
    """An op type: its kernel, what it calls its inputs and attributes, and its rule."""

    def __init__(self, type, kernel, broadcasts=False):
        _, *parameters = inspect.signature(kernel).parameters.values()
        self.type = type
        self.kernel = kernel
        self.broadcasts = broadcasts
        self.inputs = [p.name for p in parameters if p.annotation is Tensor]
        self.attrs = [p.name for p in parameters if p.annotation is not Tensor]
        self.rule = None  # no gradient, unless `gradient` gives it one


def op(type, broadcasts=False):
    """Make an op out of a kernel."""

    def decorate(kernel):
        entry = OPS[type] = Op(type, kernel, broadcasts)

        def function(*arguments):
            return call(entry, arguments)

        return function

    return decorate


def gradient(type):
    """Give an op type its rule."""

    def register(rule):
        OPS[type].rule = rule
        return rule

    return register


# ## 3. Every call takes one road: compute, then record
#
# Who is interested in a call? The **state** knows: the tapes that are open, outermost first,
# and the overrides in force (section 8). It is an immutable value in a context variable, so
# no thread and no asyncio task sees the state of another, and a block that changes it cannot
# forget to change it back.
#
# In regrad: `state.py`, `dispatch.py` and `tape.py`.


class State(NamedTuple):
    """What is in force here and now."""

    tapes: tuple = ()
    overrides: dict = {}


STATE = ContextVar("state", default=State())


@contextmanager
def in_state(**changes):
    """Run a block under a changed state."""
    token = STATE.set(STATE.get()._replace(**changes))
    try:
        yield
    finally:
        STATE.reset(token)


def call(op, arguments):
    """Run an op on Tensors, arrays or numbers, and record it under the rule in force now."""
    count = len(op.inputs)
    xs = [lift(x) for x in arguments[:count]]
    attrs = dict(zip(op.attrs, arguments[count:], strict=True))
    y = Tensor(op.kernel(np, *[x.value for x in xs], **attrs))
    rule = STATE.get().overrides.get(op.type, op.rule)
    if rule is not None:
        shapes = {f"{name}_shape": x.shape for name, x in zip(op.inputs, xs, strict=True)}
        names = {**dict(zip(op.inputs, xs, strict=True)), **shapes, **attrs, "y": y}
        record(op, rule, xs, y, names)
    return y


# A tape watches some tensors. When an op uses one of them, the op goes on the tape, and its
# output is watched too. So a tape holds what leads from its inputs, and nothing else.


class Tape:
    """The records that lead from what is watched, oldest first."""

    def __init__(self, x):
        self.watched = {x.id}
        self.records = []

    def watches(self, xs):
        """Whether one of these tensors is watched."""
        return any(x.id in self.watched for x in xs)


def record(op, rule, xs, y, names):
    """Put a record on each tape that watches an input."""
    for tape in STATE.get().tapes:
        if tape.watches(xs):
            tape.records.append(Record(op, rule, xs, y, names))
            tape.watched.add(y.id)


# A record picks from `names` what its rule asks for, and lets go of all the rest.


class Record:
    """One executed op: ids, shapes, and the values that its rule names."""

    def __init__(self, op, rule, xs, y, names):
        _, *asked = inspect.signature(rule).parameters  # the first is dy
        self.op = op
        self.rule = rule
        self.inputs = [x.id for x in xs]
        self.shapes = [x.shape for x in xs]
        self.output = y.id
        self.saved = {name: names[name] for name in asked}


# Now we can fill an op sheet. Rules for elementwise ops are school calculus. Ops that change
# the shape come in pairs, each the other's rule: broadcasting copies, and the gradient of
# copies is their sum.
#
# In regrad: `ops/`, some hundreds of ops.


@op("AddV2", broadcasts=True)
def add(xp, a: Tensor, b: Tensor):
    return xp.add(a, b)


@gradient("AddV2")
def _(dy):
    return dy, dy


@op("Mul", broadcasts=True)
def multiply(xp, a: Tensor, b: Tensor):
    return xp.multiply(a, b)


@gradient("Mul")
def _(dy, a, b):
    return dy * b, dy * a


@op("Sin")
def sin(xp, x: Tensor):
    return xp.sin(x)


@gradient("Sin")
def _(dy, x):
    return dy * cos(x)


@op("Cos")
def cos(xp, x: Tensor):
    return xp.cos(x)


@gradient("Cos")
def _(dy, x):
    return dy * sin(x) * -1


@op("Exp")
def exp(xp, x: Tensor):
    return xp.exp(x)


@gradient("Exp")
def _(dy, y):
    return dy * y


@op("Sign")
def sign(xp, x: Tensor):
    return xp.sign(x)


@gradient("Sign")
def _(dy):
    return dy * 0


@op("BroadcastTo")
def broadcast_to(xp, x: Tensor, shape):
    return xp.broadcast_to(x, shape)


@gradient("BroadcastTo")
def _(dy, x_shape):
    return sum_to(dy, x_shape)


@op("SumTo")
def sum_to(xp, x: Tensor, shape):
    new = x.ndim - len(shape)  # axes that broadcasting put in front
    stretched = [i for i in range(new, x.ndim) if shape[i - new] == 1]
    return xp.sum(x, axis=(*range(new), *stretched), keepdims=True).reshape(shape)


@gradient("SumTo")
def _(dy, x_shape):
    return broadcast_to(dy, x_shape)


Tensor.__add__ = Tensor.__radd__ = add
Tensor.__mul__ = Tensor.__rmul__ = multiply

# The proof that a record keeps what its rule names: `Sin` names `x`, `AddV2` names nothing.
# However long a chain of additions is, it keeps no array.

x = Tensor([1.0, 2.0])
tape = Tape(x)
with in_state(tapes=(tape,)):
    y = sin(x) + x + 10

assert [r.op.type for r in tape.records] == ["Sin", "AddV2", "AddV2"]
assert [list(r.saved) for r in tape.records] == [["x"], [], []]

# ## 4. The walk
#
# Gradients travel in a dict, by id. At each record, newest first, the gradient of the output
# leaves the dict, and the gradients of the inputs come in; where two paths meet, they add.
# There is no recursion, and each record is passed once, so a chain of 100,000 ops is fine.
#
# The walk also does the dull work, so that rules stay formulas. It counts the gradients. It
# sums them down to the input's shape, but only for ops that say that they broadcast;
# elsewhere a wrong shape is a mistake in the rule, and an error.
#
# In regrad: `walk.py`, which serves deferred graphs as well as tapes.


def walk(tape, grads):
    """Carry gradients, given by id, from outputs on the tape back to what it watches."""
    with in_state(overrides={}):  # section 8 says why
        for record in reversed(tape.records):
            dy = grads.pop(record.output, None)
            if dy is None:
                continue  # this op does not lead to y
            for key, dx in pulled(record, dy):
                if key in tape.watched:
                    grads[key] = grads[key] + dx if key in grads else dx
    return grads


def pulled(record, dy):
    """The gradients that a rule gives, by the ids of the inputs."""
    dxs = record.rule(dy, **record.saved)
    dxs = dxs if isinstance(dxs, tuple | list) else [dxs]
    if len(dxs) != len(record.inputs):
        raise ValueError(
            f"the rule of {record.op.type} returned {len(dxs)} gradients, "
            f"expected one for each of {len(record.inputs)} inputs"
        )
    specs = zip(record.inputs, record.shapes, dxs, strict=True)
    return [(key, fitted(record, dx, shape)) for key, shape, dx in specs]


def fitted(record, dx, shape):
    """A gradient under the shape of its input."""
    if dx.shape == shape:
        return dx
    if record.op.broadcasts:
        return sum_to(dx, shape)
    raise ValueError(
        f"the rule of {record.op.type} returned the shape {dx.shape}, expected {shape}"
    )


# The tape above recorded y = sin(x) + x + 10, so dx is dy * (cos(x) + 1).

dx = walk(tape, {y.id: Tensor([1.0, 1.0])})[x.id]
assert np.allclose(dx.value, np.cos([1.0, 2.0]) + 1)

# ## 5. grad, and why it differentiates by an alias
#
# `vjp` runs a function under a tape and gives the value together with the way back, as a
# function of `dy`. `grad` takes that way back from dy = 1.
#
# The tape does not watch the tensor that the caller passed, but a **fresh alias** of it: the
# same value under a new id. So it is this one argument that is differentiated, and every
# other use of the same tensor is a constant. The alias is itself an op, which tapes further
# out record, so *they* still see where it came from.
#
# In regrad: `gradients.py`, where arguments may also be lists, dicts and other containers.


@op("Alias")
def alias(xp, x: Tensor):
    return x


@gradient("Alias")
def _(dy):
    return dy


def vjp(f, x):
    """`f(x)`, and the function that carries a `dy` back to a `dx`."""
    x = alias(x)
    tape = Tape(x)
    with in_state(tapes=(*STATE.get().tapes, tape)):
        y = f(x)

    def pull(dy):
        grads = walk(tape, {y.id: dy})
        if x.id not in grads:
            raise ValueError("no path leads from x to f(x)")
        return grads[x.id]

    return y, pull


def grad(f):
    """The function that gives the gradient of `sum(f(x))` by x."""

    def g(x):
        y, pull = vjp(f, x)
        return pull(Tensor(np.ones(y.shape)))

    return g


x = Tensor(3.0)
assert grad(lambda x: x * x)(x).value == 6  # both factors are the argument
assert grad(lambda z: z * x)(x).value == 3  # one is the argument, the other a constant

wide, tall = Tensor([[1.0, 2.0, 3.0]]), Tensor([[1.0], [2.0]])
assert np.array_equal(grad(lambda tall: wide * tall)(tall).value, [[6.0], [6.0]])  # summed

# ## 6. Higher orders are free
#
# Nothing needs to be added. When the inner `grad` takes its walk, its tape is closed, but the
# tapes outside it are still open; and since rules are made of ops, what they do is recorded
# there like anything else. Aliases keep the levels apart: the inner derivative below is 1
# (x is a constant to it), so the outer one is that of x * 1.

x = Tensor(0.5)
assert np.allclose(grad(grad(grad(sin)))(x).value, -np.cos(0.5))
assert np.allclose(grad(grad(lambda x: exp(x * x)))(x).value, 3 * np.exp(0.25))
assert grad(lambda x: x * grad(lambda z: x + z)(1.0))(x).value == 1

# ## 7. custom_grad: a function with a gradient of your own
#
# `f(*xs, save)` returns the value and a `grad_func`, and puts aside with `save` what
# `grad_func` will need. One call becomes one record, whose rule is that `grad_func`.
#
# Which tapes should see the ops inside `f`? Not the innermost one that watches an input: there
# `grad_func` speaks. But those outside it should, because what was saved depends on the
# inputs too, and at the next order that dependence has to be differentiated.
#
# In regrad: `custom.py`. It also refuses an `f` that uses a differentiated tensor without
# taking it as an input, for that gradient would be lost.

CUSTOM = Op("CustomGrad", lambda xp: None)


def custom_grad(f):
    """Differentiate `f(*xs, save) -> (y, grad_func)` by `grad_func(dy, saved)`."""

    def function(*xs):
        xs = [lift(x) for x in xs]
        saved = []
        with in_state(tapes=outer_tapes(xs)):
            y, grad_func = f(*xs, saved.extend)
            y = alias(y) if y in xs else y  # f may return its own input
        record(CUSTOM, lambda dy: grad_func(dy, saved), xs, y, {})
        return y

    return function


def outer_tapes(xs):
    """The open tapes outside the innermost one that watches one of these tensors."""
    tapes = STATE.get().tapes
    watching = [i for i, tape in enumerate(tapes) if tape.watches(xs)]
    return tapes[: watching[-1]] if watching else tapes


@custom_grad
def square(x, save):
    save([x])
    return x * x, lambda dy, saved: dy * saved[0] * sign(saved[0])  # |x| instead of 2x


x = Tensor([-3.0, 2.0])
assert np.array_equal(square(x).value, [9.0, 4.0])  # the value is that of f
assert np.array_equal(grad(square)(x).value, [3.0, 2.0])
assert np.array_equal(grad(grad(square))(x).value, [-1.0, 1.0])

# ## 8. Overrides: another rule for an op type, within a scope
#
# `call` has looked up the rule in `overrides` all along, so there is little left to do. Note
# *when* it looks: when the op is created. The record carries the rule from then on, and it does not
# matter where the walk happens. For the same reason the walk masks all overrides: the ops
# that a rule creates are no business of the scope that happens to be open at that moment.
#
# In regrad: `overrides.py`, which also refuses op types that do not exist, reports which
# source lines were hit, and warns if none was.


def gradient_override_map(rules):
    """Differentiate ops of the given types by the given rules; `{op type: rule}`."""
    return in_state(overrides={**STATE.get().overrides, **rules})


def straight_through(x):
    """The sign of x, with the gradient of the identity."""
    with gradient_override_map({"Sign": lambda dy: dy}):
        return sign(x)


x = Tensor([-3.0, 2.0])
assert np.array_equal(grad(sign)(x).value, [0.0, 0.0])
assert np.array_equal(grad(straight_through)(x).value, [1.0, 1.0])  # the scope is closed again

with gradient_override_map({"Cos": lambda dy: dy * 100}):
    assert np.allclose(grad(grad(sin))(x).value, -np.sin(x.value))  # the rule's cos: no hit
    assert np.allclose(grad(cos)(x).value, 100)  # ours: a hit

# ## 9. stop_gradient, and surrogates
#
# An op without a rule leaves no record, so its output is watched by nobody: a constant. From
# it follows a third way to choose a gradient. The value of the *surrogate* below is f(x), as
# the two g(x) cancel; its gradient is that of g, the only part that is not a constant.


@op("StopGradient")
def stop_gradient(xp, x: Tensor):
    return x


def surrogate(f, g):
    """The value of f with the gradient of g."""
    return lambda x: g(x) + stop_gradient(f(x) + g(x) * -1)


surrogate_sign = surrogate(sign, lambda x: x)
custom_sign = custom_grad(lambda x, save: (sign(x), lambda dy, saved: dy))
for f in straight_through, surrogate_sign, custom_sign:  # three ways to say the same
    assert np.array_equal(f(x).value, [-1.0, 1.0])
    assert np.array_equal(grad(f)(x).value, [1.0, 1.0])

# ## 10. Forward mode, by transposing
#
# `jvp` asks how `y` moves when `x` moves by `dx`: that is J dx, where J is the Jacobian. The
# walk computes something else: pull(dy) is J transposed, times dy. But this is linear in dy,
# so the gradient *by dy* of sum(pull(dy) * dx) is J dx. We need no second set of rules; we
# differentiate the walk. Where dy is does not matter for a linear function: zero will do.
#
# A rule of your own need not be linear in dy (it may clip it), and then this would be a wrong
# answer without a warning. regrad refuses in that case, and names the rule.


def jvp(f, x, dx):
    """The directional derivative of f at x along dx."""
    y, pull = vjp(f, x)
    return grad(lambda dy: pull(dy) * dx)(Tensor(np.zeros(y.shape)))


x, dx = Tensor([0.5, 2.0]), Tensor([1.0, -3.0])
assert np.allclose(jvp(lambda x: x * sin(x), x, dx).value, [0.9182162, -0.2311359])

# ## What regrad adds
#
# What you have read is the design, and the real code has the same parts under the same names. It
# is longer for five reasons:
#
# * **Checks.** A gradient of the wrong number, kind, shape or dtype, a name that an op does not
#   have, a rule in force that would be skipped: each is an error that says where and what to do.
# * **Breadth.** Hundreds of ops, dtypes and complex numbers, ops with several outputs, lists of
#   tensors, containers, Variables, TensorFlow's own form of a rule.
# * **Speed.** The names of a rule are resolved once and not at each call, the usual ops take a
#   short road, and a record that several tapes need is written once. `bench/` measures it.
# * **Modes.** Under `jit` and `vmap` the values inside Tensors are JAX tracers; in a deferred
#   graph they are symbols. Rules are made of ops, so none of them has to know.
# * **Memory.** The walk lets go of each record as it passes it, where no second walk will come.

if __name__ == "__main__":
    print("All assertions hold.")
