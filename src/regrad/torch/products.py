"""Decompositions of callables that contract tensors by matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import opt_einsum

from regrad.errors import PassedOverError
from regrad.torch.parts import Lookup


def linear(op: Lookup, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """`linear` as a matrix product."""
    return product(op)(input, weight, bias)


def product(op: Lookup) -> Callable[..., Any]:
    """Return `linear` by the user's matrix product; torch's own `linear` without a rule for it."""
    matmul = op(torch.matmul)
    if matmul is torch.matmul:
        return F.linear

    def by_matmul(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        y = matmul(input, weight.mT if weight.dim() > 1 else weight)
        return y if bias is None else y + bias

    return by_matmul


def add_product(
    product: Callable[..., Any], names: Sequence[str], op: Lookup, *args: Any,
    beta: float = 1, alpha: float = 1, **named: Any,
) -> Any:  # fmt: skip
    """`beta * input + alpha * (a @ b)`: `addmm` and similar; `names` has the operands' names."""
    input, a, b = (*args, *[named[n] for n in ("self", "input", *names) if n in named])
    return product(op, a, b) * alpha + input * beta


def matrix_product(op: Lookup, sparse: Tensor, dense: Tensor) -> Any:
    """A product of matrices; the first may be sparse."""
    return op(torch.matmul)(sparse, dense)


def sum_of_products(op: Lookup, a: Tensor, b: Tensor) -> Any:
    """The sum of a batch of products."""
    return op(torch.bmm)(a, b).sum(0)


def vdot(op: Lookup, input: Tensor, other: Tensor) -> Any:
    """A product of vectors; the first is conjugated."""
    return op(torch.dot)(input.conj(), other)


