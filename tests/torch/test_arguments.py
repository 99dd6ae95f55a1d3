"""Arguments of torch's callables: those that regrad's ops do not have, in place, by keyword.

And functions of torch whose results have no gradient.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.core.surrogates import replace
from regrad.errors import ArgumentError, PassedOverError, UnknownOpError, UnusedOverrideWarning
from regrad.rules import optional
from tests.helpers.torch_calls import IMAGE, X, both
from tests.torch.common import D, close, fired, grad, leaf, override, under

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# -- arguments that regrad's ops do not know -------------------------------------------------------

FOREIGN = [
    ("MatMul", lambda x: x @ x[0, 0]),
    ("MatMul", lambda x: x[0, 0, :, 0] @ x),
    ("MatMul", lambda x: torch.mv(x[0, 0], x[0, 1, 0])),
    ("MatMul", lambda x: torch.dot(x[0, 0, 0], x[0, 1, 0])),
    ("MatMul", lambda x: torch.matmul(input=x[0, 0], other=x[0, 1, 0])),
    ("Cumprod", lambda x: x.cumprod(-1)),
    ("Cumprod", lambda x: (x * 1).cumprod_(dim=-2)),
    ("Cumsum", lambda x: x.cumsum(-2)),
    ("Prelu", lambda x: F.prelu(x, torch.tensor([0.1, 0.3], dtype=D))),
    ("Prelu", lambda x: F.prelu(x, x[0, 0, 0, :2])),
    ("Prelu", lambda x: nn.PReLU(2).double()(x)),
    ("Sum", lambda x: x.sum(())),
    ("Sum", lambda x: x.sum(axis=(), keepdim=True)),
    ("Mean", lambda x: torch.mean(x, ())),
    ("Max", lambda x: x.amax(())),
    ("Softmax", nn.Softmax()),
    ("Softmax", lambda x: F.softmax(x[0])),
    ("LogSoftmax", lambda x: F.log_softmax(x[0, 0])),
    ("Softmax", F.softmin),
]


@pytest.mark.parametrize(("op_type", "f"), FOREIGN)
def test_arguments_of_torchs_own(op_type, f):
    image = IMAGE[..., :4, :] if op_type == "MatMul" else IMAGE
    value, their, y, dx = both(f, image, {op_type: op_type})
    assert torch.equal(y, value)
    torch.testing.assert_close(dx, their)


def test_the_axis_that_torch_picks():
    seen = []

    def rule(op, grad):
        seen.append(op.get_attr("axis"))
        return grad

    with override({"Softmax": rule}):
        for x in (IMAGE[0, 0, 0], X, IMAGE[0], IMAGE):
            F.softmax(x.clone().requires_grad_()).sum().backward()
    assert list(dict.fromkeys(seen)) == [0, 1] and seen[-3:] == [1, 0, 1]


# -- in place --------------------------------------------------------------------------------------

INDEX, ONES = torch.tensor([0, 2]), torch.ones(2, dtype=D)
T = torch.Tensor
IN_PLACE = {
    "masked_fill_": (T.masked_fill_, lambda x: x.masked_fill_(x > 0, 0.0)),
    "scatter_add_": (T.scatter_add_, lambda x: x.scatter_add_(0, INDEX, ONES)),
    "index_add_": (T.index_add_, lambda x: x.index_add_(0, INDEX, ONES)),
    "index_put_": (T.index_put_, lambda x: x.index_put_((INDEX,), ONES)),
    "copy_": (T.copy_, lambda x: x.copy_(x.detach() + 1)),
    "fill_": (T.fill_, lambda x: x.fill_(2.0)),
    "out of place": (T.masked_fill, lambda x: x.masked_fill_(x > 0, 0.0)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_keys_in_place(name):
    key, change = IN_PLACE[name]
    x = leaf(0.5, -1, 2)
    rule = lambda dy, xs: [7 * dy if v.dtype == dy.dtype else None for v in xs]  # noqa: E731
    with override({key: rule}) as used:
        y = x * 1
        assert change(y) is y
    assert torch.equal(y, change(x.detach().clone()))
    if "add_" not in name and name != "index_put_":
        assert grad(y, x).tolist() == [7.0] * 3
        used.assert_fired()


def opened(key, rule=lambda dy: dy, **options):
    with override({key: rule}, **options):
        pass


def squeezed():
    x = torch.ones(1, 3, requires_grad=True) * 1
    with override({T.squeeze_: lambda dy: dy}):
        x.squeeze_()


REFUSED = {
    "__setitem__": (lambda: opened(T.__setitem__), UnknownOpError, "in place"),
    "fill_diagonal_": (lambda: opened(T.fill_diagonal_), UnknownOpError, "in place"),
    "another form": (lambda: opened("SparseSoftmaxCrossEntropyWithLogits"), UnknownOpError,
                     "there is no torch callable"),
    "the shape": (squeezed, PassedOverError, "the shape of its tensor"),
    "keep by type": (lambda: opened("Sign", keep="Reshape"), ArgumentError, "keep"),
    "keep of types": (lambda: opened("Sign", keep=["Reshape"]), ArgumentError, "keep"),
    "keep of modules": (lambda: opened("Sign", keep=[nn.ReLU]), ArgumentError, "keep"),
    "keep of numbers": (lambda: opened("Sign", keep=[3]), ArgumentError, "keep"),
    "keep of one": (lambda: opened("Sign", keep=torch.kron), ArgumentError, "keep"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name):
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("f", [lambda z: z.mH, lambda z: z.H, lambda z: z.adjoint()])
def test_conjugates_of_matrices(f):
    z = torch.randn(2, 3, dtype=torch.complex128, requires_grad=True)
    y = fired({"Conj": lambda dy: 7 * dy}, f, z)
    assert torch.equal(y, f(z))
    assert torch.equal(torch.autograd.grad(y, z, y.detach())[0], 7 * z.detach().conj())


@pytest.mark.parametrize("rule", [lambda dy, x: 7 * dy * (x > 0), lambda dy: 7 * dy])
def test_bfloat16(rule):
    """Rules written with torch's functions see bfloat16 as it is."""
    x = leaf(1, 2, dtype=torch.bfloat16)
    y = under({"Relu": rule}, torch.relu, x)
    assert grad(y, x).tolist() == [7.0, 7.0]


