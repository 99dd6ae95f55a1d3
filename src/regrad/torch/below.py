"""The ops that run below autograd, in code that asks no function mode.

TorchScript, the bodies of custom ops and the forward pass of an `autograd.Function` leave no record
of single ops in autograd. They are seen where torch dispatches them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from regrad.torch.composites import fused
from regrad.torch.host import DisableTorchFunction, DispatchMode, is_transformed
from regrad.torch.host.bodies import lines_of
from regrad.torch.host.running import (
    Packet,
    body_of,
    custom_op,
    inlined,
    is_single,
    with_tensors,
)
from regrad.torch.nodes import node_named, types_of
from regrad.torch.optypes import families, following, functions_named

# Which calls of an ATen op are an op of the type, where its name alone does not tell.
WHEN: dict[str, dict[str, Callable[..., bool]]] = {
    "elu": {
        "Elu": lambda x, alpha=1, scale=1, *rest: scale == 1,
        "Selu": lambda x, alpha=1, scale=1, *rest: scale != 1,
    },
    "hardtanh": {"Relu6": lambda x, low=-1, high=1: (low, high) == (0, 6)},
    "convolution": {
        "Conv2D": lambda x, w, bias, *rest: w.dim() == 4 and not rest[3],
        "Conv3D": lambda x, w, bias, *rest: w.dim() == 5 and not rest[3],
    },
}


class Below(DispatchMode):
    """Notes the op types that run in a block, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()
        self.names: set[str] = set()  # of the ATen ops

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        name = func.overloadpacket.__name__
        when = WHEN.get(name.strip("_"), {})
        self.names.add(name.strip("_"))
        self.types |= {t for t in _types(name) if t not in when or when[t](*args, **options)}
        body = body_of(func)
        if body is not None:
            with self:
                return body(*args, **options)
        with DisableTorchFunction():  # autograd is done with the call, and rules with it
            return func(*with_tensors(func, args), **options)


def as_called(kept: Any) -> Any:
    """Return the callable that modes are asked about when Python code calls this one."""
    if getattr(kept, "__module__", "") == "torch.nn.attention.flex_attention":
        return torch.ops.higher_order.flex_attention
    return custom_op(kept) or kept


@following
def _types(name: str) -> frozenset[str]:
    """The op types that an ATen op belongs to, or computes inside, by its name."""
    plain = name.rstrip("_")
    named = {t for t, family in families().items() if plain in family.names}
    rows = (row for f in functions_named(plain) for row in fused().get(f, ()) if row.when is None)
    named = named.union(*[row.contains for row in rows])
    return frozenset({*named, *types_of(node_named(plain)), *types_of(f"{plain}Backward")})


# What functions run that have no ATen op of their name, or one that is made of others.
_RUN: dict[str, tuple[str, ...]] = {
    name: tuple(ops.split())
    for names, ops in {
        "to float double half bfloat16 int long bool type_as": "_to_copy",
        "size dim numel is_floating_point is_complex data_ptr": "",
        "reshape view_as flatten contiguous": "view _unsafe_view",
        "item": "_local_scalar_dense",
        "square": "pow",
        "where": "where nonzero",
        "max": "max maximum",
        "min": "min minimum",
    }.items()
    for name in names.split()
}
# What the dispatcher itself puts before an op: conversions (of autocast), and what was left for
# later (a conjugate).
_BEFORE = ("_to_copy", "clone", "conj_physical", "neg")
_OF_C = (BuiltinFunctionType, MethodDescriptorType)


@following
def types_run_by(func: Callable[..., Any]) -> frozenset[str] | None:
    """Return the op types that a function may run below autograd; None if only its run can tell.

    A function that torch writes in C++ calls the ATen op of its name. Where that is made of no
    others, and its arguments are plain, it is dispatched as it is: what its kernel calls in turn
    is not dispatched to modes, so that watching it would tell no more than its name.
    """
    name = getattr(func, "__name__", "")
    if not isinstance(func, _OF_C) or func not in functions_named(name):
        return None
    packet = getattr(torch.ops.aten, name, None)
    if name not in _RUN and not (isinstance(packet, Packet) and is_single(packet)):
        return None
    return frozenset().union(*map(_types, (*_RUN.get(name, (name,)), *_BEFORE)))


_PLAIN = {
    torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device, torch.memory_format,
    bool, int, float, complex, str, type(None),
}  # fmt: skip


def are_plain(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether no argument is of a subclass, and no transformation takes ops apart."""
    if is_transformed():
        return False
    plain = _PLAIN.issuperset(map(type, args))
    return plain and (not options or _PLAIN.issuperset(map(type, options.values())))


# -- TorchScript ----------------------------------------------------------------------------------


def script_types(program: Any, rules: Mapping[str, Any]) -> set[str]:
    """The op types, and the callables that are keys, that a TorchScript program names."""
    names = set(_names(program))
    found = {t for name in names for t in _types(name) if t not in WHEN.get(name.strip("_"), ())}
    for key in rules.keys() - families().keys():  # callables that are not op types of regrad
        if key.rpartition(".")[2].rstrip("_") in names or names & _lines(key):
            found.add(key)
    return found & rules.keys()


_TRACED = re.compile(r"\(\d+\): (\w+)")  # in the Python stack that a traced op remembers
_SCRIPTED = re.compile(r'File "(.+?)", line (\d+)')


def _names(program: Any) -> Iterator[str]:
    """Yield the names that a program calls: ATen ops, Python functions or lines around them."""
    called = _nodes(program.graph)
    inputs = (next(node.inputs()) for node in called if node.kind() == "prim::CallFunction")
    yield from (str(x.type()).rpartition(".")[2] for x in inputs)
    for node in _nodes(inlined(program)):
        if node.kind().startswith("aten::"):
            source = node.sourceRange()
            yield node.kind().removeprefix("aten::").rstrip("_")
            yield from _TRACED.findall(source)
            yield from map(":".join, _SCRIPTED.findall(source))


@cache
def _lines(key: str) -> frozenset[str]:
    """The lines of the Python function that is a key, by its full name."""
    module, _, name = key.rpartition(".")
    return lines_of(getattr(sys.modules.get(module), name, None))


def _nodes(graph: Any) -> Iterator[Any]:
    stack: list[Any] = list(graph.nodes())
    while stack:
        node = stack.pop()
        yield node
        for inner in node.blocks():
            stack += inner.nodes()


def join_types(types: Iterable[str]) -> str:
    """Op types in a message."""
    return " and ".join(map(repr, sorted(types)))
