"""Rules written in regrad's functions, as the functions of torch that they called.

The idea: a rule such as `lambda dy, x: rg.where(x > 0, dy, 0)` calls, for tensors of given shapes,
the same functions of torch each time. Its Python, the promotion of dtypes and the checks of its
answer take several times as long as these. So a run is recorded, and the next ones are this:

    def program(x0, x1):        # x, dy
        y0 = c0(x0, c1)         # torch.greater(x, 0)
        y1 = c2(y0, x1, c3)     # torch.where(…, dy, 0)
        return y1,

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
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from regrad.core import registry
from regrad.core.promotion import get_default_dtype
from regrad.core.registry import Op
from regrad.core.rule import Rule
from regrad.core.state import current
from regrad.core.tape import Place
from regrad.core.tensor import Tensor, wrap
from regrad.torch.bridge import to_torch
from regrad.torch.host import DisableTorchFunction, is_autocast_open, is_transformed, version_of
from regrad.torch.host.dynamo import is_traced
from regrad.torch.nodes import tensors
from regrad.transforms.closures import MISSING, Closure
from regrad.transforms.region import Region, results, run_inside
from regrad.transforms.trail import Trail

KEPT = 64  # recordings of a rule in calls of a kind
_PLAIN = (bool, int, float, complex, str, type(None))
_SAFE = frozenset({
    "abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "float", "int",
    "isinstance", "len", "list", "max", "min", "pow", "range", "reversed", "round", "sorted", "str",
    "sum", "tuple", "type", "zip",
})  # fmt: skip
_UNSAFE = frozenset(dir(builtins)) - _SAFE
# What does not depend on values, of tensors of a kind.
_OF_KIND = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "numel", "size", "dim",
    "__len__", "is_floating_point", "is_complex", "is_signed", "result_type", "is_neg",
})  # fmt: skip
_FIXED = (*_PLAIN, slice, type(...), torch.Tensor, torch.Size, torch.dtype, torch.device)
Program = Callable[..., Sequence[torch.Tensor]]
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


def _codes_of(functions: Sequence[Any]) -> list[Any]:
    every = (f for f in functions if isinstance(f, FunctionType))
    return [(f, f.__code__, f.__defaults__) for f in every]


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
        self.codes: list[Any] = _codes_of(functions)
        self.closure: Closure | None = pure_closure(functions)
        self.known: dict[Any, Program | None] = {}  # None: it ran once, or cannot be recorded

    def are_possible(self) -> bool:
        """Return whether the rule is pure, as its code, globals and cells are now."""
        closure = self.closure
        for f, code, defaults in self.codes:
            if f.__code__ is not code or f.__defaults__ is not defaults:
                break
        else:
            if closure is None or closure.is_current():
                return closure is not None
        self.codes, self.closure = _codes_of(self.functions), pure_closure(self.functions)
        self.known.clear()
        return self.closure is not None

    def replay(self, fixed: Any, arrays: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Return the results for arrays by a recording; None if there is none.

        `fixed` holds all else that the run depends on. (The caller has switched torch's modes off.)
        """
        if not self.are_possible():
            return None
        program = self.known.get(_key(fixed, arrays))
        return None if program is None else program(*arrays)

    def run(self, pull: Any, fixed: Any, arrays: Sequence[torch.Tensor]) -> Sequence[Any] | None:
        """Return the gradients of a `Pull`, and record the run; None if it has been recorded.

        So do rules that cannot be recorded, which have to run on the general road.
        """
        with DisableTorchFunction():
            key = _key(fixed, arrays)
        if key in self.known or not self.are_possible():
            return None
        if len(self.known) >= KEPT:  # (shapes that never come again)
            self.known.clear()
        found, self.known[key] = _record(pull, arrays)
        return found


def _key(fixed: Any, arrays: Sequence[torch.Tensor]) -> Any:
    """Return all that a recording depends on, besides the code of the rule (`are_possible`).

    Nothing is missing: a pure rule computes from its arguments. `fixed` has the attributes, and
    which gradients are wanted. Of tensors a rule may read all but their values, which end the
    recording (`_RuleRegion`). regrad's functions look up the registry and the default dtype. What
    else functions of torch look at, such as strides, they look at again in the recording.
    """
    kinds = tuple([(x.shape, x.dtype, x.is_neg()) for x in arrays])
    return fixed, kinds, arrays[-1].device, get_default_dtype(), registry.version, len(registry.OPS)


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
    """Sees that a run is of ops of Tensors alone, all of which torch computes."""

    def __init__(self, xs: Sequence[Tensor]) -> None:
        super().__init__("a rule", xs)
        self.complete = True

    def did(
        self, op: Op, rule: Rule, xs: Sequence[Tensor], attrs: Any, y: Any,
        layout: tuple[Place, ...] | None = None,
    ) -> None:  # fmt: skip
        ys = y if isinstance(y, tuple) else (y,)
        self.complete &= all(type(each._data) is torch.Tensor for each in ys)

    def went(self, label: str, xs: Any, ys: Any, attrs: Any = None) -> None:
        self.complete = False

    def reach(self, source: Any, number: float) -> None:
        self.complete = False


