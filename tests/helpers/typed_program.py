# pyright: strict
"""A user's program, every type of which a checker must know (tests/project/test_types.py)."""

from collections.abc import Iterator
from typing import Any

import numpy as np

import regrad as rg
import regrad.v1 as tf

Weights = dict[str, rg.Tensor]


# -- a rule, an op and a custom gradient of the user's own -------------------------------------


@rg.op("TypedCube", elementwise=True)
def cube(xp: Any, x: rg.Tensor, /) -> rg.Tensor:
    """`x * x * x`."""
    return x * x * x


@rg.gradient("TypedCube")
def cube_rule(dy: rg.Tensor, x: rg.Tensor) -> rg.Tensor:
    return 3 * dy * x.square()


@rg.RegisterGradient("TypedStraightThrough")
def straight_through(op: Any, grad: rg.Tensor) -> rg.Tensor:
    return grad


@rg.custom_grad
def binarize(x: rg.Tensor, save: Any) -> tuple[rg.Tensor, Any]:
    save([x])

    def back(dy: rg.Tensor, saved: Any) -> rg.Tensor:
        return rg.where(rg.abs(saved[0]) <= 1, dy, 0)

    return rg.sign(x), back


# -- a model -----------------------------------------------------------------------------------


class Layer:
    """A dense layer that holds Variables."""

    def __init__(self, inputs: int, outputs: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.w = rg.Variable(rng.normal(size=(inputs, outputs)).astype(np.float32))
        self.b = rg.Variable(rg.zeros(outputs))

    def __call__(self, x: rg.Tensor) -> rg.Tensor:
        return rg.nn.relu(x @ self.w + self.b)


def batches(data: rg.Tensor, size: int) -> Iterator[rg.Tensor]:
    """Batches of rows."""
    for start in range(0, data.shape[0], size):
        yield data[start : start + size]


def loss(weights: Weights, x: rg.Tensor) -> rg.Tensor:
    """The mean square of what a linear map leaves."""
    left = x @ weights["w"] - weights["b"]
    return rg.mean(left**2, axis=0).sum()


def energy(x: rg.Tensor) -> rg.Tensor:
    return cube(0.1 * x).square().sum()


@rg.jit(static_argnames="steps")
def descend(x: rg.Tensor, steps: int) -> rg.Tensor:
    """Some steps towards zero."""
    for _ in range(steps):
        x = x - 0.1 * rg.grad(energy)(x)
    return x


def recurrent() -> list[int]:
    """The sizes of the outputs of a network of a cell and of a layer."""
    with tf.Graph().as_default():
        cells = tf.nn.rnn_cell.GRUCell(3), tf.nn.rnn_cell.BasicRNNCell(3)
        dense, x = tf.layers.Dense(2), tf.ones([1, 5, 4])
        y = tf.nn.relu(tf.nn.bidirectional_dynamic_rnn(*cells, x, dtype=tf.float32)[0][1])
        z = tf.nn.dynamic_rnn(tf.nn.rnn_cell.LSTMCell(3), y, dtype=tf.float32)[0]
        return [dense(z).shape[-1].value, tf.layers.flatten(z).shape[-1].value]


def main() -> float:
    assert recurrent() == [2, 15]
    data = rg.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    weights: Weights = {"w": rg.ones((2, 2)), "b": rg.zeros(2)}
    for batch in batches(data, 2):
        value, grads = rg.value_and_grad(loss)(weights, dy=None, x=batch)
        weights = {name: w - 0.01 * grads[name] for name, w in weights.items()}
        assert value.item() >= 0

    layer = Layer(2, 3, seed=0)
    found = rg.variable_grads(lambda: layer(data).sum())
    shapes = {name: dw.shape for name, dw in found.grads.items() if dw is not None}
    assert shapes[layer.b.name] == (3,)
    layer.b.assign_sub(0.1 * rg.ones_like(layer.b))

    with rg.gradient_override_map({"Sign": "TypedStraightThrough"}):
        passed: rg.Tensor = rg.grad(rg.sign)(data)
    rows: rg.Tensor = rg.vmap(energy)(data)
    again: rg.Tensor = rg.checkpoint(binarize)(data)
    mask: rg.Tensor = (data > 2) & (data != 4)
    where: tuple[rg.Tensor, ...] = rg.nonzero(mask)
    values, places = rg.top_k(data, 1)
    total: rg.Tensor = rg.concat([rows, values.flatten(), again[0, :]]).sum(axis=0, keepdims=True)
    steady: rg.Tensor = descend(data, steps=2).exp().reshape(-1).max()
    parts = [passed.mean(), total[0], steady, places.astype(rg.float32).mean(), -data.T[0, 0]]
    assert all(len(index) for index in where)
    return float(sum(part.item() for part in parts))


if __name__ == "__main__":
    print(main())
