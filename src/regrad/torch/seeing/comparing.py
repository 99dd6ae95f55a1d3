"""`compare_gradients` for PyTorch: two gradients of one function, and rules against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError
from regrad.inspection.comparisons import RTOL, Compared, GradientComparison
from regrad.torch.bridge import from_regrad
from regrad.torch.nodes import tensors
from regrad.torch.open_scopes import OWN
from regrad.torch.seeing.finding import as_array
from regrad.torch.seeing.floats import pulled
from regrad.torch.seeing.modules import found_in
from regrad.torch.seeing.notes import OpNote
from regrad.torch.seeing.recording import OpRecorder, Recorded, at_rest, own_forward
from regrad.torch.seeing.running import ModelRun, check_callable
from regrad.torch.seeing.watching import Looker

Gradients = dict[str, torch.Tensor | None]


def compare_gradients(
    f: Callable[..., Any],
    other: Any = "true",
    *,
    surrogates: Iterable[str] = (),
    rtol: float = RTOL,
    seed: int = 0,
) -> Callable[..., GradientComparison]:
    """Return a function that compares two gradients: of `f`, and of the same function otherwise.

    Args:
        f: A function or module, as `trace_gradients` takes it.
        other: `"true"`: f itself with torch's own gradients: without the rules of scopes, and
            with what autograd makes of the forward passes of Functions and custom gradients. Or
            another function of the same arguments, of torch's or of regrad's Tensors.
        surrogates: Op types (`"relu"` as the rows have it, `"Relu"`) or names of rules whose
            gradients are meant to differ.
        rtol: From which difference two gradients are not the same, relative to the larger norm.
        seed: Of torch's generator in both runs.

    Returns:
        A function of the arguments that returns a `GradientComparison`: cosine, ratio of norms,
        agreement of signs and zeros of both, by each argument and parameter; and by the inputs of
        each op that has somebody's rule, in place: both rules are given the gradient that arrived
        there. Ops are those of f whose rule is not one of the other's. If f calls `backward()`
        itself, gradients are those that it accumulates, and `.grad` changes as f changes it.

    Raises:
        ArgumentError: other is neither a function nor `"true"`.
        GradientError: as `trace_gradients`; surrogates is not a list of strings.

    >>> import torch
    >>> import regrad as rg
    >>> import regrad.torch
    >>> x = torch.tensor([-0.5, 2.0], requires_grad=True)
    >>> with regrad.torch.gradient_override_map({"Relu": rg.rules.straight_through}):
    ...     found = regrad.torch.compare_gradients(lambda x: torch.relu(x).sum())(x)
    >>> [(row.name, row.op_type, row.signs) for row in found.rows], found.ok
    ([('args[0]', '', 0.5), ('x', 'relu', 0.5)], False)
    """
    check_callable(f, "compare_gradients")
    if other != "true" and not callable(other):
        raise ArgumentError(f"compare_gradients: other is a function, or 'true', got {other!r:.60}")

    def compared(*args: Any, **options: Any) -> GradientComparison:
        recorder = OpRecorder(found_in(f, args, options), all_ops=False)
        first = _gradients(f, args, options, recorder, seed)
        ops = [op for op in recorder.ops.values() if op.has_rule and op.dys is not None]
        if other == "true":
            with _own_gradients(Looker(found_in(f, args, options))) as looker:
                second = _gradients(f, args, options, looker, seed)
            named = "rules", "true"
        else:
            function = _of_torch(other, args, options)
            looker = OpRecorder(found_in(function, args, options), all_ops=False)
            second = _gradients(function, args, options, looker, seed)
            known = {(op.note.op_type, op.note.rule) for op in looker.ops.values()}
            ops = [op for op in ops if (op.note.op_type, op.note.rule) not in known]
            named = _name(f, "f"), _name(other, "other")
        rows = [*_sources(first, second, args), *_in_place(ops)]
        meant = [] if isinstance(surrogates, str) else _spelled(surrogates, ops)
        return GradientComparison.declare(rows, meant or surrogates, names=named, rtol=rtol)

    return compared


def _name(f: Any, otherwise: str) -> str:
    return getattr(f, "__name__", otherwise)


def _spelled(surrogates: Iterable[str], ops: Sequence[Recorded]) -> list[str]:
    """Return what is declared, also by regrad's names of op types."""
    given = list(surrogates)
    return (
        given
        + [op.note.op_type for op in ops if op.call is not None and op.call.rule.op.type in given]
        + [op.note.rule for op in ops if op.note.rule.partition(".backward")[0] in given]
    )


