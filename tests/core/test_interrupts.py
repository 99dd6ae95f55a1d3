"""Ctrl-C, or any handler of a signal that raises, leaves nothing in force and loses no value."""

import os
import signal
import sys
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
from regrad.errors import ArgumentError
from tests.campaigns import interrupts
from tests.campaigns.interrupts import handled
from tests.campaigns.verdicts import DELIVERED, EXPLAINED, SILENT
from tests.helpers.rows import in_thread, refused


@pytest.fixture(autouse=True)
def by_default():
    with handled(signal.SIGINT, signal.default_int_handler):
        yield


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


# -- at any moment: a slice of the campaign ------------------------------------------------------

POSIX = os.name == "posix"
OTHERS = [signal.SIGUSR1, signal.SIGHUP, signal.SIGPROF, signal.SIGRTMIN + 3] if POSIX else []
CLOCKS = {"SIGALRM": "ITIMER_REAL", "SIGVTALRM": "ITIMER_VIRTUAL", "SIGPROF": "ITIMER_PROF"}
COMPILED = ["by_jit", "by_jit_small", "by_session"]
STRUCK = [(name, signal.SIGINT) for name in interrupts.LOOPS]
posix = pytest.mark.skipif(not POSIX, reason="Windows has no such signals")


@pytest.mark.versions
@pytest.mark.parametrize("name", interrupts.EAGER)
def test_nothing_is_left_in_force(name):
    outcomes = set(interrupts.struck(interrupts.EAGER[name], 100, seed=1))
    assert {o for o in outcomes if o[0] != EXPLAINED} == {(DELIVERED, "")}


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(("name", "number"), STRUCK + [(n, s) for n in COMPILED for s in OTHERS])
def test_no_variable_is_lost(name, number):
    found = Counter(interrupts.interrupted(interrupts.LOOPS[name], 40, seed=1, number=number))
    assert found == {(DELIVERED, ""): 40}


@pytest.mark.slow(but=2)
@posix
@pytest.mark.parametrize("name", CLOCKS)
@pytest.mark.parametrize("kind", COMPILED)
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
    with handled(getattr(signal, name), handler):
        signal.setitimer(clock, 0.002)
        try:
            while len(seen) < 40 and time.monotonic() < end:
                loop.step()
        finally:
            signal.setitimer(clock, 0)
    signal.alarm(limit)
    assert len(seen) >= 40 and set(seen) == {1} and interrupts.lost(loop) == ""


@posix
def test_a_handler_may_save_while_a_step_is_traced(tmp_path):
    w, path = rg.Variable(np.ones(4, "float32"), name="w"), tmp_path / "w.safetensors"

    @rg.jit
    def step(x):
        w.assign(w * x)
        signal.raise_signal(signal.SIGUSR1)
        assert not path.exists() or path.unlink() is None, "it runs in the trace, not after it"

    with handled(signal.SIGUSR1, lambda *_: rg.train.save(path, [w])):
        step(rg.ones(4))  # before it is known that a Variable is assigned
        path.write_bytes(b"")
        step(rg.ones(()))
    assert not path.exists() and w.tolist() == [1.0] * 4
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_handlers_that_are_set_in_a_trace_stay():
    mine, numbers = (lambda number, frame: 1 / 0), (signal.SIGINT, signal.SIGTERM)
    with handled(signal.SIGTERM, signal.SIG_DFL):
        with Deferred(), at_once():
            for number in numbers:
                signal.signal(number, mine)
        assert [signal.getsignal(number) for number in numbers] == [mine] * 2
        refused(ctrl_c, ZeroDivisionError)


@posix
def test_a_handler_that_raises_while_the_others_are_put_back(monkeypatch):
    """Each of them is put back, and each signal that came has its handler run."""
    log, struck, set_handler = [], [], deferral.set_handler
    fails = lambda number, frame: (log.append(number), 1 / 0)  # noqa: E731
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]

    def set_and_strike(number, handler):
        set_handler(number, handler)
        if handler is fails and not struck:
            struck.append(number)
            signal.raise_signal(number)

    with ExitStack() as stack:
        for number in numbers:
            stack.enter_context(handled(number, fails))
        with pytest.raises(ZeroDivisionError), Deferred():
            for number in numbers:
                signal.raise_signal(number)
        assert log == numbers
        monkeypatch.setattr(deferral, "set_handler", set_and_strike)
        with pytest.raises(ZeroDivisionError), Deferred():
            pass
        monkeypatch.undo()
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


