"""`export`: a function with its gradients as a file that needs neither regrad nor its source.

The file has the format of `jax.export`: the program in StableHLO, its vjp, the vjp of the vjp, and
so on up to the requested order. The rules themselves are not in the file. They ran while the
programs were traced, so the file has their operations and not their code. JAX reads a program from
its beginning and ignores the rest, so regrad appends its checksum.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, wraps
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.custom_batching import sequential_vmap

from regrad.autodiff.custom import custom_op
from regrad.autodiff.custom_functions import OpaqueFunction
from regrad.autodiff.gradients import callable_or_raise
from regrad.autodiff.variables import Variable
from regrad.core import containers, dims, dispatch
from regrad.core.backends import JAX, is_array
from regrad.core.containers import replaced
from regrad.core.extras import missing
from regrad.core.files import blaming, file_name, reading, replace_file
from regrad.core.promotion import weak
from regrad.core.rule import place
from regrad.core.sharding import to_jax
from regrad.core.signatures import check_passed
from regrad.core.state import current
from regrad.core.tensor import Tensor, wrap
from regrad.errors import (
    ArgumentError,
    ExportError,
    GradientError,
    RegradError,
    ShapeError,
    kind,
)
from regrad.jax.bridge import from_regrad
from regrad.jax.linear import is_float
from regrad.ops.casting import conj
from regrad.transforms.region import OpenRegion, run_inside

try:
    import flatbuffers  # noqa: F401  (jax.export serializes with it)
    from jax import export as jax_export
except ImportError as error:
    raise missing("flatbuffers", "export", "rg.export", error) from error

# A file is the program, a description in JSON, its length in LENGTH bytes, the SHA-256 of all of
# these, and these last bytes.
MAGIC = b"regrad-export-1\n"
LENGTH, DIGEST = 8, 32
FORM = "program that rg.export wrote"


def export(
    f: Callable[..., Any],
    *args: Any,
    order: int = 1,
    variables: Iterable[Variable] = (),
    shapes: Any = None,
    platforms: Sequence[str] | None = None,
) -> Exported:
    """Compile a function and its gradients into one program that does not need their source.

    Args:
        f: A function of Tensors and containers of them (tuples, lists, dicts), which returns
            Tensors or containers of them.
        *args: Examples of its arguments: Tensors, arrays or numbers, or `jax.ShapeDtypeStruct`.
            Only their shapes and dtypes matter.
        order: The highest order of derivatives in the program, 0 or more. The file grows by about
            the same amount with each order.
        variables: Variables that become arguments of the program: a dict by their names, before the
            other arguments. All other Variables that f reads are constants with their current
            values.
        shapes: Sizes that may differ from call to call, in the notation of
            `jax.export.symbolic_args_specs`: `"batch, 64"` for all arguments, or a container of
            such strings with the structure of args. They apply to args, not to Variables.
        platforms: The platforms on which the program can run, for example `("cpu", "cuda")`. By
            default, the platform on which JAX would run it here.

    Returns an `Exported`, which can be called, differentiated and saved.

    Active overrides and the rules of `custom_grad` apply at every order, as under `jit`. To load
    the program, regrad or plain JAX needs no code of f or of the rules. Overrides no longer apply
    to its ops. In plain JAX:

        program = jax.export.deserialize(bytearray(Path("model.bin").read_bytes()))
        jax.grad(program.call)(x)

    JAX differentiates a loaded program in reverse mode only: `jax.jvp`, `jax.linearize` and
    `jax.vmap` raise an error. JAX promises to load programs for six months after the release that
    made them.

    Raises:
        ArgumentError: f is not callable or assigns to a Variable; an argument is not an array;
            Variables share a name.
        ExportError: The program cannot be serialized, or an op needs a size that is symbolic.
        DTypeError: float64 data without JAX's 64-bit mode.
        MissingPackageError: JAX or flatbuffers is not installed.

    Source: `jax.export`, with its `vjp_order`.

    >>> import regrad as rg
    >>> with rg.gradient_override_map({"Sign": "Identity"}):
    ...     program = rg.export(lambda x: rg.sign(x).sum(), rg.zeros(3))
    >>> rg.grad(program)(rg.tensor([1.0, -2.0, 3.0])).print()
    Tensor
        [1, 1, 1]
    """
    callable_or_raise(f, "export")
    check_passed(f, args, "export(f, *args)")
    order = _checked_order(order)
    variables = tuple(variables)
    specs = _specs(args, shapes)
    name = getattr(f, "__name__", type(f).__name__)
    keys = [[containers.parameter(f, i), _order(arg)] for i, arg in enumerate(args)]
    f = _in_order(f, args)
    if variables:
        specs, f = (_values(variables), *specs), _with_arguments(f, variables)
    about = {
        "name": name,
        "order": order,
        "keys": keys,
        "variables": [v.name for v in variables],
        "regrad": version("regrad"),
        "jax": jax.__version__,
    }
    try:
        program = jax_export.export(jax.jit(from_regrad(f)), platforms=platforms)(*specs)
        serialized = program.serialize(vjp_order=order)
    except Exception as error:
        if (why := _explained(error, name, shapes)) is None:
            raise
        raise why from error
    return Exported(serialized, about)


def eval_shape(f: Callable[..., Any], *args: Any) -> Any:
    """Return the shapes and dtypes of a function's results, without computing them.

    Args:
        f: A function of Tensors and containers of them, which returns Tensors or containers of
            them.
        *args: The arguments of f: Tensors, arrays or numbers, `jax.ShapeDtypeStruct`, and
            containers of these. Only their shapes and dtypes matter.

    Returns a `jax.ShapeDtypeStruct` for each Tensor, in the containers that f returns. f is traced
    once, as in `jit`.

    Raises:
        ArgumentError: f is not callable, or an argument is not an array.
        TraceError: f reads values.
        MissingPackageError: JAX is not installed.

    Source: `jax.eval_shape`.

    >>> import regrad as rg
    >>> rg.eval_shape(lambda x: x @ x.T, rg.zeros((3, 2))).shape
    (3, 3)
    """
    callable_or_raise(f, "eval_shape")
    specs = _specs(args, None, "eval_shape")
    return jax.eval_shape(from_regrad(_in_order(f, args)), *specs)


def _checked_order(order: int) -> int:
    try:
        found = operator.index(order)
    except TypeError:
        found = -1
    if found < 0:
        raise ArgumentError(f"export: expected order to be an integer of 0 or more, got {order!r}")
    return found


def _values(variables: Sequence[Variable]) -> dict[str, Any]:
    """Return the Variables' shapes and dtypes by name."""
    found: dict[str, Any] = {}
    for v in variables:
        if not isinstance(v, Variable):
            raise ArgumentError(f"export: expected variables to be Variables, got {kind(v)}")
        if v.name in found:
            raise ArgumentError(
                f"export: two of the variables are named {v.name!r}, and arguments are identified "
                "by name. Give one of them another name when you create it."
            )
        found[v.name] = _spec(v)
    return found


