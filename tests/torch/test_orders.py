"""`order=1`: the derivative of a gradient that rules have made, against differences of it."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import GradientError
from tests.helpers.differences import error, jacobian
from tests.torch.common import D, close, function, grad, orders, override, under
from tests.torch.placed import refused

GENERATOR = torch.Generator().manual_seed(0)
draw = partial(torch.randn, generator=GENERATOR, dtype=D)
X = draw(1, 1, 6).numpy()
V = draw(4).numpy()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.dense = torch.nn.Conv1d(1, 3, 3), torch.nn.Linear(12, 5)
        self.act, self.last = torch.nn.ReLU(inplace=True), torch.nn.Linear(5, 3)
        for p in self.parameters():
            p.data = draw(p.shape)

    def forward(self, x):
        h = torch.tanh(self.conv(x)).flatten(1)
        return torch.tanh(self.last(self.act(self.dense(h))))


NET = Net()
RULES = {
    "MatMul": lambda dy, a, b: (a * ((dy / ((a @ b) ** 2 + 0.5)) @ b.mT), None),
    "Tanh": lambda dy, x, y: dy * y * x,
    "Relu": lambda dy, x: dy * x * torch.sigmoid(x),
}


def explained(f, x, rules=RULES, order=1, model=None):
    """The gradient of a sum of squares, an explanation by the rules."""
    y = under(rules, lambda: f(x) ** 2, model=model, order=order)
    return grad(y, x, create_graph=True)


def of_arrays(g):
    return lambda x: g(torch.tensor(x, requires_grad=True)).detach().numpy()


def by_autograd(g, x):
    x = torch.tensor(x, requires_grad=True)
    y = g(x)
    rows = [grad(e, x, retain_graph=True) for e in y.flatten()]
    return torch.stack(rows).reshape(*y.shape, *x.shape).numpy()


def once_more(g, x):
    """The gradient of a sum of a gradient."""
    weights = torch.arange(1, x.numel() + 1, dtype=D).reshape(x.shape)
    return grad(g(x) * weights, x, create_graph=True)


def check(g, x):
    """Check the second and the third derivative."""
    for f in (g, partial(once_more, g)):
        assert error(by_autograd(f, x), jacobian(of_arrays(f), x)) < 1e-6


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("f", [NET, lambda x: checkpoint(NET, x, use_reentrant=False)])
def test_to_third_order(f):
    check(partial(explained, f), X)
    rules_at_every_order = by_autograd(partial(explained, f, order=None), X)
    assert error(rules_at_every_order, jacobian(of_arrays(partial(explained, f)), X)) > 0.1


def test_a_reentrant_checkpoint_to_first_order():
    x = torch.tensor(X, requires_grad=True)
    with override(RULES, order=1):
        (checkpoint(NET, x, use_reentrant=True) ** 2).sum().backward()
    close([x.grad], [explained(NET, torch.tensor(X).requires_grad_())], 0)


@pytest.mark.slow
def test_torch_func():
    def g(x):
        return torch.func.grad(lambda x: (NET(x) ** 2).sum())(x)

    x, expected = torch.tensor(X), jacobian(of_arrays(partial(explained, NET)), X)
    with override(RULES, order=1), torch.no_grad():
        assert error(torch.func.jacrev(g)(x), expected) < 1e-6
        rows = torch.func.vmap(torch.func.jacrev(g))(torch.stack([x, 2 * x]))
        assert error(rows[0], expected) < 1e-6
        third = torch.func.jacrev(torch.func.grad(lambda x: (g(x) * x).sum()))(x)
    along = of_arrays(lambda x: grad(explained(NET, x) * x, x))
    assert error(third, jacobian(along, X)) < 1e-6


Cube = function(lambda x: x**3, lambda dy, x: dy * 3 * x * x, "Cube")
CubeInParts = function(
    lambda x, factor: factor * x**3, lambda dy, x, factor: dy * 3 * factor * x * x, "CubeInParts",
    newer=True,
)  # fmt: skip
TANH_TWICE = lambda x: torch.tanh(torch.tanh(x))  # noqa: E731
MODULE = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid(), torch.nn.Tanh())
CASES = {
    "a Function": (lambda x: Cube.apply(Cube.apply(x.tanh())), {Cube: lambda dy, x: dy * x}),
    "a Function in parts": (lambda x: CubeInParts.apply(CubeInParts.apply(x.tanh(), 2.0), 0.5),
         {CubeInParts: lambda dy, x, builtin: builtin(dy) * x}),
    "a callable": (lambda x: torch.erfinv(torch.erfinv(x.tanh() / 2) / 2),
         {torch.erfinv: lambda dy, x: dy * x}),
    "in place": (lambda x: (x * 1).tanh_().mul(2).sigmoid_(),
         {"Tanh": lambda dy, x, y: dy * y * x, "Sigmoid": lambda dy, y: dy * y * y}),
    "builtin": (TANH_TWICE, {"Tanh": lambda dy, builtin, y: builtin(dy) * y}),
    "forward": (TANH_TWICE, {"Tanh": lambda dy, forward, x: dy * forward(x * 1.5)}),
    "by regrad": (TANH_TWICE, {"Tanh": lambda dy, x, y: dy * y * rg.sin(x)}),
    "TensorFlow's form": (TANH_TWICE, {"Tanh": lambda op, grad: grad * op.outputs[0]}),
    "another op's": (TANH_TWICE, {"Tanh": "Sigmoid"}),
    "two inputs": (lambda x: (x * 3) * x.exp() * 2, {"Mul": lambda dy, a, b: (dy * b, dy * a * a)}),
    "places": (
        MODULE,
        {
            rg.at("0", "Tanh"): lambda dy, y: dy * y * y,
            rg.at("2", "Tanh"): lambda dy, x, site: dy * x,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_keys_and_rules(case):
    f, rules = CASES[case]
    check(partial(explained, f, rules=rules, model=MODULE if case == "places" else None), V)


def test_a_pass_through_a_gradient_and_past_it():
    x, t = torch.tensor(V, requires_grad=True), torch.tensor(np.tanh(V))
    with override({"Tanh": lambda dy, y: dy * y}, order=1) as used:
        y = (torch.tanh(x) ** 2).sum()
    g = grad(y, x, create_graph=True)
    penalty = 2 * (2 * t * t) * (4 * t * (1 - t * t))
    both = grad(y + (g**2).sum(), x, retain_graph=True)
    apart = grad(g**2, x, retain_graph=True)
    y.backward()
    assert used.hits[0].ran == 2  # (a pass through g takes tanh's own derivative)
    close([both, x.grad + apart], [2 * t * (1 - t * t) + penalty, 2 * t * t + penalty])


@pytest.mark.parametrize("run", ["plain", "checkpoint", "torch.func"])
def test_rules_that_return_constants(run):
    """The gradient by a weight depends on x by what is before it alone."""
    weight, x = draw(4, 3), draw(2, 4).numpy()

    def f(x, w):
        return torch.tanh(torch.tanh(x) @ w).sum()

    def g(x):
        if run == "torch.func":
            return torch.func.grad(f, 1)(x, weight)
        w = weight.clone().requires_grad_()
        with override({"Tanh": lambda dy: dy}, order=1):
            y = checkpoint(f, x, w, use_reentrant=False) if run == "checkpoint" else f(x, w)
        return grad(y, w, create_graph=True)

    if run == "torch.func":
        with override({"Tanh": lambda dy: dy}, order=1):
            found = torch.func.jacrev(g)(torch.tensor(x))
    else:
        found = by_autograd(g, x)
    t = 1 - np.tanh(x) ** 2  # ∂ Σⱼ tanh(xⱼᵢ) / ∂ xⱼᵢ
    expected = np.einsum("ik,ji,l->iljk", np.eye(4), t, np.ones(3))
    assert error(found, expected) < 1e-12


def test_scopes_in_scopes():
    def g(x):
        inner = override({"Sigmoid": lambda dy, y: dy * y * 3})
        with override({"Tanh": lambda dy, y: dy * y * y}, order=1), inner:
            y = torch.sigmoid(torch.tanh(x)) ** 2
        return grad(y, x, create_graph=True)

    t = np.tanh(V)
    s, slope = 1 / (1 + np.exp(-t)), 1 - t * t
    # g = t² · 3s · 2s, where tanh has its own derivative and sigmoid that of its rule
    expected = 12 * t * s * s * slope + t * t * 12 * s * (3 * s) * slope
    assert np.allclose(np.diag(by_autograd(g, V)), expected)


def test_autocast():
    x = torch.tensor(X, dtype=torch.float32, requires_grad=True)
    net = Net().float()
    with torch.autocast("cpu", dtype=torch.bfloat16), override(RULES, order=1):
        y = net(x).float() ** 2
    g, second = orders(y, x)
    assert g.dtype == second.dtype == torch.float32 and second.isfinite().all()


@pytest.mark.parametrize("transform", [torch.func.jacfwd, torch.func.hessian])
def test_forward_mode_is_refused(transform):
    f = transform(lambda x: torch.tanh(x).sum())
    refused(r"forward mode: .* 'Tanh' .* order=1", {"Tanh": lambda dy, y: dy * y},
            lambda: f(torch.tensor(V)), GradientError, order=1)  # fmt: skip


@pytest.mark.slow
def test_compiled_code():
    x, t = torch.tensor(V, requires_grad=True), np.tanh(V)
    compiled = torch.compile(lambda x: torch.tanh(x) * 1, backend="aot_eager")
    with override({"Tanh": lambda dy, y: dy * y}, order=1):
        y = compiled(x) ** 2
        with pytest.raises(GradientError, match=r"order=1: .* under torch\.func in a program"):
            torch.compile(torch.func.grad(lambda x: torch.tanh(x).sum()), backend="aot_eager")(x)
        checkpoint(torch.sin, x, use_reentrant=False)  # (saved tensors may have hooks again)
        twice = torch.func.grad(
            lambda x: torch.func.grad(lambda x: (compiled(x) ** 2).sum())(x).sum()
        )
        found = twice(torch.tensor(V))
    g = grad(y, x, create_graph=True)
    assert np.allclose(g.detach(), 2 * t * t)
    with pytest.raises(RuntimeError, match="double backward"):
        grad(g, x)
    assert np.allclose(found, 4 * t * (1 - t * t))


@pytest.mark.parametrize("several", [False, True])
def test_a_gradient_that_is_the_root_of_the_pass(several):
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    with override({"Tanh": lambda dy, y: dy * y}, order=1):
        g = grad(x.tanh() ** 2, x, create_graph=True)  # 2 tanh(x)²
    torch.autograd.backward([g, g] if several else g)
    y = x.detach().tanh()
    torch.testing.assert_close(x.grad, (1 + several) * 4 * y * (1 - y**2))


@pytest.mark.parametrize("name", ["epsilon_plus", "epsilon_alpha2_beta1", "cp_lrp", "excitation"])
def test_the_derivative_of_relevance(name):
    """That of the composites: to train an explanation, or to see how stable it is."""
    net = torch.nn.Sequential(
        torch.nn.Conv1d(1, 3, 3), torch.nn.ReLU(), torch.nn.AvgPool1d(2), torch.nn.Flatten(),
        torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2),
    ).to(D)  # fmt: skip
    own = torch.Generator().manual_seed(0)  # (with other draws all of a layer may be dead)
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=own, dtype=D)
    weights = torch.randn(X.shape, generator=own, dtype=D)

    def weighed(x):
        y = under(getattr(rg.rules.lrp, name)(), lambda: net(x)[:, 1], model=net, order=1)
        return (x * grad(y, x, create_graph=True) * weights).sum()

    x = torch.tensor(X, requires_grad=True)
    found = grad(weighed(x), x)
    expected = jacobian(of_arrays(weighed), X)
    assert found.abs().max() > 1e-3
    assert error(found.numpy(), expected.reshape(found.shape)) < 1e-6
