"""The decorator that makes an op from a kernel, and shorthands for tables of ops.

    @op("Square")
    def square(xp, x: Tensor, /) -> Tensor:
        "`x * x`, element by element."
        return x * x

Annotations decide the kind of a parameter. `Tensor`, `Tensor | None` and `Sequence[Tensor]` are
tensors. `Indices` is a tensor of integers. Every other annotation is for an attribute. `TensorLike`
has the same effect as `Tensor`, and a type checker then also accepts arrays and numbers. `xp` is
the array namespace, and not part of the public signature.
"""

from __future__ import annotations

import inspect
import itertools
import keyword
import sys
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from regrad.core import dispatch
from regrad.core.backends import Array
from regrad.core.docstrings import complete, ordered
from regrad.core.fastpath import binary, unary
from regrad.core.generated import define
from regrad.core.registry import OPS, Attrs, Input, Kernel, Op, check_op_type, find_op, gradient
from regrad.core.rule import RuleFunction, parameters
from regrad.core.rule_forms import Entwined
from regrad.core.signatures import check_call
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, RegistrationError, kind

P = ParamSpec("P")
R = TypeVar("R")

Indices: TypeAlias = TensorLike  # integers: Python numbers are not converted to float32 here
KINDS = {
    "TensorLike": ("one", False),
    "TensorLike | None": ("optional", False),
    "Sequence[TensorLike]": ("many", False),
    "Tensor": ("one", False),
    "Tensor | None": ("optional", False),
    "Sequence[Tensor]": ("many", False),
    "list[Tensor]": ("many", False),
    "Indices": ("one", True),
}


