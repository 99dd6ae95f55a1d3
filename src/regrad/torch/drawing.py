"""`draw` for PyTorch: the functions that a model runs, in the modules that run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from regrad.autodiff.gradients import callable_or_raise
from regrad.inspection.drawings import BoxKind, Drawing, Sketch, scopes_of, spec_of
from regrad.inspection.recorder import SeenOp
from regrad.torch.host import is_leaf, number_of, version_of
from regrad.torch.nodes import tensors
from regrad.torch.seeing.modules import argument_paths, found_in
from regrad.torch.seeing.notes import OpNote
from regrad.torch.seeing.recording import is_float
from regrad.torch.seeing.watching import Looker, key_of


def draw(f: Callable[..., Any], *args: Any) -> Drawing:
    """Return a picture of what a PyTorch function or module runs.

    Args:
        f: A function or an `nn.Module`; nobody needs to edit it.
        args: Its arguments; tensors in lists, tuples and dicts count as inputs.

    Returns:
        A `Drawing`, as `regrad.draw` has it: one box for each function of torch that made a
        tensor of floats, in the modules that ran it (`layer1`, `0`, `conv1`), with parameters and
        buffers where they are used. Functions with a gradient of their own (`autograd.Function`,
        `regrad.torch.custom_grad`) and what a scope of `regrad.torch` overrides stand out and name
        their rules.

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
    with drawer.looking():
        used = drawer.leading_to(map(drawer.source, tensors((f(*args),))))
    title = getattr(f, "__name__", type(f).__name__)
    return drawer.sketch.drawing(title, lambda box: box.name in used)


class _Drawer(Looker):
    """Looks on while functions of torch run, and draws them.

    The sketch has the box of each tensor by its id, and of each node by its number. The tensors are
    kept until the picture is done, so that no two have one `id()`.
    """

    keeps_inputs = True

    def __init__(self, f: Any, args: Sequence[Any]) -> None:
        super().__init__(found_in(f, args, {}))
        self.sketch = Sketch()
        self.kept: list[torch.Tensor] = []
        self.calls: list[tuple[OpNote, Any]] | None = None  # of Functions, in a torch function
        for name, x in argument_paths(args):
            if isinstance(x, torch.Tensor):
                self.input(name, x, "input")

    def input(self, name: str, x: torch.Tensor, kind: BoxKind) -> str:
        """Draw a tensor that comes from outside."""
        short = name.rpartition(".")[2] if kind == "variable" else name
        self.kept.append(x)
        self.sketch.made[id(x)] = own = self.sketch.add(name, (short, _spec(x)), (), kind)
        return own

    def before(self, func: Any, args: Any, options: Any) -> Any:
        """Find out where the inputs come from; some are written over."""
        self.calls = []
        given = [*tensors((args, options))]
        sources = [(self.source(x), _spec(x)) for x in given]
        return sources, {id(x): version_of(x) for x in given}, len(self.noted)

    def after(self, func: Any, args: Any, options: Any, y: Any, was: Any, note: OpNote) -> None:
        """Draw a torch function, whose rule may be that of a Function inside."""
        (sources, versions, start), calls = was, self.calls or ()
        self.calls = None
        made = [x for x in tensors((y,)) if versions.get(id(x)) != version_of(x)]
        if self.inside or not any(map(is_float, made)):
            return
        for inner, node in calls:
            inner.describe_function(node)
        notes = self.noted[start:]
        op = SeenOp(getattr(func, "__name__", str(func)).strip("_"), line=note.line)
        for ruled in [each for each in notes if each.kind != "built-in"][:1]:
            op.kind, op.rule = ruled.kind, ruled.rule
        op.makes = [key for each in notes for key in each.makes]
        self.box(op, sources, made, {"line": op.line, "function": _full_name(func)})

    def got(self, func: Any, args: Any, y: Any) -> None:
        """Draw a property that is a tensor."""
        if isinstance(y, torch.Tensor):
            self.after(func, args, {}, y, self.before(func, args, {}), self.note(""))

    def ran(self, function: Any, args: Any, y: Any, note: OpNote, ctx: Any) -> None:
        """Draw a Function, if it is not what a torch function runs."""
        if self.calls is not None:
            self.calls.append((note, ctx))
        elif not self.inside:
            sources = [(self.source(x), _spec(x)) for x in tensors(args)]
            self.box(note, sources, [*tensors((y,))], {"line": note.line})

    def box(
        self, op: SeenOp, sources: Any, made: Sequence[torch.Tensor], details: dict[str, str]
    ) -> None:
        """Draw an op, and what it takes."""
        specs = ", ".join(map(_spec, made[:2])) + (", …" if len(made) > 2 else "")
        keys = [*op.makes, *map(id, made), *[key_of(x.grad_fn) for x in made if x.grad_fn]]
        self.sketch.add_op(op, [op.op_type, specs], self.scope, details, sources, keys)
        self.kept += made

    def source(self, x: torch.Tensor) -> str:
        """The box that a tensor comes from."""
        for key in (key_of(x.grad_fn), id(x)):
            if key in self.sketch.made:
                return self.sketch.made[key]
        if x.grad_fn is not None and number_of(x.grad_fn) >= self.start:
            return self.by_node(x.grad_fn, _spec(x))
        known = self.paths.parameters().get(id(x))
        if known or isinstance(x, torch.nn.Parameter):
            return self.input(known or "variable", x, "variable")
        return self.input("constant", x, "constant")

    def by_node(self, node: Any, spec: str = "") -> str:
        """The box of a node that no function was seen to make."""
        if is_leaf(node):
            return self.source(node.variable)
        if (key := number_of(node)) not in self.sketch.made:
            note = self.adopt_one(node)
            sources = [(self.by_node(each), "") for each, _ in node.next_functions if each]
            self.sketch.add_op(note, [note.op_type, spec], self.scope, {}, sources, [key])
        return self.sketch.made[key]

    @property
    def scope(self) -> list[str]:
        """The modules that run, the outermost first; of a number, with its type."""
        types = {path: f" {type(module).__name__}" for module, path in self.paths.stack}
        parts = scopes_of(self.paths.path, ".")
        outer = accumulate(parts, "{}.{}".format)
        return [
            part + (types.get(path, "") if part.isdigit() else "")
            for part, path in zip(parts, outer, strict=True)
        ]

    def leading_to(self, results: Iterable[str]) -> set[str]:
        """The boxes that lead to results."""
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
