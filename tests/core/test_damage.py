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
from regrad.errors import CheckpointError, ExportError
from regrad.v1.training import archives
from tests.campaigns import damage
from tests.campaigns.verdicts import DELIVERED, REFUSED, SILENT, UNNAMED
from tests.helpers.rows import plain, refused

OWN = ["safetensors", "npz", "state file"]
LOST = tf.errors.DataLossError


def outcomes(job, quick=True):
    return {v.outcome for v in damage.run(job, quick=quick)}


# -- a slice of the campaign, and that it can fail -------------------------------------------------


@pytest.mark.parametrize("kind", ["cut", "flipped", "0"])
@pytest.mark.parametrize("name", [*OWN, "npz of numpy.savez", "npz, compressed"])
def test_damaged_files_are_refused_or_restored_rightly(name, kind):
    found = outcomes(f"{name}/{kind}")
    if name in OWN:
        assert REFUSED in found <= {REFUSED, DELIVERED}
    assert found <= {REFUSED, DELIVERED, UNNAMED}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("job", [*[f"{name}/cut" for name in OWN], "safetensors/flipped"])
def test_every_cut_and_every_bit(job):
    assert outcomes(job, quick=False) == {REFUSED}


def test_silence_and_bare_errors_are_found(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(rg.train.checkpoint, "_taken_checksums", lambda notes, names: None)
        assert SILENT in outcomes("safetensors/flipped")
    monkeypatch.setattr(files.CheckpointError, "__init__", lambda self, *args: {}[args])
    assert damage.BROKEN in outcomes("safetensors/cut")


# -- safetensors -----------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """A safetensors file of w and b, which are zero by now."""
    variables = [rg.Variable([1.0, 2.0], name="w"), rg.Variable([3.0], name="b")]
    rg.train.save(tmp_path / "a", variables, {"epoch": "3"})
    for v in variables:
        v.assign(rg.zeros_like(v.value))
    return tmp_path / "a", variables


W, B, BAD_W = (np.float32(x).tobytes() for x in ([1, 2], [3], [1, 3]))
CHANGES = [
    (W, BAD_W, "the array 'w' is not the one"), (B + W, W + B, "checksum"),
    (b'"epoch":"3"', b'"epoch":"4"', "the metadata are not those that were saved"),
    (b'"w":{', b'"v":{', "the names of its arrays do not match its checksums"),
    (b'"shape":[2]', b'"shape":[3]', "SafetensorError"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "words"), CHANGES)
def test_a_message_says_what_is_wrong(saved, old, new, words):
    path, variables = saved
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    error = refused(lambda: rg.train.restore(path, variables), CheckpointError, words)
    assert str(error).startswith(f"{path} is damaged, or not a safetensors file: ")
    assert str(error).endswith("Nothing was read from it.")
    assert plain(variables) == [[0.0, 0.0], [0.0]]


NOTES = ['{"w": 3}', "{", "3", "null", "[" * 100_000, '{"w": "complex128"}', '{"w":', "é"]


@pytest.mark.parametrize("note", NOTES)
def test_notes_of_dtypes_that_make_no_sense(saved, note):
    path, variables = saved
    save_file(load_file(path), path, {"regrad.ops.dtypes": note})
    refused(lambda: rg.train.restore(path, variables), CheckpointError, str(path))


@pytest.mark.parametrize("size", [7, 8])
def test_bytes_that_are_no_whole_elements(tmp_path, size):
    notes = {"regrad.ops.dtypes": '{"w":"float32"}'}
    save_file({"w": np.zeros((2, size), np.uint8)}, tmp_path / "a", notes)
    w = rg.Variable([1.0, 2.0], name="w")
    refused(lambda: rg.train.restore(tmp_path / "a", [w]), CheckpointError)


@pytest.mark.parametrize("notes", [{"epoch": "5"}, {"regrad.ops.dtypes": "[1]"}])
def test_files_of_other_programs_have_no_checksums(saved, notes):
    path, variables = saved
    save_file(load_file(path), path, notes)  # (a note without the name of a Variable is ignored)
    assert rg.train.restore(path, variables) == {k: v for k, v in notes.items() if k == "epoch"}
    assert variables[0].tolist() == [1.0, 2.0]


MAKE = {"folder": os.mkdir, "pipe": os.mkfifo, "device": lambda p: os.symlink("/dev/zero", p)}
READ = {
    "a": lambda folder: rg.train.restore(folder / "a", [rg.Variable(1.0, name="w")]),
    "a.npz": lambda folder: tf.train.list_variables(folder / "a"),
    "checkpoint": tf.train.latest_checkpoint,
    "program": lambda folder: rg.Exported.load(folder / "program"),
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("name", READ)
def test_what_is_no_file_is_refused(tmp_path, kind, name):
    MAKE[kind](tmp_path / name)
    words = f"{tmp_path / name} is .*not a regular file"
    refused(lambda: READ[name](tmp_path), (CheckpointError, ExportError), words)


def test_missing_files_and_empty_archives(tmp_path):
    assert issubclass(LOST, CheckpointError)
    refused(lambda: READ["a"](tmp_path), FileNotFoundError)
    refused(lambda: READ["a.npz"](tmp_path), tf.errors.NotFoundError)
    with tf.Graph().as_default(), tf.Session() as session:
        saver = tf.train.Saver(allow_empty=True)
        assert tf.train.list_variables(saver.save(session, tmp_path / "model")) == []
    np.savez(tmp_path / "a.npz")
    refused(lambda: READ["a.npz"](tmp_path), LOST, "holds no arrays")


# -- archives --------------------------------------------------------------------------------------


def npy(write, content):
    """The bytes of an array in NumPy's format, or of a header that may lie."""
    file = io.BytesIO()
    write(file, content)
    return file.getvalue()


def archive(path, method, data):
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("w.npy", data)


def float32(*shape, descr="<f4"):
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    return npy(np.lib.format.write_array_header_1_0, header)


NO_ARRAYS = [
    (float32(10**11), "'w' takes 400000000128 bytes, and its entry 128"),
    (float32(10**4000), "'w'"), (float32(-1), "'w' has the shape"),
    (float32(1, descr="|O") + bytes(8), "'w' holds Python objects"),
    (float32(1, descr="<q9") + bytes(8), "descr"),
    (b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535, "damaged"),
    (b"\x93NUMPY\x01\x00\xff\x0f" + b"-" * 4095, "damaged"),
    (b"\x93NUMPY\x09\x00\xff\x0f", "an entry is not an array"),
    (b"\x93NU", "an entry is not an array"), (b"", "an entry is not an array"),
    (b"cos\nsystem\n(S'true'\ntR.", "an entry is not an array"),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(NO_ARRAYS)))
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_entries_that_are_no_arrays(tmp_path, method, i):
    data, words = NO_ARRAYS[i]
    archive(tmp_path / "a.npz", method, data)
    for read in (tf.train.list_variables, lambda path: tf.train.load_variable(path, "w")):
        refused(lambda read=read: read(tmp_path / "a"), LOST, words)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_methods_of_compression(tmp_path, method):
    archive(tmp_path / "a.npz", method, npy(np.save, np.zeros(3)))
    refused(lambda: READ["a.npz"](tmp_path), LOST, "'w' is compressed in a way")


ARRAYS = {
    "c": np.arange(6.0).reshape(2, 3), "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "empty": np.zeros((0, 4)), "a/scalar": np.float32(2), "bool": np.bool_(True),
}  # fmt: skip


def listed(arrays):
    return {name: (array.tolist(), array.shape) for name, array in arrays.items()}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_of_numpy(tmp_path, save):
    arrays = ARRAYS | {"text": np.array([b"a", b"bc"])}
    save(tmp_path / "a.npz", **arrays)
    reader = tf.train.load_checkpoint(tmp_path / "a")
    found = {name: reader.get_tensor(name) for name in arrays}
    assert listed(found) == listed(arrays)
    assert all(array.flags.writeable for array in found.values())


def test_numpy_reads_ours(tmp_path):
    with open(tmp_path / "a.npz", "wb") as file:
        archives.write_arrays(file, ARRAYS)
    with np.load(tmp_path / "a.npz") as found:
        assert listed(found) == listed(ARRAYS)


def test_a_header_is_checked_before_it_is_used(tmp_path):
    path = tmp_path / "a.npz"
    with open(path, "wb") as file:
        archives.write_arrays(file, {"w": np.ones(5000, np.float32)})  # more than one read
    data = path.read_bytes()
    path.write_bytes(data.replace(b"<f4", b"<i4"))
    refused(lambda: READ["a.npz"](tmp_path), LOST, "CRC")


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


@pytest.mark.slow
def test_a_zip_bomb_is_not_unpacked(tmp_path):
    """300 MB of zeros that nobody asked for, that do not fit, and that are not what they say."""
    path, size = tmp_path / "a.npz", 300 * 2**20
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("w.npy", npy(np.save, np.ones(3, np.float32)))
        for name, header in [("big", float32(size // 4)), ("liar", float32(2))]:
            with file.open(f"{name}.npy", "w") as entry:
                entry.write(header)
                for _ in range(size // 2**20):
                    entry.write(bytes(2**20))
    assert path.stat().st_size < 8 * 2**20
    command = [sys.executable, "-c", BOMB, str(tmp_path / "a"), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True)
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
    """A file outside of the folder `models`."""
    for name in ("elsewhere", "models"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere/victim.npz").write_bytes(b"precious")
    return tmp_path / "elsewhere/victim"


@pytest.mark.parametrize("way", ["absolute", "../elsewhere/victim", "link/victim", "sub/.."])
def test_a_state_file_names_nothing_outside_its_folder(session, tmp_path, victim, way):
    folder = tmp_path / "models"
    (folder / "link").symlink_to(victim.parent)
    kept = tf.train.Saver().save(session, folder / "model")
    state(folder, victim if way == "absolute" else way, "model")
    saver = tf.train.Saver(max_to_keep=1)
    refused(lambda: tf.train.get_checkpoint_state(folder), LOST, "which is not in the folder")
    refused(lambda: tf.train.latest_checkpoint(folder), CheckpointError)
    saver.save(session, folder / "model", global_step=1)
    assert (victim.parent / "victim.npz").read_bytes() == b"precious"
    assert os.path.exists(kept + ".npz")
    assert tf.train.latest_checkpoint(folder) == str(folder / "model-1")


def test_no_state_file_is_written_that_names_something_outside(tmp_path, victim):
    write = lambda: tf.train.update_checkpoint_state(tmp_path / "models", victim)  # noqa: E731
    refused(write, ValueError, r"victim' is not in the folder .*pass the folder")
    assert os.listdir(tmp_path / "models") == []


@pytest.mark.parametrize("name", ["", "..", "sub/..", "a\0b"])
def test_no_state_file_is_written_that_names_no_file(tmp_path, name):
    write = lambda: tf.train.update_checkpoint_state(tmp_path, f"{tmp_path}/{name}")  # noqa: E731
    refused(write, ValueError, "is not in the folder")
    assert os.listdir(tmp_path) == []


def test_absolute_paths_within_the_folder_are_allowed(session, tmp_path):
    path, file = tf.train.Saver().save(session, tmp_path / "model"), tmp_path / "checkpoint"
    file.write_text(file.read_text().partition("\n")[2])  # old files have no checksum
    assert tf.train.latest_checkpoint(tmp_path) == path
    state(tmp_path, path)  # as TensorFlow writes it
    assert tf.train.latest_checkpoint(tmp_path) == path
    times = "all_model_checkpoint_timestamps: 1700000000.25\nlast_preserved_timestamp: 1e9\n"
    file.write_text(file.read_text() + times)
    assert tf.train.latest_checkpoint(tmp_path) == path
    (tmp_path / "link").symlink_to(tmp_path)
    assert tf.train.latest_checkpoint(tmp_path / "link") == str(tmp_path / "model")


def test_a_saver_of_two_folders(session, tmp_path):
    saver = tf.train.Saver()
    for name in "ab":
        (tmp_path / name).mkdir()
        saver.save(session, tmp_path / name / "model")
    assert len(saver.last_checkpoints) == 2
    for name in "ab":
        found = tf.train.get_checkpoint_state(tmp_path / name)
        assert found.all_model_checkpoint_paths == [str(tmp_path / name / "model")]


STATES = [
    b"", b"\xff\xfe", b"model_checkpoint_path: model", b'model_checkpoint_path: "a',
    b'model_checkpoint_path: "\\x"', b"model_checkpoint_path: 3", b'model_checkpoint_path: ""',
    b'model_checkpoint_path: "a\\u0000b"', b'model_checkpoint_path: "a"\nnonsense',
    b'# comment\nmodel_checkpoint_path: "a"', b'all_model_checkpoint_paths: "a"',
    b'model_checkpoint_path: "a"\nmodel_checkpoint_path: "b"',
    b'model_checkpoint_path: "a"\nall_model_checkpoint_paths: "b"',
]  # fmt: skip


@pytest.mark.parametrize("text", STATES)
def test_state_files_that_make_no_sense(tmp_path, text):
    (tmp_path / "checkpoint").write_bytes(text)
    words = f"{tmp_path}/checkpoint is damaged"
    refused(lambda: tf.train.get_checkpoint_state(tmp_path), LOST, words)
