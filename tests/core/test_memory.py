"""What tapes keep, and that nothing is left behind."""

import gc
import weakref

import numpy as np
import pytest

import regrad as rg
from tests.helpers.rows import close, under

MEGABYTE = rg.asarray(np.zeros(250_000, "f4"))


def linearized(f, x):
    """The record of a differentiated call, and the function of gradients."""
    _, back = rg.vjp(f, x)
    cells = [c.cell_contents for c in back.__closure__]
    (found,) = [c for c in cells if type(c).__name__ == "Linearized"]
    return found, back


def repeated(op, n):
    def f(x):
        for _ in range(n):
            x = op(x)
        return x

    return f


KEPT = {
    "add": (lambda x: x + 1.0, 0), "neg": (lambda x: -x, 0),
    "reshape": (lambda x: rg.reshape(x, (-1,)), 0), "scale": (lambda x: x * 2.0, 0),
    "sin": (rg.sin, 99), "tanh": (rg.tanh, 100),
}  # fmt: skip


@pytest.mark.parametrize(("op", "megabytes"), KEPT.values(), ids=KEPT)
def test_records_keep_what_rules_name(op, megabytes):
    kept = {}  # the bytes of all arrays beside the input
    for record in linearized(repeated(op, 100), MEGABYTE)[0].tape.records:
        for t in (*record.xs, *(record.y if isinstance(record.y, tuple) else (record.y,))):
            if t is not None:
                kept[id(t._data)] = t._data.nbytes
    kept.pop(id(MEGABYTE._data), None)
    assert sum(kept.values()) <= megabytes * 1e6 + 1000


def test_records_of_ops_of_one_input_are_made_when_they_are_asked_for():
    x = rg.asarray(np.array([0.3, 0.5, -2.0]))
    found, back = linearized(lambda x: rg.reciprocal(-rg.tanh(rg.sin(x))) * x, x)
    records = found.tape.records
    kept = [(r.op.type, len(r.xs), r.y is not None) for r in records]
    assert kept == [("Sin", 1, False), ("Tanh", 0, True), ("Neg", 0, False),
                    ("Reciprocal", 0, True), ("Mul", 2, False)]  # fmt: skip
    assert all(spec == ((3,), np.float64) for r in records for spec in r.specs)
    before = [found.inputs[0][0]._id, *(r.outputs for r in records)]
    assert [r.inputs[0] for r in records] == before[:-1]
    assert (records[0].xs[0]._id, records[1].y._id) == (before[0], before[2])
    z = x.numpy() + 1e-30j
    for _ in range(2):
        close(back(rg.ones(3))[0], (-z / np.tanh(np.sin(z))).imag / 1e-30)


def test_ops_of_one_input_leave_the_garbage_collector_nothing_to_follow():
    def followed(n):
        seen = []

        def f(x):
            y = repeated(lambda x: rg.tanh(rg.sin(x)), n)(x)
            gc.collect()
            seen.append(len(gc.get_objects()))
            return y

        rg.grad(f)(rg.tensor([1.0]))
        return seen[0]

    assert followed(1000) - followed(10) < 500


def test_only_the_wanted_gradients_inputs_are_kept():
    b = rg.ones((10, 10))
    (record,) = linearized(lambda a: rg.matmul(a, b), b * 1)[0].tape.records
    assert record.xs[0] is None
    assert record.xs[1] is b


def test_an_intermediate_that_no_rule_names_is_freed_in_the_forward_pass():
    seen = []

    def f(x):
        h = x + 1.0
        seen.append(weakref.ref(h))
        h = h + 1.0
        assert seen[0]() is None
        return h

    @rg.custom_grad
    def custom(x, save):
        h = rg.exp(x)
        seen.append(weakref.ref(h))
        save([x])
        return h * 2, lambda dy, saved: dy * saved[0]

    def g(x):
        y = custom(x)
        assert seen[-1]() is None
        return y

    rg.grad(f)(rg.tensor([1.0]))
    rg.grad(g)(rg.tensor([1.0]))


square = rg.custom_grad(lambda x: (x * x, lambda dy: dy * x))
CALLS = {
    "a gradient": lambda: rg.grad(lambda x: rg.sin(square(x)) + x)(2.0),
    "a scope": lambda: under({"Sin": lambda dy: dy}, rg.grad(rg.sin), 1.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_objects_are_left(name):
    def count(n):
        for _ in range(n):
            CALLS[name]()
        gc.collect()
        return len(gc.get_objects())

    before = count(20)
    assert count(500) - before < 50


def test_gradients_leave_no_reference_cycles():
    f = rg.grad(lambda x: rg.tanh(x) * x)
    f(1.0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            f(1.0)
        assert gc.collect() == 0
    finally:
        gc.enable()
