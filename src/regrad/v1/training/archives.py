"""Arrays in .npz files, the format of `numpy.load` and `numpy.savez`.

A zip file has a CRC-32 of every entry, which covers the entry's header (dtype and shape) and its
elements. `zipfile` checks the CRC only when an entry is read to its end. So regrad reads an entry
to its end before it uses the header.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterable, Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from regrad.core.files import as_bytes, reading
from regrad.errors import ArgumentError
from regrad.v1 import errors

EMPTY = b"regrad: no arrays"  # the comment of a file without arrays
# The compression methods that NumPy writes, and their largest compression ratios.
METHODS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
FORM = np.lib.format
READERS: dict[Any, Any] = {(1, 0): FORM.read_array_header_1_0, (2, 0): FORM.read_array_header_2_0}
CHUNK = 2**18  # bytes to read at once
LIMIT = 10_000  # bytes of a header, as in NumPy


def write_arrays(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.comment = b"" if arrays else EMPTY
        for name, array in arrays.items():
            if "\0" in name:  # the format truncates names at a zero byte
                raise ArgumentError(f"the name {name!r} cannot be saved")
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                FORM.write_array(entry, _storable(name, array), (1, 0), allow_pickle=False)


def _storable(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array that NumPy's format stores without pickling. Strings get a fixed length."""
    array = np.asarray(array)
    if array.dtype.kind != "O":
        return array
    fixed = array.astype(bytes)
    if (fixed.astype(object) != array).any():
        raise ArgumentError(f"the strings of {name!r} end in zero bytes and cannot be saved")
    return fixed


class Entry(NamedTuple):
    """An array of an archive, before its elements are read."""

    info: zipfile.ZipInfo
    stored: np.dtype[Any]
    shape: tuple[int, ...]
    transposed: bool
    start: int  # the offset of the elements in the entry

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array after reading, when strings of a fixed length become objects."""
        return np.dtype(object) if self.stored.kind == "S" else self.stored


class Archive:
    """An open .npz file, whose arrays are read one at a time, by name.

    The file stays open as long as this object, so all arrays come from the same file even if the
    file is replaced. Reading a damaged file raises DataLossError.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with self._reading():
            self._zip = zipfile.ZipFile(path)
            infos = self._zip.infolist()
            self._infos = {info.filename.removesuffix(".npy"): info for info in infos}
            with open(path, "rb") as file:  # the number of entries is in the last record
                file.seek(-12 - len(self._zip.comment), io.SEEK_END)
                count = int.from_bytes(file.read(2), "little")
            if len(self._infos) < len(infos) or count not in (len(infos), 0xFFFF):
                raise ValueError("its table of contents does not name each entry once")
            if not infos and self._zip.comment != EMPTY:
                raise ValueError("it holds no arrays")

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def _reading(self) -> Any:
        return reading(self.path, ".npz file", errors.DataLossError)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def entries(self, names: Iterable[str] | None = None) -> dict[str, Entry]:
        """Check some entries, by default all, and read their headers."""
        wanted = self._infos if names is None else names
        with self._reading():
            return {name: self._entry(name, self._infos[name]) for name in wanted}

    def _entry(self, name: str, info: zipfile.ZipInfo) -> Entry:
        # regrad refuses an entry that is too large for the file before it unpacks anything.
        room = self._zip.start_dir - info.header_offset
        if info.compress_type not in METHODS:
            raise ValueError(f"{name!r} is compressed in a way that NumPy does not write")
        size = max(info.compress_size, info.file_size // METHODS[info.compress_type])
        if size > room:
            raise ValueError(f"{name!r} would take {size} bytes, and there are {room}")
        with self._zip.open(info) as file:
            entry = Entry(info, *_parsed(name, file.read(LIMIT)))
            size = entry.start + math.prod(entry.shape) * entry.stored.itemsize
            if size != info.file_size:
                raise ValueError(f"{name!r} takes {size} bytes, and its entry {info.file_size}")
            while file.read(CHUNK):  # zipfile checks the CRC at the end
                pass
        return entry

    def arrays(self, entries: Mapping[str, Entry]) -> dict[str, np.ndarray]:
        """Read the arrays of some entries, by name."""
        with self._reading():
            return {name: self._array(entry) for name, entry in entries.items()}

    def _array(self, entry: Entry) -> np.ndarray:
        flat = np.empty(math.prod(entry.shape), entry.stored)
        with io.BufferedReader(self._zip.open(entry.info), CHUNK) as file:  # type: ignore[type-var]
            file.read(entry.start)
            file.readinto(as_bytes(flat) if flat.size else bytearray())
        array = flat.reshape(entry.shape, order="F" if entry.transposed else "C")
        return array.astype(entry.dtype, copy=False)


def _parsed(name: str, data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Return the dtype and shape in a header, whether the array is transposed, and its start."""
    file = io.BytesIO(data)
    try:
        read = READERS[FORM.read_magic(file)]
    except (KeyError, ValueError):
        raise ValueError("an entry is not an array") from None
    shape, transposed, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{name!r} holds Python objects, which are not loaded")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name!r} has the shape {shape}")
    return dtype, shape, transposed, file.tell()
