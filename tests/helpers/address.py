"""Where regrad is to be had: `python -m tests.helpers.address` takes it to where it is needed.

`[tool.regrad]` of pyproject.toml says it: the address of the repository and the name in the package
index, both empty until a release.
"""

from __future__ import annotations

import re
import sys
import tomllib
from typing import NamedTuple

from tests.helpers.paths import ROOT

PLACES = "pyproject.toml", "CITATION.cff", "README.md", "src/regrad/core/extras.py"
BEFORE = "[project.optional-dependencies]\n"
URLS = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues"}  # fmt: skip


class Address(NamedTuple):
    """The address of the repository, and the name in the package index."""

    repository: str = ""
    registry: str = ""


def known() -> Address:
    """Return what pyproject.toml says."""
    return Address(**tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["regrad"])


def filled(place: str, text: str, address: Address) -> str:
    """Return the text of a file with the address, if there is one, where it is needed."""
    home = address.repository
    if place == "pyproject.toml":
        text = re.sub(r"\[project\.urls\]\n(?:.+\n)+\n", "", text)
        lines = "".join(f'{name} = "{home}{path}"\n' for name, path in URLS.items())
        return text.replace(BEFORE, f"[project.urls]\n{lines}\n{BEFORE}") if home else text
    if place == "CITATION.cff":
        text = re.sub(r"repository-code: .*\n", "", text)
        return text.replace("keywords:\n", f"repository-code: {home}\nkeywords:\n", bool(home))
    if place == "README.md":  # which package indexes show, far from the files
        text = re.sub(r"\]\(https://[^)\s]*?/(?:blob|raw)/main/", "](", text)
        if home:
            text = re.sub(r"(!\[[^]]*\]\()(?!https:|#)", rf"\1{home}/raw/main/", text)
            text = re.sub(r"(?<!!)(\[[^][]*\]\()(?!https:|#)", rf"\1{home}/blob/main/", text)
        return text
    what = f"{address.registry}[{{}}]" if address.registry else ".[{}]"
    return re.sub(r'(?m)^INSTALL = "[^"]*"', f"INSTALL = \"pip install '{what}'\"", text)


def main(*options: str) -> int:
    """Fill the address in; with --released, refuse to go on without one."""
    address = known()
    for place in PLACES:
        path = ROOT / place
        path.write_text(filled(place, path.read_text(encoding="utf-8"), address), encoding="utf-8")
    if "--released" in options and not all(address):
        print("[tool.regrad] in pyproject.toml lacks the repository or the registry's name")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
