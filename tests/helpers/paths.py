"""Where the files lie that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
GOLDEN = ROOT / "tests" / "golden"  # recorded from TensorFlow and TensorFlow.js
