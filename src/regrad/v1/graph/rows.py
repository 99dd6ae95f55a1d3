"""Rows of TensorFlow's index of functions. Each function is made from its declaration."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from regrad.core.generated import define as compiled
from regrad.core.registry import OPS, Op
from regrad.graph.deferred import deferrable
from regrad.v1 import dtypes
from regrad.v1.graph.conversion import as_sizes
from regrad.v1.graph.forms import axes_of, one_op, renamed
from regrad.v1.graph.kinds import ANY
from regrad.v1.graph.row_docs import Names, RowParts, borrow, complete
from regrad.v1.graph.tf_names import declare

MISSING, EITHER = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
TENSOR = object()  # the role of a tensor parameter that has a default


def plain_value(value: Any) -> Any:
    """Return the value unchanged: the role of an attribute without a default."""
    return value


# Roles of parameters by name, the same in all of TensorFlow. Some of the names are deprecated.
USUAL_ROLES: dict[str, Any] = {
    "value": TENSOR, "filter": TENSOR, "axis": axes_of, "keepdims": bool, "keep_dims": "keepdims",
    "strides": plain_value, "padding": plain_value, "use_cudnn_on_gpu": None,
    **dict.fromkeys(("shape", "block_shape", "paddings", "crops", "num_segments"), as_sizes),
    **dict.fromkeys(("reduction_indices", "dimension", "dim", "squeeze_dims"), "axis"),
}  # fmt: skip
# Types of parameters by name, where the default does not show them.
TYPES = Names({
    **dict.fromkeys(("_name", "scope", "loss_collection", "data_format"), "str | None"),
    **dict.fromkeys(("keepdims", "keep_dims"), "bool | None"), "_seed": "int | None",
    "activation": "Function | str", "reuse": "bool | AutoReuse | None",
    "_initializer": "Initial", "_regularizer": "Function", "_constraint": "Function",
    **dict.fromkeys(("values", "t_list", "boundaries"), "Sequence[TensorLike]"),
    **dict.fromkeys(("weights", "mean", "stddev", "minval", "alpha", "bias"), "TensorLike"),
    "label_smoothing": "float", "padding": "str | bytes | Sequence[Sequence[int]]",
    "ord": "str | float",
    **dict.fromkeys(("dtype", "out_type", "out_idx", "output_type"), "dtypes.DTypeLike"),
})  # fmt: skip
SHOWN = "int", "int | Sequence[int]", "str"  # annotations that belong to the signature
LISTED: dict[tuple[str, str], list[str]] = {}  # the names of rows, by module and place


def listed(module: str, others: str = "", place: str = "tf") -> list[str]:
    """Return the `__all__` of a module: the names of its rows at a place, and other names."""
    return sorted({*LISTED[module, place], *others.split()})


def written(place: str, op_types: str | None = None) -> Callable[[Any], Any]:
    """Complete the signature of a function that handles its arguments itself.

    The function is returned as it is. Its parameters get types by name and default.

    Args:
        place: The namespace of the function in TensorFlow's index.
        op_types: The declaration of the op types that only this function makes; see `tf_names`.
    """
    declare(op_types)

    def complete_types(function: Any) -> Any:
        LISTED.setdefault((function.__module__, place), []).append(function.__name__)
        types = function.__annotations__
        for p in inspect.signature(function).parameters.values():
            types[p.name] = types.pop(p.name, None) or _type(p)
        types["return"] = types.pop("return", "Any")
        return function

    return complete_types


def constructor(
    declared: str, module: str, usual: str = "TensorLike", **scope: Any
) -> Callable[..., None]:
    """Make an `__init__` from declared arguments. It calls `_take` with all arguments by name.

    Args:
        declared: The arguments, such as `"learning_rate, name='SGD'"`.
        module: The module of the class.
        usual: The type of arguments whose name and default do not show it.
        scope: Names that the declaration uses.
    """
    source = f"def __init__(self, {declared}):\n    type(self)._take(**locals())"
    made = compiled("__init__", source, {"__name__": module, **scope}, lasting=True)
    kinds, listed = {bool: "bool", str: "str", float: usual}, inspect.signature(made).parameters
    types = {n: kinds.get(type(p.default)) or TYPES.get(n, usual) for n, p in listed.items()}
    made.__annotations__ = {**types, "return": "None"}
    return made


def _type(p: inspect.Parameter, role: Any = None) -> str:
    """Return the type of a parameter as text."""
    if p.annotation in SHOWN:
        return p.annotation
    found = TYPES.get(p.name)
    if not found:
        simple = type(p.default) in (bool, int, float, str) and role in (None, bool, plain_value)
        return type(p.default).__name__ if simple else "TensorLike"
    return f"{found} | None" if p.default is None and not found.endswith("None") else found


def define(
    declaration: str, op_type: str | None, function: Callable[..., Any] | Op, kinds: str = ANY,
    *shows: str, doc: str = "", **settings: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Make a TensorFlow function from its declaration. The function calls `one_op`.

        argmin = define(
            "tf.argmin(input, axis=None, name=None, dimension=None)",
            "ArgMin", rg.argmin, REALS, "[3, 9, 1]", "2",
        )

    Args:
        declaration: The signature in TensorFlow's index. Parameters without a default are the
            tensors, in order. Parameters with a default are attributes, passed by keyword.
            `name=None` is appended unless the declaration has it.
        op_type: The op type, with its declaration unless it is declared elsewhere; see `tf_names`.
        function, kinds, same: See `one_op`.
        shows: An example: the arrays and keywords to pass, and the eager result, as its elements
            or as its repr.
        doc: The docstring. The default is the docstring of `function`, or only its first line if
            `function` is defined in another module. `complete` adds sections.
        settings: See `_made`.
    """
    module = sys._getframe(1).f_globals["__name__"]
    said = inspect.cleandoc(function.__doc__ or "")
    if function.__module__ != module or hasattr(function, "__wrapped__"):  # other sections
        said = said.partition("\n")[0]
    settings = {"kinds": kinds, "shows": shows, **settings}
    return _made(*_parse(declaration), module, op_type, function, doc or said, **settings)


