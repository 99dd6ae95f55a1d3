"""Checkpoints: the values of Variables in one file in the safetensors format.

Other programs can read the file, too. A dtype that the format's NumPy reader does not support is
stored as a view: complex128 as pairs of float64, other dtypes as bytes. A note in the file's
metadata lists the views. The format has no checksums, so two more notes hold checksums: of each
array, and of all other metadata.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import numpy as np

from regrad.autodiff.variables import Variable
from regrad.core.backends import is_traced
from regrad.core.extras import needed
from regrad.core.files import as_bytes, checksum, file_name, reading, replace_file
from regrad.errors import ArgumentError, CheckpointError, StateError, kind
from regrad.train.arrays import as_held, is_jax, to_host

Variables = Iterable[Variable] | Mapping[str, Variable]

VIEWED = "regrad.ops.dtypes"  # the metadata key for the dtypes of arrays stored as views
CHECKSUMS = "regrad.crc32"  # the metadata key for the checksums of the arrays
SEAL = "regrad.crc32.metadata"  # the key for the metadata's checksum; begins with CHECKSUMS
RESERVED = (VIEWED, CHECKSUMS, SEAL, "__metadata__")
CODES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip


def save(
    path: str | os.PathLike[str], variables: Variables, metadata: Mapping[str, str] | None = None
) -> None:
    """Write the values of variables to a file.

    Args:
        path: The file, e.g. `model.safetensors`. An existing file stays intact until the new file
            is complete. The new file gets the old mode. If the path is a symbolic link, `save`
            replaces the target of the link.
        variables: Variables, which are stored under their names, or a dict from names to
            Variables. (Default names count the variables of a program. Set the names of variables
            that another program is to restore.) To continue training later, also save the
            optimizer's variables: `[*model, *optimizer.variables]`.
        metadata: Strings to store, such as `{"epoch": "3"}`. `restore` returns them.

    Sharded arrays are gathered. With several hosts, all hosts must call `save`, and the first host
    writes.

    Raises:
        ArgumentError: two variables have the same name; `variables` is empty or contains other
            values; `path` is not the name of a file.
        CheckpointError: `path` exists and is not a file.
        OSError: the file cannot be written. The old file is unchanged.
        GradientError: a variable is being differentiated.
        StateError: called inside a compiled function.

    Source: safetensors; `tf.train.Saver`.

    >>> import tempfile
    >>> import regrad as rg
    >>> w = rg.Variable([1.0, 2.0], name="w")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.train.save(f"{folder}/model.safetensors", [w], {"epoch": "3"})
    ...     w.assign([0.0, 0.0])
    ...     rg.train.restore(f"{folder}/model.safetensors", [w])
    {'epoch': '3'}
    >>> w.tolist()
    [1.0, 2.0]
    """
    path = file_name(path, "save(path, variables)")
    named = _by_name(variables, "save")
    notes = _notes(metadata or {})
    arrays = {name: to_host(v.value) for name, v in named.items()}
    if viewed := {n: a.dtype.name for n, a in arrays.items() if a.dtype.name not in CODES.values()}:
        notes[VIEWED] = json.dumps(viewed)
    stored = {n: _encode(a, n in viewed) for n, a in arrays.items()}
    shared = any(is_jax(v.value) for v in named.values())
    _on_first_host(shared, lambda: replace_file(path, lambda file: _write(file, stored, notes)))


class Stored(NamedTuple):
    """Shape and dtype of an array in a file.

    >>> import tempfile
    >>> import regrad as rg
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.train.save(f"{folder}/a.safetensors", {"w": rg.Variable(rg.zeros((2, 3)))})
    ...     stored = rg.train.list_variables(f"{folder}/a.safetensors")["w"]
    >>> stored.shape
    (2, 3)
    """

    shape: tuple[int, ...]
    dtype: str


def list_variables(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """Return the names of the arrays in a safetensors file, with their shapes and dtypes.

    Args:
        path: The file.

    `list_variables` reads only the header, so a file of many GB also takes little time.

    Raises:
        MissingPackageError: safetensors is not installed.
        CheckpointError: The file is damaged.
        FileNotFoundError: There is no such file.

    Source: `tf.train.list_variables`.

    >>> import tempfile
    >>> import regrad as rg
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.train.save(f"{folder}/model.safetensors", [rg.Variable([1.0, 2.0], name="w")])
    ...     rg.train.list_variables(f"{folder}/model.safetensors")
    {'w': Stored(shape=(2,), dtype='float32')}
    """
    path = file_name(path, "list_variables(path)")
    with _opened(path, "list_variables") as (file, notes):
        _taken_checksums(notes, set(file.keys()))
        viewed = json.loads(notes.pop(VIEWED, "{}"))
        return {name: _stored(file, name, viewed) for name in sorted(file.keys())}


def restore(
    path: str | os.PathLike[str], variables: Variables, *, strict: bool = True
) -> dict[str, str]:
    """Set variables to the values in a file that `save` wrote, and return its metadata.

    Args:
        path: A file by `save`, or any other file in the safetensors format, e.g. by Hugging Face.
        variables: As for `save`. Their names must be exactly the names in the file.
        strict: False restores only names that are both in the file and among the variables, e.g.
            a model without its optimizer's state, or some layers of a larger model. At least one
            name must be in both. Shapes and dtypes must be equal.

    Values are restored bit-identically. A variable keeps its library, and in JAX its devices and
    sharding. `restore` checks everything first, including checksums if `save` wrote the file. So
    after an error no variable has changed.

    Returns:
        The metadata, a dict of strings.

    Raises:
        MissingPackageError: safetensors is not installed.
        CheckpointError: the file is damaged, or names, shapes or dtypes do not match the variables.
        ArgumentError: two variables have the same name; `variables` is empty or has other values.
        StateError: called inside a compiled function.
        FileNotFoundError: there is no such file.

    >>> import tempfile
    >>> import regrad as rg
    >>> w, other = rg.Variable([1.0, 2.0], name="w"), rg.Variable([0.0, 0.0], name="w")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.train.save(f"{folder}/w.safetensors", [w], {"epoch": "3"})
    ...     rg.train.restore(f"{folder}/w.safetensors", [other])
    {'epoch': '3'}
    >>> other.tolist()
    [1.0, 2.0]
    """
    path = file_name(path, "restore(path, variables)")
    named = _by_name(variables, "restore")
    with _opened(path, "restore") as (file, notes):
        checksums = _taken_checksums(notes, set(file.keys()))
        viewed = json.loads(notes.pop(VIEWED, "{}"))
        if not strict and (both := named.keys() & set(file.keys())):
            named = {name: named[name] for name in named if name in both}
        _check(path, file, named, viewed, strict)
        arrays = {n: _check_sum(n, file.get_tensor(n), checksums) for n in named}
        arrays = {n: _decode(arrays[n], v, n in viewed) for n, v in named.items()}
    new = [(v, as_held(arrays[name], v.value)) for name, v in named.items()]
    for variable, value in new:
        variable.assign(value)
    return notes


@contextmanager
def _opened(path: str, api: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open a file, and yield it with its metadata."""
    safetensors = needed("safetensors", "train", f"regrad.train.{api}")
    with reading(path, "safetensors file"), safetensors.safe_open(path, framework="np") as file:
        yield file, dict(file.metadata() or {})


