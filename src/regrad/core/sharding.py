"""The placement of arrays: on one device, or sharded over a mesh of devices by JAX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from regrad.core.backends import JAX, Array, DTypeLike, backend_of, is_traced
from regrad.core.extras import needed
from regrad.core.tensor import Tensor, wrap
from regrad.errors import ArgumentError, DeviceError

ndarray = np.ndarray
AUTO = (
    "regrad leaves the layout of results to XLA, so the mesh must have axes of the type Auto: "
    "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names)); "
    "Explicit, the default of jax.make_mesh, requires an out_sharding from each op"
)


def layout(array: Array) -> Any:
    """Return how an array is sharded over a mesh, as JAX's NamedSharding; None if it is not."""
    if type(array) is ndarray:
        return None
    sharding = getattr(array, "sharding", None)  # (traced arrays have none)
    return _plainest(sharding) if type(sharding).__name__ == "NamedSharding" else None


@lru_cache(maxsize=1024)
def _plainest(sharding: Any) -> Any:
    """Return the shortest form of a sharding: XLA returns P("model") for P("model", None)."""
    import jax.core

    sizes = sharding.mesh.shape
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
    spec = [tuple(a for a in axes if a is not None and sizes[a] > 1) or None for axes in entries]
    while spec and spec[-1] is None:
        spec.pop()
    return jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec(*spec), memory_kind=sharding.memory_kind
    )


def resolve(device: Any, array: Array) -> Any:
    """Return a device as users write it. For a torch array, a name means a torch device."""
    if not isinstance(device, str) or backend_of(array).name != "torch":
        return device
    try:
        return type(array.device)(device)
    except RuntimeError as error:
        raise _unknown(device) from error


def place(array: Array, device: Any) -> Any:
    """Return an array on a device, in the library of the device: "cpu" means NumPy."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    backend = backend_of(array)
    if isinstance(device, str) and device == "cpu":
        # (a compiled function runs on the device of its inputs)
        return array if is_traced(array) else backend.to_numpy(array)
    if torch and isinstance(device, torch.device):
        own = array if backend.name == "torch" else torch.from_numpy(backend.to_numpy(array).copy())
        return own.to(device)
    if jax and isinstance(device, jax.Device | jax.sharding.Sharding):
        return put(wrap(array), device, "to_device")
    raise _unknown(device)


def _unknown(device: object) -> DeviceError:
    return DeviceError(
        f'expected a device, "cpu", a jax.Device (or sharding) or a torch.device, got '
        f"{device!r:.80}"
    )


def put(x: Tensor, sharding: Any, what: str) -> Any:
    """Return a Tensor's array in another layout; inside a compiled function, with a constraint."""
    jax = needed("jax", "jax", what)

    if not isinstance(sharding, jax.Device | jax.sharding.Sharding):
        raise ArgumentError(
            f"{what}: expected a jax.sharding.Sharding or a jax.Device, as in "
            f"jax.devices('cpu')[0], got {sharding!r:.80}"
        )
    axes = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    if any(axis.name == "Explicit" for axis in axes):
        raise DeviceError(f"{what}: {AUTO}.")
    array = JAX.from_numpy(x._data) if type(x._data) is ndarray else x._data
    traced = isinstance(array, jax.core.Tracer)
    if traced and not isinstance(sharding, jax.sharding.Sharding):
        raise DeviceError(
            f"{what}: a compiled function runs on the devices of its inputs, so inside of it only "
            f"a Sharding over these devices is possible, not {sharding}."
        )
    try:
        # (XLA ignores device_put inside a compiled function)
        place = jax.lax.with_sharding_constraint if traced else jax.device_put
        return place(array, sharding)
    except ValueError as error:
        raise DeviceError(f"{what} of {x.dtype} {x.shape}: {error}") from None
    except AssertionError as error:
        if "not the same on each process" not in str(error):
            raise
        raise DeviceError(
            f"{what} of {x.dtype} {x.shape}: the values differ between the processes. Pass the "
            "same values in all processes, or make one array of their parts, "
            "jax.make_array_from_process_local_data(sharding, part)."
        ) from None


def moved(x: Tensor, sharding: Any, what: str) -> Tensor:
    """Return a Tensor that is the same to all tapes, with its array in another layout."""
    y = Tensor()
    y._data, y._id = put(x, sharding, what), x._id
    return y


def kept_in_place(new: Tensor, before: Tensor) -> Tensor:
    """Return a new value with the layout of the previous one, if that was sharded over a mesh."""
    sharding = layout(before._data)
    if sharding is None or sharding == layout(new._data):
        return new
    return moved(new, sharding, "assign")


def trouble(error: Exception, xs: Sequence[Tensor], names: Sequence[str] = ()) -> str | None:
    """Return regrad's message for an error of JAX about the devices of Tensors, or None."""
    if type(error).__name__ == "ShardingTypeError":
        return f"{AUTO}. JAX says: {error}"
    if "incompatible devices" not in str(error):
        return None
    names = names or [f"{x.dtype} {x.shape}" for x in xs]
    places = "; ".join(f"{name} on {_where(x)}" for name, x in zip(names, xs, strict=True))
    return (
        f"the inputs lie on different devices: {places}. Place all of them on one mesh: "
        "rg.device_put(x, sharding), and v.place(sharding) for Variables"
    )


def _where(x: Tensor) -> str:
    """Return the devices of a Tensor, for a message."""
    sharding = getattr(x._data, "sharding", None)
    if sharding is None:
        return "no device (NumPy)"
    if not getattr(x._data, "committed", True):
        return "any device"
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    if len(devices) == 1:
        return str(devices[0])
    return f"{len(devices)} devices, {devices[0]} to {devices[-1]}"


def searches_nan(jax: ModuleType) -> bool:
    """Return whether JAX checks for NaN or infinities, and then runs a program again."""
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


def to_jax(data: Array) -> Any:
    """Return a NumPy or JAX array as a JAX array."""
    if type(data) is ndarray:
        return JAX.from_numpy(data)
    if hasattr(data, "detach"):
        raise ArgumentError(
            "a compiled function takes Tensors of NumPy or JAX data, got PyTorch's; convert it "
            "with rg.tensor(t.numpy()). For a module or function of PyTorch there is torch.compile"
        )
    return data


def to_jax_as(data: Array, dtype: DTypeLike) -> Any:
    """Return an array as a JAX array of a dtype."""
    data = to_jax(data)
    return data if data.dtype == dtype else data.astype(dtype)
