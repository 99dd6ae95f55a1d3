"""`host_call`: code outside of regrad (NumPy, SciPy, a simulator) with a custom gradient.

The code runs as the kernel of one op: a plain call in eager mode, `jax.pure_callback` in a trace.
`custom_grad` adds the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from regrad.autodiff.custom import custom_grad
from regrad.autodiff.gradients import callable_or_raise
from regrad.core import containers, dispatch
from regrad.core.backends import BACKENDS, JAX, backend_of, has_values, is_traced, numpy_dtype
from regrad.core.pytrees import NAMESPACE
from regrad.core.registry import Input, Op
from regrad.core.rule import place
from regrad.core.signatures import declared, helpful
from regrad.core.tape import CUT
from regrad.core.tensor import Tensor, read_only
from regrad.errors import ArgumentError, DTypeError, GradientError, ShapeError, TraceError, kind
from regrad.shapes.table import Spec, form

if TYPE_CHECKING:
    from regrad.core.backends import Array, Namespace

METHODS = (  # of `jax.pure_callback`
    "sequential", "sequential_unrolled", "expand_dims", "broadcast_all", "legacy_vectorized",
)  # fmt: skip


@helpful("host_call")
def host_call(
    f: Callable[..., Any],
    *args: Any,
    out: Any,
    gradient: Callable[..., Any] | None = None,
    vmap_method: str = "sequential",
) -> Any:
    """Return `f(*args)`, computed by code outside of regrad: NumPy, SciPy, a simulator.

    Args:
        f: A function without side effects. It receives the Tensors in `args` as NumPy arrays, and
            returns NumPy arrays in the structure of `out`.
        *args: Tensors, arrays and containers of them. f receives other values unchanged.
        out: The shape and dtype of the result: a Tensor, an array, a `regrad.extend.Spec`, a
            `jax.ShapeDtypeStruct`, or a container of them. A function is called with `args` and
            returns one of these.
        gradient: A function `(dy, *args)` of Tensors, written with regrad's functions. It returns
            gradients in the form that `custom_grad` describes. A keyword-only parameter `y`
            receives the result. If the gradient also needs outside code, call the code by
            `host_call`.
        vmap_method: The argument of `jax.pure_callback`: how f runs under `vmap` of JAX data.
            "sequential" calls f for each example. With "expand_dims" or "broadcast_all", f
            receives all examples at once, along additional leading axes. (For data of NumPy and
            PyTorch, `vmap` calls f for each example.)

    Returns:
        The result of f as Tensors.

    In eager mode, `host_call` calls f, and exceptions of f propagate unchanged. Under `jit`, the
    compiled program calls f through `jax.pure_callback`, and the error of an exception quotes the
    traceback. In graphs, f runs when the graph runs. Derivatives of a higher order differentiate
    `gradient`. A derivative through a `host_call` without `gradient` raises GradientError.

    Raises:
        ArgumentError: f is not callable, no argument holds a Tensor, or f does not return arrays in
            the structure of out.
        ShapeError, DTypeError: f returns an array of another shape or dtype.
        GradientError: The call has no gradient, or the gradient reads values of Tensors that are
            being differentiated.

    Source: `jax.pure_callback`.

    >>> import numpy as np
    >>> import regrad as rg
    >>> def sine(x):
    ...     return rg.host_call(np.sin, x, out=x, gradient=lambda dy, x: dy * cosine(x))
    >>> def cosine(x):
    ...     return rg.host_call(np.cos, x, out=x, gradient=lambda dy, x: -dy * sine(x))
    >>> rg.jit(rg.grad(sine))(0.0).item(), rg.grad(rg.grad(rg.grad(sine)))(0.0).item()
    (1.0, -1.0)
    """
    callable_or_raise(f, "host_call")
    if gradient is not None:
        callable_or_raise(gradient, "host_call(gradient=…)")
    if vmap_method not in METHODS:
        raise ArgumentError(
            f"host_call: vmap_method must be one of {', '.join(METHODS)}; got {vmap_method!r}"
        )

    def called(*args: Any, save: object) -> tuple[Any, Callable[[Any], Any]]:
        y = _run(f, args, out(*args) if callable(out) else out, vmap_method)
        pull: Any = lambda dy: _pull(f, gradient, dy, y, args)  # noqa: E731
        pull.__wrapped__ = gradient or f  # for messages
        return y, pull

    # For messages: the name and the place of f, and the signature of `called`.
    named: Any = called
    named.__signature__ = signature(called)
    named.__name__, named.__wrapped__ = getattr(f, "__name__", type(f).__name__), f
    return custom_grad(named)(*args)


def _run(f: Callable[..., Any], args: tuple[Any, ...], out: Any, vmap_method: str) -> Any:
    """Run the op of a host call on the Tensors in `args`."""
    import optree

    given = containers.Leaves(args, Tensor)
    if not given.arrays:
        raise ArgumentError(
            f"host_call: the arguments of {place(f)} hold no Tensor or array; call f itself"
        )
    specs, structure = optree.tree_flatten(out, is_leaf=_is_spec, namespace=NAMESPACE)
    for spec in specs:
        if not _is_spec(spec):
            raise ArgumentError(
                "host_call: out must hold Tensors, arrays or Specs (with a shape and a dtype), got "
                f"{kind(spec)}. Write out=regrad.extend.Spec((3,), 'float64')."
            )
    specs = [dispatch.lift(spec)._data if dispatch.is_tensor(spec) else spec for spec in specs]
    attrs = {
        "code": HostCode(f, given.close, structure, vmap_method),
        "shapes": tuple([tuple(spec.shape) for spec in specs]),
        "dtypes": tuple([numpy_dtype(spec.dtype) for spec in specs]),
    }
    xs = tuple(given.arrays)
    return structure.unflatten(list(dispatch.run(HOST, xs, attrs, (tuple(range(len(xs))),))))


def _is_spec(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _pull(f: Any, gradient: Any, dy: Any, y: Any, args: Sequence[Any]) -> Any:
    """Return the answer of the gradient function."""
    if gradient is None:
        raise GradientError(
            f"host_call: {place(f)} has no gradient. Pass gradient=…, a function (dy, *args) of "
            "regrad's functions, or wrap the arguments in stop_gradient."
        )
    takes_y = any(p.name == "y" and p.kind is p.KEYWORD_ONLY for p in declared(gradient) or ())
    try:
        return gradient(dy, *args, **({"y": y} if takes_y else {}))
    except (GradientError, TraceError) as error:
        raise type(error)(
            f"host_call: the gradient of {place(f)}, {place(gradient)}, raised: {error} If this "
            "gradient calls outside code, it must do so by host_call(…, out=…)."
        ) from error


# An error that passes through a frame of a module that is not regrad's is an error of the caller,
# which keeps its type. f may be a function of SciPy, so this frame has another module.
_called = FunctionType((lambda f, args: f(*args)).__code__, {"__name__": "host code"})


@dataclass(eq=False, repr=False)
class HostCode:
    """A function of the user as a function of flat NumPy arrays, which checks its results."""

    f: Callable[..., Any]
    close: Callable[..., Any]
    structure: Any  # of `out`
    vmap_method: str

    def __repr__(self) -> str:
        return place(self.f)

    def __call__(
        self, arrays: Sequence[np.ndarray], shapes: Sequence[Any], dtypes: Sequence[np.dtype]
    ) -> list[np.ndarray]:
        """Return the results of f, which must have these shapes and dtypes."""
        result = _called(self.f, self.close(map(read_only, arrays)))
        try:
            ys = self.structure.flatten_up_to(result)
        except (ValueError, TypeError) as error:
            raise ArgumentError(
                f"host_call: {self} returned another structure than out: {error}"
            ) from None
        return [
            self._checked(y, shape, dtype, f"result {i} of {self}" if len(ys) > 1 else str(self))
            for i, (y, shape, dtype) in enumerate(zip(ys, shapes, dtypes, strict=True))
        ]

    def _checked(self, y: Any, shape: Any, dtype: np.dtype, name: str) -> np.ndarray:
        expected = f"expected an array of {dtype} {tuple(shape)}"
        if type(y) not in dispatch.NUMBERS and not hasattr(y, "__array__"):
            raise ArgumentError(f"host_call: {name} returned {kind(y)}, {expected}, as in out")
        array = np.array(y, dtype if type(y) in dispatch.NUMBERS else None)
        got = f"host_call: {name} returned {array.dtype} {array.shape}, {expected}, as in out"
        if array.shape != tuple(shape):
            raise ShapeError(got)
        if array.dtype != dtype:
            raise DTypeError(f"{got}. Return y.astype({str(dtype)!r}), or change out.")
        return array

    def in_program(
        self, shapes: Sequence[Any], dtypes: Sequence[np.dtype], ranks: Sequence[int],
        *arrays: Array,
    ) -> list[np.ndarray]:  # fmt: skip
        """Run as a callback of JAX, which may add leading axes (see `vmap_method`)."""
        values = [np.asarray(a) for a in arrays]
        pairs = zip(values, ranks, strict=True)
        added = np.broadcast_shapes(*[a.shape[: a.ndim - rank] for a, rank in pairs])
        ys = self(values, [(*added, *shape) for shape in shapes], dtypes)
        return [y.astype(JAX.held_dtype(y.dtype)) for y in ys]


def _kernel(
    xp: Namespace, xs: Sequence[Array], code: HostCode, shapes: Any, dtypes: Any
) -> tuple[Any, ...]:
    if any(map(is_traced, xs)):
        import jax

        results = [
            jax.ShapeDtypeStruct(shape, JAX.held_dtype(JAX.native_dtype(dtype)))
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        run = partial(code.in_program, shapes, dtypes, [x.ndim for x in xs])
        return tuple(jax.pure_callback(run, results, *xs, vmap_method=code.vmap_method))
    if not all(map(has_values, xs)):
        raise TraceError(
            f"host_call: {code} needs values, which do not exist inside torch.compile and "
            "torch.func. Call it outside of them."
        )
    ys = code([BACKENDS[type(x)].to_numpy(x) for x in xs], shapes, dtypes)
    backend = backend_of(*xs)
    return tuple([backend.from_numpy(y, xs[0]) for y in ys])


HOST = Op(
    "_HostCall", "host_call", _kernel, [Input("xs", "many")], ("code", "shapes", "dtypes"),
    several=True,
)  # fmt: skip
HOST.rule = CUT


@form("_HostCall")
def _specs(arguments: Any, attrs: Any) -> list[Spec]:
    return [Spec(*pair) for pair in zip(attrs["shapes"], attrs["dtypes"], strict=True)]
