"""The programs of a page, run one after the other: `python tests/helpers/readme.py README.md`.

It needs nothing but the page, so that it runs where only regrad is installed.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.S)


def printed_by(page: Path, **scope: Any) -> Iterator[tuple[str, str]]:
    """Run the programs of a page in one scope; yield what one printed, and what the page says."""
    printed = ""
    for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == "text":
            yield printed, text
            continue
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(text, scope)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("regrad") or "pytest" in sys.modules:
                raise
            out.write(f"not run: {error}")
        printed = out.getvalue()


if __name__ == "__main__":
    import numpy as np

    import regrad as rg

    outputs = [*printed_by(Path(sys.argv[1]), rg=rg, np=np)]
    right = sum(printed == expected for printed, expected in outputs)
    absent = sum(printed.startswith("not run") for printed, _ in outputs)
    print(f"{right} programs print what the page says, {absent} need packages that are absent")
    sys.exit(right + absent != len(outputs))
