"""The torch callables that compute several ops in one kernel: which ops, and how to part them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from regrad.torch import parts as of
from regrad.torch import products, recurrent
from regrad.torch.optypes import functions_named, spellings, switch


class Fused(NamedTuple):
    """A callable that computes several ops at once: which, and how to compute them one by one.

    Only the op types that it contains are the user's. What else it does (bias, scale, masks,
    dropout, layout) is torch's own, and no rule concerns it.
    """

    contains: frozenset[str]
    parts: Callable[..., Any] | None  # None: it cannot be taken apart here
    when: Callable[..., bool] | None = None  # only for such arguments
    what: str = ""  # which arguments these are, for a message
    in_place: bool = False
    draws: Callable[..., bool] | None = None  # whether it draws random numbers
    exact: bool = False  # its parts have torch's value to the bit
    lent: bool = False  # only for a rule of regrad's own, whose op knows no such arguments

    def changes(
        self, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> bool:
        """Return whether a call is in place."""
        at = switch(function)
        return self.in_place or bool(
            options.get("inplace") or (at is not None and args[at : at + 1] == (True,))
        )


# -- one callable, several ops --------------------------------------------------------------------


def _has_bias(*args: Any, **options: Any) -> bool:
    return (*args, None, None, None)[2] is not None or options.get("bias") is not None


def _has_alpha(*args: Any, **options: Any) -> bool:
    """Return whether a sum has a factor: `add(a, b, alpha=2)`, or `add(a, 2, b)` in old code."""
    alpha = options.get("alpha", (*args, 1, 1, 1)[2])
    return (isinstance(alpha, torch.Tensor) or alpha != 1) and options.get("out") is None


def _has_other(*args: Any, **options: Any) -> bool:
    """Return whether this is `max(a, b)`, and not a reduction."""
    return any(isinstance(x, torch.Tensor) for x in (*args[1:2], options.get("other")))


def _is_reduction(*args: Any, **options: Any) -> bool:
    return not _has_other(*args, **options) and options.get("out") is None


def _is_relu6(*args: Any, **options: Any) -> bool:
    """Return whether this is `hardtanh(x, 0, 6)`."""
    said: dict[str, Any] = {"min_val": -1, "max_val": 1}
    said.update(zip(("min_val", "max_val"), args[1:], strict=False))
    said.update(options)
    return (said["min_val"], said["max_val"]) == (0, 6)


def _is_complex(input: torch.Tensor) -> bool:
    return input.is_complex()


def _is_product(*args: Any, **options: Any) -> bool:
    """Return whether einsum has more than one operand."""
    given = args[1:]
    if not isinstance(args[0], str):  # einsum(x, [0, 1], y, [1, 2])
        return len(args) > 3
    return len(given) > 1 or any(isinstance(x, list | tuple) and len(x) > 1 for x in given)


def _reduces(*args: Any, **options: Any) -> bool:
    """Return whether a sparse product is not one of sums."""
    return len(args) + len(options) > 2


def _gives_indices(*args: Any, **options: Any) -> bool:
    """Return whether a pooling says where it found its maxima."""
    return bool((*args, *[False] * 7)[6] or options.get("return_indices"))


def _drops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0, *args: Any, **options: Any,
) -> bool:  # fmt: skip
    return dropout_p > 0


def _drops_between(input: torch.Tensor, *args: Any) -> bool:
    """Return whether a recurrent layer in training drops what it hands to the next one."""
    _, _, _, layers, dropout, train, *_ = args[isinstance(args[2], list | tuple) :]
    return train and dropout > 0 and layers > 1


def _has_vector(*args: Any, **options: Any) -> bool:
    """Return whether a product is not of matrices."""
    return any(x.dim() == 1 for x in (*args, *options.values()) if isinstance(x, torch.Tensor))


def _has_no_dim(input: torch.Tensor, dim: int | None = None, *args: Any, **options: Any) -> bool:
    return dim is None


def _has_channels(*args: Any, **options: Any) -> bool:
    """Return whether there is a slope for each channel."""
    x, slope = (*args, *options.values())[:2]
    return slope.dim() == 1 and (slope.numel() > 1 or not x.dim())


def _from_the_end(input: torch.Tensor, dim: int | None = 0, *args: Any, **options: Any) -> bool:
    return isinstance(dim, int) and (dim < 0 or not input.dim())


def _of_no_axes(
    input: torch.Tensor, dim: int | Sequence[int] | None = None, *args: Any, **options: Any
) -> bool:
    """Return whether all axes are meant by naming none."""
    dim = options.get("axis", dim)
    return isinstance(dim, list | tuple) and not dim


# What torch's callables take and regrad's ops do not: how to call them so that both know it.
_FOREIGN: dict[str, tuple[Callable[..., Any], Callable[..., bool]]] = {
    "MatMul": (of.of_matrices, _has_vector),
    "Prelu": (of.by_channel, _has_channels),
    **dict.fromkeys(
        ("Cumprod", "Cumsum", "Softmax", "LogSoftmax"), (of.from_the_front, _from_the_end)
    ),
    **dict.fromkeys(("Sum", "Mean", "Max", "Min"), (of.over_all, _of_no_axes)),
}


@cache
def fused() -> dict[Any, list[Fused]]:
    """The callables that compute an op type among others."""
    table: dict[Any, list[Fused]] = {}
    for function, row in _forms():
        table.setdefault(function, []).append(row)
    for names, contains, parts, *rest in _rows():
        row = Fused(frozenset(contains.split()), parts, **(rest[0] if rest else {}))
        for function in functions_named(names):
            table.setdefault(function, []).append(row)
    table.update({f: [Fused(frozenset({t}), parts)] for f, t, parts in _losses()})
    return table


def _losses() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Losses that say in other ways how they are reduced: torch.nn.functional has words for it.

    (torch.compile asks no mode about the functions that those call.)
    """
    return [
        (F.cross_entropy, "LogSoftmax", of.named_cross_entropy),
        (F.binary_cross_entropy_with_logits, "Sigmoid", of.named_bce),
        (torch.binary_cross_entropy_with_logits, "Sigmoid", of.bce_of_each),
    ]


