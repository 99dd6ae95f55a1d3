"""An independent answer for overrides in torch models: hooks on autograd's own record.

The plain model runs once. A hook on each node of an op type's then changes the gradients that the
node hands on, as a rule that multiplies the native gradient would. Nothing here is taken from the
tables of the library, which are under test: nodes are known by the names that autograd gives them.

The rules multiply what goes to the first operand by `K` and to the second by `L`.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tests.campaigns.torch_samples import behind
from tests.helpers import by_backward

K, L = 1.1, 0.9
Gradients = Sequence[torch.Tensor | None]
Change = Callable[[Any, Gradients, Gradients, float, float], Gradients]


def operands(*which: str) -> Change:
    """A node's gradients times K or L, or as they are: `operands("", "k", "l")` for addmm."""

    def change(node: Any, dxs: Gradients, dys: Gradients, k: float, l: float) -> Gradients:  # noqa: E741
        by = {"": 1.0, "k": k, "l": l, "kk": k * k, "kl": k * l}
        factors = [*map(by.__getitem__, which), *[1.0] * (len(dxs) - len(which))]
        return [None if d is None else d * f for d, f in zip(dxs, factors, strict=True)]

    return change


def _silu(node: Any, dxs: Gradients, dys: Gradients, k: float, l: float) -> Gradients:  # noqa: E741
    x, (dy, *_) = node._saved_self, dys
    s = torch.sigmoid(x)
    return [dy * (s + k * x * s * (1 - s))]


def _glu(node: Any, dxs: Gradients, dys: Gradients, k: float, l: float) -> Gradients:  # noqa: E741
    axis = node._saved_dim - (1 << 64 if node._saved_dim > 1 << 32 else 0)
    (dx, *_) = dxs
    assert dx is not None
    a, b = dx.chunk(2, axis)
    return [torch.cat([a, k * b], axis)]


def _mish(node: Any, dxs: Gradients, dys: Gradients, k: float, l: float) -> Gradients:  # noqa: E741
    x, (dy, *_) = node._saved_self, dys
    t = torch.tanh(torch.nn.functional.softplus(x))
    return [dy * (t + k * x * (1 - t * t) * torch.sigmoid(x))]


FIRST, BOTH, SECOND = operands("k"), operands("k", "l"), operands("", "k", "l")
# `scaled_dot_product_attention` in one kernel: q @ kᵀ, then softmax, then weights @ v
PRODUCTS, WEIGHTS = operands("kk", "kl", "l"), operands("k", "k")
FLASH = "ScaledDotProductFlashAttentionForCpu"

# op type: autograd's nodes that compute one, alone or among others, and what a rule changes there
NODES: dict[str, dict[str, Change]] = {
    "Relu": {"Relu": FIRST}, "Gelu": {"Gelu": FIRST}, "Silu": {"Silu": FIRST},
    "Sigmoid": {"Sigmoid": FIRST, "LogSigmoid": FIRST, "BinaryCrossEntropyWithLogits": FIRST,
        "Silu": _silu, "Glu": _glu},
    "Tanh": {"Tanh": FIRST, "Mish": _mish},
    "Softmax": {"Softmax": FIRST, "SafeSoftmax": FIRST, FLASH: WEIGHTS},
    "LogSoftmax": {"LogSoftmax": FIRST},
    "MatMul": {"Mm": BOTH, "Bmm": BOTH, "Mv": BOTH, "Dot": BOTH, "GroupedMm": BOTH, "Linear": BOTH,
        "Addmm": SECOND, "Addmv": SECOND, "Baddbmm": SECOND, "Addbmm": SECOND, FLASH: PRODUCTS},
    "AddV2": {"Add": BOTH}, "Mul": {"Mul": BOTH}, "Mean": {"Mean": FIRST},
    "Identity": {"Clone": FIRST, "Alias": FIRST},
    "Reshape": {"View": FIRST, "UnsafeView": FIRST, "ReshapeAlias": FIRST},
    "Conv2D": {"Convolution": BOTH}, "MaxPool": {"MaxPool2DWithIndices": FIRST},
}  # fmt: skip

# What C calls such an op; operators (`a + b`) have no name there and count as calls of the op.
CALLS = {
    "Relu": "relu", "Gelu": "gelu", "Silu": "silu", "Sigmoid": "sigmoid", "Tanh": "tanh",
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "MatMul": "matmul mm bmm mv dot",
    "AddV2": "add", "Mul": "mul multiply", "Mean": "mean", "Identity": "clone",
    "Reshape": "reshape view flatten ravel unflatten view_as reshape_as", "Conv2D": "conv2d",
    "MaxPool": "max_pool2d",
}  # fmt: skip
OPERATORS = ("MatMul", "AddV2", "Mul")

