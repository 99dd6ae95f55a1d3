"""Gradients of functions of containers: an answer in the arguments' structure, or a RuleError."""

import gc
import re
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.errors import RuleError
from regrad.v1.graph.tensors import face
from tests.helpers.rows import plain, refusals, refused

Pair = namedtuple("Pair", ["first", "second"])
Other = namedtuple("Other", ["second", "first"])

# -- random arguments, as trees of which the leaves are the numbers of inputs ----------------------

mapped = partial(optree.tree_map, none_is_leaf=True)


def numbered(f, tree):
    """A tree with f of each number, and other leaves as they are."""
    return mapped(lambda leaf: f(leaf) if type(leaf) is int else leaf, tree)


def leaves(tree):
    return [x for x in optree.tree_leaves(tree, none_is_leaf=True) if type(x) is int]


def parts_of(tree):
    if isinstance(tree, dict):
        return tree
    return dict(enumerate(tree)) if isinstance(tree, list | tuple) else {}


def rebuilt(tree, parts, kind=None):
    """A container of the same kind, or of another, with these parts."""
    if isinstance(tree, Pair):
        return Pair(*parts.values())
    return (kind or type(tree))(parts if isinstance(tree, dict) else parts.values())


class Trees:
    """Random trees: integers count the tensors, anything else is a constant."""

    def __init__(self, seed, constants=(None, "relu", 2.5)):
        self.rng = np.random.default_rng(seed)
        self.count = 0
        self.constants = constants

    def leaf(self):
        if self.rng.random() < 0.2:
            return self.constants[self.rng.integers(3)]
        self.count += 1
        return self.count - 1

    def tree(self, depth=2):
        kind = self.rng.integers(7) if depth else 0
        if kind <= 1:
            return self.leaf()
        if kind == 2:
            return Pair(self.tree(depth - 1), self.tree(depth - 1))
        parts = [self.tree(depth - 1) for _ in range(self.rng.integers(1, 4))]
        if kind <= 4:
            return (list, tuple)[kind - 3](parts)
        keys = self.rng.permutation(["w", "b", "z"])[: len(parts)].tolist()
        return (dict, OrderedDict)[kind - 5](zip(keys, parts, strict=True))

    def arguments(self):
        args = [self.tree() for _ in range(self.rng.integers(1, 4))]
        return args if self.count else self.arguments()

    def permuted(self, tree):
        """The same tree with its dicts in another order, and lists for tuples."""
        parts, pick = parts_of(tree), self.rng.integers(2)
        if not parts:
            return tree
        keys = self.rng.permutation([*parts]).tolist() if isinstance(tree, dict) else parts
        kinds = (dict, OrderedDict) if isinstance(tree, dict) else (list, tuple)
        return rebuilt(tree, {k: self.permuted(parts[k]) for k in keys}, kinds[pick])

    def thinned(self, tree):
        """The tree with None for some parts."""
        if self.rng.random() < 0.3:
            return None
        parts = {k: self.thinned(part) for k, part in parts_of(tree).items()}
        return rebuilt(tree, parts) if parts else tree

    def broken(self, tree):
        """The tree with one mistake somewhere."""
        parts = parts_of(tree)
        inner = [k for k, part in parts.items() if leaves(part)]
        if inner and self.rng.random() < 0.6:
            key = inner[self.rng.integers(len(inner))]
            return rebuilt(tree, {**parts, key: self.broken(parts[key])})
        faults = [f for f in FAULTS if (new := f(tree)) is not tree and new != tree]
        return faults[self.rng.integers(len(faults))](tree)


def on(*kinds, but=()):
    """A fault of containers of these kinds; others are left as they are."""
    fits = lambda tree: isinstance(tree, kinds) and not isinstance(tree, but)  # noqa: E731
    return lambda change: lambda tree: change(tree) if fits(tree) else tree


sequences = on(list, tuple, but=Pair)
FAULTS = [
    lambda tree: [tree, tree], lambda tree: {"w": tree},
    on(object, but=Pair)(lambda tree: Pair(tree, None)), on(Pair)(lambda tree: Other(*tree)),
    on(Pair)(list), on(int, but=bool)(lambda tree: [[tree]]), sequences(lambda tree: [*tree, 0]),
    sequences(lambda tree: [0, *tree]),
    sequences(lambda tree: list(tree)[:-1] if len(tree) > 1 else tree),
    sequences(lambda tree: dict(enumerate(tree))), on(dict)(lambda tree: {**tree, "other": 0}),
    on(dict)(lambda tree: {f"{k}_": t for k, t in tree.items()}),
    on(dict)(lambda tree: dict([*tree.items()][1:]) if len(tree) > 1 else {"v": 0}),
    on(dict)(lambda tree: [*tree.values()]),
]  # fmt: skip

