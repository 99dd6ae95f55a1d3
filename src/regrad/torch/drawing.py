"""`draw` for PyTorch: the functions that a model runs, in the modules that run them."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.overrides
from torch.autograd.function import BackwardCFunction
from torch.nn.modules import module as hooks

from regrad.autodiff.gradients import callable_or_raise
from regrad.core.callers import PACKAGE, find_caller
from regrad.core.rule import place
from regrad.inspection.drawings import BoxKind, Drawing, Sketch, spec_of
from regrad.inspection.recorder import RuleKind, SeenOp
from regrad.torch.calls import RuleCall
from regrad.torch.custom import CustomTorchCall
from regrad.torch.host import version_of
from regrad.torch.host.running import function_of

TORCH: str = os.path.dirname(torch.__file__) + os.sep


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
    sketch = _DrawingMode(f)
    for name, tensor in _tensors(args, "args"):
        sketch.input(name, tensor, "input")
    with sketch, _modules_noted(sketch):
        result = f(*args)
    for _, tensor in _tensors(result, ""):
        sketch.results.add(sketch.source(tensor))
    used = sketch.used()
    title = getattr(f, "__name__", type(f).__name__)
    return sketch.drawing(title, lambda box: box.name in used)


class _DrawingMode(torch.overrides.TorchFunctionMode, Sketch):
    """Looks on while functions of torch run, and draws them.

    The tensors are kept until the picture is done, so that no two have one `id()`.
    """

    def __init__(self, f: Any) -> None:
        super().__init__()
        Sketch.__init__(self)
        self.by_node: dict[Any, str] = {}
        self.kept: list[Any] = []
        self.results: set[str] = set()
        self.scope: list[str] = []
        self.names: dict[int, str] = {}  # of parameters and buffers
        self.paths: dict[int, tuple[str, ...]] = {}  # of modules
        if isinstance(f, torch.nn.Module):
            self.know(f)

    def know(self, module: torch.nn.Module) -> None:
        """Learn the names of a module's parts."""
        paths: dict[str, tuple[str, ...]] = {"": ()}
        for name, part in module.named_modules():
            if name:
                outer, _, own = name.rpartition(".")
                # (a number says little of a part)
                label = f"{own} {type(part).__name__}" if own.isdigit() else own
                paths[name] = (*paths[outer], label)
            self.paths.setdefault(id(part), paths[name])
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.names.setdefault(id(tensor), name)
        self.kept.append(module)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        given = _tensors((args, options), "")
        versions = [version_of(t) for _, t in given]
        nodes = {t.grad_fn for _, t in given}
        sources = [(self.source(t), _spec(t)) for _, t in given]  # (some are written over)
        result = func(*args, **options)
        before = {id(t): n for (_, t), n in zip(given, versions, strict=True)}
        made = [t for _, t in _tensors(result, "") if before.get(id(t)) != version_of(t)]
        if made and any(t.is_floating_point() or t.is_complex() for t in made):
            self._box(func, sources, made, nodes)
        return result

    def input(self, name: str, tensor: torch.Tensor, kind: BoxKind) -> str:
        """Draw a tensor that comes from outside."""
        short = name.rpartition(".")[2] if kind == "variable" else name
        self.kept.append(tensor)
        self.made[id(tensor)] = own = self.add(name, (short, _spec(tensor)), (), kind)
        return own

    def used(self) -> set[str]:
        """The boxes that lead to a result."""
        used, before = set(self.results), -1
        while len(used) != before:
            before = len(used)
            used.update(source for source, target in self.arrows if target in used)
        return used

    def _box(
        self, func: Any, sources: list[tuple[str, str]], made: list[Any], before: set[Any]
    ) -> None:
        nodes = self._between(made, before)
        op = SeenOp(
            getattr(func, "__name__", str(func)).strip("_"), line=find_caller((PACKAGE, TORCH))
        )
        rules = [found for node in nodes if (found := _rule_of(node))[0] != "built-in"]
        op.kind, op.rule = rules[0] if rules else ("built-in", "")
        specs = ", ".join(map(_spec, made[:2])) + (", …" if len(made) > 2 else "")
        details = {"line": op.line, "function": _full_name(func)}
        name = self.add_op(op, [op.op_type, specs], self.scope, details)
        for source, spec in sources:
            self.link(source, name, spec)
        self.made.update((id(t), name) for t in made)
        self.by_node.update(dict.fromkeys(nodes, name))
        self.kept += made

    def _between(self, made: list[Any], before: set[Any]) -> list[Any]:
        """The nodes that lead to these tensors from those of `before` and what is drawn."""
        found: dict[Any, None] = {}
        stack: list[Any] = [t.grad_fn for t in made]
        while stack:
            node = stack.pop()
            if node is None or node in before or node in self.by_node or node in found:
                continue
            if not hasattr(node, "variable"):
                found[node] = None
                stack += [n for n, _ in node.next_functions]
        return [*found]

    def source(self, tensor: torch.Tensor) -> str:
        """The box that a tensor comes from."""
        node = tensor.grad_fn
        # (what the forward of an autograd.Function made gets a node when it leaves the Function)
        if id(tensor) in self.made and (node is None or node in self.by_node):
            return self.made[id(tensor)]
        if tensor.grad_fn is not None:
            self.made[id(tensor)] = name = self._by_node(tensor.grad_fn, _spec(tensor))
            self.kept.append(tensor)
            return name
        known = self.names.get(id(tensor))
        is_parameter = known or isinstance(tensor, torch.nn.Parameter)
        kind: BoxKind = "variable" if is_parameter else "constant"
        return self.input(known or kind, tensor, kind)

    def _by_node(self, node: Any, spec: str = "") -> str:
        """The box of a node that no function of torch was seen to make: an autograd.Function's."""
        if node in self.by_node:
            return self.by_node[node]
        if hasattr(node, "variable"):  # where the graph ends: a leaf
            return self.source(node.variable)
        op = SeenOp(_op_of(node), *_rule_of(node))
        self.by_node[node] = name = self.add_op(op, [op.op_type, spec], self.scope, {})
        for before, _ in node.next_functions:
            if before is not None:
                self.link(self._by_node(before), name)
        return name


