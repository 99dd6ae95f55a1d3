"""Other packages: import optional packages on use, and check the versions of required ones."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from regrad.errors import MissingPackageError, lacks

INSTALL = "pip install '.[{}]'"  # in a clone; a release changes it as pyproject.toml describes


def install_line(extra: str) -> str:
    """Return the command that installs an extra."""
    return INSTALL.format(extra) + " in a clone of regrad" * INSTALL.startswith("pip install '.")


def missing(package: str, extra: str, api: str, error: ImportError) -> MissingPackageError:
    """Return the error for an API that needs a package that cannot be imported."""
    return MissingPackageError(
        f"{api} needs {package}, {lacks(package, error)}. Install it: {install_line(extra)}"
    )


def needed(module: str, extra: str, api: str) -> Any:
    """Import a module of an optional package, or raise an error with the install command."""
    try:
        return import_module(module)
    except ImportError as error:
        raise missing(module.partition(".")[0], extra, api, error) from error


def refuse_older(name: str, oldest: str) -> None:
    """Raise MissingPackageError for a package that is older than every tested version.

    An import of SciPy is slow. So the version of a package that is not imported yet is read from
    its file.
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
