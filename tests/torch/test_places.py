"""Rules at places of a PyTorch model: by path, class, instance, predicate and number; refusals.

The reference is autograd itself: a hook on the output of the selected module, with the same factor.
"""

import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regrad as rg
from regrad.errors import ArgumentError, NotFiredError, RuleError, UnusedOverrideWarning
from regrad.torch import places
from tests.torch.common import close, fired, function, override, under
from tests.torch.placed import WAYS, Block, Net, X, checkpointed, gradients, hooked, refused

at = rg.at


def make(run=None):
    return Net([nn.ReLU, nn.ReLU, nn.LeakyReLU, nn.ReLU], run)


def seven(dy, x):
    return 7 * dy * (x > 0)


def acts(*numbers):
    return [f"layers.{i}.act" for i in numbers]


def check(found, paths, model=None, x=X, tolerance=1e-12):
    """Compare gradients with those that are 7 times as large behind the modules of these paths."""
    expected = hooked(model or make(), lambda dy: 7 * dy, before=paths, x=x)
    close(found, expected, tolerance)


def in_second(site):
    return site.path == "layers.1.act" and site.shapes == ((6, 5),) and site.module_class is nn.ReLU


SELECTORS = {
    "path": (lambda m: {at("layers.1", "Relu"): seven}, acts(1)),
    "pattern": (lambda m: {at("layers.[01].**", "Relu"): seven}, acts(0, 1)),
    "class": (lambda m: {at(Block, "Relu"): seven}, acts(0, 1, 3)),
    "instance": (lambda m: {at(m.layers[3], "Relu"): seven}, acts(3)),
    "tuple": (lambda m: {at((m.layers[3], "layers.0"), "Relu"): seven}, acts(0, 3)),
    "predicate": (lambda m: {at(in_second, "Relu"): seven}, acts(1)),
    "map": (lambda m: {at("layers.*"): {at("**.3"): {F.relu: seven}}}, acts(3)),
    "nth module": (lambda m: {at(Block, nth=-1): {"Relu": seven}}, acts(3)),
    "shadow": (lambda m: {"Relu": seven, at("layers.1", "Relu"): "Relu"}, acts(0, 3)),
}
COUNTED = {
    "nth": (lambda m: {at(None, "Relu", 1): seven}, acts(1)),
    "nth in class": (lambda m: {at(nn.ReLU, "Relu", 2): seven}, acts(3)),
    "nth by a predicate": (lambda m: {at(lambda site: site.nth == 2, "Relu"): seven}, acts(3)),
}
ALL = {**SELECTORS, **COUNTED}


