"""Quantizers against formulas by hand, on every library, and the edges of them."""

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from scipy.stats import norm

import regrad as rg
import regrad.jax
import regrad.torch
from regrad.errors import ArgumentError
from regrad.rules import quantize as Q
from regrad.rules.quantize.formats import NF4
from regrad.rules.quantize.rounding import Arithmetic
from tests.helpers.choices import choose
from tests.helpers.quantizer_rows import MINIFLOATS, rows

ROWS = rows()
SHAPE = (3, 2, 8)
SIZES = {"tensor": 48, "channel": 16, "token": 8}  # of a part
X = np.random.default_rng(1).normal(size=SHAPE)

OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)


# -- one call on each library ----------------------------------------------------------------------


def by_regrad(f, arrays, dy):
    given = [rg.tensor(x) for x in arrays]
    value, grads = rg.value_and_grads(f, unconnected="zero")(given, rg.tensor(dy))
    return [x.numpy() for x in (value, *grads)]


def by_torch(f, arrays, dy):
    given = [torch.tensor(x, requires_grad=True) for x in arrays]
    value = f(*given)
    grads = torch.autograd.grad(
        value, given, torch.tensor(dy), allow_unused=True, materialize_grads=True
    )
    return [x.detach().numpy() for x in (value, *grads)]


def by_jax(f, arrays, dy):
    value, pull = jax.vjp(f, *map(jnp.asarray, arrays))
    return [np.asarray(x) for x in (value, *pull(jnp.asarray(dy)))]


HOSTS = {
    "regrad": by_regrad, "torch": by_torch, "jax": by_jax,
    "rg.jit": lambda f, arrays, dy: by_regrad(rg.jit(f), arrays, dy),
    "jax.jit": lambda f, arrays, dy: by_jax(jax.jit(f), arrays, dy),
}  # fmt: skip
ON_TIES = ("affine tie", "affine before")  # whose largest value lies between two codes
MAKERS = {"regrad": rg.tensor, "torch": torch.tensor, "jax": jnp.asarray}


def drawn(row, q, per):
    """The values, the gradient that arrives and the state, in parts, and the answer by hand."""
    rng = np.random.default_rng(0)
    shape = (-1, SIZES.get(per, per))
    v, dy = (rng.normal(size=SHAPE).reshape(shape) for _ in range(2))
    states = [state(rng, v.shape) for state in row.states]
    answer = row.reference(v, dy, *states)
    shapes = [SHAPE, *(x.shape for x in q.first(rg.tensor(v.reshape(SHAPE))).values())]
    given = [np.reshape(x, s) for x, s in zip((v, *states), shapes, strict=True)]
    due = [
        0 if x is None else np.reshape(x, s) for x, s in zip(answer, [SHAPE, *shapes], strict=True)
    ]
    return given, dy.reshape(SHAPE), due


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_those_of_the_paper(name):
    row = ROWS[name]
    for per, host in choose(name, product(row.parts, HOSTS)):
        q = row.make(per)
        given, dy, due = drawn(row, q, per)
        if name in ON_TIES:  # (XLA divides by multiplying, and lands on either side)
            host = "regrad" if host == "rg.jit" else "torch"
        for found, x in zip(HOSTS[host](q, given, dy), due, strict=True):
            np.testing.assert_allclose(found, x + 0 * found, 1e-10, 1e-12, err_msg=f"{per} {host}")


@pytest.mark.parametrize("name", ROWS)
def test_float32_and_less_are_computed_in_float32(name):
    row = ROWS[name]
    for per, host in choose(name, product(row.parts, MAKERS)):
        q, make = row.make(per), MAKERS[host]
        given, _, _ = drawn(row, q, per)
        v, *states = (make(np.float32(x)) for x in given)
        less = cast(v, "bfloat16")
        again = cast(less, "float32")
        value, wide = q(less, *states), q(again, *states)
        assert (value.dtype, q(v, *states).dtype) == (less.dtype, v.dtype)
        narrowed = np.asarray(numbers(wide)).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(
            numbers(value).astype(np.float32), narrowed.astype(np.float32)
        )


def cast(x, dtype):
    return x.to(getattr(torch, dtype)) if isinstance(x, torch.Tensor) else x.astype(dtype)


