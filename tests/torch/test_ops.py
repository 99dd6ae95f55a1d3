"""Every op type that torch has, in every spelling: the value stays, and the rule fires."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from regrad.errors import NotFiredError, PassedOverError, RuleError
from regrad.torch.nodes import new_nodes
from regrad.torch.optypes import CHANNELS_LAST, PLACES, REVERSED, families, nodes_of, spellings
from tests.helpers.hosts import scaled, scaled_by_regrad
from tests.torch.common import D, close, fired, grad, orders, override
from tests.torch.common import function as hand_made

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# What a family is called with. The tensors stand for the op's inputs, in order.
X = torch.tensor([[0.31, 0.52, 0.83], [0.24, 0.65, 0.46]], dtype=D)
Y = torch.tensor([[0.72, 0.53, 0.24], [0.95, 0.36, 0.17]], dtype=D)
ABOVE = X + 1
DEFINITE = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=D)
IMAGE = torch.linspace(0.1, 2.3, 2 * 3 * 6 * 6, dtype=D).sin().reshape(2, 3, 6, 6)
VOLUME = torch.linspace(0.1, 2.3, 2 * 3 * 4**3, dtype=D).sin().reshape(2, 3, 4, 4, 4)
VECTOR = X[0]
MASK = Y > 0.5
GIVEN = Y * 2  # never a leaf

ARGUMENTS: dict[str, list[tuple[Any, ...]]] = {
    "Acosh": [(ABOVE,)],
    "Cholesky": [(DEFINITE,)],
    "MatrixInverse": [(DEFINITE,)],
    "MatrixExponential": [(DEFINITE,)],
    "MatMul": [(X, Y.mT.contiguous()), (X[None], Y.mT[None]), (X, VECTOR), (VECTOR, VECTOR)],
    "Softmax": [(X, -1), (X, -1, False)],
    "LogSoftmax": [(X, -1), (X, -1, False)],
    "ClipByValue": [(X, 0.4, 0.6), (X, Y - 0.3, Y + 0.1)],
    "Prelu": [(X - 0.5, torch.tensor([0.25], dtype=D))],
    "Step": [(X - 0.5, GIVEN)],
    "Sum": [(X,), (X, [1])],
    "Max": [(X,)],
    "Cumsum": [(X, 1)],
    "Cumprod": [(X, 1)],
    "SelectV2": [(MASK, X, Y), (MASK, X, 0.5), (MASK, 0.5, X), (MASK, 0.5, 0.25)],
    "Conv2D": [(IMAGE, IMAGE[:, :, :3, :3].contiguous())],
    "Conv3D": [(VOLUME, VOLUME[:, :, :2, :2, :2].contiguous())],
    "MaxPool": [(IMAGE, 2)],
    "AvgPool": [(IMAGE, 2)],
    "MaxPool3D": [(VOLUME, 2)],
    "AvgPool3D": [(VOLUME, 2)],
    "Reshape": [(X, [3, 2])],
    "ConcatV2": [([X, Y],)],
    "Pack": [([X, Y],)],
    "Round": [(X,)],
}  # fmt: skip
PAIRS = [(X, Y), (X, 2.0), (2.0, X)]


def forms(op_type: str) -> list[tuple[Any, ...]]:
    """What a callable of the family may be called with."""
    pair = [name for _, name in families()[op_type].parameters] == ["a", "b"]
    return ARGUMENTS.get(op_type) or (PAIRS if pair else [(X,)])


def fresh(value: Any) -> Any:
    if isinstance(value, list):
        return [fresh(v) for v in value]
    if isinstance(value, torch.Tensor) and value is not GIVEN:
        return value.clone().requires_grad_(value.is_floating_point() or value.is_complex())
    return value


def leaves(values: Sequence[Any]) -> list[torch.Tensor]:
    flat = [v for value in values for v in (value if isinstance(value, list) else [value])]
    return [v for v in flat if isinstance(v, torch.Tensor)]


def run(function: Any, args: Sequence[Any], in_place: bool) -> tuple[Any, list[torch.Tensor]]:
    """A call with leaves of its own, and those (a copy of the first one is changed in place)."""
    given = [fresh(a) for a in args]
    with torch._C.DisableTorchFunction():
        first = given[0] * 1 if in_place else given[0]
    return function(first, *given[1:]), leaves(given)


def plain(function: Any, op_type: str, in_place: bool) -> Iterator[tuple[Sequence[Any], Any]]:
    """The forms that a callable takes, and what it gives for them."""
    for args in forms(op_type):
        for each in (args, (args[1], args[0], *args[2:]) if op_type == "SelectV2" else args)[:2]:
            try:
                y, _ = run(function, each, in_place)
            except (RuntimeError, TypeError, IndexError, ValueError, AttributeError):
                continue  # (a NotImplementedError is a RuntimeError)
            if isinstance(y, torch.Tensor) and y.requires_grad:
                yield each, y
                break


# -- the rule that every op type gets --------------------------------------------------------------


def places(op: Any, grad: Any) -> Any:
    """A rule that tells the inputs apart: 1 for the first, 2 for the second, …"""
    found = [filled(x, i + 1.0) for i, x in enumerate(op.inputs)]
    return found[0] if len(found) == 1 else found


def filled(x: Any, value: float) -> Any:
    return torch.full_like(x, value) if isinstance(x, torch.Tensor) and x.dtype != bool else None


def expected(function: Any, op_type: str, args: Sequence[Any]) -> list[float | None]:
    """What `places` gives each tensor of a call."""
    numbers = list(range(1, 9))
    if op_type in REVERSED and getattr(function, "__name__", "") in SWAPPED:
        numbers = [2, 1]
    if op_type == "SelectV2" and function is torch.Tensor.where:
        numbers = [2, 1, 3]
    flat = [v for value in args for v in (value if isinstance(value, list) else [value])]
    pairs = [(n, v) for n, v in zip(numbers, flat, strict=False) if isinstance(v, torch.Tensor)]
    return [float(n) if v.is_floating_point() else None for n, v in pairs]


SWAPPED = ("rsub", "rsub.Tensor", "rsub.Scalar", "__rdiv__", "Tensor_rsub")


# Rules: one that tells inputs apart, our own, and three ways to say three times torch's gradient.
KINDS: dict[str, Any] = {
    "places": places, "own": None, "builtin": scaled, "builtin by regrad": scaled_by_regrad,
    "builtin of dy": lambda dy, builtin: builtin(torch.mul(dy, 3)),
}  # fmt: skip


def check(kind: str, function: Any, op_type: str, args: Sequence[Any], in_place: bool,
          y: Any) -> None:  # fmt: skip
    """In a scope the value is the same to the bit, and the rule gives every gradient."""
    (theirs, given), dy = run(function, args, in_place), y.detach().cos()
    try:
        theirs.backward(dy)
    except RuntimeError:
        if kind != "places":
            return  # torch has no derivative
    with override({op_type: KINDS[kind] or op_type}) as used:
        result, xs = run(function, args, in_place)
    assert result.dtype == y.dtype and torch.equal(result, y), "another value"
    result.backward(torch.ones_like(result) if kind == "places" else dy)
    used.assert_fired()
    factor = 1 if kind == "own" else 3
    due = [None if x.grad is None else factor * x.grad for x in given]
    if kind == "places":
        due = [filled(x, n) if n and x.requires_grad else None
               for x, n in zip(xs, expected(function, op_type, args), strict=True)]  # fmt: skip
        assert [x.grad is None for x in xs] == [dx is None for dx in due]
    close([x.grad for x in xs], due, 1e-7 if kind == "own" else 1e-12)


def has_own(op_type: str, args: Sequence[Any], in_place: bool) -> bool:
    """Whether our own rule can stand for torch's: it takes no vectors, and channels come last."""
    vector = op_type == "MatMul" and args[1].dim() == 1
    number = op_type == "FloorMod" and not isinstance(args[0], torch.Tensor)  # (torch has none)
    return not (in_place or vector or number or op_type in (*CHANNELS_LAST, "Step"))


