"""A call of a torch function under a rule: its forward pass is torch's, its gradient the rule's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from regrad import recording
from regrad.errors import GradientError
from regrad.foreign import ForeignCall, ForeignRule
from regrad.reports import Hit
from regrad.state import current
from regrad.tape import Place, positions
from regrad.tensor import Tensor, wrap
from regrad.torch.bridge import bridged, pushed, run, spread, unaffected


class Call:
    """One call under a rule.

    Args:
        rule: the rule in force.
        values: what the op's parameters were given, leaf by leaf: tensors, numbers, None.
        layout: which leaves belong to which parameter (None: one each).
        attrs: the op's attributes, under their names in the op.
        forward: torch's own function of the tensors among the values.
        hit: where the call is counted.
    """

    def __init__(
        self, rule: ForeignRule, values: Sequence[Any], layout: tuple[Place, ...] | None,
        attrs: dict[str, Any], forward: Callable[..., Any], hit: Hit | None,
    ) -> None:  # fmt: skip
        self.rule = rule
        self.layout = layout
        self.attrs = attrs
        self.forward = forward
        self.hit = hit
        self.places = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor)]
        self.values = [None if isinstance(v, torch.Tensor) else v for v in values]
        kept, self.keeps_y = rule.keeps(range(len(rule.op.inputs)))
        places = layout or tuple(range(len(values)))
        self.kept = [
            n for n, i in enumerate(self.places)
            if any(i in positions(places[p]) for p in kept if p < len(places))
        ]  # fmt: skip

    def __call__(self, *xs: torch.Tensor) -> Any:
        return Overridden.apply(self, *xs)

    def spread(self, xs: Sequence[Any], which: Sequence[int]) -> list[Any]:
        """All values of the op, with these tensors in their places."""
        values = list(self.values)
        for n, x in zip(which, xs, strict=True):
            values[self.places[n]] = x
        return values

    def foreign(self, specs: Sequence[Any]) -> ForeignCall:
        """The call as regrad's walk sees it, for tensors of these shapes and dtypes."""
        every = self.spread(specs, range(len(self.places)))
        every = [s if isinstance(s, tuple) else ((), None) for s in every]
        return ForeignCall(self.rule, every, self.attrs, self.layout)

    def function(self, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The op as a regrad function, recorded under its rule."""
        y = wrap(self.forward(*[x._data for x in xs]))
        state = current()
        if state is not None and state.tapes:
            tensors = tuple(self.spread(xs, range(len(xs))))
            every = tuple(x if isinstance(x, Tensor) else wrap(torch.tensor(x)) for x in tensors)
            recording.put(state, self.rule.op, self.rule.rule, every, self.attrs, y, self.layout)
        return [y]


class Overridden(torch.autograd.Function):
    """Carries one call: `Overridden.apply(call, *xs)`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, *xs: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            y = call.forward(*xs)
            return y.view_as(y) if any(y is x for x in xs) else y  # (`conj` of a real tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *xs = inputs
        ctx.call = call
        ctx.specs = [(tuple(x.shape), x.dtype) for x in xs]
        ys = (output,) if call.keeps_y else ()
        ctx.save_for_backward(*[xs[n] for n in call.kept], *ys)
        ctx.save_for_forward(*xs)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        call, dy = ctx.call, dys[0]
        wanted = [n for n in range(len(ctx.specs)) if ctx.needs_input_grad[n + 1]]
        if call.hit is not None:
            call.hit.ran += 1
        with unaffected(dys):
            found = Pull(call, ctx.specs, wanted, dy)(ctx.saved_tensors, dy)
        return spread(dict(zip(wanted, found, strict=True)), len(ctx.specs))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        try:
            (dy,) = pushed(ctx.call.function, ctx.saved_tensors, tangents[1:])
        except (AttributeError, TypeError) as error:
            raise GradientError(
                f"forward mode: the rule {ctx.call.rule.name!r} is written with torch's functions, "
                "and only one written with regrad's can be transposed. Use reverse mode (grad, "
                "jacrev, vjp), or write the rule with regrad's functions."
            ) from error
        return dy


class Pull:
    """Pulls the gradient that arrived through the rule.

    Where torch converts before it computes (autocast, mixed dtypes), the rule sees inputs in the
    dtype of `dy`, as if the conversion had been an op of its own. A rule written with regrad's
    functions sees bfloat16, which NumPy does not have, as float32.
    """

    def __init__(self, call: Call, specs: Sequence[Any], wanted: Sequence[int], dy: Any) -> None:
        self.call = call
        self.specs = specs
        self.wanted = wanted
        self.leaves = [call.places[n] for n in wanted]
        self._work_in(dy.dtype)

    def _work_in(self, dtype: torch.dtype) -> None:
        """Have the rule see floats of this dtype."""
        self.dtype = dtype if _float(dtype) else None
        self.work = [(shape, self._work_dtype(d)) for shape, d in self.specs]
        self.foreign = self.call.foreign(self.work)

    def _work_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The precision of dy; complex if the input or dy is (`abs` has a real dy)."""
        if self.dtype is None or not _float(dtype):
            return dtype
        return self.dtype.to_complex() if dtype.is_complex else self.dtype

    def __call__(self, saved: Sequence[torch.Tensor], dy: torch.Tensor) -> list[Any]:
        plain = self._is_plain([self._worked(x) for x in saved], dy)
        if not plain and dy.dtype == torch.bfloat16:
            self._work_in(torch.float32)
        given = [self._worked(x) for x in (*saved, dy)]
        if plain:
            xs, y = self._given(given[:-1])
            dxs = self.foreign.pull(xs, y, given[-1], self.leaves)
        else:
            dxs = (bridged if torch.is_grad_enabled() else run)(self._flat, given)
        return [
            None if dx is None else converted(dx, self.specs[n][1])
            for n, dx in zip(self.wanted, dxs, strict=True)
        ]

    def _worked(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._work_dtype(x.dtype))

    def _is_plain(self, saved: Sequence[torch.Tensor], dy: torch.Tensor) -> bool:
        if self.call.rule.plain is not None:
            return self.call.rule.plain
        with torch.no_grad():
            xs, y = self._given(saved)
            return self.foreign.settle(xs, y, dy, self.leaves)

    def _flat(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The pull as a regrad function of what was saved and of dy."""
        *saved, dy = tensors
        xs, y = self._given(saved)
        xs = [self._as_tensor(x, dy) for x in xs]
        dxs = self.foreign.pull(xs, y, dy, self.leaves)
        return [
            zeros(self.work[n], dy) if dx is None else dx
            for n, dx in zip(self.wanted, dxs, strict=True)
        ]

    def _as_tensor(self, x: Any, dy: Tensor) -> Any:
        """A number as rules of regrad expect it."""
        if not isinstance(x, int | float | complex):
            return x
        return wrap(torch.tensor(x, dtype=self.dtype, device=dy._data.device))

    def _given(self, saved: Sequence[Any]) -> tuple[list[Any], Any]:
        count = len(self.call.kept)
        return self.call.spread(saved[:count], self.call.kept), (*saved[count:], None)[0]


def zeros(spec: Any, like: Tensor) -> Tensor:
    """Zeros of a shape and dtype, on the device of `like`."""
    shape, dtype = spec
    return wrap(torch.zeros(shape, dtype=dtype, device=like._data.device))


def converted(dx: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient in the dtype of its input: of a real one, that was made complex, the real part."""
    return (dx.real if dx.is_complex() and not dtype.is_complex else dx).to(dtype)


def _float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
