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
from regrad.transforms import program, shortcuts
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


# -- what is written into a call -------------------------------------------------------------------


def two_pairs():
    return [NamedTuple("Twin", [("a", object), ("b", object)]) for _ in range(2)]


def test_results_in_other_containers_for_other_shapes():
    """Those of the first trace come without a mark; the others are told apart."""
    first, second = two_pairs()

    def body(x):
        kinds = {1: first, 2: second, 3: lambda a, b: {"a": a, "b": b}}
        other = {4: lambda a, b: {"b": b, "a": a}, 5: lambda a, b: [a, (b, None)]}
        make = {**kinds, **other}.get(x.shape[0], lambda a, b: (a, 7, b))
        return make(x, x * 2.0)

    for start in range(1, 7):
        f = rg.jit(body)
        for n in [start] * 4 + [1, 2, 3, 4, 5, 6] * 3:
            x = rg.asarray(jnp.arange(float(n)))
            got, due = f(x), body(x)
            assert type(got) is type(due) and kinds(got) == kinds(due)
            assert not isinstance(got, dict) or [*got] == [*due]
            for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(due), strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(params=[0, program.WORTH], ids=["written over", "replaced"])
def worth(request, monkeypatch):
    monkeypatch.setattr(program, "WORTH", request.param)
    return request.param


def test_variables_that_other_shapes_assign(worth):
    v, w, last = (rg.Variable(jnp.zeros(3)) for _ in range(3))

    def step(x):
        v.assign_add(x[:3])
        if x.shape[0] > 3:
            w.assign(v)
            last.assign(x[:3])
        return rg.sum(x) * last

    f = rg.jit(step)
    short, long = rg.asarray(jnp.ones(3)), rg.asarray(jnp.ones(4))
    for x in [short] * 3 + [long] * 3 + [short, long] * 3 + [short]:  # (nobody reads them between)
        f(x)
    assert (v.tolist(), w.tolist(), last.tolist()) == ([13.0] * 3, [12.0] * 3, [1.0] * 3)


def test_variables_in_all_states_between_calls(worth):
    """Read and kept, assigned from NumPy and JAX, written by another program, not trainable."""
    v, w, fixed = (rg.Variable(xp.ones(3, "float32")) for xp in (jnp, np, jnp))

    @rg.jit
    def step(x):
        v.assign_add(x * fixed)
        w.assign(v + w)
        return x * 2.0

    other = rg.jit(lambda: v.assign(v * 2.0))
    held, a, b, c = [], np.ones(3), np.ones(3), np.ones(3)

    def assigned(value):
        nonlocal a
        v.assign(value)
        a = np.ones(3) * value

    for i in range(16):
        changes = (
            lambda a=a: held.append((v.value, v.numpy(), a)),
            lambda: assigned(np.full(3, 2.0, np.float32)),
            lambda: assigned(jnp.full(3, 3.0, "float32")),
            lambda: setattr(v, "trainable", not v.trainable),
            lambda: fixed.assign(np.full(3, 4.0, "float32")),
        )
        changes[i % 5]()
        c = np.full(3, 4.0) if i >= 4 else c
        if i % 3 == 0:
            other()
            a = a * 2.0
        assert step(X).tolist() == [2.0, -4.0, 6.0]
        a = a + X.numpy() * c
        b = a + b
        np.testing.assert_allclose(v.numpy() if i % 2 else v.value.numpy(), a, rtol=1e-5)
        np.testing.assert_allclose(w.numpy(), b, rtol=1e-5)
    for value, view, due in held:
        np.testing.assert_allclose(value.numpy(), due, rtol=1e-5)
        np.testing.assert_allclose(view, due, rtol=1e-5)


def test_a_handler_of_a_signal_may_assign():
    """As if it had come before the step: a step that is in its midst begins anew."""
    v, w = rg.Variable(jnp.zeros(3)), rg.Variable(jnp.zeros(3))

    @rg.jit
    def step(x):
        v.assign_add(x)
        w.assign(v * 2.0)

    for _ in range(3):
        step(rg.asarray(jnp.ones(3)))
    scope = step.road.__globals__
    compiled = scope["compiled"]

    def struck(*arrays):
        found = compiled(*arrays)
        scope["compiled"] = compiled
        v.assign([10.0] * 3)
        return found

    scope["compiled"] = struck
    step(rg.asarray(jnp.ones(3)))
    assert (v.tolist(), w.tolist()) == ([11.0] * 3, [22.0] * 3)