def _storage(x: torch.Tensor) -> int:
    """Return the address of what a tensor stands on; 0 if it has none of its own kind."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else 0


class _Writer(TorchFunctionMode):
    """Writes down the functions of torch that run, as the lines of a function of these arrays."""

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.complete = True
        self.names: dict[int, str] = {id(x): f"x{n}" for n, x in enumerate(arrays)}
        self.inputs: str = ", ".join(self.names.values())
        self.alive: list[Any] = [arrays]  # (so that no id, and no storage, comes twice)
        self.own: set[int] = set()  # the storages of what the lines make, which they may write into
        self.values: dict[str, Any] = {}
        self.lines: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        options, given = kwargs or {}, [*tensors((args, kwargs))]
        with DisableTorchFunction():
            versions = [*map(version_of, given)]
            y = func(*args, **options)
            written = {
                _storage(x) for x, v in zip(given, versions, strict=True) if version_of(x) != v
            }
            self.complete &= written <= self.own
            self.own |= {*map(_storage, tensors((y,)))} - {0, *map(_storage, given)}
        parts = y if isinstance(y, tuple | list) else ()
        name = getattr(func, "__name__", "")
        name = getattr(func.__self__, "__name__", "") if name == "__get__" else name
        if {*map(type, parts or [y])} != {torch.Tensor}:
            self.complete &= name in _OF_KIND
        elif id(y) not in self.names or name != "to":  # (to its own dtype: x itself)
            texts = [*map(self._text, args), *(f"{k}={self._text(v)}" for k, v in options.items())]
            at = f"y{len(self.lines)}"
            self.lines.append(f"    {at} = {self._constant(func)}({', '.join(texts)})\n")
            self.names |= {id(y): at} | {id(z): f"{at}[{n}]" for n, z in enumerate(parts)}
            self.alive.append(y)
        return y

    def _text(self, value: Any) -> str:
        if id(value) in self.names and isinstance(value, torch.Tensor):
            return self.names[id(value)]
        if type(value) in (tuple, list):
            inner = "".join(f"{self._text(x)}, " for x in value)
            return f"({inner})" if type(value) is tuple else f"[{inner}]"
        self.complete &= isinstance(value, _FIXED)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.values)}"
        self.values[name] = value
        return name

    def program(self, ys: Sequence[torch.Tensor]) -> Program | None:
        """Return the function; None if there is more to the run than it does."""
        found = [self.names.get(id(y), "") for y in ys]
        if not self.complete or "" in found:
            return None  # (a constant is an answer, say)
        lines = [f"def program({self.inputs}):\n", *self.lines, f"    return {', '.join(found)},"]
        exec("".join(lines), self.values)
        return self.values["program"]


class _RuleRegion(Region):
    """The region of a rule that runs: its values may be read, which it then does each time."""

    def refuse_read(self, x: Tensor) -> None:
        self.capture.complete = False

    def array(self, value: Any) -> Tensor:
        self.capture.complete = False
        return super().array(value)


def _record(
    pull: Any, arrays: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor] | None, Program | None]:
    """Run a `Pull` on arrays; return the results, and a recording if possible."""
    arrays = [x.detach() for x in arrays]  # (one may be given twice)
    with _Writer(arrays) as writer:
        given = pull.as_regrad_sees(pull.in_one_dtype(arrays))
    if any(x.dtype is not given[-1].dtype for x in given):  # (regrad's functions would convert)
        return None, None
    region = _RuleRegion("a rule")
    xs = [region.make_stand_in(wrap(x)) for x in given]
    region.capture = recorder = _Recorder(xs)
    with writer:
        ys = run_inside(partial(results, pull.flat, xs, region), region, None)
        found = pull.fitting([to_torch(y, arrays[-1].device) for y in ys])
    return found, writer.program(found) if recorder.complete else None
