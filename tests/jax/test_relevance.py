"""`rules.lrp` on functions of JAX: the relevance that the same network has in PyTorch."""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import regrad as rg
from regrad.errors import ArgumentError
from regrad.rules import lrp

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from tests.helpers.relevance_networks import fill, numbers  # noqa: E402

COMPOSITES = {
    "epsilon_plus": (), "epsilon_plus_flat": (), "epsilon_gamma_box": (-3.0, 3.0),
    "epsilon_alpha2_beta1": (), "epsilon_alpha2_beta1_flat": (), "excitation": (),
    "attn_lrp": (), "cp_lrp": (), "deep_lift": (),
}  # fmt: skip
WIDE = {"param_dtype": jnp.float64}


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def close(got, expected, tolerance=1e-10):
    got, expected = np.asarray(got), np.asarray(expected)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def array(x):
    return jnp.asarray(x.detach().numpy())


# -- dense layers and a layer norm, in three libraries ---------------------------------------------


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4)
        self.c = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.c(nn.functional.gelu(self.b(self.n(torch.relu(self.a(x)))), approximate="tanh"))


class NnxMlp(nnx.Module):
    def __init__(self, of):
        r = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(6, 5, rngs=r, **WIDE), nnx.Linear(5, 4, rngs=r, **WIDE)
        self.n = nnx.LayerNorm(5, rngs=r, epsilon=1e-5, **WIDE)
        self.c = nnx.Linear(4, 3, use_bias=False, rngs=r, **WIDE)
        for mine, theirs in ((self.a, of.a), (self.b, of.b), (self.c, of.c)):
            mine.kernel[...] = array(theirs.weight).T
            if theirs.bias is not None:
                mine.bias[...] = array(theirs.bias)
        self.n.scale[...], self.n.bias[...] = array(of.n.weight), array(of.n.bias)

    def __call__(self, x):
        return self.c(jax.nn.gelu(self.b(self.n(jax.nn.relu(self.a(x))))))


class EqxMlp(eqx.Module):
    a: eqx.nn.Linear
    n: eqx.nn.LayerNorm
    b: eqx.nn.Linear
    c: eqx.nn.Linear

    def __call__(self, x):
        return jax.vmap(lambda x: self.c(jax.nn.gelu(self.b(self.n(jax.nn.relu(self.a(x)))))))(x)


def eqx_mlp(of):
    key = jax.random.key(0)
    made = EqxMlp(
        eqx.nn.Linear(6, 5, key=key), eqx.nn.LayerNorm(5), eqx.nn.Linear(5, 4, key=key),
        eqx.nn.Linear(4, 3, use_bias=False, key=key),
    )  # fmt: skip
    where = lambda m: (  # noqa: E731
        m.a.weight, m.a.bias, m.n.weight, m.n.bias, m.b.weight, m.b.bias, m.c.weight,
    )  # fmt: skip
    return eqx.tree_at(where, made, tuple(map(array, of.parameters())))


class LinenMlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(5, **WIDE)(x))
        x = linen.LayerNorm(epsilon=1e-5, **WIDE)(x)
        x = linen.gelu(linen.Dense(4, **WIDE)(x))
        return linen.Dense(3, use_bias=False, **WIDE)(x)


def linen_variables(of):
    a, b, n, m, c, d, e = map(array, of.parameters())
    return {"params": {
        "Dense_0": {"kernel": a.T, "bias": b}, "LayerNorm_0": {"scale": n, "bias": m},
        "Dense_1": {"kernel": c.T, "bias": d}, "Dense_2": {"kernel": e.T},
    }}  # fmt: skip


MLPS = {
    "nnx": NnxMlp,
    "equinox": eqx_mlp,
    "linen, bound": lambda of: LinenMlp().bind(linen_variables(of)),
    "linen, a function": lambda of: lambda x: LinenMlp().apply(linen_variables(of), x),
    "linen, compiled": lambda of: jax.jit(lambda x: LinenMlp().apply(linen_variables(of), x)),
}


DENSE = [(c, n) for c in COMPOSITES for n in MLPS if (c, n) != ("deep_lift", "equinox")]
DENSE = [(c, n) for c, n in DENSE if c != "epsilon_gamma_box"]  # (which is for convolutions)


