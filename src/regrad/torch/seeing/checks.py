"""`check_gradients` for PyTorch: against differences, and for each op on the path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad

from regrad.checking.check import Arrays, Settings
from regrad.checking.findings import Finding, GradientReport
from regrad.core import containers
from regrad.errors import ArgumentError, GradientError, RegradError, kind
from regrad.inspection.checks import Flat, Library, checked, explained, settings_of, weights, wrong
from regrad.inspection.kinds import LARGEST
from regrad.inspection.recorder import Named, Tool
from regrad.testing import raising
from regrad.torch.bridge import alias, pulled
from regrad.torch.host import DisableTorchFunction
from regrad.torch.seeing.arrays import as_array, at_rest, floats, is_float, wide
from regrad.torch.seeing.modules import ModulePaths, Unseen, argument_paths, found_in
from regrad.torch.seeing.names import function_name
from regrad.torch.seeing.notes import OpNote
from regrad.torch.seeing.watching import Looker

STALE = "stale value"


def gradient_report(
    f: Callable[..., Any],
    args: Sequence[Any] = (),
    order: int = 1,
    *,
    step: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> GradientReport:
    """Compare the gradients of `f` at `args` with differences, to the given order.

    Args:
        f: A function of tensors, or a module, that returns a tensor or a container of tensors. The
            check includes the parameters of f, of modules among its arguments, and of modules that
            it reads from outside. f runs in float64, with other tensors in place of its parameters
            and buffers, which stay unchanged, and with the same random numbers each time.
        args: Its arguments. The check differentiates float tensors; it passes other arguments
            unchanged.
        order: 1 checks the gradient. 2 also checks the gradient of the gradient, with respect to
            the arguments and the incoming gradient (`dy` in findings; `dy2` is the incoming
            gradient at order 2), and so on. The check stops after the first wrong order.
        step: The largest step, the same for all elements; by default relative to each element.
        rtol: Tolerance relative to the compared numbers, by default 1e-6.
        atol: Absolute tolerance, by default 0. The check allows for the rounding of f in any case.
        seed: The seed of the random directions, and of torch's generator whenever f runs.

    Returns:
        A `GradientReport`. It includes forward mode if everything that f runs supports it. `causes`
        are the rules that are wrong by themselves. For this the report checks each
        `autograd.Function`, custom gradient and override on the path separately, on its arguments
        there. An op whose gradient in the run differs from its gradient in a separate run has read
        a value that changed in between. The report names the kind of error where it can: a factor,
        a sign, a transposed gradient, a missing sum, swapped inputs, a stale value.

    Raises:
        ArgumentError: f is not callable, or there is nothing to check.

    >>> import torch
    >>> import regrad.torch
    >>> class Doubled(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...     @staticmethod
    ...     def backward(ctx, dy):
    ...         return dy
    >>> report = regrad.torch.gradient_report(Doubled.apply, [torch.tensor([1.0, 3.0])])
    >>> report.causes[0].op_type, report.causes[0].kind
    ('Doubled', 'scaled by 0.5')
    """
    check_callable(f, "check_gradients")
    settings = settings_of(args, order, step, rtol, atol, seed)
    floats = Floats(f, args, "check_gradients")
    if not floats.xs:
        raise ArgumentError(
            "check_gradients: there is no float tensor of torch, so there is no gradient. For "
            "functions of regrad's Tensors use regrad.testing.check_gradients."
        )
    library = TorchArrays(seed)
    report = checked(library, floats, floats.xs, floats.names, order, settings)
    return explained(report, lambda order: _causes(floats, order, settings))


@raising(gradient_report)
def check_gradients() -> None:
    """Check the gradients of `f` at `args` against differences, to the given order.

    Args:
        f: A function of tensors, or a module, as for `gradient_report`.
        args: Its arguments.
        order: 1 to 3, or more.
        step: The largest step of the differences; by default relative to each element.
        rtol: Tolerance relative to the compared numbers, by default 1e-6.
        atol: Absolute tolerance, by default 0.
        seed: The seed of the random directions, and of torch's generator whenever f runs.

    Raises:
        GradientCheckError: `gradient_report`, which takes the same arguments, has a finding. The
            message names the order, input, element and numbers, the rules that are wrong by
            themselves with their lines, and the likely kind of error.
        ArgumentError: There is nothing to check: no floats, no elements, or no finite values.

    >>> import torch
    >>> import regrad.torch
    >>> layer = torch.nn.Linear(2, 3)
    >>> regrad.torch.check_gradients(lambda x: torch.tanh(layer(x)), [torch.ones(1, 2)], order=2)
    """


def check_callable(f: Any, api: str) -> None:
    """Raise unless the argument of a tool is a function or a module."""
    if not callable(f) or (isinstance(f, type) and issubclass(f, torch.nn.Module)):
        got = f"the class {f.__name__}" if isinstance(f, type) else kind(f)
        raise ArgumentError(f"{api} takes a function or a module of torch tensors, got {got}")


# -- the function, with a flat list of tensors ----------------------------------------------------


class _Holder(Unseen):
    """Modules together, so that one call can replace the parameters of all."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.held: nn.ModuleList = nn.ModuleList(modules)

    def forward(self, f: Callable[..., Any], args: Sequence[Any]) -> Any:
        return f(*args)


class Floats:
    """A function of tensors with the floats that it depends on, in double precision.

    The floats are the tensors among its arguments, and the parameters of modules: f itself, modules
    among the arguments, and modules that it reads from outside. The modules stay unchanged. Other
    tensors replace their parameters and buffers while the function runs.
    """

    def __init__(self, f: Callable[..., Any], args: Sequence[Any], api: str) -> None:
        self.f = f
        self.api = api
        self.leaves: list[Any]
        self.rebuild: Callable[..., Any]
        self.leaves, self.rebuild = containers.flatten(tuple(args))
        paths = [name for name, _ in argument_paths(args)]
        self.places: list[int] = [i for i, x in enumerate(self.leaves) if is_float(x)]
        self.outside: dict[str, Any] = found_in(f, args, {})
        known = ModulePaths(self.outside)
        self.holder: _Holder = _Holder(list(known.modules.values()))
        shown = known.parameters()
        for p in self.holder.parameters():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ArgumentError(
                    f"{api}: {shown[id(p)]} has no value yet; call the module once first"
                )
        named = {n: p for n, p in self.holder.named_parameters() if p.requires_grad}
        self.keys: list[str] = list(named)
        self.names: list[str] = [paths[i] for i in self.places]
        self.names += [shown[id(p)] for p in named.values()]
        every = [*[self.leaves[i] for i in self.places], *named.values()]
        self.xs: list[torch.Tensor] = [wide(x.detach()) for x in every]

    def __call__(self, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the floats among the results, for these values."""
        count = len(self.places)
        leaves = containers.replaced(self.leaves, self.places, xs[:count])
        swapped = dict(zip(self.keys, xs[count:], strict=True))
        fixed = [*self.holder.named_parameters(), *self.holder.named_buffers()]
        for name, x in fixed:
            if name not in swapped:
                swapped[name] = wide(x.detach()).clone()
        try:
            y = torch.func.functional_call(self.holder, swapped, (self.f, self.rebuild(leaves)))
        except RuntimeError as error:
            read = [name for name, x in self.outside.items() if is_float(x) and wide(x) is not x]
            if "dtype" in str(error) and read:
                error.add_note(
                    f"{self.api} runs f in float64, but f reads {', '.join(read)} from "
                    "outside, in another precision: pass it as an argument"
                )
            raise
        ys = floats(_opened(y))
        if not ys:
            raise ArgumentError(f"{self.api}: f returned no float tensor, so there is no gradient")
        return ys


def _opened(y: Any) -> Any:
    """Return the result of a function as a container; an object becomes the dict of its fields."""
    if isinstance(y, torch.Tensor | list | tuple | dict):
        return y
    return dict(vars(y)) if hasattr(y, "__dict__") else y


class TorchArrays(Library):
    """PyTorch: pulls by autograd, and pushes by forward mode if a function supports it."""

    array: Callable[..., Any] = staticmethod(as_array)
    zeros: Callable[..., Any] = staticmethod(torch.zeros_like)
    unruled = DisableTorchFunction

    def __init__(self, seed: int) -> None:
        self.seed = seed  # the seed of torch's generator in each run

    def compiled(self, f: Flat) -> Flat:
        def run(xs: Sequence[torch.Tensor]) -> list[Any]:
            with at_rest(self.seed), torch.enable_grad():
                return f(_watched(xs))

        return run

    def like(self, arrays: Arrays, xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.tensor(a, device=x.device) for a, x in zip(arrays, xs, strict=True)]

    def pull(self, f: Flat, xs: Sequence[torch.Tensor]) -> tuple[list[Any], Callable[..., Any]]:
        # (if a tensor already requires grad, the caller will differentiate the result again)
        again = any(x.requires_grad for x in xs)
        xs = _watched(xs)
        ys = f(xs)
        return ys, lambda dys: pulled(ys, xs, dys, create_graph=again)

    def push(self, f: Flat, xs: Sequence[torch.Tensor]) -> Callable[..., list[Any]] | None:
        def push(xs: Sequence[torch.Tensor], dxs: Sequence[torch.Tensor]) -> list[Any]:
            with forward_ad.dual_level():
                pairs = zip(xs, dxs, strict=True)
                duals = [forward_ad.make_dual(x.clone().requires_grad_(), dx) for x, dx in pairs]
                ys = self.compiled(f)(duals)
                found = [(y, forward_ad.unpack_dual(y).tangent) for y in ys]
                return [torch.zeros_like(y) if dy is None else dy.clone() for y, dy in found]

        try:
            push([x.detach() for x in xs], [torch.zeros_like(x) for x in xs])
        except (RuntimeError, NotImplementedError, TypeError, RegradError, GradientError):
            return None
        return push


def _watched(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same tensors, all with requires_grad."""
    return [x if x.requires_grad else x.detach().requires_grad_() for x in xs]


# -- finding the op --------------------------------------------------------------------------------


class _Ops(Tool):
    """Collects the ops of a run, with their incoming and outgoing gradients."""

    keeps = "all"
    again = True

    def __init__(self) -> None:
        self.ops: dict[OpNote, tuple[list[Any], dict[str, Any]] | None] = {}

    def ran(self, op: OpNote, xs: Named, ys: Sequence[Any], writes: bool = False) -> None:
        if op.is_held:
            self.ops[op] = None

    def left(self, op: OpNote, dxs: Named, dys: Sequence[Any]) -> None:
        call = op.first
        if call in self.ops and (call is op or op.op_type == function_name(call.func)):
            copies = {name: dx.detach().clone() for name, dx in dxs if dx is not None}
            del self.ops[call]  # (moves the op to the end: in the order of the backward pass)
            self.ops[call] = [dy.detach().clone() for dy in dys if dy is not None], copies


def _causes(floats: Floats, order: int, settings: Settings) -> Iterator[Finding]:
    """Yield findings on the ops on the path that are wrong by themselves, or in their place."""
    found: list[Finding] = []
    ops = recorded(floats, settings.seed)
    for op, passed in ops.items():
        alone = _alone(op, order, settings) if op.kind != "built-in" else []
        found += alone or (_stale(op, passed, settings.seed) if passed else [])
    yield from found
    for op, passed in () if found else ops.items():  # torch's own ops may be wrong at high orders
        if op.kind == "built-in" and passed and sum(x.numel() for x in op.xs) <= LARGEST:
            yield from _alone(op, order, settings)


def recorded(floats: Floats, seed: int) -> dict[OpNote, Any]:
    """Return the ops of one run, with their arguments and the gradients there."""
    tool = _Ops()
    looker = Looker(found_in(floats.f, (), {}), tool)
    xs = [x.detach().clone().requires_grad_() for x in floats.xs]
    with looker.looking():
        with at_rest(seed), torch.enable_grad():
            ys = [y for y in floats(xs) if y.requires_grad]
        for y in ys:
            looker.look_back(y.grad_fn)
        with DisableTorchFunction():
            dys = [torch.as_tensor(weights(y.shape), device=y.device).to(y.dtype) for y in ys]
            pulled(ys, xs, dys)
    return tool.ops


def _alone(op: OpNote, order: int, settings: Settings) -> list[Finding]:
    """Return findings on the inputs for which an op's rule is wrong by itself."""
    try:
        return wrong(TorchArrays(settings.seed), op, order, settings, forward=False)
    except Exception:
        return []  # the op cannot run by itself


def _stale(op: OpNote, passed: tuple[list[Any], dict[str, Any]], seed: int) -> list[Finding]:
    """Return findings on inputs whose gradient in the run differs from that in a separate run."""
    dys, dxs = passed
    try:
        xs = [x.detach().clone().requires_grad_() for x in op.xs]
        with at_rest(seed), torch.enable_grad():
            held = [alias(x) for x in xs]  # (an in-place op must not change a leaf)
            ys = op.again(held)
        if [y.shape for y in ys] != [dy.shape for dy in dys] or _is_random(op, ys, seed):
            return []
        alone = zip(op.input_names, pulled(ys, xs, dys), strict=True)
    except Exception:
        return []  # the op cannot run by itself
    found = []
    for name, dx in alone:
        there = dxs.get(name)
        if dx is not None and there is not None and there.shape == dx.shape:
            found += _differs(op, name, as_array(there), as_array(dx))
    return found


def _is_random(op: OpNote, ys: Sequence[torch.Tensor], seed: int) -> bool:
    """Return whether the results of an op depend on random numbers."""
    with at_rest(seed + 1), torch.no_grad():
        others = op.again(op.xs)
    return any(not torch.equal(y, other) for y, other in zip(ys, others, strict=True))


def _differs(op: OpNote, name: str, there: np.ndarray, alone: np.ndarray) -> list[Finding]:
    """Return the finding on a gradient that differs from the gradient in a separate run."""
    scale = float(np.abs(alone).max(initial=0.0)) or 1.0
    gap = np.abs(there - alone)
    count = int((gap > 1e-6 * scale).sum())
    if not count:
        return []
    at = tuple(int(i) for i in np.unravel_index(int(gap.argmax()), gap.shape))
    a, b = float(np.real(there[at])), float(np.real(alone[at]))
    about = {"rule": op.title, "op_type": op.op_type, **op.where}
    return [Finding(STALE, 1, name, at, a, b, 0.0, count, **about)]
