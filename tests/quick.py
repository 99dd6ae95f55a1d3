"""What tests of compiled functions share; programs that run once should be made quickly."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import regrad as rg
from regrad import compiled
from regrad.compiled import find_jax
from regrad.state import LIVE, current

# What XLA is told to leave out. Nearly all the time of these tests would go into machine code
# that runs once; without these passes a program is compiled in a quarter of the time.
OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Those that this version of XLA has."""
    found = {}
    for name, value in options.items():
        try:
            jax.jit(jnp.negative, compiler_options={name: value})(1.0)
        except Exception:  # an option that does not exist raises errors of several kinds
            continue
        found[name] = value
    return found


class Quick:
    """JAX, but for programs that are compiled with the least effort."""

    def __init__(self) -> None:
        self.jit = partial(jax.jit, compiler_options=known(OPTIONS))

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


@pytest.fixture(scope="module")
def quick():
    """In this module, `rg.jit` compiles with the least effort."""
    find_jax()  # what it does once is done
    stand_in = Quick()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "find_jax", lambda: stand_in)
        yield


MODES = pytest.mark.parametrize("mode", [lambda f: f, rg.jit], ids=["eager", "jit"])


@pytest.fixture
def nothing_is_left_open():
    """After each test no tape and no scope is in force, and nobody holds one."""
    yield
    assert current() is None
    gc.collect()
    assert not LIVE
