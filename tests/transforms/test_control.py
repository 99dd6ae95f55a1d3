"""`cond`, `scan`, `while_loop`, `fori_loop`, `map`: the same in eager mode and under jit."""

from __future__ import annotations

import tracemalloc
from functools import partial

import numpy as np
import pytest

import regrad as rg
from regrad.core.state import current
from regrad.errors import ArgumentError, DTypeError, GradientError, RegradError, ShapeError
from tests.helpers.quick import MODES, nothing_is_left_open

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)


def numbers(tree):
    """The numbers in a result, for comparisons."""
    if isinstance(tree, dict):
        return {k: numbers(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [numbers(v) for v in tree]
    return tree.tolist() if isinstance(tree, rg.Tensor) else tree


# -- scan ------------------------------------------------------------------------------------------


def step(carry, x):
    """A step with containers on both sides."""
    total, power = carry["total"] + x["a"] * carry["power"], carry["power"] * x["b"]
    return {"total": total, "power": power}, (total * power, None)


def scanning(reverse=False, checkpoint=False):
    def f(total, power, a, b):
        xs, first = {"a": a, "b": b}, {"total": total, "power": power}
        return rg.scan(step, first, xs, reverse=reverse, checkpoint=checkpoint)

    return f


SCANNED = [
    np.array([0.5, -1.0]),
    np.array(1.5),
    np.array([[1.0, 2], [3, 4], [5, 6]]),
    np.arange(1.0, 4),
]


def by_hand(total, power, a, b, reverse):
    ys = [None] * 3
    for i in reversed(range(3)) if reverse else range(3):
        total, power = total + a[i] * power, power * b[i]
        ys[i] = total * power
    return total, power, np.stack(ys)


@MODES
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_scan(mode, reverse, checkpoint):
    last, (ys, nothing) = mode(scanning(reverse, checkpoint))(*SCANNED)
    due = by_hand(*SCANNED, reverse)
    for got, expected in zip((last["total"], last["power"], ys), due, strict=True):
        np.testing.assert_allclose(got.numpy(), expected)
    assert nothing is None


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_derivatives_of_scan_to_third_order(reverse, checkpoint):
    f = scanning(reverse, checkpoint)

    def scalar(*xs):
        last, (ys, _) = f(*xs)
        return (ys * ys).sum() + rg.sin(last["total"]).sum() * last["power"]

    def climbed(g):
        return lambda *xs: sum((dx * dx).sum() for dx in rg.grads(g)(list(xs)))

    second = climbed(climbed(scalar))
    found = {
        "eager": rg.grads(second)(SCANNED),
        "inside": rg.jit(lambda *xs: rg.grads(second)(list(xs)))(*SCANNED),
        "outside": rg.grads(rg.jit(second))(SCANNED),
        "far outside": rg.grads(climbed(climbed(rg.jit(scalar))))(SCANNED),
    }
    for way, grads in found.items():
        for dx, due in zip(grads, found["eager"], strict=True):
            np.testing.assert_allclose(dx.numpy(), due.numpy(), rtol=1e-9, err_msg=way)


@MODES
def test_scan_without_entries(mode):
    f = mode(lambda x: rg.scan(lambda c, _: (c * 2, c), x, length=3))
    last, ys = f(rg.scalar(1.0))
    assert (last.item(), ys.tolist()) == (8.0, [1.0, 2.0, 4.0])
    assert rg.grad(lambda x: f(x)[0])(rg.scalar(1.0)).item() == 8.0


@MODES
def test_scan_of_no_steps(mode):
    f = mode(lambda x, xs: rg.scan(lambda c, x: (c + x.sum(), x * 2), x, xs))
    last, ys = f(rg.scalar(1.0), rg.zeros((0, 3)))
    assert (last.item(), ys.shape) == (1.0, (0, 3))
    g = rg.grads(lambda *xs: f(*xs)[0], unconnected="zero")
    dx, dxs = g([rg.scalar(1.0), rg.zeros((0, 3))])
    assert (dx.item(), dxs.shape) == (1.0, (0, 3))
    last, ys = mode(lambda x: rg.scan(lambda c, _: (c, c), x, length=0))(rg.scalar(2.0))
    assert (last.item(), ys.shape) == (2.0, (0,))


@MODES
def test_integers_and_bools_go_along(mode):
    def body(carry, x):
        i, seen, total = carry
        return (i + 1, seen | (x > 1.5), total + x * i), (i, seen)

    def f(xs):
        start = rg.asarray(np.int32(0)), rg.asarray(np.False_), rg.scalar(0.0)
        return rg.scan(body, start, xs)

    (i, seen, total), (counts, flags) = mode(f)(rg.tensor([1.0, 2.0, 3.0]))
    assert (i.item(), seen.item(), total.item()) == (3, True, 8.0)
    assert (counts.tolist(), flags.tolist()) == ([0, 1, 2], [False, False, True])
    g = lambda xs: mode(f)(xs)[0][2]  # noqa: E731
    assert rg.grad(g)(rg.tensor([1.0, 2.0, 3.0])).tolist() == [0.0, 1.0, 2.0]


@MODES
@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            lambda c, x: (rg.stack([c, c]), x),
            ShapeError,
            r"float32 \(\) came out as float32 \(2,\)",
        ),
        (lambda c, x: (rg.astype(c, "int32"), x), ShapeError, "came out as int32"),
        (lambda c, x: ((c, c), x), ArgumentError, "keep its structure"),
        (lambda c, x: c, ArgumentError, "must return a pair"),
        (lambda c, x: (c, x, c), ArgumentError, "must return a pair"),
    ],
)
def test_carries_that_change(mode, body, error, message):
    with pytest.raises(error, match=message):
        mode(lambda x: rg.scan(body, rg.scalar(0.0), x))(rg.ones((3,)))


