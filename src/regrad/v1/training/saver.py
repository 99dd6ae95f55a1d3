"""Checkpoints, which store the values of variables in files.

A checkpoint `model-7` is one file, `model-7.npz`, which `numpy.load` reads too. As in TensorFlow, a
text file `checkpoint` in the same folder names the latest checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regrad.core.files import reading, replace_file
from regrad.core.tensor import TensorLike
from regrad.errors import ArgumentError, GraphError
from regrad.v1 import dtypes, errors
from regrad.v1.graph.tensors import is_tensor
from regrad.v1.graph.variables import Variable, global_variables, variable_of
from regrad.v1.run.session import Session
from regrad.v1.training.archives import SUFFIX, Archive, write_arrays

__all__ = [
    "CheckpointReader", "CheckpointState", "NewCheckpointReader", "Saver", "checkpoint_exists",
    "get_checkpoint_state", "latest_checkpoint", "list_variables", "load_checkpoint",
    "load_variable", "remove_checkpoint", "update_checkpoint_state",
]  # fmt: skip

PathLike = str | os.PathLike[str]


# -- files ----------------------------------------------------------------------------------------


def checkpoint_exists(checkpoint_prefix: PathLike) -> bool:
    """Return whether a checkpoint of this path exists.

    Args:
        checkpoint_prefix: The path that `Saver.save` returned.

    Returns:
        A bool.

    Raises:
        ArgumentError: the argument is not a path.

    Source: `tf.train.checkpoint_exists`.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess, tempfile.TemporaryDirectory() as d:
    ...     v = tf.Variable([1.0, 2.0], name="v")
    ...     sess.run(v.initializer)
    ...     path = tf.train.Saver().save(sess, d + "/model")
    ...     print(tf.train.checkpoint_exists(path), tf.train.checkpoint_exists(d + "/other"))
    True False
    """
    return os.path.exists(os.fspath(checkpoint_prefix) + SUFFIX)


def remove_checkpoint(checkpoint_prefix: PathLike) -> None:
    """Delete a checkpoint, if it exists.

    The file that names the latest checkpoint does not change.

    Args:
        checkpoint_prefix: The path that `Saver.save` returned.

    Raises:
        ArgumentError: the argument is not a path.

    Source: `tf.train.remove_checkpoint`.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess, tempfile.TemporaryDirectory() as d:
    ...     v = tf.Variable([1.0, 2.0], name="v")
    ...     sess.run(v.initializer)
    ...     path = tf.train.Saver().save(sess, d + "/model")
    ...     tf.train.remove_checkpoint(path)
    ...     print(tf.train.latest_checkpoint(d))
    None
    """
    Path(os.fspath(checkpoint_prefix) + SUFFIX).unlink(missing_ok=True)


# -- the file `checkpoint`, which names the latest checkpoint -------------------------------------


class CheckpointState(NamedTuple):
    """The path of the latest checkpoint, and the paths of all kept checkpoints.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tf.train.update_checkpoint_state(folder, f"{folder}/model-7")
    ...     state = tf.train.get_checkpoint_state(folder)
    >>> state.model_checkpoint_path.endswith("model-7")
    True
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str]


def update_checkpoint_state(
    save_dir: PathLike, model_checkpoint_path: PathLike,
    all_model_checkpoint_paths: Sequence[PathLike] | None = None,
    latest_filename: str | None = None,
) -> None:  # fmt: skip
    """Write the file that names the latest checkpoint of a folder. Its paths are relative.

    Args:
        save_dir: The folder.
        model_checkpoint_path: The path of the latest checkpoint.
        all_model_checkpoint_paths: The paths of all kept checkpoints, oldest first. The latest is
            added.
        latest_filename: The name of the file, by default 'checkpoint'.

    Raises:
        GraphError: a path is outside the folder. The file must not make a program use or delete a
            file elsewhere. The error is a ValueError.
        FileNotFoundError: the folder does not exist.

    Source: `tf.train.update_checkpoint_state`.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tempfile.TemporaryDirectory() as d:
    ...     tf.train.update_checkpoint_state(d, d + "/model-7")
    ...     print(tf.train.get_checkpoint_state(d).model_checkpoint_path == d + "/model-7")
    True
    """
    folder, latest = os.fspath(save_dir), os.fspath(model_checkpoint_path)
    paths = [*(os.fspath(path) for path in all_model_checkpoint_paths or ()), latest]
    if outside := [path for path in paths if not _is_within(path, folder)]:
        text = f"{outside[0]!r} is not in the folder {folder!r}; pass the folder of the checkpoints"
        raise GraphError(text)
    inner = {path: json.dumps(os.path.relpath(path, folder or ".")) for path in paths}
    lines = f"model_checkpoint_path: {inner[latest]}\n"
    lines += "".join(f"all_model_checkpoint_paths: {path}\n" for path in inner.values())
    state = os.path.join(folder, latest_filename or "checkpoint")
    replace_file(state, lambda file: file.write(_sealed(lines).encode()))


