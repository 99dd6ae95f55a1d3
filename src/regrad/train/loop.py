"""A training loop: epochs over batches, a progress bar, a history, an early stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from regrad.autodiff.gradients import callable_or_raise
from regrad.core.signatures import helpful
from regrad.errors import ArgumentError, kind

Callback = Callable[[int, dict[str, float]], Any]
SECONDS = 1.0  # between two readings of the loss for the bar


@dataclass
class History:
    """The figures of `fit`: for each epoch `{"loss": …}`, with `"evaluation"` if there was one.

    >>> import regrad as rg
    >>> history = rg.train.fit(lambda batch: batch, [1.0, 3.0], epochs=2, progress=False)
    >>> history["loss"], history.stopped_early
    ([2.0, 2.0], False)
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped_early: bool = False

    def __getitem__(self, key: str) -> list[float]:
        """One figure of all epochs: `history["loss"]`."""
        return [epoch[key] for epoch in self.epochs]


@helpful("fit")
def fit(
    step: Callable[[Any], Any],
    batches: Iterable[Any] | Callable[[], Iterable[Any]],
    epochs: int,
    *,
    progress: bool = True,
    evaluate: Callable[[], Any] | None = None,
    patience: int | None = None,
    callbacks: Callback | Sequence[Callback] = (),
) -> History:
    """Call `step(batch)` for each batch, in each epoch.

    Args:
        step: Does one step and returns its loss, a number or a scalar Tensor.
        batches: The batches, anew for each epoch: a list, a data loader, or a function that
            returns an iterator (and may shuffle).
        epochs: How often to go through them.
        progress: Whether to show a bar (tqdm's, on a terminal, if it is installed).
        evaluate: Gives a number after each epoch, the smaller the better.
        patience: Stop after so many epochs in which the evaluation (without one, the loss) was
            not smaller than ever before.
        callbacks: Functions that are called after each epoch as `callback(epoch, figures)`: the
            epoch, counted from 1, and a dict of its figures, `{"loss": …}` with `"evaluation"`
            if there is one. Save, log, or change a rate there.

    The loss of an epoch is the mean over its batches. Losses are read once an epoch, so that
    JAX need not wait after each step; a bar that is shown reads one every second. For TensorBoard:

        writer = tensorboardX.SummaryWriter()
        fit(..., callbacks=lambda epoch, figures: writer.add_scalars("fit", figures, epoch))

    Returns:
        A `History`: the figures of each epoch.

    Raises ArgumentError if an epoch has no batches, a step returns no loss, or a callback is not
    callable.

    >>> import optax
    >>> import regrad as rg
    >>> w = rg.Variable(5.0, name="w")
    >>> sgd = rg.train.Optimizer(optax.sgd(0.5))
    >>> step = lambda x: sgd.minimize(lambda: rg.square(w - x))
    >>> rg.train.fit(step, [1.0, 3.0], epochs=2)["loss"]
    [10.0, 4.0]
    """
    callable_or_raise(step, "fit")
    called = _callables(callbacks)
    history, best, since = History(), float("inf"), 0
    for epoch in range(epochs):
        figures = {"loss": _mean_loss(step, batches, f"epoch {epoch + 1}/{epochs}", progress)}
        if evaluate is not None:
            figures["evaluation"] = float(evaluate())
        history.epochs.append(figures)
        for callback in called:
            callback(epoch + 1, dict(figures))
        watched = figures.get("evaluation", figures["loss"])
        best, since = (watched, 0) if watched < best else (best, since + 1)
        if patience is not None and since >= patience:
            history.stopped_early = True
            break
    return history


def _callables(callbacks: Any) -> Sequence[Callback]:
    found = [callbacks] if callable(callbacks) else list(callbacks)
    for callback in found:
        if not callable(callback):
            raise ArgumentError(f"fit: expected functions for callbacks, got {kind(callback)}")
    return found


def _mean_loss(step: Callable[[Any], Any], batches: Any, epoch: str, progress: bool) -> float:
    """Go through the batches once, and return the mean of the losses."""
    losses: list[Any] = []
    made = batches() if callable(batches) else batches
    if not isinstance(made, Iterable):
        raise ArgumentError(f"fit: expected a list or the like for batches, got {kind(made)}")
    with _bar(epoch, getattr(made, "__len__", lambda: None)(), progress) as show:
        for batch in made:
            losses.append(step(batch))
            if losses[-1] is None:
                raise ArgumentError("fit: step(batch) must return its loss, got None")
            show(losses[-1])
        if not losses:
            raise ArgumentError(
                f"fit: there are no batches in {epoch.partition('/')[0]}. An iterator is used up "
                "after one epoch: give a list, or a function that makes an iterator."
            )
        mean = sum(map(float, losses)) / len(losses)
        show(mean, 0)
    return mean


@contextmanager
def _bar(epoch: str, total: int | None, progress: bool) -> Iterator[Callable[..., None]]:
    """A progress bar, if there can be one, and a function that shows a loss in it."""
    tqdm = _tqdm() if progress else None  # (one that is off has a finalizer too, and loses Ctrl-C)
    if tqdm is None:
        yield lambda loss, steps=1: None
        return
    with tqdm(desc=epoch, total=total, disable=None) as bar:  # None: off without a terminal
        last = time.monotonic()

        def show(loss: Any, steps: int = 1) -> None:
            nonlocal last
            if not bar.disable and (not steps or time.monotonic() - last > SECONDS):
                bar.set_postfix(loss=f"{float(loss):.4g}")
                last = time.monotonic()
            bar.update(steps)

        yield show


def _tqdm() -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm
