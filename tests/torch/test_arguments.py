"""Arguments, places and variants that torch's callables have and regrad's ops do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regrad.core.replacing import replace
from regrad.errors import ArgumentError, PassedOverError, UnknownOpError
from regrad.rules import optional
from tests.helpers.torch_calls import IMAGE, D, X, both, override

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# -- arguments that regrad's ops do not know -------------------------------------------------------

FOREIGN: list[tuple[str, Callable[..., Any]]] = [
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
    f = (lambda x, f=f: f(x[..., :4, :])) if op_type == "MatMul" else f
    value, their, y, dx = both(f, IMAGE, {op_type: op_type})
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


# -- what is in place ------------------------------------------------------------------------------

INDEX = torch.tensor([0, 2])
IN_PLACE: dict[str, tuple[Any, Callable[..., Any]]] = {
    "masked_fill_": (torch.Tensor.masked_fill_, lambda x: x.masked_fill_(x > 0, 0.0)),
    "scatter_add_": (torch.Tensor.scatter_add_, lambda x: x.scatter_add_(0, INDEX, torch.ones(2))),
    "index_add_": (torch.Tensor.index_add_, lambda x: x.index_add_(0, INDEX, torch.ones(2))),
    "index_put_": (torch.Tensor.index_put_, lambda x: x.index_put_((INDEX,), torch.ones(2))),
    "copy_": (torch.Tensor.copy_, lambda x: x.copy_(x.detach() + 1)),
    "fill_": (torch.Tensor.fill_, lambda x: x.fill_(2.0)),
    "out of place": (torch.Tensor.masked_fill, lambda x: x.masked_fill_(x > 0, 0.0)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_keys_in_place(name):
    key, change = IN_PLACE[name]
    x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    with override(
        {key: lambda dy, xs: [7 * dy if v.dtype == dy.dtype else None for v in xs]}
    ) as used:
        y = x * 1
        assert change(y) is y
    assert torch.equal(y, change(x.detach().clone()))
    if "add_" not in name and name != "index_put_":
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [7.0] * 3
        used.assert_fired()


@pytest.mark.parametrize("key", [torch.Tensor.__setitem__, torch.Tensor.fill_diagonal_])
def test_keys_that_are_only_in_place(key):
    with pytest.raises(UnknownOpError, match="in place"), override({key: lambda dy: dy}):
        pass


def test_the_loss_that_torch_has_in_another_form_is_no_key():
    rules = {"SparseSoftmaxCrossEntropyWithLogits": lambda dy: (dy, None)}
    with pytest.raises(UnknownOpError, match="no torch callable is known"), override(rules):
        pass


def test_a_shape_changed_in_place():
    x = torch.ones(1, 3, requires_grad=True) * 1
    rules = {torch.Tensor.squeeze_: lambda dy: dy}
    with pytest.raises(PassedOverError, match="the shape of its tensor"), override(rules):
        x.squeeze_()


@pytest.mark.parametrize("f", [lambda z: z.mH, lambda z: z.H, lambda z: z.adjoint()])
def test_conjugates_of_matrices(f):
    z = torch.randn(2, 3, dtype=torch.complex128, requires_grad=True)
    with override({"Conj": lambda dy: 7 * dy}) as used:
        y = f(z)
    assert torch.equal(y, f(z))
    assert torch.equal(torch.autograd.grad(y, z, y.detach())[0], 7 * z.detach().conj())
    used.assert_fired()


@pytest.mark.parametrize("rule", [lambda dy, x: 7 * dy * (x > 0), lambda dy: 7 * dy])
def test_bfloat16(rule):
    """Rules written with torch's functions see bfloat16 as it is."""
    x = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    with override({"Relu": rule}):
        torch.relu(x).sum().backward()
    assert x.grad.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("keep", ["Reshape", ["Reshape"], [torch.nn.ReLU], [3], torch.kron])
def test_keep_has_torch_callables(keep):
    with pytest.raises(ArgumentError, match="keep"):
        override({"Sign": lambda dy: dy}, keep=keep)


def test_a_new_rule_for_a_known_key_is_the_one_that_runs():
    x = torch.ones(2, requires_grad=True)
    for k in (2.0, 3.0):
        with (
            override({"Sign": lambda dy, k=k: k * dy}),
            override({"Relu": lambda dy, k=k: -k * dy}),
        ):
            y = torch.sign(x) + torch.relu(torch.sign(x))
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [k - k * k] * 2


def test_a_map_is_read_anew_by_each_scope():
    k = 2.0

    def scaled(dy):
        return k * dy

    def gradient(rules, **options):
        x = torch.ones(1, requires_grad=True)
        with override(rules, **options):
            y = torch.relu(torch.sign(x)) + torch.tanh(torch.sign(x)) * 0
        return torch.autograd.grad(y.sum(), x)[0].item()

    rules = {"Sign": lambda dy: dy}
    found = [gradient(rules)]
    rules["Relu"] = scaled
    found += [gradient(rules), gradient(rules)]
    k = 3.0  # (in the same cell)
    found.append(gradient(rules))
    rules["Relu"] = optional(scaled)
    rules["Cos"] = optional(scaled)
    found += [gradient(rules), gradient({key: each for key, each in rules.items() if key != "Cos"})]
    assert found == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    for _ in range(2):  # what is refused is refused again
        with pytest.raises(ArgumentError, match="order"):
            override({"Sign": scaled}, order=2)
        with pytest.raises(ArgumentError, match="replaces the values"):
            override({"Sign": replace(lambda x: x)})
        assert gradient({"Sign": scaled}, order=1) == 3.0