# -- maps that change ------------------------------------------------------------------------------


def test_a_map_is_read_anew_by_each_scope():
    k = 2.0

    def scaled(dy):
        return k * dy

    def gradient(rules, **options):
        x = leaf(1)
        with override(rules, **options):
            y = torch.relu(torch.sign(x)) + torch.tanh(torch.sign(x)) * 0
        return grad(y, x).item()

    rules = {"Sign": lambda dy: dy}
    found = [gradient(rules)]
    rules["Relu"] = scaled
    found += [gradient(rules), gradient(rules)]
    k = 3.0  # (in the same cell)
    found.append(gradient(rules))
    rules |= {"Relu": optional(scaled), "Cos": optional(scaled)}
    found += [gradient(rules), gradient({key: each for key, each in rules.items() if key != "Cos"})]
    assert found == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    for _ in range(2):  # what is refused is refused again
        with pytest.raises(ArgumentError, match="order"):
            override({"Sign": scaled}, order=2)
        with pytest.raises(ArgumentError, match="replaces the values"):
            override({"Sign": replace(lambda x: x)})
        assert gradient({"Sign": scaled}, order=1) == 3.0


# -- by keyword: gradients have the order of the signature, whatever the caller's ------------------


def uniform(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=D) + 1


A, B, C, M = uniform(2, 3), uniform(2, 3, seed=1), uniform(2, 3, seed=2), uniform(3, 2, seed=3)


