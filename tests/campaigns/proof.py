"""The proof that rules fire or raise: `make proof`, or

    python -m tests.campaigns.proof                  all of it
    python -m tests.campaigns.proof --quick          a minute's worth
    python -m tests.campaigns.proof --only F1        one campaign
    python -m tests.campaigns.proof --only F1/Sign   the jobs whose name begins like this
    python -m tests.campaigns.proof --fresh          from the beginning
    python -m tests.campaigns.proof --only F13 --device cuda    torch's samples on a GPU
    python -m tests.campaigns.proof page             docs/proof.md anew, from what is recorded

The campaigns: F1, a rule for every op type in every context (`fires`); F2, every gradient in every
dtype and mode (`numerics`); F3, wrong answers of rules (`answers`); F4, broken rules that the tests
must see (`mutations`); F5, random programs in every mode (`agreement`); F6, the ends of the range
(`edges`); F7, eager, graph and compiled to the last digit (`ulps`); F8, threads and tasks
(`concurrency`); F9, memory (`memory`); F10, interrupts (`interrupts`); F11, damaged files
(`damage`); F12, calls that make no sense (`malformed`); F13, torch's own samples of its ops, in
every way in which torch runs them (`torch_ops`); F14, modules of torch.nn, compiled (`compiled`).
What is done is noted under `out/`; a second run
of the same sources goes on from there. A campaign that is run whole writes its results to
`tests/campaigns/results/F1.json` and so on, and what is not whole to `out/`.

The exit status is 1 if anything was silent or broken.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import tqdm

import regrad
from tests.campaigns import (
    agreement,
    answers,
    compiled,
    concurrency,
    damage,
    edges,
    fires,
    interrupts,
    malformed,
    memory,
    mutations,
    numerics,
    op_calls,
    op_tables,
    peers,
    proof_page,
    records,
    torch_ops,
    torch_samples,
    ulps,
)
from tests.campaigns.verdicts import (
    BROKEN,
    DELIVERED,
    EXPLAINED,
    REFUSED,
    SILENT,
    UNNAMED,
    WRONG,
    Verdict,
)
from tests.helpers.paths import ROOT

OUT = ROOT / "out"
RESULTS = records.RESULTS
OUTCOMES = (DELIVERED, REFUSED, UNNAMED, EXPLAINED, SILENT, BROKEN)
CAMPAIGNS: dict[str, Any] = {
    "F1": fires,
    "F2": numerics,
    "F3": answers,
    "F4": mutations,
    "F5": agreement,
    "F6": edges,
    "F7": ulps,
    "F8": concurrency,
    "F9": memory,
    "F10": interrupts,
    "F11": damage,
    "F12": malformed,
    "F13": torch_ops,
    "F14": compiled,
}
LIMIT = 600  # seconds for a job


class Job(NamedTuple):
    """A part of a campaign that is done at once: `F1`, `Sign/jit`."""

    campaign: str
    name: str
    quick: bool = False

    @property
    def key(self) -> str:
        return f"{self.campaign}/{self.name}"


# -- the jobs --------------------------------------------------------------------------------------


def all_jobs(options: argparse.Namespace) -> list[Job]:
    quick = options.quick
    programs = options.programs or (10 if quick else 5_000)
    names: dict[str, Callable[[], Sequence[str]]] = {
        "F1": quick_jobs if quick else fires.jobs,
        "F2": lambda: numerics.jobs(quick),
        "F3": answers.jobs,
        "F4": lambda: mutations.jobs(quick),
        "F5": lambda: agreement.jobs(programs, options.seed),
        "F6": lambda: edges.jobs(quick),
        "F7": lambda: ulps.jobs(quick),
        "F10": lambda: interrupts.jobs(quick),
        "F8": lambda: concurrency.jobs(quick),
        "F9": lambda: memory.jobs(quick),
        "F11": lambda: damage.jobs(damage.CHUNK if quick else damage.RANDOM),
        "F12": lambda: malformed.jobs(quick),
        "F13": lambda: torch_ops.jobs(quick),
        "F14": lambda: compiled.jobs(quick),
    }
    campaign, _, start = options.only.partition("/")  # F1 is not F11
    wanted = [c for c in CAMPAIGNS if campaign in ("", c)]  # (others need not even be listed)
    return [Job(c, name, quick) for c in wanted for name in names[c]() if name.startswith(start)]


QUICK = {"numpy": 1, "torch": 6, "graph": 12, "jax": 24, "jit": 24}


def quick_jobs() -> list[str]:
    """Every op type in eager mode, and some of them in each other mode."""
    by_mode = defaultdict(list)
    for name in fires.jobs():
        by_mode[name.rpartition("/")[2]].append(name)
    return [name for mode, step in QUICK.items() for name in by_mode[mode][::step]]


def done(job: Job) -> dict[str, Any]:
    """A job's results as they are written down: counts, and what has something to be said of it."""
    start = time.perf_counter()
    verdicts = list(attempted(job))
    if next(JOBS) % 20 == 19:
        forget()
    return {
        "job": job.key,
        "counts": Counter(v.outcome for v in verdicts),
        "others": [v for v in verdicts if v.outcome != DELIVERED or v.detail],
        "seconds": round(time.perf_counter() - start, 2),
    }


