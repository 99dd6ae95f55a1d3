"""F2: the gradients of every op in every dtype and mode, to third order, in reverse and forward.

Every row of the table of samples (`tests/samples`) that has a gradient is differentiated once,
twice and three times. In float64 and complex128 on NumPy the numbers are compared with differences.
In other dtypes, on PyTorch's and JAX's data, in graphs and compiled they are compared with those
that float64 on NumPy has at the same inputs, rounded as the dtype has them. Forward mode must
give the sum of the gradient. A cell is *delivered* within the tolerance (`TOLERANCES`, of the
largest gradient, times the order), *explained* where inputs that differ by rounding change the
gradient as much, where it leaves the range of the dtype, or where a library has no such kernel,
*refused* by an error of regrad's, and *silent* where it returns other numbers. On JAX op by op, and
compiled, the first row of each op type runs.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

import regrad as rg
from regrad.errors import DTypeError, RegradError
from regrad.testing import gradient_report
from tests.campaigns import graphs
from tests.campaigns.outcomes import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT
from tests.campaigns.proof_page import table
from tests.campaigns.verdicts import Verdict, shown
from tests.campaigns.verdicts import arrays as arrays_of
from tests.helpers import sample_runs as runs
from tests.samples import Sample

TITLE = "every gradient"

TOLERANCES = {
    "float64": 1e-7, "float32": 2e-3, "float16": 0.06, "bfloat16": 0.25,
    "complex128": 1e-7, "complex64": 2e-3,
}  # fmt: skip
KINDS = {"f": ("float64", "float32", "float16", "bfloat16"), "c": ("complex128", "complex64")}
MODES = ("numpy", "torch", "jax", "graph", "jit")
CHUNK = 10  # rows in a job
ROWS = [row for row in runs.ROWS if row.order and any(map(runs.is_float, row.inputs))]
FIRST = {str(row) for row in {t: row for row in reversed(ROWS) for t in row.covers}.values()}

Arrays = list[np.ndarray]


def dtypes_of(row: Sample) -> tuple[str, ...]:
    kinds = {a.dtype.kind for a in row.inputs if runs.is_float(a)}
    return KINDS["c" if "c" in kinds else "f"]


def rounded(row: Sample, dtype: str) -> Arrays:
    """The inputs as a dtype has them."""
    real = {"complex128": "float64", "complex64": "float32"}.get(dtype, dtype)
    kinds = {"f": np.dtype(real), "c": np.dtype(dtype)}
    return [a.astype(kinds[a.dtype.kind]) if runs.is_float(a) else a for a in row.inputs]


def wide(arrays: Sequence[np.ndarray]) -> Arrays:
    """The same numbers in double precision."""
    kinds = {"f": np.float64, "V": np.float64, "c": np.complex128}
    return [a.astype(kinds.get(a.dtype.kind, a.dtype)) for a in arrays]


# -- what a mode gives -----------------------------------------------------------------------------


def derivatives(row: Sample, xs: list[Any], forward: bool) -> list[list[Any]]:
    """The gradients of order 1, 2 and so on; with `forward` their sums by forward mode instead."""
    if forward:
        return [[runs.tangent(row, xs, order)] for order in range(1, row.order + 1)]
    return [runs.gradient_tensors(row, xs, order) for order in range(1, row.order + 1)]


def ran(f: Callable[..., Any], arrays: Arrays, mode: str) -> Any:
    """What f makes of a list of arrays in a mode: lists of lists of Tensors, or arrays."""
    if mode == "graph":
        return graphs.in_graph(lambda *xs: f(list(xs)), arrays)
    xs = [runs.arrays_of("jax" if mode in ("jax", "jit") else mode, a) for a in arrays]
    if mode == "jit":
        return rg.jit(lambda *xs: f(list(xs)))(*[rg.asarray(x) for x in xs])
    return f(xs)


def found(row: Sample, arrays: Arrays, mode: str, forward: bool) -> list[Arrays]:
    """The numbers of `derivatives` in a mode."""
    return list(map(arrays_of, ran(lambda xs: derivatives(row, xs, forward), arrays, mode)))


def nth(row: Sample, forward: bool, i: int, arrays: Arrays) -> Arrays:
    """What float64 on NumPy gives, which differences have confirmed."""
    dxs = runs.gradients(row, wide(arrays), i + 1)
    return [np.asarray(sum(dx.sum() for dx in dxs))] if forward else dxs


# -- verdicts --------------------------------------------------------------------------------------


def cells(row: Sample) -> Iterator[tuple[str, str, bool]]:
    """The dtypes, modes and directions in which a row runs."""
    for dtype in dtypes_of(row):
        for mode in MODES:
            if (mode in ("jax", "jit") and str(row) not in FIRST) or not there(row, dtype, mode):
                continue
            for forward in (False, True)[: 2 if dtype in KINDS["f"] else 1]:
                yield dtype, mode, forward


def there(row: Sample, dtype: str, mode: str) -> bool:
    """Whether the library has the dtype, and the row runs in it."""
    if str(row) in runs.NEEDS_VALUES and mode in ("jit", "graph"):
        return False
    if dtype == "bfloat16" and mode not in ("jax", "jit"):
        return False
    library = {"jit": "jax", "graph": "numpy"}.get(mode, mode)
    return library in row.backends


def verdicts(row: Sample) -> Iterator[Verdict]:
    yield from differences(row)
    for dtype, mode, forward in cells(row):
        if (mode, forward, dtype) not in (("numpy", False, k[0]) for k in KINDS.values()):
            yield from compared(row, dtype, mode, forward)


def differences(row: Sample) -> Iterator[Verdict]:
    """Reverse mode in double precision on NumPy, order by order."""
    for order in range(1, row.order + 1):
        case = f"{dtypes_of(row)[0]}/numpy/reverse/{order} {row}"
        xs = [rg.asarray(a) for a in row.inputs]
        report = gradient_report(row.f, xs, order=order, rtol=row.rtol)
        outcome = (DELIVERED, "checked") if report.ok else (SILENT, str(report)[:300])
        yield Verdict(case, *outcome)


def compared(row: Sample, dtype: str, mode: str, forward: bool) -> Iterator[Verdict]:
    arrays = rounded(row, dtype)
    names = [
        f"{dtype}/{mode}/{'forward' if forward else 'reverse'}/{order} {row}"
        for order in range(1, row.order + 1)
    ]
    try:
        got = found(row, arrays, mode, forward)
    except Exception as error:
        yield from (Verdict(name, *refusal(error)) for name in names)
        return
    for i, name in enumerate(names):
        right = functools.partial(nth, row, forward, i)
        tolerance = TOLERANCES[dtype] * (i + 1)
        yield Verdict(name, *judged(arrays, dtype, got[i], right, tolerance))


def refusal(error: Exception) -> tuple[str, str]:
    """An error: of a kernel that a library lacks, of regrad's, or of nobody's."""
    if isinstance(error, DTypeError):
        return EXPLAINED, "the library has no such kernel"
    return (REFUSED if isinstance(error, RegradError) else BROKEN), shown(error)


def judged(
    arrays: Arrays, dtype: str, got: Arrays, right: Callable[[Arrays], Arrays], tolerance: float
) -> tuple[str, str]:
    expected = right(arrays)
    error = distance(wide(got), expected)
    if error <= tolerance:
        return DELIVERED, "checked"
    if beyond(expected, dtype):
        return EXPLAINED, "beyond the range of the dtype"
    if error <= tolerance + 8 * wobble(arrays, dtype, expected, right):
        return EXPLAINED, "rounding decides"
    return SILENT, f"off by {error:.3g} of the largest gradient"


def distance(got: Arrays, expected: Arrays) -> float:
    """The largest difference, in units of one plus the largest gradient."""
    with np.errstate(all="ignore"):
        parts = [
            np.abs(a - b).max(initial=0) / (1 + np.abs(b).max(initial=0))
            for a, b in zip(got, expected, strict=True)
        ]
    return float("inf") if any(np.isnan(p) for p in parts) else max(parts, default=0.0)


def beyond(expected: Arrays, dtype: str) -> bool:
    """Whether a number that is due, or its square, leaves the range of the dtype."""
    return any(np.abs(b).max(initial=0) ** 2 > float(ml_dtypes.finfo(dtype).max) for b in expected)


def wobble(arrays: Arrays, dtype: str, expected: Arrays, right: Callable[..., Arrays]) -> float:
    """How far the right gradient moves when every input moves by a rounding of the dtype."""
    rng, eps = np.random.default_rng(0), float(ml_dtypes.finfo(dtype).eps)
    change = lambda a: a * (1 + eps * rng.uniform(-1, 1, a.shape)) if runs.is_float(a) else a  # noqa: E731
    return max(distance(right([*map(change, wide(arrays))]), expected) for _ in range(4))


# -- jobs ------------------------------------------------------------------------------------------


def jobs(quick: bool = False) -> list[str]:
    """`0/10`: the place of the first row, and how many there are; quick: every twentieth ten."""
    return [f"{i}/{CHUNK}" for i in range(0, len(ROWS), CHUNK * (20 if quick else 1))]


def run(job: str, quick: bool = False) -> list[Verdict]:
    first, count = map(int, job.split("/"))
    rows = ROWS[first : first + (2 if quick else count)]
    return [verdict for row in rows for verdict in verdicts(row)]


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """Dtype, mode, direction and order; and the sample. What is explained, by its reason too."""
    cell, _, row = case.partition(" ")
    return (f"{cell} {detail}" if outcome == EXPLAINED else cell), row


# -- the page --------------------------------------------------------------------------------------


def tables(classes: Sequence[Mapping[str, Any]]) -> str:
    """Return the counts of cells by dtype and mode: delivered, of those that ran."""
    every: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for each in classes:
        dtype, mode, direction, _ = each["class"].partition(" ")[0].split("/")
        every[dtype, mode, direction][each["outcome"]] += each["count"]
    rows = []
    for dtype, mode in dict.fromkeys((d, m) for d in TOLERANCES for m in MODES):
        counts = [every.get((dtype, mode, way)) for way in ("reverse", "forward")]
        rows += [[f"{dtype}, {mode}", *map(share, counts)]] if any(counts) else []
    heads = ["", "reverse", "forward"]
    return f"Delivered, of the cells that ran:\n\n{table(heads, rows, numbers=2)}"


def share(counts: Counter[str] | None) -> str:
    return f"{counts[DELIVERED]:,} of {sum(counts.values()):,}" if counts else "–"
