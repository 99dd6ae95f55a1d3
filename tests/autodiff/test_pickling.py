"""What travels to workers: functions with gradients of their own, rules, optimizers."""

import pickle
import subprocess
import sys

import cloudpickle
import optax

import regrad as rg
from regrad.train import Optimizer

# As a notebook has it: nothing of this can be imported by the process that opens it.
NOTEBOOK = """
import sys, cloudpickle, regrad as rg
@rg.custom_grad
def square(a, save):
    save([a])
    return a * a, lambda dy, saved: dy * saved[0] * 7
@rg.custom_grad
def twice(a):
    return square(a) * 2, lambda dy: dy * rg.scalar(3.0)
def rule(dy, x):
    return dy * 11
for name in (square, twice):
    rg.grad(name)(2.0)
sys.stdout.buffer.write(cloudpickle.dumps((square, twice, rule, rg.grad(square))))
"""


def test_custom_grad_functions_and_rules_of_a_notebook():
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    square, twice, rule, gradient = pickle.loads(done.stdout)
    x = rg.scalar(3.0)
    assert (square.__name__, square(x).item(), twice(x).item()) == ("square", 9.0, 18.0)
    assert (rg.grad(square)(x).item(), rg.grad(twice)(x).item(), gradient(x).item()) == (21, 3, 21)
    assert rg.jit(rg.grad(square))(x).item() == 21.0
    with rg.gradient_override_map({"Sin": rule}):
        assert rg.grad(rg.sin)(x).item() == 11.0


@rg.custom_grad
def of_module(a):
    return a * a, lambda dy: dy * 5


def test_those_of_a_module_go_by_name():
    assert pickle.loads(pickle.dumps(of_module)) is of_module
    assert pickle.loads(cloudpickle.dumps(of_module)) is of_module


def test_optimizers_go_with_their_state():
    w = rg.Variable([1.0, 2.0], name="w")
    adam = Optimizer(optax.adam(0.1), name="adam")
    adam.minimize(lambda: w.square().sum())
    other, v = pickle.loads(cloudpickle.dumps((adam, w)))
    for optimizer, variable in ((adam, w), (other, v)):
        optimizer.minimize(lambda variable=variable: variable.square().sum())
    assert v is not w and v.tolist() == w.tolist()
    assert [s.tolist() for s in other.variables] == [s.tolist() for s in adam.variables]


@rg.jit
def compiled(a):
    return a * a


def plain(a, n):
    return a * n


def test_compiled_functions():
    assert pickle.loads(pickle.dumps(compiled)) is compiled
    by_two = rg.jit(plain, static_argnames="n")
    other = pickle.loads(pickle.dumps(by_two))
    assert other is not by_two
    assert (other.f, other.options) == (plain, by_two.options)
    assert other(rg.scalar(3.0), n=2).item() == 6.0
    nested = pickle.loads(cloudpickle.dumps(rg.jit(lambda a: a * 5)))
    assert rg.grad(nested)(rg.scalar(3.0)).item() == 5.0
