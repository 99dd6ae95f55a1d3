"""A call of a torch function under a rule: torch's forward pass, with the rule as the gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any

import torch

from regrad.core.call import Call, gradients, on_tensors
from regrad.core.containers import replaced
from regrad.core.foreign import ForeignRule
from regrad.core.reports import Hit
from regrad.core.rule import describe_pull
from regrad.core.state import current
from regrad.core.surrogates import Learns, LearnsDerivative
from regrad.core.tape import Place, Spec, put, record_of
from regrad.core.tensor import Tensor, wrap
from regrad.errors import GradientError, RuleError
from regrad.torch.apart import TorchOwnCall
from regrad.torch.bridge import alias, apply, bridge, is_differentiable, push_forward, run, shield
from regrad.torch.derivatives import (
    TorchGradient,
    converted,
    fitted,
    refuse_closed_over,
    vjp,
    vjp_again,
)
from regrad.torch.host import (
    DisableTorchFunction,
    enable_saved_hooks,
    in_forward_mode,
    is_transformed,
    sequence_nr,
    version_of,
)  # fmt: skip
from regrad.torch.host.dynamo import fake_mode, is_traced
from regrad.torch.host.running import Silent
from regrad.torch.open_scopes import AROUND
from regrad.torch.orders import in_gradient, is_of_gradient
from regrad.torch.recorded import Recordings, exact, is_usual
from regrad.torch.replacing import Replaced, like_own
from regrad.torch.run_time import Pulls, holds_parameters, may_change, may_hold, pull_at_run_time
from regrad.transforms.closures import names_in


class RuleCall:
    """One call under a rule.

    Args:
        rule: The active rule.
        values: The arguments for the op's parameters, leaf by leaf: tensors, numbers, None.
        layout: Which leaves belong to which parameter (None: one leaf each).
        attrs: The op's attributes, under the op's names for them.
        forward: Torch's own function of the tensors among the values.
        hit: The entry of the report that counts the call.
    """

    def __init__(
        self, rule: ForeignRule, values: Sequence[Any], layout: tuple[Place, ...] | None,
        attrs: dict[str, Any], forward: Callable[..., Any], hit: Hit | None,
    ) -> None:  # fmt: skip
        self.rule = rule
        self.attrs = attrs
        self.forward: Callable[..., Any] = forward
        self.hit = hit
        if rule.learned:  # (inputs of the rule, but not of torch's function)
            count, n = len(rule.learned), len(values)
            layout = layout and (*layout, *range(n, n + count))
            values = [*values, *rule.learned]
            self.forward = lambda *xs: forward(*xs[:-count])
        self.layout = layout
        arrays = tuple([isinstance(v, torch.Tensor) for v in values])
        self.places: list[int]
        self.kept: list[int]
        self.keeps_y: bool
        self.places, self.kept, self.keeps_y = rule.plan(arrays, layout)
        pairs = zip(values, arrays, strict=True)
        self.values: list[Any | None] = [None if is_array else v for v, is_array in pairs]
        self.is_simple: bool = layout is None and len(self.places) == len(self.values)
        if rule.forward is not None:
            self.forward = Replaced(copy(self), rule.forward)

    kind: type = tuple  # the type of a result with several outputs
    at: Sequence[int] | None = None  # the positions of its tensors among a Function's arguments
    total: int | None = None  # the number of arguments of that Function
    theirs: tuple[Any, int] = None, 0  # that Function, and how many tensors it has saved itself
    specs: Sequence[Any] = ()  # shapes and dtypes of its tensors, once its rule runs
    once = False  # whether the rule defines only the first derivative
    materializes: bool = True  # whether unused outputs have gradients of zeros instead of None
    within: Any = None  # the `InsideWholeCall` of a module's call
    given: Sequence[Any] | None = None  # its tensors, while a function replaces the call
    record: Any = None  # torch's own record of the op, for `builtin` (`TorchGradient`)

    @cached_property
    def fixed(self) -> Any:
        """A key of everything besides tensors that the rule depends on; None if there is no key."""
        try:
            return exact((self.layout, self.values, self.attrs))
        except TypeError:
            return None

    def __call__(self, *xs: torch.Tensor) -> Any:
        if AROUND.get().own:
            return self.forward(*xs)
        rule, start, versions = self.rule, 0, []
        of_function = rule.forward is not None or rule.is_surrogate  # (no cost for other rules)
        if of_function and torch.is_grad_enabled() and (found := self._link(xs)) is not None:
            return found
        replaces = rule.forward is not None and torch.is_grad_enabled()
        if replaces:
            start, versions = sequence_nr(), [version_of(x) for x in xs]
        if self.rule.asks_builtin or (self.once and not self._is_in_program()):
            later = is_traced() and may_change(self.rule)  # (a record made now would be lost)
            self.prepare(xs, None if later else TorchGradient.of(self.forward, xs))
        elif replaces and may_hold(self.rule) and not (is_traced() or is_transformed()):
            self.record = TorchGradient(self.forward, [x.detach() for x in xs])
        if replaces and self.record is not None:
            refuse_closed_over(self, self.record, start)
        y = apply(Overridden, self, *xs)
        if replaces and [version_of(x) for x in xs] != versions:
            raise RuleError(
                f"replace: the forward of {self.describe()} wrote into an input, so its rule would "
                "receive the changed input. Return a new tensor: x * 2, not x.mul_(2)."
            )
        return self.kind(y) if isinstance(y, tuple) and self.kind is not tuple else y

    def _link(self, xs: Sequence[torch.Tensor]) -> Any:
        """Return the value, with the gradient of a function as autograd records it here and now.

        Then everything that the function uses gets a gradient, whether it is an argument or not.
        Return None if the rule is of another kind.
        """
        rule, ys, made = self.rule, [], []
        if rule.is_derivative:
            ys = made = self._outputs(xs)
        elif rule.is_surrogate and not self.once and rule.plain is not False and may_hold(rule):
            if is_traced() or fake_mode() is not None:
                return None
            with torch.no_grad():
                ys = self._outputs(xs)
            call, specs = copy(self), [(x.shape, x.dtype) for x in xs]
            call.vjp = lambda f, xs, dys: made.extend(f(xs)) or xs  # (xs are dummy gradients)
            pull = Pull(call, specs, [n for n, (_, d) in enumerate(specs) if _float(d)], None)
            with shield(ys):
                saved = [*[xs[n] for n in self.kept], *(ys if self.keeps_y else ())]
                guard(rule, pull, saved, ys, self.describe)
        used = rule.forward if rule.is_derivative else rule.is_surrogate and rule
        if used and used.plain is False and may_hold(rule) and holds_parameters(rule):
            raise GradientError(
                f"{self.describe()} closes over a parameter of PyTorch, which regrad's functions "
                "treat as a constant. Write it with torch's functions, or let the rule learn the "
                "parameter: rg.rules.learns(rule, scale=scale)."
            )
        if not made:
            return None
        own = TorchOwnCall(self._copied, lambda ys: (ys, {}), False)
        own.count_run = self.count_run
        self.kind = type(ys)
        return own.link(tuple(made), ys)

    def _copied(self, *ys: Any) -> Any:
        return self.kind([y.clone() for y in ys]) if len(ys) > 1 else ys[0].clone()  # pyright: ignore

    def _is_in_program(self) -> bool:
        """Return whether torch.compile traces; its programs have only first derivatives."""
        if is_traced() and is_transformed():
            enable_saved_hooks()  # (the program has disabled them; an error would leave them so)
            raise GradientError(
                f"order=1: {self.describe()} runs under torch.func in a program of torch.compile, "
                "where the order of a derivative is unknown. Compile the function that torch.func "
                "differentiates, or let the rules apply at every order (order=None)."
            )
        return is_traced()

    def prepare(self, xs: Sequence[torch.Tensor], record: Any) -> None:
        """Prepare for a rule that calls torch's own gradient; `record` is its record, or None."""
        self.record = record
        if record is None or not self.rule.plain:  # the function may have to run again
            self.kept = list(range(len(xs)))
            free = is_transformed()  # (then tensors do not report whether they require a gradient)
            moving = [n for n, x in enumerate(xs) if _float(x.dtype) and (free or x.requires_grad)]
            self.moving: list[int] = moving

    def describe(self) -> str:
        """Return a description of the rule and the call, for messages."""
        rule = self.rule
        return describe_pull(record_of(rule.op, rule.rule, {}, (), (), (), 0, None, hit=self.hit))

    def checked(self, spec: Spec, dx: Any, dy: torch.Tensor) -> Any:
        """Return the answer of a rule with one input in its final form; raise if it is invalid."""
        shape, dtype = spec
        one = Call(self.rule, [(tuple(shape), dtype)], self.attrs, hit=self.hit)
        return one.checked(one.record([None], None, [0], dy), 0, dx, dy)

    def count_run(self) -> None:
        """Count a run of the rule."""
        if self.hit is not None:
            self.hit.ran += 1

    def spread(self, xs: Sequence[Any], which: Sequence[int]) -> list[Any]:
        """Return all values of the op, with these tensors at their positions."""
        if len(xs) == len(self.values):
            return list(xs)
        values = list(self.values)
        for n, x in zip(which, xs, strict=True):
            values[self.places[n]] = x
        return values

    def foreign_call(self, specs: Sequence[Any], outputs: Sequence[Any] | None) -> Call:
        """Return the call in regrad's form, for tensors of these shapes and dtypes."""
        every = self.spread(specs, range(len(self.places)))
        if len(specs) < len(every):
            every = [s if isinstance(s, tuple) else ((), None) for s in every]
        return Call(self.rule, every, self.attrs, self.layout, outputs, self.hit, self)

    def like(self, xs: Sequence[torch.Tensor]) -> Any:
        """Return torch's own result, or one without values that has the same shapes and dtypes."""
        return like_own(self.forward, xs)

    # -- torch's own gradient and value, for rules that use them -----------------------------------

    def vjp(self, f: Any, xs: Sequence[torch.Tensor], dys: Any) -> Any:
        """Return the gradients of a function."""
        return vjp(f, xs, dys, self if self.rule.is_surrogate else None)

    def pull(self, xs: Sequence[Any], dys: Sequence[Any], only: int | None = None) -> Any:
        """Return torch's own gradients, by leaf; None where a tensor has no gradient."""
        first = next(dy for dy in dys if dy is not None)
        if self.record is not None and isinstance(first, torch.Tensor):
            place = None if only is None else self.places.index(only)
            dxs = self.record.pull(dys, torch.is_grad_enabled(), place)
        else:
            dxs = self._pull_anew([xs[i] for i in self.places], dys)
        dxs = [self._fitted(dx, n, first) for n, dx in enumerate(dxs)]
        return dict(zip(self.places, dxs, strict=True))

    def _fitted(self, dx: Any, n: int, dy: Any) -> Any:
        """Return a gradient in the shape and dtype in which the rule received the tensor."""
        if isinstance(dx, Tensor):
            return dx
        like = dy._data if isinstance(dy, Tensor) else dy
        shape, dtype = self.specs[n]
        dx = fitted(dx, shape, _as_precise(dtype, like.dtype), like)
        return wrap(dx) if isinstance(dy, Tensor) and dx is not None else dx

    def _pull_anew(self, xs: Sequence[Any], dys: Sequence[Any]) -> Sequence[Any]:
        """Run torch's function again; return the gradients of the inputs that moved at first."""
        held = [x._data if isinstance(x, Tensor) else x for x in xs]
        held = [x if n in self.moving else x.clone() for n, x in enumerate(held)]  # (not shared)

        def outputs(moving: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return self._outputs(replaced(held, self.moving, moving))

        zeros = self.materializes or any(isinstance(dy, Tensor) for dy in dys)
        again = partial(vjp_again, call=self, zeros=zeros)
        found = gradients(outputs, again, [xs[n] for n in self.moving], dys)
        return replaced([None] * len(xs), self.moving, found)

    def values_at(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the results of torch's own function at other inputs."""
        leaves = [*leaves, *[AROUND.get().learned.get(id(x), x) for x in self.rule.learned]]
        for mine, x in zip(self.values, leaves, strict=True):
            if mine is not None and not (isinstance(x, Tensor) or x == mine):
                raise RuleError(
                    f"forward: in {self.describe()} an input is the number {mine}, and must stay "
                    f"this number, got {x!r:.60}."
                )
        return on_tensors(self._outputs, vjp_again, [leaves[i] for i in self.places])

    def _outputs(self, xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        y = self.forward(*xs)
        return y if isinstance(y, tuple) else (y,)

    def function(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the op as a regrad function, and record it under its rule."""
        made = self.forward(*[x._data for x in xs])
        y: Any = tuple(map(wrap, made)) if isinstance(made, tuple) else wrap(made)
        state = current()
        if state is not None and state.tapes:
            tensors = tuple(self.spread(xs, range(len(xs))))
            every = tuple(x if isinstance(x, Tensor) else wrap(torch.tensor(x)) for x in tensors)
            put(state, self.rule.op, self.rule.rule, every, self.attrs, y, self.layout)
        return y if isinstance(y, tuple) else [y]


def check_learned(value: Any) -> None:
    """Raise for parameters of a rule that cannot have a gradient."""
    if isinstance(value, LearnsDerivative):  # (its parameters may also be constants)
        value.check(
            lambda x: isinstance(x, torch.Tensor) and _float(x.dtype),
            "a tensor of PyTorch's floats",
        )
    elif isinstance(value, Learns):
        value.check(
            lambda x: isinstance(x, torch.Tensor) and x.requires_grad,
            "a tensor of PyTorch that requires a gradient",
        )


class Overridden(torch.autograd.Function, metaclass=Silent):
    """Carries one call: `Overridden.apply(call, *xs)`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: RuleCall, *xs: torch.Tensor) -> Any:
        # (no mode is active here: the caller has disabled them)
        y = call.forward(*xs) if call.record is None else call.record.take()
        if isinstance(y, tuple):
            call.kind, y = type(y), tuple(y)
            return y
        for x in xs:
            if y is x:  # (`conj` of a real tensor)
                return alias(y)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *xs = inputs
        ys, outputs, kept = (output,), None, call.kept
        if isinstance(output, tuple):
            ys, outputs = output, [(tuple(y.shape), y.dtype) for y in output]
        if outputs or not ys[0].is_floating_point():
            ctx.mark_non_differentiable(*[y for y in ys if not is_differentiable(y)])
        if not call.materializes:
            ctx.set_materialize_grads(False)
        if in_forward_mode():  # under vmap both modes have to save the same tensors
            kept = list(range(len(xs)))
            ctx.save_for_forward(*xs, *(ys if call.keeps_y else ()))
        ctx.save_for_backward(*[xs[n] for n in kept], *(ys if call.keeps_y else ()))
        # (a single attribute, because each attribute costs as much as a call)
        ctx.known = call, [(tuple(x.shape), x.dtype) for x in xs], outputs, kept

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
        # (reading saved tensors may run a checkpoint again, under its own overrides)
        return pull_back(ctx, ctx.saved_tensors, dys)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        call, specs, outputs, _ = ctx.known
        if call.once:
            raise GradientError(
                f"forward mode: {call.describe()} has order=1, and in forward mode the order "
                "of a derivative is unknown. Use reverse mode (grad, jacrev, vjp), at every order."
            )
        if call.rule.asks_builtin or "forward" in call.rule.rule.extras:
            raise GradientError(
                f"forward mode: {call.describe()} uses `builtin` or `forward` (as a replaced value "
                "without a gradient does), which exist only in the backward pass. Use reverse mode "
                "(grad, jacrev, vjp)."
            )
        call.count_run()
        try:
            xs = ctx.saved_tensors[: len(specs)]
            dys = push_forward(call.function, xs, tangents[1:])
        except (AttributeError, TypeError) as error:
            raise GradientError(
                f"forward mode: the rule {call.rule.name!r} is written with torch's functions, and "
                "regrad transposes only rules written with regrad's functions. Use reverse mode "
                "(grad, jacrev, vjp), or write the rule with regrad's functions."
            ) from error
        return dys if outputs else dys[0]


def pull_back(ctx: Any, saved: Sequence[Any], dys: Sequence[torch.Tensor | None]) -> Any:
    """Return the gradients of all arguments of the Function that this context belongs to."""
    call, specs, outputs, kept = ctx.known
    at, needs = call.at or range(1, len(specs) + 1), ctx.needs_input_grad
    wanted = [n for n, i in enumerate(at) if needs[i]]
    if kept is not call.kept:  # select the tensors that the rule names
        saved = [*[saved[kept.index(n)] for n in call.kept], *saved[len(kept) :]]
    pull = _pull_at_run_time if is_traced() and may_change(call.rule) else _pull_now
    found = pull(call, specs, outputs, wanted, saved, dys)
    if call.once and not is_traced():
        recorded = () if call.record is None else call.record.xs
        found = in_gradient(found, [*saved[: len(call.kept)], *recorded])
    dxs: list[Any] = [None] * (call.total or len(specs) + 1)
    for n, dx in zip(wanted, found, strict=True):
        dxs[at[n]] = dx
    return tuple(dxs)


def _pull_now(
    call: RuleCall, specs: Any, outputs: Any, wanted: Sequence[int], saved: Any, dys: Any,
    hidden: bool = False,
) -> Sequence[Any]:  # fmt: skip
    call.specs = specs
    if call.once and not is_traced() and is_of_gradient():
        with shield(dys):
            dxs = call.pull(call.spread(saved[: len(call.kept)], call.kept), dys)
        found = [dxs[call.places[n]] for n in wanted]
        pairs = zip(found, wanted, strict=True)
        return [None if dx is None else converted(dx, specs[n][1]) for dx, n in pairs]
    call.count_run()
    if call.rule.plain is False and not (hidden or call.once) and is_usual(dys):
        found = _replayed(call, specs, outputs, wanted, [*saved, *dys])
        if found is not None:
            return found
    with shield(dys):
        is_simple = call.rule.plain and call.is_simple and outputs is None
        if is_simple and _have_dtype(specs, dys[0].dtype):
            pull = partial(_pull_simply, call, specs, wanted)
        else:
            pull = Pull(call, specs, wanted, outputs)
        return guard(call.rule, pull, saved, dys, call.describe, hidden)


def _replayed(
    call: RuleCall, specs: Any, outputs: Any, wanted: Sequence[int], arrays: Sequence[Any]
) -> Sequence[Any] | None:
    """Return gradients from the recording of a rule in regrad's functions; None without a key."""
    rule = call.rule
    if rule.recordings is None:
        rule.recordings = Recordings(rule.functions)
    if call.fixed is None:
        return None
    fixed = call.fixed, tuple(wanted), tuple(specs), outputs and tuple(outputs)
    with DisableTorchFunction():
        found = rule.recordings.replay(fixed, arrays)
    return found or rule.recordings.run(Pull(call, specs, wanted, outputs), fixed, arrays)


def _pull_simply(
    call: RuleCall, specs: Any, wanted: Sequence[int], saved: Sequence[Any], dys: Sequence[Any]
) -> Sequence[Any]:
    held = list(saved)
    y = held.pop() if call.keeps_y else None
    one = Call(call.rule, specs, call.attrs, hit=call.hit, own=call)
    return one.pull(call.spread(held, call.kept), y, dys[0], wanted)


# A write through one of these does not increase the version counter of a tensor.
UNCOUNTED = {"data", "numpy", "asarray", "from_dlpack", "untyped_storage"}


def guard(
    rule: Any, pull: Callable[..., Any], saved: Sequence[Any], dys: Sequence[Any],
    describe: Callable[[], str], hidden: bool = False,
) -> Any:  # fmt: skip
    """Return `pull(saved, dys)` for a rule that may write into these tensors.

    Other code reads the tensors too: an incoming gradient may flow to several places, and a saved
    tensor may be a weight. So a rule receives copies when it first runs, and later if it wrote into
    them. A rule always receives copies where torch does not count writes: in programs (`hidden`),
    under torch.func, or if the code of the rule names a function in `UNCOUNTED`.

    Raises:
        RuleError: A rule wrote into a tensor, although it wrote into none when it first ran.
    """
    if rule.named is None:
        rule.named = names_in(rule.functions)
        rule.writes = True if rule.named & UNCOUNTED else None
    given = [*saved, *dys]
    hidden = hidden or is_transformed() or is_traced()
    copied = hidden or rule.writes is not False
    if copied:
        given = [None if x is None else x.clone() for x in given]
    before = [x is not None and version_of(x) for x in given]
    found = pull(given[: len(saved)], given[len(saved) :])
    if not hidden:
        writes = [x is not None and version_of(x) for x in given] != before
        rule.writes = writes or bool(rule.writes)
        if writes and not copied:
            raise wrote_into(describe())
    return found


def wrote_into(rule: str) -> RuleError:
    """Return the error for a rule that wrote into its arguments although it received no copies."""
    return RuleError(
        f"{rule} wrote into one of its arguments, which other code may read. The rule had not done "
        "so before, so it received no copies. Return a new tensor: dy * 2, not dy.mul_(2)."
    )


def _have_dtype(specs: Sequence[Any], dtype: torch.dtype) -> bool:
    """Return whether all inputs have the dtype of the incoming gradient."""
    for spec in specs:  # noqa: SIM110 (this is run for every op)
        if spec[1] is not dtype:
            return False
    return True


def _pull_at_run_time(
    call: RuleCall, inputs: Any, outputs: Any, wanted: Sequence[int], saved: Any, dys: Any
) -> Sequence[Any]:
    """Add a call of the rule to the program being traced, which makes the call at run time."""
    several, count = outputs is not None, len(inputs)
    specs = [*inputs, *(outputs or ())]
    dtypes = [dtype for _, dtype in specs]

    def pull(saved: Sequence[Any], dys: Sequence[Any], shapes: Sequence[Any]) -> Sequence[Any]:
        known = list(zip(shapes, dtypes, strict=True))
        outputs = known[count:] if several else None
        return _pull_now(call, known[:count], outputs, wanted, saved, dys, hidden=True)

    pulls = Pulls(pull, [dtypes[n] for n in wanted], wanted, [len(s) for s, _ in specs], len(saved))
    return pull_at_run_time(pulls, [*saved, *dys], [size for shape, _ in specs for size in shape])


class Pull:
    """Applies the rule to the incoming gradients.

    Where torch converts inputs before it computes (autocast, mixed dtypes), the rule receives the
    inputs in the dtype of `dy`, as if the conversion were a separate op. A rule written with
    regrad's functions receives bfloat16, which NumPy does not have, as float32.
    """

    def __init__(
        self, call: RuleCall, specs: Sequence[Any], wanted: Sequence[int], outputs: Any
    ) -> None:
        self.call = call
        self.specs = self.work = specs
        self.wanted = wanted
        self.outputs = outputs
        self.leaves: list[int] = [call.places[n] for n in wanted]

    def in_one_dtype(self, given: Sequence[Any]) -> Sequence[Any]:
        """Convert the rule's arguments to the dtype of `dy`, as torch did before it computed."""
        dys = given[-len(self.outputs or "1") :]
        self.dtype: Any = next((d.dtype for d in dys if d is not None and _float(d.dtype)), None)
        if self.dtype is None or _have_dtype(self.specs, self.dtype):
            return given
        return self._work_in(self.dtype, given)

    def as_regrad_sees(self, given: Sequence[Any]) -> Sequence[Any]:
        """Convert bfloat16 to float32, once all values have one dtype."""
        return self._work_in(torch.float32, given) if self.dtype is torch.bfloat16 else given

    def _work_in(self, dtype: torch.dtype, given: Sequence[Any]) -> Sequence[Any]:
        self.work: Sequence[Any] = [(shape, _as_precise(d, dtype)) for shape, d in self.specs]
        return [x if x is None else x.to(_as_precise(x.dtype, dtype)) for x in given]

    def fitting(self, dxs: Sequence[Any]) -> list[Any]:
        """Convert gradients to the dtypes of the inputs."""
        if self.work is self.specs:
            return list(dxs)
        pairs = zip(self.wanted, dxs, strict=True)
        return [None if dx is None else converted(dx, self.specs[n][1]) for n, dx in pairs]

    def __call__(self, saved: Sequence[torch.Tensor], dys: Sequence[torch.Tensor]) -> list[Any]:
        given = self.in_one_dtype((*saved, *dys))

        def pull_by_regrad() -> Sequence[Any]:
            specs = [*[None] * len(saved), *(self.outputs or [None])]
            like, pairs = next(x for x in given if x is not None), zip(given, specs, strict=False)
            every = [like.new_zeros(s[0], dtype=s[1]) if s and x is None else x for x, s in pairs]
            seen: Any = self.as_regrad_sees(every)
            return (bridge if torch.is_grad_enabled() else run)(self.flat, seen)

        xs, y, dy = self._sort(given)
        one = self.call.foreign_call(self.work, self.outputs)
        return self.fitting(one.pull_either(xs, y, dy, self.leaves, pull_by_regrad))

    def flat(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients, as a regrad function of saved tensors and incoming gradients."""
        xs, y, dy = self._sort(tensors)
        xs = [_as_tensor(x, tensors[-1]) for x in xs]
        one = self.call.foreign_call(self.work, self.outputs)
        dxs = one.pull(xs, y, dy, self.leaves)
        pairs = zip(self.wanted, dxs, strict=True)
        return [zeros(self.work[n], tensors[-1]) if dx is None else dx for n, dx in pairs]

    def _sort(self, given: Sequence[Any]) -> tuple[list[Any], Any, Any]:
        """Split the saved tensors and `dys` into the op's inputs, its output and its gradient."""
        kept, outputs = len(self.call.kept), len(self.outputs or "1")
        xs = self.call.spread(given[:kept], self.call.kept)
        ys, dys = tuple(given[kept:-outputs]) or (None,), tuple(given[-outputs:])
        return (xs, ys, dys) if self.outputs else (xs, ys[0], dys[0])


def zeros(spec: Any, like: Tensor) -> Tensor:
    """Return zeros of a shape and dtype, on the device of `like`."""
    shape, dtype = spec
    return wrap(torch.zeros(shape, dtype=dtype, device=like._data.device))


def _as_tensor(x: Any, like: Tensor) -> Any:
    """Return a number as a tensor, which rules of regrad expect."""
    if not isinstance(x, int | float | complex):
        return x
    return wrap(torch.tensor(x, dtype=like._data.dtype, device=like._data.device))


def _as_precise(dtype: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return a dtype with the precision of another; complex if either is (`abs` has a real dy)."""
    if dtype == other or not _float(dtype):
        return dtype
    return other.to_complex() if dtype.is_complex else other


def _float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
