"""Several devices and several processes. JAX must start anew for these, so they run in children.

What is checked is in `sharded_checks.py`; a child runs all of it that belongs to one setup.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import regrad as rg
from tests.helpers.paths import ROOT

CHECKS = ROOT / "tests" / "helpers" / "sharded_checks.py"
LIMIT = 120  # seconds; on two free cores each setup takes about ten


def run_children(folder: Path, *commands: list[str]) -> list[dict[str, str | None]]:
    """The reports of children that run side by side; none outlives this call."""
    import jax  # noqa: F401 (without which the children fail)

    reports = [folder / f"{i}.json" for i in range(len(commands))]
    logs = [(folder / f"{i}.log").open("w+", encoding="utf-8") for i in range(len(commands))]
    children = [
        subprocess.Popen([sys.executable, CHECKS, report, *command], stdout=log, stderr=log)
        for report, log, command in zip(reports, logs, commands, strict=True)
    ]
    try:
        end = time.monotonic() + LIMIT
        while any(child.poll() is None for child in children) and time.monotonic() < end:
            if any(child.poll() for child in children):  # the other would wait for it
                break
            time.sleep(0.05)
        codes = [child.poll() for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    texts = [(log.seek(0), log.read()[-3000:], log.close())[1] for log in logs]
    assert codes == [0] * len(children), f"{codes}\n{'-' * 70}\n".join(["", *texts])
    return [json.loads(report.read_text(encoding="utf-8")) for report in reports]


def failures(reports: list[dict[str, str | None]]) -> str:
    assert all(reports)
    return "\n".join(f"{k}\n{text}" for report in reports for k, text in report.items() if text)


def test_eight_devices_in_one_process(tmp_path):
    assert failures(run_children(tmp_path, ["one"])) == ""


def test_four_devices_in_each_of_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert failures(run_children(tmp_path, ["two", "0", port], ["two", "1", port])) == ""


def test_a_child_that_fails_is_reported(tmp_path):
    with pytest.raises(AssertionError, match="no setup of that name"):
        run_children(tmp_path, ["three"])


def test_a_compiled_function_keeps_no_old_value_of_a_variable():
    v = rg.Variable([1.0, 2.0])
    f = rg.jit(lambda x: x * v)
    f(rg.tensor([1.0, 1.0]))
    (program,) = f.programs.values()
    assert program.sources == [v]
