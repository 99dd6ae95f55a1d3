"""`trace_gradients`, `find_nan`, `saved_bytes`, checks, comparisons and drawings of JAX functions.

`tests/core/test_faults.py` has what they say of planted faults.
"""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import regrad as rg
from regrad.errors import ArgumentError, GradientError
from regrad.testing import GradientCheckError
from tests.helpers.jax_model import own_vjp
from tests.helpers.marks import marked_lines
from tests.helpers.rows import refusals, refused

LINES = marked_lines(__file__)
X = jnp.array([0.5, -1.0, 2.0])
trace = rg.jax.trace_gradients


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


@pytest.mark.slow(but=1)
@pytest.mark.versions
@pytest.mark.parametrize("f", [rolled, chosen, nested, looped, batched, long])
def test_gradients_are_those_of_jax(f):
    found = trace(f)(X)
    ((name, figures),) = found.inputs
    assert name == "args[0]"
    assert figures.norm == pytest.approx(float(jnp.linalg.norm(jax.grad(f)(X))))
    assert float(found.value) == pytest.approx(float(f(X)))


@pytest.mark.slow(but=1)
@pytest.mark.versions
@pytest.mark.parametrize("f", [rolled, chosen, nested, batched])
def test_nothing_is_said_of_what_is_right(f):
    assert trace(f)(X).worst() == []
    assert rg.jax.find_nan(f)(X) is None
    assert rg.jax.compare_gradients(f)(X).ok
    if f is not chosen:
        rg.jax.check_gradients(f, [X + 3], order=3)


@pytest.mark.slow
def test_calls_are_opened_and_own_functions_of_jax_are_one_step():
    steps = trace(nested)(X).steps
    names = {step.op_type for step in steps}
    assert names >= {"sin", "exp", "relu", "sqrt"}
    assert not {"jit", "pjit", "checkpoint", "custom_jvp_call"} & names
    assert {step.kind for step in steps} == {"built-in"}


@pytest.mark.slow
@pytest.mark.versions
def test_rounds_of_short_scans_have_paths_and_long_ones_are_one_step():
    paths = {step.path for step in trace(rolled)(X).steps}
    assert paths == {"", "scan[0]", "scan[1]", "scan[2]"}
    for found, is_one in ((trace(rolled), False), (trace(long), True),
                          (trace(long, longest_scan=100), False)):  # fmt: skip
        assert ("scan" in [step.op_type for step in found(X).steps]) == is_one


def test_lines_are_those_of_the_user_also_behind_programs_that_jax_remembers():
    def f(x):
        a = jnp.linalg.norm(x)
        return a + jnp.linalg.norm(2 * x)  # here: second norm

    places = [step.line for step in trace(f)(X).steps if step.op_type == "sqrt"]
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
    f = lambda x: jnp.sum(rounded(x) * doubled(x) * jnp.sign(x))  # noqa: E731
    steps = trace(rg.jax.override(f, {"Sign": "Identity"}))(X).steps
    found = {step.op_type: (step.kind, step.rule.partition(", ")[0]) for step in steps}
    assert found["rounded"] == ("custom", "straight_through")
    assert found["doubled"] == ("custom", "doubled")
    assert found["sign"][0] == "override"


@pytest.mark.slow
def test_gradients_go_to_all_float_leaves_or_to_those_that_are_asked_for():
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}

    def loss(params, x, labels, scale):
        y = x @ params["w"] + params["b"]
        return scale * jnp.sum(y * jax.nn.one_hot(labels, 2)), y

    args, of = (params, np.ones((4, 3)), jnp.array([0, 1, 1, 0]), 2.0), ["['b']", "['w']"]
    every = trace(loss, has_aux=True)(*args)
    assert [n for n, _ in every.inputs] == [*(f"args[0]{n}" for n in of), "args[1]", "args[3]"]
    first = trace(loss, has_aux=True, argnums=0)(*args)
    assert [n for n, _ in first.inputs] == [f"args[0]{n}" for n in of]
    assert isinstance(first.value, tuple)


def test_arrays_as_results_have_gradients_of_ones():
    ((_, figures),) = trace(lambda x: {"a": x * 2, "n": 3})(X).inputs
    assert figures.norm == pytest.approx(2 * 3**0.5)


def closing(x):
    y = x + 1
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, y), lambda y, dy: (dy * y,))
    return jnp.sum(f(x))


def check(f, *args, **options):
    return lambda: rg.jax.check_gradients(f, *args, **options)


