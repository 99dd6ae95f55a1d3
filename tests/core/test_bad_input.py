"""Calls that make no sense are refused by name; a slice of the campaign `malformed`."""

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.errors import (
    ArgumentError,
    InvalidValueError,
    MatrixError,
    RegistrationError,
    RegradError,
    UnknownOpError,
)
from regrad.ops import array
from tests.campaigns import malformed
from tests.campaigns.verdicts import BROKEN, DELIVERED, EXPLAINED, REFUSED, SILENT

x = rg.tensor([[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize("entry", malformed.CALLS, ids=lambda entry: entry[0][-60:])
def test_calls_of_the_list(entry):
    for word, package in {"torch": "torch", "jax": "jax", "jit": "jax", "random": "jax"}.items():
        if word in entry[0]:
            pytest.importorskip(package)
    verdict = malformed.written(entry)
    assert verdict.outcome in (REFUSED, DELIVERED), verdict


@pytest.mark.filterwarnings("ignore")  # of NaN, say, which bad numbers make
@pytest.mark.parametrize("mode", ["numpy", "torch", "checkpoint", "graph"])
def test_a_slice_of_the_catalogue(mode):
    if mode == "torch":
        pytest.importorskip("torch")
    for name in malformed.names()[::9]:
        if malformed.applies(name, mode):
            for verdict in malformed.run(f"{name}/{mode}", quick=True):
                assert verdict.outcome not in (SILENT, BROKEN), verdict


def test_a_size_that_would_end_the_process_is_refused():
    for name in ("broadcast_to, jit", "repeat, jit"):
        assert malformed.crashed(name, malformed.CRASHES[name]).outcome == REFUSED


# -- the campaign can fail -------------------------------------------------------------------------


def test_errors_without_a_name_are_found(monkeypatch):
    def bare(*args):
        raise ValueError("bad")

    entry = next(entry for entry in malformed.CALLS if "rg.roll(" in entry[0])
    monkeypatch.setattr("regrad.core.kernel_errors.refusal", lambda error, *_: error)
    assert malformed.written(entry).outcome == BROKEN
    monkeypatch.setattr(rg, "roll", bare)
    call = malformed.Call("rg.roll", "", [1.0], {})
    assert malformed.verdict(call, "numpy").outcome == BROKEN


def test_what_is_accepted_and_must_not_be_is_found():
    assert malformed.written(("rg.sum(1.0)", "sum", "refuse")).outcome == SILENT


def test_python_refuses_what_the_short_roads_do_not_take():
    call = malformed.Call("rg.sin", "", [1.0], {"dim": 0}, "dim")
    assert malformed.verdict(call, "numpy").outcome == EXPLAINED


# -- whose error it is -----------------------------------------------------------------------------


class Own(Exception):
    pass


def raising(*args, **options):
    raise Own("mine")


@pytest.mark.parametrize(
    "call",
    [
        lambda: rg.grad(raising)(x),
        lambda: rg.map(raising, x),
        lambda: rg.cond(True, raising, raising),
        lambda: rg.vmap(raising)(x),
        lambda: rg.checkpoint(raising)(x),
        lambda: rg.while_loop(raising, raising, x),
        lambda: rg.custom_grad(lambda x, save: raising())(x),
    ],
)
def test_errors_of_the_caller_stay_as_they_are(call):
    with pytest.raises(Own, match=r"^mine$"):
        call()


@pytest.mark.parametrize("kind", [ValueError, TypeError, IndexError, KeyError, ZeroDivisionError])
def test_builtin_errors_of_the_caller_stay_as_they_are(kind):
    def f(x):
        raise kind("mine")

    for call in (rg.grad(f), lambda x: rg.map(f, x), rg.vmap(f)):
        with pytest.raises(kind) as caught:
            call(x)
        assert not isinstance(caught.value, RegradError)


@pytest.mark.parametrize("kind", [ValueError, IndexError, OverflowError, RuntimeError, TypeError])
def test_errors_keep_the_builtin_class(monkeypatch, kind):
    monkeypatch.setattr(array, "normalized_axis", ours(kind))
    with pytest.raises(kind) as caught:
        rg.moveaxis(x, 0, 1)
    assert isinstance(caught.value, RegradError)
    assert "moveaxis" in str(caught.value) and "source=0" in str(caught.value)


def ours(kind):
    """A function of the library's that raises."""
    space = {"__name__": "regrad.core.shapes", "kind": kind}
    exec("def normalized_axis(*args):\n    raise kind('no')", space)
    return space["normalized_axis"]


def test_errors_are_of_the_class_that_others_expect():
    with pytest.raises(np.linalg.LinAlgError) as caught:
        rg.linalg.inv(rg.zeros((2, 2)))
    assert isinstance(caught.value, MatrixError | ValueError)
    with pytest.raises(MemoryError):
        rg.zeros(2**47)


# -- definitions -----------------------------------------------------------------------------------


def test_an_op_that_cannot_be_made_leaves_nothing_behind():
    for make in (
        lambda: rg.op("BadInputHalf")(lambda xp, x: x),
        lambda: rg.op("BadInputHalf")(3),
        lambda: rg.op(3),
        lambda: rg.op("Sign")(lambda xp, x: x),
    ):
        with pytest.raises((ArgumentError, RegistrationError)):
            make()
    assert "BadInputHalf" not in rg.op_types()
    assert 3 not in rg.op_types()
    with pytest.raises(UnknownOpError, match="Signn"):
        rg.find_op("Signn")

    def kernel(xp, x: rg.Tensor, /) -> rg.Tensor:
        return x

    kernel.__name__ = "a(): pass\nimport os\ndef b"
    with pytest.raises(ArgumentError, match="identifier"):
        rg.op("BadInputHalf")(kernel)


# -- what works now --------------------------------------------------------------------------------


def test_masks_under_jit_are_those_of_the_call():
    mask = np.array([True, False, True])
    f = rg.jit(lambda v: v[mask] * 2.0)
    v = np.arange(3, dtype=np.float32)
    assert f(v).tolist() == [0.0, 4.0]
    mask[:] = [False, True, False]
    assert f(v).tolist() == [2.0]


@pytest.mark.parametrize("jit", [False, True])
def test_assert_shows_text(jit):
    with tf.Graph().as_default():
        p = tf.placeholder(tf.float32, ())
        with tf.control_dependencies([tf.Assert(p > 0.0, ["p is", p])]):
            y = p * 2.0
        with tf.Session(jit=jit) as session:
            assert session.run(y, {p: 3.0}) == 6.0
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"p is.*-1"):
                session.run(y, {p: -1.0})
            assert session.run(y, {p: 2.0}) == 4.0


@pytest.mark.parametrize(
    "make",
    [
        lambda p: tf.matmul(tf.transpose(p), np.ones((3, 2), "f")),
        lambda p: tf.stack([p, np.ones((3, 2), "f")]),
        lambda p: tf.tile(p, tf.cast(tf.reduce_sum(p, axis=0) * 0.0 - 1.0, tf.int32)),
        lambda p: tf.fill(tf.cast(tf.reduce_sum(p, axis=0) * 0.0 - 1.0, tf.int32), 1.0),
        lambda p: tf.matrix_inverse(p),
    ],
    ids=["matmul", "stack", "tile", "fill", "inverse"],
)
def test_what_clashes_in_a_run_is_an_invalid_argument(make):
    with tf.Graph().as_default(), tf.Session() as session:
        p = tf.placeholder(tf.float32, (None, 2))
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.run(make(p), {p: np.ones((2, 2))})


def test_loops_on_placeholders():
    with tf.Graph().as_default(), tf.Session() as session:
        p = tf.placeholder(tf.float32, (3,))
        values = {p: [1.0, 2.0, 3.0]}
        assert session.run(rg.map(lambda v: v * v, p), values).tolist() == [1.0, 4.0, 9.0]
        assert session.run(rg.scan(lambda c, v: (c + v, c), 0.0, p)[0], values) == 6.0
        assert session.run(rg.vmap(lambda v: v * v)(p), values).tolist() == [1.0, 4.0, 9.0]
        doubled = rg.fori_loop(0, 3, lambda i, c: c * 2.0, p)
        assert session.run(doubled, values).tolist() == [8.0, 16.0, 24.0]


def test_no_way_to_spell_an_attribute_is_taken_for_another():
    for bad in ("none", "Tanh", 2, None):
        with pytest.raises(InvalidValueError, match="approximate"):
            rg.nn.gelu(x, bad)
    assert rg.nn.gelu(x, True).shape == (2, 2)
