"""# How compiled functions work.

This script rebuilds `regrad.jit` with NumPy and the standard library alone. Read it from top to
bottom, or run it (`python docs/how_jit_works.py`). Each section runs the code that it defines, and
asserts that the results are right. `how_it_works.py` explains ops, rules, records, tapes and the
walk; here they are as short as possible.

regrad compiles with XLA, through JAX. Here the compiler writes Python source, with the same ideas.
**Capturing** a function runs it once without values. A call of a program is one **record** on the
open tapes. The forward program passes **residuals** to the backward program. The cache **key** of
a program holds every decision that was made during the capture.
"""

from collections import namedtuple
from contextlib import contextmanager

import numpy as np

# ## 1. An op is a line of source and a rule (in regrad: `ops/`, `core/dispatch.py`)
#
# A Tensor's value is an array or, during a capture, the *name* of a future value of the program.
# Every op goes through `call`: it computes the value or appends an equation, and then records the
# op on the tapes. `call` binds the rule when it creates the op.

Record = namedtuple("Record", "pull xs y")  # pull(dy) returns the gradients by xs
Equation = namedtuple("Equation", "type rule inputs output")
OPS, OVERRIDES, TAPES, TRACES = {}, {}, [], []


class Tensor:
    """An array, or the name of a value in a program."""

    def __init__(self, value):
        self.value = value if isinstance(value, str) else np.asarray(value, float)

    def __add__(self, other):
        return call("Add", self, other)

    def __mul__(self, other):
        return call("Mul", self, other)

    def __float__(self):
        if isinstance(self.value, str):
            raise TypeError(f"{self.value} has no value yet: the function is being captured")
        return float(self.value)


def op(type, source):
    """Register an op: its source, with a slot for each input, and the decorated rule."""

    def enter(rule):
        OPS[type] = source, rule

    return enter


@op("Add", "{} + {}")
def _(dy, a, b):
    return [dy, dy]


@op("Mul", "{} * {}")
def _(dy, a, b):
    return [dy * b, dy * a]


@op("Sin", "np.sin({})")
def _(dy, x):
    return [dy * call("Cos", x)]


@op("Cos", "np.cos({})")
def _(dy, x):
    return [dy * sin(x) * -1.0]


def sin(x):
    """Return the sine of x. (Functions for the other ops are omitted for brevity.)"""
    return call("Sin", x)


def call(type, *xs, rule=None):
    """Compute an op or append its equation; record it with the active rule."""
    xs = [x if isinstance(x, Tensor) else Tensor(x) for x in xs]
    source, own = OPS[type]
    rule = rule or OVERRIDES.get(type, own)
    if TRACES:
        y = TRACES[-1].write(type, rule, xs)
    else:
        scope = {f"x{i}": x.value for i, x in enumerate(xs)}
        y = Tensor(eval(source.format(*scope), {"np": np, **scope}))
    record(lambda dy: rule(dy, *xs), xs, y)
    return y


def record(pull, xs, y):
    """Add a record to every open tape."""
    for tape in TAPES:
        tape.append(Record(pull, xs, y))


@contextmanager
def pushed(stack, item):
    """Run a block with one more item on a stack."""
    stack.append(item)
    try:
        yield item
    finally:
        stack.pop()


def walk(tape, y, dy):
    """Pass the gradient from y back through the records; return gradients by `id`."""
    grads = {id(y): dy}
    for each in reversed(tape):
        if id(each.y) in grads:
            for x, dx in zip(each.xs, each.pull(grads[id(each.y)]), strict=True):
                grads[id(x)] = grads[id(x)] + dx if id(x) in grads else dx
    return grads


def grad(f):
    """Return the function that computes the gradient of `f(x)` by x."""

    def g(x):
        x = call("Add", x, 0.0)  # a Tensor that only this call uses
        with pushed(TAPES, []) as tape:
            y = f(x)
        return walk(tape, y, Tensor(1.0))[id(x)]

    return g


assert np.isclose(float(grad(lambda x: sin(x) * x)(0.5)), np.cos(0.5) * 0.5 + np.sin(0.5))

# ## 2. A function is captured by running it (`transforms/traces.py`, `transforms/region.py`)
#
# During a trace the Tensors have names. The function's Python code runs once, including loops and
# branches, and leaves a list of equations. Reading the value of a named Tensor is an error, because
# a program cannot depend on the result of one call.


class Trace:
    """The equations of a function that is being captured."""

    def __init__(self, equations=()):
        self.equations, self.constants, self.count = list(equations), {}, 0
        self.reads, self.values = {}, {}  # for Variables, see section 7

    def name(self):
        self.count += 1
        return f"v{self.count}"

    def write(self, type, rule, xs):
        y = Tensor(self.name())
        self.equations.append(Equation(type, rule, [self.named(x) for x in xs], y.value))
        return y

    def named(self, x):
        if not isinstance(x.value, str):  # a constant, since Tensors do not change
            self.constants[name := self.name()] = x.value
            return name
        return x.value


