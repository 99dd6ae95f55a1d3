"""`import tensorflow` in programs: modules with TensorFlow's names, made of regrad's names."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from regrad.v1.errors import InstallError
from regrad.v1.programs import digits, inside  # noqa: F401 (INSIDE names them)

__all__ = ["install", "uninstall"]

# Modules inside TensorFlow by the last part of their names, with the module here that has their
# names. Other modules inside TensorFlow have the names of the namespace with the same name, such as
# `tf.losses` or (for `image_ops`) `tf.image`. All have the names of `tf`, `tf.nn` and `tf.train`.
INSIDE = {
    **dict.fromkeys(["control_flow_ops", "gen_nn_ops", "moving_averages"], "programs.inside"),
    **dict.fromkeys(["utils", "variables"], "programs.inside"),
    **dict.fromkeys(["rnn", "rnn_cell", "rnn_cell_impl"], "nn.rnn_cell"),
    "init_ops": "initializers", "input_data": "programs.digits",
    **dict.fromkeys(["examples", "framework", "mnist", "ops", "platform", "python"], ""),
    **dict.fromkeys(["training", "tutorials", "util"], ""),
}  # fmt: skip
# The packages inside TensorFlow, which hold modules only: `tensorflow.python.ops.variable_scope` is
# a module, and its function `variable_scope` is `tf.variable_scope`.
HOLDERS = {f"tensorflow.python.{name}" for name in ["layers", *INSIDE] if not INSIDE.get(name)}
REFUSED = {"client", "data", "eager", "estimator", "keras", "lib", "saved_model", "tools"}

USED: set[str] = set()  # the names that programs read


class Names(ModuleType):
    """A module that has the names of other modules."""

    def __init__(self, name: str, sources: list[Any]) -> None:
        super().__init__(name)
        self.__file__: str | None = __file__
        self._sources = sources

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if name[:2] == "__" and name != "__version__":
            raise AttributeError(name)
        if self.__name__ in HOLDERS and _find(full):
            return import_module(full)
        found = [vars(source)[name] for source in self._sources if name in vars(source)]
        if isinstance(found[0], ModuleType) if found else name in INSIDE and _find(full):
            return import_module(full)
        value = found[0] if found else getattr(self._sources[-3:][0], name)  # raises: not covered
        USED.add(full.replace("tensorflow", "tf", 1))
        self.__dict__[name] = value
        return value


def _find(name: str) -> list[Any]:
    """Return the modules whose names a module of TensorFlow has; none if it is not covered."""
    path = name.replace(".compat.v1", "").replace(".compat", "").partition(".")[2]
    path = path.partition(".python")[0]  # contrib.framework for contrib.framework.python.ops
    parts = path.split(".")
    if parts[0] not in ("python", "examples") and path != "contrib.rnn":
        found = _walk(path)
        return [found] if isinstance(found, ModuleType) else []
    if REFUSED & set(parts) or not parts[-1].islower():
        return []
    places = INSIDE.get(parts[-1], parts[-1].removesuffix("_ops")), "", "nn", "train"
    return [module for module in map(_walk, places) if isinstance(module, ModuleType)]


def _walk(path: str) -> Any:
    value = import_module("regrad.v1")
    for part in path.split(".") if path else ():
        value = vars(value).get(part) if value else None
    return value


class Finder:
    """Finds the modules of TensorFlow for `import`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return how to make a module, or None for modules of other packages."""
        if name.partition(".")[0] != "tensorflow":
            return None
        if _find(name):
            return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        outer, _, last = name.rpartition(".")
        try:
            getattr(import_module(outer), last)
            fault = f"{name} is not a module"
        except AttributeError as error:
            inside = ".python." in name
            fault = f"{name} is not covered by regrad.v1; see docs/tf1.md" if inside else str(error)
        raise InstallError(fault) from None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return Names(spec.name, _find(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is complete."""


FINDER = Finder()


def install() -> ExitStack:
    """Let `import tensorflow` import the names of `regrad.v1`, in this process.

    `python -m regrad.v1 program.py` does the same for a program as it is. Call `install` before the
    program imports TensorFlow. docs/tf1.md lists the modules.

    Returns:
        A context manager. At the end of its block, `uninstall` runs.

    Raises:
        InstallError: TensorFlow itself was imported before. The error is an ImportError.

    >>> import regrad.v1
    >>> with regrad.v1.install():
    ...     import tensorflow as tf
    ...     from tensorflow.python.framework import ops
    >>> tf.placeholder is regrad.v1.placeholder, ops.RegisterGradient is tf.RegisterGradient
    (True, True)
    """
    if not isinstance(sys.modules.get("tensorflow"), Names | None):
        raise InstallError(
            "install: TensorFlow itself is imported already; call regrad.v1.install() before, or "
            "run the program with python -m regrad.v1"
        )
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)  # type: ignore[arg-type]
    stack = ExitStack()
    stack.callback(uninstall)
    return stack


def uninstall() -> None:
    """Undo `install`: a later `import tensorflow` imports TensorFlow itself, if it is installed.

    >>> import regrad.v1
    >>> _ = regrad.v1.install()
    >>> regrad.v1.uninstall()
    """
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)  # type: ignore[arg-type]
    for name in [name for name, module in sys.modules.items() if isinstance(module, Names)]:
        del sys.modules[name]
