"""`rules.attribution` on functions of JAX: the shares that the same network has in PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regrad.errors import ArgumentError
from regrad.rules import lrp
from regrad.rules.attribution import attribute, cam, conductance, expected, integrated, smoothed
from tests.helpers import relevance_jax as nets

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.helpers.relevance_jax import Mlp, array, close  # noqa: E402
from tests.helpers.relevance_networks import fill, numbers  # noqa: E402

X, Z = numbers(2, 6, seed=1), numbers(2, 6, seed=2)
OPTIONS = {
    "gradient": {}, "integrated": {"along": integrated(3)}, "at": {"along": integrated(3)},
    "conductance": {"along": conductance(3)}, "expected": {"along": expected(Z, 3)},
    "variance": {"along": smoothed(3, 0.1, 0, "variance")},
    "through": {"along": integrated(3), "through": ("b", 2)},
    "in one batch": {"along": integrated(3), "batch": 3},
}  # fmt: skip


def in_jax(path):
    return path and path._replace(references=None if path.references is None else array(Z))


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("rules", ["plain", "attn_lrp"])
@pytest.mark.parametrize("name", OPTIONS)
def test_shares_are_those_in_torch(name, rules, reference):
    of, options, layers = fill(Mlp()), dict(OPTIONS[name]), ["a", "b"]
    if name == "at":
        options, layers = {**options, "at": "n"}, ["b"]
    if name == "through":
        layers = ["a"]
    ours = {**options, "along": in_jax(options.get("along"))}
    if reference and name != "expected":
        options["reference"], ours["reference"] = Z, array(Z)
    made = [{} if rules == "plain" else lrp.attn_lrp(library=x) for x in ("torch", "jax")]
    due = attribute(of, X, 1, made[0], layers, **options)
    found = attribute(nets.NnxMlp(of), array(X), 1, made[1], layers, **ours)
    assert [*found.layers] == [*due.layers] and (name == "at") == (found.inputs is None)
    assert abs(np.asarray(found.missing) - np.asarray(due.missing)).max() < 1e-10
    for field in ("inputs", "gradients", "total"):
        if getattr(due, field) is not None:
            close(getattr(found, field), getattr(due, field))
    for path in due.layers:
        for field in ("layers", "layer_gradients", "layer_values"):
            close(getattr(found, field)[path], getattr(due, field)[path])


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(2, 3, 3), nn.Conv2d(3, 3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))).mean((2, 3)) ** 2)


class OfJax(nets.nnx.Module):
    def __init__(self, of):
        self.a, self.b = (
            nets.nnx.Conv(m.in_channels, 3, (3, 3), padding="VALID", rngs=nets.nnx.Rngs(0),
                          **nets.WIDE)
            for m in (of.a, of.b)
        )  # fmt: skip
        for mine, theirs in ((self.a, of.a), (self.b, of.b)):
            mine.kernel[...] = array(theirs.weight).transpose(2, 3, 1, 0)
            mine.bias[...] = array(theirs.bias)
        self.c = nets.nnx.Linear(3, 2, rngs=nets.nnx.Rngs(0), **nets.WIDE)
        self.c.kernel[...], self.c.bias[...] = array(of.c.weight).T, array(of.c.bias)

    def __call__(self, x):
        return self.c(jnp.tanh(self.b(jnp.tanh(self.a(x)))).mean((1, 2)) ** 2)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("kind", ["grad", "++", "layer", "hires", "x", "element"])
def test_maps_are_those_in_torch(kind):
    of, x = fill(Convolutions()), numbers(2, 2, 8, 8, seed=1)
    targets = [lambda y: y[:, 0], lambda y: -y[:, 0]]
    due = cam(of, x, targets, "a", kind, size=(8, 8))
    found = cam(OfJax(of), array(x).transpose(0, 2, 3, 1), targets, "a", kind, size=(8, 8),
                reshape=lambda a: a.transpose(0, 3, 1, 2))  # fmt: skip
    assert abs(due).max() > 1e-3
    close(found, due)


def test_functions_lists_and_arguments():
    def f(x):
        return jnp.stack([(x**3).sum(1), (x * x[:, ::-1]).sum(1)], 1)

    x, zs = array(X), [array(Z), array(X) * 0]
    found = attribute(f, x, [0, 1], {}, reference=zs, along=integrated(4))
    due = [np.asarray(f(x) - f(z)).T for z in zs]
    close(found.total, (due[0] + due[1]) / 2)
    close(found.inputs.sum(-1), found.total)
    dx = jax.grad(lambda x: attribute(f, x, 0, {}).inputs.sum())(x)
    close(dx, 9 * np.asarray(x) ** 2)


WRONG = [
    (r"heads is for PyTorch models.*layers\[path\].reshape", {"heads": {"a": 2}}),
    ("layers are paths in a model of Flax or Equinox", {"through": ("a", 1)}),
    ("through expected the path of a module and an index", {"through": "a"}),
    ("create_graph is for PyTorch models.*jax.grad", {"create_graph": True}),
    ("layers are paths in a model of Flax or Equinox", {"at": "a"}),
    ("have relevance for arrays of floats", {"inputs": jnp.ones((2, 3), int)}),
]


@pytest.mark.parametrize(("words", "given"), WRONG)
def test_wrong_arguments_are_refused(words, given):
    usual = {"model": lambda x: x * 2.0, "inputs": jnp.ones((2, 3)), "target": 0, "rules": {}}
    with pytest.raises(ArgumentError, match=words):
        attribute(**usual | given)


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        (("b", 99), "output of 'b', of shape"), (("*", 1), "through expected one module, got"),
        (("z", 1), "no module 'z' ran"),
    ],
)  # fmt: skip
def test_wrong_units_are_refused(unit, words):
    with pytest.raises(ArgumentError, match=words):
        attribute(nets.NnxMlp(fill(Mlp())), array(X), 1, {}, through=unit)


def test_a_history_is_for_torch():
    with pytest.raises(ArgumentError, match=r"create_graph is for PyTorch. In JAX, differ"):
        lrp.relevance(lambda x: x, jnp.ones((1, 2)), 0, {"Relu": lrp.pass_}, create_graph=True)
