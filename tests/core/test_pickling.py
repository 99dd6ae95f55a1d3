"""Pickle, copy and deepcopy of objects that users keep: rules, scopes, reports, functions."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError


def loss(x):
    return rg.sin(x) * x


def rule(dy, x):
    return dy * x * 7


def learned(dy, x, k):
    return dy * k, {"k": None}


@rg.grad
def gradient(x):
    return x * x


@rg.jit
def compiled(x):
    return x * x


def used(scope):
    with scope as report:
        rg.grad(rg.sin)(2.0)
    return report


KEPT = {
    "builtin": lambda: rg.rules.builtin("Relu"),
    "superspike": lambda: rg.rules.superspike(10.0),
    "learns": lambda: rg.rules.learns(learned, k=rg.Variable(2.0, name="k")),
    "vjp_of": lambda: rg.rules.vjp_of(rg.cos),
    "replace": lambda: rg.replace(loss),
    "at": lambda: rg.at("a.*", "Sin"),
    "scope": lambda: used(rg.gradient_override_map({"Sin": rule})),
    "scope of builtin": lambda: used(rg.gradient_override_map({"Sin": rg.rules.builtin("Sin")})),
    "scope at a place": lambda: used(rg.gradient_override_map({rg.at("**", "Sin"): rule})),
    "hits": lambda: used(rg.gradient_override_map({"Sin": rule})).hits,
    "name_scope": lambda: used(rg.name_scope("a")),
    "default_dtype": lambda: rg.default_dtype("float64"),
    "gradient": lambda: gradient,
    "gradient of": lambda: rg.grad(loss),
    "compiled": lambda: compiled,
    "hessian": lambda: rg.hessian(loss),
    "vmap": lambda: rg.vmap(loss),
    "checkpoint": lambda: rg.checkpoint(loss),
    "Variable": lambda: rg.Variable([1.0], name="v"),
    "Tensor": lambda: rg.tensor([1.0]),
    "trace": lambda: rg.trace_gradients(loss)(2.0),
}
WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
@pytest.mark.parametrize("kept", KEPT)
def test_what_users_keep(kept, way):
    made = way(x := KEPT[kept]())
    assert type(made) is type(x)
    if type(x).__repr__ is not object.__repr__ and " at 0x" not in repr(x):
        assert repr(made) == repr(x)


@ways
def test_a_report_stays_and_the_scope_can_be_opened(way):
    scope = way(used(rg.gradient_override_map({"Sin": rule})))
    scope.assert_fired("Sin")
    assert [(hit.op_type, hit.count, hit.ran) for hit in scope.hits] == [("Sin", 1, 1)]
    with scope:
        assert rg.grad(rg.sin)(2.0).item() == 14.0


@ways
def test_functions_that_decorators_made(way):
    assert way(gradient) is gradient
    assert way(compiled) is compiled


@ways
def test_builtin_rules(way):
    found = way(rg.rules.builtin("Square"))(rg.tensor(3.0), x=rg.tensor(5.0))
    assert found.item() == 30.0


MAIN = """
import copy, pickle, cloudpickle, sys, regrad as rg
@rg.jit
def compiled(x): return x * 5
@rg.grad
def gradient(x): return x * x
for made in (compiled, gradient):
    assert pickle.loads(pickle.dumps(made)) is made
    assert copy.copy(made) is made
sys.stdout.buffer.write(cloudpickle.dumps((compiled, gradient)))
"""


def test_functions_of_main():
    """pickle finds them by name, and cloudpickle sends them to a process that lacks the module."""
    done = subprocess.run([sys.executable, "-c", MAIN], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    compiled, gradient = pickle.loads(done.stdout)
    assert (compiled(rg.scalar(3.0)).item(), gradient(3.0).item()) == (15.0, 6.0)


def test_default_dtype_decorates():
    @rg.default_dtype("float64")
    def dtype(n=1):
        return (n and dtype(n - 1)) or rg.scalar(0.5).dtype

    assert dtype() == np.float64
    assert rg.scalar(0.5).dtype == np.float32
    assert dtype.__name__ == "dtype"


async def coroutine():
    """Run after the call."""


def generator():
    yield


@pytest.mark.parametrize(
    "f", [coroutine, generator, 3, rg.Module], ids=["coroutine", "generator", "int", "class"]
)
def test_default_dtype_refuses_what_it_cannot_decorate(f):
    with pytest.raises(ArgumentError, match="default_dtype decorates functions; this is"):
        rg.default_dtype("float64")(f)
