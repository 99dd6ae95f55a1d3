"""Calls in the manner of other libraries are refused with what to write here."""

import functools
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


GOOD = {
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
        says(lambda: rg.jvp(rg.sign, [x], [x]), "gives a gradient", "even where none arrives",
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
