"""Callables that hide overridden ops: torch's own values, and the gradients of the parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from regrad.errors import PassedOverError
from regrad.torch import intercepts
from tests.campaigns.torch_samples import INSIDE, Call, cases, load
from tests.helpers.torch_calls import IMAGE, X, both
from tests.torch import ways
from tests.torch.common import D, close, grad, override, under
from tests.torch.ways import WAYS, total

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def gradients(case: Any, rules: dict[str, Any] | None) -> tuple[list[Any], list[Any]]:
    """Results of a sample, and the gradients by its leaves."""
    call = Call(case)
    run = call.ready()
    with override(rules) if rules else nullcontext():
        ys = [y for y in tree_leaves(run()) if isinstance(y, torch.Tensor)]
    wanted = [y for y in ys if y.requires_grad]
    if not wanted or not call.xs:
        return ys, []
    dys = [y.detach().cos() for y in wanted]
    return ys, list(torch.autograd.grad(wanted, call.xs, dys, allow_unused=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", INSIDE)
def test_all_of_torchs_samples(name):
    """The value to the bit; and under regrad's own rule, torch's gradient."""
    for case in cases(load()[name]):
        try:
            values, theirs = gradients(case, None)
        except (RuntimeError, IndexError):
            continue  # torch itself has no such gradient
        for op_type in INSIDE[name].split():
            try:
                found, ours = gradients(case, {op_type: op_type})
            except PassedOverError as error:
                assert "changes the shape of its tensor in place" in str(error)
                continue
            for y, value in zip(found, values, strict=True):
                assert (y.dtype == value.dtype and torch.equal(y, value)) or y.isnan().any(), case
            for dx, their in zip(ours, theirs, strict=True):
                torch.testing.assert_close(zero(dx, their), zero(their, dx), equal_nan=True)


def zero(x: Any, like: Any) -> Any:
    return torch.zeros_like(like) if x is None and like is not None else x


# -- special values: against torch, to the bit and beyond where spellings break down ---------------

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32, D)


def attended(**options: Any) -> Callable[..., Any]:
    return lambda x: F.scaled_dot_product_attention(x, x, x, **options)


def masked(mask: Any) -> Callable[..., Any]:
    return lambda x: attended(attn_mask=mask if mask.dtype == torch.bool else mask.to(x.dtype))(x)


CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
ONE_ROW = CAUSAL & torch.tensor([[True], [True], [False], [True], [True]])
ATTENTION: dict[str, Callable[..., Any]] = {
    "no mask": attended(),
    "is_causal": attended(is_causal=True),
    "scale": attended(scale=0.3),
    "causal": masked(CAUSAL),
    "a row is masked": masked(ONE_ROW),
    "a bias": masked(torch.zeros(5, 5).masked_fill(~ONE_ROW, -math.inf)),
    "all": masked(torch.zeros_like(CAUSAL)),
    "enable_gqa": lambda x: F.scaled_dot_product_attention(
        torch.cat([x, x], 1), x, x, enable_gqa=True
    ),
    "dropout": lambda x: seeded(attended(dropout_p=0.5), x),
    "dropout and mask": lambda x: seeded(attended(dropout_p=0.5, is_causal=True), x),
}  # fmt: skip


def seeded(f: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(3)
    return f(*args)


@pytest.mark.parametrize("op_type", ["Softmax", "MatMul"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, dtype, op_type):
    torch.manual_seed(0)
    for size in (1, 200):  # 200² is beyond float16
        x = (torch.randn(2, 2, 5, 4) * size).to(dtype)
        value, their, y, dx = both(ATTENTION[name], x, {op_type: op_type})
        assert torch.equal(y, value) or ("dropout" in name and torch.allclose(y, value))
        tolerance = 4e-2 if dtype in HALF else 1e-4
        torch.testing.assert_close(dx, their, rtol=tolerance, atol=tolerance * size**1.5)


def test_masked_scores_are_a_bias():
    """A rule that is not 0 where the weight is: as in attention that is written out with a bias."""

    def written(x):
        scores = x @ x.mT / 2 + torch.zeros(5, 5, dtype=D).masked_fill(~CAUSAL, -math.inf)
        return torch.softmax(scores, -1) @ x

    through = {"Softmax": lambda dy: dy}
    x = torch.randn(2, 2, 5, 4, dtype=D)
    _, _, _, dx = both(ATTENTION["is_causal"], x, through)
    _, _, _, expected = both(written, x, through)
    torch.testing.assert_close(dx, expected)


LOGITS = [-1e4, -120.0, -30.0, -15.5, -1.0, 0.0, 0.5, 14.0, 30.0, 120.0, 1e4]
WEIGHTS = {"weight": torch.tensor(0.3, dtype=D), "pos_weight": torch.tensor(2.5, dtype=D)}
SIGMOIDS: dict[str, Callable[..., Any]] = {
    "logsigmoid": F.logsigmoid,
    "nn.LogSigmoid": nn.LogSigmoid(),
    "-logsigmoid(-x)": lambda x: -F.logsigmoid(-x),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x * 1, inplace=True),
    "glu": lambda x: F.glu(torch.stack([x.flip(0), x]), 0),
    "multilabel": lambda x: F.multilabel_soft_margin_loss(x[None], (x > 0).to(x.dtype)[None]),
    **{
        f"bce {target} {given} {reduction}": (
            lambda x, t=target, g=given, r=reduction: F.binary_cross_entropy_with_logits(
                x, torch.full_like(x, t), reduction=r, **{n: WEIGHTS[n].to(x.dtype) for n in g}
            )
        )
        for target in (0.0, 0.3, 1.0)
        for given in ((), ("weight",), ("pos_weight",), ("weight", "pos_weight"))
        for reduction in ("none", "mean", "sum")
    },
    "bce module": lambda x: nn.BCEWithLogitsLoss()(x, torch.ones_like(x)),
    "bce old": lambda x: F.binary_cross_entropy_with_logits(x, x * 0, size_average=False),
    "bce of torch": lambda x: torch.binary_cross_entropy_with_logits(x, x.detach() * 0 + 1),
    "bce of aten": lambda x: torch.ops.aten.binary_cross_entropy_with_logits(x, x * 0 + 1),
    "bce by target": lambda x: F.binary_cross_entropy_with_logits(x.detach(), x),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SIGMOIDS)
def test_sigmoids_far_out(name, dtype):
    """Where sigmoid, or 1 less it, is 0, as well."""
    x = torch.tensor(LOGITS).clamp(-3e4, 3e4).to(dtype)
    value, their, y, dx = both(SIGMOIDS[name], x, {"Sigmoid": "Sigmoid"})
    assert torch.equal(y, value)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 2e-6)
    torch.testing.assert_close(dx, their, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_surrogate_of_sigmoid_is_divided_by_sigmoid(sign):
    f = lambda x: F.logsigmoid(sign * x)  # noqa: E731
    x = torch.tensor([-3.0, 0.5, 2.0], dtype=D)
    _, _, _, dx = both(f, x, {"Sigmoid": lambda dy: dy})
    _, _, _, expected = both(lambda x: f(x).exp().log(), x, {})
    y = torch.sigmoid(sign * x)
    torch.testing.assert_close(dx, sign * y.log().cos() / y)
    assert not torch.allclose(dx, expected)


INDEX, WEIGHT = torch.tensor([1, -100, 3, 0]), torch.tensor([0.5, 2.0, 0.1, 1.0], dtype=D)
SHARES = torch.rand(4, 4, dtype=D, generator=torch.Generator().manual_seed(0))
TARGETS: dict[str, dict[str, Any]] = {
    "indices": {"target": INDEX.clamp(min=0)},
    "ignored": {"target": INDEX},
    "ignore_index": {"target": INDEX.clamp(min=0), "ignore_index": 0},
    "weight": {"target": INDEX, "weight": WEIGHT},
    "smoothing": {"target": INDEX, "label_smoothing": 0.2},
    "smoothing and weight": {"target": INDEX, "weight": WEIGHT, "label_smoothing": 0.2},
    "probabilities": {"target": SHARES, "weight": WEIGHT},
    "smooth probabilities": {"target": SHARES, "label_smoothing": 0.2},
    "all ignored": {"target": torch.full((4,), -100), "label_smoothing": 0.2},
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", TARGETS)
def test_cross_entropy(name, reduction):
    options = {**TARGETS[name], "reduction": reduction}
    torch.manual_seed(0)
    x = torch.randn(4, 4, dtype=D)
    masked = x.masked_fill(torch.eye(4, dtype=torch.bool).roll(1, 0), -math.inf)
    for given in (x, x * 200, masked):
        value, their, y, dx = both(
            lambda x: F.cross_entropy(x, **options), given, {"LogSoftmax": "LogSoftmax"}
        )
        assert torch.allclose(y, value, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(dx, their, equal_nan=True)


NAN = torch.full((3, 3), math.nan, dtype=D)
ADDED: dict[str, Callable[..., Any]] = {
    "addmm": lambda x: torch.addmm(NAN, x, x, beta=0),
    "addmm by name": lambda x: torch.addmm(input=NAN, mat1=x, mat2=x, beta=0, alpha=2),
    "method": lambda x: x.addmm(mat1=x, mat2=x.mT, beta=2),
    "in place": lambda x: (x * 2).addmm_(x, x, beta=0.5),
    "in place, ignored": lambda x: NAN.clone().addmm_(x, x, beta=0),
    "addmv": lambda x: torch.addmv(NAN[0], x, x[0], beta=0),
    "addmv by name": lambda x: torch.addmv(x[0], mat=x, vec=x[1], alpha=3),
    "baddbmm": lambda x: torch.baddbmm(NAN[None], x[None], x[None].mT, beta=0),
    "baddbmm by name": lambda x: torch.baddbmm(x[None], batch1=x[None], batch2=x[None]),
    "addbmm": lambda x: torch.addbmm(NAN, torch.stack([x, x]), torch.stack([x, x]), beta=0),
    "input": lambda x: torch.addmm(x, NAN.nan_to_num(), NAN.nan_to_num(), beta=0),
    "einsum in lists": lambda x: torch.einsum(x, [0, 1], x, [2, 1], [2, 0]),
    "sparse": lambda x: torch.sparse.mm(torch.eye(3, dtype=D).to_sparse(), x),
    "sparse, added": lambda x: torch.sparse.addmm(x, torch.eye(3, dtype=D).to_sparse(), x),
}


@pytest.mark.parametrize("name", ADDED)
def test_products(name):
    x = torch.randn(3, 3, dtype=D)
    value, their, y, dx = both(ADDED[name], x, {"MatMul": "MatMul"})
    assert torch.equal(y, value)
    torch.testing.assert_close(dx, their)


SEVEN = {"MatMul": lambda dy, a, b: (7 * dy @ b.mT, 7 * a.mT @ dy)}


@pytest.mark.parametrize("f", [
    lambda *xs: torch.linalg.multi_dot(xs), torch.chain_matmul,
    lambda *xs: torch.einsum("ij,jk,kl->il", *xs),
], ids=["multi_dot", "chain_matmul", "einsum"])  # fmt: skip
def test_how_products_associate(f):
    """Each operand passes as many rules as torch has products behind it."""
    xs = [torch.rand(s, dtype=D, requires_grad=True) for s in ((2, 9), (9, 3), (3, 8))]
    theirs = torch.autograd.grad(f(*xs).sum(), xs)
    ours = under(SEVEN, lambda: torch.autograd.grad(f(*xs).sum(), xs))
    close(ours, [k * dx for k, dx in zip((49, 49, 7), theirs, strict=True)])


def test_experts():
    torch.manual_seed(0)
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(2, 8, 8).bfloat16()
    offs = torch.tensor([1, 4], dtype=torch.int32)
    for f, leaf in (
        (lambda x: torch._grouped_mm(x, w, offs), x),
        (lambda w: torch._grouped_mm(x, w, offs), w),
        (lambda x: torch._grouped_mm(x.expand(2, 4, 8), w), x),
    ):
        value, their, y, dx = both(f, leaf, SEVEN)
        assert torch.equal(y, value)
        torch.testing.assert_close(dx, 7 * their, rtol=2e-2, atol=2e-2)


# -- recurrent layers ------------------------------------------------------------------------------

LAYERS = {
    "RNN": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "GRU": nn.GRU, "LSTM": nn.LSTM, "projected": lambda *a, **k: nn.LSTM(*a, proj_size=2, **k),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "two": {"num_layers": 2, "bidirectional": True}, "no bias": {"bias": False},
    "batch first": {"batch_first": True, "bidirectional": True},
    "dropout": {"num_layers": 3, "dropout": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_recurrent_layers(kind, options, packed):
    torch.manual_seed(0)
    layer = LAYERS[kind](3, 4, **OPTIONS[options]).double()
    x = torch.randn(4, 3, 3, dtype=D)
    first = OPTIONS[options].get("batch_first", False)
    act = {"relu": "Relu"}.get(kind, "Tanh")

    def run(x):
        torch.manual_seed(1)
        if packed:
            lengths = [min(n, x.shape[first]) for n in ([2, x.shape[1 - first], 1, 3])]
            lengths = lengths[: x.shape[not first]]
            y, state = layer(nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=first, enforce_sorted=False
            ))  # fmt: skip
            y = y.data
        else:
            y, state = layer(x)
        states = state if isinstance(state, tuple) else (state,)
        return torch.cat([each.flatten() for each in (y, *states)])

    gates = ["Sigmoid", "Mul"] if kind in ("GRU", "LSTM", "projected") else []
    for op_type in (act, "MatMul", *gates):
        value, their, y, dx = both(run, x, {op_type: op_type})
        assert torch.equal(y, value) or (options == "dropout" and torch.allclose(y, value))
        torch.testing.assert_close(dx, their)


# -- torch's ways, and others ----------------------------------------------------------------------

LSTM = nn.LSTM(4, 3, 2, bidirectional=True).double()
CALLS: dict[str, tuple[str, Callable[..., Any], Any]] = {
    "linear": ("MatMul", lambda x: F.linear(x, x, x[:, 0]), X),
    "addmm": ("MatMul", lambda x: torch.addmm(x[0, :3], x, x.mT, beta=2), X),
    "einsum": ("MatMul", lambda x: torch.einsum("ij,kj,lj->il", x, x, x), X),
    "attention": ("Softmax", lambda x: F.scaled_dot_product_attention(x, x, x), IMAGE),
    "cross_entropy": ("LogSoftmax", lambda x: F.cross_entropy(x, torch.tensor([1, 0, 3])), X),
    "bce": ("Sigmoid", lambda x: F.binary_cross_entropy_with_logits(x, x.detach().abs()), X),
    "logsigmoid": ("Sigmoid", F.logsigmoid, X),
    "silu": ("Sigmoid", F.silu, X),
    "silu in place": ("Sigmoid", lambda x: F.silu(x * 1, inplace=True) * 2, X),
    "mish": ("Tanh", F.mish, X),
    "hardswish": ("Relu6", F.hardswish, X),
    "max": ("Max", lambda x: torch.max(x, 1)[0], X),
    "aminmax": ("Max", lambda x: torch.aminmax(x, dim=1).max, X),
    "add": ("AddV2", lambda x: torch.add(x, x, alpha=3), X),
    "hstack": ("ConcatV2", lambda x: torch.hstack([x, x * 2]), X),
    "outer": ("Mul", lambda x: torch.outer(x[0], x[1]), X),
    "lstm": ("Tanh", lambda x: LSTM(x[:, None])[0], X),
    "softmax without dim": ("Softmax", F.softmax, X),
}


def squared(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: f(x).square()


def first(f: Callable[..., Any], x: Any) -> Any:
    return ways.plain(squared(f), x.clone().requires_grad_())


def both_of(x: Any) -> Any:
    return torch.stack([x, x + 1])


def dual(f: Callable[..., Any], x: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


func = torch.func
OTHER_WAYS: dict[str, Callable[..., Any]] = {
    "vmap of grad": lambda f, x: func.vmap(func.grad(total(f)))(both_of(x)),
    "grad of vmap": lambda f, x: func.grad(lambda a: func.vmap(f)(a).sum())(both_of(x)),
    "jvp": lambda f, x: func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "dual": dual,
}


def along(way: str, f: Callable[..., Any], x: Any) -> Any:
    if way in OTHER_WAYS:
        return OTHER_WAYS[way](squared(f), x)
    return WAYS[way](squared(f), x.clone().requires_grad_())


def own_rule(op: Any, grad: Any) -> Any:
    """A rule that is no op's: it depends on the inputs, and on what arrives."""
    found = [
        x.nan_to_num(neginf=0) * grad.mean() + 0.1 if isinstance(x, torch.Tensor) else None
        for x in op.inputs
    ]
    return found[0] if len(found) == 1 else found


