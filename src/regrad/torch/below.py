"""The ops that run below autograd, in code that calls no function mode.

TorchScript, the bodies of custom ops and the forward pass of an `autograd.Function` leave no record
of single ops in autograd. regrad observes these ops where torch dispatches them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dis import get_instructions
from functools import cache
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from regrad.torch.composites import fused
from regrad.torch.host import NATIVE, DisableTorchFunction, DispatchMode
from regrad.torch.host.bodies import CHECKS, lines_of
from regrad.torch.host.running import (
    Packet,
    body_of,
    custom_op,
    inlined,
    is_single,
    with_tensors,
)
from regrad.torch.nodes import node_named, types_of
from regrad.torch.optypes import (
    COMPARISONS,
    THRESHOLD,
    families,
    following,
    functions_named,
    spellings,
)

# For ATen ops that belong to several op types: the condition on a call for each op type.
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
    """Records the op types that run in a block, in any code."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[str] = set()
        self.names: set[str] = set()  # the names of the ATen ops

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
        with DisableTorchFunction():  # autograd and the rules have already handled the call
            y = func(*with_tensors(func, args), **options)
            if (compares := _COMPARES.get(name)) is not None:
                self._note_threshold(compares, args, y)
            return y

    def _note_threshold(self, compares: bool, args: Sequence[Any], y: Any) -> None:
        """Record a comparison of floats, or a cast of its result (see `thresholds`)."""
        given = [x for x in args if isinstance(x, torch.Tensor)]
        if compares:
            starts = any(x.is_floating_point() for x in given)
        else:
            starts = len(given) == 1 and given[0] in _COMPARED
        if starts and y.is_floating_point():
            self.types.add(THRESHOLD.type)
        elif starts:
            _COMPARED[y] = None


# The ATen ops of a threshold: whether each compares, or casts.
_COMPARES = dict.fromkeys(" ".join(COMPARISONS).split(), True)
_COMPARES |= dict.fromkeys(("_to_copy", "to", "type_as", "where"), False)
_COMPARED: Any = WeakTensorKeyDictionary()  # results of comparisons that no cast has read yet


def as_called(kept: Any) -> Any:
    """Return the callable for which torch calls modes when Python code calls this one."""
    if getattr(kept, "__module__", "") == "torch.nn.attention.flex_attention":
        return torch.ops.higher_order.flex_attention
    return custom_op(kept) or kept


@following
def _types(name: str) -> frozenset[str]:
    """Return the op types that an ATen op belongs to, or computes inside, by its name."""
    plain = name.rstrip("_")
    named = {t for t, family in families().items() if plain in family.names}
    rows = (row for f in functions_named(plain) for row in fused().get(f, ()) if row.when is None)
    named = named.union(*[row.contains for row in rows])
    return frozenset({*named, *types_of(node_named(plain)), *types_of(f"{plain}Backward")})


# The ATen ops that functions run below autograd, for functions without an ATen op of the same name
# or with a composite one. The table lists too many ops rather than too few.
_RUN: dict[str, tuple[str, ...]] = {
    name: tuple(ops.split())
    for names, ops in {
        "to float double half bfloat16 int long bool type type_as": "_to_copy",
        "size dim ndimension numel is_floating_point is_complex data_ptr stride tolist": "",
        "is_contiguous requires_grad_ element_size storage_offset get_device nelement": "",
        "reshape view_as flatten unflatten contiguous": "view _unsafe_view",
        "item __bool__ __float__ __int__ __index__": "_local_scalar_dense",
        "square": "pow",
        "where": "where nonzero",
        "max": "max maximum",
        "min": "min minimum",
        "expand_as broadcast_to broadcast_tensors": "expand",
        "pad": "constant_pad_nd reflection_pad2d replication_pad2d slice copy cat",
        "nll_loss nll_loss2d nll_loss_nd": "nll_loss_forward",
        "chunk split split_with_sizes tensor_split narrow": "split slice",
        "__getitem__": "slice select index unsqueeze view",
        "__setitem__": "slice select index_put unsqueeze view copy fill",
        "__add__ __radd__ __iadd__": "add",
        "__sub__ __isub__": "sub",
        "__mul__ __rmul__ __imul__": "mul",
        "__truediv__ __itruediv__ __div__ __idiv__": "div",
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d": "convolution",
        "batch_norm": "native_batch_norm mul add view",
        "instance_norm": "native_batch_norm mean mul add view",
        "layer_norm": "native_layer_norm mul add",
        "group_norm": "native_group_norm mul add view",
        "rms_norm": "_fused_rms_norm pow mean add rsqrt mul",
        "dropout dropout_ feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ "
        "feature_alpha_dropout feature_alpha_dropout_": "native_dropout bernoulli mul div add",
        "max_pool1d": "max_pool2d_with_indices squeeze unsqueeze",
        "max_pool2d": "max_pool2d_with_indices",
        "max_pool3d": "max_pool3d_with_indices",
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d": "mean view",
        "cat": "cat",  # (before torch 2.12, its overload with names of axes is composite)
        "softmax": "_softmax",
        "log_softmax": "_log_softmax",
    }.items()
    for name in names.split()
}
_UPSAMPLE = "linear1d bilinear2d trilinear3d bicubic2d nearest1d nearest2d nearest3d"
_RUN |= {f"upsample_{name}": (f"upsample_{name}",) for name in _UPSAMPLE.split()}
# The ops that the dispatcher may run before an op: conversions (by autocast), and lazy ops (a
# conjugate).
_BEFORE = ("_to_copy", "clone", "conj_physical", "neg")
_OF_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


