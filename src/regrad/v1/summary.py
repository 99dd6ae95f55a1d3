"""`tf.summary`, which accepts every call and writes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from regrad.core.tensor import TensorLike
from regrad.v1.errors import warn_once
from regrad.v1.graph.conversion import constant
from regrad.v1.graph.graphs import GraphKeys, get_collection, get_default_graph
from regrad.v1.graph.row_docs import fill_in

__all__ = ["FileWriter", "audio", "histogram", "image", "merge", "merge_all", "scalar", "text"]

TEXT = "tf.summary writes no files in regrad.v1; print or plot the results of session.run"


def _empty(name: str, collections: Sequence[str] | None) -> Any:
    """Return an empty string tensor, which is added to collections."""
    warn_once(TEXT)
    made = constant(b"", name=name)
    get_default_graph().add_to_collections(collections, made)
    return made


def _recorder(name: str) -> Callable[..., Any]:
    def record(
        name: str, tensor: TensorLike, *options: Any, collections: Sequence[str] | None = None,
        **further: Any,
    ) -> Any:  # fmt: skip
        """Return a string tensor that a session can fetch. It is empty, and nothing is written.

        Args:
            name: The name of the op.
            tensor: The values. The result does not depend on them.
            collections: The collections to add the result to, by default SUMMARIES.
            *options: Without effect.
            **further: Without effect.

        Returns:
            A tensor, for `tf.summary.merge` and `Session.run`.

        Source: `tf.summary.{name}`.

        >>> import regrad.v1 as tf
        >>> with tf.Graph().as_default(), tf.Session() as sess:
        ...     print(sess.run(tf.summary.{name}("loss", tf.constant(1.0))))
        b''
        """
        known = re.sub(r"[^-/.A-Za-z0-9_]", "_", name).lstrip("/_") or "summary"
        return _empty(known, [GraphKeys.SUMMARIES] if collections is None else collections)

    return fill_in(record, name)


scalar: Callable[..., Any] = _recorder("scalar")
histogram: Callable[..., Any] = _recorder("histogram")
image: Callable[..., Any] = _recorder("image")
audio: Callable[..., Any] = _recorder("audio")
text: Callable[..., Any] = _recorder("text")


def merge(
    inputs: Sequence[TensorLike], collections: Sequence[str] | None = None, name: str | None = None
) -> Any:
    """Return one empty string tensor for several summaries.

    Args:
        inputs: Results of the functions of `tf.summary`.
        collections: The collections to add the result to.

    Returns:
        A tensor, for `Session.run`.

    Raises:
        ArgumentError: the inputs are missing.

    Source: `tf.summary.merge`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess:
    ...     print(sess.run(tf.summary.merge([tf.summary.scalar("loss", 1.0)])))
    b''
    """
    return _empty(name or "Merge/MergeSummary", collections)


def merge_all(key: str = GraphKeys.SUMMARIES, scope: str | None = None) -> Any:
    """Return one empty string tensor for all summaries of a collection, or None without summaries.

    Args:
        key: The collection.
        scope: A regular expression for the beginning of the names.

    Returns:
        A tensor, for `Session.run`, or None.

    Raises:
        ArgumentError: there are too many arguments.

    Source: `tf.summary.merge_all`.

    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default():
    ...     print(tf.summary.merge_all())
    None
    """
    found = get_collection(key, scope)
    return merge(found) if found else None


class FileWriter:
    """A writer that writes nothing.

    Args:
        logdir: The folder, which `get_logdir` returns. It is not created.
        *options: Without effect.
        **further: Without effect.

    Source: `tf.summary.FileWriter`.

    >>> import warnings
    >>> import regrad.v1 as tf
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", tf.errors.NoEffectWarning)
    ...     with tf.summary.FileWriter("logs") as writer:
    ...         writer.add_summary(b"", global_step=1)
    """

    def __init__(self, logdir: str, *options: Any, **further: Any) -> None:
        warn_once(TEXT)
        self._logdir = logdir

    def get_logdir(self) -> str:
        """Return the folder."""
        return self._logdir

    def add_summary(self, *values: Any, **options: Any) -> None:
        """Do nothing. The other methods do nothing, too."""

    add_graph = add_event = add_meta_graph = add_run_metadata = add_session_log = add_summary
    flush = close = reopen = __exit__ = add_summary

    def __enter__(self) -> FileWriter:
        return self
