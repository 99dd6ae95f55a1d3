"""Whether compiled functions see that Python state has changed: a grid of ways to change it."""

import copy
import functools
import gc
import importlib
import itertools
import pathlib
import pickle
import sys
import weakref
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RegradError, StaleError
from regrad.transforms import closures, verification
from tests.helpers.paths import DOCS
from tests.helpers.rows import refused
from tests.helpers.ways import UNSEEN, WAYS
from tests.transforms.regions import REGIONS

COUNT = itertools.count()
IMPORTS = """
import collections, contextvars, dataclasses, enum, functools, io, itertools, jax, math, operator
import os, pathlib, queue, random, tempfile, threading, types, weakref
import jax.numpy as jnp, numpy as np, regrad as rg
"""


def results(way, jit):
    """What the function gives before the change and after it."""
    space = {"__name__": "way", "count": COUNT, "jit": jit, "x": rg.tensor([0.5, -2.0])}
    exec(IMPORTS, space)
    exec(way.setup, space)
    exec(f"f = lambda x: {way.f}" if way.f else "", space)
    exec(f"J = jit(f, {way.options})", space)
    before = [listed(eval(way.call, space)) for _ in range(2)][1]
    exec(way.change, space)
    return before, listed(eval(way.call, space))


def listed(y):
    return [str(y.dtype), y.tolist()]


def uncompiled(f, **options):
    return f


def outcome(way, **options):
    """What a compiled function does about a change: "right", "stale", or the name of an error."""
    due = results(way, uncompiled)
    assert due[0] != due[1]
    try:
        before, after = results(way, functools.partial(rg.jit, **options))
    except RegradError as error:
        return type(error).__name__
    assert before == due[0]
    return "right" if after == due[1] else "stale"


@pytest.mark.slow(but=6)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.name)
def test_a_change_is_seen(way):
    """Or refused, or it belongs to a kind that the docs name; `verify` finds it."""
    expected = "stale" if way.expected in UNSEEN else way.expected
    assert outcome(way) == expected
    assert outcome(way, verify=True) == ("StaleError" if expected == "stale" else expected)


def test_the_docs_name_each_kind_of_change_that_is_not_seen():
    text = (DOCS / "compiled.md").read_text()
    table = text.split("| what changes |")[1].split("\n\n")[0]
    rows = [row.split("|")[1].strip() for row in table.splitlines()[2:]]
    assert [any(row.startswith(kind) for kind in UNSEEN) for row in rows] == [True] * len(UNSEEN)


# -- verify=True finds a program that is stale ----------------------------------------------------

X = rg.tensor([0.5, -1.0])


class Hidden:
    """State that `jit` does not see."""

    def __init__(self, value):
        self.values = [value] * 1000

    def __call__(self):
        return self.values[0]


def twice(f, hidden, **options):
    """Call a verified function, change what it does not see, and call it again."""
    g = rg.jit(f, verify=True, **options)
    g(X)
    hidden.values[0] = 3.0
    return g(X)


def test_the_line_and_what_differs():
    hidden = Hidden(2.0)

    def f(x):
        y = rg.sin(x)
        return y * hidden()  # the line

    with pytest.raises(StaleError, match=r"test_jit_staleness.py:\d+ \(.*f\)") as error:
        twice(f, hidden)
    message = str(error.value)
    source = pathlib.Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if text.endswith("# the line"))
    assert f"test_jit_staleness.py:{line} " in message
    assert "program has mul(float32[2], 2.)" in message and "now has mul(float32[2], 3.)" in message
    assert message.startswith("jit(f) is stale") and "Variable" in message


T = {2.0: rg.scalar(2.0), 3.0: rg.scalar(3.0)}
DIFFERENT = {
    **{n: lambda x, h, r=r: r(lambda v: v * h)(x) for n, r in REGIONS.items()},
    "a constant": lambda x, h: x * rg.tensor([h, 1.0]),
    "an op": lambda x, h: x if h == 2 else x + x, "a result": lambda x, h: (x, h),
    "a container": lambda x, h: (x, x) if h == 2 else [x, x],
    "a shape": lambda x, h: rg.reshape(x, (2, 1) if h == 2 else (1, 2)),
    "a gradient": lambda x, h: rg.grad(lambda x: (x**h).sum())(x),
    "a Tensor": lambda x, h: x * T[h],
}  # fmt: skip


