"""Write files atomically, and raise one kind of error for damaged files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np

from regrad.core.interrupts import Deferred, at_once
from regrad.errors import ArgumentError, CheckpointError, RegradError, kind

PREFIX, SUFFIX = ".regrad-", ".tmp"  # of temporary files
NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0)  # Windows has neither flag
FOLDER = getattr(os, "O_DIRECTORY", None)
BYTES = getattr(os, "O_BINARY", 0)

# -- writing ---------------------------------------------------------------------------------------


def replace_file(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]) -> None:
    """Replace a file atomically: the old file stays complete until the new one is.

    `write` gets an open file in the same folder, which then replaces the old file. The new file
    has the mode of the old one, or the mode that `open` would choose. If `path` is a symbolic
    link, the link stays, and its target is replaced, as with `open(path, "w")` and with Git's lock
    files. Several threads or processes may write to one path: the last one to finish wins.

    The function also deletes temporary files that killed processes left in the folder. A signal
    interrupts `write` at once. At other times signals wait, because a signal between the opening
    of a file and its `with` would leave the file open.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder}. Make it with os.makedirs first.")
    mode = _mode(target)
    with Deferred():
        _delete_leftovers(folder)
        temporary, file = _created(folder, mode)
        try:
            with file:
                with at_once():
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                if os.name == "nt":  # Windows cannot rename an open file
                    file.close()
                os.replace(temporary, target)  # under the lock, or others could delete it before
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)
            raise
        _sync(folder)


def _mode(target: str) -> int | None:
    """Return the mode of the file to replace, or None if there is no file yet."""
    try:
        found = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):  # replacing /dev/null would do harm
        raise CheckpointError(f"{target} is not a regular file; pass the name of a file")
    return found & 0o777


def _created(folder: str, mode: int | None) -> tuple[str, IO[bytes]]:
    """Create and lock a temporary file with an unpredictable name, which did not exist before."""
    while True:
        temporary = os.path.join(folder, f"{PREFIX}{os.urandom(8).hex()}{SUFFIX}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NOT_FOLLOWED | BYTES
        # Private at first, as the old file may be private. For a new file the umask limits 0666.
        file = os.fdopen(os.open(temporary, flags, 0o666 if mode is None else 0o600), "wb")
        if mode is not None and os.name != "nt":
            os.fchmod(file.fileno(), mode)
        _lock(file.fileno(), wait=True)
        if os.path.exists(temporary):  # (another process may delete it before it is locked)
            return temporary, file
        file.close()


def _lock(file: int, wait: bool) -> bool:
    """Lock a file until it is closed or the process dies; return whether that worked."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):  # Windows; a file system without locks; already locked
        return False
    return True


def _delete_leftovers(folder: str) -> None:
    """Delete the temporary files of dead processes: the files without a lock."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):
                    _delete_unlocked(entry.path)


def _delete_unlocked(path: str) -> None:
    if os.name == "nt":  # Windows cannot delete an open file
        return os.remove(path)
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK | NOT_FOLLOWED)
    try:
        if stat.S_ISREG(os.fstat(file).st_mode) and _lock(file, wait=False):
            os.remove(path)
    finally:
        os.close(file)


def _sync(folder: str) -> None:
    """Flush the new name of a file to the disk, where the file system supports it."""
    if FOLDER is None:
        return
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY | FOLDER)
        try:
            os.fsync(file)
        finally:
            os.close(file)


# -- reading ---------------------------------------------------------------------------------------


def file_name(path: str | os.PathLike[str], api: str) -> str:
    """Return the name of a file as a string, or raise an error that names the function."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or "\0" in name:
        what = "a name with a null character" if isinstance(name, str) else kind(path)
        raise ArgumentError(f"{api}: expected the name of a file, a str or Path, got {what}")
    return name


def reading(
    path: str | os.PathLike[str], form: str, error: type[RegradError] = CheckpointError
) -> contextlib.AbstractContextManager[None]:
    """Turn every exception from reading a damaged file into one error, also for a non-file."""
    return blaming(os.fspath(path), form, error, path)


@contextlib.contextmanager
def blaming(
    name: str, form: str, error: type[RegradError], path: str | os.PathLike[str] = ""
) -> Iterator[None]:
    """Turn every exception from reading damaged data into one error that names the data.

    Parsers of four formats get arbitrary bytes here. Their exceptions have no common class:
    struct.error, RecursionError, NotImplementedError, OSError for a seek to a negative position, …
    regrad's own errors pass through, as do errors that the data did not cause.
    """
    try:
        if path and os.path.exists(path) and not os.path.isfile(path):  # (a pipe may never end)
            raise ValueError("it is not a regular file")
        yield
    except (RegradError, FileNotFoundError, PermissionError):
        raise
    except Exception as problem:
        known = str(problem) if type(problem) is ValueError else ""
        what = known or f"{type(problem).__name__}: {problem}".removesuffix(": ")
        state = "does not fit into memory, or is" if isinstance(problem, MemoryError) else "is"
        raise error(
            f"{name} {state} damaged, or not a {form}: {what.rstrip('.')}. Nothing was read from "
            "it."
        ) from problem


def checksum(array: np.ndarray, start: int = 0) -> int:
    """Return the CRC-32 of an array's elements, continued from the CRC-32 of another array.

    A CRC-32 detects any damage of up to 32 bits in a row, misses one in four billion others, and
    is several times as fast as a cryptographic hash. A cryptographic hash would be no better here:
    anyone who can change the array can also change its checksum.
    """
    import zlib

    return zlib.crc32(as_bytes(array), start)


def as_bytes(array: np.ndarray) -> memoryview:
    """Return the elements of an array, in C order, as bytes; copied only if the layout differs."""
    if not array.size:
        return memoryview(b"")
    flat = array.reshape(-1)  # (a view with gaps if the array is strided)
    return (flat if flat.flags.c_contiguous else flat.copy()).view("uint8").data
