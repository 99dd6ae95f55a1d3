"""Optional packages: imported on use, or an error that says how to install them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from regrad.errors import MissingPackageError, lacks

INSTALL = "pip install '.[{}]'"  # in a clone; pyproject.toml says where a release changes it


def install_line(extra: str) -> str:
    """Return the command that installs an extra."""
    return INSTALL.format(extra) + " in a clone of regrad" * INSTALL.startswith("pip install '.")


def missing(package: str, extra: str, api: str, error: ImportError) -> MissingPackageError:
    """Return the error of what needs a package that cannot be imported."""
    return MissingPackageError(
        f"{api} needs {package}, {lacks(package, error)}. Install it: {install_line(extra)}"
    )


def needed(module: str, extra: str, api: str) -> Any:
    """Return a module of an optional package, or raise the error that says how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise missing(module.partition(".")[0], extra, api, error) from error