@pytest.mark.parametrize(("composite", "library"), DENSE)
def test_dense_networks(composite, library):
    of, x = fill(Mlp()), numbers(2, 6, seed=1)
    base = numbers(1, 6, seed=2) if composite == "deep_lift" else None
    make = getattr(lrp, composite)
    due = lrp.relevance(of, x, 1, make(), reference=base)
    found = lrp.relevance(
        MLPS[library](of), array(x), 1, make(library="jax"),
        reference=None if base is None else array(base),
    )  # fmt: skip
    assert abs(due.inputs).max() > 1e-3
    close(found.inputs, due.inputs)
    close(found.total, due.total)
    close(found.missing, due.missing, 1e-9)


# -- convolutions, batch norm and a residual sum ---------------------------------------------------


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.b = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.c, self.d = nn.ConvTranspose2d(4, 2, 2, 2), nn.Linear(2 * 4 * 4, 3)

    def forward(self, x):
        x = torch.relu(self.n(self.a(x)))
        x = nn.functional.max_pool2d(torch.relu(self.b(x) + x), 3)
        return self.d(torch.relu(self.c(x)).permute(0, 2, 3, 1).flatten(1))


class NnxCnn(nnx.Module):
    def __init__(self, of):
        r, no = nnx.Rngs(0), {"padding": "VALID"}
        self.a = nnx.Conv(2, 4, (3, 3), rngs=r, **no, **WIDE)
        self.n = nnx.BatchNorm(4, use_running_average=True, epsilon=1e-5, rngs=r, **WIDE)
        self.b = nnx.Conv(
            4, 4, (3, 3), padding=2, kernel_dilation=2, feature_group_count=2, rngs=r, **WIDE
        )
        self.c = nnx.ConvTranspose(
            4, 2, (2, 2), (2, 2), transpose_kernel=True, rngs=r, **no, **WIDE
        )
        self.d = nnx.Linear(32, 3, rngs=r, **WIDE)
        for mine, theirs in ((self.a, of.a), (self.b, of.b), (self.c, of.c)):
            mine.kernel[...] = array(theirs.weight).transpose(2, 3, 1, 0)
            mine.bias[...] = array(theirs.bias)
        self.d.kernel[...], self.d.bias[...] = array(of.d.weight).T, array(of.d.bias)
        self.n.scale[...], self.n.bias[...] = array(of.n.weight), array(of.n.bias)
        self.n.mean = nnx.BatchStat(array(of.n.running_mean))
        self.n.var = nnx.BatchStat(array(of.n.running_var))

    def __call__(self, x):
        x = jax.nn.relu(self.n(self.a(x)))
        x = nnx.max_pool(jax.nn.relu(self.b(x) + x), (3, 3), (3, 3))
        return self.d(jax.nn.relu(self.c(x)).reshape(len(x), -1))


class EqxCnn(eqx.Module):
    a: eqx.nn.Conv2d
    b: eqx.nn.Conv2d
    c: eqx.nn.ConvTranspose2d
    d: eqx.nn.Linear
    n: nnx.Module

    def __init__(self, of):
        key = jax.random.key(0)
        made = (
            eqx.nn.Conv2d(2, 4, 3, key=key),
            eqx.nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2, key=key),
            eqx.nn.ConvTranspose2d(4, 2, 2, 2, key=key),
            eqx.nn.Linear(32, 3, key=key),
        )
        weights = [(m.weight, m.bias) for m in (of.a, of.b, of.c, of.d)]
        self.a, self.b, self.c, self.d = (
            eqx.tree_at(
                lambda m: (m.weight, m.bias), m,
                (array(w) if i != 2 else array(w).transpose(1, 0, 2, 3)[:, :, ::-1, ::-1],
                 array(b).reshape(m.bias.shape)),
            ) for i, (m, (w, b)) in enumerate(zip(made, weights, strict=True))
        )  # fmt: skip
        self.n = NnxCnn(of).n

    def __call__(self, x):
        x = jax.vmap(self.a)(x)
        x = jax.nn.relu(self.n(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2))
        x = jax.nn.relu(jax.vmap(self.b)(x) + x)
        x = jax.vmap(eqx.nn.MaxPool2d(3, 3))(x)
        x = jax.nn.relu(jax.vmap(self.c)(x)).transpose(0, 2, 3, 1)
        return jax.vmap(self.d)(x.reshape(len(x), -1))


