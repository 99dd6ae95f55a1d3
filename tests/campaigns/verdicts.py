"""What comes of a case, in all campaigns of the proof."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from regrad.errors import RegradError
from tests.campaigns.outcomes import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT, UNNAMED, WRONG  # noqa: F401


class Verdict(NamedTuple):
    """One case and its outcome; the detail says what came, or the program."""

    case: str
    outcome: str
    detail: str = ""


def judged(case: str, got: Any, due: Sequence[np.ndarray]) -> Verdict:
    """`got` holds Tensors or arrays, or is the error that came instead."""
    if isinstance(got, RegradError):
        return Verdict(case, REFUSED, shown(got))
    if isinstance(got, Exception):
        return Verdict(case, BROKEN, shown(got))
    found = arrays(got)
    if differ(found, due):
        return Verdict(case, SILENT, f"{brief(found)} instead of {brief(due)}")
    return Verdict(case, DELIVERED)


def arrays(got: Iterable[Any]) -> list[np.ndarray]:
    """The numbers of Tensors, or of arrays."""
    return [np.asarray(x._values() if hasattr(x, "_values") else x) for x in got]


def differ(found: Sequence[np.ndarray], due: Sequence[np.ndarray], tol: float = 1e-6) -> bool:
    """Whether two lists of arrays differ by more than rounding."""
    return len(found) != len(due) or any(
        a.shape != b.shape or not np.allclose(a, b, rtol=tol, atol=tol, equal_nan=True)
        for a, b in zip(found, due, strict=True)
    )


def shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def brief(arrays: Sequence[np.ndarray]) -> str:
    return str([np.round(a.reshape(-1)[:4], 4).tolist() for a in arrays])
