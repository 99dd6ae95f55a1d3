"""Each row of `tests.samples.rules` on each of its hosts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from regrad.errors import RuleError
from tests.helpers.hosts import HOSTS, listed, weights
from tests.samples.rules import ROWS, by

RUNS = [(row, host) for row in ROWS for host in row.hosts]


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.slow(but=330)
@pytest.mark.parametrize(("row", "host"), RUNS, ids=lambda part: getattr(part, "name", part))
def test_a_rule_on_a_host(row, host):
    (key, f), rule = row.program, row.rule
    inside = {"inside": True} if row.learns else {}
    run = partial(HOSTS[host], f, **row.options, **inside)

    def rules(o, *xs):
        return {key(o) if callable(key) else key: rule(o, *xs) if isinstance(rule, by) else rule}

    if isinstance(row.due, str | Exception):
        error = (RuleError, ValueError) if isinstance(row.due, str) else type(row.due)
        with pytest.raises(error, match=str(row.due)):
            run(rules, row.xs)
        return
    ys, found, used = run(rules, row.xs)
    close(ys, listed(row.value(*row.xs)) if row.value else HOSTS[host](f, lambda o: {}, row.xs)[0])
    arriving = weights(ys)
    dys = arriving[0] if len(arriving) == 1 else arriving
    close(found, listed(row.due(dys, *row.xs)))
    used.assert_fired()
    for nth, due in enumerate(listed(row.second or []), 2):
        close(run(rules, row.xs, nth)[1], listed(due(dys, *row.xs)))
