"""PyTorch as it may be one day: a private part is gone, or is another. Run as a program.

`python -m tests.helpers.fake_torch` prints a line of JSON for each change: what was changed, and
what became of some programs under a rule: `right`, `refused` (by name), or something worse. Each
change is made in a process of its own, before regrad.torch is imported there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.utils  # (before the processes are forked: it takes seconds)
import torch._functorch.aot_autograd
from torch.utils.checkpoint import checkpoint

from tests.helpers.fake_hosts import CHANGES, in_child, main, parts_of

warnings.simplefilter("ignore")


# -- changes ---------------------------------------------------------------------------------------

# Where torch.compile and checkpoints are met.
LEFT = (
    "torch.utils.checkpoint._CheckpointFrame", "torch._dynamo.utils",
    "torch._dynamo.variables.misc.AutogradFunctionVariable",
    "torch._dynamo.variables.torch_function", "torch._dynamo.output_graph.OutputGraph",
)  # fmt: skip
# What torch can do without, as far as our programs go.
DELETED = ("torch._C._is_fwd_grad_enabled", "torch.library._maybe_get_opdef",
           "torch._safe_softmax", "torch._C._after_autograd_keyset")  # fmt: skip


# -- programs --------------------------------------------------------------------------------------


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy * (ctx.saved_tensors[0] > 0)


def _checkpoint(reentrant: bool) -> Callable[[Any], Any]:
    return lambda z: checkpoint(lambda z: torch.relu(z * 1), z, use_reentrant=reentrant)


def _compiled(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return torch.compile(f, backend="aot_eager")


apply = Own.apply
PROGRAMS: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "function": lambda: torch.relu, "in place": lambda: lambda z: (z * 1).relu_(),
    "no gradient": lambda: lambda z: torch.relu(z) + _without_gradient(z),
    "Function": lambda: apply, "checkpoint": lambda: _checkpoint(False),
    "reentrant checkpoint": lambda: _checkpoint(True),
    "script": lambda: torch.jit.trace(torch.relu, torch.ones(2)),
    "vmap": lambda: torch.func.vmap(torch.relu),
    "compiled": lambda: _compiled(lambda z: torch.relu(z)),
    "compiled Function": lambda: _compiled(lambda z: apply(z)),
    "compiled checkpoint": lambda: _compiled(_checkpoint(False)),
}  # fmt: skip


def _without_gradient(z: Any) -> Any:
    with torch.no_grad():
        return 0 * torch.relu(z)


def become(make: Callable[[], Callable[[Any], Any]]) -> str:
    """Return what becomes of a program under a rule: it counts, or is refused by name."""
    import regrad.torch
    from regrad.errors import RegradError

    z = torch.tensor([1.0, -2.0], requires_grad=True)
    try:
        f = make()
        with regrad.torch.gradient_override_map({"Relu": lambda dy, x: dy * 7 * x}):
            y = f(z)
        y.sum().backward()
    except RegradError:
        return "refused"
    except Exception as error:  # (torch.compile has wrapped it)
        causes = [error, error.__cause__, error.__context__]
        if any(isinstance(each, RegradError) for each in causes) or "does not sup" in str(error):
            return "refused"
        return f"crash: {type(error).__name__}: {str(error)[:300]}"
    assert z.grad is not None
    return "right" if z.grad.tolist() == [7, -14] else f"silent: {z.grad.tolist()}"


# -- the changes, one process each -----------------------------------------------------------------


def parts() -> list[tuple[str, str]]:
    """Return all private parts that regrad.torch takes, and the feature of each."""
    import regrad.torch

    with regrad.torch.gradient_override_map({"Relu": "Relu"}):
        torch.relu(torch.ones(1))
    return parts_of(regrad.torch.host.HOST)


def release() -> tuple[int, ...]:
    """Return the release of the installed torch."""
    from regrad.torch.host import HOST

    return HOST.release


def changed(kind: str, path: str) -> dict[str, str]:
    """Return what becomes of the programs after a change."""
    CHANGES[kind](path)
    compiles = "_dynamo" in path or not path
    return {n: become(make) for n, make in PROGRAMS.items() if compiles or "compiled" not in n}


def cases() -> list[tuple[str, str]]:
    """Return all changes."""
    paths = dict.fromkeys(path for _, path in in_child(parts))
    python = [p for p in paths if not p.startswith("torch._C") and p.count(".") > 1]
    # (Promises run in a thread. Built for CUDA, on a machine without, torch.compile then crashes
    # before 2.12, with and without regrad. No version as old as these runs promises.)
    left = LEFT if in_child(release) >= [2, 12] else LEFT[:1]
    return [
        ("nothing", ""), *[("hide", p) for p in paths], *[("delete", p) for p in DELETED],
        *[("turn into C", p) for p in python], *[("leave behind", p) for p in left],
    ]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(cases(), changed)
