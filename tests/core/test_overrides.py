"""Overrides by op type: binding, scopes, hits, errors, confinement."""

import asyncio
import contextlib
import gc
import threading
import warnings

import numpy as np
import pytest

import regrad as rg
from regrad.errors import (
    ArgumentError,
    NotFiredError,
    RegistrationError,
    RuleError,
    UnknownOpError,
    UnusedOverrideWarning,
)

SEVEN = lambda dy: dy * 7  # noqa: E731


@contextlib.contextmanager
def unused_is_fine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedOverrideWarning)
        yield


@pytest.fixture(scope="module", autouse=True)
def names():
    rg.RegisterGradient("TestsSeven")(SEVEN)
    rg.RegisterGradient("TestsSevenTF")(lambda op, grad: grad * 7)


@pytest.mark.parametrize(
    "rule",
    [SEVEN, "TestsSeven", "TestsSevenTF", lambda op, grad: grad * 7, lambda dy, x, y: dy * 7],
)
def test_forms_of_rules(rule):
    with rg.gradient_override_map({"Sign": rule}) as used:
        assert rg.grad(rg.sign)(0.5).item() == 7.0
    used.assert_fired()


def test_the_rule_of_another_op_type():
    with rg.gradient_override_map({"Round": "Identity"}):
        assert rg.grad(rg.round)(0.4).item() == 1.0
    with rg.gradient_override_map({"Identity": "Exp"}):
        assert rg.grad(rg.identity)(3.0).item() == 3.0


def test_tensorflow_form_sees_the_record():
    seen = []

    def rule(op, grad):
        seen.append((op.type, op.name, len(op.inputs), len(op.outputs)))
        assert op.inputs[0].item() == 2.0
        assert op.outputs[0].item() == 6.0
        return grad * 10, None

    with rg.gradient_override_map({"Mul": rule}):
        da, db = rg.grads(lambda a, b: a * b)([2.0, 3.0])
    assert (da.item(), db.item()) == (10.0, 0.0)
    assert seen == [("Mul", "multiply", 2, 1)]


def test_attributes():
    def rule(op, grad):
        assert op.get_attr("axis") == 1
        with pytest.raises(RuleError, match="no attribute 'axes'"):
            op.get_attr("axes")
        return rg.broadcast_to(rg.expand_dims(grad, 1), op.inputs[0].shape) * 3

    with rg.gradient_override_map({"Sum": rule}):
        dx = rg.grad(lambda x: rg.sum(x, axis=1))(rg.ones((2, 2)))
    assert dx.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_binding_is_at_creation():
    def f(x):
        with rg.gradient_override_map({"Sign": SEVEN}):
            return rg.sign(x)

    assert rg.grad(f)(0.5).item() == 7.0

    # where the derivative is asked for does not matter
    _, back = rg.vjp(lambda x: rg.sign(x) * 1.0, rg.scalar(0.5))
    with unused_is_fine(), rg.gradient_override_map({"Sign": SEVEN, "Mul": lambda dy: (dy, dy)}):
        assert back(1.0)[0].item() == 0.0


def test_nesting_and_shadowing():
    double, triple = (lambda dy: dy * 2), (lambda dy: dy * 3)
    with rg.gradient_override_map({"Sign": double, "Round": double}) as outer:
        with rg.gradient_override_map({"Sign": triple}) as inner:
            assert rg.grad(rg.sign)(0.5).item() == 3.0
            assert rg.grad(rg.round)(0.5).item() == 2.0
        assert rg.grad(rg.sign)(0.5).item() == 2.0
    assert rg.grad(rg.sign)(0.5).item() == 0.0
    assert [h.op_type for h in inner.hits] == ["Sign"]
    assert {h.op_type for h in outer.hits} == {"Sign", "Round"}


def test_overrides_fire_inside_compositions():
    with rg.gradient_override_map({"Sqrt": SEVEN}) as used:
        rg.grad(lambda x: rg.std(x))(rg.tensor([1.0, 2.0, 4.0]))
    used.assert_fired("Sqrt")


def test_aliases_and_reads_of_variables_are_not_identities():
    v = rg.Variable(2.0)
    with rg.gradient_override_map({"Identity": SEVEN}):
        assert rg.variable_grads(lambda: v * 1.0).grads[v.name].item() == 1.0
        assert rg.grad(rg.grad(lambda x: x * x))(2.0).item() == 2.0
        assert rg.grad(rg.identity)(1.0).item() == 7.0


def test_what_is_free_becomes_watched_under_a_rule():
    surrogate = lambda dy, a, b: (dy, None)  # noqa: E731
    with rg.gradient_override_map({"Greater": surrogate}):
        y = lambda x: rg.astype(x > 0, rg.float32) * 3  # noqa: E731
        assert rg.grad(y)(rg.tensor([0.5, -1.0])).tolist() == [3.0, 3.0]
    with rg.gradient_override_map({"StopGradient": "Identity"}):
        assert rg.grad(rg.stop_gradient)(2.0).item() == 1.0
    with rg.gradient_override_map({"Cast": lambda dy: dy}):
        f = lambda x: rg.astype(rg.astype(x, "int32") * 2, rg.float32)  # noqa: E731
        assert rg.grad(f)(2.7).item() == 2.0


