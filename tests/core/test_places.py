"""Where a rule holds: keys that name places, the chains that they fit, and which of them wins."""

import pytest

import regrad as rg
from regrad.core import places
from regrad.core.places import ChainStep, Counts, Places, Site, at, matches, pick, site_of, spread
from regrad.errors import ArgumentError
from tests.helpers.rows import refusals


class Module:
    """A module of some library."""


Dense, Conv = (type(name, (Module,), {}) for name in ("Dense", "Conv"))
NET, ENCODER, FIRST, SECOND, HEAD = Module(), Module(), Dense(), Dense(), Conv()
STEPS = ROOT, ENC, ZERO, ONE, END = [
    ChainStep(("",), NET), ChainStep(("encoder",), ENCODER),
    ChainStep(("encoder.layers.0", "tied"), FIRST),
    ChainStep(("encoder.layers.1",), SECOND), ChainStep(("head",), HEAD),
]  # fmt: skip
INNER = [ROOT, ENC, ZERO]
relu = lambda where=None, nth=None: at(where, "Relu", nth)  # noqa: E731
PATTERNS = {
    "": [""], "a": ["a"], "*": ["a", "b"],
    "**": ["", "a", "b", "a.b", "a.c.b", "a.l10.act", "a.l3.act"],
    "a.**": ["a", "a.b", "a.c.b", "a.l10.act", "a.l3.act"], "**.b": ["b", "a.b", "a.c.b"],
    "a.*.b": ["a.c.b"], "a/c/b": ["a.c.b"], "a.l*.act": ["a.l10.act", "a.l3.act"],
    "a.l[2-4].act": ["a.l3.act"], "a.l?.act": ["a.l3.act"], "A": [], "a+": [],
}  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern):
    for slashes in (False, True):  # scopes of other libraries have slashes
        steps = {p: ChainStep((p.replace(".", "/") if slashes else p,)) for p in PATTERNS["**"]}
        assert [path for path, step in steps.items() if matches(pattern, step)] == PATTERNS[pattern]


def test_keys_are_values():
    assert at("a", "Relu") == at("a", "Relu", None) and len({at("a"), at("a"), at("b")}) == 2
    assert repr(at("a.*", ("Relu", "Tanh"), 0)) == "rg.at('a.*', ('Relu', 'Tanh'), nth=0)"
    assert repr(at(what="Relu", nth=1)) == "rg.at(None, 'Relu', nth=1)"
    assert repr(at((Dense, FIRST))) == "rg.at((Dense, <a Dense>))"
    assert eval(repr(at("a", nth=-1)), {"rg": rg}) == at("a", nth=-1)


def test_maps_in_maps():
    found = spread({"Tanh": 0, at("a"): {"Relu": 1, at(Dense): {"Sum": 2, at("b", nth=0): 3}}})
    inner, last = at(Dense, "Sum").inside(at("a")), at("b", nth=0).inside(at(Dense).inside(at("a")))
    assert found == {"Tanh": 0, at("a", "Relu"): 1, inner: 2, last: 3}
    assert repr(inner) == "rg.at('a') > rg.at(Dense, 'Sum')"
    assert spread({at(what="Relu"): 1}) == {"Relu": 1}
    assert spread({at("a", nth=0): {"Relu": 1}}) == {at(what="Relu").inside(at("a", nth=0)): 1}


def keys_at(chain, *keys):
    return [fit.key for fit in Places(keys, STEPS).fits(chain)]


def always(site):
    return True


BY_RANK = [relu(FIRST), relu("encoder.layers.0"), relu(Dense), relu(always), relu(nth=0)]
LAYERS = [relu("encoder.layers.*"), relu("**.0")]
INSIDE = relu(Dense).inside(at("encoder"))
SECOND_DENSE = at(what="Relu").inside(at(Dense, nth=1))
# The keys of a map that fit a chain, by rank.
FITS = {
    "while a module runs": ([relu("encoder")], INNER, [0]),
    "in the module itself": ([relu("encoder")], [ROOT, ENC], [0]),
    "not elsewhere": ([relu("encoder")], [ROOT, END], []),
    "not outside": ([relu("encoder")], [], []), "a whole call": ([at("encoder")], [ROOT, ENC], [0]),
    "not what it calls": ([at("encoder")], INNER, []),
    "two names, one": ([relu("tied")], [ROOT, ZERO], [0]),
    "two names, the other": ([relu("encoder.layers.0")], [ROOT, ZERO], [0]),
    "ranks": (BY_RANK[::-1], INNER, [4, 3, 2, 1, 0]),
    "the rank, not the depth": ([relu("encoder.layers.0"), relu(ENCODER)], INNER, [1, 0]),
    "the innermost of a rank": ([relu("encoder"), relu("**.0"), relu("")], INNER, [1, 0, 2]),
    "one of two patterns": (LAYERS, [ROOT, ENC, ONE], [0]),
    "a place in a place": ([INSIDE], INNER, [0]),
    "without the outer one": ([INSIDE], [ROOT, ZERO], []),
    "without the inner one": ([INSIDE], [ROOT, ENC], []),
    "in the nth module": ([SECOND_DENSE], [ROOT, ENC, ONE], [0]),
    "not in another": ([SECOND_DENSE], INNER, []),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "chain", "order"), FITS.values(), ids=FITS)