# -- modes: the gradients of the sum of all inputs, by an answer -----------------------------------

DY = np.array([1.0, 10.0], np.float32)


def called(custom, form, given, xs):
    """A function of `params, x, rest`, called with tensors in the places of their numbers.

    Its gradient function answers with `(i + 2) * dy` for the number i, or with a function of dy.
    """

    def answer(dy):
        tree = numbered(lambda i: (i + 2) * dy, given)
        return mapped(lambda leaf: leaf(dy) if callable(leaf) else leaf, tree)

    def f(params, x=None, rest=None):
        tensors = [t for t in optree.tree_leaves([params, x, rest]) if hasattr(t, "shape")]
        return sum(tensors[1:], tensors[0] * 1.0), answer

    return custom(f)(*[numbered(lambda i: xs[i], arg) for arg in form])


def eager(form, given, count, way=lambda f: f):
    f = lambda *xs: called(rg.custom_grad, form, given, xs)  # noqa: E731
    gradients = way(lambda *xs: rg.grads(f)(list(xs), rg.tensor(DY)))
    return [dx.numpy() for dx in gradients(*[rg.tensor(DY)] * count)]


def jit(form, given, count):
    return eager(form, given, count, rg.jit)


def graph(form, given, count):
    with tf.Graph().as_default(), tf.Session() as session:
        xs = [tf.constant(DY) for _ in range(count)]
        y = face(called(rg.custom_grad, form, given, [x._read() for x in xs]))
        grads = tf.gradients(y, xs, tf.constant(DY))
        return [0 * DY if dx is None else session.run(dx) for dx in grads]


def with_torch(form, given, count):
    xs = [torch.tensor(DY, requires_grad=True) for _ in range(count)]
    y = called(regrad.torch.custom_grad, form, given, xs)
    grads = torch.autograd.grad(y, xs, torch.tensor(DY), allow_unused=True)
    return [0 * DY if dx is None else dx.numpy() for dx in grads]


def with_jax(form, given, count):
    f = lambda *xs: called(rg.jax.custom_grad, form, given, xs)  # noqa: E731
    return [np.asarray(dx) for dx in jax.vjp(f, *[jnp.asarray(DY)] * count)[1](jnp.asarray(DY))]


SEEDS = {eager: 60, with_torch: 40, graph: 25, with_jax: 15, jit: 6}
modes = pytest.mark.parametrize("mode", SEEDS, ids=lambda mode: mode.__name__)
cases = pytest.mark.parametrize(
    ("mode", "seed"),
    [(mode, seed) for mode, n in SEEDS.items() for seed in range(n)],
    ids=lambda v: v.__name__ if callable(v) else str(v),
)


def answer_to(form):
    """The right answer: one entry per argument with tensors, None for what is no tensor."""
    return [mapped(lambda i: i if type(i) is int else None, arg) for arg in form if leaves(arg)]


@cases
def test_right_answers_are_delivered(mode, seed):
    trees = Trees(seed)
    form = trees.arguments()
    answer = answer_to(form)
    answers = [answer, trees.permuted(answer), list(map(trees.thinned, answer))]
    if len(answer) == 1:
        answers.append(trees.permuted(answer[0]))
    for given in answers:
        present = leaves(given)
        expected = [(i + 2) * DY * (i in present) for i in range(trees.count)]
        np.testing.assert_array_equal(mode(form, given, trees.count), expected)


@cases
def test_wrong_answers_are_refused(mode, seed):
    trees = Trees(seed, (None, "relu", True))  # (for a number any gradient is right)
    form = trees.arguments()
    answer = answer_to(form)
    for _ in range(1 if mode is jit else 4):
        given = list(map(trees.broken, answer[:1])) + answer[1:]
        if trees.rng.random() < 0.3:
            given = [*answer, answer[0]] if trees.rng.random() < 0.5 else answer[1:]
        words = r"wrong structure of gradients.*expected gradients by"
        refused(lambda given=given: mode(form, given, trees.count), RuleError, words)


# -- messages --------------------------------------------------------------------------------------

