"""Rules with parameters that learn, against Functions of autograd that take them as inputs.

Parameters are named (`learns`), or closed over by a replaced value or a `vjp_of`.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import ArgumentError, GradientError, PassedOverError, RuleError
from regrad.rules import learns, vjp_of
from tests.torch.common import D, close, function, grad, leaf, numbers, override

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
X = numbers(4, 5) * 4


def parameter(value):
    return nn.Parameter(torch.tensor(value, dtype=D))


def by_hand(value, rule):
    """A Function of x and a parameter, with the gradients of a rule."""

    def gradients(dy, x, p):
        dx, by_name = rule(dy, x, p)
        return dx, *by_name.values()

    return function(value, gradients).apply


def pact(dy, x, alpha):  # the clip of an activation, Choi et al. (2018)
    return dy * ((x > 0) & (x < alpha)), {"alpha": (dy * (x >= alpha)).sum()}


def twice(f, x):
    return (f(x * 2) ** 2).sum() + f(x.cos()).sin().sum()


def to_second_order(y, *xs):
    dxs = torch.autograd.grad(y, xs, create_graph=True)
    total = sum((dx**2).sum() for dx in dxs)
    return [*dxs, *torch.autograd.grad(total, xs, allow_unused=True)]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("f", [torch.relu, lambda x: x.clone().relu_()])
def test_checkpoints_and_ops_in_place(f, use_reentrant):
    x, p = X.clone().requires_grad_(), parameter(2.5)
    hand, rules = by_hand(lambda x, p: torch.relu(x), pact), {"Relu": learns(pact, alpha=p)}
    expected = to_second_order(twice(lambda x: hand(x, p), x), x, p)
    with override(rules):
        close(to_second_order(twice(f, x), x, p), expected)
        y = twice(lambda x: checkpoint(f, x, use_reentrant=use_reentrant), x)
    y.backward()
    close([x.grad, p.grad], expected[:2])


def test_hooks_and_training():
    p, seen = parameter(2.0), []
    p.register_hook(seen.append)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU6(), nn.Linear(5, 5), nn.ReLU6()).to(D)
    optimizer = torch.optim.SGD([p], 0.1)
    for n in (1, 2):
        with override({F.relu6: learns(pact, alpha=p)}):
            (-model(20 * X).sum()).backward()  # (much of it is beyond the clip)
        assert len(seen) == n
        optimizer.step()
        optimizer.zero_grad()
    assert p.item() > 2.0


def test_several_inputs_and_builtin():
    a, b = numbers(3, 4).requires_grad_(), numbers(4, 2).requires_grad_()
    p, q = parameter(2.0), parameter(3.0)

    def rule(dy, builtin, gain, shift):
        by_a, by_b = gain * builtin(dy)
        return by_a, by_b + shift, {"gain": dy.sum(), "shift": None}

    with override({"MatMul": learns(rule, gain=p, shift=q)}):
        (a @ b).sum().backward()
    ones = torch.ones(3, 2, dtype=D)
    close([a.grad, b.grad, p.grad], [2 * ones @ b.mT, 2 * a.mT @ ones + 3, ones.sum()])
    assert q.grad is None


def test_whole_calls_and_places():
    layer, p, x = nn.Linear(5, 2).to(D), parameter(2.0), X.clone().requires_grad_()
    rule = lambda dy, builtin, gain: (builtin(dy * gain), {"gain": dy.sum()})  # noqa: E731
    inputs = [x, layer.weight, layer.bias]
    expected = torch.autograd.grad(layer(x).sum() * 2, inputs)
    with override({rg.at(layer): learns(rule, gain=p)}):
        found = torch.autograd.grad(layer(x).sum(), [*inputs, p])
    close(found, [*expected, torch.tensor(8.0, dtype=D)])
    net = nn.Sequential(nn.ReLU(), nn.ReLU())
    with override({rg.at("1", "Relu"): learns(pact, alpha=p)}, model=net):
        found = torch.autograd.grad(net(x).sum(), [x, p])
    close(found, [((x > 0) & (x < 2)).to(D), (x >= 2).sum().to(D)])


def test_a_rule_that_asks_for_forward():
    net, x, p = nn.Sequential(nn.Tanh()), X.clone().requires_grad_(), parameter(2.0)

    def rule(dy, forward, x, gain):
        return dy * gain * forward(2 * x), {"gain": dy.sum()}

    for key in ("Tanh", rg.at(nn.Tanh)):
        with override({key: learns(rule, gain=p)}, model=net):
            found = torch.autograd.grad(net(x).sum(), [x, p])
        close(found, [2 * torch.tanh(2 * x), torch.tensor(20.0, dtype=D)])


def test_torch_func():
    def loss(p):
        with override({"Relu": learns(pact, alpha=p * 1)}):
            return torch.relu(X).sum()

    assert torch.func.grad(loss)(torch.tensor(2.0, dtype=D)) == (X >= 2).sum()


class Spike(torch.autograd.Function):
    """Somebody's spike, with an argument that is no tensor."""

    @staticmethod
    def forward(ctx, v, threshold=0.0):
        return (v > threshold).to(v)

    @staticmethod
    def backward(ctx, dy):
        raise AssertionError("the rule answers")


