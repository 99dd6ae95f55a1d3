"""Checkpoints, which store the values of variables in files.

A checkpoint `model-7` is one file, `model-7.npz`, which `numpy.load` reads too. As in TensorFlow, a
text file `checkpoint` in the same folder names the latest checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import threading
import time
import zlib
from collections import Counter
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
from regrad.v1.training.archives import Archive, Entry, write_arrays

__all__ = [
    "CheckpointReader", "CheckpointState", "NewCheckpointReader", "Saver", "checkpoint_exists",
    "get_checkpoint_state", "latest_checkpoint", "list_variables", "load_checkpoint",
    "load_variable", "remove_checkpoint", "update_checkpoint_state",
]  # fmt: skip

SUFFIX = ".npz"
PathLike = str | os.PathLike[str]


class MissingCheckpointError(errors.NotFoundError, GraphError):
    """The checkpoint does not exist (TensorFlow 1.15 raises ValueError here)."""


# -- files ----------------------------------------------------------------------------------------


def _open(path: PathLike) -> Archive:
    path = os.fspath(path)
    try:
        return Archive(path + SUFFIX)
    except FileNotFoundError:
        text = f"The passed save_path is not a valid checkpoint: {path} (no file {path}{SUFFIX})"
        raise MissingCheckpointError(text) from None


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
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.fspath(checkpoint_prefix) + SUFFIX)


# -- the file `checkpoint`, which names the latest checkpoint -------------------------------------

LINE = re.compile(r'\s*(?:(\w+):\s*(".*"|[-+.\w]+))?\s*')  # a key and its value, or nothing
KEYS = ("model_checkpoint_path", "all_model_checkpoint_paths")  # TensorFlow also writes times


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
    latest, paths = os.fspath(model_checkpoint_path), list(all_model_checkpoint_paths or [])
    folder = os.fspath(save_dir)
    if latest not in paths:
        paths.append(latest)
    lines = []
    for key, path in [(KEYS[0], latest), *((KEYS[1], os.fspath(path)) for path in paths)]:
        if not _is_within(path, folder):
            text = f"{path!r} is not in the folder {folder!r}; pass the folder of the checkpoints"
            raise GraphError(f"update_checkpoint_state: {text}")
        lines.append(f"{key}: {json.dumps(os.path.relpath(path, folder or '.'))}\n")
    text = "".join([_seal("".join(lines)), "\n", *lines])
    state = os.path.join(folder, latest_filename or "checkpoint")
    replace_file(state, lambda file: file.write(text.encode()))


def _seal(text: str) -> str:
    """Return the first line of a state file, a comment with the checksum of the other lines."""
    return f"# crc32: {zlib.crc32(text.encode()):08x}"


def _is_within(path: PathLike, folder: str) -> bool:
    """Return whether a checkpoint is in a folder or below it, after resolving links."""
    inner, outer = os.path.realpath(os.path.dirname(path)), os.path.realpath(folder)
    named = os.path.basename(path) not in ("", ".", "..")
    return named and os.path.commonpath([inner, outer]) == outer


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
        if text.startswith("#"):  # TensorFlow writes no comments
            first, _, text = text.partition("\n")
            if first != _seal(text):
                raise ValueError("its text does not match its checksum")
        found: dict[str, list[str]] = {key: [] for key in KEYS}
        for line in text.splitlines():
            match = LINE.fullmatch(line)
            if match is None:
                raise ValueError(f"it has the line {line!r:.60}")
            if match[1] in KEYS:
                path = os.path.join(folder, json.loads(match[2]))
                if "\0" in path or not _is_within(path, folder):
                    raise ValueError(f"it names {path!r:.200}, which is not in the folder")
                found[match[1]].append(path)
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
        self._archive = _open(filepattern)
        self._entries = self._archive.entries()

    def has_tensor(self, tensor_name: str) -> bool:
        """Return whether the checkpoint has a variable of this name."""
        return tensor_name in self._entries

    def get_tensor(self, tensor_name: str) -> np.ndarray:
        """Return the value of a variable. Raises `tf.errors.NotFoundError` for an unknown name."""
        if tensor_name not in self._entries:
            text = f"Key {tensor_name!r} not found in checkpoint; it has {_names(self._entries)}"
            raise errors.NotFoundError(text)
        return self._archive.arrays({tensor_name: self._entries[tensor_name]})[tensor_name]

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Return the shapes by name."""
        return {name: list(entry.shape) for name, entry in self._entries.items()}

    def get_variable_to_dtype_map(self) -> dict[str, dtypes.DType]:
        """Return the dtypes by name."""
        return {name: dtypes.of(entry.dtype) for name, entry in self._entries.items()}


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
    path = os.fspath(ckpt_dir_or_file)
    found = latest_checkpoint(path) if os.path.isdir(path) else path
    if found is None:
        raise MissingCheckpointError(f"no checkpoint was saved in the folder {path!r}")
    return CheckpointReader(found)


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


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"


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
        self._keep = max_to_keep or 0
        self._interval = keep_checkpoint_every_n_hours * 3600
        self._next_kept = time.time() + self._interval
        self._pad = pad_step_number
        self._kept: list[tuple[str, float]] = []  # oldest first, with the times of saving
        self._lock = threading.Lock()
        self._variables: dict[str, Variable] | None = None
        if not defer_build:
            self.build()

    def build(self) -> None:
        """Choose the variables to save."""
        if self._variables is not None:
            return
        self._variables = _by_name(self._var_list)
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
        path = os.fspath(save_path)
        state = latest_filename or "checkpoint"
        folder = _check_folder(path, state)
        if global_step is not None:
            step = int(sess.run(global_step) if is_tensor(global_step) else global_step)
            path = f"{path}-{step:08d}" if self._pad else f"{path}-{step}"
        values = self._values(sess)
        os.makedirs(folder or ".", exist_ok=True)
        replace_file(path + SUFFIX, lambda file: write_arrays(file, values))
        with self._lock:  # threads may share a Saver
            self._keep_latest(path)
            if write_state:
                here = [kept for kept in self.last_checkpoints if _is_within(kept, folder)]
                update_checkpoint_state(folder, path, here, state)
        return path

    def _values(self, sess: Session) -> dict[str, np.ndarray]:
        variables = self._check_session(sess)
        names = [v.op.name for v in variables.values()]
        if unset := [name for name in names if name not in sess._variables]:
            text = "run tf.global_variables_initializer() in this session before it is saved"
            unset = f"Attempting to use uninitialized value {', '.join(unset)}: {text}"
            raise errors.FailedPreconditionError(unset)
        return dict(zip(variables, sess._snapshot(names), strict=True))

    def _check_session(self, sess: Session) -> dict[str, Variable]:
        """Return the variables by name. Raises if the session cannot use them."""
        if not isinstance(sess, Session):
            raise ArgumentError(f"'sess' must be a Session; {sess!r:.60}")
        if sess._closed:
            raise errors.ClosedError("Attempted to use a closed Session.")
        if self._variables is None:
            raise GraphError("the Saver was made with defer_build=True: call build() first")
        strange = ", ".join(v.name for v in self._variables.values() if v.graph is not sess.graph)
        if strange:
            raise GraphError(f"the session has another graph than the Saver's variables {strange}")
        return self._variables

    def _keep_latest(self, path: str) -> None:
        """Append a path, and delete the oldest checkpoints beyond `max_to_keep`."""
        self._kept = [*[(p, t) for p, t in self._kept if p != path], (path, time.time())]
        while self._keep and len(self._kept) > self._keep:
            oldest, saved = self._kept.pop(0)
            if saved > self._next_kept:
                self._next_kept += self._interval
            else:
                remove_checkpoint(oldest)

    @property
    def last_checkpoints(self) -> list[str]:
        """The paths of the kept checkpoints, oldest first."""
        return [path for path, _ in self._kept]

    def set_last_checkpoints(self, last_checkpoints: Sequence[str]) -> None:
        """Set the list of checkpoints saved before, oldest first."""
        self._kept = [(path, float("inf")) for path in last_checkpoints]

    def recover_last_checkpoints(self, checkpoint_paths: Sequence[str]) -> None:
        """Set the list of checkpoints saved before, without paths that no longer exist.

        Call it after a restart of the program.
        """
        found = [p for p in checkpoint_paths if checkpoint_exists(p)]
        self._kept = [(p, os.path.getmtime(p + SUFFIX)) for p in found]

    # -- restoring -------------------------------------------------------------------------------

    def restore(self, sess: Session, save_path: PathLike) -> None:
        """Set the variables to the saved values. The variables need not be initialized.

        `restore` changes nothing unless all names, shapes and dtypes fit. Raises
        `tf.errors.NotFoundError` for a missing checkpoint or a missing name,
        `tf.errors.InvalidArgumentError` for values of another shape or dtype, and
        `tf.errors.DataLossError` for a damaged file.
        """
        if save_path is None:
            raise GraphError("Can't load save_path when it is None.")
        variables = self._check_session(sess)
        with _open(save_path) as archive:
            if missing := [name for name in variables if name not in archive]:
                present = archive.entries()  # raises if the names are damaged
                text = (
                    f"Key {_names(missing)} not found in checkpoint {os.fspath(save_path)}, which"
                )
                hint = "Give Saver its variables, or a dict of its names to variables."
                raise errors.NotFoundError(f"{text} has {_names(present)}. {hint}")
            entries = archive.entries(variables)
            shapes = {name: self._shape(name, v, entries[name]) for name, v in variables.items()}
            arrays = archive.arrays(entries)  # no array is larger than its variable
        values = {v.op.name: arrays[name].reshape(shapes[name]) for name, v in variables.items()}
        sess._variables.update(values)

    def _shape(self, name: str, variable: Variable, entry: Entry) -> tuple[int, ...]:
        """Return the shape of an entry's array for a variable. Raises if it does not fit."""
        expected = variable.dtype.base_dtype
        if expected != entry.dtype:
            text = f"the variable {variable.name!r} is {expected.name}"
            raise errors.InvalidArgumentError(f"{name!r} was saved as {entry.dtype}, and {text}")
        if variable.shape.is_compatible_with(entry.shape):
            return entry.shape
        if self._reshape and variable.shape.num_elements() == math.prod(entry.shape):
            sizes: Any = variable.shape.as_list()
            return tuple(sizes)
        text = f"the shape {entry.shape}, and the variable {variable.name!r} has {variable.shape}"
        raise errors.InvalidArgumentError(
            f"Assign requires shapes of both tensors to match: {name!r} was saved with {text}"
        )


