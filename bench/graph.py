"""The measures of graph mode: `regrad.v1` against TensorFlow's `compat.v1`.

A program is a function of the module `tf`, with the same text for both. The project does not depend
on TensorFlow. Where TensorFlow cannot be imported, recorded times are used instead. The sessions of
`COMPILED` are `Session(jit=True)`. Without JAX, their measures are omitted.
"""

from __future__ import annotations

import gc
import itertools
import os
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import regrad.v1 as v1
from bench.report import Measure, Row, compared, megabytes
from bench.timing import AGAIN, Call, Effort, interleaved, sampler

TENSORFLOW, FROM_RECORDS = "TensorFlow", "TF, recorded"


def tensorflow() -> Any:
    """Return TensorFlow 1's API in graph mode, or None if it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # suppresses messages about the CPU
    try:
        import tensorflow.compat.v1 as tf
    except ImportError:
        return None
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_v2_behavior()
    return tf


TF = tensorflow()


class Compiled:
    """The module `regrad.v1`, with sessions that XLA compiles."""

    Session = staticmethod(partial(v1.Session, jit=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(v1, name)


COMPILED = Compiled()


def session(tf: Any, graph: Any) -> Any:
    """Return a session of one thread."""
    one = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    return tf.Session(graph=graph, config=one)


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and the threads that it starts, on one core, if the system supports it.

    TensorFlow hands a run over to another thread. Waking a thread on another core can double the
    time of a small run, and depends on the load of the machine.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


# -- the programs ----------------------------------------------------------------------------


def overridden(tf: Any) -> Call:
    """Run a gradient under `gradient_override_map`."""

    @tf.RegisterGradient("CustomGrad")
    def _negated(op, grad):
        return -grad

    with tf.Graph().as_default() as g:
        x1, x2 = tf.Variable(1.0), tf.Variable(3.0)
        oo = x1 + x2
        with g.gradient_override_map({"Identity": "CustomGrad"}):
            output = tf.identity(oo)
        grad = tf.gradients(output, oo)
        sess = session(tf, g)
        sess.run(tf.global_variables_initializer())
    return lambda: sess.run(grad)


def tanh_chain(tf: Any, h: Any) -> Any:
    for _ in range(100):
        h = tf.tanh(h)
    return h


def scaled_chain(tf: Any, h: Any) -> Any:
    for _ in range(100):
        h = h * 1.01
    return h


def built(chain: Callable[[Any, Any], Any]) -> Callable[[Any], Call]:
    """Build a chain and its gradient, in a new graph each time."""

    def program(tf: Any) -> Call:
        def build():
            with tf.Graph().as_default():
                x = tf.placeholder(tf.float32, [4])
                return tf.gradients(chain(tf, x), x)

        return build

    return program


def tanh_run(size: int) -> Callable[[Any], Call]:
    """Run the value and the gradient of 100 tanh of a fed array."""

    def program(tf: Any) -> Call:
        with tf.Graph().as_default() as g:
            x = tf.placeholder(tf.float32, [size])
            y = tanh_chain(tf, x)
            fetches = [y, *tf.gradients(y, x)]
            sess = session(tf, g)
        feed = {x: floats(size)}
        return lambda: sess.run(fetches, feed_dict=feed)

    return program


def training(tf: Any) -> Call:
    """Run a step of gradient descent: a 64-256-10 network on digits, 64 at a time."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    rng = np.random.default_rng(0)
    with tf.Graph().as_default() as g:
        x, y = tf.placeholder(tf.float32, [None, 64]), tf.placeholder(tf.int32, [None])
        h = tf.nn.relu(dense(tf, rng, x, 64, 256))
        logits = dense(tf, rng, h, 256, 10)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
        step = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(losses))
        sess = session(tf, g)
        sess.run(tf.global_variables_initializer())
    starts = itertools.cycle(range(0, len(images) - 64, 64))

    def call():
        i = next(starts)
        sess.run(step, feed_dict={x: images[i : i + 64], y: labels[i : i + 64]})

    return call


def dense(tf: Any, rng: np.random.Generator, x: Any, m: int, n: int) -> Any:
    w = rng.normal(0, (2 / m) ** 0.5, (m, n)).astype(np.float32)
    return tf.matmul(x, tf.Variable(w)) + tf.Variable(np.zeros(n, np.float32))


# -- NumPy's time for the arithmetic alone --------------------------------------------------


def floats(size: int) -> np.ndarray:
    return np.linspace(-1, 1, size, dtype=np.float32)


