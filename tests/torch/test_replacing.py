"""Rules that replace the values of torch functions: someone's layer quantised, Gumbel, VQ."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import GradientError, PassedOverError, RuleError
from regrad.torch.optypes import spellings
from tests.torch.common import D, bare_function, close, function, numbers, override
from tests.torch.common import orders as of_sums
from tests.torch.placed import refused

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
NO_GRAD = [torch.no_grad, torch.inference_mode]
ALL = [torch.enable_grad, *NO_GRAD]


def without_gradients(f, *args):
    """Return the values where nothing is recorded."""
    found = []
    for block in NO_GRAD:
        with block():
            found.append(f(*args))
    return found


# -- an int8 linear layer --------------------------------------------------------------------------


def int8(x):
    scale = x.detach().abs().max() / 127
    return torch.clamp(torch.round(x / scale), -128, 127) * scale


def int8_by_regrad(x):
    scale = rg.max(abs(rg.stop_gradient(x))) / 127
    return rg.clip(rg.round(x / scale), -128, 127) * scale


# (the layer and its straight-through gradient, by hand)
Quantised = function(
    lambda x, w, bias: int8(x) @ int8(w).mT + bias,
    lambda dy, x, w, bias: (dy @ w, dy.mT @ x, dy.sum(0)), "Quantised",
)  # fmt: skip


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def by_hand(net, x):
    first, _, last = net
    x = torch.tanh(Quantised.apply(x, first.weight, first.bias))
    return Quantised.apply(x, last.weight, last.bias)


def orders(net, x, y):
    """The gradients of first and second order, of a sum of squares."""
    leaves = [x, *net.parameters()]
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(dx.square().sum() for dx in first), leaves)
    return [*first, *second]


def ste(dy, a, b):
    return dy @ b.mT, a.mT @ dy


QUANTISED = {
    "F.linear": {F.linear: rg.replace(
        lambda x, w, bias: F.linear(int8(x), int8(w), bias),
        lambda dy, x, w: (dy @ w, dy.mT @ x),
    )},
    "MatMul": {"MatMul": rg.replace(lambda a, b: int8(a) @ int8(b), ste)},
    "forward": {"MatMul": rg.replace(lambda a, b, forward: forward(int8(a), int8(b)), ste)},
    "regrad": {"MatMul": rg.replace(
        lambda a, b: rg.matmul(int8_by_regrad(a), int8_by_regrad(b)), ste
    )},
    "in places": {rg.at(nn.Linear, "MatMul"): rg.replace(lambda a, b: int8(a) @ int8(b), ste)},
}  # fmt: skip


@pytest.mark.parametrize("rules", QUANTISED)
def test_a_quantised_layer(rules):
    net, x = model(), numbers(5, 4).requires_grad_()
    with override(QUANTISED[rules], values=True) as used:
        y = net(x)
        found = orders(net, x, y)
        again = checkpoint(net, x, use_reentrant=False)
        found_again = orders(net, x, again)
        without = without_gradients(net, x)
        plain = net(x.detach())
    expected = by_hand(net, x)
    close([y, again, *without, plain], [expected] * 5)
    close([*found, *found_again], orders(net, x, expected) * 2)
    used.assert_fired()
    assert all(hit.rule.startswith("replace(") for hit in used.hits)
    assert "replace(" in str(used.table())
    assert (net(x) - expected).abs().max() > 1e-4  # and the model is its own again


def test_torch_func():
    x = numbers(5)
    rule = rg.replace(lambda x: x**3, lambda dy, x, y: dy * y * x)
    for block in ALL:
        with override({"Tanh": rule}, values=True), block():
            close([vmap(torch.tanh)(x)], [x**3])
            if block is not torch.inference_mode:
                each = vmap(grad(torch.tanh))(x)
                close([each, jacrev(torch.tanh)(x).diagonal()], [x**4, x**4])
                close([vmap(grad(grad(torch.tanh)))(x)], [x**5 + x**3])
    with override({"Tanh": rg.replace(lambda x: rg.sin(x) * x)}, values=True):
        close([vmap(torch.tanh)(x)], [torch.sin(x) * x])
        close([vmap(grad(torch.tanh))(x)], [torch.cos(x) * x + torch.sin(x)])


def test_forward_mode():
    """It transposes a rule of regrad's functions, and refuses one that asks for `forward`."""
    x, dx = numbers(3), numbers(3, seed=1)
    cubed = rg.replace(lambda x: x**3, lambda dy, x: rg.multiply(dy, x))
    with override({"Tanh": cubed}, values=True):
        close(jvp(torch.tanh, (x,), (dx,)), [x**3, dx * x])
    with override({"Tanh": rg.replace(lambda x: x**3)}, values=True):
        close(jvp(torch.tanh, (x,), (dx,)), [x**3, 3 * x**2 * dx])
    rule = rg.replace(lambda x: x, lambda dy, forward: dy)
    refused("uses `builtin` or `forward`", {"Tanh": rule},
            lambda: jvp(torch.tanh, (x,), (dx,)), GradientError, values=True)  # fmt: skip


