"""Around the code: metadata, workflows, versions, and tests without optional packages."""

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from regrad.core.extras import INSTALL, install_line
from regrad.jax.host import HOST as JAX
from regrad.torch.host import HOST as TORCH
from tests.helpers.address import PLACES, URLS, Address, filled, known
from tests.helpers.children import run_children
from tests.helpers.optional import OPTIONAL
from tests.helpers.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def bounds():
    """The lower bounds of what users install."""
    extras = PROJECT["optional-dependencies"]
    kinds = ("jax", "train", "export", "torch")
    names = [*PROJECT["dependencies"], *(name for kind in kinds for name in extras[kind])]
    found = [Requirement(name) for name in names]
    return {
        r.name: Version(s.version)
        for r in found
        if r.name != "regrad"
        for s in r.specifier
        if s.operator == ">="
    }


def pins(file):
    """The constraints of a file."""
    lines = (ROOT / ".github" / file).read_text().splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def version_of(pin):
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


def test_the_oldest_versions_that_are_tested_are_the_lower_bounds():
    pinned = {pin.name: version_of(pin).release for pin in pins("oldest.txt")}
    expected = bounds()
    assert expected.pop("scipy") == Version("1.13") and pinned.pop("scipy")[:2] == (1, 14)
    assert pinned.keys() == expected.keys()
    for name, bound in expected.items():
        assert pinned[name][: len(bound.release)] == bound.release, name


def test_nothing_has_an_upper_bound():
    extras = PROJECT["optional-dependencies"]
    for name in [*PROJECT["dependencies"], *(name for kind in extras for name in extras[kind])]:
        assert {s.operator for s in Requirement(name).specifier} <= {">="}, name


def test_ranges_of_hosts_are_those_that_are_installed_and_tested():
    newest = {(pin.name): version_of(pin).release[:2] for pin in pins("newest.txt")}  # the last one
    for host, name in ((TORCH, "torch"), (JAX, "jax")):
        assert Version(host.newest).release == newest[name], "raise `newest` in its host module"
        assert Version(host.oldest) == bounds()[name]


def test_classifiers_and_workflow_name_the_same_versions_of_python():
    named = {c.split()[-1] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)}
    workflow = (ROOT / ".github/workflows/tests.yml").read_text()
    line = re.search(r"python: \[(.*)\]", workflow)
    assert line and {v.strip('" ') for v in line[1].split(",")} == named
    assert min(named, key=Version) == PROJECT["requires-python"].removeprefix(">=")


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {PROJECT['version']}\n" in citation
    assert f"\nlicense: {PROJECT['license']}\n" in citation


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_tests_that_need_a_package_are_skipped_without_it(tmp_path, name):
    """A run in which a package cannot be imported: one test needs it, one does not."""
    (tmp_path / "conftest.py").write_text(
        "import sys, importlib.util as util\n"
        f"sys.modules[{name!r}] = None\n"
        "find, util.find_spec = util.find_spec, lambda n, *a: "
        f"None if n.partition('.')[0] == {name!r} else find(n, *a)\n"
        "from tests.conftest import *\n"
    )
    (tmp_path / "test_file.py").write_text(f"import {name}.nothing\ndef test(): pass\n")
    (tmp_path / "test_some.py").write_text(
        f"def test_with():\n    import {name}\n\n"
        "def test_without():\n    import regrad\n\n"
        "def test_wrong():\n    import no_such_module\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run([*command, "--rootdir", str(tmp_path)], capture_output=True, text=True,
                          cwd=ROOT)  # fmt: skip
    assert "1 failed, 1 passed, 2 skipped" in done.stdout, done.stdout
    assert re.search(rf"2 tests and files were skipped; not installed: .*\b{name}\b", done.stdout)


def test_a_child_that_fails_is_reported(tmp_path):
    """As it says itself, and without waiting for the others."""
    (script := tmp_path / "script.py").write_text(
        "import sys, time\n"
        "if sys.argv[2] == 'fails':\n    sys.exit('nothing of that name')\n"
        "time.sleep(100)\n"
    )
    with pytest.raises(AssertionError, match="nothing of that name"):
        run_children(script, tmp_path, ["waits"], ["fails"])


def test_optional_packages_are_those_of_the_extras():
    extras = PROJECT["optional-dependencies"]
    kinds = extras.keys() - {"docs", "bench-applied"}  # which no test imports
    names = {Requirement(r).name for kind in kinds for r in extras[kind]}
    modules = {"scikit-learn": "sklearn", "dm-haiku": "haiku"}
    tools = {"regrad", "pytest", "pytest-xdist", "hypothesis", "mypy", "ruff", "pyright"}
    assert {modules.get(n, n) for n in names - tools} <= {*OPTIONAL}