# -- arrays in the file format ---------------------------------------------------------------------


def _encode(array: np.ndarray, viewed: bool) -> np.ndarray:
    array = np.array(array, order="C", copy=None)  # the format stores the buffer in C order
    if viewed:
        return array[..., None].view(np.float64 if array.dtype == np.complex128 else np.uint8)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _decode(array: np.ndarray, v: Variable, viewed: bool) -> np.ndarray:
    return array.view(v.dtype).reshape(v.shape) if viewed else array


def _write(file: IO[bytes], arrays: Mapping[str, np.ndarray], notes: Mapping[str, str]) -> None:
    """Write the format: the length of the header, the header, and the arrays without gaps.

    (safetensors' own function accepts only a file name, and another program may have turned the
    name into a link.)
    """
    codes = {dtype: code for code, dtype in CODES.items()}
    # the widest dtypes first, so that each array is aligned
    arrays = dict(sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0])))
    header: dict[str, Any] = {"__metadata__": _sealed(notes, arrays)}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        code, shape = codes[array.dtype.name], list(array.shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        file.write(as_bytes(array))


# -- checksums -------------------------------------------------------------------------------------


def _checksum(array: np.ndarray) -> str:
    """Return the checksum of an array, including its dtype and shape."""
    return f"{checksum(array, zlib.crc32(f'{array.dtype} {array.shape}'.encode())):08x}"


def _seal(notes: Mapping[str, str]) -> str:
    return f"{CHECKSUMS}:{zlib.crc32(json.dumps(sorted(notes.items())).encode()):08x}"


def _sealed(notes: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return metadata with the checksums of the arrays and of the metadata."""
    sums = json.dumps({name: _checksum(array) for name, array in arrays.items()})
    notes = {CHECKSUMS: sums, **notes}
    return {**notes, SEAL: _seal(notes)}


def _taken_checksums(notes: dict[str, str], names: set[str]) -> dict[str, str] | None:
    """Remove the checksums from the metadata. Return None if another program wrote the file."""
    if CHECKSUMS not in str(notes):  # any remaining trace suffices, because others may be damaged
        return None
    if notes.pop(SEAL, None) != _seal(notes):
        raise ValueError("the metadata are not those that were saved (checksum)")
    checksums = json.loads(notes.pop(CHECKSUMS, "{}"))
    if checksums.keys() != names:
        raise ValueError("the names of its arrays do not match its checksums")
    return checksums


def _check_sum(name: str, array: np.ndarray, checksums: Mapping[str, str] | None) -> np.ndarray:
    if checksums is not None and checksums[name] != _checksum(array):
        raise ValueError(
            f"the array {name!r} is not the one that was saved (checksum); a program that changes "
            f"arrays on purpose drops the metadata {CHECKSUMS!r} and {SEAL!r}"
        )
    return array


# -- checks of a file ------------------------------------------------------------------------------


def _check(
    path: str | os.PathLike[str],
    file: Any,
    named: Mapping[str, Variable],
    viewed: Mapping[str, str],
    strict: bool,
) -> None:
    """Raise for a file that does not fit. The error lists all differences."""
    found = set(file.keys())
    wrong = [f"{n!r} is not in the file" for n in named if n not in found]
    if strict:
        wrong += [f"{n!r} is in the file, but not among the variables" for n in found - set(named)]
    for name in sorted(found & set(named)):
        v = named[name]
        shape, dtype = _stored(file, name, viewed)
        if (dtype, shape) != (v.dtype.name, v.shape):
            wrong.append(f"{name!r} is {dtype} {shape} there, the variable {v.dtype} {v.shape}")
    if wrong:
        raise CheckpointError(
            f"restore: {path} does not fit the variables: {'; '.join(sorted(wrong))}. Nothing was "
            "restored. Pass the variables that were saved, or a dict {name in the file: variable}; "
            "strict=False restores what is in both."
        )


def _stored(file: Any, name: str, viewed: Mapping[str, str]) -> Stored:
    """Return shape and dtype of an array, also if it is stored as a view."""
    part = file.get_slice(name)
    code: str = part.get_dtype()
    shape = tuple(part.get_shape())
    if name in viewed:
        return Stored(shape[:-1], viewed[name])
    return Stored(shape, CODES.get(code, code))


# -- writing ---------------------------------------------------------------------------------------


def _on_first_host(shared: bool, write: Callable[[], None]) -> None:
    """Write once if hosts share their arrays. The other hosts wait until it is done."""
    if not shared:
        return write()
    import jax
    from jax.experimental.multihost_utils import sync_global_devices

    try:
        if jax.process_index() == 0:
            write()
    finally:
        if jax.process_count() > 1:
            sync_global_devices("regrad.train.save")


# -- checks ----------------------------------------------------------------------------------------


def _by_name(variables: Variables, api: str) -> dict[str, Variable]:
    if isinstance(variables, Mapping):
        items = list(variables.items())
    elif isinstance(variables, Iterable) and not isinstance(variables, Variable):
        items = [(getattr(v, "name", None), v) for v in variables]
    else:
        items = [(None, variables)]
    if not items:
        raise ArgumentError(f"{api}(path, variables): there are no variables")
    named: dict[str, Variable] = {}
    for name, v in items:
        if not isinstance(v, Variable) or not isinstance(name, str):
            raise ArgumentError(
                f"{api}(path, variables) takes a list of Variables, or a dict from names to "
                f"Variables, got {kind(v)}; for a Module pass module.variables"
            )
        if name in RESERVED:
            raise ArgumentError(f"{api}: {name!r} means something else in the format; rename it")
        if name in named:
            raise ArgumentError(
                f"{api}: two variables are called {name!r}. Rename one of them (for "
                "optimizers: Optimizer(…, name=…)), or pass a dict from names to variables."
            )
        if is_traced(v.value._data):
            raise StateError(
                f"{api} inside a compiled function, where the values of {name!r} are not known "
                "yet; call it outside"
            )
        named[name] = v
    return named


def _notes(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str) or key in RESERVED:
            raise ArgumentError(
                "save: metadata must be a dict from strings to strings (for more, json.dumps), got "
                f"{key!r}: {value!r:.60}"
            )
    return dict(metadata)
