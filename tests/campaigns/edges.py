"""F6: values and gradients at ±0, ±infinity, NaN, ties, and the ends of the range.

*Points.* Every elementwise op of one or two tensors that PyTorch, JAX, NumPy or SciPy has as well
is computed at 15 special numbers, or all pairs of them, on NumPy's, PyTorch's and JAX's data, and
differentiated; so are reductions and norms of all pairs. A value is *delivered* where it agrees
with all of those libraries that have the function, a gradient where it agrees with one. They are
*explained* where a convention of docs/conventions.md or the limit says otherwise (`REASONS`), and
*silent* where nothing does.

*Fills.* Every row of the table of samples is computed and differentiated with all its floats
replaced: by zeros, infinities, NaN, one NaN, equal numbers (ties; singular matrices, equal
eigenvalues), subnormal and the largest numbers. Value and gradient must come, in the dtype of the
sample and the shapes of its inputs, or an error of regrad's must say why not, and no other. The
numbers are not compared: the second implementations of the table are for its own numbers.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np
import scipy.special
import torch

import regrad as rg
from regrad.errors import RegradError
from tests.campaigns.verdicts import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT, Verdict, shown
from tests.helpers import sample_runs as runs
from tests.samples import Sample

TITLE = "edges"

Arrays = list[np.ndarray]
SMALL, TINY, LARGE = 5e-324, np.finfo(float).tiny, np.finfo(float).max
POINTS = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, SMALL, -SMALL, TINY, LARGE, -LARGE,
                   1.0, -1.0, 0.5, -0.5, 2.0])  # fmt: skip
LIBRARIES = ("numpy", "torch", "jax")

# -- points ----------------------------------------------------------------------------------------

EXACT = SimpleNamespace(gelu=partial(jax.nn.gelu, approximate=False))  # as all others have it
SPACES = {
    "regrad": (rg, rg.linalg, rg.nn),
    "numpy": (np, scipy.special, np.linalg),
    "torch": (torch, torch.nn.functional, torch.special, torch.linalg),
    "jax": (EXACT, jnp, jax.nn, jax.scipy.special, jax.lax, jnp.linalg),
}
NAMES = {  # other names of the same function: in NumPy and SciPy, PyTorch, JAX
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh",
    "atanh": "arctanh", "atan2": "arctan2", "pow": "power", "lgamma": "gammaln", "digamma": "psi",
    "sigmoid": "expit", "max": "amax", "min": "amin", "cumulative_sum": "cumsum",
    "cumulative_prod": "cumprod",
}  # fmt: skip
PARAMETERS = {"LeakyRelu": {"alpha": 0.01}}  # what the others have as their default
# Functions of the rows of all pairs, and what regrad and the others are told besides the axis.
REDUCTIONS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("all", "any", "argmax", "argmin", "count_nonzero", "cumulative_prod",
        "cumulative_sum", "log_softmax", "logsumexp", "max", "mean", "median", "min", "prod",
        "softmax", "sum")},
    "std": {"correction": 0},
    "var": {"correction": 0},
    **{f"vector_norm:{p}": {"ord": p} for p in (-np.inf, -2, -1, -0.5, 0, 0.5, 1, 2, 3, np.inf)},
}  # fmt: skip


@cache
def op_types() -> list[str]:
    """Elementwise op types of one or two tensors that another library has, too; and reductions."""
    pointwise = [t for t in rg.op_types() if is_pointwise(rg.find_op(t)) and any(references(t))]
    return pointwise + list(REDUCTIONS)


def is_pointwise(op: Any) -> bool:
    return op.elementwise and len(op.inputs) in (1, 2) and all(i.kind == "one" for i in op.inputs)


def references(op_type: str) -> Iterator[tuple[Arrays, list[Arrays]]]:
    """Values, and gradients where there are any, of the other libraries."""
    name, told = function(op_type).__name__, options(op_type)
    for library in PEERS:
        for f in named(name, library)[:1]:
            try:
                yield PEERS[library](partial(f, **told), points(op_type))
            except (AttributeError, TypeError, ValueError, RuntimeError):
                continue  # it takes other arguments, or other dtypes, or returns one bool


def named(name: str, library: str) -> list[Any]:
    """The functions of this name in a library."""
    names = [NAMES.get(name, name), name]
    return [f for space in SPACES[library] for n in names if (f := vars(space).get(n))]


def function(op_type: str) -> Any:
    """regrad's own."""
    if op_type not in REDUCTIONS:
        return rg.find_op(op_type).function
    return named(op_type.partition(":")[0], "regrad")[0]


