"""The docstrings of public names are whole: summary, arguments, results, errors, an example."""

import ast
import re

import pytest

from tests.helpers import docstrings
from tests.helpers.paths import ROOT

CODE = re.compile(r"`[^`]+`")
# Text that reStructuredText reads in another way: the site's build raises.
UNREADABLE = re.compile(r"^ *\|.*|\|\w+\||`X`\w|^ *\*\w+, \*\*", re.M)


def unreadable(docstring: str) -> list[str]:
    """Return parts of a docstring that the site cannot show: bars, a plural after a backquote."""
    text = CODE.sub("`X`", re.sub(r"^ *>>>.*?(?:\n\n|\Z)", "", docstring, flags=re.S | re.M))
    return [found[0] for found in UNREADABLE.finditer(text)]


@pytest.mark.parametrize("module", docstrings.MODULES)
def test_docstrings_are_whole(module):
    gaps = {name: docstrings.missing(value) for name, value in docstrings.public(module)}
    assert {name: parts for name, parts in gaps.items() if parts} == {}
    assert len(gaps) >= 4


def classes():
    for module in [*docstrings.MODULES, "regrad.rules.attribution", "regrad.rules.quantize"]:
        for name, value in docstrings.public(module):
            if isinstance(value, type) and not issubclass(value, BaseException):
                yield name, value


def test_every_public_class_has_an_example():
    """Also records that only functions return, whose other parts `missing` does not ask for."""
    found = dict(classes())
    assert len(found) > 40
    assert [name for name, value in found.items() if ">>>" not in (value.__doc__ or "")] == []


def test_the_site_can_show_docstrings():
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{path.name}: {node.name}"] = unreadable(ast.get_docstring(node) or "")
    assert {name: parts for name, parts in found.items() if parts} == {}
    assert len(found) > 4000


@pytest.mark.parametrize(
    ("docstring", "parts"),
    [
        ("Return 1 / |x| of `|x|`.", ["|x|"]),
        ("Return `Spec`s.", ["`X`s"]),
        ("| a | b |\n|---|---|", ["| a | b |", "|---|---|"]),
        ("Args:\n    *args, **options: Numbers.", ["    *args, **"]),
        ("Return `a | b`.\n\n>>> a | b\n| 2 |", []),
    ],
)
def test_text_that_the_site_cannot_show_is_found(docstring, parts):
    assert unreadable(docstring) == parts


def test_gaps_are_found():
    def headless(x, y):
        """What x is.

        Args:
            x: A number.
        """

    found = docstrings.missing(headless)
    assert found == [
        "a summary in the imperative, not 'What x is.'", "Raises", "Args: y", "an example",
    ]  # fmt: skip
    assert docstrings.missing(lambda: 0) == ["a docstring"]
