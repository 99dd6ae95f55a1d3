"""Modes, which torch calls before each of its functions in a scope, and how a function then runs.

torch has a protocol, `TorchFunctionMode`. torch calls an open mode instead of each function of its
Python API. A scope of `gradient_override_map` opens one mode. In

    with gradient_override_map({"Relu": guided}):
        y = model(x)                # calls F.linear(x, w, b), then F.relu(h)

torch calls the mode for `F.linear` and `F.relu`. The rules alone determine how a function runs.
This file makes the decision: `DispatchTable` creates one row for each function, at its first call.

* A function with a rule runs in an `autograd.Function` of regrad (`rulesets`, `call_cache`,
  `calls`).
* A function may compute an overridden op among others (`F.cross_entropy` computes a log-softmax).
  regrad decomposes it into functions that have rules (`apart`, `composites`), or traces into it
  (`host.bodies`): then regrad runs torch's own Python code of it with the mode still open.
* A function that runs no overridden op runs unchanged. `below.types_run_by` is the table of the op
  types that functions of torch run. regrad checks the kind of the result's autograd node. It
  compares a new kind with the overridden op types (`nodes`). If one matches, the table is wrong,
  and the call raises.
* The table has no entry for some functions, and for others the entry names an overridden op. These
  functions run unchanged too, and regrad checks each node that they create.
* The gradient of a function may come from elsewhere than autograd (a custom op, a third-party
  `autograd.Function`). regrad watches such a function where torch dispatches ops (`enclosing`).

Invariants:

* A function of torch that computes an overridden op either runs under the rule or raises.
* A mode serves the scope that opened it, in the task that opened it. Threads have separate stacks
  of modes, but the tasks of a thread share a stack, so each call checks whose mode it is.
* Nothing here depends on values, so torch.compile can trace it. torch.compile cannot create rows
  while it traces. So `DispatchTable.prepare` first creates all rows that it may need
  (`_run_traced`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.overrides
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from regrad.core.callers import find_caller
from regrad.torch.below import called_by, types_run_by
from regrad.torch.bridge import allow_in_graph, is_differentiable
from regrad.torch.composites import fitting, fused
from regrad.torch.enclosing import call_within, find_gradient_owner, is_left
from regrad.torch.host import (
    DisableTorchFunction,
    current_pass,
    is_torch_function_enabled,
    number_of,
    pop_mode,
    push_mode,
    sequence_nr,
)
from regrad.torch.host.dynamo import traced_body
from regrad.torch.host.running import Operator, Overload, body_of, in_program
from regrad.torch.nodes import LIBRARIES, Watch, describe, is_returned, tensors
from regrad.torch.open_scopes import SCOPES
from regrad.torch.optypes import families, spellings
from regrad.torch.places import path_here
from regrad.torch.replacing import find_hidden
from regrad.torch.subclasses import has_own_protocol

if TYPE_CHECKING:
    from regrad.torch.apart import Rules

Getter: type = type(torch.Tensor.shape.__get__)  # pyright: ignore
_PLAIN = (torch.Tensor,)
_SEQUENCES = {tuple, list, *[v for v in vars(torch.return_types).values() if type(v) is type]}
_NO_TENSORS = {torch.Size, int, bool, float, type(None), torch.dtype, torch.device}
BACKWARD = (torch.Tensor.backward,)  # runs gradients, and no ops of the user's program

# Op types that jump, and functions by which programs compute jumps without an autograd node.
STEPS = ("Step", "Sign", "Round")
_JUMPS = "gt ge lt le eq ne greater greater_equal less less_equal bool int long to type type_as"
JUMPS = frozenset(
    f"{_JUMPS} __gt__ __ge__ __lt__ __le__ __eq__ __ne__ byte char short not_equal".split()
)

# Methods that torch implements in Python, in a wrapper or with `super()`. torch.compile does not
# trace into them, and cannot look them up in a dict. So regrad compares each by identity. (The
# functions receive whether there is a rule for RealDiv, and the arguments.)
METHODS: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (torch.Tensor.__rsub__, lambda _, x, a: torch.rsub(x, a)),
    (
        torch.Tensor.__rtruediv__,
        lambda divides, x, a: (
            torch.div(torch.full_like(x, a), x) if divides else x.reciprocal() * a
        ),
    ),
    (torch.Tensor.__pow__, lambda _, x, a: torch.pow(x, a)),
    (torch.Tensor.__rpow__, lambda _, x, a: torch.pow(a, x)),
    (torch.Tensor.__ipow__, lambda _, x, a: x.pow_(a)),
    (torch.Tensor.__rmod__, lambda _, x, a: torch.remainder(a, x)),
    (torch.Tensor.__rmatmul__, lambda _, x, a: torch.matmul(a, x)),
    (torch.Tensor.__floordiv__, lambda _, x, a: torch.floor_divide(x, a)),
    (torch.Tensor.__rfloordiv__, lambda _, x, a: torch.floor_divide(a, x)),
    (torch.Tensor.unflatten, lambda _, x, dim, sizes: torch.unflatten(x, dim, sizes)),
)


class Row:
    """The decisions about one torch function under a set of rules.

    Args:
        parts: The functions that replace it, each with a condition on the arguments (None: always).
        calls: Its calls under a rule for this function; None without a rule.
        body: Torch's own Python code of the function, which runs with the mode open.

    `way` runs a call. The first call determines it. It is None for a function that runs no
    overridden op and therefore runs unchanged. (torch.compile reads `parts`, `call`, and `traced`,
    which is the body in the form that it traces.)
    `kinds` holds the kinds of nodes that results of the function have had, none of an overridden
    op type. regrad checks a result with a node of another kind. `shown` is the name of the function
    in reports, without a line and a path.
    """

    def __init__(self, parts: Sequence[tuple[Any, Any]], calls: Any, body: Any) -> None:
        self.parts: Sequence[tuple[Any, Any]] = parts
        self.calls: Any = calls
        self.call: Any = calls and calls.call
        self.body: Any = body
        self.traced: Any = None
        self.way: Way | None = _decide
        self.kinds: set[type] = set()
        self.shown: tuple[str, str, str] = ("", "", "")


class Mode(torch.overrides.TorchFunctionMode):
    """The mode of one scope, which torch calls before each of its functions."""

    ruleset: Rules
    rows: DispatchTable | WatchedTable
    # The rows that torch.compile may need (see `DispatchTable.prepare`). None until torch.compile
    # first runs under these rules.
    traced: Mapping[Any, Row] | None = None
    watch: Watch
    learned: Mapping[str, Any]  # the parameters of rules here and in outer scopes, for programs
    divides: bool  # whether this scope or an outer scope has a rule for RealDiv
    passes: int = 0  # the number of running backward passes
    around_backward: Any = None  # reopens the scopes in which a backward pass began
    methods: Any = METHODS  # (an attribute, so that Dynamo drops the guards: see `drop_guards`)

    def __init__(self, scope: Any) -> None:
        # (does not call the base class, whose __init__ does nothing, to save time)
        self.scope = scope
        if scope is not None:
            self.root: Any = scope._root
            self.counts: dict[tuple[str, str, str], int] = scope._untouched.counts
            if scope._watch:
                self.rows = self.ruleset.watched

    @property
    def is_closed(self) -> bool:
        """Return whether the scope has closed."""
        return self.scope is None or self.scope._root._mode is None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # (This code runs for each function of torch in a scope, so it makes few calls.)
        if self.traced is not None and is_dynamo_compiling():
            return self._run_traced(func, args, kwargs or {})
        if self.passes and in_program():
            return func(*args, **kwargs or {})  # (a compiled program contains its rules)
        if self.scope not in SCOPES.get():
            return self._run_elsewhere(func, args, kwargs or {})
        # A subclass of Tensor with its own protocol defines the meaning of its functions. It calls
        # torch again on plain tensors, and for these calls the mode must still be open.
        if types and types != _PLAIN and is_torch_function_enabled():
            for kind in filter(has_own_protocol, types):  # (runs the function, and calls the mode)
                with self:
                    return kind.__torch_function__(func, types, args, kwargs or {})
        row = self.rows[func]
        if row.way is not None:
            return row.way(self, func, args, kwargs or {})
        y = func(*args, **kwargs) if kwargs else func(*args)
        made = False
        for each in y if type(y) in _SEQUENCES else (y,):
            if type(each) is Tensor:
                node = each.grad_fn
                if node is None:
                    continue
                if type(node) in row.kinds:
                    made = True
                    continue
            elif type(each) in _NO_TENSORS:
                continue
            made = self._look(row, func, args, kwargs or {}, y)
            break
        if made:
            self.counts[row.shown] += 1
        return y

    def _run_elsewhere(
        self, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """Run a function of another task in this thread, or of a thread of the autograd engine."""
        if self.passes and not SCOPES.get() and current_pass() >= 0:
            with self.around_backward():
                return func(*args, **options)
        return func(*args, **options)

    def _look(
        self, row: Row, func: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any
    ) -> bool:
        """Check the results of a function that runs unchanged for nodes of a new kind.

        Return whether the call created any nodes.

        Raises:
            PassedOverError: The table is wrong, and the function has run an overridden op.
        """
        made = False
        with DisableTorchFunction():
            for y in tensors((result,)):
                node = y.grad_fn
                if node is None:
                    continue
                if type(node) not in row.kinds:
                    if is_returned(y, func, args, options):
                        continue
                    if not self.watch.check(func, node):
                        row.kinds.add(type(node))
                        row.shown = describe(func, [node]), "", ""
                made = True
        return made

    def note(self, shown: str, above: int) -> None:
        """Count a call that kept its gradient; with line and module if the scope watches."""
        scope = self.scope
        if scope._watch:
            path = "" if scope._modules is None else path_here(scope)
            self.counts[shown, find_caller(LIBRARIES, above + 1), path] += 1
        else:
            self.counts[shown, "", ""] += 1

    def _run_traced(
        self, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """Run a function while torch.compile traces; `compiled_code` checks the nodes."""
        if type(func) is FunctionType:  # (each comparison takes time)
            for method, run in self.methods:
                if func is method:
                    with self:
                        return run(self.divides, *args, **options)
        if func not in self.traced:  # pyright: ignore[reportOperatorIssue] (not None here)
            return func(*args, **options)
        row = self.traced[func]  # pyright: ignore[reportOptionalSubscript]
        for when, parts in row.parts:
            if when is None or when(*args, **options):
                if parts.refused:  # (`compiled_code` raises for the call)
                    return func(*args, **options)
                return parts(*args, **options, **self.learned)
        if row.call is not None:
            return row.call(*args, **options, **self.learned)
        if row.traced is None:
            return func(*args, **options)
        with self:
            return row.traced(*args, **options)

    def refuse_fused(
        self, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        """Raise for a call that regrad would have to decompose and cannot."""
        parts = fitting(self.rows[func].parts, args, options)
        if parts is not None and parts.refused:
            parts(*args, **options)


_USUAL = {Tensor, torch.nn.Parameter, type(None)}


def call_mode(old: Callable[..., Any]) -> Callable[..., Any]:
    """Return `handle_torch_function`, which functions that torch implements in Python call first.

    If the innermost mode is regrad's and no argument is of a subclass, the function calls the mode
    directly. This skips torch's Python code, which takes longer than everything else in a scope.
    """

    @wraps(old)
    def handle_torch_function(
        public_api: Any, relevant_args: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        try:
            mode = pop_mode()
        except RuntimeError:  # there is no mode
            return old(public_api, relevant_args, *args, **kwargs)
        try:
            if Mode in type(mode).__mro__:
                for x in relevant_args:
                    if type(x) not in _USUAL:
                        break
                else:
                    return mode.__torch_function__(public_api, (), args, kwargs)
        finally:
            push_mode(mode)
        return old(public_api, relevant_args, *args, **kwargs)

    return handle_torch_function


# A way to run a torch function in a scope, outside of torch.compile.
Way = Callable[[Mode, Any, Sequence[Any], Any], Any]


class DispatchTable(dict[Any, Row]):
    """The row of each torch function under a set of rules, created at the first call."""

    def __init__(self, ruleset: Rules) -> None:
        super().__init__()
        self.ruleset: Rules = ruleset

    def __missing__(self, func: Callable[..., Any]) -> Row:
        rules = self.ruleset
        row = Row(rules.parts_of(func), rules.calls_of(func), rules.coverage.bodies.get(func))
        return self.setdefault(func, row)  # (another thread may have created it)

    def way_of(self, func: Callable[..., Any], row: Row) -> Way | None:
        """Return the way to run a function; None if it runs unchanged."""
        if type(func) is Getter and not row.parts:  # x.shape, x.grad
            return _run_as_is
        way = row.calls or self._way(func, row.body)
        return _way_by_parts(row.parts, way or _run_watched) if row.parts else way

    def prepare(self) -> None:
        """Create the rows that torch.compile may need, since it cannot run this code in a trace.

        A compiled program calls the functions in the rows directly.
        """
        mode, covered = self.ruleset.mode, self.ruleset.coverage
        if mode.traced is not None:
            return
        asked = (f for f in covered.fused if not isinstance(f, Operator))
        rows = {f: self[f] for f in (*asked, *covered.spelled, *covered.bodies)}
        for func, call in self.ruleset.calls_of_functions().items():
            rows[func] = Row((), None, None)
            rows[func].call = call
        for func, row in rows.items():
            for run in (row.call, *[run for _, run in row.parts]):
                if run is not None:
                    allow_in_graph(run)
            row.traced = row.body and traced_body(func)
        learned = self.ruleset.learned
        mode.learned = {"learned": learned} if learned else {}
        mode.divides = any("RealDiv" in each.rules for each in self.ruleset.chain())
        mode.traced = {f: r for f, r in rows.items() if r.parts or r.call or r.traced}

    def _way(self, func: Callable[..., Any], body: Any) -> Way | None:
        """Return the way to run a function that has no rule."""
        rules = self.ruleset
        if func in rules.keep:
            return _run_as_is
        way: Way | None = None
        if self._may_concern(func):
            if body is not None:
                return _run_body
            decided = isinstance(func, Overload) or body_of(func) or func in rules.coverage.left
            way = _run_decided if decided else _run_watched
            if rules.values and func not in rules.coverage.left and func not in BACKWARD:
                way = partial(_run_for_its_value, way)
        elif body is not None or (func in fused() and func not in spellings()):
            way = _run_first
        if getattr(func, "__name__", "") in JUMPS and not rules.rules.keys().isdisjoint(STEPS):
            return partial(_run_noted, _watched(way, body))
        return way

    def _may_concern(self, func: Callable[..., Any]) -> bool:
        """Return whether a rule may apply to an op inside a function."""
        rules, types = self.ruleset, types_run_by(func)
        if types is None or not types.isdisjoint(rules.rules) or func in rules.coverage.left:
            return True
        if not rules.values <= families().keys():  # (callables, which C++ functions may run)
            return True
        if not isinstance(func, FunctionType):
            return False
        return not rules.coverage.spelled.keys().isdisjoint(called_by(func) or ())


class WatchedTable(dict[Any, Row]):
    """The rows for scopes with `watch=True`, whose reports show lines and modules."""

    def __init__(self, rows: DispatchTable) -> None:
        super().__init__()
        self.rows: DispatchTable = rows

    def __missing__(self, func: Callable[..., Any]) -> Row:
        row = copy(self.rows[func])
        row.way = _decide
        return self.setdefault(func, row)

    def way_of(self, func: Callable[..., Any], row: Row) -> Way:
        """Return the way to run a function, which is watched even without an overridden op."""
        return _watched(self.rows.way_of(func, row), row.body)


def _watched(way: Way | None, body: Any) -> Way:
    """Return a way to run a function that notes each call which keeps its gradient."""
    if way in (None, _run_first):
        return _run_watched if body is None else _run_body
    return way


def _decide(mode: Mode, func: Callable[..., Any], args: Sequence[Any], options: Any) -> Any:
    row = mode.rows[func]
    row.way = mode.rows.way_of(func, row)
    return mode.__torch_function__(func, (), args, options)


def _run_as_is(
    mode: Mode, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    return func(*args, **options)


def _way_by_parts(rows: Sequence[tuple[Any, Any]], otherwise: Way) -> Way:
    """Return the way to run a function that decomposes, at least for some arguments."""

    def way(
        mode: Mode, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        parts = fitting(rows, args, options)
        return parts(*args, **options) if parts else otherwise(mode, func, args, options)

    return way


def _run_body(
    mode: Mode, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    with mode:
        return mode.rows[func].body(*args, **options)


def _run_first(
    mode: Mode, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run a function that may run several ops; if it runs one op, later calls run unchanged.

    (If a function that torch implements in Python runs several functions, reports list each.)
    """
    if not is_grad_enabled():
        return func(*args, **options)
    before = dict(mode.counts)
    row = mode.rows[func]
    y = _watched(None, row.body)(mode, func, args, options)
    new = [(key, n - before.get(key, 0)) for key, n in mode.counts.items() if n != before.get(key)]
    if len(new) == 1 and new[0][1] == 1 and type(y) is Tensor and y.grad_fn is not None:
        row.shown = new[0][0]
        row.kinds.add(type(y.grad_fn))
        row.way = None
    return y


