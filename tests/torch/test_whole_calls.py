"""Rules for whole calls of modules, `rg.at(where)` without an op, against autograd's own hooks.

And what is refused, and modules that never run.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import regrad as rg
from regrad import at
from regrad.errors import ArgumentError, NotFiredError, PassedOverError, RuleError
from tests.torch.common import D, close, fired, function, numbers, override, under
from tests.torch.placed import WAYS, Block, Made, Net, X, gradients, hooked, refused


def make(run=None):
    return Net([nn.Tanh] * 3, run)


def bent(dy):
    return 2 * dy.sin()


def pre(dy, builtin):
    return builtin(bent(dy))


def post(dy, builtin):
    return bent(builtin(dy))


def as_it_is(dy, builtin):
    return builtin(dy)


def reference(before=(), after=()):
    """The gradients where hooks bend the gradient that arrives at some modules, or leaves them."""
    return hooked(make(), bent, before, after)


def body(model):
    """Run all layers, up to the head."""
    x = X
    for layer in model.layers:
        x = layer(x)
    return x


# -- where -----------------------------------------------------------------------------------------

BLOCKS = [f"layers.{i}" for i in range(3)]


def tanh_of_five(site):
    return site.module_class is nn.Tanh and site.shapes == ((6, 5),)


SELECTORS = {
    "path": (lambda m: {at("layers.1"): pre}, ["layers.1"]),
    "pattern": (lambda m: {at("layers.[02]"): pre}, ["layers.0", "layers.2"]),
    "class": (lambda m: {at(Block): pre}, BLOCKS),
    "a class in a path": (lambda m: {at("layers.1", nn.Tanh): pre}, ["layers.1.act"]),
    "a class in a map": (lambda m: {at("layers.2"): {nn.Tanh: pre}}, ["layers.2.act"]),
    "instance": (lambda m: {at(m.layers[2]): pre}, ["layers.2"]),
    "tuple": (lambda m: {at((m.layers[2], "head")): pre}, ["layers.2", "head"]),
    "predicate": (lambda m: {at(lambda site: site.path == "layers.1"): pre}, ["layers.1"]),
    "class of a site": (lambda m: {at(tanh_of_five): pre}, [f"{path}.act" for path in BLOCKS]),
    "first": (lambda m: {at(Block, nth=0): pre}, ["layers.0"]),
    "last": (lambda m: {at(nn.Linear, nth=-1): pre}, ["head"]),
    "shadow": (lambda m: {at(Block): pre, at(m.layers[1]): as_it_is}, ["layers.0", "layers.2"]),
    "the model": (lambda m: {at(""): pre}, [""]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_kind_of_place(selector, way):
    model, f = WAYS[way](make)
    rules, paths = SELECTORS[selector]
    if (way, selector) == ("reentrant", "the model"):  # (whose backward pass torch refuses in one)
        refused(
            "Its gradient would be lost", rules(model), lambda: gradients(model, f), model=model
        )
        return
    with override(rules(model), model=model) as used:
        found = gradients(model, f)
    close(found, reference(paths))
    used.assert_fired()
    assert {hit.path for hit in used.hits if hit.rule == "pre" and hit.ran} == set(paths)
    close(gradients(model, f), reference())


# (between two programs Dynamo asks tensors that are no leaves for their `.grad`)
asks_for_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.mark.slow(but=1)
@pytest.mark.versions
@asks_for_grad
@pytest.mark.parametrize("selector", SELECTORS)
def test_compiled(selector):
    model = make()
    compiled = torch.compile(model, backend="aot_eager")
    rules, paths = SELECTORS[selector]
    expected, plain = reference(paths), reference()
    for first in (True, False):
        with override(rules(model), model=model) as used:
            close(gradients(model, compiled), expected)
        if first or selector != "last":  # (the program of the first scope has the call of a Linear)
            used.assert_fired()
        close(gradients(model, compiled), plain)


@pytest.mark.slow
@asks_for_grad
def test_blocks_that_are_compiled_one_by_one():
    model = make()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    for paths in (["layers.1"], ["layers.0.act", "layers.2.last"]):
        expected = reference(paths)
        with override({at(path): pre for path in paths}, model=model):
            close(gradients(model), expected)
    close(gradients(model), reference())


@asks_for_grad
def test_a_whole_graph_is_refused():
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    refused("Do not pass fullgraph", {at("layers.1"): rg.rules.optional(pre)}, lambda: compiled(X),
            Exception, model=model)  # fmt: skip


def test_without_a_model():
    model = make()
    found = fired({at(Block): pre, at(model.head): pre}, gradients, model)
    close(found, reference([*BLOCKS, "head"]))
    refused("model=model", {at("head"): pre}, error=ArgumentError)
    refused("nth counts the modules of a model", {at(Block, nth=0): pre}, error=ArgumentError)


# -- what rules do ---------------------------------------------------------------------------------

NOISE = numbers(6, 2, seed=3)
OF_THE_HEAD = {
    "reverse": (rg.rules.reverse(0.5), None, lambda dy: -0.5 * dy),
    "scale": (rg.rules.scale(3.0), None, lambda dy: 3 * dy),
    "clip": (rg.rules.clip(-0.1, 0.1), None, lambda dy: dy.clamp(-0.1, 0.1)),
    "clip_norm": (rg.rules.clip_norm(0.1), None, lambda dy: dy * min(1, 0.1 / dy.norm())),
    "noise": (lambda dy, builtin: builtin(dy + NOISE), lambda dy: dy + NOISE, None),
}


@pytest.mark.parametrize("name", OF_THE_HEAD)
def test_rules_change_what_arrives_or_what_leaves(name):
    rule, before, after = OF_THE_HEAD[name]
    model = make()
    expected = hooked(make(), before or after, ["head"] * bool(before), ["head"] * bool(after))
    with override({at("head"): rule}, model=model):
        close(gradients(model), expected)


@pytest.mark.parametrize(("rules", "before", "after"), [
    ({at("layers.1"): post}, [], ["layers.1"]),
    ({at("layers.1"): pre, at("layers.2"): post}, ["layers.1"], ["layers.2"]),
], ids=["leaves", "arrives and leaves"])  # fmt: skip
def test_what_leaves_and_what_arrives(rules, before, after):
    model = make()
    found = under(rules, lambda: gradients(model), model=model)
    close(found, reference(before, after))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # (2.13 and before)
def test_logs():
    model, norms, arrived = make(), {}, {}

    def logged(dy, builtin, site):
        norms[site.path] = dy.norm().item()
        return builtin(dy)

    for name in BLOCKS:
        model.get_submodule(name).register_full_backward_pre_hook(
            lambda module, args, name=name: arrived.update({name: args[0].norm().item()})
        )
    found = gradients(model)  # (the hooks)
    expected = dict(arrived)
    with override({at(Block): logged}, model=model):
        close(gradients(model), found)
    assert norms == pytest.approx(expected, rel=1e-12)
    assert list(norms) == BLOCKS[::-1]


def smooth(x, weight, bias):
    return torch.tanh(x @ weight.mT + bias)


def named(dy, x, weight, bias):
    return 2 * dy @ weight, {"weight": 3 * dy.mT @ x, "bias": 5 * dy.sum(0)}


@pytest.mark.parametrize(("rule", "gradient"), [
    (named, lambda dy, x, w, b: (2 * dy @ w, 3 * dy.mT @ x, 5 * dy.sum(0))),
    (rg.rules.vjp_of(smooth), lambda dy, x, w, b: torch.func.vjp(smooth, x, w, b)[1](dy)),
], ids=["by name", "another function"])  # fmt: skip
def test_parameters_have_the_gradients_of_the_rule(rule, gradient):
    model = make()
    by_hand = function(lambda x, w, b: x @ w.mT + b, gradient).apply
    by_hand(body(model), model.head.weight, model.head.bias).pow(2).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    with override({at("head"): rule}, model=model) as used:
        close(gradients(model), expected)
    used.assert_fired()


def test_some_parameters_by_name():
    def rule(dy, builtin, first_weight):
        return builtin(dy), {"first.weight": 7 * first_weight, "last.bias": None}

    model, expected = make(), reference()
    with override({at("layers.0"): rule}, model=model):
        model(X).pow(2).sum().backward()
    found = [p.grad for p in model.parameters()]
    assert found.pop(3) is None
    close(found, [7 * model.layers[0].first.weight.detach(), *expected[1:3], *expected[4:]])


def test_frozen_parameters_need_no_answer():
    model = make()
    model.head.requires_grad_(False)
    with override({at("head"): lambda dy, x: dy @ torch.ones(2, 4, dtype=D)}, model=model):
        model(X).sum().backward()
        model.head.requires_grad_(True)
        with pytest.raises(RuleError, match="returns no gradient for the parameter 'weight'"):
            model(X)


class Two(nn.Module):
    """Takes two tensors, one of them by name, and a number; returns a dict."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5, dtype=D))

    def forward(self, a, power, *, other):
        return {"sum": self.weight * a**power + other, "parts": (a * other, 3)}


