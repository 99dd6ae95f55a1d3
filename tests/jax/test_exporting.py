"""`export`: programs that keep their gradients without the code that made them."""

import hashlib
import json
import random
import subprocess
import sys
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import regrad as rg
from regrad.errors import ArgumentError, ExportError, GradientError, ShapeError
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
first = jax.grad(f)
second = jax.grad(lambda a: (first(a) ** 2).sum())
print(json.dumps([f(a).item(), first(a).tolist(), second(a).tolist()]))
for refused in (lambda: jax.jvp(f, (a,), (a,)), lambda: jax.grad(lambda a: second(a).sum())(a)):
    try:
        print(refused(), "went through")
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


def exported(order=1):
    with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}) as used:
        program = rg.export(surrogate, A, B, order=order)
    if order:
        used.assert_fired()
    return program


def expected():
    """The value and the gradients by a, first and second, in eager mode."""
    with rg.gradient_override_map({"Sign": rg.rules.clipped_straight_through}):
        f = lambda a: surrogate(a, B)  # noqa: E731
        return f(rg.tensor(A)).item(), rg.grad(f)(A).numpy(), twice(f)(A).numpy()


def rows(n, *shape):
    return np.random.default_rng(n).normal(size=(n, *shape)).astype("float32")


@pytest.mark.slow
def test_a_file_is_opened_in_a_process_without_regrad(tmp_path):
    path = tmp_path / "program.bin"
    exported(order=2).save(path)
    words = [sys.executable, "-c", PLAIN, str(path), json.dumps(A.tolist()), json.dumps(B.tolist())]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for got, due in zip(json.loads(lines[0]), expected(), strict=True):
        assert_allclose(got, due, rtol=1e-5)
    assert lines[1:] == ["TypeError", "ValueError"]  # forward mode, and a third order


@pytest.mark.slow
def test_a_loaded_program_is_what_was_saved(tmp_path):
    program = exported(order=2)
    program.save(tmp_path / "p")
    loaded = rg.Exported.load(tmp_path / "p")
    words = "surrogate: float32(2, 3), float32(3, 1) -> float32(), order 2, for cpu"
    assert repr(loaded) == repr(program) == f"<Exported {words}>"
    value, first, second = expected()
    for f in (lambda a: program(a, B), lambda a: loaded(a, B)):
        assert_allclose(f(A).item(), value, rtol=1e-6)
        for gradient in (rg.grad(f), rg.jit(rg.grad(f)), rg.grad(rg.jit(f))):
            assert_allclose(gradient(A).numpy(), first, rtol=1e-6)
        assert_allclose(twice(f)(A).numpy(), second, rtol=1e-5)


def test_orders_beyond_the_last_are_refused():
    program = exported(order=0)
    assert program(A, B).shape == ()
    with pytest.raises(GradientError, match=r"no derivatives of this order.*larger order"):
        rg.grad(lambda a: program(a, B))(A)


@pytest.mark.parametrize("f", [rg.jvp, rg.hvp])
def test_forward_mode_is_refused_for_the_true_reason(f):
    program = rg.Exported.deserialize(exported(order=2).serialize())
    with pytest.raises(GradientError, match=r"has reverse mode only.*grad of grad for hvp"):
        f(lambda a: program(a, B), [A], [A])


def test_variables_are_constants_or_arguments():
    w = rg.Variable([2.0, 3.0], name="w")
    f = lambda x: {"y": (w * x).sum(), "all": [x, w]}  # noqa: E731
    constant = rg.export(f, rg.zeros(2))
    given = rg.export(f, rg.zeros(2), variables=[w])
    w.assign([5.0, 7.0])
    x = rg.tensor([1.0, 10.0])
    assert constant(x)["y"].item() == 32 and constant.variables == []
    assert given({"w": w}, x)["y"].item() == 75 and given.variables == ["w"]
    assert given({"w": w}, x)["all"][1].tolist() == [5.0, 7.0]
    _, grads = rg.variable_grads(lambda: given({"w": w}, x)["y"])
    assert grads["w"].tolist() == [1.0, 10.0]


