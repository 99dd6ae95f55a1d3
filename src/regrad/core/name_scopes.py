"""`name_scope`: names for the parts of a model, so that a rule can be put in force in one of them.

The names of the open scopes, outermost first, are the path of this context (a thread or asyncio
task). No op call looks at it: who asks are bindings that hold in one place only (see `places`),
graphs, which name their nodes by it, and tools of inspection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

from regrad.core.blocks import Block, block, stay
from regrad.core.jobs import CARRIERS
from regrad.core.scopes import check_decorated
from regrad.core.signatures import helpful
from regrad.errors import ArgumentError, kind

F = TypeVar("F", bound=Callable[..., Any])
Path = tuple[str, ...]

PATH: ContextVar[Path] = ContextVar("regrad_path", default=())
VALID = re.compile(r"[A-Za-z0-9][\w\-]*([./][A-Za-z0-9][\w\-]*)*")

# Wraps the steps of a scope: `regrad.v1` names the nodes of the graph that is being built.
AROUND: list[Callable[[Path, Generator[Any]], Generator[Any]]] = []

# What calls functions that scopes decorate, of which a key may mean the whole call (see `placed`),
# and what refuses such keys for blocks. Empty until the first scope that has such a key.
CALLERS: list[tuple[Callable[..., Any], Callable[[Path], None]]] = []


class name_scope(Block):
    """Name a part of a model: the ops that are created in the block have its name in their path.

    Args:
        name: Letters, digits, `_` and `-`. A dot (or a slash) separates names: `"block1.conv"` is
            the scope `"conv"` in `"block1"`.

    A name costs an op call nothing. It is there for `rg.at`, which puts a rule in force in the
    scopes that a pattern names, and for reports, which show it. Scopes nest, and may have the same
    name: a function that is called twice has one path. They hold in their own thread and asyncio
    task. Nodes of a graph are named after the scope, as by `tf.name_scope`, which counts as well.

    As a decorator, `@name_scope("block1")`, it is open during each call of the function. A key
    `rg.at("block1")` without an op then puts its rule on the call as a whole.

    Returns:
        A context manager, which binds the path by `as`.

    Raises:
        ArgumentError: the name is not a string of this form; the function that is decorated runs
            after its call (a generator, a coroutine); the scope is left in another context.

    Source: `tf.name_scope`, `jax.named_scope`.

    >>> import regrad as rg
    >>> with rg.name_scope("encoder"), rg.name_scope("block1") as path:
    ...     print(path)
    encoder.block1
    """

    _twice = "name_scope(name) makes another of the same name"

    @helpful("name_scope")
    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not VALID.fullmatch(name):
            got = repr(name) if isinstance(name, str) else kind(name)
            raise ArgumentError(
                "name_scope: expected a name of letters, digits, _ and -, or several with dots "
                f"between them, as in 'encoder.block1', got {got}"
            )
        self._names: Path = tuple(re.split("[./]", name))
        self._decorates = False

    def _steps(self) -> Generator[str]:
        path = (*PATH.get(), *self._names)
        if CALLERS and not self._decorates:
            CALLERS[0][1](path)
        steps = stay(".".join(path), PATH, path)
        for wrap in AROUND:
            steps = wrap(self._names, steps)
        return (yield from steps)

    def __call__(self, f: F) -> F:
        """Decorate a function: the scope is open during each of its calls."""
        check_decorated("name_scope", f)
        name = ".".join(self._names)

        @wraps(f)
        def named(*args: Any, **options: Any) -> Any:
            scope = name_scope(name)
            scope._decorates = True
            with scope:
                return CALLERS[0][0](f, args, options) if CALLERS else f(*args, **options)

        return named  # pyright: ignore[reportReturnType] (of the same signature)


@block
def in_path(path: Path) -> Generator[None]:
    """Run a block as if the scopes of a path, and no others, were open."""
    yield from stay(None, PATH, path)


CARRIERS.append((PATH.get, lambda path: in_path(path or ())))
