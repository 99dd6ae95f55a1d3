"""Damaged and hostile files are refused by a CheckpointError that names them."""

import io
import json
import os
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import regrad as rg
import regrad.v1 as tf
from regrad.core import files
from regrad.errors import CheckpointError
from regrad.v1.training import archives
from tests.campaigns import damage
from tests.campaigns.verdicts import DELIVERED, REFUSED, SILENT, UNNAMED

OWN = ["safetensors", "npz", "state file"]


def outcomes(job):
    return {v.outcome for v in damage.run(job, quick=True)}


# -- a slice of the campaign, and that it can fail -------------------------------------------------


@pytest.mark.parametrize("kind", ["cut", "flipped", "0"])
@pytest.mark.parametrize("name", OWN)
def test_damaged_files_are_refused_or_restored_rightly(name, kind):
    assert REFUSED in outcomes(f"{name}/{kind}") <= {REFUSED, DELIVERED}


@pytest.mark.parametrize("kind", ["cut", "flipped", "0"])
@pytest.mark.parametrize("name", ["npz of numpy.savez", "npz, compressed"])
def test_files_of_numpy_too(name, kind):
    assert outcomes(f"{name}/{kind}") <= {REFUSED, DELIVERED, UNNAMED}


@pytest.mark.parametrize("name", ["safetensors", "npz", "state file"])
def test_every_cut(name):
    assert {v.outcome for v in damage.run(f"{name}/cut")} == {REFUSED}


def test_every_bit_of_a_safetensors_file():
    assert {v.outcome for v in damage.run("safetensors/flipped")} == {REFUSED}


def test_silence_is_found(monkeypatch):
    monkeypatch.setattr(rg.train.checkpoint, "_taken_checksums", lambda notes, names: None)
    assert SILENT in outcomes("safetensors/flipped")


def test_bare_errors_are_found(monkeypatch):
    monkeypatch.setattr(files.CheckpointError, "__init__", lambda self, *args: {}[args])
    assert damage.BROKEN in outcomes("safetensors/cut")


# -- what a message says ---------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A safetensors file of w and b."""
    variables = [rg.Variable([1.0, 2.0], name="w"), rg.Variable([3.0], name="b")]
    rg.train.save(tmp_path / "a", variables, {"epoch": "3"})
    for v in variables:
        v.assign(rg.zeros_like(v.value))
    return tmp_path / "a", variables


def changed(path, old, new):
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            np.float32([1, 2]).tobytes(),
            np.float32([1, 3]).tobytes(),
            "the array 'w' is not the one",
        ),
        (b'"epoch":"3"', b'"epoch":"4"', "the metadata are not those that were saved"),
        (b'"w":{', b'"v":{', "the names of its arrays are not those of its checksums"),
        (b'"shape":[2]', b'"shape":[3]', "SafetensorError"),
    ],
)
def test_a_message_says_what_is_wrong(saved, old, new, words):
    path, variables = saved
    changed(path, old, new)
    with pytest.raises(CheckpointError, match=words) as caught:
        rg.train.restore(path, variables)
    assert str(caught.value).startswith(f"{path} is damaged, or no safetensors file: ")
    assert str(caught.value).endswith("Nothing was read from it.")
    assert [v.tolist() for v in variables] == [[0.0, 0.0], [0.0]]


def test_arrays_that_changed_places_are_noticed(saved):
    path, variables = saved
    data = path.read_bytes()
    b, w = np.float32([3]).tobytes(), np.float32([1, 2]).tobytes()
    path.write_bytes(data.replace(b + w, w + b))
    with pytest.raises(CheckpointError, match="checksum"):
        rg.train.restore(path, variables)


def rewritten(path, notes):
    save_file(load_file(path), path, notes)


