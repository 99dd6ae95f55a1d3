"""What a compiled function takes: inputs, static values, registered containers, nothing else."""

import dataclasses
import functools

import jax
import numpy as np
import optree
import pytest

import regrad as rg
from regrad.errors import ArgumentError, TraceError

X = rg.tensor([1.0, 2.0])


class Plain:
    def __init__(self, w):
        self.w = w


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: object
    power: int = dataclasses.field(default=1, metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b

    def tree_flatten(self):
        return (self.a, self.b), "pair"

    @classmethod
    def tree_unflatten(cls, aux, children):
        assert aux == "pair"
        return cls(*children)


@optree.register_pytree_node_class(namespace="regrad")
class Box:
    def __init__(self, w):
        self.w = w

    def tree_flatten(self):
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@pytest.mark.parametrize(
    "value", [Plain(X), object(), {1, 2}, slice(2), np.random.default_rng(0), range(3)],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_other_objects_are_refused(value):
    with pytest.raises(ArgumentError) as error:
        rg.jit(lambda x, deep: x)(X, {"model": [value]})
    message = str(error.value)
    assert f"the argument deep['model'][0] is {type(value).__name__}: expected Tensors" in message
    for way_out in ("Pass its tensors", "register_dataclass", "closure", "static_argnames"):
        assert way_out in message


@pytest.mark.parametrize("make", [Layer, Box, lambda w: Pair(w, 2.0)])
def test_registered_classes_are_containers(make):
    f = rg.jit(lambda model, x: (jax.tree_util.tree_leaves, type(model)(*parts(model, x)))[1])

    def parts(model, x):
        return [x * model.a, model.b] if isinstance(model, Pair) else [x * model.w]

    for w in (2.0, 3.0):
        y = f(make(rg.scalar(w)), X)
        assert parts(y, 1.0)[0].tolist() == [w, 2 * w]
    assert f.cache_info().traces == 1


def test_they_are_containers_for_gradients_too():
    dx = rg.grad(lambda model: (model.w * X).sum())(Layer(rg.tensor([1.0, 1.0]), 3))
    assert type(dx) is Layer and dx.w.tolist() == [1.0, 2.0] and dx.power == 3


def test_static_fields_are_told_apart_exactly():
    f = rg.jit(lambda layer, x: x * layer.w**layer.power)
    for power in (1, 2, True, 1):
        assert f(Layer(rg.scalar(3.0), power), X).tolist() == [3.0**power, 2 * 3.0**power]
    assert f.cache_info().traces == 3


def test_an_argument_is_called_by_its_path():
    f = rg.jit(lambda layer, x: x * layer.w, donate="layer")
    f(Layer(rg.tensor([1.0, 1.0])), X)
    with pytest.raises(ArgumentError, match=r"the argument layer.w is object"):
        f(Layer(object()), X)


@pytest.mark.parametrize(
    "f",
    [rg.zeros, rg.ones, lambda n: rg.full(n, 1.0), lambda n: rg.zeros((n, 2)), range, rg.arange,
     lambda n: rg.sum(rg.ones((2, 2)), axis=n), rg.eye],
)  # fmt: skip
def test_a_number_that_must_be_static_is_told_so(f):
    with pytest.raises((ArgumentError, TraceError), match="static_argnames"):
        rg.jit(lambda n: f(n))(1)
    assert rg.jit(lambda n: rg.zeros(n), static_argnums=0)(3).shape == (3,)


def test_static_argnums():
    def f(x, n, *rest, k=1):
        return x * len(range(n)) * len(rest) * k

    g = rg.jit(f, static_argnums=(1, 2, 3))
    assert g(X, 2, 1, 1).tolist() == [4.0, 8.0]
    assert rg.jit(f, static_argnums=-3)(X, 2, 1.0, k=3).tolist() == [6.0, 12.0]
    assert functools.partial(rg.jit, static_argnums=1)(lambda x, n: x * len("a" * n))(
        X, n=3
    ).tolist() == [3.0, 6.0]


def test_functions_among_the_arguments():
    rate = 2.0
    f = rg.jit(lambda g, x: g(x))

    def g(x):
        return x * rate

    assert [f(g, X).tolist(), f(rg.sin, X).shape] == [[2.0, 4.0], (2,)]
    rate = rg.scalar(3.0)
    assert f(g, X).tolist() == [3.0, 6.0]
    traces = f.cache_info().traces
    rate = rg.scalar(4.0)
    assert f(g, X).tolist() == [4.0, 8.0] and f.cache_info().traces == traces


@pytest.mark.parametrize(
    "read",
    [float, bool, rg.Tensor.item, rg.Tensor.tolist, rg.Tensor.numpy, np.asarray, lambda t: t.data],
)
def test_the_values_of_a_closed_over_tensor_cannot_be_asked_for(read):
    t = rg.scalar(2.0)
    with pytest.raises(TraceError, match=r"from outside were asked for under jit\(<lambda>\)"):
        rg.jit(lambda x: (read(t), x)[1])(X)
    assert rg.jit(lambda x: x * read(rg.scalar(2.0)))(X).shape == (2,)  # one made inside
    assert read(t) == read(rg.scalar(2.0))


@pytest.mark.parametrize("call", [lambda f, *xs: f(*xs), lambda f, *xs: f.lower(*xs)])
def test_arguments_that_the_function_does_not_take(call):
    f = rg.jit(lambda x, y: x * y)
    with pytest.raises(ArgumentError, match=r"jit\(.*missing a required argument: 'y'.*takes x, y"):
        call(f, rg.tensor(1.0))
    with pytest.raises(ArgumentError, match="too many positional arguments"):
        call(f, *[rg.tensor(1.0)] * 3)

    def wrong(x):
        return x + None.real

    with pytest.raises(AttributeError, match="real"):  # an error of the user's stays what it is
        call(rg.jit(wrong), rg.tensor(1.0))