def _in_order(f: Callable[..., Any], examples: tuple[Any, ...]) -> Callable[..., Any]:
    """Return `f` for arguments whose dicts JAX has sorted by key: f sees the examples' order."""
    _, rebuild, structure = containers.opened(examples, _is_tensor)
    return wraps(f)(lambda *args: f(*rebuild(structure.flatten_up_to(args))))


def _dicts(arg: Any) -> list[dict[Any, Any]]:
    """Return the dicts in an argument whose keys JAX sorts."""
    found: list[Any] = []

    def is_leaf(part: Any) -> bool:
        if type(part) is dict:
            found.append(part)
        return _is_tensor(part)

    jax.tree_util.tree_leaves(arg, is_leaf=is_leaf)
    return found


def _order(arg: Any) -> list[list[int]]:
    """Return the order of the keys of each dict in an argument, as places among the sorted keys."""
    return [list(map(sorted(keys).index, keys)) for keys in _dicts(arg)]


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor | Variable)


def _specs(args: Sequence[Any], shapes: Any, api: str = "export") -> Sequence[Any]:
    """Return the shapes and dtypes of the arguments, with symbols for the sizes that may differ."""
    leaves, structure = jax.tree_util.tree_flatten(tuple(args), is_leaf=_is_tensor)
    specs = jax.tree_util.tree_unflatten(structure, [_spec(leaf, api) for leaf in leaves])
    if shapes is None:
        return specs
    dims.add_open(type(jax_export.symbolic_shape("size")[0]))
    try:
        symbolic = jax_export.symbolic_args_specs(specs, shapes)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"export: shapes do not fit the arguments: {error}") from error
    for spec, leaf in zip(jax.tree_util.tree_leaves(symbolic), leaves, strict=True):
        if not _fits(_spec(leaf).shape, spec.shape):  # (JAX does not compare these)
            raise ArgumentError(
                f"export: shapes do not fit the arguments: {shapes!r} makes {_shape(spec)} of "
                f"{kind(leaf)}"
            )
    return symbolic


