"""Rules for whole calls of modules, `rg.at(where)` without an op, against autograd's own hooks."""

import concurrent.futures

import pytest

import regrad as rg
from regrad.errors import (
    ArgumentError,
    PassedOverError,
    RuleError,
)

torch = pytest.importorskip("torch")
nn = torch.nn
override = pytest.importorskip("regrad.torch").gradient_override_map
from torch.utils.checkpoint import checkpoint  # noqa: E402

at = rg.at
DOUBLE = torch.float64
X = torch.randn(6, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)

    def forward(self, x):
        return self.last(self.act(self.first(x)))


class Net(nn.Module):
    def __init__(self, run=None):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(4, 2)
        self.run = run or (lambda layer, x: layer(x))

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


def make(run=None):
    torch.manual_seed(0)
    return Net(run).to(DOUBLE)


def bent(dy):
    return 2 * dy.sin()


def pre(dy, builtin):
    return builtin(bent(dy))


def post(dy, builtin):
    return bent(builtin(dy))


def named(dy, x, weight, bias):
    return 2 * dy @ weight, {"weight": 3 * dy.mT @ x, "bias": 5 * dy.sum(0)}


def gradients(model, f=None, x=X):
    model.zero_grad()
    (model if f is None else f)(x).pow(2).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def reference(before=(), after=(), model=None, x=X):
    """The gradients where hooks bend the gradient that arrives at some modules, or leaves them."""
    model = model or make()

    def arriving(module, args, y):
        y.register_hook(bent)

    def leaving(module, args):
        x = args[0] * 1
        x.register_hook(bent)
        return (x,)

    held = [model.get_submodule(p).register_forward_hook(arriving) for p in before]
    held += [model.get_submodule(p).register_forward_pre_hook(leaving) for p in after]
    found = gradients(model, x=x)
    for each in held:
        each.remove()
    return found


def check(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# -- where -----------------------------------------------------------------------------------------

SELECTORS = {
    "path": (lambda m: {at("layers.1"): pre}, ["layers.1"]),
    "pattern": (lambda m: {at("layers.[02]"): pre}, ["layers.0", "layers.2"]),
    "class": (lambda m: {at(Block): pre}, [f"layers.{i}" for i in range(3)]),
    "a class in a path": (lambda m: {at("layers.1", nn.Tanh): pre}, ["layers.1.act"]),
    "a class in a map": (lambda m: {at("layers.2"): {nn.Tanh: pre}}, ["layers.2.act"]),
    "instance": (lambda m: {at(m.layers[2]): pre}, ["layers.2"]),
    "tuple": (lambda m: {at((m.layers[2], "head")): pre}, ["layers.2", "head"]),
    "predicate": (lambda m: {at(lambda site: site.path == "layers.1"): pre}, ["layers.1"]),
    "class of a site": (
        lambda m: {at(lambda site: site.module_class is nn.Tanh and site.shapes == ((6, 5),)): pre},
        [f"layers.{i}.act" for i in range(3)],
    ),
    "first": (lambda m: {at(Block, nth=0): pre}, ["layers.0"]),
    "last": (lambda m: {at(nn.Linear, nth=-1): pre}, ["head"]),
    "shadow": (
        lambda m: {at(Block): pre, at(m.layers[1]): lambda dy, builtin: builtin(dy)},
        ["layers.0", "layers.2"],
    ),
    "the model": (lambda m: {at(""): pre}, [""]),
}  # fmt: skip


def checkpointed(use_reentrant):
    def run(layer, x):
        x = x.clone().requires_grad_() if use_reentrant and not x.requires_grad else x
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    model = make(run)
    return model, model


def functional():
    model = make()
    return model, lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,))


def in_thread():
    model = make()

    def run(x):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(model, x).result()

    return model, run


def by_itself():
    model = make()
    return model, model


