"""# How graphs work.

This script rebuilds TensorFlow 1's graph mode, as `regrad.v1` has it, from nothing but NumPy and
the standard library. Read it from top to bottom, or run it (`python docs/how_graphs_work.py`): each
section uses what it has built, and asserts that the answers are right.

A **node** is an op that is to run later. Its **rule** is chosen when it is created, by the
overrides in force then. `gradients` adds nodes, by the same rules. A **plan** is the list of nodes
that one choice of fetches and feeds needs. A size that is known only in the run is computed in the
run.
"""

from contextlib import contextmanager

import numpy as np

# ## 1. A node is an op that has not run (in regrad: `graph/graph.py`, `v1/graph/tensors.py`)
#
# A Tensor of a graph has no value. It knows its node, and the node knows its op type, its inputs
# and its name. Names are unique, and begin with the scopes that are open.

OPS = {}  # op type -> (kernel, rule)
RULES = {}  # name -> rule, by `register_gradient`


class Node:
    """An op of a graph, and the one tensor that it makes."""

    def __init__(self, graph, type, inputs, name, rule, attrs):
        self.graph, self.type, self.inputs, self.rule = graph, type, inputs, rule
        self.attrs, self.name = attrs, graph.unique(name or type)
        self.waits_for = tuple(graph.waiting)  # see section 6
        graph.nodes.append(self)

    def __add__(self, other):
        return build("Add", self, other)

    def __mul__(self, other):
        return build("Mul", self, other)

    def __neg__(self):
        return build("Mul", self, -1.0)


class Graph:
    """Nodes in the order in which they were made: inputs come before what reads them."""

    def __init__(self):
        self.nodes, self.scopes, self.names, self.waiting = [], [], {}, []
        self.overrides = {}

    def unique(self, name):
        full = "/".join([*self.scopes, name])
        count = self.names[full] = self.names.get(full, -1) + 1
        return f"{full}_{count}" if count else full

    @contextmanager
    def scope(self, name):
        """Put a name before those of the nodes that are made in the block."""
        self.scopes.append(name)
        try:
            yield
        finally:
            self.scopes.pop()

    @contextmanager
    def gradient_override_map(self, names):
        """Bind the nodes of these types that are made in the block to registered rules."""
        before = self.overrides
        self.overrides = {**before, **{type: RULES[name] for type, name in names.items()}}
        try:
            yield
        finally:
            self.overrides = before


GRAPH = Graph()  # the default graph


def op(type, kernel):
    """Enter an op type: its kernel, and the rule that is decorated."""

    def enter(rule):
        OPS[type] = kernel, rule

    return enter


def build(type, *inputs, name=None, **attrs):
    """Make a node. Its rule is bound now: an override that ends later still counts for it."""
    nodes = [x if isinstance(x, Node) else constant(x) for x in inputs]
    rule = GRAPH.overrides.get(type, OPS[type][1])
    return Node(GRAPH, type, nodes, name, rule, attrs)


def constant(value, name=None):
    """Make a node of a known value."""
    return build("Const", value=np.asarray(value, float), name=name)


def placeholder(name=None):
    """Make a node whose value each run is told."""
    return build("Placeholder", name=name)


op("Const", lambda value: value)(None)
op("Placeholder", None)(None)  # (its value is fed)

x = placeholder(name="x")
with GRAPH.scope("layer"):
    a, b = constant(2.0), constant(3.0)
assert [x.name, a.name, b.name] == ["x", "layer/Const", "layer/Const_1"]

# ## 2. A rule takes the node, and makes nodes (`core/rule.py`, `v1/graph/gradients.py`)
#
# TensorFlow's form of a rule is `rule(op, grad)`: it reads `op.inputs` and `op.outputs`, and what
# it returns are tensors of the graph, one for each input. So a gradient can be differentiated
# again, compiled, drawn and overridden as any other part of the graph.