CASES = [
    (c, n) for c in COMPOSITES for n in ("nnx", "equinox") if (c, n) != ("deep_lift", "equinox")
]


@pytest.mark.parametrize(("composite", "library"), CASES)
def test_convolutional_networks(composite, library):
    of, x = fill(Cnn()), numbers(2, 2, 8, 8, seed=1)
    base = numbers(1, 2, 8, 8, seed=2) if composite == "deep_lift" else None
    make, given = getattr(lrp, composite), COMPOSITES[composite]
    due = lrp.relevance(of, x, 1, make(*given), reference=base)
    turn = (lambda v: v) if library == "equinox" else (lambda v: v.transpose(0, 2, 3, 1))
    found = lrp.relevance(
        (NnxCnn if library == "nnx" else EqxCnn)(of), turn(array(x)), 1,
        make(*given, library="jax"), reference=None if base is None else turn(array(base)),
    )  # fmt: skip
    assert abs(due.inputs).max() > 1e-3
    close(found.total, due.total)
    close(found.inputs, turn(array(due.inputs)))


# -- attention -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.n, self.q, self.k, self.v, self.o = (
            nn.RMSNorm(width, 1e-6), *(nn.Linear(width, width) for _ in range(4)),
        )  # fmt: skip
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
        self.n = nnx.RMSNorm(4, epsilon=1e-6, rngs=r, **WIDE)
        self.n.scale[...] = array(of.n.weight)
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            theirs = getattr(of, name)
            mine = nnx.Linear(theirs.in_features, theirs.out_features, rngs=r, **WIDE)
            mine.kernel[...], mine.bias[...] = array(theirs.weight).T, array(theirs.bias)
            setattr(self, name, mine)

    def __call__(self, x):
        n = self.n(x)
        q, k, v = (f(n).reshape(*n.shape[:-1], 2, 2) for f in (self.q, self.k, self.v))
        z = self.attend(q, k, v)
        x = x + self.o(z.reshape(x.shape))
        return x + self.down(jax.nn.silu(self.gate(x)) * self.up(x))

    def attend(self, q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(2.0)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)


class Fused(NnxBlock):
    def attend(self, q, k, v):
        return nnx.dot_product_attention(q, k, v)


@pytest.mark.parametrize("make", [NnxBlock, Fused])
@pytest.mark.parametrize("composite", ["attn_lrp", "cp_lrp", "epsilon_plus"])
def test_attention(composite, make):
    of, x = fill(Block()), numbers(2, 3, 4, seed=1)
    target = lambda y: y[:, 0, 1]  # noqa: E731
    due = lrp.relevance(of, x, target, getattr(lrp, composite)())
    found = lrp.relevance(make(of), array(x), target, getattr(lrp, composite)(library="jax"))
    # (the softmax of the fused one is computed in single precision)
    close(found.inputs, due.inputs, 1e-10 if make is NnxBlock else 1e-6)


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
    params = linen_variables(of)["params"]
    variables = {"params": {**params, "one": params["LayerNorm_0"]}}
    return lambda x: OddlyNamed().apply(variables, x)


def inside(of):
    model = NnxMlp(of)
    model.n = nnx.jit(model.n)
    return model


def closed_over(wrap):
    def make(of):
        model = NnxMlp(of)
        return wrap(lambda x: model(x))

    return make


def own_class(of):
    model = eqx_mlp(of)
    model = eqx.tree_at(lambda m: m.n, model, CentredNorm(model.n))
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


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("composite", ["attn_lrp", "epsilon_plus"])
def test_norms_are_known_by_their_class(composite, name):
    of, x = fill(Mlp()), numbers(2, 6, seed=1)
    due = lrp.relevance(of, x, 1, getattr(lrp, composite)())
    found = lrp.relevance(OTHERS[name](of), array(x), 1, getattr(lrp, composite)(library="jax"))
    close(found.inputs, due.inputs)
    close(found.missing, due.missing, 1e-9)


