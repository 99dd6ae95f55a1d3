"""The function behind a custom gradient: how it takes `save`, and how to read its answer.

`custom_grad` of regrad, of `regrad.torch` and of `regrad.jax` use this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import CO_VARARGS
from types import FunctionType, SimpleNamespace
from typing import Any

from regrad.core import containers
from regrad.core.rule import place, wrong_gradient
from regrad.core.signatures import declared, misfit, parameters_of
from regrad.core.tensor import Tensor, TensorView
from regrad.errors import ArgumentError, kind

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
SEQUENCES = (list, tuple)  # (faster than a union, in a check at each call)


class CustomFunction:
    """A function with a custom gradient: the data that all its calls share."""

    closes_over: tuple[str, ...] = ("f",)
    __slots__ = ("_ways", "code", "f", "name", "named", "parameters", "plainly", "takes", "writes")

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f: Callable[..., Any] = f
        self.name: Any | str = getattr(f, "__name__", type(f).__name__)
        self.code: Any = None  # the code of the last gradient function, a new object at each call
        self.named: set[str] | None = None  # the names in its code
        self.writes: bool | None = None  # whether it writes to arguments (`regrad.core.foreign`)
        self.takes = True  # whether a gradient function with this code takes the saved values
        self.parameters: list[inspect.Parameter] = declared(f) or []
        self._ways: dict[int, str] = {}  # how f takes `save`, by the number of its arguments
        self.plainly: int | None = None  # the number of arguments after which f takes `save`

    def __reduce__(self) -> tuple[Any, ...]:
        return CustomFunction, (self.f,)

    def signature(self) -> inspect.Signature | None:
        """Return the signature for callers, without `save`; None if f does not name `save`."""
        rest = [p for p in self.parameters if p.name != "save"]
        return inspect.Signature(rest) if len(rest) < len(self.parameters) else None

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The functions that make up its gradient."""
        return [self.f]

    def run(
        self, args: tuple[Any, ...], options: Mapping[str, Any], save: Callable[..., None]
    ) -> Any:
        """Return the result of f, which gets `save` if it takes it."""
        way = self._ways.get(count := len(args))
        if way is None:
            way = self._ways[count] = self._way(count)
        if way == "last":
            self.plainly = len(args)
            return self.f(*args, save, **options)
        return self.f(*args, save=save, **options) if way == "keyword" else self.f(*args, **options)

    def _way(self, count: int) -> str:
        if any(p.name == "save" and p.kind is not p.POSITIONAL_ONLY for p in self.parameters):
            return "keyword"
        if any(p.kind is p.VAR_POSITIONAL for p in self.parameters):
            return "last"
        needed = sum(p.kind in POSITIONAL and p.default is p.empty for p in self.parameters)
        return "last" if needed == count + 1 else "not"

    def arguments(self, count: int, make: Callable[[], Any]) -> containers.Arguments:
        """Return the structure of the gradients for a call whose arguments hold `count` tensors."""
        return containers.Arguments(self.f, self.name, count, make, rest=self._rest)

    def _rest(self, count: int) -> list[Any]:
        """Return the parameters that `count` arguments leave to keywords and defaults."""
        given = [p for p in self.parameters if p.kind in POSITIONAL and p.name != "save"]
        rest = given[count + (self._ways.get(count) == "last") :]
        return [containers.marked(0 if p.default is p.empty else p.default) for p in rest]

    def pull(
        self, grad_func: Callable[..., Any], dy: Any, saved: Any, needs: Callable[[], Any]
    ) -> Any:
        """Return the answer of the gradient function.

        It may take the saved values after dy, and the result of `needs` by its name.
        """
        try:
            if self.is_simple(grad_func):
                return grad_func(dy, saved) if self.takes else grad_func(dy)
            given = {"needs": needs()} if asks_needs(grad_func) else {}
            args = (dy, saved) if _takes_saved(grad_func) else (dy,)
            return grad_func(*args, **given)
        except (IndexError, AttributeError) as error:
            self.explain(error, grad_func, saved)
            raise

    def explain(self, error: Exception, grad_func: Callable[..., Any], saved: Any) -> None:
        """Raise ArgumentError if a gradient function may have read a value that was not saved."""
        trace = error.__traceback__
        deeper = trace is None or trace.tb_next is None or trace.tb_next.tb_next is not None
        if not deeper and (self.takes if self.is_simple(grad_func) else _takes_saved(grad_func)):
            raise ArgumentError(
                f"custom_grad: {self.name} failed with {error!r}. f saved "
                f"{_described(saved)}: call save([a, b]) in f for saved[0] and saved[1], or "
                "save(a=a) for saved.a."
            ) from error

    def is_simple(self, grad_func: Callable[..., Any]) -> bool:
        """Return whether a gradient function takes only dy, or (`takes`) also the saved values."""
        if type(grad_func) is not FunctionType:
            return False
        code = grad_func.__code__
        if code is self.code:
            return True
        others = code.co_kwonlyargcount | code.co_flags & CO_VARARGS
        count = code.co_argcount
        if not 0 < count <= 2 or grad_func.__defaults__ is not None or others:
            return False
        if count == 2 and code.co_varnames[1] == "needs":
            return False
        self.code = code
        self.takes: bool = count == 2
        return True


class OpaqueFunction(CustomFunction):
    """A function with invisible ops: it allows no other gradient, and no other mode."""

    __slots__ = ()