@MODES
def test_lengths(mode):
    body = lambda c, x: (c, None)  # noqa: E731
    with pytest.raises(ShapeError, match=r"lengths \[2, 3\]"):
        mode(lambda x, y: rg.scan(body, 0.0, (x, y)))(rg.ones((2,)), rg.ones((3,)))
    with pytest.raises(ShapeError, match=r"lengths \[2, 5\]"):
        mode(lambda x: rg.scan(body, 0.0, x, length=5))(rg.ones((2,)))
    with pytest.raises(ArgumentError, match="give xs to go along"):
        mode(lambda x: rg.scan(body, x))(rg.ones((2,)))
    with pytest.raises(ArgumentError, match="must be a function"):
        rg.scan(3, 0.0, length=1)


@MODES
def test_what_a_step_closes_over(mode):
    w, v = rg.scalar(2.0), rg.Variable(3.0)

    def f(w, xs):
        k = w * w
        return rg.scan(lambda c, x: (c * k + x * v, c * w), rg.scalar(1.0), xs)

    def loss(w, xs):
        last, ys = mode(f)(w, xs)
        return last + ys.sum()

    xs = rg.tensor([1.0, 2.0])
    # last = k² + 3·1·k + 3·2, ys = w + (k + 3)·w
    assert rg.grad(lambda w: loss(w, xs))(w).item() == 4 * 8 + 6 * 2 + 4 + 3 * 4
    assert rg.variable_grads(lambda: loss(w, xs)).grads[v.name].item() == 4 + 2 + 2


@MODES
def test_variables_assigned_in_steps(mode):
    v, n = rg.Variable(1.0), rg.Variable(0, dtype="int32", trainable=False)

    def body(carry, x):
        v.assign(v * x)
        n.assign_add(1)
        return carry + v, v.value

    def f(xs):
        return rg.scan(body, rg.scalar(0.0), xs)

    last, ys = mode(f)(rg.tensor([2.0, 3.0, 4.0]))
    assert (last.item(), ys.tolist(), v.item(), n.item()) == (32.0, [2.0, 6.0, 24.0], 24.0, 3)
    v.assign(1.0)
    g = mode(f)
    value, grads = rg.variable_grads(lambda: g(rg.tensor([2.0, 3.0, 4.0]))[0] + v)
    assert (value.item(), grads[v.name].item()) == (56.0, 56.0)
    assert (v.item(), n.item()) == (24.0, 6)


def test_memory_of_checkpointed_scans_in_eager_mode():
    x, n = np.ones((200, 100)), 40
    body = lambda c, _: (rg.sin(rg.sin(rg.sin(rg.sin(c)))), None)  # noqa: E731

    def peak(checkpoint):
        f = lambda x: rg.scan(body, x, length=n, checkpoint=checkpoint)[0].sum()  # noqa: E731
        tracemalloc.start()
        rg.grad(f)(x)
        try:
            return tracemalloc.get_traced_memory()[1] / x.nbytes
        finally:
            tracemalloc.stop()

    plain, less = peak(False), peak(True)
    assert plain > 4 * n
    assert less < 1.5 * n + 12


