"""Rules for parameters where tensors stand in for parameters, and in programs that hide them.

The reference of a rule is an `autograd.Function` (`Ruled`) that the test puts on the parameter by
hand, without regrad, or a hook of the parameter.
"""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn.utils import parameters_to_vector, parametrizations

import regrad as rg
from regrad.errors import PassedOverError
from tests.torch.common import D, numbers, override

at = rg.at
X = numbers(4, 3)
RATE = 0.1


def clip(dy):
    return -dy / (1 + dy.norm())


class Ruled(torch.autograd.Function):
    """The identity, whose gradient is the rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return clip(dy)


def ruled(p):
    return {name: Ruled.apply(x) for name, x in p.items()}


def make(layers=2):
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, layers)).double()
    for seed, p in enumerate(net.parameters()):
        p.data = numbers(*p.shape, seed=seed)
    return net


def loss(net, p, x=X):
    return functional_call(net, p, (x,)).pow(2).sum()


def grads(p):
    return {name: x.grad for name, x in p.items()}


def step(p, dp):
    return {name: x - RATE * dp[name] for name, x in p.items()}


def by_backward(net, p, mark, steps):
    """Inner steps by `autograd.grad`; of the first gradient, the rule is on the parameters."""
    fast = p if mark is None else ruled(p)
    for n in range(steps):
        found = torch.autograd.grad(
            loss(net, fast), [*(fast if n else p).values()], create_graph=True
        )
        fast = step(fast, dict(zip(p, found, strict=True)))
    loss(net, fast).backward()
    return grads(p)


def inner_steps(net, p, mark, steps, x=X):
    """Inner steps by `torch.func.grad`, which has the rule by itself (here by hand)."""
    fast = p if mark is None else ruled(p)
    for _ in range(steps):
        dp = grad(partial(loss, net, x=x))(fast)
        fast = step(fast, dp if mark is None else {name: mark(d) for name, d in dp.items()})
    return loss(net, fast, x)


def by_func(net, p, mark, steps):
    inner_steps(net, p, mark, steps).backward()
    return grads(p)


def in_func(net, p, mark, steps):
    given = {name: x.detach() for name, x in p.items()}
    return grad(lambda p: inner_steps(net, p, mark, steps))(given)


def of_examples(net, p, mark, steps):
    given = {name: x.detach() for name, x in p.items()}
    one = grad(lambda p, x: inner_steps(net, p, mark, steps, x[None]))
    return vmap(one, (None, 0))(given, X)


def of_leaves(net, p, mark, steps):
    return by_backward(net, {n: x.detach().requires_grad_() for n, x in p.items()}, mark, steps)


INNER = [by_backward, by_func, in_func, of_examples, of_leaves]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("way", INNER)
def test_steps_of_gradient_descent(way, steps):
    """The parameter has the rule; a tensor computed from it has none of its own."""
    net = make()
    expected = way(net, dict(net.named_parameters()), clip, steps)
    net = make()
    with override({at(parameter="**"): clip}, model=net) as used:
        found = way(net, dict(net.named_parameters()), None, steps)
    used.assert_fired()
    for name, dx in expected.items():
        torch.testing.assert_close(found[name], dx, rtol=1e-12, atol=1e-12)


def doubled(net, p):
    return loss(net, {name: 2 * x for name, x in p.items()})


def doubled_and_own(net, p):
    return doubled(net, p) + loss(net, p) + loss(net, {name: x.clone() for name, x in p.items()})


def of_a_vector(net, p):
    parts = (1.5 * parameters_to_vector(p.values())).split([x.numel() for x in p.values()])
    pairs = zip(p.items(), parts, strict=True)
    return loss(net, {name: part.view_as(x) for (name, x), part in pairs})


def stacked(net, p):
    return vmap(partial(loss, net))({name: torch.stack([x, 2 * x]) for name, x in p.items()}).sum()


def mapped(net, p):
    return vmap(lambda x: functional_call(net, p, (x,)))(X).pow(2).sum() + loss(net, p)


def in_gradients(net, p):
    one = torch.ones((), dtype=D)
    return grad(lambda s: s * loss(net, p))(one) + jacrev(lambda s: s * doubled(net, p))(one)


def in_forward_mode(net, p):
    return torch.func.jvp(lambda x: loss(net, p, x), (X,), (X,))[1] + loss(net, p)


@pytest.mark.parametrize(
    "total",
    [doubled, doubled_and_own, of_a_vector, stacked, mapped, in_gradients, in_forward_mode],
)
def test_tensors_that_were_computed_from_parameters(total):
    net = make()
    total(net, ruled(p := dict(net.named_parameters()))).backward()
    expected, net = grads(p), make()
    with override({at(parameter="**"): clip}, model=net) as used:
        total(net, p := dict(net.named_parameters())).backward()
    used.assert_fired()
    assert {hit.ran for hit in used.hits} == {1}
    for name, x in p.items():
        torch.testing.assert_close(x.grad, expected[name], rtol=1e-12, atol=1e-12)


def test_a_tied_parameter_in_the_place_of_the_other():
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).double()
    net[1].weight = w = net[0].weight
    with override({at(parameter="0.weight"): clip}, model=net):
        functional_call(net, {"1.weight": 2 * w}, (X,), tie_weights=False).sum().backward()
    found, w.grad = w.grad, None
    (X @ w.T @ (2 * w).T).sum().backward()
    torch.testing.assert_close(found, clip(w.grad))


def test_the_weights_that_a_network_makes():
    """They have the rule of the parameter in whose place they are."""
    net, other = nn.Linear(3, 2, bias=False).double(), nn.Linear(1, 6).double()
    with override({at(parameter="weight"): clip}, model=net):
        made = other(torch.ones(1, dtype=D)).view(2, 3)
        functional_call(net, {"weight": made}, (X,)).pow(2).sum().backward()
    weight = other.bias.detach() + other.weight.detach()[:, 0]
    dy = 2 * (X @ weight.view(2, 3).T).T @ X
    torch.testing.assert_close(other.bias.grad, clip(dy).flatten())


def test_ensembles():
    """Under vmap, the rule receives the gradient of each model."""
    net = make()
    given, _ = stack_module_state([net, make()])
    vmap(lambda p: loss(net, ruled(p)))(given).sum().backward()
    expected = grads(given)
    given, _ = stack_module_state([net, make()])
    with override({at(parameter="**"): clip}, model=net):
        vmap(partial(loss, net))(given).sum().backward()
    for name, x in given.items():
        torch.testing.assert_close(x.grad, expected[name], rtol=1e-12, atol=1e-12)


def test_the_node_of_a_parameter():
    """What torch finds as its node is still the one of the parameter itself."""
    net, seen = make(), []
    with override({at(parameter="0.*"): clip}, model=net):
        edge = torch.autograd.graph.get_gradient_edge(net[0].weight)
        (found,) = torch.autograd.grad(net(X).sum(), edge)
        torch.autograd.graph.register_multi_grad_hook([*net.parameters()], seen.append)
        net(X).sum().backward()
    torch.testing.assert_close(net[0].weight.grad, found)
    torch.testing.assert_close(seen[0][0], found)
    plain = make()
    plain(X).sum().backward()
    torch.testing.assert_close(found, clip(plain[0].weight.grad))
    w = plain[0].weight
    w.grad = None
    with override({at(parameter="0.weight"): clip}, model=plain):
        w.view_as(w).sum().backward()
    torch.testing.assert_close(w.grad, clip(torch.ones_like(w)))


# -- modules of other kinds ------------------------------------------------------------------------


def normed(net):
    parametrizations.weight_norm(net[0])
    parametrizations.spectral_norm(net[2])
    return net


def lazy(net):
    net[0] = nn.LazyLinear(3).double()
    return net


def exported(net):
    net[0] = torch.export.export(net[0], (X,)).module()
    return net


def replaced(net):
    net[0].weight = nn.Parameter(2 * net[0].weight.detach())
    return net


KINDS = [normed, lazy, exported, torch.fx.symbolic_trace, nn.DataParallel, replaced]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_models(kind):
    """The reference has hooks (which a lazy parameter, and one that is set later, take later)."""
    found, nets = [], [make(), make()]
    for hooked, net in zip((True, False), nets, strict=True):
        torch.manual_seed(0)
        net = net if kind is replaced else kind(net)
        inner = net.module if kind is nn.DataParallel else net
        with override({} if hooked else {at(parameter="**"): clip}, model=inner):
            net = kind(net) if kind is replaced else net
            net(X)
            for p in net.parameters() if hooked else ():
                p.register_hook(clip)
            net(X).pow(2).sum().backward()
        found.append({name: p.grad for name, p in inner.named_parameters()})
    for name, dx in found[0].items():
        torch.testing.assert_close(found[1][name], dx, rtol=1e-12, atol=1e-12)


def script(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return torch.jit.script(module)


def trace(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        return torch.jit.trace(module, X)


@pytest.mark.parametrize("compiled", [script, trace])
@pytest.mark.parametrize("whole", [True, False])
def test_programs_of_torchscript_raise(compiled, whole):
    net = make()
    model = compiled(net) if whole else net
    if not whole:
        net[0] = compiled(net[0])
    match = "'0.weight' has a rule by .*'0.weight'.* but the TorchScript program 'forward' reads"
    with (
        pytest.raises(PassedOverError, match=match),
        override({at(parameter="0.weight"): clip}, model=model),
    ):
        model(X)
    with override({at(parameter="2.weight"): rg.rules.optional(clip)}, model=model):
        with torch.no_grad():
            model(X)
        if not whole:
            model(X).sum().backward()
            used = net[2].weight.grad
            plain = make()
            plain(X).sum().backward()
            torch.testing.assert_close(used, clip(plain[2].weight.grad))


def test_a_program_that_has_the_parameters_of_the_model():
    net = make()
    program = script(net[0])
    with (
        pytest.raises(PassedOverError, match=r"'0\.bias' has a rule by .* but the TorchScript"),
        override({at(parameter="0.bias"): clip}, model=net),
    ):
        net[2](program(X))


def test_traces_in_a_scope_raise():
    net = make()
    with (
        pytest.raises(PassedOverError, match=r"parameter='0.weight'\) would stay in them"),
        override({at(parameter="0.weight"): clip}, model=net),
    ):
        trace(net)


@pytest.mark.slow
def test_functional_call_in_a_compiled_function():
    """A program ends there; with `fullgraph`, torch says why it cannot."""
    torch.compiler.reset()
    net = make()
    p = {name: x.detach().requires_grad_() for name, x in net.named_parameters()}
    loss(net, p).backward()
    expected = grads(p)
    p = {name: x.detach().requires_grad_() for name, x in net.named_parameters()}
    run = lambda p: functional_call(net, p, (X,))  # noqa: E731
    with override({at(parameter="**"): clip}, model=net) as used:
        torch.compile(run, backend="eager")(p).pow(2).sum().backward()
        torch.compiler.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="call functional_call outside"):
            torch.compile(run, backend="eager", fullgraph=True)(p)
    used.assert_fired()
    for name, x in p.items():
        torch.testing.assert_close(x.grad, clip(expected[name]), rtol=1e-12, atol=1e-12)
