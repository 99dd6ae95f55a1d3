"""Calls whose value a rule replaces: the function that runs instead of torch's own function.

A call under a rule normally runs torch's function and has another gradient (`calls.RuleCall`). If
the rule replaces values, the call runs `Replaced` instead. autograd then records the derivative of
`Replaced`. So `builtin`, and a rule without a gradient, mean the derivative of the replacing
function.

Invariants:

* No program receives torch's own value where the rule replaces it. A call that cannot deliver the
  replaced value raises an error that names the function (`refuse_undelivered`). For ops that run
  where torch calls no mode, regrad checks the dispatcher below autograd, with gradients or without
  (`find_hidden`).
* A replaced value has the shape and dtype of torch's own result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch

from regrad.core.call import HostArrays
from regrad.core.replacing import Forward, outputs_of
from regrad.errors import PassedOverError
from regrad.torch.below import Below, join_types
from regrad.torch.biases import PARAMETERS
from regrad.torch.bridge import bridge, casts, is_differentiable, run
from regrad.torch.host import DisableTorchFunction, is_transformed, is_view
from regrad.torch.host.dynamo import fake_mode, is_traced
from regrad.torch.host.running import returns_views
from regrad.torch.nodes import is_plumbing, name_of, tensors
from regrad.torch.open_scopes import inside
from regrad.torch.run_time import Pulls, may_change, pull_at_run_time
from regrad.transforms.closures import names_in


class Replaced:
    """The function that replaces torch's own in one call, as a function of the call's tensors."""

    def __init__(self, original: Any, forward: Forward) -> None:
        self.original = original  # the same call, with torch's own function
        self.forward = forward

    def __call__(self, *xs: torch.Tensor) -> Any:
        if (is_traced() or fake_mode() is not None) and may_change(self.forward):
            return self._at_run_time(xs)
        return self.answer(xs, self.original.forward(*xs) if self.forward.keeps_y else None)

    def answer(self, xs: Sequence[torch.Tensor], y: Any) -> Any:
        """Return the value; `y` is torch's own value, or None if it has not been computed."""
        specs = [(x.shape, x.dtype) for x in xs]
        original = copy(self.original)
        original.given = xs
        call, given = original.foreign_call(specs, None), original.spread(xs, range(len(xs)))
        own = original.like(xs) if y is None else y
        known = outputs_of(y) if self.forward.keeps_y else []
        within = original.within and original.within.begun()
        with DisableTorchFunction(), inside(within=within):
            ys = self.forward.run_on(ARRAYS, call, given, known, outputs_of(own))
        ys = [z.clone() if is_view(z) or any(z is x for x in xs) else z for z in ys]
        return type(own)(ys) if isinstance(own, tuple) else ys[0]

    def _at_run_time(self, xs: Sequence[torch.Tensor]) -> Any:
        """Add a call of the function to the program being traced; it reads mutable state then."""
        own = self.original.like(xs)
        like = outputs_of(own)

        def pull(xs: Sequence[torch.Tensor], dys: Any, shapes: Any) -> Sequence[Any]:
            with DisableTorchFunction():
                return outputs_of(self(*xs))

        pulls = Pulls(
            pull, [y.dtype for y in like], range(len(like)), [y.dim() for y in like], len(xs)
        )
        found = pull_at_run_time(pulls, xs, [size for y in like for size in y.shape])
        return type(own)(found) if isinstance(own, tuple) else found[0]


def like_own(own: Callable[..., Any], xs: Sequence[torch.Tensor]) -> Any:
    """Return torch's own result, or one without values that has the same shapes and dtypes."""
    device = xs[0].device.type if xs else "cpu"
    with torch.no_grad():
        if not (is_traced() or is_transformed() or casts(device)):
            try:
                return own(*map(without_values, xs))
            except Exception:
                pass
        return own(*xs)


def without_values(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device, which has a shape but no memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _bridge(flat: Callable[..., Any], xs: Sequence[torch.Tensor], name: str) -> Sequence[Any]:
    return (bridge if torch.is_grad_enabled() else run)(flat, xs)


ARRAYS = HostArrays(lambda x: isinstance(x, torch.Tensor), torch.as_tensor, _bridge, names_in)


# -- errors ----------------------------------------------------------------------------------------

# Functions that write into their arguments, by the argument that switches this on.
WRITES = {
    "batch_norm": ("training", 5), "instance_norm": ("use_input_stats", 5),
    "embedding": ("max_norm", 3), "embedding_bag": ("max_norm", 3),
}  # fmt: skip


def refuse_undelivered(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Raise for a call that cannot deliver a replaced value."""
    name = getattr(function, "__name__", str(function))
    if options.get("out") is not None:
        why = "writes into the tensor given as out=. Use its result"
    elif returns_views(name):
        why = "returns a view, which shares memory with its input. Replace the op that reads it"
    elif not any(True for _ in tensors((args, options))) and (args or options):
        why = "is called without a tensor, so no rule applies. Replace the op that reads its result"
    elif _writes(name, args, options):
        why = (
            f"updates one of its arguments (see {WRITES[name][0]!r}), and the replacing function "
            "would not. Replace it in evaluation mode, or replace the op after it"
        )
    else:
        return
    raise PassedOverError(
        f"{name_of(function)} ({name}) is overridden by a rule that replaces its value (rg.replace)"
        f", and {why}."
    )


def _writes(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    switch, at = WRITES.get(name, ("", 0))
    given = options.get(switch, args[at] if len(args) > at else name == "instance_norm")
    if not switch or given is None or given is False:
        return False
    if switch == "max_norm":
        return True
    names = PARAMETERS[name].split()  # (in torch's own function the statistics are third)
    every = [options.get("running_mean"), *args[names.index("running_mean") :][:1], *args[3:4]]
    return any(isinstance(x, torch.Tensor) and x.dim() == 1 for x in every)


def find_hidden(function: Callable[..., Any], run: Callable[[], Any], types: Iterable[str]) -> Any:
    """Return the result of a call without a rule; raise if it computes an op with a new value."""
    with Below() as below:
        result = run()
    refuse_hidden(function, below, types)
    return result


def refuse_hidden(function: Callable[..., Any], below: Any, types: Iterable[str]) -> None:
    """Raise for a call that computed ops inside whose values a rule replaces."""
    ran = {t for t in types if t in below.types or t.rpartition(".")[2].rstrip("_") in below.names}
    if hidden := {t for t in ran if not is_plumbing(function, t)}:
        raise PassedOverError(
            f"{name_of(function)} computes {join_types(hidden)} inside, whose value is replaced "
            "(rg.replace), where overrides do not apply. Write it with separate torch functions, "
            f"or pass keep=[{name_of(function)}] to leave it as it is."
        )


_INDICES = "argmax argmin argsort bincount bucketize nonzero one_hot searchsorted gt ge lt le eq ne"


def refuse_indices(function: Any, xs: Sequence[torch.Tensor], y: Any) -> None:
    """Raise for a function that returns booleans or integers, since its rule would never run."""
    moves = function.__name__ in _INDICES.split() or any(map(is_differentiable, xs))
    ys = [*tensors((y,))]
    if moves and ys and not any(map(is_differentiable, ys)):
        raise PassedOverError(
            f"{name_of(function)} has a rule and returns {ys[0].dtype}, which has no gradient: the "
            "rule would never run. Give the rule to a function that returns floats, or to the "
            "module around it (rg.at(module)), or call regrad.torch.custom_grad. The key for a "
            "spike is 'Step' (torch.heaviside) or 'Threshold' (a comparison that is cast)."
        )
