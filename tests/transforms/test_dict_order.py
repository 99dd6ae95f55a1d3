"""Compiled functions see the order of dicts, as plain functions do; loops match dicts by key."""

import dataclasses
import functools
import inspect
from collections import OrderedDict, defaultdict

import jax
import numpy as np
import optree
import pytest

import regrad as rg

A, B = {"a": rg.tensor(2.0), "b": rg.tensor(3.0)}, {"b": rg.tensor(3.0), "a": rg.tensor(2.0)}


def horner(d):
    """By hand: 3 (2 + 1) + 1 = 10 for A, 2 (3 + 1) + 1 = 9 for B; by a and b: (3, 3) and (4, 2)."""
    y = rg.tensor(1.0)
    for v in d.values():
        y = v * y + 1.0
    return y


class Box:
    def __init__(self, parts):
        self.parts = parts


optree.register_pytree_node(
    Box, lambda b: ((b.parts,), None), lambda _, c: Box(*c), namespace="regrad"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    parts: object


@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize(
    ("opened", "made"),
    [
        (lambda x: x, dict),
        (lambda x: x, OrderedDict),
        (lambda x: x, lambda d: defaultdict(float, d)),
        (lambda x: x[0]["x"], lambda d: [{"x": d}]),
        (lambda x: x["x"][1], lambda d: {"x": (1.0, d), "w": 0.0}),
        (lambda x: x.parts, Box),
        (lambda x: x.parts, Layer),
    ],
)
def test_the_order_of_a_dict_chooses_the_program(opened, made, calls):
    f = rg.jit(lambda x: horner(opened(x)))
    for d, expected in ((A, 10.0), (B, 9.0)) * 2:
        for _ in range(calls):
            assert f(made(d)).item() == expected
    assert f.cache_info().programs == 2


def test_gradients_and_results_keep_the_order_of_the_call():
    g = rg.jit(rg.grad(horner))
    same = rg.jit(lambda d: {k: v + 1 for k, v in d.items()})
    for _ in range(3):
        for d, by_a, by_b in ((A, 3.0, 3.0), (B, 4.0, 2.0)):
            dd = g(d)
            assert (dd["a"].item(), dd["b"].item()) == (by_a, by_b)
            assert list(dd) == list(same(d)) == list(d)
            assert same(d)["a"].item() == 3.0


def test_a_rule_at_a_place_counts_in_the_order_of_the_call():
    f = rg.jit(lambda d: sum(rg.sin(v) for v in d.values()))
    for d in (A, B, A):
        with rg.gradient_override_map({rg.at(what="Sin", nth=0): lambda dy: 100.0 * dy}):
            dd = rg.grad(f)(d)
        assert [k for k in dd if dd[k].item() == 100.0] == [next(iter(d))]


@pytest.mark.parametrize("calls", [1, 4])
def test_free_keywords_keep_their_order_and_named_ones_go_by_the_signature(calls):
    @rg.jit
    def f(x, *, k=0.0, **rest):
        return horner(rest) * x + k

    one = rg.tensor(1.0)
    for _ in range(2):
        for rest, expected in ((A, 10.5), (B, 9.5)):
            for _ in range(calls):
                assert f(x=one, k=0.5, **rest).item() == expected
                assert f(**rest, k=0.5, x=one).item() == expected
    assert f.cache_info().programs == 2


def test_a_keyword_may_have_the_name_of_a_positional_parameter_or_of_the_rest():
    @rg.jit
    def f(a, /, **b):
        return horner(b)

    for _ in range(3):
        assert f(0.0, a=A["a"], b=A["b"]).item() == 10.0
        assert f(0.0, b=A["b"], a=A["a"]).item() == 9.0


def test_a_decorator_may_see_an_order_that_the_signature_hides():
    def by_signature(a, b):
        return horner({"a": a, "b": b})

    def wrapper(**given):
        return horner(given)

    wrapper.__wrapped__ = by_signature
    wrapper.__signature__ = inspect.signature(by_signature)
    f = rg.jit(wrapper)
    assert [f(**A).item(), f(**B).item(), f(**A).item()] == [10.0, 9.0, 10.0]


class Model:
    def product(self, x, a, b):
        return x * a - b


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda x, a, b: x * a - b, 1.0),
        (functools.partial(lambda x, c, a, b: x * a - c * b, c=2.0), -2.0),
        (Model().product, 1.0),
    ],
)
def test_named_keywords_in_any_order_share_a_program(f, expected):
    f, x = rg.jit(f), rg.tensor(2.0)
    for _ in range(3):
        assert f(x, a=A["a"], b=A["b"]).item() == f(x, b=A["b"], a=A["a"]).item() == expected
    assert f.cache_info().programs == 1


