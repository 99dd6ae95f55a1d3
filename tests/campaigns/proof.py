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

import argparse
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaigns import driver, op_calls, op_tables, peers, proof_page, records, torch_samples
from tests.campaigns.verdicts import Verdict
from tests.helpers.paths import ROOT

OUT = ROOT / "out"
RESULTS = records.RESULTS
MODULES = (
    "fires", "numerics", "answers", "mutations", "agreement", "edges", "ulps", "concurrency",
    "memory", "interrupts", "damage", "malformed", "torch_ops", "compiled",
)  # fmt: skip
CAMPAIGNS: dict[str, Any] = {
    f"F{i}": import_module(f"tests.campaigns.{name}") for i, name in enumerate(MODULES, 1)
}


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
    campaign, _, start = options.only.partition("/")  # F1 is not F11
    wanted = [c for c in CAMPAIGNS if campaign in ("", c)]  # (others need not even be listed)
    own = {"F5": (options.programs, options.seed)}
    return [
        Job(c, name, options.quick)
        for c in wanted
        for name in CAMPAIGNS[c].jobs(options.quick, *own.get(c, ()))
        if name.startswith(start)
    ]


def done(job: Job) -> driver.Entry:
    """A job's results as they are written down."""
    return driver.entry(job.key, lambda: CAMPAIGNS[job.campaign].run(job.name, job.quick))


# -- the report ------------------------------------------------------------------------------------


def campaign_of(job: str) -> str:
    return job.partition("/")[0]


def totals(entries: Sequence[driver.Entry]) -> dict[str, Any]:
    return driver.totals(entries, campaign_of)


def class_of(campaign: str, verdict: Verdict) -> tuple[str, str]:
    return CAMPAIGNS[campaign].class_of(*verdict)


def written(entries: Sequence[dict[str, Any]], found: Any, options: Any) -> list[Path]:
    """The results as files: one for each campaign, or one for parts of them."""
    if options.quick or options.only not in ("", *CAMPAIGNS):
        return [write(OUT / "proof-part.json", entries, found)]
    return [
        write(
            RESULTS / f"{campaign}{suffix(options)}.json",
            [entry for entry in entries if campaign_of(entry["job"]) == campaign],
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
        "seconds": round(sum(entry["seconds"] for entry in entries)), "jobs": len(entries),
        "counts": totals(entries), "classes": found,
    }  # fmt: skip
    if "F1" in content["counts"]:
        content["op types of no float input"] = sorted(
            op_calls.covered().difference(op_calls.op_types())
        )
    return records.write(path, content, ROOT)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = driver.arguments("tests.campaigns.proof", 1, "jobs whose name begins like this")
    parser.add_argument("page", nargs="?", choices=["page"], help="write docs/proof.md only")
    parser.add_argument("--quick", action="store_true", help="a minute's worth, for every change")
    parser.add_argument("--seed", type=int, default=0, help="the first random program (F5)")
    parser.add_argument("--programs", type=int, help="of them in each mode (5,000; quick: 10)")
    where = "where torch's samples lie (F13): cpu, cuda"
    parser.add_argument("--device", default=torch_samples.DEVICE, help=where)
    return parser.parse_args(given)


def other_blocks() -> dict[str, str]:
    """The parts of the page that are not about these campaigns."""
    return {
        "peers": peers.report(records.read(peers.PATH)),
        "op_tables": op_tables.report(records.read(op_tables.PATH)),
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
    path = OUT / ("proof-quick.jsonl" if options.quick else "proof.jsonl")
    digest = driver.sources(torch_samples.DEVICE)
    entries = driver.carried_out(jobs, options, done, path, digest)
    found = driver.classes(entries, campaign_of, class_of)
    paths = [path.relative_to(ROOT) for path in written(entries, found, options)]
    counts = {f"{c} {CAMPAIGNS[c].TITLE}": of for c, of in totals(entries).items()}
    return driver.told(found, counts, paths, start)


if __name__ == "__main__":
    sys.exit(main())
