"""Files are whole at any time: threads, killed processes, full disks, links and modes."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import regrad as rg
import regrad.v1 as tf
from regrad.core import files
from regrad.errors import CheckpointError
from tests.helpers.file_formats import FORMATS, save_npz, save_safetensors


@pytest.fixture(params=list(FORMATS))
def form(request):
    return request.param


@pytest.fixture
def path(tmp_path, form):
    return tmp_path / f"model.{form}"


@pytest.fixture
def save(form):
    return FORMATS[form][0]


@pytest.fixture
def read(form):
    return FORMATS[form][1]


def temporaries(folder):
    return [name for name in os.listdir(folder) if name not in ("model.npz", "model.safetensors",
                                                                 "checkpoint")]  # fmt: skip


# -- several at once -------------------------------------------------------------------------------


def test_two_threads_save_and_a_third_reads(path, save, read):
    save(path, 0.0)
    read(path)  # which says in this thread if a package is missing
    running, failures, seen = threading.Event(), [], []

    def writer(number):
        with gathered(failures):
            for n in range(15):
                save(path, number + 2.0 * n)
        running.set()

    def reader():
        with gathered(failures):
            seen.append(read(path))
            while not running.is_set():
                seen.append(read(path))

    threads = [threading.Thread(target=writer, args=(n,)) for n in range(2)]
    threads.append(threading.Thread(target=reader))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert seen and all((values == values[0]).all() for values in seen)
    assert temporaries(path.parent) == []


@contextlib.contextmanager
def gathered(failures):
    try:
        yield
    except Exception as error:
        failures.append(error)


def test_one_saver_in_several_threads(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        w = tf.Variable(np.zeros(8))
        session.run(w.initializer)
        saver, failures = tf.train.Saver(max_to_keep=3), []

        def run(first):
            with gathered(failures):
                for n in range(10):
                    saver.save(session, tmp_path / "model", global_step=4 * n + first)

        threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    state = tf.train.get_checkpoint_state(tmp_path)
    assert state.all_model_checkpoint_paths == saver.last_checkpoints
    kept = {os.path.basename(p) + ".npz" for p in saver.last_checkpoints}
    assert set(os.listdir(tmp_path)) == {"checkpoint", *kept} and len(kept) == 3


def test_a_reader_keeps_the_checkpoint_that_it_opened(tmp_path):
    path = tmp_path / "model.npz"
    save_npz(path, 1.0)
    reader = tf.train.NewCheckpointReader(tmp_path / "model")
    save_npz(path, 2.0)
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


@contextlib.contextmanager
def stopped_writer(path):
    """A process in the middle of a save."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
    with process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_killed_save_leaves_the_old_file_and_is_cleaned_up(path, save, read):
    save(path, 1.0)
    with stopped_writer(path) as process:
        save(path, 2.0)
        assert len(temporaries(path.parent)) == 1  # that of a living process stays
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert read(path)[0] == 2.0
    assert len(temporaries(path.parent)) == 1
    save(path, 3.0)
    assert temporaries(path.parent) == []
    assert read(path)[0] == 3.0


MANY = """
import sys
sys.path[:0] = sys.argv[2:]
from tests.helpers.file_formats import FORMATS
print("ready", flush=True)
n = 0
while True:
    n += 1
    FORMATS[sys.argv[1].rpartition(".")[2]][0](sys.argv[1], float(n))
"""


def test_saves_that_are_killed_at_any_moment(path, save, read):
    save(path, 0.5)
    for n in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", MANY, str(path), *sys.path], stdout=subprocess.PIPE
        ) as process:
            process.stdout.readline()
            time.sleep(0.02 * (n + 1))
            process.kill()
        values = read(path)
        assert (values == values[0]).all()
    save(path, 1.0)
    assert temporaries(path.parent) == []


FULL = """
import resource, sys
sys.path[:0] = sys.argv[2:]
from tests.helpers.file_formats import FORMATS
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    FORMATS[sys.argv[1].rpartition(".")[2]][0](sys.argv[1], 2.0)
except OSError as error:
    print(type(error).__name__, error.strerror)
"""


def test_a_full_disk_leaves_the_old_file(path, save, read):
    save(path, 1.0)
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path), *sys.path], capture_output=True, text=True
    )
    assert done.stdout == "OSError File too large\n", done.stderr
    assert path.read_bytes() == before
    assert temporaries(path.parent) == []


def test_an_interrupt_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.npz"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.replace_file(path, write)
    assert path.read_bytes() == b"old"
    assert temporaries(tmp_path) == []


