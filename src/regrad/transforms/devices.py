"""Several devices and processes, with JAX's own meshes and shardings."""

from __future__ import annotations

from typing import Any, TypeVar

from regrad.autodiff.custom import custom_grad
from regrad.autodiff.modules import Module
from regrad.autodiff.variables import Variable
from regrad.core import containers, dispatch
from regrad.core.backends import BACKENDS, is_array
from regrad.core.sharding import put
from regrad.core.signatures import public
from regrad.core.tensor import Tensor, wrap
from regrad.errors import ArgumentError, DeviceError, kind
from regrad.graph.graph import Symbol
from regrad.transforms.traces import find_jax

T = TypeVar("T")


@public
def device_put(x: Any, sharding: Any) -> Any:
    """Return x with its data placed on devices according to `sharding`.

    Args:
        x: A Tensor, Variable, array or number, or a container of these.
        sharding: A `jax.sharding.Sharding`, as `NamedSharding(mesh, PartitionSpec("data"))`, or
            a `jax.Device`.

    Returns Tensors of JAX data in the same container. The gradient is placed where x was. Inside a
    compiled function this is a constraint, and XLA moves the data where necessary. A Variable is
    only read, and its own data is not moved: `v.place(sharding)` moves it.

    If the devices belong to several processes, all of these processes must make the call. NumPy
    data must be the same in all of them; for data that differs by process, use
    `jax.make_array_from_process_local_data`.

    Raises DeviceError if the sharding does not fit x, or if the mesh has axes of type Explicit.

    Source: `jax.device_put`.

    >>> import jax, regrad as rg
    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    >>> x = rg.device_put([1.0, 2.0], NamedSharding(mesh, PartitionSpec("data")))
    >>> x.print()
    Tensor
        [1, 2]
    """
    find_jax("rg.device_put")
    leaves, rebuild = containers.flatten(x)
    return rebuild([_placed(_concrete(leaf), sharding=sharding) for leaf in leaves])


@public
def block_until_ready(x: T) -> T:
    """Wait until everything that x holds has been computed, and return x.

    Args:
        x: Any object except a function. Waits for the Tensors, Variables and arrays in it, also
            inside containers; other leaves are ignored.

    A call of a compiled function returns before its results are computed, and so does an op on a
    GPU: Python continues meanwhile. Wait before you stop a clock. Inside a compiled function this
    is a no-op.

    Returns:
        x.

    Raises:
        ArgumentError: x is a function, not the result of a call.
        Exception: The error of a computation that failed meanwhile.

    Source: `jax.block_until_ready`.

    >>> import regrad as rg
    >>> f = rg.jit(lambda x: x @ x)
    >>> y = rg.block_until_ready(f(rg.ones((2, 2))))
    """
    leaves = containers.flatten(x)[0]
    if callable(x) and leaves and leaves[0] is x and not isinstance(x, Module):
        raise ArgumentError(
            f"block_until_ready: expected the result of a function, got {kind(x)}. Call the "
            "function first."
        )
    for leaf in leaves:
        if isinstance(leaf, Tensor | Variable):
            leaf.block_until_ready()
        elif is_array(leaf):
            BACKENDS[type(leaf)].wait(leaf)
    return x  # pyright: ignore[reportReturnType]


def _concrete(leaf: Any) -> Tensor:
    x = dispatch.lift(leaf)
    if type(x._data) is Symbol:
        raise DeviceError(
            "device_put: a tensor of a graph has no data to place; place the "
            "values that you feed for it"
        )
    return x


@custom_grad
def _placed(x: Tensor, *, sharding: Any) -> Any:
    back = getattr(x._data, "sharding", None)
    y = wrap(put(x, sharding, "device_put"))
    return y, lambda dy: dy if back is None else device_put(dy, back)