def tanh_alone() -> Call:
    """Run the 100 tanh of the forward pass, each into the same existing array."""
    x, y = floats(100_000), np.empty(100_000, np.float32)

    def call():
        np.tanh(x, out=y)
        for _ in range(99):
            np.tanh(y, out=y)

    return call


# -- the measures ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Against:
    """The time of `regrad.v1` against TensorFlow's, and against NumPy's for a part of the work.

    A recorded time is shown next to regrad's time. It has no verdict, as it is from another day.
    """

    title: str
    program: Callable[[Any], Call]
    bound: float  # the largest allowed ratio to TensorFlow's time
    recorded: float  # TensorFlow's time, for use where it is not installed
    parts: Mapping[str, Callable[[], Call]] = field(default_factory=dict)  # for information
    rounds: int | None = None  # fewer rounds for slow calls
    ours: Any = v1

    def __call__(self, effort: Effort) -> Iterator[Row]:
        peer = FROM_RECORDS if TF is None else TENSORFLOW
        rounds = min(self.rounds or effort.rounds, effort.rounds)
        with one_core():
            samples = self.samples(effort, rounds)
        for name in (peer, peer + AGAIN):
            samples.setdefault(name, [self.recorded] * rounds)
        bounds = {peer: self.bound, **dict.fromkeys(self.parts)}
        for row in compared(self.title, samples, bounds):
            yield row._replace(met=None) if row.peer == FROM_RECORDS else row

    def samples(self, effort: Effort, rounds: int) -> dict[str, list[float]]:
        calls = {"regrad": self.program(self.ours)}
        if TF is not None:
            calls[TENSORFLOW] = self.program(TF)
        calls |= {name: make() for name, make in self.parts.items()}
        samplers = {name: sampler(call, effort.seconds) for name, call in calls.items()}
        return interleaved(samplers, rounds)


def peak(effort: Effort) -> Iterator[Row]:
    """Measure the peak memory of 100 ops in a row on 8 MB, including result and kept memory."""
    with v1.Graph().as_default() as g:
        h = x = v1.placeholder(v1.float32, [2_000_000])
        for _ in range(50):
            h = v1.tanh(h * 1.01)
        sess = session(v1, g)
    feed = {x: floats(2_000_000)}
    gc.collect()
    tracemalloc.start()
    try:
        for which in ("first run", "next run"):
            tracemalloc.reset_peak()  # memory that the previous run keeps still counts
            sess.run(h, feed_dict=feed)
            most = tracemalloc.get_traced_memory()[1]
            figures = megabytes(most), "", "", "", "≤ 32 MB", most <= 32e6
            yield Row(f"peak of 100 ops on 8 MB, {which}", *figures)
    finally:
        tracemalloc.stop()


# The last number is TensorFlow's time in seconds: TensorFlow 2.21 compat.v1, 1 thread, recorded on
# another day (the fifth and the last by this suite, on the machine of the first results).
MEASURES: dict[str, Measure] = {
    "graph-override": Against("run of an overridden gradient", overridden, 0.4, 85e-6),
    "graph-build-tanh": Against(
        "100 tanh, built with gradients", built(tanh_chain), 0.1, 29e-3 + 58e-3
    ),
    "graph-build-scaled": Against(
        "100 h * 1.01, built with gradients", built(scaled_chain), 0.1, 57e-3 + 257e-3, rounds=9
    ),
    "graph-tanh-small": Against("100 tanh of 4 floats, run", tanh_run(4), 1.5, 252e-6),
    "graph-tanh-large": Against(
        "100 tanh of 100,000 floats, run",
        tanh_run(100_000),
        1.2,
        7.4e-3,
        parts={"100 numpy.tanh": tanh_alone},
    ),
    "graph-memory": peak,
    "graph-training": Against("training step, 64-256-10 on digits", training, 1.0, 405e-6),
}
if find_spec("jax") is not None:
    MEASURES |= {
        "graph-jit-tanh-small": Against(
            "100 tanh of 4 floats, run, jit", tanh_run(4), 1.5, 252e-6, ours=COMPILED
        ),
        "graph-jit-tanh-large": Against(
            "100 tanh of 100,000 floats, run, jit",
            tanh_run(100_000),
            1.2,
            7.4e-3,
            parts={"100 numpy.tanh": tanh_alone},
            ours=COMPILED,
        ),
        "graph-jit-training": Against(
            "training step, 64-256-10 on digits, jit", training, 1.0, 405e-6, ours=COMPILED
        ),
    }
