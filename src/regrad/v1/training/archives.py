"""Arrays in .npz files, the format of `numpy.load` and `numpy.savez`.

A zip file has a CRC-32 of every entry, which covers the entry's header (dtype and shape) and its
elements. `zipfile` checks the CRC only when an entry is read to its end. So regrad reads an entry
to its end before it uses the header.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterable, Mapping
from functools import partial
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from regrad.core.files import reading
from regrad.errors import ArgumentError, GraphError
from regrad.v1 import errors

SUFFIX = ".npz"
EMPTY = b"regrad: no arrays"  # the comment of a file without arrays
METHODS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED  # the compression methods that NumPy writes
CHUNK = 2**18  # bytes to read at once


def write_arrays(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name. Strings get a fixed length, which NumPy stores without pickling."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.comment = b"" if arrays else EMPTY
        for name, array in arrays.items():
            stored = array.astype(bytes) if array.dtype == object else array
            cut = stored is not array and (stored.astype(object) != array).any()
            if cut or "\0" in name:  # the formats truncate strings and names at zero bytes
                raise ArgumentError(f"cannot save the zero bytes in {name!r} or in its strings")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                npy.write_array(entry, stored, (1, 0), allow_pickle=False)


class MissingCheckpointError(errors.NotFoundError, GraphError):
    """The checkpoint does not exist (TensorFlow 1.15 raises ValueError here)."""


class Archive(zipfile.ZipFile):
    """An open .npz file, whose arrays are read one at a time, by name.

    The file stays open as long as this object, so all arrays come from the same file even if the
    file is replaced. Reading a damaged file raises DataLossError. `header` checks an entry, and
    must be called before `array`.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        if not os.path.exists(path := f"{prefix}{SUFFIX}"):
            raise MissingCheckpointError(f"{prefix} is not a valid checkpoint: there is no {path}")
        self._reading = partial(reading, path, ".npz file", errors.DataLossError)
        with self._reading():
            super().__init__(path)
            self.infos: Any = {i.filename.removesuffix(".npy"): i for i in self.infolist()}
            with open(path, "rb") as file:  # the number of entries is in the last record
                file.seek(-12 - len(self.comment), io.SEEK_END)
                count = int.from_bytes(file.read(2), "little")
            if count not in (len(self.infos), 0xFFFF):
                raise ValueError("its table of contents does not name each entry once")
            if not self.infos and self.comment != EMPTY:
                raise ValueError("it holds no arrays")

    def check(self, names: Iterable[str], hint: str = "") -> None:
        """Raise NotFoundError, with a hint, unless there are arrays of these names."""
        if missing := [name for name in names if name not in self.infos]:
            present = {name: self.header(name) for name in self.infos}  # raises if one is damaged
            keys, known = (", ".join(map(repr, sorted(found))) for found in (missing, present))
            text = f"Key {keys} not found in checkpoint {self.filename}; it has {known or 'none'}"
            raise errors.NotFoundError(text + hint)

    def header(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Check an entry, and return the shape and the dtype of its array."""
        info = self.infos[name]
        with self._reading():
            if info.compress_type not in METHODS:
                raise ValueError(f"{name!r} is compressed in a way that NumPy does not write")
            with self.open(info) as file:
                while file.read(CHUNK):  # zipfile checks the CRC at the end
                    pass
                file.seek(0)
                if file.read(8) != npy.magic(1, 0):
                    raise ValueError("an entry is not an array")
                shape, _, dtype = npy.read_array_header_1_0(file)
                size = file.tell() + math.prod(shape) * dtype.itemsize
            if dtype.hasobject:
                raise ValueError(f"{name!r} holds Python objects, which are not loaded")
            if min(shape, default=0) < 0:
                raise ValueError(f"{name!r} has the shape {shape}")
            if size != info.file_size:
                raise ValueError(f"{name!r} takes {size} bytes, and its entry {info.file_size}")
        return shape, np.dtype(object) if dtype.kind == "S" else dtype

    def array(self, name: str) -> np.ndarray:
        """Read the array of a checked entry. Strings of a fixed length become objects."""
        with self._reading(), self.open(self.infos[name]) as file:
            array = npy.read_array(file, allow_pickle=False)
        return array.astype(object) if array.dtype.kind == "S" else array
