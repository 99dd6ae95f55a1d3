"""The shortcut to a compiled program: each kind of call, again and again, as if uncompiled."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest

import regrad as rg
from regrad.errors import ArgumentError, DTypeError, RegradError
from tests.helpers.quick import nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)

X = rg.asarray(jnp.array([1.0, -2.0, 3.0], jnp.float32))
N = np.array([4.0, 5.0, 6.0], np.float32)


class Pair(NamedTuple):
    a: object
    b: object


def described(x, *rest, k=1, **named):
    """Something that depends on the type, the place and the value of every argument."""
    total = 0.0 * X
    for i, leaf in enumerate(optree.tree_leaves([x, rest, named], is_leaf=rg_leaf)):
        if isinstance(leaf, str):
            total = total + len(leaf)
        else:
            total = total + (i + 1) * rg.sum(rg.asarray(leaf))
    return {"sum": total, "k": type(k).__name__, "kinds": kinds([x, rest, named])}


def rg_leaf(x):
    """A Tensor, or what becomes one."""
    numbers = isinstance(x, list) and x and all(isinstance(v, int | float) for v in x)
    return isinstance(x, rg.Tensor) or bool(numbers)


def kinds(x):
    if isinstance(x, list | tuple):
        return [kinds(v) for v in x]
    if isinstance(x, dict):
        return {k: kinds(v) for k, v in sorted(x.items(), key=lambda item: str(item[0]))}
    return "number" if isinstance(x, int | float) else getattr(x, "shape", x)


CALLS = {
    "a Tensor": ((X,), {}),
    "two Tensors": ((X, X * 2.0), {}),
    "NumPy data": ((rg.asarray(N),), {}),
    "a NumPy array": ((N,), {}),
    "a JAX array": ((jnp.asarray(N),), {}),
    "a dict": (({"w": X, "b": N},), {}),
    "its other keys": (({"w": X, "c": N},), {}),
    "keys of two types": (({"w": X, 1: N},), {}),
    "a named tuple": ((Pair(X, N),), {}),
    "a nest": (([X, (N, {"a": X})], []), {}),
    "a tuple": (((X, N),), {}),
    "a list": (([X, N],), {}),
    "a list of numbers": (([1.0, 2.0, 4.0],), {}),
    "a list of one": (([2.0],), {}),
    "a list of integers": (([1, 2],), {}),
    "a float": ((X, 2.0), {}),
    "another float": ((X, 3.5), {}),
    "minus zero": ((X, -0.0), {}),
    "infinity": ((X, float("inf")), {}),
    "an integer": ((X, 2), {}),
    "a large integer": ((X, 10**9), {}),
    "a small float": ((X, 1e-30), {}),
    "a bool": ((X, True), {}),
    "a string": ((X, "abcd"), {}),
    "another string": ((X, "ab"), {}),
    "None": ((X, None), {}),
    "a keyword": ((X,), {"y": N}),
    "keywords": ((X,), {"z": X, "y": N}),
    "static 1": ((X,), {"k": 1}),
    "static True": ((X,), {"k": True}),
    "static 1.0": ((X,), {"k": 1.0}),
    "static None": ((X,), {"k": None}),
    "static tuple": ((X,), {"k": (1, 2)}),
    "static string": ((X, N), {"k": "a static argument", "y": 2.0}),
}


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
def test_one_function_in_all_ways(x64):
    """Called in every way, then again the other way round: no call finds another's program."""
    f = rg.jit(described, static_argnames="k")
    with jax.enable_x64(x64):
        for _ in range(2):
            for args, kwargs in [*CALLS.values(), *list(CALLS.values())[::-1]]:
                due, got = described(*args, **kwargs), f(*args, **kwargs)
                np.testing.assert_allclose(got["sum"].numpy(), due["sum"].numpy(), rtol=1e-6)
                assert got["k"] == due["k"]
                if not any(isinstance(a, list) for a in args):
                    assert str(got["kinds"]).replace("()", "'number'") == str(due["kinds"])
    traces = f.cache_info().traces
    with jax.enable_x64(x64):
        for args, kwargs in CALLS.values():
            f(*args, **kwargs)
    assert f.cache_info().traces == traces


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
def test_static_arguments_by_place_and_by_name():
    f = rg.jit(lambda x, k, m: x * k + len(m), static_argnames=("k", "m"))
    for _ in range(3):
        for k in 2, 3, 2.5, True:
            for m in "a", "bcd", (1, 2):
                due = (X * k + len(m)).numpy()
                for y in f(X, k, m), f(X, k, m=m), f(X, m=m, k=k), f(x=X, k=k, m=m):
                    np.testing.assert_allclose(y.numpy(), due)


