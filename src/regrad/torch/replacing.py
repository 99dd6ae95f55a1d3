"""Calls of torch functions whose value is replaced: what stands for torch's own function in one.

The idea: a call under a rule is one of torch's function, with another gradient (`calls.RuleCall`).
Where the rule replaces values, the call is one of `Replaced` instead. Its own derivative is then
what autograd records of it, so that `builtin`, and no gradient at all, mean the derivative of the
function that replaces.

Invariants:

* Nobody gets torch's own value for the other one. A call that cannot deliver it is refused by name
  (`refuse_undelivered`), and an op that runs where no mode is asked about it is looked for below
  autograd, with gradients or without (`find_hidden`).
* What is replaced has the shape and dtype that torch's own result would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from regrad.torch.host.running import gives_views
from regrad.torch.nodes import is_plumbing, name_of, tensors
from regrad.torch.run_time import Pulls, may_change, pull_at_run_time
from regrad.transforms.closures import names_in


class Replaced:
    """The function that replaces torch's own in one call, of the tensors among its values."""

    def __init__(self, original: Any, forward: Forward) -> None:
        self.original = original  # the same call, of torch's own function
        self.forward = forward

    def __call__(self, *xs: torch.Tensor) -> Any:
        if (is_traced() or fake_mode() is not None) and may_change(self.forward):
            return self._at_run_time(xs)
        return self.answer(xs, self.original.forward(*xs) if self.forward.keeps_y else None)

    def answer(self, xs: Sequence[torch.Tensor], y: Any) -> Any:
        """Return the value; torch's own may be known already."""
        specs = [(x.shape, x.dtype) for x in xs]
        call, given = (
            self.original.foreign_call(specs, None),
            self.original.spread(xs, range(len(xs))),
        )
        own = like_own(self.original.forward, xs) if y is None else y
        known = outputs_of(y) if self.forward.keeps_y else []
        ys = self.forward.run_on(ARRAYS, call, given, known, outputs_of(own))
        ys = [z.clone() if is_view(z) or any(z is x for x in xs) else z for z in ys]
        return type(own)(ys) if isinstance(own, tuple) else ys[0]

    def _at_run_time(self, xs: Sequence[torch.Tensor]) -> Any:
        """Have a program that is being written call the function, which reads what may change."""
        own = like_own(self.original.forward, xs)
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
    """Return the result of torch's own function, or one like it that was not computed."""
    device = xs[0].device.type if xs else "cpu"
    with torch.no_grad():
        if not (is_traced() or is_transformed() or casts(device)):
            try:
                return own(*[_without_values(x) for x in xs])
            except Exception:
                pass
        return own(*xs)


def _without_values(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _bridge(flat: Callable[..., Any], xs: Sequence[torch.Tensor], name: str) -> Sequence[Any]:
    return (bridge if torch.is_grad_enabled() else run)(flat, xs)


ARRAYS = HostArrays(lambda x: isinstance(x, torch.Tensor), torch.as_tensor, _bridge, names_in)


# -- what is refused -------------------------------------------------------------------------------

# Functions that write into tensors that they are given, by the argument that has them do so.
WRITES = {
    "batch_norm": ("training", 5), "instance_norm": ("use_input_stats", 5),
    "embedding": ("max_norm", 3), "embedding_bag": ("max_norm", 3),
}  # fmt: skip


def refuse_undelivered(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Refuse a call to which a replaced value cannot be delivered."""
    name = getattr(function, "__name__", str(function))
    if options.get("out") is not None:
        why = "writes into the tensor given as out=. Use its result"
    elif gives_views(name):
        why = "returns a view, which shares memory with its input. Replace the op that reads it"
    elif not any(True for _ in tensors((args, options))) and (args or options):
        why = "is called without a tensor, so that it is nobody's op. Replace what reads its result"
    elif _writes(name, args, options):
        why = (
            f"updates a tensor that it is given here (see {WRITES[name][0]!r}), which would not "
            "happen. Replace it in evaluation mode, or replace the op behind it"
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
    names = PARAMETERS[name].split()  # (torch's own function has the statistics third)
    every = [options.get("running_mean"), *args[names.index("running_mean") :][:1], *args[3:4]]
    return any(isinstance(x, torch.Tensor) and x.dim() == 1 for x in every)


def find_hidden(function: Callable[..., Any], run: Callable[[], Any], types: Iterable[str]) -> Any:
    """Return the result of a call that no rule covers; refuse ops whose value it would not get."""
    with Below() as below:
        result = run()
    refuse_hidden(function, below, types)
    return result


def refuse_hidden(function: Callable[..., Any], below: Any, types: Iterable[str]) -> None:
    """Refuse a call in which ops ran whose values are replaced."""
    ran = {t for t in types if t in below.types or t.rpartition(".")[2].rstrip("_") in below.names}
    if hidden := {t for t in ran if not is_plumbing(function, t)}:
        raise PassedOverError(
            f"{name_of(function)} computes {join_types(hidden)} inside, whose value is replaced "
            "(rg.replace), out of sight of any override. Write it with separate torch functions, "
            f"or pass keep=[{name_of(function)}] to leave it as it is."
        )


_INDICES = "argmax argmin argsort bincount bucketize nonzero one_hot searchsorted gt ge lt le eq ne"


def refuse_indices(function: Any, xs: Sequence[torch.Tensor], y: Any) -> None:
    """Refuse a function whose results are booleans or integers, so that no rule ever runs."""
    moves = function.__name__ in _INDICES.split() or any(map(is_differentiable, xs))
    ys = [*tensors((y,))]
    if moves and ys and not any(map(is_differentiable, ys)):
        raise PassedOverError(
            f"{name_of(function)} has a rule and returns {ys[0].dtype}, which has no gradient: the "
            "rule would never run. Give the rule to a function that returns floats, or to the "
            "module around it (rg.at(module)), or call regrad.torch.custom_grad. The key of a "
            "spike is 'Step' (torch.heaviside) or 'Threshold' (a comparison that is cast)."
        )
