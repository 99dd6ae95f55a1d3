"""Rules for parameters of PyTorch models, on the sum of all gradients.

The reference is the gradient without regrad, to which the test applies the rule by hand, or a hook
of the parameter. Second derivatives are compared with differences.
"""

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import (
    ArgumentError,
    NotFiredError,
    PassedOverError,
    RuleError,
    UnusedOverrideWarning,
)
from tests.helpers.children import failures, free_port, run_children
from tests.helpers.paths import ROOT
from tests.torch.common import D, numbers, override

at = rg.at
TOKENS = torch.tensor([0, 3, 3, 1])


class Tied(nn.Module):
    """A network that uses a weight in two modules, and another one twice in one module."""

    def __init__(self):
        super().__init__()
        self.emb, self.mid = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.emb.weight
        self.double()
        for seed, p in enumerate(self.parameters()):
            p.data = numbers(*p.shape, seed=seed)

    def forward(self, tokens):
        return self.out(torch.tanh(self.mid(self.mid(self.emb(tokens)))))


def loss(model):
    return model(TOKENS).pow(3).sum()


def clip(dy):
    return dy / (1 + dy.norm())


def by_hand(rule=clip, weights=("emb.weight", "mid.weight")):
    """The gradients of the network, with the rule on those of the weights."""
    net = Tied()
    loss(net).backward()
    return {n: rule(p.grad) if n in weights else p.grad for n, p in net.named_parameters()}


def check(found, expected):
    assert found.keys() == expected.keys()
    for name, dx in expected.items():
        torch.testing.assert_close(found[name], dx, rtol=1e-12, atol=1e-12)


def grads(net):
    return {name: p.grad for name, p in net.named_parameters()}


def backward(net):
    loss(net).backward()
    return grads(net)


def by_autograd(net):
    names, ps = zip(*net.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss(net), ps), strict=True))


def checkpointed(net):
    checkpoint(net, TOKENS, use_reentrant=False).pow(3).sum().backward()
    return grads(net)


def twice(net):
    backward(net)
    net.zero_grad()
    return backward(net)


def functional(net):
    given = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
    functional_call(net, given, (TOKENS,)).pow(3).sum().backward()
    return {name: x.grad for name, x in given.items()}


def transformed(net):
    given = {name: p.detach() for name, p in net.named_parameters()}
    return torch.func.grad(lambda p: functional_call(net, p, (TOKENS,)).pow(3).sum())(given)


def closed_over(net):
    torch.func.grad(lambda s: loss(net) * s)(torch.ones((), dtype=D)).backward()
    return grads(net)


WAYS = [backward, by_autograd, checkpointed, twice, functional, transformed, closed_over]


@pytest.mark.parametrize("way", WAYS)
def test_the_rule_gets_the_sum(way):
    net = Tied()
    with override({at(parameter="**.weight"): clip}, model=net) as used:
        found = way(net)
    check(found, by_hand())
    used.assert_fired()
    runs = 2 if way is twice else 1
    assert [(hit.path, hit.ran) for hit in used.hits] == [
        ("emb.weight", runs), ("mid.weight", runs)
    ]  # fmt: skip
    check(way(Tied()), by_hand(lambda dy: dy))  # (nothing is left behind)


def test_a_part_of_the_model_in_a_functional_call():
    net, given = Tied(), by_hand()
    with torch.no_grad():
        held = {name: p.clone().requires_grad_() for name, p in net.mid.named_parameters()}
    tensors = {name: x * 1 for name, x in held.items()}
    with override({at(parameter="mid.weight"): clip}, model=net) as used:
        h = functional_call(net.mid, tensors, (net.emb(TOKENS),))
        h = functional_call(net.mid, tensors, (h,))
        net.out(torch.tanh(h)).pow(3).sum().backward()
    torch.testing.assert_close(held["weight"].grad, given["mid.weight"])
    torch.testing.assert_close(held["bias"].grad, given["mid.bias"])
    assert [(hit.path, hit.count, hit.ran) for hit in used.hits] == [("mid.weight", 1, 1)]


