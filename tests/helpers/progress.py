"""A plugin of pytest: how far the tests are, and how to repeat one that fails."""

from __future__ import annotations

import shlex
import time
from typing import Any

from tests.helpers import choices

EVERY = 15.0  # seconds between two lines


class Progress:
    """Lines of plain text, instead of a dot for each test that passes."""

    def __init__(self, session: Any, terminal: Any) -> None:
        self.session, self.terminal = session, terminal
        self.verbose = terminal.verbosity > 0
        self.done = self.failed = 0
        self.start = self.last = time.monotonic()
        self.first = 0.0  # when the first test ran: files are read for half a minute before

    def pytest_report_teststatus(self, report: Any) -> Any:
        plain = report.when == "call" and report.passed and not hasattr(report, "wasxfail")
        return ("passed", "", "") if plain and not self.verbose else None

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.failed += report.failed
        self.done += report.when == "teardown"
        now = time.monotonic()
        self.first = self.first or now
        if self.done and now - self.last >= EVERY and not self.verbose:
            self.last = now
            total = self.session.testscollected
            self.terminal.ensure_newline()
            seconds = now - self.start, now - self.first
            self.terminal.write_line(line(self.done, total, self.failed, *seconds))


def line(done: int, total: int, failed: int, seconds: float, running: float) -> str:
    """Return how far it is; from 1 % on also what is left, by the seconds since the first test."""
    share = f"{100 * done // max(total, 1)} %: {done:,} of {total:,} tests, {failed} failed"
    left = f", about {clock(running / max(done, 1) * (total - done))} min left"
    return f"{share}, {clock(seconds)} min so far{left if 100 * done >= total else ''}"


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def describe(item: Any, report: Any) -> None:
    """Add the seed, and the command that runs the test again, to the report of a failure."""
    given = {**getattr(getattr(item, "callspec", None), "params", {}), **dict(item.user_properties)}
    lines = [f"seed {given['seed']}"] if "seed" in given else []
    report.sections.append(("to repeat it", "\n".join([*lines, repeat(item.nodeid)])))


def repeat(node: str) -> str:
    target, option = ("test", "--proof ") if choices.level == "proof" else (choices.level, "")
    if not set(node) & set("'\"$`\\!"):
        return f"""make {target} ARGS='{option}"{node}"'"""
    words = f"ARGS={option}{shlex.quote(node)}".replace("$", "$$")  # ($$: a dollar sign of make)
    return f"make {target} {shlex.quote(words)}"
