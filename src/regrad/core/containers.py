"""Flatten and rebuild containers of tensors: lists, tuples, dicts, classes of optree or JAX.

A list of plain numbers is one tensor. Any other list is a container.
"""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Sequence,
    ValuesView,
)
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from regrad.core.backends import is_array
from regrad.core.dispatch import NUMBERS, is_tensor
from regrad.core.pytrees import LEAVES, NAMESPACE, adopted
from regrad.core.rule import place
from regrad.core.signatures import declared
from regrad.core.tensor import Tensor
from regrad.errors import NESTED, ArgumentError, RuleError, kind

if TYPE_CHECKING:
    from optree import PyTreeSpec

Rebuild: TypeAlias = Callable[[Sequence[Any]], Any]


def is_number_list(value: object) -> bool:
    """Return whether `value` is a (nested) list of plain numbers; empty lists are containers."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(v) in NUMBERS or is_number_list(v) for v in value)


def only(leaves: Sequence[Any]) -> Any:
    """Rebuild a container that is a single leaf."""
    return leaves[0]


def flatten(value: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of a container, and the function that rebuilds it from other leaves."""
    return ([value], only) if type(value) is Tensor else opened(value)[:2]


def opened(
    value: Any, is_leaf: Callable[[Any], bool] | None = is_number_list
) -> tuple[list[Any], Rebuild, Any]:
    """Like `flatten`, but also return the structure, which is comparable and hashable.

    The leaves of a dict are sorted by key. The structure does not hold the order of the keys,
    because carries, branches and axes are matched by key. `opened_in_order` returns the order, too.
    """
    import optree

    try:
        leaves, spec = optree.tree_flatten(value, is_leaf=is_leaf, namespace=NAMESPACE)
    except RecursionError:
        raise ArgumentError(f"{NESTED}, got {kind(value)}") from None
    if not LEAVES.issuperset(map(type, leaves)) and adopted(leaves):
        return opened(value, is_leaf)
    return leaves, spec.unflatten, spec


def opened_in_order(value: Any) -> tuple[list[Any], Rebuild, Any]:
    """Like `opened`, but the structure holds the order of the keys of all dicts, at any depth.

    A function can observe this order. So a program that regrad caches for a structure is for one
    order.
    """
    order: list[tuple[Any, ...]] = []

    def is_leaf(part: Any) -> bool:  # optree visits each part, dicts by sorted keys
        if part is value:  # optree starts, or starts again after regrad has adopted a class
            order.clear()
        if isinstance(part, dict):
            order.append(tuple(part))
            return False
        return is_number_list(part)

    leaves, rebuild, structure = opened(value, is_leaf)
    return leaves, rebuild, (structure, *order)


def flatten_objects(
    value: Any, flatten: Callable[[Any], tuple[list[Any], Rebuild]] = flatten
) -> tuple[list[Any], Rebuild]:
    """Like `flatten`, but also open dataclasses and dicts of any class that hold arrays.

    The function that rebuilds the value makes copies of these objects. (Where regrad compiles
    programs, such an object may be a static argument. So only calls that run once open objects.)
    """
    leaves, rebuild = flatten(value)
    found = [_fields(leaf) if is_closed(leaf) else None for leaf in leaves]
    if not any(found):
        return leaves, rebuild
    every: list[Any] = []
    makers: list[tuple[int, Rebuild]] = []
    for leaf, parts in zip(leaves, found, strict=True):
        inner, make = [leaf], only
        if parts is not None:
            inner, rebuild_parts = flatten_objects([*parts.values()], flatten)
            make = _Remake(leaf, [*parts], rebuild_parts)
        every += inner
        makers.append((len(inner), make))

    def close(values: Sequence[Any]) -> Any:
        rest = iter(values)
        return rebuild([make([next(rest) for _ in range(count)]) for count, make in makers])

    return every, close


