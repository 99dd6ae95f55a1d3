"""Torch callables that are made of others: opened, taken apart, or refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.overrides

from regrad.torch.optypes import everywhere, spellings


class Fused(NamedTuple):
    """A callable that computes several ops at once: which, and how to compute them one by one."""

    contains: frozenset[str]
    parts: Callable[..., Any] | None  # None: it cannot be taken apart here
    when: Callable[..., bool] | None = None  # only for such arguments
    what: str = ""  # which arguments these are, for a message


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """`scaled_dot_product_attention` as its documentation spells it out."""
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        ones = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device)
        attn_mask = ones.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, -1)
    return torch.dropout(weights, dropout_p, dropout_p > 0) @ value


def cross_entropy(
    input: Any, target: Any, weight: Any = None, reduction: Any = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """`cross_entropy` of class indices or probabilities, by log_softmax."""
    axis = 0 if input.dim() == 1 else 1
    logs = torch.log_softmax(input, axis)
    if not target.is_floating_point() and not label_smoothing:
        nll = torch._C._nn.nll_loss_nd  # pyright: ignore[reportAttributeAccessIssue]
        return nll(logs, target, weight, reduction, ignore_index)
    return _of_probabilities(logs, target, weight, reduction, ignore_index, label_smoothing, axis)


def _of_probabilities(
    logs: Any, target: Any, weight: Any, reduction: int, ignored: int, smoothing: float, axis: int
) -> Any:
    classes = logs.size(axis)
    share = torch.ones_like(target, dtype=logs.dtype)
    if not target.is_floating_point():
        share = (target != ignored).to(logs.dtype)
        target = F.one_hot(target.clamp(min=0), classes).movedim(-1, axis).to(logs.dtype)
        share = share if weight is None else share * weight[target.argmax(axis)]
        target = target * (target.sum(axis, keepdim=True) * share.unsqueeze(axis) != 0)
        count = share.sum()
    else:
        count = torch.tensor(target.numel() / classes, dtype=logs.dtype)
    target = target * (1 - smoothing) + smoothing / classes
    if weight is not None:
        target = target * weight.reshape([-1 if i == axis else 1 for i in range(logs.dim())])
    loss = -(logs * target).sum(axis)
    if share.shape == loss.shape:
        loss = loss * (share != 0)
    return (loss, loss.sum() / count, loss.sum())[reduction]


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """`linear` as a matrix product."""
    y = torch.matmul(input, weight.mT if weight.dim() > 1 else weight)
    return y if bias is None else y + bias


def lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """One step of an LSTM."""
    h, c = hx
    i, f, g, o = (linear(input, w_ih, b_ih) + linear(h, w_hh, b_hh)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """One step of a GRU."""
    xr, xz, xn = linear(input, w_ih, b_ih).chunk(3, -1)
    hr, hz, hn = linear(hx, w_hh, b_hh).chunk(3, -1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    return n + z * (hx - n)


def rnn_cell(act: Callable[..., Any]) -> Callable[..., Any]:
    """One step of a plain recurrent network."""

    def step(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        return act(linear(input, w_ih, b_ih) + linear(hx, w_hh, b_hh))

    return step


def recurrent(cell: Callable[..., Any], two: bool) -> Callable[..., Any]:
    """`lstm`, `gru`, … over whole sequences, step by step."""

    def layers(
        input: Any, hx: Any, params: Any, has_biases: Any, num_layers: Any, dropout: Any,
        train: Any, bidirectional: Any, batch_first: Any = None,
    ) -> Any:  # fmt: skip
        x = input.transpose(0, 1) if batch_first else input
        states = list(zip(*hx, strict=True)) if two else list(hx)
        ways, each = 1 + bidirectional, 4 if has_biases else 2
        last = []
        for layer in range(num_layers):
            found = []
            for way in range(ways):
                n = layer * ways + way
                weights = params[n * each : (n + 1) * each]
                ys, state = _over(cell, x, states[n], weights, way == 1, two)
                found.append(ys)
                last.append(state)
            x = torch.cat(found, -1) if ways == 2 else found[0]
            if layer < num_layers - 1:
                x = torch.dropout(x, dropout, train)
        y = x.transpose(0, 1) if batch_first else x
        if two:
            return y, torch.stack([h for h, _ in last]), torch.stack([c for _, c in last])
        return y, torch.stack(last)

    return layers


def _over(
    cell: Callable[..., Any], x: Any, state: Any, weights: Any, back: bool, two: bool
) -> tuple[Any, Any]:
    ys = []
    steps = reversed(range(x.size(0))) if back else range(x.size(0))
    for t in steps:
        state = cell(x[t], state, *weights)
        ys.append(state[0] if two else state)
    return torch.stack(ys[::-1] if back else ys), state


def bce_with_logits(
    input: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: Any = 1
) -> Any:
    """`binary_cross_entropy_with_logits` by log(sigmoid(x)) and log(sigmoid(-x))."""
    positive = 1 if pos_weight is None else pos_weight
    loss = -(positive * target * logsigmoid(input) + (1 - target) * logsigmoid(-input))
    loss = loss if weight is None else loss * weight
    return (loss, loss.mean(), loss.sum())[reduction]


def logsigmoid(input: Any) -> Any:
    """`logsigmoid` by sigmoid."""
    return torch.log(torch.sigmoid(input))


def silu(input: Any) -> Any:
    """`x * sigmoid(x)`."""
    return input * torch.sigmoid(input)


def glu(input: Any, dim: int = -1) -> Any:
    """`a * sigmoid(b)` of two halves."""
    a, b = input.chunk(2, dim)
    return a * torch.sigmoid(b)


def mish(input: Any) -> Any:
    """`x * tanh(softplus(x))`."""
    return input * torch.tanh(F.softplus(input))


def hardswish(input: Any) -> Any:
    """`x * relu6(x + 3) / 6`."""
    return input * F.relu6(input + 3) / 6


def hardsigmoid(input: Any) -> Any:
    """`relu6(x + 3) / 6`."""
    return F.relu6(input + 3) / 6


def addmm(input: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """`beta * input + alpha * (a @ b)`."""
    y = torch.matmul(a, b)
    y = y if alpha == 1 else y * alpha
    return y + (input if beta == 1 else input * beta)


def _softmin(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return torch.softmax(-input, dim, dtype=dtype)


# -- one callable, several ops --------------------------------------------------------------------


def _has_bias(*args: Any, **options: Any) -> bool:
    return (*args, None, None, None)[2] is not None or options.get("bias") is not None


def _has_alpha(*args: Any, **options: Any) -> bool:
    """Whether a sum has a factor, as in `add(a, b, alpha=2)`, or `add(a, 2, b)` in old code."""
    alpha = options.get("alpha", (*args, 1, 1, 1)[2])
    return (isinstance(alpha, torch.Tensor) or alpha != 1) and options.get("out") is None


def _has_other(*args: Any, **options: Any) -> bool:
    """Whether this is `max(a, b)`, and not a reduction."""
    return isinstance(options.get("other", (*args, None)[1]), torch.Tensor)


def _is_reduction(*args: Any, **options: Any) -> bool:
    return not _has_other(*args, **options) and options.get("out") is None


def _is_relu6(*args: Any, **options: Any) -> bool:
    """Whether this is `hardtanh(x, 0, 6)`."""
    low, high = (*args, -1, 1)[1:3] if len(args) != 2 else (args[1], 1)
    return (options.get("min_val", low), options.get("max_val", high)) == (0, 6)


def _relu6(input: Any, min_val: Any = 0, max_val: Any = 6, inplace: bool = False) -> Any:
    return F.relu6(input, inplace)


def _clamped(side: str) -> Callable[..., Any]:
    """`clamp_min` or `clamp_max`."""
    return lambda input, *args, **options: torch.clamp(
        input, **{side: (*args, *options.values())[0]}
    )


def _reduced(name: str) -> Callable[..., Any]:
    """`torch.max(x)`, or `torch.max(x, dim)` with its indices."""

    def parts(
        input: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None,
        keepdims: bool = False,
    ) -> Any:  # fmt: skip
        values, dim, keepdim = getattr(torch, f"a{name}"), _either(dim, axis), keepdim or keepdims
        if dim is None:
            return values(input)
        with torch._C.DisableTorchFunction():
            found = getattr(torch, name)(input.detach(), dim, keepdim)
        kind = getattr(torch.return_types, name)
        return kind((values(input, dim, keepdim), found.indices))

    return parts


def _either(first: Any, second: Any) -> Any:
    return second if first is None else first


def _scaled(function: Any, reverse: bool) -> Callable[..., Any]:
    """`a + alpha * b`, or `b - alpha * a`."""

    def parts(input: Any, other: Any, alpha: Any = 1) -> Any:
        if isinstance(alpha, torch.Tensor):
            other, alpha = alpha, other
        if reverse:
            return function(torch.mul(input, alpha), other)
        return function(
            input, torch.mul(other, alpha) if isinstance(other, torch.Tensor) else other * alpha
        )

    return parts


def _in_place(parts: Callable[..., Any]) -> Callable[..., Any]:
    """What computes something, put into its first argument."""

    def changing(input: Any, *args: Any, **options: Any) -> Any:
        with torch._C.DisableTorchFunction():
            before = input.clone()
        y = parts(before, *args, **options)
        with torch._C.DisableTorchFunction():
            return input.copy_(y)

    return changing


def _switched(parts: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function that has a switch for in-place."""
    return lambda input, inplace=False: (_in_place(parts) if inplace else parts)(input)


