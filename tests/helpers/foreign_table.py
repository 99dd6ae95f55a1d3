"""The tables of docs/foreign.md; `python -m tests.helpers.foreign_table` writes them."""

import torch
import torch.nn.functional as F
import torch.overrides

from regrad.torch.composites import fused
from regrad.torch.optypes import DUNDERS, families, spellings
from tests.helpers.paths import DOCS

PAGE = DOCS / "foreign.md"
PLACES = {"torch.": torch, "x.": torch.Tensor, "F.": F, "torch.special.": torch.special,
          "torch.linalg.": torch.linalg}  # fmt: skip
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "matmul": "@",
         "pow": "**", "mod": "%"}  # fmt: skip


def op_types() -> str:
    """Op types, the names that a rule may ask for, and how torch spells them."""
    lines = ["| op type | a rule may name | in torch |", "|---|---|---|"]
    for family in families().values():
        taken = {ours for _, ours in family.parameters}
        names = [i.name for i in family.op.inputs] + [n for n in family.op.attrs if n in taken]
        asked = ", ".join(f"`{n}`" for n in (*names, "y"))
        torchs = ", ".join(f"`{s}`" for s in spelled(family))
        lines.append(f"| `{family.type}` | {asked} | {torchs} |")
    return "\n".join(lines)


def spelled(family):
    for name in family.names:
        for place, owner in PLACES.items():
            found = spellings().get(getattr(owner, name, None))
            if found is not None and found.family.type == family.type:
                yield place + name
    words = [w for n in family.names for w in DUNDERS.get(n, "").split()]
    two = len(family.parameters) == 2
    yield from dict.fromkeys(f"x {SIGNS[w]} y" for w in words if two)
    if family.type == "Neg":
        yield "-x"


def composites() -> str:
    """What computes an op type among others."""
    rows = {}
    for function, found in fused().items():
        if isinstance(function, torch._ops.OpOverload):
            continue
        name = (torch.overrides.resolve_name(function) or function.__name__).rpartition(".")[2]
        for row in found:
            if row.when is None:
                rows[name] = sorted(row.contains), row.parts is not None
    lines = ["| callable | when one of these is overridden |", "|---|---|"]
    for name, (types, apart) in sorted(rows.items()):
        which = ", ".join(f"`{t}`" for t in types)
        lines.append(f"| `{name}` | {which}{'' if apart else ': refused'} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page, with the tables of the code."""
    for name, make in (("op types", op_types), ("composites", composites)):
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        page = f"{before}{start}\n{make()}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
