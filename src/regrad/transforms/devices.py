"""Several devices and hosts, on JAX's own meshes and shardings."""

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
    """Tensors laid out on devices, as `sharding` says.

    Args:
        x: A Tensor, Variable, array or number, or a container of these.
        sharding: A `jax.sharding.Sharding`, as `NamedSharding(mesh, PartitionSpec("data"))`, or
            a `jax.Device`.

    Returns Tensors of JAX data, in the same container. The gradient goes back to where x lay.
    Inside a compiled function it is a constraint, and XLA moves the data where that is needed.
    A Variable is read, and stays where it is: `v.place(sharding)` moves it.

    Where the devices belong to several processes, all of them must make the call. NumPy data
    must then be the same on all; for data of each process's own use
    `jax.make_array_from_process_local_data`.

    Raises DeviceError if the sharding does not fit x, or the mesh has axes of the type Explicit.

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
    """Wait until all that x holds has been computed, and return x.

    Args:
        x: Anything but a function. Tensors, Variables and arrays in it are waited for, also inside
            containers; everything else is there already.

    A call of a compiled function returns before its results are there, and so does an op on a GPU:
    Python goes on meanwhile. Wait before a clock is stopped. Inside a compiled function this does
    nothing.

    Returns:
        x.

    Raises:
        ArgumentError: x is a function: what it would return is not computed.
        Exception: the error of a computation that failed meanwhile.

    Source: `jax.block_until_ready`.

    >>> import regrad as rg
    >>> f = rg.jit(lambda x: x @ x)
    >>> y = rg.block_until_ready(f(rg.ones((2, 2))))
    """
    leaves = containers.flatten(x)[0]
    if callable(x) and leaves and leaves[0] is x and not isinstance(x, Module):
        raise ArgumentError(
            f"block_until_ready: expected what a function returned, got {kind(x)}. Call it first."
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
        raise DeviceError("device_put: a Tensor of a graph lies nowhere yet; feed it what does")
    return x


@custom_grad
def _placed(x: Tensor, *, sharding: Any) -> Any:
    back = getattr(x._data, "sharding", None)
    y = wrap(put(x, sharding, "device_put"))
    return y, lambda dy: dy if back is None else device_put(dy, back)