def _convolution(function: Any, axes: int) -> Callable[..., Any]:
    """A convolution, and then its bias."""

    def parts(input: Any, weight: Any, bias: Any, *args: Any, **options: Any) -> Any:
        return function(input, weight, None, *args, **options) + bias.reshape(-1, *[1] * axes)

    return parts


@cache
def fused() -> dict[Any, list[Fused]]:
    """The callables that compute an op type among others."""
    table: dict[Any, list[Fused]] = {}
    for function, row in _forms():
        table.setdefault(function, []).append(row)
    for names, contains, parts in _rows():
        for function in everywhere(names):
            table.setdefault(function, []).append(Fused(frozenset(contains.split()), parts))
    return table


_RECURRENT = {"lstm": "MatMul Sigmoid Tanh", "gru": "MatMul Sigmoid Tanh",
              "rnn_tanh": "MatMul Tanh", "rnn_relu": "MatMul Relu"}  # fmt: skip


def _rows() -> list[tuple[str, str, Callable[..., Any] | None]]:
    return [
        ("scaled_dot_product_attention", "MatMul Softmax", attention),
        ("cross_entropy_loss", "LogSoftmax", cross_entropy),
        ("linear", "MatMul", linear),
        ("addmm baddbmm addmv", "MatMul", addmm),
        ("lstm_cell", "MatMul Sigmoid Tanh", lstm_cell),
        ("gru_cell", "MatMul Sigmoid Tanh", gru_cell),
        ("rnn_tanh_cell", "MatMul Tanh", rnn_cell(torch.tanh)),
        ("rnn_relu_cell", "MatMul Relu", rnn_cell(torch.relu)),
        ("lstm", _RECURRENT["lstm"], recurrent(lstm_cell, True)),
        ("gru", _RECURRENT["gru"], recurrent(gru_cell, False)),
        ("rnn_tanh", _RECURRENT["rnn_tanh"], recurrent(rnn_cell(torch.tanh), False)),
        ("rnn_relu", _RECURRENT["rnn_relu"], recurrent(rnn_cell(torch.relu), False)),
        ("binary_cross_entropy_with_logits", "Sigmoid", bce_with_logits),
        ("log_sigmoid logsigmoid", "Sigmoid", logsigmoid),
        ("silu", "Sigmoid", _switched(silu)),
        ("glu", "Sigmoid", glu),
        ("mish", "Tanh Softplus", _switched(mish)),
        ("hardswish", "Relu6", _switched(hardswish)),
        ("hardsigmoid", "Relu6", _switched(hardsigmoid)),
        ("silu_", "Sigmoid", _in_place(silu)),
        ("mish_", "Tanh Softplus", _in_place(mish)),
        ("hardswish_", "Relu6", _in_place(hardswish)),
        ("hardsigmoid_", "Relu6", _in_place(hardsigmoid)),
        ("softmin", "Softmax", _softmin),
        ("clamp_min", "ClipByValue", _clamped("min")),
        ("clamp_max", "ClipByValue", _clamped("max")),
        ("clamp_min_", "ClipByValue", _in_place(_clamped("min"))),
        ("clamp_max_", "ClipByValue", _in_place(_clamped("max"))),
        ("square", "Pow", lambda input: torch.pow(input, 2)),
        ("square_", "Pow", _in_place(lambda input: torch.pow(input, 2))),
        ("addbmm chain_matmul multi_dot bilinear", "MatMul", None),
        ("_native_multi_head_attention _transformer_encoder_layer_fwd", "MatMul Softmax", None),
    ]


