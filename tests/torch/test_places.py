"""Rules at places of a PyTorch model: by path, class, instance, predicate and number.

The reference is autograd itself: a hook on the output of the selected module, with the same factor.
"""

import concurrent.futures
import threading

import pytest

import regrad as rg
from regrad.errors import PassedOverError

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
override = pytest.importorskip("regrad.torch").gradient_override_map
places = pytest.importorskip("regrad.torch.places")
at = rg.at


class Block(nn.Module):
    def __init__(self, act=nn.ReLU):
        super().__init__()
        self.lin, self.act = nn.Linear(4, 4), act()

    def forward(self, x):
        return self.act(self.lin(x))


class Net(nn.Module):
    """Blocks, run as they are or in checkpoints; its last one has another activation."""

    def __init__(self, run=None):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block(nn.LeakyReLU), Block()])
        self.head = nn.Linear(4, 2)
        self.run = run or (lambda layer, x: layer(x))

    def forward(self, x):
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


def make(run=None):
    torch.manual_seed(0)
    return Net(run)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)) + 0.5


def seven(dy, x):
    return 7 * dy * (x > 0)


def gradients(model, f=None, x=X):
    model.zero_grad()
    (model if f is None else f)(x).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def reference(paths, model=None, x=X):
    """The gradients where autograd multiplies those of the outputs of some modules by 7."""
    model = model or make()

    def hook(module, args, y):
        y.register_hook(lambda dy: 7 * dy)

    held = [model.get_submodule(path).register_forward_hook(hook) for path in paths]
    found = gradients(model, x=x)
    for each in held:
        each.remove()
    return found


def check(found, paths):
    for a, b in zip(found, reference(paths), strict=True):
        torch.testing.assert_close(a, b)


def in_second(site):
    return site.path == "layers.1.act" and site.shapes == ((5, 4),) and site.module_class is nn.ReLU


SELECTORS = {
    "path": (lambda m: {at("layers.1", "Relu"): seven}, ["layers.1.act"]),
    "pattern": (lambda m: {at("layers.[01].**", "Relu"): seven}, ["layers.0.act", "layers.1.act"]),
    "class": (lambda m: {at(Block, "Relu"): seven}, [f"layers.{i}.act" for i in (0, 1, 3)]),
    "instance": (lambda m: {at(m.layers[3], "Relu"): seven}, ["layers.3.act"]),
    "tuple": (
        lambda m: {at((m.layers[3], "layers.0"), "Relu"): seven}, ["layers.0.act", "layers.3.act"],
    ),
    "predicate": (lambda m: {at(in_second, "Relu"): seven}, ["layers.1.act"]),
    "map": (lambda m: {at("layers.*"): {at("**.3"): {F.relu: seven}}}, ["layers.3.act"]),
    "nth module": (lambda m: {at(Block, nth=-1): {"Relu": seven}}, ["layers.3.act"]),
    "shadow": (
        lambda m: {"Relu": seven, at("layers.1", "Relu"): "Relu"}, ["layers.0.act", "layers.3.act"],
    ),
}  # fmt: skip
COUNTED = {
    "nth": (lambda m: {at(None, "Relu", 1): seven}, ["layers.1.act"]),
    "nth in class": (lambda m: {at(nn.ReLU, "Relu", 2): seven}, ["layers.3.act"]),
    "nth by a predicate": (
        lambda m: {at(lambda site: site.nth == 2, "Relu"): seven}, ["layers.3.act"],
    ),
}  # fmt: skip


def checkpointed(use_reentrant):
    def run(layer, x):
        if use_reentrant and not x.requires_grad:
            x = x.requires_grad_()
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=use_reentrant)

    return lambda: (model := make(run), lambda x: model(x.clone()))


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
    "checkpoint": checkpointed(False),
    "reentrant": checkpointed(True),
    "functional_call": functional,
    "thread": in_thread,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("selector", [*SELECTORS, *COUNTED])
def test_the_choice_is_made_forward(selector, way):
    model, f = WAYS[way]()
    rules, paths = {**SELECTORS, **COUNTED}[selector]
    with override(rules(model), model=model) as used:
        found = gradients(model, f)
    check(found, paths)
    assert {hit.path for hit in used.hits if hit.rule == "seven" and hit.ran} == set(paths)
    with override(rules(model), model=model):  # made once, found again
        found = gradients(model, f)
    check(found, paths)
    check(gradients(model, f), [])


@pytest.mark.parametrize("selector", [*SELECTORS, *COUNTED])
def test_the_backward_pass_may_come_after_the_scope(selector):
    model, f = checkpointed(False)()
    rules, paths = {**SELECTORS, **COUNTED}[selector]
    with override(rules(model), model=model):
        y = f(X)
    y.sum().backward()
    check([p.grad for p in model.parameters()], paths)


