"""Whole calls of modules whose value a rule replaces, against models written by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import ArgumentError, GradientError, PassedOverError, RuleError
from tests.torch.common import D, close, function, numbers, override, under
from tests.torch.placed import WAYS, Made, Net, X, gradients, refused

at, replace = rg.at, rg.replace


def make(run=None):
    return Net([nn.Tanh] * 2, run)


def rounded(x, weight, bias):
    return F.linear(torch.round(4 * x) / 4, torch.round(8 * weight) / 8, bias)


def straight_through(dy, x, weight, bias):
    return dy @ weight, {"weight": dy.mT @ x, "bias": dy.sum(0)}


def bent(x, weight, bias):
    return F.linear(x.sin(), weight * weight, bias.exp())


def twice_its_own(x, forward):
    return 2 * forward(x.cos()) + x.sum(1, keepdim=True)


def of_its_own_value(y):
    return y.sin()


def partly(dy, x, weight, bias):
    return dy @ weight, {"weight": None, "bias": 5 * dy.sum(0)}


ByHand = function(rounded, lambda dy, x, w, b: (dy @ w, dy.mT @ x, dy.sum(0)), "ByHand")
RULES = {
    "straight through": (replace(rounded, straight_through), ByHand.apply),
    "a function": (replace(bent), bent),
    "its own function": (
        replace(twice_its_own), lambda x, w, b: 2 * F.linear(x.cos(), w, b) + x.sum(1, keepdim=True)
    ),
    "its own value": (replace(of_its_own_value), lambda x, w, b: F.linear(x, w, b).sin()),
    "some gradients": (
        replace(bent, partly),
        function(bent, lambda dy, x, w, b: (dy @ w, 0 * w, 5 * dy.sum(0)), "Some").apply,
    ),
}  # fmt: skip


def with_head(model, head):
    """Put a function of the head's input and parameters in the place of the head."""
    old = model.head
    model.head = Made(lambda m, x: head(x, old.weight, old.bias), old=old)
    return model


def results(model, f=None, x=X):
    """Return the value, and the gradients; zeros for None."""
    f = model if f is None else f
    model.zero_grad()
    y = f(x)
    y.pow(2).sum().backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [y.detach(), *grads]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RULES)
def test_values_and_gradients(name, way):
    rule, head = RULES[name]
    model, f = WAYS[way](make)
    plain, expected = results(model, f), results(with_head(make(), head))
    with override({at("head"): rule}, model=model, values=True) as used:
        found = results(model, f)
    close(found, expected, 1e-10)
    used.assert_fired()
    assert {(hit.path, hit.op_type) for hit in used.hits} == {("head", "Linear")}
    assert not torch.equal(found[0], plain[0])
    close(results(model, f), plain)


@pytest.mark.slow(but=2)
@pytest.mark.versions
@pytest.mark.parametrize("name", RULES)
def test_one_program(name):
    """The value and the gradient are in the program, without a break."""
    rule, head = RULES[name]
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain, expected = results(model), results(with_head(make(), head))
    for first in (True, False):
        with override({at("head"): rule}, model=model, values=True) as used:
            close(results(model, compiled), expected, 1e-10)
        if first:  # (the second scope runs the program that the first one has compiled)
            used.assert_fired()
        close(results(model, compiled), plain)


class Images(nn.Module):
    def __init__(self, conv, size):
        super().__init__()
        torch.manual_seed(0)
        self.conv = conv(2, 3, 2, padding=1, bias=False)
        self.size = size
        self.double()

    def forward(self, x):
        return self.conv(x.reshape(2, *self.size)).flatten(1).tanh()


CONVS = [(nn.Conv1d, F.conv1d, (2, 6)), (nn.Conv2d, F.conv2d, (2, 2, 3)),
         (nn.Conv3d, F.conv3d, (2, 1, 2, 3))]  # fmt: skip


