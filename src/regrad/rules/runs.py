"""Runs that share an output of a model among its inputs, for all libraries.

`regrad.torch.relevance` and `regrad.jax.relevance` differentiate models. This module runs a model,
compares runs and sums relevance.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from regrad.core.backends import backend_of, is_array, placed_like
from regrad.core.containers import flatten, tree_map
from regrad.core.foreign import nonzero
from regrad.core.places import ChainStep, matches
from regrad.errors import ArgumentError, kind
from regrad.inspection.relevances import Loss, Relevance

FIELDS = "__dataclass_fields__"
# The rules that read inputs and references as the halves of the first axis.
PAIRED = frozenset({
    "rescale", "rescale_rrelu", "rescale_greater", "rescale_max", "reveal_cancel", "mean_gradient",
})  # fmt: skip


class RelevanceRun:
    """A run of a model whose inputs share an output.

    Args:
        model: The model.
        inputs: The model's arguments, as the user passed them.
        target: The output to explain.
        reference: Inputs that run in the same batch, for comparison, or None.
        batch_axis: The axis of the examples in the inputs.
    """

    array = "an array"  # the library's name for its arrays, in messages

    def __init__(
        self, model: Any, inputs: Any, target: Any, reference: Any = None, batch_axis: int = 0
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.target = target
        self.batch_axis = batch_axis
        self.values: dict[Any, Any] = _by_name(inputs)
        self.half: int | None = None
        if reference is not None:
            self._refer(_by_name(reference))

    def is_float(self, x: Any) -> bool:
        """Return whether a value gets relevance."""
        raise NotImplementedError

    def call(self, *args: Any, **named: Any) -> Any:
        """Call the model."""
        return self.model(*args, **named)

    @property
    def floats(self) -> dict[Any, Any]:
        """Return the inputs that get relevance, by name."""
        return {name: x for name, x in self.values.items() if self.is_float(x)}

    def _refer(self, others: dict[Any, Any]) -> None:
        xs, axis = self.floats, self.batch_axis
        one = [(*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in xs.values()]
        shapes = [*zip((tuple(x.shape) for x in xs.values()), one, strict=True)]
        fit = others.keys() == xs.keys() and all(
            np.shape(others[name]) in each for name, each in zip(xs, shapes, strict=True)
        )
        if not xs or not fit:
            raise ArgumentError(
                "relevance: a reference is for float inputs, with one reference for each, of the "
                f"same shape or of one example; got {[kind(x) for x in others.values()]} for "
                f"{[kind(x) for x in self.values.values()]}"
            )
        for name, x in xs.items():
            xp = backend_of(x).xp
            other = xp.asarray(others[name], dtype=x.dtype, **placed_like(x))
            self.half = x.shape[axis]
            self.values[name] = xp.concat([x, xp.broadcast_to(other, x.shape)], axis=axis)

    def explained(self, values: Mapping[Any, Any]) -> tuple[Any, Any]:
        """Run the model; return the value to differentiate, and the relevance to share."""
        named = {k: v for k, v in values.items() if isinstance(k, str)}
        y = self.call(*[v for k, v in values.items() if k not in named], **named)
        if self.half is None:
            value = self.chosen(y)
            return value, value
        value, other = (self.chosen(tree_map(part, y)) for part in _halves(self.half))
        return value, value - other

    def parts(self) -> list[Self]:
        """Return a run of the inputs alone, and a run of the references alone."""
        parts = _halves(self.half, self.batch_axis) if self.half else []
        values = [tree_map(part, self.values) for part in parts]
        return [type(self)(self.model, each, self.target) for each in values]

    def apart(self) -> list[Any]:
        """Return the target for the inputs alone, and for the references alone."""
        return [run.explained(run.values)[0] for run in self.parts()]

    def chosen(self, y: Any) -> Any:
        """Return the outputs to explain."""
        target = self.target
        if callable(target):
            return target(y)
        if not self.is_float(y) or y.ndim != 2:
            found, example = _in_parts(y)
            raise ArgumentError(
                f"relevance: the target {target!r:.40} is a class, so the model should return "
                f"{self.array} of (examples, classes), got {kind(y)}{found}. Pass a function of "
                f"the output as target{example}"
            )
        known = backend_of(target).to_numpy(target) if is_array(target) else target
        places, count = np.asarray(known), y.shape[1]
        if places.dtype.kind not in "iu":
            raise ArgumentError(
                f"relevance: expected target to be an int, {self.array} of ints or a function, "
                f"got {kind(target)}"
            )
        if ((places < -count) | (places >= count)).any():
            raise ArgumentError(f"relevance: there are {count} classes, got the target {target}")
        return y[np.arange(len(y)), places]

    def as_given(self, found: Iterable[tuple[Any, Any]]) -> Any:
        """Return shares in the form of the inputs; an input in several places gets the sum."""
        shares: dict[Any, Any] = dict.fromkeys(self.values)
        for name, share in found:
            if name not in shares:  # (a share of a module's output)
                continue
            shares[name] = share if shares[name] is None else shares[name] + share
        if isinstance(self.inputs, Mapping):
            return shares
        return tuple(shares.values()) if isinstance(self.inputs, tuple) else shares[0]

    def answer(
        self, total: Any, found: Sequence[tuple[Any, Any]], layers: dict[str, Any],
        rows: Sequence[Loss] | None, used: Any,
    ) -> Relevance:  # fmt: skip
        """Return the result: shares of the inputs by name, of layers, and of ops if recorded."""
        total, missing = balance(total, [share for _, share in found], self.batch_axis)
        losses = () if rows is None else _most_first(rows, float(missing.sum()))
        return Relevance(self.as_given(found), layers, total, missing, losses, used)


def copied_target(target: Any, copies: int) -> Any:
    """Return the target for copies of a batch: classes of the examples are repeated."""
    is_one = copies > 1 and is_array(target) and target.ndim
    return np.tile(backend_of(target).to_numpy(target), copies) if is_one else target


def _by_name(inputs: Any) -> dict[Any, Any]:
    """Return inputs by the names of arguments, or by their places."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return dict(enumerate(inputs if isinstance(inputs, tuple) else (inputs,)))


