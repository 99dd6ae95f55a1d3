"""Ways to the gradient of a function, or to a derivative of it, as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import func
from torch.utils.checkpoint import checkpoint

from tests.torch.common import backward, grad


def plain(f: Any, x: Any) -> Any:
    return grad(f(x), x)


def created(f: Any, x: Any) -> Any:
    return grad(f(x), x, create_graph=True)


def second_order(f: Any, x: Any) -> Any:
    return grad(created(f, x).square(), x)


def total(f: Any) -> Callable[[Any], Any]:
    return lambda x: f(x).sum()


def compile_afresh(f: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, **{"backend": "aot_eager", "fullgraph": True, **options})


# (x is a leaf; the gradients are those of a sum)
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "autograd.grad": plain,
    "backward": lambda f, x: backward(f(x), x),
    "create_graph": created,
    "second order": second_order,
    "func.grad": lambda f, x: func.grad(total(f))(x.detach()),
    "func.grad of grad": lambda f, x: func.grad(
        lambda a: func.grad(total(f))(a).square().sum()
    )(x.detach()),
    "jacrev of jacrev": lambda f, x: func.jacrev(func.jacrev(total(f)))(x.detach()),
    "jvp": lambda f, x: func.jvp(total(f), (x.detach(),), (torch.ones_like(x),))[1],
    "hessian": lambda f, x: func.hessian(total(f))(x.detach()),
    "checkpoint": lambda f, x: plain(lambda x: checkpoint(f, x, use_reentrant=False), x),
    "compile eager": lambda f, x: plain(compile_afresh(f, backend="eager"), x),
    "compile aot_eager": lambda f, x: plain(compile_afresh(f), x),
}  # fmt: skip
MORE: dict[str, Callable[[Any, Any], Any]] = {
    "func.vjp": lambda f, x: func.vjp(f, x.detach())[1](torch.ones_like(x))[0],
    "vmap of grad": lambda f, x: torch.vmap(func.grad(total(f)))(x.detach()),
    "grad of vmap": lambda f, x: func.grad(lambda a: torch.vmap(f)(a).sum())(x.detach()),
    "jacrev": lambda f, x: func.jacrev(total(f))(x.detach()),
    "jacfwd": lambda f, x: func.jacfwd(total(f))(x.detach()),
    "compile func.grad": lambda f, x: compile_afresh(func.grad(total(f)))(x.detach()),
}  # fmt: skip
FORWARD = {"jvp", "jacfwd", "hessian"}
