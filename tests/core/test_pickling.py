"""Pickle, copy and deepcopy of objects that users keep: rules, scopes, reports, functions."""

import copy
import pickle
import subprocess
import sys

import pytest

import regrad as rg
from tests.helpers.optional import optional
from tests.helpers.rows import plain, under

cloudpickle, optax = optional("cloudpickle"), optional("optax")


def loss(x):
    return rg.sin(x) * x


def rule(dy, x):
    return dy * x * 7


def learned(dy, x, k):
    return dy * k, {"k": None}


def scaled(a, n):
    return a * n


@rg.grad
def gradient(x):
    return x * x


@rg.jit
def compiled(x):
    return x * x


@rg.custom_grad
def custom(a):
    return a * a, lambda dy: dy * 5


def used(scope):
    with scope as report:
        rg.grad(rg.sin)(2.0)
    return report


def under_sin(rule, key="Sin"):
    return used(rg.gradient_override_map({key: rule}))


KEPT = {
    "builtin": lambda: rg.rules.builtin("Relu"), "superspike": lambda: rg.rules.superspike(10.0),
    "learns": lambda: rg.rules.learns(learned, k=rg.Variable(2.0, name="k")),
    "vjp_of": lambda: rg.rules.vjp_of(rg.cos), "replace": lambda: rg.replace(loss),
    "at": lambda: rg.at("a.*", "Sin"), "scope": lambda: under_sin(rule),
    "scope of builtin": lambda: under_sin(rg.rules.builtin("Sin")),
    "scope at a place": lambda: under_sin(rule, rg.at("**", "Sin")),
    "hits": lambda: under_sin(rule).hits, "name_scope": lambda: used(rg.name_scope("a")),
    "default_dtype": lambda: rg.default_dtype("float64"), "gradient": lambda: gradient,
    "gradient of": lambda: rg.grad(loss), "compiled": lambda: compiled, "custom": lambda: custom,
    "hessian": lambda: rg.hessian(loss), "vmap": lambda: rg.vmap(loss),
    "checkpoint": lambda: rg.checkpoint(loss), "Variable": lambda: rg.Variable([1.0], name="v"),
    "Tensor": lambda: rg.tensor([1.0]), "trace": lambda: rg.trace_gradients(loss)(2.0),
}  # fmt: skip
WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: pickle.loads(cloudpickle.dumps(x)), "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}  # fmt: skip
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
@pytest.mark.parametrize("kept", KEPT)
def test_what_users_keep(kept, way):
    made = way(x := KEPT[kept]())
    assert type(made) is type(x)
    if type(x).__repr__ is not object.__repr__ and " at 0x" not in repr(x):
        assert repr(made) == repr(x)
    if kept in ("gradient", "compiled", "custom"):  # which have a name in their module
        assert made is x


@ways
def test_copies_work(way):
    scope = way(under_sin(rule))
    scope.assert_fired("Sin")
    assert [(hit.op_type, hit.count, hit.ran) for hit in scope.hits] == [("Sin", 1, 1)]
    with scope:
        assert rg.grad(rg.sin)(2.0).item() == 14.0
    assert way(rg.rules.builtin("Square"))(rg.tensor(3.0), x=rg.tensor(5.0)).item() == 30.0


# As a notebook has it: nothing of this can be imported by the process that opens it.
NOTEBOOK = """
import copy, pickle, cloudpickle, sys, regrad as rg
@rg.custom_grad
def square(a, save):
    save([a])
    return a * a, lambda dy, saved: dy * saved[0] * 7
@rg.custom_grad
def twice(a):
    return square(a) * 2, lambda dy: dy * rg.scalar(3.0)
def rule(dy, x):
    return dy * 11
@rg.jit
def compiled(x): return x * 5
@rg.grad
def gradient(x): return x * x
for made in (compiled, gradient):
    assert pickle.loads(pickle.dumps(made)) is made
    assert copy.copy(made) is made
for f in (square, twice):
    rg.grad(f)(2.0)
sent = square, twice, rule, rg.grad(square), compiled, gradient
sys.stdout.buffer.write(cloudpickle.dumps(sent))
"""


@pytest.mark.slow
def test_functions_of_a_notebook():
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    square, twice, rule, of_square, compiled, gradient = pickle.loads(done.stdout)
    x, gradients = rg.scalar(3.0), [rg.grad(square), rg.grad(twice), of_square, gradient]
    assert (square.__name__, *plain([square(x), twice(x), compiled(x)])) == ("square", 9, 18, 15)
    assert [g(x).item() for g in gradients] == [21.0, 3.0, 21.0, 6.0]
    assert rg.jit(rg.grad(square))(x).item() == 21.0
    assert under({"Sin": rule}, rg.grad(rg.sin), x).item() == 11.0


def test_compiled_functions_keep_their_options():
    by_two = rg.jit(scaled, static_argnames="n")
    other = pickle.loads(pickle.dumps(by_two))
    assert other is not by_two
    assert (other.f, other.options) == (scaled, by_two.options)
    assert other(rg.scalar(3.0), n=2).item() == 6.0
    nested = pickle.loads(cloudpickle.dumps(rg.jit(lambda a: a * 5)))
    assert rg.grad(nested)(rg.scalar(3.0)).item() == 5.0


def test_optimizers_go_with_their_state():
    w, adam = rg.Variable([1.0, 2.0], name="w"), rg.train.Optimizer(optax.adam(0.1), name="adam")
    adam.minimize(lambda: w.square().sum())
    other, v = pickle.loads(cloudpickle.dumps((adam, w)))
    for optimizer, variable in ((adam, w), (other, v)):
        optimizer.minimize(lambda variable=variable: variable.square().sum())
    assert v is not w and v.tolist() == w.tolist()
    assert plain(list(other.variables)) == plain(list(adam.variables))
