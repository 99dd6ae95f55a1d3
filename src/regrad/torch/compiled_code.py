"""Code that torch.compile captures: watched during tracing, checked before a backend compiles it.

torch.compile calls the modes of open scopes while it traces, so the graphs contain the rules. In
eager mode, regrad finds some ops only in autograd's record after a call. In compiled code, regrad
finds them here: torch.compile runs each node of a graph once on fake tensors, under autograd, and
regrad watches that run like any other.

While a scope is open, the functions here replace functions of Dynamo (`MAKERS`). In order of time:

    begin                 Dynamo begins a graph: the open modes prepare their rows
    dispatch              Dynamo reaches a higher-order operator: it traces the bodies under modes
    call_apply            Dynamo reaches `apply` of a third-party Function (stored in `APPLIED`)
    trace_forward         Dynamo traces the Function's forward pass without regrad's modes
                          (`FORWARD`); before torch 2.11 `speculate` does this
    run_node              Dynamo runs a node on fake tensors. There are four cases:
        regrad's            it calls a rule: its `Place` collects the hits
        in a forward pass   it must not compute an overridden op
        undispatched        torch called no mode for it: parts that have rules replace it
        any other           regrad checks the nodes of autograd that it created (`_look`)
    call_module           Dynamo calls a module: the scopes take their state at that place; the
                          whole call of some modules with a rule is one node (`as_node`)
    call_user_compiler    the graph is complete: regrad raises errors and counts hits (`settle`)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial, update_wrapper
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.overrides

from regrad.core.blocks import block
from regrad.core.callers import find_caller
from regrad.core.hosts import is_checking
from regrad.core.reports import Hit, Untouched
from regrad.errors import HostError, PassedOverError, RegradError
from regrad.torch.below import Below, join_types
from regrad.torch.composites import fused, is_other_op
from regrad.torch.enclosing import hidden_error, listing, refuse_to_be_written
from regrad.torch.host import COMPILING, DisableTorchFunction, dynamo, replacing, sequence_nr
from regrad.torch.host.running import Operator, Overload, Packet, custom_op
from regrad.torch.nodes import LIBRARIES, name_of, tensors
from regrad.torch.open_scopes import SCOPES, inside, scope_of
from regrad.torch.parameters import with_copies
from regrad.torch.places import Spot, has_own_call, path_here
from regrad.torch.replacing import refuse_hidden
from regrad.torch.whole_calls import as_node

_SEEN = "seen by regrad"  # a key in the meta of a node


class Place:
    """The origin of a graph's node in the program, and the hits that count it.

    Dynamo may run a graph several times before it compiles it. The node counts once, when it is
    certain to be part of a program.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.spot: tuple[Any, ...] = SCOPES.get()
        self.met: list[tuple[Hit, Any]] = []
        self.hits: dict[str, Hit] = {}  # by op type
        self.notes: list[tuple[Any, Untouched]] = []  # by scope: comparisons without a cast so far
        self.has_run = False
        self.error: PassedOverError | None = None

    def meets(self, hit: Hit, shape: tuple[int, ...]) -> None:
        """Record that the node runs an op under a rule."""
        if not self.has_run:
            self.met.append((hit, shape))
            self.hits[hit.op_type] = hit

    def count(self) -> None:
        """Count the hits, since the node is part of a program."""
        while self.met:
            hit, shape = self.met.pop()
            hit.add(shape)


@block
def at_place(place: Place, learned: Mapping[int, Any]) -> Generator[None]:
    """Run a node of this place in a block, with the parameters of rules."""
    try:
        with inside(place=place, learned=learned):
            yield
    finally:
        place.has_run = True


def place_call(function: Callable[..., Any], place: Place) -> Callable[..., Any]:
    """Return the function under a rule that a node calls, created for this node alone."""

    names: Any = [*map(id, getattr(function, "ruleset").learned)]  # noqa: B009 (see `is_ours`)

    def at_its_place(*args: Any, learned: Sequence[Any] = (), **options: Any) -> Any:
        with at_place(place, dict(zip(names, learned, strict=False))):
            return function(*args, **options)

    made = update_wrapper(at_its_place, function)
    made.__dict__["place"] = place
    return made


APPLIED: ContextVar[Any] = ContextVar("regrad_applied", default=None)  # a Function
FORWARD: ContextVar[Any] = ContextVar("regrad_forward", default=None)  # one traced forward
LISTED: ContextVar[Any] = ContextVar("regrad_listed", default=None)  # scopes that must list it
DONE: ContextVar[bool] = ContextVar("regrad_forward_done", default=False)  # already traced


