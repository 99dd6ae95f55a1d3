"""Observing a function while it runs, by a mode and by hooks on modules and nodes.

Autograd numbers its nodes in the order of creation. A node belongs to the call during which it was
created. In the forward pass, the mode notes only calls. When a backward pass begins, one traversal
of the graph adds a note to each node, and hooks that observe its incoming and outgoing gradients:

    y = layer(x)        call   linear   numbers 7 to 9
    y.relu().sum()      calls  relu     9 to 10,   sum   10 to 11
    backward            node 10: sum    node 9: relu    node 8: linear    node 7: linear (t)

torch calls no mode for an `autograd.Function`. So regrad replaces the Function's forward pass.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import count
from threading import get_ident
from typing import Any

import torch
import torch.overrides
from torch import is_grad_enabled
from torch.autograd.function import BackwardCFunction

from regrad.core import containers
from regrad.core.callers import find_caller
from regrad.core.replacements import Entrance, Replacements
from regrad.inspection.recorder import Tool
from regrad.torch.bridge import Bridge, find_twin
from regrad.torch.calls import Overridden
from regrad.torch.custom import Custom, CustomTorchCall
from regrad.torch.host import (
    DisableTorchFunction,
    has_compiled,
    is_leaf,
    number_of,
    sequence_nr,
    version_of,
)
from regrad.torch.host.bodies import without_own_dispatch
from regrad.torch.host.running import function_of
from regrad.torch.nodes import LIBRARIES, tensors
from regrad.torch.open_scopes import inside
from regrad.torch.seeing.arrays import is_float
from regrad.torch.seeing.modules import ModulePaths
from regrad.torch.seeing.names import (
    edge_name,
    function_name,
    key_of,
    labels,
    named_tensors,
    node_word,
    source_of,
)
from regrad.torch.seeing.notes import OpNote

KEY = "seen by regrad"  # a key in a node's metadata
_BACKWARD: Any = torch.autograd.backward
GETTER: type = type(torch.Tensor.shape.__get__)  # pyright: ignore
_READ = ("data", "T", "mT", "H", "mH", "real", "imag")  # properties that compute a new tensor
_RUNS = count(1)
# Functions whose result uses only the shape or properties of a tensor; they cut off no gradient.
_APART = ("_like", "new_", "is_", "size", "numel", "dim", "stride")
# Functions that return uninitialized memory, which may hold any value.
_UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided", "resize_", "set_")


class Found(Exception):
    """Raised to stop the run when the tool is done."""


class Looker:
    """Observes a function while it runs, forward and backward, and reports to a tool.

    Unless the tool requests it, a Looker holds no tensor of the function and no node.
    """

    def __init__(self, held: dict[str, Any], tool: Tool | None = None) -> None:
        self.tool: Tool = tool or Tool()
        self.held = held
        self.run: int = next(_RUNS)
        self.paths: ModulePaths = ModulePaths(held)
        self.start: int = sequence_nr()
        self.calls: list[OpNote] = []  # the calls that created nodes, by the nodes' numbers
        self.functions: dict[int, OpNote] = {}  # of autograd.Functions, by their nodes' numbers
        self.nodes: dict[int, OpNote] = {}  # of the nodes that results depend on, by number
        self.cuts: dict[tuple[str, str, str], str] = {}
        self.leaves: dict[int, Any] = {}  # the leaves of the graph
        self.taken: dict[int, torch.Tensor] = {}  # the gradients that reached leaves, by id
        self.losses: list[torch.Tensor] = []  # of the backward passes that f itself runs
        self.handles: list[Any] = []
        self.last: OpNote | None = None  # the last call that began
        self.current: OpNote | None = None  # the last op whose backward pass began
        self.within: list[tuple[OpNote, Any]] | None = None  # Functions in a call, and their nodes
        self.inside = 0  # the number of running forward passes of Functions
        self.ran_backward: bool = False
        self.closed = False

    # -- forward ---------------------------------------------------------------------------------

    def call(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run a torch function; note it if it creates nodes, or if the tool keeps all calls."""
        name, tells = function_name(func), self.tool.keeps == "all"
        note = self.last = OpNote(name, func=func)
        given = list(named_tensors(func, args, options))
        watched = [(name, x) for name, x in given if x.requires_grad]
        note.given = [(name, source_of(x)) for name, x in given if tells or x.requires_grad]
        before = {id(x): version_of(x) for _, x in given} if tells else {}
        if tells and self.tool.again:
            note.hold(args, options)
        elif tells and given and writes(func, args, options):
            given[0] = given[0][0], given[0][1].detach().clone()
        outer, self.within = self.within, []
        if func is torch.autograd.grad:  # (observe the steps of this backward pass too)
            for x in tensors((args[0] if args else options["outputs"],)):
                self.look_back(x.grad_fn)
        note.start = sequence_nr()
        try:
            y = func(*args, **options)
        finally:
            functions, self.within = self.within, outer
        note.end = sequence_nr()
        made = y if y is not None else (args[0] if args else None)  # (`x[0] = y` returns nothing)
        if note.end > note.start or tells:
            note.line, note.path = find_caller(LIBRARIES), self.paths.path
        if note.end > note.start:
            note.takes = [source_of(x)[0] for _, x in watched]
            note.makes = [number_of(x.grad_fn) for x in tensors((made,)) if x.grad_fn is not None]
            self.calls.append(note)
        for inner, node in functions:
            inner.describe_function(node)
            if note.ruled is None and inner.kind != "built-in":
                note.ruled = inner
        if watched and (name != "data" or is_grad_enabled()):
            self.note_cut(name, watched[0][0], y)
        if tells and func is not torch.autograd.grad:
            ys = () if name in _UNWRITTEN else tensors((made,))
            new = [x for x in ys if before.get(id(x)) != version_of(x)]
            self.tell(note, given, new, _writes_infinity((args, options)))
        return y

    def tell(self, note: OpNote, xs: Any, ys: Any, writes: bool) -> None:
        """Report a call to the tool; stop the run if the tool is done."""
        note.inside = self.inside > 0
        self.tool.ran(note, xs, ys, writes)
        if self.tool.done:
            raise Found

    def note_function(self, ctx: Any, args: Sequence[Any], y: Any) -> OpNote | None:
        """Note the node that an `autograd.Function` creates, at the first call for this node."""
        # (another thread may be running a program)
        is_node = isinstance(ctx, BackwardCFunction)
        if self.closed or not is_node or get_ident() != self.paths.thread:
            return None
        number, function = number_of(ctx), function_of(ctx)
        if number in self.functions:
            return None
        note = OpNote(function.__name__, find_caller(LIBRARIES), self.paths.path, function)
        flat = [x if isinstance(x, torch.Tensor) else None for x in args]  # (lists stay closed)
        note.names = [name for name, _ in named_tensors(function, flat)]
        first = args[0] if args else None
        if isinstance(first, CustomTorchCall):
            named = first.arguments.names
            note.names = [*named, *note.names[len(named) :]]
        note.describe_function(ctx)
        note.makes, note.takes = [number], [key_of(behind) for behind, _ in ctx.next_functions]
        self.last = self.functions[number] = note
        if self.within is not None:
            self.within.append((note, ctx))
        if self.tool.again:
            note.hold_function(first, args)
        if self.tool.keeps == "all":
            xs = list(named_tensors(function, args))
            if len(xs) == len(note.names):  # (a rule may have other names for them)
                xs = [(name, x) for name, (_, x) in zip(note.names, xs, strict=True)]
            note.given = [(name, source_of(x)) for name, x in xs]
            with DisableTorchFunction():
                self.tell(note, xs, list(tensors((y,))), False)
        return note

    def note_cut(self, name: str, given: str, result: Any) -> None:
        """Note a function with a differentiable argument and a result without a gradient."""
        if self.inside or not is_float(result) or result.requires_grad:
            return
        if not any(word in name for word in _APART) and not name.endswith("_"):
            where = find_caller(LIBRARIES)
            self.cuts.setdefault((name, where, self.paths.path), given)

    # -- backward --------------------------------------------------------------------------------

    def look_back(self, root: Any) -> None:
        """Note this run's nodes that a result depends on, and observe gradients at them."""
        found, front = [] if root is None else [root], {}
        made: dict[OpNote, list[Any]] = {}
        for node in found:  # (`found` grows during the loop)
            if is_leaf(node):
                self.watch_leaf(node)
                continue
            if node.metadata.get(KEY) != self.run:
                number = number_of(node)
                call = self.call_of(number)
                if number in self.functions:
                    self.watch(node, self.functions[number])
                elif call is not None:
                    made.setdefault(call, []).append(node)
                else:
                    self.watch_unseen(node, front.get(node))
            for behind, _ in node.next_functions:
                if behind is None or behind in front:
                    continue
                if is_leaf(behind) or number_of(behind) >= self.start:
                    front[behind] = node
                    found.append(behind)
        for call, nodes in made.items():
            self.watch_call(call, sorted(nodes, key=number_of, reverse=True))

    def call_of(self, number: int) -> OpNote | None:
        """Return the call that created the node of a number; None if no call was observed."""
        i = bisect_right(self.calls, number, key=lambda note: note.start)
        # (a call in a backward pass that torch runs inside another call ends before that call)
        return self.calls[i - 1] if i and number < self.calls[i - 1].end else None

    def watch_call(self, call: OpNote, nodes: Sequence[Any]) -> None:
        """Observe the nodes that one call created, the last first."""
        # (for an op under a rule, the other nodes only copy the op's inputs)
        is_ruled, made = call.ruled is not None, set(nodes)
        words = [node_word(node.name()) for node in nodes]
        for node, name in zip(nodes, words if is_ruled else labels(call.func, nodes), strict=True):
            note = OpNote(name, call.line, call.path, call.func, call)
            edges = node.next_functions
            note.names = [edge_name(behind, nr, call.given, made) for behind, nr in edges]
            self.watch(node, note)

    def watch_unseen(self, node: Any, front: Any) -> None:
        """Observe a node that no observed call created; a copy for a rule has the rule's line."""
        note = OpNote(node_word(node.name()))
        like = None if front is None else self.nodes.get(number_of(front))
        if like is not None and like.kind == "override":
            note.line, note.path = like.line, like.path
        self.watch(node, note)

    def watch(self, node: Any, note: OpNote) -> None:
        """Observe the backward pass of a node."""
        if isinstance(node, BackwardCFunction):
            note.describe_function(node)
        node.metadata[KEY] = self.run
        self.nodes[number_of(node)] = note
        note.makes = (number_of(node),)
        note.takes = [key_of(behind) for behind, _ in node.next_functions]

        def begin(dys: Any) -> None:
            self.current = note
            self.tool.arrived(note, dys)

        def end(dxs: Any, dys: Any) -> None:
            self.tool.left(note, [(note.name(i), dx) for i, dx in enumerate(dxs)], dys)

        self.handles += [node.register_prehook(begin), node.register_hook(end)]

    def watch_leaf(self, node: Any) -> None:
        """Observe gradients that accumulate in a leaf."""
        if node.metadata.get(KEY) == self.run:
            return
        node.metadata[KEY] = self.run
        key = id(node.variable)
        self.leaves[key] = node.variable

        def begin(dys: Any) -> None:
            self.ran_backward = True
            if (g := dys[0]) is not None:
                with torch.no_grad():
                    known = self.taken.get(key)
                    self.taken[key] = g.detach().clone() if known is None else known + g

        self.handles.append(node.register_prehook(begin))

    def back(
        self, loss: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor | None]:
        """Run the backward pass; return the gradients of arguments and leaves, by id."""
        self.look_back(loss.grad_fn)
        xs = {id(x): x for x in (*given, *self.leaves.values())}
        if not xs:
            return {}
        with torch.enable_grad():
            dy = torch.ones_like(loss)
            found = torch.autograd.grad(loss, [*xs.values()], dy, allow_unused=True)
        return dict(zip(xs, found, strict=True))

    def begin_backward(self, roots: Any) -> None:
        """Observe a backward pass that f itself runs."""
        self.ran_backward = True
        for x in tensors((roots,)):
            if self.tool.keeps:
                self.losses.append(x)
            self.look_back(x.grad_fn)

    def ops(self) -> list[OpNote]:
        """Return all ops that a gradient may have passed, in the order of the forward pass.

        Calls that lead to no result have no observed nodes, so the calls themselves are listed.
        """
        every = (*self.calls, *self.functions.values())
        others = [note for note in every if note.makes and self.nodes.keys().isdisjoint(note.makes)]
        return sorted([*self.nodes.values(), *others], key=lambda note: note.makes[0])

    # -- the scope -------------------------------------------------------------------------------

    def entrances(self) -> Iterator[Entrance]:
        """Yield the functions to replace: the forward passes of all existing autograd.Functions.

        torch calls no mode for a Function, and code may hold a reference to `apply` from an import.
        """
        yield torch.autograd, "backward", partial(_seen_backward, self)
        for ours in (Overridden, Custom, Bridge):
            find_twin(ours)
        for function in functions_of_python():
            for name in ("forward", "setup_context"):
                if isinstance(function.__dict__.get(name), staticmethod):
                    yield function, name, partial(_seen, self, function, name)

    @contextmanager
    def looking(self) -> Generator[None]:
        """Observe the code in a block."""
        replaced = Replacements(self.entrances)
        try:
            self.handles += self.paths.install()
            replaced.make()
            with inside(looked_at=True), _eagerly(), _SeeingMode(self):
                yield
        except Exception as error:
            if self.current is not None:
                error.add_note(f"in the backward pass of {self.current.place}, or after it")
            raise
        finally:
            self.closed: bool = True
            replaced.undo()
            for handle in self.handles:
                handle.remove()
            self.handles = []


