"""Keys that name places of a PyTorch model: what is refused, and modules that never run."""

import copy
import warnings

import pytest

import regrad as rg
from regrad.errors import (
    ArgumentError,
    NotFiredError,
    PassedOverError,
    RuleError,
    UnknownOpError,
    UnusedOverrideWarning,
)

torch = pytest.importorskip("torch")
from tests.torch.test_places import Block, X, at, check, gradients, make, override, seven  # noqa: E402

nn, F = torch.nn, torch.nn.functional


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ({at("layer.0", "Relu"): seven}, ArgumentError, "names no module.*'layers.0'"),
        ({at("act", "Relu"): seven}, ArgumentError, "Did you mean 'layers.0.act'"),
        ({at(nn.Conv2d, "Relu"): seven}, ArgumentError, "no module of the model is of that class"),
        ({at(nn.ReLU(), "Relu"): seven}, ArgumentError, "no module of the model"),
        ({at("layers.0", "Relux"): seven}, UnknownOpError, "Relux"),
        ({at("layers.0", ("Relu", F.relu)): seven}, ArgumentError, "two keys of the map mean"),
        ({at(lambda x: True, "Relu"): seven}, ArgumentError, "one parameter, `site`"),
        ({at("layers.0"): seven}, RuleError, "says nothing of the parameter 'lin.weight'"),
        ({at(nn.ReLU, nth=9): {"Relu": seven}}, ArgumentError, "there are 3 such modules"),
    ],
)
def test_keys_that_are_refused(rules, error, words):
    with pytest.raises(error, match=words), override(rules, model=make()):
        pass


def test_models_that_are_refused():
    with pytest.raises(ArgumentError, match="model=model"):
        override({at("a", "Relu"): seven})
    with pytest.raises(ArgumentError, match="model expected"):
        override({at("a", "Relu"): seven}, model=3)
    with (
        pytest.raises(ArgumentError, match="nth counts the modules of a model"),
        override({at(nn.ReLU, nth=0): {"Relu": seven}}),
    ):
        pass


def test_two_keys_for_one_module():
    model = make()
    twice = {key: rg.rules.optional(seven) for key in (at("layers.1", "Relu"), at("*.1", "Relu"))}
    with (
        override(twice, model=model),
        pytest.raises(ArgumentError, match="two keys of the map select the same place"),
    ):
        model(X)


KEY = {at("layers.1", "Relu"): rg.rules.optional(seven)}


def test_modules_that_came_later():
    model = make()
    with override(KEY, model=model):
        model.layers[1] = Block()
        with pytest.raises(PassedOverError, match="a Block was put into '' after the scope opened"):
            model(X)
    with override(KEY, model=model):
        model.layers[0], model.layers[1] = model.layers[1], model.layers[0]
        with pytest.raises(PassedOverError, match="was put in the place '0'"):
            model(X)
    with override(KEY, model=model), warnings.catch_warnings():
        model.layers[1].act = nn.ReLU()
        with pytest.raises(PassedOverError, match="a ReLU was put into"):
            model(X)


def test_copies():
    model = make()
    for other in (copy.deepcopy(model), copy.deepcopy(model.layers[1])):
        refused = pytest.raises(PassedOverError, match="a copy, which no key names")
        with override(KEY, model=model), refused:
            other(X)
    params, buffers = torch.func.stack_module_state([make(), make()])
    base = copy.deepcopy(model).to("meta")
    with override(KEY, model=model):
        with pytest.raises(PassedOverError, match="a copy, which no key names"):
            torch.func.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (X,)))(
                params, buffers
            )
        nn.Linear(4, 4)(X)  # one of somebody's, with the sizes of another
        nn.ReLU()(X)


class Unused(nn.Module):
    """It calls `forward` of one module, uses the weight of another, and never runs a third."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), nn.Linear(4, 4), Block()
        self.dead = nn.Sequential(nn.ReLU(), nn.ReLU())

    def forward(self, x):
        return self.c(F.linear(self.a.forward(x), self.b.weight))


@pytest.mark.parametrize(
    ("key", "named"),
    [
        (at(("a", "c"), "Relu"), "'a', which never ran"),
        (at(("b", "c"), "Relu"), "'b', which never ran"),
        (at(Block, "Relu"), "'a', which never ran"),
        (at("**", "Relu"), None),
        (at(("c.**", "dead.**"), "Relu"), "'dead', which never ran"),
        (at(("c", "dead.1"), "Relu"), None),
    ],
)
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
    x = torch.randn(1, 3, 4)
    told = pytest.warns(UnusedOverrideWarning, match=r"'self_attn\.out_proj', which never ran")
    with told, override({at(nn.Linear, "MatMul"): "MatMul"}, model=model):
        model(x).sum().backward()


def test_nothing_is_left_behind(tmp_path):
    model = make()
    before, call = {n: dict(vars(m)) for n, m in model.named_modules()}, vars(nn.Module).copy()
    with override(KEY, model=model):
        gradients(model)
        torch.save(copy.deepcopy(model).state_dict(), tmp_path / "m.pt")
        assert {n: dict(vars(m)) for n, m in model.named_modules()} == before
    assert vars(nn.Module) == call


def test_wrappers_are_no_steps():
    class Wrapped(nn.parallel.DataParallel):
        def forward(self, x):
            return self.module(x)

    for model in (Wrapped(make()), torch.compile(make(), backend="eager")):
        with override({at("layers.0", "Relu"): seven}, model=model):
            found = gradients(model)
        check(found, ["layers.0.act"])
