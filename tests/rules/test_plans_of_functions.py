"""Plans of quantizers for functions of JAX and of regrad, against functions written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import regrad as rg
import regrad.jax
from regrad.errors import ArgumentError
from regrad.rules import quantize as Q

RNG = np.random.default_rng(0)
P = {
    name: RNG.normal(size=shape)
    for name, shape in {"w": (4, 3), "ws": (2, 3, 3), "v": (2, 3)}.items()
}
X = RNG.normal(size=(5, 4))
stop = jax.lax.stop_gradient
PLAN = Q.layers(
    weights=Q.lsq(4, per="channel"), inputs=Q.affine(8, range="minmax"),
    products=Q.affine(6, per="token"), but="first",
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def model(p, x):
    with jax.named_scope("first"):
        h = jax.nn.relu(x @ p["w"])

    def body(h, w):
        with jax.named_scope("layer"):
            return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(jax.checkpoint(body), h, p["ws"])
    with jax.named_scope("attention"):
        h = h + jax.nn.softmax(h @ h.T) @ h
    with jax.named_scope("last"):
        return jax.jit(lambda h: jnp.einsum("oi,bi->bo", p["v"], h))(h)


@jax.custom_vjp
def stepped(v, step):
    return jnp.round(jnp.clip(v / step, -8, 7)) * step


def _back(held, dy):
    v, step = held
    u = v / step
    inside = (u >= -8) & (u <= 7)
    by_step = jnp.where(inside, jnp.round(u) - u, jnp.clip(u, -8, 7)) * dy
    by_step = by_step.sum(0, keepdims=True) / (v.shape[0] * 7) ** 0.5  # (per column)
    return dy * inside, by_step


stepped.defvjp(lambda v, step: (stepped(v, step), (v, step)), _back)


def uniform(v, scale, high):
    codes = jnp.round(v / scale)
    inside = (codes >= -high - 1) & (codes <= high)
    kept = jnp.where(inside, v, stop(v))
    return stop(jnp.clip(codes, -high - 1, high) * scale) + kept - stop(kept)


def by_hand(p, s, x):
    def product(path, a, w):
        top = jnp.maximum(-s[path]["inputs_low"], s[path]["inputs_high"])
        return uniform(a, stop(top) / 127, 127) @ stepped(w, s[path]["weights_step"])

    def token(v):
        return uniform(v, stop(jnp.maximum(abs(v).max(-1, keepdims=True) / 31, 2.0**-23)), 31)

    h = jax.nn.relu(x @ p["w"])
    for w in p["ws"]:
        h = jnp.tanh(product("layer", h, w))
    h = h + token(jax.nn.softmax(token(h) @ token(h.T))) @ token(h)
    return (product("last", h, p["v"].T) ** 2).sum()


def loss(p, s, x):
    return (rg.jax.override(model, PLAN.rules(s), values=True)(p, x) ** 2).sum()


def started():
    p, x = jax.tree.map(jnp.asarray, P), jnp.asarray(X)
    return p, x, PLAN.steps(model, p, x)


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("way", [lambda f: f, jax.jit])
def test_a_plan_is_the_function_by_hand(way):
    p, x, steps = started()
    found = way(jax.value_and_grad(loss, (0, 1)))(p, steps, x)
    same(found, jax.value_and_grad(by_hand, (0, 1))(p, steps, x))
    assert jax.tree.structure(found[1][1]) == jax.tree.structure(steps)


def test_inside_of_shard_map():
    p, x, steps = started()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    here, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")

    def part(p, s, x):
        y = rg.jax.override(model, PLAN.rules(s), values=True)(p, x)
        return jax.lax.psum((y**2).sum(), "data")

    run = jax.shard_map(part, mesh=mesh, in_specs=(here, here, split), out_specs=here)
    same(jax.jit(jax.grad(run, (0, 1)))(p, steps, x), jax.grad(by_hand, (0, 1))(p, steps, x))


def test_steps_are_trained_by_optax():
    p, x, steps = started()
    state = optax.adam(0.01).init((p, steps))
    traces = []

    @jax.jit
    def train(p, steps, state):
        traces.append(0)
        grads = jax.grad(loss, (0, 1))(p, steps, x)
        updates, state = optax.adam(0.01).update(grads, state)
        return *optax.apply_updates((p, steps), updates), state

    first = loss(p, steps, x)
    new = steps
    for _ in range(5):
        p, new, state = train(p, new, state)
    assert loss(p, new, x) < first
    assert len(traces) == 1
    assert abs(new["last"]["weights_step"] - steps["last"]["weights_step"]).max() > 0
    same(new["last"]["inputs_high"], steps["last"]["inputs_high"])


def test_ranges_reports_and_export():
    p, x, steps = started()
    wider = PLAN.observe(steps, model, p, 3 * x)
    assert wider["last"]["inputs_high"] > steps["last"]["inputs_high"]
    same(wider["last"]["weights_step"], steps["last"]["weights_step"])
    program = rg.jax.override(model, PLAN.rules(steps), values=True)
    y = program(p, x)
    rows = [row[:3] for row in PLAN.report(program).rows]
    assert rows == [
        ("layer", "MatMul", "weights"), ("layer", "MatMul", "inputs"),
        ("attention", "MatMul", "products_a"), ("attention", "MatMul", "products_b"),
        ("last", "MatMul", "weights"), ("last", "MatMul", "inputs"), ("first", "MatMul", "float"),
    ]  # fmt: skip
    exported = PLAN.export(model, steps, p, x)
    assert exported["last.weights"].dtype == np.int8
    read = Q.dequantize(exported)
    ws = jnp.stack([read["layer[0]"], read["layer[1]"]])
    restored = dict(p, v=jnp.asarray(read["last"].T), ws=ws)
    rest = Q.layers(inputs=Q.affine(8, range="minmax"), where=["layer", "last"])
    rest |= Q.layers(products=Q.affine(6, per="token"), where="attention")
    others = rest.steps(model, restored, x).with_arrays(steps.arrays)
    same(rg.jax.override(model, rest.rules(others), values=True)(restored, x), y)
    with pytest.raises(ArgumentError, match="the weights of 'layer' are not a parameter of"):
        PLAN.export(model, wider)


# -- regrad's own functions ------------------------------------------------------------------------


def ours(variables):
    def run(x):
        with rg.name_scope("first"):
            h = rg.nn.relu(x @ variables["w"])
        with rg.name_scope("last"):
            return h @ rg.matrix_transpose(variables["v"])

    return run


@pytest.mark.parametrize("compiled", [False, True])
def test_functions_of_regrad(compiled):
    variables = {name: rg.Variable(P[name], name=name) for name in ("w", "v")}
    run, x = ours(variables), rg.tensor(X)
    steps = PLAN.steps(run, x)
    assert [v.name for v in steps.variables] == ["last/weights_step"]

    def loss():
        with rg.gradient_override_map(PLAN.rules(steps), values=True):
            return rg.sum(run(x) ** 2)

    found = rg.variable_grads(rg.jit(loss) if compiled else loss).grads
    arrays = {k: jnp.asarray(v) for k, v in P.items()}
    s = {"last": {k: jnp.asarray(v.numpy()) for k, v in steps["last"].items()}}

    def by_hand(p, step):
        h, last = jax.nn.relu(X @ p["w"]), s["last"] | {"weights_step": step}
        top = jnp.maximum(-last["inputs_low"], last["inputs_high"])
        return ((uniform(h, stop(top) / 127, 127) @ stepped(p["v"].T, step)) ** 2).sum()

    due, by_step = jax.grad(by_hand, (0, 1))(arrays, s["last"]["weights_step"])
    same([found["w"].numpy(), found["v"].numpy()], [due["w"], due["v"]])
    same(found["last/weights_step"].numpy(), by_step)
    high = steps["last"]["inputs_high"].numpy()
    assert PLAN.observe(steps, run, 3 * x) is steps
    assert steps["last"]["inputs_high"].numpy() > high


def test_a_compiled_function_has_no_sample():
    run = ours({name: rg.Variable(P[name], name=name) for name in ("w", "v")})
    with pytest.raises(ArgumentError, match=r"Pass the function without rg\.jit"):
        PLAN.steps(rg.jit(run), rg.tensor(X))


def test_calls_that_shapes_do_not_tell_apart_are_refused():
    def twice(p, x):
        return x @ p @ (x.T @ x)

    x = jnp.asarray(RNG.normal(size=(3, 3)))
    with pytest.raises(ArgumentError, match="'' calls MatMul several times, and the shapes"):
        Q.layers(weights=Q.lsq(4), products=Q.affine(8)).steps(twice, x + 1, x)
