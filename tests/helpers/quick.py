"""What tests of compiled functions share."""

from __future__ import annotations

import gc
import itertools
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import pytest

import regrad as rg
from regrad.core.state import LIVE, current
from regrad.transforms import program
from regrad.transforms.program import find_jax
from regrad.v1.run import compiled_plans

# What `conftest` tells XLA to leave out is put in again.
OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
if version("jaxlib").startswith("0.10."):
    OPTIONS |= {"xla_cpu_use_fusion_emitters": True, "xla_cpu_parallel_codegen_split_count": 32}


class FullEffort:
    """JAX, but for programs that are compiled as users have them."""

    jit = staticmethod(partial(jax.jit, compiler_options=OPTIONS))

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


@pytest.fixture(scope="module")
def full_effort():
    """In this module, `rg.jit` and `Session(jit=True)` compile as they do for users."""
    find_jax()  # what it does once is done
    stand_in = FullEffort()
    with pytest.MonkeyPatch.context() as patch:
        for module in (program, compiled_plans):
            patch.setattr(module, "find_jax", lambda: stand_in)
        yield


MODES = pytest.mark.parametrize("mode", [lambda f: f, rg.jit], ids=["eager", "jit"])


@pytest.fixture
def nothing_is_left_open():
    """After each test no tape and no scope is in force, and nobody holds one."""
    yield
    assert current() is None
    gc.collect()
    if LIVE:  # (a test that failed before has been kept by its traceback, out of `gc`'s sight)
        gc.unfreeze()
        gc.collect()
    assert not LIVE


class Counting:
    """f, and how often it ran."""

    def __init__(self, f):
        self.f = f
        self.__wrapped__ = f
        self.counter = itertools.count()

    def __call__(self, *args, **kwargs):
        next(self.counter)
        return self.f(*args, **kwargs)

    @property
    def runs(self):
        return int(repr(self.counter)[len("count(") : -1])