def _of_torch(other: Any, args: Sequence[Any], options: Any) -> Callable[..., Any]:
    """The other function as one of torch tensors, if it is one of regrad's."""
    if isinstance(other, torch.nn.Module):
        return other
    with torch.no_grad(), at_rest(0):
        y = other(*args, **options)
    return from_regrad(other) if isinstance(y, Tensor) else other


def _gradients(
    f: Callable[..., Any], args: Sequence[Any], options: Any, looker: Looker, seed: int
) -> Gradients:
    """The gradients of one run by all arguments and parameters, by name."""
    taken: dict[int, torch.Tensor] = {}

    def reached(variable: torch.Tensor, g: Any) -> None:
        if g is not None:
            key = id(variable)
            taken[key] = taken[key] + g if key in taken else g.detach().clone()

    looker.reached = reached
    with at_rest(seed), looker.looking():
        seen = ModelRun(f, args, options, looker, "compare_gradients")
        found = seen.walk()
    return {
        name: found[key] if found.get(key) is not None else taken.get(key)
        for key, (name, _) in seen.sources().items()
    }


def _sources(first: Gradients, second: Gradients, args: Sequence[Any]) -> Iterator[Compared]:
    """A row for each argument and parameter."""
    for name in dict.fromkeys([*first, *second]):
        a, b = first.get(name), second.get(name)
        kind = "argument" if name.startswith("args") and args else "parameter"
        yield Compared.of(kind, name, _array(a), _array(b))


def _array(g: torch.Tensor | None) -> Any:
    if g is None:
        return None
    return as_array(g.to_dense() if g.layout is not torch.strided else g)


def _in_place(ops: Sequence[Recorded]) -> Iterator[Compared]:
    """A row for each input of each op with a rule: its rule, and torch's own, for the same dy."""
    for op in ops:
        try:
            own = _own_at(op)
        except Exception:
            continue  # its forward pass cannot be differentiated
        note = op.note
        for name, dx in zip(op.names(), own, strict=True):
            given = op.dxs.get(name)
            if given is not None and dx is None:
                dx = torch.zeros_like(given)
            yield Compared.of(
                "op", name, _array(given), _array(dx),
                op_type=note.op_type, rule=note.rule, line=note.line, path=note.path,
            )  # fmt: skip


def _own_at(op: Recorded) -> Sequence[torch.Tensor | None]:
    """torch's own gradients of an op, for what arrived at it."""
    xs = [x.detach().clone().requires_grad_() for x in op.xs]
    with torch.enable_grad():
        ys = op.own([x.view_as(x) for x in xs])
        return pulled(ys, xs, [_or_zeros(dy, y) for dy, y in zip(op.dys or (), ys, strict=False)])


def _or_zeros(dy: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(y) if dy is None else dy


# -- a run with torch's own gradients ------------------------------------------------------------


@contextmanager
def _own_gradients(looker: Looker) -> Generator[Looker]:
    """A block in which neither scopes nor custom gradients decide, but torch alone."""
    functions = _OwnBackward()
    token = OWN.set(True)
    looker.ran = functions.keep  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield looker
    finally:
        OWN.reset(token)
        functions.remove()


class _OwnBackward:
    """Replaces `backward` of the Functions that run by what torch makes of `forward`."""

    def __init__(self) -> None:
        self.replaced: dict[Any, Any] = {}

    def keep(self, function: Any, args: Sequence[Any], y: Any, note: OpNote, ctx: Any) -> None:
        """A Function ran."""
        if function.__module__.startswith(("regrad.", "torch.")):
            return
        ctx._regrad_args = args
        if function not in self.replaced:
            self.replaced[function] = function.__dict__.get("backward")
            function.backward = staticmethod(_own_backward(function))

    def remove(self) -> None:
        """Put back what was there."""
        for function, old in self.replaced.items():
            if old is None:
                del function.backward
            else:
                function.backward = old


def _own_backward(function: Any) -> Callable[..., Any]:
    """The gradient of a Function that torch makes of its forward pass."""

    old = function.backward

    def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
        if not hasattr(ctx, "_regrad_args"):  # it ran elsewhere, or before
            return old(ctx, *dys)
        args = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in ctx._regrad_args
        ]
        wanted = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.requires_grad]
        with torch.enable_grad():
            held = [x.view_as(x) if isinstance(x, torch.Tensor) else x for x in args]
            ys = list(tensors((own_forward(function, held),)))
            given = [_or_zeros(dy, y) for dy, y in zip(dys, ys, strict=False)]
            found = dict(zip(wanted, pulled(ys, [args[i] for i in wanted], given), strict=True))
        return tuple(found.get(i) for i in range(len(args)))

    return backward
