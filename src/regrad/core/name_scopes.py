"""`name_scope`: names for the parts of a model, so that a rule can apply in one part only.

The names of the open scopes, outermost first, are the path of this context (a thread or asyncio
task). Op calls do not read the path. Its readers are bindings that are limited to a place (see
`places`), graphs, which name their nodes by it, and inspection tools.
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

# Wraps the steps of a scope: `regrad.v1` names the nodes of the graph under construction.
AROUND: list[Callable[[Path, Generator[Any]], Generator[Any]]] = []

# Pairs of functions: the first calls a decorated function, so that a key can be for the whole call
# (see `placed`); the second raises for such a key at a block. Empty until a scope has such a key.
CALLERS: list[tuple[Callable[..., Any], Callable[[Path], None]]] = []


class name_scope(Block):
    """Name a part of a model: ops that are created in the block have its name in their path.

    Args:
        name: Letters, digits, `_` and `-`. A dot (or a slash) separates names: `"block1.conv"` is
            the scope `"conv"` in `"block1"`.

    A name adds no cost to op calls. `rg.at` uses names to apply a rule in the scopes that match a
    pattern, and reports show them. Scopes nest, and may have the same name: two calls of one
    function have one path. A scope applies to its own thread and asyncio task. Nodes of a graph are
    named after the scope, as with `tf.name_scope`, which also adds to the path.

    As a decorator, `@name_scope("block1")`, it is open during each call of the function. A key
    `rg.at("block1")` without an op then applies its rule to the whole call.

    Returns:
        A context manager. `as` binds the path.

    Raises:
        ArgumentError: the name is not a string of this form; the decorated function runs after its
            call (a generator, a coroutine); the scope is exited in another context.

    Source: `tf.name_scope`, `jax.named_scope`.

    >>> import regrad as rg
    >>> with rg.name_scope("encoder"), rg.name_scope("block1") as path:
    ...     print(path)
    encoder.block1
    """

    _twice = "name_scope(name) makes another scope of the same name"

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

        return named  # pyright: ignore[reportReturnType] (it has the same signature)


@block
def in_path(path: Path) -> Generator[None]:
    """Run a block as if only the scopes of a path were open."""
    yield from stay(None, PATH, path)


CARRIERS.append((PATH.get, lambda path: in_path(path or ())))
