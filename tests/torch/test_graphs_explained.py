"""Relevance of the nodes and edges of graphs, with sparse matrices that depend on the inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regrad.torch
from regrad.errors import ArgumentError, GradientError, PassedOverError, RuleError
from regrad.rules import lrp
from regrad.rules.attribution import attribute, expected, integrated
from tests.helpers.relevance_networks import fill, numbers
from tests.torch.test_attribution import close

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CS|BS). tensor support is in beta")

A = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, -1.0], [0.3, 0.0, 1.0]], dtype=torch.float64)
TO, FROM = PLACES = A.nonzero().T
EDGES = A[TO, FROM]
ROWS, COLUMNS = torch.tensor([0, 2, 4, 6]), FROM
H = numbers(3, 4, seed=1) + 0.1


def coo(edges):
    return torch.sparse_coo_tensor(PLACES, edges, (3, 3), check_invariants=True)


def hybrid(rows):
    return torch.sparse_coo_tensor(PLACES, rows, (3, 3, rows.shape[1]), check_invariants=True)


def csr(edges):
    return torch.sparse_csr_tensor(ROWS, COLUMNS, edges, (3, 3), check_invariants=True)


def dense(edges):
    return edges.new_zeros(3, 3).index_put((TO, FROM), edges)


def sent(edges, h):
    return edges[:, None] * h[FROM]


def places_like(h):
    return TO[:, None].expand(-1, h.shape[1])


# Products with a matrix, and sums of messages: by the products of edges and nodes.
PRODUCTS = {
    "COO": lambda e, h: coo(e) @ h,
    "coalesced": lambda e, h: coo(e).coalesce() @ h,
    "CSR": lambda e, h: csr(e) @ h,
    "torch.mm": lambda e, h: torch.mm(coo(e), h),
    "sparse.mm": lambda e, h: torch.sparse.mm(coo(e), h),
    "sparse.mm of CSR": lambda e, h: torch.sparse.mm(csr(e), h),
    "addmm": lambda e, h: torch.sparse.addmm(torch.zeros_like(h), coo(e), h),
    "bmm": lambda e, h: torch.bmm(torch.stack([coo(e)]), h[None])[0],
    "mv": lambda e, h: torch.stack([torch.mv(coo(e), column) for column in h.unbind(1)], 1),
    "sparse @ sparse": lambda e, h: (coo(e) @ h.to_sparse()).to_dense(),
}
MESSAGES = {
    "index_add": lambda e, h: torch.zeros_like(h).index_add(0, TO, sent(e, h)),
    "index_put": lambda e, h: torch.zeros_like(h).index_put((TO,), sent(e, h), accumulate=True),
    "scatter_add": lambda e, h: torch.zeros_like(h).scatter_add(0, places_like(h), sent(e, h)),
    "scatter_reduce": lambda e, h: torch.zeros_like(h).scatter_reduce(
        0, places_like(h), sent(e, h), "sum"),
    "sparse.sum": lambda e, h: torch.sparse.sum(hybrid(sent(e, h)), 1).to_dense(),
    "hybrid": lambda e, h: hybrid(sent(e, h)).to_dense().sum(1),
}  # fmt: skip


class Graph(nn.Module):
    """A graph network whose edges are an input: a matrix, or the values of its entries."""

    def __init__(self, send=torch.matmul):
        super().__init__()
        self.send = send
        self.w, self.v = nn.Linear(4, 5, bias=False), nn.Linear(5, 2, bias=False)

    def forward(self, h, edges):
        h = F.relu(self.send(edges, self.w(h)))
        return self.v(self.send(edges, h)).sum(0, keepdim=True)


METHODS = {
    "gradients": lambda net, *given: attribute(net, given, 1, {}),
    "integrated": lambda net, *given: attribute(net, given, 1, {}, along=integrated(4)),
    "epsilon_plus": lambda net, *given: lrp.relevance(net, given, 1, lrp.epsilon_plus()),
    "attn_lrp": lambda net, *given: lrp.relevance(net, given, 1, lrp.attn_lrp()),
    "ops": lambda net, *given: lrp.relevance(net, given, 1, lrp.attn_lrp(), check="ops"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*PRODUCTS, *MESSAGES])
def test_edges_have_the_relevance_that_they_have_in_a_dense_matrix(name, method):
    send = {**PRODUCTS, **MESSAGES}[name]
    if name == "sparse @ sparse" and method == "epsilon_plus":
        send = PRODUCTS["COO"]  # (the rule of F.linear needs dense factors)
    run = METHODS[method]
    found = run(fill(Graph(send)), H, EDGES)
    due = run(fill(Graph(lambda e, h: dense(e) @ h)), H, EDGES)
    for got, same in zip(found.inputs, due.inputs, strict=True):
        close(got, same)
    close(found.total, due.total)
    assert abs(found.missing - due.missing).max() < 1e-10


SPARSE = {
    "COO": A.to_sparse,
    "not coalesced": lambda: torch.sparse_coo_tensor(
        torch.cat([PLACES, PLACES], 1), torch.cat([EDGES / 4, 3 * EDGES / 4]), (3, 3),
        check_invariants=True),
    "CSR": A.to_sparse_csr,
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_input_has_relevance_at_its_entries(name, method):
    run, a = METHODS[method], SPARSE[name]()
    found, due = run(fill(Graph()), H, a), run(fill(Graph()), H, A)
    nodes, edges = found.inputs
    assert edges.layout is a.layout and edges.values().shape == EDGES.shape
    close(nodes, due.inputs[0])
    close(edges.to_dense(), due.inputs[1])
    assert abs(found.missing - due.missing).max() < 1e-10
    if method in ("gradients", "integrated"):
        close(found.gradients[1].values(), due.gradients[1][TO, FROM])


# -- numbers by hand -------------------------------------------------------------------------------


def shared_by_hand(left, right, shares):
    """Return the relevance of two factors: of each product of entries, one half."""
    products = left[:, :, None] * right[None]  # (rows, sum, columns)
    total = products.sum(1, keepdim=True)
    parts = products * torch.where(total == 0, 0, shares[:, None] / total) / 2
    return parts.sum(2), parts.sum(0)


def by_hand(net, h, a):
    """Return the relevance of nodes and edges, layer by layer, by loops over dense matrices."""
    w, v = net.w.weight.detach().T, net.v.weight.detach().T[:, 1:]
    g = h @ w
    mixed = a @ g
    hidden = mixed.clip(0)
    again = a @ hidden
    shares = again * v.T  # the linear head
    second, of_hidden = shared_by_hand(a, hidden, shares)
    first, of_g = shared_by_hand(a, g, of_hidden)
    of_nodes = torch.zeros_like(h)
    for n in range(len(h)):
        for k in range(g.shape[1]):
            if g[n, k] != 0:
                of_nodes[n] += h[n] * w[:, k] / g[n, k] * of_g[n, k]
    return of_nodes, first + second


@pytest.mark.parametrize("name", ["COO", "CSR", "sparse.mm", "index_add", "sparse.sum"])
def test_relevance_of_nodes_and_edges_by_hand(name):
    net = fill(Graph({**PRODUCTS, **MESSAGES}[name]))
    found = lrp.relevance(net, (H, EDGES), 1, lrp.attn_lrp())
    nodes, edges = by_hand(net, H, A)
    close(found.inputs[0], nodes)
    close(found.inputs[1], edges[TO, FROM])
    close(nodes.sum() + edges.sum(), found.total)
    assert abs(found.missing) < 1e-12


@pytest.mark.parametrize("name", ["COO", "CSR", "index_add", "scatter_reduce"])
def test_gradients_and_integrated_gradients_by_differences(name):
    net = fill(Graph({**PRODUCTS, **MESSAGES}[name]))
    found = attribute(net, (H, EDGES), 1, {})
    for i, x in enumerate((H, EDGES)):
        for n in range(x.numel()):
            step = torch.zeros_like(x).flatten()
            step[n] = 1e-6
            ends = []
            for moved in (x + step.reshape(x.shape), x - step.reshape(x.shape)):
                given = [moved if i == j else each for j, each in enumerate((H, EDGES))]
                ends.append(net(*given)[0, 1].item())
            due = (ends[0] - ends[1]) / 2e-6
            assert abs(found.gradients[i].flatten()[n] - due) < 1e-7
    # the output is of degree 3 along a ray from zeros, so that 2 points are exact
    along = attribute(net, (H, EDGES), 1, {}, along=integrated(2))
    assert abs(along.total - net(H, EDGES)[0, 1]) < 1e-12 and abs(along.missing) < 1e-12
    close(along.inputs[1].sum(), 2 * along.inputs[0].sum())


# -- rules outside of relevance --------------------------------------------------------------------


def slope(f, rules, **options):
    edges = EDGES.clone().requires_grad_()
    with regrad.torch.gradient_override_map(rules, **options) as used:
        y = f(edges)
        y.backward()
    used.assert_fired()
    return edges.grad


RULES = {
    "the same": lambda dy, builtin: builtin(dy),
    "doubled": lambda dy, builtin: builtin(2 * dy),
    "written": lambda dy, a, b: (3 * dy @ b.mT, a.mT @ dy),
}


@pytest.mark.parametrize("order", [None, 1])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["COO", "coalesced", "CSR", "sparse.mm", "sparse @ sparse"])
def test_rules_of_products_with_a_sparse_matrix(name, rule, order):
    got, due = (
        slope(lambda e, f=f: f(e, H).square().sum(), {"MatMul": RULES[rule]}, order=order)
        for f in (PRODUCTS[name], lambda e, h: dense(e) @ h)
    )
    close(got, due)


KEYS = {
    "coalesce": (torch.Tensor.coalesce, lambda e: coo(e).coalesce().coalesce().to_dense(), 4),
    "to_dense": (torch.Tensor.to_dense, lambda e: coo(e).to_dense(), 2),
    "Mul": ("Mul", lambda e: (coo(e) * 1.0).to_dense(), 2),
    "Neg": ("Neg", lambda e: torch.neg(coo(e)).to_dense(), -2),
}


@pytest.mark.parametrize("name", KEYS)
def test_rules_of_sparse_tensors(name):
    key, f, factor = KEYS[name]
    found = slope(lambda e: f(e).sum(), {key: lambda dy, builtin: builtin(2 * dy)})
    close(found, factor * torch.ones_like(EDGES))


def test_a_rule_of_a_function_that_returns_its_sparse_input():
    found = slope(
        lambda e: KEYS["coalesce"][1](e).sum(), {torch.Tensor.coalesce: lambda dy: 2 * dy}
    )
    close(found, 4 * torch.ones_like(EDGES))


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["COO", "CSR", "sparse.mm", "sparse.sum"])
def test_no_history_through_a_sparse_matrix(name):
    """PyTorch's second derivative of a sparse matrix has no history, and raises nothing."""
    net = fill(Graph({**PRODUCTS, **MESSAGES}[name]))
    for run in (
        lambda: attribute(net, (H, EDGES), 1, {}, create_graph=True),
        lambda: lrp.relevance(net, (H, EDGES), 1, lrp.attn_lrp(), create_graph=True),
    ):
        with pytest.raises(GradientError, match=r"takes a sparse matrix.*create_graph=True, use"):
            run()


