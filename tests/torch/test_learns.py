"""Rules with parameters that learn, against Functions of autograd that take them as inputs."""

import re

import pytest

import regrad as rg
from regrad.errors import ArgumentError, PassedOverError, RuleError

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
override = pytest.importorskip("regrad.torch").gradient_override_map
from torch.utils.checkpoint import checkpoint  # noqa: E402

DOUBLE = torch.float64
X = torch.randn(4, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)) * 4


def by_hand(value, gradients):
    """A Function of x and a parameter."""

    class Hand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, p):
            ctx.save_for_backward(x, p)
            return value(x)

        @staticmethod
        def backward(ctx, dy):
            return gradients(dy, *ctx.saved_tensors)

    return Hand.apply


def lsq(dy, x, step):  # the step size of a quantizer, Esser et al. (2020)
    inside = (x.abs() <= 3).to(dy.dtype)
    return dy * inside / step, (dy * (x.round() - x * inside / step)).sum() * 0.1


def pact(dy, x, alpha):  # the clip of an activation, Choi et al. (2018)
    return dy * ((x > 0) & (x < alpha)), (dy * (x >= alpha)).sum()


def slope(dy, x, beta):  # a surrogate whose steepness is learned
    s = 1 - torch.tanh(beta * x) ** 2
    return dy * beta * s, (dy * x * s).sum()


def named(rule, name):
    """The rule as a map takes it: the gradient by the parameter in a dict."""

    def learning(dy, x, step=None, alpha=None, beta=None):
        p = {"step": step, "alpha": alpha, "beta": beta}[name]
        dx, dp = rule(dy, x, p)
        return dx, {name: dp}

    return {
        "step": lambda dy, x, step: learning(dy, x, step=step),
        "alpha": lambda dy, x, alpha: learning(dy, x, alpha=alpha),
        "beta": lambda dy, x, beta: learning(dy, x, beta=beta),
    }[name]


CASES = {
    "lsq": ("Round", torch.round, lsq, "step", 0.7),
    "pact": (F.relu6, F.relu6, pact, "alpha", 6.0),
    "slope": ("Sign", torch.sign, slope, "beta", 1.3),
    "in place": ("Relu", lambda x: x.clone().relu_(), pact, "alpha", 2.5),
}


def twice(f, x):
    return (f(x * 2) ** 2).sum() + f(x.cos()).sin().sum()


def to_second_order(f, x, p):
    dxs = torch.autograd.grad(f(x), [x, p], create_graph=True)
    total = sum((dx**2).sum() for dx in dxs)
    return [*dxs, *torch.autograd.grad(total, [x, p], allow_unused=True)]


def check(found, expected):
    for a, b in zip(found, expected, strict=True):
        if b is None:
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_exact_to_second_order(case):
    key, function, rule, name, start = CASES[case]
    x = X.clone().requires_grad_()
    p = nn.Parameter(torch.tensor(start, dtype=DOUBLE))
    hand = by_hand(function, rule)
    expected = to_second_order(lambda x: twice(lambda z: hand(z, p), x), x, p)
    learning = rg.rules.learns(named(rule, name), **{name: p})
    with override({key: learning}) as used:
        check(to_second_order(lambda x: twice(function, x), x, p), expected)
    used.assert_fired()
    for use_reentrant in (False, True):

        def again(z, use_reentrant=use_reentrant):
            return checkpoint(function, z, use_reentrant=use_reentrant)

        with override({key: learning}):
            y = twice(again, x)
        p.grad = x.grad = None
        y.backward()
        check([x.grad, p.grad], expected[:2])


def test_the_gradient_of_another_function():
    x = X.clone().requires_grad_()
    p = nn.Parameter(torch.tensor(1.3, dtype=DOUBLE))
    smooth = rg.rules.vjp_of(lambda x, beta: torch.tanh(beta * x))
    expected = to_second_order(lambda x: twice(lambda z: by_hand(torch.sign, slope)(z, p), x), x, p)
    with override({"Sign": rg.rules.learns(smooth, beta=p)}):
        check(to_second_order(lambda x: twice(torch.sign, x), x, p), expected)


def test_hooks_and_training():
    p = nn.Parameter(torch.tensor(2.0, dtype=DOUBLE))
    seen = []
    p.register_hook(seen.append)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU6(), nn.Linear(5, 5), nn.ReLU6()).to(DOUBLE)
    learning = rg.rules.learns(named(pact, "alpha"), alpha=p)
    optimizer = torch.optim.SGD([p], 0.1)
    for n in (1, 2):
        with override({F.relu6: learning}):
            (-model(20 * X).sum()).backward()  # (much of it is beyond the clip)
        assert len(seen) == n
        optimizer.step()
        optimizer.zero_grad()
    assert p.item() > 2.0


def test_several_inputs_and_builtin():
    a = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    b = torch.randn(4, 2, dtype=DOUBLE, requires_grad=True)
    p, q = (nn.Parameter(torch.tensor(v, dtype=DOUBLE)) for v in (2.0, 3.0))

    def rule(dy, builtin, gain, shift):
        by_a, by_b = gain * builtin(dy)
        return by_a, by_b + shift, {"gain": dy.sum(), "shift": None}

    with override({"MatMul": rg.rules.learns(rule, gain=p, shift=q)}):
        (a @ b).sum().backward()
    ones = torch.ones(3, 2, dtype=DOUBLE)
    check([a.grad, b.grad, p.grad], [2 * ones @ b.mT, 2 * a.mT @ ones + 3, ones.sum()])
    assert q.grad is None


