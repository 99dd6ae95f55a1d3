"""The torch callables that compute several ops in one kernel, and their decompositions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from regrad.torch import parts as of
from regrad.torch import products, recurrent
from regrad.torch.optypes import functions_named, spellings, switch


class Fused(NamedTuple):
    """A callable that computes several ops at once: the ops, and how to compute them one by one.

    Only the op types in `contains` are the user's. The other steps (bias, scale, masks, dropout,
    layout) are internal to torch, and no rule applies to them.
    """

    contains: frozenset[str]
    parts: Callable[..., Any] | None  # None: regrad cannot decompose it
    when: Callable[..., bool] | None = None  # the condition on the arguments
    what: str = ""  # a description of the condition, for messages
    in_place: bool = False
    draws: Callable[..., bool] | None = None  # whether it draws random numbers
    exact: bool = False  # the value of its parts is bit-identical to torch's
    lent: bool = False  # only for the op's own rule, if regrad's op does not have the arguments
    biased: bool = False  # only for a rule that does not name the bias
    compares: bool = False  # for comparisons and casts (see `thresholds`): parts may be torch's own

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
    """Return whether a sparse product uses a reduction other than the sum."""
    return len(args) + len(options) > 2


def _returns_indices(*args: Any, **options: Any) -> bool:
    """Return whether a pooling also returns the indices of its maxima."""
    return bool((*args, *[False] * 7)[6] or options.get("return_indices"))


def _has_options(*args: Any, **options: Any) -> bool:
    """Return whether one op computes a loss in chunks."""
    return options.get("options") is not None


def _drops(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0, *args: Any, **options: Any,
) -> bool:  # fmt: skip
    return dropout_p > 0


def _drops_between(input: torch.Tensor, *args: Any) -> bool:
    """Return whether a recurrent layer in training applies dropout between its layers."""
    _, _, _, layers, dropout, train, *_ = args[isinstance(args[2], list | tuple) :]
    return train and dropout > 0 and layers > 1


def _has_vector(*args: Any, **options: Any) -> bool:
    """Return whether a product has a vector among its operands."""
    return any(x.dim() == 1 for x in (*args, *options.values()) if isinstance(x, torch.Tensor))


def _has_no_dim(input: torch.Tensor, dim: int | None = None, *args: Any, **options: Any) -> bool:
    return dim is None


def _has_channels(*args: Any, **options: Any) -> bool:
    """Return whether `prelu` has a slope for each channel."""
    x, slope = (*args, *options.values())[:2]
    return slope.dim() == 1 and (slope.numel() > 1 or not x.dim())


def _from_the_end(input: torch.Tensor, dim: int | None = 0, *args: Any, **options: Any) -> bool:
    return isinstance(dim, int) and (dim < 0 or not input.dim())


def _of_no_axes(
    input: torch.Tensor, dim: int | Sequence[int] | None = None, *args: Any, **options: Any
) -> bool:
    """Return whether the call means all axes by an empty list."""
    dim = options.get("axis", dim)
    return isinstance(dim, list | tuple) and not dim


# Arguments that torch's callables have and regrad's ops do not: equivalent calls that both accept.
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
    """Return the rows of callables that compute op types among others; the first match applies."""
    table: dict[Any, list[Fused]] = {}
    for function, form in chain(_rows_of_spellings(), *_rows_of_products(), *_rows()):
        table.setdefault(function, []).append(form)
    return table


def fitting(rows: Sequence[tuple[Any, Any]], args: Sequence[Any], options: Any) -> Any:
    """Return the function that replaces a call, from pairs of condition and function; or None."""
    return next((run for when, run in rows if when is None or when(*args, **options)), None)


def row(
    functions: Any, contains: str, parts: Any, *given: Any, **more: Any
) -> Iterator[tuple[Any, Fused]]:
    """Yield a row for each callable, or name in torch: the op types inside, the parts, and options.

    The parts are a function, and its arguments before `op`.
    """
    parts = partial(parts, *given) if given else parts
    for function in functions_named(functions) if isinstance(functions, str) else functions:
        yield function, Fused(frozenset(contains.split()), parts, **more)


def both(name: str, *columns: Any, **more: Any) -> Iterator[tuple[Any, Fused]]:
    """Yield a row, and the row of the in-place variant."""
    yield from row(name, *columns, **more)
    yield from row(f"{name}_", *columns, in_place=True, **more)


_SUM = partial(products.add_product, products.matrix_product)
_SUM_OF_ALL = partial(products.add_product, products.sum_of_products)
_LAYERS = {  # recurrent layers, and the op types inside
    "lstm": "MatMul Mul Sigmoid Tanh", "gru": "MatMul Mul Sigmoid Tanh",
    "rnn_tanh": "MatMul Tanh", "rnn_relu": "MatMul Relu",
}  # fmt: skip


def _rows_of_products() -> list[Iterator[tuple[Any, Fused]]]:
    """Return the rows of contractions of tensors, and of recurrent layers."""
    sparse_mm = [torch.sparse.mm, *functions_named("_sparse_mm")]
    sparse_addmm = [torch.sparse.addmm, *functions_named("_sparse_addmm")]
    return [
        row("linear", "MatMul", products.linear),
        both("addmm", "MatMul", _SUM, ("mat1", "mat2")),
        both("addmv", "MatMul", _SUM, ("mat", "vec")),
        both("baddbmm", "MatMul", _SUM, ("batch1", "batch2")),
        both("addbmm", "MatMul", _SUM_OF_ALL, ("batch1", "batch2")),
        row("chain_matmul multi_dot", "MatMul", products.chain),
        row("einsum", "MatMul Mul", products.einsum, when=_is_product),
        row("tensordot", "MatMul Mul", products.tensordot),
        row("inner", "MatMul Mul", products.inner),
        row("bilinear", "MatMul", products.bilinear),
        row("vdot", "MatMul", products.vdot),
        row("_grouped_mm", "MatMul", products.grouped_product),
        row(sparse_mm, "MatMul", None, when=_reduces, what=" with another reduction"),
        row(sparse_mm, "MatMul", products.matrix_product),
        row(sparse_addmm, "MatMul", _SUM, ("mat1", "mat2")),
        *[row(f"{name}_cell", types, recurrent.cell, name) for name, types in _LAYERS.items()],
        *[
            row(name, types, recurrent.layers, name, draws=_drops_between)
            for name, types in _LAYERS.items()
        ],
    ]  # fmt: skip


def _rows() -> list[Iterator[tuple[Any, Fused]]]:
    bce = F.binary_cross_entropy_with_logits
    return [
        row("scaled_dot_product_attention", "MatMul Softmax", of.attention, draws=_drops),
        # (torch.compile calls no mode for the functions inside losses of torch.nn.functional)
        row([F.cross_entropy], "LogSoftmax", of.named_loss, F.cross_entropy),
        row("cross_entropy_loss", "LogSoftmax", of.cross_entropy),
        row([bce], "Sigmoid", of.named_loss, bce),
        row([torch.binary_cross_entropy_with_logits], "Sigmoid", of.bce_of_each),
        row("binary_cross_entropy_with_logits", "Sigmoid", of.bce_with_logits),
        row("log_sigmoid logsigmoid", "Sigmoid", of.logsigmoid),
        row("glu", "Sigmoid", of.glu),
        both("silu", "Sigmoid", of.silu),
        both("mish", "Tanh Softplus", of.mish),
        both("hardtanh", "Relu6", of.relu6, when=_is_relu6),
        both("hardswish", "Relu6", of.hardswish),
        both("hardsigmoid", "Relu6", of.hardsigmoid),
        both("clamp_min", "ClipByValue", of.clamp_side, "min", exact=True),
        both("clamp_max", "ClipByValue", of.clamp_side, "max", exact=True),
        both("square", "Pow", of.square, exact=True),
        both("float_power", "Pow", of.float_power, exact=True),
        row("outer ger", "Mul", of.outer, exact=True),
        row("adjoint", "Conj", of.adjoint, when=_is_complex, exact=True),
        row([torch.Tensor.H.__get__, torch.Tensor.mH.__get__], "Conj", of.adjoint,  # pyright: ignore
            when=_is_complex, exact=True),
        row("max", "Maximum", of.other_name, torch.maximum, when=_has_other, exact=True),
        row("min", "Minimum", of.other_name, torch.minimum, when=_has_other, exact=True),
        row("max", "Max", of.reduction, torch.amax, when=_is_reduction),
        row("min", "Min", of.reduction, torch.amin, when=_is_reduction),
        row("aminmax", "Max Min", of.aminmax),
        row([F.softmax], "Softmax", of.along_some_axis, torch.softmax, when=_has_no_dim,
            exact=True),
        row([F.log_softmax], "LogSoftmax", of.along_some_axis, torch.log_softmax, when=_has_no_dim,
            exact=True),
        row("hstack", "ConcatV2", of.stack, 1, torch.atleast_1d, exact=True),
        row("vstack row_stack", "ConcatV2", of.stack, 0, torch.atleast_2d, exact=True),
        row("dstack", "ConcatV2", of.stack, 2, torch.atleast_3d, exact=True),
        row("column_stack", "ConcatV2", of.stack, 1, of.as_column, exact=True),
        row("flatten ravel", "Reshape", of.flatten, exact=True),
        row("unflatten", "Reshape", of.unflatten, exact=True),
        row("view_as reshape_as", "Reshape", of.reshape_as, exact=True),
        row("conv2d", "Conv2D", of.convolution, torch.conv2d, 2, when=_has_bias, biased=True),
        row("conv3d", "Conv3D", of.convolution, torch.conv3d, 3, when=_has_bias, biased=True),
        row("max_pool2d", "MaxPool", None, when=_returns_indices, what=" with indices"),
        row("max_pool3d", "MaxPool3D", None, when=_returns_indices, what=" with indices"),
        row("linear_cross_entropy", "MatMul LogSoftmax torch.nn.functional.linear "
            "torch.nn.functional.cross_entropy", None, when=_has_options, what=" with options"),
        row([torch.ops.higher_order.flex_attention], "MatMul Softmax", None),
        row("_native_multi_head_attention", "MatMul Softmax", None),
        row("_transformer_encoder_layer_fwd", "MatMul Softmax Relu Gelu", None),
    ]  # fmt: skip


def _rows_of_spellings() -> Iterator[tuple[Any, Fused]]:
    """Yield rows of an op type's own callables, for arguments that regrad's op does not have."""
    for function, (family, plain, in_place, _) in spellings().items():
        row_of = partial(row, [function], family.type, in_place=in_place)
        if family.type in ("AddV2", "Sub"):
            turned = family.parameters[0] == ("input", "b")
            yield from row_of(of.scaled_sum, turned, plain, when=_has_alpha)
        if family.type in _FOREIGN:
            parts, when = _FOREIGN[family.type]
            yield from row_of(parts, plain, when=when, lent=True)


def is_other_op(op_type: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a call make it a different op than its op type."""
    if op_type == "RealDiv":
        return options.get("rounding_mode") is not None
    if op_type == "SelectV2":
        return len(args) + len(options) == 1
    return options.get("out") is not None


@cache
def dispatched_when_compiled() -> frozenset[Any]:
    """Return the functions of the tables for which torch.compile has to call modes."""
    return frozenset(f for f in {*spellings(), *fused()} if _is_called(f))


def _is_called(function: Callable[..., Any]) -> bool:
    """Return whether programs call a function directly, unlike a wrapper of torch.Tensor."""
    if isinstance(function, FunctionType):
        return function.__module__ == F.__name__
    return isinstance(function, BuiltinFunctionType)
