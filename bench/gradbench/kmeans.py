"""The direction of Newton's method for k-means: the gradient divided by the Hessian's diagonal."""

from __future__ import annotations

from typing import Any

import regrad as rg

from .protocol import function, tensor


def distances(points: rg.Tensor, centroids: rg.Tensor) -> rg.Tensor:
    """Return the squared distances of all points from all centroids, minus each point's |p|²."""
    return centroids.square().sum(axis=1) - 2 * (points @ centroids.T)


def objective(points: rg.Tensor, centroids: rg.Tensor) -> rg.Tensor:
    """Return the cost, from the nearest centroids only, so that derivatives involve no others."""
    nearest = rg.argmin(distances(points, rg.stop_gradient(centroids)), axis=1)
    return (points - rg.take(centroids, nearest, axis=0)).square().sum()


def read(given: dict[str, Any]) -> tuple[rg.Tensor, rg.Tensor]:
    return tensor(given["points"]), tensor(given["centroids"])


@function(read, float)
@rg.jit
def cost(points: rg.Tensor, centroids: rg.Tensor) -> rg.Tensor:
    # XLA finds the minimum of many numbers much faster than its index.
    return points.square().sum() + distances(points, centroids).min(axis=1).sum()


@function(read)
@rg.jit
def dir(points: rg.Tensor, centroids: rg.Tensor) -> rg.Tensor:
    gradient = rg.grad(lambda c: objective(points, c))
    # The Hessian is diagonal, so its product with ones is its diagonal.
    slope, curvature = rg.jvp(gradient, [centroids], [rg.ones_like(centroids)])
    return slope / curvature
