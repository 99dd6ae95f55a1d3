"""Marks of a private register in English prose, by file and line.

The marks are habits that make a reader stop: pronouns for nouns ("that of", "one that"), clauses
with "what" as nouns, passives without an actor, code with a mind, translated idioms, inversions.
The docstrings of JAX, Optax, Flax, NumPy and SciPy have 0.4 to 0.7 marks in 1,000 words.

    python -m tests.helpers.english                 counts by kind of text
    python -m tests.helpers.english src/regrad/v1   each mark of these files, with its line
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.helpers.paths import ROOT

MARKS = {
    "pro-form": r"that of|those of|those by|that by|one that|ones that|those that|as those"
    r"|as one(?=[.,;:]| that)|are such|of such",
    "what-clause": r"(?:^|(?<=[.;:,*] )|(?<=\band )|(?<=\bof )|(?<=\bsays )|(?<=\bis )|(?<=\bare )"
    r"|(?<=\bhas )|(?<=\bsees )|(?<=\bfor )|(?<=\bin ))[Ww]hat (?!if|happens|you|to)\w+",
    "passive": r"(?:is|are|was|were|be|been) (?:told|refused|passed over|taken apart|taken along"
    r"|seen through|put in force|handed|understood|asked|meant|left alone)",
    "mind": r"asks? (?:Python|nobody|for|before)|knows? (?:of|no|which|nothing|what)|teaches"
    r"|learns? nothing|nobody|whoever|tells? (?:it|them|what|whether|which|the)|has no word"
    r"|says? (?:nothing|so|much|how|what|where|which|if)",
    "idiom": r"in silence|(?:and|without|with) (?:no|a) word|as ever|to the bit|mend(?:s|ed)?"
    r"|out of turn|otherwise called|anew|thereby|therein",
    "inversion": r"(?<=[.;,] )(?:[Ss]o (?:is|are|does|do|it is)|[Nn]or (?:is|are|does|do))",
}
PATTERNS = {name: re.compile(rf"(?:^|(?<=\W))(?:{mark})\b") for name, mark in MARKS.items()}
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "bench/page.md"]
# Pages with tables of recorded output, whose prose stands in pages of tests/campaigns and bench.
RECORDED = {
    "proof.md", "peers.md", "quantize_peers.md", "spike_peers.md", "benchmarks.md",
    "public_models.md",
}  # fmt: skip


class Text(NamedTuple):
    """A piece of prose: its file, its first line, its kind, and the prose."""

    path: Path
    line: int
    kind: str
    prose: str


def _blank(match: re.Match[str]) -> str:
    return " " + "\n" * match[0].count("\n")


def prose_of(markdown: str) -> str:
    """Return the prose of a page: no code, tables or front matter; each line stays in its place."""
    text = re.sub(r"\A---.*?^---", _blank, markdown, flags=re.S | re.M)
    text = re.sub(r"^ *(```+|~~~+).*?^ *\1", _blank, text, flags=re.S | re.M)
    text = re.sub(r":::+.*|^\|.*\|$|^\(.*\)=$", " ", text, flags=re.M)
    text = re.sub(r"\{[a-z:]+\}`([^`<]*)(?:<[^>]*>)?`", r"\1", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`+[^`]*`+", "X", text)


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the prose of a file: a page, or docstrings, comments and messages of a module."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield Text(path, 1, "docs", prose_of(source))
        return
    docs: set[int] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (
            found := ast.get_docstring(node, clean=False)
        ):
            docs.add(id(node.body[0].value))  # pyright: ignore[reportAttributeAccessIssue]
            lines = [
                "" if line.lstrip().startswith((">>>", "...")) else line
                for line in found.splitlines()
            ]
            yield Text(path, node.body[0].lineno, "docstrings", prose_of("\n".join(lines)))
    inner = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(
                str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docs or id(node) in inner:
                continue
            words = node.value
        else:
            continue
        if len(words.split()) >= 4:
            yield Text(path, node.lineno, "messages", prose_of(words))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], "comments", prose_of(token.string.lstrip("# ")))


def marks_of(text: Text) -> Iterator[tuple[int, str, str]]:
    """Yield each mark of a text: its line, its kind and the words."""
    flat = re.sub(r"\s", " ", text.prose)
    for name, pattern in PATTERNS.items():
        for match in pattern.finditer(flat):
            line = text.line + text.prose.count("\n", 0, match.start())
            yield line, name, flat[max(0, match.start() - 30) : match.end() + 30].strip()


def files_of(*places: str) -> list[Path]:
    """Return the pages and modules in files and folders; without any, those of the project."""
    roots = [ROOT / p for p in places or (*PAGES, "docs", "src/regrad", "examples")]
    found = [f for r in roots for f in ([r] if r.is_file() else sorted(r.rglob("*")))]
    return [f for f in found if f.suffix in (".py", ".md") and f.name not in RECORDED]


def count(texts: list[Text]) -> tuple[int, int]:
    """Return the number of words and of marks."""
    words = sum(len(re.findall(r"[A-Za-z][A-Za-z'-]*", t.prose)) for t in texts)
    return words, sum(1 for t in texts for _ in marks_of(t))


def main(places: list[str]) -> None:
    texts = [t for f in files_of(*places) for t in texts_of(f)]
    if places:
        for text in texts:
            for line, name, words in marks_of(text):
                print(f"{text.path.relative_to(ROOT)}:{line}: {text.kind}, {name}: …{words}…")
    for kind in dict.fromkeys(t.kind for t in texts):
        words, marks = count([t for t in texts if t.kind == kind])
        print(f"{kind:12s} {words:7,d} words {marks:5d} marks {1000 * marks / words:6.1f} in 1,000")


if __name__ == "__main__":
    main(sys.argv[1:])