def _sealed(lines: str) -> str:
    """Return the text of a state file: a comment with the checksum of the lines, and the lines."""
    return f"# crc32: {zlib.crc32(lines.encode()):08x}\n{lines}"


def _is_within(path: str, folder: str) -> bool:
    """Return whether a checkpoint is in a folder or below it, after resolving links."""
    named = "\0" not in path and os.path.basename(path) not in ("", ".", "..")
    return named and Path(path).parent.resolve().is_relative_to(Path(folder).resolve())


def get_checkpoint_state(
    checkpoint_dir: PathLike, latest_filename: str | None = None
) -> CheckpointState | None:
    """Return the checkpoints of a folder, or None if the folder has no checkpoints.

    Args:
        checkpoint_dir: The folder.
        latest_filename: The name of the file that names the checkpoints, by default 'checkpoint'.

    Returns:
        None, or a CheckpointState with `model_checkpoint_path`, the path of the latest checkpoint,
        and `all_model_checkpoint_paths`.

    Raises:
        tf.errors.DataLossError: the file is damaged, or names a checkpoint outside the folder.

    Source: `tf.train.get_checkpoint_state`.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess, tempfile.TemporaryDirectory() as d:
    ...     v = tf.Variable([1.0, 2.0], name="v")
    ...     sess.run(v.initializer)
    ...     path = tf.train.Saver().save(sess, d + "/model")
    ...     print(tf.train.get_checkpoint_state(d).all_model_checkpoint_paths == [path])
    True
    """
    folder = os.fspath(checkpoint_dir)
    state = os.path.join(folder, latest_filename or "checkpoint")
    if not os.path.exists(state):
        return None
    with reading(state, "file that names checkpoints", errors.DataLossError):
        text = Path(state).read_bytes().decode()
        lines = text.partition("\n")[2] if text.startswith("#") else text
        if text not in (lines, _sealed(lines)):  # (TensorFlow writes no comments)
            raise ValueError("its text does not match its checksum")
        found: dict[str, list[str]] = {field: [] for field in CheckpointState._fields}
        for line in filter(str.strip, lines.splitlines()):
            key, _, text = line.strip().partition(":")
            value = json.loads(text)
            if key in found:  # (TensorFlow also writes times)
                path = os.path.join(folder, value)
                if not _is_within(path, folder):
                    raise ValueError(f"it names {path!r:.200}, which is not in the folder")
                found[key].append(path)
        latest, every = found.values()
        if len(latest) != 1 or (every and latest[0] not in every):
            raise ValueError(f"it names {latest} as the latest checkpoint of {every}")
    return CheckpointState(latest[0], every)


def latest_checkpoint(checkpoint_dir: PathLike, latest_filename: str | None = None) -> str | None:
    """Return the path of the latest checkpoint in a folder, or None.

    Args:
        checkpoint_dir: The folder.
        latest_filename: The name of the file that names the checkpoints, by default 'checkpoint'.

    Returns:
        A path for `Saver.restore`, or None.

    Raises:
        tf.errors.DataLossError: the file is damaged, or names a checkpoint outside the folder.

    Source: `tf.train.latest_checkpoint`.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess, tempfile.TemporaryDirectory() as d:
    ...     v = tf.Variable([1.0, 2.0], name="v")
    ...     sess.run(v.initializer)
    ...     path = tf.train.Saver().save(sess, d + "/model")
    ...     print(tf.train.latest_checkpoint(d) == path)
    True
    """
    state = get_checkpoint_state(checkpoint_dir, latest_filename)
    path = state and state.model_checkpoint_path
    return path if path and checkpoint_exists(path) else None


# -- looking into a checkpoint --------------------------------------------------------------------


