"""The memory that a backward pass keeps, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from regrad.core.reports import Table
from regrad.inspection.recorder import Kept, RunRecorder


@dataclass(frozen=True, slots=True)
class Saved:
    """The memory kept by ops of one type that one line runs: bytes, and the number of arrays."""

    op_type: str
    line: str
    path: str
    size: int
    count: int


@dataclass(frozen=True)
class SavedBytes:
    """The memory that a backward pass keeps, by op type, line and module, largest first."""

    rows: tuple[Saved, ...]

    @classmethod
    def of(cls, kept: Iterable[Kept]) -> SavedBytes:
        """Group (op type, line, path, bytes) tuples, one per array."""
        sums: dict[tuple[str, str, str], tuple[int, int]] = {}
        for op_type, line, path, size in kept:
            total, count = sums.get((op_type, line, path), (0, 0))
            sums[op_type, line, path] = total + size, count + 1
        rows = [Saved(*key, size, count) for key, (size, count) in sums.items()]
        return cls(tuple(sorted(rows, key=lambda row: -row.size)))

    @property
    def total(self) -> int:
        """Return the total number of bytes."""
        return sum(row.size for row in self.rows)

    def by_op_type(self) -> dict[str, int]:
        """Return bytes by op type, largest first."""
        sums: dict[str, int] = {}
        for row in self.rows:
            sums[row.op_type] = sums.get(row.op_type, 0) + row.size
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def table(self) -> Table:
        """Return the rows as a table: op, bytes, share, arrays, source line, module."""
        total = self.total or 1
        return Table(
            ("op", "saved", "share", "arrays", "source line", "module"),
            [
                (row.op_type, size_text(row.size), f"{row.size / total:.0%}", str(row.count),
                 row.line, row.path)
                for row in self.rows
            ],
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.table()}\n{size_text(self.total)} in all"

    def _repr_html_(self) -> str:
        return self.table().html([f"{size_text(self.total)} in all"])


def size_text(size: int) -> str:
    """Return a number of bytes in a suitable unit: `1.2 MB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def measured(recorder: RunRecorder) -> Callable[..., SavedBytes]:
    """Return the function that runs a recorder, and sums up the kept memory."""
    return lambda *args, **options: SavedBytes.of(recorder.kept(args, options))
