"""Overrides in programs that torch writes down in its own form: TorchScript and `aot_function`."""

import pytest
import torch
import torch.nn.functional as F

from tests.torch.common import backward, override
from tests.torch.placed import refused

pytestmark = [
    pytest.mark.versions, pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
]  # fmt: skip


@pytest.fixture
def x():
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)


KEYS = {
    "linear": ("MatMul", lambda x: F.linear(x, x)),
    "einsum": ("MatMul", lambda x: torch.einsum("ij,jk->ik", x, x)),
    "silu": ("Sigmoid", F.silu),
    "cross_entropy": ("LogSoftmax", lambda x: F.cross_entropy(x, torch.arange(2))),
    "max": ("Max", lambda x: x.max()),
    "flatten": ("Reshape", lambda x: x.mT.flatten()),
    "conv2d": ("Conv2D", lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 2, 2))),
    "relu6": ("Relu6", lambda x: F.hardtanh(x, 0.0, 6.0)),
    "hardswish": ("Relu6", F.hardswish),
    "hardsigmoid": ("Relu6", F.hardsigmoid),
    "bilinear": ("MatMul", lambda x: F.bilinear(x, x, torch.ones(1, 2, 2))),
    "mish": ("Tanh", F.mish),
    "elu": ("Elu", F.elu),
    "selu": ("Selu", F.selu),
    "conv3d": ("Conv3D", lambda x: F.conv3d(x[None, None, None], torch.ones(1, 1, 1, 2, 2))),
    "flatten of a matrix": ("Reshape", lambda x: x.flatten() * 2),
    "hstack": ("ConcatV2", lambda x: torch.hstack([x, x])),
    "a callable": (F.hardtanh, lambda x: F.hardtanh(x)),
    "a callable written in Python": (F.normalize, lambda x: F.normalize(x)),
}
OTHERS = {
    "a number": ("Tanh", lambda x: torch.relu(x) * 2 + 1),
    "numbers": ("Sigmoid", lambda x: 2 / (x - 5.0)),
    "a view": ("Tanh", lambda x: x.flatten() * 1),
    "conv1d": ("Conv2D", lambda x: F.conv1d(x[None], torch.ones(2, 2, 1))),
    "hardtanh": ("Relu6", lambda x: F.hardtanh(x)),
    "elu of selu": ("Selu", F.elu),
    "selu of elu": ("Elu", F.selu),
    "tanh": ("Relu", torch.tanh),
}


@pytest.mark.parametrize("name", KEYS)
def test_torchscript_that_has_an_overridden_op_is_refused(name, x):
    key, f = KEYS[name]
    program = torch.jit.trace(f, x, check_trace=False)
    refused("the TorchScript program", {key: lambda op, dy: dy}, lambda: program(x))


@pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_torchscript_of_other_ops_runs_and_is_reported(name, x):
    key, f = OTHERS[name]
    program = torch.jit.trace(f, x, check_trace=False)
    with override({key: lambda op, dy: dy}) as used:
        y = program(x)
    torch.testing.assert_close(backward(y, x), backward(f(x), x))
    assert [row[0] for row in used.untouched().rows if "TorchScript program" in row[0]]


class Scripted(torch.nn.Module):
    def forward(self, x):
        return self.other(x)

    @torch.jit.export
    def other(self, x):
        return F.normalize(F.relu(x))


@pytest.mark.parametrize("key", ["Relu", F.normalize])
@pytest.mark.parametrize("way", ["forward", "method", "frozen"])
def test_scripted_modules(way, key, x):
    module = torch.jit.script(Scripted().eval())
    if way == "frozen" and key == "Relu":
        module = torch.jit.freeze(module)
    run = module.other if way == "method" else module
    refused("TorchScript", {key: lambda dy: dy}, lambda: run(x))


def aot(x, made):
    from functorch.compile import aot_function, nop

    program = aot_function(lambda x: torch.relu(x) * 2, nop)
    if made:
        program(x)
    return lambda: program(x)


PROGRAMS = {
    "trace": (lambda x: lambda: torch.jit.trace(torch.relu, x, check_trace=False), "jit.trace"),
    "aot_function": (lambda x: aot(x, False), "aot_function"),
    "aot_function made before": (lambda x: aot(x, True), "aot_function"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_are_written_in_a_scope_are_refused(name, x):
    make, words = PROGRAMS[name]
    refused(words, {"Relu": lambda dy: 7 * dy}, make(x))
