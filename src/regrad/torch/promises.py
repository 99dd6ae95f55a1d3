"""Small programs with known gradients, which test whether regrad works on this PyTorch.

On a PyTorch newer than all tested versions, they run once (see `core.hosts`). All of them run in
`python -m regrad hosts`. A program raises if torch skipped a rule, or if regrad did not raise where
a rule cannot fire. The programs are independent, so a failure identifies the broken feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from regrad.core.places import at
from regrad.errors import PassedOverError
from regrad.torch import host
from regrad.torch.bridge import from_regrad
from regrad.torch.overriding import gradient_override_map

Rules = dict[Any, Any]
SEVEN: Rules = {"Relu": lambda dy: dy * 7}


def _input() -> torch.Tensor:
    return torch.tensor([0.5, -2.0], dtype=torch.float64, requires_grad=True)


def _expect(
    f: Callable[[Any], Any], factor: float, rules: Rules = SEVEN, compiles: bool = False,
    keep: Iterable[Any] = (),
) -> None:  # fmt: skip
    """Raise unless the gradient of f under rules is `factor`, and its value is unchanged."""
    x = _input()
    with torch.no_grad():
        plain = f(x.detach().clone())
    with gradient_override_map(rules, keep=keep) as used:
        y = (_compiled(f) if compiles else f)(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y.detach(), plain), f"the value is {y.tolist()}, expected {plain.tolist()}"
    assert dx.tolist() == [factor] * 2, f"the gradient is {dx.tolist()}, expected {factor}"
    used.assert_fired()


def _expect_refusal(f: Callable[[Any], Any], rules: Rules = SEVEN) -> None:
    """Raise unless regrad raises for a rule that cannot fire."""
    x = _input()
    try:
        with gradient_override_map(rules):
            y = f(x)
        torch.autograd.grad(y.sum(), x)
    except PassedOverError:
        return
    raise AssertionError("a rule was skipped without an error")


def _compiled(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return torch.compile(f, backend="aot_eager", fullgraph=True)


class _Own(torch.autograd.Function):
    """A Function with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return dys[0]