def _fields(value: Any) -> dict[tuple[bool, Any], Any] | None:
    """Return the parts of a dataclass or dict that hold arrays; None for any other object.

    The keys are pairs: whether the part is an item, and its name. An item that is also an attribute
    (as in the `ModelOutput` of transformers) is listed once.
    """
    if isinstance(value, type) or not (is_dataclass(value) or isinstance(value, dict | UserDict)):
        return None
    named = fields(value) if is_dataclass(value) else ()
    names = dict.fromkeys([*[f.name for f in named], *getattr(value, "__dict__", {})])
    names.pop("data", None) if isinstance(value, UserDict) else None
    found = {(False, n): getattr(value, n) for n in names if hasattr(value, n)}
    items = value.items() if isinstance(value, dict | UserDict) else ()
    found |= {(True, k): x for k, x in items if found.get((False, k)) is not x}
    return {k: x for k, x in found.items() if is_tensor(x) or is_array(x) or is_closed(x)}


class _Remake(NamedTuple):
    """Makes copies of an object with other parts."""

    value: Any
    keys: Sequence[tuple[bool, Any]]
    rebuild: Rebuild

    def __call__(self, leaves: Sequence[Any]) -> Any:
        made: Any = copy(self.value)
        for (is_item, name), part in zip(self.keys, self.rebuild(leaves), strict=True):
            if is_item:
                made[name] = part
            elif getattr(made, name) is not part:
                params = getattr(made, "__dataclass_params__", None)
                set_to = object.__setattr__ if params and params.frozen else setattr
                set_to(made, name, part)
        return made


class Leaves:
    """A flattened value: the arrays in it, and the containers around them.

    Args:
        value: A value that holds arrays in containers.
        kind: The class of the arrays.
        flatten: The function that opens containers.
    """

    def __init__(
        self,
        value: Any,
        kind: type[Any],
        flatten: Callable[[Any], tuple[list[Any], Rebuild]] = flatten,
    ) -> None:
        self.rebuild: Rebuild
        leaves, self.rebuild = flatten(value)
        self.places: list[int] = [i for i, x in enumerate(leaves) if isinstance(x, kind)]
        self.arrays: list[Any] = [leaves[i] for i in self.places]
        self.rest: list[Any] = replaced(leaves, self.places, [None] * len(self.places))

    def close(self, xs: Iterable[Any]) -> Any:
        """Return the value again, with these arrays in place of its own."""
        return self.rebuild(replaced(self.rest, self.places, xs))


def replaced(values: Iterable[Any], places: Sequence[int], others: Iterable[Any]) -> list[Any]:
    """Return values, with others at some positions."""
    made = list(values)
    for i, other in zip(places, others, strict=True):
        made[i] = other
    return made


