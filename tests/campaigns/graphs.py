"""Functions of Tensors, run in a graph of TensorFlow 1."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import regrad.v1 as tf


def in_graph(
    f: Callable[..., Any], arrays: Sequence[np.ndarray], hidden: bool = False, jit: bool = False
) -> Any:
    """What a session gives for `f` of placeholders, whose sizes the graph may not know."""
    with tf.Graph().as_default():
        shapes = [[None] * a.ndim if hidden else list(a.shape) for a in arrays]
        places = [tf.placeholder(a.dtype, s) for a, s in zip(arrays, shapes, strict=True)]
        ys = f(*places)
        with tf.Session(**({"jit": True} if jit else {})) as session:
            session.run(tf.global_variables_initializer())
            return session.run(ys, dict(zip(places, arrays, strict=True)))
