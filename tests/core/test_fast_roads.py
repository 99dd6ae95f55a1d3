"""The fast path and the columns of tapes: each part of their keys is needed."""

import threading

import jax.numpy as jnp
import pytest

import regrad as rg
from regrad.autodiff.custom_calls import CustomRule
from regrad.core import fastpath, rule_forms, tape
from regrad.core.registry import OPS
from regrad.core.state import current
from tests.helpers.rewritten import rewritten

X, Y, Z = rg.tensor([0.5, 2.0]), rg.tensor([3.0, 4.0]), rg.tensor([5.0, 6.0])
WHOLE = rg.tensor([1, 2], dtype="int32")
ON_JAX = rg.asarray(jnp.ones(2, "float32"))
COMPLEX = rg.tensor([0.5 + 1.0j, 2.0j])
REAL = "(p.dtype is not DOUBLE and p.dtype not in REAL)"
KINDS = "(kinds is None or (type(p) is ndarray and p.dtype.kind in kinds))"


def outcome(call, *args):
    """What a call returns or raises, to be compared."""
    try:
        y = call(*args)
    except Exception as error:
        return type(error).__name__
    return (str(y.dtype), type(y._data).__name__, y.tolist()) if isinstance(y, rg.Tensor) else y


def elsewhere(call):
    """What a call in another thread returns or raises."""
    found = []
    thread = threading.Thread(target=lambda: found.append(outcome(call)))
    thread.start()
    thread.join()
    return found[0]


def while_watched(call):
    """What a call of a Tensor does in another thread, while this one differentiates by it."""
    found = []

    def f(x):
        found.append(elsewhere(lambda: call(x)))
        return rg.sum(x)

    rg.grad(f)(X)
    return found[0]


def captured(f):
    """A Tensor of the closure, of which the next call finds another."""
    held = [X]
    g = rg.jit(lambda x: f(held[0]) + x)
    g(X)
    held[0] = Z
    return g(X)


def overridden(f):
    with rg.gradient_override_map({"Sin": lambda dy: dy * 7.0}):
        return rg.grad(f)(X)


def recorded(f):
    """The number of ops on the tape, after an op of a tensor that it does not watch."""
    found = []

    def g(x):
        f(Y)
        found.append(len(current().tapes[0].records))
        return rg.sum(x)

    rg.grad(g)(X)
    return found


UNARY = {  # a part of the key, its replacement, and a call that tells
    "a Tensor": ("if type(x) is Tensor:", "if True:", lambda f: f(2.0)),
    "kinds": (KINDS, "True", lambda f: f(WHOLE)),
    "no region": ("state.region is None", "True", captured),
    "no state anywhere": ("if not LIVE:", "if True:", lambda f: rg.grad(f)(X)),
    "no tape in another thread": ("refuse_elsewhere(op.type, (x,))", "pass", while_watched),
    "no tape beside this": (
        "or BESIDE", "", lambda f: while_watched(lambda x: rg.grad(lambda z: f(x) * z)(Y)),
    ),
    "no rule in force": ("op.type in rules", "False", overridden),
    "one tape": ("to is None", "False", lambda f: rg.grad(rg.grad(f))(X)),
    "real numbers": (REAL, "False", lambda f: rg.grad(lambda z: rg.real(f(z)))(COMPLEX)),
    "watched": ("if x._id in to.watched:", "if True:", recorded),
}  # fmt: skip


def outcomes(maker, op_type, old, new, call):
    """What the public function does, the fast path, and that without a part of its key."""
    op = OPS[op_type]
    roads = [op.function, getattr(fastpath, maker)(op), rewritten(fastpath, maker, old, new)(op)]
    return [outcome(call, f) for f in roads]


@pytest.mark.parametrize("part", UNARY)
def test_each_part_of_the_key_of_one_tensor_is_needed(part):
    due, found, less = outcomes("unary", "Sin", *UNARY[part])
    assert found == due != less


def by_first(f):
    return rg.grad(lambda x: f(x, Y))


def overridden_two(f):
    with rg.gradient_override_map({"RealDiv": lambda dy: (dy * 7.0, None)}):
        return by_first(f)(X)


