"""What `regrad.v1` offers, what the page says that it offers, and what it says of the rest."""

import re
import types

import pytest

import regrad.v1 as tf
from regrad.v1.uncovered import INSTEAD
from tests.helpers.paths import DOCS

PAGE = (DOCS / "tf1.md").read_text(encoding="utf-8")
COVERED = PAGE[PAGE.index("## What is covered") : PAGE.index("## What is not")]
ROWS = re.findall(r"^\| `(tf[.\w]*)`[^|]*\| (.*) \|$", COVERED, re.M)
NAMES = [(space, name) for space, names in ROWS for name in re.findall(r"`(\w+)`", names)]


def found(space, name):
    module = tf
    for part in space.split(".")[1:]:
        module = getattr(module, part)
    return getattr(module, name)


@pytest.mark.parametrize(("space", "name"), NAMES)
def test_what_the_page_lists_is_there(space, name):
    found(space, name)


def test_the_page_lists_what_is_there():
    listed = {name for space, name in NAMES if space == "tf"}
    public = {
        name
        for name, value in vars(tf).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType | types.SimpleNamespace)
        and getattr(value, "__module__", "regrad.v1").startswith("regrad.v1")
    }
    assert public - listed - {"annotations"} == set()


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_what_is_not_covered_says_what_to_call(name):
    *space, last = name.split(".")
    with pytest.raises(AttributeError, match="Use instead: "):
        found(".".join(["tf", *space]), last + ("x" if last[-1:] in ("_", "") else ""))


@pytest.mark.parametrize(("space", "name", "near"), [
    ("tf", "reduce_summ", "reduce_sum"), ("tf.nn", "relu7", "relu"), ("tf.math", "sqr", "sqrt"),
])  # fmt: skip
def test_a_misspelt_name_has_near_names(space, name, near):
    with pytest.raises(AttributeError, match=near):
        found(space, name)


def test_python_may_ask_for_what_is_not_there():
    assert not hasattr(tf, "__wrapped__")
    assert not hasattr(tf.nn, "no_such_thing")
