"""`custom_grad`: a function whose gradient its author gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from types import SimpleNamespace
from typing import Any

from regrad import containers, dispatch
from regrad.errors import ArgumentError, GradientError, RuleError, kind
from regrad.gradients import callable_or_raise
from regrad.namespaces import is_array
from regrad.registry import Input, Op, Rule, parameters, place
from regrad.state import State, current, in_state, next_id
from regrad.tape import Tape
from regrad.tensor import Tensor
from regrad.variable import Variable

CUSTOM = Op("CustomGrad", "custom_grad", lambda xp, x: x, [Input("x", "one")])


def custom_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a gradient of your own.

    Args:
        f: `f(*inputs, save)` returns `{"value": y, "grad_func": g}`, a pair `(y, g)`, or a
            named tuple with these fields. `y` is a Tensor or a container of Tensors. `save`
            may be left out; it is given by keyword if f names it, else last.

    `g(dy, saved)`, or `g(dy)`, gives the gradient by each input: a Tensor of the input's
    shape and dtype, or a list with one entry per input; None means no gradient. `dy` has the
    structure of `y`. `save([a, b])` keeps tensors for g as `saved[0]`, `saved[1]`;
    `save(a=a)` as `saved.a`. Tensors and arrays among the arguments (also inside containers)
    are the inputs; everything else passes through.

    The ops inside f do not count for the gradient of the value. What is saved, or what g
    closes over, keeps its own history, and g may use any op, custom ones included, so
    derivatives of every order are what the code of g says.

    Raises:
        ArgumentError: f does not return a value and a gradient function; `save` is misused.
        GradientError: f closes over a tensor or Variable that is being differentiated
            instead of taking it as an input.
        RuleError: g returns the wrong number, kind, shape or dtype of gradients.

    Source: `tf.customGrad` of TensorFlow.js.

    >>> import regrad as rg
    >>> @rg.custom_grad
    ... def square(a, save):
    ...     save([a])
    ...     return {"value": a.square(), "grad_func": lambda dy, saved: dy * abs(saved[0])}
    >>> rg.grad(square)(rg.tensor([0.0, -1.0, 2.0])).print()
    Tensor
        [0, 1, 2]
    """
    callable_or_raise(f, "custom_grad")
    saving = _saving(f)
    name = getattr(f, "__name__", type(f).__name__)

    def op(*args: Any, **options: Any) -> Any:
        state = current()
        inputs, args = _inputs(args)
        _check_options(options, name)
        save = Save(name)
        if saving(len(args)) == "last":
            given: tuple[Any, ...] = (*args, save)
        else:
            given = args
            if saving(len(args)) == "keyword":
                options = {**options, "save": save}
        if state is None or not state.tapes:
            return unpack(f(*given, **options), name)[0]
        return _recorded(state, f, name, inputs, given, options, save)

    return update_wrapper(op, f) if hasattr(f, "__name__") else op


def _saving(f: Callable[..., Any]) -> Callable[[int], str]:
    """How f takes `save`, given the number of its other positional arguments."""
    import inspect

    try:
        parameters = inspect.signature(f).parameters.values()
    except ValueError:
        return lambda count: "not"
    if any(p.name == "save" and p.kind is not p.POSITIONAL_ONLY for p in parameters):
        return lambda count: "keyword"
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return lambda count: "last"
    positional = (0, 1)  # POSITIONAL_ONLY, POSITIONAL_OR_KEYWORD
    due = sum(p.kind in positional and p.default is p.empty for p in parameters)
    return lambda count: "last" if due == count + 1 else "not"


