"""What compiled functions hold on to between calls."""

import gc
import itertools
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core.state import LIVE
from regrad.core.tensor import wrap
from regrad.errors import RetraceWarning
from regrad.transforms import jit
from regrad.v1.run import compiled_plans
from tests.helpers.quick import full_effort
from tests.transforms.regions import REGIONS

pytestmark = pytest.mark.usefixtures(full_effort.__name__)


def gone(reference):
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("make", [lambda x: {"x": rg.tensor(x)}, rg.tensor], ids=["dict", "Tensor"])
def test_arguments_are_let_go(make, calls):
    step = rg.jit(lambda x: ((x["x"] if isinstance(x, dict) else x) * 2).sum())
    held = []
    for _ in range(calls):
        x = jnp.ones(1000) + 1
        held.append(weakref.ref(x))
        step(make(x)).item()
        del x
    assert [gone(reference) for reference in held] == [True] * calls


def test_former_values_of_variables_are_let_go():
    w = rg.Variable(jnp.ones(1000))
    total = rg.jit(lambda: (w * w).sum())
    loss = rg.variable_grads(lambda: total())
    held = weakref.ref(w.value.data)
    w.assign(w.value + 1)
    del loss
    assert gone(held)


def test_a_function_is_traced_once_and_again_for_what_it_takes_from_outside():
    runs = itertools.count()

    def f(x):
        next(runs)
        return x * x

    rg.jit(f)(rg.tensor([1.0]))
    assert next(runs) == 1
    w = rg.Variable([2.0])
    g = rg.jit(lambda x: f(x) * w)
    assert [g(rg.tensor([1.0])).item() for _ in range(2)] == [2.0, 2.0]
    assert next(runs) == 3 and g.cache_info().traces == 1  # (the Variable is an input, for which
    # what was captured is traced again, not the Python)


@pytest.mark.parametrize("u", [2.0, rg.Variable(2.0)], ids=["a number", "a Variable"])
def test_what_a_function_takes_for_other_shapes_only_is_found(u):
    w = rg.Variable(3.0)
    f = rg.jit(lambda x: x * (u if len(x) == 1 else w))
    assert f(rg.tensor([1.0])).tolist() == [2.0]
    assert f(rg.tensor([1.0, 2.0])).tolist() == [3.0, 6.0]
    w.assign(4.0)
    assert f(rg.tensor([1.0, 2.0])).tolist() == [4.0, 8.0]


def test_what_a_loop_gives_out_is_not_kept_a_second_time():
    def looped(w, h, xs):
        step = lambda h, x: (y := rg.tanh(w * h + x), (x, y))  # noqa: E731
        last, (_, ys) = rg.scan(step, h, xs, reverse=True)
        return (ys * ys).sum() + last.sum()

    given = jnp.float32(0.5), jnp.ones(3), jnp.linspace(0, 1, 15).reshape(5, 3)
    traced = lambda *xs: [dx._data for dx in rg.grads(looped)([*map(wrap, xs)])]  # noqa: E731
    equations = jax.make_jaxpr(traced)(*given).jaxpr.eqns
    forward, _ = [e for e in equations if e.primitive.name == "scan"]
    stacked = [v for v in forward.outvars if v.aval.shape == (5, 3)]
    assert len(stacked) == 2  # y, which f gives out, and the h of each step (x is there)


# What was made of a function for good (JAX keeps structures and programs) must not keep it alive,
# nor what it closes over: programs made in a loop would fill the memory.

BODIES = {
    name: lambda x, name=name: REGIONS[name](lambda e: rg.sin(e) * e)(x)
    for name in ("alone", "cond", "scan, ys", "checkpoint", "jit")
}
BODIES["custom"] = lambda x: rg.custom_grad(
    lambda e: (e * e, lambda dy: rg.grad(lambda z: rg.sum(z * z * dy))(e))
)(x)
TRANSFORMED = {
    "jit": rg.jit, "jit, verify": lambda f: twice(rg.jit(f, verify=True)),
    "grad of jit": lambda f: rg.grad(rg.jit(f)), "jit of grad": lambda f: rg.jit(rg.grad(f)),
    "hessian of jit": lambda f: rg.hessian(rg.jit(f)),
    "jit of vmap": lambda f: rg.jit(rg.vmap(lambda x: f(rg.stack([x])))),
}  # fmt: skip