def op(
    type: str,
    *,
    elementwise: bool = False,
    broadcasts: bool = False,
    promotes: tuple[str, ...] | bool = False,
    to_float: bool = False,
    holomorphic: bool = True,
    real: bool = False,
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[P, R]]:
    """Return a decorator that makes an op of type `type` from a kernel.

    Args:
        type: The op type, in CamelCase (TensorFlow's name if it has one).
        elementwise: The op works element by element, and several inputs broadcast. Graphs can then
            infer the shape of its result, NumPy's function of this name accepts Tensors, and
            overrides find the functions of PyTorch and JAX with this name.
        broadcasts: The inputs broadcast. The backward pass sums a gradient to its input's shape.
            (Inputs that broadcast are promoted to one dtype as well.)
        promotes: The inputs that are converted to a common dtype before the kernel runs: True
            for all, or their names.
        to_float: As `promotes=True`, and integers and bools become float32.
        holomorphic: The op is complex-differentiable, and its rule is written as for real numbers
            (without conjugates: the backward pass adds them). For ops such as `abs` pass False, and
            write the rule in TensorFlow's convention for complex gradients.
        real: The op accepts real numbers only. Complex numbers, which have no order, raise.

    Returns:
        A decorator that turns a kernel into the public function of the op.

    Raises RegistrationError if the type exists.

    >>> import regrad as rg
    >>> @rg.op("Halve")
    ... def halve(xp, x: rg.Tensor, /) -> rg.Tensor:
    ...     "`x / 2`, element by element."
    ...     return x / 2
    >>> halve(rg.tensor([2.0, 4.0])).print()
    Tensor
        [1, 2]
    """

    check_op_type(type)

    def decorate(kernel: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
        _check_function(kernel, type)
        inputs, attrs = _parameters(kernel, type)
        _check_free(type)
        _check_name(kernel.__name__, type)
        entry = Op(
            type,
            kernel.__name__.lstrip("_"),  # `_clip` is the kernel of the function clip
            kernel,
            inputs,
            attrs,
            elementwise=elementwise,
            broadcasts=broadcasts or (elementwise and len(inputs) > 1),
            promotes=promotes,
            to_float=to_float,
            holomorphic=holomorphic,
            real=real,
            several=_annotation(kernel.__annotations__.get("return")).startswith("tuple"),
        )
        entry.function = _public(entry, kernel)
        OPS.add(entry)
        return entry.function

    return decorate


def _check_function(kernel: object, type: str) -> None:
    if not inspect.isfunction(kernel):
        raise ArgumentError(f"op: the kernel of {type!r} must be a function, got {kind(kernel)}")


def _check_name(name: str, type: str) -> None:
    """Raise for a name that is not an identifier, because the op has the name of its kernel."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ArgumentError(
            f"op: the kernel of {type!r} has the name {name!r}, which is not an identifier. The op "
            "gets the name of its kernel. Define the kernel with def."
        )


def _check_free(type: str) -> None:
    if not OPS.is_free(type):
        raise RegistrationError(
            f"the op type {type!r} exists already (regrad.{OPS[type].name}); "
            "choose another name for your op"
        )


def _parameters(kernel: Callable[..., Array], type: str) -> tuple[list[Input], list[str]]:
    names = list(kernel.__code__.co_varnames)[: _count(kernel)]
    if names[:1] != ["xp"]:
        raise ArgumentError(
            f"the kernel of the op type {type!r} must take the array namespace `xp` first, as in "
            f"def {kernel.__name__}(xp, x: Tensor, /) -> Tensor"
        )
    positional = kernel.__code__.co_posonlyargcount
    inputs, attrs = [], []
    for i, name in enumerate(names[1:], 1):
        kind = KINDS.get(_annotation(kernel.__annotations__.get(name)))
        if kind is None and i < positional:
            raise ArgumentError(
                f"the kernel of the op type {type!r} takes its attribute {name!r} by position "
                "only; put it after the `/`, because kernels get attributes by keyword"
            )
        if kind is None:
            attrs.append(name)
        else:
            inputs.append(Input(name, *kind))
    return inputs, attrs


def _count(function: Callable[..., Any]) -> int:
    return function.__code__.co_argcount + function.__code__.co_kwonlyargcount


def _annotation(annotation: Any) -> str:
    """Return an annotation as written, without module names (it may be a string or an object)."""
    if isinstance(annotation, type):
        annotation = annotation.__name__
    for module in ("regrad.core.tensor.", "regrad.", "rg.", "collections.abc.", "typing."):
        annotation = str(annotation).replace(module, "")
    return str(annotation)


def _public(entry: Op, kernel: Callable[..., Array]) -> Callable[..., Any]:
    """Return the function that users call, with the kernel's signature but without `xp`.

    Ops of one or two plain tensors have a fast path. For other ops the function is generated as
    source code, so that Python itself checks and names the arguments.
    """
    short = {1: unary, 2: binary}.get(len(entry.inputs))
    plain = entry.flat and not entry.attrs and not any(i.integers for i in entry.inputs)
    if short and plain and (len(entry.inputs) == 1 or all(entry.promotes)):
        function = short(entry)
    else:
        function = _write_function(entry, kernel)
        function.__signature__ = Declared(lambda: inspect.signature(kernel))  # pyright: ignore
    return _dress(function, entry, kernel)


def _write_function(entry: Op, kernel: Callable[..., Array]) -> Callable[..., Any]:
    scope: dict[str, Any] = {
        "__name__": __name__, "call_": dispatch.call, "op_": entry, "misfit_": _misfit,
        "missing_": MISSING,
    }  # fmt: skip
    names = kernel.__code__.co_varnames[1 : _count(kernel)]
    positional = kernel.__code__.co_argcount - 1
    only = kernel.__code__.co_posonlyargcount - 1
    defaults = _defaults(kernel)
    pieces = []
    for i, name in enumerate(names):
        if i == positional:
            pieces.append("*more_")
        scope[f"{name}_"] = defaults.get(name, MISSING)
        pieces.append(f"{name}={name}_")
        if i + 1 == only:
            pieces.append("/")
    if positional == len(names):
        pieces.append("*more_")
    needed = [name for name in names if name not in defaults]
    fault = " or ".join(["more_", "unknown_", *[f"{name} is missing_" for name in needed]])
    before = "".join(f"{name}, " for name in names[:positional])
    after = ", ".join(f"{name!r}: {name}" for name in names[positional:])
    tensors = "".join(f"{i.name}, " for i in entry.inputs)
    attrs = ", ".join(f"{a!r}: {a}" for a in entry.attrs)
    # Like namedtuple, generate a function with exactly this signature. It also takes any other
    # arguments, to report them.
    source = (
        f"def {entry.name}({', '.join([*pieces, '**unknown_'])}):\n"
        f"    if {fault}: raise misfit_(op_, ({before}*more_), {{{after}}}, unknown_)\n"
        f"    return call_(op_, ({tensors}), {{{attrs}}})"
    )
    return define(entry.name, source, scope, lasting=True)


MISSING = object()  # the default of an argument that the caller has to pass


def _defaults(kernel: Callable[..., Array]) -> dict[str, Any]:
    """Return the defaults of a kernel's parameters, by name."""
    values = kernel.__defaults__ or ()
    positional = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    last = positional[len(positional) - len(values) :]
    return {**dict(zip(last, values, strict=True)), **(kernel.__kwdefaults__ or {})}


def _misfit(op: Op, args: Sequence[Any], options: Attrs, unknown: Attrs) -> Exception:
    """Return the error for a call that does not match an op's signature."""
    args = list(itertools.takewhile(lambda x: x is not MISSING, args))
    options = {name: x for name, x in {**options, **unknown}.items() if x is not MISSING}
    try:
        check_call(op.function, op.name, args, options)
    except ArgumentError as error:
        return error
    raise AssertionError(f"{op.name} accepts the call that its function rejected")


class Declared(inspect.Signature):
    """The signature of an op, computed at first use."""

    __slots__ = ("_declare",)

    def __init__(self, declare: Callable[[], inspect.Signature]) -> None:
        self._declare = declare

    @property
    def parameters(self) -> Any:
        found = self._declare().parameters
        return MappingProxyType({name: p for name, p in found.items() if name != "xp"})

    @property
    def _return_annotation(self) -> Any:
        return self._declare().return_annotation


def _dress(function: Callable[..., Any], entry: Op, like: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = entry.name
    function.__module__ = like.__module__
    function.__annotations__ = {k: v for k, v in like.__annotations__.items() if k != "xp"}
    annotations = {name: _annotation(kind) for name, kind in like.__annotations__.items()}
    annotations = ordered(annotations, like)
    function.__doc__ = complete(like.__doc__, entry, annotations) if like.__doc__ else None
    return function


def elementwise(
    type: str,
    name: str,
    kernel: Kernel,
    doc: str,
    *rules: RuleFunction,
    to_float: bool = False,
    holomorphic: bool = True,
    real: bool = False,
    inputs: str = "x",
    boolean: bool = False,
) -> Callable[..., Any]:
    """Return the function of an elementwise op, declared in one call instead of `op`, `gradient`.

    Args:
        type: The op type.
        name: The name of the function.
        kernel: A function of `(xp, x)`, or the name of the kernel in the Array API standard.
        doc: The docstring. Arguments, results and errors are added to it.
        *rules: One rule per input, in order; none for ops without a gradient.
        to_float: Integers and bools become the default dtype.
        holomorphic, real: As in `op`.
        inputs: The names of the inputs, one or two.
        boolean: The results are bools. Only the docstring depends on this.
    Raises:
        RegistrationError: the op type exists.

    >>> import regrad as rg
    >>> from regrad.extend import elementwise
    >>> cube = elementwise(
    ...     "Cubed", "cube", lambda xp, x: x**3, "Return x³.", lambda dy, x: dy * (3 * x * x)
    ... )
    >>> rg.grad(cube)(2.0).item()
    12.0
    """
    names = inputs.split()
    _check_free(type)
    entry = Op(
        type,
        name,
        kernel,
        [Input(n, "one") for n in names],
        elementwise=True,
        broadcasts=len(names) > 1,
        promotes=len(names) > 1,
        to_float=to_float,
        holomorphic=holomorphic,
        real=real,
    )
    OPS.add(entry)
    function = (unary if len(names) == 1 else binary)(entry)
    function.__name__ = function.__qualname__ = name
    function.__module__ = sys._getframe(1).f_globals["__name__"]
    function.__annotations__ = {**dict.fromkeys(names, "TensorLike"), "return": "Tensor"}
    if names not in (["x"], ["a", "b"]):  # the names in the functions of the fast path
        function.__signature__ = Declared(lambda: _of_names(names))  # pyright: ignore
    function.__doc__ = complete(doc, entry, function.__annotations__, boolean=boolean)
    entry.function = function
    for wrt, rule in zip(names, rules, strict=False):
        gradient(type, wrt)(rule)
    return function


def row(
    type: str, *rules: RuleFunction, kernel: Kernel | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Declare an elementwise op by a function that has its name, its inputs and its docstring.

    The default kernel is the function of that name in the Array API standard.
    Rules and options are the ones of `elementwise`.
    """

    def declare(like: Callable[..., Any]) -> Any:
        name, doc = like.__name__, like.__doc__ or ""
        inputs = " ".join(parameters(like))
        function = elementwise(type, name, kernel or name, doc, *rules, inputs=inputs, **options)
        function.__module__ = like.__module__
        return function

    return declare


def _of_names(names: Sequence[str]) -> inspect.Signature:
    """Return the signature of a function of some tensors, by position alone."""
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def piecewise_constant(type: str, rule: RuleFunction) -> None:
    """Set an op's rule, which is zero (or `rules.no_gradient`) where the op is differentiable.

    Such a rule ignores its inputs, like the rule of a linear op. But the op is not linear, and
    forward mode has to distinguish the two.

    Args:
        type: The op type.
        rule: A rule that returns zeros, or `rules.no_gradient`.

    Raises:
        UnknownOpError: there is no such op type.

    >>> import regrad as rg
    >>> from regrad.extend import piecewise_constant
    >>> @rg.op("Tens")
    ... def tens(xp, x: rg.Tensor, /) -> rg.Tensor:
    ...     "Return x rounded down to a multiple of 10."
    ...     return xp.floor(x / 10) * 10
    >>> piecewise_constant("Tens", lambda dy: rg.zeros_like(dy))
    >>> rg.grad(tens)(25.0).item()
    0.0
    """
    entry = find_op(type)
    for each in entry.inputs:
        gradient(type, each.name)(rule)
    entry.rule.flat = True


def entwined(type: str, *rules: RuleFunction, together: RuleFunction) -> None:
    """Add one rule per input to an op, and one for the first input with others. See `Entwined`."""
    entry = find_op(type)
    rule = entry.rule = Entwined(entry, type)
    for each, function in zip(entry.inputs, rules, strict=True):
        rule.add(each.name, function)
    rule.add_together(together)