def tree_map(f: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply a function to each leaf of a container, and return the results in its structure.

    Args:
        f: A function of a leaf of `tree`, and of the part at the same position of each `rest`.
        tree: A Tensor, array or number, or any nesting of lists, tuples, dicts and registered
            classes of these. None is a container without leaves.
        *rest: Containers of the same structure, or of a structure that goes deeper.

    Returns:
        The results, in the structure of `tree`.

    Raises ArgumentError if f is not callable, or the structures do not fit.

    Source: `jax.tree.map`.

    >>> import regrad as rg
    >>> params = {"w": rg.tensor([1.0, 2.0]), "b": 0.5}
    >>> grads = rg.grad(lambda p: (p["w"] * p["b"]).sum())(params)
    >>> step = rg.tree_map(lambda p, g: p - 0.1 * g, params, grads)
    >>> step["w"].print()
    Tensor
        [0.95, 1.95]
    """
    if not callable(f):
        raise ArgumentError(f"tree_map: expected a function, got {kind(f)}")
    leaves, rebuild, spec = opened(tree, None)
    try:
        others = [spec.flatten_up_to(other) for other in rest]
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"tree_map: the structures do not fit: {error}") from None
    return rebuild([f(*parts) for parts in zip(leaves, *others, strict=True)])


def refuse_closed(value: Any, name: str, api: str) -> None:
    """Raise for objects that hold Tensors if regrad does not open them as containers."""
    if isinstance(value, Tensor):
        return
    for i, leaf in enumerate(opened(value)[0]):
        if is_closed(leaf):
            raise ArgumentError(f"{api}: {paths(value, name)[i]} is {kind(leaf)}, {CLOSED}")


CLOSED = (
    "which regrad does not open as a container, so it would not find the Tensors in it. Pass them "
    "in a list, tuple, dict or named tuple, register the class by optree.register_pytree_node, or "
    "let f use the object through its closure."
)


LATER: tuple[type[Any], ...] = (
    Iterator, AsyncIterator, Awaitable, KeysView, ValuesView, ItemsView
)  # fmt: skip


def is_closed(value: object, depth: int = 3) -> bool:
    """Return whether an object that is not a container holds or may yield Tensors or arrays."""
    if is_tensor(value) or is_array(value) or isinstance(value, type | FunctionType | ModuleType):
        return False
    if isinstance(value, LATER):
        return True
    if isinstance(value, dict | UserDict):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | UserList):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
        parts += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    leaves = [leaf for part in parts for leaf in opened(part)[0]]
    return any(
        is_tensor(leaf) or is_array(leaf) or (depth > 0 and is_closed(leaf, depth - 1))
        for leaf in leaves
    )


def refuse_hidden(leaf: object) -> None:
    """Raise for a part of a body's result that holds Tensors, or may produce them later."""
    cells = getattr(leaf, "__closure__", None) or ()
    if is_closed(leaf) or any(map(_holds_tensors, cells)):
        raise ArgumentError(
            f"a function that is compiled, batched, repeated or run again returned {kind(leaf)}, "
            "which regrad does not open as a container, so the Tensors in it would be lost. Return "
            "them in a list, tuple, dict or named tuple, or register the class by "
            "optree.register_pytree_node."
        )


def _holds_tensors(cell: CellType) -> bool:
    """Return whether a function holds Tensors in this cell of its closure."""
    try:
        return is_closed((cell.cell_contents,))
    except ValueError:  # an empty cell
        return False


def paths(value: Any, name: str) -> list[str]:
    """Return a name for each leaf: `x`, `x['w']`, `x[0].bias`."""
    import optree

    accessors = optree.tree_accessors(value, is_leaf=is_number_list, namespace=NAMESPACE)
    return [accessor.codify(name) for accessor in accessors]


def matched(values: Any, like: Any) -> list[Any]:
    """Return the parts of `values` at the leaves of `like`; raise ValueError if they do not fit.

    `like` decides how a list of two numbers counts: as two leaves, or as one tensor.
    """
    if isinstance(like, Tensor):
        return [values]
    import optree

    spec = optree.tree_structure(like, namespace=NAMESPACE)
    return spec.flatten_up_to(values)


# -- answers: gradients in the structure of the arguments ------------------------------------------


class Container(NamedTuple):
    """One level of a container: its kind, its parts by key, and the name of its type."""

    what: Any
    parts: dict[Any, Any]
    name: str = ""


class Hole(NamedTuple):
    """The position of a tensor in a call's arguments, with its number among the inputs."""

    number: int


NUMBER: Any = object()  # marks a number, which is not a tensor in this call

# An answer may use a list for a tuple, and any dict with the same keys, in any order.
KINDS: dict[type[Any] | None, type[Any]] = {
    list: list,
    tuple: list,
    dict: dict,
    OrderedDict: dict,
    defaultdict: dict,
}


def container(type: Any, keys: Iterable[Any], what: Any, parts: Iterable[Any]) -> Container:
    """Return one level of a container."""
    keys = getattr(type, "_fields", keys)
    return Container(what, dict(zip(keys, parts, strict=True)), type.__name__)


def nested(spec: PyTreeSpec, leaves: Iterator[Any]) -> Any:
    """Return a structure of optree, filled with leaves, as Containers; None stays None."""
    if spec.type is type(None):
        return None
    if spec.is_leaf():
        return next(leaves)
    parts = [nested(child, leaves) for child in spec.children()]
    return container(spec.type, spec.entries(), KINDS.get(spec.type) or spec.one_level(), parts)


def with_holes(leaves: list[Any], places: Sequence[int], spec: PyTreeSpec) -> Callable[[], Any]:
    """Return a `make` function for `Arguments`: it returns flattened arguments as Containers.

    There is a Hole at each of the given places. The function keeps no tensors alive.
    """
    slots = replaced(map(marked, leaves), places, map(Hole, range(len(places))))
    return lambda: nested(spec, iter(slots)).parts.values()


def read(value: Any) -> Any:
    """Return a container as Containers."""
    import optree

    leaves, spec = optree.tree_flatten(value, namespace=NAMESPACE)
    return nested(spec, iter(leaves))


@dataclass(eq=False)
class Arguments:
    """The structure of a call's arguments, which the gradients have to match.

    Args:
        function: The called function. Errors name its parameters.
        name: The function's name for messages.
        count: The number of tensors in the arguments.
        make: Returns the arguments as Containers, with a Hole for each tensor, and the result of
            `marked` elsewhere.
        rest: Returns the result of `marked` for each further argument that a call with this many
            arguments could have had.

    The object holds no tensors, and computes nothing until it reads an answer or a name.
    """

    function: Callable[..., Any]
    name: str
    count: int
    make: Callable[[], Iterable[Any]]
    rest: Callable[[int], list[Any]]

    @cached_property
    def given(self) -> list[Any]:
        """The arguments of the call."""
        return list(self.make())

    @cached_property
    def every(self) -> list[Any]:
        """All arguments that the call has or could have had."""
        return self.given + self.rest(len(self.given))

    @cached_property
    def holders(self) -> dict[int, Any]:
        """The arguments that hold tensors, by position."""
        return {i: arg for i, arg in enumerate(self.given) if any(_holes(arg))}

    @property
    def names(self) -> list[str]:
        """Return the name of each tensor: `x`, `params['w']`."""
        named = self._named().items()
        return [path for name, arg in named for _, path in _holes(arg, name)]

    def _named(self) -> dict[str, Any]:
        return {parameter(self.function, i): arg for i, arg in self.holders.items()}

    def leaves(self, answer: Any) -> list[Any]:
        """Return an answer with one gradient per tensor; RuleError if it has another structure.

        The arguments that hold tensors may differ from call to call. So a list may also have one
        entry per argument, or per argument that holds tensors or numbers. An entry for a number
        is ignored.
        """
        given, holders = read(answer), list(self.holders.values())
        alone = holders if len(holders) == 1 else []
        lists = [_list_of(args) for args in (holders, self.given, _with_numbers(self.given))]
        found = self._fitting((*alone, *lists), given) if alone or given is not None else []
        found = found or self._fitting(self._longer(given), given)
        if found and all(map(_are_same, found, found[1:])):
            return found[0]
        raise RuleError(
            f"{'ambiguous' if found else 'wrong'} structure of gradients: {self.name} "
            f"({place(self.function)}) returned {_shown(given)}, expected gradients by "
            f"{self._expected()} Return a list with one entry per argument (or one entry per "
            "argument that holds tensors), in order, each in its argument's structure, and None "
            "where there is no gradient."
        )

    def _fitting(self, structures: Iterable[Any], given: Any) -> list[list[Any]]:
        """Return the gradients in an answer, once for each structure that the answer matches."""
        found = []
        for expected in structures:
            gradients = [None] * self.count
            if _fits(expected, given, gradients):
                found.append(gradients)
        return found

    def _longer(self, answer: Any) -> list[Any]:
        """Return the lists with entries for further arguments that are as long as an answer."""
        count = len(answer.parts) if type(answer) is Container else 0
        held = len(_with_numbers(self.given))
        lists = (len(self.given), self.every), (held, _with_numbers(self.every))
        return [_list_of(args[:count]) for n, args in lists if n < count <= len(args)]

    def _expected(self) -> str:
        shown = [_shown(arg, name) for name, arg in self._named().items()]
        structure = shown[0] if len(shown) == 1 else f"[{', '.join(shown)}]"
        count = len(self.given)
        verb = "holds" if len(shown) == 1 else "hold"
        held = f" Of {count} arguments, {len(shown)} {verb} tensors in this call."
        return f"{structure}.{held * (count > len(shown))}"

    def needs(self, wanted: Sequence[Any]) -> tuple[Any, ...]:
        """Return which gradients are needed, for each argument that holds tensors or numbers.

        `wanted` has an entry for each tensor. A result has the structure of its argument, with
        False in place of each value that is not a tensor.
        """
        return tuple([_filled(arg, wanted) for arg in _with_numbers(self.every)])


def marked(value: object) -> Any:
    """Return NUMBER for a value that may be a tensor in another call, else None."""
    is_number = type(value) in NUMBERS and type(value) is not bool
    return NUMBER if is_number or is_number_list(value) else None


def _with_numbers(args: Sequence[Any]) -> list[Any]:
    """Return the arguments that hold tensors or numbers."""
    return [arg for arg in args if _may_hold(arg)]


def _may_hold(arg: Any) -> bool:
    return any(map(_may_hold, arg.parts.values())) if type(arg) is Container else arg is not None


def _are_same(dxs: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(dx is other for dx, other in zip(dxs, others, strict=True))


def _list_of(parts: Sequence[Any]) -> Container:
    return Container(list, dict(enumerate(parts)))


def _filled(arg: Any, values: Sequence[Any]) -> Any:
    """Return an argument with a value in place of each tensor, and False elsewhere."""
    if type(arg) is not Container:
        return bool(values[arg.number]) if type(arg) is Hole else False
    parts = {key: _filled(part, values) for key, part in arg.parts.items()}
    if arg.what is dict:
        return parts
    if arg.what is list:
        return [*parts.values()] if arg.name == "list" else (*parts.values(),)
    return arg.what.unflatten(parts.values())


def _fits(expected: Any, given: Any, gradients: list[Any]) -> bool:
    """Return whether an answer has the expected structure; add its gradients to `gradients`."""
    if given is None or expected is NUMBER:
        return True
    if type(expected) is Hole:
        gradients[expected.number] = given
        return type(given) is not Container
    if type(given) is not Container:
        return False
    if expected is None:  # this part has no gradient
        return all(_fits(None, part, gradients) for part in given.parts.values())
    if given.what != expected.what or not given.parts.keys() <= expected.parts.keys():
        return False
    if expected.what is not dict and len(given.parts) < len(expected.parts):
        return False
    # a dict may omit parts that hold no tensor
    return all(
        _fits(part, given.parts[key], gradients) if key in given.parts else not any(_holes(part))
        for key, part in expected.parts.items()
    )


def _holes(value: object, path: str = "") -> Iterator[tuple[int, str]]:
    """Yield the position of each tensor in an argument, with its path."""
    if type(value) is Hole:
        yield value.number, path
    elif type(value) is Container:
        for key, part in value.parts.items():
            yield from _holes(part, path + _step(value, key))


def _step(value: Container, key: object) -> str:
    is_field = value.what not in (list, dict) and isinstance(key, str)
    return f".{key}" if is_field else f"[{key!r}]"


def _shown(value: object, path: str = "") -> str:
    """Return a structure for a message: tensors by their paths, other values by their kind."""
    if type(value) is not Container:
        return path if type(value) is Hole else kind(value)
    parts = {k: _shown(part, path + _step(value, k)) for k, part in value.parts.items()}
    if value.what is list:
        return f"[{', '.join(parts.values())}]"
    if value.what is dict:
        return f"{{{', '.join(f'{k!r}: {part}' for k, part in parts.items())}}}"
    return f"{value.name}({', '.join(f'{k}={part}' for k, part in parts.items())})"


def parameter(function: Callable[..., Any], position: int) -> str:
    """Return the name of a function's argument at a position: `x`, or `xs[2]` for `*xs`."""
    for i, p in enumerate(declared(function) or ()):
        if p.kind is p.VAR_POSITIONAL:
            return f"{p.name}[{position - i}]"
        if i == position:
            return p.name
    return f"args[{position}]"