@pytest.mark.slow(but=50)
@pytest.mark.versions
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op_type", families())
def test_every_spelling(op_type, kind):
    for function, spelling in spellings().items():
        if spelling.family.type == op_type:
            found = list(plain(function, op_type, spelling.in_place))
            assert found or takes_no_gradient(function), function
            for args, y in found:
                if kind != "own" or has_own(op_type, args, spelling.in_place):
                    check(kind, function, op_type, args, spelling.in_place, y)


def takes_no_gradient(function: Any) -> bool:
    """Whether this is an overload of plain numbers, of strings, or one that fills a result.

    Or of axes by name, before 2.13; or what torch has removed, and only says so.
    """
    overload = getattr(function, "_overloadname", "")
    if "name" in overload.lower() or is_removed(function):
        return True
    return "out" in overload.lower() or overload in OTHER_WAYS or {*overload.split("_")} <= NUMBERS


def is_removed(function: Any) -> bool:
    try:
        function(torch.eye(2))
    except Exception as error:
        return "is now removed" in str(error)
    return False


NUMBERS = {"int", "float", "complex", "Scalar", "bool", "str", "t", "to", "left", "right"}
# A given dtype, decimals or rounding; `default` is of numbers, where there are others.
OTHER_WAYS = (
    "default", "dtype", "decimals", "Tensor_mode", "Scalar_mode", "dim", "dim_int", "right_",
)  # fmt: skip


