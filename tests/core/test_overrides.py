"""Overrides by op type: forms of rules, binding, scopes, decorators, hits, reports, errors."""

import asyncio
import copy
import functools
import gc
import inspect
import io

import numpy as np
import pytest
import torch
from rich.console import Console

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.core.reports import Table, Untouched
from regrad.core.state import current
from regrad.errors import ArgumentError, NotFiredError, RuleError, UnusedOverrideWarning
from tests.helpers.rows import plain, refusals, refused, results, together, under

override, optional = rg.gradient_override_map, rg.rules.optional
UnknownOpError = rg.errors.UnknownOpError
OTHER = regrad.torch.gradient_override_map
SEVEN = lambda dy: dy * 7  # noqa: E731
SIGN = {"Sign": SEVEN}
X = rg.tensor([1.0, 2.0])
rg.RegisterGradient("TestsSeven")(SEVEN)


# -- forms of rules --------------------------------------------------------------------------------


def by_seven(dy, x):
    return dy * 7


def two(k, dy, x):
    return dy * k


class Callable:
    """An object that is a rule, and one whose methods are."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, dy, x):
        return dy * 7

    def native(self, dy):
        return dy * 7

    def tensorflow(self, op, grad):
        return grad * 7


def stated(*args, **options):
    """A function that shows the signature of another, and is not said to wrap it."""
    return by_seven(*args, **options)


stated.__signature__ = inspect.signature(by_seven)
RULES = {
    "stated signature": stated, "partial": functools.partial(two, 7),
    "partial of a method": functools.partial(Callable().native), "object": Callable(),
    "method": Callable().native, "method in TensorFlow's form": Callable().tensorflow,
    "staticmethod": staticmethod(SEVEN),
    "wrapper": functools.wraps(by_seven)(lambda *args: args[0] * 7),
    "names and more": lambda dy, *rest: dy * 7, "anything": lambda *args: args[1] * 7,
    "a list": lambda dy: [dy * 7], "a tuple": lambda dy, x: (dy * 7,),
    "a default": lambda dy, k=7.0: dy * k, "a keyword": lambda dy, *, x: dy * x * 14,
    "a default and a keyword": lambda dy, k=7.0, *, y: dy * k * y,
}  # fmt: skip


@pytest.mark.parametrize("form", RULES)
def test_forms_of_rules(form):
    with override({"Sign": RULES[form]}) as used:
        assert rg.grad(rg.sign)(0.5).item() == 7.0
        assert rg.jit(rg.grad(rg.sign))(0.5).item() == 7.0
    used.assert_fired()


def spread(op, grad):
    assert op.get_attr("axis") == 1
    refused(lambda: op.get_attr("axes"), RuleError, "no attribute 'axes'")
    return rg.broadcast_to(rg.expand_dims(grad, 1), op.inputs[0].shape) * 3


def recorded(op, grad):
    """A rule of TensorFlow's form, which sees the record of the product of 2 and 3."""
    assert (op.type, op.name, len(op.inputs), len(op.outputs)) == ("Mul", "multiply", 2, 1)
    assert (op.inputs[0].item(), op.outputs[0].item()) == (2.0, 6.0)
    return grad * 10, None


def integers(x):
    a, b = rg.unstack(rg.astype(x, rg.int32))
    return a * 2.0 + b * 3.0


