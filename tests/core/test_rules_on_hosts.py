"""Each row of `tests.samples.rules` on each of its hosts."""

from __future__ import annotations

import numpy as np
import pytest

from regrad.errors import RuleError
from tests.helpers.hosts import HOSTS, listed, weights
from tests.samples.rules import ROWS

RUNS = [(row, host) for row in ROWS for host in row.hosts]


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("row", "host"), RUNS, ids=lambda part: getattr(part, "name", part))
def test_a_rule_on_a_host(row, host):
    run, (key, f) = HOSTS[host], row.program

    def rules(o):
        return {key(o) if callable(key) else key: row.rule}

    if isinstance(row.due, str):
        with pytest.raises((RuleError, ValueError), match=row.due):
            run(f, rules, row.xs)
        return
    ys, found, used = run(f, rules, row.xs)
    close(ys, run(f, lambda o: {}, row.xs)[0])
    arriving = weights(ys)
    dys = arriving[0] if len(arriving) == 1 else arriving
    close(found, listed(row.due(dys, *row.xs)))
    used.assert_fired()
    if row.second:
        close(run(f, rules, row.xs, 2)[1], listed(row.second(dys, *row.xs)))
