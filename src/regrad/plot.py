"""Pictures of gradients, drawn by matplotlib (the extra `viz`), which is imported on use.

Each function draws into the Axes that the caller passes, or into new Axes, and returns them;
`savefig` of `ax.figure` writes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regrad.autodiff.gradients import grad
from regrad.core.extras import needed
from regrad.core.overrides import gradient_override_map
from regrad.core.registry import find_op
from regrad.core.tensor import Tensor
from regrad.errors import ArgumentError, kind
from regrad.inspection.comparisons import GradientComparison
from regrad.inspection.traces import COLOURS, GradientTrace, axes_of
from regrad.ops.creation import asarray
from regrad.ops.reduction import sum as sum_of

STEP = 1e-4  # step of the differences, relative to the plotted range
LINE = 60  # characters per line of tokens


def rule(
    function: Callable[..., Any] | str, rule: Any = None, *, low: float = -3.0, high: float = 3.0,
    points: int = 601, ax: Any = None,
) -> Any:  # fmt: skip
    """Draw a function of one number, its true derivative, and the derivative by its rule.

    Args:
        function: A function of a Tensor that works elementwise (`rg.sign`, a function made by
            `custom_grad`), or an op type (`"Sign"`).
        rule: A rule to apply to the op type: a function, or the name of a registered rule. None for
            a function with a custom gradient.
        low, high: The plotted range.
        points: The number of plotted points.
        ax: The matplotlib Axes to draw into.

    Returns:
        The Axes. The true derivative is computed by differences; it is undefined where the function
        jumps, and the line is interrupted there.

    Raises:
        ArgumentError: The call passes a rule for a function instead of an op type, or the range is
            empty.
        UnknownOpError: There is no op of that type.

    >>> import regrad as rg, matplotlib
    >>> matplotlib.use("Agg")
    >>> ax = rg.plot.rule("Sign", rg.rules.straight_through)
    >>> [line.get_label() for line in ax.get_lines()]
    ['Sign', 'true derivative', 'rule: straight_through']
    """
    if not low < high:
        raise ArgumentError(f"plot.rule: expected low < high, got {low!r} and {high!r}")
    if isinstance(function, str):
        op = find_op(function)
        name, call = op.type, op.function
        scope = None if rule is None else {op.type: rule}
    elif rule is None:
        name, call, scope = getattr(function, "__name__", "function"), function, None
    else:
        raise ArgumentError(
            "plot.rule: a rule applies to an op type; pass its name as a string, got "
            f"{kind(function)}"
        )
    x = np.linspace(low, high, points)
    values, true, given = _values(call, x), _slopes(call, x), _rule_slopes(call, x, scope)
    ax = axes_of(ax, 6.0, 4.0)
    ax.plot(x, values, color="#868e96", lw=1, label=name)
    ax.plot(x, true, color="#212529", lw=1.4, ls="--", label="true derivative")
    label = "its own rule" if rule is None else f"rule: {getattr(rule, '__name__', rule)}"
    ax.plot(x, given, color=COLOURS["override"], lw=1.8, label=label)
    ax.grid(color="#e9ecef", lw=0.6)
    ax.set_xlabel("x")
    ax.legend(fontsize=8)
    return ax


def _values(f: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(f(asarray(x)).numpy(), float)


def _slopes(f: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    """Return the derivative by differences; NaN where the function jumps."""
    h = STEP * (x[-1] - x[0])
    left, right = _values(f, x - h), _values(f, x + h)
    slopes = (right - left) / (2 * h)
    half = (_values(f, x + h / 2) - _values(f, x - h / 2)) / h
    # At a jump, half the step doubles the slope.
    return np.where(np.abs(half) > 1.5 * np.abs(slopes) + 1e-6, np.nan, slopes)


def _rule_slopes(
    f: Callable[..., Any], x: np.ndarray, scope: Mapping[str, Any] | None
) -> np.ndarray:
    total = grad(lambda x: sum_of(f(x)), unconnected="zero")
    if scope is None:
        return np.asarray(total(asarray(x)).numpy(), float)
    with gradient_override_map(scope):
        return np.asarray(total(asarray(x)).numpy(), float)


def histograms(
    gradients: Mapping[str, Any], other: Mapping[str, Any] | None = None, *, bins: int = 60,
    labels: tuple[str, str] = ("gradient", "other"),
) -> Any:  # fmt: skip
    """Draw a histogram of the magnitudes of gradients for each layer, one below the other.

    Args:
        gradients: Arrays or Tensors by name: the gradients of each layer or parameter.
        other: Further gradients with the same names, drawn over the first: for example without an
            override.
        bins: The number of bins, on a log scale that all layers share.
        labels: The names of the two sets of gradients.

    Returns:
        The array of Axes, one for each name. Each has the share of elements that are exactly 0 as
        text, because a log scale cannot show them.

    Raises:
        ArgumentError: There are no gradients, or `other` has other names.

    >>> import regrad as rg
    >>> len(rg.plot.histograms({"w": rg.tensor([0.1, 0.0]), "b": rg.tensor([2.0])}))
    2
    """
    plt = needed("matplotlib.pyplot", "viz", "rg.plot")

    if not gradients:
        raise ArgumentError("plot.histograms: there are no gradients to draw")
    if other is not None and set(other) != set(gradients):
        raise ArgumentError(
            f"plot.histograms: expected the same names, got {sorted(gradients)} and {sorted(other)}"
        )
    sets = [gradients] if other is None else [gradients, other]
    magnitudes = [{name: np.abs(_array(g)).ravel() for name, g in one.items()} for one in sets]
    edges = _edges(np.concatenate([m for one in magnitudes for m in one.values()]), bins)
    _, axes = plt.subplots(
        len(gradients), 1, sharex=True, squeeze=False, layout="constrained",
        figsize=(6.0, 0.9 * len(gradients) + 0.8),
    )  # fmt: skip
    colours = (COLOURS["override"], COLOURS["built-in"])
    for name, ax in zip(gradients, axes[:, 0], strict=True):
        notes = []
        for one, label, colour in zip(magnitudes, labels, colours, strict=False):
            ax.hist(one[name], edges, color=colour, alpha=0.6, label=label)
            zeros = float(np.mean(one[name] == 0)) if one[name].size else 0.0
            notes.append(f"{label}: {zeros:.0%} zeros")
        ax.set_xscale("log")
        ax.set_yticks([])
        ax.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        ax.set_title("   ".join(notes), fontsize=7, loc="right", pad=2)
    axes[0, 0].legend(fontsize=7)
    axes[-1, 0].set_xlabel("magnitude of the gradient")
    return axes[:, 0]


def _edges(values: np.ndarray, bins: int) -> np.ndarray:
    """Return the edges of bins on a log scale for all nonzero finite values."""
    shown = values[(values > 0) & np.isfinite(values)]
    if not shown.size:
        return np.logspace(-1, 0, bins + 1)
    low, high = shown.min(), max(shown.max(), 1.001 * shown.min())
    edges = np.geomspace(low, high, bins + 1)
    edges[0], edges[-1] = low, high  # rounding must not exclude the outermost values
    return edges


def saliency(image: Any, gradients: Mapping[str, Any]) -> Any:
    """Draw an image and its gradients by different rules side by side.

    Args:
        image: Shape `(height, width)` or `(height, width, channels)`.
        gradients: Gradients of a score by the image, by name: `{"plain": …, "guided": …}`; for
            several channels, the largest magnitude is shown.

    Returns:
        The array of Axes. Each gradient has its own scale, up to its 99th percentile.

    Raises:
        ArgumentError: A gradient does not have the shape of the image.

    >>> import numpy as np
    >>> import regrad as rg
    >>> len(rg.plot.saliency(np.zeros((4, 4)), {"plain": np.ones((4, 4))}))
    2
    """
    plt = needed("matplotlib.pyplot", "viz", "rg.plot")

    picture = _array(image)
    if picture.ndim not in (2, 3):
        raise ArgumentError(f"plot.saliency: expected an image of rank 2 or 3, got {picture.shape}")
    count = 1 + len(gradients)
    _, axes = plt.subplots(1, count, figsize=(3.0 * count, 3.2), layout="constrained")
    axes = np.atleast_1d(axes)
    low, high = float(picture.min()), float(picture.max())
    axes[0].imshow((picture - low) / ((high - low) or 1.0), cmap="gray")
    axes[0].set_title("image", fontsize=9)
    for (name, g), ax in zip(gradients.items(), axes[1:], strict=True):
        values = np.abs(_array(g))
        if values.shape != picture.shape:
            raise ArgumentError(
                f"plot.saliency: expected the gradient {name!r} in the image's shape "
                f"{picture.shape}, got {values.shape}"
            )
        strength = values.max(axis=-1) if values.ndim == 3 else values
        ax.imshow(strength, cmap="inferno", vmin=0, vmax=float(np.percentile(strength, 99)) or 1.0)
        ax.set_title(name, fontsize=9)
    for ax in axes:
        ax.set_axis_off()
    return axes


def relevance(found: Any, *, image: Any = None, tokens: Any = None, ax: Any = None) -> Any:
    """Draw relevance: a heat map of an image or of tokens, or a bar for each layer.

    Args:
        found: The relevance of one image, with the shape `(height, width)`, and possibly an axis of
            up to four channels before or after these, which are summed; or of one text, with the
            shape `(tokens,)`. (A leading axis of one example is ignored.) Or arrays by name, like
            `layers` and `heads` in the results of `rules.lrp.relevance` and
            `rules.attribution.attribute`.
        image: The image, drawn in gray below the relevance.
        tokens: The tokens, as texts.
        ax: The matplotlib Axes to draw into; by default, new Axes.

    Returns:
        The Axes. Red is positive, blue is negative, white is 0. For a layer, the bars are the sums
        of positive and of negative relevance, and the dot is the sum of all.

    Raises:
        ArgumentError: A shape is not one of these, the number of tokens does not match, there are
            no layers, or relevance is not finite.
        MissingPackageError: matplotlib is not installed.

    >>> import numpy as np
    >>> import regrad as rg
    >>> ax = rg.plot.relevance(np.array([0.5, -0.2]), tokens=["not", "bad"])
    >>> [text.get_text() for text in ax.texts]
    ['not', 'bad']
    """
    if isinstance(found, Mapping):
        return _relevance_bars({name: _finite(each) for name, each in found.items()}, ax)
    values = _finite(found)
    if tokens is not None:
        return _token_map(_example(values, 1), [str(token) for token in tokens], ax)
    return _pixel_map(_gray(_example(values, 2)), image, ax)


def _finite(x: Any) -> np.ndarray:
    values = _array(x)
    if not np.isfinite(values).all():
        raise ArgumentError("plot.relevance: expected finite relevance, got NaN or infinity")
    return values


def _example(values: np.ndarray, rank: int) -> np.ndarray:
    """Return the relevance of the single example, for a text (rank 1) or an image (rank 2 or 3)."""
    ranks = (1,) if rank == 1 else (2, 3)
    shape = values.shape
    if len(shape) == ranks[-1] + 1 and shape[0] == 1:
        return values[0]
    if len(shape) not in ranks:
        what = "one text, (tokens,), without tokens= one image" if rank == 1 else (
            "one image, (height, width) with or without channels; a text needs tokens="
        )  # fmt: skip
        raise ArgumentError(f"plot.relevance: expected the relevance of {what}; got shape {shape}")
    return values


def _gray(values: np.ndarray, join: Callable[..., Any] = np.sum) -> np.ndarray:
    """Return an image without its axis of channels, which is first or last."""
    if values.ndim == 2:
        return values
    axes = [axis for axis in (0, -1) if values.shape[axis] <= 4]
    if values.ndim != 3 or not axes:
        raise ArgumentError(
            f"plot.relevance: no axis of shape {values.shape} is one of up to four channels; sum "
            "over them first"
        )
    return join(values, axis=axes[0])


def _scale(ax: Any, values: np.ndarray) -> tuple[Any, Any]:
    """Draw a color bar; return its color map and its bound."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    bound = float(np.abs(values).max(initial=0.0)) or 1.0
    mapped = ScalarMappable(Normalize(-bound, bound), "RdBu_r")
    ax.figure.colorbar(mapped, ax=ax, shrink=0.8, label="relevance")
    return mapped, bound


