"""Calls in the manner of other libraries are refused with what to write here."""

import collections
import dataclasses
import functools
import inspect
import os
import re
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
import regrad.v1
from regrad.core import hints, names
from regrad.errors import ArgumentError, DTypeError
from tests.helpers.paths import ROOT
from tests.helpers.rows import plain, refusals, refused

x = rg.tensor([1.0, 2.0])
ZEROS = rg.zeros((2, 2))


def f(x):
    return (x * x).sum()


def product(a, b):
    return (a * b).sum()


def says(call, *words, error=ArgumentError):
    """The call raises this error, and its message holds all of these words."""
    return refused(call, error, *map(re.escape, words))


NAMES = "grads value_and_grad value_and_grads variable_grads jacobian hessian vmap vjp jvp scan"
APIS = [getattr(rg, name) for name in f"grad {NAMES} map while_loop fori_loop".split()]
FOREIGN = ["argnums", "has_aux", "holomorphic", "allow_int", "axis_name", "static_argnums"]
REFUSED = [(a, k) for a in APIS for k in FOREIGN if k not in inspect.signature(a).parameters]


@pytest.mark.parametrize(("api", "keyword"), REFUSED)
def test_keywords_of_jax_say_what_to_write(api, keyword):
    start = re.split("[{.]", hints.KEYWORDS[keyword])[0]
    says(lambda: api(f, **{keyword: 0}), f"{api.__name__}: got", repr(keyword), start)


ARGUMENTS = [
    (lambda: rg.grads(product, argnums=1), "grads(f)([a, b])"),
    (lambda: rg.vjp(product, x, x, argnums=1), "vjp(f, a, b)"),
    (lambda: rg.grads(f, has_aux=True), "value_and_grad, jacobian, jacfwd, hessian and vjp take"),
    (lambda: rg.grad(f, unconected="zero"), "Did you mean 'unconnected'?", "It takes f,"),
    (lambda: rg.grad(), "missing", "'f'"),
    (lambda: rg.scan(product, x, lenght=3), "Did you mean 'length'?"),
    (lambda: rg.vmap(f)(x, k=2), "vmap(lambda x: f(x, k=k))"),
    (lambda: rg.grads(f)([x], k=2), "got an unexpected keyword argument 'k'"),
    (lambda: rg.grad(product)(x, x), "ambiguous", "dy=dy", "argnums=0", "grads(f)([x, a])"),
    (lambda: rg.value_and_grad(product)(x, x), "value_and_grads(f)([x, a])"),
    (lambda: rg.grad(product)(x), "takes (a, b)", "1 argument", "grads(f)([a, b])"),
    (lambda: rg.jacobian(product)(x), "takes (a, b)", "jacobian(f, argnums=(0, 1))"),
    (lambda: rg.hessian(product)(x), "takes (a, b)", "hessian(f, argnums=(0, 1))"),
    (lambda: rg.grad(f)(x, 1.0, 2), "got 3 positional arguments"),
    (lambda: rg.grad(f)(x, 1.0, dy=2), "got 2 positional arguments and dy"),
    (lambda: rg.grad(f)(), "missing", "It takes x, dy."),
    (lambda: rg.grads(product)([x]), "takes (a, b)", "one argument for each entry"),
    (lambda: rg.vjp(product, x), "takes (a, b)", "vjp(f, a, b)"),
    (lambda: rg.jvp(product, [x], [x]), "takes (a, b)", "jvp(f, [a, b], [da, db])"),
    (lambda: rg.variable_grads(f), "takes (x)", "no argument", "lambda: f(x)"),
    (lambda: rg.sum(x, axis="a"), "expected an integer for axis, got 'a'"),
    (lambda: rg.vmap(f, in_axes="a")(x), "an axis must be an int or None, got str: 'a'"),
    (lambda: rg.tensor([1, 2], "int32"), "dtype='int32'"),
    (lambda: rg.grad(lambda x: np.may_share_memory(x, x))(x), "take(x, order)"),
    (lambda: rg.tree_map(lambda x, y: x, [x, x], [x]), "tree_map: the structures do not fit"),
    (lambda: rg.tree_map(3, [x]), "expected a function, got int"),
]
ESCAPED = [(call, *map(re.escape, words)) for call, *words in ARGUMENTS]
test_arguments_that_do_not_fit = refusals(ESCAPED, ArgumentError)


@pytest.mark.parametrize("api", [rg.grad, rg.value_and_grad, rg.jacobian, rg.hessian])
def test_keywords_and_data_that_f_does_not_take(api):
    says(lambda: api(f)(x, k=2), "takes (x)", "1 argument and the keyword k")
    says(lambda: api(f, x), f"It returns a function: {api.__name__}(f)(x)")


@pytest.mark.parametrize("api", [rg.grad, rg.value_and_grad, rg.jacobian])
def test_errors_of_f_itself_are_left_alone(api):
    refused(lambda: api(lambda x: len(3))(x), TypeError, "^object of type 'int' has no len")
    refused(lambda: api(lambda x: product(x))(x), TypeError, r"^product\(\) missing 1 required")