def sin(x, name=None):
    """The sine, element by element."""
    return build("Sin", x, name=name)


def sign(x, name=None):
    """-1, 0 or 1, element by element."""
    return build("Sign", x, name=name)


@op("Sin", np.sin)
def _(op, grad):
    return [grad * build("Cos", op.inputs[0])]


@op("Cos", np.cos)
def _(op, grad):
    return [-(grad * sin(op.inputs[0]))]


@op("Sign", np.sign)
def _(op, grad):
    return [grad * 0.0]


# ## 3. `gradients` walks the nodes backward (`v1/graph/gradients.py`, `core/walk.py`)
#
# The walk is that of a tape. A graph is a tape that was never closed: its nodes are the records.
# Rules make their nodes with overrides masked, since they are not the user's ops.


def gradients(y, xs):
    """Add nodes for the gradients of the sum of y by each of xs; None where no path leads."""
    grads = {y: build("OnesLike", y)}
    overrides, GRAPH.overrides = GRAPH.overrides, {}
    try:
        with GRAPH.scope("gradients"):
            for node in reversed(GRAPH.nodes[: GRAPH.nodes.index(y) + 1]):
                if node in grads and node.inputs:
                    back = node.rule(node, grads[node])
                    for x, dx in zip(node.inputs, back, strict=True):
                        if dx is not None:
                            grads[x] = grads[x] + dx if x in grads else dx
    finally:
        GRAPH.overrides = overrides
    return [grads.get(x) for x in xs]


# ## 4. Shapes that only the run can tell (`core/dims.py`, `graph/size_ops.py`)
#
# A placeholder may have any shape. So the rule of an op that broadcasts cannot decide, when it
# is called, over which axes to sum. It makes a node that decides in the run: `SumLike` sums a
# gradient down to the shape that its second input turns out to have.


def sum_like(dy, x):
    """Sum dy over the axes along which x was broadcast."""
    extra = dy.ndim - x.ndim
    axes = [i + extra for i, n in enumerate(x.shape) if n == 1 != dy.shape[i + extra]]
    return dy.sum(axis=(*range(extra), *axes)).reshape(x.shape)


@op("SumLike", sum_like)
def _(op, grad):
    return [build("SpreadLike", grad, op.inputs[0]), None]


@op("SpreadLike", lambda dy, x: np.broadcast_to(dy, x.shape))
def _(op, grad):
    return [build("SumLike", grad, op.inputs[0]), None]


op("OnesLike", np.ones_like)(lambda op, grad: [None])


@op("Add", np.add)
def _(op, grad):
    return [build("SumLike", grad, x) for x in op.inputs]


@op("Mul", np.multiply)
def _(op, grad):
    a, b = op.inputs
    return [build("SumLike", grad * b, a), build("SumLike", grad * a, b)]


# ## 5. A plan is what a choice of fetches needs (`graph/plan.py`, `v1/run/session.py`)
#
# `run` marks the nodes that the fetches depend on, stopping at what is fed, and keeps them in
# the order in which they were made. Each value is let go after its last reader. The plan is kept,
# by fetches and feeds. regrad writes it out as a Python function, or compiles it by XLA.


class Session:
    """Runs parts of the graph."""

    def __init__(self):
        self.plans = {}

    def run(self, fetches, feed_dict=None):
        feeds = dict(feed_dict or {})
        key = tuple(fetches), tuple(feeds)
        if key not in self.plans:
            self.plans[key] = plan(*key)
        values = {node: np.asarray(value, float) for node, value in feeds.items()}
        changes = {}  # Variables change together, at the end of a run that has not failed
        for node, last_read in self.plans[key]:
            values[node] = execute(node, [values[x] for x in node.inputs], changes)
            for x in last_read:
                del values[x]
        for variable, value in changes.items():
            variable.value = value
        return [values[node] for node in fetches]


