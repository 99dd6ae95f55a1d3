"""Callables that contract tensors by matrix products, taken apart into these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """`linear` of the user's matrix product, or torch's own if nobody has a rule for it."""
    matmul = op(torch.matmul)
    if matmul is torch.matmul:
        return F.linear

    def by_matmul(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        y = matmul(input, weight.mT if weight.dim() > 1 else weight)
        return y if bias is None else y + bias

    return by_matmul


def add_product(*names: str) -> Callable[..., Any]:
    """`beta * input + alpha * (a @ b)`: `addmm` and the like, whose operands have these names."""

    def parts(op: Lookup, *args: Any, beta: float = 1, alpha: float = 1, **named: Any) -> Any:
        words = ("self", "input", *names)
        input, a, b = (*args, *[named[n] for n in words if n in named])
        return op(torch.matmul)(a, b) * alpha + input * beta

    return parts


def add_batch(op: Lookup, *args: Any, beta: float = 1, alpha: float = 1, **named: Any) -> Any:
    """`addbmm`: the sum of a batch of products."""
    words = ("self", "input", "batch1", "batch2")
    input, a, b = (*args, *[named[n] for n in words if n in named])
    return op(torch.bmm)(a, b).sum(0) * alpha + input * beta


def vdot(op: Lookup, input: Tensor, other: Tensor) -> Any:
    """A product of vectors, the first of which is conjugated."""
    return op(torch.dot)(input.conj(), other)


def sparse_product(op: Lookup, sparse: Tensor, dense: Tensor) -> Any:
    """A product of a sparse matrix."""
    return op(torch.matmul)(sparse, dense)


def grouped_product(
    op: Lookup,
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """`_grouped_mm`: a product for each expert, of the rows (or columns) that are its own."""
    if offs is None:
        y = op(torch.bmm)(input, mat2)
        return y if bias is None else y + bias
    if torch.compiler.is_compiling():
        raise PassedOverError(
            "torch._grouped_mm computes 'MatMul' inside, which is overridden, for groups whose "
            "sizes are known only when the program runs, so that torch.compile cannot build the "
            "rule in. Use torch.compiler.disable for it, or pass keep=[torch._grouped_mm]"
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
    """`multi_dot` and `chain_matmul`: products in the order that is cheapest, as torch has it."""
    xs = list(given[0]) if isinstance(given[0], list | tuple) else list(given)
    if len(xs) == 1:
        return xs[0]
    first, last = xs[0].dim() == 1, xs[-1].dim() == 1
    xs = [xs[0][None] if first else xs[0], *xs[1:-1], xs[-1][:, None] if last else xs[-1]]
    y = _product(
        op(torch.matmul), xs, _cheapest_splits([x.shape[0] for x in xs] + [xs[-1].shape[1]])
    )
    y = y[0] if first else y
    return y[..., 0] if last else y


def _product(matmul: Any, xs: Sequence[Any], at: dict[tuple[int, int], int]) -> Any:
    def between(i: int, j: int) -> Any:
        return xs[i] if i == j else matmul(between(i, at[i, j]), between(at[i, j] + 1, j))

    return between(0, len(xs) - 1)


def _cheapest_splits(sizes: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return where to split each run of matrices, so that the fewest numbers are multiplied."""
    count, cost = len(sizes) - 1, {}
    at: dict[tuple[int, int], int] = {}
    for i in range(count):
        cost[i, i] = 0
    for length in range(1, count):
        for i in range(count - length):
            j = i + length
            splits = range(i, j) if count != 3 else range(j - 1, i - 1, -1)
            each = {
                k: cost[i, k] + cost[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1]
                for k in splits
            }
            at[i, j] = min(each, key=each.__getitem__)  # the first of the least, as torch has it
            cost[i, j] = each[at[i, j]]
    return at


# -- sums of products -----------------------------------------------------------------------------

Labels = list[Any]


def einsum(op: Lookup, *args: Any, path: Sequence[int] | None = None) -> Any:
    """`einsum`, pair by pair, as torch does it: by `bmm`, or by `mul` where nothing is summed."""
    equation, operands = _equation(args)
    every, out = _parse(equation, operands)
    terms = [_diagonal(x, labels) for x, labels in zip(operands, every, strict=True)]
    for pair in _path(equation, operands, path):
        chosen = [terms[i] for i in pair]
        terms = [term for i, term in enumerate(terms) if i not in pair]
        needed = {*out, *(label for _, labels in terms for label in labels)}
        terms.append(_contract(op, chosen, needed))
    return _arrange(*terms[0], out)


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