def twice(f):
    return lambda x: (f(x), f(x))


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_functions_are_let_go(body, transformed):
    def used():
        held, errors = rg.Module(), []

        def f(x):
            try:
                rg.matmul(x, held)
            except rg.errors.ArgumentError as error:
                errors.append(error)  # its traceback holds the frames of the trace
            return rg.sum(body(x))

        transformed(f)(rg.tensor([1.0, 2.0]))
        assert errors
        return weakref.ref(held)

    assert gone(used()) and not LIVE


# -- programs make room for others -----------------------------------------------------------------


@pytest.fixture
def few(monkeypatch):
    """Only four programs are kept."""
    monkeypatch.setattr(jit, "KEPT", 4)
    monkeypatch.setattr(compiled_plans, "KEPT", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        yield


def alive(programs):
    gc.collect()
    return len({program() for program in programs} - {None})


def newest(f):
    """The programs of XLA that a compiled function made last, as it holds them."""
    return weakref.ref([*next(reversed(f.programs.values())).variants.values()][-1])


def in_a_closure(k):
    factor[0] = float(k)
    return 2.0


factor = [1.0]
STATES = {
    "static values": (rg.jit(lambda x, k: x * k, static_argnames="k"), lambda k: (2.0, k)),
    "shapes": (rg.jit(lambda x: rg.sum(x)), lambda k: (rg.full(k + 1, 2.0 * k / (k + 1)),)),
    "closures": (rg.jit(lambda x: x * factor[0]), lambda k: (rg.scalar(in_a_closure(k)),)),
    "arrays": (rg.jit(lambda x, a: rg.sum(x * a)), lambda k: ([2.0 * k / (k + 1)] * (k + 1), 1.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("f", "arguments"), STATES.values(), ids=STATES)
@pytest.mark.usefixtures("few")
def test_programs_make_room_for_others(f, arguments):
    made = []
    for k in [*range(12), *range(12)]:
        assert f(*arguments(k)).item() == pytest.approx(2.0 * k)
        made.append(newest(f))
        assert alive(made) <= 5  # with that of the last call
    info = f.cache_info()
    assert info.traces >= 20 and info.programs <= 5 and info.dropped >= 4
    assert sum(program.size for program in f.programs.values()) <= 5


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_the_program_that_was_used_longest_ago_goes():
    f = rg.jit(lambda x, k: x * k, static_argnames="k")
    for k in range(1, 12):
        assert [f(3.0, 0).item(), f(3.0, k).item()] == [0.0, 3.0 * k]
    info = f.cache_info()
    assert (info.traces, info.hits) == (12, 10)  # 0 stays, since it is used all the time


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_gradient_outlives_its_program():
    f = rg.jit(lambda x, k: x * x * k, static_argnames="k")

    total = lambda x: sum(f(x, k) for k in range(10))  # noqa: E731
    assert rg.grad(total)(3.0).item() == 2 * 3.0 * 45
    assert rg.grad(rg.grad(total))(3.0).item() == 2 * 45
    assert f.cache_info().programs <= 5


@pytest.mark.usefixtures("few")
def test_what_cannot_be_traced_takes_no_room_for_good():
    f = rg.jit(lambda x, k: x if x > k else -x, static_argnames="k")
    for k in range(12):
        with pytest.raises(rg.errors.TraceError):
            f(1.0, k)
    assert len(f.programs) <= 5


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_programs_of_arrays_that_were_read_are_dropped_with_their_content():
    mask = np.ones(3, bool)
    f = rg.jit(lambda x, k: rg.sum(x[np.flatnonzero(mask)]) * k, static_argnames="k")
    for k in range(12):
        mask[:] = [True, bool(k % 2), False]
        assert f([1.0, 2.0, 4.0], k).item() == (3.0 if k % 2 else 1.0) * k
        assert f([1.0, 2.0, 4.0], 0).item() == 0.0
    assert len(f.programs) <= 10 and len(f.read) <= 5


@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_sessions_compile_anew_after_many_shapes():
    with tf.Graph().as_default(), tf.Session(jit=True) as session:
        x = tf.placeholder(tf.float32, [None])
        y = tf.gradients(tf.reduce_sum(x * x), x)[0]
        made = []
        for n in range(1, 20):
            assert session.run(y, {x: np.ones(n)}).tolist() == [2.0] * n
            plan = session._plan((y._symbol,), (), (x._symbol,))
            made.append(weakref.ref(plan.program))
            assert plan.traces <= 4
        assert alive(made) == 1