def _pixel_map(values: np.ndarray, image: Any, ax: Any) -> Any:
    ax = axes_of(ax, 4.0, 3.2)
    mapped, bound = _scale(ax, values)
    alpha = None
    if image is not None:
        below = _gray(_example(_array(image), 2), np.mean)
        if below.shape != values.shape:
            raise ArgumentError(
                f"plot.relevance: expected an image of the size of the relevance, {values.shape}, "
                f"got {below.shape}"
            )
        ax.imshow(below, cmap="gray")
        alpha = np.sqrt(np.abs(values) / bound)
    ax.imshow(mapped.to_rgba(values, alpha=alpha))
    ax.set_axis_off()
    return ax


def _token_map(values: np.ndarray, tokens: list[str], ax: Any) -> Any:
    if len(tokens) != len(values):
        raise ArgumentError(
            f"plot.relevance: expected {len(values)} tokens, one for each value, got {len(tokens)}"
        )
    texts = [token.replace("\n", "\\n") for token in tokens]
    places, across, line = [], 0, 0
    for text in texts:
        if across and across + len(text) + 1 > LINE:
            across, line = 0, line + 1
        places.append((across, line))
        across += len(text) + 1
    width = max([x + len(text) + 1 for (x, _), text in zip(places, texts, strict=True)], default=1)
    ax = axes_of(ax, max(0.1 * width + 1.2, 3.0), 0.35 * line + 1.0)
    mapped, _ = _scale(ax, values)
    for (x, y), text, value in zip(places, texts, values, strict=True):
        red, green, blue, _ = colour = mapped.to_rgba(value)
        ax.add_patch(_box(x, y, len(text) + 0.9, colour))
        light = 0.3 * red + 0.6 * green + 0.1 * blue > 0.5
        ax.text(
            x + (len(text) + 0.9) / 2, y, text, ha="center", va="center", family="monospace",
            fontsize=9, color="black" if light else "white", parse_math=False,
        )  # fmt: skip
    ax.set_xlim(0, width)
    ax.set_ylim(line + 0.6, -0.6)
    ax.set_axis_off()
    return ax