def writes(func: Any, args: Sequence[Any], options: dict[str, Any]) -> bool:
    """Return whether a function writes over its first argument."""
    name = getattr(func, "__name__", "")
    flagged = len(args) > 1 and args[1] is True  # (`inplace`, by position)
    ends = name.endswith("_") and not name.endswith("__")
    return bool(
        ends or name.startswith("__i") or options.get("inplace") or flagged or "setitem" in name
    )


def _writes_infinity(value: Any) -> bool:
    """Return whether a number among the arguments of a function is infinite."""
    numbers = [x for x in containers.opened(value, None)[0] if isinstance(x, float)]
    return not all(map(math.isfinite, numbers))


@contextmanager
def _eagerly() -> Generator[None]:
    """Run compiled code op by op during a block."""
    if not has_compiled():
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", "Using `torch.compile")  # (it warns about hooks)
        yield


class _SeeingMode(torch.overrides.TorchFunctionMode):
    """The mode that torch calls before each of its functions."""

    def __init__(self, looker: Looker) -> None:
        super().__init__()
        self.looker = looker

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if type(func) is GETTER and function_name(func) not in _READ:
            return func(*args, **options)
        if func in (torch.Tensor.backward, torch.autograd.backward):
            run = func if func is torch.autograd.backward else without_own_dispatch(func)
            with self:  # (stays active for the code that checkpoints run again)
                return run(*args, **options)
        return self.looker.call(func, args, options)


def _seen_backward(looker: Looker, old: Any) -> Any:
    """Return a replacement for `torch.autograd.backward`; older versions call no mode for it."""

    @wraps(old)
    def backward(*args: Any, **options: Any) -> Any:
        if get_ident() != looker.paths.thread:
            return old(*args, **options)
        looker.begin_backward(args[0] if args else options.get("tensors"))
        return without_own_dispatch(_BACKWARD)(*args, **options)

    return backward


def _seen(looker: Looker, function: Any, name: str, old: Any) -> Any:
    """Return a replacement for a Function's `forward` or `setup_context`, which notes the node."""
    gets_ctx = function.setup_context is torch.autograd.Function.setup_context

    @wraps(old.__func__)
    def seen(*args: Any, **options: Any) -> Any:
        looker.inside += 1
        try:
            y = old.__func__(*args, **options)
        finally:
            looker.inside -= 1
        if name == "setup_context":
            looker.note_function(*args)
        elif gets_ctx:
            looker.note_function(args[0], args[1:], y)
        return y

    return staticmethod(seen)


def functions_of_python() -> list[Any]:
    """Return all existing autograd.Functions, except torch's own."""
    found = torch.autograd.Function.__subclasses__()
    for each in found:  # (`found` grows during the loop)
        found += each.__subclasses__()
    return [each for each in dict.fromkeys(found) if not each.__module__.startswith("torch.")]