# -- gradients: torch's own against ours -----------------------------------------------------------


@pytest.mark.parametrize("op_type", CHANNELS_LAST)
def test_rules_of_another_layout_are_refused(op_type):
    refused = pytest.raises(RuleError, match="channels last, but torch has them first")
    with refused, override({op_type: op_type}):
        pass


ATTRIBUTES = [
    ("Softmax", lambda x: F.softmax(x, 0)),
    ("Softmax", lambda x: x.softmax(dim=0, dtype=D)),
    ("LogSoftmax", lambda x: torch.log_softmax(x, dim=0)),
    ("LeakyRelu", lambda x: F.leaky_relu(x - 0.5)),
    ("LeakyRelu", lambda x: F.leaky_relu(x - 0.5, 0.3)),
    ("Gelu", lambda x: F.gelu(x)),
    ("Gelu", lambda x: F.gelu(x, approximate="tanh")),
    ("ClipByValue", lambda x: x.clamp(max=0.5)),
    ("ClipByValue", lambda x: x.clamp_min(0.5)),
    ("ClipByValue", lambda x: torch.clip(x, 0.3, max=0.5)),
    ("Sum", lambda x: x.sum(0, keepdim=True)),
    ("Sum", lambda x: torch.sum(x, axis=1)),
    ("Mean", lambda x: x.mean(dim=(0, 1))),
    ("Prod", lambda x: x.prod(1)),
    ("Max", lambda x: x.max()),
    ("Max", lambda x: torch.max(x, 1, keepdim=True).values),
    ("Max", lambda x: torch.max(x, axis=0).values),
    ("Min", lambda x: torch.ops.aten.min.dim(x, 0)[0]),
    ("Max", lambda x: torch.amax(x, (0, 1))),
    ("Maximum", lambda x: torch.max(x, x.flip(0))),
    ("Cumsum", lambda x: x.cumsum(0)),
    ("Cumprod", lambda x: torch.cumprod(x, dim=1)),
    ("ConcatV2", lambda x: torch.cat([x, x * 2], dim=1)),
    ("ConcatV2", lambda x: torch.concat((x, x * 2))),
    ("Pack", lambda x: torch.stack([x, x * 2], 1)),
    ("SelectV2", lambda x: x.where(MASK, 0.0)),
    ("SelectV2", lambda x: torch.where(condition=MASK, input=x, other=x * 2)),
    ("AddV2", lambda x: torch.add(x, x, alpha=3)),
    ("AddV2", lambda x: torch.ops.aten.add.Tensor(x, x, alpha=3)),
    ("AddV2", lambda x: (x * 1).add_(x, alpha=3)),
    ("Sub", lambda x: x.subtract(x * x, alpha=3)),
    ("Sub", lambda x: torch.rsub(x, x * x, alpha=3)),
    ("Sub", lambda x: 2 - x),
    ("RealDiv", lambda x: 2 / x),
    ("RealDiv", lambda x: torch.div(x, 2, rounding_mode=None)),
    ("Pow", lambda x: 2**x),
    ("Pow", lambda x: x**3),
    ("Pow", lambda x: x.square()),
    ("Pow", lambda x: torch.pow(input=x, exponent=x)),
    ("Pow", lambda x: torch.pow(2, x)),
    ("FloorMod", lambda x: x % 0.3),
    ("Mul", lambda x: torch.mul(input=x, other=x)),
    ("Mul", lambda x: 3 * x),
    ("Mul", lambda x: x[:, None] * x),
    ("Mul", lambda x: x * torch.tensor([1, 2, 3])),
    ("Mul", lambda x: x.float() * x),
    ("Mul", lambda x: x * torch.tensor(2)),
    ("MatMul", lambda x: x @ x.mT),
    ("MatMul", lambda x: F.linear(x, x, x[0, :2])),
    ("MatMul", lambda x: torch.addmm(x[0, :2], x, x.mT, beta=2, alpha=3)),
    ("Relu6", lambda x: torch.nn.ReLU6()(x - 0.5)),
    ("Relu6", lambda x: F.hardtanh((x - 0.5) * 1, 0, 6, True)),
    ("Relu", lambda x: F.relu((x - 0.5) * 1, True)),
    ("Elu", lambda x: F.elu(x - 0.5, inplace=True)),
    ("Exp", lambda x: x[0, 0].exp()),
    ("Exp", lambda x: x[:0].exp()),
    ("Exp", lambda x: x.t()[::2].exp()),
    ("Conj", lambda x: x.conj()),
    ("Identity", lambda x: x.clone(memory_format=torch.contiguous_format)),
    ("Reshape", lambda x: x.view(-1)),
    ("Tanh", lambda x: F.mish(x)),
    ("Tanh", lambda x: F.mish(x * 1, inplace=True)),
    ("Relu6", lambda x: changed_view(x - 0.5, torch._C._nn.hardswish_)),
    ("Sigmoid", lambda x: F.silu(x)),
    ("Sigmoid", lambda x: F.glu(torch.cat([x, x]), 0)),
    ("Exp", lambda x: changed_view(x, torch.exp_)),
    ("AddV2", lambda x: changed_view(x, lambda v: v.add_(2))),
    ("ClipByValue", lambda x: changed_view(x, lambda v: v.clamp_min_(0.5))),
]  # fmt: skip