@pytest.mark.parametrize(
    ("key", "weights"),
    [
        ("emb.weight", ["emb.weight"]),
        ("out.weight", ["emb.weight"]),  # (one parameter has both paths)
        (("mid.*", "emb.weight"), ["emb.weight", "mid.weight", "mid.bias"]),
        (lambda net: net.mid.weight, ["mid.weight"]),
        (lambda net: (net.mid.weight, "mid.bias"), ["mid.weight", "mid.bias"]),
        (nn.Parameter, ["emb.weight", "mid.weight", "mid.bias"]),
    ],
)
def test_keys(key, weights):
    net = Tied()
    key = key(net) if callable(key) and not isinstance(key, type) else key
    with override({at(parameter=key): clip}, model=net) as used:
        found = backward(net)
    check(found, by_hand(clip, weights))
    used.assert_fired(at(parameter=key))


def test_common_rules():
    mask, noise = torch.tensor([1.0, 0, 1], dtype=D), numbers(3, 3, seed=8)
    rules = {
        "scale": lambda dy: 0.1 * dy,
        "mask": lambda dy: dy * mask,
        "value": lambda dy, x: dy + 0.01 * x,
        "builtin": lambda dy, builtin: 3 * builtin(dy),
        "regrad": lambda dy: rg.clip(dy, -1, 1),
    }
    net = Tied()
    x = net.mid.weight.detach()
    plain = by_hand(lambda dy: dy)["mid.weight"]
    expected = {
        "scale": plain / 10, "mask": plain * mask, "value": plain + x / 100,
        "builtin": plain * 3, "regrad": plain.clamp(-1, 1),
    }  # fmt: skip
    for name, rule in rules.items():
        with override({at(parameter="mid.weight"): rule}, model=net):
            torch.testing.assert_close(by_autograd(net)["mid.weight"], expected[name])
    drawn = torch.Generator().manual_seed(8)
    draw = lambda dy: dy + torch.randn(dy.shape, dtype=D, generator=drawn)  # noqa: E731
    with override({at(parameter="mid.weight"): draw}, model=net):
        torch.testing.assert_close(by_autograd(net)["mid.weight"], plain + noise)


def test_no_gradient():
    net = Tied()
    with override({at(parameter="mid.*"): rg.rules.no_gradient}, model=net):
        found = backward(net)
    assert found["mid.weight"] is None
    assert found["mid.bias"] is None
    assert found["emb.weight"] is not None


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("foreach", [True, False])
def test_steps_in_one_scope(optimizer, foreach):
    found = []
    for hooks in (True, False):
        net = Tied()
        steps = optimizer(net.parameters(), lr=0.01, foreach=foreach)
        if hooks:
            for p in (net.emb.weight, net.mid.weight):
                p.register_hook(clip)
        with override({} if hooks else {at(parameter="**.weight"): clip}, model=net):
            for _ in range(5):
                steps.zero_grad()
                backward(net)
                steps.step()
        found.append({name: p.detach() for name, p in net.named_parameters()})
    check(found[1], found[0])
    assert not torch.equal(found[0]["mid.weight"], Tied().mid.weight)


def test_results_of_the_scope_alone():
    net = Tied()
    before = loss(net)
    with override({at(parameter="mid.weight"): lambda dy: 10 * dy}, model=net):
        inside = loss(net)
    (before + inside + loss(net)).backward()
    plain = by_hand(lambda dy: dy)
    torch.testing.assert_close(net.mid.weight.grad, 12 * plain["mid.weight"])
    torch.testing.assert_close(net.mid.bias.grad, 3 * plain["mid.bias"])


def test_hooks_receive_the_result():
    net, seen = Tied(), []
    net.mid.weight.register_hook(seen.append)
    with override({at(parameter="mid.weight"): clip}, model=net):
        backward(net)
    torch.testing.assert_close(seen, [by_hand()["mid.weight"]])


