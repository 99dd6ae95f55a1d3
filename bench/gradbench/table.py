"""The report of a run: the validity of the results, and their times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import geometric_mean, median
from typing import NamedTuple

from bench import report

from .checkout import PYTHON_PEERS
from .session import Session

GRADIENTS = ("gradient", "jacobian", "dir")
CLOSED_FORM = "ode"  # `manual` has a formula for the result and does not differentiate its loop
Rounds = Mapping[tuple[str, str], Sequence[Session]]


class Figure(NamedTuple):
    """A function at a size: the time of each tool, by round."""

    eval: str
    function: str
    size: str
    rounds: dict[str, dict[int, float]]

    def seconds(self, tool: str) -> float:
        return median(self.rounds[tool].values())

    def ratios(self, peer: str) -> list[float]:
        """Return regrad's time divided by the peer's, round by round."""
        ours, theirs = self.rounds["regrad"], self.rounds[peer]
        return [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]

    def fastest(self) -> str | None:
        """Return the fastest of the tools in Python."""
        there = [name for name in PYTHON_PEERS if name in self.rounds]
        return min(there, key=self.seconds, default=None)


def markdown(
    about: Iterable[str], whole: Mapping[str, Session], rounds: Rounds, tools: Sequence[str]
) -> str:
    figures = list(gathered(rounds, tools))
    lines = [f"# GradBench, {report.today()}", "", *about, ""]
    lines += ["## Valid answers", "", *validity(whole, rounds, tools), ""]
    count = max(len(sessions) for sessions in rounds.values())
    lines += [f"## Times (rounds: {count})", "", *times(figures, tools), ""]
    lines += [*summary(figures), ""]
    lines += ["How to read this: [bench/gradbench/README.md](../gradbench/README.md).", ""]
    return "\n".join(lines)


def verdict(session: Session) -> str:
    """Return `12 of 12 valid`, or the reason if there is no count."""
    count, valid = len(session.evaluations), sum(e.valid is True for e in session.evaluations)
    if not count:
        return session.failure or "no answer"
    errors = [e.error.splitlines()[-1] for e in session.evaluations if not e.valid and e.error]
    reasons = [*errors[:1], session.failure]
    return "; ".join([f"{valid} of {count} valid", *(reason for reason in reasons if reason)])


def validity(whole: Mapping[str, Session], rounds: Rounds, tools: Sequence[str]) -> Iterable[str]:
    """Return a row for each eval: regrad at all default sizes, then all tools at timed sizes."""
    head = [["regrad, all default sizes"] if whole else [], [f"{t}, timed sizes" for t in tools]]
    yield report.table_line(["eval", *head[0], *head[1]])
    yield report.table_line(["---"] * (1 + len(head[0]) + len(head[1])))
    for name in dict.fromkeys(name for name, _ in rounds):
        ours = [verdict(whole[name])] if whole else []
        yield report.table_line([name, *ours, *(worst(rounds[name, tool]) for tool in tools)])


def worst(sessions: Sequence[Session]) -> str:
    """Return the verdict of the round with the fewest valid results."""
    return verdict(min(sessions, key=lambda s: sum(e.valid is True for e in s.evaluations)))


def gathered(rounds: Rounds, tools: Sequence[str]) -> Iterable[Figure]:
    for name in dict.fromkeys(name for name, _ in rounds):
        found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
        for tool in tools:
            for number, session in enumerate(rounds[name, tool]):
                for e in session.evaluations:
                    if e.seconds is not None and e.valid:
                        entry = found.setdefault((e.function, e.size), {})
                        entry.setdefault(tool, {})[number] = e.seconds
        for (function, size), entry in found.items():
            if "regrad" in entry:
                yield Figure(name, function, size, entry)


def times(figures: Sequence[Figure], tools: Sequence[str]) -> Iterable[str]:
    """Yield a row for each figure: regrad's time, the peers' times with ratios, and the bound."""
    peers = [tool for tool in tools if tool != "regrad"]
    heads = ["eval", "function", "size", "regrad", *peers, "fastest in Python", "bound", "met"]
    yield report.table_line(heads)
    yield report.table_line(["---"] * 3 + ["--:"] * (len(peers) + 3) + ["---"])
    for figure in figures:
        against, limit, met = judged(figure)
        yield report.table_line(
            [
                *figure[:3],
                report.time(figure.seconds("regrad")),
                *(beside(figure, peer) for peer in peers),
                against,
                "" if limit is None else f"≤ {report.times(limit)}",
                {True: "yes", False: "NO", None: ""}[met],
            ]
        )


def beside(figure: Figure, peer: str) -> str:
    """Return the peer's time, with the median of regrad's ratios to it."""
    if not figure.rounds.get(peer):
        return ""
    theirs = report.time(figure.seconds(peer))
    return f"{theirs} ({report.times(median(figure.ratios(peer)))})"


def judged(figure: Figure) -> tuple[str, float | None, bool | None]:
    """Return the ratio to the fastest tool in Python, with its spread, bound and verdict."""
    if (peer := figure.fastest()) is None:
        return "", None, None
    ratios = figure.ratios(peer)
    limit = 1.3 if figure.seconds(peer) < 1e-3 else 1.0
    spread = f"{report.times(median(ratios))} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{peer} {spread}", limit, median(ratios) <= limit


def summary(figures: Sequence[Figure]) -> Iterable[str]:
    met = [judged(figure)[2] for figure in figures]
    verdicts = [entry for entry in met if entry is not None]
    yield f"{sum(verdicts)} of {len(verdicts)} bounds are met."
    gradients = [f for f in figures if f.function in GRADIENTS and f.rounds.get("manual")]
    for text, chosen in (
        ("", gradients),
        (f" but {CLOSED_FORM}'s", [f for f in gradients if f.eval != CLOSED_FORM]),
    ):
        if chosen:
            mean = geometric_mean([median(f.ratios("manual")) for f in chosen])
            yield f"Geometric mean of regrad / manual over all gradients{text}: {mean:.2f}."
