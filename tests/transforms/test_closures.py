"""What a compiled function reaches without being given it is seen to change."""

import argparse
import copy
import functools
import gc
import pickle
import weakref
from collections import OrderedDict, defaultdict
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RetraceWarning
from regrad.transforms import closures


class Plain:
    def __init__(self):
        self.rate = 2.0


class Default:
    rate = 2.0


class Slots:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 2.0


class Behind:
    def __init__(self):
        self._hidden = SimpleNamespace(value=2.0)

    @property
    def rate(self):
        return self._hidden.value

    @rate.setter
    def rate(self, value):
        self._hidden.value = value


class Items:
    def __init__(self):
        self.values = [2.0]

    def __getitem__(self, i):
        return self.values[i]

    def __setitem__(self, i, value):
        self.values[i] = value


class Pair(NamedTuple):
    holder: Plain


class Rows(list):
    pass


@pytest.mark.parametrize(
    "holder",
    [
        Plain(),
        Default(),
        Slots(),
        Behind(),
        SimpleNamespace(rate=2.0),
        argparse.Namespace(rate=2.0),
    ],
    ids=lambda h: type(h).__name__,
)
@pytest.mark.parametrize("new", [3.0, rg.tensor(3.0)], ids=["a number", "a Tensor"])
def test_attributes(holder, new):
    holder.rate = 2.0
    f = rg.jit(lambda x: x * holder.rate)
    assert [f(rg.scalar(1.0)).item() for _ in range(2)] == [2.0, 2.0]
    holder.rate = new
    assert f(rg.scalar(1.0)).item() == 3.0


def test_an_attribute_of_the_class():
    class Local(Default):
        pass

    holder = Local()
    f = rg.jit(lambda x: x * holder.rate)
    assert f(rg.scalar(1.0)).item() == 2.0
    Local.rate = 4.0
    assert f(rg.scalar(1.0)).item() == 4.0
    holder.rate = 5.0
    assert f(rg.scalar(1.0)).item() == 5.0


@pytest.mark.parametrize(
    ("holder", "key"),
    [({"a": 2.0}, "a"), ([2.0], 0), (OrderedDict(a=2.0), "a"), (defaultdict(int, a=2.0), "a"),
     (Rows([2.0]), 0), (Items(), 0)],
    ids=lambda h: type(h).__name__,
)  # fmt: skip
def test_items(holder, key):
    f = rg.jit(lambda x: x * holder[key])
    assert f(rg.scalar(1.0)).item() == 2.0
    holder[key] = 3.0
    assert f(rg.scalar(1.0)).item() == 3.0


def test_through_partials_methods_and_tuples():
    holder = Plain()
    pair = Pair(holder)

    def scaled(by, x):
        return x * by.holder.rate

    f = rg.jit(functools.partial(scaled, pair))
    assert f(rg.scalar(1.0)).item() == 2.0
    holder.rate = 3.0
    assert f(rg.scalar(1.0)).item() == 3.0


def test_attributes_that_no_code_asks_for_cost_no_trace():
    holder = Plain()
    f = rg.jit(lambda x: x * holder.rate)
    for holder.steps in range(3):
        assert f(rg.scalar(1.0)).item() == 2.0
    assert f.cache_info().traces == 1


def test_numbers_drawn_while_tracing_are_refused():
    rng = np.random.default_rng(0)
    f = rg.jit(lambda x: x * rng.normal())
    with pytest.raises(ArgumentError, match="drew numbers from the NumPy Generator 'rng'"):
        f(rg.scalar(1.0))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_that_binds_a_name_anew(compiled):
    """A body that ran again would find the last of the weights: it is replayed, or refused."""
    weights = [rg.scalar(2.0), rg.scalar(3.0)]

    def late(x):
        for w in weights:
            x = rg.checkpoint(lambda x: rg.sin(x * w))(x)  # noqa: B023 (what is tested)
        return x

    def bound(x):
        for w in weights:
            x = rg.checkpoint(lambda x, w=w: rg.sin(x * w))(x)
        return x

    def plain(x):
        for w in weights:
            x = rg.sin(x * w)
        return x

    mode = rg.jit if compiled else (lambda f: f)
    due = rg.grad(plain)(rg.scalar(0.5)).item()
    if compiled:
        assert mode(rg.grad(late))(rg.scalar(0.5)).item() == pytest.approx(due, rel=1e-5)
    else:
        with pytest.raises(GradientError, match="did something else than the first time"):
            rg.grad(late)(rg.scalar(0.5))
    assert mode(rg.grad(bound))(rg.scalar(0.5)).item() == pytest.approx(due, rel=1e-5)


