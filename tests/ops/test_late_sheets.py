"""Op sheets that are loaded when one of their op types, functions or methods is asked for."""

import importlib
import subprocess
import sys

import pytest

import regrad as rg
from regrad.core.registry import OPS
from regrad.ops import methods

pytestmark = pytest.mark.slow


def run(script):
    """Return what a new interpreter prints, which has imported the library alone."""
    start = "import sys, regrad as rg\nfrom regrad.core import registry\n"
    done = subprocess.run(
        [sys.executable, "-c", start + script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("sheet", sorted(set(OPS.late.values())))
def test_a_sheet_has_the_op_types_that_are_known_of_it(sheet):
    importlib.import_module(sheet)
    made = {op.type for op in OPS.loaded() if op.function.__module__ == sheet}
    assert made == {op_type for op_type, module in OPS.late.items() if module == sheet}
    assert made <= set(OPS.sheets)


@pytest.mark.parametrize("name", [n for names in methods.LATE.values() for n in names.split()])
def test_a_method_is_the_function(name):
    method, _, function = name.partition("=")
    [sheet] = [s for s, names in methods.LATE.items() if name in names.split()]
    found = getattr(importlib.import_module(f"regrad.ops.{sheet}"), function or method)
    assert getattr(rg.Tensor, method) is getattr(rg.Variable, method) is found


SCRIPTS = {  # a program, and the words that it prints
    "which op types there are does not depend on what is loaded": ("""
before = rg.op_types(), len(registry.OPS), registry.version
print("regrad.ops.pooling" in sys.modules, "MaxPool" in registry.OPS, "MaxPool" in before[0])
for op_type in before[0]:
    rg.find_op(op_type)
import regrad.nn, regrad.linalg, regrad.fft
print((rg.op_types(), len(registry.OPS), registry.version) == before)
print("regrad.ops.pooling" in sys.modules)
""", "False True True True True"),
    "a scope names an op whose sheet is not loaded": ("""
print("regrad.ops.activation" in sys.modules)
with rg.gradient_override_map({"Relu": lambda dy, x: dy * 7}) as used:
    print(rg.grad(lambda x: rg.sum(rg.nn.relu(x)))(rg.tensor([-1.0])).tolist())
used.assert_fired()
@rg.RegisterGradient("Sevenfold")
def _(op, dy):
    return dy * 7
with rg.gradient_override_map({"MaxPool": "Sevenfold", "Elu": "Sinc"}):
    pass
""", "False [7.0]"),
    "a rule of an op whose sheet is not loaded is lent": ("""
print("regrad.ops.activation" in sys.modules)
with rg.gradient_override_map({"Sign": "Softsign"}):
    print(rg.grad(rg.sign)(1.0).item())
try:
    rg.RegisterGradient("Selu")(lambda op, dy: dy)
except rg.errors.RegistrationError as error:
    print("taken" in str(error))
""", "False 0.25 True"),
    "threads that load one sheet find ops with their rules": ("""
import threading
start, found = threading.Barrier(8), []
def ask(op_type):
    start.wait()
    found.append(not isinstance(rg.find_op(op_type).rule, registry.NoRule))
types = ["Relu", "LogSoftmax", "Softmax", "Elu"] * 2
threads = [threading.Thread(target=ask, args=(op_type,)) for op_type in types]
sys.setswitchinterval(1e-6)
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(found.count(True))
""", "8"),
    "who asks for an op waits for a thread that makes its rule": ("""
import threading, regrad.core.op as op_module
made, go, seen = threading.Event(), threading.Event(), []
gradient = registry.gradient
def slow(op_type, *args, **options):
    if op_type == "Softmax":
        made.set(), go.wait()
    return gradient(op_type, *args, **options)
registry.gradient = slow
first = threading.Thread(target=lambda: rg.find_op("Relu"))
first.start()
made.wait()
second = threading.Thread(
    target=lambda: seen.append(type(registry.OPS["Softmax"].rule).__name__)
)
second.start()
second.join(0.3)
print(second.is_alive(), "Softmax" in registry.OPS.sheets)
go.set(), first.join(), second.join()
print(seen[0] != "NoRule")
""", "True True True"),
    "a program stays valid when a sheet is loaded": ("""
f = rg.jit(lambda x: rg.sum(x * x))
x = rg.tensor([1.0, 2.0])
f(x), f(x)
print(f.cache_info().traces, "regrad.ops.pooling" in sys.modules)
rg.find_op("MaxPool"), rg.find_op("Svd"), f(x)
print(f.cache_info().traces)
g = rg.jit(rg.grad(lambda x: rg.sum(rg.sinc(x))))
g(x)
rg.gradient("Sinc", overwrite=True)(lambda dy, x: dy * 7)
print(g(x).tolist())
""", "1 False 1 [7.0, 7.0]"),
    "a scope for pytorch names an op whose sheet is not loaded": ("""
import torch
print("regrad.ops.activation" in sys.modules)
x = torch.tensor([-1.0], requires_grad=True)
with rg.torch.gradient_override_map({"Relu": lambda dy, x: dy * 7}) as used:
    torch.relu(x).backward()
used.assert_fired()
print(x.grad.tolist())
""", "False [7.0]"),
    "a function of jax is overridden by an op whose sheet is not loaded": ("""
import jax
print("regrad.ops.activation" in sys.modules)
f = rg.jax.override(lambda x: jax.nn.relu(x), {"Relu": lambda dy, x: dy * 7})
print(jax.grad(f)(-1.0))
""", "False 7.0"),
    "whole calls are known to functions that were decorated before": ("""
@rg.name_scope("block")
def f(x):
    return x * x
f(rg.scalar(2.0))
print("regrad.transforms.whole_calls" in sys.modules)
with rg.gradient_override_map({rg.at("block"): lambda dy, x: dy * 7}) as used:
    print(rg.grad(f)(3.0).item())
used.assert_fired()
""", "False 7.0"),
    "numpy finds the functions of sheets that are not loaded": ("""
import numpy as np
x = rg.tensor([0.5])
print(type(np.sin(x)).__name__, "regrad.ops.special" in sys.modules, np.sinc(x).shape)
""", "Tensor False (1,)"),
    "a method that users replace stays": ("""
rg.Tensor.sinc = lambda x: 7
print(rg.variable([1.0]).sinc().shape, rg.tensor([1.0]).sinc())
""", "(1,) 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_in_a_new_interpreter(name):
    script, due = SCRIPTS[name]
    for package, signs in (("jax", ("rg.jax", "rg.jit")), ("torch", ("rg.torch",))):
        if any(sign in script for sign in signs):
            pytest.importorskip(package)
    assert run(script) == due.split()


@pytest.mark.parametrize("sheet", ["", "import regrad.ops.activation"])
def test_an_op_type_of_a_sheet_is_taken(sheet):
    script = f"""
{sheet}
try:
    @rg.op("Selu")
    def selu(xp, x: rg.Tensor, /) -> rg.Tensor:
        return x
except rg.errors.RegistrationError as error:
    print("exists" in str(error))
try:
    rg.gradient("Selu")(lambda dy, x: dy)
except rg.errors.RegistrationError as error:
    print("already" in str(error))
"""
    assert run(script) == ["True", "True"]


@pytest.mark.parametrize(
    "change", ["gradient('Sinc', overwrite=True)(f)", "not_differentiable('Sinc')"]
)
def test_a_change_of_a_rule_counts_though_its_sheet_is_loaded_by_it(change):
    script = f"""
f = lambda dy, x: dy * 7
before = registry.version
rg.{change}
print(registry.version - before)
"""
    assert run(script) == ["1"]


def test_names_of_the_package():
    script = """
print("jit" in dir(rg), "jit" in vars(rg), rg.jit is rg.jit, "jit" in vars(rg))
import pickle
print(pickle.loads(pickle.dumps(rg.sinc)) is rg.sinc)
from regrad import *
print(vmap is rg.vmap, fft is rg.fft)
"""
    assert run(script) == ["True", "False", "True", "True", "True", "True", "True"]
    with pytest.raises(AttributeError, match=r"Use regrad\.nn\.relu"):
        rg.ReLU  # noqa: B018


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "KeyError", "RecursionError"])
def test_a_sheet_whose_import_is_cut_short_is_loaded_the_next_time(error):
    """Ops that it had made are made again; meanwhile the op type is there, and taken."""
    script = f"""
import regrad.core.op as op_module
calls, elementwise = [], op_module.elementwise
def cut_short(*args, **options):
    calls.append(args)
    if len(calls) == 3:
        raise {error}
    return elementwise(*args, **options)
op_module.elementwise = cut_short
try:
    rg.find_op("Relu")
except {error} as caught:
    print(type(caught).__name__)
op_module.elementwise = elementwise
print("Relu" in registry.OPS, registry.OPS.is_free("Relu"))
print(rg.find_op("Relu"), rg.grad(lambda x: rg.sum(x.relu()))(rg.tensor([1.0])).tolist())
with rg.gradient_override_map({{"Relu": lambda dy, x: dy * 7}}):
    print(rg.grad(lambda x: rg.sum(rg.nn.relu(x)))(rg.tensor([-1.0])).tolist())
print(registry.OPS.is_free("Relu"))
"""
    found = [error, "True", "False", "<op", "type", "Relu>", "[1.0]", "[7.0]", "False"]
    assert run(script) == found


@pytest.mark.parametrize("sheet", ["", "import regrad.ops.special"])
def test_an_op_of_a_user_does_not_take_the_name_of_one_whose_sheet_is_not_loaded(sheet):
    script = f"""
import scipy.special
{sheet}
@rg.op("TimesFive", elementwise=True)
def xlogy(xp, a: rg.Tensor, b: rg.Tensor, /) -> rg.Tensor:
    return a * 5
print(scipy.special.xlogy(rg.tensor([2.0]), rg.tensor([1.0])).tolist())
"""
    assert run(script) == ["[0.0]"]
