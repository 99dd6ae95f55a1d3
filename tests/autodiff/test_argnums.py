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

A, B = np.array([0.5, 1.5], "f4"), np.array([2.0, 3.0], "f4")
ARGNUMS = [0, 1, -1, (0, 1), (1, 0), [1], (-1, 0)]


def f(a, b, power=2.0):
    return (a**power * b).sum() * b[0]


def close(found, expected):
    """The same numbers, in the same structure."""
    found, expected = map(jax.tree.structure, (found, expected)), (found, expected)
    assert len({*found}) == 1
    for x, y in zip(*map(jax.tree.leaves, expected), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5)


def plain(tree):
    """Tensors as arrays and named tuples as tuples, as JAX gives them."""
    if isinstance(tree, rg.Tensor):
        return tree.numpy()
    if isinstance(tree, tuple | list):
        return tuple(map(plain, tree))
    return {k: plain(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


@pytest.mark.parametrize("argnums", ARGNUMS, ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (rg.grad, jax.grad),
        (rg.value_and_grad, jax.value_and_grad),
        (rg.jacobian, jax.jacrev),
        (rg.hessian, jax.hessian),
    ],
)
@pytest.mark.parametrize("options", [{}, {"power": 3.0}])
def test_argnums_and_keywords(ours, theirs, argnums, options):
    numbers = argnums if isinstance(argnums, int) else tuple(argnums)
    expected = theirs(f, argnums=numbers)(jnp.array(A), jnp.array(B), **options)
    g = ours(f, argnums=argnums)
    close(plain(g(A, B, **options)), expected)
    close(plain(rg.jit(g)(A, B, **options)), expected)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (rg.grad, jax.grad),
        (rg.value_and_grad, jax.value_and_grad),
        (rg.jacobian, jax.jacrev),
        (rg.hessian, jax.hessian),
    ],
)
def test_aux(ours, theirs):
    def with_aux(a, b=B):
        return f(a, b), {"double": a * 2}

    expected = theirs(with_aux, has_aux=True)(jnp.array(A))
    close(plain(ours(with_aux, has_aux=True)(A)), expected)
    expected = theirs(with_aux, argnums=(1,), has_aux=True)(jnp.array(A), jnp.array(B))
    close(plain(ours(with_aux, argnums=(1,), has_aux=True)(rg.tensor(A), B)), expected)


def test_vjp_with_aux():
    y, back, aux = rg.vjp(lambda a, b: (a * b, "aux"), rg.tensor(A), rg.tensor(B), has_aux=True)
    value, pull, _ = jax.vjp(lambda a, b: (a * b, "aux"), jnp.array(A), jnp.array(B), has_aux=True)
    close(plain(y), value)
    close(plain(back(A)), pull(jnp.array(A)))
    assert aux == "aux"


def test_second_order_and_dy():
    both = rg.grad(lambda a, b: rg.grad(f, argnums=1)(a, b).sum(), argnums=0)(A, B)
    theirs = jax.grad(lambda a, b: jax.grad(f, argnums=1)(a, b).sum(), argnums=0)
    close(plain(both), theirs(jnp.array(A), jnp.array(B)))
    dx = rg.grad(lambda a, b: a * b, argnums=0)(A, B, dy=[10.0, 100.0])
    assert dx.tolist() == [20.0, 300.0]


def test_a_custom_rule_counts():
    @rg.custom_grad
    def times(a, b, save):
        save([a, b])
        return a * b, lambda dy, saved: [dy * 10, dy * 100]

    found = rg.grad(times, argnums=(1, 0))(rg.tensor(A), rg.tensor(B))
    assert [d.tolist() for d in found] == [[100.0, 100.0], [10.0, 10.0]]


