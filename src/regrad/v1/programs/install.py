"""`import tensorflow` in programs: modules with TensorFlow's names, made of regrad's names."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from regrad.v1.errors import InstallError

__all__ = ["install", "uninstall"]

# Modules inside TensorFlow by the last part of their names, with the module here that has their
# names. Other modules inside TensorFlow have the names of the namespace with the same name, such as
# `tf.losses` or (for `image_ops`) `tf.image`. All have the names of `tf`, `tf.nn` and `tf.train`.
INSIDE = {
    **dict.fromkeys(
        ("control_flow_ops", "gen_nn_ops", "moving_averages", "utils", "variables"),
        "programs.inside",
    ),
    "input_data": "programs.digits", "rnn_cell": "nn.rnn_cell", "rnn_cell_impl": "nn.rnn_cell",
    "init_ops": "initializers",
}  # fmt: skip
PACKAGES = {
    "examples", "framework", "mnist", "ops", "platform", "python", "training", "tutorials", "util",
}  # fmt: skip
# The packages inside TensorFlow, which hold modules only: `tensorflow.python.ops.variable_scope` is
# a module, and its function `variable_scope` is `tf.variable_scope`.
HOLDERS = {f"tensorflow.python.{name}" for name in PACKAGES} | {"tensorflow.python.layers"}
REFUSED = {"client", "data", "eager", "estimator", "keras", "lib", "saved_model", "tools"}
ALIASES = {"contrib.rnn": ["nn.rnn_cell", "nn"]}

USED: set[str] = set()  # the names that programs read


class Names(ModuleType):
    """A module that has the names of other modules."""

    def __init__(self, name: str, sources: list[Any]) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__file__ = sys.modules[__name__].__file__
        self._sources = sources

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if name[:2] == "__" and name != "__version__":
            raise AttributeError(name)
        if self.__name__ in HOLDERS and _find(full):
            return import_module(full)
        holders = [vars(source) for source in self._sources if name in vars(source)]
        value = holders[0][name] if holders else None
        known = name in PACKAGES | INSIDE.keys() or full.partition(".")[2] in ALIASES
        if isinstance(value, ModuleType) or (not holders and known and _find(full)):
            return import_module(full)
        if not holders:
            return getattr(self._sources[-3:][0], name)  # raises: the name is not covered
        USED.add(full.replace("tensorflow", "tf", 1))
        self.__dict__[name] = value
        return value


def _find(name: str) -> list[Any]:
    """Return the modules whose names a module of TensorFlow has; none if it is not covered."""
    parts = name.replace(".compat.v1", "").replace(".compat", "").split(".")[1:]
    v1 = import_module("regrad.v1")
    if parts[:1] not in (["python"], ["examples"]):
        path = ".".join(parts).partition(".python")[0]
        found = [_walk(place) for place in ALIASES.get(path, [path])]
        return found if all(isinstance(module, ModuleType) for module in found) else []
    if REFUSED & set(parts) or not parts[-1].islower():
        return []
    found = _walk(INSIDE.get(parts[-1], parts[-1].removesuffix("_ops")))
    return [*([found] if isinstance(found, ModuleType) else []), v1, v1.nn, v1.train]


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
            known = getattr(import_module(outer), last) is not None
        except AttributeError as error:
            if ".python." not in name:
                raise InstallError(str(error)) from None
            known = False
        what = "is not a module" if known else "is not covered by regrad.v1; see docs/tf1.md"
        raise InstallError(f"{name} {what}")

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
