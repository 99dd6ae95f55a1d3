"""Other packages: optional ones, imported on use, and the versions of those that are needed."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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


def refuse_older(name: str, oldest: str) -> None:
    """Refuse a package in a version that is older than all that are tested.

    Its file tells the version of a package that is not imported: an import of SciPy takes long.
    """
    version = getattr(sys.modules.get(name.lower()), "__version__", None)
    if version is None and (spec := find_spec(name.lower())) is not None:
        file = Path(*spec.submodule_search_locations or (), "version.py")
        found = re.search(r'^version = "(.+?)"', file.read_text() if file.is_file() else "", re.M)
        version = found and found[1]
    if version and _release(version) < _release(oldest):
        raise MissingPackageError(
            f"regrad needs {name} {oldest} or newer, and {version} is installed. Upgrade it: "
            f"pip install '{name.lower()}>={oldest}'"
        )


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
