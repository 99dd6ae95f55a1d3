"""`gradient_path`: the way of one gradient, in regrad, PyTorch and JAX."""

import numpy as np
import pytest

import regrad as rg
from regrad.errors import ArgumentError
from tests.helpers.marks import marked_lines

LINES = marked_lines(__file__)
W = rg.Variable(np.array([1.0, 2.0]), name="w")
X = np.array([0.5, -1.0])


def ops(path):
    return [step.op_type for step in path.steps]


def test_the_ops_between_a_variable_and_the_result():
    def f(x):
        aside = rg.exp(x)
        return (rg.sin(W * x) + aside).sum()  # here: way

    path = rg.gradient_path(f, "w")(X)
    assert ops(path) == ["Sum", "AddV2", "Sin", "Mul"]
    assert path.gradient.norm == pytest.approx(np.linalg.norm(np.cos(W.numpy() * X) * X))
    assert {step.line for step in path.steps} == {LINES["way"]} and path.dies is None
    assert [len(step.left) for step in path.steps] == [1, 1, 1, 1]
    assert ops(rg.gradient_path(f, "args[0]")(X)) == ["Sum", "AddV2", "Sin", "Mul", "Exp"]


def test_where_it_dies_and_under_which_rule():
    def f(x):
        return rg.sum(rg.sign(rg.sin(x)) * 3)  # here: dies

    path = rg.gradient_path(f, "args[0]")(X)
    assert (path.dies.op_type, path.dies.line) == ("Sign", LINES["dies"])
    assert "dies at Sign" in str(path) and path.gradient.is_zero
    with rg.gradient_override_map({"Sign": lambda dy: dy}):
        path = rg.gradient_path(f, "args[0]")(X)
    assert path.dies is None and [step.kind for step in path.steps].count("override") == 1
    assert path.gradient.norm == pytest.approx(np.linalg.norm(3 * np.cos(X)))


def test_a_gradient_of_one_input_may_die_where_the_other_lives():
    path = rg.gradient_path(lambda x, w: (x * w).sum(), "args[1]")(np.zeros(2), X)
    assert path.dies.op_type == "Mul" and len(path.table()) == 2
    assert rg.gradient_path(lambda x, w: (x * w).sum(), "args[0]")(np.zeros(2), X).dies is None


def test_where_it_is_cut_off():
    def f(x):
        return (rg.stop_gradient(x * W) * x).sum()  # here: cut

    path = rg.gradient_path(f, "w")(X)
    assert path.gradient is None and ops(path) == ["Mul"]
    assert [(cut.op_type, cut.line) for cut in path.cuts] == [("StopGradient", LINES["cut"])]
    assert "w has no gradient; cut off: StopGradient" in path._repr_html_()


def test_where_it_is_not_finite():
    path = rg.gradient_path(lambda x: rg.sqrt(rg.square(x)).sum(), "args[0]")(np.zeros(1))
    assert path.dies.op_type == "Sqrt" and "no longer finite" in path.verdict


def test_a_name_that_nothing_has():
    with pytest.raises(ArgumentError, match=r"not differentiated by 'v', but by 'args\[0\]', 'w'"):
        rg.gradient_path(lambda x: (x * W).sum(), "v")(X)
    with pytest.raises(ArgumentError, match=r"Did you mean 'args\[0\]'"):
        rg.gradient_path(lambda x: (x * W).sum(), "arg[0]")(X)
    with pytest.raises(ArgumentError, match="must be a function"):
        rg.gradient_path(3, "w")(X)


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
    path = rg.jax.gradient_path(loss, "args[0]['w']")(p, X)
    assert ops(path) == ["reduce_sum", "add", "tanh", "dot_general"]
    true = jax.grad(loss)(p, X)["w"]
    assert path.gradient.norm == pytest.approx(float(jnp.linalg.norm(true)), rel=1e-6)
    stopped = lambda x: jnp.sum(jax.lax.stop_gradient(jnp.sin(x)) * x[::-1])  # noqa: E731
    path = rg.jax.gradient_path(lambda x, y: stopped(x) + jnp.sum(y * 0), "args[1]")(X, X)
    assert path.dies.op_type == "mul" and path.gradient.is_zero