@pytest.mark.slow
def test_sizes_may_be_symbolic():
    def f(x):
        y = rg.nn.log_softmax(rg.reshape(x, (x.shape[0], -1)), axis=-1)
        rows = rg.arange(x.shape[0]) * 1.0
        return (y[1:].sum() + (rows * rows).sum() / x.shape[0]) * rg.ones((x.shape[0], 2))

    program = rg.export(f, rg.zeros((2, 2, 3)), order=2, shapes="batch, 2, 3")
    assert "float32(batch, 2, 3) -> float32(batch, 2)" in repr(program)
    for n in (2, 3, 9):
        x = rows(n, 2, 3)
        assert_allclose(program(x).numpy(), f(rg.tensor(x)).numpy(), rtol=1e-5)
        for g in (rg.grad, twice):
            assert_allclose(g(program)(x).numpy(), g(f)(x).numpy(), 1e-3, 1e-4)
    with pytest.raises(ShapeError, match=r"expected float32 of the shape \(batch, 2, 3\)"):
        program(rg.zeros((2, 3, 2)))


def convolved(x):
    images = rg.reshape(rg.tile(x, (1, 12)), (x.shape[0], 6, 6, 1))
    return rg.nn.conv2d(images, rg.ones((3, 3, 1, 2)), 1, "same")


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
    "conv": convolved,
    "cross entropy": lambda x: rg.losses.softmax_cross_entropy(0 * x + 1 / 3, x),
    "vmap": rg.vmap(lambda row: (row * row).sum()),
    "gradient": lambda x: rg.grad(lambda x: rg.tanh(x).sum())(x),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", OPEN)
def test_ops_take_symbolic_sizes(name):
    f, x = OPEN[name], rows(5, 3)
    program = rg.export(f, rg.zeros((2, 3)), shapes="b, 3")
    assert_allclose(program(x).numpy(), f(rg.tensor(x)).numpy(), rtol=1e-5, atol=1e-6)
    assert_allclose(rg.grad(program)(x).numpy(), rg.grad(f)(x).numpy(), atol=1e-5)


@pytest.mark.parametrize(("f", "words"), [
    (lambda x: rg.scan(lambda c, r: (c + r.sum(), c), rg.scalar(0.0), x)[1], "constant"),
    (lambda x: rg.split(x, 2)[0], "split"),
    (lambda x: x[3:], "'b' < '3'"),
    (lambda x: rg.cumulative_prod(x, axis=0) if x.shape[0] > 4 else x, "'b' > '4'"),
])  # fmt: skip
def test_an_op_that_needs_a_number_refuses_a_symbol(f, words):
    with pytest.raises(ExportError, match=r"sizes of shapes='b, 3'.*needs a number") as caught:
        rg.export(f, rg.zeros((2, 3)), shapes="b, 3")
    assert words in str(caught.value)


@pytest.mark.slow
def test_integers_and_containers_go_through():
    f = lambda args, i: (rg.take(args["x"], i, axis=0), (i + 1, args["s"]))  # noqa: E731
    x, i = np.float32([[1, 2], [3, 4], [5, 6]]), np.int32([2, 0, 2])
    program = rg.export(f, {"x": x, "s": 2.0}, i)
    taken, (more, s) = program({"x": x, "s": 2.0}, i)
    assert taken.tolist() == x[i].tolist() and more.tolist() == [3, 1, 3] and s.item() == 2
    found = rg.grad(lambda x: program({"x": x, "s": 2.0}, i)[0])(x)
    assert found.tolist() == [[1, 1], [0, 0], [2, 2]]


@pytest.mark.slow
def test_complex_gradients_keep_each_side_s_convention():
    f = lambda z: rg.real(z * z * (1 + 2j)).sum()  # noqa: E731
    program, z = rg.export(f, rg.zeros(2, dtype="complex64")), np.complex64([1 + 2j, -0.5 + 1j])
    assert_allclose(rg.grad(program)(z).numpy(), rg.grad(f)(z).numpy(), rtol=1e-6)
    loaded = jax.export.deserialize(bytearray(program.serialize()))
    theirs = jax.grad(lambda z: jnp.real(z * z * (1 + 2j)).sum())(z)
    assert_allclose(jax.grad(loaded.call)(z), theirs, rtol=1e-6)


@pytest.mark.slow
def test_a_batch_goes_one_example_at_a_time():
    x, gradient = rows(4, 3), rg.vmap(rg.grad(rg.export(lambda x: rg.sin(x).sum(), rg.zeros(3))))
    for f in (gradient, rg.jit(gradient)):
        assert_allclose(f(x).numpy(), np.cos(x), rtol=1e-5)


@pytest.mark.slow
def test_the_gradient_of_a_program_is_its_true_one():
    f = lambda x: rg.sum(rg.sin(x) * x)  # noqa: E731
    program = rg.export(f, A[0])
    for loaded in (program, rg.Exported.deserialize(program.serialize())):
        found = rg.compare_gradients(loaded)(A[0])
        assert [row.ratio for row in found.rows] == [1.0] * len(found.rows)
        found.assert_same()
        rg.compare_gradients(loaded, f, rtol=1e-5)(A[0]).assert_same()