@pytest.mark.parametrize("make", [Compiled, Counting])
def test_a_model_is_left_as_it_was(make):
    of, x = fill(Mlp()), numbers(2, 6, seed=1)
    model = make(of)
    state = jax.tree.map(lambda v: v, nnx.state(model))
    due = lrp.relevance(of, x, 1, lrp.attn_lrp(), ["n"])
    found = lrp.relevance(model, array(x), 1, lrp.attn_lrp(library="jax"), ["n"])
    close(found.layers["n"], due.layers["n"])
    assert jax.tree.all(jax.tree.map(jnp.array_equal, state, nnx.state(model)))
    close(model(array(x)), array(of(x)))


def test_a_class_that_is_not_called_a_norm_has_no_rule_of_one():
    of, x = fill(Mlp()), array(numbers(2, 6, seed=1))
    model = eqx_mlp(of)
    other = eqx.tree_at(lambda m: m.n, model, Centred(model.n))
    rules = lrp.attn_lrp(library="jax")
    found, due = (lrp.relevance(m, x, 1, rules) for m in (other, model))
    assert abs(found.inputs - due.inputs).max() > 1e-2


# -- where it is lost ------------------------------------------------------------------------------


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))


def test_a_norm_that_is_written_out_is_where_it_is_lost():
    of, x = fill(ByHand()), numbers(2, 6, seed=1)
    w, b = array(of.a.weight).T, array(of.a.bias)

    def by_hand(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) @ w + b

    due = lrp.relevance(of, x, 1, lrp.attn_lrp(), check="ops")
    found = lrp.relevance(by_hand, array(x), 1, lrp.attn_lrp(library="jax"), check="ops")
    close(found.inputs, due.inputs)
    (theirs,) = [row for row in due.losses if row.op == "Rsqrt"]
    (ours,) = [row for row in found.losses if row.op == "rsqrt"]
    assert abs(ours.lost) > 1e-2
    close([ours.arrived, ours.left], [theirs.arrived, theirs.left])
    assert "test_relevance.py" in ours.line
    assert found.losses[0].op in ("rsqrt", "lrp_dense")  # (whose bias keeps a share)


@pytest.mark.parametrize("library", MLPS)
def test_losses_add_up(library):
    of, x = fill(Mlp()), numbers(2, 6, seed=1)
    rules = lrp.epsilon_plus(library="jax")
    plain = lrp.relevance(MLPS[library](of), array(x), 1, rules)
    found = lrp.relevance(MLPS[library](of), array(x), 1, rules, check="ops")
    due = lrp.relevance(of, x, 1, lrp.epsilon_plus(), check="ops")
    close(found.inputs, plain.inputs, 1e-12)
    close(found.missing, plain.missing, 1e-12)
    close(sum(row.lost for row in found.losses), float(found.missing.sum()))
    (rest,) = [row for row in found.losses if row.op.startswith("what is not seen")]
    assert abs(rest.lost) < 1e-12
    theirs = [row.lost for row in due.losses if row.op == "linear"]
    ours = [row.lost for row in found.losses if row.op == "lrp_dense"]
    close(sorted(ours), sorted(theirs), 1e-9)
    paths = {row.path for row in found.losses if row.op == "lrp_dense"}
    assert paths == {
        "nnx": {"a", "b", "c"}, "equinox": {"a/Linear", "b/Linear", "c/Linear"},
        "linen, bound": {"Dense_0", "Dense_1", "Dense_2"},
    }.get(library, {f"LinenMlp/Dense_{i}" for i in range(3)})  # fmt: skip


