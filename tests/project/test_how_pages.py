"""The cores rebuilt in docs/how_*.py run, are self-contained, and agree with regrad."""

import ast
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.transforms.derivatives import jvp
from tests.helpers.paths import DOCS

pytestmark = pytest.mark.usefixtures("graph")

# The scripts, with how many lines they may have, blank ones apart.
SCRIPTS = {"it_works": 360, "jit_works": 310, "graphs_work": 260, "torch_overrides_work": 180}
POINTS = np.array([-1.5, -0.2, 0.7, 2.0])


def fixture_of(name):
    """A script's names; its own assertions hold if this does not raise."""
    path = DOCS / f"how_{name}.py"
    return pytest.fixture(lambda: SimpleNamespace(**runpy.run_path(str(path))))


core, compiler, graphs, scopes = map(fixture_of, SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_imports_little(name):
    text = (DOCS / f"how_{name}.py").read_text(encoding="utf-8")
    assert sum(map(bool, text.splitlines())) <= SCRIPTS[name]
    tree = ast.parse(text)
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    library = {"torch"} if "torch" in name else {"numpy"}
    assert {n.partition(".")[0] for n in names} - sys.stdlib_module_names == library


# -- the engine ------------------------------------------------------------------------------------


def saving(m, of):
    """A custom gradient of the script's or of regrad's, which takes what `of` computes of x."""

    def f(a, save):
        y, saved, back = of(a)
        save(saved)
        return y, back

    return m.custom_grad(f)


def under_a_rule(m):
    """A rule for Cos, in force where ops are created, and not in the rule of Sin."""

    def f(x):
        with m.gradient_override_map({"Cos": lambda dy, x: dy * x}):
            return m.grad(lambda x: m.cos(x) + m.grad(m.sin)(x))(x)

    return f


def saved_twice(m):
    """An intermediate and the output are saved; both have a derivative at the next order."""

    def of(x):
        inner = m.sin(x)
        y = m.exp(inner)
        return y, [inner, y], lambda dy, saved: dy * saved[0] * saved[1]

    return saving(m, of)


# The same function of x of the script's parts and of regrad's, which have the same names; and how
# often it is differentiated. (Program 7 is in the docs of TensorFlow.js.)
ENGINE = {
    "of any order": (lambda m: lambda x: m.sin(x * x) * m.exp(x), (1, 2, 3)),
    "nested derivatives": (lambda m: lambda x: x * m.grad(lambda z: x * z * z)(x), (1,)),
    "program 7": (lambda m: saving(m, lambda a: (a * a, [a], lambda dy,
        s: dy * s[0] * m.sign(s[0]))), (1, 2)),
    "what is saved": (saved_twice, (1, 2, 3)),
    "its own input": (lambda m: lambda x: x * saving(m, lambda x: (x, [], lambda dy, _: dy * 3))(x),
        (1,)),
    "a rule in force": (under_a_rule, (0,)),
    "broadcasting": (lambda m: lambda x: m.exp(x * np.array([[1.0, 2.0, 3.0]])), (1,)),
}  # fmt: skip


def nth(m, f, order):
    """The gradient of so high an order."""
    for _ in range(order):
        f = m.grad(f)
    return f


def agree(mine, theirs, core, x=POINTS):
    np.testing.assert_allclose(mine(core.Tensor(x)).value, theirs(rg.tensor(x)).numpy())


@pytest.mark.parametrize(
    ("name", "order"), [(name, n) for name, (_, orders) in ENGINE.items() for n in orders]
)
def test_the_engine_has_the_gradients_of_regrad(core, name, order):
    mine, theirs = (nth(m, ENGINE[name][0](m), order) for m in (core, rg))
    agree(mine, theirs, core, np.array([[0.3], [-0.4]]) if name == "broadcasting" else POINTS)


def test_surrogate(core):
    def surrogate(x):
        return rg.sin(x) + rg.stop_gradient(rg.sign(x) - rg.sin(x))

    mine = core.surrogate(core.sign, core.sin)
    agree(mine, surrogate, core)
    agree(core.grad(mine), rg.grad(surrogate), core)


def test_forward_mode(core):
    dx = np.array([1.0, -2.0, 0.5, 3.0])
    agree(
        lambda x: core.jvp(lambda x: core.sin(x) * core.exp(x), x, core.Tensor(dx)),
        lambda x: jvp(lambda x: rg.sin(x) * rg.exp(x), [x], [rg.tensor(dx)])[1],
        core,
    )


@pytest.mark.slow
def test_deep_chain(core):
    def chain(x):
        for _ in range(20_000):
            x = x + 1
        return x

    assert core.grad(chain)(1.0).value == 1


def test_wrong_shape_is_an_error(core):
    message = r"the rule of BroadcastTo returned \(2, 3\), expected \(3,\)"
    scope = core.gradient_override_map({"BroadcastTo": lambda dy: dy})
    with scope, pytest.raises(ValueError, match=message):
        core.grad(lambda x: core.broadcast_to(x, (2, 3)))(core.Tensor([1.0, 2.0, 3.0]))


def test_an_op_without_a_rule_is_an_error(core):
    cube = core.elementwise("Cube", lambda xp, x: x**3)
    assert cube(core.Tensor([2.0])).value == [8.0]
    with pytest.raises(ValueError, match="no gradient is defined for the op type Cube"):
        core.grad(cube)(core.Tensor([2.0]))
    with core.gradient_override_map({"Cube": lambda dy, x: dy * x}):
        assert core.grad(cube)(core.Tensor([2.0])).value == [2.0]


def test_no_path_is_an_error(core):
    with pytest.raises(ValueError, match="no path"):
        core.grad(core.stop_gradient)(1.0)


# -- jit -------------------------------------------------------------------------------------------


def f64(x):
    return rg.tensor(np.float64(x))


@pytest.mark.parametrize(("inside", "outside"), [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0)])
def test_a_compiled_function_and_gradients_at_any_order(compiler, inside, outside):
    def found(m, x):
        compiled = m.jit(nth(m, lambda x: m.sin(x * x) * x + 1.0, inside))
        return float(nth(m, compiled, outside)(x))

    np.testing.assert_allclose(found(compiler, 0.7), found(rg, f64(0.7)))


