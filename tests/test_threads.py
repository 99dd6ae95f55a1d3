"""A Tensor that one thread differentiates is refused in the ops of another."""

import contextvars
import threading

import pytest

import regrad as rg
from regrad.errors import GradientError
from regrad.state import BESIDE, OPEN

OPS = {"unary": rg.sin, "binary": lambda x: x * x, "long": rg.sum, "mixed": lambda x: 2.0 * x + 1.0}


def plainly(op, x):
    return op(x)


def in_a_scope(op, x):
    with rg.gradient_override_map({"Cos": lambda dy: dy}):
        rg.cos(1.0)
        return op(x)


def under_a_tape(op, x):
    return rg.grad(lambda w: w * op(x).sum())(2.0)


def under_two_tapes(op, x):
    return rg.grad(rg.grad(lambda w: w * w * op(x).sum()))(2.0)


def in_a_custom_function(op, x):
    @rg.custom_grad
    def f(w):
        return w * op(x).sum(), lambda dy: dy

    return rg.grad(f)(2.0)


PLACES = [plainly, in_a_scope, under_a_tape, under_two_tapes, in_a_custom_function]


class Other(threading.Thread):
    """A thread that keeps what its function answers, or raises."""

    def __init__(self, run, *args):
        super().__init__()
        self.work = run, args
        self.error = self.answer = None
        self.start()

    def run(self):
        run, args = self.work
        try:
            self.answer = run(*args)
        except GradientError as error:
            self.error = error


@pytest.fixture(autouse=True)
def nothing_is_left_open():
    yield
    assert not OPEN and not BESIDE


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("place", PLACES)
def test_another_threads_tensor_is_refused(place, op):
    def f(x):
        other = Other(place, op, x)
        other.join()
        assert "another thread is differentiating" in str(other.error)
        return x * 3.0

    assert rg.grad(f)(2.0).item() == 3.0


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("place", PLACES[2:])
def test_also_by_a_tape_that_is_older(place, op):
    """The other thread's tape was open before this one's."""
    began, shared, given = threading.Event(), threading.Event(), []

    def late(x):
        began.set()
        assert shared.wait(60)
        return op(given[0])

    def f(x):
        given.append(x)
        shared.set()
        other.join()
        assert "another thread is differentiating" in str(other.error)
        return x * 3.0

    other = Other(place, late, None)
    assert began.wait(60)
    assert rg.grad(f)(2.0).item() == 3.0


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("place", PLACES[:-1])
def test_a_thread_in_the_same_context_sees_the_tape(place, op):
    def f(x):
        other = Other(contextvars.copy_context().run, place, op, x)
        other.join()
        assert other.error is None
        return x * other.answer.sum()

    assert rg.grad(f)(2.0).item() != place(op, rg.scalar(2.0)).item()


@pytest.mark.parametrize("place", PLACES)
def test_threads_that_share_nothing_are_not_refused(place):
    """Each differentiates its own, all at once."""
    due = [place(rg.sin, rg.scalar(k)).item() for k in range(4)]
    together = threading.Barrier(4)

    def work(k):
        together.wait(60)
        for _ in range(50):
            y = rg.value_and_grad(lambda x: x * place(rg.sin, rg.scalar(k)).sum())(1.0)
        return y.value.item()

    others = [Other(work, k) for k in range(4)]
    for other in others:
        other.join()
    assert [other.error for other in others] == [None] * 4
    assert [other.answer for other in others] == pytest.approx(due)