# -- layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["nnx", "equinox", "linen, bound"])
@pytest.mark.parametrize("composite", ["attn_lrp", "epsilon_plus", "deep_lift"])
def test_layers_of_dense_networks(composite, library):
    of, x = fill(Mlp()), numbers(2, 6, seed=1)
    base = numbers(1, 6, seed=2) if composite == "deep_lift" else None
    if composite == "deep_lift" and library == "equinox":
        base, composite = None, "excitation"
    make, paths = getattr(lrp, composite), {"a": "Dense_0", "n": "LayerNorm_0", "b": "Dense_1"}
    names = [paths[n] if "linen" in library else n for n in paths]
    due = lrp.relevance(of, x, 1, make(), [*paths], reference=base)
    found = lrp.relevance(
        MLPS[library](of), array(x), 1, make(library="jax"), names,
        reference=None if base is None else array(base),
    )  # fmt: skip
    close(found.inputs, due.inputs)
    assert [*found.layers] == names
    for ours, theirs in zip(found.layers.values(), due.layers.values(), strict=True):
        assert abs(theirs).max() > 1e-3
        close(ours, theirs)


@pytest.mark.parametrize("library", ["nnx", "equinox"])
def test_layers_of_convolutional_networks(library):
    of, x = fill(Cnn()), numbers(2, 2, 8, 8, seed=1)
    turn = (lambda v: v) if library == "equinox" else (lambda v: v.transpose(0, 2, 3, 1))
    due = lrp.relevance(of, x, 1, lrp.epsilon_plus(), "*")
    model = (NnxCnn if library == "nnx" else EqxCnn)(of)
    found = lrp.relevance(
        model, turn(array(x)), 1, lrp.epsilon_plus(library="jax"), "*", check="ops"
    )
    close(found.inputs, turn(array(due.inputs)))
    for name in ("a", "b", "c"):
        assert abs(due.layers[name]).max() > 1e-3
        close(found.layers[name], turn(array(due.layers[name])))
    close(found.layers["d"], due.layers["d"])
    assert {*found.layers} == {"a", "n", "b", "c", "d"}
    close(sum(row.lost for row in found.losses), float(found.missing.sum()), 1e-9)


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


def test_layers_that_return_tuples_run_twice_or_not_at_all():
    x, rules = array(numbers(2, 3, seed=1)), lrp.attn_lrp(library="jax")
    found = lrp.relevance(Tied(), x, 1, rules, ["pair", ""])
    assert [*found.layers] == ["pair", ""]
    close(2 * found.layers["pair"], found.layers[""])  # y is 2 x + 2 x
    with pytest.raises(ArgumentError, match="the module 'a' ran more than once"):
        lrp.relevance(Tied(), x, 1, rules, ["a"])
    with pytest.raises(ArgumentError, match="no module 'idle' ran"):
        lrp.relevance(Tied(), x, 1, rules, ["idle"])
    with pytest.raises(ArgumentError, match="'count' returned int, expected an array of floats"):
        lrp.relevance(Tied(), x, 1, rules, ["count"])


# -- checkpoints and loops -------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) * x
        return x


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
@pytest.mark.parametrize("scans", [True, False])
@pytest.mark.parametrize("composite", ["attn_lrp", "epsilon_plus", "excitation"])
def test_layers_in_a_scan_or_checkpoint(composite, scans, wrap):
    of, x = fill(Layers()), numbers(2, 4, seed=1)
    ws = jnp.stack([array(layer.weight).T for layer in of.layers])
    bs = jnp.stack([array(layer.bias) for layer in of.layers])

    @wrap
    def layer(x, given):
        w, b = given
        return jax.nn.relu(x @ w + b) * x, None

    def model(x):
        if scans:
            return jax.lax.scan(layer, x, (ws, bs))[0]
        for given in zip(ws, bs, strict=True):
            x, _ = layer(x, given)
        return x

    due = lrp.relevance(of, x, 1, getattr(lrp, composite)())
    for check in (None, "ops"):
        found = lrp.relevance(
            model, array(x), 1, getattr(lrp, composite)(library="jax"), check=check
        )
        close(found.inputs, due.inputs)
        close(found.total, due.total)


def test_a_scan_whose_state_begins_as_a_constant():
    w = array(numbers(3, 3, seed=1))

    def model(x):  # the state depends on x from the second round on
        return jax.lax.scan(lambda h, x: (h @ w + x, None), jnp.zeros((2, 3)), x)[0]

    x = array(numbers(4, 2, 3, seed=2))
    found = lrp.relevance(model, x, 1, lrp.attn_lrp(library="jax"))
    due = jnp.stack([x[i] * jnp.linalg.matrix_power(w, 3 - i)[:, 1] for i in range(4)])
    close(found.inputs, due)
    assert sum(hit.count for hit in found.used.hits if hit.op_type == "lrp_dense") == 1


