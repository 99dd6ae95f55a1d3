"""Programs of a hostile expert: whatever the way, a gradient is right or there is an error.

Each program comes with numbers from a calculation by hand, or with the words of its error.
"""

import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError
from tests.helpers.quick import nothing_is_left_open
from tests.transforms.regions import REGIONS, in_both_branches

pytestmark = pytest.mark.usefixtures(nothing_is_left_open.__name__)
X = np.array([0.5, 1.2])
E = np.exp(X)


def derivative(f, order):
    """The derivative of a function of vectors that goes element by element."""
    if order == 0:
        return f
    return derivative(rg.grad(lambda x: rg.sum(f(x)), unconnected="zero"), order - 1)


# -- what f of a custom_grad makes of its own result -----------------------------------------------
#
# The Tensor that f returns becomes the output: where grad_func uses it, it is differentiated by the
# custom rule. What f computed from it before is f's own, and keeps the history that it has.


def kept(x):
    y = rg.exp(x)
    s = y * x
    return y, lambda dy: dy * s * 10


def saved(x, save):
    y = rg.exp(x)
    save([y * x, y])
    return y, lambda dy, saved: dy * saved[0] * saved[1]


def by_vjp(x):
    y, back = rg.vjp(lambda u: u * rg.exp(u), x)
    return y, lambda dy: back(dy)[0] * 5


def by_vjp_of_nothing(x):
    y, back = rg.vjp(lambda u: u, x)
    return y, lambda dy: back(dy)[0] * 5 * x


def by_vjp_of_several(x):
    ys, back = rg.vjp(lambda u: {"a": u, "b": u * u, "c": u}, x)
    return ys, lambda dy: back(dy)[0] * 5


def by_value_and_grad(x):
    y, dx = rg.value_and_grad(lambda u: u * u * u)(x)
    return y, lambda dy: dy * dx * 7


def two_outputs(x):
    y = rg.exp(x)
    z = y * y
    return (y, z), lambda dy: dy[0] * z + dy[1] * y


def twice_the_same(x):
    y = rg.exp(x)
    return (y, y), lambda dy: dy[0] * 2 * y + dy[1] * 3 * x


def around_another(x):
    inner = rg.custom_grad(kept)
    return inner(x) * 2, lambda dy: rg.grad(lambda u: rg.sum(inner(u)))(x) * dy


def called(f, use=lambda y, x: y):
    return lambda x: use(rg.custom_grad(f)(x), x)


# A function, and its derivatives. Of `saved`: s = x eˣ by its own history and y' = s y, so that
# (s y)' = s' y + s² y. Of `two_outputs`: y' = z and z' = y. Of `twice_the_same`: a' = 2a, b' = 3x.
CUSTOM = {
    "kept": (called(kept), [10 * X * E, 10 * (1 + X) * E, 10 * (2 + X) * E]),
    "saved": (called(saved), [X * E**2, (1 + X) * E**2 + X**2 * E**3,
                              (2 + X) * E**2 + 3 * X * (1 + X) * E**3 + X**3 * E**4]),
    "vjp": (called(by_vjp), [5 * (1 + X) * E, 5 * (2 + X) * E, 5 * (3 + X) * E]),
    "vjp of nothing": (called(by_vjp_of_nothing), [5 * X, 5 + 0 * X, 0 * X]),
    "vjp of several": (
        called(by_vjp_of_several, lambda ys, x: ys["a"] + 2 * ys["b"] + 3 * ys["c"]),
        [5 * (4 + 4 * X), 20 + 0 * X, 0 * X],
    ),
    "value_and_grad": (called(by_value_and_grad), [21 * X**2, 42 * X, 42 + 0 * X]),
    "two outputs": (
        called(two_outputs, lambda ys, x: ys[0] * x + ys[1]),
        [2 * E + X * E**2, 3 * E**2 + X * E, 4 * E + X * E**2],
    ),
    "one of two": (called(two_outputs, lambda ys, x: ys[1]), [E, E**2, E]),
    "the same twice": (called(twice_the_same, lambda ys, x: ys[0] * ys[1]), [
        2 * E**2 + 3 * X * E, 4 * E**2 + (3 + 12 * X) * E, 8 * E**2 + (18 + 36 * X) * E,
    ]),
    "around another": (called(around_another), [10 * X * E, 10 * (1 + X) * E, 10 * (2 + X) * E]),
}  # fmt: skip
TRACED = ["alone", "checkpoint", "vmap", "map", "cond", "scan, ys", "while_loop"]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", CUSTOM)
@pytest.mark.parametrize("place", TRACED)
def test_custom_gradients_at_every_order(name, place):
    f, due = CUSTOM[name]
    f = REGIONS[place](f)
    deepest = 3 if place == "cond" else 2
    inside = rg.jit(lambda x: [derivative(f, n)(x) for n in range(1, deepest + 1)])(X)
    for order, expected in enumerate(due, 1):
        np.testing.assert_allclose(derivative(f, order)(X).numpy(), expected)
        for y in inside[order - 1 : order]:
            np.testing.assert_allclose(y.numpy(), expected)
    np.testing.assert_allclose(derivative(rg.jit(f), 2)(X).numpy(), due[1])
    if place == "vmap":
        np.testing.assert_allclose(derivative(f, 3)(jnp.asarray(X)).numpy(), due[2])


