"""Samples of the activation functions and softmax; the second implementation is PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special

from regrad import nn
from tests.helpers.optional import optional
from tests.samples import away, sample, spread

torch = optional("torch")
functional = optional("torch.nn.functional")

REAL = spread(2, 3, low=-3.0, high=3.0)
BOTH = away(2, 3)  # the rectifiers have a kink at 0
LARGE = np.array([-1000.0, -700.0, -90.0, 90.0, 700.0, 1000.0])


def by_torch(f: Callable[..., torch.Tensor]) -> Callable[..., np.ndarray]:
    return lambda *xs: f(*[torch.asarray(x) for x in xs]).numpy()


def both_ways(type: str, f: Any, reference: Any, inputs: np.ndarray) -> list[Any]:
    return [
        sample(f.__name__, f, inputs, covers=type, reference=by_torch(reference)),
        sample(f"{f.__name__} of ±1000", f, LARGE, covers=type, reference=by_torch(reference)),
    ]


SAMPLES = [
    *both_ways("Relu", nn.relu, functional.relu, BOTH),
    *both_ways("Relu6", nn.relu6, functional.relu6, np.array([-2.0, -0.4, 0.7, 5.2, 6.9])),
    *both_ways("LeakyRelu", nn.leaky_relu, lambda x: functional.leaky_relu(x, 0.2), BOTH),
    *both_ways("Elu", nn.elu, functional.elu, BOTH),
    *both_ways("Selu", nn.selu, functional.selu, BOTH),
    *both_ways("Sigmoid", nn.sigmoid, torch.sigmoid, REAL),
    *both_ways("LogSigmoid", nn.log_sigmoid, functional.logsigmoid, REAL),
    *both_ways("Softplus", nn.softplus, lambda x: functional.softplus(x, threshold=800), REAL),
    *both_ways("Softsign", nn.softsign, functional.softsign, BOTH),
    *both_ways("Silu", nn.silu, functional.silu, REAL),
    *both_ways("Gelu", nn.gelu, functional.gelu, REAL),
    *both_ways("Softplus", nn.mish, functional.mish, REAL),
    *both_ways("Relu6", nn.hard_sigmoid, functional.hardsigmoid, away(2, 3, high=2.5)),
    *both_ways("ClipByValue", nn.hard_tanh, functional.hardtanh, away(2, 3, high=1.9, seed=1)),
    *both_ways("Softmax", nn.softmax, lambda x: functional.softmax(x, -1), REAL),
    *both_ways("LogSoftmax", nn.log_softmax, lambda x: functional.log_softmax(x, -1), REAL),
    sample("leaky_relu with a negative slope", lambda x: nn.leaky_relu(x, -0.5), BOTH,
           covers="LeakyRelu", reference=by_torch(lambda x: functional.leaky_relu(x, -0.5))),
    sample("gelu by tanh", lambda x: nn.gelu(x, approximate=True), REAL, covers="Gelu",
           reference=by_torch(lambda x: functional.gelu(x, approximate="tanh"))),
    sample("gelu by tanh of ±1000", lambda x: nn.gelu(x, approximate=True), LARGE, covers="Gelu",
           reference=by_torch(lambda x: functional.gelu(x, approximate="tanh"))),
    sample("relu of rank 0", nn.relu, np.array(0.7), covers="Relu", reference=np.array),
    sample("relu of nothing", nn.relu, np.zeros((0, 3)), covers="Relu", reference=np.array),
    sample("prelu, one slope per channel", nn.prelu, (BOTH, spread(3, seed=4)), covers="Prelu",
           reference=by_torch(functional.prelu)),
    sample("prelu of rank 1, slopes of rank 2", nn.prelu, (away(3), spread(2, 3, seed=4)),
           covers="Prelu", reference=lambda x, alpha: np.where(x > 0, x, alpha * x)),
    sample("prelu, one slope", nn.prelu, (BOTH, np.array(0.3)), covers="Prelu",
           reference=by_torch(functional.prelu)),
    sample("softmax over the first axis", lambda x: nn.softmax(x, axis=0), REAL, covers="Softmax",
           reference=lambda x: scipy.special.softmax(x, axis=0)),
    sample("softmax over two axes", lambda x: nn.softmax(x, axis=(0, -1)), spread(2, 2, 2),
           covers="Softmax", reference=lambda x: scipy.special.softmax(x, axis=(0, -1))),
    sample("softmax over all axes", lambda x: nn.softmax(x, axis=None), REAL, covers="Softmax",
           reference=scipy.special.softmax),
    sample("softmax of equal values", nn.softmax, np.full((2, 3), 0.5), covers="Softmax",
           reference=lambda x: np.full((2, 3), 1 / 3)),
    sample("softmax of no classes", nn.softmax, np.zeros((2, 0)), covers="Softmax",
           reference=np.array),
    sample("log_softmax over a middle axis", lambda x: nn.log_softmax(x, axis=1),
           spread(2, 3, 2), covers="LogSoftmax",
           reference=lambda x: scipy.special.log_softmax(x, axis=1)),
    sample("log_softmax over two axes", lambda x: nn.log_softmax(x, axis=(0, 1)), REAL,
           covers="LogSoftmax", reference=lambda x: scipy.special.log_softmax(x)),
    sample("log_softmax of no rows", nn.log_softmax, np.zeros((0, 3)), covers="LogSoftmax",
           reference=np.array),
]  # fmt: skip