@pytest.mark.slow
def test_overrides_do_not_reach_into_a_program():
    program = rg.export(lambda x: rg.sign(x).sum(), rg.zeros(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rg.errors.UnusedOverrideWarning)
        with rg.gradient_override_map({"Sign": "Identity"}) as used:
            assert rg.grad(program)(rg.ones(2)).tolist() == [0.0, 0.0]
    with pytest.raises(rg.errors.NotFiredError):
        used.assert_fired()


# -- refused ---------------------------------------------------------------------------------------


class Assigning:
    def __init__(self):
        self.v = rg.Variable(1.0, name="assigned")

    def __call__(self, x):
        self.v.assign(x)
        return x


def without_x64():
    with jax.enable_x64(False):
        rg.export(rg.sin, np.zeros(2))


def calling_back(x):
    return rg.tensor(jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3,), "float32"), x.data))


ZEROS, ONE, ASSIGNING = rg.zeros(3), rg.scalar(1.0), Assigning()
TWO = [rg.Variable(1.0, name="w"), rg.Variable(2.0, name="other")]
TWO[1].name = "w"
FORM = r"expected arguments of the structure \(\*, \*\)"
REFUSED = [
    (lambda: rg.export(3, ZEROS), ArgumentError, "must be a function"),
    (lambda: rg.export(rg.sin, ZEROS, order=-1), ArgumentError, "0 or more, got -1"),
    (lambda: rg.export(rg.sin, ZEROS, order="a"), ArgumentError, "of 0 or more, got 'a'"),
    (lambda: rg.export(rg.sin, "a"), ArgumentError, "got str.*Bind anything else"),
    (lambda: rg.export(rg.sin, ZEROS, variables=[ZEROS]), ArgumentError, "to be Variables"),
    (lambda: rg.export(rg.sin, ZEROS, variables=TWO), ArgumentError, "two .* named 'w'"),
    (lambda: rg.export(rg.sin, ZEROS, shapes="a, b, c"), ArgumentError, "shapes do not fit"),
    (without_x64, rg.errors.DTypeError, "x64"),
    (lambda: rg.export(lambda x: float(x), ONE), rg.errors.TraceError, "was read"),
    (lambda: rg.export(lambda x: "a", ZEROS), ArgumentError, "return Tensors .*, got str"),
    (lambda: rg.export(ASSIGNING, ONE), ArgumentError, "assigns to the Variable"),
    (lambda: rg.export(ASSIGNING, ONE, variables=[ASSIGNING.v]), ArgumentError,
     "assigns to the Variable 'assigned'.*no side effects"),
    (lambda: rg.export(calling_back, ZEROS), ExportError, "cannot be serialized.*callbacks"),
    (lambda: exported()(A), ArgumentError, FORM),
    (lambda: exported()(A, B.T), ShapeError, r"float32 of the shape \(3, 1\) for argument 1, got"),
    (lambda: exported()(A, B.astype("int32")), ShapeError, "got int32"),
    (lambda: exported()(A, "b"), ArgumentError, r"expected a Tensor, an array"),
    (lambda: rg.eval_shape(rg.sin, "a"), ArgumentError, "eval_shape: expected Tensors.*got str"),
    (lambda: rg.eval_shape(lambda x: float(x), 1.0), rg.errors.TraceError, "was read"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=range(len(REFUSED)))
def test_bad_input_is_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()
    assert ASSIGNING.v.item() == 1.0


@pytest.mark.slow
def test_a_damaged_or_foreign_file_is_refused(tmp_path):
    data, path = exported().serialize(), tmp_path / "p"
    for n in range(0, len(data), 97):
        for bad in (data[:n], data[:n] + bytes([data[n] ^ 1]) + data[n + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(
                ExportError, match=r"is damaged, or not a program that rg\.export wro"
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


def sealed(program, about, length=None):
    """A file with a checksum that fits it."""
    text = about if isinstance(about, bytes) else json.dumps(about).encode()
    data = bytes(program) + text + (length or len(text)).to_bytes(8, "big")
    return data + hashlib.sha256(data).digest() + MAGIC


def hostile():
    program = exported(order=1)
    good, about = program._serialized, program._about
    for key in ("name", "order", "variables"):
        yield f"no {key}", sealed(good, {k: v for k, v in about.items() if k != key})
        for value in (3.5, "a", None, [[]], {}, True, -1, 10**9):
            if type(value) is not type(about[key]) or key == "order":
                yield f"{key} {value}", sealed(good, {**about, key: value})
    foreign = jax.export.export(jax.jit(jnp.sin))(jnp.ones(3)).serialize()
    takes_keywords = jax.export.export(jax.jit(lambda *, x: x))(x=jnp.ones(3)).serialize()
    yield from {
        "null": sealed(good, None), "a list": sealed(good, []),
        "a list of pairs": sealed(good, [["name", "f"]]),
        "variables": sealed(good, {**about, "variables": [3]}),
        "too high an order": sealed(good, {**about, "order": 2}),
        "no JSON": sealed(good, b"{"), "no UTF-8": sealed(good, b"\xff\xfe{}"),
        "brackets": sealed(good, b"[" * 100_000),
        "surrogates": sealed(good, b'{"name": "\\ud800"}'), "no program": sealed(b"", about),
        "half a program": sealed(good[: len(good) // 2], about),
        "zeros": sealed(bytes(len(good)), about), "ones": sealed(b"\xff" * len(good), about),
        "without derivatives": sealed(foreign, about),
        "keywords": sealed(takes_keywords, {**about, "order": 0}),
        "a length": sealed(good, b"{}", 2**64 - 1),
        "another length": sealed(good, b"{}", len(good) + 10**6),
    }.items()  # fmt: skip


@pytest.mark.slow
def test_hostile_files_are_refused_by_one_error(tmp_path):
    cases, path = dict(hostile()), tmp_path / "p"
    assert len(cases) > 35
    for name, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(ExportError) as caught:
            rg.Exported.load(path)
            pytest.fail(f"{name} was loaded")
        assert str(caught.value).startswith(f"{path} is damaged, or not a program that rg.export")


@pytest.mark.slow
def test_flipped_bits_under_a_right_checksum():
    """Loading ends in time, and raises ExportError or returns a program of the same signature."""
    program = exported()
    good, about = program._serialized, program._about
    rng, outcomes = random.Random(1), Counter()
    for _ in range(400):
        i, bad = rng.randrange(len(good) * 8), bytearray(good)
        bad[i // 8] ^= 1 << i % 8
        try:
            rg.Exported.deserialize(sealed(bad, about))
            outcomes["loaded"] += 1
        except ExportError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 20 and outcomes["loaded"] > 100


@pytest.mark.slow
def test_a_program_that_cannot_be_compiled_says_so():
    program = exported()
    bad = bytearray(program._serialized)
    start = bytes(bad).index(b"StableHLO")
    bad[start : start + 60] = bytes(60)
    loaded = rg.Exported.deserialize(sealed(bad, program._about))
    with pytest.raises(ExportError, match=r"the exported surrogate cannot be run: .*StableHLO"):
        for _ in range(2):  # the first module of the file may be that of the gradients
            loaded(A, B)
            rg.grad(lambda a: loaded(a, B))(A)


@pytest.mark.parametrize("path", [3, None, b"p", "a\0b"])
def test_what_is_no_name_of_a_file_is_refused(path):
    for api in (rg.Exported.load, exported().save):
        words = f"^Exported.{api.__name__}: expected the name of a file, a str or"
        with pytest.raises(ArgumentError, match=words):
            api(path)


@pytest.mark.slow
def test_a_size_of_0_is_refused_by_name():
    program = rg.export(lambda x: x * 2, rg.zeros((3, 2)), shapes="b, 2")
    assert program(rg.ones((1, 2))).shape == (1, 2)
    with pytest.raises(ShapeError, match=r"^the exported <lambda> cannot be run: .*'b'"):
        program(rg.zeros((0, 2)))


@pytest.mark.slow(but=1)
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
    assert rg.export(lambda x: x * 3, np.float64(0.1))(0.1).numpy() == np.float64(0.1) * 3


def test_shapes_are_told_without_computing():
    p = {"w": np.zeros((3, 2), "float32")}
    found = rg.eval_shape(lambda p, x: {"y": p["w"] @ x, "n": rg.argmax(x)}, p, rg.zeros(2))
    theirs = jax.eval_shape(lambda p, x: p["w"] @ x, p, jnp.zeros(2, "float32"))
    assert found["y"] == theirs and found["n"].shape == ()
    assert rg.eval_shape(rg.grad(lambda x: rg.sin(x).sum()), 2.0).dtype == np.float32
    huge = jax.ShapeDtypeStruct((10**6, 10**6), "float32")
    assert rg.eval_shape(lambda x: x @ x, huge).shape == (10**6, 10**6)