def test_changes_in_the_scope():
    """Of the data, the dtype and `requires_grad`; the copy has the value of the parameter."""
    net = nn.Linear(3, 2, bias=False)
    x = numbers(4, 3).float()
    with override({at(parameter="weight"): lambda dy: 2 * dy}, model=net):
        net(x).sum().backward()
        net.weight.data = net.weight.data * 2
        assert torch.equal(net(x), x @ net.weight.detach().T)
        with torch.no_grad():
            net.weight.mul_(3)
        torch.testing.assert_close(net(x), x @ net.weight.detach().T)
        net.double()
        net.weight.requires_grad_(False)
        assert not net(x.double()).requires_grad
        net.weight.requires_grad_(True)
        net.weight.grad = None
        net(x.double()).sum().backward()
    torch.testing.assert_close(net.weight.grad, 2 * x.double().sum(0).expand(2, 3))


def test_the_inner_scope_wins():
    net = Tied()
    outer = {at(parameter="mid.*"): lambda dy: 2 * dy, "Tanh": lambda dy, y: dy * (1 - y * y)}
    with (
        override(outer, model=net) as used,
        override({at(parameter="mid.weight"): lambda dy: 3 * dy}, model=net),
        override({"MatMul": lambda dy, builtin: builtin(dy)}),
    ):
        found = backward(net)
    used.assert_fired()
    plain = by_hand(lambda dy: dy)
    torch.testing.assert_close(found["mid.weight"], 3 * plain["mid.weight"])
    torch.testing.assert_close(found["mid.bias"], 2 * plain["mid.bias"])


def test_rules_for_ops_come_first():
    net, rules = Tied(), {"Tanh": lambda dy: 5 * dy}
    with override(rules):
        plain = by_autograd(net)
    with override(rules | {at(parameter="mid.weight"): clip}, model=net) as used:
        found = by_autograd(net)
    used.assert_fired()
    check(found, plain | {"mid.weight": clip(plain["mid.weight"])})


# -- higher orders ---------------------------------------------------------------------------------


def bend(dy, x):
    return dy * x.sin() * dy.norm()


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, 0.5, -0.7], dtype=D))

    def forward(self):
        return (self.w**3).sum() + self.w.prod()


FACTORS = torch.tensor([1.0, 2, 3], dtype=D)


def test_second_order_of_the_first_gradient():
    model = Weight()

    def gradient(w):
        w = w.detach().requires_grad_()
        (dw,) = torch.autograd.grad((w**3).sum() + w.prod(), w)
        return (bend(dw, w.detach()) * FACTORS).sum()

    with override({at(parameter="w"): bend}, model=model, order=1):
        (dw,) = torch.autograd.grad(model(), model.w, create_graph=True)
        (found,) = torch.autograd.grad((dw * FACTORS).sum(), model.w)
    w, steps = model.w.detach(), torch.eye(3, dtype=D) * 1e-5
    expected = torch.stack([(gradient(w + e) - gradient(w - e)) / 2e-5 for e in steps])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_rules_at_every_order():
    """As for an op that has the rule as its gradient."""

    class Op(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            return bend(dy, *ctx.saved_tensors)

    model = Weight()
    with override({at(parameter="w"): bend}, model=model):
        (dw,) = torch.autograd.grad(model(), model.w, create_graph=True)
        (found,) = torch.autograd.grad((dw * FACTORS).sum(), model.w)
    copied = Op.apply(model.w)
    (dw,) = torch.autograd.grad((copied**3).sum() + copied.prod(), model.w, create_graph=True)
    (expected,) = torch.autograd.grad((dw * FACTORS).sum(), model.w)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


# -- other code that reads parameters --------------------------------------------------------------


class OldForm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy


class NewForm(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return dy


@pytest.mark.parametrize("function", [OldForm, NewForm])
def test_functions_of_parameters(function):
    net, x = nn.Linear(3, 2, bias=False).double(), numbers(4, 3)
    before = function.apply
    with override({at(parameter="weight"): clip}, model=net):
        (F.linear(x, function.apply(net.weight)) + net(x)).sum().backward()
        with pytest.raises(PassedOverError, match="through an `apply` from before"):
            before(net.weight)
    torch.testing.assert_close(net.weight.grad, clip(2 * x.sum(0).expand(2, 3)))


def test_scripts():
    net, x = nn.Linear(3, 2, bias=False).double(), numbers(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(_linear)
    with override({at(parameter="weight"): clip}, model=net):
        (scripted(x, net.weight) + net(x)).sum().backward()
    torch.testing.assert_close(net.weight.grad, clip(2 * x.sum(0).expand(2, 3)))


def _linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 4, 2), lambda: nn.MultiheadAttention(3, 1)])
def test_layers_of_torch(make, compiled):
    """Torch compiles no LSTM: it runs between two programs, where Dynamo skips the modes."""
    net = make().double()
    call = torch.compile(net, backend="eager") if compiled else net
    run = lambda: call(*[numbers(5, 2, 3)] * (3 if hasattr(net, "out_proj") else 1))[0]  # noqa: E731
    run().pow(2).sum().backward()
    expected = {name: clip(p.grad) for name, p in net.named_parameters()}
    net.zero_grad()
    with override({at(parameter="**"): clip}, model=net) as used:
        run().pow(2).sum().backward()
    used.assert_fired()
    check(grads(net), expected)


