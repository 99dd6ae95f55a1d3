"""The grid of rules in every context, on PyTorch, JAX, HIPS autograd and regrad.

    python -m tests.campaigns.peers                 all of it (some minutes)
    python -m tests.campaigns.peers --only JAX      one library
    python -m tests.campaigns.peers --show          the programs of the silent cells

Each library has ways of its own to give an op another gradient, and places in which the op may be
used. For every op type, way and place one short program runs (`peer_programs`), with a rule whose
answer is `dy * (3 * x + 7)`. The rule *fires* (the derivative is that of the rule), or an error is
*raised*, or it is *silent*: another number came, without an error. Where the rule's own answer is
wrong only an error is right. A place does not *apply* where the same program fails without a rule,
or where the way has no such thing.

What a library's documentation says of a silent cell is in `NOTES`: a mechanism that does not
promise to fire there breaks no promise. Where a scope of regrad's only *warns*, that has a column
of its own. The results are in `tests/campaigns/results/peers.json`; docs/proof.md shows them.
"""

import argparse
import sys
import textwrap
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np
import tqdm

from tests.campaigns import records
from tests.campaigns.peer_programs import (
    ERROR,
    JAX_ALIASES,
    LIBRARIES,
    OLD,
    OPERATORS,
    OPS,
    RULE,
    TORCH_ALIASES,
    Library,
    Place,
    Way,
)
from tests.campaigns.proof_page import table

PATH = records.RESULTS / "peers.json"
FIRES, RAISES, WARNS, SILENT = "fires", "raises", "warns", "silent"
DETAIL = 200
BARE = Way("no rule", "f = own", replaces=True)
SERIAL = count()


# -- one program -----------------------------------------------------------------------------------


def parts(library: Library, way: Way, place: Place, op_type: str) -> list[str] | None:
    """The start, what comes before, the setup, the program, the undoing; None if not there."""
    name = OPS[op_type]
    if library.name == "HIPS autograd":
        name = OLD.get(name, name)
    aliases = {"PyTorch": TORCH_ALIASES, "JAX": JAX_ALIASES}.get(library.name, {})
    words = {
        "ANSWER": place.answer or f"dy * ({RULE})", "FORWARD": place.forward or "own(x)",
        "NAME": name, "TYPE": op_type, "SERIAL": str(next(SERIAL)), "ALIAS": aliases.get(name, ""),
        "OPERATOR": OPERATORS.get(name, ""),
    }  # fmt: skip
    setup = way.setup
    if place.own:  # the setup runs where the program says so
        setup = f"def made(w):\n{textwrap.indent(setup, '    ')}\n    return f"
    texts = [library.start, place.before, setup, place.program, way.undo]
    if any(word in text and not words[word] for word in words for text in texts):
        return None
    return [replaced(text, words) for text in texts]


