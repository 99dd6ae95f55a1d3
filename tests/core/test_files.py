"""Files are whole at any time: threads, killed processes, full disks, links and modes."""

import itertools
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core import files
from regrad.errors import CheckpointError
from tests.campaigns.interrupts import handled
from tests.helpers.file_formats import FORMATS, save_npz, save_safetensors
from tests.helpers.rows import refused, together

PRECIOUS = b"precious"


@pytest.fixture(params=list(FORMATS))
def model(request, tmp_path):
    """A path, and the functions that save and read a file there."""
    save, read = FORMATS[request.param]
    path = tmp_path / f"model.{request.param}"
    return path, partial(save, path), partial(read, path)


def temporaries(folder):
    return [p.name for p in folder.iterdir() if p.stem != "model" and p.name != "checkpoint"]


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


# -- several at once -------------------------------------------------------------------------------


def test_two_threads_save_and_a_third_reads(model):
    path, save, read = model
    save(0.0)
    read()  # (a missing package raises in this thread)
    done, seen = threading.Event(), []

    def writer(number):
        for n in range(15):
            save(number + 2.0 * n)
        done.set()

    def reader():
        seen.append(read())
        while not done.is_set():
            seen.append(read())

    together([partial(writer, 0), partial(writer, 1), reader])
    assert all((values == values[0]).all() for values in seen)
    assert temporaries(path.parent) == []


