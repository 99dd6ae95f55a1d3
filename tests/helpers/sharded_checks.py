"""Checks that need several devices: `test_sharding.py` runs this file in processes of its own.

    python -m tests.helpers.sharded_checks REPORT one           8 devices in one process
    python -m tests.helpers.sharded_checks REPORT two RANK PORT 4 devices in each of two processes

REPORT gets a JSON object: the name of each check, and its traceback or null.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import regrad as rg
from regrad.errors import ArgumentError, DeviceError, NotFiredError
from regrad.transforms import program
from tests.helpers.rows import refused

MESH: dict[str, jax.sharding.Mesh] = {}


def on(*spec, mesh="both"):
    """A layout on the mesh "both" (4 by 2), or on "line" (8)."""
    return NamedSharding(MESH[mesh], PartitionSpec(*spec))


def make_meshes():
    MESH["both"] = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    MESH["line"] = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def values(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1.5, 1.5, shape).astype(np.float32)


def raises(call, kind, *words):
    """Assert that a call raises this error, with these words in its message."""
    refused(call, kind, *map(re.escape, words))


class Compilations(list):
    """How often XLA compiled something, by a listener that JAX calls."""

    def __init__(self):
        super().__init__()
        jax.monitoring.register_event_duration_secs_listener(self.heard)

    def heard(self, name, seconds, **options):
        if "backend_compile" in name:
            self.append(name)


@rg.custom_grad
def activate(x, save):
    """Sign, with the gradient of a steep tanh where it is not flat: a rule of this file."""
    save([x])
    return rg.sign(x), lambda dy, saved: dy * (1 - rg.square(rg.tanh(2 * saved[0])))


class Net:
    """Two layers of binary weights; the hidden one can be split over "model"."""

    def __init__(self, first=None, second=None):
        self.w = rg.Variable(values(16, 32, seed=1), name="w")
        self.v = rg.Variable(values(32, 4, seed=2), name="v")
        if first is not None:
            self.w.place(first)
            self.v.place(second)
        self.step = rg.jit(self.update)

    def loss(self, x, y):
        h = activate(x @ rg.sign(self.w) / 4)
        return rg.mean(rg.square(h @ self.v / 8 - y))

    def update(self, x, y):
        loss, grads = rg.variable_grads(lambda: self.loss(x, y))
        for variable in (self.w, self.v):
            variable.assign_sub(0.3 * grads[variable.name])
        return loss

    def train(self, put=rg.tensor, rules=None, steps=4):
        """The losses, and the weights at the end."""
        rules = {"Sign": rg.rules.clipped_straight_through} if rules is None else rules
        data = put(values(64, 16)), put(values(64, 4, seed=3))
        with rg.gradient_override_map(rules) as used:
            losses = [self.step(*data).item() for _ in range(steps)]
        if rules:
            used.assert_fired()
        return np.array([*losses, *whole(self.w).ravel()[::7]])


def whole(variable):
    return rg.device_put(variable, on(mesh="line")).numpy()


def placed(*spec, mesh="both"):
    return lambda x: rg.device_put(x, on(*spec, mesh=mesh))


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


# -- one process, eight devices --------------------------------------------------------------------


def one_data_parallel_equals_a_single_device():
    assert_close(Net(on(), on()).train(placed("data")), Net().train())


def one_tensor_parallel_equals_a_single_device():
    net = Net(on(None, "model"), on("model", None))
    assert_close(net.train(placed("data")), Net().train())
    assert net.w._tensor.device.spec == PartitionSpec(None, "model")
    assert net.v._tensor.device.spec == PartitionSpec("model")


def one_the_comparison_can_fail():
    plain = Net(on(), on()).train(placed("data"), rules={})
    assert np.abs(plain - Net().train()).max() > 1e-3


def one_an_override_that_does_not_run_is_reported():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train = lambda: Net(on(), on()).train(placed("data"), rules={"Cos": "Identity"})  # noqa: E731
        raises(train, NotFiredError, "Cos")


def one_layouts_stay_and_nothing_is_compiled_again():
    for specs in ([(), ()], [(None, "model"), ("model", None)], [("data",), (None, ("model",))]):
        net = Net(*(on(*spec) for spec in specs))
        x, y = placed("data")(values(64, 16)), placed("data")(values(64, 4, seed=3))
        compiled = Compilations()
        with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}):
            net.step(x, y)
            before = net.w._tensor.device
            assert compiled
            compiled.clear()
            for _ in range(3):
                net.step(x, y)
        assert compiled == []
        assert net.w._tensor.device == before
        assert net.step.cache_info().traces == 1


def one_what_is_assigned_has_the_layout_of_the_variable():
    v = rg.Variable(values(8, 8))
    v.place(on("model"))
    move = rg.jit(lambda x: v.assign(x))
    for _ in range(2):
        move(rg.device_put(values(8, 8), on(None, "data")))
        assert v._tensor.device.spec == PartitionSpec("model")
    v.place(on(None, "data"))  # the compiled function must see that
    move(rg.device_put(values(8, 8), on("model")))
    assert v._tensor.device.spec == PartitionSpec(None, "data")
    v.assign(values(8, 8))
    assert v._tensor.device.spec == PartitionSpec(None, "data")


def one_a_moved_variable_goes_on():
    net = Net()
    first = net.train(steps=2)
    net.w.place(on(None, "model"))
    net.v.place(on("model"))
    net.train(placed("data"), steps=2)
    net.w.place(on(mesh="line"))
    net.v.place(on(mesh="line"))
    last = net.train(placed("data", mesh="line"), steps=2)
    assert_close([*first[:2], *last[:2]], Net().train(steps=6)[[0, 1, 4, 5]])


def one_memory_of_variables_is_used_again():
    program.WORTH, worth = 0, program.WORTH
    try:
        _memory_is_used_again()
    finally:
        program.WORTH = worth


def _memory_is_used_again():
    net = Net(on(None, "model"), on("model", None))
    data = placed("data")(values(64, 16)), placed("data")(values(64, 4, seed=3))
    net.step(*data)  # (the value that was placed may be someone else's: it is copied)
    before = net.w._tensor._data
    net.step(*data)
    assert before.is_deleted()
    held = net.w.value
    net.step(*data)
    assert not held._data.is_deleted()


def one_tensors_and_variables_keep_the_layout_of_their_array():
    array = jax.device_put(values(8, 8), on("data", "model"))
    for x in (rg.tensor(array), rg.asarray(array), rg.Variable(array)):
        assert x.device == array.sharding
        np.testing.assert_array_equal(x.numpy(), values(8, 8))
    assert rg.zeros_like(rg.tensor(array)).device == array.sharding
    assert str(rg.tensor(array)) == str(rg.tensor(values(8, 8)))
    assert repr(rg.tensor(array)) == repr(rg.tensor(values(8, 8)))


def one_gradients_eager_and_compiled():
    w = values(16, 4, seed=5)

    f = lambda x: rg.sum(activate(rg.sign(x) @ w))  # noqa: E731

    x = values(8, 16)
    for g in (rg.grad(f), rg.grad(rg.jit(f)), rg.jit(rg.grad(f))):
        with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}) as used:
            dx = g(rg.device_put(x, on("data")))
            due = g(x)
        used.assert_fired()
        assert len(dx.device.device_set) == 8
        assert_close(dx.numpy(), due.numpy())
    second = rg.grad(lambda x: rg.sum(rg.grad(rg.jit(lambda x: rg.sum(rg.sin(x) ** 3)))(x) ** 2))
    assert_close(second(rg.device_put(x, on("data"))).numpy(), second(x).numpy())


def one_device_put_is_differentiated():
    x = rg.device_put(values(8, 8), jax.devices()[3])
    value, dx = rg.value_and_grad(lambda x: rg.sum(rg.device_put(x, on("data")) ** 3))(x)
    assert len(value.device.device_set) == 8
    assert dx.device == jax.devices()[3]
    assert_close(dx.numpy(), 3 * values(8, 8) ** 2)
    hessian = rg.hessian(lambda x: rg.sum(rg.device_put(x, on("data")) ** 3))(values(8))
    assert_close(hessian.numpy(), np.diag(6 * values(8)))


def one_device_put_inside_a_compiled_function_is_a_constraint():
    x = rg.device_put(values(8, 8), on("data"))
    y = rg.jit(lambda x: rg.device_put(2 * x, on(None, "model")))(x)
    assert y.device.spec == PartitionSpec(None, "model")
    dx = rg.grad(rg.jit(lambda x: rg.sum(rg.device_put(x, on(None, "model")) ** 2)))(x)
    assert_close(dx.numpy(), 2 * values(8, 8))
    moved = rg.jit(lambda x: rg.device_put(x, jax.devices()[0]))
    raises(lambda: moved(x), DeviceError, "the devices of its inputs")


def one_containers_are_placed_leaf_by_leaf():
    v = rg.Variable([1.0, 2.0])
    batch = rg.device_put({"x": values(8, 2), "v": v, "n": [3, 4.0]}, on())
    assert {k: type(x) for k, x in batch.items()} == dict.fromkeys(batch, rg.Tensor)
    assert batch["n"].shape == (2,)
    assert isinstance(v._tensor._data, np.ndarray)


def one_an_optimizer_and_its_state():
    import optax

    def weights(*specs):
        net = Net(*(on(*spec) for spec in specs)) if specs else Net()
        adam = rg.train.Optimizer(optax.adam(0.02), name="adam")
        adam.init([net.w, net.v])
        count = next(v for v in adam.variables if not v.ndim)
        if specs:
            count.place(on())

        @rg.jit
        def step(x, y):
            return adam.minimize(lambda: net.loss(x, y))

        put = placed("data") if specs else rg.tensor
        for _ in range(3):
            step(put(values(64, 16)), put(values(64, 4, seed=3)))
        assert step.cache_info().traces == 1
        layouts = {v.name: v._tensor.device for v in adam.variables}
        return whole(net.v), layouts

    one, _ = weights()
    several, layouts = weights((None, "model"), ("model",))
    assert_close(several, one)
    assert layouts["adam/mu/w"].spec == layouts["adam/nu/w"].spec == PartitionSpec(None, "model")
    assert layouts["adam/mu/v"].spec == PartitionSpec("model")


def one_checkpoints_come_back_where_they_were():
    net = Net(on(None, "model"), on("model", None))
    before = whole(net.w)
    with tempfile.TemporaryDirectory() as folder:
        rg.train.save(f"{folder}/w.safetensors", [net.w, net.v])
        net.w.assign(rg.zeros_like(net.w))
        rg.train.restore(f"{folder}/w.safetensors", [net.w, net.v])
    np.testing.assert_array_equal(whole(net.w), before)
    assert net.w._tensor.device.spec == PartitionSpec(None, "model")


def one_mistakes_are_named():
    x, v = rg.device_put(values(8, 8), on("data")), rg.Variable(values(8, 8), name="v")
    v.place(jax.devices()[5])
    explicit = jax.make_mesh((8,), ("data",))
    y = rg.tensor(jax.device_put(values(8, 8), NamedSharding(explicit, PartitionSpec("data"))))

    def f(x):
        return x * v

    raises(lambda: x @ v, DeviceError, "MatMul", "8 devices, ", "v.place(sharding)")
    raises(lambda: rg.jit(f)(x), DeviceError, "jit(f)", "argument 0 on 8 devices",
           "the Variable 'v' on ")  # fmt: skip
    raises(lambda: rg.device_put(values(7, 8), on("data")), DeviceError,
           "device_put of float32 (7, 8)", "4")  # fmt: skip
    raises(lambda: v.place(NamedSharding(explicit, PartitionSpec())), DeviceError,
           "placing the Variable 'v'", "AxisType.Auto")  # fmt: skip
    raises(lambda: rg.device_put(x, ("data",)), ArgumentError, "Sharding", "('data',)")
    raises(lambda: rg.jit(lambda: v.place(on()))(), ArgumentError, "Place Variables outside")
    raises(lambda: rg.jit(lambda y: rg.matrix_transpose(y) @ y)(y), DeviceError, "MatMul",
           "AxisType.Auto", "JAX says")  # fmt: skip


# -- regrad.jax under shard_map --------------------------------------------------------------------


def in_shards(f, *specs):
    """`f(w, x)` with its arguments split over the line, and the sum of all parts."""
    return jax.shard_map(lambda w, x: jax.lax.psum(f(w, x), "data"), mesh=MESH["line"],
                         in_specs=specs, out_specs=PartitionSpec())  # fmt: skip


def by_hand(x):
    f = jax.custom_jvp(lambda x: jnp.tanh(x))
    f.defjvps(lambda dx, y, x: dx * (3 + x * x))
    return f(x)


def one_shard_map_inside_and_outside_an_override():
    w, x = jnp.asarray(values(3)), jnp.asarray(values(16, 3, seed=1))
    rules = {"Tanh": lambda dy, x: dy * (3 + x * x)}
    specs = PartitionSpec(), PartitionSpec("data")

    model = lambda w, x: jnp.sum(jnp.tanh(x * w) ** 2)  # noqa: E731

    due = jax.grad(lambda w, x: jnp.sum(by_hand(x * w) ** 2), (0, 1))
    inside = rg.jax.override(in_shards(model, *specs), rules)
    outside = in_shards(rg.jax.override(model, rules), *specs)
    for f in (inside, outside, jax.jit(inside), jax.jit(outside)):
        for a, b in zip(jax.grad(f, (0, 1))(w, x), due(w, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        _, dot = jax.jvp(lambda w, f=f: f(w, x), (w,), (w,))
        np.testing.assert_allclose(dot, jnp.vdot(due(w, x)[0], w), rtol=1e-4)
        second = jax.grad(lambda w, f=f: jnp.sum(jax.grad(f)(w, x) ** 2))(w)
        again = jax.grad(lambda w: jnp.sum(due(w, x)[0] ** 2))(w)
        np.testing.assert_allclose(second, again, rtol=1e-4, atol=1e-3)
    inside.assert_fired()


def one_custom_gradients_under_shard_map():
    w, x = jnp.asarray(values(3)), jnp.asarray(values(16, 3, seed=1))
    specs = PartitionSpec(), PartitionSpec("data")
    ours = rg.jax.custom_grad(
        lambda w, x: (jnp.tanh(x * w), lambda dy: [jnp.sum(dy * x, 0) * 5, dy * w * 7])
    )
    theirs = rg.jax.from_regrad(
        rg.custom_grad(
            lambda w, x: (rg.tanh(x * w), lambda dy: [rg.sum(dy * x, axis=0) * 5, dy * w * 7])
        )
    )
    y = jnp.tanh(x * w)
    for op in (ours, theirs):
        f = in_shards(lambda w, x, op=op: jnp.sum(op(w, x) ** 2), *specs)
        for run in (f, jax.jit(f)):
            dw, dx = jax.grad(run, (0, 1))(w, x)
            np.testing.assert_allclose(dw, 10 * jnp.sum(y * x, 0), rtol=1e-4)
            np.testing.assert_allclose(dx, 14 * y * w, rtol=1e-4)


# -- two processes, four devices each --------------------------------------------------------------


def rows_of(x):
    """The part of a batch that this process loads, as a part of the whole."""
    n = len(x) // jax.process_count()
    mine = x[jax.process_index() * n :][:n]
    return rg.tensor(jax.make_array_from_process_local_data(on("data", mesh="line"), mine))


def two_data_parallel_equals_a_single_device():
    net = Net(on(mesh="line"), on(mesh="line"))
    assert_close(net.train(rows_of), Net().train())
    assert net.step.cache_info().traces == 1


def two_the_comparison_can_fail():
    plain = Net(on(mesh="line"), on(mesh="line")).train(rows_of, rules={})
    assert np.abs(plain - Net().train()).max() > 1e-3


def two_values_that_lie_elsewhere():
    x = rows_of(values(64, 16))
    for read in (x.numpy, x.tolist, lambda: np.asarray(x), lambda: x[0, 0].item() + x.numpy()):
        raises(read, DeviceError, "rg.device_put", "process_allgather", "addressable_shards")
    assert str(x) == "Tensor\n    (float32 (64, 16), in parts on several processes)"
    assert repr(x) == "Tensor(<in parts on several processes>, shape=(64, 16), dtype=float32)"
    gathered = rg.device_put(x, on(mesh="line"))
    np.testing.assert_array_equal(gathered.numpy(), values(64, 16))


def two_placed_values_must_agree():
    for put in (lambda x, s: rg.device_put(x, s), lambda x, s: rg.Variable(x).place(s)):
        mine = values(8, 2, seed=jax.process_index())
        raises(lambda put=put, mine=mine: put(mine, on("data", mesh="line")), DeviceError,
               "float32 (8, 2)", "differ", "make_array_from_process_local_data")  # fmt: skip


def two_hosts_save_one_file():
    path, x = str(Path(sys.argv[1]).parent / "w.safetensors"), values(64, 16)
    w = rg.Variable(rows_of(x), name="w")
    rg.train.save(path, [w])
    w.assign(rows_of(0 * x))
    rg.train.restore(path, [w])
    assert not w.value.data.is_fully_addressable
    for shard in w.value.data.addressable_shards:
        np.testing.assert_array_equal(shard.data, x[shard.index])


def two_gradients_of_data_in_parts():
    for f in (lambda x: rg.sum(activate(x)), rg.jit(lambda x: rg.sum(activate(x)))):
        dx = rg.grad(f)(rows_of(values(64, 16)))
        due = rg.grad(f)(values(64, 16))
        assert_close(rg.device_put(dx, on(mesh="line")).numpy(), due.numpy())


def run(prefix):
    report = {}
    for name, check in globals().copy().items():
        if name.startswith(prefix):
            try:
                check()
                report[name] = None
            except Exception:
                report[name] = traceback.format_exc()
    return report


if __name__ == "__main__":
    path, which, *rest = sys.argv[1:]
    if which not in ("one", "two"):
        sys.exit("no setup of that name")
    warnings.simplefilter("error")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 if which == "one" else 4)
    if which == "two":
        rank, port = map(int, rest)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=30)
    make_meshes()
    Path(path).write_text(json.dumps(run(f"{which}_")))
    if which == "two":
        jax.distributed.shutdown()