def plan(fetches, feeds):
    """Return the nodes that are needed, each with the inputs that nobody reads after it."""
    needed, queue = set(), list(fetches)
    while queue:
        node = queue.pop()
        if node not in needed and node not in feeds:
            needed.add(node)
            queue += [*node.inputs, *node.waits_for]
    steps, seen = [], set(fetches)
    for node in reversed([n for n in GRAPH.nodes if n in needed]):
        steps.append((node, {x for x in node.inputs if x not in seen}))
        seen.update(node.inputs)
    return steps[::-1]


def execute(node, inputs, changes):
    """Run one node."""
    kernel, _ = OPS[node.type]
    if kernel is None:
        raise ValueError(f"{node.name} has no value: feed it")
    if "variable" in node.attrs:
        return kernel(node, changes, *inputs)
    return kernel(*inputs, **node.attrs)


y = sin(x * x)
(dx,) = gradients(y, [x])
(ddx,) = gradients(dx, [x])
session = Session()
for value in (0.5, [0.1, 0.2, 0.3]):  # of any shape
    at = np.asarray(value)
    found = session.run([dx, ddx], {x: at})
    expected = [2 * at * np.cos(at**2), 2 * np.cos(at**2) - 4 * at**2 * np.sin(at**2)]
    np.testing.assert_allclose(found, expected)
assert len(session.plans) == 1


def register_gradient(name):
    """Register a rule under a name."""

    def enter(rule):
        RULES[name] = rule
        return rule

    return enter


@register_gradient("Straight")
def _(op, grad):
    return [grad]


with GRAPH.gradient_override_map({"Sign": "Straight"}):
    bound = sign(x)
free = sign(x)
both = [gradients(node * 3.0, [x])[0] for node in (bound, free)]  # asked for outside of the scope
assert [float(v) for v in session.run(both, {x: 0.5})] == [3.0, 0.0]

# ## 6. Variables, and what must run first (`v1/graph/variables.py`, `graph/variable_ops.py`)
#
# A read is a node, and so is an assignment. One run is a snapshot: all reads see the values at
# its beginning, unless they are made under `control_dependencies` of an assignment. Then the plan
# has the assignment before the read, and the read sees it.


class Variable:
    """A value that outlives a run."""

    def __init__(self, value):
        self.value = np.asarray(value, float)

    def read(self):
        return build("Read", variable=self)

    def assign(self, value):
        return build("Assign", value, variable=self)


@contextmanager
def control_dependencies(nodes):
    """Let the nodes that are made in the block wait for these."""
    before = GRAPH.waiting
    GRAPH.waiting = [*before, *nodes]
    try:
        yield
    finally:
        GRAPH.waiting = before


def read(node, changes):
    """Return a Variable's value: that of the snapshot, or, after an assignment, the new one."""
    variable = node.attrs["variable"]
    return changes.get(variable, variable.value) if node.waits_for else variable.value


def assign(node, changes, value):
    """Note the new value of a Variable, for the end of the run."""
    changes[node.attrs["variable"]] = value
    return value


op("Read", read)(lambda op, grad: [])
op("Assign", assign)(None)

w = Variable(3.0)
before = w.read()
(dw,) = gradients(before * before, [before])
step = w.assign(before + dw * -0.1)
with control_dependencies([step]):
    after = w.read()
assert [float(v) for v in session.run([before, after])] == [3.0, 2.4]
assert float(session.run([w.read()])[0]) == 2.4

# ## 7. What the library adds
#
# * **The same ops.** A node of `regrad.v1` has the op, the rule and the record of eager mode. While
#   a graph is built, Tensors hold symbols in the place of arrays, and the ops note nodes.
# * **Static shapes.** They are inferred when a node is made, as far as they are known; sizes that
#   are not known are objects that can be computed with, and become nodes where a rule asks.
# * **Deferral.** A function that must know a size (`@deferrable`) becomes one node, which calls it
#   in the run, under the overrides that were in force when it was made.
# * **Loops and branches** are graphs inside of one node, and their gradients as well.
