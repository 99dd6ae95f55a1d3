"""Calls in the manner of other libraries are refused with what to write here."""

import collections
import dataclasses
import functools
import inspect
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import regrad as rg
import regrad.v1
from regrad.errors import ArgumentError

x = rg.tensor([1.0, 2.0])


def f(x):
    return (x * x).sum()


def product(a, b):
    return (a * b).sum()


def says(call, *words, error=ArgumentError):
    """The call raises this error, and its message holds all of these words."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [w for w in words if w not in message] == [], message
    return message


# -- arguments that a gradient function does not have ----------------------------------------------

NAMES = (
    "grad grads value_and_grad value_and_grads variable_grads jacobian hessian vmap vjp jvp scan"
)
APIS = [getattr(rg, name) for name in f"{NAMES} map while_loop fori_loop".split()]
FOREIGN = ["argnums", "has_aux", "holomorphic", "allow_int", "axis_name", "static_argnums"]


REFUSED = [(a, k) for a in APIS for k in FOREIGN if k not in inspect.signature(a).parameters]


@pytest.mark.parametrize(("api", "keyword"), REFUSED)
def test_keywords_of_jax_say_what_to_write(api, keyword):
    from regrad.core.hints import KEYWORDS

    start = re.split("[{.]", KEYWORDS[keyword])[0]
    says(lambda: api(f, **{keyword: 0}), f"{api.__name__}: got", repr(keyword), start)


def test_argnums_says_what_to_call():
    says(lambda: rg.grads(product, argnums=1), "grads(f)([a, b])")
    says(lambda: rg.vjp(product, x, x, argnums=1), "vjp(f, a, b)")


def test_has_aux_says_who_takes_it():
    says(
        lambda: rg.grads(f, has_aux=True),
        "value_and_grad, jacobian, jacfwd, hessian and vjp take it",
    )


def test_misspelt_keywords_say_which_there_are():
    says(lambda: rg.grad(f, unconected="zero"), "Did you mean 'unconnected'?", "It takes f,")
    says(lambda: rg.grad(), "missing", "'f'")
    says(lambda: rg.scan(product, x, lenght=3), "Did you mean 'length'?")


@pytest.mark.parametrize("api", [rg.grad, rg.value_and_grad, rg.jacobian, rg.hessian])
def test_keywords_that_f_does_not_take(api):
    says(lambda: api(f)(x, k=2), "takes (x)", "1 argument and the keyword k")
    says(lambda: rg.vmap(f)(x, k=2), "vmap(lambda x: f(x, k=k))")
    says(lambda: rg.grads(f)([x], k=2), "got an unexpected keyword argument 'k'")


def test_a_second_argument_of_f_is_no_dy():
    says(lambda: rg.grad(product)(x, x), "ambiguous", "dy=dy", "argnums=0", "grads(f)([x, a])")
    says(lambda: rg.value_and_grad(product)(x, x), "value_and_grads(f)([x, a])")
    says(lambda: rg.grad(product)(x), "takes (a, b)", "1 argument", "grads(f)([a, b])")
    says(lambda: rg.grad(f)(x, 1.0, 2), "got 3 positional arguments")
    says(lambda: rg.grad(f)(x, 1.0, dy=2), "got 2 positional arguments and dy")
    says(lambda: rg.grad(f)(), "missing", "It takes x, dy.")
    for api in (rg.jacobian, rg.hessian):
        says(lambda api=api: api(product)(x), "takes (a, b)", f"{api.__name__}(f, argnums=(0, 1))")


def test_f_is_called_with_what_the_gradient_function_says():
    says(lambda: rg.grads(product)([x]), "takes (a, b)", "one argument for each entry")
    says(lambda: rg.vjp(product, x), "takes (a, b)", "vjp(f, a, b)")
    says(lambda: rg.jvp(product, [x], [x]), "takes (a, b)", "jvp(f, [a, b], [da, db])")
    says(lambda: rg.variable_grads(f), "takes (x)", "no argument", "lambda: f(x)")


@pytest.mark.parametrize("api", [rg.grad, rg.value_and_grad, rg.jacobian, rg.hessian])
def test_data_beside_f(api):
    says(lambda: api(f, x), f"It returns a function: {api.__name__}(f)(x)")


def test_errors_of_f_itself_are_left_alone():
    def broken(x):
        return len(3)  # pyright: ignore[reportArgumentType]

    def wrong_inside(x):
        return product(x)  # pyright: ignore[reportCallIssue]

    for api in (rg.grad, rg.value_and_grad, rg.jacobian):
        with pytest.raises(TypeError, match=r"^object of type 'int' has no len"):
            api(broken)(x)
        with pytest.raises(TypeError, match=r"^product\(\) missing 1 required"):
            api(wrong_inside)(x)


def test_gradient_functions_keep_name_and_signature():
    import inspect

    assert str(inspect.signature(rg.grad(f))) == "(x, /, *, dy=None, **options)"
    assert list(inspect.signature(rg.grads(f)).parameters) == ["args", "dy"]
    assert rg.grad(f).__name__ == "grad_of_f"
    named = ["f", "argnums", "has_aux", "unconnected"]
    assert rg.grad.__doc__ and list(inspect.signature(rg.grad).parameters) == named
    assert np.allclose(rg.jit(rg.grad(f))(x).numpy(), [2, 4])


# -- rules -----------------------------------------------------------------------------------------


def by_three(dy, x):
    return dy * 3


def two(k, dy, x):
    return dy * k


class Callable:
    """An object that is a rule, and one whose methods are."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, dy, x):
        return dy * 3

    def native(self, dy):
        return dy * 3

    def tensorflow(self, op, grad):
        return grad * 3


