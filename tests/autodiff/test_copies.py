"""Copies of objects with weights own their data: a compiled step cannot write over them."""

import copy
import pickle

import numpy as np
import optax
import pytest

import regrad as rg
from regrad.errors import ArgumentError, StateError

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda v: pickle.loads(pickle.dumps(v)),
}
COUNT = 8  # Variables, from which on a compiled step writes over their memory


class Net(rg.Module):
    def __init__(self):
        self.layers = [rg.Variable(np.eye(4, dtype="float32")) for _ in range(COUNT)]
        self.tied = self.layers[0]


def decay(variables):
    """A compiled step that takes 0.25 off each entry."""

    @rg.jit
    def step():
        for v in variables:
            v.assign_sub(0.25)

    return step


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("stepped", ["the original", "the copy"])
def test_a_copied_variable_keeps_its_value(way, stepped):
    originals = [rg.Variable([1.0, 2.0], name=f"v{i}", trainable=bool(i)) for i in range(COUNT)]
    step = decay(originals)
    for _ in range(3):
        step()
    copies = [COPIES[way](v) for v in originals]
    moved, kept = (originals, copies) if stepped == "the original" else (copies, originals)
    moving = step if stepped == "the original" else decay(copies)
    for _ in range(3):
        moving()
    assert [v.numpy().tolist() for v in kept] == [[0.25, 1.25]] * COUNT
    assert [v.numpy().tolist() for v in moved] == [[-0.5, 0.5]] * COUNT
    assert [(v.name, v.trainable) for v in copies] == [(f"v{i}", bool(i)) for i in range(COUNT)]


def test_deepcopy_keeps_ties_and_copy_shares():
    net = Net()
    step = decay(net.layers)
    step()
    best, alias, shallow = *copy.deepcopy((net, net.tied)), copy.copy(net)
    step()
    assert best.tied is best.layers[0] is alias and best.tied is not net.tied
    assert shallow.layers[0] is net.layers[0]
    assert best.layers[3].numpy()[0].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert net.layers[3].numpy()[0].tolist() == [0.5, -0.5, -0.5, -0.5]


def test_the_slots_of_a_copied_optimizer_follow_the_copied_variables():
    net, optimizer = Net(), rg.train.Optimizer(optax.adam(0.1), name="adam")
    optimizer.init(net.layers)

    def loss(net):
        return rg.sum(sum((rg.square(w - 2.0) for w in net.layers), rg.scalar(0.0)))

    def trainer(net, optimizer):
        return rg.jit(lambda: optimizer.minimize(lambda: loss(net), net.layers))

    train = trainer(net, optimizer)
    for _ in range(3):
        train()
    twin, other = copy.deepcopy((net, optimizer))
    for _ in range(2):
        train()
    assert other.variables[0].numpy() == 3 and optimizer.variables[0].numpy() == 5
    again = trainer(twin, other)
    for _ in range(2):
        again()
    for a, b in zip(
        [*net.layers, *optimizer.variables], [*twin.layers, *other.variables], strict=True
    ):
        assert a is not b
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)


def test_an_optimizer_that_is_copied_before_its_first_step():
    first = rg.train.Optimizer(optax.sgd(0.5))
    second = copy.deepcopy(first)
    w = rg.Variable([1.0, 2.0], name="w")
    second.minimize(lambda: rg.sum(w * 1.0), [w])
    assert w.numpy().tolist() == [0.5, 1.5]
    with pytest.raises(StateError):
        _ = first.variables


def test_a_variable_is_not_copied_inside_of_a_compiled_function():
    v = rg.Variable(1.0, name="v")
    with pytest.raises(ArgumentError, match=r"a Variable \('v'\) is being made inside"):
        rg.jit(lambda x: copy.deepcopy(v) * x)(2.0)
