"""Looking on while a function runs: a mode, and hooks on modules and nodes, off at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import count
from threading import get_ident
from typing import Any

import torch
import torch.overrides
from torch import is_grad_enabled
from torch.autograd.function import BackwardCFunction

from regrad.core.callers import find_caller
from regrad.inspection.recorder import Tool
from regrad.torch.bridge import Bridge, find_twin
from regrad.torch.calls import Overridden
from regrad.torch.custom import Custom
from regrad.torch.host import has_compiled, is_leaf, number_of, sequence_nr
from regrad.torch.host.bodies import unasking
from regrad.torch.host.running import function_of
from regrad.torch.nodes import LIBRARIES, tensors
from regrad.torch.seeing.figures import Measures
from regrad.torch.seeing.modules import ModulePaths
from regrad.torch.seeing.notes import (
    KEY,
    SAME,
    OpNote,
    edge_name,
    function_name,
    function_names,
    labels,
    named_tensors,
    node_word,
)

_GETTER = type(torch.Tensor.shape.__get__)  # pyright: ignore
_DATA = torch.Tensor.data.__get__  # pyright: ignore
_RUNS = count(1)
# What makes new tensors of old ones' shapes, or asks about a tensor, cuts nothing off.
_APART = ("_like", "new_", "is_", "size", "numel", "dim", "stride")


class Looker:
    """Looks on while a function runs, forward and backward; the tools say what they want to see.

    `steps` is filled by subclasses. Nothing here holds a tensor of the function's, or a node.
    """

    keeps_inputs = False  # whether `before` is to be called with what each function is given

    def __init__(self, held: dict[str, Any], tool: Tool | None = None) -> None:
        self.tool: Tool = tool or Tool()
        self.measures: Measures | None = None  # of gradients, if somebody takes some
        self.taken: dict[int, torch.Tensor] = {}  # the gradients that came to leaves, by id
        self.losses: list[torch.Tensor] = []  # that were kept
        self.noted: list[OpNote] = []
        self.held = held
        self.run: int = next(_RUNS)
        self.paths: ModulePaths = ModulePaths(held)
        self.start: int = sequence_nr()
        self.handles: list[Any] = []
        self.inside = 0  # of how many forward passes of Functions
        self.ran_backward = False
        self.cuts: dict[tuple[str, str, str], str] = {}
        self.leaves: dict[int, Any] = {}  # the tensors at which the graph begins
        self.current: OpNote | None = None  # the last op whose backward pass began
        self.closed = False

    # -- what subclasses add ---------------------------------------------------------------------

    def before(self, func: Any, args: Sequence[Any], options: Any) -> Any:
        """A torch function is about to run; what is returned is given to `after`."""

    def after(self, func: Any, args: Any, options: Any, y: Any, was: Any, note: OpNote) -> None:
        """A torch function ran."""

    def got(self, func: Any, args: Any, y: Any) -> None:
        """A property of a tensor was read."""

    def ran(self, function: Any, args: Any, y: Any, note: OpNote, ctx: Any) -> None:
        """The forward pass of an `autograd.Function` ran."""

    def ended(self, loss: torch.Tensor) -> None:
        """The forward pass is over, and the backward pass begins."""

    def arrived(self, note: OpNote, dys: Sequence[Any]) -> None:
        """Gradients arrived at an op."""
        self.tool.arrived(note, dys)

    def left(self, note: OpNote, dxs: Sequence[Any], dys: Sequence[Any]) -> None:
        """Gradients left an op."""
        if self.measures is not None and note.same and len(dxs) == 1 and dxs[0] is not None:
            self.measures.same(dxs[0], dys[0])
        self.tool.left(note, [(note.name(i), dx) for i, dx in enumerate(dxs)], dys)

    def reached(self, variable: torch.Tensor, g: Any) -> None:
        """A gradient arrived at a leaf, to be accumulated there."""
        if g is not None:
            key = id(variable)
            with torch.no_grad():
                self.taken[key] = self.taken[key] + g if key in self.taken else g.detach().clone()

    def back(
        self, loss: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor | None]:
        """Run the backward pass; the gradients by what was given and by the leaves, by id."""
        self.ended(loss)
        self.adopt(loss.grad_fn)
        xs = {id(x): x for x in (*given, *self.leaves.values())}
        if not xs:
            return {}
        with torch.enable_grad():
            dy = torch.ones_like(loss)
            found = torch.autograd.grad(loss, [*xs.values()], dy, allow_unused=True)
        return dict(zip(xs, found, strict=True))

    # -- notes -----------------------------------------------------------------------------------

    def note(self, op_type: str) -> OpNote:
        """Note an op that runs where the program is now."""
        return OpNote(self.run, op_type, find_caller(LIBRARIES), self.paths.path)

    def known(self, node: Any) -> OpNote | None:
        """The note of a node, if there is one of this run."""
        note = node.metadata.get(KEY)
        return note if note is not None and note.run == self.run else None

    def attach(self, node: Any, note: OpNote) -> None:
        """Put a note on a node, and look on when its backward pass runs."""
        node.metadata[KEY] = note
        note.makes = (number_of(node),)
        note.takes = [key_of(behind) for behind, _ in node.next_functions]
        self.noted.append(note)

        def begin(dys: Any) -> None:
            self.current = note
            self.arrived(note, dys)

        def end(dxs: Any, dys: Any) -> None:
            self.left(note, dxs, dys)

        self.handles += [node.register_prehook(begin), node.register_hook(end)]

    def attach_leaf(self, node: Any) -> None:
        """Look on when a gradient is accumulated in a leaf."""
        if node.metadata.get(KEY) == self.run:
            return
        node.metadata[KEY] = self.run
        variable = node.variable
        self.leaves[id(variable)] = variable

        def begin(dys: Any) -> None:
            self.ran_backward = True
            self.reached(variable, dys[0])

        self.handles.append(node.register_prehook(begin))

    def new_nodes(self, node: Any) -> list[Any]:
        """A node and those behind it that have no notes yet, and were made in this run."""
        found, seen = [node], {node}
        for each in found:  # which grows
            for behind, _ in each.next_functions:
                if behind is None or behind in seen:
                    continue
                if is_leaf(behind):
                    self.attach_leaf(behind)
                elif number_of(behind) >= self.start and self.known(behind) is None:
                    seen.add(behind)
                    found.append(behind)
        return found

    def note_call(self, func: Any, given: Sequence[Any], result: Any, start: int) -> OpNote | None:
        """Note the nodes that a call of a torch function made."""
        outputs = [y for y in tensors((result,)) if y.grad_fn is not None]
        if not outputs and given:  # (`x[0] = y` returns nothing)
            outputs = [x for _, x, _, _ in given[:1] if x.grad_fn is not None]
        first: OpNote | None = None
        for y in outputs:
            node = y.grad_fn
            if is_leaf(node) or self.known(node) is not None or number_of(node) < start:
                continue
            made = self.new_nodes(node)
            mine = [each for each in made if number_of(each) >= start]
            for each in made:
                if number_of(each) < start:
                    self.adopt_one(each)
            if first is None:
                first = self.note(function_name(func))
                first.func = func
            self._note_nodes(func, given, mine, first)
        return first

    def _note_nodes(self, func: Any, given: Any, nodes: Sequence[Any], first: OpNote) -> None:
        held = set(nodes)
        for node, label in zip(nodes, labels(func, nodes), strict=True):
            note = OpNote(self.run, label, first.line, first.path)
            note.func = func
            note.names = [edge_name(behind, nr, given, held) for behind, nr in node.next_functions]
            note.same = node_word(node.name()) in SAME
            if isinstance(node, BackwardCFunction):
                note.describe_function(node)
            note.inputs = first
            self.attach(node, note)

    def adopt(self, root: Any) -> None:
        """Note all that leads to a result and was not seen, and whose rule each Function has."""
        if root is None:
            return
        if is_leaf(root):
            self.attach_leaf(root)
            return
        found, seen = [root], {root}
        for node in found:  # which grows
            note = self.known(node)
            if note is None:
                note = self.adopt_one(node)
            elif isinstance(node, BackwardCFunction):
                note.describe_function(node)
            for behind, _ in node.next_functions:
                if behind is None or behind in seen:
                    continue
                seen.add(behind)
                if is_leaf(behind):
                    self.attach_leaf(behind)
                elif number_of(behind) >= self.start:
                    found.append(behind)
                    if note.kind == "override" and self.known(behind) is None:
                        self.adopt_one(behind, note)  # (a copy that was made for the rule)

    def adopt_one(self, node: Any, like: OpNote | None = None) -> OpNote:
        """Note a node that was made out of sight."""
        note = OpNote(self.run, node_word(node.name()))
        if like is not None:
            note.line, note.path = like.line, like.path
        note.same = note.op_type in SAME
        if isinstance(node, BackwardCFunction):
            note.describe_function(node)
        self.attach(node, note)
        return note

    def note_function(self, ctx: Any, function: Any, args: Sequence[Any], y: Any) -> None:
        """Note the node that an `autograd.Function` is making."""
        if not isinstance(ctx, BackwardCFunction) or self.known(ctx) is not None:
            return
        if get_ident() != self.paths.thread:  # a program that runs at the same time
            return
        note = self.note(function.__name__)
        note.func = function
        note.names = function_names(function, args)
        note.describe_function(ctx)
        self.attach(ctx, note)
        self.ran(function, args, y, note, ctx)

    def note_cut(self, func: Any, given: Sequence[Any], result: Any) -> None:
        """Note a function that was given something differentiated, and returned something not."""
        if self.inside or not isinstance(result, torch.Tensor) or result.requires_grad:
            return
        if not (result.is_floating_point() or result.is_complex()):
            return
        name = "data" if func == _DATA else function_name(func)
        if not any(word in name for word in _APART) and not name.endswith("_"):
            where = find_caller(LIBRARIES)
            self.cuts.setdefault((name, where, self.paths.path), given[0][0])

    # -- the scope -------------------------------------------------------------------------------

    @contextmanager
    def looking(self) -> Generator[None]:
        """A block in which it looks on."""
        try:
            self.handles += self.paths.install()
            with _functions_seen(self), _eagerly(), _SeeingMode(self):
                yield
        except Exception as error:
            if self.current is not None:
                error.add_note(f"in the backward pass of {self.current.place}, or after it")
            raise
        finally:
            self.closed: bool = True
            for handle in self.handles:
                handle.remove()
            self.handles = []


def key_of(node: Any) -> int | None:
    """Return the key that tells a node from others: its number, or the id of its leaf."""
    if node is None:
        return None
    return id(node.variable) if is_leaf(node) else number_of(node)


@contextmanager
def _eagerly() -> Generator[None]:
    """A block in which what torch.compile compiled runs op by op."""
    if not has_compiled():
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", "Using `torch.compile")  # (it does not like our hooks)
        yield


class _SeeingMode(torch.overrides.TorchFunctionMode):
    """The mode that torch asks before each of its functions."""

    def __init__(self, looker: Looker) -> None:
        super().__init__()
        self.looker = looker

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if type(func) is _GETTER:
            y = func(*args, **options)
            if func == _DATA and is_grad_enabled() and args[0].requires_grad:
                self.looker.note_cut(func, [("input", args[0], None, 0)], y)
            self.looker.got(func, args, y)
            return y
        if func is torch.Tensor.backward:
            names = ("gradient", "retain_graph", "create_graph", "inputs")
            given = {**dict(zip(names, args[1:], strict=False)), **options}
            given["grad_tensors"] = given.pop("gradient", None)
            return self._run_backward(args[0], **given)
        if func is torch.autograd.backward:
            return self._run_backward(*args, **options)
        looker = self.looker
        looks = looker.keeps_inputs and func is not torch.autograd.grad
        was = looker.before(func, args, options) if looks else None
        given = [
            (name, x, x.grad_fn, x.output_nr)
            for name, x in named_tensors(func, args, options)
            if x.requires_grad
        ]
        start = sequence_nr()
        y = func(*args, **options)
        note = None
        if given and is_grad_enabled() and sequence_nr() != start:
            note = looker.note_call(func, given, y, start)
        if given and note is None:
            looker.note_cut(func, given, y)
        if looks:
            if note is None:
                note = looker.note(function_name(func))
                note.func = func
            looker.after(func, args, options, y, was, note)
        return y

    def _run_backward(self, roots: Any, *args: Any, **options: Any) -> None:
        """Run a backward pass in which the mode stays on, for what checkpoints run again."""
        self.looker.ran_backward = True
        for x in tensors((roots,)):
            self.looker.ended(x)
            self.looker.adopt(x.grad_fn)
        with self:
            unasking(torch.autograd.backward)(roots, *args, **options)


@contextmanager
def _functions_seen(looker: Looker) -> Generator[None]:
    """A block in which `forward` of the autograd.Functions that there are is replaced.

    No mode is asked about a Function, and code may hold its `apply` since it was imported.
    """
    for ours in (Overridden, Custom, Bridge):
        find_twin(ours)
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for function in set(_functions(torch.autograd.Function)):
            for name, make in (("forward", _forward), ("setup_context", _setup_context)):
                old = function.__dict__.get(name)
                if isinstance(old, staticmethod) and not function.__module__.startswith("torch."):
                    replaced.append((function, name, old))
                    setattr(function, name, staticmethod(make(looker, function, old.__func__)))
        yield
    finally:
        for function, name, old in reversed(replaced):
            setattr(function, name, old)


def _forward(looker: Looker, function: Any, old: Callable[..., Any]) -> Callable[..., Any]:
    base = torch.autograd.Function.setup_context

    @wraps(old)
    def forward(*args: Any, **options: Any) -> Any:
        looker.inside += 1
        try:
            y = old(*args, **options)
        finally:
            looker.inside -= 1
        if function.setup_context is base and args and not looker.closed:
            looker.note_function(args[0], _function_of(args[0], function), args[1:], y)
        return y

    return forward


def _setup_context(looker: Looker, function: Any, old: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(old)
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        old(ctx, inputs, output)
        if not looker.closed:
            looker.note_function(ctx, _function_of(ctx, function), inputs, output)

    return setup_context


def _function_of(ctx: Any, function: Any) -> Any:
    """The Function of a node: a subclass may inherit the forward pass."""
    return function_of(ctx) if isinstance(ctx, BackwardCFunction) else function


def _functions(base: Any) -> Iterator[Any]:
    """All autograd.Functions that there are."""
    for each in base.__subclasses__():
        yield each
        yield from _functions(each)
