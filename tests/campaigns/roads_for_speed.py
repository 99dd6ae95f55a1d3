"""The gain of each road that is there for speed: rows of the bench with the road and without it.

    python -m tests.campaigns.roads_for_speed [ROAD …]     the table (half an hour)
    python -m tests.campaigns.roads_for_speed --answer ROAD ROW     one process of those below

This program switches a road off by a rewritten function of regrad, with a part of its source
replaced, in a separate process. Three processes take turns: with the road, with it again, and
without it. The ratio of the first two shows the noise. A sample is processor time, since the
machine may be shared.

`docs/decisions/roads_for_speed.md` has the figures and the decision.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

from tests.helpers.rewritten import rewritten

ROUNDS = 31
SECONDS = 0.02  # of a sample, at least


class Change(NamedTuple):
    """A part of the source of a function (`module:name` or `module:Class.name`), and another."""

    where: str
    old: str
    new: str


class Road(NamedTuple):
    """What switches a road off, and rows of the bench that it is for."""

    changes: Sequence[Change]
    rows: Sequence[str]


CALLS = [
    f"calls:call-{name}" for name in (
        "Tensor", "Tensor-of-NumPy-data", "NumPy-array", "number", "keyword", "static-argument",
        "static-argument-by-name", "dict-of-two", "five-arguments", "tuple-out",
        "closed-over-Tensor", "closed-over-NumPy-array", "three-Variables-updated",
    )
]  # fmt: skip
QUICK, SHORT = "regrad.transforms.quick_calls", "regrad.transforms.shortcuts"
TAPE, FAST = "regrad.core.tape:Tape", "regrad.core.fastpath"
RECORDED = "regrad.torch.recorded:Recordings"
ROADS: dict[str, Road] = {
    "quick_calls": Road(
        [Change(f"{QUICK}:QuickCall.write_call", "if variant is None:", "if True:")],
        [*CALLS, "jit:jit-mlp"],
    ),
    "shortcuts": Road(
        [Change(f"{SHORT}:Shortcuts.keep", "writer = _ShortcutWriter(", "return\n{}")],
        [*CALLS, "jit:jit-mlp"],
    ),
    "shortcuts: static arguments": Road(
        [Change(f"{SHORT}:_ShortcutWriter.static", "if type(value) not in EXACT:", "if True:")],
        [row for row in CALLS if "static" in row],
    ),
    "shortcuts: closure written out": Road(
        [Change(f"{SHORT}:checks_of", "if len(closure.places) > WRITTEN:", "if True:")],
        [CALLS[0], *CALLS[-3:], "own:compiled call: a model of four layers"],
    ),
    "shortcuts: lists written out": Road(
        [Change(f"{SHORT}:_check_of", "if entries_of is list and", "if False and")],
        [CALLS[-1], "own:compiled call: a model of four layers"],
    ),
    "quick_calls: small NumPy arrays": Road(
        [Change(f"{QUICK}:QuickCall.source", "or value.nbytes > SMALL", "or True")],
        ["calls:call-closed-over-NumPy-array"],
    ),
    "quick_calls: containers written out": Road(
        [Change(f"{QUICK}:QuickCall.closed", "if trace.note.full:", "if False:")],
        ["calls:call-Tensor", "calls:call-tuple-out"],
    ),
    "fastpath": Road(
        [
            Change(f"{FAST}:unary", "if type(x) is Tensor:", "return call(op, (x,), NO_ATTRS)\n{}"),
            Change(
                f"{FAST}:binary", "if type(a) is Tensor is type(b):",
                "return call(op, (a, b), NO_ATTRS)\n{}",
            ),
        ],
        ["measures:no-tape", "measures:multiply-chain", "measures:sin-chain",
         "measures:custom-chain", "own:100 x * 0.5", "torch:torch-data"],
    ),
    "fastpath: numbers": Road(
        [Change(f"{FAST}:binary", "type(a) is Tensor and type(b) in WEAK and", "False and")],
        ["own:100 x * 0.5"],
    ),
    "columns": Road(
        [
            Change(f"{TAPE}.write_unary", "rule.short is not None", "False"),
            Change(f"{TAPE}.write_call", "rule.short is not None", "False"),
            Change("regrad.core.walk:_walk", "type(record) is int", "False"),
        ],
        ["measures:sin-chain", "measures:custom-chain", "measures:deep-chain",
         "measures:program-7", "own:kept by 10,000 sin"],
    ),
    "donation": Road(
        [Change("regrad.transforms.donation:may_donate", "not searches_nan(jax)", "False")],
        ["jit:jit-mlp", "jit:jit-cnn", "jit:jit-transformer", "graph:graph-jit-training",
         "own:peak of the MLP's step", "own:peak of an update of 64 MB", "own:an update of 64 MB"],
    ),
    "donation: few bytes are not written over": Road(
        [Change("regrad.transforms.program:Program.find", "size >= WORTH", "True")],
        ["calls:call-three-Variables-updated"],
    ),
    "torch/recorded": Road(
        [
            Change(f"{RECORDED}.replay", "if not self.are_possible():", "if True:"),
            Change(f"{RECORDED}.run", "with DisableTorchFunction():", "return None\n{}"),
        ],
        ["torch:torch-rules"],
    ),
    "torch/call_cache": Road(
        [
            Change("regrad.torch.call_cache:CallCache._learn", "kinds is not None", "False"),
            Change("regrad.torch.functions:_bind", "if kinds is not None", "if False"),
        ],
        ["torch:torch-relus", "torch:torch-rules", "torch:torch-key", "torch:torch-llama",
         "torch:torch-lstm"],
    ),
}  # fmt: skip


def switch_off(road: Road) -> None:
    """Rewrite the functions of a road."""
    for where, old, new in road.changes:
        module_name, _, path = where.partition(":")
        module: Any = importlib.import_module(module_name)
        *outer, name = path.split(".")
        owner = getattr(module, outer[0]) if outer else module
        made = rewritten(owner, name, old, new)
        if module_name == FAST:  # which has made the functions of all ops already
            rewrite_functions(made)
            continue
        former = getattr(owner, name)
        setattr(owner, name, made)
        for other in [m for n, m in sys.modules.items() if n.startswith("regrad.")]:
            if getattr(other, name, None) is former:
                setattr(other, name, made)


def rewrite_functions(make: Callable[[Any], Any]) -> None:
    """Give the public functions of all ops of so many tensors the code of others."""
    from regrad.core.registry import OPS

    like = make(OPS["Sin"]).__code__
    for op in OPS.loaded():
        code = getattr(op.function, "__code__", None)
        if code is not None and code.co_qualname == like.co_qualname:
            op.function.__code__ = make(op).__code__


# -- rows ------------------------------------------------------------------------------------------


def numbers() -> Callable[[], Any]:
    import numpy as np

    import regrad as rg

    f, x = rg.grad(lambda x: chain(x)), rg.tensor(np.ones(10))

    def chain(x: Any) -> Any:
        for _ in range(100):
            x = x * 0.5
        return x

    return lambda: f(x)


def model() -> Callable[[], Any]:
    """A compiled loss of a small network, whose weights are attributes of two objects."""
    import jax.numpy as jnp

    import regrad as rg

    class Layer:
        def __init__(self) -> None:
            self.w, self.b = rg.asarray(jnp.ones((4, 4))), rg.asarray(jnp.ones(4))

        def __call__(self, x: Any) -> Any:
            return rg.tanh(x @ self.w + self.b)

    class Network:
        def __init__(self) -> None:
            self.layers = [Layer() for _ in range(4)]
            self.rate = 0.5

        def loss(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.rate * rg.mean(x)

    network, x = Network(), rg.asarray(jnp.ones((2, 4)))
    f = rg.jit(lambda x: network.loss(x))
    return lambda: f(x)


def large_variables() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    import regrad as rg

    v = rg.Variable(jnp.ones(16_000_000, "float32"))
    step = rg.jit(lambda: v.assign_sub(0.1))

    def call() -> None:
        step()
        jax.block_until_ready(v._tensor._data)

    return call


def kept() -> int:
    """Bytes that a tape keeps of 10,000 sines, the garbage collector's own words included."""
    import numpy as np

    import regrad as rg

    found: list[int] = []

    def f(x: Any) -> Any:
        begin = tracemalloc.get_traced_memory()[0]
        for _ in range(10_000):
            x = rg.sin(x)
        found.append(tracemalloc.get_traced_memory()[0] - begin)
        return x

    call, x = rg.grad(f), rg.tensor(np.ones(10))
    call(x)
    gc.collect()
    tracemalloc.start()
    call(x)
    return found[-1]