def test_residuals_of_compiled_scans():
    import jax

    n, size = 16, 64

    def kept(checkpoint):
        def f(x):
            body = lambda c, _: (rg.sin(rg.sin(rg.sin(c))), None)  # noqa: E731
            return rg.scan(body, x, length=n, checkpoint=checkpoint)[0].sum()

        gradient = lambda a: rg.grad(f)(rg.asarray(a)).data  # noqa: E731
        jaxpr = jax.make_jaxpr(gradient)(np.ones(size))
        forward = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
        # (what a scan stacks has its length in front; JAX 0.11 no longer says how many carries)
        stacked = [v for v in forward.outvars if v.aval.shape[:1] == (n,) and v.aval.ndim > 1]
        return sum(v.aval.size for v in stacked if str(v) != "_") / (n * size)

    assert kept(True) <= 1 < kept(False) <= 3


# -- cond ------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("value", [-3.0, 3.0])
def test_cond(mode, value):
    f = lambda x: rg.cond(x > 0, lambda x: x * x * x, lambda x: -x, x)  # noqa: E731
    x = rg.scalar(value)
    due = (27.0, 27.0, 18.0) if value > 0 else (3.0, -1.0, 0.0)
    assert mode(f)(x).item() == due[0]
    assert mode(rg.grad(f))(x).item() == rg.grad(mode(f))(x).item() == due[1]
    second = lambda f: rg.grad(rg.grad(f), unconnected="zero")  # noqa: E731
    assert mode(second(f))(x).item() == second(mode(f))(x).item() == due[2]


@MODES
def test_cond_with_containers(mode):
    def f(p, a, b):
        one = lambda s, t: {"x": s["a"] * t, "y": (t, 3, None)}  # noqa: E731
        other = lambda s, t: {"x": s["a"] + t, "y": (s["a"], 3, None)}  # noqa: E731
        return rg.cond(p, one, other, {"a": a}, b)

    p = rg.asarray(np.True_)
    assert numbers(mode(f)(p, 2.0, 5.0)) == {"x": 10.0, "y": [5.0, 3, None]}
    assert numbers(mode(f)(~p, 2.0, 5.0)) == {"x": 7.0, "y": [2.0, 3, None]}


@pytest.mark.parametrize(
    ("one", "other", "error", "message"),
    [
        (lambda x: x, lambda x: (x, x), RegradError, "structure|Tensors"),
        (lambda x: x, lambda x: rg.stack([x, x]), ShapeError, "the shapes"),
        (lambda x: x, lambda x: rg.astype(x, "int32"), DTypeError, "float32 and int32; use astype"),
        (lambda x: (x, "a"), lambda x: (x, "b"), ArgumentError, "same structure"),
        (lambda x: [x], lambda x: (x,), ArgumentError, "same structure"),
        (lambda x: {"a": x}, lambda x: {"b": x}, ArgumentError, "same structure"),
        (lambda x: None, lambda x: x, RegradError, "structure|Tensors"),
    ],
)
def test_branches_that_differ(one, other, error, message):
    with pytest.raises(error, match=message):
        rg.jit(lambda x: rg.cond(x > 0, one, other, x))(rg.scalar(1.0))


@MODES
def test_conditions_that_are_none(mode):
    with pytest.raises(RegradError if mode is rg.jit else Exception):
        mode(lambda x: rg.cond(x > 0, lambda: x, lambda: -x))(rg.ones((2,)))
    with pytest.raises(ArgumentError, match="must be a function"):
        rg.cond(True, 1, 2)


@MODES
def test_what_branches_close_over(mode):
    v = rg.Variable(5.0)

    def f(a, b, p):
        return rg.cond(p, lambda: a * v, lambda: b * b)

    for p, due in ((True, (5.0, 0.0)), (False, (0.0, 6.0))):
        p = rg.asarray(np.asarray(p))
        g = mode(f)
        by_two = partial(g, p=p)
        found = rg.grads(by_two, unconnected="zero")([rg.scalar(2.0), rg.scalar(3.0)])
        assert tuple(x.item() for x in found) == due
        h = lambda: mode(f)(rg.scalar(2.0), rg.scalar(3.0), p) + v * 0  # noqa: B023, E731
        assert rg.variable_grads(h).grads[v.name].item() == (2.0 if due[0] else 0.0)