WAYS = {
    "eager": by_itself,
    "checkpoint": lambda: checkpointed(False),
    "reentrant": lambda: checkpointed(True),
    "functional_call": functional,
    "thread": in_thread,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("selector", SELECTORS)
def test_every_kind_of_place(selector, way):
    model, f = WAYS[way]()
    rules, paths = SELECTORS[selector]
    expected = reference(paths)
    if (way, selector) == ("reentrant", "the model"):  # (whose backward pass torch refuses in one)
        with override(rules(model), model=model), pytest.raises(PassedOverError):
            gradients(model, f)
        return
    with override(rules(model), model=model) as used:
        check(gradients(model, f), expected)
    used.assert_fired()
    assert {hit.path for hit in used.hits if hit.rule == "pre" and hit.ran} == set(paths)
    check(gradients(model, f), reference())


# (between two programs Dynamo asks tensors that are no leaves for their `.grad`)
asks_for_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.mark.versions
@asks_for_grad
@pytest.mark.parametrize("selector", SELECTORS)
def test_compiled(selector):
    torch.compiler.reset()
    model = make()
    compiled = torch.compile(model, backend="aot_eager")
    rules, paths = SELECTORS[selector]
    expected, plain = reference(paths), reference()
    for _ in range(2):
        with override(rules(model), model=model) as used:
            check(gradients(model, compiled), expected)
        used.assert_fired()
        check(gradients(model, compiled), plain)


@asks_for_grad
def test_blocks_that_are_compiled_one_by_one():
    torch.compiler.reset()
    model = make()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    for paths in (["layers.1"], ["layers.0.act", "layers.2.last"]):
        expected = reference(paths)
        with override({at(path): pre for path in paths}, model=model):
            check(gradients(model), expected)
    check(gradients(model), reference())


@asks_for_grad
def test_a_whole_graph_is_refused():
    torch.compiler.reset()
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with (
        override({at("head"): rg.rules.optional(pre)}, model=model),
        pytest.raises(Exception, match="leave out fullgraph"),
    ):
        compiled(X)


def test_without_a_model():
    model = make()
    expected = reference([*(f"layers.{i}" for i in range(3)), "head"])
    with override({at(Block): pre, at(model.head): pre}) as used:
        check(gradients(model), expected)
    used.assert_fired()
    with pytest.raises(ArgumentError, match="model=model"):
        override({at("head"): pre})
    with (
        pytest.raises(ArgumentError, match="nth counts the modules of a model"),
        override({at(Block, nth=0): pre}),
    ):
        pass


# -- what rules do ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "hook"),
    [
        (rg.rules.reverse(0.5), lambda dy: -0.5 * dy),
        (rg.rules.scale(3.0), lambda dy: 3 * dy),
        (rg.rules.clip(-0.1, 0.1), lambda dy: dy.clamp(-0.1, 0.1)),
        (rg.rules.clip_norm(0.1), lambda dy: dy * min(1, 0.1 / dy.norm())),
    ],
)
def test_rules_of_the_library_change_what_leaves(rule, hook):
    model = make()
    y = X
    for layer in model.layers:
        y = layer(y)
    y.register_hook(hook)
    model.head(y).pow(2).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    with override({at("head"): rule}, model=model):
        check(gradients(model), expected)


def test_what_leaves_and_what_arrives():
    model = make()
    with override({at("layers.1"): post}, model=model):
        found = gradients(model)
    check(found, reference(after=["layers.1"]))
    with override({at("layers.1"): pre, at("layers.2"): post}, model=model):
        found = gradients(model)
    check(found, reference(["layers.1"], ["layers.2"]))


def test_noise_and_logs():
    model, norms = make(), {}

    def logged(dy, builtin, site):
        norms[site.path] = dy.norm().item()
        return builtin(dy)

    arrived = {}
    for name in ("layers.0", "layers.1", "layers.2"):

        def note(module, args, name=name):
            arrived[name] = args[0].norm().item()

        model.get_submodule(name).register_full_backward_pre_hook(note)
    found = gradients(model)  # (the hooks)
    expected = dict(arrived)
    with override({at(Block): logged}, model=model):
        check(gradients(model), found)
    assert norms == pytest.approx(expected, rel=1e-12)
    assert list(norms) == ["layers.2", "layers.1", "layers.0"]
    noise = torch.randn(6, 2, dtype=DOUBLE)
    model = make()
    with override({at("head"): lambda dy, builtin: builtin(dy + noise)}, model=model):
        found = gradients(model)
    model.head.register_full_backward_pre_hook(lambda module, dys: (dys[0] + noise,))
    check(found, gradients(model))


