"""Files of `regrad.train.save` and `restore`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

import regrad as rg
from regrad import train
from regrad.core.tensor import wrap
from regrad.errors import ArgumentError, CheckpointError, GradientError, StateError
from tests.helpers.fitted_line import WAYS, as_torch, loss_of, model, same_bits, values
from tests.helpers.rows import refused

DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16",
    "float32", "float64", "complex64", "complex128", "bfloat16", "float8_e4m3fn",
]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (2, 3), (0, 4)])
@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_round_trip_is_bit_for_bit(tmp_path, dtype, make, shape):
    dtype = jnp.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(1).integers(0, 2 if dtype.kind == "b" else 256, size, np.uint8)
    data = np.frombuffer(raw.tobytes(), dtype).reshape(shape)  # NaNs with payloads among them
    v = rg.Variable(wrap(make(data)), trainable=False, name="v")
    train.save(tmp_path / "a", [v])
    v.assign(wrap(make(np.zeros(shape, dtype))))
    train.restore(tmp_path / "a", [v])
    back = np.asarray(v.value.data)
    assert (back.dtype, back.shape, back.tobytes()) == (dtype, shape, data.tobytes())
    assert type(v.value.data) is type(make(data))


def test_torch_variables_stay_torch(tmp_path):
    (w, _) = model(as_torch)
    train.save(tmp_path / "a", [w])
    w.assign(wrap(as_torch([0.0, 0.0, 0.0])))
    train.restore(tmp_path / "a", [w])
    assert type(w.value.data).__module__ == "torch"
    assert w.tolist() == [0.5, 0.5, 0.5]


def test_arrays_that_do_not_lie_in_order(tmp_path):
    v = rg.Variable(wrap(np.arange(6.0).reshape(2, 3).T), name="v")
    train.save(tmp_path / "a", [v])
    np.testing.assert_array_equal(load_file(tmp_path / "a")["v"], v.numpy())


def test_files_are_plain_safetensors(tmp_path):
    w, b = model()
    train.save(tmp_path / "a", {"weights": w, "bias": b}, {"epoch": "3"})
    with safetensors.safe_open(tmp_path / "a", framework="np") as file:
        assert set(file.keys()) == {"weights", "bias"}
        notes = file.metadata()
        assert notes.pop("epoch") == "3"
        assert all(key.startswith("regrad.") for key in notes)
    np.testing.assert_array_equal(load_file(tmp_path / "a")["weights"], w.numpy())
    save_file({"weights": np.float32([1, 2, 3]), "bias": np.array(4, np.float32)}, tmp_path / "b")
    assert train.restore(tmp_path / "b", {"weights": w, "bias": b}) == {}
    assert (w.tolist(), b.item()) == ([1, 2, 3], 4)


@pytest.mark.parametrize("way", ["adam", "clipped", "injected", "noisy", "accumulated"])
def test_going_on_equals_not_having_stopped(tmp_path, way):
    def fresh():
        w, b = model()
        optimizer = train.Optimizer(WAYS[way]())
        optimizer.init([w, b])
        return w, b, optimizer

    w, b, optimizer = fresh()
    for n in range(8):
        optimizer.minimize(loss_of(w, b))
        if n == 3:
            train.save(tmp_path / "a", [w, b, *optimizer.variables])
    due = values([w, b, *optimizer.variables])

    w, b, optimizer = fresh()
    train.restore(tmp_path / "a", [w, b, *optimizer.variables])
    for _ in range(4):
        optimizer.minimize(loss_of(w, b))
    same_bits(values([w, b, *optimizer.variables]), due)


def test_a_file_that_does_not_fit_restores_nothing(tmp_path):
    w, b = model()
    other = [rg.Variable([[1.0, 2.0, 3.0]], name="w"), rg.Variable(1, dtype="int32", name="b"),
             rg.Variable(1j, dtype="complex128", name="extra")]  # fmt: skip
    train.save(tmp_path / "a", other)
    c = rg.Variable(1.0, name="c")
    refused(lambda: train.restore(tmp_path / "a", [w, b, c]), CheckpointError,
            "does not fit the variables", "'c' is not in the file", "Nothing was restored",
            r"'w' is float32 \(1, 3\) there, the variable float32 \(3,\)",
            r"'b' is int32 \(\) there, the variable float32 \(\)",
            "'extra' is in the file, but not among the variables")  # fmt: skip
    assert (w.tolist(), b.item()) == ([0.5, 0.5, 0.5], 0)
    real = [*other[:2], rg.Variable(1.0, name="extra")]
    words = r"'extra' is complex128 \(\) there"
    refused(lambda: train.restore(tmp_path / "a", real), CheckpointError, words)


def test_parts_of_a_file_are_restored_if_that_is_said(tmp_path):
    model = [rg.Variable([1.0, 2.0], name="w"), rg.Variable(3.0, name="b")]
    state = rg.Variable([5, 6], name="adam/mu", trainable=False, dtype="int32")
    train.save(tmp_path / "a", [*model, state], {"epoch": "3"})
    other = rg.Variable(7.0, name="head")
    for v in (*model, state):
        v.assign(rg.zeros_like(v))
    with pytest.raises(CheckpointError, match=r"'adam/mu' is in the file, but .*strict=False"):
        train.restore(tmp_path / "a", model)
    assert train.restore(tmp_path / "a", [*model, other], strict=False) == {"epoch": "3"}
    assert [v.tolist() for v in (*model, state, other)] == [[1.0, 2.0], 3.0, [0, 0], 7.0]
    with pytest.raises(CheckpointError, match="'head' is not in the file"):
        train.restore(tmp_path / "a", [other], strict=False)
    wide = rg.Variable([0.0, 0.0, 0.0], name="w")
    model[1].assign(0.0)
    with pytest.raises(CheckpointError, match=r"'w' is float32 \(2,\) there"):
        train.restore(tmp_path / "a", [wide, model[1]], strict=False)
    assert model[1].item() == 0.0


def test_the_contents_of_a_file_are_listed(tmp_path):
    """A file as Hugging Face's have it: bfloat16, names with dots, no checksums."""
    layer = "model.layers.0.self_attn"
    arrays = {
        "model.embed_tokens.weight": np.arange(12, dtype=jnp.bfloat16).reshape(4, 3),
        f"{layer}.q_proj.weight": np.ones((3, 3), jnp.bfloat16),
        "lm_head.weight": np.ones((4, 3), np.float16),
    }
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    listed = train.list_variables(tmp_path / "model.safetensors")
    assert listed == {
        "lm_head.weight": ((4, 3), "float16"),
        "model.embed_tokens.weight": ((4, 3), "bfloat16"),
        f"{layer}.q_proj.weight": ((3, 3), "bfloat16"),
    }
    assert listed["lm_head.weight"].shape == (4, 3)
    shape, dtype = listed["model.embed_tokens.weight"]
    table = rg.Variable(jnp.zeros(shape, dtype))
    notes = train.restore(
        tmp_path / "model.safetensors", {"model.embed_tokens.weight": table}, strict=False
    )
    assert notes == {"format": "pt"}
    assert table.numpy().astype(float).tolist() == np.arange(12.0).reshape(4, 3).tolist()
    train.save(tmp_path / "viewed", [rg.Variable([1 + 2j], dtype="complex128", name="c")])
    assert train.list_variables(tmp_path / "viewed") == {"c": ((1,), "complex128")}
    (tmp_path / "bad").write_bytes(b"{}")
    refused(lambda: train.list_variables(tmp_path / "bad"), CheckpointError)


