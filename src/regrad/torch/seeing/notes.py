"""The notes on an op: its name, its rule and where it ran, with the data to run it again.

A call of a torch function has a note, and each node of autograd's graph has one. A call may create
several nodes (`linear` with three axes: a product, a view, a transpose). An `autograd.Function`
creates one node, so its call and its node share a note.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from regrad.autodiff.custom_functions import unpack
from regrad.core import containers
from regrad.core.containers import replaced
from regrad.core.rule import place
from regrad.inspection.recorder import RuleKind, SeenOp
from regrad.torch.bridge import Bridge, alias, or_zeros, pulled
from regrad.torch.calls import Overridden, RuleCall
from regrad.torch.custom import Custom, CustomTorchCall, custom_grad
from regrad.torch.functions import Ruled
from regrad.torch.host import DisableTorchFunction
from regrad.torch.host.running import function_of
from regrad.torch.nodes import tensors
from regrad.torch.seeing.arrays import floats, is_float
from regrad.torch.seeing.names import named_tensors, spelled


class OpNote(SeenOp):
    """One op, as observed in the forward pass."""

    __slots__ = (
        "end", "func", "given", "inside", "leaves", "names", "origin", "override", "places",
        "rebuild", "ruled", "start",
    )  # fmt: skip
    kind: RuleKind

    def __init__(
        self, op_type: str, line: str = "", path: str = "", func: Any = None,
        origin: OpNote | None = None,
    ) -> None:  # fmt: skip
        super().__init__(op_type, line=line, path=path)
        # a torch function, an `autograd.Function`, or a `RuleCall` of regrad
        self.func: Any = func
        self.origin: OpNote | None = origin  # for a node: the note of the call that created it
        self.names: Sequence[str] = ()  # the names of the inputs, edge by edge
        self.given: Sequence[tuple[str, tuple[int, int]]] = ()  # for a call: names and sources
        self.start: int = 0  # for a call: the number of the next node before it, and after it
        self.end: int = 0
        self.inside: bool = False  # whether it ran in the forward pass of a Function
        self.override: RuleCall | None = None
        self.ruled: OpNote | None = None  # for a call: a Function inside with a custom rule

    @property
    def first(self) -> OpNote:
        """The note of the call that created the node; it has the arguments of the call."""
        return self.origin or self

    def name(self, edge: int) -> str:
        """Return the name of an input."""
        return self.names[edge] if edge < len(self.names) else f"input {edge}"

    # -- the rule of the op ----------------------------------------------------------------------

    def describe_function(self, node: Any) -> None:
        """Record the rule of the node of an `autograd.Function`.

        (The rule may change after the forward pass, because a scope binds its rule then.)
        """
        function = function_of(node)
        if _is_twin(function, Overridden):
            self._describe_override(node.known[0] if self.override is None else self.override, True)
        elif function is Ruled:
            self._describe_override(node.known[0], False)
        elif _is_twin(function, Custom):
            call = node.call
            self.op_type, self.kind, self.rule = call.name, "custom", place(call.f)
        elif _is_twin(function, Bridge):
            f = getattr(node.flat, "f", node.flat)
            self.op_type = getattr(f, "__name__", "from_regrad")
            self.kind, self.rule = "custom", place(f)
        elif not function.__module__.startswith("torch."):
            self.kind = "custom"
            rule = getattr(function, name_of_rule(function))
            self.rule = f"{function.__name__}.{place(rule)}"

    def _describe_override(self, call: RuleCall, named: bool) -> None:
        rule = call.rule.rule
        self.override = call
        self.kind = "override"
        self.rule: str = place(rule.function) if rule.function else call.rule.name
        if named:
            self.op_type: Any = spelled(call.rule.op.type)
        if not self.line and call.hit is not None:
            self.line: str = call.hit.where
        inputs = call.rule.op.inputs
        if call.layout is None and len(inputs) >= len(call.places) and named:
            self.names = [inputs[i].name for i in call.places if i < len(inputs)]

    # -- separate runs of the op -----------------------------------------------------------------

    def hold(self, args: Sequence[Any], options: Any) -> None:
        """Keep copies of the op's arguments, for a later run of the op."""
        self.rebuild: Any
        leaves, self.rebuild = containers.flatten((tuple(args), options or {}))
        self.places: list[int] = [
            i for i, x in enumerate(leaves) if is_float(x) and x.requires_grad
        ]
        with DisableTorchFunction():
            self.leaves: list[Any] = [
                x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves
            ]

    def hold_function(self, first: Any, args: Sequence[Any]) -> None:
        """Keep a Function's arguments; for a Function of regrad, the arguments of its call."""
        if isinstance(first, RuleCall):
            self.func: Any = first
            self.hold(args[1:], {})
        elif isinstance(first, CustomTorchCall):
            self.func = first
            holes = list(first.arguments.make())
            if all(isinstance(hole, containers.Hole) for hole in holes):  # (else it is lost)
                self.hold([args[2 + hole.number] for hole in holes], {})
        elif not self.func.__module__.startswith("regrad."):
            self.hold(args, {})

    @property
    def is_held(self) -> bool:
        """True if the op can run again."""
        return hasattr(self, "leaves")

    @property
    def xs(self) -> list[torch.Tensor]:
        """The tensors that the op differentiates."""
        return [self.leaves[i] for i in self.places]

    @property
    def input_names(self) -> list[str]:
        """The names of the tensors that the op differentiates."""
        if self.kind == "built-in":
            given = named_tensors(self.func, *self.rebuild(self.leaves))
        else:
            given = zip(self.names, tensors((self.leaves,)), strict=False)
        named = {id(x): name for name, x in given}
        return [named.get(id(x), f"input {i}") for i, x in zip(self.places, self.xs, strict=True)]

    @property
    def title(self) -> str:
        """The op with its rule, for a message."""
        return f"{self.rule} ({self.kind}) for {self.op_type}" if self.rule else self.op_type

    @property
    def where(self) -> dict[str, str]:
        return {"line": self.line, "path": self.path}

    def again(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the op separately, under its rule."""
        run = self.func
        if self.override is not None:  # (a scope that is still open must not count this run)
            call = copy.copy(self.override)
            call.hit = call.at = call.total = None
            run = partial(_without_modes, call)
        elif isinstance(run, CustomTorchCall):
            run = custom_grad(run.f)
        elif isinstance(run, type):
            run = run.apply
        return self._run(run, xs)

    def own(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the op separately, with torch's own gradient."""
        if self.override is not None:
            return self._run(partial(_without_modes, self.override.forward), xs)
        if isinstance(custom := self.func, CustomTorchCall):
            run = lambda *args: unpack(  # noqa: E731
                custom.custom.run(args, {}, _save_nothing), custom.name, torch.Tensor
            )[0]
            return self._run(run, xs)
        takes_ctx = self.func.setup_context is torch.autograd.Function.setup_context
        ctx: Any = FunctionCtx()  # (its content is unused)
        ctx.needs_input_grad = (True,) * len(self.rebuild(self.leaves)[0])
        first = (ctx,) if takes_ctx else ()
        return self._run(partial(self.func.forward, *first), xs)

    def _run(self, run: Callable[..., Any], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, options = self.rebuild(replaced(self.leaves, self.places, xs))
        return floats(run(*args, **options))

    def own_gradients(self, dys: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Return torch's own gradients of the op, for incoming gradients; None without a path."""
        xs = [x.detach().clone().requires_grad_() for x in self.xs]
        with torch.enable_grad():
            ys = self.own([alias(x) for x in xs])
            return pulled(ys, xs, [or_zeros(dy, y) for dy, y in zip(dys, ys, strict=False)])

    def true(self, dys: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
        """Return the same gradients by name, with zeros for None; empty if that is impossible."""
        if not self.is_held:
            return []
        try:
            found = self.own_gradients(dys)
        except Exception:  # autograd cannot differentiate the forward pass
            return []
        found = [or_zeros(dx, x) for dx, x in zip(found, self.xs, strict=True)]
        return list(zip(self.input_names, found, strict=True))


def name_of_rule(function: Any) -> str:
    """Return the name of an `autograd.Function`'s gradient method: `backward`, or `vjp`."""
    return "backward" if function.vjp is torch.autograd.Function.vjp else "vjp"


def _is_twin(function: Any, other: Any) -> bool:
    """Return whether a Function is this Function of regrad, or its twin in torch's older form."""
    return function.backward is other.backward


def _without_modes(run: Callable[..., Any], *xs: torch.Tensor) -> Any:
    """Run a call under a rule without modes, since its scope may still be open."""
    with DisableTorchFunction():
        return run(*xs)


def _save_nothing(*values: Any, **named: Any) -> None:
    pass
