"""Array libraries: find the library of an array, and cover the differences between libraries.

Kernels are written against the Array API standard. A `Backend` has the library's namespace
and the parts that the standard leaves open: special functions, dtypes by their NumPy names, and
conversion from and to NumPy. regrad finds a backend by the *type* of an array and caches it. No
library is imported before regrad gets one of its arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, cached_property
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, TypeAlias

import numpy as np

from regrad.core.callers import warn_caller
from regrad.core.extras import refuse_older
from regrad.errors import ArgumentError, DetachedTensorWarning, DeviceError, DTypeError, TraceError

refuse_older("NumPy", "2.1")
refuse_older("SciPy", "1.13")


class ArrayDType(Protocol):
    """A dtype of any library: the common interface of `np.dtype` and `torch.dtype`."""

    @property
    def itemsize(self) -> int: ...


Array: TypeAlias = Any  # an array of NumPy, JAX, PyTorch, …, that a kernel takes
Namespace: TypeAlias = ModuleType  # the functions of the Array API standard, for such arrays
# "float32", float, np.float32, rg.float32, torch.float32
DTypeLike: TypeAlias = str | type | ArrayDType

FLOAT = np.dtype("float32")
KINDS = "biufcV"  # V: bfloat16 and similar dtypes reach NumPy as void types


GONE = (
    "the data of a Tensor no longer exists: a compiled function that lists the Tensor in donate "
    "has overwritten its memory. Do not use the Tensor after the call, or remove it from donate. "
    "(A compiled function that assigns to a Variable also overwrites the Variable's old array. "
    "Read the Variable, or copy it with copy.deepcopy, instead of keeping the array.)"
)


def gone(error: Exception) -> bool:
    """Return whether JAX reports that a program has overwritten an array."""
    return isinstance(error, RuntimeError) and "has been deleted" in str(error)


HELD = frozenset(
    np.dtype(d) for d in ("bool", *"bhilqBHILQ", "float16", "float32", "float64", *"FD")
)


def check_dtype(dtype: np.dtype) -> None:
    """Raise DTypeError for a dtype that a Tensor cannot have."""
    if dtype in HELD or (dtype.kind in KINDS and dtype.newbyteorder("=") in HELD):
        return
    if dtype.kind == "V" and not issubclass(dtype.type, np.void):
        return  # bfloat16 and similar dtypes
    if dtype.kind in "fc":
        wide = "float64" if dtype.kind == "f" else "complex128"
        how = f"cast it to the widest supported dtype, x.astype(np.{wide})"
    elif dtype.names:
        how = f"select one of its fields, x[{dtype.names[0]!r}]"
    else:
        how = "convert it to numbers, np.asarray(x, dtype=np.float64)"
    raise DTypeError(f"a Tensor holds numbers or bools, got the dtype {dtype}: {how}")


class Backend:
    """The NumPy backend. The backends of other libraries override what differs."""

    name = "numpy"
    rank = 0  # a computation on several libraries uses the highest rank: NumPy with JAX is JAX

    @cached_property
    def xp(self) -> Any:
        """The Array API namespace."""
        return np

    def function(self, name: str) -> Any:
        """Return a function of the standard."""
        return getattr(self.xp, name)

    @cached_property
    def special(self) -> Any:
        """The special functions `erf`, `gammaln`, `psi`, … as in `scipy.special`."""
        import scipy.special as scipy

        names = "erf", "erfc", "erfinv", "expit", "psi"
        return SimpleNamespace(
            polygamma=lambda n, x: np.asarray(scipy.polygamma(n, x)).astype(x.dtype, copy=False),
            gammaln=_of_scipy(lambda x: scipy.gammaln(np.where(x == -np.inf, -x, x))),  # as in C
            **{name: _of_scipy(getattr(scipy, name)) for name in names},
        )

    def check(self, array: Array) -> None:
        """Raise ArgumentError or DTypeError for an array that a Tensor cannot hold."""
        if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
            raise ArgumentError(
                f"a Tensor has no mask, so this masked array ({array.dtype}, {array.shape}) would "
                "lose its mask. Fill it with x.filled(0), and pass np.ma.getmaskarray(x) with it, "
                "for where(mask, a, b)."
            )
        if array.dtype not in HELD:
            check_dtype(array.dtype)

    def own(self, array: Array) -> Any:
        """Return a copy that no other code can change."""
        self.check(array)
        dtype = array.dtype
        return np.array(array, dtype=dtype if dtype.isnative else dtype.newbyteorder("="))

    def export(self, array: Array, copy: bool) -> Any:
        """Return the array that DLPack exports: a copy, or memory that is flagged as read-only."""
        if copy:
            return np.array(array)
        array = array.view()
        array.flags.writeable = False
        return array

    def from_numpy(self, array: np.ndarray, like: Array = None) -> Any:
        """Return the same values in this library, on the device of `like`."""
        return array

    def to_numpy(self, array: Array) -> np.ndarray:
        """Return the same values in NumPy. The memory is shared where possible."""
        return np.asarray(array)

    def wait(self, array: Array) -> None:
        """Block until the values are computed."""

    def dtype(self, array: Array) -> np.dtype:
        """Return the array's dtype as a NumPy dtype."""
        return array.dtype

    def native_dtype(self, dtype: Any) -> Any:
        """Return the library's own object for a dtype."""
        return np.dtype(dtype)

    def astype(self, array: Array, dtype: Any) -> Any:
        """Convert values. A cast from complex to real drops the imaginary part silently."""
        if array.dtype.kind == "c" and np.dtype(dtype).kind != "c":
            array = _real_of(array, dtype)
        return array.astype(dtype, copy=False)


