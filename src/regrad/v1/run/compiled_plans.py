"""Plans that XLA compiles, for `Session(jit=True)`.

A plan is a function of the feeds and of the variables. `jax.jit` traces it once for each
combination of shapes. The forward and the backward pass become one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from regrad.core.backends import JAX
from regrad.graph.graph import CONST, Node, Symbol
from regrad.graph.plan import GraphPlan, PlanRun, at_node
from regrad.transforms.donation import compile_donating, may_donate, set_apart
from regrad.transforms.traces import find_jax
from regrad.v1.graph.python_ops import ASSERT
from regrad.v1.graph.regions import all_nodes
from regrad.v1.run import traced_control  # noqa: F401 (registers how branches and loops are traced)
from regrad.v1.run.tracing import TraceRun, find_written, refusal, settle_all

LONG = frozenset({np.dtype(np.int64), np.dtype(np.uint64)})
DOUBLE = frozenset({np.dtype(np.float64), np.dtype(np.complex128)})


KEPT = 512  # the number of shapes for which a plan stays compiled


class CompiledPlan(GraphPlan):
    """A plan that is one XLA program.

    Variables stay JAX arrays between runs. A run that writes to variables donates their buffers to
    the new values. Each random op has a key in the session, which every run replaces.
    """

    def _prepare(self, fetches: Sequence[Symbol], feeds: Sequence[Symbol], fed: set[int]) -> None:
        self.jax: Any = find_jax()
        self.owned: list[bool] = [True] * len(fetches)
        self.asserts: list[Node] = [node for node in self.nodes if node.op.type == "Assert"]
        checked = [s for node in self.asserts for s in node.sources()]
        checked = [s for s in checked if s.id in fed or s.node.op is not CONST]
        self.fetches: list[Symbol] = [*fetches, *checked]
        every, written = list(all_nodes(self.nodes)), find_written(self.nodes)
        self.prints: bool = any(node.op.type == "Print" for node in every)
        # A failed run keeps the variables. A buffer of another size cannot be used again.
        self.donated: list[str] = [k for k in written if written[k] and not self.asserts]
        variables = [node.name for node in self.nodes if node.op.type == "VariableV2"]
        self.kept: list[str] = [key for key in variables if key not in self.donated]
        self.streams: dict[int, Node] = {n.attrs["stream"]: n for n in every if "stream" in n.attrs}
        symbols = [s for node in every if node.op is not CONST for s in node.symbols]
        symbols += [*self.feeds, *self.fetches]
        self.long: bool = any(s.dtype in LONG for s in symbols)
        self.double: Symbol | None = next((s for s in symbols if s.dtype in DOUBLE), None)
        self.text: Symbol | None = next((s for s in symbols if s.dtype.kind in "OSU"), None)
        self.donates: bool = bool(self.donated)
        self._begin()

    def _begin(self) -> None:
        """Start with an empty cache of programs. (JAX caches them while the function lives.)"""
        self.traces: int = 0
        self.program: Any = compile_donating(self.jax, self._results, donated=[1])

    def __call__(self, values: Sequence[Any], run: PlanRun) -> list[Any]:
        self._admit()
        values = self.with_shapes(values)
        if self.traces >= KEPT:
            self._begin()
        # 64-bit integers stay exact in every mode of JAX. `_admit` checks 64-bit floats.
        with self.jax.enable_x64(True) if self.long else nullcontext():
            state = self._given(run, self.kept), self._given(run, self.donated)
            kept, donated = state if may_donate(self.jax) else (state[0] | state[1], {})
            keys = {stream: self._key(run, stream) for stream in self.streams}
            found, written, keys = self.program((list(values), kept, keys), donated)
            self.jax.block_until_ready(written)  # a run must not return before it ends
        if self.prints:
            self.jax.effects_barrier()
        found = [np.array(y) for y in found]
        for node in self.asserts:
            known = {s.id: y for s, y in zip(self.fetches, found, strict=True)}
            _check(node, [known.get(s.id, s.node.attrs.get("value")) for s in node.sources()])
        run.written.update(written)
        run.others.update(keys)
        return found[: len(self.owned)]

    def _admit(self) -> None:
        """Raise for dtypes that JAX arrays cannot have."""
        if self.text is not None:
            raise refusal(self.text.node, "compiled programs do not support strings.")
        if self.double is not None:
            try:
                JAX.native_dtype(self.double.dtype)
            except Exception as error:
                raise at_node(error, self.double.node, []) from None

    def _given(self, run: PlanRun, keys: Sequence[str]) -> dict[str, Any]:
        """Return the values of variables as JAX arrays, which stay in the session."""
        variables = run.variables
        present = [key for key in keys if key in variables]
        for key in present:
            if isinstance(variables[key], np.ndarray | np.generic):  # restored, or fed
                variables[key] = JAX.xp.array(variables[key])
        return {key: variables[key] for key in present}

    def _key(self, run: PlanRun, stream: int) -> Any:
        """Return the key of a random op from its last run, or a new key made from its seeds."""
        key = run.others.get(stream)
        if key is None:
            attrs = self.streams[stream].attrs
            seeds = [attrs[name] % 2**64 for name in ("seed", "seed2")]
            words = np.random.SeedSequence(seeds if any(seeds) else None).generate_state(2)
            key = self.jax.random.wrap_key_data(JAX.xp.asarray(words), impl="threefry2x32")
        return key

    def _results(
        self, given: tuple[list[Any], dict[str, Any], dict[int, Any]], donated: dict[str, Any]
    ) -> tuple[Any, ...]:
        self.traces += 1
        values, kept, keys = given
        pairs = {stream: self.jax.random.split(key) for stream, key in keys.items()}
        trace = TraceRun({**kept, **donated}, {stream: pair[1] for stream, pair in pairs.items()})
        known = {s.id: value for s, value in zip(self.feeds, values, strict=True)}
        with np.errstate(all="ignore"):  # as in a session without jit
            trace.compute(self.nodes, known)
        found = settle_all([known[s.id] for s in self.fetches], self.fetches)
        written = trace.state(trace.written)
        others = [*values, *donated.values(), *kept.values()]
        written = dict(zip(written, set_apart([*written.values()], others), strict=True))
        return found, written, {stream: pair[0] for stream, pair in pairs.items()}


def _check(node: Node, values: Sequence[Any]) -> None:
    """Run an Assert on its inputs after a run, and raise its error."""
    try:
        ASSERT.kernels[np.ndarray](values[0], values[1:], **node.attrs)
    except Exception as error:
        raise at_node(error, node, values) from None
