"""What is checked of each op, beside PyTorch's own table: `python -m tests.campaigns.op_tables`.

PyTorch keeps a table of its ops for its own tests, OpInfo (`op_db`): for each op the dtypes, a
function that makes samples, and whether second derivatives and forward mode are supported, which
then are checked by differences. regrad's table is `tests/samples`. Both are counted here. The
results are in `tests/campaigns/results/op_tables.json`; docs/proof.md shows them.
"""

import itertools
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import regrad as rg
from tests.campaigns import numerics, records, torch_samples
from tests.helpers import sample_runs as runs

PATH = records.RESULTS / "op_tables.json"
MANY = 10_000  # samples of one op are counted up to here


def of_torch() -> dict[str, int]:
    """The counts of OpInfo, on the CPU."""
    every = torch_samples.op_db()
    differentiated = [op for op in every if op.supports_autograd]
    return {
        "ops": len(every), "of them differentiated": len(differentiated),
        "pairs of op and dtype": sum(len(op.supported_dtypes("cpu")) for op in every),
        "samples of float64": sum(map(samples, differentiated)),
        "ops checked to first order": len(differentiated),
        "ops checked to second order": sum(op.supports_gradgrad for op in differentiated),
        "ops checked to third order": 0,
        "ops checked in forward mode": sum(op.supports_forward_ad for op in differentiated),
        "ops checked in forward mode over reverse": sum(
            op.supports_fwgrad_bwgrad for op in differentiated),
    }  # fmt: skip


def samples(op: Any) -> int:
    """The samples in float64 that the tests of gradients use."""
    dtypes = op.supported_backward_dtypes("cpu")
    if torch.float64 not in dtypes:
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = op.sample_inputs("cpu", torch.float64, requires_grad=True)
        return sum(1 for _ in itertools.islice(found, MANY))


def of_regrad() -> dict[str, int]:
    """The same counts of the table of samples and of F2."""
    reached = {order: set(covered(order)) for order in (1, 2, 3)}
    every = {rg.find_op(t).type for row in runs.ROWS for t in row.covers}
    dtypes = {
        (rg.find_op(t).type, dtype)
        for row in numerics.ROWS
        for dtype in numerics.dtypes_of(row)
        for t in row.covers
    }
    return {
        "ops": len(every),
        "of them differentiated": len(reached[1]),
        "pairs of op and dtype": len(dtypes),
        "samples of float64": sum("float64" in numerics.dtypes_of(row) for row in numerics.ROWS),
        "ops checked to first order": len(reached[1]),
        "ops checked to second order": len(reached[2]),
        "ops checked to third order": len(reached[3]),
        "ops checked in forward mode": len({*covered(1, FORWARD)}),
        "ops checked in forward mode over reverse": len({*covered(2, FORWARD)}),
    }


FORWARD = ("float64",)  # F2 runs forward mode on real numbers


def covered(order: int, dtypes: Sequence[str] = ("float64", "complex128")) -> Iterator[str]:
    """The op types that some row of these dtypes differentiates so often."""
    for row in numerics.ROWS:
        if row.order >= order and numerics.dtypes_of(row)[0] in dtypes:
            yield from (rg.find_op(t).type for t in row.covers)


def report(content: Mapping[str, Any]) -> str:
    """Return the table for docs/proof.md."""
    versions = ", ".join(content["versions"])
    lines = [f"{content['date']}; {versions}; `{content['command']}`.", ""]
    lines += ["| | PyTorch's OpInfo | regrad's samples |", "|---|--:|--:|"]
    for name, count in content["torch"].items():
        lines.append(f"| {name} | {count:,} | {content['regrad'][name]:,} |")
    return "\n".join(lines)


def main() -> None:
    start = time.perf_counter()
    counts = {"torch": of_torch(), "regrad": of_regrad()}
    facts = records.facts("tests.campaigns.op_tables")
    records.write(PATH, {**facts, "seconds": round(time.perf_counter() - start), **counts})


if __name__ == "__main__":
    main()
