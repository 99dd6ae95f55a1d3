"""`custom_grad`: a function whose gradient its author gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from inspect import CO_VARARGS
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from regrad.autodiff.custom_nodes import custom_node
from regrad.autodiff.gradients import callable_or_raise
from regrad.autodiff.variables import Variable
from regrad.core import containers, dispatch
from regrad.core.backends import is_array
from regrad.core.registry import Input, Op
from regrad.core.rule import Rule, place
from regrad.core.signatures import misfit, parameters_of, public
from regrad.core.state import STATE, State, current, next_id, run_held
from regrad.core.tape import NO_ATTRS, Tape, put
from regrad.core.tensor import Tensor, TensorView, id_of, twin
from regrad.errors import ArgumentError, GradientError, kind
from regrad.graph.graph import is_symbolic

if TYPE_CHECKING:
    from regrad.core.rule import Cotangent
    from regrad.core.tape import Record
    from regrad.transforms.region import Region

CUSTOM = Op("CustomGrad", "custom_grad", lambda xp, x: x, [Input("x", "one")])
NOTHING: tuple[frozenset[int], bool] = frozenset(), False
UNSEEN: Mapping[Tape, int] = {}


@public
def custom_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a gradient of your own.

    Args:
        f: `f(*inputs, save)` returns `{"value": y, "grad_func": g}`, a pair `(y, g)`, or a
            named tuple with these fields. `y` is a Tensor or a container of Tensors. `save`
            may be left out; it is given by keyword if f names it, else last.

    Tensors and arrays among the arguments, also inside containers, are the inputs; everything
    else passes through. `g(dy, saved)`, or `g(dy)`, gives the gradients as a list with one entry
    per argument that holds tensors, in order. An entry has its argument's structure, with
    Tensors of the inputs' shapes and dtypes: for `{"w": w, "b": b}` a dict with these keys (a
    list and a tuple are alike). None, for an argument or any part of it, means no gradient. If
    there is only one such argument, its entry alone will do. `dy` has the structure of `y`.
    `save([a, b])` keeps tensors for g as `saved[0]`, `saved[1]`; `save(a=a)` as `saved.a`.

    The ops inside f do not count for the gradient of the value. What is saved, or what g
    closes over, keeps its own history, and g may use any op, custom ones included, so
    derivatives of every order are what the code of g says.

    Raises:
        ArgumentError: f does not return a value and a gradient function; `save` is misused.
        GradientError: f closes over a tensor or Variable that is being differentiated
            instead of taking it as an input.
        RuleError: g returns gradients of the wrong structure, kind, shape or dtype.

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
    saving = Saving(f)
    name = getattr(f, "__name__", type(f).__name__)

    def op(*args: Any, **options: Any) -> Any:
        inputs, form = args, None
        for arg in args:
            if type(arg) is not Tensor:
                inputs, args, form = _inputs(args)
                break
        state = current()
        if state is not None and state.region is not None:  # f is to see what stands in there
            inputs, args = _inside(state.region, inputs, args)
        if options:
            _check_options(options, name)
        call = CustomCall(f, name, inputs)
        if form is not None:
            call.form = form
            call.nests = tuple in map(type, form)
        if state is not None and state.tape is None and state.inspected:
            call.again = op, args, dict(options)
        how = saving[len(args)]
        if how == "keyword":
            options["save"] = call.save
        elif how == "last":
            args = (*args, call.save)
        if state is not None and state.tape is not None and state.region is None:
            return call.recorded(call.guarding(state, f, args, options), state)
        return call.perform(f, args, options, state)

    return update_wrapper(op, f) if hasattr(f, "__name__") else op


class Saving(dict[int, str]):
    """How f takes `save`, by the number of its other positional arguments."""

    def __init__(self, f: Callable[..., Any]) -> None:
        try:
            self.parameters = list(inspect.signature(f).parameters.values())
        except ValueError:
            self.parameters = []

    def __missing__(self, count: int) -> str:
        self[count] = how = self._find(count)
        return how

    def _find(self, count: int) -> str:
        if any(p.name == "save" and p.kind is not p.POSITIONAL_ONLY for p in self.parameters):
            return "keyword"
        if any(p.kind is p.VAR_POSITIONAL for p in self.parameters):
            return "last"
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        due = sum(p.kind in positional and p.default is p.empty for p in self.parameters)
        return "last" if due == count + 1 else "not"


def _inputs(args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...], list[Any]]:
    """The tensors among the arguments, the arguments with these in their places, and their form.

    The form tells of each argument where it holds tensors: a Hole, or a structure of optree's and
    the Holes among its leaves; None if it holds none.
    """
    inputs: list[Tensor] = []
    given, form = [], []
    for arg in args:
        if type(arg) is Tensor:
            form.append(containers.Hole(len(inputs)))
            inputs.append(arg)
        elif type(arg) in dispatch.NUMBERS:
            form.append(None)
        else:
            arg, entry = _opened(arg, inputs)
            form.append(entry)
        given.append(arg)
    return tuple(inputs), tuple(given), form


def _opened(arg: Any, inputs: list[Tensor]) -> tuple[Any, Any]:
    """An argument with its arrays and Variables as Tensors, each noted as an input; its form."""
    leaves, rebuild, spec = containers.opened(arg)
    slots: list[Any] = [None] * len(leaves)
    for i, leaf in enumerate(leaves):
        if dispatch.is_tensor(leaf) or is_array(leaf):
            slots[i] = containers.Hole(len(inputs))
            leaves[i] = dispatch.lift(leaf)
            inputs.append(leaves[i])
    if not any(slots):
        return arg, None  # itself, not a copy: f may write to it
    return rebuild(leaves), slots[0] if spec.is_leaf() else (spec, slots)


def _unfolded(entry: Any) -> Any:
    """The form of an argument as `containers.Arguments` takes it."""
    return containers.nested(entry[0], iter(entry[1])) if type(entry) is tuple else entry


def _inside(
    region: Region, inputs: tuple[Tensor, ...], args: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Inputs and arguments as they are in a region: outer Tensors by their stand-ins."""
    entered = tuple(map(region.enter, inputs))
    given = {id(x): y for x, y in zip(inputs, entered, strict=True) if x is not y}
    if not given:
        return inputs, args

    def inside(arg: Any) -> Any:
        leaves, rebuild = containers.flatten(arg)
        if given.keys().isdisjoint(map(id, leaves)):
            return arg  # itself, not a copy: f may write to it
        return rebuild([given.get(id(leaf), leaf) for leaf in leaves])

    return entered, tuple(map(inside, args))


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