class CheckpointReader:
    """The variables in a checkpoint, by name.

    The reader checks the whole file, and keeps only the requested variables in memory. If the
    checkpoint is replaced or deleted later, the reader still reads the old file.

    Args:
        filepattern: The path that `Saver.save` returned. A path without a checkpoint raises
            `tf.errors.NotFoundError`.

    Source: `tf.train.NewCheckpointReader`.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess, tempfile.TemporaryDirectory() as d:
    ...     v = tf.Variable([1.0, 2.0], name="v")
    ...     sess.run(v.initializer)
    ...     path = tf.train.Saver().save(sess, d + "/model")
    ...     reader = tf.train.NewCheckpointReader(path)
    >>> reader.get_variable_to_shape_map(), reader.get_tensor("v")
    ({'v': [2]}, array([1., 2.], dtype=float32))
    """

    def __init__(self, filepattern: PathLike) -> None:
        self._archive = Archive(filepattern)
        self._headers = {name: self._archive.header(name) for name in self._archive.infos}

    def has_tensor(self, tensor_name: str) -> bool:
        """Return whether the checkpoint has a variable of this name."""
        return tensor_name in self._headers

    def get_tensor(self, tensor_name: str) -> np.ndarray:
        """Return the value of a variable. Raises `tf.errors.NotFoundError` for an unknown name."""
        self._archive.check([tensor_name])
        return self._archive.array(tensor_name)

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Return the shapes by name."""
        return {name: list(shape) for name, (shape, _) in self._headers.items()}

    def get_variable_to_dtype_map(self) -> dict[str, dtypes.DType]:
        """Return the dtypes by name."""
        return {name: dtypes.of(dtype) for name, (_, dtype) in self._headers.items()}


NewCheckpointReader = CheckpointReader


def load_checkpoint(ckpt_dir_or_file: PathLike) -> CheckpointReader:
    """Return a reader of a checkpoint, or of the latest checkpoint in a folder.

    Args:
        ckpt_dir_or_file: The folder, or the path of a checkpoint.

    Returns:
        A CheckpointReader.

    Raises:
        tf.errors.NotFoundError: the checkpoint does not exist.
        tf.errors.DataLossError: the file is damaged.

    Source: `tf.train.load_checkpoint`.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess, tempfile.TemporaryDirectory() as d:
    ...     v = tf.Variable([1.0, 2.0], name="v")
    ...     sess.run(v.initializer)
    ...     path = tf.train.Saver().save(sess, d + "/model")
    ...     reader = tf.train.load_checkpoint(d)
    >>> reader.has_tensor("v"), reader.has_tensor("w")
    (True, False)
    """
    return CheckpointReader(latest_checkpoint(ckpt_dir_or_file) or ckpt_dir_or_file)


def list_variables(ckpt_dir_or_file: PathLike) -> list[tuple[str, list[int]]]:
    """Return the names and shapes of the variables in a checkpoint, sorted.

    Args:
        ckpt_dir_or_file: The path of a checkpoint, or a folder, for its latest checkpoint.

    Returns:
        A list of pairs of a name and a list of sizes.

    Raises:
        tf.errors.NotFoundError: the checkpoint does not exist.
        tf.errors.DataLossError: the file is damaged.

    Source: `tf.train.list_variables`.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess, tempfile.TemporaryDirectory() as d:
    ...     v = tf.Variable([1.0, 2.0], name="v")
    ...     sess.run(v.initializer)
    ...     path = tf.train.Saver().save(sess, d + "/model")
    ...     print(tf.train.list_variables(d))
    [('v', [2])]
    """
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


def load_variable(ckpt_dir_or_file: PathLike, name: str) -> np.ndarray:
    """Return the value of a variable in a checkpoint.

    Args:
        ckpt_dir_or_file: The path of a checkpoint, or a folder, for its latest checkpoint.
        name: The name of the variable.

    Returns:
        An array of the variable's shape and dtype.

    Raises:
        tf.errors.NotFoundError: the checkpoint does not exist, or does not have the variable.
        tf.errors.DataLossError: the file is damaged.

    Source: `tf.train.load_variable`.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess, tempfile.TemporaryDirectory() as d:
    ...     v = tf.Variable([1.0, 2.0], name="v")
    ...     sess.run(v.initializer)
    ...     path = tf.train.Saver().save(sess, d + "/model")
    ...     print(tf.train.load_variable(path, "v"))
    [1. 2.]
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)


