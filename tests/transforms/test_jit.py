"""`rg.jit`: what goes in and out, when it is traced anew, threads, and the program as text.

`test_refusals.py` has what is refused.
"""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import ArgumentError, GradientError, RetraceWarning, TraceError
from regrad.transforms import program
from tests.helpers.quick import Counting, nothing_is_left_open
from tests.transforms.regions import REGIONS

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)
ONE, X = rg.scalar(1.0), rg.tensor([1.0, 2.0])


# -- what goes in and out --------------------------------------------------------------------------


class Pair(NamedTuple):
    a: object
    b: object


def test_containers_go_in_and_out():
    @rg.jit
    def f(batch, *rest, scale):
        x, y = batch["x"], batch["y"]
        return {"sum": x + y[0], "pair": Pair(rest[0] * scale, "label")}, [None, True, 3, "text"]

    found, plain = f({"x": ONE, "y": (rg.scalar(2.0),)}, rg.scalar(5.0), scale=2.0)
    assert found["sum"].item() == 3.0 and type(found["pair"]) is Pair
    assert (found["pair"].a.item(), found["pair"].b) == (10.0, "label")
    assert plain == [None, True, 3, "text"]
    assert rg.jit(lambda: None)() is None and rg.jit(lambda: 3)() == 3
    assert rg.jit(lambda: rg.ones((2,)))().tolist() == [1.0, 1.0]


def test_arrays_come_in_as_tensors():
    kinds = []
    f = rg.jit(lambda *xs: kinds.extend(map(type, xs)) or [x * 2 for x in xs])
    ones = [np.ones(2), jnp.ones(2), rg.ones((2,)), [1.0, 2.0], rg.Variable([1.0, 1.0])]
    ys = f(*ones, np.float32(3))
    assert set(kinds) == {rg.Tensor}
    assert [y.tolist() for y in ys] == [[2, 2], [2, 2], [2, 2], [2, 4], [2, 2], 6]
    assert [str(y.dtype) for y in ys] == ["float64"] * 2 + ["float32"] * 4
    g = rg.jit(lambda x: x + 1)
    assert g(rg.asarray(np.array([2**40]))).tolist() == [2**40 + 1]
    assert g(np.float64(1e-12)).item() == 1 + 1e-12


@pytest.mark.parametrize("value", [2, 2.5, True, np.float64(2.0), np.int32(2)])
def test_numbers_among_the_arguments_are_traced(value):
    f = Counting(lambda x, n: x * n)
    g = rg.jit(f)
    assert g(rg.scalar(3.0), value).item() == 3 * value
    assert g(rg.scalar(3.0), type(value)(0)).item() == 0 and f.runs == 1


@pytest.mark.parametrize("value", [None, "mean", (1, "a"), np.sum, rg.sin])
def test_other_arguments_are_static(value):
    f = Counting(lambda x, s: (x * 2, s))
    g = rg.jit(f)
    assert [g(ONE, value)[1] for _ in range(2)] == [value] * 2
    g(ONE, "another")
    assert f.runs == 2


def test_static_arguments():
    f = lambda x, n, axis=0: rg.sum(rg.tile(x, (n, 1)), axis=axis)  # noqa: E731
    g = rg.jit(f, static_argnames=("n", "axis"))
    for args, named, due in [
        ((2,), {}, [2, 4]), ((), {"n": 2, "axis": 1}, [3, 3]), ((3, 0), {}, [3, 6]),
        ((2,), {"axis": 0}, [2, 4]),
    ]:  # fmt: skip
        assert g(rg.tensor([[1.0, 2.0]]), *args, **named).tolist() == due
    assert g.cache_info().traces == 4  # (an argument given or left out is another call)
    h = lambda x, n, *rest, k=1: x * len(range(n)) * len(rest) * k  # noqa: E731
    assert rg.jit(h, static_argnums=(1, 2, 3))(X, 2, 1, 1).tolist() == [4.0, 8.0]
    assert rg.jit(h, static_argnums=-3)(X, 2, 1.0, k=3).tolist() == [6.0, 12.0]
    named = functools.partial(rg.jit, static_argnums=1)(lambda x, n: x * len("a" * n))
    assert named(X, n=3).tolist() == [3.0, 6.0]
    at_first = rg.jit(lambda *args: rg.reshape(args[-1], (args[0], 1)), static_argnums=0)
    assert at_first(2, X).shape == (2, 1)


