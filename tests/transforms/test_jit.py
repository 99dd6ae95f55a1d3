"""`rg.jit`: what goes in and out, when it is traced anew, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import (
    ArgumentError,
    RetraceWarning,
    TraceError,
)
from regrad.transforms import program
from tests.helpers.quick import Counting, nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)


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


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
def test_tasks_have_overrides_of_their_own():
    """(JAX may drop a trace after a long session; that one is made again is no matter here.)"""
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
    monkeypatch.setattr(program, "find_jax", lambda: jax)
    f = rg.jit(lambda x: rg.sin(x) * 2)
    outer = jax.jit(lambda a: f(rg.asarray(a)).data + 1)
    assert float(outer(jnp.asarray(0.0))) == 1.0