def test_one_saver_in_several_threads(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        w = tf.Variable(np.zeros(8))
        session.run(w.initializer)
        saver = tf.train.Saver(max_to_keep=3)

        def run(first):
            for n in range(10):
                saver.save(session, tmp_path / "model", global_step=4 * n + first)

        together([partial(run, n) for n in range(4)])
    state = tf.train.get_checkpoint_state(tmp_path)
    assert state.all_model_checkpoint_paths == saver.last_checkpoints
    kept = {os.path.basename(p) + ".npz" for p in saver.last_checkpoints}
    assert set(os.listdir(tmp_path)) == {"checkpoint", *kept} and len(kept) == 3


def test_a_reader_keeps_the_checkpoint_that_it_opened(tmp_path):
    save_npz(tmp_path / "model.npz", 1.0)
    reader = tf.train.NewCheckpointReader(tmp_path / "model")
    save_npz(tmp_path / "model.npz", 2.0)
    assert reader.get_tensor("w")[0] == 1.0
    tf.train.remove_checkpoint(tmp_path / "model")
    assert reader.get_tensor("w")[0] == 1.0


# -- processes that are killed, and full disks -----------------------------------------------------

KILLED = """
import os, signal, sys
from regrad.core.files import replace_file
def write(file):
    file.write(b"half"); file.flush()
    print("writing", flush=True)
    signal.pause()
replace_file(sys.argv[1], write)
"""
SAVE = """
import resource, sys
sys.path[:0] = sys.argv[2:]
from tests.campaigns.interrupts import handled
from tests.helpers.file_formats import FORMATS
save = FORMATS[sys.argv[1].rpartition(".")[2]][0]
"""
MANY = f"""{SAVE}
print("ready", flush=True)
n = 0
while True:
    n += 1
    save(sys.argv[1], float(n))
"""
FULL = f"""{SAVE}
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save(sys.argv[1], 2.0)
except OSError as error:
    print(type(error).__name__, error.strerror)
"""


def started(script, path):
    """A process that has begun to save."""
    command = [sys.executable, "-c", script, str(path), *sys.path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    process.first = process.stdout.readline()
    return process


def test_a_killed_save_leaves_the_old_file_and_is_cleaned_up(model):
    path, save, read = model
    save(1.0)
    with started(KILLED, path) as process:
        try:
            save(2.0)
            assert len(temporaries(path.parent)) == 1  # that of a living process stays
        finally:
            process.kill()
    assert read()[0] == 2.0
    assert len(temporaries(path.parent)) == 1
    save(3.0)
    assert temporaries(path.parent) == []
    assert read()[0] == 3.0


@pytest.mark.slow(but=1)
def test_saves_that_are_killed_at_any_moment(model):
    path, save, read = model
    save(0.5)
    for n in range(3):
        with started(MANY, path) as process:
            time.sleep(0.02 * (n + 1))
            process.kill()
        values = read()
        assert (values == values[0]).all()
    save(1.0)
    assert temporaries(path.parent) == []


@pytest.mark.slow(but=1)
def test_a_full_disk_leaves_the_old_file(model):
    path, save, _ = model
    save(1.0)
    before = path.read_bytes()
    with started(FULL, path) as process:
        assert process.first == "OSError File too large\n"
    assert path.read_bytes() == before
    assert temporaries(path.parent) == []


def test_an_interrupt_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.npz"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"half")
        raise KeyboardInterrupt

    refused(lambda: files.replace_file(path, write), KeyboardInterrupt)
    assert path.read_bytes() == b"old"
    assert temporaries(tmp_path) == []


ONES = np.ones(2, np.float32)
SAVES = {
    "replace_file": lambda: lambda path: files.replace_file(path, lambda file: file.write(b"new")),
    "train.save": lambda: partial(rg.train.save, variables=[rg.Variable(ONES, name="w")]),
    "Exported.save": lambda: rg.export(rg.sin, ONES).save,
    "draw": lambda: rg.draw(rg.sin, ONES).html,
}


@pytest.mark.parametrize("name", SAVES)
def test_a_signal_at_any_instruction_leaves_no_file_open(tmp_path, name, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    save = partial(SAVES[name](), tmp_path / "model.npz")
    save()
    total, before = struck(save, -1), len(os.listdir("/dev/fd"))
    for n in range(0, total, 1 if name == "replace_file" else 17):
        refused(lambda n=n: struck(save, n), ZeroDivisionError)
        assert len(os.listdir("/dev/fd")) == before, n
        assert os.listdir(tmp_path) == ["model.npz"], n


def struck(save, n):
    """Let a signal come before the n-th instruction of core/files; return how many there are."""
    instructions, tracing = itertools.count(), sys.gettrace()

    def trace(frame, event, arg):
        if frame.f_code.co_filename != files.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(instructions) == n:
            signal.raise_signal(signal.SIGALRM)
        return trace

    with handled(signal.SIGALRM, lambda number, frame: 1 / 0):
        try:
            sys.settrace(trace)
            save()
        finally:
            sys.settrace(tracing)
    return next(instructions)


# -- links and modes -------------------------------------------------------------------------------


def test_a_link_stays_and_what_it_points_to_is_replaced(model):
    path, save, read = model
    (path.parent / "elsewhere").mkdir()
    path.symlink_to("elsewhere/there.npz")
    for number in (1.0, 2.0):  # at first it points to nothing
        save(number)
        assert os.readlink(path) == "elsewhere/there.npz"
        assert read()[0] == number
    assert os.listdir(path.parent / "elsewhere") == ["there.npz"]


def test_links_at_temporary_names_are_not_followed(model, monkeypatch, tmp_path_factory):
    path, save, _ = model
    victim = tmp_path_factory.mktemp("victim") / "file"
    victim.write_bytes(PRECIOUS)
    before = mode_of(victim)
    monkeypatch.setattr(files.os, "urandom", lambda n: b"\0" * n)  # as if it could be foreseen
    names = [f".regrad-{'00' * 8}.tmp", f"{path.name}.tmp{os.getpid()}"]
    for name in names:
        (path.parent / name).symlink_to(victim)
    refused(lambda: save(1.0), FileExistsError)
    assert (victim.read_bytes(), mode_of(victim)) == (PRECIOUS, before)
    assert sorted(os.listdir(path.parent)) == sorted(names)


def test_cleaning_up_spares_what_is_no_left_over(tmp_path):
    (tmp_path / "victim").write_bytes(PRECIOUS)
    (tmp_path / ".regrad-link.tmp").symlink_to(tmp_path / "victim")
    (tmp_path / ".regrad-folder.tmp").mkdir()
    os.mkfifo(tmp_path / ".regrad-fifo.tmp")
    for name in (".regrad-file", ".regrad-dead.tmp"):
        (tmp_path / name).write_bytes(b"")
    files.replace_file(tmp_path / "new", lambda file: file.write(b"x"))
    assert not (tmp_path / ".regrad-dead.tmp").exists()
    assert (tmp_path / "victim").read_bytes() == PRECIOUS
    assert len(os.listdir(tmp_path)) == 6


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444, 0o755])
def test_overwriting_keeps_the_mode(model, mode):
    path, save, _ = model
    save(1.0)
    path.chmod(mode)
    save(2.0)
    assert mode_of(path) == mode
    modes = []  # never more open than the old one
    files.replace_file(path, lambda file: modes.append(os.fstat(file.fileno()).st_mode & 0o777))
    assert modes[0] & ~mode & 0o077 == 0


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_that_the_umask_leaves(model, mask):
    path, save, _ = model
    before = os.umask(mask)
    try:
        save(1.0)
    finally:
        os.umask(before)
    assert mode_of(path) == 0o666 & ~mask


def test_what_is_no_file_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("folder", "fifo"):
        save = partial(save_safetensors, tmp_path / name, 1.0)
        refused(save, CheckpointError, f"{name} is not a regular file")
    refused(lambda: save_safetensors(tmp_path / "missing" / "file", 1.0), FileNotFoundError)
    assert sorted(temporaries(tmp_path)) == ["fifo", "folder"]


def test_the_folder_is_synced(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(files.os, "fsync", lambda f: synced.append(os.fstat(f).st_mode) or fsync(f))
    files.replace_file(tmp_path / "new", lambda file: file.write(b"x"))
    assert [stat.S_ISDIR(mode) for mode in synced] == [False, True]


ARRAYS = [*(np.arange(12.0)[::step] for step in (1, 2, -1)), np.arange(12.0).reshape(3, 4).T]


@pytest.mark.parametrize("array", ARRAYS)
def test_checksums_are_of_the_elements_however_they_lie(array):
    assert files.checksum(array) == files.checksum(array.copy())
    assert bytes(files.as_bytes(array)) == array.tobytes()
