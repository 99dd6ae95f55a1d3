"""One training program on one device, on a mesh of eight, and in two processes of four each.

The network has binary weights and activations. The gradient of the weights' sign comes from an
override, and the gradient of the activations comes from a `custom_grad`. The rules and the model
contain no code for devices. The placement of the data and the Variables determines what runs in
parallel:

    one device       nothing is placed
    data parallel    each of 8 devices has an eighth of the batch and all weights
    tensor parallel  4 x 2 devices: the batch is in quarters, the hidden weights are in halves
    two processes    as data parallel; each has 4 devices, and loads its own half of the batch

`jax.distributed` joins the processes on the loopback address, with the same calls that join
machines. The devices are virtual, parts of the CPU. So the example shows that the numbers agree,
but nothing about speed. Means are over the whole batch, wherever its parts lie. Needs JAX.

Run:     python examples/sharded_training.py [--quick]      (about half a minute)
Prints:  the losses next to each other, and the largest difference from one device.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import regrad as rg

BATCH = 128
LIMIT = 300  # seconds until a child is terminated


# -- the program, which runs on any machine --------------------------------------------------------


@rg.custom_grad
def activate(x, save):
    """Return the sign, with the slope of a parabola on each side of 0 (Liu et al. 2018)."""
    save([x])
    return rg.sign(x), lambda dy, saved: dy * rg.maximum(2 - 2 * abs(saved[0]), 0)


class Network:
    """64-128-128-10 with binary weights in the first two layers."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.first, self.hidden, self.last = (
            rg.Variable(rng.uniform(-0.2, 0.2, shape), name=name, dtype="float32")
            for name, shape in [("first", (64, 128)), ("hidden", (128, 128)), ("last", (128, 10))]
        )
        self.variables = [self.first, self.hidden, self.last]

    def loss(self, x, labels):
        for w in (self.first, self.hidden):
            x = x @ rg.sign(w)
            x = activate(x - rg.mean(x, axis=0))
        return rg.losses.sparse_softmax_cross_entropy(labels, x @ self.last / 4)


def train(network: Network, batches, rate: float = 0.3) -> list[float]:
    """Return the loss at each step of gradient descent with the clipped estimator."""

    @rg.jit
    def step(x, labels):
        loss, grads = rg.variable_grads(lambda: network.loss(x, labels))
        for v in network.variables:
            v.assign(rg.clip(v - rate * grads[v.name], -1.0, 1.0))
        return loss

    with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}) as used:
        losses = [step(*batch).item() for batch in batches]
    used.assert_fired()
    assert step.cache_info().traces == 1
    return losses


def digits(steps: int):
    """Return batches of images and labels, the same in every process."""
    data, rng = load_digits(), np.random.default_rng(0)
    for _ in range(steps):
        rows = rng.choice(len(data.data), BATCH, replace=False)
        yield (data.data[rows] / 16).astype(np.float32), data.target[rows].astype(np.int32)


# -- placement -------------------------------------------------------------------------------------


def mesh_of(**axes: int):
    """Return a mesh of all devices, and a function that makes layouts on it."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    types = (AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)
    return lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))


def one_device(steps: int) -> list[float]:
    return train(Network(), digits(steps))


def data_parallel(steps: int) -> list[float]:
    on, network = mesh_of(data=8), Network()
    for v in network.variables:
        v.place(on())
    return train(network, (rg.device_put(batch, on("data")) for batch in digits(steps)))


def tensor_parallel(steps: int) -> list[float]:
    on, network = mesh_of(data=4, model=2), Network()
    network.first.place(on())
    network.hidden.place(on(None, "model"))  # each half of the devices computes half of the columns
    network.last.place(on("model", None))  # the columns enter here and are summed
    losses = train(network, (rg.device_put(batch, on("data")) for batch in digits(steps)))
    assert network.hidden.device == on(None, "model")
    return losses


def several_processes(steps: int) -> list[float]:
    """Train as in `data_parallel`. Each process loads only its part of the batch."""
    import jax

    on, network = mesh_of(data=len(jax.devices())), Network()
    for v in network.variables:
        v.place(on())
    part = BATCH // jax.process_count()
    mine = slice(jax.process_index() * part, (jax.process_index() + 1) * part)

    def whole(array):
        return jax.make_array_from_process_local_data(on("data"), array[mine])

    return train(network, ((whole(x), whole(labels)) for x, labels in digits(steps)))


# -- children: JAX counts devices at startup, so each setup runs in separate processes ------------

WAYS = {
    "one device": one_device,
    "data parallel": data_parallel,
    "tensor parallel": tensor_parallel,
    "two processes": several_processes,
}


def child(job: dict) -> None:
    """Run a child process: join the others if there are any, train, and write the losses."""
    if job["processes"] > 1:
        import jax

        # on a cluster, initialize() needs no arguments, see docs/devices.md
        jax.distributed.initialize(
            f"127.0.0.1:{job['port']}", job["processes"], job["rank"], initialization_timeout=60
        )
    losses = {way: WAYS[way](job["steps"]) for way in job["ways"]}
    Path(job["report"]).write_text(json.dumps(losses), encoding="utf-8")


def start(job: dict, devices: int, log) -> subprocess.Popen:
    """Start a child with this number of virtual CPU devices."""
    virtual = {
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, __file__, "--child", json.dumps(job)]
    return subprocess.Popen(command, env={**os.environ, **virtual}, stdout=log, stderr=log)


def wait(children: list[subprocess.Popen], limit: float = LIMIT) -> bool:
    """Wait until all children succeed. If one fails or time is up, end all and return False."""
    end = time.monotonic() + limit
    try:
        while any(c.poll() is None for c in children) and time.monotonic() < end:
            if any(c.poll() for c in children):  # the others would wait for the failed child
                break
            time.sleep(0.05)
        return all(c.poll() == 0 for c in children)
    finally:
        for c in children:
            c.kill()
            c.wait()


def launch(ways: list[str], steps: int, processes: int) -> dict[str, list[float]]:
    """Return the losses of these setups, on 8 devices split over the processes."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"ways": ways, "steps": steps, "processes": processes, "port": free.getsockname()[1]}
        free.close()
        reports = [Path(folder, f"{rank}.json") for rank in range(processes)]
        with Path(folder, "log").open("w+", encoding="utf-8") as log:
            jobs = [{**job, "rank": i, "report": str(path)} for i, path in enumerate(reports)]
            if not wait([start(job, 8 // processes, log) for job in jobs]):
                log.seek(0)
                raise RuntimeError(f"training {' and '.join(ways)} failed:\n{log.read()[-4000:]}")
        answers = [json.loads(path.read_text(encoding="utf-8")) for path in reports]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


# -- the report ------------------------------------------------------------------------------------


def main(quick: bool = False) -> dict[str, list[float]]:
    """Train with all setups, print the losses, return them."""
    steps = 12 if quick else 60
    *together, apart = WAYS
    losses = {**launch(together, steps, processes=1), **launch([apart], steps, processes=2)}
    print("step", *(f"{way:>15}" for way in WAYS))
    for i in range(0, steps, steps // 6):
        print(f"{i:4d}", *(f"{losses[way][i]:15.7f}" for way in WAYS))
    alone = np.array(losses["one device"])
    apart = max(np.abs(np.array(losses[way]) - alone).max() for way in WAYS)
    print(f"largest difference from one device, all {steps} steps: {apart:.1e}")
    return losses


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(json.loads(sys.argv[-1]))
    else:
        main(quick="--quick" in sys.argv)
