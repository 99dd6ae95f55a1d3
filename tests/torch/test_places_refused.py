"""Keys that name places of a PyTorch model: what is refused, and modules that never run."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regrad as rg
from regrad.errors import (
    ArgumentError,
    NotFiredError,
    RuleError,
    UnknownOpError,
    UnusedOverrideWarning,
)
from tests.torch.common import override
from tests.torch.placed import Block, X, gradients, refused
from tests.torch.test_places import acts, at, check, make, seven

TWICE = {key: rg.rules.optional(seven) for key in (at("layers.1", "Relu"), at("*.1", "Relu"))}
KEYS = [
    ({at("layer.0", "Relu"): seven}, ArgumentError, "names no module.*'layers.0'"),
    ({at("act", "Relu"): seven}, ArgumentError, "Did you mean 'layers.0.act'"),
    ({at(nn.Conv2d, "Relu"): seven}, ArgumentError, "no module of the model is of that class"),
    ({at(nn.ReLU(), "Relu"): seven}, ArgumentError, "no module of the model"),
    ({at("layers.0", "Relux"): seven}, UnknownOpError, "Relux"),
    ({at("layers.0", ("Relu", F.relu)): seven}, ArgumentError, "two keys of the map mean"),
    ({at(lambda x: True, "Relu"): seven}, ArgumentError, "one parameter, `site`"),
    ({at("layers.0"): seven}, RuleError, "says nothing of the parameter 'first.weight'"),
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
