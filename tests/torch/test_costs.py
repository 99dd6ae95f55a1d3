"""Calls of Python that a scope costs, which are exact: times are for `python -m bench`."""

import cProfile
import pstats
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import regrad as rg
from tests.torch.common import override

NOTHING = {"Atan2": rg.rules.optional(lambda dy: dy)}


class Bottleneck(nn.Module):
    def __init__(self, relu):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.relu = relu

    def forward(self, x):
        y = x
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = self.relu(y + x if i == 2 else y)
        return y


def guided(dy, x):
    return dy.clamp(min=0) * (x > 0)


class Guided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy.clamp(min=0) * (x > 0)


class ByHand(nn.Module):
    def forward(self, x):
        return Guided.apply(x)


def calls(run, warm=4):
    """Return how many functions, of Python and of C, a call enters."""
    for _ in range(warm):
        run()
    with cProfile.Profile() as profile:
        run()
    return pstats.Stats(profile).total_calls


def per_block(relu, rules=None):
    """Return the calls that one block more costs: a step as networks are trained."""

    def of_blocks(count):
        net = nn.Sequential(*[Bottleneck(relu) for _ in range(count)])
        net = net.to(memory_format=torch.channels_last)
        x = torch.ones(2, 4, 4, 4).to(memory_format=torch.channels_last)

        def step():
            with override(rules) if rules else nullcontext(), torch.autocast("cpu", torch.bfloat16):
                y = net(x)
            y.float().sum().backward()

        return calls(step)

    return (of_blocks(6) - of_blocks(2)) / 4


RELU = nn.ReLU(inplace=True)
OPS, HITS = 10, 3  # of a block


def test_an_op_that_no_rule_concerns():
    """Each op calls torch's mode, and torch's function a second time."""
    assert (per_block(RELU, NOTHING) - per_block(RELU)) / OPS <= 7.2


@pytest.mark.parametrize(("rule", "bound"), [(guided, 25), (rg.rules.guided_relu, 42)])
def test_a_hit(rule, bound):
    hit = per_block(RELU, {"Relu": rule}) - per_block(RELU, NOTHING)
    by_hand = per_block(ByHand()) - per_block(RELU)
    assert (hit - by_hand) / HITS <= bound


def test_a_function_of_others():
    costs = per_block(ByHand(), NOTHING) - per_block(RELU, NOTHING)
    assert (costs - per_block(ByHand()) + per_block(RELU)) / HITS <= 6


def test_opening_and_closing():
    def scope():
        with override(NOTHING):
            pass

    assert calls(scope) <= 160
