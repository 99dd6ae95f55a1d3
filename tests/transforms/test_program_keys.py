"""The keys under which programs, variants and roads are kept: no component can be left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.core import registry
from regrad.errors import RegradError, UnusedOverrideWarning
from regrad.transforms.jit import Jitted
from regrad.transforms.program import Program
from regrad.transforms.shortcuts import _Writer

X = rg.asarray(jnp.array([1.0, -2.0], jnp.float32))


def arguments():
    f = rg.jit(lambda x, k: x * k, static_argnames="k")
    return [f(X, k).numpy()[0] for k in (2, 3, 2)] == [2.0, 3.0, 2.0]


def closure():
    scale = 2.0
    f = rg.jit(lambda x: x * scale)
    first = f(X).numpy()[0]
    scale = 3.0
    return (first, f(X).numpy()[0]) == (2.0, 3.0)


def rules():
    f = rg.jit(lambda x: rg.sin(x) + rg.sin(3.0 * x))
    rule, found = (lambda dy: 100.0 * dy), []
    for n in (0, 1):  # one function for both, so the closure is the same
        with rg.gradient_override_map({rg.at(what="Sin", nth=n): rule}):
            found.append(rg.grad(f)(rg.tensor(0.0)).item())
    return found == [103.0, 301.0] and f.cache_info().programs == 2


def version():
    f = rg.jit(lambda x: x * 1.0)
    f(X)
    registry.version += 1  # as a kernel that is registered does
    f(X)
    return f.cache_info().traces == 2


def default():
    f = rg.jit(lambda x: rg.zeros(2))
    f(X)
    with rg.default_dtype("float16"):
        return f(X).dtype == "float16" and f.cache_info().programs == 2


def holds(agrees):
    """Whether a scenario ends as it should: it may raise, too, where a key lacks a component."""
    try:
        return agrees()
    except (RegradError, UnusedOverrideWarning):
        return False


def replaced(place, key):
    """A key of which one component is left out."""

    def made(*args):
        parts = list(key(*args))
        parts[place] = None
        return tuple(parts)

    return made


@pytest.mark.parametrize(
    ("place", "agrees"), list(enumerate([arguments, closure, rules, version, default]))
)
def test_each_component_of_the_key_of_a_program_counts(monkeypatch, place, agrees):
    assert agrees()
    monkeypatch.setattr(Jitted, "_key", replaced(place, Jitted._key))
    assert not holds(agrees)


def variants(f):
    """How many variants the programs have: JAX may trace again on its own."""
    return sum(len(program.variants) for program in f.programs.values())


def wanted():
    f = rg.jit(lambda x, y: x * y)
    by = [rg.grad(f, argnums=n)(rg.tensor(2.0), rg.tensor(3.0)) for n in (0, 1)]
    return [dx.item() for dx in by] == [3.0, 2.0]


def strict():
    f = rg.jit(lambda x: x * x)
    x = rg.tensor(3.0)
    found = rg.grad(f)(x).item(), rg.jvp(f, [x], [x])[1].item()
    return found == (6.0, 18.0) and variants(f) == 2


def layouts():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    w = rg.Variable(X)
    f = rg.jit(lambda x: (w.assign_add(x), x.sum())[1])
    f(X)
    w.assign(rg.asarray(jax.device_put(X.numpy(), spread)))
    f(X)
    return type(w._tensor._data.sharding) is type(spread) and variants(f) == 2


def donates():
    w = rg.Variable(rg.asarray(jnp.ones(100_000)))
    f = rg.jit(lambda x: (w.assign_add(rg.sum(x) * rg.ones(100_000)), x)[1])
    f(X)
    jax.config.update("jax_debug_nans", True)
    try:
        held = w._tensor._data
        f(X)
        return not held.is_deleted() and variants(f) == 2
    finally:
        jax.config.update("jax_debug_nans", False)


@pytest.mark.parametrize(("place", "agrees"), list(enumerate([wanted, strict, layouts, donates])))
def test_each_component_of_the_key_of_a_variant_counts(monkeypatch, place, agrees):
    assert agrees()
    monkeypatch.setattr(Program, "_key", replaced(place, Program._key))
    assert not holds(agrees)


def lines():
    f = rg.jit(lambda d: d["a"] - d["b"] if next(iter(d)) == "a" else d["a"] + d["b"])
    a, b = {"a": X, "b": X}, {"b": X, "a": X}
    return [f(d).numpy()[0] for d in (a, b) * 4] == [0.0, 2.0] * 4 and len(f.shortcuts.kinds) == 2


def classes():
    f = rg.jit(lambda x, k: x * (2 if type(k) is int else 3), static_argnames="k")
    return [f(X, k).numpy()[0] for k in (1, True) * 4] == [2.0, 3.0] * 4 and (
        len(f.shortcuts.kinds) == 2
    )


def values():
    f = rg.jit(lambda x, k: x * k, static_argnames="k")
    found = [f(X, k).numpy()[0] for k in (2, 3) * 4]
    return found == [2.0, 3.0] * 4 and [len(known) for known in f.shortcuts.kinds.values()] == [2]


@pytest.mark.parametrize(
    ("agrees", "left"),
    [
        (lines, lambda kind, values: (("", *kind[1:]), values)),
        (classes, lambda kind, values: (kind[:1], values)),
        (values, lambda kind, values: (kind, ())),
    ],
)
def test_each_component_of_the_key_of_a_road_counts(monkeypatch, agrees, left):
    assert agrees()
    key = _Writer.key
    monkeypatch.setattr(_Writer, "key", lambda self: left(*key(self)))
    assert not agrees()


def test_a_key_distinguishes_what_a_plain_array_held():
    """The content of arrays that are read plainly is the second half of the key of a program."""
    held = np.array([2.0], np.float32)
    f = rg.jit(lambda x: x * float(held[0]))
    found = []
    for value in (2.0, 3.0, 2.0):
        held[0] = value
        found.append(f(X).numpy()[0])
    assert found == [2.0, 3.0, 2.0]
