"""regrad functions as torch functions, differentiable to any order.

One `torch.autograd.Function` carries every regrad function. The backward pass is again a regrad
function (the gradient of the first), and the same Function carries it, and so on for every order.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cache, update_wrapper
from typing import Any

import torch
from torch import is_autocast_enabled
from torch.amp import is_autocast_available

from regrad.autodiff.gradients import callable_or_raise
from regrad.core import containers
from regrad.core.blocks import block
from regrad.core.containers import Leaves, replaced
from regrad.core.scopes import refuse_once
from regrad.core.state import State, current, in_state
from regrad.core.tensor import Tensor, wrap
from regrad.errors import ArgumentError, GradientError, kind
from regrad.torch.host import (
    DisableTorchFunction,
    is_autocast_open,
    is_transformed,
    raw_apply,
    unwrap_dead,
)
from regrad.torch.host.running import Silent
from regrad.transforms.bodies import overrides_for_replay, pullback
from regrad.transforms.derivatives import jvp
from regrad.transforms.region import Flat, Passage


def from_regrad(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a regrad function as a function of torch tensors, with its gradient by regrad's rules.

    Args:
        f: A function that takes and returns Tensors, or containers of Tensors. Torch tensors among
            its arguments (also in containers) are the inputs; other arguments pass through
            unchanged.

    The result works wherever torch functions do: `backward`, `autograd.grad` of any order,
    `torch.func`, `torch.compile`, on any device. It shares data with torch and does not copy. The
    overrides and custom gradients that are active at the call also apply in the gradient. regrad
    Variables that f reads are constants. The backward pass runs f again, and keeps only the inputs
    until then.

    Raises:
        ArgumentError: f returns something other than Tensors.
        GradientError: regrad is differentiating at the call (call f itself there).

    >>> import torch
    >>> import regrad as rg
    >>> import regrad.torch
    >>> clipped = regrad.torch.from_regrad(lambda x: rg.rules.clip_gradient(x, -1.0, 1.0) ** 2)
    >>> x = torch.tensor([0.5, -3.0], requires_grad=True)
    >>> clipped(x).sum().backward()
    >>> x.grad
    tensor([ 1., -1.])
    """
    callable_or_raise(f, "from_regrad")

    def function(*args: Any, **options: Any) -> Any:
        state = current()
        if state is not None and state.tapes:
            raise GradientError(
                f"from_regrad: {_name(f)} was called while regrad differentiates, and regrad does "
                "not differentiate torch tensors; call the regrad function itself there"
            )
        overrides = None if state is None else state.overrides
        refuse_once("from_regrad", overrides)
        given = Leaves((args, options), torch.Tensor)
        body = Opened(f, given, overrides)
        ys = bridge(body, given.arrays)
        return body.close(ys)

    return in_graph(function, f)


