"""Functions that are written out as source: tracebacks show it, and it goes with them."""

import gc
import inspect
import linecache
import traceback

import pytest

import regrad as rg
from regrad.core.generated import define


def test_tracebacks_show_the_line():
    with pytest.raises(TypeError) as caught:
        rg.expand_dims()
    assert any(
        "misfit_" in (f.line or "") for f in traceback.extract_tb(caught.value.__traceback__)
    )


def test_each_function_has_its_own_source():
    twice = define("twice", "def twice(x):\n    return 2 * x", {})
    thrice = define("twice", "def twice(x):\n    return 3 * x", {})
    assert (twice(4), thrice(4)) == (8, 12)
    assert twice.__code__.co_filename != thrice.__code__.co_filename
    line = linecache.getline(twice.__code__.co_filename, 2, twice.__globals__)
    assert line == "    return 2 * x\n"


def test_the_source_of_an_op_is_known_to_inspect():
    assert inspect.getsource(rg.expand_dims).startswith("def expand_dims(")


def test_nothing_is_left_of_a_function_that_nobody_looked_at():
    function = define("twice", "def twice(x):\n    return 2 * x", {})
    file = function.__code__.co_filename
    del function
    gc.collect()
    assert file not in linecache.cache
    assert linecache.getline(file, 2) == ""