def _path(
    equation: str, operands: Sequence[Any], path: Sequence[int] | None
) -> list[tuple[int, ...]]:
    """Return which terms are multiplied with which; the product becomes the last one."""
    count = len(operands)
    if path is not None:
        return [tuple(path[i : i + 2]) for i in range(0, len(path), 2)]
    if count > 2 and opt_einsum.enabled and opt_einsum.is_available():
        planner: Any = opt_einsum.get_opt_einsum()
        return planner.contract_path(equation, *operands, optimize=opt_einsum.strategy)[0]
    first = [(0, 1)] if count > 1 else []
    return first + [(0, left) for left in range(count - 2, 0, -1)]  # the product so far is last


def _parse(equation: str, operands: Sequence[Any]) -> tuple[list[Labels], Labels]:
    """The labels of each operand and of the result; axes under `...` are numbered from the end."""
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


def _diagonal(x: Tensor, labels: Labels) -> tuple[Any, Labels]:
    """A term in which no label stands twice."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            x = x.diagonal(0, i, j)
            labels = [n for k, n in enumerate(labels) if k not in (i, j)] + [label]
    return x, labels


def _contract(op: Lookup, terms: Sequence[Any], needed: set[Any]) -> tuple[Any, Labels]:
    if len(terms) == 1:
        return terms[0]
    (a, left), (b, right) = terms
    a, b = _broadcast(a, left, b, right), _broadcast(b, right, a, left)
    a, left = _sum_out(a, left, {*right, *needed})
    b, right = _sum_out(b, right, {*left, *needed})
    both = [n for n in left if n in right]
    batch, inner = [n for n in both if n in needed], [n for n in both if n not in needed]
    rows, columns = [n for n in left if n not in both], [n for n in right if n not in both]
    labels = [*batch, *rows, *columns]
    if not inner:
        a = _arrange(a, left, [*batch, *rows])[(..., *[None] * len(columns))]
        b = _arrange(b, right, [*batch, *columns])
        at = len(batch)
        b = b[(*[slice(None)] * at, *[None] * len(rows))]
        return op(torch.mul)(a, b), labels
    sizes = {**dict(zip(left, a.shape, strict=True)), **dict(zip(right, b.shape, strict=True))}
    a = _as_matrices(a, left, sizes, batch, rows, inner)
    b = _as_matrices(b, right, sizes, batch, inner, columns)
    return op(torch.bmm)(a, b).reshape([sizes[n] for n in labels]), labels


def _broadcast(x: Tensor, labels: Labels, other: Tensor, others: Labels) -> Any:
    """A term whose axes of length 1 are as long as those of the other."""
    sizes = dict(zip(others, other.shape, strict=True))
    return x.expand(
        [sizes.get(n, s) if s == 1 else s for n, s in zip(labels, x.shape, strict=True)]
    )


def _sum_out(x: Tensor, labels: Labels, needed: set[Any]) -> tuple[Any, Labels]:
    """A term without the axes that nothing else has."""
    axes = [i for i, n in enumerate(labels) if n not in needed]
    return (x.sum(axes) if axes else x), [n for n in labels if n in needed]


def _as_matrices(x: Tensor, labels: Labels, sizes: dict[Any, int], *groups: Labels) -> Any:
    """A term as a batch of matrices."""
    x = _arrange(x, labels, [n for group in groups for n in group])
    return x.reshape([_volume([sizes[n] for n in group]) for group in groups])


def _volume(sizes: Sequence[int]) -> int:
    volume = 1
    for size in sizes:
        volume *= size
    return volume


def _arrange(x: Tensor, labels: Labels, order: Labels) -> Any:
    x, labels = _sum_out(x, labels, set(order))
    return x.permute([labels.index(n) for n in order])


def tensordot(
    op: Lookup, a: torch.Tensor, b: torch.Tensor, dims: Any = 2, *more: Any, **named: Any
) -> Any:
    """`tensordot` as a sum of products over some axes."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if "dims_self" in named or more:  # torch.ops.aten.tensordot
        dims = named.get("dims_self", dims), named.get("dims_other", *more)
    if isinstance(dims, list | tuple) and len(dims) == 1:
        dims = dims[0]
    if not isinstance(dims, list | tuple):
        dims = range(-dims, 0), range(dims)
    left: Labels = [f"a{i}" for i in range(a.dim())]
    right: Labels = [f"b{i}" for i in range(b.dim())]
    for i, j in zip(*dims, strict=True):
        right[j] = left[i]
    rows, columns = [n for n in left if n not in right], [n for n in right if n not in left]
    out = [*rows, *columns]
    if len(out) == len(left) + len(right):  # a product of columns and rows
        a, b, left, right = a[..., None], b[..., None], [*left, "k"], [*right, "k"]
    return _arrange(*_contract(op, [(a, left), (b, right)], set(out)), out)


def inner(op: Lookup, input: Tensor, other: Tensor) -> Any:
    """A sum of products over the last axes."""
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
    y = einsum(op, "...i,oij->...oj", input1, weight)
    y = einsum(op, "...oj,...j->...o", y, input2)
    return y if bias is None else y + bias