@pytest.mark.parametrize(
    "note",
    ["[1]", '{"w": 3}', "{", "3", "null", "[" * 100_000, '{"w": "complex128"}', '{"w":', "é"],
)
def test_notes_of_dtypes_that_make_no_sense(saved, note):
    path, variables = saved
    rewritten(path, {"regrad.ops.dtypes": note})
    if note == "[1]":  # names no variable, so it says nothing
        assert rg.train.restore(path, variables) == {}
        return
    with pytest.raises(CheckpointError, match=str(path)):
        rg.train.restore(path, variables)


def test_bytes_that_are_no_whole_elements(tmp_path):
    save_file(
        {"w": np.zeros((2, 7), np.uint8)}, tmp_path / "a", {"regrad.ops.dtypes": '{"w":"float32"}'}
    )
    save_file(
        {"w": np.zeros((2, 8), np.uint8)}, tmp_path / "b", {"regrad.ops.dtypes": '{"w":"float32"}'}
    )
    for name in "ab":
        with pytest.raises(CheckpointError):
            rg.train.restore(tmp_path / name, [rg.Variable([1.0, 2.0], name="w")])


def test_files_of_other_programs_have_no_checksums(saved):
    path, variables = saved
    rewritten(path, {"epoch": "5"})
    assert rg.train.restore(path, variables) == {"epoch": "5"}
    assert variables[0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
@pytest.mark.parametrize("name", ["a", "a.npz", "checkpoint"])
def test_what_is_no_file_is_refused(tmp_path, kind, name):
    make = {"folder": os.mkdir, "pipe": os.mkfifo, "device": lambda p: os.symlink("/dev/zero", p)}
    make[kind](tmp_path / name)
    read = {
        "a": lambda: rg.train.restore(tmp_path / "a", [rg.Variable(1.0, name="w")]),
        "a.npz": lambda: tf.train.list_variables(tmp_path / "a"),
        "checkpoint": lambda: tf.train.latest_checkpoint(tmp_path),
    }
    with pytest.raises(CheckpointError, match=f"{tmp_path / name} is .*not a regular file"):
        read[name]()


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        rg.train.restore(tmp_path / "missing", [rg.Variable(1.0, name="w")])
    with pytest.raises(tf.errors.NotFoundError):
        tf.train.list_variables(tmp_path / "missing")


def test_a_data_loss_error_is_a_checkpoint_error():
    assert issubclass(tf.errors.DataLossError, CheckpointError)


def test_a_saver_of_no_variables(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        saver = tf.train.Saver(allow_empty=True)
        assert tf.train.list_variables(saver.save(session, tmp_path / "model")) == []
    np.savez(tmp_path / "none.npz")
    with pytest.raises(tf.errors.DataLossError, match="holds no arrays"):
        tf.train.list_variables(tmp_path / "none")


# -- archives --------------------------------------------------------------------------------------


def npy(array=None, header=None):
    """The bytes of an array in NumPy's format, with a header that may lie."""
    with io.BytesIO() as file:
        if header is None:
            np.save(file, array)
        else:
            np.lib.format.write_array_header_1_0(file, header)
        return file.getvalue()


def archive(path, method=zipfile.ZIP_STORED, **entries):
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in entries.items():
            file.writestr(f"{name}.npy", data)


def float32(*shape):
    return {"descr": "<f4", "fortran_order": False, "shape": shape}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (npy(header=float32(10**11)), "'w' takes 400000000128 bytes, and its entry 128"),
        (npy(header=float32(10**4000)), "'w'"),
        (npy(header=float32(-1)) + b"", "'w' has the shape"),
        (npy(header={**float32(1), "descr": "|O"}) + bytes(8), "'w' holds Python objects"),
        (npy(header={**float32(1), "descr": "<q9"}) + bytes(8), "descr"),
        (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, "damaged"),
        (b"\x93NUMPY\x01\x00\xff\x0f" + b"-" * 4095, "damaged"),
        (b"\x93NUMPY\x09\x00\xff\x0f", "an entry is not an array"),
        (b"\x93NU", "an entry is not an array"),
        (b"", "an entry is not an array"),
        (b"cos\nsystem\n(S'true'\ntR.", "an entry is not an array"),
    ],
)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_entries_that_are_no_arrays(tmp_path, method, data, words):
    archive(tmp_path / "a.npz", method, w=data)
    for read in (tf.train.list_variables, lambda path: tf.train.load_variable(path, "w")):
        with pytest.raises(tf.errors.DataLossError, match=words):
            read(tmp_path / "a")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_methods_of_compression(tmp_path, method):
    archive(tmp_path / "a.npz", method, w=npy(np.zeros(3)))
    with pytest.raises(tf.errors.DataLossError, match="'w' is compressed in a way"):
        tf.train.list_variables(tmp_path / "a")