@pytest.mark.slow(but=1)
@pytest.mark.versions
@pytest.mark.parametrize(
    ("conv", "convolve", "size"), CONVS, ids=lambda v: getattr(v, "__name__", "")
)
@pytest.mark.parametrize("compiles", [True, False])
def test_convolutions(conv, convolve, size, compiles):
    def squared(x, weight):
        return convolve(x.sin(), weight * weight, padding=1)

    model, by_hand, x = Images(conv, size), Images(conv, size), numbers(2, 12)
    by_hand.forward = lambda x: squared(x.reshape(2, *size), by_hand.conv.weight).flatten(1).tanh()
    f = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
    expected = results(by_hand, x=x)
    with override({at("conv"): replace(squared)}, model=model, values=True) as used:
        close(results(model, f, x), expected)
    used.assert_fired()


@pytest.mark.slow
@pytest.mark.versions
def test_a_program_is_for_the_settings_of_one_module():
    """Two layers with weights of one shape and other strides have two programs."""

    class Holder(nn.Module):
        def __init__(self, stride):
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv1d(1, 1, 2, stride=stride).double()

        def forward(self, x):
            return self.conv(x[:, None]).flatten(1)

    for stride in (1, 3):
        model = Holder(stride)
        expected = results(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with override({at(nn.Conv1d): lambda dy, builtin: builtin(3 * dy)}):
            value, *grads = results(model, compiled)
        close([value, *grads], [expected[0], *[3 * dx for dx in expected[1:]]])


SECOND = ["a function", "its own function", "its own value", "straight through"]


@pytest.mark.parametrize("name", SECOND)
def test_second_order(name):
    rule, head = RULES[name]
    model, by_hand, x = make(), with_head(make(), head), X.clone().requires_grad_()

    def second(model):
        leaves = [x, *model.parameters()]
        dxs = torch.autograd.grad(model(x).sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(dx.square().sum() for dx in dxs), leaves)

    expected = second(by_hand)
    with override({at("head"): rule}, model=model, values=True):
        close(second(model), expected, 1e-10)


@pytest.mark.parametrize("name", SECOND)
def test_torch_func(name):
    rule, head = RULES[name]
    model = make()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sin().sum()

    with override({at("head"): rule}, model=model, values=True):
        found = torch.func.grad(loss)(parameters, X)
        rows = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, X[:, None])
    by_hand = with_head(make(), head)
    expected = torch.autograd.grad(by_hand(X).sin().sum(), [*by_hand.parameters()])
    close(found.values(), expected, 1e-10)
    close([row.sum(0) for row in rows.values()], expected, 1e-10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_without_a_gradient(mode):
    model = make()
    with override({at("head"): replace(bent)}, model=model, values=True) as used, mode():
        found = model(X)
    close([found], [with_head(make(), bent)(X)])
    assert [(hit.count, hit.ran) for hit in used.hits] == [(1, 0)]


def test_autocast():
    model, by_hand, x = make().float(), with_head(make(), bent).float(), X.float()

    def run(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return gradients(model, lambda x: model(x).float(), x)

    expected = run(by_hand)
    with override({at("head"): replace(bent)}, model=model, values=True):
        close(run(model), expected, 0.02)


def test_a_parameter_that_the_rule_learns():
    """A learned step, as in LSQ, also in a program of torch.compile."""

    def scaled(x, weight, bias, step):
        return F.linear(x, weight * step, bias)

    model, step = make(), nn.Parameter(torch.tensor(0.5, dtype=D))
    expected = torch.autograd.grad(
        with_head(model, lambda x, w, b: scaled(x, w, b, step))(X).sin().sum(), step
    )
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for f in (model, compiled):
        with override({at("head"): replace(scaled, step=step)}, model=model, values=True):
            close(torch.autograd.grad(f(X).sin().sum(), step), expected)


# -- programs of public threads --------------------------------------------------------------------


def test_a_clip_and_a_reversal_in_one_program():
    model = make()
    rules = {at("head"): lambda dy, builtin: builtin(dy.clamp(-0.1, 0.1)),
             at("layers.0.first"): rg.rules.reverse(0.5)}  # fmt: skip
    with override(rules, model=model):
        expected = gradients(model)
    with override(rules, model=model) as used:
        close(gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True)), expected)
    used.assert_fired()
    held = model.head.register_forward_hook(
        lambda m, xs, y: y.register_hook(lambda dy: dy.clamp(-0.1, 0.1)) and None
    )
    by_hooks = gradients(model)
    held.remove()
    close(expected[-2:], by_hooks[-2:])