@pytest.mark.versions
@pytest.mark.parametrize("selector", SELECTORS)
def test_compiled(selector):
    torch.compiler.reset()
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    rules, paths = SELECTORS[selector]
    other = {at("layers.0.act", "Relu"): seven}, ["layers.0.act"]
    for i, (held, expected) in enumerate(
        [(rules(model), paths), other, (None, []), (rules(model), paths), other, (None, [])]
    ):
        if held is None:
            check(gradients(model, compiled), [])
            continue
        with override(held, model=model) as used:
            found = gradients(model, compiled)
        check(found, expected)
        if i < 2:
            assert {h.path for h in used.hits if h.rule == "seven"} == set(expected)


@pytest.mark.parametrize("selector", COUNTED)
def test_calls_are_not_counted_in_compiled_code(selector):
    torch.compiler.reset()
    model = make()
    with (
        pytest.raises(PassedOverError, match="counts calls"),
        override(COUNTED[selector][0](model), model=model),
    ):
        torch.compile(model, backend="aot_eager", fullgraph=True)(X)


# -- where the program is --------------------------------------------------------------------------


def scaled(paths, rules=None, model=None, **options):
    """Check a model's gradients in a scope against hooks on the modules of these paths."""
    model = model or make()
    with override(rules, model=model, **options) as used:
        found = gradients(model)
    check(found, paths)
    return used


def test_an_exception_in_the_middle():
    model, broken = make(), [True]

    def hook(module, args):
        if broken[0]:
            raise KeyError("stop")

    model.layers[1].act.register_forward_pre_hook(hook)
    with override({at("layers.[12]", "Relu"): seven}, model=model):
        with pytest.raises(KeyError):
            model(X)
        broken[0] = False
        found = gradients(model)
        x = X.clone().requires_grad_()
        F.relu(x).sum().backward()
        torch.testing.assert_close(x.grad, (X > 0).float())
    check(found, ["layers.1.act"])


def test_inner_and_outer_scopes():
    model = make()
    with override({at("layers.0", "Relu"): seven}, model=model):
        with override({"Relu": "Relu"}):
            found = gradients(model)  # an inner scope wins
        again = gradients(model)
    check(found, [])
    check(again, ["layers.0.act"])
    with override({"Relu": seven}), override({at("layers.0", "Relu"): "Relu"}, model=model):
        found = gradients(model)
    check(found, ["layers.1.act", "layers.3.act"])
    with (
        override({at("layers.0", "Relu"): seven}, model=model),
        override({at("1", "Relu"): seven}, model=model.layers),
    ):
        found = gradients(model)
    check(found, ["layers.0.act", "layers.1.act"])


def opens(scope):
    def hook(*_):
        scope.__enter__()

    return hook


def leaves(scope):
    def hook(*_):
        scope.__exit__(None, None, None)

    return hook


def test_a_scope_that_opens_in_a_module():
    model = make()
    scope = override({"Relu": "Relu"})
    model.layers[1].register_forward_pre_hook(opens(scope))
    model.layers[1].register_forward_hook(leaves(scope))
    with override({at("layers.*", "Relu"): seven}, model=model):
        found = gradients(model)
    check(found, ["layers.0.act", "layers.3.act"])


def test_a_scope_that_a_module_leaves_open_or_leaves():
    model = make()
    outer = override({at("layers.*", "Relu"): seven}, model=model)
    inner = override({at("layers.1", "Relu"): "Relu"}, model=model)
    model.layers[0].register_forward_pre_hook(opens(inner))
    model.layers[2].register_forward_hook(leaves(inner))
    with outer:
        found = gradients(model)
    check(found, ["layers.0.act", "layers.3.act"])


def test_threads_do_not_see_each_other():
    model, barrier, found = make(), threading.Barrier(2), {}

    def wait(module, args):
        if threading.current_thread() is not threading.main_thread():
            barrier.wait(10)

    model.layers[1].register_forward_pre_hook(wait)

    def run(name, rules, paths):
        with override(rules, model=model):
            y = model(X)
        found[name] = torch.autograd.grad(y.sum(), [*model.parameters()]), paths

    keys = {at("layers.1", "Relu"): seven}, {at("layers.0", "Relu"): seven}
    jobs = [
        threading.Thread(target=run, args=(i, rules, [f"layers.{1 - i}.act"]))
        for i, rules in enumerate(keys)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(found) == 2
    for grads, paths in found.values():
        check(grads, paths)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()
        self.other = nn.ReLU()

    def forward(self, x, n=2):
        return self(self.act(x), n - 1) if n else self.other(x)


def test_recursion_and_modules_that_are_called_again():
    model = Recursive()
    for key, factor in [(at("act"), 49), (at("other"), 7), (at(""), 343), (at("act", nth=-1), 49)]:
        x = torch.ones(3, requires_grad=True)
        with override({key: {"Relu": seven}}, model=model) as used:
            model(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3,), float(factor)))
        used.assert_fired()
    x = torch.ones(3, requires_grad=True)
    with override({at(None, "Relu", 0): seven}, model=model):
        (model(x) + model(x)).sum().backward()  # from each outermost call
    torch.testing.assert_close(x.grad, torch.full((3,), 14.0))


