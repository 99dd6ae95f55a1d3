"""`rules.lrp`: against zennit's numbers, closed formulas, and what relevance has to sum to."""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import ArgumentError, RegradError, RuleError, UnusedOverrideWarning
from regrad.rules import lrp
from tests.helpers import relevance_networks as networks
from tests.helpers.relevance_networks import COMPOSITES, RULES, VGG, fill, numbers
from tests.torch.common import grad, override, under
from tests.torch.placed import Made

ZENNIT = json.loads(networks.GOLDEN.read_text())


def close(got, expected, tolerance=1e-11):
    got, expected = np.asarray(got), np.asarray(expected)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


# -- zennit's numbers ------------------------------------------------------------------------------


@pytest.mark.versions
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layer", networks.LAYERS)
def test_rules_of_linear_maps(layer, rule):
    make, shape = networks.LAYERS[layer]
    made = rg.rules.optional(getattr(lrp, rule)(*RULES[rule][1]))
    found = lrp.relevance(fill(make()), numbers(*shape), 0, dict.fromkeys(networks.LINEAR, made))
    close(found.inputs.flatten(), ZENNIT[f"{layer}.{rule}"])


# (zennit's excitation has no rule for norms, and multiplies relevance by their scale)
BOTH = [
    (n, c) for n in networks.NETWORKS for c in COMPOSITES if (n, c) != ("vgg_norm", "excitation")
]


@pytest.mark.parametrize(("network", "composite"), BOTH)
def test_composites(network, composite):
    make, shape = networks.NETWORKS[network]
    rules = getattr(lrp, composite)(*COMPOSITES[composite][1])
    found = lrp.relevance(fill(make()), numbers(*shape), 0, rules)
    close(found.inputs.flatten(), ZENNIT[f"{network}.{composite}"], 1e-9)


# -- closed formulas -------------------------------------------------------------------------------


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def test_a_residual_sum_with_functional_relus():
    # (functional ReLUs and sums, where hooks on modules see nothing)
    net = Made(lambda m, x: m.b(F.relu(F.relu(m.a(x)) + x)), a=linear(4, 4), b=linear(4, 3))
    model, x, eps = fill(net), numbers(2, 4, seed=1), 1e-3
    rules = {F.linear: lrp.epsilon(eps)}
    found = lrp.relevance(model, x, 1, rules, ["a"])
    a, b, x = model.a.weight.detach().numpy(), model.b.weight.detach().numpy(), x.numpy()

    def stable(z):
        return z + eps * np.where(z >= 0, 1, -1)

    z = x @ a.T
    h = np.maximum(z, 0) + x
    active = np.maximum(h, 0)
    y = active @ b.T
    s = y[:, 1:2] / stable(y[:, 1:2]) * b[1]  # relevance of `active` by its value
    dh = s * (h > 0)
    dz = dh * (z > 0)
    due = x * ((z * dz / stable(z)) @ a) + x * dh
    close(found.inputs, due)
    close(found.layers["a"], z * dz)
    close(found.total, y[:, 1])
    close(found.missing, y[:, 1] - due.sum(1), 1e-9)


def attention(fused=False):
    def forward(m, x):
        q, k, v = (part(m.norm(x)) for part in (m.q, m.k, m.v))
        if fused:
            return x + F.scaled_dot_product_attention(q, k, v, scale=0.5)
        return x + torch.softmax(q @ k.mT / 2.0, -1) @ v

    norm = nn.LayerNorm(4, bias=False)
    return fill(Made(forward, q=linear(4, 4), k=linear(4, 4), v=linear(4, 4), norm=norm))


def by_hand(model, x, constant):
    """The rules of AttnLRP, or of CP-LRP, as lxt writes them: gradients that are stopped."""
    x = x.clone().requires_grad_()
    mean, std = x.mean(-1, keepdim=True), (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    n = (x - mean) / std.detach() * model.norm.weight
    q, k, v = model.q(n), model.k(n), model.v(n)
    if constant:
        p = torch.softmax(q @ k.mT / 2.0, -1).detach()
    else:
        halves = [t / 4 + (3 * t / 4).detach() for t in (q, k)]
        p, v = torch.softmax(halves[0] @ halves[1].mT / 2.0, -1), v / 2 + (v / 2).detach()
    y = (x + p @ v)[:, 0, 1]
    return x.detach() * grad(y, x), y.detach()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["attn_lrp", "cp_lrp"])