def grouped_product(
    op: Lookup,
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """`_grouped_mm`: one product per expert, of the expert's rows (or columns)."""
    if offs is None:
        y = op(torch.bmm)(input, mat2)
        return y if bias is None else y + bias
    if torch.compiler.is_compiling():
        raise PassedOverError(
            "torch._grouped_mm computes 'MatMul' inside, which is overridden, for groups whose "
            "sizes are known only at run time, so torch.compile cannot build the rule in. Use "
            "torch.compiler.disable for it, or pass keep=[torch._grouped_mm]"
        )
    ends = offs.tolist()
    ranges = list(zip([0, *ends], ends, strict=False))
    matmul = op(torch.matmul)
    if input.dim() == 2 and mat2.dim() == 2:
        return torch.stack([matmul(input[:, i:j], mat2[i:j]) for i, j in ranges])
    if input.dim() == 2:
        found = [matmul(input[i:j], mat2[n]) for n, (i, j) in enumerate(ranges)]
        rest = input.shape[0] - ends[-1]
        return torch.cat([*found, found[0].new_zeros(rest, mat2.shape[-1])])
    found = [matmul(input[n], mat2[:, i:j]) for n, (i, j) in enumerate(ranges)]
    rest = mat2.shape[-1] - ends[-1]
    return torch.cat([*found, found[0].new_zeros(input.shape[-2], rest)], -1)


# -- chains ---------------------------------------------------------------------------------------


def chain(op: Lookup, *given: Any) -> Any:
    """`multi_dot` and `chain_matmul`: products in the cheapest order, as torch orders them."""
    xs = list(given[0]) if isinstance(given[0], list | tuple) else list(given)
    if len(xs) == 1:
        return xs[0]
    matmul, first, last = op(torch.matmul), xs[0].dim() == 1, xs[-1].dim() == 1
    xs = [xs[0][None] if first else xs[0], *xs[1:-1], xs[-1][:, None] if last else xs[-1]]
    sizes = [x.shape[0] for x in xs] + [xs[-1].shape[1]]
    order = -1 if len(xs) == 3 else 1  # the order in which torch searches for the cheapest split

    @cache
    def best(i: int, j: int) -> tuple[int, int]:
        """Return the cost of multiplying a run of matrices, and the index at which to split it."""
        if i == j:
            return 0, i
        splits = [
            (best(i, k)[0] + best(k + 1, j)[0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k)
            for k in range(i, j)[::order]
        ]
        return min(splits, key=itemgetter(0))

    def between(i: int, j: int) -> Any:
        at = best(i, j)[1]
        return xs[i] if i == j else matmul(between(i, at), between(at + 1, j))

    y = between(0, len(xs) - 1)
    y = y[0] if first else y
    return y[..., 0] if last else y


# -- sums of products -----------------------------------------------------------------------------

Labels = list[Any]


def einsum(op: Lookup, *args: Any, path: Sequence[int] | None = None) -> Any:
    """`einsum`, pair by pair as in torch: by `bmm`, or by `mul` without a sum.

    torch ignores axes of length 1. A pair that sums only over such axes is a `mul`.
    """
    equation, operands = _equation(args)
    every, out = _parse(equation, operands)
    rest = {label for labels in every for label in labels} - {*out}
    order = [*out, *sorted(rest, key=lambda label: (isinstance(label, str), label))]
    terms = [_align(x, labels, order) for x, labels in zip(operands, every, strict=True)]
    # by summed axis: the number of terms that have it
    counts = {n: sum(x.shape[n] != 1 for x in terms) for n in range(len(out), len(order))}
    for i, j in _path(equation, operands, path):
        a, b = terms[i], terms[j]
        terms = [term for n, term in enumerate(terms) if n not in (i, j)]
        axes = []
        for n, count in counts.items():
            both = a.shape[n] != 1 and b.shape[n] != 1
            if both and count == 2:
                axes.append(n)
            elif count == 1 and a.shape[n] != 1:
                a = a.sum(n, keepdim=True)
            elif count == 1 and b.shape[n] != 1:
                b = b.sum(n, keepdim=True)
            counts[n] -= both
        made = _multiply(op, a, b, axes) if axes else op(torch.mul)(a, b)
        terms = [made, *terms] if path is None and not _is_planned(operands) else [*terms, made]
        counts.update(dict.fromkeys(axes, 0))
    return terms[0].reshape(terms[0].shape[: len(out)])


def _equation(args: Sequence[Any]) -> tuple[str, list[Any]]:
    if not isinstance(args[0], str):  # einsum(x, [0, 1], y, [1, 2], [0, 2])
        words = [_letters(a) for a in args[1::2]]
        if len(args) % 2:
            words = [_letters(a) for a in args[1:-1:2]]
            return ",".join(words) + "->" + _letters(args[-1]), list(args[:-1:2])
        return ",".join(words), list(args[::2])
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    return args[0], list(operands)


def _letters(labels: Any) -> str:
    return "".join("..." if n is Ellipsis else chr(n + (65 if n < 26 else 71)) for n in labels)


def _is_planned(operands: Sequence[Any]) -> bool:
    """Return whether opt_einsum determines the order of the products."""
    return len(operands) > 2 and opt_einsum.enabled and opt_einsum.is_available()


def _path(
    equation: str, operands: Sequence[Any], path: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Return the pairs of terms to multiply; by default in order."""
    if path is not None:
        pairs = [(path[i], path[i + 1]) for i in range(0, len(path), 2)]
    elif _is_planned(operands):
        planner: Any = opt_einsum.get_opt_einsum()
        pairs = planner.contract_path(equation, *operands, optimize=opt_einsum.strategy)[0]
    else:
        pairs = [(0, 1)] * (len(operands) - 1)
    return [(min(pair), max(pair)) for pair in pairs]


def _parse(equation: str, operands: Sequence[Any]) -> tuple[list[Labels], Labels]:
    """Return the labels of each operand and the result; axes under `...` count from the end."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    words = left.split(",")
    every = [
        _expand(w, x.dim() - len(w.replace("...", "")))
        for w, x in zip(words, operands, strict=True)
    ]
    flat = [label for labels in every for label in labels]
    dots = sorted({label for label in flat if isinstance(label, int)})
    if arrow:
        return every, _expand(right, len(dots))
    once = sorted({c for c in flat if isinstance(c, str) and flat.count(c) == 1})
    return every, [*dots, *once]


def _expand(word: str, dots: int) -> Labels:
    before, found, after = word.partition("...")
    return [*before, *(range(-dots, 0) if found else ()), *after]


def _align(x: Tensor, labels: Labels, order: Labels) -> Any:
    """Permute the axes of a term to an order: length 1 for a missing axis, once for a double."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            x = x.diagonal(0, i, j)
            labels = [n for k, n in enumerate(labels) if k not in (i, j)] + [label]
    x = x.permute([labels.index(n) for n in order if n in labels])
    return x[tuple(slice(None) if n in labels else None for n in order)]


def _multiply(op: Lookup, a: Tensor, b: Tensor, axes: Sequence[int]) -> Any:
    """Return the product of two terms, summed over some axes, by `bmm`."""
    rest = [n for n in range(a.dim()) if n not in axes]
    batch = [n for n in rest if a.shape[n] != 1 and b.shape[n] != 1]
    rows = [n for n in rest if n not in batch and a.shape[n] != 1]
    columns = [n for n in rest if n not in batch and n not in rows]
    if rows and columns and columns[-1] < rows[0]:  # the order of the axes in the result
        a, b, rows, columns = b, a, columns, rows
    left, right = (batch, rows, axes, columns), (batch, axes, columns, rows)
    y = op(torch.bmm)(_as_matrices(a, *left), _as_matrices(b, *right))
    order = [n for group in left for n in group]
    sizes = [*[a.shape[n] for n in (*batch, *rows)], *[1] * len(axes)]
    sizes += [b.shape[n] for n in columns]
    return y.reshape(sizes).permute([order.index(n) for n in range(len(order))])


def _as_matrices(x: Tensor, *groups: Sequence[int]) -> Any:
    """Reshape a term to a batch of matrices; the axes of the last group have length 1."""
    return x.permute([n for group in groups for n in group]).reshape(
        [math.prod(x.shape[n] for n in group) for group in groups[:3]]
    )


def tensordot(
    op: Lookup, a: torch.Tensor, b: torch.Tensor, dims: Any = 2, *more: Any, **named: Any
) -> Any:
    """`tensordot` by `mm`; if all axes are summed, by `dot`, or by `mul` where torch does so."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if "dims_self" in named or more:  # torch.ops.aten.tensordot
        dims = named.get("dims_self", dims), named.get("dims_other", *more)
    if isinstance(dims, list | tuple) and len(dims) == 1:
        dims = dims[0]
    if not isinstance(dims, list | tuple):
        dims = range(-dims, 0), range(dims)
    left, right = [i % a.dim() for i in dims[0]], [j % b.dim() for j in dims[1]]
    for i, j in zip(left, right, strict=True):
        if b.shape[j] == 1:
            a = a.sum(i, keepdim=True)
        elif a.shape[i] == 1:
            b = b.sum(j, keepdim=True)
    rows = [i for i in range(a.dim()) if i not in left]
    columns = [j for j in range(b.dim()) if j not in right]
    out = [*[a.shape[i] for i in rows], *[b.shape[j] for j in columns]]
    sizes = math.prod(out[: len(rows)]), math.prod(out[len(rows) :])
    count = math.prod(a.shape[i] for i in left)
    a, b = a.permute([*rows, *left]), b.permute([*right, *columns])
    if sizes != (1, 1) or a.device.type == "mps":
        y = op(torch.mm)(a.reshape(sizes[0], count), b.reshape(count, sizes[1]))
    elif a.is_contiguous() and b.is_contiguous():
        y = op(torch.dot)(a.flatten(), b.flatten())
    else:
        y = op(torch.mul)(a.squeeze(), b.squeeze()).sum()
    return y.reshape(out)


def inner(op: Lookup, input: Tensor, other: Tensor) -> Any:
    """The sum of products over the last axes."""
    if not input.dim() or not other.dim():
        return op(torch.mul)(input, other)
    return tensordot(op, input, other, ([-1], [-1]))


def bilinear(
    op: Lookup,
    input1: Tensor,
    input2: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Any:
    """`x1 @ weight @ x2`, by two products."""
    shape, columns = input1.shape[:-1], weight.shape[0]
    x1 = input1.reshape(math.prod(shape), 1, input1.shape[-1], 1)
    x2 = input2.reshape(math.prod(shape), 1, 1, input2.shape[-1])
    y = _multiply(op, _multiply(op, x1, weight[None], [2]), x2, [3]).reshape(*shape, columns)
    return y if bias is None else y + bias