BY = "expected gradients by "
MESSAGES = [
    ([{"w": 0, "b": 1}], [0, 1], "returned [LEAF, LEAF], expected gradients by {'b': params['b'], "
     "'w': params['w']}"),
    ([{"w": 0}, 1], {"params": {"w": 0}, "x": 1}, BY + "[{'w': params['w']}, x]."),
    ([{"w": 0}, 1], [1, {"w": 0}], BY + "[{'w': params['w']}, x]."),
    ([0, 1], 0, BY + "[params, x]."), ([0, 1], None, BY + "[params, x]."),
    ([0, "constant", 1], [0, 1, 1], BY + "[params, rest]."),
    ([Pair(0, [1])], [0, [1]], BY + "Pair(first=params.first, second=[params.second[0]])."),
    ([[0, 1]], [[0, 1], 1], BY + "[params[0], params[1]]."),
    ([{"w": 0, "n": "n"}], {"w": 0, "n": 1}, BY + "{'n': None, 'w': params['w']}."),
    ([{"w": 0, "b": 1}, 2], [{"w": 0, "b": lambda dy: dy.sum()}, 2],
     """input "params['b']",LEAF()LEAF(2,)"""),
]  # fmt: skip


@modes
@pytest.mark.parametrize(("form", "given", "words"), MESSAGES)
def test_messages_show_both_structures_or_the_name(mode, form, given, words):
    words = re.escape(words).replace("LEAF", ".*")
    refused(lambda: mode(form, given, len(leaves(form))), RuleError, words)


X = rg.tensor([1.0, 2.0])


def by_two(f):
    return lambda: rg.grads(rg.custom_grad(f))([X, X])


def with_a_number():
    answer = lambda dy: [dy, rg.astype(dy, "float64")]  # noqa: E731
    f = rg.custom_grad(lambda n, a, b: (a * b, answer))
    return rg.grads(lambda a, b: f(3, a, b))([X, X])


def of_tensorflow():
    f = tf.custom_gradient(lambda a, b: (a * b, lambda dy: (dy, tf.reduce_sum(dy))))
    with tf.Graph().as_default():
        xs = [tf.constant(DY), tf.constant(DY)]
        tf.gradients(f(*xs), xs)


NAMES = [
    (by_two(lambda a, b: (a * b, lambda dy: [dy, dy.sum()])), "input 'b', "),
    (by_two(lambda *all: (all[0] * all[1], lambda dy: [dy, 3])), r"input 'all\[1\]', "),
    (with_a_number, "input 'b', returned the dtype float64"),
    (of_tensorflow, "input 'b', returned the shape"),
]
test_names_of_inputs = refusals(NAMES, RuleError)


# -- containers of other kinds ---------------------------------------------------------------------


class Layer:
    def __init__(self, w, b):
        assert all(isinstance(t, rg.Tensor) for t in (w, b)), "no stand-ins are put in here"
        self.w, self.b = w, b


class Twin(Layer):
    pass


for kind in (Layer, Twin):
    optree.register_pytree_node(
        kind, lambda m: ((m.w, m.b), None, ("w", "b")), lambda _, t, kind=kind: kind(*t),
        namespace=optree.registry.__GLOBAL_NAMESPACE,
    )  # fmt: skip


def test_registered_classes_are_matched_by_type():
    def gradients(kind):
        f = rg.custom_grad(lambda m: (m.w * m.b, lambda dy: kind(dy * 2, dy * 3)))
        return rg.grads(lambda w, b: f(Layer(w, b)))([X, X])

    assert plain(gradients(Layer)) == [[2.0, 2.0], [3.0, 3.0]]
    words = r"returned Twin.*expected gradients by Layer\(w=m.w, b=m.b\)"
    refused(lambda: gradients(Twin), RuleError, words)


@pytest.mark.parametrize("make", [dict, OrderedDict, lambda p: defaultdict(list, p)])
def test_kinds_of_dicts_are_alike(make):
    f = rg.custom_grad(lambda p: (p["w"] * p["b"], lambda dy: make([("b", dy * 3), ("w", dy * 2)])))
    dp = rg.grad(lambda p: f(p))({"w": X, "b": X})
    assert plain(dp) == {"w": [2.0, 2.0], "b": [3.0, 3.0]}


@pytest.mark.parametrize("answer", [[], None])
def test_an_empty_container_has_an_empty_gradient(answer):
    f = rg.custom_grad(lambda p: (p["x"] * 1, lambda dy: {"x": dy * 7, "layers": answer}))
    assert rg.grad(lambda x: f({"x": x, "layers": []}))(X).tolist() == [7.0, 7.0]


def test_the_record_holds_no_tensor_of_the_arguments():
    alive = []

    def f(p):
        alive.append(weakref.ref(p["constant"]))
        return p["x"] * 2, lambda dy: {"x": dy * 2, "constant": None}

    def g(x):
        y = rg.custom_grad(f)({"x": x, "constant": rg.tensor([1.0] * 100)})
        gc.collect()
        assert alive[0]() is None
        return y

    rg.grad(g)(X)
