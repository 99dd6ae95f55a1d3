"""Variables that a custom function reads, against the same function with explicit inputs."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import GradientError, RuleError


class Layer:
    """A layer with Variables, whose gradient by w is 10 times the true one."""

    def __init__(self):
        self.w, self.b = (rg.Variable(v, name=n) for v, n in (([2.0, 3.0], "w"), ([1.0, 2.0], "b")))
        self.x = rg.tensor([5.0, 7.0])

        @rg.custom_grad
        def custom(x, save):
            save([x])
            return x * self.w + self.b, lambda dy, saved: [
                dy * self.w, {"w": 10 * dy * saved[0], self.b: dy},
            ]  # fmt: skip

        @rg.custom_grad
        def explicit(x, w, b, save):
            save([x, w])
            return x * w + b, lambda dy, saved: [dy * saved[1], 10 * dy * saved[0], dy]

        self.custom = custom
        self.explicit = lambda x: explicit(x, self.w, self.b)


def once(f, x):
    return (f(x) ** 2).sum()


def twice(f, x):
    return (f(rg.tanh(f(x))) ** 2).sum()


def scanned(f, x):
    return (rg.scan(lambda h, _: (rg.tanh(f(h)), None), x, length=3)[0] ** 2).sum()


def branched(f, x):
    return rg.cond(x.sum() > 0, lambda x: once(f, x), lambda x: x.sum(), x)


def checkpointed(f, x):
    return rg.checkpoint(lambda x: twice(f, x))(x)


RUNS = [once, twice, scanned, branched, checkpointed]


def slope(loss):
    """A function of the first derivative."""
    return lambda: sum((g * g).sum() for g in rg.variable_grads(loss)[1].values())


MODES = {
    "eager": lambda loss: rg.variable_grads(loss)[1],
    "jit inside": lambda loss: rg.variable_grads(rg.jit(loss))[1],
    "jit outside": lambda loss: rg.jit(lambda: rg.variable_grads(loss)[1])(),
    "second order": lambda loss: rg.variable_grads(slope(loss))[1],
    "second order of jit": lambda loss: rg.variable_grads(rg.jit(slope(loss)))[1],
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("mode", MODES)
def test_as_explicit_inputs(run, mode):
    layer = Layer()
    found, expected = (
        MODES[mode](lambda f=f: run(f, layer.x)) for f in (layer.custom, layer.explicit)
    )
    assert {*found} == {*expected} == {"w", "b"}
    for name, dx in expected.items():
        np.testing.assert_allclose(found[name].numpy(), dx.numpy(), rtol=1e-5)
        assert (dx.numpy() != 0).all()


def test_arguments_as_well():
    """Also Variables among the arguments, and arguments alone."""
    layer = Layer()
    v = rg.Variable([5.0, 7.0], name="v")
    found, expected = (
        rg.variable_grads(lambda f=f: once(f, v))[1] for f in (layer.custom, layer.explicit)
    )
    for name in ("w", "b", "v"):
        np.testing.assert_allclose(found[name].numpy(), expected[name].numpy())
    found, expected = (
        rg.grad(lambda x, f=f: once(f, x))(layer.x) for f in (layer.custom, layer.explicit)
    )
    np.testing.assert_allclose(found.numpy(), expected.numpy())


def test_no_arguments_and_a_value_of_a_variable():
    w = rg.Variable([2.0, 3.0], name="w")
    same = rg.custom_grad(lambda: (w.value, lambda dy: {"w": 7 * dy}))
    (dw,) = rg.variable_grads(lambda: (same() * w).sum())[1].values()
    assert dw.tolist() == [16.0, 24.0]


def test_a_function_in_another_one():
    layer = Layer()
    doubled = rg.custom_grad(
        lambda x: (2 * layer.custom(x), lambda dy: (dy, {"w": 100 * dy, "b": None}))
    )
    found = rg.variable_grads(lambda: doubled(layer.x).sum())[1]
    assert found["w"].tolist() == [100.0, 100.0]
    assert found["b"].tolist() == [0.0, 0.0]


def test_only_the_chosen_variables_need_gradients():
    layer = Layer()
    some = rg.custom_grad(lambda x: (x * layer.w + layer.b, lambda dy: (dy, {"w": 3 * dy})))
    (dw,) = rg.variable_grads(lambda: some(layer.x).sum(), [layer.w])[1].values()
    assert dw.tolist() == [3.0, 3.0]


def test_an_assignment_inside():
    """Later reads in the function give the assigned value, which is not an input."""
    count = rg.Variable(0.0, name="count", trainable=False)
    w = rg.Variable(2.0, name="w")

    @rg.custom_grad
    def counted(x):
        count.assign_add(1.0)
        return x * w * count, lambda dy: (dy, {"w": 5 * dy})

    y, grads = rg.variable_grads(lambda: counted(rg.tensor(3.0)))
    assert (y.item(), grads["w"].item(), count.numpy()) == (6.0, 5.0, 1.0)


@pytest.mark.parametrize("mode", ["eager", "jit inside", "jit outside"])
@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        (lambda dy: dy, GradientError, r"closes over the Variable 'w'.*\[dx, {'w': dv}\]"),
        (lambda dy: [dy], GradientError, "returned no gradient for it"),
        (lambda dy: (dy, {"W": dy}), GradientError, "closes over the Variable 'w'"),
        (lambda dy: (dy, {"w": dy, "v": dy}), RuleError, "by the keys 'w', 'v', but it reads 'w'"),
        (lambda dy: (dy, {"w": dy[:1]}), RuleError, "input 'w', returned the shape"),
    ],
)
def test_wrong_answers(mode, answer, error, match):
    w, x = rg.Variable([2.0, 3.0], name="w"), rg.tensor([5.0, 7.0])
    f = rg.custom_grad(lambda x: (x * w, answer))
    with pytest.raises(error, match=match):
        MODES[mode](lambda: f(x).sum())


def test_equal_names():
    a, b = (rg.Variable([v], name="w") for v in (2.0, 3.0))
    f = rg.custom_grad(lambda x: (x * a * b, lambda dy: (dy, {"w": dy})))
    with pytest.raises(RuleError, match="several Variables are called 'w'"):
        rg.variable_grads(lambda: f(rg.tensor([5.0])).sum())
    f = rg.custom_grad(lambda x: (x * a * b, lambda dy: (dy, {a: dy, b: 2 * dy})))
    value, grads = rg.variable_grads(lambda: f(rg.tensor([5.0])).sum(), [b])
    assert value.item() == 30.0
    assert [dx.tolist() for dx in grads.values()] == [[2.0]]
