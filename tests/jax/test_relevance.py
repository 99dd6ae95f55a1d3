"""`rules.lrp` on functions of JAX: the relevance that the same network has in PyTorch."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import regrad as rg
from regrad.errors import ArgumentError
from regrad.rules import lrp

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.helpers import relevance_jax as nets  # noqa: E402
from tests.helpers.relevance_jax import MLPS, Cnn, Mlp, array, both, close  # noqa: E402
from tests.helpers.relevance_networks import fill, first_of, numbers, results_of  # noqa: E402

COMPOSITES = {
    "epsilon_plus": (), "epsilon_plus_flat": (), "epsilon_gamma_box": (-3.0, 3.0),
    "epsilon_alpha2_beta1": (), "epsilon_alpha2_beta1_flat": (), "excitation": (),
    "attn_lrp": (), "cp_lrp": (), "deep_lift": (),
}  # fmt: skip
NAMES = ["a", "n", "b"]
LAYERS = {"nnx": NAMES, "equinox": NAMES, "linen, bound": ["Dense_0", "LayerNorm_0", "Dense_1"]}
WITH_LAYERS = ("attn_lrp", "epsilon_plus", "deep_lift", "excitation")
IMPOSSIBLE = ("deep_lift", "equinox")  # whose models have no batch
DENSE = [(c, n) for c in COMPOSITES for n in MLPS if c != "epsilon_gamma_box"]


@pytest.mark.slow
@pytest.mark.parametrize(("composite", "library"), [row for row in DENSE if row != IMPOSSIBLE])
def test_dense_networks(composite, library):
    of, x = fill(Mlp()), numbers(2, 6, seed=1)
    base = numbers(1, 6, seed=2) if composite == "deep_lift" else None
    names = LAYERS.get(library, []) if composite in WITH_LAYERS else []
    layers = (NAMES if names else [], names)
    found, expected = both(of, MLPS[library](of), x, composite, base=base, layers=layers)
    close(found.total, expected.total)
    if composite == "deep_lift":  # (a layer norm of JAX is several ops, of PyTorch one)
        assert abs(np.asarray(found.missing)).max() < 1e-9
        return
    close(found.missing, expected.missing, 1e-9)
    close(found.inputs, expected.inputs)
    assert [*found.layers] == names
    for ours, theirs in zip(found.layers.values(), expected.layers.values(), strict=True):
        assert abs(theirs).max() > 1e-3
        close(ours, theirs)


CNNS = {
    "nnx": (nets.NnxCnn, lambda v: v.transpose(0, 2, 3, 1)),
    "equinox": (nets.EqxCnn, nets.same),
}
CASES = [(c, n) for c in COMPOSITES for n in CNNS if (c, n) != IMPOSSIBLE]


@pytest.mark.slow
@pytest.mark.parametrize(("composite", "library"), CASES)
def test_convolutional_networks(composite, library):
    of, x, (make, turn) = fill(Cnn()), numbers(2, 2, 8, 8, seed=1), CNNS[library]
    base = numbers(1, 2, 8, 8, seed=2) if composite == "deep_lift" else None
    options = {"check": "ops", "layers": ("*", "*")} if composite == "epsilon_plus" else {}
    found, expected = both(
        of, make(of), x, composite, COMPOSITES[composite], base, turn, **options
    )  # fmt: skip
    close(found.total, expected.total)
    close(found.inputs, turn(array(expected.inputs)))
    if options:
        assert {*found.layers} == {"a", "n", "b", "c", "d"}
        for name in ("a", "b", "c"):
            assert abs(expected.layers[name]).max() > 1e-3
            close(found.layers[name], turn(array(expected.layers[name])))
        close(found.layers["d"], expected.layers["d"])
        close(sum(row.lost for row in found.losses), float(found.missing.sum()), 1e-9)


# -- attention -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = nn.RMSNorm(4, 1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*s) for s in ((4, 6), (4, 6), (6, 4)))

    def forward(self, x):
        n = self.n(x)
        q, k, v = (f(n).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        z = torch.softmax(q @ k.mT / math.sqrt(2.0), -1) @ v
        x = x + self.o(z.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class NnxBlock(nnx.Module):
    def __init__(self, of):
        r = nnx.Rngs(0)
        self.n = nnx.RMSNorm(4, epsilon=1e-6, rngs=r, **nets.WIDE)
        self.n.scale[...] = array(of.n.weight)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            theirs = getattr(of, name)
            mine = nnx.Linear(theirs.in_features, theirs.out_features, rngs=r, **nets.WIDE)
            mine.kernel[...], mine.bias[...] = array(theirs.weight).T, array(theirs.bias)
            setattr(self, name, mine)

    def __call__(self, x):
        n = self.n(x)
        q, k, v = (f(n).reshape(*n.shape[:-1], 2, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(self.attend(q, k, v).reshape(x.shape))
        return x + self.down(jax.nn.silu(self.gate(x)) * self.up(x))

    def attend(self, q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(2.0)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


class Fused(NnxBlock):
    attend = staticmethod(nnx.dot_product_attention)


@pytest.mark.slow
@pytest.mark.parametrize("make", [NnxBlock, Fused])
@pytest.mark.parametrize("composite", ["attn_lrp", "cp_lrp", "epsilon_plus"])
def test_attention(composite, make):
    of, x = fill(Block()), numbers(2, 3, 4, seed=1)
    found, expected = both(of, make(of), x, composite, target=lambda y: y[:, 0, 1])
    # (the softmax of the fused one is computed in single precision)
    close(found.inputs, expected.inputs, 1e-10 if make is NnxBlock else 1e-6)


@pytest.mark.slow
def test_rules_by_place_and_named_inputs():
    of, x = fill(Mlp()), numbers(2, 6, seed=1)
    rules = {**lrp.epsilon_plus(), rg.at("b", nn.functional.linear): lrp.gamma()}
    expected = lrp.relevance(of, {"x": x}, lambda y: y.sum(), rules)
    ours = {**lrp.epsilon_plus(library="jax"), rg.at("b", "lrp_dense"): lrp.gamma()}
    found = lrp.relevance(nets.NnxMlp(of), {"x": array(x)}, lambda y: y.sum(), ours)
    close(found.inputs["x"], expected.inputs["x"])
    rules = {hit.path: hit.rule for hit in found.used.hits if hit.op_type == "lrp_dense"}
    assert rules == {"a": "epsilon", "b": "gamma", "c": "epsilon"}
    f = lambda x, n: n * x @ jnp.ones((6, 3))  # noqa: E731
    mixed = lrp.relevance(f, (array(x), 2), 0, lrp.cp_lrp("jax"))
    close(mixed.inputs[0], 2 * array(x))
    assert mixed.inputs[1] is None


def loop(x):
    return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h @ jnp.ones((6, 6)), x)


JAX_RULES = lrp.epsilon_plus(library="jax")
WRONG = [
    ("there are 3 classes, got the target 3", {"target": 3}),
    ("to be an int, an array of ints or a function", {"target": "cat"}),
    (r"an array of \(examples, classes\), got", {"model": lambda x: x.sum()}),
    ("relevance for arrays of floats", {"inputs": jnp.ones((2, 6), int)}),
    ("a reference is for float inputs", {"reference": (1.0, 2.0)}),
    ("compared in one batch, and under jax.vmap rules see one example",
     {"model": nets.eqx_mlp(fill(Mlp())), "reference": array(numbers(1, 6)),
      "rules": lrp.deep_lift(library="jax")}),
    ("a dot_general runs in the body of a while .*test_relevance.py", {"model": loop}),
    ("no module 'z' ran and contributed to the target", {"layers": ["a", "z"]}),
    ("layers are paths in a model of Flax or Equinox, got function",
     {"model": lambda x: x, "layers": ["a"]}),
    ("takes a dict of op types", {"rules": 3, "layers": ["a"]}),
    ('has keys of PyTorch. Make composites for JAX with library="jax"',
     {"rules": lrp.epsilon_plus()}),
    ('expected check to be None or "ops", got True', {"check": True}),
    ('check="ops" is for runs without a reference',
     {"check": "ops", "reference": jnp.ones((1, 6))}),
]  # fmt: skip


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("words", "given"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_are_refused(words, given):
    usual = {"model": nets.NnxMlp(fill(Mlp())), "inputs": array(numbers(2, 6)), "target": 0}
    with pytest.raises(ArgumentError, match=words):
        lrp.relevance(**usual | {"rules": JAX_RULES} | given)


def test_other_libraries_are_refused():
    with pytest.raises(ArgumentError, match='expected library="torch" or "jax", got \'tf\''):
        lrp.attn_lrp("tf")


# -- an optional name, a reference, precision ------------------------------------------------------


def test_an_optional_name_of_a_function_may_be_in_no_program():
    rules = {"nobody": rg.rules.optional(lambda dy: dy), "Tanh": lambda dy: 7 * dy}
    assert jax.grad(rg.jax.override(jnp.tanh, rules))(0.5) == 7.0
    with pytest.raises(rg.errors.UnknownOpError, match="nobody"):
        jax.grad(rg.jax.override(jnp.tanh, {"nobody": lambda dy: dy}))(0.5)


def against_zero(form, batch, target):
    w = jnp.arange(-2.0, 4).reshape(3, 2)
    f = lambda x: results_of(form, jax.nn.relu(x @ w), jnp.stack)  # noqa: E731
    x = np.random.default_rng(0).normal(size=(batch, 3))
    x, base = jnp.asarray(x, "float32"), jnp.zeros((1, 3), "float32")
    return lrp.relevance(f, x, target, lrp.deep_lift("jax"), reference=base), f(x), f(base)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("form", ["tuple", "list", "dict", "scalar", "states"])
def test_a_reference_of_functions_that_return_several(form, batch):
    found, y, zero = against_zero(form, batch, first_of)
    np.testing.assert_allclose(found.total, first_of(y) - first_of(zero), atol=1e-5)
    np.testing.assert_allclose(found.missing, 0, atol=1e-5)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("form", "target"), [("transposed", lambda y: y[0]), ("mean", 0), ("sum", lambda y: y)]
)
def test_a_batch_that_is_not_the_first_axis_is_refused(form, target):
    with pytest.raises(ArgumentError, match=r"in one batch.*the batch must be the first axis"):
        against_zero(form, 2, target)


@pytest.mark.parametrize("swapped", [False, True])
def test_steps_before_the_batch_are_not_compared_as_examples(swapped):
    """An even number of steps has halves, which are no inputs and references."""
    w, v = jnp.asarray(numbers(4, 5)), jnp.asarray(numbers(5, 3))
    turn = (lambda h: jnp.swapaxes(h, 0, 1)) if swapped else lambda h: h
    f = lambda x: turn(jnp.tanh(jnp.maximum(0.1, turn(x) @ w))).mean(1) @ v  # noqa: E731
    x, base = jnp.asarray(numbers(3, 6, 4)), jnp.zeros((1, 6, 4))
    if swapped:
        with pytest.raises(ArgumentError, match=r"the shape \(6, 3, 5\) for.*Move the batch there"):
            lrp.relevance(f, x, 1, lrp.deep_lift("jax"), reference=base)
        return
    found = lrp.relevance(f, x, 1, lrp.deep_lift("jax"), reference=base)
    np.testing.assert_allclose(found.total, (f(x) - f(base))[:, 1], atol=1e-5)
    np.testing.assert_allclose(found.missing, 0, atol=1e-5)


@pytest.mark.parametrize("fails", [False, True])
def test_relevance_computes_in_full_precision(fails):
    seen, before = [], jax.config.jax_default_matmul_precision

    def f(x):
        seen.append(jax.config.jax_default_matmul_precision)
        return x[:, 5:][0, 0, 0] if fails else x @ jnp.ones((3, 2))

    try:
        lrp.relevance(f, jnp.ones((2, 3)), 0, JAX_RULES)
    except IndexError:
        assert fails
    assert {*seen} == {"highest"} and jax.config.jax_default_matmul_precision == before
