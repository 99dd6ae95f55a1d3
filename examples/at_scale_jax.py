"""One rule on two devices of JAX: shardings, `shard_map`, and a pipeline by `lax.scan`.

The layers are `sign(x @ w)` and train with a straight-through estimator: a rule for "Sign" that
`rg.jax.override` puts into the function. The gradients equal the gradients of the same function on
a single device. (The two devices are virtual, parts of the CPU.)

Run:     python examples/at_scale_jax.py      (some seconds)
Prints:  whether the gradients are equal, and the shapes that the rule received.
Needs:   pip install '.[jax]'
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"  # before JAX is imported
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import regrad as rg

SEEN = set()


def straight_through(dy, x):
    SEEN.add(x.shape)
    return jnp.where(abs(x) <= 1, dy, 0)


RULES = {"Sign": straight_through}


def layer(w, x):
    return jnp.sign(x @ w)


def loss(ws, x):
    return jnp.mean((layer(ws[1], layer(ws[0], x)) - x) ** 2)


def pipeline(ws, x):
    """Return the loss of both layers. Each device has one layer and passes its results on."""
    stage = lax.axis_index("part")
    parts = x.reshape(4, 4, 8)  # parts of the batch

    def step(arrived, part):
        y = layer(ws[0], jnp.where(stage == 0, part, arrived))
        return lax.ppermute(y, "part", [(0, 1)]), y

    start = lax.pcast(jnp.zeros_like(parts[0]), "part", to="varying")
    _, ys = lax.scan(step, start, jnp.concatenate([parts, parts[:1]]))  # one extra step to drain it
    return lax.psum(jnp.where(stage == 1, jnp.mean((ys[1:] - parts) ** 2), 0), "part")


def main():
    mesh = jax.make_mesh((2,), ("part",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, split = PartitionSpec(), PartitionSpec("part")
    everywhere, rows = NamedSharding(mesh, whole), NamedSharding(mesh, split)
    ws, x = jax.random.normal(jax.random.key(0), (2, 8, 8)) / 4, jnp.linspace(-1, 1, 128)
    x = x.reshape(16, 8)

    def mean_of_parts(ws, x):
        return lax.pmean(loss(ws, x), "part")

    def put(f, *specs):
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=whole)

    ways = {
        "one device": rg.jax.override(loss, RULES),
        "shardings": rg.jax.override(loss, RULES),
        "shard_map": rg.jax.override(put(mean_of_parts, whole, split), RULES),
        "pipeline": rg.jax.override(put(pipeline, split, whole), RULES),
    }
    plain = jax.grad(loss)(ws, x)
    expected = jax.grad(ways["one device"])(ws, x)
    for name, f in ways.items():
        SEEN.clear()
        shardings = (everywhere, rows) if name == "shardings" else None
        dws = jax.jit(jax.grad(f), in_shardings=shardings)(ws, x)
        f.assert_fired()
        same = [jnp.allclose(dws, other, atol=1e-6).item() for other in (expected, plain)]
        print(f"{name:10}  equal: {same[0]}, without the rule: {same[1]}, the rule saw {SEEN}")


if __name__ == "__main__":
    main()