IN_GRAPHS = {
    "alone": lambda f: f, "checkpoint": rg.checkpoint, "vmap": rg.vmap,
    "tf.cond": lambda f: lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: f(x), lambda: x * 1),
    "tf.while_loop": lambda f: (
        lambda x: tf.while_loop(lambda i, v: i < 1, lambda i, v: (i + 1, f(v)), [0, x])[1]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CUSTOM)
@pytest.mark.parametrize("place", IN_GRAPHS)
def test_custom_gradients_in_graphs(name, place):
    f, due = CUSTOM[name]
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float64, shape=(2,))
        ys = [IN_GRAPHS[place](f)(x)]
        for _ in range(3):
            (dx,) = tf.gradients(ys[-1], x)
            ys.append(tf.zeros_like(x) if dx is None else dx)
        found = session.run(ys[1:], {x: X})
    np.testing.assert_allclose(found, due[:3])


# -- results in which Tensors would be lost --------------------------------------------------------


class Slots:
    __slots__ = ("y",)

    def __init__(self, y):
        self.y = y


async def later(y):
    return y


HIDING = {
    "object": lambda y: SimpleNamespace(y=y),
    "object in a list": lambda y: [SimpleNamespace(y={"deep": y})], "slots": Slots,
    "generator": lambda y: (v for v in [y]), "iterator": lambda y: iter([y]),
    "values": lambda y: {"y": y}.values(), "list in an object": lambda y: SimpleNamespace(y=[y]),
    "closure": lambda y: lambda: y,
    "closure over an object": lambda y: (lambda o: lambda: o)(SimpleNamespace(y=y)),
    "vjp function": lambda y: rg.vjp(rg.sin, y), "iterator of numbers": lambda y: itertools.count(),
}  # fmt: skip
BODIES = {name: REGIONS[name] for name in ("checkpoint", "vmap", "map", "scan, ys", "jit")}
BODIES["cond"] = lambda f: rg.jit(in_both_branches(f))


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("body", BODIES)
def test_results_that_hide_tensors_are_refused(body, name):
    f = BODIES[body](lambda x: HIDING[name](x * x))
    with pytest.raises(
        ArgumentError, match=r"returned \w+, which regrad does not open as a container"
    ):
        rg.grad(lambda x: (f(x), rg.sum(x))[1])(X)


@pytest.mark.parametrize("body", ["vmap", "jit", "checkpoint"])
def test_a_coroutine_is_refused(body):
    made = []
    f = BODIES[body](lambda x: made.append(later(x)) or made[-1])
    with pytest.raises(ArgumentError, match="returned coroutine"):
        rg.grad(lambda x: (f(x), rg.sum(x))[1])(X)
    made[0].close()


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("plain", [None, "a", 3, len, int, {2, 3}, np.float32], ids=repr)
def test_results_that_hide_nothing_pass(body, plain):
    y, found = BODIES[body](lambda x: (x * 2, plain))(rg.asarray(X))
    np.testing.assert_allclose(y.numpy(), 2 * X)
    if plain == 3 and body in ("vmap", "map", "scan, ys"):  # numbers are stacked
        assert found.tolist() == [3] * len(X)
    else:
        assert found == plain


