"""What a run of a campaign writes down: the facts of the run, and a file of its results."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import report as machine
from tests.helpers.paths import ROOT

RESULTS = Path(__file__).parent / "results"


def facts(command: str, versions: Iterable[str] | None = None) -> dict[str, Any]:
    """When and where a run took place, and of what; `command` is the module that was run."""
    found = machine.versions() if versions is None else versions
    return {
        "date": machine.today(),
        "command": " ".join([f"python -m {command}", *sys.argv[1:]]),
        "machine": machine.described(),
        "versions": [f"Python {platform.python_version()}", *found],
        "commit": machine.commit(),
    }


def write(path: Path, content: Any, within: Path = ROOT) -> Path:
    """Write a file of results, without the folders of this machine."""
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    path.write_text(without_folders(text, within), encoding="utf-8")
    return path


def without_folders(text: str, within: Path = ROOT) -> str:
    """Messages without folders of this machine: the project, packages, temporary ones."""
    temporary = re.escape(f"{tempfile.gettempdir()}{os.sep}") + r"tmp\w+" + re.escape(os.sep)
    text = re.sub(r"[^\s\"'(]*/site-packages/", "", text)
    return re.sub(temporary, "", text.replace(f"{within}{os.sep}", ""))
