"""The shortcut to a compiled program: each kind of call, again and again, as if uncompiled."""

import itertools
from pathlib import Path
from types import SimpleNamespace
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
from tests.helpers.rewritten import strike

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)

X = rg.asarray(jnp.array([1.0, -2.0, 3.0], jnp.float32))
N = np.array([4.0, 5.0, 6.0], np.float32)


class Pair(NamedTuple):
    a: object
    b: object


def called(*args, **kwargs):
    return lambda f: f(*args, **kwargs)


def is_numbers(x):
    """A list that becomes a Tensor."""
    return isinstance(x, list) and bool(x) and all(isinstance(v, int | float) for v in x)


def described(x, k):
    """Something that depends on the place and the value of every part, and on the type of k."""
    leaves = optree.tree_leaves(x, is_leaf=is_numbers)
    parts = [rg.asarray(len(v) if isinstance(v, str) else v) for v in leaves]
    return sum(((i + 1) * rg.sum(v) for i, v in enumerate(parts)), 0.0 * X) + len(str(type(k)))


KINDS = [
    X, (X, X * 2.0), rg.asarray(N), N, jnp.asarray(N), {"w": X, "b": N}, {"w": X, "c": N},
    {"w": X, 1: N}, Pair(X, N), [X, (N, {"a": X})], ([X], []), [X, N], [1.0, 2.0, 4.0], [2.0],
    [1, 2], (X, 2.0), (X, 3.5), (X, -0.0), (X, 2), (X, 10**9), (X, 1e-30), (X, True), (X, "abcd"),
    (X, "ab"), (X, None),
]  # fmt: skip


class Loud(dict):
    """A dict of another class, which is not a container of regrad's."""


USUAL = {"w": [X, N]}
SOME = [{"w": w} for w in ([X], (X, N), Pair(N, X), [2.5, X], [2])] + [USUAL | {"b": X}]
SHAPES = [np.ones(2, "f4"), np.ones((2, 2), "i4"), np.ones(3, bool), jnp.ones(0)]
KIND = "kinds of arguments"
# A function of x and of a static k, and arguments that must not find each other's programs.
WARM = {
    KIND: (described, [*KINDS, *KINDS[::-1]], [0]),
    "kinds of static arguments": (described, [X], [1, True, 1.0, None, (1, 2), "text"]),
    "static values": (lambda x, k: x * float(k), [X], [1, True, 1.0, 0.0, -0.0, 2, False, 0]),
    "static tuples and strings": (lambda x, k: x * len(k), [X], ["a", "bcd", (1, 2), ("a",)]),
    "numbers in and out of range": (lambda x, k: x * 2, [2.0, np.inf, -3.0, np.nan], [0]),
    "shapes and dtypes": (lambda x, k: rg.multiply(x["x"], 2), [{"x": x} for x in SHAPES], [0]),
    "byte orders (JAX 0.10 misreads them where it is warm)": (
        lambda x, k: rg.add(x, 1),
        [np.array([1, 300], d) for d in (">i2", ">i4", "<i2", ">f2", ">f4", ">i2", ">f4")],
        [0],
    ),
    "byte orders in a dict": (lambda x, k: X * x["w"],
                              [{"w": N.astype(d)} for d in ("f4", ">f4", "<f4")], [0]),
    "the order of keys": (
        lambda x, k: rg.subtract(x["a"], x["b"]), [{"a": N, "b": X}, {"b": X, "a": N}], [0],
    ),
    "types, lengths, keys, values": (lambda x, k: rg.sum(rg.asarray(x["w"][0])) * 2.0,
                                     [x for other in SOME for x in (USUAL, other)], [0]),
}  # fmt: skip


@pytest.mark.slow(but=1)
@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
@pytest.mark.parametrize(("name", "x64"), [(name, True) for name in WARM] + [(KIND, False)])
def test_calls_of_other_kinds_in_turns(name, x64):
    """No call finds another's program, and later rounds trace nothing."""
    body, xs, ks = WARM[name]
    f = rg.jit(body, static_argnames="k")
    with jax.enable_x64(x64):
        for again, x, k in itertools.product(range(3), xs, ks):
            traces, due = f.cache_info().traces, np.asarray(body(x, k), dtype=float)
            for y in f(x, k), f(x, k=k), f(k=k, x=x):
                np.testing.assert_allclose(y.numpy(), due, rtol=1e-6)
                assert (np.signbit(y.numpy().astype(float)) == np.signbit(due)).all()
            assert not again or f.cache_info().traces == traces
    if name == "static values":
        assert f.cache_info().traces == 3 * len(ks), "once for each way to call"


def test_what_is_refused_is_refused_every_time():
    f, of_dict = rg.jit(lambda x, y=0.0: x * 2.0 + y), rg.jit(lambda p, x: p["w"] + x)
    cyclic, deep = [], X
    cyclic.append(cyclic)
    for _ in range(300):
        deep = (deep,)
    for _ in range(3):
        assert f({"x": X}["x"], y=1).shape == (3,)
        assert of_dict({"w": N}, 1.0).dtype == np.float32
        assert isinstance(rg.jit(lambda x: x)(deep), tuple)
        for bad in object(), {1, 2}:
            with pytest.raises(ArgumentError, match="expected Tensors, arrays"):
                f(X, bad)
        for call in called(cyclic), called(x={"a": cyclic}):
            with pytest.raises(ArgumentError, match="holds itself"):
                call(f)
        with pytest.raises(TypeError):
            f()
        with pytest.raises(KeyError):
            of_dict({"b": X}, 1.0)
        with pytest.raises(ArgumentError, match="Loud"):
            of_dict(Loud(w=X), 1.0)
        with jax.enable_x64(False):
            for call in called(X, y=np.ones(3)), called(np.array([0.1], ">f8")):
                with pytest.raises(DTypeError, match="JAX cannot hold float64"):
                    call(f)
            with pytest.raises(DTypeError, match="JAX cannot hold float64"):
                of_dict({"w": np.full(3, 0.1)}, 1.0)
            for call in called(X, 2**40), called(np.array([2**40])):
                with pytest.raises(RegradError):
                    call(f)
        with jax.enable_x64(True):
            y = of_dict({"w": np.full(3, 0.1)}, 1.0)
            assert y.dtype == np.float64 and y.numpy()[0] == 1.1


