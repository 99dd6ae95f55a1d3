"""Names of ops and their inputs: torch's functions, autograd's nodes, and users' Functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.overrides
from torch.autograd.function import BackwardCFunction

from regrad.torch.host import is_leaf, number_of
from regrad.torch.host.running import Overload, Packet
from regrad.torch.optypes import families, spellings

# Nodes of auxiliary ops, which torch's functions run before or after the ops that compute.
AROUND = frozenset(
    {"t", "view", "unsafe_view", "transpose", "permute", "unsqueeze", "squeeze", "reshape_alias",
     "alias", "numpy_t", "expand", "clone", "to_copy", "slice", "select", "as_strided", "detach"}
)  # fmt: skip


# -- names of ops --------------------------------------------------------------------------------


@cache
def function_name(func: Any) -> str:
    """Return the public name of a torch function: `relu`, `conv2d`, `linalg.norm`, `T`."""
    if isinstance(func, Overload | Packet):
        return str(func).removeprefix("aten.").removesuffix(".default")
    name = getattr(func, "__name__", "") or str(func)
    if name == "__get__":
        return func.__self__.__name__
    if name.startswith("__") and name.endswith("__"):
        bare = name[2:-2]
        return "div" if bare.removeprefix("r") in ("div", "truediv") else bare
    for prefix in ("linalg_", "special_", "fft_"):
        if name.startswith(prefix):
            return f"{prefix[:-1]}.{name[len(prefix) :]}"
    return name


@cache
def node_word(name: str) -> str:
    """Return the op of a backward node: `log_softmax` for `LogSoftmaxBackward0`."""
    bare = re.sub(r"Backwards?\d*$", "", name).rpartition("::")[2]
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()
    return re.sub(r"(\d)_d\b", r"\1d", words)


def spelled(op_type: str) -> str:
    """Return torch's name for an op type; the type itself if torch has no name for it."""
    family = families().get(op_type)
    return family.names[0] if family else op_type.rpartition(".")[2]


@cache
def op_type_of(func: Any) -> str:
    """Return regrad's op type of a torch function; "" if it has none."""
    found = spellings().get(func)
    return "" if found is None else found.family.type


def labels(func: Any, nodes: Sequence[Any]) -> list[str]:
    """Return the names of the nodes that one call of a torch function created, the last first."""
    name = function_name(func)
    words = [node_word(node.name()) for node in nodes]
    if len(nodes) == 1:
        return [name if not isinstance(nodes[0], BackwardCFunction) else words[0]]
    main = [i for i, word in enumerate(words) if word not in AROUND] or [0]
    only = main[0] if len(main) == 1 else None
    return [
        name if i == only or word == name else f"{name} ({word})" for i, word in enumerate(words)
    ]


# -- names of inputs -----------------------------------------------------------------------------


@cache
def parameters_of(func: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a torch function, or of a Function, in order."""
    known = torch.overrides.get_testing_overrides().get(func)
    is_function = isinstance(func, type) and issubclass(func, torch.autograd.Function)
    try:
        names = tuple(inspect.signature(func.forward if is_function else known or func).parameters)
    except (TypeError, ValueError):
        return ()
    takes_ctx = is_function and func.setup_context is torch.autograd.Function.setup_context
    return names[1:] if takes_ctx else names


def named_tensors(
    func: Any, args: Sequence[Any], options: Any = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among the arguments of a function, with their names."""
    names = parameters_of(func)
    named = [(names[i] if i < len(names) else f"args[{i}]", x) for i, x in enumerate(args)]
    for name, value in [*named, *options.items()] if options else named:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            for j, each in enumerate(value):
                if isinstance(each, torch.Tensor):
                    yield f"{name}[{j}]", each


def key_of(node: Any) -> int | None:
    """Return the key that identifies a node: its number, or the id of its leaf."""
    if node is None:
        return None
    return id(node.variable) if is_leaf(node) else number_of(node)


def source_of(x: torch.Tensor) -> tuple[int, int]:
    """Return the key of the node that created a tensor, and the index of the node's output.

    Both are on the edges of the graph to the tensor. A tensor without history is its own key.
    """
    return (id(x) if x.grad_fn is None else number_of(x.grad_fn)), x.output_nr


def edge_name(edge: Any, nr: int, given: Sequence[tuple[str, tuple[int, int]]], made: Any) -> str:
    """Return the name of a node's input, from the call's arguments and the nodes it created."""
    if edge is None:
        return ""
    for name, source in given:
        if source == (key_of(edge), nr):
            return name
    if is_leaf(edge):
        return "leaf"
    if edge not in made:
        return "input"
    if node_word(edge.name()) in AROUND and len(edge.next_functions) == 1:
        behind, output = edge.next_functions[0]
        return edge_name(behind, output, given, made)
    return node_word(edge.name())
