"""Ctrl-C, or any handler of a signal that raises, leaves nothing in force and loses no value."""

import os
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager

import jax
import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core import interrupts as deferral
from regrad.core.blocks import block
from regrad.core.interrupts import Deferred, at_once
from regrad.core.state import STATE, State, current
from tests.campaigns import interrupts
from tests.campaigns.verdicts import DELIVERED, EXPLAINED, SILENT


@pytest.fixture(autouse=True)
def by_default():
    with interrupts.handled(signal.SIGINT, signal.default_int_handler):
        yield


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


# -- at any moment: a slice of the campaign ------------------------------------------------------


@pytest.mark.versions
@pytest.mark.parametrize("name", interrupts.EAGER)
def test_nothing_is_left_in_force(name):
    outcomes = set(interrupts.struck(interrupts.EAGER[name], 100, seed=1))
    assert {o for o in outcomes if o[0] != EXPLAINED} == {(DELIVERED, "")}


@pytest.mark.parametrize("name", interrupts.LOOPS)
def test_no_variable_is_lost(name):
    found = Counter(interrupts.interrupted(interrupts.LOOPS[name], 40, seed=1))
    assert found == {(DELIVERED, ""): 40}


POSIX = os.name == "posix"
OTHERS = [signal.SIGUSR1, signal.SIGHUP, signal.SIGPROF, signal.SIGRTMIN + 3] if POSIX else []
CLOCKS = {"SIGALRM": "ITIMER_REAL", "SIGVTALRM": "ITIMER_VIRTUAL", "SIGPROF": "ITIMER_PROF"}


@pytest.mark.parametrize("number", OTHERS)
@pytest.mark.parametrize("name", ["by_jit", "by_jit_small", "by_session"])
def test_every_signal_with_a_handler_waits(name, number):
    found = Counter(interrupts.interrupted(interrupts.LOOPS[name], 40, seed=1, number=number))
    assert found == {(DELIVERED, ""): 40}


@pytest.mark.skipif(not POSIX, reason="Windows has no such timers")
@pytest.mark.parametrize("name", CLOCKS)
@pytest.mark.parametrize("kind", ["by_jit", "by_jit_small", "by_session"])
def test_a_handler_may_save(name, kind, tmp_path):
    """By timers of the system, at any moment of the training."""
    loop = interrupts.LOOPS[kind]()
    loop.step()
    seen = []

    def handler(number, frame):
        values = loop.values()
        copies = [rg.Variable(v, name=f"v{i}") for i, v in enumerate(values)]
        rg.train.save(tmp_path / "a.safetensors", copies)
        seen.append(len(np.unique(np.concatenate([np.ravel(v) for v in values]))))
        signal.setitimer(clock, 0.002)

    clock, end = getattr(signal, CLOCKS[name]), time.monotonic() + 20
    limit = signal.alarm(0)  # of the test run, which has the same timer
    with interrupts.handled(getattr(signal, name), handler):
        signal.setitimer(clock, 0.002)
        try:
            while len(seen) < 40 and time.monotonic() < end:
                loop.step()
        finally:
            signal.setitimer(clock, 0)
    signal.alarm(limit)
    assert len(seen) >= 40 and set(seen) == {1} and interrupts.lost(loop) == ""


@pytest.mark.skipif(not POSIX, reason="Windows has no SIGUSR1")
def test_a_handler_may_save_while_a_step_is_traced(tmp_path):
    w = rg.Variable(np.ones(4, "float32"), name="w")
    path = tmp_path / "w.safetensors"

    @rg.jit
    def step(x):
        w.assign(w * x)
        signal.raise_signal(signal.SIGUSR1)
        assert not path.exists() or path.unlink() is None, "it runs in the trace, not after it"

    with interrupts.handled(signal.SIGUSR1, lambda *_: rg.train.save(path, [w])):
        step(rg.ones(4))  # before it is known that a Variable is assigned
        path.write_bytes(b"")
        step(rg.ones(()))
    assert not path.exists() and w.tolist() == [1.0] * 4
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_handlers_that_are_set_in_a_trace_stay():
    def mine(number, frame):
        raise ZeroDivisionError

    with interrupts.handled(signal.SIGTERM, signal.SIG_DFL):
        with Deferred(), at_once():
            signal.signal(signal.SIGINT, mine)
            signal.signal(signal.SIGTERM, mine)
        for number in (signal.SIGINT, signal.SIGTERM):
            assert signal.getsignal(number) is mine
        with pytest.raises(ZeroDivisionError):
            ctrl_c()