REFUSED = [
    (lambda: trace(lambda n: n)(jnp.array([1, 2])), GradientError, "no argument holds floats"),
    (lambda: trace(lambda x: x > 0)(X), GradientError, "f must return floats"),
    (lambda: trace(lambda x: x, has_aux=True)(X), ArgumentError, "pair"),
    (lambda: trace(closing)(X), GradientError, "closes over an array that is made in the function"),
    (check(closing, [X]), GradientError, "closes over"),
    (check(jnp.sin, X), ArgumentError, "args must be a list"),
    (check(jnp.sin, [X], order=0), ArgumentError, "order must be 1"),
    (check(jnp.sin, [jnp.zeros((0, 2))]), ArgumentError,
     "nothing was checked: there are no elements"),
    (lambda: rg.jax.compare_gradients(nested, "numerical"), ArgumentError,
     "other must be a function"),
]  # fmt: skip


test_what_has_no_gradient_is_refused = refusals(REFUSED)


# -- models of others ------------------------------------------------------------------------------


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(3, name="first")(x))  # here: flax
        return nn.Dense(1)(x)


@pytest.mark.slow
def test_modules_of_flax_have_paths():
    params = Model().init(jax.random.key(0), jnp.ones((2, 3)))
    found = trace(Model().apply)(params, jnp.ones((2, 3)))
    (first,) = [s for s in found.steps if (s.path, s.op_type) == ("Model/first", "dot_general")]
    assert first.line == LINES["flax"]
    assert "args[0]['params']['first']['kernel']" in dict(found.inputs)


@pytest.mark.slow
def test_modules_of_nnx_are_not_changed():
    model = nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    before = np.array(model.layers[1].mean[...])
    found = trace(lambda m, x: jnp.sum(m(x)))(model, jnp.ones((4, 3), "f4"))
    assert "args[0].layers.0.kernel" in dict(found.inputs)
    np.testing.assert_array_equal(model.layers[1].mean[...], before)


@pytest.mark.slow
def test_modules_of_equinox_and_haiku():
    mlp = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    assert "f.layers[0].weight" in dict(trace(mlp)(X).inputs)
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([3, 2])(x)))
    params = model.init(jax.random.key(0), jnp.ones((2, 3)))
    paths = {step.path for step in trace(model.apply)(params, jnp.ones((2, 3))).steps}
    assert paths >= {"mlp", "mlp/linear_0", "mlp/linear_1"}


# -- what is not finite ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("length", [7, 700])
def test_nan_in_a_round_of_a_scan(length):
    """A scan that is too long to be opened is opened if it must be."""
    f = lambda x: jax.lax.scan(lambda c, a: (jnp.exp(c * a), None), 1.0, x)[0]  # noqa: E731
    found = rg.jax.find_nan(f)(jnp.full(length, 3.0))
    assert (found.op_type, found.path) == ("exp", "scan[2]")


# -- what is kept ----------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [rolled, chosen, nested, looped, batched])
def test_bytes_are_those_that_jax_keeps(f):
    leaves = jax.tree_util.tree_leaves(jax.jit(jax.vjp, static_argnums=0)(f, X)[1])
    largest = sum(x.nbytes for x in {id(x): x for x in leaves}.values())
    assert 0 < rg.jax.saved_bytes(f)(X).total <= largest


def test_bytes_by_line():
    def f(x):
        a = jnp.sin(x)  # here: saved
        return jnp.sum(jax.checkpoint(lambda a: jnp.exp(jnp.tanh(a)))(a))

    rows = rg.jax.saved_bytes(f)(jnp.zeros(100)).rows
    lines = {row.op_type: (row.line, row.size) for row in rows}
    assert lines["cos"] == lines["sin"] == (LINES["saved"], 800)
    assert "tanh" not in lines


# -- checks ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_complex_arguments_and_parameters_of_single_precision():
    z, params = [jnp.array([0.3 + 1j])], {"w": np.ones((3, 2), "float32"), "n": 3}
    rg.jax.check_gradients(lambda z: jnp.abs(z * (1 + 2j)) ** 2, z, order=2)
    rg.jax.check_gradients(lambda z: jnp.exp(z) * jnp.conj(z), z, order=3)
    rg.jax.check_gradients(lambda p, x: jnp.tanh(x @ p["w"]).sum(), [params, X])


@pytest.mark.slow
def test_the_message_names_the_rule_and_the_error():
    cube = jax.custom_jvp(lambda x: x**3)
    cube.defjvp(lambda xs, ts: (xs[0] ** 3, -3 * ts[0] * xs[0] ** 2))
    with pytest.raises(GradientCheckError, match=r"wrong sign(?s:.*)\(forward mode\)") as error:
        rg.jax.check_gradients(lambda x: jnp.sum(jnp.exp(cube(x))), [X])  # here: cube
    assert LINES["cube"] in str(error.value)
    assert error.value.report.causes[0].input == "x"