def _inputs(args: tuple[Any, ...]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The tensors among the arguments, and the arguments with these in their places."""
    inputs: list[Tensor] = []
    given = []
    for arg in args:
        if type(arg) is Tensor:
            inputs.append(arg)
            given.append(arg)
        else:
            given.append(_opened(arg, inputs))
    return inputs, tuple(given)


def _opened(arg: Any, inputs: list[Tensor]) -> Any:
    """An argument with its arrays and Variables as Tensors, each noted as an input."""
    leaves, rebuild = containers.flatten(arg)
    out = []
    for leaf in leaves:
        if isinstance(leaf, Tensor | Variable) or is_array(leaf):
            leaf = dispatch.lift(leaf)
            inputs.append(leaf)
        out.append(leaf)
    return rebuild(out)


def _check_options(options: Mapping[str, Any], name: str) -> None:
    state = current()
    tapes = state.tapes if state is not None else ()
    for key, value in options.items():
        for leaf in containers.flatten(value)[0] if tapes else ():
            if isinstance(leaf, Tensor) and any(leaf._id in t.watched for t in tapes):
                raise GradientError(
                    f"custom_grad: {name} got the keyword argument {key!r}, a Tensor that is being "
                    "differentiated; keywords are constants. Pass it by position."
                )


def _recorded(
    state: State,
    f: Callable[..., Any],
    name: str,
    inputs: Sequence[Tensor],
    given: tuple[Any, ...],
    options: Mapping[str, Any],
    save: Save,
) -> Any:
    """Run f with the tapes off that its gradient function speaks for, and record it as one op."""
    ids = {x._id for x in inputs}
    watching = [i for i, tape in enumerate(state.tapes) if not tape.watched.isdisjoint(ids)]
    outer = state.tapes[: watching[-1]] if watching else state.tapes
    guard = Guard(f, name, next_id(), ids, state.tapes)
    if state.guard is not None:
        state.guard.check(CUSTOM, inputs)
    with in_state(State(outer, state.overrides, guard)):
        value, grad_func = unpack(f(*given, **options), name)
    save.closed = True
    leaves, rebuild = containers.flatten(value)
    outputs = tuple(_adopted(leaf, guard.mark, ids, name) for leaf in leaves)
    if watching:
        y = outputs[0] if rebuild is containers.only else outputs
        rule = CustomRule(name, f, grad_func, save, rebuild, len(inputs))
        _put(state, rule, tuple(inputs), y)
    return rebuild(outputs)


def _put(state: State, rule: CustomRule, inputs: tuple[Tensor, ...], y: Any) -> None:
    dispatch.put(state, CUSTOM, rule, inputs, dispatch.NO_ATTRS, y, None)


def _adopted(y: Tensor, mark: int, inputs: set[int], name: str) -> Tensor:
    """The tensor that f returned, as the output of the custom op.

    A tensor that f made gets a new id and so *becomes* the output: where grad_func uses it,
    higher orders differentiate it by the custom rule. One that existed before gets an alias.
    """
    if y._id > mark and y._id not in inputs:
        y._id = next_id()
        return y
    return dispatch.alias_of(y)


class Guard:
    """Refuses differentiated tensors that f closes over instead of taking as inputs."""

    __slots__ = ("f", "inputs", "mark", "name", "tapes")

    def __init__(
        self, f: Any, name: str, mark: int, inputs: set[int], tapes: Sequence[Tape]
    ) -> None:
        self.f = f
        self.name = name
        self.mark = mark
        self.inputs = inputs
        self.tapes = tapes

    def check(self, op: Op, xs: Iterable[Tensor]) -> None:
        for x in xs:
            i = x._id
            if (
                0 < i < self.mark
                and i not in self.inputs
                and any(i in tape.watched for tape in self.tapes)
            ):
                called = _name_of(self.f, x) or f"{kind(x)} (in the op {op.type!r})"
                raise self.error(called)

    def check_variable(self, variable: Variable) -> None:
        if any(tape.wants(variable) for tape in self.tapes):
            raise self.error(f"the Variable {variable.name!r}")

    def error(self, called: str) -> GradientError:
        return GradientError(
            f"custom_grad: {self.name} ({place(self.f)}) closes over {called}, which is being "
            "differentiated; its gradient would be lost. Pass it as an input of its own, for "
            "which grad_func gives a gradient too, or use stop_gradient on it."
        )


def _name_of(f: Any, x: Tensor) -> str | None:
    """What f calls a tensor that it closes over."""
    code = getattr(f, "__code__", None)
    if code is None:
        return None
    cells = zip(code.co_freevars, f.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            if cell.cell_contents is x:
                return repr(name)
        except ValueError:  # an empty cell
            continue
    return next((repr(n) for n in code.co_names if f.__globals__.get(n) is x), None)


class Save:
    """What f calls to keep tensors for its gradient function."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.saved: Any = Saved()

    def __call__(self, *tensors: Any, **named: Any) -> None:
        if self.closed:
            raise ArgumentError(
                f"custom_grad: save was called after {self.name} had returned; call it inside f"
            )
        if named and not tensors:
            self.saved = SimpleNamespace(**named)
        elif not named and len(tensors) == 1 and isinstance(tensors[0], list | tuple):
            self.saved = Saved(tensors[0])
        else:
            raise ArgumentError(
                f"custom_grad: in {self.name}, save takes one list or keywords: save([a, b]) "
                f"gives saved[0] and saved[1], save(a=a) gives saved.a; got "
                f"{', '.join([*map(kind, tensors), *named])}"
            )


class Saved(tuple[Any, ...]):
    """The saved values in order; asking for one that was not saved says so."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            raise ArgumentError(
                f"custom_grad: grad_func asks for saved[{index}], but f saved {len(self)} "
                "values. Call save([...]) in f with all that grad_func needs."
            ) from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ArgumentError(
            f"custom_grad: grad_func asks for saved.{name}, but f saved a list of {len(self)}. "
            f"Call save({name}=...) in f, or use saved[0]."
        )


def unpack(answer: Any, name: str) -> tuple[Any, Callable[..., Any]]:
    """`(value, grad_func)` from what f returned."""
    due = (
        f"custom_grad: {name} must return {{'value': y, 'grad_func': g}} or (y, g) with a Tensor "
        "(or a container of them) and a function"
    )
    if isinstance(answer, dict) and answer.keys() == {"value", "grad_func"}:
        value, grad_func = answer["value"], answer["grad_func"]
    elif hasattr(answer, "value") and hasattr(answer, "grad_func"):
        value, grad_func = answer.value, answer.grad_func
    elif isinstance(answer, tuple | list) and len(answer) == 2:
        value, grad_func = answer
    elif isinstance(answer, dict):
        raise ArgumentError(f"{due}; got a dict with the keys {sorted(map(str, answer))}")
    else:
        raise ArgumentError(f"{due}; got {kind(answer)}")
    if not callable(grad_func):
        raise ArgumentError(f"{due}; its grad_func is {kind(grad_func)}")
    leaves = [value] if type(value) is Tensor else containers.flatten(value)[0]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise ArgumentError(f"{due}; its value holds {kind(leaf)}")
    if not leaves:
        raise ArgumentError(f"{due}; its value is empty")
    return value, grad_func


class CustomRule(Rule):
    """The gradient function of one call of a custom op."""

    __slots__ = ("count", "f", "grad_func", "name", "rebuild", "save")

    def __init__(
        self,
        name: str,
        f: Callable[..., Any],
        grad_func: Callable[..., Any],
        save: Save,
        rebuild: containers.Rebuild,
        count: int,
    ) -> None:
        self.name = f"{name}.grad_func"
        self.f = f
        self.grad_func = grad_func
        self.save = save
        self.rebuild = rebuild
        self.count = count

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return False  # nobody can know

    def pull(self, record: Any, dy: Any, wanted: Sequence[bool]) -> Iterable[tuple[int, Any]]:
        if isinstance(dy, tuple):
            dy = self.rebuild(dy)
        if takes_saved(self.grad_func):
            answer = self.grad_func(dy, self.save.saved)
        else:
            answer = self.grad_func(dy)
        return enumerate(self.per_input(answer))

    def per_input(self, answer: Any) -> Sequence[Any]:
        """The gradient function's answer, one entry per input."""
        if type(answer) is Tensor and self.count == 1:
            return (answer,)
        given = answer if isinstance(answer, list | tuple) else [answer]
        if len(given) != self.count:
            given = _open(answer)
        if len(given) != self.count:
            raise RuleError(
                f"wrong number of gradients: {self.name} ({place(self.f)}) returned {len(given)}, "
                f"and the function has {self.count} tensor inputs. Return a list with one "
                "gradient per input, in order, or None for an input without one."
            )
        return given


def _open(answer: Any) -> list[Any]:
    """Gradients by argument, opened leaf by leaf; None stays."""
    if answer is None or type(answer) is Tensor:
        return [answer]
    import optree

    return optree.tree_leaves(answer, none_is_leaf=True)


def takes_saved(grad_func: Callable[..., Any]) -> bool:
    """Whether a gradient function wants what was saved beside dy."""
    code = getattr(grad_func, "__code__", None)
    if code is None:
        return len(parameters(grad_func)) != 1
    bound = hasattr(grad_func, "__self__")
    return code.co_argcount - bound != 1
