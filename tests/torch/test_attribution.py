"""`rules.attribution`: against stopped gradients that are written out by hand, and integrals."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regrad as rg
from regrad.errors import ArgumentError
from regrad.rules import attribution, lrp
from regrad.rules.attribution import attribute, gim, integrated, smoothed, tempered
from tests.helpers.relevance_networks import fill, numbers
from tests.torch.common import D, fired, function

HEADS = 2


def close(got, expected, tolerance=1e-10):
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def split(x):
    """Return the heads of a width."""
    return x.unflatten(-1, (HEADS, -1))


def scores_of(q, k):
    """Return masked scores of attention, in which no token sees a later one."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1) * self.weight


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Attention(nn.Module):
    def __init__(self, width, fused):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fused = fused

    def forward(self, x):
        q, k, v = (split(f(x)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.fused:
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            z = torch.softmax(scores_of(q, k), -1) @ v
        return self.o(z.transpose(1, 2).flatten(-2)), None


class Block(nn.Module):
    def __init__(self, width, fused):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), nn.LayerNorm(width)
        self.attention, self.act = Attention(width, fused), QuickGELU()
        sizes = ((width, 6), (width, 6), (6, width))
        self.gate, self.up, self.down = (nn.Linear(*size) for size in sizes)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))[0]
        n = self.norm2(x)
        return x + self.down(self.act(self.gate(n)) * self.up(n))


class Language(nn.Module):
    def __init__(self, fused=False, width=4):
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.blocks = nn.ModuleList([Block(width, fused) for _ in range(2)])
        self.head = nn.Linear(width, 7)

    def of_embeddings(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, ids):
        return self.of_embeddings(self.embedding(ids))


IDS, OTHER = torch.tensor([[1, 2, 6], [0, 3, 4]]), torch.tensor([[1, 5, 6], [2, 3, 3]])


def target(y):
    return y[:, -1, 3]


def softer(dy, x):
    p = torch.softmax(x / 2, -1)
    return p * (dy - (p * dy).sum(-1, keepdim=True))


Scaled = function(lambda x, by: x.clone(), lambda dy, x, by: dy * by)
Softer = function(lambda x: torch.softmax(x, -1), softer)


def by_hand(model, ids, method):
    """The output, and embeddings, outputs of blocks and heads, with gradients that are stopped."""
    stop = (lambda v: v) if method == "plain" else (lambda v: v.detach())
    half = 1.0 if method == "plain" else 0.5
    x = model.embedding(ids).detach().requires_grad_()
    found = {"inputs": x}
    for i, block in enumerate(model.blocks):
        n = x * stop(torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)) * block.norm1.weight
        a = block.attention
        q, k, v = (split(f(n)).transpose(1, 2) for f in (a.q, a.k, a.v))
        if method == "gim":
            q, k, v = Scaled.apply(q, 0.25), Scaled.apply(k, 0.25), Scaled.apply(v, 0.5)
        scores = scores_of(q, k)
        p = Softer.apply(scores) if method == "gim" else torch.softmax(scores, -1)
        z = ((p.detach() if method == "relp" else p) @ v).transpose(1, 2).flatten(-2)
        found[f"heads{i}"] = z
        x = x + a.o(z)
        mean = x.mean(-1, keepdim=True)
        std = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        n = (x - mean) / stop(std) * block.norm2.weight + block.norm2.bias
        gate, up = block.gate(n), block.up(n)
        curve = torch.sigmoid(1.702 * gate)
        act = gate * (curve.detach() if method == "relp" else curve)
        x = x + block.down(Scaled.apply(act, half) * Scaled.apply(up, half))
        found[f"blocks.{i}"] = x
    y = target(model.head(x))
    gradients = torch.autograd.grad(y.sum(), list(found.values()))
    values = {k: v.detach() for k, v in found.items()}
    return y.detach(), values, dict(zip(found, gradients, strict=True))


METHODS = {"plain": dict, "gim": gim, "relp": lrp.cp_lrp}


