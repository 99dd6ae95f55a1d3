"""Compiled functions see the order of dicts, as plain functions do; loops match dicts by key."""

import dataclasses
import functools
import inspect
import re
from collections import OrderedDict, defaultdict

import jax
import optree
import pytest

import regrad as rg
from tests.helpers.rows import refused

A, B = {"a": rg.tensor(2.0), "b": rg.tensor(3.0)}, {"b": rg.tensor(3.0), "a": rg.tensor(2.0)}


ONE = rg.tensor(1.0)


def horner(d):
    """By hand: 3 (2 + 1) + 1 = 10 for A, 2 (3 + 1) + 1 = 9 for B; by a and b: (3, 3) and (4, 2)."""
    y = ONE
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


class Options(dict):
    def __hash__(self):
        return hash(frozenset(self.items()))


def hidden(**given):
    return horner(given)


hidden.__signature__ = inspect.signature(lambda a, b: 0)
# What is compiled, and how it is called with a dict.
ORDERED = {
    "dict": (horner, lambda f, d: f(d)), "OrderedDict": (horner, lambda f, d: f(OrderedDict(d))),
    "defaultdict": (horner, lambda f, d: f(defaultdict(float, d))),
    "in a list": (lambda x: horner(x[0]["x"]), lambda f, d: f([{"x": d}])),
    "in a dict": (lambda x: horner(x["x"][1]), lambda f, d: f({"x": (1.0, d), "w": 0.0})),
    "optree's": (lambda x: horner(x.parts), lambda f, d: f(Box(d))),
    "JAX's": (lambda x: horner(x.parts), lambda f, d: f(Layer(d))),
    "free keywords": (lambda x, *, k=0.0, **rest: horner(rest) * x + k,
                      lambda f, d: f(x=ONE, k=0.5, **d) + 0 * f(**d, k=0.5, x=ONE) - 0.5),
    "a keyword with the name of a parameter": (
        lambda a, /, **b: horner(b), lambda f, d: f(0.0, **d),
    ),
    "a decorator hides it": (hidden, lambda f, d: f(**d)),
    "static": (lambda static: horner({k: ONE * n for k, n in static.items()}),
               lambda f, d: f(Options({k: v.item() for k, v in d.items()}))),
}  # fmt: skip


@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_a_dict_chooses_the_program(name, calls):
    body, call = ORDERED[name]
    f = rg.jit(body, static_argnames="static" if name == "static" else ())
    for d, expected in ((A, 10.0), (B, 9.0)) * 2:
        for _ in range(calls):
            assert call(f, d).item() == expected
    assert f.cache_info().programs == 2


class Model:
    def product(self, x, a, b):
        return x * a - b


@pytest.mark.parametrize(("f", "expected"), [
    (lambda x, a, b: x * a - b, 1.0), (Model().product, 1.0),
    (functools.partial(lambda x, c, a, b: x * a - c * b, c=2.0), -2.0),
])  # fmt: skip
def test_named_keywords_in_any_order_share_a_program(f, expected):
    f, x = rg.jit(f), rg.tensor(2.0)
    for _ in range(3):
        assert f(x, a=A["a"], b=A["b"]).item() == f(x, b=A["b"], a=A["a"]).item() == expected
    assert f.cache_info().programs == 1


@pytest.mark.slow
def test_gradients_results_and_rules_keep_the_order_of_the_call():
    g, sines = rg.jit(rg.grad(horner)), rg.jit(lambda d: sum(rg.sin(v) for v in d.values()))
    same = rg.jit(lambda d: {k: v + 1 for k, v in d.items()})
    first = lambda d: rg.ones(next(iter(d.values())).shape)  # noqa: E731
    assert rg.eval_shape(first, {"b": rg.ones(2), "a": ONE}).shape == (2,)
    for d, by_a, by_b in ((A, 3.0, 3.0), (B, 4.0, 2.0)) * 3:
        dd = g(d)
        assert (dd["a"].item(), dd["b"].item()) == (by_a, by_b)
        assert list(dd) == list(same(d)) == list(d) and same(d)["a"].item() == 3.0
        with rg.gradient_override_map({rg.at(what="Sin", nth=0): lambda dy: 100.0 * dy}):
            dd = rg.grad(sines)(d)
        assert [k for k in dd if dd[k].item() == 100.0] == [next(iter(d))]


def turned(c):
    return {"b": c["b"] * 2.0, "a": c["a"] + c["b"]}


@pytest.mark.parametrize("made", [lambda f: f, rg.jit])
def test_loops_branches_axes_and_states_are_matched_by_key(made):
    loops = [lambda c: rg.scan(lambda c, _: (turned(c), None), c, None, length=3)[0],
             lambda c: rg.fori_loop(0, 3, lambda i, c: turned(c), c),
             lambda c: rg.while_loop(lambda c: c["b"] < 20.0, turned, c)]  # fmt: skip
    either = made(lambda p, d: rg.cond(p, lambda: {"a": d["a"], "b": d["b"]}, lambda: turned(d)))
    cases = [(made(loop), d, (23.0, 24.0)) for loop in loops for d in (A, B)]  # a: 2 + 3 + 6 + 12
    cases += [(functools.partial(either, rg.tensor(True)), A, (2.0, 3.0))]
    cases += [(functools.partial(either, rg.tensor(False)), A, (5.0, 6.0))]
    for f, d, expected in cases:
        last = f(d)
        assert (last["a"].item(), last["b"].item()) == expected
    stacked = {"a": rg.tensor([1.0, 2.0]), "b": rg.tensor(3.0)}
    batched = rg.vmap(lambda d: d["a"] * d["b"], in_axes=({"b": None, "a": 0},))
    assert made(batched)(stacked).tolist() == [3.0, 6.0]
    pull = rg.vjp(made(lambda d: {"p": d["a"] * 2.0, "q": d["b"] * 3.0}), A)[1]
    (dd,) = pull({"q": rg.tensor(10.0), "p": rg.tensor(1.0)})
    assert (dd["a"].item(), dd["b"].item()) == (2.0, 30.0)


def test_verification_compares_the_order_of_results():
    calls = iter(range(9))
    f = rg.jit(lambda d: Box(dict(d)), verify=True)
    assert [list(f(d).parts) for d in (A, B, A, B)] == [list(A), list(B)] * 2
    g = rg.jit(lambda d: Box({k: d[k] for k in ("ab" if next(calls) < 1 else "ba")}), verify=True)
    g(A)
    with pytest.raises(rg.errors.StaleError, match="differs from its program"):
        g(A)


@pytest.mark.slow
def test_an_export_keeps_the_order_of_its_example():
    for example, other, expected in ((A, B, 10.0), (B, A, 9.0)):
        program = rg.export(lambda x, params: horner(params[0]) * x, 1.0, [example])
        program = type(program).deserialize(program.serialize())
        assert program(1.0, [example]).item() == expected
        order = f"params in the order of the example, {[*example]}, got {[*other]}"
        call = lambda program=program, other=other: program(1.0, [other])  # noqa: E731
        refused(call, rg.errors.ArgumentError, re.escape(f"keys of a dict in {order}"))
    v, w = rg.Variable(2.0, name="v"), rg.Variable(3.0, name="w")
    program = rg.export(lambda d: horner(d) * v + w, B, variables=[w, v])
    assert program({"v": v, "w": w}, B).item() == program({"w": w, "v": v}, B).item() == 21.0
