"""`rg.jit`: what goes in and out, what is seen between calls, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad import compiled
from regrad.errors import (
    ArgumentError,
    GradientError,
    RetraceWarning,
    ShapeError,
    TraceError,
)
from regrad.state import current
from tests.helpers.quick import nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)


class Counting:
    """f, and how often it ran."""

    def __init__(self, f):
        self.f = f
        self.__wrapped__ = f
        self.counter = itertools.count()

    def __call__(self, *args, **kwargs):
        next(self.counter)
        return self.f(*args, **kwargs)

    @property
    def runs(self):
        return int(repr(self.counter)[len("count(") : -1])


# -- containers ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    a: object
    b: object


@dataclasses.dataclass(frozen=True)
class Settings:
    power: int


def test_containers_go_in_and_out():
    @rg.jit
    def f(batch, *rest, scale):
        x, y = batch["x"], batch["y"]
        return {"sum": x + y[0], "pair": Pair(rest[0] * scale, "label")}, [None, True, 3, "text"]

    found, plain = f({"x": rg.scalar(1.0), "y": (rg.scalar(2.0),)}, rg.scalar(5.0), scale=2.0)
    assert found["sum"].item() == 3.0
    assert type(found["pair"]) is Pair
    assert (found["pair"].a.item(), found["pair"].b) == (10.0, "label")
    assert plain == [None, True, 3, "text"]


def test_arrays_come_in_as_tensors():
    kinds = []
    f = rg.jit(lambda *xs: kinds.extend(map(type, xs)) or [x * 2 for x in xs])
    ys = f(
        np.ones(2), jnp.ones(2), rg.ones((2,)), [1.0, 2.0], rg.Variable([1.0, 1.0]), np.float32(3)
    )
    assert set(kinds) == {rg.Tensor}
    assert [y.tolist() for y in ys] == [[2, 2], [2, 2], [2, 2], [2, 4], [2, 2], 6]
    assert [str(y.dtype) for y in ys] == ["float64"] * 2 + ["float32"] * 4


def test_a_frozen_dataclass_that_is_named_as_static():
    f = Counting(lambda x, s: x**s.power)
    g = rg.jit(f, static_argnums=1)
    assert [g(rg.scalar(3.0), Settings(p)).item() for p in (2, 3, 2)] == [9.0, 27.0, 9.0]
    assert f.runs == 2


@pytest.mark.parametrize(
    ("value", "due"),
    [(2, 6.0), (2.5, 7.5), (True, 3.0), (np.float64(2.0), 6.0), (np.int32(2), 6.0)],
)
def test_numbers_among_the_arguments_are_traced(value, due):
    f = Counting(lambda x, n: x * n)
    g = rg.jit(f)
    assert g(rg.scalar(3.0), value).item() == due
    g(rg.scalar(3.0), type(value)(0))
    assert f.runs == 1


@pytest.mark.parametrize("value", [None, "mean", (1, "a"), np.sum, rg.sin])
def test_other_arguments_are_static(value):
    f = Counting(lambda x, s: (x * 2, s))
    g = rg.jit(f)
    assert [g(rg.scalar(1.0), value)[1] for _ in range(2)] == [value] * 2
    g(rg.scalar(1.0), "another")
    assert f.runs == 2


def test_static_argnames():
    f = Counting(lambda x, n, axis=0: rg.sum(rg.tile(x, (n, 1)), axis=axis))
    g = rg.jit(f, static_argnames=("n", "axis"))
    x = rg.tensor([[1.0, 2.0]])
    assert g(x, 2).tolist() == [2.0, 4.0]
    assert g(x, n=2, axis=1).tolist() == [3.0, 3.0]
    assert g(x, 3, 0).tolist() == [3.0, 6.0]
    assert g(x, 2, axis=0).tolist() == [2.0, 4.0]
    assert g.cache_info().traces == 4  # (an argument given or left out is another call)


def test_names_that_the_function_has_not():
    with pytest.raises(ArgumentError, match=r"names 'm', and the parameters of .* are x, n"):
        rg.jit(lambda x, n: x, static_argnames="m")
    with pytest.raises(ArgumentError, match="donate names 'y'"):
        rg.jit(lambda x: x, donate=["y"])
    with pytest.raises(ArgumentError, match="must be a function"):
        rg.jit(3)


def test_unhashable_static_arguments():
    with pytest.raises(ArgumentError, match=r"the argument s is set: expected Tensors"):
        rg.jit(lambda x, s: x)(rg.scalar(1.0), {1, 2})
    with pytest.raises(ArgumentError, match=r"is set, which is static and not hashable"):
        rg.jit(lambda x, s: x, static_argnames="s")(rg.scalar(1.0), {1, 2})


def test_donated_arguments_are_used_up():
    f = rg.jit(lambda state, x: state + x, donate="state")
    state = rg.asarray(jnp.arange(4.0))
    for _ in range(3):
        before, state = state, f(state, rg.scalar(1.0))
    assert state.tolist() == [3.0, 4.0, 5.0, 6.0]
    with pytest.raises((ArgumentError, RuntimeError), match=r"(?i)donate|delete"):
        before.numpy()


def test_the_result_of_an_argument_handed_through_is_readable():
    x = rg.asarray(jnp.arange(3.0))
    f = rg.jit(lambda x: (x, x * 2))
    y, _ = f(x)
    f(x)
    assert x.tolist() == y.tolist() == [0.0, 1.0, 2.0]


def test_int64_and_float64_keep_their_dtype():
    f = rg.jit(lambda x: x + 1)
    assert f(rg.asarray(np.array([2**40]))).tolist() == [2**40 + 1]
    assert f(np.float64(1e-12)).item() == 1 + 1e-12


def test_no_tensors_at_all():
    assert rg.jit(lambda: None)() is None
    assert rg.jit(lambda: 3)() == 3
    assert rg.jit(lambda: rg.ones((2,)))().tolist() == [1.0, 1.0]


# -- Variables -------------------------------------------------------------------------------------


def training(compile_it, optimizer_state=False):
    """Ten steps of gradient descent with momentum; the losses and weights."""
    rng = np.random.default_rng(0)
    w = rg.Variable(rng.normal(size=(3, 2)), name="w")
    b = rg.Variable(np.zeros(2), name="b")
    m = rg.Variable(np.zeros((3, 2)), trainable=False, name="m")
    steps = rg.Variable(0, trainable=False, dtype="int32")

    def step(x, y):
        loss, grads = rg.variable_grads(lambda: (rg.tanh(x @ w + b) - y).square().mean())
        m.assign(m * 0.9 + grads["w"])
        w.assign_sub(0.5 * m)
        b.assign_sub(0.5 * grads["b"])
        steps.assign_add(1)
        return loss

    run = rg.jit(step) if compile_it else step
    losses = [run(rng.normal(size=(4, 3)), rng.normal(size=(4, 2))) for _ in range(10)]
    return [loss.item() for loss in losses], [v.numpy() for v in (w, b, m, steps)]


def test_training_is_what_it_is_in_eager_mode():
    losses, values = training(True)
    due_losses, due = training(False)
    np.testing.assert_allclose(losses, due_losses, rtol=1e-13)
    for a, b in zip(values, due, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)
    assert values[-1] == 10


def test_what_is_returned_stays_readable_after_later_steps():
    v = rg.Variable(np.arange(4.0))
    step = rg.jit(lambda: (v.assign_add(1.0), v.value)[1])
    kept, views, reads = [], [], []
    for _ in range(4):
        kept.append(step())
        views.append(kept[-1].numpy())
        reads.append((v.value, v.numpy()))
    for i in range(4):
        due = np.arange(4.0) + i + 1
        for y in (kept[i].numpy(), views[i], reads[i][0].numpy(), reads[i][1]):
            np.testing.assert_array_equal(y, due)


def test_a_view_taken_before_a_step_stays():
    v = rg.Variable(np.zeros(3))
    step = rg.jit(lambda: v.assign_add(1.0))
    step()
    before = v.numpy()
    value = v.value
    for _ in range(3):
        step()
    assert before.tolist() == value.tolist() == [1.0] * 3
    assert v.numpy().tolist() == [4.0] * 3


def test_a_variable_that_is_assigned_and_not_read():
    v = rg.Variable(np.zeros(2))
    f = rg.jit(lambda x: v.assign(x * 2))
    f(np.ones(2))
    assert v.tolist() == [2.0, 2.0]
    f(np.ones(2) * 3)
    assert v.tolist() == [6.0, 6.0]


def test_two_variables_swapped():
    a, b = rg.Variable(np.array([1.0])), rg.Variable(np.array([2.0]))

    @rg.jit
    def swap():
        x, y = a.value, b.value
        a.assign(y)
        b.assign(x)

    for i in range(4):
        swap()
        assert (a.item(), b.item()) == ((2.0, 1.0) if i % 2 == 0 else (1.0, 2.0))


def test_one_value_for_two_variables():
    a, b = rg.Variable(np.zeros(2)), rg.Variable(np.zeros(2))

    @rg.jit
    def both(x):
        y = x + 1
        a.assign(y)
        b.assign(y)
        return y

    @rg.jit
    def first():
        a.assign_add(10.0)

    y = both(np.ones(2))
    first()
    first()
    assert (y.tolist(), a.tolist(), b.tolist()) == ([2, 2], [22, 22], [2, 2])


def test_an_argument_assigned_as_it_is():
    v = rg.Variable(np.zeros(2))
    f = rg.jit(lambda x: v.assign(x))
    x = rg.asarray(jnp.ones(2))
    f(x)
    step = rg.jit(lambda: v.assign_add(1.0))
    step()
    step()
    assert (x.tolist(), v.tolist()) == ([1.0, 1.0], [3.0, 3.0])


def test_assigned_outside_between_calls():
    v = rg.Variable(1.0)
    f = Counting(lambda x: x * v)
    g = rg.jit(f)
    g(rg.scalar(2.0))
    for n in (3.0, 4.0):
        v.assign(n)
        assert g(rg.scalar(2.0)).item() == 2 * n
    assert g.cache_info().programs == 1


def test_variables_in_a_list_that_grows():
    layers = [rg.Variable(2.0)]
    f = rg.jit(lambda x: functools.reduce(lambda y, v: y * v, layers, x))
    assert f(rg.scalar(1.0)).item() == 2.0
    layers.append(rg.Variable(5.0))
    assert f(rg.scalar(1.0)).item() == 10.0
    layers[0] = rg.Variable(3.0)
    assert f(rg.scalar(1.0)).item() == 15.0


def test_a_variable_given_and_closed_over():
    v = rg.Variable(3.0)
    f = rg.jit(lambda x: x * v)
    assert f(v).item() == 9.0
    _, grads = rg.variable_grads(lambda: f(v))
    assert grads[v.name].item() == 6.0


def test_an_exception_leaves_variables_as_they_were():
    v, w = rg.Variable(1.0), rg.Variable(2.0)

    @rg.jit
    def f(x):
        v.assign(x)
        w.assign_add(v)
        if x.shape == (2,):
            raise KeyError("stop")
        return rg.scalar(0.0)

    with pytest.raises((KeyError, ShapeError)):
        f(rg.ones((2,)))
    assert (v.item(), w.item()) == (1.0, 2.0)
    f(rg.scalar(5.0))
    assert (v.item(), w.item()) == (5.0, 7.0)


# -- what is reached without being given ---------------------------------------------------------

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


# -- overrides -------------------------------------------------------------------------------------


def test_rules_whose_closure_changes():
    k = 2.0
    f = rg.jit(rg.grad(rg.sign))
    g = rg.grad(rg.jit(rg.sign))
    for k in (2.0, 5.0, 2.0):
        with rg.gradient_override_map({"Sign": lambda dy: dy * k}):  # noqa: B023 (what is tested)
            assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (k, k)
    with rg.gradient_override_map({"Sign": lambda dy: dy * k}):
        for k in (3.0, 4.0):
            assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (k, k)
    assert f(rg.scalar(1.0)).item() == 0.0


def test_rules_that_close_over_tensors_variables_and_arrays():
    t, v, a = rg.scalar(2.0), rg.Variable(3.0), np.array(4.0, np.float32)
    f, g = rg.jit(rg.grad(rg.sign)), rg.grad(rg.jit(rg.sign))
    with rg.gradient_override_map({"Sign": lambda dy: dy * t * v * a}):
        assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (24.0, 24.0)
        t = rg.scalar(1.0)
        assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (12.0, 12.0)
        v.assign(1.0)
        assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (4.0, 4.0)
        a[...] = 7.0
        assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (7.0, 7.0)


def test_rules_registered_again():
    @rg.op("TestsJitStep")
    def step(xp, x: rg.Tensor, /) -> rg.Tensor:
        return xp.sign(x)

    @rg.gradient("TestsJitStep")
    def _(dy):
        return dy * 2

    f, g = rg.jit(rg.grad(step)), rg.grad(rg.jit(step))
    assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (2.0, 2.0)

    @rg.gradient("TestsJitStep", overwrite=True)
    def _(dy):
        return dy * 3

    assert (f(rg.scalar(1.0)).item(), g(rg.scalar(1.0)).item()) == (3.0, 3.0)


def test_hits_of_cached_calls():
    f, g = rg.jit(rg.grad(rg.sign)), rg.grad(rg.jit(rg.sign))
    h = rg.grad(lambda x: rg.jit(rg.sign)(x) + rg.sign(x))
    for call in (f, g, f, g):
        with rg.gradient_override_map({"Sign": "Identity"}) as used:
            call(rg.scalar(1.0))
            used.assert_fired()
            assert [(hit.count, hit.ran) for hit in used.hits] == [(1, 1)]
            call(rg.scalar(1.0))
        assert [(hit.count, hit.ran) for hit in used.hits] == [(2, 2)]
    with rg.gradient_override_map({"Sign": "Identity"}) as used:
        h(rg.scalar(1.0))
    assert sum(hit.count for hit in used.hits) == sum(hit.ran for hit in used.hits) == 2


def test_a_rule_that_does_not_run_has_not_fired():
    f = rg.jit(lambda x: rg.sign(x) * 2)
    with rg.gradient_override_map({"Sign": "Identity"}) as used:
        f(rg.scalar(1.0))
        f(rg.scalar(1.0))
    assert [(hit.count, hit.ran) for hit in used.hits] == [(2, 0)]
    with pytest.raises(rg.errors.NotFiredError, match="no gradient passed"):
        used.assert_fired()


def test_a_rule_that_is_wrong_says_so_under_jit():
    f = rg.jit(rg.grad(lambda x: rg.sign(x).sum()))
    with (
        pytest.raises(rg.errors.RuleError, match=r"shape \(7,\), expected \(2,\)"),
        rg.gradient_override_map({"Sign": lambda dy: rg.ones((7,))}),
    ):
        f(rg.ones((2,)))


# -- traces ----------------------------------------------------------------------------------------


def test_cache_info():
    f = rg.jit(lambda x: x * 2)
    assert f.cache_info() == (0, 0, 0, 0)
    for _ in range(3):
        f(rg.ones((2,)))
    f(rg.ones((3,)))
    f(np.ones(2))
    assert f.cache_info() == (2, 3, 1, 0)


def test_a_warning_names_what_changed():
    k = 0
    f = rg.jit(lambda x: x * k)
    with pytest.warns(RetraceWarning, match="the value of k in the closure, from 6 to 7"):
        for k in range(8):  # noqa: B007 (f reads it)
            f(rg.scalar(1.0))
    g = rg.jit(lambda batch: batch["x"].sum())
    with pytest.warns(RetraceWarning, match=r"batch\['x'\], from float32\(7,\) to float32\(8,\)"):
        for n in range(1, 9):
            g({"x": rg.ones((n,))})
    h = rg.jit(lambda x, s: x)
    with pytest.warns(RetraceWarning, match="a static argument"):
        for n in range(8):
            h(rg.scalar(1.0), str(n))


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: x * 2 if x > 0 else x, "where"),
        (lambda x: float(x), "float"),
        (lambda x: int(x), "int"),
        (lambda x: x.item(), "item|traced"),
        (lambda x: x.numpy(), "numpy|traced"),
        (lambda x: np.asarray(x), "traced"),
        (lambda x: x.tolist(), "traced"),
        (lambda x: range(rg.astype(x, "int32")), "traced|integer"),
        (lambda x: rg.ones((rg.astype(x, "int32"),)), "traced|static|shape"),
        (lambda x: np.sort(x.data), "traced|Tracer|tracer"),
        (lambda x: [1.0, 2.0][rg.astype(x, "int32")], "traced|index"),
    ],
)
def test_values_that_only_the_run_has(f, message):
    with pytest.raises((TraceError, ArgumentError, TypeError), match=message):
        rg.jit(f)(rg.scalar(1.0))


def test_tensors_that_outlive_their_trace():
    kept = []
    rg.jit(lambda x: kept.append(x * 2) or x)(rg.scalar(1.0))
    again, closing = rg.jit(lambda z: z * 2), rg.jit(lambda z: z * kept[0])
    for use in (
        lambda y: y + 1, lambda y: y.numpy(), again, closing, float, rg.grad(rg.sin),
        rg.grad(again),
    ):  # fmt: skip
        with pytest.raises(TraceError, match="trace"):
            use(kept[0])
    assert "traced" in str(kept[0])


def test_variables_made_inside():
    with pytest.raises(ArgumentError, match=r"a Variable \('w'\) is being made inside jit"):
        rg.jit(lambda x: x * rg.Variable(1.0, name="w"))(rg.scalar(1.0))


def test_numpy_generators():
    rng = np.random.default_rng(0)
    for draw in (lambda x: x + rg.random.normal(rng, (2,)), lambda x: rg.random.uniform(rng, (2,))):
        with pytest.raises(ArgumentError, match="Generator cannot be used under jit"):
            rg.jit(draw)(rg.scalar(1.0))


def test_a_tensor_for_an_attribute():
    with pytest.raises((ArgumentError, TraceError)):
        rg.jit(lambda x, n: rg.sum(x, axis=n))(rg.ones((2, 2)), 1)


def test_torch_data():
    import torch

    with pytest.raises(ArgumentError, match="got PyTorch's"):
        rg.jit(lambda x: x * 2)(torch.ones(2))


def test_without_x64():
    with (
        jax.experimental.disable_x64()
        if hasattr(jax.experimental, "disable_x64")
        else jax.enable_x64(False)
    ):
        f = rg.jit(lambda x: x * 2)
        assert f(np.float32(2.0)).item() == 4.0
        with pytest.raises(rg.errors.DTypeError, match="jax_enable_x64"):
            f(np.ones(2))
        with pytest.raises(rg.errors.DTypeError):
            f(np.array([2**40]))
    assert f(np.ones(2)).dtype == np.float64


def test_exceptions_pass_through():
    def f(x):
        raise ZeroDivisionError("mine")

    for g in (rg.jit(f), rg.grad(rg.jit(f)), rg.jit(rg.grad(f)), rg.jit(rg.vmap(f))):
        with pytest.raises(ZeroDivisionError, match="mine"):
            g(rg.ones((2,)))
        assert current() is None


def test_an_exception_in_a_scope_inside():
    def f(x):
        with rg.gradient_override_map({"Sign": "Identity"}):
            raise KeyError(rg.sign(x))

    with pytest.raises(KeyError):
        rg.jit(f)(rg.scalar(1.0))
    assert rg.grad(rg.jit(rg.sign))(rg.scalar(1.0)).item() == 0.0


# -- differentiation from outside ------------------------------------------------------------------


def cubed(x, w):
    return (rg.sin(x) * w * x * x).sum()


X, W = np.array([0.3, -1.2, 2.0]), np.array([1.5, 0.5, -1.0])


def close(a, b):
    np.testing.assert_allclose(np.asarray(a._values()), np.asarray(b._values()), rtol=1e-11)


def test_gradients_of_a_compiled_function():
    f = rg.jit(cubed)
    for a, b in zip(rg.grads(f)([X, W]), rg.grads(cubed)([X, W]), strict=True):
        close(a, b)
    value, dx = rg.value_and_grad(lambda x: f(x, W))(X)
    close(value, cubed(rg.asarray(X), W))
    close(dx, rg.grad(lambda x: cubed(x, W))(X))
    (y, back), (due, due_back) = rg.vjp(f, X, W), rg.vjp(cubed, X, W)
    close(y, due)
    for a, b in zip(back(2.0), due_back(2.0), strict=True):
        close(a, b)
    for a, b in zip(rg.jvp(f, [X, W], [W, X]), rg.jvp(cubed, [X, W], [W, X]), strict=True):
        close(a, b)


@pytest.mark.parametrize("where", ["inside", "outside", "between", "twice"])
def test_orders_to_three(where):
    def total(g):
        return lambda x: (rg.grad(g)(x) * W).sum()

    f = lambda x: cubed(x, W)  # noqa: E731
    due = rg.grad(total(total(f)))(X)
    g = {
        "inside": lambda: rg.jit(rg.grad(total(total(f)))),
        "outside": lambda: rg.grad(total(total(rg.jit(f)))),
        "between": lambda: rg.grad(total(rg.jit(total(f)))),
        "twice": lambda: rg.grad(rg.jit(total(rg.jit(total(f))))),
    }[where]()
    close(g(X), due)
    close(g(X), due)


@pytest.mark.parametrize("api", [rg.jacobian, rg.hessian])
def test_jacobians_and_hessians(api):
    f = (lambda x: cubed(x, W)) if api is rg.hessian else (lambda x: rg.sin(x) * x.sum())
    due = api(f)(X)
    close(api(rg.jit(f))(X), due)
    close(rg.jit(api(f))(X), due)
    close(rg.jit(api(rg.jit(f)))(X), due)


def test_what_is_closed_over_is_differentiated():
    def f(w, x):
        return rg.jit(lambda x: x * w * w)(x).sum()

    assert rg.grads(f)([rg.scalar(3.0), rg.scalar(2.0)])[0].item() == 12.0
    second = rg.grad(lambda w: rg.grad(lambda w: f(w, rg.scalar(2.0)))(w))
    assert second(rg.scalar(3.0)).item() == 4.0
    v = rg.Variable(3.0)
    g = rg.jit(lambda x: x * v * v)
    assert rg.variable_grads(lambda: g(rg.scalar(2.0))).grads[v.name].item() == 12.0
    by_v = lambda: rg.variable_grads(lambda: g(rg.scalar(2.0))).grads[v.name]  # noqa: E731
    assert rg.variable_grads(by_v).grads[v.name].item() == 4.0


def test_variables_assigned_in_a_compiled_function_keep_their_history():
    v, x = rg.Variable(2.0), rg.scalar(3.0)
    f = rg.jit(lambda x: v.assign(v * x))

    def loss(x):
        f(x)
        f(x)
        return v * 1

    assert rg.grad(loss)(x).item() == 12.0
    v.assign(2.0)
    assert rg.variable_grads(lambda: loss(x)).grads[v.name].item() == 9.0


def test_wrt_some_variables_only():
    a, b = rg.Variable(2.0, name="a"), rg.Variable(5.0, name="b", trainable=False)
    f = rg.jit(lambda: a * b * b)
    assert {k: g.item() for k, g in rg.variable_grads(f).grads.items()} == {"a": 25.0}
    both = rg.variable_grads(f, [a, b]).grads
    assert (both["a"].item(), both["b"]) == (25.0, None)
    c = rg.Variable(1.0, name="c")
    with pytest.raises(GradientError):
        rg.variable_grads(f, [c])


def test_no_path_is_an_error_as_in_eager_mode():
    for f in (lambda x, y: y * 2, lambda x, y: rg.stop_gradient(x) * y, lambda x, y: y + (x > 0)):
        with pytest.raises(GradientError) as eager:
            rg.grads(f)([rg.scalar(1.0), rg.scalar(2.0)])
        for g in (
            rg.grads(rg.jit(f)),
            lambda xs, f=f: rg.jit(lambda *xs: rg.grads(f)(list(xs)))(*xs),
        ):
            with pytest.raises(GradientError) as compiled:
                g([rg.scalar(1.0), rg.scalar(2.0)])
            assert str(compiled.value) == str(eager.value)
        zeros = rg.grads(rg.jit(f), unconnected="zero")([rg.scalar(1.0), rg.scalar(2.0)])
        assert zeros[0].item() == 0.0


def test_outputs_that_are_not_connected():
    f = rg.jit(lambda x, y: (x * 2, y * 3, rg.sign(x)))
    assert rg.grad(lambda x: f(x, rg.scalar(1.0))[0])(rg.scalar(1.0)).item() == 2.0
    with pytest.raises(GradientError):
        rg.grad(lambda x: f(x, rg.scalar(1.0))[1])(rg.scalar(1.0))
    np.asarray(rg.grad(lambda x: f(x, rg.scalar(1.0))[0])(rg.scalar(1.0)))


def test_forward_mode_is_refused_for_rules_that_are_not_linear():
    f = rg.jit(rg.sign)
    with (
        rg.gradient_override_map({"Sign": lambda dy: rg.where(dy > 0, dy, 0.0)}),
        pytest.raises(GradientError, match="forward mode"),
    ):
        rg.jvp(f, [rg.scalar(1.0)], [rg.scalar(1.0)])


def test_custom_gradients_around_and_inside():
    halved = rg.custom_grad(lambda x: (rg.sin(x), lambda dy: dy * 0.5))
    assert rg.grad(rg.jit(halved))(rg.scalar(1.0)).item() == 0.5
    assert rg.jit(rg.grad(halved))(rg.scalar(1.0)).item() == 0.5
    inner = rg.jit(lambda x: x * x)
    around = rg.custom_grad(lambda x: (inner(x), lambda dy: dy * 7))
    assert rg.grad(around)(rg.scalar(3.0)).item() == 7.0
    assert rg.grad(rg.jit(around))(rg.scalar(3.0)).item() == 7.0


def test_a_custom_function_around_a_closure_is_refused():
    def f(w):
        inner = rg.jit(lambda x: x * w)
        return rg.custom_grad(lambda x: (inner(x), lambda dy: dy))(w * 1.0)

    for g in (rg.grad(f), rg.jit(rg.grad(f)), rg.grad(rg.jit(f))):
        with pytest.raises(GradientError, match="closes over"):
            g(rg.scalar(2.0))
    v = rg.Variable(2.0)
    inner = rg.jit(lambda x: x * v)
    custom = rg.custom_grad(lambda x: (inner(x), lambda dy: dy))
    with pytest.raises(GradientError, match=r"closes over|Variable"):
        rg.variable_grads(lambda: custom(rg.scalar(1.0)) * v)


def test_one_tensor_as_two_arguments():
    f = rg.jit(lambda a, b: a * a * b)
    da, db = rg.grads(f)([rg.scalar(3.0), rg.scalar(3.0)])
    assert (da.item(), db.item()) == (18.0, 9.0)
    x = rg.scalar(3.0)
    assert rg.grad(lambda x: f(x, x))(x).item() == 27.0


def test_no_perturbation_confusion():
    f = rg.jit(lambda x, y: x * y)
    g = lambda x: x * rg.grad(lambda y: f(x, y))(rg.scalar(2.0))  # noqa: E731
    assert rg.grad(g)(rg.scalar(3.0)).item() == 6.0 - 0.0
    assert rg.jit(rg.grad(g))(rg.scalar(3.0)).item() == 6.0


# -- threads, tasks, randomness ------------------------------------------------------------------


def test_threads_call_one_function_at_once():
    f, found = rg.jit(lambda x: (x * x).sum()), {}

    def work(i):
        for n in range(1, 4):
            x = rg.ones((n,)) * i
            found[i, n] = f(x).item(), rg.grad(f)(x).tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == {
        (i, n): (float(n * i * i), [2.0 * i] * n) for i in range(4) for n in range(1, 4)
    }


def test_threads_have_overrides_of_their_own():
    f, found = rg.jit(rg.sign), {}

    def work(i):
        for _ in range(5):
            with rg.gradient_override_map({"Sign": lambda dy: dy * i}):
                found.setdefault(i, []).append(rg.grad(f)(rg.scalar(1.0)).item())

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(1, 4)]
    [t.start() for t in threads]
    assert rg.grad(f)(rg.scalar(1.0)).item() == 0.0
    [t.join() for t in threads]
    assert found == {float(i): [float(i)] * 5 for i in range(1, 4)}


def test_tasks_have_overrides_of_their_own():
    f = rg.jit(rg.sign)

    async def work(i):
        with rg.gradient_override_map({"Sign": lambda dy: dy * i}):
            await asyncio.sleep(0)
            first = rg.grad(f)(rg.scalar(1.0)).item()
            await asyncio.sleep(0)
            return first, rg.grad(f)(rg.scalar(1.0)).item()

    async def main():
        return await asyncio.gather(*[work(float(i)) for i in range(1, 4)])

    assert asyncio.run(main()) == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


def test_random_keys():
    f = rg.jit(lambda key, x: x + rg.random.normal(key, (3,)))
    a, b = jax.random.split(jax.random.key(0))
    x = rg.zeros((3,))
    due = rg.random.normal(a, (3,))
    np.testing.assert_allclose(f(a, x).numpy(), due.numpy(), rtol=1e-6)
    assert f(a, x).tolist() == f(a, x).tolist() != f(b, x).tolist()
    assert f.cache_info().traces == 1
    g = rg.jit(lambda key: jax.random.split(key))
    assert g(a).shape == (2,)
    assert rg.grad(lambda x: f(a, x).sum())(x).tolist() == [1.0] * 3


def test_decorated_with_arguments():
    @rg.jit(static_argnames="n")
    def power(x, n):
        """x to the n."""
        return x**n

    assert power(rg.scalar(3.0), 2).item() == 9.0
    assert (power.__name__, power.__doc__) == ("power", "x to the n.")


def test_under_jax_transformations(monkeypatch):
    monkeypatch.setattr(compiled, "find_jax", lambda: jax)
    f = rg.jit(lambda x: rg.sin(x) * 2)
    outer = jax.jit(lambda a: f(rg.asarray(a)).data + 1)
    assert float(outer(jnp.asarray(0.0))) == 1.0