def changed_view(x: Any, change: Callable[[Any], Any]) -> Any:
    """A view changed in place, and what it is a view of."""
    y = x * 1
    change(y[1:])
    return y


@pytest.mark.parametrize(("op_type", "f"), ATTRIBUTES)
def test_arguments_arrive(op_type, f):
    """However a call is spelled, our own rule gives torch's gradient, and so it knows it all."""
    own, (their,) = run(f, (X,), False)
    ours, (x,) = fired({op_type: op_type}, run, f, (X,), False)
    for y in (own, ours):
        y.backward(y.detach().cos())
    close([ours, x.grad], [own, their.grad])


UNARY = ["Exp", "Log", "Sin", "Tanh", "Sigmoid", "Square", "Reciprocal", "Sqrt", "Neg", "Abs"]
PAIRED = {"Mul": torch.mul, "AddV2": torch.add, "RealDiv": torch.true_divide}


@pytest.mark.parametrize("op_type", [*UNARY, *PAIRED])
def test_complex(op_type):
    """torch's gradient of a complex number is conjugated as TensorFlow's and ours is.

    A real input gets the real part, as if it had been made complex by an op of its own.
    """
    found = []
    for rules in ({"Relu": "Relu"}, {op_type: op_type}):
        x, z = X.clone().requires_grad_(), torch.complex(X, Y - 0.5).requires_grad_()
        xs = [x, z] if op_type in PAIRED else [z]
        with override(rules):
            y = PAIRED.get(op_type, getattr(torch, op_type.lower(), None))(*xs)
        y.backward(y.detach() * (1 + 2j if y.is_complex() else 2))
        found.append([each.grad for each in xs])
    close(*found)


def test_a_hand_made_function():
    """The same as an autograd.Function that is written into the code, to second order."""
    rule = lambda dy, x: dy * (1 - x.tanh() ** 2)  # noqa: E731

    def gradients(f):
        x = (X - 0.5).requires_grad_()
        return orders(f(x * 2) ** 2 * x, x)

    by_hand = gradients(hand_made(lambda x: x.sign(), rule).apply)
    for sign in (torch.sign, lambda x: x.sign(), lambda x: (x * 1).sign_(), torch.ops.aten.sign):
        with override({"Sign": rule}):
            close(gradients(sign), by_hand)


FOURIER = [torch.fft.fft, torch.fft.ifft, torch.fft.rfft, torch.fft.irfft, torch.fft.hfft,
           torch.fft.fft2, torch.fft.rfftn, torch.fft.irfft2, torch.fft.fftshift]  # fmt: skip


