"""Gradients of functions of containers: an answer in the arguments' structure, or a RuleError."""

import re
from collections import OrderedDict, defaultdict, namedtuple

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

Pair = namedtuple("Pair", ["first", "second"])
Other = namedtuple("Other", ["second", "first"])
PARAMETERS = "params", "x", "rest"


# -- random arguments, as trees of which the leaves are the numbers of inputs ----------------------


def mapped(f, tree):
    """A tree with other leaves, by plain Python."""
    if isinstance(tree, Pair | Other):
        return type(tree)(*[mapped(f, t) for t in tree])
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(f, t) for t in tree)
    if isinstance(tree, dict):
        return type(tree)((k, mapped(f, t)) for k, t in tree.items())
    return f(tree)


def leaves(tree):
    found = []
    mapped(found.append, tree)
    return [leaf for leaf in found if type(leaf) is int]


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

    # -- answers -------------------------------------------------------------------------------

    def permuted(self, tree):
        """The same tree with its dicts in another order, and lists for tuples."""
        if isinstance(tree, Pair):
            return Pair(*map(self.permuted, tree))
        if isinstance(tree, list | tuple):
            return (list, tuple)[self.rng.integers(2)](map(self.permuted, tree))
        if isinstance(tree, dict):
            kind = (dict, OrderedDict)[self.rng.integers(2)]
            return kind((k, self.permuted(tree[k])) for k in self.rng.permutation([*tree]).tolist())
        return tree

    def thinned(self, tree):
        """The tree with None for some parts."""
        if self.rng.random() < 0.3:
            return None
        if isinstance(tree, Pair):
            return Pair(*map(self.thinned, tree))
        if isinstance(tree, list | tuple):
            return type(tree)(map(self.thinned, tree))
        if isinstance(tree, dict):
            return type(tree)((k, self.thinned(t)) for k, t in tree.items())
        return tree

    def broken(self, tree):
        """The tree with one mistake somewhere."""
        inner = [k for k, t in parts_of(tree).items() if leaves(t)]
        if inner and self.rng.random() < 0.6:
            key = inner[self.rng.integers(len(inner))]
            return replaced(tree, key, self.broken(parts_of(tree)[key]))
        faults = [f for f in FAULTS if (new := f(tree)) is not tree and new != tree]
        return faults[self.rng.integers(len(faults))](tree)


def parts_of(tree):
    if isinstance(tree, dict):
        return tree
    return dict(enumerate(tree)) if isinstance(tree, list | tuple) else {}


def replaced(tree, key, part):
    if isinstance(tree, dict):
        return type(tree)({**tree, key: part})
    new = [part if i == key else t for i, t in enumerate(tree)]
    return type(tree)(*new) if isinstance(tree, Pair) else type(tree)(new)


def on(*kinds):
    """A fault of containers of these kinds; others are left as they are."""
    return lambda change: lambda tree: change(tree) if isinstance(tree, kinds) else tree


def is_sequence(tree):
    return isinstance(tree, list | tuple) and not isinstance(tree, Pair)


FAULTS = [
    lambda tree: [tree, tree],
    lambda tree: {"w": tree},
    lambda tree: Pair(tree, None) if not isinstance(tree, Pair) else Other(*tree),
    lambda tree: [[tree]] if type(tree) is int else tree,
    lambda tree: [*tree, 0] if is_sequence(tree) else tree,
    lambda tree: [0, *tree] if is_sequence(tree) else tree,
    lambda tree: list(tree)[:-1] if is_sequence(tree) and len(tree) > 1 else tree,
    lambda tree: dict(enumerate(tree)) if is_sequence(tree) else tree,
    lambda tree: list(tree) if isinstance(tree, Pair) else tree,
    on(dict)(lambda tree: {**tree, "other": 0}),
    on(dict)(lambda tree: {f"{k}_": t for k, t in tree.items()}),
    on(dict)(lambda tree: dict([*tree.items()][1:]) if len(tree) > 1 else {"v": 0}),
    on(dict)(lambda tree: [*tree.values()]),
]


# -- modes: the gradients of 1, 2, 4, … times the inputs, by an answer -----------------------------

DY = np.array([1.0, 10.0], np.float32)


def value_of(args, given):
    """The sum of all tensors, and the answer with `(i + 2) * dy` for the number i."""
    tensors = [t for t in optree.tree_leaves(args) if hasattr(t, "shape")]

    def grad_func(dy):
        return mapped(lambda i: (i + 2) * dy if type(i) is int else i, given)

    return sum(tensors[1:], tensors[0] * 1.0), grad_func


def called(custom, form, given, xs):
    """A function of `params, x, rest` called with tensors in the places of their numbers."""
    function = custom(lambda params, x=None, rest=None: value_of([params, x, rest], given))
    return function(*[mapped(lambda i: xs[i] if type(i) is int else i, arg) for arg in form])


