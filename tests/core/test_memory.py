"""What tapes keep, and that nothing is left behind."""

import gc
import weakref

import numpy as np
import pytest

import regrad as rg


def kept_bytes(f, x):
    """The bytes of all arrays that the tape of f keeps alive beside its input and output."""
    kept = {}
    _, back = rg.vjp(f, x)
    run = back.__closure__
    (linearized,) = [c.cell_contents for c in run if type(c.cell_contents).__name__ == "Linearized"]
    for record in linearized.tape.records:
        tensors = [t for t in record.xs if t is not None]
        ys = record.y if isinstance(record.y, tuple) else (record.y,)
        tensors += [t for t in ys if t is not None]
        for t in tensors:
            kept[id(t._data)] = t._data.nbytes
    kept.pop(id(x._data), None)
    return sum(kept.values())


def chain(op, n=100):
    def f(x):
        for _ in range(n):
            x = op(x)
        return x

    return f


MEGABYTE = 250_000


@pytest.mark.parametrize(
    ("name", "op", "megabytes"),
    [
        ("add", lambda x: x + 1.0, 0),
        ("neg", lambda x: -x, 0),
        ("reshape", lambda x: rg.reshape(x, (-1,)), 0),
        ("scale", lambda x: x * 2.0, 0),
        ("sin", rg.sin, 99),
        ("tanh", rg.tanh, 100),
    ],
)
def test_records_keep_what_rules_name(name, op, megabytes):
    x = rg.asarray(np.zeros(MEGABYTE, "f4"))
    assert kept_bytes(chain(op), x) <= megabytes * 1e6 + 1000


def test_records_of_ops_of_one_input_are_made_when_they_are_asked_for():
    x = rg.asarray(np.array([0.3, 0.5, -2.0]))
    y, back = rg.vjp(lambda x: rg.reciprocal(-rg.tanh(rg.sin(x))) * x, x)
    linearized = back.__closure__[0].cell_contents
    records = linearized.tape.records
    assert [r.op.type for r in records] == ["Sin", "Tanh", "Neg", "Reciprocal", "Mul"]
    assert [len(r.xs) for r in records] == [1, 0, 0, 0, 2]
    assert [r.y is not None for r in records] == [False, True, False, True, False]
    assert all(spec == ((3,), np.float64) for r in records for spec in r.specs)
    before = [linearized.inputs[0][0]._id, *(r.outputs for r in records)]
    assert [r.inputs[0] for r in records] == before[:-1]
    assert records[0].xs[0]._id == before[0]
    assert records[1].y._id == before[2]
    z = x.numpy() + 1e-30j
    expected = (-z / np.tanh(np.sin(z))).imag / 1e-30
    for _ in range(2):
        np.testing.assert_allclose(back(rg.ones_like(y))[0].numpy(), expected, rtol=1e-12)


def test_ops_of_one_input_leave_the_garbage_collector_nothing_to_follow():
    def followed(n):
        seen = []

        def f(x):
            for _ in range(n):
                x = rg.tanh(rg.sin(x))
            gc.collect()
            seen.append(len(gc.get_objects()))
            return x

        rg.grad(f)(rg.tensor([1.0]))
        return seen[0]

    assert followed(1000) - followed(10) < 500


def test_only_the_wanted_gradients_inputs_are_kept():
    a, b = rg.ones((10, 10)), rg.ones((10, 10))
    _, back = rg.vjp(lambda a: rg.matmul(a, b), a)
    linearized = back.__closure__[0].cell_contents
    (record,) = linearized.tape.records
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

    rg.grad(f)(rg.tensor([1.0]))


def test_a_custom_gradient_keeps_what_it_saves():
    seen = []

    def f(x, save):
        h = rg.exp(x)
        seen.append(weakref.ref(h))
        save([x])
        return h * 2, lambda dy, saved: dy * saved[0]

    op = rg.custom_grad(f)
    rg.grad(lambda x: (op(x), seen.append(seen[0]() is None))[0])(rg.tensor([1.0]))
    assert seen[1] is True


def growth(work, times):
    work(20)
    gc.collect()
    before = len(gc.get_objects())
    work(times)
    gc.collect()
    return len(gc.get_objects()) - before


def test_no_objects_are_left_by_gradients():
    op = rg.custom_grad(lambda x: (x * x, lambda dy: dy * x))

    def work(n):
        for _ in range(n):
            rg.grad(lambda x: rg.sin(op(x)) + x)(2.0)

    assert growth(work, 500) < 50


def test_no_objects_are_left_by_scopes():
    def work(n):
        for _ in range(n):
            with rg.gradient_override_map({"Sign": lambda dy: dy}):
                rg.grad(rg.sign)(1.0)

    assert growth(work, 500) < 50


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