def test_attention(name, fused):
    model, x = attention(fused), numbers(2, 3, 4, seed=2)
    due, y = by_hand(model, x, name == "cp_lrp")
    found = lrp.relevance(model, x, lambda y: y[:, 0, 1], getattr(lrp, name)())
    close(found.inputs, due)
    close(found.total, y)
    if name == "cp_lrp":
        assert abs(found.missing).max() < 1e-12


def test_deep_lift_is_the_slope_to_the_reference():
    model = VGG()
    model.features = nn.Sequential(*[m for m in model.features if not isinstance(m, nn.MaxPool2d)])
    model.head = nn.Sequential(nn.Linear(384, 6), nn.Tanh(), nn.Linear(6, 3))
    fill(model)
    x, base = numbers(2, 2, 8, 8, seed=3), numbers(1, 2, 8, 8, seed=4)
    found = lrp.relevance(model, x, 2, lrp.deep_lift(), reference=base)
    close(found.total, (model(x) - model(base))[:, 2].detach())
    assert abs(found.missing).max() < 1e-12
    one = fill(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    x, base = numbers(1, 3, seed=5), numbers(1, 3, seed=6)
    z, z0 = one[0](x), one[0](base)
    slope = (z.relu() - z0.relu()) / (z - z0)
    due = (x - base) * ((one[2].weight[0] * slope) @ one[0].weight)
    close(lrp.relevance(one, x, 0, lrp.deep_lift(), reference=base).inputs, due.detach())


POOLS = [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AdaptiveMaxPool2d(3)]


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_deep_lift_shares_the_difference_of_max_pools(pool):
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), pool, nn.Conv2d(4, 3, 2)
    model = fill(nn.Sequential(*layers, nn.ReLU(), nn.Flatten()))
    x, base = numbers(2, 2, 8, 8, seed=3), numbers(1, 2, 8, 8, seed=4)
    found = lrp.relevance(model, x, lambda y: y.sum(1), lrp.deep_lift(), reference=base)
    close(found.total, (model(x) - model(base)).sum(1).detach())
    assert abs(found.total).min() > 1e-3 and abs(found.missing).max() < 1e-12


def test_a_max_pool_gives_to_the_greatest_of_the_input_or_of_the_reference():
    x = torch.tensor([[[[3.0, 1.0, 2.0, 0.0, 4.0, 1.0]]]])
    base = torch.tensor([[[[0.0, 2.0, 2.0, 5.0, 1.0, 4.0]]]])  # (the last two are equal)
    target = lambda y: 10 * y[..., 0] + y[..., 1:].sum(-1)  # noqa: E731
    found = lrp.relevance(nn.MaxPool2d((1, 2)), x, target, lrp.deep_lift(), reference=base)
    close(found.inputs.flatten(), [10.0, 0.0, 0.0, -3.0, 0.0, 0.0])


def test_beta_smooth_is_the_gradient_of_a_softplus():
    x = numbers(7, seed=1).requires_grad_()
    y = under({"Relu": lrp.beta_smooth(3.0)}, lambda: torch.relu(x))
    close(grad(y, x), torch.sigmoid(3 * x).detach())


# -- every way to run, and derivatives of relevance ------------------------------------------------