def numbers(x):
    """An array of any library in NumPy's."""
    if isinstance(x, torch.Tensor):
        x = x.detach().float() if x.dtype == torch.bfloat16 else x.detach()
    return x.numpy() if hasattr(x, "numpy") else np.asarray(x)


def test_a_formula_that_is_wrong_is_found():
    row = ROWS["lsq"]
    given, dy, due = drawn(row, row.make("token"), "token")
    found = by_regrad(Q.lsq(4, per="token", gradient_scale=1.0), given, dy)
    same = [np.allclose(x, y) for x, y in zip(found, due, strict=True)]
    assert same == [True, True, False]


# -- second order ----------------------------------------------------------------------------------


def of_lsq(v, s, dy, a, b):
    """The loss is the sum of dy y^2, and y linear in v and s but at steps: (value, J)."""
    u, f = v / s, (v.size * 7) ** -0.5
    inside = (u >= -8) & (u <= 7)
    code = np.clip(np.rint(u), -8, 7)
    by_v, by_s = 1.0 * inside, f * np.where(inside, np.rint(u) - u, code)
    along = 2 * dy * (by_v * a + by_s * b)
    return by_v * along, (by_s * along).sum()


def of_pact(v, s, dy, a, b):
    by_v, by_s = 1.0 * ((v > 0) & (v < s)), 1.0 * (v >= s)
    along = 2 * dy * (by_v * a + by_s * b)
    return by_v * along, (by_s * along).sum()


def of_approx(v, s, dy, a, b):
    """The value is u + s of sign 1 or -1, its slope 2 - 2|u|, and that of the slope -2 sign(u)."""
    u = v + s
    slope, bend = np.clip(2 - 2 * abs(u), 0, None), -2 * np.sign(u) * (abs(u) < 1)
    y = np.where(u >= 0, 1, -1)
    both = 2 * dy * (slope**2 + y * bend) * (a + b)
    return both, both.sum()


SECOND = {
    "lsq": (Q.lsq(4), of_lsq), "pact": (Q.pact(3), of_pact),
    "approx": (Q.sign("approx", shift=True, per="tensor"), of_approx),
}  # fmt: skip


@pytest.mark.parametrize("name", SECOND)
def test_second_order_is_that_by_hand(name):
    q, by_hand = SECOND[name]
    v, dy, a = np.random.default_rng(2).normal(size=(3, 12))
    s, b = np.float64(0.3), np.float64(0.7)
    due = by_hand(v, s, dy, a, b)

    def by_rg(v, s):
        dv, ds = rg.grads(lambda v, s: rg.sum(dy * q(v, s) ** 2))([v, s])
        return rg.sum(a * dv) + b * ds

    def by_jax(v, s):
        dv, ds = jax.grad(lambda v, s: jnp.sum(dy * q(v, s) ** 2), (0, 1))(v, s)
        return jnp.sum(a * dv) + b * ds

    def by_torch(v, s):
        t = partial(torch.tensor, dtype=torch.float64)
        dv, ds = torch.func.grad(lambda v, s: (t(dy) * q(v, s) ** 2).sum(), (0, 1))(v, s)
        return (t(a) * dv).sum() + b * ds

    found = [
        rg.grads(by_rg)([rg.tensor(v), rg.tensor(s)]), jax.grad(by_jax, (0, 1))(v, s),
        torch.func.grad(by_torch, (0, 1))(torch.tensor(v), torch.tensor(s)),
    ]  # fmt: skip
    for dv, ds in found:
        np.testing.assert_allclose(numbers(dv), due[0], 1e-10, 1e-12)
        np.testing.assert_allclose(numbers(ds), due[1], 1e-10)


# -- axes, state, codes ----------------------------------------------------------------------------

AXED = [name for name, row in ROWS.items() if len(row.parts) > 1]


@pytest.mark.parametrize("name", AXED)
def test_along_says_which_axes_are_channels_and_inputs(name):
    row = ROWS[name]
    for per in choose(name, [p for p in row.parts if p not in ("token", "tensor")]):
        q = row.make(per)
        given, _, _ = drawn(row, q, per)
        v, *states = given
        usual = q(rg.tensor(v), *map(rg.tensor, states)).numpy()
        moved = [np.moveaxis(x, 0, 1) if per == "channel" and x.ndim == 3 else x for x in states]
        if per != "channel":
            moved = [np.moveaxis(x, -1, 0) if x.shape == SHAPE else x for x in states]
        axes = (0, 1) if per == "channel" else (-1, 0)
        found = q.along(1, 0)(torch.tensor(np.moveaxis(v, *axes)), *map(torch.tensor, moved))
        np.testing.assert_allclose(np.moveaxis(found.numpy(), *axes[::-1]), usual, 1e-12)
    assert row.make(4).along(1, 0) != row.make(4)


