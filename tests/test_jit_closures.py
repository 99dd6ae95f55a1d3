"""What compiled functions reach without being given: a change of it is seen."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import regrad as rg
from tests.helpers.quick import nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)


NUMBER = 2.0
TABLE = {"a": 2.0}
WEIGHT = rg.scalar(2.0)


def doubled(x):
    return x * 2


def tripled(x):
    return x * 3


HELPER = doubled


def test_numbers_strings_and_functions_in_closures():
    k, name, g = 2.0, "mul", doubled

    @rg.jit
    def f(x):
        return (getattr(x, name)(k), g(x))

    assert [y.item() for y in f(rg.scalar(3.0))] == [6.0, 6.0]
    k = 5.0
    assert f(rg.scalar(3.0))[0].item() == 15.0
    name, g = "add", tripled
    assert [y.item() for y in f(rg.scalar(3.0))] == [8.0, 9.0]
    k, name, g = 2.0, "mul", doubled
    assert [y.item() for y in f(rg.scalar(3.0))] == [6.0, 6.0]
    assert f.cache_info().programs == 3


def test_globals(monkeypatch):
    f = rg.jit(lambda x: HELPER(x) * NUMBER * TABLE["a"] * WEIGHT)
    here = globals()
    assert f(rg.scalar(1.0)).item() == 16.0
    monkeypatch.setitem(here, "NUMBER", 3.0)
    assert f(rg.scalar(1.0)).item() == 24.0
    monkeypatch.setitem(TABLE, "a", 1.0)
    assert f(rg.scalar(1.0)).item() == 12.0
    monkeypatch.setitem(here, "HELPER", tripled)
    assert f(rg.scalar(1.0)).item() == 18.0
    monkeypatch.setitem(here, "WEIGHT", rg.scalar(1.0))
    assert f(rg.scalar(1.0)).item() == 9.0


class Model:
    scale = 1.0

    def __init__(self):
        self.rate = 2.0
        self.w = rg.scalar(3.0)
        self.layers = [1.0, 2.0]
        self.act = doubled
        self.inner = None

    def __call__(self, x):
        return self.act(x) * self.w * self.rate + self.layers[1]

    @rg.jit
    def method(self, x):
        return self(x)


def test_attributes_of_objects():
    model = Model()
    f = rg.jit(lambda x: model(x))
    for change, due in [
        (lambda: None, 14.0),
        (lambda: setattr(model, "rate", 1.0), 8.0),
        (lambda: setattr(model, "w", rg.scalar(1.0)), 4.0),
        (lambda: model.layers.__setitem__(1, 10.0), 12.0),
        (lambda: setattr(model, "act", tripled), 13.0),
    ]:
        change()
        assert f(rg.scalar(1.0)).item() == model(rg.scalar(1.0)).item() == due


def test_attributes_of_objects_in_objects():
    outer = Model()
    outer.inner = Model()
    f = rg.jit(lambda x: x * outer.inner.rate)
    assert f(rg.scalar(1.0)).item() == 2.0
    outer.inner.rate = 7.0
    assert f(rg.scalar(1.0)).item() == 7.0
    outer.inner = Model()
    assert f(rg.scalar(1.0)).item() == 2.0


def test_methods():
    a, b = Model(), Model()
    b.rate = 1.0
    assert (a.method(rg.scalar(1.0)).item(), b.method(rg.scalar(1.0)).item()) == (14.0, 8.0)
    a.rate = 0.0
    assert (a.method(rg.scalar(1.0)).item(), b.method(rg.scalar(1.0)).item()) == (2.0, 8.0)
    assert rg.grad(a.method)(rg.scalar(1.0)).item() == 0.0


def test_partials_and_defaults():
    def f(x, k=2.0, *, n=1.0):
        return x * k + n

    g = rg.jit(functools.partial(f, k=3.0))
    assert g(rg.scalar(1.0)).item() == 4.0
    h = rg.jit(f)
    assert h(rg.scalar(1.0)).item() == 3.0
    f.__defaults__ = (5.0,)
    assert h(rg.scalar(1.0)).item() == 6.0
    f.__kwdefaults__["n"] = 2.0
    assert h(rg.scalar(1.0)).item() == 7.0


def test_containers_in_closures():
    table = {"k": [1.0, (2.0, {"deep": 3.0})], "names": {"a"}}
    f = rg.jit(lambda x: x * table["k"][0] * table["k"][1][1]["deep"] + ("b" in table["names"]))
    assert f(rg.scalar(1.0)).item() == 3.0
    table["k"][1][1]["deep"] = 4.0
    assert f(rg.scalar(1.0)).item() == 4.0
    table["names"].add("b")
    assert f(rg.scalar(1.0)).item() == 5.0
    table["k"][0] = 10.0
    assert f(rg.scalar(1.0)).item() == 41.0


def test_tensors_in_closures_are_read_at_each_call():
    w = rg.scalar(2.0)
    f = rg.jit(lambda x: x * w)
    assert f(rg.scalar(1.0)).item() == 2.0
    w = rg.scalar(5.0)
    assert f(rg.scalar(1.0)).item() == 5.0
    assert rg.grad(f)(rg.scalar(1.0)).item() == 5.0
    assert f.cache_info().programs == 1
    w = rg.tensor([1.0, 2.0])
    assert f(rg.scalar(3.0)).tolist() == [3.0, 6.0]


def test_one_tensor_in_two_cells_that_part():
    a = b = rg.scalar(2.0)
    f = rg.jit(lambda x: x * a + b)
    assert f(rg.scalar(10.0)).item() == 22.0
    b = rg.scalar(3.0)
    assert f(rg.scalar(10.0)).item() == 23.0
    a = rg.scalar(1.0)
    assert f(rg.scalar(10.0)).item() == 13.0
    a = b
    assert f(rg.scalar(10.0)).item() == 33.0
    assert a is b


def test_numpy_arrays_in_closures_changed_in_place():
    a, table = np.array([1.0, 2.0]), {"mask": np.array([1.0, 0.0])}
    f = rg.jit(lambda x: x * a * table["mask"])
    assert f(rg.scalar(1.0)).tolist() == [1.0, 0.0]
    a[:] = 7.0
    table["mask"][1] = 2.0
    assert f(rg.scalar(1.0)).tolist() == [7.0, 14.0]
    assert rg.grad(lambda x: f(x).sum())(rg.scalar(1.0)).item() == 21.0


def test_a_tensor_of_another_kind_for_a_number():
    k = 2.0
    f = rg.jit(lambda x: x * k)
    assert f(rg.scalar(1.0)).item() == 2.0
    k = rg.scalar(3.0)
    assert f(rg.scalar(1.0)).item() == 3.0
    k = rg.Variable(4.0)
    assert f(rg.scalar(1.0)).item() == 4.0
    k.assign(5.0)
    assert f(rg.scalar(1.0)).item() == 5.0