V = rg.Variable(2.0, name="v")
Z = rg.tensor(np.array([1 + 2j]))
flag = lambda x: rg.astype(x > 0, rg.float32) * 3  # noqa: E731
whole = lambda x: rg.astype(rg.astype(x, "int32") * 2, rg.float32)  # noqa: E731
product = lambda a, b: a * b  # noqa: E731
VALUES = {
    "an attribute": ({"Sum": spread}, lambda: rg.grad(lambda x: rg.sum(x, axis=1))(rg.ones((2, 2))),
                     [[3.0, 3.0], [3.0, 3.0]]),
    "the record": ({"Mul": recorded}, lambda: rg.grads(product)([2.0, 3.0]), [10.0, 0.0]),
    "identity": ({"Identity": SEVEN}, lambda: rg.grad(rg.identity)(1.0), 7.0),
    "an alias is no identity": ({"Identity": optional(SEVEN)},
                                lambda: rg.grad(rg.grad(lambda x: x * x))(2.0), 2.0),
    "nor is a read": ({"Identity": optional(SEVEN)},
                      lambda: rg.variable_grads(lambda: V * 1.0).grads, {"v": 1.0}),
    "a comparison": ({"Greater": lambda dy, a, b: (dy, None)}, lambda: rg.grad(flag)([0.5, -1.0]),
                     [3.0, 3.0]),
    "stop_gradient": ({"StopGradient": "Identity"}, lambda: rg.grad(rg.stop_gradient)(2.0), 1.0),
    "a cast": ({"Cast": lambda dy: dy}, lambda: rg.grad(whole)(2.7), 2.0),
    "integers": ({"Cast": lambda dy: dy}, lambda: rg.grad(integers)([1.0, 2.0]), [2.0, 3.0]),
    # the rule for Exp multiplies; an override of Mul must not reach it
    "rules are masked": ({"Mul": optional(lambda dy: (dy * 0, dy * 0))},
                         lambda: rg.grad(rg.exp)(0.0), 1.0),
    "a list, of complex numbers": ({"Square": lambda dy, x: [dy * x]},
                                   lambda: rg.grad(rg.square)(Z), [1 + 2j]),
    "complex numbers": ({"Square": lambda dy, x: dy * x}, lambda: rg.grad(rg.square)(Z), [1 + 2j]),
    "a list, forward": ({"Sign": lambda dy: [dy * 3]}, lambda: rg.jvp(rg.sign, [X], [X])[1],
                        [3.0, 6.0]),
    # TensorFlow's releases call one op by either name
    "one op by two names": ({"Add": "Sub", "AddV2": "Sub"}, lambda: rg.add(1.0, 2.0), 3.0),
}  # fmt: skip
test_gradients_under_rules = results(VALUES)


def test_binding_is_at_creation():
    assert rg.grad(lambda x: under(SIGN, rg.sign, x))(0.5).item() == 7.0
    _, back = rg.vjp(lambda x: rg.sign(x) * 1.0, rg.scalar(0.5))
    rules = {"Sign": optional(SEVEN), "Mul": optional(lambda dy: (dy, dy))}
    assert under(rules, back, 1.0)[0].item() == 0.0  # the scope of the backward pass does not count


def test_nesting_and_shadowing():
    double, triple = (lambda dy: dy * 2), (lambda dy: dy * 3)
    slopes = lambda: [rg.grad(f)(0.5).item() for f in (rg.sign, rg.round)]  # noqa: E731
    with override({"Sign": double, "Round": double}) as outer:
        with override({"Sign": triple}) as inner:
            assert slopes() == [3.0, 2.0]
        assert slopes() == [2.0, 2.0]
    assert slopes() == [0.0, 0.0]
    assert [h.op_type for h in inner.hits] == ["Sign"]
    assert {h.op_type for h in outer.hits} == {"Sign", "Round"}


def test_the_librarys_own_plumbing_is_masked():
    reshaped = optional(lambda dy, x_shape: rg.reshape(dy, x_shape) * 10)
    wrong = {"Reshape": reshaped, "Pack": optional(lambda op, dy: None)}
    with override({**wrong, "Mul": "Mul"}) as used:
        assert rg.jacobian(rg.jacobian(lambda x: x * x * x))(2.0).item() == 12.0
    assert {hit.op_type for hit in used.hits} == {"Mul"}


def test_tasks_inherit_a_copy():
    async def later():
        await asyncio.sleep(0.01)
        return rg.grad(rg.sign)(1.0).item()

    async def main():
        with override(SIGN):
            rg.sign(1.0)
            task = asyncio.create_task(later())
        return rg.grad(rg.sign)(1.0).item(), await task  # which outlives its scope

    assert asyncio.run(main()) == (0.0, 7.0)


