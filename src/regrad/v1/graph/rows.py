"""Rows of TensorFlow's index of functions: each is made of its declaration."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from regrad.core.generated import define as compiled
from regrad.core.registry import Op
from regrad.graph.deferred import deferrable
from regrad.v1 import dtypes
from regrad.v1.graph.conversion import as_sizes
from regrad.v1.graph.forms import axes_of, one_op, renamed
from regrad.v1.graph.kinds import ANY
from regrad.v1.graph.row_docs import RowParts, complete

MISSING, EITHER = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
TENSOR = object()  # the role of a parameter that is a tensor though it has a default
Role = Callable[[Any], Any] | str | object | None


def plain_value(value: Any) -> Any:
    """The role of an attribute that is passed on as it is, though it has no default."""
    return value


# What parameters of these names are in all of TensorFlow, deprecated ones among them.
USUAL_ROLES: dict[str, Any] = {
    "value": TENSOR, "filter": TENSOR, "axis": axes_of, "keepdims": bool, "shape": as_sizes,
    "block_shape": as_sizes, "paddings": as_sizes, "crops": as_sizes, "num_segments": as_sizes,
    "strides": plain_value, "padding": plain_value, "use_cudnn_on_gpu": None,
    "reduction_indices": "axis", "dimension": "axis", "dim": "axis", "squeeze_dims": "axis",
    "keep_dims": "keepdims",
}  # fmt: skip


def define(
    declaration: str, op_type: str | None, function: Callable[..., Any] | Op, kinds: str = ANY,
    *shows: str, doc: str = "", **settings: Any,
) -> Callable[..., Any]:  # fmt: skip
    """Make one of TensorFlow's functions from its declaration: what `one_op` does, as a row.

        argmin = define(
            "tf.argmin(input, axis=None, name=None, dimension=None)",
            "ArgMin", rg.argmin, REALS, "[3, 9, 1]", "2",
        )

    Args:
        declaration: The call as TensorFlow's index has it. Parameters without a default are the
            tensors, in order; those with one are attributes, passed on by keyword. `name=None`
            is the last unless it is written elsewhere.
        op_type, function, kinds, same: See `one_op`.
        shows: An example: arrays and keywords that are passed, and the eager result, as its
            elements or as its repr.
        doc: The docstring; by default that of a function of the same module, and of one of
            regrad's its first line. `complete` adds to it.
        settings: See `_made`.
    """
    module = sys._getframe(1).f_globals["__name__"]
    said = inspect.cleandoc(function.__doc__ or "")
    if function.__module__ != module or hasattr(function, "__wrapped__"):  # it has other sections
        said = said.partition("\n")[0]
    settings = {"kinds": kinds, "shows": shows, **settings}
    return _made(*_parse(declaration), module, op_type, function, doc or said, **settings)


def row(
    place: str, op_type: str | None, function: Callable[..., Any] | Op | None = None,
    kinds: str = ANY, deferred: bool = False, **settings: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Make one of TensorFlow's functions as `define` does, from a function that is its declaration.

        @row("tf", "ArgMin", rg.argmin, REALS)
        def argmin(input, axis=None, name=None, dimension=None):
            \"\"\"Return the index of the smallest element along an axis.\"\"\"

    Args:
        place: The namespace in which TensorFlow's index has it.
        op_type, kinds: See `one_op`.
        function: What computes the row; by default the body of the declaration.
        deferred: Whether that body asks for sizes; see `deferrable`.
        settings: See `_made`.
    """

    def decorate(written: Callable[..., Any]) -> Callable[..., Any]:
        declared = inspect.signature(written).parameters
        listed = [p.replace(annotation=MISSING) for p in declared.values()]
        name = [] if "name" in declared else [inspect.Parameter("name", EITHER, default=None)]
        path, doc = f"{place}.{written.__name__}", written.__doc__ or ""
        whole = path, inspect.Signature([*listed, *name]), written.__module__
        computes = function or (deferrable(written) if deferred else written)
        return _made(*whole, op_type, computes, doc, kinds=kinds, **settings)

    return decorate


def _made(
    path: str, signature: inspect.Signature, module: str, op_type: str | None,
    function: Callable[..., Any] | Op, doc: str, *, kinds: str, shows: tuple[str, ...] = (),
    scope: str = "", same: bool = True, call: Callable[..., Any] = one_op, **roles: Role,
) -> Callable[..., Any]:  # fmt: skip
    """Make a row from its declaration.

    Args:
        scope: The default name: otherwise the declared one, the op type or the function's name.
        call: What takes the place of `one_op`.
        roles: What a parameter is otherwise: a function that makes the attribute of what is
            passed, the name of the parameter of which it is the old name, `TENSOR`, or None for
            one without effect. `USUAL_ROLES` need not be written.
    """
    name, parameters = path.rpartition(".")[2], list(signature.parameters.values())
    places = {p.name: i for i, p in enumerate(parameters)}
    blank = [p.default for p in parameters]
    required, total, last = sum(value is MISSING for value in blank), len(places), places["name"]
    default = scope or blank[last] or op_type or name
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
        made = fixed.copy()
        for n, i, role in attrs:
            made[n] = role(values[i])
        return made

    usual = attributes(blank.copy()) if tensors == list(range(required)) else None

    def call_row(*args: Any, **options: Any) -> Any:
        count = len(args)
        if usual is not None and count == required:
            if not options:
                return call(op_type, default, function, *args, **usual)
            if len(options) == 1 and "name" in options:
                return call(op_type, options["name"] or default, function, *args, **usual)
        values = [*args, *blank[count:]]
        for n, value in options.items():
            if places.get(n, -1) < count:  # unknown, or passed by position as well
                signature.bind(*args, **options)  # raises the TypeError
            values[places[n]] = value
        if len(values) > total or (count < required and _lacks_any(values[count:required])):
            signature.bind(*args, **options)
        made = attributes(values)  # and the tensors that have old names
        xs = [values[i] for i in tensors]
        return call(op_type, values[last] or default, function, *xs, **made)

    given, idle = [parameters[i].name for i in tensors], {n for n in roles if roles[n] is None}
    settings = kinds, same, call is one_op, shows
    row = RowParts(path, op_type, default, list(places), given, dict(older), idle, *settings)
    return _dress(call_row, name, signature, complete(doc, row), module)


def _lacks_any(values: list[Any]) -> bool:
    return any(value is MISSING for value in values)  # (`in` would compare tensors)


def _dress(
    function: Any, name: str, signature: inspect.Signature, doc: str, module: str
) -> Callable[..., Any]:
    """Show a function under a name, as one of a module, with a signature and a docstring."""
    function.__name__ = function.__qualname__ = name
    function.__signature__, function.__doc__, function.__module__ = signature, doc, module
    return function


def _parse(declaration: str) -> tuple[str, inspect.Signature]:
    """Read `tf.f(x, axis=None, dtype=tf.int64)`."""
    path, _, listed = declaration.removesuffix(")").partition("(")
    listed = listed if "name=" in listed else f"{listed}, name=None"
    return path, inspect.signature(compiled("f", f"def f({listed}): ...", {"tf": dtypes}))