@pytest.mark.slow
def test_results_of_each_kind_again_and_again():
    """One Tensor alone, with a Variable read, with one assigned, in a container, and a number."""
    v = rg.Variable(rg.asarray(jnp.ones(3)))

    def counted(x):
        v.assign_add(1.0)
        return x * v

    bodies = [(lambda x: x * 2.0, lambda x: [2 * x]), (lambda x: x * v, lambda x: [x]),
              (counted, lambda x: [2 * x]), (lambda x: [x * 2.0], lambda x: [2 * x]),
              (lambda x: None, lambda x: []), (lambda x: (x, 3), lambda x: [x, 3])]  # fmt: skip
    for (body, due), x in itertools.product(bodies, (X, rg.asarray(N))):
        f = rg.jit(body)
        for _ in range(3):
            v.assign([1.0] * 3)
            for y, expected in zip(optree.tree_leaves(f(x)), due(x.numpy()), strict=True):
                np.testing.assert_array_equal(np.asarray(y), expected)


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
    names, hidden = {Path(e.path).name for e in caught.traceback}, {"<string>", "quick_calls.py"}
    assert Path(__file__).name in names and not names & (hidden | {"shortcuts.py"})


# -- what is written into a call -------------------------------------------------------------------


@pytest.mark.slow
def test_results_in_other_containers_for_other_shapes():
    """Those of the first trace come without a mark; the others are told apart."""
    twins = [NamedTuple("Twin", [("a", object), ("b", object)]) for _ in range(2)]
    made = [*twins, lambda a, b: {"a": a, "b": b}, lambda a, b: {"b": b, "a": a},
            lambda a, b: [a, (b, None)], lambda a, b: (a, 7, b)]  # fmt: skip
    body = lambda x: made[x.shape[0] - 1](x, x * 2.0)  # noqa: E731

    for start in range(1, 7):
        f = rg.jit(body)
        for n in [start] * 4 + [1, 2, 3, 4, 5, 6] * 3:
            x = rg.asarray(jnp.arange(float(n)))
            got, due = f(x), body(x)
            assert optree.tree_structure(got) == optree.tree_structure(due)
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
    strike(step.road, lambda: v.assign([10.0] * 3))
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
    space = SimpleNamespace(array=array)
    body = {
        "cell": lambda x: rg.multiply(x, array), "attribute": lambda x: rg.multiply(x, space.array),
    }.get(where, lambda x: rg.multiply(x, held[0]))  # fmt: skip
    f = rg.jit(body)
    for i in range(6):
        if i % 2:
            array[...] += 1.0
        for _ in range(2):
            np.testing.assert_array_equal(f(X).numpy(), X.numpy() * array)
    if where in ("list", "dict"):
        held[0] = array * 2.0
        for _ in range(3):
            np.testing.assert_array_equal(f(X).numpy(), X.numpy() * held[0])


@pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
def test_names_that_go_and_come(monkeypatch):
    entries, factor = [1.0, 2.0], 3.0
    f = lambda x: x * (scale if "scale" in globals() else 1.0) * sum(entries) * factor  # noqa: E731, F821
    compiled = rg.jit(f)
    for i in range(3):
        for value in (2.0, 5.0 + i):
            monkeypatch.setitem(globals(), "scale", value)
            entries[1] = float(str(2 + i))  # (another object, and every second time an equal one)
            for _ in range(2):
                np.testing.assert_allclose(compiled(X).numpy(), f(X).numpy())
        del factor
        with pytest.raises(NameError):
            compiled(X)
        factor = 4.0 + i
        monkeypatch.delitem(globals(), "scale")
        np.testing.assert_allclose(compiled(X).numpy(), f(X).numpy())


@pytest.mark.slow
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


# -- an array that is filled again after a call is read as it was at the call ----------------------

ONE = rg.tensor(1.0)


def late(x, y):
    """The product, which XLA computes long after the call has returned."""
    m = rg.full((300, 300), 0.01)
    for _ in range(40):
        m = rg.tanh(m @ m)
    return x * (y + 0.0 * m.sum())


def buffer(n, aligned):
    """Memory that JAX takes as it is, if it is aligned, and copies in another thread otherwise."""
    space = np.empty(4 * n + 128, np.uint8)
    start = -space.ctypes.data % 64 + (0 if aligned else 4)
    return space[start : start + 4 * n].view(np.float32)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("n", [16, 200_000])
@pytest.mark.parametrize("way", ["argument", "in a dict", "closure"])
def test_a_buffer_is_read_at_the_call(way, n, aligned):
    b = buffer(n, aligned)
    f = {"argument": rg.jit(lambda x: late(x, ONE)),
         "in a dict": rg.jit(lambda d: late(d["x"], ONE)),
         "closure": rg.jit(lambda _: late(rg.tensor(2.0), ONE) * b / 2.0)}[way]  # fmt: skip
    given = {"x": b} if way == "in a dict" else ONE if way == "closure" else b
    for i in range(1, 6):
        b[:] = i
        y = f(given)
        b[:] = -1.0
        assert y.numpy().min() == y.numpy().max() == i
