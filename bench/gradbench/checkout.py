"""A checkout of GradBench that runs in a separate folder, so that nothing is written into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .session import Command

ROOT = Path(__file__).parents[2]
EVALS = ["hello", "lse", "llsq", "det", "kmeans", "gmm", "ode", "lstm", "ba", "ht"]
EVALS += ["particle", "saddle"]
PYTHON_PEERS = ("jax", "pytorch", "tensorflow")
PEERS = (*PYTHON_PEERS, "manual")
MODULES = {"pytorch": "torch"}
JSON_HEADERS = ("/usr/include/nlohmann/json.hpp", "/usr/local/include/nlohmann/json.hpp")
BITS = "“"  # the character of the original text that makes its characters 14 bits wide


class Checkout(NamedTuple):
    """The paths of a checkout, and the Python that runs its tools."""

    source: Path
    folder: Path  # regrad's folder, in which evals run and C++ is built
    python: str

    @property
    def package(self) -> Path:
        return self.source / "python" / "gradbench"

    def eval(self, name: str, options: Sequence[str]) -> Command:
        script = self.package / "gradbench" / "evals" / name / "run.py"
        return self.command([self.python, str(script), *options])

    def tool(self, name: str) -> Command:
        tools = self.package / "gradbench" / "tools"
        match name:
            case "regrad":
                return self.command([sys.executable, "-m", "bench.gradbench"], ROOT)
            case "manual":
                script = str(self.package / "gradbench" / "cpp.py")
                return self.command([self.python, script, "manual"])
            case "jax":
                # (The option only keeps the tool from choosing a CPU, which `run` does for all.)
                waiting = ["-m", "bench.gradbench.waiting_jax", str(tools / "jax" / "run.py")]
                return self.command([self.python, *waiting, "--multithreaded"], ROOT)
            case _:
                return self.command([self.python, str(tools / name / "run.py")])

    def command(self, words: Sequence[str], folder: Path | None = None) -> Command:
        if pin := shutil.which("taskset"):
            words = [pin, "-c", str(max(os.sched_getaffinity(0))), *words]
        environment = os.environ | {  # (`bench` has set one thread for all libraries)
            "PYTHONPATH": os.pathsep.join([str(self.package), str(ROOT), str(ROOT / "src")]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_ENABLE_X64": "1",  # otherwise JAX's `ode` computes with 32 bits, unlike the others
            "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",  # the same as in regrad's tool
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "1",
            "MAKEFLAGS": "n",  # `manual` is built once, not for each session
        }
        return Command(words, folder or self.folder, environment)

    def versions(self) -> list[str]:
        """Return the versions of the peers' libraries that are installed."""
        code = "import sys, importlib; print(importlib.import_module(sys.argv[1]).__version__)"
        found = []
        for name in PYTHON_PEERS:
            module = MODULES.get(name, name)
            words = [self.python, "-c", code, module]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode == 0:
                found.append(f"{module} {done.stdout.strip()}")
        return found

    def listed(self, tool: str, eval_: str) -> str:
        """Return upstream's note if the checkout lists a problem of a tool at an eval."""
        lines = (self.source / "tools" / tool / "evals.txt").read_text().splitlines()
        words = dict([*line.split(), ""][:2] for line in lines)
        if eval_ not in words:
            return "not written"
        return f"listed upstream as: {words[eval_]}" if words[eval_] else ""


def opened(source: Path, folder: Path, python: str) -> Checkout:
    """Return the checkout, with a folder that looks like the checkout to the evals."""
    (folder / "evals").mkdir()
    for name in EVALS:
        (folder / "evals" / name).symlink_to(source / "evals" / name)
    text = source / "evals" / "lstm" / "data" / "lstm_full.txt"
    if not text.exists() or text.stat().st_size < 8192:  # missing, or a pointer to a large file
        (folder / "evals" / "lstm").unlink()
        data = folder / "evals" / "lstm" / "data"
        data.mkdir(parents=True)
        readmes = (source / "evals" / name / "README.md" for name in EVALS)
        parts = [BITS, *(readme.read_text(encoding="utf-8") for readme in readmes)]
        (data / text.name).write_text("".join(parts), encoding="utf-8")
    shutil.copytree(source / "cpp", folder / "cpp")
    shutil.copytree(source / "tools" / "manual", folder / "tools" / "manual")
    return Checkout(source, folder, python)


def build_manual(checkout: Checkout) -> str:
    """Build the C++ tool, which the evals use for validation. Return the reason if it fails."""
    header = checkout.folder / "cpp" / "json.hpp"
    if not header.exists():
        found = [path for path in JSON_HEADERS if Path(path).exists()]
        if not found:
            return "no json.hpp (Debian: nlohmann-json3-dev)"
        header.write_text(f'#include "{found[0]}"\n')
    if not shutil.which("make") or not shutil.which("c++"):
        return "no C++ compiler"
    command = ["make", "-C", str(checkout.folder / "tools" / "manual")]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    return "" if done.returncode == 0 else (lines or ["make failed"])[0]
