"""Rules for whole calls of modules: what is refused, and modules that never run."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad import at
from regrad.errors import ArgumentError, NotFiredError, RuleError, UnusedOverrideWarning
from tests.torch.common import D, close, function, override, under
from tests.torch.placed import Made, X, gradients, refused
from tests.torch.test_whole_calls import bent, make, pre, reference

OF_TANH = {"Tanh": rg.rules.optional(lambda dy: dy)}
NOTHING_SAID = r"at\('head'\): the rule '<lambda>' says nothing of the parameter 'weight' of 'head'"


@pytest.mark.parametrize(("rule", "words"), [
    (lambda dy: dy, NOTHING_SAID), (lambda dy, x: dy, NOTHING_SAID), ("Relu", "says nothing"),
    (lambda dy, weight: dy, "the parameter 'bias'"),
], ids=["dy", "x", "Relu", "weight"])  # fmt: skip
def test_rules_that_forget_the_parameters(rule, words):
    refused(words, {at("head"): rule}, error=RuleError, model=make())


def test_rules_that_forget_the_parameters_of_a_module_that_comes_later():
    refused("says nothing of the parameter 'weight'", {
        at(nn.Linear): rg.rules.optional(lambda dy: dy)
    }, lambda: make()(X), RuleError)  # fmt: skip


@pytest.mark.parametrize(("rule", "words"), [
    (lambda dy, builtin: dy @ torch.ones(2, 4, dtype=D), "did not call builtin"),
    (lambda dy, builtin: builtin(dy) + builtin(dy), "called builtin 2 times"),
    (lambda dy, builtin: (builtin(dy), {"wait": 1}), "'wait'.*Did you mean 'weight'"),
    (lambda dy, builtin: (builtin(dy), dy, {}), "returned 2, and the call has 1 inputs"),
    (lambda dy, builtin, weight: (builtin(dy), {"weight": dy}), "'weight'.*6, 2"),
])  # fmt: skip
def test_answers_that_are_refused(rule, words):
    model = make()
    refused(words, {at("head"): rule}, lambda: gradients(model), RuleError, model=model)


def by_torch_func(model):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).sum())(parameters)


OF_BLOCK = "ran inside of a call of Block, which has a rule as a whole by rg.at\\('layers.1'"


@pytest.mark.parametrize(("outer", "inner", "words", "run"), [
    ({}, OF_TANH, f"Tanh {OF_BLOCK}", lambda model: model(X)),
    (OF_TANH, {}, "Tanh ran inside", lambda model: model(X)),
    ({}, {at("layers.1.last"): rg.rules.optional(pre)}, "Linear ran inside", lambda m: m(X)),
    ({}, {"MatMul": rg.rules.scale(1.0)}, "MatMul ran inside", lambda model: model(X)),
    ({}, OF_TANH, "'Tanh' ran inside", by_torch_func),
], ids=["key", "outer scope", "module", "MatMul", "torch.func"])  # fmt: skip
def test_keys_inside_are_passed_over(outer, inner, words, run):
    model = make()
    with override(outer, model=model):
        refused(words, {at("layers.1"): pre, **inner}, lambda: run(model), model=model)


def test_keys_inside_of_a_kept_key():
    model = make()
    rules = {at("layers.1"): pre, at("layers.1.act", "Tanh"): OF_TANH["Tanh"]}
    with override(rules, model=model, keep=[at("layers.1")]) as used:
        found = gradients(model)
    close(found, reference(["layers.1"]))
    assert {hit.path for hit in used.hits} == {"layers.1"}


def test_functions_inside_are_passed_over():
    own = function(lambda x: x * 1, lambda dy, x: dy, "Own")
    model, x = Made(lambda m, x: own.apply(x)), X.clone().requires_grad_()
    rules = {at(Made): pre, own: rg.rules.optional(lambda dy: dy)}
    refused("Own ran inside", rules, lambda: model(x))
    (dx,) = under(rules, lambda: torch.autograd.grad(model(x).sum(), x), keep=[at(Made)])
    close([dx], [bent(torch.ones_like(x))])


@pytest.mark.parametrize("in_checkpoint", [False, True])
@pytest.mark.parametrize("factor", [None, 2])
def test_tensors_that_nobody_passed(factor, in_checkpoint):
    parameter = torch.ones(4, dtype=D, requires_grad=True)
    outside = parameter if factor is None else parameter * factor
    model, x = Made(lambda m, x: x * outside), X.clone().requires_grad_()
    run = (lambda: checkpoint(model, x, use_reentrant=False)) if in_checkpoint else lambda: model(x)
    refused("neither an arg", {at(Made): pre}, run)


class Holder:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(("f", "words"), [
    (Holder, "returned Holder"), (lambda x: 3, "returned no tensor"),
    (lambda x: x.mul_(2), "inplace=False"),
], ids=["object", "number", "in place"])  # fmt: skip
def test_results_that_are_refused(f, words):
    refused(words, {at(Made): pre}, lambda: Made(lambda m, x: f(x))(X.clone()))


def test_buffers_that_would_be_written_twice():
    model = nn.Sequential(nn.BatchNorm1d(4)).to(D)
    x = X.clone().requires_grad_()
    refused("writes into its buffers", {at("0"): rg.rules.optional(pre)},
            lambda: checkpoint(model, x, use_reentrant=False), model=model)  # fmt: skip
    model.eval()
    with override({at("0"): pre}, model=model):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    scale = model[0].weight / (model[0].running_var + 1e-5).sqrt()
    close([x.grad], [scale.detach() * bent(torch.ones_like(x))])


@pytest.mark.parametrize(("keys", "keep", "words"), [
    (["layers.1"], [at("head")], r"keep: rg.at\('head'\) is not a key"),
    (["layers.1", "*.1"], [], "select the same place"),
])  # fmt: skip
def test_keys_that_are_refused(keys, keep, words):
    refused(words, {at(key): pre for key in keys}, error=ArgumentError, model=make(), keep=keep)


def test_modules_that_never_run():
    run = lambda m, x: m.first(x) + m.second.weight.sum()  # noqa: E731
    model = Made(run, first=nn.Linear(4, 4), second=nn.Linear(4, 4)).double()
    with (
        pytest.warns(UnusedOverrideWarning, match="names 'second', which never ran"),
        override({at("*"): pre}, model=model) as used,
    ):
        model(X).sum().backward()
    with pytest.raises(NotFiredError, match="'second'"):
        used.assert_fired()
