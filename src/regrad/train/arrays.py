"""Conversion of the values of Variables to JAX or NumPy arrays, and back to their library."""

from __future__ import annotations

from typing import Any

import numpy as np

from regrad.core.backends import BACKENDS
from regrad.core.tensor import Tensor, wrap


def is_jax(x: Tensor) -> bool:
    """Return whether the values are JAX's, concrete or traced."""
    return BACKENDS[type(x._data)].name == "jax"


def to_jax(x: Tensor) -> Any:
    """Return the values for JAX's functions. float64 raises while JAX's x64 mode is off."""
    data = x.data  # raises while x is being differentiated, because the gradient would be lost
    if is_jax(x):
        return data
    import jax

    BACKENDS[jax.Array].native_dtype(x.dtype)
    return BACKENDS[type(data)].to_numpy(data)


def to_host(x: Tensor) -> np.ndarray:
    """Return the values in NumPy. A sharded array is gathered, also from other hosts."""
    data = x.data
    if is_jax(x) and not data.is_fully_addressable:
        from jax.experimental.multihost_utils import process_allgather

        data = process_allgather(data, tiled=True)
    return BACKENDS[type(data)].to_numpy(data)


def as_held(values: np.ndarray, old: Tensor) -> Tensor:
    """Return new values in the library and on the devices of the old values."""
    backend = BACKENDS[type(old._data)]
    if backend.name == "jax" and old._data.committed:
        import jax

        return wrap(jax.device_put(values, old._data.sharding))
    new = backend.from_numpy(values)
    return wrap(new.to(old._data.device) if backend.name == "torch" else new)