class SpikeOfTwoParts(Spike):
    @staticmethod
    def forward(v, threshold=0.0):
        return (v > threshold).to(v)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@pytest.mark.parametrize("kind", [Spike, SpikeOfTwoParts])
def test_a_function_as_key(kind):
    x, slope = X.clone().requires_grad_(), parameter(1.5)
    surrogate = lambda v, slope: torch.sigmoid(slope * v)  # noqa: E731
    rules = {kind: learns(vjp_of(surrogate), slope=slope)}

    def by_stop_gradient(x):
        smooth = surrogate(x, slope)
        return smooth + ((x > 0).to(D) - smooth).detach()

    expected = to_second_order(twice(by_stop_gradient, x), x, slope)
    more = {"threshold": 0.0} if kind is SpikeOfTwoParts else {}
    for f in (
        lambda x: kind.apply(x, **more),
        lambda x: checkpoint(kind.apply, x, use_reentrant=False),
    ):
        with override(rules) as used:
            y = twice(f, x)
        close(to_second_order(y, x, slope), expected)
        used.assert_fired()
    with override(rules), torch.no_grad():
        assert not kind.apply(x).requires_grad
    assert "apply" not in vars(kind)


def test_a_function_as_key_at_places():
    net = nn.ModuleList([nn.Identity(), nn.Identity()])
    for layer in net:
        layer.forward = lambda x: Spike.apply(x)
    x, slope, seen = X.clone().requires_grad_(), parameter(1.5), []
    own = lambda dy: seen.append(0) or dy  # noqa: E731
    rule = learns(vjp_of(lambda v, slope: slope * v), slope=slope)
    rules = {rg.at("0", Spike): rule, rg.at("1", Spike): own, Spike: lambda dy: 0 * dy}
    with override(rules, model=net):
        y = sum(layer(x) for layer in net).sum()
    close(torch.autograd.grad(y, [x, slope]), [torch.full_like(x, 2.5), x.sum()])
    assert len(seen) == 1


# -- refusals --------------------------------------------------------------------------------------

P = parameter(2.0)
Half = function(lambda x: x / 2, lambda dy, x: dy / 2, "Half")


def by_step(dy, step):
    return dy, {"step": step}


def opened(key, rule, scope=override):
    with scope({key: rule}):
        return torch.relu(leaf(1, 1)).sum()


def answer(rule):
    y = opened("Relu", learns(rule, step=P))
    y.backward()


NOT_A_LEAF = "step expected a tensor of PyTorch that requires"
UNNAMED = "has the parameters step, but did not return their gradients by name"
REFUSED = {
    ArgumentError: {
        "no parameter": (lambda: learns(lambda dy: dy), "learns needs a parameter"),
        "no rule": (lambda: learns(3, step=P), "learns expected a rule, got"),
        "a float": (lambda: opened("Relu", learns(by_step, step=2.0)), NOT_A_LEAF),
        "detached": (lambda: opened("Relu", learns(by_step, step=P.detach())), NOT_A_LEAF),
        "regrad's own": (
            lambda: opened("Relu", learns(by_step, step=P), rg.gradient_override_map),
            "expected a Variable or a Tensor of regrad, got Par"),
    },
    RuleError: {
        "a rule without it": (lambda: learns(lambda dy, x: dy, step=P),
                              "does not take its parameter 'step'"),
        "a value without it": (lambda: rg.replace(lambda x: x, step=P), "does not take its par"),
        "a call": (lambda: learns(by_step, step=P)(P), "cannot be called"),
        "an answer without": (lambda: answer(lambda dy, step: dy), UNNAMED),
        "an answer of no names": (lambda: answer(lambda dy, step: (dy, {})), UNNAMED),
        "another name": (lambda: answer(lambda dy, step: (dy, {"st": dy})), UNNAMED),
    },
    PassedOverError: {
        "an apply": (lambda: held_apply(), "`apply` that the program read before the scope"),
    },
}  # fmt: skip