class Loud(dict):
    """A dict of another class, which is not a container of regrad's."""


def test_a_call_of_another_kind_between_two_of_one_kind():
    """What a road is written for is asked of each part: type, length, keys, values."""
    f = rg.jit(lambda p: rg.sum(rg.asarray(p["w"][0])) * 2.0)
    usual = {"w": [X, N]}
    others = (
        ({"w": [N, X]}, 30.0),
        ({"w": [X]}, 4.0),
        ({"w": (X, N)}, 4.0),
        ({"w": [X, N], "b": X}, 4.0),
        ({"w": Pair(N, X)}, 30.0),
        ({"w": [2.5, X]}, 5.0),
        ({"w": [2, X]}, 4.0),
    )
    for _ in range(2):
        for other, due in others:
            for _ in range(2):
                assert f(usual).item() == 4.0
            assert f(other).item() == due
    with pytest.raises(KeyError):
        f({"b": [X, N]})
    with pytest.raises(ArgumentError, match="Loud"):
        f(Loud(w=[X, N]))


def test_the_keys_of_a_dict_may_come_in_any_order():
    f = rg.jit(lambda p, **named: p["a"] - p["b"] + named["y"] - named["x"])
    a, b = rg.asarray(N), X
    for _ in range(3):
        for p in ({"a": a, "b": b}, {"b": b, "a": a}):
            np.testing.assert_array_equal(f(p, x=b, y=a), (a - b + a - b).numpy())
            np.testing.assert_array_equal(f(p, y=a, x=b), (a - b + a - b).numpy())


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
def test_static_values_of_one_type_and_of_others():
    f = rg.jit(lambda x, k: x * float(k), static_argnames="k")
    values = 1, True, 1.0, 0.0, -0.0, 2, False, 0
    for _ in range(3):
        for k in values:
            np.testing.assert_array_equal(f(X, k).numpy(), (X * float(k)).numpy())
            assert np.signbit(f(X, k).numpy()[0]) == np.signbit(float(k))
    assert f.cache_info().traces == len(values)


def test_float64_is_never_halved_in_silence():
    f = rg.jit(lambda p, x: p["w"] + x)
    for _ in range(3):
        assert f({"w": N}, 1.0).dtype == np.float32
    with jax.enable_x64(False), pytest.raises(DTypeError, match="JAX cannot hold float64"):
        f({"w": np.full(3, 0.1)}, 1.0)
    with jax.enable_x64(True):
        for _ in range(3):
            y = f({"w": np.full(3, 0.1)}, 1.0)
            assert y.dtype == np.float64 and y.numpy()[0] == 1.1


def test_arrays_in_another_byte_order_are_what_they_say():
    """JAX, as of 0.10, reads such an array as if it were in the machine's, where it is warm."""
    f = rg.jit(lambda x, p: x * p["w"])
    for _ in range(3):
        for x in (N, N.astype(">f4"), N.astype("<f4")):
            np.testing.assert_array_equal(f(X, {"w": x}).numpy(), X.numpy() * N)
    whole = rg.jit(lambda x: x + 1)
    for dtype in (">i2", ">i4", "<i2", ">f2", ">f4", ">i2", ">f4"):
        np.testing.assert_array_equal(whole(np.array([1, 300], dtype)).numpy(), [2, 301])
    with jax.enable_x64(False), pytest.raises(DTypeError, match="JAX cannot hold float64"):
        whole(np.array([0.1], ">f8"))