def options(op_type: str) -> dict[str, Any]:
    return {"axis": 1, **REDUCTIONS[op_type]} if op_type in REDUCTIONS else {}


def points(op_type: str) -> Arrays:
    if op_type in REDUCTIONS:
        return [np.stack(np.meshgrid(POINTS, POINTS), -1).reshape(-1, 2)]
    if len(rg.find_op(op_type).inputs) == 1:
        return [POINTS]
    return [grid.ravel() for grid in np.meshgrid(POINTS, POINTS)]


def by_numpy(f: Any, xs: Arrays) -> tuple[np.ndarray, Arrays]:
    with np.errstate(all="ignore"):
        return np.asarray(f(*xs)), []


def by_torch(f: Any, xs: Arrays) -> tuple[np.ndarray, Arrays]:
    leaves = [torch.tensor(x, requires_grad=True) for x in xs]
    y = f(*leaves)
    if not y.requires_grad:
        return y.numpy(), []
    dxs = torch.autograd.grad(y.sum(), leaves, allow_unused=True)
    return y.detach().numpy(), [
        np.zeros_like(x) if dx is None else dx.numpy() for dx, x in zip(dxs, xs, strict=True)
    ]


def by_jax(f: Any, xs: Arrays) -> tuple[np.ndarray, Arrays]:
    y = np.asarray(f(*xs))
    if y.dtype.kind != "f":
        return y, []
    dxs = jax.grad(lambda *xs: f(*xs).sum(), argnums=tuple(range(len(xs))))(*map(jnp.asarray, xs))
    return y, [np.asarray(dx) for dx in dxs]


PEERS: dict[str, Callable[..., Any]] = {"numpy": by_numpy, "torch": by_torch, "jax": by_jax}


def by_regrad(op_type: str, library: str) -> list[np.ndarray]:
    """The value and the gradients by each input."""
    f = partial(function(op_type), **options(op_type), **PARAMETERS.get(op_type, {}))
    tensors = [rg.asarray(runs.arrays_of(library, x)) for x in points(op_type)]
    y = f(*tensors)
    if y.dtype.kind != "f":
        return runs.numbers(y)
    total = lambda *xs: rg.sum(f(*xs))  # noqa: E731
    return runs.numbers([y, *rg.grads(total, unconnected="zero")(tensors)])


def at_points(op_type: str, library: str) -> Iterator[Verdict]:
    """A verdict for each point: of the value, and of the gradient by each input."""
    try:
        found = by_regrad(op_type, library)
    except Exception as error:
        outcome = REFUSED if isinstance(error, RegradError) else BROKEN
        yield Verdict(f"points/{library}/{op_type}", outcome, shown(error))
        return
    rights = [[value, *gradients] for value, gradients in references(op_type)]
    for i, got in enumerate(found):
        known = [right[i] for right in rights if len(right) > i]
        agrees = np.array([close(got, right) for right in known])
        xs = points(op_type)
        for j, numbers in enumerate(xs[0] if op_type in REDUCTIONS else zip(*xs, strict=True)):
            what = "value" if i == 0 else f"gradient {i}"
            case = (
                f"points/{library}/{op_type} {what} at {', '.join(map(str, map(float, numbers)))}"
            )
            some = not known or agrees[:, j].any()
            if not known or agrees[:, j].all() or (i and some):
                yield Verdict(case, DELIVERED, "" if known else "nobody else has it")
                continue
            point = Point(op_type, library, i, numbers, got[j], some)
            held = (why for ops, test, why in REASONS if fits(op_type, ops) and test(point))
            reason = next(held, None)
            others = [right[j].tolist() for right in known]
            detail = reason or f"{got[j]} where others have {others}"
            yield Verdict(case, EXPLAINED if reason else SILENT, detail)


