"""Whether compiled functions see that Python state has changed: a grid of ways to change it."""

import collections
import contextvars
import dataclasses
import enum
import functools
import io
import itertools
import math
import operator
import os
import pathlib
import queue
import random
import tempfile
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import RegradError
from tests.helpers.paths import DOCS
from tests.helpers.ways import REFUSED, UNSEEN, WAYS

MODULES = [
    collections, contextvars, dataclasses, enum, functools, io, itertools, jax, jnp, math, np,
    operator, os, pathlib, queue, random, rg, tempfile, threading, types, weakref,
]  # fmt: skip
NAMES = {"jax.numpy": "jnp", "numpy": "np", "regrad": "rg"}
COUNT = itertools.count()


def results(way, jit):
    """What the function gives before the change and after it."""
    space = {NAMES.get(m.__name__, m.__name__): m for m in MODULES}
    space.update(__name__="way", count=COUNT, jit=jit, x=rg.tensor([0.5, -2.0]))
    exec(way.setup, space)
    exec(f"f = lambda x: {way.f}" if way.f else "", space)
    exec(f"J = jit(f, {way.options})", space)
    before = [listed(eval(way.call, space)) for _ in range(2)][1]
    exec(way.change, space)
    return before, listed(eval(way.call, space))


def listed(y):
    return [str(y.dtype), y.tolist()]


def uncompiled(f, **options):
    return f


def outcome(way, **options):
    """What a compiled function does about a change: "right", "stale", or the name of an error."""
    due = results(way, uncompiled)
    assert due[0] != due[1]
    try:
        before, after = results(way, functools.partial(rg.jit, **options))
    except RegradError as error:
        return type(error).__name__
    assert before == due[0]
    return "right" if after == due[1] else "stale"


EXPECTED = {name: "stale" for names in UNSEEN.values() for name in names}
EXPECTED |= {name: error for error, names in REFUSED.items() for name in names}
assert EXPECTED.keys() <= {way.name for way in WAYS}


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.name)
def test_a_change_is_seen(way):
    """Or refused, or it belongs to a kind that the docs name; `verify` finds it."""
    expected = EXPECTED.get(way.name, "right")
    assert outcome(way) == expected
    assert outcome(way, verify=True) == ("StaleError" if expected == "stale" else expected)


def test_the_docs_name_each_kind_of_change_that_is_not_seen():
    text = (DOCS / "compiled.md").read_text()
    table = text.split("| what changes |")[1].split("\n\n")[0]
    rows = [row.split("|")[1].strip() for row in table.splitlines()[2:]]
    assert [any(row.startswith(kind) for kind in UNSEEN) for row in rows] == [True] * len(UNSEEN)
