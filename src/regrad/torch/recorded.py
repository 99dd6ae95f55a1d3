"""Rules written in regrad's functions, as the kernels that they called: run anew at less cost.

The idea: a rule such as `lambda dy, x: rg.where(x > 0, dy, 0)` runs, for tensors of given shapes,
the same kernels each time. Its Python, the promotion of dtypes and the checks of its answer take
several times as long as the kernels. So a run is recorded, as steps, and the next ones are these:

    steps: Greater(0, 2) -> 3, SelectV2(3, 1, 4) -> 5        results: 5
    0 and 1: the arrays given (x, dy)    2 and 4: constants    3 and 5: results of steps

Invariants:

* Only rules are recorded that could do nothing else: code that reads and writes no more than its
  arguments, numbers, text and functions of the same kind (`pure_closure`). One that reads values,
  or reaches anything outside, is found out as it runs, and its Python runs each time.
* A recording is a real run: no rule runs once more for it.
* What a recording depends on besides is in its key: shapes, dtypes, devices, the default dtype, the
  op types that there are.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from regrad.core import registry
from regrad.core.backends import BACKENDS
from regrad.core.promotion import get_default_dtype
from regrad.core.registry import Op
from regrad.core.rule import Rule
from regrad.core.state import current
from regrad.core.tape import Place, placed
from regrad.core.tensor import Tensor, wrap
from regrad.torch.bridge import to_torch
from regrad.torch.host import DisableTorchFunction, is_autocast_open, is_transformed
from regrad.torch.run_time import is_traced
from regrad.transforms.closures import MISSING, Closure
from regrad.transforms.region import Flat, Region, results, run_inside
from regrad.transforms.trail import Trail

KEPT = 64  # recordings of a rule in calls of a kind
_PLAIN = (bool, int, float, complex, str, type(None))
_SAFE = frozenset({
    "abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "float", "int",
    "isinstance", "len", "list", "max", "min", "pow", "range", "reversed", "round", "sorted", "str",
    "sum", "tuple", "type", "zip",
})  # fmt: skip
_UNSAFE = frozenset(dir(builtins)) - _SAFE
# Instructions that change something outside of the call, or bring something in.
_EFFECTS = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_", "IMPORT_", "YIELD_", "SEND")


def pure_closure(functions: Sequence[Any]) -> Closure | None:
    """Return the closure of functions that can do nothing but compute from their arguments."""
    closure = Closure(*functions)
    if closure.tensors or closure.generators or _UNSAFE & closure.asked:
        return None
    values = [value for _, value in closure.places if value is not MISSING]
    return closure if all(map(_is_constant, (*functions, *values))) else None


def _is_constant(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return _is_ours(value) or not any(map(_has_effects, _codes(value.__code__)))
    if isinstance(value, partial):
        return all(map(_is_constant, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _PLAIN) or _is_ours(value)


def _is_ours(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] == "regrad"
    own = isinstance(value, FunctionType | BuiltinFunctionType | type)
    return own and str(value.__module__).partition(".")[0] == "regrad"


def _codes(code: CodeType) -> list[CodeType]:
    inner = [_codes(c) for c in code.co_consts if isinstance(c, CodeType)]
    return [code, *[each for codes in inner for each in codes]]


def _has_effects(code: CodeType) -> bool:
    return any(i.opname.startswith(_EFFECTS) for i in dis.get_instructions(code))


class _Step(NamedTuple):
    kernel: Callable[..., Any]
    attrs: dict[str, Any]
    layout: tuple[Place, ...] | None
    xs: Sequence[int]


class Recording(NamedTuple):
    """The kernels that a run called, on what is numbered: the arrays given, constants, results."""

    constants: Sequence[torch.Tensor]
    steps: Sequence[_Step]
    results: Sequence[int]

    def __call__(self, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        env: list[Any] = [*arrays, *self.constants]
        for kernel, attrs, layout, refs in self.steps:
            xs = [env[i] for i in refs]
            if layout is not None:
                xs = [placed(xs, place) for place in layout]
            y = kernel(*xs, **attrs)
            if isinstance(y, tuple | list):
                env.extend(y)
            else:
                env.append(y)
        return [env[i] for i in self.results]


def is_usual(dys: Sequence[Any]) -> bool:
    """Return whether a backward pass is one of tensors as they are, that nothing else looks at."""
    with DisableTorchFunction():
        return (
            all(type(dy) is torch.Tensor for dy in dys)
            and not (torch.is_grad_enabled() or is_traced() or is_transformed())
            and not is_autocast_open()
            and current() is None
        )


class Recordings:
    """The recordings of a rule's runs, by what else they depend on."""

    def __init__(self, functions: Sequence[Any]) -> None:
        self.functions = functions
        self.closure: Closure | None = pure_closure(functions)
        self.known: dict[Any, Recording | None] = {}  # None: it ran once, or cannot be recorded

    def are_possible(self) -> bool:
        """Return whether the rule is pure, as its globals and cells are now."""
        if self.closure is not None and not self.closure.is_current():
            self.closure = pure_closure(self.functions)
            self.known.clear()
        return self.closure is not None

    def run(self, flat: Flat, fixed: Any, arrays: Sequence[torch.Tensor]) -> Sequence[Any] | None:
        """Return the results for arrays; None if the rule has to run on the general road.

        `fixed` is what the run depends on besides the arrays.
        """
        like = arrays[-1]
        # (regrad's functions convert what has another dtype; bfloat16 is none of regrad's)
        if any(x.dtype is not like.dtype for x in arrays) or like.dtype is torch.bfloat16:
            return None
        if not self.are_possible():
            return None
        default = get_default_dtype(), registry.version, len(registry.OPS)
        shapes = tuple([x.shape for x in arrays])
        key = fixed, shapes, like.dtype, like.device, default
        found = self.known.get(key, self)
        if found is None:
            return None
        if isinstance(found, Recording):
            return found(arrays)
        if len(self.known) >= KEPT:  # (shapes that never come again)
            self.known.clear()
        ys, self.known[key] = _record(flat, arrays)
        return [to_torch(y, like.device) for y in ys]


