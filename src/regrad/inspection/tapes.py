"""Tapes that tell where their records come from, and the run of a function under one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from regrad.autodiff.custom_calls import CustomRule
from regrad.autodiff.gradients import callable_or_raise, result, watched_inputs
from regrad.autodiff.variables import Variable, VariableTape
from regrad.core import containers
from regrad.core.callers import find_caller
from regrad.core.overrides import CountedRule
from regrad.core.pullback import pull_back, run_taped
from regrad.core.registry import Op
from regrad.core.rule import Conjugated, Rule, place
from regrad.core.tape import Record
from regrad.core.tensor import Tensor
from regrad.inspection.traces import RuleKind


class _Lines(list[Record]):
    """Records, with the line of the user's code that made each."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, str] = {}

    def append(self, record: Record) -> None:
        self.lines[id(record)] = find_caller()
        super().append(record)


class SeenTape(VariableTape):
    """A tape that knows the line of each record; what jit would run as one runs op by op."""

    __slots__ = ("cuts",)

    plain = False
    opens = True

    def __init__(self, only: list[Variable] | None = None) -> None:
        super().__init__(only)
        self.records: Any = _Lines()
        self.cuts: list[tuple[str, str]] = []  # ops that pass no gradient on: op type and line

    def admit(self, op: Op, rule: Rule, wanted: frozenset[int]) -> bool:
        if not rule.watches:
            self.cuts.append((op.type, find_caller()))
        return super().admit(op, rule, wanted)

    def line(self, record: Record) -> str:
        """The line of the user's code that ran the op."""
        return self.records.lines.get(id(record), "")  # pyright: ignore[reportAttributeAccessIssue]


class KeepingTape(SeenTape):
    """A tape whose records keep all inputs and outputs, too."""

    __slots__ = ()

    keeps_all = True


class Run:
    """One run of a function under a tape: its value, and what it was differentiated by."""

    def __init__(
        self, f: Callable[..., Any], args: Sequence[Any], tape: SeenTape, api: str,
        *, gradients: bool = False,
    ) -> None:  # fmt: skip
        callable_or_raise(f, api)
        self.tape = tape
        self.args = args
        self.aliases: list[Tensor]
        inputs, self.aliases, _ = watched_inputs(args, f"{api}(f)") if args else ((), [], None)
        tape.watched.update(x._id for x in self.aliases)
        self.forward = 0  # how many records the forward pass made

        def run(*inputs: Any) -> Any:
            value = f(*inputs)
            self.forward = len(tape.records)
            if gradients:  # whose ops the tape records as well
                y = result(value, api)
                watched = set(tape.watched)
                pull_back(tape, y, None, watched, again=True)
            return value

        try:
            self.value: Any = run_taped(tape, run, inputs)
        finally:
            self.watched: set[int] = tape.close()

    @property
    def y(self) -> Tensor:
        """The value as the Tensor whose gradient is taken."""
        return result(self.value, "trace_gradients")

    @property
    def sources(self) -> list[tuple[str, Tensor]]:
        """Return what it was differentiated by as (name, Tensor): arguments, then Variables."""
        paths = containers.paths(tuple(self.args), "args") if self.args else []
        named = list(zip(paths, self.aliases, strict=True))
        return [*named, *[(v.name, alias) for v, (_, alias) in self.tape.reads.items()]]


def bare_rule(rule: Rule) -> Rule:
    """A rule without what counts or conjugates for it."""
    while isinstance(rule, Conjugated | CountedRule):
        rule = rule.rule
    return rule


def kind_of(rule: Rule, record: Record) -> tuple[RuleKind, str]:
    """Whose rule a record has, and the rule's name and place; "" for one of the op's own."""
    rule = bare_rule(rule)
    if isinstance(rule, CustomRule):
        return "custom", place(rule.custom.f)
    if rule is record.op.rule or record.op.owns(rule):
        return "built-in", ""
    return "override", place(rule.function) if rule.function else rule.name


def op_type_of(record: Record) -> str:
    """The op type of a record; the own name of a region or a custom function."""
    return record.rule.name if record.op.type.startswith(("_", "Custom")) else record.op.type
