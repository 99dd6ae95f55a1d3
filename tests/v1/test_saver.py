"""Checkpoints: what is saved and restored, which files there are, and what is refused."""

import os

import numpy as np
import pytest

import regrad.v1 as tf
from regrad.v1.training import saver as saver_module
from tests.helpers.rows import refused
from tests.helpers.v1_session import initialized


@pytest.fixture
def session(graph):
    """A session with variables: one has a name that numpy.savez takes as an argument, too."""
    with tf.Session() as session:
        tf.Variable([1.0, 2.0], name="s/v")
        tf.Variable(3, name="file")
        tf.Variable(["a", "bcd"], name="words")
        yield initialized(session)


def test_values_and_dtypes_come_back(session, tmp_path):
    saver, (v, number, _) = tf.train.Saver(), tf.global_variables()
    path = saver.save(session, str(tmp_path / "model"))
    assert path == str(tmp_path / "model") == tf.train.latest_checkpoint(str(tmp_path))
    assert tf.train.list_variables(path) == [("file", []), ("s/v", [2]), ("words", [2])]
    assert tf.train.load_variable(tmp_path, "file").dtype == np.int32
    reader = tf.train.NewCheckpointReader(path)
    assert reader.get_tensor("words").tolist() == [b"a", b"bcd"]
    assert reader.get_variable_to_dtype_map()["s/v"] == tf.float32
    assert not reader.has_tensor("v")
    words = f"Key 'v' not found in checkpoint {path}.npz; it has 'file', 's/v', 'words'"
    refused(lambda: reader.get_tensor("v"), tf.errors.NotFoundError, words)
    with np.load(path + ".npz") as archive:
        assert archive["s/v"].tolist() == [1.0, 2.0]
    session.run([v.assign([0.0, 0.0]), number.assign(0)])
    with tf.Session() as other:  # without initializing
        for target in (session, other):
            saver.restore(target, path)
            assert [a.tolist() for a in target.run([v, number])] == [[1.0, 2.0], 3]


def test_another_graph_restores_by_name(session, tmp_path):
    path = tf.train.Saver().save(session, str(tmp_path / "model"), global_step=7)
    assert path.endswith("model-7")
    with tf.Graph().as_default(), tf.Session() as other:
        u, column = tf.Variable([0.0, 0.0], name="u"), tf.Variable([[0.0], [0.0]])
        tf.train.Saver({"s/v": u}).restore(other, path)
        tf.train.Saver({"s/v": column}, reshape=True).restore(other, path)
        assert [a.tolist() for a in other.run([u, column])] == [[1.0, 2.0], [[1.0], [2.0]]]
        refused(lambda: tf.train.Saver([u]).restore(other, path), tf.errors.NotFoundError, "'u'")


def test_only_the_listed_variables_are_saved(session, tmp_path):
    v, w = tf.Variable(1.0), tf.Variable(2.0)
    saver = tf.train.Saver([v])
    path = saver.save(initialized(session), str(tmp_path / "model"))
    session.run([v.assign(0.0), w.assign(0.0)])
    saver.restore(session, path)
    assert session.run([v, w]) == [1.0, 0.0]


@pytest.mark.parametrize("jit", [False, True])
def test_training_goes_on_where_it_was_saved(graph, tmp_path, jit):
    w = tf.Variable([1.0, -2.0])
    step = tf.train.AdamOptimizer(0.1).minimize(tf.reduce_sum(w * w))
    saver = tf.train.Saver()
    with tf.Session(jit=jit) as session, tf.Session() as other:
        initialized(session).run(step)
        path = saver.save(session, str(tmp_path / "model"))
        session.run(step)
        due = session.run(w)
        session.run(step)
        for target in (session, other):  # a checkpoint knows nothing of how it was made
            saver.restore(target, path)
            target.run(step)
            np.testing.assert_allclose(target.run(w), due, rtol=1e-6 if jit else 0)


def test_old_checkpoints_are_deleted(session, tmp_path):
    saver = tf.train.Saver(max_to_keep=2)
    paths = [saver.save(session, str(tmp_path / "model"), global_step=n) for n in range(4)]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "model-2.npz", "model-3.npz"]
    assert saver.last_checkpoints == paths[2:]
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert (state.model_checkpoint_path, state.all_model_checkpoint_paths) == (paths[3], paths[2:])


@pytest.mark.parametrize("max_to_keep", [None, 0])
def test_all_are_kept(session, tmp_path, max_to_keep):
    saver = tf.train.Saver(max_to_keep=max_to_keep)
    for n in range(7):
        saver.save(session, tmp_path / "model", global_step=n)
    assert len(os.listdir(tmp_path)) == 8


def test_folders_may_be_moved_and_relative(session, tmp_path, monkeypatch):
    (tmp_path / "old").mkdir()
    tf.train.Saver().save(session, tmp_path / "old" / "model")
    (tmp_path / "old").rename(tmp_path / "new")
    assert tf.train.latest_checkpoint(tmp_path / "new") == str(tmp_path / "new" / "model")
    monkeypatch.chdir(tmp_path)
    assert tf.train.Saver().save(session, "model") == "model"
    assert tf.train.latest_checkpoint(".") == "./model"