@contextmanager
def _modules_noted(sketch: _DrawingMode) -> Generator[None]:
    """Tell the picture which modules are running."""
    entered: list[list[str]] = []

    def enter(module: torch.nn.Module, args: Any) -> None:
        if id(module) not in sketch.paths:
            sketch.know(module)
        entered.append(sketch.scope)
        path = sketch.paths[id(module)]
        sketch.scope = [*path] if path[: len(sketch.scope)] == tuple(sketch.scope) else [
            *sketch.scope, *path[-1:]
        ]  # fmt: skip

    def leave(module: torch.nn.Module, args: Any, result: Any) -> None:
        sketch.scope = entered.pop()

    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: Any, name: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested containers, with their paths."""
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        items: Sequence[tuple[Any, Any]] = [*value.items()]
    elif isinstance(value, list | tuple):
        items = [*enumerate(value)]
    else:
        return []
    return [found for key, part in items for found in _tensors(part, f"{name}[{key!r}]")]


def _rule_of(node: Any) -> tuple[RuleKind, str]:
    """Return whether a node has a rule of the user's, and which."""
    if not isinstance(node, BackwardCFunction):
        return "built-in", ""
    function: Any = function_of(node)
    # (torch makes classes of its own for ours, so what a node carries tells)
    known, call = getattr(node, "known", None), getattr(node, "call", None)
    if isinstance(known, tuple) and isinstance(known[0], RuleCall):
        rule = known[0].rule.rule
        return "override", place(rule.function) if rule.function else rule.name
    if isinstance(call, CustomTorchCall):
        return "custom", place(call.f)
    return "custom", f"{function.__name__}.{place(function.backward)}"


def _op_of(node: Any) -> str:
    """Return what a node's op is called."""
    call = getattr(node, "call", None)
    if isinstance(call, CustomTorchCall):
        return getattr(call.f, "__name__", "custom")
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


def _full_name(func: Any) -> str:
    module = getattr(func, "__module__", "") or "torch"
    return f"{module}.{getattr(func, '__qualname__', getattr(func, '__name__', func))}"


def _spec(t: torch.Tensor) -> str:
    return spec_of(str(t.dtype).removeprefix("torch."), t.shape)
