"""`export`: programs that keep their gradients without the code that made them."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import regrad as rg
from regrad.errors import (
    ArgumentError,
    DTypeError,
    ExportError,
    GradientError,
    ShapeError,
    TraceError,
)
from regrad.jax.exporting import MAGIC

A, B = np.float32([[0.3, -1.2, 2.0], [0.1, 0.7, -0.4]]), np.float32([[1.0], [-0.5], [0.25]])
PLAIN = """
import sys
sys.modules["regrad"] = None  # an import of it raises
import json
import jax, jax.numpy as jnp
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
a, b = [jnp.array(json.loads(text), "float32") for text in sys.argv[2:]]
f = lambda a: program.call(a, b)
first = jax.grad(f)(a)
second = jax.grad(lambda a: (jax.grad(f)(a) ** 2).sum())(a)
print(json.dumps([f(a).item(), first.tolist(), second.tolist()]))
for refused in (lambda: jax.jvp(f, (a,), (a,)), lambda: jax.grad(lambda a: jax.grad(
        lambda a: jax.grad(f)(a).sum())(a).sum())(a)):
    try:
        refused()
        print("went through")
    except Exception as error:
        print(type(error).__name__)
"""


@rg.custom_grad
def clipped(x, save):
    save([x])
    return {"value": x * x * x, "grad_func": lambda dy, saved: rg.clip(dy * 3 * saved[0], -1, 1)}


def surrogate(a, b):
    return (rg.sign(a @ b) * clipped(a)[:, :1]).sum()


def twice(f):
    """The gradient of the squared gradient of f."""
    return rg.grad(lambda x: rg.square(rg.grad(f)(x)).sum())


def exported(order=1, **options):
    with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}) as used:
        program = rg.export(surrogate, A, B, order=order, **options)
    if order:
        used.assert_fired()
    return program


def expected(order):
    """The value and the gradients by a, first and second, in eager mode."""
    with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}):

        def f(a):
            return surrogate(a, B)

        first = rg.grad(f)
        if order < 2:
            return f(rg.tensor(A)).item(), first(A).numpy()
        return f(rg.tensor(A)).item(), first(A).numpy(), twice(f)(A).numpy()


def test_a_file_is_opened_in_a_process_without_regrad(tmp_path):
    path = tmp_path / "program.bin"
    exported(order=2).save(path)
    words = [sys.executable, "-c", PLAIN, str(path), json.dumps(A.tolist()), json.dumps(B.tolist())]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for got, due in zip(json.loads(lines[0]), expected(2), strict=True):
        np.testing.assert_allclose(got, due, rtol=1e-5)
    assert lines[1:] == ["TypeError", "ValueError"]  # forward mode, and a third order


def test_a_loaded_program_is_what_was_saved(tmp_path):
    program = exported(order=2)
    program.save(tmp_path / "p")
    loaded = rg.Exported.load(tmp_path / "p")
    assert repr(loaded) == repr(program)
    assert repr(program) == (
        "<Exported surrogate: float32(2, 3), float32(3, 1) -> float32(), order 2, for cpu>"
    )
    value, first, second = expected(2)
    for f in (lambda a: program(a, B), lambda a: loaded(a, B)):
        np.testing.assert_allclose(f(A).item(), value, rtol=1e-6)
        np.testing.assert_allclose(rg.grad(f)(A).numpy(), first, rtol=1e-6)
        np.testing.assert_allclose(twice(f)(A).numpy(), second, rtol=1e-5)
        np.testing.assert_allclose(rg.jit(rg.grad(f))(A).numpy(), first, rtol=1e-6)
        np.testing.assert_allclose(rg.grad(rg.jit(f))(A).numpy(), first, rtol=1e-6)


def test_orders_beyond_the_last_are_refused():
    program = exported(order=0)
    assert program(A, B).shape == ()
    with pytest.raises(GradientError, match=r"no derivatives of this order.*larger order"):
        rg.grad(lambda a: program(a, B))(A)


@pytest.mark.parametrize("f", [rg.jvp, rg.hvp])
def test_forward_mode_is_refused_for_the_true_reason(f):
    program = rg.Exported.deserialize(exported(order=2).serialize())
    expected = r"an exported program has reverse mode only.*grad of grad for hvp"
    with pytest.raises(GradientError, match=expected):
        f(lambda a: program(a, B), [A], [A])


def test_variables_are_constants_or_arguments():
    w = rg.Variable([2.0, 3.0], name="w")

    def f(x):
        return {"y": (w * x).sum(), "all": [x, w]}

    constant = rg.export(f, rg.zeros(2))
    given = rg.export(f, rg.zeros(2), variables=[w])
    w.assign([5.0, 7.0])
    x = rg.tensor([1.0, 10.0])
    assert constant(x)["y"].item() == 32 and constant.variables == []
    assert given({"w": w}, x)["y"].item() == 75 and given.variables == ["w"]
    assert given({"w": w}, x)["all"][1].tolist() == [5.0, 7.0]
    _, grads = rg.variable_grads(lambda: given({"w": w}, x)["y"])
    assert grads["w"].tolist() == [1.0, 10.0]


def test_sizes_may_be_symbolic():
    def f(x):
        y = rg.nn.log_softmax(rg.reshape(x, (x.shape[0], -1)), axis=-1)
        rows = rg.arange(x.shape[0]) * 1.0
        return (y[1:].sum() + (rows * rows).sum() / x.shape[0]) * rg.ones((x.shape[0], 2))

    program = rg.export(f, rg.zeros((2, 2, 3)), order=2, shapes="batch, 2, 3")
    assert "float32(batch, 2, 3) -> float32(batch, 2)" in repr(program)
    for n in (2, 3, 9):
        x = np.random.default_rng(n).normal(size=(n, 2, 3)).astype("float32")
        np.testing.assert_allclose(program(x).numpy(), f(rg.tensor(x)).numpy(), rtol=1e-5)
        for g in (rg.grad, twice):
            np.testing.assert_allclose(g(program)(x).numpy(), g(f)(x).numpy(), 1e-3, 1e-4)
    with pytest.raises(ShapeError, match=r"expected float32 of the shape \(batch, 2, 3\)"):
        program(rg.zeros((2, 3, 2)))


OPEN = {
    "softmax": lambda x: rg.nn.softmax(x, axis=0),
    "var": lambda x: rg.var(x, axis=0),
    "concat": lambda x: rg.concat([x, 2 * x], axis=0),
    "pad": lambda x: rg.pad(x, [(1, 1), (0, 0)]),
    "split": lambda x: rg.split(x, 3, axis=1)[1],
    "top_k": lambda x: rg.top_k(x, 2)[0],
    "tile": lambda x: rg.tile(x, (1, 4)),
    "flip": lambda x: x[::-1],
    "every other": lambda x: x[::2],
    "broadcast_to": lambda x: x * rg.broadcast_to(rg.tensor([1.0, 2.0, 3.0]), x.shape),
    "full": lambda x: x * rg.full(x.shape, 3.0),
    "conv": lambda x: rg.nn.conv2d(
        rg.reshape(rg.tile(x, (1, 12)), (x.shape[0], 6, 6, 1)), rg.ones((3, 3, 1, 2)), 1, "same"
    ),
    "cross entropy": lambda x: rg.losses.softmax_cross_entropy(0 * x + 1 / 3, x),
    "vmap": rg.vmap(lambda row: (row * row).sum()),
    "gradient": lambda x: rg.grad(lambda x: rg.tanh(x).sum())(x),
}


@pytest.mark.parametrize("name", OPEN)
def test_ops_take_symbolic_sizes(name):
    f = OPEN[name]
    program = rg.export(f, rg.zeros((2, 3)), shapes="b, 3")
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    np.testing.assert_allclose(program(x).numpy(), f(rg.tensor(x)).numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rg.grad(program)(x).numpy(), rg.grad(f)(x).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda x: rg.scan(lambda c, r: (c + r.sum(), c), rg.scalar(0.0), x)[1], "constant"),
        (lambda x: rg.split(x, 2)[0], "split"),
        (lambda x: x[3:], "'b' < '3'"),
        (lambda x: rg.cumulative_prod(x, axis=0) if x.shape[0] > 4 else x, "'b' > '4'"),
    ],
)
def test_an_op_that_needs_a_number_refuses_a_symbol(f, words):
    with pytest.raises(ExportError, match=r"sizes of shapes='b, 3'.*needs a number") as caught:
        rg.export(f, rg.zeros((2, 3)), shapes="b, 3")
    assert words in str(caught.value)


def test_integers_and_containers_go_through():
    def f(args, i):
        return rg.take(args["x"], i, axis=0), (i + 1, args["s"])

    x, i = np.float32([[1, 2], [3, 4], [5, 6]]), np.int32([2, 0, 2])
    program = rg.export(f, {"x": x, "s": 2.0}, i)
    rows, (more, s) = program({"x": x, "s": 2.0}, i)
    assert rows.tolist() == x[i].tolist() and more.tolist() == [3, 1, 3] and s.item() == 2
    got = rg.grad(lambda x: program({"x": x, "s": 2.0}, i)[0])(x)
    assert got.tolist() == [[1, 1], [0, 0], [2, 2]]


def test_complex_gradients_keep_each_side_s_convention():
    def f(z):
        return rg.real(z * z * (1 + 2j)).sum()

    program = rg.export(f, rg.zeros(2, dtype="complex64"))
    z = np.complex64([1 + 2j, -0.5 + 1j])
    np.testing.assert_allclose(rg.grad(program)(z).numpy(), rg.grad(f)(z).numpy(), rtol=1e-6)
    loaded = jax.export.deserialize(bytearray(program.serialize()))
    due = jax.grad(lambda z: jnp.real(z * z * (1 + 2j)).sum())(z)
    np.testing.assert_allclose(jax.grad(loaded.call)(z), due, rtol=1e-6)


def test_a_batch_goes_one_example_at_a_time():
    program = rg.export(lambda x: rg.sin(x).sum(), rg.zeros(3))
    x = np.random.default_rng(1).normal(size=(4, 3)).astype("float32")
    np.testing.assert_allclose(rg.vmap(rg.grad(program))(x).numpy(), np.cos(x), rtol=1e-5)
    compiled = rg.jit(rg.vmap(rg.grad(program)))
    np.testing.assert_allclose(compiled(x).numpy(), np.cos(x), rtol=1e-5)


class Assigning:
    def __init__(self):
        self.v = rg.Variable(1.0, name="assigned")

    def __call__(self, x):
        self.v.assign(x)
        return x


def test_bad_input_is_refused_by_name():
    x, assigning = rg.zeros(3), Assigning()
    two = [rg.Variable(1.0, name="w"), rg.Variable(2.0, name="other")]
    two[1].name = "w"
    for call, error, words in [
        (lambda: rg.export(3, x), ArgumentError, "must be a function"),
        (lambda: rg.export(rg.sin, x, order=-1), ArgumentError, "0 or more for order, got -1"),
        (lambda: rg.export(rg.sin, x, order="a"), ArgumentError, "for order, got 'a'"),
        (lambda: rg.export(rg.sin, "a"), ArgumentError, "got str.*Bind anything else"),
        (lambda: rg.export(rg.sin, x, variables=[x]), ArgumentError, "expected Variables"),
        (lambda: rg.export(rg.sin, x, variables=two), ArgumentError, "two .* named 'w'"),
        (lambda: rg.export(rg.sin, x, shapes="a, b, c"), ArgumentError, "shapes do not fit"),
        (_without_x64, DTypeError, "x64"),
        (lambda: rg.export(lambda x: float(x), rg.scalar(1.0)), TraceError, "was asked for"),
        (lambda: rg.export(lambda x: "a", x), ArgumentError, "return Tensors .*, got str"),
        (lambda: rg.export(assigning, rg.scalar(1.0)), ArgumentError, "assigns to the Variable"),
        (
            lambda: rg.export(assigning, rg.scalar(1.0), variables=[assigning.v]),
            ArgumentError,
            "assigns to the Variable 'assigned'.*no side effects",
        ),
        (lambda: rg.export(_calls_back, x), ExportError, "cannot be serialized.*callbacks"),
    ]:
        with pytest.raises(error, match=words):
            call()
    assert assigning.v.item() == 1.0


def _without_x64():
    with jax.enable_x64(False):
        rg.export(rg.sin, np.zeros(2))


def _calls_back(x):
    return rg.tensor(jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3,), "float32"), x.data))


def test_calls_that_do_not_fit_are_refused():
    program = exported()
    with pytest.raises(ArgumentError, match=r"expected arguments of the structure \(\*, \*\)"):
        program(A)
    with pytest.raises(ShapeError, match=r"float32 of the shape \(3, 1\) for argument 1, got"):
        program(A, B.T)
    with pytest.raises(ShapeError, match="got int32"):
        program(A, B.astype("int32"))
    with pytest.raises(ArgumentError, match=r"expected a Tensor, an array"):
        program(A, "b")


def test_a_damaged_or_foreign_file_is_refused(tmp_path):
    data = exported().serialize()
    path = tmp_path / "p"
    for n in range(0, len(data), 97):
        for bad in (data[:n], data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(
                ExportError, match=r"is damaged, or no program that rg\.export wrote"
            ):
                rg.Exported.load(path)
    foreign = jax.export.export(jax.jit(jnp.sin))(jnp.ones(3)).serialize()
    for other in (b"", b"hello", bytes(foreign), data + b"x"):
        with pytest.raises(ExportError, match=r"^the data is damaged, or .*: its end is missing"):
            rg.Exported.deserialize(other)
    with pytest.raises(FileNotFoundError):
        rg.Exported.load(tmp_path / "absent")
    path.write_bytes(data)
    assert rg.Exported.load(path)(A, B).shape == ()


def sealed(program, about):
    """A file with a checksum that fits it."""
    text = about if isinstance(about, bytes) else json.dumps(about).encode()
    data = bytes(program) + text + len(text).to_bytes(8, "big")
    return data + hashlib.sha256(data).digest() + MAGIC


def hostile():
    program = exported(order=1)
    good, about = program._serialized, program._about
    yield "null", sealed(good, None)
    yield "a list", sealed(good, [])
    yield "a list of pairs", sealed(good, [["name", "f"]])
    for key in ("name", "order", "variables"):
        yield f"no {key}", sealed(good, {k: v for k, v in about.items() if k != key})
        for value in (3.5, "a", None, [[]], {}, True, -1, 10**9):
            if type(value) is not type(about[key]) or key == "order":
                yield f"{key} {value}", sealed(good, {**about, key: value})
    yield "variables", sealed(good, {**about, "variables": [3]})
    yield "too high an order", sealed(good, {**about, "order": 2})
    yield "no JSON", sealed(good, b"{")
    yield "no UTF-8", sealed(good, b"\xff\xfe{}")
    yield "brackets", sealed(good, b"[" * 100_000)
    yield "surrogates", sealed(good, b'{"name": "\\ud800"}')
    yield "no program", sealed(b"", about)
    yield "half a program", sealed(good[: len(good) // 2], about)
    yield "zeros", sealed(bytes(len(good)), about)
    yield "ones", sealed(b"\xff" * len(good), about)
    foreign = jax.export.export(jax.jit(jnp.sin))(jnp.ones(3)).serialize()
    yield "without derivatives", sealed(foreign, about)
    takes_keywords = jax.export.export(jax.jit(lambda *, x: x))(x=jnp.ones(3)).serialize()
    yield "keywords", sealed(takes_keywords, {**about, "order": 0})
    for length in (2**64 - 1, len(good) + 10**6):
        data = bytes(good) + b"{}" + length.to_bytes(8, "big")
        yield f"length {length}", data + hashlib.sha256(data).digest() + MAGIC


def test_hostile_files_are_refused_by_one_error(tmp_path):
    cases = dict(hostile())
    assert len(cases) > 35
    path = tmp_path / "p"
    for name, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(ExportError) as caught:
            rg.Exported.load(path)
            pytest.fail(f"{name} was loaded")
        assert str(caught.value).startswith(f"{path} is damaged, or no program that rg.export")


def test_flipped_bits_under_a_right_checksum():
    """Loading ends in time, and raises ExportError or returns a program of the same signature."""
    program = exported()
    good, about = program._serialized, program._about
    rng = random.Random(1)
    outcomes = Counter()

    def late(number, frame):
        pytest.fail("it took more than ten seconds")

    before = signal.signal(signal.SIGALRM, late) if hasattr(signal, "SIGALRM") else None
    for _ in range(400):
        i = rng.randrange(len(good) * 8)
        bad = bytearray(good)
        bad[i // 8] ^= 1 << i % 8
        limit = signal.alarm(10) if before is not None else 0
        try:
            rg.Exported.deserialize(sealed(bad, about))
            outcomes["loaded"] += 1
        except ExportError:
            outcomes["refused"] += 1
        finally:
            if before is not None:
                signal.alarm(limit)
    if before is not None:
        signal.signal(signal.SIGALRM, before)
    assert outcomes["refused"] > 20 and outcomes["loaded"] > 100


def test_a_program_that_cannot_be_compiled_says_so():
    program = exported()
    good, about = program._serialized, program._about
    start = bytes(good).index(b"StableHLO")
    bad = bytearray(good)
    bad[start : start + 60] = bytes(60)
    loaded = rg.Exported.deserialize(sealed(bad, about))
    with pytest.raises(ExportError, match=r"the exported surrogate cannot be run: .*StableHLO"):
        for _ in range(2):  # the first module of the file may be that of the gradients
            loaded(A, B)
            rg.grad(lambda a: loaded(a, B))(A)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such files")
def test_devices_and_pipes_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
        with pytest.raises(ExportError, match="it is not a regular file"):
            rg.Exported.load(path)


@pytest.mark.parametrize("path", [3, None, b"p", "a\0b"])
def test_what_is_no_name_of_a_file_is_refused(path):
    for api in (rg.Exported.load, exported().save):
        name = f"Exported.{api.__name__}"
        with pytest.raises(ArgumentError, match=f"^{name}: expected the name of a file, a str or"):
            api(path)


def test_a_size_of_0_is_refused_by_name():
    program = rg.export(lambda x: x * 2, rg.zeros((3, 2)), shapes="b, 2")
    assert program(rg.ones((1, 2))).shape == (1, 2)
    with pytest.raises(ShapeError, match=r"^the exported <lambda> cannot be run: .*'b'"):
        program(rg.zeros((0, 2)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "complex64"])
def test_numbers_are_weak(dtype):
    program = rg.export(lambda x, y: x + y, rg.zeros(2, dtype=dtype), rg.zeros((), dtype=dtype))
    x = rg.ones(2, dtype=dtype)
    for f in (program, rg.jit(program)):
        assert f(x, 2).dtype == dtype and f(x, 2).tolist() == [3, 3]
    with pytest.raises(ShapeError, match=rf"expected {dtype} of the shape \(\) for argument 1"):
        program(x, 2j if dtype != "complex64" else rg.ones((), dtype="float32"))
    if dtype == "int32":
        with pytest.raises(ShapeError, match="got float32"):
            program(x, 2.5)


def test_numbers_are_weak_in_double_precision():
    with jax.enable_x64(True):
        program = rg.export(lambda x: x * 3, np.float64(0.1))
        assert program(0.1).numpy() == np.float64(0.1) * 3


def test_the_gradient_of_a_program_is_its_true_one(tmp_path):
    program = rg.export(lambda x: rg.sin(x) * x, A[0])
    program.save(tmp_path / "p")
    for f in (program, rg.Exported.load(tmp_path / "p")):
        found = rg.compare_gradients(lambda x, f=f: rg.sum(f(x)))(A[0])
        assert [row.ratio for row in found.rows] == [1.0] * len(found.rows)
        found.assert_same()
        source = rg.compare_gradients(
            lambda x, f=f: rg.sum(f(x)), lambda x: rg.sum(rg.sin(x) * x), rtol=1e-5
        )
        source(A[0]).assert_same()


def test_overrides_do_not_reach_into_a_program():
    program = rg.export(lambda x: rg.sign(x).sum(), rg.zeros(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rg.errors.UnusedOverrideWarning)
        with rg.gradient_override_map({"Sign": "Identity"}) as used:
            assert rg.grad(program)(rg.ones(2)).tolist() == [0.0, 0.0]
    with pytest.raises(rg.errors.NotFiredError):
        used.assert_fired()


def test_shapes_are_told_without_computing():
    def f(p, x):
        return {"y": p["w"] @ x, "n": rg.argmax(x)}

    found = rg.eval_shape(f, {"w": np.zeros((3, 2), "float32")}, rg.zeros(2))
    due = jax.eval_shape(lambda p, x: {"y": p["w"] @ x, "n": jnp.argmax(x)},
                         {"w": np.zeros((3, 2), "float32")}, jnp.zeros(2, "float32"))  # fmt: skip
    assert found["y"] == due["y"] and found["n"].shape == ()
    assert rg.eval_shape(rg.grad(lambda x: rg.sin(x).sum()), 2.0).dtype == np.float32
    huge = jax.ShapeDtypeStruct((10**6, 10**6), "float32")
    assert rg.eval_shape(lambda x: x @ x, huge).shape == (10**6, 10**6)
    with pytest.raises(ArgumentError, match=r"eval_shape: expected Tensors.*got str"):
        rg.eval_shape(rg.sin, "a")
    with pytest.raises(TraceError):
        rg.eval_shape(lambda x: float(x), 1.0)
