"""The arguments and results of functions that are compiled, batched or run again.

Tensors are taken out of their containers, and put back into them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from regrad import containers, dispatch
from regrad.errors import ArgumentError, kind
from regrad.namespaces import BACKENDS, is_array
from regrad.tensor import Tensor, wrap
from regrad.variable import Variable


class Note:
    """How the results of a trace are put together again, and what there is that is no Tensor."""

    def __init__(self, leaves: list[Any], rebuild: containers.Rebuild) -> None:
        self.leaves = leaves  # plain values; places of Tensors are TENSOR, of arrays ARRAY
        self.rebuild = rebuild

    def __call__(self, ys: Sequence[Tensor]) -> Any:
        given = iter(ys)
        return self.rebuild([_placed(leaf, given) for leaf in self.leaves])


class _Traced(NamedTuple):
    """The place of a Python number that is traced."""

    type: type


def _placed(leaf: Any, given: Iterator[Tensor]) -> Any:
    if leaf is TENSOR:
        return next(given)
    if leaf is ARRAY:
        return next(given)._data
    return dispatch.Number.of(next(given), NUMBER[leaf.type]) if type(leaf) is _Traced else leaf


TENSOR, ARRAY = object(), object()
NUMBER = {type(example): example for example in (0, 0.0, 0j)}  # how a traced number is noted
ONE = Note([TENSOR], containers.only)


def noted(y: Any, *, weak: bool = False) -> tuple[Sequence[Tensor], Note]:
    """The Tensors in what a body returned, and the note that puts the rest around them.

    With `weak`, traced Python numbers stay numbers.
    """
    if type(y) is Tensor:
        return [y], ONE
    leaves, rebuild = containers.flatten(y)
    tensors: list[Tensor] = []
    plain: list[Any] = []
    for leaf in leaves:
        if weak and type(leaf) is dispatch.Number:
            tensors.append(leaf)
            plain.append(_Traced(type(leaf.example)))
        elif dispatch.is_tensor(leaf):
            tensors.append(dispatch.lift(leaf))
            plain.append(TENSOR)
        elif is_array(leaf):
            tensors.append(wrap(leaf))
            plain.append(ARRAY)
        else:
            plain.append(leaf)
    return tensors, Note(plain, rebuild)


class Given:
    """The arguments of one call, opened: the Tensors among them, and the key of all the rest."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        numbers: Literal["as they are", "weak", "Tensors"] = "as they are",
    ) -> None:
        self.arguments = args, kwargs
        leaves, self.rebuild, self.structure = containers.opened(self.arguments)
        self.tensors: list[Tensor] = []
        self.leaves: list[Any] = []
        for leaf in leaves:
            if type(leaf) in dispatch.NUMBERS and numbers != "as they are":
                weak = numbers == "weak"
                x = dispatch.constant(leaf, _dtype_of(leaf, wide=weak and _x64()))
                place = _Traced(type(leaf)) if weak and type(leaf) in NUMBER else TENSOR
            else:
                x = traceable(leaf)
                place = ARRAY if is_key(leaf) else TENSOR
            if x is None:
                self.leaves.append(leaf.value if type(leaf) is Static else leaf)
            else:
                self.leaves.append(place)
                self.tensors.append(x)

    @property
    def key(self) -> Any:
        """What of the arguments a compiled program has built in."""
        return self.structure, tuple(map(self._hashable, self.leaves, range(len(self.leaves))))

    def places(self) -> list[bool]:
        """Which leaves are Tensors."""
        return list(map(is_place, self.leaves))

    def names(self, parameters: Sequence[str]) -> list[str]:
        """What each Tensor among the arguments is called: `x`, `batch['labels']`."""
        paths = containers.paths(self.arguments, "")
        names = [_called(path, parameters) for path in paths]
        return [name for name, there in zip(names, self.places(), strict=True) if there]

    def _hashable(self, value: Any, i: int) -> Any:
        try:
            hash(value)
        except TypeError:
            raise ArgumentError(
                f"the argument {containers.paths(self.arguments, 'arguments')[i]} is "
                f"{kind(value)}, neither a Tensor, array or number nor hashable, so no compiled "
                "program can be found by it. Pass its tensors, make it a tuple or a frozen "
                "dataclass, or let f reach it by a closure."
            ) from None
        return type(value), value

    def close(self, xs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, with these Tensors in their places."""
        return self.closer()(xs)

    def closer(self) -> Note:
        """`close` for those who outlive the call: it holds none of its Tensors."""
        return Note(self.leaves, self.rebuild)


class Body:
    """A function of containers as a flat function of Tensors; `note` says how its results close."""

    note: Any = None

    def __init__(self, function: Callable[..., Any], given: Given) -> None:
        self.function = function
        self.given = given

    def __call__(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        args, kwargs = self.given.close(xs)
        ys, self.note = noted(self.function(*args, **kwargs))
        return ys


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a key of JAX's for random numbers, which f gets as it is."""
    return is_array(leaf) and not isinstance(leaf, np.generic) and "key<" in str(leaf.dtype)


def traceable(leaf: Any) -> Tensor | None:
    """A leaf among the arguments as a Tensor, or None."""
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, list | Variable):
        return dispatch.lift(leaf)
    if not is_array(leaf):
        return None
    BACKENDS[type(leaf)].check(leaf)
    return wrap(leaf)


def _dtype_of(number: complex, *, wide: bool) -> np.dtype:
    """The dtype that a Python number is traced with."""
    names = {bool: ("bool", "bool"), int: ("int32", "int64"), float: ("float32", "float64")}
    return np.dtype(names.get(type(number), ("complex64", "complex128"))[wide])


def _x64() -> bool:
    """Whether JAX has 64 bits; a weak number is best kept with all of them."""
    import jax

    return jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]


def is_place(leaf: Any) -> bool:
    """Whether what is noted of a leaf says that a Tensor stands there."""
    return leaf is TENSOR or leaf is ARRAY or type(leaf) is _Traced


def place_of_number(number: complex) -> tuple[Any, np.dtype]:
    """The place of a Python number that becomes a weak Tensor, and the dtype of that."""
    place = _Traced(type(number)) if type(number) in NUMBER else TENSOR
    return place, _dtype_of(number, wide=_x64())


class Static:
    """An argument that is static although it could be traced."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _called(path: str, parameters: Sequence[str]) -> str:
    """`[0][1]['w']` as `params['w']`: the path of a leaf in (args, kwargs)."""
    which, _, rest = path[4:].partition("]")
    if path.startswith("[0]"):
        return (parameters[int(which)] if int(which) < len(parameters) else f"args[{which}]") + rest
    return which.strip("'") + rest
