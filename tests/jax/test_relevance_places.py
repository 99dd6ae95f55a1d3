"""Norms that no path names, layers, losses and loops: `rules.lrp` on functions of JAX."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from regrad.errors import ArgumentError
from regrad.rules import lrp

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.helpers import relevance_jax as nets  # noqa: E402
from tests.helpers.jax_model import WRAPS  # noqa: E402
from tests.helpers.relevance_jax import MLPS, WIDE, Mlp, NnxMlp, array, both, close, eqx_mlp  # noqa: E402
from tests.helpers.relevance_networks import fill, numbers  # noqa: E402

# -- modules that are no attributes of a model -----------------------------------------------------


class Centred(eqx.Module):
    """A class of norms that the program of Equinox does not name."""

    norm: eqx.nn.LayerNorm

    def __call__(self, x):
        y = x - x.mean()
        y = y * jax.lax.rsqrt((y * y).mean() + 1e-5)
        return self.norm.weight * y + self.norm.bias


class CentredNorm(Centred):
    pass


class OddlyNamed(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(5, name="Dense_0", **WIDE)(x))
        x = linen.LayerNorm(epsilon=1e-5, name="one", **WIDE)(x)
        x = linen.gelu(linen.Dense(4, name="Dense_1", **WIDE)(x))
        return linen.Dense(3, use_bias=False, name="Dense_2", **WIDE)(x)


class Compiled(NnxMlp):
    @nnx.jit
    def __call__(self, x):
        return super().__call__(x)


class Counting(NnxMlp):
    """A model that changes while it runs."""

    def __init__(self, of):
        super().__init__(of)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return super().__call__(x)


def oddly_named(of):
    params = nets.linen_variables(of)["params"]
    variables = {"params": {**params, "one": params["LayerNorm_0"]}}
    return lambda x: OddlyNamed().apply(variables, x)


def inside(of):
    model = NnxMlp(of)
    model.n = nnx.jit(model.n)
    return model


def closed_over(wrap):
    return lambda of: (lambda model: wrap(lambda x: model(x)))(NnxMlp(of))


def with_norm(kind, of):
    model = eqx_mlp(of)
    return eqx.tree_at(lambda m: m.n, model, kind(model.n))


def own_class(of):
    model = with_norm(CentredNorm, of)
    return lambda x: model(x)


OTHERS = {
    "a function closes over it": closed_over(lambda f: f),
    "compiled around it": closed_over(jax.jit),
    "nnx.jit around it": lambda of: nnx.jit(NnxMlp(of)),
    "nnx.jit inside": inside,
    "a call under nnx.jit": Compiled,
    "a checkpoint around it": closed_over(jax.checkpoint),
    "a class of one's own": own_class,
    "a name of one's own": oddly_named,
    "equinox, compiled": lambda of: eqx.filter_jit(eqx_mlp(of)),
    "equinox, a copy": lambda of: jax.tree.map(lambda a: a * 1, eqx_mlp(of)),
}


@pytest.fixture
def of():
    return fill(Mlp())


X = numbers(2, 6, seed=1)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("composite", ["attn_lrp", "epsilon_plus"])
def test_norms_are_known_by_their_class(of, composite, name):
    found, expected = both(of, OTHERS[name](of), X, composite)
    close(found.inputs, expected.inputs)
    close(found.missing, expected.missing, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Compiled, Counting])
def test_a_model_is_left_as_it_was(of, make):
    model = make(of)
    state = jax.tree.map(lambda v: v, nnx.state(model))
    found, expected = both(of, model, X, "attn_lrp", layers=(["n"], ["n"]))
    close(found.layers["n"], expected.layers["n"])
    assert jax.tree.all(jax.tree.map(jnp.array_equal, state, nnx.state(model)))
    close(model(array(X)), array(of(X)))


@pytest.mark.slow
def test_a_class_that_is_not_called_a_norm_has_no_rule_of_one(of):
    rules = lrp.attn_lrp(library="jax")
    found, expected = (
        lrp.relevance(m, array(X), 1, rules) for m in (with_norm(Centred, of), eqx_mlp(of))
    )
    assert abs(found.inputs - expected.inputs).max() > 1e-2


# -- where it is lost ------------------------------------------------------------------------------


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.slow
def test_a_norm_that_is_written_out_is_where_it_is_lost():
    of = fill(ByHand())
    w, b = array(of.a.weight).T, array(of.a.bias)

    def by_hand(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) @ w + b

    expected = lrp.relevance(of, X, 1, lrp.attn_lrp(), check="ops")
    found = lrp.relevance(by_hand, array(X), 1, lrp.attn_lrp(library="jax"), check="ops")
    close(found.inputs, expected.inputs)
    (theirs,) = [row for row in expected.losses if row.op == "Rsqrt"]
    (ours,) = [row for row in found.losses if row.op == "rsqrt"]
    assert abs(ours.lost) > 1e-2
    close([ours.arrived, ours.left], [theirs.arrived, theirs.left])
    assert "test_relevance_places.py" in ours.line
    assert found.losses[0].op in ("rsqrt", "lrp_dense")  # (whose bias keeps a share)


PATHS = {
    "nnx": {"a", "b", "c"}, "equinox": {"a/Linear", "b/Linear", "c/Linear"},
    "linen, bound": {"Dense_0", "Dense_1", "Dense_2"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("library", MLPS)
def test_losses_add_up(of, library):
    found, _ = both(of, MLPS[library](of), X, "epsilon_plus", check="ops")
    plain = lrp.relevance(MLPS[library](of), array(X), 1, lrp.epsilon_plus(library="jax"))
    expected = lrp.relevance(of, X, 1, lrp.epsilon_plus(), check="ops")
    close(found.inputs, plain.inputs, 1e-12)
    close(found.missing, plain.missing, 1e-12)
    close(sum(row.lost for row in found.losses), float(found.missing.sum()))
    (rest,) = [row for row in found.losses if row.op.startswith("unobserved")]
    assert abs(rest.lost) < 1e-12
    ours = [row for row in found.losses if row.op == "lrp_dense"]
    theirs = [row.lost for row in expected.losses if row.op == "linear"]
    close(sorted(row.lost for row in ours), sorted(theirs), 1e-9)
    paths = PATHS.get(library, {f"LinenMlp/Dense_{i}" for i in range(3)})
    assert {row.path for row in ours} == paths


# -- layers ----------------------------------------------------------------------------------------


class Tied(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(3, 3, rngs=nnx.Rngs(0), **WIDE)
        self.pair, self.idle, self.count = Pair(), nnx.Dropout(0.0), Count()

    def __call__(self, x):
        y, twice = self.pair(self.a(self.a(x)))
        return y * self.count(x) + twice


class Pair(nnx.Module):
    def __call__(self, x):
        return x, 2 * x


class Count(nnx.Module):
    def __call__(self, x):
        return len(x)


@pytest.mark.slow
def test_layers_that_return_tuples_run_twice_or_not_at_all():
    x, rules = array(numbers(2, 3, seed=1)), lrp.attn_lrp(library="jax")
    found = lrp.relevance(Tied(), x, 1, rules, ["pair", ""])
    assert [*found.layers] == ["pair", ""]
    close(2 * found.layers["pair"], found.layers[""])  # y is 2 x + 2 x
    for name, words in {
        "a": "the module 'a' ran more than once",
        "idle": "no module 'idle' ran",
        "count": "'count' returned int, expected an array of floats",
    }.items():
        with pytest.raises(ArgumentError, match=words):
            lrp.relevance(Tied(), x, 1, rules, [name])


# -- checkpoints and loops -------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) * x + x
        return x


@pytest.mark.slow
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("scans", [True, False])
@pytest.mark.parametrize("composite", ["attn_lrp", "epsilon_plus", "excitation"])
def test_layers_in_a_scan_or_checkpoint(composite, scans, wrap):
    of = fill(Layers())
    ws = jnp.stack([array(layer.weight).T for layer in of.layers])
    bs = jnp.stack([array(layer.bias) for layer in of.layers])

    @WRAPS[wrap]
    def layer(x, given):
        w, b = given
        return jax.nn.relu(x @ w + b) * x + x, None

    def model(x):
        if scans:
            return jax.lax.scan(layer, x, (ws, bs))[0]
        for given in zip(ws, bs, strict=True):
            x, _ = layer(x, given)
        return x

    for check in (None, "ops"):
        found, expected = both(of, model, numbers(2, 4, seed=1), composite, check=check)
        close(found.inputs, expected.inputs)
        close(found.total, expected.total)


@pytest.mark.slow
def test_a_scan_whose_state_begins_as_a_constant():
    w, x = array(numbers(3, 3, seed=1)), array(numbers(4, 2, 3, seed=2))

    def model(x):  # the state depends on x from the second round on
        return jax.lax.scan(lambda h, x: (h @ w + x, None), jnp.zeros((2, 3)), x)[0]

    found = lrp.relevance(model, x, 1, lrp.attn_lrp(library="jax"))
    close(found.inputs, [x[i] * jnp.linalg.matrix_power(w, 3 - i)[:, 1] for i in range(4)])
    assert sum(hit.count for hit in found.used.hits if hit.op_type == "lrp_dense") == 1
