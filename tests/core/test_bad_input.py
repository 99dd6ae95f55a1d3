"""Calls that make no sense are refused by name; a slice of the campaign `malformed`."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import ArgumentError, InvalidValueError, RegistrationError, RegradError
from regrad.ops import array
from tests.campaigns import malformed
from tests.campaigns.verdicts import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT
from tests.helpers.rows import refused

x = rg.tensor([[1.0, 2.0], [3.0, 4.0]])
PACKAGES = {"torch": "torch", "jax": "jax", "jit": "jax", "random": "jax"}


@pytest.mark.parametrize("entry", malformed.CALLS, ids=lambda entry: entry[0][-60:])
def test_calls_of_the_list(entry):
    for word, package in PACKAGES.items():
        if word in entry[0]:
            pytest.importorskip(package)
    verdict = malformed.written(entry)
    assert verdict.outcome in (REFUSED, DELIVERED), verdict


@pytest.mark.slow(but=3)
@pytest.mark.filterwarnings("ignore")  # of NaN, say, which bad numbers make
@pytest.mark.parametrize("mode", ["numpy", "torch", "checkpoint", "graph"])
def test_a_slice_of_the_catalogue(mode):
    if mode == "torch":
        pytest.importorskip("torch")
    for name in malformed.names()[::9]:
        if malformed.applies(name, mode):
            for verdict in malformed.run(f"{name}/{mode}", quick=True):
                assert verdict.outcome not in (SILENT, BROKEN), verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", ["broadcast_to, jit", "repeat, jit"])
def test_a_size_that_would_end_the_process_is_refused(name):
    assert malformed.crashed(name, malformed.CRASHES[name]).outcome == REFUSED


def test_the_campaign_can_fail(monkeypatch):
    assert malformed.written(("rg.sum(1.0)", "sum")).outcome == SILENT
    entry = next(entry for entry in malformed.CALLS if "rg.roll(" in entry[0])
    monkeypatch.setattr("regrad.core.kernel_errors.refusal", lambda error, *_: error)
    assert malformed.written(entry).outcome == BROKEN
    monkeypatch.setattr(rg, "roll", lambda *args: (_ for _ in ()).throw(ValueError("bad")))
    assert malformed.verdict(malformed.Call("rg.roll", "", [1.0], {}), "numpy").outcome == BROKEN


def test_python_refuses_what_short_roads_do_not_take():
    call = malformed.Call("rg.sin", "", [1.0], {"dim": 0}, "dim")
    assert malformed.verdict(call, "numpy").outcome == EXPLAINED


# -- whose error it is -----------------------------------------------------------------------------


Own = type("Own", (Exception,), {})
CALLS = {
    "grad": lambda f: rg.grad(f)(x), "map": lambda f: rg.map(f, x),
    "cond": lambda f: rg.cond(True, f, f), "vmap": lambda f: rg.vmap(f)(x),
    "checkpoint": lambda f: rg.checkpoint(f)(x), "while_loop": lambda f: rg.while_loop(f, f, x),
    "custom_grad": lambda f: rg.custom_grad(lambda x, save: f())(x),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [Own, ValueError, TypeError, IndexError, KeyError])
def test_errors_of_the_caller_stay_as_they_are(name, kind):
    def raising(*args, **options):
        raise kind("mine")

    error = refused(lambda: CALLS[name](raising), kind, "^'?mine'?(\n|$)")
    assert type(error) is kind


@pytest.mark.parametrize("kind", [ValueError, IndexError, OverflowError, RuntimeError, TypeError])
def test_errors_keep_the_builtin_class(monkeypatch, kind):
    space = {"__name__": "regrad.core.shapes", "kind": kind}  # a function of the library's
    exec("def normalized_axis(*args):\n    raise kind('no')", space)
    monkeypatch.setattr(array, "normalized_axis", space["normalized_axis"])
    error = refused(lambda: rg.moveaxis(x, 0, 1), kind, "moveaxis", "source=0")
    assert isinstance(error, RegradError)


# -- definitions -----------------------------------------------------------------------------------


def misnamed(xp, x: rg.Tensor, /) -> rg.Tensor:
    return x


misnamed.__name__ = "a(): pass\nimport os\ndef b"
MADE = ArgumentError, RegistrationError
ERRORS = [
    (lambda: rg.op("BadInputHalf")(lambda xp, x: x), MADE, ""),
    (lambda: rg.op("BadInputHalf")(3), MADE, ""), (lambda: rg.op(3), MADE, ""),
    (lambda: rg.op("Sign")(lambda xp, x: x), MADE, ""),
    (lambda: rg.op("BadInputHalf")(misnamed), ArgumentError, "identifier"),
    (lambda: rg.find_op("Signn"), rg.errors.UnknownOpError, "Signn"),
    (lambda: rg.zeros(2**47), MemoryError, ""),
    # No way to spell an attribute is taken for another.
    *[(lambda bad=bad: rg.nn.gelu(x, bad), InvalidValueError, "approximate")
      for bad in ("none", "Tanh", 2, None)],
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), ERRORS)
def test_errors_leave_nothing_behind(call, error, words):
    refused(call, error, words)
    assert not {"BadInputHalf", 3} & {*rg.op_types()}


def test_errors_are_of_the_class_that_others_expect():
    error = refused(lambda: rg.linalg.inv(rg.zeros((2, 2))), np.linalg.LinAlgError)
    assert isinstance(error, rg.errors.MatrixError | ValueError)


# -- what works now --------------------------------------------------------------------------------


def test_masks_under_jit_are_those_of_the_call():
    mask = np.array([True, False, True])
    f = rg.jit(lambda v: v[mask] * 2.0)
    assert f(np.arange(3, dtype=np.float32)).tolist() == [0.0, 4.0]
    mask[:] = [False, True, False]
    assert f(np.arange(3, dtype=np.float32)).tolist() == [2.0]


@pytest.mark.parametrize("jit", [False, True])
def test_assert_shows_text(jit):
    with tf.Graph().as_default():
        p = tf.placeholder(tf.float32, ())
        with tf.control_dependencies([tf.Assert(p > 0.0, ["p is", p])]):
            y = p * 2.0
        with tf.Session(jit=jit) as session:
            assert session.run(y, {p: 3.0}) == 6.0
            run = lambda: session.run(y, {p: -1.0})  # noqa: E731
            refused(run, tf.errors.InvalidArgumentError, r"p is.*-1")
            assert session.run(y, {p: 2.0}) == 4.0


def minus_one(p):
    return tf.cast(tf.reduce_sum(p, axis=0) * 0.0 - 1.0, tf.int32)


CLASHES = {
    "matmul": lambda p: tf.matmul(tf.transpose(p), np.ones((3, 2), "f")),
    "stack": lambda p: tf.stack([p, np.ones((3, 2), "f")]),
    "tile": lambda p: tf.tile(p, minus_one(p)), "fill": lambda p: tf.fill(minus_one(p), 1.0),
    "inverse": tf.matrix_inverse,
}  # fmt: skip


@pytest.mark.parametrize("name", CLASHES)
def test_what_clashes_in_a_run_is_an_invalid_argument(name):
    with tf.Graph().as_default(), tf.Session() as session:
        p = tf.placeholder(tf.float32, (None, 2))
        y = CLASHES[name](p)
        refused(lambda: session.run(y, {p: np.ones((2, 2))}), tf.errors.InvalidArgumentError)


LOOPS = [(lambda p: rg.map(lambda v: v * v, p), [1.0, 4.0, 9.0]),
         (lambda p: rg.scan(lambda c, v: (c + v, c), 0.0, p)[0], 6.0),
         (lambda p: rg.vmap(lambda v: v * v)(p), [1.0, 4.0, 9.0]),
         (lambda p: rg.fori_loop(0, 3, lambda i, c: c * 2.0, p), [8.0, 16.0, 24.0])]  # fmt: skip


@pytest.mark.parametrize(("loop", "expected"), LOOPS)
def test_loops_on_placeholders(loop, expected):
    with tf.Graph().as_default(), tf.Session() as session:
        p = tf.placeholder(tf.float32, (3,))
        assert session.run(loop(p), {p: [1.0, 2.0, 3.0]}).tolist() == expected
