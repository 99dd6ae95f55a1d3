"""Measure the tool against others: `python -m bench.gradbench.run --gradbench CHECKOUT`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench import report

from . import table
from .checkout import EVALS, PEERS, Checkout, build_manual, opened
from .session import Session, held

RESULTS = Path(__file__).parents[1] / "results"
SECONDS = 300.0  # the limit of one session
# The sizes to time: small, middle and large ones of the evals' own defaults
TIMED = {
    "lse": "-n 2500 40000 320000",
    "llsq": "-n 16 256 4096",
    "det": "-l 5 7 9",
    "kmeans": "-k 10 100 1000 -n 10000 -d 16",
    "gmm": "-d 2 10 64 -k 5 25",
    "ode": "-n 1000 100000 -s 10 100",
    "lstm": "-l 2 -c 1024",
    "ba": "--min 2 --max 3",
    "ht": "--min 7 --max 8",
}
QUICK = {
    "lse": "-n 2500 40000",
    "llsq": "-n 16 4096",
    "det": "-l 5 7",
    "kmeans": "-k 10 100 -n 1000 -d 8",
    "gmm": "-d 2 10 -k 5",
    "ode": "-n 1000 -s 10",
    "lstm": "-l 2 -c 128",
    "ba": "--min 1 --max 1",
    "ht": "--min 1 --max 1",
}
# Tools count the first call, which compiles, so a time limit alone may leave no further call.
ENOUGH = "--min-runs 21 --min-seconds 0.3"
# The files of ht that a checkout without large files contains
WHOLE = {"ht": "--max 11"}
Rounds = dict[tuple[str, str], list[Session]]  # by eval and tool


def main() -> None:
    options = arguments()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        checkout = opened(options.gradbench.resolve(), Path(folder), options.python)
        missing = build_manual(checkout)
        about = [
            f"- Command: `{command(options)}`",
            f"- One thread each, on one CPU; load average {load:.1f} at the start",
            f"- Machine: {report.described()}",
            f"- Versions: Python {sys.version.split()[0]}, "
            + ", ".join(checkout.versions())
            + f"; regrad at commit {report.commit()}",
        ]
        whole = {} if options.quick else validated(checkout, options.eval)
        rounds: Rounds = {}
        for _ in range(options.rounds):  # rewritten each round, so an interrupted run is recorded
            another_round(rounds, checkout, options, {"manual": missing} if missing else {})
            text = table.markdown(about, whole, rounds, ["regrad", *options.peers])
            written(text, options)
    print(text)


def written(text: str, options: argparse.Namespace) -> None:
    """Write the report, unless it is from a part or a quick run."""
    if not options.quick and len(options.eval) == len(EVALS):
        path = RESULTS / f"{report.today()}-{report.slug()}-gradbench.md"
        path.write_text(text, encoding="utf-8")
        print(f"Written to bench/results/{path.name}", file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gradbench.run", description=__doc__)
    add = parser.add_argument
    add("--gradbench", type=Path, required=True, metavar="CHECKOUT", help="of GradBench")
    add("--eval", nargs="+", choices=EVALS, default=EVALS, metavar="NAME", help="these evals only")
    add("--peers", default="jax,pytorch,tensorflow,manual", help="tools to measure against regrad")
    add("--python", default=sys.executable, help="for the evals and the peers")
    add("--rounds", type=int, default=3)
    add("--quick", action="store_true", help="small sizes, one round; writes nothing")
    options = parser.parse_args()
    options.peers = [name for name in options.peers.split(",") if name]
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"unknown peers {', '.join(unknown)}; known are {', '.join(PEERS)}")
    if options.quick:
        options.rounds = 1
    return options


def command(options: argparse.Namespace) -> str:
    """Return the command, without paths of the machine."""
    words = ["python -m bench.gradbench.run --gradbench CHECKOUT", "--peers"]
    words += [",".join(options.peers), f"--rounds {options.rounds}"]
    return " ".join(words)


def validated(checkout: Checkout, evals: Sequence[str]) -> dict[str, Session]:
    """Run regrad's tool at all default sizes, twice each."""
    whole = {}
    for name in evals:
        options = [] if name == "hello" else ["--min-runs", "2", "--min-seconds", "0"]
        options += WHOLE.get(name, "").split()
        tool = checkout.tool("regrad")
        whole[name] = held(checkout.eval(name, options), tool, 5 * SECONDS)
        print(f"{name}: {table.verdict(whole[name])}", file=sys.stderr, flush=True)
    return whole


def another_round(
    rounds: Rounds, checkout: Checkout, options: argparse.Namespace, missing: Mapping[str, str]
) -> None:
    """Run each eval with each tool once, at the sizes to be timed."""
    for name in options.eval:
        words = (QUICK if options.quick else TIMED).get(name, "").split()
        words += [] if name == "hello" else ENOUGH.split()
        for tool in ["regrad", *options.peers]:
            sessions = rounds.setdefault((name, tool), [])
            if sessions and sessions[-1].failure:
                continue  # it would fail again
            why = missing.get(tool) or (tool != "regrad" and checkout.listed(tool, name))
            if why:
                sessions.append(Session([], why))
            else:
                sessions.append(held(checkout.eval(name, words), checkout.tool(tool), SECONDS))
            note = f"{name}, round {len(sessions)}, {tool}: {table.verdict(sessions[-1])}"
            print(note, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
