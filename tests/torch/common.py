"""What many tests of overrides in PyTorch repeat: numbers, Functions by hand, gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.helpers.torch_calls import D, override

__all__ = [
    "D", "backward", "bare_function", "close", "fired", "function", "grad", "leaf", "numbers",
    "orders", "override", "under",
]  # fmt: skip


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return drawn numbers in float64, the same ones each time."""
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def leaf(*values: float, dtype: torch.dtype = D) -> torch.Tensor:
    """Return a vector that requires a gradient."""
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def close(found: Iterable[Any], expected: Iterable[Any], tolerance: float = 1e-12) -> None:
    """Compare tensors one by one; None stands for a gradient of zeros."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a is None or b is None:
            assert all(x is None or not x.any() for x in (a, b)), f"number {i}: {a} and {b}"
        else:
            torch.testing.assert_close(
                a, b, rtol=tolerance, atol=tolerance, msg=lambda words, i=i: f"number {i}: {words}"
            )


def under(rules: Any, f: Callable[..., Any], *xs: Any, **options: Any) -> Any:
    """Return what a function returns under rules, without a scope if they are None."""
    if rules is None:
        return f(*xs)
    with override(rules, **options):
        return f(*xs)


FIRED: list[Any] = []  # scopes whose rules must have run by the end of the test


def fired(rules: Any, f: Callable[..., Any], *xs: Any, **options: Any) -> Any:
    """Return what a function returns under rules, all of which have to run before the test ends."""
    with override(rules, **options) as used:
        FIRED.append(used)
        return f(*xs)


def grad(y: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the gradient of the sum by one tensor."""
    return torch.autograd.grad(y.sum(), x, **options)[0]


def backward(y: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the gradient of the sum by a leaf, by `.backward()`."""
    x.grad = None
    y.sum().backward(**options)
    assert x.grad is not None
    return x.grad


def orders(y: torch.Tensor, x: torch.Tensor, count: int = 2) -> list[torch.Tensor]:
    """Return the first derivatives of sums: of y, of its gradient, and so on."""
    found = []
    for _ in range(count):
        y = grad(y, x, create_graph=True)
        found.append(y)
    return [dx.detach() for dx in found]


def bare_function(name: str, forward: Any, backward: Any, **others: Callable[..., Any]) -> Any:
    """Return an autograd.Function of its methods, which take a context."""
    methods = {"forward": forward, "backward": backward, **others}
    for each, f in methods.items():
        if f.__name__ == "<lambda>":
            f.__name__, f.__qualname__ = each, f"{name}.{each}"
    body: dict[str, Any] = {each: staticmethod(f) for each, f in methods.items()}
    return type(name, (torch.autograd.Function,), {**body, "__module__": forward.__module__})


def function(value: Callable[..., Any], gradient: Callable[..., Any], name: str = "Hand",
             newer: bool = False, in_place: bool = False, zeros: bool = True) -> Any:  # fmt: skip
    """Return an autograd.Function of a value, and of its gradient as a `gradient(dy, *inputs)`.

    The gradient is that of the first input, or a tuple of those of the first inputs. `dy` is a
    tuple where there are several outputs. The names of the inputs are those of `value`.
    """

    def keep(ctx: Any, inputs: Any, output: Any = None) -> None:
        ctx.set_materialize_grads(zeros)
        ctx.is_tensor = [isinstance(x, torch.Tensor) for x in inputs]
        ctx.save_for_backward(*[x for x in inputs if isinstance(x, torch.Tensor)])
        ctx.others = [x for x in inputs if not isinstance(x, torch.Tensor)]
        if in_place:
            ctx.mark_dirty(inputs[0])

    def forward(ctx: Any, *inputs: Any) -> Any:
        keep(ctx, inputs)
        return value(*inputs)

    def backward(ctx: Any, *dys: Any) -> Any:
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        inputs = [next(tensors if each else others) for each in ctx.is_tensor]
        found = gradient(dys[0] if len(dys) == 1 else dys, *inputs)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *[None] * (len(inputs) - len(found))

    forward.__module__ = value.__module__
    if newer:
        return bare_function(name, value, backward, setup_context=keep)
    names = [*inspect.signature(value).parameters.values()]
    ctx = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([ctx, *names])  # type: ignore[attr-defined]
    return bare_function(name, forward, backward)
