"""`custom_grad`: a function whose author defines its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any, TypeVar, overload

from regrad.autodiff import custom_calls, guards
from regrad.autodiff.custom_calls import CustomCall, CustomRule
from regrad.autodiff.custom_functions import CustomFunction, unpack
from regrad.autodiff.gradients import callable_or_raise
from regrad.autodiff.guards import Guard
from regrad.core import containers, dispatch
from regrad.core import state as core_state
from regrad.core.backends import is_array
from regrad.core.protocols import RegionLike
from regrad.core.signatures import public
from regrad.core.state import State, current
from regrad.core.tensor import Tensor
from regrad.errors import GradientError

Y = TypeVar("Y")


# Type checkers cannot remove the last parameter of a function, and do not see whether it is
# `save`. So the annotations have the result, and leave the parameters open.
@overload
def custom_grad(f: Callable[..., tuple[Y, Any]]) -> Callable[..., Y]: ...


@overload
def custom_grad(f: Callable[..., Mapping[str, Any]]) -> Callable[..., Any]: ...


@public
def custom_grad(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a custom gradient.

    Args:
        f: `f(*inputs, save)` returns `{"value": y, "grad_func": g}`, a pair `(y, g)`, or a
            named tuple with these fields. `y` is a Tensor or a container of Tensors. `save`
            is optional. regrad passes it by keyword if f has a parameter of this name, else last.

    Tensors and arrays among the arguments, also inside containers, are the inputs; everything else
    passes through. `g(dy, saved)`, or `g(dy)`, returns the gradients as a list with one entry per
    argument that holds tensors, in order. An entry has its argument's structure, with Tensors of
    the inputs' shapes and dtypes: for `{"w": w, "b": b}` a dict with these keys (a list and a tuple
    are interchangeable). None, for an argument or any part of it, means no gradient. If there is
    only one such argument, its entry alone is enough. A list may also have one entry per argument;
    an entry for a number is ignored. If g has a last parameter `needs`, it gets which gradients are
    needed, for each argument that holds tensors or numbers. If f reads Variables, the list ends
    with their gradients, a dict by name or by Variable: `[dx, {"w": dw}]`. `dy` has the structure
    of `y`. `save([a, b])` keeps tensors for g as `saved[0]`, `saved[1]`; `save(a=a)` as `saved.a`.

    The ops inside f do not affect the gradient of the value. Saved tensors, and tensors that g
    closes over, keep their own history. g may use any op, also custom ones, and the code of g
    defines the derivatives of every order.

    Raises:
        ArgumentError: f does not return a value and a gradient function; `save` is misused.
        GradientError: f closes over a tensor that is being differentiated instead of taking it as
            an input; g returns no gradient for a Variable that is being differentiated.
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
    >>> w = rg.Variable(2.0, name="w")
    >>> @rg.custom_grad
    ... def scaled(x, save):
    ...     save([x])
    ...     return x * w, lambda dy, saved: [dy * w, {"w": 10 * dy * saved[0]}]
    >>> rg.variable_grads(lambda: scaled(rg.tensor(3.0)))[1]["w"].item()
    30.0
    """
    callable_or_raise(f, "custom_grad")
    custom = CustomFunction(f)
    op = custom_op(custom)
    if hasattr(f, "__name__"):
        update_wrapper(op, f)
    if (shown := custom.signature()) is not None:
        op.__signature__ = shown  # pyright: ignore[reportFunctionMemberAccess]
    return op