def test_the_rules_and_the_walk_are_masked():
    # the rule for Exp multiplies; an override of Mul must not reach it
    with unused_is_fine(), rg.gradient_override_map({"Mul": lambda dy: (dy * 0, dy * 0)}):
        np.testing.assert_allclose(rg.grad(rg.exp)(1.0).item(), np.e, rtol=1e-6)


def test_orders():
    # the rule is y' = x: second derivative 1, whatever Sign is
    with rg.gradient_override_map({"Sign": lambda dy, x: dy * x}):
        assert rg.grad(rg.grad(rg.sign))(3.0).item() == 1.0
    # a rule that uses y goes back through the overridden op
    with rg.gradient_override_map({"Sign": lambda dy, y: dy * y}) as used:
        assert rg.grad(rg.grad(rg.sign))(3.0).item() == 1.0
    assert used.hits[0].ran == 2


def test_alias_names_of_op_types():
    with rg.gradient_override_map({"Add": lambda dy: (dy * 2, dy * 3)}) as used:
        da, db = rg.grads(lambda a, b: a + b)([1.0, 1.0])
    assert (da.item(), db.item()) == (2.0, 3.0)
    assert used.hits[0].op_type == "AddV2"


# -- hits ----------------------------------------------------------------------------------------


def test_hits_tell_type_rule_line_and_counts():
    def model(x):
        for _ in range(3):
            x = rg.sign(x) + x  # this line
        return x

    line = model.__code__.co_firstlineno + 2
    with rg.gradient_override_map({"Sign": "TestsSeven"}) as used:
        model(rg.scalar(1.0))
        rg.grad(model)(1.0)
    (hit,) = used.hits
    assert (hit.op_type, hit.rule, hit.count, hit.ran) == ("Sign", "TestsSeven", 6, 3)
    assert hit.where.endswith(f"test_overrides.py:{line}")
    assert "Sign <- TestsSeven: 6 created, rule ran 3 times" in repr(used)


def test_assert_fired_means_ran():
    with rg.gradient_override_map({"Sign": SEVEN}) as used:
        rg.sign(rg.scalar(1.0))
    with pytest.raises(NotFiredError, match="no gradient passed them"):
        used.assert_fired()
    with unused_is_fine(), rg.gradient_override_map({"Sign": SEVEN, "Relu": SEVEN}) as used:
        rg.grad(rg.sign)(1.0)
    used.assert_fired("Sign")
    with pytest.raises(NotFiredError, match="'Relu' never ran: no op of that type"):
        used.assert_fired()


def test_the_rule_counts_after_the_scope():
    with rg.gradient_override_map({"Sign": SEVEN}) as used:
        _, back = rg.vjp(rg.sign, rg.scalar(1.0))
    assert used.hits[0].ran == 0
    back(1.0)
    used.assert_fired()


@pytest.mark.parametrize("override", [rg.gradient_override_map, rg.torch.gradient_override_map])
def test_a_scope_that_nobody_enters_warns(override):
    with pytest.warns(UnusedOverrideWarning, match="was not entered, .* write `with") as found:
        override({"Relu": lambda dy: dy})
    assert found[0].filename == __file__
    override({})  # nothing is lost
    override({"Relu": lambda dy: dy})(lambda x: x)  # the calls of the function will enter it
    for wrong in ({"Relo": "Identity"}, 3):
        with pytest.raises((UnknownOpError, ArgumentError)), override(wrong):
            pass
    scope = override({"Relu": lambda dy: dy})
    scope.itself = scope
    del scope
    gc.collect()  # (a warning from here would blame whatever line Python collects garbage at)