@pytest.mark.parametrize("name", ROWS)
def test_codes_with_their_scale_and_offset_are_the_value(name):
    row = ROWS[name]
    for per, host in choose(name, product(row.parts, MAKERS)):
        q, make = row.make(per), MAKERS[host]
        v, *states = (make(x) for x in drawn(row, q, per)[0])
        coded = q.coded(v, *states)
        codes, scale = numbers(coded.codes), numbers(coded.scale)
        value = (codes if coded.zero is None else codes - numbers(coded.zero)) * scale
        value = value if coded.offset is None else value + numbers(coded.offset)
        np.testing.assert_array_equal(value.reshape(SHAPE), numbers(q(v, *states)))
        if not re.match("fp8|mx|nvfp4|levels|nf4|power|apot|adaround", name):
            assert np.array_equal(codes, np.rint(codes)) and np.ptp(codes) <= max(2**q.bits - 1, 2)
        assert len(np.unique(codes)) <= 2**q.bits or q.name == "adaround"


def test_states_start_where_the_papers_say():
    v = rg.tensor(np.array([[-3.0, 1.0, 2.0, 2.0]]))
    first = {
        "step": Q.lsq(4).first(v), "offset": Q.lsq_plus(2).first(v), "alpha": Q.pact().first(v),
        "high": Q.affine(range="minmax").first(v), "shift": Q.sign(shift=True).first(v),
    }  # fmt: skip
    due = {"step": 4 / np.sqrt(7), "offset": -3, "alpha": 2, "high": 2, "shift": 0}
    for name, state in first.items():
        np.testing.assert_allclose(state[name].numpy().ravel(), due[name], 1e-12)
    assert first["offset"]["step"].item() == 5 / 3 and first["high"]["low"].item() == -3
    for q in (Q.adaround(4), Q.adaround(4, per=2)):  # it starts at the values themselves
        np.testing.assert_allclose(q(v, **q.first(v)).numpy(), v.numpy(), atol=1e-3)


def test_ranges_follow_what_is_observed():
    for range, low, high in (("minmax", -4, 3), ("ema", -3.25, 2.25)):
        q = Q.affine(range=range, decay=0.75)
        state = q.observed(np.array([-4.0, 0.0]), q.first(np.array([-3.0, 3.0])))
        assert (state["low"].item(), state["high"].item()) == (low, high)


# -- floating-point formats, tables ----------------------------------------------------------------


@pytest.mark.parametrize("format", MINIFLOATS)
@pytest.mark.parametrize("host", MAKERS)
def test_minifloats_are_those_of_ml_dtypes(format, host):
    """Every number of the format, what lies between two, on both sides of it, and beyond."""
    kind, form = MINIFLOATS[format], Q.quantizers.FORMATS[format]
    every = np.arange(2**form.bits, dtype=np.uint8).view(kind).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    assert every.max() == form.largest
    ties = (every[1:] + every[:-1]) / 2
    sides = [np.nextafter(ties, np.float32(to)) for to in (-np.inf, np.inf)]
    u = np.concatenate([every, ties, *sides, [form.largest * 1.01, -1e30, 1e-30, 0]])
    u = u.astype(np.float32)
    like = MAKERS[host](u)
    found = numbers(Arithmetic(like).as_float(like, form))
    due = np.clip(u, -form.largest, form.largest).astype(kind).astype(np.float32)
    np.testing.assert_array_equal(found, due)


def test_normal_float_is_of_quantiles_of_a_normal_distribution():
    """Dettmers et al. (2023), as bitsandbytes computes it."""
    up, down = (norm.ppf(np.linspace(0.9677083, 0.5, n)[:-1]) for n in (9, 8))
    table = np.sort([*up, 0, *-down])
    np.testing.assert_allclose(NF4, table / table.max(), atol=2e-6)


# -- edges -----------------------------------------------------------------------------------------

STATELESS = [n for n, r in ROWS.items() if not r.states and n != "sign identity"]


