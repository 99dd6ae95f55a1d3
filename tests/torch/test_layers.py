"""`rules.attribution` at layers: paths, units, random references and class activation maps.

The expected numbers come from loops and formulas that are written by hand.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regrad.errors import ArgumentError
from regrad.rules import attribution, lrp
from regrad.rules.attribution import attribute, cam, conductance, expected, integrated, smoothed
from tests.helpers.relevance_networks import fill, numbers
from tests.torch.common import D
from tests.torch.test_attribution import close


class Net(nn.Module):
    """A layer in the middle, with a second way around it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.skip = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(3, 2)

    def behind(self, h, x):
        return self.b(torch.tanh(h) * h) + self.skip(x) ** 2

    def forward(self, x):
        return self.behind(self.a(x), x)


X, Z = numbers(2, 3, seed=1), numbers(2, 3, seed=2)


def net():
    return fill(Net())


def gradients(model, x):
    """The outputs of the layer, the gradients by them, and by the input through unit 2 only."""
    x = x.clone().requires_grad_()
    h = model.a(x)
    (dh,) = torch.autograd.grad(model.behind(h, x)[:, 1].sum(), h, retain_graph=True)
    (dx,) = torch.autograd.grad(h[:, 2].sum(), x)
    return h.detach(), dh, dh[:, 2:3] * dx


def places(n):
    points, weights = np.polynomial.legendre.leggauss(n)
    return list(zip((points + 1) / 2, weights / 2, strict=True))


def test_gradients_at_layers():
    h, dh, _ = gradients(net(), X)
    found = attribute(net(), X, 1, {}, ["a"])
    close(found.layer_gradients["a"], dh)
    close(found.layer_values["a"], h)
    close(found.layers["a"], h * dh)


def test_internal_influence_is_the_mean_gradient_along_the_path_of_inputs():
    due = sum(w * gradients(net(), Z + t * (X - Z))[1] for t, w in places(5))
    found = attribute(net(), X, 1, {}, ["a"], reference=Z, along=integrated(5))
    close(found.layer_gradients["a"], due)


def test_neuron_conductance_passes_one_unit():
    due = sum(w * (X - Z) * gradients(net(), Z + t * (X - Z))[2] for t, w in places(5))
    given = net(), X, 1, {}
    found = attribute(*given, reference=Z, along=integrated(5), through=("a", 2))
    close(found.inputs, due)
    each = [
        attribute(*given, reference=Z, along=integrated(40), through=("a", i)).inputs
        for i in range(4)
    ]
    whole = attribute(*given, reference=Z, along=integrated(40), through=("a", ...)).inputs
    close(sum(each), whole)
    # of each unit, the sum over inputs is its conductance
    layer = attribute(*given, ["a"], reference=Z, along=conductance(2000)).layers["a"]
    close(torch.stack([x.sum(1) for x in each], 1), layer, 1e-5)


def test_layer_conductance_sums_gradients_times_steps():
    at = [gradients(net(), Z + k / 6 * (X - Z)) for k in range(7)]
    due = sum((a[1] + b[1]) / 2 * (b[0] - a[0]) for a, b in pairwise(at))
    found = attribute(net(), X, 1, {}, ["a"], reference=Z, along=conductance(6))
    close(found.layers["a"], due)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    found = attribute(fill(model), X, 1, {}, ["1"], reference=Z, along=conductance(400))
    close(found.layers["1"].sum(1), found.total, 1e-5)
    close(found.inputs.sum(1), found.total, 1e-5)


@pytest.mark.parametrize("statistic", ["mean", "squares"])
def test_a_path_at_a_layer_leaves_the_inputs(statistic):
    model = net()
    h, z = model.a(X).detach(), model.a(Z).detach()

    def slope(at):
        at = at.clone().requires_grad_()
        return torch.autograd.grad(model.behind(at, X)[:, 1].sum(), at)[0]

    mean = sum(w * slope(z + t * (h - z)) for t, w in places(4))
    along = integrated(4)
    if statistic == "squares":
        mean = sum(w * slope(z + t * (h - z)) ** 2 for t, w in places(4))
        along = along._replace(statistic="squares")
    found = attribute(model, X, 1, {}, reference=Z, along=along, at="a")
    close(found.layer_gradients["a"], mean)
    close(found.layers["a"], (h - z) * mean if statistic == "mean" else (h - z) ** 2 * mean)
    close(found.total, (model(X) - model(Z))[:, 1].detach())
    close(found.missing, found.total - found.layers["a"].sum(1))
    assert found.inputs is None and found.gradients is None


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.a, self.b = nn.Embedding(5, 3), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, ids):
        return self.b(F.relu(self.a(self.embedding(ids)).mul_(2), inplace=True)).sum(1)


