"""Relevance and attribution of models of any form: results, targets, batches, sparse products."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regrad.errors import ArgumentError, RuleError
from regrad.rules import lrp
from regrad.rules.attribution import attribute, cam, integrated
from tests.helpers.relevance_networks import VGG, fill, numbers
from tests.torch.placed import Made
from tests.torch.test_attribution import close

X, Z, W = numbers(2, 3, seed=1), numbers(2, 3, seed=2), numbers(3, 3, seed=3)


@dataclass
class ModelOutput(OrderedDict):  # (as in transformers)
    loss: Any = None
    logits: Any = None
    hidden: Any = None

    def __post_init__(self):
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value


@dataclass
class Plain:
    logits: Any


class Named(NamedTuple):
    hidden: Any
    logits: Any


FORMS = {
    "ModelOutput": (lambda y, h: ModelOutput(logits=y, hidden=(h,)), lambda out: out.logits[:, 1],
                    "with logits, hidden.*such as lambda y: y.logits"),
    "key": (lambda y, h: {"scores": y, "h": h}, lambda out: out["scores"][:, 1],
            r"with scores, h.*such as lambda y: y\['scores'\]"),
    "dataclass": (lambda y, h: Plain(y), lambda out: out.logits[:, 1], "such as lambda y: y.logi"),
    "named tuple": (Named, lambda out: out.hidden[:, 1], "with hidden, logits"),
    "list": (lambda y, h: [h, y], lambda out: out[1][:, 1], r"such as lambda y: y\[0\]"),
    "tuple": (lambda y, h: (y, (h,)), lambda out: out[0][:, 1], "of 2.*such as lambda"),
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, form=None):
        super().__init__()
        self.a, self.b, self.form = nn.Linear(3, 4), nn.Linear(4, 2), form

    def forward(self, x):
        h = F.relu(self.a(x))
        y = self.b(h)
        return y if self.form is None else FORMS[self.form][0](y, h)


@pytest.mark.parametrize("form", FORMS)
def test_results_of_any_form(form):
    _, target, words = FORMS[form]
    for run in (
        lambda net, t: lrp.relevance(net, X, t, lrp.epsilon_plus(), ["a"]),
        lambda net, t: lrp.relevance(net, X, t, lrp.deep_lift(), reference=Z),
        lambda net, t: attribute(net, X, t, {}, reference=Z, along=integrated(3)),
    ):
        found, due = run(fill(Net(form)), target), run(fill(Net()), 1)
        close(found.inputs, due.inputs)
        close(found.total, due.total)
    with pytest.raises(ArgumentError, match=words):
        lrp.relevance(fill(Net(form)), X, 1, lrp.epsilon_plus())


@pytest.mark.parametrize("targets", [[0, 1], [1, torch.tensor([1, 0]), lambda y: y[:, 0] * 2]])
def test_a_list_of_targets_is_stacked(targets):
    for run in (
        lambda t: lrp.relevance(fill(Net()), X, t, lrp.epsilon_plus(), ["a"]),
        lambda t: attribute(fill(Net()), X, t, {}, ["a"], reference=[Z, X * 0]),
    ):
        found, each = run(targets), [run(t) for t in targets]
        for name in ("inputs", "total", "missing"):
            close(getattr(found, name), torch.stack([getattr(e, name) for e in each]))
        close(found.layers["a"], torch.stack([e.layers["a"] for e in each]))
    assert found.inputs.shape == (len(targets), 2, 3)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][-1])


@pytest.mark.parametrize("steps", [2, 5])
def test_a_batch_on_another_axis(steps):
    net, x = fill(Recurrent()), numbers(steps, 2, 3, seed=1)
    for run in (
        lambda **by: lrp.relevance(net, x, 1, lrp.epsilon_plus(), **by),
        lambda **by: attribute(net, x, 1, {}, along=integrated(30), **by),
    ):
        found = run(batch_axis=1)
        close(found.total - found.missing, found.inputs.sum((0, 2)))
        assert found.total.shape == (2,)
    assert abs(found.missing).max() < 1e-10


class SequenceFirst(nn.Module):
    """A layer whose batch is the second axis, of sequences whose batch is the first or second."""

    def __init__(self, layer, turns=False):
        super().__init__()
        self.layer, self.head, self.turns = layer, nn.Linear(4, 2), turns

    def forward(self, x):
        y = self.layer(x.transpose(0, 1) if self.turns else x)
        return self.head((y[0] if isinstance(y, tuple) else y)[-1])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_reference_on_another_axis(kind, count):
    """(The steps of a recurrent layer have the batch on their first axis.)"""
    x, base = numbers(5, 3, 4, seed=1), numbers(5, count, 4, seed=2)
    net = fill(SequenceFirst(kind(4, 4)))
    given = 1, lrp.deep_lift(), ["layer", "head"]
    found = lrp.relevance(net, x, *given, reference=base, batch_axis=1)
    turned = SequenceFirst(net.layer, True)
    turned.head = net.head
    due = lrp.relevance(turned, x.transpose(0, 1), *given, reference=base.transpose(0, 1))
    close(found.inputs, due.inputs.transpose(0, 1))
    close(found.layers["head"], due.layers["head"])
    assert abs(found.missing).max() < 1e-9 * abs(found.total).max()
    close(found.layers["layer"].sum((0, 2)), found.total)


@pytest.mark.parametrize("steps", [4, 6, 7])
@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.GELU(), nn.MaxPool1d(1), nn.PReLU()])
def test_a_rule_of_pairs_needs_the_batch_on_the_first_axis(layer, steps):
    net, x = fill(SequenceFirst(layer, True)), numbers(3, steps, 4, seed=1)
    with pytest.raises(ArgumentError, match="so the batch is not its first axis, where"):
        lrp.relevance(net, x, 1, lrp.deep_lift(), reference=x.flip(0))


def test_linear_maps_may_have_the_batch_on_another_axis():
    net = fill(Made(lambda m, x: m.head((x.transpose(0, 1) @ W)[-1]), head=nn.Linear(3, 2)))
    x = numbers(3, 4, 3, seed=1)
    found = lrp.relevance(net, x, lambda y: (2 * y)[:, 1], lrp.deep_lift(), reference=x.flip(0))
    assert abs(found.missing).max() < 1e-12 < abs(found.total).max()


@pytest.mark.parametrize("batch", [1, 2])
def test_a_rule_of_pairs_needs_the_model(batch):
    net, x = fill(nn.Linear(3, 2)), numbers(batch, 3, seed=1)
    with pytest.raises(ArgumentError, match=r"softmax .* runs after the model, in the target"):
        lrp.relevance(
            net, x, lambda y: y.softmax(-1)[:, 1], lrp.deep_lift(), reference=numbers(1, 3)
        )


class Noisy(nn.Module):
    def __init__(self, noise):
        super().__init__()
        self.inner, self.noise = nn.Linear(3, 2), noise

    def forward(self, x):
        return self.inner(self.noise(x))


RANDOM = {
    "torch.rand": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.5)[0],
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_results_are_refused(name):
    model, state = Noisy(RANDOM[name]).double().eval(), torch.get_rng_state()
    for run in (
        lambda: attribute(model, X, 1, {}, along=integrated(2)),
        lambda: lrp.relevance(model, X, 1, lrp.epsilon_plus()),
    ):
        with pytest.raises(ArgumentError, match=r"draws random numbers.*model\.eval\(\)"):
            run()
    assert torch.equal(state, torch.get_rng_state())
    attribute(Noisy(lambda x: x + 0 * torch.rand_like(x)).double(), X, 1, {})


@pytest.mark.parametrize("module", [nn.BatchNorm1d(3), nn.Dropout()])
def test_training_mode_is_refused(module):
    model = Noisy(module).double().train()
    for run in (lambda: attribute(model, X, 1, {}), lambda: cam(model, X, 1, "inner")):
        with pytest.raises(ArgumentError, match=r"runs in training mode \(.*model\.eval\(\)"):
            run()


# -- graphs ----------------------------------------------------------------------------------------

A = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 1.0], [0.3, 0.0, 1.0]], dtype=torch.float64)
TO, FROM = A.nonzero().T
MESSAGES = {
    "COO": lambda a, h: a.to_sparse() @ h,
    "CSR": lambda a, h: a.to_sparse_csr() @ h,
    "sparse.mm": lambda a, h: torch.sparse.mm(a.to_sparse(), h),
    "addmm": lambda a, h: torch.sparse.addmm(torch.zeros(3, h.shape[1]).to(h), a.to_sparse(), h),
    "index_add": lambda a, h: torch.zeros_like(h).index_add(0, TO, A[TO, FROM, None] * h[FROM]),
    "scatter_add": lambda a, h: torch.zeros_like(h).scatter_add_(
        0, TO[:, None].expand(-1, h.shape[1]), A[TO, FROM, None] * h[FROM]),
}  # fmt: skip


class Graph(nn.Module):
    def __init__(self, send):
        super().__init__()
        self.send, self.w, self.v = send, nn.Linear(4, 5), nn.Linear(5, 2)
        self.register_buffer("a", A)

    def forward(self, x):
        return self.v(self.send(self.a, F.relu(self.send(self.a, self.w(x)))))


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("name", MESSAGES)
def test_messages_in_graphs(name):
    x = numbers(3, 4, seed=1)
    for run in (
        lambda net: attribute(net, x, 1, {}),
        lambda net: lrp.relevance(net, x, 1, lrp.epsilon_plus()),
        lambda net: lrp.relevance(net, x, 1, lrp.attn_lrp()),
    ):
        found, due = run(fill(Graph(MESSAGES[name]))), run(fill(Graph(torch.matmul)))
        close(found.inputs, due.inputs)
        close(found.missing, due.missing)


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_buffers(layout):
    net = fill(Graph(torch.matmul))
    due = lrp.relevance(net, numbers(3, 4, seed=1), 1, lrp.epsilon_plus())
    net.a = getattr(A, layout)()
    if layout != "to_sparse_csc":
        close(lrp.relevance(net, numbers(3, 4, seed=1), 1, lrp.epsilon_plus()).inputs, due.inputs)
    else:
        attribute(net, numbers(3, 4, seed=1), 1, {})
    close(net.a.to_dense(), A)


def test_rules_that_change_entries_name_the_sparse_matrix():
    for rule in (lrp.z_plus(), lrp.gamma(), lrp.alpha_beta()):
        with pytest.raises(RuleError, match=r"one is a sparse matrix \(torch.sparse_coo\)"):
            lrp.relevance(fill(Graph(MESSAGES["COO"])), numbers(3, 4), 1, {"MatMul": rule})


# -- a history of its own --------------------------------------------------------------------------


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.q, self.k, self.v = nn.LayerNorm(4), *(nn.Linear(4, 4) for _ in range(3))
        self.gate, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        n = self.n(x)
        x = x + F.scaled_dot_product_attention(self.q(n), self.k(n), self.v(n))
        return self.head((x + F.silu(self.gate(x)) * x).mean(1))


ZERO = torch.zeros(1, 2, 8, 8, dtype=torch.float64)
HISTORY = {
    "epsilon_plus": (VGG, (2, 2, 8, 8), lambda f: f(lrp.epsilon_plus())),
    "deep_lift": (VGG, (2, 2, 8, 8), lambda f: f(lrp.deep_lift(), reference=ZERO)),
    "attn_lrp": (Transformer, (2, 3, 4), lambda f: f(lrp.attn_lrp())),
    "cp_lrp": (Transformer, (2, 3, 4), lambda f: f(lrp.cp_lrp())),
    "excitation": (Transformer, (2, 3, 4), lambda f: f(lrp.excitation())),
}  # fmt: skip


def slopes_agree(loss, tensors):
    """Compare gradients with differences along one direction of each tensor."""
    dxs = torch.autograd.grad(loss(True), tensors, allow_unused=True)
    assert sum(dx is not None and bool(dx.any()) for dx in dxs) > len(dxs) / 2
    for i, (x, dx) in enumerate(zip(tensors, dxs, strict=True)):
        step = 1e-6 * numbers(*x.shape, seed=3 + i)
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                x += sign * step
            ends.append(loss(False).detach())
            with torch.no_grad():
                x -= sign * step
        due = (ends[0] - ends[1]) / 2
        got = torch.zeros(()) if dx is None else (dx * step).sum()
        assert abs(got - due) <= 1e-5 * abs(due) + 1e-12


@pytest.mark.parametrize("name", HISTORY)
def test_relevance_is_differentiated_by_inputs_and_parameters(name):
    make, shape, run = HISTORY[name]
    model, x = fill(make()), (numbers(*shape, seed=1) + 0.1).requires_grad_()
    seed = numbers(*shape, seed=2)

    def loss(create_graph):
        found = run(lambda rules, **options: lrp.relevance(
            model, x, 1, rules, create_graph=create_graph, **options))  # fmt: skip
        assert found.inputs.requires_grad == found.missing.requires_grad == create_graph
        return (found.inputs * seed).sum() + found.total.sum()

    slopes_agree(loss, [x, *model.parameters()])
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"at": "a"}, {"through": ("a", 1)}, {"layers": ["a"]}])
def test_attribution_is_differentiated(options):
    class Smooth(Net):
        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    model = fill(Smooth())

    def loss(create_graph):
        found = attribute(
            model, X, 1, {}, along=integrated(2), create_graph=create_graph, **options
        )
        return (found.layers.get("a", found.inputs) ** 2).sum()

    slopes_agree(loss, [*model.parameters()])


def test_a_model_is_trained_on_its_relevance():
    """The relevance of an input that should not count is a part of the loss."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(64, 3)
    y = (x[:, 0] + x[:, 1] > 0).long()
    adam = torch.optim.Adam(model.parameters(), 1e-2)

    def share():
        found = lrp.relevance(model, x, y, lrp.epsilon_plus(), create_graph=True).inputs
        return found[:, 1].abs().mean() / found.abs().sum(1).mean()

    before = share().item()
    for _ in range(60):
        loss = F.cross_entropy(model(x), y) + 5 * share()
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert share().item() < before / 3
