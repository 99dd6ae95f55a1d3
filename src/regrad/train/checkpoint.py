"""Checkpoints: the values of Variables in one file in the safetensors format.

Other programs read it too. A dtype that the format's NumPy reader lacks is stored as a view:
complex128 as pairs of float64, others as bytes; a note in the file's metadata says which.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from regrad.errors import ArgumentError, CheckpointError, StateError, kind
from regrad.files import replace_file
from regrad.namespaces import is_traced
from regrad.train.arrays import as_held, is_jax, needed, to_host
from regrad.variable import Variable

Variables = Iterable[Variable] | Mapping[str, Variable]

VIEWED = "regrad.dtypes"  # the key, in the metadata, of the dtypes of what is stored as a view
RESERVED = (VIEWED, "__metadata__")
CODES = {
    "BOOL": "bool", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8",
    "U16": "uint16", "U32": "uint32", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64",
}  # fmt: skip


def save(path: Any, variables: Variables, metadata: Mapping[str, str] | None = None) -> None:
    """Write the values of variables to a file.

    Args:
        path: The file, `model.safetensors` say. If there is one, it stays, whole, until the new
            one is complete.
        variables: Variables, which are stored under their names, or a dict from names of your
            choice. (Default names count the variables of a program; name those that another
            program is to restore.) To go on with training later, save the optimizer's too:
            `[*model, *optimizer.variables]`.
        metadata: Strings to keep beside them, such as `{"epoch": "3"}`; `restore` returns them.

    Sharded arrays are gathered. With several hosts all have to call `save`, and the first one
    writes.

    Raises:
        MissingPackageError: safetensors is not installed.
        ArgumentError: two variables of one name; no variables, or something else.
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
    save_file = needed("safetensors.numpy", "train", "regrad.train.save").save_file
    named = _by_name(variables, "save")
    notes = _notes(metadata or {})
    arrays = {name: to_host(v.value) for name, v in named.items()}
    if viewed := {n: a.dtype.name for n, a in arrays.items() if a.dtype.name not in CODES.values()}:
        notes[VIEWED] = json.dumps(viewed)
    stored = {n: _stored(a, n in viewed) for n, a in arrays.items()}
    _on_first_host(
        any(is_jax(v.value) for v in named.values()),
        lambda: replace_file(os.fspath(path), lambda new: save_file(stored, new, metadata=notes)),
    )


def restore(path: Any, variables: Variables) -> dict[str, str]:
    """Set variables to the values in a file that `save` wrote; returns its metadata.

    Args:
        path: The file.
        variables: As for `save`; the names must be those in the file, all of them.

    Values come back bit for bit. A variable keeps its library, and in JAX its devices and
    sharding. All is checked first: after an error no variable has changed.

    Raises:
        MissingPackageError: safetensors is not installed.
        CheckpointError: the file is damaged; names, shapes or dtypes are not the variables'.
        ArgumentError: two variables of one name; no variables, or something else.
        StateError: called inside a compiled function.
        FileNotFoundError: there is no such file.
    """
    safetensors = needed("safetensors", "train", "regrad.train.restore")
    named = _by_name(variables, "restore")
    try:
        with safetensors.safe_open(os.fspath(path), framework="np") as file:
            notes = dict(file.metadata() or {})
            viewed = json.loads(notes.pop(VIEWED, "{}"))
            _check(path, file, named, viewed)
            arrays = {n: _unstored(file.get_tensor(n), v, n in viewed) for n, v in named.items()}
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"restore: {path} is no safetensors file: {error}") from error
    new = [(v, as_held(arrays[name], v.value)) for name, v in named.items()]
    for variable, value in new:
        variable.assign(value)
    return notes


# -- arrays as the format has them -----------------------------------------------------------------


def _stored(array: np.ndarray, viewed: bool) -> np.ndarray:
    array = np.array(array, order="C", copy=None)  # the format writes the buffer as it lies
    if not viewed:
        return array
    return array[..., None].view(np.float64 if array.dtype == np.complex128 else np.uint8)


def _unstored(array: np.ndarray, v: Variable, viewed: bool) -> np.ndarray:
    return array.view(v.dtype)[..., 0] if viewed else array


def _check(path: Any, file: Any, named: Mapping[str, Variable], viewed: Mapping[str, str]) -> None:
    """Refuse a file that does not fit, naming all that is wrong."""
    found = set(file.keys())
    wrong = [f"{n!r} is not in the file" for n in named if n not in found]
    wrong += [f"{n!r} is in the file, but not among the variables" for n in found - set(named)]
    for name in sorted(found & set(named)):
        part, v = file.get_slice(name), named[name]
        code, shape = part.get_dtype(), tuple(part.get_shape())
        dtype, shape = (
            (viewed[name], shape[:-1]) if name in viewed else (CODES.get(code, code), shape)
        )
        if (dtype, shape) != (v.dtype.name, v.shape):
            wrong.append(f"{name!r} is {dtype} {shape} there, the variable {v.dtype} {v.shape}")
    if wrong:
        raise CheckpointError(
            f"restore: {path} does not fit the variables: {'; '.join(sorted(wrong))}. Nothing was "
            "restored. Give the variables that were saved, or a dict {name in the file: variable}."
        )


# -- writing ---------------------------------------------------------------------------------------


def _on_first_host(shared: bool, write: Callable[[], None]) -> None:
    """Write once, where the hosts share their arrays; the others wait until it is done."""
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
                f"Variables, got {kind(v)}"
            )
        if name in RESERVED:
            raise ArgumentError(f"{api}: {name!r} means something else in the format; rename it")
        if name in named:
            raise ArgumentError(
                f"{api}: two variables are called {name!r}. Give them names of their own (of "
                "optimizers: Optimizer(…, name=…)), or a dict from names to variables."
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
                "save: metadata is a dict from strings to strings (for more, json.dumps), got "
                f"{key!r}: {value!r:.60}"
            )
    return dict(metadata)
