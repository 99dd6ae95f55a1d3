"""One body object in each construct, while what decides about its gradient changes.

JAX keeps what it has traced by function object. So each construct is called with the same objects
in one process, under one map of overrides and another, under none, and under the first one again:
what a trace has bound for one of them must not serve another. The same holds for the keys under
which programs are kept.
"""

import itertools
import types
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.core import registry
from tests.roads import ROADS
from tests.transforms.regions import REGIONS, in_both_branches

pytestmark = pytest.mark.filterwarnings("ignore::regrad.errors.RetraceWarning")
VALUES = np.array([0.5, -1.0], np.float32)
X = rg.tensor(VALUES)


def constructs(body):
    """Functions that run the body once; the objects inside are the same in each call."""
    made = {name: region(body) for name, region in REGIONS.items()}
    scan_of_cond = REGIONS["scan"](made["cond"])
    return made | {"the other branch": lambda x: rg.cond(rg.sum(x) > 10, rg.zeros_like, body, x),
                   "jit of scan": rg.jit(made["scan"]), "cond in scan": scan_of_cond,
                   "vmap of checkpoint": rg.vmap(made["checkpoint"]),
                   "checkpoint of jit of scan": rg.checkpoint(rg.jit(made["scan"]))}  # fmt: skip


def roads(f):
    """Ways to a gradient of f, of which each object is used for all calls."""
    total = lambda x: rg.sum(f(x))  # noqa: E731
    gradient = rg.grad(total)
    compiled, forward = rg.jit(gradient), rg.jit(total)
    return {"eager": gradient, "jit of grad": compiled, "grad of jit": rg.grad(forward),
            "jit anew": lambda x: rg.jit(rg.grad(total))(x),
            "jit of jit": rg.jit(lambda x: compiled(x)),
            "jit of grad of jit": rg.jit(rg.grad(forward)),
            "grad of grad": rg.jit(rg.grad(lambda x: rg.sum(gradient(x) * x))),
            "forward mode": lambda x: rg.jvp(f, (x,), (rg.ones_like(x),))[1]}  # fmt: skip


T = np.tanh(VALUES)
OWN = {"grad of grad": (1 - T**2) * (1 - 2 * VALUES * T)}  # of x tanh'(x); else tanh'(x)
CONSTRUCTS = constructs(rg.tanh)
A, B = {"Tanh": lambda dy: dy * 5.0}, {"Tanh": lambda dy: dy * 7.0}
ORDER = [(A, 5), (B, 7), (None, 0), (A, 5), (A, 5), (None, 0), (None, 0), (B, 7), (B, 7), (A, 5)]


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("name", CONSTRUCTS)
@pytest.mark.parametrize("way", roads(rg.tanh))
def test_one_body_under_one_map_and_another(name, way):
    road = roads(CONSTRUCTS[name])[way]
    for rules, factor in ORDER:
        with rg.gradient_override_map(rules) if rules else nullcontext() as used:
            dx = road(X).numpy()
        due = np.full(2, factor) if rules else OWN.get(way, 1 - T**2)
        np.testing.assert_allclose(dx, due, rtol=1e-5)
        if used:
            used.assert_fired("Tanh")


# -- what a rule reaches ---------------------------------------------------------------------------

GLOBAL = 5.0


def rules():
    """Rules that give dy times 5, each with a function after which it gives dy times a number."""
    k = 5.0

    def rebind(to):
        nonlocal k
        k = to

    listed, named, held = [5.0], {"k": 5.0}, types.SimpleNamespace(k=5.0)
    array, default, box = np.array(5.0, np.float32), [5.0], [rg.tensor(5.0)]
    variable, module = rg.Variable(np.float32(5.0)), rg.Module()
    module.k = rg.Variable(np.float32(5.0))
    return {
        "closure": (lambda dy: dy * k, rebind),
        "global": (lambda dy: dy * GLOBAL, lambda to: globals().update(GLOBAL=to)),
        "list": (lambda dy: dy * listed[0], lambda to: listed.__setitem__(0, to)),
        "dict": (lambda dy: dy * named["k"], lambda to: named.update(k=to)),
        "attribute": (lambda dy: dy * held.k, lambda to: setattr(held, "k", to)),
        "default": (lambda dy, k=default: dy * k[0], lambda to: default.__setitem__(0, to)),
        "array": (lambda dy: dy * array, lambda to: array.__setitem__((), to)),
        "Tensor": (lambda dy: dy * box[0], lambda to: box.__setitem__(0, rg.tensor(to))),
        "Variable": (lambda dy: dy * variable.value, lambda to: variable.assign(np.float32(to))),
        "Module": (lambda dy: dy * module.k.value, lambda to: module.k.assign(np.float32(to))),
    }


