"""Where a rule holds: keys that name places, the chains that they fit, and which of them wins."""

import pytest

from regrad.core.places import (
    CLASS,
    EVERYWHERE,
    INSTANCE,
    PATH,
    PREDICATE,
    Counts,
    Places,
    Site,
    Step,
    at,
    matches,
    pick,
    site_of,
    spread,
)
from regrad.errors import ArgumentError


class Module:
    """A module of some library."""


class Dense(Module):
    pass


class Conv(Module):
    pass


NET, ENCODER, FIRST, SECOND, HEAD = Module(), Module(), Dense(), Dense(), Conv()
STEPS = [
    Step(("",), NET),
    Step(("encoder",), ENCODER),
    Step(("encoder.layers.0", "tied"), FIRST),
    Step(("encoder.layers.1",), SECOND),
    Step(("head",), HEAD),
]
ROOT, ENC, ZERO, ONE, END = STEPS


def always(site):
    return True


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("", [""]),
        ("a", ["a"]),
        ("*", ["a", "b"]),
        ("**", ["", "a", "b", "a.b", "a.c.b", "a.l10.act", "a.l3.act"]),
        ("a.**", ["a", "a.b", "a.c.b", "a.l10.act", "a.l3.act"]),
        ("**.b", ["b", "a.b", "a.c.b"]),
        ("a.*.b", ["a.c.b"]),
        ("a/c/b", ["a.c.b"]),
        ("a.l*.act", ["a.l10.act", "a.l3.act"]),
        ("a.l[2-4].act", ["a.l3.act"]),
        ("a.l?.act", ["a.l3.act"]),
        ("A", []),
        ("a+", []),
    ],
)
def test_patterns(pattern, paths):
    known = ["", "a", "b", "a.b", "a.c.b", "a.l10.act", "a.l3.act"]
    assert [path for path in known if matches(pattern, Step((path,)))] == paths


def test_scopes_of_other_libraries_have_slashes():
    assert matches("Net.first", Step(("Net/first",)))


def test_keys_are_values():
    assert at("a", "Relu") == at("a", "Relu", None) and len({at("a"), at("a"), at("b")}) == 2
    assert repr(at("a.*", ("Relu", "Tanh"), 0)) == "rg.at('a.*', ('Relu', 'Tanh'), nth=0)"
    assert repr(at(what="Relu", nth=1)) == "rg.at(None, 'Relu', nth=1)"
    assert repr(at((Dense, FIRST))) == "rg.at((Dense, <a Dense>))"
    assert eval(repr(at("a", nth=-1)), {"rg": __import__("regrad")}) == at("a", nth=-1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: at(), "names no place and no op"),
        (lambda: at("a", "Relu", 1.0), "nth expected an int such as 0, got float"),
        (lambda: spread({at("a", "Relu", -1): 1}), "nth counts calls from 0"),
        (lambda: at("a", "Relu", True), "nth expected an int"),
        (lambda: at(["a"], "Relu"), "several in a tuple"),
        (lambda: spread({"Relu": {"Tanh": "r"}}), "A map is for a place"),
        (lambda: spread({at("a", "Relu"): {"Tanh": "r"}}), "A map is for a place"),
        (lambda: spread({at("a", "Relu"): 1, at("a"): {"Relu": 2}}), "two keys of the map mean"),
    ],
)
def test_keys_that_make_no_sense(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_maps_in_maps():
    found = spread({"Tanh": 0, at("a"): {"Relu": 1, at(Dense): {"Sum": 2, at("b", nth=0): 3}}})
    inner = at(Dense, "Sum").inside(at("a"))
    assert found == {"Tanh": 0, at("a", "Relu"): 1, inner: 2, at("b", nth=0).inside(
        at(Dense).inside(at("a"))): 3}  # fmt: skip
    assert repr(inner) == "rg.at('a') > rg.at(Dense, 'Sum')"
    assert spread({at(what="Relu"): 1}) == {"Relu": 1}
    assert spread({at("a", nth=0): {"Relu": 1}}) == {at(what="Relu").inside(at("a", nth=0)): 1}


def keys_at(chain, *keys, steps=STEPS):
    return [fit.key for fit in Places(keys, steps).fits(chain)]


def test_a_key_holds_while_a_module_runs():
    key = at("encoder", "Relu")
    assert keys_at([ROOT, ENC, ZERO], key) == [key] == keys_at([ROOT, ENC], key)
    assert keys_at([ROOT, END], key) == [] == keys_at([], key)


def test_a_whole_call_is_that_of_the_module_itself():
    key = at("encoder")
    assert keys_at([ROOT, ENC], key) == [key]
    assert keys_at([ROOT, ENC, ZERO], key) == []


def test_a_module_under_two_names_has_both():
    assert keys_at([ROOT, ZERO], at("tied", "Relu")) == [at("tied", "Relu")]
    assert keys_at([ROOT, ZERO], at("encoder.layers.0", "Relu")) != []


def test_ranks():
    keys = at(what="Relu", nth=0), at(always, "Relu"), at(Dense, "Relu")
    keys = (*keys, at("encoder.layers.0", "Relu"), at(FIRST, "Relu"))
    fits = Places(keys, STEPS).fits([ROOT, ENC, ZERO])
    assert [fit.order[0] for fit in fits] == [INSTANCE, PATH, CLASS, PREDICATE, EVERYWHERE]
    assert [fit.key for fit in fits] == list(reversed(keys))


def test_the_rank_counts_more_than_the_depth():
    outer, inner = at(ENCODER, "Relu"), at("encoder.layers.0", "Relu")
    assert keys_at([ROOT, ENC, ZERO], inner, outer) == [outer, inner]


def test_the_innermost_of_a_rank_wins():
    keys = at("encoder", "Relu"), at("**.0", "Relu"), at("", "Relu")
    assert keys_at([ROOT, ENC, ZERO], *keys) == [keys[1], keys[0], keys[2]]


def test_two_keys_for_one_module_are_refused():
    with pytest.raises(ArgumentError, match="neither is more specific"):
        keys_at([ROOT, ENC, ZERO], at("encoder.layers.*", "Relu"), at("**.0", "Relu"))
    assert keys_at([ROOT, ENC, ONE], at("encoder.layers.*", "Relu"), at("**.0", "Relu")) == [
        at("encoder.layers.*", "Relu")
    ]


def test_a_tuple_selects_by_any_entry_and_ranks_by_the_best():
    key = at((Dense, "head", HEAD), "Relu")
    assert Places([key], STEPS).fits([ROOT, END])[0].order == (INSTANCE, 0)
    assert Places([key], STEPS).fits([ROOT, ONE])[0].order == (CLASS, 0)


def test_places_in_places():
    key = at(Dense, "Relu").inside(at("encoder"))
    assert keys_at([ROOT, ENC, ZERO], key) == [key]
    assert keys_at([ROOT, ZERO], key) == [] == keys_at([ROOT, ENC], key)


def test_nth_of_modules_is_by_the_order_of_the_model():
    for key, step in [(at(Dense, nth=0), ZERO), (at(Dense, nth=-1), ONE), (at("*", nth=2), END)]:
        assert [s.path for s in STEPS if keys_at([ROOT, s], key)] == [step.path]
    inside = at(what=Module, nth=1, where="encoder.**").of_modules()
    assert inside == at(Module, nth=1).inside(at("encoder.**"))
    assert [s.path for s in STEPS if keys_at([ROOT, ENC, s], inside)] == [ZERO.path]
    key = at(what="Relu").inside(at(Dense, nth=1))
    assert keys_at([ROOT, ENC, ONE], key) == [key] and keys_at([ROOT, ENC, ZERO], key) == []


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (at("encodr", "Relu"), "names no module of the model. Did you mean 'encoder'"),
        (at("layers.0", "Relu"), "Did you mean 'encoder.layers.0'"),
        (at(int, "Relu"), "no module of the model is of that class"),
        (at(Conv(), "Relu"), "at.<a Conv>.: no module of the model"),
        (at(Dense, nth=2), "there are 2 such modules"),
        (at(Conv, "Relu").inside(at("encoder")), "names no module of the model"),
    ],
)
def test_what_is_not_in_the_model(key, words):
    with pytest.raises(ArgumentError, match=words):
        Places([key], STEPS)