class Model:
    """A model in JAX's manner, with self among the static arguments."""

    rate = 2.0

    @functools.partial(rg.jit, static_argnums=0)
    def by_place(self, x, n):
        return x * self.rate * n

    @functools.partial(rg.jit, static_argnums=(-1, -3))
    def from_the_end(self, x, n):
        return x * self.rate * len(range(n))

    @functools.partial(rg.jit, static_argnames=("self", "n"))
    def by_name(self, x, n):
        return x * self.rate * len(range(n))


@pytest.mark.parametrize("method", ["by_place", "from_the_end", "by_name"])
def test_self_may_be_called_static(method):
    model = Model()
    for model.rate in 2.0, 3.0:
        assert getattr(model, method)(X, 2).tolist() == [2 * model.rate, 4 * model.rate]


def test_donated_arguments_are_used_up():
    f = rg.jit(lambda state, x: state + x, donate="state")
    state = rg.asarray(jnp.arange(4.0))
    for _ in range(3):
        before, state = state, f(state, ONE)
    assert state.tolist() == [3.0, 4.0, 5.0, 6.0]
    with pytest.raises((ArgumentError, RuntimeError), match=r"(?i)donate|delete"):
        before.numpy()


def test_the_result_of_an_argument_handed_through_is_readable():
    x, f = rg.asarray(jnp.arange(3.0)), rg.jit(lambda x: (x, x * 2))
    y, _ = f(x)
    f(x)
    assert x.tolist() == y.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.slow
def test_random_keys():
    f = rg.jit(lambda key, x: x + rg.random.normal(key, (3,)))
    a, b = jax.random.split(jax.random.key(0))
    x, due = rg.zeros((3,)), rg.random.normal(a, (3,))
    np.testing.assert_allclose(f(a, x).numpy(), due.numpy(), rtol=1e-6)
    assert f(a, x).tolist() == f(a, x).tolist() != f(b, x).tolist()
    assert f.cache_info().traces == 1
    assert rg.jit(lambda key: jax.random.split(key))(a).shape == (2,)
    assert rg.grad(lambda x: f(a, x).sum())(x).tolist() == [1.0] * 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: object
    power: int = dataclasses.field(default=1, metadata={"static": True})


class Box:
    def __init__(self, w):
        self.w = w


class JaxBox(Box):
    pass


optree.register_pytree_node(Box, lambda b: ((b.w,), None), lambda _, c: Box(*c), namespace="regrad")
jax.tree_util.register_pytree_node(JaxBox, lambda b: ((b.w,), 0), lambda _, c: JaxBox(*c))


@pytest.mark.parametrize("make", [Layer, Box, JaxBox])
def test_registered_classes_are_containers(make):
    f = rg.jit(lambda model, x: type(model)(x * model.w))
    for w in (2.0, 3.0):
        assert f(make(rg.scalar(w)), X).w.tolist() == [w, 2 * w]
    assert f.cache_info().traces == 1
    dx = rg.grad(lambda model: (model.w * X).sum())(make(rg.tensor([1.0, 1.0])))
    assert type(dx) is make and dx.w.tolist() == [1.0, 2.0]


def test_static_fields_are_told_apart_exactly():
    f = rg.jit(lambda layer, x: x * layer.w**layer.power)
    for power in (1, 2, True, 1):
        assert f(Layer(rg.scalar(3.0), power), X).tolist() == [3.0**power, 2 * 3.0**power]
    assert f.cache_info().traces == 3


@pytest.mark.parametrize("value", [Model(), object(), {1, 2}, slice(2), range(3)], ids=type)
def test_other_objects_are_refused(value):
    words = "Pass its tensors.*register_dataclass.*closure.*static_argnames"
    path = rf"the argument deep\['model'\]\[0\] is {type(value).__name__}: expected Tensors"
    with pytest.raises(ArgumentError, match=f"{path}.*{words}"):
        rg.jit(lambda x, deep: x)(X, {"model": [value]})
    with pytest.raises(ArgumentError, match=rf"the argument layer.w is {type(value).__name__}"):
        rg.jit(lambda layer, x: x * layer.w, donate="layer")(Layer(value), X)


