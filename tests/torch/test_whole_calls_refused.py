"""Rules for whole calls of modules: what is refused, and modules that never run."""

import pytest

import regrad as rg
from regrad.errors import (
    ArgumentError,
    NotFiredError,
    PassedOverError,
    RuleError,
    UnusedOverrideWarning,
)

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.torch.test_whole_calls import (  # noqa: E402
    DOUBLE,
    X,
    at,
    bent,
    check,
    gradients,
    make,
    override,
    pre,
    reference,
)

nn = torch.nn


def test_rules_that_forget_the_parameters():
    model = make()
    words = r"at\('head'\): the rule '<lambda>' says nothing of the parameter 'weight' of 'head'"
    for rule in (lambda dy: dy, lambda dy, x: dy, "Relu"):
        with (
            pytest.raises(RuleError, match=words if callable(rule) else "says nothing"),
            override({at("head"): rule}, model=model),
        ):
            pass
    with (
        pytest.raises(RuleError, match="the parameter 'bias'"),
        override({at("head"): lambda dy, weight: dy}, model=model),
    ):
        pass
    with (  # of which nobody knows yet
        override({at(nn.Linear): rg.rules.optional(lambda dy: dy)}),
        pytest.raises(RuleError, match="says nothing of the parameter 'weight'"),
    ):
        model(X)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda dy, builtin: dy @ torch.ones(2, 4, dtype=DOUBLE), "did not call builtin"),
        (lambda dy, builtin: builtin(dy) + builtin(dy), "called builtin 2 times"),
        (lambda dy, builtin: (builtin(dy), {"wait": 1}), "'wait'.*Did you mean 'weight'"),
        (lambda dy, builtin: (builtin(dy), dy, {}), "returned 2, and the call has 1 inputs"),
        (lambda dy, builtin, weight: (builtin(dy), {"weight": dy}), "'weight'.*6, 2"),
    ],
)
def test_answers_that_are_refused(rule, words):
    model = make()
    with override({at("head"): rule}, model=model), pytest.raises(RuleError, match=words):
        gradients(model)


def test_keys_inside_are_passed_over():
    model = make()
    inner = {"Tanh": rg.rules.optional(lambda dy: dy)}
    words = r"Tanh ran inside of a call of Block, which has a rule as a whole by rg.at\('layers.1'"
    with (
        override({at("layers.1"): pre, **inner}, model=model),
        pytest.raises(PassedOverError, match=words),
    ):
        model(X)
    with (
        override(inner, model=model),
        override({at("layers.1"): pre}, model=model),
        pytest.raises(PassedOverError, match="Tanh ran inside"),
    ):
        model(X)
    nested = {at("layers.1"): pre, at("layers.1.last"): rg.rules.optional(pre)}
    with (
        override(nested, model=model),
        pytest.raises(PassedOverError, match="Linear ran inside"),
    ):
        model(X)
    with (
        override({at("layers.1"): pre, "MatMul": rg.rules.scale(1.0)}, model=model),
        pytest.raises(PassedOverError, match="MatMul ran inside"),
    ):
        model(X)
    rules = {at("layers.1"): pre, at("layers.1.act", "Tanh"): rg.rules.optional(lambda dy: dy)}
    expected = reference(["layers.1"])
    with override(rules, model=model, keep=[at("layers.1")]) as used:
        check(gradients(model), expected)
    assert {hit.path for hit in used.hits} == {"layers.1"}
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with (
        override({at("layers.1"): pre, **inner}, model=model),
        pytest.raises(PassedOverError, match="'Tanh' ran inside"),
    ):
        torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).sum())(parameters)


class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return dy


def test_functions_inside_are_passed_over():
    class Module(nn.Module):
        def forward(self, x):
            return Bent.apply(x)

    model, x = Module(), X.clone().requires_grad_()
    rules = {at(Module): pre, Bent: rg.rules.optional(lambda dy: dy)}
    with override(rules), pytest.raises(PassedOverError, match="Bent ran inside"):
        model(x)
    with override(rules, keep=[at(Module)]):
        (dx,) = torch.autograd.grad(model(x).sum(), x)
    check([dx], [bent(torch.ones_like(x))])


def test_tensors_that_nobody_passed():
    outside = torch.ones(4, dtype=DOUBLE, requires_grad=True)

    class Module(nn.Module):
        def forward(self, x):
            return x * outside

    for other in (outside, outside * 2):
        outside = other
        for run in (Module(), lambda x: checkpoint(Module(), x, use_reentrant=False)):
            with (
                override({at(Module): pre}),
                pytest.raises(PassedOverError, match="neither an arg"),
            ):
                run(X.clone().requires_grad_())


class Holder:
    def __init__(self, x):
        self.x = x


def test_results_that_are_refused():
    class Module(nn.Module):
        def __init__(self, f):
            super().__init__()
            self.f = f

        def forward(self, x):
            return self.f(x)

    for f, words in [
        (Holder, "returned Holder"),
        (lambda x: 3, "returned no tensor"),
        (lambda x: x.mul_(2), "inplace=False"),
    ]:
        with override({at(Module): pre}), pytest.raises(PassedOverError, match=words):
            Module(f)(X.clone())


def test_parameters_that_are_sharded(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, mesh = make(), dist.init_device_mesh("cpu", (1,))
        with override({at("head"): pre}, model=model):
            due = torch.autograd.grad(model(X).sum(), model.head.weight)[0]
        fully_shard(model.head, mesh=mesh)
        with override({at("head"): pre}, model=model):  # (whose hooks gather the parameters)
            model(X).sum().backward()
        check([model.head.weight.grad.full_tensor()], [due])
        with (
            override({at(""): rg.rules.optional(pre)}, model=model),
            pytest.raises(PassedOverError, match=r"parameters of the class .*DTensor"),
        ):
            model(X)
    finally:
        dist.destroy_process_group()


def test_buffers_that_would_be_written_twice():
    model = nn.Sequential(nn.BatchNorm1d(4)).to(DOUBLE)
    x = X.clone().requires_grad_()
    with (
        override({at("0"): rg.rules.optional(pre)}, model=model),
        pytest.raises(PassedOverError, match="writes into its buffers"),
    ):
        checkpoint(model, x, use_reentrant=False)
    model.eval()
    with override({at("0"): pre}, model=model):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    scale = model[0].weight / (model[0].running_var + 1e-5).sqrt()
    check([x.grad], [scale.detach() * bent(torch.ones_like(x))])


def test_keeping_what_is_no_key():
    with pytest.raises(ArgumentError, match=r"keep: rg.at\('head'\) is not a key"):
        override({at("layers.1"): pre}, model=make(), keep=[at("head")])


def test_two_keys_for_one_module():
    with (
        pytest.raises(ArgumentError, match="select the same place"),
        override({at("layers.1"): pre, at("*.1"): pre}, model=make()),
    ):
        pass


def test_modules_that_never_run():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.first(x) + self.second.weight.sum().float()

    model = Skips()
    with (
        pytest.warns(UnusedOverrideWarning, match="names 'second', which never ran"),
        override({at("*"): pre}, model=model) as used,
    ):
        model(X.float()).sum().backward()
    with pytest.raises(NotFiredError, match="'second'"):
        used.assert_fired()