@pytest.mark.parametrize("name", STATELESS)
def test_edges_are_finite(name):
    row = ROWS[name]
    for per, host in choose(name, product(row.parts, MAKERS)):
        q, make = row.make(per), MAKERS[host]
        some = np.float32(X)
        some[1] = 0  # a channel of zeros
        some[2, 1] = -0.25  # a token of one value
        for v in (0 * some, some, some * 2**-140, some * 1e36, 0 * some - 3):
            found = numbers(q(make(v)))
            assert np.isfinite(found).all()
            if q.name not in ("sign", "dorefa"):
                assert (found[v == 0] == 0).all()
                assert abs(found).max() <= 1.2 * abs(v).max()
        empty = make(np.zeros((0, 8), np.float32))
        assert tuple(q(empty).shape) == (0, 8)


TIES = [  # half to even, or the smaller level; the bound belongs to what is inside
    (Q.affine(4), [0.5, 1.5, 2.5, -0.5, -1.5, 7], [0, 2, 2, 0, -2, 7]),
    (Q.affine(3, largest="tie"), [3.5, 2.5, -3.5], [3, 2, -4]),
    (Q.levels([-1, 0, 1]), [0.5, -0.5, 1], [0, -1, 1]),
    (Q.sign(), [0.0, -0.0, -1e-30], [1, 1, -1]),
    (Q.absmean(), [1.0, 1.0, 1.0], [1, 1, 1]),
    (Q.ternary(1.0), [2.0, -2.0, 2.0], [0, 0, 0]),
]


@pytest.mark.parametrize(("q", "v", "due"), TIES)
def test_ties(q, v, due):
    for make in MAKERS.values():
        assert numbers(q(make(np.array(v)))).tolist() == due


def test_a_zero_point_takes_no_bits_of_what_is_rounded():
    """12.500001 and a zero point of 128 have the sum 140.5 in float32, and 13 is nearer."""
    q = Q.affine(8, signed=False, symmetric=False, range="minmax")
    for make in MAKERS.values():
        state = {"low": make(np.float32(-128)), "high": make(np.float32(127))}
        assert numbers(q(make(np.float32(12.500001)), **state)) == 13


def test_bounds_belong_to_what_passes():
    s, v = np.array(1.0), np.array([-8.0, -8.25, 7.0, 7.25, 7.75])
    for clip, due in (("before", [1, 0, 1, 0, 0]), ("after", [1, 1, 1, 1, 0])):
        assert by_torch(Q.lsq(4, clip=clip), [v, s], np.ones(5))[1].tolist() == due
    assert by_regrad(Q.sign(), [np.array([-1.0, 1.0, 1.1])], np.ones(3))[1].tolist() == [1, 1, 0]


# -- transforms and compilers ----------------------------------------------------------------------


@pytest.mark.skipif(OLD, reason="PyTorch 2.10 traces no quantizer by itself")
@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", [n for n in ROWS if "ewgs" not in n])
def test_torch_compiles_it_whole(name):
    row = ROWS[name]
    for per in choose(name, row.parts):
        q = row.make(per)
        given, dy, due = drawn(row, q, per)
        torch.compiler.reset()
        compiled = torch.compile(
            lambda *xs, q=q: q(*xs), fullgraph=True, dynamic=False, backend="aot_eager"
        )
        for found, x in zip(by_torch(compiled, given, dy), due, strict=True):
            np.testing.assert_allclose(found, x + 0 * found, 1e-10, 1e-12)


VMAPPED = [n for n in ROWS if "token" in ROWS[n].parts and n not in ON_TIES]


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("name", VMAPPED)
def test_vmap_over_tokens_is_the_same(name):
    """A quantizer by the token, of rows, is that of the whole."""
    q = ROWS[name].make("token")
    given, _, _ = drawn(ROWS[name], q, "token")
    whole = numbers(q(*map(torch.tensor, given)))
    vmaps = {"torch": torch.func.vmap, "jax": jax.vmap, "regrad": rg.vmap}
    for host, vmap in vmaps.items():
        found = vmap(vmap(q))(*(MAKERS[host](x) for x in given))
        np.testing.assert_allclose(numbers(found), whole, 1e-12, err_msg=host)


# -- as data, and misuse ---------------------------------------------------------------------------