# -- Gumbel softmax, and a vector quantiser --------------------------------------------------------


def gumbel(x, axis):
    noise = -torch.log(-torch.log(torch.rand_like(x).clamp_min(1e-9)))
    soft = torch.softmax((x + noise) / 0.5, axis)
    hard = torch.zeros_like(x).scatter_(axis, soft.argmax(axis, keepdim=True), 1.0)
    return hard + soft - soft.detach()


def test_gumbel_straight_through():
    x, w = numbers(4, 3).requires_grad_(), numbers(3, seed=1)
    replacing = override({"Softmax": rg.replace(gumbel)}, values=True)(F.softmax)
    found = []
    for run in (replacing, gumbel):
        torch.manual_seed(3)
        y = run(x, -1)
        (first,) = torch.autograd.grad((y * w).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append([y, first, second])
    close(*found)
    assert set(found[0][0].round(decimals=9).unique().tolist()) == {0, 1}


def test_vq():
    """The nearest of some vectors, and the gradient that arrives, past it."""
    codes = numbers(7, 3, seed=1)

    def nearest(x):
        return codes[torch.cdist(x, codes).argmin(-1)]

    x = numbers(5, 3).requires_grad_()
    with override({"Identity": rg.replace(nearest, lambda dy: dy)}, values=True):
        y = x.clone()
        (dx,) = torch.autograd.grad((y**3).sum(), x)
    expected = torch.stack([codes[(codes - v).norm(dim=1).argmin()] for v in x.detach()])
    close([y, dx], [expected, 3 * expected**2])


Impulse = function(lambda x, alpha: (x > 0).to(x), lambda dy, x, alpha: dy, "Impulse")


def scaled_sine(x, alpha):
    return torch.sin(x) * alpha


@pytest.mark.parametrize("key", [Impulse, "Impulse"])
@pytest.mark.parametrize("has_rule", [False, True])
def test_a_function_of_somebody(key, has_rule):
    x = numbers(6).requires_grad_()
    expected = [2 * x.cos(), -2 * x.sin()]
    if has_rule:
        expected = [2 * x.sin() * x, 2 * x.sin() * x * x + 2 * x.sin()]
    rule = rg.replace(scaled_sine, lambda dy, x, y: dy * y * x) if has_rule else None
    with override({key: rule or rg.replace(scaled_sine)}, values=True) as used:
        y, plain = Impulse.apply(x, 2.0), Impulse.apply(x.detach(), 2.0)
        without = without_gradients(Impulse.apply, x, 2.0)
        found = of_sums(y, x)
    close([y, plain, *without], [2 * torch.sin(x)] * 4)
    close(found, expected)
    used.assert_fired()
    assert Impulse.apply(x, 2.0).unique().tolist() == [0, 1]


# -- scopes ----------------------------------------------------------------------------------------


def test_scopes_and_places():
    x = numbers(4)
    doubled, tripled = rg.replace(lambda x: 2 * x), rg.replace(lambda x: 3 * x)
    with override({"Tanh": doubled}, values=True):
        with override({"Tanh": tripled}, values=True):
            close([torch.tanh(x)], [3 * x])
        with override({"Tanh": lambda dy: dy}):
            close([torch.tanh(x)], [x.tanh()])
        with override({"Relu": lambda dy: dy}), torch.no_grad():
            found = [torch.tanh(x), F.mish(x), torch.relu(x)]
            close(found, [2 * x, 2 * x * F.softplus(x), x.relu()])
        close([torch.tanh(x)], [2 * x])
    close([override({"Tanh": doubled}, values=True)(torch.tanh)(x)], [2 * x])
    seen = []

    def forward(x, site, y):
        seen.append((site.path, site.nth))
        return 2 * y

    net = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Tanh()))
    rules = {rg.at("1", "Tanh"): rg.replace(forward)}
    with override(rules, values=True, model=net) as used, torch.no_grad():
        close([net(x)], [2 * x.tanh().tanh()])
    used.assert_fired()
    assert seen == [("1.0", 0)]
    assert [hit.path for hit in used.hits] == ["1.0"]