def test_scopes_and_sessions_are_open_once_at_a_time():
    scope, slope = rg.gradient_override_map({"Sign": "Identity"}), rg.grad(rg.sign)
    with scope:
        refused(lambda: scope.__enter__(), ArgumentError, "open already")
        assert slope(2.0).item() == 1.0  # (the block goes on)
    assert current() is None
    with scope:
        assert slope(2.0).item() == 1.0
    with tf.Graph().as_default():
        tf.constant(1.0)
        with tf.Session() as session:
            refused(lambda: session.__enter__(), ArgumentError, "as_default")
            with session.as_default():
                assert tf.get_default_session() is session
    assert tf.get_default_session() is None


# -- signals that wait ---------------------------------------------------------------------------


def test_a_signal_waits_for_the_end_of_the_outermost_block():
    log = []
    with pytest.raises(KeyboardInterrupt):
        with Deferred():
            with Deferred():
                ctrl_c()
                log.append("the rest of the inner block")
            log.append("the rest of the outer block")
        log.append("after it")
    assert log == ["the rest of the inner block", "the rest of the outer block"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_run_in_order_and_see_the_number():
    log = []
    with handled(signal.SIGTERM, lambda number, frame: log.append(number)):
        with Deferred():
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
            assert log == []
        assert log == [signal.SIGTERM] * 2


@pytest.mark.parametrize("due", [False, True])
def test_at_once_handlers_run_as_ever(due):
    with pytest.raises(KeyboardInterrupt), Deferred():
        if due:
            ctrl_c()
        with at_once():  # what is due comes first
            assert not due
            ctrl_c()
        pytest.fail("the handler did not run")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_threads_have_no_handlers_and_ignored_signals_stay_ignored():
    def run():
        with Deferred(), at_once():
            return True

    assert in_thread(run)
    with handled(signal.SIGINT, signal.SIG_IGN):
        with Deferred():
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_signals_of_other_processes_wait_too():
    with pytest.raises(KeyboardInterrupt), Deferred():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # (it comes between two instructions)
            sys.getrefcount(None)


# -- errors between the donation and the assignment ------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_where_jax_finds_nan_variables_keep_their_values(capfd):
    v = rg.Variable(np.ones(3, "f4"))

    @rg.jit
    def step(x):
        v.assign(v * x)
        return rg.sum(rg.log(v))

    with jax.debug_nans(True):
        assert step(rg.scalar(2.0)).item() == pytest.approx(3 * np.log(2.0))
        refused(lambda: step(rg.scalar(-1.0)).item(), FloatingPointError, "nan")
        assert v.value.tolist() == [2.0, 2.0, 2.0]
        with tf.Graph().as_default(), tf.Session(jit=True) as session:
            w, x = tf.Variable(np.ones(3, "f4")), tf.placeholder(tf.float32, [])
            grown = tf.assign(w, tf.log(w * x))
            session.run(tf.global_variables_initializer())
            refused(lambda: session.run(grown, {x: -1.0}), FloatingPointError, "nan")
            assert session.run(w).tolist() == [1.0, 1.0, 1.0]


def test_a_trace_is_interrupted_and_leaves_variables_alone():
    v, reached = rg.Variable([1.0]), []

    @rg.jit
    def step(x):
        v.assign(v * 2.0)
        if len(x) == 2:
            ctrl_c()
            reached.append(True)
        return rg.sum(x)

    step(rg.tensor([1.0]))
    refused(lambda: step(rg.tensor([1.0, 1.0])), KeyboardInterrupt)
    assert reached == [] and v.value.item() == 2.0
    step(rg.tensor([1.0]))
    assert v.value.item() == 4.0