def capture(f, n):
    """Return the program of a function of n Tensors."""
    with pushed(TRACES, Trace()) as trace:
        xs = [Tensor(trace.name()) for _ in range(n)]
        y = trace.named(f(*xs))
    return Program(trace, [x.value for x in xs], [y])


try:
    capture(lambda x: x if float(x) > 0 else x * 2.0, 1)
except TypeError as error:
    assert "being captured" in str(error)

# ## 3. A program is source, compiled once (`transforms/program.py`)
#
# A Program keeps its equations next to the compiled function. With them it can run again *as ops*,
# under the same rules, inside another trace or under a tape. The Python code does not run again.


class Program:
    """A captured function: compiled, and able to run again op by op."""

    def __init__(self, trace, inputs, outputs):
        self.trace, self.inputs, self.outputs, self.derived = trace, inputs, outputs, None
        lines = [f"    {e.output} = {OPS[e.type][0].format(*e.inputs)}" for e in trace.equations]
        head = f"def program({', '.join(inputs)}):"
        self.source = "\n".join([head, *lines, f"    return [{', '.join(outputs)}]"])
        scope = {"np": np, **trace.constants}
        exec(self.source, scope)
        self.compiled = scope["program"]

    def replay(self, *xs):
        """Run the equations as ops, and return the first output."""
        values = {name: Tensor(value) for name, value in self.trace.constants.items()}
        values.update(zip(self.inputs, xs, strict=True))
        for e in self.trace.equations:
            values[e.output] = call(e.type, *[values[name] for name in e.inputs], rule=e.rule)
        return values[self.outputs[0]]

    def run(self, *xs):
        return [Tensor(y) for y in self.compiled(*[x.value for x in xs])]

    def __call__(self, *xs):
        if TRACES:
            return self.replay(*xs)  # inlined into the outer program
        return differentiable(self, xs) if TAPES else self.run(*xs)[0]


program = capture(lambda x, w: sin(x * w) + x, 2)
assert program.source.splitlines()[1:] == [
    "    v3 = v1 * v2", "    v4 = np.sin(v3)", "    v5 = v4 + v1", "    return [v5]",
]  # fmt: skip
assert np.isclose(float(program(Tensor(2.0), Tensor(3.0))), np.sin(6.0) + 2)

# ## 4. One record outside, and the residuals (`Variant._linearized`, `transforms/bodies.py`)
#
# Under a tape a call of a program is *one* record. One capture produces the forward and the
# backward program: the equations up to y are the forward program, and the equations of the walk
# after it are the backward program. Residuals are the values that the forward equations produce and
# the backward equations read. They are additional outputs of the forward program and inputs of the
# backward program. No other value is kept.


def derive(program):
    """Return the forward program, with residuals, and the backward program."""
    with pushed(TRACES, Trace()) as trace, pushed(TAPES, []) as tape:
        xs = [Tensor(trace.name()) for _ in program.inputs]
        y = program.replay(*xs)
        cut, dy = len(trace.equations), Tensor(trace.name())
        grads = walk(list(tape), y, dy)
        dxs = [trace.named(grads.get(id(x), Tensor(0.0))) for x in xs]
    before, after = Trace(trace.equations[:cut]), Trace(trace.equations[cut:])
    before.constants = after.constants = trace.constants
    inputs = [x.value for x in xs]
    made = [*inputs, *[e.output for e in before.equations]]
    read = {*dxs, *[name for e in after.equations for name in e.inputs]}
    residuals = [name for name in made if name in read]
    forward = Program(before, inputs, [y.value, *residuals])
    return forward, Program(after, [*residuals, dy.value], dxs)


forward, backward = derive(program)
assert forward.outputs == ["v5", "v1", "v2", "v3"]  # y, and x, w, x * w; not sin(x * w)

# ## 5. Any order (`transforms/forward.py`, `Program._derivative`)
#
# A tape of a higher order also watches the walk. It contains the inputs of the program, but not the
# residuals. So if a tape or a trace is open during the walk, the pull runs the equations again as
# ops. (regrad compiles a program of the inputs for this case as well.)