def test_trees_and_variables():
    params, w = {"w": A, "b": [rg.tensor(B)]}, rg.Variable([1.0, 2.0])

    def loss(x, p):
        return (x * p["w"] * p["b"][0] * w.value).sum()

    found = rg.grad(loss, argnums=1)(rg.tensor(A), params)
    close(plain(found)["w"], A * B * np.array([1, 2]))
    close(plain(found)["b"][0], A * A * np.array([1, 2]))
    by_variable = rg.grad(lambda x, v: (x * v).sum(), argnums=1)(A, w)
    assert by_variable.tolist() == A.tolist()


def test_what_is_left_out_is_a_constant():
    assert rg.grad(lambda x: rg.grad(lambda a, b: a * b, argnums=0)(2.0, x))(3.0).item() == 1.0
    with pytest.raises(GradientError, match=r"by args\[1\]: no path"):
        rg.grad(lambda a, b: a * 1, argnums=1)(rg.scalar(1.0), rg.scalar(2.0))


# -- the dy of TensorFlow.js, or a second argument of f --------------------------------------------


def test_dy_by_position_where_f_takes_one_argument():
    @rg.custom_grad
    def saving(a, save):
        save([a])
        return a * a, lambda dy, saved: dy * saved[0]

    for one in (
        lambda x: x * x / 2,
        lambda x, *, k=1: x * x / 2,
        saving,
        rg.grad(lambda x: x**3 / 6),
    ):
        assert rg.grad(one)(rg.scalar(3.0), 2.0).item() == pytest.approx(6.0)
        assert rg.value_and_grad(one)(rg.scalar(3.0), 2.0).grad.item() == pytest.approx(6.0)


def test_dy_by_position_is_refused_where_f_may_take_it():
    @rg.custom_grad
    def two(a, b, save):
        return a * b, lambda dy: [dy, dy]

    for several in (lambda x, p=1.0: x**p, lambda *xs: xs[0], two):
        for api in (rg.grad, rg.value_and_grad):
            for option in ({}, {"has_aux": True}):
                with pytest.raises(ArgumentError, match=r"ambiguous.*dy=dy.*argnums=0.*grads"):
                    api(several, **option)(3.0, 2.0)


@pytest.mark.parametrize(
    ("argnums", "message"),
    [
        (2, "argnums=2, but f is called with 2 positional arguments"),
        (-3, "argnums=-3, but"),
        ((0, -2), "names one of 2 arguments twice"),
        ((), "nothing to differentiate by"),
        ("a", "an int or a sequence of ints, got 'a'"),
        (True, "got True"),
        (1.0, "got 1.0"),
    ],
)
def test_bad_argnums(argnums, message):
    for api in (rg.grad, rg.value_and_grad, rg.jacobian, rg.hessian):
        with pytest.raises(ArgumentError, match=message.replace("(", r"\(")):
            api(f, argnums=argnums)(A, B)


def test_bad_aux():
    with pytest.raises(ArgumentError, match="has_aux is True or False, got str"):
        rg.grad(f, has_aux="yes")
    for y, got in ((rg.scalar(1.0), "Tensor"), ((1, 2, 3), "3 values")):
        with pytest.raises(ArgumentError, match=rf"must return a pair \(y, aux\), got {got}"):
            rg.grad(lambda x, y=y: y, has_aux=True)(1.0)


# -- registered classes ----------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: object
    b: object


class OfOptree:
    def __init__(self, w, b):
        self.w, self.b = w, b


optree.register_pytree_node(
    OfOptree,
    lambda m: ((m.w, m.b), None, ("w", "b")),
    lambda _, c: OfOptree(*c),
    namespace="regrad",
)


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


@pytest.mark.parametrize("wrap", [rg.grad, rg.value_and_grad])
def test_what_to_differentiate_by_is_passed_by_position(wrap):
    words = f"{wrap.__name__}\\(f\\): got an unexpected keyword argument 'model'. Pass it by"
    with pytest.raises(ArgumentError, match=words):
        wrap(lambda model: model * 2)(model=rg.scalar(1.0))
