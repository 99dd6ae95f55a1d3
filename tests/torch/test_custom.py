"""`custom_grad` and `from_regrad` for torch: every order, every transformation, every refusal."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad.errors import ArgumentError, GradientError, RuleError
from regrad.torch import custom_grad as custom
from regrad.torch import from_regrad as of_regrad
from tests.torch import ways
from tests.torch.common import D, backward, close, fired, grad, leaf, orders, override

func = torch.func


@custom
def softplus(x, save):
    """log(1 + e**x), with a gradient that does not overflow, from a saved intermediate."""
    e = torch.exp(-x.abs())
    save([e, x])
    return {"value": torch.log1p(e) + x.clamp(min=0), "grad_func": slope}


def slope(dy, saved):
    e, x = saved
    return dy * torch.where(x > 0, 1 / (1 + e), e / (1 + e))


@custom
def softplus_by_closure(x):
    e = torch.exp(-x.abs())
    return torch.log1p(e) + x.clamp(min=0), lambda dy: slope(dy, (e, x))


@custom
def softplus_by_name(x, *, save):
    save(e=torch.exp(-x.abs()), x=x)
    y = torch.nn.functional.softplus(x)
    return y, lambda dy, saved: slope(dy, (saved.e, saved.x))


@of_regrad
def from_regrad(x):
    return rg.log1p(rg.exp(-abs(x))) + rg.maximum(x, 0)


ONES = {f.__name__: f for f in (softplus, softplus_by_closure, softplus_by_name, from_regrad)}
VALUES = (-30.0, -1.5, 0.5, 4.0)
X = torch.tensor(VALUES, dtype=D)


def plain(x):
    return torch.nn.functional.softplus(x, threshold=1e9)


WAYS = {
    **ways.WAYS, **ways.MORE,
    "third": lambda f, x: orders(f(x), x, 3)[2],
    "grad of grad of vmap": lambda f, x: ways.WAYS["func.grad of grad"](torch.vmap(f), x),
}  # fmt: skip


@pytest.mark.parametrize("f", ONES)
@pytest.mark.parametrize("way", sorted(WAYS.keys() - ways.FORWARD))
def test_every_way_is_as_torch_has_it(f, way):
    found, due = (WAYS[way](each, leaf(*VALUES)) for each in (ONES[f], plain))
    torch.testing.assert_close(found, due, rtol=1e-9, atol=1e-12)


@pytest.mark.versions
@pytest.mark.parametrize("way", sorted(ways.FORWARD))
def test_forward_mode(way):
    x = leaf(*VALUES)
    torch.testing.assert_close(WAYS[way](from_regrad, x), WAYS[way](plain, x))
    with pytest.raises(GradientError, match=r"forward mode: softplus has a custom gradient"):
        WAYS[way](softplus, x)


@pytest.mark.parametrize("f", ONES)
def test_checked_by_torch(f):
    x = X[1:].clone().requires_grad_()
    assert torch.autograd.gradcheck(ONES[f], (x,))
    assert torch.autograd.gradgradcheck(ONES[f], (x,))


def test_the_rule_is_the_one_given():
    x = leaf(2)
    odd = custom(lambda x: (x * x, lambda dy: dy * 7 * x))
    assert [dx.item() for dx in orders(odd(x), x)] == [14, 7]


def test_several_inputs_outputs_and_containers():
    @custom
    def f(pair, scale, *, power):
        a, b = pair["a"], pair["b"]
        value = {"sum": a + b, "product": a * b**power}
        return value, lambda dy: ({"a": dy["sum"] * scale, "b": dy["product"]}, None)

    a, b = leaf(2, 2), leaf(3, 3)
    y = f({"a": a, "b": b}, torch.tensor(5.0, dtype=D), power=2)
    assert y["product"].tolist() == [18, 18]
    da, db = torch.autograd.grad(y["sum"].sum() + 2 * y["product"].sum(), (a, b))
    assert (da.tolist(), db.tolist()) == ([5, 5], [2, 2])


def test_python_numbers_pass_through_and_nothing_else_is_needed():
    reverse = custom(lambda x, k: (x.clone(), lambda dy: -k * dy))
    x = leaf(1, 1)
    assert grad(reverse(x, 3.0), x).tolist() == [-3, -3]
    with torch.no_grad():
        assert not reverse(x, 3.0).requires_grad
    assert not reverse(torch.ones(2), 3.0).requires_grad


def test_an_overridden_op_inside_counts_for_what_is_saved_only():
    x = leaf(0.5)
    f = custom(lambda x: (torch.tanh(x), lambda dy: dy * 2))
    with override({"Tanh": lambda dy: dy * 100}) as used:
        y = f(x)
    assert grad(y, x).item() == 2
    assert [(hit.count, hit.ran) for hit in used.hits] == [(1, 0)]


# -- refusals --------------------------------------------------------------------------------------

w = leaf(1, 1, 1, 1)
module = torch.nn.Linear(4, 4).double()


def closes_over_a_leaf(x):
    return x * w, lambda dy: dy


def closing_over_a_result(x):
    product = w * 2
    return custom(lambda x: (x * product, lambda dy: dy))(x)


def running(value, grad_func):
    """A call with a gradient, and its backward pass."""
    return lambda x: custom(lambda x: (value(x), grad_func))(x).sum().backward()


times = lambda x: x * 1  # noqa: E731
sin, clip = of_regrad(rg.sin), of_regrad(lambda x: rg.rules.clip_gradient(x, -1.0, 1.0))
REFUSED = {
    GradientError: {
        "a leaf": (custom(closes_over_a_leaf),
                   r"closes_over_a_leaf .* closes over 'w', which requ"),
        "a leaf, without a gradient": (lambda x: custom(closes_over_a_leaf)(X), "closes over 'w'"),
        "a result": (closing_over_a_result, "closes over 'product', which requires grad"),
        "a module": (custom(lambda x: (module(x), lambda dy: dy)),
                     r"closes over 'module.bias', which requires grad"),
        "a keyword": (lambda x: custom(lambda x, weight: (x * weight, lambda dy: dy))(x, weight=w),
                      "'weight', a tensor that requires grad"),
        "under regrad": (lambda x: rg.grad(lambda s: rg.asarray(sin(X)).sum() * s)(rg.scalar(1.0)),
                         "sin was called while regrad differentiates"),
        "forward mode": (lambda x: func.jvp(clip, (X,), (X,)), "forward mode"),
    },
    RuleError: {
        "a shape": (running(times, lambda dy: dy.sum()),
                    r"input 'x', returned the shape \(\), expected \(4,\)"),
        "a dtype": (running(times, lambda dy: dy.float()),
                    r"returned the dtype torch.float32, expected torch.float64"),
        "two": (running(times, lambda dy: [dy, dy]), "wrong structure.*expected gradients by x"),
        "a float": (running(times, lambda dy: 3.0), "returned float, expected a tensor"),
    },
    ArgumentError: {
        "no gradient": (custom(lambda x: x), "must return"),
        "a float": (custom(lambda x: (1.0, lambda dy: dy)), "its value holds float"),
        "save": (custom(lambda x, save: (save(x), lambda dy: dy)), "save takes one list or keywo"),
        "no function": (lambda x: custom(3), "must be a function"),
        "from_regrad": (of_regrad(lambda x: 1.0), "must return Tensors, got float"),
    },
}  # fmt: skip


@pytest.mark.versions
@pytest.mark.parametrize(("error", "name"), [(e, name) for e in REFUSED for name in REFUSED[e]])
def test_what_does_not_fit_is_refused(error, name):
    call, words = REFUSED[error][name]
    with pytest.raises(error, match=words):
        call(leaf(*VALUES))


def test_without_a_gradient_a_function_may_close_over_parameters():
    with torch.no_grad():
        custom(closes_over_a_leaf)(leaf(*VALUES))


def written_wholly(x):
    x.mul_(2)
    return x, lambda dy: 2 * dy


def written_in_part(x):
    x[0] = 0
    return x.clone(), lambda dy: dy


def written_and_returned(x):
    return torch.relu_(x), lambda dy: 7 * dy


@pytest.mark.parametrize("f", [written_wholly, written_in_part, written_and_returned])
def test_a_function_that_writes_into_its_input(f):
    x = leaf(*VALUES)
    for each in (x * 1, (x * 1)[:2]):
        with pytest.raises(GradientError, match=r"\) changed its input 'x' in place"):
            custom(f)(each)
    custom(f)(X.clone())  # (without a gradient)
    unrecorded = custom(torch.no_grad()(written_wholly))
    assert grad(unrecorded(x * 1), x).tolist() == [2] * 4


def test_under_checkpoint_and_autocast():
    x = leaf(*VALUES)
    for reentrant in (False, True):
        dx = backward(checkpoint(softplus, x, use_reentrant=reentrant), x)
        torch.testing.assert_close(dx, torch.sigmoid(X))
    x = torch.ones(3, 3, requires_grad=True)
    product = custom(lambda a: (a @ a, lambda dy: 2.0 * dy.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = product(x)
    assert y.dtype == torch.bfloat16
    assert grad(y.float(), x).dtype == torch.float32


def linear(x, w, save):
    save(x=x, w=w)
    return x @ w.mT, lambda dy, saved: [dy @ saved.w, dy.mT @ saved.x]


def linear_by_closure(x, w):
    return x @ w.mT, lambda dy: [dy @ w, dy.mT @ x]


def linear_in_single(x, w):
    return x @ w.mT, lambda dy: [dy.float() @ w, dy.mT.float() @ x]


LINEAR = {
    "saved": (custom(linear), torch.bfloat16),
    "closure": (custom(linear_by_closure), torch.bfloat16),
    "float": (custom(linear_in_single), torch.bfloat16),
    "cast_inputs=float32": (custom(linear, cast_inputs=torch.float32), torch.float32),
    "cast_inputs=bfloat16": (custom(cast_inputs=torch.bfloat16)(linear), torch.bfloat16),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("case", LINEAR)
def test_dtypes_under_autocast(case, inside):
    """Values and gradients have the dtypes that torch has, and those of float64 as numbers."""
    f, dtype = LINEAR[case]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.rand(n, 4, generator=generator).requires_grad_() for n in (2, 3)]
    exact = [x.detach().double().requires_grad_() for x in inputs]

    def both_orders(y, xs):
        first = torch.autograd.grad(y.square().sum(), xs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(dx.square().sum() for dx in first), xs)]

    expected = both_orders(exact[0] @ exact[1].mT, exact)
    with torch.autocast("cpu", torch.bfloat16):
        y = f(*inputs)
        found = both_orders(y.float(), inputs) if inside else None
        each = func.grad(lambda x: f(x, inputs[1]).float().square().sum())(inputs[0])
    found = found or both_orders(y.float(), inputs)
    assert y.dtype == dtype
    for dx, right in zip([*found, each], [*expected, expected[0]], strict=True):
        assert dx.dtype == torch.float32
        error = (dx - right).abs().max() / right.abs().max()
        assert error < (1e-6 if dtype == torch.float32 and not inside else 1e-2)
    assert f(*exact).dtype == D


# -- from_regrad ---------------------------------------------------------------------------------


def test_rules_of_regrad_hold_at_every_order():
    @rg.custom_grad
    def cube(x, save):
        save([x])
        return x * x * x, lambda dy, saved: dy * 10 * saved[0] * saved[0]

    x = leaf(2)
    assert [dx.item() for dx in orders(of_regrad(cube)(x), x, 3)] == [40, 40, 20]


def test_overrides_of_regrad_are_those_of_the_call():
    x = leaf(-2, 0.5)
    with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}) as used:
        y = of_regrad(rg.sign)(x)
    assert grad(y, x).tolist() == [0, 1]
    used.assert_fired()


def test_the_data_are_shared():
    seen = []
    x = torch.ones(3)
    of_regrad(lambda t: (seen.append(t.data.data_ptr()), t * 2)[1])(x)
    assert seen == [x.data_ptr()]


def test_containers_dtypes_and_several_outputs():
    f = of_regrad(lambda d, k: {"n": rg.sum(d["x"] * k), "i": rg.argmax(d["x"])})
    x = leaf(1, 5, 2)
    y = f({"x": x, "name": "kept"}, 3)
    assert y["i"].item() == 1
    assert not y["i"].requires_grad
    assert grad(y["n"], x).tolist() == [3, 3, 3]


def test_complex_gradients_are_torchs():
    x = torch.tensor([1 + 2j, -0.5j], requires_grad=True)
    f = of_regrad(lambda z: rg.real(z * z * rg.exp(z)))
    close([grad(f(x), x)], [grad((x * x * x.exp()).real, x)], 1e-6)


def test_numpy_results_come_back_as_torch():
    f = of_regrad(lambda x: rg.tensor(np.ones(3, "float32")))
    assert f(torch.ones(2)).tolist() == [1, 1, 1]


# -- devices for which torch has no autocast -------------------------------------------------------

ON_META = {
    "rule in torch": lambda x: fired({"Relu": lambda dy, x: dy * (x > 0)}, torch.relu, x),
    "rule of regrad": lambda x: fired({"Relu": lambda dy, x: rg.multiply(dy, 2.0)}, torch.relu, x),
    "custom_grad": custom(lambda x: (x * 2, lambda dy: dy * 3)),
}


@pytest.mark.parametrize("way", ON_META)
@pytest.mark.parametrize("around", [False, True])
def test_tensors_without_values_have_gradients(way, around):
    x = torch.ones(3, device="meta", requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        dx = grad(ON_META[way](x), x)
    assert (dx.shape, dx.dtype, dx.device.type) == (x.shape, x.dtype, "meta")