# -- traces ----------------------------------------------------------------------------------------


def test_cache_info():
    f = rg.jit(lambda x: x * 2)
    assert f.cache_info() == (0, 0, 0, 0)
    for x in (rg.ones((2,)),) * 3 + (rg.ones((3,)), np.ones(2)):
        f(x)
    assert f.cache_info() == (2, 3, 1, 0)


TABLE = np.zeros(1)
WARNED = [
    (lambda x, k: x * FACTOR, lambda n: globals().update(FACTOR=n),  # noqa: F821
     "the value of FACTOR in the closure, from 6 to 7"),
    (lambda x, k: rg.sum(x["x"]), lambda n: None, r"x\['x'\], from float32\(6,\) to float32\(7,\)"),
    (lambda x, k: ONE, lambda n: None, "a static argument"),
    (lambda x, k: ONE * float(TABLE[0]), lambda n: TABLE.fill(n),
     "content of a NumPy array that the function reads"),
]  # fmt: skip


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("f", "change", "words"), WARNED, ids=["global", "shape", "static", "array"]
)
def test_a_warning_names_what_changed(f, change, words):
    compiled = rg.jit(f, static_argnames="k")
    with pytest.warns(RetraceWarning, match=words):
        for n in range(8):
            change(n)
            x = {"x": rg.ones((n,))} if "float32" in words else ONE
            compiled(x, str(n) if "static" in words else "")


def test_tensors_that_outlive_their_trace():
    kept = []
    rg.jit(lambda x: kept.append(x * 2) or x)(ONE)
    again, closing = rg.jit(lambda z: z * 2), rg.jit(lambda z: z * kept[0])
    for use in (
        lambda y: y + 1, lambda y: y.numpy(), again, closing, float, rg.grad(rg.sin),
        rg.grad(again),
    ):  # fmt: skip
        with pytest.raises(TraceError, match="trace"):
            use(kept[0])
    assert "traced" in str(kept[0])


def test_exceptions_pass_through():
    def f(x):
        with rg.gradient_override_map({"Sign": "Identity"}):
            raise ZeroDivisionError(rg.sign(x))

    for g in (rg.jit(f), rg.grad(rg.jit(f)), rg.jit(rg.grad(f)), rg.jit(rg.vmap(f))):
        with pytest.raises(ZeroDivisionError):
            g(rg.ones((2,)))
        assert current() is None
    assert rg.grad(rg.jit(rg.sign))(ONE).item() == 0.0


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


# -- threads and tasks -----------------------------------------------------------------------------


@pytest.mark.slow
def test_threads_call_one_function_at_once():
    f, sizes = rg.jit(lambda x: (x * x).sum()), (1, 2, 3)

    def work(i):
        xs = [rg.ones((n,)) * i for n in sizes]
        return [(f(x).item(), rg.grad(f)(x).tolist()) for x in xs]

    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(work, range(4))]
    for i, pairs in enumerate(found):
        assert pairs == [(float(n * i * i), [2.0 * i] * n) for n in sizes]


# A call on a Tensor that another thread differentiates raises, whatever the call is.
WARM = rg.jit(rg.sin)
CALLS = {
    "jit, cold": lambda x: rg.jit(rg.sin)(x), "jit, warm": WARM,
    "jit of what ignores it": rg.jit(lambda x: 1.0),
    "jit of a container": lambda x: rg.jit(lambda d: rg.sin(d["a"]))({"a": x}),
    "jit of a closure": lambda x: rg.jit(lambda a: rg.sin(x) * a)(1.0),
    "jit of grad": rg.jit(rg.grad(rg.sin)), "grad": rg.grad(rg.sin),
    "grads": lambda x: rg.grads(rg.sin)([x])[0], "value_and_grad": rg.value_and_grad(rg.sin),
    "grad of a closure": lambda x: rg.grad(lambda a: a * x)(2.0),
    "variable_grads of a closure": lambda x: rg.variable_grads(lambda: rg.sin(x))[0],
    "vjp": lambda x: rg.vjp(rg.sin, x)[0], "jvp": lambda x: rg.jvp(rg.sin, [x], [1.0]),
    "hvp": lambda x: rg.hvp(rg.sin, [x], [1.0]), "linearize": lambda x: rg.linearize(rg.sin, x)[0],
    "jacobian": rg.jacobian(rg.sin), "hessian": rg.hessian(rg.sin),
    "checkpoint": rg.checkpoint(rg.sin),
    "custom_grad": rg.custom_grad(lambda x, save: (rg.sin(x), lambda dy: dy)),
    "scan": lambda x: rg.scan(lambda c, _: (rg.sin(c), None), x, None, 2)[0],
    "cond": lambda x: rg.cond(True, rg.sin, rg.cos, x),
    "vmap": lambda x: rg.vmap(rg.sin)(rg.expand_dims(x, axis=0)),
}  # fmt: skip


