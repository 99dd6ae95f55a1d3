"""What holds of each library that regrad works inside of; `test_hosts.py` of each has more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from regrad.errors import HostError, MissingPackageError, UntestedHostWarning
from tests.helpers.paths import ROOT
from tests.helpers.rows import refused

SLICES = 2


def python(*args: str, **options: Any) -> Any:
    """Run Python in a process of its own."""
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, **options)


class HostTests:
    """A subclass has the host, its feature of overrides, and the library as it is imported.

    `at_rest` are the programs that are refused where nothing has changed, `roots` is a pattern of
    the paths of parts, of which there are more than `parts` in `features` features at least, and
    `wanted` a pattern of what is said of the version `old`. `open` opens a scope of overrides.
    """

    @pytest.mark.slow
    @pytest.mark.parametrize("part", range(SLICES))
    def test_a_library_that_has_changed(self, part):
        command = ["-m", f"tests.helpers.fake_{self.library}", str(part), str(SLICES)]
        done = python(*command, cwd=ROOT, timeout=500)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(rows) > 10, done.stderr[-2000:]
        for kind, path, found in rows:
            assert {*found.values()} <= {"right", "refused"}, (kind, path, found)
            refusals = {name for name, what in found.items() if what == "refused"}
            assert kind != "nothing" or refusals == self.at_rest

    def test_every_part_has_a_reason_and_a_feature(self):
        self.open()
        features = self.host.features
        assert len({f.name for f in features}) == len(features) >= self.features
        assert [f.name for f in features if f.losses or not f.instead.endswith(".")] == []
        parts = [part for feature in features for part in feature.parts]
        assert len(parts) > self.parts
        assert [path for path, why in parts if not why or not re.match(self.roots, path)] == []

    @pytest.mark.slow
    def test_the_promises_hold(self):
        self.host.check(*self.host.features, again=True)
        assert [(f.name, f.losses) for f in self.host.features if f.losses] == []
        assert all(feature.programs for feature in self.host.features)

    def test_what_fails_on_a_newer_library_is_refused_from_then_on(self, newer, monkeypatch):
        def rules_count():
            raise AssertionError("the gradient is 1, expected 7")

        for feature in self.host.features:
            monkeypatch.setattr(feature, "checked", feature is not self.overrides)
        monkeypatch.setattr(self.overrides, "losses", [])
        monkeypatch.setattr(self.overrides, "programs", [rules_count])
        with pytest.warns(
            UntestedHostWarning, match=r"regrad now raises HostError for: overrides\. "
        ):
            refused(self.open, HostError, r"'rules count' does not hold .*expected 7")
        refused(self.open, HostError)

    @pytest.mark.slow
    def test_an_older_library_is_refused(self):
        host = self.host
        made = (host.name, f"regrad.{self.library}", self.old, host.oldest, host.newest)
        refused(lambda: type(host)(*made), MissingPackageError, self.wanted)
        version = f"{self.library}.__version__ = {self.old!r}"
        done = python("-c", f"import {self.library}; {version}; import regrad.{self.library}")
        assert re.search(f"MissingPackageError: regrad.{self.library} {self.wanted}", done.stderr)
