"""Whose code is running: the package's own folder, and the line outside of it."""

from __future__ import annotations

import os
import sys
import warnings
from collections import defaultdict
from typing import Any

import regrad

PACKAGE = regrad.__path__[0] + os.sep  # what the file names of our code begin with


# By file, where `warnings` notes which lines it has told.
REGISTRIES: defaultdict[str, dict[Any, Any]] = defaultdict(dict)


def warn_caller(
    message: str, category: type[Warning], ours: str | tuple[str, ...] = PACKAGE
) -> None:
    """Warn at the innermost line that runs outside of these folders."""
    file, _, line = find_caller(ours).rpartition(":")
    warnings.warn_explicit(message, category, file, int(line), registry=REGISTRIES[file])


def find_caller(ours: str | tuple[str, ...] = PACKAGE) -> str:
    """Return the innermost line that runs outside of these folders: `model.py:12`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