@pytest.mark.slow
def test_a_rule_in_force_fires_and_has_a_program_of_its_own(compiler):
    def tenfold(dy, x):
        return [dy * 10.0]

    mine, theirs = compiler.jit(compiler.sin), rg.jit(rg.sin)
    for _ in range(2):
        found = [float(compiler.grad(mine)(0.5))], [float(rg.grad(theirs)(f64(0.5)))]
        with compiler.override("Sin", tenfold):
            found[0].append(float(compiler.grad(mine)(0.5)))
        with rg.gradient_override_map({"Sin": lambda dy: dy * 10.0}):
            found[1].append(float(rg.grad(theirs)(f64(0.5))))
        np.testing.assert_allclose(*found)
    assert len(mine.programs) == theirs.cache_info().programs == 2


def test_a_rule_counts_that_was_in_force_at_the_call(compiler):
    def doubled(dy, x):
        return [dy * 2.0]

    def mine(x):
        with compiler.override("Sin", doubled):
            return compiler.jit(compiler.sin)(x)

    def theirs(x):
        with rg.gradient_override_map({"Sin": lambda dy: dy * 2.0}):
            return rg.jit(rg.sin)(x)

    assert float(compiler.grad(mine)(0.5)) == float(rg.grad(theirs)(f64(0.5))) == 2.0


def test_a_value_of_the_closure_is_part_of_the_key(compiler):
    by = 2.0
    mine, theirs = compiler.jit(lambda x: x * by), rg.jit(lambda x: x * by)
    assert float(mine(3.0)) == float(theirs(f64(3.0))) == 6.0
    by = 5.0
    assert float(mine(3.0)) == float(theirs(f64(3.0))) == 15.0


