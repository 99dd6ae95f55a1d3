"""Finding the program of a usual call again, without looking at each argument in full.

Usual are Tensors and arrays of NumPy and JAX, strings and Python numbers of 32 bits, and containers
of these; and plain values for static arguments. For all else there is `arguments.OpenedArguments`,
which says what it is, and does at length what is done here in few steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.core.backends import BACKENDS, JAX, is_array, is_traced
from regrad.core.containers import is_number_list
from regrad.core.sharding import to_jax
from regrad.core.tensor import Tensor
from regrad.transforms.arguments import is_key
from regrad.transforms.traces import find_jax

if TYPE_CHECKING:
    from regrad.transforms.arguments import OpenedArguments
    from regrad.transforms.program import Program

ndarray = np.ndarray
EXACT: set[type[Any]] = {int, bool, str, type(None), type}  # types whose equal values are the same
# The errors of JAX for a dict whose keys it cannot sort, and for a container that holds itself.
UNFIT = (TypeError, ValueError, RecursionError, SystemError)
NUMBERS: dict[type, tuple[type, type]] = {  # a Python number without JAX's x64 mode, and with it
    int: (np.int32, np.int64),
    float: (np.float32, np.float64),
}


class Shortcuts:
    """The programs of the usual calls of one compiled function."""

    def __init__(self, places: set[int], names: set[str]) -> None:
        jax = find_jax()
        self.config: Any = jax.config
        self.flatten: Any = jax.tree_util.tree_flatten  # three times as quick as optree's
        self.places = places  # of static arguments
        self.names = names
        self.fixed: bool = bool(places or names)
        self.types: set[type] = {ndarray}  # of arrays that go in as they are
        self.programs: dict[Any, Program] = {}
        self.clear: Callable[..., Any] = self.programs.clear

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]] | None:
        """The key of a call, and the arrays of its arguments; None if it is not usual."""
        marks: list[Any] = []
        if self.fixed:
            rest = list(args)
            for i in self.places:
                if i < len(rest):
                    marks += [type(rest[i]), rest[i]]
                    rest[i] = None
            for name in self.names.intersection(kwargs):
                marks += [name, type(kwargs[name]), kwargs[name]]
                kwargs = {k: x for k, x in kwargs.items() if k != name}
            if not EXACT.issuperset(map(type, marks)):
                return None
            args = rest  # pyright: ignore[reportAssignmentType] (a list is another structure)
        try:
            leaves, structure = self.flatten((args, kwargs) if kwargs else args)
        except UNFIT:
            return None
        arrays: list[Any] = []
        for leaf in leaves:
            data = leaf._data if type(leaf) is Tensor else leaf
            kind = type(data)
            if kind in self.types:
                if kind is ndarray and data.dtype.itemsize > 4:
                    data = to_jax(data)
                arrays.append(data)
                marks.append(ndarray)
            elif (kind is float and -3e38 < data < 3e38) or (
                kind is int and -(2**31) <= data < 2**31
            ):
                arrays.append(NUMBERS[kind][self.config.jax_enable_x64](data))
                marks.append(kind)
            elif kind is str:
                marks.append(data)
            else:
                return None
        return (structure, *marks), arrays

    def keep(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: OpenedArguments,
        program: Program,
    ) -> None:
        """Keep the program of a call, if it is a usual one."""
        for data in [x._data for x in given.tensors]:
            if BACKENDS[type(data)] is JAX and not (is_traced(data) or is_key(data)):
                self.types.add(type(data))
        found = self.open(args, kwargs)
        if found is not None and _is_built_in(args) and _is_built_in(kwargs):
            self.programs[found[0]] = program


def _is_built_in(x: object, depth: int = 16) -> bool:
    """Return whether a container, all the way down, is one of Python's own, and not too deep.

    Others may have static fields, of which JAX takes 1 and True for the same. And a list of numbers
    is not a container to us, but a Tensor.
    """
    if not depth or is_number_list(x):
        return False
    if type(x) is dict:
        return all(_is_built_in(part, depth - 1) for part in x.values())
    if type(x) is list or isinstance(x, tuple):
        plain = type(x) in (list, tuple) or hasattr(x, "_fields")
        return plain and all(_is_built_in(part, depth - 1) for part in x)
    return x is None or isinstance(x, Tensor | np.ndarray | int | float | str) or is_array(x)
