"""Rules that name the bias, and the other parameters of linear, convolutions and norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regrad.torch
from regrad.errors import RuleError
from tests.torch.test_builtin import WAYS, close, gradients, numbers

override = regrad.torch.gradient_override_map
G = nn.grad

CHANNELS = [numbers(3, seed=1), numbers(3, seed=2)]
CASES = {
    "linear": (F.linear, F.linear, [numbers(3, 2), numbers(4, 2), numbers(4)]),
    "conv1d": (F.conv1d, F.conv1d, [numbers(2, 3, 8), numbers(4, 3, 2), numbers(4)]),
    "conv2d": ("Conv2D", F.conv2d, [numbers(2, 3, 4, 4), numbers(4, 3, 2, 2), numbers(4)]),
    "conv3d": ("Conv3D", F.conv3d, [numbers(1, 2, 3, 3, 3), numbers(3, 2, 2, 2, 2), numbers(3)]),
    "conv_transpose2d": (
        F.conv_transpose2d,
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        [numbers(2, 3, 4, 4), numbers(3, 4, 2, 2), numbers(4)],
    ),
    "layer_norm": (
        F.layer_norm, lambda x, w, b: F.layer_norm(x, (3,), w, b), [numbers(2, 3), *CHANNELS]
    ),
    "batch_norm": (
        F.batch_norm,
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        [numbers(4, 3), *CHANNELS],
    ),
    "torch.batch_norm": (
        F.batch_norm,
        lambda x, w, b: torch.batch_norm(x, w, b, None, None, True, 0.1, 1e-5, False),
        [numbers(4, 3), *CHANNELS],
    ),
    "group_norm": (
        F.group_norm, lambda x, w, b: F.group_norm(x, 1, w, b), [numbers(4, 3), *CHANNELS]
    ),
    "instance_norm": (
        F.instance_norm,
        lambda x, w, b: F.instance_norm(x, None, None, w, b),
        [numbers(2, 3, 4), *CHANNELS],
    ),
}  # fmt: skip


def in_scope(key, rule, f, way="eager"):
    def run(*xs):
        with override({key: rule}):
            return WAYS[way](f)(*xs)

    return run


@pytest.mark.versions
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_the_bias_keeps_its_gradient_unless_the_rule_returns_one(name, way):
    key, f, xs = CASES[name]
    seen = []

    def named(dy, x, w, bias, builtin):
        seen.append([x.detach().clone(), w.detach().clone(), bias.detach().clone()])
        return [3 * dx for dx in builtin(dy) if dx is not None][:2]

    def all_three(dy, x, w, bias, builtin):
        return [*named(dy, x, w, bias, builtin), 7 * bias]

    torch._dynamo.reset()
    dx, dw, db = gradients(f, xs)
    close(gradients(in_scope(key, named, f, way), xs), [3 * dx, 3 * dw, db])
    torch._dynamo.reset()
    close(gradients(in_scope(key, all_three, f, way), xs), [3 * dx, 3 * dw, 7 * xs[2]])
    if way != "compiled":
        close(seen[0], xs)


@pytest.mark.parametrize("name", ["linear", "conv2d", "layer_norm"])
def test_second_derivatives_are_those_of_the_rule_and_of_torch(name):
    key, f, xs = CASES[name]

    def rule(dy, x, w, bias, builtin):
        return [3 * dx for dx in builtin(dy) if dx is not None][:2]

    def scaled(x, w, b):  # the second implementation: hooks on detached values
        y = f(x, w, b)
        return y + 2 * (f(x, w, b.detach()) - f(x, w, b.detach()).detach())

    close(gradients(in_scope(key, rule, f), xs, 2), gradients(scaled, xs, 2))


def test_by_torchs_names_and_formulas():
    def rule(dy, input, weight, bias):
        assert bias is None or torch.equal(bias, xs[2])
        return dy @ weight, dy.mT @ input

    xs = CASES["linear"][2]
    close(gradients(in_scope(F.linear, rule, F.linear), xs), gradients(F.linear, xs))
    close(gradients(in_scope(F.linear, rule, F.linear), xs[:2]), gradients(F.linear, xs[:2]))


def test_a_convolution_with_and_without_a_bias():
    def rule(dy, x, w, bias, strides, pad, dilations):
        found.append(bias)
        return (
            G.conv2d_input(x.shape, w, dy, strides, pad, dilations),
            G.conv2d_weight(x, w.shape, dy, strides, pad, dilations),
        )

    found = []
    _, f, xs = CASES["conv2d"]
    close(gradients(in_scope("Conv2D", rule, f), xs), gradients(f, xs))
    close(gradients(in_scope("Conv2D", rule, f), xs[:2]), gradients(f, xs[:2]))
    assert torch.equal(found[0], xs[2]) and found[1] is None
    relu = lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1)  # noqa: E731
    close(gradients(in_scope(F.conv2d, rule, relu), xs), gradients(relu, xs))


def test_a_module_with_statistics():
    norm = nn.BatchNorm1d(3).double()

    def rule(dy, input, running_mean, running_var, weight, bias, training, eps):
        assert training and eps == norm.eps and running_mean is not None
        return [dy * weight, None, None, None]

    x = numbers(4, 3).requires_grad_()
    with override({F.batch_norm: rule}) as used:
        y = norm(x)
    y.sum().backward()
    used.assert_fired()
    close([x.grad, norm.bias.grad], [torch.ones_like(x), torch.full((3,), 4.0).double()])
    assert norm.weight.grad is None


def test_wrong_numbers_and_names_are_refused():
    xs = CASES["linear"][2]
    with pytest.raises(RuleError, match="returned 1, and the op has 3 inputs"):
        gradients(in_scope(F.linear, lambda dy, input, bias: [dy], F.linear), xs)
    with pytest.raises(RuleError, match=r"asks for 'wieght'.* Did you mean 'weight'"):
        override({F.linear: lambda dy, input, wieght: [dy]}).__enter__()