# Here an op is one that the program calls by name: what torch does inside other functions for its
# own ends is no op of the program (copies and views in `linear` and `contiguous`, biases, the
# factor of a dropout mask, the mean in a pool).
BY_NAME = ("AddV2", "Identity", "Mean", "Mul", "Reshape")


class Op(NamedTuple):
    """One executed op of a type."""

    node: Any
    name: str  # autograd's, without number
    creator: str | None  # the C function in which it ran; None: an operator of Python
    change: Change


class Record:
    """What autograd wrote down about one run: every node, and the C function that made it."""

    def __init__(self, ys: Sequence[torch.Tensor], calls: Sequence[tuple[int, int, str]]) -> None:
        self.nodes = list(behind(list(ys)))
        self.creators = {n: name for start, end, name in calls for n in range(start, end)}
        self.names = {node.name().rstrip("0123456789") for node in self.nodes}

    @property
    def is_single(self) -> bool:
        """Whether some of it was converted to another dtype and back."""
        return "ToCopyBackward" in self.names

    @property
    def hides(self) -> bool:
        """Whether a view was changed in place, which hides the node that did it."""
        return "CopySlices" in self.names

    def ops(self, op_type: str) -> list[Op]:
        changes = {f"{name}Backward": change for name, change in NODES[op_type].items()}
        return [
            Op(node, name, self.creators.get(node._sequence_nr()), changes[name])
            for node in self.nodes
            if (name := node.name().rstrip("0123456789")) in changes and fits(op_type, node)
        ]


def fits(op_type: str, node: Any) -> bool:
    """Whether a node that several ops share is one of the type."""
    if op_type != "Conv2D":
        return True
    return not node._saved_transposed and len(node._saved_stride) == 2


def is_called(op_type: str, op: Op) -> bool:
    """Whether the program called the op itself, and not a function that holds one."""
    if op.creator is None:
        return op_type in OPERATORS
    return op.creator.strip("_") in CALLS[op_type].split()


def recorded(call: Callable[[], Sequence[torch.Tensor]]) -> tuple[Sequence[torch.Tensor], Record]:
    """The results of a call and its record. A profiler notes which C functions Python calls."""
    number = torch.autograd._get_sequence_nr
    depth, start, calls = 0, 0, []

    def note(frame: Any, event: str, function: Any) -> None:
        nonlocal depth, start
        if event == "c_call":
            depth += 1
            start = number() if depth == 1 else start
        elif event in ("c_return", "c_exception"):
            depth -= 1
            if depth == 0 and (end := number()) > start:
                calls.append((start, end, getattr(function, "__name__", "")))

    sys.setprofile(note)
    try:
        ys = call()
    finally:
        sys.setprofile(None)
    return ys, Record(ys, calls)


def answers(
    ys: Sequence[torch.Tensor], dys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor],
    ops: Sequence[Op], k: float, l: float,  # noqa: E741
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients that are due if each of these ops is under the rule."""

    def hook(op: Op) -> Any:
        return op.node.register_hook(lambda dxs, gys: tuple(op.change(op.node, dxs, gys, k, l)))

    handles = [hook(op) for op in ops]
    try:
        return gradients(ys, dys, xs)
    finally:
        for handle in handles:
            handle.remove()


def gradients(
    ys: Sequence[torch.Tensor], dys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    found = by_backward.rotating(ys, xs, dys, retain_graph=True)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(xs, found, strict=True)]


def error(found: Sequence[torch.Tensor], due: Sequence[torch.Tensor]) -> float:
    """The largest relative error of a gradient; one that is as good as zero does not count."""
    floor = 1e-9 * max((float(d.norm()) for d in due), default=0.0) + 1e-300
    return max(
        (float((f - d).norm() / (d.norm() + floor)) for f, d in zip(found, due, strict=True)),
        default=0.0,
    )


# -- the rules -------------------------------------------------------------------------------------


def builtin_rule(op_type: str, k: float = K, l: float = L) -> Callable[..., Any]:  # noqa: E741
    """The op's own gradient times k, and times l for a second operand, without a formula."""
    return lambda dy, builtin: _times(builtin(dy), k, l)


def _times(answer: Any, k: float, l: float) -> Any:  # noqa: E741
    pair = answer if isinstance(answer, tuple | list) else (answer,)
    made = [None if d is None else d * f for d, f in zip(pair, (k, l), strict=False)]
    return tuple(made) if isinstance(answer, tuple | list) else made[0]


