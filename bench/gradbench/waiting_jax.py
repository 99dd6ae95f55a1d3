"""JAX's tool of a checkout, made to wait: `python -m bench.gradbench.waiting_jax RUN.PY`.

A call in JAX returns before the result is computed, and the tool stops its clock at that point. So
it would time only the dispatch of a call. This module replaces the tool's measuring decorator,
before the tool loads it, by a decorator that waits within the measured call.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from gradbench import wrap  # pyright: ignore  (from the checkout)

measured = wrap.multiple_runs


def waiting(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    decorate = measured(**options)
    return lambda f: decorate(lambda x: jax.block_until_ready(f(x)))


if __name__ == "__main__":
    wrap.multiple_runs = waiting
    tool = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path[0] = str(tool.parent)  # the tool finds its evals there
    runpy.run_path(str(tool), run_name="__main__")