def _is_packed(input: Any, *args: Any, **options: Any) -> bool:
    """Whether a recurrent layer runs over packed sequences: batch sizes come before the state."""
    return isinstance(args[2], list | tuple)


def _is_projected(input: Any, *args: Any, **options: Any) -> bool:
    """Whether an LSTM projects its state: it has a fifth weight."""
    _, params, has_biases, layers, _, _, bidirectional, *_ = args
    return len(params) != layers * (1 + bidirectional) * (4 if has_biases else 2)


def _forms() -> Iterator[tuple[Any, Fused]]:
    """Callables that are one op or another, or more than one, by their arguments."""
    for name, contains in _RECURRENT.items():
        types = frozenset(contains.split())
        for function in everywhere(name):
            yield function, Fused(types, None, _is_packed, " over packed sequences")
            yield function, Fused(types, None, _is_projected, " with proj_size")
    for name, op, pair in (("max", "Max", "Maximum"), ("min", "Min", "Minimum")):
        for function in everywhere(name):
            other = getattr(torch, pair.lower())
            yield function, Fused(frozenset({pair}), other, _has_other)
            yield function, Fused(frozenset({op}), _reduced(name), _is_reduction)
    for function, (family, plain, in_place, _) in spellings().items():
        if family.type in ("AddV2", "Sub"):
            parts = _scaled(plain, family.parameters[0] == ("input", "b"))
            row = frozenset({family.type}), _in_place(parts) if in_place else parts, _has_alpha
            yield function, Fused(*row)
    for function in everywhere("hardtanh"):
        yield function, Fused(frozenset({"Relu6"}), _relu6, _is_relu6)
    for function in everywhere("hardtanh_"):
        yield function, Fused(frozenset({"Relu6"}), _in_place(_relu6), _is_relu6)
    for name, op, axes in (("conv2d", "Conv2D", 2), ("conv3d", "Conv3D", 3)):
        for function in everywhere(name):
            parts = _convolution(getattr(torch, name), axes)
            yield function, Fused(frozenset({op}), parts, _has_bias)


