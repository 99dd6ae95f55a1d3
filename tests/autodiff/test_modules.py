"""Modules: which Variables they find, under which names, and that everything else takes them."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError


class Linear(rg.Module):
    def __init__(self, rng, m, n):
        self.w = rg.Variable(rng.normal(0, m**-0.5, (m, n)), dtype="float32")
        self.b = rg.Variable(rg.zeros(n))

    def __call__(self, x):
        return x @ self.w + self.b


class Net(rg.Module):
    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.name = "net"
        self.layers = [Linear(rng, 3, 8), (Linear(rng, 8, 2),)]
        self.scales = {"out": rg.Variable(2.0), "in": rg.Variable(1.0, trainable=False)}

    def __call__(self, x):
        hidden, (out,) = self.layers
        return out(rg.nn.relu(hidden(x * self.scales["in"]))) * self.scales["out"]


NAMES = [
    "layers/0/w", "layers/0/b", "layers/1/0/w", "layers/1/0/b", "scales/out", "scales/in",
]  # fmt: skip


def names(variables):
    return [v.name for v in variables]


def test_variables_are_found_in_order_and_named_by_their_places():
    net = Net()
    assert names(net.variables) == NAMES
    assert names(net.trainable_variables) == NAMES[:-1]
    assert names(Net().variables) == NAMES  # whatever was made before


def test_the_first_module_that_is_asked_names_them():
    net = Net()
    assert names(net.layers[0].variables) == ["w", "b"]
    assert names(net.variables) == ["w", "b", *NAMES[2:]]


def test_a_name_that_was_chosen_stays():
    module = rg.Module()
    module.a, module.b = rg.Variable(1.0, name="alpha"), rg.Variable(2.0)
    assert names(module.variables) == ["alpha", "b"]


def test_two_of_one_name_are_refused():
    module = rg.Module()
    module.a, module.b = rg.Variable(1.0, name="w"), rg.Variable(2.0, name="w")
    with pytest.raises(ArgumentError, match=r"at a and b are both called 'w'"):
        module.variables  # noqa: B018
    assert "2 variables" in repr(module)


def test_a_shared_variable_is_there_once():
    net = Net()
    net.layers[1][0].w2 = net.tied = net.layers[0].w
    assert names(net.variables) == [*NAMES[:4], *NAMES[4:]]


def test_what_is_added_later_is_found():
    net = Net()
    assert len(net.variables) == 6
    net.layers.append(Linear(np.random.default_rng(1), 2, 2))
    assert names(net.variables)[4:6] == ["layers/2/w", "layers/2/b"]


def test_a_module_that_holds_itself_ends():
    net = Net()
    net.layers[0].parent = net
    net.itself = [net]
    assert names(net.variables) == NAMES


def test_it_is_shown_without_being_named():
    net = Net()
    assert repr(net).splitlines()[:2] == [
        "Net, 52 numbers in 6 variables",
        "  layers/0/w    float32 (3, 8)",
    ]
    assert not any(v.is_named for v in (net.layers[0].w, net.scales["out"]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_has_variables_of_its_own(copied):
    net = Net()
    other = copied(net)
    assert names(other.variables) == names(net.variables)
    other.layers[0].w.assign(rg.zeros((3, 8)))
    assert net.layers[0].w.numpy().any()


def test_a_step_of_training_and_a_checkpoint(tmp_path):
    import optax

    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    net, sgd = Net(), rg.train.Optimizer(optax.adam(0.05), name="adam")
    sgd.init(net.trainable_variables)

    @rg.jit
    def step(x):
        return sgd.minimize(lambda: rg.mean(rg.square(net(x) - x[:, :2])))

    losses = [float(step(x)) for _ in range(30)]
    assert losses[-1] < losses[0] / 4
    path = tmp_path / "net.safetensors"
    rg.train.save(path, [*net.variables, *sgd.variables])
    other = Net(seed=1)
    rg.train.restore(path, other.variables, strict=False)
    np.testing.assert_allclose(other(x).numpy(), net(x).numpy(), rtol=1e-5)


def test_a_compiled_function_sees_a_plain_attribute_change():
    class Scaled(rg.Module):
        def __init__(self):
            self.by = 2.0
            self.w = rg.Variable(3.0)

        def __call__(self, x):
            return x * self.w * self.by

    net = Scaled()
    f = rg.jit(lambda x: net(x))
    assert float(f(1.0)) == 6
    net.by = 4.0
    net.w.assign(1.0)
    assert float(f(1.0)) == 4


def test_overrides_and_gradients_reach_what_is_in_it():
    net = Net()
    x = rg.ones((2, 3))
    with rg.gradient_override_map({"Relu": lambda dy: dy * 0}) as overrides:
        _, grads = rg.variable_grads(lambda: rg.sum(net(x)), net.trainable_variables)
    overrides.assert_fired("Relu")
    assert not grads["layers/0/w"].numpy().any()
    assert grads["layers/1/0/b"].numpy().any()


def test_where_variables_are_expected_a_module_is_refused_with_what_to_give(tmp_path):
    import optax

    with pytest.raises(ArgumentError, match=r"got Net; of a Module give module\.variables"):
        rg.train.save(tmp_path / "net.safetensors", Net())
    with pytest.raises(ArgumentError, match=r"got Net; of a Module give .*trainable_variables"):
        rg.train.Optimizer(optax.sgd(0.1)).init(Net())
