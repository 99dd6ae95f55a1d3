"""Jobs, threads and `asyncio.to_thread` take scopes of where they were handed in, never tapes."""

import asyncio
import concurrent.futures
import multiprocessing.pool
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextvars import copy_context
from multiprocessing.pool import Pool, ThreadPool
from queue import Queue

import pytest
import torch

import regrad as rg
import regrad.torch
from regrad.core import jobs
from regrad.errors import GradientError


def core_slope(*_):
    return rg.grad(rg.sign)(1.0).item()


def torch_slope(*_):
    x = torch.ones((), requires_grad=True)
    return torch.autograd.grad(torch.sign(x), x)[0].item()


SIDES = {
    "core": (rg.gradient_override_map, core_slope),
    "torch": (regrad.torch.gradient_override_map, torch_slope),
}
SEVEN = {"Sign": lambda dy: dy * 7}


@pytest.fixture(autouse=True)
def nothing_is_replaced():
    yield
    for function, module in {
        threading.Thread.start: "threading",
        ThreadPoolExecutor.submit: "concurrent.futures.thread",
        Pool.apply_async: "multiprocessing.pool",
        Pool._guarded_task_generation: "multiprocessing.pool",
        Queue.put: "queue",
    }.items():
        assert function.__module__ == module


async def awaited(pool, job):
    loop = asyncio.get_running_loop()
    return [await asyncio.to_thread(job), await loop.run_in_executor(pool, job)]


def by_thread(job):
    found = []
    thread = threading.Thread(target=lambda: found.append(job()))
    thread.start()
    thread.join()
    return found


WORK = Queue()


@pytest.fixture(autouse=True, scope="module")
def worker():
    """A thread that outlives all scopes, and runs jobs as the threads of AnyIO do."""

    def run():
        while item := WORK.get():
            context, job, answers = item
            answers.append(context.run(job))
            WORK.task_done()

    thread = threading.Thread(target=run)
    thread.start()
    yield
    WORK.put(None)
    thread.join()


def by_queue(job):
    answers = []
    WORK.put_nowait((copy_context(), job, answers))
    WORK.join()
    return answers


def all_ways(futures, threads, job):
    return {
        *by_thread(job), futures.submit(job).result(), *futures.map(job, [1]),
        threads.apply(job), threads.apply_async(func=job).get(), *threads.map(job, [1, 2, 3]),
        *threads.map_async(func=job, iterable=[1]).get(), *threads.starmap(job, [(1,)]),
        *threads.starmap_async(job, [(1,)]).get(), *threads.imap(job, [1, 2], 2),
        *threads.imap(job, [1]), *threads.imap_unordered(job, [1]),
        *asyncio.run(awaited(futures, job)), *by_queue(job),
    }  # fmt: skip


@pytest.mark.parametrize("first", ["in the scope", "before it"])
@pytest.mark.parametrize("side", SIDES)
def test_what_is_handed_in_belongs_to_the_scope(side, first):
    override, job = SIDES[side]
    with ThreadPoolExecutor(1) as futures, ThreadPool(1) as threads:
        if first == "before it":
            assert all_ways(futures, threads, job) == {0}
        with override(SEVEN):
            assert all_ways(futures, threads, job) == {7}
            with override({"Sign": lambda dy: dy * 2}):
                assert all_ways(futures, threads, job) == {2}
        assert all_ways(futures, threads, job) == {0}


@pytest.mark.parametrize("side", SIDES)
def test_what_was_handed_in_before_does_not(side):
    override, job = SIDES[side]
    go = threading.Event()
    late = lambda: go.wait(60) and job()  # noqa: E731
    with ThreadPoolExecutor(3) as pool:
        before = pool.submit(late)
        with override(SEVEN):
            inside = pool.submit(late)
            job()
        after = pool.submit(late)
        go.set()
        assert [before.result(), inside.result(), after.result()] == [0, 7, 0]


@pytest.mark.parametrize("side", SIDES)
def test_a_thread_that_outlives_its_scope_hands_it_on(side):
    make, slope = SIDES[side]
    go, found = threading.Event(), []
    thread = threading.Thread(target=lambda: found.extend([go.wait(60), *by_thread(slope)]))
    with make(SEVEN):
        slope()
        thread.start()
    with make({"Sign": lambda dy: dy * 5}):  # of whoever is in the main thread now
        slope()
        go.set()
        thread.join()
    assert found == [True, 7.0]