def test_numpy_scalars():
    k = np.float32(2)
    f = rg.jit(lambda x: x * k)
    assert f(rg.scalar(1.0)).item() == 2.0
    k = np.float32(3)
    assert f(rg.scalar(1.0)).item() == 3.0


def test_names_bound_anew_do_not_matter_at_the_second_order():
    ws = [2.0, 3.0]

    def f(x):
        for i in range(2):
            helper = lambda x: rg.sin(x) * ws[i]  # noqa: B023, E731 (what is tested)
            x = rg.jit(lambda x: helper(x))(x)  # noqa: B023
        return x

    due = rg.grad(rg.grad(lambda x: rg.sin(rg.sin(x) * 2.0) * 3.0))(0.3).item()
    assert rg.grad(rg.grad(f))(0.3).item() == pytest.approx(due, rel=1e-5)


# -- arrays ----------------------------------------------------------------------------------------


def test_an_array_that_is_an_operand_costs_no_trace_when_it_changes():
    rate = np.ones(2, "float32")
    f = rg.jit(lambda x: x * rate)
    for i in range(3):
        rate[0] = i
        assert f(rg.tensor([1.0, 1.0])).tolist() == [i, 1.0]
    assert f.cache_info().traces == 1


@pytest.mark.parametrize("size", [1, 64, 65, 1000])
def test_an_array_that_is_read_counts_by_its_content(size):
    table = np.zeros(size)
    f = rg.jit(lambda x: x * float(table[-1]))
    for value in (1.0, 2.0, 1.0):
        table[-1] = value
        assert f(rg.scalar(3.0)).item() == 3.0 * value
    assert f.cache_info().traces == 2


def test_the_warning_names_arrays_that_are_read():
    table = np.zeros(1)
    f = rg.jit(lambda x: x * float(table[0]))
    with pytest.warns(RetraceWarning, match="content of a NumPy array that the function reads"):
        for table[0] in range(8):
            f(rg.scalar(3.0))


def test_the_program_for_other_shapes_may_read_other_arrays():
    table = np.zeros(1, "float32")
    f = rg.jit(lambda x: x * table if x.ndim else x * float(table[0]))
    for value in (1.0, 2.0, 1.0):
        table[0] = value
        assert f(rg.tensor([3.0])).tolist() == [3.0 * value]
        assert f(rg.scalar(3.0)).item() == 3.0 * value