# -- Saver ----------------------------------------------------------------------------------------


class Saver:
    """Saves and restores the values of variables in a session.

    Args:
        var_list: Variables, or a dict of names to variables. By default all variables of the graph.
        reshape: Restore a value to a variable of another shape if the sizes are equal.
        sharded: Without effect: a checkpoint is one file.
        max_to_keep: The number of checkpoints to keep. None or 0 keeps all.
        keep_checkpoint_every_n_hours: Also keep one of the older checkpoints per this many hours.
        name: Without effect: saving adds no ops to the graph.
        restore_sequentially: Without effect.
        saver_def: Without effect.
        builder: Without effect.
        defer_build: Choose the variables to save when `build` is called.
        allow_empty: Allow a Saver without variables. By default it raises ValueError (GraphError).
        write_version: Without effect: a checkpoint is an `.npz` file.
        pad_step_number: Write step numbers in paths with leading zeros.
        save_relative_paths: Without effect: paths are always relative.
        filename: Without effect.

    A checkpoint does not contain the graph. Build the graph again, then restore. Variables need not
    be initialized before they are restored.

    Source: `tf.train.Saver`.

    >>> import tempfile
    >>> import regrad.v1 as tf
    >>> with tf.Graph().as_default(), tf.Session() as sess, tempfile.TemporaryDirectory() as d:
    ...     v = tf.Variable([1.0, 2.0], name="v")
    ...     saver = tf.train.Saver()
    ...     sess.run(v.initializer)
    ...     path = saver.save(sess, d + "/model", global_step=7)
    ...     v.load([0.0, 0.0], sess)
    ...     saver.restore(sess, path)
    ...     print(sess.run(v), path == d + "/model-7", tf.train.list_variables(d))
    [1. 2.] True [('v', [2])]
    """

    def __init__(
        self, var_list: Any = None, reshape: bool = False, sharded: bool = False,
        max_to_keep: int | None = 5, keep_checkpoint_every_n_hours: float = 10000.0,
        name: str | None = None, restore_sequentially: bool = False, saver_def: None = None,
        builder: None = None, defer_build: bool = False, allow_empty: bool = False,
        write_version: Any = None, pad_step_number: bool = False,
        save_relative_paths: bool = False, filename: str | None = None,
    ) -> None:  # fmt: skip
        self._var_list, self._allow_empty, self._reshape = var_list, allow_empty, reshape
        self._limit = max_to_keep or math.inf
        self._interval = keep_checkpoint_every_n_hours * 3600
        self._next_kept = time.time() + self._interval
        self._step = "08d" if pad_step_number else "d"
        self._kept = OrderedDict[str, float]()  # oldest first, with the times of saving
        self._lock = threading.Lock()
        self._variables: dict[str, Variable] | None = None
        if not defer_build:
            self.build()

    def build(self) -> None:
        """Choose the variables to save."""
        if self._variables is None:
            listed = global_variables() if self._var_list is None else self._var_list
            self._variables = _by_name(listed)
            if not self._variables and not self._allow_empty:
                raise GraphError("No variables to save")

    # -- saving ----------------------------------------------------------------------------------

    def save(
        self, sess: Session, save_path: PathLike, global_step: TensorLike = None,
        latest_filename: str | None = None, meta_graph_suffix: str = "meta",
        write_meta_graph: bool = True, write_state: bool = True, strip_default_attrs: bool = False,
        save_debug_info: bool = False,
    ) -> str:  # fmt: skip
        """Save the variables, and return the path to restore from, `save_path-global_step`.

        The file is written atomically and keeps the mode of the file that it replaces. If the path
        is a symbolic link, the target of the link is replaced. `save` deletes checkpoints beyond
        `max_to_keep`, the oldest first.

        `save` creates the folder of the path if only the folder itself is missing, as in
        TensorFlow. Raises FailedPreconditionError for a variable without a value, and ValueError if
        the parent of the folder does not exist.
        """
        path, state = os.fspath(save_path), latest_filename or "checkpoint"
        folder, file = os.path.split(path)
        if os.path.split(state)[0]:
            raise GraphError(f"'latest_filename' must not contain path components: {state!r}")
        if file in ("", state):
            raise GraphError(f"save_path {path!r} names no file, or collides with {state!r}")
        if not os.path.isdir(os.path.dirname(os.path.abspath(folder))):
            raise GraphError(f"Parent directory of {path} doesn't exist, can't save.")
        variables = self._check_session(sess)
        if global_step is not None:
            step = int(sess.run(global_step) if is_tensor(global_step) else global_step)
            path = f"{path}-{step:{self._step}}"
        arrays = sess._snapshot({name: v.op.name for name, v in variables.items()})
        os.makedirs(folder or ".", exist_ok=True)
        replace_file(path + SUFFIX, lambda file: write_arrays(file, arrays))
        with self._lock:  # threads may share a Saver
            self._kept[path] = time.time()
            self._kept.move_to_end(path)
            while len(self._kept) > self._limit:
                oldest, saved = self._kept.popitem(last=False)
                if saved > self._next_kept:
                    self._next_kept += self._interval
                else:
                    remove_checkpoint(oldest)
            if write_state:
                here = [kept for kept in self._kept if _is_within(kept, folder)]
                update_checkpoint_state(folder, path, here, state)
        return path

    def _check_session(self, sess: Session) -> dict[str, Variable]:
        """Return the variables by name. Raises if the session cannot use them."""
        if not isinstance(sess, Session):
            raise ArgumentError(f"'sess' must be a Session; {sess!r:.60}")
        sess._check_open()
        if self._variables is None:
            raise GraphError("the Saver was made with defer_build=True: call build() first")
        strange = ", ".join(v.name for v in self._variables.values() if v.graph is not sess.graph)
        if strange:
            raise GraphError(f"the session has another graph than the Saver's variables {strange}")
        return self._variables

    @property
    def last_checkpoints(self) -> list[str]:
        """The paths of the kept checkpoints, oldest first."""
        return list(self._kept)

    def set_last_checkpoints(self, last_checkpoints: Sequence[str]) -> None:
        """Set the list of checkpoints saved before, oldest first."""
        self._kept = OrderedDict.fromkeys(last_checkpoints, math.inf)

    def recover_last_checkpoints(self, checkpoint_paths: Sequence[str]) -> None:
        """Set the list of checkpoints saved before, without paths that no longer exist.

        Call it after a restart of the program.
        """
        found = filter(checkpoint_exists, checkpoint_paths)
        self._kept = OrderedDict((path, os.path.getmtime(path + SUFFIX)) for path in found)

    # -- restoring -------------------------------------------------------------------------------

    def restore(self, sess: Session, save_path: PathLike) -> None:
        """Set the variables to the saved values. The variables need not be initialized.

        `restore` changes nothing unless all names, shapes and dtypes fit. Raises
        `tf.errors.NotFoundError` for a missing checkpoint or a missing name,
        `tf.errors.InvalidArgumentError` for values of another shape or dtype, and
        `tf.errors.DataLossError` for a damaged file.
        """
        variables = self._check_session(sess)
        with Archive(save_path) as archive:
            archive.check(variables, ". Give Saver its variables, or a dict of names to variables.")
            values = {v.op.name: self._value(archive, name, v) for name, v in variables.items()}
        sess._variables.update(values)

    def _value(self, archive: Archive, name: str, variable: Variable) -> np.ndarray:
        """Return the array of an archive for a variable. Raises if it does not fit."""
        stored, dtype = archive.header(name)
        reshaped = self._reshape and variable.shape.num_elements() == math.prod(stored)
        fits = reshaped or variable.shape.is_compatible_with(stored)
        if dtype != variable.dtype.base_dtype or not fits:
            raise errors.InvalidArgumentError(
                "Assign requires dtypes and shapes of both tensors to match: "
                f"{name!r} was saved with {stored} and {dtypes.of(dtype).name}, and the variable "
                f"{variable.name!r} has {variable.shape} and {variable.dtype.base_dtype.name}"
            )
        shape: Any = variable.shape.as_list() if reshaped else stored
        return archive.array(name).reshape(shape)


def _by_name(listed: Any) -> dict[str, Variable]:
    """Return variables by their names in a checkpoint."""
    if isinstance(listed, Mapping):
        return {str(name): variable_of(v) for name, v in listed.items()}
    if isinstance(listed, Variable) or not isinstance(listed, Iterable):
        raise ArgumentError(f"var_list is a list of variables or a dict, got {listed!r:.60}")
    variables = [variable_of(v) for v in listed]
    names = [v.op.name for v in variables]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise GraphError(f"At least two variables have the same name: {', '.join(twice)}")
    return dict(zip(names, variables, strict=True))
