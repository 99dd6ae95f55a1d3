"""Spikes that programs write as a comparison and a cast: the key "Threshold"."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import PassedOverError, UnusedOverrideWarning
from tests.helpers.choices import choose
from tests.torch.common import D, override

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning",
        "ignore::FutureWarning",
        "ignore:.*should not be instantiated:DeprecationWarning",  # PyTorch 2.13, in Dynamo
    ),
    pytest.mark.usefixtures("fresh"),
]
TRIANGLE = rg.rules.triangle(1.0)
POINTS = [-0.4, 0.1, 0.3, 0.9, 2.0]
WEIGHTS = torch.arange(1.0, 6.0, dtype=D)


@pytest.fixture
def fresh():
    torch.compiler.reset()


SPELLINGS = {
    "float": lambda v, a: (v > a).float(),
    "double": lambda v, a: (v > a).double(),
    "half": lambda v, a: (v > a).half(),
    "bfloat16": lambda v, a: (v > a).bfloat16(),
    "to_dtype": lambda v, a: (v > a).to(v.dtype),
    "to_keyword": lambda v, a: torch.gt(v, other=a).to(dtype=torch.float32),
    "to_other": lambda v, a: (v > a).to(v),
    "to_device": lambda v, a: (v > a).to("cpu", torch.float64),
    "type_as": lambda v, a: torch.gt(v, a).type_as(v),
    "type": lambda v, a: v.gt(a).type(torch.float64),
    "ge": lambda v, a: (v >= a).double(),
    "method_ge": lambda v, a: v.greater_equal(a).double(),
    "lt": lambda v, a: (a < v).double(),
    "le": lambda v, a: torch.le(a, v).double(),
    "less": lambda v, a: torch.less(a, v).to(v.dtype),
    "greater": lambda v, a: torch.greater(v, a).to(v.dtype),
    "aten": lambda v, a: torch.ops.aten.gt.Tensor(v, a).double(),
    "where": lambda v, a: torch.where(v > a, 1.0, 0.0),
    "where_of_integers": lambda v, a: torch.where(v > a, 1, 0).double(),
    "where_turned": lambda v, a: torch.where(v <= a, 0.0, 1.0),
    "by_integers": lambda v, a: (v > a).int().to(v.dtype),
    "by_bytes": lambda v, a: (v > a).to(torch.uint8).float(),
    "expression": lambda v, a: ((v - a) > 0).to(v.dtype),
    "learned_by_number": lambda v, a: (v - a > 0.0).to(v.dtype),
}
RUNS = {
    "eager": lambda f: f,
    "aot_eager": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
    "checkpoint": lambda f: lambda *xs: checkpoint(f, *xs, use_reentrant=False),
    "twice": lambda f: lambda *xs: (f(*xs), f(*xs))[1],
}


def same(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def triangle_at(x):
    return (1 - x.abs()).clamp(min=0)


def leaf(values):
    return torch.tensor(values, dtype=D, requires_grad=True)


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_has_the_rule(name):
    for way in ("eager", *choose(name, [way for way in RUNS if way != "eager"])):
        check_spelling(SPELLINGS[name], way)


def check_spelling(f, way):
    v, a = leaf(POINTS), leaf(0.3)
    with override({"Threshold": TRIANGLE}) as used:
        y = RUNS[way](f)(v, a)
        (y.double() * WEIGHTS).sum().backward()
    used.assert_fired()
    with torch.no_grad():
        expected = f(v, a)
        slope = WEIGHTS * triangle_at(v - a)
    assert y.dtype is expected.dtype
    assert torch.equal(y, expected)
    same(v.grad, slope)
    same(a.grad, -slope.sum())


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_two_numbers_scale_the_gradient(way):
    def f(v, a):
        return torch.where(v > a, 2.5, -0.5)

    v, a = leaf(POINTS), leaf(0.3)
    with override({"Threshold": TRIANGLE}):
        y = RUNS[way](f)(v, a)
        y.sum().backward()
    assert torch.equal(y, f(v.detach(), a.detach()))
    same(v.grad, 3 * triangle_at(v.detach() - 0.3))


def test_thresholds_broadcast():
    v, a = leaf([POINTS, POINTS]), leaf([[0.1], [0.5]])
    with override({"Threshold": TRIANGLE}):
        (v > a).to(v.dtype).sum().backward()
    slope = triangle_at(v.detach() - a.detach())
    same(v.grad, slope)
    same(a.grad, -slope.sum(1, keepdim=True))


def test_numbers_and_other_dtypes_compare():
    half = torch.tensor(POINTS, dtype=torch.bfloat16, requires_grad=True)
    with override({"Threshold": TRIANGLE}):
        (half > 0.25).float().sum().backward()
    assert half.grad.dtype is torch.bfloat16
    same(half.grad.double(), triangle_at(half.detach().double() - 0.25), 1e-2)


@pytest.mark.parametrize(("compare", "at_zero"), [
    (torch.gt, 0.0), (torch.ge, 1.0), (torch.lt, 0.0), (torch.le, 1.0),
])  # fmt: skip
def test_the_rule_reads_the_value(compare, at_zero):
    v, sign = leaf([-1.0, 0.0, 1.0]), 1 if compare in (torch.gt, torch.ge) else -1
    with override({"Threshold": lambda dy, x, y: dy * (x + 10 * y)}):
        compare(v, 0.0).to(v.dtype).sum().backward()
    steps = torch.tensor([0.0, at_zero, 1.0][::sign], dtype=D)
    same(v.grad, sign * (sign * v.detach() + 10 * steps))


def test_a_write_after_the_comparison_changes_nothing():
    v = leaf(POINTS)
    u = v * 1.0
    with override({"Threshold": TRIANGLE}):
        mask = u > 0.3
        u.add_(5.0)
        mask.to(D).sum().backward()
    same(v.grad, triangle_at(v.detach() - 0.3))


def test_second_order_differentiates_the_rule():
    v = leaf([-0.4, 0.2, 0.7])
    with override({"Threshold": lambda dy, x: dy * torch.exp(-x)}):
        (g,) = torch.autograd.grad(((v > 0.1).to(D) ** 2 * v).sum(), v, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), v)
    x = v.detach() - 0.1
    y = (x > 0).to(D)
    # d/dv of y² + 2 y v e^-x, with y' = e^-x
    slope = torch.exp(-x)
    same(g, y**2 + 2 * y * v.detach() * slope)
    same(h, 4 * y * slope + 2 * v.detach() * slope**2 - 2 * y * v.detach() * slope)


def test_transforms_see_the_rule():
    v = torch.tensor(POINTS, dtype=D)
    with override({"Threshold": TRIANGLE}):
        whole = torch.func.grad(lambda u: ((u > 0.3).to(D) * WEIGHTS).sum())(v)
        each = torch.func.vmap(torch.func.grad(lambda x, w: (x > 0.3).to(D) * w))(v, WEIGHTS)
        _, pushed = torch.func.jvp(lambda u: (u > 0.3).to(D), (v,), (WEIGHTS,))
    expected = WEIGHTS * triangle_at(v - 0.3)
    for found in (whole, each, pushed):
        same(found, expected)


class Spike(nn.Module):
    def __init__(self):
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(0.1, dtype=D))

    def forward(self, v):
        return (v > self.threshold).to(v.dtype)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), Spike(), nn.Linear(4, 2), Spike()).to(D)


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_keys_choose_the_spikes_by_place(way):
    net, x = network(), torch.randn(6, 3, dtype=D)
    rules = {rg.at("1", "Threshold"): TRIANGLE, rg.at("3", "Threshold"): lambda dy: 2 * dy}
    with override(rules, model=net) as used:
        RUNS[way](net)(x).sum().backward()
    assert [row[:3] for row in used.table().rows] == [
        ("1", "Threshold", "triangle"), ("3", "Threshold", "<lambda>")
    ]  # fmt: skip
    hidden = net[0](x).detach() - 0.1
    into = 2 * net[2].weight.detach().sum(0) * triangle_at(hidden)
    same(net[3].threshold.grad, torch.tensor(-2.0 * 12, dtype=D))
    same(net[1].threshold.grad, -into.sum())
    same(net[0].weight.grad, into.T @ x)


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_a_rule_learns_its_slope(way):
    slope = nn.Parameter(torch.tensor(2.0, dtype=D))

    def rule(dy, x, slope):
        return dy * slope * x, {"slope": (dy * x).sum()}

    v = leaf(POINTS)
    with override({"Threshold": rg.rules.learns(rule, slope=slope)}):
        RUNS[way](lambda v: (v > 0.3).to(v.dtype))(v).sum().backward()
    same(slope.grad, (v.detach() - 0.3).sum())
    same(v.grad, 2 * (v.detach() - 0.3))


def test_a_value_is_replaced():
    v = leaf(POINTS)
    with override({"Threshold": rg.replace(lambda x: torch.sigmoid(x))}, values=True):
        y = torch.where(v > 0.3, 0.3, 0.1)
        y.sum().backward()
    s = torch.sigmoid(v.detach() - 0.3)
    same(y.detach(), (0.1 + 0.2 * s).to(y.dtype), 1e-6)
    same(v.grad, 0.2 * s * (1 - s))


def test_a_scope_inside_decides():
    v = leaf(POINTS)
    with override({"Threshold": TRIANGLE}), override({"Threshold": lambda dy: 3 * dy}):
        (v > 0.3).float().sum().backward()
    same(v.grad, torch.full((5,), 3.0, dtype=D))
    v = leaf(POINTS)
    with override({"Threshold": TRIANGLE}), override({"SelectV2": rg.rules.straight_through}):
        (torch.where(v > 0.3, 1.0, 0.0) + torch.where(v > 5.0, v, 0.0)).sum().backward()
    same(v.grad, 1 + triangle_at(v.detach() - 0.3))


# -- masks -----------------------------------------------------------------------------------------

ENDS = {
    "product": lambda v: v * (v > 0),
    "and": lambda v: v * ((v > 0) & (v < 1)).to(v.dtype),
    "not": lambda v: v * (~(v > 0)).to(v.dtype),
    "index": lambda v: (v > 0)[1:].to(v.dtype) * v[1:],
    "view": lambda v: (v > 0).reshape(5, 1).to(v.dtype) * v,
    "select": lambda v: torch.where(v > 0, v, 0.0),
    "fill": lambda v: v.masked_fill(v > 0, 1.0),
    "infinite": lambda v: v + torch.where(v > 0, 0.0, -torch.inf),
    "sum": lambda v: v * (v > 0).sum(),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_what_is_done_to_the_booleans_ends_the_spike(name, way):
    v, u = leaf(POINTS), leaf(POINTS)
    ENDS[name](u).sum().backward()
    with (
        pytest.warns(UnusedOverrideWarning, match=r"torch\.gt at \S+:\d+.*Cast the booleans"),
        override({"Threshold": TRIANGLE}) as used,
    ):
        RUNS[way](ENDS[name])(v).sum().backward()
    assert torch.equal(v.grad, u.grad)
    assert any(
        row[0] == "torch.gt (Threshold, not cast)" and "test_thresholds.py" in row[2]
        for row in used.untouched().rows
    )


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_only_the_mask_is_listed(way):
    v = leaf(POINTS)
    with override({"Threshold": TRIANGLE}) as used:
        RUNS[way](lambda v: (v > 0.3).to(v.dtype) + v * (v < 1))(v).sum().backward()
    same(v.grad, triangle_at(v.detach() - 0.3) + (v.detach() < 1))
    names = [row[0] for row in used.untouched().rows]
    assert "torch.lt (Threshold, not cast)" in names
    assert "torch.gt (Threshold, not cast)" not in names


def test_a_map_with_step_alone_leaves_comparisons_as_they_are():
    v = leaf(POINTS)
    with (
        pytest.warns(UnusedOverrideWarning, match=r"gt at \S+:\d+.*rule for 'Threshold'"),
        override({"Step": TRIANGLE}),
    ):
        y = v + (v > 0.3).to(v.dtype)
        y.sum().backward()
    assert torch.equal(v.grad, torch.ones(5, dtype=D))


def test_integers_are_no_potentials():
    v, n = leaf(POINTS), torch.arange(5)
    with (
        pytest.warns(UnusedOverrideWarning, match="Threshold"),
        override({"Threshold": TRIANGLE}) as used,
    ):
        (v * (n > 2).to(v.dtype)).sum().backward()
    assert [row[0] for row in used.untouched().rows] == ["Mul", "Sum"]


# -- refused ---------------------------------------------------------------------------------------


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, dy):
        return 7 * dy


@torch.library.custom_op("thresholds::spike", mutates_args=())
def own_op(v: torch.Tensor) -> torch.Tensor:
    return (v > 0).to(v.dtype)


own_op.register_fake(torch.empty_like)
own_op.register_autograd(lambda ctx, dy: 7 * dy)


@pytest.mark.parametrize(("call", "kept"), [(Own.apply, Own), (own_op, own_op)], ids=["f", "op"])
@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_a_spike_with_a_backward_pass_of_its_own_is_refused(call, kept, way):
    f = RUNS[way](lambda v: call(v))
    with override({"Threshold": TRIANGLE}), pytest.raises(PassedOverError, match="own backward"):
        f(leaf(POINTS))
    torch.compiler.reset()
    v = leaf(POINTS)
    with override({"Threshold": rg.rules.optional(TRIANGLE)}, keep=[kept]):
        f(v).sum().backward()
    assert torch.equal(v.grad, torch.full((5,), 7.0, dtype=D))


@pytest.mark.parametrize("way", ["eager", "aot_eager"])
def test_a_comparison_in_place_is_refused(way):
    f = RUNS[way](lambda v: (v * 1.0).gt_(0.3))
    with override({"Threshold": TRIANGLE}), pytest.raises(PassedOverError, match=r"gt_ .in place"):
        f(leaf(POINTS))


def test_a_comparison_as_key_names_the_other_key():
    with override({torch.gt: TRIANGLE}), pytest.raises(PassedOverError, match="'Threshold'"):
        (leaf(POINTS) > 0.3).float()
