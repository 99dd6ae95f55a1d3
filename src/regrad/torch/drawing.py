"""`draw` for PyTorch: the functions that a model runs, grouped by the modules that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from regrad.autodiff.gradients import callable_or_raise
from regrad.inspection.drawings import BoxKind, Drawing, Sketch, scopes_of, spec_of
from regrad.inspection.recorder import Named, SeenOp, Tool
from regrad.torch.host import is_leaf, number_of
from regrad.torch.nodes import tensors
from regrad.torch.seeing.arrays import is_float
from regrad.torch.seeing.modules import argument_paths, found_in
from regrad.torch.seeing.names import key_of, node_word, source_of
from regrad.torch.seeing.notes import OpNote
from regrad.torch.seeing.watching import Looker


def draw(f: Callable[..., Any], *args: Any) -> Drawing:
    """Return a picture of the functions that a PyTorch function or module runs.

    Args:
        f: A function or an `nn.Module`, unmodified.
        args: Its arguments; tensors in lists, tuples and dicts count as inputs.

    Returns:
        A `Drawing`, as from `regrad.draw`: one box for each function of torch that created a float
        tensor, in the modules that ran it (`layer1`, `0`, `conv1`). The drawing shows parameters
        and buffers where they are used. It highlights functions with a custom gradient
        (`autograd.Function`, `regrad.torch.custom_grad`) and functions that a scope of
        `regrad.torch` overrides, and names their rules.

    Raises:
        ArgumentError: f is not callable.

    >>> import torch, regrad as rg
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> drawing = rg.torch.draw(net, torch.ones(1, 2))
    >>> [(box.lines[0], box.scope) for box in drawing.boxes if box.kind == "op"]
    [('linear', ('0 Linear',)), ('relu', ('1 ReLU',))]
    """
    callable_or_raise(f, "draw")
    drawer = _Drawer(f, args)
    with drawer.looker.looking():
        ys = [*tensors((f(*args),))]
    used = drawer.leading_to([drawer.source(y, source_of(y)[0]) for y in ys])
    title = getattr(f, "__name__", type(f).__name__)
    return drawer.sketch.drawing(title, lambda box: box.name in used)


class _Drawer(Tool):
    """Draws the functions of torch that run.

    The sketch has the box of each call by its note, the box of each node by its number, and the box
    of a tensor without history by its id. `kept` holds references until the picture is complete, so
    that no id occurs twice.
    """

    keeps = "all"

    def __init__(self, f: Any, args: Sequence[Any]) -> None:
        self.looker: Looker = Looker(found_in(f, args, {}), self)
        self.sketch: Sketch = Sketch()
        self.kept: list[Any] = []
        for name, x in argument_paths(args):
            if isinstance(x, torch.Tensor):
                self.input(name, x, "input", id(x))

    def ran(self, op: OpNote, xs: Named, ys: Sequence[Any], writes: bool = False) -> None:
        """Draw a call, whose rule may belong to a Function inside; or a Function outside calls."""
        if op.inside or self.looker.within is not None or not any(map(is_float, ys)):
            return
        made, takes = self.sketch.made, []
        for (_, (key, _)), (_, x) in zip(op.given, xs, strict=True):
            made[key] = self.source(x, key)
            takes.append((key, _spec(x)))
        details, drawn = {"line": op.line}, op
        if not isinstance(op.func, type):
            details["function"] = _full_name(op.func)
            drawn = SeenOp(op.op_type.replace(".", "_").strip("_"))
            rule = op.ruled or op
            drawn.kind, drawn.rule = rule.kind, rule.rule
        specs = ", ".join(map(_spec, ys[:2])) + (", …" if len(ys) > 2 else "")
        nodes = [number_of(y.grad_fn) for y in ys if y.grad_fn is not None]
        makes = [op, *nodes, *map(id, ys)]
        self.sketch.add_op(drawn, [drawn.op_type, specs], self.scope, details, takes, makes)
        self.kept += [xs, ys]

    def input(self, name: str, x: torch.Tensor, kind: BoxKind, key: Any) -> str:
        """Draw a tensor from outside of the function."""
        short = name.rpartition(".")[2] if kind == "variable" else name
        self.kept.append(x)
        return self.sketch.add_source(key, name, _spec(x), kind, short)

    def source(self, x: torch.Tensor, key: int) -> str:
        """Return the box that a tensor comes from."""
        if (known := self.known(key) or self.sketch.made.get(id(x))) is not None:
            return known
        if x.grad_fn is not None and number_of(x.grad_fn) >= self.looker.start:
            return self.by_node(x.grad_fn, _spec(x))
        inner = torch.func.debug_unwrap(x)
        if inner is not x:  # torch.func has wrapped it
            return self.source(inner, source_of(inner)[0])
        name = self.looker.paths.parameters().get(key)
        if name or isinstance(x, torch.nn.Parameter):
            return self.input(name or "variable", x, "variable", key)
        return self.input("constant", x, "constant", key)

    def known(self, key: Any) -> str | None:
        """Return the box of a tensor or node, or of the call that created the node."""
        looker = self.looker
        every = (key, looker.functions.get(key), looker.call_of(key))
        return next((self.sketch.made[each] for each in every if each in self.sketch.made), None)

    def by_node(self, node: Any, spec: str = "") -> str:
        """Return the box of a node that no observed call created."""
        key = key_of(node)
        if is_leaf(node):
            self.sketch.made[key] = self.source(node.variable, id(node.variable))
        if (known := self.known(key)) is not None:
            self.sketch.made[key] = known
            return known
        note = OpNote(node_word(node.name()))
        if isinstance(node, BackwardCFunction):
            note.describe_function(node)
        behind = [each for each, _ in node.next_functions if each is not None]
        for each in behind:
            self.by_node(each)
        takes = [(key_of(each), "") for each in behind]
        return self.sketch.add_op(note, [note.op_type, spec], self.scope, {}, takes, [key])

    @property
    def scope(self) -> list[str]:
        """The running modules, the outermost first; a module with a number also has its type."""
        types = {path: f" {type(module).__name__}" for module, path in self.looker.paths.stack}
        parts = scopes_of(self.looker.paths.path, ".")
        pairs = zip(parts, accumulate(parts, "{}.{}".format), strict=True)
        return [part + (types.get(path, "") if part.isdigit() else "") for part, path in pairs]

    def leading_to(self, results: Iterable[str]) -> set[str]:
        """Return the boxes that lead to the results."""
        used, before = set(results), -1
        while len(used) != before:
            before = len(used)
            used.update(source for source, target in self.sketch.arrows if target in used)
        return used


def _full_name(func: Any) -> str:
    module = getattr(func, "__module__", "") or "torch"
    return f"{module}.{getattr(func, '__qualname__', getattr(func, '__name__', func))}"


def _spec(t: torch.Tensor) -> str:
    return spec_of(str(t.dtype).removeprefix("torch."), t.shape)
