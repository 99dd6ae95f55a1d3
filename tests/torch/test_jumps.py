"""Functions that return booleans and integers: no rule for one of them could ever run."""

import re

import pytest
import torch
import torch.nn.functional as F

import regrad as rg
from regrad.errors import NotFiredError, PassedOverError, UnusedOverrideWarning
from regrad.rules import optional
from tests.torch.common import leaf, override

V = leaf(0.5, -0.2)
REFUSED = {
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


@pytest.mark.parametrize("order", [None, 1])
@pytest.mark.parametrize("case", REFUSED)
def test_keys_without_a_gradient_are_refused_at_the_call(case, order):
    key, f = REFUSED[case]
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
    found = re.escape(f"test_jumps.py:{line}")
    rules = {key: rg.rules.triangle(), "Tanh": optional(lambda dy: dy)}
    warned = pytest.warns(UnusedOverrideWarning, match=f"{found}.*key 'Step'")
    with warned, override(rules) as used:
        SPIKES[case](V)
    with pytest.raises(NotFiredError, match=found):
        used.assert_fired(key)


def test_what_is_no_spike_is_not_named():
    rules = {"Step": rg.rules.triangle()}
    with pytest.warns(UnusedOverrideWarning) as caught, override(rules):
        (V.detach() > 0, V.to(torch.float64), V.type(torch.float16))
    assert "test_jumps" not in str(caught[0].message)