# -- where regrad is to be had ---------------------------------------------------------------------

OURS = Address("https://git.example.org/ours/regrad", "regrad-of-ours")


@pytest.mark.parametrize("place", PLACES)
def test_the_address_stands_in_one_place_and_is_filled_in(place):
    text = (ROOT / place).read_text(encoding="utf-8")
    assert filled(place, text, known()) == text, "run python -m tests.helpers.address"
    released, before = filled(place, text, OURS), filled(place, text, Address())
    assert filled(place, released, OURS) == released
    assert filled(place, released, Address()) == before
    assert "example.org" not in before and "regrad-of-ours" not in before
    wanted = {
        "pyproject.toml": 'Source = "https://git.example.org/ours/regrad"\n',
        "CITATION.cff": "repository-code: https://git.example.org/ours/regrad\n",
        "README.md": "](https://git.example.org/ours/regrad/raw/main/docs/pictures/circles.png)",
        "src/regrad/core/extras.py": "INSTALL = \"pip install 'regrad-of-ours[{}]'\"",
    }
    assert wanted[place] in released
    if place == "pyproject.toml":
        assert tomllib.loads(released)["project"]["urls"].keys() == URLS.keys()


# An address, and a name in a package index, from which something would be installed.
FOREIGN = re.compile(
    r"github\.com/regrad\b|githubusercontent\.com/regrad\b|git\+https?:|"
    r"pip3? install[^`\n]*[ '\"]regrad\b"
)


def test_nothing_is_installed_from_elsewhere_before_a_release():
    assert FOREIGN.search("pip install 'regrad[torch]'") and FOREIGN.search("pip install regrad")
    assert FOREIGN.search("pip install 'jax' regrad") and not FOREIGN.search("pip install .")
    if any(known()):
        return
    here = "tests/project/test_repository.py"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    names = done.stdout.split() or [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.*")]
    texts = [n for n in names if n.endswith((".py", ".md", ".toml", ".cff", ".yml", ".txt"))]
    assert len(texts) > 400
    for name in sorted({*texts} - {here}):
        found = FOREIGN.search((ROOT / name).read_text(encoding="utf-8"))
        assert found is None, f"{name}: {found}"


def test_messages_name_the_extra():
    assert install_line("viz").startswith(INSTALL.format("viz"))
    if not known().registry:
        assert install_line("viz") == "pip install '.[viz]' in a clone of regrad"
    extras = PROJECT["optional-dependencies"]
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for extra in re.findall(r"(?:needed|missing)\(\s*\"[\w.]+\", \"(\w+)\"", text):
            assert extra in extras, path


WITHOUT = [  # a package, what needs it, and the extra that has it
    ("jax", "rg.jax", "regrad.jax", "jax"),
    ("jax", "rg.jit(rg.sin)", "rg.jit", "jax"),
    ("jax", "rg.device_put(1.0, None)", "rg.device_put", "jax"),
    ("jax", "rg.Variable(1.0, name='w').place(None)", "placing the Variable 'w'", "jax"),
    ("jax", "rg.random.key(0)", "a key of rg.random", "jax"),
    ("jax", "rg.export", "rg.export", "export"),
    ("jax", "rg.eval_shape", "rg.eval_shape", "export"),
    ("flatbuffers", "rg.export", "rg.export", "export"),
    ("jax", "rg.v1.Session(jit=True)", "Session(jit=True)", "jax"),
    ("torch", "rg.torch", "regrad.torch", "torch"),
    ("optax", "rg.train.Optimizer(1)", "regrad.train.Optimizer", "jax"),
    ("safetensors", "rg.train.list_variables('x')", "regrad.train.list_variables", "train"),
    ("matplotlib", "rg.plot.rule('Sign')", "rg.plot", "viz"),
    ("matplotlib", "rg.trace_gradients(rg.sin)(1.0).plot()", "rg.plot", "viz"),
]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("package", sorted({row[0] for row in WITHOUT}))
def test_what_needs_a_missing_package_says_how_to_install_it(package):
    rows = [row[1:] for row in WITHOUT if row[0] == package]
    script = f"import sys, regrad as rg\nsys.modules[{package!r}] = None\n"
    for use, _, _ in rows:
        script += f"try:\n    {use}\nexcept rg.errors.RegradError as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(rows), done.stdout + done.stderr
    for line, (_, api, extra) in zip(lines, rows, strict=True):
        assert line.startswith(f"{api} needs {package}, which is not installed. "), line
        assert line.endswith(f"Install it: {install_line(extra)}")
