"""The records of campaigns: the facts of a run, its results, and the files that it tests.

python -m tests.campaigns.records     list the records that are older than their files
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import report as machine
from tests.helpers.paths import ROOT

RESULTS = Path(__file__).parent / "results"


def facts(command: str, packages: Iterable[str] = ()) -> dict[str, Any]:
    """When and where a run took place, and of what; `command` is the module that was run.

    The versions are those of the packages if these are named, else those of the libraries.
    """
    found = [f"{name} {version_of(name)}" for name in packages] or machine.versions()
    return {
        "date": machine.today(), "command": " ".join([f"python -m {command}", *sys.argv[1:]]),
        "machine": machine.described(), "versions": [f"Python {platform.python_version()}", *found],
        "commit": machine.commit(),
    }  # fmt: skip


def version_of(name: str) -> str:
    return version({"haiku": "dm-haiku"}.get(name, name)).partition("+")[0]


def missing(names: Iterable[str]) -> list[str]:
    return [name for name in names if find_spec(name) is None]


def line(content: Mapping[str, Any]) -> str:
    """The facts of a record as a line of a page."""
    versions = ", ".join(content["versions"])
    where = f"{content['date']}, {content['machine']}; {versions}"
    return f"{where}; regrad at commit {content['commit']}. `{content['command']}`"


def read(path: Path) -> dict[str, Any]:
    """What the last run has written down."""
    return json.loads(path.read_text(encoding="utf-8"))


# The parts of the package that a record tests, by the name of the record up to a dash.
PARTS = {
    "F1": ("core", "graph", "ops", "transforms"), "F2": ("core", "ops"), "F3": ("autodiff", "core"),
    "F4": ("ops",), "F5": ("autodiff", "core", "graph", "ops", "transforms"), "F6": ("ops",),
    "F7": ("graph", "ops", "transforms"),
    "F8": ("autodiff", "core", "transforms"), "F9": ("autodiff", "core", "transforms"),
    "F10": ("core", "transforms"), "F11": ("core/files.py", "train", "v1/training"),
    "F12": ("autodiff", "core", "ops", "transforms", "v1"), "F13": ("core", "torch"),
    "F14": ("core", "torch"), "array_api": ("core", "fft.py", "linalg.py", "ops"),
    "mutants": ("autodiff", "checking", "core", "graph", "inspection", "jax", "ops", "rules",
                "shapes", "torch", "train", "transforms", "v1"),
    "op_tables": ("ops",), "peers": ("core", "ops"), "public": ("core", "torch"),
    "quantize_peers": ("rules", "torch"),
    "layer_peers": ("rules", "torch"), "more_peers": ("rules", "torch"),
    "relevance_lost": ("rules", "torch"), "relevance_peers": ("rules", "torch"),
    "spike_peers": ("rules",),
}  # fmt: skip


def files_of(path: Path) -> list[str]:
    """Return the files and folders that a record tests."""
    return [f"src/regrad/{part}" for part in PARTS[path.stem.partition("-")[0]]]


def write(path: Path, content: Any, within: Path = ROOT) -> Path:
    """Write a file of results, without the folders of this machine."""
    path.parent.mkdir(exist_ok=True)
    if path.stem.partition("-")[0] in PARTS:
        content = {**content, "files": files_of(path)}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    path.write_text(without_folders(text, within), encoding="utf-8")
    return path


def without_folders(text: str, within: Path = ROOT) -> str:
    """Messages without folders of this machine: the project, packages, temporary ones."""
    temporary = re.escape(f"{tempfile.gettempdir()}{os.sep}") + r"tmp\w+" + re.escape(os.sep)
    text = re.sub(r"[^\s\"'(]*/site-packages/", "", text)
    return re.sub(temporary, "", text.replace(f"{within}{os.sep}", ""))


def stale(paths: Iterable[Path] | None = None) -> list[str]:
    """Return a line for each record whose files have changed since its commit.

    Raises RuntimeError in a checkout without history.
    """
    lines = []
    for path in sorted(RESULTS.glob("*.json")) if paths is None else paths:
        content = read(path)
        commit = content["commit"].removesuffix("-dirty")
        span = ["rev-list", "--count", f"{commit}..HEAD", "--", *content["files"]]
        done = subprocess.run(["git", *span], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{path.name}: git has no history of {commit}: {done.stderr.strip()}"
            )
        if count := int(done.stdout):
            files = ", ".join(content["files"])
            lines.append(f"{path.name}: {count} commits since {commit} have changed {files}")
    return lines


if __name__ == "__main__":
    print("\n".join(stale()) or "No record is older than its files.")
