"""One call of a function with a custom gradient: its guard, its saved values, its rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from regrad.autodiff.custom_functions import (
    CustomFunction,
    SavedValues,
    asks_needs,
    only_input,
    unpack,
)
from regrad.autodiff.custom_nodes import custom_node
from regrad.autodiff.guards import UNSEEN, Guard
from regrad.autodiff.variables import Variable, VariableTape
from regrad.core import containers, dispatch
from regrad.core.backends import is_array
from regrad.core.registry import Input, Op
from regrad.core.rule import Cotangent, Pulled, Rule
from regrad.core.state import STATE, State, next_id, run_held
from regrad.core.tape import NO_ATTRS, Record, Tape, put
from regrad.core.tensor import Tensor, id_of, twin
from regrad.errors import GradientError, RuleError
from regrad.graph.graph import is_symbolic

CUSTOM = Op("CustomGrad", "custom_grad", lambda xp, x: x, [Input("x", "one")])
NOTHING: tuple[frozenset[int], bool] = frozenset(), False


class CustomRule(SavedValues, Rule):
    """The record of one call of a custom function: its saved values, and its gradient function.

    If nothing else is active, a call makes only this object.
    """

    __slots__ = ("count", "custom", "grad_func", "running", "saved", "short")

    op = CUSTOM

    grad_func: Callable[..., Any]
    scopes: Any = None  # the overrides that were active at the call
    form: Sequence[Any] | None = None  # the form of the arguments; None: each is a Tensor
    variables: Sequence[Variable] = ()  # the Variables that f reads, which are the last inputs
    nests = False  # whether one of the arguments is a container of Tensors
    rebuild: containers.Rebuild = staticmethod(containers.only)  # the structure of the value

    def __init__(self, custom: CustomFunction, count: int) -> None:
        # (not by SavedValues, which would be a second call for each call of a custom function)
        self.custom: CustomFunction = custom
        self.count: int = count  # the number of inputs
        self.short: Any = only_input if count == 1 else None
        self.saved: Any = ()
        self.running: bool = True

    def keep(self, value: Any) -> Any:
        return _copied(value)

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return NOTHING  # f itself has saved its values

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return False  # (unknown)

    @property
    def asks_needs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return whether the call depends on which gradients are needed."""
        if self.variables:
            return True
        return not self.custom.is_simple(self.grad_func) and asks_needs(self.grad_func)

    def answer(self, dy: Cotangent, needs: Callable[[], Any], holding: bool = True) -> Any:
        """Return the result of grad_func. Overrides do not apply to its ops.

        If grad_func itself differentiates a function (for example the model again), that function
        runs under the overrides that were active at the call.
        """
        if self.scopes is not None and holding:
            return run_held(self.scopes, self.answer, dy, needs, False)
        return self.custom.pull(self.grad_func, dy, self.saved, needs)

    def pull(self, record: Record, dy: Cotangent, wanted: Sequence[int]) -> Pulled:
        return enumerate(self.pulled(dy, record.inputs))

    def pulled(self, dy: Cotangent, wanted: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of the inputs. `wanted` is true for each needed gradient."""
        dy = dy if isinstance(dy, Tensor) else self.rebuild(dy)
        answer = self.answer(dy, lambda: self.arguments().needs(wanted[: self.count]))
        return self._by_variable(answer, wanted) if self.variables else self.per_input(answer)

    def _by_variable(self, answer: Any, wanted: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of the arguments, then of the Variables that f reads."""
        *first, more = answer if isinstance(answer, list | tuple) and answer else [answer]
        if not isinstance(more, Mapping):
            first, more = [*first, more], {}
        given = {v if isinstance(v, str) else id(v): dx for v, dx in more.items()}
        made = [*self.per_input(first)] if self.count else []
        names = [v.name for v in self.variables]
        if doubled := [name for name in names if names.count(name) > 1 and name in given]:
            raise self._wrong_keys(more, f"several Variables are called {doubled[0]!r}")
        for i, v in enumerate(self.variables):
            keys = [key for key in (id(v), v.name) if key in given]
            if not keys and wanted[self.count + i]:
                raise GradientError(
                    f"custom_grad: {self.describe()} closes over the Variable {v.name!r}, which is "
                    "being differentiated, and its gradient function returned no gradient for it. "
                    "Return the gradients of Variables by name, after the other gradients: [dx, "
                    f"{{{v.name!r}: dv}}] (None for no gradient), or use stop_gradient on it."
                )
            made.append(given.pop(keys[0]) if keys else None)
        if given:
            raise self._wrong_keys(more, f"it reads {', '.join(map(repr, names))}")
        return made

    def _wrong_keys(self, more: Mapping[Any, Any], why: str) -> RuleError:
        keys = ", ".join([repr(v if isinstance(v, str) else v.name) for v in more])
        return RuleError(
            f"wrong gradient: {self.describe()} returned gradients of Variables by the keys "
            f"{keys}, but {why}. Return one for each Variable that it reads, by its name or by the "
            "Variable itself."
        )

    def per_input(self, answer: Any) -> Sequence[Any]:
        """Return the answer of grad_func, one entry per input."""
        if not self.nests and type(answer) in (list, tuple) and len(answer) == self.count:
            for dx in answer:
                if not isinstance(dx, Tensor) and dx is not None:
                    break
            else:
                return answer
        return self.arguments().leaves(answer)

    def arguments(self) -> containers.Arguments:
        """Return the structure that the answer must have."""
        form = map(containers.Hole, range(self.count)) if self.form is None else self.form
        return self.custom.arguments(self.count, lambda: map(_unfolded, form))

    def input_name(self, leaf: int) -> str:
        if leaf >= self.count:
            return self.variables[leaf - self.count].name
        return self.arguments().names[leaf]


class CustomCall(CustomRule):
    """One call of a custom function, in any state: f runs under a guard, and is recorded."""

    grad_func: Callable[..., Any]
    rebuild: containers.Rebuild
    saved: Any
    scopes: Any
    again: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # the call, if inspected
    mark: int = 0  # f made the tensors with a newer id
    written: Any = None  # grad_func as its author wrote it, if another function calls it
    steps: Any = None  # the steps of the body around the call, if it is captured
    # the tapes that record the ops of f, with their numbers of records before the call
    seen: Mapping[Tape, int] = UNSEEN

    def __init__(self, custom: CustomFunction, inputs: tuple[Tensor, ...]) -> None:
        super().__init__(custom, len(inputs))
        self.inputs: tuple[Tensor, ...] = inputs  # until the call is recorded

    def take(self, variables: Sequence[Variable], inputs: tuple[Tensor, ...]) -> None:
        """Take the Variables that f has read as further inputs."""
        if variables:
            self.variables: Sequence[Variable] = variables
            self.short: Any = None
            self.inputs = inputs

    def on(self, inputs: tuple[Tensor, ...]) -> CustomCall:
        """Return the same call on other inputs."""
        other = copy(self)
        other.inputs, other.seen = inputs, UNSEEN
        return other

    def perform(self, run: Callable[[], Any], state: State | None) -> Any:
        """Run f (by `run`) in a state, and record its result as the output of one op."""
        capture = None
        if state is not None:
            self.scopes = None if state.overrides is None else state.scopes
            capture = None if state.region is None else state.region.capture
        if state is None or (capture is None and not state.tapes):
            self.mark = next_id()
            value, self.grad_func = unpack(run(), self.name)
            self.running: bool = False
            return value if type(value) is Tensor or not _is_in_graph(value) else self.placed(value)
        if capture is not None:
            return capture.custom(self, lambda: self.guarding(run, state), state)
        return self.recorded(self.guarding(run, state), state)

    def after(self, rule: CustomRule, mark: int, value: Any, state: State) -> Any:
        """Record f's result after a call that made only a rule."""
        self.grad_func, self.saved, self.mark = rule.grad_func, rule.saved, mark
        return self.recorded(value, state)

    def guarding(self, run: Callable[[], Any], state: State) -> Any:
        """Return the result of f, by `run`, while a guard checks it."""
        xs, outer = self.inputs, state.tapes
        if state.guard is not None:
            state.guard.check(CUSTOM, xs)
        # The tapes outside of the innermost tape that watches an input record the ops of f, because
        # a saved intermediate has its own derivative at the next order. For the tapes further in,
        # grad_func defines the gradient.
        for i in range(len(outer) - 1, -1, -1):
            # (f may read Variables that a tape watches)
            region = state.region is not None and outer[i] in state.region.tapes
            reads = region or isinstance(outer[i], VariableTape)
            if reads or not outer[i].watched.isdisjoint(map(id_of, xs)):
                outer = outer[:i]
                break
        if outer:
            self.seen = {tape: len(tape.entries) for tape in outer}
        guard = Guard()
        guard.outer = state.guard
        guard.state, guard.steps = state, self.steps
        self.mark = guard.begin(self.custom, xs, state.tapes, self.seen)
        try:
            STATE.set(State(outer, state.overrides, guard, state.region))
            value, self.grad_func = unpack(run(), self.name)
            if not _is_in_graph(value):
                guard.check(CUSTOM, containers.flatten(value)[0])
            self.take(guard.variables, guard.inputs)
        finally:
            guard.end()
            self.running = False
            STATE.set(state)
        return value

    def recorded(self, value: Any, state: State) -> Any:
        """Return the value as the output of one record on the tapes that watch an input."""
        if type(value) is Tensor:
            y = outputs = self.adopted(value)
        elif _is_in_graph(value):
            outputs = self.placed(value)
            y = outputs if isinstance(outputs, Tensor) else tuple(containers.flatten(outputs)[0])
        else:
            leaves, self.rebuild = containers.flatten(value)
            first = {id(leaf): i for i, leaf in reversed([*enumerate(leaves)])}
            y = tuple(
                self.adopted(leaf) if first[id(leaf)] == i else dispatch.rename(leaf)
                for i, leaf in enumerate(leaves)
            )
            outputs = self.rebuild(y)
        inputs = self.inputs
        self.inputs, self.seen = (), UNSEEN  # only saved values stay alive
        put(state, CUSTOM, self, inputs, NO_ATTRS, y)
        return outputs

    def placed(self, value: Any) -> Any:
        """Return the value as the output of one node of the graph.

        As in `adopted`, a tensor that f made becomes the output.
        """
        leaves, self.rebuild = containers.flatten(value)
        inner = [dispatch.alias_of(leaf) for leaf in leaves]
        outputs = custom_node(
            self.name, inner, self.inputs, self.pulled, self.mark, self.input_name,
            self.written or self.grad_func, asks_needs=self.asks_needs,
        )  # fmt: skip
        pairs = {id(leaf): (leaf, y) for leaf, y in zip(leaves[::-1], outputs[::-1], strict=True)}
        for leaf, y in pairs.values():  # a tensor that is returned twice becomes the first output
            if leaf._id > self.mark:
                self.set_apart(leaf)
                leaf._data, leaf._id = y._data, y._id
        return self.rebuild(list(outputs))

    def adopted(self, y: Tensor) -> Tensor:
        """Return the tensor that f returned, as the output of the custom op.

        A tensor that f made gets a new id and so *becomes* the output: where grad_func uses
        it, higher orders differentiate it by the custom rule. An older tensor gets an alias.
        """
        if y._id > self.mark and all(y is not x for x in self.inputs):
            self.set_apart(y)
            y._id = next_id()
            return y
        return dispatch.alias_of(y)

    def set_apart(self, y: Tensor) -> None:
        """Replace y in the records of f's ops, which keep it for their rules, by a stable Tensor.

        For these records it stays the result of f's own op, at all orders.
        """
        if not self.seen:
            return
        own = twin(y)
        for tape, begin in self.seen.items():
            for record in tape.entries[begin:]:  # (under a guard none of them are columns)
                record.replace(y, own)


def _unfolded(entry: Any) -> Any:
    """Return the form of an argument for `containers.Arguments`."""
    return containers.nested(entry[0], iter(entry[1])) if type(entry) is tuple else entry


def _copied(value: object) -> Any:
    """Return a value to save. Arrays are copied, because their owner may change them."""
    return dispatch.lift(value) if type(value) is not Tensor and is_array(value) else value


def _is_in_graph(value: object) -> bool:
    if isinstance(value, Tensor):
        return is_symbolic(value)
    return any(is_symbolic(leaf) for leaf in containers.flatten(value)[0])