def stated(rule):
    """A function that shows the signature of another, and is not said to wrap it."""

    def call(*args, **options):
        return rule(*args, **options)

    call.__signature__ = inspect.signature(rule)
    return call


GOOD = {
    "stated signature": stated(by_three),
    "partial": functools.partial(two, 3),
    "partial of a method": functools.partial(Callable().native),
    "object": Callable(),
    "method": Callable().native,
    "method in TensorFlow's form": Callable().tensorflow,
    "staticmethod": staticmethod(lambda dy: dy * 3),
    "wrapper": functools.wraps(by_three)(lambda *args: args[0] * 3),
    "names and more": lambda dy, *rest: dy * 3,
    "anything": lambda *args: args[1] * 3,
    "a list": lambda dy: [dy * 3],
    "a tuple": lambda dy, x: (dy * 3,),
}
BAD = {
    "cache": (functools.cache(lambda dy: dy), "functools.cache or lru_cache"),
    "lru_cache": (functools.lru_cache(two), "functools.cache or lru_cache"),
    "bound by keyword": (functools.partial(two, k=3), "takes (*, k=3, dy, x)"),
    "anything": (lambda *args: args[0] * 3, "takes (*args), which does not say its form"),
    "swapped": (lambda grad, op: grad, "called in TensorFlow's form, (op, grad)"),
    "a builtin": (abs, "takes (x, /)"),
    "an op": (rg.sin, "takes (x, /)"),
    "a ufunc": (np.negative, "takes (x, /, out=None"),
    "no names": (lambda **options: 1, "takes (**options)"),
    "a list of two": (lambda dy: [dy, dy], "expected a Tensor, got list"),
    "an empty list": (lambda dy: [], "expected a Tensor, got list"),
}


def by_rule(rule, x=x):
    with rg.gradient_override_map({"Sign": rule, "Round": rule}):
        return rg.grad(lambda x: rg.sign(x) + rg.round(x))(x)


@pytest.mark.parametrize("rule", GOOD.values(), ids=GOOD)
def test_any_callable_that_fits_is_a_rule(rule):
    assert by_rule(rule).tolist() == [6.0, 6.0]
    assert rg.jit(functools.partial(by_rule, rule))(x).tolist() == [6.0, 6.0]


