"""# How an override reaches a PyTorch model.

This script rebuilds `regrad.torch.gradient_override_map` with PyTorch alone. Read it from top to
bottom, or run it (`python docs/how_torch_overrides_work.py`). Each section runs the code that it
defines, and asserts that the results are right.

The model is third-party code that you do not edit. It may call `F.relu`, `torch.relu`, `x.relu()`,
`x.relu_()` or a module, in any order. It may also compute a ReLU without a call of a Python
function of that name. A rule for the op type `"Relu"` must fire in each case, or raise an error.
"""

import inspect
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# ## 1. Torch calls a mode before each of its functions (in regrad: `torch/modes.py`)
#
# While a `TorchFunctionMode` is active, every public function and method of torch calls the mode's
# `__torch_function__` instead of running. The mode is off inside `__torch_function__`, so inner
# calls do not reach the mode. `F.relu` calls `torch.relu`, and the mode receives only the outer
# call.


class Listener(TorchFunctionMode):
    """Record the functions that are called."""

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
# Torch has several callables for one op, including in-place variants. All of them mean one op type.
# A table lists the callables of each op type.

SPELLINGS = {
    "Relu": {F.relu, torch.relu, torch.Tensor.relu},
    "Sign": {torch.sign, torch.Tensor.sign},
}
IN_PLACE = {"Relu": {torch.relu_, torch.Tensor.relu_, F.relu_}, "Sign": {torch.Tensor.sign_}}
OUT_OF_PLACE = {"Relu": torch.relu, "Sign": torch.sign}

# ## 3. A call becomes a Function whose backward is the rule (`torch/calls.py`)
#
# The value is torch's own: the Function calls the original callable. The gradient comes from the
# rule. The rule names the values that it needs: `dy` is the incoming gradient, `x` the input, `y`
# the output. The backward pass consists of torch functions, so with `create_graph=True` autograd
# differentiates it again. The rule runs masked, because the functions that it calls do not belong
# to the model.

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

# ## 4. The safety net: the nodes that autograd records (`torch/nodes.py`)
#
# A table of callables is never complete. `torch.rnn_relu_cell` computes a ReLU in C++, without a
# call of a mode. But autograd records a numbered node for each op that it will differentiate. So
# after each call without a rule, the scope compares the new nodes with the nodes of the overridden
# op types. If such a node is new, autograd would use its own gradient, and the scope raises an
# error.

NODES = {"Relu": "ReluBackward", "Sign": "SignBackward"}


class PassedOver(RuntimeError):
    """An overridden op was computed where no rule could reach it."""


def new_nodes(y, start):
    """Yield the nodes behind y whose sequence number is at least `start`."""
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
# The scope handles a call in one of three ways. A callable of an overridden op type becomes a
# Function. An in-place callable becomes a Function too: the Function receives a copy of the input,
# and the scope copies the result into the tensor, so autograd's record of the change leads through
# the rule. Every other callable runs unchanged, and the scope checks its nodes afterwards.

sequence_nr = torch._C._autograd._get_sequence_nr


class Override(TorchFunctionMode):
    """Apply a rule to each op of these types: `with Override({"Relu": rule}) as used: …`."""

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
        """Raise if a rule matched no op."""
        for op_type, count in self.hits.items():
            assert count, f"no op of type {op_type!r} ran in the scope"


class Model(torch.nn.Module):
    """A third-party model."""

    def __init__(self):
        super().__init__()
        self.act = torch.nn.ReLU(inplace=True)

    def forward(self, x):
        return F.relu(self.act(2 * x) - 3) + torch.relu(-x)


def guided(dy, x):
    """Return the gradient of ReLU for the positive part of dy."""
    return torch.relu(dy) * (x > 0)


model = Model()
x = torch.tensor([-1.0, 1.0, 2.0], requires_grad=True)
with Override({"Relu": guided}) as used:
    y = model(x)
    (dx,) = torch.autograd.grad(-y.sum(), x)
used.assert_fired()
assert used.hits == {"Relu": 3}
assert y.tolist() == model(x).tolist()  # the value is unchanged
assert dx.tolist() == [0.0, 0.0, 0.0]  # no negative gradient passes
assert torch.autograd.grad(-model(x).sum(), x)[0].tolist() == [1.0, 0.0, -2.0]

cell = [torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1, requires_grad=True)]
try:
    with Override({"Relu": guided}):
        torch.rnn_relu_cell(*cell)
except PassedOver as error:
    assert str(error) == "rnn_relu_cell computes 'Relu' inside"

# ## 6. Additions in the library
#
# * **Decomposition.** A function may compute an overridden op inside (`linear`, `layer_norm`, an
#   LSTM). If the library has a table of its steps, it runs the steps, so that the rule fires there.
# * **Reach.** `torch.func`, `torch.compile`, checkpointing, autocast, subclasses of Tensor, several
#   scopes and several tasks. Each of them could silently lose a rule in a different way.
# * **One implementation.** A rule in regrad uses regrad's names and ops, and a rule for torch uses
#   torch's. Both share the report of hits, the errors and the order of scopes.
