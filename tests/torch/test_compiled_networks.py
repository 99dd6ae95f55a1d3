"""Whole networks under torch.compile: trained under rules, with as many graphs as without any."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import regrad as rg
import regrad.torch
from tests.helpers.networks import (
    BOTH,
    GPT,
    RELU,
    Leaky,
    ResNet,
    assert_equal,
    gpt_by_hand,
    images,
    loss_of,
    resnet_by_hand,
    state,
    texts,
    train,
)

override = regrad.torch.gradient_override_map
pytestmark = [
    pytest.mark.versions,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # after a graph break
    pytest.mark.filterwarnings("ignore:Dynamo d"),  # on PyTorch 2.10, which looks into scopes
]


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    torch._dynamo.reset()


class UNet(nn.Module):
    """Norms of both kinds, a ReLU in place, what is concatenated, upsampled and transposed."""

    def __init__(self, relu: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.relu = relu
        self.down, self.deep, self.up = self.part(3, 4), self.part(4, 8), self.part(12, 4)
        self.higher, self.last = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(4, 5, 1)
        self.double()

    def part(self, width: int, out: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out),
            self.relu or nn.ReLU(inplace=True), nn.GroupNorm(2, out), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        a = self.down(x)
        b = self.higher(self.deep(F.max_pool2d(a, 2)))
        return self.last(self.up(torch.cat([a, b], 1))).mean((2, 3))


class Recurrent(nn.Module):
    """A classifier on an LSTM, which Dynamo leaves out of its graphs."""

    def __init__(self, relu: Any = F.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lstm = nn.Embedding(11, 4), nn.LSTM(4, 6, batch_first=True)
        self.first, self.last, self.relu = nn.Linear(6, 6), nn.Linear(6, 11), relu
        self.double()

    def forward(self, tokens: Any) -> Any:
        return self.last(self.relu(self.first(self.lstm(self.embed(tokens))[0])))


class ByHand(nn.Module):
    def forward(self, x: Any) -> Any:
        return Leaky.apply(x)


NETWORKS: dict[str, Any] = {  # with the same by hand, the data, and rules
    "ResNet": (ResNet, resnet_by_hand, images, RELU),
    "GPT": (GPT, gpt_by_hand, texts, BOTH),
    "U-Net": (UNet, lambda: UNet(ByHand()), images, RELU),
    "LSTM": (Recurrent, lambda: Recurrent(Leaky.apply), texts, RELU),
}


def compiled(model: nn.Module, backend: str = "aot_eager") -> tuple[nn.Module, Any]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter), counter  # pyright: ignore


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_trained_under_rules(name):
    make, by_hand, data, rules = NETWORKS[name]
    plain, without = compiled(make())
    assert_equal(train(plain, data())[1], train(make(), data())[1])
    model, counter = compiled(make())
    with override(rules) as used:
        losses, found = train(model, data())
    used.assert_fired()
    expected_losses, expected = train(by_hand(), data())
    assert_equal(found, expected)
    torch.testing.assert_close(losses, expected_losses)
    assert counter.frame_count == without.frame_count
    assert counter.frame_count > 0 or name == "LSTM"  # (PyTorch 2.10 compiles nothing around one)


def test_inductor_compiles_a_network_under_rules():
    model, _ = compiled(ResNet(), "inductor")
    with override(RELU):
        found = train(model, images(), 1)[1]
    assert_equal(found, train(resnet_by_hand(), images(), 1)[1])


def gradients(model: nn.Module, net: nn.Module, size: int = 8) -> dict[str, Any]:
    net.zero_grad()
    x, labels = images()
    loss_of(model(x[:size]), labels[:size]).backward()
    return state(net)


def test_batches_of_other_sizes_compile_no_more_than_without_rules():
    counts = []
    for rules, by_hand in (
        (RELU, resnet_by_hand()),
        ({"Sign": "Identity"}, ResNet()),
        ({}, ResNet()),
    ):
        torch._dynamo.reset()
        net = ResNet()
        model, counter = compiled(net)
        counts.append([])
        for size in (8, 6, 5, 3):
            with override({k: rg.rules.optional(rule) for k, rule in rules.items()}):
                found = gradients(model, net, size)
            assert_equal(found, gradients(by_hand, by_hand, size))
            counts[-1].append(counter.frame_count)
    assert counts[0] == counts[1] == counts[2]
    assert counts[0][2] == counts[0][3]


def test_a_model_under_one_rule_and_another():
    """Never the gradient of another rule; what was compiled serves again."""
    net = ResNet()
    model, counter = compiled(net)
    rules = {"A": RELU, "B": {"Relu": lambda dy: 3 * dy}, "none": {}}
    expected = {}
    for name, these in rules.items():
        with override(these):
            expected[name] = gradients(net, net)
    assert_equal(expected["A"], gradients(by_hand := resnet_by_hand(), by_hand))
    for known in (0, 1):
        for n, (name, these) in enumerate(rules.items()):
            with override(these):
                assert_equal(gradients(model, net), expected[name])
            assert counter.frame_count == (3 if known else n + 1)


FRESH = {
    "a lambda": lambda k: lambda dy: 2 * dy,
    "a closure": lambda k: lambda dy: k[0] * dy,
    "a default": lambda k: lambda dy, x, k=k: k[0] * dy,
    "a factory": lambda k: rg.rules.superspike(2.0),
}


@pytest.mark.parametrize("name", ["a lambda", "a factory"])
def test_a_rule_that_is_made_anew_at_each_step_compiles_once(name):
    net = ResNet()
    model, counter = compiled(net)
    for _ in range(3):
        with override({"Relu": FRESH[name]([2.0])}):
            gradients(model, net)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["a closure", "a default"])
def test_rules_of_other_values_are_others(name):
    x = torch.ones(2, requires_grad=True)
    model = torch.compile(torch.relu, backend="aot_eager")
    for k in (2.0, 3.0, 2.0):
        with override({"Relu": FRESH[name]([k])}):
            y = model(x)
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [k, k]


def scoped(x: Any) -> Any:
    with override(RELU):
        return torch.relu(x).sum()


class Part(nn.Module):
    """A network one part of which runs under a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.ReLU()
        self.part.forward = override(RELU)(self.part.forward)

    def forward(self, x: Any) -> Any:
        return (self.part(x) + torch.relu(x)).sum()


@pytest.mark.parametrize(("run", "slope"), [(scoped, 0.25), (Part(), 0.25)])
def test_a_scope_inside_is_right_or_refused_by_name(run, slope):
    x = torch.tensor([-1.0], requires_grad=True)
    (dx,) = torch.autograd.grad(torch.compile(run, backend="aot_eager")(x), x)
    assert dx.tolist() == [slope]
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=r"gradient_override_map|with override|with scope"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(x)


def test_a_compiled_model_is_saved_and_loaded():
    model, _ = compiled(ResNet())
    with override(RELU):
        train(model, images())
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        net = ResNet()
        for p in net.parameters():
            p.data.zero_()
        other, _ = compiled(net)
        other.load_state_dict(torch.load(file))
        assert_equal(train(other, images())[1], train(model, images())[1])