W, B = model()
MISTAKES = [
    *[((wrong,), ArgumentError, "takes a list of Variables, or a dict")
      for wrong in (W, [rg.ones(3)], {"w": rg.ones(3)}, {1: W}, 3)],
    (([W, rg.Variable(1.0, name="w")],), ArgumentError, "save: two variables are called 'w'"),
    (([W, W],), ArgumentError, "save: two variables are called 'w'"),
    (([],), ArgumentError, "there are no variables"),
    (({"__metadata__": W},), ArgumentError, "means something else in the format"),
    (([W], {"epoch": 3}), ArgumentError, r"dict from strings to strings.*'epoch': 3"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "error", "words"), MISTAKES, ids=range(len(MISTAKES)))
def test_what_save_refuses(tmp_path, args, error, words):
    refused(lambda: train.save(tmp_path / "a", *args), error, words)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("use", [train.save, train.restore])
def test_files_are_not_for_functions_that_are_compiled_or_differentiated(tmp_path, use):
    path = tmp_path / "a"
    with pytest.raises(StateError, match=f"{use.__name__} inside a compiled function"):
        jax.jit(lambda x: use(path, [rg.Variable(wrap(x), name="x")]))(1.0)
    with pytest.raises(GradientError, match="being differentiated"):
        rg.variable_grads(lambda: train.save(path, [W]) or W.sum())
    assert not path.exists()
