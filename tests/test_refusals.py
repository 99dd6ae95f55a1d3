"""Calls in the manner of other libraries are refused with what to write here."""

import re

import numpy as np
import pytest

import regrad as rg
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


@pytest.mark.parametrize("keyword", FOREIGN)
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.__name__)
def test_keywords_of_jax_say_what_to_write(api, keyword):
    from regrad.hints import KEYWORDS

    start = re.split("[{.]", KEYWORDS[keyword])[0]
    says(lambda: api(f, **{keyword: 0}), f"{api.__name__}: got", repr(keyword), start)


def test_argnums_says_what_to_call():
    says(lambda: rg.grad(product, argnums=1), "grad(lambda a: f(a, b))", "grads(f)([a, b])")
    says(lambda: rg.value_and_grad(product, argnums=1), "value_and_grads(f)([a, b])")
    says(lambda: rg.jacobian(product, argnums=1), "jacobian(lambda ab: f(*ab))((a, b))")
    both = rg.jacobian(lambda ab: product(*ab))((x, x))  # as the message says
    assert [d.tolist() for d in both] == [[1.0, 2.0], [1.0, 2.0]]


def test_has_aux_says_what_to_call():
    says(lambda: rg.value_and_grad(f, has_aux=True), "(y, aux), back = vjp(f, x)")
    (y, aux), back = rg.vjp(lambda x: (f(x), 3 * x), x)  # as the message says
    (dx,) = back((rg.ones_like(y), rg.zeros_like(aux)))
    assert (y.item(), aux.tolist(), dx.tolist()) == (5.0, [3.0, 6.0], [2.0, 4.0])


def test_misspelt_keywords_say_which_there_are():
    says(lambda: rg.grad(f, unconected="zero"), "Did you mean 'unconnected'?", "It takes f,")
    says(lambda: rg.grad(), "missing", "'f'")
    says(lambda: rg.scan(product, x, lenght=3), "Did you mean 'length'?")


@pytest.mark.parametrize("api", [rg.grad, rg.value_and_grad, rg.jacobian, rg.hessian, rg.vmap])
def test_options_of_f_go_in_a_closure(api):
    says(lambda: api(f)(x, k=2), f"{api.__name__}(lambda x: f(x, k=k))")
    says(lambda: rg.grads(f)([x], k=2), "got an unexpected keyword argument 'k'")


def test_a_second_argument_of_f_is_no_dy():
    says(lambda: rg.grad(product)(x, x), "takes (a, b)", "1 argument", "dy is the gradient")
    says(lambda: rg.value_and_grad(product)(x, x), "value_and_grads(f)([a, b])")
    says(lambda: rg.grad(f)(x, 1.0, 2), "too many positional arguments", "grads(f)([a, b])")
    for api in (rg.jacobian, rg.hessian):
        says(lambda api=api: api(product)(x, x), f"{api.__name__}(lambda a: f(a, b))(a)")
        says(lambda api=api: api(product)(x), "takes (a, b)", f"{api.__name__}(lambda a: f(a, b))")


def test_f_is_called_with_what_the_gradient_function_says():
    says(lambda: rg.grads(product)([x]), "takes (a, b)", "one argument for each entry")
    says(lambda: rg.vjp(product, x), "takes (a, b)", "vjp(f, a, b)")
    says(lambda: rg.jvp(product, [x], [x]), "takes (a, b)", "jvp(f, [a, b], [da, db])")
    says(lambda: rg.variable_grads(f), "takes (x)", "no argument", "lambda: f(x)")


@pytest.mark.parametrize("api", [rg.grad, rg.value_and_grad, rg.jacobian, rg.hessian])
def test_data_beside_f(api):
    says(lambda: api(f, x), f"It gives a function: {api.__name__}(f)(x)")


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

    assert list(inspect.signature(rg.grad(f)).parameters) == ["x", "dy"]
    assert list(inspect.signature(rg.grads(f)).parameters) == ["args", "dy"]
    assert rg.grad(f).__name__ == "grad_of_f"
    assert rg.grad.__doc__ and list(inspect.signature(rg.grad).parameters) == ["f", "unconnected"]
    assert np.allclose(rg.jit(rg.grad(f))(x).numpy(), [2, 4])