def _fits(shape: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether an array of one shape is accepted where another is expected."""
    return len(shape) == len(expected) and all(
        n == m or not isinstance(m, int) for n, m in zip(shape, expected, strict=True)
    )


def _spec(x: Any, api: str = "export") -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if not (_is_tensor(x) or is_array(x) or isinstance(x, bool | int | float | complex)):
        raise ArgumentError(
            f"{api}: expected Tensors, arrays or numbers as arguments, got {kind(x)}. Bind "
            f"anything else to the function: {api}(lambda x: f(x, option), x)."
        )
    x = dispatch.lift(x)
    return jax.ShapeDtypeStruct(x.shape, JAX.native_dtype(x.dtype))


def _with_arguments(f: Callable[..., Any], variables: Sequence[Variable]) -> Callable[..., Any]:
    """Return `f` as a function of the values of Variables, by name, and of its own arguments."""

    @wraps(f)
    def call(values: dict[str, Tensor], *args: Any) -> Any:
        region = OpenRegion("export", {}, {v: values[v.name] for v in variables})
        state = current()
        assert state is not None  # from_regrad runs this in a separate region
        y = run_inside(lambda: _read(f(*args)), region, state.overrides, state.tapes)
        if region.assigned:
            raise ArgumentError(
                f"export: {place(f)} assigns to the Variable {region.assigned[0].name!r}, and an "
                "exported program has no side effects. Return the new value."
            )
        return y

    return call


def _read(value: Any) -> Any:
    """Return a result with the values of Variables in their places."""
    return jax.tree_util.tree_map(
        lambda y: y._read() if isinstance(y, Variable) else y, value, is_leaf=_is_tensor
    )


def _explained(error: Exception, name: str, shapes: Any) -> ExportError | None:
    """Return an error of JAX's in regrad's words, or None if JAX's message is clear by itself."""
    message = str(error).split("\n")[0]
    if shapes is not None:
        return ExportError(
            f"export: {name} cannot be traced with the sizes of shapes={shapes!r}, because an op "
            f"needs a number: {message} Use a number instead of the symbol, or export the "
            "function once for each size."
        )
    if "serializ" in message.lower():
        return ExportError(
            f"export: the program of {name} cannot be serialized: {message} Use tuples, lists and "
            "dicts as containers, and no callbacks into Python."
        )
    return None


# -- what is exported ------------------------------------------------------------------------------


class ExportedProgram:
    """One program of an export, on flat arrays: the function itself, or a vjp of some order.

    `order` is the number of vjps below it. JAX's vjp takes the arguments and a cotangent for each
    result, and returns a cotangent for each argument. For a dtype that is not a float, the
    cotangents have the dtype float0, which holds nothing, and are left out here.
    """

    def __init__(self, exported: jax_export.Exported, name: str, order: int) -> None:
        self.exported = exported
        self.name = name
        self.order = order
        self.taken: list[int] = _places(exported.in_avals)
        self.returned: list[int] = _places(exported.out_avals)

    @cached_property
    def pullback(self) -> ExportedProgram:
        """The program of the gradients."""
        return ExportedProgram(self.exported.vjp(), self.name, self.order - 1)

    @cached_property
    def run(self) -> Callable[..., list[Any]]:
        """The program on JAX arrays, compiled; `vmap` calls it for one example at a time."""

        def call(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            exported = self.exported
            leaves = [
                next(given) if i in self.taken else np.zeros(aval.shape, jax.dtypes.float0)
                for i, aval in enumerate(exported.in_avals)
            ]
            args, kwargs = jax.tree_util.tree_unflatten(exported.in_tree, leaves)
            ys = jax.tree_util.tree_leaves(exported.call(*args, **kwargs))
            return [ys[i] for i in self.returned]

        return jax.jit(sequential_vmap(call))

    @cached_property
    def gradients(self) -> list[int]:
        """Return which inputs have a gradient."""
        avals = self.exported.in_avals
        return [n for n, i in enumerate(self.taken) if is_float(avals[i])]

    @cached_property
    def op(self) -> Callable[..., list[Tensor]]:
        """The program on Tensors, with its vjp as its gradient."""

        def call(*xs: Tensor, save: Any) -> Any:
            save(xs)
            return [wrap(y) for y in self._run([to_jax(x._data) for x in xs])], self._pull

        return custom_op(OpaqueFunction(call))

    def _run(self, arrays: Sequence[Any]) -> list[Any]:
        try:
            return self.run(*arrays)
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            said = str(error).strip().split("\n")[0]
            if isinstance(error, RegradError) or "RESOURCE_EXHAUSTED" in said:
                raise
            # (JAX requires sizes of 1 or more where it has a letter for them.)
            ours = ShapeError if "dimension variable" in said else ExportError
            raise ours(f"the exported {self.name} cannot be run: {said}") from error

    def _pull(self, dys: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Tensor | None]:
        if self.order == 0:
            raise GradientError(
                f"the exported {self.name} has no derivatives of this order. Export it with a "
                "larger order."
            )
        avals = self.exported.out_avals
        floats = [dy for i, dy in zip(self.returned, dys, strict=True) if is_float(avals[i])]
        found = self.pullback.op(*saved, *map(_conjugate, floats))
        return replaced([None] * len(saved), self.gradients, map(_conjugate, found))


def _places(avals: Sequence[Any]) -> list[int]:
    return [i for i, aval in enumerate(avals) if aval.dtype != jax.dtypes.float0]


def _conjugate(dy: Tensor) -> Tensor:
    """Return a gradient in the convention of the other side: JAX's is not conjugated."""
    return conj(dy) if dy.dtype.kind == "c" else dy


class Exported:
    """A compiled function with its gradients, which does not need its source code.

    Made by `export` or `Exported.load`. Call it with Tensors, arrays or numbers, in the containers
    and with the shapes and dtypes of the examples of `export`, with the keys of dicts in the same
    order; it returns Tensors of JAX data. It can be differentiated up to `order`, compiled as part
    of another function, and batched (one example after the other). Overrides no longer apply to its
    ops.

    Attributes:
        name: The name of the function.
        order: The highest order of derivatives in the program.
        variables: The names of the Variables that are arguments, in a dict before the others.
        platforms: The platforms on which it runs.
        program: The `jax.export.Exported`, with its shapes and StableHLO.

    >>> import regrad as rg
    >>> w = rg.Variable(2.0, name="w")
    >>> program = rg.export(lambda x: x * w, rg.scalar(0.0), variables=[w])
    >>> program({"w": w}, 3.0).item()
    6.0
    """

    def __init__(self, serialized: bytes | bytearray, about: dict[str, Any]) -> None:
        self._serialized = bytes(serialized)
        self._about = about
        self.name: str = about["name"]
        self.order: int = about["order"]
        self.variables: list[str] = list(about["variables"])
        self.program: jax_export.Exported = jax_export.deserialize(bytearray(serialized))
        tree = self.program.in_tree
        sorted_by_jax, _ = jax.tree_util.tree_unflatten(tree, [None] * tree.num_leaves)
        # The name and the `_order` of each argument (a file of an older release has none).
        self._keys: list[Any] = about.get("keys") or [
            [f"args[{i}]", _order(arg)]
            for i, arg in enumerate(sorted_by_jax[bool(self.variables) :])
        ]
        self.platforms: tuple[str, ...] = tuple(self.program.platforms)
        self._top = ExportedProgram(self.program, self.name, self.order)

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree_util.tree_flatten((args, {}), is_leaf=_is_tensor)
        if structure != self.program.in_tree:
            raise ArgumentError(
                f"the exported {self.name}: expected arguments of the structure "
                f"{_shown(self.program.in_tree)}, got {_shown(structure)}"
            )
        self._check_order(args[bool(self.variables) :])
        xs = [_taken(x, aval.dtype) for x, aval in zip(leaves, self.program.in_avals, strict=True)]
        self._check(xs)
        ys = iter(self._top.op(*xs))
        return jax.tree_util.tree_unflatten(self.program.out_tree, list(ys))

    def _check_order(self, args: Sequence[Any]) -> None:
        """Raise for dicts whose keys are not in the example's order, which the function may see."""
        for arg, (name, expected) in zip(args, self._keys, strict=True):
            for keys, order in zip(map(list, _dicts(arg)), expected, strict=True):
                if keys != (right := [sorted(keys)[i] for i in order]):
                    raise ArgumentError(
                        f"the exported {self.name}: expected the keys of a dict in {name} in the "
                        f"order of the example, {right}, got {keys}. Build the dict in this "
                        "order, or export the function with an example in the other order."
                    )

    def _check(self, xs: Sequence[Tensor]) -> None:
        for i, (x, aval) in enumerate(zip(xs, self.program.in_avals, strict=True)):
            if x.dtype.name != aval.dtype.name or not _fits(x.shape, aval.shape):
                raise ShapeError(
                    f"the exported {self.name}: expected {aval.dtype.name} of the shape "
                    f"{_shape(aval)} for argument {i}, got {x.dtype.name} of {x.shape}"
                )

    def __repr__(self) -> str:
        takes = ", ".join(f"{a.dtype.name}{_shape(a)}" for a in self.program.in_avals)
        returns = ", ".join(f"{a.dtype.name}{_shape(a)}" for a in self.program.out_avals)
        on = ", ".join(self.platforms)
        return f"<Exported {self.name}: {takes} -> {returns}, order {self.order}, for {on}>"

    def serialize(self) -> bytes:
        """Return the bytes that `save` writes: the program as of `jax.export`, and a checksum."""
        text = json.dumps(self._about, sort_keys=True).encode()
        data = self._serialized + text + len(text).to_bytes(LENGTH, "big")
        return data + hashlib.sha256(data).digest() + MAGIC

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to a file, atomically."""
        replace_file(file_name(path, "Exported.save"), lambda file: file.write(self.serialize()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Exported:
        """Read a program from a file that `save` wrote. No code of the file is run.

        The checksum detects damage. It does not protect against a person who changes a file on
        purpose and corrects the checksum. Load programs only from people whom you trust: JAX
        compiles and runs the content, and its compiler is not hardened against malicious programs.

        Args:
            path: The file.

        Raises:
            ExportError: The file is damaged, or is not a saved program.
            ArgumentError: `path` is not the name of a file.
            FileNotFoundError: There is no file of this name.
        """
        path = file_name(path, "Exported.load")
        with reading(path, FORM, ExportError), open(path, "rb") as file:
            return cls(*_parted(file.read()))

    @classmethod
    def deserialize(cls, data: bytes, name: str = "the data") -> Exported:
        """Read a program from the result of `serialize`."""
        with blaming(name, FORM, ExportError):
            return cls(*_parted(data))


def _parted(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return the program and its description, all of which has been verified."""
    end = len(data) - len(MAGIC) - DIGEST
    if end < LENGTH or not data.endswith(MAGIC):
        raise ValueError(
            "its end is missing, or another program wrote it (read files of jax.export with "
            "jax.export.deserialize)"
        )
    if hashlib.sha256(data[:end]).digest() != data[end : end + DIGEST]:
        raise ValueError("its checksum does not match its contents")
    end -= LENGTH
    start = end - int.from_bytes(data[end : end + LENGTH], "big")
    about = json.loads(data[max(start, 0) : end])
    if not {"name": str, "order": int, "variables": list}.items() <= {
        key: type(value) for key, value in dict(about).items()
    }.items() or not all(isinstance(name, str) for name in about["variables"]):
        raise ValueError("rg.export did not write its description")
    _check_program(jax_export.deserialize(bytearray(data[:start])), about["order"])
    return data[:start], about


def _check_program(program: jax_export.Exported, order: int) -> None:
    """Read all parts of a program, including parts that JAX reads only when they are needed."""
    for tree, avals in (
        (program.in_tree, program.in_avals),
        (program.out_tree, program.out_avals),
    ):
        jax.tree_util.tree_unflatten(tree, avals)
    args, options = jax.tree_util.tree_unflatten(program.in_tree, program.in_avals)
    if options or not isinstance(args, tuple) or not program.platforms:
        raise ValueError("rg.export did not write its program")
    if order:
        _check_program(program.vjp(), order - 1)


def _taken(x: Any, dtype: np.dtype) -> Tensor:
    """Return an argument as a Tensor; a Python number takes the expected dtype, if it may."""
    if type(x) in dispatch.WEAKEST and weak(getattr(x, "example", x), dtype) == dtype:
        return dispatch.as_dtype(x, dtype)
    return dispatch.lift(x)


def _shape(aval: Any) -> str:
    return "(" + ", ".join(map(str, aval.shape)) + ("," if len(aval.shape) == 1 else "") + ")"


def _shown(structure: Any) -> str:
    """Return the structure of positional arguments, with a star for each array."""
    args, _ = jax.tree_util.tree_unflatten(structure, ["*"] * structure.num_leaves)
    return str(args).replace("'*'", "*")