def _box(x: float, y: float, width: float, colour: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y - 0.42), width, 0.84, facecolor=colour, edgecolor="#ced4da", lw=0.5)


def _relevance_bars(layers: Mapping[str, np.ndarray], ax: Any) -> Any:
    if not layers:
        raise ArgumentError("plot.relevance: there are no layers to draw")
    ax = axes_of(ax, 6.0, 0.3 * len(layers) + 1.0)
    names, arrays = list(layers), list(layers.values())
    for clip, colour in ((np.maximum, "#b2182b"), (np.minimum, "#2166ac")):
        ax.barh(names, [clip(each, 0).sum() for each in arrays], color=colour, alpha=0.75)
    ax.plot([each.sum() for each in arrays], names, "o", color="black", ms=4, label="sum")
    ax.axvline(0, color="#868e96", lw=0.8)
    ax.invert_yaxis()
    ax.tick_params(labelsize=8)
    ax.set_xlabel("relevance")
    ax.legend(fontsize=8)
    return ax


def trace(trace: GradientTrace, ax: Any = None) -> Any:
    """Draw a trace of the backward pass; the same as `trace.plot(ax)`.

    Args:
        trace: The result of `trace_gradients`.
        ax: The Axes to draw into; by default, new Axes.

    Returns:
        The Axes.

    Raises:
        MissingPackageError: matplotlib is not installed.

    >>> import regrad as rg
    >>> found = rg.trace_gradients(lambda x: rg.sin(x).sum())(rg.ones(3))
    >>> type(rg.plot.trace(found)).__name__
    'Axes'
    """
    return trace.plot(ax)


def comparison(comparison: GradientComparison, ax: Any = None) -> Any:
    """Draw two gradients side by side, as heat strips; the same as `comparison.plot(ax)`.

    Args:
        comparison: The result of `compare_gradients`.
        ax: The Axes to draw into; by default, new Axes.

    Returns:
        The Axes.

    Raises:
        MissingPackageError: matplotlib is not installed.

    >>> import regrad as rg
    >>> found = rg.compare_gradients(lambda x: rg.sin(x).sum())(rg.ones(3))
    >>> type(rg.plot.comparison(found)).__name__
    'Axes'
    """
    return comparison.plot(ax)


def _array(x: Any) -> np.ndarray:
    if isinstance(x, Tensor):
        return np.asarray(x.numpy(), float)
    detached = x.detach().cpu() if hasattr(x, "detach") else x
    return np.asarray(detached, float)


__all__ = ["comparison", "histograms", "relevance", "rule", "saliency", "trace"]