def is_other_op(op_type: str, args: Any, options: Any) -> bool:
    """Whether a call that is spelled like the op type is another op, by its arguments."""
    if op_type == "RealDiv":
        return options.get("rounding_mode") is not None
    if op_type == "SelectV2":
        return len(args) + len(options) == 1
    return options.get("out") is not None


# -- functions that torch writes in Python -------------------------------------------------------

CHECKS = frozenset(
    {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"}
)
_MODULES = ("torch.nn.functional", "torch.functional", "torch._jit_internal")
_OPERATORS = ("__rsub__", "__rdiv__", "__rtruediv__", "__rpow__", "__rmatmul__", "__floordiv__",
              "__rfloordiv__", "__rmod__", "norm", "istft", "stft", "unflatten")  # fmt: skip


def _no(*tensors: Any) -> bool:
    return False


@cache
def bodies() -> dict[Any, Callable[..., Any]]:
    """The functions that torch writes in Python, with what to run instead to see inside."""
    every = {f for fs in torch.overrides.get_overridable_functions().values() for f in fs}
    found = {f: opened(f) for f in every}
    return {f: body for f, body in found.items() if body is not None}


def opened(function: Any) -> Callable[..., Any] | None:
    """The body of a function that torch writes in Python, which does not ask the mode again.

    What the body calls does ask. None for functions written in C++.
    """
    if isinstance(function, FunctionType):
        if function.__module__ in _MODULES:
            return _body(function)
        if function.__module__ == "torch._tensor" and function.__name__ in _OPERATORS:
            return getattr(function, "__wrapped__", None) or _body(function)
    return None


def _body(function: FunctionType) -> Callable[..., Any]:
    names = _opened_names(function.__globals__["__name__"])
    return _with_names(function, names)


@cache
def _opened_names(module: str) -> dict[str, Any]:
    """What functions of a module see: no check for modes, and helpers that see the same."""
    names = {**vars(sys.modules[module]), **dict.fromkeys(CHECKS, _no)}
    for name, value in vars(sys.modules[module]).items():
        if name.startswith("_") and isinstance(value, FunctionType) and name not in CHECKS:
            names[name] = _with_names(value, names)
    return names


def _with_names(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """A function of a module with other names (and so for the functions that it holds)."""
    if function.__globals__["__name__"] != names["__name__"]:
        return function
    cells = tuple(map(_opened_cell, function.__closure__ or ()))
    body = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _opened_cell(cell: CellType) -> CellType:
    held = cell.cell_contents
    return CellType(opened(held) or held)
