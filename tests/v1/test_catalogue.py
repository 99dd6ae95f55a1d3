"""What `regrad.v1` offers, what the page and the docstrings say of it, and of the rest."""

import doctest
import inspect
import re
import sys
import types

import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.v1.graph.row_docs import RowParts, borrow, complete
from regrad.v1.uncovered import INSTEAD
from tests.helpers.docstrings import MODULES, Close, public
from tests.helpers.paths import DOCS
from tests.helpers.rows import refused

PAGE = (DOCS / "tf1.md").read_text(encoding="utf-8")
COVERED = PAGE[PAGE.index("## Supported names") : PAGE.index("## Unsupported names")]
ROWS = re.findall(r"^\| `(tf[.\w]*)`[^|]*\| (.*) \|$", COVERED, re.M)
NAMES = [(space, name) for space, names in ROWS for name in re.findall(r"`(\w+)`", names)]


def found(space, name):
    module = tf
    for part in space.split(".")[1:]:
        module = getattr(module, part)
    return getattr(module, name)


@pytest.mark.slow(but=100)
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


@pytest.mark.parametrize("name", sorted(INSTEAD.keys() - {"contrib."}))
def test_the_documentation_says_the_same(name):
    written = f"`tf.{name}`" if name[-1] not in "_." else f"`tf.{name}…`"
    assert re.search(rf"^\| .*{re.escape(written)}.* \| {re.escape(INSTEAD[name])} \|$", PAGE, re.M)


@pytest.mark.parametrize(("space", "name", "near"), [
    ("tf", "reduce_summ", "reduce_sum"), ("tf.nn", "relu7", "relu"), ("tf.math", "sqr", "sqrt"),
])  # fmt: skip
def test_a_misspelt_name_has_near_names(space, name, near):
    refused(lambda: found(space, name), AttributeError, near)


SPACES = sorted({space for space, _ in NAMES} - {"tf.errors", "tf.logging"})


@pytest.mark.parametrize("space", SPACES)
def test_a_missing_name_is_named_with_its_namespace(space):
    refused(lambda: found(space, "NoSuchName_"), AttributeError, rf"^{space}\.NoSuchName_ is not")


def test_python_may_ask_for_what_is_not_there():
    assert not hasattr(tf, "__wrapped__")
    assert not hasattr(tf.nn, "no_such_thing")


# -- the docstrings of rows -----------------------------------------------------------------------

ROW = RowParts("tf.f", "Sqrt", "F", ["x", "axis", "name"], ["x"], {}, set(), "f", True, True)


def is_skipped(value):
    """Return whether doctest's own search skips a function: one of a row has foreign globals."""
    known = vars(sys.modules[value.__module__])
    function = inspect.unwrap(value)
    return inspect.isfunction(function) and function.__globals__ is not known


EXAMPLES = [
    pytest.param(value, id=name)
    for module in MODULES
    if module.startswith("regrad.v1")
    for name, value in public(module)
    if ">>>" in value.__doc__ and is_skipped(value)
]


@pytest.mark.parametrize("function", EXAMPLES)
def test_examples_of_public_names_run(function):
    flags = doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(Close(), optionflags=flags, verbose=False)
    text = inspect.cleandoc(function.__doc__)
    runner.run(doctest.DocTestParser().get_doctest(text, {}, function.__name__, None, None))
    assert runner.tries
    assert not runner.failures


def test_what_follows_from_a_row_is_generated():
    doc = complete("Return f.", ROW)
    assert "x: A tensor or array of real floats, or a number." in doc
    assert "axis: The axis." in doc
    assert "name: The name of the op in the graph, by default 'F'." in doc
    assert "A tensor of x's shape and dtype;" in doc
    assert "DTypeError: when a graph is built, `x` does not hold real floats." in doc
    assert doc.endswith("Op type: `Sqrt`. Source: `tf.f`.")


def test_what_a_row_says_itself_wins():
    own = "Return f.\n\nArgs:\n    axis: Mine,\n        on two lines.\n\nReturns:\n    Two."
    doc = complete(own, ROW)
    assert "axis: Mine,\n            on two lines." in doc
    assert "The axis." not in doc
    assert "x: A tensor or array" in doc
    assert "Returns:\n        Two.\n" in doc
    assert "x's shape" not in doc


BORROWED = {
    "maximum x y": """Return the larger of x and y. Where they are equal, the gradient goes to x.

        >>> tf.f(rg.asarray([1.0, 5.0]), 3)
        Tensor([3., 5.], dtype=float32)""",
    "atan2 y x": """Return the angle of the point (x, y) in radians, in (-π, π].

        >>> tf.f(rg.asarray([1.0, 1.0]), rg.asarray([1.0, -1.0]))
        Tensor([0.7853981, 2.3561945], dtype=float32)""",
    "bitwise_invert x": """Return `~x`: every bit of an integer inverted, or `not x` for bools.

        >>> tf.f(rg.asarray([0, 5]))
        Tensor([-1, -6], dtype=int64)""",
}


@pytest.mark.parametrize("row", BORROWED)
def test_a_row_borrows_the_docstring_with_other_names(row):
    name, *names = row.split()
    assert borrow(getattr(rg, name), "tf.f", names) == inspect.cleandoc(BORROWED[row])


def test_errors_of_the_docstring_are_those_of_the_call():
    refused(lambda: tf.sqrt(3), TypeError, "Sqrt takes floats")
    assert "DTypeError: when a graph is built, `x` does not hold" in (tf.sqrt.__doc__ or "")
