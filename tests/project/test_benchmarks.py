"""The page of benchmarks is made of what is recorded."""

import re

import pytest

from bench import costs, page, report, results, timing
from bench.plot import draw
from bench.report import Row

ROWS = [
    Row("100 sin", "2 µs", "torch", "1 µs", "2.00 × (1.90 to 2.10)", "≤ 1.50 ×", False),
    Row("memory", "1 MB", "", "", "", "≤ 2 MB", True),
    Row("sort", "1 µs", "torch", "2 µs", "0.50 ×", "", None),
    Row("exp", "1 µs", "torch", "1 µs", "1.00 ×", "≤ 2.00 ×", None, "1.10 × (0.90 to 1.20)"),
]
AGAIN = "run python -m bench page"


def test_the_page_is_made_of_the_results():
    found = results.newest()
    assert page.page(found) == page.PAGE.read_text(encoding="utf-8"), AGAIN
    assert page.digest(found) in page.PLOT.read_text(encoding="utf-8"), AGAIN
    readme = page.README.read_text(encoding="utf-8")
    assert page.with_rows(readme, found) == readme, AGAIN


def test_reports_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "2026-01-02-machine.md"
    path.write_text(report.markdown({"tape": ROWS, "jit": ROWS[:1]}, 0.5), encoding="utf-8")
    tape, jit = results.read(path)
    assert (tape.rows, jit.rows) == (ROWS, ROWS[:1])
    assert (tape.suite, tape.date, tape.machine) == ("tape", report.today(), report.described())
    assert "load average 0.5" in tape.command and not tape.alone
    assert tape.verdict == "1 of 2 bounds are met"


def test_there_is_a_verdict_only_where_the_peer_agrees_with_itself():
    samples = {"regrad": [1.0] * 9, "torch": [2.0] * 9, "torch, again": [2.08] * 9}
    (row,) = report.compared("exp", samples, {"torch": 1.0})
    assert row.met is True and row.again.startswith("1.04 ×") and report.cells(row)[-1] == "yes"
    samples["torch, again"] = [2.12] * 9
    (row,) = report.compared("exp", samples, {"torch": 1.0})
    assert row.met is None and report.cells(row)[-1] == report.UNSTEADY
    assert report.summary([row, *ROWS]) == (
        "1 of 2 bounds are met. No verdict for 2 with an unsteady peer."
    )


def test_a_peer_is_measured_twice_in_each_round():
    order = []
    samplers = {n: lambda n=n: order.append(n) or 1.0 for n in ("regrad", "torch")}
    samples = timing.interleaved(samplers, 2)
    assert order == ["regrad", "torch", "torch"] * 2
    assert set(samples) == {"regrad", "torch", "torch, again"}


def test_tables_without_the_ratio_of_the_peer_to_itself_are_read():
    (row,) = results.rows_of("| 100 sin | 2 µs | torch | 1 µs | 2.00 × | ≤ 1.50 × | NO |")
    assert row == ROWS[0]._replace(ratio="2.00 ×")


@pytest.mark.slow
def test_the_newest_result_of_each_machine_counts(tmp_path, monkeypatch):
    def record(name, date, suites, machine="One"):
        text = report.markdown(dict.fromkeys(suites, ROWS), 0.5)
        text = text.replace(report.today(), date).replace(report.described(), machine)
        (tmp_path / f"{name}.md").write_text(text, encoding="utf-8")

    record("old", "2026-01-01", ["tape", "jit"])
    record("all", "2026-01-02", ["tape", "jit"])
    record("alone", "2026-01-02", ["jit"])
    record("other", "2026-01-01", ["jit"], "Two")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    found = {suite: [r.file for r in each] for suite, each in results.newest().items()}
    assert found == {"tape": ["all.md"], "jit": ["alone.md", "other.md"]}


def test_titles_need_no_other_row():
    titles = "pool, 2×2", "its gradient", "x"
    rows = [row._replace(title=t) for row, t in zip(ROWS[:3], titles, strict=True)]
    assert [row.title for row in results.named(rows)] == ["pool, 2×2", "pool: its gradient", "x"]


