"""Overrides in PyTorch on a GPU: kernels, autocast, streams, CUDA graphs, compiled programs.

This file is collected only where there is a GPU (see `conftest.py`). The samples of every op run
there by `python -m tests.campaigns.proof --only F13 --device cuda`.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import regrad as rg
from regrad.errors import PassedOverError
from regrad.torch import custom_grad, open_scopes
from tests.helpers import sample_runs as runs
from tests.torch.common import close, function, grad, orders, override, under

pytestmark = [
    pytest.mark.filterwarnings("ignore::regrad.errors.UnusedOverrideWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, of torch.jit
]
CUDA = "cuda"


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    torch.manual_seed(0)
    yield
    assert open_scopes.SCOPES.get() == ()
    assert torch.overrides._get_current_function_mode_stack() == []


def rule(dy, x):
    return dy.clamp(min=0) * (x > -0.3)


# The rule, written for torch by hand.
Hand = function(lambda x: x.clamp(min=0), rule)


class ByHand(nn.Module):
    def forward(self, x):
        return Hand.apply(x)


def model(relu=nn.ReLU):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), relu(), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), relu(),
        nn.Flatten(), nn.Linear(8 * 36, 10), relu(),
    ).to(CUDA)  # fmt: skip


@pytest.fixture
def x():
    return torch.randn(4, 3, 8, 8, device=CUDA)


def gradients(net, x, rules=None, dtype=None):
    """The value, and the gradients by the parameters; under autocast if there is a dtype."""
    net.zero_grad()
    with torch.autocast(CUDA, dtype, enabled=dtype is not None):
        y = under(rules, net, x)
    assert dtype is None or y.dtype == dtype
    y.float().square().sum().backward()
    return [y.detach(), *[p.grad.clone() for p in net.parameters()]]


# -- kernels --------------------------------------------------------------------------------------


@pytest.fixture(params=[rule, rg.rules.guided_relu], ids=["torch", "regrad"])
def either(request):
    return request.param


def test_a_rule_counts_where_autograd_has_a_thread_for_the_device(x, either):
    with override({"Relu": either}) as used:
        y = model()(x)
    y.sum().backward()
    used.assert_fired()
    assert [hit.count for hit in used.hits] == [hit.ran for hit in used.hits]
    if either is rule:
        close(gradients(model(), x, {"Relu": rule}), gradients(model(ByHand), x), 1e-5)


def test_an_error_in_a_rule_reaches_the_caller(x):
    def wrong(dy, x):
        raise ZeroDivisionError("in the rule")

    with override({"Relu": wrong}):
        y = model()(x)
    with pytest.raises(ZeroDivisionError, match="in the rule"):
        y.sum().backward()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_values_and_layouts_of_convolutions_are_torchs(x, layout):
    conv = nn.Conv2d(3, 8, 3).to(CUDA).to(memory_format=layout)
    x = x.to(memory_format=layout).requires_grad_()
    plain = conv(x)
    with override({"Conv2D": lambda dy, x, w: (7 * torch.ones_like(x), None)}):
        y = conv(x)
    assert torch.equal(y, plain) and y.stride() == plain.stride()
    dx = grad(y, x)
    assert dx.eq(7).all() and dx.shape == x.shape


BACKENDS = [
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
]  # fmt: skip


on_kernels = pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)


def attention(causal):
    qkv = [torch.randn(2, 4, 64, 64, device=CUDA, dtype=torch.float16) for _ in range(3)]
    qkv = [x.requires_grad_() for x in qkv]
    return qkv, lambda: F.scaled_dot_product_attention(*qkv, is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@on_kernels
def test_attention_keeps_its_kernel_under_other_rules(backend, causal):
    _, f = attention(causal)
    with sdpa_kernel(backend):
        plain, y = f(), under({"Relu": rule}, f)
    assert type(y.grad_fn) is type(plain.grad_fn)
    assert torch.equal(y, plain)


@pytest.mark.parametrize("causal", [False, True])
@on_kernels
def test_attention_is_taken_apart_under_a_rule_for_its_softmax(backend, causal):
    qkv, f = attention(causal)
    with sdpa_kernel(backend):
        plain = f()
        try:
            with override({"Softmax": lambda dy: torch.zeros_like(dy)}) as used:
                y = f()
        except PassedOverError:
            return
    torch.testing.assert_close(y, plain, rtol=2e-2, atol=2e-3)
    dq, dk, dv = torch.autograd.grad(y.sum(), qkv)
    used.assert_fired()
    assert not dq.any() and not dk.any() and dv.any()


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_fire_or_keep_the_kernel(make):
    layer, x = make(8, 8, 2).to(CUDA), torch.randn(5, 3, 8, device=CUDA)
    plain = layer(x)[0]
    with override({"Relu": rule}):
        y = layer(x)[0]
        assert "Cudnn" in type(plain.grad_fn).__name__ or type(y.grad_fn) is type(plain.grad_fn)
    assert torch.equal(y, plain)
    with override({"Tanh": lambda dy: torch.zeros_like(dy)}) as used:
        y = layer(x)[0]
    torch.testing.assert_close(y, plain, rtol=1e-3, atol=1e-4)
    torch.autograd.grad(y.sum(), layer.weight_ih_l0)
    used.assert_fired()


@pytest.mark.parametrize("op_type", ["Mul", "AddV2", "Sqrt", "RealDiv"])
def test_fused_optimizers_are_not_concerned(op_type, x):
    def step(rules):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        net(x).sum().backward()
        under(rules, optimizer.step)
        return [p.detach() for p in net.parameters()]

    close(step({op_type: rg.rules.straight_through}), step(None), 0)


# -- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype, x, either):
    found = gradients(model(), x, {"Relu": either}, dtype)
    if either is rule:
        close(found, gradients(model(ByHand), x, None, dtype), 1e-3)
    assert all(g.isfinite().all() for g in found)


@pytest.mark.parametrize("op_type", ["MatMul", "Conv2D"])
def test_autocast_around_ops_that_it_casts(op_type, x):
    net = model()
    with torch.autocast(CUDA, torch.float16):
        plain = net(x)
        with override({op_type: lambda op, grad: [torch.ones_like(i) for i in op.inputs]}) as used:
            y = net(x)
    assert torch.equal(y, plain)
    y.float().sum().backward()
    used.assert_fired()
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in net.parameters())


def test_a_grad_scaler(x):
    def run(net, rules):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler(CUDA, init_scale=1024.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(CUDA, torch.float16):
                y = under(rules, net, x)
                loss = y.float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in net.parameters()]

    close(run(model(), {"Relu": rule}), run(model(ByHand), None), 1e-3)


# -- streams and graphs ---------------------------------------------------------------------------


def test_a_stream_of_its_own(x, either):
    expected = gradients(model(), x, {"Relu": either})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    streams = []

    def noted(dy, x):
        streams.append(torch.cuda.current_stream())
        return rule(dy, x)

    with torch.cuda.stream(side):
        found = gradients(model(), x, {"Relu": either})
        gradients(model(), x, {"Relu": noted})
    side.synchronize()
    close(found, expected, 1e-5)
    assert set(streams) == {side}


def warm(step):
    """Run a step on a side stream, as a capture asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)


