"""The page of the proof is made of what the campaigns have recorded."""

from tests.campaigns import op_tables, proof, proof_page, records
from tests.campaigns.proof_page import Record

AGAIN = "run python -m tests.campaigns.proof page"


def record(*classes, campaign="F1", **counts):
    return Record(campaign, "", {"counts": {campaign: counts}, "classes": classes})


def entry(outcome, name, detail="", count=1):
    return {"outcome": outcome, "class": name, "detail": detail, "count": count, "cases": ["Sign"]}


def test_the_page_is_made_of_the_results():
    found = proof_page.records(proof.CAMPAIGNS)
    text = proof_page.page(found, proof.CAMPAIGNS, proof.other_blocks())
    assert text == proof_page.PAGE.read_text(encoding="utf-8"), AGAIN
    counts = proof_page.totals(found, proof.CAMPAIGNS)
    assert proof_page.digest(counts) in proof_page.PLOT.read_text(encoding="utf-8"), AGAIN


def test_every_campaign_has_a_record_and_a_section():
    found = proof_page.records(proof.CAMPAIGNS)
    assert {r.campaign for r in found} == set(proof.CAMPAIGNS)
    text = proof_page.page(found, proof.CAMPAIGNS, proof.other_blocks())
    assert all(f"### {name}: " in text for name in proof.CAMPAIGNS)


def test_what_must_not_be_is_shown():
    found = [record(entry("silent", "jit", "[1] instead of [2]"), delivered=1000, silent=1)]
    text = proof_page.figures(found, proof.CAMPAIGNS)
    assert "| F1 rules in every context | 1,001 | 1,000 | 0 | 0 | 0 | 1 | 0 |" in text
    assert "`jit: Sign`: `[1] instead of [2]`" in "".join(proof_page.folds(found))


def test_refusals_are_shown_by_error_the_largest_first():
    errors = [entry("refused", f"mode {i}", f"E{i}Error: no | {i}", count=i) for i in range(1, 9)]
    (text,) = proof_page.folds([record(*errors, refused=36)])
    lines = text.splitlines()
    assert "refused: 36" in lines[0]
    assert lines[4] == r"| E8Error | 8 | `mode 8: Sign`: `E8Error: no \| 8` |"
    assert lines[-3] == "| 2 other kinds | 3 |  |"


def test_records_that_go_on_from_each_other_are_one():
    found = [
        Record("F5", part, {"counts": {"F5": {"delivered": 2, outcome: 1}}, "classes": []})
        for part, outcome in [("", "refused"), ("5800", "explained")]
    ]
    assert [r.file for r in found] == ["F5.json", "F5-5800.json"]
    assert "| F5 random programs | 6 | 4 | 1 | 0 | 1 | 0 | 0 |" in (
        proof_page.figures(found, proof.CAMPAIGNS)
    )
    gpu = Record("F13", "cuda", {})
    assert gpu.title(proof.CAMPAIGNS).endswith(", on a GPU")


def test_the_counts_of_samples_are_those_of_the_table():
    assert records.read(op_tables.PATH)["regrad"] == op_tables.of_regrad(), (
        "run python -m tests.campaigns.op_tables"
    )


def test_what_is_explained_is_shown_by_reason_where_there_are_few():
    few = [entry("explained", f"jit {i}", "a kink", count=2) for i in range(30)]
    (text,) = proof_page.folds([record(*few, explained=60)])
    assert "| a kink | 60 |" in text
    many = [entry("explained", f"jit {i}", f"{i} ulps", count=2) for i in range(30)]
    (text,) = proof_page.folds([record(*many, explained=60)])
    assert "| jit 0 | 2 |" in text
