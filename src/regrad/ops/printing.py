"""Tensors as text: `t.print()` follows TensorFlow.js, `repr` follows NumPy.

`str` follows TensorFlow.js as well. Where TensorFlow.js would round digits away, `str` uses
exponents, by NumPy's rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.core.backends import is_here, is_traced
from regrad.core.signatures import public
from regrad.core.tensor import Tensor, TensorLike
from regrad.errors import ArgumentError

if TYPE_CHECKING:
    from regrad.core.tensor import Tensor

OPTIONS: dict[str, Any] = {}  # options of NumPy, set by `set_printoptions`
SHOWN_WHOLE = 20  # a longer axis shows only its first and last EDGE entries
EDGE = 3
DECIMALS = 7


def to_string(t: TensorLike, verbose: bool = False) -> str:
    """Return a Tensor or Variable as TensorFlow.js prints it.

    `verbose` adds dtype, rank and shape. Numbers are rounded to seven decimals (a scalar is shown
    in full), columns are padded to the same width, and an axis longer than 20 shows its first and
    last three entries.

    Source: `Tensor.toString` of TensorFlow.js, reproduced character by character.

    >>> import regrad as rg
    >>> rg.tensor([[1, 20], [300, 1 / 3]]).print()
    Tensor
        [[1  , 20       ],
         [300, 0.3333333]]
    """
    t = _held(t)
    head = ["Tensor", *(_heading(t) if verbose else ())]
    return "\n".join([*head, *(f"    {line}" for line in _lines(t))])


def text_of(t: TensorLike) -> str:
    """Return a Tensor or Variable as `str` shows it.

    The format follows TensorFlow.js, except where NumPy uses exponents: for numbers from 1e8, below
    1e-4, or that differ by a factor of more than 1000. NumPy formats such values.

    >>> import regrad as rg
    >>> print(rg.tensor([1e-9, 2e-9]))
    Tensor
        [1.e-09, 2.e-09]
    """
    t = _held(t)
    if t.ndim and not is_traced(t._data) and is_here(t._data):
        values = _plain(t)
        if _needs_exponents(values):
            with np.printoptions(**OPTIONS):
                body = np.array2string(values, separator=", ", prefix="    ")
            return f"Tensor\n    {body}"
    return to_string(t)


def _options() -> dict[str, Any]:
    return {**np.get_printoptions(), **OPTIONS}


def _needs_exponents(values: np.ndarray) -> bool:
    """Return whether NumPy writes these numbers with exponents."""
    if values.dtype.kind not in "fc" or _options()["suppress"]:
        return False
    sizes = np.abs(np.stack([np.real(values), np.imag(values)]))
    sizes = sizes[np.isfinite(sizes) & (sizes != 0)]
    if not sizes.size:
        return False
    least, most = float(sizes.min()), float(sizes.max())
    return most >= 1e8 or least < 1e-4 or most / least > 1000


@public
def set_printoptions(
    *,
    precision: int | None = None,
    threshold: int | None = None,
    edgeitems: int | None = None,
    linewidth: int | None = None,
    suppress: bool | None = None,
) -> None:
    """Set how `str` and `repr` show Tensors. Without arguments, restore NumPy's options.

    Args:
        precision: The number of digits after the decimal point.
        threshold: The number of elements from which a Tensor is abbreviated.
        edgeitems: The number of entries at each end of an abbreviated axis.
        linewidth: The number of characters per line.
        suppress: Whether to show small numbers as 0 and to avoid exponents.

    Omitted options have the values of `numpy.set_printoptions`. `t.print()`, and `str` of numbers
    that need no exponents, follow TensorFlow.js, which has no options.

    Raises:
        ArgumentError: NumPy rejects an option.

    Source: `numpy.set_printoptions`.

    >>> import regrad as rg
    >>> rg.set_printoptions(precision=2)
    >>> rg.tensor([1 / 3, 1000.0])
    Tensor([3.33e-01, 1.00e+03], dtype=float32)
    >>> rg.set_printoptions()
    """
    given = {
        "precision": precision, "threshold": threshold, "edgeitems": edgeitems,
        "linewidth": linewidth, "suppress": suppress,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    try:
        with np.printoptions(**given):
            pass
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"set_printoptions: {error}") from error
    OPTIONS.clear()
    OPTIONS.update(given)


def to_html(t: TensorLike) -> str:
    """Return a Tensor or Variable as notebooks show it: dtype, shape, and a table of its values.

    An axis longer than 20 shows its first and last three entries. Tensors of rank 3 or more are
    shown as text.
    """
    from html import escape

    t = _held(t)
    head = f"<p>{escape(type(t).__name__)}: {t.dtype}, shape {tuple(t.shape)}</p>"
    if is_traced(t._data) or not is_here(t._data) or not 1 <= t.ndim <= 2 or not t.size:
        return f"{head}<pre>{escape(repr_of(t))}</pre>"
    values = np.atleast_2d(_plain(t))
    rows = [[f"<td>{escape(cell)}</td>" for cell in _shown(row)] for row in _ends(values)]
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"{head}<table>{body}</table>"


def _ends(items: Any) -> list[Any]:
    """Return the first and last entries of a long axis, with "…" between them."""
    return ["…" if i is None else items[i] for i in _show_places(len(items))]


def _shown(row: Any) -> list[str]:
    if isinstance(row, str):
        return [row]
    return [x if isinstance(x, str) else f"{x:.6g}" if _is_float(x) else str(x) for x in _ends(row)]


def _is_float(x: Any) -> bool:
    return isinstance(x, float | np.floating) or type(x).__name__ == "bfloat16"


def _held(t: TensorLike) -> Tensor:
    """Return the Tensor that a Variable holds, without recording the read on a tape."""
    return getattr(t, "_tensor", t)


def _heading(t: TensorLike) -> list[str]:
    shape = ",".join(map(str, t.shape))
    return [f"  dtype: {t.dtype}", f"  rank: {t.ndim}", f"  shape: [{shape}]", "  values:"]


def _lines(t: TensorLike) -> list[str]:
    if is_traced(t._data):
        return [f"(traced by JAX: {t.dtype} {t.shape}, values come when it runs)"]
    if not is_here(t._data):
        return [f"({t.dtype} {t.shape}, in parts on several processes)"]
    values = _plain(t)
    if not t.ndim:
        return [_scalar(values.item())]
    return _block(values, _widths(values), last=True)


def _plain(t: TensorLike) -> np.ndarray:
    """Return the values. bfloat16 becomes float32, as its elements are not Python numbers."""
    values = t._values()
    return values.astype(np.float32) if values.dtype.kind == "V" else values


def _show_places(size: int) -> Iterator[int | None]:
    """Yield the indices of an axis that are shown, and None where entries are left out."""
    if size <= SHOWN_WHOLE:
        yield from range(size)
    else:
        yield from (*range(EDGE), None, *range(size - EDGE, size))


def _widths(values: np.ndarray) -> dict[int, int]:
    """Return the width of each shown column over all rows, shown or not; none for rank 1."""
    if values.ndim == 1 or not values.size:
        return {}
    rows = values.reshape(-1, values.shape[-1])
    return {j: _width(rows[:, j]) for j in _show_places(rows.shape[1]) if j is not None}


def _width(column: np.ndarray) -> int:
    """Return the width of a column. The search stops at the maximal possible width."""
    numbers = np.unique(column).tolist()  # sorted, so the longest is the first or the last
    longest = max(_most(numbers[0]), _most(numbers[-1]))
    width = 0
    for value in numbers:
        width = max(width, len(_text(value)))
        if width == longest:
            break
    return width


def _most(value: Any) -> float:
    """Return the maximal width of a number that has this number of digits before the point."""
    if isinstance(value, float) and math.isfinite(value):
        return len(f"{value:.{DECIMALS}f}")
    return math.inf


def _block(values: np.ndarray, widths: dict[int, int], last: bool) -> list[str]:
    """Return the lines of an array within its brackets. All but the last end with blank lines.

    TensorFlow.js writes an axis with a single line as ` [[1, 2],]`. regrad does the same.
    """
    if values.ndim == 1:
        return [_row(values, widths)]
    comma = "," if values.ndim == 2 else ""
    lines = []
    for i in _show_places(len(values)):
        lines += ["..."] if i is None else _block(values[i], widths, i == len(values) - 1)
    lines = [f"{' ' if i else '['}{line}{comma}" for i, line in enumerate(lines)] or ["["]
    foot = lines.pop()
    foot = foot.removesuffix(comma) if lines else f" {foot}"
    return [*lines, foot + ("]" if last else "]," + "\n" * (values.ndim - 1))]


def _row(values: np.ndarray, widths: dict[int, int]) -> str:
    items = [
        "..." if j is None else _text(values[j].item()).ljust(widths.get(j, 0))
        for j in _show_places(len(values))
    ]
    return f"[{', '.join(items)}]"


# -- numbers in JavaScript's format --------------------------------------------------------------


def _scalar(value: Any) -> str:
    """Return the text of a tensor of rank 0, the number in full."""
    return number(value) if isinstance(value, float) else _text(value)


def _text(value: Any) -> str:
    """Return the text of an element, rounded."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, complex):
        return f"{_text(value.real)} + {_text(value.imag)}j"
    return number(_rounded(value)) if isinstance(value, float) else str(value)


