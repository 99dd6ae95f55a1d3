"""What leads where through loops and branches: output by output, not all to all."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import GradientError

jax = pytest.importorskip("jax")

W = rg.scalar(0.3)


def descend(x, start):
    """Steps of a loop of unknown length: x reaches the value at each, but not the point."""
    return rg.while_loop(
        lambda c: c[0] > 0.01,
        lambda c: (c[0] / 2, c[0] * x),
        (start, start * x),
    )


def test_a_loop_of_unknown_length_has_a_gradient_around_it():
    def f(x):
        point, _ = descend(x, rg.scalar(1.0))
        return point * x + x

    assert rg.jit(rg.grad(f))(W).item() == pytest.approx(rg.grad(f)(W).item())
    assert rg.jit(rg.grad(f))(W).item() == pytest.approx(1 + 2**-7)


def test_it_is_refused_through_the_loop():
    with pytest.raises(
        GradientError, match="while_loop: under jit a loop of unknown length has no gradient"
    ):
        rg.jit(rg.grad(lambda x: descend(x, rg.scalar(1.0))[1]))(W)


def test_branches_inside_a_loop_tell_their_outputs_apart():
    def f(x):
        def body(c):
            point, value = c
            return rg.cond(point > 0.5, lambda: (point / 2, point * x), lambda: (point / 3, value))

        point, _ = rg.while_loop(lambda c: c[0] > 0.01, body, (rg.scalar(1.0), x))
        return point * x

    assert rg.jit(rg.grad(f))(W).item() == pytest.approx(rg.grad(f)(W).item())


@pytest.mark.parametrize("order", [1, 2, 3])
def test_carries_that_nothing_reaches_are_left_out(order):
    def f(x):
        def step(c, _):
            t, decay, y = c
            return (t + 0.1, decay * 0.9, y + rg.sin(x * t) * decay), y * x

        (t, decay, y), ys = rg.scan(
            step, (rg.scalar(0.0), rg.scalar(1.0), rg.scalar(0.0)), None, length=5
        )
        return y * t + ys.sum() * decay

    g = f
    for _ in range(order):
        g = rg.grad(g)
    assert rg.jit(g)(W).item() == pytest.approx(g(W).item(), rel=1e-5)


def test_what_reaches_a_carry_two_steps_later_counts():
    """From x to a, from a to b, from b to c: each by another step."""

    def f(x):
        def step(carry, _):
            a, b, _c, d = carry
            return (x * 1.0, rg.sin(a), b * b, d * 0.5), None

        ones = [rg.scalar(1.0) for _ in range(4)]
        last, _ = rg.scan(step, tuple(ones), None, length=4)
        return last[2] * last[3]

    assert rg.jit(rg.grad(f))(W).item() == pytest.approx(rg.grad(f)(W).item(), rel=1e-5)
    assert rg.jit(rg.grad(f))(W).item() != 0


def test_rules_in_a_loop_still_fire():
    def f(x):
        def step(c, _):
            t, y = c
            return (t + 1.0, rg.sin(y) * t), None

        return rg.scan(step, (rg.scalar(0.0), x), None, length=3)[0][1]

    with rg.gradient_override_map({"Sin": lambda dy: 10 * dy}) as used:
        found = rg.jit(rg.grad(f))(W)
        used.assert_fired()
        expected = rg.grad(f)(W)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6)


def test_nested_minimisation():
    """A descent inside a descent; the inner one depends on no argument of the outer gradient."""

    def minimum(f, start):
        def step(x):
            return x - 0.1 * rg.grad(f)(x)

        return rg.while_loop(lambda x: rg.abs(rg.grad(f)(x)) > 1e-4, step, start)

    def outer(x):
        y = minimum(lambda y: (y - 1.0) ** 2 + x * x, rg.scalar(0.0))
        return (x - 2.0) ** 2 + y

    found = rg.jit(lambda start: minimum(outer, start))(rg.scalar(0.0))
    assert found.item() == pytest.approx(2.0, abs=1e-3)


@pytest.mark.parametrize("max_steps", [1, 64, 65, 100, 1000])
def test_long_bounded_loops_go_in_rounds(max_steps):
    """The steps that there are count, wherever in a round they end."""

    def f(x, steps):
        def body(c):
            return c[0] + 1, rg.sin(c[1]) * 1.1

        return rg.while_loop(lambda c: c[0] < steps, body, (0, x), max_steps=max_steps)[1]

    for steps in {0, 1, max_steps // 2, max_steps - 1, max_steps}:
        g = rg.value_and_grad(lambda x, steps=steps: f(x, steps))
        for found, expected in zip(rg.jit(g)(W), g(W), strict=True):
            assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    assert np.isnan(rg.jit(lambda x: f(x, max_steps + 1))(W).item())


def test_rounds_carry_variables_along():
    v = rg.Variable(0.0, name="sum")

    def f(x):
        v.assign(0.0)

        def body(c):
            v.assign(v + x)
            return c + 1

        rg.while_loop(lambda c: c < 70, body, 0, max_steps=100)
        return v * x

    assert rg.jit(rg.grad(f))(W).item() == pytest.approx(2 * 70 * 0.3, rel=1e-4)
    assert v.numpy() == pytest.approx(21.0, rel=1e-4)