def test_rules_by_place_and_named_inputs():
    of, x = fill(Mlp()), numbers(2, 6, seed=1)
    rules = {**lrp.epsilon_plus(), rg.at("b", nn.functional.linear): lrp.gamma()}
    due = lrp.relevance(of, {"x": x}, lambda y: y.sum(), rules)
    ours = {**lrp.epsilon_plus(library="jax"), rg.at("b", "lrp_dense"): lrp.gamma()}
    found = lrp.relevance(NnxMlp(of), {"x": array(x)}, lambda y: y.sum(), ours)
    close(found.inputs["x"], due.inputs["x"])
    assert {hit.path: hit.rule for hit in found.used.hits if hit.op_type == "lrp_dense"} == {
        "a": "epsilon", "b": "gamma", "c": "epsilon",
    }  # fmt: skip
    mixed = lrp.relevance(
        lambda x, n: n * x @ jnp.ones((6, 3)), (array(x), 2), 0, lrp.cp_lrp("jax")
    )
    close(mixed.inputs[0], 2 * array(x))
    assert mixed.inputs[1] is None


def wrong(words, **given):
    usual = {"model": NnxMlp(fill(Mlp())), "inputs": array(numbers(2, 6)), "target": 0,
             "rules": lrp.epsilon_plus(library="jax"), **given}  # fmt: skip
    with pytest.raises(ArgumentError, match=words):
        lrp.relevance(**usual)


def test_what_does_not_fit_is_refused():
    def loop(x):
        return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h @ jnp.ones((6, 6)), x)

    wrong("there are 3 classes, got the target 3", target=3)
    wrong("expected an int, an array of ints or a function", target="cat")
    wrong(r"an array of \(examples, classes\), got", model=lambda x: x.sum())
    wrong("it comes to arrays of floats", inputs=jnp.ones((2, 6), int))
    wrong("it comes to arrays of floats", reference=(1.0, 2.0))
    wrong(
        "compared in one batch, and jax.vmap shows rules one example", model=eqx_mlp(fill(Mlp())),
        reference=array(numbers(1, 6)), rules=lrp.deep_lift(library="jax"),
    )  # fmt: skip
    wrong("a dot_general runs in the body of a while .*test_relevance.py", model=loop)
    wrong("no module 'z' ran and passed on what the target depends on", layers=["a", "z"])
    wrong("layers are paths in a module of Flax or Equinox", model=lambda x: x, layers=["a"])
    wrong("takes a dict of op types", rules=3, layers=["a"])
    wrong('check expected None or "ops", got True', check=True)
    wrong('check="ops" is for runs without a reference', check="ops", reference=jnp.ones((1, 6)))
    with pytest.raises(ArgumentError, match='expected library="torch" or "jax", got \'tf\''):
        lrp.attn_lrp("tf")


# -- what the composites ask of `override` ---------------------------------------------------------


def test_an_optional_name_of_a_function_may_be_in_no_program():
    rules = {"nobody": rg.rules.optional(lambda dy: dy), "Tanh": lambda dy: 7 * dy}
    assert jax.grad(rg.jax.override(jnp.tanh, rules))(0.5) == 7.0
    with pytest.raises(rg.errors.UnknownOpError, match="nobody"):
        jax.grad(rg.jax.override(jnp.tanh, {"nobody": lambda dy: dy}))(0.5)


def test_nth_counts_the_calls_of_all_ops_of_a_key():
    def f(x):
        return jnp.sin(jnp.tanh(jnp.sin(x)))

    rules = {rg.at(None, ("Tanh", "Sin"), nth=1): lambda dy: 7 * dy}
    ours = rg.jax.override(f, rules)
    x = 0.3
    due = math.cos(x) * 7 * math.cos(math.tanh(math.sin(x)))
    close(jax.grad(ours)(x), due)
    assert [(hit.op_type, hit.count) for hit in ours.hits if hit.ran] == [("Tanh", 1)]
