"""Finding the program of a usual call again, without looking at each argument in full.

Usual are Tensors and arrays of NumPy and JAX, strings and Python numbers of 32 bits, and containers
of these; and plain values for static arguments. For all else there is `arguments.Given`, which says
what it is, and does at length what is done here in few steps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.core import dispatch
from regrad.core.backends import BACKENDS, JAX, is_traced
from regrad.core.pytrees import NAMESPACE
from regrad.core.sharding import to_jax
from regrad.core.tensor import Tensor
from regrad.transforms.arguments import is_key, place_of_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from regrad.transforms.arguments import Given
    from regrad.transforms.program import Program

ndarray = np.ndarray
EXACT = {int, bool, str, type(None)}  # types whose equal values are the same
SPOT = "a static argument"  # stands in the place of one


class Shortcuts:
    """The programs of the usual calls of one compiled function."""

    def __init__(self, places: set[int], names: set[str]) -> None:
        import optree

        self.flatten = partial(optree.tree_flatten, namespace=NAMESPACE)
        self.places = places  # of static arguments
        self.names = names
        self.fixed = bool(places or names)
        self.types: set[type] = {ndarray}  # of arrays that go in as they are
        self.programs: dict[Any, Program] = {}
        self.clear = self.programs.clear

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]] | None:
        """The key of a call, and the arrays of its arguments; None if it is not usual."""
        marks: list[Any] = []
        if self.fixed:
            args, kwargs, values = self._without_static(args, kwargs)
            for value in values:
                if type(value) not in EXACT:
                    return None
                marks += [type(value), value]
        leaves, spec = self.flatten((args, kwargs))  # pyright: ignore[reportArgumentType]
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
                arrays.append(dispatch.constant(data, place_of_number(data)[1])._data)
                marks.append(kind)
            elif kind is str:
                marks.append(data)
            else:
                return None
        return (spec, *marks), arrays

    def _without_static(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Sequence[Any]]:
        values = [x for i, x in enumerate(args) if i in self.places]
        args = tuple([SPOT if i in self.places else x for i, x in enumerate(args)])
        if kwargs and not self.names.isdisjoint(kwargs):
            values += [x for k, x in sorted(kwargs.items()) if k in self.names]
            kwargs = {k: SPOT if k in self.names else x for k, x in kwargs.items()}
        return args, kwargs, values

    def keep(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], given: Given, program: Program
    ) -> None:
        """Keep the program of a call, if it is a usual one."""
        for data in [x._data for x in given.tensors]:
            if BACKENDS[type(data)] is JAX and not (is_traced(data) or is_key(data)):
                self.types.add(type(data))
        found = self.open(args, kwargs)
        # (a list of numbers is one Tensor there, and several arrays here)
        if found is not None and found[0][0] == given.structure:
            self.programs[found[0]] = program