def close(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        near = np.isclose(a, b, rtol=1e-6, atol=1e-300, equal_nan=True)
    return near.reshape(len(near), -1).all(1)


class Point(NamedTuple):
    """A number that not all others have: what of (0: the value), where, and what it is."""

    op_type: str
    library: str
    what: int
    xs: Sequence[float]
    got: Any
    some: bool  # whether one of the others has it


def fits(op_type: str, ops: str) -> bool:
    return not ops or op_type in ops.split()


def subnormal(p: Point) -> bool:
    return any(map(subnormal_at, p.xs)) and bool(p.what or p.some)


def subnormal_at(x: float) -> bool:
    return 0 < abs(x) <= TINY


def largest(p: Point) -> bool:
    return LARGE in np.abs(p.xs)


def tied(p: Point) -> bool:
    return len(p.xs) == 2 and p.xs[0] == p.xs[1]


# Op types (none: any), a test, and why a number differs from that of all others: the first counts.
REASONS: list[tuple[str, Callable[[Point], Any], str]] = [
    ("", lambda p: p.what and np.isnan(p.got).any() and np.isnan(p.xs).any(), "NaN in, NaN out"),
    ("Sign", lambda p: np.isnan(p.xs[0]) and p.some, "NaN has no sign (conventions)"),
    ("Lgamma", lambda p: p.xs[0] == -np.inf and p.got == np.inf,
     "infinite at both ends (conventions)"),
    ("Lgamma", lambda p: p.xs[0] in (1, 2) and abs(p.got) < 1e-15, "a root, which JAX may round"),
    ("Digamma", lambda p: p.xs[0] == 0 and p.some,
     "a pole, which is NaN on JAX's data (conventions)"),
    ("FloorMod", lambda p: largest(p) and p.some,
     "the quotient overflows, which is NaN on PyTorch's data (conventions)"),
    ("log_softmax", lambda p: np.inf in p.xs and p.some, "NaN next to an infinity (conventions)"),
    ("median", lambda p: p.what == 0 and largest(p) and abs(p.got) == LARGE,
     "the mean of the largest numbers does not overflow (conventions)"),
    ("std var", lambda p: largest(p) and p.some,
     "the mean of the largest numbers overflows (conventions)"),
    ("max min median", lambda p: p.what and np.isnan(p.xs).any(),
     "the gradient of a NaN goes to the NaN (conventions)"),
    ("logsumexp", lambda p: p.what and p.xs[0] == p.xs[1] == -np.inf,
     "elements of -infinity do not count"),
    ("vector_norm:0.5", lambda p: p.what and 0 in p.xs and np.isinf(p.xs).any(),
     "0 at a zero (conventions)"),
    (" ".join(t for t in REDUCTIONS if "norm" in t), largest,
     "a power of the largest number overflows, or is subnormal"),
    ("Acosh", lambda p: np.isnan(p.got) and p.xs[0] < 1, "out of the domain: NaN"),
    ("Copysign", lambda p: np.isnan(p.xs[0]), "the sign of a NaN is kept apart"),
    ("Maximum Minimum NextAfter", tied, "a tie's gradient goes to the first (conventions)"),
    ("Hypot", lambda p: p.got == 0, "0 at the zero vector (conventions)"),
    ("Pow", lambda p: p.what == 2 and p.got == 0 and not p.xs[0] > 0,
     "0 by the exponent where the base is not positive (conventions)"),
    ("Pow", lambda p: p.what == 1 and p.got == 0 and p.xs[1] == 0,
     "0: a power of 0 is a constant (conventions)"),
    ("LeakyRelu", lambda p: p.what == 1 and p.xs[0] == 0, "alpha (conventions)"),
    ("Xlogy", lambda p: p.got == 0 and p.xs[0] == 0, "0 where a is (conventions)"),
    ("Xlogy", lambda p: p.library == "jax" and p.got == 0 and subnormal_at(p.xs[0]),
     "0 where a is (conventions), which XLA has for a subnormal number"),
    ("Softsign", lambda p: np.isinf(p.xs[0]) and p.got == 0, "the limit"),
    ("Gelu", lambda p: np.isinf(p.xs[0]) and p.got == (p.xs[0] > 0), "the limit"),
    ("", subnormal, "a subnormal number: the derivative overflows, or XLA has 0 for it"),
]  # fmt: skip

# -- fills -----------------------------------------------------------------------------------------


def one_nan(a: np.ndarray) -> np.ndarray:
    filled = a.copy()
    filled.reshape(-1)[:1] = np.nan
    return filled


FILLS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "0": np.zeros_like, "-0": lambda a: -np.zeros_like(a), "1": np.ones_like,
    "inf": lambda a: np.full_like(a, np.inf), "-inf": lambda a: np.full_like(a, -np.inf),
    "NaN": lambda a: np.full_like(a, np.nan), "one-NaN": one_nan,
    "subnormal": lambda a: np.full_like(a, SMALL), "largest": lambda a: np.full_like(a, LARGE),
}  # fmt: skip
ROWS = [row for row in runs.ROWS if any(map(runs.is_float, row.inputs))]
CHUNK = 20