def by_all_inputs(dy, a, power, other, weight):
    second, first = dy  # (in the order of sorted keys)
    by_a = first * weight * power * a ** (power - 1) + second * other
    return by_a, first + second * a, {"weight": (first * a**power).sum()}


@pytest.mark.parametrize(("rule", "factors"), [
    (as_it_is, (1, 1, 1)),
    (lambda dy, builtin: 2 * builtin(dy), (2, 2, 1)),
    (by_all_inputs, (1, 1, 1)),
])  # fmt: skip
def test_several_inputs_and_outputs(rule, factors):
    model = Two()
    a, other = (numbers(3, seed=i).requires_grad_() for i in range(2))

    def found():
        y = model(a, 2, other=other)
        assert y["parts"][1] == 3
        loss = y["sum"].sum() + y["parts"][0].pow(2).sum()
        return torch.autograd.grad(loss, [a, other, model.weight])

    expected = [k * dx for k, dx in zip(factors, found(), strict=True)]
    with override({at(Two): rule}):
        close(found(), expected)


@pytest.mark.parametrize(("rule", "container", "factors"), [
    (lambda dy, xs: [dy * i for i in range(len(xs))], list, [0, 1, 2]),
    (rg.rules.scale(3.0), tuple, [3, 3, 3]),
])  # fmt: skip
def test_containers_of_tensors(rule, container, factors):
    class Sum(nn.Module):
        def forward(self, xs):
            return sum(xs)

    xs = [numbers(2, seed=i).requires_grad_() for i in range(3)]
    found = under({at(Sum): rule}, lambda: torch.autograd.grad(Sum()(container(xs)).sum(), xs))
    assert [dx.tolist() for dx in found] == [[k, k] for k in factors]


