"""The notes on an op: what it is called, whose rule it has, and where it ran."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.overrides
from torch.autograd.function import BackwardCFunction

from regrad.core.rule import place
from regrad.inspection.recorder import RuleKind, SeenOp
from regrad.torch.bridge import Bridge
from regrad.torch.calls import Overridden, RuleCall
from regrad.torch.custom import Custom
from regrad.torch.functions import Ruled
from regrad.torch.host import is_leaf
from regrad.torch.host.running import Overload, Packet, function_of
from regrad.torch.optypes import families, spellings

KEY = "seen by regrad"  # of a node's metadata

# Nodes that only lay their input out anew: figures of a gradient are the same on both sides.
SAME = frozenset(
    {"t", "view", "unsafe_view", "transpose", "permute", "unsqueeze", "squeeze", "reshape_alias",
     "alias", "numpy_t"}
)  # fmt: skip
# Nodes that torch's functions put around those that compute.
AROUND = SAME | {"expand", "clone", "to_copy", "slice", "select", "as_strided", "detach"}


class OpNote(SeenOp):
    """One op, as it was seen when it ran forward."""

    __slots__ = ("call", "func", "inputs", "names", "run", "same")
    kind: RuleKind

    def __init__(self, run: int, op_type: str, line: str = "", path: str = "") -> None:
        super().__init__(op_type, line=line, path=path)
        self.run: int = run  # the number of the run that it belongs to
        self.names: Sequence[str] = ()  # of the inputs, edge by edge
        self.same: bool = False  # it lays its input out anew, and no more
        self.func: Any = None  # the torch function, or the autograd.Function
        self.call: RuleCall | None = None  # of an override
        self.inputs: OpNote | None = None  # the note of the call that made this node, and others

    @property
    def first(self) -> OpNote:
        """The note of the call that made the node, which knows what the call was given."""
        return self.inputs or self

    def name(self, edge: int) -> str:
        """Return the name of an input."""
        return self.names[edge] if edge < len(self.names) else f"input {edge}"

    def describe_function(self, node: Any) -> None:
        """Say whose rule the node of an `autograd.Function` has.

        (This may change after its forward pass: a scope binds its rule then.)
        """
        function = function_of(node)
        if _is_twin(function, Overridden):
            self._describe_override(node.known[0] if self.call is None else self.call, True)
        elif function is Ruled:
            self._describe_override(node.known[0], False)
        elif _is_twin(function, Custom):
            call = node.call
            self.op_type, self.kind, self.rule = call.name, "custom", place(call.f)
        elif _is_twin(function, Bridge):
            f = getattr(node.flat, "f", node.flat)
            self.op_type = getattr(f, "__name__", "from_regrad")
            self.kind, self.rule = "custom", place(f)
        elif not function.__module__.startswith("torch."):
            self.kind = "custom"
            self.rule = f"{function.__name__}.{place(function.backward)}"

    def _describe_override(self, call: RuleCall, named: bool) -> None:
        rule = call.rule.rule
        self.call = call
        self.kind = "override"
        self.rule: str = place(rule.function) if rule.function else call.rule.name
        if named:
            self.op_type: Any = spelled(call.rule.op.type)
        if not self.line and call.hit is not None:
            self.line: str = call.hit.where
        inputs = call.rule.op.inputs
        if call.layout is None and len(inputs) >= len(call.places) and named:
            self.names = [inputs[i].name for i in call.places if i < len(inputs)]


def _is_twin(function: Any, other: Any) -> bool:
    """Return whether a Function is one of ours, or its twin in torch's older form."""
    return function.backward is other.backward


def spelled(op_type: str) -> str:
    """Return torch's name for an op type; the type itself where it has no name for it."""
    family = families().get(op_type)
    return family.names[0] if family else op_type.rpartition(".")[2]


@cache
def function_name(func: Any) -> str:
    """A torch function as its users know it: `relu`, `conv2d`, `add`, `linalg.vector_norm`."""
    if isinstance(func, Overload | Packet):
        return str(func).removeprefix("aten.").removesuffix(".default")
    name = getattr(func, "__name__", "") or str(func)
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        return {"div": "div", "truediv": "div"}.get(bare.removeprefix("r"), bare)
    for prefix in ("linalg_", "special_", "fft_"):
        if name.startswith(prefix):
            return f"{prefix[:-1]}.{name[len(prefix) :]}"
    return name


@cache
def node_word(name: str) -> str:
    """The op of a backward node: `log_softmax` of `LogSoftmaxBackward0`."""
    bare = re.sub(r"Backwards?\d*$", "", name).rpartition("::")[2]
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()
    return re.sub(r"(\d)_d\b", r"\1d", words)


@cache
def op_type_of(func: Any) -> str:
    """regrad's op type of a torch function, "" if it has none."""
    found = spellings().get(func)
    return "" if found is None else found.family.type


@cache
def parameters_of(func: Any) -> tuple[str, ...]:
    """Return the names of a torch function's arguments, in order."""
    try:
        known = torch.overrides.get_testing_overrides().get(func)
        return tuple(inspect.signature(func if known is None else known).parameters)
    except (TypeError, ValueError):
        return ()


def named_tensors(
    func: Any, args: Sequence[Any], options: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of a torch function, with their names."""
    names = parameters_of(func)
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            yield (names[i] if i < len(names) else f"args[{i}]"), value
        elif isinstance(value, list | tuple):
            called = names[i] if i < len(names) else f"args[{i}]"
            for j, each in enumerate(value):
                if isinstance(each, torch.Tensor):
                    yield f"{called}[{j}]", each
    for name, value in options.items() if options else ():
        if isinstance(value, torch.Tensor):
            yield name, value


def labels(func: Any, nodes: Sequence[Any]) -> list[str]:
    """Return the names of the nodes that one call of a torch function made, the last first."""
    name = function_name(func)
    words = [node_word(node.name()) for node in nodes]
    if len(nodes) == 1:
        return [name if not isinstance(nodes[0], BackwardCFunction) else words[0]]
    main = [i for i, word in enumerate(words) if word not in AROUND] or [0]
    only = main[0] if len(main) == 1 else None
    return [
        name if i == only or word == name else f"{name} ({word})" for i, word in enumerate(words)
    ]


def edge_name(edge: Any, nr: int, given: Sequence[Any], made: set[Any]) -> str:
    """Return the name of an input of a node, by the arguments (name, leaf, node, output)."""
    if edge is None:
        return ""
    if is_leaf(edge):
        variable = edge.variable
        return next((name for name, x, _, _ in given if x is variable), "leaf")
    for name, _, node, output in given:
        if node is edge and output == nr:
            return name
    if edge in made:
        if node_word(edge.name()) in AROUND and len(edge.next_functions) == 1:
            behind, output = edge.next_functions[0]
            return edge_name(behind, output, given, made)
        return node_word(edge.name())
    return "input"


def function_names(function: Any, args: Sequence[Any]) -> list[str]:
    """Return the names of the tensors among the arguments of an `autograd.Function`."""
    forward: Callable[..., Any] = function.forward
    names = list(inspect.signature(forward).parameters)
    if function.setup_context is torch.autograd.Function.setup_context:
        names = names[1:]  # (ctx)
    return [
        names[i] if i < len(names) else f"args[{i}]"
        for i, x in enumerate(args)
        if isinstance(x, torch.Tensor)
    ]
