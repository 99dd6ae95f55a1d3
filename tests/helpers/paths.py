"""Where the files lie that tests read."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests" / "golden"  # recorded from TensorFlow and TensorFlow.js


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed source of a file, which several tests read."""
    return ast.parse(path.read_text(encoding="utf-8"))