@MODES
def test_variables_assigned_in_branches(mode):
    v, w = rg.Variable(1.0), rg.Variable(10.0)

    def f(x):
        return rg.cond(x > 0, lambda: v.assign(v + x), lambda: w.assign(w * x))

    g = mode(f)
    g(rg.scalar(2.0))
    assert (v.item(), w.item()) == (3.0, 10.0)
    g(rg.scalar(-2.0))
    assert (v.item(), w.item()) == (3.0, -20.0)


@MODES
def test_the_branch_not_taken_gives_no_nan(mode):
    f = lambda x: rg.cond(x > 0, lambda x: rg.log(x), lambda x: x * 0 + 1, x)  # noqa: E731
    assert mode(rg.grad(f))(rg.scalar(-1.0)).item() == 0.0
    assert rg.grad(mode(f))(rg.scalar(-1.0)).item() == 0.0


# -- while_loop, fori_loop, map --------------------------------------------------------------------


def halved(x, **options):
    return rg.while_loop(lambda x: x > 1, lambda x: x / 2, x, **options)


@MODES
def test_while_loop(mode):
    f = mode(lambda x: halved(x, max_steps=10))
    for x, due in ((6.0, (0.75, 0.125)), (0.5, (0.5, 1.0))):
        assert (f(rg.scalar(x)).item(), rg.grad(f)(rg.scalar(x)).item()) == due
        assert mode(rg.grad(lambda x: halved(x, max_steps=10)))(rg.scalar(x)).item() == due[1]
    assert mode(halved)(rg.scalar(6.0)).item() == 0.75


def test_the_gradient_of_an_unbounded_loop():
    assert rg.grad(halved)(rg.scalar(6.0)).item() == 0.125
    for g in (rg.jit(rg.grad(halved)), rg.grad(rg.jit(halved)), rg.jit(rg.grad(rg.jit(halved)))):
        with pytest.raises(GradientError, match="max_steps=n"):
            g(rg.scalar(6.0))
    w = rg.scalar(2.0)
    over = lambda w: rg.while_loop(lambda x: x < 10, lambda x: x * w, 1.0)  # noqa: E731
    with pytest.raises(GradientError, match="max_steps=n"):
        rg.jit(rg.grad(over))(w)
    assert rg.grad(over)(w).item() == 32.0


def test_a_loop_that_goes_on():
    with pytest.raises(ArgumentError, match="still holds after 2 steps"):
        halved(rg.scalar(64.0), max_steps=2)
    assert np.isnan(rg.jit(lambda x: halved(x, max_steps=2))(rg.scalar(64.0)).item())
    assert rg.jit(lambda x: halved(x, max_steps=2))(rg.scalar(4.0)).item() == 1.0
    assert halved(rg.scalar(4.0), max_steps=2).item() == 1.0


@MODES
def test_while_loops_over_containers(mode):
    def f(n, x):
        start = {"i": rg.asarray(np.int32(0)), "x": x}
        more = lambda c: c["i"] < n  # noqa: E731
        body = lambda c: {"i": c["i"] + 1, "x": c["x"] * c["x"]}  # noqa: E731
        return rg.while_loop(more, body, start, max_steps=4)

    out = mode(f)(rg.asarray(np.int32(2)), rg.scalar(3.0))
    assert (out["i"].item(), out["x"].item()) == (2, 81.0)
    g = lambda x: mode(f)(rg.asarray(np.int32(2)), x)["x"]  # noqa: E731
    assert rg.grad(g)(rg.scalar(3.0)).item() == 4 * 27
    assert rg.grad(rg.grad(g))(rg.scalar(3.0)).item() == 12 * 9


@MODES
@pytest.mark.parametrize("max_steps", [None, 5])
def test_variables_assigned_in_while_loops(mode, max_steps):
    v = rg.Variable(1.0)

    def body(x):
        v.assign(v * 2)
        return x + v

    f = mode(lambda x: rg.while_loop(lambda x: x < 10, body, x, max_steps=max_steps))
    assert (f(rg.scalar(0.0)).item(), v.item()) == (14.0, 8.0)
    assert (f(rg.scalar(0.0)).item(), v.item()) == (16.0, 16.0)


