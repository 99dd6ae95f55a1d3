"""An array of NumPy's that is filled again after a call is read as it was at the call."""

import numpy as np
import pytest

import regrad as rg

ONE = rg.tensor(1.0)


def late(x, y):
    """The product, which XLA computes long after the call has returned."""
    m = rg.full((300, 300), 0.01)
    for _ in range(40):
        m = rg.tanh(m @ m)
    return x * (y + 0.0 * m.sum())


def buffer(n, aligned):
    """Memory that JAX takes as it is, if it is aligned, and copies in another thread otherwise."""
    space = np.empty(4 * n + 128, np.uint8)
    start = -space.ctypes.data % 64 + (0 if aligned else 4)
    return space[start : start + 4 * n].view(np.float32)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("n", [16, 200_000])
@pytest.mark.parametrize("way", ["argument", "in a dict", "closure"])
def test_a_buffer_is_read_at_the_call(way, n, aligned):
    b = buffer(n, aligned)
    f = {
        "argument": rg.jit(lambda x: late(x, ONE)),
        "in a dict": rg.jit(lambda d: late(d["x"], ONE)),
        "closure": rg.jit(lambda _: late(rg.tensor(2.0), ONE) * b / 2.0),
    }[way]
    given = {"x": b} if way == "in a dict" else ONE if way == "closure" else b
    for i in range(1, 6):
        b[:] = i
        y = f(given)
        b[:] = -1.0
        assert y.numpy().min() == y.numpy().max() == i