def test_keys_that_fit(keys, chain, order):
    assert keys_at(chain, *keys) == [keys[i] for i in order]


def test_ranks_have_names():
    fits = Places(BY_RANK, STEPS).fits(INNER)
    ranks = "INSTANCE", "PATH", "CLASS", "PREDICATE", "EVERYWHERE"
    assert [fit.order[0] for fit in fits] == [getattr(places, rank) for rank in ranks]
    key = relu((Dense, "head", HEAD))  # a tuple ranks by its best entry
    assert Places([key], STEPS).fits([ROOT, END])[0].order == (places.INSTANCE, 0)
    assert Places([key], STEPS).fits([ROOT, ONE])[0].order == (places.CLASS, 0)
    step = ChainStep(
        ("always",), keys_at
    )  # a function without a parameter `site` is not a predicate
    assert Places([relu(keys_at)]).fits([step])[0].order[0] == places.INSTANCE


NTH = [(at(Dense, nth=0), ZERO), (at(Dense, nth=-1), ONE), (at("*", nth=2), END)]


@pytest.mark.parametrize(("key", "step"), NTH)
def test_nth_of_modules_is_by_the_order_of_the_model(key, step):
    assert [s.path for s in STEPS if keys_at([ROOT, s], key)] == [step.path]


def test_nth_of_the_modules_inside_of_a_place():
    inside = at(what=Module, nth=1, where="encoder.**").of_modules()
    assert inside == at(Module, nth=1).inside(at("encoder.**"))
    assert [s.path for s in STEPS if keys_at([ROOT, ENC, s], inside)] == [ZERO.path]


def calls(keys, *chains):
    """The keys, by number, that have calls, one for each chain, with their counts."""
    selected, counts, found = Places(keys, STEPS), Counts(), []
    for chain in chains:
        fits = selected.fits(chain)
        fit, n = pick(fits, counts, lambda n, c=chain: site_of(c, "Relu", n, [], "f.py:3"))
        found.append(fit and (keys.index(fit.key), n))
    return found


EITHER = [relu("encoder", 0), relu("**.encoder", 1)]
# The keys that have these calls of Relu.
CALLS = {
    "those that a key fits are counted": ([relu("encoder"), relu("encoder", 1)],
         [[ROOT, END], [ROOT, ENC], INNER, [ROOT, ENC]], [None, (0, 0), (1, 1), (0, 2)]),
    "those of another key too": ([relu(HEAD), relu(nth=1)], [[ROOT, END], [ROOT, ENC], [ROOT, ENC]],
                                 [(0, 0), (1, 1), None]),
    "each of two": (EITHER, [[ROOT, ENC], [ROOT, ENC]], [(0, 0), (1, 1)]),
    "in a predicate": ([at("head", "Relu").inside(at(lambda site: site.nth == 1))],
                       [[ROOT, END], [ROOT, END], [ROOT, ENC]], [None, (0, 0), None]),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "chains", "expected"), CALLS.values(), ids=CALLS)
def test_nth_counts_calls(keys, chains, expected):
    assert calls(keys, *chains) == expected


def test_predicates_see_the_site():
    seen = []
    key = relu(lambda site: (seen.append(site), site.path == "head")[1])
    assert calls([key], [ROOT, ENC], [ROOT, END]) == [None, (0, 0)]
    assert seen[1] == Site("head", "Relu", 1, (), (), HEAD, Conv, "f.py", 3)


TWO = "two keys of the map select the same place 'encoder'"
ERRORS = [
    (lambda: at(), "names no place and no op"),
    (lambda: at("a", "Relu", 1.0), "nth expected an int such as 0, got float"),
    (lambda: at("a", "Relu", True), "nth expected an int"),
    (lambda: at(["a"], "Relu"), "several in a tuple"),
    (lambda: spread({at("a", "Relu", -1): 1}), "nth counts calls from 0"),
    (lambda: spread({"Relu": {"Tanh": "r"}}), "A map is for a place"),
    (lambda: spread({at("a", "Relu"): {"Tanh": "r"}}), "A map is for a place"),
    (lambda: spread({at("a", "Relu"): 1, at("a"): {"Relu": 2}}), "two keys of the map mean"),
    (lambda: Places([at("encodr", "Relu")], STEPS), "no module of the model. Did you mean 'encode"),
    (lambda: Places([at("layers.0", "Relu")], STEPS), "Did you mean 'encoder.layers.0'"),
    (lambda: Places([at(int, "Relu")], STEPS), "no module of the model is of that class"),
    (lambda: Places([at(Conv(), "Relu")], STEPS), "at.<a Conv>.: no module of the model"),
    (lambda: Places([at(Dense, nth=2)], STEPS), "there are 2 such modules"),
    (lambda: Places([relu(Conv).inside(at("encoder"))], STEPS), "names no module of the model"),
    (lambda: Places([at(Dense, nth=0)]), "model="),
    (lambda: keys_at(INNER, *LAYERS), "neither is more specific"),
    (lambda: calls([EITHER[0], relu("**.encoder", 0)], [ROOT, ENC]), TWO),
    (lambda: calls([relu(always), relu(lambda site: True)], [ROOT]), "two keys"),
]
test_keys_that_make_no_sense = refusals(ERRORS, ArgumentError)
