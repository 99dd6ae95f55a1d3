"""The places of equations in a JAX program, and the selection of rules by place.

An equation of a program has the name scopes around it, and the code that was running. A program has
no information about the code around its call. `Surgery` passes this information along, as an
`EquationContext`.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from regrad.core.placed import code_of
from regrad.core.places import (
    ChainStep,
    Counts,
    Places,
    Site,
    at,
    is_predicate,
    pick,
    site_of,
    waiting,
)
from regrad.errors import ArgumentError, GradientError
from regrad.jax.closed import name_and_place
from regrad.jax.host import SIGHT, need
from regrad.jax.host.programs import JITS, called, codes, scopes
from regrad.jax.modules import MARK, Naming, owner

# their bodies are shared by several runs, or may not run
SHARED = frozenset({"scan", "while", "cond"})


class EquationContext(NamedTuple):
    """The surroundings of an equation: name scopes, functions among the keys, and a loop or branch.

    In a `jit` of Flax, the names belong to the module that was compiled first (`borrowed`).
    """

    scopes: tuple[str, ...] = ()
    functions: tuple[Any, ...] = ()
    shared: str = ""
    borrowed: bool = False


class Whereabouts:
    """Selects among the rules of a map whose keys name a place.

    Args:
        bindings: All bindings of the map.
        model: The model whose modules have names, or None.
    """

    def __init__(self, bindings: Sequence[Any], model: Any) -> None:
        need(SIGHT)
        self.placed: dict[at, Any] = {b.place: b for b in bindings if b.place is not None}
        self.naming: Naming = Naming(model, self)
        self.places: Places = Places(self.placed, self.naming.steps)
        named = self.places.entries
        functions = [e for e in named if not is_predicate(e) and code_of(e) is not None]
        self.codes: dict[Any, Any] = dict(map(_function, functions))
        # Modules outside the model are identified by their classes.
        self.by_class: bool = any(is_predicate(e) or isinstance(e, type) for e in named)
        # Keys that count must process a program at each of its calls, and not once for all calls.
        self.counting: bool = any(map(is_predicate, named)) or any(
            key.counts for key in self.placed
        )
        self.counts: Counts = Counts()
        self.seen: dict[Any, ChainStep] = {}
        self.chains: dict[EquationContext, list[ChainStep]] = {}

    def begin(self) -> None:
        """Begin to count the calls of a whole program."""
        self.counts = Counts()

    def inside(self, eqn: Any, around: EquationContext, program: Any) -> EquationContext:
        """Return the context of the equations inside an equation of a program."""
        name = eqn.primitive.name
        shared = name if name in SHARED else around.shared
        functions = (*around.functions, *self._running(eqn, program))
        borrowed = around.borrowed or (name in JITS and _is_of_flax(called(eqn)))
        made = EquationContext((*around.scopes, *scopes(eqn)), functions, shared, borrowed)
        self.chain(made)  # which records the existing places
        return made

    def _running(self, eqn: Any, program: Any) -> list[Any]:
        """Return the functions among the keys that were running when an equation was made."""
        found: list[Any] = []
        if self.codes:
            _, place = name_and_place(program)
            for code, _ in codes(eqn):  # innermost first
                found += [self.codes[code]] if code in self.codes else []
                if f"{code.co_filename}:{code.co_firstlineno}" == place:
                    break  # (the first caller of the program is irrelevant for this call)
        return found[::-1]

    def chain(self, around: EquationContext) -> list[ChainStep]:
        """Return the modules and named scopes around, outermost first."""
        if around not in self.chains:
            found = [*[ChainStep((), f) for f in around.functions], ChainStep(("",))]
            parts: list[str] = []
            for name in around.scopes:
                if name.startswith(MARK):
                    path = name.removeprefix(MARK)
                    step = self.naming.by_path[path]
                    parts = [*filter(None, path.split("."))] if step.paths else parts
                    found.append(step if step.paths else step._replace(paths=(".".join(parts),)))
                elif "->" not in name and not (self.naming.steps and name.startswith("eqx.")):
                    more = re.split("[./]", name)
                    # Flax names the method f of its module m `m.f`, within m.
                    more = more[1:] if len(more) > 1 and parts[-1:] == more[:1] else more
                    for part in more:
                        parts = [*parts, part]
                        found.append(ChainStep((".".join(parts),)))
            self.seen |= {(step.paths, step.kind, id(step.module)): step for step in found}
            self.chains[around] = found
        return self.chains[around]

    def path(self, around: EquationContext) -> str:
        """Return the path of the innermost module or scope."""
        return self.chain(around)[-1].path

    def choose(self, eqn: Any, bindings: Sequence[Any], around: Any, line: str) -> Any:
        """Return the binding whose rule an equation gets, among the keys that name it, or None."""
        chain = self.chain(around.where)
        keys = [b.place for b in bindings if b.place is not None]
        if around.where.borrowed and any(key.selectors for key in keys):
            raise GradientError(
                f"override: {keys[0]!r} matches {bindings[0].op_type!r} in a module under Flax's "
                f"nn.jit ({line}), which runs one program for all modules of a class and does not "
                "identify the module. Compile the whole with jax.jit, and leave nn.jit out."
            )
        fits = self.places.fits(chain, keys) if keys else []
        late = waiting(fits, self.counts)
        if late is not None and around.where.shared:
            raise GradientError(
                f"override: {late!r} counts calls, which is impossible in the body of a "
                f"{around.where.shared} ({line}): it is one program for all of its runs. Name the "
                "place by a scope or function in there."
            )
        counts = Counts(self.counts) if around.closed or around.derived else self.counts
        op_type = bindings[0].key.label
        site = partial(self.site, op_type, eqn, around.where, line)
        fit, n = pick(fits, counts, site)
        if fit is not None:
            binding = self.placed[fit.key]
            return binding.located(site(n)) if binding.asks else binding
        return next((b for b in bindings if b.place is None), None)

    def whole_key(self, chain: Sequence[ChainStep]) -> Any:
        """Return the key that may mean the whole call of the last of some modules, or None."""
        whole = [key for key in self.placed if key.what is None]
        fits = self.places.fits(chain, whole) if whole else ()
        return self.placed[fits[0].key].key if fits else None

    def site(self, op_type: str, eqn: Any, around: EquationContext, line: str, n: int) -> Site:
        """Return the site of an equation, the n-th among the candidates of a key."""
        xs = [v.aval for v in eqn.invars if hasattr(v.aval, "shape")]
        return site_of(self.chain(around), op_type, n, xs, line)

    def check(self) -> None:
        """Raise for keys whose places are nowhere in the processed programs."""
        if self.naming.steps is None:
            Places([key for key, b in self.placed.items() if not b.marked], [*self.seen.values()])

    def unvisited(self) -> Iterator[tuple[Any, ChainStep]]:
        """Yield modules that a key names and that never ran, although their parents did."""
        for key, binding in self.placed.items() if self.naming.steps else ():
            plain = "**" not in repr(key) and key.selectors and not binding.marked
            named = [s for s in self.places.named[key.selectors] if owner(s)] if plain else ()
            for step in self.places.idle(named, self.naming.called, owner):
                yield binding, step

    def tells_apart(self, a: ChainStep, b: ChainStep) -> bool:
        """Return whether keys distinguish two modules of the model, or their contents."""
        inside = [s for s in self.naming.steps or () if f"{s.path}.".startswith(f"{a.path}.")]
        twins = [self.naming.by_path[s.path.replace(a.path, b.path, 1)] for s in inside]
        return self.counting or any(
            self.places.mark(s) != self.places.mark(twin)
            for s, twin in zip(inside, twins, strict=True)
        )


def _is_of_flax(program: Any) -> bool:
    """Return whether a compiled function is one by which Flax's Linen calls modules."""
    flax = sys.modules.get("flax")
    folder = os.path.dirname(getattr(flax, "__file__", None) or "-")
    return name_and_place(program)[1].startswith((f"{folder}/linen", f"{folder}/core"))


def _function(entry: Any) -> tuple[Any, Any]:
    """Return the code of a function that is a place, and the function."""
    plain = inspect.unwrap(entry)
    if plain.__closure__:
        raise ArgumentError(
            f"override: at({plain.__qualname__}) closes over values, and JAX's programs do not "
            "distinguish it from other functions of the same def. Write it in a module, or open "
            "a jax.named_scope in it."
        )
    return plain.__code__, entry