@following
def types_run_by(func: Callable[..., Any]) -> frozenset[str] | None:
    """Return the op types that a function of torch may run; None if only a run can tell.

    The table of composites has them, or the ATen op with the function's name. An ATen op that is
    not composite dispatches once, because torch does not dispatch the calls inside its kernel to
    modes. A function that torch implements in Python runs the functions that its code names.
    """
    name = getattr(func, "__name__", "")
    if func in fused():
        own = {spellings()[func].family.type} if func in spellings() else set[str]()
        return frozenset(own.union(_before(), *[row.contains for row in fused()[func]]))
    if isinstance(func, FunctionType):
        if (called := called_by(func)) is None:
            return None
        found = [types_run_by(each) for each in called if type(each) is not FunctionType]
        return None if None in found else frozenset().union(*filter(None, found))
    if not isinstance(func, _OF_C) or func not in functions_named(name):
        return None
    packet = getattr(torch.ops.aten, name, None)
    if name not in _RUN and not (isinstance(packet, Packet) and is_single(packet)):
        return None
    return _before().union(*map(_types, _RUN.get(name, (name,))))


@following
def _before() -> frozenset[str]:
    return frozenset().union(*map(_types, _BEFORE))


# Operators in code, which appear as `BINARY_OP` and not as names.
_SYMBOLS = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow", "@": "matmul", "%": "remainder",
    "//": "floor_divide", "<<": "bitwise_left_shift", ">>": "bitwise_right_shift",
    "&": "bitwise_and", "|": "bitwise_or", "^": "bitwise_xor",
}  # fmt: skip


@following
def called_by(function: FunctionType) -> frozenset[Any] | None:
    """Return the functions that a function which torch implements in Python may run, by name.

    (The result is a superset: a name matches all functions that torch has under it.) Return None if
    the names in the code are not sufficient.
    """
    found: list[Any] = [function]
    for each in found:  # (`found` grows during the loop)
        if not isinstance(each, FunctionType) or (each in fused() and each is not function):
            continue
        names = names_of_code(each.__code__)
        if not (each.__module__ or "").startswith("torch") or not _UNLISTED.isdisjoint(names):
            return None
        new = [cell.cell_contents for cell in each.__closure__ or ()]
        for name in names - CHECKS - {"handle_torch_function"}:
            helper = each.__globals__.get(name)
            if getattr(helper, "__module__", None) in (each.__module__, function.__module__):
                new.append(helper)
            name = _SYMBOLS.get(name, name)
            new += [getattr(place, name, None) for place in _IN_CODE]
        called = (f for f in new if isinstance(f, (*_OF_C, FunctionType)))
        found += [f for f in dict.fromkeys(called) if f not in found]
    return frozenset(found)


_IN_CODE = (torch, torch.Tensor, F, *NATIVE)
_UNLISTED = {"apply", "ops", "linalg", "fft", "special", "sparse", "nested"}


def names_of_code(code: CodeType) -> frozenset[str]:
    """Return the names and the symbols of operators in the code of a function."""
    names = {*code.co_names}
    names |= {i.argrepr.rstrip("=") for i in get_instructions(code) if i.opname == "BINARY_OP"}
    inner = [names_of_code(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(names.union(*inner))


# -- TorchScript ----------------------------------------------------------------------------------


def script_types(program: Any, rules: Mapping[str, Any]) -> set[str]:
    """Return the op types, and the callables that are keys, in a TorchScript program."""
    names = set(_names(program))
    found = {t for name in names for t in _types(name) if t not in WHEN.get(name.strip("_"), ())}
    for key in rules.keys() - families().keys():  # callables that are not op types of regrad
        if key.rpartition(".")[2].rstrip("_") in names or names & _lines(key):
            found.add(key)
    return found & rules.keys()


_TRACED = re.compile(r"\(\d+\): (\w+)")  # in the Python stack of a traced op
_SCRIPTED = re.compile(r'File "(.+?)", line (\d+)')


def _names(program: Any) -> Iterator[str]:
    """Yield the names that a program calls: ATen ops, Python functions, and lines of calls."""
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
    """Return the lines of the Python function that is a key, by its full name."""
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
    """Return op types as text for a message."""
    return " and ".join(map(repr, sorted(types)))