JOBS = iter(range(10**9))


def attempted(job: Job) -> Iterable[Verdict]:
    """The verdicts of a job; one that fails as a whole, or does not end, is broken."""

    def stop(*args: Any) -> None:
        raise TimeoutError(f"no end after {LIMIT} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return CAMPAIGNS[job.campaign].run(job.name, job.quick)
    except Exception as error:
        return [Verdict(job.name, BROKEN, f"the job failed: {error!r}"[:300])]
    finally:
        signal.alarm(0)


def forget() -> None:
    """What JAX has compiled is not needed again."""
    import jax

    jax.clear_caches()
    gc.collect()


def results(
    jobs: Sequence[Job], workers: int, work: Callable[[Job], dict[str, Any]] = done
) -> Iterator[dict[str, Any]]:
    """The results of jobs as they come, by `workers` processes, which are new every 100 jobs."""
    if workers == 1:
        yield from map(work, jobs)
        return
    count = 100 * workers
    for i in range(0, len(jobs), count):
        yield from in_processes(jobs[i : i + count], workers, work)


def in_processes(
    jobs: Sequence[Job], workers: int, work: Callable[[Job], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The results of jobs; one that ends its process (a compiler that aborts, say) is broken."""
    waiting, running = deque(jobs), dict[Future[dict[str, Any]], Job]()
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
        verdict = Verdict(last.name, BROKEN, "the process died")
        yield {"job": last.key, "counts": Counter({BROKEN: 1}), "others": [verdict], "seconds": 0}
    else:  # any of them may be to blame
        for job in running.values():
            yield from in_processes([job], 1, work)
    yield from in_processes(waiting, workers, work)


# -- what was done before --------------------------------------------------------------------------


def sources() -> str:
    """A digest of the library and of the campaigns: results hold for these sources only."""
    digest = hashlib.sha256(torch_samples.DEVICE.encode())
    for folder in (
        Path(regrad.__file__).parent,
        ROOT / "tests" / "campaigns",
        ROOT / "tests/samples",
    ):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def before(path: Path, digest: str) -> dict[str, dict[str, Any]]:
    """The results of earlier runs of the same sources, by job."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [entry for line in lines if (entry := parsed(line))]
    return {entry["job"]: entry for entry in found if entry["sources"] == digest}


def parsed(line: str) -> dict[str, Any] | None:
    """A line of the state file; None for one that was cut off as it was written."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def carried_out(jobs: Sequence[Job], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of all jobs: those of earlier runs, and the others, noted as they come."""
    path = OUT / ("proof-quick.jsonl" if options.quick else "proof.jsonl")
    OUT.mkdir(exist_ok=True)
    if options.fresh:
        path.unlink(missing_ok=True)
    digest = sources()
    known = before(path, digest)
    wanted = [job for job in jobs if job.key not in known]
    if len(wanted) < len(jobs):
        print(f"{len(jobs) - len(wanted)} of {len(jobs)} jobs were done by an earlier run.")
    bar = tqdm.tqdm(results(wanted, options.workers), total=len(wanted), unit="job", smoothing=0.1)
    wrong = 0
    with path.open("a", encoding="utf-8") as file:
        for result in bar:
            entry = {"sources": digest, **result}
            known[result["job"]] = json.loads(json.dumps(entry))
            file.write(json.dumps(entry) + "\n")
            file.flush()
            wrong += sum(result["counts"].get(outcome, 0) for outcome in WRONG)
            bar.set_postfix(wrong=wrong, refresh=False)
    return [known[job.key] for job in jobs]


# -- the report ------------------------------------------------------------------------------------


def totals(entries: Sequence[dict[str, Any]]) -> dict[str, Counter[str]]:
    """Counts by campaign and outcome."""
    found = {c: Counter[str]() for c in CAMPAIGNS}
    for entry in entries:
        found[campaign_of(entry)].update(entry["counts"])
    return {c: counts for c, counts in found.items() if counts}


def campaign_of(entry: dict[str, Any]) -> str:
    return entry["job"].partition("/")[0]


def classes(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Everything but what was just delivered, by class; with the shortest detail of each."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for entry in entries:
        campaign = campaign_of(entry)
        for verdict in entry["others"]:
            name, case = CAMPAIGNS[campaign].class_of(*verdict)
            found[campaign, verdict[1], name].append((case, verdict[2]))
    return [
        {
            "campaign": campaign,
            "outcome": outcome,
            "class": name,
            "count": len(these),
            "cases": named(sorted({case for case, _ in these}), outcome),
            "detail": min((detail for _, detail in these), key=len),
        }
        for (campaign, outcome, name), these in sorted(
            found.items(), key=lambda pair: (pair[0][0], OUTCOMES.index(pair[0][1]), pair[0][2])
        )
    ]


FEW = 6


def named(cases: list[str], outcome: str) -> list[str]:
    """The cases of a class: all that must not be, and otherwise a few by which to find it."""
    return cases if outcome in WRONG else cases[:FEW]


def table(counts: dict[str, Counter[str]]) -> str:
    rows = [["", "cases", *OUTCOMES]]
    for campaign, found in counts.items():
        numbers = [sum(found.values()), *[found[o] for o in OUTCOMES]]
        rows.append([f"{campaign} {CAMPAIGNS[campaign].TITLE}", *[f"{n:,}" for n in numbers]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    texts = [[t.rjust(w) for t, w in zip(row, widths, strict=True)] for row in rows]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *t[1:]]) for row, t in zip(rows, texts, strict=True)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def listing(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The classes that must not be, each with a case."""
    for each in found:
        if each["outcome"] in WRONG:
            cases = ", ".join(each["cases"][:FEW]) + ", …" * (len(each["cases"]) > FEW)
            yield f"\n{each['outcome'].upper()} {each['campaign']}: {each['class']}"
            yield f"  {each['count']} cases: {cases}"
            yield "\n".join("  " + line for line in each["detail"].splitlines())


def written(entries: Sequence[dict[str, Any]], found: Any, options: Any) -> list[Path]:
    """The results as files: one for each campaign, or one for parts of them."""
    if options.quick or options.only not in ("", *CAMPAIGNS):
        return [write(OUT / "proof-part.json", entries, found)]
    return [
        write(
            RESULTS / f"{campaign}{suffix(options)}.json",
            [entry for entry in entries if campaign_of(entry) == campaign],
            [each for each in found if each["campaign"] == campaign],
        )
        for campaign in totals(entries)
    ]


def suffix(options: argparse.Namespace) -> str:
    """Return what a file of results is called after, where not the default start and device."""
    parts = [str(options.seed)] * bool(options.seed) + [options.device] * (options.device != "cpu")
    return "".join(f"-{part}" for part in parts)


def write(path: Path, entries: Sequence[dict[str, Any]], found: Any) -> Path:
    content = {
        **records.facts("tests.campaigns.proof"),
        "seconds": round(sum(entry["seconds"] for entry in entries)),
        "jobs": len(entries),
        "counts": totals(entries),
        "classes": found,
    }
    if "F1" in content["counts"]:
        content["op types of no float input"] = sorted(
            op_calls.covered().difference(op_calls.op_types())
        )
    return records.write(path, content, ROOT)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.proof")
    parser.add_argument(
        "page", nargs="?", choices=["page"], help="write docs/proof.md, run nothing"
    )
    parser.add_argument("--quick", action="store_true", help="a minute's worth, for every change")
    parser.add_argument("--only", default="", metavar="F1", help="jobs whose name begins like this")
    parser.add_argument("--seed", type=int, default=0, help="the first random program (F5)")
    parser.add_argument(
        "--programs", type=int, help="how many of them in each mode (5,000; quick: 10)"
    )
    parser.add_argument(
        "--device", default=torch_samples.DEVICE, help="where torch's samples lie (F13): cpu, cuda"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--fresh", action="store_true", help="do not go on from an earlier run")
    return parser.parse_args(given)


def other_blocks() -> dict[str, str]:
    """The parts of the page that are not about these campaigns."""
    return {
        "peers": peers.report(peers.recorded()),
        "op_tables": op_tables.report(op_tables.recorded()),
    }


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    if options.page:
        proof_page.write(CAMPAIGNS, other_blocks())
        return 0
    if options.device != torch_samples.DEVICE:  # it is read when the campaigns are imported
        os.environ["REGRAD_PROOF_DEVICE"] = options.device
        os.execv(sys.executable, [sys.executable, "-m", "tests.campaigns.proof", *sys.argv[1:]])
    start = time.perf_counter()
    jobs = all_jobs(options)
    if not jobs:
        names = ", ".join(f"{c}/…" for c in CAMPAIGNS)
        sys.exit(f"no job begins with {options.only!r}; there are {names}")
    entries = carried_out(jobs, options)
    found = classes(entries)
    print("\n".join(listing(found)))
    print(f"\n{table(totals(entries))}\n")
    paths = ", ".join(str(p.relative_to(ROOT)) for p in written(entries, found, options))
    wrong = sum(each["count"] for each in found if each["outcome"] in WRONG)
    verdict = (
        "Nothing was silent, and nothing broke." if not wrong else f"{wrong} cases must not be."
    )
    print(f"{verdict} {time.perf_counter() - start:.0f} s; written to {paths}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