@pytest.mark.versions
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("contrast", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_methods_are_what_their_papers_say(method, contrast, fused):
    model = fill(Language(fused))
    y, values, gradients = by_hand(model, IDS, method)
    z, others = 0.0, dict.fromkeys(values, 0.0)
    if contrast:
        z, others, _ = by_hand(model, OTHER, method)
    due = {k: (values[k] - others[k]) * gradients[k] for k in values}
    found = attribute(
        model, IDS, target, METHODS[method](), "blocks.*", heads={"blocks.*.attention.o": HEADS},
        reference=OTHER if contrast else None,
    )  # fmt: skip
    close(found.total, y - z)
    close(found.inputs, due["inputs"].sum(-1))
    close(found.missing, y - z - due["inputs"].sum((1, 2)))
    close(found.gradients, gradients["inputs"])
    assert list(found.layers) == ["blocks.0", "blocks.1"]
    for i in range(2):
        close(found.layers[f"blocks.{i}"], due[f"blocks.{i}"])
        close(found.heads[f"blocks.{i}.attention.o"], split(due[f"heads{i}"]).sum(-1))


def test_an_effect_is_what_patching_does_where_the_model_is_linear():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.a(x) + self.b(x))

    model, x, other = fill(Linear()), numbers(2, 3, seed=1), numbers(2, 3, seed=2)
    found = attribute(model, x, 1, {}, ["a"], reference=other)
    patched = model.head(model.a(other) + model.b(x))
    close(found.layers["a"].sum(-1), (model(x) - patched)[:, 1].detach())


# -- paths -----------------------------------------------------------------------------------------