def test_a_reference_is_for_dense_inputs():
    net, given = fill(Graph()), (H, A.to_sparse())
    for run in (
        lambda: attribute(net, given, 1, {}, reference=(0 * H, given[1])),
        lambda: attribute(net, given, 1, {}, along=expected((0 * H, given[1]))),
        lambda: lrp.relevance(net, given, 1, lrp.deep_lift(), reference=(0 * H, given[1])),
    ):
        with pytest.raises(ArgumentError, match=r"dense inputs, got a sparse.*Pass its values"):
            run()


def test_results_that_a_rule_divides_by_are_dense():
    with pytest.raises(RuleError, match=r"divides by the result, which is a sparse matrix \(torch"):
        lrp.relevance(
            fill(Graph(PRODUCTS["sparse @ sparse"])), (H, EDGES), 1, {"MatMul": lrp.epsilon()}
        )


class Made(nn.Module):
    def forward(self, edges):
        return coo(edges)


class WithMade(Graph):
    def __init__(self):
        super().__init__()
        self.made = Made()

    def forward(self, h, edges):
        return super().forward(h, self.made(edges))


def test_a_layer_has_a_dense_output():
    with pytest.raises(ArgumentError, match=r"'made' returned .*expected a dense tensor"):
        attribute(fill(WithMade()), (H, EDGES), 1, {}, ["made"])


