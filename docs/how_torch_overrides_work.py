"""# How an override reaches a PyTorch model.

This script rebuilds `regrad.torch.gradient_override_map` from nothing but PyTorch. Read it from top
to bottom, or run it (`python docs/how_torch_overrides_work.py`): each section uses what it has
built, and asserts that the answers are right.

The model is somebody else's, and nobody edits it. It may call `F.relu`, `torch.relu`, `x.relu()`,
`x.relu_()` or a module, in any order, and compute a ReLU where no Python function of that name is
called at all. A rule for the op type `"Relu"` must fire in each of these, or there must be an
error.
"""

import inspect
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# ## 1. Torch asks a mode before each of its functions (in regrad: `torch/modes.py`)
#
# While a `TorchFunctionMode` is entered, every public function and method of torch calls its
# `__torch_function__` instead of running. In there the mode is off, so what a function calls in
# its turn runs as it is: `F.relu` calls `torch.relu`, and the outer call is the one that counts.


class Listener(TorchFunctionMode):
    """Writes down what is called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(func)
        return func(*args, **kwargs or {})


with Listener() as listener:
    F.relu(torch.ones(2)).sum()
assert F.relu in listener.calls
assert torch.relu not in listener.calls

# ## 2. An op type is a set of callables (`torch/optypes.py`)
#
# Torch has several callables for one op, and some that work in place. All of them mean one op
# type; which they are is a table.

SPELLINGS = {
    "Relu": {F.relu, torch.relu, torch.Tensor.relu},
    "Sign": {torch.sign, torch.Tensor.sign},
}
IN_PLACE = {"Relu": {torch.relu_, torch.Tensor.relu_, F.relu_}, "Sign": {torch.Tensor.sign_}}
OUT_OF_PLACE = {"Relu": torch.relu, "Sign": torch.sign}

# ## 3. A call becomes a Function whose backward is the rule (`torch/calls.py`)
#
# The value is torch's own, computed by the very callable. The gradient is the rule's, which names
# what it needs: `dy` arrives, `x` is the input, `y` the output. The backward pass is made of torch
# functions, so with `create_graph=True` autograd differentiates it again. It runs masked: the
# functions that a rule calls are not the model's.

MASKED = ContextVar("masked", default=False)


class Overridden(torch.autograd.Function):
    """One call of an op under a rule."""

    @staticmethod
    def forward(ctx, x, func, rule):
        y = func(x)
        ctx.save_for_backward(x, y)
        ctx.rule = rule
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        known = {"dy": dy, "x": x, "y": y}
        wanted = [known[name] for name in inspect.signature(ctx.rule).parameters]
        token = MASKED.set(True)
        try:
            return ctx.rule(*wanted), None, None
        finally:
            MASKED.reset(token)


x = torch.tensor([-1.0, 2.0], requires_grad=True)
y = Overridden.apply(x, torch.relu, lambda dy, x: dy * x * x)
(dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
(ddx,) = torch.autograd.grad(dx.sum(), x)
assert y.tolist() == [0.0, 2.0]
assert dx.tolist() == [1.0, 4.0]
assert ddx.tolist() == [-2.0, 4.0]

# ## 4. The safety net: what autograd wrote down (`torch/nodes.py`)
#
# A table of callables is never complete. `torch.rnn_relu_cell` computes a ReLU in C++, and no mode
# is asked. But autograd writes a node for each op that it will differentiate, and numbers them. So
# after each call that no rule covers, the nodes that are new are compared with those that belong
# to the overridden op types. If one is among them, its own gradient would be used: that is an
# error.

NODES = {"Relu": "ReluBackward", "Sign": "SignBackward"}


class PassedOver(RuntimeError):
    """An overridden op was computed where no rule could reach it."""


def new_nodes(y, start):
    """Yield the nodes behind y that were made since a number was read."""
    queue, seen = [y.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is None or node in seen or node._sequence_nr() < start:
            continue
        seen.add(node)
        yield node
        queue += [before for before, _ in node.next_functions]


def check(func, y, start, rules):
    """Raise if a call made nodes of an overridden op type."""
    outputs = y if isinstance(y, tuple | list) else [y]
    for output in outputs:
        if isinstance(output, torch.Tensor):
            for node in new_nodes(output, start):
                for op_type in rules:
                    if node.name().startswith(NODES[op_type]):
                        raise PassedOver(f"{func.__name__} computes {op_type!r} inside")


# ## 5. The scope (`torch/overriding.py`)
#
# A call takes one of three ways. A callable of an overridden op type becomes a Function. One that
# works in place does, too: the Function gets a copy of the input, and its result is copied into
# the tensor, so that autograd's own record of the change leads through the rule. Everything else
# runs as it is, and is looked at afterwards.

sequence_nr = torch._C._autograd._get_sequence_nr


class Override(TorchFunctionMode):
    """`with Override({"Relu": rule}) as used: …`: a rule for each op of these types."""

    def __init__(self, rules):
        super().__init__()
        self.rules = rules
        self.hits = dict.fromkeys(rules, 0)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if MASKED.get():
            return func(*args, **kwargs)
        for op_type, rule in self.rules.items():
            in_place = func in IN_PLACE[op_type]
            if func in SPELLINGS[op_type] or in_place:
                self.hits[op_type] += 1
                return self.run(op_type, rule, args[0], in_place or kwargs.get("inplace"))
        start = sequence_nr()
        y = func(*args, **kwargs)
        check(func, y, start, self.rules)
        return y

    def run(self, op_type, rule, x, in_place):
        """Run an op of one input under its rule."""
        func = OUT_OF_PLACE[op_type]
        if in_place:
            return x.copy_(Overridden.apply(x.clone(), func, rule))
        return Overridden.apply(x, func, rule)

    def assert_fired(self):
        """Raise if a rule has matched nothing."""
        for op_type, count in self.hits.items():
            assert count, f"no op of type {op_type!r} ran in the scope"


class Model(torch.nn.Module):
    """Somebody else's."""

    def __init__(self):
        super().__init__()
        self.act = torch.nn.ReLU(inplace=True)

    def forward(self, x):
        return F.relu(self.act(2 * x) - 3) + torch.relu(-x)


def guided(dy, x):
    """ReLU's gradient, of positive gradients only."""
    return torch.relu(dy) * (x > 0)


model = Model()
x = torch.tensor([-1.0, 1.0, 2.0], requires_grad=True)
with Override({"Relu": guided}) as used:
    y = model(x)
    (dx,) = torch.autograd.grad(-y.sum(), x)
used.assert_fired()
assert used.hits == {"Relu": 3}
assert y.tolist() == model(x).tolist()  # the value is the model's
assert dx.tolist() == [0.0, 0.0, 0.0]  # no negative gradient passed
assert torch.autograd.grad(-model(x).sum(), x)[0].tolist() == [1.0, 0.0, -2.0]

cell = [torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1, requires_grad=True)]
try:
    with Override({"Relu": guided}):
        torch.rnn_relu_cell(*cell)
except PassedOver as error:
    assert str(error) == "rnn_relu_cell computes 'Relu' inside"

# ## 6. What the library adds
#
# * **Taken apart.** A function that computes an overridden op inside (`linear`, `layer_norm`, an
#   LSTM) is run as its parts, where there is a table of them, so that the rule fires there.
# * **Reach.** `torch.func`, `torch.compile`, checkpointing, autocast, subclasses of Tensor,
#   several scopes and several tasks, each with a way of its own to lose a rule in silence.
# * **One road.** A rule of regrad is written with regrad's names and ops; a rule for torch with
#   torch's. The report of hits, the errors and the order in which scopes count are the same.