# -- hits ----------------------------------------------------------------------------------------


def test_hits_show_type_rule_line_and_counts():
    def model(x):
        for _ in range(3):
            x = rg.sign(x) + x  # this line
        return rg.sum(x) + rg.std(x * 0 + X)

    with override({"Sign": "TestsSeven", "Sum": "Identity", "Sqrt": SEVEN}) as used:
        model(rg.scalar(1.0))
        rg.grad(model)(1.0)
        X.sum()
    first, *sums, sqrt = used.hits
    assert (first.op_type, first.rule, first.count, first.ran) == ("Sign", "TestsSeven", 6, 3)
    line = model.__code__.co_firstlineno + 2
    assert first.where.endswith(f"test_overrides.py:{line}")
    assert "Sign <- TestsSeven: 6 created, rule ran 3 times" in repr(used)
    assert [int(hit.where.rpartition(":")[2]) - line for hit in sums] == [1, 6]
    assert sqrt.op_type == "Sqrt"  # inside of a composition


def test_assert_fired_means_ran():
    with override({"Sign": SEVEN, "Relu": optional(SEVEN)}) as used:
        _, back = rg.vjp(rg.sign, 1.0)
    refused(used.assert_fired, NotFiredError, "no gradient passed through them")
    back(1.0)  # after the scope
    used.assert_fired("Sign")
    refused(lambda: used.assert_fired("Relu"), NotFiredError, "'Relu' never ran: no op of that ty")


@pytest.mark.parametrize("make", [override, OTHER], ids=["core", "torch"])
def test_a_scope_that_nobody_enters_warns(make):
    with pytest.warns(UnusedOverrideWarning, match="was not entered, .* write `with") as found:
        make({"Relu": SEVEN})
    assert found[0].filename == __file__
    make({})  # nothing is lost
    make({"Relu": SEVEN})(lambda x: x)  # the calls of the function will enter it
    for wrong in ({"Relo": "Identity"}, 3):
        refused(lambda wrong=wrong: make(wrong).__enter__(), (UnknownOpError, ArgumentError))
    scope = make({"Relu": SEVEN})
    scope.itself = scope
    del scope
    gc.collect()  # (a warning from here would blame whatever line Python collects garbage at)


# -- reports ------------------------------------------------------------------------------------

STRAIGHT = {"Sign": rg.rules.straight_through}


def test_the_table_has_rule_calls_line_and_shapes():
    with rg.gradient_override_map(STRAIGHT) as used:
        for shape in [(2, 3), (4,), (4,), (), (5, 1)]:
            rg.grad(lambda x: rg.sign(x).sum())(rg.ones(shape))
    table = used.table()
    ((*start, line, shapes),) = table.rows
    assert start == ["Sign", "straight_through", "5", "5"]
    assert "test_overrides.py:" in line
    assert shapes == "2×3, 4, scalar, and 1 more"
    headings, rule, row = str(table).splitlines()
    assert headings.startswith("op type  rule")
    assert set(rule) == {"-", " "}
    assert row.index("straight_through") == headings.index("rule")
    assert repr(table) == str(table)
    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    text = console.file.getvalue()
    assert "straight_through" in text and "┃ op type" in text


def test_untouched_counts_by_name_and_line():
    untouched = Untouched()
    for name in ("tanh", "Relu", "tanh"):
        untouched.note(name, "model.py:3")
    assert untouched.table().rows == [("Relu", "1", "model.py:3"), ("tanh", "2", "model.py:3")]
    assert len(Table(["a"], [])) == 0


def test_compiled_calls_report_their_shapes():
    f = rg.jit(rg.grad(lambda x: rg.sign(x).sum()))
    for _ in range(2):
        with rg.gradient_override_map(STRAIGHT) as used:
            f(rg.ones((2, 2)))
        assert used.table().rows[0][-1] == "2×2"


def graph_sine():
    """A sine, and what differentiates it."""
    x = tf.constant([0.5])
    y = tf.sin(x)
    return lambda: tf.Session().run(tf.gradients(y, x))