def _run_watched(
    mode: Mode, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run a function that may run an overridden op, and check the nodes that autograd recorded."""
    if not is_grad_enabled():
        # (the function may run inside any Function, whose backward pass decides)
        return _run_decided(mode, func, args, options)
    start = sequence_nr()
    result = func(*args, **options)
    made = sequence_nr() - start
    if made:
        watch = mode.watch
        if made == 1 and type(result) is Tensor:
            node = result.grad_fn  # (most calls create one node, whose kind is sufficient)
            if node is not None and number_of(node) == start:
                shown = watch.harmless.get((func, type(node)))
                if shown is not None:
                    mode.note(shown, 2)
                    return result
        watch.look(func, start, result, mode.note)
    return result


def _run_for_its_value(
    way: Way, mode: Mode, func: Callable[..., Any], args: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Run a function without a rule in a scope that replaces values of ops, and check its ops."""
    if is_left(mode.ruleset.keep):
        return way(mode, func, args, options)
    return find_hidden(func, partial(way, mode, func, args, options), mode.ruleset.values)


def _run_noted(way: Way, mode: Mode, func: Any, args: Sequence[Any], options: Any) -> Any:
    """Run a function that may jump without a gradient, and note the line if it does."""
    y = way(mode, func, args, options)
    with DisableTorchFunction():
        moves = any(x.requires_grad for x in tensors((args, options)))
        if moves and not any(map(is_differentiable, tensors((y,)))):
            mode.scope._root._jumps.setdefault(find_caller(LIBRARIES), func.__name__.strip("_"))
    return y


def _run_decided(
    mode: Mode, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Run a function whose gradient may come from elsewhere than autograd."""
    ruleset, start = mode.ruleset, sequence_nr()
    if (decider := find_gradient_owner(func, ruleset.keep)) is None:
        result = func(*args, **options)
    else:
        result = call_within(decider, ruleset.rules, func, args, options)
    if sequence_nr() != start and func not in ruleset.coverage.left:
        mode.watch.look(func, start, result, mode.note)
    return result
