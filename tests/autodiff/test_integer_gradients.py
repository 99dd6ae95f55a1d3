"""Integers and bools to which a rule gives a gradient keep it wherever a float would.

A comparison under a rule (a spike with a surrogate gradient, say) is often cast to floats far from
where it was made: outside the compiled function, in another branch, one turn of a loop later.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from tests.helpers.rows import close, under

RULE = {"Greater": lambda dy: [dy * 5.0, None]}
Z = [0.5, 1.5, 2.0]
ONES = np.ones(2, "f4")
FLAGS = np.ones(3, bool)


def floats(b, like):
    return rg.astype(b, like.dtype)


def scanned(f, **options):
    return lambda z: rg.scan(lambda c, e: (c, f(e)), None, z, **options)[1]


CONTEXTS = {
    "plain": lambda f: f, "checkpoint": rg.checkpoint, "vmap": rg.vmap,
    "cond": lambda f: lambda z: rg.cond(rg.sum(z) > 0.0, f, lambda z: f(z * 2.0), z),
    "scan": scanned, "scan, checkpoint": lambda f: scanned(f, checkpoint=True),
    "map": lambda f: lambda z: rg.map(f, z), "jit": rg.jit,
}  # fmt: skip
CONTEXTS |= {
    f"jit of {name}": lambda f, context=context: rg.jit(context(f))
    for name, context in list(CONTEXTS.items())[1:]
}
CONTEXTS |= {
    "checkpoint of jit": lambda f: rg.checkpoint(rg.jit(f)),
    "scan of jit": lambda f: scanned(rg.jit(f)),
}

# Where the bool is made, and where it is cast: each gives the gradient floats(z > 1) + 5 z of
# sum(floats(z > 1) * z), and 10 after it.
PLACES = {
    "made inside": lambda context, z: floats(context(lambda p: p > 1.0)(z), z),
    "cast inside": lambda context, z: context(lambda b: floats(b, z))(z > 1.0),
    "both inside": lambda context, z: context(lambda p: floats(p > 1.0, p))(z),
    "integers": lambda context, z: (
        floats(context(lambda p: rg.astype(p > 1.0, rg.int32) * 3 - 2)(z), z) / 3.0 + 2.0 / 3.0
    ),
}
# Each context meets each kind of data, in one of the places.
DATA = [(np.asarray, "f4"), (jnp.asarray, "f8"), (np.asarray, "f8"), (jnp.asarray, "f4")]
CASES = [(c, p, *DATA[(i + j) % 4]) for i, c in enumerate(CONTEXTS) for j, p in enumerate(PLACES)]


def orders(f, z, way=lambda g: g):
    """The gradient, and the gradient of its sum."""
    with rg.gradient_override_map(RULE) as used:
        first = way(rg.grad(f))(z)
        second = way(rg.grad(lambda z: rg.sum(rg.grad(f)(z))))(z)
    used.assert_fired()
    return first, second


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(("context", "place", "data", "dtype"), CASES)
def test_a_gradient_passes_every_border(context, place, data, dtype):
    z = rg.asarray(data(np.asarray(Z, dtype)))
    found = orders(lambda z: rg.sum(PLACES[place](CONTEXTS[context], z) * z), z)
    assert [dz.dtype for dz in found] == [dtype, dtype]
    close(found, (np.greater(Z, 1.0) + 5.0 * np.asarray(Z), [10.0] * 3), 1e-6)


# Loops whose bools come round: the gradient of each as a plain Python loop has it.


def closed_over(z, loop):
    b = z > 1.0
    return loop(lambda c, e: c * z + floats(b, z) * rg.sum(e), z)


LOOPS = {
    "comes out": lambda z, loop: floats(loop(lambda c, e: e * z > 1.0, FLAGS), z),
    "comes round": lambda z, loop: loop(
        lambda c, e: (e * c[1] > 1.0, c[1] + floats(c[0], z)), (FLAGS, z))[1],
    "goes in": lambda z, loop: loop(
        lambda c, e: (c[0], c[1] * e + floats(c[0], z)), (z > 1.0, z))[1],
    "closed over": closed_over,
    "beside an index that has none": lambda z, loop: loop(
        lambda c, e: (c[0] * 1, c[1] * rg.take(e, c[0] * 0) + floats(c[2], z), c[1] > 1.0),
        (rg.asarray(np.arange(3)), z, z > 1.0))[1],
}  # fmt: skip


def in_python(step, carry):
    for e in np.ones((4, 1), "f4"):
        carry = step(carry, rg.asarray(e))
    return carry


def in_scan(step, carry, **options):
    return rg.scan(lambda c, e: (step(c, e), None), carry, np.ones((4, 1), "f4"), **options)[0]


def in_while(step, carry):
    turn = lambda c: (c[0] + 1, step(c[1], ONES[:1]))  # noqa: E731
    return rg.while_loop(lambda c: c[0] < 4, turn, (0, carry), max_steps=6)[1]


REPEATED = {
    "scan": in_scan,
    "scan, checkpoint": lambda step, carry: in_scan(step, carry, checkpoint=True),
    "while_loop": in_while,
}
MODES = ["eager", "jit", "grad in jit"]
# Each loop, and each way of bools in it, in each mode once at least.
ROUNDS = [(n, r, MODES[(i + j) % 3]) for i, n in enumerate(LOOPS) for j, r in enumerate(REPEATED)]


@pytest.mark.slow(but=4)
@pytest.mark.parametrize(("name", "loop", "mode"), ROUNDS)
def test_a_gradient_comes_round(name, loop, mode):
    def total(loop):
        return lambda z: rg.sum(LOOPS[name](z, lambda step, carry: loop(step, arrays(carry))) * z)

    z = rg.tensor(Z)
    f = rg.jit(total(REPEATED[loop])) if mode == "jit" else total(REPEATED[loop])
    found = orders(f, z, rg.jit if mode == "grad in jit" else lambda g: g)
    close(found, orders(total(in_python), z), 1e-5)


def arrays(carry):
    return rg.asarray(carry) if isinstance(carry, np.ndarray) else carry


# What has a gradient by a rule may stand where no gradient is asked of it.


def stepped(z, first, step):
    """The second part of a carry, after two steps."""
    return rg.scan(lambda c, e: (step(*c), None), (rg.asarray(first), z), ONES)[0][1]


def picked(z):
    i = rg.astype(z > 1.0, rg.int32)
    return rg.scan(lambda c, e: (c + rg.take(rg.tensor([1.0, 2.0]), i) * e, None), z, ONES)[0]


HARMLESS = {
    "the condition of a branch": lambda z: rg.cond(
        rg.all(z > -1.0), lambda c: c * 2.0, lambda c: c, z),
    "the condition of a loop": lambda z: rg.while_loop(
        lambda c: rg.all(-c > -9.0), lambda c: c * 2.0 + 1.0, z, max_steps=6),
    "an index that is carried": lambda z: stepped(z, np.array([0, 1, 1], "i4"), lambda i, c: (
        rg.astype(c > 0.0, rg.int32), c + rg.take(rg.tensor([1.0, 2.0]), i))),
    "a flag that is carried": lambda z: stepped(z, True, lambda flag, c: (
        rg.all(c > 0.0), rg.cond(flag, lambda a: a * 2.0, lambda a: a, c))),
    "an index that is closed over": picked,
}  # fmt: skip


@pytest.mark.parametrize("wrapped", [rg.jit, rg.checkpoint])
@pytest.mark.parametrize("name", HARMLESS)
def test_none_is_asked_of_conditions_and_indices(name, wrapped):
    gradient = lambda f: under(RULE, rg.grad(lambda z: rg.sum(f(z))), rg.tensor(Z))  # noqa: E731
    assert gradient(wrapped(HARMLESS[name])).tolist() == gradient(HARMLESS[name]).tolist()