@pytest.mark.parametrize("f", DIFFERENT.values(), ids=DIFFERENT)
def test_kinds_of_differences(f):
    hidden = Hidden(2.0)
    refused(lambda: twice(lambda x: f(x, hidden()), hidden), StaleError, "is stale: ")


def test_another_variable_is_assigned():
    hidden, a, b = Hidden(2.0), rg.Variable(0.0, name="a"), rg.Variable(0.0, name="b")
    with pytest.raises(StaleError):
        twice(lambda x: (a if hidden() == 2 else b).assign(x.sum()), hidden)
    assert b.item() == 0.0


def test_the_backward_program():
    hidden = Hidden(2.0)
    with_rule = rg.custom_grad(lambda x: {"value": x * 1.0, "grad_func": lambda dy: dy * hidden()})
    f = rg.jit(with_rule, verify=True)
    g = rg.grad(lambda x: f(x).sum())
    assert [g(X).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    hidden.values[0] = 3.0
    refused(lambda: g(X), StaleError, r"mul\(float32\[2\], 2.\)")


def test_there_is_no_false_alarm():
    v, runs = rg.Variable(1.0), Hidden(0)

    def f(x, key):
        runs.values[0] += 1
        inner = lambda y: rg.sin(y) * v  # noqa: E731 (a fresh function)
        v.assign_add(1.0)
        noise = rg.random.normal(key, (2,))
        loss = rg.cond(x.sum() > 0, lambda: inner(x), lambda: x)
        return {"y": loss + noise + rg.tensor([1.0, np.nan]), "n": 3}

    g = rg.jit(f, verify=True)
    for i in range(3):
        g(X, rg.random.key(i))
        g(rg.ones(2), rg.random.key(i))
    assert v.item() == 7.0 and g.cache_info() == (5, 1, 1, 0)
    assert runs() == 6  # one trace, and one for each call after it


def test_hits_are_those_of_the_program():
    f = rg.jit(lambda x: rg.grad(lambda x: rg.sign(x).sum())(x), verify=True)
    with rg.gradient_override_map({"Sign": rg.rules.straight_through}) as used:
        assert [f(X).tolist() for _ in range(3)] == [[1.0, 1.0]] * 3
    used.assert_fired()
    assert [hit.count for hit in used.hits] == [3]


def test_the_switch_in_the_environment(monkeypatch):
    hidden = Hidden(2.0)
    monkeypatch.setenv("REGRAD_JIT_VERIFY", "1")
    f, g = rg.jit(lambda x: x * hidden()), rg.jit(lambda x: x * hidden(), verify=False)
    f(X), g(X)
    hidden.values[0] = 3.0
    refused(lambda: f(X), StaleError)
    assert g(X).tolist() == [1.0, -2.0]


def test_garbage_may_be_collected_meanwhile(monkeypatch):
    def collect(name, known, again):
        gc.collect()
        compare(name, known, again)

    compare = verification.compare
    monkeypatch.setattr(verification, "compare", collect)
    f = rg.jit(rg.grad(lambda x: rg.sin(x) * x), verify=True)
    assert [f(rg.scalar(2.0)).item() for _ in range(3)] == [f(rg.scalar(2.0)).item()] * 3


# -- what a change costs, and names that are bound anew --------------------------------------------

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
        with pytest.raises(GradientError, match="did not do the same as the first"):
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


@pytest.mark.slow(but=3)
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


def test_a_compiled_method_leaves_nothing_in_its_object():
    one = Model()
    assert one.scaled(ONE).item() == 2.0 and vars(one) == {"rate": 2.0}
    for twin in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        twin.rate = 3.0
        assert twin.scaled(ONE).item() == 3.0 and one.scaled(ONE).item() == 2.0
        assert rg.grad(twin.scaled)(ONE).item() == 3.0
    assert Model.scaled.__name__ == "scaled" and one.scaled.cache_info().traces == 1


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


@pytest.mark.parametrize(("folder", "walked"), [("site-packages", False), ("src", True)])
def test_the_walk_ends_at_installed_packages(tmp_path, monkeypatch, folder, walked):
    """The Python under a virtual environment, and the user, have folders of packages as well."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "apart.py").write_text("RATE = 2.0\ndef scaled(x):\n    return x * RATE\n")
    monkeypatch.syspath_prepend(str(tmp_path / folder))
    monkeypatch.delitem(sys.modules, "apart", raising=False)
    apart = importlib.import_module("apart")
    assert ("RATE" in closures.Closure(lambda x: apart.scaled(x)).names) is walked
    del sys.modules["apart"]