def elementwise(
    kinds: str, *functions: Callable[..., Any], place: str = "tf", names: str = "x y",
    **others: Callable[..., Any],
) -> list[Callable[..., Any]]:  # fmt: skip
    """Make TensorFlow functions from elementwise functions of regrad, with their docstrings.

        exp, log, is_nan = elementwise(FLOATS, rg.exp, rg.log, is_nan=rg.isnan)

    Args:
        kinds: See `one_op`.
        functions: Functions that have the same name in TensorFlow.
        place: The namespace of the functions in TensorFlow's index.
        names: The names of the parameters in TensorFlow.
        others: Functions by their name in TensorFlow.
    """
    module = sys._getframe(1).f_globals["__name__"]
    op_types, rows = {op.function: op.type for op in OPS.values()}, []
    for name, function in {**{f.__name__: f for f in functions}, **others}.items():
        taken = names.split()[: len(inspect.signature(function).parameters)]
        path, signature = _parse(f"{place}.{name}({', '.join(taken)})")
        op_type, doc = op_types[function], borrow(function, path, taken)
        named = op_type.removesuffix("V2")
        rows.append(
            _made(path, signature, module, op_type, function, doc, kinds=kinds, scope=named)
        )
    return rows


def row(
    place: str, op_type: str | None = None, function: Callable[..., Any] | Op | None = None,
    kinds: str = ANY, deferred: bool = False, then: Callable[..., None] | None = None,
    **settings: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Make a TensorFlow function as `define` does, with a Python function as the declaration.

        @row("tf", "ArgMin", rg.argmin, REALS)
        def argmin(input, axis=None, name=None, dimension=None):
            \"\"\"Return the index of the smallest element along an axis.\"\"\"

    Args:
        place: The namespace of the function in TensorFlow's index.
        op_type, kinds: See `define`.
        function: The function that computes the row, by default the decorated function.
        deferred: Whether the decorated function reads sizes; see `deferrable`.
        then: A function with the last parameters, which several rows share, and with their
            descriptions. A parameter of the decorated function takes precedence.
        settings: See `_made`.
    """

    def decorate(written: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(written).parameters
        declared = {**own, **(inspect.signature(then).parameters if then else {}), **own}
        parameters = [
            p if p.annotation in SHOWN else p.replace(annotation=MISSING) for p in declared.values()
        ]
        named = {"name", "scope"} & declared.keys()
        name = [] if named else [inspect.Parameter("name", EITHER, default=None)]
        path, doc = f"{place}.{written.__name__}", written.__doc__ or ""
        whole = path, inspect.Signature([*parameters, *name]), written.__module__
        computes = function or (deferrable(written) if deferred else written)
        shared = then.__doc__ or "" if then else ""
        return _made(*whole, op_type, computes, doc, kinds=kinds, shared=shared, **settings)

    return decorate


def _made(
    path: str, signature: inspect.Signature, module: str, op_type: str | None,
    function: Callable[..., Any] | Op, doc: str, *, kinds: str, shows: tuple[str, ...] = (),
    scope: str | None = "", same: bool = True, call: Callable[..., Any] = one_op,
    returns: str = "Any", shared: str = "", **roles: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Make a row from its declaration.

    Args:
        scope: The default name of the op. If it is empty, the default name is the declared
            `name`, the op type or the function's name. Losses have a parameter `scope` for it. None
            leaves the choice to `call`.
        call: The function to call instead of `one_op`.
        returns: The type of the result.
        shared: A docstring with the descriptions of parameters that several rows share.
        roles: Roles of parameters that differ from `USUAL_ROLES`. A role is a function that
            converts the passed value to the attribute, the new name of a renamed parameter,
            `TENSOR`, or None for a parameter without effect.
    """
    (place, _, name), op_type = path.rpartition("."), declare(op_type)
    LISTED.setdefault((module, place), []).append(name)
    parameters = list(signature.parameters.values())
    places = {p.name: i for i, p in enumerate(parameters)}
    blank = [p.default for p in parameters]
    required, total = sum(value is MISSING for value in blank), len(places)
    last = places["name" if "name" in places else "scope"]
    default: Any = None if scope is None else scope or blank[last] or op_type or name
    ordinary = {n: TENSOR if i < required else plain_value for n, i in places.items() if i != last}
    roles = {n: roles.get(n, USUAL_ROLES.get(n, role)) for n, role in ordinary.items()}
    tensors = [places[n] for n, role in roles.items() if role is TENSOR]
    older = [(n, role) for n, role in roles.items() if isinstance(role, str)]
    attrs = [(n, places[n], role) for n, role in roles.items() if callable(role)]
    fixed = {**({"kinds": kinds} if kinds else {}), **({} if same else {"same": False})}

    def attributes(values: list[Any]) -> dict[str, Any]:
        for old, new in older:
            if (value := values[places[old]]) is not None:
                values[places[new]] = renamed(new, values[places[new]], old, value)
        return fixed | {n: role(values[i]) for n, i, role in attrs}

    usual = attributes(blank.copy()) if tensors == list(range(required)) else None

    def call_row(*args: Any, **options: Any) -> Any:
        count = len(args)
        plain = not options or (len(options) == 1 and "name" in options)
        if usual is not None and count == required and plain:
            return call(op_type, options.get("name") or default, function, *args, **usual)
        values = [*args, *blank[count:]]
        for n, value in options.items():
            if places.get(n, -1) < count:  # the name is unknown, or also passed by position
                signature.bind(*args, **options)  # raises the TypeError
            values[places[n]] = value
        lacks = [value for value in values[count:required] if value is MISSING]
        if len(values) > total or lacks:
            signature.bind(*args, **options)
        made = attributes(values)  # also moves tensors from old names to new names
        xs = [values[i] for i in tensors]
        return call(op_type, values[last] or default, function, *xs, **made)

    given, idle = [parameters[i].name for i in tensors], {n for n in roles if roles[n] is None}
    settings = kinds, same, call is one_op, shows
    row = RowParts(path, op_type, default, list(places), given, dict(older), idle, *settings)
    types = {p.name: _type(p, roles.get(p.name)) for p in parameters}
    call_row.__annotations__ = {**types, "return": returns}
    call_row.__name__ = call_row.__qualname__ = name
    call_row.__module__, call_row.__doc__ = module, complete(doc, row, shared)
    call_row.__signature__ = signature  # type: ignore[attr-defined]
    return call_row


def _parse(declaration: str) -> tuple[str, inspect.Signature]:
    """Parse a declaration such as `tf.f(x, axis=None, dtype=tf.int64)`."""
    path, _, listed = declaration.removesuffix(")").partition("(")
    listed = listed if "name=" in listed else f"{listed}, name=None"
    return path, inspect.signature(compiled("f", f"def f({listed}): ...", {"tf": dtypes}))