def large_peak() -> int:
    """Bytes that XLA needs to update a Variable of 64 MB."""
    import jax.numpy as jnp

    import regrad as rg
    from bench import jit, networks

    v = rg.Variable(jnp.ones(16_000_000, "float32"))
    f = rg.jit(lambda: v.assign_sub(0.1))
    f()
    return jit.needed(jit.lowered(networks.Step(f, dict, f, ())))


def peak() -> int:
    """Bytes that XLA needs for a step of the binarised MLP."""
    from bench import jit, networks

    step = networks.in_regrad(networks.mlp_regrad, *networks.mlp_parameters())
    step.call()
    return jit.needed(jit.lowered(step))


OWN: dict[str, Callable[[], Callable[[], Any]]] = {
    "100 x * 0.5": numbers,
    "compiled call: a model of four layers": model,
    "an update of 64 MB": large_variables,
}
BYTES = {
    "kept by 10,000 sin": kept,
    "peak of the MLP's step": peak,
    "peak of an update of 64 MB": large_peak,
}
MODULES = {"torch": "foreign_torch"}


def call_of(row: str) -> tuple[Callable[[], Any], str]:
    """Return regrad's call of a row, and the title of the row."""
    suite, _, name = row.partition(":")
    if suite == "own":
        return OWN[name](), name
    measure = importlib.import_module(f"bench.{MODULES.get(suite, suite)}").MEASURES[name]
    if suite == "graph":
        return measure.program(measure.ours), measure.title
    return measure.contestants()["regrad"], measure.title


