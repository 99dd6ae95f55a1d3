"""A result that nothing uses has no gradient: its rule does not run, whatever form the body has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg


def one(x):
    return rg.expand_dims(x, axis=0)


@rg.name_scope("block")
def block(x):
    return rg.log(x), x * x


FORMS = {
    "plain": lambda x, p: p(x)[1], "checkpoint": lambda x, p: rg.checkpoint(p)(x)[1],
    "scan": lambda x, p: rg.scan(lambda c, _: p(c)[::-1], x, None, 3)[0],
    "scan, checkpoint": lambda x, p: rg.scan(lambda c, _: p(c)[::-1], x, None, 3, checkpoint=True)[
        0
    ],
    "scan, carry": lambda x, p: rg.scan(lambda c, _: (p(c[1]), None), (x, x), None, 3)[0][1],
    "cond": lambda x, p: rg.cond(x > -1, p, lambda x: (x, x), x)[1],
    "jit": lambda x, p: rg.jit(p)(x)[1], "vmap": lambda x, p: rg.vmap(p)(one(x))[1].sum(),
    "map": lambda x, p: rg.map(p, one(x))[1].sum(),
    "fori_loop": lambda x, p: rg.fori_loop(0, 2, lambda i, c: p(c[1]), (x, x))[1],
    "while_loop": lambda x, p: rg.while_loop(
        lambda c: c[2] < 2,
        lambda c: (*p(c[1]), c[2] + 1),
        (x, x, rg.tensor(0, dtype="int32")),
        max_steps=4,
    )[1],
    "vmap of scan": lambda x, p: rg.vmap(lambda x: FORMS["scan"](x, p))(one(x)).sum(),
    "scan of jit": lambda x, p: rg.scan(lambda c, _: rg.jit(p)(c)[::-1], x, None, 2)[0],
}  # fmt: skip
MODES = {"eager": lambda f: f, "jit": rg.jit}
modes = pytest.mark.parametrize("mode", MODES)
DATA = [np.float64, lambda x: jnp.asarray(x, dtype="float64")]


@pytest.mark.slow(but=8)
@modes
@pytest.mark.parametrize("form", FORMS)
def test_a_singular_result_does_not_reach_the_gradient(form, mode):
    """And a rule for it, which is on no path, does not run."""
    f = lambda x: FORMS[form](x, lambda x: (rg.log(x), x)) ** 2  # noqa: E731
    g = MODES[mode](lambda x: (rg.grad(f)(x), rg.grad(rg.grad(f))(x)))
    h = MODES[mode](rg.grad(lambda x: FORMS[form](x, lambda x: (rg.exp(x), x))))
    for to in DATA:
        with np.errstate(all="ignore"):  # of the values: log(0)
            assert [dx.item() for dx in g(rg.asarray(to(0.0)))] == [0, 2]
        with rg.gradient_override_map({"Exp": rg.rules.optional(lambda dy: 0 * dy + 1)}) as used:
            assert h(rg.asarray(to(0.5))).item() == 1
        assert [hit.ran for hit in used.hits] == [0] * len(used.hits)


@modes
def test_a_zero_that_arithmetic_makes_is_a_gradient(mode):
    """So are zeros that the caller gives to `vjp`."""
    zero, unit = rg.scalar(0.0), rg.scalar(1.0)
    p = lambda x: (rg.exp(x), x)  # noqa: E731
    last = lambda x: rg.scan(lambda c, _: (p(c[1]), None), (x, x), None, 1)[0]  # noqa: E731
    by_grad = rg.grad(lambda x: 0 * last(x)[0] + last(x)[1])
    by_vjp = lambda x: rg.vjp(rg.checkpoint(p), x)[1]((zero, unit))[0]  # noqa: E731
    for f in by_grad, by_vjp:
        with rg.gradient_override_map({"Exp": lambda dy: 0 * dy + 1}) as used:
            assert MODES[mode](f)(rg.scalar(0.5)).item() == 2
        used.assert_fired()


# -- carries: used if any step uses them, as in lax.scan -------------------------------------------


@jax.custom_vjp
def exp(x):
    return jnp.exp(x)


exp.defvjp(lambda x: (jnp.exp(x), None), lambda _, dy: (0 * dy + 1,))


def nested(e, scan, c, _):
    step = lambda d, _: ((d[0] * 1.1 + d[1], e(d[0]) * 0.2), None)  # noqa: E731
    return scan(step, c, None, 2)[0], None


STEPS = {
    "swapped": lambda e, scan, c, _: ((e(c[1]) * 0.3, c[0] * 2.0), None),
    "log": lambda e, scan, c, _: ((c[0] * 1.5, e(c[0])), None),
    "read one step later": lambda e, scan, c, _: ((c[0] * 1.5 + c[1], e(c[0]) * 0.1), None),
    "with a y": lambda e, scan, c, _: ((c[0] * 1.5 + c[1], e(c[0]) * 0.1), e(c[1])),
    "nested": nested,
}


def last(step, e, scan, x, **how):
    return scan(lambda c, t: STEPS[step](e, scan, c, t), (x, x * 0.5), None, 3, **how)[0][0]


def fixed(dy):
    return 0 * dy + 1


@pytest.mark.slow(but=4)
@modes
@pytest.mark.parametrize("step", STEPS)
def test_carries_are_those_of_lax_scan(step, mode):
    expected = jax.grad(lambda x: last(step, exp, jax.lax.scan, x))(0.4)
    with rg.gradient_override_map({"Exp": rg.rules.optional(fixed)}):
        for how in {}, {"reverse": True}, {"checkpoint": True}:
            scan = functools.partial(rg.scan, **how)
            f = rg.grad(lambda x: last(step, rg.exp, scan, x))  # noqa: B023
            np.testing.assert_allclose(MODES[mode](f)(np.float64(0.4)), expected, rtol=1e-12)


def by_while(x, steps):
    body = lambda c: (c[0] * 1.5 + c[1], rg.exp(c[0]) * 0.1, c[2] + 1)  # noqa: E731

    first = x, x * 0.5, rg.tensor(0, dtype="int32")
    return rg.while_loop(lambda c: c[2] < 3, body, first, max_steps=steps)[0]


def by_variable(x, steps):
    v = VARIABLE
    v.assign(x * 0.5)
    step = lambda c, _: ((c * 1.5 + v, v.assign(rg.exp(c) * 0.1))[0], None)  # noqa: E731

    return rg.scan(step, x, None, 3)[0]


VARIABLE = rg.Variable(np.float64(0.2))


@modes
@pytest.mark.parametrize(("form", "steps"), [(by_while, 4), (by_while, 100), (by_variable, 0)])
def test_other_loops_agree_with_lax_scan(form, steps, mode):
    expected = jax.grad(lambda x: last("read one step later", exp, jax.lax.scan, x))(0.4)
    with rg.gradient_override_map({"Exp": fixed}):
        dx = MODES[mode](rg.grad(lambda x: form(x, steps)))(np.float64(0.4))
    np.testing.assert_allclose(dx, expected, rtol=1e-12)


# -- what is built on it ---------------------------------------------------------------------------


W = np.eye(3) * 0.5


@modes
def test_a_network_with_a_figure_for_the_log(mode):
    def cell(h, x):
        h = rg.tanh(h @ W + x)
        return h, rg.sqrt(rg.mean((h - rg.mean(h)) ** 2))

    loss = lambda xs: rg.scan(cell, rg.zeros(3, dtype="float64"), xs)[0].sum()  # noqa: E731

    dxs = MODES[mode](rg.grad(loss))(rg.tensor(np.zeros((4, 3))))
    np.testing.assert_allclose(dxs[0], [0.125] * 3)


def test_the_backward_loop_takes_what_the_forward_loop_kept():
    """The gradient with a figure has as many loops as the one without."""

    def loops(*figures):
        def cell(h, x):
            h = rg.tanh(h @ W + x)
            return h, [figure(h) for figure in figures]

        f = lambda xs: rg.scan(cell, rg.zeros(3, dtype="float64"), xs)[0].sum()  # noqa: E731
        return rg.jit(rg.grad(f)).lower(rg.tensor(np.zeros((4, 3)))).as_text().count("while(")

    assert loops() == loops(rg.sum)


def test_a_loop_of_unknown_length_refuses_live_results_alone():
    f = lambda x: rg.while_loop(lambda c: c < 3, lambda c: c + 1 + 0 * x, x * 0)  # noqa: E731
    g = rg.grad(lambda x: rg.checkpoint(lambda x: (f(x), x * x))(x)[1])
    assert rg.jit(g)(rg.scalar(0.5)).item() == 1


@modes
def test_builtin_of_a_whole_call_leaves_out_what_is_unused(mode):
    rule = lambda dy, builtin: builtin(dy)  # noqa: E731
    with np.errstate(all="ignore"), rg.gradient_override_map({rg.at("block"): rule}) as used:
        dx = MODES[mode](rg.grad(lambda x: block(x)[1]))(rg.scalar(0.0))
    used.assert_fired()
    assert dx.item() == 0


@modes
def test_a_rule_of_a_whole_call_gets_zeros(mode):
    def rule(dy, x):
        unused, used = dy
        return used * x + unused + 1

    with rg.gradient_override_map({rg.at("block"): rule}):
        dx = MODES[mode](rg.grad(lambda x: block(x)[1]))(rg.scalar(3.0))
    assert dx.item() == 4


def test_find_nan_agrees():
    f = lambda x: FORMS["scan"](x, lambda x: (rg.log(x), x))  # noqa: E731
    with np.errstate(all="ignore"):
        found = rg.find_nan(f)(rg.scalar(0.0))
    assert found is None or found.phase == "forward"


@pytest.mark.slow
def test_jax_drops_unused_results_of_a_regrad_function():
    f = rg.jax.from_regrad(lambda x: (rg.log(x), x * x))
    g = lambda x: f(x)[1]  # noqa: E731
    x = jnp.zeros(())
    assert jax.grad(g)(x) == 0
    assert jax.jit(jax.grad(g))(x) == 0
    assert jax.grad(lambda x: jax.vmap(f)(x[None])[1].sum())(x) == 0
    assert jax.grad(jax.grad(g))(x) == 2
    assert jnp.isnan(jax.vjp(f, x)[1]((x, x + 1))[0])  # zeros that the caller gives


def test_an_op_of_which_no_result_is_used_connects_nothing():
    f = lambda x, y: (rg.unstack(x), rg.sum(y))[1]  # noqa: E731
    dx, dy = rg.grads(f, unconnected="none")([rg.ones(2), rg.ones(2)])
    assert dx is None and dy.tolist() == [1, 1]