def torch_sine():
    y = torch.sin(torch.ones(2, requires_grad=True)).sum()
    return lambda: y.backward(retain_graph=True)


SINES = {
    "eager": (rg.gradient_override_map, lambda: lambda: rg.grad(rg.sin)(1.0)),
    "graph": (lambda rules: tf.get_default_graph().gradient_override_map(rules), graph_sine),
    "torch": (regrad.torch.gradient_override_map, torch_sine),
}


@pytest.mark.parametrize("kind", SINES)
def test_a_deep_copy_keeps_the_hits_of_its_time(kind):
    scope, sine = SINES[kind]
    with tf.Graph().as_default():
        with scope({"Sin": lambda dy, x: dy * 3.0}) as used:
            differentiate = sine()
            differentiate()
            now = copy.deepcopy(used)
            refused(lambda: now.__exit__(None, None, None), ArgumentError, "not open")
            differentiate()
        left = copy.deepcopy({"report": used})["report"]
        assert [now.hits[0].ran, left.hits[0].ran] == [1, 2]
        assert str(left.table()) == str(used.table())
        left.assert_fired("Sin")
        if kind != "graph":  # whose scopes are entered once
            with left:
                sine()()
            assert [left.hits[0].ran, used.hits[0].ran] == [1, 2]


def test_in_torch_the_missed_relu6_is_seen():
    model = torch.nn.Sequential(torch.nn.ReLU6(), torch.nn.ReLU())
    with regrad.torch.gradient_override_map({"Relu": "Identity"}) as used:
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert [row[:2] for row in used.untouched().rows] == [("hardtanh (Relu6)", "1"), ("Sum", "1")]
    refused(lambda: used.assert_fired("Relu6"), ArgumentError, "does not override 'Relu6'")
    used.assert_fired("Relu")
    used.assert_fired(torch.relu)


# -- errors --------------------------------------------------------------------------------------

MAPS = [
    ({"sign": SEVEN}, UnknownOpError, "no op type 'sign'. Did you mean 'Sign'"),
    ({"Matmul": SEVEN}, UnknownOpError, "Did you mean 'MatMul'"),
    ({"nonsense": SEVEN}, UnknownOpError, "no op type 'nonsense'"),
    ({"Sign": "TestsSevn"}, UnknownOpError, "Did you mean 'TestsSeven'"),
    ({"Sign": 3}, ArgumentError, "expected a registered name or a function, got 3"),
    ({3: SEVEN}, ArgumentError, "an op type is a string"),
    ([("Sign", SEVEN)], ArgumentError, "takes a dict of op types"),
    ({"Add": "AddV2", "AddV2": "Sub"}, ArgumentError, "name one op type"),
    ({"Sign": lambda dy, a: dy}, RuleError, "takes 'a'.*may name x, y"),
    ({"Sum": lambda dy, axs: dy}, RuleError, "takes 'axs'.*Did you mean 'axis'"),
    ({"Sign": lambda grad: grad}, RuleError, "first parameter is dy"),
    ({"Sign": lambda g, x: g * x}, RuleError, "first parameter is dy"),
    ({"Sign": lambda x, dy: dy}, RuleError, "first parameter is dy"),
    ({"Sign": functools.cache(by_seven)}, Exception, "'by_seven'.*functools.cache or lru_cache"),
    ({"Sign": functools.lru_cache(two)}, Exception, "'two'.*functools.cache or lru_cache"),
    ({"Sign": functools.partial(two, k=3)}, Exception, r"'two'.* takes \(\*, k=3, dy, x\)"),
    ({"Sign": abs}, Exception, r"the rule 'abs'.*takes \(x, /\)"),
    ({"Sign": rg.sin}, Exception, r"the rule 'sin'.*takes \(x, /\)"),
    ({"Sign": np.negative}, Exception, r"the rule 'negative'.*takes \(x, /, out=None"),
    ({"Sign": lambda **options: 1}, Exception, r"the rule '<lambda>'.*takes \(\*\*options\)"),
]


