"""Parts that the docstrings of public names must have.

    python -m tests.helpers.docstrings [MODULE …]

lists what is missing. Every public callable has a summary in the imperative, its arguments, what it
returns, its errors, and an example that runs (tests/project/test_docs.py runs it). Classes have a
summary that says what they are; exceptions only that.
"""

from __future__ import annotations

import doctest
import inspect
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, _GenericAlias  # pyright: ignore

from tests.helpers.paths import DOCS

MODULES = [
    "regrad", "regrad.nn", "regrad.losses", "regrad.linalg", "regrad.random", "regrad.fft",
    "regrad.rules", "regrad.rules.lrp", "regrad.extend", "regrad.testing", "regrad.plot",
    "regrad.train", "regrad.jax", "regrad.torch", "regrad.v1",
]  # fmt: skip
# The namespaces of `regrad.v1`; they are modules in which helpers lie as well.
NAMESPACES = [
    "nn", "train", "layers", "losses", "image", "initializers", "linalg", "math", "random",
    "spectral", "signal", "bitwise", "contrib.layers", "metrics", "summary",
]  # fmt: skip
MODULES += [f"regrad.v1.{name}" for name in NAMESPACES]
HELPERS = {"bessel", "channels_last", "fans", "sparse_cross_entropy", "to_first", "to_last"}
HEADLESS = re.compile(r"(The|A|An|What|Whether|Which|How|As|[a-z`\d-].*?|\W.*?|[a-z]+,)\b")


NUMBER = re.compile(r"-?\b\d+\.\d*(?:e[+-]?\d+)?")


class Close(doctest.OutputChecker):
    """Takes floats that differ in the last digits, which depend on the processor."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        if super().check_output(want, got, optionflags):
            return True
        texts = [re.sub(r"\s+", "", NUMBER.sub("0", text)) for text in (want, got)]
        numbers = [[float(n) for n in NUMBER.findall(text)] for text in (want, got)]
        return texts[0] == texts[1] and all(map(_is_close, *numbers))


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-12)


@cache
def _origins() -> Any:
    """The function of the site's reference that knows the public names of a module."""
    spec = spec_from_file_location("public_names", DOCS / "_ext/public_names.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # (for its named tuples)
    spec.loader.exec_module(module)
    return module.origins


def public(module: str) -> Iterator[tuple[str, Any]]:
    """Yield the public callables of a module by their full names."""
    if module.startswith("regrad.v1."):
        yield from _in_namespace(module)
        return
    found = import_module(module)
    v1 = module == "regrad.v1"  # whose names are those of TensorFlow's index
    names = [n for n in dir(found) if n[0] != "_"] if v1 else _origins()(module)
    for name in sorted(names):
        value = getattr(found, name)
        theirs = v1 and not (getattr(value, "__module__", None) or "").startswith("regrad")
        if callable(value) and not isinstance(value, ModuleType | _GenericAlias) and not theirs:
            yield f"{module}.{name}", value


def _in_namespace(module: str) -> Iterator[tuple[str, Any]]:
    found = attrgetter(module.removeprefix("regrad.v1."))(import_module("regrad.v1"))
    for name, value in sorted(vars(found).items()):
        origin = getattr(value, "__module__", None) or ""
        ours = origin.startswith(("regrad.v1.functions", "regrad.v1.training", module))
        public = name not in HELPERS and not name.startswith("_")
        if ours and public and isinstance(value, type | FunctionType):
            yield f"{module}.{name}", value


def missing(value: Any) -> list[str]:
    """Return what the docstring of a public callable lacks."""
    doc = inspect.cleandoc(value.__doc__ or "")
    if not doc:
        return ["a docstring"]
    found = []
    summary = doc.splitlines()[0]
    if not summary.endswith("."):
        found.append("a summary of one sentence")
    if isinstance(value, type) and issubclass(value, BaseException):
        return found
    names = [] if _is_record(value) else _parameters(value)
    if not isinstance(value, type):
        if HEADLESS.match(summary):
            found.append(f"a summary in the imperative, not {summary!r}")
        if not (_has(doc, "Returns") or summary.startswith("Return ") or _returns_none(value)):
            found.append("Returns")
        if names and not _has(doc, "Raises"):
            found.append("Raises")
    found += [f"Args: {name}" for name in names if not _describes(doc, name)]
    if ">>>" not in doc and not _is_record(value):
        found.append("an example")
    return found


def _parameters(value: Any) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in parameters if name != "self" and name[0] != "_"]


def _is_record(value: Any) -> bool:
    """Return whether a class is a record that functions return; nobody else makes one."""
    return isinstance(value, type) and (
        issubclass(value, tuple) or is_dataclass(value) or "\n    Attributes:\n" in value.__doc__
    )


def _returns_none(value: Any) -> bool:
    return getattr(value, "__annotations__", {}).get("return") in (None, "None")


def _has(doc: str, *titles: str) -> bool:
    """Return whether there is a section, or a sentence, of this title."""
    return any(re.search(rf"^{title}(:$| )", doc, re.M) for title in titles)


def _describes(doc: str, name: str) -> bool:
    """Return whether a line of the section of arguments is about a parameter."""
    section = re.search(r"^Args:\n((?: .*\n|\n)+)", doc + "\n", re.M)
    lines = re.findall(r"^ {4}([\w*, ]+):", section[1], re.M) if section else []
    return name in {part.strip(" *") for line in lines for part in line.split(",")}


def main(modules: list[str]) -> None:
    for module in modules or MODULES:
        gaps = {name: missing(value) for name, value in public(module)}
        for name, parts in gaps.items():
            if parts:
                print(f"{name}: {'; '.join(parts)}")
        print(f"{module}: {sum(map(bool, gaps.values()))} of {len(gaps)} lack something")


if __name__ == "__main__":
    main(sys.argv[1:])