@pytest.mark.parametrize("make", [lambda: [1, 2], lambda: [[1], [2]], lambda: {1, 2}])
def test_what_a_compiled_function_returned_may_be_changed(make):
    f = rg.jit(lambda x: (x, make()))
    for _ in range(3):
        _, plain = f(X)
        assert plain == make()
        plain.pop()
        if isinstance(plain, list) and isinstance(plain[0], list):
            plain[0].clear()


# -- arrays of other libraries, lists --------------------------------------------------------------

READ = {
    "item": lambda t: t[0].item(), "numpy": lambda t: t.numpy()[0], "float": lambda t: float(t[0]),
    "if": lambda t: 2.0 if t[0] < 3 else 5.0,
    "a rule": lambda t: (lambda k: rg.grad(rg.custom_grad(lambda y: (y, lambda dy: dy * k)))(1.0))(
        t[0].item()
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", READ)
@pytest.mark.parametrize("size", [2, 100])
def test_torch_data_that_is_read_counts_by_its_content(how, size):
    torch = pytest.importorskip("torch")
    t = torch.full((size,), 2.0, dtype=torch.float64)
    f = rg.jit(lambda x: x * READ[how](t))
    assert [f(X).tolist() for _ in range(2)] == [(2 * X).tolist()] * 2
    t.fill_(5.0)
    assert f(X).tolist() == (5 * X).tolist()
    with pytest.raises(ArgumentError, match="cannot mix data of jax and torch"):
        rg.jit(lambda x: x * t[:2])(X)


@pytest.mark.parametrize("mode", [lambda f: f, rg.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("rows", [lambda x: [x, 1.0], lambda x: [[x, 1.0], [2.0, x]]])
@pytest.mark.parametrize("make", [rg.tensor, rg.asarray, lambda v: rg.scalar(1.0) + v])
def test_lists_that_hold_tensors_say_stack(mode, rows, make):
    with pytest.raises(ArgumentError, match=r"join them with stack\(\[a, b, ...\]\)"):
        mode(rg.grad(lambda x: rg.sum(make(rows(x)))))(1.5)


# -- Variables that a body assigns to --------------------------------------------------------------

v = rg.Variable(np.zeros(2), name="v")


def then_v(body):
    """What a body leaves in v, which starts at 0, counts as what it returns does."""
    return lambda x: (v.assign(rg.zeros_like(x)), body(x), rg.sum(v * x))[2]


def add(x, c):
    v.assign_add(x)
    return c


def assigned(x):
    v.assign(x * 2)
    return v.value, lambda dy: dy * 10


# A body, and the derivative of the sum of v x.
ASSIGNING = {
    "cond": (lambda x: rg.cond(rg.sum(x) > 0, lambda: v.assign(x * 3), lambda: v.assign(x)), 6 * X),
    "checkpoint": (lambda x: rg.checkpoint(lambda y: v.assign(y * 3))(x), 6 * X),
    "jit in checkpoint": (lambda x: rg.checkpoint(rg.jit(lambda y: v.assign(y * 3)))(x), 6 * X),
    "fori": (lambda x: rg.fori_loop(0, 2, lambda i, c: add(x, c), 0.0), 4 * X),
    "fori, used": (lambda x: rg.fori_loop(0, 2, lambda i, c: add(x, c * 2), x), 4 * X),
    "scan": (lambda x: rg.scan(lambda c, _: (add(x, c), None), 0.0, None, length=2), 4 * X),
    "scan, xs": (  # v = x Σx, so that it is the derivative of Σx² Σx
        lambda x: rg.scan(lambda c, y: (add(x * y, c), None), 0.0, x),
        2 * X * X.sum() + (X**2).sum(),
    ),
    "while": (lambda x: rg.while_loop(lambda c: c < 2, lambda c: add(x, c + 1), 0, max_steps=4),
              4 * X),
    "custom": (lambda x: rg.custom_grad(assigned)(x), 12 * X),
    "twice": (lambda x: (v.assign(x), v.assign(v * x)), 3 * X**2),
}  # fmt: skip


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", ASSIGNING)
def test_what_a_body_assigns_has_its_gradient(name):
    body, due = ASSIGNING[name]
    f = then_v(body)
    for g in rg.grad(f), rg.jit(rg.grad(f)), rg.grad(rg.jit(f)):
        for x in X, rg.asarray(jnp.asarray(X)):
            np.testing.assert_allclose(g(x).numpy(), due)