def test_nth_of_modules_needs_a_model():
    with pytest.raises(ArgumentError, match="model="):
        Places([at(Dense, nth=0)])


def calls(keys, chains):
    """The rules that calls get, one call for each chain."""
    places, counts, found = Places(keys, STEPS), Counts(), []
    for chain in chains:
        fits = places.fits(chain)
        fit, n = pick(fits, counts, lambda n, c=chain: site_of(c, "Relu", n, [], "f.py:3"))
        found.append(fit and (fit.key, n))
    return found


def test_nth_counts_the_calls_that_a_key_fits():
    rest, second = at("encoder", "Relu"), at("encoder", "Relu", 1)
    found = calls([rest, second], [[ROOT, END], [ROOT, ENC], [ROOT, ENC, ZERO], [ROOT, ENC]])
    assert found == [None, (rest, 0), (second, 1), (rest, 2)]


def test_calls_that_another_key_has_are_counted():
    keys = at(HEAD, "Relu"), at(what="Relu", nth=1)
    assert calls(keys, [[ROOT, END], [ROOT, ENC], [ROOT, ENC]]) == [
        (keys[0], 0),
        (keys[1], 1),
        None,
    ]


def test_two_keys_for_one_call_are_refused():
    keys = at("encoder", "Relu", 0), at("**.encoder", "Relu", 1)
    assert calls(keys, [[ROOT, ENC], [ROOT, ENC]]) == [(keys[0], 0), (keys[1], 1)]
    with pytest.raises(ArgumentError, match="two keys of the map select the same place 'encoder'"):
        calls([keys[0], at("**.encoder", "Relu", 0)], [[ROOT, ENC]])
    with pytest.raises(ArgumentError, match="two keys"):
        calls([at(always, "Relu"), at(lambda site: True, "Relu")], [[ROOT]])


def test_predicates_see_the_site():
    seen = []

    def chosen(site):
        seen.append(site)
        return site.path == "head"

    key = at(chosen, "Relu")
    assert calls([key], [[ROOT, ENC], [ROOT, END]]) == [None, (key, 0)]
    assert seen[1] == Site("head", "Relu", 1, (), (), HEAD, Conv, "f.py", 3)
    assert Places([key], STEPS).fits([ROOT])[0].order[0] == PREDICATE


def test_a_predicate_around_a_place():
    key = at("head", "Relu").inside(at(lambda site: site.nth == 1))
    assert calls([key], [[ROOT, END], [ROOT, END], [ROOT, ENC]]) == [None, (key, 0), None]


def test_what_is_no_predicate():
    def function(x):
        return x

    (fit,) = Places([at(function, "Relu")]).fits([Step(("function",), function)])
    assert fit.order[0] == INSTANCE
