"""What a compiled function reaches without being given it: what a change of it costs, and methods.

`test_jit_staleness.py` has a table of changes that are seen.
"""

import copy
import functools
import gc
import pickle
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError
from regrad.transforms import closures

ONE = rg.scalar(1.0)


def test_programs_are_found_again():
    f = rg.jit(lambda x: x * k)
    found = []
    for k in (2.0, 5.0, 2.0, rg.scalar(3.0), rg.scalar(4.0)):  # noqa: B007 (f reads it)
        found.append(f(ONE).item())
    assert found == [2.0, 5.0, 2.0, 3.0, 4.0] and f.cache_info().programs == 3


def test_attributes_that_no_code_asks_for_cost_no_trace():
    holder = SimpleNamespace(rate=2.0)
    f = rg.jit(lambda x: x * holder.rate)
    for holder.steps in range(3):
        assert f(ONE).item() == 2.0
    assert f.cache_info().traces == 1


def test_numbers_drawn_while_tracing_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ArgumentError, match="drew numbers from the NumPy Generator 'rng'"):
        rg.jit(lambda x: x * rng.normal())(ONE)


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

    mode = rg.jit if compiled else (lambda f: f)
    due = 6 * np.cos(3 * np.sin(1.0)) * np.cos(1.0)
    assert mode(rg.grad(bound))(rg.scalar(0.5)).item() == pytest.approx(due, rel=1e-5)
    if compiled:
        assert mode(rg.grad(late))(rg.scalar(0.5)).item() == pytest.approx(due, rel=1e-5)
    else:
        with pytest.raises(GradientError, match="did something else than the first time"):
            rg.grad(late)(rg.scalar(0.5))


def test_names_bound_anew_do_not_matter_at_the_second_order():
    ws = [2.0, 3.0]

    def f(x):
        for i in range(2):
            helper = lambda x: rg.sin(x) * ws[i]  # noqa: B023, E731 (what is tested)
            x = rg.jit(lambda x: helper(x))(x)  # noqa: B023
        return x

    due = rg.grad(rg.grad(lambda x: rg.sin(rg.sin(x) * 2.0) * 3.0))(0.3).item()
    assert rg.grad(rg.grad(f))(0.3).item() == pytest.approx(due, rel=1e-5)


@pytest.mark.parametrize("size", [1, 64, 65, 1000])
def test_an_array_counts_by_its_content_where_it_is_read(size):
    table = np.zeros(size, "float32")
    read, operand = rg.jit(lambda x: x * float(table[-1])), rg.jit(lambda x: x * table)
    either = rg.jit(lambda x: x * table if x.ndim else x * float(table[-1]))
    for value in (1.0, 2.0, 1.0):
        table[-1] = value
        assert read(rg.scalar(3.0)).item() == either(rg.scalar(3.0)).item() == 3.0 * value
        assert operand(rg.scalar(3.0)).numpy()[-1] == 3.0 * value
        assert either(rg.tensor([3.0])).numpy()[-1] == 3.0 * value
    assert (read.cache_info().traces, operand.cache_info().traces) == (2, 1)


@pytest.mark.slow(but=6)
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


def test_a_compiled_method_leaves_nothing_in_its_object():
    one = Model()
    assert one.scaled(ONE).item() == 2.0 and vars(one) == {"rate": 2.0}
    for twin in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        twin.rate = 3.0
        assert twin.scaled(ONE).item() == 3.0 and one.scaled(ONE).item() == 2.0
        assert rg.grad(twin.scaled)(ONE).item() == 3.0
    assert Model.scaled.__name__ == "scaled" and one.scaled.cache_info().traces == 1


def test_static_arguments_of_methods_are_counted_with_self():
    assert Model().reduced(rg.ones((2, 2)), 2).tolist() == [8.0, 8.0]
    assert Model().reduced(rg.ones((2, 2)), 1, axis=None).item() == 8.0


def test_an_object_goes_with_its_last_reference():
    one = Model()
    bound, reference = one.scaled, weakref.ref(one)
    bound(ONE)
    del one
    assert bound(ONE).item() == 2.0
    del bound
    gc.collect()
    assert reference() is None


# -- the walk itself -------------------------------------------------------------------------------


def module_of(classes):
    """A module of classes whose methods name each other, and of functions that call them."""
    part = (
        "class C{i}:\n"
        " rate{i} = 2.0\n"
        " def method{i}(self, x): return getattr(C{j}, 'rate{i}', 1.0) * x\n"
        "c{i} = C{i}()\n"
        "def f{i}(x): return (c{i}.method{i}(x) + c{k}.rate{k}) * f{j}(x)\n"
    )
    space = {}
    for i in range(classes):
        exec(part.format(i=i, j=(i + 1) % classes, k=i * 7 % classes), space)
    return space


def test_the_walk_looks_at_each_object_a_few_times(monkeypatch):
    """Names are collected first: each object is looked at once in a round, not once per name."""
    calls, attributes = [], closures._Walk.attributes
    monkeypatch.setattr(
        closures._Walk, "attributes", lambda *args: calls.append(args[1]) or attributes(*args)
    )
    space = module_of(50)
    first, again = closures.Closure(space["f0"]), closures.Closure(space["f0"])
    assert {f"c{i}.rate{i}" for i in range(50)} <= {*first.names}
    assert 100 <= len(calls) <= 2 * 357, "50 classes, their instances, and their common base"
    assert (again.key, again.names) == (first.key, first.names)


@pytest.mark.parametrize("wrapper", [rg.grad, rg.value_and_grad, rg.hessian, rg.jit, rg.vmap])
def test_a_wrapper_adds_few_places(wrapper):
    """Before each call jit compares the values that the user's function reads, and few others."""
    holder = SimpleNamespace(rate=2.0)
    f = lambda x: rg.sum(x * holder.rate)  # noqa: E731
    assert len(closures.Closure(wrapper(f)).places) <= len(closures.Closure(f).places) + 6
