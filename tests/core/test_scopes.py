"""A scope of overrides as a decorator."""

import threading

import pytest
import torch

import regrad as rg
import regrad.torch
import regrad.v1 as tf
from regrad.errors import ArgumentError, NotFiredError, RuleError, UnusedOverrideWarning

x = rg.tensor([-2.0, 0.5])


def tripled(dy):
    return dy * 3


def test_each_call_runs_under_the_rules():
    @rg.gradient_override_map({"Sign": tripled})
    def f(x):
        """What f does."""
        return rg.sign(x)

    assert (f.__name__, f.__doc__) == ("f", "What f does.")
    assert f(x).tolist() == [-1.0, 1.0]
    assert rg.grad(f)(x).tolist() == rg.grad(f)(x).tolist() == [3.0, 3.0]
    assert rg.grad(rg.sign)(x).tolist() == [0.0, 0.0]  # it has ended


def test_the_hits_of_all_calls_are_told_by_the_scope():
    scope = rg.gradient_override_map({"Sign": tripled})
    f = scope(lambda x: rg.sign(x))
    with pytest.raises(NotFiredError, match="no code ran in its scope"):
        scope.assert_fired()
    f(x)
    with pytest.raises(NotFiredError, match="no gradient passed"):
        scope.assert_fired()
    rg.grad(f)(x)
    rg.grad(f)(rg.tensor([[1.0]]))
    scope.assert_fired()
    (hit,) = scope.hits
    assert (hit.count, hit.ran, list(hit.shapes)) == (3, 2, ["2", "1×1"])


def test_recursive_nested_and_on_several_functions():
    scope = rg.gradient_override_map({"Sign": tripled})

    @scope
    def f(x, n):
        return rg.sign(x) if n == 0 else rg.sign(f(x, n - 1))

    @rg.gradient_override_map({"Sign": lambda dy: dy * 5})
    def g(x):
        return rg.sign(f(x, 1))

    h = scope(lambda x: rg.sign(x))
    assert rg.grad(lambda x: f(x, 2))(x).tolist() == [27.0, 27.0]
    assert rg.grad(g)(x).tolist() == [45.0, 45.0]
    assert rg.grad(h)(x).tolist() == [3.0, 3.0]
    assert sum(hit.ran for hit in scope.hits) == 3 + 2 + 1


def test_an_error_closes_the_scope():
    @rg.gradient_override_map({"Sign": tripled})
    def f(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        f(x)
    assert rg.grad(rg.sign)(x).tolist() == [0.0, 0.0]


def test_methods_and_threads():
    class Model:
        factor = 2.0

        @rg.gradient_override_map({"Sign": tripled})
        def run(self, x):
            return rg.sign(x) * self.factor

    found = []
    model = Model()
    threads = [
        threading.Thread(target=lambda: found.append(rg.grad(model.run)(x).tolist()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[6.0, 6.0]] * 4


def test_a_call_in_which_nothing_matches_warns_at_its_line():
    f = rg.gradient_override_map({"Relu": tripled})(lambda x: rg.sign(x))
    with pytest.warns(UnusedOverrideWarning, match="matched nothing") as caught:
        f(x)
    assert caught[0].filename == __file__


def generator(x):
    yield rg.sign(x)


async def coroutine(x):
    return rg.sign(x)


async def both(x):
    yield rg.sign(x)


@pytest.mark.parametrize("f", [generator, coroutine, both, dict, 3])
@pytest.mark.parametrize("make", [rg.gradient_override_map, regrad.torch.gradient_override_map])
def test_what_runs_after_the_call_is_refused(make, f):
    with pytest.raises(ArgumentError, match="decorates functions; this is"):
        make({"Relu": tripled})(f)


def test_under_jit_and_around_it():
    factor = 2.0

    def rule(dy):
        return dy * factor

    scope = rg.gradient_override_map({"Sign": rule})
    inside = rg.jit(scope(lambda x: rg.sign(x)))
    around = scope(rg.jit(lambda x: rg.sign(x)))
    for f in (inside, around):
        assert rg.grad(f)(x).tolist() == [factor, factor]
    factor = 7.0  # a rule that changes is traced again
    for f in (inside, around):
        assert rg.grad(f)(x).tolist() == [7.0, 7.0]
    scope.assert_fired()


def test_a_wrong_map_is_refused_at_the_call():
    f = rg.gradient_override_map({"Sign": lambda dy, z: dy})(lambda x: rg.sign(x))
    with pytest.raises(RuleError, match="asks for 'z'"):
        f(x)


def test_torch():
    scope = regrad.torch.gradient_override_map({"Relu": tripled})
    f = scope(lambda x: torch.relu(torch.sin(x)))
    a = torch.tensor([-1.0, 2.0], requires_grad=True)
    with pytest.raises(NotFiredError, match="no code ran"):
        scope.assert_fired()
    for _ in range(2):
        (da,) = torch.autograd.grad(f(a).sum(), a)
        assert torch.equal(da, 3 * torch.cos(a))
    scope.assert_fired()
    assert [(hit.count, hit.ran) for hit in scope.hits] == [(2, 2)]
    assert "Sin" in str(scope.untouched())


def test_in_a_graph():
    graph = tf.Graph()
    with graph.as_default(), tf.Session() as session:
        scope = graph.gradient_override_map({"Sign": "Identity"})
        f = scope(lambda x: tf.sign(x))
        p = tf.constant([1.0, 2.0])
        assert session.run(tf.gradients(f(f(p)) * 5.0, p)[0]).tolist() == [5.0, 5.0]
        scope.assert_fired()
        assert [hit.count for hit in scope.hits] == [2]
        with pytest.raises(ArgumentError, match="op_type_map must be a dictionary"):
            graph.gradient_override_map(3)(f)(p)  # pyright: ignore[reportArgumentType]