def test_modules_out_of_order():
    model = make()
    with override({at("layers.1", "Relu"): seven}, model=model) as used:
        y = model.layers[1](model.layers[3](X))
    y.sum().backward()
    assert [hit.path for hit in used.hits] == ["layers.1.act"]
    other = make()
    other.layers[1].act.register_forward_hook(
        lambda m, a, y: y.register_hook(lambda g: 7 * g) and None
    )
    other.layers[1](other.layers[3](X)).sum().backward()
    torch.testing.assert_close(model.layers[3].lin.weight.grad, other.layers[3].lin.weight.grad)


def test_autocast():
    model, other = make(), make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with override({at("layers.1", "Relu"): seven}, model=model) as used:
            found = gradients(model)
        expected = reference(["layers.1.act"], other)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    used.assert_fired()


def test_torch_func():
    model = make()
    p = dict(model.named_parameters())

    def loss(p, x):
        return torch.func.functional_call(model, p, (x,)).sum()

    with override({at("layers.1", "Relu"): seven}, model=model):
        found = torch.func.grad(loss)(p, X)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(p, X)
    check(found.values(), ["layers.1.act"])
    check([x.sum(0) for x in each.values()], ["layers.1.act"])


def test_two_names():
    model = make()
    model.again = model.layers[0]
    with override({at("again", "Relu"): seven}, model=model):
        found = gradients(model)
    check(found, ["layers.0.act"])


class PlacedSpike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x > 0).float()

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class Spiking(nn.Module):
    def forward(self, x):
        return PlacedSpike.apply(x)


@pytest.mark.parametrize("what", [PlacedSpike, "PlacedSpike"])
def test_functions(what):
    model = nn.Sequential(Spiking(), Spiking())
    x = torch.ones(3, requires_grad=True)
    with override({at("1", what): lambda dy: dy * 5}, model=model) as used:
        model(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 10.0))
    assert [(hit.path, hit.ran) for hit in used.hits] == [("1", 1)]


@pytest.mark.parametrize("key", ["PlacedSpike", PlacedSpike])
def test_the_name_of_a_function_alone(key):
    x = torch.ones(3, requires_grad=True)
    with override({key: lambda dy: dy * 5}) as used:
        Spiking()(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 5.0))
    used.assert_fired("PlacedSpike")


def test_reports_show_paths():
    used = scaled(["layers.0.act"], {at("layers.0", "Relu"): seven})
    used.assert_fired()
    used.assert_fired(at("layers.0", "Relu"))
    assert used.table().headings[0] == "module" and used.table().rows[0][0] == "layers.0.act"
    rows = {(path, op) for path, op, *_ in used.untouched().rows}
    assert {("layers.1.act", "Relu"), ("layers.2.act", "torch.nn.functional.leaky_relu")} <= {
        (p, op.split(" (")[0]) for p, op in rows
    } or ("layers.2.act", "LeakyRelu") in rows
    assert "layers.0.act" not in {path for path, _ in rows}


def test_decorators():
    model = make()
    run = override({at("layers.0", "Relu"): seven}, model=model)
    f = run(model.forward)
    found = gradients(model, lambda x: f(x))
    check(found, ["layers.0.act"])
    run.assert_fired()


def test_a_rule_that_asks_for_its_site():
    seen = []

    def noted(dy, x, site):
        seen.append((site.path, site.op_type, site.nth, site.shapes, site.line > 0))
        return dy * (x > 0)

    model = make()
    for rules in ({at("layers.[01]", "Relu"): noted}, {"Relu": noted}):
        with override(rules, model=model):
            found = gradients(model)
        check(found, [])
    paths = ["layers.1.act", "layers.0.act"]
    assert not places.COUNTS.get()
    assert [path for path, *_ in seen[:2]] == paths and len(seen) == 5
    assert seen[0] == ("layers.1.act", "Relu", 1, ((5, 4),), True)


@pytest.mark.versions
def test_a_rule_that_asks_for_its_site_compiled():
    torch.compiler.reset()
    seen = []

    def noted(dy, x, site):
        seen.append(site.path)
        return 7 * dy * (x > 0)

    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with override({at("layers.[01]", "Relu"): noted}, model=model):
        found = gradients(model, compiled)
    check(found, ["layers.0.act", "layers.1.act"])
    assert {*seen} == {"layers.0.act", "layers.1.act"}


def test_counters_of_norms_are_no_calls():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(x) + x

    model, x = Block(), torch.randn(3, 2, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    rules = {rg.at(Block, "AddV2", nth=0): lambda dy, builtin: [3 * d for d in builtin(dy)]}
    with override(rules, model=model) as used:
        (found,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(found, 3 * plain)
    (hit,) = used.hits
    assert (hit.count, hit.ran) == (1, 1)


def test_a_key_that_counts_calls_wins_over_one_that_does_not():
    """The first call of several op types, where each type has a rule of its own as well."""
    x = torch.ones(2, requires_grad=True)
    every = {"Relu": lambda dy: 2 * dy, "Tanh": lambda dy: 3 * dy}
    with override({**every, rg.at(None, ("Tanh", "Relu"), nth=0): lambda dy: 7 * dy}) as used:
        torch.tanh(torch.relu(torch.relu(x))).sum().backward()
    used.assert_fired()
    assert x.grad.tolist() == [42.0, 42.0]
