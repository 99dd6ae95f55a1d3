"""Rules written in regrad's functions, replayed as the functions of torch that they called.

A rule such as `lambda dy, x: rg.where(x > 0, dy, 0)` calls the same functions of torch each time,
for tensors of given shapes. The Python code of the rule, the promotion of dtypes and the checks of
the answer take several times as long as these functions. So regrad records a run, and later runs
execute only:

    def program(x0, x1):        # x, dy
        y0 = c0(x0, c1)         # torch.greater(x, 0)
        y1 = c2(y0, x1, c3)     # torch.where(…, dy, 0)
        return y1,

Invariants:

* regrad records only pure rules: code that reads and writes only its arguments, numbers, text and
  functions of the same kind (`pure_closure`). If a rule reads values, or reaches anything outside,
  regrad detects that during the run, and then runs the rule's Python code each time.
* A recording is a real run; regrad never runs a rule an extra time to record it.
* Everything else that a recording depends on is in its key: shapes, dtypes, devices, the default
  dtype, the registered op types.
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

KEPT = 64  # the number of recordings of a rule for one kind of call
_PLAIN = (bool, int, float, complex, str, type(None))
_SAFE = frozenset({
    "abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "float", "int",
    "isinstance", "len", "list", "max", "min", "pow", "range", "reversed", "round", "sorted", "str",
    "sum", "tuple", "type", "zip",
})  # fmt: skip
_UNSAFE = frozenset(dir(builtins)) - _SAFE
# Functions and attributes whose results do not depend on the values of tensors.
_OF_KIND = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "numel", "size", "dim",
    "__len__", "is_floating_point", "is_complex", "is_signed", "result_type", "is_neg",
})  # fmt: skip
_FIXED = (*_PLAIN, slice, type(...), torch.Tensor, torch.Size, torch.dtype, torch.device)
Program = Callable[..., Sequence[torch.Tensor]]
# Instructions that change something outside of the call, or import something.
_EFFECTS = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "DELETE_", "IMPORT_", "YIELD_", "SEND")


def pure_closure(functions: Sequence[Any]) -> Closure | None:
    """Return the closure of functions that only compute from their arguments; None otherwise."""
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
    """Return whether a backward pass has plain tensors, and no transformation observes it."""
    with DisableTorchFunction():
        return (
            all(type(dy) is torch.Tensor for dy in dys)
            and not (torch.is_grad_enabled() or is_traced() or is_transformed())
            and not is_autocast_open()
            and current() is None
        )


class Recordings:
    """The recordings of a rule's runs, by their keys."""

    def __init__(self, functions: Sequence[Any]) -> None:
        self.functions = functions
        self.codes: list[Any] = _codes_of(functions)
        self.closure: Closure | None = pure_closure(functions)
        self.known: dict[Any, Program | None] = {}  # None: the run cannot be replayed

    def are_possible(self) -> bool:
        """Return whether the rule is pure, given its current code, globals and cells."""
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
        """Return the results for arrays from a recording; None without a recording.

        `fixed` holds everything else that the run depends on. (The caller has disabled torch's
        modes.)
        """
        if not self.are_possible():
            return None
        program = self.known.get(_key(fixed, arrays))
        return None if program is None else program(*arrays)

    def run(self, pull: Any, fixed: Any, arrays: Sequence[torch.Tensor]) -> Sequence[Any] | None:
        """Run a `Pull` and record the run; return its gradients, or None if the key is known.

        Also return None for a rule that cannot be recorded, which has to run on the general path.
        """
        with DisableTorchFunction():
            key = _key(fixed, arrays)
        if key in self.known or not self.are_possible():
            return None
        if len(self.known) >= KEPT:  # (some shapes may never occur again)
            self.known.clear()
        found, self.known[key] = _record(pull, arrays)
        return found


def _key(fixed: Any, arrays: Sequence[torch.Tensor]) -> Any:
    """Return everything that a recording depends on, besides the rule's code (`are_possible`).

    The key is complete, because a pure rule computes from its arguments. `fixed` has the attributes
    and the wanted gradients. A rule may read everything of a tensor except its values; reading
    values ends the recording (`_RuleRegion`). regrad's functions look up the registry and the
    default dtype. Other properties that functions of torch read, such as strides, they read again
    when the recording runs.
    """
    kinds = tuple([(x.shape, x.dtype, x.is_neg()) for x in arrays])
    return fixed, kinds, arrays[-1].device, get_default_dtype(), registry.version, len(registry.OPS)


def exact(value: Any) -> Any:
    """Return a key that only identical values share: 1 and True have different keys.

    Raises:
        TypeError: The value is not plain.
    """
    kind = type(value)
    if kind is float:
        return value.hex()  # (distinguishes -0.0 from 0.0)
    if kind in (tuple, list, torch.Size):
        return kind, *map(exact, value)
    if kind is dict:
        return kind, *((name, exact(x)) for name, x in value.items())
    if kind not in (int, bool, str, type(None), torch.dtype):
        raise TypeError
    return kind, value


class _Recorder(Trail):
    """Checks that a run consists of ops on Tensors, all computed by torch."""

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
    """Return the address of a tensor's storage; 0 for a tensor that is not strided."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else 0


class _Writer(TorchFunctionMode):
    """Records the functions of torch that run, as lines of a function of these arrays."""

    def __init__(self, arrays: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.complete = True
        self.names: dict[int, str] = {id(x): f"x{n}" for n, x in enumerate(arrays)}
        self.inputs: str = ", ".join(self.names.values())
        self.alive: list[Any] = [arrays]  # (references, so that no id or storage occurs twice)
        self.own: set[int] = set()  # storages that the lines allocate, and may write into
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
        elif id(y) not in self.names or name != "to":  # (`to` the same dtype returns x itself)
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
        """Return the recorded function; None if it does not reproduce the whole run."""
        found = [self.names.get(id(y), "") for y in ys]
        if not self.complete or "" in found:
            return None  # (for example, if an answer is a constant)
        lines = [f"def program({self.inputs}):\n", *self.lines, f"    return {', '.join(found)},"]
        exec("".join(lines), self.values)
        return self.values["program"]


class _RuleRegion(Region):
    """The region of a running rule. Reading a value prevents the recording."""

    def refuse_read(self, x: Tensor) -> None:
        self.capture.complete = False

    def array(self, value: Any) -> Tensor:
        self.capture.complete = False
        return super().array(value)


def _record(
    pull: Any, arrays: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor] | None, Program | None]:
    """Run a `Pull` on arrays; return the results, and a recording if possible."""
    arrays = [x.detach() for x in arrays]  # (the same tensor may occur twice)
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