def filled(row: Sample, fill: str, library: str) -> Verdict:
    arrays = [FILLS[fill](a) if runs.is_float(a) else a for a in row.inputs]
    case = f"fills/{library}/{fill} {row}"
    xs = [runs.arrays_of(library, a.copy()) for a in arrays]
    try:
        ys = runs.numbers(row.f(*[rg.asarray(x) for x in xs]))
        dxs = runs.gradients(row, xs, 1) if row.order else []
    except Exception as error:
        return Verdict(case, REFUSED if isinstance(error, RegradError) else BROKEN, shown(error))
    floats = runs.floats_of(row, arrays)
    if dxs and [(a.shape, a.dtype) for a in dxs] != [(a.shape, a.dtype) for a in floats]:
        return Verdict(case, SILENT, "a gradient of another shape or dtype")
    usual = runs.numbers(row.f(*[rg.asarray(x) for x in runs.inputs_of(row, library)]))
    if [y.dtype for y in ys] != [y.dtype for y in usual]:
        return Verdict(case, SILENT, "a value of another dtype")
    return Verdict(case, DELIVERED)


# -- jobs ------------------------------------------------------------------------------------------


def jobs(quick: bool = False) -> list[str]:
    """`points/torch/Pow`, `fills/numpy/40`: an op type, or the first of some rows."""
    step = 15 if quick else 1
    points = [f"points/{library}/{t}" for library in LIBRARIES for t in op_types()[::step]]
    firsts = range(0, len(ROWS), CHUNK * step)
    return points + [f"fills/{lib}/{i}" for lib in ("numpy", "torch") for i in firsts]


def run(job: str, quick: bool = False) -> list[Verdict]:
    kind, library, name = job.split("/")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if kind == "points":
            return list(at_points(name, library))
        rows = ROWS[int(name) : int(name) + (2 if quick else CHUNK)]
        rows = [row for row in rows if library in row.backends]
        return [filled(row, fill, library) for row in rows for fill in FILLS]


def class_of(case: str, outcome: str, detail: str) -> tuple[str, str]:
    """The kind, library and fill; of points that are explained the reason."""
    group, _, name = case.partition(" ")
    kind, library, which = group.split("/")
    if kind == "fills":
        return group, name
    if outcome == EXPLAINED:
        return f"{kind}: {detail}", f"{which} {name}, on {library}"
    return group, f"{which} {name}"
