"""The words of the docs, docstrings and messages: plain English, and no dialect of our own."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

# What to write instead stands beside each pattern.
WORDS = {
    r"\b(is|are|was|were) due\b": "expected",
    r"(?<!here )(?<!hich )\b(is|are) no (?!longer|more|less|way|matter)\w+": "is not a …",
    r"\b(is|are|be) had\b": "there is …, can be installed",
    r"\bput down\b": "written, recorded",
    r"\btold? apart\b": "distinguish",
    r"\bstands? in for\b": "replaces",
    r"\brestless\b": "loaded",
    r"\bmodels of others\b": "third-party models",
    r"\baffair\b": "is up to …",
    r"\bbeside\b": "besides, next to",
    r"\b(gives|gave|given back)\b": "returns, has, makes",
    r"\bwhat is given\b": "the argument",
}
FOLDERS = {"src": ".py", "docs": ".md", "examples": ".py"}
PAGES = ["README.md", "CONTRIBUTING.md", "bench/README.md", "bench/page.md"]


def texts() -> list[Path]:
    found = [ROOT / page for page in PAGES]
    for folder, suffix in FOLDERS.items():
        found += sorted((ROOT / folder).rglob(f"*{suffix}"))
    return [*found, *sorted((ROOT / "docs").rglob("*.py"))]


@pytest.mark.parametrize("path", texts(), ids=lambda p: str(p.relative_to(ROOT)))
def test_words_are_plain(path):
    text = path.read_text(encoding="utf-8")
    if path.name == "proof.md":  # its tables have messages as they were recorded
        text = re.sub(r"^\|.*", "", text, flags=re.M)
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: "
        f"{match[0]!r}: write {instead!r}"
        for pattern, instead in WORDS.items()
        for match in re.finditer(pattern, text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "src").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_docstrings_of_functions_are_no_questions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {doc.splitlines()[0]}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and (doc := ast.get_docstring(node))
        and doc.startswith(("What ", "Whether ", "How ", "Which ", "Where "))
    ]
    assert not found, "\n".join(found)
