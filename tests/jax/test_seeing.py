"""`trace_gradients`, `find_nan`, `saved_bytes`, checks and comparisons of JAX functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError
from regrad.testing import GradientCheckError
from tests.helpers.marks import marked_lines

LINES = marked_lines(__file__)
X = jnp.array([0.5, -1.0, 2.0])


def ops(trace):
    return [step.op_type for step in trace.steps]


# -- traces ----------------------------------------------------------------------------------------


def rolled(x):
    def step(carry, a):
        return carry * jnp.tanh(a), carry + a

    carry, ys = jax.lax.scan(step, 1.0, x, reverse=True)
    return carry + jnp.sum(ys**2)


def chosen(x):
    return jnp.sum(jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x))


def nested(x):
    inner = jax.jit(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))(x))
    return jnp.sum(inner(x) * jax.nn.relu(x)) + jnp.linalg.norm(x)


def looped(x):
    return jnp.sum(jax.lax.fori_loop(0, 5, lambda i, x: jnp.sin(x) * x, x))


def batched(x):
    return jnp.sum(jax.vmap(lambda a: jnp.exp(a) / (1 + a * a))(x))


def long(x):
    return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=100)[0].sum()


@pytest.mark.versions
@pytest.mark.parametrize("f", [rolled, chosen, nested, looped, batched, long])
def test_gradients_are_those_of_jax(f):
    trace = rg.jax.trace_gradients(f)(X)
    ((name, figures),) = trace.inputs
    assert name == "args[0]"
    assert figures.norm == pytest.approx(float(jnp.linalg.norm(jax.grad(f)(X))))
    assert float(trace.value) == pytest.approx(float(f(X)))


def test_calls_are_opened_and_own_functions_of_jax_are_one_step():
    steps = rg.jax.trace_gradients(nested)(X).steps
    names = [step.op_type for step in steps]
    assert {"sin", "exp", "relu", "sqrt"} <= set(names)
    assert not {"jit", "pjit", "checkpoint", "custom_jvp_call"} & set(names)
    assert {step.kind for step in steps} == {"built-in"}


@pytest.mark.versions
def test_rounds_of_short_scans_have_paths_and_long_ones_are_one_step():
    trace = rg.jax.trace_gradients(rolled)(X)
    assert {step.path for step in trace.steps} == {"", "scan[0]", "scan[1]", "scan[2]"}
    assert "scan" not in ops(trace)
    assert "scan" in ops(rg.jax.trace_gradients(long)(X))
    assert "scan" not in ops(rg.jax.trace_gradients(long, longest_scan=100)(X))


def test_lines_are_those_of_the_user_also_behind_programs_that_jax_remembers():
    def f(x):
        a = jnp.linalg.norm(x)
        return a + jnp.linalg.norm(2 * x)  # here: second norm

    steps = rg.jax.trace_gradients(f)(X).steps
    places = [step.line for step in steps if step.op_type == "sqrt"]
    line = int(LINES["second norm"].rpartition(":")[2])
    assert [int(place.rpartition(":")[2]) for place in places] == [line, line - 1]


@jax.custom_vjp
def rounded(x):
    return jnp.round(x)


def straight_through(_, dy):
    return (dy,)


rounded.defvjp(lambda x: (jnp.round(x), None), straight_through)


@rg.jax.custom_grad
def doubled(x):
    return 2 * x, lambda dy: 3 * dy


def test_rules_are_named_with_their_places():
    def f(x):
        return jnp.sum(rounded(x) * doubled(x) * jnp.sign(x))

    steps = rg.jax.trace_gradients(rg.jax.override(f, {"Sign": "Identity"}))(X).steps
    found = {step.op_type: (step.kind, step.rule.partition(", ")[0]) for step in steps}
    assert found["rounded"] == ("custom", "straight_through")
    assert found["doubled"] == ("custom", "doubled")
    assert found["sign"][0] == "override"


def test_gradients_go_to_all_float_leaves_or_to_those_that_are_asked_for():
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}

    def loss(params, x, labels, scale):
        y = x @ params["w"] + params["b"]
        return scale * jnp.sum(y * jax.nn.one_hot(labels, 2)), y

    args = params, np.ones((4, 3)), jnp.array([0, 1, 1, 0]), 2.0
    trace = rg.jax.trace_gradients(loss, has_aux=True)(*args)
    assert [n for n, _ in trace.inputs] == ["args[0]['b']", "args[0]['w']", "args[1]", "args[3]"]
    trace = rg.jax.trace_gradients(loss, has_aux=True, argnums=0)(*args)
    assert [n for n, _ in trace.inputs] == ["args[0]['b']", "args[0]['w']"]
    assert isinstance(trace.value, tuple)


def test_arrays_as_results_have_gradients_of_ones():
    ((_, figures),) = rg.jax.trace_gradients(lambda x: {"a": x * 2, "n": 3})(X).inputs
    assert figures.norm == pytest.approx(2 * 3**0.5)


def test_what_has_no_gradient_is_refused():
    with pytest.raises(GradientError, match="no argument holds floats"):
        rg.jax.trace_gradients(lambda n: n)(jnp.array([1, 2]))
    with pytest.raises(GradientError, match="f must return floats"):
        rg.jax.trace_gradients(lambda x: x > 0)(X)
    with pytest.raises(ArgumentError, match="pair"):
        rg.jax.trace_gradients(lambda x: x, has_aux=True)(X)
    with pytest.raises(GradientError, match="closes over an array that is made in the function"):
        rg.jax.trace_gradients(_closing)(X)


def _closing(x):
    y = x + 1

    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, y), lambda y, dy: (dy * y,))
    return jnp.sum(f(x))


# -- models of others ------------------------------------------------------------------------------


def test_modules_of_flax_have_paths():
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(3, name="first")(x))  # here: flax
            return nn.Dense(1)(x)

    model = Model()
    params = model.init(jax.random.key(0), jnp.ones((2, 3)))
    trace = rg.jax.trace_gradients(model.apply)(params, jnp.ones((2, 3)))
    (first,) = [s for s in trace.steps if s.path == "Model/first" and s.op_type == "dot_general"]
    assert first.line == LINES["flax"]
    assert "args[0]['params']['first']['kernel']" in dict(trace.inputs)


def test_modules_of_nnx_are_not_changed():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    before = np.array(model.layers[1].mean[...])
    trace = rg.jax.trace_gradients(lambda m, x: jnp.sum(m(x)))(model, jnp.ones((4, 3), "f4"))
    assert "args[0].layers.0.kernel" in dict(trace.inputs)
    np.testing.assert_array_equal(model.layers[1].mean[...], before)


def test_a_module_of_equinox_is_differentiated_by():
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    trace = rg.jax.trace_gradients(mlp)(X)
    assert "f.layers[0].weight" in dict(trace.inputs)


def test_modules_of_haiku_have_paths():
    hk = pytest.importorskip("haiku")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([3, 2])(x)))
    params = model.init(jax.random.key(0), jnp.ones((2, 3)))
    trace = rg.jax.trace_gradients(model.apply)(params, jnp.ones((2, 3)))
    assert {"mlp", "mlp/linear_0", "mlp/linear_1"} <= {step.path for step in trace.steps}


# -- what is not finite ----------------------------------------------------------------------------


def test_an_infinity_that_spoils_nothing_is_no_finding():
    masked = lambda x: jnp.sum(jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)) * x)  # noqa: E731
    assert rg.jax.find_nan(masked)(X) is None


def test_the_element_and_what_was_there():
    x = jnp.ones((5, 9)).at[3, 7].set(0.0)
    found = rg.jax.find_nan(lambda x: jnp.sum(jnp.log(x)))(x)
    assert (found.op_type, found.phase, found.index, found.count) == ("log", "forward", (3, 7), 1)
    assert "x = 0" in str(found) and "log(maximum(x, eps))" in str(found)


def test_what_is_masked_by_where_is_said_to_be():
    found = rg.jax.find_nan(lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0)))(jnp.zeros(2))
    assert (found.op_type, found.phase, found.what) == ("sqrt", "backward", "NaN")
    assert "behind a mask" in found.cure


def test_an_argument_that_is_not_finite():
    found = rg.jax.find_nan(lambda p: jnp.sum(p["w"]))({"w": jnp.array([1.0, jnp.nan])})
    assert (found.phase, found.output, found.index) == ("argument", "args[0]['w']", (1,))


def test_a_constant_that_is_not_finite_is_found_where_it_comes_in():
    mean = np.array([0.0, np.nan, 0.0])
    found = rg.jax.find_nan(lambda x: jnp.sum(jnp.sin(x - mean) ** 2))(X)
    assert (found.op_type, found.index) == ("sub", (1,)) and "b = nan" in str(found)


@pytest.mark.versions
def test_nan_in_a_round_of_a_scan():
    def f(x):
        return jax.lax.scan(lambda c, a: (jnp.exp(c * a), None), 1.0, x)[0]

    for length in (7, 700):  # a scan that is too long to be opened is opened if it must be
        found = rg.jax.find_nan(f)(jnp.full(length, 3.0))
        assert (found.op_type, found.path) == ("exp", "scan[2]")


def test_a_custom_rule_that_makes_nan_is_named():
    inverse = rg.jax.custom_grad(lambda x: (jnp.sin(x), lambda dy: dy / x))
    found = rg.jax.find_nan(lambda x: jnp.sum(inverse(x)))(jnp.array([1.0, 0.0]))
    assert found.phase == "backward" and "<lambda>" in found.rule and found.index == (1,)


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [rolled, chosen, nested, looped, batched])
def test_bytes_are_those_that_jax_keeps(f):
    kept = {
        id(x): x for x in jax.tree_util.tree_leaves(jax.jit(jax.vjp, static_argnums=0)(f, X)[1])
    }
    saved = rg.jax.saved_bytes(f)(X)
    largest = sum(x.nbytes for x in kept.values())
    assert 0 < saved.total <= largest


def test_bytes_by_line():
    def f(x):
        a = jnp.sin(x)  # here: saved
        return jnp.sum(jax.checkpoint(lambda a: jnp.exp(jnp.tanh(a)))(a))

    rows = rg.jax.saved_bytes(f)(jnp.zeros(100)).rows
    lines = {row.op_type: (row.line, row.size) for row in rows}
    assert lines["cos"] == (LINES["saved"], 800) and lines["sin"] == (LINES["saved"], 800)
    assert "tanh" not in lines


# -- checks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [rolled, nested, batched])
def test_right_gradients_pass_to_third_order(f):
    rg.jax.check_gradients(f, [X + 3], order=3)


def test_complex_arguments():
    rg.jax.check_gradients(lambda z: jnp.abs(z * (1 + 2j)) ** 2, [jnp.array([0.3 + 1j])], order=2)


def test_parameters_of_single_precision_are_checked_in_double():
    params = {"w": np.ones((3, 2), "float32"), "n": 3}
    rg.jax.check_gradients(lambda p, x: jnp.tanh(x @ p["w"]).sum(), [params, X])


def test_the_message_names_the_rule_and_the_error():
    cube = jax.custom_jvp(lambda x: x**3)
    cube.defjvp(lambda xs, ts: (xs[0] ** 3, -3 * ts[0] * xs[0] ** 2))

    with pytest.raises(GradientCheckError) as error:
        rg.jax.check_gradients(lambda x: jnp.sum(jnp.exp(cube(x))), [X])  # here: cube
    text = str(error.value)
    assert "wrong sign" in text and LINES["cube"] in text and "(forward mode)" in text
    assert error.value.report.causes[0].input == "x"


def test_overrides_are_checked_alone():
    f = rg.jax.override(lambda x: jnp.sin(x) * x, {"Sin": lambda dy, x: 2 * dy * jnp.cos(x)})
    cause = rg.jax.gradient_report(f, [X]).causes[0]
    assert cause.op_type == "sin" and cause.kind == "scaled by 2"


def test_a_rule_that_cuts_the_history_of_dy():
    stale = jax.custom_vjp(jnp.sin)
    stale.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (jax.lax.stop_gradient(dy) * jnp.cos(x),))
    rule = {"Sin": lambda dy, x: jax.lax.stop_gradient(dy) * jnp.cos(x)}
    for f, cause in (
        (stale, "Wrong: stop_gradient"),
        (rg.jax.override(jnp.sin, rule), "input 'dy', order 2"),
        (jax.jit(jax.vmap(stale)), ""),
    ):
        rg.jax.check_gradients(f, [X])
        with pytest.raises(GradientCheckError, match=rf"(?s)order 2 by dy\(.*{cause}"):
            rg.jax.check_gradients(f, [X], order=2)
    rg.jax.check_gradients(lambda z: jnp.exp(z) * jnp.conj(z), [jnp.array([0.3 + 1j])], order=3)


def test_nothing_to_check_is_said():
    with pytest.raises(ArgumentError, match="nothing was checked: there are no elements"):
        rg.jax.check_gradients(jnp.sin, [jnp.zeros((0, 2))])


def test_a_stopped_gradient_is_named_where_the_user_stops_it():
    f = lambda x: jnp.sum(jax.nn.softmax(x) * jax.lax.stop_gradient(x))  # noqa: E731
    causes = rg.jax.gradient_report(f, [X]).causes
    assert [cause.op_type for cause in causes] == ["stop_gradient"]


def test_arguments_of_a_check():
    with pytest.raises(ArgumentError, match="args is a list"):
        rg.jax.check_gradients(jnp.sin, X)
    with pytest.raises(ArgumentError, match="order is 1"):
        rg.jax.check_gradients(jnp.sin, [X], order=0)
    with pytest.raises(GradientError, match="closes over"):
        rg.jax.check_gradients(_closing, [X])


# -- comparisons -----------------------------------------------------------------------------------


def test_the_true_gradient_beside_the_rules():
    def f(x):
        return jnp.sum(rounded(x) * x + doubled(x))

    found = rg.jax.compare_gradients(f)(X)
    rows = {row.op_type: row for row in found.rows}
    assert rows["doubled"].ratio == pytest.approx(1.5)
    assert rows["rounded"].other_zeros == 1 and "straight_through" in rows["rounded"].rule
    assert rows[""].kind == "argument" and not found.ok
    declared = rg.jax.compare_gradients(f, surrogates=["straight_through", "doubled"])(X)
    declared.assert_same()


@pytest.mark.versions
def test_rules_are_off_in_everything_that_is_nested():
    def f(x):
        inner = jax.jit(lambda x: doubled(doubled(x)))
        y, _ = jax.lax.scan(lambda c, a: (c + inner(a), None), 0.0, x)
        return y + jnp.sum(jax.vmap(doubled)(x))

    found = rg.jax.compare_gradients(f)(X)
    assert found.rows[0].ratio == pytest.approx((9 + 3) / (4 + 2))


def test_differences_and_another_function():
    same = rg.jax.compare_gradients(nested, "differences", rtol=1e-6)(X)
    assert same.ok and len(same) == 1
    found = rg.jax.compare_gradients(lambda x: jnp.sum(x**2), lambda x: -jnp.sum(x**2))(X)
    assert found.rows[0].cosine == pytest.approx(-1)
    with pytest.raises(ArgumentError, match="other is a function"):
        rg.jax.compare_gradients(nested, "numerical")


@pytest.mark.versions
@pytest.mark.parametrize("f", [rolled, chosen, nested, batched])
def test_nothing_is_said_of_what_is_right(f):
    assert rg.jax.trace_gradients(f)(X).worst() == []
    assert rg.jax.find_nan(f)(X) is None
    assert rg.jax.compare_gradients(f)(X).ok
