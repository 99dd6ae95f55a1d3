"""What `regrad.v1` offers, what the page says that it offers, and what it says of the rest."""

import inspect
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


@pytest.mark.parametrize(
    ("space", "name", "near"),
    [("tf", "reduce_summ", "reduce_sum"), ("tf.nn", "relu7", "relu"), ("tf.math", "sqr", "sqrt")],
)
def test_a_misspelt_name_has_near_names(space, name, near):
    with pytest.raises(AttributeError, match=near):
        found(space, name)


def test_python_may_ask_for_what_is_not_there():
    assert not hasattr(tf, "__wrapped__")
    assert not hasattr(tf.nn, "no_such_thing")


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (tf.exp, "(x, name=None)"),
        (tf.argmax, "(input, axis=None, name=None, dimension=None, output_type=tf.int64)"),
        (tf.nn.softmax, "(logits, axis=None, name=None, dim=None)"),
    ],
)
def test_functions_show_the_signatures_of_tensorflow(function, signature):
    assert str(inspect.signature(function)) == signature


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tf.add(1.0), "add: missing a required argument: 'y'"),
        (lambda: tf.add(1.0, 2.0, None, 3.0), "add: too many positional arguments"),
        (lambda: tf.add(1.0, 2.0, x=3.0), "add: multiple values for argument 'x'"),
        (lambda: tf.add(1.0, 2.0, z=3.0), "add: got an unexpected keyword argument 'z'"),
        (lambda: tf.argmax([1.0], 0, dimension=0), "Cannot specify both 'axis' and 'dimension'"),
    ],
)
def test_calls_that_do_not_fit_are_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_tensors_may_be_passed_by_name():
    with tf.Graph().as_default():
        x, y = tf.constant(3.0), tf.constant(1.0)
        assert [t.name for t in tf.subtract(y=y, x=x, name="d").op.inputs] == [x.name, y.name]