def only_input(rule: Any, dy: Any, x: object = None, y: object = None) -> Any:
    """Return the gradient of the only input of a call (as `Rule.short`).

    This is `CustomFunction.pull` for the usual answers in one frame; the rule handles the others.
    """
    custom, grad_func = rule.custom, rule.grad_func
    known = type(grad_func) is FunctionType and grad_func.__code__ is custom.code
    if rule.scopes is not None or not (known or custom.is_simple(grad_func)):
        return rule.pulled(dy, (True,))[0]
    try:
        answer = grad_func(dy, rule.saved) if custom.takes else grad_func(dy)
    except (IndexError, AttributeError) as error:
        custom.explain(error, grad_func, rule.saved)
        raise
    if not rule.nests:
        if type(answer) is Tensor:
            return answer
        if type(answer) is list and len(answer) == 1 and type(answer[0]) is Tensor:
            return answer[0]
    return rule.per_input(answer)[0]


class SavedValues:
    """One call of a custom function, with the values that `save` keeps for grad_func."""

    __slots__ = ()

    array: tuple[Any, str, str]  # the library's class of arrays, and two texts for messages
    arguments: Any
    custom: CustomFunction
    running: bool
    saved: Any

    def __init__(self, custom: CustomFunction) -> None:
        self.custom = custom
        self.running = True  # until f has returned
        self.saved = ()

    @property
    def f(self) -> Callable[..., Any]:
        """The called function."""
        return self.custom.f

    @property
    def name(self) -> str:
        """The name of the called function."""
        return self.custom.name

    def describe(self) -> str:
        """Return the function, with its place, for a message."""
        return f"{self.name} ({place(self.f)})"

    def check_answer(self, i: int, dx: Any, shape: Sequence[int], dtype: Any) -> None:
        """Raise if an answer is not an array of this shape and dtype (None: of any dtype)."""
        kinds, what, convert = self.array
        wrong = partial(wrong_gradient, self.describe(), self.arguments.names[i])
        if not isinstance(dx, kinds):
            raise wrong(kind(dx), f"{what}, or None for no gradient.")
        if dtype is not None and dx.dtype != dtype:
            raise wrong(f"the dtype {dx.dtype}", f"{dtype}. Convert it with {convert}.")
        if tuple(dx.shape) != tuple(shape):
            expected = f"{tuple(shape)}. A gradient has the shape of its input"
            got = f"the shape {tuple(dx.shape)}"
            raise wrong(got, f"{expected}: sum over what was broadcast.")

    def keep(self, value: Any) -> Any:
        """Return a value in the form in which it is kept."""
        return value

    def save(self, *tensors: Any, **named: Any) -> None:
        """Keep tensors for grad_func. If called several times, the last call counts."""
        if not self.running:
            raise ArgumentError(
                f"custom_grad: save was called after {self.name} had returned; call it inside f"
            )
        if len(tensors) == 1 and not named and isinstance(items := tensors[0], SEQUENCES):
            for item in items:
                if type(item) is not Tensor:
                    items = [self.keep(t) for t in items]
                    break
            self.saved = tuple(items)
        elif named and not tensors:
            self.saved = SimpleNamespace(**{k: self.keep(t) for k, t in named.items()})
        else:
            raise ArgumentError(
                f"custom_grad: in {self.name}, save takes one list or keywords: save([a, b]) "
                f"makes saved[0] and saved[1], save(a=a) makes saved.a; got "
                f"{', '.join([*map(kind, tensors), *named]) or 'nothing'}"
            )


def unpack(
    answer: Any, name: str, array: type = Tensor,
    flatten: Callable[[Any], tuple[list[Any], containers.Rebuild]] = containers.flatten,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """Return `(value, grad_func)` from f's result. The value holds arrays of this type."""
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
    leaves, rebuild = flatten(value)
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


def asks_needs(grad_func: Callable[..., Any]) -> bool:
    """Return whether a gradient function has a parameter `needs`."""
    return any(p.name == "needs" for p in (declared(grad_func) or ())[1:])


def _takes_saved(grad_func: Callable[..., Any]) -> bool:
    """Return whether a gradient function must get a second argument.

    A parameter with a default keeps it (`lambda dy, k=k: …`), unless its name is `saved`.
    """
    parameters = declared(grad_func)
    if parameters is None:
        return True
    rest = [p for p in parameters if p.name != "needs"]
    takes = any(p.kind is p.VAR_POSITIONAL for p in rest) or any(
        p.name == "saved" or (p.default is p.empty and p.kind in POSITIONAL) for p in rest[1:]
    )
    given = {"needs": ()} if len(rest) < len(parameters) else {}
    if misfit(grad_func, ("dy", "saved")[: 1 + takes], given) is not None:
        raise ArgumentError(
            f"custom_grad: the gradient function ({place(grad_func)}) takes "
            f"{parameters_of(grad_func)}, expected (dy, saved) or (dy), optionally followed by "
            "needs. The saved values come as one argument, saved[0], saved[1], …; for several "
            "outputs, dy is a tuple."
        )
    return takes


def _described(saved: Any) -> str:
    if isinstance(saved, SimpleNamespace):
        return f"by name ({', '.join(vars(saved))})"
    return f"a list of {len(saved)}" if saved else "nothing"