def test_an_error_for_another_shape_leaves_variables(worth):
    v = rg.Variable(jnp.zeros(3))

    @rg.jit
    def step(x):
        v.assign_add(x)
        if x.shape == ():
            raise ValueError("a scalar")
        return x

    for n in range(1, 5):
        step(rg.asarray(jnp.ones(3)))
        with pytest.raises(ValueError, match="a scalar"):
            step(rg.asarray(jnp.ones(())))
        assert v.tolist() == [float(n)] * 3


ARRAYS = {
    "small": lambda: np.ones((2, 3), np.float32),
    "Fortran's order": lambda: np.asfortranarray(np.arange(6.0, dtype="f4").reshape(2, 3)),
    "another byte order": lambda: np.ones((2, 3), ">f4"),
    "a view": lambda: np.ones((4, 3), np.float32)[::2],
    "large": lambda: np.ones((3000, 3), np.float32),
}


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("where", ["cell", "list", "dict", "tuple", "attribute"])
def test_arrays_of_the_closure_are_read_at_each_call(kind, where):
    array = ARRAYS[kind]()
    held = {"list": [array], "dict": {0: array}, "tuple": (array,)}.get(where)
    if where == "attribute":
        held = type("Held", (), {"__getitem__": lambda self, i: self.array})()
        held.array = array
    f = rg.jit((lambda x: rg.multiply(x, array)) if held is None else lambda x: x * held[0])
    if held is not None and where != "attribute":
        f = rg.jit(lambda x: rg.multiply(x, held[0]))
    for i in range(6):
        if i % 2:
            array[...] += 1.0
        for _ in range(2):
            np.testing.assert_array_equal(f(X).numpy(), X.numpy() * array)
    if where in ("list", "dict"):
        held[0] = array * 2.0
        for _ in range(3):
            np.testing.assert_array_equal(f(X).numpy(), X.numpy() * held[0])


def test_arrays_of_jax_in_the_closure():
    box = [jnp.ones(3)]
    f = rg.jit(lambda x: rg.multiply(x, box[0]))
    for i in range(4):
        box[0] = jnp.full(3, float(i))
        for _ in range(3):
            np.testing.assert_array_equal(f(X).numpy(), X.numpy() * i)


scale = 2.0


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
def test_names_that_go_and_come():
    global scale
    entries = [1.0, 2.0]

    def made():
        factor = 3.0

        def f(x, drop=None):
            nonlocal factor
            return x * (scale if "scale" in globals() else 1.0) * sum(entries) * factor

        def change(value=None):
            nonlocal factor
            if value is None:
                del factor
            else:
                factor = value

        return f, change

    f, change = made()
    compiled = rg.jit(f)
    for i in range(3):
        for value in (2.0, 5.0 + i):
            scale = value
            entries[1] = float(str(2 + i))  # (another object, and every second time an equal one)
            for _ in range(2):
                np.testing.assert_allclose(compiled(X).numpy(), f(X).numpy())
        change()
        with pytest.raises(NameError):
            compiled(X)
        change(4.0 + i)
    scale = 2.0


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
def test_many_places_and_many_kinds_of_calls(monkeypatch):
    """More than are written out: the general check, and the general road."""
    entries = {f"k{i}": float(i) for i in range(3)}
    numbers = [float(i) for i in range(5)]
    for name in ("WRITTEN", "ROADS"):
        monkeypatch.setattr(shortcuts, name, 2)
    f = rg.jit(lambda *xs: sum(xs) * sum(numbers) * entries["k1"])
    for i in range(3):
        numbers[2] = 5.0 + i
        for _ in range(3):
            for n in range(1, 5):
                due = X.numpy() * n * sum(numbers)
                np.testing.assert_allclose(f(*[X] * n).numpy(), due, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
def test_numbers_in_and_out_of_range_in_turns():
    f = rg.jit(lambda x, k: x * k)
    for _ in range(3):
        for k in (2.0, float("inf"), -3.0, float("nan")):
            np.testing.assert_array_equal(f(X, k).numpy(), (X * np.float32(k)).numpy())


def test_the_default_dtype_of_a_block():
    f = rg.jit(lambda x: rg.zeros((3,)) + 1.0)
    for _ in range(3):
        assert f(X).dtype == np.float32
        with jax.enable_x64(True), rg.default_dtype("float64"):
            for _ in range(3):
                assert f(X).dtype == np.float64