CHANGES = [
    *itertools.product(CONSTRUCTS, ["closure", "Variable"]),
    *itertools.product(["scan"], rules().keys() - {"closure", "Variable"}),
]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("name", "change"), sorted(CHANGES))
def test_a_rule_whose_closure_changes(name, change):
    """Within one scope, and in the next one with the same map."""
    for way in ("jit of grad", "grad of jit"):
        (rule, to), road = rules()[change], roads(CONSTRUCTS[name])[way]
        for factors in ((5.0, 3.0), (3.0, 5.0)):
            with rg.gradient_override_map({"Tanh": rule}):
                for factor in factors:
                    to(factor)
                    np.testing.assert_allclose(road(X).numpy(), [factor] * 2, err_msg=way)


def of_default(x):
    return rg.ones(()) * rg.sum(rg.stop_gradient(x) > 0)


@pytest.mark.parametrize("name", ["alone", "jit", "checkpoint", "vmap", "map", "cond", "scan, ys"])
def test_the_default_dtype_is_switched(name):
    f = {**REGIONS, "cond": in_both_branches}[name](of_default)
    ways = {"once": rg.jit(f), "in a jit": rg.jit(lambda x: f(x)), "eager": f}
    for way, dtype in itertools.product(ways, ["float32", "float64", "float64", "float32"]):
        with rg.default_dtype(dtype):
            assert ways[way](X).dtype == dtype, way


# -- roads (see tests/roads.py) on which a change comes between two calls --------------------------

PAIR = [rg.tensor([0.3, 0.7]), rg.tensor([1.5, -0.4])]
CHANGED = [r for r in ROADS if r.call.endswith(("changes", "order")) and r.api == "grads"]


@pytest.mark.parametrize("road", CHANGED, ids=str)
def test_roads_are_right_after_a_change(road):
    found = road.gradients(lambda a, b: rg.sum(rg.sin(a) * b * b), PAIR)
    due = np.cos([0.3, 0.7]) * [2.25, 0.16], 2 * np.sin([0.3, 0.7]) * [1.5, -0.4]
    for dx, expected in zip(found, due, strict=True):
        np.testing.assert_allclose(dx.numpy(), road.factor * expected, 1e-4)


# -- keys of programs and of their variants --------------------------------------------------------


def test_the_place_of_a_rule_chooses_the_program():
    f = rg.jit(lambda x: rg.sin(x) + rg.sin(3.0 * x))
    rule, found = (lambda dy: 100.0 * dy), []
    for n in (0, 1):  # one function for both, so the closure is the same
        with rg.gradient_override_map({rg.at(what="Sin", nth=n): rule}):
            found.append(rg.grad(f)(rg.tensor(0.0)).item())
    assert found == [103.0, 301.0] and f.cache_info().programs == 2


def test_what_is_registered_meanwhile_chooses_the_program():
    f = rg.jit(lambda x: x * 1.0)
    f(X)
    registry.version += 1  # as a kernel that is registered does
    f(X)
    assert f.cache_info().traces == 2


def variants(f):
    """How many variants the programs have: JAX may trace again on its own."""
    return sum(len(program.variants) for program in f.programs.values())


def test_what_is_wanted_chooses_the_variant():
    f, square, x = rg.jit(lambda x, y: x * y), rg.jit(lambda x: x * x), rg.tensor(3.0)
    by = [rg.grad(f, argnums=n)(rg.tensor(2.0), x).item() for n in (0, 1)]
    assert by == [3.0, 2.0]
    assert (rg.grad(square)(x).item(), rg.jvp(square, [x], [x])[1].item()) == (6.0, 18.0)
    assert variants(square) == 2


def test_the_layout_of_a_variable_chooses_the_variant():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    w = rg.Variable(X)
    f = rg.jit(lambda x: (w.assign_add(x), x.sum())[1])
    f(X)
    w.assign(rg.asarray(jax.device_put(VALUES, spread)))
    f(X)
    assert type(w._tensor._data.sharding) is type(spread) and variants(f) == 2