stale = jax.custom_vjp(jnp.sin)
stale.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (jax.lax.stop_gradient(dy) * jnp.cos(x),))
STOPPED = {"Sin": lambda dy, x: jax.lax.stop_gradient(dy) * jnp.cos(x)}
STALE = {
    "custom_vjp": (stale, "Wrong: stop_gradient"),
    "a rule": (rg.jax.override(jnp.sin, STOPPED), "input 'dy', order 2"),
    "compiled": (jax.jit(jax.vmap(stale)), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STALE)
def test_a_rule_that_cuts_the_history_of_dy(name):
    f, cause = STALE[name]
    rg.jax.check_gradients(f, [X])
    with pytest.raises(GradientCheckError, match=rf"(?s)order 2 by dy\(.*{cause}"):
        rg.jax.check_gradients(f, [X], order=2)


@pytest.mark.slow
def test_the_cause_is_a_rule_alone_or_where_the_user_stops_a_gradient():
    f = rg.jax.override(lambda x: jnp.sin(x) * x, {"Sin": lambda dy, x: 2 * dy * jnp.cos(x)})
    cause = rg.jax.gradient_report(f, [X]).causes[0]
    assert (cause.op_type, cause.kind) == ("sin", "scaled by 2")
    f = lambda x: jnp.sum(jax.nn.softmax(x) * jax.lax.stop_gradient(x))  # noqa: E731
    causes = rg.jax.gradient_report(f, [X]).causes
    assert [cause.op_type for cause in causes] == ["stop_gradient"]


# -- comparisons -----------------------------------------------------------------------------------


def test_the_true_gradient_next_to_the_rules():
    f = lambda x: jnp.sum(rounded(x) * x + doubled(x))  # noqa: E731
    found = rg.jax.compare_gradients(f)(X)
    rows = {row.op_type: row for row in found.rows}
    assert rows["doubled"].ratio == pytest.approx(1.5)
    assert rows["rounded"].other_zeros == 1 and "straight_through" in rows["rounded"].rule
    assert rows[""].kind == "argument" and not found.ok
    rg.jax.compare_gradients(f, surrogates=["straight_through", "doubled"])(X).assert_same()


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


# -- drawings --------------------------------------------------------------------------------------


def ends(drawing):
    return {(a.source, a.target) for a in drawing.arrows}


def kinds(drawing):
    return {b.name: b.kind for b in drawing.boxes}


def test_equations_and_arrows():
    found = rg.jax.draw(lambda x, y: jnp.sin(x) * y, 1.0, jnp.ones(3))
    assert [b.name for b in found.boxes] == ["args[0]", "args[1]", "sin", "mul"]
    assert ends(found) == {("args[0]", "sin"), ("sin", "mul"), ("args[1]", "mul")}
    assert found.boxes[1].lines == ("args[1]", f"{jnp.ones(3).dtype} 3")


@pytest.mark.slow
def test_parameters_lie_where_they_are_used():
    net = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(1)])
    params = net.init(jax.random.key(0), jnp.ones((1, 2)))
    found = rg.jax.draw(net.apply, params, jnp.ones((1, 2)))
    scopes = {b.name: b.scope for b in found.boxes}
    assert scopes["args[0]['params']['layers_0']['kernel']"] == ("Sequential", "layers_0")
    assert scopes["args[1]"] == ()
    assert any(b.scope == ("Sequential", "layers_2") for b in found.boxes)


def test_loops_branches_and_jitted_functions_are_scopes():
    def inner(x):
        return jnp.cos(x)

    def f(x):
        x, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)
        x = jax.lax.cond(x > 0, lambda x: jnp.exp(x), lambda x: x, x)
        return jax.jit(inner)(x)

    found = rg.jax.draw(f, 1.0)
    scopes = {b.name: b.scope for b in found.boxes}
    assert scopes["sin"] == ("scan",) and scopes["exp"] == ("cond",)
    assert scopes["cos"] == ("inner",)
    assert ("args[0]", "sin") in ends(found) and ("exp", "cos") in ends(found)


def test_rules_stand_out():
    clipped = own_vjp(lambda dy, x: (jnp.clip(dy, -1, 1),))(lambda x: x * 1.0)
    f = rg.jax.override(lambda x: clipped(jax.nn.relu(x)).sum(), {"Relu": rg.rules.guided_relu})
    found = rg.jax.draw(f, jnp.ones(3))
    assert sorted(kinds(found).values()) == ["custom", "input", "op", "override"]
    (box,) = [b for b in found.boxes if b.kind == "override"]
    assert "guided_relu" in box.details["rule"]


def test_the_gradient_on_request():
    found = rg.jax.draw(lambda x: jnp.sin(x).sum(), jnp.ones(3), gradients=True)
    assert "cos" in kinds(found) and "sin" in kinds(found)


def test_shapes_are_enough_and_bad_input_is_refused():
    found = rg.jax.draw(jnp.sin, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert found.boxes[0].lines == ("args[0]", "float32 2×3")
    refused(lambda: rg.jax.draw(3), ArgumentError, "must be a function")
