"""The logarithm of the posterior probability of a mixture of Gaussians."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import multigammaln

import regrad as rg

from .protocol import function, tensor

NAMES = ("alpha", "mu", "q", "l")
Independent = dict[str, rg.Tensor]  # the names of the parameters


def log_posterior(independent: Independent, x: rg.Tensor, m: int, gamma: float) -> rg.Tensor:
    alpha, mu, q, below = (independent[name] for name in NAMES)
    (n, d), k = x.shape, len(alpha)
    factor = cholesky(q, below)
    # Q(x - μ) = Qx - Qμ, so all components share one large matrix product.
    # The points are the last axis, because XLA sums along the other axes for many points at once.
    scaled = (factor.reshape((k * d, d)) @ x.T).reshape((k, d, n))
    distance = (scaled - factor @ mu[..., None]).square().sum(axis=1)
    log_determinant = q.sum(axis=1)
    weight = alpha + log_determinant
    likelihood = rg.logsumexp(weight[:, None] - distance / 2, axis=0).sum()
    likelihood -= n * (d / 2 * math.log(2 * math.pi) + rg.logsumexp(alpha))
    freedom = d + m + 1
    constant = freedom * d * math.log(gamma / math.sqrt(2)) - multigammaln(freedom / 2, d)
    prior = m * log_determinant.sum() - gamma**2 / 2 * factor.square().sum()
    return likelihood + prior + k * constant


def cholesky(q: rg.Tensor, below: rg.Tensor) -> rg.Tensor:
    """Return the lower triangular factors. `below` holds their lower entries by column."""
    k, d = q.shape
    columns, rows = np.triu_indices(d, 1)
    zeros = rg.zeros((k, d, d), dtype=rg.float64)
    triangles = rg.at_set(zeros, (slice(None), rows, columns), below)
    return triangles + rg.exp(q)[..., None] * rg.eye(d, dtype=rg.float64)


def read(given: dict[str, Any]) -> tuple[Independent, rg.Tensor, int, float]:
    independent = {name: tensor(given[name]) for name in NAMES}
    return independent, tensor(given["x"]), given["m"], given["gamma"]


def write(gradient: Independent) -> dict[str, Any]:
    return {name: entry.tolist() for name, entry in gradient.items()}


@function(read, float)
@rg.jit(static_argnums=(2, 3))
def objective(independent: Independent, x: rg.Tensor, m: int, gamma: float) -> rg.Tensor:
    return log_posterior(independent, x, m, gamma)


@function(read, write)
@rg.jit(static_argnums=(2, 3))
def jacobian(independent: Independent, x: rg.Tensor, m: int, gamma: float) -> Independent:
    return rg.grad(lambda independent: log_posterior(independent, x, m, gamma))(independent)