@torch.library.custom_op("keywords::mix", mutates_args=())
def mix(first: torch.Tensor, second: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return scale * first + 3 * second


mix.register_fake(lambda first, second, scale=2.0: torch.empty_like(first))
mix.register_autograd(
    lambda ctx, dy: (ctx.scale * dy, 3 * dy, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[2]),
)


class Two(nn.Module):
    def forward(self, first, second, scale=2.0):
        return scale * first + 3 * second


# The tensors in the order of the signature, and in that of the caller.
CALLS = {
    "lerp": (torch.lerp, {"input": A, "end": B, "weight": C}, {}),
    "lerp by a number": (torch.lerp, {"input": A, "end": B}, {"weight": 0.5}),
    "cosine_similarity": (F.cosine_similarity, {"x1": A, "x2": B}, {"dim": 1}),
    "pairwise_distance": (F.pairwise_distance, {"x1": A, "x2": B}, {}),
    "fmod": (torch.fmod, {"input": A, "other": B}, {}),
    "cross": (torch.cross, {"input": A, "other": B}, {"dim": 1}),
    "linalg.cross": (torch.linalg.cross, {"input": A, "other": B}, {}),
    "bilinear": (F.bilinear, {"input1": A, "input2": B, "weight": uniform(4, 3, 3)}, {}),
    "addcmul": (torch.addcmul, {"input": A, "tensor1": B, "tensor2": C}, {"value": 2}),
    "addmm": (torch.addmm, {"input": uniform(2, 2), "mat1": A, "mat2": M}, {}),
    "mse_loss": (F.mse_loss, {"input": A, "target": B}, {}),
    "a module": (Two(), {"first": A, "second": B}, {"scale": 5.0}),
    "a custom op": (mix, {"first": A, "second": B}, {"scale": 5.0}),
    "its overload": (torch.ops.keywords.mix.default, {"first": A, "second": B}, {}),
}


def called(function, given, options, xs):
    """Call a function with its keywords in the opposite order."""
    named = dict(zip(given, xs, strict=True), **options)
    return function(**dict(reversed(named.items()))).sum()


def scaled(dxs):
    return [(i + 2) * dx for i, dx in enumerate(dxs)]


# A rule, and the gradients that it returns by the plain ones and by the inputs.
RULES = {
    "xs": (lambda dy, xs: scaled(x * x for x in xs), lambda dxs, xs: scaled(x * x for x in xs)),
    "builtin": (lambda dy, builtin: scaled(builtin(dy)), lambda dxs, xs: scaled(dxs)),
}


@pytest.mark.versions
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_have_the_order_of_the_signature(name, backward, rule):
    function, given, options = CALLS[name]
    xs = [x.clone().requires_grad_() for x in given.values()]
    value, due = RULES[rule]
    expected = due(torch.autograd.grad(called(function, given, options, xs), xs), given.values())
    key, model = (rg.at(""), function) if isinstance(function, Two) else (function, None)
    y = fired({key: value}, called, function, given, options, xs, model=model)
    if backward:
        y.backward()
    close([x.grad for x in xs] if backward else torch.autograd.grad(y, xs), expected, 1e-7)


def by_keyword(x):
    return torch.lerp(end=2 * x, input=x, weight=0.25).sum()


def compiled(x):
    torch._dynamo.reset()
    return torch.compile(by_keyword, backend="aot_eager")(x)


WAYS = {
    "eager": by_keyword,
    "compiled": compiled,
    "checkpoint": lambda x: checkpoint(by_keyword, x, use_reentrant=False),
    "reentrant": lambda x: checkpoint(by_keyword, x, use_reentrant=True),
    "autocast": torch.autocast("cpu", torch.bfloat16)(by_keyword),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_order_holds_everywhere(way):
    """The gradient by `input` is 5 x, and by `end` 7: 5 x + 14."""
    x = leaf(1, 1, 1)
    rules = {torch.lerp: lambda dy, input, end, weight: (5 * dy * input, 28 * dy * weight)}
    with override(rules):
        y = WAYS[way](x)
        y.backward(create_graph=way == "eager")
        assert x.grad.tolist() == [19.0] * 3
        if way == "eager":
            assert grad(x.grad, x).tolist() == [5.0] * 3
            assert torch.func.grad(by_keyword)(x.detach()).tolist() == [19.0] * 3


def test_keywords_of_unknown_order_are_refused(monkeypatch):
    monkeypatch.setattr("regrad.torch.arguments.forms_of", lambda function: [])
    refused = pytest.raises(PassedOverError, match="Pass the tensors by position")
    with refused, override({torch.lerp: lambda dy, xs: xs}):
        by_keyword(leaf(1, 1, 1))


# -- functions that return booleans and integers: no rule for one of them could run ---------------

V = leaf(0.5, -0.2, dtype=torch.float32)
WITHOUT_A_GRADIENT = {
    "comparison": (torch.gt, lambda v: (v > 0.1).float()),
    "less": (torch.lt, lambda v: (v < 0.1).float()),
    "in place": (torch.ge, lambda v: v.clone().ge_(0.1)),
    "of integers": (torch.eq, lambda v: torch.eq(torch.arange(2), 1)),
    "argmax": (torch.argmax, torch.argmax),
    "one_hot": (F.one_hot, lambda v: F.one_hot(torch.argmax(v), 2).float()),
    "bucketize": (torch.bucketize, lambda v: torch.bucketize(v, torch.tensor([0.0]))),
    "multinomial": (torch.multinomial, lambda v: torch.multinomial(v.sigmoid(), 1)),
    "isnan": (torch.isnan, torch.isnan),
    "cast": (torch.Tensor.to, lambda v: v.to(torch.long)),
}


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("order", [None, 1])
@pytest.mark.parametrize("case", WITHOUT_A_GRADIENT)
def test_keys_without_a_gradient_are_refused_at_the_call(case, order):
    key, f = WITHOUT_A_GRADIENT[case]
    rules = {key: lambda dy, xs: [7 * dy for _ in xs]}
    with override(rules, order=order):
        with pytest.raises(PassedOverError, match=r"would never run.*torch\.heaviside"):
            f(V)
        getattr(V, "float")()  # noqa: B009 (a cast that keeps floats)


FINE = {
    "gather": (torch.gather, lambda x: torch.gather(x, 0, torch.tensor([1, 0]))),
    "roll": (torch.roll, lambda x: torch.roll(x, 1)),
    "cast": (torch.Tensor.to, lambda x: x.to(torch.int32)),
    "sum": ("Sum", lambda x: (x > 0).sum()),
    "topk": (torch.topk, lambda x: torch.topk(x.float(), 1).indices),
}


@pytest.mark.parametrize("case", FINE)
def test_functions_of_integers_and_parts_of_results_run(case):
    key, f = FINE[case]
    x = torch.tensor([3, 1])
    with override({key: optional(lambda dy, builtin: builtin(dy))}):
        assert torch.equal(f(x), f(x))


def test_values_without_a_gradient_may_be_replaced():
    def above(xs):
        return xs[0] > 0.9

    with override({torch.gt: rg.replace(above)}, values=True):
        assert (V > 0.1).tolist() == [False, False]
    with_gradient = {torch.gt: rg.replace(above, lambda dy, xs: [dy, None])}
    refused = pytest.raises(PassedOverError, match="would never run")
    with refused, override(with_gradient, values=True):
        torch.gt(V, 0.1)


SPIKES = {
    "gt": lambda v: (v > 0.1).float(), "where": lambda v: torch.where(v >= 0.1, 1.0, 0.0),
    "int": lambda v: v.int().float(), "to": lambda v: v.to(torch.int64) * 1.0,
    "lt": lambda v: torch.lt(0.1 - v, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("key", ["Step", "Sign", "Round"])
@pytest.mark.parametrize("case", SPIKES)
def test_spikes_out_of_sight_are_named_with_their_line(case, key):
    line = SPIKES[case].__code__.co_firstlineno
    found = re.escape(f"test_arguments.py:{line}")
    rules = {key: rg.rules.triangle(), "Tanh": optional(lambda dy: dy)}
    warned = pytest.warns(UnusedOverrideWarning, match=f"{found}.*key 'Step'")
    with warned, override(rules) as used:
        SPIKES[case](V)
    with pytest.raises(rg.errors.NotFiredError, match=found):
        used.assert_fired(key)


def test_what_is_no_spike_is_not_named():
    rules = {"Step": rg.rules.triangle()}
    with pytest.warns(UnusedOverrideWarning) as caught, override(rules):
        (V.detach() > 0, V.to(torch.float64), V.type(torch.float16))
    assert "test_arguments" not in str(caught[0].message)