@pytest.mark.parametrize(("rule", "words"), BAD.values(), ids=BAD)
def test_what_is_no_rule_is_refused_by_name(rule, words):
    name = "two" if isinstance(rule, functools.partial) else getattr(rule, "__name__", "")
    says(lambda: by_rule(rule), f"the rule {name!r}", words, error=Exception)


def test_a_list_with_none_is_no_gradient():
    assert by_rule(lambda dy: [None]).tolist() == [0.0, 0.0]


def test_a_list_from_a_rule_is_looked_at_in_forward_mode():
    with rg.gradient_override_map({"Sign": lambda dy: [dy + 1]}):
        says(lambda: rg.jvp(rg.sign, [x], [x]), "returns a gradient", "even where none arrives",
             error=rg.errors.GradientError)  # fmt: skip
    with rg.gradient_override_map({"Sign": lambda dy: [dy * 3]}):
        assert rg.jvp(rg.sign, [x], [x])[1].tolist() == [3.0, 6.0]


def test_a_list_with_complex_numbers():
    z = rg.tensor(np.array([1 + 2j]))
    with rg.gradient_override_map({"Square": lambda dy, x: [dy * x]}):
        listed = rg.grad(rg.square)(z)
    with rg.gradient_override_map({"Square": lambda dy, x: dy * x}):
        assert rg.grad(rg.square)(z).tolist() == listed.tolist()


# -- gradient functions of custom_grad -------------------------------------------------------------


def by_gradient_function(grad_func):
    def square(x, save):
        save([x])
        return x * x, grad_func

    return rg.grad(rg.custom_grad(square))(x).tolist()


@pytest.mark.parametrize(
    ("grad_func", "words"),
    [
        (lambda dy, a, b: dy, "takes (dy, a, b), expected (dy, saved) or (dy)"),
        (lambda: 1, "takes ()"),
        (lambda dy, *, saved: dy, "takes (dy, *, saved)"),
        (lambda dy, a, b, k=1: dy, "takes (dy, a, b, k=1)"),
        (functools.partial(lambda dy, a, b, c: dy, c=2), "takes (dy, a, b, *, c=2)"),
    ],
)
def test_gradient_functions_of_other_arguments(grad_func, words):
    says(lambda: by_gradient_function(grad_func), "custom_grad: the gradient function", words)


def test_gradient_functions_that_fit():
    for grad_func in [
        lambda dy: dy * 3,
        lambda dy, saved: dy * 3,
        lambda dy, saved, k=3: dy * k,
        lambda dy, k=3: dy * k,
        lambda *given: given[0] * 3,
        lambda dy, *given: dy * 3,
        lambda dy, **options: dy * 3,
        lambda dy, *, k=3: dy * k,
        functools.partial(lambda k, dy: dy * k, 3),
        functools.partial(lambda k, dy, saved: dy * k, 3),
        Callable().native,
    ]:
        assert by_gradient_function(grad_func) == [3.0, 3.0]


def test_errors_of_a_gradient_function_itself_are_left_alone():
    with pytest.raises(TypeError, match=r"^object of type 'int' has no len"):
        by_gradient_function(lambda dy, saved: len(3))  # pyright: ignore[reportArgumentType]


# -- objects that hold Tensors ---------------------------------------------------------------------


@dataclasses.dataclass
class Data:
    w: object


class Plain:
    def __init__(self, w):
        self.w = {"deep": [w]}


class Dict(dict):
    pass


class List(list):
    pass


class Slots:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


MATRIX = rg.tensor([[1.0, 2.0], [3.0, 4.0]])
CLOSED = {
    "dataclass": lambda: Data(MATRIX),
    "namespace": lambda: types.SimpleNamespace(w=MATRIX),
    "dict subclass": lambda: Dict(w=MATRIX),
    "list subclass": lambda: List([MATRIX]),
    "UserDict": lambda: collections.UserDict(w=MATRIX),
    "object": lambda: Plain(MATRIX),
    "slots": lambda: Slots(MATRIX),
    "array in an object": lambda: Data(np.ones((2, 2))),
    "generator": lambda: (x for x in [MATRIX]),
    "values of a dict": lambda: {"w": MATRIX}.values(),
}


