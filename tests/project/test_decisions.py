"""Records of experiments that were ordered: their figures, and programs that still run."""

import json
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "decisions" / "ops_as_equations.md"


def test_the_experiment_with_equations_has_its_table_and_its_programs():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(("| chain", "| trans", "| scan"))]
    assert len(rows) == 11 and all(line.count("|") == 6 for line in rows)
    for heading in ("Context", "Options", "Figures", "Decision", "What would change it"):
        assert f"**{heading}.**" in text
    for name in ("equations", "equations_timed"):
        assert f"tests.campaigns.{name}" in text
        assert (ROOT / "tests" / "campaigns" / f"{name}.py").exists()
    assert "ops_as_equations" in (PAGE.parent / "index.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_bodies_as_equations_have_the_values_of_today():
    values = []
    for road in ("today", "bodies", "all"):
        command = [sys.executable, "-m", "tests.campaigns.equations_timed", road]
        done = subprocess.run(
            [*command, "scan of 200 steps", "2"], cwd=ROOT, capture_output=True, text=True
        )
        assert not done.returncode, done.stderr
        values.append([row["value"][0] for row in json.loads(done.stdout.splitlines()[-1])])
    assert values[1:] == [pytest.approx(values[0], 1e-5)] * 2