def test_values_are_refused_in_a_trace(compiler):
    with pytest.raises(TypeError, match="being captured"):
        compiler.jit(lambda x: x * float(x))(1.0)
    with pytest.raises(rg.errors.TraceError):
        rg.jit(lambda x: x * float(x))(1.0)
    assert not compiler.TRACES
    assert not compiler.TAPES


def test_variables_are_inputs_and_outputs(compiler):
    mine, theirs = compiler.Variable(0.3), rg.Variable(np.float64(0.3))

    def my_step(x):
        mine.assign(mine.read() * x + 1.0)
        return compiler.sin(mine.read())

    def their_step(x):
        theirs.assign(theirs * x + 1.0)
        return rg.sin(theirs)

    compiled, others = compiler.compile_step(my_step), rg.jit(their_step)
    for _ in range(3):
        np.testing.assert_allclose(float(compiled(2.0)), float(others(f64(2.0))))
    np.testing.assert_allclose(float(mine.tensor), float(theirs.value))


def test_the_backward_program_takes_what_it_reads(compiler):
    program = compiler.capture(lambda x: compiler.sin(compiler.sin(x)) * 3.0, 1)
    forward, backward = compiler.derive(program)
    assert len(forward.outputs) == 1 + 3  # y, and as residuals x, sin(x) and the factor 3
    assert len(backward.inputs) == len(forward.outputs)


# -- graphs ----------------------------------------------------------------------------------------


def test_names_are_unique_in_their_scopes(graphs):
    with graphs.GRAPH.scope("block"):
        made = graphs.constant(1.0), graphs.constant(2.0), graphs.constant(3.0, "c")
    with tf.name_scope("block"):
        theirs = [tf.constant(1.0), tf.constant(2.0), tf.constant(3.0, name="c")]
    assert [t.name for t in made] == [t.op.name for t in theirs]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_gradients_of_any_order_and_shape(graphs, graph, order):
    row = np.array([[1.0, 2.0, 3.0]])
    x, a = graphs.placeholder(), tf.placeholder(tf.float64)
    y, b = graphs.sin(x * row) * x, tf.sin(a * row) * a
    for _ in range(order):
        (y,), (b,) = graphs.gradients(y, [x]), tf.gradients(b, a)
    with tf.Session() as session:
        for value in (np.float64(0.3), np.array([[0.5], [0.7]])):
            mine = graphs.Session().run([y], {x: value})[0]
            np.testing.assert_allclose(mine, session.run(b, {a: value}))


def test_a_rule_is_bound_when_its_node_is_created(graphs, graph):
    graphs.register_gradient("MyTenfold")(lambda op, grad: [grad * 10.0])
    tf.RegisterGradient("MyTenfold")(lambda op, grad: grad * 10.0)
    x, a = graphs.placeholder(), tf.placeholder(tf.float64)
    y, b = graphs.sin(x), tf.sin(a)
    with graphs.GRAPH.gradient_override_map({"Sin": "MyTenfold"}):
        y = y + graphs.sin(x)
    with graph.gradient_override_map({"Sin": "MyTenfold"}):
        b = b + tf.sin(a)
    (dy,), (db,) = graphs.gradients(y, [x]), tf.gradients(b, a)
    with tf.Session() as session:
        found = graphs.Session().run([dy], {x: 0.5})[0]
        np.testing.assert_allclose(found, session.run(db, {a: 0.5}))
    np.testing.assert_allclose(found, np.cos(0.5) + 10)


def test_no_path_is_none(graphs):
    assert graphs.gradients(graphs.sin(graphs.placeholder()), [graphs.placeholder()]) == [None]
    assert tf.gradients(tf.sin(tf.placeholder(tf.float32)), tf.placeholder(tf.float32)) == [None]