def test_no_memory_is_donated_while_jax_searches_for_nan():
    w = rg.Variable(rg.asarray(jnp.ones(100_000)))
    f = rg.jit(lambda x: (w.assign_add(rg.sum(x) * rg.ones(100_000)), x)[1])
    f(X)
    jax.config.update("jax_debug_nans", True)
    try:
        held = w._tensor._data
        f(X)
        assert not held.is_deleted() and variants(f) == 2
    finally:
        jax.config.update("jax_debug_nans", False)


# -- rules that close over an argument of a compiled function, for ops in regions made elsewhere ---
#
# The region (a scan, a branch, …) is in a function that does not have the argument. Its forward
# pass finds what it takes from outside, but the argument is only found by the rule in the backward
# pass. Each answer is that of eager mode, which has no regions.

XS = rg.tensor(np.random.default_rng(0).normal(size=3), dtype=np.float32)
W, THREE = rg.tensor([0.5, -0.3]), rg.tensor(3.0)
SCALE = rg.Variable(1.5, name="scale")


def loss_in(region):
    def loss(w):
        body = lambda x: rg.sin(x * rg.sum(w * w)) * rg.sum(w) * SCALE.value  # noqa: E731
        return rg.sum(region(body)(XS))

    return loss


def in_two_scans(w):
    def step(c, x):
        inner = lambda d, y: (d + rg.sin(y * rg.sum(x * w)), None)  # noqa: E731
        return c + rg.scan(inner, c, XS)[0], None

    return rg.scan(step, rg.tensor(1.0), rg.stack([XS[:2], XS[1:]]))[0]


CHOSEN = "jit", "checkpoint", "cond", "scan", "while_loop", "vmap"
LOSSES = {name: loss_in(REGIONS[name]) for name in CHOSEN}
LOSSES["two scans"] = in_two_scans
over_losses = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def gradient_of(loss, *, computed, second):
    """The gradient of a loss under a rule that closes over b, or over what is made of it."""

    def f(w, b):
        c = b * 2.0 + SCALE.value if computed else b
        with rg.gradient_override_map({"Sin": lambda dy, x: dy * c * x}):
            g = rg.grad(loss)
            return rg.grad(lambda w: rg.sum(g(w) ** 2))(w) if second else g(w)

    return f


def in_a_scan(f):
    return lambda w, b: rg.scan(lambda c, _: (c, f(w, b)), rg.tensor(0.0), length=2)[1][1]


WAYS = {
    "jit": lambda f: f, "jit of jit": rg.jit,
    "jit of vmap": lambda f: lambda w, b: rg.vmap(f, in_axes=(0, None))(w[None], b)[0],
    "jit of scan": in_a_scan, "jit of checkpoint": rg.checkpoint,
    "by b": lambda f: lambda w, b: rg.grad(lambda b: rg.sum(f(w, b) * w))(b),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("computed", "second"), [(False, False), (True, True)])
@over_losses
def test_the_rule_sees_the_argument_of_now(loss, computed, second):
    f = gradient_of(loss, computed=computed, second=second)
    g = rg.jit(lambda w, b: {name: way(f)(w, b) for name, way in WAYS.items()})
    by_b = WAYS["by b"]
    for b in (THREE, THREE + 1):  # the second call is by the program of the first
        due, due_by_b = f(W, b).numpy(), by_b(f)(W, b).numpy()
        for name, y in (g(W, b) | {"by b, outside": by_b(rg.jit(f))(W, b)}).items():
            expected = due_by_b if name.startswith("by b") else due
            np.testing.assert_allclose(y.numpy(), expected, 1e-4, 1e-5, err_msg=name)


@pytest.mark.slow
@over_losses
def test_gradients_of_gradients_of_a_compiled_function(loss):
    """By programs of programs, which replay the region, and the region in its gradient."""

    def f(w, b):
        with rg.gradient_override_map({"Sin": lambda dy, x: dy * b * b * x}):
            return loss(w)

    def derivatives(f):
        by_w = lambda w, b: rg.grad(lambda w: f(w, b))(w)  # noqa: E731
        by_w_b = lambda w, b: rg.grad(lambda b: rg.sum(by_w(w, b) * W))(b)  # noqa: E731
        yield by_w_b(W, THREE)
        yield rg.grad(lambda w: by_w_b(w, THREE))(W)
        yield rg.grad(lambda b: by_w_b(W, b))(THREE)

    for got, expected in zip(derivatives(rg.jit(f)), derivatives(f), strict=True):
        np.testing.assert_allclose(got.numpy(), expected.numpy(), 1e-4, 1e-5)