def held_apply():
    apply = Half.apply
    with override({Half: learns(by_step, step=P)}):
        apply(leaf(1, 1))


@pytest.mark.parametrize(("error", "name"), [(e, name) for e in REFUSED for name in REFUSED[e]])
def test_what_does_not_fit_is_refused(error, name):
    call, words = REFUSED[error][name]
    with pytest.raises(error, match=words):
        call()


# -- closed over ----------------------------------------------------------------------------------

Rounded = function(
    lambda x, step: (x / step).round() * step,
    lambda dy, x, step: (dy, (dy * ((x / step).round() - x / step)).sum()),
)
# The value of one, and the gradient of another.
Surrogate = function(lambda value, other: value.clone(), lambda dy, value, other: (None, dy))


class Stepped(nn.Module):
    """Somebody's quantiser, with a step that learns (Esser 2020)."""

    def __init__(self, by_function=False):
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.3, dtype=D))
        self.by_function = by_function

    def forward(self, x):
        if self.by_function:
            return Rounded.apply(x, self.step)
        v = x / self.step
        return (v + (v.round() - v).detach()) * self.step


class Net(nn.Module):
    """A layer, and the quantiser that a rule for it closes over."""

    def __init__(self, quantise):
        super().__init__()
        torch.manual_seed(0)
        self.quantise, self.layer = quantise, nn.Linear(4, 3).double()

    def forward(self, x):
        return torch.tanh(self.layer(x)).square().sum()


def replacing(q, x, w, bias):
    return F.linear(q(x), q(w), bias)


def closing_over(kind, q):
    """The rules of a kind, and the same by hand."""
    if kind == "replace":
        rules = {F.linear: rg.replace(lambda x, w, bias: replacing(q, x, w, bias))}
        return rules, lambda m, x: torch.tanh(replacing(q, x, m.weight, m.bias)).square().sum()
    run = lambda y: Surrogate.apply(y.detach().tanh(), torch.sigmoid(q(y)))  # noqa: E731
    rules = {"Tanh": vjp_of(lambda x: torch.sigmoid(q(x)))}
    return rules, lambda m, x: run(m(x)).square().sum()


@pytest.mark.parametrize("by_function", [False, True])
@pytest.mark.parametrize("kind", ["replace", "vjp_of"])
def test_what_the_function_closes_over_has_its_gradient(kind, by_function):
    q = Stepped(by_function)
    net, x = Net(q), numbers(5, 4)
    rules, by_hand = closing_over(kind, q)
    leaves = [q.step, *net.layer.parameters()]
    first = torch.autograd.grad(by_hand(net.layer, x), leaves, create_graph=True)
    second = torch.autograd.grad(sum(dx.square().sum() for dx in first), leaves)
    seen = []
    q.step.register_hook(seen.append)
    with override(rules, values=True) as used:
        found = torch.autograd.grad(net(x), leaves, create_graph=True)
        close(torch.autograd.grad(sum(dx.square().sum() for dx in found), leaves), second)
        close(found, first)
        seen.clear()
        for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
            net.zero_grad()
            each = x.clone().requires_grad_(options == {"use_reentrant": True})
            (checkpoint(net, each, **options) if options else net(each)).backward()
            close([p.grad for p in leaves], first)
        if not by_function:  # (which has no setup_context)
            loss = torch.func.grad(lambda p: torch.func.functional_call(net, p, (x,)))
            close([loss(dict(net.named_parameters()))["quantise.step"]], first[:1])
        with torch.no_grad():
            close([net(x)], [by_hand(net.layer, x)])
    assert [dx.item() for dx in seen[:3]] == pytest.approx([first[0].item()] * 3)
    used.assert_fired()
    assert any(hit.ran for hit in used.hits)


def test_a_tensor_that_is_no_leaf_and_a_leaf_in_two_places():
    p, x = leaf(2), numbers(3)  # (x needs no gradient)
    scale = p * p
    f = lambda x: x * scale + p  # noqa: E731
    with override({"Relu": vjp_of(f), "Tanh": rg.replace(f)}, values=True):
        by_surrogate = grad(torch.relu(x), p, retain_graph=True)
        by_value = grad(torch.tanh(x), p)
    close([by_surrogate, by_value], [(4 * x + 1).sum(0, True)] * 2)  # d(x p^2 + p)/dp at 2


