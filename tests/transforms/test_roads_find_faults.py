"""The roads find it when a part of a key, or of a walk, is left out."""

import numpy as np
import pytest

import regrad as rg
from regrad.transforms import arguments, closures, region, variants
from tests.roads import ROADS, Road


def g(a, b):
    return rg.sum(rg.sin(a) * b * b)


XS = [rg.tensor([0.3, 0.7]), rg.tensor([1.5, -0.4])]
DUE = [np.cos([0.3, 0.7]) * [2.25, 0.16], 2 * np.sin([0.3, 0.7]) * [1.5, -0.4]]


def is_right(road):
    found = road.gradients(g, XS)
    pairs = zip(found, DUE, strict=True)
    return all(np.allclose(dx.numpy(), road.factor * due, 1e-4) for dx, due in pairs)


def without_order(patch):
    whole = arguments.containers.opened_in_order

    def opened(value):
        leaves, rebuild, (spec, *_) = whole(value)
        return leaves, rebuild, (spec,)

    patch.setattr(arguments.containers, "opened_in_order", opened)


def ignoring(owner, name, answer):
    return lambda patch: patch.setattr(owner, name, answer)


def with_old_arrays(patch):
    """Convert what an array held at the first call, and no later content."""
    convert, convert_array = variants.Variant.convert, variants.Variant.convert_array
    known = {}
    for name, whole in (("convert", convert), ("convert_array", convert_array)):

        def first(self, i, x, whole=whole):
            return known.setdefault((id(self), i), (self, whole(self, i, x)))[1]

        patch.setattr(variants.Variant, name, first)


FAULTS = {
    "the order of keys": without_order,
    "whether the closure is current": ignoring(closures.Closure, "is_current", lambda self: True),
    "what regrad's objects hold": ignoring(closures, "_held", lambda value: ()),
    "what cells and attributes hold": ignoring(
        closures._Walk, "watch", lambda self, where, key, read: None
    ),
    "the key of the closure": ignoring(
        closures._Walk, "entry", lambda self, name, value: self.entries.append(name)
    ),
    "the content of arrays": with_old_arrays,
    "which results are used": ignoring(region.RegionRule, "sparse", False),
}
SUSPECTS = [
    Road("grad(argnums)", "plain", "compiled, in another order"),
    Road("grad(argnums)", "checkpoint", "eager"),
    Road("grads", "cond", "compiled"),
    *[r for r in ROADS if r.call.endswith("changes") and r.api in ("grads", "grad(argnums)")],
]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, monkeypatch):
    FAULTS[name](monkeypatch)
    assert not all(map(is_right, SUSPECTS))


def test_without_a_fault_the_roads_are_right():
    assert all(map(is_right, SUSPECTS))
