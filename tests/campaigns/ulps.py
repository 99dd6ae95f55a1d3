"""F7: eager, graph and compiled, to the last digit.

Values and first gradients of every row of the table of samples, in float64 and float32, in a graph
and compiled by XLA, are compared with eager NumPy's in units in the last place (ulps) of the larger
of the two, element by element; what is smaller than a thousandth of the largest element counts as
that. A row is *delivered* up to `NEAR` ulps. Beyond that it is *explained* if inputs that differ by
one rounding change eager's own result by an eighth as much (XLA fuses ops and sums in another
order; what is ill-conditioned shows it), or if eager mode computes the same on JAX's arrays: JAX
has other approximations of functions than NumPy and SciPy have. Else it is *silent*.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import regrad as rg
from regrad.errors import RegradError
from tests.campaigns import numerics
from tests.campaigns.outcomes import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT
from tests.campaigns.proof_page import table
from tests.campaigns.verdicts import Verdict, shown
from tests.campaigns.verdicts import arrays as arrays_of
from tests.helpers import sample_runs as runs
from tests.samples import Sample

TITLE = "ulps"

MODES = ("graph", "jit")
BOUNDS = (0, 1, 2, 4, 8, 16, 64, 256, 1024)  # of the histogram
NEAR = 64
CHUNK = 10
FLOAT = {"float32": np.float32, "float64": np.float64}
ROWS = [
    row
    for row in runs.ROWS
    if any(a.dtype.kind == "f" for a in row.inputs)
    and not any(a.dtype.kind == "c" for a in row.inputs)
    and str(row) not in runs.NEEDS_VALUES
]

Arrays = list[np.ndarray]


def results(row: Sample, xs: list[Any]) -> list[Any]:
    """The values, and the gradients if there are any."""
    ys = runs.outputs(row.f(*[rg.asarray(x) for x in xs]))
    return [*ys, *(runs.gradient_tensors(row, xs, 1) if row.order else [])]


def ran(row: Sample, arrays: Arrays, mode: str) -> Arrays:
    return arrays_of(numerics.ran(lambda xs: results(row, xs), arrays, mode))


def apart(found: Arrays, due: Arrays) -> float:
    """The largest distance in ulps."""
    return max((distance(a, b) for a, b in zip(found, due, strict=True)), default=0.0)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    if a.dtype.kind != "f" or not a.size:
        return 0.0 if np.array_equal(a, b) else float("inf")
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    known = np.isfinite(a)
    if not np.array_equal(a[~known], b[~known], equal_nan=True):
        return float("inf")
    size = np.maximum(np.abs(a[known]), np.abs(b[known]))
    unit = np.spacing(np.maximum(size, size.max(initial=0) / 1000))
    return float((np.abs(a[known] - b[known]) / unit).max(initial=0))


def wobble(row: Sample, arrays: Arrays, due: Arrays) -> float:
    """How far eager's result moves when every input moves by a rounding."""
    rng = np.random.default_rng(0)
    moved = [
        [a + np.spacing(a) * rng.choice([-1, 0, 1], a.shape).astype(a.dtype)
         if a.dtype.kind == "f" else a for a in arrays]
        for _ in range(4)
    ]  # fmt: skip
    return max(apart(ran(row, xs, "numpy"), due) for xs in moved)


def judged(row: Sample, dtype: str, mode: str) -> Verdict:
    arrays = [a.astype(FLOAT[dtype]) if a.dtype.kind == "f" else a for a in row.inputs]
    due = ran(row, arrays, "numpy")
    try:
        got = ran(row, arrays, mode)
    except Exception as error:
        outcome = REFUSED if isinstance(error, RegradError) else BROKEN
        return Verdict(f"{dtype}/{mode}/none {row}", outcome, shown(error))
    found = apart(got, due)
    case = f"{dtype}/{mode}/{bucket(found)} {row}"
    if found <= NEAR:
        return Verdict(case, DELIVERED, f"{found:.3g} ulps")
    moves = wobble(row, arrays, due)
    outcome = EXPLAINED if found <= 8 * moves or as_jax_has_it(row, arrays, got) else SILENT
    return Verdict(case, outcome, f"{found:.3g} ulps; a rounding of the inputs makes {moves:.3g}")


def as_jax_has_it(row: Sample, arrays: Arrays, got: Arrays) -> bool:
    """Whether eager mode computes the same on JAX's arrays."""
    return apart(got, ran(row, arrays, "jax")) <= NEAR


def bucket(found: float) -> str:
    return next((str(bound) for bound in BOUNDS if found <= bound), "more")


# -- jobs ------------------------------------------------------------------------------------------


def jobs(quick: bool = False) -> list[str]:
    return [str(i) for i in range(0, len(ROWS), CHUNK * (20 if quick else 1))]


def run(job: str, quick: bool = False) -> list[Verdict]:
    rows = ROWS[int(job) : int(job) + (2 if quick else CHUNK)]
    return [judged(row, dtype, mode) for row in rows for dtype in FLOAT for mode in MODES
            if mode != "jit" or "jax" in row.backends]  # fmt: skip


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """Dtype, mode and the bound of the histogram; and the sample."""
    cell, _, row = case.partition(" ")
    return cell, row


# -- the page --------------------------------------------------------------------------------------


def tables(classes: Sequence[Mapping[str, Any]]) -> str:
    """Return the histogram: how many rows are at most so many ulps away."""
    counts: Counter[tuple[str, str]] = Counter()
    for each in classes:
        cell, _, bound = each["class"].rpartition("/")
        counts[cell, bound] += each["count"]
    names = [*map(str, BOUNDS), "more"]
    heads = ["0", *[f"≤ {bound}" for bound in names[1:-1]], "more"]
    rows = [
        [cell.replace("/", ", "), *[f"{counts[cell, name]:,}" for name in names]]
        for cell in dict.fromkeys(cell for cell, _ in counts)
    ]
    return table(["ulps", *heads], rows, numbers=len(names))
