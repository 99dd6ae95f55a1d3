"""The arguments and results of functions that are compiled, batched or run again.

This module takes Tensors out of their containers and puts them back.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from regrad.core import containers, dispatch
from regrad.core.backends import BACKENDS, JAX, Array, is_array
from regrad.core.pytrees import exactly
from regrad.core.sharding import to_jax
from regrad.core.tensor import Tensor, wrap
from regrad.errors import ArgumentError, DTypeError, kind


class ResultStructure:
    """The structure of the results of a trace, and the results that are not Tensors."""

    def __init__(
        self, leaves: list[Any], rebuild: containers.Rebuild, structure: Any = None
    ) -> None:
        self.leaves = leaves  # plain values, or TENSOR for a Tensor and ARRAY for an array
        self.rebuild = rebuild
        self.structure = structure  # hashable; it includes the order of keys in dicts
        self.full: bool = all(leaf is TENSOR for leaf in leaves)  # every leaf is a Tensor

    def is_like(self, other: ResultStructure, *, ordered: bool = True) -> bool:
        """Return whether two structures put the same containers around equally many Tensors.

        Unless `ordered`, dicts may differ in the order of their keys.
        """
        parts = None if ordered else 1
        mine, others = (note.structure and note.structure[:parts] for note in (self, other))
        return self.leaves == other.leaves and mine == others

    def closes_like(self, other: ResultStructure) -> bool:
        """Return whether either structure can replace the other: same containers, Tensors only."""
        return self.full and other.full and self.is_like(other)

    def __repr__(self) -> str:
        signs = [
            "a Tensor" if x is TENSOR else "an array" if x is ARRAY else x for x in self.leaves
        ]
        return repr(self.rebuild(signs))

    def __call__(self, ys: Sequence[Tensor]) -> Any:
        if self.full:
            return self.rebuild(ys)
        given = iter(ys)
        return self.rebuild([_placed(leaf, given) for leaf in self.leaves])


class _Traced(NamedTuple):
    """Marks the place of a traced Python number."""

    type: type


def _placed(leaf: object, given: Iterator[Tensor]) -> Any:
    if leaf is TENSOR:
        return next(given)
    if leaf is ARRAY:
        return next(given)._data
    if type(leaf) is _Traced:
        return dispatch.WeakScalar.of(next(given), NUMBER[leaf.type])
    return copy.deepcopy(leaf) if type(leaf) in (list, set) else leaf  # the caller may change it


TENSOR, ARRAY = object(), object()
# the example value of a traced number, by type
NUMBER = {type(example): example for example in (0, 0.0, 0j)}
LARGE, ALIGNMENT = 65_536, 64  # size in bytes from which copies are aligned, and the alignment
NOTHING_INSIDE: set[type[Any]] = {object, _Traced, type(None), bool, int, float, complex, str}
ONE = ResultStructure([TENSOR], containers.only)


Numbers: TypeAlias = Literal["as they are", "weak", "Tensors"]


def noted(y: Any, *, numbers: Numbers = "as they are") -> tuple[Sequence[Tensor], ResultStructure]:
    """Return the Tensors in the result of a body, and the structure that holds the other leaves.

    With `numbers="weak"`, traced Python numbers stay numbers.
    """
    if type(y) is Tensor:
        return [y], ONE
    leaves, rebuild, structure = containers.opened_in_order(y)
    if leaves and leaves[0] is y:  # y is not a container
        structure = ONE.structure
    tensors: list[Tensor] = []
    plain: list[Any] = []
    for leaf in leaves:
        if numbers == "weak" and type(leaf) is dispatch.WeakScalar:
            tensors.append(leaf)
            plain.append(_Traced(type(leaf.example)))
        elif numbers == "Tensors" and type(leaf) in dispatch.NUMBERS:
            tensors.append(dispatch.constant(leaf, _dtype_of(leaf, wide=False)))
            plain.append(TENSOR)
        elif dispatch.is_tensor(leaf):
            tensors.append(dispatch.lift(leaf))
            plain.append(TENSOR)
        elif is_array(leaf):
            tensors.append(wrap(leaf))
            plain.append(ARRAY)
        else:
            plain.append(leaf)
    return tensors, ResultStructure(plain, rebuild, structure)


def returned(
    y: Any, *, numbers: Numbers = "as they are"
) -> tuple[Sequence[Tensor], ResultStructure]:
    """Like `noted`, for the result of a user's function: raise if a leaf hides a Tensor."""
    ys, note = noted(y, numbers=numbers)
    for leaf in note.leaves:
        if type(leaf) not in NOTHING_INSIDE:
            containers.refuse_hidden(leaf)
    return ys, note