_GATED = "MatMul Sigmoid Tanh"
_IN_PLACE = {"in_place": True}
_EXACT = {"exact": True}
_BETWEEN = {"draws": _drops_between}


def _rows() -> list[tuple[Any, ...]]:
    """Names in torch, the op types that are inside, the parts, and what else a row says."""
    return [
        ("scaled_dot_product_attention", "MatMul Softmax", of.attention, {"draws": _drops}),
        ("cross_entropy_loss", "LogSoftmax", of.cross_entropy),
        ("linear", "MatMul", products.linear),
        *_both_variants("addmm", "MatMul", products.add_product("mat1", "mat2")),
        *_both_variants("addmv", "MatMul", products.add_product("mat", "vec")),
        *_both_variants("baddbmm", "MatMul", products.add_product("batch1", "batch2")),
        *_both_variants("addbmm", "MatMul", products.add_batch),
        ("chain_matmul multi_dot", "MatMul", products.chain),
        ("einsum", "MatMul Mul", products.einsum, {"when": _is_product}),
        ("tensordot", "MatMul Mul", products.tensordot),
        ("inner", "MatMul Mul", products.inner),
        ("bilinear", "MatMul", products.bilinear),
        ("vdot", "MatMul", products.vdot),
        ("_grouped_mm", "MatMul", products.grouped_product),
        ("lstm_cell", _GATED, recurrent.cell("lstm")),
        ("gru_cell", _GATED, recurrent.cell("gru")),
        ("rnn_tanh_cell", "MatMul Tanh", recurrent.cell("rnn_tanh")),
        ("rnn_relu_cell", "MatMul Relu", recurrent.cell("rnn_relu")),
        ("lstm", _GATED, recurrent.layers("lstm"), _BETWEEN),
        ("gru", _GATED, recurrent.layers("gru"), _BETWEEN),
        ("rnn_tanh", "MatMul Tanh", recurrent.layers("rnn_tanh"), _BETWEEN),
        ("rnn_relu", "MatMul Relu", recurrent.layers("rnn_relu"), _BETWEEN),
        ("binary_cross_entropy_with_logits", "Sigmoid", of.bce_with_logits),
        ("log_sigmoid logsigmoid", "Sigmoid", of.logsigmoid),
        ("glu", "Sigmoid", of.glu),
        *_both_variants("silu", "Sigmoid", of.silu),
        *_both_variants("mish", "Tanh Softplus", of.mish),
        *_both_variants("hardswish", "Relu6", of.hardswish),
        *_both_variants("hardsigmoid", "Relu6", of.hardsigmoid),
        *_both_variants("clamp_min", "ClipByValue", of.clamp_side("min"), _EXACT),
        *_both_variants("clamp_max", "ClipByValue", of.clamp_side("max"), _EXACT),
        *_both_variants("square", "Pow", of.square, _EXACT),
        *_both_variants("float_power", "Pow", of.float_power, _EXACT),
        ("outer ger", "Mul", of.outer, _EXACT),
        ("adjoint", "Conj", of.adjoint, {**_EXACT, "when": _is_complex}),
        ("aminmax", "Max Min", of.aminmax),
        ("hstack", "ConcatV2", of.stack(1, torch.atleast_1d), _EXACT),
        ("vstack row_stack", "ConcatV2", of.stack(0, torch.atleast_2d), _EXACT),
        ("dstack", "ConcatV2", of.stack(2, torch.atleast_3d), _EXACT),
        ("column_stack", "ConcatV2", of.stack(1, of.as_column), _EXACT),
        ("flatten ravel", "Reshape", of.flatten, _EXACT),
        ("unflatten", "Reshape", of.unflatten, _EXACT),
        ("view_as reshape_as", "Reshape", of.reshape_as, _EXACT),
        ("_native_multi_head_attention", "MatMul Softmax", None),
        ("_transformer_encoder_layer_fwd", "MatMul Softmax Relu Gelu", None),
    ]  # fmt: skip