def test_a_frozen_head():
    model = make()
    model.head.requires_grad_(False)
    with override({at("head"): replace(bent)}, model=model, values=True):
        y = model(X)
        y.square().sum().backward()
    by_hand = with_head(make(), bent)
    by_hand.head.requires_grad_(False)
    due = by_hand(X)
    due.square().sum().backward()
    close([y], [due])
    assert model.head.weight.grad is None
    close(
        [p.grad for p in model.layers.parameters()], [p.grad for p in by_hand.layers.parameters()]
    )


class Shared(nn.Module):
    """One layer under two names, called twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.b = self.a
        self.double()

    def forward(self, x):
        return self.head(self.b(self.a(x).tanh()))


class SharedByHand(Shared):
    def __init__(self, *replaced):
        super().__init__()
        self.replaced = replaced

    def forward(self, x):
        for i in range(2):
            f = bent if i in self.replaced else F.linear
            x = f(x, self.a.weight, self.a.bias)
            x = x.tanh() if i == 0 else x
        return self.head(x)


@pytest.mark.parametrize(("key", "replaced"), [
    (at("a"), (0, 1)), (at("b"), (0, 1)), (at(nn.Linear, nth=0), (0, 1)),
    (at(lambda site: site.path == "a" and site.nth == 2), (1,)),  # (the model is the first call)
])  # fmt: skip
def test_a_module_that_is_shared_and_called_twice(key, replaced):
    model = Shared()
    with override({key: replace(bent)}, model=model, values=True) as used:
        found = results(model)
    close(found, results(SharedByHand(*replaced)))
    assert sum(hit.ran for hit in used.hits) == len(replaced)


def test_hooks_run_around_the_new_value():
    model, seen = make(), []
    model.head.register_forward_pre_hook(lambda m, xs: (2 * xs[0],))
    model.head.register_forward_hook(lambda m, xs, y: seen.append(y) or 3 * y)
    model.head.register_full_backward_hook(lambda m, dxs, dys: (5 * dxs[0],))
    by_hand = make()
    by_hand.layers[1].register_full_backward_hook(lambda m, dxs, dys: None)

    def head(x, w, b):
        x = x * 2
        x.register_hook(lambda dy: 5 * dy)
        return 3 * bent(x, w, b)

    with override({at("head"): replace(bent)}, model=model, values=True):
        found = results(model)
    expected = results(with_head(by_hand, head))
    close(found, expected)
    close([3 * seen[0]], [expected[0]])


# -- the call without values, for the shapes -------------------------------------------------------


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.lin(x))


def test_the_module_itself_leaves_no_trace():
    model, seen = nn.Sequential(Normed()).double(), []
    model[0].lin.register_forward_hook(lambda m, xs, y: seen.append(y))
    before = [b.clone() for b in model.buffers()]
    with override({at("0"): replace(lambda x, lin_weight: x @ lin_weight)}, model=model,
                  values=True):  # fmt: skip
        y = model(X)
    close([y], [X @ model[0].lin.weight])
    assert all(map(torch.equal, before, model.buffers()))
    assert not seen


def test_a_module_that_reads_its_values():
    f = lambda m, x: x if x.sum().item() > -1e9 else x.sum()  # noqa: E731
    y = under({at(Made): replace(lambda xs: xs[0].sin())}, Made(f), X, values=True)
    close([y], [X.sin()])


def test_random_numbers_of_the_module_are_not_drawn():
    module = nn.Dropout(0.5)
    torch.manual_seed(3)
    due = torch.rand(2)
    torch.manual_seed(3)
    close([under({at(module): replace(lambda x: 2 * x)}, module, X, values=True)], [2 * X])
    assert torch.equal(torch.rand(2), due)


# -- what is refused -------------------------------------------------------------------------------

OF_MATMUL = {"MatMul": rg.rules.optional(rg.rules.scale(1.0))}


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("rule", [replace(bent), lambda dy, builtin: builtin(dy)])
def test_ops_inside(rule, compiles):
    model = make()
    f = torch.compile(model, backend="aot_eager") if compiles else model
    rules = {at("head"): rule, **OF_MATMUL}
    refused("MatMul ran inside of a call of Linear", rules, lambda: f(X), model=model, values=True)
    with override({at("head"): rule}, model=model, values=True):
        expected = gradients(model)
    with override(rules, model=model, values=True, keep=[at("head")]):
        close(gradients(model, f), expected)


@pytest.mark.parametrize(("rule", "error", "words"), [
    (replace(lambda x: x), RuleError, r"returned the shape \(6, 4\).*own result, the shape \(6, 2"),
    (replace(lambda x: 3), RuleError, "returned int, expected one tensor"),
    (replace(lambda q: q), RuleError, "has no 'q'.*It may name input, weight, bias"),
    (replace(bent, lambda dy, x: dy), RuleError, "returns no gradient for the parameter 'weight'"),
    (replace(lambda x: x.mul_(2)[:, :2]), PassedOverError, "wrote into an argument"),
])  # fmt: skip
def test_replacements_that_are_refused(rule, error, words):
    model = make()
    refused(words, {at("head"): rg.rules.optional(rule)}, lambda: model(X), error, model=model,
            values=True)  # fmt: skip


def test_a_parameter_that_nobody_passed():
    model, step = make(), nn.Parameter(torch.ones((), dtype=D))
    rules = {at("head"): rg.rules.optional(replace(lambda x, weight: step * x @ weight.mT))}
    words = r"neither an argument nor a parameter of the module.*rg\.rules\.learns"
    refused(words, rules, lambda: model(X), model=model, values=True)
    compiled = torch.compile(model, backend="aot_eager")
    words = "the program of torch.compile does not have as inputs"
    refused(words, rules, lambda: compiled(X), model=model, values=True)


def test_values_and_orders():
    refused("needs values=True", {at("head"): replace(bent)}, error=ArgumentError, model=make())
    refused("order=1", {at("head"): replace(bent)}, error=ArgumentError, model=make(),
            values=True, order=1)  # fmt: skip


def test_random_numbers_that_a_checkpoint_would_draw_again():
    model = Made(lambda m, x: x)
    with override({at(Made): replace(lambda xs: xs[0] * torch.rand_like(xs[0]))}, values=True):
        y = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False)
        with pytest.raises(GradientError, match="draws random numbers"):
            y.sum().backward()


def test_forward_mode():
    model = make()
    rules = {at("head"): replace(bent)}
    refused("Use reverse mode", rules, lambda: torch.func.jvp(model, (X,), (X,)), GradientError,
            model=model, values=True)  # fmt: skip


def test_export():
    model, rules = make(), {at("head"): rg.rules.optional(replace(bent))}
    words = r"torch\.export writes .* rg\.at\('head'\)"
    refused(words, rules, lambda: torch.export.export(model, (X,)), model=model, values=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(("key", "hook"), [
    (at("layers.0"), False), (at("layers.0.act"), False), (at("head"), True),
    (at(lambda site: site.path == "head"), False),
])  # fmt: skip
def test_modules_that_run_between_two_programs_are_named(key, hook):
    model = make()
    if hook:
        model.head.register_forward_hook(lambda m, xs, y: 3 * y)
    rules = {key: rg.rules.optional(lambda dy, builtin: builtin(2 * dy))}
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    words = r"the call of \w+ \('.*'\) has a rule of regrad as a whole, and runs in Python"
    refused(words, rules, lambda: whole(X), Exception, model=model)
    with override(rules, model=model):
        expected = gradients(model)
    with override(rules, model=model):
        close(gradients(model, torch.compile(model, backend="aot_eager")), expected)
