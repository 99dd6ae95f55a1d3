"""Shared code of the evals: timing of functions, and conversion of numbers to Tensors."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import jax.numpy as jnp
import numpy as np

import regrad as rg


class Function:
    """A function of an eval, with conversions of its arguments and result from and to JSON."""

    def __init__(self, call: Callable[..., Any], read: Callable[[Any], tuple], write: Callable):
        self.call, self.read, self.write = call, read, write

    def __call__(self, given: Any) -> Any:
        return self.write(self.call(*self.read(given)))

    def evaluate(self, given: Any) -> dict[str, Any]:
        """Return the reply to an `evaluate` message: the output, and the time of each run."""
        runs, seconds = 1, 0.0
        if isinstance(given, dict):  # (hello sends a bare number)
            runs, seconds = given.get("min_runs", 1), given.get("min_seconds", 0.0)
        arguments = self.read(given)
        times: list[int] = []
        while True:
            start = perf_counter_ns()
            result = rg.block_until_ready(self.call(*arguments))
            times.append(perf_counter_ns() - start)
            if len(times) >= runs and sum(times) >= seconds * 1e9:
                break
        timings = [{"name": "evaluate", "nanoseconds": time} for time in times]
        return {"output": self.write(result), "timings": timings}


def function(
    read: Callable[[Any], tuple], write: Callable = rg.Tensor.tolist
) -> Callable[[Callable[..., Any]], Function]:
    """Make a function of an eval. `read` returns its arguments, `write` converts its result."""
    return lambda call: Function(call, read, write)


def tensor(values: Any) -> rg.Tensor:
    """Return a float64 Tensor of JAX data, so that compiled calls need no conversion."""
    return rg.asarray(jnp.asarray(np.asarray(values, dtype=np.float64)))


def indices(values: Any) -> rg.Tensor:
    """Return an int32 Tensor of JAX data."""
    return rg.asarray(jnp.asarray(np.asarray(values, dtype=np.int32)))
