"""The suite on every version of PyTorch, JAX, NumPy and Python that people have.

    python -m tests.campaigns.hosts                       every row of the table
    python -m tests.campaigns.hosts --only 'PyTorch 2.1'  rows whose name begins like this
    python -m tests.campaigns.hosts --quick               the oldest and the newest: two minutes

A row is an environment of its own: an interpreter, the packages that are named, and those that come
with them. It is made in a scratch folder and removed afterwards. In it run the parts of the suite
that concern the row, and `python -m regrad hosts`, in which every feature has to hold.

The interpreters are those on PATH and those that pyenv has. A row without one is "not run". uv
installs the packages if it is there, else pip does: 5 GB and two minutes for each PyTorch.

`docs/hosts.md` shows what came of each row; rows that are not run this time stay as they are. Where
a row is green, `.github/newest.txt` is raised to the versions that ran. `--quick` runs the tests
that a version once broke (the marker `versions`), and writes nothing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.version import Version

from regrad.jax.host import HOST as JAX
from regrad.torch.host import HOST as TORCH
from tests.helpers.paths import ROOT

PAGE, TEXT = ROOT / "docs" / "hosts.md", Path(__file__).with_name("hosts_page.md")
OLDEST, NEWEST = ROOT / ".github" / "oldest.txt", ROOT / ".github" / "newest.txt"
HOSTS = ("torch", "jax", "numpy", "scipy")
TOOLS = ("pytest", "pytest-xdist", "hypothesis")
VERSIONS = ("tests/torch", "tests/jax", "tests/core", "-m", "versions")
MODELS = ("flax", "equinox", "dm-haiku", "keras")
CORE = ("tests/core", "tests/autodiff", "tests/transforms", "tests/train")
TODAY = f"{datetime.now(UTC):%Y-%m-%d}"


@dataclass(frozen=True)
class Row:
    """An environment, and what runs in it.

    Args:
        name: in the table.
        python: the version of the interpreter, `"3.11"`.
        extras: of regrad, that are installed.
        packages: besides, with their versions.
        pins: a file of constraints.
        tests: folders and files of the suite, or options of pytest; a program if none is given.
    """

    name: str
    python: str
    extras: str = "test,examples"
    packages: tuple[str, ...] = ()
    pins: Path | None = None
    tests: tuple[str, ...] = ()


@dataclass
class Result:
    """The outcome of a row: a line of the table."""

    row: Row
    versions: Mapping[str, str]
    text: str
    ok: bool = False

    def cells(self) -> list[str]:
        """Return the cells of the line."""
        versions = [self.versions.get(name, "") for name in ("python", *HOSTS)]
        return [self.row.name, *versions, " ".join(self.row.tests) or "README", self.text, TODAY]


class NotRun(Exception):
    """The reason why a row cannot be run here."""


# -- the rows --------------------------------------------------------------------------------------


def minors(oldest: str, newest: str) -> list[str]:
    """Return the minor versions of a range: 2.10, 2.11, …"""
    (major, first), (_, last) = (Version(v).release[:2] for v in (oldest, newest))
    return [f"{major}.{minor}" for minor in range(first, last + 1)]


def rows() -> Iterator[Row]:
    """Yield every row of the table."""
    for v in minors(TORCH.oldest, TORCH.newest):
        yield Row(f"PyTorch {v}", "3.11", packages=(f"torch=={v}.*",), tests=("tests/torch",))
    for v in minors(JAX.oldest, JAX.newest):
        python = "3.11" if v == "0.10" else "3.12"  # from 0.11 on JAX needs Python 3.12
        packages = (f"jax=={v}.*", *TOOLS, *MODELS)
        yield Row(f"JAX {v}", python, "train,export", packages, tests=("tests/jax", *CORE))
    numpy = (*CORE, "tests/ops", "tests/tfjs")
    yield Row("NumPy, oldest", "3.11", "", (*TOOLS, "numpy==2.1.0", "scipy==1.13.0"), tests=numpy)
    yield Row("NumPy, newest", "3.12", "", TOOLS, tests=numpy)
    yield Row("oldest of all", "3.11", pins=OLDEST, tests=VERSIONS)
    for python in ("3.12", "3.13", "3.14"):
        tests = ("tests/core", "tests/jax", "tests/torch")
        yield Row(f"Python {python}, newest of all", python, tests=tests)
    alone = ("tests/core", "tests/checking", "tests/inspection", "tests/project")
    yield Row("without PyTorch", "3.11", "train,export", TOOLS, tests=(*alone, "tests/jax"))
    yield Row("without JAX", "3.11", "torch", TOOLS, tests=(*alone, "tests/torch"))
    yield Row("without both", "3.11", "", TOOLS, tests=(*alone, "tests/ops"))
    yield Row("pip install .[torch]", "3.11", "torch")
    yield Row("pip install .[jax]", "3.12", "jax")


def quick_rows() -> Iterator[Row]:
    """Yield an environment with the oldest of all, and one with the newest JAX.

    The newest PyTorch is the one that the whole suite runs with.
    """
    yield Row("oldest of all", "3.11", pins=OLDEST, tests=VERSIONS)
    python = next(filter(interpreter, ("3.14", "3.13", "3.12")), "3.12")
    packages = (*TOOLS, *MODELS)
    yield Row("JAX, newest", python, "train,export", packages, pins=NEWEST, tests=VERSIONS)


# The campaign's own environment says what only this process wants: see tests/conftest.py.
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("JAX_", "XLA_", "PIP_CONSTRAINT", "PYTHONPATH", "VIRTUAL_ENV"))
    and name != "PYTHONDONTWRITEBYTECODE"  # (uv compiles nothing: what is imported first does)
}


def call(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, in a new shell."""
    return subprocess.run(command, env=ENVIRONMENT, text=True, **options)