def in_graph(function: Callable[..., Any], f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under the name of f, for use in and around torch.compile."""
    allow_in_graph(function)

    def outer(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return update_wrapper(outer, f) if hasattr(f, "__name__") else outer


def allow_in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile calls, instead of tracing the Python code inside it.

    The guards of a compiled program and its backward pass cover everything that the function does.
    """
    torch.compiler.allow_in_graph(function)
    return function


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", type(f).__name__)


class Opened:
    """A function of containers as a function of a list of Tensors."""

    def __init__(self, f: Callable[..., Any], given: Leaves, overrides: Any) -> None:
        self.f = f
        self.given = given
        self.overrides = overrides
        self.close: containers.Rebuild = containers.only

    def __call__(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        args, options = self.given.close(xs)
        outer = current()
        tapes = () if outer is None else outer.tapes
        with in_state(State(tapes, self.overrides)):
            ys, self.close = containers.flatten(self._called(args, options))
        self.overrides: Any = overrides_for_replay(self.overrides)
        for y in ys:
            if not isinstance(y, Tensor):
                raise ArgumentError(
                    f"from_regrad: {_name(self.f)} must return Tensors, got {kind(y)}"
                )
        return ys

    def _called(self, args: Sequence[Any], options: dict[str, Any]) -> Any:
        try:
            return self.f(*args, **options)
        except TypeError as error:
            if "must be Tensor, not Tensor" not in str(error):
                raise
            raise ArgumentError(
                f"from_regrad: {_name(self.f)} called PyTorch on a regrad Tensor, {error}. Write "
                "it with regrad's functions; a function of PyTorch needs no from_regrad."
            ) from error


def bridge(flat: Flat, xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Call a flat regrad function on torch tensors, so that torch can differentiate the call."""
    return apply(Bridge, flat, *xs)


def run(flat: Flat, xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Call a flat regrad function on the values of torch tensors."""
    device = xs[0].device if xs else None
    with DisableTorchFunction(), torch.no_grad():
        return tuple([to_torch(y, device) for y in flat([wrap(x.detach()) for x in xs])])


def to_torch(y: Any, device: Any) -> torch.Tensor:
    """Return the data of a Tensor as a torch tensor."""
    data = y._data
    if isinstance(data, torch.Tensor):
        return data
    return torch.asarray(y._values().copy(), device=device)


class Bridge(torch.autograd.Function, metaclass=Silent):
    """Carries one regrad function: `Bridge.apply(flat, *xs)`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(flat: Flat, *xs: torch.Tensor) -> Any:
        given = set(map(id, xs))
        return tuple([y.clone() if id(y) in given else y for y in run(flat, xs)])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.flat, *xs = inputs
        ctx.count = len(xs)
        ctx.reached = [i for i, y in enumerate(output) if is_differentiable(y)]
        ctx.mark_non_differentiable(*[y for y in output if not is_differentiable(y)])
        ctx.save_for_backward(*xs)
        ctx.save_for_forward(*xs)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
        wanted = [i for i in range(ctx.count) if ctx.needs_input_grad[i + 1]]
        pull = pullback(ctx.flat, ctx.count, Passage(wanted, ctx.reached))
        given = [*ctx.saved_tensors, *[dys[i] for i in ctx.reached]]
        with shield(dys):
            found = bridge(pull, given)
        return spread(dict(zip(wanted, found, strict=True)), ctx.count)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        return push_forward(ctx.flat, ctx.saved_tensors, tangents[1:])


def push_forward(
    flat: Flat, xs: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Return the forward-mode derivative of a flat function, by transposition."""
    places = [i for i, x in enumerate(xs) if is_differentiable(x)]
    dxs = [or_zeros(tangents[i], xs[i]) for i in places]

    def push(given: Sequence[Tensor]) -> Sequence[Tensor]:
        values, directions = list(given[: len(xs)]), given[len(xs) :]

        def of_floats(*floats: Tensor) -> list[Tensor]:
            return list(flat(replaced(values, places, floats)))

        return jvp(of_floats, [values[i] for i in places], list(directions))[1]

    return tuple(bridge(push, [*xs, *dxs]))


def pulled(
    ys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], dys: Sequence[torch.Tensor],
    create_graph: bool = False,
) -> Sequence[torch.Tensor | None]:  # fmt: skip
    """Return the gradients with respect to xs; None where there is no path."""
    pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
    if not pairs:
        return [None] * len(xs)
    return torch.autograd.grad(
        [y for y, _ in pairs], list(xs), [dy for _, dy in pairs],
        allow_unused=True, retain_graph=True, create_graph=create_graph,
    )  # fmt: skip


def or_zeros(dx: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return a gradient with respect to a tensor; zeros for None."""
    return torch.zeros_like(x) if dx is None else dx


def alias(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a node of its own in the graph: a view, or a copy if x is sparse."""
    return x.view_as(x) if x.layout is torch.strided else x.clone()


def is_differentiable(x: torch.Tensor) -> bool:
    """Return whether a torch tensor can have a gradient."""
    return x.is_floating_point() or x.is_complex()


def spread(found: dict[int, Any], count: int) -> tuple[Any, ...]:
    """Return gradients by index in a Function's form; the first argument is not a tensor."""
    return None, *[found.get(i) for i in range(count)]


def shield(dys: Sequence[Any]) -> Any:
    """Return a block for a backward pass, without overrides and autocast from outside."""
    device = next((dy.device.type for dy in dys if dy is not None), "cpu")
    usual = not is_autocast_open() or not casts(device)
    return DisableTorchFunction() if usual else _without_autocast(device)


def casts(device: str) -> bool:
    """Return whether autocast is on for a kind of device; some, such as "meta", do not have it."""
    return is_autocast_available(device) and is_autocast_enabled(device)


@block
def _without_autocast(device: str) -> Generator[None]:
    with DisableTorchFunction(), torch.autocast(device, enabled=False):
        yield


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply`, or the faster twin of the Function outside of torch.func."""
    if is_transformed():
        return function.apply(*args)
    given = [unwrap_dead(x) if isinstance(x, torch.Tensor) else x for x in args]
    return _twins_apply(function)(*given)


@cache
def _twins_apply(function: Any) -> Any:
    return raw_apply(find_twin(function))


@cache
def find_twin(function: Any) -> Any:
    """Return the same Function in torch's older form, `forward(ctx, …)`.

    torch.func needs the newer form, with `setup_context`. But for the newer form torch looks up the
    signature at every call, which takes longer than everything else.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        y = function.forward(*args)
        function.setup_context(ctx, args, y)
        return y

    parts = {"forward": forward, "backward": function.backward, "jvp": function.jvp}
    methods = {name: staticmethod(part) for name, part in parts.items()}
    members = {**methods, "__module__": function.__module__}
    return Silent(function.__name__, (torch.autograd.Function,), members)
