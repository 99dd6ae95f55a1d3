"""Tests that are rows of a table: a call and its result, or a call and its error."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import regrad as rg


def plain(tree: Any) -> Any:
    """Return a tree with numbers and lists in the place of Tensors, and tuples of one kind."""
    if hasattr(tree, "tolist"):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: plain(part) for key, part in tree.items()}
    if isinstance(tree, list):
        return [plain(part) for part in tree]
    return tuple(plain(part) for part in tree) if isinstance(tree, tuple) else tree


def refused(call: Callable[[], Any], error: Any, *words: str) -> BaseException:
    """Assert that a call raises this error, with a message in which all of these patterns are."""
    with pytest.raises(error) as caught:
        call()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    missing = [word for word in words if not re.search(word, text)]
    assert not missing, f"no {missing} in: {text}"
    return caught.value


def under(rules: Any, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the result of a call in a scope of overrides."""
    with rg.gradient_override_map(rules, **options):
        return call(*args)


def in_thread(call: Callable[[], Any]) -> Any:
    """Return the result of a call in a new thread, or raise its error."""
    return together([call])[0]


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Return the results of calls that run at once, each in a thread of its own."""
    barrier = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)
    errors: list[Exception] = []

    def run(i: int) -> None:
        try:
            barrier.wait(60)
            results[i] = calls[i]()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
    return results


WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda f: f, "jit": rg.jit, "checkpoint": rg.checkpoint,
    "jit of checkpoint": lambda f: rg.jit(rg.checkpoint(f)),
}  # fmt: skip


def close(found: Any, expected: Any, rtol: float = 1e-12) -> None:
    """Assert that two lists of arrays, or two arrays, hold nearly the same numbers."""
    if isinstance(expected, list | tuple):
        for a, b in zip(found, expected, strict=True):
            close(a, b, rtol)
        return
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=rtol, atol=1e-12)


def refusals(rows: Any, error: Any = None) -> Callable[..., None]:
    """Return a test of rows: a call, its error (unless all have one), and words of the message."""
    names = rows if isinstance(rows, dict) else [row[-1] for row in rows]
    table = rows.values() if isinstance(rows, dict) else rows

    @pytest.mark.parametrize("row", table, ids=names)
    def test(row: Any) -> None:
        call, *expected = row
        refused(call, *([error, *expected] if error else expected))

    return test


def results(rows: dict[str, Any]) -> Callable[..., None]:
    """Return a test of rows: rules for a scope around the call (or none), a call, its result."""

    @pytest.mark.parametrize("name", rows)
    def test(name: str) -> None:
        *rules, call, expected = rows[name]
        assert plain(under(*rules, call) if rules else call()) == expected

    return test