# -- a row -----------------------------------------------------------------------------------------


def interpreter(version: str) -> str | None:
    """Return where a Python is: on PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths = [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python{version}")]
    for path in filter(None, paths):
        asked = [path, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
        done = call(asked, capture_output=True)  # (a shim may have nothing)
        if done.returncode == 0 and done.stdout.strip() == version:
            return str(path)
    return None


def made(row: Row, folder: Path) -> str:
    """Return the Python of a new environment, in which everything is installed."""
    base = interpreter(row.python)
    if base is None:
        raise NotRun(f"there is no Python {row.python} here")
    call([base, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if uv := shutil.which("uv"):
        pip = [uv, "pip", "install", "--quiet", "--python", python]
    project = f"{ROOT}[{row.extras}]" if row.extras else str(ROOT)
    editable = ["--editable"] if row.tests else []
    pins = ["--constraint", str(row.pins)] if row.pins else []
    done = call([*pip, *pins, *row.packages, *editable, project], capture_output=True)
    if done.returncode:
        raise NotRun(f"it cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


def versions_in(python: str) -> dict[str, str]:
    """Return the versions of Python and of the libraries in an environment."""
    program = (
        "import platform; from importlib.metadata import distributions as d;"
        "print('python', platform.python_version());"
        f"[print(x.name.lower(), x.version) for x in d() if x.name.lower() in {HOSTS}]"
    )
    lines = call([python, "-c", program], capture_output=True, check=True)
    return dict(line.split() for line in lines.stdout.splitlines())


def run(row: Row, folder: Path, log: Path) -> Result:
    """Make the environment of a row, and run what is asked there."""
    try:
        python = made(row, folder / "env")
    except NotRun as why:
        return Result(row, {}, f"not run: {why}")
    versions = versions_in(python)
    with log.open("w") as out:
        command = [python, "-m", "regrad", "hosts"]
        features = call(command, cwd=folder, stdout=subprocess.PIPE, stderr=out)
        out.write(features.stdout)
        refused = re.findall(r"^  (.+?)  +refused", features.stdout, re.M)
        held = len(re.findall(r"  holds$", features.stdout, re.M))
        start = time.monotonic()
        counts, code = _suite(python, row.tests, folder, out) if row.tests else _readme(python, out)
        seconds = time.monotonic() - start
    kept = "" if not held else f"; all {held} features hold"
    kept = f"; refused: {', '.join(refused)}" if refused else kept
    ok = code == 0 and features.returncode == 0
    failed = "" if ok else f" **(exit status {features.returncode or code})**"
    return Result(row, versions, f"{counts}{failed} in {seconds:.0f} s{kept}", ok)


def _logged(row: Row) -> tuple[Result, Path]:
    """Run a row in a scratch folder; return what came of it, and where it is told."""
    log = ROOT / "out" / f"hosts-{re.sub(r'[^a-z0-9.]+', '-', row.name.lower())}.log"
    with tempfile.TemporaryDirectory() as folder:
        return run(row, Path(folder), log), log


def _suite(python: str, tests: Sequence[str], folder: Path, out: IO[str]) -> tuple[str, int]:
    report = folder / "report.xml"
    command = [python, "-m", "pytest", "--all", "-n", "2", "--dist", "worksteal"]
    command += ["-p", "no:cacheprovider", "--junitxml", str(report), "-rfE", "--no-header", *tests]
    code = call(command, cwd=ROOT, stdout=out, stderr=out).returncode
    if not report.exists():
        return "no test ran", code or 1
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    count = {k: int(suite.get(k, 0)) for k in ("tests", "skipped", "failures", "errors")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - count["skipped"] - failed
    parts = [(passed, "passed"), (count["skipped"], "skipped"), (failed, "failed")]
    return ", ".join(f"{n:,} {what}" for n, what in parts if n), code


def _readme(python: str, out: IO[str]) -> tuple[str, int]:
    command = [python, ROOT / "tests/helpers/readme.py", ROOT / "README.md"]
    done = call(command, stdout=subprocess.PIPE, stderr=out)
    out.write(done.stdout)
    return done.stdout.strip(), done.returncode


# -- the page, and the pins ------------------------------------------------------------------------


def page(results: Sequence[Result], before: str) -> str:
    """Return the page with new lines for these rows; the others are as they were."""
    known = {line.split(" | ")[0][2:]: line for line in before.splitlines() if line[:2] == "| "}
    known |= {r.row.name: f"| {' | '.join(r.cells())} |" for r in results}
    table = [known[row.name] for row in rows() if row.name in known]
    head = ["", "Python", "PyTorch", "JAX", "NumPy", "SciPy", "tests", "result", "date"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *table]
    text = TEXT.read_text(encoding="utf-8")
    return text.format(torch=TORCH.range(), jax=JAX.range(), table="\n".join(lines))


def raised(pins: str, versions: Mapping[str, str], python: str) -> str:
    """Return constraints with those versions that are newer, where they are for this Python."""
    lines = []
    for line in pins.splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            concerned = pin.marker is None or pin.marker.evaluate({"python_version": python})
            (pinned,) = pin.specifier
            ran = versions.get(pin.name, "0").partition("+")[0]
            if concerned and Version(ran) > Version(pinned.version):
                line = line.replace(f"=={pinned.version}", f"=={ran}")
        lines.append(line)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rows; return 1 if one of them is not good."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="rows whose name begins like this")
    parser.add_argument("--quick", action="store_true", help="the oldest and the newest; no page")
    options = parser.parse_args(arguments)
    chosen = [*(quick_rows() if options.quick else rows())]
    if options.only:
        chosen = [row for row in chosen if row.name.startswith(tuple(options.only))]
    bad = []
    (ROOT / "out").mkdir(exist_ok=True)
    # The environments of the quick rows are installed side by side, which is mostly waiting.
    with ThreadPoolExecutor(len(chosen) if options.quick else 1) as pool:
        for result, log in pool.map(_logged, chosen):
            print(f"{result.row.name}: {result.text}", flush=True)
            if result.versions and not result.ok:
                bad.append(result.row.name)
                print("\n".join(log.read_text().splitlines()[-40:]))
            if not options.quick:
                PAGE.write_text(page([result], PAGE.read_text() if PAGE.exists() else ""))
                if result.ok and not result.row.pins:
                    pins = raised(NEWEST.read_text(), result.versions, result.row.python)
                    NEWEST.write_text(pins)
    if bad:
        print(f"Not good: {', '.join(bad)}. All that was printed is in out/hosts-*.log.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
