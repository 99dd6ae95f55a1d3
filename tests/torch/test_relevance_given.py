"""`rules.lrp` on sums of products, norms and two ops at once; references, training, precision.

Two ops are a linear map and its batch norm, or a linear map and its ReLU.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import regrad as rg
from regrad.errors import ArgumentError, RuleError
from regrad.rules import lrp
from regrad.torch.host import settings_unlocked
from tests.helpers.relevance_networks import fill, first_of, numbers, results_of
from tests.torch.common import fired
from tests.torch.placed import Made
from tests.torch.test_relevance import close, linear

ADDMM = {
    "addmm": (torch.addmm, lambda b, x, w: torch.addmm(b, x, w)),
    "by keywords": (torch.addmm, lambda b, x, w: torch.addmm(mat2=w, mat1=x, input=b)),
    "in place": (torch.addmm, lambda b, x, w: (b.expand(3, 2) * 1).addmm_(x, w)),
    "baddbmm": (torch.baddbmm, lambda b, x, w: torch.baddbmm(b.expand(1, 3, 2), x[None], w[None])),
}
RULES_OF_LINEAR = [lrp.epsilon(), lrp.gamma(), lrp.z_plus(), lrp.alpha_beta(), lrp.z_box(-1.0, 1.0),
          lrp.flat(), lrp.w_square()]  # fmt: skip


@pytest.mark.parametrize("rule", RULES_OF_LINEAR, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", ADDMM)
def test_rules_of_linear_maps_on_products_with_a_sum(name, rule):
    """They are those of F.linear, whose rules are compared with formulas elsewhere."""
    (key, f), b, w = ADDMM[name], numbers(2), numbers(4, 2)
    x = numbers(3, 4).requires_grad_()

    def gradient(key, y):
        y = fired({key: rule}, y)
        (dx,) = torch.autograd.grad(y.sum(), x)
        return dx

    due = gradient(F.linear, lambda: F.linear(x, w.mT.clone(), b))
    torch.testing.assert_close(gradient(key, lambda: f(b, x, w)), due)


def own_rms(size):
    """As transformers has it."""

    def forward(m, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return m.weight * (hidden_states * torch.rsqrt(variance + m.variance_epsilon))

    return Made(forward, weight=nn.Parameter(torch.ones(size)), variance_epsilon=1e-6)


NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(5), F.layer_norm),
    "of two axes": (lambda: nn.LayerNorm((2, 5)), F.layer_norm),
    "without bias": (lambda: nn.LayerNorm(5, bias=False), F.layer_norm),
    "without weight": (lambda: nn.LayerNorm(5, elementwise_affine=False), F.layer_norm),
    "RMSNorm": (lambda: nn.RMSNorm(5, eps=1e-6), F.rms_norm),
    "RMSNorm, no eps": (lambda: nn.RMSNorm(5), F.rms_norm),
    "RMSNorm without weight": (lambda: nn.RMSNorm(5, elementwise_affine=False), F.rms_norm),
    "transformers": (lambda: own_rms(5), None),
}


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_norms_with_a_frozen_scale(name, whole, backward):
    make, key = NORMS[name]
    norm = make().double()
    for i, p in enumerate(norm.parameters()):
        p.data = numbers(*p.shape, seed=i)
    x, dy = numbers(3, 2, 5).requires_grad_(), numbers(3, 2, 5, seed=1)
    axes = (-2, -1) if name == "of two axes" else (-1,)
    mean = x.mean(axes, keepdim=True) * isinstance(norm, nn.LayerNorm)
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    square = ((x - mean) ** 2).mean(axes, keepdim=True) + (eps or torch.finfo(x.dtype).eps)
    due = (x - mean) / square.sqrt().detach()
    due = due if getattr(norm, "weight", None) is None else due * norm.weight
    (expected,) = torch.autograd.grad(due, x, dy)
    where = rg.at(norm) if whole or key is None else key
    y = fired({where: lrp.frozen_norm}, norm, x, model=norm)
    if backward:
        y.backward(dy)
    dx = x.grad if backward else torch.autograd.grad(y, x, dy)[0]
    torch.testing.assert_close(dx, expected)


GROUPED = {
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), F.group_norm, 2),
    "without weight": (lambda: nn.GroupNorm(4, 4, affine=False), F.group_norm, 4),
    "InstanceNorm": (lambda: nn.InstanceNorm1d(4, affine=True), F.instance_norm, 4),
    "running": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), F.instance_norm, 0),
}


@pytest.mark.parametrize("name", GROUPED)
def test_group_norms_with_a_frozen_scale(name):
    make, key, groups = GROUPED[name]
    norm = fill(make())
    x, dy = numbers(3, 4, 5).requires_grad_(), numbers(3, 4, 5, seed=1)
    y = fired({key: lrp.frozen_norm}, norm, x, model=norm)
    due = x / (1 + norm.eps) ** 0.5
    if groups:
        rows = x.reshape(3, groups, -1)
        square = rows.var(-1, unbiased=False, keepdim=True) + norm.eps
        due = ((rows - rows.mean(-1, keepdim=True)) / square.sqrt().detach()).reshape(x.shape)
    due = due if norm.weight is None else due * norm.weight[:, None]
    (expected,) = torch.autograd.grad(due, x, dy)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], expected)
    if norm.weight is not None:
        with pytest.raises(RuleError, match=r"for a group norm, use the key F\.group_norm"):
            fired({rg.at(norm): lrp.frozen_norm}, norm, x, model=norm).sum().backward()


# -- a reference, training mode, precision ---------------------------------------------------------


def several(form):
    a = fill(nn.Linear(3, 2))
    return Made(lambda m, x: results_of(form, F.relu(m.a(x)), torch.stack), a=a)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("form", ["tuple", "list", "dict", "scalar", "states"])
def test_a_reference_of_models_that_return_several(form, batch):
    net, x, zero = several(form), numbers(batch, 3, seed=1), torch.zeros(1, 3).double()
    found = lrp.relevance(net, x, first_of, lrp.deep_lift(), reference=zero)
    close(found.total, (first_of(net(x)) - first_of(net(zero))).detach())
    assert abs(found.missing).max() < 1e-12


def time_first():
    return Made(lambda m, x: m.o(m.r(x)[0]), r=fill(nn.RNN(3, 4)), o=fill(nn.Linear(4, 2)))


@pytest.mark.parametrize(("net", "target", "shape"), [
    (several("transposed"), lambda y: y[0], (2, 3)),
    (several("mean"), 0, (2, 3)),
    (several("sum"), lambda y: y, (2, 3)),
    (time_first(), lambda y: y[-1, :, 0], (5, 1, 3)),
    (time_first(), lambda y: y[-1, :, 0], (5, 2, 3)),
    (time_first(), lambda y: y[0, :, 0], (4, 2, 3)),
])  # fmt: skip
def test_a_batch_that_is_not_the_first_axis_is_refused(net, target, shape):
    x = numbers(*shape, seed=1)
    with pytest.raises(ArgumentError, match=r"in one batch.*the batch must be the first axis"):
        lrp.relevance(net, x, target, lrp.deep_lift(), reference=torch.zeros_like(x))


DROPS = [nn.BatchNorm1d(3), nn.Dropout(), nn.AlphaDropout(), nn.RReLU()]


@pytest.mark.parametrize("module", DROPS, ids=lambda m: type(m).__name__)
def test_training_mode_is_refused_where_it_matters(module):
    model, x = nn.Sequential(module, nn.Linear(3, 2)).double(), numbers(2, 3)
    with pytest.raises(ArgumentError, match=r"training mode \(.*model\.eval\(\)"):
        lrp.relevance(model.train(), x, 0, lrp.epsilon_plus())
    lrp.relevance(model.eval(), x, 0, lrp.epsilon_plus())


@pytest.mark.parametrize("module", [nn.Dropout(0.0), nn.InstanceNorm1d(3)])
def test_training_mode_is_fine_elsewhere(module):
    x = numbers(2, 3, 4)
    lrp.relevance(nn.Sequential(module, nn.Linear(4, 2)).double().train(), x,
                  lambda y: y[:, 0, 0], lrp.epsilon_plus())  # fmt: skip


def precisions():
    backends = torch.backends
    parts = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    parts += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    return [part.fp32_precision for part in parts]


def set_whole(precision):
    torch.backends.fp32_precision = precision


@pytest.fixture
def as_before():
    """Leave the settings of this process as they were (PyTorch's own test tools lock them)."""
    with settings_unlocked():
        yield
        set_whole("none")
        torch.set_float32_matmul_precision("highest")
        of = torch.backends
        of.cuda.matmul.fp32_precision = of.mkldnn.matmul.fp32_precision = "none"
        of.cudnn.allow_tf32 = True


def test_settings_that_are_locked(monkeypatch):
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    lrp.relevance(nn.Linear(3, 2), torch.ones(2, 3), 0, lrp.epsilon_plus())


@pytest.mark.parametrize("settings", [
    lambda: None,
    lambda: torch.set_float32_matmul_precision("high"),
    lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    lambda: set_whole("tf32"),
    lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
], ids=["default", "high", "no_tf32", "whole", "part"])  # fmt: skip
@pytest.mark.parametrize("fails", [False, True])
def test_relevance_computes_in_full_precision(settings, fails, as_before):
    seen = []

    class Net(nn.Linear):
        def forward(self, x):
            seen.append(precisions())
            h = super().forward(x)
            h.register_hook(lambda dy: seen.append(precisions()) if h.requires_grad else None)
            return h[:, 5] if fails else h

    settings()
    before = precisions()
    try:
        lrp.relevance(Net(3, 2), torch.ones(2, 3), 0, lrp.epsilon_plus())
    except IndexError:
        assert fails
    assert seen == [["ieee"] * 6] * (1 if fails else 2)
    assert precisions() == before
    set_whole("bf16")  # what follows the whole still does
    after = precisions()
    set_whole("none")
    settings()
    set_whole("bf16")
    assert after == precisions()


def test_tf32_is_off_by_its_older_name_too(as_before):
    seen = []
    net = nn.Linear(3, 2)
    net.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    lrp.relevance(net, torch.ones(2, 3), 0, lrp.epsilon_plus())
    assert seen == [False] and torch.backends.cudnn.allow_tf32


# -- two ops at once -------------------------------------------------------------------------------


def made(norms=True):
    """A model; without norms, its layers are those that torch fuses."""

    def forward(m, x):
        x = torch.relu(m.m(m.a(x)))
        x = torch.relu(m.n(m.b(x))).mean((2, 3))
        return m.d(torch.relu(m.o(m.c(x))))

    m, n, o = nn.BatchNorm2d(4), nn.BatchNorm2d(3), nn.BatchNorm1d(5)
    m, n, o = (norm if norms else nn.Identity() for norm in (m, n, o))
    return Made(
        forward, a=nn.Conv2d(2, 4, 3), m=m, b=nn.ConvTranspose2d(4, 3, 2, 2, bias=False), n=n,
        c=nn.Linear(3, 5), o=o, d=nn.Linear(5, 3),
    )  # fmt: skip


COMPOSITES = {
    "epsilon_plus": (1e-3, 1e-3), "epsilon_plus_flat": (), "epsilon_gamma_box": (-3.0, 3.0),
    "epsilon_alpha2_beta1": (), "excitation": (),
}  # fmt: skip


def fused(model):
    net = made(norms=False).double().eval()
    net.a = fuse_conv_bn_eval(model.a, model.m)
    net.b = fuse_conv_bn_eval(model.b, model.n, transpose=True)
    net.c, net.d = fuse_linear_bn_eval(model.c, model.o), model.d
    return net


@pytest.mark.parametrize("composite", COMPOSITES)
def test_a_merged_norm_is_that_of_a_fused_model(composite):
    model, x = fill(made()), numbers(2, 2, 6, 6, seed=1)
    rules = getattr(lrp, composite)(*COMPOSITES[composite])
    other = fused(model)
    total = lambda y: y.sum(1)  # noqa: E731
    close(other(x).detach(), model(x).detach())
    due = lrp.relevance(other, x, total, rules, ["a"])
    found = lrp.relevance(model, x, total, lrp.merge_norms(model, rules), ["m"])
    close(found.inputs, due.inputs)
    close(found.layers["m"], due.layers["a"])
    plain = lrp.relevance(model, x, total, rules)
    if composite != "epsilon_plus_flat":  # (the test can fail)
        assert (plain.inputs - due.inputs).abs().max() > 1e-3 * due.inputs.abs().max()


@pytest.mark.parametrize(("model", "words"), [
    (made().train(), "statistics of the batch; call model.eval()"),
    (nn.Sequential(nn.ConvTranspose2d(4, 4, 2, groups=2), nn.BatchNorm2d(4)).eval(),
     "a transposed convolution with groups"),
])  # fmt: skip
def test_norms_that_cannot_be_merged_are_refused(model, words):
    with pytest.raises(ArgumentError, match=words):
        lrp.merge_norms(model, lrp.epsilon_plus())


# -- reveal-cancel ---------------------------------------------------------------------------------

PAIR = {F.linear: rg.rules.optional(lrp.reveal_cancel), "Relu": rg.rules.straight_through}


def test_reveal_cancel_by_hand():
    """The example of the paper, a minimum of two numbers: neither input has all of it."""

    model = Made(lambda m, x: x[:, :1] - m.relu(m.h(x)), h=linear(2, 1), relu=nn.ReLU())
    model.h.weight.data = torch.tensor([[1.0, -1.0]]).double()
    x, base = torch.tensor([[3.0, 2.0]]).double(), torch.zeros(1, 2).double()
    found = lrp.relevance(model, x, 0, PAIR, reference=base)
    # Δ⁺ = 3 adds ½ (f(3) + f(3 - 2) - f(-2)) = 2, and Δ⁻ = -2 adds ½ (f(-2) + f(1) - f(3)) = -1
    close(found.inputs, torch.tensor([[3.0 - 2.0, 1.0]]).double(), 1e-12)
    close(found.total, torch.tensor([2.0]).double())
    rescaled = lrp.relevance(model, x, 0, lrp.deep_lift(), reference=base)
    close(rescaled.inputs, torch.tensor([[0.0, 2.0]]).double(), 1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_reveal_cancel_of_each_unit(seed):
    model = fill(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    x, base = numbers(2, 4, seed=seed), numbers(1, 4, seed=9)
    rules = {
        **lrp.deep_lift(), rg.at("0", F.linear): lrp.reveal_cancel,
        rg.at("1", "Relu"): rg.rules.straight_through,
    }  # fmt: skip
    found = lrp.relevance(model, x, 2, rules, reference=base)
    w, start = model[0].weight.detach(), model[0](base).detach()
    due = torch.zeros_like(x)
    for n in range(len(x)):
        for j, top in enumerate(model[2].weight[2].detach()):
            adds = w[j] * (x - base)[n]
            plus, minus = adds.clamp(min=0).sum(), adds.clamp(max=0).sum()
            f = lambda v, j=j: float((start[0, j] + v).clamp(min=0))  # noqa: E731
            up = (f(plus) - f(0) + f(plus + minus) - f(minus)) / 2
            down = (f(minus) - f(0) + f(plus + minus) - f(plus)) / 2
            shares = torch.where(adds > 0, adds * up / plus, adds * down / minus)
            due[n] += top * shares.nan_to_num(0.0)
    close(found.inputs, due)
    assert found.missing.abs().max() < 1e-12
    close(found.total, (model(x) - model(base))[:, 2].detach())