@pytest.mark.parametrize(("rules", "error", "words"), MAPS)
def test_maps_are_checked_before_the_scope_is_open(rules, error, words):
    refused(lambda: under(rules, pytest.fail, "the scope is open"), error, words)
    assert current() is None


MALFORMED = [
    (lambda dy: 0, "expected a Tensor, got int"),
    (lambda dy: None, "input 'x', returned None, expected a Tensor. Did it forget its"),
    (lambda dy: SEVEN, "got function. Was a function that makes rules"),
    (lambda dy: [dy, dy], "expected a Tensor, got list"),
    (lambda dy: [], "expected a Tensor, got list"),
    (lambda *args: args[0] * 3, r"'<lambda>'.*takes \(\*args\), which does not show its form"),
    (lambda grad, op: grad, r"called in TensorFlow's form, \(op, grad\)"),
    (lambda op, grad: [grad, grad], "returned 2, and the op has 1 input"),
    (lambda op, grad: [], "returned 0, and the op has 1 input"),
]


@pytest.mark.parametrize(("rule", "words"), MALFORMED)
def test_malformed_gradients(rule, words):
    refused(lambda: under({"Sign": rule}, rg.grad(rg.sign), X), Exception, words, "'Sign'|<lambda>")
    assert rg.grad(rg.sign)(1.0).item() == 0.0


taken, RegistrationError = rg.RegisterGradient, rg.errors.RegistrationError
# Gradients are summed only where the op has broadcast an input.
ERRORS = {
    "a shape of no broadcast": (lambda: under({"Mul": lambda dy: (dy, rg.ones(2))}, rg.grads(
        product), [rg.ones((2, 3)), rg.ones(3)]), RuleError, "input 'b'"),
    "another length": (lambda: under({"Mul": lambda dy: [rg.ones((7, 2))] * 2}, rg.grad(
        lambda b: (b * b).sum()), X), RuleError, r"shape \(7, 2\), expected \(2,\)"),
    "a shape for a scalar": (lambda: under({"AddV2": lambda dy: [rg.ones((3, 4))] * 2}, rg.grad(
        lambda x: x + 1.0), 2.0), RuleError, r"shape \(3, 4\), expected \(\)"),
    "not linear, forward": (lambda: under({"Sign": lambda dy: [dy + 1]}, rg.jvp, rg.sign, [X], [X]),
                            rg.errors.GradientError, "returns a nonzero gradient.* gradient is 0"),
    "a taken name": (lambda: taken("TestsSeven")(SEVEN), RegistrationError, "is taken already by"),
    "the name of an op": (lambda: taken("Sign")(SEVEN), KeyError, "by an op type"),
    "no name": (lambda: taken(3), ArgumentError, "needs a name"),
    "a second rule": (lambda: rg.gradient("Sign")(SEVEN), RegistrationError, "has a rule already"),
    "a rule of no op": (lambda: rg.gradient("sign"), UnknownOpError, "Did you mean 'Sign'"),
    "a second op": (lambda: rg.op("Sign")(lambda xp, x: x), RegistrationError, "exists already"),
}  # fmt: skip
test_errors = refusals(ERRORS)


# -- decorators ------------------------------------------------------------------------------------


def test_each_call_runs_under_the_rules():
    @override(SIGN)
    def f(x, fails=False):
        """The docs of f."""
        return 1 / 0 if fails else rg.sign(x)

    assert (f.__name__, f.__doc__) == ("f", "The docs of f.")
    assert f(X).tolist() == [1.0, 1.0]
    assert rg.grad(f)(X).tolist() == rg.grad(f)(X).tolist() == [7.0, 7.0]
    refused(lambda: f(X, fails=True), ZeroDivisionError)
    assert rg.grad(rg.sign)(X).tolist() == [0.0, 0.0]  # it has ended