@MODES
def test_a_while_loop_reads_a_variable_in_its_condition(mode):
    v = rg.Variable(3.0)
    f = mode(lambda x: rg.while_loop(lambda x: x < v, lambda x: x + 1, x, max_steps=9))
    assert f(rg.scalar(0.0)).item() == 3.0
    v.assign(5.0)
    assert f(rg.scalar(0.0)).item() == 5.0


@MODES
def test_fori_loop(mode):
    body = lambda i, x: x * (i + 1)  # noqa: E731
    f = mode(lambda x: rg.fori_loop(1, 4, body, x))
    assert (f(rg.scalar(1.0)).item(), rg.grad(f)(rg.scalar(1.0)).item()) == (24.0, 24.0)
    assert mode(lambda x: rg.fori_loop(4, 1, body, x))(rg.scalar(3.0)).item() == 3.0
    g = mode(lambda n, x: rg.fori_loop(0, n, body, x))
    assert g(rg.asarray(np.int32(4)), rg.scalar(1.0)).item() == 24.0


@MODES
def test_map(mode):
    f = mode(lambda xs: rg.map(lambda x: {"y": rg.sin(x).sum(), "x": x}, xs))
    xs = rg.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    out = f(xs)
    np.testing.assert_allclose(out["y"].numpy(), np.sin(xs.numpy()).sum(1), rtol=1e-6)
    assert out["x"].tolist() == xs.tolist()
    dxs = rg.grad(lambda xs: f(xs)["y"].sum())(xs)
    np.testing.assert_allclose(dxs.numpy(), np.cos(xs.numpy()), rtol=1e-6)


# -- nests, and rules in them ----------------------------------------------------------------------


def nest(x, n):
    """A loop over a branch over a loop, with a rule put in force on the way."""

    def inner(c, i):
        return rg.sign(c) * x + c * 0.5, c

    def body(c, i):
        with rg.gradient_override_map({"Sign": lambda dy, x: dy * x * 2}):
            after = rg.cond(c > 0, lambda: rg.scan(inner, c, length=2)[0], lambda: rg.sign(c) * c)
        return after - rg.sign(x) * 0.1, after

    last, ys = rg.scan(body, x, length=n)
    return last + ys.sum()


@pytest.mark.parametrize("x", [0.7, -0.4])
def test_nests_with_rules_inside(x):
    f = lambda x: nest(x, 3)  # noqa: E731
    x = np.float64(x)
    for g in (f, rg.grad(f), rg.grad(rg.grad(f))):
        np.testing.assert_allclose(rg.jit(g)(x).numpy(), g(x).numpy(), rtol=1e-12)
    np.testing.assert_allclose(rg.grad(rg.jit(f))(x).numpy(), rg.grad(f)(x).numpy(), rtol=1e-12)


@MODES
def test_hits_in_loops(mode):
    f = mode(rg.grad(lambda x: rg.scan(lambda c, _: (rg.sign(c), None), x, length=3)[0]))
    for _ in range(2):
        with rg.gradient_override_map({"Sign": "Identity"}) as used:
            assert f(rg.scalar(0.5)).item() == 1.0
        used.assert_fired()
        assert {hit.op_type for hit in used.hits} == {"Sign"}


def test_plumbing_is_no_hit():
    body = lambda c, x: (rg.sign(c) + x, c)  # noqa: E731
    rule = rg.rules.optional(rg.rules.no_gradient)
    own = dict.fromkeys(("StridedSlice", "Pack", "Transpose"), rule)
    for mode in (lambda f: f, rg.jit):
        with rg.gradient_override_map({"Sign": "Identity", **own}) as used:
            mode(lambda xs: rg.scan(body, rg.scalar(0.0), xs))(rg.ones((3,)))
            mode(lambda xs: rg.vmap(rg.sign, in_axes=1, out_axes=1)(xs))(rg.ones((3, 2)))
        assert {hit.op_type for hit in used.hits} == {"Sign"}


def test_an_exception_in_a_step():
    def body(c, x):
        raise KeyError("stop")

    for g in (lambda f: f, rg.jit, rg.grad, lambda f: rg.jit(rg.grad(f))):
        with pytest.raises(KeyError):
            g(lambda x: rg.scan(body, x, length=2)[0])(rg.scalar(0.0))
        with pytest.raises(KeyError):
            g(lambda x: rg.cond(x > -1, lambda: body(x, x), lambda: x))(rg.scalar(0.0))
        assert current() is None