def test_whole_calls():
    net = Tied()
    rules = {at("mid"): lambda dy, builtin: builtin(3 * dy), at(parameter="mid.weight"): clip}
    with override({at("mid"): rules[at("mid")]}, model=net):
        plain = by_autograd(net)
    with override(rules, model=net):
        check(by_autograd(net), plain | {"mid.weight": clip(plain["mid.weight"])})


def test_gradients_of_examples():
    net = Tied()
    given = {name: p.detach() for name, p in net.named_parameters()}

    def one(p, token):
        return functional_call(net, p, (token,)).pow(3).sum()

    each = torch.func.vmap(torch.func.grad(one), (None, 0))
    plain = each(given, TOKENS[:, None])
    with override({at(parameter="**.weight"): clip}, model=net):
        found = each(given, TOKENS[:, None])
    for name, dx in plain.items():
        clipped = torch.stack([clip(d) if name.endswith("weight") else d for d in dx])
        torch.testing.assert_close(found[name], clipped)


def test_autocast():
    found = []
    for rule in (None, lambda dy, x: 2 * dy):
        net = Tied().float()
        rules = {} if rule is None else {at(parameter="mid.weight"): rule}
        with override(rules, model=net), torch.autocast("cpu", torch.bfloat16):
            net.mid(net.emb(TOKENS)).pow(3).sum().backward()
        found.append(net.mid.weight.grad)
    torch.testing.assert_close(found[1], 2 * found[0])
    assert found[1].dtype == torch.float32


def test_a_reentrant_checkpoint_raises():
    net = Tied()
    with (
        pytest.raises(PassedOverError, match="use_reentrant=False"),
        override({at(parameter="mid.weight"): clip}, model=net),
    ):
        checkpoint(net.mid, net.emb(TOKENS), use_reentrant=True).sum().backward()
    with override({at(parameter="out.weight"): clip}, model=net):  # (no use in the checkpoint)
        checkpoint(net.mid, net.emb(TOKENS), use_reentrant=True).sum().backward()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("before", [True, False])
def test_compiled(backend, before):
    torch.compiler.reset()
    net = Tied()
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    if before:  # (a program from before the scope has no rules)
        loss(compiled).backward()
        net.zero_grad()
    with override({at(parameter="**.weight"): clip}, model=net) as used:
        loss(compiled).backward()
        check(grads(net), by_hand())
        net.zero_grad()
        (loss(compiled) + loss(net)).backward()  # (the sum of compiled and other uses)
        check(grads(net), {n: twice_of(n, d) for n, d in by_hand(lambda dy: dy).items()})
    used.assert_fired()
    net.zero_grad()
    loss(compiled).backward()
    check(grads(net), by_hand(lambda dy: dy))


def twice_of(name, dy):
    return clip(2 * dy) if name.endswith("weight") else 2 * dy


