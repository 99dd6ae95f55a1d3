"""`compare_gradients` for functions of regrad."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError, GradientError
from tests.helpers.hosts import Functions
from tests.helpers.marks import marked_lines

LINES = marked_lines(__file__)
X = rg.tensor([0.5, -1.0, 2.0])


@rg.custom_grad
def cube(x, save):
    save([x])
    return x * x * x, lambda dy, saved: 2 * dy * saved[0] * saved[0]


@rg.custom_grad
def pair(xs, save):
    a, b = xs["a"], xs["b"]
    return {"sum": a + b, "product": a * b}, lambda dy: [{"a": dy["sum"], "b": None}]


def rows_by_op(comparison):
    return {row.op_type: row for row in comparison.rows if row.kind == "op"}


def test_rules_are_compared_in_place():
    def f(x):
        return rg.sum(cube(rg.sign(x)) * x)  # here: both

    with rg.gradient_override_map({"Sign": lambda dy: dy}) as used:
        found = rg.compare_gradients(f)(X)
    used.assert_fired()
    rows = rows_by_op(found)
    assert rows["cube"].ratio == pytest.approx(2 / 3) and rows["cube"].cosine == pytest.approx(1)
    assert rows["Sign"].other_zeros == 1 and rows["Sign"].zeros == 0
    assert {row.line for row in rows.values()} == {LINES["both"]}
    assert rows["cube"].rule.startswith("cube, ") and found.names == ("given", "true")
    assert not found.ok and len(found.undeclared) == 3


def test_declared_surrogates_are_passed_over():
    with rg.gradient_override_map({"Sign": lambda dy: dy}):
        found = rg.compare_gradients(lambda x: rg.sum(rg.sign(x) * x), surrogates=["Sign"])(X)
        found.assert_same()
        with pytest.raises(GradientError, match="Sign"):
            rg.compare_gradients(lambda x: rg.sum(rg.sign(x) * x))(X).assert_same()


def test_all_is_the_same_without_rules():
    found = rg.compare_gradients(lambda x: rg.sum(rg.sin(x) * rg.nn.relu(x)), rtol=1e-6)(X)
    assert found.ok and [row.name for row in found.rows] == ["args[0]"]


def test_scopes_inside_and_custom_functions_inside_of_others_are_off_too():
    @rg.custom_grad
    def outer(x, save):
        with rg.gradient_override_map({"Exp": lambda dy: 5 * dy}):
            return cube(x) + rg.exp(x), lambda dy: 7 * dy

    found = rg.compare_gradients(lambda x: rg.sum(outer(x)))(X)
    x = X.numpy().astype(float)
    true = 3 * x**2 + np.exp(x)
    assert found.rows[0].ratio == pytest.approx(
        np.linalg.norm(np.full(3, 7.0)) / np.linalg.norm(true), rel=1e-5
    )


def test_containers_and_gradients_that_are_missing():
    def f(xs):
        y = pair(xs)
        return rg.sum(y["sum"] * y["product"])

    found = rg.compare_gradients(f)({"a": X, "b": 2 * X})
    names = {row.name: row.missing for row in found.rows}
    assert names["args[0]['b']"] == "first" and names["args[0]['a']"] == ""


@pytest.mark.parametrize("wrap", [rg.jit, rg.checkpoint], ids=["jit", "checkpoint"])
def test_what_runs_as_one_is_opened(wrap):
    found = rg.compare_gradients(wrap(lambda x: rg.sum(cube(x))))(X)
    assert rows_by_op(found)["cube"].ratio == pytest.approx(2 / 3)


def test_variables_have_rows():
    w = rg.Variable([1.0, 2.0, 3.0], name="weight")
    with rg.gradient_override_map({"Tanh": lambda dy: dy}):
        found = rg.compare_gradients(lambda x: rg.sum(rg.tanh(w * x)))(X)
    kinds = {row.name: row.kind for row in found.rows}
    assert kinds["weight"] == "parameter" and kinds["args[0]"] == "argument"
    assert all(row.differs() for row in found.rows)


def test_another_function():
    w = rg.Variable([1.0, 2.0, 3.0], name="weight")
    found = rg.compare_gradients(lambda x: rg.sum(w * x * x), lambda x: -rg.sum(w * x * x))(X)
    assert [row.name for row in found.rows] == ["args[0]", "weight"]
    assert [row.cosine for row in found.rows] == pytest.approx([-1, -1])
    without = rg.compare_gradients(lambda x: rg.sum(w * x), lambda x: rg.sum(x))(X)
    assert without.rows[1].missing == "second"


def test_differences():
    f = lambda x, z: rg.sum(rg.sin(x) * rg.cos(x)) + rg.real(rg.sum(z * z))  # noqa: E731
    found = rg.compare_gradients(f, "differences", rtol=1e-5)(X, rg.tensor([1 + 2j]))
    assert found.ok and len(found) == 2 and found.names == ("given", "differences")
    wrong = rg.compare_gradients(lambda x: rg.sum(cube(x)), "differences")(X)
    assert wrong.rows[0].ratio == pytest.approx(2 / 3, rel=1e-5)


def test_complex_rules():
    with rg.gradient_override_map({"Exp": lambda dy, y: dy * y}):  # without the conjugate
        found = rg.compare_gradients(lambda z: rg.real(rg.sum(rg.exp(z))))(rg.tensor([1 + 2j]))
    assert rows_by_op(found)["Exp"].ratio == pytest.approx(1)
    assert rows_by_op(found)["Exp"].cosine == pytest.approx(np.cos(4), rel=1e-5)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ArgumentError, match="other must be a function"):
        rg.compare_gradients(rg.sin, "numerical")
    with pytest.raises(GradientError, match="int32"):
        rg.compare_gradients(lambda x: x)(rg.tensor([1, 2], dtype="int32"))


# -- gradient_path: the way of one gradient --------------------------------------------------------

WEIGHT = rg.Variable(np.array([1.0, 2.0]), name="w")
POINT = np.array([0.5, -1.0])


def ops(path):
    return [step.op_type for step in path.steps]


def test_the_ops_between_a_variable_and_the_result():
    def f(x):
        aside = rg.exp(x)
        return (rg.sin(WEIGHT * x) + aside).sum()  # here: way

    path = rg.gradient_path(f, "w")(POINT)
    assert ops(path) == ["Sum", "AddV2", "Sin", "Mul"]
    assert path.gradient.norm == pytest.approx(
        np.linalg.norm(np.cos(WEIGHT.numpy() * POINT) * POINT)
    )
    assert {step.line for step in path.steps} == {LINES["way"]} and path.dies is None
    assert [len(step.left) for step in path.steps] == [1, 1, 1, 1]
    assert ops(rg.gradient_path(f, "args[0]")(POINT)) == ["Sum", "AddV2", "Sin", "Mul", "Exp"]


def test_where_it_dies_and_under_which_rule():
    def f(x):
        return rg.sum(rg.sign(rg.sin(x)) * 3)  # here: dies

    path = rg.gradient_path(f, "args[0]")(POINT)
    assert (path.dies.op_type, path.dies.line) == ("Sign", LINES["dies"])
    assert "dies at Sign" in str(path) and path.gradient.is_zero
    with rg.gradient_override_map({"Sign": lambda dy: dy}):
        path = rg.gradient_path(f, "args[0]")(POINT)
    assert path.dies is None and [step.kind for step in path.steps].count("override") == 1
    assert path.gradient.norm == pytest.approx(np.linalg.norm(3 * np.cos(POINT)))


def test_a_gradient_of_one_input_may_die_where_the_other_lives():
    path = rg.gradient_path(lambda x, w: (x * w).sum(), "args[1]")(np.zeros(2), POINT)
    assert path.dies.op_type == "Mul" and len(path.table()) == 2
    assert rg.gradient_path(lambda x, w: (x * w).sum(), "args[0]")(np.zeros(2), POINT).dies is None


def test_where_it_is_cut_off():
    def f(x):
        return (rg.stop_gradient(x * WEIGHT) * x).sum()  # here: cut

    path = rg.gradient_path(f, "w")(POINT)
    assert path.gradient is None and ops(path) == ["Mul"]
    assert [(cut.op_type, cut.line) for cut in path.cuts] == [("StopGradient", LINES["cut"])]
    assert "w has no gradient; cut off: StopGradient" in path._repr_html_()


def test_where_it_is_not_finite():
    path = rg.gradient_path(lambda x: rg.sqrt(rg.square(x)).sum(), "args[0]")(np.zeros(1))
    assert path.dies.op_type == "Sqrt" and "no longer finite" in path.verdict


def test_a_name_that_nothing_has():
    with pytest.raises(
        ArgumentError, match=r"no differentiable input 'v'; it has 'args\[0\]', 'w'"
    ):
        rg.gradient_path(lambda x: (x * WEIGHT).sum(), "v")(POINT)
    with pytest.raises(ArgumentError, match=r"Did you mean 'args\[0\]'"):
        rg.gradient_path(lambda x: (x * WEIGHT).sum(), "arg[0]")(POINT)
    with pytest.raises(ArgumentError, match="must be a function"):
        rg.gradient_path(3, "w")(POINT)


def test_a_parameter_of_a_pytorch_model():
    torch = pytest.importorskip("torch")
    import regrad.torch as rt

    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    for p in net.parameters():
        torch.nn.init.constant_(p, 0.5)
    x = torch.tensor([[1.0, 2.0]])
    path = rt.gradient_path(net, "0.weight")(x)
    (true,) = torch.autograd.grad(net(x).sum(), net[0].weight)
    assert path.gradient.norm == pytest.approx(float(true.norm()))
    assert [op for op in ops(path) if "(" not in op] == ["linear", "relu", "linear"]
    assert [step.path for step in path.steps][1] == "1"
    dead = rt.gradient_path(lambda x: net(x - 100).sum(), "0.weight")(x)
    assert (dead.dies.op_type, dead.dies.path) == ("relu", "1")
    cut = rt.gradient_path(lambda x: net[2](net[:2](x).detach()).sum(), "0.bias")(x)
    assert cut.gradient is None and "detach" in [step.op_type for step in cut.cuts]


@pytest.mark.slow
def test_a_leaf_of_a_jax_function():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    loss = lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) + jnp.exp(p["b"]))  # noqa: E731

    p = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
    path = rg.jax.gradient_path(loss, "args[0]['w']")(p, POINT)
    assert ops(path) == ["reduce_sum", "add", "tanh", "dot_general"]
    true = jax.grad(loss)(p, POINT)["w"]
    assert path.gradient.norm == pytest.approx(float(jnp.linalg.norm(true)), rel=1e-6)
    stopped = lambda x: jnp.sum(jax.lax.stop_gradient(jnp.sin(x)) * x[::-1])  # noqa: E731
    path = rg.jax.gradient_path(lambda x, y: stopped(x) + jnp.sum(y * 0), "args[1]")(POINT, POINT)
    assert path.dies.op_type == "mul" and path.gradient.is_zero


# -- find_nan: the op, its element, and the words for it -------------------------------------------

SAFE = np.ones((4, 8))
ZERO = np.where(np.arange(32).reshape(4, 8) == 31, 0.0, SAFE)
NAN, MASK = np.array([0.0, np.nan, 0.0]), np.array([True, False, True])
HALF = np.array([1.0, 20.0], np.float16)


def masked(o, x):
    return o.where(MASK, x, -np.inf)


def root(o, x):
    return o.sum(o.where(x > 0, o.sqrt(x), 0.0))


ROWS = {  # f, x, what is found, words of its text and its cure, and the op types in the libraries
    "the element": (lambda o, x: o.sum(o.log(o.exp(o.log(x)) - 0.0) * 2.0), ZERO,
                    {"phase": "forward", "what": "inf", "index": (3, 7), "count": 1},
                    ["x = 0 at index (3, 7)", "log(maximum(x, eps))"], ("Log", "log")),
    "behind a mask": (root, np.array([4.0, 0.0]),
                      {"phase": "backward", "what": "NaN", "output": "x", "index": (1,)},
                      ["behind a mask"], ("Sqrt", "sqrt")),
    "an argument": (lambda o, x: o.sum(o.sin(x["a"])), {"a": np.array([0.0, np.nan, np.inf])},
                    {"phase": "argument", "output": "args[0]['a']", "index": (1,), "count": 2},
                    ["NaN in args[0]['a'] at index (1,) (2 in total)"], (None, None)),
    "a constant": (lambda o, x: o.sum(o.sin(x - NAN) ** 2), np.ones(3),
                   {"phase": "forward", "index": (1,)}, ["b = nan"], ("Sub", "sub")),
    "all is finite": (lambda o, x: o.sum(o.sin(x)), SAFE, None, [], (None, None)),
    "spoils nothing": (lambda o, x: o.sum(o.softmax(masked(o, x)) * x), np.ones(3), None, [],
                       (None, None)),
    "a mask that is used": (lambda o, x: o.sum(masked(o, x) - o.max(x)), np.ones(3),
                            {"what": "inf", "index": (1,)}, [], ("SelectV2",)),
    "an infinity times 0": (lambda o, x: o.sum(masked(o, x) * 0.0), np.ones(3),
                            {"what": "NaN", "index": (1,)}, [], ("Mul", "mul")),
    "half precision": (lambda o, x: o.sum(o.exp(x)), HALF, {"what": "inf"}, ["overflows"],
                       ("Exp", "exp")),
}  # fmt: skip


def of_regrad():
    return Functions(rg, rg.nn), rg.find_nan


def of_jax():
    import jax
    import jax.numpy as jnp

    return Functions(jnp, jax.nn), rg.jax.find_nan


HOSTS = (of_regrad, of_jax)
CASES = [(name, host, op) for name in ROWS for host, op in zip(HOSTS, ROWS[name][-1], strict=False)]


@pytest.mark.parametrize(("name", "host", "op_type"), CASES)
def test_what_is_not_finite_is_found(name, host, op_type):
    f, x, expected, words, _ = ROWS[name]
    functions, find_nan = host()
    found = find_nan(lambda x: f(functions, x))(x)
    if expected is None:
        assert found is None
        return
    assert {key: getattr(found, key) for key in expected} == expected
    assert all(word in f"{found} {found.cure}" for word in words)
    assert op_type in (None, found.op_type)


def test_a_rule_that_makes_infinities_is_named():
    custom = rg.custom_grad(lambda x: (rg.sin(x), lambda dy: dy / x))
    with rg.gradient_override_map({"Sin": lambda dy, x: dy / x}):
        by_rule = rg.find_nan(lambda x: rg.sin(x).sum())(np.array([1.0, 0.0]))
    by_custom = rg.find_nan(lambda x: custom(x).sum())(np.array([1.0, 0.0]))
    for found in (by_rule, by_custom):
        assert (found.phase, found.what, found.index) == ("backward", "inf", (1,))
        assert "<lambda>, " in found.rule


def test_a_rule_of_jax_that_makes_infinities_is_named():
    import jax.numpy as jnp

    inverse = rg.jax.custom_grad(lambda x: (jnp.sin(x), lambda dy: dy / x))
    found = rg.jax.find_nan(lambda x: jnp.sum(inverse(x)))(jnp.array([1.0, 0.0]))
    assert (found.phase, found.index) == ("backward", (1,))
    assert "<lambda>" in found.rule