def answer(road: str, row: str) -> None:
    """Take a sample for each line of the input."""
    importlib.import_module("regrad")
    if road:
        switch_off(ROADS[road])
    name = row.partition(":")[2]
    if name in BYTES:
        print(BYTES[name](), flush=True)
        return
    call, title = call_of(row)
    for _ in range(5):
        call()
    number, took = 1, 0.0
    while took < SECONDS:
        number *= 2 if took else 1
        took = timed(call, number)
    print(number, title, flush=True)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        gc.collect()
        print(timed(call, number := int(line)) / number, flush=True)


def timed(call: Callable[[], Any], number: int) -> float:
    start = time.process_time()
    for _ in repeat(None, number):
        call()
    return max(time.process_time() - start, 1e-9)


# -- the table -------------------------------------------------------------------------------------


def ratios(road: str, row: str) -> tuple[str, list[float], list[float], list[float]]:
    """Return the title, seconds as it is, and the ratios to that: of the same, and without."""
    command = [sys.executable, "-m", __spec__.name, "--answer"]
    turns = [
        subprocess.Popen(
            [*command, name, row], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in ("", "", road)
    ]
    firsts = [str(p.stdout and p.stdout.readline()).split(maxsplit=1) for p in turns]
    if len(firsts[0]) == 1:  # bytes
        a, b, c = [float(first[0]) for first in firsts]
        for p in turns:
            p.communicate()
        return row.partition(":")[2], [a], [b / a], [c / a]
    number, title = min(int(first[0]) for first in firsts), firsts[0][1].strip()
    samples: list[list[float]] = [[], [], []]
    for i in range(ROUNDS):
        order = [0, 1, 2] if i % 2 else [2, 1, 0]
        for j in order:
            p = turns[j]
            assert p.stdin is not None and p.stdout is not None
            print(number, file=p.stdin, flush=True)
            samples[j].append(float(p.stdout.readline()))
    for p in turns:
        p.communicate()
    same, off = [[b / a for a, b in zip(samples[0], other, strict=True)] for other in samples[1:]]
    return title, samples[0], same, off


def shown(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--answer"]:
        answer(*arguments[1:])
        return
    print(
        "| road | row | as it is | without : with | with : with |\n| --- | --- | --: | --: | --: |"
    )
    for road in arguments or ROADS:
        for row in ROADS[road].rows:
            title, seconds, same, off = ratios(road, row)
            median = statistics.median(seconds)
            unit = f"{median / 1e6:.2f} MB" if median > 1000 else f"{1e6 * median:.4g} µs"
            print(f"| {road} | {title} | {unit} | {shown(off)} | {shown(same)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