def test_whole_calls_and_places():
    layer = nn.Linear(5, 2).to(DOUBLE)
    p = nn.Parameter(torch.tensor(2.0, dtype=DOUBLE))
    x = X.clone().requires_grad_()

    def rule(dy, builtin, gain):
        return builtin(dy * gain), {"gain": dy.sum()}

    inputs = [x, layer.weight, layer.bias]
    expected = torch.autograd.grad(layer(x).sum() * 2, inputs)
    with override({rg.at(layer): rg.rules.learns(rule, gain=p)}):
        found = torch.autograd.grad(layer(x).sum(), [*inputs, p])
    check(found, [*expected, torch.tensor(8.0, dtype=DOUBLE)])
    net = nn.Sequential(nn.ReLU(), nn.ReLU())
    with override({rg.at("1", "Relu"): rg.rules.learns(named(pact, "alpha"), alpha=p)}, model=net):
        (dx, dp) = torch.autograd.grad(net(x).sum(), [x, p])
    check([dx, dp], [((x > 0) & (x < 2)).to(DOUBLE), (x >= 2).sum().to(DOUBLE)])


def test_torch_func():
    p = torch.tensor(2.0, dtype=DOUBLE)

    def loss(p):
        p = p * 1
        with override({"Relu": rg.rules.learns(named(pact, "alpha"), alpha=p)}):
            return torch.relu(X).sum()

    assert torch.func.grad(loss)(p) == (X >= 2).sum()


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, dy):
        return dy / 2


def test_what_is_refused():
    p = nn.Parameter(torch.tensor(2.0))
    with pytest.raises(ArgumentError, match="learns names no parameter"):
        rg.rules.learns(lambda dy: dy)
    with pytest.raises(ArgumentError, match="learns expected a rule, got"):
        rg.rules.learns(3, step=p)
    with pytest.raises(RuleError, match="does not ask for its parameter 'step'"):
        rg.rules.learns(lambda dy, x: dy, step=p)
    learning = rg.rules.learns(lambda dy, step: (dy, {"step": None}), step=p)
    for value in (2.0, p.detach()):
        with (
            pytest.raises(ArgumentError, match="step expected a tensor of PyTorch that requires"),
            override({"Relu": rg.rules.learns(learning.rule, step=value)}),
        ):
            pass
    with (
        pytest.raises(
            ArgumentError, match=r"Half is an autograd\.Function, whose node has no room"
        ),
        override({Half: learning}),
    ):
        pass
    with pytest.raises(RuleError, match="cannot be called"):
        learning(p)
    with (
        pytest.raises(ArgumentError, match="expected a Variable or a Tensor of regrad's, got Par"),
        rg.gradient_override_map({"Relu": learning}),
    ):
        pass


@pytest.mark.parametrize(
    "answer", [lambda dy: dy, lambda dy: (dy, {}), lambda dy: (dy, {"st": dy})]
)
def test_answers_without_the_parameter(answer):
    p, x = nn.Parameter(torch.tensor(2.0)), torch.ones(2, requires_grad=True)
    with override({"Relu": rg.rules.learns(lambda dy, step: answer(dy), step=p)}):
        y = torch.relu(x).sum()
        with pytest.raises(RuleError, match="learns step, and did not return gradients by name"):
            y.backward()


def test_compiled_code_is_refused():
    torch.compiler.reset()
    p, x = nn.Parameter(torch.tensor(2.0)), torch.ones(2, requires_grad=True)
    learning = rg.rules.learns(lambda dy, step: (dy, {"step": step}), step=p)
    compiled = torch.compile(torch.relu, backend="aot_eager")
    with (
        override({"Relu": rg.rules.optional(learning)}),
        pytest.raises(PassedOverError, match="has parameters that learn"),
    ):
        compiled(x)


def test_a_layer_is_quantised_by_a_step_that_learns():
    """LSQ whole: the value is replaced, and the step has a gradient (Esser 2020)."""

    class Quantise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, step):
            ctx.save_for_backward(x, step)
            return torch.round(x / step).clamp(-4, 3) * step

        @staticmethod
        def backward(ctx, dy):
            x, step = ctx.saved_tensors
            v = x / step
            inside = (v > -4) & (v < 3)
            return dy * inside, (dy * torch.where(inside, v.round() - v, v.clamp(-4, 3))).sum()

    def rule(dy, x, step):
        v = x / step
        inside = (v > -4) & (v < 3)
        return dy * inside, {
            "step": (dy * torch.where(inside, v.round() - v, v.clamp(-4, 3))).sum()
        }

    ours, theirs = (torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64)) for _ in range(2))
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    quantise = lambda x, step: torch.round(x / step).clamp(-4, 3) * step  # noqa: E731
    rules = {"Tanh": rg.replace(quantise, rg.rules.learns(rule, step=ours))}
    for _ in range(2):
        with rg.torch.gradient_override_map(rules, values=True):
            y = torch.tanh(a)
        y.square().sum().backward()
        z = Quantise.apply(b, theirs)
        z.square().sum().backward()
        torch.testing.assert_close(y, z, rtol=1e-12, atol=0)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=0)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)
        with torch.no_grad():
            for step in (ours, theirs):
                step -= 0.01 * step.grad


def surrogate(x, no, alpha, more):
    return x


@pytest.mark.parametrize("learned", [False, True])
def test_a_rule_that_does_not_fit_is_placed_at_the_users_function(learned):
    rule = rg.rules.vjp_of(surrogate)
    rule = rg.rules.learns(rule, alpha=torch.ones((), requires_grad=True)) if learned else rule
    place = re.escape(f"(surrogate, {__file__}:{surrogate.__code__.co_firstlineno}) asks for 'no")
    with pytest.raises(RuleError, match=place), override({"Relu": rule}):
        pass