def _both_variants(name: str, contains: str, parts: Any, more: Any = None) -> list[tuple[Any, ...]]:
    """A row, and that of the variant in place."""
    more = more or {}
    return [(name, contains, parts, more), (f"{name}_", contains, parts, {**more, **_IN_PLACE})]


def _forms() -> Iterator[tuple[Any, Fused]]:
    """Callables that are one op or another, or more than one, by their arguments."""
    for name, op, pair in (("max", "Max", "Maximum"), ("min", "Min", "Minimum")):
        for function in functions_named(name):
            other = of.other_name(getattr(torch, pair.lower()))
            yield function, Fused(frozenset({pair}), other, _has_other, exact=True)
            found = of.reduction(getattr(torch, f"a{name}"))
            yield function, Fused(frozenset({op}), found, _is_reduction)
    for function, (family, plain, in_place, _) in spellings().items():
        if family.type in ("AddV2", "Sub"):
            parts = of.scaled_sum(plain, family.parameters[0] == ("input", "b"))
            yield function, Fused(frozenset({family.type}), parts, _has_alpha, in_place=in_place)
        if family.type in _FOREIGN:
            parts, when = _FOREIGN[family.type]
            types = frozenset({family.type})
            yield function, Fused(types, parts(plain), when, in_place=in_place, lent=True)
    for function, plain in ((F.softmax, torch.softmax), (F.log_softmax, torch.log_softmax)):
        types = frozenset({spellings()[function].family.type})
        yield function, Fused(types, of.along_some_axis(plain), _has_no_dim, exact=True)
    for name in ("hardtanh", "hardtanh_"):
        for function in functions_named(name):
            in_place = name.endswith("_")
            yield function, Fused(frozenset({"Relu6"}), of.relu6, _is_relu6, in_place=in_place)
    for name, op, axes in (("conv2d", "Conv2D", 2), ("conv3d", "Conv3D", 3)):
        for function in functions_named(name):
            parts = of.convolution(getattr(torch, name), axes)
            yield function, Fused(frozenset({op}), parts, _has_bias)
    for getter in (torch.Tensor.H, torch.Tensor.mH):
        yield getter.__get__, Fused(frozenset({"Conj"}), of.adjoint, _is_complex, exact=True)  # pyright: ignore
    for name, op in (("max_pool2d", "MaxPool"), ("max_pool3d", "MaxPool3D")):
        for function in functions_named(name):
            yield function, Fused(frozenset({op}), None, _gives_indices, " with indices")
    yield torch.ops.higher_order.flex_attention, Fused(frozenset({"MatMul", "Softmax"}), None)
    product = frozenset({"MatMul"})
    for function in (torch.sparse.mm, *functions_named("_sparse_mm")):
        yield function, Fused(product, None, _reduces, " with another reduction")
        yield function, Fused(product, products.sparse_product)
    for function in (torch.sparse.addmm, *functions_named("_sparse_addmm")):
        yield function, Fused(product, products.add_product("mat1", "mat2"))


def is_other_op(op_type: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether a call that is spelled like the op type is another op, by its arguments."""
    if op_type == "RealDiv":
        return options.get("rounding_mode") is not None
    if op_type == "SelectV2":
        return len(args) + len(options) == 1
    return options.get("out") is not None


@cache
def asked_when_compiled() -> frozenset[Any]:
    """Return the functions of the tables, which torch.compile is to ask modes about."""
    return frozenset(f for f in {*spellings(), *fused()} if _is_called(f))


def _is_called(function: Callable[..., Any]) -> bool:
    """Return whether a function is one that programs call, and no wrapper of torch.Tensor."""
    if isinstance(function, FunctionType):
        return function.__module__ == F.__name__
    return isinstance(function, BuiltinFunctionType)