class _InTwoParts(torch.autograd.Function):
    """The same Function in torch's newer form."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return dys[0]


_apply = _Own.apply  # a reference, as programs hold it
_module = torch.nn.ReLU().forward  # without the user's global module hooks


# -- ops -------------------------------------------------------------------------------------------


@host.OVERRIDES.promise
def functions_methods_and_modules() -> None:
    for f in (F.relu, torch.relu, torch.Tensor.relu, _module, torch.ops.aten.relu):
        _expect(f, 7)


@host.OVERRIDES.promise
def ops_in_place() -> None:
    for f in (lambda x: (x * 1).relu_(), lambda x: F.relu(x * 1, inplace=True)):
        _expect(f, 7)


@host.OVERRIDES.promise
def sums_of_gradients_of_parameters() -> None:
    # (without random numbers, whose state belongs to the program)
    net: Any = torch.nn.utils.skip_init(torch.nn.Linear, 2, 1, bias=False)
    rules = {at(parameter="weight"): lambda dy: dy * dy}
    given = {"weight": torch.ones(1, 2, requires_grad=True)}
    with gradient_override_map(rules, model=net):
        (net(torch.ones(2)) + _Own.apply(net.weight).sum()).backward()
        torch.func.functional_call(net, given, torch.ones(2)).backward()
    assert _of(net.weight) == [[4.0, 4.0]], f"the gradient is {_of(net.weight)}, expected 4"
    assert _of(given["weight"]) == [[1.0, 1.0]], "a rule was skipped in functional_call"


def _of(x: torch.Tensor) -> Any:
    return None if x.grad is None else x.grad.tolist()


@host.OVERRIDES.promise
def operators() -> None:
    _expect(lambda x: x - 1, 7, {"Sub": lambda dy: (dy * 7, None)})
    _expect(lambda x: 1 - x, 7, {"Sub": lambda dy: (None, dy * 7)})
    _expect(lambda x: 1 / x, 7, {"Reciprocal": lambda dy: dy * 7})
    _expect(lambda x: 2 / x, 7, {"RealDiv": lambda dy: (None, dy * 7)})
    _expect(lambda x: x**2, 7, {"Pow": lambda dy: (dy * 7, None)})


@host.OVERRIDES.promise
def ops_inside_of_others() -> None:
    softmax = {"LogSoftmax": lambda dy: dy * 0 + 7}
    target = torch.tensor([0.5, 0.5], dtype=torch.float64)
    _expect(lambda x: F.cross_entropy(x, target, reduction="sum")[None], 7, softmax)
    _expect(lambda x: F.linear(x, torch.eye(2, dtype=x.dtype)), 7,
            {"MatMul": lambda dy: (dy * 7, None)})  # fmt: skip


@host.OVERRIDES.promise
def what_only_autograd_tells_is_refused() -> None:
    _expect_refusal(lambda x: torch.kron(x, x), {"Mul": lambda dy: (dy * 7, None)})


@host.OVERRIDES.promise
def second_order() -> None:
    x = _input()
    with gradient_override_map({"Relu": lambda dy, x: dy * x * x}):
        y = torch.relu(x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    assert torch.equal(ddx, 2 * x), f"the second derivative is {ddx.tolist()}"


@host.ORDERS.promise
def first_order_alone() -> None:
    x = _input()
    with gradient_override_map({"Relu": lambda dy, y: dy * y}, order=1):
        y = torch.relu(x * x)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)  # 2x³
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    assert torch.equal(ddx, 6 * x * x), f"the second derivative is {ddx.tolist()}"


@host.OVERRIDES.promise
def transformations_of_torch_func() -> None:
    x = _input().detach()
    with gradient_override_map(SEVEN):
        dx = torch.func.grad(lambda x: torch.func.vmap(torch.relu)(x).sum())(x)
    assert dx.tolist() == [7, 7], f"the gradient is {dx.tolist()}"


@host.OVERRIDES.promise
def forward_mode() -> None:
    x = _input().detach()
    square = from_regrad(lambda x: x * x)
    dy = torch.func.jvp(square, (x,), (torch.ones_like(x),))[1]
    assert torch.equal(dy, 2 * x), f"the tangent is {dy.tolist()}"


# -- where torch runs code elsewhere, later, or without modes --------------------------------------


@host.FUNCTIONS.promise
def functions_of_others() -> None:
    for f in (_Own.apply, _apply, _InTwoParts.apply):
        _expect_refusal(f)
    _expect(lambda x: torch.relu(_apply(x) + 1 - 1), 7, keep=[_Own])


@host.CHECKPOINTS.promise
def checkpoints() -> None:
    by_input: Rules = {"Relu": lambda dy, x: dy * x}
    for reentrant in (True, False):
        x = _input()
        with gradient_override_map(by_input):
            y = checkpoint(lambda x: torch.relu(x * 1), x, use_reentrant=reentrant)
        y.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, x), f"the gradient is {x.grad}"


@host.CUSTOM_OPS.promise
def custom_ops() -> None:
    _expect_refusal(_custom_op())


@cache
def _custom_op() -> Any:
    def relu(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x)

    op = torch.library.custom_op("regrad_promises::relu", relu, mutates_args=())
    op.register_autograd(lambda ctx, dy: dy)
    return op


@host.SCRIPTS.promise
def scripts() -> None:
    traced: Any = torch.jit.trace(torch.relu, _input().detach())
    _expect_refusal(traced)


# -- torch.compile ---------------------------------------------------------------------------------


@host.COMPILING.promise
def compiled_functions() -> None:
    for f in (lambda x: torch.relu(x), lambda x: (x * 1).relu_(), _module):
        _expect(f, 7, compiles=True)


@host.COMPILING.promise
def compiled_operators() -> None:
    _expect(lambda x: 1 - x, 7, {"Sub": lambda dy: (None, dy * 7)}, compiles=True)
    _expect(lambda x: 2 / x, 7, {"RealDiv": lambda dy: (None, dy * 7)}, compiles=True)


@host.COMPILING.promise
def compiled_checkpoints() -> None:
    _expect(lambda x: checkpoint(torch.relu, x * 1, use_reentrant=False), 7, compiles=True)


@host.COMPILING.promise
def compiled_functions_of_others() -> None:
    for f in (_apply, _InTwoParts.apply):
        _expect_refusal(_compiled(lambda x, f=f: f(x)))


@host.COMPILING.promise
def programs_for_other_rules() -> None:
    f = _compiled(lambda x: torch.relu(x) * 1)
    rules: list[Rules] = [{"Relu": lambda dy, n=n: dy * n} for n in (2, 3)]
    for n in (0, 1, 0):
        x = _input()
        with gradient_override_map(rules[n]):
            y = f(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.tolist() == [n + 2] * 2, f"the gradient is {dx.tolist()}, expected {n + 2}"


@host.RUN_TIME.promise
def rules_that_read_what_may_change() -> None:
    factor = [2.0]
    f = _compiled(lambda x: torch.relu(x) + 0)
    rules: Rules = {"Relu": lambda dy: dy * factor[0]}
    for factor[0] in (2.0, 3.0):
        x = _input()
        with gradient_override_map(rules):
            y = f(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert dx.tolist() == [factor[0]] * 2, f"the gradient is {dx.tolist()}, expected {factor}"
