"""# How graphs work.

This script rebuilds TensorFlow 1's graph mode, as in `regrad.v1`, with NumPy and the standard
library alone. Read it from top to bottom, or run it (`python docs/how_graphs_work.py`). Each
section runs the code that it defines, and asserts that the results are right.

A **node** is an op that runs later. Creating a node binds its **rule**, which depends on the active
overrides. `gradients` adds nodes, with the same rules. A **plan** is the list of nodes for one
choice of fetches and feeds. A run computes the sizes that are unknown when the graph is built.
"""

from contextlib import contextmanager

import numpy as np

# ## 1. A node is an op that has not run (in regrad: `graph/graph.py`, `v1/graph/tensors.py`)
#
# A Tensor of a graph has no value. It refers to its node, which has the op type, the inputs and the
# name. Names are unique, and begin with the names of the open scopes.

OPS = {}  # op type -> (kernel, rule)
RULES = {}  # name -> rule, by `register_gradient`


class Node:
    """An op of a graph, and its one output tensor."""

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
    """Nodes in the order of their creation: inputs come before the nodes that read them."""

    def __init__(self):
        self.nodes, self.scopes, self.names, self.waiting = [], [], {}, []
        self.overrides = {}

    def unique(self, name):
        full = "/".join([*self.scopes, name])
        count = self.names[full] = self.names.get(full, -1) + 1
        return f"{full}_{count}" if count else full

    @contextmanager
    def scope(self, name):
        """Add a prefix to the names of the nodes that the block creates."""
        self.scopes.append(name)
        try:
            yield
        finally:
            self.scopes.pop()

    @contextmanager
    def gradient_override_map(self, names):
        """Bind registered rules to the nodes of these types that the block creates."""
        before = self.overrides
        self.overrides = {**before, **{type: RULES[name] for type, name in names.items()}}
        try:
            yield
        finally:
            self.overrides = before


GRAPH = Graph()  # the default graph


def op(type, kernel):
    """Register an op type: its kernel, and the decorated rule."""

    def enter(rule):
        OPS[type] = kernel, rule

    return enter


def build(type, *inputs, name=None, **attrs):
    """Create a node and bind its rule now. The rule stays after the override ends."""
    nodes = [x if isinstance(x, Node) else constant(x) for x in inputs]
    rule = GRAPH.overrides.get(type, OPS[type][1])
    return Node(GRAPH, type, nodes, name, rule, attrs)


def constant(value, name=None):
    """Create a node with a constant value."""
    return build("Const", value=np.asarray(value, float), name=name)


def placeholder(name=None):
    """Create a node whose value each run must feed."""
    return build("Placeholder", name=name)


op("Const", lambda value: value)(None)
op("Placeholder", None)(None)  # (each run feeds its value)

x = placeholder(name="x")
with GRAPH.scope("layer"):
    a, b = constant(2.0), constant(3.0)
assert [x.name, a.name, b.name] == ["x", "layer/Const", "layer/Const_1"]

# ## 2. A rule takes the node, and creates nodes (`core/rule.py`, `v1/graph/gradients.py`)
#
# TensorFlow's form of a rule is `rule(op, grad)`. The rule reads `op.inputs` and `op.outputs`, and
# returns tensors of the graph, one for each input. So you can differentiate, compile, draw and
# override a gradient like any other part of the graph.


def sin(x, name=None):
    """Return the elementwise sine."""
    return build("Sin", x, name=name)


def sign(x, name=None):
    """Return the elementwise sign: -1, 0 or 1."""
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
# The walk works as on a tape. A graph is a tape that was never closed, and its nodes are the
# records. Rules create their nodes with overrides masked, because these nodes are not the user's
# ops.


def gradients(y, xs):
    """Add nodes for the gradients of the sum of y by each of xs; None without a path."""
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


# ## 4. Shapes that are unknown before the run (`core/dims.py`, `graph/size_ops.py`)
#
# A placeholder may have any shape. So the rule of an op that broadcasts cannot choose the axes of
# the sum when it is called. It creates a node that chooses them in the run: `SumLike` sums a
# gradient down to the shape of its second input in that run.


def sum_like(dy, x):
    """Sum dy over the axes along which x is broadcast."""
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


# ## 5. A plan lists the nodes for a choice of fetches (`graph/plan.py`, `v1/run/session.py`)
#
# `run` marks the nodes on which the fetches depend, stops at the feeds, and keeps the nodes in the
# order of their creation. It frees each value after its last reader, and caches the plan by fetches
# and feeds. regrad writes a plan as a Python function, or compiles it with XLA.


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
        changes = {}  # Variables change together, at the end of a successful run
        for node, last_read in self.plans[key]:
            values[node] = execute(node, [values[x] for x in node.inputs], changes)
            for x in last_read:
                del values[x]
        for variable, value in changes.items():
            variable.value = value
        return [values[node] for node in fetches]


def plan(fetches, feeds):
    """Return the needed nodes, each with the inputs that no later node reads."""
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
for value in (0.5, [0.1, 0.2, 0.3]):  # any shape works
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
both = [gradients(node * 3.0, [x])[0] for node in (bound, free)]  # computed outside the scope
assert [float(v) for v in session.run(both, {x: 0.5})] == [3.0, 0.0]

# ## 6. Variables and control dependencies (`v1/graph/variables.py`, `graph/variable_ops.py`)
#
# A read is a node, and an assignment is a node. One run is a snapshot: all reads return the values
# from the beginning of the run. The exception is a read created under `control_dependencies` of an
# assignment. The plan runs the assignment before this read, which returns the new value.


class Variable:
    """A value that persists between runs."""

    def __init__(self, value):
        self.value = np.asarray(value, float)

    def read(self):
        return build("Read", variable=self)

    def assign(self, value):
        return build("Assign", value, variable=self)


@contextmanager
def control_dependencies(nodes):
    """Make the nodes that the block creates wait for these nodes."""
    before = GRAPH.waiting
    GRAPH.waiting = [*before, *nodes]
    try:
        yield
    finally:
        GRAPH.waiting = before


def read(node, changes):
    """Return a Variable's value: from the snapshot or, after an assignment, the new value."""
    variable = node.attrs["variable"]
    return changes.get(variable, variable.value) if node.waits_for else variable.value


def assign(node, changes, value):
    """Store the new value of a Variable until the end of the run."""
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

# ## 7. Additions in the library
#
# * **The same ops.** A node of `regrad.v1` has the op, the rule and the record of eager mode. While
#   a graph is built, Tensors hold symbols instead of arrays, and ops append nodes.
# * **Static shapes.** regrad infers known sizes when it creates a node. An unknown size is an
#   object that supports arithmetic, and becomes a node if a rule uses it.
# * **Deferral.** A function that must read a size (`@deferrable`) becomes one node. The node calls
#   the function in the run, under the overrides that were active when the node was created.
# * **Loops and branches** are graphs inside one node, and so are their gradients.