def replaced(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def program(library: Library, way: Way, place: Place, op_type: str) -> str:
    """The whole as one program that prints what came, with what is due beside it."""
    texts = parts(library, way, place, op_type) or []
    x = f"x = np.array({points(op_type).tolist()})"
    lines = ["import numpy as np", x, *texts[:-1], f"print(got)  # due: {place.due}"]
    return "\n".join(text.strip() for text in lines if text) + "\n"


def points(op_type: str) -> np.ndarray:
    return np.array([1.5, 1.25, 1.75] if op_type == "Acosh" else [0.5, 0.25, 0.75])


def ran(library: Library, way: Way, place: Place, op_type: str) -> tuple[str, str] | None:
    """What came of one program, in a word and in detail; None where it has no such thing."""
    texts = parts(library, way, place, op_type)
    if texts is None:
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = outcome(texts, place, op_type)
    words = [str(w.message) for w in said if w.category.__name__ == "UnusedOverrideWarning"]
    return (WARNS, words[0][:DETAIL]) if found[0] == SILENT and words else found


def outcome(texts: Sequence[str], place: Place, op_type: str) -> tuple[str, str]:
    start, *steps, undo = texts
    module = ModuleType("peer_program")  # (compilers look names up in the module)
    sys.modules[module.__name__] = module
    scope = vars(module)
    scope["x"] = points(op_type)
    exec(start, scope)
    try:
        for text in steps:
            exec(text, scope)
        return compared(scope["got"], place, op_type)
    except Exception as error:
        return RAISES, f"{type(error).__name__}: {error}".strip().splitlines()[0][:DETAIL]
    finally:
        exec(undo, scope)
        del sys.modules[module.__name__]


def compared(got: Any, place: Place, op_type: str) -> tuple[str, str]:
    found = got.tolist() if hasattr(got, "tolist") else got
    if place.due == ERROR:
        return SILENT, f"{found} instead of an error"
    scope = {"x": points(op_type), "own": getattr(np, OLD.get(OPS[op_type], OPS[op_type]))}
    due = np.asarray(eval(place.due, scope))
    if np.shape(found) == due.shape and np.allclose(found, due, rtol=1e-6):
        return FIRES, ""
    return SILENT, f"{np.round(found, 4).tolist()} instead of {due.round(4).tolist()}"


def applies(library: Library, way: Way, place: Place, op_type: str) -> bool:
    """Whether the way has such a place; a spelling must run where there is no rule."""
    if not place.spelled:
        return not (place.own and way.replaces)
    found = ran(library, BARE, place, op_type) if way.replaces else None
    return found is not None and found[0] != RAISES


# -- the grid --------------------------------------------------------------------------------------


def cells(only: str = "") -> Iterator[tuple[Library, Way, Place]]:
    for library in LIBRARIES:
        if library.name.startswith(only):
            for way in library.ways:
                for place in library.places:
                    yield library, way, place


def cell(
    library: Library, way: Way, place: Place, ops: Sequence[str] = tuple(OPS)
) -> dict[str, Any]:
    """One way in one place: counts over the op types, and of each outcome the shortest detail."""
    counts: Counter[str] = Counter()
    details: dict[str, list[str]] = defaultdict(list)
    for op_type in ops:
        found = ran(library, way, place, op_type) if applies(library, way, place, op_type) else None
        if found is not None:
            counts[found[0]] += 1
            details[found[0]].append(f"{op_type}: {found[1]}")
    return {
        "library": library.name, "way": way.name, "place": place.name, "counts": dict(counts),
        "details": {word: min(texts, key=len) for word, texts in details.items() if word != FIRES},
    }  # fmt: skip


# -- the page --------------------------------------------------------------------------------------


def report(content: Mapping[str, Any]) -> str:
    """Return the tables for docs/proof.md: counts by library and way, and a grid for each."""
    by_library = defaultdict(list)
    for each in content["cells"]:
        by_library[each["library"]].append(each)
    facts = f"{records.line(content)}, {content['op types']} elementwise op types."
    blocks = [facts, summary(content["cells"])]
    for name, found in by_library.items():
        blocks += [f"#### {name}", grid(found), *footnotes(found)]
    return "\n\n".join(blocks)


def summary(found: Sequence[Mapping[str, Any]]) -> str:
    """The counts of each way; silence that its documentation tells of is counted beside."""
    rows = []
    for key in dict.fromkeys((each["library"], each["way"]) for each in found):
        mine = [each for each in found if (each["library"], each["way"]) == key]
        counts = sum((Counter(each["counts"]) for each in mine), Counter[str]())
        told = sum(each["counts"].get(SILENT, 0) for each in mine if documented(each))
        numbers = [sum(counts.values()), counts[FIRES], counts[RAISES], counts[WARNS]]
        rows.append([*key, *[f"{n:,}" for n in [*numbers, counts[SILENT], told]]])
    header = ["", "way", "cases", FIRES, RAISES, WARNS, SILENT, "of which documented"]
    return table(header, rows, numbers=6)


def grid(found: Sequence[Mapping[str, Any]]) -> str:
    """Places by ways, with the number of op types for each outcome."""
    ways = list(dict.fromkeys(each["way"] for each in found))
    places = dict.fromkeys(each["place"] for each in found)
    texts = {(each["place"], each["way"]): shown(each, found) for each in found}
    rows = [[place, *[texts[place, way] for way in ways]] for place in places]
    return table(["", *ways], rows)


def shown(each: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    counts = each["counts"]
    words = [
        f"**{word} {counts[word]}**" if word == SILENT else f"{word} {counts[word]}"
        for word in (FIRES, RAISES, WARNS, SILENT)
        if word in counts
    ]
    said = notes(found)
    mark = f" [{said.index(note(each)) + 1}]" if note(each) else ""
    return (", ".join(words) or "–") + mark


def note(each: Mapping[str, Any]) -> str:
    """What is to be said of a cell that is silent, or warns."""
    if not {SILENT, WARNS} & set(each["counts"]):
        return ""
    for library, way, place, text in NOTES:
        if library == each["library"] and way in each["way"] and place in each["place"]:
            return text
    return ""


def documented(each: Mapping[str, Any]) -> bool:
    return note(each).startswith("Documented")


def notes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(filter(None, map(note, found))))


def footnotes(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if said := notes(found):
        yield "\n".join(f"[{i}] {text}  " for i, text in enumerate(said, 1))


# library, way, place (parts of their names): what is to be said. The first that fits counts.
EXTENDING = "https://docs.pytorch.org/docs/stable/notes/extending.func.html"
PATCHED = (
    "Not a mechanism of the library: other spellings of the op, names that were imported before, "
    "and programs that are compiled already, never look at the name again. It is in the table "
    "because it is what people do to models that they do not edit."
)
SUMMED = (
    "What a backward returns is summed to the shape of the input as broadcasting would have it, "
    "and cast to its dtype; only what cannot be summed is an error."
)
NOTES = [
    ("PyTorch", "", "in the closure",
     f"Documented: tensors must not be captured, and not all such cases are caught "
     f"([Extending torch.func]({EXTENDING}), Limitations and gotchas)."),
    ("PyTorch", "", "answer:", SUMMED),
    ("PyTorch", "custom op", "forward mode",
     "`register_autograd` registers a backward; in forward mode the tangent is zero."),
    ("PyTorch", "hook", "forward mode",
     "Documented by its name: a backward hook is called in the backward pass only."),
    ("PyTorch", "in place of the name", "", PATCHED),
    ("JAX", "", "answer: integers", "Shapes are checked, and dtypes of tangents; integers pass "
     "as the cotangent of a float."),
    ("JAX", "in place of the name", "", PATCHED),
    ("HIPS autograd", "", "answer:",
     "Documented: since version 1.2 there are hardly any checks of what a rule returns, for speed "
     "([update guide](https://github.com/HIPS/autograd/blob/master/docs/updateguide.md))."),
    ("HIPS autograd", "existing op", "forward mode",
     "Documented: `defvjp` is for reverse mode; forward mode has rules of its own, by `defjvp`."),
    ("HIPS autograd", "existing op", "",
     "`sign`, `floor`, `ceil` and `round` are declared to have no gradient, and a rule that is "
     "defined for them later is never looked up."),
    ("regrad", "gradient_override_map", "thread",
     "Documented (P5): an override is confined to its thread. Here a thread does all of the work "
     "within the scope; the scope warns at its end that its rule matched nothing."),
]  # fmt: skip


# -- the command -----------------------------------------------------------------------------------


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.peers")
    parser.add_argument("--only", default="", help="the library whose name begins like this")
    parser.add_argument("--show", action="store_true", help="print the programs that are silent")
    options = parser.parse_args(given)
    if options.show:
        print("\n".join(silent_programs(options.only)))
        return 0
    start = time.perf_counter()
    found = [cell(*each) for each in tqdm.tqdm(list(cells(options.only)), unit="cell")]
    content = {
        **records.facts("tests.campaigns.peers"), "seconds": round(time.perf_counter() - start),
        "op types": len(OPS), "cells": found,
    }  # fmt: skip
    if options.only:
        print(report(content))
    else:
        records.write(PATH, content)
    return 0


def silent_programs(only: str) -> Iterator[str]:
    """The programs of the cells that are silent, each for one op type."""
    found = {
        (e["library"], e["way"], e["place"]): e["details"] for e in records.read(PATH)["cells"]
    }
    for library, way, place in cells(only):
        details = found[library.name, way.name, place.name]
        if SILENT in details:
            op_type, _, detail = details[SILENT].partition(": ")
            title = f"# {library.name}, {way.name}, {place.name}: {detail}"
            yield f"{title}\n{program(library, way, place, op_type)}"


if __name__ == "__main__":
    sys.exit(main())