def _in_parts(y: Any) -> tuple[str, str]:
    """Return the names in the result of a model, and an example of a target, for a message."""
    names = [*y] if isinstance(y, Mapping) else [*getattr(y, "_fields", getattr(y, FIELDS, ()))]
    if names:
        name = "logits" if "logits" in names else names[0]
        found, at = f" with {', '.join(map(str, names))}", f"[{name!r}]"
        at = f".{name}" if hasattr(y, str(name)) else at
    elif isinstance(y, tuple | list):
        found, at = f" of {len(y)}", "[0]"
    else:
        return "", ""
    return found, f", such as lambda y: y{at}[:, 3]"


def _halves(half: Any, axis: int = 0) -> list[Callable[[Any], Any]]:
    """Return two functions of a batched array: they return the part of inputs and of references."""
    before = (slice(None),) * axis

    def cut(part: slice, x: Any) -> Any:
        if is_dataclass(x):  # (as the outputs of transformers)
            names = [*x] if isinstance(x, Mapping) else [f.name for f in fields(x)]
            inner = {n: tree_map(partial(cut, part), getattr(x, n)) for n in names}
            record: Any = x
            return type(record)(**inner) if isinstance(x, Mapping) else replace(record, **inner)
        fits = getattr(x, "shape", ())[axis : axis + 1] == (2 * half,)
        return x[(*before, part)] if fits else x

    return [partial(cut, slice(half)), partial(cut, slice(half, None))]


def check_halves(total: Any, apart: Sequence[Any]) -> None:
    """Raise if inputs and references in one batch have other results than in separate runs."""
    alone, scale = apart[0] - apart[1], max(abs(x).max() for x in apart)
    eps = float(backend_of(total).xp.finfo(total.dtype).eps)
    if alone.shape != total.shape or (abs(alone - total) > eps**0.5 * scale).any():
        raise ArgumentError(
            "relevance: inputs and references run in one batch. In that batch the target differs "
            f"by {total.tolist()!s:.50}, and in separate runs by {alone.tolist()!s:.50}. With "
            "reference=, the batch must be the first axis (or the batch_axis) of each input, and "
            "the first axis of the outputs that the target reads, and examples must not depend on "
            "each other. Move the batch; call model.eval() if the model is in training mode"
        )


def is_incomplete(answer: Relevance) -> bool:
    """Return whether more than rounding errors is missing of what the inputs share."""
    total, missing = abs(answer.total), abs(answer.missing)
    return bool(
        (missing > float(backend_of(missing).xp.finfo(missing.dtype).eps) ** 0.5 * total).any()
    )


def share(x: Any, dx: Any) -> Any:
    """Return a value times a gradient; an infinity in a mask, with a gradient of 0, counts as 0."""
    xp = backend_of(x).xp
    return xp.zeros_like(x) if dx is None else xp.where(dx == 0, dx, x * dx)


def relevance_of(x: Any, dx: Any, half: int | None = None, axis: int = 0) -> Any:
    """Return the relevance of a value; with `half`, of differences from the second half of it."""
    if half is None:
        return share(nonzero(x), dx)
    one, other = _halves(half, axis if x.shape[axis : axis + 1] == (2 * half,) else 0)
    return share(nonzero(one(x) - other(x)), None if dx is None else one(dx))


