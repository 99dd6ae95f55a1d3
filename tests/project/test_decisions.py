"""Records of experiments that were ordered: their figures, and programs that still run."""

import importlib
import json
import subprocess
import sys

import pytest

from tests.campaigns import roads_for_speed
from tests.helpers.paths import ROOT
from tests.helpers.rewritten import rewritten

PAGE = ROOT / "docs" / "decisions" / "ops_as_equations.md"
HEADINGS = ("Context", "Options", "Figures", "Decision", "What would change it")


def test_the_experiment_with_equations_has_its_table_and_its_programs():
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith(("| chain", "| trans", "| scan"))]
    assert len(rows) == 11 and all(line.count("|") == 6 for line in rows)
    for heading in HEADINGS:
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


def test_the_experiment_with_roads_has_a_row_for_each():
    page = PAGE.with_name("roads_for_speed.md")
    text = page.read_text(encoding="utf-8")
    for heading in HEADINGS:
        assert f"**{heading}.**" in text
    for name, road in roads_for_speed.ROADS.items():
        rows = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert len(rows) == len(road.rows), name
    assert f"python -m {roads_for_speed.__name__}" in text
    assert page.stem in (PAGE.parent / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", roads_for_speed.ROADS)
def test_a_road_can_still_be_switched_off(name):
    for where, old, new in roads_for_speed.ROADS[name].changes:
        module, _, path = where.partition(":")
        owner = importlib.import_module(module)
        *outer, function = path.split(".")
        assert callable(rewritten(getattr(owner, outer[0]) if outer else owner, function, old, new))


@pytest.mark.slow
def test_without_columns_a_tape_keeps_more():
    command = [sys.executable, "-m", roads_for_speed.__name__, "--answer"]
    kept = [
        int(subprocess.check_output([*command, road, "own:kept by 10,000 sin"], cwd=ROOT))
        for road in ("", "columns")
    ]
    assert 1.5 * kept[0] < kept[1]