def test_autocast_decides_on_the_dtype():
    layer, x = nn.Linear(4, 2), torch.randn(3, 4)
    rules = [
        {F.linear: rg.replace(lambda x, w, bias: F.linear(2 * x, w, bias))},
        {"MatMul": rg.replace(lambda a, b, forward: forward(2 * a, b))},
    ]
    for rule in rules:
        with torch.autocast("cpu", torch.bfloat16):
            expected = layer(2 * x)
            with override(rule, values=True):
                y = layer(x)
            y.sum().backward()
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)


# -- no value is left as it is, in silence ---------------------------------------------------------

SPELLINGS = [
    (function, spelling)
    for function, spelling in spellings().items()
    if not hasattr(function, "overloads") and not hasattr(function, "_schema")
]
M = numbers(2, 2).abs() / 4 + torch.eye(2, dtype=D) / 4
CALLS = [(M,), (M, M.mT), (M, 2.0), (M > 0.3, M, M.mT), ([M, M],), (M, (4,))]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("block", ALL)
def test_every_spelling_is_replaced_or_refused(block):
    """Whatever is called for an op type returns 7, or raises: with gradients and without."""
    found = {"replaced": 0, "refused": 0}
    for spelled, spelling in SPELLINGS:
        for given in CALLS:
            args = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
            try:
                own = spelled(*args)
            except (TypeError, RuntimeError, IndexError, AttributeError):
                continue  # no such call
            if not isinstance(own, torch.Tensor):
                continue
            rule = rg.replace(lambda y: torch.full_like(y, 7))
            try:
                with block(), override({spelling.family.type: rule}, values=True):
                    y = spelled(*[x.clone() if isinstance(x, torch.Tensor) else x for x in given])
            except PassedOverError as error:
                assert "rg.replace" in str(error), spelled
                found["refused"] += 1
            else:
                assert (y == 7).all() or (y.dtype == torch.bool and y.all()), spelled
                found["replaced"] += 1
    assert found["replaced"] > 200
    assert found["refused"] > 3  # views


def test_ops_inside_others():
    x, z = numbers(2, 3, 4), torch.ones(1, 1, dtype=D)
    lstm = nn.LSTM(4, 2).double()
    doubled = {"MatMul": rg.replace(lambda a, b, forward: forward(2 * a, b))}
    for block in ALL:
        with override(doubled, values=True), block():
            found = [F.linear(x, x[0]), torch.einsum("bij,bkj->bik", x, x), torch.inner(x, x[0, 0])]
        expected = [2 * x @ x[0].mT, 2 * x @ x.mT, 2 * x @ x[0, 0]]
        close(found, expected)
        with override({"Tanh": rg.replace(lambda x: 0 * x)}, values=True), block():
            close([F.mish(x), lstm(x)[0]], [0 * x, torch.zeros(2, 3, 2, dtype=D)])
            close([torch.rnn_tanh_cell(z, z, z, z)], [0 * z])