def test_parameters_by_name():
    model = make()
    with override({at("head"): named}, model=model) as used:
        found = gradients(model)
    used.assert_fired()
    h = X
    for layer in model.layers:
        h = layer(h)
    y = model.head(h)
    (dy,) = torch.autograd.grad(y.pow(2).sum(), y, retain_graph=True)
    model.zero_grad()
    h.backward(2 * dy @ model.head.weight)
    expected = [p.grad for p in model.layers.parameters()]
    check(found, [*expected, 3 * dy.mT @ h, 5 * dy.sum(0)])


def test_some_parameters_by_name():
    model = make()

    def rule(dy, builtin, first_weight):
        return builtin(dy), {"first.weight": 7 * first_weight, "last.bias": None}

    with override({at("layers.0"): rule}, model=model):
        model.zero_grad()
        model(X).pow(2).sum().backward()
    found = [p.grad for p in model.parameters()]
    expected = reference()
    expected[0] = 7 * model.layers[0].first.weight.detach()
    assert found.pop(3) is None
    expected.pop(3)
    check(found, expected)


def test_the_gradient_of_another_function():
    model = make()

    def smooth(x, weight, bias):
        return torch.tanh(x @ weight.mT + bias)

    with override({at("head"): rg.rules.vjp_of(smooth)}, model=model):
        found = gradients(model)
    h = X
    for layer in model.layers:
        h = layer(h)
    y = smooth(h, model.head.weight, model.head.bias)
    model.zero_grad()
    y.backward(2 * model.head(h).detach())
    check(found, [p.grad for p in model.parameters()])


def test_frozen_parameters_need_no_answer():
    model = make()
    model.head.requires_grad_(False)
    with override({at("head"): lambda dy, x: dy @ torch.ones(2, 4, dtype=DOUBLE)}, model=model):
        model.zero_grad()
        model(X).sum().backward()
        model.head.requires_grad_(True)
        with pytest.raises(RuleError, match="says nothing of the parameter 'weight'"):
            model(X)