def test_token_ids_and_layers_that_are_changed_in_place():
    model, ids, other = fill(Changing()), torch.tensor([[1, 2], [3, 4]]), torch.zeros(2, 2).long()
    for at in ("a", "embedding"):
        found = attribute(model, ids, 1, {}, along=integrated(200), reference=other, at=at)
        assert abs(found.missing).max() < 1e-3 * abs(found.total).max()
    by_tokens = attribute(model, ids, 1, {}, along=integrated(200), reference=other)
    close(by_tokens.inputs, found.layers["embedding"].sum(-1))
    with pytest.raises(ArgumentError, match=r"torch.int64.*attribute\(…, at="):
        attribute(Reads(), ids, 1, {})


class Reads(nn.Module):
    """A model that reads a table of embeddings by itself."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(numbers(5, 2))
        self.inner = nn.Identity()

    def forward(self, ids):
        return self.inner(self.table[ids].sum(1))


def test_a_module_that_makes_floats_of_ids_can_be_explained():
    found = attribute(Reads(), torch.tensor([[1, 2]]), 1, {}, at="inner")
    close(found.layers["inner"], Reads()(torch.tensor([[1, 2]])).detach() * torch.eye(2)[1].to(D))


# -- random references and noise -------------------------------------------------------------------


class Square(nn.Module):
    def forward(self, x):
        return torch.stack([(x**2).sum(1), x.prod(1)], 1)


def test_expected_gradients_are_means_over_references_and_places():
    refs = numbers(7, 3, seed=3)
    found = attribute(Square(), X, 0, {}, along=expected(refs, 3000))
    # of a sum of squares, the share of (z, t) is (x - z) · 2 (z + t (x - z)), whose mean is x² - z²
    close(found.inputs, X**2 - (refs**2).mean(0), 0.1)
    assert abs(found.inputs - X**2).max() > 0.2
    close(found.total, (X**2).sum(1) - (refs**2).sum(1).mean(), 0.1)
    one = attribute(Square(), X, 0, {}, along=expected(Z[:1], 4, seed=1))
    again = attribute(Square(), X, 0, {}, along=expected(Z[:1], 4, seed=1))
    other = attribute(Square(), X, 0, {}, along=expected(Z[:1], 4, seed=2))
    assert torch.equal(one.inputs, again.inputs) and not torch.equal(one.inputs, other.inputs)
    close(one.total, (X**2).sum(1) - (Z[0] ** 2).sum())


def test_each_example_draws_a_place_and_a_reference():
    refs, samples = numbers(5, 3, seed=3), 6
    x, refs, random = X + 2, refs + 2, np.random.default_rng(4)
    due = torch.zeros_like(x)
    for _ in range(samples):
        t = torch.tensor(random.uniform(size=2))[:, None]
        z = refs[random.integers(5, size=2)]
        at = z + t * (x - z)
        due += (x - z) * at.prod(1, keepdim=True) / at / samples
    found = attribute(Square(), x, 1, {}, along=expected(refs, samples, seed=4))
    close(found.inputs, due)


def test_squares_and_variances_of_smoothed_gradients():
    n, random = 5, np.random.default_rng(0)
    spread = 0.3 * (X.max() - X.min())
    slopes = torch.stack([2 * (X + spread * torch.tensor(random.normal(size=(2, 3))))
                          for _ in range(n)])  # fmt: skip
    due = {"mean": slopes.mean(0), "squares": (slopes**2).mean(0),
           "variance": slopes.var(0, unbiased=False)}  # fmt: skip
    for name, expected_ in due.items():
        found = attribute(Square(), X, 0, {}, along=smoothed(n, 0.3, 0, name))
        close(found.gradients, expected_)
        close(found.inputs, (X if name == "mean" else X**2) * expected_)


def test_several_references_are_averaged():
    model, refs = net(), [numbers(2, 3, seed=s) for s in (2, 3, 4)]
    for run in (
        lambda z: attribute(model, X, 1, {}, ["a"], reference=z, along=integrated(3)),
        lambda z: lrp.relevance(model, X, 1, lrp.deep_lift(), ["a"], reference=z),
    ):
        found, each = run(refs), [run(z) for z in refs]
        for name in ("inputs", "total", "missing"):
            close(getattr(found, name), sum(getattr(e, name) for e in each) / 3)
        close(found.layers["a"], sum(e.layers["a"] for e in each) / 3)


# -- class activation maps -------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, 2)

    def block(self, x):
        y = self.norm(self.conv(x))
        y += x
        return F.relu(y, inplace=True)

    def forward(self, x):
        return self.head(self.block(F.relu(self.stem(x))).mean((2, 3)) ** 2)


KINDS = ("grad", "++", "layer", "hires", "x", "element")


def maps_by_hand(model, x, kind):
    """The map of the output of `norm`, pixel by pixel."""
    seen = []
    with torch.enable_grad():
        y = model.norm(model.conv(F.relu(model.stem(x)))).detach().requires_grad_()
        seen = F.relu(y + F.relu(model.stem(x)))
        out = model.head(seen.mean((2, 3)) ** 2)[:, 1]
        (g,) = torch.autograd.grad(out.sum(), y)
    a, heat = y.detach(), torch.zeros(len(x), *y.shape[2:], dtype=D)
    for b in range(len(x)):
        for c in range(a.shape[1]):
            w = torch.zeros_like(g[b, c])
            for i in range(g.shape[2]):
                for j in range(g.shape[3]):
                    slope = g[b, c, i, j]
                    if kind == "grad":
                        w += slope / g[b, c].numel()
                    elif kind == "++" and slope != 0:
                        alpha = slope**2 / (2 * slope**2 + a[b, c].sum() * slope**3)
                        w += alpha * max(slope, 0)
                    elif kind == "layer":
                        w[i, j] = max(slope, 0)
                    elif kind == "hires":
                        w[i, j] = slope
                    elif kind == "x":
                        w += slope * a[b, c, i, j] / a[b, c].sum()
                    elif kind == "element" and slope * a[b, c, i, j] > 0:
                        w[i, j] = slope
            heat[b] += w * a[b, c]
    return heat.clamp(min=0)


@pytest.mark.parametrize("kind", KINDS)
def test_maps(kind):
    model, x = fill(Residual()), numbers(2, 2, 6, 6, seed=1)
    due = maps_by_hand(model, x, kind)
    found = cam(model, x, 1, "norm", kind)
    close(found, due)
    assert found.shape == (2, 4, 4) and (found >= 0).all() and found.any()
    both = cam(model, x, [1, 0], "norm", kind, size=(6, 6))
    close(both[0], F.interpolate(due[:, None], (6, 6), mode="bilinear")[:, 0])
    assert both.shape == (2, 2, 6, 6) and not torch.equal(both[0], both[1])


def test_maps_of_tokens_and_of_layers_that_are_0():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(torch.relu(self.inner(x)).mean(1))

    model, x = fill(Tokens()), numbers(2, 4, 3, seed=1)
    found = cam(model, x, 1, "inner", "hires",
                reshape=lambda a: a.mT.unflatten(-1, (2, 2)))  # fmt: skip
    each = attribute(model, x, 1, {}, ["inner"]).layers["inner"].sum(-1).clamp(min=0)
    close(found, each.reshape(2, 2, 2))
    zero = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Flatten())
    zero[0].bias.data.fill_(-100.0)
    for kind in KINDS:
        assert (cam(zero, torch.ones(1, 1, 2, 2), 0, "1", kind) == 0).all()


def test_guided_maps():
    model, x = fill(Residual()), numbers(2, 2, 6, 6, seed=1)
    guided = attribute(model, x, 1, lrp.guided()).gradients
    heat = cam(model, x, 1, "norm", size=(6, 6))
    given = x.clone().requires_grad_()
    h = F.relu(model.stem(given))
    y = model.norm(model.conv(h)) + h

    def back(y, z, dz):
        return torch.autograd.grad(y, z, dz)[0] if y is not z else dz

    seen = F.relu(y).detach().requires_grad_()
    (d,) = torch.autograd.grad(model.head(seen.mean((2, 3)) ** 2)[:, 1].sum(), seen)
    d = d.clamp(min=0) * (y > 0)
    (d,) = torch.autograd.grad(y, h, d, retain_graph=True)
    d = d.clamp(min=0) * (h > 0)
    (d,) = torch.autograd.grad(model.stem(given), given, d)
    close(guided, d)
    assert (heat[:, None] * guided).shape == x.shape


# -- wrong arguments -------------------------------------------------------------------------------

BAD = [
    (lambda m: attribute(m, X, 1, {}, through="a"), "through expected the path of a module and an"),
    (lambda m: attribute(m, X, 1, {}, through=("z", 1)), "no module of the model is 'z'"),
    (lambda m: attribute(m, X, 1, {}, through=("*", 1)), "through expected one module, got"),
    (lambda m: attribute(m, X, 1, {}, through=("a", 9)), r"output of 'a', of shape \(2, 4\)"),
    (lambda m: attribute(m, X, 1, {}, through=("a", 1), at="a"), "give at or through, got both"),
    (lambda m: attribute(m, X, 1, {}, ["a"], at="b"), "'a' returned .*expected a dense tensor"),
    (lambda m: attribute(m, X, 1, {}, at="c"), "no module of the model is 'c'"),
    (lambda m: attribute(m, X, 1, {}, along=expected(Z), reference=Z), "got another one by refer"),
    (lambda m: attribute(m, X, 1, {}, along=expected((Z, Z))), "got 2 arrays for 1"),
    (lambda m: attribute(m, X, [], {}), "target: expected one or more in the list"),
    (lambda m: attribute(m, X, 1, {}, reference=[]), "reference: expected one or more"),
    (lambda m: attribute(m, X, [1, lambda y: y.sum()], {}), r"of one shape, got the shapes \[\(2,"),
    (lambda m: lrp.relevance(m, X, [0, 1], {"Relu": lrp.pass_}, check="ops"), "is for one target"),
    (lambda m: cam(m, X, 1, "a"), r"output of 'a' has the shape \(2, 4\), expected \(batch, chan"),
    (lambda m: cam(m, X, 1, "*"), "cam: layer expected one module, got"),
    (lambda m: cam(m, X, 1, "a", "eigen"), "kind expected one of .*'hires'.*, got 'eigen'"),
    (lambda m: smoothed(2, 0.1, 0, "median"), "statistic expected one of .*, got 'median'"),
    (lambda m: expected(Z, 0), "expected: expected samples, an int above 0, got 0"),
    (lambda m: conductance(0), "conductance: expected steps, an int above 0, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "words"), BAD)
def test_arguments_that_do_not_fit_are_refused(ask, words):
    with pytest.raises(ArgumentError, match=words):
        ask(net())


def test_a_module_that_runs_twice_has_no_path():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x):
            return self.a(self.a(x))

    for options in ({"at": "a"}, {"through": ("a", 1)}):
        with pytest.raises(ArgumentError, match="the module 'a' ran more than once"):
            attribute(fill(Twice()), X, 1, {}, **options)
    assert attribution.Path((1.0,), (1.0,)).references is None


# -- places of a path in one batch -----------------------------------------------------------------

PATHS = {
    "integrated": integrated(5), "conductance": conductance(4), "smoothed": smoothed(3, 0.1),
    "squares": smoothed(4, 0.1, 0, "squares"), "expected": expected(Z, 3),
}  # fmt: skip


def same(found, due):
    for field in ("inputs", "total", "missing", "gradients"):
        if getattr(due, field) is not None:
            close(getattr(found, field), getattr(due, field))
    for field in ("layers", "heads", "layer_gradients", "layer_values"):
        assert [*getattr(found, field)] == [*getattr(due, field)]
        for name, each in getattr(due, field).items():
            close(getattr(found, field)[name], each)


@pytest.mark.parametrize("batch", [2, 3, 9])
@pytest.mark.parametrize("more", ["none", "reference", "through", "at"])
@pytest.mark.parametrize("name", PATHS)
def test_places_in_one_batch(name, more, batch):
    model, target = fill(Net()), torch.tensor([1, 0])
    options = {"along": PATHS[name], "reference": None if name == "expected" else Z}
    options |= {
        "none": {"reference": None},
        "through": {"through": ("a", 2)},
        "at": {"at": "a"},
    }.get(more, {})
    layers = ["b"] if more in ("reference", "none") else []
    given = model, X, target, {}, layers
    same(attribute(*given, batch=batch, **options), attribute(*given, **options))


def test_places_in_one_batch_that_do_not_fit():
    class Centered(nn.Module):
        def forward(self, x):
            return x - x.mean(0) ** 2

    along = integrated(4)
    with pytest.raises(ArgumentError, match="batch= is for models whose examples are independent"):
        attribute(Centered(), X, 1, {}, along=along, batch=4)
    with pytest.raises(ArgumentError, match="for a target with one number for each example"):
        attribute(fill(Net()), X, lambda y: y.sum(), {}, along=along, batch=4)
    with pytest.raises(ArgumentError, match="batch expected an int above 0, got 0"):
        attribute(fill(Net()), X, 1, {}, along=along, batch=0)
    rnn = fill(nn.Sequential(nn.Unflatten(1, (-1, 1)), nn.Flatten(), nn.Linear(X.shape[1], 2)))
    rnn[0].forward = lambda x: x.T[:, :, None]
    rnn[1].forward = lambda x: x[..., 0].T
    with pytest.raises(ArgumentError, match="repeats the examples along the axis 0, and a value"):
        attribute(rnn, X, 1, {}, ["0"], along=along, batch=4)
    with pytest.raises(ArgumentError, match="runs in training mode"):
        norm = fill(nn.Sequential(nn.BatchNorm1d(X.shape[1]))).train()
        attribute(norm, X, 1, {}, along=along, batch=4)
