"""Writes docs/benchmarks.md and the README's table from the records in `results/`.

`page.md` is the page's prose. A line `[[tape]]` in it is replaced by the newest tables of that
suite, `[[runs]]` by a list of the runs, and `[[behind]]` by the rows in which regrad is behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench import costs, report
from bench.report import Row
from bench.results import Result, factor, newest

ROOT = Path(__file__).parents[1]
PROSE = Path(__file__).parent / "page.md"
PAGE, PLOT, README = ROOT / "docs/benchmarks.md", ROOT / "docs/benchmarks.svg", ROOT / "README.md"
START, END = "<!-- benchmarks -->", "<!-- end of benchmarks -->"

# The README's rows: suite, measure and peer, then the titles of measure and peer in the README.
CHOSEN = [
    ("tape", "100 custom ops", "autograd",
     "100 custom ops, forward and backward", "HIPS autograd's `primitive`, `defvjp`"),
    ("jit", "step of a transformer", "torch",
     "a compiled training step of a transformer", "PyTorch eager"),
    ("calls", "compiled call: a dict of two", "jax.jit",
     "a call of a compiled function of a dict of two small Tensors", "`jax.jit`"),
    ("torch", "ResNet-18 step in torch, guided ReLU", "Function",
     "a training step of ResNet-18 in PyTorch, guided ReLU by `regrad.rules`",
     "a hand-written `autograd.Function`"),
    ("torch", "Step of a tiny MLP in torch, nothing matched", "no scope",
     "a step of a tiny MLP in PyTorch, in a scope whose rules match nothing", "no scope"),
]  # fmt: skip

Results = Mapping[str, list[Result]]


def write() -> None:
    """Write the page, its picture and the README's table."""
    from bench.plot import draw

    found = newest()
    names = suites()
    draw([(name, found[name][0].rows) for name in names], PLOT, digest(found))
    PAGE.write_text(page(found), encoding="utf-8")
    README.write_text(with_rows(README.read_text(encoding="utf-8"), found), encoding="utf-8")


def suites() -> list[str]:
    """Return the suites in the order of the prose."""
    names = report.marks(PROSE.read_text(encoding="utf-8"))
    return [name for name in names if name not in ("runs", "behind")]


def page(found: Results) -> str:
    """Return the page: the prose with tables at the marks."""
    names = suites()
    if set(names) != set(found):
        raise ValueError(f"page.md has marks for {sorted(names)}, results are of {sorted(found)}")
    first = {name: found[name][0] for name in names}
    blocks = {name: tables(found[name]) for name in names}
    blocks |= {"runs": runs(found, names), "behind": behind(first)}
    return report.filled(PROSE.read_text(encoding="utf-8"), blocks)


def digest(found: Results) -> str:
    """Return a hash of the rows in the picture."""
    shown = [(name, found[name][0].rows) for name in suites()]
    return hashlib.sha256(repr(shown).encode()).hexdigest()


def runs(found: Results, names: list[str]) -> str:
    lines = [
        "| suite | date | machine | bounds | code since | record |",
        "|---|---|---|---|---|---|",
    ]
    for result in (result for name in names for result in found[name]):
        facts = result.suite, result.date, result.place, result.verdict
        cells = *facts, since(result), link(result)
        lines.append(report.table_line(cells))
    return "\n".join(lines)


def link(result: Result) -> str:
    return f"[rows](../bench/results/{result.file})"


def tables(results: list[Result]) -> str:
    """Return the newest table, with the tables of other machines folded."""
    newest, *others = results
    folded = [
        f"<details><summary>{r.date}, {r.place}: {r.verdict}</summary>\n\n{table(r)}\n\n</details>"
        for r in others
    ]
    return "\n\n".join([table(newest), *folded])


def table(result: Result) -> str:
    facts = f"{result.date}, {result.place}. {result.command}. {result.versions}."
    parts = ", ".join(costs.MEASURED[result.suite])
    age = f"Since this run, {since(result)} changed the measured code ({parts})."
    return f"{facts} {age}\n\n{report.table(result.rows)}"


def since(result: Result) -> str:
    """The role by which the site counts the commits since a run when it is built."""
    return f"{{since}}`{result.suite}; {costs.commit_of(result)}`"


def behind(first: Mapping[str, Result]) -> str:
    """Return rows that miss their bounds, and rows without a verdict where the peer is faster."""
    missed = [(n, row) for n, r in first.items() for row in r.rows if row.met is False]
    slower = [(n, row) for n, r in first.items() for row in r.rows if is_slower(row)]
    return (
        f"Behind their bounds:\n\n{listing(missed)}\n\n"
        f"Slower than a peer by more than a twentieth, without a verdict:\n\n{listing(slower)}"
    )


def is_slower(row: Row) -> bool:
    found = factor(row)
    return row.met is None and found is not None and found.median > 1.05


def listing(rows: list[tuple[str, Row]]) -> str:
    lines = ["| suite | measure | against | ratio (quartiles) | bound |", "|---|---|---|--:|--:|"]
    cells = [(name, row.title, row.peer, row.ratio, row.bound) for name, row in rows]
    return "\n".join([*lines, *map(report.table_line, cells)])


# -- the README ------------------------------------------------------------------------------


def with_rows(readme: str, found: Results) -> str:
    """Return the README with the chosen rows. Ratios above 1 are bold."""
    before, _, rest = readme.partition(START)
    used = [found[suite][0] for suite, *_ in CHOSEN]
    runs = "; ".join(dict.fromkeys(f"{result.date}, {result.place}" for result in used))
    lines = ["| what | against | ratio |", "|---|---|---|", *chosen(found)]
    age = "(the [site](docs/benchmarks.md) counts the commits since)"
    block = "\n".join([START, f"Medians, one thread, {runs} {age}:", "", *lines, END])
    return before + block + rest.partition(END)[2]


def chosen(found: Results) -> Iterator[str]:
    for suite, title, peer, what, against in CHOSEN:
        rows = found[suite][0].rows
        (ratio,) = [factor(r) for r in rows if (r.title, r.peer) == (title, peer)]
        assert ratio is not None
        text = f"{ratio.median:.2f}"
        yield report.table_line((what, against, f"**{text}**" if ratio.median > 1 else text))
