"""`find_nan` of regrad and of JAX programs: the op, its element, and the words for it.

`tests/core/test_faults.py` has the lines.
"""

from __future__ import annotations

import numpy as np
import pytest

import regrad as rg
from tests.helpers.hosts import Functions

SAFE = np.ones((4, 8))
ZERO = np.where(np.arange(32).reshape(4, 8) == 31, 0.0, SAFE)
NAN, MASK = np.array([0.0, np.nan, 0.0]), np.array([True, False, True])
HALF = np.array([1.0, 20.0], np.float16)


def masked(o, x):
    return o.where(MASK, x, -np.inf)


def root(o, x):
    return o.sum(o.where(x > 0, o.sqrt(x), 0.0))


ROWS = {  # f, x, what is found, words of its text and its cure, and the op types in the libraries
    "the element": (lambda o, x: o.sum(o.log(o.exp(o.log(x)) - 0.0) * 2.0), ZERO,
                    {"phase": "forward", "what": "inf", "index": (3, 7), "count": 1},
                    ["x = 0 at index (3, 7)", "log(maximum(x, eps))"], ("Log", "log")),
    "behind a mask": (root, np.array([4.0, 0.0]),
                      {"phase": "backward", "what": "NaN", "output": "x", "index": (1,)},
                      ["behind a mask"], ("Sqrt", "sqrt")),
    "an argument": (lambda o, x: o.sum(o.sin(x["a"])), {"a": np.array([0.0, np.nan, np.inf])},
                    {"phase": "argument", "output": "args[0]['a']", "index": (1,), "count": 2},
                    ["NaN in args[0]['a'] at index (1,) (2 in all)"], (None, None)),
    "a constant": (lambda o, x: o.sum(o.sin(x - NAN) ** 2), np.ones(3),
                   {"phase": "forward", "index": (1,)}, ["b = nan"], ("Sub", "sub")),
    "all is finite": (lambda o, x: o.sum(o.sin(x)), SAFE, None, [], (None, None)),
    "spoils nothing": (lambda o, x: o.sum(o.softmax(masked(o, x)) * x), np.ones(3), None, [],
                       (None, None)),
    "a mask that is used": (lambda o, x: o.sum(masked(o, x) - o.max(x)), np.ones(3),
                            {"what": "inf", "index": (1,)}, [], ("SelectV2",)),
    "an infinity times 0": (lambda o, x: o.sum(masked(o, x) * 0.0), np.ones(3),
                            {"what": "NaN", "index": (1,)}, [], ("Mul", "mul")),
    "half precision": (lambda o, x: o.sum(o.exp(x)), HALF, {"what": "inf"}, ["overflows"],
                       ("Exp", "exp")),
}  # fmt: skip


def of_regrad():
    return Functions(rg, rg.nn), rg.find_nan


def of_jax():
    import jax
    import jax.numpy as jnp

    return Functions(jnp, jax.nn), rg.jax.find_nan


HOSTS = (of_regrad, of_jax)
CASES = [(name, host, op) for name in ROWS for host, op in zip(HOSTS, ROWS[name][-1], strict=False)]


@pytest.mark.parametrize(("name", "host", "op_type"), CASES)
def test_what_is_not_finite_is_found(name, host, op_type):
    f, x, expected, words, _ = ROWS[name]
    functions, find_nan = host()
    found = find_nan(lambda x: f(functions, x))(x)
    if expected is None:
        assert found is None
        return
    assert {key: getattr(found, key) for key in expected} == expected
    assert all(word in f"{found} {found.cure}" for word in words)
    assert op_type in (None, found.op_type)


def test_a_rule_that_makes_infinities_is_named():
    custom = rg.custom_grad(lambda x: (rg.sin(x), lambda dy: dy / x))
    with rg.gradient_override_map({"Sin": lambda dy, x: dy / x}):
        by_rule = rg.find_nan(lambda x: rg.sin(x).sum())(np.array([1.0, 0.0]))
    by_custom = rg.find_nan(lambda x: custom(x).sum())(np.array([1.0, 0.0]))
    for found in (by_rule, by_custom):
        assert (found.phase, found.what, found.index) == ("backward", "inf", (1,))
        assert "<lambda>, " in found.rule


def test_a_rule_of_jax_that_makes_infinities_is_named():
    import jax.numpy as jnp

    inverse = rg.jax.custom_grad(lambda x: (jnp.sin(x), lambda dy: dy / x))
    found = rg.jax.find_nan(lambda x: jnp.sum(inverse(x)))(jnp.array([1.0, 0.0]))
    assert (found.phase, found.index) == ("backward", (1,))
    assert "<lambda>" in found.rule