class StruckError(Exception):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("saves", ["replace_file", "train.save", "Exported.save", "draw"])
def test_a_signal_at_any_instruction_leaves_no_file_open(tmp_path, saves, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    path, x = tmp_path / "model.npz", np.ones(2, np.float32)
    w, program, picture = rg.Variable(x, name="w"), rg.export(rg.sin, x), rg.draw(rg.sin, x)
    save = {
        "replace_file": lambda: files.replace_file(path, lambda file: file.write(b"new")),
        "train.save": lambda: rg.train.save(path, [w]),
        "Exported.save": lambda: program.save(path),
        "draw": lambda: picture.html(path),
    }[saves]
    save()
    total, outcomes = struck(save, -1), set()
    before = len(os.listdir("/dev/fd"))
    for n in range(0, total, 1 if saves == "replace_file" else 17):
        try:
            struck(save, n)
            outcomes.add("swallowed")
        except StruckError:
            outcomes.add("raised")
        assert len(os.listdir("/dev/fd")) == before, n
        assert os.listdir(tmp_path) == [path.name], n
    assert outcomes == {"raised"}


def struck(save, n):
    """Let a signal come before the n-th instruction of core/files; return how many there are."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename != files.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == n + 1:
                signal.raise_signal(signal.SIGALRM)
        return trace

    def handler(number, frame):
        raise StruckError

    usual, tracing = signal.signal(signal.SIGALRM, handler), sys.gettrace()
    try:
        sys.settrace(trace)
        save()
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGALRM, usual)
    return count


# -- links and modes -------------------------------------------------------------------------------


def test_a_link_stays_and_what_it_points_to_is_replaced(path, save, read):
    folder = path.parent / "elsewhere"
    folder.mkdir()
    path.symlink_to("elsewhere/there.npz")
    for number in (1.0, 2.0):  # at first it points to nothing
        save(path, number)
        assert os.readlink(path) == "elsewhere/there.npz"
        assert read(path)[0] == number
    assert os.listdir(folder) == ["there.npz"]


def test_links_at_temporary_names_are_not_followed(path, save, monkeypatch, tmp_path_factory):
    victim = tmp_path_factory.mktemp("victim") / "file"
    victim.write_bytes(b"precious")
    monkeypatch.setattr(files.os, "urandom", lambda n: b"\0" * n)  # as if it could be foreseen
    names = [f".regrad-{'00' * 8}.tmp", f"{path.name}.tmp{os.getpid()}"]
    for name in names:
        (path.parent / name).symlink_to(victim)
    with pytest.raises(FileExistsError):
        save(path, 1.0)
    assert victim.read_bytes() == b"precious"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o666 & ~umask()
    assert sorted(os.listdir(path.parent)) == sorted(names)


def test_cleaning_up_spares_what_is_no_left_over(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / ".regrad-link.tmp").symlink_to(victim)
    (tmp_path / ".regrad-folder.tmp").mkdir()
    os.mkfifo(tmp_path / ".regrad-fifo.tmp")
    (tmp_path / ".regrad-file").write_bytes(b"")
    (tmp_path / ".regrad-dead.tmp").write_bytes(b"")
    files.replace_file(tmp_path / "new", lambda file: file.write(b"x"))
    assert not (tmp_path / ".regrad-dead.tmp").exists()
    assert victim.read_bytes() == b"precious"
    assert len(os.listdir(tmp_path)) == 6


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444, 0o755])
def test_overwriting_keeps_the_mode(path, save, mode):
    save(path, 1.0)
    path.chmod(mode)
    save(path, 2.0)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_that_the_umask_leaves(path, save, mask):
    before = os.umask(mask)
    try:
        save(path, 1.0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_the_file_is_never_more_open_than_the_old_one(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"")
    path.chmod(0o600)
    modes = []
    files.replace_file(path, lambda file: modes.append(os.fstat(file.fileno()).st_mode & 0o777))
    assert modes == [0o600]


def test_what_is_no_file_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("folder", "fifo"):
        with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
            save_safetensors(tmp_path / name, 1.0)
    with pytest.raises(FileNotFoundError):
        save_safetensors(tmp_path / "missing" / "file", 1.0)
    assert sorted(temporaries(tmp_path)) == ["fifo", "folder"]


def test_the_folder_is_synced(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(files.os, "fsync", lambda f: synced.append(os.fstat(f).st_mode) or fsync(f))
    files.replace_file(tmp_path / "new", lambda file: file.write(b"x"))
    assert [stat.S_ISDIR(mode) for mode in synced] == [False, True]


@pytest.mark.parametrize("step", [1, 2, -1])
def test_checksums_are_of_the_elements_however_they_lie(step):
    array = np.arange(12.0)[::step]
    assert files.checksum(array) == files.checksum(array.copy())
    assert bytes(files.as_bytes(array)) == array.tobytes()
    assert bytes(files.as_bytes(np.arange(12.0).reshape(3, 4).T)) == (
        np.arange(12.0).reshape(3, 4).T.tobytes()
    )