def test_an_unused_scope_warns():
    with pytest.warns(UnusedOverrideWarning, match=r"matched nothing.*'Relu6'"):  # noqa: SIM117
        with rg.gradient_override_map({"Relu6": SEVEN}):
            rg.nn.relu(rg.scalar(1.0))


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        ({"sign": SEVEN}, UnknownOpError, "no op type 'sign'. Did you mean 'Sign'"),
        ({"Matmul": SEVEN}, UnknownOpError, "Did you mean 'MatMul'"),
        ({"nonsense": SEVEN}, UnknownOpError, "no op type 'nonsense'"),
        ({"Sign": "TestsSevn"}, UnknownOpError, "Did you mean 'TestsSeven'"),
        ({"Sign": 3}, ArgumentError, "expected a registered name or a function, got 3"),
        ({3: SEVEN}, ArgumentError, "an op type is a string"),
        ([("Sign", SEVEN)], ArgumentError, "takes a dict of op types"),
        ({"Sign": lambda dy, a: dy}, RuleError, "asks for 'a'.*may name x, y"),
        ({"Sum": lambda dy, axs: dy}, RuleError, "asks for 'axs'.*Did you mean 'axis'"),
        ({"Sign": lambda grad: grad}, RuleError, "first parameter is dy"),
        ({"Sign": lambda g, x: g * x}, RuleError, "first parameter is dy"),
        ({"Sign": "MatMul"}, RuleError, "inputs a, b"),
    ],
)
def test_maps_are_checked_when_the_scope_is_entered(rules, error, words):
    with pytest.raises(error, match=words):  # noqa: SIM117
        with rg.gradient_override_map(rules):
            raise AssertionError("the scope was entered")
    assert rg.grad(rg.sign)(1.0).item() == 0.0


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda dy: 0, "expected a Tensor, got int"),
        (lambda dy: None, "'Sign', input 'x', returned None, expected a Tensor. Did it forget its"),
        (rg.rules.no_gradient, None),
        (lambda dy: [None], None),
        (lambda op, grad: None, None),
        (lambda dy: SEVEN, "got function. Was a function that makes rules"),
        (lambda dy: dy[:1], r"returned the shape \(1,\), expected \(2,\)"),
        (lambda dy: rg.astype(dy, rg.float64), "returned the dtype float64, expected float32"),
        (lambda op, grad: [grad, grad], "returned 2, and the op has 1 input"),
        (lambda op, grad: [], "returned 0, and the op has 1 input"),
    ],
)
def test_malformed_gradients(rule, words):
    with rg.gradient_override_map({"Sign": rule}):
        if words is None:
            assert rg.grad(rg.sign)([1.0, 2.0]).tolist() == [0.0, 0.0]
        else:
            with pytest.raises(RuleError, match=words) as caught:
                rg.grad(rg.sign)([1.0, 2.0])
            assert "'Sign'" in str(caught.value)


def test_wrong_shapes_are_summed_only_where_the_op_broadcasts():
    a, b = rg.ones((2, 3)), rg.ones((3,))
    with rg.gradient_override_map({"Mul": lambda dy: (dy, dy)}):
        _, db = rg.grads(lambda a, b: a * b)([a, b])
    assert db.tolist() == [2.0, 2.0, 2.0]
    with (
        rg.gradient_override_map({"Mul": lambda dy: (dy, rg.ones((2,)))}),
        pytest.raises(RuleError, match="input 'b'"),
    ):
        rg.grads(lambda a, b: a * b)([a, b])


def test_registration():
    with pytest.raises(RegistrationError, match="'TestsSeven' is taken already by"):
        rg.RegisterGradient("TestsSeven")(SEVEN)
    with pytest.raises(KeyError, match="by an op type"):
        rg.RegisterGradient("Sign")(SEVEN)
    with pytest.raises(ArgumentError, match="needs a name"):
        rg.RegisterGradient(3)
    with pytest.raises(RegistrationError, match="has a rule already"):
        rg.gradient("Sign")(SEVEN)
    with pytest.raises(UnknownOpError, match="Did you mean 'Sign'"):
        rg.gradient("sign")
    with pytest.raises(RegistrationError, match="exists already"):
        rg.op("Sign")(lambda xp, x: x)


def test_a_scope_is_not_entered_twice():
    scope = rg.gradient_override_map({"Sign": SEVEN})
    with scope:
        rg.sign(rg.scalar(1.0))
        with pytest.raises(ArgumentError, match="open already"):
            scope.__enter__()


# -- confinement -----------------------------------------------------------------------------------


def test_threads_that_were_started_before_have_no_overrides():
    found, opened = [], threading.Event()
    thread = threading.Thread(
        target=lambda: opened.wait(60) and found.append(rg.grad(rg.sign)(1.0).item())
    )
    thread.start()
    with rg.gradient_override_map({"Sign": SEVEN}):
        rg.sign(rg.scalar(1.0))
        opened.set()
        thread.join()
    assert found == [0.0]


def test_threads_with_different_overrides_do_not_mix():
    wrong = []

    def work(k):
        for _ in range(100):
            with rg.gradient_override_map({"Sign": lambda dy: dy * k}):
                if rg.grad(lambda x: rg.sign(x) * x)(2.0).item() != 2 * k + 1:
                    wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_tasks_inherit_a_copy():
    async def later():
        await asyncio.sleep(0.01)
        return rg.grad(rg.sign)(1.0).item()

    async def main():
        with rg.gradient_override_map({"Sign": SEVEN}):
            rg.sign(rg.scalar(1.0))
            task = asyncio.create_task(later())
        plain = rg.grad(rg.sign)(1.0).item()
        return plain, await task  # the task outlives the scope in which it was made

    assert asyncio.run(main()) == (0.0, 7.0)


def test_tasks_do_not_leak_overrides_to_each_other():
    async def one(k):
        with rg.gradient_override_map({"Sign": lambda dy: dy * k}):
            rg.sign(rg.scalar(1.0))
            await asyncio.sleep(0.001 * k)
            return rg.grad(rg.sign)(1.0).item()

    async def main():
        return await asyncio.gather(*[one(k) for k in range(6)])

    assert asyncio.run(main()) == [float(k) for k in range(6)]