@pytest.mark.slow(but=1)
@pytest.mark.versions
@pytest.mark.parametrize("name", CALLS)
def test_torchs_ways(name):
    """Under our own rule they give what they give without; under another, the same everywhere."""
    op_type, f, x = CALLS[name]
    wished = under({op_type: own_rule}, lambda: first(f, x))
    with suppress(NotImplementedError, RuntimeError):  # torch has no gradient (aminmax before 2.12)
        assert not torch.allclose(wished, first(f, x))
    for way in {**WAYS, **OTHER_WAYS}:
        try:
            plain = along(way, f, x)
        except Exception:
            continue  # torch cannot: flash attention has no second derivative, LSTM no vmap
        with override({op_type: op_type}) as used:
            found = along(way, f, x)
        assert used.hits, way
        torch.testing.assert_close(found, plain, msg=lambda m, way=way: f"{way}: {m}")
        if way in ("func.grad", "checkpoint", "compile eager", "compile aot_eager"):
            with override({op_type: own_rule}):
                torch.testing.assert_close(along(way, f, x), wished)


BY_COMPILER = {
    "relu_": ("Relu", lambda x: torch.relu_(x * 1)), "exp_": ("Exp", lambda x: torch.exp_(x * 1)),
    "_nn.silu": ("Sigmoid", torch._C._nn.silu), "hardsigmoid": ("Relu6", F.hardsigmoid),
    "relu6 in place": ("Relu6", lambda x: F.relu6(x * 1, True)),
    "sigmoid_": ("Sigmoid", lambda x: torch.sigmoid_(x * 1)), "rsub": ("Sub", lambda x: 2 - x),
    "2 / x": ("RealDiv", lambda x: 2 / x), "of 2 / x": ("Reciprocal", lambda x: 2 / x),
    "2**x": ("Pow", lambda x: 2**x), "alpha": ("AddV2", lambda x: torch.add(x, x, alpha=2)),
    "hardtanh": ("Relu6", lambda x: F.hardtanh(x, 0, 6)),
}  # fmt: skip


