"""`rules.lrp` on two ops at once: a linear map and its batch norm, a linear map and its ReLU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import regrad as rg
from regrad.errors import ArgumentError
from regrad.rules import lrp
from tests.helpers.relevance_networks import fill, numbers
from tests.torch.placed import Made
from tests.torch.test_relevance import close, linear


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
    (made().train(), "statistics of the batch; put the model in eval"),
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
