"""Integers and bools to which a rule gives a gradient keep it wherever a float would.

A comparison under a rule (a spike with a surrogate gradient, say) is often cast to floats far from
where it was made: outside the compiled function, in another branch, one turn of a loop later.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg

RULE = {"Greater": lambda dy: [dy * 5.0, None]}
Z = [0.5, 1.5, 2.0]
ONES = np.ones(2, "f4")
FLAGS = np.ones(3, bool)


def floats(b, like):
    return rg.astype(b, like.dtype)


def scanned(f, **options):
    return lambda z: rg.scan(lambda c, e: (c, f(e)), None, z, **options)[1]


CONTEXTS = {
    "plain": lambda f: f,
    "checkpoint": rg.checkpoint,
    "vmap": rg.vmap,
    "cond": lambda f: lambda z: rg.cond(rg.sum(z) > 0.0, f, lambda z: f(z * 2.0), z),
    "scan": scanned,
    "scan, checkpoint": lambda f: scanned(f, checkpoint=True),
    "map": lambda f: lambda z: rg.map(f, z),
    "jit": rg.jit,
}
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


def orders(f, z):
    """The gradient, and the gradient of its sum."""
    with rg.gradient_override_map(RULE) as used:
        first = rg.grad(f)(z)
        second = rg.grad(lambda z: rg.sum(rg.grad(f)(z)))(z)
    used.assert_fired()
    return first, second


@pytest.mark.parametrize("data", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_gradient_passes_every_border(context, place, dtype, data):
    z = rg.asarray(data(np.asarray(Z, dtype)))
    f = lambda z: rg.sum(PLACES[place](CONTEXTS[context], z) * z)  # noqa: E731
    first, second = orders(f, z)
    assert first.dtype == second.dtype == dtype
    np.testing.assert_allclose(first.numpy(), np.greater(Z, 1.0) + 5.0 * np.asarray(Z), rtol=1e-6)
    np.testing.assert_allclose(second.numpy(), [10.0] * 3, rtol=1e-6)


# Loops whose bools come round: the gradient of each as a plain Python loop has it.

LOOPS = {
    "comes out": lambda z, scan: floats(scan(lambda c, e: e * z > 1.0, FLAGS), z),
    "comes round": lambda z, scan: scan(
        lambda c, e: (e * c[1] > 1.0, c[1] + floats(c[0], z)), (FLAGS, z)
    )[1],
    "goes in": lambda z, scan: scan(lambda c, e: (c[0], c[1] * e + floats(c[0], z)), (z > 1.0, z))[
        1
    ],
    "closed over": lambda z, scan: closed_over(z, scan),
    "beside an index that has none": lambda z, scan: scan(
        lambda c, e: (
            c[0] * 1,
            c[1] * rg.take(e, c[0] * 0) + floats(c[2], z),
            c[1] > 1.0,
        ),
        (rg.asarray(np.arange(3)), z, z > 1.0),
    )[1],
}


def closed_over(z, scan):
    b = z > 1.0
    return scan(lambda c, e: c * z + floats(b, z) * rg.sum(e), z)


def in_python(step, carry):
    carry = rg.asarray(carry) if isinstance(carry, np.ndarray) else carry
    for e in np.ones((4, 1), "f4"):
        carry = step(carry, rg.asarray(e))
    return carry


def in_scan(step, carry, **options):
    carry = rg.asarray(carry) if isinstance(carry, np.ndarray) else carry
    return rg.scan(lambda c, e: (step(c, e), None), carry, np.ones((4, 1), "f4"), **options)[0]


def in_while(step, carry):
    last = rg.while_loop(
        lambda c: c[0] < 4, lambda c: (c[0] + 1, step(c[1], ONES[:1])), (0, carry), max_steps=6
    )
    return last[1]


REPEATED = {
    "scan": in_scan,
    "scan, checkpoint": lambda step, carry: in_scan(step, carry, checkpoint=True),
    "while_loop": in_while,
}


@pytest.mark.parametrize("mode", ["eager", "jit", "grad in jit"])
@pytest.mark.parametrize("loop", REPEATED)
@pytest.mark.parametrize("name", LOOPS)
def test_a_gradient_comes_round(name, loop, mode):
    def total(loop):
        return lambda z: rg.sum(LOOPS[name](z, loop) * z)

    z = rg.tensor(Z)
    f = total(REPEATED[loop])
    f = rg.jit(f) if mode == "jit" else f
    if mode == "grad in jit":
        with rg.gradient_override_map(RULE):
            first = rg.jit(rg.grad(f))(z)
            second = rg.jit(rg.grad(lambda z: rg.sum(rg.grad(f)(z))))(z)
    else:
        first, second = orders(f, z)
    for ours, due in zip((first, second), orders(total(in_python), z), strict=True):
        np.testing.assert_allclose(ours.numpy(), due.numpy(), rtol=1e-5)


# What has a gradient by a rule may stand where no gradient is asked of it.

HARMLESS = {
    "the condition of a branch": lambda z: rg.cond(
        rg.all(z > -1.0), lambda c: c * 2.0, lambda c: c, z
    ),
    "the condition of a loop": lambda z: rg.while_loop(
        lambda c: rg.all(-c > -9.0), lambda c: c * 2.0 + 1.0, z, max_steps=6
    ),
    "an index that is carried": lambda z: rg.scan(
        lambda c, e: (
            (rg.astype(c[1] > 0.0, rg.int32), c[1] + rg.take(rg.tensor([1.0, 2.0]), c[0])),
            None,
        ),
        (rg.asarray(np.array([0, 1, 1], "i4")), z),
        ONES,
    )[0][1],
    "a flag that is carried": lambda z: rg.scan(
        lambda c, e: (
            (rg.all(c[1] > 0.0), rg.cond(c[0], lambda a: a * 2.0, lambda a: a, c[1])),
            None,
        ),
        (rg.asarray(True), z),
        ONES,
    )[0][1],
    "an index that is closed over": lambda z: picked(rg.astype(z > 1.0, rg.int32), z),
}


def picked(i, z):
    add = lambda c, e: (c + rg.take(rg.tensor([1.0, 2.0]), i) * e, None)  # noqa: E731
    return rg.scan(add, z, ONES)[0]


@pytest.mark.parametrize("wrapped", [rg.jit, rg.checkpoint])
@pytest.mark.parametrize("name", HARMLESS)
def test_none_is_asked_of_conditions_and_indices(name, wrapped):
    with rg.gradient_override_map(RULE):
        due = rg.grad(lambda z: rg.sum(HARMLESS[name](z)))(Z)
        ours = rg.grad(lambda z: rg.sum(wrapped(HARMLESS[name])(z)))(rg.tensor(Z))
    assert ours.tolist() == due.tolist()
