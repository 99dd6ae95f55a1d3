"""The inspection API that the Array API standard requires of a namespace."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import numpy as np

from regrad.core.promotion import complex_dtype, get_default_dtype
from regrad.core.signatures import public
from regrad.ops import dtypes

# The dtypes of the standard, which do not include float16.
_STANDARD = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128"
)


class NamespaceInfo:
    """The capabilities of regrad as an Array API namespace: `regrad.__array_namespace_info__()`."""

    def capabilities(self) -> dict[str, Any]:
        """Return the capabilities outside of compiled functions and graphs, with NumPy's limits."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        """Return "cpu": Tensors made of Python numbers are NumPy data."""
        return "cpu"

    def devices(self) -> list[Any]:
        """Return "cpu" for NumPy, and the devices of JAX and torch if these are imported."""
        return ["cpu", *_jax_devices(), *_torch_devices()]

    def default_dtypes(self, *, device: Any = None) -> dict[str, np.dtype]:
        """Return the dtypes of results that no argument determines."""
        return {
            "real floating": get_default_dtype(),
            "complex floating": complex_dtype(),
            "integral": dtypes.int64,
            "indexing": np.dtype(np.intp),
        }

    @public
    def dtypes(
        self, *, device: Any = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, np.dtype]:
        """Return the standard's dtypes of a kind by name; all of them by default."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = ("bool", "numeric") if kind is None else kinds
        codes = [code for each in wanted for code in dtypes.codes_of(each, "dtypes")]
        found = {name: getattr(dtypes, name) for name in _STANDARD.split()}
        return {name: dtype for name, dtype in found.items() if dtype.kind in codes}


def _jax_devices() -> builtins.list[Any]:
    jax = sys.modules.get("jax")
    return [] if jax is None else jax.devices()


def _torch_devices() -> builtins.list[Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    cuda = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *cuda]


def __array_namespace_info__() -> NamespaceInfo:
    """Return the information about regrad as an Array API namespace.

    Source: the Array API standard, 2024.12.

    >>> import regrad as rg
    >>> rg.__array_namespace_info__().default_dtypes()["integral"]
    dtype('int64')
    """
    return NamespaceInfo()
