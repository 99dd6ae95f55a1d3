"""Hooks: around a module's whole call under a rule, and what they run in a backward pass."""

import _thread
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

import regrad as rg
from regrad.errors import PassedOverError
from regrad.rules import optional
from regrad.torch import modes
from tests.torch.common import D, backward, close, function, grad, leaf, override, under

RULE = {rg.at("1"): lambda dy, builtin: 7 * builtin(dy)}
RELU = {"Relu": lambda dy: 7 * dy}
both_roads = pytest.mark.parametrize("road", [grad, backward])


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).to(D)


def inputs():
    return torch.linspace(-1, 1, 12, dtype=D).reshape(4, 3).requires_grad_()


WAYS = {
    "hook": lambda m, hook: m.register_forward_hook(hook),
    "always": lambda m, hook: m.register_forward_hook(hook, always_call=True),
    "keywords": lambda m, hook: m.register_forward_hook(
        lambda module, xs, options, y: hook(module, xs, y), with_kwargs=True),
    "global": lambda m, hook: torch_module.register_module_forward_hook(
        lambda module, xs, y: hook(module, xs, y) if module is m else None),
}  # fmt: skip


@both_roads
@pytest.mark.parametrize("way", WAYS)
def test_an_output_that_a_forward_hook_takes_out_has_the_rule_behind_it(way, road):
    net, x, found = model(), inputs(), {}
    handle = WAYS[way](net[1], lambda module, xs, y: found.update(module=module, y=y))
    try:
        net(x)
        due = grad(found["y"], x)
        with override(RULE, model=net) as used:
            net(x)
    finally:
        handle.remove()
    assert found["module"] is net[1]
    torch.testing.assert_close(road(found["y"], x), 7 * due)
    used.assert_fired()


def test_the_input_that_hooks_see_is_on_the_way():
    net, x, found = model(), inputs(), {}
    net[1].register_forward_pre_hook(lambda module, xs: found.update(x=xs[0]))
    due = grad(net(x), found["x"])
    y = under(RULE, net, x, model=net)
    torch.testing.assert_close(grad(y, found["x"]), 7 * due)


@pytest.mark.parametrize("add", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_see_what_enters_and_leaves_the_call(add):
    net, x, found = model(), inputs(), []
    getattr(net[1], add)(lambda module, *grads: found.append((module, *grads)))
    net(x).sum().backward()
    with override(RULE, model=net):
        net(x).sum().backward()
    (_, *plain), (module, *ruled) = found
    assert module is net[1]
    close(ruled[-1], plain[-1])  # the gradients of outputs
    for dx, due in zip(ruled[:-1], plain[:-1], strict=True):
        close(dx, [7 * due[0]])


def test_hooks_change_inputs_outputs_and_gradients():
    net, x = model(), inputs()
    net[1].register_forward_pre_hook(lambda module, xs: (2 * xs[0],))
    net[1].register_forward_hook(lambda module, xs, y: 3 * y)
    net[1].register_full_backward_hook(lambda module, dxs, dys: (5 * dxs[0],))
    plain = net(x)
    y = under(RULE, net, x, model=net)
    close([y, grad(y, x)], [plain, 7 * grad(plain, x)])


NORMS = {
    "weight_norm": old_weight_norm,
    "spectral_norm": old_spectral_norm,
    "prune": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("reads", [False, True])
def test_what_hooks_put_on_the_module_is_an_input(norm, reads):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), NORMS[norm](nn.Linear(3, 3))).to(D)
    x = inputs()
    net(x)
    net.eval()  # (a spectral norm goes on with its iteration in training)
    leaves = [x, *net.parameters()]
    due = torch.autograd.grad(net(x).square().sum(), leaves)
    others = dict.fromkeys([name for name, _ in net[1].named_parameters()])

    def reading(dy, x, weight, builtin):
        return 2 * dy @ weight, {"weight": 2 * dy.mT @ x, **others, "bias": 2 * dy.sum(0)}

    reads = reads and not norm.startswith("param")
    rule = reading if reads else lambda dy, builtin: builtin(2 * dy)
    with override({rg.at("1"): rule}, model=net):
        y = net(x).square().sum()
    close(torch.autograd.grad(y, leaves), [2 * dx for dx in due], 1e-7)


class Asks(nn.Module):
    def forward(self, q, k=None, *, v=None):
        return q * 2 if q is k and (v is None or v is q) else q * 3 * (k if v is None else v)


class AsksItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0], dtype=D))

    def forward(self, x):
        return 2 * x * self.w if x is self.w else x * self.w


SAME = {
    "by place": (Asks(), lambda m, x: m(x, x)),
    "by keyword": (Asks(), lambda m, x: m(x, k=x)),
    "all three": (Asks(), lambda m, x: m(x, x, v=x)),
    "another": (Asks(), lambda m, x: m(x, x * 1)),
    "another keyword": (Asks(), lambda m, x: m(x, x, v=x * 1)),
    "a parameter": (AsksItsOwn(), lambda m, x: m(m.w)),
}


@pytest.mark.parametrize("name", SAME)
def test_two_arguments_that_are_one_tensor_stay_one(name):
    module, call = SAME[name]
    x = inputs() if isinstance(module, Asks) else module.w
    plain = call(module, x)
    net = nn.Sequential(module)
    y = under({rg.at("0"): lambda dy, builtin: builtin(-5 * dy)}, call, net[0], x, model=net)
    close([y, grad(y, x)], [plain, -5 * grad(plain, x)])


# -- ops that the user's code runs in a backward pass are under the rules of the scope -------------


def rematerialized(dy, x):
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = torch.relu(x)
    torch.autograd.backward(y, dy)
    return x.grad


ByHand = function(
    lambda x: torch.relu(x), rematerialized, "ByHand"
)  # a checkpoint, as people write it
# Its derivative is a ReLU.
HalfSquare = function(lambda x: x * x / 2, lambda dy, x: dy * torch.relu(x))


def hooked(add):
    """Return a function that squares its input, with a hook on the way."""

    def f(x):
        y = x * 1
        add(y)
        return y * y

    return f


by_tensor_hook = hooked(lambda y: y.register_hook(torch.relu))


def by_module_hook(x):
    module = nn.Identity()
    module.register_full_backward_hook(lambda module, dxs, dys: (torch.relu(dxs[0]),))
    return module(x * 1) ** 2


# The second derivative at 1, with ReLUs of gradients in it; each is 7 times as large by the rule.
SECOND = {
    "tensor hook": (by_tensor_hook, 2), "node hook": (hooked(
        lambda y: y.grad_fn.register_hook(lambda dxs, _: (torch.relu(dxs[0]), *dxs[1:]))), 2),
    "prehook": (hooked(lambda y: y.grad_fn.register_prehook(lambda dys: (torch.relu(dys[0]),))), 2),
    "module hook": (by_module_hook, 2), "Function": (HalfSquare.apply, 1),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using backward")
@both_roads
@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("other", [{}, {"Tanh": optional(lambda dy: dy)}], ids=["one", "two"])
def test_second_derivatives(name, road, other):
    f, due = SECOND[name]
    x = leaf(1)
    assert road(road(f(x), x, create_graph=True), x).item() == due
    with override(RELU) as used, override(other):
        dx = road(f(x), x, create_graph=True)
    assert road(dx, x).item() == 7 * due
    used.assert_fired("Relu")


@both_roads
def test_a_checkpoint_by_hand(road):
    x = leaf(1)
    with pytest.raises(PassedOverError, match=r"keep=\[ByHand\]"), override(RELU):
        ByHand.apply(x)
    with override(RELU, keep=[ByHand]) as used:
        assert road(ByHand.apply(x), x).item() == 7
    used.assert_fired("Relu")


def test_values_are_replaced_in_hooks_and_a_pass_after_the_scope_has_no_rule():
    x = leaf(1)
    with override({"Relu": rg.replace(lambda x: 5 * x)}, values=True):
        assert grad(by_tensor_hook(x), x).item() == 10
    y = under({"Relu": optional(RELU["Relu"])}, by_tensor_hook, x)
    assert grad(grad(y, x, create_graph=True), x).item() == 2


def test_a_thread_of_the_engine(monkeypatch):
    """On a GPU the engine has threads, to which torch carries modes but no context."""
    x, found = leaf(1), []

    def elsewhere(mode):
        with mode:
            y = torch.relu(x)
        found.append(grad(y, x).item())

    def hook(dy):
        done = threading.Event()
        (mode,) = torch.overrides._get_current_function_mode_stack()
        _thread.start_new_thread(lambda: (elsewhere(mode), done.set()), ())
        assert done.wait(60)

    y = x * 1
    y.register_hook(hook)
    monkeypatch.setattr(modes, "current_pass", lambda: 0)
    with override(RELU):
        grad(y, x)
    assert found == [7]