@pytest.mark.parametrize("made", [rg.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
@pytest.mark.parametrize("form", ["closure", "vmap", "split", "container", "gradient"])
def test_a_random_key_that_is_closed_over(made, form):
    key = made(0)
    held = {"key": key}
    f = {
        "closure": lambda x: x * rg.random.normal(key, (2,)),
        "vmap": lambda x: rg.vmap(lambda e: e * rg.random.normal(key, ()))(x),
        "split": lambda x: x * rg.random.normal(rg.random.split(key)[1], (2,)),
        "container": lambda x: x * rg.random.normal(held["key"], (2,)),
        "gradient": rg.grad(lambda x: rg.sum(x * rg.random.normal(key, (2,))), argnums=0),
    }[form]
    compiled, x = rg.jit(f), rg.tensor([1.0, 2.0])
    first = [compiled(x).numpy() for _ in range(2)][1]
    np.testing.assert_allclose(first, f(x).numpy(), 1e-5)
    assert compiled.cache_info().traces == 1
    key = held["key"] = made(1)
    np.testing.assert_allclose(compiled(x).numpy(), f(x).numpy(), 1e-5)
    assert not np.allclose(compiled(x).numpy(), first)


# -- methods ---------------------------------------------------------------------------------------


class Model:
    def __init__(self, rate=2.0):
        self.rate = rate

    @rg.jit
    def scaled(self, x):
        return x * self.rate

    @functools.partial(rg.jit, static_argnums=2, static_argnames="axis")
    def reduced(self, x, times, axis=0):
        return sum([x.sum(axis=axis)] * times) * self.rate


class Child(Model):
    @rg.jit
    def scaled(self, x):
        return super().scaled(x) * 10


def test_a_compiled_method_leaves_nothing_in_its_object():
    one = Model()
    x = rg.scalar(1.0)
    assert one.scaled(x).item() == 2.0 and vars(one) == {"rate": 2.0}
    for twin in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        twin.rate = 3.0
        assert twin.scaled(x).item() == 3.0 and one.scaled(x).item() == 2.0
    assert Model.scaled.__name__ == "scaled" and one.scaled.cache_info().traces == 1


def test_a_method_of_the_base_class_stays_its_own():
    child = Child()
    for _ in range(3):
        assert child.scaled(rg.scalar(1.0)).item() == 20.0


def test_static_arguments_of_methods_are_counted_with_self():
    one = Model()
    assert one.reduced(rg.ones((2, 2)), 2).tolist() == [8.0, 8.0]
    assert one.reduced(rg.ones((2, 2)), 1, axis=None).item() == 8.0


def test_an_object_goes_with_its_last_reference():
    one = Model()
    bound = one.scaled
    reference = weakref.ref(one)
    bound(rg.scalar(1.0))
    del one
    assert bound(rg.scalar(1.0)).item() == 2.0
    del bound
    gc.collect()
    assert reference() is None


# -- the walk itself -------------------------------------------------------------------------------


def module_of(lines):
    """A module of so many lines: classes whose methods name each other, and functions that call."""
    parts = [
        f"class C{i}:\n"
        f"    rate{i} = 2.0\n"
        f"    def method{i}(self, x):\n"
        f"        return getattr(C{(i + 1) % (lines // 10)}, 'rate{i}', 1.0) * x\n"
        f"c{i} = C{i}()\n"
        f"def f{i}(x):\n"
        f"    y = c{i}.method{i}(x) + c{i * 7 % (lines // 10)}.rate{i * 7 % (lines // 10)}\n"
        f"    return y * f{i + 1}(x)\n\n\n"
        for i in range(lines // 10)
    ]
    space = {}
    exec("".join(parts) + f"def f{lines // 10}(x): return x", space)
    return space


def test_the_walk_looks_at_each_object_a_few_times(monkeypatch):
    """Names are collected first: each object is looked at once in a round, not once per name."""
    calls = []
    attributes = closures._Walk.attributes
    monkeypatch.setattr(
        closures._Walk, "attributes", lambda *args: calls.append(args[1]) or attributes(*args)
    )
    space = module_of(500)
    first = closures.Closure(space["f0"])
    assert {f"c{i}.rate{i}" for i in range(50)} <= {*first.names}
    objects = 100 + 1  # the classes, their instances, and their common base
    assert 50 <= len(calls) <= 4 * objects
    assert len(calls) * 28 <= 10_000
    again = closures.Closure(space["f0"])
    assert again.key == first.key and again.names == first.names


@pytest.mark.parametrize("wrapper", [rg.grad, rg.value_and_grad, rg.hessian, rg.jit, rg.vmap])
def test_a_wrapper_adds_few_places(wrapper):
    """Before each call jit compares the values that the user's function reads, and few others."""
    holder = Plain()
    f = lambda x: rg.sum(x * holder.rate)  # noqa: E731
    assert len(closures.Closure(wrapper(f)).places) <= len(closures.Closure(f).places) + 6