@pytest.mark.skipif(not POSIX, reason="Windows has no SIGUSR1")
def test_a_handler_that_raises_while_the_others_are_put_back():
    """Each of them is put back, and each signal that came has its handler run."""
    log = []

    def fails(number, frame):
        log.append(number)
        raise ZeroDivisionError

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    with ExitStack() as stack:
        for number in numbers:
            stack.enter_context(interrupts.handled(number, fails))
        with pytest.raises(ZeroDivisionError), Deferred():
            for number in numbers:
                signal.raise_signal(number)
        assert log == numbers

        set_handler = deferral.set_handler
        struck = []

        def set_and_strike(number, handler):
            set_handler(number, handler)
            if handler is fails and not struck:
                struck.append(number)
                signal.raise_signal(number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deferral, "set_handler", set_and_strike)
            with pytest.raises(ZeroDivisionError), Deferred():
                pass
        assert struck == [signal.SIGUSR1]
        assert [signal.getsignal(number) for number in numbers] == [fails] * 3


def test_the_campaign_can_fail():
    @contextmanager
    def careless():
        before = current()
        STATE.set(State())
        try:
            yield
        finally:
            STATE.set(before)

    def f():
        with careless():
            pass

    outcomes = {outcome for outcome, _ in interrupts.struck(f, 3000, seed=1)}
    assert {DELIVERED, SILENT} <= outcomes


# -- blocks --------------------------------------------------------------------------------------


def test_a_block_undoes_what_it_did():
    log = []

    @block
    def noted(x):
        try:
            log.append(x)
            yield x
        finally:
            log.append(-x)

    with noted(1) as x, noted(2):
        assert (x, log) == (1, [1, 2])
    assert log == [1, 2, -2, -1]
    with pytest.raises(ZeroDivisionError), noted(3):
        raise ZeroDivisionError
    with ExitStack() as stack:
        assert stack.enter_context(noted(4)) == 4
    assert log[4:] == [3, -3, 4, -4]


def test_no_python_runs_between_the_generator_and_the_block():
    """Python may look for signals wherever a function of its own returns to the `with`."""
    frames = []

    def note(frame, event, _):
        if event in ("call", "return"):
            frames.append((event, frame.f_code.co_name))

    scope = rg.gradient_override_map({"Sign": "Identity"})
    sys.setprofile(note)
    try:
        with scope:
            entered = frames.copy()
            rg.sign(1.0)
            frames.clear()
    finally:
        sys.setprofile(None)
    assert entered[-1] == ("return", "_steps")
    assert frames[0] == ("call", "_steps")


def test_a_scope_may_be_used_without_with():
    scope = rg.gradient_override_map({"Sign": "Identity"})
    used = scope.__enter__()
    assert rg.grad(rg.sign)(2.0).item() == 1.0
    scope.__exit__(None, None, None)
    assert current() is None
    used.assert_fired()


def test_a_scope_is_open_once_at_a_time():
    scope = rg.gradient_override_map({"Sign": "Identity"})
    with scope:
        with pytest.raises(rg.errors.ArgumentError, match="open already"), scope:
            pass
        assert rg.grad(rg.sign)(2.0).item() == 1.0  # (the outer block goes on)
    assert current() is None
    with scope:
        assert rg.grad(rg.sign)(2.0).item() == 1.0


