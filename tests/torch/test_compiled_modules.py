"""Modules of torch.nn compile under a scope as without one: whole, with the same values."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import regrad
from tests.helpers.torch_calls import override

pytestmark = pytest.mark.versions


class Loss(nn.Module):
    def forward(self, x):
        return F.cross_entropy(x, torch.arange(len(x)) % x.shape[1], label_smoothing=0.1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x)[0]


FLAT, ROWS, IMAGE = (4, 3), (2, 5, 4), (2, 3, 4, 4)
MODULES = {
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), IMAGE),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGE),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), FLAT),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), IMAGE),
    "CELU": (nn.CELU, FLAT),
    "Conv2d": (lambda: nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular"), IMAGE),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(3, 2, 3), IMAGE),
    "CosineSimilarity": (lambda: Twice(nn.CosineSimilarity()), FLAT),
    "Dropout": (lambda: nn.Dropout(0.0), FLAT),
    "ELU": (nn.ELU, FLAT),
    "GELU": (nn.GELU, FLAT),
    "GLU": (nn.GLU, ROWS),
    "GroupNorm": (lambda: nn.GroupNorm(1, 3), FLAT),
    "Hardsigmoid": (nn.Hardsigmoid, FLAT),
    "Hardswish": (nn.Hardswish, FLAT),
    "Hardtanh": (nn.Hardtanh, FLAT),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3), IMAGE),
    "LayerNorm": (lambda: nn.LayerNorm(3), FLAT),
    "LeakyReLU": (nn.LeakyReLU, FLAT),
    "Linear": (lambda: nn.Linear(3, 2), FLAT),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), IMAGE),
    "LogSoftmax": (lambda: nn.LogSoftmax(-1), FLAT),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGE),
    "Mish": (nn.Mish, FLAT),
    "MultiheadAttention": (Attention, ROWS),
    "PReLU": (nn.PReLU, FLAT),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (1, 4, 2, 2)),
    "RMSNorm": (lambda: nn.RMSNorm(3), FLAT),
    "ReLU": (nn.ReLU, FLAT),
    "ReLU6": (nn.ReLU6, FLAT),
    "SELU": (nn.SELU, FLAT),
    "SiLU": (nn.SiLU, FLAT),
    "Softmax": (lambda: nn.Softmax(-1), FLAT),
    "Softplus": (nn.Softplus, FLAT),
    "Softsign": (nn.Softsign, FLAT),
    "TransformerDecoderLayer": (
        lambda: Twice(nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)), ROWS,
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), ROWS,
    ),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "ZeroPad2d": (lambda: nn.ZeroPad2d(1), IMAGE),
    "cross_entropy": (Loss, FLAT),
}  # fmt: skip


class Twice(nn.Module):
    """A module of two arguments, which are one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


class Net(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(torch.tanh(x))


def answers(net, shape):
    """Return the result, and the gradient by the input."""
    x = torch.linspace(-1.5, 2, torch.Size(shape).numel()).reshape(shape).requires_grad_()
    y = net(x)
    weights = torch.linspace(1, 2, y.numel()).reshape(y.shape)
    return y.detach(), torch.autograd.grad((y * weights).sum(), x)[0]


class Made(nn.Module):
    """A loss that is made in the forward pass: Dynamo asks no mode about it."""

    def forward(self, x):
        return nn.CrossEntropyLoss(label_smoothing=0.1)(x, torch.arange(len(x)) % x.shape[1])


# One that the network has in front of the module, and one that most modules have not.
@pytest.mark.parametrize("key", ["Tanh", "Relu"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_compile_whole_beside_a_rule(name, key):
    make, shape = MODULES[name]
    torch.manual_seed(0)
    net = Net(make())
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    rules = {key: lambda dy: dy * 3}
    plain = answers(net, shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=regrad.errors.UnusedOverrideWarning)
        with override(rules):
            wanted = answers(net, shape)
        with override(rules):
            y, dx = answers(compiled, shape)
    assert counter.frame_count == 1
    torch.testing.assert_close(y, plain[0])
    torch.testing.assert_close(dx, wanted[1])
    assert key == "Relu" or not torch.allclose(dx, plain[1])


@pytest.mark.parametrize("make", [Loss, Made])
def test_a_loss_runs_under_the_rule_for_an_op_inside(make):
    net = Net(make())
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with override({"LogSoftmax": lambda dy: dy * 3}) as used:
        wanted = answers(net, FLAT)
        y, dx = answers(compiled, FLAT)
    used.assert_fired()
    torch.testing.assert_close(y, wanted[0])
    torch.testing.assert_close(dx, wanted[1])
    assert not torch.allclose(dx, answers(net, FLAT)[1])
