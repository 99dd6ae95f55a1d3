"""The logarithm of a sum of exponentials, without overflow."""

from __future__ import annotations

from typing import Any

import regrad as rg

from .protocol import function, tensor


def logsumexp(x: rg.Tensor) -> rg.Tensor:
    # The result does not depend on the subtracted number, so the gradient does not, either.
    largest = rg.stop_gradient(x.max())
    return largest + rg.log(rg.exp(x - largest).sum())


def read(given: dict[str, Any]) -> tuple[rg.Tensor]:
    return (tensor(given["x"]),)


primal = function(read, float)(rg.jit(logsumexp))
gradient = function(read)(rg.jit(rg.grad(logsumexp)))