def balance(total: Any, shares: Sequence[Any], axis: int = 0) -> tuple[Any, Any]:
    """Return the relevance to share, per example where possible, and the remainder.

    Args:
        total: The explained output.
        shares: The shares of the inputs.
        axis: The axis of the examples in them.
    """
    alike = total.ndim == 1 and all(r.shape[axis : axis + 1] == total.shape for r in shares)
    total = total if alike else total.sum()
    moved = [backend_of(r).xp.moveaxis(r, axis, 0) if alike and axis else r for r in shares]
    return total, total - sum(r.reshape(*total.shape, -1).sum(-1) for r in moved)


def joined(found: Sequence[Any], stacks: bool) -> Any:
    """Join several answers.

    Args:
        found: Answers with the same fields.
        stacks: Whether the arrays are stacked along a new first axis, or averaged.
    """

    def join(*xs: Any) -> Any:
        xp = backend_of(xs[0]).xp
        if len({x.shape for x in xs}) > 1:
            raise ArgumentError(
                "targets in a list should have results of one shape, got the shapes "
                f"{[tuple(x.shape) for x in xs]}. Call once for each target"
            )
        return xp.stack(xs) if stacks else sum(xs) / len(xs)

    arrays = [f.name for f in fields(found[0]) if f.name not in ("losses", "used")]
    parts = {n: tree_map(join, *[getattr(each, n) for each in found]) for n in arrays}
    return replace(found[-1], **parts, losses=())


def for_each(explain: Callable[[Any, Any], Any], target: Any, reference: Any) -> Any:
    """Return the answer for a target and a reference, or for lists of them.

    Answers for several references are averaged, and for several targets stacked.
    """
    for given, name in ((target, "target"), (reference, "reference")):
        if isinstance(given, list) and not given:
            raise ArgumentError(f"{name}: expected one or more in the list, got an empty list")
    if isinstance(target, list):
        return joined([for_each(explain, each, reference) for each in target], True)
    if isinstance(reference, list):
        return joined([for_each(explain, target, each) for each in reference], False)
    return explain(target, reference)


def loss_of(path: str, op: str, line: str, *ends: Iterable[tuple[Any, Any]]) -> Loss:
    """Return the loss of an op, from the values and gradients of its outputs and of its inputs."""
    sums = [sum(float(relevance_of(x, dx).sum()) for x, dx in pairs) for pairs in ends]
    return Loss(path, op, line, *sums)


def _most_first(rows: Sequence[Loss], missing: float) -> tuple[Loss, ...]:
    """Return ops sorted by loss, and the missing relevance that no recorded op lost."""
    rest = missing - sum(row.lost for row in rows)
    every = [*rows, Loss("", "unobserved (in place)", "", rest, 0.0)]
    return tuple(sorted(every, key=lambda row: -abs(row.lost)))


def names(pattern: Any, path: str) -> bool:
    """Return whether a path, or a pattern of paths, names a module."""
    return pattern == path or matches(pattern, ChainStep((path,)))


def unit_of(through: Any, batch_axis: int) -> tuple[str, tuple[Any, ...]]:
    """Return the path of a module, and the index of a unit of its output, with the batch."""
    if not isinstance(through, tuple) or len(through) != 2 or not isinstance(through[0], str):
        raise ArgumentError(
            "attribute: through expected the path of a module and an index into its output "
            f'without the batch, such as ("conv1", (3, 0, 0)), got {through!r:.60}'
        )
    path, index = through
    index = list(index) if isinstance(index, tuple) else [index]
    index.insert(batch_axis, slice(None))
    return path, tuple(index)


def mask_of(unit: tuple[str, tuple[Any, ...]], shape: Sequence[int]) -> np.ndarray:
    """Return an array of this shape: 1 at the unit of a module's output, and 0 elsewhere."""
    mask = np.zeros(tuple(shape))
    try:
        mask[unit[1]] = 1
    except IndexError as error:
        raise ArgumentError(
            f"attribute: through expected an index into the output of {unit[0]!r}, of shape "
            f"{mask.shape} with the batch, got {unit[1]}: {error}"
        ) from None
    return mask


def library_of(model: Any, inputs: Any) -> str:
    """Return `"jax"` for a function of JAX, else `"torch"`."""
    torch = sys.modules.get("torch")
    given = (model, *flatten(inputs)[0])
    of_torch = torch and any(isinstance(x, torch.nn.Module | torch.Tensor) for x in given)
    return "jax" if "jax" in sys.modules and callable(model) and not of_torch else "torch"
