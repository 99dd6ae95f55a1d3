"""Which tests find which faults of the source.

Faults (`mutant_sources`, `past_faults`) are put into src/regrad one at a time, in memory. A mutant
is run by the tests that execute its line, the quick ones first, until one of them fails: it is
*found* by that test. It *survives* if all of them pass, or 640 of each command's. A survivor that
no test can find, since it changes no result, is listed with its reason in `EXPLAINED`.

python -m tests.campaigns.mutants list            the mutants, one a line
python -m tests.campaigns.mutants probe           one run of all tests: which run which lines
python -m tests.campaigns.mutants run [WORD …]    each mutant (with these words in its name)
python -m tests.campaigns.mutants files           test files that have found none, by others
python -m tests.campaigns.mutants record          write what was found into the record
python -m tests.campaigns.mutants table           the record as a table

`probe` and `run` keep what they find in out/mutants; `run` goes on where it was stopped. Several
processes share the mutants: `run --share 1/2` and `run --share 2/2`.
"""

from __future__ import annotations

import argparse
import json
import marshal
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from tests.campaigns import mutant_sources as sources
from tests.campaigns.mutant_sources import Mutant
from tests.campaigns.past_faults import PAST, Past
from tests.campaigns.records import facts, write
from tests.helpers.choices import number
from tests.helpers.paths import ROOT

OUT = ROOT / "out" / "mutants"
RECORD = Path(__file__).parent / "results" / "mutants.json"
AT_START = Path(__file__).parent / "at_start"
PYTEST = [sys.executable, "-m", "pytest", "-p", "tests.campaigns.mutant_plugin", "-p",
          "no:cacheprovider", "--tb=line", "-o", "faulthandler_timeout=60", "-o",
          "faulthandler_exit_on_timeout=true"]  # fmt: skip

# How many mutants of a kind are taken in each part of the package (others: one).
COUNTS = {"key": 2, "check": 2, "state": 2, "guard": 2, "swapped": 0, "nothing": 0}
PARTS = ("autodiff", "core", "graph", "jax", "ops", "torch", "transforms", "v1")
FOLDED = {"shapes": "ops", "rules": "others", "checking": "others", "inspection": "others",
          "train": "others"}  # fmt: skip

# Tests in the first, second and third process of a mutant: one that all of them pass survives.
STAGES = (40, 200, 400)
TRIES = 3  # mutants for a test file that has found none

_SHORTCUT = "a shortcut, and the road around it ends at the same"
_STRICT = "strict= between lists that have the same length, or is False anyway"
_NO_NODE = "it returns None, in which there is no node to look at"
EXPLAINED: dict[str, str] = {
    "torch/nodes.py:past:torch.autograd.backward is an op of the program": _NO_NODE,
    "autodiff/gradients.py:watchable:state:0": _SHORTCUT,
    "core/dispatch.py:call:state:0": _SHORTCUT,
    "core/foreign.py:ForeignRule.plan:key:0": "a plan that is not found again is made anew",
    "core/shapes.py:spread_axes:argument:0": _STRICT,
    "graph/plan.py:_resolved:argument:0": _STRICT,
    "torch/seeing/checks.py:_is_random:arithmetic:0": "another seed, and as good a one",
    "autodiff/guards.py:name_of:argument:0": _STRICT,
    "core/replacing.py:ReplacingRule.run:arithmetic:0": "names of inputs of a private op",
}


def part_of(file: str) -> str | None:
    folder = file.partition("/")[0]
    return folder if folder in PARTS else FOLDED.get(folder)


def mutants() -> list[Mutant | Past]:
    """Those of the sample, in a fixed order, and the faults that were there once."""
    found: dict[tuple[str | None, str], list[Mutant]] = defaultdict(list)
    for mutant in sources.chosen(2, part_of):
        found[part_of(mutant.file), mutant.kind].append(mutant)
    sample = [m for (_, kind), group in found.items() for m in group[: COUNTS.get(kind, 1)]]
    return [*sample, *PAST]


# -- processes -------------------------------------------------------------------------------------


def environment(codes: dict[str, CodeType], folder: Path, **more: Any) -> dict[str, str]:
    """The environment in which Python runs such code of regrad's modules."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {module: folder / f"{module}.code" for module in codes}
    for module, code in codes.items():
        paths[module].write_bytes(marshal.dumps(code))
    index = folder / "modules.json"
    index.write_text(json.dumps({m: str(p) for m, p in paths.items()}), encoding="utf-8")
    search = [str(AT_START), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"REGRAD_CHANGED": index, "PYTHONPATH": os.pathsep.join(filter(None, search)), **more}
    return {**os.environ, **{name: str(value) for name, value in own.items()}}


def call(command: Sequence[str], env: dict[str, str], limit: float, log: Path) -> int | None:
    """The exit status of a process; None if it runs for too long. No child of it is left."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# -- which tests run which lines -------------------------------------------------------------------


class Hits(NamedTuple):
    """What one run with probes has shown."""

    tests: dict[str, list[str]]  # by mutant: the tests that execute its statement
    seconds: dict[str, float]  # by test