BINARY = {
    "Tensors": ("if type(a) is Tensor is type(b):", "if True:", lambda f: f(X, 2.0)),
    "one library": ("type(p) is type(q)", "True", lambda f: f(X, ON_JAX)),
    "one dtype": ("p.dtype is q.dtype", "True", lambda f: f(X, WHOLE)),
    "kinds": (KINDS, "True", lambda f: f(WHOLE, WHOLE)),
    "no region": ("state.region is None", "True", lambda f: captured(lambda x: f(x, Y))),
    "no state anywhere": ("if not LIVE:", "if True:", lambda f: by_first(f)(X)),
    "no tape in another thread": (
        "refuse_elsewhere(op.type, (a, b))", "pass", lambda f: while_watched(lambda x: f(Y, x)),
    ),
    "no tape beside this": (
        "or BESIDE", "", lambda f: while_watched(lambda x: rg.grad(lambda z: f(x, Y) * z)(Y)),
    ),
    "no rule in force": ("op.type in rules", "False", overridden_two),
    "one tape": ("to is None", "False", lambda f: rg.grad(by_first(f))(X)),
    "real numbers": (
        REAL, "False", lambda f: rg.grad(lambda z: rg.real(f(z, COMPLEX)))(COMPLEX),
    ),
    "watched": ("if a._id in to.watched or b._id in to.watched:", "if True:",
                lambda f: recorded(lambda y: f(y, y))),
    "a number after": ("type(b) in WEAK", "True", lambda f: f(X, 1j)),
    "a number before": ("type(a) in WEAK", "True", lambda f: f(1j, X)),
    "a number after a float": (
        "(d := a._data.dtype) is DOUBLE or d in REAL", "(d := a._data.dtype)",
        lambda f: f(WHOLE, 0.5),
    ),
    "a number before a float": (
        "(d := b._data.dtype) is DOUBLE or d in REAL", "(d := b._data.dtype)",
        lambda f: f(0.5, WHOLE),
    ),
}  # fmt: skip


@pytest.mark.parametrize("part", BINARY)
def test_each_part_of_the_key_of_two_tensors_is_needed(part):
    due, found, less = outcomes("binary", "RealDiv", *BINARY[part])
    assert found == due != less


# -- columns: `rule.short` is their key ------------------------------------------------------------


SHORT = {  # a part of it, the function that decides it, what is in its place, and a rule that tells
    "all that it asks for": ((rule_forms.BoundFunction, "__init__", '"?"', '"x"'),
                             lambda dy, x_shape: dy * float(x_shape[0])),
    "by place": ((rule_forms.BoundFunction, "__init__", "op.single and by_place", "op.single"),
                 eval("lambda dy, *, x: dy * x")),
    "the output": ((tape.Tape, "write_unary", "y._data if keeps_y else None", "None"),
                   lambda dy, y: dy * y),
    "the input": ((tape.Tape, "write_unary", "p if kept else (p.shape, p.dtype)",
                   "(p.shape, p.dtype)"), lambda dy, x: dy * x),
}  # fmt: skip


@pytest.mark.parametrize("part", SHORT)
def test_each_part_of_the_key_of_columns_is_needed(part, monkeypatch):
    (owner, name, old, new), function = SHORT[part]
    op = OPS["Sin"]

    def slope():
        made = rule_forms.PerInput(op, "a rule")
        made.add("x", function)
        with monkeypatch.context() as patch:
            patch.setattr(op, "rule", made)
            return outcome(rg.grad(rg.sin), X)

    due = slope()
    with monkeypatch.context() as patch:  # (no rule is short: each has a record)
        patch.setattr(rule_forms, "SHORT", {})
        assert slope() == due
    monkeypatch.setattr(owner, name, rewritten(owner, name, old, new))
    assert slope() != due


def test_a_custom_function_is_columns_if_it_has_one_input(monkeypatch):
    def slopes():
        f = rg.custom_grad(lambda a, b: {"value": a * b, "grad_func": lambda dy: [dy, dy * 2.0]})
        return outcome(lambda: [dx.tolist() for dx in rg.grads(f)([X, Y])])

    due = slopes()
    init = rewritten(CustomRule, "__init__", "only_input if count == 1 else None", "only_input")
    monkeypatch.setattr(CustomRule, "__init__", init)
    assert due == [[1.0, 1.0], [2.0, 2.0]] != slopes()
