"""Modules and whole networks under torch.compile: trained under rules, in as many graphs.

Modules of torch.nn compile whole, with the values that they have without a scope.
"""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import regrad as rg
import tests.helpers.networks as nets
from tests.campaigns import compiled as compiled_modules
from tests.campaigns.verdicts import DELIVERED, REFUSED
from tests.helpers.networks import BOTH, RELU, Leaky, ResNet, assert_equal, images, train
from tests.torch.common import fired, grad, leaf, override

pytestmark = [
    pytest.mark.versions,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # after a graph break
    pytest.mark.filterwarnings("ignore:Dynamo d"),  # on PyTorch 2.10, which looks into scopes
]


class Recurrent(nn.Module):
    """A classifier on an LSTM, which Dynamo leaves out of its graphs."""

    def __init__(self, relu=F.relu):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lstm = nn.Embedding(11, 4), nn.LSTM(4, 6, batch_first=True)
        self.first, self.last, self.relu = nn.Linear(6, 6), nn.Linear(6, 11), relu
        self.double()

    def forward(self, tokens):
        return self.last(self.relu(self.first(self.lstm(self.embed(tokens))[0])))


NETWORKS = {  # with the same by hand, the data, and rules
    "ResNet": (ResNet, nets.resnet_by_hand, images, RELU),
    "GPT": (nets.GPT, nets.gpt_by_hand, nets.texts, BOTH),
    "LSTM": (Recurrent, lambda: Recurrent(Leaky.apply), nets.texts, RELU),
}


def compiled(model, backend="aot_eager", **options):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, **options), counter


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_trained_under_rules(name):
    make, by_hand, data, rules = NETWORKS[name]
    plain, without = compiled(make())
    assert_equal(train(plain, data())[1], train(make(), data())[1])
    model, counter = compiled(make())
    losses, found = fired(rules, train, model, data())
    expected_losses, expected = train(by_hand(), data())
    assert_equal(found, expected)
    torch.testing.assert_close(losses, expected_losses)
    assert counter.frame_count == without.frame_count
    assert counter.frame_count > 0 or name == "LSTM"  # (PyTorch 2.10 compiles nothing around one)


def gradients(model, net, size=8):
    net.zero_grad()
    x, labels = images()
    nets.loss_of(model(x[:size]), labels[:size]).backward()
    return nets.state(net)


@pytest.mark.slow
def test_batches_of_other_sizes_compile_no_more_than_without_rules():
    counts = []
    same = {"Sign": "Identity"}
    for rules, by_hand in ((RELU, nets.resnet_by_hand()), (same, ResNet()), ({}, ResNet())):
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


@pytest.mark.slow
def test_a_model_under_one_rule_and_another():
    """Never the gradient of another rule; what was compiled serves again."""
    net = ResNet()
    model, counter = compiled(net)
    rules = {"A": RELU, "B": {"Relu": lambda dy: 3 * dy}, "none": {}}
    expected = {}
    for name, these in rules.items():
        with override(these):
            expected[name] = gradients(net, net)
    assert_equal(expected["A"], gradients(by_hand := nets.resnet_by_hand(), by_hand))
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a lambda", "a factory"])
def test_a_rule_that_is_made_anew_at_each_step_compiles_once(name):
    net = ResNet()
    model, counter = compiled(net)
    for _ in range(3):
        with override({"Relu": FRESH[name]([2.0])}):
            gradients(model, net)
    assert counter.frame_count == 1


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["a closure", "a default"])
def test_rules_of_other_values_are_others(name):
    x = leaf(1, 1)
    model = torch.compile(torch.relu, backend="aot_eager")
    for k in (2.0, 3.0, 2.0):
        with override({"Relu": FRESH[name]([k])}):
            y = model(x)
        assert grad(y, x).tolist() == [k, k]


def scoped(x):
    with override(RELU):
        return torch.relu(x).sum()


class Part(nn.Module):
    """A network one part of which runs under a rule."""

    def __init__(self):
        super().__init__()
        self.part = nn.ReLU()
        self.part.forward = override(RELU)(self.part.forward)

    def forward(self, x):
        return (self.part(x) + torch.relu(x)).sum()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("run", [scoped, Part()], ids=["function", "module"])
def test_a_scope_inside_is_right_or_refused_by_name(run):
    x = leaf(-1)
    assert grad(torch.compile(run, backend="aot_eager")(x), x).tolist() == [0.25]
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=r"gradient_override_map|with override|with scope"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(x)


# -- modules of torch.nn ---------------------------------------------------------------------------


class Loss(nn.Module):
    def forward(self, x):
        return F.cross_entropy(x, torch.arange(len(x)) % x.shape[1], label_smoothing=0.1)


class Made(nn.Module):
    """A loss that is made in the forward pass: Dynamo asks no mode about it."""

    def forward(self, x):
        return nn.CrossEntropyLoss(label_smoothing=0.1)(x, torch.arange(len(x)) % x.shape[1])


MODULES = """
CELU ELU GELU Hardsigmoid Hardswish Hardtanh LeakyReLU Mish PReLU ReLU ReLU6 SELU SiLU Softplus
Softsign AdaptiveAvgPool2d AvgPool2d BatchNorm1d BatchNorm2d Conv2d ConvTranspose2d CosineSimilarity
GLU GroupNorm InstanceNorm2d LayerNorm Linear LocalResponseNorm LogSoftmax MaxPool2d
MultiheadAttention PixelShuffle RMSNorm Softmax TransformerDecoderLayer TransformerEncoderLayer
Upsample ZeroPad2d functional.cross_entropy
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", MODULES.split())
def test_modules_compile_whole_beside_a_rule(name):
    """A slice of the campaign over modules: rules for them, and for another layer."""
    found = compiled_modules.run(f"nn.{name}", quick=True)
    assert [v for v in found if v.outcome not in (DELIVERED, REFUSED)] == []
    assert any("another layer" in v.case and v.outcome == DELIVERED for v in found)


def answers(net):
    """Return the result, and the gradient by the input."""
    x = torch.linspace(-1.5, 2, 12).reshape(4, 3).requires_grad_()
    y = net(x)
    return y.detach(), grad(y * torch.linspace(1, 2, y.numel()).reshape(y.shape), x)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("make", [Loss, Made])
def test_a_loss_runs_under_the_rule_for_an_op_inside(make):
    net = nn.Sequential(nn.Tanh(), make())
    model, _ = compiled(net, fullgraph=True)
    with override({"LogSoftmax": lambda dy: dy * 3}) as used:
        wanted = answers(net)
        found = answers(model)
    used.assert_fired()
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(found[1], answers(net)[1])


@pytest.mark.slow
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