def probe(arguments: Sequence[str]) -> None:
    """Run all tests with a probe in front of each mutant's statement."""
    places: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for mutant in mutants():
        places[mutant.file][mutant.line].append(mutant.name)
    codes = {
        sources.module_of(file): sources.code_with_probes(sources.SOURCE / file, names)
        for file, names in places.items()
    }
    hits = OUT / "hits"
    hits.mkdir(parents=True, exist_ok=True)
    for old in hits.glob("*.jsonl"):
        old.unlink()
    env = environment(codes, OUT / "probes", REGRAD_HITS=hits)
    print(
        subprocess.run([*PYTEST, "-n", "2", "--dist", "worksteal", *arguments], env=env, cwd=ROOT)
    )


def read_hits() -> Hits:
    """The lines that `probe` has left."""
    tests: dict[str, dict[str, None]] = defaultdict(dict)
    seconds: dict[str, float] = defaultdict(float)
    for path in sorted((OUT / "hits").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            test, names, time = json.loads(line)
            seconds[test] += time
            for name in names:
                tests[name][test] = None
    return Hits({name: list(found) for name, found in tests.items()}, seconds)


def in_stages(tests: list[str], seconds: dict[str, float]) -> list[list[str]]:
    """Some quick tests of few files; then some of all; then some more."""
    files = Counter(test.partition("::")[0] for test in tests)
    few = {file for file, _ in files.most_common(5)}
    quick = sorted(tests, key=lambda test: (test.partition("::")[0] not in few, seconds[test]))
    first = quick[: STAGES[0]]
    rest = sorted(set(tests) - {*first}, key=lambda t: (seconds[t] > 0.5, number(t)))
    stages = [first]
    for count in STAGES[1:]:  # (by file, as in a run of all: a test that forks may hang otherwise)
        stages.append(sorted(rest[:count]))
        rest = rest[count:]
    return stages


# -- one mutant ------------------------------------------------------------------------------------


def run_one(
    mutant: Mutant | Past, hits: Hits, quick: set[str] | None, folder: Path, stages: int
) -> dict[str, Any]:
    """Which test finds a mutant: one of `make test`, if one can, or of the whole suite."""
    # (tests may have moved since the probes)
    there = [t for t in hits.tests.get(mutant.name, []) if (ROOT / t.partition("::")[0]).exists()]
    groups = [there] if quick is None else [
        [t for t in there if t in quick], [t for t in there if t not in quick]
    ]  # fmt: skip
    env = mutant_environment(mutant, folder)
    found: dict[str, Any] = {
        "part": part_of(mutant.file), "tests": len(there), "stages": stages, "found": None,
    }  # fmt: skip
    for group, name in zip(groups, ("make test", "make test-all"), strict=False):
        for stage in filter(None, in_stages(group, hits.seconds)[:stages]):
            by = failing(stage, env, folder, 120 + 20 * sum(hits.seconds[t] for t in stage))
            if by is not None:
                return {**found, "found": by, "in": name}
    return found


def mutant_environment(mutant: Mutant | Past, folder: Path) -> dict[str, str]:
    files = {"REGRAD_TESTS": folder / "tests.json", "REGRAD_FAILED": folder / "failed.jsonl"}
    return environment({sources.module_of(mutant.file): mutant.code()}, folder, **files)


def failing(tests: list[str], env: dict[str, str], folder: Path, limit: float) -> str | None:
    """The first of these tests that fails, None if all pass."""
    (folder / "tests.json").write_text(json.dumps(tests), encoding="utf-8")
    failed = folder / "failed.jsonl"
    failed.unlink(missing_ok=True)
    files = sorted({test.partition("::")[0] for test in tests})
    status = call([*PYTEST, "-x", *files], env, limit, folder / "last.log")
    if failed.exists():
        return json.loads(failed.read_text(encoding="utf-8").splitlines()[0])[0]
    if status in (0, 5):
        return None
    if status == 4:
        raise LookupError((folder / "last.log").read_text(encoding="utf-8"))
    ended = "does not end" if status in (None, 1) else f"ends with the status {status}"
    return f"a process that {ended}, of {files[0]}"


def found_so_far() -> dict[str, Any]:
    """What the processes that share the mutants have found."""
    found: dict[str, Any] = {}
    for path in sorted(OUT.glob("found-*.json")):
        found |= json.loads(path.read_text(encoding="utf-8"))
    return found


def run(words: Sequence[str], stages: int, share: str) -> None:
    """Run the mutants whose names contain one of these words, and keep what was found.

    A mutant that has survived fewer stages is run again.
    """
    mine, shares = map(int, share.split("/"))
    path, folder = OUT / f"found-{mine}.json", OUT / f"mutant-{mine}"
    folder.mkdir(exist_ok=True)
    known = {name for name, row in found_so_far().items()
             if is_found(row) or row.get("stages", 0) >= stages}  # fmt: skip
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    hits, names = read_hits(), OUT / "quick.txt"
    quick = set(names.read_text(encoding="utf-8").split("\n")) if names.exists() else None
    for mutant in mutants()[mine - 1 :: shares]:
        if mutant.name in known or (words and not any(word in mutant.name for word in words)):
            continue
        found[mutant.name] = run_one(mutant, hits, quick, folder, stages)
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(mutant.name, "|", found[mutant.name]["found"] or "SURVIVES", flush=True)


def file_of(test: str) -> str:
    return test.partition("::")[0].removeprefix("tests/")


def files(share: str) -> None:
    """Let each test file that has found no mutant try some that other files have found."""
    mine, shares = map(int, share.split("/"))
    path, folder = OUT / f"files-{mine}.json", OUT / f"mutant-{mine}"
    folder.mkdir(exist_ok=True)
    tried: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    hits, found = read_hits(), found_so_far()
    executed: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name, row in found.items():
        for test in hits.tests.get(name, []) if is_found(row) else ():
            executed[file_of(test)].setdefault(name, []).append(test)
    known = {m.name: m for m in mutants()}
    idle = sorted(
        set(map(file_of, hits.seconds)) - {file_of(r["found"] or "") for r in found.values()}
    )
    for file in idle[mine - 1 :: shares]:
        if file in tried:
            continue
        rows = sorted(executed[file].items(), key=lambda item: (-len(item[1]), number(item[0])))
        by = None
        for name, tests in rows[:TRIES]:
            tests = [t for t in tests if (ROOT / t.partition("::")[0]).exists()]
            quick = sorted(sorted(tests, key=lambda t: hits.seconds[t])[:100])
            env = mutant_environment(known[name], folder)
            if by := failing(quick, env, folder, 120 + 20 * sum(hits.seconds[t] for t in quick)):
                by = f"{name}: {by}"
                break
        tried[file] = by
        path.write_text(json.dumps(tried, indent=1), encoding="utf-8")
        print(file, "|", by or ("finds none" if rows else "executes none"), flush=True)


# -- the record ------------------------------------------------------------------------------------


def record() -> None:
    """Write down what `run` has found, with the survivors' reasons."""
    found = found_so_far()
    texts = {m.name: m.text for m in mutants()}
    rows = {name: {**row, "text": texts[name]} for name, row in found.items() if name in texts}
    for name, row in rows.items():
        if row["found"] is None and name in EXPLAINED:
            row["explained"] = EXPLAINED[name]
    others: dict[str, Any] = {}
    for path in sorted(OUT.glob("files-*.json")):
        others |= json.loads(path.read_text(encoding="utf-8"))
    write(
        RECORD,
        {
            **facts("tests.campaigns.mutants", ("numpy", "jax", "torch")),
            "results": rows,
            "by_file": others,
        },
    )


def table() -> str:
    """The record in words: mutants found by part, then the survivors."""
    known = json.loads(RECORD.read_text(encoding="utf-8"))
    found = known["results"]
    lines = [
        "| part | mutants | found | of them by `make test` | explained |",
        "|---|---|---|---|---|",
    ]
    for part in sorted({row["part"] for row in found.values()}):
        rows = [row for row in found.values() if row["part"] == part]
        counts = [sum(map(test, rows)) for test in (is_found, is_found_soon, is_explained)]
        lines.append("| " + " | ".join([part, str(len(rows)), *map(str, counts)]) + " |")
    left = [f"{name}: {row['text']}" for name, row in found.items()
            if not is_found(row) and not is_explained(row)]  # fmt: skip
    late = [f"{name}: {row['found']}" for name, row in found.items()
            if is_found(row) and not is_found_soon(row)]  # fmt: skip
    first = Counter(file_of(row["found"]) for row in found.values() if is_found(row))
    by_file = [f"{file}: {count} first" for file, count in first.most_common()]
    by_file += [
        f"{file}: {by or 'none'}" for file, by in known["by_file"].items() if file not in first
    ]
    return "\n".join([
        *lines, "", "Found by nothing:", *left, "", "By `make test-all` alone:", *late,
        "", "By test file (those that found none first were given others):", *by_file,
    ])  # fmt: skip


def is_found(row: dict[str, Any]) -> bool:
    return row["found"] is not None


def is_found_soon(row: dict[str, Any]) -> bool:
    return row.get("in") == "make test"


def is_explained(row: dict[str, Any]) -> bool:
    return "explained" in row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("list", "probe", "run", "files", "record", "table"))
    parser.add_argument("words", nargs="*")
    parser.add_argument("--stages", type=int, default=len(STAGES), help="of tests for a mutant")
    parser.add_argument("--share", default="1/1", help="which part of the mutants, of how many")
    options, others = parser.parse_known_args()
    OUT.mkdir(parents=True, exist_ok=True)
    match options.command:
        case "list":
            for mutant in mutants():
                print(f"{mutant.name}  line {mutant.line}: {mutant.text}")
        case "probe":
            probe([*options.words, *others])
        case "run":
            run(options.words, options.stages, options.share)
        case "files":
            files(options.share)
        case "record":
            record()
        case "table":
            print(table())


if __name__ == "__main__":
    main()