def captured(net, x, rules=None):
    """A graph of a whole step, captured in a scope or without one."""

    def step():
        net.zero_grad(set_to_none=False)
        y = under(rules, net, x)
        y.square().sum().backward()

    warm(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_a_captured_step_has_the_rules_of_its_scope(x, either):
    net, given = model(), x.clone()
    graph = captured(net, given, {"Relu": either})
    given.copy_(2 * x)
    graph.replay()
    found = [p.grad.clone() for p in net.parameters()]
    other = model()
    other.load_state_dict(net.state_dict())
    close(found, gradients(other, 2 * x, {"Relu": either})[1:], 1e-4)


def test_a_graph_captured_elsewhere_is_refused_in_a_scope(x):
    net, given = model(), x.clone()
    graph = captured(net, given)
    with override({"Relu": rule}), pytest.raises(PassedOverError, match="CUDA graph"):
        graph.replay()
    graph.replay()


def test_a_graph_captured_under_the_same_rules_runs(x):
    net, given = model(), x.clone()
    with override({"Relu": rule}):
        graph = captured(net, given)
        graph.replay()
    with override({"Relu": rule}):
        graph.replay()
        net(x)
    with override({"Relu": lambda dy: dy}), pytest.raises(PassedOverError, match="CUDA graph"):
        graph.replay()


def test_graphed_callables(x):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(CUDA)
    x = torch.randn(4, 8, device=CUDA, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(net, (x.detach().clone().requires_grad_(),))
    with override({"Relu": rule}), pytest.raises(PassedOverError, match="CUDA graph"):
        graphed(x)
    graphed(x).sum().backward()


# -- compiled programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_for_the_device(mode, x):
    torch._dynamo.reset()
    net = model()
    run = torch.compile(net, mode=mode)
    expected = gradients(model(ByHand), x)
    for n in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        with override({"Relu": rule}) as used:
            y = run(x)
        net.zero_grad()
        value = y.detach().clone()
        y.square().sum().backward()
        if n == 0:  # (later runs of the program are not seen)
            used.assert_fired()
        close([value, *[p.grad for p in net.parameters()]], expected, 2e-3)
    plain = gradients(model(), x)
    torch.compiler.cudagraph_mark_step_begin()
    y = run(x)
    net.zero_grad()
    y.square().sum().backward()
    close([p.grad for p in net.parameters()], plain[1:], 2e-3)


def test_compiled_under_autocast(x):
    torch._dynamo.reset()
    net = model()
    with torch.autocast(CUDA, torch.bfloat16), override({"Relu": rule}):
        y = torch.compile(net)(x)
    y.float().square().sum().backward()
    found = [y.detach(), *[p.grad for p in net.parameters()]]
    close(found, gradients(model(ByHand), x, None, torch.bfloat16), 5e-2)


# -- rules and functions of ours ------------------------------------------------------------------


def test_a_custom_gradient_on_the_device():
    reverse = custom_grad(lambda x: (x.clone(), lambda dy: -dy))
    x = torch.randn(5, device=CUDA, requires_grad=True)
    y = reverse(x)
    assert y.is_cuda
    assert torch.equal(grad(y, x), -torch.ones_like(x))


def test_second_order(x):
    x = x.requires_grad_()
    y = under({"Tanh": lambda dy, y: dy * (1 - y * y)}, torch.tanh, x)
    close(orders(y, x), orders(torch.tanh(x), x), 1e-5)


# -- functions of ours ----------------------------------------------------------------------------

ROWS = [row for row in runs.ROWS if "torch" in row.backends]


def on_the_device(row):
    return [x.to(CUDA) for x in runs.inputs_of(row, "torch")]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_op_computes_on_the_device(row):
    xs = on_the_device(row)
    ys = runs.outputs(row.f(*map(rg.asarray, xs)))
    due = runs.numbers(row.f(*map(rg.asarray, runs.inputs_of(row, "numpy"))))
    for y, expected in zip(ys, due, strict=True):
        assert not xs or not isinstance(y._data, torch.Tensor) or y._data.is_cuda
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("row", [row for row in ROWS if row.order], ids=str)
def test_every_op_is_differentiated_on_the_device(row):
    due = runs.gradients(row, runs.inputs_of(row, "numpy"), 1)
    found = runs.gradients(row, on_the_device(row), 1)
    for a, b in zip(found, due, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7 * (1 + np.abs(b).max(initial=0)))