WAYS = {
    "eager": lambda f: f,
    "compiled": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
    "checkpoint": lambda f: lambda x: checkpoint(f, x, use_reentrant=False),
    "vmap": lambda f: lambda x: torch.func.vmap(f)(x),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", ["epsilon", "gamma", "z_plus"])
def test_ways(rule, way):
    layer, x = fill(nn.Linear(3, 4)).requires_grad_(False), numbers(2, 3, seed=1)
    due = lrp.relevance(layer, x, lambda y: y, {F.linear: getattr(lrp, rule)()}).inputs
    x = x.clone().requires_grad_()
    with override({F.linear: getattr(lrp, rule)()}):
        y = WAYS[way](layer)(x)
        dx = grad(y, x)
    close(dx * x.detach(), due)


def test_relevance_is_differentiated_by_what_arrives():
    layer, x = fill(nn.Linear(3, 4)).requires_grad_(False), numbers(2, 3, seed=1) + 0.1
    seed = numbers(2, 4, seed=2)

    def gradient(x, seed):
        x = x if x.requires_grad else x.clone().requires_grad_()
        y = under({F.linear: lrp.z_plus()}, lambda: layer(x))
        return torch.autograd.grad(y, x, seed, create_graph=True)[0]

    weights, seed = numbers(2, 3, seed=3), seed.requires_grad_()
    found = grad(gradient(x, seed) * weights, seed)
    ones = torch.eye(8, dtype=x.dtype).reshape(8, 2, 4)
    close(found.flatten(), [(gradient(x, e) * weights).sum().item() for e in ones])


# -- what relevance sums to ------------------------------------------------------------------------


def block():
    def forward(m, x):
        y = m.n(m.b(F.relu(m.m(m.a(x)), inplace=True)))
        y += x
        return F.relu(y)

    a, b = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
    return Made(forward, a=a, b=b, m=nn.BatchNorm2d(4), n=nn.BatchNorm2d(4))


def resnet():
    def forward(m, x):
        x = F.max_pool2d(F.relu(m.norm(m.stem(x))), 2)
        return m.head(m.blocks(x).mean((2, 3)))

    stem, blocks = nn.Conv2d(2, 4, 3, bias=False), nn.Sequential(block(), block())
    return Made(forward, stem=stem, norm=nn.BatchNorm2d(4), blocks=blocks, head=linear(4, 3))


def vit(width=8):
    def forward(m, x):
        x = m.patches(x).flatten(2).mT
        n = m.norms[0](x)
        x = x + m.attention(n, n, n, need_weights=False)[0]
        x = x + m.down(F.gelu(m.up(m.norms[1](x))))
        return m.head(x.mean(1))

    return Made(
        forward, patches=nn.Conv2d(2, width, 4, 4, bias=False),
        norms=nn.ModuleList([nn.LayerNorm(width, bias=False) for _ in range(2)]),
        attention=nn.MultiheadAttention(width, 2, bias=False, batch_first=True),
        up=linear(width, 16), down=linear(16, width), head=linear(width, 3),
    )  # fmt: skip


KEPT = [
    (VGG, False, lambda: lrp.excitation(1e-8)),
    (VGG, False, lambda: lrp.epsilon_plus(1e-8, 1e-8)),
    (resnet, True, lrp.epsilon_plus),
    (resnet, True, lrp.attn_lrp),
    (vit, False, lrp.cp_lrp),
]


@pytest.mark.versions
@pytest.mark.parametrize("check", [None, "ops"])
@pytest.mark.parametrize("case", range(len(KEPT)))
def test_relevance_is_kept(case, check):
    make, bias, rules = KEPT[case]
    model, x = fill(make(), bias), numbers(2, 2, 8, 8, seed=1)
    found = lrp.relevance(model, x, 0, rules(), check=check)
    assert abs(found.total).min() > 1e-3
    assert abs(found.missing).max() <= 1e-5 * abs(found.total).max()
    close(found.total, model(x)[:, 0].detach())


PASSING = [
    nn.RMSNorm(5), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.BatchNorm1d(4),
    nn.LayerNorm(5, bias=False), nn.ReLU6(), nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.Mish(),
    nn.Hardtanh(), nn.CELU(), nn.PReLU(), nn.Softplus(), nn.Tanhshrink(), nn.Threshold(0.1, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("module", PASSING, ids=lambda m: type(m).__name__)
def test_norms_and_activations_pass_relevance_on(module):
    model, x = nn.Sequential(copy.deepcopy(module), nn.Flatten()).double(), numbers(2, 4, 5, seed=1)
    model.eval()
    found = lrp.relevance(model, x, lambda y: y[:, 3] + y[:, 4], lrp.epsilon_plus())
    assert abs(found.total).max() > 0.1 and abs(found.missing).max() < 1e-12
    y = model(x)[:, 3:5]
    by_element = type(module).__name__ not in ("LayerNorm",)
    assert not by_element or torch.allclose(found.inputs.flatten(1)[:, 3:5], y.detach())


@pytest.mark.parametrize("make", [VGG, resnet, vit])
def test_precisions_that_are_lower(make):
    model, x = fill(make(), bias=False), numbers(2, 2, 8, 8, seed=1)
    rules = lrp.cp_lrp() if make is vit else lrp.epsilon_plus()
    due = lrp.relevance(model, x, 0, rules).inputs
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.2)):
        found = lrp.relevance(model.to(dtype), x.to(dtype), 0, rules)
        assert found.inputs.dtype == dtype
        close(found.inputs.double(), due, tolerance)


def test_a_product_with_a_parameter_is_not_shared():
    w, b = (nn.Parameter(numbers(*s, seed=1)) for s in ((4, 3), (3,)))
    model, x = Made(lambda m, x: torch.addmm(m.b, x, m.w) * 2.0, w=w, b=b), numbers(2, 4, seed=2)
    for rules in (lrp.attn_lrp(), lrp.epsilon_plus()):
        close(lrp.relevance(model, x, 1, rules).inputs, (2 * x * w[:, 1]).detach())


def test_relevance_is_lost_where_nothing_adds_and_the_table_says_where():
    model, x = fill(resnet()), numbers(2, 2, 8, 8, seed=1)
    model.head.weight.data = -model.head.weight.data.abs()
    found = lrp.relevance(model, x, 0, lrp.excitation(), check="ops")
    close(found.missing, found.total)
    assert found.losses[0].path == "head" and found.losses[0].left == 0.0


def test_the_losses_add_up_and_name_the_ops():
    model, x = attention(), numbers(2, 3, 4, seed=2)
    found = lrp.relevance(model, x, lambda y: y[:, 0, 1], lrp.attn_lrp(), check="ops")
    assert found.losses[0].op == "Softmax" and found.losses[0].path == ""
    assert found.losses[0].line.partition(":")[0].endswith("test_relevance.py")
    assert abs(found.losses[1].lost) < 1e-12
    assert abs(found.losses[0].lost - found.missing.sum()) < 1e-12
    assert found.table().rows[0][1] == "Softmax"
    biased = fill(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = numbers(2, 3, seed=1)
    found = lrp.relevance(biased, x, 0, lrp.epsilon_plus(), check="ops")
    lost = {loss.path: loss.lost for loss in found.losses if loss.op.endswith("linear")}
    z = biased[0](x)
    bias = [z.gt(0).double() * biased[2].weight[0] @ biased[0].bias, biased[2].bias[[0, 0]]]
    assert abs(lost["0"] - bias[0].sum()) < 1e-5 and abs(lost["2"] - bias[1].sum()) < 1e-5


# -- inputs, targets, and the model as it was ------------------------------------------------------


def language():
    def forward(m, ids, scale=None):
        x = m.embedding(ids.view(-1, ids.shape[-1]))
        return {"logits": m.head(x if scale is None else x * scale).cumsum(1)}

    return fill(Made(forward, embedding=nn.Embedding(5, 4), head=linear(4, 5)))


def test_tokens_tuples_and_names():
    model, ids = language(), torch.tensor([[1, 2, 1], [0, 3, 4]])
    scale = numbers(2, 3, 1, seed=1)

    def found(inputs):
        return lrp.relevance(model, inputs, lambda y: y["logits"][:, -1, 2], lrp.attn_lrp())

    due = model.embedding(ids) @ model.head.weight[2]
    close(found(ids).inputs, due.detach())
    both = found((ids, scale))
    close(both.inputs[0], (due * scale[..., 0] / 2).detach())
    close(both.inputs[1], (due[..., None] * scale / 2).detach())
    assert abs(both.missing).max() < 1e-12
    close(found({"ids": ids, "scale": scale}).inputs["scale"], both.inputs[1])
    assert found({"ids": ids, "scale": None}).inputs["scale"] is None


def test_infinities_of_a_mask_have_no_relevance():
    model = Made(lambda m, x, mask: F.scaled_dot_product_attention(x, x, x, mask)[..., 0])
    x, mask = numbers(2, 3, 4, seed=1), torch.full((2, 3, 3), -torch.inf).triu(1).double()
    found = lrp.relevance(model, (x, mask), 1, lrp.cp_lrp())
    p = torch.softmax(x @ x.mT / 2 + mask, -1)
    close(found.inputs[0][..., 0], (p[:, 1] * x[..., 0]))
    assert abs(found.inputs[1]).max() < 1e-15 and abs(found.missing).max() < 1e-12


def test_targets():
    model, x = fill(nn.Linear(3, 4, bias=False)), numbers(2, 3, seed=1)
    rules = {F.linear: lrp.epsilon()}
    each = lrp.relevance(model, x, torch.tensor([3, -3]), rules)
    close(each.total, [model(x)[0, 3].item(), model(x)[1, 1].item()])
    close(lrp.relevance(model, x, -1, rules).total, model(x)[:, 3].detach())
    whole = lrp.relevance(model, x, lambda y: (y[:, 0] - y[:, 1]).sum(), rules)
    assert whole.total.shape == whole.missing.shape == ()


@pytest.mark.parametrize("check", [None, "ops"])
def test_layers_and_embeddings_in_a_checkpoint(check):
    parts = {"e": nn.Embedding(5, 3), "a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}

    def found(run):
        inner = lambda ids, m: torch.relu(m.a(m.e(ids))) * m.e(ids).mean()  # noqa: E731
        model = fill(Made(lambda m, ids: m.b(run(inner, ids, m)).sum(1), **parts))
        given = torch.tensor([[1, 2], [3, 4]]), 0, lrp.epsilon_plus(), ["a"]
        return lrp.relevance(model, *given, check=check)

    expected = found(lambda f, *xs: f(*xs))
    again = found(lambda f, *xs: checkpoint(f, *xs, use_reentrant=False))
    assert abs(expected.inputs).min() > 1e-4
    close(again.inputs, expected.inputs)
    close(again.layers["a"], expected.layers["a"])


def test_relevance_in_inference_mode():
    model, x = fill(nn.Linear(3, 2)), numbers(2, 3, seed=1)
    with torch.inference_mode():
        found = lrp.relevance(model, x, 0, lrp.epsilon_plus())
    close(found.inputs, lrp.relevance(model, x, 0, lrp.epsilon_plus()).inputs)
    assert all(p.requires_grad for p in model.parameters())


class Counting(VGG):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += torch.rand(()) + 1
        return super().forward(x)


def test_a_model_is_left_as_it_was():
    model = fill(Counting(True)).train()
    for module in model.modules():
        module.training = not isinstance(module, nn.BatchNorm2d | nn.Dropout)
    model.head[0].bias.requires_grad_(False)
    model.head[3].weight.grad = torch.ones_like(model.head[3].weight)
    state, needs = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    random, x = torch.get_rng_state(), numbers(2, 2, 8, 8).requires_grad_()
    with torch.no_grad():
        lrp.relevance(model, x, 0, lrp.epsilon_plus(), ["features.0"], check="ops")
    assert model.training and x.grad is None and not model._forward_hooks
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == needs
    assert (model.head[3].weight.grad == 1).all() and model.head[0].weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ArgumentError):
        lrp.relevance(model, x, 7, lrp.epsilon_plus())
    assert [p.requires_grad for p in model.parameters()] == needs


def test_a_composite_is_a_map_to_be_changed():
    model, x = fill(VGG(), bias=False), numbers(1, 2, 8, 8)
    rules = {**lrp.epsilon_plus(), rg.at("head.3", F.linear): lrp.gamma()}
    found = lrp.relevance(model, x, 0, rules)
    ran = {(hit.path, hit.rule) for hit in found.used.hits}
    assert {("features.0", "z_plus"), ("head.0", "epsilon"), ("head.3", "gamma")} <= ran
    firsts = lrp.relevance(model, x, 0, lrp.epsilon_plus_flat()).used.hits
    assert [(h.path, h.ran) for h in firsts if h.rule == "flat"] == [("features.0", 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lrp.relevance(fill(nn.Linear(2, 2)), numbers(1, 2), 0, lrp.epsilon_gamma_box(-1, 1))
    assert pickle.loads(pickle.dumps(lrp.gamma(0.5))).__name__ == "gamma"


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "words"), [
    (lambda: lrp.epsilon(0.0), "epsilon: expected a number above 0, got 0.0"),
    (lambda: lrp.z_plus(-1.0), "z_plus: expected a stabilizer above 0, got -1.0"),
    (lambda: lrp.gamma(-0.1), "gamma: expected a number of 0 or more, got -0.1"),
    (lambda: lrp.alpha_beta(2.0, 0.5), "alpha - beta = 1"),
    (lambda: lrp.z_box(1.0, 0.0), "z_box: expected low <= high, got 1.0 and 0.0"),
    (lambda: lrp.beta_smooth(0.0), "beta_smooth: expected a beta above 0"),
])  # fmt: skip
def test_numbers_that_no_rule_has_are_refused(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def total():
    return Made(lambda m, ids: ids.double().requires_grad_())


def twice():
    return Made(lambda m, x: m.head(m.head(x)), head=nn.Linear(2, 2).double(), idle=nn.ReLU())


IDS, IMAGE = torch.tensor([[1]]), numbers(1, 2, 8, 8)
WRONG = {
    "expected a torch.nn.Module, got function": {"model": lambda x: x},
    "there are 3 classes, got the target 3": {"target": 3},
    "expected target to be an int, a tensor of ints or a function, got str": {"target": "cat"},
    "expected target to be an int": {"target": True},
    r"tensor of \(examples, classes\), got Tensor": {"model": nn.Conv2d(2, 2, 3).double()},
    "the target is .*, expected a tensor that depends": {"target": lambda y: 1.0},
    "no module of the model is 'features.9'. Did you mean": {"layers": ["features.9"]},
    "the module 'head' ran more than once": {
        "model": twice(), "inputs": numbers(1, 2), "layers": ["head"]},
    "the module 'idle' did not run": {
        "model": twice(), "inputs": numbers(1, 2), "layers": ["idle"]},
    'expected check to be None or "ops"': {"check": "modules"},
    r"to rules, such as epsilon_plus\(\); got epsilon_plus": {"rules": lrp.epsilon_plus},
    "no input is a tensor of floats": {"model": total(), "inputs": IDS},
    "is for runs without a reference": {"check": "ops", "reference": IMAGE},
    "float16 is too coarse": {"inputs": IMAGE.half()},
    "a reference is for float inputs": {
        "model": language(), "inputs": IDS, "reference": IDS, "rules": lrp.deep_lift()},
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_arguments_that_do_not_fit_are_refused(words):
    usual = {"inputs": IMAGE, "target": 0, "rules": lrp.epsilon_plus()}
    given = {"model": fill(VGG()), **usual, **WRONG[words]}
    with pytest.raises(ArgumentError, match=words):
        lrp.relevance(**given)


def test_rules_for_other_ops_are_refused():
    with (
        pytest.raises(RuleError, match="expected the output of a layer norm or an RMS norm"),
        override({"Relu": lrp.frozen_norm}),
    ):
        torch.relu(numbers(2, 3).requires_grad_() - 0.5).sum().backward()
    with pytest.warns(UnusedOverrideWarning, match="'Tanh' never ran|matched nothing"):
        lrp.relevance(fill(nn.Linear(2, 2)), numbers(1, 2), 0, {"Tanh": lrp.pass_})
    with pytest.raises(RegradError), override({F.linear: lrp.epsilon(1, 2)}):
        pass
