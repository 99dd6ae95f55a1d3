"""Files that are whole at any time, and one error for those that are damaged."""

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
NOT_FOLLOWED = getattr(os, "O_NOFOLLOW", 0)  # Windows has none of these
FOLDER = getattr(os, "O_DIRECTORY", None)
BYTES = getattr(os, "O_BINARY", 0)

# -- writing ---------------------------------------------------------------------------------------


def replace_file(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]) -> None:
    """Write a file so that the old one is there, whole, until the new one is.

    `write` is given an open file in the same folder, which then takes the place of the old one.
    The new file has the mode of the old one, or the mode that `open` would give it. If `path` is
    a symbolic link the file that it points to is replaced and the link stays, as `open(path, "w")`
    and Git's lock files have it. Several threads or processes may write to one path: the last one
    to finish wins. What killed processes left in the folder is deleted. Signals interrupt the
    writing at once; else they wait, since one between the opening of a file and its `with` would
    leave it open.
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
                if os.name == "nt":  # which renames no open file
                    file.close()
                os.replace(temporary, target)  # under the lock, or it could be taken for left over
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.remove(temporary)
            raise
        _sync(folder)


def _mode(target: str) -> int | None:
    """Return the mode of the file that is to be replaced, None if there is none."""
    try:
        found = os.stat(target).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found):  # replacing /dev/null would do harm
        raise CheckpointError(f"{target} is not a regular file; give the name of a file")
    return found & 0o777


def _created(folder: str, mode: int | None) -> tuple[str, IO[bytes]]:
    """Create and lock a temporary file that nobody else can have opened or foreseen."""
    while True:
        temporary = os.path.join(folder, f"{PREFIX}{os.urandom(8).hex()}{SUFFIX}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NOT_FOLLOWED | BYTES
        # private at first if the old file may be; a new one has what the umask leaves of 0666
        file = os.fdopen(os.open(temporary, flags, 0o666 if mode is None else 0o600), "wb")
        if mode is not None and os.name != "nt":
            os.fchmod(file.fileno(), mode)
        _lock(file.fileno(), wait=True)
        if os.path.exists(temporary):  # or else deleted as a left-over before it was locked
            return temporary, file
        file.close()


def _lock(file: int, wait: bool) -> bool:
    """Lock a file until it is closed or the process dies; return whether that worked."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):  # Windows; a file system without locks; somebody has it
        return False
    return True


def _delete_leftovers(folder: str) -> None:
    """Delete the temporary files whose writers are dead: those that nobody has locked."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):
                    _delete_unlocked(entry.path)


def _delete_unlocked(path: str) -> None:
    if os.name == "nt":  # where an open file cannot be deleted
        return os.remove(path)
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK | NOT_FOLLOWED)
    try:
        if stat.S_ISREG(os.fstat(file).st_mode) and _lock(file, wait=False):
            os.remove(path)
    finally:
        os.close(file)


def _sync(folder: str) -> None:
    """Have the new name of a file written to the disk, where the file system can be told to."""
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
    """Return the name of a file as a string, or raise the error that names the function."""
    name = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(name, str) or "\0" in name:
        what = "a name with a null character" if isinstance(name, str) else kind(path)
        raise ArgumentError(f"{api}: expected the name of a file, a str or Path, got {what}")
    return name


def reading(
    path: str | os.PathLike[str], form: str, error: type[RegradError] = CheckpointError
) -> contextlib.AbstractContextManager[None]:
    """Turn what a damaged file makes its reader raise into one error; refuse what is not a file."""
    return blaming(os.fspath(path), form, error, path)


@contextlib.contextmanager
def blaming(
    name: str, form: str, error: type[RegradError], path: str | os.PathLike[str] = ""
) -> Iterator[None]:
    """Turn what damaged data make their reader raise into one error that names them.

    Parsers of four formats meet arbitrary bytes here, and what they raise has no common class:
    struct.error, RecursionError, NotImplementedError, OSError for a seek to a negative place, …
    Errors of the library pass, and so do those that the data are not to blame for.
    """
    try:
        if path and os.path.exists(path) and not os.path.isfile(path):  # pipes may have no end
            raise ValueError("it is not a regular file")
        yield
    except (RegradError, FileNotFoundError, PermissionError):
        raise
    except Exception as problem:
        known = str(problem) if type(problem) is ValueError else ""
        what = known or f"{type(problem).__name__}: {problem}".removesuffix(": ")
        state = "does not fit into memory, or is" if isinstance(problem, MemoryError) else "is"
        raise error(
            f"{name} {state} damaged, or no {form}: {what.rstrip('.')}. Nothing was read from it."
        ) from problem


def checksum(array: np.ndarray, start: int = 0) -> int:
    """Return the CRC-32 of an array's elements, continued from another one.

    A CRC-32 finds every damage of up to 32 bits in a row, misses one in four billion others, and
    is several times as fast as a cryptographic hash. That would be no better here: who can change
    the array can change its checksum, too.
    """
    import zlib

    return zlib.crc32(as_bytes(array), start)


def as_bytes(array: np.ndarray) -> memoryview:
    """Return the elements of an array, in C order, as bytes; a copy only if they lie otherwise."""
    if not array.size:
        return memoryview(b"")
    flat = array.reshape(-1)  # (of every other element, it is still a view with gaps)
    return (flat if flat.flags.c_contiguous else flat.copy()).view("uint8").data