# -- while torch.compile traces -------------------------------------------------------------------


def begin(old: Callable[..., Any], self: Any, *args: Any, **options: Any) -> None:
    """Begin a trace, and prepare the rows of the modes that are active in it."""
    old(self, *args, **options)
    if SCOPES.get():
        _refuse_unchecked()
    for mode in dynamo.modes_of(self):
        if hasattr(mode, "ruleset"):
            mode.ruleset.rows.prepare()


def _refuse_unchecked() -> None:
    """Raise on a version of torch for which regrad has not yet tested torch.compile.

    (The test programs cannot run here, because Dynamo is tracing another program.)
    """
    host = COMPILING.host
    if not (host.is_tested or COMPILING.checked or is_checking()):
        raise dynamo.through_dynamo(
            HostError(
                f"PyTorch {host.version} is newer than the versions that regrad was tested with "
                f"({host.range()}), and regrad first met torch.compile during a trace. Exit the "
                "scope and enter it again: regrad will then compile a few programs, to verify that "
                "rules still fire."
            )
        )


def run_node(
    old: Callable[..., Any], tracer: Any, node: Any, args: Sequence[Any],
    options: Mapping[str, Any], module: Any,
) -> Any:  # fmt: skip
    """Run a node for torch.compile, and watch the run."""
    run = partial(old, tracer, node, args, options, module)
    if not SCOPES.get():
        return run()
    if is_ours(node.target):
        if not hasattr(node.target, "place"):
            node.target = place_call(node.target, Place(line_of(node)))
        return run()
    if (function := FORWARD.get()) is not None:
        return _in_forward(function, node, run)
    if (parts := _undispatched(node, args, options)) is not None:
        node.target = place_call(parts, Place(line_of(node)))
        return run()
    start = sequence_nr()
    values = any(scope._ruleset.values for scope in SCOPES.get())
    with Below() if values or _is_untraced(node.target) else nullcontext() as below:
        result = run()
    if values and _is_call(node):
        node.meta[_SEEN] = _look_for_values(node, below)
        if node.meta[_SEEN]:
            return result
    if _is_watched(node):
        node.meta[_SEEN] = _look(start, node, args, options, result)
        if (
            _is_untraced(node.target)
            and below is not None
            and any(y.requires_grad for y in tensors((result,)))
        ):
            node.meta[_SEEN] += _hidden(node.target, below.types, _untraced_error)
    return result


