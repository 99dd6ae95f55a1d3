"""Checks that need processes of their own: several at once, each of which writes a report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.paths import ROOT

LIMIT = 300  # seconds; on two free cores each setup takes ten to twenty


def free_port() -> str:
    """A port on the loopback address that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_children(script: Path, folder: Path, *commands: list[str]) -> list[dict[str, str | None]]:
    """The reports of children that run side by side; none outlives this call."""
    reports = [folder / f"{i}.json" for i in range(len(commands))]
    logs = [(folder / f"{i}.log").open("w+", encoding="utf-8") for i in range(len(commands))]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    children = [
        subprocess.Popen(
            [sys.executable, script, report, *command], stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": paths},
        )
        for report, log, command in zip(reports, logs, commands, strict=True)
    ]  # fmt: skip
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
    """The tracebacks of all checks that failed, each under its name."""
    assert all(reports)
    return "\n".join(f"{k}\n{text}" for report in reports for k, text in report.items() if text)
