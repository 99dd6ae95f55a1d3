"""Jobs, threads and `asyncio.to_thread` take scopes of where they were handed in, never tapes."""

import asyncio
import io
import multiprocessing
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextvars import copy_context
from multiprocessing.pool import Pool, ThreadPool
from queue import Queue

import pytest
import torch
import tqdm

import regrad as rg
import regrad.torch
from regrad.core import jobs
from regrad.errors import GradientError
from regrad.torch import intercepts
from tests.helpers.rows import in_thread, refused


def core_slope(*_):
    return rg.grad(rg.sign)(1.0).item()


def torch_slope(*_):
    x = torch.ones((), requires_grad=True)
    return torch.autograd.grad(torch.sign(x), x)[0].item()


OTHER = regrad.torch.gradient_override_map
SIDES = {"core": (rg.gradient_override_map, core_slope), "torch": (OTHER, torch_slope)}
sides = pytest.mark.parametrize(("override", "job"), SIDES.values(), ids=SIDES)


def by(factor):
    return {"Sign": lambda dy: dy * factor}


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
    return {in_thread(job), futures.submit(job).result(), *futures.map(job, [1]),
            threads.apply(job), threads.apply_async(func=job).get(), *threads.map(job, [1, 2, 3]),
            *threads.map_async(func=job, iterable=[1]).get(), *threads.starmap(job, [(1,)]),
            *threads.starmap_async(job, [(1,)]).get(), *threads.imap(job, [1, 2], 2),
            *threads.imap(job, [1]), *threads.imap_unordered(job, [1]),
            *asyncio.run(awaited(futures, job)), *by_queue(job)}  # fmt: skip


@pytest.mark.parametrize("first", ["in the scope", "before it"])
@sides
def test_what_is_handed_in_belongs_to_the_scope(override, job, first):
    with ThreadPoolExecutor(1) as futures, ThreadPool(1) as threads:
        if first == "before it":
            assert all_ways(futures, threads, job) == {0}
        with override(by(7)):
            assert all_ways(futures, threads, job) == {7}
            with override(by(2)):
                assert all_ways(futures, threads, job) == {2}
        assert all_ways(futures, threads, job) == {0}


@sides
def test_what_was_handed_in_before_does_not(override, job):
    go = threading.Event()
    late = lambda: go.wait(60) and job()  # noqa: E731
    with ThreadPoolExecutor(3) as pool:
        before = pool.submit(late)
        with override(by(7)):
            inside = pool.submit(late)
            job()
        after = pool.submit(late)
        go.set()
        assert [before.result(), inside.result(), after.result()] == [0, 7, 0]


@sides
def test_a_thread_that_outlives_its_scope_hands_it_on(override, job):
    go, found = threading.Event(), []
    thread = threading.Thread(target=lambda: found.extend([go.wait(60), in_thread(job)]))
    with override(by(7)):
        job()
        thread.start()
    with override(by(5)):  # of whoever is in the main thread now
        job()
        go.set()
        thread.join()
    assert found == [True, 7.0]


def test_a_scope_of_another_thread_is_not_taken():
    opened, done = threading.Event(), threading.Event()

    def hold():
        with rg.gradient_override_map(by(7)):
            core_slope()
            opened.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert opened.wait(60)
    assert in_thread(core_slope) == 0.0
    done.set()
    thread.join()


def test_both_sides_go_along_together_and_the_hits_count():
    pool = ThreadPoolExecutor(2)
    with pool, rg.gradient_override_map(by(7)) as used, regrad.torch.gradient_override_map(by(3)):
        found = set(pool.map(lambda _: (core_slope(), torch_slope()), range(6)))
        assert found == {(7, 3)} == {(core_slope(), torch_slope())}
    used.assert_fired()
    assert sum(hit.ran for hit in used.hits) == sum(hit.count for hit in used.hits) == 7


def test_processes_are_left_alone():
    with rg.gradient_override_map(by(7)):
        core_slope()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            assert pool.submit(abs, -3).result(60) == 3  # (a function of ours would not pickle)


def test_replacements_of_others_stay(monkeypatch):
    seen, start = [], threading.Thread.start
    counting = lambda self: (seen.append(self), start(self))[1]  # noqa: E731
    monkeypatch.setattr(threading.Thread, "start", counting)
    with rg.gradient_override_map(by(7)):
        assert in_thread(core_slope) == 7.0
    assert threading.Thread.start is counting
    assert len(seen) == 1
    monkeypatch.undo()


# -- tapes -----------------------------------------------------------------------------------------


def by_pool(job):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(job).result()


to_thread = lambda job: asyncio.run(asyncio.to_thread(job))  # noqa: E731
WAYS = {"pool": by_pool, "to_thread": to_thread, "thread": in_thread}


@pytest.fixture(params=[False, True], ids=["", "threads inherit"])
def inheriting(request, monkeypatch):
    """Threads inherit the context of who starts them, as in Python 3.14 with that option."""
    if not request.param:
        yield
        return
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
@pytest.mark.parametrize("scope", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_tapes_are_not_taken_along(way, scope):
    def f(x):
        words = "another thread is differentiating"
        refused(lambda: WAYS[way](lambda: rg.sin(x)), GradientError, words)
        return rg.sign(x)

    with rg.gradient_override_map(by(7) if scope else {}):
        assert rg.grad(f)(1.0).item() == 7.0 * scope


@pytest.mark.usefixtures("inheriting")
@sides
def test_a_pool_that_grew_in_a_scope_or_under_a_tape_keeps_nothing_of_it(override, job):
    with ThreadPoolExecutor(1) as futures, ThreadPool(1) as threads:
        with override(by(7)):
            assert all_ways(futures, threads, job) == {7}
        assert all_ways(futures, threads, job) == {0}
    with ThreadPoolExecutor(1) as pool:
        rg.grad(lambda x: x * pool.submit(lambda: 2.0).result())(1.0)
        assert pool.submit(job).result() == 0.0


def test_a_context_that_is_carried_over_takes_them():
    def f(x):
        context = copy_context()
        return by_pool(lambda: context.run(lambda: rg.sign(x) * 2.0))

    with rg.gradient_override_map(by(7)):
        assert rg.grad(f)(1.0).item() == 14.0


def test_the_entrances_of_the_standard_library_are_there():
    names = {name for _, name, *_ in jobs._entrances()}
    assert names == {"start", "submit", "apply_async", "_guarded_task_generation", "put"}


def test_the_monitor_of_progress_bars_leaves_no_scope_open():
    """It starts with the first bar, in a training loop inside of a scope, and never ends."""
    tqdm.tqdm.monitor = None
    net = torch.nn.Sequential(torch.nn.ReLU())
    with rg.torch.gradient_override_map({rg.at("0", "Relu"): rg.rules.straight_through}, model=net):
        for _ in tqdm.tqdm(range(2), file=io.StringIO()):
            net(torch.ones(1, requires_grad=True)).backward()
        time.sleep(0.05)  # (the monitor begins)
    assert tqdm.tqdm.monitor is not None
    assert intercepts._open == 0
