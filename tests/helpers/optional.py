"""Packages that the tests use where they are installed, and do without where they are not."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

OPTIONAL = (
    "accelerate", "autograd", "cloudpickle", "diffrax", "equinox", "flatbuffers", "flax",
    "graphviz", "haiku", "jax", "jaxlib", "keras", "lightning", "matplotlib", "ml_dtypes", "mypy",
    "optax", "optimistix", "pyright", "rich", "ruff", "safetensors", "sklearn", "torch", "tqdm",
)  # fmt: skip


def is_installed(name: str) -> bool:
    """Return whether a package can be imported."""
    return find_spec(name) is not None


ABSENT = [name for name in OPTIONAL if not is_installed(name)]


def absent_in(error: BaseException | None) -> str | None:
    """Return the package whose absence has caused an error, None if that is not its cause."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            root = error.name.partition(".")[0]
            if root in ABSENT:
                return root
        error = error.__cause__ or error.__context__
    return None


class Absent:
    """A package that is not installed, or what comes of one: calling it in a test skips that."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(self.name)

    def __call__(self, *args: Any, **options: Any) -> Absent:
        if "PYTEST_CURRENT_TEST" in os.environ:
            pytest.skip(f"needs {self.name}")
        return Absent(self.name)


def optional(module: str) -> Any:
    """Return a module, or what stands for it where its package is not installed."""
    package = module.partition(".")[0]
    return Absent(package) if package in ABSENT else import_module(module)
