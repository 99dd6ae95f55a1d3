"""What campaigns of many jobs share: processes, what earlier runs have done, classes, a verdict.

A job has a `key`, by which its results are known. Done jobs are noted in a file under `out/`; a
second run of the same sources goes on from there.
"""

import argparse
import gc
import hashlib
import itertools
import json
import multiprocessing
import signal
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

import tqdm

import regrad
from tests.campaigns import proof_page
from tests.campaigns.outcomes import BROKEN, DELIVERED, OUTCOMES, WRONG
from tests.campaigns.verdicts import Verdict
from tests.helpers.paths import ROOT

Entry = dict[str, Any]
Work = Callable[[Any], Entry]
FEW = 6


# -- jobs ------------------------------------------------------------------------------------------


def entry(
    key: str, run: Callable[[], Iterable[Verdict]], limit: int = 600, every: bool = False
) -> Entry:
    """A job's results as they are written down: counts, and what has something to be said of it.

    Args:
        key: of the job.
        run: Makes the verdicts. If it fails as a whole, or does not end, the job is broken.
        limit: seconds for it.
        every: whether to note the cases of which there is nothing to say, too.
    """
    start = time.perf_counter()

    def stop(*args: Any) -> None:
        raise TimeoutError(f"no end after {limit} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdicts = list(run())
    except Exception as error:
        name = key.rpartition("/")[2]
        verdicts = [Verdict(name, BROKEN, f"the job failed: {error!r}"[:300])]
    finally:
        signal.alarm(0)
    if next(JOBS) % 20 == 19:
        forget()
    return {
        "job": key,
        "counts": Counter(v.outcome for v in verdicts),
        "others": [v for v in verdicts if every or v.outcome != DELIVERED or v.detail],
        "seconds": round(time.perf_counter() - start, 2),
    }


JOBS = itertools.count()


def forget() -> None:
    """What JAX has compiled is not needed again."""
    import jax

    jax.clear_caches()
    gc.collect()


def results(jobs: Sequence[Any], workers: int, work: Work) -> Iterator[Entry]:
    """The results of jobs as they come, by `workers` processes, which are new every 100 jobs."""
    if workers == 1:
        yield from map(work, jobs)
        return
    count = 100 * workers
    for i in range(0, len(jobs), count):
        yield from in_processes(jobs[i : i + count], workers, work)


def in_processes(jobs: Sequence[Any], workers: int, work: Work) -> Iterator[Entry]:
    """The results of jobs; one that ends its process (a compiler that aborts, say) is broken."""
    waiting, running = deque(jobs), dict[Future[Entry], Any]()
    spawning = multiprocessing.get_context("spawn")
    with suppress(BrokenProcessPool), ProcessPoolExecutor(workers, spawning) as pool:
        while waiting or running:
            while waiting and len(running) < 2 * workers:
                job = waiting.popleft()
                running[pool.submit(work, job)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield future.result()
                del running[future]
        return
    (*others, last) = running.values()
    if not others:
        verdict = Verdict(last.key.partition("/")[2], BROKEN, "the process died")
        yield {"job": last.key, "counts": Counter({BROKEN: 1}), "others": [verdict], "seconds": 0}
    else:  # any of them may be to blame
        for job in running.values():
            yield from in_processes([job], 1, work)
    yield from in_processes(waiting, workers, work)


# -- what was done before --------------------------------------------------------------------------


def sources(*also: str) -> str:
    """A digest of the library and of the campaigns: results hold for these sources only."""
    digest = hashlib.sha256("".join(also).encode())
    folders = Path(regrad.__file__).parent, ROOT / "tests" / "campaigns", ROOT / "tests" / "samples"
    for path in [path for folder in folders for path in sorted(folder.rglob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def before(path: Path, digest: str) -> dict[str, Entry]:
    """The results of earlier runs of the same sources, by job."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):  # (a line was cut off as it was written)
            found.append(json.loads(line))
    return {entry["job"]: entry for entry in found if entry["sources"] == digest}


def carried_out(
    jobs: Sequence[Any], options: argparse.Namespace, work: Work, path: Path, digest: str
) -> list[Entry]:
    """The results of all jobs: those of earlier runs, and the others, noted as they come."""
    path.parent.mkdir(exist_ok=True)
    if options.fresh:
        path.unlink(missing_ok=True)
    known = before(path, digest)
    wanted = [job for job in jobs if job.key not in known]
    if len(wanted) < len(jobs):
        print(f"{len(jobs) - len(wanted)} of {len(jobs)} jobs were done by an earlier run.")
    bar = tqdm.tqdm(results(wanted, options.workers, work), total=len(wanted), smoothing=0.1)
    wrong = 0
    with path.open("a", encoding="utf-8") as file:
        for result in bar:
            line = json.dumps({"sources": digest, **result})
            known[result["job"]] = json.loads(line)
            file.write(f"{line}\n")
            file.flush()
            wrong += sum(result["counts"].get(outcome, 0) for outcome in WRONG)
            bar.set_postfix(wrong=wrong, refresh=False)
    return [known[job.key] for job in jobs]


# -- what came of it -------------------------------------------------------------------------------


def totals(entries: Iterable[Entry], group: Callable[[str], str]) -> dict[str, Counter[str]]:
    """Counts by group of jobs and outcome."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for each in entries:
        found[group(each["job"])].update(each["counts"])
    return dict(found)


def classes(
    entries: Iterable[Entry],
    group: Callable[[str], str],
    class_of: Callable[[str, Verdict], tuple[str, str]],
) -> list[Entry]:
    """Everything but what was just delivered, by class; with the shortest detail of each."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for each in entries:
        campaign = group(each["job"])
        for verdict in map(Verdict._make, each["others"]):
            if verdict.outcome != DELIVERED or verdict.detail:
                name, case = class_of(campaign, verdict)
                found[campaign, verdict.outcome, name].append((case, verdict.detail))
    order = lambda key: (key[0], OUTCOMES.index(key[1]), key[2])  # noqa: E731
    return [
        {
            "campaign": key[0],
            "outcome": key[1],
            "class": key[2],
            "count": len(found[key]),
            "cases": named(sorted({case for case, _ in found[key]}), key[1]),
            "detail": min((detail for _, detail in found[key]), key=len),
        }
        for key in sorted(found, key=order)
    ]


def named(cases: list[str], outcome: str) -> list[str]:
    """The cases of a class: all that must not be, and otherwise a few by which to find it."""
    return cases if outcome in WRONG else cases[:FEW]


def listing(found: Iterable[Entry]) -> Iterator[str]:
    """The classes that must not be, each with a case."""
    for each in found:
        if each["outcome"] in WRONG:
            cases = ", ".join(each["cases"][:FEW]) + ", …" * (len(each["cases"]) > FEW)
            yield f"\n{each['outcome'].upper()} {each['campaign']}: {each['class']}"
            yield f"  {each['count']} cases: {cases}"
            yield "\n".join("  " + line for line in each["detail"].splitlines())


def told(
    found: Sequence[Entry], counts: Mapping[str, Counter[str]], paths: Iterable[Path], start: float
) -> int:
    """Print what came; return the exit status: 1 if anything was silent or broken."""
    print("\n".join(listing(found)))
    print(f"\n{proof_page.counted(counts)}\n")
    wrong = sum(each["count"] for each in found if each["outcome"] in WRONG)
    verdict = f"{wrong} cases must not be." if wrong else "Nothing was silent, and nothing broke."
    print(f"{verdict} {time.perf_counter() - start:.0f} s; written to {', '.join(map(str, paths))}")
    return 1 if wrong else 0


def arguments(module: str, workers: int, only: str) -> argparse.ArgumentParser:
    """The arguments that such campaigns share."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--only", default="", help=only)
    parser.add_argument("--workers", type=int, default=workers, help="processes")
    parser.add_argument("--fresh", action="store_true", help="do not go on from an earlier run")
    return parser
