"""Hand tracking: the distances between a posed model of a hand and measured points."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import regrad as rg

from . import forward
from .protocol import function, indices, tensor


class Hand(NamedTuple):
    """The model of a hand with b bones and v vertices, and the n measured points."""

    relatives: rg.Tensor  # (b, 4, 4), each bone relative to its parent
    inverses: rg.Tensor  # (b, 4, 4), from global coordinates to each bone's coordinates
    positions: rg.Tensor  # (v, 4), homogeneous
    weights: rg.Tensor  # (v, b), the weight of each bone for a vertex
    mirror: rg.Tensor  # (3,), -1 along an axis that is mirrored
    vertices: rg.Tensor  # (n, 3) or (n, 1), the corners of each point's triangle
    points: rg.Tensor  # (n, 3)


def vertices(theta: rg.Tensor, hand: Hand, parents: tuple[int, ...]) -> rg.Tensor:
    """Return the positions of all vertices, (v, 3)."""
    relatives = hand.relatives @ finger_turns(theta[6:], len(parents))
    absolutes: list[rg.Tensor] = []
    for relative, parent in zip(rg.unstack(relatives), parents, strict=True):
        absolutes.append(relative if parent == -1 else absolutes[parent] @ relative)
    bones = (rg.stack(absolutes) @ hand.inverses)[:, :3]
    # A vertex is the weighted mean of its positions by bone: one matrix product for all vertices.
    shares = hand.weights[:, :, None] * hand.positions[:, None, :]
    places = rg.tensordot(shares, bones, axes=((1, 2), (0, 2))) * hand.mirror
    return places @ global_turn(theta[:3]).T + theta[3:6]


def finger_turns(angles: rg.Tensor, bones: int) -> rg.Tensor:
    """Return the rotation of each bone, (bones, 4, 4), from four angles for each finger.

    The wrist comes first, then four bones for each finger, then the rest. The first bone of a
    finger is fixed. The second bends and spreads, and the other two bend.
    """
    bend, spread, middle, tip = angles.reshape((5, 4)).T
    zero = rg.zeros_like(bend)

    def of_all(*fingers: rg.Tensor) -> rg.Tensor:
        return rg.pad(rg.stack(fingers, axis=1).flatten(), [(1, bones - 21)])

    x, z = of_all(zero, bend, middle, tip), of_all(zero, spread, zero, zero)
    cx, sx, cz, sz = rg.cos(x), rg.sin(x), rg.cos(z), rg.sin(z)
    none, one = rg.zeros_like(x), rg.ones_like(x)
    rows = [cz, -sz * cx, sz * sx, none, sz, cz * cx, -cz * sx, none, none, sx, cx, none]
    return rg.stack([*rows, none, none, none, one], axis=1).reshape((bones, 4, 4))


def global_turn(axis: rg.Tensor) -> rg.Tensor:
    """Return the rotation about an axis, whose length is the angle; none below 0.0001."""
    squared = axis.square().sum()
    turned = squared >= 1e-8
    angle = rg.sqrt(rg.where(turned, squared, 1))  # (keeps the gradient finite)
    x, y, z = axis / angle
    zero = rg.zeros_like(x)
    beside = rg.stack([zero, -z, y, z, zero, -x, -y, x, zero]).reshape((3, 3))
    unit = rg.stack([x, y, z])
    identity = rg.eye(3, dtype=rg.float64)
    cosine = rg.cos(angle)
    turn = cosine * identity + rg.sin(angle) * beside + (1 - cosine) * unit[:, None] * unit
    return rg.where(turned, turn, identity)


def fitted(places: rg.Tensor, us: rg.Tensor, hand: Hand) -> rg.Tensor:
    """Return the points of the hand's surface that correspond to the measured points.

    Each lies in a triangle at the coordinates us, (n, 2). Without coordinates it is a vertex. The
    function is linear in the positions, so further axes, such as derivatives, are allowed.
    """
    first, *others = (
        rg.take(places, corner, axis=0) for corner in rg.unstack(hand.vertices, axis=1)
    )
    if not others:
        return first
    second, third = others
    u, v = rg.unstack(us.reshape((*us.shape, *(1,) * (places.ndim - 1))), axis=1)
    return u * first + v * second + (1 - u - v) * third


def read(given: dict[str, Any]) -> tuple[rg.Tensor, rg.Tensor, Hand, tuple[int, ...]]:
    data, model = given["data"], given["data"]["model"]
    corners = np.asarray(data["correspondences"])
    if len(given["us"]):
        corners = np.asarray(model["triangles"])[corners]
    hand = Hand(
        tensor(model["base_relatives"]),
        tensor(model["inverse_base_absolutes"]),
        tensor(model["base_positions"]),
        tensor(model["weights"]),
        tensor([-1 if model["is_mirrored"] else 1, 1, 1]),
        indices(corners.reshape((len(corners), -1))),
        tensor(data["points"]),
    )
    return tensor(given["theta"]), tensor(given["us"]), hand, tuple(model["parents"])


@function(read, lambda errors: errors.flatten().tolist())
@rg.jit(static_argnums=3)
def objective(theta: rg.Tensor, us: rg.Tensor, hand: Hand, parents: tuple[int, ...]) -> rg.Tensor:
    return hand.points - fitted(vertices(theta, hand, parents), us, hand)


@function(read)
@rg.jit(static_argnums=3)
def jacobian(theta: rg.Tensor, us: rg.Tensor, hand: Hand, parents: tuple[int, ...]) -> rg.Tensor:
    """Return the derivatives of each error with respect to its two coordinates and to theta."""
    places = vertices(theta, hand, parents)
    by_theta = fitted(forward.jacobian(lambda t: vertices(t, hand, parents))(theta), us, hand)
    if us.size:
        # No two points share coordinates, so one direction serves all points.
        directions = rg.eye(2, dtype=rg.float64)[:, None] + rg.zeros_like(us)

        def along(direction: rg.Tensor) -> rg.Tensor:
            return rg.jvp(lambda us: fitted(places, us, hand), [us], [direction])[1]

        by_us = rg.vmap(along, out_axes=-1)(directions)
        by_theta = rg.concat([by_us, by_theta], axis=-1)
    return -by_theta.reshape((-1, by_theta.shape[-1]))
