"""Bundle adjustment: the distances between projected points and their positions in images."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import regrad as rg

from .protocol import function, indices, tensor

CAMERA, POINT = 11, 3  # the number of parameters of each
ROW = CAMERA + POINT + 1  # the number of inputs of one reprojection error


class Observations(NamedTuple):
    """The pairs of camera and point, the observed positions, and their weights."""

    cameras: rg.Tensor  # (n, 11)
    points: rg.Tensor  # (m, 3)
    weights: rg.Tensor  # (p,)
    features: rg.Tensor  # (p, 2)
    camera: rg.Tensor  # (p,), indices
    point: rg.Tensor  # (p,), indices


Columns = list[rg.Tensor]  # one Tensor per component, which holds it for all observations


def dot(a: Columns, b: Columns) -> rg.Tensor:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def cross(a: Columns, b: Columns) -> Columns:
    return [
        a[1] * b[2] - a[2] * b[1],
        a[2] * b[0] - a[0] * b[2],
        a[0] * b[1] - a[1] * b[0],
    ]


def rotated(x: Columns, axis: Columns) -> Columns:
    """Rotate points about an axis, whose length is the angle (Rodrigues' formula)."""
    squared = dot(axis, axis)
    turned = squared > 0
    angle = rg.sqrt(rg.where(turned, squared, 1))  # (keeps the gradient finite)
    cosine = rg.where(turned, rg.cos(angle), 1)
    sine = rg.where(turned, rg.sin(angle) / angle, 1)
    along = dot(axis, x) * rg.where(turned, (1 - rg.cos(angle)) / angle.square(), 0)
    beside = cross(axis, x)
    return [x[i] * cosine + beside[i] * sine + axis[i] * along for i in range(3)]


def reprojection(variables: Columns, feature: Columns) -> Columns:
    """Return the two errors of the observations. Their variables are the entries of a matrix row.

    The function uses columns instead of arrays of rows. XLA fuses elementwise ops to few loops, and
    joining rows would split the loops.
    """
    camera, point, weight = variables[:11], variables[11:14], variables[14]
    seen = rotated([point[i] - camera[3 + i] for i in range(3)], camera[:3])
    flat = [seen[0] / seen[2], seen[1] / seen[2]]
    r2 = flat[0].square() + flat[1].square()
    scale = camera[6] * (1 + camera[9] * r2 + camera[10] * r2.square())
    return [weight * (flat[i] * scale + camera[7 + i] - feature[i]) for i in range(2)]


def gathered(o: Observations) -> tuple[Columns, Columns]:
    """Return the arguments of `reprojection`."""
    camera = [rg.take(column, o.camera) for column in rg.unstack(o.cameras, axis=1)]
    point = [rg.take(column, o.point) for column in rg.unstack(o.points, axis=1)]
    return [*camera, *point, o.weights], rg.unstack(o.features, axis=1)


def read(given: dict[str, Any]) -> tuple[Observations]:
    n, m, p = given["n"], given["m"], given["p"]
    observations = Observations(
        tensor(np.tile(given["cam"], (n, 1))),
        tensor(np.tile(given["x"], (m, 1))),
        tensor(np.full(p, given["w"])),
        tensor(np.tile(given["feat"], (p, 1))),
        indices(np.arange(p) % n),
        indices(np.arange(p) % m),
    )
    return (observations,)


def write_errors(errors: tuple[rg.Tensor, rg.Tensor]) -> dict[str, Any]:
    reprojections, weights = errors
    return {
        "reproj_error": {
            "elements": reprojections[0].tolist(),
            "repeated": len(reprojections),
        },
        "w_err": {"element": weights[0].item(), "repeated": len(weights)},
    }


def write_matrix(matrix: tuple[rg.Tensor, ...]) -> dict[str, Any]:
    """Return the first thirty numbers, and the last number, of each part of the matrix."""
    parts = zip(("rows", "cols", "vals"), matrix, strict=True)
    return {name: [*part[:30].tolist(), part[-1].item()] for name, part in parts}


@function(read, write_errors)
@rg.jit
def objective(o: Observations) -> tuple[rg.Tensor, rg.Tensor]:
    return rg.stack(reprojection(*gathered(o)), axis=1), weight_error(o.weights)


@function(read, write_matrix)
@rg.jit
def jacobian(o: Observations) -> tuple[rg.Tensor, rg.Tensor, rg.Tensor]:
    """Return the sparse matrix of all derivatives: the starts of its rows, columns, and values."""
    variables, features = gathered(o)
    # Observations do not depend on each other, so the gradient of the sum over all of them
    # contains the derivatives of each one.
    values = []
    for i in range(2):
        error = rg.grad(
            lambda variables, i=i: reprojection(variables, features)[i], unconnected="zero"
        )
        values += error(variables)
    by_weight = rg.grad(weight_error)(o.weights)
    return starts(o), columns(o), rg.concat([rg.stack(values, axis=1).flatten(), by_weight])


def weight_error(weights: rg.Tensor) -> rg.Tensor:
    return 1 - weights.square()


def starts(o: Observations) -> rg.Tensor:
    """Return the start of each row of the matrix, and the end of the last row."""
    p = len(o.weights)
    first = ROW * rg.arange(2 * p, dtype=rg.int32)
    return rg.concat([first, 2 * p * ROW + rg.arange(p + 1, dtype=rg.int32)])


def columns(o: Observations) -> rg.Tensor:
    """Return the columns of all entries: cameras first, then points, then weights."""
    points = CAMERA * len(o.cameras)
    weights = points + POINT * len(o.points)
    weight = weights + rg.arange(len(o.weights), dtype=rg.int32)
    row = rg.concat(
        [
            CAMERA * o.camera[:, None] + rg.arange(CAMERA, dtype=rg.int32),
            points + POINT * o.point[:, None] + rg.arange(POINT, dtype=rg.int32),
            weight[:, None],
        ],
        axis=1,
    )
    return rg.concat([rg.stack([row, row], axis=1).flatten(), weight])