def _undispatched(node: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return the parts of a function that torch.compile put into its program without calling modes.

    torch.compile does so for an `nn.CrossEntropyLoss()` created in the compiled function.
    """
    values = any(scope._ruleset.values for scope in SCOPES.get())
    if node.op != "call_function" or not (values or torch.is_grad_enabled()):
        return None
    row = (SCOPES.get()[-1]._mode.traced or {}).get(node.target)
    fit = (
        parts
        for when, parts in (row.parts if row else ())
        if when is None or when(*args, **options)
    )
    return next((parts for parts in fit if not parts.refused), None)


def is_ours(target: object) -> bool:
    """Return whether a node calls a torch function under a rule."""
    return hasattr(target, "ruleset")


def _is_watched(node: torch.fx.Node) -> bool:
    return torch.is_grad_enabled() and _is_call(node)


def _is_call(node: torch.fx.Node) -> bool:
    """Return whether a node is one op, and not a region whose nodes Dynamo traced."""
    calls = node.op in ("call_function", "call_method", "call_module")
    is_whole = node.target in fused() or not any(dynamo.bodies(node))  # (flex_attention is both)
    return calls and is_whole


def _by_scope(node: Any, look: Callable[[Any, Any], Any]) -> list[tuple[Any, Any]]:
    """Return, for each scope that does not keep the function, an error or a note for a node.

    `look(scope, function)` raises the error, or returns the note or None.
    """
    function = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
    found: list[tuple[Any, Any]] = []
    for scope in SCOPES.get():
        try:
            note = None if function in scope._ruleset.coverage.left else look(scope, function)
        except PassedOverError as error:
            note = error
        found += [] if note is None else [(scope, note)]
    return found


def _look_for_values(node: Any, below: Any) -> list[tuple[Any, Any]]:
    """Return, for each scope, an error for a node that ran ops whose values the scope replaces."""
    return _by_scope(node, lambda scope, f: refuse_hidden(f, below, scope._ruleset.values))


def _look(
    start: int, node: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any
) -> list[tuple[Any, Any]]:
    """Return, for each scope, an error for the node or a note of the ops that keep their own."""

    def look(scope: Any, function: Any) -> Untouched:
        ruleset, note = scope._ruleset, Untouched()
        line, path = (line_of(node), path_here(scope)) if scope._watch else ("", "")
        _refuse_undispatched(ruleset, function, args, options, result)
        scope._mode.refuse_fused(function, args, options)
        note_it = lambda shown, _: note.note(shown, line, path=path)  # noqa: E731
        ruleset.coverage.watch.look(function, start, result, note_it)
        return note

    return _by_scope(node, look)


def _refuse_undispatched(
    ruleset: Any, function: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any
) -> None:
    """Raise for a node of a function that has a rule, which the mode would have applied."""
    spelling = ruleset.coverage.spelled.get(function)
    if spelling is None or not any(y.requires_grad for y in tensors((result,))):
        return
    if not is_other_op(spelling.family.type, args, options):
        raise PassedOverError(
            f"torch.compile put {name_of(function)}, which is overridden, into its program without "
            "calling the override, so it would keep its own gradient. Call the model without "
            "torch.compile."
        )


def call_apply(
    old: Callable[..., Any], self: Any, tx: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Record which Function's forward pass Dynamo traces; with a rule, the call is one node."""
    function = dynamo.function_class(self)
    scopes = SCOPES.get()
    row = (scopes[-1]._mode.traced or {}).get(function) if scopes else None
    if row is not None:
        mode = next(filter(_is_scope, reversed(dynamo.modes(tx))))
        return dynamo.call_under(tx, _run_ruled, mode, row.call, args, options)
    token, done = APPLIED.set(function), DONE.set(False)
    listed = LISTED.set(listing(function, SCOPES.get()))
    try:
        return old(self, tx, args, options)
    finally:
        APPLIED.reset(token)
        DONE.reset(done)
        LISTED.reset(listed)


def _run_ruled(mode: Any, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a Function under its rule (torch.compile traces this)."""
    return call(*args, **options, **mode.learned)


def trace_forward(old: Callable[..., Any], self: Any, tx: Any, *args: Any, **options: Any) -> Any:
    """Trace the forward pass of a third-party Function without modes; its backward pass applies."""
    return _trace_without_modes(tx, lambda: old(self, tx, *args, **options))


def speculate(old: Callable[..., Any], tx: Any, *args: Any, **options: Any) -> Any:
    """Trace a region; if it is the forward pass of a Function, as `trace_forward` does.

    The forward pass is the first region of a Function, and the backward pass is the second.
    """
    if "autograd.Function" not in (options.get("description"), *args[3:4]) or DONE.get():
        return old(tx, *args, **options)
    DONE.set(True)
    return _trace_without_modes(tx, lambda: old(tx, *args, **options))


def _trace_without_modes(tx: Any, trace: Callable[[], Any]) -> Any:
    stack = dynamo.modes(tx)
    before, token = list(stack), FORWARD.set(APPLIED.get())
    for mode in before:
        if _is_scope(mode):
            stack.remove(mode)
    try:
        return trace()
    finally:
        FORWARD.reset(token)
        stack.clear()
        stack.extend(before)


def _in_forward(function: Callable[..., Any], node: torch.fx.Node, run: Callable[[], Any]) -> Any:
    """Run a node of a Function's forward pass, which must not compute an overridden op."""
    with Below() as below:
        result = run()
    node.meta[_SEEN] = _hidden(function, below.types, hidden_error)
    while LISTED.get():  # (the first node lists the Function)
        scope, name = LISTED.get().popitem()
        note = Untouched()
        note.note(name, line_of(node), path=path_here(scope))
        node.meta[_SEEN].append((scope, note))
    return result


def _hidden(
    function: Callable[..., Any], ran: set[str], error: Callable[..., PassedOverError]
) -> list[tuple[Any, Any]]:
    """Return, for each scope, an error for a node that ran ops of these overridden types."""
    hit = ((scope, ran & scope._ruleset.rules.keys()) for scope in SCOPES.get())
    return [
        (scope, error(function, types))
        for scope, types in hit
        if types and function not in scope._ruleset.keep
    ]


def _untraced_error(function: Any, types: set[str]) -> PassedOverError:
    """Return the error for an overridden op in Python code that torch.compile does not trace."""
    name = getattr(function, "__qualname__", repr(function))
    return PassedOverError(
        f"{' and '.join(sorted(types))} ran in {name}, which torch.compile does not trace into "
        f"(see allow_in_graph), so the rule for {join_types(types)} might never run. Let "
        f"torch.compile trace it, or pass keep=[{name}] to leave it as it is."
    )


_LINE = re.compile(r'File "(.+?)", line (\d+)')


def line_of(node: torch.fx.Node) -> str:
    """Return the line of the user's program that a node of a graph comes from."""
    lines = _LINE.findall(node.stack_trace or "")
    own = [line for line in lines if not line[0].startswith(LIBRARIES)]
    return ":".join(own[-1]) if own else find_caller(LIBRARIES)


def dispatch(old: Any, tx: Any, fn: Any, args: Any, options: Any) -> Any:
    """Trace the bodies of higher-order operators under the modes of the open scopes.

    torch.compile calls a mode for the operator as a whole, and pops the mode meanwhile. regrad
    traces a region that torch would compile once for all calls inline at each call, because torch
    cannot distinguish the modes of two calls.
    """
    operator = getattr(fn, "value", None)
    known = is_operator(operator) and dynamo.can_trace_operator(fn)
    if not known or not any(map(_is_scope, dynamo.modes(tx))):
        return old(tx, fn, args, options)
    if operator is torch.ops.higher_order.invoke_subgraph:
        return dynamo.trace_call(args[0], tx, list(args[1:]), options)
    return dynamo.trace_operator(fn)(tx, args, options)


def is_operator(function: object) -> bool:
    """Return whether a function is a higher-order operator, for which torch calls no mode."""
    return isinstance(function, Operator)


def _is_scope(mode: Any) -> bool:
    """Return whether a variable of Dynamo represents a mode of regrad."""
    return hasattr(dynamo.value_of(mode), "ruleset")


# -- when a backend gets the graph ----------------------------------------------------------------


def call_user_compiler(
    old: Callable[..., Any], self: Any, graph: torch.fx.GraphModule, *args: Any, **options: Any
) -> Any:
    """Check a graph before a backend compiles it; wrap the program to report to the scopes."""
    if not SCOPES.get():
        return old(self, graph, *args, **options)
    if COMPILING.losses:
        raise dynamo.through_dynamo(COMPILING.error())
    types = settle(graph)
    # (the class of the mode identifies the rules, so the guards on it are not needed)
    dynamo.drop_guards(self, lambda mode: hasattr(mode, "ruleset"))
    try:
        program = old(self, graph, *args, **options)
    except Exception as error:  # an invalid rule runs here for the first time
        inner = getattr(error, "inner_exception", None)
        if not isinstance(inner, RegradError):
            raise
        raise dynamo.through_dynamo(inner) from inner
    return report_to_scopes(program, types, _ran_in(self), any(map(_may_hide, nodes(graph))))


def settle(graph: torch.fx.GraphModule) -> dict[Any, set[str]]:
    """Raise for overrides that torch would skip; count the others and return their op types."""
    types: dict[Any, set[str]] = {}
    for node in nodes(graph):
        if is_ours(node.target):
            if not hasattr(node.target, "place"):
                raise dynamo.through_dynamo(COMPILING.lose("Dynamo runs nodes elsewhere"))
            if node.target.place.error is not None:
                raise dynamo.through_dynamo(node.target.place.error)
            node.target.place.count()
            for scope, note in node.target.place.notes:
                scope._untouched.add(note)
            ran = node.target.op_types | node.target.place.hits.keys()
            for each in node.target.ruleset.chain():
                types.setdefault(each, set()).update(ran & each.reported)
        for scope, found in node.meta.get(_SEEN, ()):
            if isinstance(found, PassedOverError):
                raise dynamo.through_dynamo(PassedOverError(f"{line_of(node)}: {found}"))
            scope._untouched.add(found)
    return types


def nodes(graph: torch.fx.GraphModule) -> Iterator[Any]:
    """Yield the nodes of a graph, and of the graphs inside it."""
    for node in graph.graph.nodes:
        yield node
        # (a body belongs to the call that has it as an argument)
        for body in dynamo.bodies(node) if node.op != "get_attr" else ():
            yield from nodes(body)


def _may_hide(node: Any) -> bool:
    """Return whether a node runs untraced Python code, with ops that regrad has not seen yet."""
    if node.op == "call_module":
        return True
    return (
        node.op == "call_function"
        and not is_ours(node.target)
        and (custom_op(node.target) is not None or _is_untraced(node.target))
    )


def _is_untraced(function: object) -> bool:
    """Return whether a node runs Python code that Dynamo does not trace, by `allow_in_graph`."""
    written = not isinstance(function, str | type | BuiltinFunctionType | Overload | Packet)
    module = getattr(function, "__module__", None) or "torch"
    return written and module.partition(".")[0] not in ("torch", "_operator")


def report_to_scopes(
    program: Callable[..., Any], types: dict[Any, set[str]], ran: dict[str, None], asks: bool
) -> Callable[..., Any]:
    """Return a compiled program that reports its built-in rules to the scopes in which it runs.

    regrad checked every node during tracing. So no mode needs to be called for the functions of
    torch in the program, except for functions that hide other ops (`asks`).
    """
    modes = nullcontext if asks else DisableTorchFunction

    def run(*args: Any) -> Any:
        for ruleset, built_in in types.items():
            scope = scope_of(ruleset)
            if scope is None:  # (torch keeps modes per thread, and tasks may share a thread)
                raise PassedOverError(
                    f"a program of torch.compile with built-in rules for {join_types(built_in)} "
                    "was called in a task, or context, without an open scope of these rules. Call "
                    "it in the task that opened the scope, or exit the scope before tasks switch."
                )
            scope._compiled.update(ruleset.keys_of(built_in))
            if scope._modules is not None:
                scope._modules.ran.update(ran)
        given = with_copies(args)
        with modes():
            return program(*given)

    return run


# -- modules, in scopes whose keys name places -----------------------------------------------------


def call_module(
    old: Callable[..., Any], self: Any, tx: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Move the scopes into a module while Dynamo traces its call, as `places.follow` does.

    Dynamo may reuse a program for other modules of the same structure. If keys distinguish between
    such modules, the program is only for this module.
    """
    spot, module = SCOPES.get(), dynamo.value_of(self)
    if type(spot) is not Spot or module is None:
        return old(self, tx, args, options)
    try:
        to, stack = spot.enter(module), dynamo.modes(tx)
        if to.whole and to is not spot:
            refuse_to_be_written(f"the call of {type(module).__name__}")
    except PassedOverError as error:
        raise dynamo.through_dynamo(error) from None
    for scope, node in zip(to, to.nodes, strict=True):
        if node is not None:
            _ran_in(tx.output).update(dict.fromkeys(node.step.paths))
        if node is not None and scope._modules.plan.tells_apart(module):
            dynamo.guard_identity(self)
    if to.whole and to is not spot and has_own_call(module):
        error = PassedOverError(
            f"the call of {type(module).__name__} has a rule as a whole, but the module defines "
            "its own call, so torch.compile would skip the rule. Run the model without "
            "torch.compile"
        )
        raise dynamo.through_dynamo(error)
    before, node = list(stack), None
    if to.whole and to is not spot:
        node = as_node(to, to[-1]._ruleset, module)
        if node is None:
            path = next((f" ({p!r})" for p in to.paths.values() if p), "")
            raise dynamo.graph_break(
                f"the call of {type(module).__name__}{path} has a rule of regrad as a whole, and "
                "runs in Python between two programs. (Only nn.Linear and nn.Conv1d to nn.Conv3d "
                "are built into programs, without hooks, and if no predicate selects them.) Do not "
                "pass fullgraph=True"
            )
        dynamo.guard_identity(self)
    changed = {a._ruleset: b._ruleset for a, b in zip(spot, to, strict=True) if a is not b}
    for i, mode in enumerate(before):
        ruleset = getattr(dynamo.value_of(mode), "ruleset", None)
        if ruleset in changed:
            changed[ruleset].rows.prepare()
            stack[i] = dynamo.mode_from(tx, mode, changed[ruleset].number)
    SCOPES.set(to)
    try:
        if node is not None:
            mode = next(filter(_is_scope, reversed(stack)))
            return dynamo.call_under(tx, _run_whole, mode, node, [self, *args], options)
        return old(self, tx, args, options)
    finally:
        SCOPES.set(spot)
        stack.clear()
        stack.extend(before)


def _run_whole(mode: Any, call: Callable[..., Any], module: Any, input: torch.Tensor) -> Any:
    """Run the call of a module under its rule (torch.compile traces this)."""
    return call(input, module.weight, module.bias, **mode.learned)


def _ran_in(output: Any) -> dict[str, None]:
    """Return the paths of the modules whose calls are part of a trace."""
    return vars(output).setdefault("ran by regrad", {})


# The functions that replace Dynamo's own while a scope is open (see `host.dynamo`).
_NEW = (
    call_apply, trace_forward, speculate, run_node, dispatch, call_module, call_user_compiler,
)  # fmt: skip
MAKERS = {new.__name__: replacing(new) for new in _NEW}