@pytest.mark.parametrize("make", CLOSED.values(), ids=CLOSED)
def test_objects_that_hold_tensors_are_refused_by_name(make):
    name = type(make()).__name__
    words = [name, "is not opened as a container", "register"]
    says(lambda: rg.vmap(lambda o: MATRIX[0])(make()), "vmap: arguments[0] is", *words)
    says(lambda: rg.vmap(lambda o, y: y)({"a": make()}, MATRIX), "arguments[0]['a']", *words)
    says(lambda: rg.scan(lambda c, o: (c, c), 0.0, make()), "scan: xs is", *words)
    says(lambda: rg.scan(lambda c, o: (c, o), make(), MATRIX), "scan: init is", *words)
    says(lambda: rg.map(lambda o: o, make()), *words)
    says(lambda: rg.while_loop(lambda o: False, lambda o: o, make()), "init is", *words)
    says(lambda: rg.grad(lambda o: MATRIX)(make()), "grad: the input is", *words)
    says(lambda: rg.vjp(lambda o: MATRIX, make()), "vjp: the input is", *words)


def test_objects_that_are_the_same_for_all_pass():
    for o in (Data(MATRIX[0]), types.SimpleNamespace(w=MATRIX[0])):
        found = rg.vmap(lambda o, y: o.w * y, in_axes=(None, 0))(o, MATRIX)
        assert found.tolist() == [[1.0, 4.0], [3.0, 8.0]]
    assert rg.vmap(lambda o, y: y * o.w)(Data(2.0), MATRIX).tolist() == (MATRIX * 2).tolist()
    assert rg.vmap(lambda f, y: f(y))(rg.sin, MATRIX).tolist() == rg.sin(MATRIX).tolist()


# -- empty containers, numbers in containers -------------------------------------------------------


def test_an_empty_list_is_an_empty_container():
    given = {"x": x, "layers": [], "deep": [[], ()]}
    expected = {"x": [2.0, 4.0], "layers": [], "deep": [[], ()]}
    for mode in (lambda f: f, rg.jit):
        dx = mode(rg.grad(lambda p: f(p["x"])))(given)
        assert {**dx, "x": dx["x"].tolist()} == expected
    assert rg.vjp(lambda p: f(p["x"]), given)[1](1.0)[0]["layers"] == []
    assert rg.vmap(lambda p: p["x"] * 2)(given).tolist() == [2.0, 4.0]
    assert rg.map(lambda p: p["x"] * 2, given).tolist() == [2.0, 4.0]
    last, _ = rg.scan(lambda c, y: ({**c, "x": c["x"] + y}, None), {"x": 0.0, "l": []}, x)
    assert (last["x"].item(), last["l"]) == (3.0, [])
    assert rg.grad(lambda a: f(x))([]) == []
    assert rg.grad(lambda v: v.sum())([2.0, 3.0]).tolist() == [1.0, 1.0]  # of numbers: one tensor


def test_python_numbers_are_floats_for_grad_in_every_mode():
    for value in (3, 3.0):
        for mode in (lambda f: f, rg.jit):
            dx = mode(rg.grad(lambda p: p["n"] * p["n"]))({"n": value})["n"]
            assert (dx.item(), dx.dtype) == (6.0, np.float32)
            assert mode(rg.grad(lambda n: n * n))(value).item() == 6.0


