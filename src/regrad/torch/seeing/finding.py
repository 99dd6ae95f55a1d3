"""`find_nan` for PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from regrad.core import containers
from regrad.inspection.nonfinite import CURES, MASKED, NonFinite, Operand, operand
from regrad.inspection.recorder import first_bad
from regrad.torch.host import DisableTorchFunction
from regrad.torch.nodes import tensors
from regrad.torch.seeing.modules import found_in
from regrad.torch.seeing.notes import OpNote, function_name, named_tensors, op_type_of
from regrad.torch.seeing.running import ModelRun, check_callable
from regrad.torch.seeing.watching import Looker

# What regrad's remedies are called, where it is not the op type of a torch function of that name.
_CURE_OF = {
    "div": "RealDiv", "true_divide": "RealDiv", "where": "SelectV2", "norm": "Norm",
    "linalg.vector_norm": "Norm", "linalg.norm": "Norm", "rdiv": "RealDiv", "rtruediv": "RealDiv",
    "truediv": "RealDiv", "rpow": "Pow", "arcsin": "Asin", "arccos": "Acos",
}  # fmt: skip
# Memory that nobody has written to yet may hold anything.
_UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided", "resize_", "set_")


def find_nan(f: Callable[..., Any]) -> Callable[..., NonFinite | None]:
    """Return a function that runs `f` forward and backward, and finds the first NaN or infinity.

    Args:
        f: A function or module as `trace_gradients` takes it.

    Returns:
        A function of f's arguments that returns a `NonFinite`, or None if all is finite: the
        torch function, the line of your code that ran it, the module, the element, what the
        function was given there, and the usual cure. An argument or a parameter that is not
        finite to begin with is reported as such.

        A NaN is reported wherever it first appears. An infinity that the program writes on
        purpose (`masked_fill(mask, -inf)`), or that leads to no NaN, and to no result or gradient
        that is not finite, is none of these.

        This is a tool for debugging: it keeps what every function was given, and waits for each.

    Raises:
        ArgumentError, GradientError: as `trace_gradients`.

    >>> import torch
    >>> import regrad.torch
    >>> x = torch.tensor([1.0, 0.0], requires_grad=True)
    >>> found = regrad.torch.find_nan(lambda x: torch.log(x).sum())(x)
    >>> found.op_type, found.phase, found.what, found.index
    ('log', 'forward', 'inf', (1,))
    """
    check_callable(f, "find_nan")

    def checked(*args: Any, **options: Any) -> NonFinite | None:
        finder = _Nonfinite(found_in(f, args, options))
        if (given := _given(args, finder)) is not None:
            return given
        try:
            with finder.looking():
                seen = ModelRun(f, args, options, finder, "find_nan")
                seen.walk()
        except _Found:
            return finder.found
        return finder.verdict(seen.value)

    return checked


def _given(args: Sequence[Any], finder: Looker) -> NonFinite | None:
    """An argument or parameter that is not finite."""
    paths = containers.paths(tuple(args), "args") if args else []
    leaves = containers.flatten(tuple(args))[0] if args else []
    named = list(zip(paths, leaves, strict=True))
    for name, module in finder.paths.modules.items():
        prefix = name + "." if len(finder.paths.modules) > 1 else ""
        named += [(prefix + inner, p) for inner, p in module.named_parameters()]
    for name, x in named:
        if isinstance(x, torch.Tensor) and x.requires_grad and (bad := bad_in(x)):
            what, index, count = bad
            return NonFinite("argument", what, "", "", "", index, count, output=name)
    return None


class _Found(Exception):
    """The search is over."""


class _Nonfinite(Looker):
    """Looks at each result and each gradient, until one is not finite."""

    keeps_inputs = True

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__(held)
        self.found: NonFinite | None = None
        self.infinite: NonFinite | None = None  # the first infinity that was made of finite numbers
        self.written: NonFinite | None = None  # the first that was written on purpose
        self.kept: dict[OpNote, list[tuple[str, torch.Tensor]]] = {}
        self.failed = False  # whether the result is not finite

    # -- forward ---------------------------------------------------------------------------------

    def before(self, func: Any, args: Sequence[Any], options: Any) -> Any:
        """Keep what a function is given; what it will write over, as it is now."""
        named = list(named_tensors(func, args, options))
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
        if named and (writes or options.get("inplace") or _is_true(args[1:2]) or "setitem" in name):
            named[0] = named[0][0], named[0][1].detach().clone()
        return named

    def after(self, func: Any, args: Any, options: Any, y: Any, was: Any, note: OpNote) -> None:
        """Look at what a function returned."""
        self.kept[note] = [(name, x.detach()) for name, x in was]
        if getattr(func, "__name__", "") in _UNWRITTEN:
            return
        made = y if y is not None else (args[0] if args else None)
        self.look(func, made, was, note, _writes_infinity((args, options)))

    def ran(self, function: Any, args: Any, y: Any, note: OpNote, ctx: Any) -> None:
        """Look at what a Function returned."""
        given = [x for x in args if isinstance(x, torch.Tensor)]
        named = list(zip(note.names, given, strict=False))
        self.kept[note] = [(name, x.detach()) for name, x in named]
        self.look(function, y, named, note, False)

    def look(self, func: Any, ys: Any, was: Any, note: OpNote, writes: bool) -> None:
        """Tell the first result that is not finite, although what it was made of is."""
        for y in tensors((ys,)):
            bad = bad_in(y)
            if bad is None:
                continue
            before = [found[0] for _, x in was if (found := bad_in(x)) is not None]
            what, index, count = bad
            op_type = note.op_type if isinstance(func, type) else function_name(func)
            if "NaN" in before or (what == "inf" and before):
                return  # it came from further up
            found = NonFinite(
                "forward", what, op_type, note.line, note.path, index,
                count, operands(was, tuple(y.shape), index), "", cure_of(func, op_type),
            )  # fmt: skip
            if what == "inf" and writes:
                self.written = self.written or found
            elif what == "inf":
                self.infinite = self.infinite or found
            else:
                self.tell(self._cause(found, before))

    def _cause(self, found: NonFinite, before: Sequence[str]) -> NonFinite:
        """Return what made a NaN: the op itself, or an infinity that was made before."""
        return self.infinite if before and self.infinite is not None else found

    def ended(self, loss: torch.Tensor) -> None:
        """Look at the result."""
        self.failed = self.failed or bad_in(loss) is not None

    def tell(self, found: NonFinite) -> None:
        """This is it."""
        self.found = found
        raise _Found

    # -- backward --------------------------------------------------------------------------------

    def left(self, note: OpNote, dxs: Sequence[Any], dys: Sequence[Any]) -> None:
        """Look at the gradients that leave an op."""
        if self.found is not None:
            return
        for i, dx in enumerate(dxs):
            bad = bad_in(dx) if isinstance(dx, torch.Tensor) else None
            if bad is None:
                continue
            if any(isinstance(dy, torch.Tensor) and bad_in(dy) for dy in dys):
                return  # f itself sent something that is not finite
            self.found = self._backward(note, i, dx, dys, bad)
            return

    def _backward(
        self, note: OpNote, i: int, dx: torch.Tensor, dys: Sequence[Any], bad: Any
    ) -> NonFinite:
        what, index, count = bad
        shape = tuple(dx.shape)
        first = note.inputs if isinstance(note.inputs, OpNote) else note
        was = self.kept.get(first) or []
        arrived = [("dy", dy) for dy in dys if isinstance(dy, torch.Tensor)]
        given = operands(arrived, shape, index)
        cure = cure_of(note.func, note.op_type)
        if what == "NaN" and any(each.value == 0 for each in given):
            cure = MASKED
        if self.infinite is not None and any(bad_in(x) for _, x in was):
            return self.infinite
        return NonFinite(
            "backward", what, note.op_type, note.line, note.path, index, count,
            (*given, *operands(was, shape, index)), note.rule, cure, note.name(i),
        )  # fmt: skip

    # -- in the end ------------------------------------------------------------------------------

    def verdict(self, value: Any) -> NonFinite | None:
        """Return what was found, when all has run."""
        if self.failed or any(bad_in(y) for y in tensors((value,))):
            return self.infinite or self.found or self.written
        return self.found


def _is_true(values: Sequence[Any]) -> bool:
    """Return whether a flag is given, and set (`inplace`, by position)."""
    return any(value is True for value in values)


def _writes_infinity(value: Any) -> bool:
    """Return whether a number among the arguments of a function is infinite."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, list | tuple):
        return any(map(_writes_infinity, value))
    return isinstance(value, dict) and any(map(_writes_infinity, value.values()))