@pytest.mark.parametrize("make", [rg.replace, vjp_of])
def test_a_parameter_in_a_partial_and_in_functions_of_regrad(make):
    p, x = torch.tensor(2.0, dtype=D, requires_grad=True), numbers(3).requires_grad_()
    held = {"p": p}
    for f in (partial(lambda scale, x: x * scale, p), lambda x: x * held["p"]):
        with override({"Relu": make(f)}, values=True):
            y = torch.relu(x).sum()
        close(torch.autograd.grad(y, [p, x]), [x.sum(), torch.full_like(x, 2)])
    for f in (lambda x: rg.multiply(x, p), lambda x: rg.multiply(x, held["p"])):
        with override({"Relu": make(f)}, values=True):
            for _ in range(2):
                with pytest.raises(GradientError, match="which regrad's functions treat as a co"):
                    torch.relu(x)


def test_data_parallel(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        q = Stepped()
        net, x = Net(q), numbers(5, 4)
        rules, by_hand = closing_over("replace", q)
        expected = torch.autograd.grad(by_hand(net.layer, x), q.step)
        parallel = nn.parallel.DistributedDataParallel(net)
        with override(rules, values=True):
            for _ in range(2):
                net.zero_grad()
                parallel(x).backward()
                close([q.step.grad], expected)
    finally:
        dist.destroy_process_group()


Q, LAYER = Stepped(), nn.Linear(4, 3).double()
forward = lambda x, w, bias: replacing(Q, x, w, bias)  # noqa: E731
by_rule = {
    "a rule": rg.replace(forward, lambda dy, x, w, bias: (dy @ w, dy.mT @ x, dy.sum(0))),
    "a builtin": rg.replace(forward, lambda dy, builtin: builtin(2 * dy)),
}
alone = {"replace": rg.replace(lambda x: Q(x)), "vjp_of": vjp_of(lambda x: Q(x))}


@pytest.mark.parametrize("name", by_rule)
def test_a_rule_has_no_room_for_its_gradient(name):
    x = numbers(5, 4).requires_grad_()
    refused = pytest.raises(GradientError, match=r"closes over 'Q.step', which .*rules\.learns\(")
    with override({F.linear: by_rule[name]}, values=True):
        with refused:
            LAYER(x)
        with torch.no_grad():
            LAYER(x)


@pytest.mark.parametrize("name", alone)
def test_a_function_and_compiled_code_have_no_room_for_its_gradient(name):
    refused = pytest.raises(ArgumentError, match=r"over parameters .* the node of Half, an auto")
    with refused, override({Half: alone[name]}, values=True):
        pass
    torch.compiler.reset()
    compiled = torch.compile(torch.tanh, backend="aot_eager")
    refused = pytest.raises(PassedOverError, match=r"uses parameters that the program of torch\.c")
    with override({"Tanh": rg.rules.optional(alone[name])}, values=True), refused:
        compiled(numbers(5, 4).requires_grad_())


def doubled(x):
    return x.mul_(2)


def test_a_forward_that_writes_into_its_input():
    x = numbers(3).requires_grad_()
    with override({"Tanh": rg.replace(doubled)}, values=True):
        y = torch.tanh(x * 1)
    close([y, grad(y, x)], [2 * x, torch.full_like(x, 2)])
    for rule in (lambda dy, x: dy * x, lambda dy, builtin: builtin(dy)):
        refused = pytest.raises(RuleError, match=r"replace: the forward of .* wrote into an input")
        with override({"Tanh": rg.replace(doubled, rule)}, values=True), refused:
            torch.tanh(x * 1)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_bias_that_the_rule_leaves_out_keeps_its_own_gradient(as_tensors):
    def rule(dy, input, weight, bias, gain):
        transposed = rg.matrix_transpose(dy) if as_tensors else dy.T
        return dy @ weight * gain, transposed @ input, {"gain": dy.sum()}

    x, gain, layer = numbers(3, 4).requires_grad_(), parameter(2.0), nn.Linear(4, 5, dtype=D)
    with override({F.linear: learns(rule, gain=gain)}):
        y = layer(x)
    dy = numbers(3, 5)
    found = torch.autograd.grad(y, [x, layer.weight, layer.bias, gain], dy)
    close(found, [2 * dy @ layer.weight, dy.T @ x, dy.sum(0), dy.sum()])