# -- values and names of other libraries -----------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "got None. Has a function no return statement? (Write `x is None`"),
        ("a", "got str: 'a'. Tensors hold no strings"),
        ({"a": 1}, "got dict: {'a': 1}. Give the op one of its entries"),
        ({1}, "got set: {1}. Make a list of it first."),
        (iter([1]), "Make a list of it first."),
        (rg.sin, "got function"),
        (object(), "got object"),
    ],
)
def test_values_that_are_no_tensors(value, words):
    says(lambda: rg.add(x, value), "add: b: expected a Tensor, an array or a number", words)
    says(lambda: rg.sum(value), "sum: x: expected a Tensor, an array or a number", words)
    says(lambda: rg.tensor(value), "tensor: expected a Tensor, an array or a number", words)
    assert (x == value) is False and (x != value) is True and x not in (value,)


def test_attributes_of_other_libraries_are_absent_and_say_what_to_use():
    from regrad.core.names import ATTRIBUTES

    protocols = [
        "__jax_array__",
        "__array_interface__",
        "__cuda_array_interface__",
    ]
    for t in (x, rg.Variable([1.0])):
        assert [name for name in [*ATTRIBUTES, *protocols] if hasattr(t, name)] == []
        assert ATTRIBUTES.keys().isdisjoint(dir(t))
        assert {"shape", "numpy", "sum"} <= set(dir(t))
        says(
            lambda t=t: t.backward(), "no attribute 'backward'", "grad(f)(x)", error=AttributeError
        )
        says(lambda t=t: t.dataSync(), "x.numpy()", error=AttributeError)
        says(lambda t=t: t.expandDims(0), "called expand_dims here", error=AttributeError)
        says(lambda t=t: t.nonsense, "no attribute 'nonsense'", error=AttributeError)
    assert getattr(x, "grad", 7) == 7


def test_what_the_hints_name_is_there():
    from regrad.core import names

    places = [f"regrad.{place}" for place in names.SAME.values()]
    for text in [*names.ATTRIBUTES.values(), *names.NAMES.values(), *places]:
        for name in re.findall(r"regrad\.([a-z_0-9.]*[a-z_0-9])", text):
            assert functools.reduce(getattr, name.split("."), rg) is not None
        for name in re.findall(r"\bx\.([a-z]\w*)", text):
            assert hasattr(x, name), name
        for name in re.findall(r"\b([a-z_]+)\(", re.sub(r"[.]\w+\(", "", text)):
            assert hasattr(rg, name), name


def test_names_of_other_libraries_say_what_to_use():
    from regrad.core.names import NAMES

    assert [name for name in NAMES if hasattr(rg, name)] == []
    says(lambda: rg.no_grad, "stop_gradient(x)", error=AttributeError)
    says(lambda: rg.relu, "regrad.nn.relu", error=AttributeError)


def test_singular_matrices_name_the_op():
    zeros = rg.zeros((2, 2))
    says(lambda: rg.linalg.inv(zeros), "regrad.inv", "(2, 2)", "Singular", error=ValueError)
    with pytest.raises(np.linalg.LinAlgError) as caught:
        rg.grad(lambda a: rg.linalg.slogdet(a)[1])(zeros)
    assert "MatrixInverse" in str(caught.value)
    assert "LogMatrixDeterminant" in caught.value.__notes__[0]


def test_numpy_functions_say_what_to_use():
    says(lambda: rg.grad(lambda x: np.may_share_memory(x, x))(x), "take(x, order)")


@pytest.mark.parametrize("data", [x, rg.asarray(jnp.ones(2)), rg.asarray(torch.ones(2))])
def test_dtypes_that_an_op_is_not_defined_for(data):
    says(lambda: ~data, "regrad.bitwise_invert is not defined for float",
         error=rg.errors.DTypeError)  # fmt: skip
    says(lambda: data & 1, "regrad.bitwise_and is not defined for", error=rg.errors.DTypeError)


def test_axes_and_dtypes_that_are_none():
    says(lambda: rg.sum(x, axis="a"), "expected an integer for axis, got 'a'")
    says(lambda: rg.tensor([1.0], dtype="floaty"), "expected a dtype such as", "got 'floaty'",
         error=rg.errors.DTypeError)  # fmt: skip
    says(lambda: rg.vmap(f, in_axes="a")(x), "an axis is an int or None, got str: 'a'")