def exact(value: Any) -> Any:
    """Return a key that equal values share only if they are the same: 1 and True have two.

    Raises:
        TypeError: a value that is not plain.
    """
    kind = type(value)
    if kind is float:
        return value.hex()  # (-0.0 is another number than 0.0)
    if kind in (tuple, list, torch.Size):
        return kind, *map(exact, value)
    if kind is dict:
        return kind, *((name, exact(x)) for name, x in value.items())
    if kind not in (int, bool, str, type(None), torch.dtype):
        raise TypeError
    return kind, value


class _Recorder(Trail):
    """Notes the ops of a run; whatever is more than an op of Tensors leaves it incomplete."""

    def __init__(self, xs: Sequence[Tensor]) -> None:
        super().__init__("a rule", xs)
        self.complete = True
        self.ops: list[tuple[Op, dict[str, Any], Any, Sequence[Tensor], Sequence[Tensor]]] = []

    def did(
        self, op: Op, rule: Rule, xs: Sequence[Tensor], attrs: Any, y: Any,
        layout: tuple[Place, ...] | None = None,
    ) -> None:  # fmt: skip
        self.ops.append((op, dict(attrs), layout, xs, y if isinstance(y, tuple) else (y,)))

    def went(self, label: str, xs: Any, ys: Any, attrs: Any = None) -> None:
        self.complete = False

    def reach(self, source: Any, number: float) -> None:
        self.complete = False


class _RuleRegion(Region):
    """The region of a rule that runs: its values may be read, which it then does each time."""

    def refuse_read(self, x: Tensor) -> None:
        self.capture.complete = False

    def array(self, value: Any) -> Tensor:
        self.capture.complete = False
        return super().array(value)


def _record(
    flat: Flat, arrays: Sequence[torch.Tensor]
) -> tuple[Sequence[Tensor], Recording | None]:
    """Run a function of Tensors on arrays; return the results, and a recording if possible."""
    region = _RuleRegion("a rule")
    xs = [region.make_stand_in(wrap(x)) for x in arrays]
    region.capture = recorder = _Recorder(xs)
    ys = run_inside(partial(results, flat, xs, region), region, None)
    return ys, _recording(recorder, xs, ys, arrays[-1]) if recorder.complete else None


def _recording(
    recorder: _Recorder, xs: Sequence[Tensor], ys: Sequence[Tensor], like: torch.Tensor
) -> Recording | None:
    made = [y for *_, outputs in recorder.ops for y in outputs]
    known = {x._id: n for n, x in enumerate(xs)}
    known |= {y._id: -1 for y in made}  # (their numbers come after those of the constants)
    constants: dict[int, Tensor] = {}
    for *_, inputs, _ in recorder.ops:
        constants |= {id(x): x for x in inputs if x._id not in known}
    numbers = {key: len(xs) + n for n, key in enumerate(constants)}
    known |= {y._id: len(xs) + len(constants) + n for n, y in enumerate(made)}
    steps: list[_Step] = []
    for op, attrs, layout, inputs, _ in recorder.ops:
        refs = [known.get(x._id, numbers.get(id(x), -1)) for x in inputs]
        steps.append(_Step(op.kernels[torch.Tensor], attrs, layout, refs))
    found = [known.get(y._id, -1) for y in ys]
    arrays = [_as_torch(x._data, like) for x in constants.values()]
    if -1 in found or not all(type(y._data) is torch.Tensor for y in made):
        return None  # a constant is an answer, or something was computed by NumPy
    return Recording(arrays, steps, found)


def _as_torch(array: Any, like: torch.Tensor) -> torch.Tensor:
    return (
        array if isinstance(array, torch.Tensor) else BACKENDS[type(like)].from_numpy(array, like)
    )