class Cubic(nn.Module):
    """x₀³ + x₀ x₁², whose integrated gradients are integrals of polynomials."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        x = self.inner(x * 1)
        return (x[:, :1] ** 3 + x[:, :1] * x[:, 1:] ** 2)[:, [0, 0]]


def test_integrated_gradients_are_integrals():
    x = torch.tensor([[2.0, -3.0], [0.5, 1.0]], dtype=D)
    found = attribute(Cubic(), x, 0, {}, ["inner"], along=integrated(2))
    a, b = x.T
    due = torch.stack([a**3 + a * b**2 / 3, 2 * a * b**2 / 3], 1)
    close(found.inputs, due)
    close(found.layers["inner"], due)
    assert found.missing.abs().max() < 1e-12
    base = torch.tensor([[1.0, 1.0], [0.0, 2.0]], dtype=D)
    from_there = attribute(Cubic(), x, 0, {}, reference=base, along=integrated(3))
    close(from_there.total, (Cubic()(x) - Cubic()(base))[:, 0])
    assert from_there.missing.abs().max() < 1e-12
    t = (torch.arange(4000, dtype=D) + 0.5)[:, None, None] / 4000
    at = base + t * (x - base)
    slopes = torch.stack([3 * at[..., 0] ** 2 + at[..., 1] ** 2, 2 * at.prod(-1)], -1)
    close(from_there.inputs, (x - base) * slopes.mean(0), 1e-6)


@pytest.mark.slow
def test_tokens_are_integrated_by_their_embeddings():
    model = fill(Language())
    found = attribute(model, IDS, target, {}, reference=OTHER, along=integrated(48))
    assert found.missing.abs().max() < 1e-6 * found.total.abs().max()
    close(found.total, target(model(IDS) - model(OTHER)).detach())
    start = attribute(model, IDS, target, gim(), reference=OTHER, along=integrated(2))
    places = integrated(2).places
    x, z = model.embedding(IDS).detach(), model.embedding(OTHER).detach()

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model.of_embeddings(x)

    each = [attribute(Given(), z + t * (x - z), target, gim()).gradients for t in places]
    close(start.inputs, ((x - z) * (each[0] + each[1]) / 2).sum(-1))


@pytest.mark.slow
def test_smoothed_gradients_are_means_over_noise():
    x = torch.tensor([[2.0, -3.0]], dtype=D)
    state = torch.get_rng_state()
    few = attribute(Cubic(), x, 0, {}, along=smoothed(2, 0.1))
    again = attribute(Cubic(), x, 0, {}, along=smoothed(2, 0.1))
    other = attribute(Cubic(), x, 0, {}, along=smoothed(2, 0.1, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(few.inputs, again.inputs) and not torch.equal(few.inputs, other.inputs)
    many = attribute(Cubic(), x, 0, {}, along=smoothed(4000, 0.1))
    # of independent noise of standard deviation 0.1 · 5, E[3a² + b²] = 3a² + b² + 4 · 0.25
    close(many.gradients, torch.tensor([[22.0, -12.0]], dtype=D), 0.03)
    assert abs(many.gradients[0, 0] - 22.0) < 0.4  # (without noise it would be 21)
    close(many.inputs, x * many.gradients)
    plain = attribute(Cubic(), x, 0, {}, along=smoothed(3, 0.0))
    close(plain.gradients[0], x.new_tensor([21, -12]))


# -- rules -----------------------------------------------------------------------------------------


def test_tempered_is_the_gradient_of_a_softer_softmax():
    x, dy = numbers(3, 4, seed=1), numbers(3, 4, seed=2)
    given, ours = (x / 3).requires_grad_(), x.clone().requires_grad_()
    (due,) = torch.autograd.grad(torch.softmax(given, 0), given, dy)
    y = fired({"Softmax": tempered(3.0)}, F.softmax, ours, 0)
    close(torch.autograd.grad(y, ours, dy)[0], due)
    seed = rg.asarray(dy.numpy())
    with rg.gradient_override_map({"Softmax": tempered(3.0)}):
        dx = rg.grad(lambda x: (rg.nn.softmax(x, 0) * seed).sum())(rg.asarray(x.numpy()))
    close(torch.tensor(dx.numpy()), due)


GELUS = {
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0)))),
}


@pytest.mark.parametrize("write", GELUS)
def test_activations_that_are_written_out_pass_relevance_on(write):
    class NewGELUActivation(nn.Module):
        def forward(self, x):
            return GELUS[write](x)

    model, x = nn.Sequential(NewGELUActivation(), nn.Flatten()), numbers(2, 4, seed=1)
    for rules in (lrp.attn_lrp(), lrp.epsilon_plus()):
        found = lrp.relevance(model, x, 2, rules)
        close(found.inputs[:, 2], model(x)[:, 2])
    plain, ours = (attribute(model, x, 2, rules).inputs for rules in ({}, gim()))
    close(ours, plain)


# -- refused ---------------------------------------------------------------------------------------

BAD = [
    (lambda m: attribute(m.forward, IDS, target, {}), "attribute expected a torch.nn.Module"),
    (lambda m: attribute(m, IDS, target, {}, "blocks.9"), "no module of the model is 'blocks.9'"),
    (lambda m: attribute(m, IDS, target, {}, heads=2), "heads expected a dict .*, got int"),
    (lambda m: attribute(m, IDS, target, {}, heads={"blocks.*.attention.o": 3}),
     "expected a number that divides its width of 4, got 3"),
    (lambda m: attribute(m, IDS, target, {}, reference=OTHER[:, :2]), "the shapes of the inputs"),
    (lambda m: attribute(m, IDS, target, {}, ["blocks.0.attention.o", "embedding.x"]), "no module"),
    (lambda m: tempered(0.0), "expected a temperature above 0, got 0.0"),
    (lambda m: integrated(0), "expected steps to be an int above 0, got 0"),
    (lambda m: smoothed(1, -0.1), "expected noise to be 0 or more, got -0.1"),
    (lambda m: attribute(m, IDS, target, {}, along=3), "along expected a Path"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "words"), BAD)
def test_what_does_not_fit_is_refused(ask, words):
    with pytest.raises(ArgumentError, match=words):
        ask(fill(Language()))


def test_a_model_is_left_as_it_was():
    model = fill(Language())
    layers = ["", "embedding", "blocks.*"]
    attribute(model, IDS, target, gim(), layers, reference=OTHER, along=integrated(2))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert attribution.gim().keys() <= lrp.attn_lrp().keys() | {"Softmax"}
