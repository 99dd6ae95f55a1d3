"""The same programs in regrad, HIPS autograd and torch: value and gradient, once per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autograd.numpy as anp
import numpy as np
import torch
from autograd import make_vjp
from autograd.extend import defvjp, primitive

import regrad as rg
from bench.timing import Call

torch.set_num_threads(1)

Function = Callable[[Any], Any]
Contestants = dict[str, Call]

SMALL = np.array([0.0, -1.0, 1.0, 2.0], np.float32)
TEN = np.ones(10)  # stays one under x * x and squaring: no denormal numbers


# -- the custom op of TensorFlow.js's documentation: the value a², the gradient dy |a| -------


@rg.custom_grad
def regrad_square(a, save):
    save([a])
    return {"value": a.square(), "grad_func": lambda dy, saved: [dy.mul(saved[0].abs())]}


@primitive
def autograd_square(a):
    return a * a


defvjp(autograd_square, lambda y, a: lambda dy: dy * anp.abs(a))


class TorchSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, dy):
        (a,) = ctx.saved_tensors
        return dy * a.abs()


# -- value and gradient ----------------------------------------------------------------------
# Each library uses its fastest mode, and work outside of the call is done beforehand.


def in_regrad(f: Function, x: np.ndarray) -> Call:
    g, x = rg.value_and_grad(f), rg.tensor(x)
    return lambda: g(x)


def in_autograd(f: Function, x: np.ndarray) -> Call:
    run, dy = make_vjp(f), np.ones_like(x)

    def call():
        pull, y = run(x)
        return y, pull(dy)

    return call


def in_torch(f: Function, x: np.ndarray) -> Call:
    leaf, dy = torch.tensor(x, requires_grad=True), torch.tensor(np.ones_like(x))

    def call():
        y = f(leaf)
        return y, torch.autograd.grad(y, leaf, dy)

    return call


def three(regrad: Function, autograd: Function, torch: Function, x: np.ndarray) -> Contestants:
    """One function in three libraries."""
    return {
        "regrad": in_regrad(regrad, x),
        "autograd": in_autograd(autograd, x),
        "torch": in_torch(torch, x),
    }


def chain(f: Function, length: int = 100) -> Function:
    def chained(x):
        for _ in range(length):
            x = f(x)
        return x

    return chained


def times_itself(x):
    return x * x


# -- the programs ----------------------------------------------------------------------------


def program_7() -> Contestants:
    return three(regrad_square, autograd_square, TorchSquare.apply, SMALL)


def custom_chain() -> Contestants:
    return three(chain(regrad_square), chain(autograd_square), chain(TorchSquare.apply), TEN)


def sin_chain() -> Contestants:
    return three(chain(rg.sin), chain(anp.sin), chain(torch.sin), TEN)


def multiply_chain() -> Contestants:
    return three(*[chain(times_itself)] * 3, TEN)


def cubes() -> Contestants:
    return three(*[lambda x: x**3] * 3, np.linspace(-2.0, 2.0, 50))


def no_tape() -> Contestants:
    """A thousand products, in a loop that adds no call for each of them."""
    x, a, multiply = rg.tensor(SMALL), SMALL, np.multiply

    def regrad():
        for _ in range(1000):
            x * x

    def numpy():
        for _ in range(1000):
            multiply(a, a)

    return {"regrad": regrad, "numpy.multiply": numpy}


def deep_chain() -> Contestants:
    return {
        "regrad": in_regrad(chain(rg.sin, 100_000), TEN),
        "regrad at 1,000": in_regrad(chain(rg.sin, 1000), TEN),
    }