def test_archives_of_numpy(tmp_path):
    arrays = {
        "c": np.arange(6.0).reshape(2, 3), "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "empty": np.zeros((0, 4)), "scalar": np.float32(2), "text": np.array([b"a", b"bc"]),
    }  # fmt: skip
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **arrays)
        reader = tf.train.load_checkpoint(tmp_path / "a")
        for name, array in arrays.items():
            found = reader.get_tensor(name)
            assert (found.tolist(), found.shape) == (array.tolist(), array.shape)
            assert found.flags.writeable


def test_numpy_reads_ours(tmp_path):
    arrays = {"w": np.arange(6.0).reshape(2, 3), "a/b": np.bool_(True), "none": np.zeros((0, 2))}
    with open(tmp_path / "a.npz", "wb") as file:
        archives.write_arrays(file, arrays)
    with np.load(tmp_path / "a.npz") as found:
        assert {k: (v.tolist(), v.shape) for k, v in found.items()} == {
            k: (v.tolist(), v.shape) for k, v in arrays.items()
        }


BOMB = """
import resource, sys
sys.path[:0] = sys.argv[2:]
import numpy as np, regrad.v1 as tf
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
w, big = tf.Variable(np.zeros(3, np.float32)), tf.Variable(np.zeros(2, np.float32))
before = peak()
with tf.Session() as session:
    for names in [{"w": w}, {"big": big}, {"liar": big}]:
        try:
            tf.train.Saver(names).restore(session, sys.argv[1])
            print(session.run(w))
        except tf.errors.OpError as error:
            print(type(error).__name__)
print(peak() - before)
"""