def bad_in(x: torch.Tensor) -> tuple[str, tuple[int, ...], int] | None:
    """Return what is not finite in a tensor, where first, and how many; None if all is finite."""
    if not (x.is_floating_point() or x.is_complex()) or x.layout is not torch.strided:
        return None
    if x.is_meta or x.is_nested:
        return None
    with torch.no_grad(), DisableTorchFunction():
        if not x.numel() or torch.isfinite(x).all():
            return None
        return first_bad(as_array(x))


def as_array(x: torch.Tensor) -> np.ndarray:
    """A tensor as an array that NumPy can compute with."""
    with torch.no_grad(), DisableTorchFunction():
        x = x.detach().resolve_conj().resolve_neg().cpu()
        if x.dtype == torch.bfloat16 or (x.is_floating_point() and x.element_size() == 1):
            x = x.float()
        return x.numpy()


def operands(
    was: Sequence[tuple[str, torch.Tensor]], shape: tuple[int, ...], index: tuple[int, ...]
) -> tuple[Operand, ...]:
    """Return what a function was given, at an element of a result or gradient of this shape."""
    return tuple(_operands(was, shape, index))


def _operands(was: Any, shape: tuple[int, ...], index: tuple[int, ...]) -> Iterator[Operand]:
    for name, x in was:
        if x.layout is torch.strided and x.numel() and not x.is_meta:
            yield operand(name, as_array(x), shape, index)


def cure_of(func: Any, op_type: str) -> str:
    """The usual remedy for a torch function, "" if none is known."""
    name = op_type.partition(" (")[2].rstrip(")") or op_type.rstrip("_")
    known = _CURE_OF.get(name) or (op_type_of(func) if callable(func) else "")
    return CURES.get(known, "") or CURES.get(name.title().replace("_", ""), "")