IN_PLACE = {
    "relu_": ("Relu", torch.relu_),
    "inplace=True": ("Relu", nn.ReLU(inplace=True)),
    "clamp_": ("ClipByValue", lambda x: x.clamp_(-1, 1)),
    "silu": ("Sigmoid", lambda x: F.silu(x, inplace=True)),
    "compiled": ("Tanh", lambda x: compiled(torch.tanh_)(x)),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("block", ALL)
def test_calls_in_place_write_the_value(name, block):
    key, f = IN_PLACE[name]
    x = numbers(2, 3).requires_grad_()
    value = (lambda x: x * x**2) if name == "silu" else (lambda x: x**2)
    with override({key: rg.replace(lambda x: x**2)}, values=True) as used:
        with block():
            given = x * 1
            y = f(given)
            close([y, given], [value(x), value(x)])
        if y.requires_grad:
            ys = (y, value(x))
            close(*[torch.autograd.grad(y.sum(), x) for y in ys])
    assert [hit.op_type for hit in used.hits] == [key]


# -- refused ---------------------------------------------------------------------------------------


NEGATIVE = rg.replace(lambda x: -x)
REFUSED = {
    "out=": ({"Tanh": NEGATIVE}, lambda x: torch.tanh(x, out=torch.empty_like(x)), "as out="),
    "linear out=": ({"MatMul": rg.replace(lambda a, b: a)},
         lambda x: torch.addmm(x, x, x, out=torch.empty_like(x)), "as out="),
    "reshape": ({"Reshape": NEGATIVE}, lambda x: x.reshape(4), "returns a view"),
    "flatten": ({"Reshape": NEGATIVE}, lambda x: x.flatten(), "returns a view"),
    "transpose": ({torch.transpose: NEGATIVE}, None, "returns a view"),
    "slice": ({torch.Tensor.__getitem__: NEGATIVE}, None, "returns a view"),
    "T": ({torch.Tensor.T.__get__: NEGATIVE}, None, "returns a view"),
    "batch norm": ({F.batch_norm: rg.replace(lambda input: input)},
         lambda x: nn.BatchNorm1d(2).double()(x),
         "updates one of its arguments .* 'training'"),
    "foreach": ({"Tanh": NEGATIVE}, lambda x: torch._foreach_tanh([x]), "computes 'Tanh' inside"),
    "indices": ({"Max": rg.replace(lambda x, forward: forward(x))}, lambda x: x.max(1),
         "its own value"),
    "custom op": ({"Tanh": NEGATIVE}, lambda x: torch.ops.regrad_tests.tanh(x), "'Tanh' inside"),
    "TorchScript": ({"Tanh": NEGATIVE}, lambda x: SCRIPTED(x), "calls no override"),
    "another shape": ({"Tanh": rg.replace(lambda x: x.sum())}, torch.tanh, r"the shape \(\)"),
    "no tensors": ({torch.randn: rg.replace(lambda xs: xs)}, lambda x: torch.randn(2), "tensor"),
}  # fmt: skip
CUSTOM = torch.library.custom_op(
    "regrad_tests::tanh", mutates_args=(), schema="(Tensor x)->Tensor"
)(torch.tanh)


@torch.jit.script
def SCRIPTED(x):
    return torch.tanh(x)


@pytest.mark.parametrize("block", ALL)
@pytest.mark.parametrize("case", REFUSED)
def test_where_the_value_could_not_be_delivered(case, block):
    rules, call, message = REFUSED[case]
    rules = {key: rg.rules.optional(rule) for key, rule in rules.items()}
    x = numbers(2, 2)
    refused(message, rules, lambda: block()(call)(x), (PassedOverError, RuleError), values=True)


def test_a_function_whose_context_is_set_up_apart():
    keep = lambda ctx, inputs, output: None  # noqa: E731
    apart = bare_function("Apart", lambda x: x, lambda ctx, dy: dy, setup_context=keep)
    refused("Apart has a setup_context", {apart: NEGATIVE}, values=True)


def test_the_function_that_decides():
    """In a Function of somebody the value is replaced, unless its own gradient would not be."""

    own = function(lambda x: torch.tanh(x), lambda dy, x: dy, "Own")
    x = numbers(3)
    with override({"Tanh": NEGATIVE}, values=True):
        close([own.apply(x)], [-x])
        with pytest.raises(PassedOverError, match=r"Tanh ran in the forward pass of .*Own"):
            own.apply(x.clone().requires_grad_())
    with override({"Tanh": rg.rules.optional(NEGATIVE)}, values=True, keep=[own]):
        found = [own.apply(x), own.apply(x.clone().requires_grad_())]
    close(found, [x.tanh(), x.tanh()])


# -- programs of torch.compile ---------------------------------------------------------------------


def compiled(f):
    return torch.compile(f, backend="aot_eager", fullgraph=True)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("rules", ["F.linear", "MatMul", "forward", "regrad"])
def test_a_quantised_layer_that_is_compiled(rules):
    net, x = model(), numbers(5, 4).requires_grad_()
    leaves = [x, *net.parameters()]
    program = compiled(net)
    with override(QUANTISED[rules], values=True) as used:
        y = program(x)
        found = torch.autograd.grad(y.square().sum(), leaves)
        with torch.no_grad():
            without = program(x)
    expected = by_hand(net, x)
    close([y, without], [expected, expected])
    close(found, torch.autograd.grad(expected.square().sum(), leaves))
    used.assert_fired()
    close([program(x)], [net(x)])


@pytest.mark.parametrize("block", [torch.enable_grad, torch.no_grad])
def test_one_program_under_several_scopes(block):
    program, x = compiled(lambda x: torch.tanh(x) + 1), numbers(4)
    doubled, tripled = ({"Tanh": rg.replace(lambda x, k=k: k * x)} for k in (2, 3))
    with block():
        for _ in range(2):
            for rules, expected in ((doubled, 2 * x), (tripled, 3 * x), ({}, x.tanh())):
                with override(rules, values=True):
                    close([program(x)], [expected + 1])
            close([program(x)], [x.tanh() + 1])


@pytest.mark.parametrize("gradient", [None, lambda dy, y: dy * y])
def test_a_function_that_reads_what_changes(gradient):
    """It runs when the program does: a number, a list and vectors that it reads may change."""
    scale, codes = [2.0], numbers(7, 3, seed=1)
    x = numbers(5, 3).requires_grad_()
    program = compiled(lambda x: torch.tanh(x) * 3)

    def forward(x):
        return torch.sin(x) * scale[0] + codes[0]

    for factor in (2.0, 5.0):
        scale[0] = factor
        codes.add_(1)
        with override({"Tanh": rg.replace(forward, gradient)}, values=True):
            y = program(x)
            (dx,) = torch.autograd.grad(y.sum(), x)
            with torch.no_grad():
                without = program(x)
        expected = x.sin() * factor + codes[0]
        close([y, without], [3 * expected, 3 * expected])
        close([dx], [3 * (x.cos() * factor if gradient is None else expected)])


@pytest.mark.slow
def test_gumbel_and_losses():
    x, target = numbers(4, 3).requires_grad_(), torch.tensor([0, 1, 2, 0])
    with override({"Softmax": rg.replace(gumbel)}, values=True):
        y = compiled(lambda x: F.softmax(x, -1))(x)
        (dx,) = torch.autograd.grad(y[:, 0].sum(), x)
    assert set(y.detach().round(decimals=9).unique().tolist()) == {0, 1}
    assert dx.abs().sum() > 0
    for block in (torch.enable_grad, torch.no_grad):  # (torch.compile asks no mode about its parts)
        with override({"LogSoftmax": rg.replace(lambda x: 2 * x)}, values=True), block():
            loss = compiled(lambda x: nn.CrossEntropyLoss()(x, target))(x)
        close([loss], [F.nll_loss(2 * x, target)])


@pytest.mark.slow
def test_torch_func_inside():
    x = numbers(4)
    with override({"Tanh": rg.replace(lambda x: x**3)}, values=True):
        close([compiled(lambda x: vmap(grad(torch.tanh))(x))(x)], [3 * x**2])


@torch.compiler.allow_in_graph
def untraced(x):
    return torch.tanh(x) * 1


REFUSED_IN_PROGRAMS = {
    "foreach": (lambda x: torch._foreach_tanh([x])[0], "computes 'Tanh' inside, whose value is re"),
    "untraced": (lambda x: untraced(x), "untraced computes 'Tanh' inside, whose value is replaced"),
    "out=": (lambda x: torch.tanh(x, out=torch.empty_like(x)), "given as out="),
    "shape": (lambda x: torch.tanh(x[:2]), r"returned the shape \(3,\)"),
}


@pytest.mark.parametrize("block", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("case", REFUSED_IN_PROGRAMS)
def test_programs_that_are_refused(case, block):
    f, message = REFUSED_IN_PROGRAMS[case]
    rules = {"Tanh": rg.rules.optional(rg.replace(lambda x: x.new_zeros(3)))}
    refused(message, rules, lambda: block()(compiled(f))(numbers(3)), Exception, values=True)