@pytest.mark.slow(but=8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("selector", ALL)
def test_the_choice_is_made_forward(selector, way):
    model, f = WAYS[way](make)
    rules, paths = ALL[selector]
    with override(rules(model), model=model) as used:
        found = gradients(model, f)
    check(found, paths)
    assert {hit.path for hit in used.hits if hit.rule == "seven" and hit.ran} == set(paths)
    with override(rules(model), model=model):  # made once, found again
        found = gradients(model, f)
    check(found, paths)
    check(gradients(model, f), [])


@pytest.mark.parametrize("selector", ALL)
def test_the_backward_pass_may_come_after_the_scope(selector):
    model, f = checkpointed(False)(make)
    rules, paths = ALL[selector]
    y = under(rules(model), lambda: f(X), model=model)
    y.pow(2).sum().backward()
    check([p.grad for p in model.parameters()], paths)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("selector", SELECTORS)
def test_compiled(selector):
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    rules, paths = SELECTORS[selector]
    for turn in range(2):
        for held, due in ((rules(model), paths), ({at("layers.0.act", "Relu"): seven}, acts(0))):
            with override(held, model=model) as used:
                found = gradients(model, compiled)
            check(found, due)
            assert turn or {h.path for h in used.hits if h.rule == "seven"} == set(due)
        check(gradients(model, compiled), [])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("selector", COUNTED)
def test_calls_are_not_counted_in_compiled_code(selector):
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    refused("counts calls", COUNTED[selector][0](model), lambda: compiled(X), model=model)


# -- where the program is --------------------------------------------------------------------------


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
        torch.testing.assert_close(x.grad, (X > 0).double())
    check(found, acts(1))


def test_inner_and_outer_scopes():
    model = make()
    with override({at("layers.0", "Relu"): seven}, model=model):
        with override({"Relu": "Relu"}):
            found = gradients(model)  # an inner scope wins
        again = gradients(model)
        both = under({at("1", "Relu"): seven}, lambda: gradients(model), model=model.layers)
    check(found, [])
    check(again, acts(0))
    check(both, acts(0, 1))
    with override({"Relu": seven}), override({at("layers.0", "Relu"): "Relu"}, model=model):
        found = gradients(model)
    check(found, acts(1, 3))


@pytest.mark.parametrize(("inner", "opens", "leaves"), [
    ({"Relu": "Relu"}, "layers.1", "layers.1"),
    ({at("layers.1", "Relu"): "Relu"}, "layers.0", "layers.2"),  # which another module leaves
], ids=["one module", "two modules"])  # fmt: skip
def test_a_scope_that_opens_in_a_module(inner, opens, leaves):
    model = make()
    scope = override(inner, model=model)

    def enter(*_):
        scope.__enter__()

    def leave(*_):
        scope.__exit__(None, None, None)

    model.get_submodule(opens).register_forward_pre_hook(enter)
    model.get_submodule(leaves).register_forward_hook(leave)
    found = under({at("layers.*", "Relu"): seven}, lambda: gradients(model), model=model)
    check(found, acts(0, 3))


def test_threads_do_not_see_each_other():
    model, barrier, found = make(), threading.Barrier(2), {}

    def wait(module, args):
        if threading.current_thread() is not threading.main_thread():
            barrier.wait(10)

    model.layers[1].register_forward_pre_hook(wait)

    def run(i):
        y = under({at(f"layers.{i}", "Relu"): seven}, lambda: model(X), model=model)
        found[i] = torch.autograd.grad(y.pow(2).sum(), [*model.parameters()])

    jobs = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    for i in range(2):
        check(found[i], acts(i))


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.other = nn.ReLU(), nn.ReLU()

    def forward(self, x, n=2):
        return self(self.act(x), n - 1) if n else self.other(x)


def slope(rules, f, model=None):
    """Return the gradient at ones, which is the same number in each element, and the report."""
    x = torch.ones(3, requires_grad=True)
    with override(rules, model=model) as used:
        f(x).sum().backward()
    (value,) = set(x.grad.tolist())
    used.assert_fired()
    return value, used


@pytest.mark.parametrize(("key", "twice", "factor"), [
    (at("act"), False, 49), (at("other"), False, 7), (at(""), False, 343),
    (at("act", nth=-1), False, 49),
    (at(None, "Relu", 0), True, 14),  # from each outermost call
])  # fmt: skip
def test_recursion_and_modules_that_are_called_again(key, twice, factor):
    model = Recursive()
    rules = {key: seven if twice else {"Relu": seven}}
    assert slope(rules, lambda x: model(x) + model(x) if twice else model(x), model)[0] == factor


def test_modules_out_of_order():
    model, other = make(), make()
    with override({at("layers.1", "Relu"): seven}, model=model) as used:
        y = model.layers[1](model.layers[3](X))
    y.sum().backward()
    assert [hit.path for hit in used.hits] == ["layers.1.act"]
    other.layers[1].act.register_forward_hook(
        lambda m, a, y: y.register_hook(lambda g: 7 * g) and None
    )
    other.layers[1](other.layers[3](X)).sum().backward()
    close([model.layers[3].last.weight.grad], [other.layers[3].last.weight.grad])


def test_autocast():
    model, x = make().float(), X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fired({at("layers.1", "Relu"): seven}, lambda: gradients(model, x=x), model=model)
        check(found, acts(1), make().float(), x, 2e-2)


def test_torch_func():
    model = make()
    p = dict(model.named_parameters())

    def loss(p, x):
        return torch.func.functional_call(model, p, (x,)).pow(2).sum()

    with override({at("layers.1", "Relu"): seven}, model=model):
        found = torch.func.grad(loss)(p, X)
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(p, X)
    check(found.values(), acts(1))
    check([x.sum(0) for x in each.values()], acts(1))


def test_two_names():
    model = make()
    model.again = model.layers[0]
    found = under({at("again", "Relu"): seven}, lambda: gradients(model), model=model)
    check(found, acts(0))


PlacedSpike = function(lambda x: (x > 0).float(), lambda dy, x: dy * 2, "PlacedSpike")


class Spiking(nn.Module):
    def forward(self, x):
        return PlacedSpike.apply(x)


@pytest.mark.parametrize("key", ["PlacedSpike", PlacedSpike], ids=["name", "class"])
def test_functions(key):
    model = nn.Sequential(Spiking(), Spiking())
    value, used = slope({at("1", key): lambda dy: dy * 5}, model, model)
    assert value == 10 and [(hit.path, hit.ran) for hit in used.hits] == [("1", 1)]
    value, used = slope({key: lambda dy: dy * 5}, Spiking())
    assert value == 5
    used.assert_fired("PlacedSpike")


def test_reports_show_paths():
    model = make()
    with override({at("layers.0", "Relu"): seven}, model=model, watch=True) as used:
        found = gradients(model)
    check(found, acts(0))
    used.assert_fired()
    used.assert_fired(at("layers.0", "Relu"))
    assert used.table().headings[0] == "module" and used.table().rows[0][0] == "layers.0.act"
    rows = {(path, op.split(" (")[0]) for path, op, *_ in used.untouched().rows}
    leaky = {("layers.2.act", name) for name in ("torch.nn.functional.leaky_relu", "LeakyRelu")}
    assert ("layers.1.act", "Relu") in rows and rows & leaky
    assert "layers.0.act" not in {path for path, _ in rows}


def test_decorators():
    model = make()
    run = override({at("layers.0", "Relu"): seven}, model=model)
    check(gradients(model, run(model.forward)), acts(0))
    run.assert_fired()


@pytest.mark.versions
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rule_that_asks_for_its_site(compiled):
    seen, model = [], make()

    def noted(dy, x, site):
        seen.append((site.path, site.op_type, site.nth, site.shapes, site.line > 0))
        return 7 * dy * (x > 0)

    f = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    found = under({at("layers.[01]", "Relu"): noted}, lambda: gradients(model, f), model=model)
    check(found, acts(0, 1))
    if compiled:
        assert {path for path, *_ in seen} == {*acts(0, 1)}
        return
    assert seen[0] == ("layers.1.act", "Relu", 1, ((6, 5),), True) and seen[1][0] == "layers.0.act"
    found = under({"Relu": noted}, lambda: gradients(model), model=model)
    check(found, acts(0, 1, 3))
    assert not places.COUNTS.get() and len(seen) == 5


def test_counters_of_norms_are_no_calls():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(x) + x

    model, x = Normed(), torch.randn(3, 2, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).square().sum(), x)
    rules = {at(Normed, "AddV2", nth=0): lambda dy, builtin: [3 * d for d in builtin(dy)]}
    with override(rules, model=model) as used:
        (found,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(found, 3 * plain)
    assert [(hit.count, hit.ran) for hit in used.hits] == [(1, 1)]


def test_a_key_that_counts_calls_wins_over_one_that_does_not():
    """The first call of several op types, where each type has a rule of its own as well."""
    every = {"Relu": lambda dy: 2 * dy, "Tanh": lambda dy: 3 * dy}
    rules = {**every, at(None, ("Tanh", "Relu"), nth=0): lambda dy: 7 * dy}
    assert slope(rules, lambda x: torch.tanh(torch.relu(torch.relu(x))))[0] == 42


# -- what is refused, and modules that never run ---------------------------------------------------

TWICE = {key: rg.rules.optional(seven) for key in (at("layers.1", "Relu"), at("*.1", "Relu"))}
KEYS = [
    ({at("layer.0", "Relu"): seven}, ArgumentError, "names no module.*'layers.0'"),
    ({at("act", "Relu"): seven}, ArgumentError, "Did you mean 'layers.0.act'"),
    ({at(nn.Conv2d, "Relu"): seven}, ArgumentError, "no module of the model is of that class"),
    ({at(nn.ReLU(), "Relu"): seven}, ArgumentError, "no module of the model"),
    ({at("layers.0", "Relux"): seven}, rg.errors.UnknownOpError, "Relux"),
    ({at("layers.0", ("Relu", F.relu)): seven}, ArgumentError, "two keys of the map mean"),
    ({at(lambda x: True, "Relu"): seven}, ArgumentError, "one parameter, `site`"),
    ({at("layers.0"): seven}, RuleError, "returns no gradient for the parameter 'first.weight'"),
    ({at(nn.ReLU, nth=9): {"Relu": seven}}, ArgumentError, "there are 3 such modules"),
    (TWICE, ArgumentError, "two keys of the map select the same place"),
]


@pytest.mark.parametrize(("rules", "error", "words"), KEYS, ids=[words for *_, words in KEYS])
def test_keys_that_are_refused(rules, error, words):
    model = make()
    refused(words, rules, lambda: model(X), error, model=model)


@pytest.mark.parametrize(("key", "model", "words"), [
    (at("a", "Relu"), None, "model=model"), (at("a", "Relu"), 3, "model expected"),
    (at(nn.ReLU, nth=0), None, "nth counts the modules of a model"),
])  # fmt: skip
def test_models_that_are_refused(key, model, words):
    refused(words, {key: {"Relu": seven} if key.what is None else seven}, error=ArgumentError,
            model=model)  # fmt: skip


KEY = {at("layers.1", "Relu"): rg.rules.optional(seven)}


def swapped(model):
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


@pytest.mark.parametrize(("change", "words"), [
    (lambda m: m.layers.__setitem__(1, Block()), "a Block was put into '' after the scope opened"),
    (swapped, "was put in the place '0'"),
    (lambda m: setattr(m.layers[1], "act", nn.ReLU()), "a ReLU was put into"),
])  # fmt: skip
def test_modules_that_came_later(change, words):
    model = make()
    refused(words, KEY, lambda: [change(model), model(X)], model=model)


def test_copies():
    model, words = make(), "a copy, which no key names"
    for other in (copy.deepcopy(model), copy.deepcopy(model.layers[1])):
        refused(words, KEY, lambda other=other: other(X), model=model)
    state = torch.func.stack_module_state([make(), make()])
    base = copy.deepcopy(model).to("meta")
    call = lambda p, b: torch.func.functional_call(base, (p, b), (X,))  # noqa: E731
    refused(words, KEY, lambda: torch.func.vmap(call)(*state), model=model)
    with override(KEY, model=model):
        nn.Linear(4, 4)(X.float())  # one of somebody's, with the sizes of another
        nn.ReLU()(X)


class Unused(nn.Module):
    """It calls `forward` of one module, uses the weight of another, and never runs a third."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), nn.Linear(4, 4), Block()
        self.dead = nn.Sequential(nn.ReLU(), nn.ReLU())
        self.double()

    def forward(self, x):
        return self.c(F.linear(self.a.forward(x), self.b.weight))


@pytest.mark.parametrize(("key", "named"), [
    (at(("a", "c"), "Relu"), "'a', which never ran"),
    (at(("b", "c"), "Relu"), "'b', which never ran"),
    (at(Block, "Relu"), "'a', which never ran"),
    (at("**", "Relu"), None),
    (at(("c.**", "dead.**"), "Relu"), "'dead', which never ran"),
    (at(("c", "dead.1"), "Relu"), None),
])  # fmt: skip
def test_modules_that_never_run(key, named):
    model = Unused()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with override({key: lambda dy: dy}, model=model) as used:
            model(X).sum().backward()
    if named is None:
        assert not told
        used.assert_fired()
        return
    (warning,) = told
    assert warning.category is UnusedOverrideWarning and named in str(warning.message)
    assert warning.filename == __file__
    with pytest.raises(NotFiredError, match=named):
        used.assert_fired()


def test_attention_never_calls_its_out_proj():
    model = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    told = pytest.warns(UnusedOverrideWarning, match=r"'self_attn\.out_proj', which never ran")
    with told, override({at(nn.Linear, "MatMul"): "MatMul"}, model=model):
        model(torch.randn(1, 3, 4)).sum().backward()


def test_nothing_is_left_behind(tmp_path):
    model = make()
    before, call = {n: dict(vars(m)) for n, m in model.named_modules()}, vars(nn.Module).copy()
    with override(KEY, model=model):
        gradients(model)
        torch.save(copy.deepcopy(model).state_dict(), tmp_path / "m.pt")
        assert {n: dict(vars(m)) for n, m in model.named_modules()} == before
    assert vars(nn.Module) == call


@pytest.mark.slow
def test_wrappers_are_no_steps():
    class Wrapped(nn.parallel.DataParallel):
        def forward(self, x):
            return self.module(x)

    for model in (Wrapped(make()), torch.compile(make(), backend="eager")):
        with override({at("layers.0", "Relu"): seven}, model=model):
            found = gradients(model)
        check(found, acts(0))
