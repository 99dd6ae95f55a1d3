"""The programs of a page in a fresh process: `python tests/helpers/readme.py README.md`.

They run one after the other, or one alone: `… README.md 3` runs the fourth. Of the packages of
regrad's extras each finds just those that the text above it installs. This needs nothing but the
page and pyproject.toml, so that it runs where only regrad is installed.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = re.compile(r"^```(python|\{code-cell\}|text)\n((?::\S[^\n]*\n)*)(.*?)^```$", re.S | re.M)
INSTALLS = re.compile(r"pip install ([^`\n#]*)")
EXTRAS = re.compile(r"\[([\w,]+)\]")
MODULES = {"scikit-learn": "sklearn", "dm-haiku": "haiku"}  # where they are not called alike
IMPORTS = "import numpy as np\nimport regrad as rg\n"  # of the README's programs
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


class Program(NamedTuple):
    """A program, what the page says that it prints, if it does, and the modules that it may use."""

    code: str
    prints: str | None
    installed: frozenset[str]


def programs(page: Path) -> list[Program]:
    """Return the programs of a page."""
    text = page.read_text(encoding="utf-8")
    found: list[Program] = []
    for block in BLOCK.finditer(text):
        language, options, code = block.groups()
        if language != "text":
            # (a reader does not see a cell that draws a picture of the site, and needs nothing)
            drawn = modules_of("viz") if "remove-input" in options else frozenset()
            found.append(Program(code, None, installed_by(text[: block.start()]) | drawn))
        elif found and found[-1].prints is None:
            found[-1] = found[-1]._replace(prints=code)
    return found


def installed_by(text: str) -> frozenset[str]:
    """Return the modules of the extras, and others, that the install lines of a text bring."""
    wanted = [word.strip("'\",.") for line in INSTALLS.findall(text) for word in line.split()]
    plain = {MODULES.get(word, word) for word in wanted if word.isidentifier()}
    plain |= {"optax", "rich"} if "flax" in plain else set()  # it needs both
    plain |= {"equinox"} if plain & {"diffrax", "optimistix"} else set()
    return frozenset().union(plain, *map(modules_of, EXTRAS.findall(" ".join(wanted))))


def modules_of(extras: str) -> frozenset[str]:
    """Return the modules that extras bring: `"train,viz"`."""
    names: set[str] = set()
    for extra in extras.split(","):
        for requirement in PROJECT["optional-dependencies"].get(extra, ()):
            name = re.split(r"[\[>=<]", requirement)[0]
            if name == PROJECT["name"]:
                names |= modules_of(EXTRAS.findall(requirement)[0])
            else:
                names.add(MODULES.get(name, name))
    return frozenset(names)


# (What only the developers' extras bring is found: scikit-learn needs cloudpickle, say.)
USERS = PROJECT["optional-dependencies"].keys() - {"docs", "test", "bench"}
OPTIONAL = modules_of(",".join(USERS)) | {"equinox", "flax", "haiku"}


HIDDEN: set[str] = set()


class Finder:
    """Finds modules as another finder does, but for those that are hidden."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, *more: Any) -> Any:
        """Return where a module is; None, as if it were not installed, for a hidden one."""
        return None if name in HIDDEN else self.finder.find_spec(name, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def run(program: Program, scope: dict[str, Any]) -> str:
    """Run a program; return what it prints, or which package is not installed."""
    HIDDEN.clear()
    HIDDEN.update(OPTIONAL - program.installed)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(program.code, scope)
    except ModuleNotFoundError as error:
        if error.name not in program.installed:
            raise
        return f"not run: {error}"
    return out.getvalue()


def main(page: str, *which: str) -> int:
    """Run the programs of a page, and tell what differs from what it says."""
    found = programs(Path(page))
    sys.meta_path[:] = map(Finder, sys.meta_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    if Path(page).name == "README.md":
        exec(IMPORTS, scope)
    right, absent = 0, []
    for program in [found[int(i)] for i in which] or found:
        printed = run(program, scope)
        if printed.startswith("not run"):
            absent.append(printed)
        elif program.prints in (None, printed):
            right += 1
        else:
            print(f"{program.code}\nprints\n\n{printed}\nand the page says\n\n{program.prints}")
            return 1
    print(f"{right} programs print what the page says, {len(absent)} need packages that are absent")
    print(*absent, sep="\n", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