def _copied(value: object) -> Any:
    """A value to be saved; arrays are copied, because their owner may change them."""
    return dispatch.lift(value) if type(value) is not Tensor and is_array(value) else value


class Saves:
    """What a custom function's `save` keeps for its gradient function."""

    name: str
    running = True
    saved: Any = ()

    def keep(self, value: Any) -> Any:
        """A value as it is kept."""
        return value

    def save(self, *tensors: Any, **named: Any) -> None:
        """Keep tensors for grad_func; of several calls the last counts, as in TensorFlow.js."""
        if not self.running:
            raise ArgumentError(
                f"custom_grad: save was called after {self.name} had returned; call it inside f"
            )
        if len(tensors) == 1 and isinstance(tensors[0], list | tuple) and not named:
            self.saved = tuple([self.keep(t) for t in tensors[0]])
        elif named and not tensors:
            self.saved = SimpleNamespace(**{k: self.keep(t) for k, t in named.items()})
        else:
            raise ArgumentError(
                f"custom_grad: in {self.name}, save takes one list or keywords: save([a, b]) "
                f"gives saved[0] and saved[1], save(a=a) gives saved.a; got "
                f"{', '.join([*map(kind, tensors), *named]) or 'nothing'}"
            )


class CustomCall(Saves, Rule):
    """One call of a custom op, in its three parts.

    While f runs it is the *guard*, which refuses differentiated tensors that f closes over;
    its `save` keeps what f asks for; afterwards it is the *rule* of the record.
    """

    grad_func: Callable[..., Any]
    again: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # the call, if inspected
    outer: CustomCall | None = None  # the call inside whose f this one was made
    seen = UNSEEN  # the tapes that see what f does, with their numbers of records before it
    scopes: Any = None  # the overrides in force at the call
    form: Sequence[Any] | None = None  # of the arguments; None: each is a Tensor
    nests = False  # whether one of the arguments is a container of Tensors
    rebuild = staticmethod(containers.only)

    def __init__(self, f: Callable[..., Any], name: str, inputs: tuple[Tensor, ...]) -> None:
        self.f = f
        self.name = name
        self.inputs = inputs
        self.count = len(inputs)

    def keep(self, value: Any) -> Any:
        return _copied(value)

    def on(self, inputs: tuple[Tensor, ...]) -> CustomCall:
        """The same call on other inputs."""
        other = CustomCall.__new__(CustomCall)
        vars(other).update(vars(self))
        other.inputs, other.tapes, other.seen, other.outer = inputs, (), UNSEEN, None
        return other

    def perform(
        self, f: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any],
        state: State | None,
    ) -> Any:  # fmt: skip
        """Run f in a state, and record what it returns as the output of one op."""
        capture = None
        if state is not None:
            self.scopes = None if state.overrides is None else state.scopes
            capture = None if state.region is None else state.region.capture
        if state is None or (capture is None and not state.tapes):
            self.mark = next_id()
            value, self.grad_func = unpack(f(*args, **options), self.name)
            self.running = False
            return value if type(value) is Tensor or not _is_in_graph(value) else self.placed(value)
        if capture is not None:
            return capture.custom(self, lambda: self.guarding(state, f, args, options), state)
        return self.recorded(self.guarding(state, f, args, options), state)

    def guarding(
        self, state: State, f: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """What f returns, while this call is the guard."""
        inner = self.guarded(state)
        try:
            STATE.set(inner)
            value, self.grad_func = unpack(f(*args, **options), self.name)
        finally:
            inner.guard = None
            self.running = False
            STATE.set(state)
            if state.spare is None:
                state.spare = [inner]
            else:
                state.spare.append(inner)
        return value

    # -- the guard ---------------------------------------------------------------------------

    def guarded(self, state: State) -> State:
        """The state for f: the tapes outside the innermost one that watches an input.

        For those further in grad_func speaks; those outside see what f does, because a saved
        intermediate has a derivative of its own at the next order.
        """
        self.outer = state.guard
        if self.outer is not None:
            self.outer.check(CUSTOM, self.inputs)
        self.tapes = outer = state.tapes
        self.mark = next_id()
        for i in range(len(outer) - 1, -1, -1):
            if not outer[i].watched.isdisjoint(map(id_of, self.inputs)):
                outer = outer[:i]
                break
        if outer:
            self.seen = {tape: len(tape.records) for tape in outer}
        return state.guarded(outer, self)

    def check(self, op: Op, xs: Iterable[Tensor]) -> None:
        """Refuse inputs of an op that f closes over while a tape watches them."""
        for x in xs:
            i = x._id
            if i >= self.mark or i <= 0:
                continue
            for given in self.inputs:
                if x is given:
                    break
            else:
                if not any(i in tape.watched for tape in self.tapes):
                    continue
                raise self.closes_over(_name_of(self.f, x) or f"{kind(x)} (in the op {op.type!r})")
        if self.outer is not None:
            self.outer.check(op, xs)

    def loses(self, value: Tensor) -> None:
        """A value that f made is assigned to a Variable: the tapes that do not see f lose it."""
        if value._id > self.mark:
            for tape in self.tapes:
                if tape not in self.seen:
                    tape.lost = {*(tape.lost or ()), value._id}
        if self.outer is not None:
            self.outer.loses(value)

    def check_variable(self, variable: Variable) -> None:
        """Refuse a read of a Variable that a tape watches."""
        if any(tape.wants(variable) for tape in self.tapes):
            raise self.closes_over(f"the Variable {variable.name!r}")
        if self.outer is not None:
            self.outer.check_variable(variable)

    def closes_over(self, called: str) -> GradientError:
        return GradientError(
            f"custom_grad: {self.name} ({place(self.f)}) closes over {called}, which is being "
            "differentiated; its gradient would be lost. Pass it as an input of its own, for "
            "which grad_func gives a gradient too, or use stop_gradient on it."
        )

    # -- the rule ----------------------------------------------------------------------------

    def recorded(self, value: Any, state: State) -> Any:
        """The value as the output of one record on the tapes that watch an input."""
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
        self.inputs = self.tapes = ()  # only what was saved is kept
        self.seen, self.outer = UNSEEN, None
        if state.tape is not None and len(inputs) == 1 and type(y) is Tensor:
            x, tape = inputs[0], state.tape
            if x._id in tape.watched:
                data = x._data
                spec = ((data.shape, data.dtype),)
                tape.write(CUSTOM, self, NO_ATTRS, (x._id,), spec, (), y._id, None)
        else:
            put(state, CUSTOM, self, inputs, NO_ATTRS, y)
        return outputs

    def placed(self, value: Any) -> Any:
        """The value as the output of one node of the graph.

        As `adopted` says, a tensor that f made becomes the output.
        """
        leaves, self.rebuild = containers.flatten(value)
        inner = [dispatch.alias_of(leaf) for leaf in leaves]
        outputs = custom_node(
            self.name, inner, self.inputs, lambda dys: self.per_input(self.answer(self.given(dys))),
            self.mark, self.input_name,
        )  # fmt: skip
        pairs = {id(leaf): (leaf, y) for leaf, y in zip(leaves[::-1], outputs[::-1], strict=True)}
        for leaf, y in pairs.values():  # one that is returned twice becomes the first output
            if leaf._id > self.mark:
                self.set_apart(leaf)
                leaf._data, leaf._id = y._data, y._id
        return self.rebuild(list(outputs))

    def given(self, dys: tuple[Tensor, ...]) -> Any:
        """The gradients that arrive, in the structure of the value."""
        return self.rebuild(list(dys))

    def adopted(self, y: Tensor) -> Tensor:
        """The tensor that f returned, as the output of the custom op.

        A tensor that f made gets a new id and so *becomes* the output: where grad_func uses
        it, higher orders differentiate it by the custom rule. An older one gets an alias.
        """
        if y._id > self.mark:
            self.set_apart(y)
            y._id = next_id()
            return y
        self.check(CUSTOM, (y,))
        return dispatch.alias_of(y)

    def set_apart(self, y: Tensor) -> None:
        """Leave the ops of f, which have kept y for their rules, a Tensor that does not change.

        To them it stays what f's own op made, at all orders.
        """
        if not self.seen:
            return
        own = twin(y)
        for tape, begin in self.seen.items():
            for record in tape.records[begin:]:
                record.replace(y, own)

    def keeps(self, wanted: frozenset[int]) -> tuple[frozenset[int], bool]:
        return NOTHING  # what is kept is what f saved

    def linear_in(self, wanted: frozenset[int]) -> bool:
        return False  # nobody can know

    def answer(self, dy: Cotangent, holding: bool = True) -> Any:
        """What grad_func says, by ops that no override concerns (the walk, which asks, is masked).

        It may take what was saved beside dy, or leave it. A function that it differentiates in its
        turn (the model again, say) runs under the overrides that were in force at the call.
        """
        if self.scopes is not None and holding:
            return run_held(self.scopes, self.answer, dy, False)
        grad_func = self.grad_func
        if not takes_saved(grad_func):
            return grad_func(dy)
        try:
            return grad_func(dy, self.saved)
        except (IndexError, AttributeError) as error:
            trace = error.__traceback__
            if trace is None or trace.tb_next is None or trace.tb_next.tb_next is not None:
                raise  # from deeper down
            raise ArgumentError(
                f"custom_grad: {self.name} failed with {error!r}. What f saved is "
                f"{_described(self.saved)}: call save([a, b]) in f for saved[0] and saved[1], or "
                "save(a=a) for saved.a."
            ) from error

    @property
    def pulls(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride] (read only)
        return (self.pull_only,) if self.count == 1 else None

    def pull_only(self, record: Record, dy: Cotangent) -> Any:
        """The gradient by the only input."""
        answer = self.answer(dy)
        if isinstance(answer, Tensor) and not self.nests:
            return answer
        return self.per_input(answer)[0]

    def pull(
        self, record: Record, dy: Cotangent, wanted: Sequence[int]
    ) -> Iterable[tuple[int, Any]]:
        answer = self.answer(dy if isinstance(dy, Tensor) else self.rebuild(dy))
        return enumerate(self.per_input(answer))

    def per_input(self, answer: Any) -> Sequence[Any]:
        """What grad_func answered, one entry per input."""
        if not self.nests and type(answer) in (list, tuple) and len(answer) == self.count:
            for dx in answer:
                if not isinstance(dx, Tensor) and dx is not None:
                    break
            else:
                return answer
        return self.arguments().leaves(answer)

    def arguments(self) -> containers.Arguments:
        """The structure that the answer must have."""
        form = map(containers.Hole, range(self.count)) if self.form is None else self.form
        return containers.Arguments(self.f, self.name, self.count, lambda: map(_unfolded, form))

    def input_name(self, leaf: int) -> str:
        return self.arguments().names[leaf]


# -- in a graph ----------------------------------------------------------------------------------


def _is_in_graph(value: object) -> bool:
    if isinstance(value, Tensor):
        return is_symbolic(value)
    return any(is_symbolic(leaf) for leaf in containers.flatten(value)[0])


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


def unpack(answer: Any, name: str, array: type = Tensor) -> tuple[Any, Callable[..., Any]]:
    """`(value, grad_func)` from what f returned; the value holds arrays of this type."""
    if type(answer) is dict and len(answer) == 2 and "value" in answer and "grad_func" in answer:
        value, grad_func = answer["value"], answer["grad_func"]
    elif isinstance(answer, dict):
        raise _not_a_pair(name, f"got a dict with the keys {sorted(map(str, answer))}")
    elif hasattr(answer, "value") and hasattr(answer, "grad_func"):
        value, grad_func = answer.value, answer.grad_func
    elif isinstance(answer, tuple | list) and len(answer) == 2:
        value, grad_func = answer
    else:
        raise _not_a_pair(name, f"got {kind(answer)}")
    if not callable(grad_func):
        raise _not_a_pair(name, f"its grad_func is {kind(grad_func)}")
    if type(value) is Tensor:
        return value, grad_func
    leaves, rebuild = containers.flatten(value)
    if any(isinstance(leaf, TensorView) for leaf in leaves):
        leaves = [leaf._read() if isinstance(leaf, TensorView) else leaf for leaf in leaves]
        value = rebuild(leaves)
    for leaf in leaves:
        if not isinstance(leaf, array):
            raise _not_a_pair(name, f"its value holds {kind(leaf)}")
    if not leaves:
        raise _not_a_pair(name, "its value is empty")
    return value, grad_func


def _not_a_pair(name: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"custom_grad: {name} must return {{'value': y, 'grad_func': g}} or (y, g) with a Tensor "
        f"(or a container of them) and a function; {got}"
    )


def takes_saved(grad_func: Callable[..., Any]) -> bool:
    """Whether a gradient function wants what was saved: it must be given a second argument.

    A parameter with a default keeps it (`lambda dy, k=k: …`), unless it is called `saved`.
    """
    if type(grad_func) is FunctionType:  # made anew at each call: its code answers at once
        code, defaults = grad_func.__code__, grad_func.__defaults__
        count = code.co_argcount
        others = code.co_kwonlyargcount | code.co_flags & CO_VARARGS
        if 0 < count <= 2 and defaults is None and not others:
            return count == 2
    try:
        parameters = list(inspect.signature(grad_func).parameters.values())
    except ValueError:
        return True
    takes = any(p.kind is p.VAR_POSITIONAL for p in parameters) or any(
        p.name == "saved"
        or (p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        for p in parameters[1:]
    )
    if misfit(grad_func, ("dy", "saved")[: 1 + takes], {}) is not None:
        raise ArgumentError(
            f"custom_grad: the gradient function ({place(grad_func)}) takes "
            f"{parameters_of(grad_func)}, expected (dy, saved) or (dy). What f saved comes as one "
            "argument, saved[0], saved[1], …; several outputs have one dy, a tuple."
        )
    return takes


def _described(saved: Any) -> str:
    if isinstance(saved, SimpleNamespace):
        return f"by name ({', '.join(vars(saved))})"
    return f"a list of {len(saved)}" if saved else "nothing"