def test_a_scope_of_another_thread_is_not_taken():
    opened, done = threading.Event(), threading.Event()

    def hold():
        with rg.gradient_override_map(SEVEN):
            core_slope()
            opened.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert opened.wait(60)
    assert by_thread(core_slope) == [0.0]
    done.set()
    thread.join()


def test_both_sides_go_along_together():
    with (
        rg.gradient_override_map(SEVEN),
        regrad.torch.gradient_override_map({"Sign": lambda dy: 3 * dy}),
        ThreadPoolExecutor(1) as pool,
    ):  # fmt: skip
        assert pool.submit(lambda: (core_slope(), torch_slope())).result() == (7, 3)
        core_slope(), torch_slope()


def test_the_hits_count_in_the_scope():
    with rg.gradient_override_map(SEVEN) as used, ThreadPoolExecutor(2) as pool:
        list(pool.map(core_slope, range(6)))
    used.assert_fired()
    assert [(hit.count, hit.ran) for hit in used.hits] == [(6, 6)]


def test_processes_are_left_alone():
    with rg.gradient_override_map(SEVEN):
        core_slope()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            assert pool.submit(abs, -3).result(60) == 3  # (a function of ours would not pickle)


def test_subclasses_and_replacements_of_others_stay(monkeypatch):
    seen = []
    start = threading.Thread.start

    def counting(self):
        seen.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", counting)
    with rg.gradient_override_map(SEVEN):
        assert by_thread(core_slope) == [7.0]
    assert threading.Thread.start is counting
    assert len(seen) == 1
    monkeypatch.undo()


# -- tapes -----------------------------------------------------------------------------------------


def by_pool(job):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(job).result()


def by_to_thread(job):
    return asyncio.run(asyncio.to_thread(job))


def by_started_thread(job):
    found = []

    def run():
        try:
            job()
        except GradientError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise found[0]


@pytest.mark.parametrize("way", [by_pool, by_to_thread, by_started_thread])
def test_tapes_are_not_taken_along(way):
    def f(x):
        with pytest.raises(GradientError, match="another thread is differentiating"):
            way(lambda: rg.sin(x))
        return rg.sign(x)

    with rg.gradient_override_map(SEVEN):
        assert rg.grad(f)(1.0).item() == 7.0


def test_a_context_that_is_carried_over_takes_them():
    def f(x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(copy_context().run, lambda: rg.sign(x) * 2.0).result()

    with rg.gradient_override_map(SEVEN):
        assert rg.grad(f)(1.0).item() == 14.0


@pytest.fixture
def inheriting(monkeypatch):
    """Threads inherit the context of who starts them, as in Python 3.14 with that option."""
    start = threading.Thread.start

    def inherit(self):
        context, run = copy_context(), self.run
        self.run = lambda: context.run(run)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", inherit)
    monkeypatch.setattr(jobs, "INHERITS", True)
    yield
    assert threading.Thread.start is inherit
    monkeypatch.undo()


@pytest.mark.usefixtures("inheriting")
@pytest.mark.parametrize("side", SIDES)
def test_where_threads_inherit_the_context(side):
    override, job = SIDES[side]
    with ThreadPoolExecutor(1) as futures, ThreadPool(1) as threads:
        with override(SEVEN):  # the pools grow in the scope, and keep nothing of it
            assert all_ways(futures, threads, job) == {7}
        assert all_ways(futures, threads, job) == {0}


@pytest.mark.usefixtures("inheriting")
@pytest.mark.parametrize("scope", [False, True])
@pytest.mark.parametrize("way", [by_pool, by_to_thread, by_started_thread])
def test_where_threads_inherit_it_tapes_are_not_taken_along(way, scope):
    def f(x):
        with pytest.raises(GradientError, match="another thread is differentiating"):
            way(lambda: rg.sin(x))
        return rg.sign(x)

    with rg.gradient_override_map(SEVEN if scope else {}):
        assert rg.grad(f)(1.0).item() == 7.0 * scope


@pytest.mark.usefixtures("inheriting")
def test_a_pool_that_grew_under_a_tape_keeps_nothing_of_it():
    with ThreadPoolExecutor(1) as pool:
        rg.grad(lambda x: x * pool.submit(lambda: 2.0).result())(1.0)
        assert pool.submit(core_slope).result() == 0.0


def test_the_entrances_of_the_standard_library_are_there():
    assert {name for _, name, *_ in jobs._entrances()} == {
        "start", "submit", "apply_async", "_guarded_task_generation", "put",
    }  # fmt: skip
    assert concurrent.futures.ThreadPoolExecutor is ThreadPoolExecutor
    assert multiprocessing.pool.ThreadPool is ThreadPool