def test_what_is_not_fed_is_an_error(graphs):
    x = graphs.placeholder("unfed")
    with pytest.raises(ValueError, match="unfed"):
        graphs.Session().run([graphs.sin(x)])
    a = tf.placeholder(tf.float32, name="unfed")
    with tf.Session() as session, pytest.raises(tf.errors.InvalidArgumentError, match="unfed"):
        session.run(tf.sin(a))


def test_any_tensor_can_be_fed(graphs):
    x, a = graphs.placeholder(), tf.placeholder(tf.float64)
    inner, theirs = graphs.sin(x), tf.sin(a)
    with tf.Session() as session:
        mine = graphs.Session().run([inner * 2.0], {inner: 5.0})
        assert mine[0] == session.run(theirs * 2.0, {theirs: 5.0}) == 10.0


def test_a_run_is_a_snapshot_and_control_dependencies_are_waited_for(graphs):
    w, v = graphs.Variable(1.0), tf.Variable(np.float64(1.0))
    before, theirs = w.read(), v.read_value()
    step, update = w.assign(before * 5.0), v.assign(theirs * 5.0)
    with graphs.control_dependencies([step]):
        after = w.read()
    with tf.control_dependencies([update]):
        later = v.read_value()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for expected in (1.0, 5.0), (5.0, 25.0):
            mine = graphs.Session().run([before, after])
            assert tuple(map(float, mine)) == tuple(session.run([theirs, later])) == expected


def test_a_run_that_fails_changes_no_variable(graphs):
    w = graphs.Variable(1.0)
    step = w.assign(2.0)
    with pytest.raises(ValueError, match="feed it"):
        graphs.Session().run([step, graphs.sin(graphs.placeholder())])
    assert w.value == 1.0


# -- overrides in PyTorch --------------------------------------------------------------------------


def squared(dy, x):
    return dy * x * x


MODELS = {
    "function": F.relu, "method": lambda x: x.relu(), "in place": lambda x: (2 * x).relu_(),
    "argument": lambda x: F.relu(2 * x, inplace=True), "module": torch.nn.ReLU(),
    "twice": lambda x: F.relu(F.relu(x) - 1) * torch.relu(-x + 3),
    "a view in place": lambda x: (2 * x).view(3).relu_(),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("order", [1, 2])
def test_a_rule_counts_wherever_the_op_is_called(scopes, model, order):
    found = []
    for scope in (scopes.Override, rg.torch.gradient_override_map):
        x = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
        with scope({"Relu": squared}) as used:
            y = model(x)
        for _ in range(order):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        used.assert_fired()
        found.append(y.tolist())
    assert found[0] == pytest.approx(found[1])


def test_the_value_and_other_ops_stay(scopes):
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    for scope in (scopes.Override, rg.torch.gradient_override_map):
        with scope({"Sign": lambda dy: dy}):
            y = torch.sign(x) + torch.relu(x)
        assert y.tolist() == [-1.0, 3.0]
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1.0, 2.0]


def test_nothing_is_skipped_in_silence(scopes):
    def cell():
        inputs = [torch.ones(1, 1) for _ in range(4)]
        return torch.rnn_relu_cell(inputs[0], inputs[1].requires_grad_(), *inputs[2:])

    with (
        pytest.raises(scopes.PassedOver, match="rnn_relu_cell"),
        scopes.Override({"Relu": squared}),
    ):
        cell()
    try:  # regrad takes the cell apart, or refuses it
        with rg.torch.gradient_override_map({"Relu": squared}) as used:
            cell().sum().backward()
        used.assert_fired()
    except rg.errors.PassedOverError:
        pass


def test_a_rule_that_matched_nothing_is_reported(scopes):
    with scopes.Override({"Sign": squared}) as used:
        F.relu(torch.ones(1))
    with pytest.raises(AssertionError, match="Sign"):
        used.assert_fired()