def test_a_zip_bomb_is_not_unpacked(tmp_path):
    """300 MB of zeros that nobody asked for, that do not fit, and that are not what they say."""
    path, size = tmp_path / "a.npz", 300 * 2**20
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("w.npy", npy(np.ones(3, np.float32)))
        for name, header in [("big", float32(size // 4)), ("liar", float32(2))]:
            with file.open(f"{name}.npy", "w") as entry:
                entry.write(npy(header=header))
                for _ in range(size // 2**20):
                    entry.write(bytes(2**20))
    assert path.stat().st_size < 8 * 2**20
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(tmp_path / "a"), *sys.path], capture_output=True, text=True
    )
    *said, megabytes = done.stdout.splitlines()
    assert said == ["[1. 1. 1.]", "InvalidArgumentError", "DataLossError"], done.stderr
    assert int(megabytes) < 30


# -- state files -----------------------------------------------------------------------------------


@pytest.fixture
def session():
    with tf.Graph().as_default(), tf.Session() as session:
        tf.Variable([1.0, 2.0], name="v")
        session.run(tf.global_variables_initializer())
        yield session


def state(folder, *paths):
    lines = [f"model_checkpoint_path: {json.dumps(str(paths[-1]))}"]
    lines += [f"all_model_checkpoint_paths: {json.dumps(str(path))}" for path in paths]
    (folder / "checkpoint").write_text("\n".join(lines) + "\n")


@pytest.fixture
def victim(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "victim.npz").write_bytes(b"precious")
    return folder / "victim"


@pytest.mark.parametrize("way", ["absolute", "upward", "by a link", "not at all"])
def test_a_state_file_names_nothing_outside_its_folder(session, tmp_path, victim, way):
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "link").symlink_to(victim.parent)
    named = {
        "absolute": victim, "upward": "../elsewhere/victim", "by a link": "link/victim",
        "not at all": "sub/..",
    }[way]  # fmt: skip
    kept = tf.train.Saver().save(session, folder / "model")
    state(folder, named, "model")
    saver = tf.train.Saver(max_to_keep=1)
    with pytest.raises(tf.errors.DataLossError, match="which is not in the folder"):
        saver.recover_last_checkpoints(
            tf.train.get_checkpoint_state(folder).all_model_checkpoint_paths
        )
    with pytest.raises(CheckpointError):
        tf.train.latest_checkpoint(folder)
    saver.save(session, folder / "model", global_step=1)
    assert (victim.parent / "victim.npz").read_bytes() == b"precious"
    assert os.path.exists(kept + ".npz")
    assert tf.train.latest_checkpoint(folder) == str(folder / "model-1")


def test_absolute_paths_within_the_folder_are_allowed(session, tmp_path):
    path = tf.train.Saver().save(session, tmp_path / "model")
    state(tmp_path, path)  # as TensorFlow writes it
    assert tf.train.latest_checkpoint(tmp_path) == path
    with (tmp_path / "checkpoint").open("a") as file:
        file.write(
            "all_model_checkpoint_timestamps: 1700000000.25\nlast_preserved_timestamp: 1e9\n"
        )
    assert tf.train.latest_checkpoint(tmp_path) == path
    (tmp_path / "link").symlink_to(tmp_path)
    assert tf.train.latest_checkpoint(tmp_path / "link") == str(tmp_path / "model")


def test_no_state_file_is_written_that_names_something_outside(tmp_path, victim):
    (tmp_path / "models").mkdir()
    with pytest.raises(ValueError, match=r"victim' is not in the folder .*give the folder"):
        tf.train.update_checkpoint_state(tmp_path / "models", victim)
    assert os.listdir(tmp_path / "models") == []


def test_a_saver_of_two_folders(session, tmp_path):
    saver = tf.train.Saver()
    for name in "ab":
        (tmp_path / name).mkdir()
        saver.save(session, tmp_path / name / "model")
    assert len(saver.last_checkpoints) == 2
    for name in "ab":
        found = tf.train.get_checkpoint_state(tmp_path / name)
        assert found.all_model_checkpoint_paths == [str(tmp_path / name / "model")]


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\xff\xfe", b"model_checkpoint_path: model", b'model_checkpoint_path: "a',
        b'model_checkpoint_path: "\\x"', b"model_checkpoint_path: 3", b'model_checkpoint_path: ""',
        b'model_checkpoint_path: "a\\u0000b"', b'model_checkpoint_path: "a"\nnonsense',
        b'# comment\nmodel_checkpoint_path: "a"', b'all_model_checkpoint_paths: "a"',
        b'model_checkpoint_path: "a"\nmodel_checkpoint_path: "b"',
        b'model_checkpoint_path: "a"\nall_model_checkpoint_paths: "b"',
    ],
)  # fmt: skip
def test_state_files_that_make_no_sense(tmp_path, text):
    (tmp_path / "checkpoint").write_bytes(text)
    with pytest.raises(tf.errors.DataLossError, match=f"{tmp_path}/checkpoint is damaged"):
        tf.train.get_checkpoint_state(tmp_path)


def test_old_state_files_without_a_checksum(session, tmp_path):
    path = tf.train.Saver().save(session, tmp_path / "model")
    text = (tmp_path / "checkpoint").read_text()
    (tmp_path / "checkpoint").write_text(text.partition("\n")[2])
    assert tf.train.latest_checkpoint(tmp_path) == path
