"""Arrays in .npz files, the format of `numpy.load` and `numpy.savez`.

The format has a CRC-32 of every entry, which covers the entry's header (dtype and shape) and its
elements. `zipfile` checks the CRC only when an entry is read to its end, so regrad reads entries to
their end. To read a header alone safely, regrad stores a separate checksum of the header in the
comment of the entry. The comment of the archive has a checksum of the names, CRCs and comments of
all entries.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from regrad.core.files import as_bytes, reading
from regrad.errors import ArgumentError
from regrad.v1 import errors

FORM = ".npz file"
MARK = b"regrad crc32 "  # before a checksum
# The compression methods that NumPy writes, and their largest compression ratios.
METHODS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
LENGTHS = {b"\1\0": 2, b"\2\0": 4}  # the bytes of a header's length, by the version of the header
CHUNK = 2**18  # bytes to read at once
LIMIT = 10_000  # characters of a header, as in NumPy

# -- writing ---------------------------------------------------------------------------------------


def write_arrays(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, each with a checksum of its header."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            array = np.array(_storable(name, array), order="C", copy=None)
            header = _header(array)
            info = zipfile.ZipInfo(f"{name}.npy")
            if info.filename != f"{name}.npy":  # the format truncates names at a zero byte
                raise ArgumentError(f"the name {name!r} cannot be saved")
            info.comment = _comment(info, header)
            with archive.open(info, "w", force_zip64=True) as entry:
                entry.write(header)
                entry.write(as_bytes(array))
        archive.comment = _seal(archive.infolist())


def _storable(name: str, array: np.ndarray) -> np.ndarray:
    """Return an array that NumPy's format stores without pickling. Strings get a fixed length."""
    array = np.asarray(array)
    if array.dtype.kind != "O":
        return array
    fixed = array.astype(bytes)
    if (fixed.astype(object) != array).any():
        raise ArgumentError(f"the strings of {name!r} end in zero bytes and cannot be saved")
    return fixed


def _header(array: np.ndarray) -> bytes:
    form = np.lib.format
    with io.BytesIO() as file:
        form.write_array_header_1_0(file, form.header_data_from_array_1_0(array))
        return file.getvalue()


def _comment(info: zipfile.ZipInfo, header: bytes) -> bytes:
    return MARK + b"%08x" % zlib.crc32(header, zlib.crc32(info.filename.encode()))


def _seal(infos: Iterable[zipfile.ZipInfo]) -> bytes:
    table = [f"{info.filename} {info.CRC} {info.comment}" for info in infos]
    return MARK + b"%08x" % zlib.crc32("\n".join(table).encode())


# -- reading ---------------------------------------------------------------------------------------


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
            # One mark is sufficient, since damage may have destroyed the others.
            marks = [self._zip.comment, *[info.comment for info in infos]]
            self._sealed = any(comment.startswith(MARK) for comment in marks)
            if self._sealed and self._zip.comment != _seal(infos):
                raise ValueError("its table of contents does not match its checksum")
            if len(self._infos) < len(infos):
                raise ValueError("two entries have the same name")
            if not infos and not self._sealed:
                raise ValueError("it holds no arrays")

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *error: object) -> None:
        self._zip.close()

    def _reading(self) -> Any:
        return reading(self.path, FORM, errors.DataLossError)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def entries(self, names: Iterable[str] | None = None) -> dict[str, Entry]:
        """Read the headers of some arrays, by default of all."""
        wanted = self._infos if names is None else names
        with self._reading():
            return {name: self._entry(name, self._infos[name]) for name in wanted}

    def arrays(self, entries: Mapping[str, Entry]) -> dict[str, np.ndarray]:
        """Read the arrays of some entries, by name."""
        with self._reading():
            return {name: self._array(entry) for name, entry in entries.items()}

    def _entry(self, name: str, info: zipfile.ZipInfo) -> Entry:
        self._check_place(name, info)
        with self._zip.open(info) as file:
            header = _read_header(file)
        if self._sealed and info.comment != _comment(info, header):
            raise ValueError(f"the header of {name!r} does not match its checksum")
        entry = Entry(info, *_parsed(name, header), len(header))
        size = entry.start + math.prod(entry.shape) * entry.stored.itemsize
        if size != info.file_size:
            raise ValueError(f"{name!r} takes {size} bytes, and its entry {info.file_size}")
        return entry

    def _check_place(self, name: str, info: zipfile.ZipInfo) -> None:
        """Raise for an entry that is too large for the file, before allocating its array."""
        if info.compress_type not in METHODS:
            raise ValueError(f"{name!r} is compressed in a way that NumPy does not write")
        room = self._zip.start_dir - info.header_offset
        size = max(info.compress_size, info.file_size // METHODS[info.compress_type])
        if size > room:
            raise ValueError(f"{name!r} would take {size} bytes, and there are {room}")

    def _array(self, entry: Entry) -> np.ndarray:
        flat = np.empty(math.prod(entry.shape), entry.stored)
        with self._zip.open(entry.info) as file:
            file.read(entry.start)
            _fill(as_bytes(flat), file)  # reads to the end, where zipfile checks the CRC
        array = flat.reshape(entry.shape, order="F" if entry.transposed else "C")
        return array.astype(entry.dtype, copy=False)


def _fill(room: memoryview, file: Any) -> None:
    while room:
        count = file.readinto(room[:CHUNK])
        if not count:
            raise ValueError(f"an entry ends {len(room)} bytes early")
        room = room[count:]


def _read_header(file: IO[bytes]) -> bytes:
    start = file.read(8)
    count = LENGTHS.get(start[6:])
    if count is None or not start.startswith(b"\x93NUMPY"):
        raise ValueError("an entry is not an array")
    length = file.read(count)
    return start + length + file.read(min(int.from_bytes(length, "little"), LIMIT))


def _parsed(name: str, header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return the dtype and shape in a header, and whether the array is stored transposed."""
    form = np.lib.format
    file = io.BytesIO(header)
    version = form.read_magic(file)
    read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
    shape, transposed, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{name!r} holds Python objects, which are not loaded")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name!r} has the shape {shape}")
    return dtype, shape, transposed
