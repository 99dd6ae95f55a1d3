"""Promises, checked without `assert`: `test_promises.py` runs this by `python -O` and `-OO`.

Python leaves out assertions then, and with -OO docstrings; no rule may be silent for it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import regrad as rg
import regrad.jax as rj
import regrad.torch as rt
import regrad.v1 as tf
from regrad.errors import NotFiredError, RegradError, UnknownOpError, UnusedOverrideWarning

X = np.array([0.5, -1.0], np.float32)
RULES = {"Sin": lambda dy, x: dy * 3.0}
MODULES = "extend fft inspection jax linalg losses nn plot random rules testing torch train v1"


def check(ok: Any, what: str) -> None:
    if not ok:
        raise SystemExit(f"{what} does not hold")


def refuses(error: type[BaseException], run: Callable[[], Any], what: str) -> None:
    try:
        run()
    except error as raised:
        check(str(raised), f"{what}: a message")
    else:
        check(False, what)


def fires(gradient: Callable[[], Any], scope: Any, what: str) -> None:
    """The rule ran in place of the cosine, and says so."""
    with scope as used:
        dx = np.asarray(gradient())
    check((dx == 3).all(), f"{what}: the rule fires")
    check(sum(hit.ran for hit in used.hits) > 0, f"{what}: the hits")
    used.assert_fired()
    check(np.allclose(gradient(), np.cos(X)), f"{what}: only in its scope")


def raises_in(gradient: Callable[[], Any], scope: Callable[[Any], Any], what: str) -> None:
    """What cannot be a gradient is refused, and so are keys that are no op types."""

    def run(rules: Any) -> None:
        with scope(rules):
            gradient()

    refuses(UnknownOpError, lambda: run({"Sinn": RULES["Sin"]}), f"{what}: an unknown op type")
    refuses(RegradError, lambda: run({"Sin": lambda dy, nothing: dy}), f"{what}: an unknown name")
    refuses(RegradError, lambda: run({"Sin": lambda dy, x: "no"}), f"{what}: an answer of text")
    refuses(RegradError, lambda: run({"Sin": lambda dy, x: None}), f"{what}: no answer")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with scope({"Cos": RULES["Sin"]}) as used:
            gradient()
    check(any(w.category is UnusedOverrideWarning for w in told), f"{what}: an idle key is told")
    refuses(NotFiredError, used.assert_fired, f"{what}: assert_fired")


def eager() -> Any:
    return rg.grad(lambda x: rg.sum(rg.sin(x)))(X).numpy()


def compiled() -> Any:
    return rg.jit(rg.grad(lambda x: rg.sum(rg.sin(x))))(X).numpy()


def graph() -> Any:
    with tf.Session() as session:
        x = tf.constant(X)
        return session.run(tf.gradients(tf.sin(x), x)[0])


def in_torch() -> Any:
    x = torch.tensor(X, requires_grad=True)
    return torch.autograd.grad(torch.sin(x).sum(), x)[0].numpy()


def jax_overrides() -> None:
    f = rj.override(lambda x: jnp.sum(jnp.sin(x)), RULES)
    for g in (jax.grad(f), jax.jit(jax.grad(f))):
        check((np.asarray(g(X)) == 3).all(), "JAX: the rule fires")
    f.assert_fired()
    refuses(RegradError, lambda: rj.override(jnp.sin, {"Sinn": RULES["Sin"]})(X), "JAX: a key")
    none = rj.override(lambda x: jnp.sum(jnp.sin(x)), {"Sin": lambda dy, x: "no"})
    refuses(RegradError, lambda: jax.grad(none)(X), "JAX: an answer of text")


def main() -> None:
    check(sys.flags.optimize, "python -O")
    for name in MODULES.split():
        importlib.import_module(f"regrad.{name}")
    default = tf.get_default_graph()
    for gradient, scope, what in (
        (eager, rg.gradient_override_map, "eager"),
        (compiled, rg.gradient_override_map, "jit"),
        (graph, default.gradient_override_map, "graph"),
        (in_torch, rt.gradient_override_map, "PyTorch"),
    ):
        fires(gradient, scope(RULES), what)
        raises_in(gradient, scope, what)
    jax_overrides()
    refuses(TypeError, lambda: rg.sin(), "a call without arguments")
    refuses(AttributeError, lambda: rg.nn.reluu, "a name that is not there")
    print("all hold")


if __name__ == "__main__":
    main()
