"""Functions that are written out as source: tracebacks show it, and it goes with them."""

import gc
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


def test_source_goes_with_its_function():
    function = define("twice", "def twice(x):\n    return 2 * x", {})
    file = function.__code__.co_filename
    assert function(4) == 8
    assert linecache.getline(file, 2) == "    return 2 * x"
    assert file != define("twice", "def twice(x): return x", {}).__code__.co_filename
    del function
    gc.collect()
    assert linecache.getline(file, 2) == ""