def custom_op(custom: CustomFunction) -> Callable[..., Any]:
    """Return the function that users call.

    cloudpickle pickles it by value, with the globals that it names. So the function accesses
    globals with the state of this process through their modules, which are pickled by name.
    """

    def op(*args: Any, **options: Any) -> Any:
        # The case of `_general` with one tape and nothing else active, in one frame, like the fast
        # path of the ops.
        state = core_state.current()
        if state is None or (tape := state.tape) is None or options:
            return _general(op, custom, state, args, options)
        watched, reached = tape.watched, False
        for x in args:
            if type(x) is not Tensor:
                return _general(op, custom, state, args, options)
            if x._id in watched:
                reached = True
        if not reached:
            return _general(op, custom, state, args, options)
        rule = CustomRule(custom, len(args))
        try:
            inner = guards.SPARE.pop()
        except IndexError:
            inner = State(guard=Guard())
        guard = inner.guard
        guard.custom = custom
        guard.inputs = args
        guard.tapes = state.tapes
        guard.watched = watched
        guard.state = state
        guard.mark = mark = core_state.next_id()
        inner.recorder = guard
        try:
            core_state.STATE.set(inner)
            if len(args) == custom.plainly:  # like `run`, without the call
                answer = custom.f(*args, rule.save)
            else:
                answer = custom.run(args, options, rule.save)
            y, rule.grad_func = unpack(answer, custom.name)
            variables, inputs = guard.variables, guard.inputs
            made = type(y) is Tensor and y._id > mark and not variables
            if not made:
                guard.check(custom_calls.CUSTOM, containers.flatten(y)[0])
        finally:
            core_state.STATE.set(state)  # (first, because a signal may raise after a call)
            rule.running = False
            inner.recorder = None
            guard.inputs = guard.tapes = guard.variables = ()
            guard.state = None
            guards.SPARE.append(inner)
        if made:
            y._id = core_state.next_id()  # the new id makes it the output (see `adopted`)
            tape.write_call(custom_calls.CUSTOM, rule, args, y)
            return y
        call = CustomCall(custom, args)
        call.take(variables, inputs)
        return call.after(rule, mark, y, state)

    return op


def _general(
    op: Callable[..., Any], custom: CustomFunction, state: State | None,
    args: tuple[Any, ...], options: dict[str, Any],
) -> Any:  # fmt: skip
    """Call a custom op in any state."""
    inputs, form = args, None
    for arg in args:
        if type(arg) is not Tensor:
            inputs, args, form = _inputs(args)
            break
    if state is not None and state.region is not None:  # f has to get the inner values
        inputs, args = _inside(state.region, inputs, args)
    if options:
        _check_options(options, custom.name)
    call = CustomCall(custom, inputs)
    if form is not None:
        call.form = form
        call.nests = tuple in map(type, form)
    if state is not None and state.inspected:
        call.again = op, args, dict(options)
    return call.perform(lambda: custom.run(args, options, call.save), state)


def _inputs(args: tuple[Any, ...]) -> tuple[tuple[Tensor, ...], tuple[Any, ...], list[Any]]:
    """Return the tensors among the arguments, the arguments with these in place, and their form.

    The form has, for each argument, the positions of tensors: a Hole, or an optree structure with
    Holes among its leaves. For other arguments it has the result of `containers.marked`.
    """
    inputs: list[Tensor] = []
    given, form = [], []
    for arg in args:
        if type(arg) is Tensor:
            form.append(containers.Hole(len(inputs)))
            inputs.append(arg)
        elif type(arg) in dispatch.NUMBERS:
            form.append(containers.marked(arg))
        else:
            arg, entry = _opened(arg, inputs)
            form.append(entry)
        given.append(arg)
    return tuple(inputs), tuple(given), form


def _opened(arg: Any, inputs: list[Tensor]) -> tuple[Any, Any]:
    """Return an argument with Tensors for arrays and Variables, which become inputs; its form."""
    leaves, rebuild, spec = containers.opened(arg)
    slots = list(map(containers.marked, leaves))
    found = len(inputs)
    for i, leaf in enumerate(leaves):
        if dispatch.is_tensor(leaf) or is_array(leaf):
            slots[i] = containers.Hole(len(inputs))
            leaves[i] = dispatch.lift(leaf)
            inputs.append(leaves[i])
    form = slots[0] if spec.is_leaf() else (spec, slots)
    return (rebuild(leaves) if len(inputs) > found else arg), form  # (f may write to its argument)


def _inside(
    region: RegionLike, inputs: tuple[Tensor, ...], args: tuple[Any, ...]
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Return inputs and arguments with the inner values that a region has for outer Tensors."""
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