@pytest.mark.parametrize("f", FOURIER, ids=lambda f: f.__name__)
def test_fourier_transforms_are_keys(f):
    """No op type stands for them, since the axes by default differ from name to name."""
    x = X.clone().requires_grad_()
    y = fired({f: lambda op, grad: torch.full_like(op.inputs[0], 7)}, f, x)
    assert (grad(y.abs(), x) == 7).all()


# -- what is not the op, or cannot be --------------------------------------------------------------

OTHERS = [
    ("RealDiv", lambda x: torch.div(x, 0.3, rounding_mode="floor")),
    ("RealDiv", lambda x: (x * 1).div_(0.3, rounding_mode="trunc")),
    ("Relu6", lambda x: F.hardtanh(x)),
    ("Selu", lambda x: F.elu(x)),
    ("Elu", lambda x: F.selu(x)),
    ("Square", lambda x: x**2),
    ("Softsign", lambda x: x / 2),
    ("Conv3D", lambda x: F.conv2d(x[None, None], x[None, None])),
    ("Conv2D", lambda x: F.conv_transpose2d(x[None, None], x[None, None])),
    ("Exp", lambda x: torch.exp(x.detach(), out=torch.empty_like(x)) + x),
    ("Relu", lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0]),
    ("Relu", lambda x: torch.unique(x.detach()) + x[0, 0]),
    ("Relu", lambda x: F.fractional_max_pool2d(x[None], 1, output_ratio=(0.5, 0.5))),
    ("Mul", lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]),
    # torch's own plumbing
    ("Reshape", lambda x: F.linear(x[None].expand(2, *x.shape), x)),
    ("AddV2", lambda x: F.linear(x.t(), x.t(), x[:, 0].repeat(len(x.t()))[: len(x.t())])),
    ("AddV2", lambda x: F.linear(x[None].transpose(1, 2), x.t(), x[0])),
    ("Mul", lambda x: F.dropout(x, 0.5, training=True)),
    ("Mul", lambda x: F.dropout2d(x[None], 0.5, training=True)),
    ("Mul", lambda x: F.alpha_dropout(x, 0.5, training=True)),
    ("RealDiv", lambda x: F.dropout(x, 0.5, training=True)),
    ("Mean", lambda x: F.adaptive_avg_pool2d(x[None], 1)),
    ("Mean", lambda x: F.adaptive_avg_pool1d(x, 1)),
]


@pytest.mark.parametrize(("op_type", "f"), OTHERS)
def test_not_the_op(op_type, f):
    torch.manual_seed(0)
    own, (their,) = run(f, (X,), False)
    torch.manual_seed(0)
    with override({op_type: places}) as used:
        ours, (x,) = run(f, (X,), False)
    assert not used.hits and torch.equal(ours, own)
    for y in (own, ours):
        y.sum().backward()
    assert torch.equal(x.grad, their.grad)


LAYOUTS = {
    "contiguous": lambda x: x.t().contiguous(),
    "reshape": lambda x: x.t().reshape(-1),
    "linear": lambda x: F.linear(x.t(), x.t()),
    "group_norm": lambda x: F.group_norm(x.t()[None], 1),
    "matmul": lambda x: x[None].expand(2, *x.shape).transpose(1, 2) @ x,
}


@pytest.mark.parametrize("f", LAYOUTS.values(), ids=LAYOUTS)
def test_a_copy_for_layout_is_no_identity(f):
    x = X.clone().requires_grad_()
    with override({"Identity": places}) as used:
        y = f(x).sum() + x.clone().sum()
    assert [hit.count for hit in used.hits] == [1]  # the clone that is written here
    close([grad(y, x)], [grad(f(x), x) + 1.0])  # (the rule says 1)


REFUSED = [
    ("Exp", lambda x: torch._foreach_exp([x, x])[0]),
    ("MaxPool", lambda x: F.max_pool2d(x[None], 2, return_indices=True)[0]),
    ("Mul", lambda x: torch.linalg.vecdot(x, x)),
    ("Sum", lambda x: torch.linalg.vecdot(x, x)),
    ("Mul", lambda x: torch.kron(x, x)),
]


