"""Private parts of PyTorch and JAX are named in `host/`, and nowhere else."""

import ast
import platform
import re
import sys
from functools import cache
from typing import Any

import pytest

from tests.campaigns import hosts as campaign
from tests.helpers.paths import ROOT, tree_of

SOURCE = ROOT / "src" / "regrad"
# Where private parts are named, and the modules that find them there.
DOORS = ("torch/host/", "jax/host/", "core/hosts.py")
# Python's own names that begin with an underscore.
PYTHON = {"_fields", "_replace", "_asdict", "_getframe"}
# What JAX's objects have without an underscore, and without documentation.
JAX = {
    "debug_info", "func_src_info", "arg_names", "result_paths", "name_stack", "raw_frames",
    "fwd_jaxpr_thunk", "jvp_jaxpr_fun", "num_consts", "num_carry", "ft_in",
}  # fmt: skip
PRIVATE = re.compile(r"\b(torch|jax|functorch)(\.\w+)*\._(?!_)\w+")
SOURCES = sorted(SOURCE.rglob("*.py"))


def is_door(path):
    return path.relative_to(SOURCE).as_posix().startswith(DOORS)


@cache
def names_of_ours():
    """Return the names that regrad's own sources define."""
    found = set()
    for tree in map(tree_of, SOURCES):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def docstrings(tree):
    """Return what stands as a sentence of its own."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def chain(node):
    """Return `torch.a.b` for the expression that says so; None if it begins with something else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else None


def is_private(name, jax=False):
    """Return whether an attribute is neither Python's, nor ours, nor promised by its library."""
    special = name.startswith("__") and name.endswith("__")
    known = name in PYTHON or name in names_of_ours()
    unknown = name.startswith("_") and not special and not known
    return unknown or (jax and name in JAX)


def texts_of(node):
    """Yield the names that an import, an attribute or a string spells out."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield chain(node) or ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
        yield node.value  # (a sentence may name an op that users call)


def private_parts(tree, jax=False):
    """Yield the line and name of each private part of somebody else's that a module names."""
    prose = docstrings(tree)
    for node in ast.walk(tree):
        if id(node) in prose:
            continue
        node: Any
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()) if is_private(name, jax):
                yield node.lineno, name
            case ast.Attribute(attr="__code__" | "__globals__" | "__closure__"):
                if re.match(r"(torch|jax|F)\.", chain(node) or ""):
                    yield node.lineno, chain(node)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(name), *_]
            ):
                if is_private(name, jax):
                    yield node.lineno, name
        for text in texts_of(node):
            yield from ((node.lineno, match[0]) for match in PRIVATE.finditer(text))


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if not is_door(p)], ids=lambda p: str(p.relative_to(SOURCE))
)
def test_private_parts_are_named_behind_the_door(path):
    jax = path.is_relative_to(SOURCE / "jax")
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}: take it in {DOORS[jax]}"
        for line, name in private_parts(tree_of(path), jax)
    ]
    assert not found, "\n".join(found)


def test_the_doors_name_private_parts():
    for door in DOORS[:2]:
        named = [n for p in SOURCES if door in p.as_posix() for n in private_parts(tree_of(p))]
        assert len(named) > 8, door


@pytest.mark.parametrize(("text", "name"), [
    ("import torch._dynamo", "torch._dynamo"),
    ("from jax._src import core", "jax._src"),
    ("from torch import _C", "torch._C"),
    ("x = torch.utils._pytree.tree_map(f, x)", "torch.utils._pytree.tree_map"),
    ("resolve('jax._src.core.Tracer')", "jax._src"),
    ("node._sequence_nr_of_torch()", "_sequence_nr_of_torch"),
    ("getattr(node, '_saved_of_torch')", "_saved_of_torch"),
    ("y = eqn.source.debug_info", "debug_info"),
    ("c = torch.nn.functional.softmax.__code__", "torch.nn.functional.softmax.__code__"),
])  # fmt: skip
def test_what_the_test_finds(text, name):
    found = [n for _, n in private_parts(ast.parse(text), jax=True)]
    assert any(name.startswith(n) for n in found), found


def test_what_the_test_leaves_alone():
    text = '"""Prose about torch._C."""\nx._fields, x._replace(a=1)\nf.__code__, x.__dict__\n'
    assert not [*private_parts(ast.parse(text), jax=True)]


# -- the campaign ----------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_version():
    names = [row.name for row in campaign.rows()]
    assert len({*names}) == len(names)
    for host in (campaign.TORCH, campaign.JAX):
        for version in campaign.minors(host.oldest, host.newest):
            assert f"{host.name} {version}" in names
    page = campaign.PAGE.read_text(encoding="utf-8")
    assert [name for name in names if f"| {name} | " not in page] == []
    assert campaign.page([], page) == page, "write docs/hosts.md with make hosts"


def test_a_row_without_an_interpreter_is_not_run(tmp_path):
    row = campaign.Row("Python 2.6", "2.6")
    result = campaign.run(row, tmp_path, tmp_path / "log")
    assert (result.text, result.ok) == ("not run: there is no Python 2.6 here", False)
    assert not (tmp_path / "env").exists()


def test_lines_of_other_rows_stay():
    first, second = list(campaign.rows())[:2]
    before = campaign.page([campaign.Result(first, {}, "all passed", True)], "")
    after = campaign.page([campaign.Result(second, {"torch": "2.11.0"}, "3 failed")], before)
    lines = [line.split(" | ") for line in after.splitlines() if line.startswith("| PyTorch")]
    assert [cells[7] for cells in lines] == ["all passed", "3 failed"]


def test_pins_are_raised_and_never_lowered():
    older, newer = 'jax==0.10.2; python_version < "3.12"', 'jax==0.12; python_version >= "3.12"'
    pins = f"# why\n{older}\n{newer}\ntorch==2.9\n"
    versions = {"jax": "0.13.1", "torch": "2.8.1+cpu", "numpy": "9"}
    expected = pins.replace("0.12;", "0.13.1;")
    assert campaign.raised(pins, versions, "3.13") == expected
    assert campaign.raised(pins, {"torch": "2.10.0+cpu"}, "3.11") == pins.replace("2.9", "2.10.0")


@pytest.mark.slow
def test_what_fails_in_a_row_is_said(tmp_path, monkeypatch):
    """A row in this environment, with a test that passes and one that fails."""
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    options = "def pytest_addoption(parser): parser.addoption('--all', action='store_true')"
    (tmp_path / "conftest.py").write_text(options)
    monkeypatch.setattr(campaign, "made", lambda row, folder: sys.executable)
    monkeypatch.setattr(campaign, "ROOT", tmp_path)
    row = campaign.Row("here", "3.11", tests=("test_two.py", "-p", "no:randomly"))
    monkeypatch.setitem(campaign.ENVIRONMENT, "PYTHONPATH", str(ROOT))
    log = tmp_path / "log"
    result = campaign.run(row, tmp_path, log)
    assert not result.ok and "1 passed, 1 failed **(exit status 1)**" in result.text
    assert "all 13 features hold" in result.text and "assert 0" in log.read_text()
    assert result.versions["python"] == platform.python_version()