@pytest.mark.slow
@pytest.mark.versions
def test_two_processes(tmp_path):
    port, script = free_port(), ROOT / "tests/helpers/parallel_parameters.py"
    reports = run_children(script, tmp_path, ["0", port], ["1", port])
    assert failures(reports) == ""


def test_no_leaks():
    net, alive = Tied(), []
    with override({at(parameter="**"): clip}, model=net) as used:
        for _ in range(5):
            given = {
                name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()
            }
            alive += map(weakref.ref, given.values())
            y = functional_call(net, given, (TOKENS,)).pow(3).sum() + loss(net)
            alive.append(weakref.ref(y))
            y.backward()
        del y, given
        gc.collect()
        assert sum(each() is not None for each in alive) <= 3  # (those of the last call)
    gc.collect()
    assert not any(each() is not None for each in alive)
    copied = copy.deepcopy(used.hits)
    assert len(copied) == len(used.hits)


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda net: {at(parameter="mid.weigth"): clip}, "Did you mean 'mid.weight'"),
        (lambda net: {at(parameter=torch.ones(3)): clip}, "this object is not a parameter"),
        (
            lambda net: {at(parameter="mid.*"): clip, at(parameter="*.weight"): bend},
            "two keys with different rules, .* 'mid.weight'",
        ),
        (
            lambda net: {at(parameter="out.weight"): clip, at(parameter="emb.weight"): bend},
            "name the parameter 'emb.weight' = 'out.weight'",
        ),
        (lambda net: {at(parameter="mid.weight"): rg.replace(lambda x: x)}, "replaces a value"),
        (lambda net: {at("mid"): {at(parameter="weight"): clip}}, "not in the map of a place"),
        (lambda net: {at(parameter="mid.weight"): {"Relu": clip}}, "A map is for a place"),
        (lambda net: {at("mid", parameter="weight"): clip}, "no other argument"),
    ],
)
def test_bad_keys(make, match):
    net = Tied()
    with pytest.raises(ArgumentError, match=match), override(make(net), model=net):
        pass


def test_equal_rules_may_overlap():
    net = Tied()
    with override({at(parameter="mid.*"): clip, at(parameter="*.weight"): clip}, model=net):
        check(backward(net), by_hand(clip, ["emb.weight", "mid.weight", "mid.bias"]))


def test_a_model_is_needed():
    with (
        pytest.raises(ArgumentError, match="only the model has parameters"),
        override({at(parameter="w"): clip}),
    ):
        pass


@pytest.mark.parametrize(
    ("rule", "match"),
    [(lambda dy: dy[:1], r"returned the shape \(1,\)"), (lambda dy: None, "returned None")],
)
def test_bad_answers(rule, match):
    model = Weight()
    with (
        pytest.raises(RuleError, match=f"for the op type 'Parameter'.*{match}"),
        override({at(parameter="w"): rule}, model=model),
    ):
        model().backward()


def test_parameters_without_a_gradient():
    net = Tied()
    with (
        pytest.warns(UnusedOverrideWarning, match=r"names 'emb.weight', which got no gradient"),
        override({at(parameter="**.weight"): clip}, model=net) as used,
    ):
        net.mid(numbers(2, 3)).sum().backward()
    with pytest.raises(NotFiredError, match=r"names 'emb.weight', which got no gradient"):
        used.assert_fired()
    with (
        pytest.warns(UnusedOverrideWarning, match=r"no torch function read 'mid.weight'"),
        override({at(parameter="mid.weight"): clip}, model=net) as used,
    ):
        net.emb(TOKENS)
    with pytest.raises(NotFiredError, match=r"no torch function read 'mid.weight'"):
        used.assert_fired()
    with override({at(parameter="mid.weight"): clip}, model=net) as used:
        net.mid(numbers(2, 3))
    with pytest.raises(NotFiredError, match="no gradient passed"):
        used.assert_fired()
    with override({at(parameter="mid.x"): rg.rules.optional(clip)}, model=net):
        net.mid(numbers(2, 3))
