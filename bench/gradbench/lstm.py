"""The loss of an LSTM network with diagonal weights, which predicts the next character."""

from __future__ import annotations

from typing import Any

import regrad as rg

from .protocol import function, tensor

State = list[tuple[rg.Tensor, rg.Tensor]]  # for each layer, its output and its cell state


def loss(main: rg.Tensor, extra: rg.Tensor, state: rg.Tensor, text: rg.Tensor) -> rg.Tensor:
    layers, bits = len(main) // 2, text.shape[1]
    gates = main.reshape((layers, 2, 4, bits))  # weights and biases

    def step(state: State, here_and_next: tuple) -> tuple[State, rg.Tensor]:
        here, following = here_and_next
        x, after = here * extra[0], []
        for (weight, bias), (hidden, cell) in zip(gates, state, strict=True):
            entry = rg.stack([x, hidden, x]) * weight[:3] + bias[:3]
            forget, ingate, outgate = rg.nn.sigmoid(entry)
            cell = cell * forget + ingate * rg.tanh(hidden * weight[3] + bias[3])
            x = outgate * rg.tanh(cell)
            after.append((x, cell))
        predicted = x * extra[1] + extra[2]
        norm = rg.log(2 + rg.exp(predicted).sum())
        return after, (following * (predicted - norm)).sum()

    start = [(state[2 * i], state[2 * i + 1]) for i in range(layers)]
    # (Computing a step again takes less time than storing everything that its gradient needs.)
    _, gains = rg.scan(step, start, (text[:-1], text[1:]), checkpoint=True)
    return -gains.sum() / (bits * len(gains))


def read(given: dict[str, Any]) -> tuple[rg.Tensor, ...]:
    names = ("main_params", "extra_params", "state", "sequence")
    return tuple(tensor(given[name]) for name in names)


objective = function(read, float)(rg.jit(loss))


@function(read)
@rg.jit
def jacobian(main: rg.Tensor, extra: rg.Tensor, *rest: rg.Tensor) -> rg.Tensor:
    gradients = rg.grads(lambda main, extra: loss(main, extra, *rest))([main, extra])
    return rg.concat(gradients, axis=None)
