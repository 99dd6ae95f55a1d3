"""docs/proof.md, made of what the campaigns have recorded: `python -m tests.campaigns.proof page`.

`proof_page.md` is the page's prose. A line `[[figures]]` in it stands for the table of counts,
`[[runs]]` for the list of runs, `[[campaigns]]` for a section on each campaign: its module's
docstring, and what it refused or explained, by class, with an example of each.
"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from bench import report
from tests.campaigns.outcomes import OUTCOMES
from tests.campaigns.records import RESULTS
from tests.helpers.paths import ROOT

PROSE = Path(__file__).parent / "proof_page.md"
PAGE, PLOT = ROOT / "docs/proof.md", ROOT / "docs/proof.svg"
COLOURS = ("#1a7f37", "#8250df", "#bf8700", "#6e7781", "#cf222e", "#000000")
FEW = 6  # classes of a kind that a section shows

Campaigns = Mapping[str, ModuleType]


class Record(NamedTuple):
    """One file of results: `F5-5800.json` has the programs of the campaign F5 from 5800 on."""

    campaign: str
    part: str
    content: Mapping[str, Any]

    @property
    def counts(self) -> Mapping[str, int]:
        return self.content["counts"][self.campaign]

    @property
    def file(self) -> str:
        return "-".join(filter(None, [self.campaign, self.part])) + ".json"

    def title(self, campaigns: Campaigns) -> str:
        where = ", on a GPU" if self.part == "cuda" else ""
        return f"{self.campaign} {campaigns[self.campaign].TITLE}{where}"


def records(campaigns: Campaigns) -> list[Record]:
    """The files of results, in the order of the campaigns."""
    found = []
    for path in RESULTS.glob("F*.json"):
        campaign, _, part = path.stem.partition("-")
        if campaign in campaigns:
            content = json.loads(path.read_text(encoding="utf-8"))
            found.append(Record(campaign, part, content))
    return sorted(found, key=lambda r: (int(r.campaign[1:]), len(r.part), r.part))


def write(campaigns: Campaigns, others: Mapping[str, str]) -> None:
    """Make the page and its picture."""
    found = records(campaigns)
    draw(totals(found, campaigns))
    PAGE.write_text(page(found, campaigns, others), encoding="utf-8")


def page(found: Sequence[Record], campaigns: Campaigns, others: Mapping[str, str]) -> str:
    """Return the text of the page: the prose, with tables at the marks.

    `others` has the texts of marks that are not about the campaigns, by name.
    """
    blocks = {
        **others, "figures": figures(found, campaigns),
        "campaigns": "\n\n".join(sections(found, campaigns)), "runs": runs(found),
    }  # fmt: skip
    return report.filled(PROSE.read_text(encoding="utf-8"), blocks)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A table in Markdown, whose last columns are numbers."""
    rule = ["---"] * (len(header) - numbers) + ["--:"] * numbers
    cells = [[re.sub(r"\s+", " ", text).replace("|", "\\|") for text in row] for row in rows]
    return "\n".join(map(report.table_line, [header, rule, *cells]))


# -- the figures -----------------------------------------------------------------------------------


def totals(found: Sequence[Record], campaigns: Campaigns) -> dict[str, Counter[str]]:
    """The counts by title: records that go on where another ended are one."""
    counts = defaultdict[str, Counter[str]](Counter)
    for record in found:
        counts[record.title(campaigns)].update(record.counts)
    return dict(counts)


def figures(found: Sequence[Record], campaigns: Campaigns) -> str:
    """The counts of all campaigns."""
    counts = totals(found, campaigns)
    return counted({**counts, "all": sum(counts.values(), Counter[str]())})


def counted(counts: Mapping[str, Mapping[str, int]]) -> str:
    """A table of counts, by title and outcome."""
    rows = [
        [title, *[f"{n:,}" for n in [sum(of.values()), *[of.get(o, 0) for o in OUTCOMES]]]]
        for title, of in counts.items()
    ]
    return table(["", "cases", *OUTCOMES], rows, numbers=1 + len(OUTCOMES))


def runs(found: Sequence[Record]) -> str:
    header = ["", "date", "machine", "versions", "command", "commit", "time", "record"]
    return table(header, [run(r) for r in found])