MODULES = [
    nn.Identity(), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.ReLU(), nn.Sequential(),
    nn.MultiheadAttention(4, 2), nn.GELU(), nn.LSTM(4, 3),
]  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_modules_of_torch(module):
    module, x = module.to(D), X.clone().requires_grad_()

    def found():
        y = module(x, x, x) if isinstance(module, nn.MultiheadAttention) else module(x)
        y = y if isinstance(y, torch.Tensor) else y[0]
        return torch.autograd.grad(y.sin().sum(), [x, *module.parameters()])

    expected = found()
    with override({at(module): as_it_is}) as used:
        close(found(), expected)
    assert used.hits[0].ran == 1


Half = function(lambda x: x / 2, lambda dy, x: dy / 2, "Half")


@pytest.mark.versions
def test_modules_that_end_in_a_function():
    class Halves(nn.Module):
        def forward(self, x):
            return Half.apply(x * 3), Half.apply(x)

    x = X.clone().requires_grad_()
    a, b = under({at(Halves): as_it_is}, lambda: Halves()(x))
    (a.sum() + 2 * b.sum()).backward()
    close([x.grad], [torch.full_like(x, 2.5)])


@pytest.mark.parametrize("path", ["1", ""])
def test_a_parameter_that_is_tied(path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(D)
    model[1].weight = model[0].weight
    expected = gradients(model)
    with override({at(path): as_it_is}, model=model):
        close(gradients(model), expected)


def by_formula(dy, x, weight, bias):
    return bent(dy) @ weight, {"weight": bent(dy).mT @ x, "bias": bent(dy).sum(0)}


@pytest.mark.parametrize("rule", [pre, by_formula])
def test_second_order(rule):
    model = make()

    def second(f):
        parameters = list(model.parameters())
        dxs = torch.autograd.grad(f(X).pow(2).sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(dx.pow(2).sum() for dx in dxs), parameters)

    with model.head.register_forward_hook(lambda m, args, y: y.register_hook(bent) and None):
        expected = second(model)
    with override({at("head"): rule}, model=model):
        close(second(model), expected)


def test_torch_func():
    model = make()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).pow(2).sum()

    with override({at("layers.1"): pre}, model=model):
        found = torch.func.grad(loss)(parameters, X)
        rows = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, X)
    expected = reference(["layers.1"])
    close(found.values(), expected)
    assert all(row.shape == (6, *p.shape) for row, p in zip(rows.values(), expected, strict=True))
    close([row.sum(0) for row in rows.values()], expected)


