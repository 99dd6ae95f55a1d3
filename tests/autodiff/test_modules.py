"""Modules, the names of their Variables, and copies, which own their data."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, StateError
from tests.helpers.optional import optional
from tests.helpers.rows import close, plain, refused

optax = optional("optax")


class Linear(rg.Module):
    def __init__(self, rng, m, n):
        self.w = rg.Variable(rng.normal(0, m**-0.5, (m, n)), dtype="float32")
        self.b = rg.Variable(rg.zeros(n))

    def __call__(self, x):
        return x @ self.w + self.b


class Net(rg.Module):
    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.name, self.by = "net", 1.0
        self.layers = [Linear(rng, 3, 8), (Linear(rng, 8, 2),)]
        self.scales = {"out": rg.Variable(2.0), "in": rg.Variable(1.0, trainable=False)}

    def __call__(self, x):
        hidden, (out,) = self.layers
        y = out(rg.nn.relu(hidden(x * self.scales["in"])))
        return y * self.scales["out"] * self.by


LAYERS = ["layers/0/w", "layers/0/b", "layers/1/0/w", "layers/1/0/b"]
NAMES = [*LAYERS, "scales/out", "scales/in"]


def names(variables):
    return [v.name for v in variables]


def of(**variables):
    module = rg.Module()
    vars(module).update(variables)
    return module


def test_variables_are_found_in_order_and_named_by_their_places():
    net = Net()
    shown = "Net, 52 numbers in 6 variables\n  layers/0/w    float32 (3, 8)\n"
    assert repr(net).startswith(shown)
    assert not any(v.is_named for v in (net.layers[0].w, net.scales["out"]))  # by being shown
    assert names(net.variables) == NAMES
    assert names(net.trainable_variables) == NAMES[:-1]
    assert names(Net().variables) == NAMES  # whatever was made before
    net.layers.append(Linear(np.random.default_rng(1), 2, 2))
    assert names(net.variables)[4:6] == ["layers/2/w", "layers/2/b"]


def test_the_first_module_that_is_asked_names_them():
    net = Net()
    assert names(net.layers[0].variables) == ["w", "b"]
    assert names(net.variables) == ["w", "b", *NAMES[2:]]
    module = of(a=rg.Variable(1.0, name="alpha"), b=rg.Variable(2.0))
    assert names(module.variables) == ["alpha", "b"]


def test_two_of_one_name_are_refused():
    module = of(a=rg.Variable(1.0, name="w"), b=rg.Variable(2.0, name="w"))
    refused(lambda: module.variables, ArgumentError, r"at a and b are both called 'w'")
    assert "2 variables" in repr(module)


def test_what_is_shared_is_there_once_and_a_circle_ends():
    net = Net()
    net.layers[1][0].w2 = net.tied = net.layers[0].w
    net.layers[0].parent, net.itself = net, [net]
    assert names(net.variables) == NAMES


@pytest.mark.slow
def test_a_step_of_training_and_a_checkpoint(tmp_path):
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    net, sgd = Net(), rg.train.Optimizer(optax.adam(0.05), name="adam")
    sgd.init(net.trainable_variables)
    step = rg.jit(lambda x: sgd.minimize(lambda: rg.mean(rg.square(net(x) - x[:, :2]))))
    losses = [float(step(x)) for _ in range(30)]
    assert losses[-1] < losses[0] / 4
    path = tmp_path / "net.safetensors"
    rg.train.save(path, [*net.variables, *sgd.variables])
    other = Net(seed=1)
    rg.train.restore(path, other.variables, strict=False)
    close(other(x), net(x), 1e-5)


def test_a_compiled_function_sees_a_plain_attribute_change():
    net, x = Net(), rg.ones((2, 3))
    f = rg.jit(lambda x: net(x))
    first = f(x)
    net.by = 4.0
    net.scales["out"].assign(1.0)
    close(f(x), 2 * first, 1e-6)


def test_overrides_and_gradients_reach_what_is_in_it():
    net = Net()
    with rg.gradient_override_map({"Relu": lambda dy: dy * 0}) as overrides:
        loss = lambda: rg.sum(net(rg.ones((2, 3))))  # noqa: E731
        _, grads = rg.variable_grads(loss, net.trainable_variables)
    overrides.assert_fired("Relu")
    assert not grads["layers/0/w"].numpy().any()
    assert grads["layers/1/0/b"].numpy().any()


def test_where_variables_are_expected_a_module_is_refused_with_what_to_give(tmp_path):
    words = r"got Net; for a Module pass {}"
    save = lambda: rg.train.save(tmp_path / "net.safetensors", Net())  # noqa: E731
    refused(save, ArgumentError, words.format(r"module\.variables"))
    init = rg.train.Optimizer(optax.sgd(0.1)).init
    refused(lambda: init(Net()), ArgumentError, words.format(".*trainable_variables"))


# -- copies: a compiled step cannot write over them ------------------------------------------------

pickled = lambda v: pickle.loads(pickle.dumps(v))  # noqa: E731
COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickled}
COUNT = 8  # Variables, from which on a compiled step writes over their memory


def eight():
    """A Module with eight weights, one of which has two names."""
    layers = [rg.Variable([1.0, 2.0], name=f"v{i}", trainable=bool(i)) for i in range(COUNT)]
    return of(layers=layers, tied=layers[0])


def decay(variables):
    """A compiled step that takes 0.25 off each entry."""
    return rg.jit(lambda: [v.assign_sub(0.25) for v in variables] and None)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("stepped", ["the original", "the copy"])
def test_a_copied_variable_keeps_its_value(way, stepped):
    originals = eight().layers
    step = decay(originals)
    for _ in range(3):
        step()
    copies = [COPIES[way](v) for v in originals]
    moved, kept = (originals, copies) if stepped == "the original" else (copies, originals)
    moving = step if stepped == "the original" else decay(copies)
    for _ in range(3):
        moving()
    assert plain(kept) == [[0.25, 1.25]] * COUNT
    assert plain(moved) == [[-0.5, 0.5]] * COUNT
    assert [(v.name, v.trainable) for v in copies] == [(f"v{i}", bool(i)) for i in range(COUNT)]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copied_module_keeps_ties_and_a_shallow_copy_shares(way):
    net = eight()
    step = decay(net.layers)
    step()
    (best, alias), shallow = COPIES[way]((net, net.tied)), copy.copy(net)
    step()
    assert best.tied is best.layers[0] is alias and best.tied is not net.tied
    assert shallow.layers[0] is net.layers[0]
    assert plain([best.layers[3], net.layers[3]]) == [[0.75, 1.75], [0.5, 1.5]]
    assert names(best.variables) == names(net.variables)


def test_the_slots_of_a_copied_optimizer_follow_the_copied_variables():
    net, optimizer = eight(), rg.train.Optimizer(optax.adam(0.1), name="adam")
    optimizer.init(net.layers)

    def trained(net, optimizer, steps):
        loss = lambda: sum((rg.sum(rg.square(w - 2.0)) for w in net.layers), rg.scalar(0.0))  # noqa: E731
        step = rg.jit(lambda: optimizer.minimize(loss, net.layers))
        for _ in range(steps):
            step()
        return [*net.layers, *optimizer.variables]

    trained(net, optimizer, 3)
    twin, other = copy.deepcopy((net, optimizer))
    first = trained(net, optimizer, 2)
    assert other.variables[0].numpy() == 3 and optimizer.variables[0].numpy() == 5
    second = trained(twin, other, 2)
    assert not {*map(id, first)} & {*map(id, second)}
    close(second, first, 1e-6)


def test_an_optimizer_that_is_copied_before_its_first_step():
    first = rg.train.Optimizer(optax.sgd(0.5))
    second, w = copy.deepcopy(first), rg.Variable([1.0, 2.0], name="w")
    second.minimize(lambda: rg.sum(w * 1.0), [w])
    assert w.tolist() == [0.5, 1.5]
    refused(lambda: first.variables, StateError)


def test_a_variable_is_not_copied_inside_of_a_compiled_function():
    v = rg.Variable(1.0, name="v")
    f = rg.jit(lambda x: copy.deepcopy(v) * x)
    refused(lambda: f(2.0), ArgumentError, r"a Variable \('v'\) is created inside")