def run(record: Record) -> list[str]:
    c = record.content
    versions = ", ".join(c["versions"])
    link = f"[{record.file}](../{RESULTS.relative_to(ROOT)}/{record.file})"
    command = f"`{c['command']}`"
    seconds = report.time(c["seconds"])
    return [record.campaign, c["date"], c["machine"], versions, command, c["commit"], seconds, link]


# -- the campaigns ---------------------------------------------------------------------------------


def sections(found: Sequence[Record], campaigns: Campaigns) -> Iterator[str]:
    """A section for each campaign that has a record."""
    for name in dict.fromkeys(r.campaign for r in found):
        mine = [r for r in found if r.campaign == name]
        title, _, text = (campaigns[name].__doc__ or "").partition("\n\n")
        parts = [f"### {' '.join(title.split()).rstrip('.')}", text.strip()]
        if tables := getattr(campaigns[name], "tables", None):  # (a campaign's own view of them)
            parts.append(tables([each for r in mine for each in r.content["classes"]]))
        parts += folds(mine)
        yield "\n\n".join(parts)


def folds(mine: Sequence[Record]) -> Iterator[str]:
    """What was refused and so on, by kind, folded; and what must not be, unfolded."""
    classes = [each for record in mine for each in record.content["classes"]]
    for outcome in OUTCOMES[1:]:
        these = [each for each in classes if each["outcome"] == outcome]
        if these:
            count = f"{sum(each['count'] for each in these):,}"
            text = table(["", "cases", "for example"], list(kinds(these)))
            yield f"<details><summary>{outcome}: {count}</summary>\n\n{text}\n\n</details>"


def kinds(classes: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """The largest kinds, each with its count and an example; and how many there are beside."""
    found: dict[str, list[Any]] = defaultdict(list)
    reasons = {plain(each) for each in classes}
    told = len(reasons) <= 2 * FEW and not re.search(r"\d\d", "".join(reasons))
    for each in classes:
        found[kind(each, told)].append(each)
    largest = sorted(found.items(), key=lambda pair: -sum(e["count"] for e in pair[1]))
    for name, these in largest[:FEW]:
        shortest = min(these, key=lambda e: len(e["detail"]))
        count = sum(e["count"] for e in these)
        yield [name, f"{count:,}", example(shortest)]
    if rest := [e for _, these in largest[FEW:] for e in these]:
        names = f"{len(largest) - FEW} other kinds"
        yield [names, f"{sum(e['count'] for e in rest):,}", ""]


def kind(each: Mapping[str, Any], by_reason: bool) -> str:
    """The error that came, or the reason if these are few and no figures, or the class."""
    error = re.match(r"\w+Error\b", each["detail"])
    return error[0] if error else (by_reason and plain(each)) or each["class"]


def plain(each: Mapping[str, Any]) -> str:
    """What is said of a class, as text that is the same tomorrow."""
    return re.sub(r" at 0x\w+", "", each["detail"]).replace("`", "'")


def example(each: Mapping[str, Any]) -> str:
    text = plain(each)
    case = f"{each['class']}: {each['cases'][0]}".strip(": ").replace("`", "'")
    return f"`{case}`" + (f": `{text}`" if text else "")


# -- the picture -----------------------------------------------------------------------------------


def digest(counts: Mapping[str, Mapping[str, int]]) -> str:
    """What the picture shows, as a short text."""
    shown = [(title, dict(of)) for title, of in counts.items()]
    return hashlib.sha256(repr(shown).encode()).hexdigest()


def draw(counts: Mapping[str, Mapping[str, int]]) -> None:
    """Draw the share of each outcome in each campaign."""
    from bench.plot import picture

    with picture(PLOT, (9.5, 0.26 * len(counts) + 0.7), digest(counts)) as axes:
        for y, of in enumerate(counts.values()):
            left = 0.0
            total = sum(of.values())
            for outcome, colour in zip(OUTCOMES, COLOURS, strict=True):
                share = 100 * of.get(outcome, 0) / total
                axes.barh(y, share, left=left, color=colour, label="" if y else outcome)
                left += share
            axes.text(101, y, f"{total:,}", va="center")
        axes.set_yticks(range(len(counts)), [*counts])
        axes.set(xlim=(0, 100), ylim=(len(counts) - 0.4, -0.6), xlabel="per cent of the cases")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(ncols=len(OUTCOMES), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
