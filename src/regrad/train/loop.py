"""A training loop: epochs over batches, a progress bar, a history, an early stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from regrad.errors import ArgumentError, kind


@dataclass
class History:
    """What `fit` saw: for each epoch `{"loss": …}`, with `"evaluation"` if there was one."""

    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped_early: bool = False

    def __getitem__(self, key: str) -> list[float]:
        """One figure of all epochs: `history["loss"]`."""
        return [epoch[key] for epoch in self.epochs]


def fit(
    step: Callable[[Any], Any],
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    epochs: int,
    *,
    progress: bool = True,
    evaluate: Callable[[], Any] | None = None,
    patience: int | None = None,
) -> History:
    """Call `step(batch)` for each batch, in each epoch.

    Args:
        step: Does one step and returns its loss, a number or a scalar Tensor.
        batches: The batches, anew for each epoch: a list, a data loader, or a function that
            gives an iterator (and may shuffle).
        epochs: How often to go through them.
        progress: Whether to show a bar (tqdm's, on a terminal, if it is installed).
        evaluate: Gives a number after each epoch, the smaller the better.
        patience: Stop after so many epochs in which the evaluation (without one, the loss) was
            not smaller than ever before.

    The loss of an epoch is the mean over its batches. Losses are read once an epoch, so that
    JAX need not wait after each step.

    Raises ArgumentError if an epoch has no batches.

    >>> import optax
    >>> import regrad as rg
    >>> w = rg.Variable(5.0, name="w")
    >>> sgd = rg.train.Optimizer(optax.sgd(0.5))
    >>> step = lambda x: sgd.minimize(lambda: rg.square(w - x))
    >>> rg.train.fit(step, [1.0, 3.0], epochs=2)["loss"]
    [10.0, 4.0]
    """
    history, best, since = History(), float("inf"), 0
    for epoch in range(epochs):
        losses = [step(batch) for batch in _bar(batches, epoch, epochs, progress)]
        if not losses:
            raise ArgumentError(
                f"fit: there are no batches in epoch {epoch + 1}. An iterator is used up after "
                "one epoch: give a list, or a function that makes an iterator."
            )
        if any(loss is None for loss in losses):
            raise ArgumentError("fit: step(batch) must return its loss, got None")
        figures = {"loss": sum(map(float, losses)) / len(losses)}
        if evaluate is not None:
            figures["evaluation"] = float(evaluate())
        history.epochs.append(figures)
        watched = figures.get("evaluation", figures["loss"])
        best, since = (watched, 0) if watched < best else (best, since + 1)
        if patience is not None and since >= patience:
            history.stopped_early = True
            break
    return history


def _bar(batches: Any, epoch: int, epochs: int, progress: bool) -> Iterable[Any]:
    """The batches of one epoch, behind a progress bar where that can be had."""
    made = batches() if callable(batches) else batches
    if not isinstance(made, Iterable):
        raise ArgumentError(f"fit: batches are a list or the like, got {kind(made)}")
    try:
        from tqdm import tqdm
    except ImportError:
        return made
    off = None if progress else True  # None: off where there is no terminal
    return tqdm(made, desc=f"epoch {epoch + 1}/{epochs}", disable=off)