def test_gradient_functions_keep_name_and_signature():
    assert str(inspect.signature(rg.grad(f))) == "(x, /, *, dy=None, **options)"
    assert list(inspect.signature(rg.grads(f)).parameters) == ["args", "dy"]
    assert rg.grad(f).__name__ == "grad_of_f"
    named = ["f", "argnums", "has_aux", "unconnected"]
    assert rg.grad.__doc__ and list(inspect.signature(rg.grad).parameters) == named
    assert rg.jit(rg.grad(f))(x).tolist() == [2, 4]


# -- objects that hold Tensors ---------------------------------------------------------------------


Data = dataclasses.make_dataclass("Data", ["w"])
Slots = dataclasses.make_dataclass("Slots", ["w"], slots=True)
Dict, List = type("Dict", (dict,), {}), type("List", (list,), {})
MATRIX = rg.tensor([[1.0, 2.0], [3.0, 4.0]])
CLOSED = {
    "dataclass": lambda: Data(MATRIX), "namespace": lambda: types.SimpleNamespace(w=MATRIX),
    "dict subclass": lambda: Dict(w=MATRIX), "list subclass": lambda: List([MATRIX]),
    "UserDict": lambda: collections.UserDict(w=MATRIX), "object": lambda: Data({"deep": [MATRIX]}),
    "slots": lambda: Slots(MATRIX), "array in an object": lambda: Data(np.ones((2, 2))),
    "generator": lambda: (x for x in [MATRIX]), "values of a dict": lambda: {"w": MATRIX}.values(),
}  # fmt: skip
TAKERS = [
    (lambda o: rg.vmap(lambda o: MATRIX[0])(o), "vmap: arguments[0] is"),
    (lambda o: rg.vmap(lambda o, y: y)({"a": o}, MATRIX), "arguments[0]['a']"),
    (lambda o: rg.scan(lambda c, o: (c, c), 0.0, o), "scan: xs is"),
    (lambda o: rg.scan(lambda c, o: (c, o), o, MATRIX), "scan: init is"),
    (lambda o: rg.map(lambda o: o, o), ""),
    (lambda o: rg.while_loop(lambda o: False, lambda o: o, o), "init is"),
    (lambda o: rg.grad(lambda o: MATRIX)(o), "grad: the input is"),
    (lambda o: rg.vjp(lambda o: MATRIX, o), "vjp: the input is"),
]


@pytest.mark.parametrize("make", CLOSED.values(), ids=CLOSED)
@pytest.mark.parametrize(("take", "words"), TAKERS)
def test_objects_that_hold_tensors_are_refused_by_name(take, words, make):
    name = type(make()).__name__
    says(lambda: take(make()), words, name, "does not open as a container", "register")


def test_objects_that_are_the_same_for_all_pass():
    for o in (Data(MATRIX[0]), types.SimpleNamespace(w=MATRIX[0])):
        found = rg.vmap(lambda o, y: o.w * y, in_axes=(None, 0))(o, MATRIX)
        assert found.tolist() == [[1.0, 4.0], [3.0, 8.0]]
    assert rg.vmap(lambda o, y: y * o.w)(Data(2.0), MATRIX).tolist() == (MATRIX * 2).tolist()
    assert rg.vmap(lambda f, y: f(y))(rg.sin, MATRIX).tolist() == rg.sin(MATRIX).tolist()


# -- empty containers, numbers in containers -------------------------------------------------------


@pytest.mark.parametrize("mode", [lambda f: f, rg.jit], ids=["eager", "jit"])
def test_empty_lists_are_containers_and_numbers_are_floats(mode):
    given = {"x": x, "layers": [], "deep": [[], ()]}
    df = rg.grad(lambda p: f(p["x"]))
    assert plain(mode(df)(given)) == {"x": [2.0, 4.0], "layers": [], "deep": [[], ()]}
    for value in (3, 3.0):
        dx = mode(rg.grad(lambda p: p["n"] * p["n"]))({"n": value})["n"]
        assert (dx.item(), dx.dtype) == (6.0, np.float32)
        assert mode(rg.grad(lambda n: n * n))(value).item() == 6.0