def returned_each(
    y: Any, before: ResultStructure | None
) -> tuple[Sequence[Tensor], ResultStructure]:
    """Like `returned`, for one of several runs whose results are stacked: numbers become Tensors.

    `before` is the structure of another run's result. Raises ArgumentError if this result's
    structure differs.
    """
    ys, note = returned(y, numbers="Tensors")
    if before is not None and not before.is_like(note, ordered=False):
        raise ArgumentError(
            f"f returned {note} for one entry, and {before} for another. Return the same structure "
            "for each entry: the results are stacked."
        )
    return ys, note


class OpenedArguments:
    """The flattened arguments of one call: the Tensors, and a key of everything else."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        numbers: Numbers = "as they are",
    ) -> None:
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = args, kwargs
        self.structure: Any
        self.rebuild: containers.Rebuild
        leaves, self.rebuild, self.structure = containers.opened_in_order(self.arguments)
        self.tensors: list[Tensor] = []
        self.leaves: list[Any] = []
        self.plain: list[int] = []  # the places of the leaves that are not Tensors
        self.declared: set[int] = set()  # the places of the leaves that the caller declared static
        for leaf in leaves:
            if type(leaf) in dispatch.NUMBERS and numbers != "as they are":
                weak = numbers == "weak"
                x = dispatch.constant(leaf, _dtype_of(leaf, wide=weak and _x64()))
                self.leaves.append(_Traced(type(leaf)) if weak and type(leaf) in NUMBER else TENSOR)
                self.tensors.append(x)
            elif (x := traceable(leaf)) is not None:
                self.leaves.append(ARRAY if is_key(leaf) else TENSOR)
                self.tensors.append(x)
            else:
                self._static(leaf)

    def _static(self, leaf: object) -> None:
        """Record a leaf that is not a Tensor."""
        self.plain.append(len(self.leaves))
        if type(leaf) is Static:
            self.declared.add(len(self.leaves))
            leaf = leaf.value
        self.leaves.append(leaf)

    @property
    def key(self) -> Any:
        """Return the parts of the arguments that are built into a compiled program.

        The key is complete. A body receives containers (the key has their structure and the order
        of keys in dicts), static values (the key has their types and exact values), and Tensors
        (JAX's own cache has their shapes and dtypes in its key).
        """
        return self.structure, self._exact_leaves()

    @property
    def form(self) -> Any:
        """Return `key` without the order of keys in dicts: carries are matched by key."""
        return self.structure[0], self._exact_leaves()

    def _exact_leaves(self) -> tuple[Any, ...]:
        leaves = list(self.leaves)
        for i in self.plain:
            leaves[i] = self._exactly(leaves[i], i)
        return tuple(leaves)

    def open_to_change(self, parameters: Sequence[str]) -> list[Any]:
        """Return the static arguments that reach further values: functions and objects.

        Raises ArgumentError for an argument that is neither a Tensor nor static.
        """
        if not self.plain:
            return []
        values = [(self.leaves[i], i) for i in self.plain]
        for value, i in values:
            if i not in self.declared and not is_static(value):
                path = _called(containers.paths(self.arguments, "")[i], parameters)
                raise ArgumentError(REFUSED.format(path=path, kind=kind(value)))
        return [value for value, _ in values if not _has_a_value(value)]

    def places(self) -> list[bool]:
        """Return for each leaf whether it is a Tensor."""
        return list(map(is_place, self.leaves))

    def names(self, parameters: Sequence[str]) -> list[str]:
        """Return the name of each Tensor among the arguments: `x`, `batch['labels']`."""
        paths = containers.paths(self.arguments, "")
        names = [_called(path, parameters) for path in paths]
        return [name for name, there in zip(names, self.places(), strict=True) if there]

    def _exactly(self, value: Any, i: int) -> Any:
        try:
            hash(value)
        except TypeError:
            raise ArgumentError(
                f"the argument {containers.paths(self.arguments, 'arguments')[i]} is "
                f"{kind(value)}, which is static and not hashable, so it cannot be a part of the "
                "key of a compiled program. Make it a tuple or a frozen dataclass, or let f "
                "reach it through its closure."
            ) from None
        return exactly(value)

    def close(self, xs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with these Tensors in their places."""
        return self.closer()(xs)

    def closer(self) -> ResultStructure:
        """Return `close` as an object that may outlive the call: it holds no Tensors."""
        return ResultStructure(self.leaves, self.rebuild)


class Body:
    """A function of containers as a flat function of Tensors; `note` is its result structure."""

    note: Any = None

    def __init__(
        self, function: Callable[..., Any], given: OpenedArguments, *, stacked: bool = False
    ) -> None:
        self.function = function
        self.given = given
        self.stacked = stacked  # the body runs once for each of several examples

    def __call__(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        args, kwargs = self.given.close(xs)
        y = self.function(*args, **kwargs)
        ys, self.note = returned_each(y, self.note) if self.stacked else returned(y)
        return ys


def can_go_in(array: Array) -> bool:
    """Return whether JAX holds this array as numbers; f reads other arrays unchanged."""
    library = BACKENDS[type(array)]
    if is_key(array):
        return False
    try:
        JAX.native_dtype(library.dtype(array))
    except DTypeError:
        return False
    return library.name != "torch"


def argument(x: Tensor) -> Any:
    """Return an argument as compiled programs take it: NumPy data is copied."""
    data = x._data
    return data if type(data) is not np.ndarray else admitted(private(data))


def private(array: np.ndarray) -> np.ndarray:
    """Return a copy for JAX, which reads NumPy's memory after the call has returned.

    The owner may have overwritten the array by then. JAX uses aligned memory directly. It copies
    other memory again, which is slow for a large array.
    """
    if array.nbytes < LARGE:
        return array.copy()
    space = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -space.__array_interface__["data"][0] % ALIGNMENT
    made = space[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def admitted(array: np.ndarray) -> Any:
    """Return an array as compiled programs take it; JAX misreads non-native byte orders."""
    usual = array.dtype.itemsize <= 4 and array.dtype.isnative
    return array if usual else to_jax(array)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is a JAX random key, which f receives unchanged."""
    return is_array(leaf) and not isinstance(leaf, np.generic) and "key<" in str(leaf.dtype)


def traceable(leaf: object) -> Tensor | None:
    """Return a leaf of the arguments as a Tensor, or None if it cannot be one."""
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, list) or dispatch.is_tensor(leaf):
        return dispatch.lift(leaf)
    if not is_array(leaf):
        return None
    BACKENDS[type(leaf)].check(leaf)
    return wrap(leaf)


def _dtype_of(number: complex, *, wide: bool) -> np.dtype:
    """Return the dtype with which a Python number is traced."""
    names = {bool: ("bool", "bool"), int: ("int32", "int64"), float: ("float32", "float64")}
    return np.dtype(names.get(type(number), ("complex64", "complex128"))[wide])


def _x64() -> bool:
    """Return whether JAX has 64-bit types; a weak number should keep all of its bits."""
    import jax

    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


def is_place(leaf: object) -> bool:
    """Return whether a recorded leaf marks the place of a Tensor."""
    return leaf is TENSOR or leaf is ARRAY or type(leaf) is _Traced


def place_of_number(number: complex) -> tuple[Any, np.dtype]:
    """Return the place of a Python number that becomes a weak Tensor, and the Tensor's dtype."""
    place = _Traced(type(number)) if type(number) in NUMBER else TENSOR
    return place, _dtype_of(number, wide=_x64())


REFUSED = (
    "the argument {path} is {kind}: expected Tensors, arrays, numbers, containers of these, or a "
    "value that is always static (None, a string, a dtype, a function). Pass its tensors, or "
    "register its class as a container (jax.tree_util.register_dataclass, or "
    "optree.register_pytree_node with namespace='regrad'); let f reach it through its closure, "
    "as a method reaches self; or name the argument in static_argnames, if it is hashable."
)
FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType,
    functools.partial, np.ufunc, type,
)  # fmt: skip


def is_static(value: object) -> bool:
    """Return whether a value is static without being declared static."""
    return (
        value is None
        or value is Ellipsis
        or isinstance(value, (str, bytes, np.dtype, *FUNCTIONS))
        or hasattr(value, "__wrapped__")  # a decorated function
    )


def _has_a_value(value: object) -> bool:
    """Return whether a static argument is compared by its class's `==`."""
    if isinstance(value, tuple | frozenset):
        return all(map(_has_a_value, value))
    if value is None or value is Ellipsis:
        return True
    return not isinstance(value, FUNCTIONS) and type(value).__eq__ is not object.__eq__


class Static:
    """Wraps an argument that is static although it could be traced."""

    def __init__(self, value: object) -> None:
        self.value = value


def _called(path: str, parameters: Sequence[str]) -> str:
    """Return the path of a leaf in (args, kwargs) by parameter: `[0][1]['w']` as `params['w']`."""
    which, _, rest = path[4:].partition("]")
    if path.startswith("[0]"):
        return (parameters[int(which)] if int(which) < len(parameters) else f"args[{which}]") + rest
    return which.strip("'") + rest
