"""Decompositions of recurrent layers into their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regrad.torch.parts import Lookup
from regrad.torch.products import product


def _lstm(op: Lookup) -> Callable[..., tuple[Any, ...]]:
    sigmoid, tanh, times = op(torch.sigmoid), op(torch.tanh), op(torch.mul)

    def step(given: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Any, ...]:
        i, f, g, o = (given + hidden).chunk(4, -1)
        c = times(sigmoid(f), c) + times(sigmoid(i), tanh(g))
        return times(sigmoid(o), tanh(c)), c

    return step


def _gru(op: Lookup) -> Callable[..., tuple[Any, ...]]:
    sigmoid, tanh, times = op(torch.sigmoid), op(torch.tanh), op(torch.mul)

    def step(given: Tensor, hidden: Tensor, h: Tensor) -> tuple[Any, ...]:
        xr, xz, xn = given.chunk(3, -1)
        hr, hz, hn = hidden.chunk(3, -1)
        r, z = sigmoid(xr + hr), sigmoid(xz + hz)
        n = tanh(xn + times(r, hn))
        return (n + times(z, h - n),)

    return step


def _rnn(function: Callable[..., Any], op: Lookup) -> Callable[..., tuple[Any, ...]]:
    act = op(function)
    return lambda given, hidden, h: (act(given + hidden),)


STEPS: dict[str, Callable[..., Any]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": partial(_rnn, torch.tanh),
    "rnn_relu": partial(_rnn, torch.relu),
}


def cell(
    name: str, op: Lookup, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor | None = None, b_hh: Tensor | None = None,
) -> Any:  # fmt: skip
    """`lstm_cell` and similar cells."""
    state = hx if name == "lstm" else (hx,)
    times = product(op)
    found = STEPS[name](op)(times(input, w_ih, b_ih), times(state[0], w_hh, b_hh), *state)
    return found if name == "lstm" else found[0]


def layers(name: str, op: Lookup, input: Tensor, *args: Any) -> Any:
    """`lstm`, `gru`, … over whole sequences or packed sequences, step by step."""
    sizes = None
    if isinstance(args[2], list | tuple):  # (batch sizes, so the sequences are packed)
        sizes, args = args[0].tolist(), args[1:]
    hx, params, has_biases, count, dropout, train, bidirectional, *rest = args
    batch_first = bool(rest and rest[0])
    x = input.transpose(0, 1) if batch_first else input
    run = LayerRun(op, name, sizes)
    states = list(zip(*hx, strict=True)) if name == "lstm" else [(h,) for h in hx]
    ways = 1 + bidirectional
    each, last = len(params) // (count * ways), []
    for layer in range(count):
        found = []
        for way in range(ways):
            n = layer * ways + way
            weights = _weights(params[n * each : (n + 1) * each], has_biases)
            ys, state = run(x, states[n], weights, way == 1)
            found.append(ys)
            last.append(state)
        x = torch.cat(found, -1) if ways == 2 else found[0]
        if layer < count - 1:
            x = torch.dropout(x, dropout, train)
    y = x.transpose(0, 1) if batch_first else x
    return y, *[torch.stack(each) for each in zip(*last, strict=True)]


def _weights(params: Sequence[Any], has_biases: bool) -> tuple[Any, ...]:
    """Return the weights of input and state, their biases, and the projection of the state."""
    w_ih, w_hh, *rest = params
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    projection = rest[2 if has_biases else 0 :]
    return w_ih, w_hh, b_ih, b_hh, projection[0] if projection else None


class LayerRun:
    """Runs a layer in one direction.

    As in torch, one product covers all inputs. For packed sequences, `sizes` has the batch size at
    each step; the sizes never increase.
    """

    def __init__(self, op: Lookup, name: str, sizes: list[int] | None) -> None:
        self.product: Callable[..., Any] = product(op)
        self.sizes = sizes
        self.step: Any = STEPS[name](op)

    def __call__(
        self, x: Tensor, state: tuple[Any, ...], weights: tuple[Any, ...], back: bool
    ) -> tuple[Any, tuple[Any, ...]]:
        w_ih, w_hh, b_ih, b_hh, projection = weights
        given = self.product(x, w_ih, b_ih)
        rows = given.unbind(0) if self.sizes is None else given.split(self.sizes)
        initial, ended, ys = state, [], []
        if self.sizes is not None:
            state = tuple(s[: rows[-1 if back else 0].shape[0]] for s in initial)
        for row in reversed(rows) if back else rows:
            if self.sizes is not None:
                state = self._fit(state, initial, row.shape[0], ended)
            hidden = self.product(state[0], w_hh, b_hh)
            state = self.step(row, hidden, *state)
            if projection is not None:
                state = (self.product(state[0], projection), *state[1:])
            ys.append(state[0])
        if ended:
            parts = [state, *reversed(ended)]
            state = tuple(torch.cat(each) for each in zip(*parts, strict=True))
        ys = ys[::-1] if back else ys
        return (torch.stack(ys) if self.sizes is None else torch.cat(ys)), state

    def _fit(self, state: Any, initial: Any, size: int, ended: list[Any]) -> tuple[Any, ...]:
        """Return the state of the sequences that continue or begin at a step."""
        before = state[0].shape[0]
        if size < before:
            ended.append(tuple(s[size:] for s in state))
            return tuple(s[:size] for s in state)
        if size == before:
            return state
        return tuple(torch.cat([s, i[before:size]]) for s, i in zip(state, initial, strict=True))