def eager(form, given, count):
    xs = [rg.tensor(DY) for _ in range(count)]
    f = lambda *xs: called(rg.custom_grad, form, given, xs)  # noqa: E731
    return [dx.numpy() for dx in rg.grads(f)(xs, rg.tensor(DY))]


def jit(form, given, count):
    f = lambda *xs: called(rg.custom_grad, form, given, xs)  # noqa: E731
    compiled = rg.jit(lambda *xs: rg.grads(f)(list(xs), rg.tensor(DY)))
    return [dx.numpy() for dx in compiled(*[rg.tensor(DY)] * count)]


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


MODES = [eager, graph, jit, with_torch, with_jax]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
SEEDS = {eager: 60, with_torch: 40, graph: 25, with_jax: 15, jit: 6}
cases = pytest.mark.parametrize(
    ("mode", "seed"),
    [(mode, seed) for mode, n in SEEDS.items() for seed in range(n)],
    ids=lambda v: v.__name__ if callable(v) else str(v),
)


def answer_to(form):
    """The right answer: one entry per argument with tensors, None for what is no tensor."""
    return [mapped(lambda i: i if type(i) is int else None, arg) for arg in form if leaves(arg)]


def expected(given, count):
    present = leaves(given)
    return [(i + 2) * DY if i in present else 0 * DY for i in range(count)]


@cases
def test_right_answers_are_delivered(mode, seed):
    trees = Trees(seed)
    form = trees.arguments()
    answer = answer_to(form)
    for given in (answer, trees.permuted(answer), list(map(trees.thinned, answer))):
        got = mode(form, given, trees.count)
        np.testing.assert_array_equal(got, expected(given, trees.count))
    if len(answer) == 1:
        got = mode(form, trees.permuted(answer[0]), trees.count)
        np.testing.assert_array_equal(got, expected(answer, trees.count))


WORDS = r"wrong structure of gradients.*expected gradients by"


@cases
def test_wrong_answers_are_refused(mode, seed):
    trees = Trees(seed, (None, "relu", True))  # (for a number any gradient is right)
    form = trees.arguments()
    answer = answer_to(form)
    for _ in range(1 if mode is jit else 4):
        given = list(map(trees.broken, answer[:1])) + answer[1:]
        if trees.rng.random() < 0.3:
            given = [*answer, answer[0]] if trees.rng.random() < 0.5 else answer[1:]
        with pytest.raises(RuleError, match=WORDS):
            mode(form, given, trees.count)


# -- what was silently swapped before --------------------------------------------------------------

FORM = [{"w": 0, "b": 1}]
FLAT = "returned [LEAF, LEAF], expected gradients by {'b': params['b'], 'w': params['w']}"


@modes
def test_gradients_of_a_dict_as_a_list_are_refused(mode):
    words = re.escape(FLAT).replace("LEAF", ".*")
    with pytest.raises(RuleError, match=words):
        mode(FORM, [0, 1], 2)


@modes
@pytest.mark.parametrize(
    ("form", "given", "words"),
    [
        ([{"w": 0}, 1], {"params": {"w": 0}, "x": 1}, "[{'w': params['w']}, x]"),
        ([{"w": 0}, 1], [1, {"w": 0}], "[{'w': params['w']}, x]"),
        ([0, 1], 0, "[params, x]"),
        ([0, 1], None, "[params, x]"),
        ([0, "constant", 1], [0, 1, 1], "[params, rest]"),
        ([Pair(0, [1])], [0, [1]], "Pair(first=params.first, second=[params.second[0]])"),
        ([[0, 1]], [[0, 1], 1], "[params[0], params[1]]"),
        ([{"w": 0, "n": "n"}], {"w": 0, "n": 1}, "{'n': None, 'w': params['w']}"),
    ],
)
def test_messages_show_both_structures(mode, form, given, words):
    count = len(leaves(form))
    with pytest.raises(RuleError, match=re.escape(f"expected gradients by {words}.")):
        mode(form, given, count)