@pytest.mark.slow(but=6)
@pytest.mark.versions
@pytest.mark.parametrize("name", BY_COMPILER)
def test_the_compiler_asks_about_all(name):
    op_type, f = BY_COMPILER[name]
    with override({op_type: own_rule}):
        wished = first(f, X)
        for backend in ("eager", "aot_eager"):
            program = ways.compile_afresh(f, backend=backend)
            torch.testing.assert_close(first(program, X), wished)
    assert not torch.allclose(wished, first(f, X))


@pytest.mark.parametrize("name", CALLS)
def test_without_a_gradient(name):
    op_type, f, x = CALLS[name]
    with torch.no_grad(), override({op_type: op_type}) as used:
        assert torch.equal(f(x), f(x.clone()))
        y = f(x)
    assert used.hits and all(__file__ in hit.where for hit in used.hits)
    assert torch.equal(y, f(x))


def test_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    for op_type in ("MatMul", "Sigmoid"):
        with torch.autocast("cpu", torch.bfloat16):
            value, their, y, dx = both(model, x, {op_type: op_type})
        assert y.dtype == value.dtype and torch.equal(y, value)
        torch.testing.assert_close(dx, their, rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("more", [{}, {"AddV2": own_rule}, {"Mul": own_rule, "Reshape": own_rule}])
def test_what_is_not_listed_is_torchs(more):
    """Other keys do not change what a call means: bias, scale and layout are nobody's.

    (The gates of an LSTM are products, as its formula says.)
    """
    for name in ("linear", "addmm", "attention", *(["lstm"] if "Mul" not in more else [])):
        op_type, f, x = CALLS[name]
        with override({op_type: own_rule}):
            expected = first(f, x)
        with override({op_type: own_rule, **more}):
            y = f(leaf := x.clone().requires_grad_())
        assert torch.equal(torch.autograd.grad(y, leaf, y.detach() * 2)[0], expected)
        with override(more) if more else nullcontext():
            y = f(leaf) if name != "addmm" else leaf
        assert torch.equal(y, f(leaf) if name != "addmm" else leaf)


def test_scopes_nest():
    seven, two = {"MatMul": lambda dy, a, b: (7 * dy @ b.mT, None)}, {"Softmax": lambda dy: 2 * dy}
    x = IMAGE.clone().requires_grad_()
    found = []
    for outer, inner in ((seven, two), (two, seven), ({}, {**seven, **two})):
        with override(outer) if outer else nullcontext(), override(inner):
            y = F.scaled_dot_product_attention(x, x.detach(), x.detach())
        found.append(grad(y, x))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_functions_that_were_replaced_are_called(monkeypatch):
    """Names in torch.nn.functional are looked up when they are used."""
    attention = nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 1, 4)
    for value in (1.0, 2.0):
        fake = lambda q, k, v, *args, value=value: torch.full_like(q, value)  # noqa: E731
        monkeypatch.setattr(F, "scaled_dot_product_attention", fake)
        expected = attention(x, x, x, need_weights=False)[0]
        with override({"Sign": "Sign"}):
            assert torch.equal(attention(x, x, x, need_weights=False)[0], expected)


def test_a_replayed_graph_must_have_been_captured_under_the_rules(monkeypatch):
    class Graph:
        capture_begin = intercepts._intercept_capture(lambda self: None)
        replay = intercepts._intercept_replay(lambda self: replayed.append(self))

    replayed = []
    rules, graph, plain = {"Relu": lambda dy: dy}, Graph(), Graph()
    x = torch.ones(3, requires_grad=True)
    with override(rules):
        graph.capture_begin()
        graph.replay()
        torch.relu(x)
        with pytest.raises(PassedOverError, match="a CUDA graph is replayed"):
            plain.replay()
        with override({"Tanh": lambda dy: dy}):
            torch.tanh(x)
            with pytest.raises(PassedOverError, match="a CUDA graph is replayed"):
                graph.replay()
    with override(rules):
        torch.relu(x)
        graph.replay()
    graph.replay()
    plain.replay()
    assert replayed == [graph, graph, graph, plain]
