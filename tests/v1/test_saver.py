"""Checkpoints: which files there are, and what is refused."""

import os

import numpy as np
import pytest

import regrad.v1 as tf


@pytest.fixture
def session():
    with tf.Graph().as_default(), tf.Session() as session:
        tf.Variable([1.0, 2.0], name="s/v")
        tf.Variable(3, name="file")  # also the name of an argument of numpy.savez
        tf.Variable(["a", "bcd"], name="words")
        session.run(tf.global_variables_initializer())
        yield session


def test_values_and_dtypes_come_back(session, tmp_path):
    path = tf.train.Saver().save(session, tmp_path / "model")
    assert tf.train.list_variables(path) == [("file", []), ("s/v", [2]), ("words", [2])]
    assert tf.train.load_variable(tmp_path, "file").dtype == np.int32
    reader = tf.train.NewCheckpointReader(path)
    assert reader.get_tensor("words").tolist() == [b"a", b"bcd"]
    assert reader.get_variable_to_dtype_map()["s/v"] == tf.float32
    assert not reader.has_tensor("v")
    with np.load(path + ".npz") as archive:
        assert archive["s/v"].tolist() == [1.0, 2.0]


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


def test_a_folder_may_be_moved(session, tmp_path):
    (tmp_path / "old").mkdir()
    tf.train.Saver().save(session, tmp_path / "old" / "model")
    (tmp_path / "old").rename(tmp_path / "new")
    assert tf.train.latest_checkpoint(tmp_path / "new") == str(tmp_path / "new" / "model")


def test_relative_paths(session, tmp_path, monkeypatch):
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
        with pytest.raises(tf.errors.FailedPreconditionError):
            other.run(good)


def test_reshape(session, tmp_path):
    path = tf.train.Saver().save(session, tmp_path / "model")
    with tf.Graph().as_default(), tf.Session() as other:
        column = tf.Variable([[0.0], [0.0]])
        tf.train.Saver({"s/v": column}, reshape=True).restore(other, path)
        assert other.run(column).tolist() == [[1.0], [2.0]]


def test_a_damaged_file(session, tmp_path):
    saver = tf.train.Saver()
    path = saver.save(session, tmp_path / "model")
    file = tmp_path / "model.npz"
    for damaged in (b"", b"nonsense", file.read_bytes()[:200]):
        file.write_bytes(damaged)
        with pytest.raises(tf.errors.DataLossError, match="damaged"):
            saver.restore(session, path)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("missing/model", {}, "doesn't exist"),
        ("checkpoint", {}, "collides"),
        ("model", {"latest_filename": "a/b"}, "path components"),
    ],
)
def test_paths_that_are_refused(session, tmp_path, name, options, words):
    with pytest.raises(ValueError, match=words):
        tf.train.Saver().save(session, tmp_path / name, **options)


def test_sessions_that_are_refused(session, tmp_path):
    saver = tf.train.Saver()
    with pytest.raises(TypeError, match="must be a Session"):
        saver.save(None, tmp_path / "model")
    with tf.Session() as empty, pytest.raises(tf.errors.FailedPreconditionError, match="s/v"):
        saver.save(empty, tmp_path / "model")
    with tf.Session(graph=tf.Graph()) as other, pytest.raises(ValueError, match="another graph"):
        saver.save(other, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_names_must_differ(session):
    v = tf.global_variables()[0]
    with pytest.raises(ValueError, match="the same name: s/v"):
        tf.train.Saver([v, v])