@pytest.mark.parametrize(("op_type", "f"), REFUSED)
def test_refused(op_type, f):
    run(f, (X,), False)
    with pytest.raises(PassedOverError, match="overridden"), override({op_type: places}):
        run(f, (X,), False)


def test_what_ran_before_is_not_refused():
    h = X.clone().requires_grad_().relu()
    with override({"Relu": places}):
        assert torch.equal(torch.erf(input=h), torch.erf(X))


# -- scopes in scopes ------------------------------------------------------------------------------


def by(value: float) -> Callable[..., Any]:
    return lambda dy, x: torch.full_like(x, value)


NESTED = [
    (F.silu, [{"Silu": by(7), "Sigmoid": by(5)}], 7),
    (F.silu, [{"Silu": by(7)}, {"Sigmoid": by(5)}], 7),
    (F.silu, [{"Sigmoid": by(5)}, {"Silu": by(7)}], 7),
    (F.softsign, [{"Softsign": by(7)}, {"Relu": by(5)}], 7),
    (torch.relu, [{"Relu": by(7)}, {"Relu": by(5)}], 5),
    (lambda x: F.mish(x) / x, [{"Mul": places, "Tanh": by(0)}, {"Relu": by(5)}], None),
    (lambda x: F.mish(x) / x, [{"Relu": by(5)}, {"Mul": places}, {"Tanh": by(0)}], None),
]


@pytest.mark.parametrize(("f", "maps", "gradient"), NESTED)
def test_nested(f, maps, gradient):
    x = X.clone().requires_grad_()
    with ExitStack() as stack:
        scopes = [stack.enter_context(override(rules)) for rules in maps]
        y = f(x)
    assert torch.equal(y, f(X)) or gradient is None
    y.backward(torch.ones_like(y))
    if gradient is None:
        assert {hit.op_type for scope in scopes for hit in scope.hits} == {"Tanh"}
    else:
        assert (x.grad == gradient).all()


def test_keep_of_an_outer_scope():
    x = X.clone().requires_grad_()
    with override({"Tanh": by(0)}, keep=[F.mish]) as used, override({"Sigmoid": by(0)}):
        F.mish(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.func.grad(lambda v: F.mish(v).sum())(X))
    assert not used.hits


CALLABLES = [
    (torch.outer, lambda x: torch.outer(x[0], x[1])),
    (F.normalize, lambda x: F.normalize(x, dim=0)),
    (torch.hstack, lambda x: torch.hstack([x, x])),
    (torch.einsum, lambda x: torch.einsum("ij,kj->ik", x, x)),
]


@pytest.mark.parametrize(("key", "f"), CALLABLES)
def test_callables_as_keys(key, f):
    """Also where a scope inside would open the callable, or refuse it."""
    y, _ = run(f, (X,), False)
    every = lambda dy, xs: [torch.full_like(x, 3.0) for x in xs]  # noqa: E731
    with override({key: every}), override({"MatMul": places, "Mul": places, "ConcatV2": places}):
        result, (x,) = run(f, (X,), False)
    assert torch.equal(result, y)
    result.backward(torch.ones_like(result))
    assert set(x.grad.flatten().tolist()) <= {3.0, 6.0}


# -- the net ---------------------------------------------------------------------------------------


NO_NODES = {"Softsign", "Square", "Conj", "Step"}  # other ops' nodes, none for real numbers, none


@pytest.mark.versions
@pytest.mark.parametrize("op_type", sorted(families().keys() - NO_NODES))
def test_the_net_knows_the_nodes(op_type):
    """The backward node that torch writes for an op is one of those that the net looks for."""
    found = (getattr(place, families()[op_type].names[0], None) for place in PLACES)
    args, y = next(each for f in found if f is not None for each in plain(f, op_type, False))
    names = {node.name().rstrip("0123456789") for node in new_nodes(y.grad_fn, set())}
    assert names & set(nodes_of(op_type)), (args, names)


def test_the_checks_can_fail():
    y, _ = run(torch.exp, (X,), False)
    check("places", torch.exp, "Exp", (X,), False, y)
    with pytest.raises(AssertionError, match="another value"):
        check("places", torch.exp, "Exp", (X,), False, y + 1)
    with pytest.raises(NotFiredError):
        check("places", torch.exp, "Sin", (X,), False, y)
    with pytest.raises(AssertionError):
        check("places", lambda a, b: torch.sub(b, a), "Sub", (X, Y), False, Y - X)
