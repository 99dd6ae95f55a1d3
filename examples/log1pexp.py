"""log(1 + eˣ) without overflow: a custom value and gradient, for three orders of derivatives.

Evaluated literally, log(1 + eˣ) overflows: in float32 its value at 100 is infinite and its gradient
is NaN. The documentation of TensorFlow and JAX fixes the gradient with a custom gradient that
reuses eˣ, here the column "documented". It is correct only at first order. Its rule still contains
an infinite number, which affects the rule's own derivative, and at -20 it cancels to 0. The column
"log1pexp" keeps x instead and returns the sigmoid, an op that has a rule itself.

Run:     python examples/log1pexp.py
Prints:  value, first, second and third derivative by the three methods, and the true numbers.
Source:  TensorFlow, `tf.custom_gradient`; JAX, "Custom derivative rules".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.special import expit

import regrad as rg

POINTS = (-20.0, 0.0, 1.0, 100.0)


def naive(x):
    return rg.log(1 + rg.exp(x))


@rg.custom_grad
def documented(x, save):
    e = rg.exp(x)
    save(e=e)
    return rg.log(1 + e), lambda dy, saved: dy * (1 - 1 / (1 + saved.e))


@rg.custom_grad
def log1pexp(x):
    y = rg.maximum(x, 0) + rg.log1p(rg.exp(-abs(x)))
    return y, lambda dy: dy * rg.nn.sigmoid(x)


def derivatives(f: Callable, x: float, orders: int = 3) -> list[float]:
    """Return f(x), f'(x), f''(x), … in float32."""
    found = []
    for _ in range(orders + 1):
        with np.errstate(over="ignore"):  # the naive version overflows on purpose
            found.append(f(rg.scalar(x)).item())
        f = rg.grad(f)
    return found


def truth(x: float) -> list[float]:
    s = expit(x)
    return [np.logaddexp(0, x), s, s * expit(-x), s * expit(-x) * (expit(-x) - s)]


def main() -> dict[float, dict[str, list[float]]]:
    """Print the table, and return it as {x: {way: [value, first, second, third]}}."""
    ways = {"naive": naive, "documented": documented, "log1pexp": log1pexp}
    print(f"{'x':>5} {'order':>5}" + "".join(f"{name:>14}" for name in [*ways, "true"]))
    table = {}
    for x in POINTS:
        row = {name: derivatives(f, x) for name, f in ways.items()} | {"true": truth(x)}
        for order in range(4):
            print(f"{x:5g} {order:5d}" + "".join(f"{v[order]:14.7g}" for v in row.values()))
        table[x] = row
    return table


if __name__ == "__main__":
    main()