@modes
def test_what_is_wrong_with_one_gradient_is_said_with_its_name(mode):
    def custom(f):
        library = {with_torch: regrad.torch, with_jax: rg.jax}.get(mode, rg)

        def summed(*args):
            y, _ = f(*args)
            return y, lambda dy: [{"w": dy, "b": dy.sum()}, dy]

        def g(params, x):
            return summed(params, x)

        return library.custom_grad(g)

    f = lambda *xs: called(lambda f: custom(f), [{"w": 0, "b": 1}, 2], [], xs)  # noqa: E731
    with pytest.raises(RuleError, match=r"""input "params\['b'\]",.*\(\).*\(2,\)"""):
        if mode is with_torch:
            xs = [torch.tensor(DY, requires_grad=True) for _ in range(3)]
            f(*xs).sum().backward()
        elif mode is with_jax:
            jax.grad(lambda *xs: f(*xs).sum())(*[jnp.asarray(DY)] * 3)
        elif mode is graph:
            with tf.Graph().as_default():
                xs = [tf.constant(DY) for _ in range(3)]
                tf.gradients(face(f(*[x._read() for x in xs])), xs)
        else:
            g = rg.grads(f)
            (rg.jit(lambda *xs: g(list(xs))) if mode is jit else lambda *xs: g(list(xs)))(
                *[rg.tensor(DY)] * 3
            )


def test_names_of_inputs():
    def named(f, *xs):
        with pytest.raises(RuleError) as caught:
            rg.grads(rg.custom_grad(f))(list(xs))
        return re.findall(r"input ['\"](.+?)['\"],", str(caught.value))[0]

    x = rg.tensor([1.0, 2.0])
    assert named(lambda a, b: (a * b, lambda dy: [dy, dy.sum()]), x, x) == "b"
    assert named(lambda *all: (all[0] * all[1], lambda dy: [dy, 3]), x, x) == "all[1]"
    with pytest.raises(RuleError, match="input 'b', returned the dtype float64"):
        f = rg.custom_grad(lambda n, a, b: (a * b, lambda dy: [dy, rg.astype(dy, "float64")]))
        rg.grads(lambda a, b: f(3, a, b))([x, x])


def test_names_under_tf_custom_gradient():
    v = tf.custom_gradient(lambda a, b: (a * b, lambda dy: (dy, tf.reduce_sum(dy))))
    with tf.Graph().as_default():
        xs = [tf.constant(DY), tf.constant(DY)]
        with pytest.raises(RuleError, match="input 'b', returned the shape"):
            tf.gradients(v(*xs), xs)


# -- containers of other kinds ---------------------------------------------------------------------


def test_registered_classes_are_matched_by_type():
    class Layer:
        def __init__(self, w, b):
            assert all(isinstance(t, rg.Tensor) for t in (w, b)), "no stand-ins are put in here"
            self.w, self.b = w, b

    class Twin(Layer):
        pass

    for cls in (Layer, Twin):
        optree.register_pytree_node(
            cls, lambda m: ((m.w, m.b), None, ("w", "b")), lambda _, t, c=cls: c(*t),
            namespace=optree.registry.__GLOBAL_NAMESPACE,
        )  # fmt: skip
    x = rg.tensor([1.0, 2.0])
    right = rg.custom_grad(lambda m: (m.w * m.b, lambda dy: Layer(dy * 2, dy * 3)))
    dw, db = rg.grads(lambda w, b: right(Layer(w, b)))([x, x])
    assert (dw.tolist(), db.tolist()) == ([2.0, 2.0], [3.0, 3.0])
    wrong = rg.custom_grad(lambda m: (m.w * m.b, lambda dy: Twin(dy * 2, dy * 3)))
    with pytest.raises(
        RuleError, match=r"returned Twin.*expected gradients by Layer\(w=m.w, b=m.b\)"
    ):
        rg.grads(lambda w, b: wrong(Layer(w, b)))([x, x])


@pytest.mark.parametrize("make", [dict, OrderedDict, lambda p: defaultdict(list, p)])
def test_kinds_of_dicts_are_alike(make):
    x = rg.tensor([1.0, 2.0])
    f = rg.custom_grad(lambda p: (p["w"] * p["b"], lambda dy: make([("b", dy * 3), ("w", dy * 2)])))
    dp = rg.grad(lambda p: f(p))({"w": x, "b": x})
    assert (dp["w"].tolist(), dp["b"].tolist()) == ([2.0, 2.0], [3.0, 3.0])


def test_an_empty_container_has_an_empty_gradient():
    x = rg.tensor([1.0, 2.0])
    f = rg.custom_grad(lambda p, g: (p["x"] * 1, lambda dy: {"x": dy * 7, "layers": g}))
    for answer in ([], None):
        got = rg.grad(lambda x, g=answer: f({"x": x, "layers": []}, g))(x)
        assert got.tolist() == [7.0, 7.0]


def test_the_record_holds_no_tensor_of_the_arguments():
    import gc
    import weakref

    x = rg.tensor([1.0, 2.0])
    alive = []

    def f(p):
        alive.append(weakref.ref(p["constant"]))
        return p["x"] * 2, lambda dy: {"x": dy * 2, "constant": None}

    def g(x):
        y = rg.custom_grad(f)({"x": x, "constant": rg.tensor([1.0] * 100)})
        gc.collect()
        assert alive[0]() is None
        return y

    rg.grad(g)(x)
