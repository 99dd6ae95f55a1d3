"""Results of calls under a rule that are changed in place, as torch allows it without a rule."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

import regrad as rg
from tests.torch.common import override

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
A, B = torch.linspace(0.1, 1, 6).double().view(2, 3), torch.linspace(-1, 1, 12).double().view(3, 4)
PRODUCTS = {
    "einsum": (torch.einsum, lambda a, b: torch.einsum("ij,jk->ik", a, b)),
    "transposed": (torch.einsum, lambda a, b: torch.einsum("ij,jk->ki", a, b)),
    "tensordot": (torch.tensordot, lambda a, b: torch.tensordot(a, b, 1)),
    "inner": (torch.inner, lambda a, b: torch.inner(a, a) + b[0, 0]),
    "bilinear": (F.bilinear, lambda a, b: F.bilinear(a, a, B[None, :, :3] * b[0, 0])),
    "multi_dot": (torch.linalg.multi_dot, lambda a, b: torch.linalg.multi_dot([a, b])),
    "lstm": (torch.lstm, lambda a, b: torch.lstm(
        a[None], (a[None, :, :1], a[None, :, :1]), [b.expand(3, 4).T, torch.ones(4, 1).double()],
        False, 1, 0.0, False, False, True)[0]),
}  # fmt: skip
CHANGES = {
    "+=": lambda y: y.add_(1),
    "a part": lambda y: y[0].mul_(2),
    "an op": lambda y: torch.tanh_(y),
}


@pytest.mark.slow(but=17)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("own_key", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_changed_in_place(name, own_key, change):
    key, f = PRODUCTS[name]

    def run(rules):
        xs = [A.clone().requires_grad_(), B.clone().requires_grad_()]
        with nullcontext() if rules is None else override(rules):
            y = f(*xs)
        CHANGES[change](y)
        y.square().sum().backward()
        return y.detach(), y.stride(), [x.grad for x in xs]

    rules = {key: lambda dy, builtin: builtin(dy)} if own_key else {"MatMul": "MatMul"}
    expected, strides, dxs = run(None)
    for _ in range(2):  # (the second is known)
        y, found, gradients = run(rules)
        assert torch.equal(y, expected) and found == strides
        torch.testing.assert_close(gradients, dxs)


def test_a_rule_of_the_callable_holds():
    x = A.clone().requires_grad_()
    for _ in range(2):
        with override({torch.einsum: lambda dy, xs: [7 * xs[0], None]}):
            y = torch.einsum("ij,jk->ik", x, B)
            y += 1
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(dx, 7 * A)


VIEWS = {
    "view": ("Reshape", lambda x: x.view(-1)),
    "transpose": (torch.transpose, lambda x: torch.transpose(x, 0, 1)),
    "select": (torch.Tensor.__getitem__, lambda x: x[0]),
}
RULES = {
    "builtin": lambda dy, builtin: builtin(dy),
    "scaled": lambda dy, builtin: builtin(2 * dy),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_an_input_is_not_changed(name, rule):
    """torch would drop the rule: it refuses. The gradient past such a rule ignored the change."""
    key, f = VIEWS[name]
    x = A.clone().requires_grad_()
    for _ in range(2):
        h = x * 1
        with override({key: rg.rules.optional(RULES[rule])}):
            y = f(h)
            with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                y.mul_(2)
        f(x).sum().backward()
    with override({"Reshape": RULES[rule]}):
        copied = x.T.reshape(-1)
        copied += 1
