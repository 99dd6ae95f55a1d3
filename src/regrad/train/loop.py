"""A training loop: epochs over batches, a progress bar, a history, and early stopping."""

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
SECONDS = 1.0  # the interval between two reads of the loss for the progress bar


@dataclass
class History:
    """The figures of `fit`: for each epoch `{"loss": …}`, and `"evaluation"` if requested.

    >>> import regrad as rg
    >>> history = rg.train.fit(lambda batch: batch, [1.0, 3.0], epochs=2, progress=False)
    >>> history["loss"], history.stopped_early
    ([2.0, 2.0], False)
    """

    epochs: list[dict[str, float]] = field(default_factory=list)
    stopped_early: bool = False

    def __getitem__(self, key: str) -> list[float]:
        """Return one figure of all epochs: `history["loss"]`."""
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
        step: A function that takes one step and returns its loss, a number or a scalar Tensor.
        batches: The batches of each epoch: a list, a data loader, or a function that returns a new
            iterator (and may shuffle).
        epochs: The number of passes over the batches.
        progress: Whether to show a progress bar (with tqdm, if it is installed, on a terminal).
        evaluate: A function that returns a number after each epoch; smaller is better.
        patience: Stop after this number of epochs without a new minimum of the evaluation (of the
            loss, without `evaluate`).
        callbacks: Functions to call after each epoch as `callback(epoch, figures)`, e.g. to save,
            to log, or to change a learning rate. The epoch counts from 1, and the figures are a
            dict, `{"loss": …}`, with `"evaluation"` if requested.

    The loss of an epoch is the mean over its batches. `fit` reads the losses once per epoch, so
    that JAX need not wait after each step. A visible progress bar reads one loss per second. For
    TensorBoard:

        writer = tensorboardX.SummaryWriter()
        fit(..., callbacks=lambda epoch, figures: writer.add_scalars("fit", figures, epoch))

    Returns:
        A `History` with the figures of each epoch.

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
    """Run the step on all batches, and return the mean of the losses."""
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
                f"fit: there are no batches in {epoch.partition('/')[0]}. An iterator is exhausted "
                "after one epoch: pass a list, or a function that returns an iterator."
            )
        mean = sum(map(float, losses)) / len(losses)
        show(mean, 0)
    return mean


@contextmanager
def _bar(epoch: str, total: int | None, progress: bool) -> Iterator[Callable[..., None]]:
    """Yield a function that shows a loss in a progress bar, if a bar is possible."""
    tqdm = _tqdm() if progress else None  # (a disabled bar has a finalizer, which can lose Ctrl-C)
    if tqdm is None:
        yield lambda loss, steps=1: None
        return
    with tqdm(desc=epoch, total=total, disable=None) as bar:  # None disables it without a terminal
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