def _real_of(array: Array, dtype: Any) -> Any:
    """Return the real parts of complex numbers, or `x != 0` for a cast to bool."""
    return array != 0 if np.dtype(dtype).kind == "b" else array.real


def _of_scipy(function: Callable[[Array], Array]) -> Callable[[Any], Any]:
    """Wrap a SciPy function so that its result has the dtype of x, also for 16-bit floats."""
    return lambda x: function(x) if x.itemsize > 2 else function(x).astype(x.dtype)


# The dtypes that JAX uses in place of 64-bit dtypes while its x64 mode is off (None: unsupported).
NARROW: dict[np.dtype, np.dtype | None] = {
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
    np.dtype(np.float64): None,
    np.dtype(np.complex128): None,
}


class JaxBackend(Backend):
    """The backend of jax.Array, concrete or traced."""

    name = "jax"
    rank = 2

    @cached_property
    def xp(self) -> Any:
        import jax.numpy

        return jax.numpy

    @cached_property
    def special(self) -> Any:
        import jax.scipy.special

        return jax.scipy.special

    def check(self, array: Array) -> None:
        """Accept every array: JAX has only arrays of numbers and bools."""

    def own(self, array: Array) -> Any:
        return array  # immutable already

    def export(self, array: Array, copy: bool) -> Any:
        return self.xp.array(array, copy=True) if copy else array

    def from_numpy(self, array: np.ndarray, like: Array = None) -> Any:
        if array.dtype not in HELD:
            check_dtype(array.dtype)
            array = array.astype(array.dtype.newbyteorder("="), copy=False)
        self.native_dtype(array.dtype)
        made = self.xp.asarray(array)
        if made.dtype != array.dtype and made.dtype.itemsize < array.dtype.itemsize:
            self._check_range(array, np.iinfo(made.dtype))
        return made

    def _check_range(self, array: np.ndarray, limits: np.iinfo) -> None:
        """Raise DTypeError if integers do not fit in 32 bits, JAX's width while x64 mode is off."""
        if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
            raise DTypeError(
                f"JAX holds integers of 32 bits while its x64 mode is off, and this {array.dtype} "
                f"array has values from {array.min()} to {array.max()}. Switch it on with "
                "jax.config.update('jax_enable_x64', True)."
            )

    def to_numpy(self, array: Array) -> np.ndarray:
        if is_traced(array):
            raise TraceError(
                f"the value of a traced Tensor ({array.dtype}, shape {tuple(array.shape)}) was "
                "read by bool(), float(), .numpy(), an if or similar code. Inside jit, vmap, "
                "scan, cond and while_loop the value exists only when the compiled program runs. "
                "Select with where(condition, a, b) or cond, loop with while_loop, fori_loop or "
                "scan, return the values to inspect, or list a Python argument in static_argnames."
            )
        if not is_here(array):
            raise DeviceError(
                f"the values of a Tensor ({array.dtype}, shape {tuple(array.shape)}) were read, "
                "but other processes hold some of its shards. Gather the Tensor first, on all "
                "processes alike: rg.device_put(x, NamedSharding(mesh, PartitionSpec())).numpy(), "
                "or jax.experimental.multihost_utils.process_allgather(x.data, tiled=True). The "
                "shards of this process are x.data.addressable_shards."
            )
        try:
            return np.asarray(array)
        except RuntimeError as error:
            if gone(error):
                raise ArgumentError(GONE) from None
            raise

    def wait(self, array: Array) -> None:
        if not is_traced(array):
            array.block_until_ready()

    def native_dtype(self, dtype: Any) -> Any:
        import jax

        dtype = np.dtype(dtype)
        if dtype in (np.float64, np.complex128) and not jax.config.jax_enable_x64:  # pyright: ignore
            raise DTypeError(
                f"JAX cannot hold {dtype} while its x64 mode is off, and regrad does not "
                "truncate silently. Switch it on with jax.config.update('jax_enable_x64', "
                "True), or cast to float32 first with astype(x, rg.float32)."
            )
        return dtype

    def held_dtype(self, dtype: np.dtype) -> np.dtype | None:
        """Return the dtype that JAX uses for data of a dtype, or None if JAX cannot hold it."""
        import jax

        if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            return dtype
        return NARROW.get(dtype, dtype)

    def astype(self, array: Array, dtype: Any) -> Any:
        dtype = self.native_dtype(dtype)
        if array.dtype.kind == "c" and dtype.kind != "c":
            array = _real_of(array, dtype)
        return array.astype(dtype)


class TorchBackend(Backend):
    """The backend of torch.Tensor, through array-api-compat."""

    name = "torch"
    rank = 1

    @cached_property
    def xp(self) -> Any:
        import array_api_compat.torch

        return array_api_compat.torch

    def function(self, name: str) -> Any:
        return _torch_sign if name == "sign" else super().function(name)

    @cached_property
    def special(self) -> Any:
        import torch

        class Special:
            erf, erfc, erfinv = torch.special.erf, torch.special.erfc, torch.special.erfinv
            gammaln, psi = torch.special.gammaln, torch.special.psi
            polygamma = staticmethod(lambda n, x: torch.special.polygamma(int(n), x))
            expit, logsumexp = torch.special.expit, torch.special.logsumexp

        return Special

    def check(self, array: Array) -> None:
        import torch

        if self.dtype(array).kind == "V":  # (ml_dtypes registers bfloat16 with NumPy)
            raise _no_counterpart(array.dtype)
        if array.layout is not torch.strided:
            raise ArgumentError(
                f"a Tensor holds all of its elements, got a torch tensor of the layout "
                f"{array.layout}. Convert it: x.to_dense()."
            )

    def own(self, array: Array) -> Any:
        self.check(array)
        if array.requires_grad:
            _warn_of_detached()
        return array.detach().clone()

    def export(self, array: Array, copy: bool) -> Any:
        if not copy:
            raise BufferError(
                "__dlpack__(copy=False): torch cannot export memory as read-only, and a Tensor "
                "never changes. Omit copy, or use the torch tensor itself, x.data."
            )
        return array.detach().clone().resolve_conj()

    def from_numpy(self, array: np.ndarray, like: Array = None) -> Any:
        import torch

        if like is None or like.device.type == "cpu":
            return torch.from_numpy(np.array(array))
        if array.ndim:
            return torch.from_numpy(np.array(array)).to(like.device)
        # (torch.full, because a copy would wait for the device, and fail in a CUDA graph.)
        dtype = self.native_dtype(array.dtype)
        return torch.full((), array.item(), dtype=dtype, device=like.device)

    def to_numpy(self, array: Array) -> np.ndarray:
        return array.detach().cpu().resolve_conj().numpy()

    def wait(self, array: Array) -> None:
        if array.is_cuda:
            import torch

            torch.cuda.current_stream(array.device).synchronize()

    def dtype(self, array: Array) -> np.dtype:
        return numpy_dtype(array.dtype)

    def native_dtype(self, dtype: Any) -> Any:
        return getattr(self.xp, numpy_dtype(dtype).name)

    def astype(self, array: Array, dtype: Any) -> Any:
        if array.is_complex() and numpy_dtype(dtype).kind != "c":
            array = _real_of(array, numpy_dtype(dtype))
        return array.to(self.native_dtype(dtype))


def _warn_of_detached() -> None:
    import torch

    if torch.is_grad_enabled():
        warn_caller(
            "a torch tensor that requires grad was passed to regrad, which uses only its values: "
            "torch's gradient ends here. Make the regrad code a function of torch tensors with "
            "regrad.torch.from_regrad, or pass x.detach() if this is intended.",
            DetachedTensorWarning,
        )


def _torch_sign(x: Array) -> Any:
    """Return the standard's sign, NaN for NaN. array-api-compat's writes in place: vmap raises."""
    import torch

    return torch.where(torch.isnan(x), x, torch.sgn(x))


def numpy_dtype(dtype: DTypeLike) -> np.dtype:
    """Return a dtype of any library as NumPy's."""
    if isinstance(dtype, np.dtype):
        return dtype
    return _numpy_dtype(dtype)


