"""Plans of quantizers on whole networks, against the same networks with edited layers."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
import regrad.torch
from regrad.errors import ArgumentError, RuleError
from regrad.rules import quantize as Q

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
override = regrad.torch.gradient_override_map


class Step(torch.autograd.Function):
    """Equations 1 to 3 of Esser et al. (2020), for a step for all or one for each channel."""

    @staticmethod
    def forward(ctx, v, step, low, high):
        ctx.save_for_backward(v, step)
        ctx.bounds = low, high
        return (v / step).clamp(low, high).round() * step

    @staticmethod
    def backward(ctx, dy):
        (v, step), (low, high) = ctx.saved_tensors, ctx.bounds
        u = v / step
        inside = (u >= low) & (u <= high)
        by_step = torch.where(inside, u.round() - u, u.clamp(low, high)) * dy
        by_step = by_step / (v.numel() / step.numel() * high) ** 0.5
        return dy * inside, by_step.sum_to_size(step.shape), None, None


class Int8(torch.autograd.Function):
    """Eight bits per token; the gradient passes within the bounds."""

    @staticmethod
    def forward(ctx, v):
        scale = v.abs().amax(-1, keepdim=True).clamp(min=2.0**-23) / 127
        codes = (v / scale).round()
        ctx.save_for_backward((codes >= -128) & (codes <= 127))
        return codes.clamp(-128, 127) * scale

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0]


int8 = Int8.apply


class StepLinear(nn.Linear):
    def forward(self, x):
        return F.linear(int8(x), Step.apply(self.weight, self.step, -8, 7), self.bias)


class StepConv(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(int8(x), Step.apply(self.weight, self.step, -8, 7), self.bias)


class StepEmbedding(nn.Embedding):
    def forward(self, x):
        return F.embedding(x, Step.apply(self.weight, self.step, -8, 7))


class PactReLU(nn.ReLU):
    def forward(self, x):
        inside = torch.where(x >= self.alpha, self.alpha, torch.where(x > 0, x, 0.0))
        return inside + ((inside * 15 / self.alpha).round() * self.alpha / 15 - inside).detach()


EDITED = {
    nn.Linear: StepLinear, nn.Conv2d: StepConv, nn.Embedding: StepEmbedding, nn.ReLU: PactReLU,
}  # fmt: skip


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(inplace=True)), nn.Flatten(),
        nn.Linear(24, 5),
    ), torch.randn(3, 3, 8, 8)  # fmt: skip


def tokens():
    return nn.Sequential(
        nn.Embedding(7, 6), nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4)
    ), torch.randint(0, 7, (3, 5))


PLAN = Q.layers(
    weights=Q.lsq(4, per="channel"), inputs=Q.affine(8, per="token"), activations=Q.pact(4)
)
NETS = {"convolutions": convolutions, "tokens": tokens}


def built(name, dtype=torch.float64):
    """Return a network, its input, its steps and the network with edited layers."""
    torch.manual_seed(0)
    net, x = NETS[name]()
    net, x = net.to(dtype), x.to(dtype) if x.is_floating_point() else x
    steps = PLAN.steps(net, x)
    edited = copy.deepcopy(net)
    for path, module in edited.named_modules():
        if type(module) in EDITED:
            module.__class__ = EDITED[type(module)]
            for state, given in steps[path].items():
                value = nn.Parameter(given.detach().clone())
                module.register_parameter(state.rpartition("_")[2], value)
    return net, x, steps, edited


def gradients(run, x, net, steps=None):
    parameters = dict(net.named_parameters())
    parameters |= {} if steps is None else dict(steps.named_parameters())
    y = run(x)
    found = torch.autograd.grad(y.square().sum(), [*parameters.values()])
    names = [n.replace("weights_step", "step").replace("ations_alpha", "").replace("activ", "alpha")
             for n in parameters]  # fmt: skip
    return y.detach(), dict(zip(names, found, strict=True))


def check(found, expected, **tolerance):
    (y, by_name), (z, others) = found, expected
    torch.testing.assert_close(y, z, **tolerance)
    assert by_name.keys() == others.keys()
    for name, dx in by_name.items():
        torch.testing.assert_close(dx, others[name], msg=name, **tolerance)


def quantized(steps, net, plan=PLAN):
    return override(plan.rules(steps), values=True, model=net)


@pytest.mark.parametrize("way", ["eager", "checkpoint", "compiled"])
@pytest.mark.parametrize("name", NETS)
def test_a_plan_is_the_network_with_edited_layers(name, way):
    net, x, steps, edited = built(name)
    expected = gradients(edited, x, edited)
    run = net
    if way == "checkpoint":
        run = lambda x: checkpoint(net, x, use_reentrant=False, preserve_rng_state=False)  # noqa: E731
    if way == "compiled":
        torch.compiler.reset()
        run = torch.compile(net, backend="aot_eager", fullgraph=True)
    with quantized(steps, net) as used:
        found = gradients(run, x, net, steps)
    check(found, expected)
    used.assert_fired()


def test_backward_autocast_and_training():
    net, x, steps, edited = built("tokens", torch.float32)
    models = ((net, steps), (edited, None))
    optimizers = [torch.optim.SGD([*m.parameters(), *(s.parameters() if s else ())], 0.02)
                  for m, s in models]  # fmt: skip
    for _ in range(3):
        for (model, mine), optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                if mine is None:
                    loss = model(x).square().mean()
                else:
                    with quantized(mine, model):
                        loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p, edited.get_parameter(name), rtol=2e-2, atol=2e-2)
    assert abs(steps["1"]["weights_step"] - PLAN.steps(net, x)["1"]["weights_step"]).max() > 0


def test_the_model_is_left_as_found():
    torch.manual_seed(0)
    net, x = convolutions()
    net[1].running_mean.fill_(0.5)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    net[0].weight.requires_grad_(False)
    PLAN.steps(net, x)
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values(), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert not net[0].weight.requires_grad
    assert net[3][0].weight.requires_grad
    assert net.training


# -- attention, shared weights, and layers inside of others ----------------------------------------


def test_attention_has_steps_for_each_of_its_weights():
    torch.manual_seed(0)
    net, x = (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double(),
        torch.randn(2, 5, 8, dtype=torch.float64),
    )
    plan = Q.layers(weights=Q.lsq(4), products=Q.affine(8))
    steps = plan.steps(net, x)
    assert [n for n, _ in steps.named_parameters()] == [
        "self_attn[0].weights_step", "self_attn[1].weights_step", "linear1.weights_step",
        "linear2.weights_step",
    ]  # fmt: skip
    with quantized(steps, net, plan) as used:
        y = net(x)
        y.square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in steps.parameters())
    assert [row[0] for row in plan.report(used).rows].count("self_attn") == 2
    net.eval()
    with torch.no_grad(), quantized(steps, net, plan):  # (torch's own fast path)
        torch.testing.assert_close(net(x), y.detach())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.middle(self.embed(x)))


def test_shared_weights_share_their_steps_or_are_refused():
    torch.manual_seed(0)
    net, x = Tied(), torch.randint(0, 7, (2, 3))
    plan = Q.layers(weights=Q.lsq(4))
    steps = plan.steps(net, x)
    assert [n for n, _ in steps.named_parameters()] == ["embed.weights_step", "middle.weights_step"]
    with quantized(steps, net, plan):
        net(x).square().sum().backward()
    a = steps["embed"]["weights_step"].grad.clone()
    steps.zero_grad()
    with quantized(steps, net, plan):
        net.head(net.middle(net.embed(x)).detach()).square().sum().backward()
    assert 0 < abs(steps["embed"]["weights_step"].grad) != abs(a)
    for other in (
        Q.layers(weights=Q.lsq(4), but="head"),
        Q.layers(weights=Q.lsq(4), but="head") | Q.layers(weights=Q.lsq(8), where="head"),
    ):
        with pytest.raises(ArgumentError, match="'embed' and 'head' share weights, which would be"):
            other.steps(net, x)


def test_a_layer_inside_of_a_quantized_one_may_stay_as_it_is():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.inner = nn.Parameter(torch.eye(4)), nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(F.linear(x, self.weight))

    torch.manual_seed(0)
    net, x = nn.Sequential(Outer()), torch.randn(2, 4)
    plan = Q.layers(weights=Q.sign("identity"), where="0", but="0.inner")
    steps = plan.steps(net, x)
    with quantized(steps, net, plan) as used:
        y = net(x)
    ones = torch.where(torch.eye(4) >= 0, 1.0, -1.0)
    torch.testing.assert_close(y, net[0].inner(x @ ones))
    assert [(r[0], r[2]) for r in plan.report(used).rows] == [
        ("0", "weights"),
        ("0.inner", "float"),
    ]


# -- ranges, export, reports -----------------------------------------------------------------------


def test_observed_ranges_change_and_what_learns_does_not():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 3)), torch.tensor([[1.0, -2.0, 0.5, 0.0]])
    for kind, low in (("minmax", -6.0), ("ema", 0.75 * -2 + 0.25 * -6)):
        plan = Q.layers(weights=Q.lsq(4), inputs=Q.affine(8, range=kind, decay=0.75))
        steps = plan.steps(net, x)
        step = steps["0"]["weights_step"].clone()
        assert {n for n, _ in steps.named_buffers()} == {"0.inputs_low", "0.inputs_high"}
        assert steps["0"]["inputs_low"] == -2
        assert plan.observe(steps, net, 3 * x) is steps
        assert steps["0"]["inputs_low"] == low
        assert torch.equal(steps["0"]["weights_step"], step)
        with quantized(steps, net, plan):
            net(10 * x)
        assert steps["0"]["inputs_low"] == low  # (only `observe` writes)


WEIGHTS = [
    Q.lsq(4, per="channel"), Q.affine(8, per=2, symmetric=False),
    Q.affine(4, signed=False, symmetric=False),
    Q.lsq_plus(3), Q.absmean(), Q.ternary(per="channel"), Q.dorefa(3), Q.nf4(per=4), Q.fp8(),
    Q.mx(per=4), Q.nvfp4(per=4), Q.sign(scale=True), Q.adaround(4), Q.power_of_two(4),
]  # fmt: skip


@pytest.mark.parametrize("weights", WEIGHTS, ids=repr)
def test_exported_codes_reproduce_the_outputs(weights, tmp_path):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(5, 4)
    both, inputs = Q.layers(weights=weights, inputs=Q.absmax(8)), Q.layers(inputs=Q.absmax(8))
    steps = both.steps(net, x)
    with torch.no_grad(), quantized(steps, net, both):
        y = net(x)
    exported = both.export(net, steps, file=tmp_path / "net.safetensors")
    read = load_file(tmp_path / "net.safetensors")
    assert read.keys() == exported.keys()
    restored = copy.deepcopy(net)
    for path, values in Q.dequantize(read).items():
        restored.get_submodule(path).weight.data = torch.from_numpy(values)
    with torch.no_grad(), quantized(inputs.steps(net, x), restored, inputs):
        assert torch.equal(restored(x), y)
    if "float" not in str(read["0.weights"].dtype):
        assert read["0.weights"].dtype.itemsize <= 1 or weights.bits > 8


def test_steps_are_a_module():
    net, x = tokens()
    steps = PLAN.steps(net, x)
    other = PLAN.steps(copy.deepcopy(net), x)
    with torch.no_grad():
        for p in steps.parameters():
            p.mul_(1.5)
    other.load_state_dict(steps.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(steps.parameters(), other.parameters(), strict=True)
    )
    assert steps.double()["1"]["weights_step"].dtype == torch.float64
    with pytest.raises(ArgumentError, match="are the arrays of a plan, not a model"):
        steps(x)


def test_a_report_says_what_became_of_each_layer():
    net, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double(), torch.ones(1, 2).double()
    nn.init.constant_(net[0].weight, 1.0)
    plan = Q.layers(weights=Q.affine(4, largest="level"), inputs=Q.pact(2), but=["1"])
    steps = plan.steps(net, x)
    with quantized(steps, net, plan) as used:
        net(x)
        net(x)
    table = plan.report(used)
    assert table.headings[0] == "layer"
    assert table.rows[0] == (
        "0", "linear", "weights", "affine(bits=4, largest='level')", "4", "1 to 1",
        "0.0 %", "inf", "2",
    )  # fmt: skip
    assert table.rows[-1][:3] == ("1", "linear", "float")


# -- refusals --------------------------------------------------------------------------------------


def small(plan, x=None):
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    return plan.steps(net, torch.ones(1, 2) if x is None else x)


W = Q.affine(8)
REFUSED = {
    "nothing": (lambda: Q.layers(), "no quantizer was passed"),
    "no quantizer": (lambda: Q.layers(weights=8), "expected weights to be a quantizer, got"),
    "noise": (lambda: Q.layers(inputs=Q.stochastic(8)), "takes new noise at each call"),
    "a name": (lambda: small(Q.layers(W, where="3")), "'3' names no layer that ran"),
    "a name in but": (lambda: small(Q.layers(W, but=["0", "1.5"])), "'1.5' names no layer"),
    "a class": (lambda: small(Q.layers(W, where=nn.Conv2d)), "Conv2d names no layer"),
    "twice": (lambda: small(Q.layers(W) | Q.layers(Q.lsq(4), where="1.*")),
              "two entries of the plan quantize the weights of '1.0'"),
    "groups": (lambda: small(Q.layers(Q.affine(4, per=3))),
               r"the weights of '0': affine.* groups of 3 do not fit an axis of 2"),
    "no steps": (lambda: Q.layers(W).rules(nn.Tanh()), r"rules\(steps\) expected the steps of the"),
    "export": (lambda: Q.layers(W).export(None, nn.Tanh()), "expected the steps of the plan"),
    "observe": (lambda: Q.layers(W).observe(nn.Tanh(), None), "expected the steps of the plan"),
    "report": (lambda: Q.layers(W).report(nn.Tanh()), "no rules of a plan"),
    "no model": (lambda: Q.layers(W).steps(3), "expected the model to be a torch.nn.Module"),
    "no layers": (lambda: Q.layers(W).steps(nn.Tanh(), torch.ones(1)), "no layer ran with the s"),
    "no plan": (lambda: Q.layers(W).report(override({"Relu": lambda dy: dy})), "no rules of a p"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_plans_are_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ArgumentError, match=words):
        call()


def test_weights_that_the_sample_did_not_show_are_refused():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = nn.ParameterList([torch.ones(n, 2) for n in (3, 4, 5)])

        def forward(self, x, which):
            return sum(F.linear(x, self.held[n]).sum() for n in which)

    net, x, plan = Either(), torch.ones(1, 2), Q.layers(weights=Q.affine(4))
    steps = plan.steps(net, x, (0, 1))
    with (
        quantized(steps, net, plan),
        pytest.raises(RuleError, match="a shape that did not occur"),
    ):
        net(x, (2,))


def test_a_plan_of_a_class_and_of_patterns():
    net, x = (
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))),
        torch.ones(1, 2),
    )
    for where, names in ((nn.Linear, 3), ("1.*", 2), ("1", 2), (("0", "1.1"), 2), (["0"], 1)):
        steps = Q.layers(weights=Q.lsq(4), where=where).steps(net, x)
        assert len([*steps.parameters()]) == names
    assert np.isclose(steps["0"]["weights_step"].item(),
                      2 * net[0].weight.abs().mean().item() / 7**0.5)  # fmt: skip


def test_a_scope_without_a_model_says_so():
    net, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    rules = PLAN.rules(PLAN.steps(net, x))
    with pytest.raises(ArgumentError, match="model"):
        rg.torch.gradient_override_map(rules, values=True)
