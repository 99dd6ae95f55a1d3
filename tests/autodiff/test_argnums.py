"""argnums, has_aux, keywords of f and `dy` in grad and its kin, each against JAX."""

import dataclasses

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError
from tests.helpers.rows import refusals, refused, results

A, B = np.array([0.5, 1.5], "f4"), np.array([2.0, 3.0], "f4")
ARGNUMS = [0, 1, -1, (0, 1), (1, 0), [1], (-1, 0)]
POWER = {"power": 3.0}
APIS = {
    "grad": (rg.grad, jax.grad), "value_and_grad": (rg.value_and_grad, jax.value_and_grad),
    "jacobian": (rg.jacobian, jax.jacrev), "hessian": (rg.hessian, jax.hessian),
}  # fmt: skip
apis = pytest.mark.parametrize(("ours", "theirs"), APIS.values(), ids=APIS)


def f(a, b, power=2.0):
    return (a**power * b).sum() * b[0]


def tuples(tree):
    """A tree with tuples for the lists of argnums."""
    if isinstance(tree, dict):
        return {k: tuples(part) for k, part in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(map(tuples, tree))
    return np.asarray(tree)


def close(found, expected):
    """The same numbers, in the same structure."""
    found = tuples(found)
    assert jax.tree.structure(found) == jax.tree.structure(tuples(expected))
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, np.asarray(y), rtol=1e-5)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("argnums", ARGNUMS, ids=str)
@apis
def test_argnums_and_keywords(ours, theirs, argnums):
    numbers = argnums if isinstance(argnums, int) else tuple(argnums)
    g = ours(f, argnums=argnums)
    for way, options in ((g, {}), (g, POWER), (rg.jit(g), POWER)):
        close(way(A, B, **options), theirs(f, argnums=numbers)(*map(jnp.array, (A, B)), **options))


@apis
def test_aux(ours, theirs):
    with_aux = lambda a, b=B: (f(a, b), {"double": a * 2})  # noqa: E731

    close(ours(with_aux, has_aux=True)(A), theirs(with_aux, has_aux=True)(jnp.array(A)))
    expected = theirs(with_aux, argnums=(1,), has_aux=True)(jnp.array(A), jnp.array(B))
    close(ours(with_aux, argnums=(1,), has_aux=True)(rg.tensor(A), B), expected)


def test_vjp_with_aux():
    y, back, aux = rg.vjp(lambda a, b: (a * b, "aux"), rg.tensor(A), rg.tensor(B), has_aux=True)
    close((y, back(A)), (A * B, (A * B, A * A)))
    assert aux == "aux"


def test_second_order():
    both = lambda grad: grad(lambda a, b: grad(f, argnums=1)(a, b).sum(), argnums=0)  # noqa: E731
    close(both(rg.grad)(A, B), both(jax.grad)(jnp.array(A), jnp.array(B)))


@rg.custom_grad
def times(a, b, save):
    save([a, b])
    return a * b, lambda dy, saved: [dy * 10, dy * 100]


@rg.custom_grad
def saving(a, save):
    save([a])
    return a * a, lambda dy, saved: dy * saved[0]


W = rg.Variable([1.0, 2.0])
VALUES = {
    "dy": (lambda: rg.grad(lambda a, b: a * b, argnums=0)(A, B, dy=[10.0, 100.0]), [20.0, 300.0]),
    "a custom rule": (lambda: rg.grad(times, argnums=(1, 0))(A, B), ([100.0] * 2, [10.0] * 2)),
    "a tree and a Variable": (
        lambda: rg.grad(lambda x, p: (x * p["w"] * p["b"][0] * W).sum(), argnums=1)(
            A, {"w": A, "b": [rg.tensor(B)]}),
        {"w": [1.0, 9.0], "b": [[0.25, 4.5]]}),
    "by a Variable": (lambda: rg.grad(lambda x, v: (x * v).sum(), argnums=1)(A, W), [0.5, 1.5]),
    "another argument is a constant": (
        lambda: rg.grad(lambda x: rg.grad(lambda a, b: a * b, argnums=0)(2.0, x))(3.0), 1.0),
}  # fmt: skip
test_values = results(VALUES)


# -- the dy of TensorFlow.js, or a second argument of f --------------------------------------------

OF_ONE = [lambda x: x * x / 2, lambda x, *, k=1: x * x / 2, saving, rg.grad(lambda x: x**3 / 6)]


