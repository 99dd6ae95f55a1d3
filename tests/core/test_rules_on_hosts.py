"""Each row of `tests.samples.rules` on each of its hosts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import regrad as rg
from regrad.core.rule import EXTRAS, Extra
from regrad.errors import RuleError, UnknownOpError
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


def by_name(dy, name_length):
    return name_length * dy


def by_name_and_own(dy, name_length, builtin):
    return name_length * builtin(dy)


@pytest.mark.parametrize("rule", [by_name, by_name_and_own])
@pytest.mark.parametrize("host", HOSTS)
def test_a_name_for_rules_is_one_entry_for_all_hosts(host, rule, monkeypatch):
    monkeypatch.setitem(EXTRAS, "name_length", Extra(lambda record: len(record.op.type)))
    x = np.array([0.5, -1.0])
    _, (dx,), used = HOSTS[host](lambda o, x: o.tanh(x), lambda o: {"Tanh": rule}, (x,))
    own = 1 - np.tanh(x) ** 2 if rule is by_name_and_own else 1
    np.testing.assert_allclose(dx, 4 * weights([x])[0] * own)
    used.assert_fired()


def test_the_key_of_other_hosts_names_the_own():
    with (
        pytest.raises(UnknownOpError, match=r"key of a comparison that is cast.*key 'Step'"),
        rg.gradient_override_map({"Threshold": rg.rules.triangle()}),
    ):
        pass