def test_kernels_that_would_skip_a_rule():
    for f, key in (
        (lambda e: torch.sparse.mm(csr(e), H, "sum"), "MatMul"),
        (lambda e: torch.sparse.sum(coo(e), 1).to_dense(), "Sum"),
        (lambda e: torch.sparse.softmax(coo(e), 1).to_dense(), "Softmax"),
    ):
        with pytest.raises(PassedOverError, match=f"computes '{key}' inside"):
            slope(lambda e, f=f: f(e).sum(), {key: lambda dy, builtin: builtin(dy)})


def test_kinds_of_nodes_by_an_embedding():
    """A sparse matrix, of floats or of integers, next to the ids that an embedding reads."""

    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.kind, self.v = nn.Embedding(3, 4), nn.Linear(4, 2, bias=False)

        def forward(self, kinds, a):
            return self.v(a.double() @ self.kind(kinds)).sum(0, keepdim=True)

    kinds = torch.tensor([2, 0, 1])
    for a in (A.to_sparse(), A.abs().ceil().int().to_sparse()):
        found, due = (attribute(fill(Kinds()), (kinds, each), 1, {}) for each in (a, a.to_dense()))
        close(found.inputs[0], due.inputs[0])
        assert abs(found.missing - due.missing).max() < 1e-10
