"""Samples of the ops that `regrad.v1` adds; the second implementation is NumPy's."""

from __future__ import annotations

import numpy as np

from regrad.v1 import namespaces
from regrad.v1.functions import arrays, nn
from tests.samples import sample, spread

ROWS = spread(3, 4)
BIAS = spread(4, seed=1)

SAMPLES = [
    sample("bias of channels", nn._bias_add, (ROWS, BIAS), covers="BiasAdd", reference=np.add),
    sample("bias of channels that come first", lambda x, b: nn._bias_add(x, b, data_format="NCHW"),
           (spread(2, 3, 4), spread(3, seed=1)), covers="BiasAdd",
           reference=lambda x, b: x + b[:, None]),
    sample("bias of nothing", nn._bias_add, (np.zeros((0, 4)), BIAS),
           covers="BiasAdd", reference=np.add),
    sample("identities", lambda x, y: arrays._identities([x * y, y]), (ROWS, BIAS),
           covers="IdentityN", reference=lambda x, y: (x * y, y)),
    sample("one identity", lambda x: arrays._identities([x])[0] ** 2, BIAS,
           covers="IdentityN", reference=np.square),
    sample("a default", lambda x: namespaces._with_default(x) ** 2, BIAS,
           covers="PlaceholderWithDefault", reference=np.square),
]  # fmt: skip