@cache
def _numpy_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        return np.dtype(dtype if isinstance(dtype, type) else str(dtype).removeprefix("torch."))
    except TypeError:
        raise _no_counterpart(dtype) from None


def _no_counterpart(dtype: DTypeLike) -> DTypeError:
    if not str(dtype).startswith("torch."):
        return DTypeError(f"expected a dtype such as regrad.float32 or 'float32', got {dtype!r}")
    return DTypeError(
        f"{dtype} has no NumPy counterpart, so no Tensor can have it. Cast the torch tensor first: "
        "x.to(torch.float32)."
    )


NUMPY = Backend()


def placed_like(like: Array) -> dict[str, Any]:
    """Return the options that create a new array on the device of another one (for torch)."""
    return {"device": like.device} if hasattr(like, "new_zeros") else {}


class _Backends(dict[type, Backend]):
    """Map array types to backends. Entries are added at the first use of a type."""

    def __missing__(self, array_type: type) -> Backend:
        backend = _find(array_type)
        if backend is None:
            raise ArgumentError(f"{array_type.__name__} is not an array of NumPy, JAX or PyTorch")
        self[array_type] = backend
        return backend


JAX = JaxBackend()
_ALL = {"jax": JAX, "torch": TorchBackend()}
BACKENDS = _Backends({np.ndarray: NUMPY})


def _find(array_type: type) -> Backend | None:
    """Return the backend of an array type. Only an imported library can own one."""
    if issubclass(array_type, np.ndarray | np.generic):
        return NUMPY
    if (jax := sys.modules.get("jax")) and issubclass(array_type, jax.Array | jax.core.Tracer):
        return _ALL["jax"]
    if (torch := sys.modules.get("torch")) and issubclass(array_type, torch.Tensor):
        return _ALL["torch"]
    return None


def is_array(value: object) -> bool:
    """Return whether `value` is an array (or array scalar) of a library that regrad supports."""
    return type(value) in BACKENDS or _find(type(value)) is not None


def is_traced(array: Array) -> bool:
    """Return whether JAX is tracing an array, so that it has no values yet."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


def has_values(array: Array) -> bool:
    """Return whether the values of an array can be read now, without tracing or batching.

    The symbols of a graph have no values until the graph runs. (torch.func and torch.compile run
    functions on tracers, like JAX.)
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return BACKENDS[type(array)].name != "graph" and not is_traced(array)
    if type(array) not in (torch.Tensor, torch.nn.Parameter) or torch.compiler.is_compiling():
        return False
    return torch.func.debug_unwrap(array, recurse=False) is array


def is_here(array: Array) -> bool:
    """Return whether this process holds all values: others may hold shards of a JAX array."""
    return getattr(array, "is_fully_addressable", True) or array.is_fully_replicated


def backend_of(*arrays: Array) -> Backend:
    """Return the backend of a computation on these arrays."""
    return max((BACKENDS[type(a)] for a in arrays), key=lambda b: b.rank, default=NUMPY)


def special(xp: Namespace) -> Any:
    """Return the special functions for a kernel's namespace."""
    return (NUMPY if xp is np else _by_namespace(xp)).special


def cast(xp: Namespace, array: Array, dtype: DTypeLike) -> Any:
    """Cast an array in a kernel: `astype` with NumPy's dtype names in every namespace."""
    return _by_namespace(xp).astype(array, dtype)


def is_half(dtype: Any) -> bool:
    """Return whether a dtype is a 16-bit float, in which a count may be inf or rounded."""
    return dtype.itemsize == 2 and is_inexact(numpy_dtype(dtype))


def in_single(kernel: Callable[..., Array], xp: Namespace, x: Array, *args: Any) -> Array:
    """Return the result of a kernel, computed in single precision if x has 16-bit floats."""
    if x.dtype.itemsize != 2 or not is_half(x.dtype):
        return kernel(xp, x, *args)
    return cast(xp, kernel(xp, cast(xp, x, FLOAT), *args), x.dtype)


def native_dtype(xp: Namespace, dtype: Any) -> Any:
    """Return the dtype object that the namespace's own functions take."""
    return _by_namespace(xp).native_dtype(dtype)


def _by_namespace(xp: Namespace) -> Backend:
    if xp is np:
        return NUMPY
    return _ALL["jax" if xp.__name__.startswith("jax") else "torch"]


def is_complex(array: Array) -> bool:
    """Return whether an array of any library has complex numbers."""
    return numpy_dtype(array.dtype).kind == "c"


def is_inexact(dtype: np.dtype) -> bool:
    """Return whether a dtype is floating point or complex, and so has gradients."""
    return dtype.kind in "fcV"