def _by_name(listed: Any) -> dict[str, Variable]:
    """Return variables by their names in a checkpoint."""
    if listed is None:
        listed = global_variables()
    if isinstance(listed, Mapping):
        return {str(name): variable_of(v) for name, v in listed.items()}
    if isinstance(listed, Variable) or not isinstance(listed, Iterable):
        raise ArgumentError(f"var_list is a list of variables or a dict, got {listed!r:.60}")
    variables = [variable_of(v) for v in listed]
    names = [v.op.name for v in variables]
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise GraphError(f"At least two variables have the same name: {', '.join(twice)}")
    return dict(zip(names, variables, strict=True))


def _check_folder(path: str, state: str) -> str:
    """Return the folder of a path. Raises if its parent is missing, or if file names collide."""
    folder, file = os.path.split(path)
    if os.path.split(state)[0]:
        raise GraphError(f"'latest_filename' must not contain path components: {state!r}")
    if file == state:
        raise GraphError(f"'latest_filename' collides with 'save_path': {state!r} and {path!r}")
    if not file:
        raise GraphError(f"save_path must name a file, not only the folder {path!r}")
    if not os.path.isdir(os.path.dirname(os.path.abspath(folder))):
        raise GraphError(f"Parent directory of {path} doesn't exist, can't save.")
    return folder