def test_results_of_each_kind_again_and_again():
    """One Tensor alone, with a Variable read, with one assigned, in a container, and a number."""
    v = rg.Variable(rg.asarray(jnp.ones(3)))

    def counted(x):
        v.assign_add(1.0)
        return x * v

    bodies = {
        "alone": lambda x: x * 2.0, "read": lambda x: x * v, "assigned": counted,
        "a list": lambda x: [x * 2.0], "nothing": lambda x: None, "a number": lambda x: (x, 3),
    }  # fmt: skip
    for name, body in bodies.items():
        f = rg.jit(body)
        for x in (X, rg.asarray(N), X[:2]) if name == "alone" else (X,):
            v.assign([1.0] * 3)
            due = body(x)
            for _ in range(3):
                v.assign([1.0] * 3)
                got = f(x)
                for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(due), strict=True):
                    np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


def test_what_is_refused_is_refused_every_time():
    f = rg.jit(lambda x, y=0.0: x * 2.0 + y)
    for _ in range(3):
        assert f({"x": X}["x"], y=1).shape == (3,)
        for bad in object(), {1, 2}:
            with pytest.raises(ArgumentError, match="expected Tensors, arrays"):
                f(X, bad)
        with jax.enable_x64(False):
            with pytest.raises(DTypeError, match="JAX cannot hold float64"):
                f(X, y=np.ones(3))
            with pytest.raises(RegradError):
                f(X, 2**40)
        with pytest.raises(TypeError):
            f()


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
def test_what_the_function_reaches_is_read_at_each_call():
    state = {"w": rg.asarray(jnp.ones(3)), "n": np.ones(3, np.float32), "k": 1.0}
    v = rg.Variable(jnp.ones(3))

    def body(p, q):
        return p["a"] * state["w"] + rg.add(q, state["n"]) * state["k"] + v

    f = rg.jit(body)
    for i in range(4):
        changes = (
            lambda i: state.update(w=rg.asarray(jnp.full(3, 2.0 + i))),
            lambda i: state.update(w=rg.asarray(np.full(3, 9.0 + i, np.float32))),
            lambda i: state["n"].__iadd__(1.0),
            lambda i: state.update(k=3.0 + i),
            lambda i: v.assign_add(1.0),
        )
        for change in changes:
            change(i)
            for _ in range(2):
                np.testing.assert_allclose(
                    f({"a": X}, 2.0).numpy(), body({"a": X}, 2.0).numpy(), rtol=1e-6
                )


def test_a_quick_call_does_not_pass_by_what_is_in_force():
    f = rg.jit(lambda p: rg.sum(rg.sin(p["x"])))
    for _ in range(3):
        f({"x": X})
    dx = rg.grad(f)({"x": X})["x"].numpy()
    np.testing.assert_allclose(dx, np.cos(X.numpy()), rtol=1e-6)
    with rg.gradient_override_map({"Sin": lambda dy: dy * 10.0}) as used:
        np.testing.assert_allclose(rg.grad(f)({"x": X})["x"].numpy(), [10.0] * 3)
    used.assert_fired()
    f({"x": X})


def test_an_error_of_the_function_leaves_out_what_is_written_for_the_call():
    def body(p):
        if p["x"].shape == (2,):
            raise ValueError("two")
        return p["x"] * 2.0

    f = rg.jit(body)
    for _ in range(3):
        f({"x": X})
    with pytest.raises(ValueError, match="two") as caught:
        f({"x": X[:2]})
    names = {Path(entry.path).name for entry in caught.traceback}
    assert Path(__file__).name in names and not names & {
        "<string>",
        "shortcuts.py",
        "quick_calls.py",
    }


def test_other_shapes_and_dtypes():
    f = rg.jit(lambda p: p["x"] * 2)
    for x in np.ones(2, np.float32), np.ones((2, 2), np.int32), np.ones(3, bool), jnp.ones(0):
        for _ in range(3):
            got = f({"x": x})
            np.testing.assert_array_equal(got.numpy(), np.asarray(x) * 2)


def test_containers_that_go_deep_or_hold_themselves():
    f = rg.jit(lambda x: x)
    cyclic = []
    cyclic.append(cyclic)
    deep = X
    for _ in range(300):
        deep = (deep,)
    for _ in range(3):
        with pytest.raises(ArgumentError, match="holds itself"):
            f(cyclic)
        with pytest.raises(ArgumentError, match="holds itself"):
            f(x={"a": cyclic})
        assert isinstance(f(deep), tuple)
        assert f({"x": [X]})["x"][0].shape == (3,)