def test_nothing_is_assigned_unless_all_fits(session, tmp_path):
    path = tf.train.Saver().save(session, tmp_path / "model")
    with tf.Graph().as_default(), tf.Session() as other:
        good, short = tf.Variable([0.0, 0.0], name="good"), tf.Variable([0.0], name="short")
        number = tf.Variable(1.5, name="number")
        for names, error, words in [
            ({"s/v": short, "s/v2": good}, tf.errors.NotFoundError, "'s/v2'.*'file', 's/v'"),
            ({"s/v": short}, tf.errors.InvalidArgumentError, r"\(2,\).*'short:0' has \(1,\)"),
            ({"s/v": good, "file": number}, tf.errors.InvalidArgumentError, "int32.*float32"),
        ]:
            with pytest.raises(error, match=words):
                tf.train.Saver(names).restore(other, path)
        refused(lambda: other.run(good), tf.errors.FailedPreconditionError)


def test_state_files_may_have_blank_and_indented_lines(session, tmp_path):
    path = tf.train.Saver().save(session, str(tmp_path / "model"))
    text = '\n  model_checkpoint_path: "model"\n\nlast_preserved_timestamp: 1700000000.25\n'
    (tmp_path / "checkpoint").write_text(text)
    assert tf.train.latest_checkpoint(tmp_path) == path


def test_a_missing_folder_is_created(session, tmp_path):
    path = tf.train.Saver().save(session, tmp_path / "new" / "model")
    assert tf.train.latest_checkpoint(tmp_path / "new") == path


def test_missing_files(session, tmp_path):
    assert tf.train.latest_checkpoint(str(tmp_path)) is None
    restore = lambda: tf.train.Saver().restore(session, str(tmp_path / "nothing"))  # noqa: E731
    refused(restore, (ValueError, tf.errors.NotFoundError))
    for path in (tmp_path, None):
        words = f"{path} is not a valid checkpoint: there is no {path}.npz"
        refused(lambda path=path: tf.train.Saver().restore(session, path), ValueError, words)
    refused(lambda: tf.train.load_checkpoint(tmp_path), tf.errors.NotFoundError, "valid")


@pytest.mark.parametrize("listed", [{"a\0b": 1.0}, {"words": np.array([b"b\0"], object)}])
def test_zero_bytes_that_a_file_would_lose(graph, tmp_path, listed):
    saver = tf.train.Saver({name: tf.Variable(value) for name, value in listed.items()})
    with tf.Session() as session:
        save = lambda: saver.save(initialized(session), tmp_path / "model")  # noqa: E731
        refused(save, TypeError, f"the zero bytes in {next(iter(listed))!r}".replace("\\", "\\\\"))
    assert os.listdir(tmp_path) == []


def test_a_table_of_contents_that_lacks_an_entry(session, tmp_path):
    path = tmp_path / "model.npz"
    np.savez(path, first=1.0, second=2.0)
    data = bytearray(path.read_bytes())
    first, second, end = (data.rindex(mark) for mark in (b"PK\1\2", b"PK\1\2", b"PK\5\6"))
    first = data.rindex(b"PK\1\2", 0, second)
    data[first + 32] = end - second  # the comment of the first entry is as long as the second
    path.write_bytes(data)
    read = lambda: tf.train.list_variables(tmp_path / "model")  # noqa: E731
    refused(read, tf.errors.DataLossError, "does not name each entry once")


def test_a_checkpoint_is_also_kept_each_few_hours(session, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(saver_module.time, "time", lambda: now[0])
    saver = tf.train.Saver(max_to_keep=1, keep_checkpoint_every_n_hours=2.0)
    for hour in range(7):
        now[0] = 3600.0 * hour
        saver.save(session, tmp_path / "model", global_step=hour)
    kept = ["checkpoint", "model-3.npz", "model-5.npz", "model-6.npz"]  # after 2 hours, after 4
    assert sorted(os.listdir(tmp_path)) == kept


def test_a_program_that_starts_again_recovers_its_checkpoints(session, tmp_path):
    saver = tf.train.Saver(max_to_keep=2)
    paths = [saver.save(session, str(tmp_path / "model"), global_step=n) for n in range(2)]
    other = tf.train.Saver(max_to_keep=2)
    other.recover_last_checkpoints([str(tmp_path / "lost"), *paths])
    assert other.last_checkpoints == paths
    other.save(session, str(tmp_path / "model"), global_step=2)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "model-1.npz", "model-2.npz"]
    other.set_last_checkpoints(paths)
    assert other.last_checkpoints == paths


@pytest.mark.parametrize(("name", "options", "words"), [
    ("missing/folder/model", {}, "doesn't exist"), ("checkpoint", {}, "collides"),
    ("model", {"latest_filename": "a/b"}, "path components"), ("folder/", {}, "names no file"),
])  # fmt: skip
def test_paths_that_are_refused(session, tmp_path, name, options, words):
    refused(
        lambda: tf.train.Saver().save(session, f"{tmp_path}/{name}", **options), ValueError, words
    )


def test_sessions_and_names_that_are_refused(session, tmp_path):
    saver = tf.train.Saver()
    refused(lambda: saver.save(None, tmp_path / "model"), TypeError, "must be a Session")
    with tf.Session() as empty, pytest.raises(tf.errors.FailedPreconditionError, match="s/v"):
        saver.save(empty, tmp_path / "model")
    with tf.Session(graph=tf.Graph()) as other, pytest.raises(ValueError, match="another graph"):
        saver.save(other, tmp_path / "model")
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="the same name: s/v"):
        tf.train.Saver([tf.global_variables()[0]] * 2)
    refused(lambda: tf.train.Saver(3), TypeError, "a list of variables or a dict, got 3")
    later = tf.train.Saver(defer_build=True)
    refused(lambda: later.save(session, tmp_path / "model"), ValueError, r"call build\(\) first")