def test_autocast():
    model, x = make().float(), X.float()

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    expected = gradients(model, run, x)
    with override({at(Block): as_it_is}, model=model):
        assert all(map(torch.equal, gradients(model, run, x), expected))


def test_values_without_a_gradient():
    model = make()
    expected = model(X)
    with override({at("head"): pre}, model=model) as used, torch.no_grad():
        assert torch.equal(model(X), expected)
        assert not model(X).requires_grad
    assert [(hit.count, hit.ran) for hit in used.hits] == [(2, 0)]


def test_scopes_in_scopes():
    model, plain, both = make(), reference(), reference(["layers.1", "head"])
    with override({at("layers.1"): rg.rules.optional(pre)}, model=model):
        with override({at("layers.1"): as_it_is}, model=model):
            close(gradients(model), plain)
        with override({at("head"): pre}, model=model):
            close(gradients(model), both)


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", f"file://{tmp_path}/store", rank=0, world_size=1
    )  # fmt: skip
    yield torch.distributed
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_wrappers_are_no_steps(one_process):
    model = make()
    wrapped = nn.parallel.DistributedDataParallel(model)
    for given in (model, wrapped):
        with override({at("layers.1"): pre}, model=given) as used:
            found = gradients(model, wrapped)
        close(found, reference(["layers.1"]))
        assert {hit.path for hit in used.hits} == {"layers.1"}


def test_parameters_that_are_sharded(one_process):
    from torch.distributed.fsdp import fully_shard

    model, mesh = make(), one_process.init_device_mesh("cpu", (1,))
    with override({at("head"): pre}, model=model):
        due = torch.autograd.grad(model(X).sum(), model.head.weight)[0]
    fully_shard(model.head, mesh=mesh)
    with override({at("head"): pre}, model=model):  # (whose hooks gather the parameters)
        model(X).sum().backward()
    close([model.head.weight.grad.full_tensor()], [due])
    refused(r"parameters of the class .*DTensor", {at(""): rg.rules.optional(pre)},
            lambda: model(X), PassedOverError, model=model)  # fmt: skip


# -- what is refused, and modules that never run ---------------------------------------------------

OF_TANH = {"Tanh": rg.rules.optional(lambda dy: dy)}
NOTHING_SAID = (
    r"at\('head'\): the rule '<lambda>' returns no gradient for the parameter 'weight' of 'head'"
)


@pytest.mark.parametrize(("rule", "words"), [
    (lambda dy: dy, NOTHING_SAID), (lambda dy, x: dy, NOTHING_SAID),
    ("Relu", "returns no gradient for the parameter"),
    (lambda dy, weight: dy, "the parameter 'bias'"),
], ids=["dy", "x", "Relu", "weight"])  # fmt: skip
def test_rules_that_forget_the_parameters(rule, words):
    refused(words, {at("head"): rule}, error=RuleError, model=make())


def test_rules_that_forget_the_parameters_of_a_module_that_comes_later():
    refused("returns no gradient for the parameter 'weight'", {
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


OF_BLOCK = "ran inside of a call of Block, whose whole call has a rule by rg.at\\('layers.1'"


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
        pytest.warns(rg.errors.UnusedOverrideWarning, match="names 'second', which never ran"),
        override({at("*"): pre}, model=model) as used,
    ):
        model(X).sum().backward()
    with pytest.raises(NotFiredError, match="'second'"):
        used.assert_fired()


class Affine(nn.Module):
    def forward(self, x, weight, bias):
        return x * weight + bias


@pytest.mark.parametrize("names", [("weight", "bias"), ("bias", "weight")])
def test_gradients_of_keywords_have_the_order_of_the_signature(names):
    xs = [torch.tensor(v, requires_grad=True) for v in (2.0, 3.0, 5.0)]
    more = {name: xs[1 + (name == "bias")] for name in names}
    rules = {at(Affine): lambda dy: [10 * dy, 20 * dy, 30 * dy]}
    y = under(rules, lambda: Affine()(xs[0], **more))
    assert [*map(float, torch.autograd.grad(y, xs))] == [10, 20, 30]


def test_a_map_that_was_opened_before_is_checked_for_another_order():
    rules = {at(Affine): as_it_is}
    under(rules, lambda: Affine()(*torch.ones(3, 1, requires_grad=True)))
    with pytest.raises(ArgumentError, match="order=1 uses the ops' own derivatives"):
        override(rules, order=1)
