"""Files that are whole at any time."""

from __future__ import annotations

import os
from collections.abc import Callable


def replace_file(path: str, write: Callable[[str], None]) -> None:
    """Write a file so that the old one is there, whole, until the new one is.

    `write` is given the name of a temporary file in the same folder.
    """
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