def test_the_scope_has_the_hits_of_all_calls():
    scope = override(SIGN)
    f = scope(lambda x: rg.sign(x))
    refused(scope.assert_fired, NotFiredError, "no code ran in its scope")
    f(X)
    refused(scope.assert_fired, NotFiredError, "no gradient passed")
    rg.grad(f)(X)
    rg.grad(f)(rg.tensor([[1.0]]))
    scope.assert_fired()
    (hit,) = scope.hits
    assert (hit.count, hit.ran, list(hit.shapes)) == (3, 2, ["2", "1×1"])


def test_recursive_nested_and_on_several_functions():
    scope = override({"Sign": lambda dy: dy * 3})
    f = scope(lambda x, n: rg.sign(x) if n == 0 else rg.sign(f(x, n - 1)))
    g = override({"Sign": lambda dy: dy * 5})(lambda x: rg.sign(f(x, 1)))
    h = scope(lambda x: rg.sign(x))
    slopes = [rg.grad(each)(1.0).item() for each in (lambda x: f(x, 2), g, h)]
    assert slopes == [27.0, 45.0, 3.0]
    assert sum(hit.ran for hit in scope.hits) == 3 + 2 + 1


def test_methods_and_threads():
    class Model:
        factor = 2.0

        @override(SIGN)
        def run(self, x):
            return rg.sign(x) * self.factor

    assert plain(together([lambda: rg.grad(Model().run)(X)] * 4)) == [[14.0, 14.0]] * 4


def test_a_call_in_which_nothing_matches_warns_at_its_line():
    f = override({"Relu": SEVEN})(lambda x: rg.sign(x))
    with pytest.warns(UnusedOverrideWarning, match="matched nothing") as caught:
        f(X)
    assert caught[0].filename == __file__


def generator(x):
    yield rg.sign(x)


async def coroutine(x):
    return rg.sign(x)


async def both(x):
    yield rg.sign(x)


DECORATORS = {
    "core": lambda: override(SIGN), "torch": lambda: OTHER({"Relu": SEVEN}),
    "name_scope": lambda: rg.name_scope("a"), "default_dtype": lambda: rg.default_dtype("float64"),
}  # fmt: skip


@pytest.mark.parametrize("f", [generator, coroutine, both, dict, 3])
@pytest.mark.parametrize("make", DECORATORS)
def test_what_runs_after_the_call_is_refused(make, f):
    refused(lambda: DECORATORS[make]()(f), ArgumentError, r"(\w+) decorates functions; this is")


def test_under_jit_and_around_it():
    factor = 2.0
    scope = override({"Sign": lambda dy: dy * factor})
    ways = [rg.jit(scope(lambda x: rg.sign(x))), scope(rg.jit(lambda x: rg.sign(x)))]
    assert [rg.grad(f)(1.0).item() for f in ways] == [2.0, 2.0]
    factor = 7.0  # a rule that changes is traced again
    assert [rg.grad(f)(1.0).item() for f in ways] == [7.0, 7.0]
    scope.assert_fired()


def test_torch():
    scope = OTHER({"Relu": SEVEN})
    f = scope(lambda x: torch.relu(torch.sin(x)))
    a = torch.tensor([-1.0, 2.0], requires_grad=True)
    refused(scope.assert_fired, NotFiredError, "no code ran")
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(f(a).sum(), a)[0], 7 * torch.cos(a))
    scope.assert_fired()
    assert [(hit.count, hit.ran) for hit in scope.hits] == [(2, 2)]
    assert "Sin" in str(scope.untouched())


def test_in_a_graph():
    with tf.Graph().as_default() as graph, tf.Session() as session:
        scope = graph.gradient_override_map({"Sign": "Identity"})
        f = scope(lambda x: tf.sign(x))
        p = tf.constant([1.0, 2.0])
        assert session.run(tf.gradients(f(f(p)) * 5.0, p)[0]).tolist() == [5.0, 5.0]
        scope.assert_fired()
        assert [hit.count for hit in scope.hits] == [2]
        wrong = graph.gradient_override_map(3)(f)  # pyright: ignore[reportArgumentType]
        refused(lambda: wrong(p), ArgumentError, "op_type_map must be a dictionary")