@pytest.mark.parametrize("one", OF_ONE)
def test_dy_by_position_where_f_takes_one_argument(one):
    assert rg.grad(one)(rg.scalar(3.0), 2.0).item() == pytest.approx(6.0)
    assert rg.value_and_grad(one)(rg.scalar(3.0), 2.0).grad.item() == pytest.approx(6.0)


@pytest.mark.parametrize("several", [lambda x, p=1.0: x**p, lambda *xs: xs[0], times])
@pytest.mark.parametrize("api", [rg.grad, rg.value_and_grad])
def test_dy_by_position_is_refused_where_f_may_take_it(api, several):
    for options in ({}, {"has_aux": True}):
        call = lambda options=options: api(several, **options)(3.0, 2.0)  # noqa: E731
        refused(call, ArgumentError, r"ambiguous.*dy=dy.*argnums=0.*grads")


BAD = {
    2: "argnums=2, but f is called with 2 positional arguments", -3: "argnums=-3, but",
    (0, -2): "names one of 2 arguments twice", (): "nothing to differentiate by",
    "a": "an int or a sequence of ints, got 'a'", True: "got True", 1.5: "got 1.5",
}  # fmt: skip


@pytest.mark.parametrize("argnums", BAD, ids=repr)
@apis
def test_bad_argnums(ours, theirs, argnums):
    refused(lambda: ours(f, argnums=argnums)(A, B), ArgumentError, BAD[argnums])


def of(y):
    return rg.grad(lambda x: y, has_aux=True)


ERRORS = {
    "no path": (lambda: rg.grad(lambda a, b: a * 1, argnums=1)(W, 2.0), GradientError,
                r"by args\[1\]: no path"),
    "aux": (lambda: rg.grad(f, has_aux="yes"), ArgumentError, "is True or False, got str"),
    "no pair": (lambda: of(W)(1.0), ArgumentError, r"a pair \(y, aux\), got (Tensor|Variable)"),
    "three": (lambda: of((1, 2, 3))(1.0), ArgumentError, r"a pair \(y, aux\), got 3 values"),
    **{f"{wrap.__name__}, by keyword": (
        lambda wrap=wrap: wrap(lambda model: model * 2)(model=rg.scalar(1.0)), ArgumentError,
        rf"{wrap.__name__}\(f\): got an unexpected keyword argument 'model'. Pass it by")
       for wrap in (rg.grad, rg.value_and_grad)},
}  # fmt: skip
test_errors = refusals(ERRORS)


# -- registered classes ----------------------------------------------------------------------------


Registered, OfOptree = (dataclasses.make_dataclass(n, ["w", "b"]) for n in ("Ours", "OfOptree"))
jax.tree_util.register_dataclass(Registered)
optree.register_pytree_node(OfOptree, lambda m: ((m.w, m.b), None, ("w", "b")),
                            lambda _, c: OfOptree(*c), namespace="regrad")  # fmt: skip


class OfEquinox(equinox.Module):
    w: object
    b: object


@pytest.mark.parametrize("make", [Registered, OfOptree, OfEquinox])
def test_registered_classes_in_every_transform(make):
    m = make(rg.tensor(A), rg.tensor(B))
    found = rg.grad(lambda scale, m: (m.w * m.b * scale).sum(), argnums=1)(2.0, m)
    assert type(found) is make and found.w.tolist() == (2 * B).tolist()
    batch = make(rg.tensor(np.stack([A, B])), rg.tensor(np.stack([B, A])))
    mapped = rg.vmap(lambda m: make(m.w.sum(), m.b * 2))(batch)
    assert type(mapped) is make and mapped.w.tolist() == [A.sum(), B.sum()]
    last, sums = rg.scan(lambda m, x: (make(m.w + x, m.b), m.w.sum()), m, rg.ones((3, 2)))
    assert type(last) is make and last.w.tolist() == (A + 3).tolist()
    assert sums.tolist() == [A.sum() + 2 * i for i in range(3)]
    assert rg.jit(rg.grad(lambda m: (m.w * m.b).sum()))(m).b.tolist() == A.tolist()


class Double:
    """A function that does not show its parameters."""

    __signature__ = 3  # (which `inspect` refuses)

    def __call__(self, x):
        return 2 * x


def test_a_second_argument_of_a_function_without_a_signature_weighs_its_gradient():
    assert rg.grad(Double())(rg.scalar(1.0), rg.scalar(5.0)).item() == 10
