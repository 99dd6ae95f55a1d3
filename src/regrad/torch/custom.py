"""`custom_grad` for torch: custom gradients, written as closures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import CellType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from regrad.autodiff.custom_functions import CustomFunction, SavedValues, unpack
from regrad.autodiff.gradients import callable_or_raise
from regrad.autodiff.once import Once
from regrad.core import containers
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, GradientError
from regrad.torch.bridge import apply, casts, in_graph, is_differentiable, shield, spread
from regrad.torch.calls import guard
from regrad.torch.derivatives import describe_closed_over, find_closed_over
from regrad.torch.host import DisableTorchFunction, sequence_nr
from regrad.torch.host.bodies import remade
from regrad.torch.host.running import Silent
from regrad.torch.nodes import tensors
from regrad.torch.open_scopes import AROUND

if TYPE_CHECKING:
    from regrad.core.containers import Arguments


def custom_grad(f: Any = None, *, cast_inputs: torch.dtype | None = None) -> Callable[..., Any]:
    """Return a function of torch tensors with a custom gradient, without `ctx` and `apply`.

    Args:
        f: `f(*inputs, save)` returns `{"value": y, "grad_func": g}`, a pair `(y, g)`, or a named
            tuple with these fields. `y` is a tensor, a container of tensors, or a dataclass with
            tensors; then `dy` is an object of the same kind. The parameter `save`
            is optional. regrad passes it by keyword if f names it, else as the last argument.
        cast_inputs: Where autocast is on, cast float inputs (except float64) to this dtype, and run
            f and g without autocast.

    Tensors among the positional arguments, also inside containers, are the inputs. Keywords and all
    other arguments are constants. `g(dy, saved)`, or `g(dy)`, returns the gradients as a list with
    one entry per argument that holds tensors, in order. An entry has its argument's structure, with
    tensors of the inputs' shapes and dtypes: for `{"w": w, "b": b}`, a dict with these keys (lists
    and tuples are interchangeable). None, for an argument or a part of it, means no gradient. If
    there is only one such argument, g may return its entry without the list. `save([a, b])` keeps
    tensors for g as `saved[0]`, `saved[1]`; `save(a=a)` keeps them as `saved.a`. g may also use
    tensors of f directly.

    Saved intermediates keep their own history, so second and higher derivatives differentiate the
    code of g. `custom_grad` works under `torch.func` (except in forward mode), `torch.compile`,
    checkpointing and autocast. If autocast was on for f, it is also on for g, and regrad casts
    gradients to the dtypes of the inputs.

    Raises:
        ArgumentError: f does not return a value and a gradient function; f misuses `save`.
        GradientError: f closes over a tensor that requires a gradient, or the caller passes one by
            keyword; forward mode.
        RuleError: g returns gradients of the wrong structure, kind, shape or dtype.

    Source: `tf.customGrad` of TensorFlow.js.

    >>> import torch
    >>> import regrad.torch
    >>> @regrad.torch.custom_grad
    ... def reversed_gradient(x):
    ...     return x, lambda dy: -dy
    >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> reversed_gradient(x).sum().backward()
    >>> x.grad
    tensor([-1., -1.])
    """
    if f is None:
        return partial(custom_grad, cast_inputs=cast_inputs)
    callable_or_raise(f, "custom_grad")
    custom = CustomFunction(f)

    def function(*args: Any, **options: Any) -> Any:
        inputs, make = open_arguments(args)
        refuse_keywords(options, custom.name)
        device = inputs[0].device.type if inputs else "cpu"
        if cast_inputs is not None and casts(device):
            leaves, rebuild = containers.flatten(args)
            with torch.autocast(device, enabled=False):
                return function(*rebuild([_cast(x, cast_inputs) for x in leaves]), **options)
        call = CustomTorchCall(custom, inputs, make)
        if casts(device):
            call.autocast = device, torch.get_autocast_dtype(device)
        start, before = sequence_nr(), [x.grad_fn for x in inputs]
        answer = custom.run(args, options, call.save)
        opened = containers.flatten_objects
        value, call.grad_func = unpack(answer, custom.name, torch.Tensor, opened)
        call.running = False
        ys, call.close = opened(value)
        for name, x, node in zip(call.arguments.names, inputs, before, strict=False):
            if x.grad_fn is not node:
                raise GradientError(
                    f"custom_grad: {call.describe()} changed its input {name!r} in place, and "
                    "autograd recorded that, so its gradient would count twice. Return a new "
                    "tensor: x * 2, not x.mul_(2)."
                )
        if torch.is_grad_enabled():
            found = find_closed_over(inputs, [*ys, *call.used_tensors()], start)
            if found is not None:
                raise GradientError(
                    f"custom_grad: {call.describe()} closes over {describe_closed_over(found, f)}, "
                    "which requires grad; its gradient would be lost. Pass it as a separate input, "
                    "for which grad_func also returns a gradient, or detach it."
                )
        return call.close(list(call(ys)))

    return in_graph(function, f)


def open_arguments(args: tuple[Any, ...]) -> tuple[list[torch.Tensor], Callable[[], Any]]:
    """Return the tensors among the arguments, and a function that returns the arguments with Holes.

    Each Hole marks the place of a tensor.
    """
    leaves, _, spec = containers.opened(args)
    if any(isinstance(leaf, Tensor) for leaf in leaves):
        raise ArgumentError(
            "custom_grad of regrad.torch: an argument is a Tensor of regrad, expected a tensor of "
            "torch. For functions of regrad's Tensors use rg.custom_grad."
        )
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return [leaves[i] for i in places], containers.with_holes(leaves, places, spec)


def refuse_keywords(options: dict[str, Any], name: str) -> None:
    """Raise for keyword arguments that require a gradient, since keywords are constants."""
    for key, value in options.items():
        if any(x.requires_grad for x in tensors(containers.flatten(value)[0])):
            raise GradientError(
                f"custom_grad: {name} got the keyword argument {key!r}, a tensor that requires "
                "grad; keywords are constants. Pass it by position, or detach it."
            )


class CustomTorchCall(SavedValues):
    """One call of a custom function: its saved values and its gradient function."""

    array = torch.Tensor, "a tensor", "dx.to(x.dtype)"
    grad_func: Callable[..., Any]
    autocast: tuple[str, torch.dtype] | None = None  # the device and dtype, if autocast is on

    def __init__(
        self, custom: CustomFunction, inputs: Sequence[torch.Tensor], make: Callable[[], Any]
    ) -> None:
        super().__init__(custom)
        self.inputs: Sequence[torch.Tensor] = inputs
        self.count: int = len(inputs)
        self.arguments: Arguments = custom.arguments(self.count, make)

    def __call__(self, ys: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the values, with the gradient function attached to them."""
        if AROUND.get().own:
            return list(ys)
        held = list(self.used_tensors())
        values = [y.detach() for y in ys]
        with DisableTorchFunction():
            inputs, self.inputs = self.inputs, ()  # autograd keeps them from now on
            return apply(Custom, self, len(held), *inputs, *held, *values)

    # -- the tensors of grad_func pass through autograd, for their history and for vmap ------------

    def used_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that grad_func uses: saved values, and values in its closure."""
        yield from tensors(_saved_values(self.saved))
        for cell in _cells(self.grad_func):
            yield from tensors(containers.flatten(cell.cell_contents)[0])

    def refill(self, held: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], Any]:
        """Return grad_func and the saved values, with these tensors in place of the old ones."""
        rest = iter(held)

        def replaced(value: Any) -> Any:
            leaves, rebuild = containers.flatten(value)
            if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                return value
            return rebuild([next(rest) if isinstance(x, torch.Tensor) else x for x in leaves])

        if isinstance(self.saved, SimpleNamespace):
            saved: Any = SimpleNamespace(**{k: replaced(v) for k, v in vars(self.saved).items()})
        else:
            saved = tuple([replaced(v) for v in self.saved])
        contents = {id(c): replaced(c.cell_contents) for c in _cells(self.grad_func)}
        return _with_cells(self.grad_func, contents), saved

    def answer(
        self, wanted: Sequence[bool], held: Sequence[torch.Tensor], dys: Sequence[torch.Tensor]
    ) -> list[Any]:
        """Return the gradients of the inputs, computed for the wanted inputs."""
        grad_func, saved = self.refill(held)
        needs = partial(self.arguments.needs, wanted)
        return self.arguments.leaves(self.custom.pull(grad_func, self.close([*dys]), saved, needs))

    close: containers.Rebuild = containers.only


def _saved_values(saved: Any) -> Any:
    return vars(saved).values() if isinstance(saved, SimpleNamespace) else saved


def _cells(function: Callable[..., Any]) -> list[CellType]:
    """Return the closure cells of a function that hold tensors, directly or in containers."""
    found = []
    for cell in getattr(getattr(function, "rule", function), "__closure__", None) or ():
        try:
            leaves = containers.flatten(cell.cell_contents)[0]
        except ValueError:  # an empty cell
            continue
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            found.append(cell)
    return found


def _with_cells(function: Any, contents: dict[int, Any]) -> Any:
    """Return a copy of a function that closes over other values."""
    if not contents:
        return function
    if isinstance(function, Once):
        return Once(_with_cells(function.rule, contents))
    old = function.__closure__
    cells = tuple(CellType(contents[id(c)]) if id(c) in contents else c for c in old)
    return remade(function, function.__globals__, cells)


class Custom(torch.autograd.Function, metaclass=Silent):
    """Carries one call: `Custom.apply(call, len(held), *inputs, *held, *values)`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: CustomTorchCall, held: int, *given: torch.Tensor) -> Any:
        values = given[call.count + held :]
        return tuple([y.clone() for y in values])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, held, *given = inputs
        count = call.count
        ctx.call = call
        ctx.total = len(given)
        ctx.specs = [(tuple(x.shape), x.dtype) for x in given[:count]]
        ctx.save_for_backward(*given[count : count + held])
        ctx.mark_non_differentiable(*[y for y in output if not is_differentiable(y)])

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
        call = ctx.call
        saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        autocast = torch.autocast(*call.autocast) if call.autocast else nullcontext()
        with shield(dys), autocast:
            answer = guard(call.custom, partial(call.answer, wanted), saved, dys, call.describe)
            dxs = [_check(call, i, dx, ctx.specs) for i, dx in enumerate(answer)]
        found = {i: dx for i, dx in enumerate(dxs) if wanted[i]}
        return None, *spread(found, ctx.total)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        raise GradientError(
            f"forward mode: {ctx.call.name} has a custom gradient written with torch's functions, "
            "and regrad cannot verify that it is linear in dy. Use reverse mode (grad, jacrev, "
            "vjp), or write the function with regrad and call regrad.torch.from_regrad."
        )


def _cast(x: Any, dtype: torch.dtype) -> Any:
    is_cast = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if is_cast else x


def _check(call: CustomTorchCall, i: int, dx: torch.Tensor | None, specs: Sequence[Any]) -> Any:
    if dx is None:
        return None
    shape, dtype = specs[i]
    if isinstance(dx, torch.Tensor) and dx.dtype == dtype and tuple(dx.shape) == shape:
        return dx
    dx = _cast(dx, dtype) if call.autocast else dx
    has_dtype = dtype.is_floating_point or dtype.is_complex  # (else any dtype is accepted)
    call.check_answer(i, dx, shape, dtype if has_dtype else None)
    return dx
