"""The Tensor: an immutable value with an id. The ops define its methods."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from regrad.core import backends
from regrad.core.backends import Array
from regrad.core.state import LIVE, current, next_id, watchers
from regrad.errors import ArgumentError, GradientError

id_of: attrgetter[Any] = attrgetter("_id")
API_VERSIONS = "2021.12", "2022.12", "2023.12", "2024.12"  # of the Array API standard
OURS = -1  # the id of regrad's own constants, which tapes and regions ignore


class Tensor:  # (regrad.ops.methods puts its methods here; type checkers read tensor.pyi)
    """An n-dimensional array whose gradients you can define, inspect and check.

    Make one with `tensor`, `asarray`, `zeros`, …. It holds an array of NumPy, JAX or PyTorch
    and never changes. Its methods have TensorFlow.js's names (`a.mul(b)`, `a.square()`),
    besides Python's operators and indexing.

    >>> import regrad as rg
    >>> x = rg.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> (x @ x.T).sum().item(), x[0], x.shape
    (52.0, Tensor([1., 2.], dtype=float32), (2, 2))
    """

    __slots__ = ("__weakref__", "_data", "_id")

    _data: Any
    _id: int

    # -- properties ------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(self._data.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype, as a NumPy dtype for every library."""
        return backends.BACKENDS[type(self._data)].dtype(self._data)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._data.shape)

    rank = ndim  # TensorFlow.js's name

    @property
    def size(self) -> int:
        """The number of elements."""
        size = 1
        for n in self._data.shape:
            size *= n
        return size

    @property
    def device(self) -> Any:
        """The device of the data, as its library reports it."""
        return getattr(self._data, "device", "cpu")

    def block_until_ready(self) -> Tensor:
        """Wait until the values are computed (JAX and CUDA compute asynchronously).

        Returns the Tensor. `jax.block_until_ready` calls this; `regrad.block_until_ready` waits
        for containers.
        """
        backends.BACKENDS[type(self._data)].wait(self._data)
        return self

    # -- conversion to Python and to other libraries ---------------------------------------

    @property
    def data(self) -> Any:
        """The underlying array, in its own library. Raises while x is being differentiated."""
        self._leave("data")
        return read_only(self._data)

    def numpy(self) -> np.ndarray:
        """Return a read-only NumPy view of the values, or a copy where a view is not possible.

        Raises GradientError while the tensor is being differentiated, because computations on the
        array would have no gradient.
        """
        self._leave("numpy()")
        return read_only(self._values())

    def item(self) -> Any:
        """Return the only element, as a Python number."""
        if self.size != 1:
            raise ArgumentError(
                f"item() reads a single number; this Tensor has shape {self.shape}. tolist() reads "
                "them all."
            )
        return self._plainly().item()

    def tolist(self) -> Any:
        """Return the elements as (nested) Python lists."""
        return self._plainly().tolist()

    def _plainly(self) -> np.ndarray:
        """Return the values, and notify the tapes of a plain reading."""
        if LIVE:
            for tape in watchers(self._id):
                tape.read_plainly()
            self._refuse_in_program()
        return self._values()

    def _refuse_in_program(self) -> None:
        """Raise TraceError if the values would become a part of a program that outlives them."""
        state = current()
        if state is not None and state.region is not None:
            state.region.refuse_read(self)

    def _values(self) -> np.ndarray:
        return backends.BACKENDS[type(self._data)].to_numpy(self._data)

    def _leave(self, how: str) -> None:
        if not LIVE:
            return
        self._refuse_in_program()
        if self._id and watchers(self._id):
            raise GradientError(
                f"{how} of a Tensor that is being differentiated ({self.dtype}, shape "
                f"{self.shape}): computations on the array would have no gradient. Use "
                f"regrad's own functions, or stop_gradient(x).{how} if this is intended."
            )

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        self._leave("numpy()")
        values = self._values()
        if copy or (dtype is not None and values.dtype != dtype):
            return np.array(values, dtype=dtype)
        return read_only(values)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Export a copy of the values, or with `copy=False` the memory itself, read-only.

        A consumer may write to the exported memory (torch does, regardless of the flag), and a
        Tensor never changes. Raises BufferError if the memory cannot be exported as read-only.
        """
        self._leave("__dlpack__()")
        backend = backends.BACKENDS[type(self._data)]
        exported = backend.export(self._data, copy is not False)
        options = {"stream": stream, "max_version": max_version, "dl_device": dl_device}
        return exported.__dlpack__(**{k: v for k, v in options.items() if v is not None})

    def __dlpack_device__(self) -> Any:
        return self._data.__dlpack_device__()

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        import regrad

        if api_version not in (None, *API_VERSIONS):
            raise ArgumentError(
                f"__array_namespace__: expected an api_version of {', '.join(API_VERSIONS)}, got "
                f"{api_version!r}"
            )
        return regrad

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise ArgumentError(f"only an integer Tensor is an index, but this one is {self.dtype}")
        return int(self.item())

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ArgumentError(
                f"the truth of a Tensor of shape {self.shape} is ambiguous: use any(x) or all(x)"
            )
        return bool(self._plainly().item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __len__(self) -> int:
        if not self.ndim:
            raise ArgumentError("a Tensor of rank 0 has no length")
        return self.shape[0]

    def __setitem__(self, index: object, value: object) -> None:
        raise ArgumentError(
            "Tensors do not change: t[index] = value is not possible. "
            "Make a new one with t = at_set(t, index, value), or at_add to add."
        )

    def __reduce__(self) -> Any:
        self._leave("pickling")
        return wrap, (self._data,)

    def __copy__(self) -> Tensor:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return self


def read_only(array: Array) -> Any:
    """Return a read-only view of a NumPy array; other libraries' arrays are returned unchanged."""
    if isinstance(array, np.ndarray):
        array = array.view()
        array.flags.writeable = False
    return array


def wrap(data: Array) -> Tensor:
    """Return a Tensor around an array that no other code will change."""
    y = Tensor()
    y._data = data
    y._id = next_id() if LIVE else 0
    return y


def known(data: Array, i: int) -> Tensor:
    """Return a Tensor around an array, with the id of the Tensor that had the array."""
    y = Tensor()
    y._data, y._id = data, i
    return y


def twin(x: Tensor) -> Tensor:
    """Return another Tensor object that is the same to every tape."""
    y = type(x)()
    y._data, y._id = x._data, x._id
    return y


class Readable:
    """The base class of objects that represent a Tensor. Ops read the Tensor from them."""

    __slots__ = ()

    def _read(self) -> Tensor:
        """Return the current Tensor."""
        raise NotImplementedError


class TensorView(Readable):
    """The base class of objects that show a Tensor as another type. Functions may return them."""

    __slots__ = ()


# An argument of a function: a Tensor or Variable, an array, a number, or a list of these.
TensorLike: TypeAlias = Tensor | Any