def differentiable(program, xs):
    """Call a program under a tape: one record, whose pull is the backward program."""
    program.derived = program.derived or without_tapes(derive, program)
    forward, backward = program.derived
    y, *residuals = forward.run(*xs)

    def pull(dy):
        if not (TAPES or TRACES):
            return backward.run(*residuals, dy)
        inner = [call("Add", x, 0.0) for x in xs]  # one per argument, in case x is passed twice
        with pushed(TAPES, []) as tape:
            again = program.replay(*inner)
        grads = walk(tape, again, dy)
        return [grads.get(id(x), Tensor(0.0)) for x in inner]

    record(pull, list(xs), y)
    return y


def without_tapes(f, *args):
    """Call f with all tapes closed, since its ops are not the user's."""
    tapes, TAPES[:] = TAPES[:], []
    try:
        return f(*args)
    finally:
        TAPES[:] = tapes


def loss(x):
    """Call a program with x as both arguments."""
    return program(x, x)


assert np.isclose(float(grad(loss)(0.5)), np.cos(0.25) * 1.0 + 1)
assert np.isclose(float(grad(grad(loss))(0.5)), 2 * np.cos(0.25) - np.sin(0.25))

# ## 6. The key (`transforms/jit.py`, `transforms/closures.py`)
#
# A program is valid for a call if every decision of the trace still holds. The **active overrides**
# belong to these decisions, because the equations bind the rules. With the overrides in the key, a
# program never runs in a scope with other rules. So an active rule fires here as it does in eager
# mode. The key also contains the values of the closure, and shapes.


def jit(f):
    """Compile a function of one Tensor."""
    programs = {}

    def compiled(x):
        x = x if isinstance(x, Tensor) else Tensor(x)
        cells = [exactly(cell.cell_contents) for cell in f.__closure__ or ()]
        key = np.shape(x.value), *OVERRIDES.items(), *cells
        if key not in programs:
            programs[key] = without_tapes(capture, f, 1)
        return programs[key](x)

    compiled.programs = programs
    return compiled


def exactly(value):
    """Return a closure value as part of a key: numbers by value, other objects by identity."""
    return (type(value), value) if isinstance(value, int | float) else id(value)


@contextmanager
def override(type, rule):
    """Activate a rule for the ops of a type that the block creates."""
    before = dict(OVERRIDES)
    OVERRIDES[type] = rule
    try:
        yield
    finally:
        OVERRIDES.clear()
        OVERRIDES.update(before)


def scaled(by):
    """Return a compiled function and a setter for a value in its closure."""

    def f(x):
        return sin(x) * by

    def change(value):
        nonlocal by
        by = value

    return jit(f), change


f, change = scaled(3.0)
assert np.isclose(float(grad(f)(0.5)), 3 * np.cos(0.5))
with override("Sin", lambda dy, x: [dy * 10.0]):
    assert float(grad(f)(0.5)) == 30.0  # compiles a second program
change(5.0)
assert np.isclose(float(f(0.5)), 5 * np.sin(0.5))  # and a third one
assert len(f.programs) == 3

# ## 7. Variables: values that a program overwrites (`Region.read`, `Region.assign`, `Program.find`)
#
# A Variable changes, so its value must not become a constant. Reading a Variable in a trace makes
# it an input of the program, and assigning to it makes an output. The caller reads the Variable
# before the call and assigns after the call. So the program itself has no side effects, and XLA may
# reuse the old memory for the new value.


class Variable:
    """A name for a Tensor that changes."""

    def __init__(self, value):
        self.tensor = Tensor(value)

    def read(self):
        if not TRACES:
            return self.tensor
        trace = TRACES[-1]
        if self not in trace.values:
            trace.reads[self] = trace.values[self] = Tensor(trace.name())
        return trace.values[self]

    def assign(self, tensor):
        if TRACES:
            self.read()
            TRACES[-1].values[self] = tensor
        else:
            self.tensor = tensor


def compile_step(f):
    """Compile a function of one Tensor that reads and assigns Variables."""
    with pushed(TRACES, Trace()) as trace:
        x = Tensor(trace.name())
        y = f(x)
    variables = list(trace.reads)
    inputs = [x.value, *[trace.reads[v].value for v in variables]]
    outputs = [trace.named(t) for t in (y, *[trace.values[v] for v in variables])]
    program = Program(trace, inputs, outputs)

    def step(x):
        y, *values = program.run(Tensor(x), *[v.tensor for v in variables])
        for v, value in zip(variables, values, strict=True):
            v.assign(value)
        return y

    return step


def train(x):
    """Take a gradient step on `sin(w * x)` by w. Gradients consist of ops, so they compile too."""
    dw = grad(lambda w: sin(w * x))(w.read())
    w.assign(w.read() + dw * -0.1)
    return sin(w.read() * x)


w = Variable(0.3)
expected = [float(train(Tensor(2.0))) for _ in range(3)]
w = Variable(0.3)
step = compile_step(train)
assert np.allclose([float(step(2.0)) for _ in range(3)], expected)