def test_equal_quantizers_are_equal():
    assert Q.lsq(4) == Q.lsq(4) == Q.lsq() == Q.lsq(bits=4)
    assert len({Q.lsq(4), Q.lsq(), Q.lsq(3), Q.lsq(4, per=4)}) == 3
    assert Q.levels([0, 1]) == Q.levels((0.0, 1.0)) != Q.levels([0, 2])
    assert len({Q.levels([0, 1]), Q.levels(np.array([0, 1]))}) == 1
    assert Q.lsq(4) != Q.ewgs(4) and Q.lsq(4).along(0, 0) != Q.lsq(4)


def test_repr_is_the_call():
    calls = ["lsq(bits=4, per='channel')", "affine(bits=8)", "nf4()", "sign(scale=True)",
             "mx(format='fp4_e2m1', per=16)", "levels(table=(-1.0, 0.5))"]  # fmt: skip
    for call in calls:
        assert repr(eval(f"Q.{call}")) == call


V = np.ones((2, 6))
MISUSE = [
    (lambda: Q.lsq(4)(V), "lsq(bits=4) takes v, step, and got 0 arrays after v and the names []. "
     "lsq(bits=4).first(v) returns initial values."),
    (lambda: Q.affine()(V, V), "affine() takes v, and got 1 arrays"),
    (lambda: Q.lsq(4)(V, 1.0, step=2.0), "got 1 arrays after v and the names ['step']"),
    (lambda: Q.lsq(4)(V, stp=1.0), "the names ['stp']. Did you mean 'step'?"),
    (lambda: Q.affine()(np.arange(3)), "affine() expected floats, got Tensor(int64, (3,))"),
    (lambda: Q.affine()(torch.arange(3)), "affine() expected floats, got"),
    (lambda: Q.affine(per=4)(V), "affine(per=4): groups of 4 do not fit an axis of 6 "
     "(the shape (2, 6), axis -1)"),
    (lambda: Q.affine(per="channel").along(2, 1)(V), "expected an array with an axis 2, got"),
    (lambda: Q.affine(per=2).along(0, 5)(V), "expected an array with an axis 5, got"),
    (lambda: Q.mx()(np.float32(1)), "expected an array with an axis -1, got"),
    (lambda: Q.lsq(clip="befor"), "lsq: expected clip to be one of 'before', 'after', 'straight', "
     "got 'befor'. Did you mean 'before'?"),
    (lambda: Q.affine(largest="levels"),
     "expected largest to be one of 'level', 'tie', got 'levels'"),
    (lambda: Q.affine(range="static"),
     "expected range to be one of 'dynamic', 'minmax', 'ema', got"),
    (lambda: Q.dorefa(of="weight"), "expected of to be one of 'weights', 'inputs', got 'weight'"),
    (lambda: Q.fp8("e4m3"), "fp8: expected format to be one of 'fp8_e4m3', "),
    (lambda: Q.sign("aprox"), "sign: expected estimator to be one of 'identity', 'clip', 'approx', "
     "'swish', 'tanh', got 'aprox'. Did you mean 'approx'?"),
    (lambda: Q.lsq(per="row"), "lsq: expected per to be 'tensor', 'channel', 'token' or the size "
     "of groups, got 'row'"),
    (lambda: Q.lsq(per=0), "or the size of groups, got 0"),
    (lambda: Q.lsq(per=True), "or the size of groups, got True"),
    (lambda: Q.lsq(0), "lsq: expected bits to be an int from 1 to 16, got 0"),
    (lambda: Q.lsq(17), "got 17"), (lambda: Q.lsq(4.0), "got 4.0"),
    (lambda: Q.lsq(1), "signed codes of 1 bit have no positive code: expected bits to be 2 or "
     "more, or signed=False; sign() quantizes to -1 and 1"),
    (lambda: Q.power_of_two(6, additive=True), "sums are available for 3, 4 and 5 bits, got 6"),
    (lambda: Q.power_of_two(1), "power_of_two: expected bits to be an int from 2 to 8, got 1"),
    (lambda: Q.levels([1.0, 0.0]), "levels expected two or more ascending numbers, got [1.0, 0.0]"),
    (lambda: Q.levels([1.0]), "levels expected two or more ascending numbers, got [1.0]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), MISUSE, ids=[w for _, w in MISUSE])
def test_misuse_is_refused_in_words(call, words):
    with pytest.raises(ArgumentError, match=re.escape(words)):
        call()