def elsewhere(f, x):
    """Return the result of f in another thread, or raise its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f, x).result()


@pytest.mark.parametrize("library", [np, jnp])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_elsewhere_raises(name, library):
    for _ in range(4):
        WARM(rg.scalar(0.5))

    def outer(x):
        with pytest.raises(GradientError, match="another thread is differentiating an input of"):
            elsewhere(CALLS[name], x)
        return x * 3.0

    assert rg.grad(outer)(rg.asarray(library.asarray(0.7, dtype="float32"))).item() == 3.0


def test_reading_a_variable_elsewhere_is_allowed():
    w = rg.Variable(2.0, name="w")
    f = rg.jit(lambda: w * 3.0)
    answers = []

    def loss():
        y = w * w
        answers.extend(elsewhere(lambda _: (w * 3.0).item(), None) for _ in range(2))
        answers.extend(elsewhere(lambda _: f().item(), None) for _ in range(4))
        return y

    assert rg.variable_grads(loss).grads["w"].item() == 4.0
    assert answers == [6.0] * 6


# -- constants: large ones are ops of the program, small ones values -------------------------------

N = 300
MAKERS = {
    "zeros": lambda: rg.zeros((N, 2)), "ones": lambda: rg.ones((N, 2), dtype=rg.bool),
    "arange": lambda: rg.arange(N), "arange down": lambda: rg.arange(N, -N, -3),
    "arange of floats": lambda: rg.arange(3, N, 2, dtype=rg.float32),
    "arange by tenths": lambda: rg.arange(0.0, 30.0, 0.1),
    "linspace": lambda: rg.linspace(-1.0, 2.0, N),
    "linspace, open": lambda: rg.linspace(0, 3, N, endpoint=False), "eye": lambda: rg.eye(N // 10),
    "eye, wide": lambda: rg.eye(9, N, k=2, dtype=rg.int32),
    "tril": lambda: rg.tril(rg.ones((N // 10, N // 10))),
    "one_hot": lambda: rg.one_hot(rg.arange(N) % 4, 4), "full": lambda: rg.full((N,), 2.5),
    "wide integers": lambda: rg.arange(2**40, 2**40 + N) - 2**40,
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("x64", [False, True])
def test_their_values_are_those_of_eager_mode(name, x64):
    make = MAKERS[name]
    with jax.enable_x64(x64):
        got = rg.jit(make)()
    due = make()
    np.testing.assert_allclose(got.numpy(), due.numpy(), rtol=2e-6, atol=1e-6)
    assert got.dtype == due.dtype or (not x64 and due.dtype == np.int64)


@pytest.mark.parametrize("name", ["arange", "linspace", "eye", "tril", "one_hot"])
def test_no_literal_is_built_in(name):
    make = MAKERS[name]
    jaxpr = jax.make_jaxpr(lambda a: rg.jit(lambda x: rg.sum(make() * x))(rg.asarray(a)).data)
    consts = jax.tree.leaves(jaxpr(jnp.ones(())).consts)
    assert sum(np.size(c) for c in consts) <= 64
    assert "iota" in str(jaxpr(jnp.ones(())))


def test_small_ones_are_read():
    f = rg.jit(lambda x: sum(x * float(i) for i in rg.arange(4)))
    assert f(2.0).item() == 12.0


LINE = lambda y: rg.sin(y) * rg.linspace(0.0, 1.0, N)  # noqa: E731
REPLAYED = {
    **{name: REGIONS[name](LINE) for name in ("jit", "checkpoint", "cond", "scan", "fori_loop")},
    "cond, closure": lambda x: rg.cond(rg.sum(x) > 0, lambda: x * rg.arange(N), lambda: x * 2),
    "vmap": lambda x: rg.vmap(lambda a: a * rg.ones(N))(x)[0],
    "custom": rg.custom_grad(lambda y: (y * rg.ones(N), lambda dy: dy * rg.arange(N))),
    "grad": rg.grad(lambda y: rg.sum(LINE(y)), argnums=0),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("f", REPLAYED.values(), ids=REPLAYED)
def test_they_are_made_anew_where_a_body_is_replayed(f):
    x = rg.asarray(np.linspace(0.1, 1.0, N).astype(np.float32))
    loss = lambda x: rg.sum(rg.sin(f(x)))  # noqa: E731
    due = rg.grad(loss)(x).numpy()
    second = rg.grad(lambda x: rg.sum(rg.grad(loss)(x) * x))
    for g in rg.jit(rg.grad(loss)), rg.grad(rg.jit(loss)):
        np.testing.assert_allclose(g(x).numpy(), due, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(rg.jit(second)(x).numpy(), second(x).numpy(), rtol=1e-3, atol=1e-2)


def test_waiting():
    y = rg.jit(lambda x: {"a": [x @ x], "b": 3})(rg.ones((2, 2)))
    assert rg.block_until_ready(y) is y
    assert jax.block_until_ready(y["a"][0]) is y["a"][0]
    v = rg.Variable(1.0)
    rg.jit(lambda: v.assign_add(1.0))()
    assert rg.block_until_ready([v, np.ones(2), None, jnp.ones(2)])[0] is v
    assert rg.jit(lambda x: rg.block_until_ready(x) + 1)(1.0).item() == 2.0


def test_it_waits(monkeypatch):
    waited = []
    array = type(jnp.ones(2))
    monkeypatch.setattr(array, "block_until_ready", lambda self: waited.append(self))
    rg.block_until_ready([{"v": rg.Variable(jnp.ones(3))}, rg.asarray(jnp.ones(2))])
    assert [a.shape for a in waited] == [(3,), (2,)]


@pytest.mark.parametrize("f", [rg.sin, lambda x: x, rg.jit(rg.sin)], ids=["op", "lambda", "jit"])
def test_there_is_nothing_to_wait_for_in_a_function(f):
    assert rg.block_until_ready({"f": f, "x": 1.0})["f"] is f


# -- f.lower ---------------------------------------------------------------------------------------


def test_the_program_is_lowered_and_compiled_but_does_not_run():
    w = rg.Variable([1.0, 2.0])
    step = rg.jit(lambda x: (w.assign_sub(0.1 * x), rg.sin(w))[1])
    lowered = step.lower(rg.scalar(2.0))
    assert "stablehlo.sine" in lowered.as_text()
    assert lowered.compile().memory_analysis() is not None
    assert w.numpy().tolist() == [1.0, 2.0]
    step(rg.scalar(2.0))
    assert step.cache_info().traces == 1  # which the call found


def test_static_arguments_shapes_rules_and_objects_are_in_it():
    f = rg.jit(lambda x, n: x * n, static_argnames="n")
    text = f.lower(rg.zeros((2, 5)), n=3).as_text()
    assert "dense<3.0" in text and "2x5xf32" in text
    gradient = rg.jit(rg.grad(rg.sin))
    assert "cosine" in gradient.lower(1.0).as_text()
    with rg.gradient_override_map({"Sin": lambda dy: dy * 7}) as overrides:
        text = gradient.lower(1.0).as_text()
    assert "cosine" not in text and "7.0" in text
    overrides.assert_fired("Sin")
    model = Model()
    for model.rate in 3.0, 5.0:
        assert f"dense<{model.rate}" in model.by_place.lower(ONE, 1.0).as_text()


@pytest.mark.slow
def test_threads_have_overrides_of_their_own():
    f = rg.jit(rg.sign)

    def work(i):
        with rg.gradient_override_map({"Sign": lambda dy: dy * i}):
            return [rg.grad(f)(ONE).item() for _ in range(5)]

    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(work, i) for i in (1.0, 2.0, 3.0)]
        assert rg.grad(f)(ONE).item() == 0.0
        assert [each.result() for each in found] == [[i] * 5 for i in (1.0, 2.0, 3.0)]