def test_trees():
    given = {"x": x, "layers": [], "deep": [[], ()]}
    assert rg.vjp(lambda p: f(p["x"]), given)[1](1.0)[0]["layers"] == []
    assert rg.vmap(lambda p: p["x"] * 2)(given).tolist() == [2.0, 4.0]
    assert rg.map(lambda p: p["x"] * 2, given).tolist() == [2.0, 4.0]
    last, _ = rg.scan(lambda c, y: ({**c, "x": c["x"] + y}, None), {"x": 0.0, "l": []}, x)
    assert plain(last) == {"x": 3.0, "l": []}
    assert rg.grad(lambda a: f(x))([]) == []
    assert rg.grad(lambda v: v.sum())([2.0, 3.0]).tolist() == [1.0, 1.0]  # of numbers: one tensor
    doubled = rg.tree_map(lambda x: x * 2, {"a": [x, 3.0], "b": (np.zeros(1), ())})
    assert plain(doubled) == {"a": [[2.0, 4.0], 6.0], "b": ([0.0], ())}
    assert rg.tree_map(lambda x: x, {"b": None}) == {"b": None}
    summed = rg.tree_map(lambda x, y: (x, y), {"w": 1.0}, {"w": {"deep": 2}})
    assert summed == {"w": (1.0, {"deep": 2})}


# -- values and names of other libraries -----------------------------------------------------------

NO_TENSORS = [
    (None, "got None. Has a function no return statement? (Write `x is None`"),
    ("a", "got str: 'a'. Tensors hold no strings"),
    ({"a": 1}, "got dict: {'a': 1}. Pass the op one of its entries"),
    ({1}, "got set: {1}. Make a list of it first."), (iter([1]), "Make a list of it first."),
    (rg.sin, "got function"), (object(), "got object"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "words"), NO_TENSORS)
def test_values_that_are_no_tensors(value, words):
    says(lambda: rg.add(x, value), "add: b: expected a Tensor, an array or a number", words)
    says(lambda: rg.sum(value), "sum: x: expected a Tensor, an array or a number", words)
    says(lambda: rg.tensor(value), "tensor: expected a Tensor, an array or a number", words)
    assert (x == value) is False and (x != value) is True and x not in (value,)


def test_attributes_of_other_libraries_are_absent():
    protocols = ["__jax_array__", "__array_interface__", "__cuda_array_interface__"]
    for t in (x, rg.Variable([1.0])):
        assert [name for name in [*names.ATTRIBUTES, *protocols] if hasattr(t, name)] == []
        assert names.ATTRIBUTES.keys().isdisjoint(dir(t))
        assert {"shape", "numpy", "sum"} <= set(dir(t))
    assert [name for name in names.NAMES if hasattr(rg, name)] == []
    assert getattr(x, "grad", 7) == 7


ABSENT = [
    (lambda t: t.backward(), "no attribute 'backward'", "grad(f)(x)"),
    (lambda t: t.dataSync(), "x.numpy()"), (lambda t: t.expandDims(0), "called expand_dims here"),
    (lambda t: t.nonsense, "no attribute 'nonsense'"), (lambda t: rg.no_grad, "stop_gradient(x)"),
    (lambda t: rg.relu, "regrad.nn.relu"), (lambda t: rg.valueAndGrad, "Use regrad.value_and_grad"),
]  # fmt: skip


@pytest.mark.parametrize("row", ABSENT, ids=[row[1] for row in ABSENT])
def test_names_of_other_libraries_say_what_to_use(row):
    for t in (x, rg.Variable([1.0])):
        says(lambda t=t: row[0](t), *row[1:], error=AttributeError)


def test_what_the_hints_name_is_there():
    places = [f"regrad.{place}" for place in names.SAME.values()]
    for text in [*names.ATTRIBUTES.values(), *names.NAMES.values(), *places]:
        for name in re.findall(r"regrad\.([a-z_0-9.]*[a-z_0-9])", text):
            assert functools.reduce(getattr, name.split("."), rg) is not None
        for name in re.findall(r"\bx\.([a-z]\w*)", text):
            assert hasattr(x, name), name
        for name in re.findall(r"\b([a-z_]+)\(", re.sub(r"[.]\w+\(", "", text)):
            assert hasattr(rg, name), name


def test_singular_matrices_name_the_op():
    says(lambda: rg.linalg.inv(ZEROS), "regrad.inv", "(2, 2)", "Singular", error=ValueError)
    logdet = rg.grad(lambda a: rg.linalg.slogdet(a)[1])
    error = says(lambda: logdet(ZEROS), "MatrixInverse", error=np.linalg.LinAlgError)
    assert "LogMatrixDeterminant" in error.__notes__[0]


@pytest.mark.parametrize("data", [x, rg.asarray(jnp.ones(2)), rg.asarray(torch.ones(2))])
def test_dtypes_that_an_op_is_not_defined_for(data):
    says(lambda: ~data, "regrad.bitwise_invert is not defined for float", error=DTypeError)
    says(lambda: data & 1, "regrad.bitwise_and is not defined for", error=DTypeError)
    words = "expected a dtype such as", "got 'floaty'"
    says(lambda: rg.tensor([1.0], dtype="floaty"), *words, error=DTypeError)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-O", "-OO"])
def test_no_promise_is_kept_by_an_assertion(flag):
    """Python leaves assertions out with -O, and docstrings with -OO."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, flag, "-m", "tests.helpers.optimized_program"], capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.stdout.splitlines()[-1:] == ["all hold"], done.stderr