def _rounded(value: float) -> float:
    """Round `value` to seven decimals, with ties away from zero. (`round` has ties to even.)"""
    if not abs(value) < 1e21:  # also true for NaN
        return value
    over, under = abs(value).as_integer_ratio()
    unit = 10**DECIMALS
    return math.copysign((2 * over * unit + under) // (2 * under) / unit, value)


def number(value: float) -> str:
    """Format a double like JavaScript: `3`, `0.1`, `1e-7`, `1e+21`, `NaN`, `-Infinity`.

    NumPy finds the same shortest digits. Exponents begin at JavaScript's limits.
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if not value or 1e-6 <= abs(value) < 1e21:
        return np.format_float_positional(value or 0.0, trim="-")
    return np.format_float_scientific(value, trim="-", exp_digits=1)


# -- NumPy's style -------------------------------------------------------------------------------


def repr_of(t: TensorLike) -> str:
    """Return a Tensor or Variable in NumPy's format, always with the dtype.

    The shape is shown where it does not follow from the values.

    >>> import regrad as rg
    >>> rg.tensor([0, 1])
    Tensor([0., 1.], dtype=float32)
    """
    t = _held(t)
    if is_traced(t._data):
        return f"Tensor(<traced by JAX>, shape={t.shape}, dtype={t.dtype})"
    if not is_here(t._data):
        return f"Tensor(<in parts on several processes>, shape={t.shape}, dtype={t.dtype})"
    values = _plain(t)
    with np.printoptions(**OPTIONS):
        body = np.array2string(values, separator=", ", prefix="Tensor(", suffix=",")
    options = _options()
    hidden = not t.size or t.size > options["threshold"]
    tail = f"shape={t.shape}, dtype={t.dtype})" if hidden else f"dtype={t.dtype})"
    text = f"Tensor({body}, {tail}"
    if len(text.rpartition("\n")[2]) <= options["linewidth"]:
        return text
    return f"Tensor({body},\n{' ' * len('Tensor(')}{tail}"