class Two(nn.Module):
    """Takes two tensors, one of them by name, and a number; returns a dict."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5, dtype=DOUBLE))

    def forward(self, a, power, *, other):
        return {"sum": self.weight * a**power + other, "parts": (a * other, 3)}


def two(model, a, other):
    y = model(a, 2, other=other)
    assert y["parts"][1] == 3
    return y["sum"].sum() + y["parts"][0].pow(2).sum()


def test_several_inputs_and_outputs():
    model = Two()
    a, other = (torch.randn(3, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    inputs = [a, other, model.weight]
    expected = torch.autograd.grad(two(model, a, other), inputs)
    with override({at(Two): lambda dy, builtin: builtin(dy)}):
        check(torch.autograd.grad(two(model, a, other), inputs), expected)
    with override({at(Two): lambda dy, builtin: 2 * builtin(dy)}):
        found = torch.autograd.grad(two(model, a, other), inputs)
    check(found, [2 * expected[0], 2 * expected[1], expected[2]])

    def rule(dy, a, power, other, weight):
        second, first = dy  # (in the order of sorted keys)
        by_a = first * weight * power * a ** (power - 1) + second * other
        return by_a, first + second * a, {"weight": (first * a**power).sum()}

    with override({at(Two): rule}):
        check(torch.autograd.grad(two(model, a, other), inputs), expected)


def test_containers_of_tensors():
    class Sum(nn.Module):
        def forward(self, xs):
            return sum(xs)

    xs = [torch.randn(2, dtype=DOUBLE, requires_grad=True) for _ in range(3)]
    with override({at(Sum): lambda dy, xs: [dy * i for i in range(len(xs))]}):
        found = torch.autograd.grad(Sum()(xs).sum(), xs)
    assert [dx.tolist() for dx in found] == [[0, 0], [1, 1], [2, 2]]
    with override({at(Sum): rg.rules.scale(3.0)}):
        found = torch.autograd.grad(Sum()(tuple(xs)).sum(), xs)
    assert [dx.tolist() for dx in found] == [[3, 3]] * 3


@pytest.mark.parametrize(
    "module",
    [
        nn.Identity(), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.ReLU(), nn.Sequential(),
        nn.MultiheadAttention(4, 2), nn.GELU(), nn.LSTM(4, 3),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_modules_of_torch(module):
    module = module.to(DOUBLE)
    x = X.clone().requires_grad_()

    def run():
        if isinstance(module, nn.MultiheadAttention):
            return module(x, x, x, need_weights=False)[0]
        if isinstance(module, nn.LSTM):
            return module(x)[0]
        return module(x)

    inputs = [x, *module.parameters()]
    expected = torch.autograd.grad(run().sin().sum(), inputs)
    with override({at(module): lambda dy, builtin: builtin(dy)}) as used:
        check(torch.autograd.grad(run().sin().sum(), inputs), expected)
    assert used.hits[0].ran == 1


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, dy):
        return dy / 2


@pytest.mark.versions
def test_modules_that_end_in_a_function():
    class Halves(nn.Module):
        def forward(self, x):
            return Half.apply(x * 3), Half.apply(x)

    x = X.clone().requires_grad_()
    with override({at(Halves): lambda dy, builtin: builtin(dy)}):
        a, b = Halves()(x)
    (a.sum() + 2 * b.sum()).backward()
    check([x.grad], [torch.full_like(x, 2.5)])


def test_a_parameter_that_is_tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(DOUBLE)
    model[1].weight = model[0].weight
    expected = gradients(model)
    with override({at("1"): lambda dy, builtin: builtin(dy)}, model=model):
        check(gradients(model), expected)
    with override({at(""): lambda dy, builtin: builtin(dy)}, model=model):
        check(gradients(model), expected)


def test_second_order():
    model = make()

    def second(f):
        parameters = list(model.parameters())
        dxs = torch.autograd.grad(f(X).pow(2).sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(dx.pow(2).sum() for dx in dxs), parameters)

    def hooked(x):
        for layer in model.layers:
            x = layer(x)
        y = model.head(x)
        y.register_hook(bent)
        return y

    expected = second(hooked)
    with override({at("head"): pre}, model=model):
        check(second(model), expected)
    with override(
        {
            at("head"): lambda dy, x, weight, bias: (
                bent(dy) @ weight,
                {"weight": bent(dy).mT @ x, "bias": bent(dy).sum(0)},
            )
        },
        model=model,
    ):
        check(second(model), expected)  # fmt: skip


def test_torch_func():
    model = make()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).pow(2).sum()

    with override({at("layers.1"): pre}, model=model):
        found = torch.func.grad(loss)(parameters, X)
        rows = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, X)
    expected = reference(["layers.1"])
    check(list(found.values()), expected)
    assert all(row.shape == (6, *p.shape) for row, p in zip(rows.values(), expected, strict=True))
    check([row.sum(0) for row in rows.values()], expected)


def test_autocast():
    model, x = make().float(), X.float()

    def run(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float()

    expected = gradients(model, run, x)
    with override({at(Block): lambda dy, builtin: builtin(dy)}, model=model):
        assert all(map(torch.equal, gradients(model, run, x), expected))


def test_the_backward_pass_may_come_after_the_scope():
    model = make()
    with override({at("layers.1"): pre}, model=model):
        y = model(X)
    y.pow(2).sum().backward()
    check([p.grad for p in model.parameters()], reference(["layers.1"]))


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
        with override({at("layers.1"): lambda dy, builtin: builtin(dy)}, model=model):
            check(gradients(model), plain)
        with override({at("head"): pre}, model=model):
            check(gradients(model), both)


def test_wrappers_are_no_steps(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make()
        wrapped = nn.parallel.DistributedDataParallel(model)
        expected = reference(["layers.1"])
        for given in (model, wrapped):
            with override({at("layers.1"): pre}, model=given) as used:
                check(gradients(model, wrapped), expected)
            assert {hit.path for hit in used.hits} == {"layers.1"}
    finally:
        dist.destroy_process_group()