class Options(dict):
    def __hash__(self):
        return hash(frozenset(self.items()))


def test_the_order_of_a_static_dict_chooses_the_program():
    f = rg.jit(lambda x, o: horner({k: x * n for k, n in o.items()}), static_argnames="o")
    a, b = Options(a=2.0, b=3.0), Options(b=3.0, a=2.0)
    assert a == b
    assert [f(1.0, o).item() for o in (a, b, a, b)] == [10.0, 9.0, 10.0, 9.0]


def turned(c):
    return {"b": c["b"] * 2.0, "a": c["a"] + c["b"]}


@pytest.mark.parametrize("made", [lambda f: f, rg.jit])
def test_carries_are_matched_by_key(made):
    loops = [
        lambda c: rg.scan(lambda c, _: (turned(c), None), c, None, length=3)[0],
        lambda c: rg.fori_loop(0, 3, lambda i, c: turned(c), c),
        lambda c: rg.while_loop(lambda c: c["b"] < 20.0, turned, c),
    ]
    for loop in loops:
        for d in (A, B):  # a: 2 + 3 + 6 + 12, b: 3 * 8
            last = made(loop)(d)
            assert (last["a"].item(), last["b"].item()) == (23.0, 24.0)


def test_branches_axes_and_states_are_matched_by_key():
    for made in (lambda f: f, rg.jit):
        f = made(lambda p, d: rg.cond(p, lambda: {"a": d["a"], "b": d["b"]}, lambda: turned(d)))
        for p, expected in ((True, (2.0, 3.0)), (False, (5.0, 6.0))):
            y = f(rg.tensor(p), A)
            assert (y["a"].item(), y["b"].item()) == expected
    stacked = {"a": rg.tensor([1.0, 2.0]), "b": rg.tensor(3.0)}
    y = rg.vmap(lambda d: d["a"] * d["b"], in_axes=({"b": None, "a": 0},))(stacked)
    assert y.tolist() == [3.0, 6.0]
    y, pull = rg.vjp(lambda d: {"p": d["a"] * 2.0, "q": d["b"] * 3.0}, A)
    (dd,) = [pull({"q": rg.tensor(10.0), "p": rg.tensor(1.0)})]
    assert [v.item() for v in optree.tree_leaves(dd)] == [2.0, 30.0]


def test_verification_compares_the_order_of_results():
    calls = iter(range(9))
    f = rg.jit(lambda d: Box(dict(d)), verify=True)
    assert [list(f(d).parts) for d in (A, B, A, B)] == [list(A), list(B)] * 2
    g = rg.jit(lambda d: Box({k: d[k] for k in ("ab" if next(calls) < 1 else "ba")}), verify=True)
    g(A)
    with pytest.raises(rg.errors.StaleError, match="than its program"):
        g(A)


def test_an_export_keeps_the_order_of_its_example():
    for example, other, expected in ((A, B, 10.0), (B, A, 9.0)):
        program = rg.export(lambda x, params: horner(params[0]) * x, 1.0, [example])
        program = type(program).deserialize(program.serialize())
        assert program(1.0, [example]).item() == expected
        keys, given = map(list, (example, other))
        with pytest.raises(rg.errors.ArgumentError) as caught:
            program(1.0, [other])
        assert f"keys of a dict in params in the order of the example, {keys}, got {given}" in str(
            caught.value
        )


def test_an_export_takes_variables_by_name_in_any_order():
    v, w = rg.Variable(2.0, name="v"), rg.Variable(3.0, name="w")
    program = rg.export(lambda d: horner(d) * v + w, B, variables=[w, v])
    assert program({"v": v, "w": w}, B).item() == program({"w": w, "v": v}, B).item() == 21.0


def test_the_shape_of_a_result_follows_the_order_of_the_arguments():
    shapes = {"b": np.zeros(2, np.float32), "a": np.zeros(3, np.float32)}
    assert rg.eval_shape(lambda d: rg.ones(next(iter(d.values())).shape), shapes).shape == (2,)