def rule(op_type: str, k: float = K, l: float = L) -> Callable[..., Any]:  # noqa: E741
    """The native gradient times k, and times l for a second operand, by ATen's own kernels."""
    native = NATIVE[op_type]

    @functools.wraps(native)  # its names say what it needs
    def scaled(*args: Any, **options: Any) -> Any:
        return _times(native(*args, **options), k, l)

    return scaled


def summed(dy: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A gradient of the broadcast result, for an operand of this shape."""
    return dy.sum_to_size(tuple(shape)) if tuple(dy.shape) != tuple(shape) else dy


def _add(dy: Any, a_shape: Any, b_shape: Any) -> Any:
    return summed(dy, a_shape), summed(dy, b_shape)


def _mul(dy: Any, a: Any, b: Any) -> Any:
    def one(this: Any, other: Any) -> Any:
        return summed(dy * other, this.shape) if isinstance(this, torch.Tensor) else None

    return one(a, b), one(b, a)


def _matmul(dy: Any, a: Any, b: Any) -> Any:
    rows = a.unsqueeze(0) if a.dim() == 1 else a
    columns = b.unsqueeze(1) if b.dim() == 1 else b
    dy = dy.unsqueeze(-1) if b.dim() == 1 else dy
    dy = dy.unsqueeze(-2) if a.dim() == 1 else dy
    da, db = dy @ columns.mT, rows.mT @ dy
    return summed(da, rows.shape).reshape(a.shape), summed(db, columns.shape).reshape(b.shape)


def _mean(dy: Any, x_shape: Any, axis: Any, keepdims: Any) -> Any:
    rank = len(x_shape)
    axes = range(rank) if axis is None or axis == () else [axis] if isinstance(axis, int) else axis
    axes = sorted(a % rank for a in axes) if rank else []
    if not keepdims:
        for a in axes:
            dy = dy.unsqueeze(a)
    count = 1
    for a in axes:
        count *= x_shape[a]
    return (dy / count).expand(tuple(x_shape))


def _conv2d(dy: Any, x: Any, w: Any, strides: Any, pad: Any, dilations: Any) -> Any:
    strides, dilations = pair(strides), pair(dilations)
    if isinstance(pad, str):
        sizes = w.shape[2:]
        pad = [0, 0] if pad == "valid" else [d * (n - 1) // 2 for d, n in zip(dilations, sizes)]  # noqa: B905
    groups = x.shape[-3] // w.shape[1]
    return torch.ops.aten.convolution_backward(
        dy, x, w, None, strides, pair(pad), dilations, False, [0, 0], groups, [True, True, False]
    )[:2]


def pair(value: Any) -> list[int]:
    found = [value] if isinstance(value, int) else list(value)
    return found * 2 if len(found) == 1 else found


def _max_pool(dy: Any, x: Any, y: Any, filter_size: Any, strides: Any, pad: Any) -> Any:
    size = pair(filter_size)
    steps = pair(strides) if strides not in (None, [], ()) else size
    for ceil in (False, True):
        options = (size, steps, pair(pad), [1, 1], ceil)
        again, where = torch.ops.aten.max_pool2d_with_indices(x, *options)
        if again.shape == y.shape:
            return torch.ops.aten.max_pool2d_with_indices_backward(dy, x, *options, where)
    raise AssertionError(f"no pooling of {tuple(x.shape)} gives {tuple(y.shape)}")


ATEN = torch.ops.aten
NATIVE: dict[str, Callable[..., Any]] = {
    "Relu": lambda dy, y: dy * (y > 0),
    "Gelu": lambda dy, x, approximate: ATEN.gelu_backward(dy, x,
        approximate="tanh" if approximate else "none"),
    "Silu": lambda dy, x: ATEN.silu_backward(dy, x),
    "Sigmoid": lambda dy, y: ATEN.sigmoid_backward(dy, y),
    "Tanh": lambda dy, y: ATEN.tanh_backward(dy, y),
    "Softmax": lambda dy, y, axis: ATEN._softmax_backward_data(dy, y, axis, y.dtype),
    "LogSoftmax": lambda dy, y, axis: ATEN._log_softmax_backward_data(dy, y, axis, y.dtype),
    "MatMul": _matmul, "AddV2": _add, "Mul": _mul, "Mean": _mean, "Identity": lambda dy: dy,
    "Reshape": lambda dy, x_shape: dy.reshape(tuple(x_shape)), "Conv2D": _conv2d,
    "MaxPool": _max_pool,
}  # fmt: skip