def test_a_session_is_entered_once():
    with tf.Graph().as_default():
        tf.constant(1.0)
        with tf.Session() as session:
            with pytest.raises(rg.errors.ArgumentError, match="as_default"), session:
                pass
            with session.as_default():
                assert tf.get_default_session() is session
    assert tf.get_default_session() is None


# -- signals that wait ---------------------------------------------------------------------------


def test_a_signal_waits_for_the_end_of_the_block():
    log = []
    with pytest.raises(KeyboardInterrupt):
        with Deferred():
            ctrl_c()
            log.append("the rest of the block")
        log.append("what comes after it")
    assert log == ["the rest of the block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_blocks_nest():
    with pytest.raises(KeyboardInterrupt), Deferred():
        with Deferred():
            ctrl_c()
        reached = True
    assert reached


def test_handlers_run_in_order_and_see_the_number():
    log = []
    with interrupts.handled(signal.SIGTERM, lambda number, frame: log.append(number)):
        with Deferred():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert log == []
        assert log == [signal.SIGTERM] * 2


def test_at_once_handlers_run_as_ever():
    with pytest.raises(KeyboardInterrupt), Deferred():
        with at_once():
            ctrl_c()
        pytest.fail("the handler did not run")
    with pytest.raises(KeyboardInterrupt), Deferred():
        ctrl_c()
        with at_once():  # what is due comes first
            pytest.fail("the handler did not run")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_have_no_handlers():
    errors = []

    def run():
        try:
            with Deferred(), at_once():
                pass
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []


def test_ignored_and_default_signals_stay_what_they_are():
    with interrupts.handled(signal.SIGINT, signal.SIG_IGN):
        with Deferred():
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


# -- errors between the donation and the assignment ------------------------------------------------


@pytest.fixture
def looks_for_nan():
    with jax.debug_nans(True):
        yield


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_where_jax_finds_nan_variables_keep_their_values(looks_for_nan, capfd):
    v = rg.Variable(np.ones(3, "f4"))

    @rg.jit
    def step(x):
        v.assign(v * x)
        return rg.sum(rg.log(v))

    assert step(rg.scalar(2.0)).item() == pytest.approx(3 * np.log(2.0))
    with pytest.raises(FloatingPointError, match="nan"):
        step(rg.scalar(-1.0)).item()
    assert v.value.tolist() == [2.0, 2.0, 2.0]
    with tf.Graph().as_default(), tf.Session(jit=True) as session:
        w, x = tf.Variable(np.ones(3, "f4")), tf.placeholder(tf.float32, [])
        grown = tf.assign(w, tf.log(w * x))
        session.run(tf.global_variables_initializer())
        with pytest.raises(FloatingPointError, match="nan"):
            session.run(grown, {x: -1.0})
        assert session.run(w).tolist() == [1.0, 1.0, 1.0]


def test_an_error_in_the_trace_leaves_variables_alone():
    v = rg.Variable([1.0])

    @rg.jit
    def step(n):
        v.assign(v * 2.0)
        if len(n) == 2:
            raise KeyboardInterrupt
        return rg.sum(n)

    step(rg.tensor([1.0]))
    with pytest.raises(KeyboardInterrupt):
        step(rg.tensor([1.0, 2.0]))
    assert v.value.item() == 2.0
    step(rg.tensor([1.0]))
    assert v.value.item() == 4.0


def test_the_trace_of_a_step_is_interrupted_at_once():
    v = rg.Variable([1.0])
    reached = []

    @rg.jit
    def step(x):
        v.assign(v * 2.0)
        if len(x) == 2:
            ctrl_c()
            reached.append(True)
        return rg.sum(x)

    step(rg.tensor([1.0]))
    with pytest.raises(KeyboardInterrupt):
        step(rg.tensor([1.0, 1.0]))
    assert reached == [] and v.value.item() == 2.0


def test_signals_of_other_processes_wait_too():
    with pytest.raises(KeyboardInterrupt), Deferred():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # (it comes between two instructions)
            sys.getrefcount(None)