def test_rows_that_are_behind():
    first = {"tape": results.Result("tape", "", "", "", "", "", True, ROWS)}
    assert page.behind(first).count("| tape |") == 1
    assert page.is_slower(ROWS[0]._replace(met=None)) and not page.is_slower(ROWS[2])


def test_a_suite_without_a_section_is_refused():
    with pytest.raises(ValueError, match="has marks for"):
        page.page({**results.newest(), "new": []})


def test_the_picture(tmp_path):
    draw([("tape", ROWS)], tmp_path / "plot.svg", "digest")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert "100 sin, against torch" in text and "memory" not in text and "digest" in text


# -- figures of cost in prose ----------------------------------------------------------------------

RATIO = re.compile(r"\{ratio\}`([^`]+)`")
SINCE = re.compile(r"\{since\}`(\w+); (\S+)`")
PAGES = [p for p in sorted(page.PAGE.parent.rglob("*.md")) if "_ext" not in p.parts]
# A time that is compared with a peer's, as prose writes it, is a `{ratio}` instead.
BY_HAND = re.compile(r"\d[\d.]*(?: to \d[\d.]*)? times the time", re.IGNORECASE)


def test_figures_of_cost_are_those_of_the_newest_record():
    found = results.newest()
    used = [ratio for p in PAGES for ratio in RATIO.findall(p.read_text(encoding="utf-8"))]
    assert len(used) > 2
    for reference in used:
        assert re.fullmatch(r"\d+\.\d\d(( to | / )\d+\.\d\d)*", costs.cost(reference, found).text)


@pytest.mark.parametrize("path", [*PAGES, page.README], ids=lambda p: p.stem)
def test_no_figure_of_cost_is_written_by_hand(path):
    assert BY_HAND.findall(path.read_text(encoding="utf-8")) == []


def test_a_ratio_names_its_run_and_the_range_of_its_rows():
    rows = [
        row._replace(title=f"call {i}", ratio=f"1.{i}0 ×") for i, row in enumerate(ROWS[:1] * 3)
    ]
    old = results.Result("calls", "2026-01-01", "", "One", "", "old.md", True, ROWS)
    new = results.Result("calls", "2026-01-02", "", "Two", "", "new.md", True, rows)
    found = {"calls": [new, old]}
    assert costs.cost("calls; call *; torch", found) == ("1.00 to 1.20", "2026-01-02", "Two")
    assert costs.cost("calls; call 1; torch", found).text == "1.10"
    assert costs.cost("calls; call 2; torch / call 0; torch", found).text == "1.20 / 1.00"
    assert costs.cost("calls @ One; 100 sin; torch", found) == ("2.00", "2026-01-01", "One")
    with pytest.raises(ValueError, match="no record of calls is from a machine 'Three'"):
        costs.cost("calls @ Three; 100 sin; torch", found)
    with pytest.raises(ValueError, match=r"new\.md has no ratio of '100 sin' against 'torch'"):
        costs.cost("calls; 100 sin; torch", found)


def test_the_page_counts_the_commits_since_each_run():
    text = page.PAGE.read_text(encoding="utf-8")
    every = [result for each in results.newest().values() for result in each]
    counted = SINCE.findall(text)
    assert {*counted} == {(r.suite, costs.commit_of(r)) for r in every}
    assert len(counted) == 2 * len(every)  # in the list of runs, and above each table
    assert {suite for suite, _ in counted} == costs.MEASURED.keys()
    parts = {part for each in costs.MEASURED.values() for part in each}
    assert all((costs.ROOT / "src/regrad" / part).is_dir() or part == "rules" for part in parts)


def test_commits_that_are_not_in_the_history_are_said_to_be_unknown():
    assert costs.since("tape", "0" * 40) == "an unknown number of commits"
    assert costs.since("tape", "HEAD") in ("no commits", "an unknown number of commits")
